"""ALIBILoss: the posterior's cross-entropy, its gradient, extremes, saving, bad input."""

from __future__ import annotations

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import special, stats

from tf_labeldp.keras_layers import ALIBILoss

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(6, 4))
NOISY = np.eye(4)[[0, 2, 1, 1, 3, 0]] + RNG.laplace(scale=0.7, size=(6, 4))
NOISES = ["laplace", "gaussian"]


def softmax(logits):
    return special.softmax(logits, axis=-1)


def posterior(noise, scale, noisy=NOISY, prior=None):
    """Returns Bayes' rule with the densities of the noise, one factor per entry."""
    law = (stats.laplace if noise == "laplace" else stats.norm)(scale=scale)
    prior = softmax(LOGITS) if prior is None else prior
    joint = np.stack([law.pdf(noisy - row).prod(axis=1) for row in np.eye(noisy.shape[1])], axis=1)
    joint = joint * prior
    return joint / joint.sum(axis=1, keepdims=True)


def gradient_of(loss, noisy, logits):
    logits = tf.convert_to_tensor(logits)
    with tf.GradientTape() as tape:
        tape.watch(logits)
        value = loss(noisy, logits)
    return value, tape.gradient(value, logits)


@pytest.mark.parametrize(
    ("noise", "scale", "from_logits"),
    [("laplace", 0.5, True), ("laplace", 2.0, False), ("gaussian", 2.0, True)],
)
def test_definition(noise, scale, from_logits):
    y_pred = LOGITS if from_logits else softmax(LOGITS)
    loss = ALIBILoss(noise, scale, from_logits, reduction=None, dtype="float64")
    expected = -np.sum(posterior(noise, scale) * np.log(softmax(LOGITS)), axis=1)
    np.testing.assert_allclose(loss(NOISY, y_pred), expected, rtol=1e-9)
    nearby = -np.sum(posterior(noise, 1.1 * scale) * np.log(softmax(LOGITS)), axis=1)
    assert np.max(np.abs(loss(NOISY, y_pred) - nearby)) > 1e-3


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.holds("keras_layers.ALIBILoss")
def test_the_gradient_is_that_of_the_likelihood_of_the_noisy_row(noise):
    """``-log sum_k p_k f(x - e_k)``, whose expectation the true posterior minimises."""
    law = (stats.laplace if noise == "laplace" else stats.norm)(scale=0.8)
    densities = np.stack([law.logpdf(NOISY - row).sum(axis=1) for row in np.eye(4)], axis=1)
    logits = tf.convert_to_tensor(LOGITS)
    with tf.GradientTape() as tape:
        tape.watch(logits)
        value = -tf.reduce_sum(tf.reduce_logsumexp(tf.nn.log_softmax(logits) + densities, axis=-1))
    loss = ALIBILoss(noise, 0.8, reduction="sum", dtype="float64")
    found = gradient_of(loss, NOISY, LOGITS)[1]
    np.testing.assert_allclose(found, tape.gradient(value, logits), atol=1e-12)


def test_the_value_is_no_measure_of_fit():
    """A confident wrong prediction costs nothing, as the docstring warns."""
    loss = ALIBILoss("laplace", 1.0)
    assert float(loss(np.array([[3.0, 0.0]]), np.array([[0.0, 60.0]]))) < 1e-6
    assert float(loss(np.array([[3.0, 0.0]]), np.array([[0.0, 0.0]]))) == pytest.approx(np.log(2))


def test_of_a_mechanism():
    mechanism = SimpleNamespace(noise="gaussian", scale=1.25)
    loss = ALIBILoss.of(mechanism, from_logits=False, name="n")
    assert (loss.noise, loss.scale, loss.from_logits, loss.name) == ("gaussian", 1.25, False, "n")


