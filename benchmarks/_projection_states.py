"""Training states of a CNN on MNIST, and the gradients of a step of DP-SGD at each."""

from __future__ import annotations

from typing import NamedTuple

import _datasets
import _models
import keras
import numpy as np
import tensorflow as tf

STATES = ("initialisation", "one epoch", "90 % accuracy")
BATCH_SIZE = 1024


class State(NamedTuple):
    """A model, its test accuracy, and the clean clipped gradient (d,) of a batch."""

    name: str
    model: keras.Model
    accuracy: float
    clean: np.ndarray
    images: np.ndarray


def training_states(l2_norm_clip: float, wanted: tuple[str, ...] = STATES) -> list[State]:
    """Trains without privacy, and returns the model at the states, in order."""
    data = _datasets.load("mnist")
    batch = np.random.default_rng(0).choice(len(data.y_train), BATCH_SIZE, replace=False)
    keras.utils.set_random_seed(0)
    model = _models.small_cnn((28, 28, 1), 10)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05), loss, metrics=["accuracy"])

    def accuracy() -> float:
        return model.evaluate(data.x_test, data.y_test, batch_size=1000, verbose=0)[1]

    states = []
    for name in STATES:
        if name == "one epoch":
            model.fit(data.x_train, data.y_train, batch_size=256, verbose=0)
        elif name == "90 % accuracy":
            while accuracy() < 0.9:
                model.fit(data.x_train[:6400], data.y_train[:6400], batch_size=256, verbose=0)
        if name in wanted:
            clean = clipped_mean(model, data.x_train[batch], data.y_train[batch], l2_norm_clip)
            frozen = keras.models.clone_model(model)
            frozen.set_weights(model.get_weights())
            states.append(State(name, frozen, accuracy(), clean, data.x_train))
    return states


def clipped_mean(model: keras.Model, x: np.ndarray, y: np.ndarray, clip: float) -> np.ndarray:
    """Returns the mean (d,) of the per-example gradients, each clipped."""
    variables = [variable.value for variable in model.trainable_variables]

    def clipped(example: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(example[0][tf.newaxis])
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(example[1][tf.newaxis], logits)
        gradient = tf.concat(
            [tf.reshape(part, [-1]) for part in tape.gradient(loss, variables)], axis=0
        )
        return tf.clip_by_norm(gradient, clip)

    @tf.function
    def total(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.vectorized_map(clipped, (x, y)), axis=0)

    chunks = range(0, len(x), 128)
    sums = [total(x[i : i + 128], y[i : i + 128].astype(np.int32)) for i in chunks]
    return np.sum(sums, axis=0) / len(x)
