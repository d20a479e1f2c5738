"""Changes of a model between the counted steps of a training, wherever they happen.

Each cell of the matrix is a true statement: receipts of new weights are included, or nothing is
promised.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from ledger_cases import DENSE, D, K, X, Y, batches, plain, private, stated, steps_epsilon
from ledger_cases import vault as make_vault

import tf_labeldp as ldp
from tf_labeldp.mechanisms import RandomizedResponse

EPOCHS, OWN, OTHER = 2, 0.1, 8.0
ONE_HOT = np.eye(K, dtype=np.float32)[Y]


class Between(keras.callbacks.Callback):
    """Calls a function once, at a place of the training, with the model."""

    PLACES = (
        "on_train_begin",
        "on_epoch_begin",
        "on_train_batch_begin",
        "on_train_batch_end",
        "on_epoch_end",
    )

    def __init__(self, place: str, change: Callable[[keras.Model], Any], epoch: int = 1) -> None:
        super().__init__()
        self.change, self.epoch, self.calls = change, epoch, 0
        setattr(self, place, self._at_place)
        self.place = place

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.now = epoch

    def _at_place(self, number: Any = None, logs: Any = None) -> None:
        if "epoch" in self.place:
            self.now = number
        if self.calls or (self.place != "on_train_begin" and self.now != self.epoch):
            return
        self.calls += 1
        self.change(self.model)


# How a model is trained: returns the model, and a function that trains it with a callback.


def compiled(model: keras.Model | None = None, loss: Any = DENSE, **settings: Any) -> keras.Model:
    model = plain() if model is None else model
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, loss, **{"run_eagerly": True, **settings})
    return model


def drawn(epsilon: float = OWN, labels: Any = None) -> ldp.NoisyLabels:
    labels = make_vault() if labels is None else labels
    return labels.randomize(RandomizedResponse(epsilon, K))


def by_fit(model: keras.Model, *callbacks: Any) -> None:
    ldp.fit(model, X, drawn(), epochs=EPOCHS, batch_size=40, callbacks=[*callbacks], verbose=0)


def by_callback(model: keras.Model, *callbacks: Any, first: bool = False) -> None:
    noisy = drawn()
    data = noisy.to_dataset(X, "posterior").batch(40)
    record = ldp.RecordReceipts(noisy)
    order = [record, *callbacks] if first else [*callbacks, record]
    model.fit(data, epochs=EPOCHS, callbacks=order, verbose=0)


def by_stages(model: keras.Model, *callbacks: Any) -> None:
    stages = ldp.MultiStageTraining(
        X,
        make_vault(),
        epsilon=OWN,
        fractions=(0.5, 0.5),
        epochs_per_stage=1,
        batch_size=40,
        verbose=0,
    )
    data, callbacks = stages.dataset(), (stages, *callbacks)
    model.fit(data, epochs=EPOCHS, callbacks=[*callbacks], shuffle=False, verbose=0)


def by_steps(model: keras.Model, *callbacks: Any) -> None:
    model.fit(batches(make_vault()), epochs=EPOCHS, callbacks=[*callbacks], verbose=0)


DOORS: dict[str, tuple[Callable[[], keras.Model], Callable[..., None], float]] = {
    "fit": (compiled, by_fit, OWN),
    "RecordReceipts": (compiled, by_callback, OWN),
    "RecordReceipts first": (
        compiled,
        lambda model, *callbacks: by_callback(model, *callbacks, first=True),
        OWN,
    ),
    "MultiStageTraining": (compiled, by_stages, OWN),
    "LabelDPModel": (private, by_steps, steps_epsilon(2 * EPOCHS)),
}

# What happens between the steps. The other models are trained once.


@pytest.fixture(autouse=True)
def isolated() -> None:
    """Replaces the fixture that forgets all weights: these models have random weights."""


class Others:
    """Weights and files of other models: counted at epsilon 8, and trained on true labels."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.values = folder, {}
        for name in ("counted", "clear"):
            model = compiled()
            backup = self.backup(name)
            if name == "counted":
                ldp.fit(model, X, drawn(OTHER), callbacks=[backup], verbose=0)
            else:
                model.fit(X, ONE_HOT, callbacks=[backup], verbose=0)
            self.values[name] = model.get_weights()
            # So all epochs of the fit that is restored are to come.
            (folder / name / "training_metadata.json").write_text('{"epoch": 0, "batch": 0}')
            model.save_weights(folder / f"{name}.weights.h5")

    def backup(self, name: str) -> keras.callbacks.Callback:
        return keras.callbacks.BackupAndRestore(self.folder / name, delete_checkpoint=False)

    def sets(self, model: keras.Model, name: str) -> None:
        model.set_weights(self.values[name])

    def loads(self, model: keras.Model, name: str) -> None:
        model.load_weights(self.folder / f"{name}.weights.h5", skip_mismatch=True)

    def restores(self, model: keras.Model, name: str) -> None:
        again = self.backup(name)
        again.set_model(model)
        again.on_train_begin()

    def trains(self, model: keras.Model, how: str) -> None:
        if how == "fit" and not isinstance(model, ldp.LabelDPModel):
            model.fit(X, ONE_HOT, batch_size=60, verbose=0)
        elif how == "batch" and not isinstance(model, ldp.LabelDPModel):
            model.train_on_batch(X, ONE_HOT)
        else:
            # Another model has these layers, and its own optimizer.
            layers = [layer for layer in model.layers if layer.weights]
            other = compiled(keras.Sequential([keras.Input((D,)), *layers]))
            other.train_on_batch(X, ONE_HOT)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Others:
    return Others(tmp_path_factory.mktemp("others"))


