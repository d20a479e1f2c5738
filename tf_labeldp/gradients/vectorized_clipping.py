"""Clipped sums for any model: each example passes through it alone, many in parallel."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.gradients.clip import (
    Batch,
    Clip,
    Sums,
    in_chunks,
    in_coordinates,
    squared_norms,
    weighted_sum,
)
from tf_labeldp.gradients.masks import masks_by_place, with_masks
from tf_labeldp.gradients.model_checks import InspectedModel

ONE_BY_ONE = "the examples of {name} are processed one by one, which is slow: "
_BROADCASTS = (
    "vectorized matrix products hit a bug in TensorFlow's oneDNN kernels "
    "(https://github.com/tensorflow/tensorflow/issues/117700). To avoid it, set the environment "
    "variable TF_ENABLE_ONEDNN_OPTS=0 before TensorFlow is imported."
)
_NO_KERNELS = (
    "TensorFlow lacks kernels on this CPU for vectorized gradients of grouped or channels-first "
    "convolutions. method='ghost' has rules for them; its error names the layer without one."
)
_LOOPS = (
    "TensorFlow cannot vectorize the gradient of a loop's inputs. method='ghost' has rules for "
    "Keras's recurrent cells; for others, set unroll=True."
)


class VectorizedClipping:
    """Clips any built model; each example has its own pass, so no layer can mix examples."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model

    def sums(self, batch: Batch, clip: Clip, max_bytes: int) -> Sums:
        """Returns the clipped sum, the norms and the outputs, in chunks that fit the memory."""
        model, group_size, num_rows = self._model, clip.group_size, batch.weights.shape[0]
        values = [tf.convert_to_tensor(variable.value) for variable in model.trainable_variables]
        states = InspectedModel(model).seed_states

        def example(row: Any) -> tuple[list[tf.Tensor], Any, dict[str, Any]]:
            return self._example(batch, clip, row, values, states)

        # Each example has its own random numbers, as for dropout.
        rows = (batch.x, batch.y, batch.weights, row_seeds(states, num_rows))
        trace = Trace.of(example, rows)
        if trace.one_by_one:
            _validate.warn(ONE_BY_ONE.format(name=f"model {model.name!r}") + trace.one_by_one)

        def clipped(rows: Any) -> Sums:
            gradients, *outputs = trace.map_rows(example, rows)
            groups = rows[2].shape[0] // group_size
            grouped = [
                tf.reduce_sum(tf.reshape(g, (groups, group_size, *g.shape[1:])), axis=1)
                for g in gradients
            ]
            grouped = in_coordinates(clip.coordinates, grouped)
            norms = tf.sqrt(squared_norms(grouped))
            chunk = dataclasses.replace(batch, x=rows[0], y=rows[1], weights=rows[2])
            coefficients = clip.coefficients(norms, chunk, outputs[0])
            return [weighted_sum(coefficients, g) for g in grouped], norms, outputs

        needed = group_size * trace.num_bytes
        if needed > max_bytes:
            raise ValueError(
                f"max_bytes={max_bytes} is too small: one gradient of model {model.name!r} needs "
                f"about {needed} bytes. Raise max_bytes to at least that."
            )
        chunk = group_size * (max_bytes // needed)
        if chunk >= num_rows:
            sums, norms, outputs = clipped(rows)
        else:
            sums, norms, outputs = _sums_in_chunks(clipped, rows, chunk, group_size)
        return sums, norms, with_masks(*outputs)

    def _example(
        self, batch: Batch, clip: Clip, row: Any, values: list[tf.Tensor], states: list[Any]
    ) -> tuple[list[tf.Tensor], Any, dict[str, Any]]:
        """Returns the gradient of one example's objective for each weight, output and masks."""
        model = self._model
        x, y, weight = tf.nest.map_structure(lambda part: part[tf.newaxis], row[:3])
        single = dataclasses.replace(batch, x=x, y=y, weights=weight)
        mapping = [*zip(model.trainable_variables, values, strict=True)]
        mapping += [*zip(states, row[3], strict=True)]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(values)
            # The model's writes to its variables stay in this scope.
            with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
                outputs = model(x, training=True)
            objective = clip.objective(single, outputs)
        check_scope(model, states, scope)
        gradients = tape.gradient(objective, values, unconnected_gradients="zero")
        parts = tf.nest.map_structure(lambda part: part[0], (outputs, masks_by_place(outputs)))
        return batch.unscaled(gradients), *parts


def check_scope(model: keras.Model, states: list[Any], scope: keras.StatelessScope) -> None:
    """Raises a ``ValueError`` if a pass added losses or wrote variables other than ``states``."""
    if scope.losses:
        raise InspectedModel(model).added_loss()
    seeded = {id(state) for state in states}
    written = [
        variable.path
        for variable in model.non_trainable_variables
        if id(variable) not in seeded and scope.get_current_value(variable) is not None
    ]
    if written:
        raise ValueError(
            f"model {model.name!r} updates its own state in training: {written}. Such state "
            "carries examples into later steps. Freeze these layers or leave them out (for a "
            "stateful RNN: stateful=False)."
        )


def row_seeds(states: list[Any], batch: int) -> list[tf.Tensor]:
    """Returns a state (B, 2) of each random generator per example, and advances the generators."""
    seeds = []
    for state in states:
        value = tf.convert_to_tensor(state.value)
        seed = tf.cast(value, tf.int32)
        seeds.append(tf.random.stateless_uniform((batch, 2), seed, None, None, dtype=value.dtype))
        state.assign(value + tf.constant([0, 1], value.dtype))
    return seeds


@dataclasses.dataclass(frozen=True)
class Trace:
    """The properties of one example's graph."""

    # The size of all tensors in the forward and backward pass: more than memory holds at once, and
    # less if the model has a loop (an RNN).
    num_bytes: int
    # The reason why TensorFlow cannot vectorize the graph; empty if it can.
    one_by_one: str
    # The structure of the results.
    signature: Any

    @classmethod
    def of(cls, example: Callable[[Any], Any], rows: Any) -> Trace:
        """Traces a function of one row."""
        specs = tf.nest.map_structure(lambda part: tf.TensorSpec(part.shape[1:], part.dtype), rows)
        graph = tf.function(example, autograph=False).get_concrete_function(specs).graph
        num_bytes = 1 + sum(map(_bytes_of_results, graph.get_operations()))
        return cls(num_bytes, _why_one_by_one(graph), graph.structured_outputs)

    def map_rows(self, example: Callable[[Any], Any], rows: Any) -> Any:
        """Returns the results of all rows, stacked."""
        if not self.one_by_one:
            return tf.vectorized_map(example, rows, warn=False)
        signature = tf.nest.map_structure(
            lambda result: tf.TensorSpec(result.shape, result.dtype), self.signature
        )
        return tf.map_fn(example, rows, fn_output_signature=signature)


def _bytes_of_results(operation: Any) -> int:
    if operation.type in ("Placeholder", "ReadVariableOp", "Const"):
        return 0
    results = [tensor for tensor in operation.outputs if tensor.shape.is_fully_defined()]
    return sum(math.prod(tensor.shape) * tensor.dtype.size for tensor in results)


def _why_one_by_one(graph: Any) -> str:
    """Returns the reason why TensorFlow cannot vectorize an example's graph; empty if it can."""
    operations = graph.get_operations()
    if _has_broadcast_bug() and _broadcasts_products(graph):
        return _BROADCASTS
    if any(map(_lacks_kernels, operations)):
        return _NO_KERNELS
    # The gradient of a list of tensors, which a loop over time takes.
    zeros = [operation for operation in operations if operation.type == "ZerosLike"]
    return _LOOPS if any(zero.outputs[0].dtype == tf.variant for zero in zeros) else ""


def _broadcasts_products(graph: Any) -> bool:
    """Returns whether a batch of matrix products has an axis that only one factor has.

    A product of one example's values and the weights is such, once examples are stacked.
    """
    of_example = {tensor.name for tensor in graph.inputs} - {
        inner.name for _, inner in graph.captures
    }
    for operation in graph.get_operations():
        parts = [tensor.name in of_example for tensor in operation.inputs]
        if not any(parts):
            continue
        of_example |= {tensor.name for tensor in operation.outputs}
        if operation.type.startswith("BatchMatMul"):
            left, right = (tensor.shape[:-2] for tensor in operation.inputs)
            if not all(parts) or left != right:
                return True
    return False


def _lacks_kernels(operation: Any) -> bool:
    """Returns whether a call is compiled by XLA, in one example alone, for lack of a kernel.

    Keras lets XLA compile convolutions without kernels; vectorization does not.
    """
    if operation.type not in ("PartitionedCall", "StatefulPartitionedCall") or _on_gpu():
        return False
    if not operation.node_def.attr["_XlaMustCompile"].b:
        return False
    has_volumes = any(tensor.shape.rank == 5 for tensor in operation.inputs)
    return has_volumes or not _has_grouped_kernels()


def _has_broadcast_bug() -> bool:
    """Returns whether matrix products that broadcast over a batch of one corrupt memory.

    oneDNN's CPU kernels in TensorFlow 2.16 to 2.21 have this bug
    (https://github.com/tensorflow/tensorflow/issues/117700).
    """
    return os.environ.get("TF_ENABLE_ONEDNN_OPTS") != "0" and not _on_gpu()


def _on_gpu() -> bool:
    return bool(tf.config.list_physical_devices("GPU"))


@functools.cache
def _has_grouped_kernels() -> bool:
    """Returns whether this CPU has kernels for gradients of grouped convolutions.

    Only oneDNN has them, and TensorFlow enables oneDNN by the CPU's model, so this tries one.
    """
    with tf.init_scope(), tf.device("CPU"):
        try:
            tf.raw_ops.Conv2DBackpropFilter(
                input=tf.zeros((1, 1, 1, 2)),
                filter_sizes=(1, 1, 1, 2),
                out_backprop=tf.zeros((1, 1, 1, 2)),
                strides=[1, 1, 1, 1],
                padding="VALID",
            )
        except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError):
            return False
    return True


