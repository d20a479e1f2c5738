"""Charges, budgets, and what several charges on one label add up to."""

from __future__ import annotations

import math
import pickle
import warnings
from collections import Counter
from fractions import Fraction

import dp_accounting
import pytest

from tf_labeldp.accounting import Charge, PrivacyBudget, PrivacyGuarantee
from tf_labeldp.plugins import EventFields, gaussian_epsilon


def charges(*epsilons):
    return [Charge(epsilon, 0.0, EventFields.randomized_response(epsilon)) for epsilon in epsilons]


def test_nothing_charged_costs_nothing():
    assert Charge.composed(Counter([]), delta=1e-5) == PrivacyGuarantee(epsilon=0.0, delta=0.0)


def test_the_delta_of_those_who_name_none():
    for num_labels, delta in ((1, 1e-5), (9_999, 1e-5), (20_000, 5e-6), (10**7, 1e-8)):
        assert PrivacyBudget.default_delta(num_labels) == pytest.approx(delta, rel=1e-15)


@pytest.mark.parametrize("epsilons", [(1.0,), (0.1,) * 10, (0.3, 2.0, 1e-3)])
def test_basic_composition_adds_up_exactly(epsilons):
    total = Charge.composed(Counter(charges(*epsilons)))
    assert total == PrivacyGuarantee(epsilon=math.fsum(epsilons), delta=0.0)
    assert total.assumptions == ()


def test_basic_composition_adds_up_delta():
    event = dp_accounting.GaussianDpEvent(10.0)
    spent = [Charge(0.5, 1e-6, event), Charge(0.25, 2e-6, event)]
    total = Charge.composed(Counter(spent), delta=3e-6)
    assert total.delta == pytest.approx(3e-6) and total.epsilon <= 0.75
    # No theorem gives a finite epsilon at delta zero for charges that need more.
    assert Charge.composed(Counter(spent), delta=0.0).epsilon == math.inf


def test_counted_charges_are_charges_one_by_one():
    """Equal ones are counted together, in whatever order they came."""
    one, other = charges(0.1, 0.2)
    for delta in (0.0, 1e-5):
        mixed = Charge.composed(Counter([one, other, one, one, other]), delta)
        assert mixed == Charge.composed(((one, 3), (other, 2)), delta)
        assert (
            mixed.epsilon == Charge.composed(Counter([other, other, one, one, one]), delta).epsilon
        )
    assert Charge.composed(((one, 10),), 0.0).epsilon == math.fsum([0.1] * 10)


def test_a_trillion_uses_are_added_up_at_once_and_rounded_once():
    one, other = (
        Charge(0.1, 0.0, EventFields.randomized_response(0.1)),
        Charge(1e-9, 0.0, EventFields.randomized_response(1e-9)),
    )
    counted = ((one, 10**12 + 7), (other, 3))
    exact = float(Fraction(0.1) * (10**12 + 7) + Fraction(1e-9) * 3)
    assert Charge.composed(counted, 0.0).epsilon == exact


def test_charges_that_promise_nothing_add_up_to_nothing():
    """The reasons come with them."""
    unknown = Charge.unknown("the first reason", "the second")
    assert (unknown.epsilon, unknown.delta) == (math.inf, 0.0)
    for delta in (0.0, 1e-5, 0.5):
        for spent in ([unknown], [*charges(0.1), unknown], [unknown, *charges(0.1) * 20]):
            total = Charge.composed(Counter(spent), delta)
            assert total.epsilon == math.inf and not total.is_private
            assert {"the first reason", "the second"} <= set(total.assumptions)


@pytest.mark.parametrize("delta", [1e-6, 1e-3])
def test_charge_of_an_event_is_that_of_the_accountant(delta):
    event = EventFields.gaussian(5.0).dp_event()
    found = Charge.of_event(event, delta, ["a note"])
    assert found == Charge(found.epsilon, delta, event, ("a note",))
    exact = gaussian_epsilon(5.0, delta, 1.0)
    assert exact <= found.epsilon <= exact * (1 + 1e-3)


