"""Confident-GNMax: noisy answers by the votes of teachers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._progress import without_output
from tf_labeldp.accounting import Private, Public
from tf_labeldp.accounting.events import EventFields
from tf_labeldp.accounting.gaussian import gaussian_sigma
from tf_labeldp.mechanisms import AggregateMechanism
from tf_labeldp.mechanisms.base import Frozen
from tf_labeldp.mechanisms.integer_noise import gaussian_scale, with_noise

_STEPS = 1 << 28
"""Steps per vote of the grid on which noise is drawn."""
NO_ANSWER = -1
"""In place of a class where the vote did not pass the threshold: learners leave it out."""


@dataclasses.dataclass(frozen=True)
class ConfidentGNMax(Frozen, AggregateMechanism):
    """Answers queries by the votes of teachers, where enough teachers agree.

    A query is answered if its largest count plus noise reaches the threshold. Its answer is the
    class with the largest count after separate noise on every count. Queries after ``max_answers``
    answers are skipped.

    Guarantee:
        All answers, together with the set of answered queries, are (epsilon, delta)-DP for the
        replacement of one label. One label is in the shard of one teacher, whose vote on each query
        may change: the largest count moves by 1 at most, the counts by sqrt(2) in L2. At most
        ``num_queries`` checks and ``max_answers`` answers compose, adaptively, like one Gaussian
        release: ``1 / sigma^2 = num_queries / sigma_1^2 + 2 max_answers / sigma_2^2``. These
        numbers fix the price before any label is read; it does not depend on the votes. Assumes
        that each teacher depends on the labels of its own shard alone.

    Source: Algorithm 4 of ``tang2022`` (Papernot et al., 2018). The published code computes the
    price from the votes, which is neither a bound nor safe to publish.

    Attributes:
        epsilon: finite and above zero.
        num_classes: K, at least 2.
        delta: in (0, 1), below 1/n for n labels.
        num_queries: M, at least 1.
        max_answers: L, in 1..M.
        threshold: least noisy largest count, in votes; None answers every query without checks.
        check_share: share of the privacy for the checks, in (0, 1).

    Example:
        >>> mechanism = ConfidentGNMax(
        ...     1.0, 10, delta=1e-5, num_queries=500, max_answers=200, threshold=60
        ... )
        >>> f"{mechanism.check_stddev:.0f} {mechanism.answer_stddev:.0f}"
        '187 83'
    """

    purpose = "noisy votes of teachers"

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
                f"max_answers must be at most num_queries={queries}, got {self.max_answers}. Ask "
                "more queries, or for fewer answers."
            )
        if self.threshold is not None:
            self._set(threshold=_validate.positive_finite("threshold", self.threshold))
        elif self.max_answers < queries:
            raise ValueError(
                f"max_answers must be num_queries={queries} without a threshold, got "
                f"{self.max_answers}. Set threshold=, or ask fewer queries."
            )
        # Raises an error if the grid is too coarse or too fine.
        self._scale(self._answer_sensitivity)

    def _event_fields(self) -> EventFields:
        """Returns the event of all checks and answers: one Gaussian release."""
        return EventFields.gaussian(gaussian_sigma(self.epsilon, self.delta, 1.0))

    @property
    def check_stddev(self) -> float:
        """sigma_1, the standard deviation of a check's noise, in votes."""
        return gaussian_sigma(self.epsilon, self.delta, self._check_sensitivity)

    @property
    def answer_stddev(self) -> float:
        """sigma_2, the standard deviation of the noise per count of an answer, in votes."""
        return gaussian_sigma(self.epsilon, self.delta, self._answer_sensitivity)

    @property
    def _check_sensitivity(self) -> float:
        """The sensitivity for which one release has a check's noise and the whole price."""
        return math.sqrt(self.num_queries / self.check_share)

    @property
    def _answer_sensitivity(self) -> float:
        share = 1.0 if self.threshold is None else 1.0 - self.check_share
        return math.sqrt(2.0 * self.max_answers / share)

    def _scale(self, sensitivity: float) -> float:
        # The precision of the grid depends on the number of noise draws.
        entries = self.num_queries * (self.num_classes + 1)
        return gaussian_scale(self.epsilon, self.delta, _STEPS * sensitivity, entries)

    @_validate.clears_frames
    def release(
        self,
        labels: Private[Any],
        public_input: Public[Any] = None,
        *,
        rng: np.random.Generator | None = None,
    ) -> np.ndarray:
        """Returns the answers, ``int64`` (M,); -1 for none.

        Args:
            labels: classes (n,).
            public_input: an object whose ``votes(labels)`` trains the teachers and returns the
                class that each teacher votes for, integers (teachers, M). Nothing that it prints,
                logs or warns of is shown.
            rng: a generator for repeatable (not private) runs.
        """
        with without_output():
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
        """Returns votes per class (M, K); each teacher has exactly one vote per query."""
        queries = self.num_queries
        valid = votes.ndim == 2 and votes.shape[1] == queries and votes.dtype.kind in "iu"
        if not valid or votes.min(initial=0) < 0 or votes.max(initial=0) >= self.num_classes:
            raise ValueError(
                f"votes must be integers (teachers, {queries}) in 0..{self.num_classes - 1}. "
                "Return one vote per teacher and query."
            )
        counts = np.zeros((queries, self.num_classes), dtype=np.int64)
        for row in votes:  # by teacher, in the memory of one
            counts[np.arange(queries), row] += 1
        return counts
