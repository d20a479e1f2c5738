"""A fitted head as a Keras model, which carries the receipts of its release."""

from __future__ import annotations

from typing import Any

import numpy as np

from tf_labeldp.features._estimator import note_release, with_encoder
from tf_labeldp.heads._public_rows import Scaling


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
