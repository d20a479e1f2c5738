"""OpenDP's Laplace measurement at the first scale for which OpenDP certifies an epsilon."""

from __future__ import annotations

import math
from typing import Any


def certified_laplace(space: Any, scale: float, moved: float, epsilon: float) -> tuple[Any, float]:
    """Returns the measurement and its scale.

    The scale rounds to a double, and so does OpenDP's bound on the loss, upwards: the scale is
    raised to the first at which OpenDP itself certifies ``epsilon`` (one step at most as a rule).

    Args:
        space: OpenDP's domain and metric.
        scale: where to start.
        moved: the L1 sensitivity, of the type of the metric.
        epsilon: what has to be certified.
    """
    import opendp.prelude as dp

    for _ in range(64):
        measurement = space >> dp.m.then_laplace(scale)
        if measurement.map(moved) <= epsilon:
            return measurement, scale
        scale = math.nextafter(scale, math.inf)
    raise RuntimeError(
        f"OpenDP does not certify epsilon={epsilon} for Laplace noise of scale {scale}; it gives "
        f"{measurement.map(moved)}. Please report this with your version of opendp."
    )
