"""The paper's projected gradient descent, kept for comparison."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_labeldp.gradients._hull_problem import HullProblem, HullSolution


def solve_pgd(
    problem: HullProblem, start: tf.Tensor, *, step_size: float, steps: int
) -> HullSolution:
    """Projects by a fixed number of steps ``a <- Proj(a - 2 step_size G^T (G a - target))``.

    ``ghazi2024``, section 3.2. Two products a step, and two for the certificate of the last one.
    """

    def step(done: Any, coefficients: tf.Tensor) -> tuple[Any, tf.Tensor]:
        slope = problem.slope(problem.image(coefficients))
        return done + 1, problem.feasible.project(coefficients - 2.0 * step_size * slope)

    _, coefficients = tf.while_loop(lambda done, _: done < steps, step, (tf.constant(0), start))
    point = problem.point(coefficients)
    return HullSolution(point, tf.constant(2 * steps + 2), tf.zeros([], start.dtype))
