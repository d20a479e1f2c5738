"""Mechanisms for numbers in a public range: Laplace, staircase and exponential.

Each label is rounded to a public integer grid of N steps over [low, high], and integer noise is
added there (``integer_noise``); the conversion to floats is post-processing. Whole numbers form
their own grid; a continuous range has 2^32 steps.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any, ClassVar

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Public
from tf_labeldp.mechanisms import integer_noise, random_bits
from tf_labeldp.mechanisms.base import Frozen, RegressionMechanism, WithoutPriors
from tf_labeldp.mechanisms.integer_noise import LaplaceNoise, ShiftNoise, StaircaseNoise
from tf_labeldp.mechanisms.random_bits import Rng

_MAX_WHOLE = 1 << 53
"""The largest label that is a whole number; doubles represent these exactly."""
_FLOAT32 = 2.0**-23
"""Relative rounding of outputs that were cast to ``float32``."""
_NARROWEST, _WIDEST = 1e-290, 1e290
"""Ranges in which grid steps do not underflow and noise does not overflow."""
_WIDTHS_TRIED = 1000
"""Stair widths tried on each side of the continuous optimum."""
_UNIFORM_UP_TO = 2.0
"""The largest epsilon at which the exponential mechanism proposes uniform outputs: it accepts at
least 0.63 of them, and at least 0.31 of the Laplace proposals above."""


@dataclasses.dataclass(frozen=True)
class BoundedMechanism(WithoutPriors, Frozen, RegressionMechanism):
    """A randomizer of numbers in [low, high], whose sensitivity is high - low."""

    low: float
    high: float
    clip: bool = True

    whole: ClassVar[bool] = False
    """Whether labels must be whole numbers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if self.epsilon < integer_noise.MIN_EPSILON:
            raise ValueError(
                f"epsilon must be at least {integer_noise.MIN_EPSILON:g} for {name}, got "
                f"{self.epsilon:g}. Raise epsilon: below this the labels are all noise."
            )
        widths = (0.0, math.inf) if self.whole else (_NARROWEST, _WIDEST)
        low, high = _validate.number_range(self.low, self.high, widths, name)
        if self.whole:
            for end, value in (("low", low), ("high", high)):
                if value != int(value) or abs(value) > _MAX_WHOLE:
                    raise ValueError(
                        f"{end} must be a whole number of at most 2^53 for {name}, got {value:g}."
                    )
            if high - low > integer_noise.MAX_STEPS:
                raise ValueError(f"high - low must be at most 2^32 for {name}, got {high - low:g}.")
            low, high = int(low), int(high)
        self._set(low=low, high=high, clip=_validate.boolean("clip", self.clip))

    @property
    def steps(self) -> int:
        """The number N of grid steps from low to high, which is the sensitivity."""
        return int(self.high - self.low) if self.whole else integer_noise.MAX_STEPS

    @property
    def step(self) -> float:
        """The width of a grid step in the unit of the labels; 1 for whole numbers."""
        return float(self.high - self.low) / self.steps

    def label_range(self) -> tuple[float, float]:
        """Returns (low, high) as floats."""
        return float(self.low), float(self.high)

    def likelihood(self, outputs: Public[Any], labels: Public[Any]) -> np.ndarray:
        """Returns the likelihood of each output (m,) under each label (k,): ``float64`` (m, k)."""
        position, grid = self._positions(outputs), self._grid(labels).astype(np.float64)
        if self.clip and not self.whole:
            # A cast to float32 may have moved outputs at the ends.
            reach = max(abs(self.low), abs(self.high)) / self.step
            for end in (0, self.steps):
                position[np.abs(position - end) <= _FLOAT32 * reach] = end
        index = np.rint(position)
        possible = (position == index) | (not self.whole)
        if self.clip:
            possible &= (index >= 0) & (index <= self.steps)
        values = self._likelihood(index[:, np.newaxis], grid)
        return np.where(possible[:, np.newaxis], values, 0.0)

    @abc.abstractmethod
    def _noisy_grid(self, grid: np.ndarray, rng: Rng) -> np.ndarray:
        """Returns noisy grid points ``int64`` (n,) for true ones (n,); in 0..N if ``clip``."""

    @abc.abstractmethod
    def _likelihood(self, index: np.ndarray, grid: np.ndarray) -> np.ndarray:
        """Returns the likelihood of grid point ``index``; if ``clip``, arbitrary outside 0..N."""

    def _noisy(self, labels: Any, rng: Rng) -> np.ndarray:
        drawn = self._noisy_grid(self._grid(labels), rng)
        # The float sum may miss the upper end by a rounding error.
        noisy = np.where(drawn == self.steps, self.high, self.low + self.step * drawn)
        return np.clip(noisy, self.low, self.high) if self.clip else noisy

    def _grid(self, labels: Any) -> np.ndarray:
        labels = _validate.numbers_in_range("labels", labels, float(self.low), float(self.high))
        # Labels between two points are rounded, since an error would reveal them.
        nearest = np.rint((labels - self.low) / self.step)
        return np.clip(nearest, 0, self.steps).astype(np.int64)

    def _positions(self, outputs: Any) -> np.ndarray:
        # No draw reaches 2^62 steps, within which all later arithmetic is finite.
        with np.errstate(over="ignore"):
            position = (_validate.real_vector("outputs", outputs) - self.low) / self.step
        return np.clip(position, -(2.0**62), 2.0**62)


