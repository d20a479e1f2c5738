"""Layers that draw a view of each image, with one affine warp, on every backend and with XLA.

Keras's own layers warp images by an operation that XLA lacks on TensorFlow, and its ``RandAugment``
draws one list of operations per batch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from tf_labeldp.accounting import Setting

_GREY = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in a grey value, by ITU-R BT.601 as in Pillow."""
# FixMatch's list, colours first.
OPERATIONS = (
    "identity",
    "autocontrast",
    "brightness",
    "color",
    "contrast",
    "sharpness",
    "equalize",
    "posterize",
    "solarize",
    "rotate",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
)


class ImageViews(keras.layers.Layer):
    """Draws a view of each image in training, and returns the images in inference.

    Images (n, height, width, channels) are floats in [0, 1]; draws are float32 in any dtype policy.
    A subclass keeps each argument of its constructor in the attribute of the same name.
    """

    def __init__(self, seed: int | None = None, **kwargs: Setting[Any]) -> None:
        super().__init__(autocast=False, **kwargs)
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Returns a view of each image, or the images."""
        if not training:
            return ops.cast(inputs, self.compute_dtype)
        return ops.cast(self.drawn(ops.cast(inputs, "float32")), self.compute_dtype)

    def drawn(self, images: Any) -> Any:
        """Returns one view per image, ``float32``."""
        raise NotImplementedError

    def uniform(self, images: Any, count: int) -> list[Any]:
        """Returns ``count`` draws from [0, 1) per image, each (n,)."""
        shape = (count, ops.shape(images)[0])
        draws = keras.random.uniform(shape, dtype="float32", seed=self.seed_generator)
        return [draws[number] for number in range(count)]

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the images."""
        return input_shape

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        names = set(inspect.signature(type(self).__init__).parameters) - {"self", "kwargs"}
        return {**super().get_config(), **{name: getattr(self, name) for name in sorted(names)}}


@keras.saving.register_keras_serializable(package="tf_labeldp")
class RandomWarp(ImageViews):
    """Shifts, mirrors, turns and zooms each image, with one warp.

    Args:
        shift: largest shift as a share of height and width.
        flip: whether to mirror half of the images.
        turn: largest rotation, as a share of a full turn.
        zoom: largest change of height and of width, as a share.
        seed: public seed of the draws, or None.
        **kwargs: as in ``keras.layers.Layer``.
    """

    def __init__(
        self,
        shift: float = 0.0,
        flip: bool = False,
        turn: float = 0.0,
        zoom: float = 0.0,
        seed: int | None = None,
        **kwargs: Setting[Any],
    ) -> None:
        super().__init__(seed, **kwargs)
        self.shift, self.flip, self.turn, self.zoom = shift, flip, turn, zoom

    def drawn(self, images: Any) -> Any:
        """Returns one view per image."""
        height, width = images.shape[1:3]
        mirror, turn, *draws = self.uniform(images, 6)
        down, right, tall, wide = (2 * draw - 1 for draw in draws)
        rows = (1 + self.zoom * tall, self.shift * height * down)
        columns = (1 + self.zoom * wide, self.shift * width * right)
        if self.flip:
            columns = (columns[0] * ops.where(mirror < 0.5, -1.0, 1.0), columns[1])
        if not self.turn:
            return resampled(images, rows, columns)
        place = affine(((1.0, 0.0, rows[1]), (0.0, 1.0, columns[1])), turn)
        place = place @ rotated(2 * math.pi * self.turn * (2 * turn - 1))
        return warped(images, place @ affine(((rows[0], 0.0, 0.0), (0.0, columns[0], 0.0)), turn))


