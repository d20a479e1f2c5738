"""How a call of ``fit`` uses each label: the batches, and what they cost."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import tensorflow as tf

from tf_labeldp.accounting import public_input
from tf_labeldp.accounting.receipts import Receipts
from tf_labeldp.data.batches import PoissonBatches, open_for_training
from tf_labeldp.gradients.clip import zero_where
from tf_labeldp.gradients.label_distance import check_labels
from tf_labeldp.gradients.model_checks import takes_codes, takes_rows
from tf_labeldp.vault import PrivateLabels

_NOT_WITH_BATCHES = ("batch_size", "sample_weight", "steps_per_epoch", "validation_split")
_NOT_WITH_ARRAYS = {
    "validation_split": ": it would report exact figures of labels that are private. Give "
    "validation_data=(x, y) of public labels",
    "steps_per_epoch": ", of which an epoch uses every example once. Leave it out, or fit on "
    "data.poisson_batches",
}


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingPlan:
    """Steps on a dataset of unknown sampling; the other plans derive from it.

    Attributes:
        num_microbatches: of the optimizer.
        sampling_probability: of each use, 1 without amplification; None if unknown.
        uses_an_epoch: number of uses of each example, with that probability, in one epoch.
        steps_an_epoch: steps of one epoch; None if unknown.
        num_units: number of examples or users; None if unknown.
        group_rows: rows of one unit, which are clipped together.
        unit: the unit of privacy: "label" or "user".
        is_weighted: whether there are sample weights.
        seeded: whether the batches can be repeated.
        vault: the vault of the labels, or None.
        receipts: of the public data.
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
        spec = x.element_spec if isinstance(x, tf.data.Dataset) else ()
        if optimizer.num_examples and not (isinstance(spec, tuple) and len(spec) == 4):
            needs = optimizer.preconditioner or optimizer.denoiser
            raise ValueError(
                f"{type(needs).__name__} needs {optimizer.num_examples} public examples in each "
                "step, and the data have none. Fit on data.poisson_batches."
            )
        if y is None or isinstance(x, tf.data.Dataset):
            return TrainingPlan(optimizer.num_microbatches)
        return ArrayPlan.of_arrays(x, y, settings, optimizer)

    @property
    def label_range(self) -> tuple[float, float] | None:
        """The range of a regression vault's labels; None otherwise."""
        return None if self.vault is None else self.vault.label_range

    def known_labels(self) -> np.ndarray | None:
        """Returns the labels of an array, or None; to be checked, never shown."""
        return None

    def check_labels(self, model: Any, clipping: str) -> None:
        """Raises a ``ValueError`` for labels that the model has no output for.

        The kernel of sparse cross-entropy would write the labels of the batch into TensorFlow's
        log.
        """
        shape = getattr(model, "output_shape", None)
        if not isinstance(shape, tuple) or len(shape) < 2 or not isinstance(shape[-1], int):
            return
        outputs, vault = shape[-1], self.vault
        if clipping == "label_distance":
            self._check_two_classes(outputs)
        if vault is None:
            came = f"some labels are not in 0..{outputs - 1}"
            labels = self.known_labels() if takes_codes(model.loss) else None
            fits = labels is None or bool(np.all((labels >= 0) & (labels < outputs)))
        elif vault.num_labels is not None:
            came = f"the labels are rows of {vault.num_labels}"
            fits = vault.num_labels == outputs
        elif vault.label_range is not None:
            return
        else:
            # For any loss: one that wraps sparse cross-entropy does not show it.
            came = f"the labels have {vault.num_classes} classes"
            fits = vault.num_classes <= outputs
            fits = fits or (outputs == 1 and not takes_codes(model.loss))
            if fits and takes_rows(model.loss) and outputs > 1:
                raise ValueError(
                    "the labels of a PrivateLabels are class codes, and the loss takes one-hot "
                    "rows. Use keras.losses.SparseCategoricalCrossentropy, of codes."
                )
        if not fits:
            raise ValueError(
                f"{came}, but the model has {outputs} outputs. Give its last layer one unit for "
                "each class (numbered from zero), or for each label of a row."
            )

    def _check_two_classes(self, outputs: int) -> None:
        if self.unit != "label":
            raise ValueError(
                "clipping='label_distance' protects single labels, and these batches are of users."
            )
        if self.vault is None:
            labels = self.known_labels()
            if labels is not None:
                check_labels(labels, outputs)
        elif self.vault.num_classes != 2:  # which raises for numbers and rows of labels
            raise ValueError(
                "clipping='label_distance' is for two classes, and the vault has "
                f"{self.vault.num_classes}. Use clipping='norm'."
            )

    def open(self) -> tuple[tf.data.Dataset, dict[str, Any]] | None:
        """Returns the dataset and settings for ``fit``; None for those of its caller."""
        return None

    def shared(self) -> dict[str, int]:
        """Returns the sizes that replicas share evenly, by the argument that sets each."""
        return {}

    def rows_a_group(self, first: tf.Tensor, num_replicas: int) -> int:
        if self.num_microbatches is None:
            return self.group_rows
        rows = first.shape[0]
        size = 0 if rows is None else rows * num_replicas // self.num_microbatches
        if not size or rows * num_replicas != size * self.num_microbatches or rows % size:
            raise ValueError(
                f"num_microbatches={self.num_microbatches} must divide the batch of {rows} rows on "
                f"each of {num_replicas} replica(s). Batch with drop_remainder=True."
            )
        return int(size)

    def divisor(self, x: Any, replicas: Any) -> tf.Tensor:
        """Returns the divisor of the noisy sum: public, never the size of a secret batch."""
        if self.num_microbatches is not None:
            return tf.constant(self.num_microbatches, tf.float32)
        rows = tf.cast(tf.shape(tf.nest.flatten(x)[0])[0], tf.float32)
        return rows * replicas.num_replicas_in_sync


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PoissonPlan(TrainingPlan):
    """Steps on ``poisson_batches``.

    Attributes:
        batches: the result of ``poisson_batches``.
        disjoint: whether batches are disjoint in each pass over the data.
        num_examples: public examples in addition to each batch.
    """

    batches: PoissonBatches
    disjoint: bool
    num_examples: int

    @classmethod
    def of_batches(
        cls, batches: PoissonBatches, y: Any, settings: dict[str, Any], optimizer: Any
    ) -> PoissonPlan:
        _check_class_weight(settings)
        extra = [name for name in _NOT_WITH_BATCHES if _is_given(settings.get(name))]
        extra = extra if y is None else ["y", *extra]
        if extra:
            raise ValueError(
                f"fit got poisson_batches together with {', '.join(extra)}. Set probability, steps "
                "and labels in poisson_batches."
            )
        microbatches, disjoint = optimizer.num_microbatches, optimizer.denoiser.reveals_batch
        q, uses = batches.sampling_probability, batches.steps
        if microbatches is not None:
            _check_microbatches(batches, microbatches, sampled=q < 1.0 and not disjoint)
        if disjoint:
            # Revealed batches get no amplification by sampling, so each example has its turn.
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
        dataset = open_for_training(
            self.batches, alt_examples=self.num_examples, disjoint=self.disjoint
        )
        return dataset, {"steps_per_epoch": self.batches.steps}

    def divisor(self, x: Any, replicas: Any) -> tf.Tensor:
        expected = self.batches.expected_batch_size
        if self.num_microbatches is not None:
            expected = self.num_microbatches * (expected / self.batches.buffer_size)
        return tf.constant(expected, tf.float32)


