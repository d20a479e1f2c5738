"""Accelerated projected gradient, with restarts and steps that adapt, two products a step."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_labeldp.gradients._flat import dot
from tf_labeldp.gradients._hull_problem import HullProblem, HullSolution, Point

_GROWTH = 1.1  # above the curvature met: the largest one is a little larger
_DECAY = 0.97  # a step, so that one direction of high curvature does not rule for ever


def solve_accelerated(
    problem: HullProblem, start: tf.Tensor, *, max_products: int, curvature: Any = None
) -> HullSolution:
    """Projects by Nesterov's method with adaptive restart (O'Donoghue and Candes 2015).

    Each step takes one product with G and one with its transpose, at the new point. All else comes
    from them, as f is quadratic: the slope at extrapolated points, the curvature along the step,
    and the best point between the last one and the new one, so that f never rises. The curvature
    of the steps takes the place of a power iteration, which would cost products of its own: the
    step size is one over the largest one met, and a step along which it turns out too long is
    followed by a restart.

    Without a ``curvature`` to begin with (None or 0) the first step goes towards a vertex.
    """
    feasible = problem.feasible
    first = problem.point(start)
    dtype = start.dtype
    known = tf.zeros([], dtype) if curvature is None else tf.cast(curvature, dtype)

    def unfinished(products: Any, point: Point, *_: Any) -> Any:
        return (products + 2 <= max_products) & ~problem.is_solved(point)

    def step(
        products: Any, point: Point, probe: Point, momentum: Any, bound: Any
    ) -> tuple[Any, ...]:
        target = tf.cond(
            bound > 0,
            lambda: feasible.project(probe.coefficients - probe.slope / bound),
            lambda: feasible.lowest_vertex(probe.slope),
        )
        trial = problem.point(target)
        moved, change = target - probe.coefficients, trial.image - probe.image
        met = tf.math.divide_no_nan(dot(change, change), dot(moved, moved))
        too_long = met > bound
        bound = tf.where(too_long, _GROWTH * met, tf.maximum(_DECAY * bound, met))
        length = tf.minimum(point.best_step(trial), 1.0)
        ahead = problem.centred(point.towards(trial, length))

        uphill = dot(probe.slope, ahead.coefficients - point.coefficients) > 0
        momentum = tf.where(uphill | too_long, tf.ones_like(momentum), momentum)
        following = 0.5 * (1.0 + tf.sqrt(1.0 + 4.0 * momentum * momentum))
        probe = point.towards(ahead, 1.0 + (momentum - 1.0) / following)
        return products + 2, ahead, probe, following, bound

    products, point, _, _, bound = tf.while_loop(
        unfinished, step, (tf.constant(2), first, first, tf.ones([], dtype), known)
    )
    return HullSolution(point, products, bound)
