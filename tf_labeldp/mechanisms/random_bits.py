"""Secure random bits for labels, samples and noise, and uniform integers made of them.

The state of a seeded generator can be recovered from its outputs, so only repeatable runs use one.
Draws compare probabilities as 53-bit integers, so the channel is known exactly.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np

Rng = np.random.Generator | None
"""A generator for repeatable (not private) runs; None uses secure random bits."""

_BITS = 53
UNITS = 1 << _BITS
"""Units of probability, 2^-53 each. Draws compare 53 random bits with whole numbers of units, so
the channel of the draws is known exactly."""
_RANGE = np.uint64(UNITS)
_BLOCK_ROWS = 1 << 17
"""Rows per block, whose arrays fit a processor's cache."""
_MANY_BYTES = 1 << 16
"""Bytes from which on the cipher is faster than the operating system."""
_PIECE_BYTES = 1 << 24
"""Bytes per call of OpenSSL, which takes less than 2^31."""
_AES_BLOCK = 16
"""Bytes per block of AES."""
_MARGIN = 1.0 + 2.0**-50
"""Factor above the rounding errors of an exp and four float operations together (3 * 2^-52)."""


def secure_bytes(size: int) -> bytes:
    """Returns random bytes from the operating system, or if many, from a cipher that it keys."""
    return os.urandom(size) if size < _MANY_BYTES else cipher_bytes(size)


def cipher_bytes(size: int) -> bytes:
    """Returns random bytes from OpenSSL's generator, which the operating system keys.

    It is AES-256 in counter mode (NIST SP 800-90A), safe with threads and forks.
    """
    import ssl

    starts = range(0, size, _PIECE_BYTES)
    return b"".join(ssl.RAND_bytes(min(_PIECE_BYTES, size - start)) for start in starts)


class KeyStream:
    """Random words of OpenSSL's AES-256 in counter mode, under a key of the operating system.

    It serves one draw of one thread, several times as fast as ``cipher_bytes`` for any.
    """

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        mode = modes.CTR(bytes(_AES_BLOCK))
        self._cipher = Cipher(algorithms.AES(os.urandom(32)), mode).encryptor()
        self._zeros, self._written = memoryview(b""), memoryview(b"")

    def words(self, size: int) -> np.ndarray:
        """Returns ``size`` words, ``uint64``, in memory that the next call overwrites."""
        if len(self._zeros) < 8 * size:
            self._zeros = memoryview(bytes(8 * size))
            # The cipher asks for room for one more block.
            self._written = memoryview(bytearray(8 * size + _AES_BLOCK))
        self._cipher.update_into(self._zeros[: 8 * size], self._written)
        return np.frombuffer(self._written[: 8 * size], np.uint64)


def uniform_integers(size: int, rng: Rng) -> np.ndarray:
    """Returns ``size`` independent uniform integers in [0, 2^53) as ``uint64``."""
    if rng is None:
        words = np.frombuffer(secure_bytes(8 * size), dtype=np.uint64)
        return words >> np.uint64(64 - _BITS)
    return checked_generator(rng).integers(0, int(_RANGE), size=size, dtype=np.uint64)


def in_blocks(draw: Callable[[int, int], np.ndarray], size: int, rng: Rng) -> np.ndarray:
    """Returns ``draw(start, stop)`` for all rows, in blocks of rows.

    With a generator all rows are one block, so that its stream does not depend on the block size.
    """
    if rng is not None or size <= _BLOCK_ROWS:
        return draw(0, size)
    first = draw(0, _BLOCK_ROWS)
    drawn = np.empty((size, *first.shape[1:]), first.dtype)
    drawn[:_BLOCK_ROWS] = first
    for start in range(_BLOCK_ROWS, size, _BLOCK_ROWS):
        stop = min(start + _BLOCK_ROWS, size)
        drawn[start:stop] = draw(start, stop)
    return drawn


def checked_generator(rng: Any) -> np.random.Generator:
    """Returns ``rng`` if it is a generator, or raises a ``TypeError``."""
    if isinstance(rng, np.random.Generator):
        return rng
    raise TypeError(
        f"rng must be a numpy.random.Generator or None, got {type(rng).__name__}. Use "
        "np.random.default_rng(seed) for a repeatable run, None for secure random bits."
    )


def uniform_below(bounds: np.ndarray, rng: Rng) -> np.ndarray:
    """Returns one unbiased uniform integer in [0, bound) for each bound (n,), as ``int64``."""
    bounds = np.asarray(bounds).astype(np.uint64)
    limits = (_RANGE // bounds) * bounds
    drawn = uniform_integers(bounds.size, rng)
    # Values beyond the largest multiple of the bound are drawn again, to avoid a bias.
    over = np.flatnonzero(drawn >= limits)
    while over.size:
        drawn[over] = uniform_integers(over.size, rng)
        over = over[drawn[over] >= limits[over]]
    return (drawn % bounds).astype(np.int64)


def draw_columns(ends: np.ndarray, rows: np.ndarray, rng: Rng) -> np.ndarray:
    """Returns a column for each row number (n,), ``int64``.

    ``ends`` (m, K) has the running sums of each row's probabilities in units of 2^-53.
    """
    drawn = uniform_integers(rows.size, rng).astype(np.int64)
    # A bisection over all rows together finds the column whose units contain the number. The last
    # end is 2^53, above every number.
    low = np.zeros(rows.size, dtype=np.int64)
    high = np.full_like(low, ends.shape[1] - 1)
    for _ in range((ends.shape[1] - 1).bit_length()):
        middle = (low + high) // 2
        beyond = ends[rows, middle] <= drawn
        low = np.where(beyond, middle + 1, low)
        high = np.where(beyond, high, middle)
    return low


def flip_threshold(epsilon: float, k: np.ndarray) -> np.ndarray:
    """Returns t (n,) such that ``uniform_integers < t`` is the event "answer another value".

    Randomized response over k values flips with probability
    ``(k - 1) e^-epsilon / (1 + (k - 1) e^-epsilon)``. Its product with 2^53 is rounded *up*, by
    more than the errors of the float arithmetic: the drawn channel is never less private than
    stated, even if e^-epsilon is below the resolution of a double.
    """
    others = (np.asarray(k, dtype=np.float64) - 1.0) * math.exp(-epsilon)
    # exp(-epsilon) may underflow to zero; a flip must stay possible as long as k > 1.
    scaled = np.ceil(others / (1.0 + others) * (float(_RANGE) * _MARGIN))
    return np.where(np.asarray(k) > 1, np.maximum(scaled, 1.0), 0.0).astype(np.uint64)
