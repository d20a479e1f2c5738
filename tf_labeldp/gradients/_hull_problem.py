"""What every solver of the projection is given, and what it gives back."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tf_labeldp.gradients._flat import dot, flatten, unflatten
from tf_labeldp.gradients._operator import GradientOperator
from tf_labeldp.gradients._simplex import CoefficientSet


class Point(NamedTuple):
    """Coefficients with what is linear in them, so that combinations of points cost no product.

    Attributes:
        coefficients: float (n, K), ``a``.
        image: ``G a`` (d,).
        slope: gradient (n, K) of f there, ``G^T (G a - target)``, up to constants (``centred``).
    """

    coefficients: tf.Tensor
    image: tf.Tensor
    slope: tf.Tensor

    def towards(self, other: Point, step: tf.Tensor) -> Point:
        """Returns ``self + step (other - self)``."""
        return Point(*(a + step * (b - a) for a, b in zip(self, other, strict=True)))

    def best_step(self, other: Point) -> tf.Tensor:
        """Returns the step towards ``other``, of any size from 0, at which f is least."""
        descent = -dot(self.slope, other.coefficients - self.coefficients)
        change = other.image - self.image
        return tf.maximum(tf.math.divide_no_nan(descent, dot(change, change)), 0.0)


class HullProblem(NamedTuple):
    """Minimise ``f(a) = 1/2 |G a - target|^2`` over a set of coefficients.

    Attributes:
        operator: G.
        target: float (d,).
        feasible: the set.
        relative_gap: scalar; a point is good enough once its gap is at most this part of
            ``1/2 |G a|^2``,
        noise_gap: or at most this scalar.
    """

    operator: GradientOperator
    target: tf.Tensor
    feasible: CoefficientSet
    relative_gap: tf.Tensor
    noise_gap: tf.Tensor

    def image(self, coefficients: tf.Tensor) -> tf.Tensor:
        """Returns ``G a`` (d,): one product."""
        return flatten(self.operator.matvec(coefficients), self.operator.dtype)

    def slope(self, image: tf.Tensor) -> tf.Tensor:
        """Returns the gradient (n, K) of f where ``G a`` is ``image`` (d,): one product."""
        residual = image - self.target
        return self.operator.rmatvec(unflatten(residual, self.operator.variable_shapes))

    def point(self, coefficients: tf.Tensor) -> Point:
        """Returns coefficients with their image and slope: two products."""
        image = self.image(coefficients)
        return self.centred(Point(coefficients, image, self.slope(image)))

    def centred(self, point: Point) -> Point:
        """Returns the point with its slope centred anew."""
        slope = self.feasible.centred(point.coefficients, point.slope)
        return point._replace(slope=slope)

    def gap(self, point: Point) -> tf.Tensor:
        """Returns the Frank-Wolfe gap at a point, which bounds how far f can still fall."""
        return tf.maximum(self.feasible.gap(point.coefficients, point.slope), 0.0)

    def is_solved(self, point: Point) -> tf.Tensor:
        """Returns whether the gap is as small as was asked for."""
        wanted = self.relative_gap * 0.5 * dot(point.image, point.image)
        return self.gap(point) <= tf.maximum(wanted, self.noise_gap)


class HullSolution(NamedTuple):
    """Where a solver ended.

    Attributes:
        point: the last one.
        num_products: int32 scalar, how many products with G or its transpose were taken.
        curvature: scalar to begin with at the next training step; 0: none was measured.
    """

    point: Point
    num_products: tf.Tensor
    curvature: tf.Tensor
