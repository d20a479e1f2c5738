"""Multinomial logistic regression on images, for ``bench_clusters.py``."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.optimize import minimize

PENALTY = 1.0
"""Scikit-learn's default, as in the paper: ``||w||^2 / 2`` is added to the sum of the losses."""


def fit_scores(
    features: np.ndarray, targets: np.ndarray, test_features: np.ndarray, *, steps: int = 100
) -> np.ndarray:
    """Returns the scores (m, K) of test features after a fit by L-BFGS from zero.

    Args:
        features: ``float32`` (n, d).
        targets: (n, K), the weights of the class losses; rows sum to one, entries may be
            negative (the loss stays convex: ``lse(s) - w.s``).
        test_features: ``float32`` (m, d).
        steps: the largest number of iterations; the paper's solver stops at 100 too.
    """
    rows = np.hstack([features, np.ones((len(features), 1), np.float32)])
    moments = (rows.T @ targets.astype(np.float32)).astype(np.float64)
    shape = moments.shape
    penalty = np.full((shape[0], 1), PENALTY)
    penalty[-1] = 0.0

    def objective(flat: np.ndarray) -> Any:
        weights = flat.reshape(shape)
        scores = rows @ weights.astype(np.float32)
        largest = scores.max(axis=1, keepdims=True)
        shares = np.exp(scores - largest)
        total = shares.sum(axis=1, keepdims=True)
        slope = rows.T @ (shares / total) - moments + penalty * weights
        loss = np.sum(np.log(total) + largest, dtype=np.float64) - np.sum(weights * moments)
        loss += 0.5 * np.sum(penalty * weights**2)
        return loss / len(rows), slope.ravel() / len(rows)

    options = {"maxiter": steps, "maxcor": 20}
    found = minimize(
        objective, np.zeros(moments.size), jac=True, method="L-BFGS-B", options=options
    )
    weights = found.x.reshape(shape)
    return test_features @ weights[:-1] + weights[-1]
