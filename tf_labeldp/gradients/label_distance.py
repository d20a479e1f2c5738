"""Clips by the distance between an example's gradients for its two possible labels.

Let ``m`` be the margin of an example's logits (the only logit, or the second minus the first), and
``v`` its gradient, which needs no label. The gradient of cross-entropy is ``sigmoid(m) v`` for the
first class and ``-sigmoid(-m) v`` for the second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_labeldp.accounting.events import EventFields
from tf_labeldp.gradients.clip import Batch, Clip
from tf_labeldp.gradients.keras_loss import KerasLoss
from tf_labeldp.gradients.masks import mask_of
from tf_labeldp.gradients.model_checks import InspectedModel


@dataclasses.dataclass(frozen=True, eq=False)
class LabelDistanceClip(Clip):
    """Bounds the distance between an example's gradients for its two labels by ``2 l2_norm_clip``.

    Needs groups of one example, and a model and loss that ``check_model`` accepts.

    Guarantee:
        Each example is clipped to the largest norm at which its gradients for the two labels differ
        by at most ``D = 2 * l2_norm_clip``, or to ``LONGEST_CLIP * D`` if that is less. This norm
        depends on no label. An example adds exactly zero if its label is neither class, or if any
        of its numbers is not finite.
    """

    # The factors of the losses of the two classes.
    class_weights: Sequence[float] = (1.0, 1.0)

    @staticmethod
    def check_model(model: keras.Model, loss: KerasLoss) -> None:
        """Raises a ``ValueError`` unless the loss is cross-entropy of the logits of two classes."""
        shape = InspectedModel(model).output_shape
        one_logit = loss.is_plain_cross_entropy("binary")
        if not one_logit and not loss.is_plain_cross_entropy("categorical"):
            raise ValueError(
                "clipping='label_distance' needs plain cross-entropy of logits, got loss "
                f"{loss.name!r}. Use keras.losses.BinaryCrossentropy(from_logits=True) for one "
                "logit, SparseCategoricalCrossentropy or CategoricalCrossentropy for two, or "
                "clipping='norm'."
            )
        if not isinstance(shape, tuple) or shape[1:] != ((1,) if one_logit else (2,)):
            raise ValueError(
                "clipping='label_distance' is for two classes: expected a model that returns "
                f"{'one logit, (B, 1),' if one_logit else 'two logits, (B, 2),'} for the loss "
                f"{loss.name!r}, got shape {shape}. Use clipping='norm'."
            )

    @staticmethod
    def check_labels(labels: Any, outputs: int) -> None:
        """Raises a ``ValueError`` unless each label is a class code 0 or 1, or a one-hot row."""
        rows = _one_hot(tf.constant(labels), outputs)
        if not bool(tf.reduce_all(tf.reduce_any(rows > 0.0, axis=1))):
            raise ValueError(
                "clipping='label_distance' needs labels 0 or 1, or one-hot rows of two, and some "
                "are neither. Use clipping='norm' for soft labels."
            )

    def objective(self, batch: Batch, outputs: Any) -> tf.Tensor:
        """Returns the sum of the margins; their gradients need no label."""
        margins, mask = _margins(outputs), mask_of(outputs)
        if mask is not None:
            margins *= tf.cast(mask, tf.float32)
        return tf.reduce_sum(margins) * batch.loss_scale

    def coefficients(self, norms: tf.Tensor, batch: Batch, outputs: Any) -> tf.Tensor:
        """Returns the factor of each margin's gradient in the sum of clipped gradients."""
        margins = _margins(outputs)
        factors = tf.stack([tf.sigmoid(margins), -tf.sigmoid(-margins)], axis=1)
        factors *= batch.weights[:, tf.newaxis] * tf.constant(self.class_weights, tf.float32)
        lengths = tf.abs(factors) * norms[:, tf.newaxis]
        finite = tf.reduce_all(tf.math.is_finite(lengths), axis=1, keepdims=True)
        lengths = tf.where(finite, lengths, 0.0)
        # The gradients point in opposite directions, so their distance is the sum of their lengths.
        # Clipped to L, it is min(shorter, L) + min(longer, L), which is at most D for L up to
        # D - shorter, and for L up to D / 2 where both are longer. L is the same for both labels:
        # the bound is on the distance of two sums that differ in this label.
        distance = 2.0 * self.l2_norm_clip
        shorter = tf.reduce_min(lengths, axis=1, keepdims=True)
        longest = tf.maximum(0.5 * distance, distance - shorter)
        longest = tf.minimum(longest, EventFields.LONGEST_CLIP * distance)
        factors = tf.where(finite, factors, 0.0) * longest / tf.maximum(lengths, longest)
        return tf.reduce_sum(_one_hot(batch.y, outputs.shape[1]) * factors, axis=1)


def _margins(logits: tf.Tensor) -> tf.Tensor:
    logits = tf.cast(logits, tf.float32)
    return logits[:, -1] - (logits[:, 0] if logits.shape[1] == 2 else 0.0)


def _one_hot(y: tf.Tensor, outputs: int) -> tf.Tensor:
    """Converts labels, codes (B,) or (B, 1) or one-hot rows (B, 2), to one-hot rows (B, 2).

    Any other label becomes zeros, so that its example adds nothing.
    """
    if outputs == 2 and y.shape.rank == 2 and y.shape[1] == 2:
        rows = tf.cast(y, tf.float32)
        one_hot = tf.one_hot(tf.argmax(rows, axis=1), 2)
        return tf.where(tf.reduce_all(rows == one_hot, axis=1, keepdims=True), one_hot, 0.0)
    codes = tf.cast(tf.reshape(y, (-1, 1)), tf.float32)
    return tf.cast(codes == tf.constant([0.0, 1.0]), tf.float32)
