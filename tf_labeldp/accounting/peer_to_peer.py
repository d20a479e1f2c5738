"""The guarantee of peer-to-peer randomized response: numeric and tight.

Names follow docs/theory.md, which proves the four facts used here: one tail, blocks of t,
smaller cores, larger clusters.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting._guarantee import Assumption, PrivacyGuarantee

_SLACK = 1e-10
"""Relative amount by which epsilon is rounded up."""
_LEAST_DELTA, _MOST_EPSILON = 1e-25, 400.0
"""Beyond these, doubles do not resolve the sums, and only the flips count."""
_LEFT_OUT = 1e-12
"""Share of the target delta: values of M with less probability are left out and added to delta."""
_ROUNDING = 1e-12
"""Bound on the relative error of sums over M, which is added to delta."""
_TAIL_ERROR = 1e-14
"""Bound per user on the relative error of SciPy's tails (2e-15 in 1.11), also added to delta."""
_SINGLE = 10
"""Numbers of reports below this have their own blocks."""
_ELEMENTS, _BLOCKS = 30_000, (40, 200)
"""Range of the number of blocks of t, chosen so that values of M times blocks is about 30,000."""
_NO_LOG = -1e300
"""Finite value for log 0: zero times it is zero, and its exponential is zero."""

_Range = tuple[int, int]


def peer_to_peer_guarantee(
    flip_probability: float, subsampling_rate: float, cluster_size: int, delta: float
) -> PrivacyGuarantee:
    """Returns the guarantee of the reports of peer-to-peer randomized response.

    Guarantee:
        All reports together are (epsilon, delta)-DP for the replacement of one label, towards a
        learner who sees only them (users and their reported labels). Epsilon is a numeric upper
        bound, for the worst labels of the other users and in both directions. It never exceeds
        ``log((1 - alpha) / alpha)``, the epsilon of the flips alone, and equals it at ``delta=0``
        (and below 1e-25).

    Source: Algorithm 2 of ``esfandiari2022``, with a tighter bound than its Lemma 9; Hoeffding
    1956, Theorem 4, for larger clusters. The proof is in docs/theory.md.

    Args:
        flip_probability: alpha, the probability of flipping a user's own label, in (0, 0.5].
        subsampling_rate: theta, the probability that a user reports, in (0, 1].
        cluster_size: the least number of users in a cluster, at least 2; the guarantee is for all
            larger clusters too. Public knowledge. Up to 100,000 users take some seconds, longer for
            alpha close to 0.5.
        delta: in [0, 1).

    Example:
        >>> guarantee = peer_to_peer_guarantee(
        ...     flip_probability=0.1, subsampling_rate=0.1, cluster_size=1000, delta=1e-6
        ... )
        >>> round(guarantee.epsilon, 3)
        0.099
    """
    alpha = _validate.positive_finite("flip_probability", flip_probability)
    theta = _validate.number_in("subsampling_rate", subsampling_rate, "(0, 1]")
    delta = _validate.number_in("delta", delta, "[0, 1)")
    if alpha > 0.5:
        raise ValueError(
            f"flip_probability must be in (0, 0.5], got {alpha:g}. At 0.5 labels are pure noise."
        )
    size = _validate.integer_at_least("cluster_size", cluster_size, 1)
    if size == 1:
        raise ValueError(
            "cluster_size must be at least 2, got 1: a user alone has no peers. Merge small "
            "clusters first."
        )
    notes = _assumptions(alpha, theta, size)
    return PrivacyGuarantee(_epsilon(alpha, theta, size, delta), delta, assumptions=notes)


def _assumptions(
    flip_probability: float, subsampling_rate: float, cluster_size: int
) -> tuple[Assumption, ...]:
    """Returns the assumptions on the reports."""
    clusters = "The features are public, and the clusters were made from them without labels."
    sizes = f"Every cluster has at least {cluster_size} users."
    reports = (
        "The learner sees the reports alone, neither the messages between users nor which users "
        "exchanged them."
    )
    protocol = (
        f"Every user follows the protocol (flips once, with probability {flip_probability:.6g}; "
        "picks a user of the cluster uniformly and independently at random; reports with "
        f"probability {subsampling_rate:.6g}) and sends the learner nothing else."
    )
    messages = (
        "Each message between users reaches only the user who asked for it, and is "
        f"({_alone(flip_probability):.6g}, 0)-label-DP towards that user; this statement does not "
        "cover it."
    )
    return (
        Assumption("public-clusters", "holder", clusters),
        Assumption("cluster-sizes", "holder", sizes),
        Assumption("only-reports-seen", "users", reports),
        Assumption("users-follow-protocol", "users", protocol),
        Assumption("messages-between-users", "users", messages),
    )


