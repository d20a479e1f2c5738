"""Public features inside a Keras model: the encoder before it, and the receipts that it carries."""

from __future__ import annotations

from typing import Any

from tf_labeldp.accounting._receipts import receipts_to_bytes
from tf_labeldp.vault._carried import remember_weights


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
