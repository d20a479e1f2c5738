"""Privacy filters: budgets for uses whose parameters depend on earlier outputs.

A filter decides before each plan, from the parameters of this plan and of those before it, whether
the plan is allowed. A plan is a set of uses that were fixed together before the first of them; a
use that belongs to none is a plan of its own. docs/theory.md has the proofs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from tf_labeldp.accounting.budget import ROUNDING, Charge, CountedCharges, PrivacyBudget
from tf_labeldp.accounting.events import EventFields
from tf_labeldp.accounting.gaussian import gaussian_sigma

_SHARES = {
    "gaussian": {"gaussian": 0.98, "moments": 0.01, "sum": 0.01},
    "known": {"moments": 0.9, "sum": 0.1},
    "claimed": {"sum": 1.0},
}
"""Shares of delta of the filters in parallel, by the kind of the first plan that needs a delta. At
98 % of it, Gaussian releases cost at most 0.15 % of epsilon more."""
_EARLY = 0.02
"""Share of delta of the filter of moments that starts where pure plans of at most ``_SMALL`` of
epsilon pass it together, if ``_TIMES`` as many like the last one fit into it as into the sum. A
single small release leaves the whole of delta."""
_SMALL, _TIMES = 0.05, 2.0
_WORTH_DELTA = 0.75
"""A pure plan needs a delta if its exact composition is below this share of its sum."""
_OF_REST = 0.75
"""Share of the sum filter's remaining delta for a plan, if the plan fits at it: after a plan that
took all of it, no other one with a delta fits."""
_SLACK = 1.0 + ROUNDING
_ORDERS = np.geomspace(0.5, 2000.0, 64)
"""Orders of the moments of privacy losses, from which the first plan selects one. The best one of
small Gaussian releases is ``2 log(1 / delta) / epsilon``: at a delta of 1e-5, the range serves
epsilons from 0.012 to 46."""


class _PlanCosts(NamedTuple):
    """A plan, with the costs that the filters add up."""

    charges: CountedCharges
    pure: float  # sum of epsilons; infinite with a delta
    claimed: float  # sum of the deltas of uses without an event
    kind: str  # a key of _SHARES

    @classmethod
    def of(cls, charges: CountedCharges) -> _PlanCosts:
        if not any(charge.delta for charge, _ in charges):
            kind = "known" if math.isfinite(_epsilon_sum(charges)) else "claimed"
            return cls(charges, _epsilon_sum(charges), 0.0, kind)
        opaque = [
            (charge, count)
            for charge, count in charges
            if charge.event_fields == EventFields.NOT_PRIVATE
        ]
        kind = "gaussian" if math.isfinite(_squares(charges)) else "known"
        claimed = math.fsum(charge.delta * count for charge, count in opaque)
        return cls(charges, math.inf, claimed, "claimed" if opaque else kind)


@dataclasses.dataclass(frozen=True)
class _Pure:
    """Epsilons of pure plans add up; the first plan that needs a delta starts other filters."""

    epsilon: float  # of the budget
    delta: float
    spent: float = 0.0
    name = "the sum of epsilons"

    def after(self, plan: _PlanCosts, used: _PlanCosts) -> tuple[_Filter, ...]:
        if self.spent + plan.pure > self.epsilon * _SLACK or self._is_worth_delta(plan):
            return self._others(plan, used)
        spent, small = self.spent + used.pure, _SMALL * self.epsilon * _SLACK
        is_passed = max(self.spent, plan.pure) <= small < self.spent + plan.pure
        if is_passed and self.delta > 0.0:
            left = self.epsilon - self.spent
            early = _Moments.first(plan, left, _EARLY * self.delta)
            if early.left * plan.pure > _TIMES * left * early.cost(plan):
                rest = _Pure(self.epsilon, (1.0 - _EARLY) * self.delta, spent)
                return rest, *early.after(plan, used)
        return (dataclasses.replace(self, spent=spent),)

    def _is_worth_delta(self, plan: _PlanCosts) -> bool:
        several = sum(count for _, count in plan.charges) > 1
        exact = Charge.composed(plan.charges, self.delta).epsilon if several else plan.pure
        return exact < _WORTH_DELTA * plan.pure

    def _others(self, plan: _PlanCosts, used: _PlanCosts) -> tuple[_Filter, ...]:
        left = self.epsilon - self.spent
        if left <= 0.0 or self.delta == 0.0 or not math.isfinite(_epsilon_sum(plan.charges)):
            return ()
        started: list[_Filter] = []
        for name, share in _SHARES[plan.kind].items():
            delta = share * self.delta
            if name == "sum":
                started.append(_Sum(self.epsilon, delta, self.spent))
            elif name == "moments":
                started.append(_Moments.first(plan, left, delta))
            else:
                started.append(_Gaussian(gaussian_sigma(left, delta, 1.0) ** -2.0))
        within = tuple(found for each in started for found in each.after(plan, used))
        whole = Charge.composed(plan.charges, self.delta)
        fits = whole.epsilon <= left + ROUNDING * self.epsilon
        return (*within, _Whole()) if fits and whole.delta <= self.delta * _SLACK else within

    def remaining(self) -> float:
        return self.epsilon - self.spent


@dataclasses.dataclass(frozen=True)
class _Whole:
    """The first plan that needs a delta, composed exactly: nothing may follow it."""

    name = "the first use that needs a delta, which nothing may follow"

    def after(self, plan: _PlanCosts, used: _PlanCosts) -> tuple[_Filter, ...]:
        del plan, used
        return ()

    def remaining(self) -> float:
        return 0.0


@dataclasses.dataclass(frozen=True)
class _Sum:
    """Epsilons and deltas of plans add up."""

    epsilon: float  # of the budget
    delta: float
    spent: float
    spent_delta: float = 0.0
    name = "the sum of epsilons and deltas"

    def after(self, plan: _PlanCosts, used: _PlanCosts) -> tuple[_Filter, ...]:
        del used  # A plan that is composed exactly is not a sum over its uses.
        left = max(0.0, self.delta * _SLACK - self.spent_delta)
        for share in (_OF_REST, 1.0):
            delta = min(left, plan.claimed + share * max(0.0, left - plan.claimed))
            cost = Charge.composed(plan.charges, delta)
            spent, spent_delta = self.spent + cost.epsilon, self.spent_delta + cost.delta
            if cost.delta <= left and spent <= self.epsilon * _SLACK:
                return (_Sum(self.epsilon, self.delta, spent, spent_delta),)
        return ()

    def remaining(self) -> float:
        return self.epsilon - self.spent


@dataclasses.dataclass(frozen=True)
class _Gaussian:
    """Squares of the parameters mu of Gaussian differential privacy add up."""

    left: float
    name = "the sum of squared precisions of Gaussian noise"

    def after(self, plan: _PlanCosts, used: _PlanCosts) -> tuple[_Filter, ...]:
        spent = _squares(used.charges)
        fits = spent <= self.left + ROUNDING * spent < math.inf
        return (_Gaussian(self.left - spent),) if fits else ()

    def remaining(self) -> float:
        from scipy import special

        half = 0.5 * math.sqrt(max(0.0, self.left))
        return float(special.log_ndtr(half) - special.log_ndtr(-half))


@dataclasses.dataclass(frozen=True)
class _Moments:
    """Logarithms of the moment of one order of privacy losses add up."""

    place: int  # of the order
    left: float
    name = "the moments of privacy losses"

    @classmethod
    def first(cls, plan: _PlanCosts, epsilon: float, delta: float) -> _Moments:
        """Returns the filter of the order at which most plans like this one fit."""
        limits = epsilon * _ORDERS + math.log(delta) - _log_worst(_ORDERS)
        place = int(np.argmax(limits / _log_moments(plan.charges)))
        return cls(place, float(limits[place]))

    def cost(self, plan: _PlanCosts) -> float:
        return float(_log_moments(plan.charges)[self.place])

    def after(self, plan: _PlanCosts, used: _PlanCosts) -> tuple[_Filter, ...]:
        spent = self.cost(used)
        fits = spent <= self.left + ROUNDING * spent < math.inf
        return (_Moments(self.place, self.left - spent),) if fits else ()

    def remaining(self) -> float:
        order = _ORDERS[self.place]
        low, high = 0.0, max(0.0, self.left) + 1.0
        for _ in range(60):
            middle = 0.5 * (low + high)
            # Of randomized response, whose two losses have these probabilities.
            rise, fall = (sign * order * middle + _log_sigmoid(sign * middle) for sign in (1, -1))
            fits = np.logaddexp(rise, fall) <= self.left
            low, high = (middle, high) if fits else (low, middle)
        return low


_Filter = Any


@dataclasses.dataclass(frozen=True)
class PrivacyFilter:
    """The rest of a budget after plans that were chosen adaptively, on one unit.

    Attributes:
        filters: the filters in parallel that all plans so far are within.
    """

    filters: tuple[_Filter, ...]

    @classmethod
    def of(cls, budget: PrivacyBudget) -> PrivacyFilter:
        """Returns the filter of a budget before the first plan."""
        return cls((_Pure(budget.epsilon, budget.delta),))

    @staticmethod
    def after_all(plans: Iterable[CountedCharges], budget: PrivacyBudget) -> PrivacyFilter:
        """Returns the filter of a budget after plans in sequence on the *same* unit.

        Guarantee:
            If each plan is carried out only where the filter after it ``allows`` it, all outputs
            together are (epsilon, delta)-DP for the budget's epsilon and delta, whatever earlier
            outputs the plans and their parameters were chosen by, and wherever they stop.

            Without a delta, epsilons add up. With one, they add up until the first plan that needs
            a delta. From this plan on, filters run in parallel, with shares of delta that add up to
            it; its kind decides which. Plans are allowed while they are all within one filter. The
            first plan is also allowed if it is within the whole of what is left, composed exactly;
            then none follows it.

            * Sum: (epsilon, delta) of each plan, with a delta that is fixed before the plan (Rogers
              et al. 2016).
            * Gaussian: the sum of squared mu stays within that of a Gaussian release of the budget
              (Smith and Thakurta 2022; Koskela, Tobaben and Honkela 2022). An epsilon-DP use is a
              function of a Gaussian release with ``mu = 2 Phi^-1(e^epsilon / (1 + e^epsilon))``.
            * Moments: the sum of ``log E e^(order loss)`` stays within a limit, for one order that
              the first plan selects (Feldman and Zrnic 2021).

        Source: theorem and proof in docs/theory.md; filters, Rogers, Roth, Ullman and Vadhan 2016,
        "Privacy odometers and filters"; Whitehouse et al. 2023, "Fully adaptive composition".

        Args:
            plans: the charges of each plan, in order, each with its number of uses.
            budget: the budget, which was fixed before the first plan.

        Example:
            >>> from tf_labeldp.accounting.events import EventFields
            >>> from tf_labeldp.accounting.budget import Charge
            >>> draw = Charge(1.0, 0.0, EventFields.randomized_response(1.0))
            >>> PrivacyFilter.after_all([((draw, 1),)] * 2, PrivacyBudget(2.0)).allows
            True
            >>> PrivacyFilter.after_all([((draw, 1),)] * 3, PrivacyBudget(2.0)).allows
            False
        """
        return functools.reduce(PrivacyFilter.after, plans, PrivacyFilter.of(budget))

    @staticmethod
    def pure_mu(epsilon: float) -> float:
        """Returns the mu of a Gaussian release of which each epsilon-DP mechanism is a function."""
        from scipy import special

        return -2.0 * float(special.ndtri(special.expit(-epsilon)))

    @property
    def allows(self) -> bool:
        """Whether the plans so far are within the budget."""
        return bool(self.filters)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the filters that the plans so far are within."""
        names = [each.name for each in self.filters]
        return tuple(name for name in names if len(names) == 1 or name != _Whole.name)

    def remaining(self) -> float:
        """Returns the largest epsilon of one more pure use that is allowed."""
        return max((each.remaining() for each in self.filters), default=0.0)

    def after(self, charges: CountedCharges, used: CountedCharges | None = None) -> PrivacyFilter:
        """Returns the filter after one more plan, whose charges are composed exactly.

        ``used`` are the uses that were not given back: a filter that adds up the costs of single
        uses counts these alone.
        """
        plan = _plan_of(charges)
        rest = plan if used is None else _plan_of(used)
        if plan.pure == 0.0:
            return self
        found = (new for each in self.filters for new in each.after(plan, rest))
        return PrivacyFilter(tuple(found))


