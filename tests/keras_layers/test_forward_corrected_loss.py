"""ForwardCorrectedLoss: Patrini et al. (2017), Theorem 2."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.keras_layers import ForwardCorrectedLoss

LOGITS = np.random.default_rng(0).normal(size=(4, 3))
LABELS = np.array([0, 2, 1, 1])
WIDE = np.array([[0.5, 0.25, 0.25, 0.0], [0.0, 0.5, 0.25, 0.25], [0.1, 0.2, 0.3, 0.4]])


def softmax(logits):
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def test_definition_on_every_form_of_labels():
    p = softmax(LOGITS)
    expected = -np.log((p @ WIDE)[np.arange(4), LABELS])
    for from_logits, y_pred in ((True, LOGITS), (False, p)):
        loss = ForwardCorrectedLoss(WIDE, from_logits, reduction=None, dtype="float64")
        for y_true in (LABELS, LABELS[:, None], np.eye(4)[LABELS]):
            np.testing.assert_allclose(loss(y_true, y_pred), expected, rtol=1e-9)


def test_soft_labels():
    soft = np.random.default_rng(1).dirichlet(np.ones(4), size=4)
    loss = ForwardCorrectedLoss(WIDE, from_logits=True, reduction=None, dtype="float64")
    expected = sum(soft[:, z] * loss(np.full(4, z), LOGITS).numpy() for z in range(4))
    np.testing.assert_allclose(loss(soft, LOGITS), expected, rtol=1e-9)


@pytest.mark.parametrize("from_logits", [False, True])
def test_identity_matrix_is_cross_entropy(from_logits):
    y_pred = LOGITS if from_logits else softmax(LOGITS)
    actual = ForwardCorrectedLoss(np.eye(3), from_logits)(LABELS, y_pred)
    expected = keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits)(LABELS, y_pred)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def expected_loss(q, posterior, logits):
    """Expectation over the noisy label of an example with this posterior."""
    loss = ForwardCorrectedLoss(q, from_logits=True, reduction="sum", dtype="float64")
    return sum(mass * loss(np.array([z]), logits[None]) for z, mass in enumerate(posterior @ q))


def test_the_true_posterior_minimises_the_expected_loss(channel):
    q = channel(1.0, 3)
    posterior = np.array([0.6, 0.3, 0.1])
    logits = tf.constant(np.log(posterior))
    with tf.GradientTape() as tape:
        tape.watch(logits)
        best = expected_loss(q, posterior, logits)
    np.testing.assert_allclose(tape.gradient(best, logits), 0.0, atol=1e-12)
    for step in np.random.default_rng(0).normal(scale=0.1, size=(20, 3)):
        assert float(expected_loss(q, posterior, logits + step)) > float(best)


def test_a_nearby_epsilon_moves_the_minimiser(channel):
    posterior = np.array([0.6, 0.3, 0.1])
    logits = tf.constant(np.log(posterior))
    noisy, wrong = posterior @ channel(1.0, 3), channel(1.01, 3)
    loss = ForwardCorrectedLoss(wrong, from_logits=True, reduction="sum", dtype="float64")
    with tf.GradientTape() as tape:
        tape.watch(logits)
        value = sum(mass * loss(np.array([z]), logits[None]) for z, mass in enumerate(noisy))
    assert np.max(np.abs(tape.gradient(value, logits))) > 1e-4


@pytest.mark.parametrize(
    ("dtype", "scale", "labels"),
    [("float16", 1e4, LABELS), ("bfloat16", -1e4, np.eye(3)[LABELS])],
    ids=["ids", "one_hot"],
)
def test_extreme_logits_are_finite(dtype, scale, labels, channel):
    logits = tf.cast(scale * tf.eye(4, 3), dtype)
    for q in (np.eye(3), channel(1.0, 3), channel(1.0, 3, [0, 1])):
        with tf.GradientTape() as tape:
            tape.watch(logits)
            value = ForwardCorrectedLoss(q, from_logits=True)(labels, logits)
        assert value.dtype == "float32"
        assert np.isfinite(float(value))
        assert np.all(np.isfinite(tf.cast(tape.gradient(value, logits), "float32")))


def test_confident_and_wrong_keeps_its_gradient():
    """The zeros of the identity do not hide a probability of e^-1000."""
    logits = tf.constant([[1000.0, 0.0]])
    with tf.GradientTape() as tape:
        tape.watch(logits)
        value = ForwardCorrectedLoss(np.eye(2), from_logits=True)(np.array([1]), logits)
    np.testing.assert_allclose(value, 1000.0, rtol=1e-6)
    np.testing.assert_allclose(tape.gradient(value, logits), [[1.0, -1.0]], rtol=1e-6)


@pytest.mark.parametrize(("label", "from_logits"), [(-1, False), (3, True)])
def test_a_label_out_of_range_gives_nan(label, from_logits, channel):
    loss = ForwardCorrectedLoss(channel(1.0, 3), from_logits, reduction=None)
    values = loss(np.array([0, label]), softmax(LOGITS[:2])).numpy()
    assert np.isfinite(values[0])
    assert np.isnan(values[1])


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([[1.0], [1.0]], r"at least two columns.*\(2, 1\)"),
        ([[1.0, 0.0], [float("nan"), 1.0]], r"finite nonnegative.*row 1: \[nan, 1.0\]"),
        ([[1.5, -0.5], [-0.5, 1.5]], r"row 0: \[1.5, -0.5\].*LabelWeightedLoss"),
        ([[0.5, 0.5], [0.5, 0.50001]], r"sum to one, got 1.00001 in row 1.*transpose"),
    ],
)
def test_matrix_errors(matrix, message):
    with pytest.raises(ValueError, match=message):
        ForwardCorrectedLoss(matrix)


def test_rows_within_the_tolerance_pass():
    ForwardCorrectedLoss([[0.5, 0.5 + 9e-7], [0.5, 0.5]])


@pytest.mark.parametrize(
    ("y_true", "y_pred", "message"),
    [
        (LABELS, np.zeros((4, 4)), r"y_pred must have shape \(batch, 3\).*\(4, 4\).*3 units"),
        (np.zeros((4, 3)), LOGITS, r"y_true must be noisy labels.*\(batch, 4\).*\(4, 3\)"),
    ],
)
def test_call_errors(y_true, y_pred, message):
    with pytest.raises(ValueError, match=message):
        ForwardCorrectedLoss(WIDE)(y_true, y_pred)
