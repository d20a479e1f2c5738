"""Unbiased channels: exact bias, privacy, optimality, and ranges in which there is none."""

from __future__ import annotations

import itertools
import math
import re
from fractions import Fraction

import bins_oracles
import numpy as np
import pytest
from _unbiased_channel import unbiased_channel
from scipy import optimize, sparse

LOSSES = ("squared_error", "absolute_error")


def largest_bias(channel):
    """max |E[out | v] - v| in exact arithmetic, in units of the range of the labels."""
    outputs = [Fraction(output) for output in channel.outputs]
    matrix = channel.transition_matrix()
    width = Fraction(channel.inputs[-1]) - Fraction(channel.inputs[0])
    biases = [
        sum(Fraction(p) * o for p, o in zip(row.tolist(), outputs, strict=True)) - Fraction(v)
        for row, v in zip(matrix, channel.inputs, strict=True)
    ]
    return float(max(map(abs, biases)) / width)


def margin(width, epsilon):
    """How far the outputs must reach beyond the labels, on either side."""
    return width / math.expm1(epsilon)


def program_of_all_pairs(values, prior, epsilon, loss, outputs):
    """The least loss of an unbiased channel into these outputs, by all pairs of inputs."""
    k, m = values.size, outputs.size
    one = np.eye(k)
    differences = [one[y] * math.exp(-epsilon) - one[z] for y in range(k) for z in range(k)]
    privacy = sparse.kron(np.array(differences), sparse.identity(m)).tocsr()
    scale = np.abs(outputs).max()
    moments = sparse.vstack([sparse.kron(one, np.ones(m)), sparse.kron(one, outputs / scale)])
    cost = prior[:, np.newaxis] * bins_oracles.loss_table(outputs, values, loss).T
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
def test_the_noisy_label_is_right_on_average_and_private(epsilon, size):
    rng = np.random.default_rng([size, int(100 * epsilon)])
    for start, step in ((0.0, 1.0), (1e6, 0.25), (-300.0, 40.0)):
        values = start + step * np.sort(rng.choice(50, size, replace=False))
        prior = rng.dirichlet(np.full(size, 0.5))
        channel = unbiased_channel(values, prior, epsilon, "squared_error")
        assert channel.epsilon == epsilon and channel.inputs == tuple(values)
        assert largest_bias(channel) <= 1e-12
        ratio = worst_log_ratio(channel.transition_matrix())
        assert ratio <= epsilon + 1e-13
        assert ratio >= min(epsilon, 20.0) * (1 - 2e-7) - 1e-6  # all of the budget is used


def test_values_without_probability_are_unbiased_too():
    channel = unbiased_channel(range(6), [0.0, 0.5, 0.0, 0.0, 0.5, 0.0], 1.0, "squared_error")
    assert largest_bias(channel) <= 1e-12


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("epsilon", [0.1, 8.0])
def test_two_labels_need_binary_randomized_response(loss, epsilon):
    """Closed form: outputs at the smallest range, each kept with e^eps / (1 + e^eps)."""
    low, high, prior = -1.0, 3.0, (0.3, 0.7)
    reach = margin(high - low, epsilon)
    keep = 1.0 / (1.0 + math.exp(-epsilon))
    near, far = (
        (reach, high - low + reach)
        if loss == "absolute_error"
        else (reach**2, (high - low + reach) ** 2)
    )
    closed_form = keep * near + (1.0 - keep) * far
    for spread in (None, (low - 5 * reach, high + 9 * reach)):
        channel = unbiased_channel([low, high], prior, epsilon, loss, spread)
        assert channel.expected_loss(prior, loss) == pytest.approx(closed_form, rel=5e-6)
        assert channel.expected_loss(prior, loss) >= closed_form * (1 - 1e-9)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("epsilon", [0.3, 8.0])
@pytest.mark.parametrize("prior", [(0.2, 0.5, 0.3), (0.02, 0.9, 0.02, 0.04, 0.02)])
def test_as_good_as_the_program_on_a_finer_grid(loss, epsilon, prior):
    prior = np.array(prior)
    values = np.arange(prior.size) * 1.0
    channel = unbiased_channel(values, prior, epsilon, loss)
    reach = margin(values[-1], epsilon / 2)  # the default
    fine = np.union1d(np.linspace(-reach, values[-1] + reach, 401), values)
    best = program_of_all_pairs(values, prior, epsilon, loss, fine)
    found = channel.expected_loss(prior, loss)
    assert 0.99 * best <= found <= 1.001 * best
    own = program_of_all_pairs(values, prior, epsilon, loss, np.array(channel.outputs))
    assert found == pytest.approx(own, rel=5e-6)


@pytest.mark.parametrize("epsilon", [0.5, 5.0])
def test_a_wider_range_never_costs_and_a_tight_one_costs_much(epsilon):
    values, prior = np.arange(8.0), np.full(8, 0.125)
    losses = []
    for factor in (1.0 + 1e-6, 1.3, 2.0, 4.0):
        reach = factor * margin(7.0, epsilon)
        channel = unbiased_channel(values, prior, epsilon, "squared_error", (-reach, 7.0 + reach))
        assert -reach <= channel.outputs[0] and channel.outputs[-1] <= 7.0 + reach
        losses.append(channel.expected_loss(prior))
    reach = margin(7.0, epsilon)
    two_outputs = float(prior @ ((values + reach) * (7.0 + reach - values)))
    assert losses[0] == pytest.approx(two_outputs, rel=1e-4)
    assert all(after <= before * 1.001 for before, after in itertools.pairwise(losses))
    default = unbiased_channel(values, prior, epsilon, "squared_error").expected_loss(prior)
    assert default <= min(losses) * 1.001
    if epsilon > 1.0:
        assert default < 0.7 * losses[0]


