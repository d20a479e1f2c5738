"""A model card says what its model promises and how good it is, and both can be verified."""

from __future__ import annotations

import json
import re

import keras
import numpy as np
import pytest

import tf_labeldp as ldp
from tf_labeldp.cli import main
from tf_labeldp.dossier import verify
from tf_labeldp.vault import Evaluation

LABELS = np.random.default_rng(0).integers(2, size=400)
X = np.random.default_rng(1).normal(size=(400, 3)).astype(np.float32)
X[:, 0] += 2.0 * LABELS


@pytest.fixture
def saved(tmp_path):
    """A head on three quarters of the labels, and its score on the others, from one store."""
    budget = ldp.PrivacyBudget(2.0, 1e-4)
    labels = ldp.PrivateLabels(LABELS, 2, budget=budget, store=tmp_path / "store")
    train, test = labels.split(0.25)
    head = ldp.PrivateLogisticRegression(1.0, 1e-4).fit(X[train.indices], train)
    score = test.evaluate(head.predict_proba(X[test.indices]), "accuracy", epsilon=2.0)
    stated = ldp.save(head, tmp_path / "model", metrics=[score], data="Made up for a test.")
    return tmp_path, head, score, stated


def front_matter(page):
    """Returns the metadata as model hubs read them."""
    _, metadata, _ = page.split("---\n", 2)
    return {key: json.loads(value) for key, _, value in
            (line.partition(": ") for line in metadata.splitlines())}  # fmt: skip


def test_the_card_has_statement_metrics_and_data(saved):
    path, head, score, stated = saved
    # Model and score are about different labels, so their epsilons do not add up.
    assert stated.epsilon == pytest.approx(2.0) and head.guarantee().epsilon == pytest.approx(1.0)
    card = json.loads((path / "model" / "privacy.json").read_text())
    assert card["data"] == "Made up for a test."
    (metric,) = card["metrics"]
    assert metric["value"] == score.value and tuple(metric["interval"]) == score.interval()
    assert ldp.PrivacyGuarantee.from_json(json.dumps(card)).epsilon == stated.epsilon
    page = (path / "model" / "README.md").read_text()
    assert str(stated) in page and "Made up for a test." in page
    assert f"| accuracy | {score.value:.4g} |" in page and "private, by a release" in page
    found = front_matter(page)
    assert found["library_name"] == "keras" and "differential-privacy" in found["tags"]
    (result,) = found["model-index"][0]["results"]
    assert result["task"]["type"] == "tabular-classification"
    assert result["metrics"] == [{"type": "accuracy", "value": score.value}]
    loaded = ldp.load_model(path / "model" / "model.keras")
    expected = head.predict_proba(X)
    np.testing.assert_allclose(loaded.predict(X, verbose=0), expected, atol=1e-5)


def test_it_is_verified(saved):
    path, *_ = saved
    found = verify(path / "model", store=path / "store")
    assert found.problems == () and found.guarantee.epsilon == pytest.approx(2.0)
    assert set(found.sha256) == {"model.keras", "privacy.json", "README.md"}


@pytest.mark.slow
def test_each_change_is_found(saved):
    folder = saved[0] / "model"
    card, page = folder / "privacy.json", folder / "README.md"
    original = {file: file.read_text() for file in (card, page)}

    def problem_of(change):
        content = json.loads(original[card])
        change(content)
        card.write_text(json.dumps(content))
        (found,) = verify(folder).problems
        card.write_text(original[card])
        return found

    assert "compose to" in problem_of(lambda card: card["guarantee"].update(epsilon=1.0))
    assert "other receipts" in problem_of(lambda card: card.update(receipts_sha256="0"))
    assert "was changed" in problem_of(lambda card: card.update(model_sha256="0"))
    page.write_text(original[page].replace("(2, 0.0001)-label-DP", "(1, 0.0001)-label-DP"))
    assert "README.md lacks (2, 0.0001)-label-DP of the" in verify(folder).problems[0]
    page.write_text(original[page].replace("[public-features]", ""))
    assert "README.md lacks [public-features] of the" in verify(folder).problems[0]
    page.write_text(original[page] + "\n## Intended use\n\nNone.\n")
    assert verify(folder).problems == ()
    # The score without its cost.
    content = json.loads(original[card])
    content["metrics"][0]["receipts"] = []
    card.write_text(json.dumps(content))
    assert any("compose to" in text for text in verify(folder).problems)
    content["metrics"][0]["receipts"] = [{"digest": "0"}]
    card.write_text(json.dumps(content))
    assert verify(folder).problems
    assert main(["verify", str(folder)]) == 1


