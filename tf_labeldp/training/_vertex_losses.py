"""The losses of public examples for each possible label."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_labeldp.accounting import Setting
from tf_labeldp.gradients.output_losses import OutputLosses
from tf_labeldp.gradients.per_example_clipping import TrainingPass


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

    @classmethod
    def of_model(
        cls,
        forward: Setting[TrainingPass],
        losses: Setting[OutputLosses],
        x: Setting[Any],
        labels: Setting[tf.TensorSpec],
        *,
        label_range: tuple[float, float] | None = None,
        mask: tf.Tensor | None = None,
        is_weighted: bool = False,
        noise_stddev: Setting[Any] = None,
    ) -> VertexLosses:
        """Returns the losses of a model on public examples for each possible label.

        For numbers the two ends of ``label_range`` suffice: gradients for other labels lie between
        theirs, with squared error and any loss whose derivative by the output is monotone in the
        label.

        Args:
            forward: the model in training mode.
            losses: the losses that the model was compiled with, of one output.
            x: features of n examples.
            labels: the spec of a batch's labels: codes (n,) or (n, 1), or rows (n, K).
            label_range: the ends of labels that are numbers.
            mask: as the attribute.
            is_weighted: whether ``mask`` has factors of the losses.
            noise_stddev: as the attribute.
        """
        weights = mask if is_weighted else None
        found = _ModelLosses(forward, losses, x, labels, label_range, weights)
        return cls(
            found.of_each_label,
            found.predictions,
            forward.variables,
            mask,
            noise_stddev,
            found.are_cross_entropy,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class _ModelLosses:
    """The losses of the examples of a batch as functions of their labels, before any is given.

    The fields are the arguments of ``VertexLosses.of_model``, with the factors (n,) of the losses.
    """

    forward: TrainingPass
    losses: OutputLosses
    x: Any
    labels: tf.TensorSpec
    label_range: tuple[float, float] | None
    weights: tf.Tensor | None

    @property
    def are_cross_entropy(self) -> bool:
        [part, *_] = self.losses.parts
        is_plain = part.is_plain and self.weights is None
        return is_plain and part.loss.is_plain_cross_entropy("categorical")

    def of_each_label(self) -> tf.Tensor:
        """Returns the losses (n, K)."""
        y_pred, mask = self._outputs()
        if not _is_one_number(y_pred) and self.are_cross_entropy:
            # The result is that below, in n K instead of n K^2 operations.
            return _shown(-tf.nn.log_softmax(y_pred), mask)
        each = self._possible_labels(y_pred)
        n, k = y_pred.shape[0], each.shape[0]
        tiles = tf.tile(each, [n] + [1] * (each.shape.rank - 1))
        each_loss = tf.reshape(self.losses(tiles, tf.repeat(y_pred, k, axis=0)), (n, k))
        each_loss = _shown(each_loss, mask)
        return each_loss if self.weights is None else each_loss * self.weights[:, tf.newaxis]

    def predictions(self) -> tf.Tensor:
        """Returns the probabilities (n, K)."""
        y_pred, _ = self._outputs()
        loss = self.losses.parts[0].loss
        if _is_one_number(y_pred):
            value = tf.reshape(tf.sigmoid(y_pred) if loss.from_logits else y_pred, (-1,))
            low, high = self._ends()
            upper = tf.clip_by_value((value - low) / (high - low), 0.0, 1.0)
            return tf.stack([1.0 - upper, upper], axis=1)
        if loss.from_logits:
            return tf.nn.softmax(y_pred)
        shares = y_pred / tf.reduce_sum(y_pred, axis=1, keepdims=True)
        return tf.clip_by_value(shares, keras.config.epsilon(), 1.0)

    def _outputs(self) -> tuple[tf.Tensor, Any]:
        y_pred, mask = self.forward(self.x)
        if not tf.is_tensor(y_pred) or y_pred.shape.rank not in (1, 2):
            shapes = tf.nest.map_structure(lambda part: tuple(part.shape), y_pred)
            raise ValueError(
                "expected (n, K) scores or (n, 1) numbers from a model with a denoiser, got "
                f"shape {shapes}. Flatten the output, or train with denoiser=None."
            )
        return tf.identity(tf.cast(y_pred, tf.float32)), mask

    def _possible_labels(self, y_pred: tf.Tensor) -> tf.Tensor:
        labels = self.labels
        if _is_one_number(y_pred):
            codes = tf.constant(self._ends(), tf.float32)
        elif labels.shape.rank == 2 and labels.shape[1] == y_pred.shape[1]:
            return tf.eye(y_pred.shape[1], dtype=labels.dtype)
        else:
            codes = tf.range(y_pred.shape[1])
        codes = tf.cast(codes, labels.dtype)
        return codes[:, None] if labels.shape.rank == 2 else codes

    def _ends(self) -> tuple[float, float]:
        if self.label_range is not None:
            return self.label_range
        loss = self.losses.parts[0].loss
        function = loss.function_name
        if function.startswith("binary_") or "hinge" in function or self.labels.dtype == tf.bool:
            return 0.0, 1.0
        raise ValueError(
            f"expected labels in a public range for {loss.name!r} and one output, got none. Give "
            "PrivateLabels(labels, Numbers(low, high)), or train with denoiser=None."
        )


def _shown(each_loss: tf.Tensor, mask: Any) -> tf.Tensor:
    # An example that the model masks has one loss for all labels, without a gradient: that of the
    # uniform distribution, which is read off the losses of cross-entropy.
    if mask is None:
        return each_loss
    keep = tf.cast(tf.reshape(mask, (-1, 1)), tf.bool)
    return tf.where(keep, each_loss, math.log(each_loss.shape[1]))


def _is_one_number(y_pred: tf.Tensor) -> bool:
    return bool(y_pred.shape.rank == 1 or y_pred.shape[1] == 1)
