"""What the mechanisms for numbers in a range share: the grid, the checks, the law of the outputs.

A label goes to the nearest point of a public integer grid of N steps over [low, high], all noise is
added there, and one conversion to a float at the end is post-processing, which cannot cost privacy.
Whole numbers are their own grid; a continuous range has 2^32 steps.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.mechanisms import _integer_noise
from tf_labeldp.mechanisms._base import FrozenRegression

_MAX_WHOLE = 1 << 53
_MAX_CELLS = 1 << 27
_FLOAT32 = 2.0**-23
_NARROWEST, _WIDEST = 1e-290, 1e290
"""Ranges of which a grid step does not underflow, and no noise overflows."""


@dataclasses.dataclass(frozen=True)
class BoundedMechanism(FrozenRegression):
    """A randomizer of numbers in [low, high], whose sensitivity is high - low.

    Privacy: that of ``LabelMechanism`` for every pair of labels in [low, high]. It holds for the
    draws as they are made, not only for their formula: ``_integer_noise`` has the argument.

    Attributes:
        epsilon: at least 1e-6 and finite.
        low: smallest label, public.
        high: largest label, public.
        clip: whether outputs are clipped to [low, high], which is post-processing.
    """

    low: float
    high: float
    clip: bool = True

    whole: ClassVar[bool] = False
    """Whether labels are whole numbers."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        super().__post_init__()
        name = type(self).__name__
        if self.epsilon < _integer_noise.MIN_EPSILON:
            raise ValueError(
                f"epsilon must be at least {_integer_noise.MIN_EPSILON:g} for {name}, got "
                f"{self.epsilon:g}: the noise of a smaller one does not fit 64-bit integers. Such "
                "labels carry nothing; raise epsilon, or leave the labels out."
            )
        low, high = _validate.number_range(self.low, self.high)
        clip = _validate.boolean("clip", self.clip)
        if self.whole:
            low, high = _whole_range(name, low, high)
        elif not _NARROWEST <= high - low <= _WIDEST:
            raise ValueError(
                f"high - low must be between {_NARROWEST:g} and {_WIDEST:g} for {name}, got "
                f"{high - low:g}. Give the labels another unit."
            )
        object.__setattr__(self, "low", low)
        object.__setattr__(self, "high", high)
        object.__setattr__(self, "clip", clip)

    @property
    def steps(self) -> int:
        """Number N of grid steps from low to high."""
        return int(self.high - self.low) if self.whole else _integer_noise.MAX_STEPS

    @property
    def _reach(self) -> float:
        """The larger of |low| and |high|, in grid steps."""
        return max(abs(self.low), abs(self.high)) / self.step

    @property
    def step(self) -> float:
        """Width of a grid step, in the unit of the labels: 1 for whole numbers."""
        return float(self.high - self.low) / self.steps

    def label_range(self) -> tuple[float, float]:
        """Returns (low, high) as floats."""
        return float(self.low), float(self.high)

    def randomize(
        self, labels: Any, priors: Any = None, *, rng: np.random.Generator | None = None
    ) -> np.ndarray:
        """Returns one noisy label for each label.

        Args:
            labels: numbers of shape (n,) in [low, high]; a discrete mechanism rounds them.
            priors: must be None; these mechanisms have no use for a prior.
            rng: a generator for repeatable (not private) runs; None takes secure random bits.

        Returns:
            ``float64`` array of shape (n,), in [low, high] if ``clip``.

        Raises:
            TypeError: the labels are not numbers.
            ValueError: labels out of range, NaN or of a wrong shape, or priors given.
        """
        self._refuse_public(priors)
        drawn = self._draw(self._grid(labels), rng)
        # The float sum may miss the upper end by a rounding error, on either side.
        noisy = np.where(drawn == self.steps, self.high, self.low + self.step * drawn)
        return np.clip(noisy, self.low, self.high) if self.clip else noisy

    def cdf(self, outputs: Any, labels: Any) -> np.ndarray:
        """Returns the probability of an output of at most this, given each label.

        Args:
            outputs: finite numbers, (m,). A continuous one goes to the nearest grid point.
            labels: true labels in [low, high], (k,).

        Returns:
            ``float64`` (m, k): the law of what ``randomize`` returns, clipped if ``clip``.
        """
        position = self._positions(outputs)
        index = np.floor(position) if self.whole else np.rint(position)
        grid = self._grid(labels).astype(np.float64)
        total = self._cumulative(index[:, np.newaxis], grid[np.newaxis, :])
        if not self.clip:
            return total
        below, end = index < 0, index >= self.steps
        return np.where(below[:, np.newaxis], 0.0, np.where(end[:, np.newaxis], 1.0, total))

    def likelihood(self, outputs: Any, labels: Any) -> np.ndarray:
        """Returns the likelihood of each output under each label.

        Args:
            outputs: finite numbers, (m,). A continuous one goes to the nearest grid point.
            labels: true labels in [low, high], (k,).

        Returns:
            ``float64`` (m, k). Discrete mechanisms: probabilities. Continuous ones: densities,
            except that after clipping noise the outputs low and high have probabilities. Zero for
            an output that cannot be drawn.
        """
        position = self._positions(outputs)
        if self.clip and not self.whole:  # the ends, as they are after a cast to float32
            for end in (0, self.steps):
                position[np.abs(position - end) <= _FLOAT32 * self._reach] = end
        index = np.rint(position)
        grid = self._grid(labels).astype(np.float64)
        values = self._likelihood(index[:, np.newaxis], grid[np.newaxis, :])
        possible = (position == index) if self.whole else np.ones(index.shape, dtype=bool)
        if self.clip:
            possible &= (index >= 0) & (index <= self.steps)
        return np.where(possible[:, np.newaxis], values, 0.0)

    def transition_matrix(self, prior: Any = None) -> np.ndarray:
        """Returns ``P[output | input]``, ``float64`` (N + 1, N + 1), over low..high in both.

        Args:
            prior: must be None.

        Raises:
            ValueError: a prior, or outputs that no matrix holds: continuous, not clipped, or more
                than 2^27 cells. ``likelihood`` and ``cdf`` serve those.
        """
        name, use = type(self).__name__, "Use likelihood(outputs, labels) or cdf(outputs, labels)."
        if prior is not None:
            raise ValueError(f"{name} has one channel for every prior; pass none.")
        if not self.whole:
            raise ValueError(f"the outputs of {name} are continuous: there is no matrix. {use}")
        if not self.clip:
            raise ValueError(
                f"the outputs of {name} with clip=False have no bound: there is no matrix. {use}"
            )
        size = self.steps + 1
        if size**2 > _MAX_CELLS:
            raise ValueError(
                f"the matrix of {name} would have {size} x {size} cells, more than 2^27. {use}"
            )
        values = self.low + np.arange(size)
        return np.ascontiguousarray(self.likelihood(values, values).T)

    @abc.abstractmethod
    def _draw(self, grid: np.ndarray, rng: np.random.Generator | None) -> np.ndarray:
        """Returns noisy grid points for true ones, both ``int64`` (n,); in 0..N if ``clip``."""

    @abc.abstractmethod
    def _cumulative(self, index: np.ndarray, grid: np.ndarray) -> np.ndarray:
        """Returns P[output <= index | grid] before clipping; any value for index outside 0..N."""

    @abc.abstractmethod
    def _likelihood(self, index: np.ndarray, grid: np.ndarray) -> np.ndarray:
        """Returns the likelihood of grid point ``index``; if ``clip``, any value outside 0..N."""

    def _grid(self, labels: Any) -> np.ndarray:
        """Returns the grid point of each label, ``int64`` (n,) in 0..N."""
        labels = _validate.numbers_in_range("labels", labels, float(self.low), float(self.high))
        # A label between two points is rounded, not refused: a refusal would tell something of it.
        nearest = np.rint((labels - self.low) / self.step)
        return np.clip(nearest, 0, self.steps).astype(np.int64)

    def _positions(self, outputs: Any) -> np.ndarray:
        """Returns outputs in steps from low, ``float64`` (m,)."""
        outputs = _validate.real_vector("outputs", outputs)
        infinite = int(np.count_nonzero(np.isinf(outputs)))
        if infinite:
            raise ValueError(
                f"outputs must be finite, but {infinite} of {outputs.size} are not. Pass what "
                "randomize returned."
            )
        # No draw is as far out as 2^62 steps, and within that all later arithmetic is finite.
        with np.errstate(over="ignore"):
            position = (outputs - self.low) / self.step
        return np.clip(position, -(2.0**62), 2.0**62)