@pytest.mark.parametrize(
    ("event", "delta"),
    [(EventFields.gaussian(5.0).dp_event(), 0.0), (dp_accounting.NonPrivateDpEvent(), 1e-5)],
    ids=["no delta", "not private"],
)
def test_charge_of_an_event_without_an_epsilon_says_why(event, delta):
    found = Charge.of_event(event, delta, ["a note"])
    assert found.epsilon == math.inf and found.event == event
    first, second = found.assumptions
    assert first.startswith(f"Nothing is promised: no finite epsilon is known at delta={delta:g}")
    assert second == "a note"


def tight(uses, epsilon, delta):
    """The accountant's epsilon of some pure uses."""
    event = dp_accounting.SelfComposedDpEvent(
        EventFields.randomized_response(epsilon).dp_event(), uses
    )
    return Charge.of_event(event, delta).epsilon


def test_charges_of_events_in_lists_can_be_counted():
    """``dp_accounting`` takes lists and tuples alike; equal charges are to be equal."""
    parts = [EventFields.randomized_response(0.1).dp_event(), EventFields.gaussian(5.0).dp_event()]
    of_list, of_tuple = (
        Charge(1.0, 1e-5, dp_accounting.ComposedDpEvent(kind(parts)), ["a note"])
        for kind in (list, tuple)
    )
    assert of_list == of_tuple and hash(of_list) == hash(of_tuple)
    row = dp_accounting.SelfComposedDpEvent(
        dp_accounting.ComposedDpEvent([EventFields.randomized_response(0.1).dp_event()]), 2
    )
    total = Charge.composed(Counter([Charge(0.2, 0.0, row)] * 2))
    assert total.epsilon == 0.4


def test_one_use_that_is_many_in_itself_is_composed_finely():
    """An event with a count, such as a row of labels, is not one use."""
    row = dp_accounting.SelfComposedDpEvent(EventFields.randomized_response(0.1).dp_event(), 100)
    total = Charge.composed(Counter([Charge(10.0, 0.0, row)]), delta=1e-5)
    assert total.epsilon == tight(100, 0.1, 1e-5) < 6.0
    assert total.delta == 1e-5 and "fixed in advance" in total.assumptions[0]


def test_many_uses_at_a_positive_delta_cost_less_and_say_on_what_they_rest():
    spent = charges(*[0.1] * 100)
    total = Charge.composed(Counter(spent), delta=1e-5)
    assert total.epsilon == tight(100, 0.1, 1e-5) < 6.0 < Charge.composed(Counter(spent)).epsilon
    assert total.delta == 1e-5
    assert len(total.assumptions) == 1
    assert "fixed in advance" in total.assumptions[0] and "fixed in advance" in str(total)


def test_budget_edge():
    budget = PrivacyBudget(epsilon=1.0)
    assert budget.allows(Charge.composed(Counter(charges(*[0.1] * 10))))
    assert budget.allows(PrivacyGuarantee(epsilon=sum([0.1] * 10)))  # 0.9999999999999999
    assert PrivacyBudget(0.3).allows(PrivacyGuarantee(epsilon=0.1 + 0.1 + 0.1))  # just above 0.3
    assert not budget.allows(PrivacyGuarantee(epsilon=1.0 + 1e-6))
    assert not budget.allows(PrivacyGuarantee(epsilon=0.5, delta=1e-12))
    assert not budget.allows(PrivacyGuarantee(epsilon=math.inf))
    assert str(PrivacyBudget(2, 1e-6)) == "epsilon=2, delta=1e-06"
    budget = PrivacyBudget(epsilon=1.0, delta=1e-5)
    assert budget.allows(PrivacyGuarantee(epsilon=1.0, delta=1e-5))
    assert not budget.allows(PrivacyGuarantee(epsilon=1.0, delta=1.1e-5))


def test_bad_budgets():
    for epsilon in (0, -0.5, math.nan, math.inf):
        with pytest.raises(ValueError, match="epsilon must be finite and above zero"):
            PrivacyBudget(epsilon)
    for delta in (-1e-9, 1.0, math.nan):
        with pytest.raises(ValueError, match=r"delta must be in \[0, 1\), got"):
            PrivacyBudget(1.0, delta)
    with pytest.raises(TypeError, match="epsilon must be a number above zero, got str"):
        PrivacyBudget("1")
    with pytest.raises(TypeError, match=r"delta must be a number in \[0, 1\), got bool"):
        PrivacyBudget(1.0, True)


