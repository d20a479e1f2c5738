"""The events that ``dp_accounting`` lacks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from dp_accounting import DpEvent, pld
from scipy import special

_FARTHEST = 9.0
"""Standard deviations of the noise; beyond (probability 1e-19) a loss counts as unbounded."""


@dataclasses.dataclass(frozen=True)
class AddedDeltaDpEvent(DpEvent):
    """An unbounded loss with probability ``delta``, in [0, 1], and no loss otherwise.

    Receipts of 0.2 have it for steps whose noise was within a known delta of Gaussian noise.
    """

    delta: float


@dataclasses.dataclass(frozen=True)
class LabelDistanceDpEvent(DpEvent):
    """One step of DP-SGD on secret Poisson batches, clipped by ``"label_distance"``.

    An example adds ``a`` to the sum of a batch, and ``b`` if its label is replaced. Clipping
    ensures ``|a| <= longest * D``, the same for ``|b|``, and ``|a - b| <= D``. For orders above
    one, the worst pair is ``longest * D`` and ``-(1 - longest) * D`` on a line
    (docs/theory.md). The next step may have the pair with its roles exchanged, so an order
    below one takes the divergence of its inverse with the roles exchanged.

    Attributes:
        sampling_probability: probability with which an example enters a batch, in (0, 1).
        noise_multiplier: standard deviation of the noise, divided by ``D / 2``.
        longest: largest norm of a gradient, divided by D, in [1/2, 1].
    """

    sampling_probability: float
    noise_multiplier: float
    longest: float

    @property
    def worst_pair(self) -> tuple[float, float]:
        """The pair a and b, in standard deviations of the noise."""
        distance = 2.0 / self.noise_multiplier
        return self.longest * distance, (self.longest - 1.0) * distance

    def divergence(self, losses: np.ndarray) -> np.ndarray:
        """Returns the largest hockey-stick divergences (k,) of the orders ``e^losses`` >= 1.

        They are attained on half lines, where ``log q n_a`` exceeds the logarithm of
        ``(e^loss - 1) (1 - q) n_0 + e^loss q n_b``. Divided by ``n_0``, the first is linear and the
        second convex, so Newton's method reaches the border from below from any start.
        """
        q, (a, b) = self.sampling_probability, self.worst_pair
        with np.errstate(divide="ignore"):  # log 0 at order 1
            constant = losses + np.log(-np.expm1(-losses)) + math.log1p(-q)
        border = (losses + (a * a - b * b) / 2.0) / (a - b)
        # A border that is not reached would give too small a divergence. Five steps reach it in
        # doubles, for probabilities from 1e-7 and noise multipliers from 0.02 to 1e5.
        for _ in range(12):
            other = losses + math.log(q) + b * border - b * b / 2.0
            total = np.logaddexp(constant, other)
            short = total - (math.log(q) + a * border - a * a / 2.0)
            border = border + short / (a - b * np.exp(other - total))
        gained = q * (special.ndtr(a - border) - np.exp(losses + special.log_ndtr(b - border)))
        # Orders above e^709 overflow, and their products with small probabilities do not.
        lost = np.exp(losses + special.log_ndtr(-border)) - special.ndtr(-border)
        found: np.ndarray = gained - (1.0 - q) * lost
        return np.maximum(found, 0.0)

    def loss(self, grid: float) -> Any:
        """Returns the privacy loss of one step, rounded up to the grid."""
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
