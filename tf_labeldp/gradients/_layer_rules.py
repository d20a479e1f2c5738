"""Per-example gradients of one layer, from its inputs and the gradient of its outputs.

A ``Rule`` computes the gradient of each group of contiguous rows (a group of one is an example), or
only its norm (Goodfellow 2015, "Efficient per-example gradient computations"; Li et al. 2022,
section 4). A function with the decorator ``rule_of`` chooses the rules of one class of layers: it
returns a ``TappedLayer``, or None for settings without a rule. Such layers run row by row.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_labeldp.gradients._window import FLOAT_BYTES, Window
from tf_labeldp.gradients.clip import Coordinates, by_row, in_coordinates, zero_where

# A dot product of n terms in float64 is off by at most about n 2^-53 of the sum of magnitudes
# (Higham 2002, section 3.1); twice that covers the terms of higher order.
_FLOAT64_EPSILON = 2.0**-52
# Multiplications in float32 that take as long, in products, as one in a Gram matrix in float64, and
# as writing and reading an entry of a gradient twice; measured on one core with AVX-512.
_GRAM_COST, _ENTRY_COST = 5, 60


@dataclasses.dataclass(frozen=True)
class Taps:
    """The tensors of one layer in one backward pass: the batch first, the channels last."""

    # (B, ...), float32, or integers for embeddings; a nest of them for layers without a rule.
    inputs: Any
    # (B, ...), float32, already multiplied by the weight of each row; or a nest of them.
    output_gradients: Any
    group_size: int = 1
    # One for each weight; None leaves the gradients as they are.
    coordinates: list[Coordinates] | None = None

    @property
    def groups(self) -> int:
        return tf.nest.flatten(self.output_gradients)[0].shape[0] // self.group_size

    @property
    def positions(self) -> int | None:
        """The number of positions in a group; None if only the step knows it."""
        sizes = self.output_gradients.shape[1:-1]
        return math.prod(sizes) * self.group_size if sizes.is_fully_defined() else None


class Rule(abc.ABC):
    """Computes the gradients of one layer's weights from its inputs and output gradients."""

    @property
    @abc.abstractmethod
    def num_weights(self) -> int: ...

    @abc.abstractmethod
    def plain_gradients(self, taps: Taps) -> list[tf.Tensor]:
        """Returns one tensor (groups, *weight shape) for each weight."""

    def gradients(self, taps: Taps) -> list[tf.Tensor]:
        return in_coordinates(taps.coordinates, self.plain_gradients(taps))

    def formed_bytes(self, taps: Taps) -> int:
        """Returns the memory of ``gradients`` per group."""
        # In coordinates: before and after the map, and in between.
        return FLOAT_BYTES * self.num_weights * (1 if taps.coordinates is None else 3)

    # Whether ``sum`` is that of formed gradients.
    forms_sum = False

    def norm_bytes(self, taps: Taps) -> int | None:
        """Returns the memory of ``squared_norms`` per group; None if the rule lacks it."""
        return None

    def squared_norms(self, taps: Taps) -> tf.Tensor:
        """Returns the squared norms (groups,) of ``gradients`` without forming them."""
        raise NotImplementedError

    def forms_faster(self, taps: Taps) -> bool:
        """Returns whether kept ``gradients`` take less time than ``squared_norms``."""
        return False

    def at_all_positions(self, calls: Sequence[Taps]) -> Taps | None:
        """Returns several calls' taps as one call at all of their positions.

        None if the rule has no norms without gradients for the whole.
        """
        return None

    def sum(self, taps: Taps, coefficients: tf.Tensor | None = None) -> list[tf.Tensor]:
        """Returns the sum of all rows' gradients times coefficients (B,); zero drops even NaN."""
        inputs, gradients = taps.inputs, taps.output_gradients
        if coefficients is not None:
            dropped = coefficients == 0
            # Most batches drop no example, and the copies cost more than the product by rows.
            inputs, gradients = tf.cond(
                tf.reduce_any(dropped),
                lambda: (
                    zero_where(dropped, taps.inputs),
                    zero_where(dropped, taps.output_gradients),
                ),
                lambda: (taps.inputs, taps.output_gradients),
            )
            gradients *= by_row(coefficients, gradients)
        whole = Taps(inputs, gradients, gradients.shape[0], taps.coordinates)
        return [tf.squeeze(gradient, 0) for gradient in self.gradients(whole)]


def _concatenated(inputs: list[tf.Tensor], calls: Sequence[Taps]) -> Taps:
    """Returns taps of inputs (groups, positions, ...) and the calls' output gradients."""
    gradients = [
        tf.reshape(taps.output_gradients, (taps.groups, -1, taps.output_gradients.shape[-1]))
        for taps in calls
    ]
    return Taps(tf.concat(inputs, 1), tf.concat(gradients, 1))


