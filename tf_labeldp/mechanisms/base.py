"""The contracts of mechanisms: the labels that they take, their cost and their output."""

from __future__ import annotations

import abc
import dataclasses
import functools
import inspect
import json
import re
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import (
    Assumption,
    Private,
    Public,
    Receipt,
    ReceiptError,
    Receipts,
    Setting,
    public_input,
)
from tf_labeldp.accounting.events import EventFields
from tf_labeldp.mechanisms.priors import PriorRows
from tf_labeldp.mechanisms.random_bits import Rng

if TYPE_CHECKING:
    from dp_accounting import DpEvent

_Self = TypeVar("_Self", bound="Mechanism")
_REGISTRY: dict[str, type[Mechanism]] = {}
_DRAWS = frozenset({"randomize", "_noisy", "_drawn_outputs"})
"""Methods that take random words. With one of its own, a plug-in may draw a row again by others."""
_UNSET = re.compile(r", \w+=None|(?<=\()\w+=None(?:, )?")
"""Arguments that are None in the ``repr`` of a mechanism."""


def _name(kind: type) -> str:
    """Returns the name of a class in stored draws, which no plug-in shares with another class."""
    ours = Mechanism.is_of_this_library(kind)
    return kind.__name__ if ours else f"{kind.__module__}.{kind.__qualname__}"


