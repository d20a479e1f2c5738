"""The receipt of DP-SGD steps, alone and in a vault."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from tf_labeldp.accounting import (
    BudgetExceededError,
    Charge,
    PrivacyBudget,
    composed_epsilon,
    dp_sgd_event,
    dp_sgd_guarantee,
)
from tf_labeldp.estimation import HistogramMechanism
from tf_labeldp.mechanisms import DPSGDSteps, RandomizedResponse, deserialize, serialize
from tf_labeldp.private_labels import LabelStoreError, PrivateLabels

DELTA = 1e-5
LABELS = [0, 2, 1, 1, 2, 0]


def epoch(steps=59, **changes):
    fields = {
        "noise_multiplier": 10.0,
        "sampling_probability": 0.02,
        "steps": steps,
        "delta": DELTA,
        "num_classes": 3,
    }
    return DPSGDSteps(**{**fields, **changes})


def vault(epsilon=1.0, delta=DELTA, **arguments):
    budget = PrivacyBudget(epsilon, delta)
    return PrivateLabels(LABELS, num_classes=3, budget=budget, **arguments)


def vault_statement_after(receipt):
    labels = vault()
    labels.release(receipt, key="epoch")
    return labels.guarantee().assumptions


def test_its_epsilon_is_that_of_its_guarantee():
    receipt = epoch()
    stated = dp_sgd_guarantee(10.0, 0.02, 59, DELTA)
    assert receipt.epsilon == stated.epsilon and receipt.guarantee() == stated
    assert receipt.dp_event() == dp_sgd_event(10.0, 0.02, 59)
    event, notes = receipt.dp_event(), receipt.assumptions
    assert Charge.of(receipt) == Charge(stated.epsilon, DELTA, event, notes)
    assert any("Poisson sampling" in note for note in vault_statement_after(receipt))
    assert receipt.guarantee("user").unit == "all labels of one user"


def test_it_hands_out_nothing_and_looks_at_no_label():
    for labels in (LABELS, [99], "not labels", None):
        released = epoch().release(labels)
        assert released.shape == (0,) and released.dtype == np.float64


def test_it_reads_back_from_json():
    receipt = epoch()
    data = json.loads(json.dumps(serialize(receipt)))
    assert data["class_name"] == "DPSGDSteps" and "epsilon" not in data["config"]
    again = deserialize(data)
    assert again == receipt and again.epsilon == receipt.epsilon
    assert DPSGDSteps.from_config(receipt.get_config()) == receipt
    assert dataclasses.replace(receipt, steps=60) != receipt


def test_noise_that_delta_alone_covers_has_an_epsilon_above_zero():
    receipt = epoch(noise_multiplier=1e6, steps=1)
    assert receipt.guarantee().epsilon == 0.0 < receipt.epsilon <= 1e-12


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"delta": 0.0}, ValueError, "delta must be above zero for DP-SGD"),
        ({"noise_multiplier": 0.0}, ValueError, "noise_multiplier must be finite and above zero"),
        ({"noise_multiplier": 1e-3}, ValueError, "no finite epsilon"),
        ({"sampling_probability": 1.1}, ValueError, r"sampling_probability must be in \(0, 1\]"),
        ({"steps": 0}, ValueError, "steps must be at least 1"),
        ({"steps": 5.0}, TypeError, "steps must be an integer"),
        ({"num_classes": 1}, ValueError, "num_classes must be at least 2"),
    ],
)
def test_bad_fields(changes, error, message):
    with pytest.raises(error, match=message):
        epoch(**changes)


def test_delta_has_no_silent_default():
    with pytest.raises(ValueError, match="delta must be above zero for DP-SGD"):
        DPSGDSteps(10.0, 0.02, 59)


def test_epsilon_is_no_argument():
    with pytest.raises(TypeError, match="epsilon"):
        epoch(epsilon=0.1)


def test_five_epochs_cost_what_all_their_steps_cost():
    labels = vault()
    for number in range(5):
        labels.release(epoch(), key=f"dp-sgd/{number}")
    whole = dp_sgd_guarantee(10.0, 0.02, 5 * 59, DELTA)
    assert labels.guarantee().epsilon == whole.epsilon
    assert labels.guarantee().delta == DELTA
    assert whole.epsilon < 5 * epoch().epsilon * 0.6  # and not what they cost by themselves
    assert any("fixed in advance" in text for text in labels.guarantee().assumptions)


def test_one_epoch_costs_its_own_epsilon():
    labels = vault()
    labels.release(epoch(), key="dp-sgd/0")
    assert labels.guarantee().epsilon == epoch().epsilon
    assert not any("fixed in advance" in text for text in labels.guarantee().assumptions)


def test_steps_past_the_budget_are_refused_and_nothing_is_charged():
    allowed = dp_sgd_guarantee(10.0, 0.02, 3 * 59, DELTA).epsilon
    labels = vault(epsilon=allowed * 1.001)
    for number in range(3):
        labels.release(epoch(), key=f"dp-sgd/{number}")
    with pytest.raises(BudgetExceededError, match=r"DPSGDSteps \(epsilon=0\.\d+, delta=1e-05\)"):
        labels.release(epoch(), key="dp-sgd/3")
    assert not labels.has_draw("dp-sgd/3")
    assert labels.guarantee().epsilon == allowed


def test_a_budget_without_delta_is_never_enough():
    with pytest.raises(BudgetExceededError, match="DPSGDSteps"):
        vault(epsilon=100.0, delta=0.0).release(epoch(), key="dp-sgd/0")


@pytest.mark.parametrize(
    "other",
    [HistogramMechanism(0.3, num_classes=3), RandomizedResponse(0.3, 3)],
    ids=["histogram", "randomized response"],
)
def test_it_composes_with_mechanisms_of_other_kinds(other):
    labels = vault(epsilon=2.0)
    if isinstance(other, RandomizedResponse):
        labels.randomize(other)
    else:
        labels.release(other)
    labels.release(epoch(steps=295), key="dp-sgd/0")
    total = labels.guarantee().epsilon
    alone = epoch(steps=295).epsilon
    assert max(0.3, alone) < total <= 0.3 + alone  # basic composition is beaten or stated
    tight = composed_epsilon([other.dp_event(), epoch(steps=295).dp_event()], DELTA)
    assert total == pytest.approx(min(tight, 0.3 + alone), rel=1e-9)


def test_a_reopened_store_remembers_the_charge(tmp_path):
    labels = vault(store=tmp_path / "store")
    labels.release(epoch(), key="dp-sgd/0")
    labels.release(epoch(), key="dp-sgd/1")
    spent = labels.guarantee()
    again = vault(store=tmp_path / "store")
    assert again.guarantee() == spent
    assert again.mechanism("dp-sgd/1") == epoch()
    assert again.release(epoch(), key="dp-sgd/1").shape == (0,)
    assert again.guarantee() == spent  # the stored name is not charged twice
    with pytest.raises(LabelStoreError, match="other mechanism"):
        again.release(epoch(steps=60), key="dp-sgd/1")
    with pytest.raises(BudgetExceededError, match="the store has spent"):
        vault(epsilon=spent.epsilon * 0.9, store=tmp_path / "store")


def test_a_vault_of_numbers_takes_it_without_classes():
    budget = PrivacyBudget(1.0, DELTA)
    weeks = PrivateLabels([1.0, 2.5, 4.0], low=0.0, high=5.0, budget=budget)
    weeks.release(epoch(num_classes=None), key="dp-sgd/0")
    assert weeks.guarantee().epsilon == epoch().epsilon
    with pytest.raises(ValueError, match="labels are numbers"):
        weeks.release(epoch(), key="dp-sgd/1")
    with pytest.raises(ValueError, match="num_classes"):
        vault().release(epoch(num_classes=None), key="dp-sgd/0")


def test_a_seeded_vault_says_so():
    labels = vault(seed=3)
    labels.release(epoch(), key="dp-sgd/0")
    assert labels.guarantee().seeded and math.isfinite(labels.guarantee().epsilon)