@pytest.mark.parametrize("loss", LOSSES)
def test_the_price_of_no_bias(loss):
    """Without the equations for the means the same outputs allow a smaller loss."""
    values, prior = np.arange(6.0), np.array([0.4, 0.2, 0.1, 0.1, 0.1, 0.1])
    for epsilon in (0.5, 2.0):
        channel = unbiased_channel(values, prior, epsilon, loss)
        free = bins_oracles.best_channel_loss(values, prior, epsilon, loss, channel.outputs)
        assert free < 0.9 * channel.expected_loss(prior, loss)


def test_the_poisson_loss():
    values, prior = np.arange(20.0, 26.0), np.full(6, 1 / 6)
    channel = unbiased_channel(values, prior, 2.0, "poisson")
    assert largest_bias(channel) <= 1e-12
    assert channel.outputs[0] > 0.0
    by_square = unbiased_channel(values, prior, 2.0, "squared_error")
    assert channel.expected_loss(prior, "poisson") <= by_square.expected_loss(prior, "poisson")


def test_one_value_is_its_own_channel():
    channel = unbiased_channel([5.0], [1.0], 1.0, "squared_error")
    assert channel.outputs == (5.0,) and channel.transition_matrix().tolist() == [[1.0]]


@pytest.mark.parametrize("epsilon", [0.2, 6.0])
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_a_range_that_is_too_narrow_is_refused_with_the_smallest_that_works(epsilon, side):
    values, prior = np.array([1.0, 2.0, 4.0]), (0.2, 0.3, 0.5)
    reach = margin(3.0, epsilon)
    wide, narrow = 3.0 * reach, 0.999 * reach
    left = narrow if side in ("left", "both") else wide
    right = narrow if side in ("right", "both") else wide
    with pytest.raises(ValueError, match="leave no unbiased epsilon-DP channel") as caught:
        unbiased_channel(values, prior, epsilon, "squared_error", (1.0 - left, 4.0 + right))
    found = re.search(r"need output_range=\((\S+), (\S+)\) at least", str(caught.value))
    smallest = float(found[1]), float(found[2])
    assert smallest == pytest.approx((1.0 - reach, 4.0 + reach), rel=1e-5)
    channel = unbiased_channel(values, prior, epsilon, "squared_error", smallest)
    assert largest_bias(channel) <= 1e-12


@pytest.mark.parametrize("epsilon", [0.2, 6.0])
def test_the_smallest_range_is_the_truth_and_not_the_solver(epsilon):
    """Just below it even the two ends alone have no unbiased channel, by any outputs."""
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


def bad(values=(0.0, 1.0), prior=(0.5, 0.5), epsilon=1.0, loss="squared_error", spread=None):
    return values, prior, epsilon, loss, spread


BAD = {
    "many": (bad(range(65), [1 / 65] * 65), r"at most 64 values, got 65.*rounding_grid"),
    "order": (bad((1.0, 0.0)), "values must be strictly increasing"),
    "prior": (bad(prior=(0.5, 0.6)), "probabilities must sum to one"),
    "epsilon": (bad(epsilon=0.0), "epsilon must be finite and above zero"),
    "loss": (bad(loss="mse"), "loss must be one of"),
    "ends": (bad(spread=(2.0, -2.0)), "low must be below high"),
    "poisson": (bad(loss="poisson"), r"outputs must start at -0\.58.*squared_error"),
    "negative": (bad((-1.0, 1.0), loss="poisson"), "Poisson loss needs labels of at least zero"),
    "poisson-range": (
        bad((10.0, 11.0), loss="poisson", spread=(-1.0, 20.0)),
        r"Poisson loss needs outputs above zero.*Start it between 0 and 9\.4",
    ),
}


def test_bad_input():
    for arguments, message in BAD.values():
        with pytest.raises(ValueError, match=message):
            unbiased_channel(*arguments)


@pytest.mark.slow
def test_as_many_values_as_allowed():
    values, prior = np.arange(64.0), np.full(64, 1 / 64)
    channel = unbiased_channel(values, prior, 8.0, "squared_error")
    assert largest_bias(channel) <= 1e-12
    assert channel.expected_loss(prior) < 0.005 * 63**2


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [1e-6, 1e-4, 0.01, 15.0, 50.0])
def test_epsilon_at_which_the_solver_has_no_digits_left(epsilon):
    """Whatever the solver makes of it, the channel is private and unbiased."""
    for size, concentration in ((2, 1.0), (4, 1e-3), (10, 1.0), (23, 1.0)):
        rng = np.random.default_rng([size, int(epsilon * 1e6)])
        prior = rng.dirichlet(np.full(size, concentration))
        channel = unbiased_channel(np.arange(float(size)), prior, epsilon, "squared_error")
        width = channel.outputs[-1] - channel.outputs[0]
        means = channel.transition_matrix() @ np.array(channel.outputs)
        assert np.abs(means - np.arange(size)).max() <= 1e-9 * width
        matrix = channel.transition_matrix()
        ratio = np.log(matrix.max(axis=0)) - np.log(matrix.min(axis=0))
        assert ratio.max() <= epsilon * (1 + 1e-6) + 1e-9
