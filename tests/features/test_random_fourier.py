"""RandomFourierFeatures: the kernel within its bound, categories, and the exported model."""

from __future__ import annotations

import math
from decimal import Decimal

import keras
import numpy as np
import pandas as pd
import pytest

from tf_labeldp.features import RandomFourierFeatures


def some_table(n=200, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "age": rng.integers(17, 90, n),
        "gain": rng.exponential(1e4, n),
        "job": rng.choice(["clerk", "nurse", "smith"], n),
        "zip": rng.integers(0, 60, n),
    }


class KernelTrials:
    """Products of features of 30 rows less the exact kernel, for several seeds."""

    def __init__(self, num_features, seeds):
        rng = np.random.default_rng(0)
        self.rows = rng.normal(size=(30, 4))
        model = RandomFourierFeatures(num_features, bandwidth=1.7, linear_weight=0.0)
        model.fit(self.rows)
        z = (self.rows - self.rows.mean(axis=0)) / self.rows.std(axis=0)
        distance = ((z[:, np.newaxis] - z) ** 2).sum(axis=2)
        self.kernel = np.exp(-distance / (2 * 1.7**2))
        self.errors = []
        for seed in range(seeds):
            features = model.set_params(seed=seed).fit_transform(self.rows).astype("float64")
            self.errors.append(features @ features.T - self.kernel)
        self.errors = np.array(self.errors)


def test_products_are_the_kernel_within_hoeffding_s_bound():
    """Over 20 draws and 435 pairs, P(any off by more than t) <= 1e-6 by the union bound."""
    num_features, pairs = 2000, 20 * 435
    errors = KernelTrials(num_features, 20).errors
    bound = math.sqrt(4 * math.log(2 * pairs / 1e-6) / num_features)
    assert np.abs(errors).max() < bound
    # From the other side: the error is noise of the known size and not zero, nor a bias.
    kernel = KernelTrials(2, 1).kernel
    variance = (1 + kernel**4 - 2 * kernel**2) / num_features  # of the mean of D/2 cosines
    off = ~np.eye(30, dtype=bool)
    ratio = (errors**2).mean(axis=0)[off].sum() / variance[off].sum()
    assert 0.5 < ratio < 2.0


def test_a_wrong_bandwidth_would_be_noticed():
    errors = KernelTrials(2000, 20)
    wrong = errors.errors + errors.kernel - errors.kernel ** (1.7**2 / 2.5**2)
    assert np.abs(wrong).max() > math.sqrt(4 * math.log(2 * 20 * 435 / 1e-6) / 2000)


def test_linear_part_adds_the_cosine():
    table = some_table()
    plain = RandomFourierFeatures(64, linear_weight=0.0).fit_transform(table)
    model = RandomFourierFeatures(64, linear_weight=0.3)
    both = model.fit_transform(table)
    z = encoder(table)(table)
    for features in (plain, both):
        np.testing.assert_allclose(np.linalg.norm(features, axis=1), 1.0, atol=1e-5)
    np.testing.assert_allclose(both @ both.T, 0.7 * plain @ plain.T + 0.3 * z @ z.T, atol=1e-5)


def unit(rows):
    rows = np.asarray(rows, dtype=float)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def encoder(table, **arguments):
    """Returns encoded rows of unit length, which the linear part of the features is."""
    model = RandomFourierFeatures(2, linear_weight=0.5, **arguments).fit(table)
    return lambda table: math.sqrt(2.0) * model.transform(table)[:, 2:]


def test_encoding():
    table = {"x": np.array([1.0, 3.0]), "c": np.array(["b", "a"]), "flat": np.array([2.0, 2.0])}
    encode = encoder(table)
    expected = [[-1, 0, 0, 1, 0], [1, 0, 1, 0, 0]]
    np.testing.assert_allclose(encode(table), unit(expected), atol=1e-6)
    new = {"x": np.array([5.0]), "c": np.array(["zebra"]), "flat": np.array([2.5])}
    np.testing.assert_allclose(encode(new), unit([[3, 1, 0, 0, 0.5]]), atol=1e-6)


