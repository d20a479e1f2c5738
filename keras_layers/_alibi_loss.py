"""Cross-entropy to the posterior of the true class given a noisy one-hot label."""

import math
import numbers
from typing import Any

import keras
from keras import ops

from ._numerics import normalize_and_clip, promoted_dtype, upcast

_NOISES = ("laplace", "gaussian")


def alibi_crossentropy(
    y_true: Any, y_pred: Any, noise: str, scale: float, from_logits: bool = False
) -> Any:
    """`-sum_k q[i, k] * log p_i[k]` with `q_i` the posterior for the prior `p_i`, a constant.

    Args:
        y_true: Noisy one-hot labels `(batch, K)`, float, finite.
        y_pred: Float tensor `(batch, K)`: probabilities (normalised and clipped to
            `[epsilon, 1 - epsilon]`, as Keras does) or logits.
        noise: `"laplace"` or `"gaussian"`.
        scale: Scale `b` of the Laplace noise, or standard deviation of the Gaussian one.
        from_logits: Whether `y_pred` holds logits.

    Returns:
        Tensor `(batch,)`, at least float32.
    """
    y_pred = upcast(y_pred)
    y_true = ops.cast(y_true, y_pred.dtype)
    if from_logits:
        log_probabilities = ops.log_softmax(y_pred, axis=-1)
    else:
        log_probabilities = ops.log(normalize_and_clip(y_pred))
    if noise == "laplace":
        # |x| - |x - 1|, without the difference of two large numbers.
        log_likelihood = (2.0 * ops.clip(y_true, 0.0, 1.0) - 1.0) / scale
    else:
        largest = ops.max(y_true, axis=-1, keepdims=True)
        log_likelihood = (y_true - largest) / scale / scale  # the square may underflow
    posterior = ops.softmax(log_probabilities + log_likelihood, axis=-1)
    return -ops.sum(ops.stop_gradient(posterior) * log_probabilities, axis=-1)


