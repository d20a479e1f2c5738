"""Sums of per-example gradients, each clipped to a norm, for any Keras model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.gradients._layer_rules import NoRuleError
from tf_labeldp.gradients.clip import FLOAT16_SCALE, Batch, Clip, Speed
from tf_labeldp.gradients.ghost_clipping import GhostClipping
from tf_labeldp.gradients.layer_graph import layer_not_compiled, layer_outputs
from tf_labeldp.gradients.masks import copied, mask_of, masks_by_place, with_masks
from tf_labeldp.gradients.model_checks import InspectedModel
from tf_labeldp.gradients.vectorized_clipping import Trace, VectorizedClipping, row_seeds

_VECTORIZED = (
    "the per-example gradients of model {name!r} are vectorized in part or whole, which takes "
    "longer: {reason}."
)


class ClippedSum(NamedTuple):
    """The result of ``PerExampleClipping.clipped_sum``."""

    # The clipped sum for each of model.trainable_variables, float32.
    gradients: list[tf.Tensor]
    # L2 norms (B / group_size,) before clipping. They depend on labels and must not be released.
    norms: tf.Tensor
    # The model's outputs (B, ...) in training mode.
    outputs: tf.Tensor
    # Whether each layer's output is finite, by name; depends on features and weights alone. Layers
    # are evaluated only if the model's outputs are not finite.
    finite: dict[str, tf.Tensor]

    def copied_outputs(self) -> Any:
        """Returns copies of the outputs, which wait for the control dependencies of this place."""
        return copied(self.outputs)


class PerExampleClipping:
    """Sums per-example gradients, each clipped to an L2 norm.

    Two methods give the same result. "ghost" needs one backward pass for the whole batch and forms
    per-example gradients only in layers where that is cheapest. It supports functional and
    sequential models. A layer without an exact rule is vectorized: each example passes through it
    alone. A warning names such layers; docs/guide.md lists the rules. "vectorized" supports any
    model: each example passes through all of it alone, so no layer can mix examples.

    Guarantee:
        Replacing one example, features or label, moves the sum by at most ``2 * l2_norm_clip`` in
        L2 norm, for any model, loss and weights: every group adds at most ``l2_norm_clip``. With
        ``LabelDistanceClip`` this is true for a replaced label alone, and for cross-entropy of two
        classes; an example then adds at most ``2 * EventFields.LONGEST_CLIP * l2_norm_clip``.
        A group whose gradient is not finite adds exactly zero.
        No layer mixes examples: each group's contribution depends on its own rows alone.
        All bounds are up to ``float32`` rounding. GPUs that round factors to TensorFloat-32 need
        ``tf.config.experimental.enable_tensor_float_32_execution(False)``.

    Sources: Abadi et al. 2016, "Deep learning with differential privacy", algorithm 1; Bu et al.
    2023, "Differentially private optimization on large foundation models at almost no cost",
    algorithm 1.
    """

    def __init__(self, model: keras.Model, speed: Speed | None = None) -> None:
        self._model = model
        self._speed = speed or Speed()
        self._trained: tuple[Any, ...] | None = None
        self._chosen: GhostClipping | VectorizedClipping = VectorizedClipping(model)
        self._probe: keras.Model | None = None

    @property
    def method(self) -> str:
        """The method for the model in its present state: "ghost" or "vectorized"."""
        self._prepare()
        return "ghost" if isinstance(self._chosen, GhostClipping) else "vectorized"

    @property
    def float16_layers(self) -> set[str]:
        """The names of the layers that compute in half precision."""
        layers = InspectedModel(self._model).layers
        return {layer.name for layer in layers if layer.compute_dtype == "float16"}

    def layer_not_compiled(self) -> str | None:
        """Returns the first layer that XLA can't compile alone; None if there is none."""
        return layer_not_compiled(self._model)

    @tf.autograph.experimental.do_not_convert
    def clipped_sum(self, batch: Batch, clip: Clip) -> ClippedSum:
        """Returns the sum of a batch's clipped gradients, with norms and outputs.

        Raises:
            ValueError: the model is not built, or the method of ``speed`` does not support it; the
                number of rows is not fixed or not a multiple of ``clip.group_size``; the loss is
                not per example; one group exceeds the memory; or the model updates its own state
                (other than random seeds) in training.
        """
        batch = _checked(batch, clip.group_size)
        self._prepare()
        if self.float16_layers:
            batch = dataclasses.replace(batch, loss_scale=FLOAT16_SCALE)
        gradients, norms, outputs = self._chosen.sums(batch, clip, self._speed.max_bytes)
        return ClippedSum(gradients, norms, outputs, self._finite_layers(batch.x, outputs))

    def _prepare(self) -> None:
        """Checks the model and chooses its method, again if the trained variables changed."""
        model, inspected = self._model, InspectedModel(self._model)
        if not model.built:
            raise ValueError(f"model {model.name!r} is not built. Call it on a batch of features.")
        trained = (
            *((id(layer), layer.trainable) for layer in inspected.layers),
            # `enable_lora` changes them.
            *map(id, model.trainable_variables),
        )
        if trained == self._trained:
            return
        inspected.check_layers()
        # The choice outlives the graph in which it is made.
        with tf.init_scope():
            self._chosen = self._choose()
            self._probe = layer_outputs(model)
        self._trained = trained
        if isinstance(self._chosen, GhostClipping) and self._chosen.vectorized:
            layers = ", ".join(self._chosen.vectorized)
            _validate.warn(_VECTORIZED.format(name=model.name, reason=f"no rule for {layers}"))

    def training_pass(self, pieces: int = 1) -> TrainingPass:
        """Returns the model in training mode, with the random numbers of the next sum.

        ``pieces`` replicas share the rows and draw the same numbers.
        """
        return TrainingPass(self._model, self._forward, self.method == "vectorized", pieces)

    def _forward(self, x: Any) -> Any:
        if isinstance(self._chosen, GhostClipping) and self._chosen.by_row:
            return self._chosen.forward(x)
        return self._model(x, training=True)

    def _choose(self) -> GhostClipping | VectorizedClipping:
        if self._speed.method != "vectorized":
            try:
                return GhostClipping(self._model)
            except NoRuleError as error:
                if self._speed.method == "ghost":
                    raise ValueError(
                        f"method='ghost' cannot handle model {self._model.name!r}: {error}. "
                        "Use method='auto'."
                    ) from error
                _validate.warn(_VECTORIZED.format(name=self._model.name, reason=error))
        return VectorizedClipping(self._model)

    def _finite_layers(self, x: Any, outputs: Any) -> dict[str, tf.Tensor]:
        whole = tf.reduce_all([_is_finite(output) for output in tf.nest.flatten(outputs)])
        probe = self._probe
        if probe is None:
            return {self._model.name: whole}
        names = probe.output_names

        def look() -> list[tf.Tensor]:
            return [_is_finite(output) for output in tf.nest.flatten(probe(x, training=False))]

        flags = tf.cond(whole, lambda: [tf.constant(True)] * len(names), look)
        return dict(zip(names, flags, strict=True))


