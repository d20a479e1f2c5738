"""Randomized response on classes: RR, RRTop-k, and mechanisms that choose k by a prior.

One rule breaks all ties: of two classes with equal prior the smaller index comes first, and of two
set sizes with equal objective the smaller wins.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Private, Public
from tf_labeldp.accounting.events import EventFields
from tf_labeldp.mechanisms import random_bits
from tf_labeldp.mechanisms.base import FrozenClassification, WithoutPriors
from tf_labeldp.mechanisms.random_bits import Rng

_CHUNK_CELLS = 1 << 20
"""Cells of rows per chunk, which bounds the working memory."""
_CACHED_CELLS = 1 << 16
"""Cells of rows that fit a processor's cache."""
_FEW_CLASSES = 32
"""Up to here, comparing columns of priors with each other is faster than sorting each row."""
_TIE = 1.0 - 1e-9
"""Share of the largest information that counts as a tie, so that rounding decides no choice."""
_MOST_CLASSES, _RESOLUTION = 1e9, 2.0**49
"""The most classes, and the most per unit of epsilon: with more, rounding to 53-bit probabilities
costs more than epsilon."""


def check_number(mechanism: FrozenClassification, most: float) -> None:
    """Raises if the classes are too many, or too many for rounded probabilities at this epsilon."""
    most = int(min(most, _RESOLUTION * mechanism.epsilon))
    if mechanism.num_classes > most:
        raise ValueError(
            f"num_classes must be at most {most:,} at epsilon={mechanism.epsilon:g}, got "
            f"{mechanism.num_classes:,}. Merge rare classes."
        )


class SetResponse(FrozenClassification):
    """Randomized response over the top-k set of a prior: Algorithm 1 of ``ghazi2021``."""

    has_keyed_draws = True

    rest_as_one: ClassVar[bool] = False
    """Whether labels outside the set answer like its least likely class, or else uniformly."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, _MOST_CLASSES)

    @abc.abstractmethod
    def set_sizes(self, priors: Public[np.ndarray]) -> np.ndarray:
        """Returns k for each checked row of priors (n, K): ``int64`` (n,), in 1..K."""

    def likelihood(
        self, noisy: Public[np.ndarray], priors: Public[np.ndarray | None] = None
    ) -> np.ndarray:
        """Returns ``P[noisy label | class]``, (m, K); zero for labels outside the prior's set."""
        if priors is None:
            priors = np.full((1, self.num_classes), 1.0 / self.num_classes)
        k = np.reshape(self.set_sizes(priors), (-1, 1))
        members = top_k_members(priors, k)
        shrink = math.exp(-self.epsilon)
        total = 1.0 + (k - 1) * shrink
        outside: np.ndarray = 1.0 / k
        if self.rest_as_one:
            last = np.take_along_axis(rank_classes(priors), k - 1, axis=1)
            outside = np.where(noisy[:, np.newaxis] == last, 1.0, shrink) / total
        likelihood = np.where(members, shrink / total, outside)
        likelihood = np.broadcast_to(likelihood, (noisy.size, self.num_classes)).copy()
        every = np.arange(noisy.size)
        likelihood[every, noisy] = np.broadcast_to(1.0 / total[:, 0], noisy.shape)
        within = np.broadcast_to(members, likelihood.shape)[every, noisy]
        return likelihood * within[:, np.newaxis]


@dataclasses.dataclass(frozen=True)
class RandomizedResponse(WithoutPriors, SetResponse):
    """Keeps the label with probability ``e^eps / (e^eps + K - 1)``, else draws another uniformly.

    Guarantee:
        (epsilon, 0)-DP for the replacement of one label; the worst log-ratio equals epsilon.

    Source: Warner 1965; ``ghazi2021``, section 2 (RR). It equals RRTop-k with k = K.

    Attributes:
        epsilon: finite and above zero.
        num_classes: K, at least 2.

    Example:
        >>> import numpy as np
        >>> mechanism = RandomizedResponse(epsilon=1.0, num_classes=10)
        >>> round(float(mechanism.transition_matrix()[0, 0]), 6)
        0.231969
        >>> mechanism.randomize(np.array([3, 7])).shape
        (2,)
    """

    def _noisy(self, labels: Any, rng: Rng) -> np.ndarray:
        labels = _validate.class_indices("labels", labels, self.num_classes)
        return draw_ranks(labels, np.array([self.num_classes]), self.epsilon, rng)

    def set_sizes(self, priors: Public[np.ndarray]) -> np.ndarray:
        """Returns K for each row, ``int64`` (n,)."""
        return np.full(len(priors), self.num_classes, dtype=np.int64)

    def _event_fields(self) -> EventFields:
        return EventFields.randomized_response(self.epsilon, self.num_classes)


