"""Public features as rows of numbers, from arrays and encoders."""

from __future__ import annotations

from typing import Any

import numpy as np

_ENCODED_AT_ONCE = 4096
_FINITE_CELLS = 1 << 24


def encoded_features(features: Any, encoder: Any) -> np.ndarray:
    """Returns finite numbers (n, d): the features flattened, or what the encoder makes of them.

    Args:
        features: (n, ...), or what the encoder takes.
        encoder: an object with ``transform``, a Keras model, a callable, or None.

    Raises:
        TypeError: features that are no numbers, or an encoder that is none.
        ValueError: features that are empty, not finite or of a wrong shape; an encoder whose
            outputs are not (m, d).
    """
    if encoder is None:
        rows = _as_numbers("features", features)
        if rows.ndim < 2 or rows.size == 0:
            raise ValueError(
                f"features must have shape (n, d) or (n, ...), not empty, got {rows.shape}. Give "
                "one feature as x[:, np.newaxis], and one example as x[np.newaxis]."
            )
        rows = rows.reshape(rows.shape[0], -1)
    else:
        rows = _encode(features, encoder)
    step = max(1, _FINITE_CELLS // rows.shape[1])
    # Sums would overflow where numbers do not, so each is looked at.
    bad = sum(
        int(np.count_nonzero(~np.isfinite(rows[start : start + step]).all(axis=1)))
        for start in range(0, rows.shape[0], step)
    )
    if bad:
        raise ValueError(
            f"features must be finite, but {bad} of {rows.shape[0]} rows hold NaN or infinity. "
            "Leave these examples out, or fill them in."
        )
    return rows


def _encode(features: Any, encoder: Any) -> np.ndarray:
    if isinstance(encoder, type) or not (
        callable(encoder) or hasattr(encoder, "transform") or hasattr(encoder, "predict")
    ):
        given = f"the class {encoder.__name__}" if isinstance(encoder, type) else repr(encoder)
        raise TypeError(
            "encoder must be a Keras model, a fitted feature map or a callable from inputs to "
            f"(m, d), got {given}."
        )
    if not isinstance(features, np.ndarray):  # a table of columns can't be cut
        return _encode_block(features, encoder)
    if features.shape[:1] in ((), (0,)):
        raise ValueError(f"features hold no examples: their shape is {features.shape}.")
    parts = [
        _encode_block(features[start : start + _ENCODED_AT_ONCE], encoder)
        for start in range(0, features.shape[0], _ENCODED_AT_ONCE)
    ]
    rows = np.concatenate(parts)
    if rows.shape[0] != features.shape[0]:
        raise ValueError(
            f"the encoder gave {rows.shape[0]} rows for {features.shape[0]} examples; it must give "
            "one row (d,) for each."
        )
    return rows


def _encode_block(block: Any, encoder: Any) -> np.ndarray:
    if hasattr(encoder, "transform"):
        found = encoder.transform(block)
    elif hasattr(encoder, "predict_on_batch"):  # a Keras model
        found = encoder.predict(block, batch_size=256, verbose=0)
    else:
        found = encoder.predict(block) if hasattr(encoder, "predict") else encoder(block)
    rows = _as_numbers("the encoder's outputs", found)
    if rows.ndim != 2 or rows.shape[1] == 0:
        raise ValueError(
            f"the encoder must give outputs of shape (m, d), got {rows.shape}. Flatten or pool "
            "them, for example with keras.layers.Flatten or GlobalAveragePooling2D."
        )
    return rows


def _as_numbers(name: str, values: Any) -> np.ndarray:
    """Returns an array of numbers, or raises a ``TypeError``."""
    if hasattr(values, "toarray"):
        raise TypeError(
            f"{name} must be a dense array, got a sparse {type(values).__name__}. Pass .toarray() "
            "if it fits."
        )
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"{name} must be numbers, got {type(values).__name__} of dtype {array.dtype}. Encode "
            "categories first, and give a data set as an array."
        )
    return array
