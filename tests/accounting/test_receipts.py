"""Receipts: what they add up to, on examples and over label sets, and how they are kept."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import itertools
import json
import math
import pickle
import zlib
from collections import Counter

import dp_accounting
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tf_labeldp
from tf_labeldp.accounting import (
    Charge,
    LabelSet,
    PrivacyBudget,
    PrivacyGuarantee,
    Receipt,
    ReceiptError,
    Receipts,
    dp_sgd_charge,
)
from tf_labeldp.accounting.charges_by_example import ChargesByExample
from tf_labeldp.mechanisms import (
    RandomizedResponse,
)
from tf_labeldp.plugins import EventFields
from tf_labeldp.vault import PrivateLabels

BOUNDED = settings(max_examples=100, deadline=None, derandomize=True)
SIZE = 6
THROUGH_HERE = "The true labels reach training and tuning through the uses counted here alone."
SECURE = "The operating system's random generator and OpenSSL's, which it seeds, are secure."
ONE_EACH = "The features are public, and each person has one example."


def added_delta(delta):
    return EventFields({"class": "AddedDeltaDpEvent", "delta": delta}).dp_event()


def pure(epsilon):
    return Charge(epsilon, 0.0, EventFields.randomized_response(epsilon))


def spent(labels, epsilon=1.0, examples=None, **fields):
    """The receipt of a pure draw of these examples."""
    rows = None if examples is None else np.array(examples, dtype=np.int64)
    return Receipt(labels, pure(epsilon), "a draw", examples=rows, **fields)


A, B, WIDE = LabelSet("a", SIZE), LabelSet("b", SIZE), LabelSet("wide", 100)
NORTH, SOUTH = LabelSet("n", SIZE, "north"), LabelSet("s", SIZE, "south")
LATER = LabelSet("later", 100, "north")
WEIGHTED = (
    "The weights of samples and classes were made without labels, except for the uses counted here."
)
BY_LABEL = "The statement is by label and not by user, since some uses are counted by label."
REPORTED = "Nobody sees the training loss and metrics that were reported: they reveal true labels."


def unknown(*reasons):
    return Receipt(LabelSet.new(0), Charge.unknown(*reasons), "training", kind="unknown")


def test_examples_are_kept_as_indices_and_all_of_them_as_none():
    mask = [True, False, False, True, True, False]
    cases = [(range(SIZE), None), ([True] * SIZE, None), (reversed(range(SIZE)), None)]
    for rows, kept in [*cases, (mask, [0, 3, 4])]:
        receipt = Receipt(A, pure(1.0), "a draw", examples=np.array(list(rows)))
        assert (
            (receipt.examples is None) == (kept is None) == (receipt.to_json()["examples"] is None)
        )
        assert receipt.num_examples == (SIZE if kept is None else 3)
        assert kept is None or np.asarray(receipt.examples).tolist() == kept


def test_one_receipt_is_its_charge():
    assert Receipts([spent(A, 0.75)]).guarantee() == PrivacyGuarantee(
        0.75, assumptions=(ONE_EACH, THROUGH_HERE, SECURE), num_units=SIZE
    )


LOST, ALSO_LOST = unknown("nobody knows how"), unknown("the second")
PUBLIC = Receipt.of_declaration([LOST], "the labels of ImageNet are public")
DECLARED = "Declared by its author, not checked: the labels of ImageNet are public"
NOTED = Charge(0.5, 0.0, EventFields.randomized_response(0.5), ("a note",))
STATED = {
    "in sequence": ([spent(A, 1.0), spent(A, 0.5)], 1.5, ()),
    "in parallel": ([spent(A, 1.0, [0, 1, 2]), spent(A, 0.5, [3, 4, 5])], 1.0, ()),
    "later examples of a set": (
        [spent(A, 1.0), spent(LabelSet("a", 9), 1.0, [6, 7, 8]), spent(LabelSet("a", 9), 0.5)],
        1.5,
        (),
    ),
    "earlier examples of a set": (
        [spent(LabelSet("a", 9), 1.0, [6, 7, 8]), spent(A, 0.75), spent(A, 0.5)],
        1.25,
        (),
    ),
    "a set of unknown size": (
        [spent(LabelSet("a", 0), 1.0), spent(LabelSet("a", 9), 0.75, [8]), spent(A, 0.5)],
        1.75,
        (),
    ),
    "a use whose number of labels one of its receipts has": (
        [
            spent(LabelSet("a", 0), 1.0, id="k"),
            spent(LabelSet("a", 5), 1.0, id="k"),
            spent(LabelSet("a", 9), 0.75, [8]),
        ],
        1.75,
        (),
    ),
    "one shared example": ([spent(A, 1.0, [0, 1, 2]), spent(A, 0.5, [2, 3])], 1.5, ()),
    "in pairs": (
        [spent(A, 1.0, [0, 1]), spent(A, 0.5, [1, 2]), spent(A, 0.25, [2, 0])],
        1.5,
        (),
    ),
    "many on one": ([spent(A, 1.0, [0]), *(spent(A, 0.25, [1]) for _ in range(3))], 1.0, ()),
    "all and some": ([spent(A, 0.5), spent(A, 0.25, [5]), spent(A, 0.125, [4])], 0.75, ()),
    "no example": ([spent(A, 1.0, [])], 0.0, ()),
    "no example of a set of unknown size": ([spent(LabelSet("a", 0), 1.0, [])], 0.0, ()),
    "a note on a cheap example": (
        [spent(A, 2.0, [0, 1]), Receipt(A, NOTED, "a draw", examples=np.array([3]))],
        2.0,
        ("a note",),
    ),
    "the worst of three label sets": (
        [spent(A, 1.0, [0]), spent(A, 0.25, [1, 2]), spent(B, 0.5, [5]), spent(WIDE, 0.125)],
        1.625,
        ("Each person has at most one example in each of 3 label sets.",),
    ),
    "two populations": (
        [spent(NORTH, 1.0), spent(SOUTH, 0.5)],
        1.0,
        ("No person is in more than one of the populations 'north', 'south'.",),
    ),
    "one population": (
        [spent(NORTH, 1.0), spent(LATER, 0.5)],
        1.5,
        ("Each person has at most one example in each of 2 label sets.",),
    ),
    "anybody and the worse population": (
        [spent(NORTH, 1.0), spent(SOUTH, 0.5), spent(A, 0.25), spent(SOUTH, 0.75)],
        1.5,
        (),
    ),
    "anybody and one population": ([spent(A, 0.25), spent(NORTH, 1.0)], 1.25, ()),
    "unknown": ([spent(A), LOST], math.inf, ("nobody knows how",)),
    "unknown alone": ([LOST], math.inf, ("nobody knows how",)),
    "declared": ([spent(A, 0.5), LOST, PUBLIC], 0.5, (DECLARED,)),
    "declared for another": ([LOST, ALSO_LOST, PUBLIC], math.inf, ("the second",)),
    "declared for both": (
        [LOST, ALSO_LOST, Receipt.of_declaration([LOST, ALSO_LOST], "?")],
        0.0,
        (),
    ),
    "by user and by label": (
        [spent(A, unit="user"), spent(A)],
        2.0,
        (
            ONE_EACH,
            "The statement is by label and not by user, since some uses are counted by label.",
        ),
    ),
    "weighted": ([spent(A, sample_weights=True), spent(A)], 2.0, (WEIGHTED,)),
    "with metrics": ([spent(A), spent(A, metrics_reported=True)], 2.0, (REPORTED,)),
    "seeded": ([spent(A), spent(A, seeded=True)], 2.0, ()),
}


@pytest.mark.parametrize("name", STATED)
def test_statement_in_any_order(name):
    receipts, epsilon, assumptions = STATED[name]
    for order in itertools.islice(itertools.permutations(receipts), 24):
        statement = Receipts(order).guarantee()
        assert statement.epsilon == epsilon and set(assumptions) <= set(statement.assumptions)
        texts = " ".join(statement.assumptions)
        assert ("label sets" in texts) == any("label sets" in note for note in assumptions) or (
            name.startswith("anybody")
        )
        assert statement.seeded == (name == "seeded") == (SECURE not in statement.assumptions)
        assert statement.is_private == (math.isfinite(epsilon) and name != "seeded")
        for note, only in ((WEIGHTED, "weighted"), (REPORTED, "with metrics")):
            assert (note in statement.assumptions) == (name == only)
        assert ("nobody knows how" in texts) == (name in ("unknown", "unknown alone"))
        if math.isinf(epsilon):
            assert statement.assumptions[0] in ("nobody knows how", "the second")
    for delta in (0.0, 1e-5, 0.5):
        assert math.isinf(Receipts(receipts).guarantee(delta).epsilon) == math.isinf(epsilon)


ROWS = st.none() | st.lists(st.integers(0, SIZE - 1), unique=True, max_size=SIZE).map(sorted)
DRAWS = st.lists(st.tuples(st.integers(1, 4).map(lambda n: n / 8), ROWS), max_size=8)


def by_example(draws):
    """What each example was charged with, one by one."""
    return [
        [epsilon for epsilon, rows in draws if rows is None or one in rows] for one in range(SIZE)
    ]


@BOUNDED
@given(DRAWS)
def test_histories_are_those_of_the_examples(draws):
    histories = ChargesByExample(SIZE)
    for epsilon, rows in draws:
        histories.add(pure(epsilon), None if rows is None else np.array(rows, dtype=np.int64))

    def counted(epsilons):
        return {pure(one): epsilons.count(one) for one in epsilons}

    expected = [counted(one) for one in by_example(draws)]
    for rows in (None, [0], [1, 4]):
        found = [dict(one) for one in histories.distinct(rows and np.array(rows))]
        wanted = expected if rows is None else [expected[one] for one in rows]
        assert all(one in found for one in wanted) and all(one in wanted for one in found)
        # Equal ones may differ by the order in which their charges came, and by no more.
        assert len(found) <= len(wanted)


def test_uses_at_a_positive_delta_cost_what_their_charges_do():
    """The tighter theorem is tried on each example, and on the sum of label sets."""
    delta = 1e-4
    steps = dp_sgd_charge(10.0, 0.05, 100, delta)
    receipts = [spent(A, 0.1, [0, 1], delta=delta) for _ in range(60)]
    receipts += [Receipt(A, steps, "steps", delta=delta) for _ in range(3)]
    statement = Receipts([*receipts, spent(A, 0.2, [5], delta=delta)]).guarantee()
    worst = Charge.composed(Counter([pure(0.1)] * 60 + [steps] * 3), delta)
    assert statement.epsilon == worst.epsilon < 60 * 0.1 + 3 * steps.epsilon
    assert statement.delta == delta and set(worst.assumptions) <= set(statement.assumptions)
    assert "fixed-in-advance" in {note.code for note in statement.assumptions}
    both = Receipts([spent(labels, 0.1, delta=1e-5) for labels in (A, WIDE) * 50]).guarantee()
    assert both.epsilon == Charge.composed(Counter([pure(0.1)] * 100), 1e-5).epsilon < 6.0
    assert both.num_units == 100


def test_the_statement_has_the_largest_epsilon_and_delta_of_any_example():
    gaussian = Charge(0.3, 1e-6, EventFields.gaussian(20.0))
    few = Receipt(A, gaussian, "a release", examples=np.array([1]), delta=1e-6)
    statement = Receipts([spent(A, 2.0, [0], delta=1e-6), few]).guarantee()
    assert (statement.epsilon, statement.delta) == (2.0, 1e-6)


def test_delta_is_the_largest_of_the_receipts_unless_it_is_given():
    receipts = [spent(A, 0.1, delta=10.0**-power) for power in range(3, 40)]
    default = Receipts(receipts).guarantee()
    assert default.delta == 1e-3
    assert default == Receipts(receipts).guarantee(delta=1e-3)
    assert Receipts(receipts).guarantee(delta=1e-9).epsilon > default.epsilon
    pure_sum = Receipts(receipts).guarantee(delta=0.0)
    assert (pure_sum.epsilon, pure_sum.delta) == (math.fsum([0.1] * 37), 0.0)


def test_the_same_receipt_counts_once_however_it_comes():
    one = spent(LabelSet.new(SIZE), 1.0, [1, 2])
    copies = [
        one,
        one,
        copy.copy(one),
        copy.deepcopy(one),
        pickle.loads(pickle.dumps(one)),
        Receipt.from_json(json.loads(json.dumps(one.to_json()))),
        *Receipts.from_bytes(Receipts([one, one]).to_bytes())[0],
    ]
    assert Receipts(copies).guarantee() == Receipts([one]).guarantee()
    assert Receipts(copies).guarantee().epsilon == 1.0
    assert [found.id for found in Receipts.merged(copies, copies)] == [one.id]


@pytest.mark.parametrize("size", [0, SIZE, 9])
def test_one_id_has_one_cost_whatever_the_number_of_labels(size):
    receipts = [spent(A, 1.0, id="k"), spent(LabelSet("a", size), 1e-6, id="k")]
    for order in (receipts, receipts[::-1]):
        with pytest.raises(ReceiptError, match="expected one content for the receipt k"):
            Receipts(order).guarantee()


def receipts_of_many(num_sets, charges, delta):
    """Those of ``num_sets`` label sets, of which each example has a charge of its own."""
    return [
        Receipt(labels, charge, "a use", examples=np.array([one]), delta=delta)
        for labels in (LabelSet.new(len(charges)) for _ in range(num_sets))
        for one, charge in enumerate(charges)
    ]


@pytest.mark.parametrize("delta", [0.0, 1e-5])
@pytest.mark.holds("accounting.Receipts")
def test_very_many_histories_are_bounded_from_above(delta):
    """Up to 1,000 combinations are exact; of more each charge counts as often as anybody's."""
    charges = [pure(0.125 * (1 + one)) for one in range(11)]
    exact = Receipts(receipts_of_many(3, charges[-2:], delta)).guarantee()
    assert exact.epsilon == 3 * 1.375
    bound = Receipts(receipts_of_many(3, charges, delta)).guarantee()
    assert bound.epsilon == exact.epsilon  # of pure uses nothing is lost
    sets = [LabelSet.new(SIZE) for _ in range(2)]
    alike = [spent(sets[0], 0.5), spent(sets[1], 0.25)]  # one history each: nothing is lost
    assert Receipts(alike).guarantee().epsilon == 0.75


