"""RR-on-Bins: draws, the nearest input of a label, and bad bins."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_labeldp.mechanisms import RROnBins, optimal_bins

EPSILONS = (0.05, 6.0)


def mechanism_at(epsilon=1.0):
    return RROnBins(epsilon, (0.0, 10.0, 20.0, 50.0, 100.0), (5.0, 20.0, 70.0), (0, 0, 1, 2, 2))


def test_one_output_reveals_nothing(worst_log_ratio):
    mechanism = RROnBins(1.0, (0.0, 1.0), (0.5,), (0, 0))
    assert worst_log_ratio(mechanism.transition_matrix()) == 0.0


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_algorithm_1_is_what_is_drawn(epsilon, chi_square_rejects, seeded):
    mechanism = mechanism_at(epsilon)
    per_input = 20_000
    labels = np.repeat(mechanism.inputs, per_input)
    drawn = mechanism.randomize(labels, rng=seeded())
    columns = np.searchsorted(mechanism.outputs, drawn).reshape(5, per_input)
    counts = np.array([np.bincount(row, minlength=3) for row in columns])
    assert not chi_square_rejects(counts, mechanism.transition_matrix())
    assert chi_square_rejects(counts, mechanism_at(epsilon * 1.1 + 0.05).transition_matrix())


def test_a_label_between_inputs_is_the_nearest_one():
    mechanism = mechanism_at(50.0)  # e^-50: no flip in these few draws
    labels = [0.0, 14.9, 15.0, 15.1, 34.9, 35.1, 100.0]
    assert mechanism.randomize(labels).tolist() == [5.0, 5.0, 5.0, 20.0, 20.0, 70.0, 70.0]


def test_likelihood_is_the_channel_and_zero_elsewhere():
    mechanism = mechanism_at(2.0)
    found = mechanism.likelihood([5.0, 70.0, 6.0, 1e9], mechanism.inputs)
    np.testing.assert_array_equal(found[:2], mechanism.transition_matrix().T[[0, 2]])
    assert not found[2:].any()
    assert mechanism.delta == 0.0 and mechanism.dp_event().num_buckets == 2


def test_repr_is_short():
    mechanism = optimal_bins(np.arange(500.0), np.full(500, 0.002), 7.0)
    assert len(repr(mechanism)) < 200
    assert "inputs=<500 in [0, 499]>" in repr(mechanism)


HUGE, TINY = sys.float_info.max, 5e-324


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(
        st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=8, unique=True
    ),
    share=st.floats(0.0, 1.0),
)
def test_a_value_is_its_own_input_and_none_is_nearer_to_a_label(values, share):
    values = sorted({value + 0.0 for value in values})
    label = min(max((1.0 - share) * values[0] + share * values[-1], values[0]), values[-1])
    by_input = RROnBins(40.0, values, values, range(len(values)))
    assert by_input.bin_of(values).tolist() == list(range(len(values)))
    chosen = int(by_input.bin_of([label])[0])
    # Halved, as the distance of two huge numbers overflows; two roundings each are allowed for.
    distances = np.abs(0.5 * np.array(values) - 0.5 * label)
    assert distances[chosen] <= distances.min() * (1 + 2**-50) + 2**-50 * abs(label) + 4 * TINY


def test_nearest_inputs_at_the_ends_of_the_doubles():
    def bins(values, labels):
        return RROnBins(40.0, values, values, range(len(values))).bin_of(labels).tolist()

    assert bins((0.0, 1.0, 3.0), [0.0, 0.5, 0.5 + 1e-9, 2.0, 2.0001, 3.0]) == [0, 0, 1, 1, 2, 2]
    for values in ((-HUGE, HUGE), (0.5 * HUGE, HUGE), (-HUGE, -0.5 * HUGE, HUGE)):
        assert bins(values, values) == list(range(len(values)))
    assert bins((-HUGE, HUGE), [-1.0, 0.0, 1.0]) == [0, 0, 1]
    for start in (1.0, 2.0**53, -3.0, 0.0, TINY):
        values = [start]
        for _ in range(6):
            values.append(float(np.nextafter(values[-1], np.inf)))
        assert bins(values, values) == list(range(7))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((0.0, 0.0), (0.0,), (0, 0)), "inputs must be strictly increasing"),
        (((), (), ()), "inputs must have at least one number"),
        (((0.0, 1.0), (0.5,), (0,)), "one integer for each of the 2 inputs"),
        (((0.0, 1.0), (0.2, 0.8), (1, 0)), "must not decrease"),
        (((0.0, 1.0), (0.2, 0.8), (0, 2)), r"lie in 0\.\.1"),
        (((0.0, 1.0), (0.2, 1.8), (0, 1)), "outputs must lie in the range of the inputs"),
    ],
)
def test_bad_bins(arguments, message):
    with pytest.raises(ValueError, match=message):
        RROnBins(1.0, *arguments)
