"""The joint epsilon of events: privacy losses, composed at a cost that is flat in their number.

``dp_accounting`` computes the loss of one use. This file composes equal uses in blocks, and blocks
in larger blocks; the grid grows with the spread of the loss. Blocks are cached, so one more use
recomposes only a few. docs/theory.md proves that all rounding is upwards.

This file corrects or extends ``dp_accounting`` 0.6.0 in six places:

* It ignores the count of a repeated ``RandomizedResponseDpEvent``; blocks count every use.
* It has no pure mechanism under ``REPLACE_ONE``. Binary randomized response of the same epsilon
  takes its place and dominates it (Kairouz, Oh and Viswanath 2015, "The composition theorem for
  differential privacy", Theorem 3.1 and its proof). A Laplace noise multiplier is relative to
  adding or removing, and replacing moves twice as far: epsilon is ``2 / noise_multiplier``.
* It raises Fourier transforms to the power of the number of steps, which multiplies their rounding
  errors: a multiple of these is taken off delta.
* Its grid of privacy losses, 1e-4, can double the epsilon of many small steps of DP-SGD. Here the
  grid depends on the event.
* The rounding errors of its sampled Gaussian grow with the inverse of the loss: at 1e9 steps they
  make epsilon fifteen times too large. With replaced labels it is ``LabelDistanceDpEvent`` here, at
  the least norm: the same pair.
* It has no event for clipped distances of gradients or for an added delta; ``_added_events`` does.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import operator
import types
from collections.abc import Iterable, Iterator
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import DpEvent, pld
from scipy import fft, signal

from tf_labeldp import _validate
from tf_labeldp.accounting._added_events import AddedDeltaDpEvent, LabelDistanceDpEvent
from tf_labeldp.accounting.events import EventFields
from tf_labeldp.accounting.gaussian import gaussian_epsilon

_NEIGHBOURS = {"replace_label": "REPLACE_ONE", "add_or_remove": "ADD_OR_REMOVE_ONE"}
"""Names of relations in ``dp_accounting``."""
_ROUNDING = 2.0**-53
"""Taken off delta per use: five times the largest error against exact binomial sums, at 64 uses."""
_ULPS = 1.0 + 2.0**-40
"""Factor on epsilon, larger than its relative numerical error."""

_GRID = 1e-4
"""The grid of ``dp_accounting``, for uses without Gaussian noise."""
_GRID_OF_GAUSSIAN = 1.0 / 256.0
"""Divided by the noise multiplier; 512 cells per standard deviation of an unsampled loss."""
_FINEST_GRID = 1e-7
"""Below, second differences of delta drown in the rounding errors of doubles."""
_CELLS_OF_ONE = 25_000
"""Cells between zero and the largest loss of one step; twice the cells take twice as long."""
LEAST_NOISE = 1e-2
"""Below, noise multipliers promise nothing (epsilon above ten thousand per use) and overflow."""

_KINDS = 64
"""Most kinds of events composed unchanged; with more, their settings are rounded to fewer."""
_PARTS = 32
"""Rounding adds at most one part in 32 to epsilons of randomized response, which leaves 75 in each
factor of ten."""
_PARTS_OF_SAMPLED = 128
"""Rounding adds at most one part in 128 to sampling probabilities and to precisions of noise."""
_BLOCK = 64
"""Uses that one block composes; a larger block composes as many blocks."""
_CELLS = 1024
"""Least cells per standard deviation of a loss after its grid is coarsened; each coarsening adds a
few parts in a million to epsilon."""
_CELLS_OF_RESPONSE = 2048
"""Cells per epsilon of randomized response among other events, times the root of its uses."""
_TAIL = 2.0**-49
"""Probability cut off at each end of a block, the size of Fourier rounding errors there. At the
upper end it counts as an unbounded loss."""
_TAIL_OF_ONE = _TAIL / _BLOCK
"""Probability cut off at each end of one use's loss: that of a whole block, divided by its uses."""
_ORDERS = np.array([sign * 80.0 / 2.0**i for i in range(12) for sign in (-1.0, 1.0)])
"""Orders of Chernoff's bounds, multiplied by the number of cells."""
_KEPT = 640
"""Losses cached, a few of them megabytes: two for each of three hundred kinds of uses."""

_Uses = tuple[tuple[DpEvent, int], ...]
"""Different events, each with its number of uses."""


