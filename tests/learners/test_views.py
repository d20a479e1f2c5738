"""Views: their operations against Pillow, their ranges, one draw per image, XLA and files."""

import colorsys

import keras
import numpy as np
import pytest
import tensorflow as tf
from _shapes import shapes
from scipy import stats

from tf_labeldp.self_supervised import (
    rand_augment_views,
    sim_clr_views,
    strong_views,
    weak_views,
)

OPERATIONS_ON_COLOURS = (
    "identity",
    "autocontrast",
    "brightness",
    "color",
    "contrast",
    "sharpness",
    "equalize",
    "posterize",
    "solarize",
)
VIEWS = {
    "weak": lambda: weak_views(flip=True),
    "strong": lambda: strong_views(flip=True),
    "rand_augment": lambda: rand_augment_views(flip=True, operations=1),
    "sim_clr": lambda: sim_clr_views(flip=True, blur=True),
}
SIDE = 24


def layer_of(name, *args, **settings):
    """Returns a layer of views, as Keras finds it for a file."""
    return keras.saving.get_registered_object(f"tf_labeldp>{name}")(*args, **settings)


def only(name, **settings):
    """Views of one operation alone."""
    settings = {"shift": 0.0, "operations": 1, "cutout": (0.0, 0.0), **settings}
    return rand_augment_views(choices=[name], **settings)


