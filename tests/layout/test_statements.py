"""Every object of the library answers ``guarantee`` with a true statement, or is refused.

The objects are those that the examples in docstrings and the builders make, with the parts inside
them. None of them states that nothing was used, except for members of a short list, each with its
reason.
"""

from __future__ import annotations

import contextlib
import doctest
import functools
import importlib
import inspect
import io
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from _builders import BUDGET, BUILDERS, RR, Put, X, Y, dense, labels_of, private_model
from _entry_points import PARTS as OF_USERS
from _entry_points import is_ours
from sklearn.base import BaseEstimator
from sklearn.calibration import CalibratedClassifierCV
from sklearn.ensemble import StackingClassifier, VotingClassifier
from sklearn.feature_selection import SelectFromModel, SelectKBest
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import FeatureUnion, make_pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler
from sklearn.utils import all_estimators

import tf_labeldp as ldp
from tf_labeldp import features
from tf_labeldp.accounting import (
    Charge,
    LabelSet,
    PrivacyGuarantee,
    PublicInput,
    Receipt,
    Receipts,
    public_input,
)
from tf_labeldp.vault._statements import _reads_no_labels


@pytest.fixture(autouse=True)
def isolated(forget: Callable[[], None]) -> None:
    """Starts each test from fixed weights, without the trainings of other tests."""
    keras.utils.set_random_seed(0)
    forget()


def is_unspent(value: Any) -> bool:
    return not value.receipts


def is_unfitted(value: Any) -> bool:
    fitted = [name for name in vars(value) if name.endswith("_") and not name.startswith("_")]
    return hasattr(value, "fit") and not isinstance(value, keras.layers.Layer) and not fitted


def is_map_of_public_rows(value: Any) -> bool:
    is_free = Receipts(value.receipts_).guarantee().epsilon == 0.0
    return is_free and hasattr(value, "transform") and not hasattr(value, "predict")


def is_declared(value: Any) -> bool:
    receipts = [value] if isinstance(value, Receipt) else public_input(value).receipts
    return any(receipt.declares_history for receipt in receipts)


def is_free(value: Any) -> bool:
    return Receipts([value]).guarantee().epsilon == 0.0


ZERO = {
    "PrivateLabels": (is_unspent, "none of its labels was used"),
    "PoissonBatches": (lambda value: all(map(is_unspent, value.vaults)), "nor of its vaults'"),
    "ReleaseKey": (lambda value: not value.receipts(), "nothing was drawn with it"),
    "Clusters": (
        lambda value: value.receipts and all(map(is_free, value.receipts)),
        "clusters of public rows: the statement names the public encoder",
    ),
    "Receipt": (is_free, "it states a free use, such as that of a public encoder"),
    "PrivacyGuarantee": (lambda value: True, "a statement says what it says"),
}
"""The objects that may state (0, 0), by class, with the reason."""
OF_ESTIMATORS = {
    "before fit": is_unfitted,
    "a feature map that read public rows alone": is_map_of_public_rows,
}


def may_be_zero(value: Any) -> bool:
    """Returns whether an object is on the short list."""
    if type(value).__name__ in ZERO and is_ours(type(value)):
        return ZERO[type(value).__name__][0](value)
    if isinstance(value, keras.layers.Layer):
        return is_declared(value)
    if isinstance(value, (list, tuple, dict)):
        return all(map(may_be_zero, value.values() if isinstance(value, dict) else value))
    if is_ours(type(value)) and isinstance(value, BaseEstimator):
        return is_unfitted(value) or is_map_of_public_rows(value)
    return False


def check(value: Any) -> str:
    """Checks the answer of an object, and returns it in a word."""
    if isinstance(value, (str, os.PathLike)):
        return "refused"  # Texts are paths.
    try:
        stated = ldp.guarantee(value)
    except (TypeError, ldp.LabelStoreError):  # The latter of a store that an example forgot.
        return "refused"
    if stated.epsilon == 0.0:
        assert may_be_zero(value), f"a {type(value).__name__} states (0, 0)"
        return "zero"
    receipts = public_input(value).receipts
    delta = stated.delta or None
    assert stated.epsilon >= Receipts(receipts).guarantee(delta).epsilon * (1 - 1e-9), type(value)
    if isinstance(value, ldp.PrivateLabels):
        assert stated == value.guarantee()
    return "unknown" if math.isinf(stated.epsilon) else "stated"