@dataclasses.dataclass(frozen=True, eq=False)
class PrivacyLoss:
    """A distribution of a privacy loss; all rounding is upwards.

    Attributes:
        grid: distance between two values.
        lowest: lowest value, divided by the grid.
        masses: probabilities of the values, in rising order of values.
        infinite: probability of an unbounded loss.
    """

    grid: float
    lowest: int
    masses: np.ndarray
    infinite: float = 0.0

    @property
    def values(self) -> np.ndarray:
        return self.grid * np.arange(self.lowest, self.lowest + self.masses.size)

    def __add__(self, other: PrivacyLoss) -> PrivacyLoss:
        grid = max(self.grid, other.grid)
        first, second = self.on_grid(grid), other.on_grid(grid)
        masses = signal.fftconvolve(first.masses, second.masses)
        infinite = first.infinite + second.infinite
        return PrivacyLoss(grid, first.lowest + second.lowest, masses, infinite).trimmed().coarser()

    def __mul__(self, count: int) -> PrivacyLoss:
        if count == 1:
            return self
        # The transform covers the range between Chernoff's bounds; mass beyond it wraps around.
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
        # What lies above the range, at most a tail, wraps around to small losses or is cut off. It
        # counts as unbounded.
        infinite = count * self.infinite + _TAIL
        return PrivacyLoss(self.grid, self.lowest * count + low, masses, infinite).trimmed()

    def trimmed(self, tail: float = _TAIL) -> PrivacyLoss:
        sizes = np.abs(self.masses)
        start = int(np.argmax(np.cumsum(sizes) > tail))
        stop = sizes.size - int(np.argmax(np.cumsum(sizes[::-1]) > tail))
        masses = self.masses[start:stop].copy()
        # The lower tail moves up to the lowest value that is left, the upper one to infinity.
        masses[0] += sizes[:start].sum()
        infinite = self.infinite + float(sizes[stop:].sum())
        return PrivacyLoss(self.grid, self.lowest + start, masses, infinite)

    def coarser(self) -> PrivacyLoss:
        """Returns the loss on a grid as coarse as its spread allows."""
        values = self.values
        mean = _dot(values, self.masses)
        spread = math.sqrt(max(0.0, _dot((values - mean) ** 2, self.masses)))
        times = spread / (_CELLS * self.grid)
        return self.on_grid(self.grid * 2.0 ** math.floor(math.log2(times))) if times >= 2 else self

    def on_grid(self, grid: float) -> PrivacyLoss:
        """Returns the loss on another grid, each value split between its two grid neighbours.

        The split keeps its probability under either data set, so revealing which neighbour was
        drawn can only make the data sets easier to distinguish.
        """
        if grid == self.grid:
            return self
        values = self.values
        cells = np.floor(values / grid).astype(np.int64)
        upper = np.clip(np.expm1(cells * grid - values) / math.expm1(-grid), 0.0, 1.0)
        places, size = cells - cells[0], int(cells[-1] - cells[0]) + 2
        masses = np.bincount(places, (1.0 - upper) * self.masses, size)
        masses += np.bincount(places + 1, upper * self.masses, size)
        return PrivacyLoss(grid, int(cells[0]), masses, self.infinite)

    def epsilon(self, delta: float) -> float:
        """Returns the least epsilon >= 0 at which the loss is (epsilon, delta)-DP."""
        # The negated comparisons keep a NaN from passing for a small loss.
        if not self.infinite <= delta:
            return math.inf
        values = self.values

        def is_more(epsilon: float) -> bool:
            first = int(np.searchsorted(values, epsilon, side="right"))
            finite = _dot(np.expm1(epsilon - values[first:]), self.masses[first:])
            return not self.infinite - finite <= delta

        if not is_more(0.0):
            return 0.0
        low, high = int(np.searchsorted(values, 0.0)) - 1, values.size - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if is_more(values[middle]) else (low, middle)
        # Between two values, delta is linear in e^epsilon.
        excess = self.infinite + float(self.masses[high:].sum()) - delta
        other = _dot(np.exp(values[high] - values[high:]), self.masses[high:])
        return float(values[high] + math.log(excess / other))


def _dot(first: np.ndarray, second: np.ndarray) -> float:
    """Returns the scalar product; BLAS with its threads took five times as long here."""
    return float((first * second).sum())


