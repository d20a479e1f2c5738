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

import dp_accounting
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tf_labeldp
from tf_labeldp.accounting import (
    Charge,
    PrivacyBudget,
    PrivacyGuarantee,
    Receipt,
    ReceiptError,
    dp_sgd_charge,
    receipts,
)
from tf_labeldp.accounting.budget import compose_charges
from tf_labeldp.accounting.events import (
    approximate_dp_event,
    dp_sgd_event,
    event_from_json,
    event_to_json,
    gaussian_event,
    pure_dp_event,
)
from tf_labeldp.accounting.receipts import (
    Histories,
    LabelSet,
    actor_name,
    compose_receipts,
    declared_receipt,
    merge_receipts,
    receipts_from_bytes,
    receipts_to_bytes,
)
from tf_labeldp.mechanisms import (
    RandomizedResponse,
)
from tf_labeldp.vault import PrivateLabels

BOUNDED = settings(max_examples=100, deadline=None, derandomize=True)
SIZE = 6
THROUGH_HERE = "The true labels reach training and tuning through the uses counted here alone."
SECURE = "The operating system's random generator and OpenSSL's, which it seeds, are secure."
ONE_EACH = "The features are public, and each person has one example."


def pure(epsilon):
    return Charge(epsilon, 0.0, pure_dp_event(epsilon))


def spent(labels, epsilon=1.0, examples=None, **fields):
    """The receipt of a pure draw of these examples."""
    rows = None if examples is None else np.array(examples, dtype=np.int64)
    return Receipt(labels, pure(epsilon), "a draw", examples=rows, **fields)


def unknown(*reasons):
    return Receipt(LabelSet.new(0), Charge.unknown(*reasons), "training", kind="unknown")


@pytest.mark.parametrize("rows", [range(SIZE), [True] * SIZE, reversed(range(SIZE))])
def test_a_receipt_that_names_all_examples_stores_none(rows):
    receipt = spent(LabelSet.new(SIZE), 1.0, None)
    receipt = dataclasses.replace(receipt, examples=np.array(list(rows)))
    assert receipt.examples is None and receipt.num_examples == SIZE
    assert receipt.to_json()["examples"] is None


def test_a_mask_names_examples_as_indices_do():
    mask = np.array([True, False, False, True, True, False])
    receipt = Receipt(LabelSet.new(SIZE), pure(1.0), "a draw", examples=mask)
    assert np.asarray(receipt.examples).tolist() == [0, 3, 4]


def test_one_receipt_is_its_charge():
    statement = compose_receipts([spent(LabelSet.new(SIZE), 0.75)])
    assert statement == PrivacyGuarantee(
        0.75, assumptions=(ONE_EACH, THROUGH_HERE, SECURE), num_units=SIZE
    )


@pytest.mark.parametrize(
    ("draws", "total"),
    [
        ([(1.0, None), (0.5, None)], 1.5),  # in sequence
        ([(1.0, [0, 1, 2]), (0.5, [3, 4, 5])], 1.0),  # in parallel
        ([(1.0, [0, 1, 2]), (0.5, [2, 3])], 1.5),  # on the example that both touch
        ([(1.0, [0, 1]), (0.5, [1, 2]), (0.25, [2, 0])], 1.5),  # a pair each, never all three
        ([(1.0, [0]), (0.25, [1]), (0.25, [1]), (0.25, [1])], 1.0),
        ([(0.5, None), (0.25, [5]), (0.125, [4])], 0.75),
        ([(1.0, [])], 0.0),  # nobody's label
    ],
)
def test_uses_compose_in_sequence_on_an_example_and_in_parallel_on_others(draws, total):
    labels = LabelSet.new(SIZE)
    receipts = [spent(labels, epsilon, rows) for epsilon, rows in draws]
    for order in itertools.permutations(receipts):
        assert compose_receipts(order).epsilon == total


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
    histories = Histories(SIZE)
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


@pytest.mark.parametrize("delta", [1e-6, 1e-4])
def test_many_uses_at_a_positive_delta_cost_what_charges_do(delta):
    """Each example by itself: the theorem that is finer is tried on each."""
    labels = LabelSet.new(SIZE)
    steps = dp_sgd_charge(10.0, 0.05, 100, delta)
    receipts = [spent(labels, 0.1, [0, 1], delta=delta) for _ in range(60)]
    receipts += [Receipt(labels, steps, "steps", delta=delta) for _ in range(3)]
    receipts += [spent(labels, 0.2, [5], delta=delta)]
    statement = compose_receipts(receipts)
    worst = compose_charges([pure(0.1)] * 60 + [steps] * 3, delta)
    others = compose_charges([pure(0.2)] + [steps] * 3, delta)
    assert statement.epsilon == worst.epsilon > others.epsilon
    assert statement.epsilon < 60 * 0.1 + 3 * steps.epsilon  # finer than the sum
    assert statement.delta == delta
    assert set(worst.assumptions) <= set(statement.assumptions)
    assert any("fixed in advance" in text for text in statement.assumptions)