def test_many_histories_of_gaussian_noise_are_bounded_from_above():
    noises = [EventFields.gaussian(sigma).dp_event() for sigma in np.linspace(4.0, 40.0, 32)]
    charges = [Charge.of_event(noise, 1e-5) for noise in noises]
    both = dp_accounting.ComposedDpEvent((noises[0], noises[0]))
    exact = Receipts(receipts_of_many(2, charges[:3], 1e-5)).guarantee()
    assert exact.epsilon == pytest.approx(Charge.of_event(both, 1e-5).epsilon)
    bound = Receipts(receipts_of_many(2, charges, 1e-5)).guarantee()
    every = dp_accounting.ComposedDpEvent(tuple(noises * 2))
    assert bound.epsilon == pytest.approx(Charge.of_event(every, 1e-5).epsilon)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ({}, {}, True),
        ({"stored": True}, {}, True),
        ({"stored": True}, {"stored": True}, False),  # two names that last
        ({"people": "a"}, {"people": "b"}, False),
        ({"people": "a"}, {"people": "a"}, True),
        ({"people": "a"}, {}, True),
        ({"people": "a", "stored": True}, {"stored": True}, False),
    ],
)
def test_which_label_sets_may_be_the_same_labels(first, second, same):
    one, other = (
        LabelSet.new(4, fields.get("people"), stored=fields.get("stored", False))
        for fields in (first, second)
    )
    assert one.may_be(other) == other.may_be(one) == same
    assert one.may_be(one) and one.may_be(copy.deepcopy(one))


