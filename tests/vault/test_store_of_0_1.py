"""A store of version 0.1: read again, with its spending, and brought up to format 2.

Version 0.1 (commit 7f50dbd) made ``store_of_0_1`` of 60 labels: an unnamed draw, one for 20
examples with a prior ("part"), a histogram ("counts"), two epochs of three steps of DP-SGD. What
it handed out is in ``store_of_0_1_expected.npz``; what it stated of all this is ``STATED``.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil

import numpy as np
import pytest

from tf_labeldp.accounting import BudgetExceededError, Charge, PrivacyBudget, dp_sgd_charge
from tf_labeldp.accounting._budget import compose_charges
from tf_labeldp.estimation import posterior
from tf_labeldp.mechanisms import HistogramMechanism, RandomizedResponse, RRWithPrior
from tf_labeldp.vault import LabelStoreError, PrivateLabels

HERE = pathlib.Path(__file__).parent
LABELS = np.random.default_rng(1).integers(0, 3, 60)
PART, PRIOR = np.arange(20), [0.5, 0.3, 0.2]
BUDGET = PrivacyBudget(4.0, 1e-3)
STATED = 1.1083588994973268
"""Epsilon at delta 1e-3 of version 0.1's own statement."""

RESPONSE, WITH_PRIOR = RandomizedResponse(0.5, 3), RRWithPrior(0.25, 3)
COUNTS = HistogramMechanism(0.25, 3)
STEPS = dp_sgd_charge(5.0, 0.1, 3, 1e-3)


@pytest.fixture
def old(tmp_path):
    """A copy of the store, which a test may change."""
    store = pathlib.Path(shutil.copytree(HERE / "store_of_0_1", tmp_path / "store"))
    for path in (store, *store.rglob("*")):  # which may be read-only where it comes from
        path.chmod(0o700 if path.is_dir() else 0o600)
    return store


@pytest.fixture
def expected():
    with np.load(HERE / "store_of_0_1_expected.npz") as content:
        return dict(content)


def open_old(store, budget=BUDGET, labels=LABELS, num_classes=3, **arguments):
    return PrivateLabels(labels, num_classes, budget=budget, store=store, **arguments)


def ask(vault):
    """Asks for all that was handed out, as the run of version 0.1 did."""
    return {
        "a": vault.randomize(RESPONSE),
        "b": vault.randomize(WITH_PRIOR, PART, PRIOR, key="part"),
        "h": vault.release(COUNTS, key="counts"),
    }


def contents(store):
    """Returns what is on disk, and when it was written; the lock file is empty."""
    files = {path.relative_to(store).as_posix(): path for path in store.rglob("*")}
    lock = files.pop(".lock", None)
    assert lock is None or lock.stat().st_size == 0
    return {
        name: (path.read_bytes(), path.stat().st_mtime_ns)
        for name, path in files.items()
        if path.is_file()
    }


def header_of(store):
    return json.loads((store / "header.json").read_text())


def check_all_is_there(store, expected, budget=BUDGET):
    """Checks that a store holds all that version 0.1 handed out, at its price."""
    vault = open_old(store, budget)
    for name, found in ask(vault).items():
        np.testing.assert_array_equal(found.values, expected[name])
        assert found.values.dtype == np.int64
    assert vault.guarantee().epsilon == pytest.approx(STATED, rel=1e-9)
    assert len(vault.receipts) == 5
    return vault


def test_the_fixture_is_of_version_0_1():
    assert header_of(HERE / "store_of_0_1")["format"] == 1
    assert not (HERE / "store_of_0_1" / ".lock").exists()  # no test has opened it in place


def test_the_same_draws_are_given_again(old, expected, no_new_randomness):
    opened = open_old(old)
    no_new_randomness()
    for vault in (opened, open_old(old, None)):  # of format 1, and then of format 2
        found = ask(vault)
        for name, wanted in expected.items():
            np.testing.assert_array_equal(found[name].values, wanted)
            assert found[name].values.dtype == np.int64
        np.testing.assert_array_equal(found["a"].indices, np.arange(60))
        np.testing.assert_array_equal(found["b"].indices, PART)
        assert [one.mechanism for one in found.values()] == [RESPONSE, WITH_PRIOR, COUNTS]
        assert [one.guarantee().epsilon for one in found.values()] == [0.5, 0.25, 0.25]
        assert [vault.mechanism(key) for key in ("part", "counts")] == [WITH_PRIOR, COUNTS]
        with pytest.raises(LabelStoreError, match="draw 'part' exists and was made with other"):
            vault.randomize(RRWithPrior(0.3, 3), PART, PRIOR, key="part")


