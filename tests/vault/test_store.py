"""The store: the same draws and charges after opening it again, and errors for other labels."""

from __future__ import annotations

import os
import stat

import numpy as np
import pytest

from tf_labeldp.accounting import BudgetExceededError, Charge, PrivacyBudget
from tf_labeldp.mechanisms import HistogramMechanism, RandomizedResponse, RRTopK, RRWithPrior
from tf_labeldp.plugins import Ledger
from tf_labeldp.vault import Classes, LabelStoreError, PrivateLabels, Store

PART, REST = np.arange(0, 80), np.arange(80, 200)  # the parts in the fixture `filled`


def json_of(receipts):
    return [receipt.to_json() for receipt in receipts]


def test_opening_it_again_gives_the_same_draws_and_charges(
    make, store, filled, no_new_randomness, three_draws
):
    vault, draws = filled
    opened = make(epsilon=2.0, store=store)
    assert opened.guarantee() == vault.guarantee()
    assert opened.guarantee().epsilon == 1.5
    no_new_randomness()
    for expected, found in zip(draws, three_draws(opened), strict=True):
        np.testing.assert_array_equal(found.values, expected.values)
        np.testing.assert_array_equal(found.indices, expected.indices)
        assert found.values.dtype == np.int64
        assert found.mechanism == expected.mechanism
        assert json_of(found.receipts) == json_of(expected.receipts)
        assert found.guarantee() == expected.guarantee()
        if expected.priors is not None:
            np.testing.assert_array_equal(found.priors, expected.priors)
            np.testing.assert_array_equal(found.posterior(), expected.posterior())
    assert opened.guarantee() == vault.guarantee()
    assert json_of(opened.receipts) == json_of(vault.receipts)
    assert opened.history() == vault.history() and opened.label_set.name == vault.label_set.name
    assert opened.has_draw("stage-2")
    assert os.fspath(opened.store_path) == os.fspath(store)


def test_draws_go_on_where_the_store_ends(make, response, store, filled, three_draws):
    opened = make(epsilon=2.0, store=store)
    three_draws(opened)
    fourth = opened.randomize(response(0.5), REST)
    reopened = make(epsilon=2.0, store=store)
    three_draws(reopened)
    again = reopened.randomize(response(0.5), REST)
    np.testing.assert_array_equal(again.values, fourth.values)


def test_class_values_survive(make, store):
    classes, labels = ["a", ("b", 2), 3], [3, "a", ("b", 2)]
    first = make(kind=Classes(classes), labels=labels, store=store)
    drawn = first.randomize(RandomizedResponse(1.0, 3))
    second = make(kind=Classes(classes), labels=labels, store=store)
    again = second.randomize(RandomizedResponse(1.0, 3))
    assert again.values.tolist() == drawn.values.tolist()
    assert second.decode(again).tolist() == first.decode(drawn).tolist()
    with pytest.raises(LabelStoreError, match="made with other settings: classes differ"):
        make(kind=Classes(classes[::-1]), labels=labels, store=store)


OTHERS = [
    (lambda y: {"labels": np.where(np.arange(200) == 7, (y + 1) % 5, y)}, "made for other labels"),
    (lambda y: {"labels": y[::-1]}, "made for other labels .*Give the labels it was made for"),
    (lambda y: {"labels": y[:-1]}, "expected the 200 examples of the store .*got 199. Give all"),
    (lambda y: {"num_classes": 6}, "other settings: num_classes differ"),
    (lambda y: {"kind": Classes(range(5))}, "other settings: classes differ"),
]


def test_a_store_of_other_labels_or_settings(make, labels, store, filled):
    for change, message in OTHERS:
        with pytest.raises(LabelStoreError, match=message):
            make(epsilon=2.0, store=store, **change(labels))
    make(epsilon=2.0, store=store)  # The error has changed nothing.


def unbudgeted(labels, store, **arguments):
    return PrivateLabels(labels, 5, store=store, **arguments)


