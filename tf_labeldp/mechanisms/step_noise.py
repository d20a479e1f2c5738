"""Standard normal numbers for the noise of training steps, drawn by the host or by the device.

No other file of the part imports this one, since it loads TensorFlow.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from typing import Any

import numpy as np
import tensorflow as tf

from tf_labeldp.mechanisms.random_bits import Rng, cipher_bytes

_BLOCK = 1 << 16
"""Numbers per pass, which fit a core's cache."""
_LAYERS = 256
_RIGHT, _AREA = 3.6541528853610088, 0.00492867323399
"""Edge of the widest layer, and the area of each (Marsaglia and Tsang 2000, section 2)."""

_CONSTANTS = np.frombuffer(b"expand 32-byte k", "<u4")
_PER_BLOCK = 8
"""Normal numbers from the 64 bytes of a ChaCha20 block."""
_MOST_BLOCKS = 2**31 - 1


def standard_normal(size: int, rng: Rng) -> np.ndarray:
    """Returns ``size`` standard normal numbers, ``float64``, drawn by the host.

    Guarantee:
        The law is the Gaussian, tails included, up to the rounding of doubles made of 53 bits. A
        ziggurat draws it by rejection (Marsaglia and Tsang 2000, "The ziggurat method for
        generating random variables"). Without ``rng``, which makes a run repeatable, the bits come
        from OpenSSL's AES-256 generator, which the operating system keys.
    """
    return _ziggurat(size) if rng is None else rng.standard_normal(size)


def _ziggurat(size: int) -> np.ndarray:
    normal = np.empty(size)
    for start in range(0, size, _BLOCK):
        part = normal[start : start + _BLOCK]
        words = _words(part.size)
        layer = (words & np.uint64(_LAYERS - 1)).astype(np.intp)
        # The upper 53 bits are symmetric about zero.
        np.multiply((words.view(np.int64) >> 11) + 0.5, _WIDTH.take(layer), out=part)
        outside = np.flatnonzero(np.abs(part) >= _EDGE.take(layer + 1))
        if outside.size:
            part[outside] = _decided(part[outside], layer[outside])
    return normal


def _decided(x: np.ndarray, layer: np.ndarray) -> np.ndarray:
    """Accepts numbers outside the core of their layer, or replaces them."""
    height = _HEIGHT[layer] + _uniform(x.size) * (_HEIGHT[layer + 1] - _HEIGHT[layer])
    rejected = height >= np.exp(-0.5 * x * x)
    tail = layer == 0
    x[tail] = np.copysign(_tail(int(tail.sum())), x[tail])
    rejected &= ~tail
    x[rejected] = _ziggurat(int(rejected.sum()))
    return x


def _tail(size: int) -> np.ndarray:
    """Returns numbers from the tail beyond ``_RIGHT`` (Marsaglia 1964)."""
    beyond = -np.log(_uniform(size)) / _RIGHT
    rejected = np.flatnonzero(-2.0 * np.log(_uniform(size)) <= beyond * beyond)
    if rejected.size:
        beyond[rejected] = _tail(rejected.size) - _RIGHT
    return _RIGHT + beyond


