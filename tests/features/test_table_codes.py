"""TableCodes: numbers as they are, categories by frequency, the same codes in Keras."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import scipy.sparse

from tf_labeldp.features import TableCodes

NAN = np.nan


def some_table(n=400, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "age": np.where(rng.random(n) < 0.1, NAN, rng.normal(40.0, 9.0, n)),
        "member": rng.random(n) < 0.5,
        "job": rng.choice(["clerk", "cook", "nurse"], n, p=[0.2, 0.5, 0.3]),
        "zip": rng.integers(0, 60, n),
        "town": rng.choice([f"town {i}" for i in range(40)], n),
    }


def as_batch(mapping, table):
    """Returns the columns (n, 1) that the Keras model takes, missing words as empty text."""
    batch = {}
    for column in mapping.columns_:
        values = np.asarray(table[column.name]).reshape(-1, 1)
        if column.input_dtype == "string":
            values = np.array(
                [["" if word is None or word != word else str(word)] for word in values[:, 0]]
            )
        else:
            values = values.astype(column.input_dtype)
        batch[column.name] = keras.ops.convert_to_tensor(values)
    return batch


def test_numbers_stay_and_categories_are_ordered_by_frequency():
    table = {
        "x": np.array([1.5, NAN, 1.0 + 1e-12, -3.0]),
        "yes": np.array([True, False, True, True]),
        "word": np.array(["b", "a", "c", "b"]),
        "code": np.array([7, 7, -1, 9]),
    }
    mapping = TableCodes(["word", "code"]).fit(table)
    codes = mapping.transform(table)
    assert codes.dtype == np.float32 and mapping.n_features_out_ == 4
    expected = [[1.5, 1, 0, 0], [NAN, 0, 1, 0], [1, 1, 2, 1], [-3, 1, 0, 2]]
    np.testing.assert_array_equal(codes, np.array(expected, np.float32))
    assert mapping.categorical_.tolist() == [False, False, True, True] and mapping.hashed_ == {}


@pytest.mark.parametrize(
    ("fitted", "later"),
    [
        (np.array(["a", "b", "a"]), np.array(["b", "pilot", ""])),
        (np.array(["a", None, "b", NAN, "a"], object), np.array(["b", None, NAN], object)),
        (np.array([4.0, NAN, 5.0, 4.0]), np.array([5.0, 6.0, NAN])),
        (np.array([4, 5, 4]), np.array([5, 6, -(2**63)])),
    ],
    ids=["text", "objects", "floats", "integers"],
)
def test_missing_and_unknown_categories_are_nan(fitted, later):
    mapping = TableCodes(["c"]).fit({"c": fitted})
    codes = mapping.transform({"c": later})
    np.testing.assert_array_equal(codes[:, 0], [1.0, NAN, NAN])
    if later.dtype.kind != "f":
        found = mapping.to_keras()(as_batch(mapping, {"c": later}))
        np.testing.assert_array_equal(np.asarray(found), codes)


def test_many_categories_are_hashed_with_missing_ones_apart():
    rng = np.random.default_rng(0)
    table = {
        "id": rng.integers(0, 10**12, 500),
        "name": np.array([f"n{i}" for i in rng.integers(0, 300, 500)], object),
        "few": rng.integers(0, 5, 500),
    }
    table["name"][::10] = None
    mapping = TableCodes(["id", "name", "few"], most_categories=20).fit(table)
    present = table["name"][np.arange(500) % 10 > 0]
    assert mapping.hashed_ == {"id": 500, "name": len(np.unique(present.astype(str)))}
    codes = mapping.transform(table)
    np.testing.assert_array_equal(np.isnan(codes).any(axis=0), [False, True, False])
    assert np.isnan(codes[::10, 1]).all() and np.isnan(codes[:, 1]).sum() == 50
    for column in (0, 1):
        assert set(codes[~np.isnan(codes[:, column]), column]) == set(range(20))
    # Equal categories have equal codes, also those that are new.
    again = mapping.transform({**table, "id": np.full(500, 3), "name": np.full(500, "new")})
    assert all(len(np.unique(again[:, column])) == 1 for column in (0, 1))
    np.testing.assert_array_equal(again[:, 2], codes[:, 2])


def test_the_keras_model_takes_raw_columns_and_loads(tmp_path):
    mapping = TableCodes(["job", "zip", "town"], most_categories=50).fit(some_table())
    small = TableCodes(["job", "zip", "town"], most_categories=25).fit(some_table())
    assert mapping.hashed_ == {"zip": 60} and small.hashed_ == {"zip": 60, "town": 40}
    fresh = some_table(seed=1)
    fresh["job"] = fresh["job"].astype(object)
    fresh["job"][:9] = ["pilot", None, NAN] * 3
    fresh["town"] = fresh["town"].astype(object)
    fresh["town"][:4] = ["here", "", "None", "nan"]
    for place, each in enumerate((mapping, small)):
        expected = each.transform(fresh)
        assert np.isnan(expected[:9, 2]).all() and np.isnan(expected[1:4, 4]).all()
        each.to_keras().save(tmp_path / f"{place}.keras")
        for model in (each.to_keras(), keras.models.load_model(tmp_path / f"{place}.keras")):
            np.testing.assert_array_equal(np.asarray(model(as_batch(each, fresh))), expected)


def test_the_keras_model_of_a_matrix():
    rng = np.random.default_rng(0)
    rows = np.column_stack([rng.normal(50, 10, 100), rng.integers(-1, 4, 100)]).astype(np.float32)
    mapping = TableCodes([1]).fit(rows)
    rows[0], rows[1, 1] = NAN, 17
    expected = mapping.transform(rows)
    assert np.isnan(expected).sum() == 3
    model = mapping.to_keras()
    assert model.input_shape == (None, 2)
    np.testing.assert_array_equal(model.predict(rows, verbose=0), expected)


def test_columns_of_one_value_and_of_missing_values_are_kept():
    table = {"x": np.full(4, NAN), "one": np.ones(4), "word": np.array([None] * 4, object)}
    mapping = TableCodes().fit(table)
    expected = np.array([[NAN, 1.0, NAN]] * 4, np.float32)
    np.testing.assert_array_equal(mapping.transform(table), expected)
    found = mapping.to_keras()(as_batch(mapping, {**table, "word": np.full(4, NAN)}))
    np.testing.assert_array_equal(np.asarray(found), expected)


def test_a_sparse_matrix_is_made_dense():
    rows = scipy.sparse.random(50, 9, 0.2, "csr", random_state=0)
    codes = TableCodes().fit_transform(rows)
    assert codes.dtype == np.float32
    np.testing.assert_array_equal(codes, rows.toarray().astype(np.float32))


@pytest.mark.parametrize(
    ("arguments", "table", "error", "message"),
    [
        ({"most_categories": 1}, some_table(), ValueError, "most_categories"),
        ({"categorical": ["jab"]}, some_table(), ValueError, "lacks: 'jab'. Choose from 'age'"),
        ({"categorical": "job"}, some_table(), TypeError, "list of names"),
        ({"categorical": ["age"]}, some_table(), ValueError, "'age' must be integers or text"),
        ({}, {"a": np.array([1.0, np.inf])}, ValueError, "'a' must be finite, but 1 of 2"),
        ({}, {"a": np.array([1.0, -1e300])}, ValueError, "within float32, .* but 1 of 2 entries"),
        ({}, {0: np.ones(2), "0": np.ones(2)}, ValueError, "differ as text"),
        ({}, {"a": np.array([[1], None], object)}, TypeError, "'a' must be .* got builtins.list"),
    ],
)
def test_bad_input_of_fit(arguments, table, error, message):
    with pytest.raises(error, match=message):
        TableCodes(**arguments).fit(table)


def test_bad_input_of_transform():
    mapping = TableCodes().fit(some_table())
    table = some_table(seed=1)
    with pytest.raises(ValueError, match="lacks columns of fit: 'age'"):
        mapping.transform({name: values for name, values in table.items() if name != "age"})
    with pytest.raises(TypeError, match="'job' needs categories as in fit, text, got num"):
        mapping.transform({**table, "job": np.arange(400)})
    with pytest.raises(ValueError, match=r"X has 3 features, but .* expecting 2"):
        TableCodes().fit(np.ones((4, 2))).transform(np.ones((4, 3)))
