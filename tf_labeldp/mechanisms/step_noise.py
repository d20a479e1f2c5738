"""Standard normal numbers for the noise of training steps, drawn by the host or by the device.

No other file of the part imports this one, since it loads TensorFlow.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from tf_labeldp.mechanisms.random_bits import KeyStream, Rng

_BLOCK = 1 << 16
"""Numbers per pass, which fit a core's cache."""
_LINE = 64
"""Bytes of a cache line, at whose multiples TensorFlow's tensors begin."""
Block = list[tuple[np.ndarray, np.ndarray]]
"""Parts of sums, and where their noisy ones are written."""
_CODES = 1024
"""Each code but a few stands for a layer; the table of their widths fits the fastest cache."""
_AREA = math.sqrt(0.5 * math.pi) / _CODES
"""Area of a layer, where the whole of ``exp(-x^2 / 2)``, x > 0, has the area of all codes."""

_CONSTANTS = np.frombuffer(b"expand 32-byte k", "<u4")
"""The first four words of a ChaCha20 block (RFC 8439, section 2.3)."""
_PER_BLOCK = 8
"""Normal numbers from the 64 bytes of a ChaCha20 block."""
_MOST_BLOCKS = 2**31 - 1
"""Blocks under one nonce: ``tf.range`` counts them in 32 bits with a sign."""


def standard_normal(size: int, rng: Rng) -> np.ndarray:
    """Returns ``size`` standard normal numbers, ``float64``, drawn by the host.

    Guarantee:
        The law is the Gaussian, tails included, up to the rounding of doubles made of 53 bits. A
        ziggurat draws it, whose layers lie below the density, so that only one number in 340 is
        drawn by rejection (McFarland 2016, "A modified ziggurat algorithm for generating
        exponentially- and normally-distributed pseudorandom numbers"). Without ``rng``, which makes
        a run repeatable, the bits come from AES-256 under a key of the operating system.
    """
    if rng is not None:
        return rng.standard_normal(size)
    starts = range(0, size, _BLOCK)
    normal, sizes = np.empty(size), [min(_BLOCK, size - start) for start in starts]
    for start, block in zip(starts, _ziggurat(sizes, KeyStream()), strict=True):
        normal[start : start + block.size] = block
    return normal


def noisy_sums(
    sums: Sequence[np.ndarray], scale: float, grid: float, rng: Rng, num_threads: int
) -> list[np.ndarray]:
    """Returns sums plus noise of standard deviation ``scale``, rounded to multiples of ``grid``.

    The noise is that of ``standard_normal``, added in double precision. Each block of numbers stays
    in the cache from its bits to its ``float32`` result: memory is read and written once.

    Args:
        sums: ``float32`` arrays of any shapes.
        scale, grid: above zero.
        rng: a generator for repeatable (not private) runs; None uses secure random bits.
        num_threads: at least 1; secure bits of each thread have a key of their own.
    """
    noisy = [_aligned(np.shape(total)) for total in sums]
    blocks = _blocks_of([np.ravel(total) for total in sums], [part.reshape(-1) for part in noisy])

    def add(blocks: list[Block]) -> None:
        sizes = [sum(total.size for total, _ in block) for block in blocks]
        if rng is None:
            draws = _ziggurat(sizes, KeyStream(), scale)
        else:
            draws = (scale * rng.standard_normal(size) for size in sizes)
        for block, normal in zip(blocks, draws, strict=True):
            first = 0
            for total, result in block:
                part = normal[first : first + total.size]
                first += total.size
                part += total
                part *= 1.0 / grid
                np.rint(part, out=result, casting="same_kind")
                result *= np.float32(grid)

    if rng is None and num_threads > 1 and len(blocks) > 1:
        # NumPy and the cipher release Python's lock.
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(add, [blocks[first::num_threads] for first in range(num_threads)]))
    else:
        add(blocks)
    return noisy


def _blocks_of(sums: list[np.ndarray], results: list[np.ndarray]) -> list[Block]:
    """Returns pairs of views of both, in blocks of up to ``_BLOCK`` numbers."""
    blocks: list[Block] = []
    room = 0
    for total, result in zip(sums, results, strict=True):
        start = 0
        while start < total.size:
            if room == 0:
                blocks.append([])
                room = _BLOCK
            stop = min(start + room, total.size)
            blocks[-1].append((total[start:stop], result[start:stop]))
            room -= stop - start
            start = stop
    return blocks


