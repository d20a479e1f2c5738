"""The gradient of a convolution's kernel for each group of examples, as one product per group.

The product is of patches of the inputs and of the output gradients. It costs what its memory
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
# The patches of a chunk; measured with 1 MiB of second-level cache per core.
_CHUNK_BYTES = 3 * 2**20


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

    def kernel_gradients(
        self, inputs: tf.Tensor, gradients: tf.Tensor, group_size: int
    ) -> tf.Tensor:
        """Returns the sums (groups, ...) of each group's kernel gradients, in the kernel's order.

        ``inputs`` (B, ..., C) and the output gradients (B, ..., K) are contiguous.
        """
        groups = gradients.shape[0] // group_size
        if groups == 1:
            return self._kernel_gradient(inputs, gradients)
        by_inputs, by_both = self._patch_sizes(inputs, gradients)
        patch_bytes = FLOAT_BYTES * group_size * min(by_inputs, by_both)
        kernel = math.prod(self.size) * inputs.shape[-1] * gradients.shape[-1]
        chunk = max(1, _CHUNK_BYTES // patch_bytes)
        if FLOAT_BYTES * kernel > patch_bytes or tf.config.list_logical_devices("GPU"):
            # The copies of the products would cost more than the cache saves.
            chunk = groups

        def product(part: Sequence[tf.Tensor]) -> tf.Tensor:
            (some, theirs), both = part, by_both < by_inputs
            return (self._product_of_both if both else self._product)(some, theirs, group_size)

        return by_chunks(product, [inputs, gradients], chunk * group_size)

    def _product(self, inputs: tf.Tensor, gradients: tf.Tensor, group_size: int) -> tf.Tensor:
        views = self.views(inputs, gradients.shape[1:-1])
        columns = _by_group([gradients], group_size)
        if inputs.shape[-1] > 1:
            return tf.matmul(_by_group(views, group_size), columns, transpose_a=True)
        rows = [_by_group([view], group_size)[..., 0] for view in views]
        return tf.matmul(tf.stack(rows, axis=1), columns)

    def _product_of_both(
        self, inputs: tf.Tensor, gradients: tf.Tensor, group_size: int
    ) -> tf.Tensor:
        """Returns the same for a first stride of 1, with smaller patches of both factors.

        Along the first axis the gradients move instead of the inputs, in the reverse direction.
        """
        first = self.size[0]
        ones, (before, after) = (1,) * (len(self.size) - 1), self.padding[0]
        over_inputs = dataclasses.replace(
            self, size=(1, *self.size[1:]), padding=((0, 0), *self.padding[1:])
        )
        ends = self._reach(0) - before, self._reach(0) - after
        over_gradients = Window(
            (first, *ones), (1, *ones), (self.dilations[0], *ones), (ends, *[(0, 0)] * len(ones))
        )
        size = inputs.shape[1], *gradients.shape[2:-1]
        rows = _by_group(over_inputs.views(inputs, size), group_size)
        columns = _by_group(over_gradients.views(gradients, size)[::-1], group_size)
        product = tf.matmul(rows, columns, transpose_a=True)
        shape = product.shape[0], -1, first, gradients.shape[-1]
        return tf.transpose(tf.reshape(product, shape), (0, 2, 1, 3))

    def _kernel_gradient(self, inputs: tf.Tensor, gradients: tf.Tensor) -> tf.Tensor:
        """Returns the sum (1, ...) over all examples, from TensorFlow's own operation."""
        padded = tf.pad(inputs, [(0, 0), *self.padding, (0, 0)])
        kernel = tf.zeros((*self.size, inputs.shape[-1], gradients.shape[-1]), inputs.dtype)
        with tf.GradientTape() as tape:
            tape.watch(kernel)
            outputs = tf.nn.convolution(
                padded, kernel, strides=self.strides, padding="VALID", dilations=self.dilations
            )
        return tape.gradient(outputs, kernel, output_gradients=gradients)[tf.newaxis]

    def _patch_sizes(self, inputs: tf.Tensor, gradients: tf.Tensor) -> tuple[int, int]:
        """Returns how many numbers per example the factors of the two products have."""
        first, all_entries = self.size[0], math.prod(self.size)
        channels, outputs = inputs.shape[-1], gradients.shape[-1]
        positions = math.prod(gradients.shape[1:-1])
        by_inputs = positions * (all_entries * channels + outputs)
        if self.strides[0] > 1 or channels == 1:
            return by_inputs, by_inputs
        positions = inputs.shape[1] * math.prod(gradients.shape[2:-1])
        return by_inputs, positions * (all_entries // first * channels + first * outputs)

    def _reach(self, axis: int) -> int:
        return (self.size[axis] - 1) * self.dilations[axis]


def _by_group(views: Sequence[tf.Tensor], group_size: int) -> tf.Tensor:
    """Returns the entries of all views at each position: (groups, positions, entries)."""
    values = tf.concat(views, -1) if len(views) > 1 else views[0]
    return tf.reshape(values, (values.shape[0] // group_size, -1, values.shape[-1]))
