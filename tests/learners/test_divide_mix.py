"""DivideMix: the labels that it finds clean, and the accuracy that it reaches."""

import numpy as np
import pytest
from _shapes import NUM_CLASSES, network, shapes

from tf_labeldp.accounting import public_input
from tf_labeldp.semi_supervised import DivideMix

# The division of given labels, which a training shows on average.
from tf_labeldp.semi_supervised.targets import Targets, read_targets
from tf_labeldp.vault import Classes

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


@pytest.mark.slow
def test_it_learns_the_true_classes_from_noisy_ones(trained):
    model, history = trained
    test, truth = shapes(150, seed=1)
    assert model.evaluate(test, np.eye(NUM_CLASSES)[truth], verbose=0)[1] > 0.95
    assert len(history.history["loss"]) == 5 and history.epoch == list(range(5))
    np.testing.assert_allclose(model.predict(test, verbose=0).sum(axis=1), 1, rtol=1e-5)


@pytest.mark.slow
def test_the_true_labels_are_clean(trained, images, noisy):
    model, history = trained
    labelled = read_targets(
        noisy, public_input(None, None, None), 300, Classes(NUM_CLASSES), "values"
    )
    believed = model.clean_probabilities(model.network, images[0], labelled) > 0.5
    is_true = np.asarray(noisy) == images[1]
    assert believed[is_true].mean() > 0.9 and believed[~is_true].mean() < 0.1
    assert abs(history.history["believed"][-1] - is_true.mean()) < 0.1


def test_the_channel_gives_the_posterior_of_the_noisy_label(noisy):
    """By enumeration: P[true = noisy | noisy, image] over all classes."""
    model = compiled(division="channel")
    channel = noisy.mechanism.transition_matrix()
    [weight] = [weight for weight in model.weights if weight.name == "channel"]
    weight.assign(channel)
    shares = np.array([[0.7, 0.2, 0.1], [0.2, 0.3, 0.5], [1.0, 0.0, 0.0]], np.float32)
    logits = lambda images, training: np.log(np.maximum(shares, 1e-30))  # noqa: E731
    for label in range(3):
        labelled = Targets(np.arange(3), np.eye(3)[[label] * 3], np.ones(3), None)
        found = model.clean_probabilities(logits, np.zeros((3, 1)), labelled)
        joint = shares * channel[:, label]
        expected = joint[:, label] / joint.sum(axis=1)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-12)


def test_the_channel_must_be_known(images, noisy):
    with pytest.raises(ValueError, match="division='channel' needs NoisyLabels"):
        compiled(division="channel").fit(images[0], np.asarray(noisy), verbose=0)


def test_the_network_in_training_predicts_with_the_statistics_of_its_batch():
    """As in the public code: two labelled views, two unlabelled ones and the mixed batch."""
    keras.utils.set_random_seed(0)
    normalisation = keras.layers.BatchNormalization(momentum=0.5)
    network = keras.Sequential([keras.Input((3,)), normalisation, keras.layers.Dense(NUM_CLASSES)])
    model = DivideMix(network, keras.layers.Identity(), keras.layers.Identity())
    batch = {
        "labelled": np.ones((4, 3), np.float32),
        "targets": np.eye(3, dtype=np.float32)[[0, 1, 2, 0]],
        "clean": np.ones(4, np.float32),
        "unlabelled": np.ones((4, 3), np.float32),
    }
    model({"first": batch, "second": batch}, training=True)
    # Neither network moves its statistics when it predicts for the other one.
    for net in (model.network, model.second):
        np.testing.assert_allclose(net.layers[0].moving_mean, 1 - 0.5**5, rtol=1e-5)


def test_the_channel_is_not_trained(trained, noisy):
    model, _ = trained
    [channel] = [weight for weight in model.weights if weight.name == "channel"]
    networks = model.network.trainable_variables + model.second.trainable_variables
    assert set(map(id, model.trainable_variables)) == set(map(id, networks))
    if model.division == "channel":
        expected = noisy.mechanism.transition_matrix()
        np.testing.assert_allclose(keras.ops.convert_to_numpy(channel), expected, rtol=1e-6)
