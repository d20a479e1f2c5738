"""Debiased targets: unbiased by exact sums over the channel, and equal to the papers' formulas."""

from __future__ import annotations

from decimal import Decimal, localcontext

import numpy as np
import pytest

from tf_labeldp.accounting.events import pure_dp_event
from tf_labeldp.estimation import debiased, posterior
from tf_labeldp.mechanisms import (
    ClassificationMechanism,
    InformativeRR,
    RandomizedResponse,
    RRTopK,
    RRWithPrior,
)

PRIOR = np.array([0.1, 0.35, 0.05, 0.3, 0.2])
EVERY = np.arange(5)


class Uneven(ClassificationMechanism):
    """A channel of one's own: not symmetric, so that a transposed inverse is seen."""

    def __init__(self, epsilon, num_classes):
        self.epsilon, self.num_classes = epsilon, num_classes

    def randomize(self, labels, priors=None, *, rng=None):
        raise NotImplementedError

    def transition_matrix(self, prior=None):
        return np.array([[0.6, 0.25, 0.15], [0.3, 0.5, 0.2], [0.3, 0.3, 0.4]])

    def dp_event(self):
        return pure_dp_event(self.epsilon)


@pytest.fixture(params=[1e-6, 1.0, 50.0])
def epsilon(request):
    return request.param


def expected_weights(mechanism, prior=None):
    """E[w | label y], (K, K): the channel times the weights, only over outputs that can occur."""
    channel = mechanism.transition_matrix(prior)
    outputs = np.flatnonzero(channel.max(axis=0) > 0)
    weights = debiased(mechanism, outputs, prior)
    return channel[:, outputs] @ weights


def tolerance(epsilon):
    """Weights grow like 1 / epsilon, and rounding with them."""
    return 1e-14 * (1.0 + 10.0 / epsilon)


def test_randomized_response_is_unbiased(epsilon):
    mean = expected_weights(RandomizedResponse(epsilon, 5))
    np.testing.assert_allclose(mean, np.eye(5), rtol=0, atol=tolerance(epsilon))


@pytest.mark.parametrize("k", [1, 3])
def test_rr_top_k_is_unbiased_inside_its_set(epsilon, k):
    """Lemma 18; outside the set the mean weight is uniform over the set."""
    mean = expected_weights(RRTopK(epsilon, 5, k), PRIOR)
    members = np.argsort(-PRIOR)[:k]
    expected = np.zeros((5, 5))
    expected[:, members] = 1.0 / k
    expected[members] = np.eye(5)[members]
    np.testing.assert_allclose(mean, expected, rtol=0, atol=tolerance(epsilon))


def test_rr_with_prior_is_unbiased_inside_its_set(epsilon):
    mechanism = RRWithPrior(epsilon, 5)
    k = int(mechanism.optimal_k(PRIOR)[0])
    mean = expected_weights(mechanism, PRIOR)
    np.testing.assert_allclose(mean, expected_weights(RRTopK(epsilon, 5, k), PRIOR), atol=1e-15)
    inside = np.argsort(-PRIOR)[:k]
    np.testing.assert_allclose(mean[inside], np.eye(5)[inside], atol=tolerance(epsilon))


def test_informative_rr_is_unbiased_for_the_group_of_the_label(epsilon):
    mechanism = InformativeRR(epsilon, 5)
    ranked, k = np.argsort(-PRIOR), int(mechanism.set_sizes(PRIOR[np.newaxis])[0])
    expected = np.eye(5)
    expected[ranked[k:]] = expected[ranked[k - 1]]
    mean = expected_weights(mechanism, PRIOR)
    np.testing.assert_allclose(mean, expected, rtol=0, atol=tolerance(epsilon))


