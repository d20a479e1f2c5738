"""Targets of trees from noisy labels: a loss of scores, and numbers to regress."""

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
    numbers: np.ndarray  # (n, C), for growers that fit numbers
    variance: float  # of true labels, in squared units of the scores
    classes: np.ndarray | None = None  # class values (K,)
    shares: np.ndarray | None = None  # (K,), estimated class shares
    floor: float = 0.0  # the least probability of a class
    label_range: tuple[float, float] | None = None


def target_of(noisy: NoisyLabels, weights: np.ndarray | None, loss: str, logits: bool) -> Target:
    """Returns the target of trees whose scores of classes are logits, or else probabilities."""
    numbers = noisy.debiased()
    if numbers.ndim == 1:
        mean = float(np.average(numbers, weights=weights))
        return _of_numbers(noisy, numbers[:, np.newaxis], mean, loss, logits)
    counts = None if weights is None else weights * (len(noisy) / weights.sum())
    shares, floor = class_prior(numbers, counts)
    number = shares.size
    # One score is enough for two classes.
    numbers = numbers[:, 1:] if number == 2 else numbers
    classes = np.arange(number) if noisy.classes is None else class_array(noisy.classes)
    if logits:
        mechanism: Any = noisy.mechanism
        is_fixed = isinstance(mechanism, ClassificationMechanism) and not mechanism.uses_priors
        channel = mechanism.transition_matrix() if is_fixed else None
        found = likelihoods(mechanism, noisy.values, noisy.priors)
        if number == 2:
            start = np.log(shares[1:] / shares[:1])
            channel_loss: ScoreLoss = BinaryChannelLoss(start, found, channel)
        else:
            channel_loss = ChannelLoss(np.log(shares), found, channel)
        return Target(channel_loss, numbers, 1.0, classes, shares, floor)
    own = shares[-numbers.shape[1] :]
    variance = float((own * (1.0 - own)).mean())
    return Target(SquaredLoss(own, numbers), numbers, variance, classes, shares, floor)


def _of_numbers(
    noisy: NoisyLabels, numbers: np.ndarray, mean: float, loss: str, logits: bool
) -> Target:
    mechanism: Any = noisy.mechanism
    low, high = mechanism.label_range()
    check_range(loss, (low, high))
    if loss == "squared_error":
        start = np.clip([mean], low, high)
        variance = _variance(noisy, high - low)
        squared = SquaredLoss(start, numbers)
        return Target(squared, numbers, variance, label_range=(low, high))
    log_rate = math.log(min(max(mean, _LEAST_RATE * high), high))
    poisson = PoissonLoss(np.array([log_rate]), numbers, high)
    if not logits:  # scikit-learn takes no counts below zero
        numbers = np.maximum(noisy.posterior(), 0.0)[:, np.newaxis]
    return Target(poisson, numbers, 1.0, label_range=(low, high))


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
