"""The bins of RR-on-Bins with the least expected loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Public, public_input
from tf_labeldp.mechanisms._bins import RROnBins
from tf_labeldp.mechanisms.bin_losses import (
    SegmentCosts,
    checked_loss,
    loss_values,
    segment_costs,
)

SegmentCost = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""The costs of segments [start, end), as ``float64``."""
_MOST_ROUNDS = 100
"""Most rounds of Dinkelbach's method, which needs three to six; all but the last lower the loss."""
_LEAF = 48
"""Number of ends up to which all pairs are evaluated together."""


def optimal_bins(
    values: Public[Any], probabilities: Public[Any], epsilon: float, loss: str = "squared_error"
) -> RROnBins:
    """Returns the RR-on-Bins with the least expected loss under a prior of the labels.

    No epsilon-DP mechanism on these values has a smaller expected loss, up to rounding
    (``ghazi2023``, Theorem 5).

    Guarantee:
        The mechanism is epsilon-DP for every prior; a wrong prior costs accuracy only. The prior
        must be public, or released privately and charged (``LabelRandomizer`` does so; the
        mechanism keeps the receipts of ``Priors``).

    Source: ``ghazi2023``, Algorithm 2, which fills an O(k^3) table of cheapest partitions of the
    first i values into j bins. Here, in O(k log^2 k) evaluations of a bin's cost and O(k) memory,
    Dinkelbach's method (1967) minimises the ratio of the cost to ``d - 1 + e^epsilon``: each round
    finds the cheapest partition with any number of bins, for a cost less ``lambda`` per bin
    (``cheapest_cuts``). It needs Monge costs; costs are Monge once each bin's output is limited to
    the range from the value before the bin to the value after it. That loses nothing: an optimal
    mechanism has labels and outputs in the same order, and by Assumption 4 a label cannot lie
    beyond the output of the next bin. Proof of Monge: for ``a <= b <= c <= d`` let x be the best
    output of [a, d) and z the best output of [b, c). If ``x <= z``, x may serve [a, c) and z
    [b, d), and the totals change by ``W_[c,d)(z) - W_[c,d)(x) <= 0``, since every label from c on
    is at least z. If ``x > z``, z serves [a, c) and x [b, d), and the totals change by
    ``W_[a,b)(z) - W_[a,b)(x) <= 0``.

    Args:
        values: possible labels, (k,), finite, in any order; equal values are merged.
        probabilities: their probabilities, (k,), with sum one (tolerance 1e-4); zeros are allowed.
        epsilon: finite and above zero.
        loss: ``"squared_error"`` ``(y_hat - y)^2``, ``"absolute_error"`` ``|y_hat - y|``,
            or ``"poisson"`` ``y_hat - y log(y_hat)`` (values of zero or more).

    Returns:
        The mechanism, whose inputs are the distinct values.

    Raises:
        ValueError: values, probabilities or loss are out of range.

    Example:
        >>> mechanism = optimal_bins([0, 1, 2, 3, 100], [0.3, 0.3, 0.2, 0.1, 0.1], epsilon=3.0)
        >>> [round(output, 1) for output in mechanism.outputs], mechanism.bin_of_input
        ([1.7, 69.4], (0, 0, 0, 0, 1))
    """
    epsilon = _validate.positive_finite("epsilon", epsilon)
    public = public_input(values, probabilities)
    values, prior = checked_prior(*public.value)
    checked_loss(loss, values)
    support = prior > 0.0
    points = values[support]
    costs = segment_costs(loss, points, prior[support], epsilon)
    outputs, bins = _distinct(costs, _best_cuts(costs))
    all_bins = _all_bins(values, points, outputs, bins, loss)
    # The noisy labels depend on the releases of the prior too.
    return RROnBins(epsilon, tuple(values), tuple(outputs), all_bins, receipts=public.receipts)


def _best_cuts(costs: SegmentCosts) -> np.ndarray:
    """Returns the cuts of the partition with the least cost / (1 + (d - 1) e^-epsilon)."""
    length = costs.values.size
    cuts = np.array([0, length])
    ratio = _ratio(costs, cuts)
    for _ in range(_MOST_ROUNDS):
        penalty = ratio * costs.shrink
        found = cheapest_cuts(length, lambda a, b, p=penalty: costs.cost(a, b) - p)  # type: ignore[misc]
        new = _ratio(costs, found)
        if not new < ratio:
            break
        cuts, ratio = found, new
    return cuts


def _ratio(costs: SegmentCosts, cuts: np.ndarray) -> float:
    total = float(np.sum(costs.cost(cuts[:-1], cuts[1:])))
    return total / (1.0 + (cuts.size - 2) * costs.shrink)