@functools.lru_cache(maxsize=4096)
def _plan_of(charges: CountedCharges) -> _PlanCosts:
    return _PlanCosts.of(charges)


@functools.lru_cache(maxsize=4096)
def _log_moments(charges: CountedCharges) -> np.ndarray:
    """Returns the logarithms of a plan's moments, at all orders; infinite if unknown."""
    from dp_accounting import SelfComposedDpEvent

    from tf_labeldp.accounting._moments import log_moments

    uses = [SelfComposedDpEvent(charge.event, count) for charge, count in charges]
    return log_moments(uses, _ORDERS)


@functools.lru_cache(maxsize=4096)
def _squares(charges: CountedCharges) -> float:
    """Returns the sum of squared mu; infinite if a use is neither Gaussian nor pure."""
    return math.fsum(
        count
        * (
            _squared_mu(charge.event_fields)
            if charge.delta
            else PrivacyFilter.pure_mu(charge.epsilon) ** 2
        )
        for charge, count in charges
    )


def _epsilon_sum(charges: CountedCharges) -> float:
    return math.fsum(charge.epsilon * count for charge, count in charges)


def _squared_mu(event: EventFields) -> float:
    """Returns the squared mu of a Gaussian event; infinite for another one."""
    if event["class"] == "GaussianDpEvent":
        # The multiplier is relative to half the sensitivity of replacement.
        return (2.0 / event["noise_multiplier"]) ** 2 if event["noise_multiplier"] else math.inf
    if event["class"] == "SelfComposedDpEvent":
        return event["count"] * _squared_mu(event["event"])
    if event["class"] == "ComposedDpEvent":
        return math.fsum(map(_squared_mu, event["events"]))
    return 0.0 if event["class"] == "NoOpDpEvent" else math.inf


def _log_sigmoid(x: float) -> float:
    return -float(np.logaddexp(0.0, -x))


def _log_worst(orders: np.ndarray) -> np.ndarray:
    """Returns the logarithms of the largest ``(1 - e^-x) e^(-order x)`` over x > 0."""
    return orders * np.log(orders) - (orders + 1.0) * np.log(orders + 1.0)
