"""Uses of labels: what they cost, whether the budget allows them, and their charges."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tf_labeldp.accounting import Assumption, Charge, PublicInput, Receipt, Receipts, public_input
from tf_labeldp.accounting.planned_uses import UseInPlan
from tf_labeldp.mechanisms import Mechanism
from tf_labeldp.vault._draws import Draws
from tf_labeldp.vault._examples import Examples
from tf_labeldp.vault.ledger import Ledger
from tf_labeldp.vault.reservations import PlannedUse, Reservation

_PUBLIC_ARRIVALS = Assumption(
    "public-arrivals",
    "holder",
    "The time at which a label became known does not depend on the label.",
)


@runtime_checkable
class HasParts(Protocol):
    """A head or a randomizer, whose releases are known before the first one."""

    def parts(self, labels: Any, key: str | None = None) -> Mapping[str, Mechanism]:
        """Returns mechanisms that cost what the releases cost, by their names."""


class Uses:
    """The uses of some examples of a vault, by the ledger that its parts share.

    Attributes:
        ledger: counts them.
        draws: the draws and releases among them.
    """

    __slots__ = ("_examples", "draws", "ledger")

    def __init__(self, ledger: Ledger, draws: Draws, examples: Examples) -> None:
        self.ledger, self.draws, self._examples = ledger, draws, examples

    def of(self, examples: Examples) -> Uses:
        """Returns the uses of other examples, by the same ledger."""
        return Uses(self.ledger, self.draws, examples)

    def note_arrivals(self) -> None:
        """Notes an assumption, unless all examples have had a label from their start."""
        if self._examples.sealed.rows is not None or self._examples.sealed.is_late:
            self.ledger.notes = (_PUBLIC_ARRIVALS,)

    def check_unit(self, unit: str | None) -> None:
        """Raises for a use of users' labels whose cost is not said to be for a user."""
        if self.ledger.users is not None and unit != "user":
            raise ValueError(
                f"expected a use whose cost is for all labels of one user, got unit={unit!r}. Give "
                "users= and max_examples_per_user= to poisson_batches, or unit='user' to charge."
            )

    def check(
        self, uses: Sequence[PlannedUse], rows: np.ndarray, receipts: Sequence[Receipt] = ()
    ) -> None:
        """Raises if the budget does not allow uses that are not reserved; within a turn."""
        covering = self.ledger.covering(uses)
        planned, reserved = [], set[str]() if covering is None else {covering.id}
        for use in uses:
            part = self.ledger.reserved_use(use.key, use.charge, rows, reserved)
            if part is None:
                planned.append((use.what, use.charge))
            else:
                reserved.add(part.id)
        self.ledger.check(rows, planned, receipts, covering)

    def charge(
        self,
        charge: Charge,
        what: str,
        key: str,
        rows: np.ndarray,
        made_of: Sequence[Receipt],
        **flags: Any,
    ) -> Receipt:
        """Charges a use outside the vault; takes what was reserved for it."""
        with self.ledger.turn():
            part = self.ledger.reserved_use(None, charge, rows)
            if part is not None:
                flags = {"plan": part.plan, **flags, "id": part.id}
            receipt = self.ledger.new_receipt(charge, what, "steps", key, rows, **flags)
            if receipt.use:
                # Another vault of a project may have counted this use.
                inherited = self.ledger.check(rows, [], [*made_of, receipt], part)
            else:
                plan = UseInPlan(receipt.charge, receipt.plan, receipt.plan_uses)
                inherited = self.ledger.check(rows, [(what, charge)], made_of, part, plan)
            for other in inherited:
                if other is not receipt:
                    self.ledger.keep(receipt=other)
            self.ledger.keep(receipt=receipt)
        return receipt


