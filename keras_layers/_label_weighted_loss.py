"""One loss for every linear correction of noisy labels."""

import math
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from ._base_loss import resolve_base
from ._numerics import normalize_and_clip, promoted_dtype, upcast


def lipschitz_factor(epsilon: float, k: int) -> float:
    """Bound on how much debiasing RRTop-k enlarges a loss's Lipschitz constant.

    If `loss(., y)` is L-Lipschitz for every `y`, the debiased loss of equation 17 is
    `L * lipschitz_factor(epsilon, k)`-Lipschitz. With `p = 1 / (e^epsilon + k - 1)` the factor is
    `(1 + k p) / (1 - k p) = 1 + 2 k / (e^epsilon - 1)`. The lemma applies the triangle inequality
    to the two terms of equation 17; the l1 norm of the signed weights, which can be attained, is
    a little smaller: `1 + 2 (k - 1) / (e^epsilon - 1)`.

    Args:
        epsilon: Float > 0 (infinity included), the epsilon of the randomized response.
        k: Int >= 1, the number of labels it answers among (all classes: plain RR).

    Returns:
        The factor, a float >= 1.

    Raises:
        ValueError: If `epsilon` is not positive or `k` is below 1.

    Example:
        >>> import math
        >>> round(lipschitz_factor(math.log(3), k=2), 6)
        3.0

    Source: Ghazi et al., "Deep Learning with Label Differential Privacy" (2021), Lemma 19.
    """
    if not epsilon > 0:
        raise ValueError(
            f"`epsilon` must be positive. Received: epsilon={epsilon}. "
            "At epsilon 0 the labels carry no information and the loss can't be debiased."
        )
    if k < 1:
        raise ValueError(f"`k` counts labels and must be at least 1. Received: k={k}.")
    decay = math.exp(-epsilon)
    return 1.0 + 2.0 * k * decay / -math.expm1(-epsilon)


def label_weighted_crossentropy(weights: Any, y_pred: Any, from_logits: bool = False) -> Any:
    """`-sum_k weights[i, k] * log p_i[k]` in O(K) an example.

    Args:
        weights: Float tensor `(batch, K)`, any sign, rows need not sum to one.
        y_pred: Float tensor `(batch, K)`: probabilities (normalised and clipped to
            `[epsilon, 1 - epsilon]`, as Keras does) or logits.
        from_logits: Whether `y_pred` holds logits.

    Returns:
        Tensor `(batch,)`, at least float32.
    """
    # Not ops.categorical_crossentropy: a fused kernel's gradient (softmax - target) takes for
    # granted that the targets sum to one.
    y_pred = upcast(y_pred)
    weights = ops.cast(weights, y_pred.dtype)
    if from_logits:
        log_probabilities = ops.log_softmax(y_pred, axis=-1)
    else:
        log_probabilities = ops.log(normalize_and_clip(y_pred))
    return -ops.sum(weights * log_probabilities, axis=-1)


def label_weighted_loss(weights: Any, y_pred: Any, base: Callable[[Any, Any], Any]) -> Any:
    """`sum_k weights[i, k] * base(k, y_pred_i)` with every class evaluated.

    Every prediction is repeated for the K classes and `base` is called once, on `(batch * K, K)`
    tensors: O(batch * K^2) time and memory.

    Args:
        weights: Float tensor `(batch, K)`, any sign.
        y_pred: Float tensor `(batch, K)`, K static.
        base: Callable `base(y_true, y_pred) -> (n,)` on one-hot `y_true` `(n, K)` and `y_pred`
            `(n, K)` of the same dtype (at least float32).

    Returns:
        Tensor `(batch,)`, at least float32.

    Raises:
        ValueError: If `base` returns anything but one value an example.
    """
    y_pred = upcast(y_pred)
    num_classes = y_pred.shape[-1]
    zeros = ops.expand_dims(ops.zeros_like(y_pred), 1)
    one_hot = ops.reshape(zeros + ops.eye(num_classes, dtype=y_pred.dtype), (-1, num_classes))
    values = base(one_hot, ops.repeat(y_pred, num_classes, axis=0))
    if len(values.shape) != 1:
        raise ValueError(
            "`base` must return one loss an example, of shape (batch,). Received shape: "
            f"{tuple(values.shape)} for inputs of shape (batch, {num_classes}). "
            "Reduce over the last axis alone."
        )
    values = ops.reshape(values, (-1, num_classes))
    return ops.sum(ops.cast(weights, values.dtype) * values, axis=-1)


