"""The schedule of a multi-stage run, and its dataset: one training set per epoch."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.data.row_source import RowSource
from tf_labeldp.vault import PrivateLabels

FIT = "model.fit(stages.dataset(), epochs=stages.epochs, callbacks=[stages], shuffle=False)"
_WITHOUT_CALLBACK = (
    "expected the MultiStageTraining among the callbacks of model.fit, got none: after stage 1 its "
    f"noisy labels would be repeated. Call {FIT}."
)
_FRACTION_TOLERANCE = 1e-6
"""The fractions' sum may miss one by this, more than rounding makes."""


@dataclasses.dataclass(frozen=True, eq=False)
class StageSchedule:
    """The schedule of LP-MST, which depends on no label (``ghazi2021``, Algorithm 3, line 1).

    Tuples have one entry per stage; ``parts`` are disjoint indices ``int64``, together all
    examples. All stages have the same number of steps per epoch, so that one learning-rate schedule
    fits them all.
    """

    parts: tuple[np.ndarray, ...]
    epochs: tuple[int, ...]
    steps_per_epoch: int
    temperatures: tuple[float, ...]
    mixup_alphas: tuple[float, ...]

    @classmethod
    def make(
        cls,
        labels: PrivateLabels,
        *,
        fractions: Sequence[float],
        epochs_per_stage: int | Sequence[int],
        batch_size: int,
        temperature: float | Sequence[float],
        mixup_alpha: float | Sequence[float],
        seed: int,
    ) -> StageSchedule:
        """Returns the plan: part t ends at ``floor(n (f_1 + ... + f_t))`` of one permutation.

        With users it is one of users, and a part has whole users.
        """
        batch_size = _validate.integer_at_least("batch_size", batch_size, 1)
        if np.ndim(fractions) != 1:
            raise ValueError(f"fractions must be one number per stage, got {fractions!r}.")
        shares = [_validate.positive_finite(f"fractions[{i}]", f) for i, f in enumerate(fractions)]
        if abs(math.fsum(shares) - 1.0) > _FRACTION_TOLERANCE:
            raise ValueError(f"fractions must sum to one, got {math.fsum(shares):.6g}.")
        num_examples, users = len(labels), labels.users
        steps = math.ceil(num_examples / batch_size)
        ends = np.floor(np.cumsum(shares) * num_examples + 1e-9).astype(np.int64)[:-1]
        owners = np.arange(num_examples) if users is None else users
        counts = np.bincount(owners)
        order = np.random.default_rng(seed).permutation(counts.size)
        stage_of = np.empty(counts.size, np.int64)
        stage_of[order] = np.searchsorted(ends, np.cumsum(counts[order]) - counts[order], "right")
        parts = tuple(np.flatnonzero(stage_of[owners] == stage) for stage in range(len(shares)))
        for stage, part in enumerate(parts, start=1):
            if part.size < steps:
                raise ValueError(
                    f"expected stage {stage} to have an example for each of {steps} batches, got "
                    f"{part.size} of {num_examples}. Raise its fraction or the batch_size."
                )
        at_least_one = functools.partial(_validate.integer_at_least, minimum=1)
        not_negative = functools.partial(_validate.number_in, interval="[0, inf)")
        count = len(parts)
        return cls(
            parts,
            _per_stage("epochs_per_stage", epochs_per_stage, count, at_least_one),
            steps,
            _per_stage("temperature", temperature, count, _validate.positive_finite),
            _per_stage("mixup_alpha", mixup_alpha, count, not_negative),
        )

    @property
    def starts(self) -> tuple[int, ...]:
        return (0, *(int(end) for end in np.cumsum(self.epochs)[:-1]))

    def stage_of(self, epoch: int) -> int:
        return int(np.searchsorted(np.cumsum(self.epochs), epoch, side="right"))


