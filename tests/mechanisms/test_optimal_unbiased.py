"""Unbiased channels: exact bias, privacy, optimality, and the smallest range of outputs."""

from __future__ import annotations

import math
from fractions import Fraction

import bins_oracles
import numpy as np
import pytest
from scipy import optimize, sparse

from tf_labeldp import PrivacyBudget, PrivateLabels, audit, estimation
from tf_labeldp.mechanisms import ChannelMechanism, optimal_unbiased
from tf_labeldp.vault import LabelRandomizer, Numbers


def largest_bias(channel):
    """Returns max |E[out | v] - v| in exact arithmetic, relative to the range of the labels."""
    outputs = [Fraction(output) for output in channel.outputs]
    matrix = channel.transition_matrix()
    width = Fraction(channel.inputs[-1]) - Fraction(channel.inputs[0])
    biases = [
        sum(Fraction(p) * o for p, o in zip(row.tolist(), outputs, strict=True)) - Fraction(v)
        for row, v in zip(matrix, channel.inputs, strict=True)
    ]
    return float(max(map(abs, biases)) / width)


def margin(width, epsilon):
    """Returns how far the outputs have to extend beyond the labels, on either side."""
    return width / math.expm1(epsilon)


def program_of_all_pairs(values, prior, epsilon, outputs):
    """Returns the least squared error of an unbiased channel into these outputs, by all pairs."""
    k, m = values.size, outputs.size
    unit = np.eye(k)
    differences = [unit[y] * math.exp(-epsilon) - unit[z] for y in range(k) for z in range(k)]
    privacy = sparse.kron(np.array(differences), sparse.identity(m)).tocsr()
    scale = np.abs(outputs).max()
    moments = sparse.vstack([sparse.kron(unit, np.ones(m)), sparse.kron(unit, outputs / scale)])
    cost = prior[:, np.newaxis] * bins_oracles.loss_table(outputs, values, "squared_error").T
    result = optimize.linprog(
        cost.ravel() / cost.max(),
        A_ub=privacy,
        b_ub=np.zeros(privacy.shape[0]),
        A_eq=moments.tocsr(),
        b_eq=np.concatenate([np.ones(k), values / scale]),
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    assert result.status == 0
    return result.fun * cost.max()


def worst_log_ratio(matrix):
    logs = np.log(matrix[:, matrix.max(axis=0) > 0.0])
    return float((logs.max(axis=0) - logs.min(axis=0)).max())


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 12.0, 50.0])
@pytest.mark.parametrize("size", [2, 9])
@pytest.mark.holds("mechanisms.optimal_unbiased")
def test_noisy_labels_are_unbiased_and_private(epsilon, size):
    rng = np.random.default_rng([size, int(100 * epsilon)])
    for start, step in ((0.0, 1.0), (1e6, 0.25), (-300.0, 40.0)):
        values = start + step * np.sort(rng.choice(50, size, replace=False))
        prior = rng.dirichlet(np.full(size, 0.5))
        channel = optimal_unbiased(values, prior, epsilon)
        assert channel.epsilon == epsilon and channel.inputs == tuple(values)
        assert largest_bias(channel) <= 1e-12 and channel.is_unbiased
        assert len(channel.outputs) <= 2 * size
        ratio = worst_log_ratio(channel.transition_matrix())
        # The channel uses the whole of epsilon, up to 20.
        assert min(epsilon, 20.0) * (1 - 2e-7) - 1e-6 <= ratio <= epsilon + 1e-13


def test_noisy_labels_of_an_unbiased_channel_are_debiased_already():
    channel = optimal_unbiased([0, 1, 5], [0.2, 0.5, 0.3], 1.0)
    noisy = channel.randomize([0, 1, 5, 5], rng=np.random.default_rng(0))
    np.testing.assert_array_equal(estimation.debiased(channel, noisy), noisy)
    # Times in seconds: the range is small against the offset.
    times = optimal_unbiased(1.7e9 + np.arange(8.0), np.full(8, 1 / 8), 8.0)
    noisy = times.randomize(times.inputs)
    np.testing.assert_array_equal(estimation.debiased(times, noisy), noisy)
    biased = ChannelMechanism(1.0, (0.0, 1.0), (0.0, 1.0), ((0.7, 0.3), (0.3, 0.7)))
    with pytest.raises(TypeError, match="the bias of labels drawn by ChannelMechanism is unknown"):
        estimation.debiased(biased, [0.0])


def test_an_audit_finds_most_of_epsilon():
    channel = optimal_unbiased([0, 1, 5], [0.2, 0.5, 0.3], 1.0)
    found = audit.audit_mechanism(channel, draws=60_000, seed=0)
    assert 0.8 < found.lower_bound <= 1.0 and not found.refutes
    assert audit.audit_mechanism(channel, claimed=0.8, draws=60_000, seed=0).refutes


