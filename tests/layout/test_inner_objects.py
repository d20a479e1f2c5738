"""Each attribute of a fitted object states every release that it depends on.

The test fits all public objects, by the builders of ``_builders.py`` and by the cases below, and
walks over everything inside them that ``tf_labeldp.guarantee`` takes or that has ``to_keras``. An
attribute depends on a release if it changes where the release has another outcome and all other
noise is the same: each outcome is changed alone, and next to each other one, so that every choice
flips. Besides, it may depend on all releases before its own last one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from _builders import BUILDERS, DELTA, IMAGES, RR, K, Put, compiled, dense, labels_of, private_model
from sklearn.exceptions import NotFittedError
from slow_cases import with_slow
from test_provenance import PUBLIC, an_earlier_use, builder_of

import tf_labeldp as ldp
from tf_labeldp import accounting, features, heads, mechanisms, pate
from tf_labeldp.accounting import public_input
from tf_labeldp.mechanisms import LabelMechanism
from tf_labeldp.semi_supervised import DivideMix, FixMatch
from tf_labeldp.vault import Numbers, Rows, handed_on

RNG = np.random.default_rng(2)
MANY = 400
Z = np.arange(MANY) % K
ROWS = (1.5 * np.eye(4)[Z] + RNG.normal(size=(MANY, 4))).astype(np.float32)
NUMBERS = np.clip(ROWS[:, 0], -2.0, 2.0)
TABLE = {f"c{place}": ROWS[:, place] for place in range(4)}
OURS = ("tf_labeldp", "keras_layers")
EXPORT = ".to_keras()"
DEPTH = 8
HIDDEN = ("_", "label_dp_")
TEXTS = {"number": ROWS[:, 0], "text": np.array(["a", "b", "c", "d"])[np.arange(MANY) % 4]}


def vault(labels: Any = Z, epsilon: float = 50.0, delta: float = DELTA, **options: Any) -> Any:
    kind: Any = Numbers(-2.0, 2.0) if labels is NUMBERS else K
    budget = ldp.PrivacyBudget(epsilon, delta)
    return ldp.PrivateLabels(labels, kind, budget=budget, insecure_seed=0, **options)


def searched(estimator: Any, grid: Any, labels: Any = Z, rows: Any = ROWS, **options: Any) -> Any:
    return ldp.PrivateSearchCV(estimator, grid, 4.0, **options).fit(rows, vault(labels))


def network() -> Any:
    layers = [keras.Input((4,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(K)]
    return keras.Sequential(layers)


def two_inputs() -> Any:
    inputs = {"a": keras.Input((4,), name="a"), "b": keras.Input((), name="b")}
    both = keras.layers.Concatenate()([inputs["a"], keras.layers.Reshape((1,))(inputs["b"])])
    return keras.Model(inputs, keras.layers.Dense(K)(keras.layers.Dense(6, "tanh")(both)))


def bootstrapped(**options: Any) -> Any:
    options = {"epochs": 1, "batch_size": MANY, "verbose": 0, **options}
    head = heads.BootstrappedHead(4.0, DELTA / 2, network(), **options)
    return head.fit(ROWS, vault())


def door(
    kind: Any = ldp.PrivateClassifier, labels: Any = Z, rows: Any = ROWS, **options: Any
) -> Any:
    return kind(4.0, DELTA / 2, budget_for_evaluation=1.0, **options).fit(rows, vault(labels))


def door_of_array(labels: Any, **options: Any) -> Any:
    options |= {"low": -2.0, "high": 2.0} if labels is NUMBERS else {"num_classes": K}
    kind = ldp.PrivateRegressor if labels is NUMBERS else ldp.PrivateClassifier
    model = kind(4.0, DELTA / 2, budget_for_evaluation=1.0, insecure_seed=0, **options)
    return model.fit(ROWS, labels)


def chosen(kind: str) -> Any:
    labels = vault()
    train, held_out = labels.split(0.3)
    x, held = ROWS[train.indices], ROWS[held_out.indices]
    if kind == "heads":
        candidates = [
            ldp.PrivateRidge(2.0, DELTA / 4, spread=s).fit(x, train) for s in (True, False)
        ]
        predictions = [head.predict_proba(held) for head in candidates]
    else:
        candidates = [train.randomize(RR) for _ in range(2)]
        rate = [np.bincount(each.values, minlength=K) / len(each) for each in candidates]
        predictions = [np.tile(shares, (len(held), 1)) for shares in rate]
    if kind == "models":
        trained = []
        for noisy in candidates:
            model = compiled(network())
            ldp.fit(model, x, noisy, epochs=2, batch_size=140, verbose=0)
            trained.append(model)
        candidates = trained
        logits = [model.predict(held, verbose=0) for model in candidates]
        predictions = [tf.nn.softmax(each).numpy() for each in logits]
    return ldp.select(predictions, held_out, 2.0, candidates=candidates)


def sets(is_noisy: bool) -> Any:
    train, held_out = vault().split(0.5)
    head = ldp.PrivateRidge(2.0, DELTA / 4).fit(ROWS[train.indices], train)
    rows = ROWS[held_out.indices]
    if is_noisy:
        noisy = held_out.randomize(mechanisms.RandomizedResponse(6.0, K))
        return ldp.conformal(head, (rows, noisy), 0.4)
    return ldp.conformal(head, (rows, held_out), 0.3, 2.0)


def staged() -> Any:
    labels = vault()
    options = {"epsilon": 2.0, "fractions": (0.6, 0.4), "epochs_per_stage": 1, "verbose": 0}
    stages = ldp.MultiStageTraining(ROWS, labels, class_weight="balanced", **options)
    model = compiled(network())
    fit = {"epochs": stages.epochs, "shuffle": False, "verbose": 0}
    model.fit(stages.dataset(), callbacks=[stages], **fit)
    return model, stages, stages.noisy_labels()


def learnt(learner: Any, priors: Any = None, **options: Any) -> Any:
    labels = labels_of()
    priors = labels.release(mechanisms.HistogramMechanism(1.0, K)).priors()
    noisy = labels.randomize(RR)
    weak = keras.layers.Identity()
    model = compiled(learner(dense(K, (8, 8, 1)), weak=weak, strong=weak, priors=priors))
    fit = {"batch_size": 16, "epochs": 1, "steps_per_epoch": 2, "verbose": 0}
    model.fit(IMAGES, noisy, **fit, **options)
    return model


def student() -> Any:
    """A network that learns a head's probabilities, next to its targets."""
    head = ldp.PrivateLogisticRegression(4.0, DELTA / 2).fit(ROWS, vault())
    taught = heads.teacher_labels(public_input(head).with_value(head.predict_proba(ROWS)))
    batches = taught.batches(ROWS, 200)
    model = compiled(network())
    with_receipts = ldp.RecordReceipts(batches)
    model.fit(batches, callbacks=[with_receipts], verbose=0)
    return model, taught, batches, head