def test_the_store_keeps_the_budget(labels, make, store, filled):
    for epsilon, delta in ((1.0, 0.0), (1.5, 0.0), (2.0 + 1e-9, 0.0), (3.0, 0.0), (2.0, 1e-3)):
        message = rf"keeps the budget epsilon=2, delta=0, got {PrivacyBudget(epsilon, delta)}"
        with pytest.raises(LabelStoreError, match=message):
            make(epsilon=epsilon, delta=delta, store=store)
    opened = unbudgeted(labels, store)
    assert opened.budget == PrivacyBudget(2.0) and opened.guarantee().epsilon == 1.5
    with pytest.raises(BudgetExceededError):
        opened.randomize(RandomizedResponse(0.6, 5), [0], key="more")
    with pytest.raises(TypeError, match="budget must be a PrivacyBudget, got float"):
        unbudgeted(labels, store, budget=2.0)


def test_a_new_store_needs_a_budget(labels, make, response, store):
    with pytest.raises(ValueError, match="budget is missing, and there is no store in"):
        unbudgeted(labels, store)
    with pytest.raises(TypeError, match="budget must be a PrivacyBudget, got NoneType"):
        unbudgeted(labels, None)
    make(epsilon=1.0, store=store).randomize(response(1.0))  # The error has left no store.
    assert unbudgeted(labels, store).guarantee().epsilon == 1.0


def test_a_raised_budget_is_kept_with_its_reason(labels, make, response, store, filled):
    vault, other = filled[0], make(epsilon=2.0, store=store)
    vault.raise_budget(PrivacyBudget(3.0, 1e-3), reason=" a second study was approved ")
    for opened in (vault, other, unbudgeted(labels, store)):
        line = opened.history()[-1]  # The history comes first: it reads new records itself.
        assert line.what == "budget raised to epsilon=3, delta=0.001: a second study was approved"
        assert (line.examples, line.epsilon, line.key) == (0, 0.0, "")
        assert opened.budget == PrivacyBudget(3.0, 1e-3)
        assert opened.guarantee().epsilon == 1.5
    for epsilon in (2.0, 4.0):
        with pytest.raises(LabelStoreError, match=r"keeps the budget epsilon=3, delta=0\.001"):
            make(epsilon=epsilon, store=store)
    other.randomize(response(1.5), [0], key="more")
    assert make(epsilon=3.0, delta=1e-3, store=store).guarantee().epsilon == 3.0


def test_the_history_names_the_actor_of_a_raised_budget(labels, make, store):
    make(store=Store(store, actor="anna")).raise_budget(PrivacyBudget(2.0), reason="approved")
    assert unbudgeted(labels, Store(store, actor="ben")).history()[0].actor == "anna"


def test_neither_epsilon_nor_delta_is_lowered(make, store):
    vault = make(epsilon=2.0, delta=1e-3, store=store)
    before = sorted(store.rglob("*"))
    for epsilon, delta in ((1.9, 1e-3), (2.0, 1e-3), (3.0, 1e-4), (1.0, 2e-3)):
        with pytest.raises(ValueError, match=r"can only be raised: it is epsilon=2, delta=0\.001"):
            vault.raise_budget(PrivacyBudget(epsilon, delta), reason="a trade")
    with pytest.raises(TypeError, match="reason must say why"):
        vault.raise_budget(PrivacyBudget(3.0, 1e-3), reason=" ")
    assert sorted(store.rglob("*")) == before and vault.budget == PrivacyBudget(2.0, 1e-3)
    vault.raise_budget(PrivacyBudget(2.0, 2e-3), reason="more delta")
    assert make(epsilon=2.0, delta=2e-3, store=store).budget == PrivacyBudget(2.0, 2e-3)


def test_an_unnamed_draw_with_other_settings(make, response, store, filled, priors):
    cases = [
        ("mechanism", (response(0.5), PART)),
        ("mechanism", (RRTopK(1.0, 5, 5), PART, priors[0])),
        ("indices", (response(1.0), REST)),
        ("indices", (response(1.0), PART[::-1])),
        ("priors", (RRWithPrior(1.0, 5), PART, priors[PART])),
    ]
    for what, arguments in cases:
        opened = make(epsilon=2.0, store=store)
        with pytest.raises(LabelStoreError, match=rf"made with other .*{what}.*a key of its own"):
            opened.randomize(*arguments)
        assert opened.guarantee().epsilon == 1.5
    opened = make(epsilon=2.0, store=store)
    opened.randomize(response(1.0), PART)
    opened.randomize(RRWithPrior(1.5, 5), REST, priors[REST], key="stage-2")
    with pytest.raises(LabelStoreError, match="made with other priors"):
        opened.randomize(RRTopK(0.5, 5, 2), PART[::-1], priors[1])


