"""Projections on simplices against oracles, the conditions of optimality, and each other."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

# The sets of the hull solver, which a projection shows to its gap alone.
from tf_labeldp.gradients.hull import CoefficientSet, project_onto_simplex

matrices = hnp.arrays(
    np.float64,
    st.tuples(st.integers(1, 4), st.integers(1, 6)),
    elements=st.floats(-1e3, 1e3, allow_nan=False, width=32),
)
totals = st.floats(0.01, 10.0)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.9, -0.2, 0.4], [0.75, 0.0, 0.25]),  # simplex_p1
        ([0.8, 0.5, -0.3, 0.1], [0.65, 0.35, 0.0, 0.0]),  # simplex_p2
        ([5.0, 5.0, 5.0], [1 / 3, 1 / 3, 1 / 3]),
    ],
    ids=["oracle_1", "oracle_2", "ties"],
)
def test_known_projections(values, expected):
    np.testing.assert_allclose(project_onto_simplex(values), expected, atol=1e-6)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(matrices, totals)
def test_conditions_of_optimality(values, total):
    """p is the projection of v iff <v - p, q - p> <= 0 for each vertex q of the simplex."""
    p = project_onto_simplex(values, total).numpy()
    assert np.all(p >= 0.0)
    np.testing.assert_allclose(p.sum(axis=1), total, rtol=1e-9)
    to_best_vertex = total * (values - p).max(axis=1) - np.sum((values - p) * p, axis=1)
    scale = total * (1.0 + np.abs(values).max())
    assert np.all(to_best_vertex <= 1e-9 * scale)


def test_single_precision_keeps_the_sum_with_many_entries_and_far_values():
    rng = np.random.default_rng(0)
    values = rng.normal(size=20_000).astype(np.float32) * 1e-3 + 500.0
    p = project_onto_simplex(values).numpy()
    assert abs(p.sum(dtype=np.float64) - 1.0) < 1e-4
    exact = project_onto_simplex(values.astype(np.float64)).numpy()
    np.testing.assert_allclose(p, exact, atol=1e-5)


def test_rows_of_nan_stay_nan():
    p = project_onto_simplex([[np.nan, 1.0], [0.0, 1.0]]).numpy()
    assert np.all(np.isnan(p[0]))
    np.testing.assert_array_equal(p[1], [0.0, 1.0])


@pytest.mark.parametrize("hull", ["joint", "per_example"])
@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(values=matrices, bits=st.integers(1, 15))
def test_sets_keep_their_sums_and_padding_at_zero(hull, values, bits):
    mask = np.array([bits >> i & 1 for i in range(len(values))])
    hypothesis.assume(mask.any())
    feasible = CoefficientSet.of(hull, mask, len(values), tf.float64)
    a = feasible.project(tf.constant(values)).numpy()
    assert np.all(a >= 0.0)
    assert np.all(a[mask == 0] == 0.0)
    kept = values[mask == 1]
    if hull == "joint":
        alone = project_onto_simplex(kept.ravel()).numpy().reshape(kept.shape)
    else:
        alone = project_onto_simplex(kept, 1.0 / len(kept)).numpy()
    np.testing.assert_allclose(a[mask == 1], alone, atol=1e-9)


@pytest.mark.parametrize("hull", ["joint", "per_example"])
def test_the_lowest_vertex_has_the_smallest_product(hull):
    gradient = np.random.default_rng(0).normal(size=(3, 2))
    gradient[1, 0] = -50.0  # the smallest entry, but padding
    feasible = CoefficientSet.of(hull, [1, 0, 1], 3, tf.float64)
    vertex = feasible.lowest_vertex(tf.constant(gradient)).numpy()
    if hull == "joint":
        expected = np.min(gradient[[0, 2]])
    else:
        expected = np.mean(np.min(gradient[[0, 2]], axis=1))
    np.testing.assert_allclose(np.sum(vertex * gradient), expected)
    np.testing.assert_allclose(vertex.sum(), 1.0)
    np.testing.assert_array_equal(vertex[1], [0.0, 0.0])
