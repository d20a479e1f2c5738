"""Losses of public examples for each label, against a plain loop over examples and labels."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.plugins import OutputLosses, PerExampleClipping
from tf_labeldp.training import VertexLosses

N, D, K = 5, 3, 4
losses = keras.losses
CODES, ONE_HOT = tf.TensorSpec((8,), tf.int64), tf.TensorSpec((8, K), tf.float32)
COLUMN, NUMBERS = tf.TensorSpec((8, 1), tf.int32), tf.TensorSpec((8,), tf.float32)


def model(units: int, activation: str | None) -> keras.Model:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((D,))
    return keras.Model(inputs, keras.layers.Dense(units, activation=activation)(inputs))


def features() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)


def found(net: keras.Model, loss: Any, spec: Any, label_range: Any = None) -> Any:
    forward = PerExampleClipping(net).training_pass()
    x = tf.constant(features())
    return VertexLosses.of_model(forward, OutputLosses(net, loss), x, spec, label_range=label_range)


def focal(y_true: Any, y_pred: Any) -> Any:
    probability = tf.gather(tf.nn.softmax(y_pred), tf.cast(y_true, tf.int32), batch_dims=1)
    return -((1.0 - probability) ** 2) * tf.math.log(probability)


@pytest.mark.parametrize(
    ("loss", "spec", "activation"),
    [
        (losses.SparseCategoricalCrossentropy(from_logits=True), COLUMN, None),
        (losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.2), ONE_HOT, None),
        ("sparse_categorical_crossentropy", CODES, "softmax"),
        (losses.MeanSquaredError(), ONE_HOT, None),
        (focal, CODES, None),
    ],
    ids=["sparse column", "smoothed", "sparse by name", "squared one-hot", "a function"],
)
def test_losses_of_classes(loss: Any, spec: Any, activation: str | None) -> None:
    net = model(K, activation)
    function = keras.losses.get(loss) if isinstance(loss, str) else loss
    expected = np.zeros((N, K))
    for i in range(N):
        for k in range(K):
            if spec is ONE_HOT:
                y = np.eye(K, dtype=np.float32)[[k]]
            else:
                y = np.array([[k]] if spec is COLUMN else [k])
            expected[i, k] = np.ravel(function(y, net(features()[i : i + 1])))[0]
    vertices = found(net, loss, spec)
    values = vertices.losses()
    assert values.shape == (N, K)
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)
    # Plain cross-entropy alone saves evaluations.
    plain = bool(getattr(loss, "from_logits", False)) and not getattr(loss, "label_smoothing", 0.0)
    assert vertices.cross_entropy is plain
    if plain:
        np.testing.assert_allclose(tf.exp(-values), vertices.predictions(), rtol=1e-5)


@pytest.mark.parametrize(
    ("loss", "spec", "label_range", "ends"),
    [
        (losses.BinaryCrossentropy(from_logits=True), CODES, None, (0, 1)),
        ("binary_crossentropy", CODES, None, (0, 1)),
        ("mse", NUMBERS, (-2.0, 7.0), (-2.0, 7.0)),
    ],
    ids=["logit", "binary by name", "mse by name"],
)
def test_losses_of_one_number_have_two_vertices(
    loss: Any, spec: Any, label_range: Any, ends: tuple[float, float]
) -> None:
    net = model(1, "sigmoid" if loss == "binary_crossentropy" else None)
    function = keras.losses.get(loss) if isinstance(loss, str) else loss
    expected = [
        [np.ravel(function(np.array([[end]], "f"), net(features()[i : i + 1])))[0] for end in ends]
        for i in range(N)
    ]
    values = found(net, loss, spec, label_range).losses()
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "spec", "units", "activation", "label_range"),
    [
        (losses.CategoricalCrossentropy(), ONE_HOT, K, "softmax", None),
        (losses.BinaryCrossentropy(), CODES, 1, "sigmoid", None),
        (losses.MeanSquaredError(), NUMBERS, 1, None, (-5.0, 5.0)),
    ],
    ids=["probabilities", "probability", "number"],
)
def test_the_gradient_vanishes_at_the_predictions(
    loss: Any, spec: Any, units: int, activation: str | None, label_range: Any
) -> None:
    net = model(units, activation)
    vertices = found(net, loss, spec, label_range)
    weights = vertices.predictions()
    np.testing.assert_allclose(tf.reduce_sum(weights, axis=1), 1.0, rtol=1e-6)
    assert np.min(weights) >= 0.0
    with tf.GradientTape() as tape:
        values = vertices.losses()
        at_predictions = tf.reduce_sum(values * tf.stop_gradient(weights))
    gradient = tape.gradient(at_predictions, net.trainable_variables[0].value)
    np.testing.assert_allclose(gradient, 0.0, atol=2e-6)
    with tf.GradientTape() as tape:
        elsewhere = tf.reduce_sum(vertices.losses()[:, 0])
    assert np.max(np.abs(tape.gradient(elsewhere, net.trainable_variables[0].value))) > 1e-2


def test_gradients_for_labels_within_the_range_lie_between_the_ends() -> None:
    """Which is why two vertices an example are enough for regression."""
    net, y = model(1, None), np.array([-2.0, -0.5, 0.3, 1.9, 7.0], np.float32)
    vertices = found(net, losses.MeanSquaredError(), NUMBERS, (-2.0, 7.0))
    alpha = (y + 2.0) / 9.0
    with tf.GradientTape() as tape:
        mixed = tf.reduce_sum(vertices.losses() * np.stack([1 - alpha, alpha], axis=1))
    from_hull = tape.gradient(mixed, net.trainable_variables[0].value)
    with tf.GradientTape() as tape:
        true = tf.reduce_sum((net(features())[:, 0] - y) ** 2)
    np.testing.assert_allclose(
        from_hull, tape.gradient(true, net.trainable_variables[0].value), rtol=1e-5
    )


def test_outputs_that_have_no_labels_to_enumerate_are_refused() -> None:
    with pytest.raises(ValueError, match=r"PrivateLabels\(labels, Numbers\(low, high\)\)"):
        found(model(1, None), losses.MeanSquaredError(), NUMBERS).losses()
    inputs = keras.Input((D,))
    image = keras.Model(inputs, keras.layers.Reshape((2, 2))(keras.layers.Dense(4)(inputs)))
    with pytest.raises(ValueError, match=r"got shape \(5, 2, 2\)"):
        found(image, losses.MeanSquaredError(), NUMBERS, (0.0, 1.0)).losses()
    two = keras.Model(inputs, [keras.layers.Dense(2)(inputs), keras.layers.Dense(2)(inputs)])
    with pytest.raises(ValueError, match=r"\(5, 2\), \(5, 2\)"):
        found(two, losses.MeanSquaredError(), ONE_HOT).losses()
