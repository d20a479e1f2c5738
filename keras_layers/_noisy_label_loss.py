"""What the losses on noisy labels share: precision, logarithms, shapes and configuration."""

from typing import Any

import keras
from keras import ops


class NoisyLabelLoss(keras.losses.Loss):
    """A loss on logits or probabilities that computes in at least float32."""

    def __init__(self, from_logits: bool, reduction: str | None, name: str | None, dtype: Any):
        super().__init__(name=name, reduction=reduction, dtype=_at_least_float32(dtype))
        self.from_logits = from_logits
        self._dtype_argument = None if dtype is None else self.dtype

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {
            "from_logits": self.from_logits,
            "reduction": self.reduction,
            "name": self.name,
            "dtype": self._dtype_argument,
        }


def check_rows(y_true: Any, y_pred: Any, hint: str) -> None:
    """Raises a ``ValueError`` unless both are (batch, K), with a K that is known."""
    true_shape, pred_shape = tuple(y_true.shape), tuple(y_pred.shape)
    if len(pred_shape) != 2 or pred_shape[1] is None:
        raise ValueError(
            f"y_pred must have shape (batch, K), with K known when the model is built, got "
            f"{pred_shape}. Flatten other axes into the batch."
        )
    if len(true_shape) != 2 or true_shape[1] not in (None, pred_shape[1]):
        raise ValueError(
            f"y_true must have shape (batch, {pred_shape[1]}), got {true_shape}. {hint}"
        )


def upcast(tensor: Any) -> Any:
    """Returns the tensor in float32 or, if it is in float64, as it is."""
    tensor = ops.convert_to_tensor(tensor)
    if keras.backend.standardize_dtype(tensor.dtype) == "float64":
        return tensor
    return ops.cast(tensor, "float32")


def log_probabilities(y_pred: Any, from_logits: bool) -> Any:
    """Returns log-probabilities of logits, or of probabilities as Keras normalises and clips."""
    if from_logits:
        return ops.log_softmax(y_pred, axis=-1)
    probabilities = y_pred / ops.sum(y_pred, axis=-1, keepdims=True)
    epsilon = keras.backend.epsilon()
    return ops.log(ops.clip(probabilities, epsilon, 1.0 - epsilon))


def _at_least_float32(dtype: Any) -> Any:
    """Returns the dtype asked for (or None), or float32 if its compute dtype is smaller."""
    name = keras.backend.floatx()
    if dtype is not None:
        name = keras.dtype_policies.get(dtype).compute_dtype
    return "float32" if name in ("float16", "bfloat16") else dtype
