"""The plans of each example, in the order in which they were charged, and the rest of a budget.

Receipts with one ``plan`` are one plan, which stands where the first of them was charged and costs
what was planned; each other receipt is a plan of its own.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from tf_labeldp.accounting.budget import Charge, CountedCharges, PrivacyBudget
from tf_labeldp.accounting.privacy_filter import PrivacyFilter
from tf_labeldp.accounting.receipt import LabelSet, Receipt

_MOST_COMBINATIONS = 100_000
"""Most combinations of chains in several label sets. With more, nothing is allowed: a combination
that was not tried could be the one that passes the budget."""
_KEPT = 10_000
"""Most chains over several label sets that are kept."""


class ChainedUse(NamedTuple):
    """One use in a chain."""

    charge: Charge
    plan: str = ""
    uses: int = 1  # of this charge in the plan
    source: str = ""  # the label set, for a use of several label sets, which counts once
    is_given_back: bool = False  # reserved, and not carried out
    run: int = 0  # grows with each change of the label set


@functools.lru_cache(maxsize=4096)
def without_assumptions(charge: Charge) -> Charge:
    """Returns the cost alone: a plan may go on on a machine that adds an assumption."""
    return charge.with_assumptions(()) if charge.assumptions else charge


_PlanUses = dict[Charge, tuple[int, dict[str, int], int]]
"""The number of uses of each charge of a plan, how many were charged by each source, and how many
were given back."""


class _Spent(NamedTuple):
    """The rest of a budget after the uses of a chain."""

    filter: PrivacyFilter
    plans: dict[str, _PlanUses]
    last: str = ""  # the plan that came last
    before: Any = None  # the filter before it


class UseChain:
    """The uses of one example in order: a linked list, whose parts other chains share."""

    # A chain does not change, except for `_spent`: what it leaves of the last budget that was asked
    # for. A longer chain goes on from there, so that each use is counted once.
    __slots__ = ("_hash", "_spent", "before", "last")

    def __init__(self, before: UseChain | None = None, last: Any = None) -> None:
        self.before, self.last = before, last  # None before the first use
        self._hash: int = hash((0 if before is None else before._hash, last))
        self._spent: tuple[PrivacyBudget, _Spent] | None = None

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        one: Any = self
        while one is not other:
            if one is None or not isinstance(other, UseChain) or one._hash != other._hash:
                return False
            if one.last != other.last:
                return False
            one, other = one.before, other.before
        return True

    def then(self, use: ChainedUse) -> UseChain:
        """Returns the chain with one more use."""
        return UseChain(self, use)

    def filter(self, budget: PrivacyBudget) -> PrivacyFilter:
        """Returns what these uses leave of a budget; each use is counted once."""
        new: list[UseChain] = []
        found = self
        while found.before is not None and (found._spent is None or found._spent[0] != budget):
            new.append(found)
            found = found.before
        spent = _Spent(PrivacyFilter.of(budget), {})
        if found.before is not None and found._spent is not None:
            spent = found._spent[1]
        for chain in reversed(new):
            spent = chain._after(spent, budget)
            chain._spent = budget, spent
        return spent.filter

    def _after(self, spent: _Spent, budget: PrivacyBudget) -> _Spent:
        use: ChainedUse = self.last
        if not use.plan:
            return spent._replace(filter=spent.filter.after(((use.charge, 1),)), last="")
        plan = spent.plans.get(use.plan, {})
        # A plan may go on after its budget was raised, at another delta.
        same = (charge for charge in plan if charge.has_cost_of(use.charge))
        cost = use.charge if use.charge in plan else next(same, use.charge)
        planned, charged, given_back = plan.get(cost, (0, {}, 0))
        charged = charged | {use.source: charged.get(use.source, 0) + 1}
        shared = max((number for source, number in charged.items() if source), default=0)
        number = max(planned, use.uses, charged.get("", 0) + shared)
        plan = plan | {cost: (number, charged, given_back + use.is_given_back)}
        plans = spent.plans | {use.plan: plan}
        if number == planned:
            return spent._replace(plans=plans)
        if use.plan not in spent.plans or spent.last == use.plan:
            before = spent.before if use.plan in spent.plans else spent.filter
            return _Spent(before.after(*_counted(plan)), plans, use.plan, before)
        # The plan is larger than was known at its place.
        whole = PrivacyFilter.of(budget)
        for charges in self._charges(plans):
            whole = whole.after(*charges)
        return _Spent(whole, plans)

    def _charges(self, plans: dict[str, _PlanUses]) -> Iterator[tuple[CountedCharges, ...]]:
        """Yields the arguments of ``PrivacyFilter.after`` for each plan, in order."""
        uses: list[ChainedUse] = []
        chain = self
        while chain.before is not None:
            uses.append(chain.last)
            chain = chain.before
        done = set()
        for use in reversed(uses):
            if not use.plan:
                yield (((use.charge, 1),),)
            elif use.plan not in done:
                done.add(use.plan)
                yield _counted(plans[use.plan])


def _counted(plan: _PlanUses) -> tuple[CountedCharges, CountedCharges]:
    """Returns the charges of a plan, and those of its uses that were not given back."""
    whole = tuple((charge, number) for charge, (number, *_) in plan.items())
    used = ((charge, number - given_back) for charge, (number, _, given_back) in plan.items())
    return whole, tuple((charge, number) for charge, number in used if number > 0)


class _Examples:
    """The chain of each of n examples of one label set."""

    # As in `ChargesByExample`, the examples of a row have one chain, and the sizes sum to n. A row
    # without examples is filled again.
    def __init__(self, size: int) -> None:
        self._rows, self._sizes = [UseChain()], [size]
        self._row_of = np.zeros(size, dtype=np.int32)
        self._later = UseChain()  # of examples to come

    def add(self, use: ChainedUse, examples: Any, size: int) -> None:
        """Adds a use of these examples; None for the first ``size``, or all if it is zero."""
        if examples is None and size == 0:
            self._later = self._later.then(use)
        if examples is None and (size == 0 or size >= self._row_of.size):
            self._rows = [chain.then(use) for chain in self._rows]
            return
        where = np.arange(size) if examples is None else np.asarray(examples)
        places = {chain: row for row, chain in enumerate(self._rows) if self._sizes[row]}
        free = [row for row, size in enumerate(self._sizes) if not size]
        old = self._row_of[where]
        moved = np.bincount(old, minlength=len(self._rows))
        new = np.zeros(len(self._rows), dtype=np.int32)
        for row in np.flatnonzero(moved):
            chain = self._rows[row].then(use)
            if chain not in places:
                if not free:
                    free.append(len(self._rows))
                    self._rows.append(chain)
                    self._sizes.append(0)
                places[chain] = free.pop()
                self._rows[places[chain]] = chain
            new[row] = places[chain]
            self._sizes[new[row]] += int(moved[row])
        self._row_of[where] = new[old]
        # This comes last, so that an interrupt may leave a use too many, never one too few.
        for row in np.flatnonzero(moved):
            self._sizes[row] -= int(moved[row])

    def grow(self, size: int) -> None:
        """Adds examples up to this number."""
        if (more := size - self._row_of.size) > 0:
            self._row_of = np.append(self._row_of, np.full(more, len(self._rows), np.int32))
            self._rows.append(self._later)
            self._sizes.append(more)

    def distinct(self, examples: Any = None) -> list[UseChain]:
        """Returns the distinct chains of examples, by indices or a mask; None for all."""
        if examples is None:
            return [row for row, size in zip(self._rows, self._sizes, strict=True) if size]
        return [self._rows[row] for row in np.flatnonzero(np.bincount(self._row_of[examples]))]

    def copy(self) -> _Examples:
        found = _Examples(0)
        found._rows, found._sizes = self._rows.copy(), self._sizes.copy()
        found._row_of, found._later = self._row_of.copy(), self._later
        return found


class UseChains:
    """The chains of all examples of a ledger, with those of other label sets of its people."""

    def __init__(self) -> None:
        self._sets: dict[str, _Examples] = {}
        self._labels: dict[str, LabelSet] = {}
        self._counted: set[tuple[str, str]] = set()  # ids and events of receipts
        self._run, self._last = 0, ""
        self._joined: dict[tuple[UseChain, ...], UseChain] = {}

    def add(self, receipts: Iterable[Receipt], given_back: Container[str] = ()) -> UseChains:
        """Adds receipts that were not added before, in this order.

        A reserved use of an id in ``given_back`` was not carried out.
        """
        for receipt in receipts:
            labels, name = receipt.labels, (receipt.id, receipt.charge.event_text)
            if name in self._counted:
                continue
            self._labels[labels.name] = labels
            examples = self._sets.setdefault(labels.name, _Examples(max(1, labels.size)))
            examples.grow(labels.size)
            if receipt.charge.epsilon or receipt.charge.delta:
                # In a run, all examples have the same place among uses of other label sets.
                self._run += labels.name != self._last
                self._last = labels.name
                source = labels.name if receipt.use else ""
                plan = receipt.plan or receipt.use
                use = ChainedUse(
                    without_assumptions(receipt.charge),
                    plan,
                    receipt.plan_uses,
                    source,
                    receipt.id in given_back,
                    self._run,
                )
                examples.add(use, receipt.examples, labels.size)
            self._counted.add(name)
        return self

    def with_receipts(self, receipts: Iterable[Receipt]) -> UseChains:
        """Returns a copy with more receipts."""
        receipts = list(receipts)
        if not receipts:
            return self
        found = UseChains()
        found._sets = {name: examples.copy() for name, examples in self._sets.items()}
        found._labels, found._counted = self._labels.copy(), self._counted.copy()
        found._run, found._last, found._joined = self._run, self._last, self._joined.copy()
        return found.add(receipts)

    def filters(
        self,
        budget: PrivacyBudget,
        labels: LabelSet,
        rows: Any = None,
        planned: Iterable[ChainedUse] = (),
    ) -> list[PrivacyFilter]:
        """Returns the rest of a budget for each person with one of these examples.

        ``planned`` are more uses of them.
        """
        planned = [use._replace(charge=without_assumptions(use.charge)) for use in planned]
        own = self._sets.get(labels.name, _Examples(max(1, labels.size)))
        if own._row_of.size < labels.size:
            own = own.copy()
            own.grow(labels.size)
        found: dict[UseChain, None] = {}
        for several in self._of_one_person(labels, own.distinct(rows)):
            if math.prod(map(len, several)) > _MOST_COMBINATIONS:
                return [PrivacyFilter(())]
            found.update(dict.fromkeys(map(self._joint, itertools.product(*several))))
        filters = []
        for chain in found:
            for use in planned:
                chain = chain.then(use._replace(run=self._run + 1))
            filters.append(chain.filter(budget))
        return filters

    def _of_one_person(
        self, labels: LabelSet, own: list[UseChain]
    ) -> Iterator[list[list[UseChain]]]:
        people = {name: other.people for name, other in self._labels.items()}
        people.pop(labels.name, None)
        if labels.people is not None:
            people = {name: of for name, of in people.items() if of in (None, labels.people)}
        for population in set(people.values()) - {None} or {None}:
            same = [name for name, of in people.items() if of in (population, None)]
            yield [own, *(self._sets[name].distinct() for name in same)]

    def _joint(self, several: tuple[UseChain, ...]) -> UseChain:
        """Returns the chain of a person with these chains in several label sets.

        The use of the latest run comes last. Runs are numbered over all label sets, so that each
        joint chain has the order in which the uses were charged.
        """
        new: list[tuple[tuple[UseChain, ...], ChainedUse]] = []
        while sum(chain.before is not None for chain in several) > 1:
            if several in self._joined:
                break
            runs = [-1 if chain.last is None else chain.last.run for chain in several]
            last = runs.index(max(runs))
            chain = several[last]
            new.append((several, chain.last))
            several = (*several[:last], chain.before or chain, *several[last + 1 :])
        alone = [chain for chain in several if chain.before is not None]
        found = self._joined.get(several) or (alone[0] if alone else several[0])
        if len(self._joined) > _KEPT:
            self._joined.clear()
        for joined, use in reversed(new):
            found = self._joined[joined] = found.then(use)
        return found
