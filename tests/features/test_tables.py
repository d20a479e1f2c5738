"""Tables of every library and kind of column: one reader, one missing value, one exported model."""

from __future__ import annotations

import datetime
from decimal import Decimal

import keras
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import tf_labeldp as ldp
from tf_labeldp.features import RandomFourierFeatures, TableCodes, to_inputs
from tf_labeldp.plugins import FeatureRows

N = 1200
MISSING_WORDS = ("", "nan", "None", "<NA>", "NaT")
NAN = np.nan


def with_holes(entries, every):
    return [None if place % every == 0 else entry for place, entry in enumerate(entries)]


def some_columns(seed):
    """Columns of every kind as lists; a few lack entries."""
    rng = np.random.default_rng(seed)
    first, noon = datetime.date(1950, 1, 1), datetime.datetime(2024, 1, 1, 12)
    days, seconds, minutes = (rng.integers(0, most, N).tolist() for most in (20_000, 10**7, 5000))
    return {
        "age": rng.integers(17, 90, N).tolist(),
        "gain": rng.exponential(1e4, N).tolist(),
        "hours": with_holes(rng.normal(40.0, 12.0, N).tolist(), 7),
        "children": with_holes(rng.integers(0, 5, N).tolist(), 5),
        "member": (rng.random(N) < 0.3).tolist(),
        "insured": with_holes((rng.random(N) < 0.4).tolist(), 6),
        "job": with_holes(rng.choice(["clerk", "cook", "nurse"], N).tolist(), 9),
        "town": rng.choice([f"town {place}" for place in range(40)], N).tolist(),
        "level": with_holes(rng.choice(["low", "middle", "high"], N).tolist(), 8),
        "shade": rng.choice(["blue", "red"], N).tolist(),
        "born": [first + datetime.timedelta(days=each) for each in days],
        "seen": with_holes([noon + datetime.timedelta(seconds=each) for each in seconds], 11),
        "wait": with_holes([datetime.timedelta(minutes=each) for each in minutes], 13),
        "price": with_holes([Decimal(each) / 100 for each in seconds], 10),
    }


def as_pandas(columns):
    levels = pd.Categorical(columns["level"], ["low", "middle", "high"], ordered=True)
    return pd.DataFrame(columns).assign(
        children=pd.array(columns["children"], dtype="Int64"),
        insured=pd.array(columns["insured"], dtype="boolean"),
        level=levels,
        shade=pd.Categorical(columns["shade"]),
        seen=pd.to_datetime(pd.Series(columns["seen"])).dt.tz_localize("UTC"),
        wait=pd.to_timedelta(pd.Series(columns["wait"])),
        town=pd.array(columns["town"], dtype="string"),
    )


def as_arrow(columns):
    table = pa.table(columns)
    place = table.column_names.index("level")
    return table.set_column(place, "level", table["level"].dictionary_encode())


def as_polars(columns):
    import polars

    levels = polars.Enum(["low", "middle", "high"])
    return polars.DataFrame(columns, strict=False).with_columns(
        polars.col("level").cast(levels), polars.col("shade").cast(polars.Categorical)
    )


FORMS = {
    "pandas": as_pandas,
    "Arrow": as_arrow,
    "record batch": pa.RecordBatch.from_pydict,
    "Polars": as_polars,
    "lazy": lambda columns: as_polars(columns).lazy(),
    "dict": lambda columns: columns,
    "records": lambda columns: [
        dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
    ],
}
TRAIN = some_columns(0)
FRESH = some_columns(1)
for name in ("age", "gain", "member", "town", "shade", "born"):  # complete in fit
    FRESH[name] = with_holes(FRESH[name], 4)