class PriorMechanism(SetResponse):
    """Runs RRTop-k (Algorithm 1 of ``ghazi2021``) with a k that depends on the prior alone.

    Guarantee:
        (epsilon, 0)-DP for the replacement of one label (``ghazi2021``, Lemma 1), if the prior of a
        label does not depend on that label.
    """

    public_input = "priors"

    @_validate.clears_frames
    def randomize(
        self, labels: Private[Any], priors: Public[Any] = None, *, rng: Rng = None
    ) -> np.ndarray:
        """Returns noisy labels, ``int64`` (n,), each inside the top-k set of its label.

        ``priors`` are probabilities (K,) or (n, K) whose rows sum to one (tolerance 1e-4), or
        ``Priors``.
        """
        labels = _validate.class_indices("labels", labels, self.num_classes)
        prior = self._checked_priors(priors, labels.size)
        sizes = prior.by_label(self.set_sizes(prior.rows))
        noisy = np.empty_like(labels)
        by_columns = prior.groups is None and self.num_classes <= _FEW_CLASSES
        if prior.groups is not None:
            ranked = rank_classes(prior.rows)
            ranks = np.argsort(ranked, axis=1)  # the inverse permutations
        for some in row_chunks((labels.size, self.num_classes)):
            if prior.groups is not None:
                row = prior.groups[some]
                rank = ranks[row, labels[some]]
            elif by_columns:
                of_classes = _ranks_of_classes(prior.rows[some])
                rank = of_classes[labels[some], np.arange(of_classes.shape[1])].astype(np.int64)
            else:
                ranked = rank_classes(prior.rows[some])
                row = np.arange(len(ranked))
                rank = np.argmax(ranked == labels[some][:, np.newaxis], axis=1)
            if self.rest_as_one:
                rank = np.minimum(rank, sizes[some] - 1)
            drawn = draw_ranks(rank, sizes[some], self.epsilon, rng)
            noisy[some] = _classes_at(of_classes, drawn) if by_columns else ranked[row, drawn]
        return noisy


@dataclasses.dataclass(frozen=True)
class RRTopK(PriorMechanism):
    """Randomized response on the k classes of largest prior; other labels draw uniformly from them.

    Guarantee:
        (epsilon, 0)-DP for the replacement of one label (``ghazi2021``, Lemma 1), if the prior of a
        label does not depend on that label. For 2 <= k the worst log-ratio equals epsilon; for
        k = 1 the output is constant.

    Source: ``ghazi2021``, Algorithm 1.

    Attributes:
        k: size of the set, in 1..K; other attributes as for ``RandomizedResponse``.

    Example:
        >>> mechanism = RRTopK(epsilon=1.0, num_classes=5, k=2)
        >>> mechanism.transition_matrix([0.4, 0.35, 0.15, 0.05, 0.05])[1].round(6).tolist()
        [0.268941, 0.731059, 0.0, 0.0, 0.0]
    """

    k: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(k=_validate.integer_at_least("k", self.k, 1))
        if self.k > self.num_classes:
            raise ValueError(f"k must be at most num_classes={self.num_classes}, got {self.k}.")

    def set_sizes(self, priors: Public[np.ndarray]) -> np.ndarray:
        """Returns k for each row of priors (n, K): ``int64`` (n,)."""
        return np.full(priors.shape[0], self.k, dtype=np.int64)


@dataclasses.dataclass(frozen=True)
class RRWithPrior(PriorMechanism):
    """The epsilon-DP channel that keeps a label drawn from the prior most often.

    For each prior it runs RRTop-k with the k* that maximises
    ``w_k = e^eps / (e^eps + k - 1) * (sum of the k largest priors)``; no epsilon-DP channel has a
    larger ``Pr[output = input]`` under the prior (``ghazi2021``, Theorem 3).

    Guarantee:
        (epsilon, 0)-DP for the replacement of one label (``ghazi2021``, Corollary 2), if the prior
        of a label does not depend on that label: k* is computed from the prior alone.

    Source: ``ghazi2021``, Algorithm 2. Ties between set sizes go to the smaller set. Arguments as
    for ``RandomizedResponse``.

    Example:
        >>> mechanism = RRWithPrior(epsilon=2.0, num_classes=4)
        >>> mechanism.optimal_k([[0.97, 0.01, 0.01, 0.01], [0.25, 0.25, 0.25, 0.25]]).tolist()
        [1, 4]
    """

    def optimal_k(self, priors: Public[Any]) -> np.ndarray:
        """Returns k* for each of the priors (K,) or (n, K), ``int64`` (1,) or (n,), or raises."""
        prior = self._checked_priors(priors, None)
        return prior.by_label(self.set_sizes(prior.rows))

    def set_sizes(self, priors: Public[np.ndarray]) -> np.ndarray:
        """Returns k* of Algorithm 2 for each checked row of priors (n, K): ``int64`` (n,)."""
        best = np.empty(priors.shape[0], dtype=np.int64)
        # e^-epsilon does not overflow for a large epsilon.
        weights = 1.0 / (1.0 + np.arange(priors.shape[1]) * math.exp(-self.epsilon))
        for rows in row_chunks(priors.shape, _CACHED_CELLS):
            ordered = _ordered_columns(priors[rows])
            mass, largest = np.zeros_like(ordered[0]), np.full_like(ordered[0], -1.0)
            k = np.zeros(mass.size, np.min_scalar_type(priors.shape[1]))
            for size, (column, weight) in enumerate(zip(ordered, weights, strict=True), start=1):
                mass += column
                kept = mass * weight
                np.copyto(k, size, where=kept > largest)
                np.maximum(kept, largest, out=largest)
            best[rows] = k
        return best


