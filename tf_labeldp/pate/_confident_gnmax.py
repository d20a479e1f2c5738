"""Confident-GNMax: noisy answers from the votes of teachers."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Private, Public
from tf_labeldp.accounting.events import gaussian_event
from tf_labeldp.accounting.gaussian import gaussian_sigma
from tf_labeldp.mechanisms import AggregateMechanism
from tf_labeldp.mechanisms.base import Frozen
from tf_labeldp.mechanisms.integer_noise import gaussian_scale, with_noise

if TYPE_CHECKING:
    from tf_labeldp.accounting.events import DpEvent

_STEPS = 1 << 28
"""Of the grid on which the noise is drawn, in one vote."""
NO_ANSWER = -1


@dataclasses.dataclass(frozen=True)
class ConfidentGNMax(Frozen, AggregateMechanism):
    """Answers queries by the votes of teachers, where enough of them agree.

    A query is answered if its largest count, with noise, reaches the threshold; its answer is the
    class of the largest count, with other noise on every count. After ``max_answers`` answers no
    further query is looked at.

    Guarantee:
        All answers together, with which queries have one, are (epsilon, delta)-DP for the
        replacement of one label. One label is in the shard of one teacher, whose vote on each query
        may change: the largest count moves by 1 at most, the counts by sqrt(2) in L2. At most
        ``num_queries`` checks and ``max_answers`` answers compose, adaptively, like one Gaussian
        release: ``1 / sigma^2 = num_queries / sigma_1^2 + 2 max_answers / sigma_2^2``. The price is
        that of these numbers, which are fixed before any label is looked at; it does not depend on
        the votes. Assumes that each teacher depends on the labels of its own shard alone.

    Source: Algorithm 4 of ``tang2022`` (Papernot et al., 2018). The published code accounts by the
    votes themselves, and what it states is neither a bound nor safe to publish.

    Attributes:
        epsilon: finite and above zero.
        num_classes: K, at least 2.
        delta: in (0, 1), below 1/n for n labels.
        num_queries: M, at least 1.
        max_answers: L, in 1..M.
        threshold: of the largest count, in votes; None answers every query, without checks.
        check_share: in (0, 1), of the privacy that the checks use.

    Example:
        >>> mechanism = ConfidentGNMax(
        ...     1.0, 10, delta=1e-5, num_queries=500, max_answers=200, threshold=60
        ... )
        >>> f"{mechanism.check_stddev:.0f} {mechanism.answer_stddev:.0f}"
        '187 83'
    """

    num_classes: int
    delta: float = dataclasses.field(kw_only=True)
    num_queries: int = dataclasses.field(kw_only=True)
    max_answers: int = dataclasses.field(kw_only=True)
    threshold: float | None = None
    check_share: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        queries = _validate.integer_at_least("num_queries", self.num_queries, 1)
        self._set(
            num_classes=_validate.integer_at_least("num_classes", self.num_classes, 2),
            delta=_validate.number_in("delta", self.delta, "(0, 1)"),
            num_queries=queries,
            max_answers=_validate.integer_at_least("max_answers", self.max_answers, 1),
            check_share=_validate.number_in("check_share", self.check_share, "(0, 1)"),
        )
        if self.max_answers > queries:
            raise ValueError(
                f"max_answers={self.max_answers} is more than num_queries={queries}. Ask more "
                "queries, or for fewer answers."
            )
        if self.threshold is not None:
            self._set(threshold=_validate.positive_finite("threshold", self.threshold))
        elif self.max_answers < queries:
            raise ValueError(
                f"without a threshold every query is answered, so max_answers must be num_queries="
                f"{queries}, got {self.max_answers}. Give a threshold, or ask fewer queries."
            )
        self._scale(self._answer_sensitivity)  # raises where the grid is too coarse or too fine

    def dp_event(self) -> DpEvent:
        """Returns the event of all checks and answers: one Gaussian release."""
        return gaussian_event(gaussian_sigma(self.epsilon, self.delta, 1.0))

    @property
    def check_stddev(self) -> float:
        """sigma_1, the standard deviation of the noise of a check, in votes."""
        return gaussian_sigma(self.epsilon, self.delta, self._check_sensitivity)

    @property
    def answer_stddev(self) -> float:
        """sigma_2, the standard deviation of the noise on each count of an answer, in votes."""
        return gaussian_sigma(self.epsilon, self.delta, self._answer_sensitivity)

    @property
    def _check_sensitivity(self) -> float:
        """That of one release with the noise of a check and the price of all there is."""
        return math.sqrt(self.num_queries / self.check_share)

    @property
    def _answer_sensitivity(self) -> float:
        share = 1.0 if self.threshold is None else 1.0 - self.check_share
        return math.sqrt(2.0 * self.max_answers / share)

    def _scale(self, sensitivity: float) -> float:
        entries = self.num_queries * (self.num_classes + 1)  # all noise, for the grid's precision
        return gaussian_scale(self.epsilon, self.delta, _STEPS * sensitivity, entries)

    def release(
        self,
        labels: Private[Any],
        public_input: Public[Any] = None,
        *,
        rng: np.random.Generator | None = None,
    ) -> np.ndarray:
        """Returns the answers, ``int64`` (M,); -1 where there is none.

        Args:
            labels: classes (n,).
            public_input: an object whose ``votes(labels)`` trains the teachers and returns the
                class that each one votes for, integers (teachers, M).
            rng: a generator for repeatable (not private) runs.
        """
        votes = np.asarray(public_input.votes(labels))
        counts = self._counts(votes)
        exact = counts * _STEPS
        scale = self._scale(self._answer_sensitivity)
        noisy = with_noise(exact, "gaussian", scale, self.epsilon, 0.0, rng)
        answers = noisy.argmax(axis=1)
        if self.threshold is None:
            return answers
        scale = self._scale(self._check_sensitivity)
        largest = with_noise(exact.max(axis=1), "gaussian", scale, self.epsilon, 0.0, rng)
        passed = largest >= self.threshold * _STEPS
        answered = passed & (np.cumsum(passed) <= self.max_answers)
        return np.where(answered, answers, NO_ANSWER)

    def _counts(self, votes: np.ndarray) -> np.ndarray:
        """Returns the votes for each class, (M, K); each teacher has exactly one for each query."""
        queries = self.num_queries
        valid = votes.ndim == 2 and votes.shape[1] == queries and votes.dtype.kind in "iu"
        if not valid or votes.min(initial=0) < 0 or votes.max(initial=0) >= self.num_classes:
            raise ValueError(
                f"votes must be integers (teachers, {queries}) in 0..{self.num_classes - 1}, one "
                "vote of each teacher for each query."
            )
        cells = votes + self.num_classes * np.arange(queries)
        counts = np.bincount(cells.ravel(), minlength=queries * self.num_classes)
        return counts.reshape(queries, self.num_classes)
