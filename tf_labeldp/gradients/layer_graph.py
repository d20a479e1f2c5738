"""A functional model as a graph of layers, whose inputs and outputs are tapped as it runs."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# Registers the rules of these layers.
import tf_labeldp.gradients._group_normalization
import tf_labeldp.gradients._recurrent_rules  # noqa: F401
from tf_labeldp.features.tables import symbolic_inputs
from tf_labeldp.gradients._layer_rules import LayerRule, NoRuleError, TappedLayer, tapped_layer
from tf_labeldp.gradients._row_by_row import RowByRow
from tf_labeldp.gradients.masks import mask_of
from tf_labeldp.gradients.model_checks import InspectedModel

_ENTRYWISE = ("Add", "Cast", "Divide", "Maximum", "Minimum", "Multiply", "NotEqual", "Subtract")
# Layers without weights of their own, which keep examples apart and call layers that have rules.
_COMPOSITE = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)


@dataclasses.dataclass(frozen=True)
class Tap:
    """A rule with the tensors that its factors come from."""

    # The name of the layer.
    name: str
    rule: LayerRule
    inputs: Any
    outputs: Any


class TappedModel:
    """Calls a functional or sequential model in training mode, and taps the layers with rules.

    Nested models and attention are split into the layers inside. An operation without a
    rule, which could mix examples, runs on each example alone.

    Raises:
        NoRuleError: the model can't be split.
    """

    def __init__(self, model: keras.Model) -> None:
        _check_kind(model)
        self._model = model
        inputs = symbolic_inputs(model)
        # Converts features as the model does.
        self._convert = keras.Model(inputs, inputs)
        self._tapped: dict[Any, TappedLayer | None] = {}
        self._parts: dict[Any, tuple[dict[str, Any], list[Any]]] = {}
        self._rows: dict[Any, RowByRow] = {}
        specs = keras.tree.map_structure(
            lambda part: tf.TensorSpec([part.shape[0] or 2, *part.shape[1:]], part.dtype), inputs
        )

        def trace(x: Any) -> Any:
            outputs, taps = self(x)
            # No tape records where clipping is prepared.
            tf.gradients(tf.nest.flatten(outputs), tf.nest.flatten([tap.outputs for tap in taps]))

        try:
            tf.function(trace, autograph=False).get_concrete_function(specs)
        except NoRuleError:
            raise
        except Exception as error:
            # The model may still run as a whole.
            raise NoRuleError(f"it cannot be run layer by layer: {error}") from error

    @property
    def row_by_row(self) -> list[RowByRow]:
        """The operations without a rule."""
        return list(self._rows.values())

    def __call__(self, x: Any) -> tuple[Any, list[Tap]]:
        """Returns the outputs, in their structure, and a tap for each rule."""
        model, taps = self._model, []  # type: keras.Model, list[Tap]
        outputs = self._run(model, keras.tree.flatten(self._convert(x)), taps)
        if len(outputs) == 1:
            return outputs[0], taps
        return keras.tree.pack_sequence_as(model.output, outputs), taps

    def _run(self, model: keras.Model, inputs: list[Any], taps: list[Tap]) -> list[Any]:
        _check_kind(model)
        values = {id(old): new for old, new in zip(model.inputs, inputs, strict=True)}
        return self._evaluated(model.outputs, values, taps)

    def _evaluated(
        self, outputs: list[Any], values: dict[int, Any], taps: list[Tap], trusted: bool = False
    ) -> list[Any]:
        """Returns symbolic outputs for the values of inputs; ``trusted`` functions mix no rows."""
        for node in _nodes(outputs):
            if all(id(output) in values for output in node.output_tensors):
                continue
            if trusted and not isinstance(node.operation, keras.Layer):
                results = _called(node, values)
            else:
                results = self._called(node, values, taps)
            # A layer with taps returns more.
            for old, new in zip(node.output_tensors, keras.tree.flatten(results), strict=False):
                values[id(old)] = new
        return [values[id(output)] for output in outputs]

    def _called(self, node: Any, values: dict[int, Any], taps: list[Tap]) -> Any:
        operation = node.operation
        if _is_entrywise(node):
            return _called(node, values)
        if isinstance(operation, keras.Model):
            arguments, options = node.arguments.fill_in(values)
            if any(option is not None for option in options.values()):
                name = operation.name
                raise NoRuleError(f"its nested model {name!r} is called with {list(options)}")
            return self._run(operation, keras.tree.flatten(arguments), taps)
        if type(operation) in _COMPOSITE and not _attends_to_the_batch(node):
            return self._called_in_parts(node, values, taps)
        tapped = self._tapped_layer(node, values)
        if tapped is None:
            return self._called_row_by_row(node, values, taps)
        source = id(node.input_tensors[0]) if node.input_tensors else 0
        if tapped.first is not None:
            values = {**values, source: _step(tapped.first, values[source])}
        if tapped.inner is not None:
            outputs = _step(tapped.inner, values[source])
        else:
            outputs = _called(node, values, tapped.layer)
        flat = keras.tree.flatten(outputs)
        for rule in tapped.rules:
            own = (values[source], flat[0])
            if rule.places is not None:
                own = tuple(flat[place] for place in rule.places)
            taps.append(Tap(operation.name, rule, *own))
        if tapped.layer is not operation:
            inputs = values[source]
            masks = operation.compute_mask(inputs, mask_of(inputs))
            flat[0]._keras_mask = keras.tree.flatten(masks)[0] if masks is not None else None
        return outputs if tapped.last is None else _step(tapped.last, outputs)

    def _tapped_layer(self, node: Any, values: dict[int, Any]) -> TappedLayer | None:
        """Returns a node's layer with its rules; None if it has to run row by row."""
        shape = tuple(values[id(node.input_tensors[0])].shape) if node.input_tensors else ()
        key = id(node.operation), shape[1:]
        if key not in self._tapped:
            # Rules may make layers, which outlive the graph in which they are made.
            with tf.init_scope():
                self._tapped[key] = tapped_layer(node.operation, (None, *shape[1:]))
        return self._tapped[key]

    def _called_row_by_row(self, node: Any, values: dict[int, Any], taps: list[Tap]) -> list[Any]:
        tensors = [values[id(tensor)] for tensor in node.input_tensors]
        if not tensors:
            raise NoRuleError(f"{node.operation.name!r} has no inputs")
        masks = [mask_of(tensor) for tensor in tensors]
        key = id(node), *(mask is None for mask in masks)
        if key not in self._rows:
            self._rows[key] = RowByRow(self._model, node, tensors, masks)
        rows = self._rows[key]
        outputs, tap = rows([*tensors, *(mask for mask in masks if mask is not None)])
        if rows.variables:
            taps.append(Tap(node.operation.name, rows.layer_rule, *tap))
        return outputs

    def _called_in_parts(self, node: Any, values: dict[int, Any], taps: list[Tap]) -> list[Any]:
        """Calls the layers inside a layer, as its ``call`` does."""
        layer = node.operation
        arguments, options = node.arguments.fill_in(values)
        signature = inspect.signature(layer.call)
        named = signature.bind(*arguments, **options).arguments
        tensors = {name: value for name, value in named.items() if tf.is_tensor(value)}
        for name, tensor in tensors.copy().items():
            mask = mask_of(tensor)
            if f"{name}_mask" in signature.parameters and mask is not None:
                tensors.setdefault(f"{name}_mask", mask)
        first = tensors[next(iter(signature.parameters))]
        mask = mask_of(first)
        places = [id(tensor) for tensor in tensors.values()]
        same = tuple(places.index(place) for place in places)
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items())
        key = id(node), same, shapes
        if key not in self._parts:
            self._parts[key] = _parts_of_call(layer, named, tensors)
        symbols, outputs = self._parts[key]
        # Copies have no masks, which the call has made arguments.
        inner = {id(symbols[name]): tf.identity(tensor) for name, tensor in tensors.items()}
        results = self._evaluated(outputs, inner, taps, trusted=True)
        for name, tensor in tensors.items():
            # The layer may delete the masks of its inputs.
            if mask_of(symbols[name]) is None:
                tensor._keras_mask = None
        if mask is not None and layer.supports_masking:
            results[0]._keras_mask = mask
        return results


