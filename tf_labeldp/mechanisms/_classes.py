"""Randomized response on classes: RR, RRTop-k, and what chooses k by a prior; the draw they share.

Ties are broken by one rule everywhere: of two classes with equal prior the one with the smaller
index comes first, and of two set sizes with equal objective the smaller wins.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Private, Public
from tf_labeldp.accounting._events import randomized_response_event
from tf_labeldp.mechanisms import _random
from tf_labeldp.mechanisms._base import FrozenClassification, WithoutPriors
from tf_labeldp.mechanisms._priors import PriorRows
from tf_labeldp.mechanisms._random import Rng

if TYPE_CHECKING:
    from tf_labeldp.accounting._events import DpEvent

_CHUNK_CELLS = 1 << 20
"""Cells of rows that are handled at a time, which bounds the working memory."""
_TIE = 1.0 - 1e-9
"""Share of the largest information that counts as equal, so that rounding decides no choice."""


@dataclasses.dataclass(frozen=True)
class RandomizedResponse(WithoutPriors, FrozenClassification):
    """Keeps the label with probability ``e^eps / (e^eps + K - 1)``, else answers another uniformly.

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
        size = np.full(labels.shape, self.num_classes, dtype=np.int64)
        return draw_ranks(labels, size, self.epsilon, rng)

    def transition_matrix(self, prior: Public[Any] = None) -> np.ndarray:
        """Returns ``P[output | input]``, ``float64`` (K, K); ``prior`` must be None."""
        self._refuse_public(prior)
        _check_channel(self.num_classes)
        uniform = np.full(self.num_classes, 1.0 / self.num_classes)
        return top_k_transition_matrix(uniform, self.num_classes, self.epsilon)

    def dp_event(self) -> DpEvent:
        """Returns the randomized response event over K values."""
        return randomized_response_event(self.epsilon, self.num_classes)


class WithPriors(FrozenClassification):
    """What mechanisms that draw with a prior of each label share: the checks of the priors."""

    public_input = "priors"

    def _checked_priors(self, priors: Any, num_rows: int | None) -> PriorRows:
        """Returns the priors of n labels, or raises; ``num_rows`` is n, or None for any."""
        if priors is None:
            raise ValueError(
                f"{type(self).__name__} needs priors of shape ({self.num_classes},) or "
                f"({'n' if num_rows is None else num_rows}, {self.num_classes}). Without any, use "
                "RandomizedResponse."
            )
        return PriorRows.of(priors, num_rows, self.num_classes)

    def _one_prior(self, prior: Any) -> np.ndarray:
        """Returns the prior of a channel as (1, K), or raises."""
        if prior is None or np.shape(prior) != (self.num_classes,):
            raise ValueError(
                f"transition_matrix of {type(self).__name__} needs one prior of shape "
                f"({self.num_classes},), got {'None' if prior is None else np.shape(prior)}. "
                "Pass one row at a time."
            )
        _check_channel(self.num_classes)
        return self._checked_priors(prior, None).rows


@dataclasses.dataclass(frozen=True)
class PriorMechanism(WithPriors):
    """Runs RRTop-k (Algorithm 1 of ``ghazi2021``) with a k that the prior alone decides.

    Guarantee:
        (epsilon, 0)-DP for the replacement of one label (``ghazi2021``, Lemma 1), if the prior of a
        label does not depend on that label.
    """

    rest_as_one: ClassVar[bool] = False
    """Whether labels outside the set answer as its least likely class does; else uniformly."""

    @abc.abstractmethod
    def set_sizes(self, priors: Public[np.ndarray]) -> np.ndarray:
        """Returns k for each checked row of priors (n, K): ``int64`` (n,), in 1..K."""

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
        if prior.groups is not None:
            ranked = rank_classes(prior.rows)
            ranks = np.argsort(ranked, axis=1)  # the inverse permutations
        for some in row_chunks((labels.size, self.num_classes)):
            if prior.groups is not None:
                row = prior.groups[some]
                rank = ranks[row, labels[some]]
            else:
                ranked = rank_classes(prior.rows[some])
                row = np.arange(ranked.shape[0])
                rank = np.argmax(ranked == labels[some][:, np.newaxis], axis=1)
            if self.rest_as_one:
                rank = np.minimum(rank, sizes[some] - 1)
            noisy[some] = ranked[row, draw_ranks(rank, sizes[some], self.epsilon, rng)]
        return noisy

    def transition_matrix(self, prior: Public[Any] = None) -> np.ndarray:
        """Returns ``P[output | input]`` under one prior of shape (K,), ``float64`` (K, K)."""
        rows = self._one_prior(prior)
        k = int(self.set_sizes(rows)[0])
        matrix = top_k_transition_matrix(rows[0], k, self.epsilon)
        if self.rest_as_one:
            ranked = rank_classes(rows)[0]
            matrix[ranked[k:]] = matrix[ranked[k - 1]]
        return matrix


