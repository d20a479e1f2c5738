"""The ``dp_accounting`` events of all uses of labels, and events as JSON.

No other file builds events. ``_losses`` computes their cost; a call loads it and ``dp_accounting``
only when it needs them: a charge keeps the fields of its event, which are values for JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tf_labeldp import _validate

if TYPE_CHECKING:
    from dp_accounting import DpEvent

_NUMBERS_OF: dict[Any, set[str]] = {
    "NoOpDpEvent": set(),
    "NonPrivateDpEvent": set(),
    "GaussianDpEvent": {"noise_multiplier"},
    "RandomizedResponseDpEvent": {"noise_parameter", "num_buckets"},
}
"""Arguments of the events that are checked without ``dp_accounting``, which takes a second to load:
it imports ``scipy.stats``."""
_PROBABILITIES = frozenset({"sampling_probability", "noise_parameter", "delta", "longest"})
_COUNTS = frozenset({"count", "num_buckets", "source_dataset_size", "sample_size"})


class EventFields(dict[str, Any]):
    """The event of a use as values for JSON: its class, and its arguments by name.

    Only ``dp_event`` and ``of`` load ``dp_accounting``.
    """

    CLIPPINGS: ClassVar[tuple[str, ...]] = ("norm", "label_distance")
    """Bounds of DP-SGD on each example, named as in ``LabelDPOptimizer``."""
    LONGEST_CLIP: ClassVar[float] = 0.75
    """The largest norm of a gradient after ``"label_distance"``, divided by D = 2 C. Secret
    sampling hides gradients on both sides of zero better: 1/2 costs as much as ``"norm"``."""
    NONE: ClassVar[EventFields]
    """The event of a use that costs nothing."""
    NOT_PRIVATE: ClassVar[EventFields]
    """The event of a use that has none: its epsilon and delta add to those of others."""

    @classmethod
    def randomized_response(cls, epsilon: float, num_buckets: int = 2) -> EventFields:
        """Returns the event of one randomized response over K values with log-ratio epsilon.

        Its ``noise_parameter`` is the probability ``K / (e^epsilon + K - 1)`` of a uniform answer
        (``ghazi2024``, appendix D.1). Over two values it dominates every epsilon-DP event.
        """
        epsilon = _validate.positive_finite("epsilon", epsilon)
        num_buckets = _validate.integer_at_least("num_buckets", num_buckets, 2)
        shrink = math.exp(-epsilon)
        noise = num_buckets * shrink / (1.0 + (num_buckets - 1) * shrink)
        name = "RandomizedResponseDpEvent"
        return cls({"class": name, "noise_parameter": noise, "num_buckets": num_buckets})

    @classmethod
    def approximate(cls, epsilon: float, delta: float) -> EventFields:
        """Returns the event of a mechanism with nothing but its (epsilon, delta).

        At ``delta=0`` it is binary randomized response, and nothing at ``epsilon=0``. For a larger
        delta ``dp_accounting`` has no event: it is ``NonPrivateDpEvent``, for which
        ``Charge.composed`` adds up epsilons and deltas.
        """
        pure = cls.NONE if epsilon == 0.0 else cls.randomized_response(epsilon)
        return pure if _validate.number_in("delta", delta, "[0, 1)") == 0.0 else cls.NOT_PRIVATE

    @classmethod
    def gaussian(cls, noise_ratio: float) -> EventFields:
        """Returns the event of one release whose noise is ``noise_ratio`` L2 sensitivities.

        The sensitivity is that of replacement; an accountant under ``REPLACE_ONE`` takes noise
        relative to adding or removing, which is half as far.
        """
        noise_ratio = _validate.positive_finite("noise_ratio", noise_ratio)
        return cls({"class": "GaussianDpEvent", "noise_multiplier": 2.0 * noise_ratio})

    @classmethod
    def dp_sgd(
        cls,
        noise_multiplier: float,
        sampling_probability: float,
        steps: int,
        clipping: str = "norm",
    ) -> EventFields:
        """Returns the event of DP-SGD, with the arguments of ``dp_sgd_guarantee``.

        The noise multiplier is relative to the clip C, half the sensitivity 2 C under replacement.
        For one step, an accountant under ``REPLACE_ONE`` compares ``(1 - q) N(0) + q N(1)`` and
        ``(1 - q) N(0) + q N(-1)``, the worst pair (docs/theory.md). Without sampling it is the
        worst for either clipping.
        """
        noise = _validate.positive_finite("noise_multiplier", noise_multiplier)
        probability = _validate.number_in(
            "sampling_probability",
            sampling_probability,
            "(0, 1]",
            ". It is the expected batch size divided by the number of examples",
        )
        steps = _validate.integer_at_least("steps", steps, 1)
        _validate.one_of("clipping", clipping, cls.CLIPPINGS)
        sampled = {"sampling_probability": probability}
        step = {"class": "GaussianDpEvent", "noise_multiplier": noise}
        if probability < 1.0 and clipping == "label_distance":
            bounded = {"noise_multiplier": noise, "longest": cls.LONGEST_CLIP}
            step = {"class": "LabelDistanceDpEvent", **sampled, **bounded}
        elif probability < 1.0:
            step = {"class": "PoissonSampledDpEvent", **sampled, "event": step}
        return cls({"class": "SelfComposedDpEvent", "event": step, "count": steps})

    @classmethod
    def of(cls, event: DpEvent) -> EventFields:
        """Returns the fields of an event of ``dp_accounting``; raises for any other event."""
        name = type(event).__name__
        if _known_events().get(name) is not type(event):
            raise ValueError(
                f"expected an event of dp_accounting that JSON can represent, got {name}. Use one "
                f"of {', '.join(sorted(_known_events()))}."
            )
        ours = dataclasses.is_dataclass(event)  # dp_accounting's use attrs
        fields = dataclasses.fields(event) if ours else type(event).__attrs_attrs__
        values = {field.name: _value_to_json(getattr(event, field.name)) for field in fields}
        return cls({"class": name, **values})

    def dp_event(self) -> DpEvent:
        """Returns the event of ``dp_accounting``; ``ValueError`` for an unknown class."""
        kind = _known_events().get(self.get("class"))
        if kind is None:
            raise ValueError(f"{self.get('class')!r} is not a known event of dp_accounting.")
        return kind(**{name: _value_from_json(self[name]) for name in self if name != "class"})


EventFields.NONE = EventFields({"class": "NoOpDpEvent"})
EventFields.NOT_PRIVATE = EventFields({"class": "NonPrivateDpEvent"})


def checked_fields(event: DpEvent | EventFields) -> str:
    """Returns the fields of an event as JSON text, or raises if it is no event."""
    fields = EventFields(event) if isinstance(event, dict) else EventFields.of(event)
    numbers = {name: value for name, value in fields.items() if name != "class"}
    if numbers.keys() != _NUMBERS_OF.get(fields.get("class")) or not all(
        type(value) in (int, float) for value in numbers.values()
    ):
        fields = EventFields.of(fields.dp_event())
    _check_numbers(fields)
    return json.dumps(fields, sort_keys=True)


def _check_numbers(fields: EventFields) -> None:
    """Raises for a number that no mechanism has: ``dp_accounting`` composes a count of -1."""
    waiting: list[tuple[str, Any]] = list(fields.items())
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += [(name, part) for part in value]
        elif isinstance(value, (int, float)):
            most = 1.0 if name in _PROBABILITIES else math.inf
            if not 0.0 <= value <= most or (name in _COUNTS and value != int(value)):
                raise ValueError(f"expected an event with a possible {name}, got {value}.")


@functools.lru_cache(maxsize=4096)
def event_of_text(text: str) -> DpEvent:
    """Returns the event of ``checked_fields``."""
    return EventFields(json.loads(text)).dp_event()


def _value_to_json(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_value_to_json(part) for part in value]
    if isinstance(value, (int, float, np.generic)):
        return value.item() if isinstance(value, np.generic) else value
    return EventFields.of(value)


def _value_from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return EventFields(value).dp_event()
    return tuple(_value_from_json(part) for part in value) if isinstance(value, list) else value


@functools.cache
def _known_events() -> dict[Any, Any]:
    import dp_accounting

    from tf_labeldp.accounting._added_events import AddedDeltaDpEvent, LabelDistanceDpEvent

    theirs = {
        name: kind
        for name, kind in vars(dp_accounting).items()
        if isinstance(kind, type) and issubclass(kind, dp_accounting.DpEvent)
    }
    del theirs["DpEvent"], theirs["UnsupportedDpEvent"]
    ours = {kind.__name__: kind for kind in (AddedDeltaDpEvent, LabelDistanceDpEvent)}
    return theirs | ours
