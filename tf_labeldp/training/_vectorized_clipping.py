"""Clipped sums for any model: each example goes through the model as a batch of one."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.gradients._ghost_clipping import clip_coefficients, weighted_sum
from tf_labeldp.training._cross_example_layers import added_loss, parts_of
from tf_labeldp.training._per_example_loss import checked_losses

_Sums = tuple[list[tf.Tensor], tf.Tensor, Any]
_ONE_BY_ONE = (
    "the examples of model {name!r} are worked on one after the other, which is slow: vectorized, "
    "its matrix products run into a bug of TensorFlow's oneDNN kernels "
    "(https://github.com/tensorflow/tensorflow/issues/117700). Set the environment variable "
    "TF_ENABLE_ONEDNN_OPTS=0 before TensorFlow is imported to avoid that."
)


def vectorized_sums(
    model: keras.Model,
    x: Any,
    y: Any,
    weights: tf.Tensor,
    loss: Callable[[Any, Any], tf.Tensor],
    clip: tf.Tensor,
    group_size: int,
    scale: float,
    max_bytes: int,
    scales: list[tf.Tensor] | None = None,
) -> _Sums:
    """Returns the clipped sum, the norms (B / group_size,) and the outputs of a batch.

    See ``PerExampleClipping.clipped_sum``. ``scale`` is multiplied onto the losses and divided out
    of the gradients. Examples are worked on as many at a time as ``max_bytes`` allows; each has
    random numbers (dropout) of its own.
    """
    values = [tf.convert_to_tensor(variable.value) for variable in model.trainable_variables]
    states = [generator.state for generator in parts_of(model, keras.random.SeedGenerator)]
    batch = weights.shape[0]

    def example(row: Any) -> tuple[list[tf.Tensor], Any]:
        return _example_gradients(model, values, states, loss, scale, row)

    rows = (x, y, weights, _row_seeds(states, batch))
    trace = _Trace.of(example, rows)
    if trace.one_by_one:
        _validate.warn(_ONE_BY_ONE.format(name=model.name))

    def clipped(rows: Any) -> _Sums:
        gradients, outputs = trace.map_rows(example, rows)
        groups = rows[2].shape[0] // group_size
        grouped = [
            tf.reduce_sum(tf.reshape(g, (groups, group_size, *g.shape[1:])), axis=1)
            for g in gradients
        ]
        if scales is not None:
            grouped = [g * factor for g, factor in zip(grouped, scales, strict=True)]
        norms = tf.sqrt(
            tf.add_n([tf.reduce_sum(tf.square(tf.reshape(g, (groups, -1))), 1) for g in grouped])
        )
        coefficients = clip_coefficients(norms, clip)
        return [weighted_sum(coefficients, g) for g in grouped], norms, outputs

    needed = group_size * trace.num_bytes
    if needed > max_bytes:
        raise ValueError(
            f"max_bytes={max_bytes} is too small: one gradient of model {model.name!r} needs about "
            f"{needed} bytes. Raise max_bytes to at least that."
        )
    chunk = group_size * (max_bytes // needed)
    if chunk >= batch:
        return clipped(rows)
    return _in_chunks(clipped, rows, values, chunk, group_size)


def _example_gradients(
    model: keras.Model,
    values: list[tf.Tensor],
    states: list[Any],
    loss: Callable[[Any, Any], tf.Tensor],
    scale: float,
    row: Any,
) -> tuple[list[tf.Tensor], Any]:
    """Returns the weighted gradient of one example by each weight, and the model's output."""
    x, y = tf.nest.map_structure(lambda part: part[tf.newaxis], row[:2])
    weight, seeds = row[2][tf.newaxis], row[3]
    mapping = [*zip(model.trainable_variables, values, strict=True)]
    mapping += [*zip(states, seeds, strict=True)]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(values)
        # Nothing that the model would write to its own variables gets out of this scope.
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
            outputs = model(x, training=True)
        losses = checked_losses(loss(y, outputs), weight)
        total = tf.reduce_sum(tf.cast(losses, tf.float32) * weight) * scale
    if scope.losses:
        raise added_loss(model)
    seeded = {id(state) for state in states}
    written = [
        variable.path
        for variable in model.non_trainable_variables
        if id(variable) not in seeded and scope.get_current_value(variable) is not None
    ]
    if written:
        raise ValueError(
            f"model {model.name!r} updates state of its own while training: {written}. Such state "
            "carries examples into the steps of others. Freeze these layers or leave them out "
            "(a stateful RNN: stateful=False)."
        )
    gradients = tape.gradient(total, values, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    gradients = [tf.cast(tf.convert_to_tensor(g), tf.float32) / scale for g in gradients]
    return gradients, tf.nest.map_structure(lambda output: output[0], outputs)


def _row_seeds(states: list[Any], batch: int) -> list[tf.Tensor]:
    """Returns states of the random generators (B, 2) for each example, and moves them on."""
    seeds = []
    for state in states:
        value = tf.convert_to_tensor(state.value)
        seeds.append(
            tf.random.stateless_uniform(
                (batch, 2), tf.cast(value, tf.int32), None, None, dtype=value.dtype
            )
        )
        state.assign(value + tf.constant([0, 1], value.dtype))
    return seeds


@dataclasses.dataclass(frozen=True)
class _Trace:
    """What the graph of one example says.

    Attributes:
        num_bytes: of all tensors of the forward and backward pass: more than is ever held at
            once, and less where a loop runs inside (an RNN).
        one_by_one: whether a bug of TensorFlow forbids to vectorize it.
        signature: of the results.
    """

    num_bytes: int
    one_by_one: bool
    signature: Any

    @classmethod
    def of(cls, example: Callable[[Any], Any], rows: Any) -> _Trace:
        specs = tf.nest.map_structure(lambda part: tf.TensorSpec(part.shape[1:], part.dtype), rows)
        graph = tf.function(example, autograph=False).get_concrete_function(specs).graph
        num_bytes = 1
        of_example = {tensor.name for tensor in graph.inputs} - {
            inner.name for _, inner in graph.captures
        }
        broadcasts = False
        for operation in graph.get_operations():
            parts = [tensor.name in of_example for tensor in operation.inputs]
            if any(parts):
                of_example |= {tensor.name for tensor in operation.outputs}
                # One factor with a leading axis that the other has not, once both are stacked.
                if operation.type.startswith("BatchMatMul"):
                    left, right = (tensor.shape[:-2] for tensor in operation.inputs)
                    broadcasts |= not all(parts) or left != right
            if operation.type not in ("Placeholder", "ReadVariableOp", "Const"):
                num_bytes += sum(
                    math.prod(tensor.shape) * tensor.dtype.size
                    for tensor in operation.outputs
                    if tensor.shape.is_fully_defined()
                )
        return cls(num_bytes, broadcasts and _has_broadcast_bug(), graph.structured_outputs)

    def map_rows(self, example: Callable[[Any], Any], rows: Any) -> Any:
        """Returns the results of all rows, stacked."""
        if not self.one_by_one:
            return tf.vectorized_map(example, rows, warn=False)
        signature = tf.nest.map_structure(
            lambda result: tf.TensorSpec(result.shape, result.dtype), self.signature
        )
        return tf.map_fn(example, rows, fn_output_signature=signature)


def _has_broadcast_bug() -> bool:
    """Returns whether matrix products that broadcast over a batch of one corrupt memory.

    They do in oneDNN's kernels of TensorFlow 2.16 to 2.21, on CPUs
    (https://github.com/tensorflow/tensorflow/issues/117700).
    """
    return os.environ.get("TF_ENABLE_ONEDNN_OPTS") != "0" and not tf.config.list_physical_devices(
        "GPU"
    )


def _in_chunks(
    clipped: Callable[[Any], _Sums], rows: Any, values: list[tf.Tensor], chunk: int, group_size: int
) -> _Sums:
    """Adds up ``clipped`` over chunks of rows, one after the other; zeros fill the last chunk."""
    batch = rows[2].shape[0]
    num_chunks = -(-batch // chunk)

    def split(part: tf.Tensor) -> tf.Tensor:
        padding = [(0, num_chunks * chunk - batch), *[(0, 0)] * (part.shape.rank - 1)]
        return tf.reshape(tf.pad(part, padding), (num_chunks, chunk, *part.shape[1:]))

    chunks = tf.nest.map_structure(split, rows)
    first = tf.nest.map_structure(lambda part: part[0], chunks)
    sums, norms, outputs = clipped(first)
    flat = [norms, *tf.nest.flatten(outputs)]
    arrays = [
        tf.TensorArray(part.dtype, num_chunks, element_shape=part.shape).write(0, part)
        for part in flat
    ]

    def step(number: tf.Tensor, sums: Any, arrays: Any) -> Any:
        more, norms, outputs = clipped(tf.nest.map_structure(lambda part: part[number], chunks))
        sums = [total + part for total, part in zip(sums, more, strict=True)]
        parts = [norms, *tf.nest.flatten(outputs)]
        arrays = [array.write(number, part) for array, part in zip(arrays, parts, strict=True)]
        return number + 1, sums, arrays

    _, sums, arrays = tf.while_loop(
        lambda number, sums, arrays: number < num_chunks,
        step,
        (tf.constant(1), sums, arrays),
        parallel_iterations=1,
    )
    norms, *parts = [array.concat() for array in arrays]
    outputs = tf.nest.pack_sequence_as(outputs, [part[:batch] for part in parts])
    return sums, norms[: batch // group_size], outputs
