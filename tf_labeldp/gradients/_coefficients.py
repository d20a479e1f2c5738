"""Coefficients to begin a projection with, and coefficients smoothed after it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.gradients._operator import GradientOperator
from tf_labeldp.gradients._simplex import CoefficientSet

STARTS = ("predictions", "uniform")


def smooth_coefficients(
    coefficients: Any,
    smoothing: float,
    towards: str = "uniform",
    *,
    predictions: Any = None,
    mask: Any = None,
) -> tf.Tensor:
    """Returns ``smoothing * coefficients + (1 - smoothing) * b`` (``ghazi2024``, section 3.3).

    Args:
        coefficients: float (n, K), of sum 1.
        smoothing: the paper's lambda, in [0, 1]; 1 changes nothing.
        towards: ``"uniform"``: b is ``1 / (n K)`` for all, the paper's; ``"predictions"``: b is
            ``predictions / n``, which for cross-entropy only shortens the gradient.
        predictions: float (n, K), the model's probabilities of the labels.
        mask: (n,), zero for examples that are padding, as in the projection. None: all count.

    Returns:
        float (n, K).

    Raises:
        ValueError: ``smoothing`` out of range, or the arguments do not fit each other.

    Example:
        >>> smooth_coefficients([[0.5, 0.0], [0.0, 0.5]], 0.75).numpy().round(4).tolist()
        [[0.4375, 0.0625], [0.0625, 0.4375]]
    """
    _validate.one_of("towards", towards, STARTS)
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"smoothing must be in [0, 1], got {smoothing}.")
    coefficients = tf.convert_to_tensor(coefficients)
    feasible = CoefficientSet.of("joint", mask, coefficients.shape[0], coefficients.dtype)
    other = feasible.fill(
        _probabilities(towards, predictions, coefficients.shape, coefficients.dtype)
    )
    return smoothing * coefficients + (1.0 - smoothing) * other


def starting_coefficients(
    start: Any, predictions: Any, operator: GradientOperator, feasible: CoefficientSet
) -> tf.Tensor:
    """Returns coefficients of the set to begin with, or raises if ``start`` is none."""
    shape = operator.coefficients_shape
    if isinstance(start, str):
        if start not in STARTS:
            raise ValueError(
                f"start must be one of {', '.join(STARTS)} or coefficients (n, K), got {start!r}."
            )
        start = feasible.fill(_probabilities(start, predictions, shape, operator.dtype))
    # Probabilities of half precision miss their sum of one by more than the gap may.
    return feasible.project(_of_shape("start", start, shape, operator.dtype))


def _probabilities(kind: str, predictions: Any, shape: Any, dtype: tf.DType) -> tf.Tensor:
    """Returns the probabilities (n, K) of labels that ``kind`` stands for."""
    if kind == "uniform":
        return tf.fill(shape, tf.constant(1.0 / shape[1], dtype))
    if predictions is None:
        raise ValueError(
            "'predictions' needs predictions=, the model's probabilities (n, K) of the labels: "
            "tf.nn.softmax(model(x)). Without them use 'uniform'."
        )
    return _of_shape("predictions", predictions, shape, dtype)


def _of_shape(name: str, value: Any, shape: Any, dtype: tf.DType) -> tf.Tensor:
    value = tf.cast(value, dtype)
    if not value.shape.is_compatible_with(shape):
        raise ValueError(
            f"{name} must have the shape (n, K) of the losses, {tuple(shape)}, got "
            f"{tuple(value.shape)}."
        )
    return tf.ensure_shape(value, shape)
