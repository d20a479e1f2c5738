"""Draws of a Beta distribution, on every backend and with XLA."""

import math
from typing import Any

import keras
from keras import ops


def symmetric_beta(alpha: float, shape: tuple[int, ...] = (), seed: Any = None) -> Any:
    """Returns exact float32 draws from Beta(alpha, alpha), without rejection.

    With ``u``, ``v`` uniform and ``t = sqrt(u^(-1 / alpha) - 1) * cos(2 pi v)``,
    ``(1 + t / sqrt(1 + t^2)) / 2`` is Beta(alpha, alpha): Bailey, "Polar Generation of Random
    Variates with the t-Distribution" (1994). XLA has no kernel for ``keras.random.beta``.
    """
    uniforms = keras.random.uniform((2, *shape), dtype="float32", seed=seed)
    exponential = -ops.log1p(-uniforms[0])
    # From exponent 69 (1e30) on the result is 0 or 1 in float32; the cap avoids an overflow.
    squared_radius = ops.expm1(ops.minimum(exponential / alpha, 69.0))
    cosine = ops.cos(2.0 * math.pi * uniforms[1])
    # With s = t / sqrt(1 + t^2), 1 - |s| = (1 - s^2) / (1 + |s|) stays precise near 0.
    one_minus_square = 1.0 / (1.0 + squared_radius * cosine**2)
    magnitude = ops.abs(cosine) * ops.sqrt(squared_radius * one_minus_square)
    lower = 0.5 * one_minus_square / (1.0 + ops.minimum(magnitude, 1.0))
    return ops.where(cosine < 0, lower, 1.0 - lower)
