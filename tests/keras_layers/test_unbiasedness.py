"""LabelWeightedLoss is exactly unbiased: its mean over the channel is the loss on the true label.

Ghazi et al. (2021), equation 7, equation 17 and Lemma 18; Ghazi et al. (2024), appendix D.1.
"""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.keras_layers import LabelWeightedLoss

K = 6


def base_name(base):
    """Returns a test id without a memory address."""
    return base if isinstance(base, str) else getattr(base, "__name__", type(base).__name__)


def poly_loss(y_true, y_pred):
    """Poly-1 cross-entropy (Leng et al. 2022), nonlinear in the prediction."""
    p = keras.ops.sum(y_true * y_pred, axis=-1)
    return 1.0 - p - keras.ops.log(p)


BASES = [
    "categorical_crossentropy",
    "sparse_categorical_crossentropy",
    "mse",
    "categorical_focal_crossentropy",
    keras.losses.CategoricalCrossentropy(label_smoothing=0.1),
    poly_loss,
]


def base_values(base, predictions):
    """Returns the base loss of every prediction for every class, `(batch, K)`."""
    if base == "sparse_categorical_crossentropy":
        base = "categorical_crossentropy"
    function = keras.losses.get(base) if isinstance(base, str) else base
    function = function.call if isinstance(function, keras.losses.Loss) else function
    columns = [
        function(tf.constant(np.eye(K)[np.full(len(predictions), k)]), tf.constant(predictions))
        for k in range(K)
    ]
    return np.stack([np.asarray(column) for column in columns], axis=1)


def weighted(base, weights, predictions):
    loss = LabelWeightedLoss(base, reduction=None, dtype="float64")
    return loss(np.broadcast_to(weights, predictions.shape), predictions).numpy()


def expectation(base, probabilities, weights_of_output, predictions):
    """Returns `sum_z P[z] loss(w(z), prediction)`, `(batch,)`."""
    return sum(
        probability * weighted(base, weights, predictions)
        for probability, weights in zip(probabilities, weights_of_output, strict=True)
    )


@pytest.mark.parametrize("base", BASES, ids=base_name)
def test_randomized_response_is_unbiased(base, channel, predictions):
    expected = base_values(base, predictions)
    for epsilon, y in itertools.product((0.3, 2.0), range(K)):
        q = channel(epsilon, K)
        actual = expectation(base, q[y], np.linalg.inv(q), predictions)
        np.testing.assert_allclose(actual, expected[:, y], rtol=0, atol=1e-9)


@pytest.mark.parametrize("base", BASES, ids=base_name)
def test_weights_of_a_nearby_epsilon_are_biased(base, channel, predictions):
    q, wrong = channel(1.0, K), np.linalg.inv(channel(1.001, K))
    expected = base_values(base, predictions)
    gap = max(
        np.max(np.abs(expectation(base, q[y], wrong, predictions) - expected[:, y]))
        for y in range(K)
    )
    assert gap > 1e-5


def debiased_top_k(epsilon, labels):
    """Returns the coefficients of equation 17 for every label, `(K, K)`."""
    p = 1.0 / (np.exp(epsilon) + len(labels) - 1.0)
    in_top_k = np.isin(np.arange(K), labels).astype(float)
    return (np.eye(K) - p * in_top_k) / (1.0 - len(labels) * p)


@pytest.mark.parametrize("labels", [[2, 5], [0, 1, 4], [1, 2, 3, 4, 5]], ids=str)
def test_rr_top_k_is_unbiased_on_the_top_k(labels, channel, predictions):
    """Lemma 18; outside the top-k the expectation is the mean over the top-k."""
    base = poly_loss
    q, weights = channel(1.3, K, labels), debiased_top_k(1.3, labels)
    expected = base_values(base, predictions)
    for y in range(K):
        actual = expectation(base, q[y][labels], weights[labels], predictions)
        target = expected[:, y] if y in labels else expected[:, labels].mean(axis=1)
        np.testing.assert_allclose(actual, target, rtol=0, atol=1e-9)


def test_equation_17(predictions):
    labels, epsilon, noisy = [0, 2, 3], 0.8, 3
    p = 1.0 / (np.exp(epsilon) + len(labels) - 1.0)
    losses = base_values("mse", predictions)
    expected = (losses[:, noisy] - p * losses[:, labels].sum(axis=1)) / (1.0 - len(labels) * p)
    actual = weighted("mse", debiased_top_k(epsilon, labels)[noisy], predictions)
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


def test_rr_debiased_closed_form(channel, predictions):
    """Appendix D.1 of the LabelDP-Pro paper, with p = K / (e^epsilon + K - 1)."""
    base, epsilon, noisy = "categorical_crossentropy", 0.7, 4
    p = K / (np.exp(epsilon) + K - 1.0)
    losses = base_values(base, predictions)
    expected = (losses[:, noisy] - p / K * losses.sum(axis=1)) / (1.0 - p)
    actual = weighted(base, np.linalg.inv(channel(epsilon, K))[noisy], predictions)
    np.testing.assert_allclose(actual, expected, rtol=1e-9)


def gradient(loss, weights, logits):
    logits = tf.constant(logits)
    with tf.GradientTape() as tape:
        tape.watch(logits)
        value = loss(weights, logits)
    return tape.gradient(value, logits).numpy()


def test_equation_7_on_gradients(channel):
    base, epsilon, noisy = "categorical_focal_crossentropy", 0.9, 1
    logits = np.random.default_rng(1).normal(size=(3, K))
    loss = LabelWeightedLoss(base, from_logits=True, reduction="sum", dtype="float64")
    by_class = [gradient(loss, np.eye(K)[[k] * 3], logits) for k in range(K)]
    scale = (np.exp(epsilon) + K - 1.0) / (np.exp(epsilon) - 1.0)
    expected = scale * (by_class[noisy] - sum(by_class) / (np.exp(epsilon) + K - 1.0))
    weights = np.linalg.inv(channel(epsilon, K))[[noisy] * 3]
    np.testing.assert_allclose(gradient(loss, weights, logits), expected, atol=1e-9)


@pytest.mark.parametrize("base", ["categorical_crossentropy", "mse"])
def test_gradient_is_the_weighted_sum_of_gradients(base, predictions):
    """Weights may be negative, and rows need not sum to one."""
    weights = np.random.default_rng(2).normal(size=predictions.shape)
    loss = LabelWeightedLoss(base, reduction="sum", dtype="float64")
    expected = sum(
        weights[:, [k]] * gradient(loss, np.eye(K)[[k] * len(predictions)], predictions)
        for k in range(K)
    )
    np.testing.assert_allclose(gradient(loss, weights, predictions), expected, atol=1e-9)
