"""Targets of trees from noisy labels: a loss of scores."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from tf_labeldp._progress import Argument, Message
from tf_labeldp.boosting._losses import (
    BinaryChannelLoss,
    ChannelLoss,
    PoissonLoss,
    ScoreLoss,
    SquaredLoss,
)
from tf_labeldp.estimation import likelihoods
from tf_labeldp.estimation.priors import class_prior
from tf_labeldp.mechanisms import ClassificationMechanism
from tf_labeldp.vault import LabelKind, NoisyLabels, Numbers

_LEAST_RATE = 1e-6
"""The least mean of counts, as a share of the largest: noise can push the mean below zero."""


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    loss: ScoreLoss
    constant: np.ndarray  # (C,), the start of the loss without a model
    variance: float  # of true labels, in squared units of the scores
    shares: np.ndarray | None = None  # (K,), estimated class shares


@dataclasses.dataclass(frozen=True, eq=False)
class TableLabels:
    """The rows of a table that have a noisy label.

    Attributes:
        noisy: their labels.
        kind: the kind of the true labels.
        places: their places in the table, or a slice.
        weights: their public weights (n,), or None.
    """

    noisy: NoisyLabels
    kind: LabelKind
    places: Any
    weights: np.ndarray | None

    @functools.cached_property
    def debiased(self) -> np.ndarray:
        return self.noisy.debiased()

    def target(self, loss: str, start: np.ndarray | None) -> Target:
        """Returns the target of trees, whose scores of classes are logits.

        ``start`` has the scores (n, C) of a model where boosting starts.
        """
        noisy, weights, size = self.noisy, self.weights, len(self.noisy)
        if isinstance(self.kind, Numbers):
            return self._target_of_numbers(self.kind, loss, start)
        counts = None if weights is None else weights * (size / weights.sum())
        shares, _ = class_prior(self.debiased, counts)
        mechanism: Any = noisy.mechanism
        is_fixed = isinstance(mechanism, ClassificationMechanism) and not mechanism.uses_priors
        channel = mechanism.transition_matrix() if is_fixed else None
        found = likelihoods(mechanism, noisy.values, noisy.priors)
        # One score is enough for two classes.
        is_binary = shares.size == 2
        constant = np.log(shares[1:] / shares[:1]) if is_binary else np.log(shares)
        constant, scores = _started(constant, size, start)
        losses = BinaryChannelLoss if is_binary else ChannelLoss
        return Target(losses(scores, found, channel), constant, 1.0, shares)

    def _target_of_numbers(self, kind: Numbers, loss: str, start: np.ndarray | None) -> Target:
        check_loss(loss, kind)
        numbers = self.debiased[:, np.newaxis]
        mean = np.average(numbers, axis=0, weights=self.weights)
        low, high = kind.label_range
        if loss == "squared_error":
            constant, scores = _started(np.clip(mean, low, high), len(numbers), start)
            squared, variance = SquaredLoss(scores, numbers), _variance(self.noisy)
            return Target(squared, constant, variance)
        constant = np.log(np.clip(mean, _LEAST_RATE * high, high))
        constant, scores = _started(constant, len(numbers), start)
        poisson = PoissonLoss(scores, numbers, high)
        return Target(poisson, constant, 1.0)


def _started(
    constant: np.ndarray, size: int, start: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the constant (C,) next to a model, and the scores (n, C) where boosting starts."""
    if start is None:
        return constant, np.broadcast_to(constant, (size, constant.size))
    return np.zeros(constant.size), start


def check_loss(loss: str, kind: LabelKind) -> None:
    """Raises if numbers may be below zero and the loss is Poisson's."""
    if loss == "poisson" and isinstance(kind, Numbers) and kind.low < 0.0:
        raise ValueError(
            Message.of(
                Argument("loss", "poisson"),
                f" expected labels of zero or more, got a range from {kind.low:g}. Use ",
                Argument("loss", "squared_error"),
                ". Nothing was drawn.",
            )
        )


def _variance(noisy: NoisyLabels) -> float:
    """Returns the variance of the labels of the draw under its prior, or a uniform one."""
    prior = noisy.priors
    mechanism: Any = noisy.mechanism
    low, high = mechanism.label_range()
    width = high - low
    if prior is None or prior.values is None:
        return width**2 / 12.0
    shares, values = np.ravel(prior.probabilities), np.asarray(prior.values)
    mean = float(shares @ values)
    return max(float(shares @ np.square(values - mean)), 1e-12 * width**2)
