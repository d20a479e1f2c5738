"""Boosted trees of scikit-learn and LightGBM: one model per shape of trees and per fold."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any, ClassVar

import numpy as np

from tf_labeldp.boosting._losses import PoissonLoss, ScoreLoss
from tf_labeldp.boosting._trees import Trees

_CATEGORIES = {"cat_smooth": 100.0, "cat_l2": 100.0, "max_cat_threshold": 8}
"""LightGBM's settings of splits by category, which choose among many sets and so fit noise: more
smoothing, and fewer categories on a side, than by default. Chosen on Adult."""
_PATIENCE = 30
"""Rounds without progress on the held-out noisy labels, after which training stops."""


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """The public inputs of all models of one fit."""

    rows: Any  # float32 (n, p), or a CSR matrix
    is_categorical: np.ndarray  # bool (p,)
    loss: ScoreLoss  # in the units of the grower's scores
    targets: np.ndarray  # (n, C), for growers that fit numbers
    weights: np.ndarray | None  # (n,)
    max_trees: int
    min_rows: int  # per leaf
    shrinkage: float  # L2 penalty on leaves, in units of the hessian
    seed: int

    def weights_of(self, rows: np.ndarray) -> np.ndarray | None:
        return None if self.weights is None else self.weights[rows]

    @functools.cached_property
    def lightgbm_settings(self) -> dict[str, Any]:
        return {
            "min_data_in_leaf": self.min_rows,
            "feature_pre_filter": False,  # it fails if it drops all columns
            "force_col_wise": True,
            "deterministic": True,
            "seed": self.seed,
            "verbosity": -1,
            **_CATEGORIES,
        }

    @functools.cached_property
    def binned(self) -> Any:
        """All rows as LightGBM's bins, of which each fold takes a part."""
        import lightgbm

        return lightgbm.Dataset(
            self.rows,
            np.zeros(self.rows.shape[0]),
            categorical_feature=np.flatnonzero(self.is_categorical).tolist(),
            params=self.lightgbm_settings,
        )


class SklearnGrower:
    """Regresses unbiased numbers, the debiased labels, with ``HistGradientBoostingRegressor``.

    A class has one regressor of its probability: the expected debiased label is the probability of
    the true class. That equals the inversion of the channel on predicted noisy labels, and works
    for every channel.
    """

    has_logits: ClassVar[bool] = False

    def grow(
        self, task: Task, leaves: int, rate: float, train: np.ndarray, held_out: np.ndarray
    ) -> list[Any]:
        """Returns one model per output."""
        from sklearn.ensemble import HistGradientBoostingRegressor

        weights = {}
        if task.weights is not None:
            weights = {
                "sample_weight": task.weights[train],
                "sample_weight_val": task.weights[held_out],
            }
        train_rows = task.rows[train]
        # Its binning fails on a column without numbers; a constant column is never split.
        train_rows[:, np.isnan(train_rows).all(axis=0)] = 0.0
        models = []
        for target in task.targets.T:
            model = HistGradientBoostingRegressor(
                loss="poisson" if isinstance(task.loss, PoissonLoss) else "squared_error",
                learning_rate=rate,
                max_iter=task.max_trees,
                max_leaf_nodes=leaves,
                min_samples_leaf=task.min_rows,
                l2_regularization=task.shrinkage,
                categorical_features=task.is_categorical,
                early_stopping=True,
                n_iter_no_change=_PATIENCE,
                random_state=task.seed,
            )
            held_out_rows = {"X_val": task.rows[held_out], "y_val": target[held_out]}
            model.fit(train_rows, target[train], **held_out_rows, **weights)
            models.append(model)
        return models

    def scores(self, models: list[Any], rows: Any, start: np.ndarray) -> np.ndarray:
        """Returns the models' scores (m, C) of rows (m, p), minus the start."""
        found = np.stack([model.predict(rows) for model in models], axis=1)
        return (np.log(found) if models[0].loss == "poisson" else found) - start

    def num_trees(self, models: list[Any]) -> int:
        """Returns the number of trees."""
        return sum(model.n_iter_ for model in models)

    def trees(self, models: list[Any], start: np.ndarray) -> list[Trees]:
        """Returns the trees of each output, whose sums are ``scores`` minus ``start``."""
        found = map(Trees.from_hist_gradient_boosting, models)
        return [
            dataclasses.replace(trees, baseline=trees.baseline - first)
            for trees, first in zip(found, start, strict=True)
        ]


class LightGBMGrower:
    """Boosts the scores of a loss, whose derivatives are LightGBM's objective."""

    has_logits: ClassVar[bool] = True

    def grow(
        self, task: Task, leaves: int, rate: float, train: np.ndarray, held_out: np.ndarray
    ) -> list[Any]:
        """Returns one model for all outputs."""
        import lightgbm

        def weighted(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
            if task.weights is None:
                return values
            return values * task.weights[rows].reshape(-1, *[1] * (values.ndim - 1))

        outputs = task.loss.start.size
        losses = {"train": task.loss.take(train), "held_out": task.loss.take(held_out)}

        def objective(scores: np.ndarray, _: Any) -> tuple[np.ndarray, np.ndarray]:
            scores = scores.reshape(-1, outputs) + task.loss.start
            pair = [weighted(part, train) for part in losses["train"].derivatives(scores)]
            gradient, hessian = pair if outputs > 1 else (part[:, 0] for part in pair)
            return gradient, hessian

        def held_out_loss(scores: np.ndarray, _: Any) -> tuple[str, float, bool]:
            scores = scores.reshape(-1, outputs) + task.loss.start
            values = weighted(losses["held_out"].values(scores), held_out)
            return "loss", float(values.mean()), False

        settings = {
            "objective": objective,
            "metric": "None",
            "num_class": outputs,
            "num_leaves": leaves,
            "learning_rate": rate,
            "lambda_l2": task.shrinkage,
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightgbm")
            booster = lightgbm.train(
                settings | task.lightgbm_settings,
                task.binned.subset(train),
                task.max_trees,
                valid_sets=[task.binned.subset(held_out)],
                feval=held_out_loss,
                callbacks=[lightgbm.early_stopping(_PATIENCE, verbose=False)],
            )
        return [booster]

    def scores(self, models: list[Any], rows: Any, start: np.ndarray) -> np.ndarray:
        """Returns the model's scores (m, C) of rows (m, p), minus the start."""
        del start
        scores = models[0].predict(rows, raw_score=True)
        return scores.reshape(rows.shape[0], -1)

    def num_trees(self, models: list[Any]) -> int:
        """Returns the number of trees up to the best iteration."""
        return models[0].best_iteration * models[0].num_model_per_iteration()

    def trees(self, models: list[Any], start: np.ndarray) -> list[Trees]:
        """Returns the trees of all outputs."""
        del start
        return [Trees.from_lightgbm(models[0])]
