"""Random views of images by Keras layers; any backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tf_labeldp import _validate
from tf_labeldp.self_supervised.view_layers import (
    OPERATIONS,
    ColorJitter,
    Cutout,
    RandAugment,
    RandomBlur,
    RandomResizedCrop,
    RandomWarp,
)


def weak_views(*, shift: float = 0.125, flip: bool = False) -> keras.layers.Layer:
    """Returns a layer that shifts images a little and optionally mirrors them.

    The layers of all views draw for each image on its own, and XLA compiles them.

    Args:
        shift: largest shift as a share of height and width, in [0, 1).
        flip: whether a mirrored image keeps its class: true for photographs and clothes, false for
            digits and letters.

    Example:
        >>> weak_views(flip=True)(np.zeros((2, 28, 28, 1)), training=True).shape
        TensorShape([2, 28, 28, 1])
    """
    shift = _validate.number_in("shift", shift, "[0, 1)")
    return RandomWarp(shift, _validate.boolean("flip", flip), name="weak_views")


@_validate.takes_old_arguments
def strong_views(
    *, shift: float = 0.125, flip: bool = False, strength: float = 0.3
) -> keras.Sequential:
    """Returns layers that shift, rotate, zoom, shade and partly erase images.

    Brightness, contrast and zoom change by up to 0.3, rotations reach a twentieth of a full turn.
    They are our own and take the least time. ``rand_augment_views`` and ``sim_clr_views`` are those
    of the papers.

    Args:
        shift: as for ``weak_views``.
        flip: as for ``weak_views``.

    Example:
        >>> strong_views()(np.zeros((2, 32, 32, 3)), training=True).shape
        TensorShape([2, 32, 32, 3])
    """
    strength = _validate.number_in("strength", strength, "(0, 1)")
    shift = _validate.number_in("shift", shift, "[0, 1)")
    layers = [
        RandomWarp(shift, _validate.boolean("flip", flip), strength / 6, strength),
        keras.layers.RandomBrightness(strength, value_range=(0.0, 1.0)),
        keras.layers.RandomContrast(strength, value_range=(0.0, 1.0)),
        Cutout(0.15, 0.55),
    ]
    return keras.Sequential(layers, name="strong_views")


def rand_augment_views(
    *,
    shift: float = 0.125,
    flip: bool = False,
    operations: int = 2,
    reach: float = 0.3,
    cutout: tuple[float, float] = (0.5, 0.5),
    choices: Sequence[str] | None = None,
) -> keras.Sequential:
    """Returns the strong views of FixMatch: RandAugment's operations, and a Cutout.

    Each image draws its operations, with replacement, and their strengths, uniform in the paper's
    ranges: ``brightness``, ``color``, ``contrast`` and ``sharpness`` 0.05 to 0.95 of the image,
    ``posterize`` to 4 to 8 bits, ``solarize`` from a threshold in [0, 1], ``rotate`` up to 30
    degrees, ``shear_x``, ``shear_y``, ``translate_x`` and ``translate_y`` up to ``reach``, and
    ``identity``, ``autocontrast`` and ``equalize``. All geometric operations of an image are one
    bilinear warp, after those on colours. A warp leaves black borders, and the square is grey.

    Source: Sohn et al., "FixMatch" (2020), appendix D; Cubuk et al., "RandAugment" (2020). The
    public code of FixMatch leaves each operation out with probability 1/2, which the paper does
    not. The views of SCAN's authors are ``rand_augment_views(shift=0.0, flip=True, operations=4,
    reach=0.1, cutout=(0.0, 0.5))``.

    Args:
        shift: as for ``weak_views``; the shift comes first.
        flip: as for ``weak_views``.
        operations: number of operations per image, at least 0.
        reach: largest shear and shift of an operation, as a share in [0, 1).
        cutout: smallest and largest side of the erased square, as shares of the shorter side of the
            image in [0, 1]; zeros for none.
        choices: names of operations to draw from, as above; None for all 14.

    Raises:
        ValueError: arguments out of range, or an unknown operation.

    Example:
        >>> rand_augment_views(flip=True)(np.zeros((2, 32, 32, 3)), training=True).shape
        TensorShape([2, 32, 32, 3])
    """
    names = list(dict.fromkeys(OPERATIONS if choices is None else choices))
    for name in names or [""]:
        _validate.one_of("choices", name, OPERATIONS)
    smallest, largest = (
        _validate.number_in("cutout", side, "[0, 1]") for side in _validate.pair("cutout", cutout)
    )
    if smallest > largest:
        raise ValueError(
            f"cutout must be a smallest and a largest side, got {cutout}. Swap the two."
        )
    augment = RandAugment(
        _validate.number_in("shift", shift, "[0, 1)"),
        _validate.boolean("flip", flip),
        _validate.integer_at_least("operations", operations, 0),
        _validate.number_in("reach", reach, "[0, 1)"),
        names,
    )
    layers = [augment, Cutout(smallest, largest)] if largest else [augment]
    return keras.Sequential(layers, name="rand_augment_views")


def sim_clr_views(
    *, flip: bool = False, smallest: float = 0.08, strength: float = 0.5, blur: bool = False
) -> keras.Sequential:
    """Returns the views of SimCLR: a resized crop, changed colours, grey scale and a blur.

    The crop has at least ``smallest`` of the area and a ratio of sides from 3/4 to 4/3. With
    probability 0.8, brightness, contrast and saturation change by a factor of up to 1 +- 0.8
    ``strength``, then the hue by up to 0.2 ``strength`` of the circle; with probability 0.2 the
    view is grey. Images of one channel change in brightness and contrast alone.

    Source: Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations"
    (2020), appendix A; strength 0.5 without blur is that of CIFAR-10 (appendix B.9). SCAN's authors
    use ``smallest=0.2``. Both mirror images.

    Args:
        flip: as for ``weak_views``.
        smallest: smallest share of the area, in (0, 1].
        strength: strength of the changes of colours, in [0, 1.25].
        blur: whether half of the views are blurred, as for ImageNet.

    Example:
        >>> sim_clr_views(flip=True)(np.zeros((2, 32, 32, 3)), training=True).shape
        TensorShape([2, 32, 32, 3])
    """
    smallest = _validate.number_in("smallest", smallest, "(0, 1]")
    strength = _validate.number_in("strength", strength, "[0, 1.25]")
    change = 0.8 * strength
    layers = [
        RandomResizedCrop(smallest, _validate.boolean("flip", flip)),
        ColorJitter(change, change, change, 0.2 * strength),
    ]
    if _validate.boolean("blur", blur):
        layers.append(RandomBlur())
    return keras.Sequential(layers, name="sim_clr_views")


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
