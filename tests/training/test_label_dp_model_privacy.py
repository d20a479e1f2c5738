"""What ``LabelDPModel`` promises: what it shows, what it charges, and what it states."""

from __future__ import annotations

import io
import logging
import math
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_labeldp as ldp
from tf_labeldp.accounting import Charge, PrivacyGuarantee, compose_charges, dp_sgd_guarantee
from tf_labeldp.data import poisson_batches
from tf_labeldp.estimation import HistogramMechanism
from tf_labeldp.mechanisms import DPSGDSteps, RandomizedResponse
from tf_labeldp.training import LabelDPModel, LabelDPOptimizer, PrivacySpent, SelfSpan
from tf_labeldp.training import _spending as spending_module

N, D, K, DELTA, SIGMA = 100, 3, 4, 1e-3, 3.0
SECRET = 31337
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def features() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(N, D)).astype(np.float32)


def codes(shift: int = 0) -> np.ndarray:
    return (np.arange(N) + shift) % K


def vault(epsilon: float = 3.0, delta: float = DELTA, **settings: Any) -> ldp.PrivateLabels:
    return ldp.PrivateLabels(codes(), K, budget=ldp.PrivacyBudget(epsilon, delta), **settings)


def batches(labels: Any, *, q: float = 0.1, steps: int = 3, **settings: Any) -> Any:
    return poisson_batches(features(), labels, sampling_probability=q, steps=steps, **settings)


def private_model(noise_multiplier: float = SIGMA, **settings: Any) -> LabelDPModel:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((D,))
    model = LabelDPModel(inputs, keras.layers.Dense(K)(inputs))
    inner = keras.optimizers.SGD(0.5)
    optimizer = LabelDPOptimizer(inner, 1.0, noise_multiplier, **settings)
    model.compile(optimizer, loss=LOSS, metrics=["accuracy"])
    return model


def unchanged(model: keras.Model, before: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))


# What it shows.


def test_logs_hold_no_loss_and_no_metric_of_training_labels() -> None:
    seen: list[dict[str, Any]] = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(dict(logs)),
        on_epoch_end=lambda epoch, logs: seen.append(dict(logs)),
    )
    model = private_model()
    history = model.fit(batches(vault()), epochs=2, callbacks=[watch], verbose=0)
    assert {key for logs in seen for key in logs} == {"noisy_gradient_norm"}
    assert set(history.history) == {"noisy_gradient_norm"}


def test_validation_is_reported_and_training_is_not() -> None:
    model = private_model()
    known = features(), codes()
    history = model.fit(batches(vault()), validation_data=known, verbose=0).history
    assert set(history) == {"noisy_gradient_norm", "val_loss", "val_accuracy"}
    loss, accuracy = model.evaluate(*known, verbose=0)
    assert history["val_loss"][0] == pytest.approx(loss)
    assert history["val_accuracy"][0] == pytest.approx(accuracy)


def test_reported_metrics_are_reported_and_the_statement_says_so() -> None:
    model = private_model()
    model.report_training_metrics = True
    history = model.fit(batches(vault()), verbose=0).history
    assert {"loss", "accuracy"} <= set(history)
    # Also when it is turned off again, and after loading.
    model.report_training_metrics = False
    assert any("metrics that were reported" in text for text in model.guarantee().assumptions)
    other = private_model()
    other.fit(batches(vault()), verbose=0)
    assert not any("metrics that were" in text for text in other.guarantee().assumptions)


def test_metrics_cannot_be_turned_on_under_way() -> None:
    model = private_model()

    def turn_on(epoch: int, logs: Any) -> None:
        model.report_training_metrics = True

    with pytest.raises(RuntimeError, match="while fit is under way"):
        model.fit(
            batches(vault()),
            callbacks=[keras.callbacks.LambdaCallback(on_epoch_begin=turn_on)],
            verbose=0,
        )


def test_other_labels_give_the_same_kinds_of_logs_and_other_noisy_values() -> None:
    found = []
    for shift in (0, 1):
        model = private_model(seed=3)
        history = model.fit(batches(codes(shift), seed=4), epochs=2, verbose=0).history
        found.append(history)
    assert set(found[0]) == set(found[1])
    assert found[0] != found[1]  # they do come from the gradients