def test_the_statement_rests_on_what_the_sum_of_any_example_rests_on():
    """Also on that of an example that was charged less."""
    labels = LabelSet.new(SIZE)
    noted = Charge(0.5, 0.0, pure_dp_event(0.5), ("a note on the draw of a few",))
    few = Receipt(labels, noted, "a draw", examples=np.array([3]))
    statement = compose_receipts([spent(labels, 2.0, [0, 1]), few])
    assert statement.epsilon == 2.0
    assert "a note on the draw of a few" in statement.assumptions


def test_epsilon_and_delta_hold_for_every_example():
    """One pays in epsilon, another in delta: the statement has the larger of each."""
    labels = LabelSet.new(SIZE)
    gaussian = Charge(0.3, 1e-6, gaussian_event(20.0))
    receipts = [
        spent(labels, 2.0, [0], delta=1e-6),
        Receipt(labels, gaussian, "a release", examples=np.array([1]), delta=1e-6),
    ]
    statement = compose_receipts(receipts)
    assert (statement.epsilon, statement.delta) == (2.0, 1e-6)


def test_delta_is_the_largest_of_the_receipts_unless_it_is_given():
    labels = LabelSet.new(SIZE)
    receipts = [spent(labels, 0.1, delta=10.0**-power) for power in range(3, 40)]
    default = compose_receipts(receipts)
    assert default.delta == 1e-3
    assert default == compose_receipts(receipts, delta=1e-3)
    assert compose_receipts(receipts, delta=1e-9).epsilon > default.epsilon
    pure_sum = compose_receipts(receipts, delta=0.0)
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
        *receipts_from_bytes(receipts_to_bytes([one, one]))[0],
    ]
    assert compose_receipts(copies) == compose_receipts([one])
    assert compose_receipts(copies).epsilon == 1.0
    assert [found.id for found in merge_receipts(copies, copies)] == [one.id]


def test_the_worst_examples_of_several_label_sets_add_up():
    """In whatever order their examples are, one person may have the worst of each."""
    sets = [LabelSet.new(SIZE) for _ in range(3)]
    receipts = [
        spent(sets[0], 1.0, [0]),
        spent(sets[0], 0.25, [1, 2]),
        spent(sets[1], 0.5, [5]),
        spent(sets[2], 0.125),
    ]
    statement = compose_receipts(receipts)
    assert statement.epsilon == 1.0 + 0.5 + 0.125
    assert "Each person has at most one example in each of 3 label sets." in statement.assumptions
    assert compose_receipts(reversed(receipts)).epsilon == statement.epsilon


def test_several_label_sets_compose_at_a_positive_delta_like_uses_of_one():
    first, second = LabelSet.new(SIZE), LabelSet.new(100)
    receipts = [spent(first, 0.1, delta=1e-5) for _ in range(50)]
    receipts += [spent(second, 0.1, delta=1e-5) for _ in range(50)]
    statement = compose_receipts(receipts)
    assert statement.epsilon == compose_charges([pure(0.1)] * 100, 1e-5).epsilon < 6.0
    assert statement.num_units == 100


def receipts_of_many(num_sets, charges, delta):
    """Those of ``num_sets`` label sets, of which each example has a charge of its own."""
    return [
        Receipt(labels, charge, "a use", examples=np.array([one]), delta=delta)
        for labels in (LabelSet.new(len(charges)) for _ in range(num_sets))
        for one, charge in enumerate(charges)
    ]


@pytest.mark.parametrize("delta", [0.0, 1e-5])
@pytest.mark.holds("accounting.compose_receipts")
def test_very_many_histories_are_bounded_from_above(delta):
    """Up to 1,000 combinations are exact; of more each charge counts as often as anybody's."""
    charges = [pure(0.125 * (1 + one)) for one in range(11)]
    exact = compose_receipts(receipts_of_many(3, charges[-2:], delta))
    assert exact.epsilon == 3 * 1.375
    bound = compose_receipts(receipts_of_many(3, charges, delta))
    assert bound.epsilon == exact.epsilon  # of pure uses nothing is lost
    sets = [LabelSet.new(SIZE) for _ in range(2)]
    alike = [spent(sets[0], 0.5), spent(sets[1], 0.25)]  # one history each: nothing is lost
    assert compose_receipts(alike).epsilon == 0.75


