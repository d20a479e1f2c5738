"""The projection onto the span against least squares on the matrix itself."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.gradients import GradientOperator, project_onto_span


def exact_projection(matrix, target, mask=None, labels=3):
    if mask is not None:
        matrix = matrix[:, np.repeat(np.asarray(mask, bool), labels)]
    return matrix @ np.linalg.lstsq(matrix, target, rcond=1e-10)[0]


@pytest.mark.parametrize(
    ("kind", "mask"),
    [("dense", None), ("conv", [1, 0, 1, 1, 0]), ("two_inputs", None)],
    ids=["dense", "mask", "two_inputs"],
)
@pytest.mark.holds("gradients.project_onto_span")
def test_the_point_is_the_exact_projection(kind, mask, case_of, flat, like_variables):
    case = case_of(kind)
    matrix = case.matrix()
    target = np.random.default_rng(0).normal(size=matrix.shape[0])
    exact = exact_projection(matrix, target, mask)

    @tf.function
    def project():
        return project_onto_span(
            case.operator(),
            like_variables(case, target),
            max_products=400,
            tolerance=1e-8,
            mask=mask,
        )

    result = project()
    point, u = flat(result.point), result.coefficients.numpy()
    assert bool(result.converged)
    assert float(result.residual) <= 1e-8
    np.testing.assert_allclose(point, exact, atol=1e-5 * np.linalg.norm(exact))
    np.testing.assert_allclose(matrix @ u.ravel(), point, atol=1e-9)
    # The span of so few gradients is a part of the space: the target itself is far from it.
    assert np.linalg.norm(point - target) > 0.1 * np.linalg.norm(target)
    if mask is not None:
        np.testing.assert_array_equal(u[np.array(mask) == 0], 0.0)


def test_single_precision(case_of, flat, like_variables):
    case = case_of("conv", dtype="float32")
    matrix = case.matrix().astype(np.float64)
    # The rank is n (K - 1); rounding adds no direction to the span.
    left, sizes, _ = np.linalg.svd(matrix, full_matrices=False)
    assert sizes[10] < 1e-5 * sizes[9]
    target = np.random.default_rng(1).normal(size=matrix.shape[0])
    result = project_onto_span(
        case.operator(), like_variables(case, target), max_products=60, tolerance=1e-5
    )
    exact = left[:, :10] @ (left[:, :10].T @ target)
    np.testing.assert_allclose(flat(result.point), exact, atol=1e-3 * np.linalg.norm(exact))


def test_the_residual_is_that_of_the_matrix(case_of, flat, like_variables):
    case = case_of("conv")
    matrix = case.matrix()
    target = np.random.default_rng(2).normal(size=matrix.shape[0])
    result = project_onto_span(
        case.operator(), like_variables(case, target), max_products=7, tolerance=0.0
    )
    left = matrix.T @ (target - flat(result.point))
    expected = np.linalg.norm(left) / np.linalg.norm(matrix.T @ target)
    np.testing.assert_allclose(float(result.residual), expected, rtol=1e-8)
    assert not bool(result.converged)


def test_products_are_counted_as_they_are_taken(case_of, like_variables, monkeypatch):
    case = case_of("dense")
    target = like_variables(case, np.ones(case.operator().shape[0]))
    calls = []
    for name in ("matvec", "rmatvec"):
        product = getattr(GradientOperator, name)

        def counted(self, argument, product=product):
            calls.append(None)
            return product(self, argument)

        monkeypatch.setattr(GradientOperator, name, counted)
    for limit, expected in ((3, 3), (8, 7), (9, 9)):
        calls.clear()
        result = project_onto_span(case.operator(), target, max_products=limit, tolerance=0.0)
        assert int(result.num_products) == len(calls) == expected


def test_a_target_of_zero(case_of, like_variables):
    case = case_of("dense")
    zero = [tf.zeros(v.shape, tf.float64) for v in case.variables]
    result = project_onto_span(case.operator(), zero)
    assert int(result.num_products) == 1
    assert bool(result.converged)
    assert float(result.residual) == 0.0


X, W = tf.constant([[1.0], [2.0]]), tf.Variable([[0.5, -0.5]])
TARGET = [tf.ones([1, 2])]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": [tf.constant([[np.inf, 1.0]])]}, "target must be finite"),
        ({"max_products": 2}, "max_products must be at least 3, got 2"),
        ({"tolerance": -1e-3}, "tolerance must be in [0, inf), got -0.001"),
    ],
)
def test_bad_arguments(changes, message):
    operator = GradientOperator(lambda: -tf.nn.log_softmax(X @ W), [W])
    with pytest.raises(ValueError, match=re.escape(message)):
        project_onto_span(operator, **{"target": TARGET, **changes})