@dataclasses.dataclass(frozen=True)
class InformativeRR(PriorMechanism):
    """Randomized response on groups of classes, chosen to reveal most beyond the prior.

    Each of the k - 1 likeliest classes is a group; the others form one group, named by its
    likeliest class. The name of a label's group goes through randomized response over the k names.
    For each prior, k maximises the mutual information of label and answer: the expected drop in
    log-loss from the prior to ``posterior()``.

    Use it to train on posteriors. For a confident prior RRWithPrior always answers the likeliest
    class (k* = 1) and reveals nothing; here k is at least 2, unless the prior is certain. In
    return noisy labels are wrong more often. The information is never below that of RRTop-k or
    RRWithPrior. With an accurate model's probabilities as priors it was 99 % of the best epsilon-DP
    channel's; under flat priors and at epsilon 1, 68 % for 10 classes and 11 % for 100.

    Guarantee:
        (epsilon, 0)-DP for the replacement of one label, if the prior of a label does not depend on
        that label: k depends on the prior alone, and each label uses a row of randomized response
        over k values. For 2 <= k the worst log-ratio equals epsilon; for k = 1 the output is
        constant.

    Source: RRWithPrior, ``ghazi2021``, with another objective; the best channel is the linear
    programme of Kairouz, Oh and Viswanath 2014, "Extremal mechanisms for local differential
    privacy". Ties between set sizes (equal to 1e-9) go to the smaller set. Arguments as for
    ``RandomizedResponse``.

    Example:
        >>> mechanism = InformativeRR(epsilon=1.0, num_classes=4)
        >>> mechanism.transition_matrix([0.9, 0.06, 0.03, 0.01]).round(3).tolist()[:3]
        [[0.731, 0.269, 0.0, 0.0], [0.269, 0.731, 0.0, 0.0], [0.269, 0.731, 0.0, 0.0]]
    """

    rest_as_one = True

    def set_sizes(self, priors: Public[np.ndarray]) -> np.ndarray:
        """Returns the most informative k for each checked row of priors (n, K): ``int64`` (n,)."""
        best = np.empty(priors.shape[0], dtype=np.int64)
        for rows in row_chunks(priors.shape):
            nats = _information(priors[rows], self.epsilon)
            best[rows] = np.argmax(nats >= _TIE * nats.max(axis=1, keepdims=True), axis=1) + 1
        return best


def _information(priors: np.ndarray, epsilon: float) -> np.ndarray:
    """Returns the mutual information of InformativeRR's channel for k = 1..K, in nats: (n, K).

    With ``s = e^-eps`` and groups of masses q it is ``(eps - sum_j f(q_j)) / (1 + (k - 1) s)`` for
    ``f(q) = s g log g`` and ``g = 1 + (e^eps - 1) q``.
    """
    epsilon = min(epsilon, 700.0)  # Beyond, e^eps overflows and the information stays the same.
    shrink, gain, grown = math.exp(-epsilon), -math.expm1(-epsilon), math.expm1(epsilon)

    def lost(mass: np.ndarray) -> np.ndarray:
        return (shrink + gain * mass) * np.log1p(grown * mass)

    ordered = np.sort(priors, axis=1)
    total = np.cumsum(ordered, axis=1)
    ordered, total = ordered / total[:, -1:], total / total[:, -1:]
    rest = total[:, -2::-1]  # the last group of k = 2..K; small masses keep their digits
    # This form of eps - f(1 - rest) has no difference of large numbers.
    moved = gain * rest[:, :1]
    first = epsilon * moved - (1.0 - moved) * np.log1p(-moved)
    nats = np.zeros(priors.shape)
    nats[:, 1:] = first - lost(rest)
    nats[:, 2:] -= np.cumsum(lost(ordered[:, -2:0:-1]), axis=1)
    return nats / (1.0 + np.arange(priors.shape[1]) * shrink)