def on_features_of_a_network(fit: Callable[[Any, Any], Any]) -> Any:
    """Returns the result of a fit on the features of a network that learnt from the same labels."""
    labels = vault()
    options = {"shares": (1.0,), "draw_share": 0.0, "epochs": 1, "batch_size": MANY, "verbose": 0}
    first = heads.BootstrappedHead(2.0, DELTA / 8, network(), **options).fit(ROWS, labels)
    return fit(features.PublicEncoder(first.to_keras()).fit(ROWS), labels)


def stepped() -> Any:
    """A model of noisy steps from the weights that noisy labels taught."""
    labels = vault()
    model = compiled(network())
    ldp.fit(model, ROWS, labels.randomize(RR), batch_size=200, verbose=0)
    model = private_model(ldp.LabelDPModel.from_model(model))
    batches = ldp.data.poisson_batches(ROWS, labels, sampling_probability=0.1, steps=2)
    model.fit(batches, epochs=2, verbose=0)
    return model


def answered() -> Any:
    features_ = np.asarray(ROWS)
    options = {"num_teachers": 10, "num_queries": 20}
    return pate.PATE(8.0, DELTA / 2, **options).answer(features_, vault())


CASES: dict[str, Callable[[], Any]] = {
    "a search of heads": lambda: searched(
        ldp.PrivateRidge(1.0, DELTA / 2), {"spread": [True, False]}
    ),
    "a search of encoders": lambda: searched(
        ldp.PrivateLogisticRegression(1.0, DELTA / 2),
        {"encoder": [features.RandomFourierFeatures(8).fit(ROWS), features.TableCodes().fit(ROWS)]},
    ),
    "a search of trees": lambda: searched(ldp.PrivateBoosting(), {"max_trees": [2, 5]}),
    "a search of trees of numbers": lambda: searched(
        ldp.PrivateBoosting(), {"max_trees": [2, 5]}, NUMBERS
    ),
    "a search of numbers": lambda: searched(
        ldp.PrivateRidge(1.0, DELTA / 2), {"center": [True, False]}, NUMBERS
    ),
    "a search of front doors": lambda: searched(
        ldp.PrivateClassifier(1.0, DELTA / 2, method="head"), {"class_weight": [None, {1: 3.0}]}
    ),
    "a search of clusters": lambda: searched(heads.NoiseCluster(2, 1.0), {"num_clusters": [2, 4]}),
    "a network of three heads": lambda: bootstrapped(shares=(0.3, 0.3, 0.4), draw_share=0.0),
    "a network of heads and a draw": lambda: bootstrapped(shares=(0.5, 0.5), draw_share=0.5),
    "a front door": door,
    "a front door of an array": lambda: door_of_array(Z),
    "a front door of an array of numbers": lambda: door_of_array(NUMBERS),
    "a front door of a table": lambda: door(rows=TABLE, method="head"),
    "a front door of trees": lambda: door(method="boosting"),
    "a front door of a network": lambda: door(model=network(), epochs=1),
    "a front door of numbers": lambda: door(ldp.PrivateRegressor, NUMBERS),
    "a front door of trees of numbers": lambda: door(
        ldp.PrivateRegressor, NUMBERS, method="boosting"
    ),
    "chosen heads": lambda: chosen("heads"),
    "chosen noisy labels": lambda: chosen("noisy labels"),
    "chosen models": lambda: chosen("models"),
    "sets": lambda: sets(False),
    "sets of noisy labels": lambda: sets(True),
    "stages": staged,
    "FixMatch": lambda: learnt(FixMatch),
    "DivideMix": lambda: learnt(DivideMix, warmup_epochs=0),
    "a student": student,
    "a head on a network": lambda: on_features_of_a_network(
        lambda encoder, labels: ldp.PrivateRidge(2.0, DELTA / 8, encoder=encoder).fit(ROWS, labels)
    ),
    "clusters of a network": lambda: on_features_of_a_network(
        lambda encoder, labels: heads.NoiseCluster(3, 1.0, encoder=encoder).fit(ROWS, labels)
    ),
    "noisy labels by a network": lambda: on_features_of_a_network(
        lambda encoder, labels: labels.randomize(
            heads.HeadPriorRandomizer(4.0, DELTA / 8, encoder=encoder), features=ROWS
        )
    ),
    "a private prior": lambda: vault(NUMBERS).randomize(ldp.LabelRandomizer(4.0, max_values=8)),
    "an unbiased draw after a private prior": lambda: vault(NUMBERS).randomize(
        ldp.LabelRandomizer(4.0, max_values=8, unbiased=True)
    ),
    "noisy steps": stepped,
    "PATE": answered,
}
THEOREMS = {
    r"[.']encoder(\W|$)": (
        "An argument is a public value of the caller, or follows from the public features: its law "
        "is that of no label. Which of the candidates it is, is the choice, which the statement of "
        "the search covers (post-processing of best_params_)."
    ),
    r"\.reports\[\d+\]$": (
        "A report is numbers, as an array is, and has no place for receipts: its statement is that "
        "of the noisy labels of the stages (post-processing)."
    ),
    r"\.columns_\[\d+\]$": "The codes of a column follow from the public column alone.",
}
"""Attributes that state less, by a pattern of their paths, with the reason."""


