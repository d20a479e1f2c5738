"""The projection onto hulls: its guarantees for every solver, and its errors."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf
from _projection_solvers import (
    StopAtNoise,
    accelerated,
)
from scipy import optimize

from tf_labeldp.gradients import GradientOperator, project_onto_hull

# The path of a solver, whose points no result has.
from tf_labeldp.gradients.hull import solve_conjugate

HULLS = ("joint", "per_example")
EXACT = dict(relative_gap=1e-9, max_products=2_000)


def exact_projection(matrix, target, hull, shape, mask=None):
    """Returns the nearest point of the hull, by SLSQP, and its Frank-Wolfe gap."""
    n, labels = shape
    kept = np.repeat(np.ones(n) if mask is None else np.asarray(mask, float), labels)
    count = kept.sum() / labels
    groups = np.ones((1, n * labels))
    if hull == "per_example":
        groups = np.repeat(np.eye(n), labels, axis=1)[kept[::labels] > 0]
    total = 1.0 if hull == "joint" else 1.0 / count
    solved = optimize.minimize(
        lambda a: 0.5 * np.sum((matrix @ a - target) ** 2),
        kept / kept.sum(),
        jac=lambda a: matrix.T @ (matrix @ a - target),
        bounds=[(0.0, keep) for keep in kept],
        constraints={"type": "eq", "fun": lambda a: groups @ a - total, "jac": lambda a: groups},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 500},
    )
    slope = (matrix.T @ (matrix @ solved.x - target))[kept > 0].reshape(-1, labels)
    best = slope.min() if hull == "joint" else slope.min(axis=1).sum() / count
    return matrix @ solved.x, float(solved.x[kept > 0] @ slope.ravel() - best)


@pytest.fixture(scope="session")
def dense(case_of):
    case = case_of("dense")
    return case, case.matrix()


def target_near(matrix, seed=0, noise=0.2):
    """A point of the hulls (a label for each example), and noise."""
    rng = np.random.default_rng(seed)
    labels = np.eye(3)[rng.integers(0, 3, 5)].ravel() / 5
    return matrix @ labels + noise * rng.normal(size=matrix.shape[0])


@pytest.mark.parametrize("hull", HULLS)
@pytest.mark.parametrize(
    ("solver", "mask"),
    [
        ("conjugate", None),
        ("conjugate", [1, 1, 0, 1, 0]),
        (accelerated, None),
    ],
    ids=lambda value: "mask" if isinstance(value, list) else None,
)
def test_converged_points_are_the_exact_projection(solver, hull, mask, dense, flat, like_variables):
    case, matrix = dense
    target = target_near(matrix)
    exact, reference_gap = exact_projection(matrix, target, hull, (5, 3), mask)
    assert reference_gap < 1e-7

    @tf.function
    def project():
        return project_onto_hull(
            case.operator(),
            like_variables(case, target),
            hull,
            predictions=case.predictions,
            solver=solver,
            mask=mask,
            **EXACT,
        )

    result = project()
    assert bool(result.converged)
    assert float(result.relative_gap) <= EXACT["relative_gap"]
    np.testing.assert_allclose(flat(result.point), exact, atol=1e-3 * np.linalg.norm(exact))
    a = result.coefficients.numpy()
    np.testing.assert_allclose(matrix @ a.ravel(), flat(result.point), atol=1e-9)
    assert np.all(a >= 0.0)
    if hull == "joint":
        np.testing.assert_allclose(a.sum(), 1.0)
    else:
        rows = np.ones(5) / 5 if mask is None else np.array(mask) / 3
        np.testing.assert_allclose(a.sum(axis=1), rows)
    if mask is not None:
        np.testing.assert_array_equal(a[np.array(mask) == 0], 0.0)


@pytest.mark.parametrize(
    ("solver", "hull", "start"),
    [
        ("conjugate", "joint", "predictions"),
        ("conjugate", "per_example", "uniform"),
        (accelerated, "per_example", "uniform"),
        ("pgd", "joint", "uniform"),
    ],
)
def test_the_gap_bounds_the_distance_to_the_exact_projection(
    solver, hull, start, dense, flat, like_variables
):
    """|point - exact|^2 <= 2 gap, and the gap is the exact Frank-Wolfe gap."""
    case, matrix = dense
    target = target_near(matrix, seed=2, noise=0.5)
    exact, reference_gap = exact_projection(matrix, target, hull, (5, 3))
    amount = dict(steps=4, step_size=0.01) if solver == "pgd" else {}
    result = project_onto_hull(
        case.operator(),
        like_variables(case, target),
        hull,
        start=start,
        predictions=case.predictions,
        solver=solver,
        relative_gap=0.0,
        max_products=12,
        **amount,
    )
    point, a = flat(result.point), result.coefficients.numpy()
    slope = (matrix.T @ (point - target)).reshape(5, 3)
    lowest = slope.min() if hull == "joint" else slope.min(axis=1).mean()
    gap = float(result.gap)
    np.testing.assert_allclose(gap, np.sum(a * slope) - lowest, atol=1e-9)
    np.testing.assert_allclose(gap / (0.5 * point @ point), float(result.relative_gap))
    assert np.sum((point - exact) ** 2) <= 2.0 * gap + 2.0 * reference_gap
    assert not bool(result.converged)


@pytest.mark.parametrize("hull", HULLS)
def test_the_distance_to_the_target_never_rises(hull, dense, like_variables):
    case, matrix = dense
    target = target_near(matrix, seed=3)
    distances = []

    def recorded(problem, start):
        class Recording(type(problem)):
            def is_solved(self, point):
                distances.append(np.linalg.norm(point.image - target))
                return super().is_solved(point)

        return solve_conjugate(Recording(*problem), start)

    project_onto_hull(
        case.operator(),
        like_variables(case, target),
        hull,
        predictions=case.predictions,
        solver=recorded,
        relative_gap=0.0,
        max_products=24,
    )
    assert len(distances) >= 10
    assert np.all(np.diff(distances) <= 1e-12)
    assert distances[-1] < distances[0]


@pytest.mark.parametrize(
    ("solver", "kwargs"),
    [
        ("conjugate", {"max_products": 15}),
        ("conjugate", {"max_products": 15, "zero_at_predictions": True}),
        (accelerated, {"max_products": 14}),
        (StopAtNoise(1e-9), {"max_products": 16}),
        ("pgd", {"steps": 3}),
    ],
    ids=["conjugate", "from_zero", "accelerated", "stop_at_noise", "pgd"],
)
def test_products_are_counted_as_they_are_taken(solver, kwargs, dense, like_variables, monkeypatch):
    case, matrix = dense
    calls = []
    for name in ("matvec", "rmatvec"):
        product = getattr(GradientOperator, name)

        def counted(self, argument, product=product):
            calls.append(None)
            return product(self, argument)

        monkeypatch.setattr(GradientOperator, name, counted)
    result = project_onto_hull(
        case.operator(),
        like_variables(case, target_near(matrix)),
        predictions=case.predictions,
        solver=solver,
        relative_gap=0.0,
        **kwargs,
    )
    assert int(result.num_products) == len(calls)
    if solver == "pgd":
        assert len(calls) == 2 * 3 + 2
    else:
        assert kwargs["max_products"] - 9 < len(calls) <= kwargs["max_products"]


def test_predictions_start_at_zero_for_cross_entropy(dense, flat):
    case, matrix = dense
    start = case.predictions.numpy() / 5
    np.testing.assert_allclose(matrix @ start.ravel(), 0.0, atol=1e-8)
    zero = [tf.zeros(v.shape, tf.float64) for v in case.variables]
    result = project_onto_hull(case.operator(), zero, predictions=case.predictions)
    np.testing.assert_allclose(flat(result.point), 0.0, atol=1e-8)
    np.testing.assert_allclose(float(result.gap), 0.0, atol=1e-8)


def test_predictions_of_half_precision_start_inside_the_set(dense, like_variables):
    case, matrix = dense
    rough = tf.cast(case.predictions, tf.float16)
    assert np.abs(tf.cast(rough, tf.float64).numpy().sum(axis=1) - 1.0).max() > 1e-5
    result = project_onto_hull(
        case.operator(),
        like_variables(case, target_near(matrix)),
        predictions=rough,
        max_products=4,
    )
    np.testing.assert_allclose(result.coefficients.numpy().sum(), 1.0, rtol=1e-12)


def test_the_curvature_of_the_last_step_is_used(dense, like_variables):
    """With it the first step follows the gradient; 0 and None mean that it is unknown."""
    case, matrix = dense
    largest = np.linalg.norm(matrix, 2) ** 2

    def run(curvature, products=12):
        return project_onto_hull(
            case.operator(),
            like_variables(case, target_near(matrix)),
            predictions=case.predictions,
            relative_gap=0.0,
            max_products=products,
            curvature=curvature,
        )

    first = run(None)
    # Growth of ten percent over a curvature met, which the largest eigenvalue bounds.
    assert 0.0 < float(first.curvature) <= 1.1 * largest * (1.0 + 1e-9)
    np.testing.assert_array_equal(run(0.0).coefficients, first.coefficients)
    np.testing.assert_array_equal(run(tf.zeros([])).coefficients, first.coefficients)
    known = run(first.curvature, products=4)
    assert np.abs(known.coefficients - run(None, products=4).coefficients).max() > 1e-3


@pytest.mark.parametrize("curvature", [1e-6, 1e6])
def test_a_wrong_curvature_does_no_lasting_harm(curvature, dense, flat, like_variables):
    case, matrix = dense
    target = target_near(matrix)
    exact, _ = exact_projection(matrix, target, "per_example", (5, 3))

    @tf.function
    def project():
        return project_onto_hull(
            case.operator(),
            like_variables(case, target),
            predictions=case.predictions,
            curvature=curvature,
            relative_gap=1e-8,
            max_products=2_000,
        )

    result = project()
    assert bool(result.converged)
    np.testing.assert_allclose(flat(result.point), exact, atol=1e-3 * np.linalg.norm(exact))


@pytest.mark.parametrize("hull", HULLS)
@pytest.mark.holds("gradients.project_onto_hull")
def test_scaled_columns_hold_the_clipped_gradient(hull, dense, flat, like_variables):
    """The mean of clipped gradients of any labels lies in the hull of clipped columns."""
    case, matrix = dense
    norms = np.linalg.norm(matrix, axis=0)
    scales = np.minimum(1.0, np.median(norms) / norms)
    clean = (matrix * scales) @ (np.eye(3)[[0, 2, 1, 0, 2]].ravel() / 5)

    @tf.function
    def project(target):
        operator = case.operator(scales=scales.reshape(5, 3))
        return project_onto_hull(
            operator, target, hull, predictions=case.predictions, **EXACT
        ).point

    def projected(target):
        return flat(project(like_variables(case, target)))

    np.testing.assert_allclose(projected(clean), clean, atol=1e-3 * np.linalg.norm(clean))
    outside = 3.0 * clean
    assert np.linalg.norm(projected(outside) - outside) > 0.5 * np.linalg.norm(clean)


X = tf.constant([[1.0], [2.0]])
W = tf.Variable([[0.5, -0.5]])
P = tf.fill([2, 2], 0.5)
TARGET = [tf.ones([1, 2])]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": tf.ones([1, 2])}, "target must be a list of tensors like"),
        ({"target": [tf.ones([2, 1])]}, "of shapes [(1, 2)], got [TensorShape([2, 1])]"),
        ({"target": [tf.constant([[np.nan, 1.0]])]}, "target must be finite"),
        ({"hull": "span"}, "hull must be one of joint, per_example, got 'span'"),
        ({"solver": "lbfgs"}, "solver must be one of conjugate, pgd, got 'lbfgs'"),
        ({"predictions": None}, "expected predictions=, the model's probabilities (n, K)"),
        ({"max_products": 3}, "max_products must be at least 4, got 3"),
        ({"relative_gap": np.nan}, "relative_gap must be in [0, inf), got nan"),
        ({"steps": 10}, "step_size and steps need solver='pgd', got solver='conjugate'"),
        ({"solver": "pgd", "step_size": 0.0}, "step_size must be finite and above zero"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_bad_arguments(changes, message):
    arguments = {"target": TARGET, "predictions": P, **changes}
    operator = GradientOperator(lambda: -tf.nn.log_softmax(X @ W), [W])
    with pytest.raises(ValueError, match=re.escape(message)):
        project_onto_hull(operator, **arguments)


def test_a_target_of_nan_in_a_graph_is_never_called_converged():
    @tf.function
    def project(target):
        operator = GradientOperator(lambda: -tf.nn.log_softmax(X @ W), [W])
        return project_onto_hull(operator, [target], predictions=P)

    assert not bool(project(tf.constant([[np.nan, 1.0]])).converged)
    assert bool(project(tf.constant([[0.1, -0.1]])).converged)


# Smoothing of coefficients (section 3.3 of the paper).


@pytest.mark.parametrize("mask", [None, [1, 1, 0, 1, 0]], ids=["all", "mask"])
@pytest.mark.parametrize("smoothing", [0.0, 0.75])
def test_smoothing_mixes_with_uniform_coefficients(smoothing, mask, dense, like_variables):
    case, matrix = dense
    target = like_variables(case, target_near(matrix))
    result = project_onto_hull(
        case.operator(), target, predictions=case.predictions, mask=mask, max_products=8
    )
    smooth = result.smoothed(smoothing, mask).numpy()
    kept = np.ones(5) if mask is None else np.asarray(mask, float)
    uniform = np.outer(kept, np.ones(3)) / (3 * kept.sum())
    expected = smoothing * result.coefficients + (1.0 - smoothing) * uniform
    np.testing.assert_allclose(smooth, expected, rtol=1e-6)
    np.testing.assert_array_equal(smooth[kept == 0.0], 0.0)
    np.testing.assert_allclose(smooth.sum(), 1.0, rtol=1e-6)