@keras.saving.register_keras_serializable(package="tf_labeldp")
class RandomResizedCrop(ImageViews):
    """Cuts a part out of each image, at random also mirrored, and resizes it to the whole.

    Args:
        smallest: smallest share of the area; the largest is 1. The ratio of width to height, drawn
            from 3/4 to 4/3, is nearer to that of the image where the part would be larger than it.
        flip: whether to mirror half of the images.
        seed: public seed of the draws, or None.
        **kwargs: as in ``keras.layers.Layer``.
    """

    def __init__(
        self,
        smallest: float = 0.08,
        flip: bool = False,
        seed: int | None = None,
        **kwargs: Setting[Any],
    ) -> None:
        super().__init__(seed, **kwargs)
        self.smallest, self.flip = smallest, flip

    def drawn(self, images: Any) -> Any:
        """Returns one view per image."""
        height, width = images.shape[1:3]
        area, ratio, down, right, mirror = self.uniform(images, 5)
        root = ops.sqrt(self.smallest + (1 - self.smallest) * area)
        ratio = ops.exp(math.log(4 / 3) * (ratio - 0.5))
        tall, wide = ops.minimum(root / ratio, 1.0), ops.minimum(root * ratio, 1.0)
        down, right = height * (1 - tall) * (down - 0.5), width * (1 - wide) * (right - 0.5)
        if self.flip:
            wide = wide * ops.where(mirror < 0.5, -1.0, 1.0)
        return resampled(images, (tall, down), (wide, right))


@keras.saving.register_keras_serializable(package="tf_labeldp")
class RandAugment(ImageViews):
    """Shifts and mirrors each image, then applies operations that it draws for this image.

    Args:
        shift: as for ``RandomWarp``.
        flip: as for ``RandomWarp``.
        operations: number of operations per image, drawn with replacement.
        reach: largest shear and shift of an operation, as a share.
        choices: operations to draw from.
        seed: public seed of the draws, or None.
        **kwargs: as in ``keras.layers.Layer``.
    """

    def __init__(
        self,
        shift: float = 0.125,
        flip: bool = False,
        operations: int = 2,
        reach: float = 0.3,
        choices: Sequence[str] = OPERATIONS,
        seed: int | None = None,
        **kwargs: Setting[Any],
    ) -> None:
        super().__init__(seed, **kwargs)
        self.shift, self.flip, self.operations, self.reach = shift, flip, operations, reach
        self.choices = list(choices)

    def drawn(self, images: Any) -> Any:
        """Returns one view per image."""
        height, width = images.shape[1:3]
        down, right, mirror, *draws = self.uniform(images, 3 + 2 * self.operations)
        down, right = (self.shift * (2 * draw - 1) for draw in (down, right))
        side = ops.where(mirror < 0.5, -1.0, 1.0) if self.flip else 1.0
        place = affine(((1.0, 0.0, down * height), (0.0, side, right * width)), down)
        for number in range(self.operations):
            choice, strength = draws[2 * number : 2 * number + 2]
            index = ops.floor(choice * len(self.choices))
            chosen = {name: ops.equal(index, row) for row, name in enumerate(self.choices)}
            images = recoloured(images, chosen, strength)
            place = place @ moved(images, chosen, strength, self.reach)
        return warped(images, place)


@keras.saving.register_keras_serializable(package="tf_labeldp")
class Cutout(ImageViews):
    """Paints a grey square around a random pixel of each image; the borders cut it off.

    Args:
        smallest: smallest side, as a share of the shorter side of the image.
        largest: largest side.
        seed: public seed of the draws, or None.
        **kwargs: as in ``keras.layers.Layer``.
    """

    def __init__(
        self,
        smallest: float = 0.5,
        largest: float = 0.5,
        seed: int | None = None,
        **kwargs: Setting[Any],
    ) -> None:
        super().__init__(seed, **kwargs)
        self.smallest, self.largest = smallest, largest

    def drawn(self, images: Any) -> Any:
        """Returns one view per image."""
        height, width = images.shape[1:3]
        side, *centre = self.uniform(images, 3)
        side = self.smallest + (self.largest - self.smallest) * side
        half = ops.round(side * (min(height, width) / 2))[:, None]
        inside = []
        for draw, length in zip(centre, (height, width), strict=True):
            places = ops.arange(length, dtype="float32") - ops.floor(draw * length)[:, None]
            inside.append(ops.logical_and(places >= -half, places < half))
        rows, columns = inside
        square = ops.logical_and(rows[:, :, None], columns[:, None, :])
        return ops.where(square[..., None], 0.5, images)


