"""Gradients of layers that multiply: dense layers, convolutions and depthwise convolutions."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import tensorflow as tf

from tf_labeldp.gradients._layer_gradients import FLOAT_BYTES, Rule, num_positions

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
