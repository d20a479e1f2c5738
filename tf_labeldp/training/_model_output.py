"""What a classifier returns: its shape, whether it is logits, and the priors it amounts to."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tf_labeldp.estimation import prior_from_logits, sharpen_prior
from tf_labeldp.mechanisms._classes import top_k_members

_SUM_TOLERANCE = 1e-2  # of a row of probabilities in half precision


def returns_logits(model: keras.Model, from_logits: bool | None) -> bool:
    """Returns ``from_logits``, or what the compiled loss says where it is None."""
    if from_logits is not None:
        return from_logits
    return bool(getattr(model.loss, "from_logits", False))


def priors_from_outputs(outputs: Any, logits: bool, temperature: float) -> np.ndarray:
    """Returns the model's probabilities at a temperature, ``float64`` (m, K)."""
    if logits:
        return prior_from_logits(outputs, temperature)
    # Half-precision rows miss a sum of one by more than rounding in double precision does.
    outputs = np.asarray(outputs, dtype=np.float64)
    return sharpen_prior(outputs / outputs.sum(axis=1, keepdims=True), temperature)


def top_k_contains(scores: np.ndarray, labels: np.ndarray, k: int) -> np.ndarray:
    """Returns whether each label (m,) is among the k best classes of its row of scores (m, K)."""
    return top_k_members(scores, k)[np.arange(labels.size), labels]


def check_model(model: keras.Model, example: Any, num_classes: int, logits: bool) -> None:
    """Raises a ``ValueError`` where the model cannot be trained on one-hot noisy labels.

    Args:
        model: a compiled model.
        example: features of one example, as a batch of one.
        num_classes: K.
        logits: whether the model returns logits.
    """
    loss = model.loss
    name = str(loss if isinstance(loss, str) else getattr(loss, "name", ""))
    if "sparse" in name:
        raise ValueError(
            f"the model was compiled with loss {name!r}, but the dataset has one-hot labels. Use "
            "keras.losses.CategoricalCrossentropy."
        )
    outputs = model(example, training=False)
    shape = getattr(outputs, "shape", None)
    if shape is None or tuple(shape) != (1, num_classes):
        raise ValueError(
            f"the model must return one tensor of shape (batch, {num_classes}), one score a class; "
            f"for a batch of one it returned "
            f"{type(outputs).__name__ if shape is None else tuple(shape)}. End it with "
            f"keras.layers.Dense({num_classes})."
        )
    if logits:
        return
    row = np.asarray(keras.ops.convert_to_numpy(outputs), dtype=np.float64)
    if row.min() < 0 or abs(row.sum() - 1.0) > _SUM_TOLERANCE:
        raise ValueError(
            "the model's output is not a probability distribution, and its loss does not say "
            "from_logits=True. Compile it with keras.losses.CategoricalCrossentropy("
            "from_logits=True), end it with a softmax, or pass from_logits=True here."
        )