@pytest.mark.parametrize("values", [["a", "b", "a"], [7, 9, 7], [True, False, True], [2.0, 3.0, 2]])
def test_kinds_of_categories(values):
    table = {"c": np.array(values)}
    rows = encoder(table, categorical=["c"])(table)
    np.testing.assert_allclose(
        rows, np.eye(3)[1 + np.unique(values, return_inverse=True)[1]], atol=1e-6
    )


def test_median_bandwidth():
    rows = np.random.default_rng(0).normal(size=(300, 5)) * [1, 10, 100, 1, 1]
    model = RandomFourierFeatures(2).fit(rows)
    z = (rows - rows.mean(axis=0)) / rows.std(axis=0)
    distances = np.sqrt(((z[:, np.newaxis] - z) ** 2).sum(axis=2))[np.triu_indices(300, 1)]
    assert model.bandwidth_ == pytest.approx(np.median(distances), rel=1e-4)


def test_hashed_categories_share_buckets():
    table = some_table()
    chosen = {name: table[name] for name in ("job", "zip")}
    rows = encoder(chosen, categorical=["zip", "job"], hash_buckets=10)(chosen)
    assert rows.shape == (200, 4 + 10)  # three jobs stay one-hot
    rows = math.sqrt(2.0) * rows[:, 4:]
    np.testing.assert_allclose(np.sort(rows, axis=1), np.eye(10)[[9] * 200], atol=1e-6)
    assert len(np.unique(rows.argmax(axis=1))) > 5
    assert np.all(rows[table["zip"] == table["zip"][0]] == rows[0])


@pytest.mark.parametrize(
    "arguments",
    [
        {"categorical": ["job", "zip"]},
        {"categorical": ["job", "zip"], "hash_buckets": 2, "linear_weight": 0.0},
        {"categorical": ["job", "zip"], "sparse": True},
    ],
)
def test_keras_model_takes_raw_columns_and_loads(tmp_path, arguments):
    mapping = RandomFourierFeatures(40, **arguments).fit(some_table())
    fresh = some_table(seed=1)
    fresh["job"] = fresh["job"].astype(object)
    fresh["job"][:3] = "pilot"
    fresh["zip"][:2] = 99
    expected = mapping.transform(fresh)
    columns = {"age": "float32", "gain": "float32", "job": None, "zip": "float32"}
    if "categorical" in arguments:
        columns["zip"] = "int64"
    model = mapping.to_keras()
    batch = {
        name: keras.ops.convert_to_tensor(
            fresh[name].reshape(-1, 1) if kind is None else fresh[name].reshape(-1, 1).astype(kind)
        )
        for name, kind in columns.items()
    }
    np.testing.assert_allclose(model(batch), expected, atol=1e-4)
    model.save(tmp_path / "map.keras")
    again = keras.models.load_model(tmp_path / "map.keras")
    np.testing.assert_allclose(again(batch), expected, atol=1e-4)


def test_keras_model_of_a_matrix(tmp_path):
    rng = np.random.default_rng(0)
    rows = np.column_stack([rng.normal(50, 10, 100), rng.integers(-1, 4, 100)])
    mapping = RandomFourierFeatures(20, categorical=[1])
    features = mapping.fit_transform(rows)
    model = mapping.to_keras()
    assert model.input_shape == (None, 2)
    np.testing.assert_allclose(model.predict(rows, verbose=0), features, atol=1e-4)
    model.save(tmp_path / "map.keras")
    again = keras.models.load_model(tmp_path / "map.keras")
    rows[0, 1] = 17  # unknown
    np.testing.assert_allclose(again.predict(rows, verbose=0), mapping.transform(rows), atol=1e-4)


