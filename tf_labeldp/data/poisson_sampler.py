"""The units and rows of batches: Poisson sampling in exact integer arithmetic, or in turn."""

from __future__ import annotations

import bisect
import dataclasses
import enum
import functools
import itertools
import os
import secrets
from collections.abc import Callable, Iterator

import numpy as np

from tf_labeldp.mechanisms.random_bits import uniform_below, uniform_integers

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
        self.num_units, self.probability = num_units, probability
        self.first, self.weights = self._size_weights()
        self._sums = list(itertools.accumulate(self.weights))
        if buffer_size is None:
            total = self._sums[-1]
            enough = bisect.bisect_left(self._sums, total - total // _OVERFLOW)
            buffer_size = -(-(self.first + enough) // _MULTIPLE) * _MULTIPLE
        self.buffer_size = buffer_size

    def _size_weights(self) -> tuple[int, list[int]]:
        """Returns the first size of the table, and the integer weights of the sizes from there on.

        Weights are rounded down above the most likely size, and up below it. So ``w[k + 1] / w[k]
        <= (n - k) q / ((k + 1) (1 - q))`` for every k, as integers.
        """
        n, (q, denominator) = self.num_units, float(self.probability).as_integer_ratio()
        not_q = denominator - q
        if not not_q:
            return n, [1]
        mode = min((n + 1) * q // denominator, n)

        def upwards() -> Iterator[int]:
            weight = 1 << _MODE_BITS
            for k in range(mode, n + 1):
                if not weight:
                    return
                yield weight
                weight = weight * (n - k) * q // ((k + 1) * not_q)

        def downwards() -> Iterator[int]:
            weight = 1 << _MODE_BITS
            for k in range(mode - 1, -1, -1):
                weight = -(-weight * (k + 1) * not_q // ((n - k) * q))
                yield weight

        return 0, [*reversed(list(downwards())), *upwards()]

    @property
    def expected_size(self) -> float:
        """The mean number of units in a sample, before samples that overflow are emptied."""
        return self.probability * self.num_units

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


class Stream(enum.IntEnum):
    """Streams of a seed: drawing a second batch does not change the first one."""

    BATCH = 0
    ALT = 1
    USERS = 2

    def generator(self, seed: int | None, *numbers: int) -> np.random.Generator | None:
        """Returns the generator of a part of this stream; None for the operating system's bits."""
        if seed is None:
            return None
        return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(self, *numbers)))


@dataclasses.dataclass(frozen=True, eq=False)
class Sampling:
    """The rows of each batch of a training.

    Attributes:
        sampler: draws the units of a batch.
        steps: steps per epoch.
        seed: makes the batches repeatable; None for the operating system's bits.
        rows_of_units: the rows of each user, ``int64`` (U, k); None if units are examples.
    """

    sampler: PoissonSampler
    steps: int
    seed: int | None
    rows_of_units: np.ndarray | None = None

    @property
    def group_size(self) -> int:
        """The number of rows per unit."""
        return 1 if self.rows_of_units is None else int(self.rows_of_units.shape[1])

    @property
    def disjoint_size(self) -> int:
        """Number of units per disjoint batch: the expected size, rounded."""
        return max(1, min(round(self.sampler.expected_size), self.sampler.buffer_size))

    def sampled(self, opening: int) -> Callable[[int], np.ndarray]:
        """Returns the rows of a step, of units that are drawn for each step."""

        def rows(step: int) -> np.ndarray:
            return self._rows(self.sampler.draw(Stream.BATCH.generator(self.seed, opening, step)))

        return rows

    def in_turn(self, opening: int) -> Callable[[int], np.ndarray]:
        """Returns the rows of a step: disjoint batches of units, in random order per pass.

        An epoch begins a new pass. So each unit is used at most ``ceil(steps / (num_units //
        size))`` times per epoch, in any order of the steps, however often a step is repeated. The
        order is not secret, as the batches are revealed.
        """
        size, num_units = self.disjoint_size, self.sampler.num_units
        seed = secrets.randbits(128) if self.seed is None else self.seed

        @functools.lru_cache(maxsize=1)
        def order_of(epoch: int, number: int) -> np.ndarray:
            rng = Stream.BATCH.generator(seed, opening, epoch, number)
            return np.argsort(uniform_integers(num_units, rng), kind="stable")

        def rows(step: int) -> np.ndarray:
            epoch, place = divmod(step, self.steps)
            number, place = divmod(place, num_units // size)
            units = order_of(epoch, number)[place * size : (place + 1) * size]
            return self._rows(np.sort(units))

        return rows

    def _rows(self, units: np.ndarray) -> np.ndarray:
        return units if self.rows_of_units is None else self.rows_of_units[units].ravel()


def _integer_below(bound: int, rng: np.random.Generator | None) -> int:
    length = bound.bit_length()
    num_bytes = -(-length // 8)
    while True:
        drawn = os.urandom(num_bytes) if rng is None else rng.bytes(num_bytes)
        number = int.from_bytes(drawn, "little") >> (8 * num_bytes - length)
        if number < bound:
            return number
