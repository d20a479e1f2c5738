"""The losses that public examples would have with each possible label, and the labels they fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_labeldp.gradients._model_checks import parts_of
from tf_labeldp.gradients._vectorized_clipping import Trace as _Trace
from tf_labeldp.gradients._vectorized_clipping import row_seeds as _row_seeds

_ONE_LOGIT = (
    keras.losses.BinaryCrossentropy,
    keras.losses.BinaryFocalCrossentropy,
    keras.losses.Hinge,
    keras.losses.SquaredHinge,
)


@dataclasses.dataclass(frozen=True, eq=False)
class VertexLosses:
    """What a denoiser may know of one step: public examples, and the model; no label.

    In training, the losses are of the same function as the gradient that was clipped: the model in
    training mode, where layers such as dropout draw for each row of the batch what they drew for
    its gradient. So the clean gradient of a batch is in the hull of its own vertices. Two cases are
    not covered. A custom layer that draws by ``tf.random``, or by ``keras.random`` without a
    ``keras.random.SeedGenerator`` of its own, draws anew in each evaluation. And a random layer
    that a model calls in several places may draw for them in another order.

    Attributes:
        losses: callable without arguments: (n, K) losses of n examples for each of K labels, from
            the current variables.
        predictions: callable without arguments: (n, K) weights of the labels, rows that sum to
            one: the model's own predictions. With cross-entropy and squared error the gradient
            vanishes there.
        variables: the trainable weights.
        mask: float (n,), 0 for rows that are padding; None where all count.
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

    losses: Callable[[], tf.Tensor]
    predictions: Callable[[], tf.Tensor]
    variables: list[Any]
    mask: tf.Tensor | None = None
    noise_stddev: Any = None


class TrainingPass:
    """The model in training mode, with the random numbers of the next gradient pass.

    It can be evaluated any number of times, always with the same numbers, and changes no state.

    Args:
        model: a built model.
        alone: whether the gradient pass has one example at a time, each with random numbers of its
            own (``PerExampleClipping.method`` is "vectorized"), and not the batch as a whole.
    """

    def __init__(self, model: keras.Model, *, alone: bool) -> None:
        self._model = model
        self._states = [
            generator.state for generator in parts_of(model, keras.random.SeedGenerator)
        ]
        self._now = [tf.identity(state.value) for state in self._states]
        self._alone = alone and bool(self._states)
        self.variables = list(model.trainable_variables)

    def __call__(self, x: Any) -> Any:
        """Returns the model's outputs for a batch of features."""
        if not self._alone:
            with self._drawing(self._now):
                return self._model(x, training=True)
        with self._drawing(self._now):  # which also keeps the states from moving on
            seeds = _row_seeds(self._states, tf.nest.flatten(x)[0].shape[0])

        def one(row: Any) -> Any:
            features = tf.nest.map_structure(lambda part: part[tf.newaxis], row[0])
            with self._drawing(row[1]):
                outputs = self._model(features, training=True)
            return tf.nest.map_structure(lambda part: part[0], outputs)

        rows = tf.nest.map_structure(tf.convert_to_tensor, (x, seeds))
        return _Trace.of(one, rows).map_rows(one, rows)

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

    With one number an example, the possible labels are the two ends of ``label_range``: the
    gradient for any label in between lies between theirs, as for squared error and whatever else
    has a derivative by the output that is monotone in the label. ``loss`` is as compiled, and
    ``per_example`` its losses (n,) from (y_true, y_pred); ``labels`` is how the labels of a batch
    look: class codes (n,) or (n, 1), or rows (n, K). Raises where an output is neither (n,), (n, 1)
    nor (n, K), or a number without a range.
    """
    resolved = keras.losses.get(loss) if isinstance(loss, (str, dict)) else loss

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
            codes = tf.constant(_ends(resolved, labels, label_range), tf.float32)
        elif labels.shape.rank == 2 and labels.shape[1] == y_pred.shape[1]:
            return tf.eye(y_pred.shape[1], dtype=labels.dtype)
        else:
            codes = tf.range(y_pred.shape[1])
        codes = tf.cast(codes, labels.dtype)
        return codes[:, None] if labels.shape.rank == 2 else codes

    def losses() -> tf.Tensor:
        y_pred = outputs()
        if not _is_one_number(y_pred) and _is_cross_entropy(resolved):
            return -tf.nn.log_softmax(y_pred)  # as below, in n K instead of n K^2 work
        known = candidates(y_pred)
        n, k = y_pred.shape[0], known.shape[0]
        tiles = tf.tile(known, [n] + [1] * (known.shape.rank - 1))
        return tf.reshape(per_example(tiles, tf.repeat(y_pred, k, axis=0)), (n, k))

    def predictions() -> tf.Tensor:
        y_pred = outputs()
        if not _is_one_number(y_pred):
            if getattr(resolved, "from_logits", False):
                return tf.nn.softmax(y_pred)
            shares = y_pred / tf.reduce_sum(y_pred, axis=1, keepdims=True)
            return tf.clip_by_value(shares, keras.config.epsilon(), 1.0)
        value = tf.reshape(y_pred, (-1,))
        if getattr(resolved, "from_logits", False):
            value = tf.sigmoid(value)
        low, high = _ends(resolved, labels, label_range)
        upper = tf.clip_by_value((value - low) / (high - low), 0.0, 1.0)
        return tf.stack([1.0 - upper, upper], axis=1)

    return VertexLosses(losses, predictions, forward.variables, mask, noise_stddev)


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
    plain = (keras.losses.SparseCategoricalCrossentropy, keras.losses.CategoricalCrossentropy)
    if type(loss) not in plain:
        return False
    config = loss.get_config()
    if not config.get("from_logits"):
        return False
    special = config.get("label_smoothing") or config.get("ignore_class") is not None
    return not special and config.get("axis", -1) == -1
