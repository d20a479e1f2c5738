"""What a call of ``fit`` will use of each label: how batches are made, and what that costs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import tensorflow as tf

from tf_labeldp.accounting import public_input
from tf_labeldp.accounting._receipts import Receipts
from tf_labeldp.data._poisson_batches import PoissonBatches
from tf_labeldp.vault import PrivateLabels

_NOT_WITH_BATCHES = (
    "batch_size",
    "sample_weight",
    "steps_per_epoch",
    "validation_split",
)


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingPlan:
    """Steps on a dataset of which nothing is known; the other modes derive from it.

    Attributes:
        num_microbatches: as the optimizer has it.
        sampling_probability: of each use, 1 without amplification; None where nothing is known.
        uses_an_epoch: how often each example enters, with that probability, in one epoch.
        steps_an_epoch: steps of one epoch; None where it is not known.
        num_units: number of examples or users; None where nothing is known.
        group_rows: rows of one unit, which are clipped together.
        unit: what is protected: "label" or "user".
        is_weighted: whether sample weights were given.
        seeded: whether the batches can be repeated.
        vault: the vault of the labels, or None.
        receipts: of what all that is public was made of.
    """

    num_microbatches: int | None
    sampling_probability: float | None = None
    uses_an_epoch: int = 0
    steps_an_epoch: int | None = None
    num_units: int | None = None
    group_rows: int = 1
    unit: str = "label"
    is_weighted: bool = False
    seeded: bool = False
    vault: PrivateLabels | None = None
    receipts: Receipts = ()

    @staticmethod
    def of(x: Any, y: Any, settings: dict[str, Any], optimizer: Any) -> TrainingPlan:
        """Returns the plan of ``fit(x, y, **settings)``, or raises where it can't be private."""
        if isinstance(x, PoissonBatches):
            return PoissonPlan.of_batches(x, y, settings, optimizer)
        if y is None or isinstance(x, tf.data.Dataset):
            return TrainingPlan(optimizer.num_microbatches)
        return ArrayPlan.of_arrays(x, y, settings, optimizer)

    @property
    def label_range(self) -> tuple[float, float] | None:
        """The range of a regression vault's labels; None otherwise."""
        return None if self.vault is None else self.vault.label_range

    def known_labels(self) -> np.ndarray | None:
        """Returns the labels that were given as an array, or None; to be checked, never shown."""
        return None

    def open(self) -> tuple[tf.data.Dataset, dict[str, Any]] | None:
        """Returns the dataset and the settings that ``fit`` needs; None to leave it as it is."""
        return None

    def shared(self) -> dict[str, int]:
        """Returns the sizes that replicas share evenly, by the argument that sets each."""
        return {}

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
        if self.num_microbatches is not None:
            return tf.constant(self.num_microbatches, tf.float32)
        rows = tf.cast(tf.shape(tf.nest.flatten(x)[0])[0], tf.float32)
        return rows * replicas.num_replicas_in_sync


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PoissonPlan(TrainingPlan):
    """Steps on ``poisson_batches``.

    Attributes:
        batches: what ``poisson_batches`` returned.
        disjoint: whether batches are disjoint in each pass over the data.
        num_examples: public examples to bring along in each step.
    """

    batches: PoissonBatches
    disjoint: bool
    num_examples: int

    @classmethod
    def of_batches(
        cls, batches: PoissonBatches, y: Any, settings: dict[str, Any], optimizer: Any
    ) -> PoissonPlan:
        """Returns the plan, or raises for settings that would contradict it."""
        _check_class_weight(settings)
        given = [name for name in _NOT_WITH_BATCHES if _is_given(settings.get(name))]
        given = given if y is None else ["y", *given]
        if given:
            raise ValueError(
                f"fit got poisson_batches together with {', '.join(given)}, which they settle "
                "themselves. Set probability, steps and labels in poisson_batches."
            )
        microbatches, disjoint = optimizer.num_microbatches, optimizer.denoiser.reveals_batch
        q, uses = batches.sampling_probability, batches.steps
        if microbatches is not None:
            _check_microbatches(batches, microbatches, sampled=q < 1.0 and not disjoint)
        if disjoint:
            # Whoever sees the batches gets no less by sampling: each example in turn, then.
            q, uses = 1.0, math.ceil(batches.steps / (batches.num_units // batches.disjoint_size))
        return cls(
            batches=batches,
            sampling_probability=q,
            uses_an_epoch=uses,
            steps_an_epoch=batches.steps,
            num_units=batches.num_units,
            group_rows=batches.group_size,
            num_microbatches=microbatches,
            disjoint=disjoint,
            num_examples=optimizer.num_examples,
            unit=batches.privacy_unit,
            seeded=batches.seeded,
            vault=batches.labels,
            receipts=batches.receipts,
        )

    def known_labels(self) -> np.ndarray | None:
        return self.batches.known_labels()

    def shared(self) -> dict[str, int]:
        return {"buffer_size": self.batches.buffer_size, "num_examples": self.num_examples}

    def open(self) -> tuple[tf.data.Dataset, dict[str, Any]]:
        dataset = self.batches._open(alt_examples=self.num_examples, disjoint=self.disjoint)
        return dataset, {"steps_per_epoch": self.batches.steps}

    def divisor(self, x: Any, replicas: Any) -> tf.Tensor:
        expected = self.batches.expected_batch_size
        if self.num_microbatches is not None:
            expected = self.num_microbatches * (expected / self.batches.buffer_size)
        return tf.constant(expected, tf.float32)


def _check_microbatches(batches: PoissonBatches, microbatches: int, sampled: bool) -> None:
    """Raises where batches can't be cut into so many groups, or where that says nothing."""
    if batches.privacy_unit == "user":
        raise ValueError(
            "num_microbatches can't be used with batches of users: a user's examples are "
            "clipped together. Leave it out."
        )
    rows = batches.buffer_size * batches.group_size
    if rows % microbatches:
        raise ValueError(
            f"num_microbatches={microbatches} does not divide the buffer of {rows} rows. Set "
            "buffer_size in poisson_batches to a multiple of it."
        )
    if sampled and microbatches != rows:
        # Who is sampled decides who is whose neighbour: one example more or less changes many
        # of the clipped means, which the accounting of sampled batches does not allow for.
        raise ValueError(
            f"num_microbatches={microbatches} clips means of {rows // microbatches} "
            "neighbouring examples, for which amplification by sampling does not hold. Fit on "
            "arrays, which are not sampled, or leave num_microbatches out."
        )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ArrayPlan(TrainingPlan):
    """Steps on arrays, in which every example is used once an epoch.

    Attributes:
        arrays: (x, y, weights).
        batch_size: rows of each batch; the last is filled up with weights of zero.
        shuffle: whether the rows are shuffled in each epoch.
    """

    arrays: tuple[Any, Any, Any] = dataclasses.field(repr=False)
    batch_size: int
    shuffle: bool

    @classmethod
    def of_arrays(cls, x: Any, y: Any, settings: dict[str, Any], optimizer: Any) -> ArrayPlan:
        """Returns the plan, and takes what it settles out of ``settings``."""
        if optimizer.num_examples:
            needs = optimizer.preconditioner or optimizer.denoiser
            raise ValueError(
                f"{type(needs).__name__} needs {optimizer.num_examples} public examples in each "
                "step, and arrays bring none along. Fit on tf_labeldp.data.poisson_batches(x, "
                "labels, sampling_probability=..., steps=...)."
            )
        _check_class_weight(settings)
        for name, instead in _NOT_WITH_ARRAYS.items():
            if _is_given(settings.pop(name, None)):
                raise ValueError(f"{name} is not supported with arrays{instead}.")
        if isinstance(y, PrivateLabels):
            raise TypeError(
                "labels in a PrivateLabels vault come with batches: fit(tf_labeldp.data."
                "poisson_batches(x, labels, sampling_probability=..., steps=...))."
            )
        public = public_input(x, settings.pop("sample_weight", None))
        x, weights = public.value
        is_weighted = weights is not None
        y = np.asarray(y) if isinstance(y, list) else y
        x, y = tf.nest.map_structure(np.asarray, (x, y))
        n = int(np.shape(tf.nest.flatten(x)[0])[0])
        weights = np.asarray(weights, np.float32) if is_weighted else np.ones(n, np.float32)
        lengths = [part.shape[:1] for part in tf.nest.flatten((x, y, weights))]
        if any(length != (n,) for length in lengths):
            raise ValueError(
                f"features, labels and sample_weight must have one row for each example, got "
                f"{', '.join(str(length[0]) if length else 'no' for length in lengths)} rows."
            )
        size = min(int(settings.pop("batch_size", None) or 32), n)
        if size < 2 and not optimizer.denoiser.takes_single_examples:
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
        return cls(
            arrays=(x, y, weights),
            batch_size=size,
            sampling_probability=1.0,
            uses_an_epoch=1,
            steps_an_epoch=math.ceil(n / size),
            num_units=n,
            num_microbatches=microbatches,
            is_weighted=is_weighted,
            receipts=public.receipts,
            shuffle=bool(settings.pop("shuffle", True)),
        )

    def known_labels(self) -> np.ndarray | None:
        labels = self.arrays[1]
        return labels if isinstance(labels, np.ndarray) else None

    def shared(self) -> dict[str, int]:
        return {"batch_size": self.batch_size}

    def open(self) -> tuple[tf.data.Dataset, dict[str, Any]]:
        return padded_batches(self.arrays, self.batch_size, self.shuffle), {}

    def divisor(self, x: Any, replicas: Any) -> tf.Tensor:
        return tf.constant(self.num_microbatches or self.batch_size, tf.float32)


_NOT_WITH_ARRAYS = {
    "validation_split": ": it would report exact figures of labels that are private. Give "
    "validation_data=(x, y) of labels that may be seen",
    "steps_per_epoch": ", of which an epoch uses every example once. Leave it out, or fit on "
    "data.poisson_batches",
}


def _check_class_weight(settings: dict[str, Any]) -> None:
    if _is_given(settings.pop("class_weight", None)):
        raise ValueError(
            "class_weight is not supported by LabelDPModel. Weigh inside the loss, whose gradients "
            "are clipped: loss=lambda y, outputs: tf.gather(weights, tf.cast(y, 'int32')) * "
            "keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)."
        )


def _is_given(value: Any) -> bool:
    """Returns whether a setting is neither None nor zero; arrays and containers always are."""
    return value is not None and not (np.isscalar(value) and not value)


def padded_batches(arrays: tuple[Any, Any, Any], size: int, shuffle: bool) -> tf.data.Dataset:
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
