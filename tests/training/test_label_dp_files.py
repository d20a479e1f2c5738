"""Receipts of a ``LabelDPModel`` travel with its weights: files, checkpoints, copies, processes."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from label_dp_cases import (
    LOSS,
    D,
    K,
    after,
    batches,
    network,
    optimizer,
    private_model,
    unchanged,
    vault,
    watch,
)

import tf_labeldp as ldp
from tf_labeldp.accounting import ReceiptError, Receipts, public_input
from tf_labeldp.training import LabelDPModel


def trained(epochs: int = 2, labels: Any = None) -> LabelDPModel:
    model = private_model()
    model.fit(batches(vault() if labels is None else labels), epochs=epochs, verbose=0)
    return model


# tf.train.Checkpoint.

FORMS = {
    "root": lambda model: tf.train.Checkpoint(model),
    "optimizer first": lambda model: tf.train.Checkpoint(an=model.optimizer, model=model),
}


@pytest.mark.parametrize("form", FORMS)
def test_checkpoints_bring_the_receipts_and_count_from_there(
    tmp_path: Path, form: str, forget: Any
) -> None:
    model = trained()
    path = FORMS[form](model).save(str(tmp_path / "one"))
    forget()
    again = private_model()
    FORMS[form](again).restore(path).assert_existing_objects_matched()
    assert again.guarantee() == model.guarantee()
    assert again.guarantee().epsilon == after(2)
    assert unchanged(again, model.get_weights())
    assert int(again.optimizer.iterations) == 6
    labels = vault()
    again.fit(batches(labels), verbose=0)
    assert again.guarantee().epsilon == labels.guarantee().epsilon == after(3)


def test_going_back_to_a_checkpoint_gives_nothing_back(tmp_path: Path) -> None:
    model, labels = private_model(), vault()
    checkpoint = tf.train.Checkpoint(model=model)
    model.fit(batches(labels), verbose=0)
    path = checkpoint.save(str(tmp_path / "one"))
    model.fit(batches(labels), epochs=2, verbose=0)
    checkpoint.restore(path)
    assert model.guarantee().epsilon == labels.guarantee().epsilon == after(3)
    # And what another model has spent comes on top.
    other = private_model()
    other.fit(batches(vault()), verbose=0)
    tf.train.Checkpoint(model=other).restore(path)
    assert other.guarantee().epsilon == after(2)


# Other ways.


@pytest.mark.slow
def test_a_new_process_reads_the_receipts_first_of_all(tmp_path: Path) -> None:
    """Before it has made any model: Keras makes a functional one of the file."""
    model = trained()
    model.save(tmp_path / "model.keras")
    run = (
        "import sys, keras, tf_labeldp as ldp; ldp.LabelDPModel\n"
        "model = keras.models.load_model(sys.argv[1])\n"
        "plain = keras.models.load_model(sys.argv[1], compile=False)\n"
        "print('RESULT', type(model).__name__, model.guarantee().epsilon,\n"
        "      type(plain).__name__, ldp.guarantee(plain).epsilon)"
    )
    result = subprocess.run(
        [sys.executable, "-c", run, str(tmp_path / "model.keras")],
        capture_output=True,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    stated = str(after(2))
    assert result.stdout.split("RESULT")[1].split() == ["LabelDPModel", stated] * 2


def test_copies_of_a_model_have_its_receipts(forget: Any) -> None:
    model = trained()
    forget()
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert again.guarantee() == model.guarantee()
        assert unchanged(again, model.get_weights())


def test_weights_that_are_copied_bring_their_receipts_and_new_ones_have_none() -> None:
    model = trained()
    clone = keras.models.clone_model(model)
    plain = keras.Sequential([keras.Input((D,)), keras.layers.Dense(K)])
    for other in (clone, plain):
        assert ldp.guarantee(other).headline == "no record of any label"
        other.set_weights(model.get_weights())
        assert ldp.guarantee(other).epsilon == after(2)
    # What they had before the training is nobody's: all fresh models of this seed have it.
    assert private_model().guarantee().headline == "no record of any label"


def test_receipts_that_were_edited_are_refused(tmp_path: Path) -> None:
    model = trained()
    store: dict[str, Any] = {}
    model.save_own_variables(store)
    [name] = [name for name in store if "receipts" in name]
    content = np.array(store[name])
    content[content.size // 2] ^= 1
    with pytest.raises(ReceiptError, match="damaged"):
        private_model().load_own_variables({**store, name: content})


def test_a_file_with_receipts_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.weights.h5"
    trained().save_weights(path)
    with h5py.File(path, "r+") as file:
        places: list[str] = []
        file.visit(lambda place: places.append(place) if "receipts" in place else None)
        [place] = places
        content = json.loads(zlib.decompress(file[place][()].tobytes()))
        content |= {"format": content["format"] + 1, "version": "9.9"}
        del file[place]
        newer = zlib.compress(json.dumps(content).encode(), 9)
        file[place] = np.frombuffer(newer, np.uint8)
    with pytest.raises(ValueError, match=r"by a newer version of tf-labeldp \(9\.9\)"):
        private_model().load_weights(path)


# Layers of a model from a file.


def two_layers(trainable: bool) -> LabelDPModel:
    hidden = keras.layers.Dense(5, "tanh", name="hidden")
    model = network(hidden)
    model.compile(optimizer(), loss=LOSS)
    model.fit(batches(vault()), epochs=2, verbose=0)
    hidden.trainable = trainable
    model.compile(optimizer(), loss=LOSS)
    return model


def loaded(tmp_path: Path, forget: Any, trainable: bool = True) -> tuple[LabelDPModel, keras.Model]:
    """A model from a file, and the encoder of its first layer."""
    two_layers(trainable).save(tmp_path / "model.keras")
    forget()
    model = keras.models.load_model(tmp_path / "model.keras")
    return model, keras.Model(model.input, model.get_layer("hidden").output)


@pytest.mark.parametrize("trainable", [True, False])
def test_an_encoder_of_a_loaded_model_has_its_receipts(
    tmp_path: Path, forget: Any, trainable: bool
) -> None:
    model, encoder = loaded(tmp_path, forget, trainable)
    assert model.guarantee().epsilon == after(2)
    assert ldp.guarantee(encoder).epsilon == after(2)


def test_weights_that_are_copied_from_a_loaded_model_bring_its_receipts(
    tmp_path: Path, forget: Any
) -> None:
    """Where this library loaded it; else that they were set by hand is a named assumption."""
    model, _ = loaded(tmp_path, forget)
    copied = keras.Sequential([keras.Input((D,)), keras.layers.Dense(5)])
    copied.set_weights(model.get_layer("hidden").get_weights())
    assert "initial-weights" in {line.code for line in ldp.guarantee(copied).assumptions}
    model = ldp.load_model(tmp_path / "model.keras")
    copied.set_weights(model.get_layer("hidden").get_weights())
    assert ldp.guarantee(copied).epsilon == after(2)


# Callbacks.


def test_early_stopping_states_all_epochs_and_the_best_file_its_own(
    tmp_path: Path, forget: Any
) -> None:
    model, labels, path = private_model(), vault(), tmp_path / "best.keras"
    kept: dict[int, Any] = {}
    callbacks = [
        # Worse after each epoch: the best one is the first.
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(worse=epoch)),
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, _: kept.update({epoch: model.get_weights()})
        ),
        keras.callbacks.EarlyStopping("worse", mode="min", patience=2, restore_best_weights=True),
        keras.callbacks.ModelCheckpoint(path, monitor="worse", mode="min", save_best_only=True),
    ]
    model.fit(batches(labels), epochs=9, callbacks=callbacks, verbose=0)
    assert len(kept) == 3
    assert unchanged(model, kept[0])
    # Which epoch is the best one was found out by looking at all of them.
    assert model.guarantee().epsilon == labels.guarantee().epsilon == after(3)
    forget()
    best = keras.models.load_model(path)
    assert unchanged(best, kept[0])
    assert best.guarantee().epsilon == after(1)


def test_a_checkpoint_that_a_callback_restores_counts_against_the_budget(
    tmp_path: Path, forget: Any
) -> None:
    path = tf.train.Checkpoint(model=trained(epochs=3)).save(str(tmp_path / "one"))
    forget()
    model, labels = private_model(), vault()
    checkpoint = tf.train.Checkpoint(model=model)
    restore = watch(on_train_begin=lambda: checkpoint.restore(path))
    model.fit(batches(labels), callbacks=[restore], verbose=0)
    assert model.guarantee().epsilon == after(4)
    assert labels.guarantee().epsilon == after(4)
    assert Receipts(public_input(model).receipts).guarantee().epsilon == after(4)