def inside(value: Any) -> Iterator[Any]:
    """Yields the attributes of an object, and the items of lists among them."""
    fields = getattr(value, "__dict__", {})
    for part in [*fields.values()] if not isinstance(value, type) else []:
        yield part
        if isinstance(part, (list, tuple)):
            yield from part[:3]
        elif isinstance(part, dict):
            yield from list(part.values())[:3]


@functools.cache
def namespace(module: str) -> list[Any]:
    """Returns all objects that the examples of a module make."""
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    found: list[Any] = []
    with contextlib.redirect_stdout(io.StringIO()):
        for test in doctest.DocTestFinder().find(importlib.import_module(module)):
            before = set(test.globs)
            runner.run(test, clear_globs=False)
            found += [value for name, value in test.globs.items() if name not in before]
    return found


PARTS = [
    part for part in OF_USERS if part not in ("audit", "dossier", "self_supervised", "tf_privacy")
]
"""The parts whose results carry receipts."""


def modules_of(part: str) -> list[str]:
    names = importlib.import_module(f"tf_labeldp.{part}")
    homes = {getattr(getattr(names, name), "__module__", "") for name in names.__all__}
    return sorted(home for home in homes if home.startswith("tf_labeldp."))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", PARTS)
def test_everything_in_the_examples_answers_or_is_refused(part: str) -> None:
    answers: dict[str, set[str]] = {}
    for module in modules_of(part):
        for value in namespace(module):
            if inspect.ismodule(value) or inspect.isroutine(value):
                continue
            for each in (value, *inside(value)):
                answers.setdefault(check(each), set()).add(type(each).__name__)
    # Arrays, numbers and texts never answer.
    answered = set().union(*(names for answer, names in answers.items() if answer != "refused"))
    assert answered.isdisjoint({"ndarray", "float", "int", "str", "Tensor", "EagerTensor"})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_result_answers_or_is_refused() -> None:
    """Those of the builders of all entry points that take public inputs."""
    tf.config.run_functions_eagerly(True)
    wrong, answers = [], {"zero": set(), "stated": set(), "unknown": set(), "refused": set()}
    for place, builder in BUILDERS.items():
        keras.utils.set_random_seed(0)
        receipt = labels_of().charge(Charge.of(RR), what="an earlier use")
        result = builder(Put("", receipt))
        for each in (result, *inside(result)):
            try:
                answers[check(each)].add(type(each).__name__)
            except AssertionError as error:
                wrong.append(f"{place}: {error}")
    tf.config.run_functions_eagerly(False)
    assert not wrong, "\n".join(wrong)
    assert {"PrivateRidge", "NoisyLabels", "PrivateLabels", "Sequential"} <= answers["stated"] | (
        answers["unknown"]
    )
    assert not {"Sequential", "Functional", "FixMatch"} & answers["zero"]


# The short list, by name.


def test_what_may_state_nothing() -> None:
    labels = labels_of()
    batches = ldp.data.poisson_batches(X, labels, sampling_probability=0.5, steps=1)
    model = dense()
    ldp.declare(model, because="trained on public labels")
    for value in (
        labels,
        batches,
        ldp.PrivateRidge(1.0, 1e-5),
        ldp.PrivateClassifier(1.0, 1e-5),
        features.RandomFourierFeatures(8),
        features.RandomFourierFeatures(8).fit(X),
        features.TableCodes().fit(X),
        features.NeighbourSmoothing(num_neighbours=2).fit(X),
        features.PublicEncoder(np.asarray).fit(X),
        model,
    ):
        stated = ldp.guarantee(value)
        assert stated.headline == "(0, 0)-label-DP", value
        assert stated.is_private and check(value) == "zero"
    labels.randomize(RR)
    for value in (labels, batches, [labels, batches]):
        assert ldp.guarantee(value).epsilon == 1.0 == labels.guarantee().epsilon