def test_many_histories_of_gaussian_noise_are_bounded_from_above():
    noises = [gaussian_event(sigma) for sigma in np.linspace(4.0, 40.0, 32)]
    charges = [Charge.of_event(noise, 1e-5) for noise in noises]
    both = dp_accounting.ComposedDpEvent((noises[0], noises[0]))
    exact = compose_receipts(receipts_of_many(2, charges[:3], 1e-5))
    assert exact.epsilon == pytest.approx(Charge.of_event(both, 1e-5).epsilon)
    bound = compose_receipts(receipts_of_many(2, charges, 1e-5))
    every = dp_accounting.ComposedDpEvent(tuple(noises * 2))
    assert bound.epsilon == pytest.approx(Charge.of_event(every, 1e-5).epsilon)


def test_declared_populations_compose_in_parallel():
    north, south = LabelSet.new(SIZE, "north"), LabelSet.new(SIZE, "south")
    statement = compose_receipts([spent(north, 1.0), spent(south, 0.5)])
    assert statement.epsilon == 1.0
    assert "No person is in more than one of the populations 'north', 'south'." in (
        statement.assumptions
    )
    assert not any("label sets" in text for text in statement.assumptions)


def test_label_sets_of_one_population_add_up():
    """This year's labels and last year's, of the same people."""
    sets = [LabelSet.new(SIZE, "north"), LabelSet.new(100, "north")]
    statement = compose_receipts([spent(sets[0], 1.0), spent(sets[1], 0.5)])
    assert statement.epsilon == 1.5
    assert "Each person has at most one example in each of 2 label sets." in statement.assumptions


def test_a_label_set_of_undeclared_people_is_added_to_each_population():
    north, south, anybody = LabelSet.new(4, "north"), LabelSet.new(4, "south"), LabelSet.new(4)
    receipts = [spent(north, 1.0), spent(south, 0.5), spent(anybody, 0.25)]
    assert compose_receipts(receipts).epsilon == 1.25
    # The worse population is not always that of the largest charge.
    assert compose_receipts([*receipts, spent(south, 0.75)]).epsilon == 1.5
    assert compose_receipts([spent(anybody, 0.25), spent(north, 1.0)]).epsilon == 1.25


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


def test_what_is_unknown_has_no_epsilon_and_says_why():
    statement = compose_receipts([spent(LabelSet.new(SIZE)), unknown("nobody knows how")])
    assert statement.epsilon == math.inf and not statement.is_private
    assert "nobody knows how" in statement.assumptions
    assert compose_receipts([unknown("nobody knows how")]).assumptions[0] == "nobody knows how"
    for delta in (0.0, 1e-5, 0.5):
        assert compose_receipts([unknown("a")], delta).epsilon == math.inf


def test_deltas_that_only_add_up_are_added_or_named():
    """Two vaults that each spent their own delta on peer-to-peer randomized response."""
    opaque = Charge(0.5, 1e-6, approximate_dp_event(0.5, 1e-6))
    receipts = [Receipt(LabelSet.new(SIZE), opaque, "reports", delta=1e-6) for _ in range(2)]
    added = compose_receipts(receipts, delta=2e-6)
    assert (added.epsilon, added.delta) == (1.0, 2e-6)
    statement = compose_receipts(receipts)
    if math.isinf(statement.epsilon):
        assert "delta" in statement.assumptions[0]
    else:
        assert (statement.epsilon, statement.delta) == (1.0, 2e-6)


def test_a_declaration_answers_what_was_unknown():
    """Whether it comes before or after."""
    known, lost = spent(LabelSet.new(SIZE), 0.5), unknown("nobody knows how")
    claim = declared_receipt([lost], "the labels of ImageNet are public")
    for order in itertools.permutations([known, lost, claim]):
        statement = compose_receipts(order)
        assert statement.epsilon == 0.5 and statement.is_private
        assert "nobody knows how" not in statement.assumptions
        words = "Declared by its author, not checked: the labels of ImageNet are public"
        assert words in statement.assumptions
        assert statement.num_units == SIZE and statement.unit == PrivacyGuarantee(1.0).unit
    # No second label set: a declaration of public labels is of nobody's.
    assert not any("label sets" in text for text in compose_receipts([known, claim]).assumptions)


