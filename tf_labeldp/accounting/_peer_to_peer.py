"""The guarantee of peer-to-peer randomized response: numeric and tight, and the paper's bound.

The numbers come from bounds of delta for all compositions of a cluster (how many of the other users
have label 1), see ``_peer_to_peer_divergence``. Mostly a cluster of one label alone is the worst,
but not always (at flip probability 0.49 and 200 users, all of whom report, it is one of 187 to 12),
so every composition is looked at: a range of them is split until one number bounds it.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting._guarantee import PrivacyGuarantee
from tf_labeldp.accounting._peer_to_peer_divergence import Core

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

_Range = tuple[int, int]


def peer_to_peer_guarantee(
    flip_probability: float,
    subsampling_rate: float,
    cluster_size: Any,
    delta: float,
    *,
    sizes: str = "at_least",
) -> PrivacyGuarantee:
    """Returns what the reports of peer-to-peer randomized response promise.

    Privacy: all reports together are (epsilon, delta)-DP for the replacement of one label, towards
    a learner who sees only them (who reported, and which label). Epsilon is an upper bound: the
    numeric trade-off between the two laws of the reports, the worst over the labels of the other
    users and both directions, with every approximation on the safe side. It is never above
    ``log((1 - alpha) / alpha)``, which the flips give by themselves, and is this at ``delta=0``
    (and below 1e-25).

    Source: Algorithm 2 of ``esfandiari2022``; the paper's own bound is ``peer_to_peer_bound``.
    Hoeffding 1956 for larger clusters.

    Args:
        flip_probability: alpha, with which a user's own label is flipped, in (0, 0.5].
        subsampling_rate: theta, with which a user reports, in (0, 1].
        cluster_size: number of users of a cluster, at least 2; or the sizes of several, of any
            shape. Public knowledge. Up to 100,000 users take some seconds, longer where alpha is
            close to 0.5.
        delta: in [0, 1).
        sizes: ``"at_least"`` for a statement that holds for clusters of this size (the least of
            several) and for all larger ones; ``"exactly"`` for clusters of just these sizes, of
            which the worst counts. That is tighter: by less than one part in a hundred from 1,000
            users, by up to a fifth in clusters of tens of whom all report.

    Returns:
        A ``PrivacyGuarantee`` with its assumptions.

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
    delta = _validate.probability_below_one("delta", delta)
    epsilon = max(_epsilon(alpha, theta, size, delta, larger) for size in checked)
    return PrivacyGuarantee(
        epsilon=epsilon,
        delta=delta,
        assumptions=peer_to_peer_assumptions(alpha, theta, checked, sizes=sizes),
    )


def peer_to_peer_delta(
    epsilon: float,
    flip_probability: float,
    subsampling_rate: float,
    cluster_size: Any,
    *,
    sizes: str = "at_least",
) -> float:
    """Returns the delta of the reports of peer-to-peer randomized response at an epsilon.

    The inverse of ``peer_to_peer_guarantee``: never below the exact delta, zero where epsilon is
    that of the flips by themselves.

    Source: that of ``peer_to_peer_guarantee``.

    Args:
        epsilon: finite and above zero.
        flip_probability: as for ``peer_to_peer_guarantee``.
        subsampling_rate: likewise.
        cluster_size: likewise.
        sizes: likewise.

    Raises:
        TypeError: an argument is not a number.
        ValueError: an argument is out of range or unknown.

    Example:
        >>> delta = peer_to_peer_delta(
        ...     0.1, flip_probability=0.1, subsampling_rate=0.1, cluster_size=1000
        ... )
        >>> f"{delta:.1e}"
        '8.5e-07'
    """
    epsilon = _validate.positive_finite("epsilon", epsilon)
    alpha, theta = _checked_rates(flip_probability, subsampling_rate)
    checked, larger = _checked_sizes(cluster_size, sizes)
    return max(_delta(epsilon, alpha, theta, size, larger) for size in checked)


def peer_to_peer_bound(
    flip_probability: float, subsampling_rate: float, cluster_size: Any, delta: float
) -> PrivacyGuarantee:
    """Returns the closed bound that the paper states; for comparison.

    Privacy: as ``esfandiari2022`` has it, Lemma 9; charge ``peer_to_peer_guarantee``, which is
    smaller wherever they were compared. The paper's proof is for theta n reports and for clusters
    in which between alpha n and (1 - alpha) n of the noisy labels are ones; both numbers vary, and
    it does not say what that costs.

    Source: ``esfandiari2022``, Lemma 9, with the xi at which its delta is the one asked for.

    Args:
        flip_probability: alpha, in (0, 0.5].
        subsampling_rate: theta, in (0, 1].
        cluster_size: of the smallest cluster, or the sizes of all; at least 2 / alpha.
        delta: in (0, 1).

    Raises:
        TypeError: an argument is not a number.
        ValueError: an argument is out of range, or the lemma says nothing there.

    Example:
        >>> bound = peer_to_peer_bound(
        ...     flip_probability=0.2, subsampling_rate=0.5, cluster_size=10_000, delta=1e-8
        ... )
        >>> round(bound.epsilon, 3)
        0.853
    """
    alpha, theta = _checked_rates(flip_probability, subsampling_rate)
    (size,), _ = _checked_sizes(cluster_size, "at_least")
    delta = _validate.probability_below_one("delta", delta)
    if size < 2.0 / alpha:
        raise ValueError(
            f"Lemma 9 is for clusters of at least 2 / flip_probability = {2.0 / alpha:g} users, "
            f"got {size}. Use peer_to_peer_guarantee, which has no such condition."
        )
    most = 3.0 * alpha * math.sqrt(theta * size * (1.0 - alpha))
    least_log = -alpha * most**2 / (4.0 * (alpha + 1.0 / size) * (1.0 - alpha))
    if delta == 0.0 or math.log(delta) < least_log:
        raise ValueError(
            f"Lemma 9 reaches no delta below {math.exp(least_log):.3g} with flip_probability="
            f"{alpha:g}, subsampling_rate={theta:g} and clusters of {size}, got delta={delta:g}. "
            "Use peer_to_peer_guarantee, which has no such limit."
        )
    xi = most * math.sqrt(math.log(delta) / least_log)
    expected = 3.0 / (size * alpha)
    epsilon = theta * math.log(math.e + expected)
    epsilon += math.sqrt(theta) * xi * math.log1p(math.sqrt(3.0 * expected))
    return PrivacyGuarantee(
        epsilon=epsilon,
        delta=delta,
        assumptions=(
            *peer_to_peer_assumptions(alpha, theta, [size]),
            "Lemma 9 of Esfandiari et al. 2022 holds as stated, though its proof takes the number "
            "of reports and the share of noisy ones as given",
        ),
    )


