"""Poisson sampling of the units of a batch, in exact integer arithmetic."""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Iterator

import numpy as np

from tf_labeldp.mechanisms.random_bits import uniform_below

_MODE_BITS = 192
"""Bits of the largest weight: rounding then changes a sample by less than 2^-150 in total."""
_OVERFLOW = 10**3
"""Batches per batch that overflows the default buffer, at least."""
_MULTIPLE = 8
"""Units: default buffers are multiples of it, so that replicas can share them evenly."""


class PoissonSampler:
    """Draws samples that contain each of n units (examples or users) with probability q.

    The size of a sample is drawn from a table of integer weights: binomial, rounded such that no
    size is too likely relative to the next smaller one. Its units are a uniform subset.

    Guarantee:
        Conditional on the other units in a sample, a unit is in it with probability at most q,
        exactly: the odds are ``w[r + 1] (r + 1) / (w[r] (n - r))`` for r others, and the rounding
        never takes them above ``q / (1 - q)``. The sample as a whole differs from a Poisson sample
        by less than 2^-150 in total variation.

    Args:
        num_units: n.
        probability: q in (0, 1]; the float is taken as an exact rational number.
        buffer_size: the most units per batch; None for the smallest multiple of 8 that a sample
            exceeds with probability at most 1e-3.
    """

    def __init__(self, num_units: int, probability: float, buffer_size: int | None = None) -> None:
        self.num_units = num_units
        self.first, self.weights = _binomial_weights(num_units, probability)
        self._sums = list(itertools.accumulate(self.weights))
        if buffer_size is None:
            total = self._sums[-1]
            enough = bisect.bisect_left(self._sums, total - total // _OVERFLOW)
            buffer_size = -(-(self.first + enough) // _MULTIPLE) * _MULTIPLE
        self.buffer_size = buffer_size

    @property
    def overflow_probability(self) -> float:
        """Probability that a sample has more units than the buffer."""
        fitting = self.buffer_size - self.first
        if fitting < 0:
            return 1.0
        kept = self._sums[min(fitting, len(self._sums) - 1)]
        return (self._sums[-1] - kept) / self._sums[-1]

    def draw(self, rng: np.random.Generator | None) -> np.ndarray:
        """Returns the units of a batch, ``int64`` (m,) increasing; none if they overflow it."""
        place = bisect.bisect_right(self._sums, _integer_below(self._sums[-1], rng))
        count = self.first + place
        if count > self.buffer_size:
            return np.zeros(0, np.int64)
        return self.uniform_subset(count, self.num_units, rng)

    @staticmethod
    def uniform_subset(size: int, bound: int, rng: np.random.Generator | None) -> np.ndarray:
        """Returns a uniform subset of 0..bound-1, ``int64`` (size,) increasing.

        Repeated numbers are redrawn, which favours none.
        """
        if 2 * size > bound:
            inside = np.ones(bound, dtype=bool)
            inside[PoissonSampler.uniform_subset(bound - size, bound, rng)] = False
            return np.flatnonzero(inside)
        numbers = np.zeros(0, np.int64)
        while numbers.size < size:
            more = uniform_below(np.full(size - numbers.size, bound), rng)
            numbers = np.sort(np.concatenate([numbers, more]))
            numbers = numbers[np.diff(numbers, prepend=-1) > 0]  # np.unique takes much longer
        return numbers


def _binomial_weights(num_units: int, probability: float) -> tuple[int, list[int]]:
    """Returns the first size of the table, and the integer weights of the sizes from there on.

    Weights are rounded down above the most likely size, and up below it. So ``w[k + 1] / w[k] <=
    (n - k) q / ((k + 1) (1 - q))`` for every k, as integers.
    """
    q, denominator = float(probability).as_integer_ratio()
    not_q = denominator - q
    if not not_q:
        return num_units, [1]
    mode = min((num_units + 1) * q // denominator, num_units)

    def upwards() -> Iterator[int]:
        weight = 1 << _MODE_BITS
        for k in range(mode, num_units + 1):
            if not weight:
                return
            yield weight
            weight = weight * (num_units - k) * q // ((k + 1) * not_q)

    def downwards() -> Iterator[int]:
        weight = 1 << _MODE_BITS
        for k in range(mode - 1, -1, -1):
            weight = -(-weight * (k + 1) * not_q // ((num_units - k) * q))
            yield weight

    return 0, [*reversed(list(downwards())), *upwards()]


def _integer_below(bound: int, rng: np.random.Generator | None) -> int:
    length = bound.bit_length()
    num_bytes = -(-length // 8)
    while True:
        drawn = os.urandom(num_bytes) if rng is None else rng.bytes(num_bytes)
        number = int.from_bytes(drawn, "little") >> (8 * num_bytes - length)
        if number < bound:
            return number
