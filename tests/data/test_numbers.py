"""randomize_labels for regression: noisy numbers in the place of true ones."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.data import randomize_labels
from tf_labeldp.mechanisms import LaplaceMechanism, RROnBins

AMOUNTS = np.round(np.random.default_rng(2).uniform(-50.0, 50.0, 300), 1)
BINS = RROnBins(1.0, (-50.0, 0.0, 50.0), (-25.0, 0.0, 25.0), (0, 1, 2))


def source(dtype=tf.float32):
    return tf.data.Dataset.from_tensor_slices((np.arange(300), tf.constant(AMOUNTS, dtype)))


@pytest.mark.parametrize("id_fn", [None, lambda x: x])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_draw_an_example(id_fn, dtype):
    transform = randomize_labels(BINS, id_fn=id_fn)
    dataset = source(dtype).apply(transform)
    assert dataset.element_spec == source(dtype).element_spec
    first, second = (dict(e for e in dataset.shuffle(300).as_numpy_iterator()) for _ in range(2))
    assert first == second and len(first) == 300
    assert set(first.values()) == {-25.0, 0.0, 25.0}
    assert transform.guarantee().epsilon == 1.0
    mine = np.array(BINS.outputs)[BINS.bin_of(AMOUNTS)]
    kept = np.mean([first[i] == mine[i] for i in range(300)])
    assert kept > 0.43  # e / (e + 2) = 0.576, five standard deviations less; by chance 1 / 3


def test_negative_numbers_are_no_unknown_ids():
    dataset = source().apply(
        randomize_labels(LaplaceMechanism(1.0, -50.0, 50.0), id_fn=lambda x: x)
    )
    assert min(label for _, label in dataset.as_numpy_iterator()) < 0.0


@pytest.mark.parametrize("loss", ["mse", "mae", "poisson"])
def test_fit_sees_noisy_labels_alone(loss):
    """Loss and metrics are those of the noisy labels: all that the dataset holds."""
    positive = RROnBins(1.0, (0.0, 50.0), (10.0, 40.0), (0, 1))
    labels = np.float32(np.abs(AMOUNTS))
    features = np.float32(labels[:, np.newaxis] / 50.0)
    clean = tf.data.Dataset.from_tensor_slices((features, labels))
    dataset = clean.apply(randomize_labels(positive, insecure_seed=0))
    noisy = np.array([label for _, label in dataset.as_numpy_iterator()])
    model = keras.Sequential([keras.layers.Dense(1, "softplus", bias_initializer="ones")])
    model.compile(keras.optimizers.Adam(0.1), loss=loss, metrics=["mse"])
    model.fit(dataset.shuffle(300).batch(64), epochs=3, verbose=0)
    predicted = model.predict(features, verbose=0)[:, 0]
    found = model.evaluate(dataset.batch(64), verbose=0, return_dict=True)["mse"]
    assert found == pytest.approx(np.mean((predicted - noisy) ** 2), rel=1e-4)
    assert found != pytest.approx(np.mean((predicted - labels) ** 2), rel=1e-2)


@pytest.mark.parametrize("dtype", [tf.int32, tf.float16, tf.string])
def test_labels_of_a_wrong_type(dtype):
    labels = tf.cast(AMOUNTS, dtype) if dtype != tf.string else tf.constant(["1"] * 300)
    dataset = tf.data.Dataset.from_tensor_slices((np.arange(300), labels))
    with pytest.raises(TypeError, match=f"dtype {dtype.name}, but noisy numbers are float32"):
        dataset.apply(randomize_labels(BINS))


def test_labels_outside_the_range():
    narrow = RROnBins(1.0, (0.0, 50.0), (10.0, 40.0), (0, 1))
    with pytest.raises(ValueError, match=r"must lie in \[0, 50\], but \d+ of 300 do not"):
        source().apply(randomize_labels(narrow))


def test_floats_for_a_mechanism_of_classes():
    from tf_labeldp.mechanisms import RandomizedResponse

    with pytest.raises(TypeError, match="dtype float32, an integer"):
        source().apply(randomize_labels(RandomizedResponse(1.0, 5)))
