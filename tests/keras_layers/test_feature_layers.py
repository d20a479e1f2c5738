"""The fixed feature layers: numbers, shapes, saving and precision."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from slow_cases import with_slow

from tf_labeldp.keras_layers import FourierFeatures, NeighbourFeatures, PatchFeatures

# Layers inside of models, which Keras finds by these names.
NearestCentre = keras.saving.get_registered_object("tf_labeldp>NearestCentre")
QuantileRanks = keras.saving.get_registered_object("tf_labeldp>QuantileRanks")

IMAGES = np.random.default_rng(0).integers(256, size=(6, 7, 8, 2)).astype("float32")
ROWS = np.random.default_rng(1).normal(size=(6, 3)).astype("float32")
CASES = {
    "patches_all": (
        lambda: PatchFeatures(5, 2, 3, stride=2, threshold=1.0, contrast_floor=2.0, name="p"),
        IMAGES,
    ),
    "patches_grey": (lambda: PatchFeatures(4, 3, pooling=2, threshold=0.0), IMAGES[..., 0]),
    "neighbours_all": (
        lambda: NeighbourFeatures(20, 2, num_neighbours=4, strength=0.5, name="n"),
        ROWS,
    ),
    "centres_all": (lambda: NearestCentre(ROWS[:4], ROWS[2:], name="c"), ROWS),
    "fourier_all": (lambda: FourierFeatures(10, linear_weight=0.3, name="f"), ROWS),
    "fourier_first": (lambda: FourierFeatures(10, linear_weight=0.3, num_linear=2), ROWS),
    "ranks_all": (lambda: QuantileRanks(5, name="r"), ROWS),
}


def built(key):
    """Returns a layer with random weights, and its input."""
    make, inputs = CASES[key]
    layer = make()
    layer.build(inputs.shape)
    rng = np.random.default_rng(2)
    layer.set_weights([rng.normal(size=weight.shape) for weight in layer.weights])
    return layer, inputs


@pytest.mark.parametrize("key", CASES)
def test_shape_and_type_are_as_announced(key):
    layer, inputs = built(key)
    outputs = layer(inputs)
    assert tuple(outputs.shape) == tuple(layer.compute_output_shape(inputs.shape))
    symbolic = layer(keras.Input(inputs.shape[1:]))
    assert tuple(symbolic.shape) == (None, outputs.shape[1])
    assert keras.backend.standardize_dtype(outputs.dtype) == symbolic.dtype == "float32"


def test_patch_features_of_one_patch():
    """A 2 x 2 patch of 0, 0, 4, 8 has mean 3 and variance 11."""
    layer = PatchFeatures(2, 2, pooling=1, threshold=0.5, contrast_floor=5.0)
    layer.build((None, 2, 2))
    filters = np.array([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    layer.set_weights([filters, np.array([0.0, -0.25])])
    responses = np.array([-3.0 / 4.0, 5.0 / 4.0 + 0.25])
    features = layer(np.array([[[0, 0], [4, 8]]], "uint8"))
    expected = np.r_[np.maximum(0, responses - 0.5), np.maximum(0, -responses - 0.5)]
    np.testing.assert_allclose(np.asarray(features), [expected], atol=1e-6)


def test_a_neighbour_is_never_a_row_itself():
    """The key (1, 0) belongs to row 0; the nearest other key is (0.8, 0.6)."""
    layer = NeighbourFeatures(3, 2, num_neighbours=1, strength=0.5)
    layer.build((None, 2))
    keys = np.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
    layer.set_weights([np.ones(2), keys, np.array([[9.0, 9.0], [4.0, 8.0], [7.0, 7.0]])])
    features = np.asarray(layer(np.array([[2.0, 0.0]], "float32")))
    np.testing.assert_allclose(features, [[3.0, 4.0]], atol=1e-6)


def test_ranks_are_linear_between_knots_and_constant_beyond():
    """The last knot is repeated, as for a column with few values."""
    layer = QuantileRanks(4)
    layer.build((None, 1))
    layer.set_weights([np.array([[0.0, 1.0, 3.0, 3.0]]), np.array([[-1.5, 0.0, 1.0, 1.0]])])
    numbers = np.array([[-9.0, 0.0, 0.5, 1.0, 2.0, 3.0, 9.0]], "float32").T
    found = np.asarray(layer(numbers))[:, 0]
    np.testing.assert_allclose(found, [-1.5, -1.5, -0.75, 0.0, 0.5, 1.0, 1.0], atol=1e-6)


@pytest.mark.parametrize("linear_weight", [0.0, 0.25])
def test_fourier_features_are_cosines_and_sines(linear_weight):
    layer = FourierFeatures(10, linear_weight=linear_weight)
    layer.build(ROWS.shape)
    frequencies = np.asarray(layer.frequencies)
    phases = ROWS @ frequencies
    parts = [np.cos(phases), np.sin(phases)]
    expected = np.concatenate(parts, axis=1) * np.sqrt((1.0 - linear_weight) / 5.0)
    if linear_weight:
        unit = ROWS / np.linalg.norm(ROWS, axis=1, keepdims=True)
        expected = np.concatenate([expected, 0.5 * unit], axis=1)
    np.testing.assert_allclose(np.asarray(layer(ROWS)), expected, atol=1e-6)


@pytest.mark.parametrize(
    "key",
    with_slow(CASES, {key for key in CASES if "_all" not in key}),
)
def test_saved_model_loads_without_custom_objects(key, tmp_path):
    layer, inputs = built(key)
    images = keras.Input(inputs.shape[1:])
    model = keras.Model(images, keras.layers.Dense(2)(layer(images)))
    assert len(model.trainable_weights) == 2  # of Dense
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    loaded.compile(jit_compile=True)
    assert loaded.layers[1].get_config() == layer.get_config()
    assert len(loaded.trainable_weights) == 2
    np.testing.assert_allclose(
        loaded.predict(inputs, verbose=0), model.predict(inputs, verbose=0), atol=1e-5
    )


@pytest.mark.parametrize("key", CASES)
def test_half_precision_policies_keep_the_digits(key, mixed_precision):
    layer, inputs = built(key)
    half = np.asarray(layer(inputs))
    keras.config.set_dtype_policy("float32")
    np.testing.assert_array_equal(half, np.asarray(built(key)[0](inputs)))


# The layer of the nearest centre.

RNG = np.random.default_rng(0)
CENTRES = RNG.normal(size=(7, 4))
OUTPUTS = RNG.normal(size=(7, 3))
POINTS = RNG.normal(size=(500, 4)).astype("float32")


def nearest(rows, centres=CENTRES):
    distances = np.linalg.norm(rows[:, None].astype("float64") - centres, axis=2)
    return distances.argmin(axis=1)


def numbers(tensor):
    return keras.ops.convert_to_numpy(tensor)


def test_a_row_gets_the_outputs_of_its_nearest_centre():
    layer = NearestCentre(CENTRES, OUTPUTS)
    found = numbers(layer(POINTS))
    assert found.shape == (500, 3) and found.dtype == np.float32
    np.testing.assert_array_equal(found, OUTPUTS.astype("float32")[nearest(POINTS)])
    assert layer.trainable_weights == []


def test_of_equally_near_centres_the_first_counts():
    layer = NearestCentre([[1.0], [-1.0], [1.0], [-1.0]], np.eye(4))
    found = numbers(layer(np.array([[0.0], [2.0], [-2.0]])))
    assert found.argmax(axis=1).tolist() == [0, 0, 1]


def test_an_offset_of_all_features_does_not_blur_the_distances():
    """Squares of 1e4 have no digits left for differences of 1, in single precision."""
    offset = np.float32(2.0**14)
    layer = NearestCentre(CENTRES + offset, OUTPUTS)
    rows = POINTS + offset
    expected = OUTPUTS.astype("float32")[nearest(rows, CENTRES + offset)]
    np.testing.assert_array_equal(numbers(layer(rows)), expected)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (POINTS[:, :3], "expected axis -1 of input shape to have value 4"),
        (POINTS[:, None], "ndim=2"),
    ],
    ids=["width", "rank"],
)
def test_rows_of_another_shape(rows, message):
    with pytest.raises(ValueError, match=message):
        NearestCentre(CENTRES, OUTPUTS)(rows)
