"""The network of ``ghazi2023``, appendix E.1, built once per data set and trained many times."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from _insurance import InsuranceData

EMBEDDING = 8
L2 = 1e-4
LEARNING_RATE = 1e-3


class Trainer:
    """Trains the same network from the same weights on one set of noisy labels after another.

    The public range scales the labels, to mean 0 and variance 1 if they were uniform in it. For the
    Poisson loss they are not scaled, and the network returns logarithms.

    Args:
        data: features and range.
        num_train: size of the training sets.
        batch_size: examples per step; the last, smaller batch of an epoch is left out.
        epochs: passes over the training set.
        loss: "squared_error" or "poisson".
    """

    def __init__(
        self,
        data: InsuranceData,
        num_train: int,
        *,
        batch_size: int,
        epochs: int,
        loss: str = "squared_error",
    ) -> None:
        self.data = data
        self.batch_size = batch_size
        self.epochs = epochs
        self.steps = num_train // batch_size
        self.is_poisson = loss == "poisson"
        self.middle = 0.0 if self.is_poisson else (data.low + data.high) / 2
        self.scale = 1.0 if self.is_poisson else (data.high - data.low) / np.sqrt(12)
        self.model = build(data)
        schedule = keras.optimizers.schedules.CosineDecay(LEARNING_RATE, epochs * self.steps)
        self.optimizer = keras.optimizers.RMSprop(schedule)
        self.optimizer.build(self.model.trainable_variables)
        self._fresh = [variable.numpy() for variable in self.optimizer.variables]
        self._weights: dict[int, list[np.ndarray]] = {}
        self._train = tf.function(self._train_steps)
        self._predict = tf.function(self.model)

    def fit(self, rows: np.ndarray, noisy_labels: np.ndarray, seed: int) -> None:
        """Trains on these rows; the seed decides the first weights and the order of examples."""
        self._reset(seed)
        rng = np.random.default_rng(seed)
        size = self.steps * self.batch_size
        order = [rng.permutation(len(rows))[:size] for _ in range(self.epochs)]
        order = np.reshape(order, (-1, self.batch_size)).astype(np.int32)
        targets = ((noisy_labels - self.middle) / self.scale).astype(np.float32)
        self._train(
            tf.constant(self.data.codes[rows]),
            tf.constant(self.data.numbers[rows]),
            tf.constant(targets),
            tf.constant(order),
        )

    def predict(self, rows: np.ndarray) -> np.ndarray:
        """Returns predictions for these rows, in the labels' unit."""
        scaled = self._predict((self.data.codes[rows], self.data.numbers[rows])).numpy()[:, 0]
        scaled = np.exp(scaled) if self.is_poisson else scaled
        return scaled.astype(np.float64) * self.scale + self.middle

    def _reset(self, seed: int) -> None:
        """Sets the weights that this seed gives, and a fresh optimizer."""
        if seed not in self._weights:
            keras.utils.set_random_seed(seed)
            self._weights[seed] = build(self.data).get_weights()
        self.model.set_weights(self._weights[seed])
        for variable, value in zip(self.optimizer.variables, self._fresh, strict=True):
            variable.assign(value)

    def _train_steps(
        self, codes: tf.Tensor, numbers: tf.Tensor, targets: tf.Tensor, order: tf.Tensor
    ) -> None:
        """Takes one step for each row of ``order``."""
        for batch in order:
            with tf.GradientTape() as tape:
                inputs = (tf.gather(codes, batch), tf.gather(numbers, batch))
                scores, wanted = self.model(inputs, training=True)[:, 0], tf.gather(targets, batch)
                losses = tf.square(scores - wanted)
                if self.is_poisson:
                    losses = tf.exp(scores) - wanted * scores
                loss = tf.reduce_mean(losses) + tf.add_n(self.model.losses)
            gradients = tape.gradient(loss, self.model.trainable_variables)
            self.optimizer.apply(gradients, self.model.trainable_variables)


def build(data: InsuranceData) -> keras.Model:
    """Returns embeddings next to the numbers, then dense 128-64-1.

    One table has the embeddings of all columns, one after the other.
    """
    codes = keras.Input((len(data.vocabulary_sizes),), dtype="int32")
    numbers = keras.Input((data.numbers.shape[1],))
    first_rows = np.concatenate([[0], np.cumsum(data.vocabulary_sizes)[:-1]]).astype(np.int32)
    regularizer = keras.regularizers.L2(L2)
    table = keras.layers.Embedding(
        sum(data.vocabulary_sizes), EMBEDDING, embeddings_regularizer=regularizer
    )
    x = keras.layers.Flatten()(table(codes + first_rows))
    x = keras.layers.Concatenate()([x, numbers])
    for units, activation in ((128, "relu"), (64, "relu"), (1, None)):
        x = keras.layers.Dense(units, activation, kernel_regularizer=regularizer)(x)
    return keras.Model((codes, numbers), x)
