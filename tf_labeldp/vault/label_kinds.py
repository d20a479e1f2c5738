"""The kinds of labels: classes, numbers, and rows of several binary labels."""

from __future__ import annotations

import abc
import dataclasses
import datetime
import functools
import itertools
import numbers
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._columns import Column
from tf_labeldp.accounting import Charge, Private, Public, PublicInput, Setting
from tf_labeldp.mechanisms import (
    AggregateMechanism,
    ClassificationMechanism,
    LabelMechanism,
    Mechanism,
    MetricMechanism,
    RegressionMechanism,
    SelectionMechanism,
)
from tf_labeldp.mechanisms.metrics import ClassMetric

_HALVES = re.compile("[\ud800-\udfff]")
"""Halves of characters (lone surrogates), which UTF-8 cannot write into a store or a table."""


class LabelKind(abc.ABC):
    """A public kind of labels: ``Classes``, ``Numbers`` or ``Rows``.

    ``PrivateLabels`` takes it; heads build it from ``num_classes``, ``classes``, ``low``, ``high``
    and ``num_labels``. ``labels.kind`` returns it.

    Attributes:
        unit: the unit of privacy, ``"label"`` or ``"row"``.
        num_classes: K; None unless labels are classes.
        names: the class values in the order of their codes; None if the codes are the values.
        label_range: the smallest and the largest number; None unless labels are numbers.
        num_labels: L, the number of labels in a row; None for single labels.
        target_dtype: the type of labels in batches, as Keras's losses expect it.
        metrics: the metrics of predictions; rows of labels raise a ``TypeError``.
        summaries: further metrics of ``PrivateLabels.evaluate``.
    """

    unit: ClassVar[str] = "label"
    num_classes: int | None = None
    names: tuple[Hashable, ...] | None = None
    label_range: tuple[float, float] | None = None
    num_labels: int | None = None
    target_dtype: ClassVar[type] = np.float32
    metrics: tuple[str, ...]
    summaries: ClassVar[tuple[str, ...]] = ()
    _matched: ClassVar[tuple[str, ...]] = ("num_classes", "num_labels")

    @staticmethod
    def of(
        num_classes: int | None = None,
        classes: Setting[Sequence[Hashable] | None] = None,
        low: float | None = None,
        high: float | None = None,
        num_labels: int | None = None,
        *,
        clip: bool = False,
    ) -> LabelKind:
        """Returns the kind of labels from the arguments of a head."""
        arguments = {
            "num_classes or classes": num_classes is not None or classes is not None,
            "low and high": low is not None or high is not None,
            "num_labels": num_labels is not None,
        }
        found = [name for name, is_given in arguments.items() if is_given]
        if len(found) != 1:
            raise ValueError(
                "expected exactly one of num_classes (or classes, their values), low and high (for "
                "numbers) and num_labels (for rows of zeros and ones), got "
                f"{' together with '.join(found) or 'none of them'}. Give one: it is public, and "
                "inferring it from the labels would reveal whether a rare class occurs."
            )
        if found == ["low and high"]:
            if low is None or high is None:
                raise ValueError(
                    f"the range needs both ends, got low={low}, high={high}. They are public, and "
                    "not inferred from the labels."
                )
            return Numbers(low, high, clip=clip)
        if clip:
            raise ValueError("clip=True is for numbers. Give their range low and high.")
        if num_labels is not None:
            return Rows(num_labels)
        kind = Classes(num_classes if classes is None else classes)  # type: ignore[arg-type]
        if num_classes not in (None, kind.num_classes):
            raise ValueError(
                f"num_classes={num_classes} but classes has {kind.num_classes} entries. Give one "
                "of the two."
            )
        return kind

    @staticmethod
    def of_header(header: Setting[Mapping[str, Any]]) -> LabelKind:
        """Returns the kind in a store's header, without the class names."""
        if "range" in header:
            return Numbers(*header["range"])
        if "labels_in_row" in header:
            return Rows(header["labels_in_row"])
        return Classes(header["num_classes"])

    @property
    @abc.abstractmethod
    def code_variance(self) -> float:
        """The largest variance of a label's code, summed over its columns."""

    @property
    def class_values(self) -> np.ndarray | None:
        """The class values (K,) in the order of their codes; None unless labels are classes."""
        return None

    @property
    def weighted_classes(self) -> tuple[Hashable, ...]:
        """The classes that have weights; labels without classes raise a ``ValueError``."""
        raise ValueError(
            f"expected classes for class_weight, got {self.describe()}. Give sample_weight, or "
            "loss_weights for outputs with one column each."
        )

    @abc.abstractmethod
    @_validate.clears_frames
    def encode(self, labels: Private[Any]) -> np.ndarray:
        """Returns a private copy of the labels as mechanisms expect them, (n,) or (n, L)."""

    def decode(self, codes: Public[Any]) -> np.ndarray:
        """Returns the labels of these codes."""
        return np.asarray(codes)

    def comparable(self, labels: Public[Any]) -> np.ndarray:
        """Returns public labels or predictions as ``encode`` does; numbers may be of any range."""
        return self.encode(labels)

    @_validate.clears_frames
    def of_array(self, labels: Private[np.ndarray]) -> LabelKind:
        """Returns the kind of an array of labels, by its type alone.

        Whole numbers are codes if no class value is a number: then the codes are the classes.
        """
        del labels
        return self

    def check_order(self, model: Setting[Any]) -> None:
        """Raises for a model with these classes in another order, as scikit-learn sorts them."""
        columns = classes_of_model(model)
        # A model of several outputs has a list of arrays.
        if self.class_values is None or columns is None or isinstance(columns, list):
            return
        found, expected = np.asarray(columns).tolist(), self.class_values.tolist()
        if found != expected and set(found) == set(expected):
            raise ValueError(
                f"expected a model with the classes {expected}, in the order of the labels, got "
                f"{found}. Make PrivateLabels with Classes({found})."
            )

    def codes_of(
        self, predictions: Setting[Sequence[Any]], model: Setting[Any] = None
    ) -> list[Any]:
        """Returns the predictions of several models, with codes in place of class values.

        Classes (n,) or (n, 1) are class values, as ``predict`` of a head returns them, or codes, as
        ``argmax`` does; all models give the same. If every number may be both, and means two
        classes, ``model``, which made the predictions, decides: class values if it has
        ``classes_``, codes otherwise. Without a model they are refused.
        """
        return list(predictions)

    def codes_of_names(self, labels: Setting[Any]) -> np.ndarray | None:
        """Returns the codes of public labels that are names of classes; None for other labels."""
        del labels
        return None

    def checked_predictions(self, metric: str, predictions: Public[Any]) -> np.ndarray | None:
        """Returns the predictions as a metric takes them, or raises."""
        return None if predictions is None else np.asarray(predictions)

    @abc.abstractmethod
    def describe(self) -> str:
        """Returns the kind in words."""

    @abc.abstractmethod
    def mechanism_arguments(self) -> dict[str, Any]:
        """Returns the arguments of a mechanism that releases a statistic of these labels."""

    @abc.abstractmethod
    def check(self, mechanism: Setting[LabelMechanism]) -> None:
        """Raises if the mechanism is not for these labels."""

    def check_release(self, mechanism: Setting[Any]) -> None:
        """Raises if a mechanism that releases a statistic is not for these labels."""
        own = {"num_classes": self.num_classes, "num_labels": self.num_labels}
        found_in = {"num_classes": classes_of_mechanism(mechanism), "num_labels": None}
        if isinstance(mechanism, AggregateMechanism):
            found_in["num_labels"] = mechanism.num_labels
        for name in self._matched:
            found, expected = found_in[name], own[name]
            if found != expected:
                raise ValueError(
                    f"the mechanism has {name}={found}, the labels have {expected}. Make the "
                    f"mechanism for {self.describe()}."
                )

    def check_metric(self, metric: str, *, of_predictions: bool = False) -> str:
        """Returns the metric; raises unless ``PrivateLabels.evaluate`` has it for these labels."""
        metrics = (*self.metrics, *self.summaries)
        if of_predictions:
            metrics = tuple(name for name in metrics if name not in ("mean", "total"))
        return _validate.one_of("metric", metric, metrics)

    def outputs_of(self, model: Public[Any], features: Public[Any]) -> np.ndarray:
        """Returns a model's numbers (m,) or probabilities (m, K), as ``evaluate`` takes them."""
        if self.label_range is not None:
            return model.predict(features)
        return model.predict_proba(features)

    def selection(self, epsilon: float, metric: str | None = None) -> SelectionMechanism:
        """Returns the mechanism that selects by a metric; None is the first one of these labels."""
        metric = self.metrics[0] if metric is None else metric
        metric = _validate.one_of("metric", metric, self.metrics)
        return SelectionMechanism(epsilon, metric, **self.mechanism_arguments())

    def stacked_predictions(
        self, predictions: Public[Sequence[Any]], metric: str, num_labels: int
    ) -> np.ndarray:
        """Returns the checked predictions of several models as ``selection`` takes them."""
        candidates = [PublicInput.bare(candidate) for candidate in predictions]
        if not candidates:
            raise ValueError("expected the predictions of at least one model, got none.")
        for candidate in candidates:
            MetricMechanism.check_length(num_labels, np.shape(candidate)[0])
        codes = self.codes_of(candidates)
        checked: list[Any] = [self.checked_predictions(metric, each) for each in codes]
        return np.stack(checked)

    def class_weights(
        self, class_weight: Public[Any], shares: Public[np.ndarray | None] = None
    ) -> np.ndarray | None:
        """Returns weights (K,) in the order of the classes; None for labels that are no classes.

        ``"balanced"`` divides by released class shares (K,); without them, arguments are only
        checked.
        """
        if class_weight is not None:
            raise ValueError(
                "class_weight is for classes, got numbers or rows of labels. Leave it out."
            )
        return None

    @abc.abstractmethod
    def check_loss(self, loss: Setting[Any], units: int) -> None:
        """Raises if a Keras loss of an output of ``units`` units is not for these labels.

        ``loss`` is a ``gradients.keras_loss.KerasLoss``, or has its attributes.
        """

    def header(self) -> dict[str, Any]:
        """Returns the fields that a store's header has for this kind."""
        names = None if self.names is None else PublicInput.digest_of(np.array(repr(self.names)))
        return {"num_classes": self.num_classes, "classes": names}

    @abc.abstractmethod
    def any_labels(self, size: int) -> np.ndarray:
        """Returns (size,) possible labels that do not depend on the labels in a vault."""

    def charge(self, mechanism: Setting[Mechanism]) -> Charge:
        """Returns the cost per unit of one use of a mechanism."""
        return Charge.of(mechanism)

    @_validate.clears_frames
    def randomize(
        self,
        mechanism: Public[LabelMechanism],
        labels: Private[np.ndarray],
        public: Public[Any],
        rng: np.random.Generator | None,
    ) -> np.ndarray:
        """Returns checked noisy labels (m, ...) of encoded labels."""
        return mechanism.check_output(mechanism.randomize(labels, public, rng=rng), len(labels))

    def __str__(self) -> str:
        arguments = self.mechanism_arguments().items()
        return ", ".join(f"{name}={value:.12g}" for name, value in arguments)


