"""Coordinates for clipping and noise, from the curvature on public features."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import keras
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.accounting import Setting
from tf_labeldp.gradients.clip import Coordinates
from tf_labeldp.training._configured import Stateful
from tf_labeldp.training._vertex_losses import VertexLosses

_LONGEST = 1024
"""Longest side of a full factor, whose inversion takes cubic time; longer ones are diagonal."""


@keras.saving.register_keras_serializable(package="tf_labeldp")
@dataclasses.dataclass(eq=False)
class GaussNewton(Stateful):
    """Whitens the gradient of each weight by two factors of its curvature, without labels.

    Noise hurts most in directions of high curvature. Coordinates of nearly uniform curvature move
    noise from there to where the loss is flat. The step is taken in these coordinates too: it is a
    damped Gauss-Newton step.

    For labels drawn from the model's predictions, the covariance of the mean gradient of
    cross-entropy is proportional to the Gauss-Newton matrix (Liu et al. 2023, "Sophia", section
    2.3). For a weight with gradient M it is approximated by the Kronecker product of ``E[M M^T]``
    and ``E[M^T M]``, averages over steps (Gupta et al. 2018, "Shampoo"), each with its share of the
    damping (Martens and Grosse 2015, "K-FAC", section 6.3). Vectors, and sides longer than 1,024,
    have diagonal factors; rows of embeddings share one scale. The method is not in the papers.

    Cond-DP (Jiang, Krichene and Mayoraz 2026, "Private learning with public feature conditioning",
    arXiv 2606.18773) conditions the first linear layer alone, once, by the inverse square root of
    the second moments of all public features; here each layer has both sides, and the curvature
    follows the weights.

    Guarantee:
        The guarantee is that of the step without it: the coordinates depend on public features and
        private weights alone, and gradients are clipped to ``l2_norm_clip`` and noised in them. The
        public examples are drawn independently of the batch.

    Args:
        num_examples: public examples per step, at least 2.
        damping: added to the curvature relative to its mean, above zero.
        momentum: momentum of the averages over steps, in [0, 1).

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
        """Returns zeros: coordinates do not depend on the scale of the averages."""
        return [[tf.zeros(side) for side in _sides(shape)] for shape in shapes]

    def coordinates(
        self, vertices: VertexLosses, state: Setting[Any]
    ) -> tuple[list[Coordinates], Any]:
        """Returns the coordinates of each weight, and the next state.

        Mapped back to the weights, the noise keeps its total variance.

        Args:
            vertices: the public examples of this step, different ones on each replica.
            state: from ``initial_state`` or the previous step.
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
        sizes = [float(math.prod(shape)) for shape in shapes]
        # Each factor of a weight has the trace of the weight's whole curvature: both M M^T and
        # M^T M have the trace |M|^2.
        traces = [tf.reduce_sum(_diagonal(sides[-1])) for sides in averages]
        # A model without curvature keeps its coordinates.
        mean = tf.maximum(tf.add_n(traces) / sum(sizes), 1e-30)
        maps, variances = [], []
        for sides, size, trace, is_table in zip(averages, sizes, traces, are_tables, strict=True):
            used = sides[-1:] if is_table else sides
            roots = [self._inverse_root(side, trace / size / mean, len(used)) for side in used]
            maps.append(([None, *roots][-2], tf.transpose(roots[-1])))
            # The noise variance of a weight is the product of mean squared row lengths.
            lengths = [tf.reduce_sum(tf.square(root)) / root.shape[0] for root in roots]
            variances.append(size * tf.reduce_prod(lengths))
        scale = tf.sqrt(sum(sizes) / tf.add_n(variances))
        return [Coordinates(left, scale * right) for left, right in maps]

    def _inverse_root(self, side: tf.Tensor, curvature: tf.Tensor, factors: int) -> tf.Tensor:
        mean = tf.pow(curvature, 1.0 / factors)
        factor = side * (mean / tf.maximum(tf.reduce_mean(_diagonal(side)), 1e-30))
        # Below a thousandth, low rank in single precision may look negative.
        damping = tf.maximum(self.damping ** (1.0 / factors), 1e-3 * mean)
        if side.shape.rank == 1:
            return tf.math.rsqrt(factor + damping)
        identity = tf.eye(side.shape[0])
        # The inverse of a Cholesky factor whitens as well as that of a symmetric root, which would
        # need eigenvalues: they differ by a rotation, which changes neither norms nor the
        # distribution of the noise.
        root = tf.linalg.cholesky(factor + damping * identity)
        return tf.linalg.triangular_solve(root, identity)

    def _gradients(self, vertices: VertexLosses) -> tuple[list[tf.Tensor], list[bool]]:
        """Returns gradients for labels drawn from the predictions, and which are of embeddings."""
        logits = tf.math.log(tf.maximum(vertices.predictions(), 1e-30))
        drawn = tf.random.categorical(tf.stop_gradient(logits), 1)[:, 0]
        variables = [variable.value for variable in vertices.variables]
        # The terms of a mean would underflow in float16.
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(tf.gather(vertices.losses(), drawn, batch_dims=1))
        parts = tape.gradient(total, variables, unconnected_gradients="zero")
        tables = [isinstance(part, tf.IndexedSlices) for part in parts]
        gradients = [tf.cast(tf.convert_to_tensor(part), tf.float32) for part in parts]
        replicas = tf.distribute.get_replica_context()
        if replicas.num_replicas_in_sync > 1:
            gradients = replicas.all_reduce(tf.distribute.ReduceOp.MEAN, gradients)
        # An overflow of float16 in one step must not spoil the average.
        return [tf.where(tf.math.is_finite(part), part, 0.0) for part in gradients], tables


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