@pytest.mark.parametrize(
    ("noise", "scale", "dtype"), [("laplace", 1e-3, "float16"), ("gaussian", 1e6, "float32")]
)
def test_extreme_logits_and_rows_are_finite(noise, scale, dtype):
    logits = tf.cast(1e4 * RNG.choice([-1.0, 0.0, 1.0], size=(8, 1000)), dtype)
    for noisy in (RNG.normal(size=(8, 1000)), 1e6 * RNG.normal(size=(8, 1000))):
        value, gradient = gradient_of(ALIBILoss(noise, scale), noisy, logits)
        assert value.dtype == "float32"
        assert np.isfinite(float(value)) and float(value) >= 0.0
        assert np.all(np.isfinite(tf.cast(gradient, "float32")))


@pytest.mark.parametrize("noise", NOISES)
def test_tiny_scales_and_probabilities_of_zero_are_finite(noise):
    certain = np.eye(4, dtype="float32")[[0, 1, 2, 3, 0, 1]]
    for loss, scores in (
        (ALIBILoss(noise, 1e-25), LOGITS.astype("float32")),
        (ALIBILoss(noise, 0.5, from_logits=False), certain),
    ):
        value, gradient = gradient_of(loss, NOISY, scores)
        assert np.isfinite(float(value)) and np.all(np.isfinite(gradient))


def test_large_laplace_rows_keep_their_precision():
    """``|x| - |x - 1|`` in float32 at x = 3e7 is 0 or 2; it has to be 1."""
    noisy = np.array([[3e7 + 1.0, -3e7]], dtype="float32")
    weights = np.array([0.3 * np.e, 0.7 / np.e])
    expected = -np.sum(weights / weights.sum() * np.log([0.3, 0.7]))
    found = ALIBILoss("laplace", 1.0)(noisy, np.log([[0.3, 0.7]]))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


FEATURES = RNG.normal(size=(6, 3)).astype("float32")


def model_for(loss, **options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    model.compile(keras.optimizers.SGD(0.1), loss, **options)
    return model


JIT, GRAPH = {"jit_compile": True}, {"jit_compile": False}


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "options"), [("laplace", JIT), ("gaussian", GRAPH)])
def test_a_step_of_training_is_the_gradient(noise, options):
    """In every mode, with a last batch of one, and `evaluate` afterwards."""
    model = model_for(ALIBILoss(noise, 0.8), **options)
    kernel = model.layers[0].kernel.numpy()
    prior = softmax(FEATURES[:5] @ kernel)
    step = FEATURES[:5].T @ (prior - posterior(noise, 0.8, NOISY[:5], prior)) / 5
    model.fit(FEATURES[:5], NOISY[:5], batch_size=5, epochs=1, verbose=0)
    np.testing.assert_allclose(model.layers[0].kernel.numpy(), kernel - 0.1 * step, atol=1e-5)
    model.fit(FEATURES, NOISY, batch_size=5, verbose=0)
    assert np.isfinite(model.evaluate(FEATURES, NOISY, batch_size=5, verbose=0))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("normal", 1.0), ValueError, r"noise must be one of .* got 'normal'"),
        (("laplace", 0.0), ValueError, r"scale must be finite and above zero.*0\.0"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        ALIBILoss(*arguments)


@pytest.mark.parametrize(
    ("y_true", "y_pred", "message"),
    [
        (np.zeros((6, 3)), LOGITS, r"y_true must have shape \(batch, 4\), got \(6, 3\).*ALIBI"),
        (NOISY, np.zeros((6, 4, 1)), r"y_pred must have shape \(batch, K\).*\(6, 4, 1\)"),
        (np.zeros((6, 1)), np.zeros((6, 1)), "y_pred must have scores of at least two classes"),
    ],
    ids=["classes", "rank", "binary"],
)
def test_bad_shapes(y_true, y_pred, message):
    with pytest.raises(ValueError, match=message):
        ALIBILoss("laplace", 1.0)(y_true, y_pred)


def test_nan_rows_show():
    assert np.isnan(float(ALIBILoss("gaussian", 1.0)(np.full((1, 4), np.nan), LOGITS[:1])))