def _sums_in_chunks(clipped: Callable[[Any], Sums], rows: Any, chunk: int, group_size: int) -> Sums:
    """Adds up ``clipped`` over chunks of rows in sequence; zeros fill the last chunk."""
    batch = rows[2].shape[0]
    num_chunks = -(-batch // chunk)
    chunks = tf.nest.map_structure(lambda part: in_chunks(part, chunk), rows)
    sums, *first = clipped(tf.nest.map_structure(lambda part: part[0], chunks))
    arrays = [
        tf.TensorArray(part.dtype, num_chunks, element_shape=part.shape).write(0, part)
        for part in tf.nest.flatten(first)
    ]

    def step(number: tf.Tensor, sums: Any, arrays: Any) -> Any:
        more, *rest = clipped(tf.nest.map_structure(lambda part: part[number], chunks))
        sums = [total + part for total, part in zip(sums, more, strict=True)]
        parts = tf.nest.flatten(rest)
        arrays = [array.write(number, part) for array, part in zip(arrays, parts, strict=True)]
        return number + 1, sums, arrays

    _, sums, arrays = tf.while_loop(
        lambda number, sums, arrays: number < num_chunks,
        step,
        (tf.constant(1), sums, arrays),
        parallel_iterations=1,
    )
    norms, outputs = tf.nest.pack_sequence_as(first, [array.concat() for array in arrays])
    whole = tf.nest.map_structure(lambda part: part[:batch], outputs)
    return sums, norms[: batch // group_size], whole
