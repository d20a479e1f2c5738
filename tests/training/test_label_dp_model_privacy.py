"""``LabelDPModel`` shows no label, and nothing that is not private unless asked."""

from __future__ import annotations

import io
import itertools
import logging
import math
import traceback
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from label_dp_cases import (
    DELTA,
    LOSS,
    K,
    N,
    batches,
    codes,
    features,
    network,
    optimizer,
    private_model,
    unchanged,
    vault,
    watch,
)

import tf_labeldp as ldp
from tf_labeldp.plugins import OutputLosses
from tf_labeldp.training import PrivacySpent
from tf_labeldp.vault import Numbers

SECRET = 31337


@pytest.mark.holds("training.PrivateStep")
def test_logs_hold_no_loss_and_no_metric_of_training_labels() -> None:
    seen: list[dict[str, Any]] = []
    keep = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(dict(logs)),
        on_epoch_end=lambda epoch, logs: seen.append(dict(logs)),
    )
    model = private_model()
    history = model.fit(batches(vault()), epochs=2, callbacks=[keep], verbose=0)
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

    def turn_on() -> None:
        model.report_training_metrics = True

    with pytest.raises(RuntimeError, match="while fit is under way"):
        model.fit(batches(vault()), callbacks=[watch(on_epoch_begin=turn_on)], verbose=0)


@pytest.mark.holds("training.PrivateStep")
def test_other_labels_give_the_same_kinds_of_logs_and_other_noisy_values() -> None:
    found = []
    for shift in (0, 1):
        model = private_model(insecure_seed=3)
        history = model.fit(batches(codes(shift), insecure_seed=4), epochs=2, verbose=0).history
        found.append(history)
    assert set(found[0]) == set(found[1])
    assert found[0] != found[1]  # they do come from the gradients


def test_the_norm_in_the_log_is_that_of_the_noisy_sum() -> None:
    """So it is a function of what has been made private."""
    model = private_model(insecure_seed=3)
    before = model.get_weights()
    history = model.fit(features(), codes(), batch_size=N, verbose=0).history
    moved = [(a - b) * N / 0.5 for a, b in zip(before, model.get_weights(), strict=True)]
    norm = math.sqrt(sum(float(np.sum(part.astype(np.float64) ** 2)) for part in moved))
    assert history["noisy_gradient_norm"][0] == pytest.approx(norm, rel=1e-4)


def texts_of(value: Any, depth: int = 4) -> list[str]:
    """Returns the texts of an object, and of the objects of training inside it."""
    if not depth or not type(value).__module__.startswith("tf_labeldp.training"):
        return []
    inside = (texts_of(part, depth - 1) for part in vars(value).values())
    return [repr(value), *itertools.chain(*inside)]


def test_no_text_quotes_a_label() -> None:
    """Labels are numbers that occur nowhere else."""
    labels, budget = np.full(N, SECRET + 0.625, np.float32), ldp.PrivacyBudget(5.0, DELTA)
    model = network(units=1)
    model.compile(optimizer(1.0), loss="mse")
    out, err, log = io.StringIO(), io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger().addHandler(handler)
    texts = []
    try:
        with redirect_stdout(out), redirect_stderr(err):
            data = batches(ldp.PrivateLabels(labels, Numbers(0.0, 4e4), budget=budget))
            model.fit(data, epochs=2, verbose=2, callbacks=[PrivacySpent()])
            model.fit(features(), labels, verbose=2)
            texts += [repr(data), repr(model), str(model.guarantee())]
            keep = watch(on_epoch_begin=lambda: texts.extend(texts_of(model)))
            model.fit(features(), labels, verbose=0, callbacks=[keep])
            model.summary()
    finally:
        logging.getLogger().removeHandler(handler)
    texts += [out.getvalue(), err.getvalue(), log.getvalue()]
    assert len("".join(texts)) > 500
    assert not any(str(SECRET) in text for text in texts)


@pytest.mark.parametrize("eagerly", [False, True])
def test_errors_of_tensorflow_that_quote_labels_are_withheld(
    eagerly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def quoting(losses: Any, y_true: Any, y_pred: Any) -> Any:
        message = tf.Assert(tf.reduce_all(y_true < 0), [y_true], summarize=1000)
        with tf.control_dependencies([message] if message is not None else []):
            return tf.reduce_sum(y_pred, axis=1)

    monkeypatch.setattr(OutputLosses, "__call__", quoting)
    model = network()
    loss = keras.losses.MeanSquaredError()
    model.compile(optimizer(method="ghost"), loss=loss, run_eagerly=eagerly)
    with pytest.raises(RuntimeError, match="text is withheld") as caught:
        model.fit(features(), np.full(N, SECRET), verbose=0)
    shown = "".join(traceback.format_exception(caught.value))
    assert str(SECRET) not in shown
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None


def looks_up(y_true: Any, y_pred: Any) -> Any:
    """A loss of one's own, whose lookup quotes a label that it does not find."""
    codes = tf.reshape(tf.cast(y_true, tf.int32), [-1])
    return -tf.gather(tf.nn.log_softmax(y_pred), codes, batch_dims=1)


@pytest.mark.parametrize(
    ("source", "loss"), [("arrays", LOSS), ("vault", LOSS), ("vault", looks_up)]
)
def test_codes_without_an_output_are_found_before_tensorflow_quotes_them(
    source: str, loss: Any
) -> None:
    model = network(units=K - 1)
    model.compile(optimizer(), loss=loss)
    before = model.get_weights()
    data = (features(), codes()) if source == "arrays" else (batches(vault()),)
    with pytest.raises(ValueError, match="one unit for each class"):
        model.fit(*data, verbose=0)
    assert unchanged(model, before)
