"""Clipped sums of models whose layers are all known, after one backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_labeldp.gradients._ghost_clipping import clipped_sums
from tf_labeldp.training._layer_rules import LayerRule, NoRuleError, layer_rule
from tf_labeldp.training._per_example_loss import checked_losses

_ENTRYWISE = ("Add", "Cast", "Divide", "Maximum", "Minimum", "Multiply", "NotEqual", "Subtract")


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
    ghost: GhostModel,
    variables: Sequence[Any],
    x: Any,
    y: Any,
    weights: tf.Tensor,
    loss: Callable[[Any, Any], tf.Tensor],
    clip: tf.Tensor,
    group_size: int,
    scale: float,
    max_bytes: int,
    scales: Sequence[tf.Tensor] | None = None,
) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
    """Returns the clipped sum, the norms (B / group_size,) and the outputs of a batch.

    See ``PerExampleClipping.clipped_sum``. ``variables`` are the trainable ones of the model.
    ``scale`` is multiplied onto the losses and divided out of the gradients; ``scales``, like
    ``variables``, are multiplied onto the gradients before norms are taken.
    """
    with tf.GradientTape() as tape:
        # A variable that was created frozen is not watched by itself.
        tape.watch([variable.value for variable in variables])
        seen = ghost.taps(x, training=True)
        losses = tf.cast(checked_losses(loss(y, seen["model"]), weights), tf.float32)
        total = tf.reduce_sum(losses * weights) * scale
    by_outputs = tape.gradient(
        total, seen["outputs"], unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    factors = {id(v): factor for v, factor in zip(variables, scales or [], strict=bool(scales))}
    records = []
    for rule, inputs, outputs, gradient in zip(
        ghost.layers, seen["inputs"], seen["outputs"], by_outputs, strict=True
    ):
        gradient = tf.cast(tf.convert_to_tensor(gradient), tf.float32) / scale
        record = rule.record(inputs, outputs, gradient)
        if factors:
            record = dataclasses.replace(record, scales=[factors[id(v)] for v in rule.variables])
        records.append(record)
    sums, norms = clipped_sums(records, group_size, clip, max_bytes)
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
    """Returns the model with the inputs and outputs of its trained layers in reach.

    Raises:
        NoRuleError: it is no plain functional or sequential model, or has a layer that is not
            known, or uses trained weights twice.
    """
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

    Raises:
        NoRuleError: the model, or one inside it, is of another kind, has several outputs, or its
            class has a ``call`` of its own.
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
