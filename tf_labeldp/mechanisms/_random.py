"""Uniform random integers from the operating system, or from a generator that was passed in.

A seeded generator can be recovered from what it emits, so draws that protect labels use
``secure_bytes`` unless the caller asks for a repeatable run. Probabilities are compared as 53-bit
integers, which makes the drawn channel known exactly (see ``flip_threshold``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np

Rng = np.random.Generator | None
"""A generator for repeatable (not private) runs; None takes secure random bits."""

_BITS = 53
_RANGE = np.uint64(1 << _BITS)
_BLOCK_ROWS = 1 << 17
"""Rows whose arrays fit a processor's cache."""
_MANY_BYTES = 1 << 16
_PIECE_BYTES = 1 << 24
"""Bytes that are asked of OpenSSL at a time; it takes less than 2^31."""
_MARGIN = 1.0 + 2.0**-50
"""Above the sum of the rounding errors of an exp and four float operations (3 * 2^-52)."""


def secure_bytes(size: int) -> bytes:
    """Returns random bytes of the operating system; many of them from a cipher that it keys.

    That cipher is OpenSSL's ``RAND_bytes`` (AES-256 in counter mode, NIST SP 800-90A; safe with
    threads and forks), which is twenty times as fast.
    """
    if size < _MANY_BYTES:
        return os.urandom(size)
    import ssl

    starts = range(0, size, _PIECE_BYTES)
    return b"".join(ssl.RAND_bytes(min(_PIECE_BYTES, size - start)) for start in starts)


def uniform_integers(size: int, rng: Rng) -> np.ndarray:
    """Returns ``size`` independent uniform integers in [0, 2^53) as ``uint64``."""
    if rng is None:
        words = np.frombuffer(secure_bytes(8 * size), dtype=np.uint64)
        return words >> np.uint64(64 - _BITS)
    return checked_generator(rng).integers(0, int(_RANGE), size=size, dtype=np.uint64)


def in_blocks(draw: Callable[[int, int], np.ndarray], size: int, rng: Rng) -> np.ndarray:
    """Returns what ``draw(start, stop)`` gives for all rows, drawn some rows at a time.

    A generator that was passed in draws all at once: what it gives does not depend on the blocks.
    """
    if rng is not None or size <= _BLOCK_ROWS:
        return draw(0, size)
    starts = range(0, size, _BLOCK_ROWS)
    return np.concatenate([draw(start, min(start + _BLOCK_ROWS, size)) for start in starts])


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
    # Beyond the largest multiple of the bound values are drawn again, so none is favoured.
    over = np.flatnonzero(drawn >= limits)
    while over.size:
        drawn[over] = uniform_integers(over.size, rng)
        over = over[drawn[over] >= limits[over]]
    return (drawn % bounds).astype(np.int64)


def flip_threshold(epsilon: float, k: np.ndarray) -> np.ndarray:
    """Returns t (n,) such that ``uniform_integers < t`` is the event "answer with another value".

    The flip probability of randomized response over k values is
    ``(k - 1) e^-epsilon / (1 + (k - 1) e^-epsilon)``. Its product with 2^53 is rounded *up*, by
    more than the float arithmetic before it can have lost: the drawn channel is never less private
    than the stated one, also where e^-epsilon is below the resolution of a double.
    """
    others = (np.asarray(k, dtype=np.float64) - 1.0) * math.exp(-epsilon)
    # exp(-epsilon) may underflow to zero; a flip must stay possible as long as k > 1.
    scaled = np.ceil(others / (1.0 + others) * (float(_RANGE) * _MARGIN))
    return np.where(np.asarray(k) > 1, np.maximum(scaled, 1.0), 0.0).astype(np.uint64)