class _Cluster:
    """Bounds of delta for all compositions of one cluster."""

    most_splits = 150
    """Most ranges of compositions that are split; the remaining ranges count with their bounds."""
    small = 2000
    """Largest cluster, in users, whose ranges are split until each is decided."""

    def __init__(
        self, alpha: float, theta: float, size: int, least_delta: float = _LEAST_DELTA
    ) -> None:
        self.size = size
        self._core = functools.partial(_Core, alpha, theta, size, least_delta)
        self._cores: dict[_Range, _Core] = {}

    def bound(self, ones: _Range, epsilon: float) -> float:
        if ones not in self._cores:
            self._cores[ones] = self._core(ones[0], self.size - 1 - ones[1])
        return self._cores[ones].delta(epsilon)

    def above(self, delta: float, epsilon: float) -> dict[_Range, float]:
        """Returns the compositions whose bound is not below delta at epsilon, largest first.

        They are single compositions, or ranges where too many would have to be split.
        """
        splits = self.most_splits if self.size > self.small else self.size
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
def _epsilon(alpha: float, theta: float, size: int, delta: float) -> float:
    most = _alone(alpha)
    if delta < _LEAST_DELTA or most == 0.0 or most > _MOST_EPSILON:
        return most
    cluster = _Cluster(alpha, theta, size, delta)
    epsilon = 0.0
    for ones in ((0, 0), (size - 1, size - 1)):
        epsilon = _least_epsilon(cluster, ones, delta, epsilon, most)
    if epsilon < most:
        # The other compositions are below delta; each in this loop raises epsilon until it is too.
        for ones in cluster.above(delta, epsilon):
            epsilon = _least_epsilon(cluster, ones, delta, epsilon, most)
    return epsilon


def _least_epsilon(
    cluster: _Cluster, ones: _Range, delta: float, least: float, most: float
) -> float:
    """Returns the epsilon in [least, most] at which these compositions' bound falls to delta."""
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
    """Returns the epsilon of the flips alone, ``log((1 - alpha) / alpha)``, rounded up."""
    # Close to 1/2 the difference of the logarithms is rounding error; 1 - 2 alpha is exact.
    log_odds = (
        math.log1p(-alpha) - math.log(alpha)
        if alpha < 0.25
        else math.log1p((1.0 - 2.0 * alpha) / alpha)
    )
    return log_odds * (1.0 + 2.0**-50)


