"""The largest change of a user's moments over all labels, from public rows of features."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np

from tf_labeldp import _validate

_SIGNS = 10
"""The most rows of a user whose signs are tried, 512 combinations up to the sign of all."""
_WIDEST = 512
"""The widest matrix whose eigenvalues are computed; else norms add up."""
_FEW = 64
"""Up to here, or up to the number of features, the entries of a user's Gram matrix are added up."""
_ENTRIES = 1 << 21
"""Numbers at a time."""


def sums_of_norms(blocks: Iterable[np.ndarray], users: np.ndarray, order: int) -> np.ndarray:
    """Returns the sums of the L1 or L2 norms of each user's rows, ``float64`` (U,)."""
    norms = [np.linalg.norm(block, order, axis=1) for block in blocks]
    return np.bincount(users, weights=_of_users(norms, users))


def user_norms(blocks: Iterable[np.ndarray], users: np.ndarray, *, by_signs: bool) -> np.ndarray:
    """Returns a bound on ``||sum_i x_i d_i^T||`` for the rows x_i of each user, ``float64`` (U,).

    The d_i are any vectors of norm at most one, with ``by_signs`` any numbers in [-1, 1]: the
    changes of codes, divided by the largest. The bounds are proved in docs/theory.md (users); with
    ``by_signs`` they are exact up to ten rows.

    Args:
        blocks: rows (m, d) in order, n in total.
        users: users as numbers 0..U-1, ``int64`` (n,).
        by_signs: whether codes are numbers, or vectors whose entries change separately.
    """
    rows = _of_users(list(blocks), users)
    counts = np.bincount(users)
    order, starts = np.argsort(users, kind="stable"), np.cumsum(counts) - counts
    norms = np.zeros(counts.size)
    for k in np.unique(counts[counts > 0]):
        of_size = np.flatnonzero(counts == k)
        tried = 1 << (int(k) - 1) if by_signs and k <= _SIGNS else 1
        step = max(1, _ENTRIES // int(k * max(rows.shape[1], min(k, _WIDEST), tried)))
        for first in range(0, of_size.size, step):
            some = of_size[first : first + step]
            own = rows[order[starts[some, np.newaxis] + np.arange(k)]]
            norms[some] = _norms(own, by_signs=by_signs)
    return norms


def _of_users(blocks: list[np.ndarray], users: np.ndarray) -> np.ndarray:
    rows = np.concatenate(blocks)
    _validate.one_label_per_row(len(rows), len(users))
    return rows


def _norms(rows: np.ndarray, *, by_signs: bool) -> np.ndarray:
    """Returns the norms (m,) of m users with k rows each, (m, k, d)."""
    k, width = rows.shape[1:]
    if min(k, width) > _WIDEST:
        return np.linalg.norm(rows, axis=2).sum(axis=1)
    other = rows.transpose(0, 2, 1)
    if k > max(width, _FEW):
        squares = k * np.linalg.eigvalsh(other @ rows)[:, -1]
        return np.minimum(np.sqrt(squares), np.linalg.norm(rows, axis=2).sum(axis=1))
    gram = rows @ other
    if by_signs and 2 < k <= _SIGNS:
        signs = _signs(k)
        return np.sqrt(((signs @ gram) * signs).sum(axis=2).max(axis=1))
    squares = np.abs(gram).sum(axis=(1, 2))
    if k > 2:
        squares = np.minimum(squares, k * np.linalg.eigvalsh(gram)[:, -1])
    return np.sqrt(squares)


@functools.cache
def _signs(k: int) -> np.ndarray:
    """Returns all signs of k numbers up to the sign of all, (2^(k-1), k)."""
    bits = np.arange(1 << (k - 1))[:, np.newaxis] >> np.arange(k)
    return 1.0 - 2.0 * (bits & 1)