def test_a_declaration_answers_what_it_was_made_for_and_no_more():
    first, second = unknown("the first"), unknown("the second")
    claim = declared_receipt([first], "public")
    statement = compose_receipts([first, second, claim])
    assert statement.epsilon == math.inf
    assert "the second" in statement.assumptions and "the first" not in statement.assumptions
    both = declared_receipt([first, second], "public")
    assert compose_receipts([first, second, both]).epsilon == 0.0


def test_a_declared_price_is_added():
    lost, known = unknown("?"), spent(LabelSet.new(SIZE), 0.5)
    claim = declared_receipt([lost], "trained elsewhere", epsilon=1.0)
    statement = compose_receipts([lost, known, claim])
    assert (statement.epsilon, statement.delta) == (1.5, 0.0)
    approximate = declared_receipt([lost], "trained elsewhere", epsilon=1.0, delta=1e-6)
    statement = compose_receipts([lost, known, approximate])
    assert (statement.epsilon, statement.delta) == (1.5, 1e-6)
    assert approximate.kind == "declared" and approximate.answers == (lost.id,)


@pytest.mark.parametrize(
    ("unit", "words", "features"),
    [
        ("label", "the label of one training example", ONE_EACH),
        ("row", "the whole row of labels of one training example", ONE_EACH),
        (
            "user",
            "all labels of one user",
            "The features and the user of each example are public.",
        ),
    ],
)
def test_the_unit_of_the_statement_is_that_of_the_receipts(unit, words, features):
    labels = LabelSet.new(SIZE)
    statement = compose_receipts([spent(labels, unit=unit), spent(labels, unit=unit)])
    assert statement.unit == words and statement.assumptions[0] == features
    assert statement.relation == "replace_label"
    lost = unknown("?")
    declared = [lost, declared_receipt([lost], "public"), spent(labels, unit=unit)]
    assert compose_receipts(declared).unit == words  # a declaration has no unit of its own


def test_delta_is_told_by_the_number_of_units():
    """Users are fewer than labels; where labels are protected, theirs is the number."""
    labels = LabelSet.new(1000)
    by_user = spent(labels, unit="user", num_units=70)
    assert compose_receipts([by_user]).num_units == 70
    assert compose_receipts([by_user, spent(labels, unit="user")]).num_units == 1000
    assert compose_receipts([by_user, spent(labels)]).num_units == 1000
    assert compose_receipts([by_user, spent(LabelSet.new(40), unit="user")]).num_units == 70
    lost = unknown("?")
    declared = [lost, declared_receipt([lost], "public")]
    assert compose_receipts(declared).num_units is None
    assert compose_receipts([*declared, by_user]).num_units == 70


def test_uses_by_user_and_by_label_are_stated_by_label():
    labels = LabelSet.new(SIZE)
    statement = compose_receipts([spent(labels, unit="user"), spent(labels, unit="label")])
    assert statement.unit == "the label of one training example"
    assert statement.assumptions[0] == ONE_EACH
    assert "The statement is by label and not by user, since some uses are counted by label." in (
        statement.assumptions
    )
    assert statement.epsilon == 2.0


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize(
    ("flag", "code"),
    [("metrics_reported", "metrics-reported"), ("sample_weights", "public-sample-weights")],
)
def test_flags_of_any_receipt_are_in_the_statement(flag, code, every):
    labels = LabelSet.new(SIZE)
    receipts = [spent(labels, **{flag: True}), spent(labels, **{flag: every})]
    assert code in {one.code for one in compose_receipts(receipts).assumptions}
    assert code not in {one.code for one in compose_receipts([spent(labels)]).assumptions}


def test_one_seeded_use_makes_the_whole_not_private():
    labels = LabelSet.new(SIZE)
    statement = compose_receipts([spent(labels), spent(labels, seeded=True)])
    assert statement.seeded and not statement.is_private and statement.epsilon == 2.0
    assert SECURE not in statement.assumptions
    assert SECURE in compose_receipts([spent(labels)]).assumptions


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
    assert one.actor == "a person" == actor_name()
    assert one.version == tf_labeldp.__version__
    assert before <= datetime.datetime.fromisoformat(one.time) <= after
    assert datetime.datetime.fromisoformat(one.time).utcoffset() == datetime.timedelta(0)


def test_a_machine_without_a_login_has_an_actor_too(monkeypatch):
    def refuse():
        raise OSError("no entry")

    monkeypatch.delenv("LABELDP_ACTOR", raising=False)
    monkeypatch.setattr(receipts.getpass, "getuser", refuse)
    assert actor_name() == "unknown"


