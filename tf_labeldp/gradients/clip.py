"""The batch of one step, the bound on each gradient in its sum, and the choice of method."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_labeldp import _validate

# Gradient entries from 2e-10 to 255 survive in float16: times 256 they are between its smallest
# number, 6e-8, and its largest, 65504. An example with larger ones adds zero.
FLOAT16_SCALE = 256.0


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """The rows of one step."""

    # Features: a tensor (B, ...), or a list or dictionary of tensors.
    x: Any
    # Labels (B, ...), or a structure of them that ``loss`` takes.
    y: Any
    # (B,), factors of the losses before clipping; zero for padding.
    weights: Any
    # (y_true, y_pred) -> (B,)
    loss: Callable[[Any, Any], tf.Tensor]
    # A factor of the losses that is divided out of the gradients, for float16.
    loss_scale: float = 1.0

    def unscaled(self, gradients: Any) -> Any:
        """Returns a nest of gradients in ``float32``, divided by ``loss_scale``."""
        return keras.tree.map_structure(
            lambda g: tf.cast(tf.convert_to_tensor(g), tf.float32) / self.loss_scale, gradients
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Coordinates:
    """A linear map ``A M B`` of one weight's gradient, as a matrix M.

    All axes of the weight except the last are the rows of M. A vector is one row, without A.
    """

    # A, or its diagonal; None for the identity.
    left: tf.Tensor | None = None
    # B, or its diagonal; None for the identity.
    right: tf.Tensor | None = None

    def forward(self, gradients: tf.Tensor) -> tf.Tensor:
        """Returns ``A M B`` for gradients of shape ``(N, *weight shape)``."""
        return _mapped(gradients, self.left, self.right)

    def back(self, gradient: tf.Tensor) -> tf.Tensor:
        """Returns ``A^T Y B^T``, the weight's step for a step Y in these coordinates."""
        left, right = (transposed(side) for side in (self.left, self.right))
        return _mapped(gradient[tf.newaxis], left, right)[0]

    def of_inputs(self, inputs: tf.Tensor) -> tf.Tensor:
        """Returns ``A a`` for each input a (..., rows) of a linear layer."""
        return _times(inputs, transposed(self.left))

    def of_outputs(self, gradients: tf.Tensor) -> tf.Tensor:
        """Returns ``B^T g`` for each output gradient g (..., columns) of a linear layer."""
        return _times(gradients, self.right)


def _mapped(gradients: tf.Tensor, left: Any, right: Any) -> tf.Tensor:
    shape = gradients.shape
    columns = shape[-1] if shape.rank > 1 else 1
    mapped = _times(tf.reshape(gradients, (shape[0], -1, columns)), right)
    if left is not None:
        # One large product instead of one for each gradient.
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
    """Bounds each gradient in a sum by C, so that a replaced label moves the sum by up to 2 C.

    A subclass may differentiate another scalar, or choose other coefficients.
    """

    # The bound C, a number or a scalar tensor.
    l2_norm_clip: Any
    # Contiguous rows that are clipped as one: a group's gradient is that of the sum of its weighted
    # losses, divided by its number of rows with weight (or 1).
    group_size: int = 1
    # One for each of model.trainable_variables: norms and clipped sums are those of the mapped
    # gradients. Must not depend on labels. None leaves the gradients as they are.
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
                f"expected one loss per example, shape ({rows},), got {tuple(losses.shape)}. "
                "Do not sum or average over examples."
            )
        return tf.reduce_sum(tf.cast(losses, tf.float32) * batch.weights) * batch.loss_scale

    def coefficients(self, norms: tf.Tensor, batch: Batch, outputs: Any) -> tf.Tensor:
        """Returns min(1, C / norm) for each finite norm, and zero for the others."""
        # Replacement takes one gradient of norm up to C out of the sum and puts another in. They
        # may point in opposite directions, so the sum moves by up to 2 C; adding or removing an
        # example would move it by C.
        # The divisor is never zero, and a clip of NaN gives NaN, where a comparison of the norms
        # with it would leave gradients as they are.
        coefficients = self.l2_norm_clip / tf.maximum(norms, self.l2_norm_clip)
        # An infinite norm would give zero times infinity, which is NaN for the whole sum.
        return tf.where(tf.math.is_finite(norms), coefficients, 0.0)


@dataclasses.dataclass(frozen=True)
class Speed:
    """How to compute per-example gradients: changes time and memory, never the result."""

    # "ghost", "vectorized", or "auto" for "ghost" if the model allows it.
    method: str = "auto"
    # Memory of per-example gradients in addition to an ordinary training step, in bytes. Batches
    # that need more are processed in chunks.
    max_bytes: int = 2**30

    def __post_init__(self) -> None:
        _validate.one_of("method", self.method, ("auto", "ghost", "vectorized"))
        _validate.integer_at_least("max_bytes", self.max_bytes, 1)


# The clipped sum for each trainable variable, the norms before clipping, and the model's outputs.
Sums = tuple[list[tf.Tensor], tf.Tensor, Any]


def in_coordinates(
    coordinates: Sequence[Coordinates] | None, gradients: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns gradients (N, *weight shape) in coordinates; None leaves them unchanged."""
    if coordinates is None:
        return list(gradients)
    return [side.forward(part) for side, part in zip(coordinates, gradients, strict=True)]


def weighted_sum(coefficients: tf.Tensor, gradients: tf.Tensor) -> tf.Tensor:
    """Returns the weighted sum over the first axis; a coefficient of zero drops even NaN."""
    # Most batches drop no example, and the copy costs more than the sum.
    kept = tf.cond(
        tf.reduce_any(coefficients == 0),
        lambda: zero_where(coefficients == 0, gradients),
        lambda: gradients,
    )
    return tf.tensordot(coefficients, kept, 1)


def zero_where(rows: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Returns ``values`` (B, ...) with zeros in the rows where ``rows`` (B,) is true."""
    return tf.where(by_row(rows, values), tf.zeros((), values.dtype), values)


def by_row(rows: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Returns ``rows`` (B,) with axes of size one, to broadcast over ``values`` (B, ...)."""
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
    # Some sizes are known only in the step.
    shape = tf.concat([[num_chunks, rows], tf.shape(values)[1:]], 0)
    chunks = tf.reshape(tf.pad(values, padding), shape)
    return tf.ensure_shape(chunks, (num_chunks, rows, *values.shape[1:]))


def by_chunks(
    function: Callable[[Sequence[tf.Tensor]], tf.Tensor], tensors: Sequence[tf.Tensor], rows: int
) -> tf.Tensor:
    """Returns the values of ``function`` for chunks of this many rows in turn, as one tensor.

    Parallel chunks would need the memory of the whole batch.
    """
    batch = tensors[0].shape[0]
    if rows >= batch:
        return function(tensors)

    def values(start: Any, length: int) -> tf.Tensor:
        parts = [tensor[start : start + length] for tensor in tensors]
        return function([tf.ensure_shape(part, (length, *part.shape[1:])) for part in parts])

    count, rest = divmod(batch, rows)
    first = values(0, rows)
    array = tf.TensorArray(first.dtype, count, element_shape=first.shape).write(0, first)
    _, array = tf.while_loop(
        lambda number, array: number < count,
        lambda number, array: (number + 1, array.write(number, values(number * rows, rows))),
        (tf.constant(1), array),
        parallel_iterations=1,
    )
    shape = count * first.shape[0], *first.shape[1:]
    whole = tf.ensure_shape(array.concat(), shape)
    return tf.concat([whole, values(count * rows, rest)], 0) if rest else whole
