"""Every refusal says what came, what was expected and what to do, and shows no label."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.data import randomize_labels
from tf_labeldp.heads import HeadPriorRandomizer
from tf_labeldp.mechanisms import RandomizedResponse, RRWithPrior
from tf_labeldp.vault import ClusterRandomizedResponse, LabelRandomizer

N, K = 300, 5
RR = RandomizedResponse(epsilon=1.0, num_classes=K)
X = np.arange(N)
Y = np.arange(N) % K


def slices(*parts):
    return tf.data.Dataset.from_tensor_slices(parts)


REFUSED_DATASETS = {
    "batched": (lambda: slices(X, Y).batch(8), ValueError, r"already batched.*\.unbatch\(\)"),
    "column": (lambda: slices(X, Y[:, None]), ValueError, r"shape \(1,\).*y\[0\]"),
    "unlabelled": (lambda: tf.data.Dataset.range(5), ValueError, "unlabelled.*single tensor"),
    "no such key": (
        lambda: tf.data.Dataset.from_tensor_slices({"image": X, "class": Y}),
        ValueError,
        r"no key 'label'; their keys are \['class', 'image'\].*label_key",
    ),
    "floats": (lambda: slices(X, Y * 1.0), TypeError, "dtype float64.*tf.cast"),
    "ragged label": (
        lambda: slices(X, tf.ragged.constant([[1]] * N)),
        TypeError,
        "dense tensor, got RaggedTensorSpec",
    ),
    "endless": (lambda: slices(X, Y).repeat(), ValueError, r"endless.*before \.repeat\(\)"),
    "repeated": (
        lambda: slices(X, Y).repeat(3).map(lambda x, y: (x, y)),
        ValueError,
        r"drawn, and spend epsilon, again.*before \.repeat\(\)",
    ),
    "empty": (lambda: slices(X, Y).filter(lambda x, y: x < 0), ValueError, "empty"),
    "shuffled": (
        lambda: slices(X, Y).shuffle(N),
        ValueError,
        r"before \.shuffle\(\).*or pass id_fn=",
    ),
}


@pytest.mark.parametrize("kind", REFUSED_DATASETS)
def test_a_dataset_is_refused(kind):
    make, error, message = REFUSED_DATASETS[kind]
    transform = randomize_labels(RR)
    with pytest.raises(error, match=message):
        make().apply(transform)
    assert transform.private_labels is None  # nothing was charged: the transform is still good
    slices(X, Y).apply(transform)


def test_an_order_declared_free_is_refused():
    options = tf.data.Options()
    options.deterministic = False
    with pytest.raises(ValueError, match=r"options\.deterministic to True"):
        slices(X, Y).with_options(options).apply(randomize_labels(RR))


def test_a_shuffle_that_stays_the_same_is_an_order(read):
    fixed = slices(X, Y).shuffle(N, seed=1, reshuffle_each_iteration=False)
    dataset = fixed.apply(randomize_labels(RR))
    assert read(dataset) == read(dataset.repeat(2))


def test_labels_outside_the_classes_are_counted_and_not_shown():
    labels, wrong = Y.copy(), 4_242
    labels[123] = wrong
    with pytest.raises(ValueError, match="1 of 300 do not") as caught:
        slices(X, labels).apply(randomize_labels(RR))
    assert str(wrong) not in str(caught.value)


def test_a_dtype_too_small_for_the_classes_is_refused():
    mechanism = RandomizedResponse(epsilon=1.0, num_classes=1000)
    with pytest.raises(ValueError, match=r"uint8 holds at most 255.*tf\.int64"):
        slices(X, Y.astype(np.uint8)).apply(randomize_labels(mechanism))


def test_only_datasets_are_transformed():
    with pytest.raises(TypeError, match=r"tf\.data\.Dataset is expected"):
        randomize_labels(RR)((X, Y))


def test_a_transform_is_applied_once():
    transform = randomize_labels(RR)
    source = slices(X, Y)
    source.apply(transform)
    with pytest.raises(RuntimeError, match=r"second charge.*make a new transform"):
        source.apply(transform)


def test_no_guarantee_before_a_draw():
    transform = randomize_labels(RR)
    assert transform.private_labels is None
    with pytest.raises(RuntimeError, match="Apply the transform first"):
        transform.guarantee()


def test_not_inside_a_graph():
    @tf.function
    def build():
        slices(X, Y).apply(randomize_labels(RR))

    with pytest.raises(RuntimeError, match="needs eager execution"):
        build()


REFUSED_ARGUMENTS = {
    "mechanism": (
        {"mechanism": 1.0},
        TypeError,
        "must be a tf_labeldp mechanism, got float",
    ),
    "id_fn": ({"id_fn": "id"}, TypeError, "id_fn must be a function.*got str"),
    "no priors": ({"mechanism": RRWithPrior(1.0, K)}, ValueError, "needs priors= of shape"),
    "prior rows with ids": (
        {
            "mechanism": RRWithPrior(1.0, K),
            "priors": np.full((N, K), 0.2),
            "id_fn": lambda x: x,
        },
        ValueError,
        r"with id_fn, priors can't have a row for each example, got \(300, 5\).*one row of priors",
    ),
    "clusters with ids": (
        {
            "mechanism": ClusterRandomizedResponse.for_epsilon(1.0, K),
            "clusters": X % 2,
            "id_fn": lambda x: x,
        },
        ValueError,
        r"with id_fn, clusters can't have a row for each example",
    ),
    "half a range": ({"mechanism": LabelRandomizer(1.0), "low": 0.0}, TypeError, "high"),
    "features": (
        {"mechanism": HeadPriorRandomizer(2.0, 1e-4)},
        TypeError,
        "HeadPriorRandomizer can't be used in a pipeline",
    ),
}


@pytest.mark.parametrize("kind", REFUSED_ARGUMENTS)
def test_an_argument_is_refused_at_once(kind):
    arguments, error, message = REFUSED_ARGUMENTS[kind]
    with pytest.raises(error, match=message):
        randomize_labels(**{"mechanism": RR, **arguments})


def test_priors_of_another_length_are_refused():
    transform = randomize_labels(RRWithPrior(1.0, K), priors=np.full((N - 1, K), 0.2))
    with pytest.raises(ValueError, match=r"priors must have shape \(5,\) or \(300, 5\)"):
        slices(X, Y).apply(transform)
    assert transform.private_labels is None


@pytest.mark.parametrize(
    ("id_fn", "error", "message"),
    [
        (lambda x: x // 2, ValueError, "gave 150 of 300 examples an id that another has"),
        (lambda x: tf.cast(x, tf.float32), TypeError, "scalar integer or string.*float32"),
        (lambda x: tf.stack([x, x]), TypeError, r"shape \(2,\)"),
    ],
)
def test_ids_that_do_not_tell_examples_apart_are_refused(id_fn, error, message):
    with pytest.raises(error, match=message):
        slices(X, Y).apply(randomize_labels(RR, id_fn=id_fn))


def changing(start_with, then, shape=()):
    """A source with a number of elements, and a function that changes the number."""
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


def test_an_id_that_was_not_there_raises_and_shows_no_label():
    source, change = changing(100, 101)
    dataset = source.apply(randomize_labels(RR, id_fn=lambda x: x))
    assert len(list(dataset)) == 100
    change()
    with pytest.raises(tf.errors.InvalidArgumentError, match="id was not there when"):
        list(dataset)
