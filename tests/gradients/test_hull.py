"""The projection onto hulls: what it promises whatever the solver, and what it refuses."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest
import tensorflow as tf
from _projection_solvers import (
    StopAtNoise,
    accelerated,
    estimate_column_norms,
    frank_wolfe,
    lowest_vertices,
)
from scipy import optimize

from tf_labeldp.gradients import GradientOperator, project_onto_hull, project_onto_span
from tf_labeldp.gradients.hull import CoefficientSet, smooth_coefficients, solve_conjugate

HULLS = ("joint", "per_example")
EXACT = dict(relative_gap=1e-9, max_products=2_000)


def exact_projection(matrix, target, hull, shape, mask=None):
    """The nearest point of the hull, by SLSQP, and its Frank-Wolfe gap."""
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
        pytest.param(frank_wolfe, None, marks=pytest.mark.slow),
        pytest.param(accelerated, [1, 1, 0, 1, 0], marks=pytest.mark.slow),
        pytest.param(frank_wolfe, [1, 1, 0, 1, 0], marks=pytest.mark.slow),
    ],
    ids=lambda value: "mask" if isinstance(value, list) else None,
)
def test_converged_points_are_the_exact_projection(solver, hull, mask, dense, flat, like_variables):
    case, matrix = dense
    target = target_near(matrix)
    exact, reference_gap = exact_projection(matrix, target, hull, (5, 3), mask)
    assert reference_gap < 1e-7
    settings = dict(EXACT, relative_gap=1e-5, max_products=300) if solver == frank_wolfe else EXACT

    @tf.function
    def project():
        return project_onto_hull(
            case.operator(),
            like_variables(case, target),
            hull,
            predictions=case.predictions,
            solver=solver,
            mask=mask,
            **settings,
        )

    result = project()
    assert bool(result.converged)
    assert float(result.relative_gap) <= settings["relative_gap"]
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


@pytest.mark.parametrize("kind", ["conv", pytest.param("two_inputs", marks=pytest.mark.slow)])
@pytest.mark.parametrize("hull", HULLS)
def test_single_precision_reaches_the_exact_projection_too(
    hull, kind, case_of, flat, like_variables
):
    case = case_of(kind, dtype="float32")
    matrix = case.matrix().astype(np.float64)
    target = target_near(matrix, seed=1)
    exact, _ = exact_projection(matrix, target, hull, (5, 3))

    @tf.function
    def project():
        return project_onto_hull(
            case.operator(),
            like_variables(case, target),
            hull,
            predictions=case.predictions,
            relative_gap=1e-6,
            max_products=1_000,
        )

    result = project()
    assert bool(result.converged)
    distance = np.linalg.norm(flat(result.point) - exact)
    assert distance <= 2e-3 * np.linalg.norm(exact)


@pytest.mark.parametrize("hull", HULLS)
@pytest.mark.parametrize(
    ("solver", "start"),
    [
        *(("conjugate", start) for start in ("predictions", "uniform", "coefficients")),
        *((solver, "uniform") for solver in (accelerated, "pgd")),
        pytest.param(frank_wolfe, "uniform", marks=pytest.mark.slow),
    ],
)
def test_the_gap_bounds_the_distance_to_the_exact_projection(
    solver, hull, start, dense, flat, like_variables
):
    """|point - exact|^2 <= 2 gap, and the gap is no larger than it must be: it is the true one."""
    case, matrix = dense
    target = target_near(matrix, seed=2, noise=0.5)
    exact, reference_gap = exact_projection(matrix, target, hull, (5, 3))
    given = tf.one_hot([0, 1, 2, 0, 1], 3, dtype=tf.float64) / 5.0
    amount = dict(steps=4, step_size=0.01) if solver == "pgd" else {}
    result = project_onto_hull(
        case.operator(),
        like_variables(case, target),
        hull,
        start=given if start == "coefficients" else start,
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
@pytest.mark.parametrize("solver", [solve_conjugate, accelerated])
def test_the_distance_to_the_target_never_rises(solver, hull, dense, like_variables):
    case, matrix = dense
    target = target_near(matrix, seed=3)
    distances = []

    def recorded(problem, start):
        class Recording(type(problem)):
            def is_solved(self, point):
                distances.append(np.linalg.norm(point.image - target))
                return super().is_solved(point)

        return solver(Recording(*problem), start)

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


@pytest.mark.parametrize("hull", HULLS)
@pytest.mark.parametrize(
    ("solver", "kwargs"),
    [
        ("conjugate", {"max_products": 15}),
        ("conjugate", {"max_products": 15, "zero_at_predictions": True}),
        (accelerated, {"max_products": 14}),
        (frank_wolfe, {"max_products": 12}),
        (StopAtNoise(1e-9), {"max_products": 16}),
        ("pgd", {"steps": 3}),
    ],
    ids=["conjugate", "from_zero", "accelerated", "frank_wolfe", "stop_at_noise", "pgd"],
)
def test_products_are_counted_as_they_are_taken(
    solver, kwargs, hull, dense, like_variables, monkeypatch
):
    case, matrix = dense
    taken = []
    for name in ("matvec", "rmatvec"):
        product = getattr(GradientOperator, name)

        def counted(self, argument, product=product):
            taken.append(None)
            return product(self, argument)

        monkeypatch.setattr(GradientOperator, name, counted)
    result = project_onto_hull(
        case.operator(),
        like_variables(case, target_near(matrix)),
        hull,
        predictions=case.predictions,
        solver=solver,
        relative_gap=0.0,
        **kwargs,
    )
    assert int(result.num_products) == len(taken)
    if solver == "pgd":
        assert len(taken) == 2 * 3 + 2
    else:
        assert kwargs["max_products"] - 9 < len(taken) <= kwargs["max_products"]


@pytest.mark.parametrize("hull", HULLS)
@pytest.mark.holds("gradients.project_onto_hull")
def test_any_labels_give_a_gradient_inside_the_hull(hull, dense, flat, like_variables):
    """The mean gradient of a labelled batch is its own projection; pushed outwards it is not."""
    case, matrix = dense
    labels = np.eye(3)[[2, 0, 1, 1, 0]].ravel() / 5
    clean = matrix @ labels

    @tf.function
    def project(target):
        return project_onto_hull(
            case.operator(), target, hull, predictions=case.predictions, **EXACT
        ).point

    def projected(target):
        return flat(project(like_variables(case, target)))

    np.testing.assert_allclose(projected(clean), clean, atol=1e-3 * np.linalg.norm(clean))
    outside = 3.0 * clean
    assert np.linalg.norm(projected(outside) - outside) > 0.5 * np.linalg.norm(clean)


def test_predictions_start_at_zero_for_cross_entropy(dense, flat):
    case, matrix = dense
    start = case.predictions.numpy() / 5
    np.testing.assert_allclose(matrix @ start.ravel(), 0.0, atol=1e-8)
    zero = [tf.zeros(v.shape, tf.float64) for v in case.variables]
    result = project_onto_hull(case.operator(), zero, predictions=case.predictions)
    np.testing.assert_allclose(flat(result.point), 0.0, atol=1e-8)
    np.testing.assert_allclose(float(result.gap), 0.0, atol=1e-8)


@pytest.mark.parametrize("start", ["predictions", "uniform"])
def test_a_start_known_to_be_zero_saves_a_product_and_nothing_else(
    start, dense, flat, like_variables
):
    case, matrix = dense

    def project(**known):
        return project_onto_hull(
            case.operator(),
            like_variables(case, target_near(matrix)),
            start=start,
            predictions=case.predictions,
            relative_gap=0.0,
            max_products=8,
            **known,
        )

    plain, known = project(), project(zero_at_predictions=True)
    assert int(plain.num_products) - int(known.num_products) == (start == "predictions")
    np.testing.assert_allclose(flat(known.point), flat(plain.point), atol=1e-7)
    np.testing.assert_allclose(float(known.gap), float(plain.gap), rtol=1e-5)


@pytest.mark.parametrize("hull", HULLS)
def test_predictions_of_half_precision_start_inside_the_set(hull, dense, like_variables):
    case, matrix = dense
    rough = tf.cast(case.predictions, tf.float16)
    assert np.abs(tf.cast(rough, tf.float64).numpy().sum(axis=1) - 1.0).max() > 1e-5
    result = project_onto_hull(
        case.operator(),
        like_variables(case, target_near(matrix)),
        hull,
        predictions=rough,
        max_products=4,
    )
    np.testing.assert_allclose(result.coefficients.numpy().sum(), 1.0, rtol=1e-12)


@pytest.mark.parametrize("solver", ["conjugate", accelerated])
def test_curvature_of_the_last_step_is_taken_up(solver, dense, flat, like_variables):
    """With it the first step follows the gradient; 0 and None mean that nothing is known."""
    case, matrix = dense
    largest = np.linalg.norm(matrix, 2) ** 2

    def run(curvature, products=12):
        return project_onto_hull(
            case.operator(),
            like_variables(case, target_near(matrix)),
            predictions=case.predictions,
            solver=solver,
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


@pytest.mark.parametrize("solver", ["conjugate", pytest.param(accelerated, marks=pytest.mark.slow)])
@pytest.mark.parametrize("curvature", [1e-6, 1e6])
def test_a_wrong_curvature_does_no_lasting_harm(solver, curvature, dense, flat, like_variables):
    case, matrix = dense
    target = target_near(matrix)
    exact, _ = exact_projection(matrix, target, "per_example", (5, 3))

    @tf.function
    def project():
        return project_onto_hull(
            case.operator(),
            like_variables(case, target),
            predictions=case.predictions,
            solver=solver,
            curvature=curvature,
            relative_gap=1e-8,
            max_products=2_000,
        )

    result = project()
    assert bool(result.converged)
    np.testing.assert_allclose(flat(result.point), exact, atol=1e-3 * np.linalg.norm(exact))


def test_one_trace_serves_all_targets_masks_and_curvatures(dense, flat, like_variables):
    case, matrix = dense
    traces = []

    @tf.function
    def project(target, mask, curvature, stddev):
        traces.append(None)
        return project_onto_hull(
            case.operator(),
            target,
            predictions=case.predictions,
            mask=mask,
            curvature=curvature,
            solver=StopAtNoise(stddev),
            max_products=8,
        )

    curvature = tf.zeros([], tf.float64)
    for seed, mask in enumerate(([1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [0, 0, 0, 0, 1])):
        target = like_variables(case, target_near(matrix, seed))
        stddev = tf.constant(0.01 * seed, tf.float64)
        result = project(target, tf.constant(mask), curvature, stddev)
        curvature = result.curvature
        eager = result.coefficients.numpy().sum(axis=1)
        np.testing.assert_allclose(eager, np.array(mask) / sum(mask), atol=1e-9)
    assert len(traces) == 1


def test_a_plug_in_stops_the_projection_early_at_the_noise(dense, like_variables):
    """The more noise, the fewer products; with none to speak of it stops as without."""
    case, matrix = dense

    class Recorded(StopAtNoise):
        def noise_gap(self, problem, start):
            self.enough = super().noise_gap(problem, start)
            return self.enough

    def products(solver):
        result = project_onto_hull(
            case.operator(),
            like_variables(case, target_near(matrix, noise=0.05)),
            predictions=case.predictions,
            relative_gap=1e-6,
            solver=solver,
            max_products=200,
        )
        assert bool(result.converged) or float(result.gap) <= solver.enough
        return int(result.num_products)

    alone = products("conjugate")
    taken = [products(Recorded(s)) for s in (1e-9, 0.05, 10.0)]
    assert taken[0] == alone + 1  # the product that measures the noise
    assert taken[0] > taken[1] > taken[2]
    assert taken[2] == 3


def test_scaled_columns_hold_the_clipped_gradient(dense, flat, like_variables):
    """The mean of clipped gradients of any labels lies in the hull of clipped columns."""
    case, matrix = dense
    norms = np.linalg.norm(matrix, axis=0)
    clip = np.median(norms)
    scales = np.minimum(1.0, clip / norms)
    chosen = np.eye(3)[[0, 2, 1, 0, 2]].ravel() / 5
    clean = (matrix * scales) @ chosen
    result = project_onto_hull(
        case.operator(scales=scales.reshape(5, 3)),
        like_variables(case, clean),
        predictions=case.predictions,
        **EXACT,
    )
    np.testing.assert_allclose(flat(result.point), clean, atol=1e-3 * np.linalg.norm(clean))


def test_regression_gradients_lie_between_those_of_the_ends(flat):
    """For squared error and any label in [low, high], the gradient is in the two-vertex hull."""
    low, high = -1.0, 3.0
    x = tf.constant(np.random.default_rng(0).normal(size=(4, 3)))
    weights = tf.Variable(np.random.default_rng(1).normal(size=(3, 1)))
    ends = tf.constant([[low, high]], tf.float64)
    operator = GradientOperator(lambda: tf.square(ends - x @ weights), [weights])
    assert operator.coefficients_shape == (4, 2)

    def gradient(labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.constant(labels)[:, None] - x @ weights) ** 2)
        return tape.gradient(loss, weights).numpy()

    def distance(labels):
        target = gradient(labels)
        result = project_onto_hull(operator, [target], start="uniform", **EXACT)
        return np.linalg.norm(result.point[0] - target) / np.linalg.norm(target)

    for seed in range(3):
        assert distance(np.random.default_rng(seed).uniform(low, high, 4)) < 1e-3
    assert distance(np.full(4, low)) < 1e-3
    assert distance(np.full(4, high + 4.0)) > 0.05


@pytest.mark.parametrize(
    "function", [project_onto_hull, project_onto_span, estimate_column_norms, GradientOperator]
)
def test_post_processing_of_the_target_sees_no_labels(function):
    """All inputs are public except the target, which is private already."""
    public = {
        *("operator", "hull", "start", "predictions", "solver", "relative_gap"),
        *("max_products", "curvature", "mask", "step_size", "steps", "tolerance", "num_probes"),
        *("seed", "losses", "variables", "scales", "products", "zero_at_predictions"),
    }
    assert set(inspect.signature(function).parameters) <= public | {"target"}


X = tf.constant([[1.0], [2.0]])
W = tf.Variable([[0.5, -0.5]])
P = tf.fill([2, 2], 0.5)
TARGET = [tf.ones([1, 2])]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": tf.ones([1, 2])}, "target must be a list of tensors like"),
        ({"target": TARGET * 2}, "got [TensorShape([1, 2]), TensorShape([1, 2])]"),
        ({"target": [tf.ones([2, 1])]}, "of shapes [(1, 2)], got [TensorShape([2, 1])]"),
        ({"target": [tf.constant([[np.nan, 1.0]])]}, "target must be finite"),
        ({"hull": "span"}, "hull must be one of joint, per_example, got 'span'"),
        ({"solver": "lbfgs"}, "solver must be one of conjugate, pgd, got 'lbfgs'"),
        ({"start": "zero"}, "start must be one of predictions, uniform, got 'zero'"),
        ({"start": tf.ones([2, 3])}, "start must have the losses' shape (2, 2), got (2, 3)"),
        ({"predictions": None}, "needs predictions=, the model's probabilities (n, K)"),
        ({"predictions": tf.ones([2])}, "predictions must have the losses' shape (2, 2), got (2,)"),
        ({"max_products": 3}, "max_products must be at least 4, got 3"),
        ({"relative_gap": -1.0}, "relative_gap must be in [0, inf), got -1"),
        ({"relative_gap": np.nan}, "relative_gap must be in [0, inf), got nan"),
        ({"steps": 10}, "step_size and steps are for solver='pgd', got solver='conjugate'"),
        ({"solver": "pgd", "steps": 0}, "steps must be at least 1, got 0"),
        ({"solver": "pgd", "step_size": 0.0}, "step_size must be finite and above zero"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_bad_arguments(changes, message):
    arguments = {"target": TARGET, "predictions": P, **changes}
    operator = GradientOperator(lambda: -tf.nn.log_softmax(X @ W), [W])
    with pytest.raises(ValueError, match=re.escape(message)):
        project_onto_hull(operator, **arguments)


def test_a_mask_of_another_length():
    operator = GradientOperator(lambda: -tf.nn.log_softmax(X @ W), [W])
    with pytest.raises(ValueError, match=re.escape("mask must have shape (2,), got (3,)")):
        project_onto_hull(operator, TARGET, predictions=P, mask=[1, 1, 0])


def test_a_target_of_nan_in_a_graph_is_never_called_converged():
    @tf.function
    def project(target):
        operator = GradientOperator(lambda: -tf.nn.log_softmax(X @ W), [W])
        return project_onto_hull(operator, [target], predictions=P)

    assert not bool(project(tf.constant([[np.nan, 1.0]])).converged)
    assert bool(project(tf.constant([[0.1, -0.1]])).converged)


# Smoothing of coefficients (section 3.3 of the paper).


A = tf.constant([[0.5, 0.0], [0.1, 0.2], [0.2, 0.0]])
MIXED = tf.constant([[0.9, 0.1], [0.5, 0.5], [0.2, 0.8]])


@pytest.mark.parametrize("smoothing", [0.0, 0.3, 0.75, 1.0])
def test_smoothing_mixes_with_uniform_coefficients(smoothing):
    smooth = smooth_coefficients(A, smoothing)
    np.testing.assert_allclose(smooth, smoothing * A + (1.0 - smoothing) / 6.0, rtol=1e-6)
    np.testing.assert_allclose(tf.reduce_sum(smooth), 1.0, rtol=1e-6)


def test_smoothing_mixes_with_predictions():
    smooth = smooth_coefficients(A, 0.75, "predictions", predictions=MIXED)
    np.testing.assert_allclose(smooth, 0.75 * A + 0.25 * MIXED / 3.0, rtol=1e-6)


@pytest.mark.parametrize("towards", ["uniform", "predictions"])
def test_padding_stays_at_zero(towards):
    a = tf.constant([[0.5, 0.0], [0.0, 0.0], [0.2, 0.3]])
    smooth = smooth_coefficients(a, 0.5, towards, predictions=MIXED, mask=[1, 0, 1]).numpy()
    np.testing.assert_array_equal(smooth[1], [0.0, 0.0])
    np.testing.assert_allclose(smooth.sum(), 1.0, rtol=1e-6)


def test_smoothing_towards_predictions_only_shortens_a_gradient(case_of, flat):
    """G P / n = 0 for cross-entropy, so the direction stays; uniform coefficients change it."""
    case = case_of("conv")
    operator = case.operator()
    a = np.eye(3)[[0, 1, 2, 2, 1]] / 5
    gradient = flat(operator.matvec(a))
    shorter = flat(
        operator.matvec(smooth_coefficients(a, 0.6, "predictions", predictions=case.predictions))
    )
    np.testing.assert_allclose(shorter, 0.6 * gradient, atol=1e-10)
    turned = flat(operator.matvec(smooth_coefficients(a, 0.6)))
    cosine = turned @ gradient / np.linalg.norm(turned) / np.linalg.norm(gradient)
    assert cosine < 0.999


def test_smoothing_towards_predictions_needs_them():
    with pytest.raises(ValueError, match="needs predictions="):
        smooth_coefficients(A, 0.75, "predictions")


# Plug-ins of the benchmarks.


def test_several_vertices_are_of_examples_in_order_and_never_of_padding():
    gradient = tf.constant([[3.0, -1.0], [-9.0, 0.0], [-4.0, 5.0], [0.0, 0.0]])
    feasible = CoefficientSet.of("joint", [1, 0, 1, 0], 4, tf.float32)
    vertices = lowest_vertices(feasible, gradient, 3).numpy()
    chosen = [tuple(int(i) for i in np.argwhere(v)[0]) for v in vertices]
    assert chosen == [(2, 0), (0, 1), (2, 0)]


def test_estimated_norms_are_those_of_the_columns(case_of):
    case = case_of("conv")
    exact = np.linalg.norm(case.matrix(), axis=0).reshape(5, 3)
    m = 4000
    # (G^T v)^2 / norm^2 is chi-squared with m degrees: its mean is 1 +- sqrt(2 / m), of which
    # five times is allowed, here for the norm, so half of it.
    allowed = 5.0 * np.sqrt(2.0 / m) / 2.0
    estimate = tf.function(lambda: estimate_column_norms(case.operator(), m))().numpy()
    np.testing.assert_allclose(estimate, exact, rtol=allowed)
    assert np.abs(estimate / (1.2 * exact) - 1.0).min() > allowed


def test_estimated_norms_count_scales(case_of):
    case = case_of("dense")
    operator = case.operator()
    scales = tf.constant(np.linspace(0.1, 2.0, 15).reshape(5, 3))
    np.testing.assert_allclose(
        estimate_column_norms(operator.scaled(scales)), scales * estimate_column_norms(operator)
    )