def photographs(count, channels=3, side=32):
    """Random bytes with bright and dark regions, so that every operation changes them."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(20, 200, (count, 4, 4, channels)).repeat(side // 4, 1)
    fine = rng.integers(0, 40, (count, side, side, channels))
    return (coarse.repeat(side // 4, 2) + fine).astype(np.uint8)


def viewed(views, images):
    return np.asarray(views(images.astype(np.float32), training=True))


def places(count, side=SIDE):
    """Images of four channels: the row and the column of a pixel as shares, and ones."""
    rows, columns = np.meshgrid(*[np.arange(side) / side] * 2, indexing="ij")
    image = np.stack([rows, columns, np.ones_like(rows), np.ones_like(rows)], axis=-1)
    return np.broadcast_to(image, (count, side, side, 4)).astype(np.float32)


def maps(views, count=200, side=SIDE):
    """Returns the affine maps (n, 2, 3) of a layer, from the views of ``places``.

    A warp that is linear in the place is exact in the inside of the image, where a fit by least
    squares finds it. Offsets and places are from the centre, in pixels.
    """
    found = viewed(views, places(count, side))
    axis = np.arange(side) - (side - 1) / 2
    rows, columns = np.meshgrid(axis, axis, indexing="ij")
    design = np.stack([rows, columns, np.ones_like(rows)], axis=-1)
    fits = []
    for view in found:
        # Pixels that are not even partly black.
        inside = view[..., 2] > 1 - 1e-5
        target = view[inside][:, :2] * side - (side - 1) / 2
        fit, *_ = np.linalg.lstsq(design[inside], target, rcond=None)
        np.testing.assert_allclose(design[inside] @ fit, target, atol=2e-3)
        fits.append(fit.T)
    return np.array(fits)


def assert_uniform(draws, low, high):
    """Uniform in the range, and not in one that is 7 % shorter."""
    assert draws.min() >= low - 1e-3 and draws.max() <= high + 1e-3
    assert stats.kstest(draws, stats.uniform(low, high - low).cdf).pvalue > 0.005
    assert max(abs(draws.min() - low), abs(draws.max() - high)) < 0.07 * (high - low)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("channels", [1, 3])
def test_views_keep_shape_and_range_and_draw_for_each_image(name, channels):
    images, _ = shapes(8, channels=channels)
    equal = np.repeat(images[:1], 8, axis=0)
    views = VIEWS[name]()
    outputs = np.asarray(views(equal, training=True))
    assert outputs.shape == images.shape
    assert outputs.min() >= 0 and outputs.max() <= 1.0001
    assert len(np.unique(outputs.reshape(8, -1), axis=0)) > 5
    np.testing.assert_array_equal(views(images, training=False), images)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", OPERATIONS_ON_COLOURS)
def test_operations_on_colours_are_those_of_pillow(name, channels):
    image_module = pytest.importorskip("PIL.Image")
    from PIL import ImageEnhance, ImageOps

    images = photographs(30, channels)
    found = 255 * viewed(only(name), images / 255.0)
    factors = []
    for image, view in zip(images, found, strict=True):
        before = image_module.fromarray(image.squeeze())

        def after(change, *arguments, before=before, image=image):
            return np.asarray(change(before, *arguments)).reshape(image.shape).astype(float)

        if name in ("identity", "autocontrast", "equalize"):
            change = getattr(ImageOps, name, lambda same: same)
            # Pillow rounds its tables down.
            np.testing.assert_allclose(view, after(change), atol=1.01)
        elif name in ("posterize", "solarize"):
            options = range(4, 9) if name == "posterize" else range(257)
            errors = [np.abs(view - after(getattr(ImageOps, name), n)).max() for n in options]
            assert min(errors) < 0.01
            factors.append(options[int(np.argmin(errors))])
        else:
            enhance = getattr(ImageEnhance, name.capitalize())

            def blend(same, factor, enhance=enhance):
                return enhance(same).enhance(factor)

            zero = after(blend, 0.0)
            change = image - zero
            factor = ((view - zero) * change).sum() / max((change**2).sum(), 1e-9)
            if name != "color" or channels == 3:
                factors.append(factor)
            np.testing.assert_allclose(view, after(blend, factor), atol=2)
    if name == "posterize":
        assert set(factors) == {4, 5, 6, 7, 8}
    elif factors:
        low, high = (20, 240) if name == "solarize" else (0.05, 0.95)
        assert np.ptp(factors) > 0.6 * (high - low)
        assert name == "solarize" or (min(factors) > 0.04 and max(factors) < 0.96)


def test_strengths_are_uniform_in_the_published_ranges():
    flat = np.full((2000, 4, 4, 1), 0.5, np.float32)
    factors = viewed(only("brightness"), flat)[:, 0, 0, 0] / 0.5
    assert_uniform(factors, 0.05, 0.95)
    turns = maps(only("rotate"))
    angles = np.degrees(np.arctan2(turns[:, 0, 1], turns[:, 0, 0]))
    assert_uniform(angles, -30, 30)
    products = np.einsum("nij,nkj->nik", turns[..., :2], turns[..., :2])
    np.testing.assert_allclose(products, np.broadcast_to(np.eye(2), (200, 2, 2)), atol=1e-3)
    np.testing.assert_allclose(turns[..., 2], 0, atol=1e-2)


@pytest.mark.parametrize("axis", ["x", "y"])
def test_shears_and_shifts_reach_their_share(axis):
    row, column = (1, 0) if axis == "x" else (0, 1)
    sheared = maps(only(f"shear_{axis}"))
    slopes = sheared[:, row, column]
    assert_uniform(slopes, -0.3, 0.3)
    # Pillow shears from the first row or column, which stays.
    np.testing.assert_allclose(sheared[:, row, 2], slopes * SIDE / 2, atol=1e-2)
    np.testing.assert_allclose(sheared[:, [0, 1], [0, 1]], 1, atol=1e-3)
    assert_uniform(maps(only(f"translate_{axis}", reach=0.1))[:, row, 2] / SIDE, -0.1, 0.1)


def test_every_operation_has_the_same_probability():
    """Two draws among four operations that a flat image tells apart."""
    flat = np.full((4000, 4, 4, 1), 0.5, np.float32)
    names = ["identity", "rotate", "brightness", "solarize"]
    views = rand_augment_views(shift=0.0, operations=1, cutout=(0.0, 0.0), choices=names)
    outputs = viewed(views, flat)
    dark = outputs[:, 1, 1, 0] < 0.49
    turned = ~dark & (outputs[:, 0, 0, 0] < 0.499)
    for share in (dark.sum(), turned.sum()):
        assert stats.binomtest(int(share), 4000, 0.25).pvalue > 0.005
    twice = rand_augment_views(
        shift=0.0, operations=2, cutout=(0.0, 0.0), choices=["identity", "brightness"]
    )
    unchanged = int((viewed(twice, flat)[:, 0, 0, 0] == 0.5).sum())
    assert stats.binomtest(unchanged, 4000, 0.25).pvalue > 0.005


def test_without_a_number_there_are_two_operations_as_in_the_paper():
    configs = [layer.get_config() for layer in rand_augment_views().layers]
    assert [config["operations"] for config in configs if "operations" in config] == [2]


def test_operations_on_places_are_composed_in_their_order():
    """Four operations of an image are one map: a product of turns, shears and shifts."""
    found = maps(
        rand_augment_views(
            shift=0.0,
            operations=2,
            reach=0.05,
            cutout=(0.0, 0.0),
            choices=["translate_x", "translate_y"],
        )
    )
    np.testing.assert_allclose(found[..., :2], np.broadcast_to(np.eye(2), (200, 2, 2)), atol=1e-3)
    # Twice along one axis is the sum of two uniform draws.
    twice = np.abs(found[..., 2] / SIDE).max(axis=1)
    assert 0.05 < twice.max() <= 0.1 + 1e-3


@pytest.mark.parametrize("cutout, sides", [((0.5, 0.5), [16]), ((0.0, 0.5), list(range(0, 17, 2)))])
def test_the_erased_square_is_grey_and_of_that_size(cutout, sides):
    views = rand_augment_views(shift=0.0, operations=0, cutout=cutout)
    erased = viewed(views, np.ones((3000, 32, 32, 1), np.float32))[..., 0] == 0.5
    tall, wide = erased.any(axis=2).sum(axis=1), erased.any(axis=1).sum(axis=1)
    assert np.array_equal(erased.sum(axis=(1, 2)), tall * wide)
    # Its centre is any pixel, so the borders cut off nearly half of the squares of 16 pixels.
    whole = tall == wide
    assert set(np.maximum(tall, wide)) <= set(range(17)) and set(sides) <= set(tall[whole])
    if cutout == (0.5, 0.5):
        assert stats.binomtest(int((tall == 16).sum()), 3000, 17 / 32).pvalue > 0.005
    else:
        # One of 16 sides is 1, which erases nothing.
        assert stats.binomtest(int((tall == 0).sum()), 3000, 1 / 16).pvalue > 0.005


def test_weak_views_shift_and_mirror():
    found = maps(weak_views(shift=0.1, flip=True))
    assert stats.binomtest(int((found[:, 1, 1] < 0).sum()), 200).pvalue > 0.005
    np.testing.assert_allclose(np.abs(found[:, [0, 1], [0, 1]]), 1, atol=1e-3)
    for axis in range(2):
        assert_uniform(found[:, axis, 2] / SIDE, -0.1, 0.1)
    assert np.all(maps(weak_views(), 50)[:, 1, 1] > 0)


def test_one_warp_zooms_then_turns_and_shifts():
    found = maps(layer_of("RandomWarp", 0.1, True, 0.05, 0.2))
    sides = np.linalg.norm(found[..., :2], axis=1)
    turns = found[..., :2] / sides[:, None]
    turns[:, :, 1] *= np.sign(np.linalg.det(turns))[:, None]
    products = np.einsum("nij,nkj->nik", turns, turns)
    np.testing.assert_allclose(products, np.broadcast_to(np.eye(2), (200, 2, 2)), atol=1e-3)
    # A twentieth of a full turn.
    assert_uniform(np.degrees(np.arctan2(turns[:, 0, 1], turns[:, 0, 0])), -18, 18)
    for axis in range(2):
        assert_uniform(sides[:, axis], 0.8, 1.2)
        assert_uniform(found[:, axis, 2] / SIDE, -0.1, 0.1)


def test_crops_have_the_published_area_and_ratio():
    found = maps(sim_clr_views(strength=0.0, smallest=0.2), 300)
    tall, wide = found[:, 0, 0], found[:, 1, 1]
    ratio = wide / tall
    assert ratio.min() > 0.74 and ratio.max() < 1.35 and np.ptp(ratio) > 0.4
    free = (tall < 0.999) & (wide < 0.999)
    area = (tall * wide)[free]
    assert 0.2 < area.min() < 0.25 and area.max() > 0.7
    # Crops lie inside the image, anywhere.
    for axis, length in ((0, tall), (1, wide)):
        offset = found[free, axis, 2] / SIDE / (1 - length[free])
        assert offset.min() > -0.51 and offset.max() < 0.51 and np.std(offset) > 0.25


def test_hue_turns_and_keeps_value_and_saturation():
    images = photographs(20) / 255.0
    outputs = viewed(layer_of("ColorJitter", 0.0, 0.0, 0.0, 0.3, 1.0, 0.0), images)
    for image, output in zip(images, outputs, strict=True):
        colourful = np.ptp(image, axis=-1) > 0.1
        pixels = zip(image[colourful][::50], output[colourful][::50], strict=True)
        turns = []
        for before, after in pixels:
            hue, *rest = colorsys.rgb_to_hsv(*before)
            turned, *kept = colorsys.rgb_to_hsv(*after)
            np.testing.assert_allclose(rest, kept, atol=1e-4)
            turns.append((turned - hue + 0.5) % 1 - 0.5)
        assert np.ptp(turns) < 1e-3 and abs(np.mean(turns)) <= 0.3


def test_colours_change_as_published():
    flat = np.full((4000, 2, 2, 3), 0.5, np.float32)
    flat[..., 0] = 0.4
    outputs = viewed(layer_of("ColorJitter", grey=0.0), flat)
    same = np.all(np.abs(outputs - flat) < 1e-6, axis=(1, 2, 3)).sum()
    assert stats.binomtest(int(same), 4000, 0.2).pvalue > 0.005
    grey = viewed(layer_of("ColorJitter", 0.0, 0.0, 0.0, 0.0), flat)
    is_grey = np.ptp(grey, axis=-1).max(axis=(1, 2)) < 1e-6
    assert stats.binomtest(int(is_grey.sum()), 4000, 0.2).pvalue > 0.005
    factors = viewed(layer_of("ColorJitter", 0.4, 0.0, 0.0, 0.0, 1.0, 0.0), flat)[:, 0, 0, 1] / 0.5
    assert_uniform(factors, 0.6, 1.4)


def test_half_of_the_views_are_blurred():
    spots = np.zeros((1000, 32, 32, 1), np.float32)
    spots[:, 16, 16] = 1
    outputs = viewed(layer_of("RandomBlur"), spots)
    # Rows of weights sum to one.
    np.testing.assert_allclose(outputs.sum(axis=(1, 2, 3)), 1, rtol=1e-4)
    # Below a standard deviation of 0.17, one time in 26, a blur has no effect in float32.
    share = 1 - 0.5 * (1 - 1 / 26)
    assert stats.binomtest(int((outputs[:, 16, 16, 0] == 1).sum()), 1000, share).pvalue > 1e-3


LAYERS = [
    layer_of("RandomWarp", 0.1, True, 0.05, 0.3, seed=3),
    layer_of("RandomResizedCrop", 0.2, True, seed=3),
    layer_of("RandAugment", 0.1, True, 3, 0.2, ["rotate", "color"], seed=3),
    layer_of("Cutout", 0.1, 0.4, seed=3),
    layer_of("ColorJitter", 0.1, 0.2, 0.3, 0.05, 0.7, 0.3, seed=3),
    layer_of("RandomBlur", seed=3),
]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_a_configuration_has_every_argument_and_a_seed_repeats_the_draws(layer):
    images = (photographs(4) / 255.0).astype(np.float32)
    config = keras.saving.serialize_keras_object(layer)
    again = keras.saving.deserialize_keras_object(config)
    assert again.get_config() == layer.get_config()
    first = np.asarray(type(layer).from_config(layer.get_config())(images, training=True))
    np.testing.assert_array_equal(first, again(images, training=True))
    assert not np.array_equal(first, again(images, training=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", VIEWS)
def test_xla_compiles_views(name):
    images, _ = shapes(4, channels=3)
    views = VIEWS[name]()
    compiled = tf.function(lambda x: views(x, training=True), jit_compile=True)
    first, second = compiled(images), compiled(images)
    assert first.shape == images.shape and not np.array_equal(first, second)


def test_a_policy_sets_the_dtype_but_not_the_draws():
    images, _ = shapes(4)
    half = layer_of("RandAugment", seed=1, dtype="mixed_float16")(images, training=True)
    assert half.dtype == "float16"
    np.testing.assert_allclose(
        half, layer_of("RandAugment", seed=1)(images, training=True), atol=1e-3
    )


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: weak_views(shift=1.0), "shift"),
        (lambda: rand_augment_views(operations=-1), "operations"),
        (lambda: rand_augment_views(reach=1.0), "reach"),
        (lambda: rand_augment_views(cutout=(0.5, 0.2)), "smallest and a largest"),
        (lambda: rand_augment_views(cutout=(0.0, 1.1)), "cutout"),
        (lambda: rand_augment_views(cutout=0.5), r"cutout as \(smallest, largest\), got 0.5"),
        (lambda: rand_augment_views(choices=[]), "choices must be one of"),
        (lambda: rand_augment_views(choices=["invert"]), "choices must be one of"),
        (lambda: sim_clr_views(smallest=0.0), "smallest"),
        (lambda: sim_clr_views(strength=2.0), "strength"),
    ],
)
def test_bad_settings(make, match):
    with pytest.raises(ValueError, match=match):
        make()