def composed_epsilon(
    events: Iterable[DpEvent], delta: float, relation: str = "replace_label"
) -> float:
    """Returns an upper bound on the epsilon of events in sequence.

    The bound comes from privacy loss distributions, discretised pessimistically (Doroshenko et al.
    2022). The delta of an ``AddedDeltaDpEvent``, which bounds its effect, is taken off ``delta``.
    """
    delta = _validate.number_in("delta", delta, "[0, 1)")
    _validate.one_of("relation", relation, _NEIGHBOURS)
    counted = counted_events(events, relation)
    added = [event for event in counted if isinstance(event, AddedDeltaDpEvent)]
    taken_off = math.fsum(event.delta * counted.pop(event) for event in added)
    gaussians = filter(None, map(gaussian_noise, counted))
    if delta <= taken_off > 0.0 or any(noise < LEAST_NOISE for _, noise in gaussians):
        return math.inf
    uses = tuple(sorted(_merged(counted).items(), key=repr))
    rounding = _ROUNDING * sum(n for _, n in uses)
    if len(uses) == 1 and isinstance(uses[0][0], dp_accounting.GaussianDpEvent) and delta > 0.0:
        left, distance = delta - taken_off - rounding, 2.0 if relation == "replace_label" else 1.0
        noise = uses[0][0].noise_multiplier
        return gaussian_epsilon(noise, left, distance) * _ULPS if left > 0.0 else math.inf
    neighbours = _NEIGHBOURS[relation]
    both = [_losses_of_one(event, neighbours) for event, _ in uses]
    if not all(both):
        return math.inf
    if delta == 0.0:
        return _pure_epsilon(uses, both) * _ULPS
    delta -= taken_off + rounding
    if delta <= 0.0:
        return math.inf
    # Way 0 is replacing or removing a unit; way 1 is adding one, where its loss is another.
    ways = range(max(map(len, both), default=0))
    losses = (_joint_loss(uses, neighbours, way) for way in ways)
    return max((loss.epsilon(delta) for loss in losses), default=0.0) * _ULPS


def _pure_epsilon(uses: _Uses, losses_of_one: list[tuple[PrivacyLoss, ...]]) -> float:
    """Returns the sum of the largest losses of uses, which is attained by all of them together."""
    largest = (max(loss.epsilon(0.0) for loss in losses) for losses in losses_of_one)
    return math.fsum(epsilon * n for epsilon, (_, n) in zip(largest, uses, strict=True))


@functools.lru_cache(maxsize=4096)
def epsilon_of(event: DpEvent, delta: float, relation: str = "replace_label") -> float:
    """Returns ``composed_epsilon`` of one event; infinite if no accountant supports it."""
    try:
        return composed_epsilon([event], delta, relation)
    except dp_accounting.UnsupportedEventError:
        return math.inf


def counted_events(
    events: Iterable[DpEvent], relation: str = "add_or_remove"
) -> dict[DpEvent, int]:
    counted: dict[DpEvent, int] = {}
    for event in events:
        for leaf, count in _leaves(event, 1):
            sampled = isinstance(leaf, dp_accounting.PoissonSampledDpEvent)
            inner = leaf.event if sampled else leaf
            if relation == "replace_label" and isinstance(inner, dp_accounting.LaplaceDpEvent):
                leaf = EventFields.randomized_response(2.0 / inner.noise_multiplier).dp_event()
            counted[leaf] = counted.get(leaf, 0) + count
    return counted


def _leaves(event: DpEvent, times: int) -> Iterator[tuple[DpEvent, int]]:
    if isinstance(event, dp_accounting.NoOpDpEvent):
        return
    if isinstance(event, dp_accounting.RandomizedResponseDpEvent) and event.num_buckets == 1:
        return
    if isinstance(event, dp_accounting.ComposedDpEvent):
        for part in event.events:
            yield from _leaves(part, times)
    elif isinstance(event, dp_accounting.SelfComposedDpEvent):
        yield from _leaves(event.event, times * event.count)
    else:
        yield event, times


def fewer_events(events: Iterable[DpEvent]) -> tuple[DpEvent, ...]:
    """Returns a few events that jointly cost no less in ``composed_epsilon``, for labels."""
    counted = counted_events(events, "replace_label")
    if not any(noise < LEAST_NOISE for _, noise in filter(None, map(gaussian_noise, counted))):
        counted = _merged(counted)
    return tuple(dp_accounting.SelfComposedDpEvent(*use) for use in counted.items())