class AdditiveMechanism(BoundedMechanism):
    """Adds integer noise on the grid, then clips the sum if ``clip``."""

    def check_unbiased(self) -> None:
        """Raises if noisy labels are clipped; the noise itself has mean zero."""
        if self.clip:
            raise ValueError(
                f"{self!r} clips its noisy labels, a bias that cannot be undone. Draw with "
                "clip=False."
            )

    @property
    @abc.abstractmethod
    def _noise_law(self) -> ShiftNoise: ...

    def _noisy_grid(self, grid: np.ndarray, rng: Rng) -> np.ndarray:
        drawn = grid + self._noise_law.draw(grid.size, rng)
        return np.clip(drawn, 0, self.steps) if self.clip else drawn

    def _likelihood(self, index: np.ndarray, grid: np.ndarray) -> np.ndarray:
        noise = self._noise_law
        density = noise.mass(index - grid) / self.step
        if not self.clip:
            return density
        bottom, top = noise.tail(grid), noise.tail(self.steps - grid)
        return np.where(index == 0, bottom, np.where(index == self.steps, top, density))


@dataclasses.dataclass(frozen=True)
class LaplaceMechanism(AdditiveMechanism):
    """Adds Laplace noise of scale ``(high - low) / epsilon`` to labels in a range.

    Guarantee:
        (epsilon, 0)-DP for the replacement of one label in [low, high]; the worst log-ratio equals
        epsilon. The draws are exact: discrete Laplace noise on a public grid of 2^32 steps, made of
        random integers.

    Source: ``ghazi2023``, Definition 23, and appendix F for the clipping.

    Attributes:
        epsilon: at least 1e-6 and finite.
        low: the smallest label, public.
        high: the largest label, public.
        clip: whether outputs are clipped to [low, high].

    Example:
        >>> mechanism = LaplaceMechanism(epsilon=1.0, low=0.0, high=400.0)
        >>> mechanism.randomize([12.5, 399.0]).shape
        (2,)
        >>> mechanism.likelihood([0.0, 400.0], labels=[0.0]).round(3).tolist()
        [[0.5], [0.184]]
    """

    @property
    def _noise_law(self) -> LaplaceNoise:
        return LaplaceNoise(self.epsilon, self.steps)


@dataclasses.dataclass(frozen=True)
class DiscreteLaplaceMechanism(AdditiveMechanism):
    """Adds discrete Laplace noise, ``P[x] ~ e^(-epsilon |x| / (high - low))``, to whole numbers.

    Guarantee:
        (epsilon, 0)-DP for the replacement of one label in low..high; the worst log-ratio equals
        epsilon. The draws are exact, made of random integers.

    Source: ``ghazi2023``, Definition 22, and appendix F for the clipping; drawn by Algorithm 2 of
    Canonne, Kamath and Steinke 2020, "The discrete Gaussian for differential privacy".

    Attributes:
        low, high: whole numbers at most 2^32 apart. Other arguments as for ``LaplaceMechanism``.

    Example:
        >>> mechanism = DiscreteLaplaceMechanism(epsilon=1.0, low=0, high=2)
        >>> mechanism.likelihood([0, 1, 2], labels=[0, 1, 2]).round(3).tolist()
        [[0.622, 0.378, 0.229], [0.149, 0.245, 0.149], [0.229, 0.378, 0.622]]
    """

    whole: ClassVar[bool] = True
    _noise_law = LaplaceMechanism._noise_law