def test_equal_values_merge_and_a_single_one_is_refused():
    merged = optimal_unbiased([5, 0, 1, 5], [0.1, 0.2, 0.5, 0.2], 1.0)
    assert merged == optimal_unbiased([0, 1, 5], [0.2, 0.5, 0.3], 1.0)
    with pytest.raises(ValueError, match="expected at least two different values, got one"):
        optimal_unbiased([2.0, 2.0], [0.5, 0.5], 1.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.arange(129.0), "expected at most 128 values of an unbiased channel, got 129"),
        ([1e15, 1e15 + 1.0], "distances that doubles resolve at epsilon=9"),
        ([-1.7e308, 1.7e308], "distances that doubles resolve at epsilon=9"),
    ],
)
def test_values_without_a_channel_are_refused_before_a_charge(values, message):
    values = np.array(values)
    with pytest.raises(ValueError, match=message):
        optimal_unbiased(values, np.full(values.size, 1 / values.size), 9.0)
    budget = PrivacyBudget(12.0)
    labels = PrivateLabels(np.tile(values, 9), Numbers(values[0], values[-1]), budget=budget)
    with pytest.raises(ValueError, match=r"expected at most 128|doubles resolve"):
        labels.randomize(LabelRandomizer(12.0, values=tuple(values), unbiased=True))
    assert labels.receipts == ()


def test_values_without_probability_are_unbiased_too():
    channel = optimal_unbiased(range(6), [0.0, 0.5, 0.0, 0.0, 0.5, 0.0], 1.0)
    assert largest_bias(channel) <= 1e-12


@pytest.mark.parametrize("epsilon", [0.1, 8.0])
def test_two_labels_need_binary_randomized_response(epsilon):
    """Closed form: outputs at the smallest range, each kept with e^eps / (1 + e^eps)."""
    low, high, prior = -1.0, 3.0, (0.3, 0.7)
    reach = margin(high - low, epsilon)
    keep = 1.0 / (1.0 + math.exp(-epsilon))
    closed_form = keep * reach**2 + (1.0 - keep) * (high - low + reach) ** 2
    found = optimal_unbiased([low, high], prior, epsilon).expected_loss(prior)
    assert closed_form * (1 - 1e-9) <= found <= closed_form * (1 + 5e-6)


@pytest.mark.parametrize("epsilon", [0.3, 8.0])
@pytest.mark.parametrize("prior", [(0.2, 0.5, 0.3), (0.02, 0.9, 0.02, 0.04, 0.02)])
def test_as_good_as_the_program_on_a_finer_grid(epsilon, prior):
    prior = np.array(prior)
    values = np.arange(prior.size) * 1.0
    channel = optimal_unbiased(values, prior, epsilon)
    reach = margin(values[-1], epsilon / 2)
    fine = np.union1d(np.linspace(-reach, values[-1] + reach, 401), values)
    best = program_of_all_pairs(values, prior, epsilon, fine)
    found = channel.expected_loss(prior)
    assert 0.99 * best <= found <= 1.001 * best
    same_outputs = program_of_all_pairs(values, prior, epsilon, np.array(channel.outputs))
    assert found == pytest.approx(same_outputs, rel=5e-6)


def test_the_price_of_no_bias():
    """Without the equations for the means the same outputs allow a smaller loss."""
    values, prior = np.arange(6.0), np.array([0.4, 0.2, 0.1, 0.1, 0.1, 0.1])
    for epsilon in (0.5, 2.0):
        channel = optimal_unbiased(values, prior, epsilon)
        free = bins_oracles.best_channel_loss(
            values, prior, epsilon, "squared_error", channel.outputs
        )
        assert free < 0.9 * channel.expected_loss(prior)


@pytest.mark.parametrize("epsilon", [0.2, 6.0])
def test_the_smallest_range_is_the_truth_and_not_the_solver(epsilon):
    """Just below it even the two ends alone have no unbiased channel."""
    for factor, status in ((1.001, 0), (0.999, 2)):
        reach = factor * margin(1.0, epsilon)
        outputs = np.linspace(-reach, 1.0 + reach, 60)
        k, m = 2, outputs.size
        eye = np.eye(m)
        result = optimize.linprog(
            np.zeros(k * m),
            A_ub=np.block([[eye, -math.exp(epsilon) * eye], [-math.exp(epsilon) * eye, eye]]),
            b_ub=np.zeros(2 * m),
            A_eq=np.concatenate([np.kron(np.eye(2), np.ones(m)), np.kron(np.eye(2), outputs)]),
            b_eq=[1.0, 1.0, 0.0, 1.0],
            method="highs",
        )
        assert result.status == status


@pytest.mark.slow
def test_many_values():
    values, prior = np.arange(64.0), np.full(64, 1 / 64)
    channel = optimal_unbiased(values, prior, 8.0)
    assert largest_bias(channel) <= 1e-12
    assert channel.expected_loss(prior) < 0.005 * 63**2


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [1e-6, 1e-4, 0.01, 15.0, 50.0])
def test_epsilon_at_which_the_solver_has_no_digits_left(epsilon):
    """The channel is private and unbiased even if the solver fails."""
    for size, concentration in ((2, 1.0), (4, 1e-3), (10, 1.0), (23, 1.0)):
        rng = np.random.default_rng([size, int(epsilon * 1e6)])
        prior = rng.dirichlet(np.full(size, concentration))
        channel = optimal_unbiased(np.arange(float(size)), prior, epsilon)
        width = channel.outputs[-1] - channel.outputs[0]
        means = channel.transition_matrix() @ np.array(channel.outputs)
        assert np.abs(means - np.arange(size)).max() <= 1e-9 * width
        matrix = channel.transition_matrix()
        ratio = np.log(matrix.max(axis=0)) - np.log(matrix.min(axis=0))
        assert ratio.max() <= epsilon * (1 + 1e-6) + 1e-9