def _merged(counted: dict[DpEvent, int]) -> dict[DpEvent, int]:
    """Returns fewer kinds of events whose joint cost is no less.

    Unsampled Gaussians cost as much as one with the sum of their squared precisions (Dong, Roth and
    Su 2022, "Gaussian differential privacy", Corollary 2). Randomized response of a larger epsilon
    costs no less: mixing in uniform answers makes it the original one. Nor does a sampled Gaussian
    of a larger probability, by dropping examples, or of less noise, by adding some.
    """
    merged: dict[DpEvent, int] = {}
    precisions = []
    for event, count in counted.items():
        if isinstance(event, dp_accounting.GaussianDpEvent):
            precisions.append(count / event.noise_multiplier**2)
            continue
        if len(counted) > _KINDS:
            event = _rounded(event)
        merged[event] = merged.get(event, 0) + count
    if precisions:
        merged[dp_accounting.GaussianDpEvent(1.0 / math.sqrt(math.fsum(precisions)))] = 1
    return merged


@functools.lru_cache(maxsize=1 << 16)
def _rounded(event: DpEvent) -> DpEvent:
    """Returns an event that costs no less, with one of a few settings."""
    if isinstance(event, dp_accounting.RandomizedResponseDpEvent):
        epsilon = _response_epsilon(event)
        if 0.0 < epsilon < math.inf:
            return EventFields.randomized_response(
                _raised(epsilon, _PARTS), event.num_buckets
            ).dp_event()
    gaussian = gaussian_noise(event)
    if gaussian is None or min(gaussian) <= 0.0:
        return event
    probability = _raised(gaussian[0], _PARTS_OF_SAMPLED)
    probability = probability if probability < 1.0 else gaussian[0]
    noise = 1.0 / _raised(1.0 / gaussian[1], _PARTS_OF_SAMPLED)
    if isinstance(event, LabelDistanceDpEvent):
        return dataclasses.replace(event, sampling_probability=probability, noise_multiplier=noise)
    return dp_accounting.PoissonSampledDpEvent(probability, dp_accounting.GaussianDpEvent(noise))


def _raised(value: float, parts: int) -> float:
    """Returns the next larger power of ``e^(1 / parts)``; a power stays."""
    return max(value, math.exp(math.ceil(parts * math.log(value) - 1e-9) / parts))


def _response_epsilon(event: dp_accounting.RandomizedResponseDpEvent) -> float:
    """Returns the worst log-ratio of randomized response, plus the rounding errors of its noise."""
    noise, num_buckets = event.noise_parameter, event.num_buckets
    if noise == 0.0:
        return math.inf
    return math.log1p(num_buckets * (1.0 - noise) / noise) + num_buckets * 2.0**-51


def gaussian_noise(event: Any) -> tuple[float, float] | None:
    """Returns the sampling probability and noise multiplier of a Gaussian; else None."""
    if isinstance(event, LabelDistanceDpEvent):
        return event.sampling_probability, event.noise_multiplier
    sampled = isinstance(event, dp_accounting.PoissonSampledDpEvent)
    inner = event.event if sampled else event
    if not isinstance(inner, dp_accounting.GaussianDpEvent):
        return None
    return event.sampling_probability if sampled else 1.0, inner.noise_multiplier


def _grid(event: DpEvent) -> float:
    """Returns the grid step for the privacy loss of one use.

    The loss of Gaussian noise has a standard deviation of about ``2 q / sigma``: a step of a
    thirtieth costs one part in ten thousand of epsilon. The number of cells bounds it below.
    """
    gaussian = gaussian_noise(event)
    if gaussian is None:
        return _GRID
    probability, noise = gaussian
    if probability == 1.0:
        return max(_GRID_OF_GAUSSIAN / noise, _FINEST_GRID)
    # The largest loss is log(1 - q + q e^x), x the full batch's at ten standard deviations.
    reach = 2.0 * event.longest if isinstance(event, LabelDistanceDpEvent) else 1.0
    largest = 10.5 * reach / noise + 0.5 * (reach / noise) ** 2
    largest = float(np.logaddexp(math.log1p(-probability), math.log(probability) + largest))
    return max(min(_GRID, probability / (15.0 * noise)), largest / _CELLS_OF_ONE, _FINEST_GRID)


