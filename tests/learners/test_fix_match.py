"""FixMatch: its targets and pseudo-labels, and the training that its receipts cover."""

import numpy as np
import pytest
from _shapes import NUM_CLASSES, network, shapes

import tf_labeldp as ldp
from tf_labeldp.accounting import public_input
from tf_labeldp.semi_supervised import FixMatch
from tf_labeldp.semi_supervised.targets import read_targets

keras = pytest.importorskip("keras")
LOSS = keras.losses.CategoricalCrossentropy(from_logits=True)


def fitted(images, labels, epochs=5, net=None, **settings):
    fit = {key: settings.pop(key) for key in ("clusters", "targets") if key in settings}
    model = FixMatch(net or network(), threshold=0.6, unlabelled_ratio=2, **settings)
    model.compile(keras.optimizers.Adam(3e-3), LOSS, metrics=["accuracy"])
    model.history = model.fit(images, labels, 16, epochs, verbose=0, **fit)
    return model


@pytest.fixture(scope="session")
def trained(images, noisy):
    return fitted(images[0], noisy)


def test_it_learns_the_true_classes_from_noisy_ones(trained, images, noisy):
    test, truth = shapes(150, seed=1)
    assert (np.asarray(noisy) == images[1]).mean() < 0.8
    assert trained.evaluate(test, np.eye(NUM_CLASSES)[truth], verbose=0)[1] > 0.95
    assert trained.history.history["pseudo_labelled"][-1] > 0.5


def test_what_was_trained_in_the_clear_before_is_not_covered(images, noisy):
    # No other test has trained weights of this seed.
    net = network(seed=100)
    net.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    net.fit(images[0], images[1], verbose=0)
    assert ldp.guarantee(fitted(images[0], noisy, epochs=1, net=net)).epsilon == np.inf


def test_a_training_that_is_stopped_keeps_its_receipts(images, noisy):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    model = FixMatch(network(), unlabelled_ratio=2)
    model.compile("adam", LOSS)
    with pytest.raises(KeyboardInterrupt):
        model.fit(images[0], noisy, 16, callbacks=[Stop()], verbose=0)
    assert ldp.guarantee(model).epsilon == 1.5


def pseudo_labeller(**settings):
    """Returns the function from logits to pseudo-labels and mask; the views change nothing."""
    net = keras.Sequential([keras.Input((NUM_CLASSES,)), keras.layers.Activation("linear")])
    model = FixMatch(net, *[keras.layers.GaussianNoise(0.0)] * 2, **settings)

    def pseudo_labels(logits):
        outputs = model({"labelled": logits, "unlabelled": logits}, training=True)
        return np.asarray(outputs["targets"]), np.asarray(outputs["mask"])

    return pseudo_labels


def test_pseudo_labels_are_those_of_the_formula():
    logits = np.log([[0.8, 0.1, 0.1], [0.4, 0.35, 0.25]]).astype(np.float32)
    targets, mask = pseudo_labeller(threshold=0.7)(logits)
    assert targets.tolist() == [[1, 0, 0], [1, 0, 0]] and mask.tolist() == [1, 0]
    soft = pseudo_labeller(temperature=0.5)(logits)[0]
    squares = np.array([[0.64, 0.01, 0.01], [0.16, 0.1225, 0.0625]])
    np.testing.assert_allclose(soft, squares / squares.sum(axis=1, keepdims=True), rtol=1e-5)


def test_alignment_moves_pseudo_labels_to_the_priors():
    pseudo_labels = pseudo_labeller(priors=[0.2, 0.4, 0.4], threshold=0.5, temperature=1.0)
    logits = np.log(np.full((4, 3), [0.6, 0.2, 0.2])).astype(np.float32)
    # The running mean of predictions forgets slowly.
    for _ in range(600):
        targets, _ = pseudo_labels(logits)
    np.testing.assert_allclose(targets[0], [0.2, 0.4, 0.4], atol=0.01)


def test_clusters_keep_the_labels_that_agree(images, noisy):
    """DenoiseSSL: with perfect clusters, training uses true labels only."""
    public = public_input(None, images[1], None)
    labelled = read_targets(noisy, public, 300, NUM_CLASSES, "values")
    assert np.array_equal(labelled.classes, images[1][labelled.rows])
    assert len(labelled.rows) == (np.asarray(noisy) == images[1]).sum()
    assert ldp.guarantee(fitted(images[0], noisy, 1, clusters=images[1])).epsilon == 1.5


def test_posteriors_and_weights_are_the_targets(noisy):
    weights = np.r_[np.zeros(100), np.full(200, 2.0)]
    public = public_input(None, None, weights)
    labelled = read_targets(noisy, public, 300, NUM_CLASSES, "posterior")
    np.testing.assert_allclose(labelled.targets, noisy.posterior()[100:], rtol=1e-6)
    assert labelled.rows.tolist() == list(range(100, 300)) and set(labelled.weights) == {2.0}


IMAGES, CLASSES = shapes(30)
BAD = {
    "few labels": (IMAGES, np.where(np.arange(30) < 2, CLASSES, -1), {}, r"got 2 without"),
    "a class missing": (IMAGES, np.where(CLASSES == 1, -1, CLASSES), {}, r"classes \[1\]"),
    "other sums": (IMAGES, np.full((30, 3), 0.5), {}, "sum to one"),
    "signed": (IMAGES, np.full((30, 3), [-1.0, 1.0, 1.0]), {}, "LabelWeightedLoss"),
    "too few": (IMAGES, CLASSES[:9], {}, "one label per image"),
    "a column": (IMAGES, CLASSES[:, None], {}, "labels.ravel()"),
    "weights": (IMAGES, CLASSES, {"sample_weight": -np.ones(30)}, "at least 0"),
    "clusters": (IMAGES, np.eye(3)[CLASSES], {"clusters": CLASSES}, "one noisy class per image"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    images, labels, options, match = BAD[case]
    model = FixMatch(network())
    model.compile("sgd", LOSS)
    with pytest.raises(ValueError, match=match):
        model.fit(images, labels, verbose=0, **options)
    assert model.optimizer.iterations == 0
