"""The guarantee of peer-to-peer randomized response: numeric and tight.

Names are those of docs/accounting.md, which proves the four facts that are used: one tail, blocks
of t, smaller cores, larger clusters.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting._annotations import Setting
from tf_labeldp.accounting._guarantee import Assumption, PrivacyGuarantee

_SIZES = ("at_least", "exactly")
_SLACK = 1e-10
"""Epsilon is rounded up by one part in so many."""
_LEAST_DELTA = 1e-25
"""Below, the sums are not resolved in doubles, and only the flips are counted on."""
_MOST_EPSILON = 400.0
"""Flips that give no less by themselves are so rare that doubles end: likewise."""
_MOST_SPLITS = 150
"""So many ranges of compositions are split; those left then count with their bounds."""
_SMALL = 2000
"""In clusters of up to so many users, every range is split until it is decided."""
_LEFT_OUT = 1e-12
"""Values of M with together this share of the delta looked for are left out, and added to delta."""
_ROUNDING = 1e-12
"""Above the relative error of sums over M, which is added to delta."""
_TAIL_ERROR = 1e-14
"""A user: above the relative error of SciPy's tails (2e-15 in 1.11), likewise added to delta."""
_SINGLE = 10
"""Numbers of reports up to so many have blocks of their own."""
_ELEMENTS = 30_000
_BLOCKS = (40, 200)
"""So many blocks of t (fewer where t has fewer values) that M times blocks keeps to the above."""
_NO_LOG = -1e300
"""In place of log 0: times zero it is zero, and its exponential is zero."""

_Range = tuple[int, int]


def peer_to_peer_guarantee(
    flip_probability: float,
    subsampling_rate: float,
    cluster_size: Setting[Any],
    delta: float,
    *,
    sizes: str = "at_least",
) -> PrivacyGuarantee:
    """Returns what the reports of peer-to-peer randomized response promise.

    Guarantee:
        All reports together are (epsilon, delta)-DP for the replacement of one label, towards a
        learner who sees only them (who reported, and which label). Epsilon is a numeric upper
        bound, for the worst labels of the other users and in both directions. It is never above
        ``log((1 - alpha) / alpha)``, which the flips give by themselves, and is this at
        ``delta=0`` (and below 1e-25).

    Source: Algorithm 2 of ``esfandiari2022``, with a tighter bound than its Lemma 9; Hoeffding
    1956, Theorem 4, for larger clusters. The proof is in docs/accounting.md.

    Args:
        flip_probability: alpha, with which a user's own label is flipped, in (0, 0.5].
        subsampling_rate: theta, with which a user reports, in (0, 1].
        cluster_size: number of users of a cluster, at least 2; or the sizes of several, of any
            shape. Public knowledge. Up to 100,000 users take some seconds, longer where alpha is
            close to 0.5.
        delta: in [0, 1).
        sizes: ``"at_least"`` for clusters of this size (the least of several) and all larger ones;
            ``"exactly"`` for clusters of just these sizes, of which the worst counts. That is
            tighter: by up to a fifth in clusters of tens of users, by less than one part in a
            hundred from 1,000 on.

    Raises:
        TypeError: an argument is not a number.
        ValueError: an argument is out of range or unknown.

    Example:
        >>> guarantee = peer_to_peer_guarantee(
        ...     flip_probability=0.1, subsampling_rate=0.1, cluster_size=1000, delta=1e-6
        ... )
        >>> round(guarantee.epsilon, 3)
        0.099
    """
    alpha, theta = _checked_rates(flip_probability, subsampling_rate)
    checked, larger = _checked_sizes(cluster_size, sizes)
    delta = _validate.number_in("delta", delta, "[0, 1)")
    epsilon = max(_epsilon(alpha, theta, size, delta, larger) for size in checked)
    users = None
    if not larger:
        several = f"one of the {len(checked)} sizes given, of {checked[0]} to {checked[-1]} users"
        users = several if len(checked) > 1 else f"exactly {checked[0]} users"
    return PrivacyGuarantee(
        epsilon=epsilon,
        delta=delta,
        assumptions=peer_to_peer_assumptions(alpha, theta, checked[0], users),
    )


