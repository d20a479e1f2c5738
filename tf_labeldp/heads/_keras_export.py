"""A fitted head as a Keras model made of built-in layers, which loads without this package."""

from __future__ import annotations

from typing import Any

import numpy as np


def export_head(
    weights: np.ndarray,
    bias: np.ndarray,
    *,
    activation: str,
    mean: np.ndarray,
    scale: float,
    clip_to: tuple[float, float] | None,
    encoder: Any,
) -> Any:
    """Returns a ``keras.Model`` that scales rows to unit norm and applies fixed weights.

    Args:
        weights: (d, C), for rows of unit norm.
        bias: (C,).
        activation: ``"softmax"``, ``"sigmoid"`` or ``"linear"``.
        mean: (d,), subtracted from every row first.
        scale: a public size of a row; rows are divided by it, so that tiny numbers do not meet the
            small constant in Keras's normalisation.
        clip_to: the range of a regression label, or None.
        encoder: a Keras model whose outputs (m, d) are the features, or None.
    """
    import keras

    inputs = keras.Input((weights.shape[0],), name="features") if encoder is None else None
    if encoder is not None:
        shape = tuple(encoder.output_shape)
        if len(shape) != 2 or shape[1] != weights.shape[0]:
            raise ValueError(
                f"the encoder gives outputs of shape {shape}, the head was fitted on "
                f"{weights.shape[0]} features. Pass the encoder that made them, flattened."
            )
        inputs = keras.Input(tuple(encoder.input_shape[1:]), dtype=encoder.inputs[0].dtype)
    rows = inputs if encoder is None else encoder(inputs)
    offset = (-mean / scale).tolist() if np.any(mean) else 0.0
    rows = keras.layers.Rescaling(1.0 / scale, offset, name="public_center_and_scale")(rows)
    rows = keras.layers.UnitNormalization(axis=-1, name="unit_rows")(rows)
    shift = 0.0 if clip_to is None else clip_to[0]
    dense = keras.layers.Dense(weights.shape[1], activation, trainable=False, name="private_ridge")
    outputs = dense(rows)
    dense.set_weights([weights.astype(np.float32), (bias - shift).astype(np.float32)])
    if clip_to is not None:
        outputs = keras.layers.ReLU(max_value=clip_to[1] - clip_to[0], name="clip")(outputs)
        outputs = keras.layers.Rescaling(1.0, offset=shift, name="label_range")(outputs)
    return keras.Model(inputs, outputs, name="private_ridge_head")
