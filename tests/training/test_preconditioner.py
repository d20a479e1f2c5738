"""Clipping and noise in coordinates of the curvature: same guarantee, no label looked at."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.data import poisson_batches
from tf_labeldp.gradients._clip import Batch, Clip, Speed
from tf_labeldp.gradients._per_example_clipping import PerExampleClipping
from tf_labeldp.training import (
    AltConv,
    GaussNewton,
    LabelDPModel,
    LabelDPOptimizer,
    VertexLosses,
)

N, D, K = 40, 3, 4
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(N, D)).astype("f"), rng.integers(0, K, N)


def linear_vertices(x: np.ndarray, weights: tf.Variable) -> VertexLosses:
    def logits() -> tf.Tensor:
        return tf.constant(x) @ weights

    class Held:  # as a Keras variable holds one
        value = weights

    return VertexLosses(
        lambda: -tf.nn.log_softmax(logits()), lambda: tf.nn.softmax(logits()), [Held()]
    )


def exact_diagonal(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns the diagonal of the Gauss-Newton matrix of softmax regression: x^2 p (1 - p)."""
    logits = x @ weights
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    return (x**2).T @ (p * (1 - p)) / len(x)


def test_curvature_estimate_is_unbiased() -> None:
    x, _ = data()
    weights = tf.Variable(np.random.default_rng(1).normal(size=(D, K)).astype("f"))
    vertices, chooser = linear_vertices(x, weights), GaussNewton(N)
    tf.random.set_seed(3)
    draw = tf.function(lambda: chooser._curvature(vertices)[0])
    draws = np.stack([draw().numpy() for _ in range(2000)])
    exact = exact_diagonal(x, weights.numpy())
    error = draws.std(axis=0) / np.sqrt(len(draws))
    # Twelve entries: 5 standard errors are passed with a probability below 1e-5.
    assert np.all(np.abs(draws.mean(axis=0) - exact) < 5 * error)
    assert np.any(np.abs(draws.mean(axis=0) - 1.2 * exact) > 5 * error)


def test_scales_follow_the_curvature_and_have_mean_one() -> None:
    x, _ = data()
    weights = tf.Variable(np.zeros((D, K), "f"))
    chooser = GaussNewton(N, power=0.5, damping=0.1, momentum=0.0)
    [scales], [curvature] = chooser.scales(
        linear_vertices(x * np.array([1, 10, 0.1], "f"), weights), chooser.initial_state([(D, K)])
    )
    assert np.isclose(scales.numpy().mean(), 1.0, rtol=1e-5)
    h = curvature.numpy() / curvature.numpy().mean()
    expected = (h + 0.1) ** -0.25
    np.testing.assert_allclose(scales.numpy(), expected / expected.mean(), rtol=1e-4)
    assert scales.numpy()[1].max() < scales.numpy()[2].min()


def test_average_over_steps() -> None:
    x, _ = data()
    chooser = GaussNewton(N, momentum=0.75)
    weights = tf.Variable(np.zeros((D, K), "f"))
    before = [tf.ones([D, K])]
    _, [after] = chooser.scales(linear_vertices(x, weights), before)
    assert np.all(after.numpy() >= 0.75)