def peer_to_peer_assumptions(
    flip_probability: float,
    subsampling_rate: float,
    cluster_size: Any,
    *,
    sizes: str = "at_least",
) -> tuple[str, ...]:
    """Returns the sentences that a guarantee of peer-to-peer randomized response rests on.

    Args:
        flip_probability: as for ``peer_to_peer_guarantee``.
        subsampling_rate: likewise.
        cluster_size: likewise.
        sizes: likewise.

    Example:
        >>> peer_to_peer_assumptions(0.1, 0.5, 100)[1]
        'every cluster has at least 100 users'
    """
    alpha, theta = _checked_rates(flip_probability, subsampling_rate)
    checked, larger = _checked_sizes(cluster_size, sizes)
    least = checked[0]
    if larger:
        users = f"at least {least} users"
    elif len(checked) == 1:
        users = f"exactly {least} users"
    else:
        users = f"one of the {len(checked)} sizes given, of {least} to {checked[-1]} users"
    return (
        "the features are public, and the clusters were made from them without labels",
        f"every cluster has {users}",
        "the learner sees the reports alone: not the messages between users, nor who asked whom",
        f"every user follows the protocol (flips once, with probability {alpha:.6g}; picks a user "
        "of the cluster uniformly at random, and afresh; reports with probability "
        f"{theta:.6g}) and tells the learner nothing else",
        "each message between users is seen by one of them, who asked, and is "
        f"({_alone(alpha):.6g}, 0)-label-DP towards that one; this statement does not cover it",
    )


def _checked_rates(flip_probability: Any, subsampling_rate: Any) -> tuple[float, float]:
    """Returns alpha and theta, or raises."""
    alpha = _validate.positive_finite("flip_probability", flip_probability)
    theta = _validate.positive_finite("subsampling_rate", subsampling_rate)
    if alpha > 0.5:
        raise ValueError(
            f"flip_probability must be in (0, 0.5], got {alpha:g}. At 0.5 the labels are pure "
            "noise; above, they say the opposite."
        )
    if theta > 1.0:
        raise ValueError(f"subsampling_rate must be in (0, 1], got {theta:g}.")
    return alpha, theta


def _checked_sizes(cluster_size: Any, sizes: Any) -> tuple[list[int], bool]:
    """Returns the sizes to look at, increasing, and whether larger ones are meant too."""
    _validate.one_of("sizes", sizes, _SIZES)
    several = cluster_size if isinstance(cluster_size, (list, tuple, np.ndarray)) else None
    found = [cluster_size] if several is None else np.unique(np.asarray(several)).tolist()
    if not found:
        raise ValueError("cluster_size is empty. Give the size of the smallest cluster, or all.")
    checked = sorted(_checked_each(found))
    return (checked[:1], True) if sizes == "at_least" else (checked, False)


def _checked_each(found: Iterable[Any]) -> Iterable[int]:
    for size in found:
        number = _validate.integer_at_least("cluster_size", size, 1)
        if number == 1:
            raise ValueError(
                "cluster_size must be at least 2, got 1: a user alone has no peers, and would "
                "report the own noisy label. Merge small clusters first."
            )
        yield number


class _Cluster:
    """Bounds of delta for all compositions of one cluster."""

    def __init__(self, alpha: float, theta: float, size: int, larger: bool, least: float) -> None:
        self.size = size
        self._core = functools.partial(Core, alpha, theta, size, larger, least)
        self._cores: dict[_Range, Core] = {}

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


@functools.lru_cache(maxsize=256)
def _delta(epsilon: float, alpha: float, theta: float, size: int, larger: bool) -> float:
    """Returns a bound of delta of a cluster at epsilon."""
    most = _alone(alpha)
    if epsilon >= most:
        return 0.0
    if most > _MOST_EPSILON:
        return 1.0
    cluster = _Cluster(alpha, theta, size, larger, _LEAST_DELTA)
    ends = max(cluster.bound((ones, ones), epsilon) for ones in (0, size - 1))
    return max([ends, *cluster.above(ends, epsilon).values()])


def _alone(alpha: float) -> float:
    """Returns the epsilon of the flips by themselves, ``log((1 - alpha) / alpha)``, rounded up."""
    # Close to 1/2 the difference of the logarithms would be all rounding; 1 - 2 alpha is exact.
    log_odds = (
        math.log1p(-alpha) - math.log(alpha)
        if alpha < 0.25
        else math.log1p((1.0 - 2.0 * alpha) / alpha)
    )
    return log_odds * (1.0 + 2.0**-50)
