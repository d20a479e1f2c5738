"""Charges, budgets, and what several charges on one label add up to."""

from __future__ import annotations

import dataclasses
import itertools
import math

import dp_accounting
import pytest

from tf_labeldp.accounting import (
    Charge,
    PrivacyBudget,
    PrivacyGuarantee,
    compose_charges,
    composed_epsilon,
    gaussian_event,
    pure_dp_event,
)
from tf_labeldp.mechanisms import RRTopK


def charges(*epsilons):
    return [Charge(epsilon, 0.0, pure_dp_event(epsilon)) for epsilon in epsilons]


def test_charge_of_a_mechanism():
    mechanism = RRTopK(0.8, 5, 2)
    assert Charge.of(mechanism) == Charge(0.8, 0.0, mechanism.dp_event())


def test_nothing_charged_costs_nothing():
    assert compose_charges([], delta=1e-5) == PrivacyGuarantee(epsilon=0.0, delta=0.0)


@pytest.mark.parametrize("epsilons", [(1.0,), (0.1,) * 10, (0.3, 2.0, 1e-3)])
def test_basic_composition_adds_up_exactly(epsilons):
    total = compose_charges(charges(*epsilons))
    assert total == PrivacyGuarantee(epsilon=math.fsum(epsilons), delta=0.0)
    assert total.assumptions == ()


def test_basic_composition_adds_up_delta():
    event = dp_accounting.GaussianDpEvent(10.0)
    spent = [Charge(0.5, 1e-6, event), Charge(0.25, 2e-6, event)]
    total = compose_charges(spent, delta=3e-6)
    assert total.delta == pytest.approx(3e-6) and total.epsilon <= 0.75
    # No theorem gives a finite epsilon at delta zero for charges that need more.
    assert compose_charges(spent, delta=0.0).epsilon == math.inf


def test_epsilons_that_depend_on_earlier_uses_add_up_at_any_delta():
    """The finer theorem assumes charges that were fixed in advance."""
    spent = charges(*[0.1] * 100)
    one = dataclasses.replace(spent[0], adaptive=True)
    total = compose_charges([*spent[1:], one], delta=1e-5)
    assert total == PrivacyGuarantee(epsilon=math.fsum([0.1] * 100))
    gaussian = Charge(0.5, 1e-5, gaussian_event(10.0))
    assert compose_charges([gaussian] * 2, delta=1e-5).epsilon < math.inf
    assert compose_charges([gaussian] * 2 + [one], delta=1e-5).epsilon == math.inf


def test_one_use_stays_as_it_is_at_a_positive_delta():
    total = compose_charges(charges(1.0), delta=1e-5)
    assert total == PrivacyGuarantee(epsilon=1.0, delta=0.0)


def test_many_uses_at_a_positive_delta_cost_less_and_say_on_what_they_rest():
    spent = charges(*[0.1] * 100)
    total = compose_charges(spent, delta=1e-5)
    tight = composed_epsilon([charge.event for charge in spent], 1e-5)
    assert total.epsilon == tight < 6.0 < compose_charges(spent).epsilon
    assert total.delta == 1e-5
    assert len(total.assumptions) == 1
    assert "fixed in advance" in total.assumptions[0] and "fixed in advance" in str(total)


def test_the_smaller_of_both_theorems_is_stated():
    spent = charges(3.0, 3.0)  # the grid of the accountant rounds this above basic composition
    total = compose_charges(spent, delta=1e-12)
    assert total.epsilon <= 6.0
    if total.epsilon == 6.0:
        assert total.delta == 0.0 and total.assumptions == ()


def test_more_charges_never_cost_less():
    for delta in (0.0, 1e-6):
        sums = [compose_charges(charges(*[0.4] * n), delta).epsilon for n in range(1, 12)]
        assert all(after > before for before, after in itertools.pairwise(sums))


def test_budget_edge():
    budget = PrivacyBudget(epsilon=1.0)
    assert budget.allows(compose_charges(charges(*[0.1] * 10)))
    assert budget.allows(PrivacyGuarantee(epsilon=sum([0.1] * 10)))  # 0.9999999999999999
    assert PrivacyBudget(0.3).allows(PrivacyGuarantee(epsilon=0.1 + 0.1 + 0.1))  # just above 0.3
    assert not budget.allows(PrivacyGuarantee(epsilon=1.0 + 1e-6))
    assert not budget.allows(PrivacyGuarantee(epsilon=0.5, delta=1e-12))
    assert not budget.allows(PrivacyGuarantee(epsilon=math.inf))


def test_budget_with_delta():
    budget = PrivacyBudget(epsilon=1.0, delta=1e-5)
    assert budget.allows(PrivacyGuarantee(epsilon=1.0, delta=1e-5))
    assert not budget.allows(PrivacyGuarantee(epsilon=1.0, delta=1.1e-5))


@pytest.mark.parametrize("epsilon", [0, -0.5, math.nan, math.inf])
def test_budget_refuses_epsilon(epsilon):
    with pytest.raises(ValueError, match="epsilon must be finite and above zero"):
        PrivacyBudget(epsilon)


@pytest.mark.parametrize("delta", [-1e-9, 1.0, math.nan])
def test_budget_refuses_delta(delta):
    with pytest.raises(ValueError, match=r"delta must be in \[0, 1\), got"):
        PrivacyBudget(1.0, delta)


def test_budget_refuses_other_types():
    with pytest.raises(TypeError, match="epsilon must be a number above zero, got str"):
        PrivacyBudget("1")
    with pytest.raises(TypeError, match=r"delta must be a number in \[0, 1\), got bool"):
        PrivacyBudget(1.0, True)


def test_a_tiny_gain_is_not_worth_a_delta_and_an_assumption():
    four = [Charge(1.0, 0.0, pure_dp_event(1.0))] * 4
    assert composed_epsilon([charge.event for charge in four], 1e-5) < 4.0
    assert compose_charges(four, 1e-5) == PrivacyGuarantee(epsilon=4.0, delta=0.0)
