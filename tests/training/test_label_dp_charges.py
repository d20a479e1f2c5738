"""The charges of ``LabelDPModel``, without which it takes no step."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from label_dp_cases import (
    DELTA,
    LOSS,
    SIGMA,
    D,
    K,
    N,
    after,
    batches,
    codes,
    composed,
    features,
    network,
    optimizer,
    private_model,
    unchanged,
    vault,
    watch,
)

import tf_labeldp as ldp
from tf_labeldp.accounting import Charge, dp_sgd_charge, dp_sgd_guarantee, public_input
from tf_labeldp.mechanisms import HistogramMechanism, RandomizedResponse
from tf_labeldp.training import GaussianNoise

# Charges.


@pytest.mark.holds("training.LabelDPModel")
def test_the_vault_is_charged_before_the_first_step() -> None:
    labels, charged, model = vault(), [], private_model()
    step = watch(on_train_batch_begin=lambda: charged.append(len(labels.receipts)))
    model.fit(batches(labels), epochs=2, callbacks=[step], verbose=0)
    assert charged == [1, 1, 1, 2, 2, 2]


def test_a_fit_is_one_plan_that_keeps_its_full_cost_when_it_stops_early() -> None:
    """The statement has the steps taken; the rest may be used by a fit with equal steps alone."""
    labels, model = vault(epsilon=after(10)), private_model()

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 2

    model.fit(batches(labels), epochs=10, callbacks=[Stop()], verbose=0)
    assert labels.guarantee().epsilon == pytest.approx(after(3))
    assert labels.remaining() == 0.0
    with pytest.raises(ldp.BudgetExceededError, match="if they were fixed in advance"):
        labels.randomize(RandomizedResponse(1e-3, K))
    another = private_model()
    another.fit(batches(labels), epochs=7, verbose=0)
    assert labels.guarantee().epsilon == pytest.approx(after(10))
    assert len({receipt.plan for receipt in labels.receipts}) == 1
    with pytest.raises(ldp.BudgetExceededError):
        another.fit(batches(labels), epochs=1, verbose=0)


def test_a_plan_goes_on_at_a_larger_delta() -> None:
    """Its steps are the same, though their epsilon is stated at another delta."""
    labels, model = vault(epsilon=after(10)), private_model()

    def stop(epoch: int, logs: Any = None) -> None:
        model.stop_training = epoch == 2

    stopping = keras.callbacks.LambdaCallback(on_epoch_end=stop)
    model.fit(batches(labels), epochs=10, callbacks=[stopping], verbose=0)
    labels.raise_budget(ldp.PrivacyBudget(after(10), 2 * DELTA), reason="a larger delta")
    private_model().fit(batches(labels), epochs=7, verbose=0)
    receipts = labels.receipts
    assert len({receipt.charge.delta for receipt in receipts}) == 2
    assert len({receipt.plan for receipt in receipts}) == 1 and len(receipts) == 10
    steps = dp_sgd_guarantee(SIGMA, 0.1, 30, 2 * DELTA)
    assert labels.guarantee().epsilon == pytest.approx(steps.epsilon)


def test_a_longer_fit_uses_the_rest_of_a_plan_and_then_its_own() -> None:
    labels, model = vault(epsilon=1.3 * after(10)), private_model()

    def stop(epoch: int, logs: Any = None) -> None:
        model.stop_training = True

    stopping = keras.callbacks.LambdaCallback(on_epoch_end=stop)
    model.fit(batches(labels), epochs=3, callbacks=[stopping], verbose=0)
    model.fit(batches(labels), epochs=4, verbose=0)
    first, *_, last = [(receipt.plan, receipt.plan_uses) for receipt in labels.receipts]
    assert (first[1], last[1]) == (3, 2)
    plans = [receipt.plan for receipt in labels.receipts]
    assert plans == [first[0]] * 3 + [last[0]] * 2


def test_two_fits_are_two_plans() -> None:
    labels = vault(epsilon=1.3 * after(10))
    private_model().fit(batches(labels), epochs=5, verbose=0)
    private_model().fit(batches(labels), epochs=5, verbose=0)
    assert labels.guarantee().epsilon == pytest.approx(after(10))
    plans = [receipt.plan for receipt in labels.receipts]
    assert len(plans) == 10 and len(set(plans)) == 2


def test_a_reserved_epoch_is_one_use_which_leaves_none_to_a_later_fit() -> None:
    labels = vault(epsilon=1.01 * after(1))
    with labels.reserve({"training": [dp_sgd_charge(SIGMA, 0.1, 3, DELTA)]}):
        private_model().fit(batches(labels), epochs=1, verbose=0)
    assert [receipt.plan_uses for receipt in labels.receipts] == [1]
    assert labels.guarantee().epsilon == pytest.approx(after(1))
    model = private_model()
    before = model.get_weights()
    with pytest.raises(ldp.BudgetExceededError, match=f"1 epoch of LabelDPModel '{model.name}'"):
        model.fit(batches(labels), epochs=1, verbose=0)
    assert unchanged(model, before)


def test_all_epochs_are_checked_before_anything_is_trained() -> None:
    tight, model = vault(epsilon=1.5 * after(1)), private_model()
    before = model.get_weights()
    with pytest.raises(ldp.BudgetExceededError, match=f"50 epochs of LabelDPModel '{model.name}'"):
        model.fit(batches(tight), epochs=50, verbose=0)
    assert unchanged(model, before)
    assert tight.guarantee().epsilon == 0.0
    model.fit(batches(tight), epochs=1, verbose=0)
    assert tight.guarantee().epsilon == after(1)


def test_a_budget_without_delta_is_refused() -> None:
    model = private_model()
    before = model.get_weights()
    with pytest.raises(ValueError, match="delta=0"):
        model.fit(batches(vault(delta=0.0)), verbose=0)
    assert unchanged(model, before)


def test_a_delta_of_one_over_n_warns() -> None:
    with pytest.warns(UserWarning, match="not below 1/n"):
        private_model().fit(batches(vault(delta=1.0 / N)), verbose=0)
    model = private_model()
    model.fit(features(), codes(), verbose=0)
    with pytest.warns(UserWarning, match="not below 1/n"):
        model.guarantee(1.0 / N)


def test_an_interrupted_epoch_stays_charged() -> None:
    labels, model = vault(), private_model()

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.fit(batches(labels), callbacks=[watch(on_train_batch_end=stop)], verbose=0)
    assert labels.guarantee().epsilon == pytest.approx(after(1))
    assert model.guarantee().epsilon == pytest.approx(after(1))
    model.fit(batches(labels), verbose=0)  # and it can go on


def test_a_model_of_a_vaults_noisy_labels_and_of_its_steps_states_their_sum() -> None:
    labels, model = vault(epsilon=20.0), private_model()
    labels.release(HistogramMechanism(epsilon=0.5, num_classes=K))
    noisy = labels.randomize(RandomizedResponse(epsilon=1.0, num_classes=K))
    model.declare("its weights were trained on these noisy labels", made_of=[noisy])
    model.fit(batches(labels), verbose=0)
    charges = [Charge.of(noisy.mechanism), dp_sgd_charge(SIGMA, 0.1, 3, DELTA)]
    expected = composed(*charges)
    assert model.guarantee().epsilon == pytest.approx(expected, rel=1e-9)
    # The vault knows that draw already, and counts it once.
    charges.append(Charge.of(HistogramMechanism(epsilon=0.5, num_classes=K)))
    expected = composed(*charges)
    assert labels.guarantee().epsilon == pytest.approx(expected, rel=1e-9)


def test_labels_without_a_vault_count_against_the_budget() -> None:
    model = private_model()
    model.fit(features(), codes(), epochs=4, verbose=0)
    labels, before = vault(epsilon=1.5 * after(1)), model.get_weights()
    with pytest.raises(ldp.BudgetExceededError, match=r"\(of an input\)"):
        model.fit(batches(labels), verbose=0)
    assert unchanged(model, before)
    assert labels.guarantee().epsilon == 0.0
    private_model().fit(batches(labels), verbose=0)  # for another model it is enough


@pytest.mark.holds("training.LabelDPModel")
def test_two_fits_add_up_to_one() -> None:
    labels, model = vault(), private_model()
    model.fit(batches(labels), verbose=0)
    model.fit(batches(labels), verbose=0)
    assert labels.guarantee().epsilon == model.guarantee().epsilon == after(2)


# No step without a charge.


def test_steps_outside_of_fit_are_refused() -> None:
    model = private_model()
    before = model.get_weights()
    data = tf.constant(features()), tf.constant(codes())
    with pytest.raises(RuntimeError, match="train_step is for fit alone"):
        model.train_step(data)
    with pytest.raises(RuntimeError, match="train_on_batch is not private"):
        model.train_on_batch(*data)
    model.fit(features(), codes(), verbose=0)
    before = model.get_weights()
    with pytest.raises(RuntimeError, match="train_step is for fit alone"):
        model.train_step(data)
    assert unchanged(model, before)


def test_extra_steps_of_a_callback_are_refused() -> None:
    model = private_model()
    kept: list[Any] = []
    more = tf.data.Dataset.from_tensors((features(), codes(), np.ones(N, np.float32)))

    def take_more() -> None:
        kept.append((model.train_function, model.get_weights()))
        model.train_function(iter(more))

    callback = watch(on_epoch_end=take_more)
    with pytest.raises(RuntimeError, match="has not been charged"):
        model.fit(features(), codes(), batch_size=N, callbacks=[callback], verbose=0)
    function, weights = kept[0]
    assert unchanged(model, weights)
    # Kept until after fit, it takes no step either.
    with pytest.raises(tf.errors.OpError, match="has not been charged"):
        function(iter(more))
    assert unchanged(model, weights)


def test_executions_that_take_more_steps_than_are_charged_are_refused() -> None:
    model = network()
    model.compile(optimizer(), loss=LOSS, steps_per_execution=4)
    before = model.get_weights()
    with pytest.raises(ValueError, match="must be a multiple of steps_per_execution=4"):
        model.fit(batches(codes(), steps=6), verbose=0)
    assert unchanged(model, before)
    with pytest.raises(ValueError, match="steps_per_execution='auto'"):
        model.compile(optimizer(), loss=LOSS, steps_per_execution="auto")


@pytest.mark.parametrize("how", ["exchange", "noise"])
def test_noise_can_not_be_changed_under_way(how: str) -> None:
    model = private_model()

    def change() -> None:
        if how == "exchange":
            model.optimizer.noise = GaussianNoise(30.0)
        else:
            model.optimizer.noise.noise_multiplier = 30.0

    callback = watch(on_epoch_end=change)
    with pytest.raises(AttributeError, match=r"no setter|can't set"):
        model.fit(features(), codes(), epochs=2, callbacks=[callback], verbose=0)
    assert len(public_input(model).receipts) == 1
    assert model.optimizer.noise.noise_multiplier == SIGMA


class Changing(GaussianNoise):
    """Noise whose multiplier changes: ``add_noise`` is compiled with the first."""

    multiplier = SIGMA

    @property
    def noise_multiplier(self) -> float:  # type: ignore[override]
        return self.multiplier


def test_noise_of_another_that_changes_under_way_stops_training() -> None:
    noise = Changing(SIGMA)
    model = private_model(None, noise=noise)
    kept: list[Any] = []

    def change() -> None:
        noise.multiplier = 10.0 * SIGMA
        kept.append(model.get_weights())

    # A batch of all examples is an epoch of one step.
    callback = watch(on_epoch_end=change)
    with pytest.raises(RuntimeError, match="noise was changed during training"):
        model.fit(features(), codes(), batch_size=N, epochs=2, callbacks=[callback], verbose=0)
    assert unchanged(model, kept[0])


def test_batches_of_true_labels_open_for_no_other_call() -> None:
    plain = keras.Sequential([keras.Input((D,)), keras.layers.Dense(K)])
    plain.compile("sgd", LOSS)
    for call in (plain.fit, plain.evaluate, private_model().evaluate, private_model().predict):
        with pytest.raises((TypeError, ValueError)) as caught:
            call(batches(codes()), verbose=0)
        assert "PoissonBatches" in str(caught.value)
