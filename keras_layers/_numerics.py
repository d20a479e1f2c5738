"""Precision shared by the losses."""

from typing import Any

import keras
from keras import ops


def promoted_dtype(dtype: Any) -> Any:
    """None, or the compute dtype asked for, raised to float32 if it is smaller."""
    if dtype is None:
        name = keras.backend.floatx()
    else:
        name = keras.dtype_policies.get(dtype).compute_dtype
    if name in ("float16", "bfloat16"):
        return "float32"
    return dtype


def upcast(tensor: Any) -> Any:
    """The tensor in float32 or, if it is in float64, as it is."""
    tensor = ops.convert_to_tensor(tensor)
    if keras.backend.standardize_dtype(tensor.dtype) == "float64":
        return tensor
    return ops.cast(tensor, "float32")


def normalize_and_clip(probabilities: Any) -> Any:
    """Rows divided by their sums and kept off 0 and 1, as Keras does before a logarithm."""
    probabilities = probabilities / ops.sum(probabilities, axis=-1, keepdims=True)
    epsilon = keras.backend.epsilon()
    return ops.clip(probabilities, epsilon, 1.0 - epsilon)
