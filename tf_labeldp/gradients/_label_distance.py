"""Clips by how far the gradients that one example could have are apart, one for each label.

The gradients of cross-entropy are ``J^T (p - e_k)``, with J the gradients of an example's logits, p
its predictions and ``e_k`` one-hot label k: combinations of ``K - 1`` directions, which no label is
needed for. With one logit there is one direction.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_labeldp.accounting._events import LONGEST_CLIP
from tf_labeldp.gradients._clip import Batch
from tf_labeldp.gradients._model_checks import loss_object

_CROSS_ENTROPIES = (
    keras.losses.BinaryCrossentropy,
    keras.losses.CategoricalCrossentropy,
    keras.losses.SparseCategoricalCrossentropy,
)


def check_candidates(model: keras.Model, loss: Any) -> None:
    """Raises a ``ValueError`` unless the gradients for all labels are those of this module."""
    loss = loss_object(loss)
    config = loss.get_config() if type(loss) in _CROSS_ENTROPIES else {}
    special = config.get("label_smoothing") or config.get("ignore_class") is not None
    if not config.get("from_logits") or special or config.get("axis", -1) != -1:
        name = getattr(loss, "name", None) or getattr(loss, "__name__", type(loss).__name__)
        raise ValueError(
            "clipping='label_distance' knows the gradients for all labels of plain cross-entropy "
            f"of logits alone, got loss {name!r}. Use keras.losses.SparseCategoricalCrossentropy("
            "from_logits=True), CategoricalCrossentropy or BinaryCrossentropy likewise, or "
            "clipping='norm'."
        )
    shape: Any = getattr(model, "output_shape", None)
    one = isinstance(loss, keras.losses.BinaryCrossentropy)
    fits = isinstance(shape, tuple) and len(shape) == 2 and isinstance(shape[1], int)
    if not fits or (shape[1] == 1) != one:
        raise ValueError(
            "clipping='label_distance' needs a model that returns "
            f"{'one logit, (B, 1)' if one else 'K logits, (B, K)'}, for {loss.name!r}, got "
            f"shape {shape}. Change the last layer or the loss, or use clipping='norm'."
        )


def check_labels(labels: Any, outputs: int) -> None:
    """Raises a ``ValueError`` if some labels are neither class codes nor one-hot rows."""
    if not bool(tf.reduce_all(tf.reduce_any(chosen(tf.constant(labels), outputs) > 0.0, axis=1))):
        raise ValueError(
            "clipping='label_distance' takes one class for each example, and some labels are none: "
            f"they must be in 0..{max(outputs, 2) - 1}, or rows that are one-hot. Use "
            "clipping='norm' for soft labels."
        )


def directions(logits: tf.Tensor) -> tf.Tensor:
    """Returns what to follow back from the logits (B, L), (B, R, L), ``float32``.

    One for one logit; else the differences of every other class and the likeliest, so that no
    gradient is a small difference of large ones.
    """
    logits = tf.cast(logits, tf.float32)
    rows, outputs = logits.shape
    if outputs == 1:
        return tf.ones((rows, 1, 1))
    top, others = _classes(logits)
    return tf.one_hot(others, outputs) - tf.one_hot(top, outputs)[:, tf.newaxis]


def combinations(logits: tf.Tensor) -> tf.Tensor:
    """Returns the gradient of each label as a combination of the directions, (B, K, R)."""
    logits = tf.cast(logits, tf.float32)
    if logits.shape[1] == 1:
        return tf.stack([tf.sigmoid(logits), -tf.sigmoid(-logits)], axis=1)
    _, others = _classes(logits)
    shares = tf.gather(tf.nn.softmax(logits), others, batch_dims=1)
    return shares[:, tf.newaxis] - tf.one_hot(others, logits.shape[1], axis=1)


def _classes(logits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the likeliest class (B,) and the others (B, L - 1)."""
    outputs = logits.shape[1]
    top = tf.argmax(logits, axis=1, output_type=tf.int32)
    return top, (top[:, tf.newaxis] + tf.range(1, outputs)) % outputs


