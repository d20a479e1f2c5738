"""FixMatch: what it trains on, what it keeps, what it states."""

import numpy as np
import pytest
from _shapes import NUM_CLASSES, network, shapes

import tf_labeldp as ldp
from tf_labeldp.accounting import public_input
from tf_labeldp.mechanisms import Priors
from tf_labeldp.semi_supervised import FixMatch

keras = pytest.importorskip("keras")
LOSS = keras.losses.CategoricalCrossentropy(from_logits=True)


def fitted(images, labels, epochs=5, net=None, **settings):
    fit = {key: settings.pop(key) for key in ("clusters", "targets") if key in settings}
    model = FixMatch(net or network(), threshold=0.6, unlabelled_ratio=2, **settings)
    model.compile(keras.optimizers.Adam(3e-3), LOSS, metrics=["accuracy"])
    model.history = model.fit(images, labels, 16, epochs, verbose=0, **fit)
    return model


def other_network():
    """A network of other weights: equal ones would be known by what these tests did to them."""
    net = network()
    net.set_weights([1.1 * weights + 0.01 for weights in net.get_weights()])
    return net


@pytest.fixture(scope="session")
def trained(images, noisy):
    return fitted(images[0], noisy)


def test_it_learns_the_true_classes_from_noisy_ones(trained, images, noisy):
    test, truth = shapes(150, seed=1)
    assert (np.asarray(noisy) == images[1]).mean() < 0.8
    assert trained.evaluate(test, np.eye(NUM_CLASSES)[truth], verbose=0)[1] > 0.95
    assert trained.history.history["pseudo_labelled"][-1] > 0.5


@pytest.mark.holds("semi_supervised.FixMatch")
def test_it_carries_the_receipts_of_its_labels(trained, noisy, tmp_path):
    assert ldp.guarantee(trained).epsilon == noisy.guarantee().epsilon
    assert ldp.guarantee(trained.network).epsilon == noisy.guarantee().epsilon
    trained.save(tmp_path / "model.keras")
    assert ldp.guarantee(keras.models.load_model(tmp_path / "model.keras")).epsilon == 1.5


def test_labels_without_a_receipt_promise_nothing(images, noisy):
    model = fitted(images[0], np.asarray(noisy), epochs=1, net=other_network())
    assert ldp.guarantee(model).epsilon == np.inf


def test_what_was_trained_in_the_clear_before_is_not_covered(images, noisy):
    net = other_network()
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


def test_a_saved_model_has_the_same_outputs_and_settings(images, tmp_path):
    model = FixMatch(
        network(activation="softmax"),
        temperature=0.5,
        priors=[0.5, 0.3, 0.2],
        from_logits=False,
        strong=keras.layers.RandomFlip(),
    )
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(images[0]), model(images[0]))
    for name in FixMatch._SETTINGS:
        assert getattr(loaded, name) == getattr(model, name), name
    assert type(loaded.strong) is keras.layers.RandomFlip


def test_pseudo_labels_are_those_of_the_formula():
    model = FixMatch(network(), threshold=0.7)
    logits = np.log([[0.8, 0.1, 0.1], [0.4, 0.35, 0.25]]).astype(np.float32)
    targets, mask = model._pseudo_labels(logits)
    assert np.asarray(targets).tolist() == [[1, 0, 0], [1, 0, 0]]
    assert np.asarray(mask).tolist() == [1, 0]
    soft = FixMatch(network(), temperature=0.5)._pseudo_labels(logits)[0]
    squares = np.array([[0.64, 0.01, 0.01], [0.16, 0.1225, 0.0625]])
    np.testing.assert_allclose(soft, squares / squares.sum(axis=1, keepdims=True), rtol=1e-5)


def test_alignment_moves_pseudo_labels_to_the_priors():
    model = FixMatch(network(), priors=[0.2, 0.4, 0.4], threshold=0.5, temperature=1.0)
    logits = np.log(np.full((4, 3), [0.6, 0.2, 0.2])).astype(np.float32)
    for _ in range(600):  # the mean of what it has seen forgets slowly
        targets, _ = model._pseudo_labels(logits)
    np.testing.assert_allclose(targets[0], [0.2, 0.4, 0.4], atol=0.01)


def test_clusters_keep_the_labels_that_agree(images, noisy):
    """DenoiseSSL: with perfect clusters only true labels are trained on."""
    from tf_labeldp.semi_supervised.targets import read_targets

    made = read_targets(noisy, public_input(None, images[1], None), 300, NUM_CLASSES, "values")
    assert np.array_equal(made.classes, images[1][made.rows])
    assert len(made.rows) == (np.asarray(noisy) == images[1]).sum()
    assert ldp.guarantee(fitted(images[0], noisy, 1, clusters=images[1])).epsilon == 1.5


def test_posteriors_and_weights_are_the_targets(noisy):
    from tf_labeldp.semi_supervised.targets import read_targets

    weights = np.r_[np.zeros(100), np.full(200, 2.0)]
    made = read_targets(noisy, public_input(None, None, weights), 300, NUM_CLASSES, "posterior")
    np.testing.assert_allclose(made.targets, noisy.posterior()[100:], rtol=1e-6)
    assert made.rows.tolist() == list(range(100, 300)) and set(made.weights) == {2.0}


IMAGES, CLASSES = shapes(30)
BAD = {
    "0 to 255": (IMAGES * 255, CLASSES, {}, r"in \[0, 1\]"),
    "few labels": (IMAGES, np.where(np.arange(30) < 2, CLASSES, -1), {}, "2 labelled examples"),
    "a class missing": (IMAGES, np.where(CLASSES == 1, -1, CLASSES), {}, r"classes \[1\]"),
    "other sums": (IMAGES, np.full((30, 3), 0.5), {}, "sum to one"),
    "signed": (IMAGES, np.full((30, 3), [-1.0, 1.0, 1.0]), {}, "LabelWeightedLoss"),
    "too few": (IMAGES, CLASSES[:9], {}, "one label for"),
    "weights": (IMAGES, CLASSES, {"sample_weight": -np.ones(30)}, "at least 0"),
    "clusters": (IMAGES, np.eye(3)[CLASSES], {"clusters": CLASSES}, "noisy classes"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    images, labels, options, match = BAD[case]
    model = FixMatch(network())
    model.compile("sgd", LOSS)
    with pytest.raises(ValueError, match=match):
        model.fit(images, labels, verbose=0, **options)
    assert model.optimizer.iterations == 0


@pytest.mark.parametrize(
    "options, match",
    [
        ({"threshold": 1.0}, "threshold"),
        ({"unlabelled_ratio": 0}, "unlabelled_ratio"),
        ({"from_logits": False}, "from_logits=True"),
        ({"priors": [0.5, 0.5]}, "priors"),
        ({"priors": Priors(np.full((2, 3), 1 / 3), groups=np.array([0, 1, 1]))}, "priors"),
    ],
)
def test_bad_settings(options, match):
    with pytest.raises(ValueError, match=match):
        FixMatch(network(), **options)


@pytest.mark.parametrize("net", [None, keras.Sequential([keras.layers.Dense(3)])])
def test_networks_that_are_not_built(net):
    with pytest.raises(ValueError, match="built Keras model"):
        FixMatch(net)