FRESH["job"][:5] = ["nan", "", "None", "pilot", "<NA>"]
LABELS = np.array(
    [(age > 50) ^ (job == "cook") for age, job in zip(TRAIN["age"], TRAIN["job"], strict=True)]
).astype(int)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "epsilon"),
    [
        ("head", 1.0),
        ("boosting", 4.0),
        pytest.param("head", 4.0, marks=pytest.mark.exhaustive),
        pytest.param("boosting", 1.0, marks=pytest.mark.exhaustive),
    ],
)
def test_the_exported_model_computes_the_same_on_every_kind_of_column(method, epsilon, tmp_path):
    model = ldp.PrivateClassifier(epsilon, 1e-6, num_classes=2, method=method, insecure_seed=0)
    model.fit(as_pandas(TRAIN), LABELS)
    model.to_keras().save(tmp_path / "model.keras")
    exported = keras.models.load_model(tmp_path / "model.keras")
    for columns in (TRAIN, FRESH):
        expected = model.predict_proba(as_pandas(columns))
        assert np.ptp(expected) > 0.2
        for form, make in FORMS.items():
            table = make(columns)
            np.testing.assert_array_equal(model.predict_proba(table), expected, err_msg=form)
            found = exported.predict(to_inputs(table, exported), verbose=0)
            np.testing.assert_allclose(found, expected, rtol=0.0, atol=1e-6, err_msg=form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("map_", [TableCodes(), RandomFourierFeatures(20, sparse=True)])
def test_tables_of_all_libraries_give_the_same_features(form, map_):
    expected = type(map_)(**map_.get_params()).fit(TRAIN).transform(FRESH)
    map_.fit(FORMS[form](TRAIN))
    np.testing.assert_array_equal(map_.transform(FORMS[form](FRESH)), expected)


@pytest.mark.parametrize("map_", [TableCodes(), RandomFourierFeatures(20)])
@pytest.mark.parametrize("most", [None, 3], ids=["vocabulary", "hashed"])
def test_all_missing_values_are_one(map_, most):
    """None, NaN, NaT, pandas's NA and their texts: in fit, transform and the exported model."""
    arguments = {} if most is None else {map_argument(map_): most}
    map_ = type(map_)(**{**map_.get_params(), **arguments})
    texts = {"word": ["a", "b", "c", "d", "a", None, "b"], "size": [1.0, 2, 3, NAN, 5, 6, None]}
    map_.fit(texts)
    missing = [None, NAN, pd.NA, pd.NaT, np.float32(NAN), *MISSING_WORDS]
    table = {"word": ["a", *missing], "size": [2.0, *missing]}
    rows = map_.transform(table)
    np.testing.assert_array_equal(rows[1:], rows[[1] * len(missing)])
    assert not np.array_equal(rows[0], rows[1])
    model = map_.to_keras()
    found = model.predict(to_inputs(table, model), verbose=0)
    np.testing.assert_allclose(found, rows, atol=1e-6)
    # Texts that no reader has seen, as a service may get them.
    raw = keras.ops.convert_to_tensor(np.array([*MISSING_WORDS])[:, np.newaxis])
    sizes = keras.ops.full((len(MISSING_WORDS), 1), NAN)
    np.testing.assert_allclose(model({"word": raw, "size": sizes}), rows[-5:], atol=1e-6)


def map_argument(map_):
    return "most_categories" if isinstance(map_, TableCodes) else "hash_buckets"


def test_a_numeric_column_that_was_complete_in_fit_is_imputed_with_its_mean():
    table = {"age": [20.0, 30.0, 70.0], "job": ["a", "b", "b"]}
    map_ = RandomFourierFeatures(20).fit(table)
    later = {"age": [NAN, 40.0], "job": ["b", "b"]}
    rows = map_.transform(later)
    np.testing.assert_allclose(rows[0], rows[1], atol=1e-6)  # 40 is the mean
    model = map_.to_keras()
    np.testing.assert_allclose(model.predict(to_inputs(later, model), verbose=0), rows, atol=1e-6)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (["1970-01-02T12", "NaT"], [1.5, NAN]),
        ([datetime.date(1970, 1, 3), None], [2.0, NAN]),
        ([pd.Timestamp("1970-01-01T02:00", tz="Europe/Oslo"), pd.NaT], [1 / 24, NAN]),
        ([datetime.timedelta(hours=6), None], [0.25, NAN]),
        ([datetime.time(13, 15), None, datetime.time(0, 30)], [13.25, NAN, 0.5]),
        ([True, None, False], [1.0, NAN, 0.0]),
        ([Decimal("0.5"), Decimal("NaN")], [0.5, NAN]),
        ([None, "", "nan"], [NAN, NAN, NAN]),
        ([3, "", 4], [3.0, NAN, 4.0]),
        (["a", None, b"b", "None"], ["a", "", "b", ""]),
        (["7", 7, 1.5], ["7", "7", "1.5"]),
        (pd.Categorical([2, 1, None], ordered=True), ["2", "1", ""]),
        (pa.array(["x", None, "y"]).dictionary_encode(), ["x", "", "y"]),
        (pa.chunked_array([pa.array([5, None]).dictionary_encode()]), ["5", ""]),
        (pd.array([2**60, None], dtype="Int64"), [2.0**60, NAN]),
        (np.array([b"a", b""]), ["a", ""]),
    ],
)
def test_a_column_is_of_numbers_or_of_texts(column, expected):
    if isinstance(column, list) and str(column[0]).startswith("1970-01-02T"):
        column = np.array(column, "datetime64[h]")
    found = FeatureRows({"x": column}).table()["x"]
    np.testing.assert_array_equal(found, np.array(expected))
    assert (found.dtype.kind in "biuf") == isinstance(expected[0], float)