def test_deltas_that_only_add_up_are_added_or_named():
    """Two vaults that each spent their own delta on peer-to-peer randomized response."""
    opaque = Charge(0.5, 1e-6, EventFields.approximate(0.5, 1e-6))
    receipts = [Receipt(LabelSet.new(SIZE), opaque, "reports", delta=1e-6) for _ in range(2)]
    added = Receipts(receipts).guarantee(delta=2e-6)
    assert (added.epsilon, added.delta) == (1.0, 2e-6)
    statement = Receipts(receipts).guarantee()
    if math.isinf(statement.epsilon):
        assert "delta" in statement.assumptions[0]
    else:
        assert (statement.epsilon, statement.delta) == (1.0, 2e-6)


def test_deltas_that_add_up_to_one_or_more_promise_nothing():
    for delta in (0.45, 0.5, 0.6):
        half = Charge(0.5, delta, EventFields.approximate(0.5, delta))
        uses = [Receipt(LabelSet.new(SIZE), half, "reports", delta=delta) for _ in range(2)]
        assert math.isinf(Receipts(uses).guarantee().epsilon)


def test_a_declared_price_is_added():
    lost, known = unknown("?"), spent(LabelSet.new(SIZE), 0.5)
    claim = Receipt.of_declaration([lost], "trained elsewhere", epsilon=1.0)
    statement = Receipts([lost, known, claim]).guarantee()
    assert (statement.epsilon, statement.delta) == (1.5, 0.0)
    approximate = Receipt.of_declaration([lost], "trained elsewhere", epsilon=1.0, delta=1e-6)
    statement = Receipts([lost, known, approximate]).guarantee()
    assert (statement.epsilon, statement.delta) == (1.5, 1e-6)
    assert approximate.kind == "declared" and approximate.answers == (lost.id,)


