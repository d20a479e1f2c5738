"""Losses of raw scores on noisy labels, with the derivatives that boosting needs."""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import TypeVar

import numpy as np
from scipy import special

_Self = TypeVar("_Self", bound="ScoreLoss")
_Channel = TypeVar("_Channel", bound="ChannelLoss")
_Numbers = TypeVar("_Numbers", bound="NumberLoss")
_LEAST_HESSIAN = 1e-6
"""Keeps a row's curvature above zero where its probability is zero or one."""
_LEAST_DISPERSION = 1e-30
"""Keeps the dispersion above zero where all noisy labels are equal."""
_LEAST = 1e-12
"""The least probability of a noisy label, which bounds its logarithm."""


@dataclasses.dataclass(frozen=True, eq=False)
class ScoreLoss(abc.ABC):
    """A loss of scores (n, C), which boosting starts at ``start``: a constant, or a model's."""

    start: np.ndarray  # (n, C)

    @abc.abstractmethod
    def values(self, scores: np.ndarray) -> np.ndarray:
        """Returns the loss of each row (n,), up to a constant."""

    @abc.abstractmethod
    def derivatives(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns gradient and hessian (n, C); the hessian is above zero."""

    def dispersion(self) -> float:
        """Returns the mean squared gradient over the mean hessian at the start.

        It is about one for a likelihood, and the noise of a label for targets with noise.
        """
        gradient, hessian = self.derivatives(self.start)
        return max(float(np.square(gradient).mean() / hessian.mean()), _LEAST_DISPERSION)

    def take(self: _Self, rows: np.ndarray) -> _Self:
        """Returns the loss of some of the rows."""
        return dataclasses.replace(self, start=self.start[rows])


@dataclasses.dataclass(frozen=True, eq=False)
class ChannelLoss(ScoreLoss):
    """The negative log-likelihood of noisy labels: the channel is inside the loss.

    Scores are logits of the true class, (n, K). With p the softmax and L the likelihoods of a noisy
    label, the loss is ``-log sum_k p_k L_k``, and its gradient is p minus the posterior of the true
    class. The hessian is Fisher's information, ``p_k^2 (sum_z Q_kz^2 / q_z - 1)`` with ``q = p Q``;
    where the channel Q differs between examples, it is the square of the gradient, which has that
    mean.

    Source: the forward correction of Patrini et al. 2017, "Making deep neural networks robust to
    label noise", Theorem 2.
    """

    likelihoods: np.ndarray  # (n, K), up to a factor per row
    channel: np.ndarray | None  # Q (K, outputs), of all rows; None if it differs between rows

    def take(self: _Channel, rows: np.ndarray) -> _Channel:
        return dataclasses.replace(super().take(rows), likelihoods=self.likelihoods[rows])

    def values(self, scores: np.ndarray) -> np.ndarray:
        evidence = np.einsum("nk,nk->n", special.softmax(scores, axis=1), self.likelihoods)
        return -np.log(np.maximum(evidence, _LEAST))

    def derivatives(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p = special.softmax(scores, axis=1)
        joint = p * self.likelihoods
        gradient = p - joint / np.maximum(joint.sum(axis=1, keepdims=True), _LEAST)
        if self.channel is None:
            hessian = np.square(gradient)
        else:
            inverse = 1.0 / np.maximum(p @ self.channel, _LEAST)
            hessian = np.square(p) * (inverse @ np.square(self.channel).T - 1.0)
        return gradient, np.maximum(hessian, _LEAST_HESSIAN)


class BinaryChannelLoss(ChannelLoss):
    """The same for two classes, with one score (n, 1): the log-odds of the second."""

    def values(self, scores: np.ndarray) -> np.ndarray:
        first, second = self.likelihoods.T
        evidence = first + (second - first) * special.expit(scores[:, 0])
        return -np.log(np.maximum(evidence, _LEAST))

    def derivatives(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        first, second = self.likelihoods.T
        p = special.expit(scores[:, 0])
        slope = p * (1.0 - p)
        gradient = slope * (first - second) / np.maximum(first + (second - first) * p, _LEAST)
        if self.channel is None:
            hessian = np.square(gradient)
        else:
            low, high = self.channel
            parts = (
                (b - a) ** 2 / np.maximum(a + (b - a) * p, _LEAST)
                for a, b in zip(low, high, strict=True)
            )
            hessian = np.square(slope) * sum(parts)
        return gradient[:, np.newaxis], np.maximum(hessian, _LEAST_HESSIAN)[:, np.newaxis]


@dataclasses.dataclass(frozen=True, eq=False)
class NumberLoss(ScoreLoss):
    """A loss of numbers, whose debiased targets may be outside their range."""

    targets: np.ndarray  # (n, C)

    def take(self: _Numbers, rows: np.ndarray) -> _Numbers:
        return dataclasses.replace(super().take(rows), targets=self.targets[rows])


class SquaredLoss(NumberLoss):
    """Half the squared error of the scores; debiased targets make it unbiased."""

    def values(self, scores: np.ndarray) -> np.ndarray:
        return 0.5 * np.square(scores - self.targets).sum(axis=1)

    def derivatives(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return scores - self.targets, np.ones(scores.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class PoissonLoss(NumberLoss):
    """The Poisson loss of log rates (n, 1), ``exp(f) - y f``."""

    high: float  # the largest rate

    def values(self, scores: np.ndarray) -> np.ndarray:
        rates, over = self._rates(scores)
        return (rates * (1.0 + over) - self.targets * scores)[:, 0]

    def derivatives(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rates, _ = self._rates(scores)
        return rates - self.targets, np.maximum(rates, _LEAST_HESSIAN)

    def _rates(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        most = math.log(self.high)  # above it the loss is linear
        return np.exp(np.minimum(scores, most)), np.maximum(scores - most, 0.0)