def test_a_score_on_labels_that_are_public(tmp_path):
    inputs = keras.Input((8, 8, 1))
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(inputs)))
    stated = ldp.declare(model, because="its labels are public")
    score = Evaluation("mse", 0.25, 0.0, 100, bounds=(0.0, 1.0), effective_examples=100)
    assert ldp.save(model, tmp_path, metrics=[score]).epsilon == stated.epsilon == 0.0
    page = (tmp_path / "README.md").read_text()
    assert "| mse | 0.25 | 0.1755 to 0.343 | 100 | declared public |" in page  # Wilson's
    (result,) = front_matter(page)["model-index"][0]["results"]
    assert result["task"]["type"] == "image-regression"
    assert verify(tmp_path).problems == ()


def test_the_card_of_a_model_of_a_table_shows_how_to_predict(tmp_path):
    table = {"age": np.arange(400.0), "job": np.repeat(["nurse", "smith"], 200)}
    door = ldp.PrivateClassifier(1.0, 1e-4, num_classes=2, method="head").fit(table, LABELS)
    ldp.save(door, tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / "README.md").read_text(), re.S)
    *rest, last = code.strip().splitlines()
    names = {"table": table}
    exec("\n".join(rest).replace('"model.keras"', repr(str(tmp_path / "model.keras"))), names)
    predicted = eval(last, names)
    np.testing.assert_allclose(predicted, door.predict_proba(table), atol=1e-5)


def test_a_model_that_is_not_private_says_so(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    model.fit(X, np.eye(2)[LABELS], verbose=0)
    assert not ldp.save(model, tmp_path).is_private
    assert "NOT PRIVATE" in (tmp_path / "README.md").read_text()


def test_the_score_of_the_front_door_is_on_its_card(tmp_path):
    vault = ldp.PrivateLabels(LABELS, 2, budget=ldp.PrivacyBudget(2.0, 1e-4))
    door = ldp.PrivateClassifier(1.0, 1e-4, method="head", budget_for_evaluation=1.0)
    stated = ldp.save(door.fit(X, vault), tmp_path)
    card = json.loads((tmp_path / "privacy.json").read_text())
    assert card["metrics"][0]["value"] == door.evaluation_.value
    assert stated.epsilon == door.guarantee().epsilon
    assert "head" in (tmp_path / "README.md").read_text()


@pytest.mark.slow
def test_the_untouched_card_of_a_front_door_on_arrays_is_right(tmp_path):
    door = ldp.PrivateClassifier(1.0, 1e-5, num_classes=2, budget_for_evaluation=0.1)
    ldp.save(door.fit(X, LABELS), tmp_path)
    found = verify(tmp_path)
    assert found.problems == found.not_checked == ()
    assert main(["verify", str(tmp_path)]) == 0


def test_added_sections_are_named(saved):
    folder = saved[0] / "model"
    page = folder / "README.md"
    first, second, rest = page.read_text().partition("## Privacy")
    page.write_text(f"{first}## Intended use\n\nNone.\n\n{second}{rest}\n## Metrics\n\nAll.\n")
    found = verify(folder, store=saved[0] / "store")
    assert found.problems == ()
    assert [text.partition(" of ")[0] for text in found.not_checked] == [
        "section 'Intended use'",
        "section 'Metrics'",
    ]
    page.write_text(page.read_text().replace("| accuracy |", "| accuracy |  |"))
    assert "section 'Metrics' of README.md was changed" in verify(folder).problems[0]


@pytest.mark.parametrize(
    ("model", "metrics", "message"),
    [
        ("a model", [], "expected a Keras model"),
        (None, [0.9], "expected metrics of one number"),
        (None, [Evaluation("calibration", np.zeros(3), np.zeros(3), 9)], "of one number"),
    ],
)
def test_other_things_are_refused_before_a_file_is_written(tmp_path, model, metrics, message):
    model = model or keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    with pytest.raises(TypeError, match=message):
        ldp.save(model, tmp_path / "folder", metrics=metrics)
    assert not (tmp_path / "folder").exists()
