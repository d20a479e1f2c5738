"""The projection onto the span of per-example, per-label gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.accounting import Setting
from tf_labeldp.gradients._operator import GradientOperator, dot, flat_target, flatten, unflatten
from tf_labeldp.gradients.hull import mask_column


class SpanProjection(NamedTuple):
    """The result of ``project_onto_span``, which documents the fields."""

    point: list[tf.Tensor]
    coefficients: tf.Tensor
    residual: tf.Tensor
    num_products: tf.Tensor
    converged: tf.Tensor


def project_onto_span(
    operator: GradientOperator,
    target: Setting[Sequence[Any]],
    *,
    max_products: int = 30,
    tolerance: float = 1e-2,
    mask: Setting[Any] = None,
) -> SpanProjection:
    """Projects a noisy gradient onto the span of per-example, per-label gradients.

    This is the denoiser Self-Span of ``ghazi2024``, Table 1, by conjugate gradients on the normal
    equations (CGLS, Bjorck 1996, section 7.4), in two products per step, without forming G. The
    distance to the exact projection falls with every step.

    Guarantee:
        Post-processing of ``target``: sees no labels.

    Args:
        operator: G.
        target: the noisy gradient, a list of tensors like the operator's variables.
        max_products: the largest number of products, at least 3.
        tolerance: stops once ``residual`` is at most this; at least 0.
        mask: (n,), zero for padding, whose gradients are left out; None if there is no padding.

    Returns:
        A named tuple of
        point: ``G coefficients``, a list of tensors like the variables;
        coefficients: float (n, K), of any sign and sum;
        residual: scalar ``|G^T (target - point)| / |G^T target|``, zero at the exact projection;
        num_products: int32 scalar, the number of products with G or its transpose;
        converged: boolean scalar, whether ``residual`` is at most ``tolerance``.

    Raises:
        TypeError: ``max_products`` is not an integer.
        ValueError: ``target`` does not fit the variables or is not finite (in eager mode),
            ``max_products`` is below 3, or ``tolerance`` is negative.

    Example:
        >>> import tensorflow as tf
        >>> x, w = tf.constant([[3.0], [4.0]]), tf.Variable(tf.zeros([1, 2]))
        >>> operator = GradientOperator(lambda: -tf.nn.log_softmax(x @ w), [w])
        >>> result = project_onto_span(operator, [tf.constant([[1.0, 0.0]])])
        >>> result.point[0].numpy().round(2).tolist()
        [[0.5, -0.5]]
        >>> float(result.residual), bool(result.converged)
        (0.0, True)
    """
    max_products = _validate.integer_at_least("max_products", max_products, 3)
    tolerance = _validate.number_in("tolerance", tolerance, "[0, inf)")
    vector = flat_target(target, operator)
    dtype, shapes = operator.dtype, operator.variable_shapes
    rows, labels = operator.coefficients_shape
    keep = mask_column(mask, rows, dtype)

    def slope(residual: tf.Tensor) -> tf.Tensor:
        return keep * operator.rmatvec(unflatten(residual, shapes))

    first = slope(vector)
    scale = dot(first, first)
    goal = tf.cast(tolerance, dtype) ** 2 * scale

    # The norm of the normal equations' residual need not fall in each step, unlike the distance to
    # the projection: the last step is the best, whichever criterion ends the loop.
    def unfinished(products: Any, *others: Any) -> Any:
        return (products + 2 <= max_products) & (others[-1] > goal)

    def step(
        products: Any, coefficients: Any, image: Any, direction: Any, size: Any
    ) -> tuple[Any, ...]:
        change = flatten(operator.matvec(direction), dtype)
        length = tf.math.divide_no_nan(size, dot(change, change))
        coefficients += length * direction
        image += length * change
        downhill = slope(vector - image)
        next_size = dot(downhill, downhill)
        direction = downhill + tf.math.divide_no_nan(next_size, size) * direction
        return products + 2, coefficients, image, direction, next_size

    zeros = tf.zeros([rows, labels], dtype), tf.zeros_like(vector)
    products, coefficients, image, _, size = tf.while_loop(
        unfinished, step, (tf.constant(1), *zeros, first, scale)
    )
    return SpanProjection(
        point=unflatten(image, shapes),
        coefficients=coefficients,
        residual=tf.sqrt(tf.math.divide_no_nan(size, scale)),
        num_products=products,
        converged=size <= goal,
    )
