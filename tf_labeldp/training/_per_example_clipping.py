"""Sums of per-example gradients, each clipped to a norm, for any Keras model."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.gradients._ghost_clipping import clip_coefficients, weighted_sum
from tf_labeldp.training._ghost_layers import (
    Batch,
    Clip,
    GhostModel,
    NoRuleError,
    ghost_model,
    ghost_sums,
    layer_outputs,
)
from tf_labeldp.training._model_checks import (
    added_loss,
    all_layers,
    check_layers,
    checked_losses,
    parts_of,
)

METHODS = ("auto", "ghost", "vectorized")
_FLOAT16_LOSS_SCALE = 256.0  # entries from 2e-10 to 255 survive; above, the example adds zero


class ClippedSum(NamedTuple):
    """What one batch gives; see ``PerExampleClipping.clipped_sum``.

    Attributes:
        gradients: the sum of the clipped gradients, ``float32``, one tensor for each of
            ``model.trainable_variables``, in their order.
        norms: L2 norms of the groups' gradients before clipping, ``float32`` (B / group_size,).
            They depend on labels: not to be released.
        outputs: the model's outputs (B, ...), in training mode.
        finite: whether the output of each layer is finite: scalar booleans by the layers' names.
            Computed from features and weights alone. The layers are only looked at, by another
            pass without dropout, when the model's outputs are not all finite.
    """

    gradients: list[tf.Tensor]
    norms: tf.Tensor
    outputs: tf.Tensor
    finite: dict[str, tf.Tensor]


class PerExampleClipping:
    """Computes the sum over examples of gradients clipped to an L2 norm.

    Two methods give the same result. "ghost" needs one backward pass for the whole batch and forms
    per-example gradients layer by layer only where that is cheapest; it knows functional and
    sequential models of common layers (Dense, Conv1D to 3D, depthwise convolutions, Embedding,
    LayerNormalization, GroupNormalization and what has no weights). "vectorized" sends each
    example through the model alone, so that no layer can mix examples, and works for any model.

    Guarantee:
        Replacing one example, features or label, moves the sum by at most ``2 * l2_norm_clip`` in
        L2 norm, whatever the model, the loss and the weights are: every group adds at most
        ``l2_norm_clip``.
        A group whose gradient is not finite adds exactly zero.
        No layer mixes examples: each group's contribution depends on its own rows alone.
        All this is up to the rounding of ``float32``; on GPUs that round the factors of products
        to TensorFloat-32, turn that off:
        ``tf.config.experimental.enable_tensor_float_32_execution(False)``.

    Args:
        model: a built Keras model.
        method: "auto" takes "ghost" where the model allows it.
        max_bytes: memory for per-example gradients and the like, beyond that of an ordinary
            training step; batches that need more are worked on in pieces.

    Raises:
        ValueError: a layer mixes examples or adds losses, nothing is trainable, ``method`` is
            unknown or cannot handle the model.

    Sources: Abadi et al. 2016, "Deep learning with differential privacy", algorithm 1; Bu et al.
    2023, "Differentially private optimization on large foundation models at almost no cost",
    algorithm 1.

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
        >>> x, y = np.array([[3.0, 4.0], [0.0, 0.1]], "float32"), np.zeros((2, 1), "float32")
        >>> loss = lambda y_true, y_pred: keras.ops.sum(y_pred, axis=1)
        >>> result = PerExampleClipping(model).clipped_sum(x, y, np.ones(2), loss, 1.0)
        >>> print(result.norms.numpy().round(3), result.gradients[0].numpy().ravel().round(3))
        [5.  0.1] [0.6 0.9]
    """

    def __init__(self, model: keras.Model, *, method: str = "auto", max_bytes: int = 2**30) -> None:
        self._model = model
        self._method = _validate.one_of("method", method, METHODS)
        self._max_bytes = _validate.integer_at_least("max_bytes", max_bytes, 1)
        self._plan_key: tuple[Any, ...] | None = None
        self._ghost: GhostModel | None = None
        self._probe: keras.Model | None = None
        check_layers(model)

    @property
    def method(self) -> str:
        """The method in use for the model as it is now: "ghost" or "vectorized"."""
        self._prepare()
        return "vectorized" if self._ghost is None else "ghost"

    @tf.autograph.experimental.do_not_convert
    def clipped_sum(
        self,
        x: Any,
        y: Any,
        weights: Any,
        loss: Callable[[Any, Any], tf.Tensor],
        l2_norm_clip: Any,
        group_size: int = 1,
        scales: list[tf.Tensor] | None = None,
    ) -> ClippedSum:
        """Returns the sum of the clipped gradients of a batch, and what else the pass gives.

        Args:
            x: features: a tensor (B, ...), or a list or dictionary of them.
            y: labels (B, ...), or a structure of them; whatever ``loss`` takes.
            weights: (B,), multiplied onto the losses before clipping; zero for padding.
            loss: ``(y_true, y_pred) -> (B,)``.
            l2_norm_clip: the bound C, a number or a scalar tensor.
            group_size: contiguous rows that are clipped as one: the gradient of a group is that
                of its weighted losses' sum, divided by its number of rows with weight (or 1).
            scales: positive factors on the gradients, like ``model.trainable_variables``, which
                are multiplied on before norms are taken: clipped sums and norms are those of the
                scaled gradients. Must not depend on labels. None for ones.

        Raises:
            ValueError: B is not fixed or not a multiple of ``group_size``, ``loss`` is not per
                example, not even one group fits into ``max_bytes``, or the model updates state
                of its own (other than random seeds) while training.
        """
        _validate.integer_at_least("group_size", group_size, 1)
        if not tf.is_tensor(l2_norm_clip):
            l2_norm_clip = _validate.positive_finite("l2_norm_clip", l2_norm_clip)
        clip = Clip(tf.cast(l2_norm_clip, tf.float32), group_size, scales)
        x, y = tf.nest.map_structure(tf.convert_to_tensor, (x, y))
        weights = tf.cast(tf.convert_to_tensor(weights), tf.float32)
        x, y, weights = _checked_batch(x, y, weights, group_size)
        weights = _group_means(weights, group_size)
        self._prepare()
        scale = 1.0
        if any(layer.compute_dtype == "float16" for layer in all_layers(self._model)):
            scale = _FLOAT16_LOSS_SCALE
        batch = Batch(x, y, weights, loss, scale)
        if self._ghost is None:
            gradients, norms, outputs = vectorized_sums(self._model, batch, clip, self._max_bytes)
        else:
            variables = self._model.trainable_variables
            gradients, norms, outputs = ghost_sums(
                self._ghost, variables, batch, clip, self._max_bytes
            )
        return ClippedSum(gradients, norms, outputs, self._finite_layers(x, outputs))

    def _prepare(self) -> None:
        """Checks the model and makes the plan for it, again if what is trained has changed."""
        if not self._model.built:
            raise ValueError(
                f"model {self._model.name!r} is not built. Call it on a batch of features, or "
                "give it a keras.Input, before its gradients are clipped."
            )
        key = tuple((id(layer), layer.trainable) for layer in all_layers(self._model))
        if key == self._plan_key:
            return
        check_layers(self._model)
        self._ghost = None
        with tf.init_scope():  # the plan outlives the graph in which it is first asked for
            if self._method != "vectorized":
                try:
                    self._ghost = ghost_model(self._model)
                except NoRuleError as error:
                    if self._method == "ghost":
                        raise ValueError(
                            f"method='ghost' cannot handle model {self._model.name!r}: {error}. "
                            "Use method='auto'."
                        ) from error
            self._probe = layer_outputs(self._model)
        self._plan_key = key

    def _finite_layers(self, x: Any, outputs: Any) -> dict[str, tf.Tensor]:
        """Returns which layers' outputs are finite; looks at them only if there is a reason."""
        whole = tf.reduce_all([_is_finite(output) for output in tf.nest.flatten(outputs)])
        probe = self._probe
        if probe is None:
            return {self._model.name: whole}
        names = probe.output_names

        def look() -> list[tf.Tensor]:
            return [_is_finite(output) for output in tf.nest.flatten(probe(x, training=False))]

        flags = tf.cond(whole, lambda: [tf.constant(True)] * len(names), look)
        return dict(zip(names, flags, strict=True))