@dataclasses.dataclass(frozen=True)
class StaircaseMechanism(AdditiveMechanism):
    """Adds staircase noise, which has the smallest variance of all additive epsilon-DP noise.

    The density falls by a factor e^-epsilon at ``(k + gamma) (high - low)`` for k = 0, 1, ..., on
    both sides of the label. ``gamma`` minimises E[noise^2] before clipping. The arguments are those
    of ``LaplaceMechanism``.

    Guarantee:
        (epsilon, 0)-DP for the replacement of one label in [low, high]; the worst log-ratio equals
        epsilon. The draws satisfy it: a discrete staircase on a public grid of 2^32 steps, made of
        random integers, with all rounding towards more privacy.

    Source: ``ghazi2023``, Definition 25, and appendix F for the clipping; gamma from Geng and
    Viswanath 2014, "The optimal mechanism in differential privacy".

    Example:
        >>> mechanism = StaircaseMechanism(epsilon=1.0, low=0.0, high=400.0)
        >>> mechanism.randomize([12.5, 399.0]).shape, round(mechanism.gamma, 4)
        ((2,), 0.4167)
    """

    @property
    def gamma(self) -> float:
        """The share of a stair's upper part, in (0, 1/2], a multiple of 2^-32."""
        return self._noise_law.first / self.steps

    @property
    def _noise_law(self) -> StaircaseNoise:
        first = max(1, round(optimal_gamma(self.epsilon) * self.steps))
        return StaircaseNoise(self.epsilon, self.steps, first)


@dataclasses.dataclass(frozen=True)
class DiscreteStaircaseMechanism(AdditiveMechanism):
    """Adds discrete staircase noise to whole numbers.

    With D = high - low, the probability of the noise i falls by a factor e^-epsilon at
    ``|i| = k D + r`` for k = 0, 1, .... The integer ``r`` in 1..D minimises E[noise^2] before
    clipping. For D = 1 it is 1, and the noise is discrete Laplace. The arguments are those of
    ``DiscreteLaplaceMechanism``.

    Guarantee:
        (epsilon, 0)-DP for the replacement of one label in low..high; the worst log-ratio equals
        epsilon. The draws satisfy it: they are made of random integers, with all rounding towards
        more privacy.

    Source: ``ghazi2023``, Definition 24, and appendix F for the clipping.

    Example:
        >>> mechanism = DiscreteStaircaseMechanism(epsilon=1.0, low=0, high=10)
        >>> mechanism.r, mechanism.randomize([0, 7, 10]).shape
        (5, (3,))
    """

    whole: ClassVar[bool] = True

    @property
    def r(self) -> int:
        """The width of a stair's upper part, in 1..(high - low)."""
        return optimal_first(self.epsilon, self.steps)

    @property
    def _noise_law(self) -> StaircaseNoise:
        return StaircaseNoise(self.epsilon, self.steps, self.r)


def staircase_variance(epsilon: float, steps: int, first: np.ndarray) -> np.ndarray:
    """Returns E[noise^2] of staircase noise for each width r of the upper part, (m,)."""
    # With b = e^-epsilon and W_j the sum of u^j w(u) over one stair, the variance is
    # 2 (W_2 + 2 N W_1 b/(1-b) + N^2 W_0 b(1+b)/(1-b)^2) / (2 W_0 - (1-b)).
    shrink, loss = math.exp(-epsilon), -math.expm1(-epsilon)
    r, n = np.asarray(first, dtype=np.float64), float(steps)
    w_0 = loss * r + shrink * n
    w_1 = (loss * r * (r - 1.0) + shrink * n * (n - 1.0)) / 2.0
    cubes = loss * r * (r - 1.0) * (2.0 * r - 1.0) + shrink * n * (n - 1.0) * (2.0 * n - 1.0)
    w_2 = cubes / 6.0
    odds = shrink / loss
    later = 2.0 * n * w_1 * odds + n**2 * w_0 * odds * (1.0 + shrink) / loss
    return 2.0 * (w_2 + later) / (2.0 * w_0 - loss)


