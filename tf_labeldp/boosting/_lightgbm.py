"""Boosted trees of LightGBM: one model per shape of trees and per fold."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any

import numpy as np

from tf_labeldp.boosting._coded_table import CodedTable
from tf_labeldp.boosting._targets import Target
from tf_labeldp.boosting._trees import Trees

_CATEGORIES = {"cat_smooth": 100.0, "cat_l2": 100.0, "max_cat_threshold": 8}
"""LightGBM's settings of splits by category, which choose among many sets and so fit noise: more
smoothing, and fewer categories on a side, than by default. Chosen on Adult."""
_PATIENCE = 30
"""Rounds without progress on the held-out noisy labels, after which training stops."""
_SHRINKAGE = 3.0
"""L2 penalty on leaves, in information: the step of a leaf worth 3 true labels is halved."""


def load() -> Any:
    """Returns the package ``lightgbm``, or raises an ``ImportError`` that names what it lacks."""
    try:
        import lightgbm
    except (ImportError, OSError) as error:  # OSError: its library lacks OpenMP
        raise ImportError(
            f"PrivateBoosting expected LightGBM, which could not be loaded ({error}). Its wheel "
            "needs OpenMP of the system: apt-get install libgomp1 on Debian and Ubuntu, dnf "
            "install libgomp on Fedora, brew install libomp on macOS. Nothing was drawn."
        ) from error
    return lightgbm


def is_available() -> bool:
    """Returns whether LightGBM can be loaded."""
    try:
        load()
    except ImportError:
        return False
    return True


class Grown:
    """A LightGBM model, pickled as text, which predicts on machines without LightGBM, too."""

    def __init__(self, text: str) -> None:
        self.text = text

    @functools.cached_property
    def booster(self) -> Any:
        return load().Booster(model_str=self.text)

    @functools.cached_property
    def trees(self) -> Trees:
        return Trees.from_lightgbm(self.text)

    @property
    def num_trees(self) -> int:
        return self.text.count("\nTree=")

    def scores(self, rows: Any) -> np.ndarray:
        """Returns the scores (m, C) of rows (m, p), which are added to the start of the loss."""
        if is_available() and rows.shape[0]:
            return self.booster.predict(rows, raw_score=True).reshape(rows.shape[0], -1)
        return self.trees.scores(rows)

    def gains(self) -> np.ndarray:
        """Returns the gain of all splits by each column, (p,)."""
        return self.booster.feature_importance("gain")

    def __getstate__(self) -> dict[str, str]:
        return {"text": self.text}


@dataclasses.dataclass(frozen=True, eq=False)
class TreeInputs:
    """The public inputs of all models of one fit."""

    table: CodedTable
    target: Target
    weights: np.ndarray | None  # (n,)
    max_trees: int
    seed: int  # below 2**31, as LightGBM needs
    monotonic: list[int] | None = None  # -1, 0 or 1 for each column
    threads: int = 0  # all cores

    def weights_of(self, rows: np.ndarray) -> np.ndarray | None:
        return None if self.weights is None else self.weights[rows]

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        return {
            "min_data_in_leaf": self.table.min_rows,
            "feature_pre_filter": False,  # it fails if it drops all columns
            "force_col_wise": True,
            # A stored draw gives the same trees again on any number of cores.
            "deterministic": True,
            "seed": self.seed,
            "num_threads": self.threads,
            "monotone_constraints": self.monotonic,
            "verbosity": -1,
            **_CATEGORIES,
        }

    @functools.cached_property
    def binned(self) -> Any:
        """All rows as LightGBM's bins, of which each fold takes a part."""
        return load().Dataset(
            self.table.rows,
            np.zeros(self.table.rows.shape[0]),
            categorical_feature=np.flatnonzero(self.table.is_code).tolist(),
            params=self.settings,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Fold:
    """The rows on which trees grow, and other rows, whose loss ends their growth."""

    inputs: TreeInputs
    train: np.ndarray
    held_out: np.ndarray

    def grow(self, leaves: int, rate: float) -> Grown:
        """Returns trees that boost the scores of the loss, whose derivatives are the objective."""
        inputs, lightgbm, target = self.inputs, load(), self.inputs.target
        outputs = target.loss.start.shape[1]
        loss, other_loss = target.loss.take(self.train), target.loss.take(self.held_out)

        def weighted(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
            if (weights := inputs.weights_of(rows)) is None:
                return values
            return values * weights.reshape(-1, *[1] * (values.ndim - 1))

        def objective(scores: np.ndarray, _: Any) -> tuple[np.ndarray, np.ndarray]:
            scores = scores.reshape(-1, outputs) + loss.start
            pair = [weighted(part, self.train) for part in loss.derivatives(scores)]
            gradient, hessian = pair if outputs > 1 else (part[:, 0] for part in pair)
            return gradient, hessian

        def held_out_loss(scores: np.ndarray, _: Any) -> tuple[str, float, bool]:
            scores = scores.reshape(-1, outputs) + other_loss.start
            values = weighted(other_loss.values(scores), self.held_out)
            return "loss", float(values.mean()), False

        settings = {
            "objective": objective,
            "metric": "None",
            "num_class": outputs,
            "num_leaves": leaves,
            "learning_rate": rate,
            "lambda_l2": _SHRINKAGE * target.loss.dispersion() / target.variance,
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightgbm")
            booster = lightgbm.train(
                settings | inputs.settings,
                inputs.binned.subset(self.train),
                inputs.max_trees,
                valid_sets=[inputs.binned.subset(self.held_out)],
                feval=held_out_loss,
                callbacks=[lightgbm.early_stopping(_PATIENCE, verbose=False)],
            )
        return Grown(booster.model_to_string())  # up to the best round
