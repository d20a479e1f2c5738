"""Raw images in front of a Keras model: sizes, channels, and the range of pixel values.

A model that gets pixels in another range still gives features, only worse ones, so the ranges are
compared as far as they are known.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.features.estimator import RESHAPE
from tf_labeldp.features.tables import symbolic_inputs

_RANGES = {"0 to 255": (0.0, 255.0), "0 to 1": (0.0, 1.0), "-1 to 1": (-1.0, 1.0)}
"""The usual ranges of pixels, by the words of errors."""
_SIZE = 224
"""Height and width of images for models by name: that of most ImageNet training."""
_SMALL_SCALE = 1.0 / 32.0
"""A leading ``Rescaling`` with a smaller factor expects pixels to 255, with a larger one to 1."""
_LARGE_MEAN = 2.0
"""A leading ``Normalization`` with a larger mean expects pixels to 255."""
_LARGE_OVERSHOOT = 2.0
"""Pixels of 0 to 1 that were resized may exceed 1, but not this."""
_LARGE_DEVIATION = 16.0
"""Pixels that were divided by their standard deviation stay below this."""
_MOST_CHANNELS = 4
"""An image has at most these channels."""
_SKIPPED = ("InputLayer", "Resizing", "ZeroPadding2D", "Reshape", "CenterCrop", "Identity")
"""Layers that leave the range of pixels unchanged; those of random augmentation do too."""


@dataclasses.dataclass(frozen=True)
class Front:
    """The layers between raw images and a model.

    Attributes:
        shape: of a raw image.
        size: height and width for the model; None for those of the raw images.
        is_grey: whether the one channel is repeated three times.
        kernel: maps the channels of a pixel, (c, c) in nested tuples, before ``bias`` (c,) is
            added; None to leave the values as they are.
    """

    shape: tuple[int, ...]
    size: tuple[int, ...] | None = None
    is_grey: bool = False
    kernel: tuple[tuple[float, ...], ...] | None = None
    bias: tuple[float, ...] = ()

    def to_keras(self, model: Any) -> Any:
        """Returns a model from raw images to the outputs of a model."""
        import keras

        inputs = images = keras.Input(self.shape, name="images")
        if len(self.shape) == 2:
            images = keras.layers.Reshape((*self.shape, 1), name="channel")(images)
        if self.is_grey:
            images = keras.layers.Concatenate(name="grey_to_colour")([images] * 3)
        if self.size is not None:
            images = keras.layers.Resizing(*self.size, dtype="float32", name="resizing")(images)
        if self.kernel is not None:
            kernel, bias = np.array(self.kernel), np.array(self.bias)
            if np.array_equal(kernel, kernel[0, 0] * np.eye(len(kernel))):
                layer: Any = keras.layers.Rescaling(
                    float(kernel[0, 0]), bias.tolist(), dtype="float32", name="rescaling"
                )
                images = layer(images)
            else:
                layer = keras.layers.Dense(
                    len(bias), trainable=False, dtype="float32", name="preprocessing"
                )
                images = layer(images)
                layer.set_weights([kernel.astype(np.float32), bias.astype(np.float32)])
        return keras.Model(inputs, model(images), name="public_encoder")


def front_of(
    model: Any,
    first: Any,
    blocks: Iterator[Any],
    size: Any,
    pixel_range: tuple[float, float] | str | None,
    name: str,
) -> tuple[Front | None, tuple[float, float] | None]:
    """Returns the layers in front of a Keras model, and the range of the raw pixels.

    They are None if it takes the inputs as they are, and for inputs without a usual range.

    Args:
        model: a Keras model.
        first: the first rows of the inputs.
        blocks: all rows, for the range of pixels.
        size: as for ``PublicEncoder``.
        pixel_range: as for ``PublicEncoder``.
        name: of the model, for errors.

    Raises:
        TypeError: texts where the model takes numbers.
        ValueError: inputs that do not fit the model, or pixels in another or an unknown range.
    """
    expected = _image_shape(model, first, name)
    if expected is None:
        return None, None
    rows = first.shape[1:]
    channels = rows[2] if len(rows) == 3 else 1
    is_grey = _check_channels(rows, channels, expected[2], name)
    own = _size_for(expected[:2], rows[:2], size, name)
    found, ends = _range_of(blocks)
    kernel, bias = _mapping(model, found, ends, pixel_range, expected[2] or channels, name)
    resized = own if own != rows[:2] else None
    if resized and size is None and pixel_range is None:
        _validate.warn(
            f"the images are {rows[0]} x {rows[1]} and the encoder {name!r} takes {own[0]} x "
            f"{own[1]}: they are resized. Give PublicEncoder(model, size={own}) to say so."
        )
    front = Front(tuple(rows), resized, is_grey, kernel, bias)
    return None if front == Front(tuple(rows)) and len(rows) == 3 else front, found


def _image_shape(model: Any, first: Any, name: str) -> tuple[Any, ...] | None:
    """Returns height, width and channels of a model of images, whose first raw rows these are.

    Sides that may be any are None. The result is None for other models and inputs, which need no
    layers in front; raises if the model can't take them.
    """
    expected = _input_shape(model)
    if expected is None or symbolic_inputs(model).dtype == "string":
        return None
    is_array = isinstance(first, np.ndarray) and not first.dtype.names
    if isinstance(first, list) or (is_array and first.dtype.kind not in "biuf"):
        raise TypeError(
            f"expected numbers for the encoder {name!r}, got texts or objects. Give a function "
            "that turns them into its features."
        )
    if not is_array:
        return None
    if len(expected) == 3 == first.ndim and expected[2] == first.shape[2] <= _MOST_CHANNELS:
        raise ValueError(
            f"expected images of shape {_words(expected)} for the encoder {name!r}, got one of "
            f"shape {first.shape}. {RESHAPE}"
        )
    rows = first.shape[1:]
    if len(expected) == 3 and len(rows) in (2, 3):
        return expected
    if not _fits(expected, rows):
        raise ValueError(
            f"expected inputs of shape {_words(expected)} for the encoder {name!r}, got "
            f"{_words(rows)}. Reshape them."
        )
    return None


def _size_for(
    expected: tuple[Any, ...], found: tuple[int, ...], size: Any, name: str
) -> tuple[int, ...]:
    """Returns height and width for a model that takes ``expected``: a caller's, or its own."""
    if size is None:
        return tuple(
            own if side is None else side for side, own in zip(expected, found, strict=True)
        )
    pair = (size, size) if isinstance(size, (int, np.integer)) else tuple(size)
    own = tuple(_validate.integer_at_least("size", side, 1) for side in pair)
    if not _fits(expected, own):
        raise ValueError(
            f"expected size={expected} for the encoder {name!r}, got {own}. Leave size out."
        )
    return own


