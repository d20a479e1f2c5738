"""The front door: what it chooses, from public facts alone, and what it promises."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import importlib.machinery
import json
import pickle
import sys
import warnings

import keras
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import tensorflow as tf
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import tf_labeldp as ldp
from tf_labeldp.features import NeighbourSmoothing, RandomFourierFeatures
from tf_labeldp.heads import PrivatePoissonRegression
from tf_labeldp.vault import LabelKind, Numbers

N = 1500
RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(N, 6)).astype("float32")
CLASSES = (ROWS @ RNG.normal(size=(6, 3))).argmax(axis=1)
TABLE = pd.DataFrame(
    {
        "age": np.where(RNG.random(N) < 0.1, np.nan, RNG.uniform(18, 90, N)),
        "job": RNG.choice(["nurse", "smith", None], N),
        "sick": pd.Categorical(RNG.choice(["yes", "no"], N)),
    }
)
ILL = (TABLE["age"].fillna(50) + 20 * (TABLE["job"] == "smith") > 60).to_numpy().astype(int)


def classifier(epsilon=3.0, **arguments):
    return ldp.PrivateClassifier(epsilon, **{"num_classes": 3, "insecure_seed": 0, **arguments})


@pytest.mark.slow
def test_kinds_of_features():
    table, rows = TABLE[:60], ROWS[:60]
    for features, kind in (
        (table, "table"),
        ({"a": rows[:, 0]}, "table"),
        (table[["job"]].fillna("").to_numpy(dtype=object), "table"),
        (rows, "numbers"),
        (rows.tolist(), "numbers"),
        (scipy.sparse.csr_matrix(rows), "numbers"),
        (RNG.random((60, 8, 8)), "images"),
        (RNG.integers(256, size=(60, 6, 6, 3), dtype="uint8"), "images"),
    ):
        assert classifier().fit(features, CLASSES[:60]).choice_.kind == kind


@pytest.mark.slow
def test_a_data_frame_with_texts_and_missing_numbers(tmp_path):
    model = classifier(num_classes=2).fit(TABLE, ILL)
    assert model.score(TABLE, ILL) > 0.85
    assert model.feature_names_in_.tolist() == ["age", "job", "sick"]
    assert model.n_features_in_ == 3
    assert isinstance(model.head_, ldp.PrivateLogisticRegression)
    assert model.choice_.kind == "table" and model.head_.spread == "half"
    assert model.head_.encoder.sparse
    numbers = ldp.PrivateRegressor(1.0, low=0.0, high=1.0, insecure_seed=0).fit(TABLE, ILL)
    assert numbers.head_.encoder.sparse and numbers.head_.spread == "half"
    with pytest.raises(ValueError, match="lacks columns of fit: 'job'"):
        model.predict(TABLE.drop(columns="job"))
    model.to_keras().save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    batch = ldp.features.to_inputs(TABLE, again)
    np.testing.assert_allclose(again(batch), model.predict_proba(TABLE), atol=1e-6)
    assert ldp.guarantee(again).epsilon == model.guarantee().epsilon


def layer_names(model):
    """The names of a model's layers, also of nested models."""
    nested = [layer for layer in model.layers if hasattr(layer, "layers")]
    inner = [name for layer in nested for name in layer_names(layer)]
    return [model.name, *(layer.name for layer in model.layers), *inner]


@pytest.mark.parametrize("number", [False, True])
@pytest.mark.parametrize("smooth", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_columns_of_any_name_are_worth_their_release(tmp_path, number, smooth):
    """Names that Keras, HDF5 or serving forbid, and the names of the model's layers."""
    label = CLASSES % 2 + 0.5 if number else CLASSES % 2
    options = {"low": 0.5, "high": 2.0} if number else {"num_classes": 2}

    def fitted(table):
        estimator = ldp.PrivateRegressor if number else ldp.PrivateClassifier
        encoder = None
        if smooth:
            encoder = NeighbourSmoothing(RandomFourierFeatures(100).fit(table)).fit(table)
        model = estimator(3.0, 1e-6, **options, encoder=encoder, insecure_seed=0)
        return model.fit(table, label)

    layers = layer_names(fitted({"age": ROWS[:, 0], "job": CLASSES.astype(str)}).to_keras())
    odd = [
        "price/unit",
        "price_unit",
        "a b",
        "a-b",
        "größe",
        "",
        "x\0y",
        "A",
        "a",
        "cast",
        "9",
        "_",
    ]
    names = list(dict.fromkeys([*odd, "column_price_unit", "spread", "neighbours", *layers]))
    rng = np.random.default_rng(0)
    table = {name: rng.normal(size=len(ROWS)) for name in names} | {"job/": CLASSES.astype(str)}
    model = fitted(table)
    model.to_keras().save(tmp_path / "model.keras")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "When providing `inputs` as a dict")  # other names
        again = keras.models.load_model(tmp_path / "model.keras")
    batch = {
        name: tf.constant(values[:20, np.newaxis].astype(str if name == "job/" else np.float32))
        for name, values in table.items()
    }
    rows = {name: values[:20] for name, values in table.items()}
    expected = model.predict(rows)[:, np.newaxis] if number else model.predict_proba(rows)
    np.testing.assert_allclose(again(batch), expected, atol=1e-4)
    if smooth:  # The slow cases also serve the model.
        again.export(tmp_path / "served", verbose=False)
        served = tf.saved_model.load(tmp_path / "served")
        np.testing.assert_allclose(served.serve(batch), expected, atol=1e-4)


def test_columns_whose_names_are_the_same_text_are_refused():
    with pytest.raises(ValueError, match=r"names that differ as text.*Rename one"):
        RandomFourierFeatures(8).fit(pd.DataFrame({0: ROWS[:, 0], "0": ROWS[:, 1]}))