class LabelsTogether:
    """Vaults, or one, that are used together: row i of each has labels of the same example."""

    def __init__(self, vaults: Sequence[Any]) -> None:
        self._vaults: list[tuple[Uses, Examples]] = [
            (vault._uses, vault._examples) for vault in vaults
        ]

    def open(self) -> list[np.ndarray]:
        """Returns the true labels for ``LabelDPModel.fit`` alone, which charges each step first."""
        opened = []
        for uses, examples in self._vaults:
            with uses.ledger.turn():
                labels = examples.sealed.open(examples.chosen).view()
            labels.flags.writeable = False
            opened.append(labels)
        return opened

    def charge(self, charge: Charge, *, what: str, unit: str, **flags: Any) -> Receipts:
        """Charges one use, and returns its receipt for each vault.

        ``charge`` is the cost for the replacement of all labels of one example, so it counts once
        in a statement. No vault is charged if the budget of one of them does not allow the use.
        """
        for uses, _ in self._vaults:
            uses.check_unit(unit)
        use = secrets.token_hex(16) if len(self._vaults) > 1 else ""
        plan, receipts = (flags.get("plan", ""), flags.get("plan_uses", 1)), []
        with contextlib.ExitStack() as work:
            for uses, examples in self._vaults if use else ():
                planned = PlannedUse(None, what, "steps", charge, examples.rows, use)
                made_of = examples.chosen_by.receipts
                work.enter_context(uses.ledger.reserve([planned], made_of, plan))
            for uses, examples in self._vaults:
                rows, chosen_by = examples.rows, examples.chosen_by.receipts
                flags = {**flags, "unit": unit, "use": use}
                receipts.append(uses.charge(charge, what, "", rows, chosen_by, **flags))
        return Receipts(receipts)

    def check(
        self, what: str, charge: Charge, plan: UseInPlan, made_of: Sequence[Receipt] = ()
    ) -> None:
        """Raises if one of the budgets does not allow a use, which the filter counts as ``plan``.

        ``what`` is the use in words, and ``made_of`` are receipts of its public inputs.
        """
        for uses, examples in self._vaults:
            with uses.ledger.turn():
                uses.ledger.check(examples.rows, [(what, charge)], made_of, plan=plan)

    def plans(self, charge: Charge, number: int) -> list[tuple[str, int]]:
        """Returns the plan of each of several uses of equal cost, and the plan's number of uses.

        The plan of reserved uses is empty here. After them, what other plans have not used is used
        first: the number, noise and examples of their uses were fixed in advance, and what they are
        for may depend on earlier outputs.
        """
        reserved, unused = [], []
        for uses, examples in self._vaults:
            with uses.ledger.turn():
                rows, taken = examples.rows, set[str]()
                while (part := uses.ledger.reserved_use(None, charge, rows, taken)) is not None:
                    taken.add(part.id)
                reserved.append(len(taken))
                unused.append(uses.ledger.unused(charge, rows))
        plans = [("", 1)] * min(reserved)
        for plan, left in unused[0].items():
            plans += [plan] * min([left, *(others.get(plan, 0) for others in unused[1:])])
        rest = number - len(plans)
        return plans[:number] + [(secrets.token_hex(16), rest)] * rest

    @staticmethod
    def reserve(
        several: Sequence[tuple[Any, ...]], public: PublicInput[Any] | None = None
    ) -> Reservation:
        """Reserves uses of parts of one vault, as ``PrivateLabels.reserve``.

        Each is ``(labels, key, use)``, or ``(labels, key, use, indices)`` for some of their
        examples. A key of None stands for the next draw without a key.
        """
        own = several[0][0]._uses
        chosen = public_input(public, *(labels._examples.chosen_by for labels, *_ in several))
        with own.ledger.turn():
            planned: list[PlannedUse] = []
            for labels, key, use, *indices in several:
                some = labels._examples.some(*indices)
                planned += labels._planned(key, use, some.rows)
            return own.ledger.reserve(own.draws.not_recorded(planned), chosen.receipts)

    @staticmethod
    def check_uses(several: Sequence[tuple[Any, str | None, Any]]) -> None:
        """Raises if the budget does not allow uses that are neither recorded nor reserved."""
        for labels, key, use in several:
            uses = labels._uses
            with uses.ledger.turn():
                planned = uses.draws.not_recorded(labels._planned(key, use))
                uses.check(planned, labels._examples.rows)
