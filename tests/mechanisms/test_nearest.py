"""The rule for labels between two public values."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_labeldp.mechanisms._bins import nearest_index

HUGE = sys.float_info.max
TINY = 5e-324
FINITE = st.floats(allow_nan=False, allow_infinity=False)


def test_ties_go_to_the_smaller_and_the_ends_hold_what_lies_beyond():
    found = nearest_index(
        (0.0, 1.0, 3.0), [-np.inf, -9.0, 0.5, 0.5 + 1e-9, 2.0, 2.0001, 9.0, np.inf]
    )
    assert found.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert found.dtype == np.int64


def test_one_value_takes_all():
    assert nearest_index([7.0], [[-1e300, 7.0], [8.0, 1e300]]).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("values", [(-HUGE, HUGE), (0.5 * HUGE, HUGE), (-HUGE, -0.5 * HUGE, HUGE)])
def test_huge_values_do_not_overflow(values):
    assert nearest_index(values, values).tolist() == list(range(len(values)))
    assert nearest_index((-HUGE, HUGE), [-1.0, 0.0, 1.0]).tolist() == [0, 0, 1]


@pytest.mark.parametrize("start", [1.0, 1.0 + 2**-52, 2.0**53, -3.0, 0.0, TINY, 3 * TINY])
def test_neighbouring_doubles_are_nearest_to_themselves(start):
    values = [start]
    for _ in range(6):
        values.append(float(np.nextafter(values[-1], np.inf)))
    assert nearest_index(values, values).tolist() == list(range(7))


@settings(max_examples=200, deadline=None)
@given(values=st.lists(FINITE, min_size=1, max_size=8, unique=True), label=FINITE)
def test_any_value_is_its_own_and_no_other_is_nearer(values, label):
    values = sorted({value + 0.0 for value in values})
    assert nearest_index(values, values).tolist() == list(range(len(values)))
    chosen = int(nearest_index(values, [label])[0])
    # Halved, as the distance of two huge numbers overflows; two roundings each are allowed for.
    distances = np.abs(0.5 * np.array(values) - 0.5 * label)
    assert distances[chosen] <= distances.min() * (1 + 2**-50) + 2**-50 * abs(label) + 4 * TINY
