"""Privacy losses, composed at a cost that hardly grows with the number of uses.

``dp_accounting`` finds the loss of one use. Here equal uses are composed in blocks, and blocks in
blocks of blocks; the grid grows with the spread of the loss, so that no loss has many more cells
than another. Blocks are kept, and one more use composes only what it changes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import pld

from tf_labeldp.accounting._label_distance import LabelDistanceDpEvent, privacy_loss

_BLOCK = 64
"""Uses that are composed at once; this many blocks are a larger block."""
_CELLS = 1024
"""At least, per standard deviation of a loss whose grid is made coarser. Each time adds a few
parts in a million to epsilon."""
_CELLS_OF_RESPONSE = 2048
"""Per epsilon of randomized response that meets other events, times the root of its uses."""
_TAIL = 2.0**-49
"""Probability cut off at each end of a block, where rounding errors of Fourier transforms are as
large. At the upper end it counts as a loss without bound."""
_TAIL_OF_ONE = 2.0**-55
"""Likewise for one use."""
_ORDERS = np.array([sign * 80.0 / 2.0**i for i in range(12) for sign in (-1.0, 1.0)])
"""Orders of Chernoff's bounds, times the number of cells."""
_KEPT = 640
"""Losses in memory, a few of some megabyte: two for each of three hundred kinds of uses."""

Use = tuple[dp_accounting.DpEvent, int, float]
"""An event, the number of its uses, and the grid of the privacy loss of one of them."""


@dataclasses.dataclass(frozen=True, eq=False)
class Loss:
    """A distribution of a privacy loss, of which every rounding is upwards.

    Attributes:
        grid: the distance of its values.
        lowest: the lowest value, over the grid.
        masses: the probabilities of the values, rising.
        infinite: the probability of a loss without bound.
    """

    grid: float
    lowest: int
    masses: np.ndarray
    infinite: float = 0.0

    def values(self) -> np.ndarray:
        """Returns the losses, rising."""
        return self.grid * np.arange(self.lowest, self.lowest + self.masses.size)

    def __add__(self, other: Loss) -> Loss:
        """Returns the loss of both together."""
        from scipy import signal

        grid = max(self.grid, other.grid)
        one, two = self.on_grid(grid), other.on_grid(grid)
        masses = signal.fftconvolve(one.masses, two.masses)
        infinite = one.infinite + two.infinite
        return Loss(grid, one.lowest + two.lowest, masses, infinite).trimmed().coarser()

    def __mul__(self, count: int) -> Loss:
        """Returns the loss of some equal uses together."""
        from scipy import fft

        if count == 1:
            return self
        # Chernoff's bounds of where the sum lies; what lies beyond them wraps around.
        masses, size = np.maximum(self.masses, 0.0), self.masses.size
        low, high = 0, (size - 1) * count
        for order in _ORDERS / size:
            moment = math.log(_dot(np.exp(order * np.arange(size)), masses))
            bound = (count * moment - math.log(_TAIL)) / order
            if order > 0.0:
                high = min(high, math.ceil(bound))
            else:
                low = max(low, math.floor(bound))
        length = fft.next_fast_len(max(size, high - low + 1), real=True)
        masses = fft.irfft(fft.rfft(self.masses, length) ** count, length)
        masses = np.roll(masses, -low)[: high - low + 1]
        infinite = count * self.infinite + _TAIL
        return Loss(self.grid, self.lowest * count + low, masses, infinite).trimmed()

    def trimmed(self, tail: float = _TAIL) -> Loss:
        """Returns the loss without its tails."""
        sizes = np.abs(self.masses)
        start = int(np.argmax(np.cumsum(sizes) > tail))
        stop = sizes.size - int(np.argmax(np.cumsum(sizes[::-1]) > tail))
        masses = self.masses[start:stop].copy()
        masses[0] += sizes[:start].sum()
        infinite = self.infinite + float(sizes[stop:].sum())
        return Loss(self.grid, self.lowest + start, masses, infinite)

    def coarser(self) -> Loss:
        """Returns the loss on a grid as coarse as its spread allows."""
        values = self.values()
        mean = _dot(values, self.masses)
        spread = math.sqrt(max(0.0, _dot((values - mean) ** 2, self.masses)))
        times = spread / (_CELLS * self.grid)
        return self.on_grid(self.grid * 2.0 ** math.floor(math.log2(times))) if times >= 2 else self

    def on_grid(self, grid: float) -> Loss:
        """Returns the loss on another grid, whose two values next to a loss stand for it.

        They have its probability under either data set together, so that knowing which of the two
        it is can only tell the data sets apart better.
        """
        if grid == self.grid:
            return self
        values = self.values()
        cells = np.floor(values / grid).astype(np.int64)
        upper = np.clip(np.expm1(cells * grid - values) / math.expm1(-grid), 0.0, 1.0)
        places, size = cells - cells[0], int(cells[-1] - cells[0]) + 2
        masses = np.bincount(places, (1.0 - upper) * self.masses, size)
        masses += np.bincount(places + 1, upper * self.masses, size)
        return Loss(grid, int(cells[0]), masses, self.infinite)

    def epsilon(self, delta: float) -> float:
        """Returns the least epsilon, zero or more, at which delta is no more than this."""
        if self.infinite > delta:
            return math.inf
        values = self.values()
        low, high = int(np.searchsorted(values, 0.0)) - 1, values.size - 1
        if self._delta(0.0, values) <= delta:
            return 0.0
        while high - low > 1:
            middle = (low + high) // 2
            is_more = self._delta(values[middle], values) > delta
            low, high = (middle, high) if is_more else (low, middle)
        # Between two values, delta is linear in e^epsilon.
        excess = self.infinite + float(self.masses[high:].sum()) - delta
        other = _dot(np.exp(values[high] - values[high:]), self.masses[high:])
        return float(values[high] + math.log(excess / other))

    def _delta(self, epsilon: float, values: np.ndarray) -> float:
        first = int(np.searchsorted(values, epsilon, side="right"))
        return self.infinite - _dot(np.expm1(epsilon - values[first:]), self.masses[first:])


