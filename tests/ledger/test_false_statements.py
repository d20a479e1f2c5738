"""False statements of version 0.1, in the order in which they were found.

"Counted" means that the statement covers the receipts of all inputs.
"""

from __future__ import annotations

import math
import subprocess
import sys

import dp_accounting
import keras
import numpy as np
import pytest
import tensorflow as tf
from ledger_cases import (
    DELTA,
    NOISE,
    RNG,
    SPARSE,
    STEPS,
    K,
    N,
    Q,
    X,
    Y,
    batches,
    codes,
    dp_sgd,
    has_no_record,
    in_the_clear,
    multi_stage,
    plain,
    private,
    stated,
    steps_epsilon,
    vault,
)

import tf_labeldp as ldp
from tf_labeldp.heads import PrivateRidge
from tf_labeldp.mechanisms import RandomizedResponse
from tf_labeldp.plugins import EventFields
from tf_labeldp.training import Denoiser, NoiseMechanism


@pytest.mark.parametrize("where", ["optimizer", "batches"])
def test_01_a_seeded_training_is_seeded_in_the_vault_too(where, tmp_path):
    labels = vault(store=tmp_path / "store")
    seeds = {"insecure_seed": 1}
    model = private(**(seeds if where == "optimizer" else {}))
    model.fit(batches(labels, **(seeds if where == "batches" else {})), verbose=0)
    for source in (model, labels, vault(store=tmp_path / "store")):
        assert source.guarantee().seeded
        assert str(source.guarantee()).startswith("NOT PRIVATE: seeded")


def test_01_reported_metrics_are_in_the_statement_of_the_vault(tmp_path):
    labels, model = vault(store=tmp_path / "store"), private()
    model.report_training_metrics = True
    dp_sgd(model, labels)
    for source in (model, labels, vault(store=tmp_path / "store")):
        assert "metrics-reported" in {note.code for note in source.guarantee().assumptions}
    quiet = vault()
    dp_sgd(private(), quiet)
    assert not any("reported" in note.code for note in quiet.guarantee().assumptions)


def test_01_sample_weights_are_in_the_statement():
    model = private()
    model.fit(X, Y, sample_weight=np.ones(N, np.float32), verbose=0)
    assert any("weights of samples" in text for text in model.guarantee().assumptions)


def test_02_stages_before_steps_are_counted():
    labels = vault()
    model, stages = multi_stage(labels, epsilon=2.0)
    assert stages.guarantee().epsilon == 2.0
    trained = dp_sgd(private(model), labels)
    assert trained.guarantee().epsilon == labels.guarantee().epsilon > 2.0


def test_02_a_second_vault_of_the_same_array_adds_up():
    model, _ = multi_stage(vault(), epsilon=2.0)
    second = vault()
    trained = dp_sgd(private(model), second)
    assert trained.guarantee().epsilon > 2.0
    assert second.guarantee().epsilon > 2.0  # The history may be about its labels.


def test_02_an_exported_head_is_counted():
    head = PrivateRidge(1.5, 1e-4).fit(X, vault())
    exported = head.to_keras()
    exported.get_layer("head").trainable = True
    of_probabilities = keras.losses.SparseCategoricalCrossentropy()
    trained = dp_sgd(private(exported, loss=of_probabilities), vault())
    release = ldp.accounting._losses.composed_epsilon([head.receipts_[0].charge.event], DELTA)
    assert trained.guarantee().epsilon > max(release, steps_epsilon(STEPS))


def test_02_training_in_the_clear_is_detected_and_can_be_declared():
    model = in_the_clear()
    trained = dp_sgd(private(model), vault())
    statement = trained.guarantee()
    assert math.isinf(statement.epsilon) and not statement.is_private
    assert "NOT PRIVATE: nothing is promised" in str(statement)
    assert "declare" in statement.assumptions[0]
    claimed = trained.declare("these labels are public")
    assert claimed.epsilon == steps_epsilon(STEPS)
    [claim] = [note for note in claimed.assumptions if note.code == "declared"]
    assert "these labels are public" in claim and claim.who == "authors"
    # A claim covers no later training.
    model.fit(X, Y, verbose=0)
    assert math.isinf(trained.guarantee().epsilon)


@pytest.mark.parametrize("route", ["whole", "file", "layers", "weights"])
def test_02_training_in_the_clear_shows_in_the_optimizer(route, tmp_path):
    """Without its optimizer there is no record of a model."""
    model = source = in_the_clear()
    if route == "layers":
        model = keras.Model(source.inputs, source.outputs)
    elif route == "weights":
        model = plain()
        model.set_weights(source.get_weights())
    elif route == "file":
        source.save(tmp_path / "clear.keras")
        model = keras.models.load_model(tmp_path / "clear.keras")
    model = private(model)
    assert math.isinf(stated(model)) and has_no_record(model) == (route in ("layers", "weights"))
    assert "initial-weights" in codes(model)


