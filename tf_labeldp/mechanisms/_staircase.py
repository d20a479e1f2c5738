"""Staircase noise on numeric labels, continuous and discrete."""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import ClassVar

import numpy as np

from tf_labeldp.mechanisms._bounded_mechanism import AdditiveMechanism
from tf_labeldp.mechanisms._integer_noise import StaircaseNoise

_WINDOW = 1000
"""Widths tried on each side of the continuous optimum, all of them where N is small."""


class _Staircase(AdditiveMechanism):
    """Adds staircase noise; only the width of the upper part of a stair differs."""

    @property
    def _noise(self) -> StaircaseNoise:
        return StaircaseNoise(self.epsilon, self.steps, self._first())

    @abc.abstractmethod
    def _first(self) -> int:
        """Returns the width of the upper part of a stair, in grid steps."""


@dataclasses.dataclass(frozen=True)
class StaircaseMechanism(_Staircase):
    """Adds staircase noise: of all noise that is epsilon-DP, that with the smallest variance.

    The density falls by a factor e^-epsilon at ``(k + gamma) (high - low)`` for k = 0, 1, ..., on
    both sides of the label. ``gamma`` is the one with the smallest E[noise^2] (before clipping).

    Privacy: (epsilon, 0)-DP for the replacement of one label in [low, high]; the worst log-ratio
    equals epsilon. It holds for the draws as made: the noise is a discrete staircase on a public
    grid of 2^32 steps, drawn from random integers with all rounding towards more privacy.

    Source: ``ghazi2023``, Definition 25, and appendix F for the clipping; gamma from Geng and
    Viswanath 2014, "The optimal mechanism in differential privacy".

    Attributes:
        epsilon: at least 1e-6 and finite.
        low: smallest label, public.
        high: largest label, public.
        clip: whether outputs are clipped to [low, high], which is post-processing.

    Example:
        >>> import numpy as np
        >>> mechanism = StaircaseMechanism(epsilon=1.0, low=0.0, high=400.0)
        >>> mechanism.randomize(np.array([12.5, 399.0])).shape
        (2,)
        >>> round(mechanism.gamma, 4)
        0.4167
    """

    @property
    def gamma(self) -> float:
        """Share of the upper part in a stair, in (0, 1/2], a multiple of 2^-32."""
        return self._first() / self.steps

    def _first(self) -> int:
        return max(1, round(optimal_gamma(self.epsilon) * self.steps))


@dataclasses.dataclass(frozen=True)
class DiscreteStaircaseMechanism(_Staircase):
    """Adds discrete staircase noise to whole numbers.

    With D = high - low, the probability of the noise i falls by a factor e^-epsilon at
    ``|i| = k D + r`` for k = 0, 1, .... ``r`` is the integer in 1..D with the smallest E[noise^2]
    (before clipping). For D = 1 it is 1, and the noise is discrete Laplace.

    Privacy: (epsilon, 0)-DP for the replacement of one label in low..high; the worst log-ratio
    equals epsilon. It holds for the draws as made: they come from random integers, with all
    rounding towards more privacy.

    Source: ``ghazi2023``, Definition 24, and appendix F for the clipping.

    Attributes:
        epsilon: at least 1e-6 and finite.
        low: smallest label, a whole number.
        high: largest label, a whole number, at most 2^32 above low.
        clip: whether outputs are clipped to low..high, which is post-processing.

    Example:
        >>> mechanism = DiscreteStaircaseMechanism(epsilon=1.0, low=0, high=10)
        >>> mechanism.r, mechanism.transition_matrix().shape
        (5, (11, 11))
    """

    whole: ClassVar[bool] = True

    @property
    def r(self) -> int:
        """Width of the upper part of a stair, in 1..(high - low)."""
        return self._first()

    def _first(self) -> int:
        return optimal_first(self.epsilon, self.steps)


def staircase_variance(epsilon: float, steps: int, first: np.ndarray) -> np.ndarray:
    """Returns E[noise^2] of staircase noise for each width r of the upper part, (m,).

    With b = e^-epsilon and ``W_j`` the sum of ``u^j w(u)`` over one stair, it is
    ``2 (W_2 + 2 N W_1 b/(1-b) + N^2 W_0 b(1+b)/(1-b)^2) / (2 W_0 - (1-b))``.
    """
    shrink, loss = math.exp(-epsilon), -math.expm1(-epsilon)
    r, n = np.asarray(first, dtype=np.float64), float(steps)
    w_0 = loss * r + shrink * n
    w_1 = (loss * r * (r - 1.0) + shrink * n * (n - 1.0)) / 2.0
    cubes = loss * r * (r - 1.0) * (2.0 * r - 1.0) + shrink * n * (n - 1.0) * (2.0 * n - 1.0)
    w_2 = cubes / 6.0
    odds = shrink / loss
    later = 2.0 * n * w_1 * odds + n**2 * w_0 * odds * (1.0 + shrink) / loss
    return 2.0 * (w_2 + later) / (2.0 * w_0 - loss)


def optimal_gamma(epsilon: float) -> float:
    """Returns r/N of the continuous staircase with the smallest E[noise^2], in [0, 1/2].

    Setting the derivative to zero gives ``(gamma + b (1 - gamma))^3 = b (1 + b) / 2``, b =
    e^-epsilon: the gamma* of Geng and Viswanath 2014, "The optimal mechanism in differential
    privacy", for squared error.
    """
    shrink, loss = math.exp(-epsilon), -math.expm1(-epsilon)
    return ((0.5 * shrink * (1.0 + shrink)) ** (1.0 / 3.0) - shrink) / loss


def optimal_first(epsilon: float, steps: int) -> int:
    """Returns the width r in 1..N with the smallest E[noise^2]; the smaller of two equal ones.

    In r, E[noise^2] is a convex function over a positive affine one, so it falls and then rises: a
    minimum inside the window around the continuous optimum is the minimum of all.
    """
    center = round(optimal_gamma(epsilon) * steps)
    first = np.arange(max(1, center - _WINDOW), min(steps, center + _WINDOW) + 1)
    return int(first[np.argmin(staircase_variance(epsilon, steps, first))])
