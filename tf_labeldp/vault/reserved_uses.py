"""The uses that are reserved and not drawn, and the processes that work on them."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from tf_labeldp.accounting import Charge, Receipt
from tf_labeldp.vault._locks import Holders
from tf_labeldp.vault.records import DrawSettingsError
from tf_labeldp.vault.reservations import RUNNING, PlannedUse

_ROUNDING = 1e-9
"""Relative slack for a cost that was computed in two ways."""


class ReservedUses:
    """The uses of a ledger that are neither charged nor given back, by plan.

    A process holds a lock for its plans: while a lock is held, the work on them may go on.

    Attributes:
        uses: receipts of the uses, by id.
        inputs: receipts of the public inputs of the uses, by plan.
        num_records: records of reservations, which shift no seeded draw.
    """

    def __init__(self, locks: Holders | None) -> None:
        self._locks = locks  # None in memory, where no other process can reserve
        self.uses: dict[str, Receipt] = {}
        self.inputs: dict[str, list[Receipt]] = {}
        self.num_records = 0
        self._holders: dict[str, list[str]] = {}  # by plan, names of the locks of its processes
        self._held: dict[str, Any] = {}  # own locks by name

    def follow(self, fields: dict[str, Any], made_of: tuple[Receipt, ...]) -> None:
        """Follows a record of a reservation."""
        self.num_records += 1
        plan = fields["plan"]
        if "holder" in fields:
            self._holders.setdefault(plan, []).append(fields["holder"])
        for use in made_of:
            if use.plan == plan:
                self.uses[use.id] = use
            else:
                self.inputs.setdefault(plan, []).append(use)
        for name in fields.get("given_back", ()):
            self.uses.pop(name, None)

    def of_plans(self, plans: Collection[str]) -> list[Receipt]:
        """Returns the reserved uses of these plans."""
        return [use for use in self.uses.values() if use.plan in plans]

    def with_inputs(self) -> list[Receipt]:
        """Returns all that is reserved: the inputs of the plans, and their uses."""
        plans = dict.fromkeys(use.plan for use in self.uses.values())
        inputs = [use for plan in plans for use in self.inputs.get(plan, ())]
        return [*inputs, *self.uses.values()]

    def covering(self, uses: Sequence[PlannedUse]) -> Receipt | None:
        """Returns a charge that was reserved for all uses whose names begin with its own."""
        names = [use.key for use in uses if use.key]
        for part in self.uses.values():
            if part.kind == "steps" and part.key and self._is_own(part.plan):
                if any(name == part.key or name.startswith(f"{part.key}/") for name in names):
                    return part
        return None

    def part(
        self, use: PlannedUse, examples: np.ndarray | None, taken: Collection[str]
    ) -> Receipt | None:
        """Returns the reserved use of this name; without a name, one of a running ``with`` block.

        ``examples`` are those that the use is charged to, None for all; ``taken`` are ids of
        reserved uses to leave out.
        """
        charge = use.charge
        if use.key is not None and (part := self._named(use.key, taken)) is not None:
            is_other = part.kind != use.kind and "steps" not in (part.kind, use.kind)
            if is_other or not is_about(part, charge, examples):
                end = "give the reservation back: tf-labeldp give-back"
                if not self._held.keys().isdisjoint(self._holders[part.plan]):
                    end = "end the block that reserved them, and reserve again"
                raise DrawSettingsError(
                    f"expected the use {use.key!r} as it was reserved ({part.what}, epsilon="
                    f"{part.charge.epsilon:g}), got another mechanism, epsilon or other "
                    f"examples. Use those, or {end}."
                )
            return part
        if use.key is not None and not use.key.startswith(Receipt.UNNAMED):
            return None
        running = [part for part in self._running(taken) if is_about(part, charge, examples)]
        # A dearer use is only taken where its name is not known before its draw.
        fitting = [part for part in running if part.charge.has_cost_of(charge)]
        return next(iter(fitting or [part for part in running if not part.key]), None)

    def _named(self, key: str, taken: Collection[str]) -> Receipt | None:
        uses = self.uses.values()
        return next((use for use in uses if use.key == key and use.id not in taken), None)

    def _running(self, taken: Collection[str]) -> Iterator[Receipt]:
        for use in self.uses.values():
            if use.id not in taken and self._is_own(use.plan):
                yield use

    def _is_own(self, plan: str) -> bool:
        """Returns whether a ``with`` block of this thread and this vault runs a plan."""
        # Another vault in this thread has the plan in its ledger, and not in its work.
        return plan in RUNNING.get() and not self._held.keys().isdisjoint(self._holders[plan])

    def hold(self, *, locked: bool) -> str:
        """Returns the name of a new holder, who is ``locked`` if there is something to hold."""
        holder = secrets.token_hex(16)
        if locked:
            self._held[holder] = None if self._locks is None else self._locks.hold(holder)
        return holder

    def release(self, holder: str) -> None:
        """Frees an own lock."""
        if holder not in self._held:
            return
        lock = self._held.pop(holder)
        if lock is not None:
            lock.release()
        if self._locks is not None:
            self._locks.remove(holder)

    def is_running(self, plan: str) -> bool:
        """Returns whether a running process is known to work on a plan."""
        return any(self._is_held(name) for name in self._holders[plan])

    def may_run(self, plan: str) -> bool:
        """Returns whether a running process may work on a plan."""
        return any(self._is_held(holder) is not False for holder in self._holders[plan])

    def _is_held(self, holder: str) -> bool | None:
        if self._locks is None or holder in self._held:
            return holder in self._held
        return self._locks.is_held(holder)


def is_about(use: Receipt, charge: Charge, examples: np.ndarray | None) -> bool:
    """Returns whether a reserved use has these examples or more, and costs as much or more."""
    slack = 1.0 + _ROUNDING
    dearer = charge.epsilon > use.charge.epsilon * slack or charge.delta > use.charge.delta * slack
    if dearer and not charge.has_cost_of(use.charge):
        return False
    if use.examples is None or examples is None:
        return use.examples is None
    return bool(np.isin(examples, np.asarray(use.examples)).all())
