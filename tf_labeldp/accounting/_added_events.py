"""The events that ``dp_accounting`` lacks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from dp_accounting import DpEvent, pld
from scipy import special

_FARTHEST = 9.0
"""Standard deviations of the noise; beyond (1e-19) a loss counts as without bound."""


@dataclasses.dataclass(frozen=True)
class AddedDeltaDpEvent(DpEvent):
    """A loss without bound with probability ``delta``, in [0, 1], and none otherwise."""

    delta: float


@dataclasses.dataclass(frozen=True)
class LabelDistanceDpEvent(DpEvent):
    """One step of DP-SGD on secret Poisson batches, clipped by ``"label_distance"``.

    An example adds ``a`` to the sum of a batch, and ``b`` if its label is replaced. Known are
    ``|a| <= longest * D``, likewise ``|b|``, and ``|a - b| <= D``. For orders above one,
    ``longest * D`` against ``-(1 - longest) * D`` on a line is the worst pair (docs/accounting.md).
    In the next step it may be the worst the other way round, so the divergence of an order below
    one is that of its inverse with the roles exchanged, not that of the same pair.

    Attributes:
        sampling_probability: of each example, in (0, 1).
        noise_multiplier: standard deviation of the noise over ``D / 2``.
        longest: the largest norm of a gradient over D, in [1/2, 1].
    """

    sampling_probability: float
    noise_multiplier: float
    longest: float

    @property
    def worst_pair(self) -> tuple[float, float]:
        """a and b, in standard deviations of the noise."""
        distance = 2.0 / self.noise_multiplier
        return self.longest * distance, (self.longest - 1.0) * distance

    def divergence(self, losses: np.ndarray) -> np.ndarray:
        """Returns the largest hockey-stick divergences (k,) of orders ``e^losses`` from 1 on.

        They are reached on half lines, where ``log q n_a`` is above the logarithm of
        ``(e^loss - 1) (1 - q) n_0 + e^loss q n_b``. Over ``n_0`` the one is linear and the other
        convex, so Newton's method comes to the border from below, whatever it starts from.
        """
        q, (a, b) = self.sampling_probability, self.worst_pair
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

    def loss(self, grid: float) -> Any:
        """Returns the privacy loss of one step, rounded up to a grid."""
        q, (a, b) = self.sampling_probability, self.worst_pair
        x = _FARTHEST + a
        loss, back = (
            np.logaddexp(math.log1p(-q), math.log(q) + m * x - m * m / 2.0) for m in (a, b)
        )
        cells = math.ceil(float(loss - back) / grid)
        above = self.divergence(grid * np.arange(cells + 1))
        losses = grid * np.arange(cells, 0, -1)
        below = np.exp(-losses) * above[:0:-1] - np.expm1(-losses)
        return pld.pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
            grid, -cells, cells, np.concatenate([below, above])
        )
