"""DP-SGD whose clip bounds how far an example's gradients for two labels are apart.

An example adds ``a`` to the sum of a batch that it is in, and another vector ``b`` if its label is
replaced. Of these are known ``|a| <= longest * D``, likewise ``|b|``, and ``|a - b| <= D``. For
orders above one, ``longest * D`` against ``-(1 - longest) * D`` on a line is the worst pair
(docs/accounting.md). In the next step it may be the worst the other way round, so the divergence of
an order below one is that of its inverse with the roles exchanged, not that of the same pair.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import pld
from scipy import special

_FARTHEST = 9.0
"""Deviations of the noise; what lies beyond (1e-19) counts as a loss without bound."""


@dataclasses.dataclass(frozen=True)
class LabelDistanceDpEvent(dp_accounting.DpEvent):
    """One step of DP-SGD on secret Poisson batches, clipped by ``"label_distance"``.

    Attributes:
        sampling_probability: of each example, in (0, 1).
        noise_multiplier: standard deviation of the noise over ``D / 2``.
        longest: the largest norm of a gradient over D, in [1/2, 1].
    """

    sampling_probability: float
    noise_multiplier: float
    longest: float


def privacy_loss(event: LabelDistanceDpEvent, grid: float) -> Any:
    """Returns the privacy loss distribution of one step, rounded up to a grid."""
    one, other = _densities(event, _FARTHEST + _places(event)[0])
    cells = math.ceil(float(one - other) / grid)
    above = divergence(event, grid * np.arange(cells + 1))
    losses = grid * np.arange(cells, 0, -1)
    below = np.exp(-losses) * above[:0:-1] - np.expm1(-losses)
    return pld.privacy_loss_distribution.PrivacyLossDistribution(
        pld.pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
            grid, -cells, cells, np.concatenate([below, above])
        )
    )


def divergence(event: LabelDistanceDpEvent, losses: np.ndarray) -> np.ndarray:
    """Returns the largest hockey-stick divergence of one step, of orders ``e^losses`` from 1 on.

    It is reached on a half line, where ``log q n_a`` is above the logarithm of
    ``(e^loss - 1) (1 - q) n_0 + e^loss q n_b``. Over ``n_0`` the one is linear and the other
    convex, so Newton's method comes to the border from below, whatever it starts from.
    """
    q, (a, b) = event.sampling_probability, _places(event)
    with np.errstate(divide="ignore"):  # at order 1
        constant = np.log(np.expm1(losses)) + math.log1p(-q)
    border = (losses + (a * a - b * b) / 2.0) / (a - b)
    for _ in range(12):
        other = losses + math.log(q) + b * border - b * b / 2.0
        total = np.logaddexp(constant, other)
        short = total - (math.log(q) + a * border - a * a / 2.0)
        border = border + short / (a - b * np.exp(other - total))
    gained = q * (special.ndtr(a - border) - np.exp(losses + special.log_ndtr(b - border)))
    found: np.ndarray = gained - (1.0 - q) * np.expm1(losses) * special.ndtr(-border)
    return np.maximum(found, 0.0)


def _places(event: LabelDistanceDpEvent) -> tuple[float, float]:
    """Returns a and b of the worst pair, in standard deviations of the noise."""
    distance = 2.0 / event.noise_multiplier
    return event.longest * distance, (event.longest - 1.0) * distance


def _densities(event: LabelDistanceDpEvent, x: Any) -> tuple[Any, Any]:
    """Returns the logarithms of both densities of the worst pair over ``n_0`` at x."""
    q = event.sampling_probability
    rest = math.log1p(-q)
    one, other = (np.logaddexp(rest, math.log(q) + m * x - m * m / 2.0) for m in _places(event))
    return one, other