def _attends_to_the_batch(node: Any) -> bool:
    """Returns whether an attention layer mixes examples.

    Some versions of Keras keep negative axes, which count from the end of the projected query: it
    has an axis more than the query, that of the heads.
    """
    layer = node.operation
    has_axes = isinstance(layer, keras.layers.MultiHeadAttention)
    axes = (layer.attention_axes if has_axes else None) or ()
    rank = len(node.input_tensors[0].shape) + 1
    return any(axis % rank == 0 for axis in axes)


def _parts_of_call(layer: Any, named: dict[str, Any], tensors: dict[str, Any]) -> Any:
    """Returns symbolic inputs by name, and the outputs that a layer's ``call`` makes of them."""
    by_tensor: dict[int, Any] = {}
    for tensor in tensors.values():
        shape = (None, *tensor.shape[1:])
        by_tensor.setdefault(id(tensor), keras.KerasTensor(shape, tensor.dtype.name))
    symbols = {name: by_tensor[id(tensor)] for name, tensor in tensors.items()}
    for name, symbol in symbols.items():
        if f"{name}_mask" in symbols:
            symbol._keras_mask = symbols[f"{name}_mask"]
    if named.get("use_causal_mask") and named.get("attention_mask") is None:
        # Otherwise the causal mask may be made from tensors inside, whose lengths are not known.
        named = {**named, "attention_mask": np.ones((1, 1, 1), bool)}
    # Constants that the call makes outlive this graph.
    with tf.init_scope():
        outputs = layer.call(**{**named, **symbols, "training": True})
    return symbols, keras.tree.flatten(outputs)


def _called(node: Any, values: dict[int, Any], layer: Any = None) -> Any:
    """Returns the outputs of a node's operation in training mode, or of a layer in its place."""
    layer = layer or node.operation
    arguments, options = node.arguments.fill_in(values)
    if "training" in inspect.signature(layer.call).parameters:
        options = {**options, "training": True}
    return layer(*arguments, **options)


