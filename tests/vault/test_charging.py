"""Costs compose in parallel over examples and in sequence on one; refusals come before draws."""

from __future__ import annotations

import threading
import time
import warnings
from collections import Counter

import numpy as np
import pytest

from tf_labeldp.accounting import BudgetExceededError, Charge, PrivacyBudget
from tf_labeldp.heads import PrivateRidge
from tf_labeldp.mechanisms import RandomizedResponse, RRWithPrior
from tf_labeldp.plugins import EventFields, Ledger, gaussian_sigma
from tf_labeldp.scale import ReleaseKey
from tf_labeldp.vault import PrivateLabels, Rows


def test_disjoint_examples_compose_in_parallel(make, response):
    vault = make(epsilon=1.0)
    for part in np.array_split(np.random.default_rng(1).permutation(200), 4):
        assert vault.randomize(response(1.0), part).values.shape == (50,)
    assert vault.guarantee().epsilon == 1.0


def test_the_same_examples_compose_in_sequence(make, response):
    vault = make(epsilon=1.0)
    for uses in range(1, 11):  # Rounding must not refuse the tenth use.
        vault.randomize(response(0.1))
        assert vault.guarantee().epsilon == pytest.approx(0.1 * uses, abs=1e-12)
    with pytest.raises(BudgetExceededError):
        vault.randomize(response(1e-6))


def test_overlap_is_charged_on_the_overlap_alone(make, response):
    vault = make(epsilon=2.0)
    vault.randomize(response(1.0), np.arange(0, 120))
    vault.randomize(response(0.75), np.arange(100, 200))
    assert vault.guarantee().epsilon == 1.75
    vault.randomize(response(1.25), np.arange(120, 200))  # 2.0 there
    assert vault.guarantee().epsilon == 2.0
    with pytest.raises(
        BudgetExceededError, match=r"have spent epsilon=1.75: together epsilon=2.25"
    ):
        vault.randomize(response(0.5), [5, 110])
    vault.randomize(response(0.5), [5])
    assert vault.guarantee().epsilon == 2.0


def test_a_refused_draw_draws_and_charges_nothing(make, response, no_new_randomness, monkeypatch):
    vault = make(epsilon=1.0)
    first = vault.randomize(response(0.75))
    no_new_randomness()
    mechanism = response(0.5)
    monkeypatch.setattr(
        type(mechanism), "randomize", lambda *_, **__: pytest.fail("the labels were opened")
    )
    before = vault.guarantee()
    message = r"RandomizedResponse \(epsilon=0.5, .*would be charged.*over the budget.*Nothing"
    for _ in range(2):
        with pytest.raises(BudgetExceededError, match=message):
            vault.randomize(mechanism, key="late")
    assert vault.guarantee() == before
    assert not vault.has_draw("late")
    assert first.values.shape == (200,)


def test_bad_priors_charge_nothing(make, response):
    vault = make(epsilon=1.0)
    with pytest.raises(ValueError, match="must sum to one"):
        vault.randomize(RRWithPrior(1.0, 5), priors=np.zeros(5))
    with pytest.raises(ValueError, match="needs priors"):
        vault.randomize(RRWithPrior(1.0, 5))
    assert vault.guarantee().epsilon == 0.0
    assert vault.randomize(response(1.0)).values.shape == (200,)


def test_a_delta_buys_more_uses(make, response):
    strict = make(epsilon=2.0)
    relaxed = make(epsilon=2.0, delta=1e-2)
    for _ in range(10):
        strict.randomize(response(0.2))
    with pytest.raises(BudgetExceededError):
        strict.randomize(response(0.2))
    with pytest.warns(UserWarning, match=r"delta=0.01 is not below 1/n = 0.005"):
        for _ in range(150):
            relaxed.randomize(response(0.02))
    stated = relaxed.guarantee()
    expected = Charge.composed(Counter([Charge.of(response(0.02))] * 150), 1e-2)
    assert (stated.epsilon, stated.delta) == (expected.epsilon, 1e-2)
    assert 0.0 < stated.epsilon < 2.0
    # Both figures: for uses that were fixed in advance, and for any adaptive use.
    [note] = [note for note in stated.assumptions if note.code == "fixed-in-advance"]
    assert expected.assumptions[0].code == note.code and "(2, 0.01)-label-DP" in note
    assert stated.adaptive == (2.0, 0.01)


def test_uses_that_fit_if_they_are_fixed_in_advance_are_refused_one_by_one(make, response):
    """The budget is for uses that are chosen after earlier outputs; the error says what helps."""
    vault = make(epsilon=2.0, delta=1e-3)
    for _ in range(10):
        vault.randomize(response(0.2))
    assert vault.remaining() == 0.0
    with pytest.raises(BudgetExceededError) as refused:
        vault.randomize(response(0.2))
    for words in ("if they were fixed in advance", "the sum of epsilons", "labels.reserve"):
        assert words in str(refused.value)
    assert vault.guarantee(after=response(0.2)).epsilon < 2.0
    assert len(vault.history()) == 10


