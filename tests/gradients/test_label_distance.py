"""Clipping by the distance of an example's gradients for its two labels, against loops."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.plugins import (
    Batch,
    Coordinates,
    KerasLoss,
    LabelDistanceClip,
    PerExampleClipping,
    Speed,
)

layers = keras.layers
ROWS = 10
# The longest clip, over the distance of the gradients for two labels.
LONGEST_CLIP = 0.75
WEIGHTS = np.array([1.0, 1.0, 0.3, 1.0, 0.0, 1.0, 2.0, 1.0, 1.0, 1.0], np.float32)


@pytest.fixture(autouse=True)
def seed() -> None:
    keras.utils.set_random_seed(4)


def model(outputs: int, *more: Any) -> keras.Model:
    """Returns a small network with large gradients and mostly confident predictions."""
    network = keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(5, "tanh"),
            *more,
            layers.Dense(outputs),
        ]
    )
    for variable in network.trainable_variables:
        variable.assign(3.0 * variable)
    return network


def batch(outputs: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(ROWS, 6, 6, 2)).astype(np.float32)
    return x, rng.integers(2, size=ROWS)


def clipped(network: keras.Model, x: Any, y: Any, clip: float, **options: Any) -> Any:
    speed = Speed(options.pop("method", "auto"), options.pop("max_bytes", 2**30))
    weights = options.pop("weights", WEIGHTS)

    def unused(y_true: Any, y_pred: Any) -> Any:
        raise AssertionError("the gradients are those of cross-entropy for any loss")

    return PerExampleClipping(network, speed).clipped_sum(
        Batch(x, y, weights, unused), LabelDistanceClip(clip, **options)
    )


def flat(gradients: Any) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(g, np.float64)) for g in gradients])


def candidates(network: keras.Model, x: np.ndarray, coordinates: Any = None) -> np.ndarray:
    """Gradients (B, K, weights) of Keras's cross-entropy, example by example, label by label."""
    outputs = network.output_shape[-1]
    found = []
    for row in x:
        with tf.GradientTape(persistent=True) as tape:
            logits = network(row[np.newaxis])
            losses = [
                keras.losses.BinaryCrossentropy(from_logits=True)(
                    np.array([[k]], np.float32), logits
                )
                if outputs == 1
                else keras.losses.SparseCategoricalCrossentropy(from_logits=True)(
                    np.array([k]), logits
                )
                for k in range(2)
            ]
        values = [v.value for v in network.trainable_variables]
        gradients = [tape.gradient(loss, values) for loss in losses]
        if coordinates is not None:
            gradients = [
                [c.forward(g[tf.newaxis])[0] for g, c in zip(parts, coordinates, strict=True)]
                for parts in gradients
            ]
        found.append([flat(parts) for parts in gradients])
    return np.array(found)


def shortened(vectors: np.ndarray, length: float) -> np.ndarray:
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors * np.minimum(1.0, length / np.maximum(norms, 1e-30))


def diameter(vectors: np.ndarray) -> float:
    return max(np.linalg.norm(u - v) for u, v in itertools.product(vectors, vectors))


def best_clip(vectors: np.ndarray, distance: float) -> float:
    """Returns the largest clip, by bisection of the distance."""
    low, high = 0.0, LONGEST_CLIP * distance
    if diameter(shortened(vectors, high)) <= distance:
        return high
    for _ in range(60):
        middle = (low + high) / 2
        above = diameter(shortened(vectors, middle)) > distance
        low, high = (low, middle) if above else (middle, high)
    return low


CASES = [
    (1, 0.5, "ghost"),
    (1, 4.0, "vectorized"),
    (2, 0.5, "vectorized"),
    (2, 4.0, "ghost"),
]


@pytest.mark.parametrize(("outputs", "clip", "method"), CASES)
def test_sums_are_those_of_a_loop_over_examples_and_labels(outputs, clip, method):
    network, (x, y) = model(outputs), batch(outputs)
    expected = np.zeros(network.count_params())
    norms, distances = [], []
    for vectors, weight, label in zip(candidates(network, x), WEIGHTS, y, strict=True):
        norms.append(diameter(vectors))  # of the margin's gradient, which needs no label
        vectors = weight * vectors
        kept = shortened(vectors, best_clip(vectors, 2 * clip))
        expected += kept[label]
        distances.append(diameter(kept))
    found = clipped(network, x, y, clip, method=method)
    np.testing.assert_allclose(flat(found.gradients), expected, rtol=2e-4, atol=2e-5 * clip)
    np.testing.assert_allclose(found.norms, norms, rtol=1e-4, atol=1e-6)
    # The whole distance is used, not half of it.
    assert max(distances) == pytest.approx(2 * clip) or clip > 1


@pytest.mark.slow
def test_memory_changes_no_result():
    network, (x, y) = model(2), batch(2)
    expected = flat(clipped(network, x, y, 1.0).gradients)
    for max_bytes in (4_000, 30_000):
        found = tf.function(
            lambda m=max_bytes: clipped(network, x, y, 1.0, max_bytes=m).gradients
        )()
        np.testing.assert_allclose(flat(found), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="max_bytes=100 is too small for layer"):
        clipped(network, x, y, 1.0, max_bytes=100)


