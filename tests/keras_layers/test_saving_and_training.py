"""Serialization, saved models, reductions and half precision of every class."""

from __future__ import annotations

import inspect
import json

import keras
import numpy as np
import pytest
from slow_cases import with_slow

from tf_labeldp.keras_layers import ALIBILoss, ForwardCorrectedLoss, LabelWeightedLoss, Mixup

MATRIX = [[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]]


@keras.saving.register_keras_serializable(package="tf_labeldp_tests")
def cubic_loss(y_true, y_pred):
    return keras.ops.sum(keras.ops.abs(y_true - y_pred) ** 3, axis=-1)


OBJECTS = {
    "weighted": lambda: LabelWeightedLoss(),
    "weighted_all": lambda: LabelWeightedLoss(
        "categorical_focal_crossentropy",
        from_logits=True,
        reduction="sum",
        name="n",
        dtype="float64",
    ),
    "weighted_instance": lambda: LabelWeightedLoss(
        keras.losses.CategoricalFocalCrossentropy(gamma=1.0)
    ),
    "weighted_callable": lambda: LabelWeightedLoss(cubic_loss),
    "forward": lambda: ForwardCorrectedLoss(MATRIX),
    "forward_all": lambda: ForwardCorrectedLoss(
        np.array(MATRIX), from_logits=True, reduction=None, name="n", dtype="float64"
    ),
    "alibi_all": lambda: ALIBILoss(
        "gaussian", 2, False, reduction="sum", name="n", dtype="float64"
    ),
    "mixup_all": lambda: Mixup(0.5, seed=3, name="n", dtype="float32"),
}
LOSSES = [key for key in OBJECTS if not key.startswith("mixup") and not key.endswith("_all")]
LOSSES = with_slow(LOSSES, set(LOSSES) - {"weighted", "weighted_callable", "forward"})
WEIGHTS = np.linalg.inv(np.array(MATRIX))[np.arange(12) % 3].astype("float32")
FEATURES = np.random.default_rng(0).normal(size=(12, 5)).astype("float32")


@pytest.mark.parametrize("key", OBJECTS)
def test_round_trip(key):
    before = OBJECTS[key]()
    config = before.get_config()
    serialized = json.loads(json.dumps(keras.saving.serialize_keras_object(before)))
    after = keras.saving.deserialize_keras_object(serialized)
    assert type(after) is type(before)
    assert after.get_config() == config
    arguments = set(inspect.signature(type(before)).parameters) - {"kwargs"}
    assert {*arguments, "name"} <= set(config)


def model_for(key):
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(3), keras.layers.Softmax(dtype="float32")]
    )
    model.compile("sgd", loss=OBJECTS[key]())
    return model


def targets_for(key):
    return np.arange(12) % 3 if key.startswith("forward") else WEIGHTS


@pytest.mark.parametrize("key", LOSSES)
def test_saved_model_loads_without_custom_objects(key, tmp_path):
    model = model_for(key)
    expected = model.evaluate(FEATURES, targets_for(key), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.loss.get_config() == model.loss.get_config()
    assert loaded.evaluate(FEATURES, targets_for(key), verbose=0) == pytest.approx(expected)


def test_saved_model_with_mixup(tmp_path):
    x, y = keras.Input((5,)), keras.Input((3,))
    model = keras.Model([x, y], list(Mixup(8.0, seed=1, name="mix")((x, y))))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.get_layer("mix").get_config() == model.get_layer("mix").get_config()
    for network in (model, loaded):
        np.testing.assert_array_equal(network.predict([FEATURES, WEIGHTS], verbose=0)[1], WEIGHTS)


@pytest.mark.parametrize(
    "make",
    [
        LabelWeightedLoss,
        lambda **options: LabelWeightedLoss("mse", **options),
        lambda **options: ForwardCorrectedLoss(MATRIX, **options),
        lambda **options: ALIBILoss("laplace", 1.0, False, **options),
    ],
    ids=["weighted", "weighted_mse", "forward", "alibi"],
)
def test_sample_weights_reductions_and_batches_of_one(make):
    y_pred = np.exp(FEATURES[:, :3])
    y_pred /= y_pred.sum(axis=1, keepdims=True)
    y_true = np.abs(WEIGHTS) / np.abs(WEIGHTS).sum(axis=1, keepdims=True)
    sample_weight = np.linspace(0.0, 3.0, 12)
    each = np.asarray(make(reduction=None)(y_true, y_pred))
    for reduction, expected in {
        "none": each * sample_weight,
        "sum": (each * sample_weight).sum(),
        "sum_over_batch_size": (each * sample_weight).mean(),
    }.items():
        found = make(reduction=reduction)(y_true, y_pred, sample_weight)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(make()(y_true[:1], y_pred[:1]), each[0], rtol=1e-5)


@pytest.mark.parametrize("loss", ["weighted", "forward"])
def test_half_precision_outputs(loss, mixed_precision):
    """Logits of a half-precision layer may be far out of its precise range."""
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
    instance = (
        LabelWeightedLoss(from_logits=True)
        if loss == "weighted"
        else ForwardCorrectedLoss(MATRIX, from_logits=True)
    )
    model.compile(keras.optimizers.SGD(1e-3), loss=instance)
    history = model.fit(1e3 * FEATURES, targets_for(loss), epochs=2, verbose=0)
    assert np.all(np.isfinite(history.history["loss"]))