def check_rows(network: Any, rows: Any, fitted: tuple[float, float] | None) -> None:
    """Raises if raw images have another shape than a network takes, or another range than in fit.

    Args:
        network: a Keras model of raw inputs.
        rows: the inputs; all but arrays of numbers pass.
        fitted: the range of pixels in fit; None for any.
    """
    expected = _input_shape(network)
    if expected is None or not isinstance(rows, np.ndarray) or rows.dtype.kind not in "biuf":
        return
    if not _fits(expected, rows.shape[1:]):
        raise ValueError(
            f"expected inputs of shape {_words(expected)}, as in fit, got {rows.shape}. Reshape "
            "them; images[np.newaxis] is one image."
        )
    if fitted is None or not rows.size:
        return
    ends = float(rows.min()), float(rows.max())
    # Dark images of 0 to 255 have small values, too, but whole ones.
    is_unit = fitted[1] == 255.0 and ends[1] <= 1.0 and bool((rows != np.round(rows)).any())
    if is_unit or _is_outside(ends, fitted):
        raise ValueError(
            f"expected pixels of {fitted[0]:g} to {fitted[1]:g}, as in fit, got {ends[0]:g} to "
            f"{ends[1]:g}. Rescale the images."
        )


def application(name: str, weights: Any, size: Any) -> Any:
    """Returns a model of ``keras.applications`` without its top.

    Raises:
        OSError: the weights can't be read.
        ValueError: an unknown name.
    """
    import keras

    build = getattr(keras.applications, name, None)
    if not name[:1].isupper() or not callable(build):
        names = _application_names()
        close = difflib.get_close_matches(name, names, 3, 0.5) or names[:3]
        raise ValueError(
            f"expected the name of a model in keras.applications, got {name!r}. Choose for example "
            f"{', '.join(close)}."
        )
    side = (_SIZE, _SIZE) if size is None else size
    shape = (side, side, 3) if isinstance(side, (int, np.integer)) else (*side, 3)
    try:
        return build(include_top=False, weights=weights, input_shape=shape, pooling="avg")
    except ValueError:
        raise
    except Exception as error:  # Keras raises bare exceptions if a download fails.
        raise OSError(
            f"expected the weights of {name} on this machine or a network to fetch them, got: "
            f"{error} Give PublicEncoder({name!r}, weights=path) a file of weights, or a model."
        ) from error


