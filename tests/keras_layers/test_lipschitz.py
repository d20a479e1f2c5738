"""How much debiasing enlarges the slope of a loss: Lemma 19 of Ghazi et al. (2021)."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.keras_layers import LabelWeightedLoss


def lipschitz_factor(epsilon, k):
    """The bound in the docstring of `LabelWeightedLoss`."""
    return 1.0 + 2.0 * k / math.expm1(epsilon)


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
def test_bound_holds_and_the_l1_norm_is_attained(epsilon, k, channel):
    weights = np.linalg.inv(channel(epsilon, k))[0]
    bound = lipschitz_factor(epsilon, k)
    for signs in np.random.default_rng(0).uniform(-1, 1, size=(20, k)):
        assert slope(weights, signs) <= bound
    worst = slope(weights, np.sign(weights))
    l1_norm = 1.0 + 2.0 * (k - 1) / math.expm1(epsilon)
    assert worst == pytest.approx(l1_norm, rel=1e-9)
    # The lemma's bound is 2 / (e^epsilon - 1) above it: it counts the noisy label twice.
    assert bound - worst == pytest.approx(2.0 / math.expm1(epsilon), rel=1e-6)