def peer_to_peer_assumptions(
    flip_probability: float, subsampling_rate: float, cluster_size: int, users: str | None = None
) -> tuple[Assumption, ...]:
    """Returns what a guarantee of the reports rests on, in clusters of that size or more.

    ``users`` says it in words where the sizes are known exactly.
    """
    return (
        Assumption(
            "public-clusters",
            "holder",
            "The features are public, and the clusters were made from them without labels.",
        ),
        Assumption(
            "cluster-sizes",
            "holder",
            f"Every cluster has {users or f'at least {cluster_size} users'}.",
        ),
        Assumption(
            "only-reports-seen",
            "users",
            "The learner sees the reports alone, neither the messages between users nor which "
            "users exchanged them.",
        ),
        Assumption(
            "users-follow-protocol",
            "users",
            f"Every user follows the protocol (flips once, with probability {flip_probability:.6g}"
            "; picks a user of the cluster uniformly and independently at random; reports with "
            f"probability {subsampling_rate:.6g}) and sends the learner nothing else.",
        ),
        Assumption(
            "messages-between-users",
            "users",
            "Each message between users is seen by the one who asked, and is "
            f"({_alone(flip_probability):.6g}, 0)-label-DP towards that user; this statement does "
            "not cover it.",
        ),
    )


def _checked_rates(flip_probability: Any, subsampling_rate: Any) -> tuple[float, float]:
    """Returns alpha and theta, or raises."""
    alpha = _validate.positive_finite("flip_probability", flip_probability)
    theta = _validate.number_in("subsampling_rate", subsampling_rate, "(0, 1]")
    if alpha > 0.5:
        raise ValueError(
            f"flip_probability must be in (0, 0.5], got {alpha:g}: at 0.5 labels are pure noise."
        )
    return alpha, theta


def _checked_sizes(cluster_size: Any, sizes: Any) -> tuple[list[int], bool]:
    """Returns the sizes to look at, increasing, and whether larger ones are meant too."""
    _validate.one_of("sizes", sizes, _SIZES)
    several = isinstance(cluster_size, (list, tuple, np.ndarray))
    found = np.unique(np.asarray(cluster_size)).tolist() if several else [cluster_size]
    if not found:
        raise ValueError("cluster_size is empty. Give the size of the smallest cluster, or all.")
    checked = sorted(_validate.integer_at_least("cluster_size", size, 1) for size in found)
    if checked[0] == 1:
        raise ValueError(
            "cluster_size must be at least 2, got 1: a user alone has no peers. Merge small "
            "clusters first."
        )
    return (checked[:1], True) if sizes == "at_least" else (checked, False)


class _Cluster:
    """Bounds of delta for all compositions of one cluster."""

    def __init__(self, alpha: float, theta: float, size: int, larger: bool, least: float) -> None:
        self.size = size
        self._core = functools.partial(_Core, alpha, theta, size, larger, least)
        self._cores: dict[_Range, _Core] = {}

    def bound(self, ones: _Range, epsilon: float) -> float:
        """Returns a bound for all compositions with so many other users of label 1."""
        if ones not in self._cores:
            self._cores[ones] = self._core(ones[0], self.size - 1 - ones[1])
        return self._cores[ones].delta(epsilon)

    def above(self, delta: float, epsilon: float) -> dict[_Range, float]:
        """Returns what is not below delta at epsilon, largest bounds first.

        Single compositions; or ranges of them, where too many would have to be split.
        """
        splits = _MOST_SPLITS if self.size > _SMALL else self.size
        everything = (0, self.size - 1)
        heap = [(-self.bound(everything, epsilon), everything)]
        found = {}
        while heap and -heap[0][0] > delta:
            value, (low, high) = heapq.heappop(heap)
            if low == high or splits == 0:
                found[low, high] = -value
                continue
            splits -= 1
            middle = (low + high) // 2
            for part in ((low, middle), (middle + 1, high)):
                heapq.heappush(heap, (-self.bound(part, epsilon), part))
        return found


@functools.lru_cache(maxsize=256)
def _epsilon(alpha: float, theta: float, size: int, delta: float, larger: bool) -> float:
    """Returns the least epsilon of a cluster at delta, rounded up."""
    most = _alone(alpha)
    if delta < _LEAST_DELTA or most == 0.0 or most > _MOST_EPSILON:
        return most
    cluster = _Cluster(alpha, theta, size, larger, delta)
    epsilon = 0.0
    for ones in ((0, 0), (size - 1, size - 1)):
        epsilon = _least_epsilon(cluster, ones, delta, epsilon, most)
    if epsilon < most:
        # All others are below delta here, or are brought below one after another: delta falls.
        for ones in cluster.above(delta, epsilon):
            epsilon = _least_epsilon(cluster, ones, delta, epsilon, most)
    return epsilon