def _input_shape(model: Any) -> tuple[Any, ...] | None:
    """Returns the shape of a model's one input, without the rows; None if it is not known."""
    inputs = symbolic_inputs(model)
    is_one = inputs is not None and not isinstance(inputs, (dict, list, tuple))
    return tuple(inputs.shape[1:]) if is_one else None


def _fits(expected: tuple[Any, ...], found: tuple[int, ...]) -> bool:
    """Returns whether a shape is the expected one, where None stands for any side."""
    return len(expected) == len(found) and all(
        side in (None, own) for side, own in zip(expected, found, strict=True)
    )


def _words(shape: tuple[Any, ...]) -> str:
    return f"(n, {', '.join('any' if side is None else str(side) for side in shape)})"


def _check_channels(rows: tuple[int, ...], channels: int, wanted: Any, name: str) -> bool:
    """Returns whether grey images need three channels; raises for other wrong channels."""
    if wanted in (None, channels):
        return False
    if len(rows) == 3 and rows[0] in (1, 3) and channels not in (1, 3, 4):
        hint = "Move the channels last: np.moveaxis(images, 1, -1)."
    elif wanted == 3 and channels == 1:
        return True
    elif wanted == 1:
        hint = "Make them grey: images.mean(axis=-1, keepdims=True)."
    elif wanted == 3 and channels == 4:
        hint = "Leave out the alpha channel: images[..., :3]."
    else:
        hint = "Give images with these channels."
    raise ValueError(
        f"expected images (n, height, width, {wanted}) for the encoder {name!r}, got "
        f"{_words(rows)}. {hint}"
    )


def _mapping(
    model: Any,
    found: tuple[float, float] | None,
    ends: tuple[float, float],
    pixel_range: Any,
    channels: int,
    name: str,
) -> tuple[Any, Any]:
    """Returns kernel and bias from raw pixels to those that the model expects; None for none."""
    if pixel_range is None:
        _check_range(model, found, ends, name)
        return None, ()
    if found is None:
        raise ValueError(
            f"expected pixels in one of the ranges {', '.join(_RANGES)} to rescale for the encoder "
            f"{name!r}, got {ends[0]:g} to {ends[1]:g}. Give raw images, or a model that takes "
            "these as they are."
        )
    low, high = found
    kernel, bias = np.eye(channels), np.zeros(channels)
    if isinstance(pixel_range, str):
        of_255, add = _preprocessing(pixel_range)
        scale = 255.0 / (high - low)
        kernel, bias = scale * of_255, add - scale * low * of_255.sum(axis=0)
    else:
        target = _validate.number_range(*_validate.pair("pixel_range", pixel_range))
        scale = (target[1] - target[0]) / (high - low)
        kernel, bias = scale * kernel, bias + target[0] - scale * low
    if np.array_equal(kernel, np.eye(len(kernel))) and not bias.any():
        return None, ()
    return tuple(map(tuple, kernel.tolist())), tuple(bias.tolist())


def _range_of(blocks: Iterator[Any]) -> tuple[tuple[float, float] | None, tuple[float, float]]:
    """Returns the usual range that holds all pixels, or None; and the least and largest pixel."""
    low, high, is_whole = np.inf, -np.inf, True
    for block in blocks:
        low, high = min(low, float(np.min(block))), max(high, float(np.max(block)))
        is_whole = is_whole and np.asarray(block).dtype.kind in "iu"
    if low < -1.0 or high > 255.0 or (low < 0.0 and high > 1.0) or not np.isfinite(high - low):
        return None, (low, high)
    if high > (1.0 if is_whole else _LARGE_OVERSHOOT):
        return _RANGES["0 to 255"], (low, high)
    if low < 0.0 and not is_whole:
        return _RANGES["-1 to 1"], (low, high)
    return (_RANGES["0 to 1"] if low >= 0.0 else None), (low, high)


