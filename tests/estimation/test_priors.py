"""Priors from logits and from probabilities, and their temperature."""

from __future__ import annotations

import numpy as np
import pytest

from tf_labeldp.estimation import prior_from_logits, sharpen_prior

LOGITS = np.array([2.0, 1.0, 0.0])


def test_prior_from_logits_oracle():
    np.testing.assert_allclose(
        prior_from_logits(LOGITS), [0.665240956, 0.244728471, 0.0900305732], rtol=0, atol=1e-9
    )


def test_sharpen_prior_oracle():
    np.testing.assert_allclose(
        sharpen_prior([0.5, 0.3, 0.2], 0.5), [0.657894737, 0.236842105, 0.105263158], atol=1e-9
    )


@pytest.mark.parametrize("temperature", [0.1, 3.0])
def test_temperature_is_a_power_of_the_odds(temperature):
    rows = np.random.default_rng(21).normal(size=(50, 4))
    prior = prior_from_logits(rows, temperature)
    assert prior.shape == rows.shape and prior.dtype == np.float64
    np.testing.assert_allclose(prior.sum(axis=1), 1.0, rtol=0, atol=1e-15)
    np.testing.assert_allclose(
        np.log(prior[:, 1] / prior[:, 0]), (rows[:, 1] - rows[:, 0]) / temperature, rtol=1e-9
    )
    np.testing.assert_allclose(
        sharpen_prior(prior_from_logits(rows), temperature), prior, rtol=1e-9
    )


def test_a_probability_of_zero_stays_zero():
    assert sharpen_prior([[0.5, 0.5, 0.0]], 3.0).tolist() == [[0.5, 0.5, 0.0]]


def test_large_logits_do_not_overflow():
    np.testing.assert_allclose(prior_from_logits([1e4, 1e4, -1e4], 0.01), [0.5, 0.5, 0.0])


@pytest.mark.parametrize("temperature", [0.0, np.nan])
def test_bad_temperature(temperature):
    with pytest.raises(ValueError, match="temperature must be finite and above zero"):
        prior_from_logits(LOGITS, temperature)
    with pytest.raises(ValueError, match="temperature must be finite and above zero"):
        sharpen_prior([0.5, 0.5], temperature)


def test_bad_logits():
    with pytest.raises(ValueError, match=r"logits must be finite, but 2 are NaN or infinite.*rate"):
        prior_from_logits([[np.nan, 1.0], [np.inf, 0.0]])


def test_bad_prior():
    with pytest.raises(ValueError, match="prior must not be negative"):
        sharpen_prior([1.5, -0.5], 1.0)
    with pytest.raises(ValueError, match="prior must sum to one"):
        sharpen_prior([0.5, 0.4], 1.0)
