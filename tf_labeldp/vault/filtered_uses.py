"""The uses that the privacy filter of a budget counts, with what was given back."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

import numpy as np

from tf_labeldp.accounting import LabelSet, PrivacyBudget, Receipt
from tf_labeldp.accounting.planned_uses import ChainedUse, UseChains
from tf_labeldp.accounting.privacy_filter import PrivacyFilter


class FilteredUses:
    """Charged and reserved uses, in the order in which they were planned.

    A use that was given back leaves no trace if nothing was drawn of its plan, and nothing that
    came later: what a later use may cost has followed from it. It may be reserved again.
    """

    def __init__(self) -> None:
        self._chains = UseChains()
        self._uses: dict[str, Receipt] = {}  # by id and event, in order
        self.given_back: set[str] = set()  # ids
        self._replaced: set[str] = set()  # ids among them, by parts of their own

    def add(self, receipts: Iterable[Receipt]) -> None:
        """Counts receipts after those before them; a use that was given back is reserved again."""
        receipts = list(receipts)
        if again := self.given_back & {receipt.id for receipt in receipts}:
            self.given_back -= again
            self._count_all()
        for receipt in receipts:
            name = f"{receipt.id} {receipt.charge.event_text}"
            planned = self._uses.setdefault(name, receipt)
            if planned is receipt:
                self._chains.add([receipt])
            elif planned.examples is None and planned.labels.size < receipt.labels.size:
                # It was drawn for labels that came after it was reserved, too.
                self._uses[name] = receipt
                self._count_all()

    def give_back(
        self,
        names: Iterable[str],
        charged: Container[str],
        inputs: Mapping[str, Sequence[Receipt]],
    ) -> None:
        """Takes back uses by their ids.

        ``charged`` are ids of drawn uses; ``inputs`` are receipts of public inputs, by plan.
        """
        if not (names := set(names)):
            return
        self.given_back |= names
        places = {receipt.id: place for place, receipt in enumerate(self._uses.values())}
        plans = {receipt.plan for receipt in self._uses.values() if receipt.id in names}
        drawn = [each for each in self._uses.values() if each.id in charged]
        for plan in plans:
            uses = [each for each in self._uses.values() if each.plan == plan]
            first = min(places[use.id] for use in uses)
            if not any(each.plan == plan or places[each.id] > first for each in drawn):
                gone = {use.id for use in uses if use.id in self.given_back}
                if len(gone) == len(uses):
                    of_plan = inputs.get(plan, ())
                    gone |= {use.id for use in of_plan if use.id not in charged}
                self._uses = {
                    name: each for name, each in self._uses.items() if each.id not in gone
                }
        self._count_all()

    def replace(self, names: Iterable[str]) -> None:
        """Notes uses, by their ids, that were given back for parts of their own."""
        self._replaced.update(names)

    def returned(self) -> Iterator[Receipt]:
        """Yields the uses that were given back and still count: they may be carried out."""
        for use in self._uses.values() if self.given_back else ():
            if use.id in self.given_back and use.id not in self._replaced:
                yield use

    def filters(
        self,
        budget: PrivacyBudget,
        labels: LabelSet,
        rows: np.ndarray | None,
        planned: Sequence[ChainedUse] = (),
        inherited: Sequence[Receipt] = (),
        without: Receipt | None = None,
    ) -> list[PrivacyFilter]:
        """Returns the rest of a budget after planned uses, for each distinct history.

        ``inherited`` are receipts to count before them; ``without`` is a use to leave out.
        """
        chains = self._chains
        again = self.given_back & {receipt.id for receipt in inherited}
        if again or without is not None:
            uses = self._uses.values()
            others = [each for each in uses if without is None or each.id != without.id]
            chains = UseChains().add(others, self.given_back - again)
        return chains.with_receipts(inherited).filters(budget, labels, rows, planned)

    def _count_all(self) -> None:
        self._chains = UseChains().add(self._uses.values(), self.given_back)
