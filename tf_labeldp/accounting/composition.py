"""The running composition of receipts, and the statement that they compose to.

Only ``Composition`` turns receipts into a statement, for a vault and for a model. A use of
unknown cost has a receipt too, with an infinite charge.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tf_labeldp import _validate
from tf_labeldp.accounting._guarantee import (
    UNITS,
    Assumption,
    PrivacyGuarantee,
    adaptive_promise,
)
from tf_labeldp.accounting.budget import (
    FEATURES_OF_USERS,
    FIXED,
    ROUNDING,
    Charge,
    CountedCharges,
)
from tf_labeldp.accounting.charges_by_example import ChargesByExample, sum_of
from tf_labeldp.accounting.events import EventFields
from tf_labeldp.accounting.receipt import LabelSet, Receipt

_FEATURES = Assumption(
    "public-features", "holder", "The features are public, and each person has one example."
)
_THROUGH_HERE = Assumption(
    "all-uses-counted",
    "holder",
    "The true labels reach training and tuning through the uses counted here alone.",
)
_SECURE_BITS = Assumption(
    "secure-random-bits",
    "machines",
    "The operating system's random generator and OpenSSL's, which it seeds, are secure.",
)
_FLAGS = {
    "sample_weights": Assumption(
        "public-sample-weights",
        "holder",
        "The weights of samples and classes were made without labels, except for the uses counted "
        "here.",
    ),
    "metrics_reported": Assumption(
        "metrics-reported",
        "trainer",
        "Nobody sees the training loss and metrics that were reported: they reveal true labels.",
    ),
    "seeded": None,
}
"""Flags of receipts that a statement names, each with its assumption."""
_BY_LABEL = Assumption(
    "stated-by-label",
    "holder",
    "The statement is by label and not by user, since some uses are counted by label.",
)
_MOST_PAIRS = 1000
"""Most combinations of the charges in several label sets that are composed one by one. The number
of combinations is a product over the label sets; beyond, one bound stands for all."""


class _Fact(NamedTuple):
    """The content of receipts that a statement names; many receipts share few facts."""

    labels: LabelSet
    unit: str | None  # None for a declaration
    delta: float
    num_units: int
    flags: frozenset[str]
    reasons: tuple[Assumption, ...]  # why nothing is promised
    budget_epsilon: float | None  # zero without a cost


@dataclasses.dataclass(frozen=True)
class _Facts:
    """The parts of a statement in addition to its figures."""

    facts: tuple[_Fact, ...]

    @functools.cached_property
    def units(self) -> set[str]:
        return {fact.unit for fact in self.facts if fact.unit is not None} or {"label"}

    @property
    def unit(self) -> str:
        """The unit of all uses. Uses of several units are counted by label."""
        (unit,) = self.units if len(self.units) == 1 else {"label"}
        return unit

    @functools.cached_property
    def flags(self) -> frozenset[str]:
        return frozenset[str]().union(*(fact.flags for fact in self.facts))

    @property
    def num_units(self) -> int:
        """The number of units of the largest label set."""
        is_user = self.unit == "user"
        return max(fact.num_units if is_user else fact.labels.size for fact in self.facts)

    def reasons(self, notes: Iterable[Assumption]) -> list[Assumption]:
        """Returns those of the assumptions that are reasons why nothing is promised."""
        endless = {note for fact in self.facts for note in fact.reasons}
        return [note for note in notes if note in endless or note.code == "not-promised"]

    def kept_budget(self) -> tuple[float, ...]:
        """Returns the sum of the budgets of the label sets of one person; empty if one is unknown.

        Each budget bounds all uses of its label set, in any order with those of other sets.
        """
        budgets: dict[str, tuple[float, float]] = {}
        for fact in self.facts:
            if fact.budget_epsilon is None:
                return ()
            if fact.budget_epsilon:
                old = budgets.get(fact.labels.name, (0.0, 0.0))
                new = fact.budget_epsilon, fact.delta
                # A budget may be raised.
                budgets[fact.labels.name] = max(old[0], new[0]), max(old[1], new[1])
        people = {fact.labels.name: fact.labels.people for fact in self.facts}
        figures = []
        for population in set(people.values()) - {None} or {None}:
            own = [budgets[name] for name in budgets if people[name] in (population, None)]
            figures.append(tuple(map(math.fsum, zip(*own, strict=True))) or (0.0, 0.0))
        epsilon, delta = (max(each) for each in zip(*figures, strict=True))
        return (epsilon, delta) if 0.0 < epsilon and delta < 1.0 else ()

    def assumptions(self) -> Iterator[Assumption]:
        """Yields what must be true of the label sets and of training for the sums to hold."""
        yield FEATURES_OF_USERS if self.unit == "user" else _FEATURES
        people = {fact.labels.people for fact in self.facts} - {None}
        sized = {fact.labels.name for fact in self.facts if fact.labels.size}
        if len(people) > 1:
            names = ", ".join(map(repr, sorted(people, key=str)))
            text = f"No person is in more than one of the populations {names}."
            yield Assumption("disjoint-people", "holder", text)
        elif len(sized) > 1:
            each = "is at most one user" if self.unit == "user" else "has at most one example"
            text = f"Each person {each} in each of {len(sized)} label sets."
            yield Assumption("one-example-per-set", "holder", text)
        if "user" in self.units and self.unit != "user":
            yield _BY_LABEL
        yield _THROUGH_HERE
        yield from (note for flag, note in _FLAGS.items() if note and flag in self.flags)
        if "seeded" not in self.flags:
            yield _SECURE_BITS


class _SharedUse(NamedTuple):
    """One use of several label sets."""

    charge: Charge  # with the assumptions of all its receipts
    people: str | None  # None if the label sets are of different populations, or of unknown ones
    times: int  # how often it counts for every person


def _name_of_use(receipt: Receipt) -> tuple[Any, ...]:
    # With the cost: a receipt of someone else, with the name of a small use, erases no cost.
    charge = receipt.charge
    return receipt.use, charge.epsilon, charge.delta, charge.event_text


class Composition:
    """The running composition of receipts, which never reads a receipt twice.

    Each receipt is counted once. One of unknown cost is not counted if a declaration replaces it.
    A use of several label sets has a receipt for each of them, with the same cost. It counts once
    for every person, since the set in which a person has such an example is unknown; in the
    composition of a ledger, whose label set is ``own``, it counts for the examples of its receipt.
    Receipts of one use that differ in cost are receipts of different uses.

    Guarantee:
        As for ``Receipts``, for all receipts that were added.

    Raises:
        ReceiptError: two receipts with one id have different contents.
    """

    # `_receipts` decides; `_declared` and `_shared` are what its receipts say of each other. All
    # that `_clear` empties is counted from them, and a receipt is counted once, when it is added.
    # A later receipt may change how earlier ones count: a declaration replaces one, or a use turns
    # out to have several label sets. Then `_is_stale` is set, nothing more is counted, and
    # `_refresh` counts all again before the next answer.
    # A use of several label sets is in `_of_everyone`, as often as `_uses` has it. Only the own
    # set counts it, too.
    def __init__(self, receipts: Iterable[Receipt] = (), own: str = "") -> None:
        self._own_name = own
        self._receipts: dict[str, Receipt] = {}
        self._declared: set[str] = set()  # ids of receipts that declarations replace
        self._shared: dict[tuple[Any, ...], dict[str, int]] = {}  # receipts of a use by label set
        self._clear()
        for receipt in receipts:
            self.add(receipt)

    def _clear(self) -> None:
        self._of_sets: dict[str, ChargesByExample] = {}  # by the name of the label set
        self._is_stale = False  # whether to count all receipts again
        self._uses: dict[tuple[Any, ...], _SharedUse] = {}  # of several label sets
        self._of_everyone: dict[str | None, Counter[Charge]] = {}  # by population
        self._facts: dict[_Fact, None] = {}

    def add(self, receipt: Receipt) -> None:
        """Adds a receipt, unless it was added before."""
        known = self._receipts.get(receipt.id)
        receipt = receipt.agreed(known)
        if receipt is known:
            return
        self._receipts[receipt.id] = receipt
        self._declared.update(receipt.declares)
        if known is not None or any(
            self._is_declared(self._receipts.get(name)) for name in receipt.declares
        ):
            self._is_stale = True
        if receipt.use and known is None:
            sets = self._shared.setdefault(_name_of_use(receipt), {})
            sets[receipt.labels.name] = sets.get(receipt.labels.name, 0) + 1
            if len(sets) == 2 and sets[receipt.labels.name] == 1:
                # Receipts of the first label set were counted for its examples.
                self._is_stale |= next(iter(sets)) != self._own_name
        if not self._is_stale:
            self._count(receipt)

    def _refresh(self) -> None:
        """Counts all receipts again, if one of them made earlier ones count in another way."""
        if self._is_stale:
            self._clear()
            for receipt in self._receipts.values():
                self._count(receipt)

    def _is_declared(self, receipt: Receipt | None) -> bool:
        """Returns whether a declaration replaces a receipt: never one of the own label set."""
        return (
            receipt is not None
            and receipt.kind == "unknown"
            and receipt.id in self._declared
            and receipt.labels.name != self._own_name
        )

    def _count(self, receipt: Receipt) -> None:
        if self._is_declared(receipt):
            return
        labels, charge = receipt.labels, receipt.charge
        # A declaration has no examples: one row stands for all.
        of_set = self._of_sets.setdefault(labels.name, ChargesByExample(max(1, labels.size)))
        of_set.grow(labels.size)
        is_shared = bool(receipt.use) and len(self._shared[_name_of_use(receipt)]) > 1
        if is_shared:
            self._share(receipt)
        if not is_shared or labels.name == self._own_name:
            of_set.add(charge, receipt.examples, labels.size)
        fact = _Fact(
            labels,
            None if receipt.kind == "declared" else receipt.unit,
            receipt.delta,
            receipt.num_units or labels.size,
            frozenset(name for name, flag in receipt.flags.items() if flag),
            charge.assumptions if math.isinf(charge.epsilon) else (),
            receipt.budget_epsilon if charge.epsilon or charge.delta else 0.0,
        )
        self._facts[fact] = None

    def _share(self, receipt: Receipt) -> None:
        """Counts a use of several label sets, once for every person."""
        name, charge, people = _name_of_use(receipt), receipt.charge, receipt.labels.people
        sets = self._shared[name]
        # A use has a receipt for each set: the largest number of receipts is that of the uses.
        # Those with a receipt of the own set count there, by example.
        times = max(sets.values()) - sets.get(self._own_name, 0)
        if (old := self._uses.get(name)) is not None:
            notes = dict.fromkeys((*old.charge.assumptions, *charge.assumptions))
            charge = charge.with_assumptions(notes)
            people = people if people == old.people else None
            self._of_everyone[old.people][old.charge] -= old.times
        self._uses[name] = _SharedUse(charge, people, times)
        self._of_everyone.setdefault(people, Counter())[charge] += times

    def with_receipts(self, receipts: Iterable[Receipt]) -> Composition:
        """Returns a new composition with more receipts."""
        self._refresh()
        extended = Composition(own=self._own_name)
        extended._receipts, extended._declared = self._receipts.copy(), self._declared.copy()
        extended._uses, extended._facts = self._uses.copy(), self._facts.copy()
        extended._shared = {name: sets.copy() for name, sets in self._shared.items()}
        extended._of_sets = {name: of_set.copy() for name, of_set in self._of_sets.items()}
        extended._of_everyone = {of: counts.copy() for of, counts in self._of_everyone.items()}
        for receipt in receipts:
            extended.add(receipt)
        return extended

    def histories(
        self, labels: LabelSet | None = None, examples: Any = None
    ) -> list[CountedCharges]:
        """Returns the possible charges of one person, over all label sets.

        ``labels`` and ``examples`` (indices or a mask) limit them to people with such an example.
        """
        if labels is None:
            return list(self._of_one_person())
        return list(self._of_one_person(labels, self._own(labels).distinct(examples)))

    def spread(self, labels: LabelSet) -> Iterator[tuple[list[CountedCharges], int]]:
        """Yields the possible charges of examples of a label set, and the number of examples."""
        for charges, size in self._own(labels).spread():
            yield list(self._of_one_person(labels, [charges])), size

    def _own(self, labels: LabelSet) -> ChargesByExample:
        self._refresh()
        found = self._of_sets.get(labels.name, ChargesByExample(max(1, labels.size)))
        if found.size < labels.size:
            found = found.copy()
            found.grow(labels.size)
        return found

    def _of_one_person(
        self, labels: LabelSet | None = None, *own: list[CountedCharges]
    ) -> Iterator[CountedCharges]:
        """Yields the possible charges of one person; ``own`` are those in ``labels``."""
        self._refresh()
        people: dict[str, str | None] = {}
        for fact in self._facts:
            of = fact.labels.people
            # Receipts that contradict each other leave open which people these are.
            people[fact.labels.name] = of if people.get(fact.labels.name, of) == of else None
        # In the order of the receipts, so that a statement is the same text in any process.
        populations = [of for of in dict.fromkeys(people.values()) if of is not None]
        own_people = None if labels is None else labels.people
        if labels is not None:
            people.pop(labels.name, None)
            if labels.people is not None:
                people = {name: of for name, of in people.items() if of in (None, labels.people)}
        possible = dict.fromkeys(of for of in people.values() if of is not None)
        for population in possible or [own_people]:
            # These label sets may be of the same people.
            same = [name for name, of in people.items() if of in (population, None)]
            # A use of unknown people, or of several populations, may be of anyone.
            shared = [
                tuple((+counts).items())
                for of, counts in self._of_everyone.items()
                if of == population or of not in populations
            ]
            in_sets = [*own, *(self._of_sets[name].distinct() for name in same)]
            yield from _together([*in_sets, *([charges] for charges in shared)])

    def guarantee(
        self, delta: float | None = None, kept: tuple[float, ...] | None = None
    ) -> PrivacyGuarantee:
        """Returns the statement at ``delta``, or else at the largest delta of the receipts.

        ``kept`` is the budget (epsilon, delta) that a filter kept for all receipts, empty if there
        is none; None takes the budgets in the receipts.
        """
        self._refresh()
        if not self._facts:
            return PrivacyGuarantee(epsilon=0.0)
        facts = _Facts(tuple(self._facts))
        sums = _sums(self.histories(), max(fact.delta for fact in self._facts), delta)
        epsilon = max(total.epsilon for total in sums)
        budget = facts.kept_budget() if kept is None else kept
        # No filter kept a budget that is below the sum.
        is_kept = bool(budget) and epsilon <= budget[0] * (1.0 + ROUNDING)
        adaptive = (budget[0], budget[1]) if is_kept else None
        # The statement covers every example, so it rests on the assumptions of every sum.
        notes = dict.fromkeys(note for total in sums for note in total.assumptions)
        in_order = [
            *facts.reasons(notes),
            *(_with_figure(note, adaptive) for note in notes),
            *facts.assumptions(),
        ]
        return PrivacyGuarantee(
            epsilon,
            max(total.delta for total in sums),
            UNITS[facts.unit],
            assumptions=tuple(dict.fromkeys(in_order)),
            seeded="seeded" in facts.flags,
            num_units=facts.num_units or None,
            adaptive=adaptive,
        )


def _with_figure(note: Assumption, adaptive: tuple[float, float] | None) -> Assumption:
    """Returns the assumption that uses were fixed in advance, with what holds otherwise."""
    if note != FIXED or adaptive is None:
        return note
    text = (
        "The mechanisms and the number of their uses were fixed in advance. If some were chosen "
        f"after seeing earlier outputs, the statement is {adaptive_promise(adaptive)}."
    )
    return Assumption("fixed-in-advance", "trainer", text)


def _sums(
    possible: list[CountedCharges], stated: float, delta: float | None
) -> list[PrivacyGuarantee]:
    """Returns the sum of each of these at ``delta``, or else at the least possible delta."""
    if delta is not None:
        stated = _validate.number_in("delta", delta, "[0, 1)")
    sums = [Charge.composed(charges, stated) for charges in possible]
    if delta is None and any(math.isinf(total.epsilon) for total in sums):
        # Deltas of uses without an event add up and may exceed the delta of the budgets.
        opaque = max(
            math.fsum(
                charge.delta * count
                for charge, count in charges
                if charge.event_fields == EventFields.NOT_PRIVATE
            )
            for charges in possible
        )
        if 0.0 < opaque < 1.0 - stated:
            return [Charge.composed(charges, stated + opaque) for charges in possible]
    return sums


def _together(in_sets: list[list[CountedCharges]]) -> Iterator[CountedCharges]:
    """Yields the possible charges of a person with an example in each label set."""
    if math.prod(len(possible) for possible in in_sets) > _MOST_PAIRS:
        # Each charge is counted at its largest count of any example: no combination has more.
        in_sets = [[_largest(possible)] for possible in in_sets]
    for combination in itertools.product(*in_sets):
        yield sum_of(*combination)


def _largest(possible: list[CountedCharges]) -> CountedCharges:
    """Returns charges that cost at least as much as each of these in any composition."""
    distinct = [charge for charges in possible for charge, _ in charges]
    if distinct and all(
        charge.delta == 0.0 and math.isfinite(charge.epsilon) for charge in distinct
    ):
        # Randomized response of the largest sum of epsilons dominates pure uses of at most this
        # sum. Each charge at its largest count would cost more, up to the sum over all examples.
        total = max(
            math.fsum(charge.epsilon * count for charge, count in charges) for charges in possible
        )
        notes = dict.fromkeys(note for charge in distinct for note in charge.assumptions)
        pure = Charge(total, 0.0, EventFields.randomized_response(total), tuple(notes))
        return ((pure, 1),)
    most: Counter[Charge] = Counter()
    for charges in possible:
        most |= Counter(dict(charges))
    return tuple(most.items())
