"""The rule of GroupNormalization, whose layer is computed on three axes.

Keras's formula works on five axes, (B, height, width, groups, channels per group), where sums and
products take several times as long as on (B, positions, channels). Its sums over positions, which
the gradient of the inputs needs anyway, are the gradients of the weights for each example.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_labeldp.gradients._layer_rules import Factors, LayerRule, Rule, TappedLayer, Taps, rule_of


@dataclasses.dataclass(frozen=True)
class VectorRule(Rule):
    """Vectors whose gradients for each row are formed already: (B, vectors, channels)."""

    vectors: int
    channels: int

    @property
    def num_weights(self) -> int:
        return self.vectors * self.channels

    def plain_gradients(self, taps: Taps) -> list[tf.Tensor]:
        shape = taps.groups, taps.group_size, self.vectors, self.channels
        return tf.unstack(tf.reduce_sum(tf.reshape(taps.output_gradients, shape), axis=1), axis=1)


class TappedGroupNormalization(keras.layers.Layer):
    """Returns the outputs of a GroupNormalization layer, whose weights it shares."""

    def __init__(self, layer: Any) -> None:
        super().__init__(name=layer.name, dtype=layer.dtype_policy)
        self.layer = layer
        self.supports_masking = True

    @property
    def axis(self) -> int:
        return self.layer.axis

    def call(self, inputs: tf.Tensor) -> tuple[tf.Tensor]:
        layer, x = self.layer, self.channels_last(inputs)
        scale = tf.ones(x.shape[-1:]) if layer.gamma is None else layer.gamma
        offset = tf.zeros(x.shape[-1:]) if layer.beta is None else layer.beta
        weights = [tf.cast(tf.convert_to_tensor(part), tf.float32) for part in (scale, offset)]
        outputs = self.channels_last(self._normalized(x, *weights), back=True)
        return (tf.cast(outputs, self.compute_dtype),)

    def channels_last(self, values: tf.Tensor, back: bool = False) -> tf.Tensor:
        """Returns values (B, ..., channels), or maps them back, in float32."""
        values, rank = tf.cast(values, tf.float32), values.shape.rank
        axis, order = self.axis % rank, [*range(rank)]
        if axis == rank - 1:
            return values
        order.insert(*((axis, order.pop()) if back else (rank - 1, order.pop(axis))))
        return tf.transpose(values, order)

    def weight_gradients(self, x: tf.Tensor, gradients: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the gradients (B, 1, channels) of scale and offset for each example.

        ``x`` and the gradients of the outputs are (B, ..., channels).
        """
        x, gradients = _flat(x), _flat(gradients)
        mean, inverse = self._moments(x)
        offset = tf.reduce_sum(gradients, axis=1, keepdims=True)
        products = tf.reduce_sum(x * gradients, axis=1, keepdims=True)
        return inverse * (products - mean * offset), offset

    @tf.custom_gradient
    def _normalized(
        self, inputs: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor
    ) -> tuple[tf.Tensor, Callable[[tf.Tensor], list[tf.Tensor]]]:
        x = _flat(inputs)
        mean, inverse = self._moments(x)
        factor = inverse * scale

        def backward(gradients: tf.Tensor) -> list[tf.Tensor]:
            scales, offsets = self.weight_gradients(inputs, gradients)
            positions = tf.cast(tf.shape(x)[1], tf.float32)
            slope = tf.square(inverse) * self._by_group(scale * scales) / positions
            constant = slope * mean - inverse * self._by_group(scale * offsets) / positions
            gradient = factor * _flat(gradients) - slope * x + constant
            sums = [tf.reduce_sum(part, axis=(0, 1)) for part in (scales, offsets)]
            return [tf.reshape(gradient, tf.shape(inputs)), *sums]

        outputs = x * factor + (offset - mean * factor)
        return tf.reshape(outputs, tf.shape(inputs)), backward

    def _moments(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns mean and inverse standard deviation (B, 1, channels) of each channel's group."""
        mean = self._by_group(tf.reduce_mean(x, axis=1, keepdims=True))
        variance = self._by_group(tf.reduce_mean(tf.square(x - mean), axis=1, keepdims=True))
        return mean, tf.math.rsqrt(variance + self.layer.epsilon)

    def _by_group(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the mean over each channel's group of values (B, 1, channels)."""
        groups = self.layer.groups
        grouped = tf.reshape(values, (-1, 1, groups, values.shape[-1] // groups))
        means = tf.reduce_mean(grouped, axis=-1, keepdims=True)
        return tf.reshape(tf.broadcast_to(means, tf.shape(grouped)), tf.shape(values))


@rule_of(keras.layers.GroupNormalization)
def _group_normalization(layer: Any, input_shape: tuple[int | None, ...]) -> TappedLayer:
    tapped = TappedGroupNormalization(layer)
    trained = {id(variable) for variable in layer.trainable_variables}
    is_trained = [id(variable) in trained for variable in (layer.gamma, layer.beta)]

    def factors(inputs: tf.Tensor, outputs: tf.Tensor, gradients: tf.Tensor) -> Factors:
        inputs = tf.cast(inputs, layer.compute_dtype)
        both = tapped.weight_gradients(*map(tapped.channels_last, (inputs, gradients)))
        own = [part for part, chosen in zip(both, is_trained, strict=True) if chosen]
        formed = tf.concat(own, axis=1) if own else both[0][:, :0]
        return formed, formed

    weights = zip((layer.gamma, layer.beta), is_trained, strict=True)
    variables = tuple(variable for variable, chosen in weights if chosen)
    rule = VectorRule(len(variables), input_shape[layer.axis] or 0)
    return TappedLayer(tapped, [LayerRule(rule, variables, factors)])


def _flat(values: tf.Tensor) -> tf.Tensor:
    """Returns values (B, positions, channels)."""
    batch = values.shape[0] or tf.shape(values)[0]
    return tf.reshape(values, (batch, -1, values.shape[-1]))
