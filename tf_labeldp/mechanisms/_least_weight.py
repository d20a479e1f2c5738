"""The cheapest way to cut a sequence into consecutive segments, for costs of Monge type.

Costs ``w(a, b)`` of a segment [a, b) are Monge if ``w(a, c) + w(b, d) <= w(a, d) + w(b, c)`` for
``a <= b <= c <= d``. Then the best last cut moves to the right as the end does (Aggarwal, Klawe,
Moran, Shor and Wilber 1987), so each half of the ends finds its cuts among those of the half before
in O(n log n) evaluations, and all ends in O(n log^2 n): the "online" form by divide and conquer.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

SegmentCost = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Costs of the segments [start, end), for arrays of starts and ends, as ``float64``."""

_LEAF = 48
"""Below this many ends all pairs are evaluated at once."""


def cheapest_cuts(length: int, cost: SegmentCost) -> np.ndarray:
    """Returns where to cut [0, length) into segments of the least total cost.

    Args:
        length: number of elements, at least 1.
        cost: Monge costs of segments with ``0 <= start < end <= length``; may be negative.

    Returns:
        ``int64`` array from 0 to ``length``, increasing: the ends of the segments.

    Example:
        >>> cheapest_cuts(4, lambda a, b: (b - a - 2.0) ** 2).tolist()
        [0, 2, 4]
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
    """Completes ``best`` and ``cut`` on [first, last), given all cuts before ``first``."""
    if last - first <= _LEAF:
        _solve_leaf(first, last, best, cut, cost)
        return
    middle = (first + last) // 2
    _solve(first, middle, best, cut, cost)
    totals, argmins = _row_minima(first, middle, last, best, cost)
    ends = slice(middle, last)
    better = totals < best[ends]
    best[ends] = np.where(better, totals, best[ends])
    cut[ends] = np.where(better, argmins, cut[ends])
    _solve(middle, last, best, cut, cost)


def _solve_leaf(
    first: int, last: int, best: np.ndarray, cut: np.ndarray, cost: SegmentCost
) -> None:
    size = last - first
    starts, ends = np.triu_indices(size, k=1)
    costs = np.full((size, size), np.inf)
    costs[ends, starts] = cost(starts + first, ends + first)
    for row in range(1, size):
        totals = best[first : first + row] + costs[row, :row]
        i = int(np.argmin(totals))
        if totals[i] < best[first + row]:
            best[first + row] = totals[i]
            cut[first + row] = first + i


def _row_minima(
    first: int, middle: int, last: int, best: np.ndarray, cost: SegmentCost
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the best total for each end in [middle, last) with its last cut in [first, middle).

    The argmins do not decrease from row to row, so the rows in the middle of two that are known
    only search between their argmins; all rows of one level are evaluated together.
    """
    rows = last - middle
    totals = np.empty(rows + 2)
    argmins = np.empty(rows + 2, dtype=np.int64)  # rows 1..n, between two known sentinels
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
