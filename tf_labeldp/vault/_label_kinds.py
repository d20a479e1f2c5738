"""What the labels of a vault are: classes, numbers, or rows of several binary labels."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Charge
from tf_labeldp.mechanisms import AggregateMechanism, ClassificationMechanism, RegressionMechanism
from tf_labeldp.mechanisms._base import LabelMechanism, Mechanism, checked_mechanism
from tf_labeldp.vault._store import array_digest

if TYPE_CHECKING:
    from tf_labeldp.vault._private_labels import PrivateLabels


class LabelKind(abc.ABC):
    """How labels of one kind are read, kept, and handed out.

    Attributes:
        unit: what a statement protects; see ``accounting.Receipt``.
        number: of classes; None for others.
        names: the values that class codes stand for, where they are not the codes themselves.
        label_range: the range of numbers; None for others.
        num_labels: the number of labels in a row; None for single labels.
    """

    unit: str = "label"
    number: int | None = None
    names: tuple[Hashable, ...] | None = None
    label_range: tuple[float, float] | None = None
    num_labels: int | None = None

    @abc.abstractmethod
    def encode(self, labels: Any) -> np.ndarray:
        """Returns a private copy of the labels as the mechanisms take them, (n,) or (n, L)."""

    @abc.abstractmethod
    def header(self) -> dict[str, Any]:
        """Returns what a store says of its labels: public knowledge."""

    @abc.abstractmethod
    def check(self, mechanism: LabelMechanism) -> None:
        """Raises if the mechanism is not for these labels."""

    @abc.abstractmethod
    def check_release(self, mechanism: AggregateMechanism) -> None:
        """Raises if a mechanism of many labels is not for these."""

    @abc.abstractmethod
    def any_labels(self, size: int) -> np.ndarray:
        """Returns labels that could be in a vault and reveal nothing of those that are, (size,)."""

    @abc.abstractmethod
    def in_words(self) -> str:
        """Returns what the labels are, for messages."""

    def charge(self, mechanism: Mechanism) -> Charge:
        """Returns what one use of a mechanism on these labels costs each unit."""
        return Charge.of(mechanism)

    def randomize(
        self,
        mechanism: LabelMechanism,
        labels: np.ndarray,
        public: Any,
        rng: np.random.Generator | None,
    ) -> np.ndarray:
        """Returns checked noisy labels (m, ...) of labels as kept."""
        return mechanism.check_output(mechanism.randomize(labels, public, rng=rng), len(labels))

    @property
    def num_classes(self) -> int:
        """Number of classes K."""
        if self.number is None:
            raise ValueError(
                f"these labels are {self.in_words()} and have no classes. Make PrivateLabels with "
                "num_classes for one class per example."
            )
        return self.number

    @property
    def classes(self) -> tuple[Hashable, ...]:
        """The class values in the order of their codes."""
        return self.names if self.names is not None else tuple(range(self.num_classes))

    def decode(self, codes: Any) -> np.ndarray:
        """Returns the class values of class codes."""
        return class_array(self.classes)[_validate.class_indices("codes", codes, self.num_classes)]


def kind_arguments(labels: PrivateLabels) -> dict[str, Any]:
    """Returns the kind of a vault's labels, as arguments of a mechanism."""
    if labels.num_labels is not None:
        return {"num_labels": labels.num_labels}
    if labels.label_range is not None:
        return {"low": labels.label_range[0], "high": labels.label_range[1]}
    return {"num_classes": labels.num_classes}


def label_kind(
    num_classes: int | None,
    classes: Sequence[Hashable] | None,
    low: float | None,
    high: float | None,
    clip: bool,
    num_labels: int | None,
) -> LabelKind:
    """Returns the kind of labels that a vault's arguments describe."""
    of_classes = num_classes is not None or classes is not None
    of_numbers = low is not None or high is not None
    if of_classes + of_numbers + (num_labels is not None) > 1:
        raise ValueError(
            "both classes and a range (low, high) were given, or num_labels together with classes "
            "or a range. Give one of num_classes, classes, low and high, and num_labels."
        )
    if num_labels is not None:
        return RowLabels(_validate.integer_at_least("num_labels", num_labels, 1))
    if of_numbers:
        if low is None or high is None:
            raise ValueError(
                f"the range needs both ends, got low={low}, high={high}. They are public "
                "knowledge and are not taken from the labels."
            )
        return NumericLabels(_validate.number_range(low, high), _validate.boolean("clip", clip))
    if clip:
        raise ValueError("clip=True is for regression labels; give their range low and high.")
    return ClassLabels.of(num_classes, classes)


