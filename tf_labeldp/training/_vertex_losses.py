"""The losses of public examples for each possible label."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_labeldp.accounting import Setting
from tf_labeldp.gradients.masks import mask_of, masks_by_place, with_masks
from tf_labeldp.gradients.model_checks import (
    is_plain_cross_entropy,
    loss_object,
    name_of,
    parts_of,
)
from tf_labeldp.gradients.vectorized_clipping import Trace, row_seeds


@dataclasses.dataclass(frozen=True, eq=False)
class VertexLosses:
    """The inputs of a denoiser in one step: the model on public examples, without labels.

    The losses are those whose gradient was clipped: the model in training mode, with the same
    random masks (dropout). So the clean gradient of a batch is in the hull of the batch's vertices,
    except with custom layers that draw without a ``keras.random.SeedGenerator``, and with random
    layers that a model calls in several places.

    Attributes:
        losses: callable without arguments: (n, K) losses of n examples for each of K labels, from
            the current variables.
        predictions: callable without arguments: the model's probabilities (n, K) of the labels,
            where the gradient of cross-entropy and squared error vanishes.
        variables: the trainable weights.
        mask: float (n,), 0 for padding; None if no row is padding.
        cross_entropy: whether the losses are minus the logarithms of the predictions, which saves
            evaluations.
        noise_stddev: standard deviation of the noise in each coordinate of the noisy mean gradient;
            None if unknown.

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

    It changes no state. ``by_example`` draws random numbers per example, as the method "vectorized"
    does; ``pieces`` replicas share the rows and draw the same numbers; ``forward`` calls the model.
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        by_example: bool,
        pieces: int = 1,
        forward: Callable[[Any], Any] | None = None,
    ) -> None:
        self._forward = forward or functools.partial(model, training=True)
        self._pieces = pieces
        self._states = [part.state for part in parts_of(model, keras.random.SeedGenerator)]
        self._now = [tf.identity(state.value) for state in self._states]
        self._by_example = by_example and bool(self._states)
        self.variables = list(model.trainable_variables)

    def __call__(self, x: Any) -> Any:
        if self._pieces == 1:
            return self._outputs(x)
        parts = zip(*(tf.split(part, self._pieces) for part in tf.nest.flatten(x)), strict=True)
        outputs = [self._outputs(tf.nest.pack_sequence_as(x, part)) for part in parts]
        masks = [masks_by_place(part) for part in outputs]
        whole, masks = (
            tf.nest.map_structure(lambda *rows: tf.concat(rows, 0), *parts)
            for parts in (outputs, masks)
        )
        return with_masks(whole, masks)

    def _outputs(self, x: Any) -> Any:
        if not self._by_example:
            with self._drawing(self._now):
                return self._forward(x)
        # The scope also keeps the states of the generators.
        with self._drawing(self._now):
            seeds = row_seeds(self._states, tf.nest.flatten(x)[0].shape[0])

        def row_outputs(row: Any) -> Any:
            features = tf.nest.map_structure(lambda part: part[tf.newaxis], row[0])
            with self._drawing(row[1]):
                outputs = self._forward(features)
            return tf.nest.map_structure(lambda part: part[0], (outputs, masks_by_place(outputs)))

        rows = tf.nest.map_structure(tf.convert_to_tensor, (x, seeds))
        return with_masks(*Trace.of(row_outputs, rows).map_rows(row_outputs, rows))

    def _drawing(self, states: list[tf.Tensor]) -> keras.StatelessScope:
        """Returns a scope with these states of the generators, in which nothing is written."""
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
    weights: tf.Tensor | None = None,
    is_plain: bool = True,
) -> VertexLosses:
    """Returns the losses of public examples for each possible label.

    ``weights`` (n,) are factors of the losses; ``is_plain`` is whether ``per_example`` is the loss
    without other factors.

    ``labels`` is the spec of a batch's labels: codes (n,) or (n, 1), or rows (n, K). For numbers
    the two ends of ``label_range`` suffice: gradients for other labels lie between theirs, with
    squared error and any loss whose derivative by the output is monotone in the label.
    """
    loss = loss_object(loss)
    from_logits = getattr(loss, "from_logits", False)
    cross_entropy = is_plain_cross_entropy(loss, "categorical") and is_plain and weights is None

    def outputs() -> tf.Tensor:
        y_pred = forward(x)
        mask = mask_of(y_pred)
        if not tf.is_tensor(y_pred) or y_pred.shape.rank not in (1, 2):
            shapes = tf.nest.map_structure(lambda part: tuple(part.shape), y_pred)
            raise ValueError(
                f"expected (n, K) scores or (n, 1) numbers from a model with a denoiser, got shape "
                f"{shapes}. Flatten the output, or train with denoiser=None."
            )
        y_pred = tf.identity(tf.cast(y_pred, tf.float32))
        return with_masks(y_pred, {} if mask is None else {"0": mask})

    def candidates(y_pred: tf.Tensor) -> tf.Tensor:
        if _is_one_number(y_pred):
            codes = tf.constant(_ends(loss, labels, label_range), tf.float32)
        elif labels.shape.rank == 2 and labels.shape[1] == y_pred.shape[1]:
            return tf.eye(y_pred.shape[1], dtype=labels.dtype)
        else:
            codes = tf.range(y_pred.shape[1])
        codes = tf.cast(codes, labels.dtype)
        return codes[:, None] if labels.shape.rank == 2 else codes

    def shown(each_loss: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        # An example that the model masks has one loss for all labels, without a gradient: that of
        # the uniform distribution, which is read off the losses of cross-entropy.
        mask = mask_of(y_pred)
        if mask is None:
            return each_loss
        keep = tf.cast(tf.reshape(mask, (-1, 1)), tf.bool)
        return tf.where(keep, each_loss, math.log(each_loss.shape[1]))

    def losses() -> tf.Tensor:
        y_pred = outputs()
        if not _is_one_number(y_pred) and cross_entropy:
            # The result is that below, in n K instead of n K^2 operations.
            return shown(-tf.nn.log_softmax(y_pred), y_pred)
        each = candidates(y_pred)
        n, k = y_pred.shape[0], each.shape[0]
        tiles = tf.tile(each, [n] + [1] * (each.shape.rank - 1))
        each_loss = tf.reshape(per_example(tiles, tf.repeat(y_pred, k, axis=0)), (n, k))
        each_loss = shown(each_loss, y_pred)
        return each_loss if weights is None else each_loss * weights[:, tf.newaxis]

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

    return VertexLosses(losses, predictions, forward.variables, mask, noise_stddev, cross_entropy)


def _is_one_number(y_pred: tf.Tensor) -> bool:
    return bool(y_pred.shape.rank == 1 or y_pred.shape[1] == 1)


def _ends(
    loss: Any, labels: tf.TensorSpec, label_range: tuple[float, float] | None
) -> tuple[float, float]:
    if label_range is not None:
        return label_range
    function = getattr(getattr(loss, "fn", loss), "__name__", "")
    if function.startswith("binary_") or "hinge" in function or labels.dtype == tf.bool:
        return 0.0, 1.0
    raise ValueError(
        f"expected labels in a public range for {name_of(loss)!r} and one output, got none. Give "
        "PrivateLabels(labels, low=..., high=...), or train with denoiser=None."
    )