def draw_ranks(rank: np.ndarray, k: np.ndarray, epsilon: float, rng: Rng) -> np.ndarray:
    """Returns randomized ranks in [0, k) for true ranks (n,); a rank >= k is outside the set.

    ``k`` is (n,), or (1,) for all ranks.

    A rank inside the set moves to another with the flip probability of randomized response over k
    values. A rank outside becomes uniform over the set.
    """

    def draw(start: int, stop: int) -> np.ndarray:
        ranks, sizes = rank[start:stop], k if k.size == 1 else k[start:stop]
        inside = ranks < sizes
        flip = random_bits.uniform_integers(ranks.size, rng) < random_bits.flip_threshold(
            epsilon, sizes
        )
        # The set has k - 1 other ranks; for k = 1 the bound is 1 and the draw is not used.
        bounds = np.where(inside, np.maximum(sizes - 1, 1), sizes)
        target = random_bits.uniform_below(bounds, rng)
        other = target + (inside & (target >= ranks))  # skips the true rank
        return np.where(inside & ~flip, ranks, other)

    return random_bits.in_blocks(draw, rank.size, rng)


def rank_classes(priors: np.ndarray) -> np.ndarray:
    """Returns the classes of each row (n, K) from the largest prior to the smallest."""
    return np.argsort(-priors, axis=1, kind="stable")


def top_k_members(scores: np.ndarray, k: np.ndarray | int) -> np.ndarray:
    """Returns whether each class is in its row's top-k set of RRTop-k, ``bool`` (n, K)."""
    within = np.arange(scores.shape[1]) < np.reshape(k, (-1, 1))
    members = np.empty(scores.shape, dtype=bool)
    np.put_along_axis(members, rank_classes(scores), within, axis=1)
    return members


def _ranks_of_classes(priors: np.ndarray) -> np.ndarray:
    """Returns the place of each class in ``rank_classes`` of its row: ``uint8`` (K, n)."""
    num_rows, num_classes = priors.shape
    ranks = np.zeros((num_classes, num_rows), np.uint8)
    for rows in row_chunks(priors.shape, _CACHED_CELLS):
        columns, of_rows = np.ascontiguousarray(priors[rows].T), ranks[:, rows]
        for label in range(1, num_classes):
            # Each pair of classes moves one of the two by one place.
            is_before = columns[:label] >= columns[label]
            of_rows[label] += np.add.reduce(is_before, axis=0, dtype=np.uint8)
            of_rows[:label] += ~is_before
    return ranks


def _classes_at(ranks: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """Returns the class of each row with a rank (n,), ``uint8``; ranks of classes are (K, n)."""
    found, places = np.zeros(drawn.size, np.uint8), drawn.astype(np.uint8)
    for label in range(1, len(ranks)):
        np.copyto(found, label, where=ranks[label] == places)
    return found


def _ordered_columns(priors: np.ndarray) -> np.ndarray:
    """Returns each row from its largest prior to its smallest: ``float64`` (K, n)."""
    num_classes = priors.shape[1]
    if num_classes > _FEW_CLASSES:
        return np.sort(priors, axis=1)[:, ::-1].T
    columns = priors.T.copy()
    for first, second in _sorting_network(num_classes):
        smaller = np.minimum(columns[first], columns[second])
        np.maximum(columns[first], columns[second], out=columns[first])
        columns[second] = smaller
    return columns


@functools.cache
def _sorting_network(size: int) -> list[tuple[int, int]]:
    """Returns the comparisons of Batcher's odd-even merge sort (Knuth, volume 3, 5.2.2 M)."""
    pairs = []
    for merged in (1 << power for power in range((size - 1).bit_length())):
        for distance in (merged >> power for power in range(merged.bit_length())):
            for first in range(distance % merged, size - distance):
                in_run = (first - distance % merged) % (2 * distance) < distance
                second = first + distance
                if in_run and first // (2 * merged) == second // (2 * merged):
                    pairs.append((first, second))
    return pairs


def row_chunks(shape: tuple[int, ...], cells: int | None = None) -> Iterator[slice]:
    """Yields slices of rows with about ``cells`` cells each; None for ``_CHUNK_CELLS``."""
    step = max(1, (cells or _CHUNK_CELLS) // max(1, shape[1]))
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))