class Mechanism(abc.ABC):
    """A randomized function that may read true labels: an immutable value with a name and a cost.

    Your own mechanism is an ordinary class: set ``epsilon`` and the attributes of the contract in
    ``__init__``, keep each argument under its own name, and let ``check_mechanism`` compare its
    draws with its channel. ``docs/extend.md`` has an example.

    Guarantee:
        The output of a mechanism of this library is (epsilon, delta)-DP for the replacement of one
        label, and ``dp_event()`` states the same to ``dp_accounting``. The promise of a plug-in is
        its author's claim, and statements name it as such.

    Attributes:
        epsilon: finite and above zero.
        delta: failure probability, in [0, 1); zero for a pure mechanism.
        receipts: receipts of its arguments, such as bins of a released histogram.

    Example:
        >>> from tf_labeldp.mechanisms import RandomizedResponse
        >>> mechanism = RandomizedResponse(epsilon=1.0, num_classes=3)
        >>> Mechanism.from_json(mechanism.to_json()) == mechanism
        True
    """

    epsilon: float
    delta: float = 0.0
    receipts: tuple[Receipt, ...] = ()
    labels_of: ClassVar[str] = ""
    purpose: ClassVar[str] = ""
    """The purpose of the output, for reports."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _REGISTRY[_name(cls)] = cls
        if not cls.is_of_this_library(cls):
            # A subclass in another library may draw differently from its parent.
            is_plain = cls.dp_event is Mechanism.dp_event
            fields: Any = Mechanism._event_fields if is_plain else _fields_of_event
            cls._event_fields = fields  # type: ignore[method-assign]

    def dp_event(self) -> DpEvent:
        """Returns the event of one use; by default the worst with this epsilon and delta."""
        return EventFields(self._event_fields()).dp_event()

    def _event_fields(self) -> EventFields:
        """Returns the event as values for JSON, which loads no ``dp_accounting``."""
        return EventFields.approximate(self.epsilon, self.delta)

    @property
    def has_own_event(self) -> bool:
        """Whether a plug-in states its own event for the composition of its uses."""
        own = type(self).dp_event is not Mechanism.dp_event
        return own and not self.is_of_this_library(self)

    def claims(self, remark: str = "") -> tuple[Assumption, ...]:
        """Returns the assumption that a plug-in keeps its promise; none for this library's own."""
        if self.is_of_this_library(self):
            return ()
        event = ", and its uses compose as its dp_event states" * self.has_own_event
        text = (
            f"{type(self).__name__} has the epsilon of {self.epsilon:g} that it states{event}: its "
            f"author's claim, not this library's.{remark}"
        )
        return (Assumption("claimed-mechanism", "authors", text),)

    @staticmethod
    def is_of_this_library(value: Setting[object]) -> bool:
        """Returns whether a class, or the class of a value, is of this library, not a plug-in."""
        kind = value if isinstance(value, type) else type(value)
        return kind.__module__.partition(".")[0] == "tf_labeldp"

    @staticmethod
    def without_unset(text: str) -> str:
        """Returns the ``repr`` of a mechanism, which a receipt has, without arguments of None."""
        return _UNSET.sub("", text)

    @staticmethod
    def in_words(text: str) -> str:
        """Returns the purpose and the class of a mechanism of this library by its ``repr``.

        Other uses of labels keep their text, also where an author's text begins with a mechanism.
        """
        name, opened, rest = text.partition("(")
        kind = _REGISTRY.get(name) if opened and rest.endswith(")") else None
        if kind is None or not kind.purpose:
            return Mechanism.without_unset(text)
        return f"{kind.purpose}: {kind.__name__}"

    @classmethod
    def checked(cls: type[_Self], value: Setting[Any]) -> _Self:
        """Returns ``value`` if it is a mechanism of this kind, or raises a ``TypeError``."""
        if isinstance(value, cls):
            return value
        raise TypeError(
            f"mechanism must be a tf_labeldp mechanism{cls.labels_of}, got {type(value).__name__}. "
            "Use one from tf_labeldp.mechanisms."
        )

    def checked_output(
        self, noisy: Public[Any], shape: tuple[int, ...] | None, kinds: str
    ) -> np.ndarray:
        """Returns an output as a finite array of a kind and shape (None for any), or raises."""
        try:
            array = np.asarray(noisy)
        except ValueError:
            raise self._wrong_output("lists of different lengths", "one array") from None
        if shape is not None and array.shape != shape:
            raise self._wrong_output(f"shape {array.shape}", f"{shape}, one per label")
        if array.dtype.kind not in kinds:
            raise self._wrong_output(f"dtype {array.dtype}", f"numbers ({kinds})")
        if array.dtype.kind == "f" and not np.all(np.isfinite(array)):
            raise self._wrong_output("NaN or infinity", "finite numbers")
        return array

    def _wrong_output(self, found: str, expected: str) -> ValueError:
        output = "noisy labels" if isinstance(self, LabelMechanism) else "a noisy statistic"
        return ValueError(
            f"{type(self).__name__} returned {output} with {found}, expected {expected}. Fix the "
            "mechanism, and test it with mechanisms.check_mechanism."
        )

    def to_json(self, *, with_receipts: bool = True) -> dict[str, Any]:
        """Returns ``{"class_name": ..., "config": ...}`` as values for JSON, with any receipts.

        Without receipts it is what determines a draw.
        """
        data: dict[str, Any] = {"class_name": _name(type(self)), "config": self.get_config()}
        if self.receipts and with_receipts:
            data["receipts"] = [receipt.to_json() for receipt in self.receipts]
        return json.loads(json.dumps(data, default=_plain))

    @staticmethod
    def from_json(data: Setting[dict[str, Any]]) -> Mechanism:
        """Returns the mechanism of ``to_json``; ``ValueError`` for an unknown name."""
        name = data["class_name"]
        if name not in _REGISTRY:
            raise ValueError(
                f"expected one of {sorted(_REGISTRY)}, got unknown mechanism {name!r}. Import the "
                "module that defines it first."
            )
        kind = _REGISTRY[name]
        unknown = sorted(data["config"].keys() - set(_arguments(kind)))
        if unknown and kind.is_of_this_library(kind):
            argument = f"the argument {unknown[0]!r} of {name}"
            # No digest covers a mechanism alone.
            raise ReceiptError.of_newer("this mechanism was edited, or", argument)
        mechanism = kind.from_config(data["config"])
        if "receipts" in data:
            receipts = tuple(Receipt.from_json(receipt) for receipt in data["receipts"])
            object.__setattr__(mechanism, "receipts", receipts)
        return mechanism

    def get_config(self) -> dict[str, Any]:
        """Returns every constructor argument except the receipts, for JSON."""
        names = _arguments(type(self))
        return {name: getattr(self, name) for name in names if name != "receipts"}

    @classmethod
    def from_config(cls: type[_Self], config: Setting[dict[str, Any]]) -> _Self:
        """Returns the mechanism that ``get_config`` described."""
        return cls(**config)


def _fields_of_event(mechanism: Mechanism) -> EventFields:
    return EventFields.of(mechanism.dp_event())


