"""A composition of receipts that is kept: what it states at any time."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tf_labeldp.accounting import Charge, LabelSet, PrivacyGuarantee, Receipt, Receipts
from tf_labeldp.plugins import Composition, EventFields

BOUNDED = settings(max_examples=60, deadline=None, derandomize=True)
SIZE = 6
ROWS = st.none() | st.lists(st.integers(0, SIZE - 1), unique=True, max_size=SIZE).map(sorted)


def pure(epsilon):
    return Charge(epsilon, 0.0, EventFields.randomized_response(epsilon))


def spent(labels, epsilon, examples, **fields):
    """The receipt of a pure draw of these examples."""
    rows = None if examples is None else np.array(examples, dtype=np.int64)
    return Receipt(labels, pure(epsilon), "a draw", examples=rows, **fields)


LABEL_SETS = [
    LabelSet("a", SIZE),
    LabelSet("b", SIZE),
    LabelSet("c", SIZE, "north"),
    LabelSet("d", SIZE, "south"),
    LabelSet("e", 0),
]


@st.composite
def any_receipts(draw):
    """Receipts of several label sets, of which some stand in place of others."""
    receipts = []
    for _ in range(draw(st.integers(0, 8))):
        if receipts and draw(st.integers(0, 5)) == 0:
            answered = draw(st.lists(st.sampled_from(receipts), min_size=1, max_size=2))
            receipts.append(
                Receipt.of_declaration(answered, "a study", draw(st.sampled_from([0.0, 0.5])))
            )
            continue
        if draw(st.integers(0, 9)) == 0:
            charge = Charge.unknown("nobody knows how")
            receipts.append(Receipt(LabelSet.new(0), charge, "training", kind="unknown"))
            continue
        labels = draw(st.sampled_from(LABEL_SETS))
        rows = draw(ROWS) if labels.size else None
        receipts.append(
            spent(
                labels,
                draw(st.integers(1, 4)) / 8,
                rows,
                kind=draw(st.sampled_from(["draw", "release", "steps"])),
                delta=draw(st.sampled_from([0.0, 1e-5])),
                unit=draw(st.sampled_from(["label", "label", "user"])),
                num_units=draw(st.sampled_from([None, 3])),
                seeded=draw(st.integers(0, 9)) == 0,
                sample_weights=draw(st.integers(0, 9)) == 0,
                metrics_reported=draw(st.integers(0, 9)) == 0,
            )
        )
    return draw(st.permutations(receipts)) + receipts[:1]


def alike(one, other):
    """Whether statements are equal, except for the order of their assumptions."""
    plain = [dataclasses.replace(each, assumptions=()) for each in (one, other)]
    return plain[0] == plain[1] and set(one.assumptions) == set(other.assumptions)


def worst_person(receipts):
    """The sum of the worst example of each label set that may be of the same people.

    Declarations stand in place of receipts of unknown cost, and of no others.
    """
    declared = {name for one in receipts for name in one.answers}
    standing = {one.id: one for one in receipts if one.kind != "unknown" or one.id not in declared}
    worst, people = {}, {}
    for labels in {one.labels for one in standing.values()}:
        own = [one for one in standing.values() if one.labels == labels]
        worst[labels.name] = max(
            math.fsum(
                one.charge.epsilon
                for one in own
                if one.examples is None or row in np.asarray(one.examples)
            )
            for row in range(max(1, labels.size))
        )
        people[labels.name] = labels.people
    return max(
        math.fsum(worst[name] for name in worst if people[name] in (population, None))
        for population in set(people.values()) | {None}
    )


@pytest.mark.holds("accounting.Composition")
@BOUNDED
@given(any_receipts(), st.sampled_from([None, 0.0, 1e-5]))
def test_a_composition_that_is_kept_states_what_one_of_all_receipts_does(receipts, delta):
    kept = Composition()
    for number, one in enumerate(receipts, 1):
        kept.add(one)
        again = Receipts(receipts[:number]).guarantee(delta)
        assert alike(kept.guarantee(delta), again)
    if receipts:
        assert kept.guarantee(0.0).epsilon == worst_person(receipts)
    else:
        assert kept.guarantee(delta) == PrivacyGuarantee(0.0)


@pytest.mark.parametrize("own", ["", "a", "b"])
def test_a_shared_use_counts_once_at_any_time(own):
    """Its first receipt was counted as that of one label set, until there were more."""
    receipts = [spent(LabelSet(name, SIZE), 0.5, [0], use="step") for name in "abc"]
    receipts.append(spent(LABEL_SETS[0], 0.25, [1]))
    for order in itertools.permutations(receipts):
        kept = Composition(own=own)
        for number, one in enumerate(order, 1):
            kept.add(one)
            together = Composition(order[:number], own=own).guarantee(0.0)
            assert kept.guarantee(0.0).epsilon == together.epsilon
        # In a ledger the use is that of its own example alone, or of another set's.
        assert together.epsilon == (0.5 if own == "a" else 0.75)


@BOUNDED
@given(any_receipts(), any_receipts())
def test_more_receipts_leave_a_composition_as_it_is(receipts, more):
    kept = Composition(receipts)
    before = kept.guarantee(0.0)
    extended = kept.with_receipts(more)
    assert alike(extended.guarantee(0.0), Receipts([*receipts, *more]).guarantee(0.0))
    assert kept.guarantee(0.0) == before


USES = st.lists(st.tuples(st.integers(1, 3), ROWS, st.integers(0, 2)), max_size=14)


@BOUNDED
@given(USES)
@example([(1, None, 0), (1, None, 1), (1, [0, 1], 0), (1, None, 1), (1, [0, 2], 0)])
def test_each_example_has_its_own_uses_while_labels_come(uses):
    """A use of all labels is one of those that are there; later ones lack it."""
    kept, labels, sums = Composition(), LabelSet("a", 2), np.zeros(SIZE + 40)
    for eighths, rows, more in uses:
        labels = LabelSet("a", labels.size + more)
        rows = None if rows is None else [row for row in rows if row < labels.size]
        # What a budget is asked for leaves no trace.
        kept.with_receipts([spent(labels, 1.0, [0]), spent(labels, 2.0, rows)])
        kept.add(spent(labels, eighths / 8, rows))
        sums[slice(labels.size) if rows is None else rows] += eighths / 8
    for row in range(labels.size):
        [history] = kept.histories(labels, np.array([row]))
        assert Charge.composed(history, 0.0).epsilon == sums[row]


@pytest.mark.parametrize("number", [254, 255, 256, 300])
def test_examples_may_have_more_histories_than_a_byte_counts(number):
    before, after = LabelSet("a", number + 1), LabelSet("a", number + 3)
    kept = Composition([spent(before, 1.0, None)])
    for row in range(number):
        kept.add(spent(before, (1 + row) / 1024, [row]))
    kept.add(spent(after, 0.5, [number + 1]))
    for row, epsilon in ((number - 1, 1.0 + number / 1024), (number + 1, 0.5), (number + 2, 0.0)):
        [history] = kept.histories(after, np.array([row]))
        assert Charge.composed(history, 0.0).epsilon == epsilon
    sums = sorted(Charge.composed(history, 0.0).epsilon for history in kept.histories())
    assert sums == [0.0, 0.5, *(1.0 + row / 1024 for row in range(number + 1))]


@pytest.mark.parametrize("own", ["", "a"])
def test_more_receipts_of_a_shared_use_leave_a_composition_as_it_is(own):
    """Also what it counts of the receipts that it gets later."""
    receipts = [
        spent(LabelSet(name, SIZE), 0.5, None, use=use)
        for use in ("step 1", "step 2")
        for name in "abbc"
    ]
    together = [
        Composition(receipts[:number], own).guarantee(0.0) for number in range(len(receipts) + 1)
    ]
    for number, several in itertools.product(range(len(receipts)), (1, 2, 4)):
        kept, last = Composition(receipts[:number], own), min(number + several, len(receipts))
        assert kept.with_receipts(receipts[number:last]).guarantee(0.0) == together[last]
        assert kept.guarantee(0.0) == together[number]
        for later in range(number, len(receipts)):
            kept.add(receipts[later])
            assert kept.guarantee(0.0) == together[later + 1]


@BOUNDED
@given(any_receipts(), st.sampled_from(LABEL_SETS[:4]), ROWS)
def test_what_some_examples_have_spent_with_other_label_sets(receipts, labels, rows):
    found = Composition(receipts).histories(labels, None if rows is None else np.array(rows, int))
    spent_most = max((Charge.composed(one, 0.0).epsilon for one in found), default=0.0)
    kept = [
        one
        for one in receipts
        if one.labels.name != labels.name
        and {one.labels.people, labels.people} != {"north", "south"}
    ]
    unknown = {one.id for one in receipts if one.kind == "unknown"}
    answered = unknown & {name for one in receipts for name in one.answers}
    own = {one.id: one for one in receipts if one.labels.name == labels.name}
    sums = [
        math.fsum(
            one.charge.epsilon
            for one in own.values()
            if one.id not in answered and (one.examples is None or row in np.asarray(one.examples))
        )
        for row in (range(SIZE) if rows is None else rows)
    ]
    others = [one for one in kept if one.id not in answered]
    expected = max(sums) + (worst_person(others) if others else 0.0) if sums else 0.0
    assert spent_most == expected