@dataclasses.dataclass(frozen=True)
class RRTopK(PriorMechanism):
    """Randomized response on the k classes of largest prior; other labels answer uniformly in it.

    Guarantee:
        (epsilon, 0)-DP for the replacement of one label (``ghazi2021``, Lemma 1), if the prior of a
        label does not depend on that label. For 2 <= k the worst log-ratio equals epsilon; for
        k = 1 the output is constant.

    Source: ``ghazi2021``, Algorithm 1.

    Attributes:
        epsilon: finite and above zero.
        num_classes: K, at least 2.
        k: size of the set, in 1..K; of classes with equal prior the smaller index enters first.

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
            raise ValueError(
                f"k must be at most num_classes={self.num_classes}, got {self.k}. Use "
                "RandomizedResponse to answer among all classes."
            )

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

    Source: ``ghazi2021``, Algorithm 2. Ties between classes go to the smaller index, ties between
    set sizes to the smaller set.

    Attributes:
        epsilon: finite and above zero.
        num_classes: K, at least 2.

    Example:
        >>> mechanism = RRWithPrior(epsilon=2.0, num_classes=4)
        >>> mechanism.optimal_k([0.5, 0.3, 0.1, 0.1]).tolist()
        [4]
        >>> mechanism.optimal_k([[0.97, 0.01, 0.01, 0.01], [0.25, 0.25, 0.25, 0.25]]).tolist()
        [1, 4]
    """

    def optimal_k(self, priors: Public[Any]) -> np.ndarray:
        """Returns k*, ``int64`` (1,) or (n,), for each of priors (K,) or (n, K), or raises."""
        prior = self._checked_priors(priors, None)
        return prior.by_label(self.set_sizes(prior.rows))

    def set_sizes(self, priors: Public[np.ndarray]) -> np.ndarray:
        """Returns k* of Algorithm 2 for each checked row of priors (n, K): ``int64`` (n,)."""
        best = np.empty(priors.shape[0], dtype=np.int64)
        # Written with e^-epsilon so that a large epsilon does not overflow.
        weights = 1.0 / (1.0 + np.arange(priors.shape[1]) * math.exp(-self.epsilon))
        for rows in row_chunks(priors.shape):
            mass = np.cumsum(np.sort(priors[rows], axis=1)[:, ::-1], axis=1)
            best[rows] = np.argmax(mass * weights, axis=1) + 1
        return best


@dataclasses.dataclass(frozen=True)
class InformativeRR(PriorMechanism):
    """Randomized response on groups of classes, the one that tells the most beyond the prior.

    The k - 1 likeliest classes are groups of their own; all others are one group, named by its
    likeliest class. The name of a label's group goes through randomized response over the k names.
    For each prior, k maximises the mutual information of label and answer: the expected drop in
    log-loss from the prior to ``posterior()``.

    Use it to train on posteriors. For a confident prior RRWithPrior answers the likeliest class
    whatever the label is (k* = 1) and tells nothing; here k is at least 2, unless the prior is
    certain. The price is that noisy labels are wrong more often. The information is never below
    that of RRTop-k for any k, nor that of RRWithPrior: RRTop-k is a mixture of k channels, in each
    of which the other labels answer as one class of the set, and the least likely class is the one
    that tells the most. With probabilities of an accurate model as priors it was 99 % of the most
    that any epsilon-DP channel tells. It is less under flat priors over many classes at small
    epsilon, where large groups tell more: at epsilon 1, 68 % for 10 classes and 11 % for 100.

    Guarantee:
        (epsilon, 0)-DP for the replacement of one label, if the prior of a label does not depend on
        that label: k is computed from the prior alone, and every label answers by a row of
        randomized response over k values. For 2 <= k the worst log-ratio equals epsilon; for k = 1
        the output is constant.

    Source: RRWithPrior, ``ghazi2021``, with another objective. The most that a channel tells is the
    linear programme of Kairouz, Oh and Viswanath 2014, "Extremal mechanisms for local differential
    privacy". Ties between classes go to the smaller index, ties between set sizes (equal to 1e-9)
    to the smaller set.

    Attributes:
        epsilon: finite and above zero.
        num_classes: K, at least 2.

    Example:
        >>> mechanism = InformativeRR(epsilon=1.0, num_classes=4)
        >>> mechanism.transition_matrix([0.9, 0.06, 0.03, 0.01]).round(3).tolist()[:3]
        [[0.731, 0.269, 0.0, 0.0], [0.269, 0.731, 0.0, 0.0], [0.269, 0.731, 0.0, 0.0]]
        >>> mechanism.set_sizes(np.array([[0.9, 0.06, 0.03, 0.01], [0.25] * 4])).tolist()
        [2, 4]
    """

    rest_as_one = True

    def set_sizes(self, priors: Public[np.ndarray]) -> np.ndarray:
        """Returns the most informative k for each checked row of priors (n, K): ``int64`` (n,)."""
        best = np.empty(priors.shape[0], dtype=np.int64)
        for rows in row_chunks(priors.shape):
            told = _information(priors[rows], self.epsilon)
            best[rows] = np.argmax(told >= _TIE * told.max(axis=1, keepdims=True), axis=1) + 1
        return best