@keras.saving.register_keras_serializable(package="tf_labeldp")
class ColorJitter(ImageViews):
    """Changes brightness, contrast, saturation and hue of most images, and makes some grey.

    Args:
        brightness: largest change of the factor; likewise ``contrast`` and ``saturation``.
        contrast: see ``brightness``.
        saturation: see ``brightness``. It changes images of three channels alone, as ``hue``.
        hue: largest change, as a share of the colour circle.
        share: probability of the four changes.
        grey: probability of a grey view.
        seed: public seed of the draws, or None.
        **kwargs: as in ``keras.layers.Layer``.
    """

    def __init__(
        self,
        brightness: float = 0.4,
        contrast: float = 0.4,
        saturation: float = 0.4,
        hue: float = 0.1,
        share: float = 0.8,
        grey: float = 0.2,
        seed: int | None = None,
        **kwargs: Setting[Any],
    ) -> None:
        super().__init__(seed, **kwargs)
        self.brightness, self.contrast, self.saturation = brightness, contrast, saturation
        self.hue, self.share, self.grey = hue, share, grey

    def drawn(self, images: Any) -> Any:
        """Returns one view per image."""
        *draws, change, to_grey = self.uniform(images, 6)
        changes = ops.cast(change < self.share, "float32")
        ranges = (self.brightness, self.contrast, self.saturation, self.hue)
        bright, contrast, saturation, hue = (
            _per_image(changes * reach * (2 * draw - 1))
            for reach, draw in zip(ranges, draws, strict=True)
        )
        images = _clipped(images * (1 + bright))
        images = _blended(_mean_grey(images), images, 1 + contrast)
        if images.shape[-1] == 3:
            images = _blended(_grey(images), images, 1 + saturation)
            images = _with_hue(images, hue)
            images = ops.where(_per_image(to_grey < self.grey), _grey(images), images)
        return images