def _checked_batch(x: Any, y: Any, weights: tf.Tensor, group_size: int) -> Any:
    """Returns all three with the same, known number of rows, a multiple of ``group_size``."""
    parts = tf.nest.flatten((x, y, weights))
    known = {part.shape[0] for part in parts if part.shape.rank} - {None}
    if len(known) != 1 or weights.shape.rank != 1 or any(part.shape.rank == 0 for part in parts):
        raise ValueError(
            "features, labels and weights must have the same fixed number of rows, got shapes "
            f"{[tuple(part.shape) for part in parts]}. Use batches of a fixed size, such as "
            "tf_labeldp.data.poisson_batches gives."
        )
    batch = known.pop()
    if batch % group_size:
        raise ValueError(
            f"a batch of {batch} rows cannot be cut into groups of {group_size}. Choose a "
            "group size (num_microbatches) that divides the batch size."
        )
    return tf.nest.map_structure(
        lambda part: tf.ensure_shape(part, (batch, *part.shape[1:])), (x, y, weights)
    )


def _group_means(weights: tf.Tensor, group_size: int) -> tf.Tensor:
    """Divides each weight by the number of rows of its group that have one."""
    if group_size == 1:
        return weights
    grouped = tf.reshape(weights, (-1, group_size))
    counts = tf.math.count_nonzero(grouped, axis=1, keepdims=True, dtype=tf.float32)
    return tf.reshape(grouped / tf.maximum(counts, 1.0), (-1,))


