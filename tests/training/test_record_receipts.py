"""Plain Keras training on noisy labels: `ldp.fit` and `RecordReceipts` give models the receipts."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_labeldp as ldp
from tf_labeldp.accounting import PublicInput, ReceiptError, Receipts, public_input
from tf_labeldp.keras_layers import LabelWeightedLoss

N, D, K, DELTA = 60, 4, 3, 1e-3
RNG = np.random.default_rng(7)
X = RNG.normal(size=(N, D)).astype(np.float32)
Y = RNG.integers(0, K, N)
ROWS = keras.losses.CategoricalCrossentropy(from_logits=True)
CODES = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
BY_HAND = "labels-of-this-draw"


def vault(**arguments: Any) -> ldp.PrivateLabels:
    return ldp.PrivateLabels(Y, K, budget=ldp.PrivacyBudget(30.0, DELTA), **arguments)


def drawn(epsilon: float = 2.0, labels: Any = None, **arguments: Any) -> ldp.NoisyLabels:
    labels = vault() if labels is None else labels
    return labels.randomize(ldp.RandomizedResponse(epsilon, K), **arguments)


def plain(loss: Any = ROWS, optimizer: Any = "sgd", **settings: Any) -> keras.Model:
    layers = [keras.Input((D,)), keras.layers.Dense(5, "relu"), keras.layers.Dense(K)]
    model = keras.Sequential(layers)
    model.compile(optimizer, loss, **settings)
    return model


def stated(artefact: Any) -> float:
    return ldp.guarantee(artefact).epsilon


def codes(artefact: Any) -> set[str]:
    return {line.code for line in ldp.guarantee(artefact).assumptions}


def has_no_record(artefact: Any) -> bool:
    return ldp.guarantee(artefact).headline == "no record of any label"


def promises_nothing(artefact: Any) -> bool:
    """Whether the statement promises nothing, and names the two remedies."""
    text = str(ldp.guarantee(artefact))
    mends = "tf_labeldp.fit(model, x, noisy)" in text and "RecordReceipts(noisy)" in text
    return math.isinf(stated(artefact)) and mends and "declare(model" in text


# --- Statements ----------------------------------------------------------------------------------


@pytest.mark.holds("training.fit", "vault.guarantee")
@pytest.mark.parametrize(
    ("targets", "loss"),
    [("posterior", ROWS), ("values", CODES), ("debiased", LabelWeightedLoss(from_logits=True))],
)
def test_a_fit_states_what_its_noisy_labels_cost(targets: str, loss: Any) -> None:
    labels = vault()
    noisy, model = drawn(labels=labels), plain(loss)
    before = model.get_weights()
    history = ldp.fit(model, X, noisy, targets=targets, epochs=2, verbose=0)
    assert len(history.history["loss"]) == 2 and np.isfinite(history.history["loss"]).all()
    assert any(np.any(old != new) for old, new in zip(before, model.get_weights(), strict=True))
    assert stated(model) == noisy.guarantee().epsilon == labels.guarantee().epsilon == 2.0
    assert BY_HAND not in codes(model) and "initial-weights" in codes(model)
    # Layers carry the receipts into other models.
    encoder = keras.Model(model.inputs, model.layers[0].output)
    assert stated(encoder) == 2.0


def test_the_targets_are_those_of_the_draw_in_its_order() -> None:
    """A table of a row for each example, after one whole step, has the target of that row."""
    labels, place = vault(), np.eye(N, dtype=np.float32)
    for targets in ("posterior", "values", "debiased"):
        noisy = drawn(labels=labels, indices=np.arange(0, N, 3)[::-1])
        expected = {
            "posterior": noisy.posterior(),
            "values": noisy.values[:, np.newaxis],
            "debiased": noisy.debiased(),
        }[targets]
        for x in (place, place[noisy.indices]):
            outputs = expected.shape[1]
            table = keras.layers.Dense(outputs, use_bias=False)
            model = keras.Sequential([keras.Input((N,)), table])
            model.compile(keras.optimizers.SGD(len(noisy) * outputs / 2.0), "mse")
            ldp.fit(model, x, noisy, targets=targets, batch_size=len(noisy), verbose=0)
            found = model.predict(place[noisy.indices], verbose=0)
            np.testing.assert_allclose(found, expected, atol=1e-4)


def test_receipts_of_the_model_and_of_x_are_added() -> None:
    """Another draw in x, and DP-SGD before."""
    labels = vault()
    private = ldp.LabelDPModel.from_model(plain())
    private.compile(ldp.LabelDPOptimizer("sgd", 1.0, 4.0), loss=CODES)
    batches = ldp.data.poisson_batches(X, labels, sampling_probability=0.1, steps=2)
    private.fit(batches, verbose=0)
    steps = public_input(private).receipts
    model = keras.Sequential([keras.Input((D,)), *private.layers[-2:]])
    model.compile("sgd", ROWS)
    first, second = drawn(1.0, labels), drawn(2.0, labels)
    ldp.fit(model, PublicInput(X, first.receipts), second, verbose=0)
    together = Receipts.merged(steps, first.receipts, second.receipts).guarantee()
    assert stated(model) == together.epsilon == labels.guarantee().epsilon > 3.0
    found = {receipt.id for receipt in public_input(model).receipts}
    assert found == {receipt.id for receipt in (*steps, *first.receipts, *second.receipts)}


def test_a_draw_counts_once_however_often_it_is_used() -> None:
    noisy, model = drawn(), plain()
    for _ in range(3):
        ldp.fit(model, X, noisy, verbose=0)
    assert stated(model) == 2.0
    ldp.fit(model, X, drawn(1.0), verbose=0)  # of another vault, maybe of the same people
    assert stated(model) == 3.0


def test_sample_weights_follow_their_rows() -> None:
    """Rows without a weight teach nothing, also where the draw is of a few."""
    weights = np.zeros(N, np.float32)
    weights[::2] = 1.0
    for indices in (np.arange(N), np.arange(1, N, 2), np.arange(0, N, 2)):
        model, noisy = plain(), drawn(indices=indices)
        before = model.get_weights()
        ldp.fit(model, X, noisy, sample_weight=weights, verbose=0)
        pairs = zip(before, model.get_weights(), strict=True)
        assert any(np.any(old != new) for old, new in pairs) == bool(weights[indices].any())
        assert stated(model) == 2.0
    with pytest.raises(ValueError, match="a row for each"):
        ldp.fit(plain(), X, drawn(), sample_weight=weights[:-1], verbose=0)


def test_averages_of_an_optimizer_are_known(tmp_path: Path) -> None:
    """The averages of `use_ema` become the weights when the training ends."""
    noisy = drawn()
    average = keras.optimizers.SGD(0.5, use_ema=True, ema_overwrite_frequency=None)
    model = plain(optimizer=average)
    ldp.fit(model, X, noisy, epochs=2, verbose=0)
    assert stated(model) == 2.0
    model.save(tmp_path / "model.keras")
    assert stated(ldp.load_model(tmp_path / "model.keras")) == 2.0
    copy = plain()
    copy.set_weights(model.get_weights())
    assert stated(copy) == 2.0


def test_a_declaration_needs_a_reason() -> None:
    """Without one the statement would be finite, and rest on nothing."""
    for because in (" ", None):
        with pytest.raises(TypeError, match="because must give the reason"):
            ldp.declare(keras.Sequential(), because=because)


def test_plain_training_afterwards_promises_nothing() -> None:
    for how in ("fit", "train_on_batch", "recompiled", "loaded"):
        model = plain()
        ldp.fit(model, X, drawn(), verbose=0)
        assert stated(model) == 2.0
        if how == "recompiled":
            model.compile("sgd", ROWS)
        if how == "train_on_batch":
            model.train_on_batch(X, np.eye(K)[Y])
        else:
            model.fit(X, np.eye(K)[Y], verbose=0)
        assert promises_nothing(model)
        # Receipts of a later fit do not cover what was before.
        ldp.fit(model, X, drawn(), verbose=0)
        assert promises_nothing(model)
        noisy = drawn()
        model.fit(X, noisy.posterior(), callbacks=[ldp.RecordReceipts(noisy)], verbose=0)
        assert promises_nothing(model)
        ldp.declare(model, because="the labels of this test are public")
        assert stated(model) == 6.0  # of three vaults


# --- The callback --------------------------------------------------------------------------------


DATA = {
    "shuffled": lambda data: data.shuffle(N, seed=0).batch(20),
    "repeated": lambda data: data.repeat(2).batch(30),
}


@pytest.mark.holds("training.RecordReceipts")
@pytest.mark.parametrize("how", DATA)
def test_the_callback_assumes_that_the_labels_are_of_the_draw(how: str) -> None:
    noisy, model = drawn(), plain()
    data = DATA[how](noisy.to_dataset(X, "posterior"))
    model.fit(data, epochs=2, callbacks=[ldp.RecordReceipts(noisy)], verbose=0)
    assert stated(model) == 2.0 and BY_HAND in codes(model)
    [assumption] = [a for a in ldp.guarantee(model).assumptions if a.code == BY_HAND]
    assert assumption == "The labels of this fit are those of this draw."
    assert assumption.who == "trainer"
    # What was recorded stays, and a fit that makes its targets itself adds no assumption.
    ldp.fit(model, X, noisy, verbose=0)
    assert BY_HAND in codes(model)
    model.fit(data, verbose=0)
    assert promises_nothing(model)


def test_the_callback_adds_what_the_weights_were_made_of() -> None:
    model, labels = plain(), vault()
    ldp.fit(model, X, drawn(1.0, labels), verbose=0)
    noisy = drawn(2.0, labels)
    x, y = X, noisy.posterior()
    model.fit(x, y, callbacks=[ldp.RecordReceipts(noisy)], verbose=0)
    assert stated(model) == 3.0
    # Not what was trained before without receipts.
    clear = plain()
    clear.fit(X, np.eye(K)[Y], verbose=0)
    clear.fit(x, y, callbacks=[ldp.RecordReceipts(noisy)], verbose=0)
    assert promises_nothing(clear)


def test_labels_of_several_outputs_are_recorded_together() -> None:
    labels = vault()
    first, second = drawn(1.0, labels), drawn(2.0, labels)
    inputs = keras.Input((D,))
    outputs = {name: keras.layers.Dense(K, name=name)(inputs) for name in ("a", "b")}
    model = keras.Model(inputs, outputs)
    model.compile("sgd", {"a": ROWS, "b": ROWS})
    targets = {"a": first.posterior(), "b": second.posterior()}
    model.fit(X, targets, callbacks=[ldp.RecordReceipts(first, second)], verbose=0)
    assert stated(model) == labels.guarantee().epsilon == 3.0
    layer = model.get_layer("a")
    assert stated(keras.Sequential([keras.Input((D,)), layer])) == 3.0


# --- Files ---------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The file of a model that was fitted on noisy labels at epsilon 2."""
    model, path = plain(), tmp_path / "model.keras"
    ldp.fit(model, X, drawn(), verbose=0)
    model.save(path)
    return path