def test_a_key_cannot_name_a_draw_without_a_key(make, response):
    """Else the first draw without a key would be that draw again, in place of another one."""
    vault = make()
    with pytest.raises(ValueError, match="key must not start with 'unnamed-'"):
        vault.randomize(response(), key="unnamed-0")
    assert vault.receipts == ()


def test_a_name_is_a_text_in_the_store(make, response, store):
    vault = make(epsilon=1.0, store=store)
    drawn = vault.randomize(response(0.25), key=7)
    vault.charge(Charge.of(response(0.25)), what="own steps", key=8)
    with vault.reserve({9: response(0.5)}):
        assert vault.remaining() == 0.0
    opened = make(epsilon=1.0, store=store)
    assert opened.has_draw(7) and opened.mechanism("7") == response(0.25)
    np.testing.assert_array_equal(opened.randomize(response(0.25), key="7").values, drawn.values)
    assert [use.key for use in opened.history()] == ["7", "8"] and opened.remaining() == 0.5


def test_a_named_draw_ignores_new_priors(make, store, filled, no_new_randomness):
    """A retrained model never gives exactly the same priors."""
    opened = make(epsilon=2.0, store=store)
    no_new_randomness()
    other = np.full(5, 0.2)
    found = opened.randomize(RRWithPrior(1.5, 5), REST, other, key="stage-2")
    np.testing.assert_array_equal(found.values, filled[1][1].values)
    np.testing.assert_array_equal(found.priors, filled[1][1].priors)  # the priors of the draw
    for mechanism, indices in ((RRWithPrior(1.6, 5), REST), (RRWithPrior(1.5, 5), REST[1:])):
        with pytest.raises(LabelStoreError, match="draw 'stage-2' exists and was made with other"):
            opened.randomize(mechanism, indices, other, key="stage-2")


def test_two_vaults_share_one_store(make, response, store):
    first, other = make(epsilon=1.0, store=store), make(epsilon=1.0, store=store)
    kept = first.randomize(response(0.75), key="kept")
    assert other.guarantee() == first.guarantee() and other.guarantee().epsilon == 0.75
    assert other.has_draw("kept") and other.remaining() == first.remaining() == 0.25
    assert other.mechanism("kept") == response(0.75) and other.history() == first.history()
    message = r"have spent epsilon=0\.75: together epsilon=1\.5"
    with pytest.raises(BudgetExceededError, match=message):
        other.randomize(response(0.75), key="mine")
    np.testing.assert_array_equal(other.randomize(response(0.75), key="kept").values, kept.values)
    last = other.randomize(response(0.25), key="mine")
    np.testing.assert_array_equal(first.randomize(response(0.25), key="mine").values, last.values)
    assert first.guarantee().epsilon == other.guarantee().epsilon == 1.0
    assert sorted(path.name for path in (store / "records").iterdir()) == ["000000", "000001"]


def test_two_makers_of_one_store(make, store, monkeypatch):
    def be_overtaken(*arguments, link=os.link):
        link(*arguments)  # The other process links its file first.
        link(*arguments)

    monkeypatch.setattr(os, "link", be_overtaken)
    with pytest.raises(LabelStoreError, match="Another process is making the store"):
        make(store=store)


def test_the_true_labels_are_in_no_file(make, response, store):
    pattern = np.random.default_rng(53).integers(0, 5, 200)
    vault = make(labels=pattern, store=store, epsilon=3.0)
    for part in (None, PART, REST):
        vault.randomize(response(1.0), part)
    drawn = [vault.randomize(response(0.5), [3])]
    files = [path for path in store.rglob("*") if path.is_file()]
    assert {path.relative_to(store).as_posix() for path in files} == {
        "header.json",
        "PRIVATE-fingerprint",
        ".lock",
        "last-record",
        *(f"records/{number:06d}" for number in range(4)),
    }
    assert len(drawn) == 1
    content = b"".join(path.read_bytes() for path in files)
    for dtype in ("u1", "<u2", "<i4", "<i8", ">i8", "<f4", "<f8"):
        for start in range(0, 200, 20):  # Twenty labels in a row would be found in any encoding.
            assert pattern[start : start + 20].astype(dtype).tobytes() not in content
    for separator in ("", ",", ", ", " ", "\n"):
        text = separator.join(map(str, pattern[:20].tolist()))
        assert text.encode() not in content
    # With almost no noise, the search finds the labels in the draw.
    loud = make(labels=pattern, store=store.with_name("loud"), epsilon=60.0)
    loud.randomize(response(60.0))
    stored = (store.with_name("loud") / "records" / "000000").read_bytes()
    assert pattern[:20].astype("u1").tobytes() in stored