@pytest.mark.parametrize("method", ["ghost", "vectorized"])
def test_gradients_in_coordinates_are_clipped_there(method):
    network, (x, y) = model(2), batch(2)
    rng = np.random.default_rng(1)

    def side(n: int) -> tf.Tensor:
        return tf.constant(rng.normal(size=(n, n)), tf.float32)

    coordinates = [
        Coordinates(side(np.prod(v.shape[:-1])) if len(v.shape) > 1 else None, side(v.shape[-1]))
        for v in network.trainable_variables
    ]
    expected = 0.0
    for vectors, label in zip(candidates(network, x, coordinates), y, strict=True):
        expected += shortened(vectors, best_clip(vectors, 2.0))[label]
    ones = np.ones(ROWS, np.float32)
    found = clipped(network, x, y, 1.0, method=method, coordinates=coordinates, weights=ones)
    np.testing.assert_allclose(flat(found.gradients), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(("outputs", "clip", "method"), CASES)
@pytest.mark.holds("gradients.LabelDistanceClip")
def test_one_replaced_label_moves_the_sum_by_the_distance_at_most(outputs, clip, method):
    """Tests the bound from both sides."""
    network, (x, y) = model(outputs, layers.Dropout(0.3)), batch(outputs)
    sums = []
    for label in range(2):
        keras.utils.set_random_seed(7)  # the same dropout
        generator = network.layers[3].seed_generator
        generator.state.assign(np.array([1, 2], generator.state.dtype))
        labels = np.where(np.arange(ROWS) == 3, label, y)
        sums.append(flat(clipped(network, x, labels, clip, method=method).gradients))
    assert diameter(np.array(sums)) <= 2 * clip * (1 + 1e-5)
    if clip < 1:  # only the bound of norms is left of the distance
        assert diameter(np.array(sums)) > 2 * clip * LONGEST_CLIP * (1 - 1e-5)


def test_lengths_are_those_of_the_closed_form():
    rng = np.random.default_rng(3)
    margins, norms = rng.normal(size=200), rng.exponential(4.0, size=200)
    p = 1 / (1 + np.exp(-margins))
    lengths = np.stack([p, 1 - p]) * norms
    for label in (0, 1):
        rows = Batch(None, tf.fill([200], label), tf.ones(200), None)
        logits = tf.constant(margins[:, np.newaxis], tf.float32)
        found = LabelDistanceClip(1.0).coefficients(tf.constant(norms, tf.float32), rows, logits)
        longest = np.minimum(np.maximum(1.0, 2.0 - lengths.min(axis=0)), 2 * LONGEST_CLIP)
        closed = (1 - 2 * label) * np.minimum(lengths[label], longest)
        np.testing.assert_allclose(found * norms, closed, rtol=1e-5, atol=1e-6)
    assert np.any(longest > 1.3) and np.any(longest == 1.0)


def test_examples_with_another_label_or_infinite_features_add_nothing():
    network, (x, y) = model(2), batch(2)
    ones = np.ones(ROWS, np.float32)
    without = ones.copy()
    without[[1, 5, 7]] = 0.0
    expected = flat(clipped(network, x, y, 1.0, weights=without).gradients)
    y = np.eye(2, dtype=np.float32)[y]
    y[1], y[5] = (0.5, 0.5), 0.0
    x[7] = np.nan
    for method in ("ghost", "vectorized"):
        found = clipped(network, x, y, 1.0, weights=ones, method=method)
        np.testing.assert_allclose(flat(found.gradients), expected, rtol=1e-4, atol=1e-6)


def test_labels_come_as_codes_or_one_hot_rows():
    network, (x, codes) = model(2), batch(2)
    expected = flat(clipped(network, x, codes, 1.0).gradients)
    for y in (codes[:, None], codes.astype(np.float32), np.eye(2)[codes]):
        LabelDistanceClip.check_labels(y, 2)
        np.testing.assert_array_equal(flat(clipped(network, x, y, 1.0).gradients), expected)
    LabelDistanceClip.check_labels(codes[:, None], 1)
    for wrong, outputs in ((codes + 1, 2), (codes + 0.5, 1), (np.full((3, 2), 0.5), 2)):
        with pytest.raises(ValueError, match=r"needs labels 0 or 1, .*some are neither"):
            LabelDistanceClip.check_labels(wrong, outputs)


LOSSES = keras.losses
BAD_LOSSES = [
    "sparse_categorical_crossentropy",
    LOSSES.SparseCategoricalCrossentropy(),
    LOSSES.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
    LOSSES.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0),
    LOSSES.CategoricalCrossentropy(from_logits=True, axis=1),
    lambda y_true, y_pred: keras.ops.sum(y_pred, axis=1),
]


@pytest.mark.parametrize("loss", BAD_LOSSES)
def test_other_losses_are_refused(loss):
    with pytest.raises(ValueError, match="needs plain cross-entropy of logits, got loss"):
        LabelDistanceClip.check_model(model(2), KerasLoss(loss))


def test_outputs_must_be_logits_of_two_classes():
    sparse = KerasLoss(LOSSES.SparseCategoricalCrossentropy(from_logits=True))
    binary = KerasLoss(LOSSES.BinaryCrossentropy(from_logits=True))
    of_rows = KerasLoss(LOSSES.CategoricalCrossentropy(from_logits=True))
    LabelDistanceClip.check_model(model(2), of_rows)
    LabelDistanceClip.check_model(model(2), sparse)
    LabelDistanceClip.check_model(model(1), binary)
    sequence = keras.Sequential([keras.Input((4, 5)), layers.Dense(2)])
    for network, loss in ((model(1), sparse), (model(2), binary), (sequence, sparse)):
        with pytest.raises(ValueError, match=r"expected a model that returns .* logit"):
            LabelDistanceClip.check_model(network, loss)
    with pytest.raises(ValueError, match=r"two classes: .*got shape \(None, 3\).*'norm'"):
        LabelDistanceClip.check_model(model(3), sparse)
