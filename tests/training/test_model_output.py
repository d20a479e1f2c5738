"""Reading priors and ranks from a model's output."""

from __future__ import annotations

import numpy as np
import pytest

from tf_labeldp.training._model_output import priors_from_outputs, top_k_contains


def test_logits_and_probabilities_give_the_same_priors():
    logits = np.random.default_rng(0).normal(size=(20, 5))
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    for temperature in (0.5, 1.0, 3.0):
        np.testing.assert_allclose(
            priors_from_outputs(logits, True, temperature),
            priors_from_outputs(probabilities, False, temperature),
            atol=1e-12,
        )


def test_half_precision_probabilities_are_normalised():
    rows = np.random.default_rng(0).dirichlet(np.ones(200), size=10).astype(np.float16)
    np.testing.assert_allclose(priors_from_outputs(rows, False, 1.0).sum(axis=1), 1.0, atol=1e-12)


def test_a_diverged_model_is_refused():
    with pytest.raises(ValueError, match="logits must be finite, but 1 are NaN"):
        priors_from_outputs(np.array([[0.0, np.nan]]), True, 1.0)


def test_top_k_is_that_of_a_stable_sort():
    rng = np.random.default_rng(0)
    scores = rng.integers(3, size=(500, 6)).astype(float)  # many ties
    labels = rng.integers(6, size=500)
    order = np.argsort(-scores, axis=1, kind="stable")
    for k in range(1, 7):
        expected = (order[:, :k] == labels[:, np.newaxis]).any(axis=1)
        np.testing.assert_array_equal(top_k_contains(scores, labels, k), expected)