@keras.saving.register_keras_serializable(package="tf_labeldp")
class ALIBILoss(keras.losses.Loss):
    """Cross-entropy to what Bayes' rule makes of a noisy one-hot label and the model's prediction.

    `loss_i = -sum_k q_ik log p_i[k]`, where `q_i` is the posterior of the true class for the noisy
    row `x_i` of `tf_labeldp.mechanisms.ALIBI`, with the model's own prediction `p_i` for the prior:

    - Laplace noise of scale b: `q_ik ~ p_ik exp((|x_ik| - |x_ik - 1|) / b)`;
    - Gaussian noise: `q_ik ~ p_ik exp(x_ik / sigma^2)`.

    The posterior is computed anew in each step, in the pass that computes the loss, and no gradient
    flows through it: with logits the gradient is `softmax(y_pred) - q`. That is also the gradient
    of `-log sum_k p_ik f(x_i - e_k)` with the density f of the noise, so training is a search for
    the maximum likelihood of the noisy rows.

    **The value is no measure of fit**: a prediction that is sure of any one class has a loss near
    zero. Don't stop early or choose models by it.

    **The model is its own prior.** A confident model outweighs a noisy label and then learns from
    itself: where `|log p_ij - log p_ik|` is above `2 / b`, no Laplace row makes the less likely
    one of the classes j and k the likelier. Start from small weights and a small or warmed-up
    learning rate. For a fixed prior train on `tf_labeldp.estimation.posterior` with Keras's
    categorical cross-entropy.

    It is post-processing of rows that are private already, drawn once and the same in every epoch.
    Computed in at least float32, whatever the dtype policy: half-precision inputs are cast up.

    Args:
        noise: `"laplace"` or `"gaussian"`.
        scale: `mechanism.scale`: b for Laplace noise (`2 / epsilon`), the standard deviation for
            Gaussian noise; finite and above zero.
        from_logits: Whether `y_pred` holds logits (the default here, for no underflow).
        reduction: As in `keras.losses.Loss`.
        name: Name of the loss.
        dtype: Dtype of the loss's computations; half-precision ones are raised to float32.

    Call arguments:
        y_true: Noisy one-hot labels `(batch, K)`, of either sign, finite.
        y_pred: Scores `(batch, K)`.
        sample_weight: Optional, `(batch,)` or `(batch, 1)`.

    Raises:
        TypeError: If `scale` is not a number.
        ValueError: If `noise` is unknown or `scale` out of range; on call, if the inputs are not
            both `(batch, K)`.

    Example:
        >>> import numpy as np
        >>> loss = ALIBILoss("laplace", scale=1.0)
        >>> noisy, logits = np.array([[0.9, -0.2, 0.4]]), np.zeros((1, 3))
        >>> round(float(loss(noisy, logits)), 6)  # all q sum to one, all p are 1/3: log 3
        1.098612
        >>> skewed = np.log([[0.5, 0.25, 0.25]])
        >>> round(float(loss(noisy, skewed)), 4)
        0.839

    Source: Malek et al., "Antipodes of Label Differential Privacy: PATE and ALIBI" (2021).
    """

    def __init__(
        self,
        noise: str,
        scale: float,
        from_logits: bool = True,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "alibi_loss",
        dtype: Any = None,
    ) -> None:
        """See the class."""
        super().__init__(name=name, reduction=reduction, dtype=promoted_dtype(dtype))
        self._dtype_argument = None if dtype is None else self.dtype
        if noise not in _NOISES:
            raise ValueError(f"`noise` must be one of {_NOISES}. Received: noise={noise!r}.")
        self.noise = noise
        self.scale = _check_scale(scale)
        self.from_logits = from_logits

    @classmethod
    def of(cls, mechanism: Any, **options: Any) -> "ALIBILoss":
        """The loss for the rows that a `tf_labeldp.mechanisms.ALIBI` releases.

        Args:
            mechanism: Anything with `noise` and `scale`.
            **options: The other arguments of the class.
        """
        if not (hasattr(mechanism, "noise") and hasattr(mechanism, "scale")):
            raise TypeError(
                "`mechanism` must have `noise` and `scale`, as tf_labeldp.mechanisms.ALIBI has. "
                f"Received: {type(mechanism).__name__}."
            )
        return cls(mechanism.noise, mechanism.scale, **options)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Unreduced loss `(batch,)`."""
        _check_shapes(y_true, y_pred)
        return alibi_crossentropy(y_true, y_pred, self.noise, self.scale, self.from_logits)

    def get_config(self) -> dict[str, Any]:
        """Every constructor argument."""
        return {
            "noise": self.noise,
            "scale": self.scale,
            "from_logits": self.from_logits,
            "reduction": self.reduction,
            "name": self.name,
            "dtype": self._dtype_argument,
        }


def _check_scale(scale: Any) -> float:
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(
            f"`scale` must be a number, such as mechanism.scale. Received: {type(scale).__name__}."
        )
    number = float(scale)
    if not (math.isfinite(number) and number > 0.0):
        raise ValueError(
            f"`scale` must be finite and above zero, such as mechanism.scale. Received: {number}."
        )
    return number


def _check_shapes(y_true: Any, y_pred: Any) -> None:
    true_shape, pred_shape = tuple(y_true.shape), tuple(y_pred.shape)
    if len(pred_shape) != 2 or pred_shape[-1] in (None, 1):
        raise ValueError(
            "`y_pred` must hold scores of shape (batch, num_classes), with one score for each of "
            f"at least two classes. Received: y_pred.shape={pred_shape}."
        )
    if len(true_shape) != 2 or true_shape[-1] not in (None, pred_shape[-1]):
        raise ValueError(
            f"`y_true` must hold noisy one-hot labels of shape (batch, {pred_shape[-1]}), as "
            f"tf_labeldp.mechanisms.ALIBI releases them. Received: y_true.shape={true_shape}, "
            f"y_pred.shape={pred_shape}."
        )