@pytest.mark.parametrize("delta", [0.0, 1e-6])
@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_a_declared_cost_is_counted_and_written_with_any_of_its_numbers(epsilon, delta):
    claims = [
        Receipt.of_declaration([], "trained elsewhere", epsilon, delta),
        Receipt.of_statement(PrivacyGuarantee(epsilon, delta)),
    ]
    for claim in claims:
        stated = Receipts([read_back(claim)]).guarantee()
        assert (stated.epsilon, stated.delta) == (epsilon, delta)
        assert claim.has_cost == (epsilon + delta > 0.0)
    both = Receipts(claims).guarantee(2 * delta)
    assert (both.epsilon, both.delta) == (2 * epsilon, 2 * delta)


@pytest.mark.parametrize("cost", [(1.0, 0.0), (0.0, 1e-6), (math.inf, 0.0)])
def test_a_cost_has_an_event(cost):
    """Else a plug-in's noise would cost nothing in a composition of events."""
    for event in (EventFields.NONE, dp_accounting.NoOpDpEvent()):
        with pytest.raises(ValueError, match="got NoOpDpEvent, which costs nothing"):
            Charge(*cost, event)


@pytest.mark.parametrize("unit", ["label", "row", "user"])
def test_the_unit_of_the_statement_is_that_of_the_receipts(unit):
    words, features = {
        "label": ("the label of one training example", ONE_EACH),
        "row": ("the whole row of labels of one training example", ONE_EACH),
        "user": ("all labels of one user", "The features and the user of each example are public."),
    }[unit]
    lost = unknown("?")
    declared = [lost, Receipt.of_declaration([lost], "public")]  # has no unit of its own
    for others in ([], declared):
        statement = Receipts([*others, spent(A, unit=unit), spent(A, unit=unit)]).guarantee()
        assert statement.unit == words and features in statement.assumptions
        assert statement.relation == "replace_label" and statement.num_units == SIZE


def test_delta_is_told_by_the_number_of_units():
    """Users are fewer than labels; where labels are protected, theirs is the number."""
    labels = LabelSet.new(1000)
    by_user = spent(labels, unit="user", num_units=70)
    assert Receipts([by_user]).guarantee().num_units == 70
    assert Receipts([by_user, spent(labels, unit="user")]).guarantee().num_units == 1000
    assert Receipts([by_user, spent(labels)]).guarantee().num_units == 1000
    assert Receipts([by_user, spent(LabelSet.new(40), unit="user")]).guarantee().num_units == 70
    lost = unknown("?")
    declared = [lost, Receipt.of_declaration([lost], "public")]
    assert Receipts(declared).guarantee().num_units is None
    assert Receipts([*declared, by_user]).guarantee().num_units == 70


