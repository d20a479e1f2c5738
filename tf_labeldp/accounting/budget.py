"""Budgets, charges, the composition of charges on one example, and groups of examples."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from tf_labeldp import _validate
from tf_labeldp.accounting._annotations import Setting
from tf_labeldp.accounting._guarantee import UNITS, Assumption, PrivacyGuarantee
from tf_labeldp.accounting.events import EventFields, checked_fields, event_of_text
from tf_labeldp.accounting.gaussian import gaussian_epsilon, gaussian_sigma

if TYPE_CHECKING:
    from dp_accounting import DpEvent

ROUNDING = 1e-9
"""Relative slack of a budget: the float error of sums such as ten times 0.1. Statements show six
digits, so that none shows this slack."""
_WORTH_IT = 0.99
"""Ratio of epsilons below which the tighter theorem is stated: it needs delta and an assumption."""
FIXED = Assumption(
    "fixed-in-advance",
    "trainer",
    "The mechanisms and the number of their uses were fixed in advance, not chosen after seeing "
    "earlier noisy labels.",
)
FEATURES_OF_USERS = Assumption(
    "public-features", "holder", "The features and the user of each example are public."
)
_OPAQUE, _FREE = checked_fields(EventFields.NOT_PRIVATE), checked_fields(EventFields.NONE)
"""The texts of a use without an event, and of none."""
_BLOCK = 64
"""Different charges that are summed together; a larger block sums as many blocks."""
_DELTA, _DELTA_TIMES_N = 1e-5, 0.1
"""The customary delta for tens of thousands of examples; and a tenth of 1 / n, at which a mechanism
that publishes the label of one example, chosen at random, would be allowed."""
_LARGE_EPSILON, _LARGE_DELTA = 20.0, 0.01
"""Budgets above these are usually a mistake: binary randomized response at epsilon 20 changes one
label in 485 million, and a delta of 0.01 allows publishing one label in a hundred."""

CountedCharges = tuple[tuple["Charge", int], ...]
"""Different charges, each with its number of uses."""


class BudgetExceededError(RuntimeError):
    """A use of the labels was refused because it would pass the budget. Nothing was charged."""


@dataclasses.dataclass(frozen=True)
class PrivacyBudget:
    """The most that may be spent on one unit.

    Attributes:
        epsilon: finite and above zero.
        delta: in [0, 1); with zero, charges add up by basic composition.

    Warns:
        UserWarning: epsilon is above 20, or delta is 0.01 or more.

    Example:
        >>> PrivacyBudget(epsilon=2.0).allows(PrivacyGuarantee(epsilon=1.5))
        True
    """

    epsilon: float
    delta: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", _validate.positive_finite("epsilon", self.epsilon))
        object.__setattr__(self, "delta", _validate.number_in("delta", self.delta, "[0, 1)"))
        if self.epsilon > _LARGE_EPSILON or self.delta >= _LARGE_DELTA:
            _validate.warn(
                f"a budget of {self} protects next to nothing. Use an epsilon of the order of 1, "
                "and a delta below 1 / n for n labels."
            )

    @staticmethod
    def default_delta(num_labels: int) -> float:
        """Returns the default delta: 1e-5, or 0.1 / n if that is less."""
        return min(_DELTA, _DELTA_TIMES_N / num_labels)

    def allows(self, guarantee: PrivacyGuarantee) -> bool:
        """Returns whether ``guarantee`` is within this budget, up to float rounding."""
        slack = 1.0 + ROUNDING
        return guarantee.epsilon <= self.epsilon * slack and guarantee.delta <= self.delta * slack

    def __str__(self) -> str:
        return f"epsilon={self.epsilon:g}, delta={self.delta:g}"


class _Event:
    """The event of a charge: kept as the text of its fields, and built when it is read."""

    def __get__(self, charge: Charge | None, kind: type | None = None) -> Any:
        if charge is None:
            raise AttributeError  # The argument has no default.
        return event_of_text(charge.event_text)

    def __set__(self, charge: Charge, event: DpEvent | EventFields) -> None:
        object.__setattr__(charge, "event_text", checked_fields(event))


@dataclasses.dataclass(frozen=True, eq=False)
class Charge:
    """The cost of one use of labels to each unit in it.

    Attributes:
        epsilon: epsilon of this use alone, at least zero; infinite if it promises nothing.
        delta: delta of this use alone, in [0, 1).
        event: its ``dp_accounting`` event, for composition at a positive delta, or the event's
            fields.
        assumptions: sentences that must be true for the use to cost no more.

    Example:
        >>> from tf_labeldp.mechanisms import RandomizedResponse
        >>> Charge.of(RandomizedResponse(epsilon=1.0, num_classes=3)).epsilon
        1.0
    """

    epsilon: float
    delta: float
    event: Setting[Any] = _Event()
    assumptions: tuple[Assumption, ...] = ()
    event_text: str = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Checks the ranges, and normalizes fields, so that equal charges are counted together."""
        if not self.epsilon >= 0.0:
            raise ValueError(f"epsilon must be zero or more, got {self.epsilon}.")
        object.__setattr__(self, "delta", _validate.number_in("delta", self.delta, "[0, 1)"))
        object.__setattr__(self, "assumptions", tuple(map(Assumption.of, self.assumptions)))
        if self.event_text == _FREE and not self.epsilon == self.delta == 0.0:
            # Compositions of events would leave the cost out.
            raise ValueError(
                f"expected the event of a use that costs epsilon={self.epsilon:g} at "
                f"delta={self.delta:g}, got NoOpDpEvent, which costs nothing. Give "
                "EventFields.approximate(epsilon, delta) for a use without an event of its own."
            )

    def __eq__(self, other: object) -> bool:
        """Returns whether all fields are equal; no event is built."""
        return isinstance(other, Charge) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # Histories of thousands of charges are looked up with each new charge.
        return hash(self._fields())

    def __reduce__(self) -> Any:
        # Another process has other hashes of texts.
        return Charge, (self.epsilon, self.delta, self.event_fields, self.assumptions)

    def _fields(self) -> tuple[Any, ...]:
        return self.epsilon, self.delta, self.event_text, self.assumptions

    @property
    def event_fields(self) -> EventFields:
        """The event as values for JSON, which loads no ``dp_accounting``."""
        fields: EventFields = json.loads(self.event_text)
        return fields

    def has_cost_of(self, other: Charge) -> bool:
        """Returns whether both cost the same, although one may be stated at another delta."""
        if self.event_text != other.event_text:
            return False
        figures = (self.epsilon, self.delta), (other.epsilon, other.delta)
        return self.event_text != _OPAQUE or figures[0] == figures[1]

    def with_assumptions(self, assumptions: Iterable[Assumption]) -> Charge:
        """Returns the charge with these assumptions in place of its own."""
        return Charge(self.epsilon, self.delta, self.event_fields, tuple(assumptions))

    @classmethod
    def of(cls, mechanism: Setting[object]) -> Charge:
        """Returns the charge of one use of ``mechanism``, from its epsilon, delta and dp_event."""
        use: Any = mechanism
        event = getattr(use, "_event_fields", use.dp_event)()
        return cls(use.epsilon, use.delta, event, tuple(getattr(use, "assumptions", ())))

    @classmethod
    def gaussian_share(cls, epsilon: float, delta: float, share: float) -> Charge:
        """Returns the charge of one of several Gaussian uses that jointly cost (epsilon, delta).

        ``share`` is its part of the sum of squared precisions, which compose by addition (Dong,
        Roth and Su 2022, "Gaussian differential privacy", Corollary 2).
        """
        sigma = gaussian_sigma(epsilon, delta, 1.0) / math.sqrt(share)
        each = gaussian_epsilon(sigma, delta, 1.0)
        return cls(each, delta, EventFields.gaussian(gaussian_sigma(each, delta, 1.0)))

    @classmethod
    def of_event(
        cls, event: DpEvent, delta: float, assumptions: Sequence[str | Assumption] = ()
    ) -> Charge:
        """Returns the charge of an event, with the accountant's epsilon at ``delta``.

        Without a finite epsilon, the charge is infinite and carries the reason.

        Example:
            >>> from dp_accounting import GaussianDpEvent
            >>> round(Charge.of_event(GaussianDpEvent(10.0), delta=1e-5).epsilon, 3)
            0.726
        """
        from tf_labeldp.accounting._losses import epsilon_of

        epsilon = epsilon_of(event, delta)
        if math.isinf(epsilon):
            reason = (
                f"Nothing is promised: no finite epsilon is known at delta={delta:g} for {event}. "
                "Use more noise, or a larger delta below 1/n."
            )
            assumptions = (Assumption("not-promised", "nobody", reason), *assumptions)
        return cls(epsilon, delta, event, tuple(map(Assumption.of, assumptions)))

    @staticmethod
    def composed(
        charges: Setting[Mapping[Charge, int] | CountedCharges], delta: float = 0.0
    ) -> PrivacyGuarantee:
        """Returns the composition of charges on the *same* unit, each with its number of uses.

        Basic composition (Dwork and Roth 2014, Theorem 3.16) adds up epsilons and deltas, also for
        mechanisms and numbers of uses that are chosen adaptively (Rogers et al. 2016). For ``delta
        > 0``, the epsilon of composed privacy loss distributions is stated where it saves at least
        1 %, with the assumption that the mechanisms were fixed in advance. Uses without an event
        add their epsilon and delta to it.
        """
        delta = _validate.number_in("delta", delta, "[0, 1)")
        counted = charges if isinstance(charges, tuple) else tuple(charges.items())
        if not counted:
            return PrivacyGuarantee(epsilon=0.0)
        # A cache of long histories would be large, and their blocks are cached.
        return (_composed if len(counted) <= _BLOCK else _composed.__wrapped__)(counted, delta)

    def repeated(self, times: int) -> Charge:
        """Returns the charge of independent uses of a user's labels, one per label."""
        if times == 1:
            return self
        event = {"class": "SelfComposedDpEvent", "event": self.event_fields, "count": times}
        return Charge(times * self.epsilon, times * self.delta, event, self.assumptions)

    def for_group(self, group_size: float) -> Charge:
        """Returns the charge of one release for all labels of a user.

        They move it as far as ``group_size`` labels do. Gaussian noise is so much smaller relative
        to the sensitivity; other noise costs what ``group_privacy`` states.
        """
        if group_size <= 1.0:
            return self
        fields = self.event_fields
        if fields["class"] == "GaussianDpEvent" and 0.0 < self.delta:
            ratio = 0.5 * fields["noise_multiplier"] / group_size
            epsilon = gaussian_epsilon(ratio, self.delta, 1.0)
            return Charge(epsilon, self.delta, EventFields.gaussian(ratio), self.assumptions)
        one = PrivacyGuarantee(self.epsilon, self.delta)
        group = group_privacy(one, math.ceil(group_size))
        event = EventFields.approximate(group.epsilon, group.delta)
        return Charge(group.epsilon, group.delta, event, self.assumptions)

    @classmethod
    def unknown(cls, *reasons: str) -> Charge:
        """Returns an infinite charge, with the reasons why the cost of a use is unknown."""
        notes = tuple(Assumption("not-promised", "nobody", text) for text in reasons)
        return cls(math.inf, 0.0, EventFields.NOT_PRIVATE, notes)


