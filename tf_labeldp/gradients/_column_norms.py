"""Norms of the columns of a matrix that is never formed, from a few products."""

from __future__ import annotations

import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.gradients._flat import unflatten
from tf_labeldp.gradients._operator import GradientOperator


def estimate_column_norms(
    operator: GradientOperator, num_probes: int = 4, seed: int = 0
) -> tf.Tensor:
    """Returns estimates of the norms of all n K per-label gradients.

    For standard normal ``v`` the mean of ``(G^T v)^2`` is the squared norm of each column. So an
    estimate from m probes has a relative standard deviation of about ``1 / sqrt(2 m)``: 35 % with
    4. That is enough for ``operator.scaled(min(1, C / norm))``, whose columns are clipped as the
    gradients in the target are: without it the hull of a confident model reaches out to the
    gradients of labels that nobody has, up to a hundred times longer.

    Privacy:
        Sees no labels: the estimates are public.

    Args:
        operator: G; its scales count.
        num_probes: m, at least 1; each is one product.
        seed: of the public random vectors, which do not protect anything.

    Returns:
        float (n, K).

    Raises:
        TypeError, ValueError: ``num_probes`` is not an integer of at least 1.

    Example:
        >>> import tensorflow as tf
        >>> x, w = tf.constant([[3.0], [4.0]]), tf.Variable(tf.zeros([1, 2]))
        >>> operator = GradientOperator(lambda: -tf.nn.log_softmax(x @ w), [w])
        >>> norms = estimate_column_norms(operator, num_probes=2000)  # 3 and 4, over the root of 2
        >>> print(norms.numpy().round(1))
        [[2.1 2.1]
         [2.8 2.8]]
        >>> clipped = operator.scaled(tf.minimum(1.0, 1.0 / norms))
    """
    num_probes = _validate.integer_at_least("num_probes", num_probes, 1)
    size = operator.shape[0]

    def add(probe: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        vector = tf.random.stateless_normal([size], [seed, probe], dtype=operator.dtype)
        products = operator.rmatvec(unflatten(vector, operator.variable_shapes))
        return probe + 1, total + tf.square(products)

    start = tf.constant(0), tf.zeros(operator.coefficients_shape, operator.dtype)
    _, total = tf.while_loop(lambda probe, _: probe < num_probes, add, start)
    return tf.sqrt(total / num_probes)