@pytest.mark.slow
def test_images_are_smoothed_patches():
    digits = load_digits()
    model = classifier(1.0, num_classes=10).fit(digits.images[:1400], digits.target[:1400])
    assert model.score(digits.images[1400:], digits.target[1400:]) > 0.9
    assert isinstance(model.head_.encoder, NeighbourSmoothing)
    outputs = model.to_keras().predict(digits.images[1400:], verbose=0)
    np.testing.assert_allclose(outputs, model.predict_proba(digits.images[1400:]), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_rows_of_numbers(scale):
    """A column in another unit changes the rows that are smoothed, and the score little."""
    rows = ROWS * [scale, 1, 1, 1, 1, 1]
    model = classifier().fit(rows, CLASSES)
    assert model.score(rows, CLASSES) > 0.75
    encoder = model.head_.encoder
    assert len(encoder.maps) == 2
    assert (encoder.maps[1].encoder is None) == (scale == 1.0)
    outputs = model.to_keras().predict(rows, verbose=0)
    np.testing.assert_allclose(outputs, model.predict_proba(rows), atol=1e-4)


def test_side_by_side_features_are_centred_and_of_unit_norm():
    encoder = classifier().fit(ROWS, CLASSES).head_.encoder
    rows = encoder.transform(ROWS)
    width = encoder.maps[0].transform(ROWS).shape[1]
    for part, map_ in ((rows[:, :width], encoder.maps[0]), (rows[:, width:], encoder.maps[1])):
        features = map_.transform(ROWS)
        centred = features - features.mean(axis=0)
        expected = centred / np.linalg.norm(centred, axis=1, keepdims=True)
        np.testing.assert_allclose(part, expected, atol=1e-5)


def test_sparse_rows_and_few_rows_are_taken_as_they_are():
    sparse = scipy.sparse.csr_matrix(np.maximum(ROWS, 0.0) + 0.1)
    assert classifier().fit(sparse, CLASSES).head_.encoder is None
    few = classifier().fit(ROWS[:60], CLASSES[:60])
    assert isinstance(few.head_.encoder, RandomFourierFeatures)


@pytest.mark.slow
@pytest.mark.holds("front_door.PrivateClassifier")
def test_no_choice_depends_on_labels():
    """Other labels, the same features: the same encoder, head, key and words."""
    first, second = (
        classifier().fit(ROWS, labels) for labels in (CLASSES, np.zeros(N, dtype=np.int64))
    )
    # A remark on a rare class is made of the release alone, after it.
    choices = [dataclasses.replace(each.choice_, remarks=()) for each in (first, second)]
    assert choices[0] == choices[1]
    assert type(first.head_) is type(second.head_)
    np.testing.assert_array_equal(
        first.head_.encoder.transform(ROWS), second.head_.encoder.transform(ROWS)
    )


@pytest.mark.slow
@pytest.mark.holds("front_door.PrivateClassifier")
def test_guarantee_is_that_of_one_release_charged_to_the_vault():
    budget = ldp.PrivacyBudget(0.7, 1e-6)
    labels = ldp.PrivateLabels(CLASSES, num_classes=3, budget=budget)
    model = ldp.PrivateClassifier(0.6).fit(ROWS, labels)
    assert [receipt.kind for receipt in labels.receipts] == ["release"]
    assert model.guarantee() == labels.guarantee()
    assert model.guarantee().epsilon == pytest.approx(0.6) and model.guarantee().delta == 1e-6
    with pytest.raises(ldp.BudgetExceededError):
        ldp.PrivateClassifier(0.6, key="again").fit(ROWS, labels)
    assert len(labels.receipts) == 1
    alone = ldp.PrivateClassifier(0.5, num_classes=3).fit(ROWS, CLASSES)
    assert alone.guarantee().delta == 1e-5


@pytest.mark.slow
@pytest.mark.holds("front_door.PrivateRegressor")
def test_numbers_as_labels():
    labels = np.clip(20.0 + 8.0 * ROWS[:, 0], 10.0, 30.0)
    model = ldp.PrivateRegressor(3.0, low=10.0, high=30.0, insecure_seed=0).fit(ROWS, labels)
    assert model.score(ROWS, labels) > 0.7
    assert 10.0 <= model.predict(ROWS).min() and model.predict(ROWS).max() <= 30.0
    outputs = model.to_keras().predict(ROWS, verbose=0)[:, 0]
    np.testing.assert_allclose(outputs, model.predict(ROWS), atol=1e-3)
    vault = ldp.PrivateLabels(labels, Numbers(10, 30), budget=ldp.PrivacyBudget(3.0, 1e-6))
    assert ldp.PrivateRegressor(3.0).fit(ROWS, vault).guarantee() == vault.guarantee()
    classes = ldp.PrivateLabels(CLASSES, 3, budget=ldp.PrivacyBudget(3.0, 1e-6))
    for settings in ({}, {"encoder": RandomFourierFeatures(32).fit(ROWS)}):
        with pytest.raises(ValueError, match="PrivateRegressor expected numbers, got 3 classes"):
            ldp.PrivateRegressor(3.0, **settings).fit(ROWS, classes)
    assert not classes.history()


@pytest.mark.slow
def test_counts_by_the_poisson_loss():
    rates = np.exp(ROWS[:, 0] - 1.0)
    counts = np.random.default_rng(0).poisson(rates).clip(0, 8)
    best = 1.0 - np.mean((counts - rates) ** 2) / np.var(counts)
    settings = {"low": 0, "high": 8, "insecure_seed": 0}
    model = ldp.PrivateRegressor(3.0, loss="poisson", **settings).fit(ROWS, counts)
    assert isinstance(model.head_, PrivatePoissonRegression)
    assert model.score(ROWS, counts) > 0.5 * best > 0.1
    outputs = model.to_keras().predict(ROWS, verbose=0)[:, 0]
    np.testing.assert_allclose(outputs, model.predict(ROWS), atol=1e-4)
    vault = ldp.PrivateLabels(counts, Numbers(0, 8), budget=ldp.PrivacyBudget(3.0, 1e-6))
    with pytest.raises(ValueError, match="loss must be one of squared_error, poisson"):
        ldp.PrivateRegressor(3.0, loss="poission").fit(ROWS, vault)
    assert not vault.history()


def test_scikit_learn_s_conventions():
    model = classifier(classes=["a", "b", "c"], num_classes=None)
    assert clone(model).get_params() == model.get_params()
    names = np.array(["a", "b", "c"])[CLASSES]
    pipeline = make_pipeline(StandardScaler(), model).fit(ROWS, names)
    assert pipeline.score(ROWS, names) > 0.75
    assert set(pipeline.predict(ROWS)) <= {"a", "b", "c"}
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict(ROWS), model.predict(ROWS))
    assert again.guarantee() == model.guarantee()


