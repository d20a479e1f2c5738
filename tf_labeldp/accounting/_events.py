"""Every translation from a mechanism to ``dp_accounting`` events, and their composition.

This is the only file that builds or composes events. What ``dp_accounting`` 0.6.0 gets wrong, or
takes otherwise, is handled here:

* It ignores the count of a repeated ``RandomizedResponseDpEvent``; ``_losses`` counts right.
* It has no pure mechanism under ``REPLACE_ONE``, so binary randomized response of the same epsilon
  stands for one, which dominates it (Kairouz, Oh and Viswanath 2015, "The composition theorem for
  differential privacy", Theorem 3.1 and its proof). A Laplace noise multiplier is relative to
  adding or removing, and replacing moves twice as far: epsilon is ``2 / noise_multiplier``.
* A Gaussian noise multiplier is relative to adding or removing too, and so is doubled here.
* It raises Fourier transforms to the power of the number of steps, and their rounding errors with
  them: a multiple of these is taken off delta.
* It has no event for gradients whose distance is clipped: ``_label_distance`` has one.
* It has no event for what is a known delta away from another event: ``_added_delta`` has one.
* Its grid of privacy losses, 1e-4, can double the epsilon of many small steps of DP-SGD. The grid
  is chosen by the event.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tf_labeldp import _validate

if TYPE_CHECKING:
    from dp_accounting import DpEvent

_NEIGHBOURS = {"replace_label": "REPLACE_ONE", "add_or_remove": "ADD_OR_REMOVE_ONE"}
"""What ``dp_accounting`` calls the relations of a ``PrivacyGuarantee``."""

_ROUNDING = 2.0**-53
"""Of delta, per use: five times the most found against exact binomial sums, at 64 uses."""
_ULPS = 1.0 + 2.0**-40
"""Epsilon is found to more digits than this."""

_GRID = 1e-4
_GRID_OF_GAUSSIAN = 1.0 / 256.0
"""Over the noise multiplier: of a loss without sampling, 512 cells to a standard deviation."""
_FINEST_GRID = 1e-7
"""Below, second differences of delta drown in the rounding errors of doubles."""
_CELLS = 25_000
"""Cells between no loss and the largest of one step; twice as many take twice as long."""
_LEAST_NOISE = 1e-2
"""Noise multipliers below promise nothing (epsilon above ten thousand a use), and overflow."""
_KINDS = 64
"""Events that are composed as they are. Of more, epsilons of randomized response are rounded up."""
_PARTS = 32
"""By one part in 32 at most, which leaves 75 epsilons between one and ten times as much."""

CLIPPINGS = ("norm", "label_distance")
"""What DP-SGD bounds of each example, as ``LabelDPOptimizer`` has it."""
LONGEST_CLIP = 0.75
"""The largest norm that ``"label_distance"`` leaves a gradient, over the distance D = 2 C. Secret
sampling hides gradients better that lie on both sides of zero: 1/2 costs what ``"norm"`` costs."""


def randomized_response_event(epsilon: float, num_buckets: int = 2) -> DpEvent:
    """Returns the event of one randomized response over K values, of worst log-ratio epsilon.

    Its ``noise_parameter`` is the probability ``K / (e^epsilon + K - 1)`` of answering with a
    uniform value (``ghazi2024``, appendix D.1).
    """
    import dp_accounting

    epsilon = _validate.positive_finite("epsilon", epsilon)
    num_buckets = _validate.integer_at_least("num_buckets", num_buckets, 2)
    shrink = math.exp(-epsilon)
    noise = num_buckets * shrink / (1.0 + (num_buckets - 1) * shrink)
    return dp_accounting.RandomizedResponseDpEvent(noise, num_buckets)


def pure_dp_event(epsilon: float) -> DpEvent:
    """Returns the event of binary randomized response, which dominates every epsilon-DP one."""
    return randomized_response_event(epsilon, 2)


def approximate_dp_event(epsilon: float, delta: float) -> DpEvent:
    """Returns the event of a mechanism of which (epsilon, delta) is all that is known.

    At ``delta=0`` it is ``pure_dp_event(epsilon)``. Above, ``dp_accounting`` has no event for this:
    it is ``NonPrivateDpEvent``, for which ``compose_charges`` adds up epsilons and deltas.
    """
    import dp_accounting

    event = pure_dp_event(epsilon)
    delta = _validate.number_in("delta", delta, "[0, 1)")
    return event if delta == 0.0 else dp_accounting.NonPrivateDpEvent()


def gaussian_event(noise_ratio: float) -> DpEvent:
    """Returns the event of one release with Gaussian noise."""
    import dp_accounting

    noise_ratio = _validate.positive_finite("noise_ratio", noise_ratio)
    return dp_accounting.GaussianDpEvent(2.0 * noise_ratio)


def dp_sgd_event(
    noise_multiplier: float,
    sampling_probability: float,
    steps: int,
    clipping: str = "norm",
    added_delta: float = 0.0,
) -> DpEvent:
    """Returns the event of DP-SGD, with the arguments of ``dp_sgd_guarantee``.

    An accountant under ``REPLACE_ONE`` sets ``(1 - q) N(0) + q N(1)`` against
    ``(1 - q) N(0) + q N(-1)`` for one step, the worst pair (docs/accounting.md). Without sampling
    it is the worst for either clipping. ``added_delta`` is what each step costs besides, as its
    noise is not exactly Gaussian.
    """
    import dp_accounting

    noise = _validate.positive_finite("noise_multiplier", noise_multiplier)
    probability = _validate.number_in(
        "sampling_probability",
        sampling_probability,
        "(0, 1]",
        ". It is the expected batch size, divided by the number of examples",
    )
    steps = _validate.integer_at_least("steps", steps, 1)
    _validate.one_of("clipping", clipping, CLIPPINGS)
    step: DpEvent = dp_accounting.GaussianDpEvent(noise)
    if probability < 1.0 and clipping == "label_distance":
        from tf_labeldp.accounting._label_distance import LabelDistanceDpEvent

        step = LabelDistanceDpEvent(probability, noise, LONGEST_CLIP)
    elif probability < 1.0:
        step = dp_accounting.PoissonSampledDpEvent(probability, step)
    if added_delta > 0.0:
        from tf_labeldp.accounting._added_delta import AddedDeltaDpEvent

        step = dp_accounting.ComposedDpEvent((step, AddedDeltaDpEvent(added_delta)))
    return dp_accounting.SelfComposedDpEvent(step, steps)


def composed_epsilon(
    events: Iterable[DpEvent], delta: float, relation: str = "replace_label"
) -> float:
    """Returns an upper bound on the epsilon of events that are used one after another.

    It is that of privacy loss distributions, discretised pessimistically (Doroshenko et al. 2022).
    Its cost does not grow with the number of uses, nor that of one more with their kinds.
    """
    from tf_labeldp.accounting._added_delta import AddedDeltaDpEvent
    from tf_labeldp.accounting._losses import composed_loss, losses_of_one

    delta = _validate.number_in("delta", delta, "[0, 1)")
    _validate.one_of("relation", relation, _NEIGHBOURS)
    counted = _counted(events, relation)
    added = [leaf for leaf in counted if isinstance(leaf, AddedDeltaDpEvent)]
    away = math.fsum(leaf.delta * counted.pop(leaf) for leaf in added)
    if delta <= away > 0.0 or any(_noise(leaf) < _LEAST_NOISE for leaf in counted):
        return math.inf
    known = _NEIGHBOURS[relation]
    uses = sorted(((leaf, n, _grid(leaf)) for leaf, n in _merged(counted).items()), key=repr)
    losses = [losses_of_one(leaf, grid, known) for leaf, _, grid in uses]
    if not all(losses):
        return math.inf
    if delta == 0.0:
        largest = (max(loss.epsilon(0.0) for loss in both) for both in losses)
        return math.fsum(one * n for one, (_, n, _) in zip(largest, uses, strict=True)) * _ULPS
    away += _ROUNDING * sum(n for _, n, _ in uses)
    if delta <= away:
        return math.inf
    ways = range(max(map(len, losses), default=0))
    both = (composed_loss(tuple(uses), known, way) for way in ways)
    return max((loss.epsilon(delta - away) for loss in both), default=0.0) * _ULPS


@functools.lru_cache(maxsize=4096)
def epsilon_of(event: DpEvent, delta: float, relation: str = "replace_label") -> float:
    """Returns ``composed_epsilon`` of one event, which takes up to a second to find."""
    return composed_epsilon([event], delta, relation)


def _counted(events: Iterable[DpEvent], relation: str = "add_or_remove") -> dict[DpEvent, int]:
    """Returns the events inside compositions and repeats, with how often each is used."""
    counted: dict[DpEvent, int] = {}
    for event in events:
        for leaf, count in _leaves(event, 1):
            if relation == "replace_label":
                leaf = _without_laplace(leaf)
            counted[leaf] = counted.get(leaf, 0) + count
    return counted


def _without_laplace(event: DpEvent) -> DpEvent:
    """Returns the pure event that dominates a Laplace mechanism under replacement."""
    import dp_accounting

    inner = event.event if isinstance(event, dp_accounting.PoissonSampledDpEvent) else event
    if isinstance(inner, dp_accounting.LaplaceDpEvent):
        return pure_dp_event(2.0 / inner.noise_multiplier)
    return event


def _leaves(event: DpEvent, times: int) -> Iterator[tuple[DpEvent, int]]:
    """Yields the events inside an event that is used some times, with how often each is."""
    import dp_accounting

    if isinstance(event, dp_accounting.NoOpDpEvent) or getattr(event, "num_buckets", 2) == 1:
        return
    if isinstance(event, dp_accounting.ComposedDpEvent):
        for part in event.events:
            yield from _leaves(part, times)
    elif isinstance(event, dp_accounting.SelfComposedDpEvent):
        yield from _leaves(event.event, times * event.count)
    else:
        yield event, times


def _merged(counted: dict[DpEvent, int]) -> dict[DpEvent, int]:
    """Returns fewer kinds of events that cost no less together.

    Gaussians without sampling cost as one whose squared precision is the sum (Dong, Roth and Su
    2022, "Gaussian differential privacy", Corollary 2). Randomized response is that of a larger
    epsilon, mixed with uniform answers.
    """
    import dp_accounting

    from tf_labeldp.accounting._losses import response_epsilon

    merged: dict[DpEvent, int] = {}
    precisions = []
    for event, count in counted.items():
        if isinstance(event, dp_accounting.GaussianDpEvent):
            precisions.append(count / event.noise_multiplier**2)
            continue
        if len(counted) > _KINDS and isinstance(event, dp_accounting.RandomizedResponseDpEvent):
            epsilon = response_epsilon(event)
            if 0.0 < epsilon < math.inf:
                larger = math.exp(math.ceil(_PARTS * math.log(epsilon)) / _PARTS)
                event = randomized_response_event(max(epsilon, larger), event.num_buckets)
        merged[event] = merged.get(event, 0) + count
    if precisions:
        merged[dp_accounting.GaussianDpEvent(1.0 / math.sqrt(math.fsum(precisions)))] = 1
    return merged


def _gaussian(event: Any) -> tuple[float, float] | None:
    """Returns sampling probability and noise multiplier of a Gaussian; None for other events."""
    import dp_accounting

    from tf_labeldp.accounting._label_distance import LabelDistanceDpEvent

    if isinstance(event, LabelDistanceDpEvent):
        return event.sampling_probability, event.noise_multiplier
    if isinstance(event, dp_accounting.GaussianDpEvent):
        return 1.0, event.noise_multiplier
    sampled = isinstance(event, dp_accounting.PoissonSampledDpEvent)
    if sampled and isinstance(event.event, dp_accounting.GaussianDpEvent):
        return event.sampling_probability, event.event.noise_multiplier
    return None


def _noise(event: DpEvent) -> float:
    found = _gaussian(event)
    return math.inf if found is None else found[1]


def _grid(event: DpEvent) -> float:
    """Returns the step of the grid on which the privacy loss of one use is to be held.

    Gaussian noise has a loss with a standard deviation of about ``2 q / sigma``: a thirtieth of
    that costs one part in ten thousand of epsilon. No finer than keeps it to a number of cells.
    """
    import dp_accounting

    from tf_labeldp.accounting._label_distance import LabelDistanceDpEvent
    from tf_labeldp.accounting._losses import response_epsilon

    if isinstance(event, dp_accounting.RandomizedResponseDpEvent):
        return response_epsilon(event)
    found = _gaussian(event)
    if found is None:
        return _GRID
    probability, noise = found
    if probability == 1.0:
        return max(_GRID_OF_GAUSSIAN / noise, _FINEST_GRID)
    # log(1 - q + q e^x), x the loss of the full batch at ten standard deviations
    rest = math.log1p(-probability)
    reach = 2.0 * event.longest if isinstance(event, LabelDistanceDpEvent) else 1.0
    largest = 10.5 * reach / noise + 0.5 * (reach / noise) ** 2
    cell = float(np.logaddexp(rest, math.log(probability) + largest)) / _CELLS
    return max(min(_GRID, probability / (15.0 * noise)), cell, _FINEST_GRID)


def event_to_json(event: DpEvent) -> dict[str, Any]:
    """Returns an event of ``dp_accounting`` as JSON can hold it; raises for any other event."""
    name = type(event).__name__
    if _known_events().get(name) is not type(event):
        raise ValueError(
            f"{name} is not an event of dp_accounting that can be written down. Use one of "
            f"{', '.join(sorted(_known_events()))}."
        )
    is_ours = dataclasses.is_dataclass(event)  # and the others are made by attrs
    fields = dataclasses.fields(event) if is_ours else type(event).__attrs_attrs__
    return {"class": name} | {one.name: _value_to_json(getattr(event, one.name)) for one in fields}


def _value_to_json(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_value_to_json(part) for part in value]
    if isinstance(value, (int, float, np.generic)):
        return value.item() if isinstance(value, np.generic) else value
    return event_to_json(value)


def event_from_json(data: dict[str, Any]) -> DpEvent:
    """Returns the event that ``event_to_json`` wrote; raises ``ValueError`` for another name."""
    fields = dict(data)
    kind = _known_events().get(fields.pop("class", None))
    if kind is None:
        raise ValueError(f"{data.get('class')!r} is not a known event of dp_accounting.")
    return kind(**{name: _value_from_json(value) for name, value in fields.items()})


def _value_from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return event_from_json(value)
    return tuple(_value_from_json(part) for part in value) if isinstance(value, list) else value


@functools.cache
def _known_events() -> dict[Any, Any]:
    """Returns the classes of events that are read and written, by their names."""
    import dp_accounting

    from tf_labeldp.accounting._added_delta import AddedDeltaDpEvent
    from tf_labeldp.accounting._label_distance import LabelDistanceDpEvent

    found = {name: getattr(dp_accounting, name) for name in dir(dp_accounting)}
    return {
        name: kind
        for name, kind in found.items()
        if isinstance(kind, type)
        and issubclass(kind, dp_accounting.DpEvent)
        and hasattr(kind, "__attrs_attrs__")
        and kind not in (dp_accounting.DpEvent, dp_accounting.UnsupportedDpEvent)
    } | {kind.__name__: kind for kind in (AddedDeltaDpEvent, LabelDistanceDpEvent)}