def _step(function: Any, inputs: tf.Tensor) -> tf.Tensor:
    """Returns a function's outputs, with the mask of its inputs."""
    outputs = function(inputs)
    outputs._keras_mask = mask_of(inputs)
    return outputs


def layer_outputs(model: keras.Model) -> keras.Model | None:
    """Returns a model of every layer's output, named by layer; None if it cannot be made."""
    try:
        inputs, outputs = unfolded(model)
    except NoRuleError:
        return None
    by_layer = {
        node.operation.name: node.output_tensors[0]
        for node in _nodes(keras.tree.flatten(outputs))
        if node.input_tensors
    }
    return keras.Model(inputs, list(by_layer.values())) if by_layer else None


def layer_not_compiled(model: keras.Model) -> str | None:
    """Returns the first layer that XLA can't compile alone on zeros; None if there is none."""
    try:
        _, outputs = unfolded(model)
    except NoRuleError:
        return None
    for node in _nodes(keras.tree.flatten(outputs)):
        if not node.input_tensors:
            continue
        zeros = [
            tf.zeros([2 if size is None else size for size in tensor.shape], tensor.dtype)
            for tensor in node.input_tensors
        ]
        try:
            tf.function(_forward_and_backward, jit_compile=True, autograph=False)(node, zeros)
        except tf.errors.OpError:
            return f"layer {node.operation.name!r} ({type(node.operation).__name__})"
    return None


def _forward_and_backward(node: Any, inputs: list[tf.Tensor]) -> Any:
    by_tensor = {id(old): new for old, new in zip(node.input_tensors, inputs, strict=True)}
    arguments, options = node.arguments.fill_in(by_tensor)
    layer = node.operation
    trained = layer.trainable_variables if isinstance(layer, keras.Layer) else []
    sources = [variable.value for variable in trained]
    sources += [tensor for tensor in inputs if tensor.dtype.is_floating]
    with tf.GradientTape() as tape, keras.StatelessScope():
        tape.watch(sources)
        outputs = layer(*arguments, **options)
    return outputs, tape.gradient(outputs, sources)


def unfolded(model: keras.Model) -> tuple[Any, Any]:
    """Returns the model's symbolic inputs and outputs in their structures, without nested models.

    Layers inside a nested model are called once more, on symbolic tensors.
    """
    _check_kind(model)
    structure = symbolic_inputs(model)
    outputs = model.output if len(model.outputs) > 1 else model.outputs[0]
    if not any(isinstance(node.operation, keras.Model) for node in _nodes(model.outputs)):
        return structure, outputs
    inputs = keras.tree.map_structure(
        lambda old: keras.Input(batch_shape=old.shape, dtype=old.dtype, name=old.name), structure
    )
    return inputs, keras.tree.pack_sequence_as(outputs, _replay(model, keras.tree.flatten(inputs)))


def _is_entrywise(node: Any) -> bool:
    """Returns whether a node is arithmetic on tensors of one shape, such as ``x + y``.

    Masks of embeddings (``ids != 0``) and casts are also such nodes.
    """
    kind = type(node.operation)
    shapes = {tuple(tensor.shape) for tensor in (*node.input_tensors, *node.output_tensors)}
    return kind.__module__.startswith("keras.") and kind.__name__ in _ENTRYWISE and len(shapes) == 1


def _replay(model: keras.Model, inputs: list[Any]) -> list[Any]:
    _check_kind(model)
    replayed = {id(old): new for old, new in zip(model.inputs, inputs, strict=True)}
    for node in _nodes(model.outputs):
        if all(id(output) in replayed for output in node.output_tensors):
            continue
        operation = node.operation
        arguments, options = node.arguments.fill_in(replayed)
        if not isinstance(operation, keras.Model):
            outputs = operation(*arguments, **options)
        elif any(option is not None for option in options.values()):
            raise NoRuleError(f"its nested model {operation.name!r} is called with {list(options)}")
        else:
            outputs = _replay(operation, keras.tree.flatten(arguments))
        for old, new in zip(node.output_tensors, keras.tree.flatten(outputs), strict=True):
            replayed[id(old)] = new
    return [replayed[id(output)] for output in model.outputs]


def _check_kind(model: keras.Model) -> None:
    if not InspectedModel(model).inputs:
        raise NoRuleError(f"{model.name!r} is not a functional or sequential model")
    functional = type(keras.Model(model.inputs, model.outputs))
    if type(model).call not in (functional.call, keras.Sequential.call):
        raise NoRuleError(f"the class of {model.name!r} overrides call()")


def _nodes(outputs: list[Any]) -> list[Any]:
    """Returns the nodes behind symbolic tensors in topological order."""
    done: dict[int, Any] = {}
    pending = [(tensor, False) for tensor in outputs]
    while pending:
        tensor, ready = pending.pop()
        origin = tensor._keras_history
        if origin.operation is None:
            continue
        node = origin.operation._inbound_nodes[origin.node_index]
        if id(node) in done:
            continue
        if ready:
            done[id(node)] = node
        else:
            pending.append((tensor, True))
            pending.extend((before, False) for before in node.input_tensors)
    return list(done.values())