def test_an_encoder_of_one_s_own():
    encoder = RandomFourierFeatures(32).fit(ROWS)
    model = classifier(encoder=encoder).fit(ROWS, CLASSES)
    assert model.head_.encoder is encoder
    assert model.choice_.reason.startswith("Your encoder")


def test_bad_input():
    for features, labels, arguments, message in (
        (ROWS, [], {}, "1500 rows and 0 labels"),
        (ROWS[:, 0], CLASSES, {}, r"features must have shape \(n, d\), got \(1500,\)"),
        (ROWS[:10], CLASSES, {}, "10 rows and 1500 labels"),
        (ROWS, CLASSES + 9, {}, "labels must"),
        (ROWS, CLASSES, {"epsilon": 0.0}, "epsilon must be finite and above zero"),
        (ROWS, CLASSES, {"delta": 2.0}, "delta must"),
        (np.where(ROWS > 3, np.inf, ROWS), CLASSES, {}, "column 0 must be finite|infinite"),
    ):
        with pytest.raises(ValueError, match=message):
            classifier(**arguments).fit(features, labels)


def test_a_failed_fit_leaves_the_model_as_it_was():
    model = classifier().fit(ROWS, CLASSES)
    before = model.predict(ROWS)
    with pytest.raises(ValueError, match="labels must"):
        model.fit(ROWS, CLASSES + 9)
    np.testing.assert_array_equal(model.predict(ROWS), before)
    with pytest.raises(ValueError, match="not fitted"):
        classifier().predict(ROWS)
    with pytest.raises(TypeError, match=r"more than once, got a tf\.data\.Dataset"):
        import tensorflow as tf

        classifier().fit(tf.data.Dataset.from_tensors(ROWS), CLASSES)


@pytest.mark.parametrize("kind", ["images", "table", "numbers"])
def test_recommendations_are_measured_rows_the_best_first(kind):
    table = json.loads(importlib.import_module("report").measured())[kind]
    choice = ldp.recommend(0.9, 50_000, kind)
    assert choice.measured_at == 1.0 and not choice.remarks
    column = 2 + table["epsilons"].index("1")
    assert set(choice.rows) == {(*row[:2], row[column]) for row in table["rows"] if row[column]}
    for data in {row[0] for row in choice.rows}:
        figures = [float(row[2].split()[0]) for row in choice.rows if row[0] == data]
        assert figures == sorted(figures, reverse=True)
    assert str(choice).startswith(choice.reason) and choice.rows[0][2] in str(choice)


def test_recommendations_say_where_the_tables_do_not_reach():
    assert "reach from epsilon 0.01 to 4, not to 9" in str(ldp.recommend(9.0, 60_000, "images"))
    few = ldp.recommend(1.0, 600, "images")
    assert few.remarks == (
        "The tables are for up to 60,000 examples. With 600, expect the scores shown at "
        "epsilon 0.01.",
    )
    assert "The tables show classes" in str(ldp.recommend(1.0, 60_000, "numbers", num_classes=None))
    assert "show classes" not in str(ldp.recommend(1.0, 60_000, "table", num_classes=None))
    for arguments in ((0.0, 9, "table"), (1.0, 0, "table"), (1.0, 9, "tables")):
        with pytest.raises(ValueError, match="must be"):
            ldp.recommend(*arguments)


def test_measured_figures_are_those_of_the_results():
    report = importlib.import_module("report")
    assert json.loads(report.MEASURED.read_text(encoding="utf-8")) == json.loads(report.measured())


def network(shape, classes=3):
    layers = [keras.Input(shape), keras.layers.Flatten(), keras.layers.Dense(16, "relu")]
    return keras.Sequential([*layers, keras.layers.Dense(classes)])


@pytest.mark.slow
def test_a_model_of_ones_own_is_taught_by_the_head(tmp_path):
    mine = network((6,))
    model = classifier(epsilon=2.0, delta=1e-5, model=mine, epochs=10, insecure_seed=None)
    model.fit(ROWS, CLASSES)
    assert model.score(ROWS, CLASSES) > 0.75
    assert model.guarantee().epsilon == pytest.approx(2.0, rel=1e-4)
    assert ldp.guarantee(mine).epsilon == model.guarantee().epsilon  # it was trained in place
    assert "Your own model" in str(model.choice_) and model.choice_.rows[0][1] == "teacher"
    model.to_keras().save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras").predict(ROWS[:5], verbose=0)
    np.testing.assert_allclose(loaded, model.predict_proba(ROWS[:5]), atol=1e-5)


