"""What a call of ``fit`` will use of each label: how batches are made, and what that costs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import tensorflow as tf

from tf_labeldp.accounting._dp_sgd import dp_sgd_assumptions
from tf_labeldp.data._poisson_batches import PoissonBatches
from tf_labeldp.vault import PrivateLabels

_NOT_WITH_BATCHES = (
    "batch_size",
    "class_weight",
    "sample_weight",
    "steps_per_epoch",
    "validation_split",
)


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingPlan:
    """How one ``fit`` uses the labels.

    Attributes:
        batches: what ``poisson_batches`` returned, or None.
        sampling_probability: of each use, 1 without amplification; None where nothing is known.
        uses_an_epoch: how often each example enters, with that probability, in one epoch.
        steps_an_epoch: steps of one epoch; None where it is not known.
        num_units: number of examples or users; None where nothing is known.
        expected_batch: units a batch on average; None for the size of each batch.
        group_rows: rows of one unit, which are clipped together.
        num_microbatches: as the optimizer has it.
        disjoint: whether batches are disjoint in each pass over the data.
        num_examples: public examples to bring along in each step.
        is_weighted: whether sample weights were given.
        arrays: (x, y, weights) of arrays, or None.
        shuffle: whether arrays are shuffled in each pass.
    """

    batches: PoissonBatches | None
    sampling_probability: float | None
    uses_an_epoch: int
    steps_an_epoch: int | None
    num_units: int | None
    expected_batch: float | None
    group_rows: int
    num_microbatches: int | None
    disjoint: bool = False
    num_examples: int = 0
    is_weighted: bool = False
    arrays: tuple[Any, Any, Any] | None = dataclasses.field(default=None, repr=False)
    shuffle: bool = True

    @classmethod
    def of(cls, x: Any, y: Any, settings: dict[str, Any], optimizer: Any) -> TrainingPlan:
        """Returns the plan of ``fit(x, y, **settings)``, or raises where it can't be private."""
        if isinstance(x, PoissonBatches):
            return cls._of_batches(x, y, settings, optimizer)
        if y is None or isinstance(x, tf.data.Dataset):
            return cls.unknown(optimizer)
        return cls._of_arrays(x, y, settings, optimizer)

    @classmethod
    def unknown(cls, optimizer: Any) -> TrainingPlan:
        """Returns the plan of steps on data of which nothing is known."""
        return cls(None, None, 0, None, None, None, 1, optimizer.num_microbatches)

    @classmethod
    def _of_batches(
        cls, batches: PoissonBatches, y: Any, settings: dict[str, Any], optimizer: Any
    ) -> TrainingPlan:
        given = [name for name in _NOT_WITH_BATCHES if settings.get(name)]
        if y is not None or given:
            raise ValueError(
                "fit got poisson_batches together with "
                f"{', '.join(['y'] * (y is not None) + given)}, which they settle themselves. Set "
                "probability, steps and labels in poisson_batches."
            )
        microbatches = optimizer.num_microbatches
        if microbatches is not None and batches.privacy_unit == "user":
            raise ValueError(
                "num_microbatches can't be used with batches of users: a user's examples are "
                "clipped together. Leave it out."
            )
        rows = batches.buffer_size * batches.group_size
        if microbatches is not None and rows % microbatches:
            raise ValueError(
                f"num_microbatches={microbatches} does not divide the buffer of {rows} rows. Set "
                "buffer_size in poisson_batches to a multiple of it."
            )
        disjoint = optimizer.denoiser.reveals_batch
        q, uses = batches.sampling_probability, batches.steps
        if microbatches is not None and microbatches != rows and not disjoint and q < 1.0:
            # Who is sampled decides who is whose neighbour: one example more or less changes many
            # of the clipped means, which the accounting of sampled batches does not allow for.
            raise ValueError(
                f"num_microbatches={microbatches} clips means of {rows // microbatches} "
                "neighbouring examples, for which amplification by sampling does not hold. Fit on "
                "arrays, which are not sampled, or leave num_microbatches out."
            )
        if disjoint:
            # Whoever sees the batches gets no less by sampling: each example in turn, then.
            q, uses = 1.0, math.ceil(batches.steps / (batches.num_units // batches.disjoint_size))
        return cls(
            batches,
            q,
            uses,
            batches.steps,
            batches.num_units,
            batches.expected_batch_size,
            batches.group_size,
            microbatches,
            disjoint,
            optimizer.num_examples,
        )

    @classmethod
    def _of_arrays(cls, x: Any, y: Any, settings: dict[str, Any], optimizer: Any) -> TrainingPlan:
        """Returns the plan for arrays, and takes what it settles out of ``settings``."""
        denoiser = optimizer.denoiser
        if optimizer.num_examples:
            needs = optimizer.preconditioner or denoiser
            raise ValueError(
                f"{type(needs).__name__} needs {optimizer.num_examples} public examples in each "
                "step, and arrays bring none along. Fit on tf_labeldp.data.poisson_batches(x, "
                "labels, sampling_probability=..., steps=...)."
            )
        if settings.pop("class_weight", None) is not None:
            raise ValueError(
                "class_weight is not supported; give sample_weight, made without labels."
            )
        if settings.pop("validation_split", None):
            raise ValueError(
                "validation_split is not supported: it would report exact figures of labels that "
                "are private. Give validation_data=(x, y) of labels that may be seen."
            )
        if isinstance(y, PrivateLabels):
            raise TypeError(
                "labels in a PrivateLabels vault come with batches: fit(tf_labeldp.data."
                "poisson_batches(x, labels, sampling_probability=..., steps=...))."
            )
        weights = settings.pop("sample_weight", None)
        is_weighted = weights is not None
        y = np.asarray(y) if isinstance(y, list) else y
        x, y = tf.nest.map_structure(np.asarray, (x, y))
        n = int(np.shape(tf.nest.flatten(x)[0])[0])
        weights = np.ones(n, np.float32) if weights is None else np.asarray(weights, np.float32)
        _check_lengths(n, x, y, weights)
        size = min(int(settings.pop("batch_size", None) or 32), n)
        if size < 2 and not denoiser.takes_single_examples:
            raise ValueError(
                f"batch_size must be at least 2, got {size}: with one example a step, noise has "
                "nothing to average over. (SelfSpan on single examples is LP-Normal-SGD, and "
                "allowed.)"
            )
        microbatches = optimizer.num_microbatches
        if microbatches is not None and size % microbatches:
            raise ValueError(
                f"num_microbatches={microbatches} must divide batch_size={size}. Change one of "
                "them."
            )
        if settings.pop("steps_per_epoch", None):
            raise ValueError(
                "steps_per_epoch is not supported with arrays, of which an epoch uses every "
                "example once. Leave it out, or fit on data.poisson_batches."
            )
        return cls(
            None,
            1.0,
            1,
            math.ceil(n / size),
            n,
            float(size),
            1,
            microbatches,
            arrays=(x, y, weights),
            is_weighted=is_weighted,
            shuffle=bool(settings.pop("shuffle", True)),
        )

    def assumptions(self) -> tuple[str, ...]:
        """Returns what the accounting of these steps rests on; their number is in the receipts."""
        unit = "label" if self.batches is None else self.batches.privacy_unit
        return dp_sgd_assumptions(float(self.sampling_probability or 1.0), None, unit)

    @property
    def vault(self) -> PrivateLabels | None:
        """The vault of the labels, or None."""
        return None if self.batches is None else self.batches.labels

    @property
    def label_range(self) -> tuple[float, float] | None:
        """The range of a regression vault's labels; None otherwise."""
        return None if self.vault is None else self.vault.label_range

    def known_labels(self) -> np.ndarray | None:
        """Returns the labels that were given as an array, or None; to be checked, never shown."""
        if self.arrays is not None and isinstance(self.arrays[1], np.ndarray):
            return self.arrays[1]
        if self.batches is None or self.vault is not None:
            return None
        return self.batches._label_rows.open()

    def open(self) -> tuple[tf.data.Dataset, dict[str, Any]] | None:
        """Returns the dataset and the settings that ``fit`` needs; None to leave it as it is."""
        if self.arrays is not None:
            return _padded_batches(self.arrays, int(self.expected_batch or 1), self.shuffle), {}
        if self.batches is None:
            return None
        dataset = self.batches._open(alt_examples=self.num_examples, disjoint=self.disjoint)
        return dataset, {"steps_per_epoch": self.batches.steps}

    def rows_a_group(self, first: tf.Tensor, num_replicas: int) -> int:
        """Returns how many neighbouring rows are clipped together."""
        if self.num_microbatches is None:
            return self.group_rows
        rows = first.shape[0]
        size = 0 if rows is None else rows * num_replicas // self.num_microbatches
        if not size or rows * num_replicas != size * self.num_microbatches or rows % size:
            raise ValueError(
                f"num_microbatches={self.num_microbatches} must divide the batch, which has "
                f"{'an unknown number of' if rows is None else rows} rows on each of "
                f"{num_replicas} replica(s). Batch the dataset with drop_remainder=True."
            )
        return int(size)

    def divisor(self, x: Any, replicas: Any) -> tf.Tensor:
        """Returns what the noisy sum is divided by: public, never the size of a secret batch."""
        count = self.num_microbatches
        if self.expected_batch is None:
            rows = tf.cast(tf.shape(tf.nest.flatten(x)[0])[0], tf.float32)
            size = rows * replicas.num_replicas_in_sync
            return size if count is None else tf.cast(count, tf.float32)
        if count is None:
            return tf.constant(self.expected_batch, tf.float32)
        full = 1.0 if self.batches is None else self.expected_batch / self.batches.buffer_size
        return tf.constant(count * full, tf.float32)


def _padded_batches(arrays: tuple[Any, Any, Any], size: int, shuffle: bool) -> tf.data.Dataset:
    """Returns batches of a fixed size, of which the last is filled up with weights of zero."""
    n = arrays[2].shape[0]
    whole = tf.nest.map_structure(tf.constant, arrays)
    rows = tf.data.Dataset.range(n)
    if shuffle:
        rows = rows.shuffle(n, reshuffle_each_iteration=True)

    def take(numbers: tf.Tensor) -> Any:
        missing = size - tf.shape(numbers)[0]
        # Padding repeats the first features, with label and weight zero: no label is used twice.
        numbers = tf.ensure_shape(tf.pad(numbers, [[0, missing]]), [size])
        x, y, weights = tf.nest.map_structure(lambda part: tf.gather(part, numbers), whole)
        real = tf.range(size) < size - missing

        def without(part: tf.Tensor) -> tf.Tensor:
            rows = tf.reshape(real, [size] + [1] * (part.shape.rank - 1))
            return tf.where(rows, part, tf.zeros_like(part))

        return x, tf.nest.map_structure(without, y), without(weights)

    return rows.batch(size).map(take).prefetch(2)


def _check_lengths(n: int, x: Any, y: Any, weights: np.ndarray) -> None:
    lengths = [part.shape[:1] for part in tf.nest.flatten((x, y, weights))]
    if any(length != (n,) for length in lengths):
        raise ValueError(
            f"features, labels and sample_weight must have one row for each example, got "
            f"{', '.join(str(length[0]) if length else 'no' for length in lengths)} rows."
        )
