"""DivideMix: which labels it believes, what it trains on, what it states."""

import numpy as np
import pytest
from _shapes import NUM_CLASSES, network, shapes

import tf_labeldp as ldp
from tf_labeldp.accounting import public_input
from tf_labeldp.mechanisms import Priors
from tf_labeldp.semi_supervised import DivideMix
from tf_labeldp.semi_supervised.targets import Targets, read_targets

keras = pytest.importorskip("keras")
VIEWS = {"weak": keras.layers.GaussianNoise(0.1), "strong": keras.layers.GaussianNoise(0.2)}


def compiled(**settings):
    model = DivideMix(network(), **{**VIEWS, **settings})
    model.compile(keras.optimizers.Adam(3e-3), metrics=["accuracy"])
    return model


@pytest.fixture(scope="session", params=["mixture", "channel"])
def trained(request, images, noisy):
    model = compiled(division=request.param)
    history = model.fit(images[0], noisy, 16, epochs=5, warmup_epochs=3, verbose=0)
    return model, history


def test_it_learns_the_true_classes_from_noisy_ones(trained):
    model, history = trained
    test, truth = shapes(150, seed=1)
    assert model.evaluate(test, np.eye(NUM_CLASSES)[truth], verbose=0)[1] > 0.95
    assert len(history.history["loss"]) == 5 and history.epoch == list(range(5))
    np.testing.assert_allclose(model.predict(test, verbose=0).sum(axis=1), 1, rtol=1e-5)


def test_it_believes_the_labels_that_are_true(trained, images, noisy):
    model, history = trained
    labelled = read_targets(noisy, public_input(None, None, None), 300, NUM_CLASSES, "values")
    believed = model.clean_probabilities(model.network, images[0], labelled) > 0.5
    is_true = np.asarray(noisy) == images[1]
    assert believed[is_true].mean() > 0.9 and believed[~is_true].mean() < 0.1
    assert abs(history.history["believed"][-1] - is_true.mean()) < 0.1


@pytest.mark.holds("semi_supervised.DivideMix")
def test_it_carries_the_receipts_of_its_labels(trained, noisy, tmp_path):
    model, _ = trained
    assert ldp.guarantee(model).epsilon == noisy.guarantee().epsilon
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert ldp.guarantee(loaded).epsilon == noisy.guarantee().epsilon
    test, _ = shapes(30, seed=1)
    np.testing.assert_array_equal(loaded(test), model(test))


def test_the_channel_gives_the_posterior_of_the_noisy_label(noisy):
    """By enumeration: P[true = noisy | noisy, image] over all classes."""
    model = compiled(division="channel")
    channel = noisy.mechanism.transition_matrix()
    model._channel.assign(channel)
    shares = np.array([[0.7, 0.2, 0.1], [0.2, 0.3, 0.5], [1.0, 0.0, 0.0]], np.float32)
    model._guess = lambda net, images: shares
    for label in range(3):
        labelled = Targets(np.arange(3), np.eye(3)[[label] * 3], np.ones(3), None)
        found = model.clean_probabilities(model.network, np.zeros((3, 1)), labelled)
        joint = shares * channel[:, label]
        np.testing.assert_allclose(found, joint[:, label] / joint.sum(axis=1), rtol=1e-5)


def test_labels_without_a_receipt_promise_nothing(images, noisy):
    model = compiled()
    model.fit(images[0][:60], np.asarray(noisy)[:60], 16, epochs=1, warmup_epochs=1, verbose=0)
    assert ldp.guarantee(model).epsilon == np.inf


def test_the_channel_must_be_known(images, noisy):
    with pytest.raises(ValueError, match="division='channel' needs noisy labels"):
        compiled(division="channel").fit(images[0], np.asarray(noisy), verbose=0)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"clean_threshold": 0.0}, "clean_threshold"),
        ({"division": "guess"}, "division"),
        ({"priors": [0.5, 0.5]}, "priors"),
        ({"priors": Priors(np.full((2, 3), 1 / 3), groups=np.array([0, 1, 1]))}, "priors"),
    ],
)
def test_bad_settings(options, match):
    with pytest.raises(ValueError, match=match):
        DivideMix(network(), **options)


def test_bad_images(images, noisy):
    model = DivideMix(network())
    model.compile("adam")
    with pytest.raises(ValueError, match="255"):
        model.fit(images[0] * 255, noisy)


def test_the_channel_is_not_trained(trained, noisy):
    model, _ = trained
    [channel] = [weight for weight in model.weights if weight.name == "channel"]
    networks = model.network.trainable_variables + model.second.trainable_variables
    assert {id(one) for one in model.trainable_variables} == {id(one) for one in networks}
    if model.division == "channel":
        expected = noisy.mechanism.transition_matrix()
        np.testing.assert_allclose(keras.ops.convert_to_numpy(channel), expected, rtol=1e-6)
