"""One loss for all linear corrections of noisy labels."""

import functools
from collections.abc import Callable
from typing import Annotated, Any

import keras
from keras import ops

from ._noisy_label_loss import NoisyLabelLoss, check_rows, log_probabilities, upcast

_CROSS_ENTROPIES = (
    "categorical_crossentropy",
    "CategoricalCrossentropy",
    "sparse_categorical_crossentropy",
    "SparseCategoricalCrossentropy",
)


@keras.saving.register_keras_serializable(package="tf_labeldp")
class LabelWeightedLoss(NoisyLabelLoss):
    """Unbiased loss from the signed label weights of a channel's inverse.

    ``loss_i = sum_k w_ik * base(k, y_pred_i)``. If ``w_i`` is the noisy label's row in the inverse
    of the channel ``Q[true, noisy]``, the expectation over the noise is the loss on the true label:
    ``sum_z Q[y, z] loss(w(z), y_pred) = base(y, y_pred)``. RR-Debiased, the debiased RRTop-k loss
    and the matrix-inverse loss differ in the weights alone; ``tf_labeldp.estimation.debiased``
    computes them. The loss is linear in the weights, so mixing them (``Mixup``) keeps it unbiased.

    Some weights are negative, so the loss has no lower bound: if a model can memorise the examples,
    cross-entropy tends to minus infinity as the logits grow. RRTop-k on k labels multiplies the
    Lipschitz constant by up to ``1 + 2 k / (e^epsilon - 1)``. Stop early, regularise, take a
    bounded ``base`` (such as ``"mse"`` on probabilities), or use ``ForwardCorrectedLoss``.

    Args:
        base: the loss to debias. ``"categorical_crossentropy"`` and
            ``"sparse_categorical_crossentropy"`` (synonyms here) take O(K) time per example. Other
            losses evaluate every class in O(batch * K^2) time and memory: the name of a Keras loss
            or registered function, a ``keras.losses.Loss`` (its reduction is ignored), or a
            callable ``base(y_true, y_pred) -> (batch,)`` with one-hot ``y_true`` (batch, K), which
            must be registered with Keras to be saved with a model.
        from_logits: whether ``y_pred`` are logits. It is passed to a ``base`` by name; an instance
            or a callable has its own setting.
        reduction, name: as in ``keras.losses.Loss``.
        dtype: dtype of the computation; half precision becomes float32.

    Call arguments:
        y_true: weights (batch, K), of either sign; rows need not sum to one.
        y_pred: scores (batch, K), with a static K.
        sample_weight: None, (batch,) or (batch, 1).

    Raises:
        ValueError: ``base`` is unknown or takes class ids; ``from_logits`` is set for a ``base``
            without a name; on call, the inputs are not both (batch, K) with the same static K.

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
    17, Lemmas 18 and 19; Ghazi et al., "LabelDP-Pro" (2024), appendix D.1; for general channels,
    Patrini et al., "Making Deep Neural Networks Robust to Label Noise" (2017), Theorem 1.
    """

    def __init__(
        self,
        base: Annotated[str | Callable[[Any, Any], Any], "setting"] = "categorical_crossentropy",
        from_logits: bool = False,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "label_weighted_loss",
        dtype: Annotated[Any, "setting"] = None,
    ) -> None:
        super().__init__(from_logits, reduction, name, dtype)
        self.base = base
        self._base_function = _base_function(base, from_logits)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Returns the unreduced loss (batch,)."""
        hint = "Turn noisy labels into weights first, with tf_labeldp.estimation.debiased."
        check_rows(y_true, y_pred, hint)
        y_pred = upcast(y_pred)
        if self._base_function is not None:
            return _loss_of_every_class(y_true, y_pred, self._base_function)
        # The fused kernel of ops.categorical_crossentropy has the gradient softmax - target, which
        # is right only for targets that sum to one.
        weights = ops.cast(y_true, y_pred.dtype)
        return -ops.sum(weights * log_probabilities(y_pred, self.from_logits), axis=-1)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor arguments; an object as ``base`` is serialized."""
        base = self.base
        if not isinstance(base, str):
            base = keras.saving.serialize_keras_object(base)
        return {"base": base, **super().get_config()}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "LabelWeightedLoss":
        """Returns the loss of a config."""
        base = config.get("base")
        if isinstance(base, dict):
            config = {**config, "base": keras.saving.deserialize_keras_object(base)}
        return cls(**config)


def _loss_of_every_class(weights: Any, y_pred: Any, base: Callable[[Any, Any], Any]) -> Any:
    """Returns ``sum_k weights[i, k] * base(k, y_pred_i)`` by one call of ``base``."""
    num_classes = y_pred.shape[-1]
    zeros = ops.expand_dims(ops.zeros_like(y_pred), 1)
    one_hot = ops.reshape(zeros + ops.eye(num_classes, dtype=y_pred.dtype), (-1, num_classes))
    values = base(one_hot, ops.repeat(y_pred, num_classes, axis=0))
    if len(values.shape) != 1:
        raise ValueError(
            f"base must return one loss per example, got shape {tuple(values.shape)} for inputs "
            f"(batch, {num_classes}). Reduce over the last axis alone."
        )
    values = ops.reshape(values, (-1, num_classes))
    return ops.sum(ops.cast(weights, values.dtype) * values, axis=-1)


def _base_function(base: Any, from_logits: bool) -> Callable[[Any, Any], Any] | None:
    """Returns ``base`` as a function of one-hot targets; None for cross-entropy."""
    if isinstance(base, str):
        if base in _CROSS_ENTROPIES:
            return None
        loss = keras.saving.get_registered_object(base) or keras.losses.get(base)
        options = {"from_logits": True} if from_logits else {}
        kind = type(loss) if isinstance(loss, keras.losses.Loss) else loss
        base = kind(**options) if isinstance(kind, type) else functools.partial(loss, **options)
    elif (
        isinstance(base, keras.losses.SparseCategoricalCrossentropy)
        or base is keras.losses.sparse_categorical_crossentropy
    ):
        raise ValueError(
            f"base must take one-hot targets, got {base!r}, which takes class ids. Pass "
            'base="sparse_categorical_crossentropy" (with from_logits) instead.'
        )
    elif from_logits:
        raise ValueError(
            f"from_logits=True needs a base by name, got {base!r}. Set from_logits on the "
            "instance, or convert the scores in the callable."
        )
    # `call` of a loss does not reduce, unlike `__call__`.
    return base.call if isinstance(base, keras.losses.Loss) else base
