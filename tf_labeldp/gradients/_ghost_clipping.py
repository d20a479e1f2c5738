"""Clipped sums of models whose layers all have rules, after one backward pass for the batch.

Book-keeping (Bu et al. 2023, "Differentially private optimization on large foundation models at
almost no cost", algorithm 1): the inputs and output gradients of the layers give the norms first
and then, scaled, the clipped sum. A layer's gradients are formed and kept for the sum where that
is cheaper than their Gram matrices (Bu et al. 2022, "Scalable and efficient training of large
convolutional neural networks with differential privacy") and where memory allows it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_labeldp.gradients._clip import (
    Batch,
    Clip,
    Sums,
    by_row,
    in_chunks,
    inner_products,
    weighted_sum,
    zero_where,
)
from tf_labeldp.gradients._label_distance import Candidates, directions
from tf_labeldp.gradients._layer_rules import (
    FLOAT_BYTES,
    LayerRule,
    NoRuleError,
    Rule,
    Seen,
    layer_rules,
)


@dataclasses.dataclass(frozen=True)
class LayerRecord:
    """The name of a layer, how its gradient follows, and what it saw in one backward pass.

    With several ``ways`` each row of inputs (B, ...) has as many neighbouring rows of output
    gradients (B * ways, ...), one for each direction that was followed back.
    """

    name: str
    rule: Rule
    seen: Seen
    ways: int = 1

    def products(self, ghost: bool) -> tf.Tensor:
        """Returns the inner products of each group's gradients, (groups, ways, ways)."""
        seen, ways = self.seen, self.ways
        if ghost and ways == 1:
            return self.rule.squared_norms(seen)[:, tf.newaxis, tf.newaxis]
        if ghost:
            return self.rule.products(seen, ways)
        if ways > 1:
            seen = dataclasses.replace(seen, inputs=tf.repeat(seen.inputs, ways, axis=0))
        return inner_products(self.rule.gradients(seen), ways)

    def sum(self, rows: tf.Tensor) -> list[tf.Tensor]:
        """Returns the sum of the gradients of all rows times ``rows`` (B * ways,).

        Zero drops even NaN.
        """
        dropped = rows == 0
        kept = zero_where(dropped, self.seen.output_gradients)
        weighted, inputs = kept * by_row(rows, kept), self.seen.inputs
        if self.ways > 1:
            weighted = tf.reduce_sum(_by_example(weighted, self.ways), axis=1)
            dropped = tf.reduce_all(tf.reshape(dropped, (-1, self.ways)), axis=1)
        inputs = zero_where(dropped, inputs)
        return self.rule.sum(
            dataclasses.replace(self.seen, inputs=inputs, output_gradients=weighted)
        )


