"""Sums of per-example gradients, each clipped to a norm, for any Keras model."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_labeldp.gradients._layer_rules import NoRuleError
from tf_labeldp.gradients.clip import Batch, Clip, Speed
from tf_labeldp.gradients.ghost_clipping import GhostClipping, layer_outputs
from tf_labeldp.gradients.model_checks import all_layers, check_layers
from tf_labeldp.gradients.vectorized_clipping import VectorizedClipping

_FLOAT16_LOSS_SCALE = 256.0  # entries from 2e-10 to 255 survive; above, the example adds zero


class ClippedSum(NamedTuple):
    """The result of ``PerExampleClipping.clipped_sum``."""

    # The clipped sum, float32, for each of ``model.trainable_variables``.
    gradients: list[tf.Tensor]
    # L2 norms (B / group_size,) before clipping. They depend on labels: not to be released.
    norms: tf.Tensor
    # The model's outputs (B, ...), in training mode.
    outputs: tf.Tensor
    # Whether the output of each layer is finite, by its name; depends on features and weights
    # alone. Layers are only checked where the model's outputs are not all finite.
    finite: dict[str, tf.Tensor]


class PerExampleClipping:
    """Computes the sum over examples of gradients clipped to an L2 norm.

    Two methods give the same result. "ghost" needs one backward pass for the whole batch and forms
    per-example gradients layer by layer only where that is cheapest; it is for functional and
    sequential models of common layers (Dense, Conv1D to 3D with groups or without, depthwise
    convolutions, Embedding, LayerNormalization, GroupNormalization and layers without weights).
    "vectorized" sends each example through the model alone, so that no layer can mix examples, and
    works for any model.

    Guarantee:
        Replacing one example, features or label, moves the sum by at most ``2 * l2_norm_clip`` in
        L2 norm, for any model, loss and weights: every group adds at most ``l2_norm_clip``. With
        ``LabelDistanceClip`` that holds for a replaced label alone, and for cross-entropy of two
        classes: an example adds up to ``2 * LONGEST_CLIP * l2_norm_clip`` then.
        A group whose gradient is not finite adds exactly zero.
        No layer mixes examples: each group's contribution depends on its own rows alone.
        All this is up to the rounding of ``float32``; on GPUs that round the factors of products
        to TensorFloat-32, turn that off:
        ``tf.config.experimental.enable_tensor_float_32_execution(False)``.

    The method of ``speed`` must be able to handle the built model, or a ``ValueError`` is raised.
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
        check_layers(model)

    @property
    def method(self) -> str:
        """The method in use for the model as it is now: "ghost" or "vectorized"."""
        self._prepare()
        return "ghost" if isinstance(self._chosen, GhostClipping) else "vectorized"

    @tf.autograph.experimental.do_not_convert
    def clipped_sum(self, batch: Batch, clip: Clip) -> ClippedSum:
        """Returns the sum of the clipped gradients of a batch, with norms and outputs.

        Raises:
            ValueError: the number of rows is not fixed or not a multiple of ``clip.group_size``,
                the loss is not per example, not even one group fits into memory, or the model
                updates state of its own (other than random seeds) while training.
        """
        batch = _checked(batch, clip.group_size)
        self._prepare()
        if any(layer.compute_dtype == "float16" for layer in all_layers(self._model)):
            batch = dataclasses.replace(batch, loss_scale=_FLOAT16_LOSS_SCALE)
        gradients, norms, outputs = self._chosen.sums(batch, clip, self._speed.max_bytes)
        return ClippedSum(gradients, norms, outputs, self._finite_layers(batch.x, outputs))

    def _prepare(self) -> None:
        """Checks the model and chooses its method, again if other variables are trained now."""
        model = self._model
        if not model.built:
            raise ValueError(f"model {model.name!r} is not built. Call it on a batch of features.")
        trained = (
            *((id(layer), layer.trainable) for layer in all_layers(model)),
            *map(id, model.trainable_variables),  # other ones after `enable_lora`
        )
        if trained == self._trained:
            return
        check_layers(model)
        with tf.init_scope():  # the choice outlives the graph in which it is first asked for
            self._chosen = self._choose()
            self._probe = layer_outputs(model)
        self._trained = trained

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
        return VectorizedClipping(self._model)

    def _finite_layers(self, x: Any, outputs: Any) -> dict[str, tf.Tensor]:
        """Returns whether each layer's output is finite; computes them only where needed."""
        whole = tf.reduce_all([_is_finite(output) for output in tf.nest.flatten(outputs)])
        probe = self._probe
        if probe is None:
            return {self._model.name: whole}
        names = probe.output_names

        def look() -> list[tf.Tensor]:
            return [_is_finite(output) for output in tf.nest.flatten(probe(x, training=False))]

        flags = tf.cond(whole, lambda: [tf.constant(True)] * len(names), look)
        return dict(zip(names, flags, strict=True))


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
    if group_size > 1:  # means over the rows of a group that have weight
        grouped = tf.reshape(weights, (-1, group_size))
        counts = tf.math.count_nonzero(grouped, axis=1, keepdims=True, dtype=tf.float32)
        weights = tf.reshape(grouped / tf.maximum(counts, 1.0), (-1,))
    return dataclasses.replace(batch, x=x, y=y, weights=weights)


def _is_finite(values: tf.Tensor) -> tf.Tensor:
    if not values.dtype.is_floating:
        return tf.constant(True)
    return tf.reduce_all(tf.math.is_finite(values))