def test_a_clock_that_goes_backwards_changes_nothing(monkeypatch, tmp_path):
    """The order of a store is that of its records, and a receipt's name is random."""
    hours = itertools.count(0, -1)

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            start = datetime.datetime(2026, 1, 1, tzinfo=tz)
            return start + datetime.timedelta(hours=next(hours))

    monkeypatch.setattr(datetime, "datetime", Clock)

    def vault(budget=None):
        return PrivateLabels([0, 1, 1], 2, budget=budget, store=tmp_path / "store")

    labels = vault(PrivacyBudget(3.0))
    drawn = [labels.randomize(RandomizedResponse(0.25 * (1 + i), 2)).values for i in range(3)]
    labels.raise_budget(PrivacyBudget(4.0), reason="there was more")
    drawn.append(labels.randomize(RandomizedResponse(1.0, 2)).values)
    again = vault()
    times = [one.time for one in again.receipts]
    assert times == sorted(times, reverse=True) and len(set(times)) == 4
    assert again.budget == PrivacyBudget(4.0)
    assert again.guarantee() == labels.guarantee() and again.guarantee().epsilon == 2.5
    assert [use.epsilon_so_far for use in again.history()] == [0.25, 0.75, 1.5, 1.5, 2.5]
    for i, values in enumerate(drawn):
        mechanism = RandomizedResponse(0.25 * (1 + i), 2)
        np.testing.assert_array_equal(again.randomize(mechanism).values, values)
    assert again.guarantee().epsilon == 2.5


def test_a_receipt_says_who_when_and_with_what(monkeypatch):
    monkeypatch.setenv("LABELDP_ACTOR", "a person")
    before = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    one = spent(LabelSet.new(SIZE))
    after = datetime.datetime.now(datetime.timezone.utc)
    assert one.actor == "a person"
    assert one.version == tf_labeldp.__version__
    assert before <= datetime.datetime.fromisoformat(one.time) <= after
    assert datetime.datetime.fromisoformat(one.time).utcoffset() == datetime.timedelta(0)


def test_a_machine_without_a_login_has_an_actor_too(monkeypatch):
    def refuse():
        raise OSError("no entry")

    monkeypatch.delenv("LABELDP_ACTOR", raising=False)
    monkeypatch.setattr("getpass.getuser", refuse)
    assert spent(LabelSet.new(SIZE)).actor == "unknown"


LABELS = LabelSet.new(1000, "north", stored=True)
FORMAT = Receipts.from_bytes(Receipts().to_bytes())[1]["format"]
EXAMPLES = {
    "all": None,
    "some": np.array([0, 3, 999]),
    "none": np.array([], dtype=np.int64),
    "every one": np.arange(1000),
}
KEPT = {
    **{name: spent(LABELS, 0.1 + 0.2, rows) for name, rows in EXAMPLES.items()},
    "steps": Receipt(
        LABELS,
        dp_sgd_charge(10.0, 0.02, 59, 1e-5, privacy_unit="user"),
        "59 steps ≥ 0",
        kind="steps",
        key="fit/0",
        delta=1e-5,
        unit="user",
        num_units=70,
        seeded=True,
        metrics_reported=True,
        sample_weights=True,
    ),
    "release": Receipt(
        LabelSet.new(0), pure(1e-9), "a release", kind="release", output_digest="0" * 64
    ),
    "named": spent(LABELS, key="a"),
    "unknown": unknown("nobody knows how"),
    "declared": Receipt.of_declaration([unknown("?")], "public", epsilon=0.5, delta=1e-6),
    "short": dataclasses.replace(Receipt.of_declaration([unknown("?")], "public"), answers=("b",)),
}


def read_back(one):
    """JSON as strict readers take it."""

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    text = json.dumps(one.to_json(), allow_nan=False)
    return Receipt.from_json(json.loads(text, parse_constant=refuse))


@pytest.mark.parametrize("name", KEPT)
def test_round_trip(name):
    one = KEPT[name]
    for again in (
        read_back(one),
        pickle.loads(pickle.dumps(one)),
        Receipts.from_bytes(Receipts([one]).to_bytes())[0][0],
    ):
        for field in dataclasses.fields(one):
            if field.name != "examples":
                assert getattr(again, field.name) == getattr(one, field.name), field.name
        assert (again.examples is None) == (one.examples is None)
        if one.examples is not None:
            np.testing.assert_array_equal(again.examples, one.examples)
        assert hash(again.charge) == hash(one.charge) and again.to_json() == one.to_json()
        assert Receipts([again]).guarantee() == Receipts([one]).guarantee()


def test_the_name_of_a_use_is_empty_for_a_draw_without_one():
    assert KEPT["named"].name == "a"
    assert spent(LABELS, key=f"{Receipt.UNNAMED}1").name == ""