@functools.lru_cache(maxsize=4096)
def _composed(charges: CountedCharges, delta: float) -> PrivacyGuarantee:
    total = _total(charges)
    rests_on, spent_delta = total.assumptions, float(total.delta)
    basic = math.inf
    if total.is_finite and spent_delta <= delta * (1.0 + ROUNDING):
        basic = float(total.epsilon)
    # An event with a count composes several uses in one charge.
    several = total.uses > 1 or any("count" in charge.event_fields for charge, _ in charges)
    if delta > 0.0 and total.is_finite and (several or math.isinf(basic)):
        tight = _tight_epsilon(_total(charges, with_events=True), delta)
        if tight < basic * _WORTH_IT:
            return PrivacyGuarantee(epsilon=tight, delta=delta, assumptions=(FIXED, *rests_on))
    if math.isfinite(basic):
        return PrivacyGuarantee(epsilon=basic, delta=spent_delta, assumptions=rests_on)
    if total.is_finite:
        text = f"Nothing is promised at delta={delta:g}: the uses' deltas sum to {spent_delta:g}."
        rests_on = (Assumption("not-promised", "nobody", text), *rests_on)
    return PrivacyGuarantee(epsilon=basic, delta=delta, assumptions=rests_on)


class _Total(NamedTuple):
    """The sums of counted charges, without rounding errors."""

    is_finite: bool
    uses: int
    epsilon: Fraction  # of finite epsilons
    delta: Fraction
    opaque_epsilon: Fraction  # of uses without an event
    opaque_delta: Fraction
    assumptions: tuple[Assumption, ...]
    events: tuple[DpEvent, ...]  # of the other uses

    @classmethod
    def of(cls, charges: CountedCharges, *, with_events: bool) -> _Total:
        finite = [pair for pair in charges if math.isfinite(pair[0].epsilon)]
        opaque = [pair for pair in finite if pair[0].event_text == _OPAQUE]
        events: tuple[DpEvent, ...] = ()
        if with_events:
            from dp_accounting import SelfComposedDpEvent

            others = [pair for pair in charges if pair[0].event_text != _OPAQUE]
            events = tuple(SelfComposedDpEvent(charge.event, count) for charge, count in others)
        return cls(
            len(finite) == len(charges),
            sum(count for charge, count in charges if charge.epsilon or charge.delta),
            _exact_sum((charge.epsilon, count) for charge, count in finite),
            _exact_sum((charge.delta, count) for charge, count in charges),
            _exact_sum((charge.epsilon, count) for charge, count in opaque),
            _exact_sum((charge.delta, count) for charge, count in opaque),
            tuple(dict.fromkeys(note for charge, _ in charges for note in charge.assumptions)),
            events,
        )

    @classmethod
    def together(cls, totals: Iterable[_Total]) -> _Total:
        finite, uses, epsilons, deltas, opaque_epsilons, opaque_deltas, notes, events = zip(
            *totals, strict=True
        )
        joined: tuple[DpEvent, ...] = tuple(itertools.chain.from_iterable(events))
        if joined:
            from tf_labeldp.accounting._losses import fewer_events

            joined = fewer_events(joined)
        return cls(
            all(finite),
            sum(uses),
            sum(epsilons, Fraction()),
            sum(deltas, Fraction()),
            sum(opaque_epsilons, Fraction()),
            sum(opaque_deltas, Fraction()),
            tuple(dict.fromkeys(itertools.chain.from_iterable(notes))),
            joined,
        )


