"""The analytic Gaussian mechanism: the noise for a guarantee, and the guarantee of noise.

Balle and Wang 2018, "Improving the Gaussian mechanism for differential privacy: analytical
calibration and optimal denoising", Theorem 8. Here ``u`` is the sensitivity S over the noise sigma.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tf_labeldp import _validate

_MARGIN = 1e-10
"""Relative increase of a root, above the rounding errors of the formula, so that the noise is never
too small (tested from both sides at epsilon 1e-15..1e60, delta 1e-30..0.5)."""
_NARROW = 1e-3
"""Below this u, ``m(a) - m(b)`` cancels and is integrated: Simpson's error is u^4 / 2880."""


def gaussian_sigma(epsilon: float, delta: float, l2_sensitivity: float) -> float:
    """Returns the least standard deviation of Gaussian noise that is (epsilon, delta)-DP.

    It is never below the exact root and exceeds it by less than one part in 1e9. The L2 sensitivity
    sets the relation: here, replacement of one label.
    """
    epsilon = _validate.positive_finite("epsilon", epsilon)
    target = math.log(positive_delta(delta))
    sensitivity = _validate.positive_finite("l2_sensitivity", l2_sensitivity)
    # Delta grows with u = S / sigma; the bracket contains the largest private u.
    log_root = 0.5 * math.log(epsilon)
    log_u = _last_true(
        lambda value: _log_delta(epsilon, math.exp(value)) <= target,
        min(log_root, 2.0 * log_root) - 50.0,
        max(log_root, 0.0) + 50.0,
    )
    return sensitivity / math.exp(log_u) * (1.0 + _MARGIN)


def gaussian_epsilon(sigma: float, delta: float, l2_sensitivity: float) -> float:
    """Returns the least epsilon for which Gaussian noise is (epsilon, delta)-DP.

    The inverse of ``gaussian_sigma``: never below the exact root, zero where the noise is
    (0, delta)-DP already.
    """
    u = l2_sensitivity / _validate.positive_finite("sigma", sigma)
    target = math.log(positive_delta(delta))
    # At epsilon = u^2 / 2 + 40 u, delta is below Phi(-40), which no double represents.
    log_epsilon = -_last_true(
        lambda value: _log_delta(math.exp(-value), u) <= target,
        -math.log(0.5 * u * u + 40.0 * u),
        50.0,
    )
    # The search stops at e^-50 where the noise is (0, delta)-DP.
    if log_epsilon <= -49.0:
        return 0.0
    return math.exp(log_epsilon) * (1.0 + _MARGIN)


def gaussian_delta(sigma: float, epsilon: float, l2_sensitivity: float) -> float:
    """Returns the least delta for which Gaussian noise is (epsilon, delta)-DP."""
    epsilon = _validate.positive_finite("epsilon", epsilon)
    return math.exp(_log_delta(epsilon, l2_sensitivity / sigma))


def _log_delta(epsilon: float, u: float) -> float:
    """Returns log(delta) of noise with S / sigma = u; ``-inf`` below the smallest double.

    Delta is ``Phi(u / 2 - epsilon / u) - e^epsilon Phi(-u / 2 - epsilon / u)``, whose terms nearly
    cancel. With ``a, b = epsilon / u -+ u / 2`` it is ``phi(a) (m(a) - m(b))``, with the normal
    density phi and the Mills ratio ``m(x) = Phi(-x) / phi(x)``: no large numbers remain.
    """
    from scipy import special

    a, b = epsilon / u - 0.5 * u, epsilon / u + 0.5 * u
    if a > 1e6:  # Delta is below e^(-5e11).
        return -math.inf
    # The Mills ratio is sqrt(pi / 2) erfcx(x / sqrt(2)); phi's constant reduces the factor to 1/2.
    root = math.sqrt(0.5)
    if a < -8.0:
        # phi(a) m(a) differs from one by 1e-15, and the Mills ratio itself would overflow.
        second = 0.5 * math.exp(-0.5 * min(a * a, 1e4)) * float(special.erfcx(b * root))
        return math.log(max(float(special.ndtr(-a)) - second, 1e-320))
    if u < _NARROW:
        # The derivative of erfcx(x / sqrt(2)) is x erfcx(x / sqrt(2)) - sqrt(2 / pi).
        x = np.array([a, epsilon / u, b])
        slopes = math.sqrt(2.0 / math.pi) - x * special.erfcx(x * root)
        gap = u / 6.0 * float(slopes @ (1.0, 4.0, 1.0))
    else:
        gap = float(special.erfcx(a * root) - special.erfcx(b * root))
    return -0.5 * a * a + math.log(0.5 * gap) if gap > 0.0 else -math.inf


def _last_true(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Returns the largest value in [low, high] at which a decreasing condition holds."""
    while high - low > 1e-14 * max(1.0, abs(low)):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def positive_delta(delta: float, use: str = "Gaussian noise") -> float:
    """Returns delta as a float, or raises if it is not in (0, 1)."""
    delta = _validate.number_in("delta", delta, "[0, 1)")
    if delta == 0.0:
        raise ValueError(
            f"delta must be above zero for {use}, got 0: Gaussian noise has no pure guarantee, "
            "unlike Laplace noise. Use a delta below 1/n for n labels."
        )
    return delta
