"""Noise for vectors of integers, Gaussian or Laplace, calibrated for the law that is drawn.

Noise computed in floating point is not private, whatever its formula says (Mironov 2012, "On
significance of the least significant bits for differential privacy"). Here the statistic is a
vector of integers, and the noise one of OpenDP's exact samplers on the integers (Canonne, Kamath
and Steinke 2020, "The discrete Gaussian for differential privacy").

The analytic calibration is for continuous Gaussian noise Z. Adding it to integers and rounding
gives the integers plus round(Z), so noise with the law of round(Z) is private by post-processing.
OpenDP draws the discrete Gaussian instead, whose probabilities are close: for |x| <= 40 sigma,

``P[round(Z) = x] = phi(x) (1 + (x^2 / sigma^2 - 1) / (24 sigma^2) + O(sigma^-4))``,

so the logarithms of the two differ by at most ``a = 70 m / sigma^2`` over m entries, and beyond
lies a mass of ``2 m e^-800``, which is below any delta of a double. Hence (epsilon', delta') for
round(Z) is (epsilon' + 2 a, e^a delta') for the discrete Gaussian. The noise is calibrated to
epsilon and delta lowered by one part in 1e9, and it is checked that 2 a is less than that; on the
fine grids used here it is, by far.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting._events import gaussian_event, pure_dp_event
from tf_labeldp.accounting._gaussian import gaussian_sigma
from tf_labeldp.mechanisms._random import checked_generator

if TYPE_CHECKING:
    from tf_labeldp.accounting._events import DpEvent

_MARGIN = 1e-9
_LARGEST = 2.0**57
"""Noise above this scale might leave the 64-bit integers (at 40 standard deviations)."""


def checked_delta(value: Any, noise: Any, known: Iterable[str], pure: str) -> float:
    """Returns delta as a float, or raises unless it is above zero just for Gaussian noise.

    ``known`` are all kinds of noise, and ``pure`` is what the message says of the pure ones.
    """
    _validate.one_of("noise", noise, known)
    delta = _validate.probability_below_one("delta", value)
    if (noise == "gaussian") != (delta > 0.0):
        raise ValueError(
            f"{noise} noise needs delta {'above' if delta == 0.0 else 'equal to'} zero, got "
            f"delta={delta:g}. Gaussian noise takes a delta below 1/n for n labels; {pure}"
        )
    return delta


def noise_event(noise: str, epsilon: float, delta: float) -> DpEvent:
    """Returns the event of one release: Gaussian, or one that dominates any pure mechanism."""
    if noise != "gaussian":
        return pure_dp_event(epsilon)
    return gaussian_event(gaussian_sigma(epsilon, delta, 1.0))


@functools.lru_cache(maxsize=64)
def gaussian_scale(epsilon: float, delta: float, l2_sensitivity: float, num_entries: int) -> float:
    """Returns the sigma of discrete Gaussian noise for (epsilon, delta), in grid steps."""
    less = 1.0 - _MARGIN
    sigma = gaussian_sigma(epsilon * less, delta * less, l2_sensitivity)
    apart = 70.0 * num_entries / sigma**2
    if 2.0 * apart > _MARGIN * min(epsilon, 1.0):
        raise ValueError(
            f"the grid for exact sums is too coarse for {num_entries} entries at epsilon="
            f"{epsilon:g}: use another epsilon, fewer entries, or the moments of fewer rows."
        )
    return _checked(sigma, epsilon)


def laplace_scale(epsilon: float, l1_sensitivity: float) -> float:
    """Returns the scale of discrete Laplace noise in grid steps, which OpenDP may raise."""
    return _checked(math.ceil(l1_sensitivity) / epsilon, epsilon)


def with_noise(
    exact: np.ndarray,
    kind: str,
    scale: float,
    epsilon: float,
    l1_sensitivity: float,
    rng: np.random.Generator | None,
) -> np.ndarray:
    """Returns integers (``int64``, any shape) with noise on every entry.

    ``scale`` is from ``gaussian_scale`` or ``laplace_scale``; for Laplace noise OpenDP's privacy
    map has to certify ``epsilon`` at ``l1_sensitivity``. Without ``rng``, which is for repeatable
    (not private) runs, OpenDP's exact samplers draw from the operating system's random bits.
    """
    if rng is not None:
        return exact + _seeded(kind, scale, exact.shape, rng)
    measurement = _opendp_measurement(kind, scale, epsilon, l1_sensitivity)
    return np.array(measurement(exact.ravel().tolist()), dtype=np.int64).reshape(exact.shape)


def _checked(scale: float, epsilon: float) -> float:
    if scale > _LARGEST:
        raise ValueError(
            f"epsilon={epsilon:g} needs noise that leaves the 64-bit integers. At such an epsilon "
            "the release is indistinguishable from noise; use a larger one."
        )
    return scale


def _opendp_measurement(kind: str, scale: float, epsilon: float, l1_sensitivity: float) -> Any:
    if kind == "laplace":
        return certified_laplace(np.int64, scale, math.ceil(l1_sensitivity), epsilon)[0]
    dp = _opendp()
    atoms = dp.vector_domain(dp.atom_domain(T="i64"))
    return (atoms, dp.l2_distance(T="f64")) >> dp.m.then_gaussian(scale)


def certified_laplace(
    kind: type[np.int64] | type[np.float64], scale: float, moved: float, epsilon: float
) -> tuple[Any, float]:
    """Returns OpenDP's Laplace measurement of a vector, certified for epsilon, and its scale.

    ``kind`` is that of the numbers and of the noise, ``moved`` the L1 sensitivity. The scale rounds
    to a double, and so does OpenDP's bound on the loss, upwards: the scale is raised to the first
    at which OpenDP itself certifies ``epsilon`` (one step at most as a rule).
    """
    dp = _opendp()
    # Types are given in full: T=int would be 32 bits, at which counts saturate.
    if kind is np.int64:
        atoms, distance, moved = dp.atom_domain(T="i64"), dp.l1_distance(T="i64"), int(moved)
    else:
        atoms, distance = dp.atom_domain(T="f64", nan=False), dp.l1_distance(T="f64")
    for _ in range(64):
        measurement = (dp.vector_domain(atoms), distance) >> dp.m.then_laplace(scale)
        if measurement.map(moved) <= epsilon:
            return measurement, scale
        scale = math.nextafter(scale, math.inf)
    raise RuntimeError(
        f"OpenDP does not certify epsilon={epsilon} for Laplace noise of scale {scale}; it gives "
        f"{measurement.map(moved)}. Please report this with your version of opendp."
    )


def _opendp() -> Any:
    import opendp.prelude as dp

    # OpenDP asks for this before any component whose written proof is not finished.
    dp.enable_features("contrib")
    return dp


def _seeded(
    kind: str, scale: float, shape: tuple[int, ...], rng: np.random.Generator
) -> np.ndarray:
    """Returns noise of the same law, to the rounding of doubles, from a generator."""
    rng = checked_generator(rng)
    drawn = rng.normal if kind == "gaussian" else rng.laplace
    return np.rint(drawn(scale=scale, size=shape)).astype(np.int64)
