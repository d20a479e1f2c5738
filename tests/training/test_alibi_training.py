"""ALIBI end to end: the vault's rows, the loss, fit; resumed, and against what is wrong."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tf_labeldp as ldp
from tf_labeldp.keras_layers import ALIBILoss
from tf_labeldp.mechanisms import ALIBI

K = 4
MECHANISMS = {
    "laplace": ALIBI(4.0, K),
    "gaussian": ALIBI(4.0, K, 1e-5, "gaussian"),
}


@pytest.fixture(scope="session")
def clusters():
    """Four separated clusters: 1,200 points (n, 2) and their labels."""
    rng = np.random.default_rng(0)
    y = np.arange(1200) % K
    centres = np.array([[2.0, 0.0], [0.0, 2.0], [-2.0, 0.0], [0.0, -2.0]])
    return (centres[y] + 0.4 * rng.normal(size=(1200, 2))).astype(np.float32), y


def vault(y, mechanism, **options):
    budget = ldp.PrivacyBudget(mechanism.epsilon, mechanism.delta)
    return ldp.PrivateLabels(y, K, budget=budget, **options)


def trained(x, targets, loss):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(K)]
    )
    model.compile(keras.optimizers.Adam(0.02), loss, jit_compile=False)
    model.fit(x, targets, epochs=6, batch_size=50, verbose=0)
    return model


def accuracy(model, x, y):
    return float(np.mean(model.predict(x, verbose=0).argmax(axis=1) == y))


@pytest.mark.parametrize("noise", MECHANISMS)
def test_a_model_learns_the_true_classes(clusters, noise):
    x, y = clusters
    mechanism = MECHANISMS[noise]
    labels = vault(y, mechanism, insecure_seed=5)
    rows = labels.randomize(mechanism, key="alibi").values
    assert labels.guarantee().epsilon == mechanism.epsilon
    # One row in two or three has its largest entry elsewhere; chance is a quarter.
    assert np.mean(rows.argmax(axis=1) == y) < 0.75
    model = trained(x, rows, ALIBILoss.of(mechanism))
    assert accuracy(model, x, y) > 0.95
    assert labels.guarantee().epsilon == mechanism.epsilon


def test_rows_of_other_labels_teach_nothing(clusters):
    """The other side: the features alone do not give the classes away."""
    x, y = clusters
    mechanism = MECHANISMS["laplace"]
    shuffled = np.random.default_rng(1).permutation(y)
    rows = vault(shuffled, mechanism, insecure_seed=5).randomize(mechanism).values
    assert accuracy(trained(x, rows, ALIBILoss.of(mechanism)), x, y) < 0.8


def test_a_fixed_prior_is_plain_cross_entropy(clusters):
    x, y = clusters
    mechanism = MECHANISMS["laplace"]
    targets = vault(y, mechanism, insecure_seed=5).randomize(mechanism).posterior()
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    assert accuracy(trained(x, targets, loss), x, y) > 0.95


def test_a_resumed_run_has_the_same_rows(clusters, tmp_path):
    _, y = clusters
    mechanism = MECHANISMS["laplace"]
    first = vault(y, mechanism, store=tmp_path / "store").randomize(mechanism, key="alibi")
    resumed = vault(y, mechanism, store=tmp_path / "store")
    rows = resumed.randomize(mechanism, key="alibi")
    np.testing.assert_array_equal(rows.values, first.values)
    assert resumed.guarantee().epsilon == mechanism.epsilon


def test_a_model_with_softmax_outputs_and_accuracy_of_clean_labels(clusters, tmp_path):
    x, y = clusters
    mechanism = MECHANISMS["laplace"]
    rows = vault(y, mechanism, insecure_seed=5).randomize(mechanism).values
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(K, activation="softmax")])
    loss = ALIBILoss.of(mechanism, from_logits=False)
    model.compile(keras.optimizers.Adam(0.05), loss, metrics=["accuracy"], jit_compile=False)
    model.fit(x, rows, epochs=6, batch_size=50, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    _, clean = loaded.evaluate(x, np.eye(K)[y], verbose=0)
    assert clean > 0.95