WHAT: dict[str, tuple[str, str, float]] = {
    "nothing": ("", "", 0.0),
    "set": ("sets", "counted", OTHER),
    "load": ("loads", "counted", OTHER),
    "restore": ("restores", "counted", OTHER),
    "set, clear": ("sets", "clear", math.inf),
    "load, clear": ("loads", "clear", math.inf),
    "restore, clear": ("restores", "clear", math.inf),
    "fit": ("trains", "fit", math.inf),
    "train_on_batch": ("trains", "batch", math.inf),
    "shared layers": ("trains", "shared", math.inf),
}


PLACES = [*Between.PLACES, "after"]


def is_fast(door: str, place: str, what: str) -> bool:
    """Whether a cell is one of the fast tests."""
    if door == "RecordReceipts first":
        return (place, what) == ("on_train_batch_begin", "set, clear")
    if door == "MultiStageTraining":
        return (place, what) == ("on_epoch_begin", "set")
    if what in ("fit", "shared layers"):
        return place == "on_epoch_end"
    if what in ("restore", "restore, clear"):
        return place == "on_train_begin"
    is_common = place in ("on_epoch_begin", "on_train_batch_end")
    return what in ("nothing", "set", "set, clear") and (door == "RecordReceipts" or is_common)


def cell(*parts: str, fast: bool, pair: bool) -> Any:
    """Returns a cell of a matrix; the slow ones have each pair of two axes."""
    mark = pytest.mark.slow if pair else pytest.mark.exhaustive
    return pytest.param(*parts, marks=[] if fast else [mark])


CELLS = [
    cell(door, place, what, fast=is_fast(door, place, what), pair=(i + k) % len(DOORS) == j)
    for j, door in enumerate(DOORS)
    for i, place in enumerate(PLACES)
    for k, what in enumerate(WHAT)
]


@pytest.mark.holds("training.fit", "training.RecordReceipts", "training.LabelDPModel")
@pytest.mark.parametrize(("door", "place", "what"), CELLS)
def test_every_change_is_counted_or_voids_the_promise(door, place, what, others):
    make, train, own = DOORS[door]
    how, name, cost = WHAT[what]
    model = make()

    def change(model: keras.Model) -> None:
        if how:
            getattr(others, how)(model, name)
        elif place != "on_train_begin":
            assert math.isfinite(stated(model)) or place == "on_epoch_begin"

    if place == "after":
        train(model)
        change(model)
    else:
        between = Between(place, change)
        # A budget may stop the training.
        with contextlib.suppress(ldp.BudgetExceededError):
            train(model, between)
        assert between.calls == 1
    found = stated(model)
    if not how:
        assert found == pytest.approx(own)
    elif place in ("on_train_begin", "on_epoch_begin") and math.isfinite(cost):
        assert found == pytest.approx(own + cost) or (door == "LabelDPModel" and found > cost)
    else:
        assert found >= cost