def test_uses_after_a_head_and_before_it(make, response):
    """Before the first use that needs a delta, epsilons add up; after it, filters run."""
    vault = make(epsilon=2.0, delta=1e-5)
    vault.randomize(response(1.0))
    assert vault.remaining() == 1.0
    vault.charge(gaussian(1.0, 1e-5), what="a head")
    assert vault.remaining() == 0.0
    vault = make(epsilon=2.0, delta=1e-5)
    vault.charge(gaussian(1.0, 1e-5), what="a head")
    left = vault.remaining()
    assert 0.6 < left < 1.0
    with pytest.raises(BudgetExceededError, match="moments"):
        vault.randomize(response(1.001 * left))
    vault.randomize(response(left))
    assert vault.remaining() < 0.05


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-6])
def test_a_release_for_a_larger_delta_says_what_it_costs(delta, make):
    vault = make(epsilon=4.0, delta=1e-5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        PrivateRidge(0.5, delta).fit(np.random.default_rng(0).normal(size=(200, 3)), vault)
    found = [str(each.message) for each in caught if "of the budget" in str(each.message)]
    cost = vault.guarantee().epsilon
    if delta > 1e-5:
        assert cost > 0.7 and len(found) == 1
        assert f"costs epsilon={cost:.4g} in place of 0.5. Use delta=1e-05" in found[0]
    else:
        assert cost <= 0.5 and not found


def test_parts_have_filters_of_their_own(make, response):
    vault = make(epsilon=1.0, delta=1e-3)
    first, second = vault.split(0.5)
    for _ in range(4):
        first.randomize(response(0.25))
    assert first.remaining() == 0.0 and second.remaining() == 1.0
    second.charge(gaussian(0.9, 1e-3), what="a head")
    assert first.remaining() == 0.0 and 0.0 < second.remaining() < 0.2
    with pytest.raises(BudgetExceededError):
        vault.randomize(response(0.25))


def test_a_store_of_an_earlier_version_above_the_filter_has_nothing_left(tmp_path, response):
    """0.3 allowed what is within the budget if it was fixed in advance."""
    budget = PrivacyBudget(2.0, delta=1e-3)

    def opened():
        return PrivateLabels(np.arange(200) % 5, 5, budget=budget, store=tmp_path / "store")

    vault = opened()
    with pytest.MonkeyPatch.context() as patch:
        account = Ledger.of_store(tmp_path / "store").account
        patch.setattr(type(account), "filters", lambda *_: [])
        for number in range(12):
            vault.randomize(response(0.2), key=str(number))
    first = vault.randomize(response(0.2), key="0")
    with pytest.warns(UserWarning, match="nothing is left of the budget epsilon=2, delta=0.001"):
        again = opened()
    assert again.remaining() == 0.0 and again.guarantee().epsilon < 2.0
    with pytest.raises(BudgetExceededError, match="they leave nothing"):
        again.randomize(response(1e-3))
    # What is drawn is read, and a larger budget is a way on.
    assert np.array_equal(again.randomize(response(0.2), key="0").values, first.values)
    again.raise_budget(PrivacyBudget(3.0, delta=1e-3), reason="a test")
    assert again.remaining() == pytest.approx(3.0 - 12 * 0.2)
    again.randomize(response(0.5))


def gaussian(epsilon, delta):
    return Charge(epsilon, delta, EventFields.gaussian(gaussian_sigma(epsilon, delta, 1.0)))


def test_a_named_draw_is_returned_again_without_a_charge(make, response, no_new_randomness):
    vault = make(epsilon=1.0)
    first = vault.randomize(response(1.0), key="stage-1")
    assert vault.has_draw("stage-1") and not vault.has_draw("stage-2")
    no_new_randomness()
    again = vault.randomize(response(1.0), key="stage-1")
    np.testing.assert_array_equal(again.values, first.values)
    assert vault.guarantee().epsilon == 1.0


def test_unnamed_draws_are_new_each_time(make, response):
    vault = make(epsilon=2.0)
    first, second = vault.randomize(response(1.0)), vault.randomize(response(1.0))
    assert np.any(first.values != second.values)  # They are equal with probability below 0.3^200.
    assert vault.guarantee().epsilon == 2.0


def test_indices_in_any_form(make, labels, response):
    mask = labels == labels[0]
    chosen = np.flatnonzero(mask)
    huge = response(60.0)  # Without noise the values identify the examples.
    for form in (mask, chosen, chosen.tolist(), chosen.astype("uint16"), chosen[::-1]):
        vault = make(epsilon=60.0)
        noisy = vault.randomize(huge, form)
        np.testing.assert_array_equal(noisy.values, labels[np.asarray(form)])
        expected = np.flatnonzero(form) if form is mask else np.asarray(form)
        np.testing.assert_array_equal(noisy.indices, expected)
        rest = vault.randomize(huge, ~mask)  # The others have cost nothing.
        assert rest.values.size == 200 - chosen.size
    assert make().randomize(huge, []).values.shape == (0,)
    np.testing.assert_array_equal(make(epsilon=60.0).randomize(huge).values, labels)


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([3, 4, 3], "name an example more than once"),
        ([-1], r"must lie in 0..199, got values from -1 to -1"),
        ([200], r"must lie in 0..199"),
        ([0.0], "must be integers of shape .* got dtype float64"),
        ([True, False], r"boolean mask of shape \(200,\), got dtype bool and shape \(2,\)"),
        ([[1, 2]], r"got dtype int64 and shape \(1, 2\)"),
    ],
)
def test_bad_indices(make, response, indices, message):
    vault = make()
    with pytest.raises(ValueError, match=message):
        vault.randomize(response(), indices)
    assert vault.guarantee().epsilon == 0.0


