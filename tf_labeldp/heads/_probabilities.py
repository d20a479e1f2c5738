"""Probabilities from scores, sharpened without labels.

Softmax of ``beta * s`` for scores s = x W has the log-likelihood, summed over the examples,

``beta tr(W^T B) - sum_i log sum_k exp(beta s_ik)``:

the labels enter through ``tr(W^T B)`` alone (the scores of a row sum to zero, so centring the codes
changes nothing), and that number can be estimated from the release and the known noise
(``_ridge_path.Problem.cross_moment``). So the sharpness beta of greatest likelihood, which
temperature scaling (Guo et al. 2017) finds from held-out labels, is found from the release. The
sum over examples is public; it is taken over a public sample of rows.
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
    return float(optimize.brentq(slope, 0.0, largest, xtol=1e-10 * largest, rtol=1e-10))