def _per_stage(
    name: str, value: Any, count: int, check: Callable[[str, Any], Any]
) -> tuple[Any, ...]:
    values = (value,) * count if np.ndim(value) == 0 else tuple(value)
    if len(values) != count:
        raise ValueError(f"{name} must be one value or one per stage ({count}), got {len(values)}.")
    return tuple(check(name, entry) for entry in values)


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingSet:
    """The training set of one epoch, which seeds its order: indices, noisy labels, weights (m,)."""

    indices: np.ndarray
    noisy_labels: np.ndarray
    weights: np.ndarray
    mixup_alpha: float
    epoch: int


class Features:
    """Features of all examples in the host's memory, as a nest of tensors."""

    def __init__(self, features: Any, num_examples: int) -> None:
        self.source = RowSource(features, num_examples)
        with tf.device("CPU:0"):
            self.tensors = tf.nest.map_structure(_as_tensor, self.source.whole())
        self.all_floating = all(t.dtype.is_floating for t in tf.nest.flatten(self.tensors))

    @property
    def first(self) -> Any:
        """The features of the first example, as a batch."""
        return tf.nest.map_structure(lambda t: t[:1], self.tensors)

    def take(self, indices: tf.Tensor) -> Any:
        return tf.nest.map_structure(lambda t: tf.gather(t, indices), self.tensors)


class _StageBatches(tf.data.Dataset):
    """A data set that is checked in Python where a pass over it begins.

    TensorFlow puts the error of a function in its graph inside an error of its own.
    """

    def __init__(self, batches: tf.data.Dataset, check: Callable[[], None]) -> None:
        self._batches, self._check = batches, check
        super().__init__(batches._variant_tensor)

    def __iter__(self) -> Any:
        self._check()
        return super().__iter__()

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._batches]

    @property
    def element_spec(self) -> Any:
        """The spec of a batch."""
        return self._batches.element_spec


