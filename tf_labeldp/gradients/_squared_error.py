"""The two vertices of regression: squared error with labels from a range."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_labeldp import _validate


def squared_error_vertices(predictions: Any, low: float, high: float) -> tf.Tensor:
    """Returns the squared errors (n, 2) of predictions if all labels were ``low``, and ``high``.

    The gradient of ``(y - prediction)^2`` is linear in the label y. So for every label in
    [low, high] it lies between the gradients at the two ends, and the hull of LabelDP-Pro needs
    two vertices an example (named as future work in ``ghazi2024``, section 7).

    Args:
        predictions: float (n,) or (n, 1).
        low: the least label, public knowledge.
        high: the largest label, above ``low``.

    Returns:
        float (n, 2): losses for ``GradientOperator``.

    Raises:
        TypeError: ``low`` or ``high`` is not a number.
        ValueError: they are not finite and in order, or predictions of another shape.

    Example:
        >>> squared_error_vertices([0.5, 1.0], low=0.0, high=2.0).numpy().tolist()
        [[0.25, 2.25], [1.0, 1.0]]
    """
    low, high = _validate.number_range(low, high)
    predictions = tf.convert_to_tensor(predictions)
    rank = predictions.shape.rank
    if rank not in (1, 2) or (rank == 2 and predictions.shape[1] != 1):
        raise ValueError(
            f"predictions must have shape (n,) or (n, 1), got {tuple(predictions.shape)}: one "
            "number an example."
        )
    ends = tf.constant([[low, high]], predictions.dtype)
    return tf.square(ends - tf.reshape(predictions, [-1, 1]))
