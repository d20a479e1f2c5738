"""Cross-entropy to the posterior of the true class given a noisy one-hot label."""

import math
from typing import Annotated, Any

import keras
from keras import ops

from ._noisy_label_loss import NoisyLabelLoss, check_rows, log_probabilities, upcast


@keras.saving.register_keras_serializable(package="tf_labeldp")
class ALIBILoss(NoisyLabelLoss):
    """Cross-entropy between the prediction and its Bayes update by a noisy one-hot label.

    ``loss_i = -sum_k q_ik log p_i[k]``, where ``q_i`` is the posterior of the true class given the
    noisy row ``x_i`` of ``tf_labeldp.mechanisms.ALIBI``, under the prediction ``p_i`` as the prior:

    - Laplace noise of scale b: ``q_ik ~ p_ik exp((|x_ik| - |x_ik - 1|) / b)``;
    - Gaussian noise: ``q_ik ~ p_ik exp(x_ik / sigma^2)``.

    The posterior is recomputed at each step and treated as a constant: with logits the gradient is
    ``softmax(y_pred) - q``, that of the negative log-likelihood of the noisy row.

    Do not stop early or select models by the value of the loss: it is near zero for any confident
    prediction, right or wrong. The model is its own prior, so a confident model outweighs a noisy
    label and then learns from itself (with Laplace noise, if the log-probabilities of two classes
    differ by more than ``2 / b``). Start from small weights with a small or warmed-up learning
    rate. For a fixed prior, train on ``tf_labeldp.estimation.posterior`` with cross-entropy.

    Guarantee:
        Post-processing of rows that are already private, drawn once and fixed over all epochs.

    Args:
        noise: ``"laplace"`` or ``"gaussian"``.
        scale: ``mechanism.scale``: b for Laplace noise (``2 / epsilon``), the standard deviation
            for Gaussian noise; finite and above zero.
        from_logits: whether ``y_pred`` are logits (the default here, to avoid underflow).
        reduction, name: as in ``keras.losses.Loss``.
        dtype: dtype of the computation; half precision becomes float32.

    Call arguments:
        y_true: noisy one-hot labels (batch, K), finite, of either sign.
        y_pred: scores (batch, K), K at least 2; probabilities are normalised and clipped.
        sample_weight: None, (batch,) or (batch, 1).

    Raises:
        ValueError: ``noise`` is unknown or ``scale`` is out of range; on call, the inputs are not
            both (batch, K).

    Example:
        >>> import numpy as np
        >>> loss = ALIBILoss("laplace", scale=1.0)
        >>> noisy, logits = np.array([[0.9, -0.2, 0.4]]), np.zeros((1, 3))
        >>> round(float(loss(noisy, logits)), 6)  # all q sum to one, all p are 1/3: log 3
        1.098612

    Source: Malek et al., "Antipodes of Label Differential Privacy: PATE and ALIBI" (2021).
    """

    def __init__(
        self,
        noise: str,
        scale: float,
        from_logits: bool = True,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "alibi_loss",
        dtype: Annotated[Any, "setting"] = None,
    ) -> None:
        super().__init__(from_logits, reduction, name, dtype)
        if noise not in ("laplace", "gaussian"):
            raise ValueError(f"noise must be one of laplace, gaussian, got {noise!r}.")
        if not 0.0 < scale < math.inf:
            raise ValueError(f"scale must be finite and above zero, got {scale}.")
        self.noise, self.scale = noise, float(scale)

    @classmethod
    def of(
        cls, mechanism: Annotated[Any, "setting"], **options: Annotated[Any, "setting"]
    ) -> "ALIBILoss":
        """Returns the loss for the rows that a ``tf_labeldp.mechanisms.ALIBI`` releases.

        Args:
            mechanism: anything with ``noise`` and ``scale``.
            **options: the other arguments of the class.
        """
        return cls(mechanism.noise, mechanism.scale, **options)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Returns the unreduced loss (batch,)."""
        check_rows(y_true, y_pred, "Train on the rows that tf_labeldp.mechanisms.ALIBI releases.")
        if y_pred.shape[1] < 2:
            raise ValueError("y_pred must have scores of at least two classes, got one.")
        log_prior = log_probabilities(upcast(y_pred), self.from_logits)
        y_true = ops.cast(y_true, log_prior.dtype)
        if self.noise == "laplace":
            # |x| - |x - 1| without a difference of two large numbers.
            log_likelihood = (2.0 * ops.clip(y_true, 0.0, 1.0) - 1.0) / self.scale
        else:
            largest = ops.max(y_true, axis=-1, keepdims=True)
            # Two divisions, because the square may underflow.
            log_likelihood = (y_true - largest) / self.scale / self.scale
        posterior = ops.softmax(log_prior + log_likelihood, axis=-1)
        return -ops.sum(ops.stop_gradient(posterior) * log_prior, axis=-1)

    def get_config(self) -> dict[str, Any]:
        return {"noise": self.noise, "scale": self.scale, **super().get_config()}