class TrainingPass:
    """The model in training mode, with the random numbers of the next gradient pass.

    It changes no state. ``by_example`` draws random numbers per example, as the method "vectorized"
    does; ``pieces`` is that of ``training_pass``; ``forward`` calls the model.
    """

    def __init__(
        self, model: keras.Model, forward: Callable[[Any], Any], by_example: bool, pieces: int
    ) -> None:
        self._forward, self._pieces = forward, pieces
        self._states = InspectedModel(model).seed_states
        self._now = [tf.identity(state.value) for state in self._states]
        self._by_example = by_example and bool(self._states)
        self.variables = list(model.trainable_variables)

    def __call__(self, x: Any) -> tuple[Any, Any]:
        """Returns the outputs, and the mask of an output that is one tensor."""
        outputs = self._whole(x)
        return outputs, mask_of(outputs)

    def _whole(self, x: Any) -> Any:
        if self._pieces == 1:
            return self._outputs(x)
        parts = zip(*(tf.split(part, self._pieces) for part in tf.nest.flatten(x)), strict=True)
        outputs = [self._outputs(tf.nest.pack_sequence_as(x, part)) for part in parts]
        masks = [masks_by_place(part) for part in outputs]
        whole, masks = (
            tf.nest.map_structure(lambda *rows: tf.concat(rows, 0), *parts)
            for parts in (outputs, masks)
        )
        return with_masks(whole, masks)

    def _outputs(self, x: Any) -> Any:
        if not self._by_example:
            with self._drawing(self._now):
                return self._forward(x)
        # The scope also keeps the states of the generators.
        with self._drawing(self._now):
            seeds = row_seeds(self._states, tf.nest.flatten(x)[0].shape[0])

        def row_outputs(row: Any) -> Any:
            features = tf.nest.map_structure(lambda part: part[tf.newaxis], row[0])
            with self._drawing(row[1]):
                outputs = self._forward(features)
            return tf.nest.map_structure(lambda part: part[0], (outputs, masks_by_place(outputs)))

        rows = tf.nest.map_structure(tf.convert_to_tensor, (x, seeds))
        return with_masks(*Trace.of(row_outputs, rows).map_rows(row_outputs, rows))

    def _drawing(self, states: list[tf.Tensor]) -> keras.StatelessScope:
        """Returns a scope with these states of the generators, in which nothing is written."""
        return keras.StatelessScope(state_mapping=list(zip(self._states, states, strict=True)))


def _checked(batch: Batch, group_size: int) -> Batch:
    x, y = tf.nest.map_structure(tf.convert_to_tensor, (batch.x, batch.y))
    weights = tf.cast(tf.convert_to_tensor(batch.weights), tf.float32)
    parts = tf.nest.flatten((x, y, weights))
    sizes = {part.shape[0] for part in parts if part.shape.rank} - {None}
    if len(sizes) != 1 or weights.shape.rank != 1 or any(part.shape.rank == 0 for part in parts):
        raise ValueError(
            "features, labels and weights must have the same fixed number of rows, got shapes "
            f"{[tuple(part.shape) for part in parts]}. Use data.poisson_batches."
        )
    rows = sizes.pop()
    if rows % group_size:
        raise ValueError(f"{rows} rows cannot be cut into groups of {group_size}.")
    x, y, weights = tf.nest.map_structure(
        lambda part: tf.ensure_shape(part, (rows, *part.shape[1:])), (x, y, weights)
    )
    if group_size > 1:
        # Means over the rows with weight in each group.
        grouped = tf.reshape(weights, (-1, group_size))
        counts = tf.math.count_nonzero(grouped, axis=1, keepdims=True, dtype=tf.float32)
        weights = tf.reshape(grouped / tf.maximum(counts, 1.0), (-1,))
    return dataclasses.replace(batch, x=x, y=y, weights=weights)


def _is_finite(values: tf.Tensor) -> tf.Tensor:
    if not values.dtype.is_floating:
        return tf.constant(True)
    return tf.reduce_all(tf.math.is_finite(values))
