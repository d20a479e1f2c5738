"""randomize_labels for regression: noisy numbers in the place of true ones."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.data import randomize_labels
from tf_labeldp.mechanisms import RROnBins

AMOUNTS = np.round(np.random.default_rng(2).uniform(-50.0, 50.0, 300), 1)
BINS = RROnBins(1.0, (-50.0, 0.0, 50.0), (-25.0, 0.0, 25.0), (0, 1, 2))


def source(dtype=tf.float32):
    return tf.data.Dataset.from_tensor_slices((np.arange(300), tf.constant(AMOUNTS, dtype)))


@pytest.mark.parametrize(("id_fn", "dtype"), [(None, "float32"), (lambda x: x, "float64")])
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


@pytest.mark.parametrize("dtype", [tf.int32, tf.string])
def test_labels_of_a_wrong_type(dtype):
    labels = tf.cast(AMOUNTS, dtype) if dtype != tf.string else tf.constant(["1"] * 300)
    dataset = tf.data.Dataset.from_tensor_slices((np.arange(300), labels))
    with pytest.raises(TypeError, match=f"dtype {dtype.name}, but noisy numbers are float32"):
        dataset.apply(randomize_labels(BINS))


def test_labels_outside_the_range():
    narrow = RROnBins(1.0, (0.0, 50.0), (10.0, 40.0), (0, 1))
    with pytest.raises(ValueError, match=r"must lie in \[0, 50\], but \d+ of 300 do not"):
        source().apply(randomize_labels(narrow))