class LabelMechanism(Mechanism):
    """Turns each label into one noisy label, for ``PrivateLabels.randomize``.

    Guarantee:
        Each noisy label, together with all others, is (epsilon, delta)-DP for the replacement of
        one label; draws for different examples compose in parallel. Assumes that the public input
        of a label (its prior, its cluster) does not depend on that label.
    """

    purpose = "noisy labels"
    public_input: ClassVar[str | None] = None
    """The public argument of ``randomize``: ``"priors"``, ``"clusters"`` or None."""
    draws_are_independent: ClassVar[bool] = True
    """Whether a noisy label depends on its own label alone; not asked of plug-ins."""
    has_keyed_draws: ClassVar[bool] = False
    """Whether a draw takes the same number of random words for each label, and nothing else, so
    that a key can give each row its words again; not asked of a plug-in's own draw."""

    @staticmethod
    def with_keyed_draws() -> list[type[LabelMechanism]]:
        """Returns the classes that have keyed draws; plug-ins have those that they inherit."""
        return [
            kind
            for kind in _REGISTRY.values()
            if issubclass(kind, LabelMechanism)
            and kind.has_keyed_draws
            and all(
                Mechanism.is_of_this_library(attribute.defining_class)
                for attribute in inspect.classify_class_attrs(kind)
                if attribute.name in _DRAWS
            )
            and not inspect.isabstract(kind)
        ]

    @abc.abstractmethod
    @_validate.clears_frames
    def randomize(
        self, labels: Private[Any], public: Public[Any] = None, *, rng: Rng = None
    ) -> np.ndarray:
        """Returns noisy labels of shape (n,) or (n, ...) from labels of shape (n,).

        Args:
            labels: (n,), classes as integers in 0..K-1, or numbers in ``label_range()``.
            public: the input that ``public_input`` names, not made of these labels; else None.
            rng: a generator for repeatable (not private) runs; None uses secure random bits.

        Raises:
            TypeError: labels, public input or ``rng`` have a wrong type.
            ValueError: labels or public input are out of range, NaN, missing, or of a wrong shape.
        """

    @abc.abstractmethod
    def check_output(self, noisy: Public[Any], size: int) -> np.ndarray:
        """Returns noisy labels of ``size`` examples, or raises a ``ValueError`` without labels."""

    def check_unbiased(self) -> None:
        """Raises unless the mean of a label's noisy labels is the label, up to rounding.

        ``NoisyLabels.debiased`` returns the noisy labels of such a mechanism as they are.
        """
        name = type(self).__name__
        raise TypeError(f"the bias of labels drawn by {name} is unknown. Use their posterior.")

    def _refuse_public(self, public: Any) -> None:
        if public is not None:
            raise ValueError(
                f"{type(self).__name__} takes no priors and no clusters: its channel does not "
                "depend on them. Leave them out, or use RRWithPrior or optimal_bins."
            )


class ClassificationMechanism(LabelMechanism):
    """A label randomizer over the classes 0..K-1; noisy labels are ``int64`` in 0..M-1.

    Noisy labels are classes, M = K, unless a subclass overrides ``num_outputs`` and
    ``outputs_are_classes``.

    Guarantee:
        For every pair of labels and every output, ``P[out | y] <= e^epsilon P[out | y']``;
        ``transition_matrix`` returns the (K, M) channel of the draws.

    Attributes:
        num_classes: K, at least 2.
    """

    num_classes: int
    labels_of = " for classes"
    outputs_are_classes: ClassVar[bool] = True

    @property
    def num_outputs(self) -> int:
        """The number of possible noisy labels, M; K if noisy labels are classes."""
        return self.num_classes

    @abc.abstractmethod
    def transition_matrix(self, prior: Public[Any] = None) -> np.ndarray:
        """Returns ``P[output | input]``, ``float64`` (inputs, outputs), with row sums of one."""

    @property
    def uses_priors(self) -> bool:
        """Whether ``randomize`` takes priors."""
        return self.public_input == "priors"

    def likelihood(
        self, noisy: Public[np.ndarray], priors: Public[np.ndarray | None] = None
    ) -> np.ndarray:
        """Returns ``P[noisy label | class]`` for checked labels (m,), ``float64`` (m, K).

        ``priors`` are the checked rows of the draw, (1, K) or (m, K); None without priors.
        """
        if self.uses_priors:
            raise ValueError(
                f"{type(self).__name__} takes priors but does not define its channel for them. "
                "Override likelihood in its class."
            )
        return self.transition_matrix()[:, noisy].T

    def check_output(self, noisy: Public[Any], size: int) -> np.ndarray:
        """Returns noisy labels as ``int64`` (size,), or raises."""
        array = self.checked_output(noisy, (size,), "iu")
        if size and (array.min() < 0 or array.max() >= self.num_outputs):
            raise self._wrong_output("classes that do not exist", f"0..{self.num_outputs - 1}")
        return array.astype(np.int64, copy=False)


