"""ChaCha20 inside a TensorFlow program, in 32-bit operations, and normal numbers made of it."""

from __future__ import annotations

import functools
import itertools
import os
from typing import Any

import numpy as np
import tensorflow as tf

_CONSTANTS = np.frombuffer(b"expand 32-byte k", "<u4")
_PER_BLOCK = 8
"""Normal numbers made of the 64 bytes of a block."""
_MOST_BLOCKS = 2**31 - 1


class DeviceKey:
    """The key of a program, compiled or not, and a nonce for each draw of it.

    Guarantee:
        Bits of ``key_stream`` are those of ChaCha20 (RFC 8439) under a key of 256 bits, which
        ``new_key`` takes from the operating system. Each draw has a nonce of its own: the number of
        the traced call that makes it, and a count of draws, which lives beside the key, in no
        checkpoint, and only goes up; it is read and moved on at once, so that draws of several
        threads differ too.

    Args:
        seed: makes the draws repeatable, whatever traces them; not private. None otherwise.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed, self._calls = seed, itertools.count()
        with tf.init_scope():
            # Of a type that all devices keep in their own memory, unlike 32-bit integers.
            once = {"trainable": False, "aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA}
            self._key = tf.Variable(tf.zeros([8], tf.int64), **once)
            # What TensorFlow counts random numbers by, 256 a draw: 64 bits of it are used.
            self._drawn = tf.Variable(tf.zeros([3], tf.int64), **once)
        self.new_key()

    def new_key(self) -> None:
        """Takes a fresh key; a seed keeps its own, and the count goes on."""
        secret = np.frombuffer(os.urandom(32), np.uint32).astype(np.int64)
        if self._seed is not None:
            secret = np.random.SeedSequence(self._seed).generate_state(8).astype(np.int64)
        with tf.init_scope():
            self._key.assign(secret)

    def of_one_draw(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the key (8,) and a nonce (3,) that no other draw has, ``int64``."""
        # Two traces never share a nonce, whatever order their runs come in.
        call = next(self._calls) if self._seed is None else 0
        # One operation, unlike `assign_add`, which another thread may come between.
        philox, one = tf.constant(1), tf.constant(1, tf.uint64)
        moved = tf.raw_ops.RngReadAndSkip(resource=self._drawn.handle, alg=philox, delta=one)
        count = moved[0]
        nonce = tf.stack([tf.constant(call, tf.int64), count % 2**32, count // 2**32])
        return self._key.read_value(), nonce

    def __reduce__(self) -> Any:
        """Copies start from a key of their own: two draws under one are never the same."""
        return type(self), (self._seed,)


class DeviceNormal(DeviceKey):
    """Draws of a program, compiled or not, without a call of the host.

    Guarantee:
        From 53 bits each of its ``DeviceKey``, numbers become normal by the transform of Box and
        Muller (1958), in double precision; they reach 8.6 at most.

    Args:
        seed: as for ``DeviceKey``.

    Raises:
        ValueError: on a TPU, which has no double precision; also from ``new_key``.
    """

    def new_key(self) -> None:
        """Takes a fresh key, and looks for a TPU again."""
        if tf.config.list_logical_devices("TPU"):
            raise ValueError(
                "noise of source='device' can't be drawn on a TPU, which has no double precision. "
                "Use GaussianNoise(noise_multiplier, source='integer')."
            )
        super().new_key()

    def draw(self, size: int) -> tf.Tensor:
        """Returns ``size`` numbers, ``float64``, others in each run of the program."""
        blocks = -(-size // _PER_BLOCK)
        if blocks > _MOST_BLOCKS:
            raise ValueError(f"{size} numbers are more than one nonce of ChaCha20 has blocks for.")
        return _compiled(blocks)(*self.of_one_draw())[:size]


@functools.lru_cache(maxsize=16)
def _compiled(blocks: int) -> Any:
    """Returns a program of its own, as some devices lack TensorFlow's kernels for ``uint32``."""
    return tf.function(lambda key, nonce: _normal(key, nonce, blocks), jit_compile=True)


def _normal(key: tf.Tensor, nonce: tf.Tensor, blocks: int) -> tf.Tensor:
    words = key_stream(tf.cast(key, tf.uint32), tf.cast(nonce, tf.uint32), 0, blocks)
    high, low, high_angle, low_angle = tf.split(words, 4)
    radius = tf.sqrt(-2.0 * tf.math.log(_uniform(high, low)))  # of numbers above zero
    angle = 2.0 * np.pi * _uniform(high_angle, low_angle)
    return tf.reshape(tf.stack([radius * tf.cos(angle), radius * tf.sin(angle)]), [-1])


def _uniform(high: tf.Tensor, low: tf.Tensor) -> tf.Tensor:
    """Returns (k + 1/2) / 2^53 for the integers k of 53 bits that two words hold."""
    whole = tf.cast(high, tf.float64) * 2.0**21 + tf.cast(_shifted(low, 11), tf.float64)
    return (whole + 0.5) * 2.0**-53


def key_stream(key: tf.Tensor, nonce: tf.Tensor, first: Any, blocks: int) -> tf.Tensor:
    """Returns the words (16, blocks) of ChaCha20, ``uint32`` (RFC 8439, section 2.3).

    Args:
        key: (8,) ``uint32``.
        nonce: (3,) ``uint32``.
        first: the counter of the first block: a number or ``uint32``.
        blocks: how many, in columns.
    """
    constants, counters = tf.constant(_CONSTANTS), tf.cast(tf.range(blocks), tf.uint32) + first
    same = [tf.fill([blocks], word) for part in (constants, key) for word in tf.unstack(part)]
    last = [tf.fill([blocks], word) for word in tf.unstack(nonce)]
    words = tf.stack([*same, counters, *last])
    start = tf.split(words, 4)  # the rows of the matrix of each block
    _, *rows = tf.while_loop(
        lambda number, *rows: number < 10,
        lambda number, *rows: (number + 1, *_double_round(*rows)),
        (0, *start),
    )
    return tf.concat(rows, 0) + words


def _double_round(a: tf.Tensor, b: tf.Tensor, c: tf.Tensor, d: tf.Tensor) -> list[tf.Tensor]:
    """Returns the rows after a round of the columns and one of the diagonals."""
    for turn in (-1, 1):
        for down, up in ((16, 12), (8, 7)):
            a = a + b
            d = _rotated(tf.bitwise.bitwise_xor(d, a), down)
            c = c + d
            b = _rotated(tf.bitwise.bitwise_xor(b, c), up)
        # Diagonals become columns, and columns again what they were.
        b, c, d = (tf.roll(row, turn * by, 0) for by, row in enumerate((b, c, d), 1))
    return [a, b, c, d]


def _rotated(words: tf.Tensor, bits: int) -> tf.Tensor:
    left = tf.bitwise.left_shift(words, tf.constant(bits, tf.uint32))
    return tf.bitwise.bitwise_or(left, _shifted(words, 32 - bits))


def _shifted(words: tf.Tensor, bits: int) -> tf.Tensor:
    return tf.bitwise.right_shift(words, tf.constant(bits, tf.uint32))