def _aligned(shape: tuple[int, ...]) -> np.ndarray:
    """Returns an array that TensorFlow takes without a copy, as its memory begins at a line."""
    size = math.prod(shape)
    room = np.empty(size + _LINE // 4 - 1, np.float32)
    first = -room.ctypes.data % _LINE // 4
    return room[first : first + size].reshape(shape)


def _ziggurat(sizes: Sequence[int], bits: KeyStream, scale: float = 1.0) -> Iterator[np.ndarray]:
    """Yields normal numbers, as many as each size, in one array that is overwritten."""
    most = max(sizes, default=0)
    normal, codes, outside = np.empty(most), np.empty(most, np.intp), np.empty(most, bool)
    widths = scale * _WIDTH
    for size in sizes:
        x, code = normal[:size], codes[:size]
        words = bits.words(size).view(np.int64)
        np.bitwise_and(words, _CODES - 1, out=code)
        # Clipped look-ups skip a check and a copy. Without a layer the width is zero, and x keeps
        # its sign. The bits of the code move x by less than 2^-53 of the width.
        np.multiply(words, widths.take(code, out=x, mode="clip"), out=x)
        places = np.flatnonzero(np.greater_equal(code, _RIGHT.size, out=outside[:size]))
        if places.size:
            x[places] = np.copysign(scale * _rest(places.size, bits), x[places])
        yield x


def _rest(size: int, bits: KeyStream) -> np.ndarray:
    """Returns numbers x > 0 from the density above the layers, by rejection from boxes.

    Box i has the density's part above layer i, up to the next one. Box 0 has the tail, under an
    exponential envelope (Marsaglia 1964).
    """
    count = 2 * size + 64
    box = np.searchsorted(_CHANCE, _uniform(count, bits), side="right")
    across, up = _uniform(count, bits), _uniform(count, bits)
    x = _LEFT[box] + across * (_BOX[box] - _LEFT[box])
    tail = np.flatnonzero(box == 0)
    x[tail] = _RIGHT[0] - np.log(across[tail]) / _RIGHT[0]
    up[tail] *= across[tail]
    found = x[_LOW[box] + up * (_HIGH[box] - _LOW[box]) < np.exp(-0.5 * x * x)][:size]
    if found.size == size:
        return found
    return np.concatenate([found, _rest(size - found.size, bits)])


def _uniform(size: int, bits: KeyStream) -> np.ndarray:
    return ((bits.words(size) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _right_ends() -> np.ndarray:
    """Returns the right ends of the layers [0, x] under the density, from the widest one up.

    Each layer begins at the height where the one below ends. The last few areas have no room.
    """
    ends: list[float] = []
    # The widest layer, [0, x] below exp(-x^2 / 2), has the common area: a fixed point.
    x = 4.0
    for _ in range(50):
        x = math.sqrt(-2.0 * math.log(_AREA / x))
    below = 0.0
    while True:
        for _ in range(50):
            room = math.exp(-0.5 * x * x) - below
            slope = room - x * x * math.exp(-0.5 * x * x)
            if slope >= 0.0:
                return np.array(ends)
            x -= (x * room - _AREA) / slope
        ends.append(x)
        below = math.exp(-0.5 * x * x)


_RIGHT = _right_ends()
_WIDTH = np.concatenate([_RIGHT, np.zeros(_CODES - _RIGHT.size)]) * 2.0**-63
"""Width of each code's layer over 2^63, the range of a word."""
_LEFT, _BOX = np.append(_RIGHT, 0.0), np.insert(_RIGHT, 0, _RIGHT[0] + 1.0 / _RIGHT[0])
"""Left and right end of each box; the area of the envelope stands for the right end of the tail."""
_LOW, _HIGH = np.exp(-0.5 * np.insert(_RIGHT, 0, np.inf) ** 2), np.exp(-0.5 * _LEFT**2)
_CHANCE = np.cumsum((_BOX - _LEFT) * (_HIGH - _LOW))
_CHANCE /= _CHANCE[-1]


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
