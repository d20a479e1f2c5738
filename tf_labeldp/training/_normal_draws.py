"""Standard normal numbers on the host, from a cipher that the operating system's bits key."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

_BLOCK = 1 << 14
"""Numbers drawn at once, which stay in a core's cache."""
_LAYERS = 256
_RIGHT, _AREA = 3.6541528853610088, 0.00492867323399  # Marsaglia and Tsang 2000, section 2

Words = Callable[[int], np.ndarray]
"""Returns that many independent uniform words of 64 bits."""


def standard_normal(size: int, rng: np.random.Generator | None) -> np.ndarray:
    """Returns ``size`` standard normal numbers, ``float64``; from secure bits if ``rng`` is None.

    Guarantee:
        The ziggurat (Marsaglia and Tsang 2000, "The ziggurat method for generating random
        variables") by rejection: the law is the Gaussian, tails included, up to the rounding of
        doubles made of 53 bits. The bits are those of AES-256 in counter mode, whose key is drawn
        from the operating system for each call, so that no counter is used twice.
    """
    return _ziggurat(size, _cipher_words()) if rng is None else rng.standard_normal(size)


def _cipher_words() -> Words:
    encryptor = Cipher(algorithms.AES(os.urandom(32)), modes.CTR(bytes(16))).encryptor()
    zeros = bytes(8 * _BLOCK)  # whose encryption is the key stream itself
    return lambda size: np.frombuffer(encryptor.update(zeros[: 8 * size]), np.uint64)


def _ziggurat(size: int, words: Words) -> np.ndarray:
    normal = np.empty(size)
    for start in range(0, size, _BLOCK):
        part = normal[start : start + _BLOCK]
        drawn = words(part.size)
        layer = (drawn & np.uint64(_LAYERS - 1)).astype(np.intp)
        # The upper 53 bits, symmetric about zero.
        np.multiply((drawn.view(np.int64) >> 11) + 0.5, _WIDTH.take(layer), out=part)
        outside = np.flatnonzero(np.abs(part) >= _EDGE.take(layer + 1))
        if outside.size:
            part[outside] = _decided(part[outside], layer[outside], words)
    return normal


def _decided(x: np.ndarray, layer: np.ndarray, words: Words) -> np.ndarray:
    """Returns numbers that came beside the core of their layer, or new ones in their place."""
    height = _HEIGHT[layer] + _uniform(x.size, words) * (_HEIGHT[layer + 1] - _HEIGHT[layer])
    again = height >= np.exp(-0.5 * x * x)
    tail = layer == 0
    x[tail] = np.copysign(_tail(int(tail.sum()), words), x[tail])
    again &= ~tail
    x[again] = _ziggurat(int(again.sum()), words)
    return x


def _tail(size: int, words: Words) -> np.ndarray:
    """Returns numbers of the law's part beyond ``_RIGHT`` (Marsaglia 1964)."""
    beyond = -np.log(_uniform(size, words)) / _RIGHT
    again = np.flatnonzero(-2.0 * np.log(_uniform(size, words)) <= beyond * beyond)
    if again.size:
        beyond[again] = _tail(again.size, words) - _RIGHT
    return _RIGHT + beyond


def _uniform(size: int, words: Words) -> np.ndarray:
    """Returns numbers in (0, 1], of 53 bits."""
    return ((words(size) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _edges() -> np.ndarray:
    """Returns where the layers end, from that of the base, over the tail, to zero."""
    edges = [_AREA / math.exp(-0.5 * _RIGHT**2), _RIGHT]
    while len(edges) < _LAYERS:
        height = _AREA / edges[-1] + math.exp(-0.5 * edges[-1] ** 2)
        edges.append(math.sqrt(-2.0 * math.log(height)))
    return np.array([*edges, 0.0])


_EDGE = _edges()
_WIDTH = _EDGE * 2.0**-52
_HEIGHT = np.exp(-0.5 * _EDGE**2)
