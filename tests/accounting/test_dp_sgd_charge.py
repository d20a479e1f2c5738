"""What steps of DP-SGD cost, alone and charged to a vault."""

from __future__ import annotations

import math

import pytest

from tf_labeldp.accounting import (
    BudgetExceededError,
    Charge,
    PrivacyBudget,
    Receipts,
    dp_sgd_charge,
    dp_sgd_guarantee,
)
from tf_labeldp.plugins import EventFields
from tf_labeldp.vault import PrivateLabels, Store

DELTA = 1e-5
LABELS = [0, 2, 1, 1, 2, 0]


def epoch(steps=59, **changes):
    fields = {
        "noise_multiplier": 10.0,
        "sampling_probability": 0.02,
        "steps": steps,
        "delta": DELTA,
    }
    return dp_sgd_charge(**{**fields, **changes})


def vault(epsilon=1.0, delta=DELTA, **arguments):
    budget = PrivacyBudget(epsilon, delta)
    return PrivateLabels(LABELS, num_classes=3, budget=budget, **arguments)


def charged(labels, number, charge=None, **changes):
    """Charges an epoch of this number."""
    charge = epoch() if charge is None else charge
    return labels.charge(charge, what="an epoch", key=f"dp-sgd/{number}", **changes)


def assumptions_of_epoch(**changes):
    """Those of the guarantee, without the public features and the number of steps."""
    _, *notes = dp_sgd_guarantee(10.0, 0.02, 59, DELTA, **changes).assumptions
    assert [" of 59." in note for note in notes] == [True, False, False]
    return tuple(note.replace(" of 59.", ".") for note in notes)


def test_its_epsilon_is_that_of_its_guarantee():
    stated = dp_sgd_guarantee(10.0, 0.02, 59, DELTA)
    notes = assumptions_of_epoch()
    assert epoch() == Charge(stated.epsilon, DELTA, EventFields.dp_sgd(10.0, 0.02, 59), notes)
    labels = vault()
    charged(labels, 0)
    assert labels.guarantee().epsilon == stated.epsilon and labels.guarantee().delta == DELTA
    assert set(notes) <= set(labels.guarantee().assumptions)
    assert any("Poisson sampling" in note for note in notes)


def test_a_charge_by_user_says_so():
    by_user = epoch(privacy_unit="user")
    assert by_user.epsilon == epoch().epsilon and by_user.event == epoch().event
    assert by_user.assumptions == assumptions_of_epoch(privacy_unit="user")
    labels = vault()
    assert charged(labels, 0, by_user, unit="user", num_units=3).num_units == 3
    statement = labels.guarantee()
    assert statement.num_units == 3
    assert statement.unit == "all labels of one user"
    assert "The features and the user of each example are public." in (statement.assumptions)


def test_the_receipt_says_what_was_charged():
    labels = vault(store=Store(actor="me"))
    receipt = charged(labels, 3)
    assert receipt.labels == labels.label_set and receipt.charge == epoch()
    assert (receipt.what, receipt.kind, receipt.key) == ("an epoch", "steps", "dp-sgd/3")
    assert (receipt.unit, receipt.relation, receipt.delta) == ("label", "replace_label", DELTA)
    assert receipt.examples is None and receipt.num_examples == 6
    assert receipt.output_digest is None and receipt.actor == "me"
    assert not (receipt.seeded or receipt.metrics_reported or receipt.sample_weights)
    assert labels.receipts == (receipt,)
    assert not labels.has_draw("dp-sgd/3")  # there is nothing to be had again
    assert Receipts([receipt]).guarantee() == labels.guarantee()


def test_noise_that_delta_alone_covers_is_charged_all_the_same():
    """Nothing is to be seen of one step, but of many."""
    one = epoch(noise_multiplier=3e3, steps=1)
    assert one.epsilon == 0.0 == dp_sgd_guarantee(3e3, 0.02, 1, DELTA).epsilon
    labels = vault()
    for number in range(100):
        charged(labels, number, one)
    many = dp_sgd_guarantee(3e3, 0.02, 100, DELTA).epsilon
    assert many > 0.0 and labels.guarantee().epsilon == many


@pytest.mark.parametrize("changes", [{"noise_multiplier": 1e-3}, {"delta": 1e-15}])
def test_noise_that_is_too_little_promises_nothing_and_says_why(changes):
    charge = epoch(**changes)
    assert charge.epsilon == math.inf
    reason, *notes = charge.assumptions
    assert reason.startswith("Nothing is promised: no finite epsilon is known at delta=1e-")
    assert "more noise, or a larger delta" in reason
    assert tuple(notes) == assumptions_of_epoch()
    labels = vault(epsilon=1e9)
    with pytest.raises(BudgetExceededError, match=r"together epsilon=inf"):
        charged(labels, 0, charge)
    assert labels.receipts == ()


def test_steps_past_the_budget_are_refused_and_nothing_is_charged():
    allowed = dp_sgd_guarantee(10.0, 0.02, 3 * 59, DELTA).epsilon
    labels = vault(epsilon=allowed * 1.001)
    labels.check_budget([epoch()] * 3)
    with pytest.raises(BudgetExceededError):
        labels.check_budget([epoch()] * 4)
    with labels.reserve({"dp-sgd": [epoch()] * 3}):
        for number in range(3):
            charged(labels, number)
        with pytest.raises(BudgetExceededError, match=r"an epoch would be .*Take fewer steps"):
            charged(labels, 3)
    assert len(labels.receipts) == 3
    assert labels.guarantee().epsilon == allowed


def test_epochs_that_were_not_reserved_together_are_plans_of_their_own():
    allowed = dp_sgd_guarantee(10.0, 0.02, 3 * 59, DELTA).epsilon
    labels = vault(epsilon=allowed * 1.001)
    for number in range(2):
        charged(labels, number)
    with pytest.raises(BudgetExceededError, match=r"Reserve uses together"):
        charged(labels, 2)
    assert len(labels.receipts) == 2


def test_steps_of_the_same_name_are_other_steps(tmp_path):
    """They are run again with fresh noise, so they are charged again."""
    labels = vault(store=tmp_path / "store")
    first, second = charged(labels, 0), charged(labels, 0)
    assert first.id != second.id and len(labels.receipts) == 2
    twice = dp_sgd_guarantee(10.0, 0.02, 2 * 59, DELTA).epsilon
    assert labels.guarantee().epsilon == twice
    assert vault(store=tmp_path / "store").guarantee().epsilon == twice


def test_what_is_no_charge_or_no_unit_is_refused():
    labels = vault()
    with pytest.raises(TypeError, match=r"charge must be an accounting\.Charge, got"):
        labels.charge(EventFields.dp_sgd(10.0, 0.02, 59).dp_event(), what="steps")
    with pytest.raises(ValueError, match="unit must be one of"):
        charged(labels, 0, unit="group")
    assert labels.receipts == ()
