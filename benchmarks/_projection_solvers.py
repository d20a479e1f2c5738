"""Plug-ins for projections that lost: two more solvers, a stop at the noise, norms of columns.

A solver for ``project_onto_hull(solver=...)`` is a callable ``(problem, start)`` that returns
``(point, num_products, curvature)``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_labeldp.gradients import GradientOperator
from tf_labeldp.gradients._operator import dot, unflatten
from tf_labeldp.gradients.hull import project_onto_simplex, solve_conjugate
from tf_labeldp.training import AltConv, VertexLosses

NOISE_SHARE = 0.3
"""Share of the gap of pure noise; measured in ``bench_projection.py``."""
_GROWTH = 1.1
"""Factor above the curvature of a step, since the largest curvature is a little larger."""
_DECAY = 0.97
"""Per step, so that one direction of high curvature does not set the step size for ever."""
_JOINT_BATCH = 8
"""Vertices per round: a round of one vertex would spend half of the products on slopes."""
_CORRECTION_STEPS = 60


def accelerated(problem: Any, start: tf.Tensor) -> tuple[Any, Any, Any]:
    """Projects by Nesterov's method with adaptive restart (O'Donoghue and Candes 2015).

    Each step takes one product with G and one with its transpose, at the new point. Since f is
    quadratic, these give the slope at extrapolated points, the curvature along the step, and the
    best point between the last and the new one, so that f never rises. The curvature of the steps
    replaces a power iteration, which would cost further products: the step size is one over the
    largest curvature so far, and a restart follows a step that turns out too long. If no curvature
    is known, the first step goes towards a vertex.
    """
    feasible = problem.feasible
    first = problem.point(start)

    def unfinished(products: Any, point: Any, *_: Any) -> Any:
        return (products + 2 <= problem.max_products) & ~problem.is_solved(point)

    def step(products: Any, point: Any, probe: Any, momentum: Any, bound: Any) -> tuple[Any, ...]:
        target = tf.cond(
            bound > 0,
            lambda: feasible.project(probe.coefficients - probe.slope / bound),
            lambda: feasible.lowest_vertex(probe.slope),
        )
        trial = problem.point(target)
        moved, change = target - probe.coefficients, trial.image - probe.image
        curvature = tf.math.divide_no_nan(dot(change, change), dot(moved, moved))
        too_long = curvature > bound
        bound = tf.where(too_long, _GROWTH * curvature, tf.maximum(_DECAY * bound, curvature))
        length = tf.minimum(point.best_step(trial), 1.0)
        ahead = problem.centred(point.towards(trial, length))

        uphill = dot(probe.slope, ahead.coefficients - point.coefficients) > 0
        momentum = tf.where(uphill | too_long, tf.ones_like(momentum), momentum)
        following = 0.5 * (1.0 + tf.sqrt(1.0 + 4.0 * momentum * momentum))
        probe = point.towards(ahead, 1.0 + (momentum - 1.0) / following)
        return products + 2, ahead, probe, following, bound

    products, point, _, _, bound = tf.while_loop(
        unfinished,
        step,
        (tf.constant(2), first, first, tf.ones([], start.dtype), problem.curvature),
    )
    return point, products, bound


def frank_wolfe(problem: Any, start: tf.Tensor) -> tuple[Any, Any, Any]:
    """Projects onto the hull of ever more vertices (Lacoste-Julien and Jaggi 2015, Algorithm 3).

    A round takes the slope (one product), adds the lowest vertices along it, and finds the best
    mixture of all vertices by accelerated projected gradient on their inner products. With the
    per-example hulls a vertex is the best label of every example, one product. With the joint hull
    it is one label of one example, and a round adds the best of up to 8 examples, a product each.
    Memory: at most ``max_products`` vertices of d + n K numbers.
    """
    feasible = problem.feasible
    batch = 1
    if feasible.hull == "joint":
        batch = min(_JOINT_BATCH, start.shape[0], problem.max_products - 3)
    rounds = (problem.max_products - 2) // (batch + 1)
    first = problem.point(start)
    dtype = start.dtype
    slots = 1 + batch * rounds
    shape = [slots, *start.shape]

    def unfinished(done: Any, point: Any, *_: Any) -> Any:
        return (done < rounds) & ~problem.is_solved(point)

    def one_round(
        done: Any, point: Any, weights: Any, vertices: Any, images: Any
    ) -> tuple[Any, ...]:
        added = lowest_vertices(feasible, point.slope, batch)
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
        point = point._replace(coefficients=coefficients, image=image, slope=problem.slope(image))
        return done + 1, problem.centred(point), weights, vertices, images

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
    return point, 2 + (batch + 1) * done, tf.zeros([], dtype)


def lowest_vertices(feasible: Any, gradient: tf.Tensor, count: int) -> tf.Tensor:
    """Returns vertices (count, n, K) of a set with low inner products, the least first.

    The joint hull alone returns more than one vertex, of different examples.
    """
    if feasible.hull == "per_example":
        return feasible.lowest_vertex(gradient)[tf.newaxis]
    best = tf.one_hot(tf.argmin(gradient, axis=1), gradient.shape[1], dtype=gradient.dtype)
    lowest = tf.where(feasible.mask[:, 0] > 0, tf.reduce_min(gradient, axis=1), gradient.dtype.max)
    rows = tf.math.top_k(-lowest, count).indices
    chosen = tf.one_hot(rows, gradient.shape[0], dtype=gradient.dtype)
    # With fewer examples than count, the best vertex repeats in place of padding.
    padded = tf.gather(feasible.mask[:, 0], rows)[:, tf.newaxis]
    chosen = tf.where(padded > 0, chosen, chosen[:1])
    return chosen[:, :, tf.newaxis] * best


def _best_mixture(
    gram: tf.Tensor, correlation: tf.Tensor, start: tf.Tensor, used: tf.Tensor
) -> tf.Tensor:
    """Returns the weights (v,), at least 0 with sum 1, of the mixture nearest to the target.

    Args:
        gram: inner products (v, v) of the vertices' images.
        correlation: their inner products (v,) with the target.
        start: the first weights.
        used: boolean (v,), the vertices so far.
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


