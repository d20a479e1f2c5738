"""The layer of the nearest centre: numbers, saving, precision, and bad arguments."""

from __future__ import annotations

import inspect
import json

import keras
import numpy as np
import pytest

from tf_labeldp.keras_layers._fixed_features import NearestCentre

RNG = np.random.default_rng(0)
CENTRES = RNG.normal(size=(7, 4))
OUTPUTS = RNG.normal(size=(7, 3))
ROWS = RNG.normal(size=(500, 4)).astype("float32")


def nearest(rows, centres=CENTRES):
    distances = np.linalg.norm(rows[:, None].astype("float64") - centres, axis=2)
    return distances.argmin(axis=1)


def numbers(tensor):
    return keras.ops.convert_to_numpy(tensor)


def test_a_row_gets_the_outputs_of_its_nearest_centre():
    layer = NearestCentre(CENTRES, OUTPUTS)
    found = numbers(layer(ROWS))
    assert found.shape == (500, 3) and found.dtype == np.float32
    np.testing.assert_array_equal(found, OUTPUTS.astype("float32")[nearest(ROWS)])
    assert layer.trainable_weights == []


def test_of_equally_near_centres_the_first_counts():
    layer = NearestCentre([[1.0], [-1.0], [1.0], [-1.0]], np.eye(4))
    found = numbers(layer(np.array([[0.0], [2.0], [-2.0]])))
    assert found.argmax(axis=1).tolist() == [0, 0, 1]


def test_an_offset_of_all_features_does_not_blur_the_distances():
    """Squares of 1e4 have no digits left for differences of 1, in single precision."""
    offset = np.float32(2.0**14)
    layer = NearestCentre(CENTRES + offset, OUTPUTS)
    rows = ROWS + offset
    expected = OUTPUTS.astype("float32")[nearest(rows, CENTRES + offset)]
    np.testing.assert_array_equal(numbers(layer(rows)), expected)


def test_integers_and_one_centre():
    found = NearestCentre([[3]], [[5, 6]])(np.array([[9], [0]], "uint8"))
    assert numbers(found).tolist() == [[5.0, 6.0], [5.0, 6.0]]


def test_round_trip():
    before = NearestCentre(CENTRES, OUTPUTS, name="n")
    serialized = json.loads(json.dumps(keras.saving.serialize_keras_object(before)))
    after = keras.saving.deserialize_keras_object(serialized)
    assert type(after) is NearestCentre and after.get_config() == before.get_config()
    arguments = set(inspect.signature(NearestCentre.__init__).parameters) - {"self", "kwargs"}
    assert arguments <= set(before.get_config())
    # A config alone computes the same: nothing is left to weights that a copy would not have.
    np.testing.assert_array_equal(numbers(after(ROWS)), numbers(before(ROWS)))


def test_saved_model_loads_without_custom_objects(tmp_path):
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(2)(NearestCentre(CENTRES, OUTPUTS)(inputs)))
    assert len(model.trainable_weights) == 2  # those of Dense
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert len(loaded.trainable_weights) == 2
    np.testing.assert_allclose(numbers(loaded(ROWS)), numbers(model(ROWS)), atol=1e-6)
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    np.testing.assert_allclose(numbers(copy(ROWS)), numbers(model(ROWS)), atol=1e-6)


def test_shape_and_type_are_as_announced():
    layer = NearestCentre(CENTRES, OUTPUTS)
    symbolic = layer(keras.Input((4,)))
    assert tuple(symbolic.shape) == (None, 3) and symbolic.dtype == "float32"
    assert tuple(layer.compute_output_shape((5, 4))) == (5, 3)


def test_half_precision_policies_keep_the_digits(mixed_precision):
    half = numbers(NearestCentre(CENTRES, OUTPUTS)(ROWS))
    keras.config.set_dtype_policy("float32")
    np.testing.assert_array_equal(half, numbers(NearestCentre(CENTRES, OUTPUTS)(ROWS)))


def test_compiled_gives_the_same():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, NearestCentre(CENTRES, OUTPUTS)(inputs))
    model.compile("sgd", loss="mse", jit_compile=True)
    expected = OUTPUTS.astype("float32")[nearest(ROWS)]
    np.testing.assert_array_equal(model.predict(ROWS, verbose=0), expected)


@pytest.mark.parametrize(
    ("rows", "message"),
    [(ROWS[:, :3], "expected axis -1 of input shape to have value 4"), (ROWS[:, None], "ndim=2")],
    ids=["width", "rank"],
)
def test_rows_of_another_shape(rows, message):
    with pytest.raises(ValueError, match=message):
        NearestCentre(CENTRES, OUTPUTS)(rows)