@keras.saving.register_keras_serializable(package="tf_labeldp")
class RandomBlur(ImageViews):
    """Blurs half of the images by a Gaussian with a standard deviation from 0.1 to 2 pixels.

    The window is a tenth of the height, and weights of one at the borders too.
    """

    def drawn(self, images: Any) -> Any:
        """Returns one view per image."""
        height, width = images.shape[1:3]
        sigma, change = self.uniform(images, 2)
        sigma = (0.1 + 1.9 * sigma)[:, None, None]
        reach = max(1, height // 20)
        matrices = []
        for length in (height, width):
            places = ops.arange(length, dtype="float32")
            distances = places[:, None] - places[None, :]
            near = ops.cast(ops.abs(distances) <= reach, "float32")
            weights = near * ops.exp(-0.5 * (distances / sigma) ** 2)
            matrices.append(weights / ops.sum(weights, axis=-1, keepdims=True))
        blurred = ops.einsum("nij,njkc,nlk->nilc", matrices[0], images, matrices[1])
        return ops.where(_per_image(change < 0.5), blurred, images)


def resampled(images: Any, rows: tuple[Any, Any], columns: tuple[Any, Any]) -> Any:
    """Returns the images at other rows and columns, bilinear, black outside.

    ``rows`` and ``columns`` are a scale (n,) and an offset (n,) each: a row of the view, from the
    centre, times the scale, plus the offset, is its source. Two products of matrices per image take
    a fraction of the time of ``warped``.
    """
    height, width, channels = images.shape[1:]
    # Columns first: both products then have whole rows of memory.
    turned = ops.reshape(ops.transpose(images, (0, 2, 1, 3)), (-1, width, height * channels))
    turned = ops.reshape(_weights(*columns, width) @ turned, (-1, width, height, channels))
    straight = ops.reshape(ops.transpose(turned, (0, 2, 1, 3)), (-1, height, width * channels))
    return ops.reshape(_weights(*rows, height) @ straight, (-1, height, width, channels))


def _weights(scale: Any, offset: Any, length: int) -> Any:
    """Returns the shares of all sources in each place of a view, (n, length, length)."""
    numbers = ops.arange(length, dtype="float32")
    centre = (length - 1) / 2
    sources = scale[:, None] * (numbers - centre) + (offset[:, None] + centre)
    return ops.relu(1.0 - ops.abs(sources[:, :, None] - numbers))


def warped(images: Any, places: Any) -> Any:
    """Returns the images at other places, bilinear, black outside.

    ``places`` (n, 3, 3) maps a pixel of the view, as (row, column, 1) from the centre, to its
    source in the image.
    """
    height, width, channels = images.shape[1:]
    rows = ops.arange(height, dtype="float32") - (height - 1) / 2
    columns = ops.arange(width, dtype="float32") - (width - 1) / 2

    def source(axis: int, length: int) -> tuple[Any, Any]:
        of_row, of_column, rest = (places[:, axis, part, None, None] for part in range(3))
        place = of_row * rows[:, None] + of_column * columns + rest + (length + 1) / 2
        # A black pixel on each side stands for everything outside.
        place = ops.clip(place, 0.0, length + 1.0)
        low = ops.minimum(ops.floor(place), length)
        return ops.cast(low, "int32"), (place - low)[..., None]

    row, row_share = source(0, height)
    column, column_share = source(1, width)
    padded = ops.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    pixels = ops.reshape(padded, (-1, channels))
    first = ops.arange(ops.shape(images)[0], dtype="int32") * ((height + 2) * (width + 2))
    corner = first[:, None, None] + row * (width + 2) + column
    upper, lower = (
        ops.take(pixels, corner + below, axis=0) * (1 - column_share)
        + ops.take(pixels, corner + below + 1, axis=0) * column_share
        for below in (0, width + 2)
    )
    return upper * (1 - row_share) + lower * row_share


def affine(rows: Sequence[Sequence[Any]], like: Any) -> Any:
    """Returns matrices (n, 3, 3) of two rows of three numbers or draws (n,) each."""
    full = [[ops.zeros_like(like) + entry for entry in row] for row in (*rows, (0.0, 0.0, 1.0))]
    return ops.stack([ops.stack(row, axis=-1) for row in full], axis=-2)


def rotated(angle: Any) -> Any:
    """Returns maps that turn by angles (n,)."""
    cosine, sine = ops.cos(angle), ops.sin(angle)
    return affine(((cosine, sine, 0.0), (-sine, cosine, 0.0)), angle)


def moved(images: Any, chosen: dict[str, Any], strength: Any, reach: float) -> Any:
    """Returns the maps of the chosen geometric operations; the identity for the others."""
    height, width = images.shape[1:3]

    def amount(name: str, largest: float) -> Any:
        if name not in chosen:
            return ops.zeros_like(strength)
        return ops.where(chosen[name], largest * (2 * strength - 1), 0.0)

    angle = amount("rotate", math.radians(30))
    shear_x, shear_y = amount("shear_x", reach), amount("shear_y", reach)
    right, down = amount("translate_x", reach * width), amount("translate_y", reach * height)
    cosine, sine = ops.cos(angle), ops.sin(angle)
    # Shears keep the first row or column in place.
    rows = (
        (cosine, sine + shear_y, down + shear_y * (width / 2)),
        (shear_x - sine, cosine, right + shear_x * (height / 2)),
    )
    return affine(rows, strength)


def recoloured(images: Any, chosen: dict[str, Any], strength: Any) -> Any:
    """Returns images after the chosen operations on colours; the others stay."""
    factor, term = ops.ones_like(images[:, :1, :1]), ops.zeros_like(images)
    blend = _per_image(0.05 + 0.9 * strength)
    towards = {
        "brightness": lambda: ops.zeros_like(images),
        "color": lambda: _grey(images),
        "contrast": lambda: _mean_grey(images),
        "sharpness": lambda: _smooth(images),
    }
    for name, other in towards.items():
        if name in chosen:
            mask = _per_image(chosen[name])
            factor = ops.where(mask, blend, factor)
            term = ops.where(mask, (1 - blend) * other(), term)
    if "autocontrast" in chosen:
        mask = _per_image(chosen["autocontrast"])
        low, high = (find(images, axis=(1, 2), keepdims=True) for find in (ops.amin, ops.amax))
        # A channel of one value stays.
        scale = ops.where(high > low, 1.0 / ops.maximum(high - low, 1e-6), 1.0)
        factor = ops.where(mask, scale, factor)
        term = ops.where(mask, ops.where(high > low, -low * scale, 0.0), term)
    images = _clipped(images * factor + term)
    if "posterize" in chosen:
        # 4 to 8 of 8 bits stay.
        step = ops.power(2.0, ops.floor(_per_image(strength) * 5.0))
        kept = ops.floor(_bytes(images) / step) * step / 255.0
        images = ops.where(_per_image(chosen["posterize"]), kept, images)
    if "solarize" in chosen:
        bright = images >= _per_image(strength)
        inverted = ops.where(bright, 1.0 - images, images)
        images = ops.where(_per_image(chosen["solarize"]), inverted, images)
    if "equalize" in chosen:
        images = ops.where(_per_image(chosen["equalize"]), _equalized(images), images)
    return images


def _per_image(draws: Any) -> Any:
    return draws[:, None, None, None]


def _bytes(images: Any) -> Any:
    return ops.floor(images * 255.0 + 0.5)


def _clipped(images: Any) -> Any:
    return ops.clip(images, 0.0, 1.0)


def _blended(first: Any, second: Any, share: Any) -> Any:
    return _clipped(first + share * (second - first))


def _grey(images: Any) -> Any:
    """Returns the brightness of colour images (n, height, width, 1), or the images."""
    if images.shape[-1] != 3:
        return images
    return ops.sum(images * ops.convert_to_tensor(_GREY, images.dtype), axis=-1, keepdims=True)


def _mean_grey(images: Any) -> Any:
    return ops.mean(_grey(images), axis=(1, 2), keepdims=True)


def _smooth(images: Any) -> Any:
    """Returns images after a filter with 5 in the centre, 1 around it; borders stay."""
    rows = images[:, :-2] + images[:, 1:-1] + images[:, 2:]
    box = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:]
    inner = images[:, 1:-1, 1:-1]
    change = (box + 4 * inner) / 13 - inner
    return images + ops.pad(change, ((0, 0), (1, 1), (1, 1), (0, 0)))


