"""ALIBI: additive noise on one-hot labels, Laplace or Gaussian, drawn exactly on a public grid.

One unit of a one-hot entry is ``m`` grid steps, the label is the integer ``m`` in its own place and
0 elsewhere, and all noise is added to integers. The division by m and the rounding to ``float32``
come after the noise: they are post-processing and cost no privacy.

*Laplace.* A replaced label moves two entries by m steps each. ``LaplaceNoise`` with 2 m steps
changes a probability by at most ``e^(epsilon / 2)`` for a shift by m, so both together by at most
``e^epsilon``.

*Gaussian.* The entries of all other labels, and of the K - 2 other classes, have the same law for
two neighbours and are independent of the two that differ, so they change no privacy loss. The
L2 distance is ``sqrt(2) m``, and the margin of ``_grid_noise`` for discrete noise is needed for
these 2 entries, not for n K. The noise is the discrete Gaussian, by Algorithm 3 of Canonne, Kamath
and Steinke 2020, "The discrete Gaussian for differential privacy", many draws at a time (OpenDP's
sampler has the same law and is some twenty times slower).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.mechanisms import _grid_noise, _integer_noise, _random
from tf_labeldp.mechanisms._base import LabelMechanism, check_epsilon, checked_output

if TYPE_CHECKING:
    from tf_labeldp.accounting._events import DpEvent

_NOISES = ("laplace", "gaussian")
_LEAST_EPSILON = {"laplace": _integer_noise.MIN_EPSILON, "gaussian": 1e-3}
_LARGEST_EPSILON = 1e6
_LAPLACE_UNIT = _integer_noise.MAX_STEPS // 2
_FINEST_UNIT = 1 << 40
"""At this many grid steps in a unit, sigma of every epsilon here is above the next number."""
_MAX_SIGMA = 1 << 26
"""Of Gaussian noise, in grid steps: the square has to fit the 53 bits of ``uniform_below``."""
_FARTHEST = math.isqrt((1 << 63) - 1)
"""The square of no more fits 64 bits; at least 45 sigma, where e^-1000 of the draws are."""
_CHUNK_CELLS = 1 << 20
"""Entries that are drawn at a time."""


@dataclasses.dataclass(frozen=True)
class ALIBI(LabelMechanism):
    """Adds independent noise to every entry of every one-hot label.

    The noisy rows are neither probabilities nor one-hot. Train on them with
    ``keras_layers.ALIBILoss``, or on the soft targets of ``NoisyLabels.posterior``.
    Their largest entry alone is a poor label: at K = 10 and epsilon 1 it is the true class with
    probability 0.164, and that of ``RandomizedResponse`` with probability 0.232.

    Privacy: each noisy row is (epsilon, delta)-DP for the replacement of its label; delta is zero
    for Laplace noise. No row depends on another label, so releases on disjoint examples compose in
    parallel. A replaced label moves two entries by one each: L1 sensitivity 2, L2 sensitivity
    sqrt(2). It holds for the draws as made: the noise is drawn exactly, on integers, and what
    follows is post-processing. Draw once and keep the rows (``PrivateLabels.randomize`` does): a
    fresh draw every epoch would be charged every epoch.

    Source: Malek et al. 2021, "Antipodes of label differential privacy: PATE and ALIBI"; analytic
    calibration of the Gaussian noise: Balle and Wang 2018, Theorem 8. The ``--sigma`` of the
    published program is ``noise_stddev`` here, of either noise (``2 sqrt(2) / epsilon`` of
    Laplace noise); its accounting of Gaussian noise by Renyi divergences asks for more of it.

    Attributes:
        epsilon: from 1e-6 for Laplace noise, from 1e-3 for Gaussian noise, up to 1e6.
        num_classes: K, at least 2.
        delta: 0 for Laplace noise, in (0, 1) for Gaussian noise.
        noise: ``"laplace"`` or ``"gaussian"``.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: an argument out of range, or a delta that does not fit the noise.

    Example:
        >>> import numpy as np
        >>> mechanism = ALIBI(epsilon=4.0, num_classes=3)
        >>> mechanism.scale
        0.5
        >>> noisy = mechanism.randomize(np.array([0, 2, 1, 1]), rng=np.random.default_rng(0))
        >>> noisy.shape, noisy.dtype
        ((4, 3), dtype('float32'))
    """

    epsilon: float
    num_classes: int
    delta: float = 0.0
    noise: str = "laplace"

    def __post_init__(self) -> None:
        """Checks the ranges."""
        check_epsilon(self)
        classes = _validate.integer_at_least("num_classes", self.num_classes, 2)
        object.__setattr__(self, "num_classes", classes)
        pure = "noise='laplace' with delta=0 is pure."
        delta = _grid_noise.checked_delta(self.delta, self.noise, _NOISES, pure)
        object.__setattr__(self, "delta", delta)
        least = _LEAST_EPSILON[self.noise]
        if not least <= self.epsilon <= _LARGEST_EPSILON:
            raise ValueError(
                f"epsilon must be from {least:g} to {_LARGEST_EPSILON:g} for {self.noise} noise on "
                f"one-hot labels, got {self.epsilon:g}. Below, nothing of a label is left; above, "
                "nothing is hidden."
            )

    @property
    def scale(self) -> float:
        """Scale of the noise on each entry: b = 2 / epsilon (Laplace), or sigma (Gaussian)."""
        if self.noise == "laplace":
            return 2.0 / self.epsilon
        unit, sigma = _gaussian_grid(self.epsilon, self.delta)
        return sigma / unit

    @property
    def noise_stddev(self) -> float:
        """Standard deviation of the noise on each entry: sqrt(2) b (Laplace), or sigma."""
        return self.scale * (math.sqrt(2.0) if self.noise == "laplace" else 1.0)

    def dp_event(self) -> DpEvent:
        """Returns the event of one release: Gaussian, or one that dominates any pure mechanism."""
        return _grid_noise.noise_event(self.noise, self.epsilon, self.delta)

    def randomize(
        self, labels: Any, public: Any = None, *, rng: np.random.Generator | None = None
    ) -> np.ndarray:
        """Returns the noisy one-hot rows of the labels.

        Args:
            labels: integers (n,) in 0..K-1.
            public: must be None; priors enter afterwards, in ``NoisyLabels.posterior``.
            rng: a generator for repeatable (not private) runs; None takes secure random bits.

        Returns:
            ``float32`` (n, K), of either sign: 4 n K bytes, half of what doubles would need in
            memory and in the store; some 24 bits of each are more than the noise leaves.

        Raises:
            TypeError: labels or ``rng`` of a wrong kind.
            ValueError: labels out of range or of a wrong shape, or a public input.
        """
        self._refuse_public(public)
        if rng is not None:
            _random.checked_generator(rng)
        classes = _validate.class_indices("labels", labels, self.num_classes)
        noisy = np.empty((classes.size, self.num_classes), dtype=np.float32)
        step = max(1, _CHUNK_CELLS // self.num_classes)
        for start in range(0, classes.size, step):
            chunk = classes[start : start + step]
            noisy[start : start + step] = self._noisy_rows(chunk, rng)
        return noisy

    def check_output(self, noisy: Any, size: int) -> np.ndarray:
        """Returns noisy rows as ``float32`` (size, K), or raises."""
        return checked_output(self, noisy, (size, self.num_classes), "f").astype(np.float32)

    def _noisy_rows(self, classes: np.ndarray, rng: np.random.Generator | None) -> np.ndarray:
        """Returns ``float64`` (m, K): exact integers, divided once at the end."""
        size = classes.size * self.num_classes
        if self.noise == "laplace":
            unit = _LAPLACE_UNIT
            drawn = _integer_noise.LaplaceNoise(self.epsilon, 2 * unit).draw(size, rng)
        else:
            unit, sigma = _gaussian_grid(self.epsilon, self.delta)
            drawn = discrete_gaussian(size, sigma, rng)
        rows = drawn.reshape(classes.size, self.num_classes)
        rows[np.arange(classes.size), classes] += unit
        return rows / unit


@functools.lru_cache(maxsize=64)
def _gaussian_grid(epsilon: float, delta: float) -> tuple[int, int]:
    """Returns the grid steps in one unit, a power of two, and sigma in whole grid steps.

    Sigma is rounded up, by less than one part in 2^25, so noise is never too small.
    """
    # The double sqrt(2) is above the root, and its product with a power of two is exact.
    distance = math.sqrt(2.0)
    fine = _grid_noise.gaussian_scale(epsilon, delta, distance * _FINEST_UNIT, 2)
    halvings = math.ceil(math.log2(1.001 * fine / _MAX_SIGMA))
    unit = _FINEST_UNIT >> halvings
    return unit, math.ceil(_grid_noise.gaussian_scale(epsilon, delta, distance * unit, 2))


def discrete_gaussian(size: int, sigma: int, rng: np.random.Generator | None) -> np.ndarray:
    """Returns ``size`` draws of ``P[x] ~ exp(-x^2 / (2 sigma^2))`` on the integers; ``int64``.

    Algorithm 3 of Canonne, Kamath and Steinke, with t = sigma: a discrete Laplace draw y of scale
    sigma is kept with probability ``exp(-(|y| - sigma)^2 / (2 sigma^2))``; of four draws three are.
    Every probability is compared in integers. Exact, but for draws beyond 45 sigma.

    Args:
        size: number of draws.
        sigma: a whole number in 1..2^26.
        rng: a generator for repeatable (not private) runs; None takes secure random bits.
    """
    noise = np.empty(size, dtype=np.int64)
    waiting = np.arange(size)
    square = 2 * sigma * sigma
    while waiting.size:
        drawn = _integer_noise.geometric(waiting.size, Fraction(1, sigma), rng)
        negative = _random.uniform_below(np.full(waiting.size, 2), rng) == 1
        noise[waiting] = np.where(negative, -drawn, drawn)
        whole, rest = np.divmod(np.minimum(np.abs(drawn - sigma), _FARTHEST) ** 2, square)
        kept = _integer_noise.bernoulli_exp(rest, square, rng) & _all_of_exp_one(whole, rng)
        waiting = waiting[~kept | (negative & (drawn == 0))]  # -0 is no second way to draw 0
    return noise


def _all_of_exp_one(counts: np.ndarray, rng: np.random.Generator | None) -> np.ndarray:
    """Returns events of probability e^-count, exactly, for each count (m,); ``bool`` (m,)."""
    event = np.ones(counts.size, dtype=bool)
    left = counts.copy()
    going = np.flatnonzero(left > 0)
    while going.size:
        heads = _integer_noise.bernoulli_exp(np.ones(going.size, dtype=np.int64), 1, rng)
        event[going[~heads]] = False
        going = going[heads]
        left[going] -= 1
        going = going[left[going] > 0]
    return event