@functools.lru_cache(maxsize=256)
def _total(charges: CountedCharges, *, with_events: bool = False) -> _Total:
    """Returns the sums; one more charge changes few of the blocks that they are summed in."""
    if len(charges) <= _BLOCK:
        return _Total.of(charges, with_events=with_events)
    # This is the largest power of a block below the number of charges. The logarithm of a power may
    # come out slightly below a whole number.
    size = _BLOCK ** math.floor(math.log(len(charges) - 1, _BLOCK) + 1e-9)
    starts = range(0, len(charges), size)
    return _Total.together(
        _total(charges[start : start + size], with_events=with_events) for start in starts
    )


def _exact_sum(counted: Iterable[tuple[float, int]]) -> Fraction:
    """Returns the sum of finite numbers, each times its count.

    Rounded sums would depend on the order of the uses, and on the blocks that they are summed in.
    """
    return sum((Fraction(value) * count for value, count in counted if value), Fraction())


def _tight_epsilon(total: _Total, delta: float) -> float:
    from dp_accounting import ComposedDpEvent

    from tf_labeldp.accounting._losses import epsilon_of

    left = delta - float(total.opaque_delta)
    if not total.events or left <= 0.0:
        return math.inf
    return float(total.opaque_epsilon) + epsilon_of(ComposedDpEvent(total.events), left)


