"""Budgets, charges, and what several charges on one example add up to."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tf_labeldp import _validate
from tf_labeldp.accounting._events import composed_epsilon
from tf_labeldp.accounting._guarantee import PrivacyGuarantee

if TYPE_CHECKING:
    from dp_accounting import DpEvent

_ROUNDING = 1e-9
"""Sums of budgets such as ten times 0.1 may miss their total by float rounding, not by more."""

_WORTH_IT = 0.99


class BudgetExceededError(RuntimeError):
    """A draw was refused because it would pass the privacy budget. Nothing was drawn or charged."""


@dataclasses.dataclass(frozen=True)
class PrivacyBudget:
    """The most that may be spent on one unit.

    Attributes:
        epsilon: finite and above zero.
        delta: in [0, 1); with zero, charges add up by basic composition.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> PrivacyBudget(epsilon=2.0).allows(PrivacyGuarantee(epsilon=1.5))
        True
    """

    epsilon: float
    delta: float = 0.0

    def __post_init__(self) -> None:
        """Checks the ranges."""
        object.__setattr__(self, "epsilon", _validate.positive_finite("epsilon", self.epsilon))
        object.__setattr__(self, "delta", _validate.probability_below_one("delta", self.delta))

    def allows(self, guarantee: PrivacyGuarantee) -> bool:
        """Returns whether ``guarantee`` stays within this budget (to float rounding)."""
        slack = 1.0 + _ROUNDING
        return guarantee.epsilon <= self.epsilon * slack and guarantee.delta <= self.delta * slack


@dataclasses.dataclass(frozen=True)
class Charge:
    """What one use of a mechanism costs each unit that it touches.

    Attributes:
        epsilon: of this use alone, finite and above zero.
        delta: of this use alone, in [0, 1).
        event: its ``dp_accounting`` event, for composition at a positive delta.
        assumptions: sentences that must be true for this charge to be all.
        adaptive: whether epsilon itself was set by what an earlier use on the same unit handed out;
            then basic composition alone holds.

    Example:
        >>> from tf_labeldp.mechanisms import RandomizedResponse
        >>> Charge.of(RandomizedResponse(epsilon=1.0, num_classes=3)).epsilon
        1.0
    """

    epsilon: float
    delta: float
    event: DpEvent
    assumptions: tuple[str, ...] = ()
    adaptive: bool = False

    @classmethod
    def of(cls, mechanism: object) -> Charge:
        """Returns the charge of one use of ``mechanism`` (has epsilon, delta and dp_event)."""
        return cls(
            mechanism.epsilon,  # type: ignore[attr-defined]
            mechanism.delta,  # type: ignore[attr-defined]
            mechanism.dp_event(),  # type: ignore[attr-defined]
            tuple(getattr(mechanism, "assumptions", ())),
            bool(getattr(mechanism, "adaptive_epsilon", False)),
        )


def compose_charges(charges: Sequence[Charge], delta: float = 0.0) -> PrivacyGuarantee:
    """Returns what a sequence of charges on the *same* unit adds up to.

    Two theorems are tried; the second is stated where it saves at least 1 % of epsilon, since its
    statement rests on one assumption more and on delta:

    * basic composition (Dwork and Roth 2014, Theorem 3.16): epsilons and deltas add up; holds for
      mechanisms chosen adaptively, also when the number of uses is (Rogers et al. 2016);
    * composition of privacy loss distributions through ``dp_accounting``, for ``delta > 0`` and two
      or more uses, none of them ``adaptive``; the statement then says that the mechanisms were
      fixed in advance.

    Args:
        charges: the uses, in any order; may be empty.
        delta: the delta of the statement, in [0, 1).

    Returns:
        A ``PrivacyGuarantee`` at ``delta`` (at zero if nothing was charged); epsilon is infinite
        where no theorem gives a bound at this delta.

    Example:
        >>> from tf_labeldp.accounting import pure_dp_event
        >>> one = Charge(0.5, 0.0, pure_dp_event(0.5))
        >>> compose_charges([one] * 4).epsilon
        2.0
    """
    delta = _validate.probability_below_one("delta", delta)
    if not charges:
        return PrivacyGuarantee(epsilon=0.0, delta=0.0)
    rests_on = tuple(dict.fromkeys(text for charge in charges for text in charge.assumptions))
    spent_delta = math.fsum(charge.delta for charge in charges)
    basic = math.inf
    if spent_delta <= delta * (1.0 + _ROUNDING):
        basic = math.fsum(charge.epsilon for charge in charges)
    fixed = not any(charge.adaptive for charge in charges)
    if delta > 0.0 and fixed and (len(charges) > 1 or math.isinf(basic)):
        tight = composed_epsilon([charge.event for charge in charges], delta)
        if tight < basic * _WORTH_IT:
            note = (
                "the mechanisms and the number of their uses were fixed in advance, not chosen "
                "after seeing earlier noisy labels"
            )
            return PrivacyGuarantee(epsilon=tight, delta=delta, assumptions=(note, *rests_on))
    stated_delta = spent_delta if math.isfinite(basic) else delta
    return PrivacyGuarantee(epsilon=basic, delta=stated_delta, assumptions=rests_on)
