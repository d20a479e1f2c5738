"""Debiased targets: unbiased by exact sums over the channel, and equal to the papers' formulas."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_labeldp.accounting import PrivacyBudget
from tf_labeldp.estimation import debiased, posterior
from tf_labeldp.mechanisms import (
    ALIBI,
    ClassificationMechanism,
    DiscreteLaplaceMechanism,
    DiscreteStaircaseMechanism,
    ExponentialMechanism,
    InformativeRR,
    LabelMechanism,
    LaplaceMechanism,
    PeerToPeerRandomizedResponse,
    Priors,
    RandomizedResponse,
    RegressionMechanism,
    RROnBins,
    RRTopK,
    RRWithPrior,
    StaircaseMechanism,
    optimal_bins,
)
from tf_labeldp.plugins import EventFields, PriorResampling
from tf_labeldp.vault import ClusterRandomizedResponse, PrivateLabels

PRIOR = np.array([0.1, 0.35, 0.05, 0.3, 0.2])
SHARES = np.array([0.5, 0.3, 0.15, 0.05])
EVERY = np.arange(5)
VALUES = np.arange(40.0)
BOUNDED = settings(max_examples=100, deadline=None, derandomize=True)


class Uneven(ClassificationMechanism):
    """A plug-in whose channel is not symmetric, so a transposed inverse shows."""

    def __init__(self, epsilon, num_classes):
        self.epsilon, self.num_classes = epsilon, num_classes

    def randomize(self, labels, priors=None, *, rng=None):
        raise NotImplementedError

    def transition_matrix(self, prior=None):
        return np.array([[0.6, 0.25, 0.15], [0.3, 0.5, 0.2], [0.3, 0.3, 0.4]])

    def dp_event(self):
        return EventFields.randomized_response(self.epsilon).dp_event()


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


def test_a_plug_in_is_debiased_by_its_channel_inverse():
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
    channel = mechanism.transition_matrix(SHARES)
    for beta in (0.0, 0.5, 0.9, 0.99):
        mean = channel @ weight_matrix(SHARES, beta)
        expected = (0.05 * np.eye(4) + (0.95 - beta) * np.tile(SHARES, (4, 1))) / (1.0 - beta)
        np.testing.assert_allclose(mean, expected, rtol=0, atol=1e-12)
        assert np.abs(mean - np.eye(4)).max() > 0.01
    exact = channel @ weight_matrix(SHARES, None, epsilon=1.0)
    assert np.abs(exact - np.eye(4)).max() > 1e-3  # lambda of the other mechanism
    right = channel @ debiased(mechanism, np.arange(4), SHARES)
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
        debiased(mechanism, noisy, SHARES),
        debiased(mechanism, noisy, np.tile(SHARES, (30, 1))),
    )


def test_with_a_uniform_prior_the_weights_are_those_of_randomized_response():
    expected = debiased(RandomizedResponse(1.0, 4), np.arange(4))
    found = debiased(PriorResampling(1.0, 4), np.arange(4), np.full(4, 0.25))
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("beta", [None, 0.5])
def test_targets_of_cluster_randomized_response(beta):
    mechanism = ClusterRandomizedResponse(3, 0.1, 2.0, draw_epsilon=2.0, bias_correction=beta)
    clusters = np.arange(60_000) % 2
    labels = (clusters + (np.arange(60_000) % 10 == 0)) % 3
    vault = PrivateLabels(labels, 3, budget=PrivacyBudget(mechanism.epsilon), insecure_seed=2)
    noisy = vault.randomize(mechanism, clusters=clusters)
    targets, distributions = noisy.debiased(), noisy.priors.probabilities
    lambdas = noisy.mechanism.resampling_probabilities(distributions)
    used = (lambdas if beta is None else np.full(2, beta))[clusters, None]
    expected = (np.eye(3)[noisy.values] - used * distributions[clusters]) / (1.0 - used)
    np.testing.assert_allclose(targets, expected, rtol=1e-9, atol=1e-12)
    # Six standard errors of a mean of 60,000 targets, and the bias of the threshold.
    error = 6.0 * targets.std(axis=0) / math.sqrt(60_000)
    bias = 0.0 if beta is None else 0.2 * (0.6 - beta) / (1.0 - beta)
    assert np.all(np.abs(targets.mean(axis=0) - np.eye(3)[labels].mean(axis=0)) < error + bias)


def test_errors_of_resampling():
    mechanism = PriorResampling(1.0, 4)
    with pytest.raises(ValueError, match=r"bias_correction must be in \[0, 1\), got 1.*singular"):
        debiased(mechanism, [0], SHARES, bias_correction=1.0)
    with pytest.raises(ValueError, match=r"1 prior.* probability of about 1.*Pass a"):
        debiased(PriorResampling(1.0, 4, 1.0), [0], SHARES)
    # A least entry of 2^-53 keeps next to no label; weights of 1e15 would be rounding errors.
    with pytest.raises(ValueError, match=r"1 prior\(s\) have a resampling probability"):
        debiased(mechanism, [0, 1], [[1.0, 0.0, 0.0, 0.0], [1 - 3e-9, 1e-9, 1e-9, 1e-9]])
    with pytest.raises(ValueError, match="draws with priors"):
        debiased(mechanism, [0])
    with pytest.raises(ValueError, match=r"must have shape \(4,\) or \(1, 4\)"):
        debiased(mechanism, [0], np.tile(SHARES, (2, 1)))
    with pytest.raises(ValueError, match="costs more than"):
        debiased(PriorResampling(1.0, 4, 0.5), [0], SHARES)
    for other, priors in (
        (RandomizedResponse(1.0, 4), None),
        (RRWithPrior(1.0, 4), SHARES),
    ):
        with pytest.raises(ValueError, match=r"is for PriorResampling, got (RRW|Ran)"):
            debiased(other, [0], priors, bias_correction=0.5)


@pytest.mark.parametrize("epsilon", [1e-3, 0.5, 40.0])
@pytest.mark.parametrize("loss", ["squared_error", "absolute_error"])
def test_unbiased_for_the_mean_of_each_bin(epsilon, loss):
    prior = np.random.default_rng(8).dirichlet(np.full(40, 0.5))
    mechanism = optimal_bins(VALUES, prior, epsilon, loss)
    labels = debiased(mechanism, mechanism.outputs, Priors(prior, values=VALUES))
    expected = mechanism.transition_matrix() @ labels
    bins = np.array(mechanism.bin_of_input)
    means = np.array([np.average(VALUES[bins == j], weights=prior[bins == j]) for j in set(bins)])
    np.testing.assert_allclose(expected, means[bins], rtol=1e-9, atol=1e-9)
    if epsilon == 0.5:  # from the other side: the outputs themselves are biased
        pulled = mechanism.transition_matrix() @ np.array(mechanism.outputs)
        assert np.abs(pulled - means[bins]).max() > 1.0


def test_one_bin_and_an_empty_bin():
    one = RROnBins(1.0, (0.0, 4.0), (1.0,), (0, 0))
    found = debiased(one, [1.0, 1.0], Priors([0.25, 0.75], values=[0.0, 4.0]))
    assert found.tolist() == [3.0, 3.0]
    empty = RROnBins(50.0, (0.0, 4.0), (1.0, 3.5), (0, 1))
    found = debiased(empty, [1.0, 3.5], Priors([1.0, 0.0], values=[0.0, 4.0]))
    assert found == pytest.approx([0.0, 3.5])


@pytest.mark.parametrize(
    ("noisy", "values", "prior", "message"),
    [
        ([0.5, 1.5], [0.0, 1.0], [0.5, 0.5], r"2 noisy label\(s\) are not outputs"),
        ([0.25], [0.0, 1.0], [0.5, 0.6], "must sum to one"),
        ([0.25], [0.0, 9.0], [0.5, 0.5], r"must lie in \[0, 1\]"),
        ([0.25], [1.0, 0.0], [0.5, 0.5], "strictly increasing"),
        ([0.25], None, [0.5, 0.5], "need priors with values, got Priors"),
    ],
)
def test_bad_input_of_bins(noisy, values, prior, message):
    mechanism = RROnBins(1.0, (0.0, 1.0), (0.25, 0.75), (0, 1))
    with pytest.raises(ValueError, match=message):
        debiased(mechanism, noisy, Priors(prior, values=values))


@pytest.mark.parametrize(
    "kind",
    [
        LaplaceMechanism,
        DiscreteLaplaceMechanism,
        StaircaseMechanism,
        DiscreteStaircaseMechanism,
    ],
)
def test_noise_that_is_added_has_no_bias_unless_it_is_clipped(kind):
    """Symmetric about every label, by the law that is drawn."""
    mechanism = kind(0.7, 0, 8, clip=False)
    noisy = mechanism.randomize(np.arange(9.0))
    np.testing.assert_array_equal(debiased(mechanism, noisy), noisy)
    label, distance = 3.0, np.array([0.5, 1.0, 2.0, 5.5, 11.0])
    above, below = (mechanism.likelihood(label + side * distance, [label]) for side in (1, -1))
    np.testing.assert_allclose(above, below, rtol=1e-6)
    assert above.max() > 0.0
    with pytest.raises(ValueError, match=r"clips its noisy labels.*Draw with clip=False"):
        debiased(kind(0.7, 0, 8, clip=True), [1.0, 2.0])


def test_alibi_rows_are_unbiased_as_they_are():
    mechanism = ALIBI(2.0, 3)
    labels = np.arange(60_000) % 3
    rows = mechanism.randomize(labels, rng=np.random.default_rng(10))
    found = debiased(mechanism, rows)
    assert found.dtype == np.float64 and not np.shares_memory(found, rows)
    np.testing.assert_array_equal(found, rows)
    means = np.array([found[labels == c].mean(axis=0) for c in range(3)])
    error = mechanism.noise_stddev / np.sqrt(20_000)
    assert np.abs(means - np.eye(3)).max() < 6.0 * error < 0.1


@pytest.mark.parametrize("alpha", [0.05, 0.45])
def test_peer_reports_are_unbiased_for_the_label_of_the_peer(alpha):
    mechanism = PeerToPeerRandomizedResponse.for_cluster_size(alpha, 0.5, 3, 0.0)
    weights = debiased(mechanism, [0, 1])
    channel = np.array([[1 - alpha, alpha], [alpha, 1 - alpha]])
    np.testing.assert_allclose(channel @ weights, np.eye(2), atol=1e-12)
    with pytest.raises(ValueError, match=r"must lie in 0\.\.1"):
        debiased(mechanism, [0, -1])  # of who reports nothing there is nothing to debias


def test_other_mechanisms():
    with pytest.raises(TypeError, match=r"bias of labels drawn by ExponentialMechanism is unknown"):
        debiased(ExponentialMechanism(1.0, 0.0, 1.0), [0.5])
    with pytest.raises(TypeError, match="must be a tf_labeldp mechanism, got NoneType"):
        debiased(None, [0.5], Priors([0.5, 0.5], values=[0.0, 1.0]))


@pytest.mark.parametrize("parent", [LabelMechanism, RegressionMechanism])
def test_a_plug_in_states_that_its_noisy_labels_are_unbiased(parent):
    class Plain(parent):
        epsilon = 1.0
        label_range = likelihood = check_output = randomize = None

    class Unbiased(Plain):
        def check_unbiased(self):
            pass

    with pytest.raises(TypeError, match="the bias of labels drawn by Plain is unknown"):
        debiased(Plain(), [0.5, 2.0])
    assert debiased(Unbiased(), [0.5, 2.0]).tolist() == [0.5, 2.0]