@pytest.mark.slow
def test_images_teach_a_model_in_two_releases():
    digits = load_digits()
    x, y = digits.images[:600, ..., None] / 16.0, digits.target[:600]
    labels = ldp.PrivateLabels(y, 10, budget=ldp.PrivacyBudget(2.0, 1e-4))
    model = ldp.PrivateClassifier(1.9, model=network((8, 8, 1), 10), epochs=3).fit(x, labels)
    assert len(model.head_.heads_) == 2 and labels.guarantee().epsilon <= 1.9
    assert model.predict(x).shape == (600,)


@pytest.mark.slow
def test_a_network_from_scratch_learns_images_without_channels(tmp_path, monkeypatch):
    # A smaller network is traced faster.
    monkeypatch.setattr("tf_labeldp.front_door.image_network.WIDTHS", (8, 16))
    digits = load_digits()
    x, y = digits.images[:400], digits.target[:400]
    model = ldp.PrivateClassifier(1.9, 1e-5, num_classes=10, method="network", epochs=1)
    model.fit(x, y)
    assert model.choice_.method == "network" and "You chose" in model.choice_.reason
    assert model.head_.rounds() == 2 and model.guarantee().epsilon == pytest.approx(1.9, rel=1e-4)
    expected = model.predict_proba(x[:20])
    model.to_keras().save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_allclose(loaded.predict(x[:20], verbose=0), expected, atol=1e-4)
    assert ldp.guarantee(loaded).epsilon == model.guarantee().epsilon


@pytest.mark.parametrize(
    ("features", "options", "words"),
    [
        (ROWS, {}, "needs images"),
        (np.zeros((N, 8, 8)), {"model": network((8, 8))}, "without model="),
        (np.zeros((N, 8, 8)), {"class_weight": {0: 1.0, 1: 1.0, 2: 2.0}}, "expected no weights"),
        (np.zeros((N, 8, 8, 3, 1)), {}, "needs images"),
    ],
)
def test_a_network_from_scratch_is_of_images(features, options, words):
    labels = ldp.PrivateLabels(CLASSES, 3, budget=ldp.PrivacyBudget(2.0, 1e-5))
    model = ldp.PrivateClassifier(2.0, method="network", **options)
    with pytest.raises(ValueError, match=words):
        model.fit(features, labels)
    assert not labels.history()
    with pytest.raises(ValueError, match="method must be"):
        ldp.PrivateRegressor(1.0, low=0, high=2, method="network").fit(ROWS, CLASSES)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dict", "list"])
def test_a_model_of_ones_own_with_several_inputs(form):
    """A vector, rows of numbers and small images; each gives label-free features of its kind."""
    shapes = {"age": (1,), "rows": (5,), "image": (8, 8, 1)}
    noise = np.random.default_rng(0).normal(size=(len(ROWS), 8, 8, 1)).astype("float32")
    parts = {"age": ROWS[:, 0], "rows": ROWS[:, 1:], "image": noise}
    keras.utils.set_random_seed(0)
    inputs = {name: keras.Input(shape, name=name) for name, shape in shapes.items()}
    flat = [keras.layers.Flatten()(one) for one in inputs.values()]
    hidden = keras.layers.Dense(16, "relu")(keras.layers.Concatenate()(flat))
    is_dict = form == "dict"
    mine = keras.Model(inputs if is_dict else list(inputs.values()), keras.layers.Dense(3)(hidden))
    x = parts if is_dict else list(parts.values())
    labels = ldp.PrivateLabels(CLASSES, 3, budget=ldp.PrivacyBudget(4.0, 1e-5))
    model = ldp.PrivateClassifier(4.0, model=mine, epochs=10, budget_for_evaluation=1.0)
    model.fit(x, labels)
    assert np.mean(model.predict(x) == CLASSES) > 0.6
    assert model.evaluation_.num_examples == 150
    assert labels.guarantee().epsilon == pytest.approx(4.0, rel=1e-4)
    assert set(np.shape(model.to_keras().predict(x, verbose=0))) == {len(ROWS), 3}


def test_a_table_has_no_model_of_ones_own():
    with pytest.raises(TypeError, match="needs features in an array"):
        classifier(num_classes=2, model=network((3,), 2)).fit(TABLE, ILL)


@pytest.mark.slow
def test_an_evaluation_is_of_examples_that_were_held_out():
    labels = ldp.PrivateLabels(CLASSES, 3, budget=ldp.PrivacyBudget(3.0, 1e-5))
    model = ldp.PrivateClassifier(3.0, budget_for_evaluation=1.0).fit(ROWS, labels)
    found = model.evaluation_
    assert found.metric == "accuracy" and found.num_examples == 150
    assert [use.examples for use in labels.history()] == [1350, 150]
    assert labels.guarantee().epsilon == pytest.approx(3.0, rel=1e-6)
    assert model.guarantee().epsilon == labels.guarantee().epsilon
    assert abs(found.value - model.score(ROWS, CLASSES)) < 0.15
    table = classifier(num_classes=2, budget_for_evaluation=0.5).fit(TABLE, ILL)
    # The predictions learnt from other labels at epsilon 3.
    assert table.evaluation_.guarantee().epsilon == pytest.approx(3.0, rel=1e-6)
    assert "accuracy" in str(table.evaluation_)
    numbers = ROWS[:, 0].clip(-2, 2)
    regressor = ldp.PrivateRegressor(3.0, low=-2, high=2, budget_for_evaluation=3.0)
    # As many labels would count as those of the table's people.
    regressor.fit(ROWS[1:], numbers[1:])
    assert regressor.evaluation_.metric == "mse"
    assert regressor.guarantee().epsilon == pytest.approx(3.0, rel=1e-6)
    others = ldp.PrivateLabels(CLASSES, 3, budget=ldp.PrivacyBudget(3.0, 1e-5))
    model.set_params(budget_for_evaluation=None).fit(ROWS, others)
    assert not hasattr(model, "evaluation_")