def _least_epsilon(
    cluster: _Cluster, ones: _Range, delta: float, least: float, most: float
) -> float:
    """Returns where the bound for these compositions falls to delta, in [least, most]."""
    from scipy import optimize

    def excess(epsilon: float) -> float:
        return math.log(cluster.bound(ones, epsilon) / delta)

    if excess(least) <= 0.0:
        return least
    almost = most * (1.0 - _SLACK)
    if least >= almost or excess(almost) > 0.0:
        return most
    epsilon = float(optimize.brentq(excess, least, almost, xtol=1e-3 * _SLACK * most, rtol=_SLACK))
    step = _SLACK
    while epsilon < most and excess(epsilon) > 0.0:
        epsilon, step = epsilon * (1.0 + step), 2.0 * step
    return min(epsilon, most)


def _alone(alpha: float) -> float:
    """Returns the epsilon of the flips by themselves, ``log((1 - alpha) / alpha)``, rounded up."""
    # Close to 1/2 the difference of the logarithms would be all rounding; 1 - 2 alpha is exact.
    log_odds = (
        math.log1p(-alpha) - math.log(alpha)
        if alpha < 0.25
        else math.log1p((1.0 - 2.0 * alpha) / alpha)
    )
    return log_odds * (1.0 + 2.0**-50)