def test_the_fingerprint_is_salted(make, store):
    make(store=store)
    make(store=store.with_name("twin"))
    texts = {(s / "PRIVATE-fingerprint").read_text() for s in (store, store.with_name("twin"))}
    assert len(texts) == 2


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX's")
def test_the_store_is_for_its_owner_alone(make, response, store):
    make(store=store).randomize(response())
    assert stat.S_IMODE(store.stat().st_mode) == 0o700
    files = [path for path in store.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot flush a folder")
def test_a_record_is_on_the_disk_before_and_after_it_has_its_name(
    make, response, store, monkeypatch
):
    """A power failure loses no draw that was returned: file, then name, then folder are flushed."""
    labels, events = make(store=store), []
    for name in ("fsync", "link", "rename", "replace"):
        operation = getattr(os, name)

        def watched(first, *rest, name=name, operation=operation, **settings):
            is_folder = name == "fsync" and stat.S_ISDIR(os.fstat(first).st_mode)
            events.append("folder" if is_folder else f"{name} {rest[0] if rest else ''}".strip())
            return operation(first, *rest, **settings)

        monkeypatch.setattr(os, name, watched)
    labels.randomize(response())
    named = [place for place, event in enumerate(events) if "records" in event]
    assert named and all(events[place - 1] == "fsync" for place in named)
    assert all(events[place + 1] == "folder" for place in named)


class BiasedResponse(RandomizedResponse):
    """A user's mechanism with an argument that is no field of a dataclass."""

    def __init__(self, epsilon, num_classes, favourite=0):
        super().__init__(epsilon, num_classes)
        object.__setattr__(self, "favourite", favourite)

    def get_config(self):
        return {**super().get_config(), "favourite": self.favourite}


def test_every_argument_of_a_stored_mechanism_is_compared(make, store):
    vault = make(store=store)
    drawn = vault.randomize(BiasedResponse(0.5, 5, 1), key="mine")
    again = vault.randomize(BiasedResponse(0.5, 5, 1), key="mine")
    np.testing.assert_array_equal(again.values, drawn.values)
    assert again.guarantee().epsilon == 0.5
    assert again.guarantee().assumptions[0].code == "claimed-mechanism"
    assert again.guarantee().assumptions[0].startswith("BiasedResponse has the epsilon of 0.5")
    with pytest.raises(LabelStoreError, match="made with other mechanism"):
        vault.randomize(BiasedResponse(0.5, 5, 2), key="mine")


def test_noisy_labels_as_public_input_are_their_values(make, response, store):
    """A store of 0.3 has the digest of the array."""
    vault, histogram = make(epsilon=3.0, store=store), HistogramMechanism(0.5, num_classes=5)
    noisy = vault.randomize(response(1.0), key="groups")
    first = vault.release(histogram, public_input=noisy.values, key="counts")
    again = make(epsilon=3.0, store=store).release(histogram, public_input=noisy, key="counts")
    assert np.array_equal(first.values, again.values) and vault.guarantee().epsilon == 1.5


def test_arguments_that_a_stored_draw_lacks_have_their_defaults(make, store, monkeypatch):
    """A draw of an earlier version stays a draw of the same mechanism."""
    vault = make(store=store)
    with monkeypatch.context() as patch:
        patch.setattr(BiasedResponse, "get_config", RandomizedResponse.get_config)
        drawn = vault.randomize(BiasedResponse(0.5, 5), key="mine")
    again = vault.randomize(BiasedResponse(0.5, 5), key="mine")
    np.testing.assert_array_equal(again.values, drawn.values)
    with pytest.raises(LabelStoreError, match="made with other mechanism"):
        vault.randomize(BiasedResponse(0.5, 5, 2), key="mine")


def test_an_existing_store_keeps_its_budget(make, labels, store):
    budget = PrivacyBudget(3.0)
    assert Ledger.budget_for(None, budget) == Ledger.budget_for(store, budget) == budget
    make(epsilon=2.0, store=store)
    assert Ledger.budget_for(store, budget) is None
    assert PrivateLabels(labels, 5, store=store).budget.epsilon == 2.0