ALONE = """
import sys, keras, numpy as np
model = keras.models.load_model(sys.argv[1])
np.save(sys.argv[3], model.predict(np.load(sys.argv[2]), verbose=0))
assert not any(name.partition(".")[0] in ("tf_labeldp", "keras_layers") for name in sys.modules)
"""


@pytest.mark.slow
def test_keras_alone_loads_the_file(saved: Path, tmp_path: Path) -> None:
    inputs, outputs = tmp_path / "x.npy", tmp_path / "outputs.npy"
    np.save(inputs, X)
    command = [sys.executable, "-c", ALONE, *map(str, (saved, inputs, outputs))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    expected = ldp.load_model(saved).predict(X, verbose=0)
    np.testing.assert_allclose(np.load(outputs), expected, rtol=1e-5, atol=1e-6)


def test_the_file_has_the_receipts(saved: Path, forget: Any) -> None:
    forget()
    # Loaded by Keras alone, its optimizer shows steps that no receipt covers.
    alone = keras.models.load_model(saved)
    assert promises_nothing(alone)
    assert has_no_record(keras.models.load_model(saved, compile=False))
    assert stated(saved) == stated(str(saved)) == 2.0
    model = ldp.load_model(saved)
    assert stated(model) == 2.0 and int(model.optimizer.iterations) > 0
    assert BY_HAND not in codes(saved)
    # From here on its weights are known, wherever they are.
    assert stated(alone) == stated(keras.models.load_model(saved)) == 2.0
    copy = plain()
    copy.set_weights(model.get_weights())
    assert stated(copy) == 2.0


def test_weights_that_a_callback_changes_at_the_end_promise_nothing() -> None:
    class Halves(keras.callbacks.Callback):
        def on_train_end(self, logs: Any = None) -> None:
            self.model.set_weights([0.5 * weight for weight in self.model.get_weights()])

    for is_last in (False, True):
        model, noisy = plain(), drawn()
        callbacks = [ldp.RecordReceipts(noisy), Halves()]
        model.fit(X, noisy.posterior(), callbacks=callbacks[:: 1 - 2 * is_last], verbose=0)
        assert promises_nothing(model)


def test_keras_reads_no_receipts_of_a_plain_model_in_another_process(
    saved: Path, forget: Any
) -> None:
    forget()
    assert promises_nothing(keras.models.load_model(saved))
    bare = keras.models.load_model(saved, compile=False)
    assert has_no_record(bare)
    bare.compile("sgd", ROWS)
    ldp.fit(bare, X, drawn(1.0), verbose=0)
    assert stated(bare) == 1.0 and "initial-weights" in codes(bare)
    assert stated(ldp.load_model(saved)) == 2.0


def test_training_after_a_load_adds_receipts(saved: Path, tmp_path: Path, forget: Any) -> None:
    forget()
    for how in ("fit", "callback"):
        model, noisy = ldp.load_model(saved), drawn(1.0)
        if how == "fit":
            ldp.fit(model, X, noisy, epochs=2, verbose=0)
        else:
            record = ldp.RecordReceipts(noisy)
            model.fit(X, noisy.posterior(), epochs=2, callbacks=[record], verbose=0)
        assert stated(model) == 3.0
        model.save(tmp_path / "more.keras")
        forget()
        assert stated(tmp_path / "more.keras") == 3.0
        assert (BY_HAND in codes(tmp_path / "more.keras")) == (how == "callback")
    # A loaded model that is fitted without either.
    model = ldp.load_model(saved)
    model.fit(X, np.eye(K)[Y], verbose=0)
    assert promises_nothing(model)
    model.save(tmp_path / "clear.keras")
    forget()
    assert promises_nothing(tmp_path / "clear.keras")


def changed(path: Path, change: Any) -> int:
    """Rewrites the receipts in a file; returns in how many places they are."""
    content, found = io.BytesIO(), 0
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(content, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("receipts.bin"):
                owner, _, receipts = data.partition(b"\n")
                data, found = owner + b"\n" + change(receipts), found + 1
            new.writestr(name, data)
    path.write_bytes(content.getvalue())
    return found


def edited(content: bytes) -> bytes:
    """Halves the epsilon of each receipt."""
    data = json.loads(zlib.decompress(content))
    for receipt in data["receipts"]:
        receipt["charge"]["epsilon"] = receipt["charge"]["epsilon"] / 2
    return zlib.compress(json.dumps(data).encode())


def newer(content: bytes) -> bytes:
    data = json.loads(zlib.decompress(content))
    return zlib.compress(json.dumps({**data, "format": 99, "version": "9.9"}).encode())


DAMAGE = {
    "cut": (lambda content: content[:-7], "damaged"),
    "flipped": (lambda content: content[:20] + bytes([content[20] ^ 1]) + content[21:], "damaged"),
    "edited": (edited, "damaged or was edited"),
    "newer": (newer, r"newer version of tf-labeldp \(9\.9\), with format 99, .* Update tf-labeldp"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_receipts_that_were_damaged_or_are_newer_are_refused(saved: Path, name: str) -> None:
    change, message = DAMAGE[name]
    assert changed(saved, change) > 0
    for read in (ldp.load_model, ldp.guarantee):
        with pytest.raises(ReceiptError, match=message) as caught:
            read(saved)
        assert str(saved) in str(caught.value)


# --- Bad input -----------------------------------------------------------------------------------


def data_set() -> Any:
    return tf.data.Dataset.from_tensor_slices((X, np.eye(K)[Y])).batch(20)


def without_receipts() -> ldp.NoisyLabels:
    return ldp.NoisyLabels(Y, np.arange(N), ldp.RandomizedResponse(2.0, K))


def uncompiled() -> keras.Model:
    return keras.Sequential([keras.Input((D,)), keras.layers.Dense(K)])


def of_a_part() -> ldp.NoisyLabels:
    """Noisy labels of a vault's second part, whose indices count the part's examples."""
    return drawn(labels=vault().split(np.arange(N // 2, N))[1])


BAD: dict[str, tuple[Any, ...]] = {
    "shorter": (lambda: (X[:-1], drawn()), ValueError, "got 59 rows"),
    "a few": (
        lambda: (X[:30], drawn(indices=np.arange(20))),
        ValueError,
        "each of the 60 examples of the vault, or for each of the 20 noisy labels",
    ),
    "of a part": (lambda: (X, of_a_part()), ValueError, r"a part.* x\[labels\.indices\]"),
    "a data set": (lambda: (data_set(), drawn()), TypeError, r"callbacks=\[RecordReceipts"),
    "two draws": (
        lambda: (X, [drawn(), drawn()]),
        TypeError,
        r"got list.*RecordReceipts\(first, second\)",
    ),
    "an array": (lambda: (X, np.eye(K)[Y]), TypeError, "NoisyLabels of one draw, got ndarray"),
    "no receipts": (lambda: (X, without_receipts()), ValueError, "with receipts, got none"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_a_step(name: str) -> None:
    make, kind, message = BAD[name]
    x, noisy = make()
    model = plain()
    with pytest.raises(kind, match=message):
        ldp.fit(model, x, noisy, verbose=0)
    assert not model.optimizer.built or int(model.optimizer.iterations) == 0
    assert has_no_record(model)


def one_unit() -> keras.Model:
    """A model that its first batch builds, for two classes."""
    model = keras.Sequential([keras.layers.Dense(1, "sigmoid")])
    model.compile("sgd", "binary_crossentropy")
    return model


@pytest.mark.parametrize(
    ("make", "targets", "message"),
    [
        (lambda: plain(CODES), "posterior", "loss of rows.*targets='values'"),
        (lambda: plain(ROWS), "values", "loss of class codes.*targets='posterior'"),
        (one_unit, "posterior", "one unit per class.*, 1\\).*targets='values'"),
        (lambda: plain(ROWS), "likely", "targets must be one of"),
        (uncompiled, "posterior", r"expected a compiled model.*Call model\.compile"),
    ],
)
def test_targets_that_the_loss_cant_take(make: Any, targets: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ldp.fit(make(), X, drawn(), targets=targets, verbose=0)


@pytest.mark.parametrize("sources", [(), (X,), (without_receipts(),)])
def test_a_callback_with_nothing_to_record(sources: Any) -> None:
    with pytest.raises(ValueError, match=r"noisy labels with receipts, got none.*randomize"):
        ldp.RecordReceipts(*sources)


def test_labels_of_a_part_are_fitted_with_the_rows_of_the_part() -> None:
    train, held_out = vault().split(np.arange(0, N, 2))
    for part in (train, held_out):
        model = plain()
        ldp.fit(model, X[part.indices], drawn(labels=part), verbose=0)
        assert stated(model) == 2.0


def test_keras_is_refused_and_the_error_shows_both_ways() -> None:
    noisy, model = drawn(), plain(CODES)
    for use in (
        lambda: model.fit(X, noisy, verbose=0),
        lambda: model.fit({"x": X}, [noisy], verbose=0),
        lambda: model.fit(X, Y, validation_data=(X, noisy), verbose=0),
        lambda: model.evaluate(X, noisy, verbose=0),
    ):
        with pytest.raises(AttributeError) as caught:
            use()
        text = str(caught.value)
        assert "tf_labeldp.fit(model, x, noisy)" in text
        assert "callbacks=[tf_labeldp.RecordReceipts(noisy)]" in text


def test_an_hdf5_file_has_no_record_without_its_optimizer(tmp_path: Path, forget: Any) -> None:
    model = plain()
    ldp.fit(model, X, drawn(), verbose=0)
    model.save(tmp_path / "whole.h5")
    model.save(tmp_path / "bare.h5", include_optimizer=False)
    assert stated(tmp_path / "whole.h5") == stated(tmp_path / "bare.h5") == 2.0
    forget()
    assert promises_nothing(tmp_path / "whole.h5") and has_no_record(tmp_path / "bare.h5")


@pytest.mark.parametrize("where", ["model", "file"])
def test_quantized_weights_that_were_exchanged_void_the_promise(where: str, tmp_path: Path) -> None:
    model = plain()
    ldp.fit(model, X, drawn(), verbose=0)
    model.quantize("int8")
    ldp.declare(model, because="it was quantized after this training")
    model.save(tmp_path / "model.keras")
    if where == "file":
        model = ldp.load_model(tmp_path / "model.keras")
    assert stated(model) == 2.0
    [kernel] = [weight for weight in model.layers[0].weights if weight.dtype == "int8"]
    kernel.assign(-kernel.value)
    assert promises_nothing(model)


@pytest.mark.parametrize("how", ["halved", "clipped"])
def test_weights_that_a_callback_computes_are_unknown(how: str) -> None:
    class Changes(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            change = {"halved": lambda w: w / 2, "clipped": lambda w: np.clip(w, -0.01, 0.01)}[how]
            self.model.set_weights(list(map(change, self.model.get_weights())))

    model = plain()
    ldp.fit(model, X, drawn(), callbacks=[Changes()], verbose=0)
    assert promises_nothing(model)


@pytest.mark.parametrize("how", ["swapped", "overwritten", "constrained"])
def test_averages_and_constraints_of_keras_are_part_of_a_step(how: str) -> None:
    every = 2 if how == "overwritten" else None
    average = keras.optimizers.SGD(0.5, use_ema=how != "constrained", ema_overwrite_frequency=every)
    constraint = keras.constraints.NonNeg() if how == "constrained" else None
    layer = keras.layers.Dense(K, kernel_constraint=constraint)
    model = keras.Sequential([keras.Input((D,)), layer])
    model.compile(average, ROWS)
    noisy = drawn()
    data = noisy.to_dataset(X, "posterior").batch(20)
    swaps = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)] if how == "swapped" else []
    callbacks = [*swaps, ldp.RecordReceipts(noisy)]
    model.fit(data, epochs=3, callbacks=callbacks, verbose=0)
    assert stated(model) == 2.0
    assert how != "constrained" or (np.asarray(layer.kernel) >= 0).all()
    model.set_weights([weight + 1e-3 for weight in model.get_weights()])
    assert promises_nothing(model)


@pytest.mark.parametrize("with_store", [True, False])
def test_a_restored_run_is_known_where_its_store_is_open(
    with_store: bool, tmp_path: Path, forget: Any
) -> None:
    def run(*callbacks: Any) -> keras.Model:
        labels = vault(store=tmp_path / "store") if with_store else vault()
        model, backup = plain(), keras.callbacks.BackupAndRestore(tmp_path / "backup")
        noisy = drawn(labels=labels, key="first")
        ldp.fit(model, X, noisy, epochs=3, callbacks=[backup, *callbacks], verbose=0)
        return model

    class Kills(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Kills())
    forget()
    model = run()
    assert int(model.optimizer.iterations) == 6
    assert stated(model) == 2.0 if with_store else promises_nothing(model)