@dataclasses.dataclass(frozen=True)
class NumericLabels(LabelKind):
    """Numbers in a public range, kept as ``float64``; clipped to it if asked for."""

    label_range: tuple[float, float]
    clip: bool = False

    def encode(self, labels: Any) -> np.ndarray:
        array = _as_array(labels)
        if self.clip:
            return np.clip(_validate.real_vector("labels", array), *self.label_range)
        return _validate.numbers_in_range("labels", array, *self.label_range)

    def header(self) -> dict[str, Any]:
        return {"num_classes": None, "classes": None, "range": list(self.label_range)}

    def check(self, mechanism: LabelMechanism) -> None:
        self._check_range(checked_mechanism(mechanism, RegressionMechanism).label_range())

    def check_release(self, mechanism: AggregateMechanism) -> None:
        if mechanism.num_classes is not None or mechanism.num_labels is not None:
            raise ValueError(
                "the mechanism is for classes or rows of labels, the labels are "
                f"{self.in_words()}. Give it the values to count at, values=..., instead."
            )
        self._check_range(mechanism.label_range())

    def _check_range(self, found: tuple[float, float] | None) -> None:
        low, high = self.label_range
        # Whether a mechanism of a narrower range refuses would reveal something of the labels.
        if found is not None and (found[0] > low or found[1] < high):
            raise ValueError(
                f"the mechanism is for labels in [{found[0]:g}, {found[1]:g}], the labels lie in "
                f"[{low:g}, {high:g}]. Make the mechanism with the labels' range."
            )

    def any_labels(self, size: int) -> np.ndarray:
        return np.full(size, self.label_range[0])

    def in_words(self) -> str:
        return "numbers in [{:g}, {:g}]".format(*self.label_range)

    def __str__(self) -> str:
        return "low={:g}, high={:g}".format(*self.label_range)


@dataclasses.dataclass(frozen=True)
class ClassLabels(LabelKind):
    """Classes 0..K-1, or values that stand for them, kept as ``int64`` codes."""

    number: int
    names: tuple[Hashable, ...] | None = None

    @classmethod
    def of(cls, num_classes: int | None, classes: Sequence[Hashable] | None) -> ClassLabels:
        """Returns the kind for a number of classes, or for a list of class values."""
        names = None if classes is None else _checked_classes(classes, num_classes)
        number = num_classes if names is None else len(names)
        if number is None:
            raise ValueError(
                "num_classes is missing, and is not counted from the labels, since that would "
                "reveal whether a rare class occurs. Give num_classes or classes, or low and high "
                "for numbers."
            )
        return cls(_validate.integer_at_least("num_classes", number, 2), names)

    def encode(self, labels: Any) -> np.ndarray:
        labels = _as_array(labels)
        if self.names is None:
            return _validate.class_indices("labels", labels, self.number)
        return _codes(labels, self.names)

    def header(self) -> dict[str, Any]:
        names = None if self.names is None else array_digest(np.array(repr(self.names)))
        return {"num_classes": self.number, "classes": names}

    def check(self, mechanism: LabelMechanism) -> None:
        if getattr(mechanism, "num_classes", None) is None:
            checked_mechanism(mechanism, ClassificationMechanism)
        self.check_release(mechanism)

    def check_release(self, mechanism: Any) -> None:
        found = getattr(mechanism, "num_classes", None)
        if found != self.number:
            raise ValueError(
                f"the mechanism has num_classes={'numbers' if found is None else found}, the "
                f"labels have {self.number}. Make the mechanism with the labels' number of classes."
            )

    def any_labels(self, size: int) -> np.ndarray:
        return np.zeros(size, dtype=np.int64)

    def in_words(self) -> str:
        return f"{self.number} classes"

    def __str__(self) -> str:
        return f"num_classes={self.number}"


