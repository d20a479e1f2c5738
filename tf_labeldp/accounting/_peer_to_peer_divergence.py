"""What reports from a cluster tell of one label: bounds of delta, on the safe side throughout.

One cluster has n users, of whom one is looked at and m of the other n - 1 have label 1. M users
have the noisy label 1, and each of t reports is a draw, with replacement, from the n noisy labels:
given M and t they are independent, so their number of ones k ~ Bin(t, M / n) is all that they tell.
t ~ Bin(n, theta) does not depend on labels. What is compared is P_1 against P_0, the laws of (t, k)
with label 1 and with label 0. (With the roles exchanged, count zeros: m becomes n - 1 - m.)

Four facts are used.

* *One tail.* The other users' count is a sum of independent 0/1 variables, so its law q is
  log-concave, and M under label 1 has an increasing likelihood ratio to M under label 0. Binomial
  laws have it in M too, so P_1(k | t) / P_0(k | t) increases in k (both kernels are totally
  positive), and delta given t is ``max_j P_1(k >= j | t) - e^epsilon P_0(k >= j | t)``: the best j
  is found by bisection, and tails of binomials are incomplete beta functions.
* *Blocks of t.* Fewer reports can be made from more, by leaving some out, so delta given t does not
  decrease in t. A block of values of t counts with its largest one.
* *Smaller cores.* Tell the learner the noisy labels of w of the other users, and which reports are
  theirs. That can only raise delta, and leaves a core of c = n - w users with
  N ~ Bin(n, theta c / n) reports, whatever the labels told. With b - m of label 0 and m - a of
  label 1 told, all compositions m in a..b have the same core, so one number bounds delta for all.
* *Larger clusters.* Likewise a cluster of L >= n users is reduced to n, or to a core of c of them,
  with N ~ Bin(L, theta c / L) reports, whose mean lambda does not depend on L. By Hoeffding 1956
  ("On the distribution of the number of successes in independent trials", Theorem 4) P[N > j]
  increases with L for j >= lambda, to that of a Poisson variable, and decreases for
  j <= lambda - 1. With these bounds of P[N > j] one number bounds delta for all clusters of n users
  or more.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

_LEFT_OUT = 1e-12
"""Values of M with together this share of the delta looked for are left out, and added to delta."""
_ROUNDING = 1e-12
"""Above the relative error of sums over M, which is added to delta."""
_TAIL_ERROR = 1e-14
"""A user: above the relative error of the tails of binomial and Poisson laws (2e-15 in SciPy 1.11,
1e-17 later), which is added to delta too."""
_SINGLE = 10
"""Numbers of reports up to so many have blocks of their own."""
_ELEMENTS = 30_000
_BLOCKS = (40, 200)
"""So many blocks of t (fewer where t has fewer values) that M times blocks keeps to the above."""
_NO_LOG = -1e300
"""In place of log 0: times zero it is zero, and its exponential is zero."""


@dataclasses.dataclass(frozen=True)
class Core:
    """Some users of a cluster, the looked-at one among them, and the reports drawn from them.

    Attributes:
        flip_probability: of each user's own label, in (0, 1/2).
        subsampling_rate: of reports, in (0, 1].
        cluster_size: n, of the whole cluster.
        larger: whether bounds are to hold for larger clusters too.
        least_delta: the smallest delta that matters.
        ones: users of the core with label 1, without the one looked at.
        zeros: likewise with label 0; ``ones + zeros + 1`` is at most n.
    """

    flip_probability: float
    subsampling_rate: float
    cluster_size: int
    larger: bool
    least_delta: float
    ones: int
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
        """Returns the least k (B,) with P_1(k | t) > e^epsilon P_0(k | t); t + 1 for none.

        One more report that is a zero lowers the likelihood ratio, so this k increases with t: one
        that was found bounds those of its neighbours.
        """
        first = np.zeros(reports.size)
        stride = 1 << max(reports.size - 1, 0).bit_length()
        low, high = np.array([-1.0]), reports[:1] + 1.0
        rows = np.array([0])
        while True:
            first[rows] = self._bisect(epsilon, reports[rows], low, high)
            if stride == 1:
                return first
            stride //= 2
            rows = np.arange(stride, reports.size, 2 * stride)
            low = first[rows - stride] - 1.0
            after = np.minimum(rows + stride, reports.size - 1)
            high = np.where(rows + stride < reports.size, first[after], reports[rows] + 1.0)

    def _bisect(
        self, epsilon: float, reports: np.ndarray, low: np.ndarray, high: np.ndarray
    ) -> np.ndarray:
        """Returns the least k in (low, high] where label 1 is likelier by e^epsilon, or high."""
        log_p, log_q, log_zero = self._logs
        _, one, zero = self.noisy_ones
        high = np.minimum(high, reports + 1.0)
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
