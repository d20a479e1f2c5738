"""Small Keras models for the benchmarks."""

from __future__ import annotations

import keras


def model_for(shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Returns ``small_cnn`` for (height, width, channels), ``small_mlp`` for flat features."""
    if len(shape) == 3:
        return small_cnn((shape[0], shape[1], shape[2]), num_classes)
    return small_mlp(shape[0], num_classes)


def small_cnn(input_shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    """Returns the CNN of ``ghazi2024``, Table 10(a), which ends in logits.

    Two 3x3 convolutions of 16 channels, each with 2x2 average pooling, and a dense layer of 16:
    9,066 weights for 28x28x1 inputs and 10 classes.
    """
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input(input_shape),
            layers.Conv2D(16, 3, activation="relu"),
            layers.AveragePooling2D(2),
            layers.Conv2D(16, 3, activation="relu"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(16, activation="relu"),
            layers.Dense(num_classes),
        ]
    )


def small_mlp(num_features: int, num_classes: int, units: int = 64) -> keras.Model:
    """Returns a perceptron with one hidden layer, which ends in logits."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((num_features,)),
            layers.Dense(units, activation="relu"),
            layers.Dense(num_classes),
        ]
    )