def test_equation_7_and_appendix_d_1():
    """``ghazi2021``, equation 7; ``ghazi2024``, D.1, which writes p for K times its p."""
    for epsilon, size in ((0.5, 3), (2.0, 10)):
        weights = debiased(RandomizedResponse(epsilon, size), np.arange(size))
        grown = np.exp(epsilon)
        equation_7 = (grown + size - 1) / (grown - 1) * (np.eye(size) - 1 / (grown + size - 1))
        np.testing.assert_allclose(weights, equation_7, rtol=1e-13)
        p = size / (grown + size - 1)
        np.testing.assert_allclose(weights, (np.eye(size) - p / size) / (1 - p), rtol=1e-13)


@pytest.mark.holds("estimation.debiased")
def test_rows_sum_to_one_and_are_as_the_channel_inverse(epsilon):
    mechanism = RandomizedResponse(epsilon, 5)
    weights = debiased(mechanism, EVERY)
    assert weights.dtype == np.float64
    np.testing.assert_allclose(weights.sum(axis=1), 1.0, rtol=0, atol=tolerance(epsilon))
    if epsilon > 1e-3:
        inverse = np.linalg.inv(mechanism.transition_matrix())
        np.testing.assert_allclose(weights, inverse, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("small_or_large", [1e-6, 50.0])
def test_weights_keep_their_digits(small_or_large):
    row = debiased(RandomizedResponse(small_or_large, 10), [0])[0]
    with localcontext() as context:
        context.prec = 60
        gain = Decimal(small_or_large).exp() - 1
        at_label, elsewhere = float((gain + 9) / gain), float(-1 / gain)
    np.testing.assert_allclose(row, [at_label] + [elsewhere] * 9, rtol=5e-16)


def test_a_mechanism_of_ones_own_goes_through_its_channel_inverse():
    mechanism = Uneven(1.0, 3)
    np.testing.assert_allclose(expected_weights(mechanism), np.eye(3), rtol=0, atol=1e-14)
    inverse = np.linalg.inv(mechanism.transition_matrix())
    np.testing.assert_allclose(debiased(mechanism, [2, 0]), inverse[[2, 0]], rtol=1e-12)
    assert not np.allclose(inverse, inverse.T)
    prior = np.array([0.5, 0.3, 0.2])
    joint = mechanism.transition_matrix()[:, [2, 0]].T * prior
    expected = joint / joint.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(posterior(mechanism, [2, 0], prior), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("mechanism", "noisy", "priors", "error", "message"),
    [
        ("RR", [0], None, TypeError, "must be a tf_labeldp mechanism, got str"),
        (RandomizedResponse(1.0, 5), [5], None, ValueError, "noisy_labels must lie in 0..4"),
        (RandomizedResponse(1.0, 5), [0.5], None, TypeError, "noisy_labels must be integers"),
        (RandomizedResponse(1.0, 5), [0], PRIOR, ValueError, "RandomizedResponse takes no priors"),
        (RRWithPrior(1.0, 5), [0], None, ValueError, r"Pass .* of shape \(5,\) or"),
        (RRTopK(1.0, 5, 2), [1], PRIOR[:4], ValueError, r"must have shape \(5,\) or \(1, 5\)"),
        (RRTopK(1.0, 5, 2), [1, 2, 0], PRIOR, ValueError, "2 noisy label.* Pass the priors of the"),
        (RRTopK(1.0, 5, 2), [1], PRIOR * 2, ValueError, "priors must sum to one"),
    ],
)  # fmt: skip
def test_errors(mechanism, noisy, priors, error, message):
    with pytest.raises(error, match=message):
        debiased(mechanism, noisy, priors)


def test_a_channel_without_an_inverse_is_refused(monkeypatch):
    for channel in (np.full((3, 3), 1 / 3), RRTopK(1.0, 3, 2).transition_matrix([0.5, 0.3, 0.2])):
        monkeypatch.setattr(Uneven, "transition_matrix", lambda self, prior=None, c=channel: c)
        with pytest.raises(ValueError, match=r"cannot be inverted.*Raise epsilon"):
            debiased(Uneven(1.0, 3), [0])
