"""Gradients as one vector, so that they add like numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_labeldp.gradients._operator import GradientOperator


def flatten(parts: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
    """Returns gradients as one vector (d,)."""
    return tf.concat([tf.reshape(tf.cast(part, dtype), [-1]) for part in parts], axis=0)


def unflatten(vector: tf.Tensor, shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
    """Returns a vector (d,) as gradients of these shapes."""
    parts = tf.split(vector, [shape.num_elements() for shape in shapes])
    return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]


def dot(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """Returns the inner product of two tensors of one shape."""
    return tf.reduce_sum(a * b)


def flat_target(target: Sequence[Any], operator: GradientOperator) -> tf.Tensor:
    """Returns the gradient to project as (d,), or raises if it does not fit the variables."""
    shapes = operator.variable_shapes
    is_list = isinstance(target, (list, tuple))
    if not is_list or len(target) != len(shapes):
        came = f"{len(target)} of them" if is_list else type(target).__name__
        raise ValueError(
            f"target must be a list of {len(shapes)} tensors, one a variable of the operator, got "
            f"{came}."
        )
    parts = [tf.convert_to_tensor(part) for part in target]
    for place, (part, shape) in enumerate(zip(parts, shapes, strict=True)):
        if not part.shape.is_compatible_with(shape):
            raise ValueError(
                f"target[{place}] must have its variable's shape {tuple(shape)}, got "
                f"{tuple(part.shape)}. Keep gradients in the order of the operator's variables."
            )
    vector = flatten(parts, operator.dtype)
    if tf.executing_eagerly() and not bool(tf.reduce_all(tf.math.is_finite(vector))):
        raise ValueError(
            "target must be finite, but has NaN or infinite entries. Look for the step and the "
            "layer in which the gradients overflowed."
        )
    return vector