def _check_microbatches(batches: PoissonBatches, microbatches: int, sampled: bool) -> None:
    """Raises where batches can't be cut into groups, or where sampling does not amplify."""
    if batches.privacy_unit == "user":
        raise ValueError(
            "num_microbatches can't be used with users, whose examples are clipped together."
        )
    rows = batches.buffer_size * batches.group_size
    if rows % microbatches:
        raise ValueError(
            f"num_microbatches={microbatches} does not divide the buffer of {rows} rows. Set "
            "buffer_size in poisson_batches."
        )
    if sampled and microbatches != rows:
        # The sample decides which examples are neighbours: one example more or less changes many of
        # the clipped means, which the accounting of sampled batches does not allow for.
        raise ValueError(
            f"num_microbatches={microbatches} clips means of {rows // microbatches} examples, for "
            "which amplification by sampling does not hold. Fit on arrays, or leave it out."
        )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ArrayPlan(TrainingPlan):
    """Steps on arrays, in which every example is used once per epoch.

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
        """Returns the plan, and takes its own settings out of ``settings``."""
        _check_class_weight(settings)
        for name, instead in _NOT_WITH_ARRAYS.items():
            if _is_given(settings.pop(name, None)):
                raise ValueError(f"{name} is not supported with arrays{instead}.")
        if isinstance(y, PrivateLabels):
            raise TypeError(
                "labels in a PrivateLabels vault come with batches: fit(data.poisson_batches(x, "
                "labels, sampling_probability=..., steps=...))."
            )
        public = public_input(x, settings.pop("sample_weight", None))
        x, weights = public.value
        y = np.asarray(y) if isinstance(y, list) else y
        x, y = tf.nest.map_structure(np.asarray, (x, y))
        n = int(np.shape(tf.nest.flatten(x)[0])[0])
        arrays = x, y, np.asarray(np.ones(n) if weights is None else weights, np.float32)
        lengths = [part.shape[:1] for part in tf.nest.flatten(arrays)]
        if any(length != (n,) for length in lengths):
            raise ValueError(
                "features, labels and sample_weight must have one row for each example, got "
                f"{', '.join(str(length[0]) if length else 'no' for length in lengths)} rows."
            )
        size = min(int(settings.pop("batch_size", None) or 32), n)
        if size < 2 and not optimizer.denoiser.takes_single_examples:
            raise ValueError(
                f"batch_size must be at least 2, got {size}. (SelfSpan allows single examples: "
                "LP-Normal-SGD.)"
            )
        microbatches = optimizer.num_microbatches
        if microbatches is not None and size % microbatches:
            raise ValueError(f"num_microbatches={microbatches} must divide batch_size={size}.")
        return cls(
            arrays=arrays,
            batch_size=size,
            sampling_probability=1.0,
            uses_an_epoch=1,
            steps_an_epoch=math.ceil(n / size),
            num_units=n,
            num_microbatches=microbatches,
            is_weighted=weights is not None,
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
        y, weights = tf.nest.map_structure(lambda part: zero_where(~real, part), (y, weights))
        return x, y, weights

    return rows.batch(size).map(take).prefetch(2)
