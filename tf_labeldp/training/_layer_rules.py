"""Which Keras layers treat each example apart, and the rule for the gradients of their weights.

The list is of exact types: a subclass may do anything. Whatever is not on it is no error, only
slower: the vectorized path sends each example through the model alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_labeldp.gradients._ghost_clipping import LayerRecord
from tf_labeldp.gradients._layer_gradients import LookupRule, Rule, ScaleRule
from tf_labeldp.gradients._product_gradients import DepthwiseRule, ProductRule, Window

_PLAIN_NAMES = """
Activation Add AlphaDropout Average AveragePooling1D AveragePooling2D AveragePooling3D CenterCrop
Concatenate Cropping1D Cropping2D Cropping3D Dropout ELU Flatten GaussianDropout GaussianNoise
GlobalAveragePooling1D GlobalAveragePooling2D GlobalAveragePooling3D GlobalMaxPooling1D
GlobalMaxPooling2D GlobalMaxPooling3D Identity InputLayer LeakyReLU Masking MaxPooling1D
MaxPooling2D MaxPooling3D Maximum Minimum Multiply Normalization Permute ReLU RepeatVector
Rescaling Reshape Resizing Softmax SpatialDropout1D SpatialDropout2D SpatialDropout3D Subtract
UnitNormalization UpSampling1D UpSampling2D UpSampling3D ZeroPadding1D ZeroPadding2D ZeroPadding3D
"""
_PLAIN = {getattr(keras.layers, name) for name in _PLAIN_NAMES.split()}

_Slope = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
# From the output of an activation and the gradient by it to the gradient by its input.
_SLOPES: dict[Any, _Slope] = {
    keras.activations.linear: lambda out, grad: grad,
    keras.activations.relu: lambda out, grad: tf.raw_ops.ReluGrad(gradients=grad, features=out),
    keras.activations.relu6: lambda out, grad: tf.raw_ops.Relu6Grad(gradients=grad, features=out),
    keras.activations.elu: lambda out, grad: tf.raw_ops.EluGrad(gradients=grad, outputs=out),
    keras.activations.selu: lambda out, grad: tf.raw_ops.SeluGrad(gradients=grad, outputs=out),
    keras.activations.sigmoid: lambda out, grad: tf.raw_ops.SigmoidGrad(y=out, dy=grad),
    keras.activations.tanh: lambda out, grad: tf.raw_ops.TanhGrad(y=out, dy=grad),
    keras.activations.exponential: lambda out, grad: grad * out,
    keras.activations.softmax: lambda out, grad: (
        out * (grad - tf.reduce_sum(out * grad, axis=-1, keepdims=True))
    ),
}
# Their slope does not follow from their output: the layer's output before them is made again.
_OTHER_ACTIVATIONS = {
    keras.activations.gelu,
    keras.activations.hard_sigmoid,
    keras.activations.leaky_relu,
    keras.activations.log_softmax,
    keras.activations.mish,
    keras.activations.silu,
    keras.activations.softplus,
    keras.activations.softsign,
}


class NoRuleError(ValueError):
    """No rules give the per-example gradients of a model; the message says why."""


@dataclasses.dataclass(frozen=True)
class LayerRule:
    """A layer with trained weights, and how their gradients follow.

    Attributes:
        layer: the layer.
        rule: of its per-example gradients.
        variables: that the rule gives gradients of, in its order.
        twin: where the slope of the activation does not follow from its output, the layer without
            activation; for normalisation layers, the layer without scale and offset; else None.
    """

    layer: keras.Layer
    rule: Rule
    variables: tuple[Any, ...]
    twin: keras.Layer | None = None

    def record(self, inputs: tf.Tensor, outputs: tf.Tensor, gradients: tf.Tensor) -> LayerRecord:
        """Returns what the rule needs, with the channels last.

        Args:
            inputs: of the layer, (B, ...).
            outputs: of the layer, (B, ...), after its activation.
            gradients: of the loss by ``outputs``, ``float32``.
        """
        layer = self.layer
        if isinstance(self.rule, LookupRule):
            return LayerRecord(layer.name, self.rule, inputs, gradients)
        inputs = tf.cast(tf.cast(inputs, layer.compute_dtype), tf.float32)
        if isinstance(self.rule, ScaleRule):
            return LayerRecord(layer.name, self.rule, self.twin(inputs), gradients)  # type: ignore
        if self.twin is None:
            gradients = _SLOPES[layer.activation](tf.cast(outputs, tf.float32), gradients)
        else:
            weights = [tf.cast(v.value, tf.float32) for v in _kernel_and_bias(layer)]
            before, _ = self.twin.stateless_call(weights, [], inputs)
            with tf.GradientTape() as tape:
                tape.watch(before)
                after = layer.activation(before)
            gradients = tape.gradient(after, before, output_gradients=gradients)
        if getattr(layer, "data_format", None) == "channels_first":
            inputs, gradients = _channels_last(inputs), _channels_last(gradients)
        return LayerRecord(layer.name, self.rule, inputs, gradients)


def layer_rule(layer: Any, input_shape: tuple[int | None, ...]) -> LayerRule | None:
    """Returns the rule of a layer of a functional model, or None if the layer trains nothing.

    Args:
        layer: a layer or another operation.
        input_shape: of its first input, with the batch.

    Raises:
        NoRuleError: the layer is not known to treat each example apart, or its gradients have no
            rule.
    """
    kind = type(layer)
    what = f"layer {layer.name!r} ({kind.__name__})"
    if kind in _PLAIN:
        _check_parts(layer, len(input_shape), what)
        return None
    if kind is keras.layers.BatchNormalization and not layer.trainable:
        return None  # frozen, it uses its moving averages
    if kind not in _MAKERS:
        raise NoRuleError(f"{what} has no rule for its per-example gradients")
    _check_parts(layer, len(input_shape), what)
    made = _MAKERS[kind](layer, input_shape)
    trained = {id(variable) for variable in layer.trainable_variables}
    if made is None or {id(variable) for variable in made.variables} != trained:
        raise NoRuleError(f"{what} is used in a way that has no rule")
    return made if trained else None


def _check_parts(layer: Any, rank: int, what: str) -> None:
    """Raises where an axis or an activation could mix examples."""
    axis = getattr(layer, "axis", None)
    axes = list(axis) if isinstance(axis, (list, tuple)) else [axis]
    if any(entry is not None and (entry == 0 or entry == -rank) for entry in axes):
        raise NoRuleError(f"{what} works along the batch axis")
    activation = getattr(layer, "activation", None)
    if activation is not None and activation not in _SLOPES.keys() | _OTHER_ACTIVATIONS:
        raise NoRuleError(f"{what} has an activation that is not one of Keras's")


def _dense(layer: Any, input_shape: tuple[int | None, ...]) -> LayerRule | None:
    return _product(layer, input_shape, ProductRule, None)


def _conv(layer: Any, input_shape: tuple[int | None, ...]) -> LayerRule | None:
    window = _window(layer, input_shape)
    if window is None or layer.groups != 1:
        return None
    return _product(layer, input_shape, ProductRule, window)


def _depthwise(layer: Any, input_shape: tuple[int | None, ...]) -> LayerRule | None:
    window = _window(layer, input_shape)
    return None if window is None else _product(layer, input_shape, DepthwiseRule, window)


def _product(
    layer: Any, input_shape: tuple[int | None, ...], kind: Any, window: Window | None
) -> LayerRule | None:
    """Returns the rule of a layer with a kernel, a bias and an activation."""
    weights = _kernel_and_bias(layer)
    if {id(variable) for variable in weights} != {id(variable) for variable in layer.variables}:
        return None  # adapters (LoRA) or quantized weights
    trained = {id(variable) for variable in layer.trainable_variables}
    variables = tuple(variable for variable in weights if id(variable) in trained)
    has_kernel = id(weights[0]) in trained
    rule = kind(tuple(layer.kernel.shape), has_kernel, len(variables) > has_kernel, window)
    twin = None
    if layer.activation in _OTHER_ACTIVATIONS:
        twin = type(layer).from_config(
            {**layer.get_config(), "activation": None, "dtype": "float32", "trainable": True}
        )
        twin.build(input_shape)
    return LayerRule(layer, rule, variables, twin)


def _embedding(layer: Any, input_shape: tuple[int | None, ...]) -> LayerRule | None:
    return LayerRule(
        layer, LookupRule(layer.input_dim, layer.output_dim), tuple(layer.trainable_variables)
    )


def _normalization(layer: Any, input_shape: tuple[int | None, ...]) -> LayerRule | None:
    """Returns the rule of a scale and an offset, where they run along ascending axes."""
    rank = len(input_shape)
    given = layer.axis if isinstance(layer.axis, (list, tuple)) else [layer.axis]
    axes = tuple(axis % rank for axis in given)
    if getattr(layer, "rms_scaling", False) or list(axes) != sorted(axes):
        return None
    trained = {id(variable) for variable in layer.trainable_variables}
    weights = {"scale": layer.gamma, "offset": layer.beta}
    used = {name: v for name, v in weights.items() if v is not None and id(v) in trained}
    shape = tuple(input_shape[axis] or 0 for axis in axes)
    twin = type(layer).from_config(
        {**layer.get_config(), "scale": False, "center": False, "dtype": "float32"}
    )
    rule = ScaleRule(shape, axes, "scale" in used, "offset" in used)
    return LayerRule(layer, rule, tuple(used.values()), twin)


_MAKERS: dict[Any, Callable[[Any, tuple[int | None, ...]], LayerRule | None]] = {
    keras.layers.Dense: _dense,
    keras.layers.Conv1D: _conv,
    keras.layers.Conv2D: _conv,
    keras.layers.Conv3D: _conv,
    keras.layers.DepthwiseConv1D: _depthwise,
    keras.layers.DepthwiseConv2D: _depthwise,
    keras.layers.Embedding: _embedding,
    keras.layers.LayerNormalization: _normalization,
    keras.layers.GroupNormalization: _normalization,
}


def _window(layer: Any, input_shape: tuple[int | None, ...]) -> Window | None:
    """Returns where a convolution looks, None if the sizes of its inputs are not fixed."""
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


def _kernel_and_bias(layer: Any) -> list[Any]:
    return [layer.kernel, layer.bias] if layer.use_bias else [layer.kernel]


def _channels_last(values: tf.Tensor) -> tf.Tensor:
    rank = values.shape.rank
    return tf.transpose(values, (0, *range(2, rank), 1))
