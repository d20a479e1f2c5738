"""Trees of several shapes, grown on folds, and weighted by held-out noisy labels."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._progress import Progress
from tf_labeldp.boosting._lightgbm import Fold, Grown, TreeInputs
from tf_labeldp.boosting._losses import ScoreLoss
from tf_labeldp.boosting._trees import Trees

_SHAPES = ((3, 0.1), (15, 0.05))
"""Leaves per tree, and the learning rate: additive trees are best at small epsilon, and trees with
interactions at large epsilon. Chosen on Adult; the noisy labels weigh them."""
_FOLDS = 5
"""Parts of the examples; each model stops early by the noisy labels of one part."""
_ROWS_FOR_ALL_FOLDS = 200_000
"""Up to this many examples, each part is held out once; with five times as many, one part is."""
_STACKING_PENALTY = 3.0
"""One over the prior standard deviation of the weights of the shapes, around equal weights."""
_CLEAR = 2.0
"""Standard errors by which trees must beat the class shares on held-out noisy labels."""


@dataclasses.dataclass(frozen=True, eq=False)
class Ensemble:
    """Models by shape and fold; scores are their means over folds, weighted by shape."""

    models: list[list[Grown]]
    shape_weights: np.ndarray
    constant: np.ndarray  # (C,)
    gain: float  # of the loss per held-out noisy label
    gain_stddev: float

    @classmethod
    def grow(cls, inputs: TreeInputs) -> Ensemble:
        models, held_out, scores = _grown(inputs)
        target = inputs.target
        loss, weights = target.loss.take(held_out), inputs.weights_of(held_out)
        shape_weights, shift, gain, stddev = _stacked(loss, scores, weights, target.variance)
        return cls(models, shape_weights, target.constant + shift, gain, stddev)

    @property
    def num_trees(self) -> int:
        return sum(model.num_trees for models in self.models for model in models)

    def scores(self, rows: Any, start: np.ndarray | None) -> np.ndarray:
        """Returns the scores (m, C) of rows (m, p), added to those of a start."""
        total = np.zeros((rows.shape[0], self.constant.size)) + self.constant
        if start is not None:
            total += start
        for model, weight in self._weighted():
            total += weight * model.scores(rows)
        return total

    def trees(self) -> Trees:
        """Returns all trees as one sum."""
        parts = [(model.trees, weight) for model, weight in self._weighted()]
        return Trees.weighted_sum(parts, self.constant)

    def importances(self) -> np.ndarray:
        """Returns the share of each column in the gain of all splits, (p,)."""
        gains = np.sum([weight * model.gains() for model, weight in self._weighted()], axis=0)
        return gains / max(float(gains.sum()), 1e-300)

    def warn_if_unclear(self) -> None:
        if self.gain < _CLEAR * self.gain_stddev:
            _validate.warn(
                f"on held-out noisy labels, trees gain {self.gain:.2g} nats per label over the "
                f"class shares, with a standard error of {self.gain_stddev:.2g}: they learnt "
                "hardly more than noise. Use a larger epsilon, more examples, or a head of one "
                "release."
            )

    def _weighted(self) -> list[tuple[Grown, float]]:
        """Returns each model with its weight in the scores."""
        return [
            (model, weight / len(models))
            for weight, models in zip(self.shape_weights, self.models, strict=True)
            for model in models
        ]


def _grown(inputs: TreeInputs) -> tuple[list[list[Grown]], np.ndarray, np.ndarray]:
    """Returns models by shape and fold, the held-out rows, and their scores (shapes, m, C)."""
    # LightGBM refuses a part whose weights are all zero.
    used = np.arange(inputs.table.rows.shape[0])
    used = used if inputs.weights is None else used[inputs.weights > 0.0]
    size = len(used)
    parts = np.array_split(np.random.default_rng(inputs.seed).permutation(used), _FOLDS)
    parts = parts[: int(np.clip(_FOLDS * _ROWS_FOR_ALL_FOLDS // size, 1, _FOLDS))]
    members: list[list[Grown]] = [[] for _ in _SHAPES]
    scores: list[list[np.ndarray]] = [[] for _ in _SHAPES]
    with Progress("Growing trees", len(parts) * len(_SHAPES) * size) as progress:
        for part in parts:
            held_out = np.sort(part)
            fold = Fold(inputs, np.setdiff1d(used, held_out, assume_unique=True), held_out)
            for shape, (leaves, rate) in enumerate(_SHAPES):
                members[shape].append(fold.grow(leaves, rate))
                scores[shape].append(members[shape][-1].scores(inputs.table.rows[held_out]))
                progress.advance(size)
    rows = np.concatenate([np.sort(part) for part in parts])
    return members, rows, np.stack([np.concatenate(found) for found in scores])


def _stacked(
    loss: ScoreLoss, scores: np.ndarray, row_weights: np.ndarray | None, variance: float
) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Returns weights of the shapes, a shift (C,), the gain per row, and its standard error.

    The weighted sum of the shapes' scores minimises the loss on held-out rows, with normal priors:
    equal weights, and a shift of the start by about the standard deviation of labels.
    """
    from scipy import optimize

    number, size, outputs = scores.shape
    row_weights = np.ones(size) if row_weights is None else row_weights
    dispersion = loss.dispersion()

    def total(parameters: np.ndarray) -> np.ndarray:
        return loss.start + parameters[number:] + np.tensordot(parameters[:number], scores, 1)

    def objective(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        found, away = total(parameters), (parameters - begin) * scale
        slopes = loss.derivatives(found)[0] * row_weights[:, np.newaxis] / dispersion
        value = float(row_weights @ loss.values(found)) / dispersion
        gradient = np.concatenate([np.tensordot(scores, slopes, 2), slopes.sum(axis=0)])
        return value + 0.5 * float(away @ away), gradient + scale * away

    scale = np.repeat([_STACKING_PENALTY, variance**-0.5], [number, outputs])
    begin = np.concatenate([np.full(number, 1.0 / number), np.zeros(outputs)])
    bounds = [(0.0, 2.0)] * number + [(None, None)] * outputs
    found = optimize.minimize(objective, begin, jac=True, bounds=bounds, method="L-BFGS-B").x
    gains = row_weights * (loss.values(loss.start) - loss.values(total(found)))
    error = float(gains.std()) / math.sqrt(size)
    return found[:number], found[number:], float(gains.mean()), error
