"""Smoothing of coefficients (section 3.3 of the paper)."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.gradients import smooth_coefficients

A = tf.constant([[0.5, 0.0], [0.1, 0.2], [0.2, 0.0]])
P = tf.constant([[0.9, 0.1], [0.5, 0.5], [0.2, 0.8]])


@pytest.mark.parametrize("smoothing", [0.0, 0.3, 0.75, 1.0])
def test_smoothing_mixes_with_uniform_coefficients(smoothing):
    smooth = smooth_coefficients(A, smoothing)
    np.testing.assert_allclose(smooth, smoothing * A + (1.0 - smoothing) / 6.0, rtol=1e-6)
    np.testing.assert_allclose(tf.reduce_sum(smooth), 1.0, rtol=1e-6)


def test_smoothing_mixes_with_predictions():
    smooth = smooth_coefficients(A, 0.75, "predictions", predictions=P)
    np.testing.assert_allclose(smooth, 0.75 * A + 0.25 * P / 3.0, rtol=1e-6)


@pytest.mark.parametrize("towards", ["uniform", "predictions"])
def test_padding_stays_at_zero(towards):
    a = tf.constant([[0.5, 0.0], [0.0, 0.0], [0.2, 0.3]])
    smooth = smooth_coefficients(a, 0.5, towards, predictions=P, mask=[1, 0, 1]).numpy()
    np.testing.assert_array_equal(smooth[1], [0.0, 0.0])
    np.testing.assert_allclose(smooth.sum(), 1.0, rtol=1e-6)


def test_smoothing_towards_predictions_only_shortens_a_gradient(case_of, flat):
    """G P / n = 0 for cross-entropy, so the direction stays; uniform coefficients change it."""
    case = case_of("conv")
    operator = case.operator()
    a = np.eye(3)[[0, 1, 2, 2, 1]] / 5
    gradient = flat(operator.matvec(a))
    shorter = flat(
        operator.matvec(smooth_coefficients(a, 0.6, "predictions", predictions=case.predictions))
    )
    np.testing.assert_allclose(shorter, 0.6 * gradient, atol=1e-10)
    turned = flat(operator.matvec(smooth_coefficients(a, 0.6)))
    cosine = turned @ gradient / np.linalg.norm(turned) / np.linalg.norm(gradient)
    assert cosine < 0.999


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"smoothing": 1.1}, "smoothing must be in [0, 1], got 1.1"),
        ({"smoothing": -0.1}, "smoothing must be in [0, 1], got -0.1"),
        ({"towards": "zero"}, "towards must be one of predictions, uniform, got 'zero'"),
        ({"towards": "predictions"}, "needs predictions="),
        ({"mask": [1, 1]}, "mask must have shape (3,), got (2,)"),
    ],
    ids=["above", "below", "towards", "predictions", "mask"],
)
def test_bad_arguments(changes, message):
    arguments = {"coefficients": A, "smoothing": 0.75, **changes}
    with pytest.raises(ValueError, match=re.escape(message)):
        smooth_coefficients(**arguments)
