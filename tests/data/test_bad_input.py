"""Errors of ``randomize_labels`` name what came, what was expected and what to do, and no label."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.data import randomize_labels
from tf_labeldp.heads import HeadPriorRandomizer
from tf_labeldp.mechanisms import (
    ProjectiveGeometryResponse,
    RandomizedResponse,
    RROnBins,
    RRWithPrior,
)
from tf_labeldp.vault import ClusterRandomizedResponse, LabelRandomizer

N, K = 300, 5
RR = RandomizedResponse(epsilon=1.0, num_classes=K)
BINS = RROnBins(1.0, (0.0, 50.0), (10.0, 40.0), (0, 1))
X = np.arange(N)
Y = np.arange(N) % K
SECRET = 4_242


def slices(*parts):
    return tf.data.Dataset.from_tensor_slices(parts)


def unordered():
    options = tf.data.Options()
    options.deterministic = False
    return slices(X, Y).with_options(options)


REFUSED_DATASETS = {
    "batched": (lambda: slices(X, Y).batch(8), ValueError, r"scalar label, .*\.unbatch\(\)"),
    "column": (lambda: slices(X, Y[:, None]), ValueError, r"scalar label, .*shape=\(1,\)"),
    "ragged": (lambda: slices(X, tf.ragged.constant([[1]] * N)), ValueError, "scalar label, .*Rag"),
    "unlabelled": (lambda: tf.data.Dataset.range(5), ValueError, r"elements \(x, y\).*Zip"),
    "no such key": (
        lambda: tf.data.Dataset.from_tensor_slices({"image": X, "class": Y}),
        ValueError,
        r"key 'label', got the keys \['class', 'image'\].*label_key",
    ),
    "floats": (lambda: slices(X, Y * 1.0), TypeError, "dtype float64.*tf.cast"),
    "endless": (lambda: slices(X, Y).repeat(), ValueError, r"endless.*before \.repeat\(\)"),
    "repeated": (
        lambda: slices(X, Y).repeat(3).map(lambda x, y: (x, y)),
        ValueError,
        r"drawn, and spend epsilon, again.*before \.repeat\(\)",
    ),
    "empty": (lambda: slices(X, Y).filter(lambda x, y: x < 0), ValueError, "empty"),
    "shuffled": (lambda: slices(X, Y).shuffle(N), ValueError, r"before \.shuffle\(\).*id_fn="),
    "unordered": (unordered, ValueError, r"options\.deterministic to True"),
    "other labels": (
        lambda: slices(X, np.where(X == 123, SECRET, Y)),
        ValueError,
        "1 of 300 do not",
    ),
}


@pytest.mark.parametrize("kind", REFUSED_DATASETS)
def test_a_dataset_is_refused(kind):
    make, error, message = REFUSED_DATASETS[kind]
    transform = randomize_labels(RR)
    with pytest.raises(error, match=message) as caught:
        make().apply(transform)
    assert str(SECRET) not in str(caught.value)
    assert transform.private_labels is None  # nothing was charged: the transform is still good
    slices(X, Y).apply(transform)


@pytest.mark.parametrize(
    ("settings", "labels", "error", "message"),
    [
        ({"mechanism": RandomizedResponse(1.0, 1000)}, Y.astype("u1"), ValueError, "uint8.*int64"),
        (
            {"mechanism": ProjectiveGeometryResponse(1.0, 200)},
            Y.astype("u1"),
            ValueError,
            "the noisy label 363, got uint8",
        ),
        ({"mechanism": BINS}, Y, TypeError, "dtype float32 or float64, got int64"),
        ({"mechanism": BINS}, Y - 3.0, ValueError, r"must lie in \[0, 50\], but \d+ of 300 do not"),
        ({"mechanism": RRWithPrior(1.0, K)}, Y, ValueError, "priors"),
        (
            {"mechanism": RRWithPrior(1.0, K), "priors": np.full((N - 1, K), 0.2)},
            Y,
            ValueError,
            r"priors must have shape \(5,\) or \(300, 5\)",
        ),
        ({"mechanism": LabelRandomizer(1.0), "low": 0.0}, Y * 1.0, ValueError, "needs both ends"),
        ({"id_fn": lambda x: x // 2}, Y, ValueError, "got 150 of 300 that repeat"),
        ({"id_fn": lambda x: x / 2}, Y, TypeError, "scalar integer or string.*float64"),
        ({"id_fn": lambda x: tf.stack([x, x])}, Y, TypeError, r"shape \(2,\)"),
    ],
)
def test_labels_and_settings_that_do_not_fit_are_refused(settings, labels, error, message):
    transform = None
    with pytest.raises(error, match=message):
        transform = randomize_labels(**{"mechanism": RR, **settings})
        slices(X, labels).apply(transform)
    assert transform is None or transform.private_labels is None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mechanism": 1.0}, TypeError, "must be a tf_labeldp mechanism, got float"),
        (
            {
                "mechanism": RRWithPrior(1.0, K),
                "priors": np.full((N, K), 0.2),
                "id_fn": lambda x: x,
            },
            ValueError,
            r"one prior \(K,\) for all examples with id_fn",
        ),
        (
            {
                "mechanism": ClusterRandomizedResponse.for_epsilon(1.0, K),
                "clusters": X % 2,
                "id_fn": lambda x: x,
            },
            ValueError,
            "got priors or clusters by row",
        ),
        (
            {"mechanism": HeadPriorRandomizer(2.0, 1e-4)},
            TypeError,
            "HeadPriorRandomizer can't be used in a pipeline",
        ),
    ],
)
def test_an_argument_is_refused_at_once(arguments, error, message):
    with pytest.raises(error, match=message):
        randomize_labels(**{"mechanism": RR, **arguments})


def test_a_transform_is_applied_once_and_eagerly():
    transform = randomize_labels(RR)
    with pytest.raises(RuntimeError, match="Apply the transform first"):
        transform.guarantee()
    with pytest.raises(TypeError, match=r"expected a tf\.data\.Dataset, got tuple"):
        transform((X, Y))
    with pytest.raises(RuntimeError, match="needs eager execution"):
        tf.function(lambda: slices(X, Y).apply(transform))()
    slices(X, Y).apply(transform)
    with pytest.raises(RuntimeError, match="second charge"):
        slices(X, Y).apply(transform)


def test_a_shuffle_that_stays_the_same_is_an_order(read):
    fixed = slices(X, Y).shuffle(N, seed=1, reshuffle_each_iteration=False)
    dataset = fixed.apply(randomize_labels(RR))
    assert read(dataset) == read(dataset.repeat(2))


def changing(start_with, then, shape=()):
    """Returns a source of some elements, and a function that changes their number."""
    size = [start_with]
    source = tf.data.Dataset.from_generator(
        lambda: ((np.full([1] * len(shape), i), 0) for i in range(size[0])),
        output_signature=(tf.TensorSpec(shape, tf.int64), tf.TensorSpec((), tf.int64)),
    )
    return source, lambda: size.append(size.pop() - start_with + then)


@pytest.mark.parametrize(("shape", "size"), [((), 99), ((), 129), ((None,), 101)])
def test_a_source_that_changes_its_size_is_refused(shape, size):
    source, change = changing(100, size, shape)
    dataset = source.apply(randomize_labels(RR))
    assert len(list(dataset)) == 100
    change()
    seen = []
    with pytest.raises(tf.errors.FailedPreconditionError, match="expected to contain 100 elements"):
        seen.extend(dataset)
    assert len(seen) == min(size, 100)


def test_an_unknown_id_raises_and_shows_no_label():
    source, change = changing(100, 101)
    dataset = source.apply(randomize_labels(RR, id_fn=lambda x: x))
    assert len(list(dataset)) == 100
    change()
    with pytest.raises(tf.errors.InvalidArgumentError, match="id was not there when"):
        list(dataset)
