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
import itertools
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


_EPSILON = 2.0**-52  # of float64


@dataclasses.dataclass(frozen=True)
class Window:
    """Where a convolution looks; one entry per spatial axis.

    Attributes:
        size: of the kernel.
        strides: between outputs.
        dilations: between the kernel's entries.
        padding: zeros (before, after) the input.
    """

    size: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]

    def views(self, inputs: tf.Tensor, out_size: Sequence[int]) -> list[tf.Tensor]:
        """Returns what each entry of the kernel saw: prod(size) tensors (B, *out_size, C).

        Shifted views instead of patches: nothing prod(size) times the input is ever stored.
        """
        padded = inputs
        if any(before or after for before, after in self.padding):
            padded = tf.pad(inputs, [(0, 0), *self.padding, (0, 0)])
        views = []
        for offsets in itertools.product(*(range(size) for size in self.size)):
            slices = []
            for axis, offset in enumerate(offsets):
                start = offset * self.dilations[axis]
                stop = start + (out_size[axis] - 1) * self.strides[axis] + 1
                slices.append(slice(start, stop, self.strides[axis]))
            views.append(padded[(slice(None), *slices, slice(None))])
        return views


@dataclasses.dataclass(frozen=True)
class ProductRule(Rule):
    """Dense layers and convolutions: sums over positions of input times output gradient.

    Attributes:
        kernel_shape: (inputs, outputs) or (*window, inputs, outputs).
        has_kernel: whether the kernel is trained.
        has_bias: whether a bias is trained.
        window: of a convolution; None for a dense layer.
    """

    kernel_shape: tuple[int, ...]
    has_kernel: bool
    has_bias: bool
    window: Window | None = None

    @property
    def num_weights(self) -> int:
        kernel = math.prod(self.kernel_shape) if self.has_kernel else 0
        return kernel + (self.kernel_shape[-1] if self.has_bias else 0)

    def gradients(
        self, inputs: tf.Tensor, output_gradients: tf.Tensor, group_size: int
    ) -> list[tf.Tensor]:
        views, products = self._factors(inputs, output_gradients, group_size)
        result = []
        if self.has_kernel:
            if self.kernel_shape[-2] == 1:  # one product instead of many thin ones
                kernel = tf.matmul(tf.stack([view[..., 0] for view in views], axis=1), products)
            else:
                kernel = tf.stack(
                    [tf.matmul(view, products, transpose_a=True) for view in views], axis=1
                )
            result.append(tf.reshape(kernel, (products.shape[0], *self.kernel_shape)))
        if self.has_bias:
            result.append(tf.reduce_sum(products, axis=1))
        return result

    def norm_bytes(self, output_gradients: tf.Tensor, group_size: int) -> int | None:
        positions = num_positions(output_gradients)
        if positions is None:
            return None
        positions *= group_size
        # Two Gram matrices in double precision.
        return 4 * FLOAT_BYTES * positions**2 if positions > 1 else 2 * FLOAT_BYTES

    def squared_norms(
        self, inputs: tf.Tensor, output_gradients: tf.Tensor, group_size: int
    ) -> tf.Tensor:
        views, products = self._factors(inputs, output_gradients, group_size)
        bias = tf.reduce_sum(tf.square(tf.reduce_sum(products, axis=1)), axis=-1)
        total = bias if self.has_bias else tf.zeros_like(bias)
        if not self.has_kernel:
            return total
        squares = sum(tf.reduce_sum(tf.square(view), axis=-1) for view in views)
        product_squares = tf.reduce_sum(tf.square(products), axis=-1)
        if products.shape[1] == 1:
            return total + tf.squeeze(squares * product_squares, 1)
        # In double precision: where positions cancel, rounding could hide what is left of the norm,
        # and the example would be clipped too little. What remains of that error, which grows with
        # the length of the dot products, is added.
        wide = tf.cast(products, tf.float64)
        gram = tf.matmul(wide, wide, transpose_b=True)
        seen = [tf.cast(view, tf.float64) for view in views]
        gram *= sum(tf.matmul(view, view, transpose_b=True) for view in seen)
        terms = sum(view.shape[-1] for view in views) + sum(products.shape[1:])
        longest = tf.reduce_sum(tf.sqrt(tf.cast(squares * product_squares, tf.float64)), axis=-1)
        exact = tf.reduce_sum(gram, axis=(1, 2)) + terms * _EPSILON * tf.square(longest)
        return total + tf.cast(tf.maximum(exact, 0.0), tf.float32)

    def scaled_norm_bytes(self, output_gradients: tf.Tensor, group_size: int) -> int | None:
        if self.window is not None or group_size > 1 or output_gradients.shape.rank != 2:
            return None  # sums over positions do not come apart under scales
        return FLOAT_BYTES * sum(self.kernel_shape)

    def scaled_squared_norms(
        self, inputs: tf.Tensor, output_gradients: tf.Tensor, scales: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        products = tf.square(output_gradients)
        parts = [tf.square(scale) for scale in scales]
        total = tf.zeros([products.shape[0]])
        if self.has_kernel:  # sum_ij a_i^2 s_ij^2 g_j^2
            total += tf.reduce_sum(tf.matmul(tf.square(inputs), parts[0]) * products, axis=1)
        if self.has_bias:
            total += tf.linalg.matvec(products, parts[-1])
        return total

    def _factors(
        self, inputs: tf.Tensor, output_gradients: tf.Tensor, group_size: int
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns views (N, positions, in) and output gradients (N, positions, out) by group."""
        groups = output_gradients.shape[0] // group_size
        products = tf.reshape(output_gradients, (groups, -1, self.kernel_shape[-1]))
        views = [inputs]
        if not self.has_kernel:
            views = []
        elif self.window is not None:
            views = self.window.views(inputs, output_gradients.shape[1:-1])
        return [tf.reshape(view, (groups, -1, self.kernel_shape[-2])) for view in views], products


@dataclasses.dataclass(frozen=True)
class DepthwiseRule(Rule):
    """Depthwise convolutions: each channel has its own kernel.

    Attributes:
        kernel_shape: (*window, channels, multiplier).
        has_kernel: whether the kernel is trained.
        has_bias: whether a bias is trained.
        window: where the convolution looks.
    """

    kernel_shape: tuple[int, ...]
    has_kernel: bool
    has_bias: bool
    window: Window

    @property
    def num_weights(self) -> int:
        kernel = math.prod(self.kernel_shape) if self.has_kernel else 0
        return kernel + (math.prod(self.kernel_shape[-2:]) if self.has_bias else 0)

    def gradients(
        self, inputs: tf.Tensor, output_gradients: tf.Tensor, group_size: int
    ) -> list[tf.Tensor]:
        groups = output_gradients.shape[0] // group_size
        channels, multiplier = self.kernel_shape[-2:]
        products = tf.reshape(output_gradients, (groups, -1, channels, multiplier))
        result = []
        if self.has_kernel:
            parts = [
                tf.einsum("ntc,ntcm->ncm", tf.reshape(view, (groups, -1, channels)), products)
                for view in self.window.views(inputs, output_gradients.shape[1:-1])
            ]
            result.append(tf.reshape(tf.stack(parts, axis=1), (groups, *self.kernel_shape)))
        if self.has_bias:
            result.append(
                tf.reshape(tf.reduce_sum(products, axis=1), (groups, channels * multiplier))
            )
        return result
