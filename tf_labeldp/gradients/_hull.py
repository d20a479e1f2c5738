"""The front door of projections onto the convex hull of per-example, per-label gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.gradients._coefficients import starting_coefficients
from tf_labeldp.gradients._flat import dot, flat_target, unflatten
from tf_labeldp.gradients._hull_accelerated import solve_accelerated
from tf_labeldp.gradients._hull_conjugate import solve_conjugate
from tf_labeldp.gradients._hull_frank_wolfe import solve_frank_wolfe
from tf_labeldp.gradients._hull_pgd import solve_pgd
from tf_labeldp.gradients._hull_problem import HullProblem, HullSolution
from tf_labeldp.gradients._operator import GradientOperator
from tf_labeldp.gradients._simplex import HULLS, CoefficientSet

SOLVERS = ("conjugate", "accelerated", "frank_wolfe", "pgd")

_NOISE_SHARE = 0.3
"""Of the gap that noise alone makes; measured in ``tests/benchmarks/bench_projection.py``."""
_PGD_STEP_SIZE, _PGD_STEPS = 0.02, 200


class HullProjection(NamedTuple):
    """A point of the hull near the target, and how near it is to the nearest one.

    Attributes:
        point: list of tensors, like the variables: ``G coefficients``.
        coefficients: float (n, K).
        gap: scalar, the Frank-Wolfe gap of ``1/2 |G a - target|^2``: a certificate, as
            ``|point - exact projection|^2 <= 2 gap``.
        relative_gap: scalar ``gap / (1/2 |point|^2)``: its root bounds
            ``|point - exact projection| / |point|``.
        num_products: int32 scalar, products with G or its transpose that were taken.
        converged: boolean scalar, whether the gap is as small as was asked for.
        curvature: scalar to give to the projection of the next training step.

    Example:
        >>> import tensorflow as tf
        >>> x, w = tf.constant([[1.0]]), tf.Variable(tf.zeros([1, 2]))
        >>> operator = GradientOperator(lambda: -tf.nn.log_softmax(x @ w), [w])
        >>> result = project_onto_hull(operator, [tf.zeros([1, 2])], start="uniform")
        >>> float(result.gap), int(result.num_products)
        (0.0, 2)
    """

    point: list[tf.Tensor]
    coefficients: tf.Tensor
    gap: tf.Tensor
    relative_gap: tf.Tensor
    num_products: tf.Tensor
    converged: tf.Tensor
    curvature: tf.Tensor


def project_onto_hull(
    operator: GradientOperator,
    target: Sequence[Any],
    hull: str = "per_example",
    *,
    start: Any = "predictions",
    predictions: Any = None,
    solver: str = "conjugate",
    relative_gap: float = 1e-2,
    noise_stddev: Any = None,
    max_products: int = 30,
    curvature: Any = None,
    mask: Any = None,
    step_size: float | None = None,
    steps: int | None = None,
) -> HullProjection:
    """Returns the point of a convex hull of gradients that is nearest to ``target``, or near it.

    Minimises ``1/2 |G a - target|^2`` over coefficients ``a`` (n, K) of at least 0 (``ghazi2024``,
    sections 3.1 and 3.2), never forming G, in two products a step. In a ``tf.function`` all of it
    is in the graph.

    Privacy:
        Post-processing of ``target``: sees no labels.

    Args:
        operator: G.
        target: list of tensors, like the operator's variables; the noisy gradient.
        hull: ``"per_example"``: the coefficients of each of n examples sum to 1 / n, so the set
            holds the mean gradient of the examples for any labels, and little else. ``"joint"``:
            all of them sum to 1, the paper's set.
        start: ``"predictions"`` begins where each example has the label that the model gives it,
            which is point 0 for cross-entropy and no ``scales``; ``"uniform"`` with all labels
            alike, as the paper; or coefficients (n, K), which are first projected onto the set.
        predictions: float (n, K), the model's probabilities of the labels, for this start.
        solver: ``"conjugate"``: projected conjugate gradients. ``"accelerated"``: Nesterov's method
            with adaptive restart. ``"frank_wolfe"``: fully corrective, ``max_products (d + n K)``
            numbers of memory. ``"pgd"``: the paper's fixed number of plain steps, to compare with.
        relative_gap: stop once ``gap <= relative_gap |point|^2 / 2``; from 0.
        noise_stddev: standard deviation of the noise in each coordinate of ``target``, a number or
            a scalar tensor. With it, stop also once the gap is below 0.3 of what such noise alone
            makes, measured by one product with fixed random numbers: from there on a better fit
            to the target is mostly a fit to its noise. None: no such stop.
        max_products: integer: stop before more products than this. At least 4, and 5 with
            ``noise_stddev``.
        curvature: ``curvature`` of the last training step's projection, for a better first step;
            None or 0: nothing known. Not used by ``"frank_wolfe"`` and ``"pgd"``.
        mask: (n,), zero for examples that are padding: they get no coefficients. None: all count.
        step_size: of ``"pgd"`` alone, above 0; None: 0.02.
        steps: of ``"pgd"``, which neither ``max_products`` nor gaps stop; None: 200.

    Raises:
        TypeError: a number of the wrong type.
        ValueError: an unknown ``hull``, ``solver`` or ``start``; no ``predictions`` to start
            from; shapes that do not fit; a target that is not finite (seen in eager mode);
            numbers out of range; ``step_size`` or ``steps`` without ``solver="pgd"``.

    Example:
        >>> import tensorflow as tf
        >>> x, w = tf.constant([[1.0], [2.0]]), tf.Variable(tf.zeros([1, 2]))
        >>> operator = GradientOperator(lambda: -tf.nn.log_softmax(x @ w), [w])
        >>> result = project_onto_hull(
        ...     operator, [tf.constant([[2.0, 0.0]])], predictions=tf.fill([2, 2], 0.5)
        ... )
        >>> result.point[0].numpy().round(2).tolist(), bool(result.converged)
        ([[0.75, -0.75]], True)
        >>> result.coefficients.numpy().round(2).tolist()
        [[0.0, 0.5], [0.0, 0.5]]
    """
    _validate.one_of("hull", hull, HULLS)
    _validate.one_of("solver", solver, SOLVERS)
    if not relative_gap >= 0.0:
        raise ValueError(f"relative_gap must be at least 0, got {relative_gap}.")
    dtype = operator.dtype
    vector = flat_target(target, operator)
    feasible = CoefficientSet.of(hull, mask, operator.coefficients_shape[0], dtype)
    first = starting_coefficients(start, predictions, operator, feasible)
    noise_gap, probes = _noise_gap(noise_stddev, first, operator, feasible)
    problem = HullProblem(operator, vector, feasible, tf.cast(relative_gap, dtype), noise_gap)

    if solver == "pgd":
        eta = _PGD_STEP_SIZE if step_size is None else step_size
        eta = _validate.positive_finite("step_size", eta)
        count = _validate.integer_at_least("steps", _PGD_STEPS if steps is None else steps, 1)
        return _result(problem, solve_pgd(problem, first, step_size=eta, steps=count), probes)
    if step_size is not None or steps is not None:
        raise ValueError(
            f"step_size and steps are for solver='pgd', got solver={solver!r}. Leave them out: the "
            "other solvers measure their steps, and max_products limits them."
        )
    products = _validate.integer_at_least("max_products", max_products, 4 + probes) - probes
    if solver == "frank_wolfe":
        return _result(problem, solve_frank_wolfe(problem, first, max_products=products), probes)
    solve = solve_accelerated if solver == "accelerated" else solve_conjugate
    solution = solve(problem, first, max_products=products, curvature=curvature)
    return _result(problem, solution, probes)


def _noise_gap(
    stddev: Any, start: tf.Tensor, operator: GradientOperator, feasible: CoefficientSet
) -> tuple[tf.Tensor, int]:
    """Returns the gap at which to stop, and how many products it took to find."""
    if stddev is None:
        return tf.zeros([], operator.dtype), 0
    # Not private: it stands in for the noise, and protects nothing. So it may be the same always.
    noise = tf.random.stateless_normal([operator.shape[0]], [0, 0], dtype=operator.dtype)
    slope = operator.rmatvec(unflatten(noise, operator.variable_shapes))
    share = _NOISE_SHARE * tf.cast(stddev, operator.dtype)
    return share * feasible.gap(start, slope), 1


def _result(problem: HullProblem, solution: HullSolution, probes: int) -> HullProjection:
    """Adds the certificate."""
    point = solution.point
    gap = problem.gap(point)
    scale = 0.5 * dot(point.image, point.image)
    return HullProjection(
        point=unflatten(point.image, problem.operator.variable_shapes),
        coefficients=point.coefficients,
        gap=gap,
        relative_gap=gap / tf.maximum(scale, scale.dtype.as_numpy_dtype(1e-30)),
        num_products=solution.num_products + probes,
        converged=problem.is_solved(point),
        curvature=solution.curvature,
    )
