"""Predictions of classes, as values and as codes, are read alike at every door, or refused."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

import tf_labeldp as ldp
from tf_labeldp.mechanisms import LabelMechanism
from tf_labeldp.vault import Classes

N = 6000
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 4))
CODES = np.argmax(X[:, :3] + 0.5 * RNG.normal(size=(N, 3)), axis=1)
GUESS = np.argmax(X[:, :3], axis=1)
ACCURACY = float(np.mean(GUESS == CODES))
DAYS = [datetime.date(2024, 1, day) for day in (1, 2, 3)]
CLASSES: dict[str, list[Any]] = {
    "1, 2, 3": [1, 2, 3],
    "codes": [0, 1, 2],
    "apart": [10, 20, 30],
    "texts": ["no", "yes", "maybe"],
    "floats": [0.5, 1.5, 2.5],
    "days": DAYS,
}


def vault(classes: list[Any], **settings: Any) -> ldp.PrivateLabels:
    values = np.fromiter((classes[code] for code in CODES), object, N)
    budget = ldp.PrivacyBudget(20.0)
    return ldp.PrivateLabels(values, Classes(classes), budget=budget, **settings)


def evaluated(labels: ldp.PrivateLabels, predictions: Any) -> float:
    return float(labels.evaluate(predictions, "accuracy", 5.0).value)


def of_confusion(labels: ldp.PrivateLabels, predictions: Any) -> float:
    counts = labels.evaluate(predictions, "confusion_matrix", 5.0).value
    return float(np.trace(counts) / counts.sum())


def of_noisy(labels: ldp.PrivateLabels, predictions: Any) -> float:
    noisy = labels.randomize(ldp.RandomizedResponse(8.0, 3), key="drawn")
    return float(noisy.evaluate(predictions, "accuracy", model=None).value)


def selected(labels: ldp.PrivateLabels, predictions: Any) -> float:
    """The accuracy of the chosen one of two: the predictions, and the same turned around."""
    chosen = ldp.select([predictions[::-1], predictions], labels, 5.0)
    return ACCURACY if chosen == 1 else 0.0


DOORS: list[Callable[..., float]] = [evaluated, of_confusion, of_noisy, selected]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", CLASSES)
def test_values_and_codes_give_the_same_metric(name: str, door: Callable[..., float]) -> None:
    classes = CLASSES[name]
    values = np.fromiter((classes[code] for code in GUESS), object, N)
    rows = np.eye(3)[GUESS]
    forms = [values, values.tolist(), np.array(values.tolist()), GUESS, GUESS.tolist(), rows]
    if name == "days":
        forms.append(np.array(values, "M8[D]"))
    for predictions in forms:
        assert door(vault(classes), predictions) == pytest.approx(ACCURACY, abs=0.02)


AMBIGUOUS = np.where(GUESS == 0, 1, GUESS)
"""Values or codes of the classes 1, 2, 3: the first class is never predicted, or the last."""


@pytest.mark.parametrize("door", DOORS)
def test_numbers_that_may_be_both_are_refused_before_the_charge(door: Callable[..., float]) -> None:
    cases: list[tuple[list[Any], Any, str]] = [
        ([1, 2, 3], AMBIGUOUS, "may be both: [12] is a class value, and another class as a code"),
        ([2, 0, 1], GUESS, "may be both"),
        ([1, 2, 3], np.where(GUESS == 1, 3, GUESS), "codes 0..2, got .* that are no class values"),
        (["no", "yes", "maybe"], np.where(GUESS == 1, "no", "never"), "that are no class values"),
        (["no", "yes", "maybe"], GUESS + 1, "that are no class values"),
    ]
    for classes, predictions, words in cases:
        labels = vault(classes)
        with pytest.raises(ValueError, match=words):
            door(labels, predictions)
        assert {use.key for use in labels.receipts} <= {"drawn"}


@pytest.mark.filterwarnings("ignore")
def test_the_model_decides_between_values_and_codes() -> None:
    """For noisy labels, whose ``evaluate`` gets the model."""
    labels = vault([1, 2, 3])
    noisy = labels.randomize(ldp.RandomizedResponse(8.0, 3))
    model = LogisticRegression().fit(X, np.array([1, 2, 3])[CODES])

    def accuracy(predictions: Any, model: Any) -> float:
        return float(noisy.evaluate(predictions, "accuracy", model=model).value)

    as_values, as_codes = (np.mean(AMBIGUOUS - shift == CODES) for shift in (1, 0))
    assert accuracy(AMBIGUOUS, model) == pytest.approx(as_values, abs=0.02)
    assert accuracy(AMBIGUOUS, lambda x: x) == pytest.approx(as_codes, abs=0.02)
    # Columns in another order than the labels' classes are refused.
    backwards = vault([3, 2, 1]).randomize(ldp.RandomizedResponse(8.0, 3))
    with pytest.raises(ValueError, match=r"the classes \[3, 2, 1\], in the order of the labels"):
        backwards.evaluate(model.predict_proba(X), "accuracy", model=model)
    codes = ldp.PrivateLabels(CODES, 3, budget=ldp.PrivacyBudget(8.0))
    model.classes_ = [np.arange(3), np.arange(2)]  # a model of several outputs
    drawn = codes.randomize(ldp.RandomizedResponse(4.0, 3), key="outputs")
    assert drawn.evaluate(CODES, "accuracy", model=model).value == pytest.approx(1.0, abs=0.05)
    model.classes_ = np.array([2, 1, 0])
    with pytest.raises(ValueError, match=r"the classes \[0, 1, 2\], in the order of the labels"):
        drawn.evaluate(model.predict_proba(X), "accuracy", model=model)


def test_the_classes_of_noisy_labels_are_those_of_their_mechanism() -> None:
    noisy = vault(["a", "b", "c"]).randomize(ldp.RandomizedResponse(8.0, 3))
    for classes in (("a", "b"), ("a", "b", "b")):
        with pytest.raises(ValueError, match="expected 3 different classes"):
            dataclasses.replace(noisy, classes=classes)


class Reversed(LabelMechanism):
    """A mechanism that is for no kind of labels."""

    epsilon = 1.0

    def randomize(self, labels: Any, public: Any = None, *, rng: Any = None) -> np.ndarray:
        return np.asarray(labels)[::-1]

    def check_output(self, noisy: Any, size: int) -> np.ndarray:
        return np.asarray(noisy)


def test_noisy_labels_of_no_kind_have_no_metrics() -> None:
    noisy = ldp.NoisyLabels(np.zeros(5), np.arange(5), Reversed())
    with pytest.raises(TypeError, match="expected noisy labels of classes"):
        noisy.class_shares()
    with pytest.raises(TypeError, match="expected noisy labels of classes"):
        noisy.evaluate(np.zeros(5, int), "accuracy", model=None)


@pytest.mark.filterwarnings("ignore")
def test_two_classes_that_are_numbers() -> None:
    """Probabilities of the second class stay, and are no class values unless both agree."""
    codes = (X[:, 0] > 0).astype(int)
    for classes in ([-1, 1], [0, 1], [1, 2], [False, True], [0.0, 1.0], [1.0, 2.0]):
        settings: dict[str, Any] = {"kind": Classes(classes), "budget": ldp.PrivacyBudget(20.0)}
        labels = ldp.PrivateLabels(np.array(classes)[codes], **settings)
        found = labels.evaluate(np.array(classes)[codes], "accuracy", 5.0)
        assert found.value == pytest.approx(1.0, abs=0.02)
        chances = np.where(codes == 1, 0.9, 0.2)
        found = labels.evaluate(chances, "brier", 5.0)
        assert found.value == pytest.approx(np.mean(2.0 * np.square(chances - codes)), abs=0.02)
    labels = ldp.PrivateLabels([1.0, 0.0] * 9, Classes([1.0, 0.0]), budget=ldp.PrivacyBudget(9.0))
    with pytest.raises(ValueError, match="another class as a probability"):
        labels.evaluate(np.array([1.0, 0.0] * 9), "accuracy", 1.0)
    assert not labels.receipts


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "head", [ldp.PrivateRidge(5.0, 1e-5), ldp.PrivateClassifier(5.0, 1e-5)], ids=["head", "door"]
)
def test_what_predict_returns_is_evaluated_as_it_is(head: Any) -> None:
    labels = ldp.PrivateLabels(
        CODES + 1, Classes([1, 2, 3]), budget=ldp.PrivacyBudget(20.0, 1e-5), insecure_seed=0
    )
    train, held_out = labels.split(0.3)
    fitted = head.fit(X[train.indices], train)
    predicted = fitted.predict(X[held_out.indices])
    expected = np.mean(predicted == (CODES + 1)[held_out.indices])
    assert expected > 0.7
    found = held_out.evaluate(predicted, "accuracy", 5.0)
    assert found.value == pytest.approx(expected, abs=0.02)