def test_many_receipts_are_kept_in_their_order():
    receipts = tuple(KEPT.values())
    content = Receipts(receipts).to_bytes()
    assert isinstance(content, bytes)
    assert [one.id for one in Receipts.from_bytes(content)[0]] == [one.id for one in receipts]
    none, more = Receipts.from_bytes(Receipts([]).to_bytes(layers=[0, 2]))
    assert none == () and more["layers"] == [0, 2]


def changes_of(data):
    """All ways to change one value of a receipt, with its place."""
    for name, value in data.items():
        if isinstance(value, dict):
            for inner, changed in changes_of(value):
                yield f"{name}.{inner}", {**data, name: changed}
        else:
            yield name, {**data, name: value is None or [value, "other"]}
        yield f"{name} is gone", {key: kept for key, kept in data.items() if key != name}
    yield "one more", {**data, "more": 1}


@pytest.mark.parametrize("name", KEPT)
def test_any_edit_of_a_receipt_is_refused(name):
    data = json.loads(json.dumps(KEPT[name].to_json()))
    count = 0
    for place, edited in changes_of(data):
        with pytest.raises(ReceiptError, match="damaged or was edited"):
            Receipt.from_json(edited)
            pytest.fail(place)
        count += 1
    assert count > 40


def test_what_is_no_receipt_is_refused():
    for data in (None, [], "a receipt", {}, {"digest": "0"}, 7):
        with pytest.raises(ReceiptError, match="damaged or was edited"):
            Receipt.from_json(data)


def test_an_edited_pickle_is_refused():
    content = pickle.dumps(spent(LABELS, 2.0))
    assert content.count(b"a draw") == 1
    with pytest.raises(ReceiptError, match="damaged or was edited"):
        pickle.loads(content.replace(b"a draw", b"b draw"))


def packed(**changes):
    """The bytes of receipts, with other content but intact by themselves."""
    content = json.loads(zlib.decompress(Receipts([spent(LABELS)]).to_bytes()))
    return zlib.compress(json.dumps({**content, **changes}).encode())


def test_an_edited_receipt_within_bytes_is_refused():
    assert len(Receipts.from_bytes(packed())[0]) == 1
    data = spent(LABELS, 2.0).to_json()
    with pytest.raises(ReceiptError, match="damaged or was edited"):
        Receipts.from_bytes(packed(receipts=[{**data, "what": "nothing"}]))


def test_damaged_bytes_are_refused():
    content = Receipts([spent(LABELS)]).to_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 0xFF
    damaged = [content[:-10], bytes(flipped), content[:0], b"not receipts", zlib.compress(b"[1]")]
    damaged.append(zlib.compress(b'{"version": "1"}'))
    for more in ({}, {"receipts": None}, {"receipts": 7}):
        data = {"format": FORMAT, "version": "1", **more}
        damaged.append(zlib.compress(json.dumps(data).encode()))
    for one in damaged:
        with pytest.raises(ReceiptError, match="the receipts of this file are damaged"):
            Receipts.from_bytes(one)


def test_a_new_field_raises_the_format():
    """A version that knows another set of fields writes another format: list it here."""
    fields = {
        3: "actor answers budget_epsilon charge delta digest examples id key kind labels "
        "metrics_reported num_units output_digest plan plan_uses relation sample_weights seeded "
        "time unit use version what",
    }
    label_set = {3: "name people size stored"}
    charge = {3: "assumptions delta epsilon event"}
    receipt = spent(LABELS)
    full = {field.name for field in dataclasses.fields(receipt)} | {"digest"}
    assert full == set(fields[FORMAT].split()) >= set(receipt.to_json())
    assert set(receipt.to_json()["labels"]) == set(label_set[FORMAT].split())
    assert set(receipt.to_json()["charge"]) == set(charge[FORMAT].split())


def test_a_newer_format_is_refused_and_says_who_reads_it():
    newer = packed(format=FORMAT + 1, version="9.9", receipts="of another shape")
    with pytest.raises(ReceiptError, match=r"newer version of tf-labeldp \(9\.9\), .* Update"):
        Receipts.from_bytes(newer)


