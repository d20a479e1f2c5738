"""A quantile of the scores that a model gives to the true labels, for sets with coverage."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Private, Public
from tf_labeldp.mechanisms.base import FrozenAggregate
from tf_labeldp.mechanisms.integer_noise import decay_per_step, geometric
from tf_labeldp.mechanisms.metrics import ClassMetric, MetricMechanism
from tf_labeldp.mechanisms.random_bits import Rng

_LEVELS = 2.0 ** (-np.arange(512) / 16.0)
"""Levels of the thresholds of numbers: steps of 4 % over 32 octaves."""
_EXPECTED = 320
"""Thresholds of classes at the first 320 levels, down to 2^-20, of the share that the model expects
to miss. The other 192 are for models that are too sure: the mean set grows by equal steps."""
_MOST_SCORES = 1 << 22
"""Most scores that thresholds are made of; of more, every few rows are taken."""


@functools.lru_cache(maxsize=64)
def mean_shortfall(epsilon: float, num_thresholds: int) -> float:
    """Returns S, the mean of ``max(0, M - X - 1)``: see ``QuantileMechanism``."""
    exact = float(decay_per_step(epsilon, 2))
    decay = max(exact, 1e-4)  # Less takes memory: S + 2 is at least as large in units of 1 / decay.
    last = math.ceil((math.log(num_thresholds) + 60.0) / decay)  # More has a chance of e^-60.
    y = np.arange(2.0, last + 2.0)
    # P[M >= y], and the sum of P[X = y - 1 - c] over c >= 1.
    most = -np.expm1((num_thresholds - 1) * np.log(-np.expm1(-decay * y)))
    found = float(most @ -np.expm1(-decay * (y - 1.0)))
    return found if decay == exact else (found + 2.0) * decay / exact


@dataclasses.dataclass(frozen=True)
class QuantileMechanism(FrozenAggregate):
    """A threshold that the scores of true labels, and of a new one, exceed with chance ``alpha``.

    Guarantee:
        The threshold is epsilon-DP for the replacement of one label, and covers a new label's score
        with probability at least 1 - alpha, over labels, noise and the new example, if these n
        examples and the new one are exchangeable. Assumes that the predictions are public.

    The score of a class is minus its probability; that of a number its distance to the prediction.
    Of m public thresholds let F_j be the number of scores up to the j-th. The mechanism returns the
    threshold with the largest sum of utility and noise, the larger one of equals. The utility is
    ``-max(0, k - F_j, F_{j-1} - k + 1)``: zero for the threshold of the k-th smallest score. The
    noise is geometric, ``P[X >= x] = e^(-x epsilon / 2)``. The rank is ``k = ceil((1 - alpha)
    (n + 1) + S)`` with ``S = E max(0, M - X - 1)`` for the largest noise M of m - 1 thresholds:
    about ``11.6 / epsilon`` for the 513 here. So alpha is at least ``(1 + S) / (n + 1)``. Proofs
    are in docs/theory.md (sets with coverage).

    Source: split-conformal prediction (Papadopoulos et al. 2002; Vovk, Gammerman and Shafer 2005)
    with a private quantile (after Angelopoulos, Bates et al. 2022, "Private prediction sets");
    noise as for ``SelectionMechanism``, and the correction by our own derivation.

    Attributes:
        epsilon: finite and above zero.
        alpha: the largest chance of a miss, in (0, 1).
        num_classes: K, for classes.
        low: the smallest label, for numbers.
        high: the largest label, for numbers.

    Example:
        >>> mechanism = QuantileMechanism(epsilon=1.0, alpha=0.1, num_classes=2)
        >>> mechanism.rank(1000)
        912
        >>> labels, rows = np.array([0, 1] * 500), np.tile([[0.9, 0.1], [0.4, 0.6]], (500, 1))
        >>> found = mechanism.release(labels, rows, rng=np.random.default_rng(0))
        >>> round(float(found), 2)
        -0.6
    """

    purpose = "a noisy quantile of scores, for sets of classes or intervals"

    alpha: float
    num_classes: int | None = None
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_kind()
        self._set(alpha=_validate.number_in("alpha", self.alpha, "(0, 1)"))

    def rank(self, num_labels: int) -> int:
        """Returns k for n labels, or raises a ``ValueError`` if n is too small for alpha."""
        shortfall = mean_shortfall(self.epsilon, _LEVELS.size + 1)
        # The margin covers the rounding errors of the sum.
        rank = math.ceil((1.0 - self.alpha) * (num_labels + 1) + shortfall * (1.0 + 1e-9))
        if rank > num_labels:
            needed = math.ceil((1.0 + shortfall) / self.alpha) - 1
            raise ValueError(
                f"expected at least {needed:,} held-out labels for alpha={self.alpha:g} at epsilon="
                f"{self.epsilon:g}, got {num_labels:,}. Hold out more labels, or raise alpha or "
                "epsilon."
            )
        return rank

    def _class_scores(self, predictions: Any) -> np.ndarray:
        """Returns the scores of all classes (n, K): minus the checked probabilities."""
        return -ClassMetric("sets", int(self.num_classes or 0)).checked(predictions)

    @staticmethod
    def class_thresholds(scores: Public[np.ndarray]) -> np.ndarray:
        """Returns rising thresholds (m,) of class scores, up to zero, which covers all classes."""
        chances = np.sort(-scores[:: 1 + scores.size // _MOST_SCORES], axis=None)
        missed = np.cumsum(chances) * (scores.shape[1] / chances.size)
        by_size = np.linspace(0, chances.size - 1, _LEVELS.size - _EXPECTED).astype(np.int64)
        expected = np.searchsorted(missed, _LEVELS[:_EXPECTED], side="right")
        places = np.minimum(np.concatenate([by_size, expected]), chances.size - 1)
        found = np.unique(-chances[places])
        return np.append(found[found < 0.0], 0.0)

    def thresholds(self, predictions: Public[Any]) -> np.ndarray:
        """Returns rising thresholds (m,) from public predictions; the last covers all labels."""
        if self.num_classes is not None:
            return self.class_thresholds(self._class_scores(predictions))
        low, high = self.label_range() or (0.0, 0.0)
        return np.nextafter(_LEVELS[::-1] * (high - low), math.inf)

    @_validate.clears_frames
    def utilities(
        self, labels: Private[Any], predictions: Public[Any]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the thresholds, and their utilities ``int64`` (m,), which are not private."""
        if self.num_classes is not None:
            scores = self._class_scores(predictions)
            thresholds = self.class_thresholds(scores)
            labels = _validate.class_indices("labels", labels, self.num_classes)
            MetricMechanism.check_length(labels.size, len(scores))
            scores = scores[np.arange(labels.size), labels]
        else:
            thresholds = self.thresholds(predictions)
            low, high = self.label_range() or (0.0, 0.0)
            labels = _validate.numbers_in_range("labels", labels, low, high)
            centres = _validate.real_vector("predictions", predictions)
            MetricMechanism.check_length(labels.size, centres.size)
            scores = np.abs(labels - np.clip(centres, low, high))
        cells = np.searchsorted(thresholds, scores, side="left")
        inside, rank = np.bincount(cells, minlength=thresholds.size), self.rank(labels.size)
        up_to = np.cumsum(inside)
        return thresholds, -np.maximum(np.maximum(rank - up_to, up_to - inside - rank + 1), 0)

    @_validate.clears_frames
    def release(
        self, labels: Private[Any], public_input: Public[Any] = None, *, rng: Rng = None
    ) -> np.ndarray:
        """Returns the threshold, shape ().

        Args:
            labels: (n,), at least one.
            public_input: the predictions, in the order of the labels: probabilities (n, K), those
                (n,) of the second of two classes, or numbers (n,).
            rng: a generator for repeatable (not private) runs; None uses secure random bits.
        """
        thresholds, utilities = self.utilities(labels, public_input)
        noisy = utilities + geometric(utilities.size, decay_per_step(self.epsilon, 2), rng)
        # Of equal sums the last wins.
        return np.asarray(thresholds[::-1][np.argmax(noisy[::-1])])
