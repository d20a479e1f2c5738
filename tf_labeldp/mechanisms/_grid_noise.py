"""Noise for vectors of integers, Gaussian or Laplace, calibrated for the law that is drawn.

Noise computed in floating point is not private (``_integer_noise``). Here the statistic is a vector
of integers, and the noise one of OpenDP's exact samplers on the integers.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting._events import gaussian_event, pure_dp_event
from tf_labeldp.accounting._gaussian import gaussian_sigma
from tf_labeldp.mechanisms._base import Frozen
from tf_labeldp.mechanisms._integer_noise import fitting_scale
from tf_labeldp.mechanisms._random import Rng, checked_generator

if TYPE_CHECKING:
    from tf_labeldp.accounting._events import DpEvent

_MARGIN = 1e-9
LARGEST_SCALE = 2.0**57
"""Noise above this scale might leave the 64-bit integers (at 40 standard deviations)."""


class FrozenWithNoise(Frozen):
    """The mechanisms that add noise of a kind of choice: a pure one, or Gaussian with a delta."""

    noise: str
    delta: float
    _noises: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.one_of("noise", self.noise, self._noises)
        delta = _validate.number_in("delta", self.delta, "[0, 1)")
        if (self.noise == "gaussian") != (delta > 0.0):
            raise ValueError(
                f"{self.noise} noise needs delta {'above' if delta == 0.0 else 'equal to'} zero, "
                f"got delta={delta:g}. Gaussian noise takes one below 1/n for n labels."
            )
        self._set(delta=delta)

    def dp_event(self) -> DpEvent:
        """Returns the event of one release: Gaussian, or one that dominates any pure mechanism."""
        if self.noise != "gaussian":
            return pure_dp_event(self.epsilon)
        return gaussian_event(gaussian_sigma(self.epsilon, self.delta, 1.0))


@functools.lru_cache(maxsize=64)
def gaussian_scale(epsilon: float, delta: float, l2_sensitivity: float, num_entries: int) -> float:
    """Returns the sigma of discrete Gaussian noise for (epsilon, delta), in grid steps.

    The analytic calibration is for continuous noise Z; integers plus round(Z) are as private, by
    post-processing. The discrete Gaussian has nearly the law of round(Z): for |x| <= 40 sigma,

    ``P[round(Z) = x] = phi(x) (1 + (x^2 / sigma^2 - 1) / (24 sigma^2) + O(sigma^-4))``,

    so the logarithms differ by at most ``a = 70 m / sigma^2`` over m entries, and beyond lies a
    mass of ``2 m e^-800``, below any delta of a double. Hence (epsilon', delta') for round(Z) is
    (epsilon' + 2 a, e^a delta') for the discrete Gaussian: the noise is calibrated to epsilon and
    delta lowered by one part in 1e9, and 2 a has to be less than that.
    """
    less = 1.0 - _MARGIN
    sigma = gaussian_sigma(epsilon * less, delta * less, l2_sensitivity)
    apart = 70.0 * num_entries / sigma**2
    if 2.0 * apart > _MARGIN * min(epsilon, 1.0):
        raise ValueError(
            f"the grid for exact sums is too coarse for {num_entries} entries at epsilon="
            f"{epsilon:g}: use another epsilon, fewer entries, or the moments of fewer rows."
        )
    return fitting_scale(sigma, epsilon, LARGEST_SCALE)


def laplace_scale(epsilon: float, l1_sensitivity: float) -> float:
    """Returns the scale of discrete Laplace noise in grid steps, which OpenDP may raise."""
    return fitting_scale(math.ceil(l1_sensitivity) / epsilon, epsilon, LARGEST_SCALE)


def with_noise(
    exact: np.ndarray, kind: str, scale: float, epsilon: float, l1_sensitivity: float, rng: Rng
) -> np.ndarray:
    """Returns integers (``int64``, any shape) with noise on every entry.

    ``scale`` is from ``gaussian_scale`` or ``laplace_scale``; for Laplace noise OpenDP's privacy
    map has to certify ``epsilon`` at ``l1_sensitivity``. Without ``rng``, which is for repeatable
    (not private) runs, OpenDP's exact samplers draw from the operating system's random bits.
    """
    if rng is not None:  # the same law, to the rounding of doubles
        rng = checked_generator(rng)
        drawn = rng.normal if kind == "gaussian" else rng.laplace
        return exact + np.rint(drawn(scale=scale, size=exact.shape)).astype(np.int64)
    measurement = _opendp_measurement(kind, scale, epsilon, l1_sensitivity)
    return np.array(measurement(exact.ravel().tolist()), dtype=np.int64).reshape(exact.shape)


@functools.lru_cache(maxsize=64)
def _opendp_measurement(kind: str, scale: float, epsilon: float, l1_sensitivity: float) -> Any:
    if kind == "laplace":
        return certified_laplace(True, scale, math.ceil(l1_sensitivity), epsilon)[0]
    domains, metrics, measurements = _opendp()
    atoms = domains.vector_domain(domains.atom_domain(T="i64"))
    return (atoms, metrics.l2_distance(T="f64")) >> measurements.then_gaussian(scale)


@functools.lru_cache(maxsize=64)
def certified_laplace(whole: bool, scale: float, moved: float, epsilon: float) -> tuple[Any, float]:
    """Returns OpenDP's Laplace measurement of a vector, certified for epsilon, and its scale.

    ``whole`` is whether numbers and noise are, ``moved`` the L1 sensitivity. The scale rounds to a
    double, and so does OpenDP's bound on the loss, upwards: the scale is raised to the first at
    which OpenDP itself certifies ``epsilon`` (one step at most as a rule).
    """
    domains, metrics, measurements = _opendp()
    # Types are given in full: T=int would be 32 bits, at which counts saturate.
    kind = "i64" if whole else "f64"
    atoms = domains.atom_domain(T="i64") if whole else domains.atom_domain(T="f64", nan=False)
    space = domains.vector_domain(atoms), metrics.l1_distance(T=kind)
    for _ in range(64):
        measurement = space >> measurements.then_laplace(scale)
        if measurement.map(int(moved) if whole else moved) <= epsilon:
            return measurement, scale
        scale = math.nextafter(scale, math.inf)
    raise RuntimeError(
        f"OpenDP does not certify epsilon={epsilon} for Laplace noise of scale {scale}. Please "
        "report this with your version of opendp."
    )


def _opendp() -> tuple[Any, Any, Any]:
    """Returns OpenDP's modules; its ``prelude`` would load scikit-learn too."""
    from opendp import domains, measurements, metrics, mod

    # OpenDP asks for this before any component whose written proof is not finished.
    mod.enable_features("contrib")
    return domains, metrics, measurements