def test_the_norm_in_the_log_is_that_of_the_noisy_sum() -> None:
    """So it is a function of what has been made private."""
    model = private_model(seed=3)
    before = model.get_weights()
    history = model.fit(features(), codes(), batch_size=N, verbose=0).history
    moved = [(a - b) * N / 0.5 for a, b in zip(before, model.get_weights(), strict=True)]
    norm = math.sqrt(sum(float(np.sum(part.astype(np.float64) ** 2)) for part in moved))
    assert history["noisy_gradient_norm"][0] == pytest.approx(norm, rel=1e-4)


def test_no_text_quotes_a_label() -> None:
    """Labels are numbers that occur nowhere else."""
    labels = np.full(N, SECRET + 0.625, np.float32)
    inputs = keras.Input((D,))
    model = LabelDPModel(inputs, keras.layers.Dense(1)(inputs))
    model.compile(LabelDPOptimizer(keras.optimizers.SGD(0.1), 1.0, 1.0), loss="mse")
    out, err, log = io.StringIO(), io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger().addHandler(handler)
    texts = []
    try:
        with redirect_stdout(out), redirect_stderr(err):
            data = batches(ldp.PrivateLabels(labels, low=0.0, high=4e4, budget=_budget()))
            model.fit(data, epochs=2, verbose=2, callbacks=[PrivacySpent()])
            model.fit(features(), labels, verbose=2)
            texts += [repr(data), repr(model), str(model.guarantee()), repr(model._spending)]
            watch = keras.callbacks.LambdaCallback(
                on_epoch_begin=lambda *_: texts.append(repr(model._spending.plan))
            )
            model.fit(features(), labels, verbose=0, callbacks=[watch])
            model.summary()
    finally:
        logging.getLogger().removeHandler(handler)
    texts += [out.getvalue(), err.getvalue(), log.getvalue()]
    assert len("".join(texts)) > 500
    assert not any(str(SECRET) in text for text in texts)


def _budget() -> ldp.PrivacyBudget:
    return ldp.PrivacyBudget(5.0, DELTA)


@pytest.mark.parametrize("eagerly", [False, True])
def test_errors_of_tensorflow_that_quote_labels_are_withheld(eagerly: bool) -> None:
    def quoting(y_true: Any, y_pred: Any) -> Any:
        message = tf.Assert(tf.reduce_all(y_true < 0), [y_true], summarize=1000)
        with tf.control_dependencies([message] if message is not None else []):
            return tf.reduce_sum(y_pred, axis=1)

    inputs = keras.Input((D,))
    model = LabelDPModel(inputs, keras.layers.Dense(K)(inputs))
    optimizer = LabelDPOptimizer(keras.optimizers.SGD(0.1), 1.0, 1.0, method="ghost")
    loss = keras.losses.MeanSquaredError()
    model.compile(optimizer, loss=loss, run_eagerly=eagerly)
    model._step.per_example_loss = quoting
    with pytest.raises(RuntimeError, match="text is withheld") as caught:
        model.fit(features(), np.full(N, SECRET), verbose=0)
    shown = "".join(traceback.format_exception(caught.value))
    assert str(SECRET) not in shown
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("source", ["arrays", "array batches", "vault"])
def test_codes_without_an_output_are_found_before_tensorflow_quotes_them(source: str) -> None:
    inputs = keras.Input((D,))
    model = LabelDPModel(inputs, keras.layers.Dense(K - 1)(inputs))
    model.compile(LabelDPOptimizer(keras.optimizers.SGD(0.1), 1.0, 1.0), loss=LOSS)
    before = model.get_weights()
    with pytest.raises(ValueError, match="one unit for each class"):
        if source == "arrays":
            model.fit(features(), codes(), verbose=0)
        else:
            model.fit(batches(codes() if source == "array batches" else vault()), verbose=0)
    assert unchanged(model, before)


# What it charges.


def test_the_vault_is_charged_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    labels, order = vault(), []
    release = ldp.PrivateLabels.release
    model = private_model()
    monkeypatch.setattr(
        ldp.PrivateLabels,
        "release",
        lambda self, *a, **k: (order.append("charge"), release(self, *a, **k))[1],
    )
    step = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda *_, **__: order.append("step")
    )
    model.fit(batches(labels), epochs=2, callbacks=[step], verbose=0)
    assert order == ["charge", "step", "step", "step"] * 2