@dataclasses.dataclass(frozen=True)
class Numbers(LabelKind):
    """Labels that are numbers in a public range, encoded as ``float64`` (n,).

    Args:
        low: the smallest label.
        high: the largest label.
        clip: whether ``encode`` clips labels to the range; otherwise labels outside it raise.

    Raises:
        TypeError, ValueError: ends that are not finite numbers in order.

    Example:
        >>> weeks = Numbers(0, 52)
        >>> weeks.encode([52, 40, 13]), weeks.describe()
        (array([52., 40., 13.]), 'numbers in [0, 52]')
    """

    low: float
    high: float
    clip: bool = dataclasses.field(default=False, kw_only=True)

    metrics = MetricMechanism.NUMBER_METRICS[:2]
    summaries = ("mean", "total")

    def __post_init__(self) -> None:
        low, high = _validate.number_range(self.low, self.high)
        _validate.boolean("clip", self.clip)
        object.__setattr__(self, "low", low)
        object.__setattr__(self, "high", high)

    @property
    def label_range(self) -> tuple[float, float]:  # type: ignore[override]
        return self.low, self.high

    @property
    def code_variance(self) -> float:
        return 0.25 * (self.high - self.low) ** 2

    @_validate.clears_frames
    def encode(self, labels: Private[Any]) -> np.ndarray:
        array = _numbers(labels)
        if self.clip:
            return np.clip(_validate.real_vector("labels", array), self.low, self.high)
        return _validate.numbers_in_range("labels", array, self.low, self.high)

    def comparable(self, labels: Public[Any]) -> np.ndarray:
        return _validate.real_vector("labels", _numbers(labels))

    def describe(self) -> str:
        return f"numbers in [{self.low:g}, {self.high:g}]"

    def mechanism_arguments(self) -> dict[str, Any]:
        return {"low": self.low, "high": self.high}

    def header(self) -> dict[str, Any]:
        return {**super().header(), "range": [self.low, self.high]}

    def check(self, mechanism: Setting[LabelMechanism]) -> None:
        self._check_range(RegressionMechanism.checked(mechanism).label_range())

    def check_release(self, mechanism: Setting[Any]) -> None:
        super().check_release(mechanism)
        self._check_range(mechanism.label_range())

    def checked_predictions(self, metric: str, predictions: Public[Any]) -> np.ndarray | None:
        """Returns numbers (n,), or None for the mean of the labels."""
        if metric != "mean":
            return _validate.real_vector("predictions", np.squeeze(np.asarray(predictions)))
        if predictions is not None:
            raise ValueError("'mean' and 'total' take no predictions. Leave predictions=None.")
        return None

    def check_loss(self, loss: Setting[Any], units: int) -> None:
        outside = self.low < 0.0 or self.high > 1.0
        if loss.takes_codes or loss.takes_rows or (outside and loss.takes_two_classes):
            raise ValueError(
                f"expected a loss of {self.describe()}, got {loss.name!r}. Use "
                "keras.losses.MeanSquaredError."
            )
        if units > 1 and loss.takes_vectors:
            raise ValueError(
                f"expected one unit for labels that are numbers, got {units}. Give the last layer "
                "one unit."
            )

    def _check_range(self, found: tuple[float, float] | None) -> None:
        # With a narrower range, an error of the mechanism would reveal a label outside it.
        if found is not None and (found[0] > self.low or found[1] < self.high):
            raise ValueError(
                f"the mechanism is for labels in [{found[0]:g}, {found[1]:g}], the labels lie in "
                f"[{self.low:g}, {self.high:g}]. Make the mechanism with the labels' range."
            )

    def any_labels(self, size: int) -> np.ndarray:
        return np.full(size, self.low)


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Classes(LabelKind):
    """Labels that are classes, one per example, encoded as ``int64`` codes 0..K-1, (n,).

    Args:
        classes: K, at least 2, for labels 0..K-1, which may be booleans or whole floats; or the
            hashable class values in the order of their codes.

    Raises:
        TypeError, ValueError: fewer than two classes, or a class value that occurs twice.

    Example:
        >>> answers = Classes(["no", "yes"])
        >>> answers.encode(["yes", "no"]), answers.decode([1, 0])
        (array([1, 0]), array(['yes', 'no'], dtype='<U3'))
        >>> Classes(10).describe()
        '10 classes'
    """

    num_classes: int = dataclasses.field()
    names: tuple[Hashable, ...] | None = None

    target_dtype = np.int64
    metrics = MetricMechanism.CLASS_METRICS
    summaries = (
        "auc",
        "average_precision",
        "f1",
        "precision",
        "recall",
        "confusion_matrix",
        "calibration",
    )

    def __init__(self, classes: int | Sequence[Hashable]) -> None:
        number, names = classes, None
        if isinstance(classes, (str, bytes, set, frozenset, Mapping)):
            raise TypeError(
                "classes must be a list of the class values in the order of their codes, got "
                f"{type(classes).__name__}. Use a list."
            )
        if type(classes).__module__.startswith("pyarrow"):
            classes = classes.to_pylist()  # type: ignore[union-attr]
        if isinstance(classes, Iterable):
            # A store has a digest of the names' repr, which differs between NumPy and Python.
            names = tuple(_moments(n).item() if isinstance(n, np.generic) else n for n in classes)
            number = len(names)
            if len(set(names)) != number:
                raise ValueError("classes has a repeated value. Give each class once.")
            if any(isinstance(name, str) and _HALVES.search(name) for name in names):
                raise ValueError(
                    "expected classes in Unicode, got half a character (a lone surrogate) in a "
                    "name. Read the names again, in their encoding."
                )
            if number < 2:
                raise ValueError(
                    f"classes must have at least 2 values, got {number} class. Give all classes."
                )
        number = _validate.integer_at_least("num_classes", number, 2)
        object.__setattr__(self, "num_classes", number)
        object.__setattr__(self, "names", names)

    @property
    def classes(self) -> tuple[Hashable, ...]:
        """The class values in the order of their codes."""
        return self.names if self.names is not None else tuple(range(self.num_classes))

    @property
    def weighted_classes(self) -> tuple[Hashable, ...]:
        return self.classes

    @property
    def has_free_codes(self) -> bool:
        """Whether no class value is a number, so that 0..K-1 can mean codes alone."""
        return not _have_numbers(self.classes)

    @_validate.clears_frames
    def of_array(self, labels: Private[np.ndarray]) -> LabelKind:
        are_codes = self.has_free_codes and labels.dtype.kind in "iu"
        return Classes(self.num_classes) if are_codes else self

    @property
    def class_values(self) -> np.ndarray:
        # In NumPy's best type that changes none of them; tuples are not expanded.
        classes = self.classes
        if len({type(name) for name in classes}) == 1 and not isinstance(classes[0], tuple):
            array = np.asarray(classes)
            same_kind = array.dtype.kind != "f" or isinstance(classes[0], (float, np.floating))
            if same_kind and array.tolist() == list(classes):
                return array
        return np.fromiter(classes, dtype=object, count=len(classes))

    def check_metric(self, metric: str, *, of_predictions: bool = False) -> str:
        super().check_metric(metric, of_predictions=of_predictions)
        if metric == "average_precision" and self.num_classes != 2:
            raise ValueError(
                f"'average_precision' is for two classes, these labels have {self.num_classes}. "
                "Use 'f1' or 'auc', which are means over the classes, or a vault per class."
            )
        return metric

    @property
    def code_variance(self) -> float:
        return 0.25 if self.num_classes == 2 else 1.0 - 1.0 / self.num_classes

    @_validate.clears_frames
    def encode(self, labels: Private[Any]) -> np.ndarray:
        if self.names is None:
            return _validate.class_indices("labels", _whole_numbers(labels), self.num_classes)
        return self._encoded_names(Column.of(labels))

    def _encoded_names(self, labels: Column) -> np.ndarray:
        array = labels.values
        if array.ndim != 1:
            raise ValueError(
                f"labels must have shape (n,), got shape {array.shape}. Give one column, such as "
                "table['y'] or labels[:, 0]; for one-hot rows, Classes(K) and their np.argmax."
            )
        lookup = _lookup(self.classes)
        if array.dtype.kind == "O":  # objects may not be sortable
            codes = np.fromiter((lookup.get(_moment(v), -1) for v in array), np.int64, array.size)
        else:
            values, inverse = np.unique(_moments(array), return_inverse=True)
            found = [lookup.get(_moment(value), -1) for value in values.tolist()]
            codes = np.array(found, np.int64)[inverse]
        is_unknown = codes < 0
        missing = labels.missing & is_unknown
        unknown = array[is_unknown].tolist()
        are_words = (isinstance(v, str) and v in Column.MISSING_WORDS for v in unknown)
        missing[is_unknown] |= np.fromiter(are_words, bool, len(unknown))
        Column(array, missing).complete("labels")
        if unknown:
            raise self._unknown_labels(len(unknown), array)
        return codes

    def codes_of_names(self, labels: Setting[Any]) -> np.ndarray | None:
        if self.names is None or Column.array_of(labels).dtype.kind not in "OUS":
            return None
        return self.encode(labels)

    def _unknown_labels(self, number: int, array: np.ndarray) -> ValueError:
        """Returns the error for a number of labels that are no classes; shows none of them."""
        classes = self.num_classes
        if self.of_array(array) is not self:
            return ValueError(
                f"expected labels that are class values, got {array.size} whole numbers. Give the "
                f"class values, or Classes({classes}) for codes 0..{classes - 1}."
            )
        advice = ""
        if array.dtype.kind in "iu":
            advice = (
                " Where scikit-learn encodes labels, as VotingClassifier does, give "
                f"num_classes={classes} in place of classes=."
            )
        return ValueError(
            f"{number} of {array.size} labels are not among the {classes} classes. Add the missing "
            "classes to classes=, check the type and spelling of the labels, or give low= and "
            f"high= for continuous labels.{advice}"
        )

    def decode(self, codes: Public[Any]) -> np.ndarray:
        return self.class_values[_validate.class_indices("codes", codes, self.num_classes)]

    def codes_of(
        self, predictions: Setting[Sequence[Any]], model: Setting[Any] = None
    ) -> list[Any]:
        arrays = [Column.array_of(each) for each in predictions]
        if self.names is None:
            return [
                array.astype(np.int64) if array.dtype.kind == "b" else array for array in arrays
            ]
        flat = [array.ravel() if array.shape[1:] == (1,) else array for array in arrays]
        may_be_floats = any(isinstance(name, numbers.Real) for name in self.names)
        for are_floats in (False, True):
            places = [
                place
                for place, array in enumerate(flat)
                if array.ndim == 1 and (array.dtype.kind == "f") == are_floats
            ]
            if places and (may_be_floats or not are_floats):
                codes = _ClassColumns([flat[place] for place in places], self.names).read(model)
                for place, found in zip(places, codes, strict=True):
                    arrays[place] = found
        return arrays

    def class_metric(self, name: str) -> ClassMetric:
        """Returns a metric of predictions of these classes."""
        return ClassMetric(name, self.num_classes)

    def checked_predictions(self, metric: str, predictions: Public[Any]) -> np.ndarray:
        """Returns class codes (m,) for ``"accuracy"``, else probabilities (m, K)."""
        return self.class_metric(metric).checked(predictions)

    def class_weights(
        self, class_weight: Public[Any], shares: Public[np.ndarray | None] = None
    ) -> np.ndarray:
        if class_weight is None:
            return np.ones(self.num_classes)
        if isinstance(class_weight, str):
            _validate.one_of("class_weight", class_weight, ("balanced",))
            return np.ones(self.num_classes) if shares is None else 1.0 / (len(shares) * shares)
        return class_table(class_weight, self.class_values.tolist(), interval="(0, 1e38]")

    def describe(self) -> str:
        return f"{self.num_classes} classes"

    def mechanism_arguments(self) -> dict[str, Any]:
        return {"num_classes": self.num_classes}

    def check(self, mechanism: Setting[LabelMechanism]) -> None:
        if classes_of_mechanism(mechanism) is None:
            ClassificationMechanism.checked(mechanism)
        self.check_release(mechanism)

    def check_loss(self, loss: Setting[Any], units: int) -> None:
        # This covers every loss, since one may wrap sparse cross-entropy.
        if self.num_classes > units and (units > 1 or loss.takes_codes):
            raise _other_units(f"the labels have {self.num_classes} classes", units)
        if loss.takes_vectors and units > 1:
            raise ValueError(
                "expected a loss of class codes, as the vault has them, got a loss of one-hot "
                "rows. Use keras.losses.SparseCategoricalCrossentropy."
            )
        if units == 1 and self.num_classes > 2 and loss.takes_two_classes:
            raise ValueError(
                f"expected labels of two classes for the loss {loss.name!r}, got "
                f"{self.describe()}. Give the last layer one unit for each class, and use "
                "keras.losses.SparseCategoricalCrossentropy."
            )

    def any_labels(self, size: int) -> np.ndarray:
        return np.zeros(size, dtype=np.int64)

    def __repr__(self) -> str:
        return f"Classes({self.num_classes if self.names is None else list(self.names)})"


