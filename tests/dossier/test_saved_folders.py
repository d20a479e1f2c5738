"""`save`, `load_model` and `guarantee` read and write the same paths: a folder, or one file."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
from sklearn.decomposition import PCA
from sklearn.feature_selection import SelectKBest
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    MaxAbsScaler,
    MinMaxScaler,
    PolynomialFeatures,
    RobustScaler,
    StandardScaler,
)

import tf_labeldp as ldp
from tf_labeldp.dossier import verify
from tf_labeldp.plugins import TrainedModel

LABELS = np.random.default_rng(0).integers(2, size=400)
X = np.random.default_rng(1).normal(size=(400, 3)).astype(np.float32)
X[:, 0] += 2.0 * LABELS


@pytest.fixture(scope="module")
def head():
    budget = ldp.PrivacyBudget(4.0, 1e-4)
    labels = ldp.PrivateLabels(LABELS, 2, budget=budget)
    head = ldp.PrivateLogisticRegression(1.0, 1e-4).fit(X, labels)
    return head, labels.evaluate(head.predict_proba(X), "accuracy", epsilon=2.0)


def test_a_folder_of_save_is_loaded_and_states_what_save_returned(head, tmp_path):
    model, score = head
    stated = ldp.save(model, tmp_path / "model", metrics=[score])
    loaded = ldp.load_model(tmp_path / "model")
    expected = model.predict_proba(X)
    np.testing.assert_allclose(loaded.predict(X, verbose=0), expected, atol=1e-5)
    of_folder = ldp.guarantee(tmp_path / "model")
    # The folder shows the score as well, which the file of the model does not.
    assert of_folder == stated and of_folder.epsilon == pytest.approx(3.0)
    assert ldp.guarantee(tmp_path / "model" / "model.keras").epsilon == pytest.approx(1.0)


def test_a_card_that_was_changed_is_no_statement(head, tmp_path):
    model, score = head
    ldp.save(model, tmp_path, metrics=[score])
    card = json.loads((tmp_path / "privacy.json").read_text())
    for metrics in ([{"receipts": [{"digest": "0"}]}], [{}], 3):
        (tmp_path / "privacy.json").write_text(json.dumps({**card, "metrics": metrics}))
        with pytest.raises(ldp.accounting.ReceiptError, match=r"privacy.json is damaged"):
            ldp.guarantee(tmp_path)


@pytest.mark.parametrize("ask", [ldp.load_model, ldp.guarantee])
def test_a_folder_without_a_model_is_named(ask, tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(FileNotFoundError, match=r"expected a .keras file or the folder of save"):
        ask(tmp_path)


@pytest.mark.parametrize("names", [["notes.txt"], ["README.md"], ["a", "model.keras"]])
def test_a_folder_with_other_files_is_refused_before_anything_is_written(head, tmp_path, names):
    for name in names:
        (tmp_path / name).write_text("mine")
    with pytest.raises(FileExistsError, match=f"{names[0]}. Give a new folder"):
        ldp.save(head[0], tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
        names, "mine"
    )


def test_an_earlier_card_is_replaced_and_hidden_files_stay(head, tmp_path):
    (tmp_path / ".git").mkdir()
    ldp.save(head[0], tmp_path)
    stated = ldp.save(*head[:1], tmp_path, metrics=[head[1]])
    assert ldp.guarantee(tmp_path) == stated
    # A run that was killed may leave the model, or the model and its data.
    for left in ("README.md", "privacy.json"):
        (tmp_path / left).unlink()
        assert ldp.save(head[0], tmp_path).epsilon == pytest.approx(1.0)
        (tmp_path / "README.md").unlink()


def test_a_path_of_a_keras_file_gets_the_file(head, tmp_path):
    path = tmp_path / "new" / "x.keras"
    for _ in range(2):
        stated = ldp.save(head[0], path)
    assert path.is_file() and [each.name for each in path.parent.iterdir()] == ["x.keras"]
    assert ldp.guarantee(path) == stated and stated.epsilon == pytest.approx(1.0)
    assert verify(path).problems == ()
    for settings in ({"metrics": [head[1]]}, {"data": "Visits of 2024."}):
        with pytest.raises(ValueError, match="expected a folder for metrics and data"):
            ldp.save(head[0], path.with_name("y.keras"), **settings)
    assert not path.with_name("y.keras").exists()


def test_the_file_of_a_model_that_is_not_private_says_so(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    model.fit(X, np.eye(2)[LABELS], verbose=0)
    assert not ldp.save(model, tmp_path / "x.keras").is_private
    assert not ldp.guarantee(tmp_path / "x.keras").is_private


STEPS = {
    "scaler": [StandardScaler()],
    "unit range": [MinMaxScaler(clip=True), "passthrough"],
    "robust, in a pipeline": [make_pipeline(RobustScaler(), MaxAbsScaler())],
    "missing": [SimpleImputer(strategy="median"), PCA(2, whiten=True)],
    "a map of this library": [StandardScaler(), ldp.features.RandomFourierFeatures(8, seed=0)],
    "a map first": [ldp.features.RandomFourierFeatures(8, seed=0), StandardScaler(with_std=False)],
}


def pipeline_of(steps, labels=None, last=None):
    vault = ldp.PrivateLabels(LABELS, 2, budget=ldp.PrivacyBudget(4.0, 1e-4))
    last = last or ldp.PrivateLogisticRegression(1.0, 1e-4)
    rows = X.copy()
    rows[::7, 1] = np.nan if isinstance(steps[0], SimpleImputer) else 0.0
    return make_pipeline(*steps, last).fit(rows, vault if labels is None else labels), rows


@pytest.mark.filterwarnings("ignore:the release is indistinguishable")
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_a_pipeline_is_saved_as_one_model_of_the_raw_rows(steps, tmp_path):
    model, rows = pipeline_of(steps)
    stated = ldp.save(model, tmp_path)
    loaded = ldp.load_model(tmp_path)
    expected = model.predict_proba(rows)
    np.testing.assert_allclose(loaded.predict(rows, verbose=0), expected, atol=1e-4)
    of_pipeline = ldp.guarantee(model)
    assert stated.epsilon == of_pipeline.epsilon == pytest.approx(1.0)
    assert ldp.guarantee(tmp_path) == stated
    # The file names the assumption on each step, as the pipeline does.
    assert set(of_pipeline.assumptions) <= set(stated.assumptions)
    assert verify(tmp_path).problems == ()
    assert TrainedModel(loaded).note_facts({})["classes"] == [0, 1]


class Learns(StandardScaler):
    """A step of the user, which may learn labels."""


@pytest.mark.parametrize(
    ("steps", "named"),
    [
        ([PolynomialFeatures()], "'polynomialfeatures' (PolynomialFeatures)"),
        ([SelectKBest(k=2)], "'selectkbest' (SelectKBest)"),
        ([Learns()], "'learns' (Learns)"),
        ([SimpleImputer(add_indicator=True)], "'simpleimputer' (SimpleImputer)"),
    ],
)
def test_a_step_that_has_no_layers_is_refused_with_what_to_use(steps, named, tmp_path):
    labels = LABELS if isinstance(steps[0], SelectKBest) else None
    last = ldp.PrivateLogisticRegression(1.0, 1e-4, num_classes=2)
    model, _ = pipeline_of(steps, labels, last)
    with pytest.raises(TypeError, match="expected steps that Keras computes") as error:
        ldp.save(model, tmp_path / "new")
    assert named in str(error.value) and "encoder=" in str(error.value)
    assert not (tmp_path / "new").exists()


def test_the_file_of_a_pipeline_promises_no_more_than_the_pipeline(tmp_path):
    # Arrays of labels reach each step, which may read them.
    last = ldp.PrivateLogisticRegression(1.0, 1e-4, num_classes=2)
    model, _ = pipeline_of([StandardScaler()], LABELS, last)
    assert not np.isfinite(ldp.guarantee(model).epsilon)
    assert not np.isfinite(ldp.save(model, tmp_path).epsilon)
    assert not np.isfinite(ldp.guarantee(tmp_path).epsilon)
    # Nor does one whose last step is no private estimator.
    plain = make_pipeline(StandardScaler(), LogisticRegression()).fit(X, LABELS)
    with pytest.raises(TypeError, match="an estimator with to_keras, got LogisticRegression"):
        ldp.save(plain, tmp_path / "new")