def test_a_charge_that_fails_leaves_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    model = private_model()
    before = model.get_weights()
    monkeypatch.setattr(ldp.PrivateLabels, "release", fail)
    with pytest.raises(OSError, match="disk full"):
        model.fit(batches(vault()), verbose=0)
    assert unchanged(model, before)
    assert model.guarantee().epsilon == 0.0


def test_all_epochs_are_checked_before_anything_is_trained() -> None:
    one = private_model()
    labels = vault(epsilon=100.0)
    one.fit(batches(labels), verbose=0)
    enough_for_one = labels.guarantee().epsilon * 1.5
    tight = vault(epsilon=enough_for_one)
    model = private_model()
    before = model.get_weights()
    with pytest.raises(ldp.BudgetExceededError):
        model.fit(batches(tight), epochs=50, verbose=0)
    assert unchanged(model, before)
    assert tight.guarantee().epsilon == 0.0
    model.fit(batches(tight), epochs=1, verbose=0)
    assert 0.0 < tight.guarantee().epsilon <= enough_for_one


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

    def stop(batch: int, logs: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.fit(
            batches(labels),
            callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=stop)],
            verbose=0,
        )
    expected = dp_sgd_guarantee(SIGMA, 0.1, 3, DELTA).epsilon
    assert labels.guarantee().epsilon == pytest.approx(expected)
    assert model.guarantee().epsilon == pytest.approx(expected)
    model.fit(batches(labels), verbose=0)  # and it can go on


def test_a_store_remembers_the_charges(tmp_path: Path) -> None:
    labels = vault(store=tmp_path / "store")
    private_model().fit(batches(labels), epochs=2, verbose=0)
    again = vault(store=tmp_path / "store")
    assert again.guarantee().epsilon == labels.guarantee().epsilon > 0.0


def test_other_releases_of_the_vault_are_in_the_statement() -> None:
    labels, model = vault(epsilon=20.0), private_model()
    labels.release(HistogramMechanism(epsilon=0.5, num_classes=K))
    labels.randomize(RandomizedResponse(epsilon=1.0, num_classes=K))
    model.fit(batches(labels), verbose=0)
    assert model.guarantee().epsilon == labels.guarantee().epsilon
    steps = dp_sgd_guarantee(SIGMA, 0.1, 3, DELTA).epsilon
    assert steps + 1.0 < model.guarantee().epsilon < steps + 1.5 + 1e-6
    # At a smaller delta, too.
    assert model.guarantee(1e-6).epsilon > dp_sgd_guarantee(SIGMA, 0.1, 3, 1e-6).epsilon + 1.0


def test_labels_that_no_vault_held_are_added_to_what_a_vault_states() -> None:
    labels, model = vault(epsilon=20.0), private_model()
    labels.randomize(RandomizedResponse(epsilon=1.0, num_classes=K))
    model.fit(features(), codes(), epochs=4, verbose=0)
    model.fit(batches(labels), verbose=0)
    steps = [DPSGDSteps(SIGMA, 1.0, 4, DELTA), DPSGDSteps(SIGMA, 0.1, 3, DELTA)]
    charges = [Charge.of(one) for one in (RandomizedResponse(1.0, K), *steps)]
    expected = compose_charges(charges, DELTA).epsilon
    assert model.guarantee().epsilon == pytest.approx(expected, rel=1e-9)
    assert model.guarantee().epsilon > labels.guarantee().epsilon


def test_two_fits_add_up_to_one() -> None:
    labels, model = vault(), private_model()
    model.fit(batches(labels), verbose=0)
    model.fit(batches(labels), verbose=0)
    assert model.guarantee().epsilon == dp_sgd_guarantee(SIGMA, 0.1, 6, DELTA).epsilon
    assert labels.guarantee().epsilon == model.guarantee().epsilon


def test_two_fits_with_other_sampling_add_up() -> None:
    model = private_model()
    model.fit(batches(codes(), q=0.1), verbose=0)
    model.fit(batches(codes(), q=0.3), verbose=0)
    alone = dp_sgd_guarantee(SIGMA, 0.3, 3, DELTA).epsilon
    assert alone < model.guarantee(DELTA).epsilon < dp_sgd_guarantee(SIGMA, 0.3, 6, DELTA).epsilon


# What it states.


