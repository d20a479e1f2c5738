"""The exponential mechanism on numeric labels."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from tf_labeldp.mechanisms import _integer_noise, _random
from tf_labeldp.mechanisms._bounded_mechanism import BoundedMechanism

_UNIFORM_UP_TO = 2.0
"""Up to this epsilon proposals are uniform, and accepted with a chance of at least 0.63. Above it
they are Laplace, and accepted with a chance of at least 0.31, also for a label at an end."""


@dataclasses.dataclass(frozen=True)
class ExponentialMechanism(BoundedMechanism):
    """Answers with density proportional to ``exp(-epsilon |out - label| / (2 (high - low)))``.

    It is Laplace noise of twice the scale, kept inside [low, high] by rejection, not by clipping.

    Privacy: (epsilon, 0)-DP for the replacement of one label in [low, high]. On this range the
    general bound is loose by a factor of two: the worst log-ratio equals epsilon / 2, since the
    normalizers of the two ends are equal, and the smallest of all. It holds for the draws as made:
    outputs lie on a public grid of 2^32 steps and are drawn exactly, from random integers.

    Source: ``ghazi2023``, Definition 26, with score ``-|out - label|``, and appendix F.

    Attributes:
        epsilon: at least 1e-6 and finite.
        low: smallest label, public.
        high: largest label, public.
        clip: must be True: no output lies outside [low, high].

    Example:
        >>> import numpy as np
        >>> mechanism = ExponentialMechanism(epsilon=1.0, low=0.0, high=400.0)
        >>> mechanism.randomize(np.array([12.5, 399.0])).shape
        (2,)
        >>> mechanism.cdf([200.0], [0.0, 200.0, 400.0]).round(3).tolist()
        [[0.562, 0.5, 0.438]]
    """

    def __post_init__(self) -> None:
        """Checks the ranges."""
        super().__post_init__()
        if not self.clip:
            raise ValueError(
                "clip must be True for ExponentialMechanism: it answers inside [low, high] by "
                "construction. Leave clip out, or use LaplaceMechanism(..., clip=False)."
            )

    def _draw(self, grid: np.ndarray, rng: np.random.Generator | None) -> np.ndarray:
        propose = self._uniform if self.epsilon <= _UNIFORM_UP_TO else self._laplace
        drawn = np.empty_like(grid)
        waiting = np.arange(grid.size)
        while waiting.size:
            drawn[waiting], accepted = propose(grid[waiting], rng)
            waiting = waiting[~accepted]
        return drawn

    def _uniform(
        self, grid: np.ndarray, rng: np.random.Generator | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns uniform proposals, and which are accepted."""
        drawn = _random.uniform_below(np.full(grid.size, self.steps + 1), rng)
        # Exponents are at most epsilon / 2 <= 1, as bernoulli_exp needs it.
        decay = _integer_noise.decay_per_step(0.5 * self.epsilon, self.steps)
        distance = np.abs(drawn - grid) * decay.numerator
        return drawn, _integer_noise.bernoulli_exp(distance, decay.denominator, rng)

    def _laplace(
        self, grid: np.ndarray, rng: np.random.Generator | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns proposals with discrete Laplace noise, and which are accepted."""
        noise = _integer_noise.LaplaceNoise(0.5 * self.epsilon, self.steps)
        drawn = grid + noise.draw(grid.size, rng)
        return drawn, (drawn >= 0) & (drawn <= self.steps)

    @property
    def _decay(self) -> float:
        return self.epsilon / (2.0 * self.steps)

    def _powers(self, start: np.ndarray | float, count: np.ndarray) -> np.ndarray:
        """Returns (1 - q) (q^start + q^(start + 1) + ... of count terms), q = e^-decay."""
        return -np.exp(-self._decay * start) * np.expm1(-self._decay * count)

    def _normalizer(self, grid: np.ndarray) -> np.ndarray:
        """Returns (1 - q) times the sum of q^|index - grid| over index = 0..N."""
        return self._powers(0.0, grid + 1.0) + self._powers(1.0, self.steps - grid)

    def _cumulative(self, index: np.ndarray, grid: np.ndarray) -> np.ndarray:
        index = np.clip(index, 0.0, self.steps)
        left = np.minimum(index, grid)
        below = self._powers(grid - left, left + 1.0)
        above = self._powers(1.0, np.maximum(index - grid, 0.0))
        return (below + above) / self._normalizer(grid)

    def _likelihood(self, index: np.ndarray, grid: np.ndarray) -> np.ndarray:
        mass = -math.expm1(-self._decay) * np.exp(-self._decay * np.abs(index - grid))
        return mass / self._normalizer(grid) / self.step
