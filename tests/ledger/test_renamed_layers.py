"""Keras numbers the layers of a user's class again when it loads them: receipts find theirs."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
from slow_cases import with_slow

import tf_labeldp as ldp
from tf_labeldp.accounting import public_input

Y = np.arange(60) % 3
X = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)


@keras.saving.register_keras_serializable("renamed")
class Block(keras.layers.Layer):
    """A layer whose inner layer has no name of its own."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.dense = keras.layers.Dense(5)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return self.dense(x)


@keras.saving.register_keras_serializable("renamed")
class Net(keras.Model):
    """A model that is named by its caller, or numbered by Keras; and an untouched zero layer."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.first = Block()
        self.many = [keras.layers.Dense(5), keras.layers.Dense(3)]
        self.zero = keras.layers.Dense(3, kernel_initializer="zeros", trainable=False)

    def call(self, x):
        x = self.first(x)
        return self.many[1](self.many[0](x)) + self.zero(x)

    def get_config(self):
        return {"name": self.name}


@keras.saving.register_keras_serializable("renamed")
class Pair(keras.Model):
    """Two layers of one shape, of which the second keeps earlier weights of the first."""

    def __init__(self, name="pair"):
        super().__init__(name=name)
        self.body = keras.layers.Dense(3)
        self.earlier = keras.layers.Dense(3, trainable=False)

    def call(self, x):
        return self.body(x) + self.earlier(x)

    def get_config(self):
        return {}


def noisy(epsilon=2.0):
    labels = ldp.PrivateLabels(Y, 3, budget=ldp.PrivacyBudget(epsilon))
    return labels.randomize(ldp.RandomizedResponse(epsilon, 3))


def trained(kind=Net, **settings):
    model = kind(**settings)
    model.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True))
    ldp.fit(model, X, noisy(), epochs=1, batch_size=20, verbose=0)
    return model


def functional():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(3)(Block()(inputs)))
    model.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True))
    ldp.fit(model, X, noisy(), epochs=1, batch_size=20, verbose=0)
    return model


@pytest.fixture(params=with_slow((None, "net", "functional"), ("net", "functional")))
def model(request):
    keras.utils.clear_session()
    keras.layers.Dense(1)  # The names in the file begin with a number.
    if request.param == "functional":
        return functional()
    return trained(**({} if request.param is None else {"name": request.param}))


@pytest.fixture(params=["same", "fresh"])
def load(request, tmp_path):
    """Saves a model, and loads it where the names of its layers are taken, or where none are."""

    def saved_and_loaded(model, **settings):
        model.save(tmp_path / "model.keras")
        if request.param == "fresh":
            keras.utils.clear_session()
        return ldp.load_model(tmp_path / "model.keras", **settings)

    return saved_and_loaded


def test_the_statement_of_the_model_is_that_of_its_file(model, load):
    stated = ldp.guarantee(model)
    assert stated.epsilon == pytest.approx(2.0)
    loaded = load(model)
    assert ldp.guarantee(loaded) == stated
    assert int(loaded.optimizer.iterations.numpy()) == 3
    # Each trained layer carries the receipts, and keeps them.
    layers = [layer for layer in model._flatten_layers() if layer.trainable_weights]
    assert all(public_input(layer).receipts for layer in layers)
    of_layers = [
        [bool(public_input(layer).receipts) for layer in net._flatten_layers()]
        for net in (model, loaded)
    ]
    assert of_layers[0] == of_layers[1]
    # It is saved and trained further.
    assert ldp.guarantee(load(loaded)) == stated
    ldp.fit(loaded, X, noisy(1.0), epochs=1, verbose=0)
    assert ldp.guarantee(loaded).epsilon == pytest.approx(3.0)


def test_changed_weights_promise_nothing(model, load):
    weights = [weight for weight in model.weights if np.ptp(weight.numpy())]
    for weight in (weights[0], weights[-1]):
        before = weight.numpy()
        weight.assign(before + 0.5)
        # A model that the training has built knows its layers, too.
        assert not math.isfinite(ldp.guarantee(model).epsilon)
        assert not math.isfinite(ldp.guarantee(load(model, compile=weight is weights[0])).epsilon)
        weight.assign(before)
    assert math.isfinite(ldp.guarantee(load(model)).epsilon)


def test_steps_without_receipts_promise_nothing(model, load):
    loaded = load(model)
    for net in (model, loaded):
        net.fit(X, np.eye(3)[Y], verbose=0)
        assert not math.isfinite(ldp.guarantee(load(net)).epsilon)
    assert not math.isfinite(ldp.guarantee(load(model, compile=False)).epsilon)


def test_a_name_of_another_layer_gives_it_no_history(load):
    # In the file the trained layers have the names that fresh layers before them have now.
    keras.utils.clear_session()
    keras.layers.Dense(1)
    model = trained(name="net")
    assert "dense_1" in [layer.name for layer in model._flatten_layers()]
    before = model.many[1].kernel.numpy()
    model.many[1].kernel.assign(before + 0.5)
    loaded = load(model)
    assert not math.isfinite(ldp.guarantee(loaded).epsilon)
    assert not public_input(loaded.zero).receipts


def test_a_copy_of_the_trained_weights_with_their_name_covers_no_others(load):
    keras.utils.clear_session()
    keras.layers.Dense(1)
    model = trained(Pair)
    model.earlier.set_weights(model.body.get_weights())
    model.body.kernel.assign_add(np.full((4, 3), 0.5, np.float32))
    assert not math.isfinite(ldp.guarantee(model).epsilon)
    assert not math.isfinite(ldp.guarantee(load(model)).epsilon)
