"""Reservations: uses of labels that are checked and reserved in one turn of the ledger."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from tf_labeldp.accounting import Charge, Receipt, Setting

RUNNING: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("plans", default=())
"""The plans whose ``with`` block runs in this thread: uses without a name belong to them."""


class PlannedUse(NamedTuple):
    """A use to reserve or to charge; without a key it is found by its cost and its examples."""

    key: str | None
    what: str
    kind: str
    charge: Charge
    rows: np.ndarray  # examples of the whole vault
    use: str = ""  # as for `Receipt`


class CheckedUse(NamedTuple):
    """A use that was checked in this turn of the ledger, and is charged before the turn ends."""

    ledger: Any
    part: Receipt | None  # the use that was reserved for it before, or none
    inherited: Sequence[Receipt]  # receipts of its inputs, which are counted with it

    def receipt(self, receipt: Receipt) -> Receipt:
        """Returns the receipt as that of the reserved use, whose plan it is a part of."""
        if self.part is None:
            return receipt
        return dataclasses.replace(receipt, id=self.part.id, plan=self.part.plan)

    def charge(self, receipt: Receipt, **content: Any) -> Any:
        """Records the use with its output (fields of ``Record.of``), and the inputs before it."""
        for other in self.inherited:
            self.ledger.keep(receipt=other)
        return self.ledger.keep(receipt=self.receipt(receipt), **content)


class Reservation:
    """Uses of labels that are reserved together, as ``PrivateLabels.reserve`` returns them.

    A context manager: at the end of its block, and after an error in it, the uses that were not
    drawn are given back. Without a block, this happens once the object is no longer in use.

    Guarantee:
        The uses were checked against the budget, and reserved, in one turn of the ledger: all or
        none. Until a use is drawn or given back, no other use can spend its cost, in any process
        and in any store of the project. A draw turns its use into a charge, in the record that
        keeps its output; a charge is never given back. The uses are one plan, which was fixed
        before its first release: their receipts share ``Receipt.plan``.

    A process that is killed leaves its reservation in the store. A use with a name belongs to the
    next call with this name, in any process, until ``tf_labeldp.vault.give_back`` returns it; a use
    without a name is given back as soon as the process's own file lock is free. After an error, the
    same calls go on with what they gave back as a part of the plan, unless other uses spent it.

    Example:
        >>> from tf_labeldp import PrivacyBudget, PrivateLabels, RandomizedResponse
        >>> labels = PrivateLabels([0, 1, 1], num_classes=2, budget=PrivacyBudget(1.0))
        >>> first, second = RandomizedResponse(0.5, 2), RandomizedResponse(0.25, 2)
        >>> with labels.reserve({"a": first, "b": second}):
        ...     noisy = labels.randomize(first, key="a")
        ...     labels.remaining()
        0.25
        >>> labels.remaining()
        0.5
    """

    _plans: tuple[str, ...] = ()

    def __init__(self, ledger: Setting[Any], plans: Sequence[str], holder: str) -> None:
        self._ledger, self._plans, self._holder = ledger, tuple(plans), holder
        self._tokens: list[Any] = []
        # The work may end without a block, such as that of callbacks; a kill runs no finalizer.
        self._end = weakref.finalize(self, _give_back, ledger, self._plans, holder, os.getpid())

    def give_back(self) -> None:
        """Gives back the uses that were not drawn, unless another process works on them, too."""
        if self._end.detach() is not None:
            self._ledger.leave(self._plans, self._holder)

    def __enter__(self) -> Reservation:
        self._tokens.append(RUNNING.set((*RUNNING.get(), *self._plans)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        RUNNING.reset(self._tokens.pop())
        # An error of the work is worth more than one of the store.
        with contextlib.suppress(*(() if kind is None else (Exception,))):
            self.give_back()

    def __repr__(self) -> str:
        return f"Reservation(plans={list(self._plans)})"


def _give_back(ledger: Any, plans: Sequence[str], holder: str, process: int) -> None:
    # A forked process has a copy of the object, and not the work. The folder may be gone.
    if os.getpid() == process:
        with contextlib.suppress(Exception):
            ledger.leave_later(plans, holder)
