"""A run that is killed and started again draws no label twice and ends where it would have.

This file is also the program that is killed: ``python test_resume.py FOLDER KILL...`` ends one
process for each KILL, forked before TensorFlow has begun to compute.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tf_labeldp as ldp


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, kill: str = "never", store: bool = True) -> dict[str, Any]:
    """Trains two stages of three epochs; the process ends at ``kill``."""
    rng = np.random.default_rng(0)
    y = np.arange(240) % 4
    x = (np.eye(4)[y] + 0.3 * rng.normal(size=(240, 4))).astype("float32")
    keras.utils.set_random_seed(1)
    layers = [keras.Input((4,)), keras.layers.Dense(8, "relu")]
    layers += [keras.layers.BatchNormalization(), keras.layers.Dense(4)]
    model = keras.Sequential(layers)
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss)
    # Secure random bits: only the store can make the second run see the first one's draws.
    budget = ldp.PrivacyBudget(epsilon=2.0)
    labels = ldp.PrivateLabels(y, 4, budget=budget, store=folder / "store" if store else None)
    stages = ldp.MultiStageTraining(
        x,
        labels,
        epsilon=2.0,
        fractions=(0.5, 0.5),
        epochs_per_stage=3,
        batch_size=32,
        temperature=1.0,
        filter_labels=True,
        verbose=0,
    )
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if kill == f"epoch-{epoch}":
                die()

        def on_epoch_end(self, epoch, logs=None):
            seen.append(epoch)

    if kill == "draw-2":  # after the draw is on disk, before anyone sees it
        # A kill between two writes needs the store itself.
        original, drawn = type(labels._store).append, []

        def append(store, record):
            records = original(store, record)
            drawn.append(record.key)
            if len(set(drawn) - {None}) == 2:
                die()
            return records

        type(labels._store).append = append

    backup = keras.callbacks.BackupAndRestore(str(folder / "backup"))
    callbacks = [stages, backup, Watch()]
    data = stages.dataset()
    model.fit(data, epochs=stages.epochs, verbose=0, shuffle=False, callbacks=callbacks)
    return {
        "epsilon": labels.guarantee().epsilon,
        "stated": [stages.guarantee().epsilon, stages.noisy_labels().guarantee().epsilon],
        "noisy": stages.noisy_labels().values.tolist(),
        "report": vars(stages.reports[-1]),
        "epochs": seen,
        "weights": model.get_weights(),
    }


NO_STORE = "epoch-1"


def run_and_kill(folder: Path, kills: list[str]) -> None:
    """Trains in a process, and a folder, for each of ``kills``; all have to be killed."""
    for kill in kills:
        (folder / kill).mkdir()
        settings = {"folder": folder / kill, "kill": kill, "store": kill != NO_STORE}
        child = multiprocessing.get_context("fork").Process(target=train, kwargs=settings)
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL, kill


def killed(folder: Path, *kills: str) -> Path:
    result = subprocess.run(
        [sys.executable, __file__, str(folder), *kills],
        capture_output=True,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return folder


@pytest.fixture(scope="session")
def killed_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs that were killed."""
    return killed(tmp_path_factory.mktemp("killed"), "epoch-4", "draw-2", "epoch-3", NO_STORE)


def draws(folder: Path) -> dict[str, bytes]:
    records = {path.name: path.read_bytes() for path in (folder / "store" / "records").iterdir()}
    return {name: content for name, content in records.items() if b'"values"' in content}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kill", "epochs"),
    [
        ("epoch-4", [4, 5]),  # inside stage 2
        ("draw-2", [3, 4, 5]),  # the draw of stage 2 is on disk, nobody has seen it
        ("epoch-3", [3, 4, 5]),  # stage 2 has just begun
    ],
)
def test_killed_in_stage_two_and_started_again(tmp_path, killed_runs, kill, epochs):
    folder = killed_runs / kill
    stored = draws(folder)
    assert len(stored) == 2
    again = train(folder)
    assert draws(folder) == stored  # nothing was drawn again
    assert again["epsilon"] == 2.0
    assert again["stated"] == [2.0, 2.0]
    assert again["epochs"] == epochs
    assert again["report"]["num_new"] == 120
    # A run that is never killed, on the same draws, trains on the same and ends in the same model.
    shutil.copytree(folder / "store", tmp_path / "whole" / "store")
    ldp.vault.confirm_move(tmp_path / "whole" / "store")
    whole = train(tmp_path / "whole")
    assert (whole["noisy"], whole["report"]) == (again["noisy"], again["report"])
    for got, expected in zip(again["weights"], whole["weights"], strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.slow
def test_killed_in_stage_one_without_a_store(killed_runs):
    """The second run would draw the labels of stage 1 again, and spend twice the stated epsilon."""
    with pytest.raises(RuntimeError, match="would be drawn, and charged, a second time"):
        train(killed_runs / NO_STORE, store=False)


if __name__ == "__main__":
    run_and_kill(Path(sys.argv[1]), sys.argv[2:])
