"""Coordinates in which to clip and to add noise, from the curvature that public features give."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import keras
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.gradients._clip import Coordinates
from tf_labeldp.training._vertex_losses import VertexLosses

_LONGEST = 1024  # side of a factor that is more than a diagonal


@keras.saving.register_keras_serializable(package="tf_labeldp")
@dataclasses.dataclass(eq=False)
class GaussNewton:
    """Whitens each weight's gradient by Kronecker factors, which need no label.

    Noise hurts most in directions of high curvature. In coordinates in which the curvature is about
    the same in all directions there is less of it there, and more where the loss is flat. The step
    is taken in these coordinates too, which makes it one of Gauss and Newton's method, damped.

    With labels drawn from the model's own predictions, the mean gradient M of cross-entropy by a
    weight has the Gauss-Newton matrix as its covariance (Liu et al. 2023, "Sophia", section 2.3).
    This is taken for the product of ``E[M M^T]`` and ``E[M^T M]`` (Gupta et al. 2018, "Shampoo"),
    averages over steps. Of a side longer than 1,024, and of a vector, only the diagonal is used;
    the rows of a table of embeddings stay as they are. The method is not in the papers.

    Guarantee:
        The same as without: the coordinates are made of public features and of weights that are
        private already, without a label, and the gradients in them are clipped to ``l2_norm_clip``
        and noised as others are. The public examples are drawn independently of the batch.

    Args:
        num_examples: public examples in each step, at least 2.
        damping: added to the diagonal of each factor over its mean, at least 0.001.
        momentum: of the averages over steps, in [0, 1).

    Raises:
        ValueError: an argument out of range.

    Example:
        >>> GaussNewton(damping=0.1).get_config()
        {'num_examples': 256, 'damping': 0.1, 'momentum': 0.95}
    """

    num_examples: int = 256
    damping: float = 0.03
    momentum: float = 0.95

    def __post_init__(self) -> None:
        self.num_examples = _validate.integer_at_least("num_examples", self.num_examples, 2)
        # With less, factors of low rank have no inverse in single precision.
        self.damping = _validate.number_in("damping", self.damping, "[0.001, inf)")
        self.momentum = _validate.number_in("momentum", self.momentum, "[0, 1)")

    def initial_state(self, shapes: list[tuple[int, ...]]) -> Any:
        """Returns the averages so far: zeros (coordinates do not depend on their size)."""
        return [[tf.zeros(side) for side in _sides(shape)] for shape in shapes]

    def coordinates(self, vertices: VertexLosses, state: Any) -> tuple[list[Coordinates], Any]:
        """Returns those of each weight, in which noise has the same size in all, and the next state.

        Args:
            vertices: the public examples of this step, on each replica those that it has.
            state: from ``initial_state`` or the last step.
        """
        gradients, tables = self._gradients(vertices)
        averages = [
            [
                self.momentum * old + (1.0 - self.momentum) * new
                for old, new in zip(sides, _moments(gradient, sides), strict=True)
            ]
            for sides, gradient in zip(state, gradients, strict=True)
        ]
        sizes = [math.prod(gradient.shape) for gradient in gradients]
        # The trace of either factor is the total curvature of the weight.
        totals = [tf.reduce_sum(_diagonal(sides[-1])) for sides in averages]
        mean = tf.maximum(tf.add_n(totals) / sum(sizes), 1e-30)
        found, noise = [], []
        for sides, size, total, is_table in zip(averages, sizes, totals, tables, strict=True):
            used = sides[-1:] if is_table else sides
            relative = total / size / mean
            *left, right = [self._whitening(side, relative, len(used)) for side in used]
            found.append((left[0] if left else None, _transposed(right)))
            rows = tf.reduce_sum(tf.square(left[0])) if left else size / right.shape[0]
            noise.append(rows * tf.reduce_sum(tf.square(right)))
        scale = tf.sqrt(sum(sizes) / tf.add_n(noise))
        return [Coordinates(left, scale * right) for left, right in found], averages

    def _whitening(self, factor: tf.Tensor, relative: tf.Tensor, factors: int) -> tf.Tensor:
        """Returns the inverse of a root of one of so many factors of the damped curvature."""
        mean = tf.reduce_mean(_diagonal(factor))
        unit = factor / tf.maximum(mean, 1e-30)
        unit, damping = tf.pow(relative, 1.0 / factors) * unit, self.damping ** (1.0 / factors)
        if factor.shape.rank == 1:
            return tf.math.rsqrt(unit + damping)
        identity = tf.eye(factor.shape[0])
        root = tf.linalg.cholesky(unit + damping * identity)
        return tf.linalg.triangular_solve(root, identity)

    def _gradients(self, vertices: VertexLosses) -> tuple[list[tf.Tensor], list[bool]]:
        """Returns those for labels drawn from the predictions, and which are of tables."""
        logits = tf.math.log(tf.maximum(vertices.predictions(), 1e-30))
        drawn = tf.random.categorical(tf.stop_gradient(logits), 1)[:, 0]
        variables = [variable.value for variable in vertices.variables]
        with tf.GradientTape() as tape:  # of a sum, whose parts are not too small for float16
            total = tf.reduce_sum(tf.gather(vertices.losses(), drawn, batch_dims=1))
        found = tape.gradient(total, variables, unconnected_gradients="zero")
        tables = [isinstance(part, tf.IndexedSlices) for part in found]
        gradients = [tf.cast(tf.convert_to_tensor(part), tf.float32) for part in found]
        replicas = tf.distribute.get_replica_context()
        if replicas.num_replicas_in_sync > 1:  # each has a part of the examples
            gradients = replicas.all_reduce(tf.distribute.ReduceOp.MEAN, gradients)
        return [tf.where(tf.math.is_finite(part), part, 0.0) for part in gradients], tables

    def get_config(self) -> dict[str, Any]:
        """Returns every constructor argument."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> GaussNewton:
        """Returns the preconditioner that ``get_config`` described."""
        return cls(**config)


def _diagonal(side: tf.Tensor) -> tf.Tensor:
    return side if side.shape.rank == 1 else tf.linalg.diag_part(side)


def _transposed(side: tf.Tensor) -> tf.Tensor:
    return side if side.shape.rank == 1 else tf.transpose(side)


def _sides(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns the shapes of a weight's factors: one of a vector, left and right of a matrix."""
    if len(shape) < 2:
        return [(math.prod(shape),)]
    lengths = math.prod(shape[:-1]), shape[-1]
    return [(n, n) if n <= _LONGEST else (n,) for n in lengths]


def _moments(gradient: tf.Tensor, sides: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns ``M M^T`` and ``M^T M`` of a gradient M, or their diagonals."""
    matrix = tf.reshape(gradient, (-1, sides[-1].shape[0]))
    pairs = [(matrix, tf.transpose(matrix))][: len(sides) - 1] + [(tf.transpose(matrix), matrix)]
    return [
        tf.matmul(one, other) if side.shape.rank == 2 else tf.reduce_sum(tf.square(one), axis=1)
        for side, (one, other) in zip(sides, pairs, strict=True)
    ]
