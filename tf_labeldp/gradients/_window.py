"""The gradient of a convolution's kernel for each group of examples, as products per group.

The products are of patches of the inputs and of the output gradients. They cost what their memory
traffic costs: the patches of a few groups at a time stay in the processor's cache.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_labeldp.gradients.clip import by_chunks

FLOAT_BYTES = 4
# The patches and products of a chunk; measured with 1 MiB of second-level cache per core.
_CHUNK_BYTES = 6 * 2**20


@dataclasses.dataclass(frozen=True)
class Window:
    """The kernel size, strides, dilations and padding of a convolution, per spatial axis."""

    size: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    # Zeros (before, after) the input.
    padding: tuple[tuple[int, int], ...]

    def views(self, inputs: tf.Tensor, out_size: Sequence[int]) -> list[tf.Tensor]:
        """Returns the inputs of each kernel entry: prod(size) tensors (B, *out_size, C)."""
        # Slices with a stride are slow: the phases of the strides become axes.
        has_phases = max(self.strides) > 1
        padding, lengths, phases = list(self.padding), [], []
        for axis, stride in enumerate(self.strides):
            length = (self._reach(axis) // stride + out_size[axis]) * stride
            if has_phases:
                before = padding[axis][0]
                padding[axis] = before, max(length - inputs.shape[axis + 1] - before, 0)
            lengths.append(slice(length))
            phases += [length // stride, stride]
        values = inputs
        if any(before or after for before, after in padding):
            values = tf.pad(values, [(0, 0), *padding, (0, 0)])
        if has_phases:
            values = values[(slice(None), *lengths)]
            values = tf.reshape(values, (values.shape[0], *phases, values.shape[-1]))
        views = []
        for entry in itertools.product(*map(range, self.size)):
            slices: list[Any] = [slice(None)]
            for axis, place in enumerate(entry):
                start, phase = divmod(place * self.dilations[axis], self.strides[axis])
                slices += [slice(start, start + out_size[axis]), *[phase] * has_phases]
            views.append(values[tuple(slices)])
        return views

    def convolved(self, inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        """Returns the convolution (B, *out_size, K) of inputs (B, ..., C)."""
        padded = tf.pad(inputs, [(0, 0), *self.padding, (0, 0)])
        return tf.nn.convolution(
            padded, kernel, strides=self.strides, padding="VALID", dilations=self.dilations
        )

    def kernel_gradients(
        self, inputs: tf.Tensor, gradients: tf.Tensor, group_size: int
    ) -> tf.Tensor:
        """Returns the sums (groups, fan in, K) of each group's kernel gradients.

        ``inputs`` (B, ..., C) and the output gradients (B, ..., K) are contiguous. With one channel
        a last row (groups, fan in + 1, K) has the bias's gradients, from the same product.
        """
        groups, channels = gradients.shape[0] // group_size, inputs.shape[-1]
        entries, outputs = math.prod(self.size) * channels, gradients.shape[-1]
        if groups == 1:
            kernel = tf.reshape(self._kernel_gradient(inputs, gradients), (1, entries, outputs))
            if channels > 1:
                return kernel
            bias = tf.reduce_sum(tf.reshape(gradients, (1, -1, outputs)), 1, keepdims=True)
            return tf.concat([kernel, bias], 1)
        kernel_bytes = FLOAT_BYTES * entries * outputs
        positions = group_size * math.prod(gradients.shape[1:-1])
        patch_bytes = FLOAT_BYTES * positions * (entries + outputs)
        # The products of the views are written, and written again side by side.
        chunk = max(1, _CHUNK_BYTES // (patch_bytes + 2 * kernel_bytes))
        # Equal chunks need no copy that adds the rest.
        chunk = max((n for n in range(chunk // 2 + 1, chunk) if groups % n == 0), default=chunk)
        if kernel_bytes > patch_bytes or tf.config.list_logical_devices("GPU"):
            # The copies of the products would cost more than the cache saves.
            chunk = groups

        def product(part: Sequence[tf.Tensor]) -> tf.Tensor:
            return self._product(part[0], part[1], group_size)

        return by_chunks(product, [inputs, gradients], chunk * group_size)

    def _product(self, inputs: tf.Tensor, gradients: tf.Tensor, group_size: int) -> tf.Tensor:
        columns = _by_group(gradients, group_size)
        # To join the views of many channels for one product would be a copy of all patches.
        rows = [_by_group(view, group_size) for view in self.views(inputs, gradients.shape[1:-1])]
        if inputs.shape[-1] == 1:
            rows = [row[..., 0] for row in rows]
            return tf.matmul(tf.stack([*rows, tf.ones_like(rows[0])], axis=1), columns)
        return tf.concat([tf.matmul(row, columns, transpose_a=True) for row in rows], 1)

    def _kernel_gradient(self, inputs: tf.Tensor, gradients: tf.Tensor) -> tf.Tensor:
        """Returns the sum (1, ...) over all examples, from TensorFlow's own operation."""
        kernel = tf.zeros((*self.size, inputs.shape[-1], gradients.shape[-1]), inputs.dtype)
        with tf.GradientTape() as tape:
            tape.watch(kernel)
            outputs = self.convolved(inputs, kernel)
        return tape.gradient(outputs, kernel, output_gradients=gradients)[tf.newaxis]

    def _reach(self, axis: int) -> int:
        return (self.size[axis] - 1) * self.dilations[axis]


def _by_group(values: tf.Tensor, group_size: int) -> tf.Tensor:
    """Returns the entries at each position: (groups, positions, entries)."""
    return tf.reshape(values, (values.shape[0] // group_size, -1, values.shape[-1]))
