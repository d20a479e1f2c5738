"""LabelWeightedLoss: numbers, slopes, dtypes, errors."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.keras_layers import LabelWeightedLoss

WEIGHTS = np.array([[1.5, -0.5, 0.0], [-0.5, 2.0, -0.5], [1.0, 0.0, 0.0]])
LOGITS = np.array([[0.1, -2.0, 1.0], [3.0, 0.0, -1.0], [0.5, 0.5, 0.0]])


def softmax(logits):
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


EXPECTED = -(WEIGHTS * np.log(softmax(LOGITS))).sum(axis=1)


@pytest.mark.parametrize(
    "base",
    ["categorical_crossentropy", "sparse_categorical_crossentropy", "CategoricalCrossentropy"],
)
def test_closed_form(base):
    from_logits = LabelWeightedLoss(base, from_logits=True, reduction=None, dtype="float64")
    np.testing.assert_allclose(from_logits(WEIGHTS, LOGITS), EXPECTED, rtol=1e-10)
    from_probabilities = LabelWeightedLoss(base, reduction=None, dtype="float64")
    np.testing.assert_allclose(from_probabilities(WEIGHTS, softmax(LOGITS)), EXPECTED, rtol=1e-10)


@pytest.mark.parametrize("from_logits", [False, True])
def test_closed_form_equals_the_generic_path(from_logits):
    base = keras.losses.CategoricalCrossentropy(from_logits=from_logits)
    y_pred = LOGITS if from_logits else softmax(LOGITS)
    actual = LabelWeightedLoss(base, reduction=None)(WEIGHTS, y_pred)
    np.testing.assert_allclose(actual, EXPECTED, rtol=1e-5)


def test_from_logits_reaches_a_named_base():
    base = "BinaryCrossentropy"
    actual = LabelWeightedLoss(base, from_logits=True)(WEIGHTS, LOGITS)
    probabilities = 1.0 / (1.0 + np.exp(-LOGITS))
    expected = LabelWeightedLoss(base)(WEIGHTS, probabilities)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("base", "dtype", "scale"),
    [
        ("categorical_crossentropy", "float16", 3e4),
        ("categorical_crossentropy", "float32", -1e4),
        ("categorical_focal_crossentropy", "bfloat16", 1e4),
    ],
)
def test_extreme_logits_are_finite(base, dtype, scale):
    logits = tf.cast(scale * tf.eye(3), dtype)
    with tf.GradientTape() as tape:
        tape.watch(logits)
        value = LabelWeightedLoss(base, from_logits=True)(WEIGHTS, logits)
    assert value.dtype == "float32"
    assert np.isfinite(float(value))
    assert np.all(np.isfinite(tf.cast(tape.gradient(value, logits), "float32")))


def test_certain_probabilities_are_finite():
    base, probabilities = "categorical_crossentropy", tf.eye(3)
    with tf.GradientTape() as tape:
        tape.watch(probabilities)
        value = LabelWeightedLoss(base)(WEIGHTS, probabilities)
    assert np.isfinite(float(value))
    assert np.all(np.isfinite(tape.gradient(value, probabilities)))


@pytest.mark.parametrize("dtype", ["float16", "mixed_bfloat16"])
def test_half_precision_dtypes_are_raised(dtype):
    loss = LabelWeightedLoss(from_logits=True, dtype=dtype)
    assert loss.dtype == "float32"
    large = np.array([[70_000.0, -69_999.0]])  # beyond float16
    assert np.isfinite(float(loss(large, np.array([[0.5, 0.0]]))))


def test_unknown_batch_size_and_xla():
    loss = LabelWeightedLoss("mse")
    compiled = tf.function(loss, jit_compile=True, reduce_retracing=True)
    traced = tf.function(loss, input_signature=[tf.TensorSpec((None, 3))] * 2)
    weights, logits = tf.constant(WEIGHTS, tf.float32), tf.constant(softmax(LOGITS), tf.float32)
    for rows in (2, 3):
        expected = loss(weights[:rows], logits[:rows])
        for function in (compiled, traced):
            np.testing.assert_allclose(function(weights[:rows], logits[:rows]), expected, rtol=1e-5)


def mean_loss(y_true, y_pred):
    return keras.ops.mean((y_true - y_pred) ** 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"base": keras.losses.SparseCategoricalCrossentropy()},
            r'Pass base="sparse_categorical_crossentropy"',
        ),
        ({"base": mean_loss, "from_logits": True}, r"needs a base by name.*mean_loss"),
        (
            {"base": keras.losses.MeanSquaredError(), "from_logits": True},
            r"Set from_logits on the instance",
        ),
    ],
)
def test_constructor_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        LabelWeightedLoss(**arguments)


@pytest.mark.parametrize(
    ("y_true", "y_pred", "message"),
    [
        (np.zeros(3), LOGITS, r"y_true must have shape \(batch, 3\).*\(3,\).*estimation\.debiased"),
        (WEIGHTS, np.zeros(3), r"y_pred must have shape \(batch, K\).*got \(3,\)"),
        (np.zeros((3, 2)), LOGITS, r"y_true must have shape \(batch, 3\), got \(3, 2\)"),
    ],
)
def test_call_errors(y_true, y_pred, message):
    with pytest.raises(ValueError, match=message):
        LabelWeightedLoss()(y_true, y_pred)


def test_base_must_return_one_loss_per_example():
    with pytest.raises(ValueError, match=r"one loss per example, got shape \(\)"):
        LabelWeightedLoss(mean_loss)(WEIGHTS, LOGITS)


def slope(weights, signs):
    """|d loss / dt| of the debiased loss of `loss(t, k) = signs[k] * t`, which is 1-Lipschitz."""

    def base(y_true, y_pred):
        return keras.ops.sum(y_true * y_pred, axis=-1)

    t = tf.constant(0.7, tf.float64)
    with tf.GradientTape() as tape:
        tape.watch(t)
        y_pred = tf.reshape(t * tf.constant(signs, tf.float64), (1, -1))
        value = LabelWeightedLoss(base, reduction="sum", dtype="float64")(weights[None], y_pred)
    return abs(float(tape.gradient(value, t)))


@pytest.mark.parametrize(("epsilon", "k"), [(0.2, 2), (3.0, 8)])
def test_the_lipschitz_bound_holds_and_the_l1_norm_is_attained(epsilon, k, channel):
    """Lemma 19 of Ghazi et al. (2021), with the bound in the docstring."""
    weights = np.linalg.inv(channel(epsilon, k))[0]
    bound = 1.0 + 2.0 * k / math.expm1(epsilon)
    for signs in np.random.default_rng(0).uniform(-1, 1, size=(20, k)):
        assert slope(weights, signs) <= bound
    worst = slope(weights, np.sign(weights))
    l1_norm = 1.0 + 2.0 * (k - 1) / math.expm1(epsilon)
    assert worst == pytest.approx(l1_norm, rel=1e-9)
    # The lemma counts the noisy label twice.
    assert bound - worst == pytest.approx(2.0 / math.expm1(epsilon), rel=1e-6)