@dataclasses.dataclass(frozen=True)
class Rows(LabelKind):
    """Labels that are rows of L zeros and ones, encoded as ``int64`` (n, L).

    The unit of privacy is the whole row.

    Args:
        num_labels: L, at least 1.

    Raises:
        TypeError, ValueError: num_labels is not a positive integer.

    Example:
        >>> Rows(2).encode([[0, 1], [1, 1]]).shape, Rows(2).unit
        ((2, 2), 'row')
    """

    num_labels: int = dataclasses.field()

    unit = "row"
    _matched = ("num_labels",)

    def __post_init__(self) -> None:
        _validate.integer_at_least("num_labels", self.num_labels, 1)

    @property
    def metrics(self) -> tuple[str, ...]:  # type: ignore[override]
        raise TypeError("rows of labels have no metrics. Evaluate a PrivateLabels of each column.")

    @property
    def weighted_classes(self) -> tuple[Hashable, ...]:
        return (0, 1) if self.num_labels == 1 else super().weighted_classes

    @property
    def code_variance(self) -> float:
        return 0.25 * self.num_labels

    @_validate.clears_frames
    def encode(self, labels: Private[Any]) -> np.ndarray:
        rows = _numbers(labels)
        if rows.dtype.kind == "O" and all(isinstance(row, (list, tuple)) for row in rows):
            rows = np.asarray(rows.tolist())
        if rows.ndim != 2 or rows.shape[1] != self.num_labels:
            raise ValueError(
                f"labels must have shape (n, {self.num_labels}), a row of zeros and ones per "
                f"example, got {rows.shape}. Set num_labels to the number of columns."
            )
        if rows.dtype.kind not in "biuf":
            raise TypeError(f"labels must be zeros and ones, got dtype {rows.dtype}.")
        wrong = int(np.count_nonzero((rows != 0) & (rows != 1)))
        if wrong:
            raise ValueError(
                f"labels must be zeros and ones, but {wrong} of {rows.size} are not. Give each "
                "class its own column."
            )
        return rows.astype(np.int64)

    def describe(self) -> str:
        return f"rows of {self.num_labels} zeros and ones"

    def mechanism_arguments(self) -> dict[str, Any]:
        return {"num_labels": self.num_labels}

    def header(self) -> dict[str, Any]:
        return {**super().header(), "labels_in_row": self.num_labels}

    def check(self, mechanism: Setting[LabelMechanism]) -> None:
        found = ClassificationMechanism.checked(mechanism)
        if found.num_classes != 2 or found.uses_priors:
            raise ValueError(
                f"{mechanism!r} cannot draw rows of labels, whose labels are drawn separately as 0 "
                "or 1. Use RandomizedResponse(epsilon, num_classes=2), which is charged "
                f"{self.num_labels} times."
            )

    def check_loss(self, loss: Setting[Any], units: int) -> None:
        if self.num_labels != units:
            raise _other_units(f"the labels are rows of {self.num_labels}", units)

    def charge(self, mechanism: Setting[Mechanism]) -> Charge:
        """Returns the charge of a release, or of one draw per label of the row."""
        once = Charge.of(mechanism)
        is_release = isinstance(mechanism, AggregateMechanism)
        return once if is_release else once.repeated(self.num_labels)

    @_validate.clears_frames
    def randomize(
        self,
        mechanism: Public[LabelMechanism],
        labels: Private[np.ndarray],
        public: Public[Any],
        rng: np.random.Generator | None,
    ) -> np.ndarray:
        """Returns rows whose labels were drawn separately, ``int64`` (m, L)."""
        noisy = super().randomize(mechanism, labels.reshape(-1), public, rng)
        return noisy.reshape(labels.shape)

    def any_labels(self, size: int) -> np.ndarray:
        return np.zeros((size, self.num_labels), dtype=np.int64)