EVENTS = {
    "NoOpDpEvent": dp_accounting.NoOpDpEvent(),
    "NonPrivateDpEvent": dp_accounting.NonPrivateDpEvent(),
    "GaussianDpEvent": dp_accounting.GaussianDpEvent(0.1 + 0.2),
    "LaplaceDpEvent": dp_accounting.LaplaceDpEvent(3.0),
    "RandomizedResponseDpEvent": dp_accounting.RandomizedResponseDpEvent(1 / 3, 7),
    "PoissonSampledDpEvent": dp_accounting.PoissonSampledDpEvent(
        0.02, dp_accounting.GaussianDpEvent(5.0)
    ),
    "SelfComposedDpEvent": dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(0.02, dp_accounting.LaplaceDpEvent(5.0)), 1000
    ),
    "ComposedDpEvent": dp_accounting.ComposedDpEvent(
        (
            EventFields.randomized_response(0.1).dp_event(),
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.ComposedDpEvent(
                    (
                        EventFields.dp_sgd(5.0, 0.1, 7).dp_event(),
                        EventFields.gaussian(2.0).dp_event(),
                    )
                ),
                3,
            ),
            dp_accounting.ComposedDpEvent(()),
        )
    ),
    "ZCDpEvent": dp_accounting.ZCDpEvent(0.1, xi=0.01),
    "SampledWithReplacementDpEvent": dp_accounting.SampledWithReplacementDpEvent(
        100, 10, dp_accounting.GaussianDpEvent(2.0)
    ),
    "SampledWithoutReplacementDpEvent": dp_accounting.SampledWithoutReplacementDpEvent(
        100, 10, dp_accounting.GaussianDpEvent(2.0)
    ),
    "SingleEpochTreeAggregationDpEvent": dp_accounting.SingleEpochTreeAggregationDpEvent(
        3.0, (2, 4)
    ),
    "TruncatedSubsampledGaussianDpEvent": dp_accounting.TruncatedSubsampledGaussianDpEvent(
        1000, 0.1, 120, 3.0
    ),
    "LabelDistanceDpEvent": EventFields.dp_sgd(5.0, 0.02, 3, "label_distance").dp_event().event,
    "AddedDeltaDpEvent": added_delta(1e-12),
}


def test_every_event_of_dp_accounting_is_here():
    theirs = {
        name
        for name, kind in vars(dp_accounting).items()
        if isinstance(kind, type) and issubclass(kind, dp_accounting.DpEvent)
    }
    ours = {"AddedDeltaDpEvent", "LabelDistanceDpEvent"}
    assert set(EVENTS) - ours == theirs - {"DpEvent", "UnsupportedDpEvent"}
    for name, event in EVENTS.items():
        assert type(event).__name__ == name


def test_round_trip_of_events():
    more = [
        EventFields.approximate(0.5, 1e-6).dp_event(),
        EventFields.dp_sgd(np.float64(8.0), np.float32(0.25), np.int64(2)).dp_event(),
    ]
    for event in (*EVENTS.values(), *more):
        again = EventFields(
            json.loads(json.dumps(EventFields.of(event), allow_nan=False))
        ).dp_event()
        assert again == event and hash(again) == hash(event) and type(again) is type(event)


class OwnDpEvent(dp_accounting.DpEvent):
    """Of no program but this one."""


OTHERS = [OwnDpEvent(), dp_accounting.DpEvent(), dp_accounting.UnsupportedDpEvent(), None]


def test_an_event_of_another_class_is_not_written_nor_read():
    for event in OTHERS:
        name = type(event).__name__
        with pytest.raises(
            ValueError, match=rf"expected an event .*got {name}\. Use one of AddedDelta"
        ):
            EventFields.of(event)
        for outer in (
            dp_accounting.SelfComposedDpEvent(event, 2),
            dp_accounting.PoissonSampledDpEvent(0.1, event),
        ):
            with pytest.raises(
                ValueError, match="expected an event of dp_accounting that JSON can represent"
            ):
                EventFields.of(outer)
    for name in ("OwnDpEvent", None, "DpEvent", "UnsupportedDpEvent"):
        with pytest.raises(ValueError, match="is not a known event of dp_accounting"):
            EventFields({"class": name, "noise_multiplier": 1.0}).dp_event()


@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_laplace_under_replacement_is_the_pure_mechanism_of_twice_its_reach(scale):
    """A plug-in may name one; replacing moves twice as far as adding or removing."""
    laplace = dp_accounting.LaplaceDpEvent(scale)
    for event in (laplace, dp_accounting.PoissonSampledDpEvent(0.1, laplace)):
        for uses in (1, 20):
            of_both = (
                Charge.of_event(dp_accounting.SelfComposedDpEvent(one, uses), 1e-6).epsilon
                for one in (event, EventFields.randomized_response(2.0 / scale).dp_event())
            )
            assert next(of_both) == next(of_both)
    assert Charge.of_event(laplace, 0.0).epsilon >= 2.0 / scale - 1e-9


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_use_of_several_label_sets_counts_once(order):
    """In any order, and with other uses of either set; never twice for one set by mistake."""
    stored = [LabelSet(name, SIZE, stored=True) for name in "xyz"]
    shared = [spent(labels, 0.5, use="step 1") for labels in stored]
    receipts = [shared[place] for place in order]
    assert Receipts(receipts).guarantee().epsilon == 0.5
    assert Receipts([*receipts, *receipts]).guarantee().epsilon == 0.5
    for labels in stored:
        assert Receipts([*receipts, spent(labels, 0.25)]).guarantee().epsilon == 0.75
        assert Receipts([spent(labels, 0.25), *receipts]).guarantee().epsilon == 0.75
    # Other uses, uses without a name, and a second receipt of the same labels count.
    more = [spent(stored[0], 0.5, use="step 2"), spent(stored[1], 0.5), spent(stored[1], 0.5)]
    assert Receipts([*receipts, *more]).guarantee().epsilon == 2.0
    again = spent(receipts[0].labels, 0.5, use="step 1")
    assert Receipts([*receipts, again]).guarantee().epsilon == 1.0