def _distinct(costs: SegmentCosts, cuts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns increasing outputs and the bin of each value; bins with equal outputs are merged."""
    while True:
        outputs = costs.outputs(cuts)
        keep = np.concatenate(([True], outputs[1:] > outputs[:-1], [True]))
        if np.all(keep):
            return outputs, np.repeat(np.arange(outputs.size), np.diff(cuts))
        cuts = cuts[keep]


def _all_bins(
    values: np.ndarray, points: np.ndarray, outputs: np.ndarray, bins: np.ndarray, loss: str
) -> tuple[int, ...]:
    """Returns the bin of every value; a value of probability zero joins the bin of less loss."""
    after = np.minimum(np.searchsorted(points, values), points.size - 1)
    before = np.maximum(np.searchsorted(points, values, side="right") - 1, 0)
    low, high = bins[before], bins[after]
    if loss == "poisson":
        to_low, to_high = (loss_values(loss, outputs[side], values) for side in (low, high))
    else:  # Distances are halved, since those of huge values overflow.
        to_low, to_high = (np.abs(0.5 * outputs[side] - 0.5 * values) for side in (low, high))
    left = to_low <= to_high
    return tuple(np.maximum.accumulate(np.where(left, low, high)).tolist())


def checked_prior(values: Any, probabilities: Any) -> tuple[np.ndarray, np.ndarray]:
    array = _validate.real_vector("values", values)
    distinct, place = np.unique(array, return_inverse=True)
    distinct = _validate.increasing_numbers("values", distinct)
    prior = _validate.prior_rows("probabilities", probabilities, 1, array.size)[0]
    merged = np.bincount(place, prior)
    return distinct, merged / merged.sum()


def cheapest_cuts(length: int, cost: SegmentCost) -> np.ndarray:
    """Returns the cuts of [0, length) into segments with the least total cost.

    Costs ``w(a, b)`` of a segment [a, b) are Monge if ``w(a, c) + w(b, d) <= w(a, d) + w(b, c)``
    for ``a <= b <= c <= d``. Then the best last cut moves right as the end does (Aggarwal, Klawe,
    Moran, Shor and Wilber 1987), so each half of the ends finds its cuts in the half before it in
    O(n log n) evaluations, and all ends take O(n log^2 n).
    """
    best = np.full(length + 1, np.inf)
    best[0] = 0.0
    cut = np.zeros(length + 1, dtype=np.int64)
    _solve(0, length + 1, best, cut, cost)
    ends = [length]
    while ends[-1] > 0:
        ends.append(int(cut[ends[-1]]))
    return np.array(ends[::-1], dtype=np.int64)


def _solve(first: int, last: int, best: np.ndarray, cut: np.ndarray, cost: SegmentCost) -> None:
    """Completes ``best`` and ``cut`` on [first, last), with all cuts before ``first`` applied."""
    if last - first > _LEAF:
        middle = (first + last) // 2
        _solve(first, middle, best, cut, cost)
        totals, argmins = _row_minima(first, middle, last, best, cost)
        later = slice(middle, last)
        better = totals < best[later]
        best[later] = np.where(better, totals, best[later])
        cut[later] = np.where(better, argmins, cut[later])
        _solve(middle, last, best, cut, cost)
        return
    starts, ends = np.triu_indices(last - first, k=1)
    costs = np.full((last - first, last - first), np.inf)
    costs[ends, starts] = cost(starts + first, ends + first)
    for row in range(1, last - first):
        totals = best[first : first + row] + costs[row, :row]
        i = int(np.argmin(totals))
        if totals[i] < best[first + row]:
            best[first + row], cut[first + row] = totals[i], first + i


def _row_minima(
    first: int, middle: int, last: int, best: np.ndarray, cost: SegmentCost
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the best total for each end in [middle, last) with its last cut in [first, middle).

    The argmins do not decrease from row to row, so a row between two finished rows searches only
    between their argmins; all rows of one level are evaluated together.
    """
    rows = last - middle
    totals = np.empty(rows + 2)
    argmins = np.empty(rows + 2, dtype=np.int64)  # rows 1..n, between two sentinels
    argmins[0], argmins[rows + 1] = first, middle - 1
    step = 1 << (rows.bit_length() - 1)
    while step:
        level = np.arange(step, rows + 1, 2 * step)
        low = argmins[level - step]
        high = argmins[np.minimum(level + step, rows + 1)]
        sizes = high - low + 1
        offsets = np.cumsum(sizes) - sizes
        starts = np.arange(int(sizes.sum())) + np.repeat(low - offsets, sizes)
        candidates = best[starts] + cost(starts, np.repeat(level + (middle - 1), sizes))
        least = np.minimum.reduceat(candidates, offsets)
        hits = np.flatnonzero(candidates == np.repeat(least, sizes))
        totals[level] = least
        argmins[level] = starts[hits[np.searchsorted(hits, offsets)]]  # the leftmost of each row
        step //= 2
    return totals[1 : rows + 1], argmins[1 : rows + 1]
