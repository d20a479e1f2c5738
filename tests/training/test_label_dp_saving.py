"""Saving and resuming: the restored state, the charges, and no label in any file."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import keras
import label_dp_cases as cases
import numpy as np
import pytest
from label_dp_cases import (
    DELTA,
    D,
    K,
    N,
    after,
    batches,
    codes,
    features,
    network,
    optimizer,
    vault,
    watch,
)

import tf_labeldp as ldp
from tf_labeldp.training import AltConv, LabelDPModel
from tf_labeldp.vault import Numbers

ROOT = Path(__file__).parents[2]


def private_model(inner: Any = None, **settings: Any) -> LabelDPModel:
    return cases.private_model(inner=inner or keras.optimizers.SGD(0.5, momentum=0.9), **settings)


def files_of_every_kind(folder: Path) -> dict[str, str]:
    """Saves a model of every kind in the folder; returns the classes of the loaded models."""
    y = codes()
    noisy = vault().randomize(ldp.RandomizedResponse(2.0, K))
    plain = keras.Sequential([keras.Input((D,)), keras.layers.Dense(K)])
    plain.compile("sgd", ldp.keras_layers.LabelWeightedLoss(from_logits=True))
    ldp.fit(plain, features(), noisy, targets="debiased", verbose=0)
    table = {"size": features()[:, 0], "kind": np.where(features()[:, 1] > 0, "a", "b")}
    table_map = ldp.features.RandomFourierFeatures(6).fit(table)
    trees = ldp.PrivateBoosting(4.0, num_classes=K, max_trees=2).fit(features(), y)
    encoder = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten()])
    models = {
        "private": private_model(denoiser=AltConv(8)),
        "whitened": private_model(preconditioner="gauss_newton"),
        "fit": plain,
        "head": ldp.PrivateLogisticRegression(1.0, 1e-5, num_classes=K).fit(features(), y),
        "table": table_map,
        "trees": trees,
        "learner": ldp.self_supervised.SimCLR(encoder),
    }
    kinds = {}
    for name, model in models.items():
        model = model.to_keras() if hasattr(model, "to_keras") else model
        model.save(folder / f"{name}.keras")
        kinds[name] = type(model).__name__
    return kinds


LOADED = """
import json, pathlib, sys
{imports}
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.keras")):
    print(json.dumps([path.stem, type({load}(path)).__name__]))
"""


@pytest.mark.slow
def test_files_of_every_kind_are_loaded_as_the_readme_says(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert (
        "Load the file with `ldp.load_model`. Before `keras.models.load_model`, import "
        "`tf_labeldp.keras_layers`." in readme
    )
    kinds = files_of_every_kind(tmp_path)
    for imports, load in (
        ("import tf_labeldp as ldp", "ldp.load_model"),
        ("import keras, tf_labeldp.keras_layers", "keras.models.load_model"),
    ):
        command = [sys.executable, "-c", LOADED.format(imports=imports, load=load), str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
        assert dict(map(json.loads, lines)) == kinds


@pytest.mark.slow
def test_the_error_of_a_file_that_is_loaded_without_us_names_the_import(tmp_path: Path) -> None:
    private_model().save(tmp_path / "private.keras")
    feature_map = ldp.features.RandomFourierFeatures(6).fit(features())
    feature_map.to_keras().save(tmp_path / "map.keras")
    code = """
import keras, sys
for path in sys.argv[1:]:
    try:
        keras.models.load_model(path)
    except TypeError as error:
        assert "import tf_labeldp.keras_layers, or use tf_labeldp.load_model" in str(error), error
    else:
        # Keras up to 3.8 imports the module that the file names.
        assert tuple(map(int, keras.__version__.split(".")[:2])) < (3, 9)
