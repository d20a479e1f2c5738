"""The nets of the step-time benchmarks, with random inputs: times do not depend on them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from _models import small_cnn

CLASSES = 10
WORDS, LENGTH = 10_000, 64
MANY_WORDS = 100_000

layers = keras.layers


def perceptron() -> keras.Model:
    """Returns 784-1024-1024-10: 1.9 million weights."""
    stack = [keras.Input((784,)), layers.Dense(1024, "relu"), layers.Dense(1024, "relu")]
    return keras.Sequential([*stack, layers.Dense(CLASSES)])


def embedding() -> keras.Model:
    """Returns the mean of 64 embedded words, then a dense layer: 10 million weights."""
    stack = [keras.Input((LENGTH,), dtype="int32"), layers.Embedding(MANY_WORDS, 100)]
    return keras.Sequential([*stack, layers.GlobalAveragePooling1D(), layers.Dense(CLASSES)])


def _normalized(x: Any, filters: int, stride: int = 1) -> Any:
    x = layers.Conv2D(filters, 3, strides=stride, padding="same", use_bias=False)(x)
    return layers.GroupNormalization(8)(x)


def resnet(blocks: int = 3) -> keras.Model:
    """Returns the ResNet of He et al. (2016) for 32x32x3, 20 layers, with GroupNormalization."""
    inputs = keras.Input((32, 32, 3))
    x = layers.Activation("relu")(_normalized(inputs, 16))
    for stage, filters in enumerate((16, 32, 64)):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            y = layers.Activation("relu")(_normalized(x, filters, stride))
            y = _normalized(y, filters)
            if stride > 1:
                x = layers.Conv2D(filters, 1, strides=stride, use_bias=False)(x)
            x = layers.Activation("relu")(layers.add([x, y]))
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))


class PositionEmbedding(layers.Layer):
    """Adds a learned vector per position."""

    def build(self, input_shape: tuple[int, ...]) -> None:
        self.position = self.add_weight(shape=input_shape[1:], name="position")

    def call(self, inputs: Any) -> Any:
        return inputs + self.position


def _block(x: Any, width: int, heads: int) -> Any:
    y = layers.LayerNormalization()(x)
    y = layers.MultiHeadAttention(heads, width // heads)(y, y)
    x = layers.add([x, y])
    y = layers.LayerNormalization()(x)
    y = layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(y))
    return layers.add([x, y])


def _transformer(inputs: Any, x: Any, width: int, blocks: int, heads: int) -> keras.Model:
    x = PositionEmbedding()(x)
    for _ in range(blocks):
        x = _block(x, width, heads)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(CLASSES)(x))


def token_transformer(width: int = 64, blocks: int = 4, heads: int = 4) -> keras.Model:
    """Returns a pre-norm encoder over 64 words of a vocabulary of 10,000."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    return _transformer(inputs, layers.Embedding(WORDS, width)(inputs), width, blocks, heads)


def patch_transformer(width: int = 64, blocks: int = 4, heads: int = 4) -> keras.Model:
    """Returns a vision transformer over 49 patches of 4x4 pixels of a 28x28 image."""
    inputs = keras.Input((28, 28, 1))
    x = layers.Conv2D(width, 4, strides=4)(inputs)
    return _transformer(inputs, layers.Reshape((49, width))(x), width, blocks, heads)


def lstm(width: int = 64) -> keras.Model:
    """Returns an LSTM over 64 words of a vocabulary of 10,000."""
    stack = [keras.Input((LENGTH,), dtype="int32"), layers.Embedding(WORDS, width)]
    return keras.Sequential([*stack, layers.LSTM(width), layers.Dense(CLASSES)])


def cnn() -> keras.Model:
    """Returns the CNN of ``ghazi2024``, Table 10(a)."""
    return small_cnn((28, 28, 1), CLASSES)


NETS = {
    net.__name__: net
    for net in (cnn, perceptron, embedding, resnet, token_transformer, patch_transformer, lstm)
}


def random_batch(model: keras.Model, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs (batch, *shape), float32 or int32, and labels (batch,)."""
    rng = np.random.default_rng(0)
    shape, words = (batch, *model.input_shape[1:]), None
    for layer in model.layers:
        if isinstance(layer, layers.Embedding):
            words = layer.input_dim
    if words is None:
        x = rng.random(shape, dtype=np.float32)
    else:
        x = rng.integers(words, size=shape, dtype=np.int32)
    return x, rng.integers(CLASSES, size=batch)