@dataclasses.dataclass(frozen=True)
class _Core:
    """Some users of a cluster, the looked-at one among them, and the reports drawn from them."""

    flip_probability: float
    subsampling_rate: float
    cluster_size: int  # n, of the whole cluster
    larger: bool  # whether bounds are to hold for larger clusters too
    least_delta: float  # the smallest that matters
    ones: int  # users of the core with label 1, without the one looked at
    zeros: int

    @property
    def size(self) -> int:
        """The number of users of the core, c."""
        return self.ones + self.zeros + 1

    @functools.cached_property
    def reports(self) -> tuple[np.ndarray, np.ndarray, float]:
        """Blocks of N, largest values t (B,); P[N in this block or above] (B,); P[N above all]."""
        n, rate = self.cluster_size, self.subsampling_rate * self.size / self.cluster_size
        mean = self.subsampling_rate * self.size
        deviation = math.sqrt(mean if self.larger else mean * max(1.0 - rate, 0.0))
        width = _reach(mean if self.larger else deviation**2, self._log_tail)
        blocks = min(max(_ELEMENTS // self.noisy_ones[0].size, _BLOCKS[0]), _BLOCKS[1])
        top = math.sqrt(-2.0 * math.log(self.least_delta)) + 1.0
        grid = np.linspace(max(mean - 4.0 * deviation, 0.0), mean + top * deviation, blocks)
        last = np.ceil(mean + width)
        few = np.arange(min(_SINGLE, last))
        edges = np.unique(np.concatenate([few, np.rint(grid), [last]]))
        if self.larger:
            # Between mean - 1 and mean neither bound is known, but for P[N > 0], which decreases.
            edges = edges[(edges <= max(mean - 1.0, 0.0)) | (edges >= mean)]
        else:
            edges = np.unique(np.minimum(edges, n))
        above = self._above(edges)
        return edges, np.append(1.0, above[:-1]), float(above[-1])

    def _above(self, edges: np.ndarray) -> np.ndarray:
        """Returns P[N > edge], or what bounds it for all larger clusters."""
        from scipy import special

        n, mean = self.cluster_size, self.subsampling_rate * self.size
        inside = np.minimum(edges, n - 1.0)
        binomial = special.betainc(inside + 1.0, n - inside, min(mean / n, 1.0))
        binomial = np.where(edges >= n, 0.0, binomial)
        if not self.larger:
            return binomial
        return np.where(edges >= mean, special.pdtrc(edges, mean), binomial)

    @property
    def _log_tail(self) -> float:
        return math.log(self.least_delta * _LEFT_OUT)

    @functools.cached_property
    def noisy_ones(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Values of M (v,), and their probabilities under label 1 and under label 0 (v,)."""
        alpha = self.flip_probability
        fewest, lost = _binomial(self.ones, alpha, self._log_tail)
        low, gained = _binomial(self.zeros, alpha, self._log_tail)
        low += self.ones - fewest - (lost.size - 1)
        q = np.convolve(lost[::-1], gained)
        with_label, without = np.append(0.0, q), np.append(q, 0.0)
        values = np.arange(low, low + with_label.size, dtype=np.float64)
        return (
            values,
            alpha * without + (1.0 - alpha) * with_label,
            (1.0 - alpha) * without + alpha * with_label,
        )

    def delta(self, epsilon: float) -> float:
        """Returns an upper bound of delta at epsilon."""
        largest, from_here, beyond = self.reports
        given = self._delta_given(epsilon, largest)
        bound = float(np.diff(given, prepend=0.0) @ from_here) + beyond
        bound *= 1.0 + _TAIL_ERROR * self.cluster_size
        # Of M, five tails are left out, each in P_1 and in e^epsilon P_0, which is below P_1.
        return min(bound + 10.0 * self.least_delta * _LEFT_OUT, 1.0)

    def _delta_given(self, epsilon: float, reports: np.ndarray) -> np.ndarray:
        """Returns delta (B,) given each number of reports (B,), increasing, on the safe side."""
        from scipy import special

        values, one, zero = self.noisy_ones
        share = values / self.size
        start = self._first_likelier(epsilon, reports)
        some = start <= reports
        at, t = start[some, np.newaxis], reports[some, np.newaxis]
        tail = np.where(at > 0.0, special.betainc(np.maximum(at, 1.0), t - at + 1.0, share), 1.0)
        grown = math.exp(epsilon)
        p_one, p_zero = tail @ one, grown * (tail @ zero)
        delta = np.zeros(reports.size)
        delta[some] = np.maximum(p_one - p_zero, 0.0) + _ROUNDING * (p_one + p_zero)
        # An error of a tail counts in both sums, with a weight that mostly cancels.
        delta[some] += _TAIL_ERROR * self.cluster_size * (tail @ np.abs(one - grown * zero))
        return np.maximum.accumulate(delta)

    def _first_likelier(self, epsilon: float, reports: np.ndarray) -> np.ndarray:
        """Returns the least k (B,) with P_1(k | t) > e^epsilon P_0(k | t); t + 1 for none."""
        log_p, log_q, log_zero = self._logs
        _, one, zero = self.noisy_ones
        low, high = np.full(reports.size, -1.0), reports + 1.0
        while np.any(apart := high - low > 1.0):
            k = np.floor(0.5 * (low + high))
            logs = np.multiply.outer(k, log_p) + np.multiply.outer(reports - k, log_q)
            # So that the largest term for label 0 is one, and none for label 1 overflows.
            likelihood = np.exp(logs - np.max(logs + log_zero, axis=1, keepdims=True))
            likelier = likelihood @ one > math.exp(epsilon) * (likelihood @ zero)
            high = np.where(apart & likelier, k, high)
            low = np.where(apart & ~likelier, k, low)
        return high

    @functools.cached_property
    def _logs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Logs of M / c, of 1 - M / c, and of the probabilities of M under label 0 (v,)."""
        values, _, zero = self.noisy_ones
        with np.errstate(divide="ignore"):
            log_p = np.maximum(np.log(values / self.size), _NO_LOG)
            log_q = np.maximum(np.log1p(-values / self.size), _NO_LOG)
            return log_p, log_q, np.log(zero)


def _reach(variance: float, log_tail: float) -> float:
    """Returns how far from its mean a sum of independent 0/1 variables may be, but for a tail.

    Bernstein's inequality for one side; it holds for Poisson variables, their limits, too.
    """
    third = -log_tail / 3.0
    return third + math.sqrt(third * third - 2.0 * log_tail * variance)


def _binomial(trials: int, p: float, log_tail: float) -> tuple[int, np.ndarray]:
    """Returns where a binomial law begins and its probabilities, with two far tails left out.

    Of both together 2.5 times the probability whose logarithm is ``log_tail`` is left out at most.
    Built up from ratios of neighbours: a difference of log-gammas loses ten digits at large sizes.
    """
    mean, reach = trials * p, _reach(trials * p * (1.0 - p), log_tail)
    low, high = max(math.floor(mean - reach), 0), min(math.ceil(mean + reach), trials)
    k = np.arange(low, high, dtype=np.float64)
    steps = np.log((trials - k) / (k + 1.0)) + (math.log(p) - math.log1p(-p))
    logs = np.append(0.0, np.cumsum(steps))
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    # Bernstein's inequality is generous: what is tiny at the ends goes too.
    kept = np.flatnonzero(weights * (2.0 * weights.size) >= math.exp(log_tail))
    weights = weights[kept[0] : kept[-1] + 1]
    return low + int(kept[0]), weights / weights.sum()