def test_inputs_without_a_model_are_the_columns_of_the_table():
    inputs = to_inputs(as_arrow(TRAIN))
    assert list(inputs) == list(TRAIN)
    assert {np.asarray(part).shape for part in inputs.values()} == {(N, 1)}
    texts = {name for name, part in inputs.items() if part.dtype != "float32"}
    assert texts == {"job", "town", "level", "shade"}


def test_inputs_of_a_model_are_what_it_takes():
    """Whole numbers as they are, other columns left out; a matrix, and inputs in a list."""
    table = {"zip": [10**12, None], "more": [1, 2], "age": [20, 30]}
    mapping = TableCodes(["zip"]).fit({"age": [1, 2], "zip": [10**12, 7]})
    model = mapping.to_keras()
    inputs = to_inputs(pd.DataFrame(table), model)
    assert list(inputs) == ["age", "zip"] and inputs["zip"].dtype == np.int64
    np.testing.assert_array_equal(model.predict(inputs, verbose=0), mapping.transform(table))
    numbers = pd.DataFrame({"a": [1, 2], "b": [True, None]})
    dense = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    rows = to_inputs(numbers, dense)
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, [[1.0, 1.0], [2.0, NAN]])
    ends = [keras.Input((1,), name=name) for name in ("b", "a")]
    two = keras.Model(ends, keras.layers.Concatenate()(ends))
    found = two.predict(to_inputs(numbers, two), verbose=0)
    np.testing.assert_array_equal(found, rows[:, ::-1])


def test_bad_tables_for_a_model():
    good = {"age": [1.0], "zip": [7], "job": ["a"]}
    model = TableCodes(["zip", "job"]).fit(good).to_keras()
    dense = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    whole = keras.Input((1,), name="age", dtype="int32")
    for table, network, error, message in [
        ({"age": [1.0], "zip": [7]}, model, ValueError, "lacks inputs of the model: 'job'. Add"),
        ({**good, "age": ["old"]}, model, TypeError, "takes numbers in column 'age', got text"),
        ({**good, "job": [3]}, model, TypeError, "takes text in column 'job', got numbers"),
        ({**good, "zip": [0.5]}, model, ValueError, "'zip' must be integers or text, got fract"),
        (np.ones((2, 3)), model, TypeError, "expected a table with column names, got ndarray"),
        (good, dense, TypeError, "expected numbers, got text in column 'job'. Encode"),
        ({"age": [1.0]}, dense, ValueError, r"takes 2 columns, got 1: \['age'\]"),
        (
            {"age": [None]},
            keras.Model({"age": whole}, whole + 1),
            ValueError,
            "input of int32 has no",
        ),
        (good, keras.Model(), TypeError, "with known inputs, got Model"),
        (good, keras.Sequential(), TypeError, "with known inputs, got Sequential"),
        ([{"age": 1.0}, [2.0]], None, TypeError, "a row of type list. Give one dict per"),
    ]:
        with pytest.raises(error, match=message):
            to_inputs(table, network)


@pytest.mark.parametrize("method", ["head", "boosting", "auto"])
def test_equal_column_names_are_refused_before_a_charge(method):
    labels = ldp.PrivateLabels(LABELS, num_classes=2, budget=ldp.PrivacyBudget(9.0, 1e-6))
    frame = pd.DataFrame(np.ones((N, 3)), columns=["a", "b", "a"])
    for table in (frame, pa.Table.from_arrays([[1] * N] * 2, names=["a", "a"])):
        with pytest.raises(ValueError, match="got 'a' more than once"):
            ldp.PrivateClassifier(2.0, method=method).fit(table, labels)
    assert not labels.history()


@pytest.mark.slow
def test_records_may_lack_keys_and_dates_are_counted_once():
    """A hundred thousand dates in records are read: objects without parts carry no receipts."""
    day = datetime.date(2024, 1, 1)
    records = [{"day": day + datetime.timedelta(place % 900), "n": 1.0} for place in range(10**5)]
    records.append({"n": 2.0})
    rows = TableCodes().fit_transform(records)
    assert rows.shape == (10**5 + 1, 2) and rows[0, 0] == 19723 and np.isnan(rows[-1, 0])
