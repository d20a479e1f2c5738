"""The dataset of a multi-stage run: the training set changes under it, its shape does not."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_labeldp.features._reader import all_rows, as_rows, check_lengths, map_parts
from tf_labeldp.keras_layers import mixup


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingSet:
    """What the current epoch trains on; public data only.

    Attributes:
        indices: ``int64`` (m,), examples.
        noisy_labels: ``int64`` (m,), their noisy labels.
        mixup_alpha: parameter of the mixup weights; zero for none.
        epoch: number of the epoch, which seeds its order.
    """

    indices: np.ndarray
    noisy_labels: np.ndarray
    mixup_alpha: float
    epoch: int


class Features:
    """Features of all examples, as for ``RowSource``: one input, or a dict or tuple of inputs."""

    def __init__(self, features: Any) -> None:
        """Checks that all leaves have as many rows, and moves them to host tensors."""
        parts = map_parts(as_rows, features)
        self.num_examples = check_lengths(tf.nest.flatten(parts))
        with tf.device("CPU:0"):
            self._tensors = map_parts(_as_tensor, parts)
        self.all_floating = all(t.dtype.is_floating for t in tf.nest.flatten(self._tensors))

    def take(self, indices: Any) -> Any:
        """Returns the features of these examples, in the structure that was given."""
        return tf.nest.map_structure(lambda t: tf.gather(t, indices), self._tensors)

    def batches(self, indices: np.ndarray, batch_size: int) -> tf.data.Dataset:
        """Returns a dataset of feature batches of these examples, in order, to predict on."""
        dataset = tf.data.Dataset.from_tensor_slices(indices).batch(batch_size)
        # A one-element tuple: Keras would take a bare tuple of features for (x, y).
        return dataset.map(
            lambda rows: (self.take(rows),), num_parallel_calls=tf.data.AUTOTUNE
        ).prefetch(tf.data.AUTOTUNE)


class StageDataset:
    """A ``tf.data`` pipeline over a training set that the callback swaps between epochs.

    Every iterator asks once for the current training set. The number of batches is the same in all
    epochs and stages: a smaller set is cut into as many, smaller batches. So Keras sees a dataset
    of known, constant length, and one pass over it is one pass over the training set.
    """

    def __init__(self, features: Features, num_classes: int, steps: int, seed: int) -> None:
        """Keeps what never changes; ``set`` gives the rest."""
        self._features = features
        self._num_classes = num_classes
        self._steps = steps
        self._seed = seed
        self._lock = threading.Lock()
        self._current: TrainingSet | None = None
        self._served = False

    def set(self, training_set: TrainingSet) -> None:
        """Makes iterators that start from now on see this training set."""
        with self._lock:
            self._current = training_set
            self._served = False

    @property
    def served(self) -> bool:
        """Whether an iterator has asked for the training set since it was set."""
        with self._lock:
            return self._served

    def build(self, use_mixup: bool, num_replicas: int = 1) -> tf.data.Dataset:
        """Returns the dataset of ``(features, one-hot noisy labels)`` batches.

        Args:
            use_mixup: whether batches may be mixed up; static, so that plain runs pay nothing.
            num_replicas: all batches but the last have a multiple of this many examples, since
                Keras wants to split them evenly.
        """
        steps = self._steps

        def epoch(unused: tf.Tensor) -> tf.data.Dataset:
            order, noisy, lambdas = tf.numpy_function(
                self._epoch_order, [], (tf.int64, tf.int64, tf.float32)
            )
            order.set_shape([None])
            noisy.set_shape([None])
            lambdas.set_shape([steps])
            size = tf.size(order, out_type=tf.int64)

            def bound(step: tf.Tensor) -> tf.Tensor:
                whole = step * (size // num_replicas) // steps * num_replicas
                return tf.where(step == steps, size, whole)

            def cut(step: tf.Tensor) -> tuple[tf.Tensor, ...]:
                start, end = bound(step), bound(step + 1)
                return order[start:end], noisy[start:end], lambdas[step]

            return tf.data.Dataset.range(steps).map(cut)

        def load(rows: tf.Tensor, noisy: tf.Tensor, weight: tf.Tensor) -> tuple[Any, tf.Tensor]:
            x = self._features.take(rows)
            y = tf.one_hot(noisy, self._num_classes, dtype=keras.config.floatx())
            return mixup(x, y, weight) if use_mixup else (x, y)

        dataset = tf.data.Dataset.from_tensors(0).flat_map(epoch)
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(steps))
        return dataset.map(load, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)

    def _epoch_order(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        with self._lock:
            current = self._current
            self._served = True
        if current is None:
            raise RuntimeError("the dataset of MultiStageTraining was iterated before its draw.")
        # Seeded by the epoch alone: an iterator that Keras makes and drops changes nothing.
        rng = np.random.default_rng([self._seed, current.epoch])
        order = rng.permutation(current.indices.size)
        weights = np.ones(self._steps)
        if current.mixup_alpha > 0:
            weights = rng.beta(current.mixup_alpha, current.mixup_alpha, self._steps)
        return current.indices[order], current.noisy_labels[order], weights.astype(np.float32)


def _as_tensor(rows: Any) -> tf.Tensor:
    tensor = tf.convert_to_tensor(all_rows(rows))
    # Keras feeds arrays in its default float type; do the same.
    return tf.cast(tensor, keras.config.floatx()) if tensor.dtype.is_floating else tensor
