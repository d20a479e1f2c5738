"""What ``LabelDPModel`` refuses, by name, before anything is trained; and where it stops."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_labeldp as ldp
from tf_labeldp.accounting import public_input
from tf_labeldp.data import poisson_batches
from tf_labeldp.training import AltConv, Denoiser, LabelDPModel, LabelDPOptimizer

N, D, K = 30, 3, 3
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.normal(size=(N, D)).astype(np.float32), np.arange(N) % K


def optimizer(rate: Any = 0.1, **settings: Any) -> LabelDPOptimizer:
    settings = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, **settings}
    return LabelDPOptimizer(keras.optimizers.SGD(rate), **settings)


def uncompiled(*layers: Any) -> LabelDPModel:
    inputs = x = keras.Input((D,))
    for layer in (*layers, keras.layers.Dense(K, name="last")):
        x = layer(x)
    return LabelDPModel(inputs, x)


def private_model(**settings: Any) -> LabelDPModel:
    model = uncompiled()
    model.compile(optimizer(**settings), loss=LOSS)
    return model


# On compile.


@pytest.mark.parametrize("given", ["sgd", "scaled"])
def test_other_optimizers(given: Any) -> None:
    given = keras.optimizers.LossScaleOptimizer(optimizer()) if given == "scaled" else given
    with pytest.raises(TypeError, match="must be a LabelDPOptimizer"):
        uncompiled().compile(given, loss=LOSS)


def test_one_optimizer_for_two_models() -> None:
    first, second, shared = uncompiled(), uncompiled(), optimizer()
    first.compile(shared, loss=LOSS)
    with pytest.raises(ValueError, match="belongs to another LabelDPModel"):
        second.compile(shared, loss=LOSS)
    first.compile(shared, loss="mse")  # again for the same one is fine
    second.compile(LabelDPOptimizer.from_config(shared.get_config()), loss=LOSS)


# On fit, before anything is trained.


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"batch_size": 1}, "batch_size must be at least 2, got 1"),
        ({"class_weight": {0: 2.0}}, "class_weight is not supported"),
        ({"validation_split": 0.2}, "validation_split is not supported"),
        ({"steps_per_epoch": 3}, "steps_per_epoch is not supported"),
        ({"sample_weight": np.ones(N - 1)}, "one row for each example"),
    ],
    ids=range(5),
)
def test_settings_of_fit_on_arrays(settings: dict[str, Any], expected: str) -> None:
    model = private_model()
    before = model.get_weights()
    with pytest.raises(ValueError, match=expected):
        model.fit(*data(), verbose=0, **settings)
    np.testing.assert_array_equal(before[0], model.get_weights()[0])
    assert model.guarantee().epsilon == 0.0
    assert public_input(model).receipts == ()


def test_settings_that_poisson_batches_settle() -> None:
    x, y = data()
    batches = poisson_batches(x, y, sampling_probability=0.5, steps=2)
    for name, value in (("batch_size", 4), ("sample_weight", np.ones(N))):
        with pytest.raises(ValueError, match=f"together with {name}"):
            private_model().fit(batches, **{name: value})
    with pytest.raises(ValueError, match="together with y"):
        private_model().fit(batches, y)
    with pytest.raises(ValueError, match=r"class_weight is not supported.*inside the loss"):
        private_model().fit(batches, class_weight={0: 1.0})


def test_a_vault_beside_arrays() -> None:
    x, y = data()
    labels = ldp.PrivateLabels(y, K, budget=ldp.PrivacyBudget(1.0, 1e-3))
    with pytest.raises(TypeError, match="poisson_batches"):
        private_model().fit(x, labels)


def test_alt_denoisers_without_public_examples() -> None:
    x, y = data()
    with pytest.raises(ValueError, match="needs 4 public examples in each step, and the data"):
        private_model(denoiser=AltConv(4)).fit(x, y)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(10, drop_remainder=True)
    with pytest.raises(ValueError, match="needs 4 public examples in each step, and the data"):
        private_model(denoiser=AltConv(4)).fit(dataset, allow_unaccounted=True, verbose=0)


def test_microbatches_that_do_not_divide() -> None:
    model, (x, y) = private_model(num_microbatches=5), data()
    model.fit(x, y, batch_size=10, verbose=0)
    with pytest.raises(ValueError, match="num_microbatches=5 must divide batch_size=12"):
        model.fit(x, y, batch_size=12, verbose=0)


def test_microbatches_of_sampled_batches() -> None:
    """Amplification by sampling is for single examples: see ``TrainingPlan``."""
    x, y = data()
    model = private_model(num_microbatches=4)
    with pytest.raises(ValueError, match="amplification by sampling does not hold"):
        model.fit(poisson_batches(x, y, sampling_probability=0.5, steps=2, buffer_size=24))
    every = poisson_batches(x, y, sampling_probability=1.0, steps=2, buffer_size=32)
    model.fit(every, verbose=0)  # no amplification is claimed


def test_datasets_of_batches_of_unknown_size() -> None:
    dataset = tf.data.Dataset.from_tensor_slices(data()).batch(10)
    with pytest.raises(ValueError, match="fixed number of rows"):
        private_model().fit(dataset, allow_unaccounted=True, verbose=0)


def test_a_model_that_is_not_compiled() -> None:
    for call in (lambda model: model.fit(*data()), lambda model: model.guarantee()):
        with pytest.raises(RuntimeError, match="must be compiled before fit"):
            call(uncompiled())


def test_an_optimizer_that_is_exchanged_without_compile() -> None:
    model = private_model()
    model.optimizer = optimizer(noise_multiplier=0.01)
    with pytest.raises(RuntimeError, match="exchanged without compile"):
        model.fit(*data(), verbose=0)
    model.optimizer = keras.optimizers.SGD(0.1)
    with pytest.raises(RuntimeError, match="must be compiled"):
        model.fit(*data(), verbose=0)


def test_fit_within_fit() -> None:
    model = private_model()
    again = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: model.fit(*data()))
    with pytest.raises(RuntimeError, match="fit is under way"):
        model.fit(*data(), callbacks=[again], verbose=0)
    model.fit(*data(), verbose=0)


# Where training stops.


@pytest.mark.parametrize("eagerly", [False, True])
def test_nan_features_stop_with_the_step_and_the_layer(eagerly: bool) -> None:
    x, y = data()
    x[25] = np.nan
    model = uncompiled(keras.layers.Dense(4, name="first"))
    model.compile(optimizer(), loss=LOSS, run_eagerly=eagerly)
    kept: list[Any] = []
    keep = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **__: kept.append(model.get_weights())
    )
    with pytest.raises(FloatingPointError, match="step 2: the output of layer 'first'"):
        model.fit(x, y, batch_size=10, shuffle=False, verbose=0, callbacks=[keep])
    for a, b in zip(kept[-1], model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.all(np.isfinite(model.get_weights()[0]))


def test_a_denoiser_that_returns_nan_stops_before_the_weights_move() -> None:
    class Broken(Denoiser):
        reveals_batch = True

        def denoise(self, gradients: Any, vertices: Any, state: Any) -> Any:
            return [part / 0.0 - part / 0.0 for part in gradients], state, {}

    model = private_model(denoiser=Broken())
    before = model.get_weights()
    with pytest.raises(FloatingPointError, match=r"step 0: the noisy gradient of .*last/kernel"):
        model.fit(*data(), verbose=0)
    np.testing.assert_array_equal(before[0], model.get_weights()[0])


def test_an_example_whose_gradient_is_nan_counts_for_nothing() -> None:
    """Its label made it so: stopping would show that."""
    x, y = data()

    def spoiled(y_true: Any, y_pred: Any) -> Any:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y_true, y_pred)
        return losses * tf.where(y_true == 1, np.nan, 1.0)

    found = []
    for loss, weights in ((spoiled, None), (LOSS, (y != 1).astype(np.float32))):
        keras.utils.set_random_seed(0)
        model = uncompiled()
        model.compile(optimizer(noise_multiplier=1e-9), loss=loss)
        model.fit(x, y, sample_weight=weights, batch_size=N, verbose=0)
        found.append(model.get_weights()[0])
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)


@pytest.mark.parametrize(
    "loss",
    [
        keras.losses.SparseCategoricalCrossentropy(),
        keras.losses.sparse_categorical_crossentropy,
        "binary_crossentropy",
    ],
)
def test_a_model_that_ends_in_logits_and_a_loss_of_probabilities(loss: Any) -> None:
    model = uncompiled()
    with pytest.raises(ValueError, match=r"ends in .*, a Dense layer.*from_logits=True"):
        model.compile(optimizer(), loss=loss)
    inputs = keras.Input((4,))
    for last in (keras.layers.Dense(3, "softmax"), keras.layers.Softmax()):
        hidden = keras.layers.Dense(3)(inputs)
        LabelDPModel(inputs, last(hidden)).compile(optimizer(), loss=loss)


def vault_of(y: Any) -> ldp.PrivateLabels:
    return ldp.PrivateLabels(y, int(y.max()) + 1, budget=ldp.PrivacyBudget(1e6, 1e-3))


@pytest.mark.parametrize(("data_of", "rows"), [("arrays", True), ("vault", False), ("vault", True)])
def test_labels_of_a_form_that_the_loss_can_not_take(data_of: str, rows: bool) -> None:
    """Before anything is charged: a loss of codes on rows, and one of rows on codes."""
    (x, y), model = data(), uncompiled()
    labels: Any = np.eye(K)[y] if rows else y
    kind = keras.losses.SparseCategoricalCrossentropy() if rows else "categorical_crossentropy"
    model = LabelDPModel(model.inputs, keras.layers.Softmax()(model.outputs[0]))
    model.compile(optimizer(), loss=kind)
    if data_of == "vault":
        budget = ldp.PrivacyBudget(1e6, 1e-3)
        labels = ldp.PrivateLabels(
            labels, **{"num_labels" if rows else "num_classes": K}, budget=budget
        )
    with pytest.raises(ValueError, match=r"can't take labels of shape \(n|takes one-hot rows"):
        if data_of == "arrays":
            model.fit(x, labels, verbose=0)
        else:
            model.fit(poisson_batches(x, labels, sampling_probability=0.5, steps=2), verbose=0)
    assert model.guarantee().epsilon == 0.0
    assert data_of != "vault" or not labels.history()


class OwnCrossentropy(keras.losses.CategoricalCrossentropy):
    """A subclass of a loss of one-hot rows."""


def test_codes_for_a_loss_of_rows_are_refused_before_the_charge() -> None:
    x, _ = data()
    labels, model = vault_of(np.arange(N) % K), uncompiled()
    model.compile(optimizer(), loss=OwnCrossentropy(from_logits=True))
    batches = poisson_batches(x, labels, sampling_probability=0.5, steps=2)
    with pytest.raises(ValueError, match=r"class codes, and the loss takes one-hot rows"):
        model.fit(batches, verbose=0)
    assert labels.receipts == ()
