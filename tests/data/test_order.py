"""Each element keeps its noisy label in every pass, or the pass ends without a true label."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from slow_cases import with_slow

import tf_labeldp as ldp

N = 500
RNG = np.random.default_rng(0)
Y = RNG.integers(0, 2, N)
X = RNG.normal(size=(N, 3)).astype(np.float32)
DTYPES = {
    "float32": X,
    "float64": X.astype(np.float64),
    "float16": (100 * X).astype(np.float16),
    "complex": X[:, 0] + 1j * X[:, 1],
    "bytes": np.array([f"text {i}" for i in range(N)]),
    "uint8": RNG.integers(0, 256, (N, 9)).astype(np.uint8),
    "bool": RNG.integers(0, 2, (N, 64)).astype(bool),
    "int64": np.arange(N),
    "dict": {"a": X, "b": np.arange(N)},
}


def applied(source):
    transform = ldp.data.randomize_labels(
        ldp.RandomizedResponse(1.0, 2), budget=ldp.PrivacyBudget(1.0)
    )
    return transform, source.apply(transform)


@pytest.fixture(autouse=True)
def new_order_in_each_pass():
    """A seed of TensorFlow would fix the order of shuffles: other tests set one."""
    tf.random.set_seed(None)


def base(x=X):
    return tf.data.Dataset.from_tensor_slices((x, Y))


def late_shuffle(x=X):
    """A shuffle behind the elements that are compared before the charge, inside a function."""

    def part(number):
        # `number` is 0 for the first 300 elements, in order, and 1 for the others, shuffled.
        own = base(x).skip(300 * number).take(300)
        return own.shuffle(1 + number * N)

    return tf.data.Dataset.range(2).flat_map(part)


@pytest.mark.parametrize("kind", with_slow(DTYPES, DTYPES.keys() - {"float32", "bytes", "int64"}))
def test_every_pass_of_a_fixed_order_has_the_same_labels(kind):
    transform, noisy = applied(base(DTYPES[kind]))
    for _ in range(2):
        labels = [int(y) for _, y in noisy]
        np.testing.assert_array_equal(labels, transform.noisy_labels.values)


@pytest.mark.parametrize("kind", with_slow(DTYPES, DTYPES.keys() - {"float32", "bytes", "int64"}))
def test_a_shuffle_after_the_first_elements_ends_the_pass(kind):
    _, noisy = applied(late_shuffle(DTYPES[kind]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="met another element"):
        for _ in range(2):
            list(noisy)


@pytest.mark.parametrize("place", [0, 1, N - 2, N - 1])
def test_one_other_element_ends_the_pass(place):
    moved = tf.Variable(0.0)
    mark = tf.one_hot(place, N)[:, tf.newaxis]
    features = tf.data.Dataset.from_tensor_slices((X, Y, mark))
    _, noisy = applied(features.map(lambda x, y, here: (x + moved * here, y)))
    list(noisy)
    moved.assign(1.0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="met another element"):
        list(noisy)


@pytest.mark.slow
def test_ragged_elements_are_compared_too():
    rows = tf.RaggedTensor.from_row_lengths(tf.range(2 * N), [1, 3] * (N // 2))
    _, noisy = applied(tf.data.Dataset.from_tensor_slices((rows, Y)))
    assert len(list(noisy)) == N
    _, noisy = applied(late_shuffle(rows))
    with pytest.raises(tf.errors.InvalidArgumentError, match="met another element"):
        list(noisy)


REFUSED = {
    "a shuffle of the rest": lambda: base().take(300).concatenate(base().skip(300).shuffle(9)),
    "itself": lambda: (lambda ds: ds.concatenate(ds))(base()),
    "augmented": lambda: (lambda ds: ds.concatenate(ds.map(lambda x, y: (-x, y))))(base()),
    "some again": lambda: (lambda ds: ds.concatenate(ds.take(3)))(base()),
    "an overlap": lambda: (lambda ds: ds.take(9).concatenate(ds.skip(8)))(base()),
    "shuffled": lambda: (lambda ds: ds.shuffle(9, 1, False).concatenate(ds))(base()),
    "all of it": lambda: (lambda ds: ds.take(-1).concatenate(ds))(base()),
    "by labels": lambda: (
        lambda y: tf.data.Dataset.zip((base().map(lambda x, _: x), y)).take(9).concatenate(
            tf.data.Dataset.zip((base().map(lambda x, _: x), y))
        )
    )(base().map(lambda _, y: y)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_sources_that_change_or_repeat_are_refused_before_the_charge(name):
    transform = ldp.data.randomize_labels(
        ldp.RandomizedResponse(1.0, 2), budget=ldp.PrivacyBudget(1.0)
    )
    with pytest.raises(ValueError, match=r"same order in each pass|each label once"):
        REFUSED[name]().apply(transform)
    assert transform.private_labels is None


TAKEN = {
    "halves": lambda: (lambda ds: ds.take(250).concatenate(ds.skip(250)))(base()),
    "the second half first": lambda: (lambda ds: ds.skip(250).concatenate(ds.take(250)))(base()),
    "classes": lambda: (
        lambda ds: ds.filter(lambda x, y: y == 0).concatenate(ds.filter(lambda x, y: y == 1))
    )(base()),
    "two sources": lambda: base().concatenate(base()),
    "a fixed shuffle": lambda: base().shuffle(N, seed=1, reshuffle_each_iteration=False),
    "columns of one source": lambda: (
        lambda ds: tf.data.Dataset.zip((ds.map(lambda x, _: x), ds.map(lambda _, y: y)))
    )(base()),
}


@pytest.mark.parametrize("name", TAKEN)
def test_sources_of_distinct_elements_are_taken(name):
    transform, noisy = applied(TAKEN[name]())
    for _ in range(2):
        labels = [int(y) for _, y in noisy]
        np.testing.assert_array_equal(labels, transform.noisy_labels.values)