def same(found: PrivacyGuarantee, expected: PrivacyGuarantee) -> bool:
    rests_on = set(expected.assumptions) <= set(found.assumptions)
    numbers = (found.epsilon, found.delta, found.unit, found.relation)
    return rests_on and numbers == (
        expected.epsilon,
        expected.delta,
        expected.unit,
        expected.relation,
    )


def test_arrays_are_used_once_an_epoch_without_amplification() -> None:
    model = private_model()
    model.fit(features(), codes(), epochs=3, batch_size=8, verbose=0)
    expected = dp_sgd_guarantee(SIGMA, 1.0, 3, N**-1.1)
    assert same(model.guarantee(), expected)
    assert same(model.guarantee(DELTA), dp_sgd_guarantee(SIGMA, 1.0, 3, DELTA))


@pytest.mark.parametrize("with_vault", [True, False])
def test_poisson_batches_are_stated_as_sampled(with_vault: bool) -> None:
    model = private_model()
    model.fit(batches(vault() if with_vault else codes()), epochs=2, verbose=0)
    found = model.guarantee() if with_vault else model.guarantee(DELTA)
    assert same(found, dp_sgd_guarantee(SIGMA, 0.1, 6, DELTA))
    assert found.is_private


def test_denoisers_that_reveal_the_batch_are_stated_by_passes() -> None:
    labels = vault(epsilon=50.0)
    model = private_model(denoiser=SelfSpan(max_products=4))
    # 25 examples a batch, 4 batches a pass: an epoch of 6 steps uses an example twice at most.
    model.fit(batches(labels, q=0.25, steps=6), epochs=2, verbose=0)
    assert same(model.guarantee(), dp_sgd_guarantee(SIGMA, 1.0, 4, DELTA))
    assert labels.guarantee().epsilon == model.guarantee().epsilon


def test_the_next_epoch_is_counted_before_it_is_taken() -> None:
    model, labels, seen = private_model(), vault(), []
    watch = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: seen.append(
            (model.guarantee().epsilon, model.guarantee_after_next_epoch().epsilon)
        )
    )
    model.fit(batches(labels), epochs=3, callbacks=[watch], verbose=0)
    assert [now for now, _ in seen[1:]] == pytest.approx([after for _, after in seen[:-1]])
    with pytest.raises(RuntimeError, match="no fit is under way"):
        model.guarantee_after_next_epoch()


def test_of_unknown_data_nothing_is_promised() -> None:
    model = private_model()
    dataset = tf.data.Dataset.from_tensor_slices((features(), codes()))
    model.fit(dataset.batch(10, drop_remainder=True), verbose=0)
    assert model.guarantee().epsilon == math.inf
    assert any("not known how often" in text for text in model.guarantee().assumptions)
    model.fit(features(), codes(), verbose=0)  # known data do not mend it
    assert model.guarantee().epsilon == math.inf


@pytest.mark.parametrize("seeded", ["noise", "batches", "neither"])
def test_seeds_are_not_private(seeded: str) -> None:
    model = private_model(seed=1 if seeded == "noise" else None)
    model.fit(batches(codes(), seed=1 if seeded == "batches" else None), verbose=0)
    assert model.guarantee().seeded is (seeded != "neither")
    assert ("NOT PRIVATE: seeded" in str(model.guarantee())) is (seeded != "neither")


def test_a_model_compiled_anew_remembers_what_it_has_spent() -> None:
    model = private_model()
    model.fit(features(), codes(), verbose=0)
    once = model.guarantee(DELTA)
    model.compile(LabelDPOptimizer(keras.optimizers.SGD(0.1), 1.0, SIGMA), loss=LOSS)
    assert model.guarantee(DELTA) == once
    model.fit(features(), codes(), verbose=0)
    assert model.guarantee(DELTA).epsilon == dp_sgd_guarantee(SIGMA, 1.0, 2, DELTA).epsilon


def test_models_that_share_weights_share_what_was_spent_on_them() -> None:
    model = private_model()
    model.fit(features(), codes(), verbose=0)
    other = LabelDPModel.from_model(model)
    other.compile(LabelDPOptimizer(keras.optimizers.SGD(0.1), 1.0, SIGMA), loss=LOSS)
    assert other.guarantee(DELTA) == model.guarantee(DELTA)
    other.fit(features(), codes(), verbose=0)
    assert other.guarantee(DELTA).epsilon == dp_sgd_guarantee(SIGMA, 1.0, 2, DELTA).epsilon
    assert model.guarantee(DELTA).epsilon == other.guarantee(DELTA).epsilon


