"""ALIBI: additive noise on one-hot labels, Laplace or Gaussian, drawn exactly on a public grid."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Private, Public
from tf_labeldp.mechanisms import integer_noise, random_bits
from tf_labeldp.mechanisms.base import LabelMechanism
from tf_labeldp.mechanisms.classes import row_chunks
from tf_labeldp.mechanisms.integer_noise import DiscreteGaussian, LaplaceNoise
from tf_labeldp.mechanisms.random_bits import Rng

_LEAST_EPSILON = {"laplace": integer_noise.MIN_EPSILON, "gaussian": 1e-3}
"""Gaussian noise has a sigma of 2^25 to 2^26 grid steps here. From epsilon 1e-3 on the discrete law
is then as private as the continuous one: ``gaussian_scale`` asks for 1.7e7 steps."""
_LARGEST_EPSILON = 1e6
"""Up to here ``_FINEST_UNIT`` is fine enough."""
_LAPLACE_UNIT = integer_noise.MAX_STEPS // 2
"""Grid steps per unit: a label moves two entries by one unit each, together by ``MAX_STEPS``."""
_FINEST_UNIT = 1 << 40
"""Grid steps per unit, which put sigma above ``MAX_SIGMA`` at every epsilon allowed here."""


@dataclasses.dataclass(frozen=True)
class ALIBI(integer_noise.FrozenWithNoise, LabelMechanism):
    """Adds independent noise to every entry of every one-hot label.

    The noisy rows are neither probabilities nor one-hot. Train on them with
    ``keras_layers.ALIBILoss``, or on the soft targets of ``NoisyLabels.posterior``. The class of
    their largest entry is a less accurate label than the output of ``RandomizedResponse``.

    Guarantee:
        Each noisy row is (epsilon, delta)-DP for the replacement of its label; delta is zero for
        Laplace noise. No row depends on another label, so releases on disjoint examples compose in
        parallel. A replaced label moves two entries by one each: L1 sensitivity 2, L2 sensitivity
        sqrt(2). No rounding weakens it: the noise is drawn exactly, on integers.

    Source: Malek et al. 2021, "Antipodes of label differential privacy: PATE and ALIBI"; analytic
    calibration of the Gaussian noise: Balle and Wang 2018, Theorem 8. The published program's
    ``--sigma`` is ``noise_stddev`` here, for either noise.

    Attributes:
        epsilon: from 1e-6 for Laplace noise, from 1e-3 for Gaussian noise, up to 1e6.
        num_classes: K, at least 2.
        delta: 0 for Laplace noise, in (0, 1) for Gaussian noise.
        noise: ``"laplace"`` or ``"gaussian"``.

    Example:
        >>> mechanism = ALIBI(epsilon=4.0, num_classes=3)
        >>> noisy = mechanism.randomize([0, 2, 1, 1])
        >>> mechanism.scale, noisy.shape, noisy.dtype
        (0.5, (4, 3), dtype('float32'))
    """

    num_classes: int
    delta: float = 0.0
    noise: str = "laplace"

    _noises: ClassVar[tuple[str, ...]] = ("laplace", "gaussian")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(num_classes=_validate.integer_at_least("num_classes", self.num_classes, 2))
        least = _LEAST_EPSILON[self.noise]
        if not least <= self.epsilon <= _LARGEST_EPSILON:
            raise ValueError(
                f"epsilon must be in [{least:g}, {_LARGEST_EPSILON:g}] for {self.noise} noise on "
                f"one-hot labels, got {self.epsilon:g}."
            )

    @property
    def scale(self) -> float:
        """Scale of the noise on each entry: b = 2 / epsilon (Laplace), or sigma (Gaussian)."""
        return self._noise_law.scale / self._unit

    @property
    def noise_stddev(self) -> float:
        """Standard deviation of the noise on each entry: sqrt(2) b (Laplace), or sigma."""
        return self.scale * self._noise_law.spread

    @property
    def _noise_law(self) -> LaplaceNoise | DiscreteGaussian:
        if self.noise == "laplace":
            # Two entries move by one unit each, so epsilon is for two units together.
            return LaplaceNoise(self.epsilon, 2 * self._unit)
        return DiscreteGaussian(_gaussian_grid(self.epsilon, self.delta)[1])

    @property
    def _unit(self) -> int:
        """The grid steps in one unit."""
        if self.noise == "laplace":
            return _LAPLACE_UNIT
        return _gaussian_grid(self.epsilon, self.delta)[0]

    @_validate.clears_frames
    def randomize(
        self, labels: Private[Any], public: Public[Any] = None, *, rng: Rng = None
    ) -> np.ndarray:
        """Returns noisy one-hot rows, ``float32`` (n, K), of either sign; ``public`` is None."""
        self._refuse_public(public)
        if rng is not None:  # The check also covers a call without labels.
            random_bits.checked_generator(rng)
        classes = _validate.class_indices("labels", labels, self.num_classes)
        instead = "Use RandomizedResponse: each of its noisy labels is one number."
        _validate.check_size("noisy rows", (classes.size, self.num_classes), instead)
        noisy = np.empty((classes.size, self.num_classes), dtype=np.float32)
        for rows in row_chunks(noisy.shape):
            noisy[rows] = self._noisy_rows(classes[rows], rng)
        return noisy

    def check_output(self, noisy: Public[Any], size: int) -> np.ndarray:
        """Returns noisy rows as ``float32`` (size, K), or raises."""
        return self.checked_output(noisy, (size, self.num_classes), "f").astype(np.float32)

    def check_unbiased(self) -> None:
        """Does nothing: the noise on each entry has mean zero."""

    def _noisy_rows(self, classes: np.ndarray, rng: Rng) -> np.ndarray:
        """Returns ``float64`` (m, K): exact integers, divided once at the end."""
        drawn = self._noise_law.draw(classes.size * self.num_classes, rng)
        rows = drawn.reshape(classes.size, self.num_classes)
        rows[np.arange(classes.size), classes] += self._unit
        return rows / self._unit


@functools.lru_cache(maxsize=64)
def _gaussian_grid(epsilon: float, delta: float) -> tuple[int, int]:
    """Returns the grid steps in one unit, a power of two, and sigma in steps, rounded up."""
    # Only two entries move, so the loss counts two, not n K. The double sqrt(2) is above the
    # root, and its product with a power of two is exact.
    distance = math.sqrt(2.0)
    fine = integer_noise.gaussian_scale(epsilon, delta, distance * _FINEST_UNIT, 2)
    halvings = math.ceil(math.log2(1.001 * fine / integer_noise.MAX_SIGMA))
    unit = _FINEST_UNIT >> halvings
    return unit, math.ceil(integer_noise.gaussian_scale(epsilon, delta, distance * unit, 2))
