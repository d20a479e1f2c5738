"""The losses that public examples would have with each possible label, and the labels they fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_labeldp.accounting import Setting
from tf_labeldp.gradients._model_checks import loss_object, parts_of
from tf_labeldp.gradients._vectorized_clipping import Trace, row_seeds

_ONE_LOGIT = (
    keras.losses.BinaryCrossentropy,
    keras.losses.BinaryFocalCrossentropy,
    keras.losses.Hinge,
    keras.losses.SquaredHinge,
)


@dataclasses.dataclass(frozen=True, eq=False)
class VertexLosses:
    """What a denoiser may know of one step: public examples, and the model; no label.

    In training, the losses are those of the function whose gradient was clipped: the model in
    training mode, where layers such as dropout draw for each row what they drew for its gradient.
    So the clean gradient of a batch is in the hull of its own vertices. Not covered are a custom
    layer that draws without a ``keras.random.SeedGenerator`` of its own, and a random layer that a
    model calls in several places.

    Attributes:
        losses: callable without arguments: (n, K) losses of n examples for each of K labels, from
            the current variables.
        predictions: callable without arguments: the model's probabilities (n, K) of the labels.
            With cross-entropy and squared error the gradient vanishes there.
        variables: the trainable weights.
        mask: float (n,), 0 for rows that are padding; None where all count.
        cross_entropy: whether the losses are minus the logarithms of the predictions, which saves
            evaluations.
        noise_stddev: of the noise in each coordinate of the noisy mean gradient; None where it is
            not known.

    Example:
        >>> x, w = tf.constant([[1.0], [2.0]]), tf.Variable([[0.0, 1.0, 2.0]])
        >>> vertices = VertexLosses(
        ...     losses=lambda: -tf.nn.log_softmax(x @ w),
        ...     predictions=lambda: tf.nn.softmax(x @ w),
        ...     variables=[w],
        ... )
        >>> vertices.losses().shape
        TensorShape([2, 3])
    """

    losses: Setting[Callable[[], tf.Tensor]]
    predictions: Setting[Callable[[], tf.Tensor]]
    variables: Setting[list[Any]]
    mask: tf.Tensor | None = None
    noise_stddev: Setting[Any] = None
    cross_entropy: bool = False


class TrainingPass:
    """The model in training mode, with the random numbers of the next gradient pass.

    It changes no state. ``alone`` says whether that pass has one example at a time, each with
    random numbers of its own (``PerExampleClipping.method`` is "vectorized"); ``pieces`` how many
    replicas share its rows, who all draw the same.
    """

    def __init__(self, model: keras.Model, *, alone: bool, pieces: int = 1) -> None:
        self._model, self._pieces = model, pieces
        self._states = [part.state for part in parts_of(model, keras.random.SeedGenerator)]
        self._now = [tf.identity(state.value) for state in self._states]
        self._alone = alone and bool(self._states)
        self.variables = list(model.trainable_variables)

    def __call__(self, x: Any) -> Any:
        """Returns the model's outputs for a batch of features."""
        if self._pieces == 1:
            return self._outputs(x)
        parts = zip(*(tf.split(part, self._pieces) for part in tf.nest.flatten(x)), strict=True)
        outputs = [self._outputs(tf.nest.pack_sequence_as(x, part)) for part in parts]
        return tf.nest.map_structure(lambda *rows: tf.concat(rows, 0), *outputs)

    def _outputs(self, x: Any) -> Any:
        if not self._alone:
            with self._drawing(self._now):
                return self._model(x, training=True)
        with self._drawing(self._now):  # which also keeps the states from moving on
            seeds = row_seeds(self._states, tf.nest.flatten(x)[0].shape[0])

        def one(row: Any) -> Any:
            features = tf.nest.map_structure(lambda part: part[tf.newaxis], row[0])
            with self._drawing(row[1]):
                outputs = self._model(features, training=True)
            return tf.nest.map_structure(lambda part: part[0], outputs)

        rows = tf.nest.map_structure(tf.convert_to_tensor, (x, seeds))
        return Trace.of(one, rows).map_rows(one, rows)

    def _drawing(self, states: list[tf.Tensor]) -> keras.StatelessScope:
        """Returns a scope in which the generators are in these states, and nothing is written."""
        return keras.StatelessScope(state_mapping=list(zip(self._states, states, strict=True)))


