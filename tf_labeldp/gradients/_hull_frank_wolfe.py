"""Fully-corrective Frank-Wolfe: a small problem over the vertices met so far."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_labeldp.gradients._flat import dot
from tf_labeldp.gradients._hull_problem import HullProblem, HullSolution, Point
from tf_labeldp.gradients._simplex import project_onto_simplex

_JOINT_BATCH = 8  # vertices a round: a round of one would spend half of the products on slopes
_CORRECTION_STEPS = 60


def solve_frank_wolfe(problem: HullProblem, start: tf.Tensor, *, max_products: int) -> HullSolution:
    """Projects onto the hull of ever more vertices (Lacoste-Julien and Jaggi 2015, Algorithm 3).

    A round takes the slope (one product), adds the vertices that are lowest along it, and finds
    the best mixture of all so far by accelerated projected gradient on their inner products. With
    the per-example hulls a vertex is the best label of every example, one product; with the joint
    hull it is one label of one example, and the best of up to 8 examples are added, a product
    each. Memory: at most ``max_products`` vertices of d + n K numbers.
    """
    feasible = problem.feasible
    batch = 1
    if feasible.hull == "joint":
        batch = min(_JOINT_BATCH, problem.operator.coefficients_shape[0], max_products - 3)
    rounds = (max_products - 2) // (batch + 1)
    first = problem.point(start)
    dtype = start.dtype
    slots = 1 + batch * rounds
    shape = [slots, *start.shape]

    def unfinished(done: Any, point: Point, *_: Any) -> Any:
        return (done < rounds) & ~problem.is_solved(point)

    def one_round(
        done: Any, point: Point, weights: Any, vertices: Any, images: Any
    ) -> tuple[Any, ...]:
        added = feasible.lowest_vertices(point.slope, batch)
        places = (1 + batch * done + tf.range(batch))[:, tf.newaxis]
        vertices = tf.tensor_scatter_nd_update(vertices, places, added)
        images = tf.tensor_scatter_nd_update(images, places, tf.map_fn(problem.image, added))
        weights = _best_mixture(
            tf.matmul(images, images, transpose_b=True),
            tf.linalg.matvec(images, problem.target),
            weights,
            tf.range(slots) < 1 + batch * (done + 1),
        )
        image = tf.linalg.matvec(images, weights, transpose_a=True)
        coefficients = tf.tensordot(weights, vertices, axes=1)
        point = problem.centred(Point(coefficients, image, problem.slope(image)))
        return done + 1, point, weights, vertices, images

    done, point, _, _, _ = tf.while_loop(
        unfinished,
        one_round,
        (
            tf.constant(0),
            first,
            tf.one_hot(0, slots, dtype=dtype),
            tf.scatter_nd([[0]], start[tf.newaxis], shape),
            tf.scatter_nd([[0]], first.image[tf.newaxis], [slots, first.image.shape[0]]),
        ),
    )
    return HullSolution(point, 2 + (batch + 1) * done, tf.zeros([], dtype))


def _best_mixture(
    gram: tf.Tensor, correlation: tf.Tensor, start: tf.Tensor, used: tf.Tensor
) -> tf.Tensor:
    """Returns weights (v,) of at least 0 and sum 1 that make the mixture nearest to the target.

    Args:
        gram: inner products (v, v) of the vertices' images.
        correlation: their inner products (v,) with the target.
        start: weights to begin with.
        used: boolean (v,), which vertices there are.
    """
    bound = tf.reduce_max(tf.reduce_sum(tf.abs(gram), axis=1))
    far = start.dtype.max / 4.0

    def step(done: Any, weights: Any, probe: Any, momentum: Any) -> tuple[Any, ...]:
        slope = tf.linalg.matvec(gram, probe) - correlation
        moved = tf.where(used, probe - tf.math.divide_no_nan(slope, bound), -far)
        ahead = project_onto_simplex(moved)
        momentum = tf.where(dot(slope, ahead - weights) > 0, tf.ones_like(momentum), momentum)
        following = 0.5 * (1.0 + tf.sqrt(1.0 + 4.0 * momentum * momentum))
        probe = ahead + (momentum - 1.0) / following * (ahead - weights)
        return done + 1, ahead, probe, following

    _, weights, _, _ = tf.while_loop(
        lambda done, *_: done < _CORRECTION_STEPS,
        step,
        (tf.constant(0), start, start, tf.ones([], start.dtype)),
    )
    return weights
