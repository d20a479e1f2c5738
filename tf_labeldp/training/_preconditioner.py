"""Coordinates for clipping and noise, from the curvature on public features."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import keras
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.accounting import Setting
from tf_labeldp.gradients.clip import Coordinates, transposed
from tf_labeldp.training._vertex_losses import VertexLosses

_LONGEST = 1024  # side of a factor that is more than a diagonal


@keras.saving.register_keras_serializable(package="tf_labeldp")
@dataclasses.dataclass(eq=False)
class GaussNewton:
    """Whitens the gradient of each weight by two factors of its curvature, which need no label.

    Noise hurts most in directions of high curvature. Coordinates in which the curvature is about
    the same everywhere move noise from there to where the loss is flat. The step is taken in these
    coordinates too: it is one of Gauss and Newton's method, with damping.

    For labels drawn from the model's own predictions, the covariance of the mean gradient of
    cross-entropy is proportional to the Gauss-Newton matrix (Liu et al. 2023, "Sophia", section
    2.3). For a weight with gradient M it is approximated by the Kronecker product of ``E[M M^T]``
    and ``E[M^T M]``, averages over steps (Gupta et al. 2018, "Shampoo"), each with its share of the
    damping (Martens and Grosse 2015, "K-FAC", section 6.3). Vectors, and sides longer than 1,024,
    have diagonal factors; rows of embeddings share one scale. The method is not in the papers.

    Guarantee:
        The same as without: the coordinates depend on public features and private weights alone,
        and gradients are clipped to ``l2_norm_clip`` and noised in them. The public examples are
        drawn independently of the batch.

    Args:
        num_examples: public examples in each step, at least 2.
        damping: added to the curvature over its mean, above zero.
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
        self.damping = _validate.positive_finite("damping", self.damping)
        self.momentum = _validate.number_in("momentum", self.momentum, "[0, 1)")

    def initial_state(self, shapes: list[tuple[int, ...]]) -> Any:
        """Returns the averages so far: zeros (coordinates do not depend on their size)."""
        return [[tf.zeros(side) for side in _sides(shape)] for shape in shapes]

    def coordinates(
        self, vertices: VertexLosses, state: Setting[Any]
    ) -> tuple[list[Coordinates], Any]:
        """Returns those of each weight, and the next state.

        Mapped back from them, the noise has the same total variance as without.

        Args:
            vertices: the public examples of this step, on each replica its own.
            state: from ``initial_state`` or the last step.
        """
        gradients, are_tables = self._gradients(vertices)
        averages = [
            [
                self.momentum * old + (1.0 - self.momentum) * new
                for old, new in zip(sides, _moments(gradient, sides), strict=True)
            ]
            for sides, gradient in zip(state, gradients, strict=True)
        ]
        shapes = [tuple(gradient.shape) for gradient in gradients]
        return self._whitening(averages, shapes, are_tables), averages

    def _whitening(
        self, averages: Any, shapes: list[tuple[int, ...]], are_tables: list[bool]
    ) -> list[Coordinates]:
        """Returns the coordinates in which the damped curvature is the same everywhere."""
        sizes = [float(math.prod(shape)) for shape in shapes]
        # Each factor of a weight has the trace of the weight's whole curvature.
        traces = [tf.reduce_sum(_diagonal(sides[-1])) for sides in averages]
        # A model without any curvature keeps its coordinates.
        mean = tf.maximum(tf.add_n(traces) / sum(sizes), 1e-30)
        maps, variances = [], []
        for sides, size, trace, is_table in zip(averages, sizes, traces, are_tables, strict=True):
            used = sides[-1:] if is_table else sides
            roots = [self._inverse_root(side, trace / size / mean, len(used)) for side in used]
            maps.append(([None, *roots][-2], transposed(roots[-1])))
            # Of the noise: for each row and column the squared length of its vector.
            lengths = [tf.reduce_sum(tf.square(root)) / root.shape[0] for root in roots]
            variances.append(size * tf.reduce_prod(lengths))
        scale = tf.sqrt(sum(sizes) / tf.add_n(variances))
        return [Coordinates(left, scale * right) for left, right in maps]

    def _inverse_root(self, side: tf.Tensor, curvature: tf.Tensor, factors: int) -> tf.Tensor:
        mean = tf.pow(curvature, 1.0 / factors)
        factor = side * (mean / tf.maximum(tf.reduce_mean(_diagonal(side)), 1e-30))
        # With less than a thousandth, single precision confuses low rank with negative.
        damping = tf.maximum(self.damping ** (1.0 / factors), 1e-3 * mean)
        if side.shape.rank == 1:
            return tf.math.rsqrt(factor + damping)
        identity = tf.eye(side.shape[0])
        root = tf.linalg.cholesky(factor + damping * identity)
        return tf.linalg.triangular_solve(root, identity)

    def _gradients(self, vertices: VertexLosses) -> tuple[list[tf.Tensor], list[bool]]:
        """Returns gradients for labels drawn from the predictions; true for those of embeddings."""
        logits = tf.math.log(tf.maximum(vertices.predictions(), 1e-30))
        drawn = tf.random.categorical(tf.stop_gradient(logits), 1)[:, 0]
        variables = [variable.value for variable in vertices.variables]
        with tf.GradientTape() as tape:  # of a sum, whose terms are not too small for float16
            total = tf.reduce_sum(tf.gather(vertices.losses(), drawn, batch_dims=1))
        parts = tape.gradient(total, variables, unconnected_gradients="zero")
        tables = [isinstance(part, tf.IndexedSlices) for part in parts]
        gradients = [tf.cast(tf.convert_to_tensor(part), tf.float32) for part in parts]
        replicas = tf.distribute.get_replica_context()
        if replicas.num_replicas_in_sync > 1:  # each has a part of the examples
            gradients = replicas.all_reduce(tf.distribute.ReduceOp.MEAN, gradients)
        # The average outlives a step in which float16 overflows.
        return [tf.where(tf.math.is_finite(part), part, 0.0) for part in gradients], tables

    def get_config(self) -> dict[str, Any]:
        """Returns every constructor argument."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: Setting[dict[str, Any]]) -> GaussNewton:
        """Returns the preconditioner that ``get_config`` described."""
        return cls(**config)


def _diagonal(side: tf.Tensor) -> tf.Tensor:
    return side if side.shape.rank == 1 else tf.linalg.diag_part(side)


def _sides(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns the shapes of a weight's factors: one of a vector, left and right of a matrix."""
    if len(shape) < 2:
        return [(math.prod(shape),)]
    lengths = math.prod(shape[:-1]), shape[-1]
    return [(n, n) if n <= _LONGEST else (n,) for n in lengths]


def _moments(gradient: tf.Tensor, sides: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns ``M M^T`` and ``M^T M`` of a gradient M, or their diagonals, as the sides are."""
    matrix = tf.reshape(gradient, (-1, sides[-1].shape[0]))
    return [
        tf.reduce_sum(tf.square(rows), axis=1)
        if side.shape.rank == 1
        else tf.matmul(rows, rows, transpose_b=True)
        for side, rows in zip(sides, [matrix, tf.transpose(matrix)][-len(sides) :], strict=True)
    ]
