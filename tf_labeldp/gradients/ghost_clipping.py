"""Clipped sums in one backward pass per batch, for models whose layers all have rules.

Book-keeping (Bu et al. 2023, "Differentially private optimization on large foundation models at
almost no cost", algorithm 1): the inputs and output gradients of the layers give the norms and
then, scaled, the clipped sum. The gradients of a layer are formed and kept for the sum if that is
faster than Gram matrices (Bu et al. 2022, "Scalable and efficient training of large convolutional
neural networks with differential privacy") and if memory allows it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

# Registers the rules of these layers.
import tf_labeldp.gradients._group_normalization
import tf_labeldp.gradients._recurrent_rules  # noqa: F401
from tf_labeldp.features.estimator import symbolic_inputs
from tf_labeldp.gradients._layer_rules import (
    FLOAT_BYTES,
    LayerRule,
    NoRuleError,
    Rule,
    Taps,
    layer_rules,
    with_taps,
)
from tf_labeldp.gradients.clip import Batch, Clip, Sums, by_chunks, squared_norms, weighted_sum


class LayerRecord(NamedTuple):
    """A layer's rule and tensors in one backward pass."""

    name: str
    rule: Rule
    taps: Taps


@dataclasses.dataclass(frozen=True)
class Plan:
    """The way to compute one layer's norms and sum."""

    # Forms all gradients once, for the norms and for the sum.
    keep: bool
    # Computes norms without gradients.
    ghost: bool
    # The number of groups per chunk.
    chunk: int


