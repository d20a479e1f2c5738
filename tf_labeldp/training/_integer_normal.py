"""Gaussian noise from operations on integers and single precision, with a bound on its distance.

What it rests on is proved in docs/accounting.md, "Gaussian noise from integers".
"""

from __future__ import annotations

import decimal
import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tf_labeldp.training._chacha import DeviceKey, key_stream

_INDEX_BITS = 13
_HALF = 2 ** (_INDEX_BITS - 1)
"""A table holds the integers from -4096 to 4095."""
_LEVELS = ((352, 3), (352, 3), (352, 3), (240, 7))
"""Standard deviation and words of each table; with them, a number takes a block of ChaCha20."""
_LEAST_VARIANCE = 3.5
"""Of the Gaussians on the integers whose sums are taken for integrals."""
_MOST = 2**30
"""Numbers in a draw."""
_CHUNK = 2**14
"""Numbers made at once, which bounds the memory."""
_LARGEST = 2.0**61


class IntegerNormal(DeviceKey):
    """Adds Gaussian noise on a lattice, without double precision. Untested on a TPU so far.

    Guarantee:
        What one ``add`` releases costs what the Gaussian mechanism of the noise multiplier does and
        ``added_delta`` besides, for values that a replaced label moves as ``LabelDPOptimizer``
        says. The bits are those of ``DeviceKey``.

    Args:
        seed: as for ``DeviceKey``.
    """

    def add(self, values: tf.Tensor, noise_multiplier: float, clip: float) -> tf.Tensor:
        """Returns the values (size,), rounded to the lattice, with noise, ``float32``."""
        size = values.shape[0]
        exponent, last = lattice(noise_multiplier, clip, size)
        if values.dtype.size < 4:
            values = tf.cast(values, tf.float32)
        # Exact, as it multiplies by a power of two; and no further apart after either operation.
        steps = tf.round(values * tf.constant(2.0**-exponent, values.dtype))
        steps = tf.cast(tf.clip_by_value(steps, -_LARGEST, _LARGEST), tf.int64)
        drawn = _compiled(size, last)(*self.of_one_draw())
        noisy = tf.cast(steps + drawn, tf.float32) * 2.0**exponent
        return tf.where(tf.math.is_finite(values), noisy, np.nan)


def lattice(noise_multiplier: float, clip: float, size: int) -> tuple[int, int]:
    """Returns the exponent of the lattice's spacing, and the factor of the last table.

    The noise is as much as the Gaussian mechanism needs for a clip of ``clip`` and the square root
    of ``size`` spacings, by which rounding moves two sums apart.

    Raises:
        ValueError: too many numbers, or a standard deviation that single precision can't hold.
    """
    first, most = _factors()
    before = sum((k * sigma) ** 2 for k, (sigma, _) in zip(first, _LEVELS[:-1], strict=True))
    sigma = _LEVELS[-1][0]
    farthest = math.sqrt(before + (most * sigma) ** 2) * (1.0 - 1e-9)
    rounding = noise_multiplier * math.sqrt(size)
    if size > _MOST or rounding > farthest / 64.0:
        raise ValueError(
            f"noise of source='integer' is for {_MOST:,} weights at most, and for fewer above a "
            f"noise_multiplier of {farthest / 64.0 / math.sqrt(_MOST):.0f}; got {size:,} weights "
            f"and {noise_multiplier:g}. Train fewer weights, or use source='device'."
        )
    logarithms = math.log2(noise_multiplier) + math.log2(clip)
    exponent = math.ceil(logarithms - math.log2(farthest - rounding))
    if not -100 <= exponent <= 80:
        raise ValueError(
            f"noise of standard deviation {noise_multiplier * clip:g} is out of the range that "
            "source='integer' has in single precision. Choose another l2_norm_clip."
        )
    needed = (noise_multiplier * clip * 2.0**-exponent + rounding) * (1.0 + 1e-12)
    left = needed**2 + _LEAST_VARIANCE - before
    return exponent, math.ceil(math.sqrt(left) / sigma * (1.0 + 1e-12))


@functools.cache
def _factors() -> tuple[list[int], int]:
    """Returns the factors of all tables but the last, and the largest one of the last."""
    factors, variance = [1], _LEVELS[0][0] ** 2
    for sigma, _ in _LEVELS[1:]:
        # 1 / (k^2 / variance + 1 / sigma^2) is the least variance.
        factors.append(math.isqrt(int(variance * (1.0 / _LEAST_VARIANCE - 1.0 / sigma**2))))
        variance += (factors[-1] * sigma) ** 2
    return factors[:-1], factors[-1]