def _uniform(size: int) -> np.ndarray:
    return ((_words(size) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _words(size: int) -> np.ndarray:
    return np.frombuffer(cipher_bytes(8 * size), np.uint64)


def _edges() -> np.ndarray:
    """Returns the edges of the layers, from the base, which has the tail, down to zero."""
    edges = [_AREA / math.exp(-0.5 * _RIGHT**2), _RIGHT]
    while len(edges) < _LAYERS:
        height = _AREA / edges[-1] + math.exp(-0.5 * edges[-1] ** 2)
        edges.append(math.sqrt(-2.0 * math.log(height)))
    return np.array([*edges, 0.0])


_EDGE = _edges()
_WIDTH = _EDGE * 2.0**-52
_HEIGHT = np.exp(-0.5 * _EDGE**2)


class DeviceNormal:
    """Standard normal numbers drawn inside a TensorFlow program, compiled or not.

    Guarantee:
        The bits come from ChaCha20 (RFC 8439) under a 256-bit key from the operating system. No two
        draws share a nonce, which consists of the number of the call in the traced programs and a
        count of draws. One operation reads and raises the count, so threads do not share a nonce;
        no checkpoint stores the count, and it never decreases.
        The transform of Box and Muller (1958), in double precision, turns 53 bits into each normal
        number; the numbers reach 8.6 at most.

    Args:
        seed: makes the draws repeatable in every trace, and not private; None for secure bits.

    Raises:
        ValueError: on a TPU, which has no double precision; also from ``new_key``.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed, self._calls = seed, itertools.count()
        with tf.init_scope():
            # Every device keeps 64-bit integers in its own memory, unlike 32-bit integers.
            once = {"trainable": False, "aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA}
            self._key = tf.Variable(tf.zeros([8], tf.int64), **once)
            # The counter of TensorFlow's generator counts the draws in 64 of its bits.
            self._drawn = tf.Variable(tf.zeros([3], tf.int64), **once)
        self.new_key()

    def new_key(self) -> None:
        """Draws a new key, except with a seed; the count goes on."""
        if tf.config.list_logical_devices("TPU"):
            raise ValueError(
                "noise of source='device' can't be drawn on a TPU, which has no double precision. "
                "Train on a GPU or a CPU."
            )
        secret = np.frombuffer(os.urandom(32), np.uint32).astype(np.int64)
        if self._seed is not None:
            secret = np.random.SeedSequence(self._seed).generate_state(8).astype(np.int64)
        with tf.init_scope():
            self._key.assign(secret)

    def draw(self, size: int) -> tf.Tensor:
        """Returns ``size`` numbers, ``float64``, new ones in each run of the program."""
        blocks = -(-size // _PER_BLOCK)
        if blocks > _MOST_BLOCKS:
            raise ValueError(
                f"one draw gives at most {_MOST_BLOCKS * _PER_BLOCK} numbers, got {size}. Draw in "
                "several parts."
            )
        return _compiled(blocks)(*self.key_and_nonce())[:size]

    def key_and_nonce(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the key (8,) and a nonce (3,) that no other draw has, ``int64``."""
        # The number of the call keeps traces from sharing a nonce, in whatever order they run.
        call = next(self._calls) if self._seed is None else 0
        # This is one operation, unlike `assign_add`, which another thread may interrupt.
        philox, step = tf.constant(1), tf.constant(1, tf.uint64)
        moved = tf.raw_ops.RngReadAndSkip(resource=self._drawn.handle, alg=philox, delta=step)
        count = moved[0]
        nonce = tf.stack([tf.constant(call, tf.int64), count % 2**32, count // 2**32])
        return self._key.read_value(), nonce

    def __reduce__(self) -> Any:
        """Copies draw their own key, since two draws must not share a key and a nonce."""
        return type(self), (self._seed,)


@functools.lru_cache(maxsize=16)
def _compiled(blocks: int) -> Any:
    """Returns a compiled program, since some devices lack TensorFlow's kernels for ``uint32``."""
    return tf.function(lambda key, nonce: _box_muller(key, nonce, blocks), jit_compile=True)


def _box_muller(key: tf.Tensor, nonce: tf.Tensor, blocks: int) -> tf.Tensor:
    words = key_stream(tf.cast(key, tf.uint32), tf.cast(nonce, tf.uint32), 0, blocks)
    high, low, high_angle, low_angle = tf.split(words, 4)
    radius = tf.sqrt(-2.0 * tf.math.log(_fraction(high, low)))
    angle = 2.0 * np.pi * _fraction(high_angle, low_angle)
    return tf.reshape(tf.stack([radius * tf.cos(angle), radius * tf.sin(angle)]), [-1])


def _fraction(high: tf.Tensor, low: tf.Tensor) -> tf.Tensor:
    """Returns (k + 1/2) / 2^53, never zero, where two words contain the 53-bit integer k."""
    whole = tf.cast(high, tf.float64) * 2.0**21 + tf.cast(
        tf.bitwise.right_shift(low, 11), tf.float64
    )
    return (whole + 0.5) * 2.0**-53


def key_stream(key: tf.Tensor, nonce: tf.Tensor, first: int, blocks: int) -> tf.Tensor:
    """Returns the words (16, blocks) of ChaCha20, ``uint32`` (RFC 8439, section 2.3).

    ``key`` (8,) and ``nonce`` (3,) are ``uint32``; ``first`` is the counter of the first block.
    """
    constants, counters = tf.constant(_CONSTANTS), tf.cast(tf.range(blocks), tf.uint32) + first
    same = [tf.fill([blocks], word) for part in (constants, key) for word in tf.unstack(part)]
    last = [tf.fill([blocks], word) for word in tf.unstack(nonce)]
    words = tf.stack([*same, counters, *last])
    start = tf.split(words, 4)  # the four rows of each block's matrix
    _, *rows = tf.while_loop(
        lambda number, *rows: number < 10,
        lambda number, *rows: (number + 1, *_double_round(*rows)),
        (0, *start),
    )
    return tf.concat(rows, 0) + words


def _double_round(a: tf.Tensor, b: tf.Tensor, c: tf.Tensor, d: tf.Tensor) -> list[tf.Tensor]:
    """Returns the rows after a column round and a diagonal round."""
    for turn in (-1, 1):
        for down, up in ((16, 12), (8, 7)):
            a = a + b
            d = _rotated(tf.bitwise.bitwise_xor(d, a), down)
            c = c + d
            b = _rotated(tf.bitwise.bitwise_xor(b, c), up)
        # The first shift turns diagonals into columns, and the second one undoes it.
        b, c, d = (tf.roll(row, turn * by, 0) for by, row in enumerate((b, c, d), 1))
    return [a, b, c, d]


def _rotated(words: tf.Tensor, bits: int) -> tf.Tensor:
    left, right = tf.bitwise.left_shift(words, bits), tf.bitwise.right_shift(words, 32 - bits)
    return tf.bitwise.bitwise_or(left, right)
