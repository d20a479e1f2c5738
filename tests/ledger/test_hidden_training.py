"""Training that earlier statements missed, or understated."""

from __future__ import annotations

import collections
import functools
import math

import keras
import numpy as np
import pytest
from ledger_cases import (
    DENSE,
    D,
    K,
    X,
    Y,
    dp_sgd,
    in_the_clear,
    plain,
    private,
    stated,
    vault,
)

import tf_labeldp as ldp
from tf_labeldp.accounting import PublicInput
from tf_labeldp.mechanisms import HistogramMechanism, RandomizedResponse
from tf_labeldp.vault import Numbers


def draw(epsilon=1.0):
    return vault().randomize(RandomizedResponse(epsilon, K))


def compiled(model=None, **settings):
    model = plain() if model is None else model
    model.compile(keras.optimizers.SGD(0.1), settings.pop("loss", DENSE), **settings)
    return model


class Interrupts(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            raise KeyboardInterrupt


class StopsAtTheEnd(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise KeyboardInterrupt


def interrupted(model, noisy):
    with pytest.raises(KeyboardInterrupt):
        ldp.fit(model, X, noisy, callbacks=[Interrupts()], verbose=0)


def clear(model):
    model.fit(X, keras.utils.to_categorical(Y, K), verbose=0)


@pytest.mark.parametrize("how", ["model", "layers"])
def test_a_frozen_model_shows_its_steps(how):
    model = in_the_clear()
    for layer in [model] if how == "model" else model.layers:
        layer.trainable = False
    assert math.isinf(stated(model))
    top = compiled(keras.Sequential([keras.Input((D,)), model, keras.layers.Dense(K)]))
    ldp.fit(top, X, draw(), verbose=0)
    assert math.isinf(stated(top))
    wrapped = ldp.LabelDPModel.from_model(model)
    model.trainable = True
    assert math.isinf(stated(model)) and math.isinf(stated(wrapped))


def test_a_frozen_model_of_a_counted_training_is_counted():
    model = compiled()
    ldp.fit(model, X, draw(), verbose=0)
    model.trainable = False
    assert stated(model) == 1.0


@pytest.mark.parametrize("then", ["save", "compile", "nothing"])
def test_training_after_an_interrupted_one_shows(then, tmp_path):
    model = compiled()
    interrupted(model, draw())
    assert stated(model) == 1.0
    clear(model)
    if then == "save":
        model.save(tmp_path / "model.keras")
        assert math.isinf(stated(tmp_path / "model.keras"))
    elif then == "compile":
        compiled(model)
    assert math.isinf(stated(model))


def test_a_callback_that_was_interrupted_covers_no_new_optimizer():
    model, noisy = compiled(), draw()
    data = noisy.to_dataset(X, "posterior").batch(32)
    with pytest.raises(KeyboardInterrupt):
        model.fit(data, callbacks=[ldp.RecordReceipts(noisy), Interrupts()], verbose=0)
    assert stated(model) == 1.0
    compiled(model)
    assert math.isinf(stated(model))


@pytest.mark.parametrize("together", ["accumulated", "executed"])
def test_steps_that_were_not_taken_are_not_covered(together):
    model = plain()
    sizes = {"gradient_accumulation_steps": 2} if together == "accumulated" else {}
    model.compile(
        keras.optimizers.SGD(0.1, **sizes),
        DENSE,
        steps_per_execution=4 if together == "executed" else 1,
    )
    noisy = draw()
    data = noisy.to_dataset(X, "posterior").batch(40)  # three batches; an execution takes four
    with pytest.raises(KeyboardInterrupt):
        model.fit(data, callbacks=[ldp.RecordReceipts(noisy), StopsAtTheEnd()], verbose=0)
    clear(model)
    assert math.isinf(stated(model))


def test_a_model_of_one_weight_shows_its_training(tmp_path):
    x, y = X[:, :1], Y.astype(np.float32)

    def single():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model

    model = single()
    model.fit(x, y, verbose=0)
    assert math.isinf(stated(model))
    labels = ldp.PrivateLabels(y, Numbers(0, K), budget=ldp.PrivacyBudget(9.0))
    noisy = labels.randomize(ldp.mechanisms.LaplaceMechanism(1.0, 0.0, float(K)))
    model = single()
    ldp.fit(model, x, noisy, targets="values", verbose=0)
    assert stated(model) == 1.0
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "model.keras")
    assert math.isinf(stated(model)) and math.isinf(stated(tmp_path / "model.keras"))


def test_a_bare_array_is_refused_and_containers_of_noisy_labels_are_read():
    noisy = draw()
    with pytest.raises(TypeError, match="got ndarray, which does not record how it was made"):
        ldp.guarantee(noisy.values)
    objects = np.empty(1, object)
    objects[0] = noisy
    for container in (objects, collections.deque([noisy])):
        assert stated(container) == 1.0


class WithPrior(keras.losses.Loss):
    def __init__(self, prior):
        super().__init__()
        self.prior = prior

    def call(self, y_true, y_pred):
        return DENSE(y_true, y_pred)


def weighed(y_true, y_pred, prior=None):
    return keras.losses.categorical_crossentropy(y_true, y_pred, from_logits=True)


@pytest.mark.parametrize("way", ["loss object", "partial", "lambda layer", "attribute"])
def test_objects_of_the_user_inside_a_model_are_read(way):
    prior = vault().release(HistogramMechanism(5.0, K)).priors()
    if way == "lambda layer":
        middle = keras.layers.Lambda(functools.partial(lambda x, prior: x, prior=prior))
        model = compiled(keras.Sequential([keras.Input((D,)), middle, keras.layers.Dense(K)]))
    else:
        loss = {"loss object": WithPrior(prior), "partial": functools.partial(weighed, prior=prior)}
        model = compiled(loss=loss.get(way, DENSE))
        if way == "attribute":
            model.prior = prior
    ldp.fit(model, X, draw(), verbose=0)
    assert stated(model) == 6.0


@pytest.mark.parametrize("by", ["fit", "steps"])
def test_weights_that_a_callback_sets_are_counted(by):
    source = compiled()
    ldp.fit(source, X, draw(5.0), verbose=0)
    values = source.get_weights()

    class Sets(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.model.set_weights(values)

    frozen = keras.optimizers.SGD(0.0)
    if by == "fit":
        model = plain()
        model.compile(frozen, DENSE)
        ldp.fit(model, X, draw(), callbacks=[Sets()], verbose=0)
        assert stated(model) == 6.0
    else:
        model, labels = private(), vault(3.0)
        with pytest.raises(ldp.BudgetExceededError):
            dp_sgd(model, labels, callbacks=[Sets()])


def test_parts_that_released_indices_chose_carry_their_receipts():
    noisy = draw()
    chosen = PublicInput(np.flatnonzero(noisy.values == 0), noisy.receipts)
    labels = vault()
    for part in labels.split(chosen):
        assert part.randomize(RandomizedResponse(2.0, K)).guarantee().epsilon == 3.0


def test_weights_of_an_epoch_are_known(tmp_path):
    model, noisy = compiled(), draw()
    best = tmp_path / "best.weights.h5"
    keep = keras.callbacks.ModelCheckpoint(best, save_weights_only=True)
    stop = keras.callbacks.EarlyStopping("loss", patience=0, restore_best_weights=True)
    ldp.fit(model, X, noisy, epochs=3, callbacks=[keep], verbose=0)
    model.load_weights(best)
    assert stated(model) == 1.0
    data = noisy.to_dataset(X, "posterior").batch(32)
    record = ldp.RecordReceipts(noisy)
    model.fit(data, epochs=3, callbacks=[record, stop], verbose=0)
    assert stated(model) == 1.0


def test_a_layer_of_a_loaded_model_can_be_declared(tmp_path):
    model = compiled()
    ldp.fit(model, X, draw(), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    ldp.declare(loaded.layers[0], "nothing more")
    assert stated(loaded) == 1.0


def test_a_frozen_layer_that_is_trained_after_loading_is_known(tmp_path):
    model = plain()
    model.layers[0].trainable = False
    compiled(model)
    ldp.fit(model, X, draw(), verbose=0)
    model.layers[0].trainable = True
    model.save(tmp_path / "model.keras")
    assert stated(model) == stated(tmp_path / "model.keras") == 1.0


def test_outputs_of_another_width_are_refused():
    model = keras.Sequential([keras.Input((D,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=f"expected a model with {K} outputs"):
        ldp.fit(model, X, draw(), verbose=0)
