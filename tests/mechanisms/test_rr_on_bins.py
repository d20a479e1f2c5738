"""RR-on-Bins: its guarantee from both sides, what it draws, and bad input."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tf_labeldp.mechanisms import RROnBins, optimal_bins

EPSILONS = (0.05, 1.0, 6.0)


def made(epsilon=1.0):
    return RROnBins(epsilon, (0.0, 10.0, 20.0, 50.0, 100.0), (5.0, 20.0, 70.0), (0, 0, 1, 2, 2))


def test_privacy_one_output_says_nothing(worst_log_ratio):
    mechanism = RROnBins(1.0, (0.0, 1.0), (0.5,), (0, 0))
    assert worst_log_ratio(mechanism.transition_matrix()) == 0.0


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_algorithm_1_is_what_is_drawn(epsilon, chi_square_rejects, seeded):
    mechanism = made(epsilon)
    per_input = 20_000
    labels = np.repeat(mechanism.inputs, per_input)
    drawn = mechanism.randomize(labels, rng=seeded())
    columns = np.searchsorted(mechanism.outputs, drawn).reshape(5, per_input)
    counts = np.array([np.bincount(row, minlength=3) for row in columns])
    assert not chi_square_rejects(counts, mechanism.transition_matrix())
    assert chi_square_rejects(counts, made(epsilon * 1.1 + 0.05).transition_matrix())


def test_secure_bits_give_the_same_law(chi_square_rejects):
    mechanism = made(1.0)
    drawn = mechanism.randomize(np.full(100_000, 20.0))
    counts = np.array([np.count_nonzero(drawn == output) for output in mechanism.outputs])
    assert not chi_square_rejects(counts, mechanism.transition_matrix()[2])


def test_a_label_between_inputs_is_the_nearest_one():
    mechanism = made(50.0)  # e^-50: no flip in these few draws
    labels = [0.0, 14.9, 15.0, 15.1, 34.9, 35.1, 100.0]
    assert mechanism.randomize(labels).tolist() == [5.0, 5.0, 5.0, 20.0, 20.0, 70.0, 70.0]


def test_likelihood_is_the_channel_and_zero_elsewhere():
    mechanism = made(2.0)
    found = mechanism.likelihood([5.0, 70.0, 6.0, 1e9], mechanism.inputs)
    np.testing.assert_array_equal(found[:2], mechanism.transition_matrix().T[[0, 2]])
    assert not found[2:].any()
    assert mechanism.delta == 0.0 and mechanism.dp_event().num_buckets == 2


@pytest.mark.parametrize("loss", ["squared_error", "absolute_error", "poisson"])
def test_expected_loss_is_the_sum_over_the_channel(loss):
    mechanism, prior = made(1.5), np.array([0.4, 0.3, 0.2, 0.1, 0.0])
    v, y = np.array(mechanism.outputs), np.array(mechanism.inputs)[:, np.newaxis]
    table = {
        "squared_error": (v - y) ** 2,
        "absolute_error": np.abs(v - y),
        "poisson": v - y * np.log(v),
    }[loss]
    expected = np.sum(prior[:, np.newaxis] * mechanism.transition_matrix() * table)
    assert mechanism.expected_loss(prior, loss) == pytest.approx(expected, rel=1e-13)


def test_expected_loss_is_the_mean_of_draws(seeded):
    values = np.arange(30.0)
    prior = np.random.default_rng(4).dirichlet(np.ones(30))
    mechanism = optimal_bins(values, prior, 1.0)
    rng = seeded()
    labels = rng.choice(values, 200_000, p=prior)
    errors = (mechanism.randomize(labels, rng=rng) - labels) ** 2
    slack = 5.0 * errors.std() / np.sqrt(errors.size)  # five standard errors: 6e-7
    assert abs(errors.mean() - mechanism.expected_loss(prior)) < slack


def test_a_value_that_json_can_hold():
    mechanism = optimal_bins(np.linspace(0, 7, 100), np.full(100, 0.01), 2.5)
    again = RROnBins.from_config(json.loads(json.dumps(mechanism.get_config())))
    assert again == mechanism and hash(again) == hash(mechanism)


def test_repr_is_short():
    mechanism = optimal_bins(np.arange(500.0), np.full(500, 0.002), 7.0)
    assert len(repr(mechanism)) < 200
    assert "inputs=<500 in [0, 499]>" in repr(mechanism)


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        ([-0.1, 5.0], ValueError, r"labels must lie in \[0, 100\], but 1 of 2 do not"),
        ([101.0], ValueError, "clip the labels"),
        ([np.nan], ValueError, "1 of 1 are NaN"),
        ([[1.0]], ValueError, "shape"),
        (["1"], TypeError, "labels must be numbers"),
    ],
)
def test_bad_labels_are_not_shown(labels, error, message):
    with pytest.raises(error, match=message) as caught:
        made().randomize(labels)
    assert "101" not in str(caught.value) and "-0.1" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((0.0, 0.0), (0.0,), (0, 0)), "inputs must be strictly increasing"),
        (((), (), ()), r"inputs must have shape \(k,\)"),
        (((0.0, 1.0), (1.0, 0.0), (0, 1)), "outputs must be strictly increasing"),
        (((0.0, 1.0), (0.5,), (0,)), "one integer for each of the 2 inputs"),
        (((0.0, 1.0), (0.5,), (0.0, 0.0)), "one integer for each of the 2 inputs"),
        (((0.0, 1.0), (0.2, 0.8), (1, 0)), "must not decrease"),
        (((0.0, 1.0), (0.2, 0.8), (0, 2)), r"lie in 0\.\.1"),
        (((0.0, 1.0), (0.2, 1.8), (0, 1)), "outputs must lie in the range of the inputs"),
    ],
)
def test_bad_bins(arguments, message):
    with pytest.raises(ValueError, match=message):
        RROnBins(1.0, *arguments)


def test_priors_are_refused():
    with pytest.raises(ValueError, match="takes no priors"):
        made().randomize([1.0], [0.5, 0.5])
    with pytest.raises(ValueError, match="one channel"):
        made().transition_matrix([0.5, 0.5])
