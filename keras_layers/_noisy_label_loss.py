"""The base class of losses on noisy labels: precision, logarithms, shapes, configuration."""

from typing import Any

import keras
from keras import ops


class NoisyLabelLoss(keras.losses.Loss):
    """A loss on logits or probabilities that computes in at least float32."""

    def __init__(self, from_logits: bool, reduction: str | None, name: str | None, dtype: Any):
        policy = keras.dtype_policies.get(keras.backend.floatx() if dtype is None else dtype)
        is_half = policy.compute_dtype in ("float16", "bfloat16")
        super().__init__(name=name, reduction=reduction, dtype="float32" if is_half else dtype)
        self.from_logits = from_logits
        self._dtype_argument = None if dtype is None else self.dtype

    def get_config(self) -> dict[str, Any]:
        return {
            "from_logits": self.from_logits,
            "reduction": self.reduction,
            "name": self.name,
            "dtype": self._dtype_argument,
        }


def check_rows(y_true: Any, y_pred: Any, hint: str) -> None:
    """Raises a ``ValueError`` unless both are (batch, K), with a static K."""
    true_shape, pred_shape = tuple(y_true.shape), tuple(y_pred.shape)
    if len(pred_shape) != 2 or pred_shape[1] is None:
        raise ValueError(
            f"y_pred must have shape (batch, K) with a static K, got {pred_shape}. Flatten other "
            "axes into the batch."
        )
    if len(true_shape) != 2 or true_shape[1] not in (None, pred_shape[1]):
        raise ValueError(
            f"y_true must have shape (batch, {pred_shape[1]}), got {true_shape}. {hint}"
        )


def upcast(tensor: Any) -> Any:
    """Returns a float64 tensor unchanged, and any other in float32."""
    tensor = ops.convert_to_tensor(tensor)
    is_double = keras.backend.standardize_dtype(tensor.dtype) == "float64"
    return tensor if is_double else ops.cast(tensor, "float32")


def log_probabilities(y_pred: Any, from_logits: bool) -> Any:
    """Returns log-probabilities of logits, or of probabilities, normalised and clipped as Keras."""
    if from_logits:
        return ops.log_softmax(y_pred, axis=-1)
    probabilities = y_pred / ops.sum(y_pred, axis=-1, keepdims=True)
    epsilon = keras.backend.epsilon()
    return ops.log(ops.clip(probabilities, epsilon, 1.0 - epsilon))
