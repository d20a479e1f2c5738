"""Sums of per-example gradients, each clipped to a norm, for any Keras model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.training._cross_example_layers import all_layers, check_layers
from tf_labeldp.training._ghost_layers import GhostModel, ghost_model, ghost_sums, layer_outputs
from tf_labeldp.training._layer_rules import NoRuleError
from tf_labeldp.training._vectorized_clipping import vectorized_sums

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

    Privacy:
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
        clip = tf.cast(l2_norm_clip, tf.float32)
        x, y = tf.nest.map_structure(tf.convert_to_tensor, (x, y))
        weights = tf.cast(tf.convert_to_tensor(weights), tf.float32)
        x, y, weights = _checked_batch(x, y, weights, group_size)
        weights = _group_means(weights, group_size)
        self._prepare()
        scale = 1.0
        if any(layer.compute_dtype == "float16" for layer in all_layers(self._model)):
            scale = _FLOAT16_LOSS_SCALE
        if self._ghost is None:
            gradients, norms, outputs = vectorized_sums(
                self._model, x, y, weights, loss, clip, group_size, scale, self._max_bytes, scales
            )
        else:
            gradients, norms, outputs = ghost_sums(
                self._ghost,
                self._model.trainable_variables,
                x,
                y,
                weights,
                loss,
                clip,
                group_size,
                scale,
                self._max_bytes,
                scales,
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
