"""Every kind of element keeps its structure and loses its true label."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.data import randomize_labels
from tf_labeldp.data._elements import block_size
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
    "pair": (NUMBERS, Y),
    "nested features": (NEST, Y),
    "tuple features": ((X, NUMBERS), Y),
    "sample weights": (X, Y, np.full(N, 0.5, np.float32)),
    "dict": {"image": X, "id": NUMBERS, "label": Y},
    "ordered dict": collections.OrderedDict([("label", Y), ("image", X)]),
    "named tuple": Pair(X, Y),
    "small dtype": (X, Y.astype(np.uint8)),
    "ragged": (tf.ragged.constant([[[0.5] * (i % 3), [1.5]] for i in range(N)]), Y),
    "sparse": (tf.sparse.from_dense(np.eye(N, 4)), Y),
    "large": (np.zeros((14, 600_000), np.uint8), Y[:14]),
}


def tensors(element):
    return [np.asarray(t) for t in tf.nest.flatten(element, expand_composites=True)]


@pytest.mark.parametrize("kind", ELEMENTS)
def test_structure_is_kept_and_the_true_label_is_gone(kind):
    source = tf.data.Dataset.from_tensor_slices(ELEMENTS[kind])
    one_by_one = kind in ("ragged", "sparse")
    assert (block_size(source.element_spec) == 1) == one_by_one
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


@pytest.mark.parametrize("kind", ["sample weights", "dict"])
def test_ids_come_from_the_features_alone(kind):
    seen = []

    def id_fn(features):
        seen.append(features)
        return features["id"] if kind == "dict" else tf.cast(features[0], tf.int64)

    elements = ELEMENTS[kind]
    if kind == "sample weights":
        elements = (np.arange(N, dtype=np.float32)[:, None], *elements[1:])
    source = tf.data.Dataset.from_tensor_slices(elements)
    dataset = source.apply(randomize_labels(ALWAYS, priors=PRIOR, id_fn=id_fn))
    assert dataset.element_spec == source.element_spec
    for element in dataset.as_numpy_iterator():
        assert (element["label"] if kind == "dict" else element[1]) == NOISY
    assert seen
    for features in seen:
        assert set(features) == {"image", "id"} if kind == "dict" else features.shape[-1] == 1


def test_label_key_names_the_label():
    source = tf.data.Dataset.from_tensor_slices({"x": X, "fine_label": Y})
    dataset = source.apply(randomize_labels(ALWAYS, priors=PRIOR, label_key="fine_label"))
    assert {int(e["fine_label"]) for e in dataset} == {NOISY}


def test_large_elements_go_in_small_blocks_and_huge_ones_alone():
    def spec(size):
        return tf.TensorSpec((size,), tf.uint8), tf.TensorSpec((), tf.int64)

    assert block_size(spec(10)) == 64
    assert block_size(spec(600_000)) == 6
    assert block_size(spec(2_000_000)) == 1
