"""The contracts of mechanisms: what may see a label, what it costs, what it gives back."""

from __future__ import annotations

import abc
import dataclasses
import json
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import pure_dp_event

if TYPE_CHECKING:
    from tf_labeldp.accounting._events import DpEvent

_Self = TypeVar("_Self", bound="Mechanism")
_REGISTRY: dict[str, type[Mechanism]] = {}


@dataclasses.dataclass(frozen=True)
class Mechanism(abc.ABC):
    """Anything that may see true labels: an immutable value with a price, known by its name.

    Privacy: what it hands out is (epsilon, delta)-DP for the replacement of one label, and
    ``dp_event()`` says the same to ``dp_accounting``.

    Attributes:
        epsilon: finite and above zero.

    Example:
        >>> from tf_labeldp.mechanisms import RandomizedResponse
        >>> isinstance(RandomizedResponse(epsilon=1.0, num_classes=3), Mechanism)
        True
    """

    epsilon: float

    def __post_init__(self) -> None:
        """Checks the ranges."""
        object.__setattr__(self, "epsilon", _validate.positive_finite("epsilon", self.epsilon))

    @property
    def delta(self) -> float:
        """Failure probability: zero, these mechanisms are pure."""
        return 0.0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Makes every mechanism known by name, so that a stored draw can name its mechanism."""
        super().__init_subclass__(**kwargs)
        _REGISTRY[cls.__name__] = cls

    def dp_event(self) -> DpEvent:
        """Returns the ``dp_accounting`` event of one use: one that dominates any pure mechanism."""
        return pure_dp_event(self.epsilon)

    def get_config(self) -> dict[str, Any]:
        """Returns every constructor argument, as JSON can hold it."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_config(cls: type[_Self], config: dict[str, Any]) -> _Self:
        """Returns the mechanism that ``get_config`` described."""
        return cls(**config)


class LabelMechanism(Mechanism):
    """Turns each label into one noisy label; draws on different labels compose in parallel.

    Privacy: for every pair of labels and every output, ``P[out | y] <= e^epsilon P[out | y']``;
    ``delta`` is zero. The unit is one label, replaced. Assumes that the prior of a label, if one is
    used, does not depend on that label.
    """

    uses_priors: ClassVar[bool] = False
    """Whether ``randomize`` takes priors."""

    @abc.abstractmethod
    def randomize(
        self, labels: Any, priors: Any = None, *, rng: np.random.Generator | None = None
    ) -> np.ndarray:
        """Returns noisy labels of shape (n,) from labels of shape (n,)."""

    @abc.abstractmethod
    def transition_matrix(self, prior: Any = None) -> np.ndarray:
        """Returns ``P[output | input]``, ``float64`` (inputs, outputs), rows that sum to one."""


@dataclasses.dataclass(frozen=True)
class ClassificationMechanism(LabelMechanism):
    """A label randomizer over the classes 0..K-1; noisy labels are ``int64`` in 0..K-1.

    Privacy: that of ``LabelMechanism``; the channel is (K, K).

    Attributes:
        epsilon: finite and above zero.
        num_classes: K, at least 2.
    """

    num_classes: int

    def __post_init__(self) -> None:
        """Checks the ranges."""
        super().__post_init__()
        classes = _validate.integer_at_least("num_classes", self.num_classes, 2)
        object.__setattr__(self, "num_classes", classes)


class RegressionMechanism(LabelMechanism):
    """A label randomizer over numbers in a public range; noisy labels are ``float64``.

    Privacy: that of ``LabelMechanism``, for every pair of labels in ``label_range()``. A label
    outside is refused, not clipped: clip the labels to their public range first (``PrivateLabels``
    does so with ``clip=True``).
    """

    @abc.abstractmethod
    def label_range(self) -> tuple[float, float]:
        """Returns the smallest and the largest label, public knowledge."""

    @abc.abstractmethod
    def likelihood(self, outputs: Any, labels: Any) -> np.ndarray:
        """Returns the likelihood of each output under each label.

        Args:
            outputs: possible noisy labels, (m,).
            labels: true labels in ``label_range()``, (k,).

        Returns:
            ``float64`` (m, k): probabilities where an output has one, else densities; entries of
            one row may be compared, and no ratio of two of them exceeds e^epsilon.
        """


