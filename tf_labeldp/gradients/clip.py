"""The batch of one step, the bound on one label's share in its sum, and the memory it may take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_labeldp import _validate


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """The rows of one step.

    Attributes:
        x: features: a tensor (B, ...), or a list or dictionary of them.
        y: labels (B, ...), or a structure of them that ``loss`` takes.
        weights: (B,), multiplied onto the losses before clipping; zero for padding.
        loss: ``(y_true, y_pred) -> (B,)``.
        loss_scale: multiplied onto the losses and divided out of the gradients, for ``float16``.
    """

    x: Any
    y: Any
    weights: Any
    loss: Callable[[Any, Any], tf.Tensor]
    loss_scale: float = 1.0

    def unscaled(self, gradients: Sequence[Any]) -> list[tf.Tensor]:
        """Returns gradients of a clip's objective in ``float32``, without the scale."""
        return [tf.cast(tf.convert_to_tensor(g), tf.float32) / self.loss_scale for g in gradients]


@dataclasses.dataclass(frozen=True, eq=False)
class Coordinates:
    """A linear map of the gradient of one weight: ``A M B``, with the gradient as a matrix M.

    All axes of the weight but the last are the rows of M. A vector is one row, without A.

    Attributes:
        left: A, or its diagonal; None for the identity.
        right: B, or its diagonal; None for the identity.
    """

    left: tf.Tensor | None = None
    right: tf.Tensor | None = None

    def forward(self, gradients: tf.Tensor) -> tf.Tensor:
        """Returns ``A M B`` of each of the gradients (N, *weight shape)."""
        return _mapped(gradients, self.left, self.right)

    def back(self, gradient: tf.Tensor) -> tf.Tensor:
        """Returns ``A^T Y B^T``: the step of the weight for a step Y in these coordinates."""
        left, right = (transposed(side) for side in (self.left, self.right))
        return _mapped(gradient[tf.newaxis], left, right)[0]

    def of_inputs(self, inputs: tf.Tensor) -> tf.Tensor:
        """Returns ``A a`` of each input a (..., rows) of a linear layer."""
        return _times(inputs, transposed(self.left))

    def of_outputs(self, gradients: tf.Tensor) -> tf.Tensor:
        """Returns ``B^T g`` of each output gradient g (..., columns) of a linear layer."""
        return _times(gradients, self.right)


def _mapped(gradients: tf.Tensor, left: Any, right: Any) -> tf.Tensor:
    shape = gradients.shape
    columns = shape[-1] if shape.rank > 1 else 1
    mapped = _times(tf.reshape(gradients, (shape[0], -1, columns)), right)
    if left is not None:  # one large product, instead of one for each gradient
        turned = _times(tf.transpose(mapped, (0, 2, 1)), transposed(left))
        mapped = tf.transpose(turned, (0, 2, 1))
    return tf.reshape(mapped, shape)


def _times(rows: tf.Tensor, side: tf.Tensor | None) -> tf.Tensor:
    """Returns rows (..., n) times a matrix (n, n) or its diagonal (n,), in the rows' precision."""
    if side is None:
        return rows
    side = tf.cast(side, rows.dtype)
    return rows * side if side.shape.rank == 1 else tf.tensordot(rows, side, 1)


def transposed(side: Any) -> Any:
    """Returns the transpose of a side of ``Coordinates``: a matrix, its diagonal, or None."""
    return side if side is None or side.shape.rank == 1 else tf.transpose(side)