def _information(priors: np.ndarray, epsilon: float) -> np.ndarray:
    """Returns the mutual information of InformativeRR's channel for k = 1..K, in nats: (n, K).

    With ``s = e^-eps`` and groups of masses q it is ``(eps - sum_j f(q_j)) / (1 + (k - 1) s)`` for
    ``f(q) = s g log g`` and ``g = 1 + (e^eps - 1) q``.
    """
    epsilon = min(epsilon, 700.0)  # beyond, e^eps overflows and the information grows no more
    shrink, gain, grown = math.exp(-epsilon), -math.expm1(-epsilon), math.expm1(epsilon)

    def lost(mass: np.ndarray) -> np.ndarray:
        return (shrink + gain * mass) * np.log1p(grown * mass)

    ordered = np.sort(priors, axis=1)
    total = np.cumsum(ordered, axis=1)
    ordered, total = ordered / total[:, -1:], total / total[:, -1:]
    rest = total[:, -2::-1]  # the last group of k = 2..K; small masses keep their digits
    # eps - f(1 - rest), written without a difference of large numbers.
    moved = gain * rest[:, :1]
    first = epsilon * moved - (1.0 - moved) * np.log1p(-moved)
    told = np.zeros(priors.shape)
    told[:, 1:] = first - lost(rest)
    told[:, 2:] -= np.cumsum(lost(ordered[:, -2:0:-1]), axis=1)
    return told / (1.0 + np.arange(priors.shape[1]) * shrink)


def draw_ranks(rank: np.ndarray, k: np.ndarray, epsilon: float, rng: Rng) -> np.ndarray:
    """Returns randomized ranks in [0, k) for true ranks (n,); a rank >= k is "outside the set".

    Inside the set: another rank of the set with the flip probability of randomized response over k
    values, else the rank itself. Outside: uniform over the set.
    """

    def draw(start: int, stop: int) -> np.ndarray:
        return _draw_ranks(rank[start:stop], k[start:stop], epsilon, rng)

    return _random.in_blocks(draw, rank.size, rng)


def _draw_ranks(rank: np.ndarray, k: np.ndarray, epsilon: float, rng: Rng) -> np.ndarray:
    inside = rank < k
    flip = _random.uniform_integers(rank.size, rng) < _random.flip_threshold(epsilon, k)
    # Inside the set there are k - 1 other ranks (one stands in where k = 1, and is never used).
    target = _random.uniform_below(np.where(inside, np.maximum(k - 1, 1), k), rng)
    other = target + (inside & (target >= rank))  # skips the true rank
    return np.where(inside & ~flip, rank, other)


def top_k_transition_matrix(prior: np.ndarray, k: int, epsilon: float) -> np.ndarray:
    """Returns the channel of Algorithm 1 for one prior (K,): ``float64`` (K, K)."""
    members = rank_classes(prior[np.newaxis, :])[0, :k]
    shrink = math.exp(-epsilon)
    matrix = np.zeros((prior.size, prior.size))
    matrix[:, members] = 1.0 / k
    matrix[np.ix_(members, members)] = shrink / (1.0 + (k - 1) * shrink)
    matrix[members, members] = 1.0 / (1.0 + (k - 1) * shrink)
    return matrix


def _check_channel(num_classes: int) -> None:
    """Raises if a channel over so many classes would not fit."""
    instead = "Merge rare classes. Draws and targets need no channel of RandomizedResponse."
    _validate.check_size("a channel", (num_classes, num_classes), instead)


def rank_classes(priors: np.ndarray) -> np.ndarray:
    """Returns the classes of each row (n, K) from the largest prior to the smallest."""
    return np.argsort(-priors, axis=1, kind="stable")


def top_k_members(scores: np.ndarray, k: np.ndarray | int) -> np.ndarray:
    """Returns which classes are in the top-k set of each row (n, K), as RRTop-k draws: ``bool``."""
    within = np.arange(scores.shape[1]) < np.reshape(k, (-1, 1))
    members = np.empty(scores.shape, dtype=bool)
    np.put_along_axis(members, rank_classes(scores), within, axis=1)
    return members


def row_chunks(shape: tuple[int, ...]) -> Iterator[slice]:
    """Yields slices of rows that hold about ``_CHUNK_CELLS`` cells each."""
    step = max(1, _CHUNK_CELLS // max(1, shape[1]))
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))