def test_nothing_is_charged_for_nothing() -> None:
    assert private_model().guarantee() == PrivacyGuarantee(epsilon=0.0)


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


def test_steps_that_a_callback_takes_besides_are_refused() -> None:
    model, labels = private_model(), vault()
    kept: list[Any] = []

    def take_more(*_: Any) -> None:
        kept.append((model.train_function, model.get_weights()))
        model.train_function(iter(tf.data.Dataset.from_tensors((features(), codes()))))

    callback = keras.callbacks.LambdaCallback(on_epoch_end=take_more)
    with pytest.raises(RuntimeError, match="has not been charged"):
        model.fit(batches(labels, steps=2), callbacks=[callback], verbose=0)
    function, weights = kept[0]
    assert unchanged(model, weights)
    # Kept until after fit, it takes no step either.
    with pytest.raises(tf.errors.OpError, match="has not been charged"):
        function(iter(tf.data.Dataset.from_tensors((features(), codes()))))
    assert unchanged(model, weights)


def test_a_charge_that_is_taken_out_of_the_callbacks_stops_training() -> None:
    model = private_model()
    before = model.get_weights()

    class Remove(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            spending_module._ChargeEpochs.on_epoch_begin = lambda *_: None

    original = spending_module._ChargeEpochs.on_epoch_begin
    try:
        with pytest.raises(RuntimeError, match="has not been charged"):
            model.fit(batches(vault()), callbacks=[Remove()], verbose=0)
    finally:
        spending_module._ChargeEpochs.on_epoch_begin = original
    assert unchanged(model, before)


def test_executions_that_take_more_steps_than_are_charged_are_refused() -> None:
    inputs = keras.Input((D,))
    model = LabelDPModel(inputs, keras.layers.Dense(K)(inputs))
    settings: dict[str, Any] = {"loss": LOSS, "steps_per_execution": 4}
    model.compile(LabelDPOptimizer(keras.optimizers.SGD(0.1), 1.0, 1.0), **settings)
    before = model.get_weights()
    with pytest.raises(ValueError, match="must be a multiple of steps_per_execution=4"):
        model.fit(batches(codes(), steps=6), verbose=0)
    assert unchanged(model, before)
    settings["steps_per_execution"] = "auto"
    with pytest.raises(ValueError, match="steps_per_execution='auto'"):
        model.compile(LabelDPOptimizer(keras.optimizers.SGD(0.1), 1.0, 1.0), **settings)


@pytest.mark.parametrize("how", ["exchange", "noise"])
def test_noise_that_is_changed_under_way_stops_the_next_charge(how: str) -> None:
    model = private_model()

    def change(*_: Any) -> None:
        if how == "exchange":
            model.optimizer.noise = ldp.training.GaussianNoise(30.0)
        else:
            model.optimizer.noise.noise_multiplier = 30.0

    callback = keras.callbacks.LambdaCallback(on_epoch_end=change)
    with pytest.raises(RuntimeError, match="noise_multiplier was changed"):
        model.fit(features(), codes(), epochs=2, callbacks=[callback], verbose=0)
    assert model.optimizer.history[0]["steps"] == 1


def test_callbacks_that_raise_before_the_charge_cost_nothing() -> None:
    def fail(*_: Any) -> None:
        raise OSError("no")

    labels, model = vault(), private_model()
    before = model.get_weights()
    callback = keras.callbacks.LambdaCallback(on_epoch_begin=fail)
    with pytest.raises(OSError, match="no"):
        model.fit(batches(labels), callbacks=[callback], verbose=0)
    assert unchanged(model, before)
    assert labels.guarantee().epsilon == 0.0


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_batches_of_true_labels_open_for_no_other_call(call: str) -> None:
    plain = keras.Sequential([keras.Input((D,)), keras.layers.Dense(K)])
    plain.compile("sgd", LOSS)
    calls: list[Callable[..., Any]] = [getattr(plain, call)]
    if call != "fit":
        calls.append(getattr(private_model(), call))
    for one in calls:
        with pytest.raises((TypeError, ValueError)) as caught:
            one(batches(codes()), verbose=0)
        assert "PoissonBatches" in str(caught.value)