def test_02_receipts_from_before_training_in_the_clear_stay_with_the_weights(tmp_path):
    first = dp_sgd(private(), vault())
    spent = first.guarantee().epsilon
    model = keras.Model(first.inputs, first.outputs)
    model.compile("sgd", loss=SPARSE)
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "model.keras")
    copy = ldp.load_model(tmp_path / "model.keras")
    assert math.isinf(ldp.guarantee(copy).epsilon)
    ldp.declare(copy, because="these labels are public")
    assert stated(copy) == pytest.approx(spent)


def test_02_a_loaded_model_keeps_its_receipts_when_it_is_trained(tmp_path):
    multi_stage(vault())[0].save(tmp_path / "model.keras")
    model = ldp.load_model(tmp_path / "model.keras")
    assert stated(model) == 2.0
    model.fit(X, keras.utils.to_categorical(Y, K), verbose=0)
    ldp.declare(model, because="these labels are public")
    assert stated(model) == 2.0


def test_02_a_declared_epsilon_is_added():
    model = in_the_clear()
    model_private = private(model)
    model_private.declare("a study of these labels", epsilon=1.0)
    assert dp_sgd(model_private, vault()).guarantee().epsilon > 1.0


def test_03_a_checkpoint_keeps_the_receipts(tmp_path):
    model = dp_sgd(private(), vault(), epochs=2)
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "checkpoint"))
    again = private()
    tf.train.Checkpoint(model=again).restore(path).assert_existing_objects_matched()
    assert again.guarantee() == model.guarantee()
    assert again.guarantee().epsilon == steps_epsilon(2 * STEPS)


def test_03_a_plain_model_from_a_file_keeps_its_history(tmp_path):
    labels, model = vault(), plain()
    dp_sgd(private(model), labels)
    model.save(tmp_path / "plain.keras")
    loaded = keras.models.load_model(tmp_path / "plain.keras")
    trained = dp_sgd(private(loaded), labels)
    assert trained.guarantee().epsilon == steps_epsilon(2 * STEPS) == labels.guarantee().epsilon


@pytest.mark.parametrize("whole", [True, False], ids=["keras", "weights"])
def test_04_a_loaded_private_encoder_is_counted(whole, tmp_path):
    model = dp_sgd(private(), vault())
    if whole:
        model.save(tmp_path / "encoder.keras")
        encoder = keras.models.load_model(tmp_path / "encoder.keras")
    else:
        model.save_weights(tmp_path / "encoder.weights.h5")
        encoder = private()
        encoder.load_weights(tmp_path / "encoder.weights.h5")
    head = PrivateRidge(0.5, 1e-4, encoder=encoder).fit(X, vault())
    release = ldp.accounting._losses.composed_epsilon([head.receipts_[-1].charge.event], DELTA)
    assert head.guarantee(DELTA).epsilon > max(release, steps_epsilon(STEPS))
    assert len([receipt for receipt in head.receipts_ if receipt.labels.size]) == 2


def small_net():
    layers = keras.layers
    first = [keras.Input((32, 32, 3)), layers.Conv2D(4, 3, strides=4), layers.BatchNormalization()]
    return keras.Sequential([*first, layers.DepthwiseConv2D(3), layers.GlobalAveragePooling2D()])


def test_04_a_pretrained_encoder_is_a_named_assumption(tmp_path):
    small_net().save_weights(tmp_path / "pretrained.weights.h5")
    encoder = small_net()
    encoder.load_weights(tmp_path / "pretrained.weights.h5")
    images = RNG.normal(size=(N, 32, 32, 3)).astype(np.float32)
    head = PrivateRidge(0.5, 1e-4, encoder=encoder).fit(images, vault())
    assert head.guarantee().epsilon == 0.5 and head.guarantee().is_private
    assert "public-inputs" in {note.code for note in head.guarantee().assumptions}
    encoder.trainable = False
    model = private(keras.Sequential([encoder, keras.layers.Dense(K)]))
    rows = ldp.data.poisson_batches(images, vault(), sampling_probability=Q, steps=STEPS)
    model.fit(rows, verbose=0)
    assert stated(model) == pytest.approx(steps_epsilon(STEPS))
    assert "initial-weights" in codes(model)
    assert has_no_record(encoder)


def test_04_features_in_an_array_are_a_named_assumption():
    features = dp_sgd(private(), vault()).predict(X, verbose=0)
    head = PrivateRidge(0.5, 1e-4).fit(features, vault())
    assert head.guarantee().epsilon == 0.5
    assert "public-inputs" in {note.code for note in head.guarantee().assumptions}


