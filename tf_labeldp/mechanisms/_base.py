"""The contract of a mechanism that turns a class label into a noisy class label."""

from __future__ import annotations

import abc
import dataclasses
import json
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from tf_labeldp import _validate

if TYPE_CHECKING:
    from tf_labeldp.accounting._events import DpEvent

_Self = TypeVar("_Self", bound="LabelMechanism")
_REGISTRY: dict[str, type[LabelMechanism]] = {}


@dataclasses.dataclass(frozen=True)
class LabelMechanism(abc.ABC):
    """A label randomizer over the classes 0..K-1, as an immutable value.

    Privacy: for every pair of labels and every output, ``P[out | y] <= e^epsilon P[out | y']``;
    ``delta`` is zero. The unit is one label, replaced. Assumes that the prior of a label, if one is
    used, does not depend on that label.

    Attributes:
        epsilon: finite and above zero.
        num_classes: K, at least 2.
    """

    epsilon: float
    num_classes: int

    uses_priors: ClassVar[bool] = False
    """Whether ``randomize`` takes priors."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        object.__setattr__(self, "epsilon", _validate.positive_finite("epsilon", self.epsilon))
        classes = _validate.integer_at_least("num_classes", self.num_classes, 2)
        object.__setattr__(self, "num_classes", classes)

    @property
    def delta(self) -> float:
        """Failure probability: zero, these mechanisms are pure."""
        return 0.0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Makes every mechanism known by name, so that a stored draw can name its mechanism."""
        super().__init_subclass__(**kwargs)
        _REGISTRY[cls.__name__] = cls

    @abc.abstractmethod
    def randomize(
        self, labels: Any, priors: Any = None, *, rng: np.random.Generator | None = None
    ) -> np.ndarray:
        """Returns noisy labels, ``int64`` of shape (n,), from labels of shape (n,)."""

    @abc.abstractmethod
    def transition_matrix(self, prior: Any = None) -> np.ndarray:
        """Returns ``P[output | input]``, ``float64`` of shape (K, K) with rows that sum to one."""

    @abc.abstractmethod
    def dp_event(self) -> DpEvent:
        """Returns the ``dp_accounting`` event of one use on one label."""

    def get_config(self) -> dict[str, Any]:
        """Returns every constructor argument, as JSON can hold it."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_config(cls: type[_Self], config: dict[str, Any]) -> _Self:
        """Returns the mechanism that ``get_config`` described."""
        return cls(**config)


def checked_mechanism(value: Any) -> LabelMechanism:
    """Returns ``value`` if it is a mechanism, or raises a ``TypeError``.

    Example:
        >>> from tf_labeldp.mechanisms import RandomizedResponse
        >>> checked_mechanism(RandomizedResponse(epsilon=1.0, num_classes=3)).num_classes
        3
    """
    if isinstance(value, LabelMechanism):
        return value
    raise TypeError(
        f"mechanism must be a tf_labeldp mechanism, got {type(value).__name__}, for example "
        "RandomizedResponse(epsilon=1.0, num_classes=10)."
    )


def serialize(mechanism: LabelMechanism) -> dict[str, Any]:
    """Returns ``{"class_name": ..., "config": ...}``, which JSON can hold.

    Example:
        >>> from tf_labeldp.mechanisms import RandomizedResponse
        >>> serialize(RandomizedResponse(epsilon=1.0, num_classes=3))["class_name"]
        'RandomizedResponse'
    """
    data = {"class_name": type(mechanism).__name__, "config": mechanism.get_config()}
    return json.loads(json.dumps(data))  # as it will read back: tuples become lists


def deserialize(data: dict[str, Any]) -> LabelMechanism:
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