class AggregateMechanism(Mechanism):
    """Hands out one noisy statistic of many labels, such as a histogram.

    Privacy: the whole result is (epsilon, delta)-DP for the replacement of any one of the labels,
    and whether ``release`` raises does not depend on labels of the kind that it says it is for.

    Attributes:
        num_classes: K, for labels that are classes 0..K-1; None for numbers.
    """

    num_classes: int | None

    def label_range(self) -> tuple[float, float] | None:
        """Returns the range outside of which it refuses numbers; None for none."""
        return None

    @abc.abstractmethod
    def release(
        self, labels: Any, public_input: Any = None, *, rng: np.random.Generator | None = None
    ) -> np.ndarray:
        """Returns the noisy statistic of labels (n,).

        Args:
            labels: (n,), classes or numbers.
            public_input: what else the statistic is made of, in the order of the labels: group
                numbers (n,), features (n, d). Must not depend on the labels.
            rng: a generator for repeatable (not private) runs.
        """


_Kind = TypeVar("_Kind", bound=Mechanism)


def checked_mechanism(value: Any, kind: type[_Kind]) -> _Kind:
    """Returns ``value`` if it is a mechanism of this kind, or raises a ``TypeError``.

    Args:
        value: what a caller gave.
        kind: ``LabelMechanism``, or a narrower class.

    Example:
        >>> from tf_labeldp.mechanisms import ClassificationMechanism, RandomizedResponse
        >>> mechanism = RandomizedResponse(epsilon=1.0, num_classes=3)
        >>> checked_mechanism(mechanism, ClassificationMechanism).num_classes
        3
    """
    if isinstance(value, kind):
        return value
    wanted, example = _EXAMPLE_OF.get(kind, (f"a {kind.__name__}", f"{kind.__name__}(...)"))
    raise TypeError(
        f"mechanism must be {wanted}, got {type(value).__name__}, for example {example}."
    )


_EXAMPLE_OF: dict[type, tuple[str, str]] = {
    ClassificationMechanism: (
        "a tf_labeldp mechanism for classes",
        "RandomizedResponse(epsilon=1.0, num_classes=10)",
    ),
    RegressionMechanism: (
        "a tf_labeldp mechanism for numbers",
        "LaplaceMechanism(epsilon=1.0, low=0.0, high=400.0)",
    ),
    AggregateMechanism: (
        "a tf_labeldp mechanism of many labels",
        "HistogramMechanism(epsilon=1.0, num_classes=10)",
    ),
}
for _kind in (Mechanism, LabelMechanism):
    _EXAMPLE_OF[_kind] = (
        "a tf_labeldp mechanism",
        "RandomizedResponse(epsilon=1.0, num_classes=10)",
    )


def serialize(mechanism: Mechanism) -> dict[str, Any]:
    """Returns ``{"class_name": ..., "config": ...}``, which JSON can hold.

    Example:
        >>> from tf_labeldp.mechanisms import RandomizedResponse
        >>> serialize(RandomizedResponse(epsilon=1.0, num_classes=3))["class_name"]
        'RandomizedResponse'
    """
    data = {"class_name": type(mechanism).__name__, "config": mechanism.get_config()}
    return json.loads(json.dumps(data))  # as it will read back: tuples become lists


def deserialize(data: dict[str, Any]) -> Mechanism:
    """Returns the mechanism that ``serialize`` described.

    Raises:
        ValueError: no mechanism of that name has been imported.

    Example:
        >>> from tf_labeldp.mechanisms import RandomizedResponse
        >>> deserialize(serialize(RandomizedResponse(epsilon=1.0, num_classes=3)))
        RandomizedResponse(epsilon=1.0, num_classes=3)
    """
    name = data["class_name"]
    if name not in _REGISTRY:
        raise ValueError(
            f"unknown mechanism {name!r}; known are {sorted(_REGISTRY)}. Import the module that "
            "defines it first."
        )
    return _REGISTRY[name].from_config(data["config"])
