"""The network of ``PrivateClassifier(method="network")``, and views for networks of images."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from tf_labeldp.vault import LabelKind

WIDTHS = (32, 64, 128)
"""Filters at full, half and a quarter of the resolution."""


def image_network(images: np.ndarray, kind: LabelKind) -> Any:
    """Returns a residual network from images, also of bytes or without channels, to logits (n, K).

    Its weights are the same in every call. The images' means and variances, by channel, are public.
    """
    import keras

    layers = keras.layers
    shape = images.shape[1:]
    channels = images.reshape(-1, shape[2] if len(shape) == 3 else 1)
    mean, variance = (moment(axis=0, dtype=np.float64) for moment in (channels.mean, channels.var))
    seeds = itertools.count()

    def block(x: Any, width: int, strides: int = 1) -> Any:
        start = keras.initializers.HeNormal(next(seeds))
        options = {"strides": strides, "padding": "same", "use_bias": False}
        x = layers.Conv2D(width, 3, kernel_initializer=start, **options)(x)
        # Few examples are few steps, in which the averages for predictions have to settle.
        return layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))

    inputs = keras.Input(shape)
    x = inputs if len(shape) == 3 else layers.Reshape((*shape, 1))(inputs)
    x = layers.Normalization(mean=mean.tolist(), variance=variance.tolist())(x)
    x = block(x, WIDTHS[0])
    for width in WIDTHS[1:]:
        x = block(x, width, strides=2)
        x = layers.Add()([x, block(block(x, width), width)])
    pooled = [layers.GlobalAveragePooling2D()(x), layers.GlobalMaxPooling2D()(x)]
    start = keras.initializers.GlorotUniform(next(seeds))
    dense = layers.Dense(kind.num_classes, kernel_initializer=start, dtype="float32")
    logits = dense(layers.Concatenate()(pooled))
    return keras.Model(inputs, logits, name="image_network")


def image_views(shape: tuple[int, ...], mirrored: bool) -> Any:
    """Returns weak views of images of a shape, with or without channels."""
    import keras

    from tf_labeldp.self_supervised import weak_views

    views = weak_views(shift=0.07, flip=mirrored)
    if len(shape) != 2:
        return views
    # Keras takes images (n, height, width) for one image.
    reshape = keras.layers.Reshape
    return keras.Sequential([reshape((*shape, 1)), views, reshape(shape)])