def _other_units(problem: str, units: int) -> ValueError:
    return ValueError(
        f"{problem}, but the model has {units} outputs. Give its last layer one unit for each "
        "class (numbered from zero), or for each label of a row."
    )


def _numbers(labels: Any) -> np.ndarray:
    return Column.of(labels).numbers("labels")


def _whole_numbers(labels: Any) -> np.ndarray:
    """Returns labels, booleans and floats that are whole numbers as ``int64``."""
    array = _numbers(labels)
    is_whole = array.dtype.kind != "f" or np.array_equal(np.trunc(array), array)
    if array.dtype.kind in "bf" and is_whole and not np.isinf(array).any():
        return array.astype(np.int64)
    return array


def _have_numbers(classes: Sequence[Hashable]) -> bool:
    """Returns whether a class value is a number, or a text of digits, which could mean one."""
    return any(
        value.strip().isdecimal() if isinstance(value, str) else isinstance(value, numbers.Number)
        for value in classes
    )


def class_table(
    class_weight: Any, classes: Sequence[Hashable] | None, *, interval: str = "[0, 1e38]"
) -> np.ndarray:
    """Returns the public weight of each class, ``float64`` (K,), 1 for those without.

    A key is a class value. If no class value is a number, the codes 0..K-1 name the classes, too;
    otherwise 1 might name two classes, and only values do. None are classes that a model shows
    later: then only the type is checked.
    """
    if not isinstance(class_weight, Mapping):
        raise ValueError(
            f"expected class_weight as a dict of public numbers, got {class_weight!r}: counts of "
            "private labels are a release. Release shares by labels.release(HistogramMechanism("
            "...)).priors(), or take noisy.posterior().mean(axis=0), and give "
            "{class: 1 / (K * share)}."
        )
    if classes is None:
        return np.ones(0)
    places = {value: code for code, value in enumerate(classes)}
    codes = {} if _have_numbers(classes) else {code: code for code in places.values()}
    unknown = [key for key in class_weight if key not in places and key not in codes]
    if unknown:
        raise ValueError(
            f"expected class_weight for the classes {list(classes)[:10]}, got {unknown[:3]}. Name "
            "the classes as the labels do."
        )
    named = [key for key in class_weight if key in places]
    if len(named) not in (0, len(class_weight)):
        other = next(key for key in class_weight if key not in places)
        raise ValueError(
            f"expected class_weight by class values or by codes, got both, {named[0]!r} and "
            f"{other!r}. Name the classes as the labels do."
        )
    table = np.ones(len(classes))
    for key, weight in class_weight.items():
        place = places[key] if named else codes[key]
        table[place] = _validate.number_in("class_weight", weight, interval)
    return table


