"""Euclidean projections on simplices, and the two sets of projection coefficients made of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

HULLS = ("joint", "per_example")


def project_onto_simplex(values: Any, total: Any = 1.0) -> tf.Tensor:
    """Returns the nearest point with entries of at least 0 that sum to ``total``, row by row.

    By sorting, as Wang and Carreira-Perpinan (2013), "Projection onto the probability simplex".

    Args:
        values: float (..., m); each row along the last axis is projected apart.
        total: number above zero, or a tensor that broadcasts to (..., 1).

    Returns:
        float (..., m), in the dtype of ``values``.

    Example:
        >>> project_onto_simplex([[0.9, -0.2, 0.4], [3.0, 0.0, 0.0]]).numpy().round(2).tolist()
        [[0.75, 0.0, 0.25], [1.0, 0.0, 0.0]]
    """
    values = tf.convert_to_tensor(values)
    total = tf.cast(tf.convert_to_tensor(total, dtype_hint=values.dtype), values.dtype)
    # A shift moves nothing, and entries this far below the largest stay at zero: with both, sums
    # run over numbers of the size of the answer.
    values -= tf.reduce_max(values, axis=-1, keepdims=True)
    values = tf.maximum(values, -2.0 * total)
    ordered = tf.sort(values, axis=-1, direction="DESCENDING")
    counts = tf.range(1, tf.shape(values)[-1] + 1)
    excess = tf.cumsum(ordered, axis=-1) - total
    support = tf.reduce_sum(
        tf.cast(ordered * tf.cast(counts, values.dtype) > excess, tf.int32), axis=-1, keepdims=True
    )
    support = tf.maximum(support, 1)  # of all-NaN rows, which stay NaN
    threshold = tf.gather(excess, support - 1, axis=-1, batch_dims=values.shape.rank - 1)
    return tf.maximum(values - threshold / tf.cast(support, values.dtype), 0.0)


def mask_column(mask: Any, num_rows: int, dtype: tf.DType) -> tf.Tensor:
    """Returns 1 (n, 1) for examples and 0 for padding, or raises if ``mask`` is not (n,)."""
    if mask is None:
        return tf.ones([num_rows, 1], dtype)
    mask = tf.cast(tf.cast(mask, bool), dtype)
    if not mask.shape.is_compatible_with([num_rows]):
        raise ValueError(f"mask must have shape ({num_rows},), got {tuple(mask.shape)}.")
    return tf.reshape(mask, [num_rows, 1])


class CoefficientSet(NamedTuple):
    """Coefficients (n, K) of a hull: at least 0, with fixed sums, and 0 in rows that are padding.

    Attributes:
        hull: ``"joint"``: all entries together sum to one (``ghazi2024``); ``"per_example"``: the
            entries of each of m examples sum to 1 / m.
        mask: float (n, 1) of 1 for examples and 0 for padding.
        row_total: scalar 1 / m.
    """

    hull: str
    mask: tf.Tensor
    row_total: tf.Tensor

    @classmethod
    def of(cls, hull: str, mask: Any, num_rows: int, dtype: tf.DType) -> CoefficientSet:
        """Returns the set for n rows, of which those with a ``mask`` of 0 do not count."""
        column = mask_column(mask, num_rows, dtype)
        return cls(hull, column, 1.0 / tf.maximum(tf.reduce_sum(column), 1.0))

    def project(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the nearest coefficients (n, K) to ``values``."""
        if self.hull == "per_example":
            return self.mask * project_onto_simplex(values, self.row_total)
        # Padding is put where no entry of the answer can be: more than the total below the largest.
        largest = tf.reduce_max(tf.where(self.mask > 0, values, values.dtype.min))
        values = tf.where(self.mask > 0, values, largest - 2.0)
        flat = project_onto_simplex(tf.reshape(values, [-1]))
        return self.mask * tf.reshape(flat, tf.shape(values))

    def fill(self, probabilities: tf.Tensor) -> tf.Tensor:
        """Returns coefficients with each example's row proportional to its probabilities."""
        return self.mask * self.row_total * probabilities

    def lowest_vertex(self, gradient: tf.Tensor) -> tf.Tensor:
        """Returns the vertex (n, K) of the set whose inner product with ``gradient`` is least."""
        return self.lowest_vertices(gradient, 1)[0]

    def lowest_vertices(self, gradient: tf.Tensor, count: int) -> tf.Tensor:
        """Returns vertices (count, n, K) with low inner products, the least first.

        More than one only of the joint hull: those of different examples.
        """
        best = tf.one_hot(tf.argmin(gradient, axis=1), gradient.shape[1], dtype=gradient.dtype)
        if self.hull == "per_example":
            return self.fill(best)[tf.newaxis]
        lowest = tf.where(self.mask[:, 0] > 0, tf.reduce_min(gradient, axis=1), gradient.dtype.max)
        rows = tf.math.top_k(-lowest, count).indices
        chosen = tf.one_hot(rows, gradient.shape[0], dtype=gradient.dtype)
        # With fewer examples than count, padding would come next: again the best one instead.
        padded = tf.gather(self.mask[:, 0], rows)[:, tf.newaxis]
        chosen = tf.where(padded > 0, chosen, chosen[:1])
        return chosen[:, :, tf.newaxis] * best

    def centred(self, coefficients: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
        """Returns the gradient less what its mean over the coefficients is, of each fixed sum.

        No move within the set feels such constants. But they stand before sums of moves, which are
        zero up to rounding, and would drown the small slopes near the end.
        """
        if self.hull == "joint":
            return gradient - tf.reduce_sum(coefficients * gradient)
        means = tf.reduce_sum(coefficients * gradient, axis=1, keepdims=True) / self.row_total
        return gradient - means

    def gap(self, coefficients: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
        """Returns the Frank-Wolfe gap: the most that ``<gradient, .>`` can fall within the set."""
        return tf.reduce_sum((coefficients - self.lowest_vertex(gradient)) * gradient)
