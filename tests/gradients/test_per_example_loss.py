"""One number per example, from any loss that Keras takes."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.keras_layers import LabelWeightedLoss
from tf_labeldp.plugins import KerasLoss

RNG = np.random.default_rng(0)
ROWS, CLASSES = 5, 4
LOGITS = RNG.normal(size=(ROWS, CLASSES)).astype(np.float32)
LABELS = RNG.integers(CLASSES, size=ROWS)
EXPECTED = np.log(np.exp(LOGITS).sum(axis=1)) - LOGITS[np.arange(ROWS), LABELS]
PROBABILITIES = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)


def cross_entropy(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)


def test_the_reduction_is_left_out():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    np.testing.assert_allclose(KerasLoss(loss).of_examples()(LABELS, LOGITS), EXPECTED, rtol=1e-5)


@pytest.mark.parametrize(
    ("loss", "predictions"),
    [
        ("sparse_categorical_crossentropy", PROBABILITIES),
        (keras.losses.sparse_categorical_crossentropy, PROBABILITIES),
        (cross_entropy, LOGITS),
        (lambda y, p: cross_entropy(y, p)[:, tf.newaxis], LOGITS),
        (LabelWeightedLoss(keras.losses.CategoricalCrossentropy(from_logits=True)), LOGITS),
    ],
    ids=["name", "function of Keras", "own function", "one column", "own class"],
)
def test_names_functions_and_classes(loss: Any, predictions: np.ndarray):
    own_class = isinstance(loss, keras.losses.Loss)
    labels = np.eye(CLASSES, dtype=np.float32)[LABELS] if own_class else LABELS
    function = KerasLoss(loss).of_examples()
    np.testing.assert_allclose(function(labels, predictions), EXPECTED, rtol=1e-5)
    traced = tf.function(function)(tf.constant(labels), tf.constant(predictions))
    np.testing.assert_allclose(traced, EXPECTED, rtol=1e-5)


def test_more_axes_are_averaged():
    y, p = RNG.normal(size=(2, ROWS, 3, 2)).astype(np.float32)
    found = KerasLoss(keras.losses.MeanSquaredError()).of_examples()(y, p)
    np.testing.assert_allclose(found, np.square(y - p).mean(axis=(1, 2)), rtol=1e-5)


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, p: tf.reduce_mean(tf.square(p), axis=0),
        keras.losses.Dice(),
    ],
    ids=["a number per class", "Dice"],
)
def test_losses_that_are_not_per_example_are_refused(loss: Any):
    with pytest.raises(ValueError, match=r"losses must be per example: .* must return shape"):
        KerasLoss(loss).of_examples()(np.eye(CLASSES, dtype=np.float32)[LABELS], LOGITS)


class Pairwise(keras.losses.Loss):
    """Compares each prediction with all others of its batch, as metric learning does."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        distances = keras.ops.square(y_pred[:, None] - y_pred[None])
        return keras.ops.sum(distances, axis=(1, 2)) + y_pred[:, 0]


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, p: tf.reduce_sum(p - tf.reduce_mean(p, axis=0) + 1.0, axis=1),
        Pairwise(),
    ],
    ids=["function", "class"],
)
def test_privacy_an_examples_loss_is_computed_from_its_own_row(loss: Any):
    changed = LOGITS.copy()
    changed[0] += 1.0 + np.arange(CLASSES)
    first, second = (KerasLoss(loss).of_examples()(LABELS, p).numpy() for p in (LOGITS, changed))
    np.testing.assert_allclose(first[1:], second[1:], rtol=1e-6)
    whole = loss.call if isinstance(loss, keras.losses.Loss) else loss
    first, second = (np.array(whole(LABELS, tf.constant(p))) for p in (LOGITS, changed))
    assert not np.allclose(first[1:], second[1:])  # on the whole batch, it would mix


def test_privacy_an_axis_over_the_batch_is_refused():
    loss = keras.losses.CategoricalCrossentropy(axis=0, from_logits=True)
    with pytest.raises(ValueError, match="losses must be per example"):
        KerasLoss(loss).of_examples()(np.eye(CLASSES, dtype=np.float32)[LABELS], LOGITS)


@pytest.mark.parametrize("loss", [None, keras.losses.MeanSquaredError], ids=["None", "class"])
def test_an_object_that_is_not_a_loss_is_refused(loss: Any):
    with pytest.raises(TypeError, match=r"must be a keras.losses.Loss, its name or a function"):
        KerasLoss(loss).of_examples()


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="no_such_loss"):
        KerasLoss("no_such_loss").of_examples()


def test_no_label_is_in_the_message():
    with pytest.raises(ValueError) as error:
        KerasLoss(lambda y, p: tf.reduce_mean(p)).of_examples()(np.full(ROWS, 31337.0), LOGITS)
    assert "31337" not in str(error.value)