def test_a_tiny_gain_is_not_worth_a_delta_and_an_assumption():
    four = [Charge(1.0, 0.0, EventFields.randomized_response(1.0))] * 4
    assert tight(4, 1.0, 1e-5) < 4.0
    assert Charge.composed(Counter(four), 1e-5) == PrivacyGuarantee(epsilon=4.0, delta=0.0)


@pytest.mark.parametrize("arguments", [(100.0,), (1.0, 0.5)])
def test_a_budget_that_protects_nothing_is_told(arguments):
    with pytest.warns(UserWarning, match="protects next to nothing") as caught:
        PrivacyBudget(*arguments)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PrivacyBudget(20.0, 0.009)


@pytest.mark.parametrize(
    "event",
    [
        dp_accounting.NoOpDpEvent(),
        dp_accounting.NonPrivateDpEvent(),
        EventFields.randomized_response(0.3).dp_event(),
        EventFields.gaussian(2.0).dp_event(),
        dp_accounting.SelfComposedDpEvent(EventFields.randomized_response(0.3).dp_event(), 3),
    ],
    ids=lambda event: type(event).__name__,
)
def test_a_charge_has_the_same_event_from_its_fields(event):
    epsilon = 0.0 if event == dp_accounting.NoOpDpEvent() else 0.5
    charge = Charge(epsilon, 0.0, event, ("a note",))
    assert charge.event == event and type(charge.event) is type(event)
    same = Charge(epsilon, 0.0, charge.event_fields, ("a note",))
    assert same == charge and hash(same) == hash(charge) and same.event == event
    assert charge != Charge(0.5, 0.0, EventFields.randomized_response(0.4), ("a note",))
    assert charge.with_assumptions(()) == Charge(epsilon, 0.0, event)
    assert charge != "a charge"


@pytest.mark.parametrize(
    "fields",
    [
        {"class": "SecretDpEvent"},
        {"class": "GaussianDpEvent"},
        {"class": "GaussianDpEvent", "noise_multiplier": 1.0, "more": 2},
        {},
    ],
)
def test_fields_of_no_event_are_refused(fields):
    with pytest.raises((ValueError, TypeError)):
        Charge(0.5, 0.0, fields)


def test_a_charge_out_of_range_is_refused():
    for epsilon, delta in ((-1e-3, 0.0), (0.1, -1e-6), (0.1, 1.0)):
        with pytest.raises(ValueError, match=r"epsilon|delta"):
            Charge(epsilon, delta, EventFields.randomized_response(0.5))


def test_hundreds_of_different_charges_add_up_as_a_few_do():
    """Their sums are taken in blocks: exact, whatever the place of a block."""
    ratios = [50.0 + number for number in range(300)]
    used = [Charge(0.1 + 1.0 / ratio, 1e-9, EventFields.gaussian(ratio)) for ratio in ratios]
    counted = tuple((charge, 1 + number % 3) for number, charge in enumerate(used))
    basic = sum((Fraction(charge.epsilon) * count for charge, count in counted), Fraction())
    spent = sum((Fraction(charge.delta) * count for charge, count in counted), Fraction())
    stated = Charge.composed(counted, 1e-5)
    precision = math.fsum(
        count / ratio**2 for ratio, (_, count) in zip(ratios, counted, strict=True)
    )
    exact = gaussian_epsilon(1.0, 1e-5, math.sqrt(precision))
    assert exact <= stated.epsilon <= exact * (1.0 + 1e-8) < float(basic)
    pure = tuple((Charge(each.epsilon, 0.0, each.event), count) for each, count in counted)
    assert Charge.composed(pure, 0.0).epsilon == float(basic)
    noted = Charge.composed((*counted, (Charge.unknown("because"), 1)), 1e-5)
    assert math.isinf(noted.epsilon) and "because" in noted.assumptions
    assert spent < 1e-5  # else basic composition would promise nothing


def test_a_charge_has_its_hash_in_its_process_alone():
    [charge] = charges(0.5)
    hash(charge)
    copy = pickle.loads(pickle.dumps(charge))
    assert "_hash" in vars(charge) and "_hash" not in vars(copy)
    assert copy == charge and hash(copy) == hash(charge) and len({copy, charge}) == 1
