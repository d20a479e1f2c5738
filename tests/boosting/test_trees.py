"""Trees of LightGBM as arrays and as a Keras layer have its own scores."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import pytest

# The arrays are internal: `to_keras` of PrivateBoosting shows them, after a long fit.
from tf_labeldp.boosting._trees import Trees

try:
    import lightgbm
except OSError as error:  # the system lacks OpenMP
    pytest.skip(str(error), allow_module_level=True)

CATEGORICAL = [1, 4]
OBJECTIVES = {0: "regression", 2: "binary", 3: "multiclass"}


def some_rows(n=800, seed=0):
    """Returns numbers, codes of 40 and of 5 categories, and whole numbers with zeros (n, 6)."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(n, 6))
    rows[:, 1], rows[:, 4] = rng.integers(0, 40, n), rng.integers(0, 5, n)
    rows[:, 5] = rng.integers(-2, 3, n)
    rows[rng.random(rows.shape) < 0.1] = np.nan
    return rows.astype(np.float32)


def some_labels(rows, num_classes):
    x = np.nan_to_num(rows)
    scores = x[:, 0] + np.sin(7 * x[:, 1]) + 2 * (x[:, 4] == 3) - 0.5 * x[:, 2] * x[:, 5]
    if num_classes == 0:
        return scores
    quantiles = np.quantile(scores, np.arange(1, num_classes) / num_classes)
    return np.digitize(scores, quantiles)


def of_lightgbm(num_classes, rounds=15, categorical=CATEGORICAL, rows=None, **parameters):
    rows = some_rows() if rows is None else rows
    parameters = {
        "objective": OBJECTIVES[num_classes],
        "num_class": max(1, num_classes if num_classes > 2 else 1),
        "min_data_per_group": 5,
        "max_cat_to_onehot": 3,
        "num_threads": 1,
        "verbosity": -1,
        **parameters,
    }
    data = lightgbm.Dataset(
        rows,
        some_labels(rows, num_classes),
        categorical_feature=categorical or [],
        params=parameters,
    )
    booster = lightgbm.train(parameters, data, rounds)
    return Trees.from_lightgbm(booster.model_to_string()), lambda x: booster.predict(
        x, raw_score=True
    )


MODES = {
    "plain": {},
    "NaN is zero": {"use_missing": False},
    "zero is missing": {"zero_as_missing": True},
}


def check_scores(trees, score, rows):
    expected = score(rows).reshape(len(rows), -1)
    tolerance = 1e-6 * np.maximum(1.0, np.abs(expected))
    assert np.all(np.abs(trees.scores(rows) - expected) <= 1e-3 * tolerance)
    found = keras.ops.convert_to_numpy(trees.layer()(rows))
    assert found.dtype == np.float32 and found.shape == expected.shape
    assert np.all(np.abs(found - expected) <= tolerance)