@dataclasses.dataclass(frozen=True, eq=False)
class _ClassColumns:
    """Columns of predictions, each cell a class value, a code or a probability; all of one kind.

    A cell may be read in two ways, as its value and as its number: 1 is a value of the classes
    1, 2, 3 and the code of another. A reading is the code of each distinct cell, and there is none
    unless it fits all of them.

    Attributes:
        columns: the predictions, integers, texts or other values, or all of them floats.
        names: the class values in the order of their codes.
    """

    columns: list[np.ndarray]
    names: tuple[Hashable, ...]

    @property
    def are_floats(self) -> bool:
        return self.columns[0].dtype.kind == "f"

    @functools.cached_property
    def cells(self) -> list[list[Any]]:
        return [_moments(array).tolist() for array in self.columns]

    @functools.cached_property
    def distinct(self) -> list[Any]:
        return list(dict.fromkeys(itertools.chain(*self.cells)))

    def by_value(self) -> dict[Any, int] | None:
        """Returns the code of each cell as a class value; the number 1 is the class "1", too."""
        lookup = _lookup(self.names)
        texts = all(isinstance(name, str) for name in self.names)
        codes = {
            cell: lookup.get(str(cell) if type(cell) is int and texts else _moment(cell), -1)
            for cell in self.distinct
        }
        return None if -1 in codes.values() else codes

    def by_number(self) -> dict[Any, int] | None:
        """Returns the code of each cell as a code, or as a probability of the second class."""
        number = len(self.names)
        if self.are_floats and number == 2 and all(0.0 <= cell <= 1.0 for cell in self.distinct):
            return {cell: int(cell > 0.5) for cell in self.distinct}
        # A boolean is no code: its type is not int.
        if all(type(cell) is int and 0 <= cell < number for cell in self.distinct):
            return {cell: cell for cell in self.distinct}
        return None

    def unknown(self) -> ValueError:
        """Returns the error for cells of which some are no class values, and some no codes."""
        lookup, cells = _lookup(self.names), list(itertools.chain(*self.cells))
        unknown = sum(_moment(cell) not in lookup for cell in cells)
        return ValueError(
            f"expected predictions that are class values, or codes 0..{len(self.names) - 1}, got "
            f"{unknown} of {len(cells)} that are no class values. Give the result of predict, or "
            "rows of probabilities."
        )

    def unclear(self, cell: Any) -> ValueError:
        """Returns the error for a cell that is a class value, and as a number another class."""
        number = "probability" if self.are_floats else "code"
        return ValueError(
            f"expected class values or codes, got numbers that may be both: {cell!r} is a "
            f"class value, and another class as a {number}. Give the rows of predict_proba(x), or "
            f"np.eye({len(self.names)})[codes]."
        )

    def read(self, model: Any) -> list[Any]:
        """Returns the columns as codes; probabilities, and floats without a reading, unchanged.

        All cells decide together, since a column of few classes fits both readings. Where they
        differ, ``model`` decides.
        """
        by_value, by_number = self.by_value(), self.by_number()
        if by_value is None and by_number is None and not self.are_floats:
            raise self.unknown()
        codes = by_value if by_number is None else by_number
        if by_value is not None and by_number is not None and by_value != by_number:
            if model is None:
                differing = (cell for cell in self.distinct if by_value[cell] != by_number[cell])
                raise self.unclear(next(differing))
            if classes_of_model(model) is not None:
                codes = by_value
        if codes is None or (self.are_floats and codes is by_number):
            return self.columns
        return [
            np.fromiter(map(codes.__getitem__, part), np.int64, len(part)) for part in self.cells
        ]


def classes_of_mechanism(mechanism: Any) -> int | None:
    """Returns the number of classes that a mechanism is for; None if it is for other labels."""
    return getattr(mechanism, "num_classes", None)


def classes_of_model(model: Any) -> Any:
    """Returns the class values of a model of any library; None if it states none."""
    return getattr(model, "classes_", None)


def _lookup(classes: Sequence[Hashable]) -> dict[Hashable, int]:
    lookup: dict[Hashable, int] = {_moment(value): code for code, value in enumerate(classes)}
    for name in [name for name in classes if isinstance(name, str)]:
        lookup.setdefault(name.encode(), lookup[name])  # tensors of strings contain bytes
    return lookup


def _moments(values: Any) -> Any:
    """Returns times and durations of NumPy in a unit that Python has; others unchanged."""
    kind = values.dtype.kind
    return values.astype(f"{kind}8[us]") if kind in "mM" else values


def _moment(value: Any) -> Any:
    """Returns a value as the key of a lookup: a date as its first moment, as NumPy has it.

    Each NaN is the same one, which does not equal itself.
    """
    if type(value) is datetime.date:
        return datetime.datetime(value.year, value.month, value.day)
    return np.nan if isinstance(value, float) and value != value else value