SOLVERS = {"accelerated": accelerated, "frank_wolfe": frank_wolfe}


class StopAtNoise:
    """A solver that also stops once the gap is as small as noise alone makes it.

    From there on a better fit mostly fits the noise. One product with fixed random numbers
    measures the gap.

    Args:
        stddev: the standard deviation of the noise in each coordinate of the target.
        solver: the solver that stops.
    """

    def __init__(self, stddev: Any, solver: Callable[..., Any] = solve_conjugate) -> None:
        self.stddev, self.solver = stddev, solver

    def noise_gap(self, problem: Any, start: tf.Tensor) -> tf.Tensor:
        """Returns the gap at which it stops."""
        # This noise protects nothing, it measures the gap alone: the seed may be fixed.
        noise = tf.random.stateless_normal(problem.target.shape, [0, 0], dtype=start.dtype)
        slope = problem.slope(noise + problem.target)  # G^T noise
        share = NOISE_SHARE * tf.cast(self.stddev, start.dtype)
        return share * problem.feasible.gap(start, slope)

    def __call__(self, problem: Any, start: tf.Tensor) -> tuple[Any, Any, Any]:
        """Solves the problem."""
        enough = self.noise_gap(problem, start)

        class Noisy(type(problem)):  # type: ignore[misc]
            def is_solved(self, point: Any) -> tf.Tensor:
                return super().is_solved(point) | (self.gap(point) <= enough)

        problem = Noisy(*problem._replace(max_products=problem.max_products - 1))
        point, products, curvature = self.solver(problem, start)
        return point, products + 1, curvature


class AltConvStoppingAtNoise(AltConv):
    """An ``AltConv`` whose projections stop at the noise of the step."""

    def denoise(self, gradients: list[tf.Tensor], vertices: VertexLosses, state: Any) -> Any:
        """Returns the denoised gradients, the next state and the report."""
        at_noise = copy.copy(self)
        at_noise.solver = StopAtNoise(vertices.noise_stddev)
        return AltConv.denoise(at_noise, gradients, vertices, state)


def estimate_column_norms(
    operator: GradientOperator, num_probes: int = 4, seed: int = 0
) -> tf.Tensor:
    """Returns estimates (n, K) of the norms of all columns, from ``num_probes`` products.

    For standard normal ``v`` the mean of ``(G^T v)^2`` is the squared norm of each column. So an
    estimate from m probes has a relative standard deviation of about ``1 / sqrt(2 m)``: 35 % with
    4. That is enough for ``scales=min(1, C / norm)``, which clips the columns like the
    gradients in the target. Without the scaling the hull of a confident model extends to the
    gradients of labels that nobody has, up to a hundred times longer.
    """
    size = operator.shape[0]

    def add(probe: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        vector = tf.random.stateless_normal([size], [seed, probe], dtype=operator.dtype)
        products = operator.rmatvec(unflatten(vector, operator.variable_shapes))
        return probe + 1, total + tf.square(products)

    start = tf.constant(0), tf.zeros(operator.coefficients_shape, operator.dtype)
    _, total = tf.while_loop(lambda probe, _: probe < num_probes, add, start)
    return tf.sqrt(total / num_probes)