@dataclasses.dataclass(frozen=True, eq=False)
class Clip:
    """Bounds the norm of each gradient in a sum: the sensitivity is set here.

    A clip names the scalar whose gradient is taken, and the coefficient of each gradient in the
    sum, which a subclass may choose otherwise.

    Attributes:
        l2_norm_clip: the bound C, a number or a scalar tensor.
        group_size: contiguous rows that are clipped as one: the gradient of a group is that of its
            weighted losses' sum, divided by its number of rows with weight (or 1).
        coordinates: one for each of ``model.trainable_variables``, in which norms are taken:
            clipped sums and norms are those of the mapped gradients. Must not depend on labels.
            None for the weights themselves.
    """

    l2_norm_clip: Any
    group_size: int = 1
    coordinates: Sequence[Coordinates] | None = None

    def __post_init__(self) -> None:
        _validate.integer_at_least("group_size", self.group_size, 1)
        clip = self.l2_norm_clip
        if not tf.is_tensor(clip):
            clip = _validate.positive_finite("l2_norm_clip", clip)
        object.__setattr__(self, "l2_norm_clip", tf.cast(clip, tf.float32))

    def objective(self, batch: Batch, outputs: Any) -> tf.Tensor:
        """Returns the scalar to differentiate, times ``batch.loss_scale``: the weighted losses."""
        losses, rows = batch.loss(batch.y, outputs), batch.weights.shape[0]
        if tuple(losses.shape) != (rows,):
            raise ValueError(
                f"losses must be per example: expected shape ({rows},), got {tuple(losses.shape)}. "
                "Do not sum or average over examples."
            )
        return tf.reduce_sum(tf.cast(losses, tf.float32) * batch.weights) * batch.loss_scale

    def coefficients(self, norms: tf.Tensor, batch: Batch, outputs: Any) -> tf.Tensor:
        """Returns min(1, C / norm) for each norm, and zero for those that are not finite."""
        coefficients = self.l2_norm_clip / tf.maximum(norms, self.l2_norm_clip)
        return tf.where(tf.math.is_finite(norms), coefficients, 0.0)


@dataclasses.dataclass(frozen=True)
class Speed:
    """How per-example gradients are computed; changes time and memory, never the result.

    Attributes:
        method: "ghost", "vectorized", or "auto" for the first where the model allows it.
        max_bytes: memory for per-example gradients and the like, in addition to that of an ordinary
            training step; batches that need more are processed in chunks.
    """

    method: str = "auto"
    max_bytes: int = 2**30

    def __post_init__(self) -> None:
        _validate.one_of("method", self.method, ("auto", "ghost", "vectorized"))
        _validate.integer_at_least("max_bytes", self.max_bytes, 1)


Sums = tuple[list[tf.Tensor], tf.Tensor, Any]
"""The clipped sum for each trainable variable, the norms before clipping, the model's outputs."""


def in_coordinates(
    coordinates: Sequence[Coordinates] | None, gradients: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns gradients (N, *weight shape) in these coordinates; None leaves them."""
    if coordinates is None:
        return list(gradients)
    return [side.forward(part) for side, part in zip(coordinates, gradients, strict=True)]


def weighted_sum(coefficients: tf.Tensor, gradients: tf.Tensor) -> tf.Tensor:
    """Returns the sum over the first axis; rows with coefficient zero count nothing, even NaN."""
    return tf.tensordot(coefficients, zero_where(coefficients == 0, gradients), 1)


def zero_where(rows: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Returns ``values`` (B, ...) with zeros in the rows where ``rows`` (B,) is true."""
    return tf.where(by_row(rows, values), tf.zeros((), values.dtype), values)


def by_row(rows: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Returns ``rows`` (B,) with axes of one, so that it broadcasts over ``values`` (B, ...)."""
    return tf.reshape(rows, (rows.shape[0], *(1,) * (values.shape.rank - 1)))


def squared_norms(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the squared norms (N,) over all weights of gradients (N, ...)."""
    return tf.add_n(
        [tf.reduce_sum(tf.square(g), axis=list(range(1, g.shape.rank))) for g in gradients]
    )


def in_chunks(values: tf.Tensor, rows: int) -> tf.Tensor:
    """Returns ``values`` (B, ...) as (chunks, rows, ...); zeros fill the last chunk."""
    num_chunks = -(-values.shape[0] // rows)
    padding = [(0, num_chunks * rows - values.shape[0]), *[(0, 0)] * (values.shape.rank - 1)]
    shape = tf.concat([[num_chunks, rows], tf.shape(values)[1:]], 0)  # some known in a step only
    chunks = tf.reshape(tf.pad(values, padding), shape)
    return tf.ensure_shape(chunks, (num_chunks, rows, *values.shape[1:]))