def _equalized(images: Any) -> Any:
    """Returns images whose bytes are equally frequent, by channel, as Pillow does it."""
    height, width, channels = images.shape[1:]
    values = ops.transpose(_bytes(images), (0, 3, 1, 2))
    values = ops.cast(ops.reshape(values, (-1, height * width)), "int32")
    rows = ops.shape(values)[0]
    places = values + 256 * ops.arange(rows, dtype="int32")[:, None]
    flat = ops.reshape(places, (-1,))
    counts = ops.segment_sum(ops.ones_like(flat), flat, num_segments=rows * 256)
    counts = ops.reshape(counts, (rows, 256))
    largest = ops.max(values, axis=1, keepdims=True)
    last = ops.sum(ops.cast(ops.equal(values, largest), "int32"), axis=1, keepdims=True)
    step = (height * width - last) // 255
    below = ops.cumsum(counts, axis=1) - counts
    table = ops.minimum((below + step // 2) // ops.maximum(step, 1), 255)
    found = ops.reshape(ops.take(ops.reshape(table, (-1,)), flat), ops.shape(values))
    found = ops.where(step > 0, found, values)
    found = ops.reshape(ops.cast(found, "float32") / 255.0, (-1, channels, height, width))
    return ops.transpose(found, (0, 2, 3, 1))


def _with_hue(images: Any, turn: Any) -> Any:
    """Returns colour images with hues turned by shares (n, 1, 1, 1) of the circle."""
    high, low = ops.amax(images, axis=-1), ops.amin(images, axis=-1)
    spread = high - low
    red, green, blue = (images[..., channel] for channel in range(3))
    scale = 1.0 / ops.where(spread > 0, spread, 1.0)
    hue = ops.where(
        ops.equal(high, red),
        (green - blue) * scale,
        ops.where(ops.equal(high, green), 2.0 + (blue - red) * scale, 4.0 + (red - green) * scale),
    )
    hue = hue + 6.0 * turn[..., 0]

    def channel(offset: float) -> Any:
        place = ops.mod(hue + offset, 6.0)
        return high - spread * ops.clip(ops.minimum(place, 4.0 - place), 0.0, 1.0)

    return ops.stack([channel(5.0), channel(3.0), channel(1.0)], axis=-1)