def make_plans(records: Sequence[LayerRecord], max_bytes: int) -> list[Plan]:
    """Returns a plan for each layer; kept gradients and working memory fit ``max_bytes``."""
    plans: dict[int, Plan] = {}
    candidates: list[tuple[int, int]] = []
    work: dict[int, tuple[bool, int]] = {}
    for place, (name, rule, taps) in enumerate(records):
        # In coordinates: before and after the map, and in between.
        copies = 1 if taps.coordinates is None else 3
        formed = FLOAT_BYTES * rule.num_weights * copies
        ghost = rule.norm_bytes(taps)
        if ghost is not None and ghost < formed:
            work[place] = (True, ghost)
        else:
            work[place] = (False, formed)
        if not work[place][0] or rule.forms_faster(taps):
            candidates.append((formed * taps.groups, place))
        if work[place][1] > max_bytes:
            raise ValueError(
                f"max_bytes={max_bytes} is too small for layer {name!r}: the norm of one gradient "
                f"needs {work[place][1]} bytes. Raise max_bytes to at least that."
            )
    left = max_bytes
    for needed, place in sorted(candidates):
        # Kept gradients leave room for one group of any layer that is processed in chunks.
        reserve = max((size for other, (_, size) in work.items() if other != place), default=0)
        if needed + reserve <= left:
            left -= needed
            plans[place] = Plan(keep=True, ghost=False, chunk=0)
    for place, (ghost_norm, size) in work.items():
        if place not in plans:
            plans[place] = Plan(keep=False, ghost=ghost_norm, chunk=max(1, left // size))
    return [plans[place] for place in range(len(records))]


def clipped_sums(
    records: Sequence[LayerRecord], coefficients_of: Callable[[tf.Tensor], Any], max_bytes: int
) -> tuple[list[list[tf.Tensor]], tf.Tensor]:
    """Returns each layer's sum of gradients times coefficients, and the norms (groups,).

    ``coefficients_of`` maps the norms to coefficients (groups,).
    """
    plans = make_plans(records, max_bytes)
    kept = [
        record.rule.gradients(record.taps) if plan.keep else []
        for record, plan in zip(records, plans, strict=True)
    ]
    squares = [
        squared_norms(gradients) if gradients else _norms_in_chunks(record, plan)
        for record, plan, gradients in zip(records, plans, kept, strict=True)
    ]
    norms = tf.sqrt(tf.add_n(squares))
    coefficients = coefficients_of(norms)
    sums = [
        [weighted_sum(coefficients, part) for part in gradients]
        if gradients
        else rule.sum(taps, tf.repeat(coefficients, taps.group_size))
        for (_, rule, taps), gradients in zip(records, kept, strict=True)
    ]
    return sums, norms


def _norms_in_chunks(record: LayerRecord, plan: Plan) -> tf.Tensor:
    """Returns the squared norms (groups,) of a layer, ``plan.chunk`` groups at a time."""
    _, rule, taps = record

    def squares(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        chunk = dataclasses.replace(taps, inputs=tensors[0], output_gradients=tensors[1])
        return rule.squared_norms(chunk) if plan.ghost else squared_norms(rule.gradients(chunk))

    tensors = [taps.inputs, taps.output_gradients]
    return by_chunks(squares, tensors, plan.chunk * taps.group_size)


class GhostClipping:
    """Clips a functional or sequential model; raises ``NoRuleError`` if a layer lacks a rule."""

    def __init__(self, model: keras.Model) -> None:
        # A layer that is called twice has the same taps.
        inputs, outputs = unfolded(model, functools.cache(with_taps))
        self._model = model
        self._layers: list[LayerRule] = []
        befores, afters = [], []
        for node in _nodes(keras.tree.flatten(outputs)):
            if _is_entrywise(node):
                continue
            tensors = node.input_tensors or node.output_tensors
            for rule in layer_rules(node.operation, tuple(tensors[0].shape)):
                self._layers.append(rule)
                before, after = node.input_tensors[0], node.output_tensors[0]
                if rule.places is not None:
                    before, after = (node.output_tensors[place] for place in rule.places)
                befores.append(before)
                afters.append(after)
        covered = [id(variable) for rule in self._layers for variable in rule.variables]
        if len(set(covered)) < len(covered):
            raise NoRuleError("it uses trained weights in more than one place")
        # Shares the layers of the model and leaves it unchanged.
        self._taps = keras.Model(inputs, {"inputs": befores, "outputs": afters, "model": outputs})

    def sums(self, batch: Batch, clip: Clip, max_bytes: int) -> Sums:
        """Returns the clipped sum for each trainable variable, the norms and the outputs."""
        variables = self._model.trainable_variables
        with tf.GradientTape() as tape:
            # The tape does not watch a variable that was created frozen.
            tape.watch([variable.value for variable in variables])
            tapped = self._taps(batch.x, training=True)
            outputs = tapped["model"]
            # Keras computes a loss of probabilities from the logits they refer to, which would
            # bypass the tensors of this gradient; a copy has no such reference.
            objective = clip.objective(batch, tf.nest.map_structure(tf.identity, outputs))
        gradients = tape.gradient(objective, tapped["outputs"], unconnected_gradients="zero")

        coordinates = {}
        if clip.coordinates is not None:
            coordinates = dict(zip(map(id, variables), clip.coordinates, strict=True))
        records = []
        parts = (tapped["inputs"], tapped["outputs"], batch.unscaled(gradients))
        for rule, *tensors in zip(self._layers, *parts, strict=True):
            own = [coordinates[id(v)] for v in rule.variables] if coordinates else None
            taps = Taps(*rule.factors(*tensors), clip.group_size * rule.rows, own)
            records.append(LayerRecord(rule.layer.name, rule.rule, taps))

        sums, norms = clipped_sums(
            records, lambda norms: clip.coefficients(norms, batch, outputs), max_bytes
        )
        by_variable = {
            id(variable): gradient
            for rule, gradients in zip(self._layers, sums, strict=True)
            for variable, gradient in zip(rule.variables, gradients, strict=True)
        }
        unused = [v for v in variables if id(v) not in by_variable]
        by_variable |= {id(variable): tf.zeros(variable.shape) for variable in unused}
        return [by_variable[id(variable)] for variable in variables], norms, outputs


# The model as a graph of layers.

_ENTRYWISE = ("Add", "Cast", "Divide", "Maximum", "Minimum", "Multiply", "NotEqual", "Subtract")


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
    sources = [variable.value for variable in getattr(layer, "trainable_variables", ())]
    sources += [tensor for tensor in inputs if tensor.dtype.is_floating]
    with tf.GradientTape() as tape, keras.StatelessScope():
        tape.watch(sources)
        outputs = layer(*arguments, **options)
    return outputs, tape.gradient(outputs, sources)


def unfolded(
    model: keras.Model, replace: Callable[[Any], Any] = lambda layer: layer
) -> tuple[Any, Any]:
    """Returns the model's symbolic inputs and outputs in their structures, without nested models.

    If there are nested models or replaced layers, all layers are called once more, on symbolic
    tensors. ``replace`` maps a layer to one whose outputs start with the layer's.
    """
    _check_kind(model)
    structure = symbolic_inputs(model)
    outputs = model.output if len(model.outputs) > 1 else model.outputs[0]
    operations = [node.operation for node in _nodes(model.outputs)]
    if all(not isinstance(part, keras.Model) and replace(part) is part for part in operations):
        return structure, outputs
    inputs = keras.tree.map_structure(
        lambda old: keras.Input(batch_shape=old.shape, dtype=old.dtype, name=old.name), structure
    )
    replayed = _replay(model, keras.tree.flatten(inputs), replace)
    return inputs, keras.tree.pack_sequence_as(outputs, replayed)


def _is_entrywise(node: Any) -> bool:
    """Returns whether a node is arithmetic on tensors of one shape, such as ``x + y``.

    Masks of embeddings (``ids != 0``) and casts are also such nodes.
    """
    kind = type(node.operation)
    shapes = {tuple(tensor.shape) for tensor in (*node.input_tensors, *node.output_tensors)}
    return kind.__module__.startswith("keras.") and kind.__name__ in _ENTRYWISE and len(shapes) == 1


def _replay(model: keras.Model, inputs: list[Any], replace: Callable[[Any], Any]) -> list[Any]:
    _check_kind(model)
    replayed = {id(old): new for old, new in zip(model.inputs, inputs, strict=True)}
    for node in _nodes(model.outputs):
        if all(id(output) in replayed for output in node.output_tensors):
            continue
        operation = node.operation
        arguments, options = node.arguments.fill_in(replayed)
        if not isinstance(operation, keras.Model):
            outputs = replace(operation)(*arguments, **options)
        elif any(option is not None for option in options.values()):
            raise NoRuleError(f"its nested model {operation.name!r} is called with {list(options)}")
        else:
            outputs = _replay(operation, keras.tree.flatten(arguments), replace)
        # A layer with taps returns more.
        for old, new in zip(node.output_tensors, keras.tree.flatten(outputs), strict=False):
            replayed[id(old)] = new
    return [replayed[id(output)] for output in model.outputs]


def _check_kind(model: keras.Model) -> None:
    if not getattr(model, "inputs", None):
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