# Interruptions.


def interrupts(model: keras.Model) -> None:
    raise KeyboardInterrupt


def interrupted(door: str, place: str, **settings: Any) -> keras.Model:
    make, train, _ = DOORS[door]
    model = make() if door == "LabelDPModel" else make(**settings)
    with pytest.raises(KeyboardInterrupt):
        train(model, Between(place, interrupts))
    return model


THEN: dict[str, Callable[[keras.Model, Others], Any]] = {
    "nothing": lambda model, others: None,
    "set": lambda model, others: others.sets(model, "counted"),
    "set, clear": lambda model, others: others.sets(model, "clear"),
    "one layer": lambda model, others: model.layers[-1].set_weights(others.values["clear"][-2:]),
    "fit": lambda model, others: others.trains(model, "fit"),
    "train_on_batch": lambda model, others: others.trains(model, "batch"),
    "shared layers": lambda model, others: others.trains(model, "shared"),
}


INTERRUPTED = ("on_epoch_begin", "on_train_batch_begin", "on_train_batch_end")
INTERRUPTIONS = [
    cell(
        door,
        place,
        then,
        fast=place == "on_train_batch_end" and door in ("fit", "RecordReceipts"),
        pair=(j + k) % len(INTERRUPTED) == i,
    )
    for j, door in enumerate(DOORS)
    for i, place in enumerate(INTERRUPTED)
    for k, then in enumerate(THEN)
]


@pytest.mark.parametrize("cells", [CELLS, INTERRUPTIONS], ids=["changes", "interruptions"])
def test_each_pair_of_values_is_in_a_cell_that_every_run_has(cells):
    in_every_run = [each.values for each in cells if pytest.mark.exhaustive not in each.marks]
    for first, second in itertools.combinations(range(3), 2):
        axes = ({each.values[axis] for each in cells} for axis in (first, second))
        pairs = {(values[first], values[second]) for values in in_every_run}
        assert pairs == set(itertools.product(*axes))


@pytest.mark.parametrize(("door", "place", "then"), INTERRUPTIONS)
def test_an_interrupted_training_covers_its_own_steps_alone(door, place, then, others, tmp_path):
    model = interrupted(door, place)
    path, own = tmp_path / "model.keras", DOORS[door][2]
    THEN[then](model, others)
    model.save(path)
    for artefact in (model, path, keras.Model(model.inputs, model.layers[-1].output)):
        if then == "nothing":
            assert 0.0 < stated(artefact) <= own * (1 + 1e-9)
        else:
            assert stated(artefact) >= (OTHER if then == "set" else math.inf)


@pytest.mark.parametrize("door", ["fit", "RecordReceipts", "RecordReceipts first"])
def test_steps_of_an_execution_that_was_not_taken_are_not_covered(door):
    model = interrupted(door, "on_train_batch_begin", steps_per_execution=10, run_eagerly=False)
    taken = int(model.optimizer.iterations)
    compiled(model)
    for _ in range(10):
        model.train_on_batch(X, ONE_HOT)
    assert int(model.optimizer.iterations) == 10 and taken == 3
    assert math.isinf(stated(model))


def test_one_step_in_the_place_of_an_interrupted_one_is_not_covered():
    model = interrupted("RecordReceipts first", "on_train_batch_begin")
    model.train_on_batch(X, ONE_HOT)
    assert math.isinf(stated(model))


def test_a_file_from_another_process_brings_its_receipts(tmp_path, forget):
    make, train, _ = DOORS["LabelDPModel"]
    other, path = make(), tmp_path / "other.weights.h5"
    train(other)
    other.save_weights(path)
    forget()
    model = make()
    train(model, Between("on_epoch_begin", lambda model: model.load_weights(path)))
    assert 1.2 * stated(other) < stated(model) < math.inf
