"""Projected conjugate gradients, two products a step."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_labeldp.gradients._flat import dot
from tf_labeldp.gradients._hull_problem import HullProblem, HullSolution, Point


def solve_conjugate(
    problem: HullProblem, start: tf.Tensor, *, max_products: int, curvature: Any = None
) -> HullSolution:
    """Projects by conjugate directions, as far as they stay in the set (Polyak 1969).

    Each step goes from the last point towards ``Proj(a + d + b s)``: ``d`` is the projected
    gradient step of Barzilai and Borwein (1988), ``s`` the step before, ``b`` makes the two
    conjugate. It goes as far along that line as f falls and the set allows. While no coefficient
    reaches zero these are conjugate gradients, which no other method with as many products beats;
    f never rises. There is no step size to choose.

    Without a ``curvature`` to begin with (None or 0) the first step goes towards a vertex.
    """
    feasible = problem.feasible
    first = problem.point(start)
    dtype = start.dtype
    known = tf.zeros([], dtype) if curvature is None else tf.cast(curvature, dtype)

    def unfinished(products: Any, point: Point, _: Point, __: Any, length: Any) -> Any:
        # A step of no length: at this precision there is no way down from here.
        return (products + 2 <= max_products) & (length > 0) & ~problem.is_solved(point)

    def goal(point: Point, last: Point, scale: tf.Tensor) -> tf.Tensor:
        here = point.coefficients
        downhill = feasible.project(here - scale * point.slope)
        share = -tf.math.divide_no_nan(
            dot(downhill - here, last.slope), dot(last.image, last.image)
        )
        conjugate = feasible.project(downhill + share * last.coefficients)
        return tf.where(dot(point.slope, conjugate - here) < 0, conjugate, downhill)

    def step(products: Any, point: Point, last: Point, scale: Any, _: Any) -> tuple[Any, ...]:
        target = tf.cond(
            scale > 0,
            lambda: goal(point, last, scale),
            lambda: feasible.lowest_vertex(point.slope),
        )
        trial = problem.point(target)
        length = tf.minimum(
            point.best_step(trial), _longest_step(point.coefficients, trial.coefficients)
        )
        ahead = point.towards(trial, length)
        ahead = ahead._replace(coefficients=tf.maximum(ahead.coefficients, 0.0))
        ahead = problem.centred(ahead)
        last = Point(*(new - old for new, old in zip(ahead, point, strict=True)))
        measured = tf.math.divide_no_nan(
            dot(last.coefficients, last.coefficients), dot(last.image, last.image)
        )
        scale = tf.where(measured > 0, measured, scale)
        return products + 2, ahead, last, scale, length

    nothing = Point(*(tf.zeros_like(part) for part in first))
    scale = tf.math.divide_no_nan(tf.ones([], dtype), known)
    products, point, _, scale, _ = tf.while_loop(
        unfinished, step, (tf.constant(2), first, nothing, scale, tf.ones([], dtype))
    )
    return HullSolution(point, products, tf.math.divide_no_nan(tf.ones([], dtype), scale))


def _longest_step(here: tf.Tensor, there: tf.Tensor) -> tf.Tensor:
    """Returns how far to go towards feasible ``there``, at least 1, before an entry is negative."""
    fall = here - there
    steps = tf.where(fall > 0, tf.math.divide_no_nan(here, fall), here.dtype.max)
    return tf.maximum(tf.reduce_min(steps), 1.0)
