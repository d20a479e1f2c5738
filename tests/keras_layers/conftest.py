"""Fixtures of the tests of Keras losses and layers."""

from __future__ import annotations

import keras
import numpy as np
import pytest


def channel_of(epsilon, num_classes, labels=None):
    """Returns `Q[true, noisy]` of RRTop-k on `labels`, by default all (plain RR)."""
    labels = range(num_classes) if labels is None else labels
    k = len(labels)
    p = 1.0 / (np.exp(epsilon) + k - 1.0)
    matrix = np.zeros((num_classes, num_classes))
    matrix[:, labels] = 1.0 / k
    for label in labels:
        matrix[label, labels] = p
        matrix[label, label] = np.exp(epsilon) * p
    return matrix


@pytest.fixture
def channel():
    return channel_of


@pytest.fixture
def predictions():
    """Probabilities `(5, 6)`, float64, well inside the simplex."""
    return np.random.default_rng(0).dirichlet(np.full(6, 2.0), size=5)


@pytest.fixture(params=["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)])
def mixed_precision(request):
    """A mixed-precision policy, undone after the test."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy(before)