class Outcomes:
    """Counts the draws and releases of a run, and gives some of them another outcome."""

    def __init__(self, monkeypatch: Any) -> None:
        self._changed: frozenset[int] = frozenset()
        self._number = self._depth = 0
        self._vaults: list[Any] = []
        for kind in {kind for kind in _kinds(mechanisms.Mechanism) if is_ours(kind)}:
            for name in {"randomize", "release"} & set(vars(kind)):
                monkeypatch.setattr(kind, name, self._changing(vars(kind)[name]))
        make = ldp.PrivateLabels.__init__

        def made(labels: Any, *args: Any, **options: Any) -> None:
            make(labels, *args, **options)
            self._vaults.append(labels)

        monkeypatch.setattr(ldp.PrivateLabels, "__init__", functools.wraps(make)(made))

    def run(self, case: Callable[[], Any], changed: frozenset[int] = frozenset()) -> Any:
        """Returns the result of a case, with other outcomes of these releases."""
        self._changed, self._number, self._vaults = changed, 0, []
        keras.utils.clear_session(free_memory=False)  # Names of layers count from one.
        keras.utils.set_random_seed(0)
        return case()

    def receipts(self) -> tuple[list[Any], list[Any]]:
        """Returns the receipts of the last run: of releases, in their order, and of noisy steps."""
        # Weights of an equal earlier run are recognized, with the receipts of its vault.
        used = [(labels.label_set.name, labels.receipts) for labels in self._vaults]
        own = [use for name, uses in used for use in uses if use.labels.name == name]
        found = [use for use in own if use.kind in ("draw", "release")]
        assert len(found) == self._number
        return found, [use for use in own if use.kind == "steps"]

    def _changing(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def called(mechanism: Any, *args: Any, **options: Any) -> Any:
            self._depth += 1
            try:
                out = method(mechanism, *args, **options)
            finally:
                self._depth -= 1
            if self._depth == 0:
                self._number += 1
                if self._number - 1 in self._changed:
                    return another(mechanism, np.asarray(out))
            return out

        return called


def another(mechanism: Any, outcome: np.ndarray) -> np.ndarray:
    """Returns another possible outcome of a mechanism for two classes, candidates or numbers."""
    if outcome.dtype.kind in "iu":
        if outcome.ndim == 0:
            return np.asarray(1 - outcome)
        if isinstance(mechanism, LabelMechanism) or np.any(outcome == -1):
            return np.where(outcome >= 0, (outcome + 1) % K, outcome)
        return np.flip(outcome, axis=-1)
    if outcome.ndim == 0:
        return np.asarray(outcome + 0.25)
    if isinstance(mechanism, mechanisms.LabelMomentMechanism):
        return -outcome
    return np.flip(outcome, axis=0)


def _kinds(kind: type) -> Iterator[type]:
    yield kind
    for inner in kind.__subclasses__():
        yield from _kinds(inner)


def is_ours(value: Any) -> bool:
    kind = value if inspect.isclass(value) else type(value)
    return kind.__module__.partition(".")[0] in OURS


def is_plain(value: Any) -> bool:
    """Returns whether a value is an array or a number, which has no statement, or a statement."""
    atoms = (np.ndarray, np.generic, str, bytes, int, float, type(None), tf.Tensor, keras.Variable)
    if isinstance(value, atoms):
        return True
    home = type(value).__module__
    return home.startswith("tf_labeldp.accounting.") and not isinstance(
        value, accounting.PublicInput
    )


def inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the public parts of a value, by their names."""
    if isinstance(value, (list, tuple)):
        yield from ((f"[{place}]", part) for place, part in enumerate(value[:50]))
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, keras.Model):
        yield from (
            (f".layers[{i}]", layer) for i, layer in enumerate(value.layers) if layer.weights
        )
    if is_ours(value):
        names = {name for name in getattr(value, "__dict__", {}) if not name.startswith(HIDDEN)}
        for kind in filter(is_ours, type(value).__mro__):
            names |= {
                name
                for name, part in vars(kind).items()
                if isinstance(part, property) and not name.startswith("_")
            }
        for name in sorted(names):
            try:
                yield f".{name}", getattr(value, name)
            except Exception:
                continue  # An attribute that this object does not have, such as classes of numbers.


def parts(result: Any, *, exports: bool = False) -> dict[str, Any]:
    """Returns all objects inside a result by their paths, maybe with their Keras models."""
    found: dict[str, Any] = {}
    waiting: list[tuple[str, Any, tuple[int, ...]]] = [("", result, ())]
    while waiting:
        path, value, around = waiting.pop(0)
        is_other = is_plain(value) or isinstance(value, ldp.PrivateLabels)
        if is_other or id(value) in around or len(around) > DEPTH:
            continue
        found[path] = value
        more = list(inside(value))
        if exports and hasattr(value, "to_keras"):
            # An encoder may have no Keras model, or may not be fitted.
            with contextlib.suppress(TypeError, ValueError):
                more.append((EXPORT, value.to_keras()))
        waiting += [(path + name, part, (*around, id(value))) for name, part in more]
    return found


def walk(result: Any) -> dict[str, Any]:
    """Returns all objects inside a result that have a statement, by their paths."""
    found = {}
    for path, value in parts(result, exports=True).items():
        if not isinstance(value, (list, tuple, dict)):
            try:
                ldp.guarantee(value)
                found[path] = value
            except TypeError:
                continue
    return found


def content(value: Any, depth: int = 6) -> list[Any]:
    """Returns arrays and numbers that a value is made of, without its receipts."""
    if isinstance(value, (np.ndarray, np.generic, int, float, str)):
        return [np.asarray(value)]
    if isinstance(value, keras.layers.Layer):
        return [np.asarray(weight) for weight in value.weights]
    if depth == 0 or isinstance(value, ldp.PrivateLabels) or value is None:
        return []
    if isinstance(value, (list, tuple)):
        parts = list(value)
    elif isinstance(value, dict):
        parts = list(value.values())
    elif is_ours(value) and not is_plain(value):
        parts = [
            part
            for name, part in sorted(getattr(value, "__dict__", {}).items())
            if name not in ("receipts", "receipts_", "_family", "assumptions")
        ]
    else:
        return []
    return [array for part in parts for array in content(part, depth - 1)]


def is_same(one: list[Any], other: list[Any]) -> bool:
    if len(one) != len(other):
        return False
    pairs = zip(one, other, strict=True)
    return all(
        a.shape == b.shape
        and np.array_equal(a, b, equal_nan=a.dtype.kind == "f" and b.dtype.kind == "f")
        for a, b in pairs
    )


def contents_of(result: Any) -> dict[str, list[Any]]:
    return {path: content(value) for path, value in parts(result, exports=True).items()}


def changes(
    outcomes: Outcomes, case: Callable[[], Any], result: Any, number: int, has_steps: bool
) -> tuple[dict[str, set[int]], set[str]]:
    """Returns the releases that change each part of a result, and the parts that steps change."""
    runs = {frozenset[int](): contents_of(result)}

    def contents(changed: frozenset[int]) -> dict[str, list[Any]]:
        if changed not in runs:
            runs[changed] = contents_of(outcomes.run(case, changed))
        return runs[changed]

    def differ(one: frozenset[int], other: dict[str, list[Any]]) -> Iterator[str]:
        for path, old in contents(one).items():
            if path in depends and not (path in other and is_same(old, other[path])):
                yield path

    depends: dict[str, set[int]] = {path: set() for path in contents(frozenset())}
    together = [frozenset(), *(frozenset([i]) for i in range(number) if number > 1)]
    for before in together:
        for release in set(range(number)) - before:
            for path in differ(before, contents(before | {release})):
                depends[path].add(release)
    # The noise of steps has no seed: it changes in each run.
    again = contents_of(outcomes.run(case)) if has_steps else contents(frozenset())
    return depends, set(differ(frozenset(), again))


def promises_nothing(path: str, value: Any) -> bool:
    """Returns whether it is a layer without any receipt: it has no record of any label."""
    is_layer = isinstance(value, keras.layers.Layer) and not path.endswith(EXPORT)
    return is_layer and not public_input(value).receipts


def bare_attributes(outcomes: Outcomes, name: str) -> tuple[dict[str, Any], list[str]]:
    """Returns the attributes of a case, and those that lack a receipt, with the release."""
    result = outcomes.run(ALL[name])
    receipts, steps = outcomes.receipts()
    found = walk(result)
    place = {receipt.id: number for number, receipt in enumerate(receipts)}
    depends, trained = changes(outcomes, ALL[name], result, len(receipts), bool(steps))
    lost = []
    for path, value in found.items():
        all_own = {use.id for use in public_input(value).receipts}
        own = {place[name] for name in all_own if name in place}
        # It may depend on all releases before its own last one.
        needed = depends[path] | set(range(max(own, default=0)))
        missing = [receipts[release].what for release in sorted(needed - own)]
        missing += [use.what for use in steps if path in trained and use.id not in all_own]
        is_proven = any(re.search(pattern, path) for pattern in THEOREMS)
        if missing and not (is_proven or promises_nothing(path, value)):
            words = ", ".join(what[:50] for what in missing)
            lost.append(f"{name}{path}, {type(value).__name__}: {words}")
    return found, lost


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Outcomes]:
    tf.config.run_functions_eagerly(True)
    yield Outcomes(monkeypatch)
    tf.config.run_functions_eagerly(False)


ALL = {
    **CASES,
    **{
        place: functools.partial(builder, Put("", an_earlier_use()))
        for place, builder in BUILDERS.items()
    },
}
QUICK = {
    "a search of heads",
    "chosen heads",
    "chosen noisy labels",
    "sets",
    "vault.LabelRandomizer",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", with_slow(ALL, ALL.keys() - QUICK))
def test_no_attribute_is_bare(name: str, outcomes: Outcomes) -> None:
    _, lost = bare_attributes(outcomes, name)
    assert not lost, "\n".join(lost)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    with_slow(
        (
            "a search of heads",
            "chosen heads",
            "a search of trees",
            "a network of heads and a draw",
            "a front door",
            "sets",
        ),
        {"a search of trees", "a network of heads and a draw", "a front door", "sets"},
    ),
)
def test_files_state_what_their_objects_state(
    name: str, outcomes: Outcomes, tmp_path: pathlib.Path
) -> None:
    saved = 0
    for path, value in walk(outcomes.run(ALL[name])).items():
        if not (isinstance(value, keras.Model) or hasattr(value, "to_keras")):
            continue
        own = {use.id for use in public_input(value).receipts}
        folder = tmp_path / str(saved)
        try:
            stated = ldp.save(value, folder)
        except NotFittedError:
            continue  # The argument of a search.
        in_file = {use.id for use in public_input(ldp.load_model(folder / "model.keras")).receipts}
        assert own <= in_file, path
        assert stated.epsilon >= ldp.guarantee(value).epsilon - 1e-9, path
        saved += 1
    assert saved >= 2


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_the_walk_is_not_empty(
    outcomes: Outcomes, record_property: Callable[[str, object], None]
) -> None:
    walks = [walk(outcomes.run(case)) for case in ALL.values()]
    attributes = [value for found in walks for value in found.values()]
    classes = {type(value) for value in attributes}
    numbers = {
        "attributes": len(attributes),
        "with receipts": sum(bool(public_input(value).receipts) for value in attributes),
        "classes": len(classes),
        "classes of the library": sum(map(is_ours, classes)),
    }
    print(numbers)
    for name, number in numbers.items():
        record_property(name, number)
    assert numbers["attributes"] >= 600 and numbers["with receipts"] >= 340
    assert numbers["classes of the library"] >= 35


PARTS_OF_MAPS = r"\.(columns_|filters_)\[\d+\]$"
"""Values without a place for receipts, as arrays are; the map that they are parts of has one."""


class Other(Put):
    """Gives the argument under test other numbers, and texts in another order."""

    def __call__(self, name: str, value: Any) -> Any:
        return _changed(value) if name == self.name else value


def _changed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _changed(part) for name, part in value.items()}
    if value.dtype.kind != "f":
        return np.roll(np.where(value == value[0], value[1], value), 1)
    noise = np.random.default_rng(5).normal(size=value.shape)
    return (1.25 * value + noise).astype(value.dtype)


FEATURES: dict[str, Callable[[Any], Any]] = {
    "numbers": lambda put: ldp.PrivateClassifier(1.0, DELTA / 2).fit(put("X", ROWS), vault()),
    "images": lambda put: ldp.PrivateClassifier(1.0, DELTA / 2, method="head").fit(
        put("X", np.resize(IMAGES, (MANY, 8, 8, 1))), vault()
    ),
    "a table": lambda put: ldp.PrivateClassifier(1.0, DELTA / 2, method="head").fit(
        put("X", TEXTS), vault()
    ),
    "a table of trees": lambda put: ldp.PrivateBoosting(4.0).fit(put("X", TEXTS), vault()),
    "several inputs": lambda put: ldp.PrivateClassifier(
        1.0, DELTA / 2, model=two_inputs(), epochs=1
    ).fit(put("X", {"a": ROWS, "b": ROWS[:, 0]}), vault()),
    "an encoder of images": lambda put: ldp.PrivateClassifier(
        1.0, DELTA / 2, encoder=features.PublicEncoder(dense(3, (8, 8, 1)))
    ).fit(put("X", np.resize(IMAGES, (MANY, 8, 8, 1))), vault()),
    "a search": lambda put: ldp.PrivateSearchCV(
        ldp.PrivateClassifier(1.0, DELTA / 2, method="head"), {"class_weight": [None]}, 4.0
    ).fit(put("X", ROWS), vault()),
    **{
        f"{each.place} {each.name}": builder_of(each)
        for each in PUBLIC
        if each.name in ("X", "x", "features", "images") and builder_of(each)
    },
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", FEATURES)
def test_attributes_state_the_receipts_of_the_features(case: str, outcomes: Outcomes) -> None:
    """An attribute that changes with the features has their receipts, as the whole has."""
    name, receipt = case.rpartition(" ")[2], an_earlier_use()
    name = name if case not in FEATURES or "." in case else "X"
    runs = []
    for put in (Put(name, receipt), Other(name, receipt)):
        result = outcomes.run(functools.partial(FEATURES[case], put))
        runs.append(contents_of(result))
        if not isinstance(put, Other):
            walked = walk(result)
    one, other = runs
    lost = [
        path
        for path, value in walked.items()
        if not (path in other and is_same(one[path], other[path]))
        and receipt.id not in {use.id for use in public_input(value).receipts}
        and not (promises_nothing(path, value) or re.search(PARTS_OF_MAPS, path))
    ]
    assert one.keys() and not lost, "\n".join(lost)


# Tests of the test.


@pytest.mark.slow
@pytest.mark.holds("vault.with_receipts")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["a search of heads", "chosen heads"])
def test_a_receipt_that_is_not_handed_on_is_found(
    name: str, outcomes: Outcomes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One receipt is dropped where a choice is handed on; the chosen one has its own fit's."""
    hand_on = handed_on.with_receipts
    places = {"a search of heads": "front_door._search", "chosen heads": "vault.evaluation"}
    found = []
    for dropped in range(3):

        def forget(value: Any, receipts: Any, dropped: int = dropped) -> Any:
            return hand_on(value, [use for i, use in enumerate(receipts) if i != dropped])

        with monkeypatch.context() as patch:
            patch.setattr(f"tf_labeldp.{places[name]}.with_receipts", forget)
            _, lost = bare_attributes(outcomes, name)
        found.append(bool(lost))
    assert found.count(True) == 2 and found[2]


def applied() -> Any:
    """The transform of a dataset, with its vault."""
    dataset = tf.data.Dataset.from_tensor_slices((ROWS, Z))
    transform = ldp.data.randomize_labels(
        mechanisms.RandomizedResponse(1.0, K), budget=ldp.PrivacyBudget(9.0)
    )
    dataset.apply(transform)
    return transform


def sampled(labels: Any, **options: Any) -> Any:
    return ldp.data.poisson_batches(ROWS, labels, sampling_probability=0.1, steps=2, **options)


def of_rows() -> Any:
    budget = ldp.PrivacyBudget(9.0)
    return ldp.PrivateLabels(np.stack([Z, 1 - Z], axis=1), Rows(2), budget=budget)


WITH_LABELS: dict[str, Callable[[], Any]] = {
    "a vault": vault,
    "a part": lambda: vault().split(0.5)[0],
    "a reservation": lambda: vault().reserve({"draw": RR}),
    "batches": lambda: sampled(vault()),
    "mapped batches": lambda: sampled(vault()).map(lambda rows: rows),
    "batches of an array": lambda: sampled(Z),
    "batches of outputs": lambda: sampled({"a": vault(), "b": vault()}),
    "batches of columns": lambda: sampled(of_rows(), columns={"a": 0, "b": [0, 1]}),
    "a transform": applied,
    "a model of batches": lambda: (private_model(), sampled(vault())),
    **{name: CASES[name] for name in ("stages", "noisy steps", "a front door of an array")},
}


def has_labels(value: Any) -> bool:
    """Returns whether a value contains the true labels of these vaults, in their order."""
    if isinstance(value, (list, tuple)):
        return any(map(has_labels, value)) or (
            len(value) == MANY and has_labels(np.asarray(value, object))
        )
    if isinstance(value, dict):
        return has_labels(list(value.values()))
    if not isinstance(value, (np.ndarray, tf.Tensor)):
        return False
    columns = np.asarray(value)
    if columns.shape[:1] not in ((MANY,), (MANY // 2,)):
        return False
    columns = columns.reshape(len(columns), -1).T
    return any(np.array_equal(column, Z[: len(column)]) for column in columns)


@pytest.mark.parametrize("name", WITH_LABELS)
def test_no_public_name_reaches_true_labels(name: str, tmp_path: Any, monkeypatch: Any) -> None:
    """Attributes, properties and methods without arguments, of everything inside."""
    monkeypatch.chdir(tmp_path)
    assert has_labels((Z, None)) and has_labels(np.stack([1 - Z, Z], axis=1))
    result = WITH_LABELS[name]()
    inner = dict(all_inside("", result, 5))
    called = 0
    for path, value in inner.items():
        for attribute, part in inside(value):
            assert not has_labels(part), f"{path}{attribute}"
        for method, call in calls_of(value):
            returned = None
            with contextlib.suppress(Exception):  # An object may not be ready for the call.
                returned = call()
                called += 1
            assert not has_labels(returned), f"{path}.{method}()"
    assert called


def all_inside(path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    yield path, value
    if depth and not is_plain(value) and not isinstance(value, ldp.PrivateLabels):
        for name, part in inside(value):
            yield from all_inside(path + name, part, depth - 1)


def calls_of(value: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields the public methods of this library that need no argument."""
    if not is_ours(value):
        return
    for kind in filter(is_ours, type(value).__mro__):
        for name, method in vars(kind).items():
            if name.startswith("_") or not inspect.isfunction(method):
                continue
            parameters = list(inspect.signature(method).parameters.values())[1:]
            if all(each.default is not each.empty or each.kind in (2, 4) for each in parameters):
                yield name, functools.partial(method, value)
