"""Mixup: the arithmetic, the distribution of the coefficient, and where it runs."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from tf_labeldp.keras_layers import LabelWeightedLoss, Mixup

X = np.arange(8.0, dtype="float32").reshape(4, 2)
Y = np.eye(4, dtype="float32")


def mixed_by(monkeypatch, lam, x, y):
    """Returns a mixed batch whose coefficient is not drawn."""
    monkeypatch.setattr(Mixup, "symmetric_beta", lambda self, alpha, seed: lam)
    return Mixup(1.0)((x, y), training=True)


def test_arithmetic_with_the_reversed_batch(monkeypatch):
    x, y = mixed_by(monkeypatch, 0.25, X, Y)
    np.testing.assert_allclose(x, 0.25 * X + 0.75 * X[::-1])
    np.testing.assert_allclose(y, 0.25 * Y + 0.75 * Y[::-1])


def test_nested_inputs_keep_structure_shapes_and_dtypes():
    x = {"a": X, "b": (X[:, :1].astype("float64"), X.reshape(4, 1, 2).astype("float16"))}
    mixed, y = Mixup(1.0, seed=3)((x, Y), training=True)
    assert set(mixed) == {"a", "b"}
    lam = float(y[0, 0])
    for before, after in zip(keras.tree.flatten(x), keras.tree.flatten(mixed), strict=True):
        assert after.dtype == before.dtype
        expected = lam * before + (1 - lam) * before[::-1]
        np.testing.assert_allclose(after, expected, rtol=2e-3)


@pytest.mark.parametrize(("alpha", "training"), [(0.0, True), (1.0, False), (1.0, None)])
def test_identity(alpha, training):
    x, y = Mixup(alpha)((X, Y), training=training)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)


def p_value_of_lower_half(draws, alpha):
    """Kolmogorov-Smirnov test below 1/2, where tiny draws are precise in float32."""
    return stats.kstest(draws[draws < 0.5], lambda x: 2 * stats.beta(alpha, alpha).cdf(x)).pvalue


@pytest.mark.parametrize("alpha", [0.2, 1.0, 8.0])
def test_coefficient_is_symmetric_beta(alpha):
    """The right distribution passes; 7 % off, either way, is rejected."""
    draws = Mixup.symmetric_beta(alpha, shape=(40_000,), seed=11).numpy()
    assert np.all((draws >= 0) & (draws <= 1))
    assert stats.binomtest(int(np.sum(draws < 0.5)), len(draws)).pvalue > 0.01
    for half in (draws, 1.0 - draws) if alpha >= 1 else (draws,):
        assert p_value_of_lower_half(half, alpha) > 0.01
        for wrong in (alpha * 1.07, alpha / 1.07):
            assert p_value_of_lower_half(half, wrong) < 0.01


def test_the_layer_draws_that_coefficient():
    layer = Mixup(4.0, seed=5)
    draw = tf.function(lambda: layer((X, Y), training=True)[1][0, 0])
    draws = np.array([float(draw()) for _ in range(2000)])
    assert stats.kstest(draws, stats.beta(4.0, 4.0).cdf).pvalue > 0.01
    assert stats.kstest(draws, stats.beta(6.0, 6.0).cdf).pvalue < 0.01


@pytest.mark.parametrize("alpha", [1e-3, 1e4])
def test_extreme_alpha_is_finite(alpha):
    draws = Mixup.symmetric_beta(alpha, shape=(10_000,), seed=1).numpy()
    assert np.all((draws >= 0) & (draws <= 1))
    assert abs(draws.mean() - 0.5) < 0.02


@pytest.mark.holds("keras_layers.Mixup")
def test_mixing_keeps_the_weighted_loss_unbiased(channel, monkeypatch):
    """In expectation over both noisy labels, the loss on mixed weights is that on mixed labels."""
    q, lam = channel(1.0, 3), 0.3
    weights, y = np.linalg.inv(q), (2, 0)
    prediction = np.array([[0.2, 0.5, 0.3]])
    loss = LabelWeightedLoss(dtype="float64")
    total = 0.0
    for z0 in range(3):
        for z1 in range(3):
            pair = np.zeros((2, 1)), weights[[z0, z1]]
            mixed = mixed_by(monkeypatch, lam, *pair)[1][:1]
            total += q[y[0], z0] * q[y[1], z1] * float(loss(mixed, prediction))
    clean = float(loss(lam * np.eye(3)[[2]] + (1 - lam) * np.eye(3)[[0]], prediction))
    assert total == pytest.approx(clean, rel=1e-9)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_graph_and_xla(jit_compile):
    layer = Mixup(8.0, seed=2)
    function = tf.function(lambda x, y: layer((x, y), training=True), jit_compile=jit_compile)
    outputs = [function(X, Y) for _ in range(2)]
    lams = [float(y[0, 0]) for _, y in outputs]
    assert lams[0] != lams[1]
    for (x, _), lam in zip(outputs, lams, strict=True):
        np.testing.assert_allclose(x, lam * X + (1 - lam) * X[::-1], rtol=1e-5)


def functional_model():
    """Maps `(x, y)` to the predictions and the mixed targets, concatenated."""
    x, y = keras.Input((2,)), keras.Input((4,))
    mixed_x, mixed_y = Mixup(8.0, seed=1)((x, y))
    logits = keras.layers.Dense(4, dtype="float32")(mixed_x)
    model = keras.Model([x, y], keras.layers.Concatenate(dtype="float32")([logits, mixed_y]))

    def loss(_, outputs):
        return keras.losses.categorical_crossentropy(outputs[:, 4:], outputs[:, :4], True)

    model.compile("adam", loss=loss)
    return model


def test_functional_model():
    model = functional_model()
    history = model.fit([X, Y], Y, epochs=2, batch_size=2, verbose=0)
    assert np.all(np.isfinite(history.history["loss"]))
    np.testing.assert_array_equal(model.predict([X, Y], verbose=0)[:, 4:], Y)  # not mixed
    assert np.any(np.asarray(model([X, Y], training=True))[:, 4:] != Y)


def test_mixed_precision_keeps_dtypes(mixed_precision):
    layer = Mixup(8.0, seed=1)
    assert layer.dtype_policy.name == mixed_precision
    weights = 1e5 * Y  # beyond float16
    x, y = layer((tf.cast(X, layer.compute_dtype), weights), training=True)
    assert x.dtype == layer.compute_dtype
    assert y.dtype == "float32"
    assert np.all(np.isfinite(y))
    model = functional_model()
    history = model.fit([X, Y], Y, epochs=1, verbose=0)
    assert np.all(np.isfinite(history.history["loss"]))


@pytest.mark.parametrize("alpha", [-1.0, float("nan")])
def test_alpha_error(alpha):
    with pytest.raises(ValueError, match=r"alpha must be a finite number >= 0, got "):
        Mixup(alpha)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((X.astype("uint8"), Y), r"float tensors.* got x of dtype uint8 .*Cast inputs"),
        ((X, np.arange(4)), r"float tensors.* got y of dtype int64 .*one-hot"),
        ((X, np.arange(4.0)), r"targets of shape \(batch, K\), got y of shape \(4,\)"),
        (X, r"one pair \(x, y\).*training=True"),
    ],
)
def test_call_errors(inputs, message):
    with pytest.raises(ValueError, match=message):
        Mixup(1.0)(inputs, training=True)