@dataclasses.dataclass(frozen=True)
class ScaleRule(Rule):
    """The trained scale and offset of a normalisation layer; the inputs are normalised already."""

    # The sizes of ``axes``.
    shape: tuple[int, ...]
    # The input axes of scale and offset, ascending and above 0.
    axes: tuple[int, ...]
    has_scale: bool
    has_offset: bool

    @property
    def num_weights(self) -> int:
        return math.prod(self.shape) * (self.has_scale + self.has_offset)

    def plain_gradients(self, taps: Taps) -> list[tf.Tensor]:
        summed = [axis for axis in range(1, taps.inputs.shape.rank) if axis not in self.axes]

        def by_group(values: tf.Tensor) -> tf.Tensor:
            rows = tf.reduce_sum(values, axis=summed)
            grouped = tf.reshape(rows, (taps.groups, taps.group_size, *self.shape))
            return tf.reduce_sum(grouped, axis=1)

        scale = [by_group(taps.inputs * taps.output_gradients)] if self.has_scale else []
        return scale + ([by_group(taps.output_gradients)] if self.has_offset else [])


@dataclasses.dataclass(frozen=True)
class LookupRule(Rule):
    """An embedding: the output gradient of each index is added to its row of the table."""

    num_rows: int
    width: int

    @property
    def num_weights(self) -> int:
        return self.num_rows * self.width

    def plain_gradients(self, taps: Taps) -> list[tf.Tensor]:
        groups = taps.groups
        indices = tf.cast(tf.reshape(taps.inputs, (groups, -1)), tf.int64)
        # Indices without a row become -1, which the segment sum drops.
        slots = tf.range(groups, dtype=tf.int64)[:, tf.newaxis] * self.num_rows + indices
        slots = tf.where((indices >= 0) & (indices < self.num_rows), slots, -1)
        rows = self._rows(taps.output_gradients, slots, groups * self.num_rows)
        return [tf.reshape(rows, (groups, self.num_rows, self.width))]

    def norm_bytes(self, taps: Taps) -> int | None:
        mixes_rows = taps.coordinates is not None and taps.coordinates[0].left is not None
        if taps.positions is None or mixes_rows:
            return None
        return 3 * FLOAT_BYTES * taps.positions * self.width

    def squared_norms(self, taps: Taps) -> tf.Tensor:
        groups = taps.groups
        indices = tf.cast(tf.reshape(taps.inputs, (groups, -1)), tf.int64)
        products = tf.reshape(taps.output_gradients, (groups, -1, self.width))
        # The gradients of equal indices add up before the norm; sorting makes them neighbours.
        order = tf.argsort(indices, axis=1)
        indices = tf.gather(indices, order, batch_dims=1)
        products = tf.gather(products, order, batch_dims=1)
        is_new = tf.cast(indices[:, 1:] != indices[:, :-1], tf.int32)
        slots = tf.pad(tf.cumsum(is_new, axis=1), [(0, 0), (1, 0)])
        positions = tf.shape(slots)[1]
        slots += tf.range(groups)[:, tf.newaxis] * positions
        rows = self._rows(products, slots, groups * positions)
        if taps.coordinates is not None:
            rows = taps.coordinates[0].of_outputs(rows)
        return tf.reduce_sum(tf.square(tf.reshape(rows, (groups, -1))), axis=1)

    def at_all_positions(self, calls: Sequence[Taps]) -> Taps | None:
        # A lookup has an index for each position.
        inputs = [tf.cast(tf.reshape(taps.inputs, (taps.groups, -1)), tf.int64) for taps in calls]
        return _concatenated(inputs, calls)

    def _rows(self, gradients: tf.Tensor, slots: tf.Tensor, count: Any) -> tf.Tensor:
        flat = tf.reshape(gradients, (-1, self.width))
        return tf.math.unsorted_segment_sum(flat, tf.reshape(slots, (-1,)), count)