def test_other_mechanisms_are_refused(make, response):
    with pytest.raises(ValueError, match="mechanism has num_classes=4, the labels have 5"):
        make().randomize(RandomizedResponse(1.0, 4))
    with pytest.raises(TypeError, match=r"must be a tf_labeldp mechanism.*, got float"):
        make().randomize(1.0)


def test_priors_follow_the_indices(make, labels):
    order = np.random.default_rng(2).permutation(200)[:150]
    priors = np.full((150, 5), 0.1)
    priors[np.arange(150), labels[order]] = 0.6
    noisy = make(epsilon=60.0).randomize(RRWithPrior(60.0, 5), order, priors)
    np.testing.assert_array_equal(noisy.values, labels[order])
    np.testing.assert_array_equal(noisy.indices, order)
    np.testing.assert_array_equal(noisy.priors, priors)


@pytest.fixture
def slow_draws(monkeypatch, response):
    """Slow draws, which other threads could overtake between check and charge."""
    mechanism = type(response())

    def slowly(self, *arguments, draw=mechanism.randomize, **keywords):
        time.sleep(0.02)
        return draw(self, *arguments, **keywords)

    monkeypatch.setattr(mechanism, "randomize", slowly)


def run_threads(number, draw):
    start = threading.Barrier(number)

    def run():
        start.wait()
        draw()

    threads = [threading.Thread(target=run) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("stored", [False, True])
def test_threads_do_not_overspend(make, response, slow_draws, store, stored):
    several = [make(epsilon=1.0, store=store) for _ in range(8)] if stored else [make()] * 8
    vaults, drawn, refused = iter(several), [], []

    def draw():
        vault = next(vaults)
        try:
            drawn.append(vault.randomize(response(0.5), key=str(id(vault)) if stored else None))
        except BudgetExceededError:
            refused.append(1)

    run_threads(8, draw)
    assert (len(drawn), len(refused)) == (2, 6)
    assert several[0].guarantee().epsilon == 1.0


def test_threads_share_the_draw_of_one_name(make, response, slow_draws):
    vault, drawn = make(epsilon=1.0), []
    run_threads(6, lambda: drawn.append(vault.randomize(response(1.0), key="shared").values))
    assert len(drawn) == 6
    assert all(np.array_equal(values, drawn[0]) for values in drawn)


@pytest.mark.parametrize(("asked", "unit"), [(None, "row"), ("user", "user")])
def test_the_unit_of_a_charge_is_by_default_that_of_the_labels(asked, unit):
    rows = PrivateLabels(np.zeros((9, 2), int), Rows(2), budget=PrivacyBudget(2.0))
    receipt = rows.charge(Charge.of(RandomizedResponse(1.0, 2)), what="a use", unit=asked)
    assert receipt.unit == unit


def test_a_statement_before_the_first_use_has_the_number_of_units(tmp_path, make):
    assert make(epsilon=1.0).guarantee().num_units == 200
    budget = PrivacyBudget(1.0)
    of_users = PrivateLabels([0, 1, 1], 2, budget=budget, users=["a", "b", "b"])
    assert of_users.guarantee().num_units == 2
    # A key does not know how many labels there are.
    assert ReleaseKey.create(tmp_path / "labels.key").guarantee().num_units is None


def test_checking_the_budget_draws_and_charges_nothing(make, response, no_new_randomness):
    vault = make(epsilon=1.0)
    no_new_randomness()
    vault.check_budget(response(1.0))
    with pytest.raises(BudgetExceededError, match="Nothing was drawn"):
        vault.check_budget(response(1.1), [3])
    assert vault.guarantee().epsilon == 0.0


@pytest.mark.parametrize(("uses", "epsilon"), [(700, 1.0), (7, 0.1), (70, 0.01), (3, 1 / 3)])
@pytest.mark.parametrize("reserved", [True, False])
def test_nothing_remains_after_the_last_use(uses, epsilon, reserved):
    """Sums of many epsilons miss the budget by rounding, which is no budget."""
    budget = PrivacyBudget(uses * epsilon)
    labels = PrivateLabels([0, 1] * 5, num_classes=2, budget=budget)
    mechanism = RandomizedResponse(epsilon, 2)
    if reserved:
        with labels.reserve({str(number): mechanism for number in range(uses)}):
            assert labels.remaining() == 0.0
        return
    for _ in range(uses):
        labels.randomize(mechanism)
    assert labels.remaining() == 0.0