def optimal_gamma(epsilon: float) -> float:
    """Returns r/N of the continuous staircase with the smallest E[noise^2], in [0, 1/2].

    It solves ``(gamma + b (1 - gamma))^3 = b (1 + b) / 2``, b = e^-epsilon, where the derivative is
    zero: gamma* of Geng and Viswanath 2014 for squared error.
    """
    shrink, loss = math.exp(-epsilon), -math.expm1(-epsilon)
    return ((0.5 * shrink * (1.0 + shrink)) ** (1.0 / 3.0) - shrink) / loss


def optimal_first(epsilon: float, steps: int) -> int:
    """Returns the width r in 1..N with the smallest E[noise^2]; ties go to the smaller width.

    As a function of r, E[noise^2] is a convex function over a positive affine one, so it falls and
    then rises: a minimum inside a window around the continuous optimum is global.
    """
    center = round(optimal_gamma(epsilon) * steps)
    first = np.arange(max(1, center - _WIDTHS_TRIED), min(steps, center + _WIDTHS_TRIED) + 1)
    return int(first[np.argmin(staircase_variance(epsilon, steps, first))])


@dataclasses.dataclass(frozen=True)
class ExponentialMechanism(BoundedMechanism):
    """Draws with density proportional to ``exp(-epsilon |out - label| / (2 (high - low)))``.

    This is Laplace noise of twice the scale, kept inside [low, high] by rejection, not by clipping.
    The arguments are those of ``LaplaceMechanism``; ``clip`` must be True.

    Guarantee:
        (epsilon, 0)-DP for the replacement of one label in [low, high]. The worst log-ratio equals
        epsilon / 2, since the two ends have the same normalizer, the smallest of all. The draws are
        exact: outputs lie on a public grid of 2^32 steps, made of random integers.

    Source: ``ghazi2023``, Definition 26, with score ``-|out - label|``, and appendix F.

    Example:
        >>> mechanism = ExponentialMechanism(epsilon=1.0, low=0.0, high=400.0)
        >>> near, far = mechanism.likelihood([0.0, 400.0], labels=[0.0])
        >>> (near / far).round(3).tolist()
        [1.649]
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.clip:
            raise ValueError(
                "clip must be True for ExponentialMechanism, whose outputs never leave [low, "
                "high]. LaplaceMechanism takes clip=False."
            )

    def _noisy_grid(self, grid: np.ndarray, rng: Rng) -> np.ndarray:
        propose = self._uniform if self.epsilon <= _UNIFORM_UP_TO else self._laplace
        drawn = np.empty_like(grid)
        waiting = np.arange(grid.size)
        while waiting.size:
            drawn[waiting], accepted = propose(grid[waiting], rng)
            waiting = waiting[~accepted]
        return drawn

    def _uniform(self, grid: np.ndarray, rng: Rng) -> tuple[np.ndarray, np.ndarray]:
        drawn = random_bits.uniform_below(np.full(grid.size, self.steps + 1), rng)
        # Exponents are at most epsilon / 2 <= 1, as bernoulli_exp requires.
        decay = integer_noise.decay_per_step(0.5 * self.epsilon, self.steps)
        distance = np.abs(drawn - grid) * decay.numerator
        return drawn, integer_noise.bernoulli_exp(distance, decay.denominator, rng)

    def _laplace(self, grid: np.ndarray, rng: Rng) -> tuple[np.ndarray, np.ndarray]:
        drawn = grid + LaplaceNoise(0.5 * self.epsilon, self.steps).draw(grid.size, rng)
        return drawn, (drawn >= 0) & (drawn <= self.steps)

    def _likelihood(self, index: np.ndarray, grid: np.ndarray) -> np.ndarray:
        return self._powers(np.abs(index - grid), 1.0) / self._normalizer(grid) / self.step

    def _normalizer(self, grid: np.ndarray) -> np.ndarray:
        """Returns (1 - q) times the sum of q^|index - grid| over index = 0..N."""
        return self._powers(0.0, grid + 1.0) + self._powers(1.0, self.steps - grid)

    def _powers(self, start: np.ndarray | float, count: np.ndarray | float) -> np.ndarray:
        """Returns (1 - q) (q^start + q^(start + 1) + ... of count terms), q = e^-decay."""
        decay = self.epsilon / (2.0 * self.steps)
        return -np.exp(-decay * start) * np.expm1(-decay * count)