class StageDataset:
    """A ``tf.data`` pipeline over a training set that the callback exchanges between epochs.

    Each iterator reads the current training set once. All epochs have the same number of batches,
    as Keras expects, so a smaller training set has smaller batches.
    """

    def __init__(
        self, features: Features, num_classes: int, plan: StageSchedule, seed: int
    ) -> None:
        self._uses_mixup = max(plan.mixup_alphas) > 0
        if self._uses_mixup and not features.all_floating:
            raise ValueError("mixup_alpha above 0 needs floating-point features. Cast them.")
        self._features = features
        self._num_classes = num_classes
        self._steps = plan.steps_per_epoch
        self._seed = seed
        self._lock = threading.Lock()
        self._current: Any = None
        self._served = False
        self._passes_left = math.inf
        self._spare_iterators = 0

    def set(self, training_set: TrainingSet, passes: float = math.inf) -> None:
        with self._lock:
            self._current, self._served, self._passes_left = training_set, False, passes
            # Keras makes an iterator at the end of an epoch, too; on TensorFlow at once.
            self._spare_iterators = int(keras.backend.backend() == "tensorflow")

    @property
    def served(self) -> bool:
        """Whether an iterator has asked for the training set since it was set."""
        with self._lock:
            return self._served

    def build(
        self,
        num_replicas: int = 1,
        *,
        is_weighted: bool = False,
        output: str | None = None,
    ) -> tf.data.Dataset:
        """Returns the dataset of ``(features, one-hot noisy labels[, weights])`` batches.

        With ``output`` the labels are a dict with this key, for a model with several outputs. All
        batches but the last have a multiple of ``num_replicas`` examples, for Keras to split.
        """
        steps = self._steps

        def epoch(unused: tf.Tensor) -> tf.data.Dataset:
            order, noisy, weights, shares = tf.numpy_function(
                self._epoch_order, [], (tf.int64, tf.int64, tf.float32, tf.float32)
            )
            for part in (order, noisy, weights):
                part.set_shape([None])
            shares.set_shape([steps])
            size = tf.size(order, out_type=tf.int64)

            def bound(step: tf.Tensor) -> tf.Tensor:
                whole = step * (size // num_replicas) // steps * num_replicas
                return tf.where(step == steps, size, whole)

            def cut(step: tf.Tensor) -> tuple[tf.Tensor, ...]:
                start, end = bound(step), bound(step + 1)
                rows = slice(start, end)
                return order[rows], noisy[rows], weights[rows], shares[step]

            return tf.data.Dataset.range(steps).map(cut)

        def load(rows: tf.Tensor, noisy: tf.Tensor, weights: tf.Tensor, share: tf.Tensor) -> Any:
            x = self._features.take(rows)
            y = tf.one_hot(noisy, self._num_classes, dtype=keras.config.floatx())
            if self._uses_mixup:
                x = tf.nest.map_structure(lambda part: _mixed(part, share), x)
                y, weights = (
                    _mixed_targets(y, weights, share)
                    if is_weighted
                    else (_mixed(y, share), weights)
                )
            targets = y if output is None else {output: y}
            return (x, targets, weights) if is_weighted else (x, targets)

        dataset = tf.data.Dataset.from_tensors(0).flat_map(epoch)
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(steps))
        dataset = dataset.map(load, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)

        def counted(step: tf.Tensor, batch: Any) -> Any:
            def end() -> tf.Tensor:
                return tf.numpy_function(self._end_pass, [], tf.bool)

            # Passes are counted after the prefetch, which reads batches ahead of the training.
            with tf.control_dependencies([tf.cond(step == steps - 1, end, lambda: False)]):
                return tf.nest.map_structure(tf.identity, batch)

        return _StageBatches(dataset.enumerate().map(counted), self._open_pass)

    def _open_pass(self) -> None:
        """Raises if an iterator is made for a pass after those over the labels of stage 1."""
        with self._lock:
            if self._passes_left < 1:
                self._spare_iterators -= 1
            if self._spare_iterators < 0:
                raise RuntimeError(_WITHOUT_CALLBACK)

    def _end_pass(self) -> np.ndarray:
        with self._lock:
            self._passes_left -= 1
        return np.array(True)

    def _epoch_order(self) -> tuple[np.ndarray, ...]:
        with self._lock:
            current, self._served, left = self._current, True, self._passes_left
        if left < 1:
            raise RuntimeError(_WITHOUT_CALLBACK)
        # The epoch alone is the seed: iterators that Keras makes and drops change nothing.
        rng = np.random.default_rng([self._seed, current.epoch])
        order = rng.permutation(current.indices.size)
        shares = np.ones(self._steps)
        if current.mixup_alpha > 0:
            shares = rng.beta(current.mixup_alpha, current.mixup_alpha, self._steps)
        parts = (current.indices, current.noisy_labels, current.weights)
        return *(part[order] for part in parts), shares.astype(np.float32)


def _mixed(batch: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Averages a batch with its reverse, as ``keras_layers.Mixup``, on any backend."""
    wide = tf.cast(batch, batch.dtype if batch.dtype == tf.float64 else tf.float32)
    weight = tf.cast(weight, wide.dtype)
    return tf.cast(weight * wide + (1 - weight) * tf.reverse(wide, [0]), batch.dtype)


def _mixed_targets(y: tf.Tensor, weights: tf.Tensor, share: tf.Tensor) -> tuple[Any, tf.Tensor]:
    """Returns mixed targets and weights; each part of a pair keeps its own weight in the loss.

    A loss that is linear in the targets, such as cross-entropy, is then the weighted mean of the
    losses of both parts.
    """
    total = _mixed(weights, share)
    weighted = _mixed(tf.cast(y, tf.float32) * weights[:, None], share)
    plain = tf.cast(_mixed(y, share), tf.float32)
    mixed = tf.where(total[:, None] > 0.0, tf.math.divide_no_nan(weighted, total[:, None]), plain)
    return tf.cast(mixed, y.dtype), total


def _as_tensor(rows: Any) -> tf.Tensor:
    tensor = tf.convert_to_tensor(rows)
    # Keras feeds arrays in its default float type, too.
    return tf.cast(tensor, keras.config.floatx()) if tensor.dtype.is_floating else tensor
