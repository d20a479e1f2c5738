"""Keras's features around ``fit``, with a ``LabelDPModel``."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import tf_labeldp as ldp
from tf_labeldp.accounting import public_input
from tf_labeldp.data import poisson_batches
from tf_labeldp.training import GaussianNoise, LabelDPModel, LabelDPOptimizer

N, D, K = 40, 3, 3
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def data() -> tuple[np.ndarray, np.ndarray]:
    y = np.arange(N) % K
    rng = np.random.default_rng(1)
    return (2.0 * np.eye(D)[y] + 0.3 * rng.normal(size=(N, D))).astype(np.float32), y


def optimizer(**settings: Any) -> LabelDPOptimizer:
    settings = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "insecure_seed": 1, **settings}
    return LabelDPOptimizer(keras.optimizers.SGD(1.0), **settings)


def private_model(**settings: Any) -> LabelDPModel:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((D,))
    x = keras.layers.Dense(6, activation="tanh")(inputs)
    model = LabelDPModel(inputs, keras.layers.Dense(K)(x))
    model.compile(**{"optimizer": optimizer(), "loss": LOSS, **settings})
    return model


def accuracy(model: keras.Model) -> float:
    x, y = data()
    return float(np.mean(model.predict(x, verbose=0).argmax(axis=1) == y))


@pytest.mark.slow
def test_fit_evaluate_and_predict() -> None:
    x, y = data()
    model = private_model(metrics=["accuracy"])
    batches = poisson_batches(x, y, sampling_probability=0.5, steps=2, insecure_seed=0)
    model.fit(batches, epochs=15, verbose=0)
    assert accuracy(model) > 0.9
    loss, found = model.evaluate(x, y, verbose=0)
    assert found == pytest.approx(accuracy(model))
    assert loss == pytest.approx(float(LOSS(y, model.predict(x, verbose=0))), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "float64"])
def test_precision_policies(policy: str) -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model = private_model()
        assert isinstance(model.optimizer, LabelDPOptimizer)  # no scaling of losses around it
        x, y = data()
        model.fit(x, y, batch_size=20, epochs=15, verbose=0)
        assert accuracy(model) > 0.9
    finally:
        keras.config.set_dtype_policy(before)


def test_callbacks_that_watch_validation_and_set_the_rate() -> None:
    x, y = data()
    model = private_model(metrics=["accuracy"])
    rates = []
    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.5 / (epoch + 1)),
        keras.callbacks.EarlyStopping("val_loss", patience=0, min_delta=1e9),
        keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda *_, **__: rates.append(float(model.optimizer.learning_rate))
        ),
    ]
    model.fit(x, y, epochs=9, validation_data=(x, y), callbacks=callbacks, verbose=0, batch_size=20)
    np.testing.assert_allclose(rates, [0.5, 0.25])  # stopped: no improvement is large enough
    assert float(model.optimizer.inner_optimizer.learning_rate) == pytest.approx(0.25)


def test_a_list_of_callbacks_made_by_keras_is_not_changed() -> None:
    x, y = data()
    model = private_model()
    callbacks = keras.callbacks.CallbackList([keras.callbacks.Callback()], model=model)
    size = len(callbacks.callbacks)
    model.fit(x, y, callbacks=callbacks, verbose=0)
    model.fit(x, y, callbacks=callbacks, verbose=0)
    assert len(callbacks.callbacks) == size
    kinds = [receipt.kind for receipt in public_input(model).receipts]
    assert kinds == ["steps"] * 2  # each was charged once


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "jit_compile"),
    [
        ("sparse_categorical_crossentropy", True),
        ("categorical_crossentropy", False),
        ("binary_crossentropy", True),
    ],
)
def test_losses_by_name_of_probabilities(loss: str, jit_compile: bool) -> None:
    x, y = data()
    weights = []
    for method in ("auto", "vectorized"):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((D,))
        units, activation = (K, "softmax") if "categorical" in loss else (1, "sigmoid")
        model = LabelDPModel(inputs, keras.layers.Dense(units, activation=activation)(inputs))
        noise = GaussianNoise(1e-9, source="device" if jit_compile else "host")
        inner = keras.optimizers.SGD(1.0)
        private = LabelDPOptimizer(inner, l2_norm_clip=1.0, noise=noise, method=method)
        model.compile(private, loss=loss, jit_compile=jit_compile)
        labels = np.eye(K, dtype=np.float32)[y] if loss.startswith("cat") else y
        labels = labels if units == K else (y == 1).astype(np.float32)[:, None]
        before = model.evaluate(x, labels, verbose=0)
        model.fit(x, labels, epochs=5, batch_size=20, shuffle=False, verbose=0)
        assert model.evaluate(x, labels, verbose=0) < 0.7 * before
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["functional", "subclassed"])
def test_a_model_that_exists_is_made_private_and_shares_its_weights(kind: str) -> None:
    x, y = data()
    layers = [keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(K)]
    given = None
    if kind == "functional":
        inputs = keras.Input((D,))
        model: Any = keras.Model(inputs, layers[1](layers[0](inputs)))
    else:

        class Two(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = layers

            def call(self, x: Any) -> Any:
                return self.second(self.first(x))

        model, given = Two(), keras.Input((D,))
        with pytest.raises(ValueError, match=r"Give them: LabelDPModel\.from_model"):
            LabelDPModel.from_model(model)
    private = LabelDPModel.from_model(model, inputs=given)
    private.compile(optimizer(), loss=LOSS)
    private.fit(x, y, epochs=15, batch_size=20, verbose=0)
    plain = keras.Model(private.input, private.output)
    assert not isinstance(plain, LabelDPModel)
    for one in (model, plain):
        np.testing.assert_array_equal(one.predict(x, verbose=0), private.predict(x, verbose=0))
        assert ldp.guarantee(one, 1e-3).epsilon == private.guarantee(1e-3).epsilon
    assert accuracy(model) > 0.9
