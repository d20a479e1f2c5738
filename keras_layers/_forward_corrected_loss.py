"""Cross-entropy of the model's distribution passed through the label channel."""

from collections.abc import Sequence
from typing import Annotated, Any

import keras
import numpy as np
from keras import ops

from ._noisy_label_loss import NoisyLabelLoss, log_probabilities, upcast

# Replaces log 0: finite, so that gradients are, and negligible next to any log-probability.
_LOG_ZERO = -1e30


@keras.saving.register_keras_serializable(package="tf_labeldp")
class ForwardCorrectedLoss(NoisyLabelLoss):
    """Cross-entropy between noisy labels and the prediction passed through the channel.

    ``loss_i = -log (p_i^T Q)[noisy_i]``, where ``Q[true, noisy]`` is the probability that the
    mechanism releases ``noisy``. For an invertible Q the expected loss is smallest exactly where
    the prediction ``p`` of the true label is the true posterior. Unlike ``LabelWeightedLoss`` it is
    never negative; it has the minimiser of the loss on true labels, not its value.

    From logits, ``log p^T Q`` does not underflow and takes O(batch * num_inputs) memory for label
    ids, O(batch * num_inputs * num_outputs) for one-hot or soft labels.

    Args:
        transition_matrix: ``P[noisy | true]`` (num_inputs, num_outputs), finite, nonnegative, with
            at least two columns and rows that sum to one within 1e-6, such as
            ``mechanism.transition_matrix()``.
        from_logits: whether ``y_pred`` are logits (recommended).
        reduction, name: as in ``keras.losses.Loss``.
        dtype: dtype of the computation; half precision becomes float32.

    Call arguments:
        y_true: noisy labels: ids (batch,) or (batch, 1), or one-hot or soft labels
            (batch, num_outputs), by the static shape. An id outside ``[0, num_outputs)`` makes the
            loss NaN. A label that the channel never releases (a zero column) makes it about 1e30
            from logits, with finite gradients.
        y_pred: scores of the true labels (batch, num_inputs); probabilities are normalised.
        sample_weight: None, (batch,) or (batch, 1).

    Raises:
        ValueError: ``transition_matrix`` is not row-stochastic; on call, the shapes do not fit it.

    Example:
        >>> import numpy as np
        >>> loss = ForwardCorrectedLoss([[0.75, 0.25], [0.25, 0.75]])
        >>> round(float(loss(np.array([0]), np.array([[1.0, 0.0]]))), 6)  # -log 0.75
        0.287682

    Source: Patrini et al., "Making Deep Neural Networks Robust to Label Noise: a Loss Correction
    Approach" (2017), Theorem 2.
    """

    def __init__(
        self,
        transition_matrix: Annotated[np.ndarray | Sequence[Sequence[float]], "setting"],
        from_logits: bool = False,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "forward_corrected_loss",
        dtype: Annotated[Any, "setting"] = None,
    ) -> None:
        super().__init__(from_logits, reduction, name, dtype)
        self.transition_matrix = _checked_matrix(transition_matrix)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Returns the unreduced loss (batch,)."""
        matrix = self.transition_matrix
        _check_shapes(y_true, y_pred, *matrix.shape)
        y_pred = upcast(y_pred)
        num_outputs = matrix.shape[1]
        label_ids = len(y_true.shape) == 1 or y_true.shape[-1] == 1
        if label_ids:
            labels = ops.cast(ops.reshape(y_true, (-1,)), "int32")
            valid = ops.logical_and(labels >= 0, labels < num_outputs)
            labels = ops.where(valid, labels, 0)
        else:
            labels = ops.cast(y_true, y_pred.dtype)
        if self.from_logits:
            log_inputs = ops.log_softmax(y_pred, axis=-1)
            log_channel = ops.convert_to_tensor(_log_of(matrix.T), dtype=y_pred.dtype)
            if label_ids:
                log_inputs = log_inputs + ops.take(log_channel, labels, axis=0)
                losses = -ops.logsumexp(log_inputs, axis=-1)
            else:
                log_joint = ops.expand_dims(log_inputs, 1) + log_channel
                losses = -ops.sum(labels * ops.logsumexp(log_joint, axis=-1), axis=-1)
        else:
            channel = ops.convert_to_tensor(matrix, dtype=y_pred.dtype)
            y_pred = y_pred / ops.sum(y_pred, axis=-1, keepdims=True)
            log_outputs = log_probabilities(ops.matmul(y_pred, channel), from_logits=False)
            if label_ids:
                labels = ops.one_hot(labels, num_outputs, dtype=y_pred.dtype)
            losses = -ops.sum(labels * log_outputs, axis=-1)
        return ops.where(valid, losses, float("nan")) if label_ids else losses

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor arguments, with the matrix as nested lists."""
        return {"transition_matrix": self.transition_matrix.tolist(), **super().get_config()}


def _log_of(matrix: np.ndarray) -> np.ndarray:
    return np.log(matrix, out=np.full_like(matrix, _LOG_ZERO), where=matrix > 0)


def _checked_matrix(matrix: Any) -> np.ndarray:
    matrix = np.array(matrix, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] < 1 or matrix.shape[1] < 2:
        raise ValueError(
            f"transition_matrix must be 2-D with at least two columns, got shape {matrix.shape}."
        )
    sums = matrix.sum(axis=1)
    for row, values in enumerate(matrix):
        if not np.all((values >= 0) & np.isfinite(values)):
            raise ValueError(
                f"transition_matrix must have finite nonnegative entries, got row {row}: "
                f"{values.tolist()}. Use LabelWeightedLoss for a channel's inverse."
            )
        if abs(sums[row] - 1.0) > 1e-6:
            raise ValueError(
                f"each row of transition_matrix must sum to one, got {sums[row]:.9g} in row {row}. "
                "If the columns sum to one, transpose it."
            )
    return matrix


def _check_shapes(y_true: Any, y_pred: Any, num_inputs: int, num_outputs: int) -> None:
    true_shape, pred_shape = tuple(y_true.shape), tuple(y_pred.shape)
    if len(pred_shape) != 2 or pred_shape[1] != num_inputs:
        raise ValueError(
            f"y_pred must have shape (batch, {num_inputs}), one score per row of "
            f"transition_matrix, got {pred_shape}. Give the model's last layer {num_inputs} units."
        )
    if len(true_shape) not in (1, 2) or true_shape[1:] not in ((), (1,), (num_outputs,)):
        raise ValueError(
            "y_true must be noisy labels: ids (batch,) or (batch, 1), or rows "
            f"(batch, {num_outputs}), one entry per column of transition_matrix, got {true_shape}."
        )