PEOPLE_OF_A_USE = {
    "one population": ((NORTH, LATER), {"north": 1.5, "south": 1.0, None: 1.5}),
    "two populations": ((NORTH, SOUTH), {"north": 1.5, "south": 1.5, None: 1.5}),
    "one of them unknown": ((NORTH, A), {"north": 1.5, "south": 1.5, None: 1.5}),
}


@pytest.mark.parametrize("case", PEOPLE_OF_A_USE)
def test_a_shared_use_counts_for_the_people_of_its_label_sets(case):
    """For everybody if these are not known to be of one population."""
    sets, expected = PEOPLE_OF_A_USE[case]
    for people, epsilon in expected.items():
        other = spent(LabelSet("another", SIZE, people), 1.0)
        receipts = [other, *(spent(labels, 0.5, use="step") for labels in sets)]
        for order in itertools.permutations(receipts):
            assert Receipts(order).guarantee().epsilon == epsilon


OPTIONAL = {"use": "step", "plan": "a plan", "plan_uses": 3, "budget_epsilon": 2.0}
"""Fields that files of earlier versions do not have."""


@pytest.mark.parametrize(("name", "value"), OPTIONAL.items())
def test_a_later_field_is_kept_and_absent_at_its_default(name, value):
    plain, longer = spent(A), spent(A, **{name: value})
    assert name not in plain.to_json() and longer.to_json()[name] == value
    again = Receipt.from_json(json.loads(json.dumps(longer.to_json())))
    assert getattr(again, name) == value
    assert getattr(Receipt.from_json(plain.to_json()), name) == getattr(plain, name)


@pytest.mark.parametrize("number", [1, 2])
def test_bytes_of_earlier_formats_are_read(number):
    [receipt], _ = Receipts.from_bytes(packed(format=number))
    assert receipt.charge == spent(LABELS).charge


def test_a_vault_writes_its_budget_into_receipts():
    labels = PrivateLabels([0, 1, 1], 2, budget=PrivacyBudget(2.0, 1e-5))
    [receipt] = labels.randomize(RandomizedResponse(1.0, 2)).receipts
    assert (receipt.budget_epsilon, receipt.delta) == (2.0, 1e-5)


def test_the_name_of_a_shared_use_is_kept_and_absent_without_one():
    plain, shared = spent(A), spent(A, use="step")
    assert "use" not in plain.to_json()
    assert Receipt.from_json(json.loads(json.dumps(shared.to_json()))).use == "step"
    assert Receipt.from_json(plain.to_json()).use == ""


def adaptive(*receipts):
    return Receipts(receipts).guarantee().adaptive


def test_the_figure_for_adaptive_use_is_the_budget_and_no_sum_of_releases():
    kept = {"budget_epsilon": 2.0, "delta": 1e-5}
    assert adaptive(spent(A, 0.5, **kept)) == (2.0, 1e-5)
    assert adaptive(spent(A, 0.5, **kept), spent(A, 1.0, **kept)) == (2.0, 1e-5)
    # A budget that was raised, and free receipts.
    raised = {"budget_epsilon": 3.0, "delta": 1e-5}
    free = Receipt(WIDE, Charge(0.0, 0.0, {"class": "NoOpDpEvent"}), "free", "declared")
    assert adaptive(spent(A, 0.5, **kept), spent(A, 1.0, **raised), free) == (3.0, 1e-5)


def test_budgets_of_label_sets_of_the_same_people_add_up():
    def kept(labels, epsilon):
        return spent(labels, 0.5, budget_epsilon=epsilon, delta=1e-5)

    assert adaptive(kept(A, 2.0), kept(B, 1.0)) == (3.0, 2e-5)
    assert adaptive(kept(NORTH, 2.0), kept(SOUTH, 1.0)) == (2.0, 1e-5)
    assert adaptive(kept(NORTH, 2.0), kept(SOUTH, 1.0), kept(A, 4.0)) == (6.0, 2e-5)


def test_a_statement_over_populations_is_in_the_order_of_its_receipts():
    """Else two processes would write the same statement with two digests, and count it twice."""
    names = [f"population {number}" for number in range(6)]
    receipts = []
    for name in names:
        charge = dataclasses.replace(pure(0.5), assumptions=(f"Of {name}.",))
        receipts.append(Receipt(LabelSet(name, SIZE, name), charge, "a draw"))
    for order in (receipts, receipts[::-1]):
        stated = [str(note) for note in Receipts(order).guarantee().assumptions]
        assert stated[:6] == [f"Of {receipt.labels.name}." for receipt in order]


def test_without_a_budget_nothing_is_stated_for_adaptive_use():
    """A receipt of 0.3, a declaration, and more than a budget allows."""
    kept = spent(A, 0.5, budget_epsilon=0.6)
    assert adaptive(kept) == (0.6, 0.0)
    assert adaptive(kept, spent(A, 0.05)) is None
    assert adaptive(kept, Receipt.of_declaration([], "a plan", 0.1)) is None
    assert adaptive(kept, spent(A, 0.5, budget_epsilon=0.6)) is None
