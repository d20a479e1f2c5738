"""Random views of images by Keras layers; any backend."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tf_labeldp import _validate


def weak_views(*, shift: float = 0.125, flip: bool = False) -> keras.Sequential:
    """Returns layers that shift images a little and optionally mirror them.

    Args:
        shift: largest shift as a share of height and width, in [0, 1).
        flip: whether a mirrored image keeps its class: true for photographs and clothes, false for
            digits and letters.

    Example:
        >>> weak_views(flip=True)(np.zeros((2, 28, 28, 1)), training=True).shape
        TensorShape([2, 28, 28, 1])
    """
    shift = _validate.number_in("shift", shift, "[0, 1)")
    layers: list[Any] = [keras.layers.RandomFlip("horizontal")] if flip else []
    layers.append(keras.layers.RandomTranslation(shift, shift, fill_mode="constant"))
    return keras.Sequential(layers, name="weak_views")


def strong_views(
    *, shift: float = 0.125, flip: bool = False, strength: float = 0.3
) -> keras.Sequential:
    """Returns layers that shift, rotate, zoom, shade and partly erase images.

    The paper's strong view, two operations of RandAugment and an erased square, is
    ``keras.Sequential([weak_views(flip=True), keras.layers.RandAugment((0, 1)),
    keras.layers.RandomErasing(value_range=(0, 1))])`` with Keras 3.9; it is many times slower on a
    CPU. Nothing is erased before Keras 3.9.

    Args:
        shift: as for ``weak_views``.
        flip: as for ``weak_views``.
        strength: strength of brightness, contrast and zoom, in (0, 1); rotations reach
            ``strength / 6`` of a full turn.

    Example:
        >>> strong_views()(np.zeros((2, 32, 32, 3)), training=True).shape
        TensorShape([2, 32, 32, 3])
    """
    strength = _validate.number_in("strength", strength, "(0, 1)")
    layers = [
        weak_views(shift=shift, flip=flip),
        keras.layers.RandomRotation(strength / 6, fill_mode="constant"),
        keras.layers.RandomZoom(strength, strength, fill_mode="constant"),
        keras.layers.RandomBrightness(strength, value_range=(0.0, 1.0)),
        keras.layers.RandomContrast(strength, value_range=(0.0, 1.0)),
    ]
    # Keras has RandomErasing since 3.9.
    if hasattr(keras.layers, "RandomErasing"):
        layers.append(keras.layers.RandomErasing(value_range=(0.0, 1.0)))
    return keras.Sequential(layers, name="strong_views")


def checked_images(images: Any) -> np.ndarray:
    """Returns images as ``float32`` (n, height, width, channels) in [0, 1], or raises."""
    array = np.asarray(images)
    if array.ndim != 4:
        hint = "Add the channel of grey images with images[..., None]."
        if array.ndim == 2:
            hint = "For rows of a table, give views of rows, such as keras.layers.GaussianNoise."
        raise ValueError(
            f"images must have shape (n, height, width, channels), got {array.shape}. {hint}"
        )
    if array.dtype.kind not in "f" or not array.size:
        raise ValueError(
            f"images must be floats in [0, 1], got {array.dtype}. Divide bytes by 255."
        )
    low, high = float(array.min()), float(array.max())
    if not (low >= 0.0 and high <= 1.0):
        raise ValueError(
            f"images must be in [0, 1], got values in [{low:g}, {high:g}]. Divide by the largest "
            "value, or give your own views= for these values."
        )
    return array.astype(np.float32, copy=False)