@dataclasses.dataclass(frozen=True)
class ProductRule(Rule):
    """Trained kernel and bias of a dense layer or a convolution.

    The gradient of the kernel is the sum over positions of input times output gradient.
    """

    # (*window, inputs, outputs)
    kernel_shape: tuple[int, ...]
    has_kernel: bool
    has_bias: bool
    # None for a dense layer.
    window: Window | None = None

    @property
    def num_outputs(self) -> int:
        return self.kernel_shape[-1]

    @property
    def num_weights(self) -> int:
        kernel = math.prod(self.kernel_shape) if self.has_kernel else 0
        return kernel + (self.num_outputs if self.has_bias else 0)

    def _factors(self, taps: Taps) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns views (groups, positions, in) and gradients (groups, positions, out)."""

        def by_group(values: tf.Tensor) -> tf.Tensor:
            return tf.reshape(values, (taps.groups, -1, values.shape[-1]))

        views = [taps.inputs] if self.has_kernel else []
        if self.has_kernel and self.window is not None:
            views = self.window.views(taps.inputs, taps.output_gradients.shape[1:-1])
        return [by_group(view) for view in views], by_group(taps.output_gradients)

    def plain_gradients(self, taps: Taps) -> list[tf.Tensor]:
        gradients = []
        products = tf.reshape(taps.output_gradients, (taps.groups, -1, self.num_outputs))
        if self.has_kernel:
            shape = taps.groups, -1, self.kernel_shape[-1]
            kernel = tf.reshape(self._kernel_gradients(taps), shape)
            fan_in = math.prod(self.kernel_shape[:-1])
            if kernel.shape[1] > fan_in:
                # The last row is the bias's gradient already.
                kernel, products = kernel[:, :fan_in], kernel[:, fan_in:]
            gradients.append(tf.reshape(kernel, (taps.groups, *self.kernel_shape)))
        if self.has_bias:
            gradients.append(tf.reduce_sum(products, axis=1))
        return gradients

    def _kernel_gradients(self, taps: Taps) -> tf.Tensor:
        """Returns the gradients (groups, ...) of the kernel, its entries in their order."""
        if self.window is None:
            (inputs,), products = self._factors(taps)
            return tf.matmul(inputs, products, transpose_a=True)
        inputs, gradients = taps.inputs, taps.output_gradients
        return self.window.kernel_gradients(inputs, gradients, taps.group_size)

    def norm_bytes(self, taps: Taps) -> int | None:
        if taps.positions is None:
            return None
        # Two Gram matrices in double precision.
        needed = 4 * FLOAT_BYTES * taps.positions**2 if taps.positions > 1 else 2 * FLOAT_BYTES
        if taps.coordinates is not None:
            # Both factors, before and after the map.
            fan_in = math.prod(self.kernel_shape[:-1])
            needed += 4 * FLOAT_BYTES * taps.positions * (fan_in + self.num_outputs)
        return needed

    def forms_faster(self, taps: Taps) -> bool:
        positions = taps.positions
        if positions is None or positions == 1 or not self.has_kernel:
            return False
        fan_in = math.prod(self.kernel_shape[:-1])
        gram = _GRAM_COST * positions**2 * (fan_in + self.num_outputs)
        return fan_in * self.num_outputs * (positions + _ENTRY_COST) < gram

    def squared_norms(self, taps: Taps) -> tf.Tensor:
        if taps.coordinates is not None:
            return tf.add_n([rule.squared_norms(part) for rule, part in self._mapped(taps)])
        views, products = self._factors(taps)
        bias = tf.reduce_sum(tf.square(tf.reduce_sum(products, axis=1)), axis=-1)
        bias = tf.cast(bias, tf.float32)
        total = bias if self.has_bias else tf.zeros_like(bias)
        if not self.has_kernel:
            return total
        squares = sum(tf.reduce_sum(tf.square(view), axis=-1) for view in views)
        product_squares = tf.reduce_sum(tf.square(products), axis=-1)
        if products.shape[1] == 1:
            return total + tf.squeeze(squares * product_squares, 1)
        # Where positions cancel, rounding in single precision could hide most of the norm, and the
        # example would be clipped too little. The rounding error in double precision, which grows
        # with the length of the dot products, is added.
        wide = tf.cast(products, tf.float64)
        gram = tf.matmul(wide, wide, transpose_b=True)
        wide_views = [tf.cast(view, tf.float64) for view in views]
        gram *= sum(tf.matmul(view, view, transpose_b=True) for view in wide_views)
        terms = sum(view.shape[-1] for view in views) + sum(products.shape[1:])
        longest = tf.reduce_sum(tf.sqrt(tf.cast(squares * product_squares, tf.float64)), axis=-1)
        exact = tf.reduce_sum(gram, axis=(1, 2)) + terms * _FLOAT64_EPSILON * tf.square(longest)
        return total + tf.cast(tf.maximum(exact, 0.0), tf.float32)

    def at_all_positions(self, calls: Sequence[Taps]) -> Taps | None:
        if self.window is not None:
            return None
        return _concatenated(
            [tf.reshape(t.inputs, (t.groups, -1, t.inputs.shape[-1])) for t in calls], calls
        )

    def _mapped(self, taps: Taps) -> list[tuple[ProductRule, Taps]]:
        """Returns dense rules of kernel and bias: their squared norms add up to the mapped one.

        At each position ``A (a g^T) B`` is ``(A a) (B^T g)^T``.
        """
        rules, coordinates = [], list(taps.coordinates or ())
        shape = math.prod(self.kernel_shape[:-1]), self.num_outputs
        # Where positions may cancel, rounding in single precision could exceed the norm.
        dtype = tf.float32 if taps.positions == 1 else tf.float64
        inputs, gradients = (tf.cast(part, dtype) for part in (taps.inputs, taps.output_gradients))
        if self.has_kernel:
            if self.window is not None:
                inputs = tf.concat(self.window.views(inputs, gradients.shape[1:-1]), -1)
            side = coordinates.pop(0)
            mapped = side.of_inputs(inputs), side.of_outputs(gradients)
            rules.append((ProductRule(shape, True, False), Taps(*mapped, taps.group_size)))
        if self.has_bias:
            mapped = inputs, coordinates.pop(0).of_outputs(gradients)
            rules.append((ProductRule(shape, False, True), Taps(*mapped, taps.group_size)))
        return rules


@dataclasses.dataclass(frozen=True)
class EinsumRule(Rule):
    """Trained kernel and bias of ``einsum(inputs, kernel) + bias``, with a letter for each axis.

    The first letter of inputs and outputs is the batch.
    """

    inputs: str
    kernel: str
    outputs: str
    # The axes of the outputs that the bias has; its shape may have more, of size one.
    bias: str
    kernel_shape: tuple[int, ...]
    bias_shape: tuple[int, ...]
    has_kernel: bool
    has_bias: bool

    @property
    def num_weights(self) -> int:
        kernel = math.prod(self.kernel_shape) if self.has_kernel else 0
        return kernel + (math.prod(self.bias_shape) if self.has_bias else 0)

    def plain_gradients(self, taps: Taps) -> list[tf.Tensor]:
        def by_group(values: tf.Tensor) -> tf.Tensor:
            return tf.reshape(values, (taps.groups, taps.group_size, *values.shape[1:]))

        gradients, products = [], by_group(taps.output_gradients)
        if self.has_kernel:
            equation = f"Z{self.inputs},Z{self.outputs}->Z{self.kernel}"
            gradients.append(tf.einsum(equation, by_group(taps.inputs), products))
        if self.has_bias:
            sums = tf.einsum(f"Z{self.outputs}->Z{self.bias}", products)
            gradients.append(tf.reshape(sums, (taps.groups, *self.bias_shape)))
        return gradients

    def norm_bytes(self, taps: Taps) -> int | None:
        if taps.coordinates is not None or not self._is_product:
            return None
        rule, flat = self._as_product(taps)
        return rule.norm_bytes(flat)

    def squared_norms(self, taps: Taps) -> tf.Tensor:
        rule, flat = self._as_product(taps)
        return rule.squared_norms(flat)

    @property
    def _is_product(self) -> bool:
        """Whether the kernel is a matrix from inputs to outputs, the same at all positions."""
        kernel, outputs = set(self.kernel), set(self.outputs)
        fits = not kernel & outputs & set(self.inputs) and set(self.inputs) <= kernel | outputs
        return fits and (not self.has_bias or set(self.bias) == kernel & outputs)

    def _as_product(self, taps: Taps) -> tuple[ProductRule, Taps]:
        """Returns the rule and taps of a dense layer with these norms."""
        positions = [axis for axis in self.outputs if axis in self.inputs]

        def flat(values: tf.Tensor, axes: str) -> tf.Tensor:
            own = [axis for axis in axes if axis not in positions]
            values = tf.transpose(values, [axes.index(axis) for axis in (*positions, *own)])
            width = math.prod(values.shape[len(positions) :])
            return tf.reshape(values, (values.shape[0], -1, width))

        inputs = flat(taps.inputs, self.inputs)
        gradients = flat(taps.output_gradients, self.outputs)
        shape = inputs.shape[-1], gradients.shape[-1]
        rule = ProductRule(shape, self.has_kernel, self.has_bias)
        return rule, Taps(inputs, gradients, taps.group_size)


@dataclasses.dataclass(frozen=True)
class GroupedRule(ProductRule):
    """A grouped convolution: inputs and outputs have this number of contiguous, equal parts."""

    channel_groups: int = 1

    def norm_bytes(self, taps: Taps) -> int | None:
        return None

    def at_all_positions(self, calls: Sequence[Taps]) -> Taps | None:
        return None

    def _kernel_gradients(self, taps: Taps) -> tf.Tensor:
        def by_channels(values: tf.Tensor) -> tf.Tensor:
            sizes = self.channel_groups, values.shape[-1] // self.channel_groups
            return tf.reshape(values, (values.shape[0], -1, *sizes))

        views, products = self._factors(taps)
        gradients = by_channels(products)
        parts = [tf.einsum("ntgi,ntgo->nigo", by_channels(view), gradients) for view in views]
        return tf.stack(parts, axis=1)


@dataclasses.dataclass(frozen=True)
class DepthwiseRule(GroupedRule):
    """A depthwise convolution; its kernel is (*window, channels, multiplier)."""

    @property
    def num_outputs(self) -> int:
        return math.prod(self.kernel_shape[-2:])


# The rules of Keras's layers.


class NoRuleError(ValueError):
    """The reason why a model has no rules for its per-example gradients."""


# The inputs and output gradients of a rule.
Factors = tuple[tf.Tensor, tf.Tensor]


_Function = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class LayerRule:
    """A rule for the gradients of ``variables``, in this order."""

    rule: Rule
    variables: tuple[Any, ...]
    # Maps the inputs, the outputs and their gradients to the rule's factors.
    factors: Callable[[Any, Any, Any], Any]
    # The places of inputs and outputs among the layer's outputs; None for the layer's own.
    places: tuple[int, int] | None = None
    # The number of rows of the factors per example.
    rows: int = 1


@dataclasses.dataclass(frozen=True)
class TappedLayer:
    """A layer that is called so that its rules find their inputs and outputs.

    ``first``, ``inner`` and ``last`` compute the layer's outputs in turn, to tap what is inside:
    the rules' inputs and outputs are those of ``inner``. Without ``inner``, ``layer`` is called.
    """

    # The layer itself, or one that shares its weights and returns a tuple: the layer's outputs and
    # then tensors inside it, which the rules have ``places`` of.
    layer: keras.Layer
    # Together they have each trained weight of the layer.
    rules: Sequence[LayerRule] = ()
    first: _Function | None = None
    inner: _Function | None = None
    last: _Function | None = None


@dataclasses.dataclass(frozen=True)
class LayerSettings:
    """The settings of a Keras layer that decide its rule; a layer without one has the default."""

    axis: Any = None
    activation: Any = None
    recurrent_activation: Any = None
    data_format: str | None = None
    groups: int = 1
    lora_enabled: bool = False

    @classmethod
    def of(cls, layer: Any) -> LayerSettings:
        fields = dataclasses.fields(cls)
        found: Any = {field.name: getattr(layer, field.name, field.default) for field in fields}
        return cls(**found)

    @property
    def axes(self) -> list[Any]:
        return list(self.axis) if isinstance(self.axis, (list, tuple)) else [self.axis]

    @property
    def has_known_activations(self) -> bool:
        """Whether its activations are Keras's own, which don't mix examples."""
        of_keras = {None, *_SLOPES, *_OTHER_ACTIVATIONS}
        return {self.activation, self.recurrent_activation} <= of_keras


_Shape = tuple[int | None, ...]
# The function that chooses the rules of a layer, by its exact class: a subclass may compute
# anything.
RULES: dict[type, Callable[[Any, _Shape], TappedLayer | None]] = {}


def rule_of(*kinds: type) -> Callable[[Any], Any]:
    """Registers a function that returns a ``TappedLayer``, given a layer and its input shape.

    The function returns None for settings of the layer that have no rule.
    """

    def register(choose: Any) -> Any:
        RULES.update(dict.fromkeys(kinds, choose))
        return choose

    return register


def tapped_layer(layer: Any, input_shape: _Shape) -> TappedLayer | None:
    """Returns a layer of a functional model with its rules; None if it has to run row by row."""
    kind, settings = type(layer), LayerSettings.of(layer)
    if kind is keras.layers.BatchNormalization and not layer.trainable:
        return TappedLayer(layer)
    works_along_batch = 0 in settings.axes or -len(input_shape) in settings.axes
    if works_along_batch or not settings.has_known_activations:
        return None
    if kind in _WITHOUT_WEIGHTS:
        return TappedLayer(layer)
    tapped = RULES[kind](layer, input_shape) if kind in RULES else None
    if tapped is None:
        return None
    covered = [variable for rule in tapped.rules for variable in rule.variables]
    if _identities(covered) != _identities(layer.trainable_variables):
        # A weight without a rule would have a gradient of zero.
        return None
    rules = [rule for rule in tapped.rules if rule.variables]
    return dataclasses.replace(tapped, rules=rules) if rules else TappedLayer(tapped.layer)


_ACTIVATIONS = keras.activations
# Map the output of an activation and its gradient to the gradient of the activation's input.
_SLOPES: dict[Any, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    _ACTIVATIONS.linear: lambda out, grad: grad,
    _ACTIVATIONS.relu: lambda out, grad: tf.raw_ops.ReluGrad(gradients=grad, features=out),
    _ACTIVATIONS.relu6: lambda out, grad: tf.raw_ops.Relu6Grad(gradients=grad, features=out),
    _ACTIVATIONS.elu: lambda out, grad: tf.raw_ops.EluGrad(gradients=grad, outputs=out),
    _ACTIVATIONS.selu: lambda out, grad: tf.raw_ops.SeluGrad(gradients=grad, outputs=out),
    _ACTIVATIONS.sigmoid: lambda out, grad: tf.raw_ops.SigmoidGrad(y=out, dy=grad),
    _ACTIVATIONS.tanh: lambda out, grad: tf.raw_ops.TanhGrad(y=out, dy=grad),
    _ACTIVATIONS.exponential: lambda out, grad: grad * out,
    _ACTIVATIONS.softmax: lambda out, grad: (
        out * (grad - tf.reduce_sum(out * grad, axis=-1, keepdims=True))
    ),
}
# The output does not determine the slope of these: the layer's output before them is recomputed.
_OTHER_ACTIVATIONS = {
    _ACTIVATIONS.gelu,
    _ACTIVATIONS.hard_sigmoid,
    _ACTIVATIONS.leaky_relu,
    _ACTIVATIONS.log_softmax,
    _ACTIVATIONS.mish,
    _ACTIVATIONS.silu,
    _ACTIVATIONS.softplus,
    _ACTIVATIONS.softsign,
}
# Layers without weights that process each example alone.
_WITHOUT_WEIGHTS = {
    keras.layers.Activation,
    keras.layers.Add,
    keras.layers.AlphaDropout,
    keras.layers.Average,
    keras.layers.AveragePooling1D,
    keras.layers.AveragePooling2D,
    keras.layers.AveragePooling3D,
    keras.layers.CenterCrop,
    keras.layers.Concatenate,
    keras.layers.Cropping1D,
    keras.layers.Cropping2D,
    keras.layers.Cropping3D,
    keras.layers.Dropout,
    keras.layers.ELU,
    keras.layers.Flatten,
    keras.layers.GaussianDropout,
    keras.layers.GaussianNoise,
    keras.layers.GlobalAveragePooling1D,
    keras.layers.GlobalAveragePooling2D,
    keras.layers.GlobalAveragePooling3D,
    keras.layers.GlobalMaxPooling1D,
    keras.layers.GlobalMaxPooling2D,
    keras.layers.GlobalMaxPooling3D,
    keras.layers.Identity,
    keras.layers.InputLayer,
    keras.layers.LeakyReLU,
    keras.layers.Masking,
    keras.layers.MaxPooling1D,
    keras.layers.MaxPooling2D,
    keras.layers.MaxPooling3D,
    keras.layers.Maximum,
    keras.layers.Minimum,
    keras.layers.Multiply,
    keras.layers.Normalization,
    keras.layers.Permute,
    keras.layers.ReLU,
    keras.layers.RepeatVector,
    keras.layers.Rescaling,
    keras.layers.Reshape,
    keras.layers.Resizing,
    keras.layers.Softmax,
    keras.layers.SpatialDropout1D,
    keras.layers.SpatialDropout2D,
    keras.layers.SpatialDropout3D,
    keras.layers.Subtract,
    keras.layers.UnitNormalization,
    keras.layers.UpSampling1D,
    keras.layers.UpSampling2D,
    keras.layers.UpSampling3D,
    keras.layers.ZeroPadding1D,
    keras.layers.ZeroPadding2D,
    keras.layers.ZeroPadding3D,
}


@rule_of(keras.layers.Dense)
def _dense(layer: Any, input_shape: _Shape) -> TappedLayer | None:
    return _kernel_and_bias(layer, input_shape, ProductRule)


@rule_of(keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
def _convolution(layer: Any, input_shape: _Shape) -> TappedLayer | None:
    kind: Any = ProductRule
    if layer.groups > 1:
        kind = functools.partial(GroupedRule, channel_groups=layer.groups)
    return _kernel_and_bias(layer, input_shape, kind, is_convolution=True)


@rule_of(keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D)
def _depthwise(layer: Any, input_shape: _Shape) -> TappedLayer | None:
    kind = functools.partial(DepthwiseRule, channel_groups=layer.kernel.shape[-2])
    return _kernel_and_bias(layer, input_shape, kind, is_convolution=True)


@rule_of(keras.layers.TimeDistributed)
def _time_distributed(layer: Any, input_shape: _Shape) -> TappedLayer | None:
    steps = input_shape[1]
    if steps is None:
        return None

    def flat(values: tf.Tensor) -> tf.Tensor:
        return tf.reshape(values, (-1, *values.shape[2:]))

    def at_all_steps(function: _Function | None) -> _Function | None:
        if function is None:
            return None

        def of_steps(values: tf.Tensor) -> tf.Tensor:
            outputs = function(flat(values))
            return tf.reshape(outputs, (-1, steps, *outputs.shape[1:]))

        return of_steps

    inside = tapped_layer(layer.layer, (input_shape[0], *input_shape[2:]))
    if inside is None or inside.layer is not layer.layer:
        return None

    def rule_at_all_steps(rule: LayerRule) -> LayerRule:
        def factors(*tensors: tf.Tensor) -> Factors:
            return rule.factors(*map(flat, tensors))

        return dataclasses.replace(rule, factors=factors, rows=steps * rule.rows)

    parts = map(at_all_steps, (inside.first, inside.inner, inside.last))
    return TappedLayer(layer, [rule_at_all_steps(rule) for rule in inside.rules], *parts)


@rule_of(keras.layers.Embedding)
def _embedding(layer: Any, input_shape: _Shape) -> TappedLayer | None:
    if layer.lora_enabled:
        pair = layer.lora_embeddings_a, layer.lora_embeddings_b
        down = LookupRule(layer.input_dim, layer.lora_rank)
        rules = _adapted(layer, down, pair, (), unchanged, lambda ids, rows: tf.gather(rows, ids))
        return TappedLayer(layer, rules)
    rule = LookupRule(layer.input_dim, layer.output_dim)
    return TappedLayer(layer, [LayerRule(rule, tuple(layer.trainable_variables), unchanged)])


@rule_of(keras.layers.LayerNormalization)
def _normalization(layer: Any, input_shape: _Shape) -> TappedLayer | None:
    if layer.rms_scaling:
        return None
    config = {**layer.get_config(), "scale": False, "center": False, "dtype": "float32"}
    return _scaled(layer, input_shape, type(layer).from_config(config), layer.gamma, layer.beta)


@rule_of(keras.layers.RMSNormalization)
def _rms_normalization(layer: Any, input_shape: _Shape) -> TappedLayer | None:
    def normalized(inputs: tf.Tensor) -> tf.Tensor:
        return keras.ops.rms_normalization(inputs, axis=layer.axis, epsilon=layer.epsilon)

    return _scaled(layer, input_shape, normalized, layer.scale, None)


def _scaled(
    layer: Any, input_shape: _Shape, normalized: _Function, scale: Any, offset: Any
) -> TappedLayer | None:
    """Returns the rule of a layer that normalizes, then scales and shifts along its axes."""
    rank = len(input_shape)
    axes = tuple(axis % rank for axis in LayerSettings.of(layer).axes)
    if list(axes) != sorted(axes):
        return None
    trained = _identities(layer.trainable_variables)
    has_scale, has_offset = id(scale) in trained, id(offset) in trained
    sizes = tuple(input_shape[axis] or 0 for axis in axes)
    variables = (*[scale] * has_scale, *[offset] * has_offset)
    broadcast = [input_shape[axis] if axis in axes else 1 for axis in range(rank)]

    def first(inputs: tf.Tensor) -> tf.Tensor:
        return normalized(_as_rounded(layer, inputs))

    def inner(inputs: tf.Tensor) -> tf.Tensor:
        if scale is not None:
            inputs *= tf.reshape(tf.cast(scale.value, tf.float32), broadcast)
        if offset is not None:
            inputs += tf.reshape(tf.cast(offset.value, tf.float32), broadcast)
        return tf.cast(inputs, layer.compute_dtype)

    rule = ScaleRule(sizes, axes, has_scale, has_offset)
    return TappedLayer(layer, [LayerRule(rule, variables, unchanged)], first, inner)


def unchanged(inputs: Any, outputs: Any, gradients: Any) -> Any:
    return inputs, gradients


@rule_of(keras.layers.EinsumDense)
def _einsum(layer: Any, input_shape: _Shape) -> TappedLayer | None:
    letters = [char for char in string.ascii_letters if char not in f"{layer.equation}Z"]
    found = re.fullmatch(r"(\.*)([a-zA-Y]+)(\.*),([a-zA-Y]+)->\1([a-zA-Y]+)\3", layer.equation)
    if found is None or layer.lora_enabled:
        return None
    left, inputs, right, kernel, outputs = found.groups()
    elided = "".join(letters[: len(input_shape) - len(inputs)])
    if left or right:
        inputs, outputs = (elided + axes if left else axes + elided for axes in (inputs, outputs))
    if inputs[0] != outputs[0] or inputs[0] in kernel or inputs[0] in (layer.bias_axes or ""):
        # It works along the batch axis.
        return None
    bias = "".join(axis for axis in outputs if axis in (layer.bias_axes or ""))

    def kind(shape: Any, has_kernel: bool, has_bias: bool, window: None) -> Rule:
        bias_shape = tuple(layer.bias.shape) if has_bias else ()
        return EinsumRule(inputs, kernel, outputs, bias, shape, bias_shape, has_kernel, has_bias)

    return _kernel_and_bias(layer, input_shape, kind)


def _kernel_and_bias(
    layer: Any, input_shape: _Shape, kind: Any, is_convolution: bool = False
) -> TappedLayer | None:
    window = _window(layer, input_shape) if is_convolution else None
    if is_convolution and window is None:
        return None
    settings, pair = LayerSettings.of(layer), ()  # type: LayerSettings, tuple[Any, ...]
    if settings.lora_enabled:
        pair = layer.lora_kernel_a, layer.lora_kernel_b
    kernel = layer._kernel if pair else layer.kernel
    bias = (layer.bias,) if layer.bias is not None else ()
    if _identities([kernel, *bias, *pair]) != _identities(layer.variables) or (
        pair and settings.groups > 1
    ):
        # Quantized weights, or adapters of a convolution in groups.
        return None
    before_activation, last, slope = None, None, _SLOPES.get(layer.activation)
    if slope is None:
        # The outputs before the activation are tapped.
        config = {**layer.get_config(), "activation": None, "trainable": True}
        config.pop("lora_rank", None)
        linear = type(layer).from_config(config)
        linear.build(input_shape)

        def inner(inputs: tf.Tensor) -> tf.Tensor:
            values = [tf.convert_to_tensor(variable) for variable in (layer.kernel, *bias)]
            return linear.stateless_call(values, [], inputs)[0]

        before_activation, last, slope = inner, layer.activation, _SLOPES[_ACTIVATIONS.linear]

    def factors(inputs: tf.Tensor, outputs: tf.Tensor, gradients: tf.Tensor) -> Factors:
        inputs = _as_rounded(layer, inputs)
        gradients = slope(tf.cast(outputs, tf.float32), gradients)
        if settings.data_format == "channels_first":
            inputs, gradients = _channels_last(inputs), _channels_last(gradients)
        return inputs, gradients

    if pair:

        def apply(inputs: tf.Tensor, a: tf.Tensor) -> tf.Tensor:
            return tf.tensordot(inputs, a, 1) if window is None else window.convolved(inputs, a)

        down = ProductRule(tuple(pair[0].shape), True, False, window)
        rules = _adapted(layer, down, pair, bias, factors, apply)
        return TappedLayer(layer, rules, inner=before_activation, last=last)
    trained = _identities(layer.trainable_variables)
    variables = tuple(variable for variable in (kernel, *bias) if id(variable) in trained)
    has_kernel = id(kernel) in trained
    rule = kind(tuple(kernel.shape), has_kernel, len(variables) > has_kernel, window)
    rules = [LayerRule(rule, variables, factors)]
    return TappedLayer(layer, rules, inner=before_activation, last=last)


def _adapted(
    layer: Any,
    down: Rule,
    pair: tuple[Any, ...],
    bias: tuple[Any, ...],
    factors: Callable[[tf.Tensor, tf.Tensor, tf.Tensor], Factors],
    apply: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
) -> list[LayerRule]:
    """Returns the rules of low-rank adapters, which add ``scale * apply(inputs, a) @ b``.

    Each adapter is a layer: the output gradients of ``a``, whose rule is ``down``, are those of the
    adapted layer times ``b``, and the inputs of ``b`` are the outputs of ``a``.
    """
    a, b = pair
    scale = layer.lora_alpha / layer.lora_rank
    trained = _identities(layer.trainable_variables)

    def of_a(*tensors: tf.Tensor) -> Factors:
        inputs, gradients = factors(*tensors)
        return inputs, scale * tf.tensordot(gradients, b.value, [[-1], [1]])

    def of_b(*tensors: tf.Tensor) -> Factors:
        inputs, gradients = factors(*tensors)
        return scale * apply(inputs, a.value), gradients

    has_bias = bool(bias) and id(bias[0]) in trained
    up = ProductRule(tuple(b.shape), True, has_bias)
    return [
        LayerRule(down, (a,), of_a),
        LayerRule(up, (b, *bias) if has_bias else (b,), of_b),
    ]


def _window(layer: Any, input_shape: _Shape) -> Window | None:
    """Returns the window of a convolution; None if the sizes of its inputs are not fixed."""
    first = layer.data_format == "channels_first"
    sizes = input_shape[2:] if first else input_shape[1:-1]
    size, strides = tuple(layer.kernel_size), tuple(layer.strides)
    dilations = tuple(layer.dilation_rate)
    padding = []
    for length, width, stride, dilation in zip(sizes, size, strides, dilations, strict=True):
        if length is None:
            return None
        reach = (width - 1) * dilation
        if layer.padding == "same":
            outputs = -(-length // stride)
            total = max((outputs - 1) * stride + reach + 1 - length, 0)
            padding.append((total // 2, total - total // 2))
        else:
            padding.append((reach, 0) if layer.padding == "causal" else (0, 0))
    return Window(size, strides, dilations, tuple(padding))


def _as_rounded(layer: Any, inputs: tf.Tensor) -> tf.Tensor:
    """Returns inputs in ``float32``, rounded to the layer's precision."""
    return tf.cast(tf.cast(inputs, layer.compute_dtype), tf.float32)


def _channels_last(values: tf.Tensor) -> tf.Tensor:
    return tf.transpose(values, (0, *range(2, values.shape.rank), 1))


def _identities(variables: Sequence[Any]) -> set[int]:
    return {id(variable) for variable in variables}
