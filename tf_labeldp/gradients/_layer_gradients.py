"""Gradients of one layer, example by example, from its inputs and the gradient of its outputs.

A layer that is linear in its weights needs no backward pass of its own: the gradient of an example
is a product of what went into the layer and the gradient of what came out. Each rule here forms
that product for a group of contiguous rows at once (a group of one is an example), or only its
norm (Goodfellow 2015, "Efficient per-example gradient computations"; Li et al. 2022, section 4).
Inputs and output gradients have the batch first and the channels last, and are ``float32``.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

FLOAT_BYTES = 4


class Rule(abc.ABC):
    """How the gradient of one layer's weights follows from its inputs and output gradients."""

    @property
    @abc.abstractmethod
    def num_weights(self) -> int:
        """Number of entries of the gradient of all weights."""

    @abc.abstractmethod
    def gradients(
        self, inputs: tf.Tensor, output_gradients: tf.Tensor, group_size: int
    ) -> list[tf.Tensor]:
        """Returns the gradient of each group for each weight, (B / group_size, *weight shape)."""

    def norm_bytes(self, output_gradients: tf.Tensor, group_size: int) -> int | None:
        """Returns the working memory of ``squared_norms`` for a group; None if there is no way."""
        del output_gradients, group_size
        return None

    def squared_norms(
        self, inputs: tf.Tensor, output_gradients: tf.Tensor, group_size: int
    ) -> tf.Tensor:
        """Returns the squared norms (B / group_size,) without forming the gradients."""
        raise NotImplementedError(f"{type(self).__name__} has to form its gradients.")

    def scaled_norm_bytes(self, output_gradients: tf.Tensor, group_size: int) -> int | None:
        """Returns the working memory of ``scaled_squared_norms``, likewise."""
        del output_gradients, group_size
        return None

    def scaled_squared_norms(
        self, inputs: tf.Tensor, output_gradients: tf.Tensor, scales: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        """Returns the squared norms (B,) of gradients times ``scales``, which are like weights."""
        raise NotImplementedError(f"{type(self).__name__} has to form its gradients.")

    def sum(self, inputs: tf.Tensor, output_gradients: tf.Tensor) -> list[tf.Tensor]:
        """Returns the gradient summed over all rows: that of one group of the whole batch."""
        return [
            tf.squeeze(gradient, 0)
            for gradient in self.gradients(inputs, output_gradients, inputs.shape[0])
        ]


@dataclasses.dataclass(frozen=True)
class ScaleRule(Rule):
    """Normalisation layers: an entry-wise scale and offset of inputs that are normalised already.

    Attributes:
        shape: of scale and offset: the sizes of ``axes``.
        axes: of the inputs, ascending and above 0, that scale and offset run along.
        has_scale: whether a scale is trained.
        has_offset: whether an offset is trained.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    has_scale: bool
    has_offset: bool

    @property
    def num_weights(self) -> int:
        return math.prod(self.shape) * (self.has_scale + self.has_offset)

    def gradients(
        self, inputs: tf.Tensor, output_gradients: tf.Tensor, group_size: int
    ) -> list[tf.Tensor]:
        groups = output_gradients.shape[0] // group_size
        summed = [axis for axis in range(1, inputs.shape.rank) if axis not in self.axes]

        def by_group(values: tf.Tensor) -> tf.Tensor:
            rows = tf.reduce_sum(values, axis=summed)
            return tf.reduce_sum(tf.reshape(rows, (groups, group_size, *self.shape)), axis=1)

        scale = [by_group(inputs * output_gradients)] if self.has_scale else []
        return scale + ([by_group(output_gradients)] if self.has_offset else [])


@dataclasses.dataclass(frozen=True)
class LookupRule(Rule):
    """Embeddings: the row of each index gets the output gradient; inputs are integer indices.

    Attributes:
        num_rows: of the table.
        width: of a row.
    """

    num_rows: int
    width: int

    @property
    def num_weights(self) -> int:
        return self.num_rows * self.width

    def gradients(
        self, inputs: tf.Tensor, output_gradients: tf.Tensor, group_size: int
    ) -> list[tf.Tensor]:
        groups = inputs.shape[0] // group_size
        indices = tf.cast(tf.reshape(inputs, (groups, -1)), tf.int64)
        # A negative index is dropped by the segment sum, as it has no row.
        slots = tf.range(groups, dtype=tf.int64)[:, tf.newaxis] * self.num_rows + indices
        slots = tf.where((indices >= 0) & (indices < self.num_rows), slots, -1)
        rows = tf.math.unsorted_segment_sum(
            tf.reshape(output_gradients, (-1, self.width)),
            tf.reshape(slots, (-1,)),
            groups * self.num_rows,
        )
        return [tf.reshape(rows, (groups, self.num_rows, self.width))]

    def norm_bytes(self, output_gradients: tf.Tensor, group_size: int) -> int | None:
        positions = num_positions(output_gradients)
        return None if positions is None else 3 * FLOAT_BYTES * positions * group_size * self.width

    def squared_norms(
        self, inputs: tf.Tensor, output_gradients: tf.Tensor, group_size: int
    ) -> tf.Tensor:
        groups = inputs.shape[0] // group_size
        indices = tf.cast(tf.reshape(inputs, (groups, -1)), tf.int64)
        products = tf.reshape(output_gradients, (groups, -1, self.width))
        # Equal indices of a group add up before the norm: sorted, they are neighbours.
        order = tf.argsort(indices, axis=1)
        indices = tf.gather(indices, order, batch_dims=1)
        products = tf.gather(products, order, batch_dims=1)
        is_new = tf.cast(indices[:, 1:] != indices[:, :-1], tf.int32)
        slots = tf.pad(tf.cumsum(is_new, axis=1), [(0, 0), (1, 0)])
        positions = tf.shape(slots)[1]
        slots += tf.range(groups)[:, tf.newaxis] * positions
        rows = tf.math.unsorted_segment_sum(
            tf.reshape(products, (-1, self.width)),
            tf.reshape(slots, (-1,)),
            groups * positions,
        )
        return tf.reduce_sum(tf.square(tf.reshape(rows, (groups, -1))), axis=1)


def num_positions(output_gradients: tf.Tensor) -> int | None:
    """Returns how many positions a row has, None where only the step knows."""
    sizes = output_gradients.shape[1:-1]
    return math.prod(sizes) if sizes.is_fully_defined() else None