@pytest.mark.parametrize("fresh_vault", [True, False])
def test_05_a_budget_survives_save_and_load(fresh_vault, tmp_path):
    once = steps_epsilon(STEPS)
    budget = 0.5 * (once + steps_epsilon(2 * STEPS))  # enough for one fit, not for two
    labels, model = vault(budget), private()
    dp_sgd(model, labels)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    labels = vault(budget) if fresh_vault else labels
    with pytest.raises(ldp.BudgetExceededError):
        dp_sgd(again, labels)
    assert again.guarantee().epsilon == pytest.approx(once)
    assert labels.guarantee().epsilon == pytest.approx(once)  # The model brings its history.


def test_05_declared_people_keep_their_own_budgets():
    once = steps_epsilon(STEPS)
    model = dp_sgd(private(), vault(1.5 * once, people="north"))
    south = vault(1.5 * once, people="south")
    dp_sgd(model, south)
    assert south.guarantee().epsilon == pytest.approx(once)
    assert model.guarantee().epsilon == pytest.approx(once)
    with pytest.raises(ldp.BudgetExceededError, match="people"):
        dp_sgd(model, vault(0.5 * once, people="north"))


class Silent(NoiseMechanism):
    """Adds no noise, and claims nothing."""

    def __init__(self, noise_multiplier):
        self.noise_multiplier = noise_multiplier

    def add_noise(self, clipped_sum, l2_norm_clip, state):
        return clipped_sum, state


class Claimed(Silent):
    """Claims Laplace noise."""

    def dp_event(self, sampling_probability, steps):
        return dp_accounting.SelfComposedDpEvent(
            dp_accounting.LaplaceDpEvent(self.noise_multiplier), steps
        )


def test_06_noise_without_a_claim_gets_no_statement():
    model = private(noise=Silent(NOISE))
    model.fit(X, Y, verbose=0)
    assert math.isinf(model.guarantee().epsilon)
    with pytest.raises(ValueError, match="expected noise with a known cost"):
        dp_sgd(private(noise=Silent(NOISE)), vault())


def test_06_the_event_of_a_plug_in_is_its_authors_claim():
    labels = vault()
    statement = dp_sgd(private(noise=Claimed(40.0)), labels).guarantee()
    # Under replacement Laplace noise with multiplier b is (2 / b)-DP.
    pure = [ldp.plugins.EventFields.randomized_response(2.0 / 40.0).dp_event()] * STEPS
    assert statement.epsilon == pytest.approx(ldp.accounting._losses.composed_epsilon(pure, DELTA))
    gaussian = ldp.accounting.dp_sgd_guarantee(40.0, Q, STEPS, DELTA)
    assert statement.epsilon != pytest.approx(gaussian.epsilon, rel=0.1)
    for notes in (statement.assumptions, labels.guarantee().assumptions):
        assert any("author's claim" in text and "Claimed" in text for text in notes)


def test_06_a_subclass_of_the_librarys_noise_is_its_authors_claim():
    class Less(ldp.training.GaussianNoise):
        def add_noise(self, clipped_sum, l2_norm_clip, state):
            return clipped_sum, state

    model = private(noise=Less(NOISE))
    dp_sgd(model, vault())
    assert any("author's claim" in text for text in model.guarantee().assumptions)
    ours = dp_sgd(private(), vault()).guarantee()
    assert not any("author's claim" in text for text in ours.assumptions)


def test_06_a_denoiser_with_default_attributes_is_called():
    calls: list[int] = []

    class Zero(Denoiser):
        def denoise(self, gradients, vertices, state):
            calls.append(1)
            assert vertices is None
            return [tf.zeros_like(part) for part in gradients], state, {}

    model = private(denoiser=Zero())
    before = [weight.copy() for weight in model.get_weights()]
    dp_sgd(model, vault())
    assert calls
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


class Fading(ldp.training.NoiseMechanism):
    """Noise with a multiplier that can be set."""

    def __init__(self, noise_multiplier):
        self.noise_multiplier = noise_multiplier

    def add_noise(self, clipped_sum, l2_norm_clip, state):
        noise = ldp.training.GaussianNoise(self.noise_multiplier)
        return noise.add_noise(clipped_sum, l2_norm_clip, state)

    def dp_event(self, sampling_probability, steps):
        return EventFields.dp_sgd(self.noise_multiplier, sampling_probability, steps).dp_event()


