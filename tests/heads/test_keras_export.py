"""A fitted head as a Keras model: the same outputs, from features and from raw inputs; saved."""

from __future__ import annotations

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp import PrivacyBudget, PrivateLabels, guarantee
from tf_labeldp.accounting import ReceiptError
from tf_labeldp.features import RandomFourierFeatures
from tf_labeldp.heads import NoiseCluster, PrivateLogisticRegression, PrivateRidge

pytestmark = pytest.mark.usefixtures("fits_apart")


def saved_and_loaded(model, folder):
    model.save(folder / "head.keras")
    return keras.models.load_model(folder / "head.keras")


def outputs(one, raw, kind):
    return one.predict(raw)[:, np.newaxis] if kind == "numbers" else one.predict_proba(raw)


@pytest.mark.parametrize(
    ("kind", "route"),
    [
        ("ridge", "keras"),
        ("ridge", "weights.h5"),
        ("ridge", "checkpoint"),
        ("clusters", "keras"),
        ("clusters", "weights.h5"),
        ("clusters", "checkpoint"),
    ],
)
def test_the_files_of_a_model_keep_the_receipts(kind, route, examples, tmp_path, forget):
    head = PrivateRidge if kind == "ridge" else NoiseCluster
    told = {"epsilon": 1.5, "delta": 1e-5} | ({} if kind == "ridge" else {"num_clusters": 5})
    labels = PrivateLabels(examples.classes, 3, budget=PrivacyBudget(2.0, 1e-4))
    model = head(**told).fit(examples.features, labels).to_keras()
    other = keras.models.clone_model(model)
    if kind == "ridge":
        assert guarantee(other).headline == "no record of any label"  # weights of its own
    forget()  # as in another program
    if route == "keras":
        other = saved_and_loaded(model, tmp_path)
    elif route == "weights.h5":
        model.save_weights(tmp_path / "head.weights.h5")
        other.load_weights(tmp_path / "head.weights.h5")
    else:
        path = tf.train.Checkpoint(model=model).save(str(tmp_path / "head"))
        tf.train.Checkpoint(model=other).restore(path).expect_partial()
    some = examples.features[:20]
    np.testing.assert_array_equal(other(some), model(some))
    assert guarantee(other) == guarantee(model)
    assert guarantee(other).epsilon == 1.5
    part = keras.Model(other.inputs, other.get_layer("head").output)
    assert guarantee(part).epsilon == 1.5


def test_damaged_receipts_in_a_file_are_refused(examples, tmp_path):
    model = PrivateRidge(1.0, 1e-5, num_classes=3).fit(examples.features, examples.classes)
    model = model.to_keras()
    layer = model.get_layer("head")
    layer.label_dp_receipts = layer.label_dp_receipts[:-9]
    with pytest.raises(ReceiptError, match="damaged"):
        guarantee(saved_and_loaded(model, tmp_path))