def _is_outside(ends: tuple[float, float], pixel_range: tuple[float, float]) -> bool:
    """Returns whether pixels lie outside a range by more than resizing overshoots."""
    margin = (pixel_range[1] - pixel_range[0]) / 2.0
    return ends[0] < pixel_range[0] - margin or ends[1] > pixel_range[1] + margin


def _check_range(
    model: Any, found: tuple[float, float] | None, ends: tuple[float, float], name: str
) -> None:
    """Raises if pixels are in another range than the model expects, or if that must be asked."""
    if found is None:
        leading = _leading_range(model)
        is_small = leading == _RANGES["0 to 255"] and ends[1] <= _LARGE_DEVIATION
        if leading is not None and (is_small or _is_outside(ends, leading)):
            raise ValueError(
                f"expected pixels of {leading[0]:g} to {leading[1]:g} for the encoder {name!r}, "
                f"got {ends[0]:g} to {ends[1]:g}. Give raw images."
            )
        return
    words = {value: key for key, value in _RANGES.items()}
    own = _application_of(model)
    model_range: Any = _leading_range(model)
    if own is not None and model_range is None:
        kernel, bias = _preprocessing(own)
        limits = np.stack([bias, 255.0 * kernel.sum(axis=0) + bias])
        model_range = (float(limits.min()), float(limits.max()))
        if model_range == found:
            return
        mend = f"pixel_range={own!r}"
        expected = f"pixels as keras.applications preprocesses them for {own}"
    elif model_range is not None:
        if model_range == found:
            return
        mend = f"pixel_range={tuple(int(end) for end in model_range)}"
        expected = f"pixels of {words[model_range]}"
    elif found[1] == 255.0:
        raise ValueError(
            f"expected to know the range of pixels that the encoder {name!r} takes, got images of "
            f"{words[found]} and a model that does not show it. Give PublicEncoder(model, "
            "pixel_range=(0, 1)), (-1, 1) or (0, 255): what it was trained on."
        )
    else:
        return
    raise ValueError(
        f"expected {expected} for the encoder {name!r}, got images of {words[found]}. Give "
        f"PublicEncoder(model, {mend}), which rescales them."
    )


def _leading_range(model: Any) -> tuple[float, float] | None:
    """Returns the range that the first layers of a model expect; None if they do not show it."""
    for layer in model.layers:
        kind = type(layer).__name__
        if kind in _SKIPPED or kind.startswith("Random"):
            continue
        if getattr(layer, "layers", None):
            return _leading_range(layer)
        large = None
        if kind == "Rescaling":
            large = float(np.max(np.abs(np.asarray(layer.scale)))) < _SMALL_SCALE
        elif kind == "Normalization" and getattr(layer, "mean", None) is not None:
            large = float(np.max(np.abs(np.asarray(layer.mean)))) > _LARGE_MEAN
        return None if large is None else _RANGES["0 to 255" if large else "0 to 1"]
    return None


def _application_names() -> list[str]:
    import keras

    return [each for each in dir(keras.applications) if each[:1].isupper()]


def _application_of(model: Any) -> str | None:
    """Returns the name in ``keras.applications`` that a model's name begins with, or None."""
    own = str(model.name).replace("_", "").lower()
    matches = [each for each in _application_names() if own.startswith(each.lower())]
    return max(matches, key=len, default=None)


def _preprocessing(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the kernel (3, 3) and bias (3,) of a model's preprocessing, by probing its pixels."""
    import keras

    build = getattr(keras.applications, name, None)
    module = sys.modules.get(getattr(build, "__module__", ""))
    preprocess = getattr(module, "preprocess_input", None)
    if preprocess is None:
        raise ValueError(
            "expected pixel_range as (low, high) or the name of a model in keras.applications, "
            f"got {name!r}. Give for example (0, 1)."
        )
    probes = np.concatenate([np.zeros((1, 3)), 255.0 * np.eye(3)])[:, np.newaxis, np.newaxis]
    answers = np.asarray(preprocess(probes.copy(), data_format="channels_last"), np.float64)
    bias = answers[0].ravel()
    return (answers[1:, 0, 0] - bias) / 255.0, bias