@functools.lru_cache(maxsize=_KEPT)
def _losses_of_one(event: DpEvent, neighbours: str) -> tuple[PrivacyLoss, ...]:
    """Returns the privacy losses of one use: of replacing a unit, or of removing and adding one.

    An unbounded use has none. Randomized response, with its epsilon as the grid, is exact.
    """
    if isinstance(event, dp_accounting.RandomizedResponseDpEvent) and neighbours == "REPLACE_ONE":
        other = event.noise_parameter / event.num_buckets
        if other == 0.0:
            return ()
        masses = np.array(
            [other, (event.num_buckets - 2) * other, 1.0 - event.noise_parameter + other]
        )
        return (PrivacyLoss(_response_epsilon(event), -1, masses),)
    is_distance = isinstance(event, LabelDistanceDpEvent)
    gaussian = gaussian_noise(event)
    if is_distance and neighbours != "REPLACE_ONE":
        raise dp_accounting.UnsupportedEventError(f"{event} supports replaced labels only.")
    if neighbours == "REPLACE_ONE" and gaussian is not None and gaussian[0] < 1.0:
        step = event if is_distance else LabelDistanceDpEvent(*gaussian, longest=0.5)
        found = [step.loss(_grid(event))]
    else:
        relation = dp_accounting.NeighboringRelation[neighbours]
        accountant = pld.PLDAccountant(relation, _grid(event))
        # The stub makes the accountant store the loss of this single event uncomposed.
        accountant._pld = types.SimpleNamespace(compose=lambda loss: loss)
        accountant.compose(event)
        if accountant._contains_non_dp_event:
            return ()
        found = [accountant._pld._pmf_remove, accountant._pld._pmf_add]
    dense = {id(pmf): pmf.to_dense_pmf() for pmf in found}.values()
    return tuple(
        PrivacyLoss(pmf._discretization, pmf._lower_loss, pmf._probs, pmf._infinity_mass).trimmed(
            _TAIL_OF_ONE
        )
        for pmf in dense
    )


def _joint_loss(uses: _Uses, neighbours: str, way: int) -> PrivacyLoss:
    """Returns the privacy loss of uses; only different ones need a common grid."""
    if len(uses) == 1:
        return _repeated(*uses[0], neighbours, way)
    return _mixed(uses, neighbours, way)


@functools.lru_cache(maxsize=_KEPT)
def _mixed(uses: _Uses, neighbours: str, way: int, level: int = 0) -> PrivacyLoss:
    """Returns the privacy loss of different uses, composed by halves of their digests.

    One more kind changes one half of each half.
    """
    if len(uses) > 1:
        halves = [[use for use in uses if _bit(use[0], level) == bit] for bit in (0, 1)]
        parts = [_mixed(tuple(half), neighbours, way, level + 1) for half in halves if half]
        return functools.reduce(operator.add, parts)
    ((event, count),) = uses
    loss = _repeated(event, count, neighbours, way)
    if isinstance(event, dp_accounting.RandomizedResponseDpEvent):
        loss = loss.on_grid(_response_epsilon(event) * math.sqrt(count) / _CELLS_OF_RESPONSE)
    return loss


@functools.lru_cache(maxsize=_KEPT)
def _digest(event: DpEvent) -> int:
    return int.from_bytes(hashlib.sha256(repr(event).encode()).digest(), "little")


def _bit(event: DpEvent, level: int) -> int:
    return _digest(event) >> level & 1


@functools.lru_cache(maxsize=64)
def _repeated(event: DpEvent, count: int, neighbours: str, way: int, level: int = 0) -> PrivacyLoss:
    number, rest = divmod(count, _BLOCK)
    larger = _repeated(event, number, neighbours, way, level + 1) if number else None
    if larger is not None and not rest:
        return larger
    smallest = _block(event, level, neighbours, way) * rest
    return smallest if larger is None else larger + smallest


@functools.lru_cache(maxsize=_KEPT)
def _block(event: DpEvent, level: int, neighbours: str, way: int) -> PrivacyLoss:
    if level == 0:
        return _losses_of_one(event, neighbours)[-way]
    return (_block(event, level - 1, neighbours, way) * _BLOCK).coarser()