def group_privacy(guarantee: PrivacyGuarantee, group_size: int) -> PrivacyGuarantee:
    """Returns the guarantee for up to k labels replaced together.

    Guarantee:
        (epsilon, delta) for one label is ``(k epsilon, delta (e^(k epsilon) - 1) / (e^epsilon -
        1))`` for k labels. Pure randomized response attains k epsilon. Noise that is added once for
        a user costs less: ``dp_sgd_guarantee(..., privacy_unit="user")``.

    Source: Vadhan 2017, "The complexity of differential privacy", the proof of Lemma 2.2: delta
    grows to ``delta (1 + e^epsilon + ... + e^((k - 1) epsilon))``, which the lemma rounds up to
    ``k e^(k epsilon) delta``, as does ``ghazi2024`` (section 6).

    Args:
        guarantee: the guarantee for one label.
        group_size: k, the most labels of one user, at least 1. Public knowledge.

    Returns:
        The statement for all labels of one user, with one more assumption; for ``group_size=1``
        the guarantee unchanged.

    Raises:
        ValueError: ``group_size`` is below 1, or delta would be 1 or more, which promises nothing.

    Example:
        >>> group_privacy(PrivacyGuarantee(epsilon=0.5), group_size=4).epsilon
        2.0
    """
    k = _validate.integer_at_least("group_size", group_size, 1)
    if k == 1:
        return guarantee
    delta = guarantee.delta
    if delta > 0.0:
        log_delta = math.log(delta) + _log_growth(guarantee.epsilon, k)
        if not log_delta < 0.0:
            raise ValueError(
                f"expected a delta below 1 for {k} labels together, got 1 or more from epsilon="
                f"{guarantee.epsilon:g} and delta={delta:g}. Start from item_budget_for_group."
            )
        delta = math.exp(log_delta)
    # A statement about users must not assume one example per person.
    assumptions = (
        FEATURES_OF_USERS if note.code == FEATURES_OF_USERS.code else note
        for note in guarantee.assumptions
        if note.code != "one-example-per-set"
    )
    note = Assumption("examples-per-user", "holder", f"No user has more than {k} examples.")
    return dataclasses.replace(
        guarantee,
        adaptive=_for_group(guarantee.adaptive, k),
        assumptions=tuple(dict.fromkeys(assumptions)),
        epsilon=k * guarantee.epsilon,
        delta=delta,
        unit=f"{UNITS['user']} (at most {k} examples)",
        num_units=None,
    ).with_assumptions([note])