class RegressionMechanism(LabelMechanism):
    """A label randomizer over numbers in a public range; noisy labels are ``float64``.

    Guarantee:
        As for ``LabelMechanism``, for every pair of labels in ``label_range()``. Labels outside it
        raise an error: ``PrivateLabels`` clips them first with ``clip=True``.
    """

    labels_of = " for numbers"

    @abc.abstractmethod
    def label_range(self) -> tuple[float, float]:
        """Returns the smallest and the largest label, which are public."""

    @abc.abstractmethod
    def likelihood(self, outputs: Public[Any], labels: Public[Any]) -> np.ndarray:
        """Returns the likelihood of each output under each label.

        Args:
            outputs: possible noisy labels, (m,).
            labels: true labels in ``label_range()``, (k,).

        Returns:
            ``float64`` (m, k): probabilities for outputs that have one, else densities. No ratio of
            two entries in a row exceeds e^epsilon.
        """

    def check_output(self, noisy: Public[Any], size: int) -> np.ndarray:
        """Returns noisy labels as ``float64`` (size,), or raises."""
        return self.checked_output(noisy, (size,), "iuf").astype(np.float64)


class AggregateMechanism(Mechanism):
    """Releases one noisy statistic of many labels, such as a histogram.

    Guarantee:
        The whole result is (epsilon, delta)-DP for the replacement of any one label, and whether
        ``release`` raises does not depend on labels of the stated kind.

    Attributes:
        num_classes: K, for labels that are classes 0..K-1; None for others.
        num_labels: L, for rows (n, L) of zeros and ones; None for others.
    """

    num_classes: int | None = None
    num_labels: int | None = None
    labels_of = " of many labels"

    def label_range(self) -> tuple[float, float] | None:
        """Returns (low, high), outside of which numbers are refused; None without a range."""
        return None

    def group_size(self, users: Public[Any], public_input: Public[Any] = None) -> float:
        """Returns how many labels move the release as far as all labels of any one user.

        By default it is the largest number of labels of a user (group privacy). Noise in the L2
        norm is often better.

        Args:
            users: the user of each label, integers in 0..U-1, (n,).
            public_input: as for ``release``.
        """
        del public_input
        return float(np.bincount(users).max(initial=1))

    @abc.abstractmethod
    @_validate.clears_frames
    def release(
        self, labels: Private[Any], public_input: Public[Any] = None, *, rng: Rng = None
    ) -> np.ndarray:
        """Returns the noisy statistic of labels.

        Args:
            labels: classes or numbers (n,), or rows (n, L).
            public_input: further input in the order of the labels, such as group numbers (n,) or
                features (n, d). It must not depend on the labels.
            rng: a generator for repeatable (not private) runs; None uses secure random bits.

        Raises:
            TypeError: labels, public input or ``rng`` have a wrong type.
            ValueError: labels or public input are out of range or of a wrong shape.
        """


@dataclasses.dataclass(frozen=True)
class Frozen(Mechanism):
    """A mechanism of this library: a frozen value that checks its arguments once."""

    epsilon: float

    def __post_init__(self) -> None:
        self._set(epsilon=_validate.positive_finite("epsilon", self.epsilon))

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _take_public(self, *names: str) -> None:
        """Sets arguments to the values of public inputs, and merges their receipts."""
        for name in names:
            public = public_input(getattr(self, name))
            receipts = Receipts.merged(self.receipts, public.receipts)
            self._set(**{name: public.value, "receipts": receipts})


