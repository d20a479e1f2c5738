"""The gradients of weight regularizers, which are added to what has been made private."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def with_weight_penalties(gradients: list[tf.Tensor], variables: Sequence[Any]) -> list[tf.Tensor]:
    """Returns the gradients with those of the variables' regularizers added.

    No label has a part in a penalty on weights, so it is neither clipped nor noised.

    Args:
        gradients: one tensor a variable.
        variables: Keras variables, some with a ``regularizer``.
    """
    penalized = [v for v in variables if v.regularizer is not None]
    if not penalized:
        return gradients
    with tf.GradientTape() as tape:
        penalty = tf.add_n([tf.cast(v.regularizer(v), tf.float32) for v in penalized])
    found = tape.gradient(penalty, [v.value for v in penalized], unconnected_gradients="zero")
    by_id = {id(v): part for v, part in zip(penalized, found, strict=True)}
    return [
        part + tf.cast(by_id[id(v)], part.dtype) if id(v) in by_id else part
        for v, part in zip(variables, gradients, strict=True)
    ]