@pytest.mark.parametrize("eager", [True, False])
def test_08_noise_that_changes_within_an_epoch_stops_the_training(eager):
    class Lower(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.optimizer.noise.noise_multiplier = 1e-3

    model = private(noise=Fading(NOISE))
    model.run_eagerly = eager
    with pytest.raises(RuntimeError, match="noise was changed"):
        dp_sgd(model, vault(), callbacks=[Lower()])


def test_08_noise_and_optimizer_are_immutable():
    optimizer = private().optimizer
    for owner, name in (
        (optimizer.noise, "noise_multiplier"),
        (optimizer, "noise"),
        (optimizer, "l2_norm_clip"),
        (optimizer, "denoiser"),
    ):
        with pytest.raises(AttributeError):
            setattr(owner, name, 1e-3)


# TensorFlow's own log may quote a label if a user's loss looks labels up (a sharp edge): this test
# does not read that log.
_LOG = """
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras, numpy as np, tensorflow as tf, tf_labeldp as ldp
table = tf.constant([0.5, 1.5])
def loss(y_true, y_pred):
    wanted = tf.gather(table, tf.cast(tf.reshape(y_true, [-1]), tf.int32))
    return wanted * tf.reduce_sum(y_pred, axis=-1)
y = np.zeros(40, np.int64)
y[7] = 9172
for eager in (False, True):
    inputs = keras.Input((2,))
    model = ldp.LabelDPModel(inputs, keras.layers.Dense(9173)(inputs))
    optimizer = ldp.LabelDPOptimizer(keras.optimizers.SGD(0.1), 1.0, 4.0)
    model.compile(optimizer, loss=loss, run_eagerly=eager)
    try:
        model.fit(np.ones((40, 2), np.float32), y, verbose=0, batch_size=40)
    except RuntimeError as error:
        print("withheld", eager, error)
"""


@pytest.mark.slow
def test_11_an_index_out_of_range_shows_no_label():
    done = subprocess.run([sys.executable, "-c", _LOG], capture_output=True, text=True, check=False)
    for eager in (False, True):
        message = f"withheld {eager} training stopped with TensorFlow's InvalidArgumentError"
        assert message in done.stdout, done.stderr
    assert "9172" not in done.stdout + done.stderr


def test_13_the_delta_of_the_vault_is_kept(tmp_path):
    model = dp_sgd(private(), vault(delta=2e-4))
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert again.guarantee() == model.guarantee()
    assert again.guarantee().delta == 2e-4


def test_13_model_and_vault_name_the_same_assumptions_once():
    labels = vault()
    model = dp_sgd(private(), labels)
    assert model.guarantee() == labels.guarantee()
    notes = labels.guarantee().assumptions
    assert len(set(notes)) == len(notes)
    assert [note.code for note in notes].count("public-features") == 1


def test_14_several_workers_are_refused(monkeypatch):
    class Several(tf.distribute.MultiWorkerMirroredStrategy):
        """The strategy of the first of several machines, without the others."""

    model = private()
    monkeypatch.setattr(model, "_distribute_strategy", Several())
    with pytest.raises(ValueError, match="MultiWorkerMirroredStrategy"):
        dp_sgd(model, vault())


def test_14_rounding_on_a_gpu_is_an_assumption(monkeypatch):
    listed = tf.config.list_physical_devices
    monkeypatch.setattr(
        tf.config,
        "list_physical_devices",
        lambda kind=None: ["GPU:0"] if kind == "GPU" else listed(kind),
    )
    model = dp_sgd(private(), vault())
    assert any("TensorFloat-32" in text for text in model.guarantee().assumptions)
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        exact = dp_sgd(private(), vault())
        assert not any("TensorFloat-32" in text for text in exact.guarantee().assumptions)
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(True)


_MAKE = """
import sys, numpy as np, tf_labeldp as ldp
labels = np.full(50, int(sys.argv[2]))
sys.stdin.readline()
try:
    vault = ldp.PrivateLabels(labels, 9, budget=ldp.PrivacyBudget(1.0), store=sys.argv[1])
    vault.randomize(ldp.RandomizedResponse(1.0, 9))
    print("drawn")
except ldp.LabelStoreError as error:
    print("refused", error)
"""


# Processes race here: one try is in the fast set, two more are in the slow set.
@pytest.mark.parametrize("attempt", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2))])
def test_15_two_processes_with_other_labels_do_not_share_a_store(attempt, tmp_path):
    store = tmp_path / "store"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _MAKE, str(store), str(label)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for label in (1, 2)
    ]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    results = [process.communicate()[0].split()[0] for process in processes]
    assert sorted(results) == ["drawn", "refused"]
    winner = 1 + results.index("drawn")
    again = ldp.PrivateLabels(np.full(50, winner), 9, store=store)
    assert again.guarantee().epsilon == 1.0


def test_delta_is_stated_in_units_of_one_over_n_and_a_large_delta_warns():
    labels = vault(delta=1e-3)
    labels.randomize(RandomizedResponse(1.0, K))
    dp_sgd(private(), labels)
    assert f"0.12 / n, for n = {N}" in str(labels.guarantee())
    large, model = vault(delta=0.01), private()
    with pytest.warns(UserWarning, match="1/n") as caught:
        large.randomize(RandomizedResponse(1.0, K))
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(UserWarning, match="1/n"):
        dp_sgd(model, large)
        model.guarantee()
    assert "WARNING" in str(model.guarantee())