@dataclasses.dataclass(frozen=True)
class _Core:
    """Some users of a cluster, one of them the target, and the reports drawn from them."""

    alpha: float
    theta: float
    n: int  # users in the whole cluster
    least_delta: float  # smallest relevant delta
    ones: int  # users in the core with label 1, without the target
    zeros: int

    @property
    def size(self) -> int:
        return self.ones + self.zeros + 1

    @functools.cached_property
    def reports(self) -> tuple[np.ndarray, np.ndarray, float]:
        """Largest N of each block (B,); P[N in this block or above] (B,); P[N above all blocks]."""
        from scipy import special

        mean = self.theta * self.size
        deviation = math.sqrt(mean)
        blocks = min(max(_ELEMENTS // self.noisy_ones[0].size, _BLOCKS[0]), _BLOCKS[1])
        top = math.sqrt(-2.0 * math.log(self.least_delta)) + 1.0
        grid = np.linspace(max(mean - 4.0 * deviation, 0.0), mean + top * deviation, blocks)
        last = np.ceil(mean + _reach(mean, self.log_tail))
        few = np.arange(min(_SINGLE, last))
        edges = np.unique(np.concatenate([few, np.rint(grid), [last]]))
        # Between mean - 1 and mean the only known bound is that of P[N > 0], which decreases.
        edges = edges[(edges <= max(mean - 1.0, 0.0)) | (edges >= mean)]
        # Both are bounds of P[N > edge] for this cluster and all larger ones.
        inside = np.minimum(edges, self.n - 1.0)
        below_mean = special.betainc(inside + 1.0, self.n - inside, min(mean / self.n, 1.0))
        above = np.where(edges >= mean, special.pdtrc(edges, mean), below_mean)
        return edges, np.append(1.0, above[:-1]), float(above[-1])

    @property
    def log_tail(self) -> float:
        """The logarithm of the probability of values of M that are left out."""
        return math.log(self.least_delta * _LEFT_OUT)

    @staticmethod
    def binomial(trials: int, p: float, log_tail: float) -> tuple[int, np.ndarray]:
        """Returns the first value of a binomial law and its probabilities, without two far tails.

        Together the tails have at most 2.5 times the probability with logarithm ``log_tail``.
        Ratios of neighbours build the law: a difference of log-gammas loses ten digits at large
        sizes.
        """
        mean, reach = trials * p, _reach(trials * p * (1.0 - p), log_tail)
        low, high = max(math.floor(mean - reach), 0), min(math.ceil(mean + reach), trials)
        k = np.arange(low, high, dtype=np.float64)
        steps = np.log((trials - k) / (k + 1.0)) + (math.log(p) - math.log1p(-p))
        logs = np.append(0.0, np.cumsum(steps))
        weights = np.exp(logs - logs.max())
        weights /= weights.sum()
        # Bernstein's inequality is loose, so tiny weights at the ends are left out too.
        kept = np.flatnonzero(weights * (2.0 * weights.size) >= math.exp(log_tail))
        weights = weights[kept[0] : kept[-1] + 1]
        return low + int(kept[0]), weights / weights.sum()

    @functools.cached_property
    def noisy_ones(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Values of M, and their probabilities under label 1 and under label 0, each (v,)."""
        alpha = self.alpha
        fewest, lost = self.binomial(self.ones, alpha, self.log_tail)
        low, gained = self.binomial(self.zeros, alpha, self.log_tail)
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
        largest, from_here, beyond = self.reports
        deltas = self._delta_given(epsilon, largest)
        bound = float(np.diff(deltas, prepend=0.0) @ from_here) + beyond
        bound *= 1.0 + _TAIL_ERROR * self.n
        # Five tails of M are left out, each in P_1 and in e^epsilon P_0, which is below P_1.
        return min(bound + 10.0 * self.least_delta * _LEFT_OUT, 1.0)

    def _delta_given(self, epsilon: float, reports: np.ndarray) -> np.ndarray:
        """Returns upper bounds of delta (B,) for each number of reports (B,), made increasing."""
        from scipy import special

        values, law_one, law_zero = self.noisy_ones
        share = values / self.size
        start = self._first_likelier(epsilon, reports)
        some = start <= reports
        at, t = start[some, np.newaxis], reports[some, np.newaxis]
        tail = np.where(at > 0.0, special.betainc(np.maximum(at, 1.0), t - at + 1.0, share), 1.0)
        grown = math.exp(epsilon)
        p_one, p_zero = tail @ law_one, grown * (tail @ law_zero)
        delta = np.zeros(reports.size)
        delta[some] = np.maximum(p_one - p_zero, 0.0) + _ROUNDING * (p_one + p_zero)
        # A tail's error enters both sums, with weights that mostly cancel.
        delta[some] += _TAIL_ERROR * self.n * (tail @ np.abs(law_one - grown * law_zero))
        return np.maximum.accumulate(delta)

    def _first_likelier(self, epsilon: float, reports: np.ndarray) -> np.ndarray:
        """Returns the least k (B,) with P_1(k | t) > e^epsilon P_0(k | t); t + 1 for none."""
        values, law_one, law_zero = self.noisy_ones
        with np.errstate(divide="ignore"):
            log_p = np.maximum(np.log(values / self.size), _NO_LOG)
            log_q = np.maximum(np.log1p(-values / self.size), _NO_LOG)
            log_zero = np.log(law_zero)
        low, high = np.full(reports.size, -1.0), reports + 1.0
        while np.any(undecided := high - low > 1.0):
            k = np.floor(0.5 * (low + high))
            logs = np.multiply.outer(k, log_p) + np.multiply.outer(reports - k, log_q)
            # Scaling makes the largest term for label 0 one, so no term for label 1 overflows.
            likelihood = np.exp(logs - np.max(logs + log_zero, axis=1, keepdims=True))
            likelier = likelihood @ law_one > math.exp(epsilon) * (likelihood @ law_zero)
            high = np.where(undecided & likelier, k, high)
            low = np.where(undecided & ~likelier, k, low)
        return high


def _reach(variance: float, log_tail: float) -> float:
    """Returns a distance from the mean that a sum of 0/1 variables passes only in a tail.

    This is Bernstein's inequality for one side, for independent variables and their Poisson limits.
    """
    third = -log_tail / 3.0
    return third + math.sqrt(third * third - 2.0 * log_tail * variance)