def test_an_unnamed_draw_of_other_settings_is_refused(old):
    with pytest.raises(LabelStoreError, match="made with other mechanism"):
        open_old(old).randomize(RandomizedResponse(0.25, 3))


def test_its_spending_is_kept(old):
    charges = [Charge.of(RESPONSE), Charge.of(WITH_PRIOR), Charge.of(COUNTS), STEPS, STEPS]
    composed = compose_charges(charges, 1e-3)
    for vault in (open_old(old), open_old(old, None)):
        stated = vault.guarantee()
        assert stated.epsilon == composed.epsilon == pytest.approx(STATED, rel=1e-9)
        assert stated.delta == 1e-3 and stated.is_private and stated.num_units == 60
        before_part = compose_charges([charges[0], *charges[2:]], 1e-3).epsilon
        rest = np.arange(20, 60)
        with pytest.raises(BudgetExceededError, match=f"have spent epsilon={before_part:g}"):
            vault.check_budget(RandomizedResponse(4.0, 3), rest)
        with pytest.raises(BudgetExceededError, match=f"have spent epsilon={STATED:g}"):
            vault.check_budget(RandomizedResponse(4.0, 3), PART)
        left = vault.remaining()
        assert BUDGET.epsilon - STATED <= left + 1e-9 < BUDGET.epsilon
        vault.check_budget(RandomizedResponse(0.999 * left, 3))
        with pytest.raises(BudgetExceededError):
            vault.check_budget(RandomizedResponse(1.001 * left, 3))


def test_its_receipts_say_what_is_known_of_it(old):
    vault = open_old(old)
    kinds = ["draw", "draw", "release", "steps", "steps"]
    assert [one.kind for one in vault.receipts] == kinds
    assert [one.key for one in vault.receipts][:3] == ["unnamed-0", "part", "counts"]
    assert [one.num_examples for one in vault.receipts] == [60, 20, 60, 60, 60]
    origins = {(one.version, one.actor, one.time) for one in vault.receipts}
    assert origins == {("0.1", "unknown", "")}
    assert {one.labels.name for one in vault.receipts} == {vault.label_set.name}
    assert {(one.unit, one.seeded, one.delta) for one in vault.receipts} == {("label", False, 1e-3)}
    assert [use.what for use in vault.history()][3:] == ["3 steps of DP-SGD, 2 times"]
    text = "in training with version 0.1, which did not record it, neither noise nor batches were"
    assert text in str(vault.guarantee())
    assert text not in str(vault.randomize(RESPONSE).guarantee())  # its seed was recorded


def test_its_statement_rests_on_how_the_priors_were_made(old):
    """Version 0.1 said so of all draws, and "part" was drawn with an array of priors."""
    vault = open_old(old)
    text = "priors, clusters and features that were given for a use were made without these labels"
    noisy = vault.randomize(WITH_PRIOR, PART, PRIOR, key="part")
    assert text in str(vault.guarantee()) and text in str(noisy.guarantee())


def test_its_noisy_labels_take_the_priors_that_they_were_drawn_with(old, expected):
    noisy = open_old(old).randomize(WITH_PRIOR, PART, PRIOR, key="part")
    np.testing.assert_array_equal(noisy.priors, PRIOR)
    np.testing.assert_array_equal(noisy.posterior(), posterior(WITH_PRIOR, expected["b"], PRIOR))


def test_it_is_brought_up_to_format_2(old, expected):
    before = contents(old)
    vault = open_old(old)
    header = header_of(old)
    assert len(header["digest"]) == 64
    assert {name: value for name, value in header.items() if name != "digest"} == {
        "format": 2,
        "label_set": vault.label_set.name,
        "people": None,
        "budget": [4.0, 1e-3],
        "num_labels": 60,
        "num_classes": 3,
        "classes": None,
    }
    assert vault.label_set.stored and len(vault.label_set.name) == 32
    after = contents(old)
    del before["header.json"], after["header.json"]
    assert after == before  # the draws stay as they are
    ids = [one.id for one in vault.receipts]
    again = check_all_is_there(old, expected, None)
    assert again.budget == BUDGET and again.label_set == vault.label_set
    assert [one.id for one in again.receipts] == ids and len(set(ids)) == 5
    assert header_of(old) == header
    with pytest.raises(LabelStoreError, match=r"keeps the budget epsilon=4, delta=0\.001"):
        open_old(old, PrivacyBudget(5.0, 1e-3))


