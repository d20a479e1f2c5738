"""Public weights of users, which heads take."""

from __future__ import annotations

import numpy as np


def user_weights(
    norms: np.ndarray, totals: np.ndarray, noise: float, label_variance: float
) -> np.ndarray:
    """Returns a factor (U,) for each user's weights that bounds her change of the moments.

    A user whose change has the norm R gets ``min(1, t / R)``, so that the noise is t times that for
    one label. Of 64 quantiles of R, t has the least variance of noise and users over the squared
    sum of weights. Labels of a user may all be equal: her variance is ``label_variance R^2``.

    Args:
        norms: R of each user, (U,).
        totals: the sum of each user's weights, (U,).
        noise: the variance of noise for one label, summed over the moments.
        label_variance: the variance of the code of a label.
    """
    positive = norms[norms > 0.0]
    if not positive.size:
        return np.ones(norms.size)

    def cost(limit: float) -> float:
        variance = noise * limit**2
        variance += label_variance * float(np.square(np.minimum(norms, limit)).sum())
        return variance / float(totals @ _factors(norms, limit)) ** 2

    return _factors(norms, min(np.quantile(positive, np.linspace(0.0, 1.0, 64)), key=cost))


def _factors(norms: np.ndarray, limit: float) -> np.ndarray:
    return limit / np.maximum(norms, limit)