def chosen(y: tf.Tensor, outputs: int) -> tf.Tensor:
    """Returns labels, codes (B,) or (B, 1) or one-hot rows (B, K), as one-hot rows (B, K).

    A label that is none of these becomes zeros, so that its example adds nothing.
    """
    if outputs > 1 and y.shape.rank == 2 and y.shape[1] == outputs:
        rows = tf.cast(y, tf.float32)
        one_hot = tf.one_hot(tf.argmax(rows, axis=1), outputs)
        return tf.where(tf.reduce_all(rows == one_hot, axis=1, keepdims=True), one_hot, 0.0)
    codes = tf.cast(tf.reshape(y, (-1, 1)), tf.float32)
    return tf.cast(codes == tf.range(max(outputs, 2), dtype=tf.float32), tf.float32)


class Candidates(NamedTuple):
    """The gradients that each example of a batch could have, one for each label.

    Attributes:
        combined: each as a combination of the directions, times the example's weight, (B, K, R).
        labels: the true labels, one-hot, or zeros for an example that adds nothing, (B, K).
    """

    combined: tf.Tensor
    labels: tf.Tensor

    @classmethod
    def of(cls, logits: tf.Tensor, batch: Batch) -> Candidates:
        """Returns those of a batch, whose loss is taken for cross-entropy of these logits."""
        weights = batch.weights[:, tf.newaxis, tf.newaxis]
        return cls(combinations(logits) * weights, chosen(batch.y, logits.shape[1]))

    @property
    def ways(self) -> int:
        """Number of directions R."""
        return int(self.combined.shape[2])

    def coefficients(
        self, products: tf.Tensor, l2_norm_clip: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns clipped gradients as combinations of the directions (B, R), and norms (B,).

        Guarantee:
            Each example is clipped to the largest norm with which its gradients for any two labels
            are at most ``D = 2 * l2_norm_clip`` apart, or to ``LONGEST_CLIP * D`` if that is less.
            That norm depends on no label. Rows of zeros in ``labels`` and examples with anything
            that is not finite add exactly zero.

        Args:
            products: inner products of the gradients along the directions, (B, R, R).
            l2_norm_clip: half of D.
        """
        gram = tf.matmul(self.combined, tf.matmul(products, self.combined, transpose_b=True))
        finite = tf.reduce_all(tf.math.is_finite(gram), axis=(1, 2), keepdims=True)
        gram, combined = (tf.where(finite, part, 0.0) for part in (gram, self.combined))
        norms = tf.sqrt(tf.maximum(tf.linalg.diag_part(gram), 0.0))
        clips = largest_clips(gram, norms, 2.0 * l2_norm_clip)[:, tf.newaxis]
        used = self.labels * clips / tf.maximum(norms, clips)
        return tf.einsum("bk,bkr->br", used, combined), tf.reduce_sum(self.labels * norms, axis=1)


def largest_clips(gram: tf.Tensor, norms: tf.Tensor, distance: tf.Tensor) -> tf.Tensor:
    """Returns the largest norms (B,) that bring all pairs within D of each other, bounded.

    Shortened to c, two gradients of norms n <= m and angle t are ``2 c sin(t / 2)`` apart up to
    ``c = n``, and from there on ``|(n cos t - c, n sin t)|``. Both grow with c. With one logit
    ``cos t = -1``, and that is ``max(D / 2, D - n)``.

    Args:
        gram: inner products of the gradients of each example for all labels, (B, K, K).
        norms: of these gradients, (B, K).
        distance: D.
    """
    left, right = norms[:, :, tf.newaxis], norms[:, tf.newaxis]
    shorter = tf.minimum(left, right)
    cosine = tf.clip_by_value(tf.math.divide_no_nan(gram, left * right), -1.0, 1.0)
    both = distance / tf.sqrt(tf.maximum(2.0 - 2.0 * cosine, 1e-12))
    along = shorter * cosine
    rest = tf.square(along) + tf.square(distance) - tf.square(shorter)
    one = along + tf.sqrt(tf.maximum(rest, 0.0))
    pairs = tf.where(both <= shorter, both, one)
    return tf.minimum(tf.reduce_min(pairs, axis=(1, 2)), LONGEST_CLIP * distance)