@pytest.mark.parametrize("method", ["ghost", "vectorized"])
@pytest.mark.parametrize("group_size", [1, 2])
def test_scaled_clipping_equals_a_loop(method: str, group_size: int) -> None:
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            layers.Conv2D(3, 3, activation="relu"),
            layers.LayerNormalization(),
            layers.Flatten(),
            layers.Dense(5, activation="tanh"),
            layers.Dense(K, use_bias=False),
        ]
    )
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(8, 6, 6, 1)).astype("f"), rng.integers(0, K, 8)
    weights = np.array([1, 1, 0, 1, 1, 0.5, 1, 1], "f")
    scales = [
        tf.constant(rng.uniform(0.2, 3.0, v.shape).astype("f")) for v in model.trainable_variables
    ]

    def loss(y_true: Any, y_pred: Any) -> tf.Tensor:
        return tf.nn.sparse_softmax_cross_entropy_with_logits(y_true, y_pred)

    scaled, norms = [], []
    for first in range(0, 8, group_size):
        rows = slice(first, first + group_size)
        with tf.GradientTape() as tape:
            losses = loss(tf.constant(y[rows]), model(x[rows], training=True)) * weights[rows]
            total = tf.reduce_sum(losses) / max(1, np.count_nonzero(weights[rows]))
        raw = tape.gradient(total, [v.value for v in model.trainable_variables])
        scaled.append([g.numpy() * s.numpy() for g, s in zip(raw, scales, strict=True)])
        norms.append(np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in scaled[-1])))
    clip = float(np.median(norms))  # some are clipped, some are not
    sums = [
        sum(min(1.0, clip / max(norm, 1e-12)) * g for norm, g in zip(norms, parts, strict=True))
        for parts in zip(*scaled, strict=True)
    ]
    found = PerExampleClipping(model, Speed(method)).clipped_sum(
        Batch(x, y, weights, loss), Clip(clip, group_size, scales)
    )
    np.testing.assert_allclose(found.norms, norms, rtol=1e-4, atol=1e-6)
    for got, expected in zip(found.gradients, sums, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def private_model(**settings: Any) -> LabelDPModel:
    keras.utils.set_random_seed(4)
    inputs = keras.Input((D,))
    model = LabelDPModel(inputs, keras.layers.Dense(K)(inputs))
    arguments = {
        "noise_multiplier": 2.0,
        "preconditioner": GaussNewton(num_examples=16),
        "insecure_seed": 5,
        **settings,
    }
    model.compile(LabelDPOptimizer(keras.optimizers.SGD(0.5), 1.0, **arguments), loss=LOSS)
    return model


def test_training_takes_the_step_back_from_the_scaled_coordinates() -> None:
    x, y = data()
    model = private_model(noise_multiplier=1e-9)
    before = model.get_weights()
    batches = poisson_batches(x, y, sampling_probability=1.0, steps=1, insecure_seed=1)
    model.fit(batches, verbose=0)
    curvature = [v.numpy() for v in model.optimizer._curvature]
    mean = sum(c.sum() for c in curvature) / sum(c.size for c in curvature)
    raw = [(c / mean + 0.1) ** -0.5 for c in curvature]
    scale = sum(r.size for r in raw) / sum(r.sum() for r in raw)
    scales = [tf.constant(r * scale) for r in raw]
    moved = [old - new for old, new in zip(before, model.get_weights(), strict=True)]
    model.set_weights(before)
    result = PerExampleClipping(model).clipped_sum(
        Batch(x, y, np.ones(N), model._step.per_example_loss), Clip(1.0, scales=scales)
    )
    for move, s, g in zip(moved, scales, result.gradients, strict=True):
        np.testing.assert_allclose(move, 0.5 * s * g / N, rtol=1e-3, atol=1e-5)


def test_scales_do_not_depend_on_labels() -> None:
    x, y = data()
    found = []
    for labels in (y, (y + 1) % K):
        model = private_model()
        batches = poisson_batches(x, labels, sampling_probability=0.5, steps=1, insecure_seed=1)
        model.fit(batches, verbose=0)
        found.append([v.numpy() for v in model.optimizer._curvature])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_guarantee_is_that_of_plain_dp_sgd() -> None:
    x, y = data()
    stated = []
    for preconditioner in (None, "gauss_newton"):
        model = private_model(preconditioner=preconditioner and GaussNewton(num_examples=16))
        batches = poisson_batches(x, y, sampling_probability=0.5, steps=2, insecure_seed=1)
        model.fit(batches, verbose=0)
        stated.append(model.guarantee(1e-3).epsilon)
    assert stated[0] == stated[1] > 0


def test_arrays_bring_no_public_examples() -> None:
    x, y = data()
    with pytest.raises(ValueError, match="GaussNewton needs 16 public examples"):
        private_model().fit(x, y, batch_size=8, verbose=0)


def test_bad_input() -> None:
    for settings in ({"num_examples": 1}, {"power": 0.0}, {"power": 1.5}, {"damping": 0.0}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            GaussNewton(**settings)
    with pytest.raises(ValueError, match="momentum"):
        GaussNewton(momentum=1.0)
    with pytest.raises(ValueError, match="AltConv were both given"):
        LabelDPOptimizer("sgd", 1.0, 1.0, AltConv(8), preconditioner="gauss_newton")
    with pytest.raises(TypeError, match="preconditioner must be"):
        LabelDPOptimizer("sgd", 1.0, 1.0, preconditioner="newton")


def test_config_round_trip() -> None:
    made = LabelDPOptimizer("sgd", 1.0, 1.0, preconditioner=GaussNewton(8, 0.5, 0.2, 0.9))
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(made))
    assert again.get_config() == made.get_config()
    assert again.preconditioner.get_config() == made.preconditioner.get_config()
    assert isinstance(
        LabelDPOptimizer("sgd", 1.0, 1.0, preconditioner="gauss_newton").preconditioner,
        GaussNewton,
    )