def _dot(one: np.ndarray, other: np.ndarray) -> float:
    """Returns the scalar product. The threads of BLAS took five times as long here."""
    return float((one * other).sum())


def response_epsilon(event: dp_accounting.RandomizedResponseDpEvent) -> float:
    """Returns the worst log-ratio of randomized response, no less than a double resolves."""
    noise = event.noise_parameter
    if noise == 0.0:
        return math.inf
    return max(math.log1p(event.num_buckets * (1.0 - noise) / noise), 2.0**-52)


class _First:
    """What an accountant begins with, so that it keeps the loss of one event as it is."""

    @staticmethod
    def compose(loss: Any) -> Any:
        return loss


class _OneUse(pld.PLDAccountant):
    """The accountant of ``dp_accounting`` for one event, which knows ``LabelDistanceDpEvent``."""

    _contains_non_dp_event: bool

    def __init__(self, grid: float, relation: str) -> None:
        super().__init__(dp_accounting.NeighboringRelation[relation], grid)
        self._pld: Any = _First
        self._grid = grid

    def _maybe_compose(self, event: Any, count: int, do_compose: bool) -> Any:
        if not isinstance(event, LabelDistanceDpEvent):
            return super()._maybe_compose(event, count, do_compose)
        if self.neighboring_relation != dp_accounting.NeighboringRelation.REPLACE_ONE:
            return self.CompositionErrorDetails(event, "It is for replaced labels only.")
        self._pld = privacy_loss(event, self._grid)
        return None

    def losses(self) -> tuple[Loss, ...]:
        if self._contains_non_dp_event:
            return ()
        found = {id(one): one.to_dense_pmf() for one in (self._pld._pmf_remove, self._pld._pmf_add)}
        return tuple(
            Loss(one._discretization, one._lower_loss, one._probs, one._infinity_mass).trimmed(
                _TAIL_OF_ONE
            )
            for one in found.values()
        )


@functools.lru_cache(maxsize=_KEPT)
def losses_of_one(event: dp_accounting.DpEvent, grid: float, relation: str) -> tuple[Loss, ...]:
    """Returns the privacy loss of one use: of replacing, or of removing and of adding, a unit.

    There is none if it has no bound. Randomized response, with its epsilon as the grid, is exact.
    """
    if isinstance(event, dp_accounting.RandomizedResponseDpEvent) and relation == "REPLACE_ONE":
        other = event.noise_parameter / event.num_buckets
        if other == 0.0:
            return ()
        kept = 1.0 - event.noise_parameter + other
        return (Loss(grid, -1, np.array([other, (event.num_buckets - 2) * other, kept])),)
    accountant = _OneUse(grid, relation)
    accountant.compose(event)
    return accountant.losses()


def composed_loss(uses: tuple[Use, ...], relation: str, way: int = 0) -> Loss:
    """Returns the privacy loss of all these uses together.

    Of ``way`` 0 and 1, the latter is the loss of adding a unit, where that is another one.
    """
    return _repeated(*uses[0], relation, way) if len(uses) == 1 else _mixed(uses, relation, way)


@functools.lru_cache(maxsize=_KEPT)
def _mixed(uses: tuple[Use, ...], relation: str, way: int) -> Loss:
    """Returns the privacy loss of different uses by halves, of which one more changes few."""
    if len(uses) > 1:
        half = 1 << (len(uses) - 1).bit_length() - 1
        return _mixed(uses[:half], relation, way) + _mixed(uses[half:], relation, way)
    ((event, count, grid),) = uses
    loss = _repeated(event, count, grid, relation, way)
    if isinstance(event, dp_accounting.RandomizedResponseDpEvent):
        loss = loss.on_grid(grid * math.sqrt(count) / _CELLS_OF_RESPONSE)
    return loss


@functools.lru_cache(maxsize=64)
def _repeated(
    event: dp_accounting.DpEvent, count: int, grid: float, relation: str, way: int
) -> Loss:
    """Returns the privacy loss of equal uses: of the larger blocks, and of the smallest ones."""
    level, number = 0, count
    while number % _BLOCK == 0:
        level, number = level + 1, number // _BLOCK
    smallest = _block(event, level, grid, relation, way) * (number % _BLOCK)
    larger = count - number % _BLOCK * _BLOCK**level
    return _repeated(event, larger, grid, relation, way) + smallest if larger else smallest


@functools.lru_cache(maxsize=_KEPT)
def _block(event: dp_accounting.DpEvent, level: int, grid: float, relation: str, way: int) -> Loss:
    """Returns the privacy loss of ``_BLOCK ** level`` equal uses."""
    if level == 0:
        return losses_of_one(event, grid, relation)[-way]
    return (_block(event, level - 1, grid, relation, way) * _BLOCK).coarser()
