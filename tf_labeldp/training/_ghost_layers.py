"""Clipped sums of models whose layers are all known, after one backward pass.

The list of layers is of exact types: a subclass may do anything. Whatever is not on it is no error,
only slower: then each example goes through the model alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_labeldp.gradients._ghost_clipping import LayerRecord, clipped_sums
from tf_labeldp.gradients._layer_gradients import (
    DepthwiseRule,
    LookupRule,
    ProductRule,
    Rule,
    ScaleRule,
    Window,
)
from tf_labeldp.training._model_checks import checked_losses

_ENTRYWISE = ("Add", "Cast", "Divide", "Maximum", "Minimum", "Multiply", "NotEqual", "Subtract")
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
        """Returns what the rule needs, with the channels last."""
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
    """Returns the rule of a layer of a functional model, or None if the layer trains nothing."""
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


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """What is clipped: rows with their weights and loss; see ``PerExampleClipping.clipped_sum``.

    ``loss_scale`` is multiplied onto the losses and divided out of the gradients.
    """

    x: Any
    y: Any
    weights: tf.Tensor
    loss: Callable[[Any, Any], tf.Tensor]
    loss_scale: float = 1.0


@dataclasses.dataclass(frozen=True, eq=False)
class Clip:
    """What bounds one label: the norm, the rows clipped together, factors on the gradients."""

    l2_norm_clip: tf.Tensor
    group_size: int = 1
    scales: Sequence[tf.Tensor] | None = None


@dataclasses.dataclass(frozen=True)
class GhostModel:
    """A model whose every layer is known.

    Attributes:
        taps: from the model's inputs to the inputs and outputs of ``layers`` and the model's own
            outputs: a dictionary with the keys "inputs", "outputs" and "model". It shares the
            layers of the model, which itself stays as it is.
        layers: those with trained weights.
    """

    taps: keras.Model
    layers: tuple[LayerRule, ...]


def ghost_sums(
    ghost: GhostModel, variables: Sequence[Any], batch: Batch, clip: Clip, max_bytes: int
) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
    """Returns the clipped sum for the trainable variables, the norms and the outputs."""
    with tf.GradientTape() as tape:
        # A variable that was created frozen is not watched by itself.
        tape.watch([variable.value for variable in variables])
        seen = ghost.taps(batch.x, training=True)
        losses = checked_losses(batch.loss(batch.y, seen["model"]), batch.weights)
        total = tf.reduce_sum(tf.cast(losses, tf.float32) * batch.weights) * batch.loss_scale
    by_outputs = tape.gradient(
        total, seen["outputs"], unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    scales = clip.scales or []
    factors = {id(v): factor for v, factor in zip(variables, scales, strict=bool(scales))}
    records = []
    for rule, inputs, outputs, gradient in zip(
        ghost.layers, seen["inputs"], seen["outputs"], by_outputs, strict=True
    ):
        gradient = tf.cast(tf.convert_to_tensor(gradient), tf.float32) / batch.loss_scale
        record = rule.record(inputs, outputs, gradient)
        if factors:
            record = dataclasses.replace(record, scales=[factors[id(v)] for v in rule.variables])
        records.append(record)
    sums, norms = clipped_sums(records, clip.group_size, clip.l2_norm_clip, max_bytes)
    found = {
        id(variable): gradient
        for rule, gradients in zip(ghost.layers, sums, strict=True)
        for variable, gradient in zip(rule.variables, gradients, strict=True)
    }
    gradients = [
        found[id(variable)] if id(variable) in found else tf.zeros(variable.shape)
        for variable in variables
    ]
    return gradients, norms, seen["model"]


def ghost_model(model: keras.Model) -> GhostModel:
    """Returns the model with the inputs and outputs of its trained layers in reach."""
    inputs, output = unfolded(model)
    layers: list[LayerRule] = []
    befores, afters = [], []
    for node in _nodes([output]):
        if _is_entrywise(node):
            continue
        tensors = node.input_tensors or node.output_tensors
        rule = layer_rule(node.operation, tuple(tensors[0].shape))
        if rule is not None:
            layers.append(rule)
            befores.append(node.input_tensors[0])
            afters.append(node.output_tensors[0])
    claimed = [id(variable) for rule in layers for variable in rule.variables]
    if len(set(claimed)) < len(claimed):
        raise NoRuleError("it uses trained weights in more than one place")
    taps = keras.Model(inputs, {"inputs": befores, "outputs": afters, "model": output})
    return GhostModel(taps, tuple(layers))


def layer_outputs(model: keras.Model) -> keras.Model | None:
    """Returns a model that gives the output of every layer; None where these are out of reach.

    ``output_names`` has the names of the layers.
    """
    try:
        inputs, output = unfolded(model)
    except NoRuleError:
        return None
    outputs = {
        node.operation.name: node.output_tensors[0]
        for node in _nodes([output])
        if node.input_tensors
    }
    return keras.Model(inputs, list(outputs.values())) if outputs else None


def unfolded(model: keras.Model) -> tuple[Any, Any]:
    """Returns symbolic inputs (as the model takes them) and output, free of nested models.

    Layers are called once more, on symbolic tensors, where they are inside a nested model.
    """
    _check_kind(model)
    structure = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    if not any(isinstance(node.operation, keras.Model) for node in _nodes(model.outputs)):
        return structure, model.outputs[0]
    inputs = keras.tree.map_structure(
        lambda old: keras.Input(batch_shape=old.shape, dtype=old.dtype, name=old.name), structure
    )
    return inputs, _replay(model, keras.tree.flatten(inputs))


def _is_entrywise(node: Any) -> bool:
    """Returns whether a node is arithmetic of tensors of one shape, as in ``x + y``.

    Masks of embeddings (``ids != 0``) and changes of precision are such nodes, too.
    """
    kind = type(node.operation)
    shapes = {tuple(tensor.shape) for tensor in (*node.input_tensors, *node.output_tensors)}
    return kind.__module__.startswith("keras.") and kind.__name__ in _ENTRYWISE and len(shapes) == 1


def _replay(model: keras.Model, inputs: list[Any]) -> Any:
    """Returns the output of the model's layers, called one by one on other inputs."""
    _check_kind(model)
    known = {id(old): new for old, new in zip(model.inputs, inputs, strict=True)}
    for node in _nodes(model.outputs):
        if all(id(output) in known for output in node.output_tensors):
            continue  # an input
        operation = node.operation
        arguments, options = node.arguments.fill_in(known)
        if not isinstance(operation, keras.Model):
            outputs = operation(*arguments, **options)
        elif any(option is not None for option in options.values()):
            raise NoRuleError(f"its nested model {operation.name!r} is called with {list(options)}")
        else:
            outputs = _replay(operation, keras.tree.flatten(arguments))
        for old, new in zip(node.output_tensors, keras.tree.flatten(outputs), strict=True):
            known[id(old)] = new
    return known[id(model.outputs[0])]


def _check_kind(model: keras.Model) -> None:
    if not getattr(model, "inputs", None) or len(model.outputs) != 1:
        raise NoRuleError(f"{model.name!r} is no functional or sequential model with one output")
    functional = type(keras.Model(model.inputs, model.outputs))
    if type(model).call not in (functional.call, keras.Sequential.call):
        raise NoRuleError(f"the class of {model.name!r} has a call() of its own")


def _nodes(outputs: list[Any]) -> list[Any]:
    """Returns the nodes that lead to symbolic tensors, each after those that it needs."""
    done: dict[int, Any] = {}
    pending = [(tensor, False) for tensor in outputs]
    while pending:
        tensor, ready = pending.pop()
        history = tensor._keras_history
        node = history.operation._inbound_nodes[history.node_index]
        if id(node) in done:
            continue
        if ready:
            done[id(node)] = node
        else:
            pending.append((tensor, True))
            pending.extend((before, False) for before in node.input_tensors)
    return list(done.values())