def vertex_losses(
    forward: TrainingPass,
    loss: Any,
    per_example: Callable[[Any, Any], tf.Tensor],
    x: Any,
    mask: tf.Tensor | None,
    labels: tf.TensorSpec,
    label_range: tuple[float, float] | None,
    noise_stddev: Any = None,
) -> VertexLosses:
    """Returns the losses of public examples for each label that they could have.

    ``labels`` is how a batch's labels look: codes (n,) or (n, 1), or rows (n, K). For numbers the
    two ends of ``label_range`` do: gradients for labels in between lie between theirs, for squared
    error and whatever loss has a derivative by the output that is monotone in the label.
    """
    loss = loss_object(loss)
    from_logits = getattr(loss, "from_logits", False)

    def outputs() -> tf.Tensor:
        y_pred = forward(x)
        if not tf.is_tensor(y_pred) or y_pred.shape.rank not in (1, 2):
            shapes = tf.nest.map_structure(lambda part: tuple(part.shape), y_pred)
            raise ValueError(
                f"denoisers need a model that returns (n, K) scores or (n, 1) numbers, got shape "
                f"{shapes}. Flatten the output, or train with denoiser=None."
            )
        return tf.cast(y_pred, tf.float32)

    def candidates(y_pred: tf.Tensor) -> tf.Tensor:
        """Returns all labels that an example could have, (K, ...)."""
        if _is_one_number(y_pred):
            codes = tf.constant(_ends(loss, labels, label_range), tf.float32)
        elif labels.shape.rank == 2 and labels.shape[1] == y_pred.shape[1]:
            return tf.eye(y_pred.shape[1], dtype=labels.dtype)
        else:
            codes = tf.range(y_pred.shape[1])
        codes = tf.cast(codes, labels.dtype)
        return codes[:, None] if labels.shape.rank == 2 else codes

    def losses() -> tf.Tensor:
        y_pred = outputs()
        if not _is_one_number(y_pred) and _is_cross_entropy(loss):
            return -tf.nn.log_softmax(y_pred)  # as below, in n K instead of n K^2 work
        known = candidates(y_pred)
        n, k = y_pred.shape[0], known.shape[0]
        tiles = tf.tile(known, [n] + [1] * (known.shape.rank - 1))
        return tf.reshape(per_example(tiles, tf.repeat(y_pred, k, axis=0)), (n, k))

    def predictions() -> tf.Tensor:
        y_pred = outputs()
        if _is_one_number(y_pred):
            value = tf.reshape(tf.sigmoid(y_pred) if from_logits else y_pred, (-1,))
            low, high = _ends(loss, labels, label_range)
            upper = tf.clip_by_value((value - low) / (high - low), 0.0, 1.0)
            return tf.stack([1.0 - upper, upper], axis=1)
        if from_logits:
            return tf.nn.softmax(y_pred)
        shares = y_pred / tf.reduce_sum(y_pred, axis=1, keepdims=True)
        return tf.clip_by_value(shares, keras.config.epsilon(), 1.0)

    return VertexLosses(
        losses, predictions, forward.variables, mask, noise_stddev, _is_cross_entropy(loss)
    )


def _is_one_number(y_pred: tf.Tensor) -> bool:
    return bool(y_pred.shape.rank == 1 or y_pred.shape[1] == 1)


def _ends(
    loss: Any, labels: tf.TensorSpec, label_range: tuple[float, float] | None
) -> tuple[float, float]:
    """Returns the two labels of an output of one number, or raises where they are not known."""
    if label_range is not None:
        return label_range
    name = getattr(loss, "__name__", "")
    of_two_classes = isinstance(loss, _ONE_LOGIT) or name.startswith("binary_") or "hinge" in name
    if of_two_classes or labels.dtype == tf.bool:
        return 0.0, 1.0
    raise ValueError(
        f"the range of the labels is not known: with {getattr(loss, 'name', loss)!r} the model "
        "predicts numbers. Give them in PrivateLabels(labels, low=..., high=...), or train with "
        "denoiser=None."
    )


def _is_cross_entropy(loss: Any) -> bool:
    """Returns whether a loss is ``-log_softmax`` of the label's score, and nothing more."""
    plain = (keras.losses.SparseCategoricalCrossentropy, keras.losses.CategoricalCrossentropy)
    if type(loss) not in plain:
        return False
    config = loss.get_config()
    special = config.get("label_smoothing") or config.get("ignore_class") is not None
    return bool(config.get("from_logits")) and not special and config.get("axis", -1) == -1