def _is_finite(values: tf.Tensor) -> tf.Tensor:
    if not values.dtype.is_floating:
        return tf.constant(True)
    return tf.reduce_all(tf.math.is_finite(values))


_Sums = tuple[list[tf.Tensor], tf.Tensor, Any]
_ONE_BY_ONE = (
    "the examples of model {name!r} are worked on one after the other, which is slow: vectorized, "
    "its matrix products run into a bug of TensorFlow's oneDNN kernels "
    "(https://github.com/tensorflow/tensorflow/issues/117700). Set the environment variable "
    "TF_ENABLE_ONEDNN_OPTS=0 before TensorFlow is imported to avoid that."
)


def vectorized_sums(model: keras.Model, batch: Batch, clip: Clip, max_bytes: int) -> _Sums:
    """Returns the clipped sum, the norms and the outputs, as many rows at a time as fit."""
    group_size, scales, num_rows = clip.group_size, clip.scales, batch.weights.shape[0]
    values = [tf.convert_to_tensor(variable.value) for variable in model.trainable_variables]
    states = [generator.state for generator in parts_of(model, keras.random.SeedGenerator)]

    def example(row: Any) -> tuple[list[tf.Tensor], Any]:
        return _example_gradients(model, values, states, batch, row)

    # Each example has random numbers (dropout) of its own.
    rows = (batch.x, batch.y, batch.weights, _row_seeds(states, num_rows))
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
        coefficients = clip_coefficients(norms, clip.l2_norm_clip)
        return [weighted_sum(coefficients, g) for g in grouped], norms, outputs

    needed = group_size * trace.num_bytes
    if needed > max_bytes:
        raise ValueError(
            f"max_bytes={max_bytes} is too small: one gradient of model {model.name!r} needs about "
            f"{needed} bytes. Raise max_bytes to at least that."
        )
    chunk = group_size * (max_bytes // needed)
    if chunk >= num_rows:
        return clipped(rows)
    return _in_chunks(clipped, rows, values, chunk, group_size)


def _example_gradients(
    model: keras.Model,
    values: list[tf.Tensor],
    states: list[Any],
    batch: Batch,
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
        losses = checked_losses(batch.loss(y, outputs), weight)
        total = tf.reduce_sum(tf.cast(losses, tf.float32) * weight) * batch.loss_scale
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
    gradients = [tf.cast(tf.convert_to_tensor(g), tf.float32) / batch.loss_scale for g in gradients]
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