_WIDTHS = (1e-140, 1e140)
"""Ranges of numbers whose squares, in grid steps, neither underflow nor overflow."""
_SWAPPED = 10.0
"""A whole epsilon from here on and above ``num_classes`` usually means swapped arguments."""


@dataclasses.dataclass(frozen=True)
class FrozenClassification(Frozen, ClassificationMechanism):
    """A mechanism of this library for classes, whose likelihood defines its channel."""

    num_classes: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(num_classes=_validate.integer_at_least("num_classes", self.num_classes, 2))
        if self.epsilon >= _SWAPPED and self.epsilon > self.num_classes and self.epsilon % 1 == 0:
            _validate.warn(
                _validate.Message.of(
                    _validate.Argument("epsilon", self.epsilon),
                    " protects next to nothing at ",
                    _validate.Argument("num_classes", self.num_classes),
                    ". Epsilon comes first: are the two swapped?",
                )
            )

    def transition_matrix(self, prior: Public[Any] = None) -> np.ndarray:
        """Returns ``P[output | input]`` of the draws, ``float64`` (K, M); M is ``num_outputs``.

        ``prior`` is one prior (K,) for mechanisms with priors, else None.
        """
        row = self._one_prior(prior)
        instead = f"Merge rare classes. Draws of {type(self).__name__} need no channel."
        _validate.check_size("a channel", (self.num_classes, self.num_outputs), instead)
        return self.likelihood(np.arange(self.num_outputs), row).T.copy()

    def _one_prior(self, prior: Any) -> np.ndarray | None:
        if not self.uses_priors:
            self._refuse_public(prior)
            return None
        if prior is None or np.shape(prior) != (self.num_classes,):
            raise ValueError(
                f"transition_matrix of {type(self).__name__} needs one prior of shape "
                f"({self.num_classes},), got {'None' if prior is None else np.shape(prior)}."
            )
        return self._checked_priors(prior, None).rows

    def _checked_priors(self, priors: Any, num_rows: int | None) -> PriorRows:
        """Returns the priors of n labels, or raises; ``num_rows`` is n, or None for any number."""
        if priors is None:
            raise ValueError(
                f"{type(self).__name__} needs priors of shape ({self.num_classes},) or "
                f"({num_rows or 'n'}, {self.num_classes}). Without priors, use RandomizedResponse."
            )
        return PriorRows.of(priors, num_rows, self)


class FrozenAggregate(Frozen, AggregateMechanism):
    """A statistic of this library for one of several kinds of labels."""

    low: float | None = None
    high: float | None = None

    def label_range(self) -> tuple[float, float] | None:
        """Returns (low, high), outside of which numbers are refused; None without a range."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def _check_kind(self) -> None:
        has_range = self.low is not None or self.high is not None
        if (self.num_classes is not None) + has_range + (self.num_labels is not None) != 1:
            raise ValueError(
                f"{type(self).__name__} needs exactly one of num_classes (classes), low and high "
                f"(numbers) and num_labels (rows of zeros and ones), got {self!r}."
            )
        if self.num_classes is not None:
            classes = _validate.integer_at_least("num_classes", self.num_classes, 2)
            self._set(num_classes=classes)
        if self.num_labels is not None:
            self._set(num_labels=_validate.integer_at_least("num_labels", self.num_labels, 1))
        if has_range:
            low, high = _validate.number_range(self.low, self.high, _WIDTHS, type(self).__name__)
            self._set(low=low, high=high)


class WithoutPriors(LabelMechanism):
    """A mechanism of this library with one channel and no public input."""

    @_validate.clears_frames
    def randomize(
        self, labels: Private[Any], priors: Public[Any] = None, *, rng: Rng = None
    ) -> np.ndarray:
        """Returns noisy labels (n,), as ``LabelMechanism.randomize``; ``priors`` must be None."""
        self._refuse_public(priors)
        return self._noisy(labels, rng)

    @abc.abstractmethod
    def _noisy(self, labels: Any, rng: Rng) -> np.ndarray:
        """Checks labels and returns noisy labels."""


@functools.cache
def _arguments(cls: type) -> tuple[str, ...]:
    return tuple(inspect.signature(cls).parameters)


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(
        f"arguments of mechanisms must be numbers, strings, None, lists or arrays, got "
        f"{type(value).__name__}. Override get_config and from_config for other types."
    )
