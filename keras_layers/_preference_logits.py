"""Logits of private preferences between two public answers."""

import functools
from typing import Annotated, Any

import keras
from keras import ops

from ._in_files import NamesItsImport


@keras.saving.register_keras_serializable(package="tf_labeldp")
class PreferenceLogits(NamesItsImport, keras.layers.Layer):
    """Logits of two classes, "the second answer is preferred" and "the first one is".

    The log-odds of the first are ``beta * (s(first) - s(second))``: the Bradley-Terry model, if s
    is a reward; direct preference optimization (DPO), if s is a log-probability less that of a
    ``reference``. ``LabelWeightedLoss`` trains it on debiased noisy preferences, with the mean of
    the loss on true ones; ``ForwardCorrectedLoss`` is bounded below::

        pair = keras.Model([first, second], PreferenceLogits(scorer)((first, second)))
        pair.compile("adam", LabelWeightedLoss(from_logits=True))
        tf_labeldp.fit(pair, (answers_1, answers_2), noisy, targets="debiased")

    Afterwards ``scorer`` itself is trained, and carries the receipts. Equal answers have log-odds
    zero, and their preferences do not move the scorer.

    Args:
        model: a built Keras model with one number per answer, such as a reward or the sum of the
            log-probabilities of its tokens.
        reference: such as a copy of the model before the training; it is frozen, without dropout.
            None for zero.
        beta: the weight of the difference, above zero; in DPO about 0.1.
        **kwargs: as in ``keras.layers.Layer``.

    Call arguments:
        inputs: a pair of the model's inputs, ``(first, second)``; the logits are (batch, 2).

    Raises:
        ValueError: beta is not above zero, the reference is the model or shares weights with it,
            or a model returns several numbers per answer.

    Example:
        >>> import numpy as np
        >>> reward = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
        >>> reward.set_weights([np.array([[1.0], [0.0]])])
        >>> pairs = np.array([[3.0, 0.0]]), np.array([[1.0, 5.0]])
        >>> np.asarray(PreferenceLogits(reward, beta=0.5)(pairs)).tolist()
        [[-0.5, 0.5]]

    Source: Bradley and Terry 1952; Rafailov et al., "Direct Preference Optimization" (2023),
    equation 7; on noisy preferences, Chowdhury, Kini and Natarajan, "Provably Robust DPO" (2024).
    """

    def __init__(
        self,
        model: Annotated[Any, "setting"],
        reference: Annotated[Any, "setting"] = None,
        beta: float = 1.0,
        **kwargs: Annotated[Any, "setting"],
    ) -> None:
        super().__init__(**kwargs)
        if not 0.0 < beta < float("inf") or reference is model:
            raise ValueError(
                f"expected beta above zero and another model as reference, got beta={beta} and "
                f"{reference}. Copy the model: keras.models.clone_model, then set_weights."
            )
        # As parts of the layer, both models bring their receipts.
        self.model, self.reference, self.beta = model, reference, float(beta)
        if reference is not None:
            shared = {id(weight) for weight in model.weights} & {id(w) for w in reference.weights}
            if shared:
                raise ValueError(
                    "expected a reference with its own weights, got one that shares "
                    f"{len(shared)} with the model. Copy it: keras.models.clone_model, then "
                    "set_weights."
                )
            reference.trainable = False

    def call(self, inputs: tuple[Any, Any]) -> Any:
        """Returns the logits (batch, 2)."""
        first, second = inputs
        margin = _scores(self.model, first) - _scores(self.model, second)
        if self.reference is not None:
            fixed = functools.partial(self.reference, training=False)
            margin -= _scores(fixed, first) - _scores(fixed, second)
        half = 0.5 * self.beta * margin
        return ops.stack([-half, half], axis=-1)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor arguments, with the models serialized."""
        parts = {"model": self.model, "reference": self.reference}
        config = {name: keras.saving.serialize_keras_object(part) for name, part in parts.items()}
        return {**super().get_config(), **config, "beta": self.beta}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "PreferenceLogits":
        """Returns the layer of a config."""
        read = keras.saving.deserialize_keras_object
        parts = {name: read(config[name]) for name in ("model", "reference")}
        return cls(**{**config, **parts})


def _scores(model: Any, answers: Any) -> Any:
    scores = model(answers)
    if tuple(scores.shape[1:]) not in ((), (1,)):
        raise ValueError(
            f"expected a model with one number per answer, got shape {tuple(scores.shape)}. Sum "
            "the log-probabilities of the tokens, or end with Dense(1)."
        )
    # Differences of log-probabilities lose their digits in half precision.
    return ops.cast(ops.reshape(scores, (-1,)), keras.backend.result_type(scores.dtype, "float32"))
