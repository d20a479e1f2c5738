"""Probabilities from scores, sharpened without labels.

Softmax of ``beta * s`` for scores s = x W has the log-likelihood, summed over the examples,

``beta tr(W^T B) - sum_i log sum_k exp(beta s_ik)``:

the labels enter through ``tr(W^T B)`` alone (the scores of a row sum to zero, so centring the codes
changes nothing), and that number can be estimated from the release and the known noise
(``_ridge_path.Problem.cross_moment``, ``_logistic``). So the sharpness beta of greatest likelihood,
which temperature scaling (Guo et al. 2017) finds from held-out labels, is found from the release.
The sum over examples is public; it is taken over a public sample of rows.
"""

from __future__ import annotations

import numpy as np

_LARGEST = 1e3


def class_scores(scores: np.ndarray) -> np.ndarray:
    """Returns scores of all classes (m, K): of two classes, s is that of 1 and -s that of 0."""
    return np.concatenate([-scores, scores], axis=1) if scores.shape[1] == 1 else scores


def softmax_sharpness(scores: np.ndarray, agreement: float) -> float:
    """Returns the beta of greatest likelihood; zero (all classes alike) if nothing agrees.

    Args:
        scores: of some examples, (m, K), rows that sum to zero.
        agreement: estimate of the mean over all examples of the score of the true class.
    """
    from scipy import optimize, special

    size = float(np.sqrt(np.mean(np.square(scores))))
    if agreement <= 0.0 or size == 0.0:
        return 0.0

    def slope(beta: float) -> float:
        expected = np.einsum("ik,ik->i", special.softmax(beta * scores, axis=1), scores)
        return agreement - float(expected.mean())

    largest = _LARGEST / size
    if slope(largest) >= 0.0:  # the true class agrees more often than the best class: noise
        return largest
    return float(optimize.brentq(slope, 0.0, largest, xtol=1e-7 * largest, rtol=1e-6))


def believable_agreement(scores: np.ndarray, agreement: float, error: float) -> float:
    """Returns the mean of what the agreement can be, given a noisy estimate of it.

    The score of the true class is at most the largest score of its row, so the agreement has a
    ceiling; an estimate near it or above, taken as it is, would make probabilities of 0 and 1. The
    mean of a normal law around the estimate, cut off at the ceiling, is below it.

    Args:
        scores: of some examples, (m, K).
        agreement: unbiased estimate of the mean score of the true class.
        error: its standard deviation.
    """
    from scipy import stats

    ceiling = float(scores.max(axis=1).mean(dtype=np.float64))
    if error <= 0.0:
        return min(agreement, ceiling)
    place = (ceiling - agreement) / error
    below = agreement - error * float(np.exp(stats.norm.logpdf(place) - stats.norm.logcdf(place)))
    return min(below, ceiling)  # rounding, where the estimate is far above


def log_loss(scores: np.ndarray, agreement: float, sharpness: float) -> float:
    """Returns the mean log-loss of softmax of sharpened scores; arguments as above."""
    from scipy import special

    sharpened = sharpness * scores.astype(np.float64)
    return float(special.logsumexp(sharpened, axis=1).mean()) - sharpness * agreement
