"""Measures of a channel that several tests share."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats


@pytest.fixture(scope="session")
def worst_log_ratio():
    """max over outputs and pairs of inputs of log P[out | y] / P[out | y']."""

    def measure(matrix):
        possible = matrix[:, matrix.max(axis=0) > 0]
        with np.errstate(divide="ignore"):
            return float(np.max(np.log(possible.max(axis=0)) - np.log(possible.min(axis=0))))

    return measure


@pytest.fixture(scope="session")
def chi_square_rejects():
    """Whether counts (..., K) contradict probabilities (..., K) at a false alarm rate of 1e-6."""

    def rejects(counts, probabilities):
        counts, probabilities = counts.reshape(-1, counts.shape[-1]), np.asarray(probabilities)
        expected = probabilities.reshape(counts.shape) * counts.sum(axis=1, keepdims=True)
        if np.any(counts[expected == 0.0]):
            return True
        cells = expected > 0.0
        if expected[cells].min() < 5.0:
            raise ValueError("too few draws for the chi-square approximation")
        statistic = np.sum((counts[cells] - expected[cells]) ** 2 / expected[cells])
        freedom = np.sum(cells.sum(axis=1) - 1)
        return bool(statistic > stats.chi2.isf(1e-6, freedom))

    return rejects


@pytest.fixture
def seeded():
    """A fresh generator with the same stream at each call."""
    return lambda: np.random.default_rng(20210211)
