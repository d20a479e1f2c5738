"""Predictions of classes, as values and as codes, are read alike at every door, or refused."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import inspect
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import tensorflow as tf
from sklearn.calibration import CalibratedClassifierCV
from sklearn.ensemble import BaggingClassifier, StackingClassifier, VotingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import tf_labeldp as ldp
from tf_labeldp.mechanisms import LabelMechanism
from tf_labeldp.vault import Classes, Numbers

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


SOME, ROWS = CODES[:300], X[:300].astype(np.float32)
SETTINGS: dict[str, Any] = {"delta": 1e-3, "insecure_seed": 0}


def of(values: list[Any]) -> np.ndarray:
    """The class values of some rows, as objects."""
    return np.fromiter((values[code] for code in SOME), object, len(SOME))


TIMES = [datetime.datetime(2024, 1, day, 6) for day in (1, 2, 3)]
PAIRS = [("a", 1), ("b", 2), ("a", 2)]
VALUES: dict[str, tuple[list[Any] | None, Any]] = {
    "whole numbers as objects": (None, of([0, 1, 2])),
    "whole numbers as floats": (None, SOME.astype(float)),
    "decimals": (None, [decimal.Decimal(int(code)) for code in SOME]),
    "numbers as objects": ([10, 20, 30], of([10, 20, 30])),
    "fractions": ([0.5, 1.5, 2.5], of([0.5, 1.5, 2.5]).astype(float)),
    "fractions as objects": ([0.5, 1.5, 2.5], of([0.5, 1.5, 2.5])),
    "dates": (DAYS, of(DAYS)),
    "dates of NumPy": (DAYS, of(DAYS).astype("M8[D]")),
    "times of pandas": (TIMES, pd.Series(pd.to_datetime(of(TIMES)))),
    "classes in nanoseconds": (np.array(TIMES, "M8[ns]"), np.array(of(TIMES), "M8[ns]")),
    "periods": (list(pd.period_range("2024", periods=3, freq="M")), None),
    "durations": (
        list(np.array([1, 2, 3], "m8[h]")),
        SOME.astype("m8[h]") + np.timedelta64(1, "h"),
    ),
    "tuples": (PAIRS, of(PAIRS)),
    "a list of tuples": (PAIRS, list(of(PAIRS))),
    "mixed types": (["a", 1, None], of(["a", 1, None])),
    "NaN among texts": ([float("nan"), "a", "b"], of([np.nan, "a", "b"])),
    "NaN among numbers": ([float("nan"), 1.0, 2.0], of([np.nan, 1.0, 2.0]).astype(float)),
    "bytes": ([b"a", b"b", b"c"], of([b"a", b"b", b"c"])),
    "a tensor of texts": (["a", "b", "c"], tf.constant(of(["a", "b", "c"]).astype(str))),
    "texts of NumPy": (["a", "b", "c"], of(["a", "b", "c"]).astype(np.dtypes.StringDType())),
    "a column of pandas": (["a", "b", "c"], pd.DataFrame({"y": of(["a", "b", "c"])})),
    "a column of Polars": (["a", "b", "c"], pl.DataFrame({"y": of(["a", "b", "c"]).tolist()})),
    "categories of Arrow": (["a", "b", "c"], pa.array(of(["a", "b", "c"])).dictionary_encode()),
}


@pytest.mark.filterwarnings("ignore")
def test_a_score_takes_the_labels_that_fit_takes() -> None:
    expected = ldp.PrivateRidge(9.0, num_classes=3, **SETTINGS).fit(ROWS, SOME).score(ROWS, SOME)
    assert expected > 0.6
    for name, (classes, labels) in VALUES.items():
        labels = of(list(classes)) if labels is None else labels
        kind = {"num_classes": 3} if classes is None else {"classes": classes}
        head = ldp.PrivateRidge(9.0, **kind, **SETTINGS).fit(ROWS, labels)
        assert head.score(ROWS, labels) == expected, name
        with pytest.raises(ValueError, match="300 of 300 labels are not among"):
            head.score(ROWS, ["other"] * 300)


def public_estimators() -> set[str]:
    """The names of all public classes that learn from labels and have a score."""
    parts = [getattr(ldp, name) for name in dir(ldp) if inspect.ismodule(getattr(ldp, name))]
    found = {getattr(part, name) for part in parts for name in part.__all__}
    return {
        each.__name__
        for each in found
        if inspect.isclass(each) and hasattr(each, "fit") and hasattr(each, "score")
    }


def network() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])


OF_CLASSES: dict[str, Callable[[], Any]] = {
    "PrivateRidge": lambda: ldp.PrivateRidge(9.0, 1e-3),
    "PrivateLogisticRegression": lambda: ldp.PrivateLogisticRegression(9.0, 1e-3),
    "NoiseCluster": lambda: ldp.heads.NoiseCluster(5, 9.0),
    "BootstrappedHead": lambda: ldp.heads.BootstrappedHead(
        9.0, 1e-3, network(), epochs=1, verbose=0
    ),
    "PrivateBoosting": lambda: ldp.PrivateBoosting(9.0, max_trees=3),
    "PrivateClassifier": lambda: ldp.PrivateClassifier(9.0, 1e-3),
    "PrivateSearchCV": lambda: ldp.PrivateSearchCV(
        ldp.PrivateRidge(1.0, 1e-3), {"penalty": [0.1, 1.0]}, 1.0
    ),
}
OF_NUMBERS: dict[str, Callable[[], Any]] = {
    "PrivateRegressor": lambda: ldp.PrivateRegressor(9.0, 1e-3),
    "PrivatePoissonRegression": lambda: ldp.heads.PrivatePoissonRegression(9.0, 1e-3),
}


def test_all_estimators_with_a_score_are_tried() -> None:
    assert public_estimators() == {*OF_CLASSES, *OF_NUMBERS}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*OF_CLASSES, *OF_NUMBERS])
def test_every_estimator_scores_labels_of_any_type(name: str) -> None:
    """Counts as decimals, and dates; a missing label is counted, whatever marks it."""
    if name in OF_NUMBERS:
        kind: Any = Numbers(0, 2)
        forms = [SOME, of([decimal.Decimal(count) for count in range(3)]), pl.Series(SOME)]
        model = OF_NUMBERS[name]()
    else:
        kind, model = Classes(DAYS), OF_CLASSES[name]()
        forms = [of(DAYS), of(DAYS).astype("M8[us]"), pa.array(of(DAYS)), list(of(DAYS))]
    budget = ldp.PrivacyBudget(99.0, 1e-2)
    model.fit(ROWS, ldp.PrivateLabels(forms[0], kind, budget=budget, insecure_seed=0))
    scores = [model.score(ROWS, labels) for labels in forms]
    assert len(set(scores)) == 1 and scores[0] > 0.0
    for hole in (None, pd.NA, np.nan, pd.NaT):
        labels = [hole, *forms[0][1:]]
        with pytest.raises(ValueError, match="1 of 300 labels are missing"):
            model.score(ROWS, labels)
    if name in OF_NUMBERS:
        assert model.score(ROWS, SOME * 9.0) < 1.0  # public labels of another range


@pytest.mark.parametrize("word", ["", "nan", "<NA>"])
def test_texts_that_stand_for_a_missing_label_are_counted_as_missing(word: str) -> None:
    """NumPy makes texts of the missing entries of a list."""
    labels = np.array([word, *of(["a", "b", "c"])[1:]]).astype(str)
    with pytest.raises(ValueError, match="1 of 300 labels are missing"):
        Classes(["a", "b", "c"]).encode(labels)
    assert Classes(["a", "b", "c", word]).encode(labels)[0] == 3


NAMES, BACKWARDS = ["a", "b", "c"], ["c", "b", "a"]


def named(classes: Any = NAMES, **settings: Any) -> Any:
    return ldp.PrivateRidge(50.0, classes=classes, **SETTINGS, **settings)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "voting": lambda head: VotingClassifier([("a", head), ("b", head)]),
    "soft voting": lambda head: VotingClassifier([("a", head)], voting="soft"),
    "stacking": lambda head: StackingClassifier([("a", head)], cv=2),
    "calibrated": lambda head: CalibratedClassifierCV(head, cv=2),
    "bagging": lambda head: BaggingClassifier(head, n_estimators=2),
    "pipeline": lambda head: make_pipeline(StandardScaler(), head),
    "search": lambda head: GridSearchCV(head, {"penalty": [1.0]}, cv=2),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_of_scikit_learn_take_names_of_classes(wrapper: str) -> None:
    """In any order: some of them sort the names, and give the places as labels."""
    for classes in (NAMES, BACKWARDS):
        labels = of(NAMES).astype(str)
        fitted = WRAPPERS[wrapper](named(classes)).fit(ROWS, labels)
        assert np.mean(fitted.predict(ROWS) == labels) > 0.6
        assert fitted.score(ROWS, labels) > 0.6


@pytest.mark.filterwarnings("ignore")
def test_probabilities_of_a_cross_validation_are_in_the_order_of_sorted_names() -> None:
    labels = of(NAMES).astype(str)
    for classes, method in itertools.product(
        (NAMES, BACKWARDS), ("predict_proba", "decision_function")
    ):
        rows = cross_val_predict(named(classes), ROWS, labels, cv=2, method=method)
        assert np.mean(np.array(NAMES)[rows.argmax(axis=1)] == labels) > 0.6


def test_codes_of_named_classes_are_taken_with_a_warning() -> None:
    """By heads, and by the front door; numbers among the names could mean either."""
    settings = {"classes": NAMES, "budget_for_evaluation": 9.0, **SETTINGS}
    for model in (named(), ldp.PrivateClassifier(50.0, **settings)):
        with pytest.warns(UserWarning, match=r"whole numbers. They are taken as codes 0..2"):
            model.fit(ROWS, SOME)
        assert model.classes_.tolist() == [0, 1, 2]
        assert set(model.predict(ROWS)) == {0, 1, 2} and model.score(ROWS, SOME) > 0.6
    with pytest.raises(ValueError, match=r"not among the 3 classes.*give num_classes=3"):
        named([1, 2, 3]).fit(ROWS, SOME)
    with pytest.raises(ValueError, match=r"got 300 whole numbers. Give .* or Classes\(3\)"):
        ldp.PrivateLabels(SOME, Classes(NAMES), budget=ldp.PrivacyBudget(1.0))
    with pytest.raises(ValueError, match=r"class_weight for the classes \[0, 1, 2\], got \['b'\]"):
        named(class_weight={"b": 2.0}).fit(ROWS, SOME)


@pytest.mark.filterwarnings("ignore")
def test_one_against_the_rest_takes_a_head_of_two_classes() -> None:
    labels = of(NAMES).astype(str)
    head = ldp.PrivateRidge(50.0, num_classes=2, **SETTINGS)
    assert OneVsRestClassifier(head).fit(ROWS, labels).score(ROWS, labels) > 0.6


def test_classes_that_are_not_sorted_warn_in_a_tool_of_scikit_learn() -> None:
    """Its scorers would give the AUC of the other class."""
    labels = np.where(SOME == 0, "yes", "no")
    search = GridSearchCV(named(["yes", "no"]), {"penalty": [1.0]}, cv=2, scoring="roc_auc")
    with pytest.warns(UserWarning, match="expected sorted classes in a tool of scikit-learn"):
        search.fit(ROWS, labels)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "expected sorted")
        warnings.filterwarnings("ignore", "this is fit number")
        named(["yes", "no"]).fit(ROWS, labels)
        search.set_params(estimator=named(["no", "yes"])).fit(ROWS, labels)
        GridSearchCV(named(["no", 1]), {"penalty": [1.0]}, cv=2)


@pytest.mark.filterwarnings("ignore")
def test_a_private_model_evaluates_the_labels_that_it_is_trained_on() -> None:
    """Codes in any type, and rows in a list; names are refused before the charge."""
    keras.utils.set_random_seed(0)
    model = ldp.LabelDPModel.from_model(network())
    optimizer = ldp.LabelDPOptimizer(keras.optimizers.SGD(0.1), 1.0, noise_multiplier=20.0)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    expected = model.evaluate(ROWS, SOME, verbose=0)
    for labels in (of([0, 1, 2]), SOME.tolist(), pd.Series(SOME, dtype="Int64"), pl.Series(SOME)):
        assert model.evaluate(ROWS, labels, verbose=0) == pytest.approx(expected)
        assert model.evaluate(x=ROWS, y=labels, verbose=0) == pytest.approx(expected)
    names = of(NAMES).astype(str)
    for refused in (model.evaluate, model.fit):
        with pytest.raises(TypeError, match=r"that are numbers, got dtype <U1. Give codes"):
            refused(ROWS, names, verbose=0)
    with pytest.raises(ValueError, match="1 of 300 labels are missing"):
        model.evaluate(ROWS, [None, *SOME[1:].tolist()], verbose=0)
    assert model.optimizer.iterations == 0
    model.fit(ROWS.tolist(), SOME, verbose=0)


def test_texts_of_digits_are_no_codes() -> None:
    """The number 1 is the class "1", or the second one."""
    digits = ["1", "2", "3"]
    labels = ldp.PrivateLabels(of(digits), Classes(digits), budget=ldp.PrivacyBudget(50.0))
    for right in (SOME + 1, (SOME + 1).astype(str)):
        assert labels.evaluate(right, "accuracy", 9.0).value == pytest.approx(1.0, abs=0.05)
    with pytest.raises(ValueError, match="may be both: 1 is a class value"):
        labels.evaluate(np.ones(300, int), "accuracy", 9.0)
    with pytest.raises(ValueError, match="300 of 300 labels are not among the 3 classes"):
        named(digits).fit(ROWS, SOME)
    with pytest.raises(ValueError, match=r"class_weight for the classes \['1', '2', '3'\]"):
        named(digits, class_weight={1: 2.0}).fit(ROWS, of(digits))
    in_arrow = named(pa.array(NAMES)).fit(ROWS, pa.array(of(NAMES)))
    assert in_arrow.classes_.tolist() == NAMES
