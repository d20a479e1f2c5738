"""A fitted head as a Keras model, which carries the receipts of its release."""

from __future__ import annotations

from typing import Any

import numpy as np

from tf_labeldp.accounting._receipts import receipts_to_bytes
from tf_labeldp.heads._public_rows import Scaling
from tf_labeldp.vault._carried import remember_weights


def export_head(
    weights: np.ndarray,
    bias: np.ndarray,
    *,
    activation: str,
    scaling: Scaling,
    clip_to: tuple[float, float] | None,
    encoder: Any,
    receipts: Any,
) -> Any:
    """Returns a ``keras.Model`` that scales rows to unit norm and applies fixed weights.

    Args:
        weights: (D, C), for scaled rows without the constant column.
        bias: (C,).
        activation: ``"softmax"``, ``"sigmoid"`` or ``"linear"``.
        scaling: of the rows.
        clip_to: the range of a regression label, or None.
        encoder: a Keras model whose outputs (m, d) are the features, something with ``to_keras()``
            that returns one, or None.
        receipts: of the head.
    """
    import keras

    from tf_labeldp.keras_layers import ReleasedDense

    width = scaling.mean.size
    single = "float32"  # whatever the dtype policy: half precision ends at 65,504
    inputs, rows = with_encoder(encoder, width)
    layers = keras.layers
    # Divided by a size of theirs, tiny numbers do not meet the constant in Keras's normalisation.
    scale = scaling.size
    offset = (-scaling.mean / scale).tolist() if np.any(scaling.mean) else 0.0
    rows = layers.Rescaling(1.0 / scale, offset, dtype=single, name="public_center_and_scale")(rows)
    rows = layers.UnitNormalization(axis=-1, dtype=single, name="unit_rows")(rows)
    if scaling.spread is not None:
        spread = layers.Dense(
            scaling.spread.shape[1], use_bias=False, trainable=False, dtype=single, name="spread"
        )
        rows = spread(rows)
        spread.set_weights([scaling.spread])
        rows = layers.UnitNormalization(axis=-1, dtype=single, name="unit_spread_rows")(rows)
    shift = 0.0 if clip_to is None else clip_to[0]
    dense = ReleasedDense(weights.shape[1], activation, trainable=False, dtype=single, name="head")
    outputs = dense(rows)
    dense.set_weights([weights.astype(np.float32), (bias - shift).astype(np.float32)])
    note_release(dense, receipts, dense.weights)
    if clip_to is not None:
        outputs = layers.ReLU(max_value=clip_to[1] - clip_to[0], dtype=single, name="clip")(outputs)
        outputs = layers.Rescaling(1.0, offset=shift, dtype=single, name="label_range")(outputs)
    return keras.Model(inputs, outputs, name="one_release_head")


def note_release(layer: Any, receipts: Any, weights: Any) -> None:
    """Notes what a layer was made of, in its files and wherever its weights turn up."""
    layer.label_dp_receipts = receipts_to_bytes(receipts) if receipts else b""
    remember_weights(weights, receipts, unless=())


def with_encoder(encoder: Any, width: int) -> tuple[Any, Any]:
    """Returns new inputs like those of an encoder, and its outputs (m, width) for them.

    Without an encoder both are the features.
    """
    import keras

    if encoder is None:
        features = keras.Input((width,), name="features")
        return features, features
    model = encoder.to_keras() if hasattr(encoder, "to_keras") else encoder
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"the encoder is {type(encoder).__name__}, which has no Keras model. Pass "
            "to_keras(encoder=...) a Keras model that computes the same features."
        )
    try:
        # A Sequential model has ``inputs``, but ``input`` only once another has called it.
        given = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
        shape = tuple(model.output_shape)
    except AttributeError:
        raise TypeError(
            f"the encoder is a {type(model).__name__}, whose inputs Keras does not know. Wrap it: "
            "keras.Model(inputs, encoder(inputs)) with inputs = keras.Input(...)."
        ) from None
    if len(shape) != 2 or shape[1] != width:
        raise ValueError(
            f"the encoder gives outputs of shape {shape}, the head was fitted on "
            f"{width} features. Pass the encoder that made them, flattened."
        )
    inputs = keras.tree.map_structure(
        lambda one: keras.Input(tuple(one.shape[1:]), dtype=one.dtype, name=one.name), given
    )
    return inputs, model(inputs)