@dataclasses.dataclass(frozen=True)
class RowLabels(LabelKind):
    """Rows of L zeros and ones, kept as ``int64`` (n, L); the unit of privacy is the whole row."""

    num_labels: int

    unit = "row"

    def encode(self, labels: Any) -> np.ndarray:
        rows = np.asarray(_as_array(labels))
        if rows.ndim != 2 or rows.shape[1] != self.num_labels:
            raise ValueError(
                f"labels must have shape (n, {self.num_labels}), a row of zeros and ones for each "
                f"example, got {rows.shape}. Give num_labels the number of columns."
            )
        if rows.dtype.kind not in "biuf":
            raise TypeError(f"labels must be zeros and ones, got dtype {rows.dtype}.")
        wrong = int(np.count_nonzero((rows != 0) & (rows != 1)))
        if wrong:
            raise ValueError(
                f"labels must be zeros and ones, but {wrong} of {rows.size} are not. Give classes "
                "one column each."
            )
        return rows.astype(np.int64)

    def header(self) -> dict[str, Any]:
        return {"num_classes": None, "classes": None, "labels_in_row": self.num_labels}

    def check(self, mechanism: LabelMechanism) -> None:
        found = checked_mechanism(mechanism, ClassificationMechanism)
        if found.num_classes != 2 or found.uses_priors:
            raise ValueError(
                f"{mechanism!r} can't draw rows of labels: each label of a row is drawn by itself, "
                "between 0 and 1. Use RandomizedResponse(epsilon, num_classes=2), which is charged "
                f"{self.num_labels} times."
            )

    def check_release(self, mechanism: AggregateMechanism) -> None:
        if mechanism.num_labels != self.num_labels:
            raise ValueError(
                f"the mechanism has num_labels={mechanism.num_labels}, the rows have "
                f"{self.num_labels} labels. Make the mechanism for rows of that many labels."
            )

    def charge(self, mechanism: Mechanism) -> Charge:
        """Returns the charge of a release, or of one draw for each label of the row."""
        one = Charge.of(mechanism)
        if isinstance(mechanism, AggregateMechanism):
            return one
        import dp_accounting

        times = self.num_labels
        event = dp_accounting.SelfComposedDpEvent(one.event, times)
        return Charge(times * one.epsilon, times * one.delta, event, one.assumptions)

    def randomize(
        self,
        mechanism: LabelMechanism,
        labels: np.ndarray,
        public: Any,
        rng: np.random.Generator | None,
    ) -> np.ndarray:
        """Returns rows in which each label was drawn by itself, ``int64`` (m, L)."""
        noisy = super().randomize(mechanism, labels.reshape(-1), public, rng)
        return noisy.reshape(labels.shape)

    def any_labels(self, size: int) -> np.ndarray:
        return np.zeros((size, self.num_labels), dtype=np.int64)

    def in_words(self) -> str:
        return f"rows of {self.num_labels} zeros and ones"

    def __str__(self) -> str:
        return f"num_labels={self.num_labels}"


def _as_array(labels: Any) -> Any:
    """Returns a tensor of any framework as an array; anything else as it is."""
    if np.ma.is_masked(labels):
        raise ValueError(
            "labels are masked in places, and below a mask there is no label. Leave those examples "
            "out, or fill them in, by a rule that does not look at labels."
        )
    return labels.numpy() if hasattr(labels, "numpy") else labels


def _checked_classes(classes: Sequence[Hashable], num_classes: int | None) -> tuple[Hashable, ...]:
    # NumPy's scalars become Python's, so that a store does not depend on how NumPy prints them.
    names = tuple(name.item() if isinstance(name, np.generic) else name for name in classes)
    if len(set(names)) != len(names):
        raise ValueError("classes names a class more than once; name each once.")
    if num_classes not in (None, len(names)):
        raise ValueError(
            f"num_classes={num_classes} but classes has {len(names)} entries. Give one of the two."
        )
    return names


def _object_array(values: Sequence[Any]) -> np.ndarray:
    """Returns the values as they are, one a cell: tuples stay whole, numbers stay numbers."""
    return np.fromiter(values, dtype=object, count=len(values))


def class_array(classes: tuple[Hashable, ...]) -> np.ndarray:
    """Returns the classes as NumPy holds them best without changing any of them."""
    if len({type(name) for name in classes}) == 1 and not isinstance(classes[0], tuple):
        array = np.asarray(classes)
        same_kind = array.dtype.kind != "f" or isinstance(classes[0], (float, np.floating))
        if same_kind and array.tolist() == list(classes):
            return array
    return _object_array(classes)


def _codes(labels: Any, classes: tuple[Hashable, ...]) -> np.ndarray:
    """Returns labels that are class values as codes 0..K-1."""
    array = _object_array(labels) if isinstance(labels, (list, tuple)) else np.asarray(labels)
    if array.ndim != 1:
        raise ValueError(f"labels must have shape (n,), got shape {array.shape}.")
    lookup: dict[Hashable, int] = {value: code for code, value in enumerate(classes)}
    for name in [name for name in classes if isinstance(name, str)]:
        lookup.setdefault(name.encode(), lookup[name])  # a tensor of texts holds bytes
    if array.dtype.kind == "O":  # not sortable in general, so looked up one by one
        codes = np.fromiter((lookup.get(v, -1) for v in array), np.int64, array.size)
    else:
        values, inverse = np.unique(array, return_inverse=True)
        codes = np.array([lookup.get(v, -1) for v in values.tolist()], np.int64)[inverse]
    unknown = int(np.count_nonzero(codes < 0))
    if unknown:
        raise ValueError(
            f"{unknown} of {array.size} labels are not among the {len(classes)} classes given. Add "
            "the missing classes to classes=, or check the labels' type and spelling."
        )
    return codes