class AdditiveMechanism(BoundedMechanism):
    """Adds integer noise on the grid, then clips the sum if ``clip``.

    Privacy: that of ``BoundedMechanism``.
    """

    @property
    @abc.abstractmethod
    def _noise(self) -> _integer_noise.IntegerNoise:
        """The noise, in grid steps."""

    def _draw(self, grid: np.ndarray, rng: np.random.Generator | None) -> np.ndarray:
        drawn = grid + self._noise.draw(grid.size, rng)
        return np.clip(drawn, 0, self.steps) if self.clip else drawn

    def _cumulative(self, index: np.ndarray, grid: np.ndarray) -> np.ndarray:
        shift, noise = index - grid, self._noise
        tail = noise.tail(np.where(shift < 0, -shift, shift + 1.0))
        return np.where(shift < 0, tail, 1.0 - tail)

    def _likelihood(self, index: np.ndarray, grid: np.ndarray) -> np.ndarray:
        noise = self._noise
        density = noise.mass(index - grid) / self.step
        if not self.clip:
            return density
        bottom, top = noise.tail(grid), noise.tail(self.steps - grid)
        return np.where(index == 0, bottom, np.where(index == self.steps, top, density))


def _whole_range(name: str, low: float, high: float) -> tuple[int, int]:
    """Returns the ends as integers, or raises."""
    for end, value in (("low", low), ("high", high)):
        if value != int(value) or abs(value) > _MAX_WHOLE:
            raise ValueError(
                f"{end} must be a whole number of at most 2^53 for {name}, got {value:g}. Use the "
                "continuous mechanism for other ranges."
            )
    if high - low > _integer_noise.MAX_STEPS:
        raise ValueError(
            f"high - low must be at most 2^32 for {name}, got {high - low:g}. Use the continuous "
            "mechanism, which has that many steps over any range."
        )
    return int(low), int(high)
