"""Laplace noise on numeric labels, continuous and discrete."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from tf_labeldp.mechanisms._bounded_mechanism import AdditiveMechanism
from tf_labeldp.mechanisms._integer_noise import LaplaceNoise


class _Laplace(AdditiveMechanism):
    """Adds Laplace noise; only the grid differs."""

    @property
    def _noise(self) -> LaplaceNoise:
        return LaplaceNoise(self.epsilon, self.steps)


@dataclasses.dataclass(frozen=True)
class LaplaceMechanism(_Laplace):
    """Adds Laplace noise of scale ``(high - low) / epsilon`` to labels in a range.

    Privacy: (epsilon, 0)-DP for the replacement of one label in [low, high]; the worst log-ratio
    equals epsilon. It holds for the draws as made: the noise is discrete Laplace on a public grid
    of 2^32 steps, drawn exactly from random integers. Naive noise in doubles is not private.

    Source: ``ghazi2023``, Definition 23, and appendix F for the clipping.

    Attributes:
        epsilon: at least 1e-6 and finite.
        low: smallest label, public.
        high: largest label, public.
        clip: whether outputs are clipped to [low, high], which is post-processing.

    Example:
        >>> import numpy as np
        >>> mechanism = LaplaceMechanism(epsilon=1.0, low=0.0, high=400.0)
        >>> mechanism.randomize(np.array([12.5, 399.0])).shape
        (2,)
        >>> mechanism.cdf([0.0, 200.0], [0.0, 200.0]).round(3).tolist()
        [[0.5, 0.303], [0.697, 0.5]]
    """


@dataclasses.dataclass(frozen=True)
class DiscreteLaplaceMechanism(_Laplace):
    """Adds discrete Laplace noise, ``P[x] ~ e^(-epsilon |x| / (high - low))``, to whole numbers.

    Privacy: (epsilon, 0)-DP for the replacement of one label in low..high; the worst log-ratio
    equals epsilon. The noise is drawn exactly, from random integers.

    Source: ``ghazi2023``, Definition 22, and appendix F for the clipping; drawn by Algorithm 2 of
    Canonne, Kamath and Steinke 2020, "The discrete Gaussian for differential privacy".

    Attributes:
        epsilon: at least 1e-6 and finite.
        low: smallest label, a whole number.
        high: largest label, a whole number, at most 2^32 above low.
        clip: whether outputs are clipped to low..high, which is post-processing.

    Example:
        >>> mechanism = DiscreteLaplaceMechanism(epsilon=1.0, low=0, high=2)
        >>> mechanism.transition_matrix().round(3).tolist()
        [[0.622, 0.149, 0.229], [0.378, 0.245, 0.378], [0.229, 0.149, 0.622]]
    """

    whole: ClassVar[bool] = True
