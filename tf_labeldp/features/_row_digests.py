"""Keyed digests of rows, by which this process recognizes rows that it read before."""

from __future__ import annotations

import hashlib
import math
import secrets
from typing import Any

import numpy as np
from scipy import sparse

_KEY = np.frombuffer(secrets.token_bytes(8 * 4097), np.uint64) | np.uint64(1)
"""Random odd numbers, drawn once per process."""


def row_digests(parts: list[Any]) -> np.ndarray | None:
    """Returns a keyed digest of each row of parts side by side, ``uint64`` (n, 1).

    Parts are arrays (n, ...) or one CSR matrix; None for other lengths. Rows that differ have the
    same digest with a probability of about 2^-32 at most; they would count as the same row, which
    only overstates epsilon.
    """
    if len(parts) == 1 and sparse.issparse(parts[0]):
        return _sparse_digests(parts[0])[:, np.newaxis]
    tables = [_as_numbers(part.toarray() if sparse.issparse(part) else part) for part in parts]
    if not tables or len(set(map(len, tables))) > 1:
        return None
    step = max(1, (1 << 24) // max(1, sum(table.shape[1] for table in tables)))
    digests = np.zeros(len(tables[0]), np.uint64)
    for start in range(0, digests.size, step):
        block = [table[start : start + step].astype(np.float32) for table in tables]
        digests[start : start + step] = _dense_digests(np.concatenate(block, axis=1))
    return digests[:, np.newaxis]


def _dense_digests(block: np.ndarray) -> np.ndarray:
    """Returns the digests of rows of ``float32`` numbers (m, d), ``uint64`` (m,)."""
    bits = np.ascontiguousarray(block).view(np.uint32).astype(np.uint64)
    width = bits.shape[1]
    return _mixed(bits @ _factors(np.arange(width)), width)


def _factors(places: np.ndarray) -> np.ndarray:
    # A second factor distinguishes places past the key's length.
    turn, place = np.divmod(places, _KEY.size - 1)
    return _KEY[1:][place] + turn.astype(np.uint64) * np.uint64(2) * _KEY[0]


def _mixed(sums: np.ndarray, width: int) -> np.ndarray:
    return (sums ^ (sums >> np.uint64(32))) * _KEY[0] ^ np.uint64(width)


def _sparse_digests(rows: Any) -> np.ndarray:
    """Returns the digests of a CSR matrix, whose zeros add nothing, ``uint64`` (m,)."""
    if not rows.has_canonical_format:
        rows = rows.copy()
        rows.sum_duplicates()
    bits = (rows.data.astype(np.float32) + np.float32(0.0)).view(np.uint32)  # no -0, as if dense
    sums = np.zeros(bits.size + 1, np.uint64)
    np.cumsum(bits.astype(np.uint64) * _factors(rows.indices), out=sums[1:])
    return _mixed(sums[rows.indptr[1:]] - sums[rows.indptr[:-1]], rows.shape[1])


def _as_numbers(part: np.ndarray) -> np.ndarray:
    """Returns an array (n, ...) as numbers (n, d); text becomes keyed 32-bit hashes."""
    rows = part.reshape(len(part), math.prod(part.shape[1:]))
    if rows.dtype.kind in "biuf":
        return rows
    texts = list(map(str, rows.ravel().tolist()))
    key = _KEY[:8].tobytes()
    hashes = {}
    for text in set(texts):
        digest = hashlib.blake2b(text.encode(), digest_size=4, key=key).digest()
        hashes[text] = int.from_bytes(digest, "little")
    bits = np.fromiter(map(hashes.__getitem__, texts), np.uint32, len(texts))
    return bits.view(np.float32).reshape(rows.shape)
