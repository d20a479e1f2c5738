"""Debiased targets of resampled labels: the lemmas of the clustering paper, as properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_labeldp.accounting import PrivacyBudget
from tf_labeldp.estimation import debiased
from tf_labeldp.mechanisms import RandomizedResponse, RRWithPrior
from tf_labeldp.mechanisms.clusters import PriorResampling
from tf_labeldp.vault import ClusterRandomizedResponse, PrivateLabels

BOUNDED = settings(max_examples=100, deadline=None, derandomize=True)
PRIOR = np.array([0.5, 0.3, 0.15, 0.05])


@st.composite
def distributions(draw):
    """A distribution (K,), K in 2..8, with entries down to zero."""
    weights = draw(st.lists(st.floats(0.0, 1.0), min_size=2, max_size=8))
    weights[draw(st.integers(0, len(weights) - 1))] += 0.1
    return np.array(weights) / np.sum(weights)


def weight_matrix(q, beta, epsilon=1.0):
    """Row z: the weights when z was observed."""
    mechanism = PriorResampling(epsilon, q.size)
    return debiased(mechanism, np.arange(q.size), q, bias_correction=beta)


def randomization_matrix(q, beta):
    """Line 29 of Algorithm 1."""
    return (1.0 - beta) * np.eye(q.size) + beta * np.tile(q, (q.size, 1))


@BOUNDED
@given(q=distributions(), beta=st.floats(0.0, 0.99))
def test_weights_are_the_inverse_of_the_randomization_matrix(q, beta):
    matrix = randomization_matrix(q, beta)
    weights = weight_matrix(q, beta)
    np.testing.assert_allclose(matrix @ weights, np.eye(q.size), rtol=0, atol=1e-12)
    np.testing.assert_allclose(weights, np.linalg.inv(matrix), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(weights.sum(axis=1), 1.0, rtol=0, atol=1e-12)


@BOUNDED
@given(
    q=distributions().filter(lambda q: q.min() > 1e-3),
    epsilon=st.floats(0.05, 20.0),
    seed=st.integers(0, 2**32 - 1),
)
def test_lemma_3_the_modified_loss_is_unbiased(q, epsilon, seed):
    """The sum over all outputs of the drawn channel, for arbitrary losses."""
    mechanism = PriorResampling(epsilon, q.size)
    losses = np.random.default_rng(seed).normal(size=(20, q.size), scale=10.0)
    weights = debiased(mechanism, np.arange(q.size), q)
    mean = mechanism.transition_matrix(q) @ (weights @ losses.T)
    lambda_ = mechanism.resampling_probabilities(q)[0]
    np.testing.assert_allclose(mean, losses.T, rtol=0, atol=1e-12 / (1.0 - lambda_))


def test_another_beta_leaves_a_bias_towards_the_distribution():
    """E w = ((1 - lambda) I + (lambda - beta) 1 q^T) / (1 - beta)."""
    mechanism = PriorResampling(1.0, 4, 0.95)
    channel = mechanism.transition_matrix(PRIOR)
    for beta in (0.0, 0.5, 0.9, 0.99):
        mean = channel @ weight_matrix(PRIOR, beta)
        expected = (0.05 * np.eye(4) + (0.95 - beta) * np.tile(PRIOR, (4, 1))) / (1.0 - beta)
        np.testing.assert_allclose(mean, expected, rtol=0, atol=1e-12)
        assert np.abs(mean - np.eye(4)).max() > 0.01
    exact = channel @ weight_matrix(PRIOR, None, epsilon=1.0)
    assert np.abs(exact - np.eye(4)).max() > 1e-3  # lambda of the other mechanism
    right = channel @ debiased(mechanism, np.arange(4), PRIOR)
    np.testing.assert_allclose(right, np.eye(4), rtol=0, atol=1e-12)


def test_each_row_takes_its_own_lambda():
    rows = np.random.default_rng(1).dirichlet(np.ones(4) * 3, 30)
    mechanism = PriorResampling(1.5, 4)
    noisy = np.arange(30) % 4
    weights = debiased(mechanism, noisy, rows)
    for weight, row, z in zip(weights, rows, noisy, strict=True):
        inverse = np.linalg.inv(mechanism.transition_matrix(row))
        np.testing.assert_allclose(weight, inverse[z], rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(
        debiased(mechanism, noisy, PRIOR),
        debiased(mechanism, noisy, np.tile(PRIOR, (30, 1))),
    )


def test_with_a_uniform_prior_the_weights_are_those_of_randomized_response():
    expected = debiased(RandomizedResponse(1.0, 4), np.arange(4))
    found = debiased(PriorResampling(1.0, 4), np.arange(4), np.full(4, 0.25))
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("beta", [None, 0.0, 0.5])
def test_targets_of_cluster_randomized_response(beta):
    mechanism = ClusterRandomizedResponse(3, 0.1, 2.0, draw_epsilon=2.0, bias_correction=beta)
    clusters = np.arange(60_000) % 2
    labels = (clusters + (np.arange(60_000) % 10 == 0)) % 3
    vault = PrivateLabels(labels, 3, budget=PrivacyBudget(mechanism.epsilon), insecure_seed=2)
    made = vault.randomize(mechanism, clusters=clusters)
    targets = debiased(
        made.mechanism, made.values, made.priors, bias_correction=mechanism.bias_correction
    )
    assert targets.shape == (60_000, 3)
    np.testing.assert_array_equal(made.debiased(), targets)
    assert vault.guarantee().epsilon == pytest.approx(mechanism.epsilon, rel=1e-12)
    distributions = made.priors.probabilities
    lambdas = made.mechanism.resampling_probabilities(distributions)
    used = lambdas if beta is None else np.full(2, beta)
    np.testing.assert_allclose(
        targets,
        (np.eye(3)[made.values] - (used[:, None] * distributions)[clusters])
        / (1.0 - used[clusters][:, None]),
        rtol=1e-9,
        atol=1e-12,
    )
    truth = np.eye(3)[labels].mean(axis=0)
    # Six standard errors of a mean of 60,000 targets, each with a deviation of its own.
    error = 6.0 * targets.std(axis=0) / math.sqrt(60_000)
    off = np.abs(targets.mean(axis=0) - truth)
    if beta is None:
        assert np.all(off < error)
    else:  # the bias of the threshold, where distributions miss the truth
        bias = (0.6 - beta) / (1.0 - beta) * 0.1
        assert np.all(off < error + 2.0 * bias)


def test_errors():
    mechanism = PriorResampling(1.0, 4)
    with pytest.raises(ValueError, match=r"bias_correction must be in \[0, 1\), got 1.*singular"):
        debiased(mechanism, [0], PRIOR, bias_correction=1.0)
    with pytest.raises(ValueError, match=r"1 prior.* probability of about 1.*Pass a"):
        debiased(PriorResampling(1.0, 4, 1.0), [0], PRIOR)
    # A least entry of 2^-53 keeps next to no label; weights of 1e15 would be rounding errors.
    with pytest.raises(ValueError, match=r"1 prior\(s\) have a resampling probability"):
        debiased(mechanism, [0, 1], [[1.0, 0.0, 0.0, 0.0], [1 - 3e-9, 1e-9, 1e-9, 1e-9]])
    with pytest.raises(ValueError, match="draws with priors"):
        debiased(mechanism, [0])
    with pytest.raises(ValueError, match=r"must have shape \(4,\) or \(1, 4\)"):
        debiased(mechanism, [0], np.tile(PRIOR, (2, 1)))
    with pytest.raises(ValueError, match="costs more than"):
        debiased(PriorResampling(1.0, 4, 0.5), [0], PRIOR)
    for other, priors in ((RandomizedResponse(1.0, 4), None), (RRWithPrior(1.0, 4), PRIOR)):
        with pytest.raises(ValueError, match=r"is for PriorResampling, got (RRW|Ran)"):
            debiased(other, [0], priors, bias_correction=0.5)
