"""Optimal bins: against the linear program, against Algorithm 2 as printed, and their edges."""

from __future__ import annotations

import bins_oracles
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_labeldp.mechanisms import RROnBins, optimal_bins
from tf_labeldp.mechanisms.bin_losses import segment_costs

LOSSES = ("squared_error", "absolute_error", "poisson")


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("epsilon", [0.05, 1.0, 4.0])
@pytest.mark.holds("mechanisms.optimal_bins")
def test_theorem_5_no_epsilon_dp_channel_is_better(loss, epsilon):
    """Equal to the linear program over a fine output grid that holds the outputs found."""
    rng = np.random.default_rng([7, int(100 * epsilon), LOSSES.index(loss)])
    for size in (2, 12):
        values = np.sort(rng.choice(40, size, replace=False)).astype(float)
        prior = rng.dirichlet(np.full(size, 0.7))
        mechanism = optimal_bins(values, prior, epsilon, loss)
        grid = np.union1d(np.linspace(values[0], values[-1], 121), mechanism.outputs)
        best = bins_oracles.best_channel_loss(values, prior, epsilon, loss, grid)
        scale = np.ptp(bins_oracles.loss_table(grid[grid > 0], values, loss))
        mine = mechanism.expected_loss(prior, loss)
        assert mine == pytest.approx(best, abs=1e-6 * scale)
        # From the other side: the bins for another epsilon are told from the best ones.
        if size == 12 and loss == "squared_error" and 0.5 <= epsilon <= 2.0:
            other = optimal_bins(values, prior, 3.0 * epsilon, loss)
            worse = RROnBins(epsilon, values, other.outputs, other.bin_of_input)
            assert worse.expected_loss(prior, loss) > best + 1e-4 * scale


@pytest.mark.parametrize("loss", LOSSES)
def test_algorithm_2_as_printed_at_k_200(loss):
    """And at sizes at which the search for cuts halves its range once, or not at all."""
    rng = np.random.default_rng(200)
    for size, epsilon in ((47, 1.0), (48, 3.0), (49, 0.1), (97, 8.0), (200, 1.0), (200, 8.0)):
        values = np.sort(rng.gamma(1.0, 50.0, size))
        prior = rng.dirichlet(np.full(size, 0.5))
        expected = bins_oracles.cubic_table_loss(values, prior, epsilon, loss)
        mine = optimal_bins(values, prior, epsilon, loss).expected_loss(prior, loss)
        assert mine == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("loss", LOSSES)
def test_algorithm_2_as_printed_on_many_instances(loss):
    rng = np.random.default_rng(3)
    for _ in range(150):
        size = int(rng.integers(1, 25))
        values = np.abs(rng.standard_t(1.5, size)) * 10.0 ** rng.uniform(-3, 3)
        values = np.unique(np.append(values, 0.0))  # zero is the common count
        prior = rng.dirichlet(np.full(values.size, rng.choice([0.05, 1.0, 10.0])))
        prior = np.where(prior < 1e-14, 0.0, prior) / prior.sum()
        epsilon = float(rng.choice([1e-6, 1e-3, 0.05, 0.3, 1, 2, 3, 5, 8, 15, 30]))
        mechanism = optimal_bins(values, prior, epsilon, loss)
        expected = bins_oracles.cubic_table_loss(values, prior, epsilon, loss)
        assert mechanism.expected_loss(prior, loss) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("loss", LOSSES)
def test_segment_costs_are_monge(loss):
    """The claim proved in the docstring of optimal_bins, on random a <= b <= c <= d."""
    rng = np.random.default_rng(11)
    for epsilon in (0.1, 1.0, 4.0):
        values = np.sort(rng.gamma(0.7, 10.0, 60))
        costs = segment_costs(loss, values, rng.dirichlet(np.full(60, 0.5)), epsilon)
        a, b, c, d = np.sort(rng.integers(0, 61, (4, 20_000)), axis=0)
        fits = (a < b) & (b < c) & (c < d)
        a, b, c, d = a[fits], b[fits], c[fits], d[fits]
        gap = costs.cost(a, d) + costs.cost(b, c) - costs.cost(a, c) - costs.cost(b, d)
        assert gap.min() >= -1e-13
        assert gap.max() > 1e-4