"""
    paths = [str(tmp_path / name) for name in ("private.keras", "map.keras")]
    command = [sys.executable, "-c", code, *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_class_of_another_part_is_imported_on_use() -> None:
    in_files = importlib.import_module("tf_labeldp.keras_layers._in_files")
    importlib.import_module("tf_labeldp.tf_privacy")
    for part in ("self_supervised", "semi_supervised", "training"):
        importlib.import_module(f"tf_labeldp.{part}")
    found = {
        (name.removeprefix("tf_labeldp>"), kind.__module__.split(".")[1])
        for name, kind in keras.saving.get_custom_objects().items()
        if name.startswith("tf_labeldp>")
    }
    expected = {(n, part) for part, names in in_files.OF_OTHER_PARTS.items() for n in names}
    assert {pair for pair in found if pair[1] != "keras_layers"} == expected


def same_state(first: LabelDPModel, second: LabelDPModel) -> bool:
    pairs = zip(
        [*first.variables, *first.optimizer.variables],
        [*second.variables, *second.optimizer.variables],
        strict=True,
    )
    return all(np.array_equal(np.array(a), np.array(b)) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("denoiser", [None, AltConv(8, smoothing=0.5, max_products=6)])
def test_keras_files_bring_back_weights_optimizer_and_history(
    tmp_path: Path, denoiser: Any
) -> None:
    model = private_model(
        keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.9)),
        denoiser=denoiser,
    )
    model.fit(batches(codes()), epochs=2, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert type(again) is LabelDPModel
    assert same_state(model, again)
    assert again.optimizer.get_config() == model.optimizer.get_config()
    assert again.guarantee(DELTA) == model.guarantee(DELTA)
    assert again.guarantee(DELTA).epsilon == after(2)
    again.fit(batches(codes()), verbose=0)  # training continues, and counts from there
    assert again.guarantee(DELTA).epsilon == after(3)


@pytest.mark.slow
def test_a_loaded_model_states_its_steps_without_its_vault(tmp_path: Path) -> None:
    model, labels = private_model(), vault()
    model.fit(batches(labels), verbose=0)
    model.save(tmp_path / "model.keras")
    twice = after(2)
    again = keras.models.load_model(tmp_path / "model.keras")
    assert again.guarantee() == model.guarantee() == ldp.guarantee(again)
    assert again.guarantee().epsilon == after(1)
    # With the same vault again, its charges are counted once.
    again.fit(batches(labels), verbose=0)
    assert again.guarantee().epsilon == labels.guarantee().epsilon == twice
    # A vault that lacks them counts them: it may hold the same labels.
    other = keras.models.load_model(tmp_path / "model.keras")
    fresh = vault()
    other.fit(batches(fresh), verbose=0)
    assert other.guarantee().epsilon == fresh.guarantee().epsilon == twice
    # Unless it is declared to hold those of other people; those of the model are of anyone.
    named = vault(people="north")
    keras.models.load_model(tmp_path / "model.keras").fit(batches(named), verbose=0)
    assert named.guarantee().epsilon == twice


def test_labels_of_other_people_are_not_counted_by_a_vault(tmp_path: Path) -> None:
    model = private_model()
    model.fit(batches(vault(people="south")), epochs=2, verbose=0)
    model.save(tmp_path / "model.keras")
    again, labels = keras.models.load_model(tmp_path / "model.keras"), vault(people="north")
    again.fit(batches(labels), verbose=0)
    assert labels.guarantee().epsilon == after(1)
    # Each population is protected by what was spent on it, and the statement is of the worst.
    assert again.guarantee().epsilon == after(2)


class Killed(Exception):
    """Stands for the end of a process."""


def killing(in_epoch: int) -> keras.callbacks.Callback:
    """Ends training in the middle of an epoch (from 0)."""
    begun: list[None] = []

    def kill() -> None:
        if len(begun) == in_epoch + 1:
            raise Killed

    return watch(on_epoch_begin=lambda: begun.append(None), on_train_batch_end=kill)


def backup(tmp_path: Path) -> keras.callbacks.Callback:
    return keras.callbacks.BackupAndRestore(tmp_path / "backup")


@pytest.mark.parametrize("with_vault", [True, False])
def test_a_killed_run_goes_on_and_every_epoch_has_been_charged(
    tmp_path: Path, with_vault: bool
) -> None:
    def labels() -> Any:
        return vault(store=tmp_path / "store") if with_vault else codes()

    first = private_model()
    with pytest.raises(Killed):
        callbacks = [backup(tmp_path), killing(2)]
        first.fit(batches(labels()), epochs=4, verbose=0, callbacks=callbacks)
    second, stored = private_model(), labels()  # as a new process would
    begun: list[int] = []
    count = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, _: begun.append(epoch))
    second.fit(batches(stored), epochs=4, verbose=0, callbacks=[backup(tmp_path), count])
    assert begun == [2, 3]
    assert int(second.optimizer.iterations) == 4 * 3
    assert second.guarantee(DELTA).epsilon == after(4)
    if with_vault:
        # Two epochs before, the interrupted one, and two after.
        assert stored.guarantee().epsilon == after(5)
        assert second.guarantee() == second.guarantee(DELTA)
    second.fit(batches(labels()), epochs=1, verbose=0)  # restored epochs are not skipped again
    assert int(second.optimizer.iterations) == 5 * 3


def test_budgets_are_checked_for_the_epochs_that_are_left(tmp_path: Path) -> None:
    def fit(*callbacks: Any) -> float:
        # The epoch that was killed and is repeated is a plan of its own: with it, the budget is
        # enough for the epochs that are left, and not for two more.
        labels = vault(epsilon=1.2 * after(5), store=tmp_path / "store")
        callbacks = (backup(tmp_path), *callbacks)
        private_model().fit(batches(labels), epochs=4, verbose=0, callbacks=callbacks)
        return labels.guarantee().epsilon

    with pytest.raises(Killed):
        fit(killing(2))
    assert fit() == pytest.approx(after(5))


def test_no_label_is_in_any_file(tmp_path: Path) -> None:
    """Labels are random numbers, of which no two follow each other anywhere else."""
    rng = np.random.default_rng(5)
    numbers = rng.uniform(1e3, 2e3, N).astype(np.float32)
    model = network(units=1)
    model.compile(optimizer(inner=keras.optimizers.Adam(0.1)), loss="mse")
    labels = ldp.PrivateLabels(numbers, Numbers(0.0, 4e3), budget=ldp.PrivacyBudget(20.0, DELTA))
    callbacks = [
        keras.callbacks.ModelCheckpoint(tmp_path / "model-{epoch}.keras"),
        keras.callbacks.ModelCheckpoint(tmp_path / "w.weights.h5", save_weights_only=True),
        keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
    ]
    model.fit(batches(labels), epochs=2, verbose=0, callbacks=callbacks)
    model.fit(features(), numbers, epochs=1, verbose=0, callbacks=callbacks[1:2])
    model.save(tmp_path / "end.keras")
    contents = []
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        contents.append(path.read_bytes())
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                contents += [archive.read(name) for name in archive.namelist()]
    assert len(contents) > 8
    for dtype in ("float32", "float64"):
        pairs = [numbers[i : i + 2].astype(dtype).tobytes() for i in range(N - 1)]
        assert not any(pair in text for text in contents for pair in pairs)
    assert not any(str(number)[:7].encode() in text for text in contents for number in numbers)


def test_a_file_that_is_saved_after_hdf5_is_loaded(tmp_path: Path) -> None:
    model = private_model()
    model.fit(batches(codes()), verbose=0)
    model.save(tmp_path / "model.h5")
    model.save(tmp_path / "model.keras")
    again = ldp.load_model(tmp_path / "model.keras")
    assert again.guarantee(DELTA) == model.guarantee(DELTA)
    assert again.optimizer.get_config() == model.optimizer.get_config()
    again.fit(batches(codes()), verbose=0)
    assert again.guarantee(DELTA).epsilon == after(2)
