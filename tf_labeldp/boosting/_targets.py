"""Targets of trees from noisy labels: a loss of scores."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

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
from tf_labeldp.vault import NoisyLabels
from tf_labeldp.vault.label_kinds import class_array

_LEAST_RATE = 1e-6
"""The least mean of counts, as a share of the largest: noise can push the mean below zero."""


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    loss: ScoreLoss
    variance: float  # of true labels, in squared units of the scores
    classes: np.ndarray | None = None  # class values (K,)
    shares: np.ndarray | None = None  # (K,), estimated class shares
    label_range: tuple[float, float] | None = None


def target_of(noisy: NoisyLabels, weights: np.ndarray | None, loss: str) -> Target:
    """Returns the target of trees, whose scores of classes are logits."""
    numbers = noisy.debiased()
    if numbers.ndim == 1:
        mean = float(np.average(numbers, weights=weights))
        return _of_numbers(noisy, numbers[:, np.newaxis], mean, loss)
    counts = None if weights is None else weights * (len(noisy) / weights.sum())
    shares, _ = class_prior(numbers, counts)
    classes = np.arange(shares.size) if noisy.classes is None else class_array(noisy.classes)
    mechanism: Any = noisy.mechanism
    is_fixed = isinstance(mechanism, ClassificationMechanism) and not mechanism.uses_priors
    channel = mechanism.transition_matrix() if is_fixed else None
    found = likelihoods(mechanism, noisy.values, noisy.priors)
    # One score is enough for two classes.
    if shares.size == 2:
        of_classes: ScoreLoss = BinaryChannelLoss(np.log(shares[1:] / shares[:1]), found, channel)
    else:
        of_classes = ChannelLoss(np.log(shares), found, channel)
    return Target(of_classes, 1.0, classes, shares)


def _of_numbers(noisy: NoisyLabels, numbers: np.ndarray, mean: float, loss: str) -> Target:
    mechanism: Any = noisy.mechanism
    low, high = mechanism.label_range()
    check_range(loss, (low, high))
    if loss == "squared_error":
        start = np.clip([mean], low, high)
        squared = SquaredLoss(start, numbers)
        return Target(squared, _variance(noisy, high - low), label_range=(low, high))
    log_rate = math.log(min(max(mean, _LEAST_RATE * high), high))
    poisson = PoissonLoss(np.array([log_rate]), numbers, high)
    return Target(poisson, 1.0, label_range=(low, high))


def check_range(loss: str, label_range: tuple[float, float] | None) -> None:
    """Raises if numbers may be below zero and the loss is Poisson's."""
    if loss == "poisson" and label_range is not None and label_range[0] < 0.0:
        raise ValueError(
            f"loss='poisson' expected labels of zero or more, got a range from "
            f"{label_range[0]:g}. Use loss='squared_error'. Nothing was drawn."
        )


def _variance(noisy: NoisyLabels, width: float) -> float:
    """Returns the variance of true labels under the prior of the draw, or a uniform one."""
    prior = noisy.priors
    if prior is None or prior.values is None:
        return width**2 / 12.0
    shares, values = np.ravel(prior.probabilities), np.asarray(prior.values)
    mean = float(shares @ values)
    return max(float(shares @ np.square(values - mean)), 1e-12 * width**2)