def test_poisson_outputs_stay_above_zero():
    """A bin of zeros alone has a small positive mean: at zero the loss of the others is endless."""
    for values, prior in (([0.0, 1.0], [1 - 1e-12, 1e-12]), ([0.0, 1.0, 2.0], [0.4, 0.3, 0.3])):
        mechanism = optimal_bins(values, prior, 40.0, "poisson")
        assert mechanism.outputs[0] > 0.0
        assert np.isfinite(mechanism.expected_loss(prior, "poisson"))


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=12),
    weights=st.lists(st.sampled_from([0.0, 1e-12, 0.1, 1.0]), min_size=12, max_size=12),
    epsilon=st.floats(1e-6, 60.0),
    loss=st.sampled_from(LOSSES),
)
def test_any_input_gives_a_sound_mechanism(values, weights, epsilon, loss):
    if loss == "poisson":
        values = [abs(value) for value in values]
    prior = np.array(weights[: len(values)])
    prior[0] += 1e-3
    prior /= prior.sum()
    mechanism = optimal_bins(values, prior, epsilon, loss)
    assert mechanism.inputs == tuple(np.unique(values).tolist())
    bins = np.array(mechanism.bin_of_input)
    assert np.all(np.diff(bins) >= 0)
    low, high = mechanism.label_range()
    assert low <= mechanism.outputs[0] and mechanism.outputs[-1] <= high
    matrix = mechanism.transition_matrix()
    np.testing.assert_allclose(matrix.sum(axis=1), 1.0, rtol=0, atol=1e-12)
    # Every output is in use; one that no label maps to would only add noise.
    assert set(bins) == set(range(mechanism.num_bins))


def test_equal_values_are_merged_and_order_is_free():
    one = optimal_bins([3.0, 0.0, 3.0, 1.0], [0.25, 0.25, 0.25, 0.25], 2.0)
    assert one == optimal_bins([0.0, 1.0, 3.0], [0.25, 0.25, 0.5], 2.0)


def test_a_value_without_probability_goes_to_the_nearest_output_of_its_neighbours():
    mechanism = optimal_bins([0.0, 1.0, 4.0, 6.0, 9.0, 10.0], [0.5, 0, 0, 0, 0, 0.5], 5.0)
    assert mechanism.num_bins == 2
    assert mechanism.bin_of_input == (0, 0, 0, 1, 1, 1)
    alone = optimal_bins([0.0, 10.0], [0.5, 0.5], 5.0)
    assert mechanism.outputs == pytest.approx(alone.outputs)


def test_huge_values_do_not_overflow():
    mechanism = optimal_bins([-1.7e308, 0.0, 1.6e308, 1.7e308], [0.5, 0.0, 0.0, 0.5], 5.0)
    assert mechanism.bin_of_input in ((0, 0, 1, 1), (0, 1, 1, 1))
    assert mechanism.outputs == pytest.approx([-1.66e308, 1.66e308], rel=0.05)


def test_one_value():
    mechanism = optimal_bins([4.5], [1.0], 1.0)
    assert mechanism.outputs == (4.5,) and mechanism.bin_of_input == (0,)
    assert mechanism.randomize(np.full(5, 4.5)).tolist() == [4.5] * 5


def test_a_rare_value_far_away_is_not_lost():
    """Probability 1e-12 at distance 1e8 weighs as much as 1e4 on the rest: it gets a bin."""
    values, prior = [0.0, 1.0, 1e8], [0.5, 0.5 - 1e-12, 1e-12]
    mechanism = optimal_bins(values, prior, 12.0)
    expected = bins_oracles.cubic_table_loss(
        np.array(values), np.array(prior), 12.0, "squared_error"
    )
    assert mechanism.expected_loss(prior) == pytest.approx(expected, rel=1e-9)
    assert mechanism.bin_of_input[1] < mechanism.bin_of_input[2]


def test_epsilon_at_its_ends():
    values, prior = np.arange(5.0), np.array([0.1, 0.2, 0.4, 0.2, 0.1])
    constant = optimal_bins(values, prior, 1e-9)
    assert constant.expected_loss(prior) == pytest.approx(1.2, rel=1e-6)  # the variance
    exact = optimal_bins(values, prior, 700.0)
    assert exact.outputs == pytest.approx(values, abs=1e-12) and exact.expected_loss(prior) < 1e-12
    assert optimal_bins(values, prior, 1e5).num_bins == 5


@pytest.mark.parametrize(
    ("values", "prior", "loss", "message"),
    [
        ([], [], "squared_error", "values must have at least one number"),
        ([0.0, np.nan], [0.5, 0.5], "squared_error", "1 of 2 values are missing"),
        ([0.0, np.inf], [0.5, 0.5], "squared_error", "values must be finite"),
        ([0.0, 1.0], [0.5], "squared_error", r"probabilities must have shape \(2,\)"),
        ([0.0, 1.0], [0.5, 0.6], "squared_error", "must sum to one"),
        ([-1.0, 1.0], [0.5, 0.5], "poisson", "Poisson loss needs labels of at least zero"),
        ([0.0, 1.0], [0.5, 0.5], "mse", "loss must be one of squared_error"),
    ],
)
def test_bad_input(values, prior, loss, message):
    with pytest.raises(ValueError, match=message):
        optimal_bins(values, prior, 1.0, loss)
