"""The layers of boosted trees: branches, missing values, categories, saving and precision."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tf_labeldp.keras_layers import TreeEnsemble

# Layers inside of models, which Keras finds by these names.
CategoryCodes = keras.saving.get_registered_object("tf_labeldp>CategoryCodes")

NAN = np.nan


def numbers(tensor):
    return keras.ops.convert_to_numpy(tensor)


def two_trees(name=None):
    """Returns two trees of one output each.

    The first asks whether column 0 is at most 0.5, and on the right whether the code in column 1 is
    2 or 9; the second is a leaf of 7.
    """
    layer = TreeEnsemble(2, 6, 2, num_outputs=2, num_category_sets=1, num_categories=10, name=name)
    layer.build((None, 2))
    weights = [
        [0, 5],
        [0, 0, 1, 0, 0, 0],
        [0.5, 0, 0, 0, 0, 0],
        [[1, 2], [1, 1], [3, 4], [3, 3], [4, 4], [5, 5]],
        [1, 0, 0, 0, 0, 0],
        [-1, -1, 0, -1, -1, -1],
        [[0b00000100, 0b00000010]],
        [[0, 0], [1, 0], [0, 0], [2, 0.25], [3, 0], [7, 0]],
        [[0, 0], [100, 0]],
    ]
    layer.set_weights([np.array(weight) for weight in weights])
    return layer


ROWS = np.array(
    [[0.5, 2], [0.75, 2], [0.75, 9], [0.75, 1], [0.75, 10], [0.75, -1], [0.75, NAN], [NAN, 2]],
    "float32",
)
SCORES = np.array([1, 2.25, 2.25, 3, 3, 3, 3, 1], "float32")


def test_rows_take_their_branches():
    found = numbers(two_trees()(ROWS))
    np.testing.assert_array_equal(found, np.column_stack([SCORES, np.full(8, 107.0)]))
    assert found.dtype == np.float32


def test_both_sides_of_a_missing_category():
    layer = two_trees()
    weights = layer.get_weights()
    weights[4] = np.array([0, 0, 1, 0, 0, 0])
    layer.set_weights(weights)
    found = numbers(layer(ROWS))[:, 0]
    np.testing.assert_array_equal(found, [1, 2.25, 2.25, 3, 2.25, 2.25, 2.25, 2.25])


def test_codes_are_places_less_one():
    layer = CategoryCodes([False, True])
    found = numbers(layer(np.array([[0.0, 0.0], [-2.0, 1.0], [NAN, 5.0]])))
    np.testing.assert_array_equal(found, [[0.0, NAN], [-2.0, 0.0], [NAN, 4.0]])


LAYERS = {"trees": two_trees, "codes": lambda: CategoryCodes([True, False])}


@pytest.mark.parametrize("key", LAYERS)
def test_shape_type_and_precision(key, mixed_precision):
    layer = LAYERS[key]()
    found = layer(ROWS)
    symbolic = layer(keras.Input((2,)))
    assert tuple(found.shape) == tuple(layer.compute_output_shape(ROWS.shape)) == (8, 2)
    assert tuple(symbolic.shape) == (None, 2)
    assert keras.backend.standardize_dtype(found.dtype) == symbolic.dtype == "float32"
    keras.config.set_dtype_policy("float32")
    np.testing.assert_array_equal(numbers(found), numbers(LAYERS[key]()(ROWS)))


@pytest.mark.parametrize("key", LAYERS)
def test_saved_model_loads_without_custom_objects(key, tmp_path):
    layer = LAYERS[key]()
    inputs = keras.Input((2,))
    model = keras.Model(inputs, layer(inputs))
    assert model.trainable_weights == []
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.layers[1].get_config() == layer.get_config()
    loaded.compile(jit_compile=True)
    np.testing.assert_array_equal(loaded.predict(ROWS, verbose=0), numbers(layer(ROWS)))