@pytest.mark.slow
def test_a_saved_model_runs_without_this_package(examples, tmp_path):
    one = PrivateRidge(5.0, 1e-5, num_classes=3).fit(examples.features, examples.classes)
    one.to_keras().export(tmp_path / "served", verbose=False)
    np.save(tmp_path / "rows.npy", examples.features[:4])
    code = (
        "import sys, numpy as np, tensorflow as tf; sys.modules['tf_labeldp'] = None\n"
        "model = tf.saved_model.load(sys.argv[1] + '/served')\n"
        "rows = np.load(sys.argv[1] + '/rows.npy').astype('float32')\n"
        "np.save(sys.argv[1] + '/found.npy', model.serve(rows))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=tmp_path)
    expected = one.predict_proba(examples.features[:4])
    np.testing.assert_allclose(np.load(tmp_path / "found.npy"), expected, atol=2e-5)


def test_the_unit_of_features_makes_no_difference(examples):
    unit = 1e-6
    one = PrivateRidge(5.0, 1e-5, num_classes=3, insecure_seed=0)
    one.fit(examples.features * unit, examples.classes)
    some = (examples.features[:50] * unit).astype(np.float32)
    np.testing.assert_allclose(one.to_keras()(some), one.predict_proba(some), atol=2e-5)


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_half_precision_policies_keep_the_digits(kind, examples):
    """In half precision numbers end at 65,504."""
    arguments, labels = examples.kinds[kind]
    if kind == "numbers":
        arguments, labels = {"low": 1e5, "high": 3e5}, 1e4 * labels
    one = PrivateRidge(5.0, 1e-5, insecure_seed=0, **arguments).fit(examples.features, labels)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        found = one.to_keras()(examples.features[:50])
    finally:
        keras.config.set_dtype_policy(before)
    np.testing.assert_allclose(found, outputs(one, examples.features[:50], kind), 1e-5, 2e-5)


IMAGES = np.random.default_rng(1).random((300, 8, 8)).astype(np.float32)
IMAGE_LABELS = np.arange(300) % 2
IMAGES[:, :4] += 0.6 * IMAGE_LABELS[:, None, None]


def keras_encoder(kind):
    layers = [keras.layers.Flatten(), keras.layers.Dense(9, "tanh")]
    if kind == "sequential":
        return keras.Sequential([keras.Input((8, 8)), *layers])
    if kind == "built-on-first-call":
        return keras.Sequential(layers)
    inputs = keras.Input((8, 8), name="pixels")
    return keras.Model(inputs, layers[1](layers[0](inputs)))


@pytest.mark.parametrize("kind", ["sequential", "built-on-first-call", "functional"])
def test_a_keras_encoder_is_put_in_front(kind, tmp_path):
    encoder = keras_encoder(kind)
    settings = {"num_classes": 2, "insecure_seed": 0}
    one = PrivateRidge(20.0, 1e-4, encoder=encoder, **settings).fit(IMAGES, IMAGE_LABELS)
    model = one.to_keras()
    for found in (model, saved_and_loaded(model, tmp_path)):
        np.testing.assert_allclose(found(IMAGES), one.predict_proba(IMAGES), atol=2e-5)
    features = encoder.predict(IMAGES, verbose=0)
    before = PrivateRidge(20.0, 1e-4, **settings).fit(features, IMAGE_LABELS)
    np.testing.assert_allclose(before.to_keras(encoder)(IMAGES), model(IMAGES), atol=2e-5)


def test_a_feature_map_of_a_table_is_put_in_front(tmp_path):
    """The model takes a dict of columns (m, 1)."""
    rng = np.random.default_rng(2)
    labels = rng.integers(0, 2, 300)
    table = {
        "age": (rng.normal(40.0, 10.0, 300) + 15.0 * labels).astype(np.float32),
        "rooms": rng.integers(1, 9, 300),
        "job": np.where(rng.random(300) < 0.2 + 0.5 * labels, "smith", "baker"),
    }
    encoder = RandomFourierFeatures(num_features=20).fit(table)
    one = PrivateLogisticRegression(20.0, 1e-4, num_classes=2, insecure_seed=0, encoder=encoder)
    one.fit(table, labels)
    columns = {name: keras.ops.convert_to_tensor(v[:, None]) for name, v in table.items()}
    model = one.to_keras()
    assert set(model.input) == set(table)
    expected = one.predict_proba(table)
    for found in (model, saved_and_loaded(model, tmp_path)):
        np.testing.assert_allclose(found(columns), expected, atol=1e-4)


class Subclassed(keras.Model):
    def call(self, x):
        return keras.ops.reshape(x, (-1, 64))


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        (lambda images: images.reshape(len(images), -1), "a Keras model, got function"),
        (Subclassed(), "with Keras inputs, got a Subclassed. Wrap it"),
    ],
    ids=["function", "subclassed"],
)
def test_an_encoder_that_cannot_be_exported_says_what_to_do(encoder, message):
    one = PrivateRidge(20.0, 1e-4, num_classes=2, insecure_seed=0, encoder=encoder)
    one.fit(IMAGES, IMAGE_LABELS)
    with pytest.raises(TypeError, match=message):
        one.to_keras()
    flat = keras.Sequential([keras.Input((8, 8)), keras.layers.Flatten()])
    np.testing.assert_allclose(one.to_keras(flat)(IMAGES), one.predict_proba(IMAGES), atol=2e-5)


def test_an_encoder_of_other_features_is_refused(examples):
    one = PrivateRidge(5.0, 1e-5, num_classes=3, insecure_seed=0).fit(
        examples.features, examples.classes
    )
    with pytest.raises(ValueError, match=r"with 8 outputs, .* got shape \(None, 3\)"):
        one.to_keras(keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]))
    with pytest.raises(ValueError, match=r"got shape \(None, 2, 4\).*flattened"):
        one.to_keras(keras.Sequential([keras.Input((8,)), keras.layers.Reshape((2, 4))]))
