"""The masks of a model's outputs: Keras leaves masked entries out of its losses.

Keras keeps a mask as an attribute of a tensor, which copies and loops over examples lose.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def mask_of(output: Any) -> Any:
    """Returns the mask of an output, a tensor of its leading axes, or None."""
    return getattr(output, "_keras_mask", None)


def masks_by_place(outputs: Any) -> dict[str, Any]:
    """Returns the masks of a structure of outputs, by their place in it."""
    flat = enumerate(tf.nest.flatten(outputs))
    return {str(place): mask_of(output) for place, output in flat if mask_of(output) is not None}


def with_masks(outputs: Any, masks: dict[str, Any]) -> Any:
    """Returns the outputs, which get the masks of ``masks_by_place``."""
    flat = tf.nest.flatten(outputs)
    for place, mask in masks.items():
        flat[int(place)]._keras_mask = mask
    return outputs


def copied(outputs: Any) -> Any:
    """Returns copies of outputs, with their masks."""
    return with_masks(tf.nest.map_structure(tf.identity, outputs), masks_by_place(outputs))


def shown_labels(labels: tf.Tensor, mask: Any) -> tf.Tensor:
    """Returns labels with zeros where the mask is false, so that no padded label is read."""
    rank = len(mask.shape)
    if labels.shape.rank < rank or labels.shape[:rank] != mask.shape:
        return labels
    keep = tf.reshape(tf.cast(mask, tf.bool), [*mask.shape, *[1] * (labels.shape.rank - rank)])
    return tf.where(keep, labels, tf.zeros_like(labels))


def mean_of_shown(losses: tf.Tensor, masks: list[Any]) -> tf.Tensor:
    """Returns the mean (B,) of losses (B, ...) over the entries that no mask leaves out.

    It is that of ``keras.losses.Loss`` for a batch of one example: zero if all are left out.
    """
    rank = losses.shape.rank
    axes = list(range(1, rank))
    if not masks:
        return tf.reduce_mean(losses, axis=axes) if axes else losses
    weights = tf.ones_like(losses)
    for mask in masks:
        shown = tf.cast(mask, losses.dtype)
        if shown.shape.rank > rank:
            # One loss per sequence of steps counts if a step does.
            shown = tf.reduce_max(shown, axis=list(range(rank, shown.shape.rank)))
        weights *= tf.reshape(shown, [*shown.shape, *[1] * (rank - shown.shape.rank)])
    # A product with zero would keep a loss that is not finite.
    losses = tf.where(weights > 0, losses, tf.zeros_like(losses))
    return tf.math.divide_no_nan(tf.reduce_sum(losses, axes), tf.reduce_sum(weights, axes))