@pytest.mark.holds("vault.guarantee")
def test_a_keras_model_without_receipts_has_no_record(tmp_path: Any) -> None:
    """A fresh one looks like one that was trained on the true labels and compiled again."""
    trained = dense()
    trained.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    trained.fit(X, Y, verbose=0)
    trained.compile("sgd")
    fresh = dense()
    fresh.save(tmp_path / "fresh.keras")
    mapped = features.RandomFourierFeatures(8).fit(X).to_keras()
    values = [trained, fresh, tmp_path / "fresh.keras", private_model(), mapped, fresh.layers[-1]]
    for value in [*values, [fresh, trained]]:
        stated = ldp.guarantee(value)
        assert stated.headline == str(stated).splitlines()[0] == "no record of any label"
        assert stated.epsilon == math.inf and not stated.epsilon <= 1.0
        assert not stated.is_private and '"private": false' in stated.to_json()
        assert PrivacyGuarantee.from_json(stated.to_json()) == stated
        assert "no-record" in {note.code for note in stated.assumptions}
    assert private_model().guarantee() == ldp.guarantee(private_model())
    # As a public input it is the named assumption that it was.
    head = ldp.PrivateRidge(1.0, 1e-4, encoder=dense(3)).fit(X, labels_of())
    assert head.guarantee().epsilon == 1.0
    assert "public-inputs" in {note.code for note in head.guarantee().assumptions}
    # A public encoder's receipt is free, and is no record of the layers above.
    encoder = features.PublicEncoder(dense(3)).fit(X)
    above = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])
    ldp.plugins.TrainedModel(above).attach(encoder.receipts_)
    assert ldp.guarantee(above).headline == "no record of any label"


def test_receipts_and_statements_answer() -> None:
    noisy = labels_of().randomize(RR)
    for value in (noisy.receipts[-1], noisy.receipts, list(noisy.receipts), {"a": noisy}, [noisy]):
        assert ldp.guarantee(value).epsilon == 1.0
    stated = noisy.guarantee()
    assert ldp.guarantee(stated) is stated
    several = [noisy, labels_of().randomize(RR), *noisy.receipts]
    assert ldp.guarantee(several).epsilon == 2.0
    assert ldp.guarantee([noisy, dense()]).epsilon == math.inf


@pytest.mark.parametrize("wrapped", [True, False], ids=["LabelDPOptimizer", "SGD"])
def test_an_optimizer_states_its_steps(wrapped: bool, tmp_path: Any) -> None:
    """Momentum is a noisy sum of gradients, or of gradients of noisy labels."""
    labels = labels_of()
    inner = keras.optimizers.SGD(0.1, momentum=0.9)
    if wrapped:
        model = ldp.LabelDPModel.from_model(dense())
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(ldp.LabelDPOptimizer(inner, 1.0, 4.0), loss)
    else:
        model = dense()
        model.compile(inner, keras.losses.CategoricalCrossentropy(from_logits=True))
    with pytest.raises(TypeError, match="an optimizer with counted steps"):
        ldp.guarantee(model.optimizer)
    if wrapped:
        batches = ldp.data.poisson_batches(X, labels, sampling_probability=0.5, steps=2)
        model.fit(batches, epochs=2, verbose=0)
    else:
        ldp.fit(model, X, labels.randomize(RR), verbose=0)
    stated = ldp.guarantee(model)
    for value in (model.optimizer, inner):
        assert ldp.guarantee(value).epsilon == stated.epsilon == labels.guarantee().epsilon
    model.save(tmp_path / "model.keras")
    loaded = ldp.load_model(tmp_path / "model.keras")
    assert ldp.guarantee(loaded.optimizer).epsilon == stated.epsilon
    assert public_input(inner).receipts == public_input(model).receipts
    with pytest.raises(TypeError):
        ldp.guarantee([np.asarray(weight) for weight in inner.variables])
    if not wrapped:
        model.fit(X, np.eye(2)[Y], verbose=0)
        assert ldp.guarantee(inner).epsilon == math.inf


def test_arrays_and_plain_values_are_refused() -> None:
    labels = labels_of()
    noisy, head = labels.randomize(RR), ldp.PrivateRidge(1.0, 1e-4).fit(X, labels)
    boosted = ldp.PrivateBoosting(5.0, num_classes=2, max_trees=2)
    boosted.fit(X, labels_of())
    histogram = labels.release(ldp.mechanisms.HistogramMechanism(1.0, 2))
    values = [Y, noisy.values, histogram.values, head.coef_, head.predict_proba(X), [head.coef_]]
    values += [3, 0.5, None, (), [], {}, set(), lambda x: x, RR, np.float64(1.0), b"", object()]
    values += [ldp.mechanisms.Priors(np.array([0.5, 0.5])), LogisticRegression(), [noisy, Y]]
    values += [PublicInput(Y), boosted.boosters_[0][0], ldp.PrivateRidge, tf.constant(Y)]
    for value in values:
        with pytest.raises(TypeError, match=r"expected .*got .*"):
            ldp.guarantee(value)
    assert ldp.guarantee(histogram.priors()).epsilon == 1.0
    assert ldp.guarantee(PublicInput(Y, noisy.receipts)).epsilon == 1.0