def added_delta(noise_multiplier: float) -> float:
    """Returns what a step costs besides the Gaussian mechanism, for as many numbers as are allowed.

    It is below 1e-12 for noise multipliers from 0.35 on, and 1 for those up to 0.2.
    """
    distance = 2.0 / noise_multiplier
    alike = math.erfc(distance / math.sqrt(8.0))  # what the closest two Gaussians have in common
    factors, last = _factors()
    spreads = [k * sigma for k, (sigma, _) in zip([*factors, last], _LEVELS, strict=True)]
    least = 0.49 * math.hypot(*spreads)
    missing = [
        sum(
            _missing(sigma, 32 * words, min(1.0, spread / least) * shift)
            for spread, (sigma, words) in zip(spreads, _LEVELS, strict=True)
        )
        for shift in (0.0, distance)
    ]
    smoothing = 2.0001 * math.exp(-2.0 * math.pi**2 * _LEAST_VARIANCE)
    ratio = 2.0 * _MOST * len(_LEVELS) * smoothing * 1.0001
    delta = math.expm1(3.0 * ratio) + _MOST * (missing[0] + 2.0 * math.exp(ratio) * missing[1])
    return 1.001 * delta / alike if 1.001 * delta < alike else 1.0


def _missing(sigma: int, bits: int, shift: float) -> float:
    """Returns the mass that a table lacks of the discrete Gaussian, shifted by so many sigma.

    Of each integer 2^-bits at most, and all from 4096 on; that from 8192 on is next to nothing.
    """
    x = np.arange(2 * _HALF) / sigma
    log_p = -0.5 * x * x - math.log(sigma * math.sqrt(2.0 * math.pi))
    lacks = np.where(x < _HALF / sigma, np.minimum(log_p, -bits * math.log(2.0)), log_p)
    toward = np.minimum(x, shift)
    return float(2.0 * np.sum(np.exp(lacks + toward * x - 0.5 * toward**2)))


@functools.cache
def weights(sigma: int, bits: int) -> list[int]:
    """Returns whole numbers that add up to 2^bits, in the ratios of the discrete Gaussian.

    Those of -4096 to 4095, rounded down; zero has what is left.
    """
    with decimal.localcontext() as context:
        context.prec = 100
        rate = decimal.Decimal(-1) / (2 * sigma * sigma)
        right = [(rate * x * x).exp() for x in range(_HALF)]
        scale = 2**bits / (2 * sum(right) - 1)
        upward = [int(p * scale) for p in right]
    made = [0, *reversed(upward[1:]), *upward]
    made[_HALF] += 2**bits - sum(made)
    return made


@functools.cache
def table(sigma: int, words: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns thresholds (8192, words), ``uint32``, and what else a place gives, ``int32``.

    A place, drawn evenly, gives its own integer where other bits are below its threshold, and else
    its alias (Walker 1977; Vose 1991), each integer with exactly the odds of ``weights``.
    """
    bits = 32 * words
    size = 2 ** (bits - _INDEX_BITS)
    left = weights(sigma, bits).copy()
    other = list(range(len(left)))
    short = [place for place, weight in enumerate(left) if weight < size]
    long = [place for place, weight in enumerate(left) if weight >= size]
    own = [size] * len(left)
    while short:
        place, giver = short.pop(), long[-1]
        own[place], other[place] = left[place], giver
        left[giver] -= size - left[place]
        if left[giver] < size:
            short.append(long.pop())
    thresholds = [[(one >> shift) % 2**32 for shift in range(bits - 32, -1, -32)] for one in own]
    return np.array(thresholds, np.uint32), np.array(other, np.int32) - _HALF


@functools.lru_cache(maxsize=16)
def _compiled(size: int, last: int) -> Any:
    """Returns a program of its own, as some devices lack TensorFlow's kernels for ``uint32``."""
    return tf.function(lambda key, nonce: _integers(key, nonce, size, last), jit_compile=True)


def _integers(key: tf.Tensor, nonce: tf.Tensor, size: int, last: int) -> tf.Tensor:
    """Returns integers (size,), ``int64``: sums of one of each table, times its factor."""
    key, nonce = tf.cast(key, tf.uint32), tf.cast(nonce, tf.uint32)
    chunk = min(size, _CHUNK)

    def drawn(number: tf.Tensor) -> tf.Tensor:
        block = tf.cast(number * chunk, tf.uint32)
        words = iter(tf.unstack(key_stream(key, nonce, block, chunk)))
        parts = [_of_table(sigma, count, words) for sigma, count in _LEVELS]
        factors = [*_factors()[0], last]
        return tf.add_n(
            [k * tf.cast(part, tf.int64) for k, part in zip(factors, parts, strict=True)]
        )

    numbers = tf.map_fn(drawn, tf.range(-(-size // chunk)), fn_output_signature=tf.int64)
    return tf.reshape(numbers, [-1])[:size]


def _of_table(sigma: int, count: int, words: Iterator[tf.Tensor]) -> tf.Tensor:
    """Returns an integer for each column of the next ``count`` words, ``int32``."""
    thresholds, other = table(sigma, count)
    first = next(words)
    left = 32 - _INDEX_BITS
    place = tf.cast(tf.bitwise.right_shift(first, tf.constant(left, tf.uint32)), tf.int32)
    rest = tf.bitwise.bitwise_and(first, tf.constant(2**left - 1, tf.uint32))
    below = tf.zeros_like(place, tf.bool)
    drawn = [rest, *(next(words) for _ in range(count - 1))]
    for word, column in reversed(list(zip(drawn, thresholds.T, strict=True))):
        threshold = tf.gather(tf.constant(column), place)
        below = tf.logical_or(word < threshold, tf.logical_and(word == threshold, below))
    return tf.where(below, place - _HALF, tf.gather(tf.constant(other), place))
