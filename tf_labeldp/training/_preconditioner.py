"""Coordinates in which to clip and to add noise, from the curvature that public features give."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.training._vertex_losses import VertexLosses


@keras.saving.register_keras_serializable(package="tf_labeldp")
@dataclasses.dataclass(eq=False)
class GaussNewton:
    """Scales by a power of the diagonal of the Gauss-Newton matrix, which needs no label.

    Noise hurts most in directions of high curvature. In the coordinates ``w / s`` with
    ``s = (h + damping)^(-power / 2)``, where ``h`` is the diagonal over its mean, there is less of
    it there, and more where the loss is flat. The step is taken in these coordinates too, so that
    the noisy gradient is scaled by ``h^-power`` in all: between gradient descent (0) and Newton's
    method (1).

    The diagonal is that of cross-entropy, averaged over steps, by the Gauss-Newton-Bartlett
    estimator: ``n`` times the square of the mean gradient for labels drawn from the model's own
    predictions (Liu et al. 2023, "Sophia", section 2.3). The method is not in the papers.

    Guarantee:
        The same as without scales: they are made of public features and of weights that are private
        already, without a label, and the scaled gradients are clipped to ``l2_norm_clip`` and
        noised as unscaled ones. The public examples are drawn independently of the batch.

    Args:
        num_examples: public examples in each step, at least 2.
        power: of the curvature, in (0, 1].
        damping: added to the curvature over its mean, above zero.
        momentum: of the average over steps, in [0, 1).

    Raises:
        ValueError: an argument out of range.

    Example:
        >>> GaussNewton().get_config()["power"]
        1.0
    """

    num_examples: int = 256
    power: float = 1.0
    damping: float = 0.1
    momentum: float = 0.95

    def __post_init__(self) -> None:
        self.num_examples = _validate.integer_at_least("num_examples", self.num_examples, 2)
        self.power = _validate.number_in("power", self.power, "(0, 1]")
        self.damping = _validate.positive_finite("damping", self.damping)
        self.momentum = _validate.number_in("momentum", self.momentum, "[0, 1)")

    def initial_state(self, shapes: list[tuple[int, ...]]) -> Any:
        """Returns the average so far: zeros (scales do not depend on its size)."""
        return [tf.zeros(shape) for shape in shapes]

    def scales(self, vertices: VertexLosses, state: Any) -> tuple[list[tf.Tensor], Any]:
        """Returns a positive factor for each weight, of mean one, and the next state.

        Args:
            vertices: the public examples of this step, on each replica those that it has.
            state: from ``initial_state`` or the last step.
        """
        average = [
            self.momentum * old + (1.0 - self.momentum) * new
            for old, new in zip(state, self._curvature(vertices), strict=True)
        ]
        entries = tf.cast(sum(tf.size(part) for part in average), tf.float32)
        mean = tf.add_n([tf.reduce_sum(part) for part in average]) / entries
        floor = tf.constant(1e-30)  # of a model without any curvature, which then has scales of one
        raw = [
            tf.pow(part / tf.maximum(mean, floor) + self.damping, -self.power / 2.0)
            for part in average
        ]
        scale = entries / tf.add_n([tf.reduce_sum(part) for part in raw])
        return [part * scale for part in raw], average

    def _curvature(self, vertices: VertexLosses) -> list[tf.Tensor]:
        """Returns an unbiased estimate of the diagonal, one tensor a variable."""
        logits = tf.math.log(tf.maximum(vertices.predictions(), 1e-30))
        drawn = tf.random.categorical(tf.stop_gradient(logits), 1)[:, 0]
        variables = [variable.value for variable in vertices.variables]
        with tf.GradientTape() as tape:
            mean = tf.reduce_mean(tf.gather(vertices.losses(), drawn, batch_dims=1))
        gradients = tape.gradient(mean, variables, unconnected_gradients="zero")
        gradients = [tf.cast(tf.convert_to_tensor(part), tf.float32) for part in gradients]
        examples = tf.cast(tf.shape(drawn)[0], tf.float32)
        replicas = tf.distribute.get_replica_context()
        if replicas.num_replicas_in_sync > 1:  # each has a part of the examples
            gradients = replicas.all_reduce(tf.distribute.ReduceOp.MEAN, gradients)
            examples *= replicas.num_replicas_in_sync
        return [examples * tf.square(part) for part in gradients]

    def get_config(self) -> dict[str, Any]:
        """Returns every constructor argument."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> GaussNewton:
        """Returns the preconditioner that ``get_config`` described."""
        return cls(**config)
