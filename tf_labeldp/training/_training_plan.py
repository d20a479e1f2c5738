"""How a call of ``fit`` uses each label: the batches, and what they cost."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp._columns import Column
from tf_labeldp.accounting import Receipt, Receipts, public_input
from tf_labeldp.data.batches import (
    OutputLabels,
    PoissonBatches,
    open_for_training,
)
from tf_labeldp.features.reader import FeatureRows
from tf_labeldp.gradients.label_distance import LabelDistanceClip
from tf_labeldp.gradients.output_losses import OutputLosses
from tf_labeldp.vault import PrivateLabels
from tf_labeldp.vault.label_kinds import class_table

_NOT_WITH_BATCHES = ("batch_size", "sample_weight", "steps_per_epoch", "validation_split")
_NOT_WITH_ARRAYS = {
    "validation_split": ": it would report exact metrics of private labels. Give "
    "validation_data=(x, y) with public labels",
    "steps_per_epoch": ": an epoch uses every example once. Leave it out, or fit on "
    "data.poisson_batches",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelUses:
    """The uses of each label in an epoch, from which their cost follows.

    Attributes:
        probability: probability of each use, 1 without amplification.
        per_epoch: number of uses of each example per epoch, each with that probability.
        steps_per_epoch: number of steps.
        num_units: number of examples or users.
        unit: the unit of privacy: "label", "row" for labels of several outputs, or "user".
        seeded: whether the batches are repeatable.
    """

    probability: float
    per_epoch: int
    steps_per_epoch: int
    num_units: int
    unit: str
    seeded: bool = False


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TrainingPlan(abc.ABC):
    """The steps of a ``fit``, and the uses of each label in them.

    Attributes:
        uses: the uses of each label.
        divisor: divisor of the noisy sum: public, never the size of a secret batch.
        shared: the sizes that replicas share evenly, by the name of the argument.
        labels: ``OutputLabels``, or a dict or tuple of them for several outputs.
        group_rows: rows per unit, which are clipped together.
        has_sample_weight: whether there are sample weights.
        class_weight: the weights of classes, as the caller gave them; None without.
        receipts: the receipts of the public data.
    """

    uses: LabelUses
    divisor: float
    shared: dict[str, int]
    labels: Any
    group_rows: int = 1
    has_sample_weight: bool = False
    class_weight: Any = None
    receipts: tuple[Receipt, ...] = ()

    @staticmethod
    def of(x: Any, y: Any, settings: dict[str, Any], optimizer: Any) -> TrainingPlan:
        """Returns the plan of ``fit(x, y, **settings)``."""
        if isinstance(x, PoissonBatches):
            return PoissonPlan.of_batches(x, y, settings, optimizer)
        if y is None or isinstance(x, tf.data.Dataset):
            raise ValueError(
                f"expected data.poisson_batches, or arrays x and y, got {type(x).__name__}. The "
                "sampling of other data is unknown, so nothing could be promised."
            )
        if optimizer.num_examples:
            needs = optimizer.preconditioner or optimizer.denoiser
            raise ValueError(
                f"{type(needs).__name__} needs {optimizer.num_examples} public examples per step, "
                "and arrays have none. Fit on data.poisson_batches."
            )
        return ArrayPlan.of_arrays(x, y, settings, optimizer)

    @property
    def vaults(self) -> tuple[PrivateLabels, ...]:
        """The vaults of the labels, which are all charged."""
        return OutputLabels.vaults_of(self.labels)

    @property
    def label_range(self) -> tuple[float, float] | None:
        kind = self.labels.kind if isinstance(self.labels, OutputLabels) else None
        return None if kind is None else kind.label_range

    @property
    def is_weighted(self) -> bool:
        """Whether samples or classes have weights."""
        return self.has_sample_weight or self.class_weight is not None

    def class_weights(self, losses: OutputLosses) -> dict[str, list[float]]:
        """Returns the weights (K,) of the classes of each output, or raises if they do not fit."""
        weights = self.class_weight
        if weights is None:
            return {}
        pairs = losses.pairs(self.labels)
        names = [loss.name for loss, _ in pairs]
        by_output = any(isinstance(part, Mapping) for part in weights.values())
        if not by_output and len(pairs) == 1:
            weights = {names[0]: weights}
        elif not by_output or not set(weights) <= set(names):
            raise ValueError(
                f"expected class_weight by output, for {names}, got {sorted(map(str, weights))}. "
                "Write {output: {class: weight}}; a loss of all outputs weighs its classes itself."
            )
        return {
            loss.name: class_table(weights[loss.name], _classes_of(labels, loss.units)).tolist()
            for loss, labels in pairs
            if loss.name in weights
        }

    def traced_values(self, losses: OutputLosses) -> tuple[Any, ...]:
        """Returns the values of the plan that a traced step contains."""
        weights = None if self.class_weight is None else self.class_weights(losses)
        sums = self.divisor, self.group_rows, self.has_sample_weight, weights
        # TensorFlow would trace a step of unknown sizes, if those of the batches changed.
        specs = self.feature_specs(), tf.nest.map_structure(lambda part: part.spec(2), self.labels)
        return *sums, self.label_range, self.uses.probability, self.shared, specs

    @abc.abstractmethod
    def feature_specs(self) -> Any:
        """Returns the specs of the features of a batch, in their structure."""

    @abc.abstractmethod
    def features_in_memory(self) -> Any:
        """Returns the features of all examples; None if they are read when needed."""

    @abc.abstractmethod
    def open(self) -> tuple[tf.data.Dataset, dict[str, Any]]:
        """Returns the dataset of (x, y, weights[, public x]) and settings for ``fit``."""

    def check_labels(self, losses: OutputLosses, clipping: str) -> None:
        """Raises for labels without an output of the model.

        The kernel of sparse cross-entropy would write such labels into TensorFlow's log.
        """
        if clipping == "label_distance" and self.uses.unit == "user":
            raise ValueError(
                "expected batches of labels for clipping='label_distance', got batches of users."
            )
        for loss, labels in losses.pairs(self.labels):
            if loss.units is None:
                continue
            if clipping == "label_distance":
                _check_two_classes(labels, loss.units)
            if labels.kind is not None:
                labels.kind.check_loss(loss.loss, loss.units)
            elif loss.loss.takes_codes:
                _check_codes(labels.array, loss.units)
        losses.check_labels_fit(tf.nest.map_structure(lambda part: part.spec(2), self.labels))
        self.class_weights(losses)


@_validate.clears_frames
def _check_codes(labels: Any, units: int) -> None:
    if not np.all((labels >= 0) & (labels < units)):
        raise ValueError(
            f"some labels are not in 0..{units - 1}, but the model has {units} outputs. Give its "
            "last layer one unit for each class (numbered from zero), or for each label of a row."
        )


def _check_two_classes(labels: OutputLabels, units: int) -> None:
    if labels.kind is None:
        LabelDistanceClip.check_labels(labels.array, units)
    elif labels.kind.num_classes != 2:
        raise ValueError(
            "expected two classes for clipping='label_distance', got "
            f"{labels.kind.describe()}. Use clipping='norm'."
        )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PoissonPlan(TrainingPlan):
    """Steps on ``poisson_batches``.

    Attributes:
        batches: the result of ``poisson_batches``.
        disjoint: whether batches are disjoint in each pass over the data.
        num_examples: public examples per step in addition to the batch.
    """

    batches: PoissonBatches
    disjoint: bool
    num_examples: int

    @classmethod
    def of_batches(
        cls, batches: PoissonBatches, y: Any, settings: dict[str, Any], optimizer: Any
    ) -> PoissonPlan:
        class_weight = public_input(settings.pop("class_weight", None))
        if class_weight.value is not None:
            class_table(class_weight.value, None)
        extra = [name for name in _NOT_WITH_BATCHES if _is_given(settings.get(name))]
        extra = extra if y is None else ["y", *extra]
        if extra:
            raise ValueError(
                f"fit got poisson_batches together with {', '.join(extra)}. Set probability, "
                "steps, labels and weights in poisson_batches."
            )
        if None not in (class_weight.value, batches.class_weight):
            raise ValueError(
                "expected class_weight in poisson_batches or in fit, got both. Leave one out."
            )
        needs_others = optimizer.num_examples and optimizer.preconditioner is None
        if batches.sample_weight is not None and needs_others:
            raise ValueError(
                f"expected no sample_weight with {type(optimizer.denoiser).__name__}, whose public "
                "examples have none, got weights. Leave out one of them."
            )
        # (2 / n) * n may miss 2.
        _check_batch_size("the mean batch", round(batches.expected_batch_size, 6), optimizer)
        disjoint = optimizer.denoiser.reveals_batch
        q, uses = batches.sampling_probability, batches.steps
        if disjoint:
            # Revealed batches get no amplification by sampling, so examples take turns.
            q, uses = 1.0, math.ceil(batches.steps / (batches.num_units // batches.disjoint_size))
        return cls(
            batches=batches,
            uses=LabelUses(
                probability=q,
                per_epoch=uses,
                steps_per_epoch=batches.steps,
                num_units=batches.num_units,
                unit=_unit(batches._by_output, batches.privacy_unit),
                seeded=batches.seeded,
            ),
            divisor=batches.expected_batch_size,
            shared={"buffer_size": batches.buffer_size, "num_examples": optimizer.num_examples},
            labels=batches._by_output,
            group_rows=batches.group_size,
            disjoint=disjoint,
            num_examples=optimizer.num_examples,
            has_sample_weight=batches.sample_weight is not None,
            class_weight=class_weight.value or batches.class_weight,
            receipts=Receipts.merged(batches.receipts, class_weight.receipts),
        )

    def feature_specs(self) -> Any:
        return self.batches.feature_specs()

    def features_in_memory(self) -> Any:
        return self.batches.features_in_memory()

    def open(self) -> tuple[tf.data.Dataset, dict[str, Any]]:
        dataset = open_for_training(
            self.batches, alt_examples=self.num_examples, disjoint=self.disjoint
        )
        return dataset, {"steps_per_epoch": self.batches.steps}


def codes_of(labels: Any) -> np.ndarray:
    """Returns labels (n,) or (n, L) of one output as numbers, which are codes of classes."""
    array = Column.of(labels).numbers("labels")
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"expected labels that are numbers, got dtype {array.dtype}. Give codes, as "
            "Classes([...]).encode(labels) returns them."
        )
    return array


def codes_by_output(labels: Any) -> Any:
    """Returns the labels of one output or, in a dict, list or tuple of arrays, of several."""
    if isinstance(labels, dict):
        return {name: codes_of(part) for name, part in labels.items()}
    is_several = isinstance(labels, (list, tuple))
    if is_several and any(isinstance(part, np.ndarray) for part in labels):
        return type(labels)(map(codes_of, labels))
    return codes_of(labels)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ArrayPlan(TrainingPlan):
    """Steps on arrays, in which every example is used once per epoch.

    Attributes:
        arrays: (x, y, weights).
        batch_size: rows per batch; the last is padded with weights of zero.
        shuffle: whether the rows are shuffled in each epoch.
    """

    arrays: tuple[Any, Any, Any] = dataclasses.field(repr=False)
    batch_size: int
    shuffle: bool

    @classmethod
    def of_arrays(cls, x: Any, y: Any, settings: dict[str, Any], optimizer: Any) -> ArrayPlan:
        """Returns the plan, and removes its settings from ``settings``."""
        for name, instead in _NOT_WITH_ARRAYS.items():
            if _is_given(settings.pop(name, None)):
                raise ValueError(f"{name} is not supported with arrays{instead}.")
        if any(isinstance(part, PrivateLabels) for part in tf.nest.flatten(y)):
            raise TypeError(
                "expected labels as an array, got a PrivateLabels. Use fit(data.poisson_batches(x, "
                "labels, sampling_probability=..., steps=...))."
            )
        taken = [settings.pop(name, None) for name in ("sample_weight", "class_weight")]
        public = public_input(x, *taken)
        x, weights, class_weight = public.value
        if class_weight is not None:
            class_table(class_weight, None)
        x = FeatureRows(x).network_arrays()
        n = int(np.shape(tf.nest.flatten(x)[0])[0])
        if isinstance(y, list):
            by_output = len(y) != n and any(isinstance(part, np.ndarray) for part in y)
            y = tuple(y) if by_output else Column.of(y).complete("labels")
        y = tf.nest.map_structure(codes_of, y)
        weights = Column.weights(weights, n, np.float32)
        arrays = x, y, np.ones(n, np.float32) if weights is None else weights
        lengths = [part.shape[:1] for part in tf.nest.flatten(arrays)]
        if any(length != (n,) for length in lengths):
            raise ValueError(
                "features and labels must have one row per example, got "
                f"{', '.join(str(length[0]) if length else 'no' for length in lengths)} rows."
            )
        size = min(int(settings.pop("batch_size", None) or 32), n)
        _check_batch_size("batch_size", size, optimizer)
        labels = tf.nest.map_structure(lambda part: OutputLabels(None, part), y)
        return cls(
            arrays=arrays,
            batch_size=size,
            uses=LabelUses(
                probability=1.0,
                per_epoch=1,
                steps_per_epoch=math.ceil(n / size),
                num_units=n,
                unit=_unit(labels, "label"),
            ),
            divisor=size,
            shared={"batch_size": size},
            labels=labels,
            has_sample_weight=weights is not None,
            class_weight=class_weight,
            receipts=public.receipts,
            shuffle=bool(settings.pop("shuffle", True)),
        )

    def feature_specs(self) -> Any:
        return tf.nest.map_structure(
            lambda part: tf.TensorSpec((self.batch_size, *part.shape[1:]), part.dtype),
            self.arrays[0],
        )

    def features_in_memory(self) -> Any:
        return self.arrays[0]

    def open(self) -> tuple[tf.data.Dataset, dict[str, Any]]:
        return padded_batches(self.arrays, self.batch_size, self.shuffle), {}


def _check_batch_size(name: str, size: float, optimizer: Any) -> None:
    if size < 2 and not optimizer.denoiser.takes_single_examples:
        raise ValueError(
            f"{name} must be at least 2, got {size:g}. SelfSpan alone takes single examples: "
            "LP-Normal-SGD."
        )


def _unit(labels: Any, unit: str) -> str:
    """Returns "row" for labels of several outputs, unless they are one label of one vault."""
    if unit == "user":
        return unit
    vaults = OutputLabels.vaults_of(labels)
    if len(vaults) == 1:
        return vaults[0].unit
    return "row" if len(tf.nest.flatten(labels)) > 1 else unit


def _classes_of(labels: OutputLabels, units: int | None) -> tuple[Any, ...]:
    """Returns the classes that have weights."""
    if labels.kind is None:
        return tuple(range(max(2, units or 2)))
    return labels.kind.weighted_classes


def _is_given(value: Any) -> bool:
    # Not None and not zero; arrays and containers always count as set.
    return value is not None and not (np.isscalar(value) and not value)


def padded_batches(arrays: tuple[Any, Any, Any], size: int, shuffle: bool) -> tf.data.Dataset:
    """Returns batches of a fixed size; the last is padded with weights of zero."""
    n = arrays[2].shape[0]
    whole = tf.nest.map_structure(tf.constant, arrays)
    rows = tf.data.Dataset.range(n)
    if shuffle:
        rows = rows.shuffle(n, reshuffle_each_iteration=True)

    def take(numbers: tf.Tensor) -> Any:
        missing = size - tf.shape(numbers)[0]
        # Padding repeats the first features with label and weight zero, so no label is used twice.
        padded = tf.ensure_shape(tf.pad(numbers, [[0, missing]]), [size])
        x = tf.nest.map_structure(lambda part: tf.gather(part, padded), whole[0])

        def with_zeros(part: tf.Tensor) -> tf.Tensor:
            rest = tf.zeros((missing, *part.shape[1:]), part.dtype)
            rows = tf.concat([tf.gather(part, numbers), rest], 0)
            return tf.ensure_shape(rows, (size, *part.shape[1:]))

        return (x, *tf.nest.map_structure(with_zeros, whole[1:]))

    return rows.batch(size).map(take).prefetch(2)
