"""The callback that prints the epsilon spent, and stops before a target."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from label_dp_cases import (
    DELTA,
    K,
    N,
    after,
    batches,
    codes,
    features,
    private_model,
    unchanged,
    vault,
)

import tf_labeldp as ldp
from tf_labeldp.mechanisms import RandomizedResponse
from tf_labeldp.training import PrivacySpent


def test_the_printed_and_logged_epsilon_is_the_spent_one(capsys: pytest.CaptureFixture) -> None:
    callbacks = [PrivacySpent(DELTA)]
    history = private_model().fit(batches(codes()), epochs=3, callbacks=callbacks, verbose=2)
    assert history.history["epsilon"] == [after(1), after(2), after(3)]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert lines == [f"epoch {e}: epsilon {after(e):.4g} at delta 0.001" for e in (1, 2, 3)]


def test_a_silent_fit_prints_no_epsilon_and_logs_it(capsys: pytest.CaptureFixture) -> None:
    callbacks = [PrivacySpent(DELTA)]
    history = private_model().fit(batches(codes()), epochs=2, callbacks=callbacks, verbose=0)
    assert history.history["epsilon"] == [after(1), after(2)]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("factor", "epochs"), [(1.0, 3), (0.999, 2)])
def test_training_stops_at_the_target_and_never_above(factor: float, epochs: int) -> None:
    model, target = private_model(), factor * after(3)
    callback = PrivacySpent(DELTA, target_epsilon=target, verbose=0)
    history = model.fit(batches(codes()), epochs=9, callbacks=[callback], verbose=0)
    assert len(history.history["epsilon"]) == epochs
    assert model.guarantee(DELTA).epsilon <= target < after(epochs + 1)
    # A second fit has nothing left.
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"is below the .* after the next epoch.*Raise"):
        model.fit(batches(codes()), callbacks=[callback], verbose=0)
    assert unchanged(model, before)


@pytest.mark.slow
def test_earlier_receipts_of_the_weights_count() -> None:
    labels = vault(epsilon=50.0)
    noisy = labels.randomize(RandomizedResponse(epsilon=1.0, num_classes=K))
    model, target = private_model(), 1.0 + after(3)
    model.declare("its weights were trained on these noisy labels", made_of=[noisy])
    callback = PrivacySpent(target_epsilon=target, verbose=0)
    history = model.fit(batches(labels), epochs=9, callbacks=[callback], verbose=0)
    spent = history.history["epsilon"]
    assert spent[-1] == labels.guarantee().epsilon == model.guarantee().epsilon <= target
    assert len(spent) < 9
    assert spent[0] > 1.0


@pytest.mark.holds("training.PrivacySpent")
def test_the_vault_is_not_charged_for_epochs_that_are_not_taken() -> None:
    labels = vault(epsilon=50.0)
    callbacks = [keras.callbacks.Callback(), PrivacySpent(target_epsilon=after(2), verbose=0)]
    private_model().fit(batches(labels), epochs=9, callbacks=callbacks, verbose=0)
    assert labels.guarantee().epsilon == after(2)


def test_a_target_below_one_epoch_raises_before_the_first_step() -> None:
    model = private_model()
    before = model.get_weights()
    callback = PrivacySpent(DELTA, target_epsilon=0.5 * after(1))
    with pytest.raises(ValueError, match="Raise noise_multiplier"):
        model.fit(batches(codes()), callbacks=[callback], verbose=0)
    assert unchanged(model, before)
    assert model.guarantee().headline == "no record of any label"


def test_noise_without_a_finite_epsilon_promises_nothing(capsys: pytest.CaptureFixture) -> None:
    model = private_model(noise_multiplier=1e-9)
    history = model.fit(batches(codes()), callbacks=[PrivacySpent(DELTA)], verbose=2)
    assert history.history["epsilon"] == [np.inf]
    assert "epoch 1: epsilon inf at delta 0.001\n" in capsys.readouterr().out
    found = model.guarantee(DELTA)
    assert found.headline == "NOT PRIVATE: nothing is promised"
    assert "no finite epsilon is known" in found.assumptions[0]
    labels, fresh = vault(epsilon=1e9), private_model(noise_multiplier=1e-9)
    before = fresh.get_weights()
    with pytest.raises(ldp.BudgetExceededError):  # and no vault pays for it
        fresh.fit(batches(labels), verbose=0)
    assert unchanged(fresh, before)
    assert labels.guarantee().epsilon == 0.0


def test_other_models_and_targets_are_refused() -> None:
    plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(K)])
    plain.compile("sgd", "mse")
    with pytest.raises(TypeError, match=r"PrivacySpent needs a LabelDPModel, got Sequential"):
        plain.fit(features(), np.zeros((N, K)), callbacks=[PrivacySpent()], verbose=0)
    with pytest.raises(ValueError, match="target_epsilon"):
        PrivacySpent(target_epsilon=0.0)


def test_config_round_trip() -> None:
    callback = PrivacySpent(1e-4, target_epsilon=2.0, verbose=0)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(callback))
    assert again.get_config() == callback.get_config()


@pytest.mark.holds("training.PrivacySpent")
@pytest.mark.parametrize("is_first", [True, False])
def test_restored_epochs_count_wherever_the_callback_is_listed(is_first, tmp_path) -> None:
    def backup() -> keras.callbacks.Callback:
        return keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)

    first = private_model()
    first.fit(batches(codes()), epochs=3, callbacks=[backup()], verbose=0)
    model, callback = private_model(), PrivacySpent(DELTA, target_epsilon=after(3), verbose=0)
    callbacks = [callback, backup()] if is_first else [backup(), callback]
    with pytest.raises(ValueError, match=r"is below the .* after the next epoch, with earlier"):
        model.fit(batches(codes()), epochs=9, callbacks=callbacks, verbose=0)
    assert model.guarantee(DELTA).epsilon == after(3)