def test_a_seed_repeats_and_blocks_do_not_matter():
    table = some_table(20_000)
    first = RandomFourierFeatures(8, seed=5).fit_transform(table)
    again = RandomFourierFeatures(8, seed=5).fit(table)
    parts = [
        again.transform({name: values[start : start + 7000] for name, values in table.items()})
        for start in range(0, 20_000, 7000)
    ]
    np.testing.assert_allclose(np.concatenate(parts), first, atol=1e-6)
    assert np.abs(RandomFourierFeatures(8, seed=6).fit_transform(table) - first).max() > 0.01


def test_bad_input_of_fit():
    for arguments, table, message in [
        ({"num_features": 7}, some_table(), "even.*got 7"),
        ({"bandwidth": "mean"}, some_table(), "'median' or a number"),
        ({"categorical": ["jab"]}, some_table(), r"lacks: 'jab'. Choose from 'age'"),
        ({"categorical": ["gain"]}, some_table(), "column 'gain' must be integers or text"),
        ({}, {"a": np.zeros(3), "b": np.zeros(2)}, r"shape \(n,\)"),
        ({}, {"a": np.array([1.0, np.inf])}, "'a' must be finite, but 1 of 2"),
        ({}, {"a": np.array([np.nan, np.nan])}, "'a' needs an entry, got missing.*Leave it"),
        (
            {"hash_buckets": None},
            {"a": np.arange(10_001).astype(str)},
            "got 10001 in column 'a'.*hash_buckets",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            RandomFourierFeatures(**arguments).fit(table)


def test_many_categories_are_hashed_by_default_and_long_texts_take_their_own_memory():
    """As an array of fixed width, the texts would take 20 GB."""
    texts = np.array([f"text {i}" for i in range(5000)], dtype=object)
    texts[7] = "x" * 10**6
    table = {"free": texts, "few": (np.arange(5000) % 1024).astype(str)}
    model = RandomFourierFeatures(8).fit(table)
    assert model.hashed_ == {"free": 5000}
    assert [column.width for column in model.columns_] == [1024, 1025]
    rows = {name: values[:2000] for name, values in table.items()}
    made = model.transform(rows)[:, 8:1032]
    assert np.all((made > 0).sum(axis=1) == 1)
    # Two of m texts share a bucket with chance 1 / 1024; a bucket is used by 1 - e^(-m / 1024).
    used = np.count_nonzero(made.sum(axis=0)) / 1024
    assert used == pytest.approx(1 - math.exp(-2000 / 1024), abs=0.05)


def test_columns_of_objects_are_numbers_or_texts():
    entries = {
        "numbers": [1, 2.5, None, np.float32(3)],
        "decimals": [Decimal(1), Decimal("0.5"), float("nan"), 2],
        "pandas": pd.array([1, None, 3, 4], dtype="Int64"),
        "texts": ["a", None, "b", float("nan")],
        "mixed": ["7", 7, None, 1.5],
        "flags": [True, False, None, True],
    }
    table = {name: np.array(list(column), dtype=object) for name, column in entries.items()}
    model = RandomFourierFeatures(8).fit(table)
    widths = {column.name: column.width for column in model.columns_}
    assert widths == {
        **dict.fromkeys(("numbers", "decimals", "pandas"), 2),
        **{"texts": 4, "mixed": 4, "flags": 2},
    }
    same = {**table, "mixed": np.array([7, "7", None, 1.5], dtype=object)}
    np.testing.assert_array_equal(model.transform(table), model.transform(same))
    words = {"word": np.array(["größe", "b"], dtype=object)}
    spelt = {"word": np.array(["größe".encode(), b"b"], dtype=object)}  # as a data set gives them
    by_word = RandomFourierFeatures(8).fit(words)
    np.testing.assert_array_equal(by_word.transform(words), by_word.transform(spelt))
    months = {"month": np.array([pd.Period("2024-01")] * 3, dtype=object)}
    with pytest.raises(
        TypeError, match=r"'month' must be numbers, text or dates, got pandas\..*Per"
    ):
        RandomFourierFeatures(8).fit(months)


def test_missing_numbers_become_the_mean_and_a_column(tmp_path):
    table = {**some_table(), "gain": np.where(np.arange(200) % 4, some_table()["gain"], np.nan)}
    model = RandomFourierFeatures(64).fit(table)
    missing = np.isnan(table["gain"])
    assert model.n_features_out_ == RandomFourierFeatures(64).fit(some_table()).n_features_out_ + 1
    gains = {"gain": table["gain"]}
    present = table["gain"][~missing]
    numbers = np.where(missing, 0.0, (table["gain"] - present.mean()) / present.std())
    expected = unit(np.column_stack([numbers, missing]))
    np.testing.assert_allclose(encoder(gains)(gains), expected, atol=1e-5)
    batch = {name: keras.ops.convert_to_tensor(v.reshape(-1, 1)) for name, v in table.items()}
    batch |= {name: keras.ops.cast(batch[name], "float32") for name in ("age", "gain", "zip")}
    model.to_keras().save(tmp_path / "map.keras")
    made = keras.models.load_model(tmp_path / "map.keras")(batch)
    np.testing.assert_allclose(made, model.transform(table), atol=1e-4)


def test_wrong_kinds():
    with pytest.raises(ValueError, match=r"shape \(n, d\), got \(3,\)\. Reshape"):
        RandomFourierFeatures().fit(np.zeros(3))
    with pytest.raises(TypeError, match="list of names"):
        RandomFourierFeatures(categorical="job").fit(some_table())
    with pytest.raises(TypeError, match="'job' must be numbers"):
        RandomFourierFeatures(categorical=[]).fit(some_table())
    with pytest.raises(TypeError, match="'z' must be numbers or text, got dtype complex128"):
        RandomFourierFeatures().fit({"z": np.array([1j])})


def test_bad_input_of_transform():
    model = RandomFourierFeatures(8).fit(some_table())
    with pytest.raises(ValueError, match="lacks columns of fit: 'job'"):
        model.transform({name: v for name, v in some_table().items() if name != "job"})
    changed = {**some_table(), "job": np.arange(200)}
    with pytest.raises(TypeError, match="as in fit, text, got numbers"):
        model.transform(changed)


def test_a_matrix_must_keep_its_columns():
    rows = np.random.default_rng(0).normal(size=(20, 3))
    model = RandomFourierFeatures(8).fit(rows)
    assert model.transform(rows[:5]).shape == (5, 8 + 3)
    with pytest.raises(ValueError, match=r"X has 2 features, but .* expecting 3"):
        model.transform(rows[:, :2])
    with pytest.raises(ValueError, match=r"X has 4 features, but .* expecting 3"):
        model.transform(np.c_[rows, rows[:, 0]])


def test_sparse_frequencies_read_one_to_three_columns_each():
    """Half of the features read all eight columns, the others two on average: 5/8 in all."""
    table = np.random.default_rng(0).normal(size=(500, 8))
    mapping = RandomFourierFeatures(400, linear_weight=0.0, sparse=True).fit(table)
    changed = table.copy()
    changed[:, 3] = changed[::-1, 3]
    differ = np.any(mapping.transform(changed) != mapping.transform(table), axis=0)
    # 100 sparse frequencies: three standard errors are 13 of 200 frequencies.
    assert differ.mean() == pytest.approx(0.625, abs=0.065)
    np.testing.assert_allclose(np.linalg.norm(mapping.transform(table), axis=1), 1.0, atol=1e-5)


def test_beyond_the_numbers_of_fit_features_are_constant():
    """Sparse features see ranks, and dense ones numbers without outliers."""
    rng = np.random.default_rng(0)
    table = {"gain": np.exp(3.0 * rng.normal(size=2000)), "job": rng.choice(["a", "b"], 2000)}
    table["gain"][::7] = np.nan
    mapping = RandomFourierFeatures(400, linear_weight=0.0, sparse=True).fit(table)
    ends = {"gain": np.array([1e7, 1e9, np.nan]), "job": np.array(["a", "a", "a"])}
    first, second, missing = mapping.transform(ends)
    assert first == pytest.approx(second, abs=1e-6) and np.all(np.isfinite(missing))
    model = mapping.to_keras()
    batch = {
        "gain": keras.ops.convert_to_tensor(ends["gain"].astype("float32")[:, np.newaxis]),
        "job": keras.ops.convert_to_tensor(ends["job"][:, np.newaxis]),
    }
    np.testing.assert_allclose(np.asarray(model(batch)), [first, second, missing], atol=1e-4)


def test_sparse_takes_a_table_without_numbers():
    table = {"job": np.random.default_rng(0).choice(["a", "b", "c"], 50)}
    mapping = RandomFourierFeatures(20, sparse=True).fit(table)
    batch = {"job": keras.ops.convert_to_tensor(table["job"][:, np.newaxis])}
    np.testing.assert_allclose(mapping.to_keras()(batch), mapping.transform(table), atol=1e-5)


OUTLIERS = {
    "one row": (lambda age: np.where(np.arange(len(age)) == 7, 1e8, age), 1),
    "below": (lambda age: np.where(np.arange(len(age)) == 7, -1e8, age), 1),
    "a number for unknown ones": (
        lambda age: np.where(np.arange(len(age)) % 4 == 0, 1e8, age),
        500,
    ),
    "counts, mostly zero": (
        lambda age: np.where(age > 85, 1e8, np.where(age > 70, age - 70, 0.0)),
        None,
    ),
}


@pytest.mark.parametrize("kind", OUTLIERS)
def test_outliers_count_as_the_nearest_numbers_that_are_none(kind, tmp_path):
    change, number = OUTLIERS[kind]
    table = some_table(2000) | {"young": np.where(np.arange(2000) == 3, 1.0, 0.0)}
    changed = change(table["age"].astype(float))
    number = number or int((changed > 1e7).sum())
    model = RandomFourierFeatures(200).fit(table | {"age": changed})
    assert model.outliers_ == {"age": number}
    features = model.transform(table | {"age": changed})
    # Ages still differ, as they would not within 1e-6 of their range.
    far = np.abs(changed) > 1e7
    assert np.unique(features[~far, -64:].round(4), axis=0).shape[0] > 500
    # New outliers are moved in the same way, and so does the Keras model.
    new = {name: column[:3] for name, column in table.items()} | {
        "age": np.array([-1e9, 1e9, np.nan])
    }
    nearer = new | {
        "age": np.array([model.columns_[0].low, model.columns_[0].high, np.nan], np.float32)
    }
    np.testing.assert_array_equal(model.transform(new), model.transform(nearer))
    inputs = {
        name: column[:, np.newaxis].astype("float32")
        if column.dtype.kind in "if"
        else keras.ops.convert_to_tensor(column[:, np.newaxis])
        for name, column in new.items()
    }
    found = model.to_keras().predict(inputs, verbose=0)
    np.testing.assert_allclose(found, model.transform(new), atol=1e-5)
    # A rare indicator keeps its one.
    assert model.columns_[-1].high == math.inf


def test_a_heavy_tail_and_whole_numbers_have_no_outliers():
    rng = np.random.default_rng(1)
    table = {
        "income": rng.lognormal(10.0, 0.8, 3000),
        "children": rng.poisson(0.3, 3000),
        "constant": np.ones(3000),
        "three": rng.integers(0, 3, 3000),
        "amounts": np.where(rng.random(3000) < 0.11, 10 ** rng.uniform(1, 5, 3000), 0.0),
    }
    assert RandomFourierFeatures(20).fit(table).outliers_ == {}
