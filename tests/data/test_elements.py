"""Every kind of element keeps its structure and loses its true label."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.data import randomize_labels
from tf_labeldp.mechanisms import RRTopK

N, K, TRUE, NOISY = 70, 5, 3, 1
Pair = collections.namedtuple("Pair", ["x", "y"])

# A channel that always answers 1: a 3 anywhere in the output would be a true label.
ALWAYS = RRTopK(epsilon=1.0, num_classes=K, k=1)
PRIOR = [0.0, 1.0, 0.0, 0.0, 0.0]

X = np.zeros((N, 2), np.float32)
Y = np.full(N, TRUE)
NUMBERS = np.arange(100, 100 + N)
NEST = {"a": X, "b": (NUMBERS, np.array(["text"] * N))}

ELEMENTS = {
    "nested features": (NEST, Y),
    "sample weights": (X, Y, np.full(N, 0.5, np.float32)),
    "dict": {"image": X, "id": NUMBERS, "label": Y},
    "named tuple": Pair(X, Y),
    "ragged": (tf.ragged.constant([[[0.5] * (i % 3), [1.5]] for i in range(N)]), Y),
    "large": (np.zeros((14, 600_000), np.uint8), Y[:14]),
}


def tensors(element):
    return [np.asarray(t) for t in tf.nest.flatten(element, expand_composites=True)]


@pytest.mark.parametrize("kind", ELEMENTS)
def test_structure_is_kept_and_the_true_label_is_gone(kind):
    source = tf.data.Dataset.from_tensor_slices(ELEMENTS[kind])
    dataset = source.apply(randomize_labels(ALWAYS, priors=PRIOR))
    assert dataset.element_spec == source.element_spec
    count = 0
    for before, after in zip(source, dataset, strict=True):
        assert type(after) is type(before)
        changed = 0
        for old, new in zip(tensors(before), tensors(after), strict=True):
            assert old.dtype == new.dtype
            if old.shape == () and old.dtype.kind in "iu" and old == TRUE:
                assert new == NOISY
                changed += 1
            else:
                np.testing.assert_array_equal(old, new)
        assert changed == 1
        count += 1
    assert count == len(source)


def test_ids_come_from_the_features_alone():
    seen = []

    def id_fn(features):
        seen.append(set(features))
        return features["id"]

    source = tf.data.Dataset.from_tensor_slices(ELEMENTS["dict"])
    dataset = source.apply(randomize_labels(ALWAYS, priors=PRIOR, id_fn=id_fn))
    assert {int(element["label"]) for element in dataset} == {NOISY}
    assert seen and all(keys == {"image", "id"} for keys in seen)


def test_label_key_names_the_label():
    source = tf.data.Dataset.from_tensor_slices({"x": X, "fine_label": Y})
    dataset = source.apply(randomize_labels(ALWAYS, priors=PRIOR, label_key="fine_label"))
    assert {int(e["fine_label"]) for e in dataset} == {NOISY}
