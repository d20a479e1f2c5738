"""A run that is killed and started again draws no label twice and ends where it would have."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest

RUN = textwrap.dedent(
    """
    import json, os, sys
    import keras, numpy as np
    import tf_labeldp as ldp

    folder, kill, store = sys.argv[1], sys.argv[2], sys.argv[3] == "store"
    rng = np.random.default_rng(0)
    y = np.arange(240) % 4
    x = (np.eye(4)[y] + 0.3 * rng.normal(size=(240, 4))).astype("float32")
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"),
                              keras.layers.BatchNormalization(), keras.layers.Dense(4)])
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss)
    # Secure random bits: only the store can make the second run see the first one's draws.
    budget = ldp.PrivacyBudget(epsilon=2.0)
    labels = ldp.PrivateLabels(y, 4, budget=budget, store=folder + "/store" if store else None)
    stages = ldp.MultiStageTraining(x, labels, epsilon=2.0, fractions=(0.5, 0.5),
                                    epochs_per_stage=3, batch_size=32, verbose=0)

    class Kill(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if kill == f"epoch-{epoch}":
                os._exit(9)

    if kill == "draw-2":  # after the draw is on disk, before anyone sees it
        original = type(labels._store).append
        def append(store, record):
            original(store, record)
            if record.number == 1:
                os._exit(9)
        type(labels._store).append = append

    seen = []
    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(epoch)

    backup = keras.callbacks.BackupAndRestore(folder + "/backup")
    model.fit(stages.dataset(), epochs=stages.epochs, verbose=0, shuffle=False,
              callbacks=[stages, backup, Kill(), Watch()])
    print("RESULT" + json.dumps({
        "epsilon": labels.guarantee().epsilon,
        "stated": [stages.guarantee().epsilon, stages.noisy_labels().guarantee().epsilon],
        "noisy": [int(v) for v in stages.noisy_labels().values],
        "report": vars(stages.reports[-1]),
        "epochs": seen,
        "weights": [w.tolist() for w in model.get_weights()],
    }))
    """
)


def run(folder, kill="never", store=True, fails=None):
    result = subprocess.run(
        [sys.executable, "-c", RUN, str(folder), kill, "store" if store else "none"],
        capture_output=True,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        timeout=300,
    )
    if fails is not None:
        assert result.returncode == 1
        assert fails in result.stderr
        return None
    if kill != "never":
        assert result.returncode == 9, result.stderr[-2000:]
        return None
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.split("RESULT")[1])


def draws(folder):
    return {path.name: path.read_bytes() for path in (folder / "store" / "draws").iterdir()}


@pytest.mark.parametrize(
    ("kill", "epochs"),
    [
        ("epoch-4", [4, 5]),  # inside stage 2
        ("draw-2", [3, 4, 5]),  # the draw of stage 2 is on disk, nobody has seen it
        pytest.param("epoch-3", [3, 4, 5], marks=pytest.mark.slow),  # stage 2 has just begun
    ],
)
def test_killed_in_stage_two_and_started_again(tmp_path, kill, epochs):
    run(tmp_path, kill)
    stored = draws(tmp_path)
    assert len(stored) == 2
    again = run(tmp_path)
    assert draws(tmp_path) == stored  # nothing was drawn again
    assert again["epsilon"] == 2.0
    assert again["stated"] == [2.0, 2.0]
    assert again["epochs"] == epochs
    assert again["report"]["num_new"] == 120
    # A run that is never killed, on the same draws, trains on the same and ends in the same model.
    shutil.copytree(tmp_path / "store", tmp_path / "whole" / "store")
    whole = run(tmp_path / "whole")
    assert (whole["noisy"], whole["report"]) == (again["noisy"], again["report"])
    for got, expected in zip(again["weights"], whole["weights"], strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4)


def test_killed_in_stage_one_without_a_store(tmp_path):
    """The second run would draw the labels of stage 1 again, and so spend twice what it says."""
    run(tmp_path, "epoch-1", store=False)
    run(tmp_path, store=False, fails="would be drawn, and spent, a second time")