@pytest.mark.parametrize("num_classes", [0, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_scores_are_those_of_lightgbm(mode, num_classes):
    trees, score = of_lightgbm(num_classes, **MODES[mode])
    rows = some_rows(seed=1)
    # Unknown, negative and rare codes, and zeros.
    rows[::7, 1], rows[::11, 1], rows[::13, 4], rows[::5, 5] = 300, -1, 9, 0
    check_scores(trees, score, rows)
    # Numbers at thresholds, and right above them.
    rng = np.random.default_rng(2)
    nodes = trees.nodes
    is_inner = (nodes.left != np.arange(len(nodes))) & (nodes.category_set < 0)
    for _ in range(3):
        node = rng.choice(np.flatnonzero(is_inner & np.isfinite(nodes.threshold)), len(rows))
        at = nodes.threshold[node]
        above = np.nextafter(at, np.float32(np.inf))
        rows[np.arange(len(rows)), nodes.feature[node]] = np.where(
            rng.random(len(at)) < 0.5, at, above
        )
    check_scores(trees, score, rows)


@pytest.mark.parametrize("mode", MODES)
def test_columns_that_were_complete_in_fit(mode):
    rows = np.nan_to_num(some_rows())
    trees, score = of_lightgbm(2, 20, CATEGORICAL, rows, **MODES[mode])
    check_scores(trees, score, some_rows(seed=1))


@pytest.mark.parametrize("mode", MODES)
def test_without_categories_and_with_categories_alone(mode):
    rows = some_rows()
    check_scores(*of_lightgbm(2, 20, None, **MODES[mode]), rows)
    rows = rows[:, [1, 4, 1, 4, 1, 4]]
    check_scores(*of_lightgbm(2, 20, list(range(6)), rows, **MODES[mode]), rows)


def test_codes_need_not_be_consecutive():
    rows = some_rows()
    rows[:, 1] *= 3
    # Codes that are no multiples of three are unknown.
    check_scores(*of_lightgbm(2, 20, CATEGORICAL, rows), some_rows(seed=1))


def test_numbers_that_lightgbm_takes_for_zero():
    tiny = np.float32([0.0, 1e-38, 1e-35, 2e-35, -1e-38, -1e-35, -2e-35, np.nan])
    for extra in ({}, {"zero_as_missing": True}):
        trees, score = of_lightgbm(2, **extra)
        rows = np.repeat(some_rows(200, seed=1), len(tiny), axis=0)
        rows[:, 5] = np.tile(tiny, 200)
        check_scores(trees, score, rows)


@pytest.mark.slow
def test_many_trees_and_a_large_baseline_are_exact_to_float32():
    """Scores near zero next to a baseline of 1000, where sums in float32 lose four digits."""
    trees, score = of_lightgbm(0, 500, learning_rate=0.05)
    rows = some_rows(400, seed=1)
    check_scores(trees, score, rows)
    nodes = trees.nodes
    shift = np.where(nodes.left == np.arange(len(nodes)), 2.0, 0.0)
    nodes = dataclasses.replace(nodes, value=nodes.value + shift)
    moved = dataclasses.replace(trees, nodes=nodes, baseline=np.array([-1000.0]))
    found = keras.ops.convert_to_numpy(moved.layer()(rows))
    np.testing.assert_allclose(found[:, 0], score(rows), rtol=1e-6, atol=1e-7)


def test_a_tree_of_one_leaf_and_the_initial_scores():
    rows = some_rows(60)
    labels = np.zeros(60)
    data = lightgbm.Dataset(rows, labels, init_score=np.full(60, 2.5))
    booster = lightgbm.train({"objective": "regression", "verbosity": -1}, data, 3)
    trees = Trees.from_lightgbm(booster.model_to_string(), [2.5])
    expected = booster.predict(rows, raw_score=True) + 2.5
    np.testing.assert_allclose(trees.scores(rows)[:, 0], expected, rtol=1e-12)
    np.testing.assert_allclose(np.asarray(trees.layer()(rows))[:, 0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    "parameters",
    [
        {"linear_tree": True},
        {"boosting": "rf", "bagging_freq": 1, "bagging_fraction": 0.5},
    ],
)
def test_other_models_of_lightgbm_are_refused(parameters):
    with pytest.raises(ValueError, match="sums trees of constant leaves"):
        of_lightgbm(0, 2, None, **parameters)


@pytest.mark.slow
def test_a_saved_model_and_an_exported_one_score_the_same(tmp_path):
    trees, _ = of_lightgbm(3, 10)
    inputs = keras.Input((6,))
    model = keras.Model(inputs, trees.layer(name="trees")(inputs))
    rows = some_rows(50, seed=1)
    expected = trees.scores(rows)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    loaded.compile(jit_compile=True)
    np.testing.assert_allclose(loaded.predict(rows, verbose=0), expected, rtol=1e-6, atol=1e-6)
    model.export(tmp_path / "served", verbose=False)
    served = keras.layers.TFSMLayer(tmp_path / "served", call_endpoint="serve")
    np.testing.assert_allclose(np.asarray(served(rows)), expected, rtol=1e-6, atol=1e-6)