@keras.saving.register_keras_serializable(package="tf_labeldp")
class LabelWeightedLoss(keras.losses.Loss):
    """Unbiased loss from the signed label weights of a channel's inverse.

    `loss_i = sum_k w_ik * base(k, y_pred_i)`. With `w_i` the row of the noisy label in the inverse
    of the channel `Q[true, noisy]`, the expectation over the noise is the loss on the true label:
    `sum_z Q[y, z] loss(w(z), y_pred) = base(y, y_pred)`. RR-Debiased, the debiased RRTop-k loss
    and the matrix-inverse loss differ in the weights alone
    (`tf_labeldp.estimation.debiased` computes them). The loss is linear in the weights,
    so that mixing them (`Mixup`) keeps it unbiased.

    **Unbounded below.** Weights are negative for some classes, so on one example, and on a finite
    training set that a model can memorise, cross-entropy has no minimum: it tends to minus
    infinity as the logits grow. The Lipschitz constant grows by `lipschitz_factor(epsilon, k)`.
    Stop early, regularise, or use `ForwardCorrectedLoss`, which is bounded below by zero. A
    bounded `base` (such as `"mse"` on probabilities) is bounded on both sides.

    Computed in at least float32, whatever the dtype policy: half-precision inputs are cast up.

    Args:
        base: The loss to debias. `"categorical_crossentropy"` and
            `"sparse_categorical_crossentropy"` (synonyms here, O(K) an example); another Keras
            loss or registered function by name; a `keras.losses.Loss` instance (its own
            reduction is ignored); or a callable `base(y_true, y_pred) -> (batch,)` with one-hot
            `y_true` `(batch, K)`. These evaluate all classes: O(batch * K^2) time and memory.
            To be saved with a model, a callable must be registered with Keras.
        from_logits: Whether `y_pred` holds logits. Passed to a `base` given by name; an instance
            or a callable decides for itself.
        reduction: As in `keras.losses.Loss`.
        name: Name of the loss.
        dtype: Dtype of the loss's computations; half-precision ones are raised to float32.

    Call arguments:
        y_true: Weights `(batch, K)`, any sign.
        y_pred: Scores `(batch, K)`, K static.
        sample_weight: Optional, `(batch,)` or `(batch, 1)`.

    Raises:
        ValueError: If `base` is unknown or takes no `from_logits` that is asked for; on call, if
            the inputs are not both `(batch, K)` with the same static K.

    Example:
        >>> import numpy as np
        >>> channel = np.array([[0.75, 0.25], [0.25, 0.75]])  # RR, epsilon = log 3
        >>> weights = np.linalg.inv(channel)[[0, 1]]  # noisy labels 0 and 1
        >>> weights.tolist()
        [[1.5, -0.5], [-0.5, 1.5]]
        >>> loss = LabelWeightedLoss("mse")
        >>> float(loss(weights, np.array([[1.0, 0.0], [1.0, 0.0]])))
        0.5

    Source: Ghazi et al., "Deep Learning with Label Differential Privacy" (2021), equations 7 and
    17, Lemmas 18 and 19; Ghazi et al., "LabelDP-Pro" (2024), appendix D.1; the general matrix:
    Patrini et al., "Making Deep Neural Networks Robust to Label Noise" (2017), Theorem 1.
    """

    def __init__(
        self,
        base: str | Callable[[Any, Any], Any] = "categorical_crossentropy",
        from_logits: bool = False,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "label_weighted_loss",
        dtype: Any = None,
    ) -> None:
        """See the class."""
        super().__init__(name=name, reduction=reduction, dtype=promoted_dtype(dtype))
        self._dtype_argument = None if dtype is None else self.dtype
        self.base = base
        self.from_logits = from_logits
        self._base_function = resolve_base(base, from_logits)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Unreduced loss `(batch,)`."""
        _check_shapes(y_true, y_pred)
        if self._base_function is None:
            return label_weighted_crossentropy(y_true, y_pred, self.from_logits)
        return label_weighted_loss(y_true, y_pred, self._base_function)

    def get_config(self) -> dict[str, Any]:
        """Every constructor argument; `base` serialized by Keras unless it is a name."""
        base = self.base
        return {
            "base": base if isinstance(base, str) else keras.saving.serialize_keras_object(base),
            "from_logits": self.from_logits,
            "reduction": self.reduction,
            "name": self.name,
            "dtype": self._dtype_argument,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "LabelWeightedLoss":
        """Inverse of `get_config`."""
        config = dict(config)
        if isinstance(config.get("base"), dict):
            config["base"] = keras.saving.deserialize_keras_object(config["base"])
        return cls(**config)


def _check_shapes(y_true: Any, y_pred: Any) -> None:
    true_shape, pred_shape = tuple(y_true.shape), tuple(y_pred.shape)
    if len(pred_shape) != 2 or pred_shape[-1] is None:
        raise ValueError(
            "`y_pred` must hold scores of shape (batch, num_classes) with num_classes known when "
            f"the model is built. Received: y_pred.shape={pred_shape}. Flatten other axes into "
            "the batch."
        )
    if len(true_shape) != 2:
        raise ValueError(
            "`y_true` must hold label weights of shape (batch, num_classes). Received: "
            f"y_true.shape={true_shape}. Turn noisy labels into weights first, with "
            "tf_labeldp.estimation.debiased or rows of the channel's inverse."
        )
    if true_shape[-1] is not None and true_shape[-1] != pred_shape[-1]:
        raise ValueError(
            "`y_true` and `y_pred` must have the same number of classes. Received: "
            f"y_true.shape={true_shape}, y_pred.shape={pred_shape}. Give the model's last layer "
            f"{true_shape[-1]} units, or build the weights for {pred_shape[-1]} classes."
        )