@pytest.mark.slow
def test_fits_on_arrays_with_an_evaluation_are_stated_and_saved_together(tmp_path):
    """A receipt has one content, whichever object carries it."""
    models = [classifier(num_classes=2, budget_for_evaluation=0.1) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for model in models:
            model.fit(TABLE, ILL)
    stated = [ldp.save(model, tmp_path / str(i)) for i, model in enumerate(models)]
    assert [each.epsilon for each in stated] == [each.guarantee().epsilon for each in models]
    assert stated[0].epsilon == pytest.approx(3.0, rel=1e-6)
    assert stated[1].epsilon > 4.0
    assert "An array of labels has no vault" in str(models[0].evaluation_.guarantee())


@pytest.mark.slow
def test_an_evaluation_that_is_stored_is_read_again(tmp_path):
    found = []
    for _ in range(2):
        labels = ldp.PrivateLabels(
            CLASSES, 3, budget=ldp.PrivacyBudget(1.0, 1e-5), store=tmp_path / "private"
        )
        model = ldp.PrivateClassifier(1.0, budget_for_evaluation=1.0, key="door").fit(ROWS, labels)
        found.append(model.evaluation_.value)
    assert found[0] == found[1] and len(labels.history()) == 2


def test_an_evaluation_that_does_not_fit_the_budget_is_refused_before_the_fit():
    labels = ldp.PrivateLabels(CLASSES, 3, budget=ldp.PrivacyBudget(1.0, 1e-5))
    with pytest.raises(ldp.BudgetExceededError):
        ldp.PrivateClassifier(1.0, budget_for_evaluation=2.0).fit(ROWS, labels)
    assert not labels.history()


@pytest.mark.slow
def test_an_evaluation_has_the_metric_that_was_asked_for():
    rare = (ROWS[:, 0] > 1.5).astype(int)
    for metric in ("auc", "average_precision", "f1"):
        model = classifier(num_classes=2, budget_for_evaluation=2.0, evaluation_metric=metric)
        found = model.fit(ROWS, rare).evaluation_
        assert found.metric == metric and found.guarantee().epsilon == pytest.approx(3.0)
        assert not any("rare" in remark for remark in model.choice_.remarks)
    numbers = ROWS[:, 0].clip(-2, 2)
    options = {"low": -2, "high": 2, "insecure_seed": 0, "budget_for_evaluation": 3.0}
    regressor = ldp.PrivateRegressor(3.0, evaluation_metric="mae", **options).fit(ROWS, numbers)
    assert regressor.evaluation_.metric == "mae"


def test_a_metric_that_cannot_be_released_costs_nothing():
    labels = ldp.PrivateLabels(CLASSES, 3, budget=ldp.PrivacyBudget(1.0, 1e-5))
    numbers = ldp.PrivateLabels(ROWS[:, 0], Numbers(-9, 9), budget=ldp.PrivacyBudget(1.0, 1e-5))
    for door, vault, metric, price, message in (
        (ldp.PrivateClassifier, labels, "auc", None, "expected budget_for_evaluation with eval"),
        (ldp.PrivateClassifier, labels, "average_precision", 0.5, "two classes"),
        (ldp.PrivateClassifier, labels, "mse", 0.5, "metric must be one of accuracy"),
        (ldp.PrivateRegressor, numbers, "mean", 0.5, "metric must be one of mse, mae, got"),
    ):
        with pytest.raises(ValueError, match=message):
            door(1.0, budget_for_evaluation=price, evaluation_metric=metric).fit(ROWS, vault)
        assert not vault.history()


@pytest.mark.slow
def test_a_class_that_is_rare_by_the_release_is_named():
    labels = np.where(ROWS[:, 0] > 1.9, "yes", "no")
    door = {"num_classes": None, "classes": ["no", "yes"]}
    share = float(np.mean(labels == "yes"))
    model = classifier(8.0, **door).fit(ROWS, labels)
    (remark,) = [text for text in model.choice_.remarks if "share" in text]
    assert 'class "yes"' in remark and "average_precision" in remark
    assert abs(float(remark.split("share of ")[1].split(" %")[0]) / 100 - share) < 0.02
    common = classifier(8.0, **door).fit(ROWS, np.where(ROWS[:, 0] > 0.5, "yes", "no"))
    assert not [text for text in common.choice_.remarks if "share" in text]


@pytest.mark.slow
def test_a_column_of_many_categories_is_hashed_and_named():
    rng = np.random.default_rng(3)
    city = rng.integers(0, 1100, N)
    table = {"city": np.char.add("c", np.r_[np.arange(1100), city[1100:]].astype(str)), "x": ROWS}
    table["x"] = ROWS[:, 0]
    model = classifier(num_classes=2).fit(table, (ROWS[:, 0] > 0).astype(int))
    (remark,) = [text for text in model.choice_.remarks if "hashed" in text]
    assert remark.startswith("Column 'city' has 1,100 categories")
    assert f"into {model.head_.encoder.hash_buckets:,} buckets" in remark
    batch = {name: tf.constant(values[:9, np.newaxis]) for name, values in table.items()}
    rows = {name: values[:9] for name, values in table.items()}
    np.testing.assert_allclose(model.to_keras()(batch), model.predict_proba(rows), atol=1e-4)


LABELS = (ROWS[:, 0] > 0).astype(int)
BAD_TABLES = {
    "sets of times": (
        {"hours": np.array([{datetime.time(12)}] * N, dtype=object)},
        TypeError,
        r"must be numbers, text or dates, got builtins\.set\. Convert it",
    ),
    "all missing": ({"x": ROWS[:, 0], "none": np.full(N, np.nan)}, ValueError, "Leave it out"),
    "all None": (
        {"x": ROWS[:, 0], "none": np.full(N, None)},
        ValueError,
        "'none' needs an entry, got missing ones alone. Leave it out",
    ),
    "names twice": (
        pd.DataFrame(ROWS[:, :3], columns=["age", "job", "age"]),
        ValueError,
        "expected columns with different names, got 'age' more than once. Rename or drop",
    ),
    "one value alone": ({"x": np.ones(N)}, ValueError, "rows of features that differ"),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_bad_tables_cost_nothing(name):
    table, kind, message = BAD_TABLES[name]
    labels = ldp.PrivateLabels(LABELS, 2, budget=ldp.PrivacyBudget(1.0, 1e-5))
    with pytest.raises(kind, match=message):
        ldp.PrivateClassifier(1.0).fit(table, labels)
    assert not labels.history()


def test_tables_without_rows_have_no_labels():
    for features in ({"x": np.zeros(0)}, np.zeros((0, 3))):
        with pytest.raises(ValueError, match=r"at least one label, got none|no rows"):
            classifier().fit(features, [])


@pytest.mark.slow
def test_columns_of_odd_kinds():
    """Each beside a column that explains the labels; the exported model gives the same."""
    words = np.where(LABELS == 1, "high", "low")
    mixed = np.array([["high", 7, None][i % 3] for i in range(N)], dtype=object)
    holes = np.where(np.arange(N) % 5, ROWS[:, 0], None)
    table = pd.DataFrame(
        {
            "flag": ROWS[:, 0] > 0,
            "constant": np.ones(N),
            "word": "same",
            "level": pd.Categorical(words, ["low", "middle", "high"], ordered=True),
            "mixed": mixed,
            "holes": holes,
            "whole": pd.array(np.where(np.arange(N) % 4, np.arange(N) % 9, None), dtype="Int64"),
            "decimal": [decimal.Decimal(i % 7) / 4 for i in range(N)],
        }
    )
    model = classifier(num_classes=2).fit(table, LABELS)
    assert model.score(table, LABELS) > 0.97
    widths = {column.name: column.width for column in model.head_.encoder.columns_}
    # A category each, and one for unknown ones; numbers, of which some are missing.
    assert widths == {
        **{"flag": 1, "constant": 1, "word": 2, "level": 3},
        **{"mixed": 4, "holes": 2, "whole": 2, "decimal": 1},
    }
    exported = model.to_keras()
    inputs = ldp.features.to_inputs(table.iloc[:40], exported)
    made = exported.predict(inputs, verbose=0)
    np.testing.assert_allclose(made, model.predict_proba(table.iloc[:40]), atol=1e-6)


SIZE = 6000
LARGE = pd.DataFrame({"a": RNG.uniform(size=SIZE), "b": RNG.choice(["x", "y"], SIZE)})
INTERACTION = ((LARGE["a"] > 0.5) ^ (LARGE["b"] == "y")).to_numpy().astype(int)


def test_many_classes_have_a_ridge_head_and_their_own_table():
    """Above 50: 60,000 labels of 60 classes are worth 12,000 true ones at epsilon 4."""
    for kind in ("images", "table", "numbers"):
        choice = ldp.recommend(4.0, 60_000, kind, num_classes=60)
        assert choice.method == "head" and "More than 50 classes" in choice.reason
        assert "ProjectiveGeometryResponse" in str(choice)
        assert {"head", "projective geometry"} <= {method for _, method, _ in choice.rows}
    assert ldp.recommend(4.0, 60_000, "table", num_classes=50).method == "boosting"
    assert ldp.recommend(4.0, 60_000, "table", num_classes=60, own_model=True).method == "model"
    codes = np.arange(2010) % 201
    rows = np.eye(201, dtype=np.float32)[codes]
    model = classifier(8.0, num_classes=201, encoder=RandomFourierFeatures(128).fit(rows))
    assert isinstance(model.fit(rows, codes).head_, ldp.PrivateRidge)
    assert model.predict_proba(rows[:3]).shape == (3, 201)


@pytest.mark.slow
def test_boosting_is_chosen_where_noisy_labels_are_worth_many_true_ones(tmp_path):
    """6,000 labels are worth 1,281 true ones at epsilon 1, and 3,480 at 2."""
    assert ldp.recommend(1.0, SIZE, "table").method == "head"
    assert ldp.recommend(2.0, SIZE, "table").method == "boosting"
    assert ldp.recommend(1.0, SIZE, "table", num_classes=10).method == "head"
    assert ldp.recommend(2.0, SIZE, "numbers").method == "head"
    model = classifier(2.0, num_classes=2).fit(LARGE, INTERACTION)
    assert model.choice_.method == "boosting" and isinstance(model.head_, ldp.PrivateBoosting)
    assert "gradient boosting" in str(model.choice_)
    assert model.guarantee().epsilon == pytest.approx(2.0, rel=1e-9)
    assert model.score(LARGE, INTERACTION) > 0.98
    model.to_keras().save(tmp_path / "model.keras")
    assert ldp.guarantee(tmp_path / "model.keras").epsilon == pytest.approx(2.0, rel=1e-9)
    head = classifier(2.0, num_classes=2, method="head").fit(LARGE, INTERACTION)
    assert head.choice_.method == "head" and not isinstance(head.head_, ldp.PrivateBoosting)
    assert "You chose method='head'" in str(head.choice_)
    # A matrix whose columns have different units is a table.
    matrix = np.stack([LARGE["a"], 1e4 * (LARGE["b"] == "y"), 30.0 * LARGE["a"] ** 2], axis=1)
    assert classifier(2.0, num_classes=2).fit(matrix, INTERACTION).choice_.method == "boosting"
    trees = classifier(2.0, method="boosting").fit(ROWS, CLASSES)
    assert isinstance(trees.head_, ldp.PrivateBoosting)
    for wrong in ({"encoder": NeighbourSmoothing().fit(ROWS)}, {"model": network((6,))}):
        with pytest.raises(ValueError, match="needs a table or rows of numbers"):
            classifier(method="boosting", **wrong).fit(ROWS, CLASSES)
    with pytest.raises(ValueError, match="method must be"):
        classifier(method="trees").fit(ROWS, CLASSES)


@pytest.mark.slow
@pytest.mark.holds("front_door.PrivateRegressor")
@pytest.mark.parametrize(("epsilon", "releases"), [(0.2, 1), (2.0, 3), (8.0, 3)])
def test_no_private_output_decides_on_the_method_for_numbers(epsilon, releases):
    """Labels that the columns explain and pure noise get the same releases, at the same cost."""
    method = "head" if releases == 1 else "boosting"
    assert ldp.recommend(epsilon, SIZE, "table", num_classes=None).method == method
    noise = np.random.default_rng(1).uniform(0.0, 10.0, SIZE)
    stated = set()
    for values in (10.0 * INTERACTION, noise):
        budget = ldp.PrivacyBudget(epsilon, 1e-5)
        labels = ldp.PrivateLabels(values, Numbers(0.0, 10.0), budget=budget)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "on held-out noisy labels")
            model = ldp.PrivateRegressor(epsilon).fit(LARGE, labels)
        assert model.choice_.method == method and len(model.receipts_) == releases
        stated |= {model.guarantee().epsilon, labels.guarantee().epsilon}
    assert len(stated) == 1 and 0.95 * epsilon < stated.pop() <= epsilon


@pytest.mark.slow
def test_numbers_are_boosted_from_a_head_where_noisy_labels_are_worth_it(tmp_path):
    explained = 10.0 * INTERACTION
    # Of six seeds the errors have ratios of 0.46 to 0.81.
    settings = {"budget": ldp.PrivacyBudget(3.0, 1e-5), "insecure_seed": 0}

    def vault():
        return ldp.PrivateLabels(explained, Numbers(0.0, 10.0), store=tmp_path / "a", **settings)

    model = ldp.PrivateRegressor(2.0, key="model").fit(LARGE, vault())
    assert isinstance(model.head_, ldp.PrivateBoosting) and model.score(LARGE, explained) > 0.9
    head = ldp.PrivateRegressor(2.0, method="head", low=0.0, high=10.0, insecure_seed=0)
    head = head.fit(LARGE, explained)
    # The head leaves the edges of the steps.
    assert 1.0 - model.score(LARGE, explained) < 0.8 * (1.0 - head.score(LARGE, explained))
    assert 1.9 < model.guarantee().epsilon <= 2.0
    spent = vault().guarantee().epsilon
    # A second process reads the draws.
    again = clone(model).fit(LARGE, vault())
    assert again.predict(LARGE[:50]) == pytest.approx(model.predict(LARGE[:50]))
    assert vault().guarantee().epsilon == spent == model.guarantee().epsilon
    with pytest.raises(ldp.BudgetExceededError):
        ldp.PrivateRegressor(2.0, key="another").fit(LARGE, vault())
    outputs = model.to_keras().predict(ldp.features.to_inputs(LARGE, model.to_keras()), verbose=0)
    assert outputs[:, 0] == pytest.approx(model.predict(LARGE), abs=1e-3)


@pytest.mark.slow
def test_trees_of_0_3_are_read_again_and_parts_have_draws_of_their_own(tmp_path):
    values = 10.0 * INTERACTION

    def vault(name, epsilon=2.0):
        budget = ldp.PrivacyBudget(epsilon, 1e-5)
        return ldp.PrivateLabels(values, Numbers(0.0, 10.0), budget=budget, store=tmp_path / name)

    for key in (None, "model"):
        ldp.PrivateBoosting(2.0, key=key, max_trees=5).fit(LARGE, vault(f"{key}"))
        model = ldp.PrivateRegressor(2.0, method="boosting", key=key).fit(LARGE, vault(f"{key}"))
        assert model.head_.start_ is None and vault(f"{key}").guarantee().epsilon == 2.0
    labels = vault("parts", 6.0)
    parts = labels.split(0.5)
    for part in parts:
        ldp.PrivateRegressor(3.0).fit(LARGE.iloc[part.indices], part)
    assert labels.guarantee().epsilon <= 3.0
    # A fit that public facts make a head is not forced to boost.
    small = ldp.PrivateRegressor(0.2).fit(LARGE, labels)
    assert small.choice_.method == "head"
    with_score = ldp.PrivateRegressor(2.0, budget_for_evaluation=0.5)
    first = with_score.fit(LARGE, labels).predict(LARGE[:20])
    spent = labels.guarantee().epsilon
    # The draw of the fitted part is read again; the metric has no name, and is released again.
    assert with_score.fit(LARGE, labels).predict(LARGE[:20]) == pytest.approx(first)
    assert labels.guarantee().epsilon < spent + 0.6


@pytest.mark.slow
def test_one_row_of_outliers_does_not_end_a_head():
    """A report: one 1e8 in a column, and a head at AUC 0.504 was charged without a word."""
    rng = np.random.default_rng(2)
    table = pd.DataFrame({"age": rng.uniform(18, 90, SIZE), "hours": rng.uniform(0, 60, SIZE)})
    old = (table["age"] > 54).to_numpy().astype(int)
    table.loc[5, "age"] = 1e8
    model = ldp.PrivateClassifier(0.2, num_classes=2, method="head").fit(table, old)
    assert model.score(table, old) > 0.9
    assert "Column 'age' has outliers (1)" in str(model.choice_)


@pytest.mark.slow
def test_weights_and_an_evaluation_of_numbers():
    explained = np.where(np.arange(SIZE) % 2, 10.0 * INTERACTION, 5.0)
    labels = ldp.PrivateLabels(
        explained, Numbers(0.0, 10.0), budget=ldp.PrivacyBudget(4.0, 1e-5), insecure_seed=0
    )
    model = ldp.PrivateRegressor(4.0, budget_for_evaluation=4.0)
    model.fit(LARGE, labels, sample_weight=np.arange(SIZE) % 2)
    assert model.choice_.method == "boosting"
    assert model.score(LARGE, 10.0 * INTERACTION) > 0.9
    assert model.evaluation_.metric == "mse" and labels.guarantee().epsilon <= 4.0


@pytest.fixture
def no_lightgbm(monkeypatch):
    """Slim images have LightGBM without the system's OpenMP."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "lightgbm"]:
        monkeypatch.delitem(sys.modules, name)
    find = importlib.machinery.PathFinder.find_spec

    def find_spec(name, *how):
        if name == "lightgbm":
            raise OSError("libgomp.so.1: cannot open shared object file")
        return find(name, *how)

    monkeypatch.setattr(importlib.machinery.PathFinder, "find_spec", find_spec)


DOORS = {
    "classes": (ldp.PrivateClassifier, INTERACTION.astype(int), {"num_classes": 2}),
    "numbers": (ldp.PrivateRegressor, 10.0 * INTERACTION, {"low": 0.0, "high": 10.0}),
}


@pytest.mark.slow
@pytest.mark.parametrize("key", [None, "model"])
@pytest.mark.parametrize("kind", DOORS)
def test_a_machine_without_lightgbm_takes_a_head_and_a_store_keeps_the_method(
    kind, key, tmp_path, request
):
    door, values, arguments = DOORS[kind]

    def fitted(name, **options):
        budget = ldp.PrivacyBudget(2.0, 1e-5)
        of_kind = LabelKind.of(**arguments)
        labels = ldp.PrivateLabels(values, of_kind, budget=budget, store=tmp_path / name)
        try:
            return door(2.0, key=key, **options).fit(LARGE, labels), labels.guarantee().epsilon
        except ImportError:
            return None, labels.guarantee().epsilon

    _, spent = fitted("trees")
    request.getfixturevalue("no_lightgbm")
    # The draw is recorded: neither a head's release nor an error costs more.
    assert fitted("trees") == (None, spent)
    with pytest.warns(UserWarning, match="so a head is fitted.*libgomp1"):
        model, first = fitted("head")
    assert model.choice_.method == "head" and "LightGBM can't be loaded" in str(model.choice_)
    assert fitted("nothing", method="boosting") == (None, 0.0)
    request.getfixturevalue("monkeypatch").undo()
    model, again = fitted("head")
    assert model.choice_.method == "head" and again == first
    assert "has recorded this method" in str(model.choice_)


def test_an_evaluation_in_a_part_of_a_vault_reads_the_rows_of_that_part():
    labels = ldp.PrivateLabels(INTERACTION, 2, budget=ldp.PrivacyBudget(2.0, 1e-5))
    part, _ = labels.split(np.arange(SIZE // 2))  # the part is the second half
    model = ldp.PrivateClassifier(2.0, method="boosting", budget_for_evaluation=2.0)
    model.fit(LARGE.iloc[part.indices], part)
    assert model.evaluation_.value > 0.9


def test_noisy_labels_are_not_randomized_again():
    labels = ldp.PrivateLabels(CLASSES, 3, budget=ldp.PrivacyBudget(1.0))
    noisy = labels.randomize(ldp.RandomizedResponse(1.0, 3))
    with pytest.raises(TypeError, match="got NoisyLabels, which are drawn already"):
        classifier().fit(ROWS, noisy)


def test_curves_answer_which_epsilon_a_score_needs():
    """With four times the examples, a head needs a quarter of epsilon for the same score."""
    choices = [ldp.recommend(1.0, number, "table") for number in (32_561, 130_244)]
    for method, power in (("head", 1.0), ("boosting", 0.5)):
        first, second = (choice.curves[method] for choice in choices)
        for (epsilon, score), (smaller, same) in zip(first, second, strict=True):
            assert same == score
            if method == "head":
                assert smaller == pytest.approx(epsilon / 4.0)
            else:
                ratio = np.tanh(smaller / 2) / np.tanh(epsilon / 2)
                assert ratio == pytest.approx(4.0**-power)
    needed = [choice.epsilon_for(91.0) for choice in choices]
    assert 0.3 < needed[0] < 2.0 and needed[1] < needed[0]
    level, score = choices[0].curves["boosting"][-1]
    assert choices[0].epsilon_for(score) <= level
    assert choices[0].epsilon_for(99.9) == np.inf
    assert "as epsilon: score" in str(choices[0])
    assert ldp.recommend(1.0, 9000, "table", num_classes=None).curves["head"]