def _by_example(values: tf.Tensor, ways: int) -> tf.Tensor:
    """Returns ``values`` (B * ways, ...) as (B, ways, ...)."""
    shape = tf.concat([[values.shape[0] // ways, ways], tf.shape(values)[1:]], 0)
    static = (values.shape[0] // ways, ways, *values.shape[1:])
    return tf.ensure_shape(tf.reshape(values, shape), static)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one layer is handled.

    Attributes:
        keep: form all gradients once, and use them for the norms and for the sum.
        ghost: norms (inner products) without gradients.
        chunk: groups whose norms are computed at a time.
    """

    keep: bool
    ghost: bool
    chunk: int


def make_plans(records: Sequence[LayerRecord], max_bytes: int, ways: int = 1) -> list[Plan]:
    """Decides for each layer, so that all that is kept and worked on fits into ``max_bytes``.

    The records are those of one way; there are so many of the same shapes.
    """
    plans: dict[int, Plan] = {}
    wanted: list[tuple[int, int]] = []
    work: dict[int, tuple[bool, int]] = {}
    for place, record in enumerate(records):
        copies = 1 if record.seen.coordinates is None else 3  # before, after and in between
        formed = FLOAT_BYTES * record.rule.num_weights * ways * copies
        ghost = record.rule.norm_bytes(record.seen)
        if ways > 1:
            ghost = record.rule.product_bytes(record.seen, ways)
        if ghost is not None and ghost < formed:
            work[place] = (True, ghost)
        else:
            work[place] = (False, formed)
            wanted.append((formed * record.seen.groups, place))
        if work[place][1] > max_bytes:
            raise ValueError(
                f"max_bytes={max_bytes} is too small for layer {record.name!r}: the norm of one "
                f"gradient needs {work[place][1]} bytes. Raise max_bytes to at least that."
            )
    left = max_bytes
    for needed, place in sorted(wanted):
        # What is kept leaves room for one group of any layer that is worked on in chunks.
        reserve = max((size for other, (_, size) in work.items() if other != place), default=0)
        if needed + reserve <= left:
            left -= needed
            plans[place] = Plan(keep=True, ghost=False, chunk=0)
    for place, (ghost_norm, size) in work.items():
        if place not in plans:
            plans[place] = Plan(keep=False, ghost=ghost_norm, chunk=max(1, left // size))
    return [plans[place] for place in range(len(records))]


def clipped_sums(
    records: Sequence[LayerRecord], clip: Clip, max_bytes: int
) -> tuple[list[list[tf.Tensor]], tf.Tensor]:
    """Returns each layer's sum of clipped group gradients, and the norms (B / group_size,) before.

    A group whose norm is not finite adds exactly zero.
    """
    plans = make_plans(records, max_bytes)
    kept = [
        record.rule.gradients(record.seen) if plan.keep else []
        for record, plan in zip(records, plans, strict=True)
    ]

    def clipped(products: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        norms = tf.sqrt(products[:, 0, 0])
        return clip.coefficients(norms), norms

    return _combined(records, plans, kept, clipped)


def _combined(
    records: Sequence[LayerRecord],
    plans: Sequence[Plan],
    kept: Sequence[list[tf.Tensor]],
    choose: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]],
) -> tuple[list[list[tf.Tensor]], tf.Tensor]:
    """Returns each layer's sum of gradients times what ``choose`` makes of their products.

    It returns a coefficient for each gradient, group by group, and the norms to report.
    """
    products = tf.add_n(
        [
            inner_products(formed, record.ways) if formed else _products_in_chunks(record, plan)
            for record, plan, formed in zip(records, plans, kept, strict=True)
        ]
    )
    coefficients, norms = choose(products)
    sums = [
        [weighted_sum(coefficients, part) for part in formed]
        if formed
        else record.sum(tf.repeat(coefficients, record.seen.group_size))
        for record, formed in zip(records, kept, strict=True)
    ]
    return sums, norms


def _products_in_chunks(record: LayerRecord, plan: Plan) -> tf.Tensor:
    """Returns the inner products (N, ways, ways) of a layer, ``plan.chunk`` groups at a time."""
    seen, ways = record.seen, record.ways
    gradients = seen.output_gradients if ways == 1 else _by_example(seen.output_gradients, ways)

    def products(inputs: tf.Tensor, gradients: tf.Tensor) -> tf.Tensor:
        if ways > 1:
            gradients = tf.reshape(gradients, tf.concat([[-1], tf.shape(gradients)[2:]], 0))
            gradients = tf.ensure_shape(
                gradients, (inputs.shape[0] * ways, *seen.output_gradients.shape[1:])
            )
        chunk = dataclasses.replace(seen, inputs=inputs, output_gradients=gradients)
        return dataclasses.replace(record, seen=chunk).products(plan.ghost)

    rows, shape = plan.chunk * seen.group_size, (ways, ways)
    return map_chunks(products, (seen.inputs, gradients), rows, plan.chunk, shape)


def map_chunks(
    function: Callable[..., tf.Tensor],
    tensors: Sequence[tf.Tensor],
    rows: int,
    results: int,
    shape: tuple[int, ...] = (),
) -> tf.Tensor:
    """Applies ``function`` to ``rows`` rows at a time, one chunk after the other.

    It returns (``results``, *``shape``) for each chunk.
    """
    batch = tensors[0].shape[0]
    if rows >= batch:
        return function(*tensors)
    mapped = tf.map_fn(
        lambda chunk: function(*chunk),
        [in_chunks(tensor, rows) for tensor in tensors],
        fn_output_signature=tf.TensorSpec((results, *shape), tf.float32),
        parallel_iterations=1,  # in parallel, the chunks would need the memory of all
    )
    return tf.reshape(mapped, (-1, *shape))[: batch * results // rows]


class GhostClipping:
    """Clips a functional or sequential model of layers that all have rules.

    Raises:
        NoRuleError: a layer, or the way in which the model uses it, has no rule.
    """

    def __init__(self, model: keras.Model) -> None:
        inputs, output = unfolded(model)
        self._model = model
        self._layers: list[LayerRule] = []
        befores, afters = [], []
        for node in _nodes([output]):
            if _is_entrywise(node):
                continue
            tensors = node.input_tensors or node.output_tensors
            for rule in layer_rules(node.operation, tuple(tensors[0].shape)):
                self._layers.append(rule)
                befores.append(node.input_tensors[0])
                afters.append(node.output_tensors[0])
        claimed = [id(variable) for rule in self._layers for variable in rule.variables]
        if len(set(claimed)) < len(claimed):
            raise NoRuleError("it uses trained weights in more than one place")
        # Shares the layers of the model, which itself stays as it is.
        self._taps = keras.Model(inputs, {"inputs": befores, "outputs": afters, "model": output})

    def sums(self, batch: Batch, clip: Clip, max_bytes: int) -> Sums:
        """Returns the clipped sum for the trainable variables, the norms and the outputs."""
        variables = self._model.trainable_variables
        by_distance = clip.clipping == "label_distance"
        with tf.GradientTape(persistent=by_distance) as tape:
            # A variable that was created frozen is not watched by itself.
            tape.watch([variable.value for variable in variables])
            tapped = self._taps(batch.x, training=True)
            # Of probabilities that know their logits Keras takes the loss from these, past the
            # tensors that are differentiated by here; a copy does not know them.
            outputs = tf.nest.map_structure(tf.identity, tapped["model"])
            total = None if by_distance else batch.total_loss(outputs)

        coordinates = {}
        if clip.coordinates is not None:
            coordinates = dict(zip(map(id, variables), clip.coordinates, strict=True))

        def back(way: tf.Tensor | None = None) -> list[LayerRecord]:
            target = total if way is None else tapped["model"]
            gradients = tape.gradient(target, tapped["outputs"], way, unconnected_gradients="zero")
            parts = (tapped["inputs"], tapped["outputs"], batch.unscaled(gradients))
            records = []
            for rule, *tensors in zip(self._layers, *parts, strict=True):
                own = [coordinates[id(v)] for v in rule.variables] if coordinates else None
                seen = Seen(*rule.factors(*tensors), clip.group_size, own)
                records.append(LayerRecord(rule.layer.name, rule.rule, seen))
            return records

        if by_distance:
            sums, norms = _sums_by_distance(back, tapped["model"], batch, clip, max_bytes)
        else:
            sums, norms = clipped_sums(back(), clip, max_bytes)
        found = {
            id(variable): gradient
            for rule, gradients in zip(self._layers, sums, strict=True)
            for variable, gradient in zip(rule.variables, gradients, strict=True)
        }
        gradients = [
            found[id(variable)] if id(variable) in found else tf.zeros(variable.shape)
            for variable in variables
        ]
        return gradients, norms, tapped["model"]


def _sums_by_distance(
    back: Callable[[tf.Tensor], list[LayerRecord]],
    logits: tf.Tensor,
    batch: Batch,
    clip: Clip,
    max_bytes: int,
) -> tuple[list[list[tf.Tensor]], tf.Tensor]:
    """Returns what ``clipped_sums`` does, of gradients whose distance is clipped.

    ``back`` follows one direction (B, L) back from the logits.
    """
    candidates = Candidates.of(logits, batch)
    given = directions(logits) * batch.loss_scale
    given = tf.cast(tf.transpose(given, (1, 0, 2)), logits.dtype)
    records, ways = back(given[0]), candidates.ways
    plans = make_plans(records, max_bytes, ways)

    def parts(records: list[LayerRecord]) -> list[list[tf.Tensor]]:
        return [
            record.rule.gradients(record.seen) if plan.keep else [record.seen.output_gradients]
            for record, plan in zip(records, plans, strict=True)
        ]

    found = parts(records)
    if ways > 1:
        like = tf.nest.map_structure(lambda part: tf.TensorSpec(part.shape, part.dtype), found)
        # One after the other: unrolled, the graph would grow with the classes.
        stacked = tf.map_fn(lambda way: parts(back(way)), given, fn_output_signature=like)
        found = tf.nest.map_structure(_side_by_side, stacked)
        records = [
            LayerRecord(
                record.name,
                record.rule,
                dataclasses.replace(record.seen, output_gradients=part[0]),  # unused if kept
                ways,
            )
            for record, part in zip(records, found, strict=True)
        ]

    def clipped(products: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        mixed, norms = candidates.coefficients(products, clip.l2_norm_clip)
        return tf.reshape(mixed, (-1,)), norms

    kept = [part if plan.keep else [] for plan, part in zip(plans, found, strict=True)]
    return _combined(records, plans, kept, clipped)


def _side_by_side(stacked: tf.Tensor) -> tf.Tensor:
    """Returns ``stacked`` (ways, B, ...) as (B * ways, ...)."""
    axes = (1, 0, *range(2, stacked.shape.rank))
    shape = tf.concat([[-1], tf.shape(stacked)[2:]], 0)
    rows = tf.reshape(tf.transpose(stacked, axes), shape)
    return tf.ensure_shape(rows, (stacked.shape[0] * stacked.shape[1], *stacked.shape[2:]))


# The model as a graph of layers.

_ENTRYWISE = ("Add", "Cast", "Divide", "Maximum", "Minimum", "Multiply", "NotEqual", "Subtract")


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


def layer_not_compiled(model: keras.Model) -> str | None:
    """Returns which layer XLA can't compile, by itself and on zeros; None if that can't be told."""
    try:
        _, output = unfolded(model)
    except NoRuleError:
        return None
    for node in _nodes([output]):
        if not node.input_tensors:
            continue
        zeros = [
            tf.zeros([2 if size is None else size for size in one.shape], one.dtype)
            for one in node.input_tensors
        ]
        try:
            tf.function(_forward_and_backward, jit_compile=True, autograph=False)(node, zeros)
        except tf.errors.OpError:
            return f"layer {node.operation.name!r} ({type(node.operation).__name__})"
    return None


def _forward_and_backward(node: Any, inputs: list[tf.Tensor]) -> Any:
    known = {id(old): new for old, new in zip(node.input_tensors, inputs, strict=True)}
    arguments, options = node.arguments.fill_in(known)
    layer = node.operation
    sources = [variable.value for variable in getattr(layer, "trainable_variables", ())]
    sources += [one for one in inputs if one.dtype.is_floating]
    with tf.GradientTape() as tape, keras.StatelessScope():
        tape.watch(sources)
        outputs = layer(*arguments, **options)
    return outputs, tape.gradient(outputs, sources)


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