LABELS = LabelSet.new(1000, "north", stored=True)
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
    "unknown": unknown("nobody knows how"),
    "declared": declared_receipt([unknown("?")], "public", epsilon=0.5, delta=1e-6),
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
        receipts_from_bytes(receipts_to_bytes([one]))[0][0],
    ):
        for field in dataclasses.fields(one):
            if field.name != "examples":
                assert getattr(again, field.name) == getattr(one, field.name), field.name
        assert (again.examples is None) == (one.examples is None)
        if one.examples is not None:
            np.testing.assert_array_equal(again.examples, one.examples)
        assert hash(again.charge) == hash(one.charge) and again.to_json() == one.to_json()
        assert compose_receipts([again]) == compose_receipts([one])


def test_many_receipts_are_kept_in_their_order():
    receipts = tuple(KEPT.values())
    content = receipts_to_bytes(receipts)
    assert isinstance(content, bytes)
    assert [one.id for one in receipts_from_bytes(content)[0]] == [one.id for one in receipts]
    none, more = receipts_from_bytes(receipts_to_bytes([], layers=[0, 2]))
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
    content = json.loads(zlib.decompress(receipts_to_bytes([spent(LABELS)])))
    return zlib.compress(json.dumps({**content, **changes}).encode())


def test_an_edited_receipt_within_bytes_is_refused():
    assert len(receipts_from_bytes(packed())[0]) == 1
    data = spent(LABELS, 2.0).to_json()
    with pytest.raises(ReceiptError, match="damaged or was edited"):
        receipts_from_bytes(packed(receipts=[{**data, "what": "nothing"}]))


def test_damaged_bytes_are_refused():
    content = receipts_to_bytes([spent(LABELS)])
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 0xFF
    damaged = [content[:-10], bytes(flipped), content[:0], b"not receipts", zlib.compress(b"[1]")]
    damaged.append(zlib.compress(b'{"version": "1"}'))
    for more in ({}, {"receipts": None}, {"receipts": 7}):
        data = {"format": receipts.FORMAT, "version": "1", **more}
        damaged.append(zlib.compress(json.dumps(data).encode()))
    for one in damaged:
        with pytest.raises(ReceiptError, match="the receipts of this file are damaged"):
            receipts_from_bytes(one)


def test_a_newer_format_is_refused_and_says_who_reads_it():
    newer = packed(format=receipts.FORMAT + 1, version="9.9", receipts="of another shape")
    with pytest.raises(ReceiptError, match=r"of tf-labeldp 9\.9.*Install the newer"):
        receipts_from_bytes(newer)


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
            pure_dp_event(0.1),
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.ComposedDpEvent((dp_sgd_event(5.0, 0.1, 7), gaussian_event(2.0))), 3
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
    "LabelDistanceDpEvent": dp_sgd_event(5.0, 0.02, 3, "label_distance").event,
    "AddedDeltaDpEvent": dp_sgd_event(5.0, 0.02, 3, added_delta=1e-12).event.events[1],
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
        approximate_dp_event(0.5, 1e-6),
        dp_sgd_event(np.float64(8.0), np.float32(0.25), np.int64(2)),
    ]
    for event in (*EVENTS.values(), *more):
        again = event_from_json(json.loads(json.dumps(event_to_json(event), allow_nan=False)))
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
            event_to_json(event)
        for outer in (
            dp_accounting.SelfComposedDpEvent(event, 2),
            dp_accounting.PoissonSampledDpEvent(0.1, event),
        ):
            with pytest.raises(
                ValueError, match="expected an event of dp_accounting that JSON can represent"
            ):
                event_to_json(outer)
    for name in ("OwnDpEvent", None, "DpEvent", "UnsupportedDpEvent"):
        with pytest.raises(ValueError, match="is not a known event of dp_accounting"):
            event_from_json({"class": name, "noise_multiplier": 1.0})


@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_laplace_under_replacement_is_the_pure_mechanism_of_twice_its_reach(scale):
    """A plug-in may name one; replacing moves twice as far as adding or removing."""
    laplace = dp_accounting.LaplaceDpEvent(scale)
    for event in (laplace, dp_accounting.PoissonSampledDpEvent(0.1, laplace)):
        for uses in (1, 20):
            of_both = (
                Charge.of_event(dp_accounting.SelfComposedDpEvent(one, uses), 1e-6).epsilon
                for one in (event, pure_dp_event(2.0 / scale))
            )
            assert next(of_both) == next(of_both)
    assert Charge.of_event(laplace, 0.0).epsilon >= 2.0 / scale - 1e-9
