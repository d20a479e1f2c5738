"""Errors of ``LabelDPModel``: by name, before any training; and where training stops."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from label_dp_cases import (
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
from tf_labeldp.accounting import public_input
from tf_labeldp.training import AltConv, Denoiser, LabelDPModel, LabelDPOptimizer
from tf_labeldp.vault import Rows

# On compile.


@pytest.mark.parametrize("make", [lambda: "sgd", lambda: _scaled(optimizer())])
def test_other_optimizers(make: Any) -> None:
    with pytest.raises(TypeError, match="must be a LabelDPOptimizer"):
        network().compile(make(), loss=LOSS)


def _scaled(inner: Any) -> Any:
    return keras.optimizers.LossScaleOptimizer(inner)


def test_one_optimizer_for_two_models() -> None:
    first, second, shared = network(), network(), optimizer()
    first.compile(shared, loss=LOSS)
    with pytest.raises(ValueError, match="belongs to another LabelDPModel"):
        second.compile(shared, loss=LOSS)
    first.compile(shared, loss="mse")  # again for the same one is fine
    second.compile(LabelDPOptimizer.from_config(shared.get_config()), loss=LOSS)


@pytest.mark.parametrize(
    "loss",
    [
        keras.losses.SparseCategoricalCrossentropy(),
        keras.losses.sparse_categorical_crossentropy,
        "binary_crossentropy",
    ],
)
def test_a_model_that_ends_in_logits_and_a_loss_of_probabilities(loss: Any) -> None:
    with pytest.raises(ValueError, match=r"ends in .*, a Dense layer.*from_logits=True"):
        network().compile(optimizer(), loss=loss)
    inputs = keras.Input((4,))
    for last in (keras.layers.Dense(3, "softmax"), keras.layers.Softmax()):
        hidden = keras.layers.Dense(3)(inputs)
        LabelDPModel(inputs, last(hidden)).compile(optimizer(), loss=loss)


# On fit, before anything is trained.


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"batch_size": 1}, "batch_size must be at least 2, got 1"),
        ({"class_weight": "balanced"}, "are a release"),
        ({"validation_split": 0.2}, "validation_split is not supported"),
        ({"steps_per_epoch": 3}, "steps_per_epoch is not supported"),
        ({"sample_weight": np.ones(N - 1)}, r"sample_weight of shape \(100,\), one per example"),
    ],
    ids=range(5),
)
def test_settings_of_fit_on_arrays(settings: dict[str, Any], expected: str) -> None:
    model = private_model()
    before = model.get_weights()
    with pytest.raises(ValueError, match=expected):
        model.fit(features(), codes(), verbose=0, **settings)
    assert unchanged(model, before)
    assert model.guarantee().headline == "no record of any label"
    assert public_input(model).receipts == ()


def test_settings_that_poisson_batches_settle() -> None:
    for settings, expected in (
        ({"batch_size": 4}, "together with batch_size"),
        ({"sample_weight": np.ones(N)}, "together with sample_weight"),
        ({"y": codes()}, "together with y"),
    ):
        with pytest.raises(ValueError, match=expected):
            private_model().fit(batches(codes()), **settings)


def test_a_vault_with_arrays() -> None:
    with pytest.raises(TypeError, match="poisson_batches"):
        private_model().fit(features(), vault())


def test_data_without_public_examples_or_of_unknown_sampling() -> None:
    with pytest.raises(ValueError, match="needs 4 public examples per step, and arrays have none"):
        private_model(denoiser=AltConv(4)).fit(features(), codes(), verbose=0)
    model, x = private_model(), features()
    for data in ((tf.data.Dataset.from_tensor_slices((x, codes())).batch(10),), (x,)):
        with pytest.raises(ValueError, match=r"or arrays x and y, got .*sampling of other data"):
            model.fit(*data, verbose=0)
    assert model.guarantee().headline == "no record of any label"


def test_a_model_without_its_compiled_optimizer() -> None:
    for call in (lambda model: model.fit(features(), codes()), lambda model: model.guarantee()):
        with pytest.raises(RuntimeError, match="must be compiled before fit"):
            call(network())
    model = private_model()
    for exchanged, expected in (
        (optimizer(0.01), "exchanged without compile"),
        (keras.optimizers.SGD(0.1), "must be compiled"),
    ):
        model.optimizer = exchanged
        with pytest.raises(RuntimeError, match=expected):
            model.fit(features(), codes(), verbose=0)


def test_fit_within_fit() -> None:
    model = private_model()
    again = watch(on_epoch_begin=lambda: model.fit(features(), codes()))
    with pytest.raises(RuntimeError, match="fit is under way"):
        model.fit(features(), codes(), callbacks=[again], verbose=0)
    model.fit(features(), codes(), verbose=0)


@pytest.mark.parametrize(("data_of", "rows"), [("arrays", True), ("vault", False), ("vault", True)])
def test_labels_of_a_form_that_the_loss_can_not_take(data_of: str, rows: bool) -> None:
    """Before anything is charged: a loss of codes on rows, and a loss of rows on codes."""
    labels: Any = np.eye(K)[codes()] if rows else codes()
    kind = keras.losses.SparseCategoricalCrossentropy() if rows else "categorical_crossentropy"
    model = network()
    model = LabelDPModel(model.inputs, keras.layers.Softmax()(model.outputs[0]))
    model.compile(optimizer(), loss=kind)
    if data_of == "vault":
        budget = ldp.PrivacyBudget(1e6, 1e-3)
        labels = ldp.PrivateLabels(labels, Rows(K) if rows else K, budget=budget)
    data = (features(), labels) if data_of == "arrays" else (batches(labels),)
    with pytest.raises(ValueError, match=r"can't take labels of shape \(n|loss of one-hot rows"):
        model.fit(*data, verbose=0)
    assert model.guarantee().headline == "no record of any label"
    assert data_of != "vault" or not labels.history()


class OwnCrossentropy(keras.losses.CategoricalCrossentropy):
    """A subclass of a loss of one-hot rows."""


def test_codes_for_a_loss_of_rows_are_refused_before_the_charge() -> None:
    labels, model = vault(), network()
    model.compile(optimizer(), loss=OwnCrossentropy(from_logits=True))
    with pytest.raises(ValueError, match=r"loss of class codes.*got a loss of one-hot rows"):
        model.fit(batches(labels), verbose=0)
    assert labels.receipts == ()


# Where training stops.


@pytest.mark.parametrize("eagerly", [False, True])
def test_a_model_that_overflows_stops_with_the_step_and_the_layer(eagerly: bool) -> None:
    x, kept = features(), []
    x[25] = 3e38  # finite, unlike its sum
    model = network(keras.layers.Dense(4, kernel_initializer="ones", name="first"))
    model.compile(optimizer(), loss=LOSS, run_eagerly=eagerly)
    keep = watch(on_train_batch_end=lambda: kept.append(model.get_weights()))
    with pytest.raises(FloatingPointError, match="step 2: the output of layer 'first'"):
        model.fit(x, codes(), batch_size=10, shuffle=False, verbose=0, callbacks=[keep])
    assert unchanged(model, kept[-1])
    assert np.all(np.isfinite(model.get_weights()[0]))


def test_a_denoiser_that_returns_nan_stops_before_the_weights_move() -> None:
    class Broken(Denoiser):
        reveals_batch = True

        def denoise(self, gradients: Any, vertices: Any, state: Any) -> Any:
            return [part / 0.0 - part / 0.0 for part in gradients], state, {}

    model = private_model(denoiser=Broken())
    before = model.get_weights()
    with pytest.raises(FloatingPointError, match=r"step 0: the noisy gradient of .*last/kernel"):
        model.fit(features(), codes(), verbose=0)
    assert unchanged(model, before)


def test_an_example_whose_gradient_is_nan_counts_for_nothing() -> None:
    """Its label made it so: stopping would show that."""

    def spoiled(y_true: Any, y_pred: Any) -> Any:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y_true, y_pred)
        return losses * tf.where(y_true == 1, np.nan, 1.0)

    found = []
    for loss, weights in ((spoiled, None), (LOSS, (codes() != 1).astype(np.float32))):
        model = network()
        model.compile(optimizer(noise_multiplier=1e-9), loss=loss)
        model.fit(features(), codes(), sample_weight=weights, batch_size=N, verbose=0)
        found.append(model.get_weights()[0])
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)