# Objects of another library.


def head(**arguments: Any) -> Any:
    return ldp.PrivateRidge(0.5, 1e-4, num_classes=2, **arguments)


FOREIGN = {
    "stacking": (
        lambda: StackingClassifier(
            [("h", head())], final_estimator=KNeighborsClassifier(1), passthrough=True, cv=2
        ),
        "estimators_ (list)",
    ),
    "voting": (
        lambda: VotingClassifier([("h", head()), ("k", KNeighborsClassifier(1))], voting="soft"),
        "estimators_ (list)",
    ),
    "calibration": (
        lambda: CalibratedClassifierCV(head(), cv=2, method="isotonic"),
        "calibrated_classifiers_ (list)",
    ),
    "grid": (
        lambda: GridSearchCV(head(), {"penalty": [1.0, 10.0]}, cv=2),
        "best_estimator_ (PrivateRidge)",
    ),
    "a selection on true labels": (
        lambda: make_pipeline(SelectKBest(k=2), head()),
        "steps (list)",
    ),
    "a fit on an array": (lambda: make_pipeline(StandardScaler(), head()), "steps (list)"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FOREIGN)
def test_an_object_of_another_library_promises_nothing(name: str) -> None:
    """The statement names the part that is counted, and the need."""
    make, part = FOREIGN[name]
    fitted = make().fit(X, Y)
    stated = ldp.guarantee(fitted)
    assert stated.headline == "NOT PRIVATE: nothing is promised" and not stated.is_private
    reason = stated.assumptions[0]
    assert reason.code == "not-promised" and part in reason and "Needed is" in reason
    assert type(fitted).__name__ in reason and "label-DP by themselves" in reason
    # The head in it answers, and the whole as an input is counted as before.
    assert 0.5 <= Receipts(public_input(fitted).receipts).guarantee().epsilon < math.inf


@pytest.mark.holds("vault.guarantee")
def test_a_pipeline_fitted_on_a_vault_is_composed() -> None:
    labels = labels_of()
    union = FeatureUnion([("a", StandardScaler()), ("b", MinMaxScaler())])
    pipeline = make_pipeline(StandardScaler(), union, "passthrough", head()).fit(X, labels)
    stated = ldp.guarantee(pipeline)
    assert stated.epsilon == 0.5 == labels.guarantee().epsilon
    notes = [note for note in stated.assumptions if note.code == "public-steps"]
    assert len(notes) == 2 and "'standardscaler' (StandardScaler)" in notes[0]
    assert "FeatureUnion" in notes[1] and notes[0].who == "trainer"
    # Receipts of a map of this library before the head count.
    receipt = labels_of().randomize(RR).receipts[-1]
    smooth = features.RandomFourierFeatures(8)
    pipeline = make_pipeline(smooth, head()).fit(X, labels_of())
    assert ldp.guarantee(pipeline).epsilon == 0.5
    smooth.fit(PublicInput(X, (receipt,)))
    assert ldp.guarantee(pipeline).epsilon > 1.2


class Labelled(StandardScaler):
    """A step of a user, which may do anything with labels."""


class Forwarding:
    """A step of a user, whose class has no methods."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "inner"), name)


def test_a_pipeline_with_a_step_that_may_know_labels_promises_nothing() -> None:
    def pipeline(*steps: Any) -> Any:
        return make_pipeline(*steps, head()).fit(X, labels_of())

    selected = SelectKBest(k=3).fit(X, Y)
    replaced = pipeline(StandardScaler())
    replaced.steps[0] = ("selected", selected)
    came_fitted = pipeline(FrozenEstimator(selected))
    of_scaler = pipeline(FrozenEstimator(StandardScaler().fit(X)))
    nested = pipeline(FeatureUnion([("a", StandardScaler())]))
    nested.steps[0][1].transformer_list[0] = ("a", selected)
    forwarded = pipeline(FeatureUnion([("a", StandardScaler())]))
    forwarded.steps[0][1].transformer_list[0] = ("a", Forwarding(selected))
    of_user = pipeline(Labelled())
    model = pipeline(StandardScaler())
    model.steps[0] = ("model", SelectFromModel(LogisticRegression()).fit(X, Y))
    last = pipeline(StandardScaler())
    last.steps[-1] = ("knn", KNeighborsClassifier(1).fit(X, Y))
    for value in (replaced, came_fitted, of_scaler, nested, forwarded, of_user, model):
        stated = ldp.guarantee(value)
        assert stated.epsilon == math.inf and "reads no labels" not in stated.assumptions[0]
        assert "(0.5, 0" in stated.assumptions[0]
    with pytest.raises(TypeError):
        ldp.guarantee(last)  # It has no receipts.


def states_of(step: Any, y: np.ndarray) -> bytes:
    """Returns the fitted state of a step, as bytes."""
    import pickle

    return pickle.dumps(step.fit(np.abs(X[:12]), y[:12]))


@pytest.mark.slow
def test_steps_of_scikit_learn_that_are_taken_to_read_no_labels_read_none() -> None:
    """By fits on two sets of labels. Each transformer of scikit-learn with plain arguments."""
    blind, reading = set(), set()
    for name, kind in all_estimators(type_filter="transformer"):
        try:
            step = kind(**({"random_state": 0} if "random_state" in kind().get_params() else {}))
            states = {states_of(step, y) for y in (Y, (X[:, 0] > 1.0) + Y, np.roll(Y, 1) + Y)}
        except (AttributeError, TypeError, ValueError):
            continue  # It has other arguments, or other inputs than rows of numbers.
        if _reads_no_labels(step):
            assert len(states) == 1, name
        (blind if _reads_no_labels(step) else reading).add(name)
    assert len(blind) > 30 and {"StandardScaler", "PCA", "OneHotEncoder", "KMeans"} <= blind
    assert {"SelectKBest", "SelectPercentile", "TargetEncoder"} & blind == set()
    assert {"SelectKBest", "LinearDiscriminantAnalysis"} <= reading


# Declarations.


def test_a_declaration_takes_sources_at_their_value_and_refuses_others() -> None:
    labels = labels_of()
    noisy = labels.randomize(RR)
    unspent = labels_of()
    by_statement = PrivacyGuarantee(0.25, 1e-6)
    for made_of, epsilon in (
        ([noisy], 1.0),
        (noisy, 1.0),
        ([noisy.receipts[0]], 1.0),
        (noisy.receipts, 1.0),
        ([noisy, noisy.receipts], 1.0),
        ([noisy.guarantee()], 1.0),
        ([labels], 1.0),
        ([by_statement, by_statement], 0.25),
        ([PrivacyGuarantee(math.inf)], math.inf),
        ((), 0.0),
    ):
        model = dense()
        stated = ldp.declare(model, because="trained on this draw alone", made_of=made_of)
        assert stated.epsilon == epsilon == ldp.guarantee(model).epsilon, made_of
        assert "declared" in {note.code for note in stated.assumptions}
    for made_of in ([noisy.values], [unspent], ["the draw of monday"], [noisy, X], [dense()], [()]):
        model = dense()
        with pytest.raises(ValueError, match="expected noisy labels with receipts, got none"):
            ldp.declare(model, because="trained on this draw alone", made_of=made_of)
        assert public_input(model).receipts == ()
    with pytest.raises(ValueError, match="add_or_remove"):
        other = PrivacyGuarantee(1.0, relation="add_or_remove")
        ldp.declare(dense(), because="from a paper", made_of=[other])
    for bad in (noisy.values, unspent, "monday"):
        with pytest.raises(ValueError, match="expected noisy labels with receipts, got none"):
            ldp.RecordReceipts(bad)
    ldp.RecordReceipts(labels)


def test_a_statement_as_a_source_survives_files(tmp_path: Any) -> None:
    model = dense()
    sources = [PrivacyGuarantee(0.25, 1e-6), PrivacyGuarantee(0.5, seeded=True)]
    stated = ldp.declare(model, because="a test", made_of=sources)
    assert (stated.epsilon, stated.delta, stated.seeded) == (0.75, 1e-6, True)
    model.save(tmp_path / "model.keras")
    assert ldp.guarantee(tmp_path / "model.keras") == stated


# A test of the test.


class Forgetful:
    """An object of the library that drops what it was made of."""

    def __init__(self) -> None:
        self.receipts = ()


def test_an_object_that_states_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ldp, "guarantee", lambda value: PrivacyGuarantee(0.0))
    for value in (Forgetful(), Y, dense(), RR):
        with pytest.raises(AssertionError, match=r"states \(0, 0\)"):
            check(value)
    free = Receipt(LabelSet.new(0), Charge(0.0, 0.0, {"class": "NoOpDpEvent"}), "free", "declared")
    assert check(free) == "zero"
    assert BUDGET.epsilon > 1.0