def test_what_comes_after_is_kept_beside_it(old, expected):
    vault = open_old(old, people="patients of 2026")
    ask(vault)
    fresh = vault.randomize(RESPONSE, key="new")
    vault.raise_budget(PrivacyBudget(5.0, 1e-3), reason="a second study was approved")
    assert sorted(path.name for path in (old / "draws").iterdir())[5:] == [
        "000005.npz",
        "000006.npz",
    ]
    again = open_old(old, None, people="patients of 2026")
    for name, found in ask(again).items():
        np.testing.assert_array_equal(found.values, expected[name])
    np.testing.assert_array_equal(again.randomize(RESPONSE, key="new").values, fresh.values)
    assert again.guarantee() == vault.guarantee()
    assert again.guarantee().epsilon > STATED
    assert again.budget == PrivacyBudget(5.0, 1e-3)
    assert again.label_set.people == "patients of 2026"
    with pytest.raises(LabelStoreError, match="other settings: people differ"):
        open_old(old, None, people="others")


def test_without_a_budget_it_is_refused_and_loses_nothing(old, expected):
    before = contents(old)
    message = r"is a store of version 0\.1, which kept no budget\. Give it once: budget=Priv"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            open_old(old, None)
        assert contents(old) == before
    check_all_is_there(old, expected)


@pytest.mark.parametrize(
    "budget",
    [
        PrivacyBudget(1.0, 1e-3),
        PrivacyBudget(STATED * (1.0 - 1e-6), 1e-3),
        PrivacyBudget(1e-9, 1e-3),
        PrivacyBudget(1.1, 1e-9),
        PrivacyBudget(4.0, 0.0),
    ],
    ids=str,
)
def test_with_too_small_a_budget_it_is_refused_and_loses_nothing(old, expected, budget):
    before = contents(old)
    for _ in range(2):
        with pytest.raises(BudgetExceededError, match=r"has spent epsilon=.*a larger budget"):
            open_old(old, budget)
        assert contents(old) == before
    check_all_is_there(old, expected)


def test_a_budget_that_just_suffices_is_enough(old, expected):
    budget = PrivacyBudget(STATED * (1.0 + 1e-6), 1e-3)
    vault = check_all_is_there(old, expected, budget)
    with pytest.raises(BudgetExceededError):
        vault.randomize(RandomizedResponse(0.01, 3), key="more")
    assert open_old(old, None).budget == budget


REFUSED = {
    "other labels": ({"labels": (LABELS + 1) % 3}, "was made for other labels"),
    "fewer labels": ({"labels": LABELS[1:]}, "other settings: num_labels differ"),
    "more classes": ({"num_classes": 4}, "other settings: num_classes differ"),
    "names": ({"num_classes": None, "classes": range(3)}, "other settings: classes differ"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_labels_or_settings_change_nothing(old, expected, case):
    before = contents(old)
    with pytest.raises(LabelStoreError, match=REFUSED[case][1]):
        open_old(old, **REFUSED[case][0])
    assert contents(old) == before
    check_all_is_there(old, expected)


def other_values(arrays, meta):
    arrays["noisy_labels"] = (arrays["noisy_labels"] + 1) % 3


def other_epsilon(arrays, meta):
    meta["mechanism"]["config"]["epsilon"] /= 10


def fewer_examples(arrays, meta):
    arrays["indices"], arrays["noisy_labels"] = arrays["indices"][1:], arrays["noisy_labels"][1:]


def seeded(arrays, meta):
    meta["seeded"] = True


@pytest.mark.parametrize("change", [other_values, other_epsilon, fewer_examples, seeded])
def test_a_draw_that_was_edited_is_refused(old, change):
    path = old / "draws" / "000001.npz"
    with np.load(path) as content:
        arrays = dict(content)
    meta = json.loads(arrays["meta"].tobytes())
    change(arrays, meta)
    arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    np.savez(path, **arrays)
    before = contents(old)
    with pytest.raises(LabelStoreError, match=r"000001\.npz is damaged"):
        open_old(old)
    assert contents(old) == before


@pytest.mark.parametrize("lost", ["draws/000001.npz", "draws/000004.npz", "charges/000000"])
def test_a_draw_or_charge_that_is_missing_is_refused(old, lost):
    (old / lost).unlink()
    before = contents(old)
    with pytest.raises(LabelStoreError, match=r"lacks a draw: .*is a charge forgotten"):
        open_old(old)
    assert contents(old) == before


def test_a_draw_that_was_not_yet_handed_out_is_taken_up(old, expected):
    charge = old / "charges" / "000004"
    content = charge.read_bytes()
    charge.unlink()  # as a kill of version 0.1 right after the draw's file leaves it
    check_all_is_there(old, expected)
    assert charge.read_bytes() == content


def test_a_full_disk_leaves_it_as_it_was(old, expected, monkeypatch):
    before = contents(old)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            open_old(old)
    assert contents(old) == before
    check_all_is_there(old, expected)
