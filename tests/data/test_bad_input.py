"""Every refusal says what came, what was expected and what to do, and shows no label."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.accounting import PrivacyBudget
from tf_labeldp.data import randomize_labels
from tf_labeldp.heads import HeadPriorRandomizer
from tf_labeldp.mechanisms import PeerToPeerRandomizedResponse, RandomizedResponse, RRWithPrior
from tf_labeldp.vault import ClusterRandomizedResponse, LabelRandomizer

N, K = 300, 5
RR = RandomizedResponse(epsilon=1.0, num_classes=K)
X = np.arange(N)
Y = np.arange(N) % K


def slices(*parts):
    return tf.data.Dataset.from_tensor_slices(parts)


def of_unknown_rank():
    return slices(X, Y).map(lambda x, y: (x, tf.py_function(lambda v: v, [y], tf.int64)))


REFUSED_DATASETS = {
    "batched": (lambda: slices(X, Y).batch(8), ValueError, r"already batched.*\.unbatch\(\)"),
    "batched evenly": (
        lambda: slices(X, Y).batch(10, drop_remainder=True),
        ValueError,
        r"shape \(10,\).*already batched",
    ),
    "batched floats": (
        lambda: slices(X, Y * 1.0).batch(8),
        ValueError,
        r"already batched.*one-hot",
    ),
    "column": (lambda: slices(X, Y[:, None]), ValueError, r"shape \(1,\).*y\[0\]"),
    "unknown rank": (of_unknown_rank, ValueError, "shape <unknown>.*set_shape"),
    "unlabelled": (lambda: tf.data.Dataset.range(5), ValueError, "unlabelled.*single tensor"),
    "one entry": (lambda: slices(X), ValueError, "unlabelled.*tuple of 1"),
    "four entries": (lambda: slices(X, Y, X, X), ValueError, "tuple of 4"),
    "no such key": (
        lambda: tf.data.Dataset.from_tensor_slices({"image": X, "class": Y}),
        ValueError,
        r"no key 'label'; their keys are \['class', 'image'\].*label_key",
    ),
    "floats": (lambda: slices(X, Y * 1.0), TypeError, "dtype float64.*tf.cast"),
    "texts": (lambda: slices(X, Y.astype(str)), TypeError, "dtype string.*number names"),
    "booleans": (lambda: slices(X, Y > 2), TypeError, "dtype bool"),
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
    "repeated beside another": (
        lambda: slices(X, Y).concatenate(slices(X, Y).repeat(2)),
        ValueError,
        r"before \.repeat\(\)",
    ),
    "empty": (lambda: slices(X, Y).filter(lambda x, y: x < 0), ValueError, "empty"),
    "shuffled": (
        lambda: slices(X, Y).shuffle(N),
        ValueError,
        r"before \.shuffle\(\).*or pass id_fn=",
    ),
    "random features": (
        # Not tf.random: with a global seed, which other tests set, it repeats itself.
        lambda: slices(X, Y).map(
            lambda x, y: (tf.numpy_function(np.random.random, [], tf.float64), y)
        ),
        ValueError,
        "random augmentation",
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


@pytest.mark.parametrize("wrong", [-17, 4_242])
def test_labels_outside_the_classes_are_counted_and_not_shown(wrong):
    labels = Y.copy()
    labels[123] = wrong
    with pytest.raises(ValueError, match="1 of 300 do not") as caught:
        slices(X, labels).apply(randomize_labels(RR))
    assert str(wrong) not in str(caught.value)


def test_a_dtype_too_small_for_the_classes_is_refused():
    mechanism = RandomizedResponse(epsilon=1.0, num_classes=1000)
    with pytest.raises(ValueError, match=r"uint8 holds at most 255.*tf\.int64"):
        slices(X, Y.astype(np.uint8)).apply(randomize_labels(mechanism))


@pytest.mark.parametrize("wrong", [None, (X, Y), [1, 2]])
def test_only_datasets_are_transformed(wrong):
    with pytest.raises(TypeError, match=r"tf\.data\.Dataset is expected"):
        randomize_labels(RR)(wrong)


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
    "priors for RR": ({"priors": [0.2] * K}, ValueError, "takes no priors"),
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
    "no clusters": (
        {"mechanism": ClusterRandomizedResponse.for_epsilon(1.0, K)},
        ValueError,
        r"ClusterRandomizedResponse needs clusters= of shape \(n,\)",
    ),
    "clusters for RR": ({"clusters": X % 2}, ValueError, "takes no clusters"),
    "range for RR": ({"low": 0.0, "high": 4.0}, ValueError, "low and high are for mechanisms that"),
    "no range": ({"mechanism": LabelRandomizer(1.0)}, ValueError, "does not know the labels"),
    "half a range": ({"mechanism": LabelRandomizer(1.0), "low": 0.0}, TypeError, "high"),
    "features": (
        {"mechanism": HeadPriorRandomizer(2.0, 1e-4)},
        TypeError,
        "HeadPriorRandomizer can't be used in a pipeline",
    ),
    "reports of some": (
        {"mechanism": PeerToPeerRandomizedResponse.for_cluster_size(0.2, 0.5, 50, 1e-4)},
        TypeError,
        "PeerToPeerRandomizedResponse can't be used in a pipeline",
    ),
    "seed of 0.1": ({"seed": 1}, TypeError, "unexpected keyword argument 'seed'"),
    "priors that are none": (
        {"mechanism": RRWithPrior(1.0, K), "priors": [0.9] * K},
        ValueError,
        "must sum to one",
    ),
}


@pytest.mark.parametrize("kind", REFUSED_ARGUMENTS)
def test_an_argument_is_refused_at_once(kind):
    arguments, error, message = REFUSED_ARGUMENTS[kind]
    with pytest.raises(error, match=message):
        randomize_labels(**{"mechanism": RR, **arguments})


def test_a_budget_of_another_type_is_refused():
    transform = randomize_labels(RR, budget=1.0)
    with pytest.raises(TypeError, match="must be a PrivacyBudget, got float"):
        slices(X, Y).apply(transform)
    assert transform.private_labels is None


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


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        *(pytest.param((), size, id=f"in blocks-{size}") for size in (99, 101, 128, 129)),
        *(pytest.param((None,), size, id=f"one by one-{size}") for size in (99, 101)),
        *(
            pytest.param(shape, size, marks=pytest.mark.slow)
            for shape in [(), (None,)]
            for size in (50, 1000)
        ),
    ],
)
def test_a_source_that_changes_its_size_is_refused(shape, size):
    source, change = changing(100, size, shape)
    dataset = source.apply(randomize_labels(RR))
    assert len(list(dataset)) == 100
    change()
    seen = []
    with pytest.raises(tf.errors.FailedPreconditionError, match="expected to contain 100 elements"):
        seen.extend(dataset)
    assert len(seen) == min(size, 100)


@pytest.mark.parametrize("number", [101, 500])
def test_an_id_that_was_not_there_raises_and_shows_no_label(number):
    source, change = changing(100, number)
    dataset = source.apply(randomize_labels(RR, id_fn=lambda x: x))
    assert len(list(dataset)) == 100
    change()
    with pytest.raises(tf.errors.InvalidArgumentError, match="id was not there when"):
        list(dataset)


def test_progress_of_a_long_pass_is_reported(monkeypatch):
    seen = []

    class Recorder:
        def __init__(self, what, total):
            seen.append((what, total))

        def advance(self, rows):
            seen.append(rows)

        def end(self):
            pass

    monkeypatch.setattr("tf_labeldp.data._elements.Progress", Recorder)
    slices(X, Y).apply(randomize_labels(RR, budget=PrivacyBudget(1.0)))
    assert seen == [("randomize_labels, reading labels", 300), 300]
    seen.clear()
    slices(X, Y).apply(randomize_labels(RR, verbose=False))
    assert seen[1:] == []


def test_repr_shows_no_label():
    transform = randomize_labels(RR)
    slices(X, Y).apply(transform)
    assert repr(transform) == (
        "LabelRandomization(RandomizedResponse(epsilon=1.0, num_classes=5), applied=True)"
    )