def _for_group(figure: tuple[float, float] | None, k: int) -> tuple[float, float] | None:
    if figure is None:
        return None
    epsilon, delta = figure
    log_delta = math.log(delta) + _log_growth(epsilon, k) if delta else -math.inf
    return (k * epsilon, math.exp(log_delta)) if log_delta < 0.0 else None


def item_budget_for_group(budget: PrivacyBudget, group_size: int) -> PrivacyBudget:
    """Returns the budget for one label from the budget for all labels of one user.

    Guarantee:
        The exact inverse of ``group_privacy``: a guarantee within the returned budget is within
        ``budget`` for k labels, and no larger budget has this property.

    Args:
        budget: budget for all labels of one user.
        group_size: as for ``group_privacy``, with the same errors.

    Example:
        >>> item_budget_for_group(PrivacyBudget(epsilon=2.0), group_size=4)
        PrivacyBudget(epsilon=0.5, delta=0.0)
    """
    if not isinstance(budget, PrivacyBudget):
        raise TypeError(
            f"budget must be a PrivacyBudget, got {type(budget).__name__}. Write "
            "budget=PrivacyBudget(epsilon=1.0)."
        )
    k = _validate.integer_at_least("group_size", group_size, 1)
    epsilon = budget.epsilon / k
    return PrivacyBudget(epsilon, budget.delta * math.exp(-_log_growth(epsilon, k)))


def _log_growth(epsilon: float, k: int) -> float:
    """Returns the log of (e^(k epsilon) - 1) / (e^epsilon - 1), by which delta grows."""
    if epsilon == 0.0:
        return math.log(k)
    return (k - 1) * epsilon + math.log(math.expm1(-k * epsilon) / math.expm1(-epsilon))
