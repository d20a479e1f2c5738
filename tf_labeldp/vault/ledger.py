"""The ledger of a vault: the account of its uses, and what its budget still allows."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tf_labeldp.accounting import (
    BudgetExceededError,
    Charge,
    PrivacyBudget,
    PrivacyGuarantee,
    Receipt,
)
from tf_labeldp.accounting.budget import CountedCharges, compose_counted
from tf_labeldp.accounting.events import pure_dp_event
from tf_labeldp.accounting.provenance import note_digests
from tf_labeldp.accounting.receipts import (
    Composition,
    LabelSet,
    Receipts,
    actor_name,
    merge_receipts,
    timestamp,
)
from tf_labeldp.vault.label_kinds import LabelKind
from tf_labeldp.vault.model_history import LEDGERS
from tf_labeldp.vault.records import DrawSettingsError, Record, may_count
from tf_labeldp.vault.store import LabelStore, Project

UNNAMED = "unnamed-"
"""Begins the names of draws without a key."""
_CAME_ALONG = (
    "A history that comes with a model counts as that of these labels, unless both have stores, or "
    "people= declares that they are of different people. Raise the budget, take a model that has "
    "not seen these labels, or declare the people."
)


class Use(NamedTuple):
    """One line of ``PrivateLabels.history()``: a use, or a change of the budget."""

    time: str  # in UTC
    what: str
    examples: int  # their number
    epsilon: float  # of this use alone
    epsilon_so_far: float  # at the delta of the budget
    actor: str
    key: str


class UseHistory(tuple[Use, ...]):
    """The uses of a vault, in order: prints as a table, and is one for ``pandas.DataFrame``.

    Example:
        >>> print(UseHistory([Use("2026-01-01T00:00:00", "a draw", 10, 0.5, 0.5, "me", "first")]))
        when                 examples   epsilon    so far  who  what
        2026-01-01T00:00:00        10       0.5       0.5  me   a draw (first)
    """

    __slots__ = ()

    def __str__(self) -> str:
        when = max([4, *(len(use.time) for use in self)])
        who = max([3, *(len(use.actor) for use in self)])
        heads = f"{'examples':>8}  {'epsilon':>8}  {'so far':>8}"
        lines = [f"{'when':<{when}}  {heads}  {'who':<{who}}  what"]
        lines += [
            f"{use.time:<{when}}  {use.examples:>8}  {use.epsilon:>8.4g}  "
            f"{use.epsilon_so_far:>8.4g}  {use.actor:<{who}}  {use.what}"
            + (f" ({use.key})" if use.key else "")
            for use in self
        ]
        return "\n".join(lines)


class Ledger:
    """The records of one vault, in memory or in a store, and its budget."""

    def __init__(
        self,
        label_set: LabelSet,
        budget: PrivacyBudget,
        store: LabelStore | None = None,
        project: Project | None = None,
        unit: str = "label",
        actor: str | None = None,
    ) -> None:
        self.label_set, self.budget = label_set, budget
        self.records: list[Record] = []  # in order, with those of the rest of a project
        self.draws: dict[str, Record] = {}  # and releases, by their names
        self._store, self._project = store, project
        self._unit, self._actor = unit, actor or actor_name()
        self._composition = Composition()
        self._counted: dict[str, Receipt] = {}  # all receipts by their ids, in order
        self._others: dict[pathlib.Path, Ledger] = {}  # of the other stores of a project
        self._taken = 0  # records that the ledger of another store of the project has counted
        self._lock, self._process = threading.RLock(), os.getpid()

    @classmethod
    def of_labels(
        cls,
        labels: np.ndarray,
        kind: LabelKind,
        people: str | None,
        budget: PrivacyBudget | None,
        store: LabelStore | None,
        actor: str | None,
    ) -> Ledger:
        """Returns the ledger of a vault; ``budget=None`` takes that of its store or project."""
        if store is None:
            label_set = LabelSet.new(len(labels), people)
            return cls(label_set, budget, unit=kind.unit, actor=actor)  # type: ignore[arg-type]
        with store.locked(lambda: store.check(labels, kind.header(), people)):
            project = Project(store.path) if store.in_project else None
            if not store.exists():
                settings = kind.header() | ({"project": project.name} if project else {})
                store.create_for(labels, people, _first_budget(budget, store, project), **settings)
            ledger = cls(*store.look(), store, project, kind.unit, actor)
            if project is not None:
                project.join(ledger.label_set.name)
            ledger._read_new_records()
            _check_agrees(budget, ledger.budget, "the store keeps")
            for digests, receipts in ledger.weights():
                note_digests(digests, receipts)
        LEDGERS[ledger.label_set.name] = functools.partial(
            _keep_weights, weakref.ref(ledger), ledger.label_set.name, store.path
        )
        return ledger

    @classmethod
    def of_store(
        cls, path: str | os.PathLike[str], *, alone: bool = False, read_only: bool = True
    ) -> Ledger:
        """Returns the ledger of a store without its labels; ``alone`` leaves its project out."""
        store = LabelStore(path, read_only=read_only)
        label_set, budget = store.look()
        project = Project(store.path) if store.in_project and not alone else None
        ledger = cls(label_set, budget, store, project)
        with ledger.turn():
            return ledger

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Lets one thread and one process at a time read the records and add to them."""
        if os.getpid() != self._process:
            if self._store is None:
                raise RuntimeError(
                    "this process was forked from the one that made the PrivateLabels, and neither "
                    "would count the draws of the other. Give the vault a store, "
                    "PrivateLabels(..., store=path), which they then share."
                )
            # The locks of threads of the parent process mean nothing here.
            self._lock, self._process = threading.RLock(), os.getpid()
        with self._lock, self._store.locked() if self._store else contextlib.nullcontext():
            self._read_new_records()
            yield

    def _read_new_records(self) -> None:
        for record in () if self._store is None else self._store.new_records():
            self._remember(record)
        own = dataclasses.replace(self.label_set, stored=False)  # may be of the same people
        for path in () if self._project is None else self._project.other_stores():
            if path not in self._others:
                self._others[path] = Ledger.of_store(path, alone=True)
            other = self._others[path]
            with other.turn():
                new = other.records[other._taken :]
            for receipt in self._not_counted(
                [record.receipt for record in new if record.receipt], own
            ):
                self.keep(receipt=receipt)
            raised = [record for record in new if record.budget is not None]
            if raised and other.budget != self.budget and _covers(other.budget, self.budget):
                last = raised[-1]
                self.keep(budget=last.budget, reason=last.reason, time=last.time, actor=last.actor)
            other._taken += len(new)

    def keep(self, **content: Any) -> Record:
        """Makes a record (``Record.of``) of this content, writes it to the store and returns it."""
        record = Record.of(len(self.records), **content)
        if self._store is None or self._store.read_only:
            return self._remember(record)
        self._store.append(record)
        for written in self._store.new_records():  # read back: an interrupt here loses nothing
            self._remember(written)
        return record

    def _remember(self, record: Record) -> Record:
        # The charge first: a draw that is interrupted here is paid for and not returned.
        receipt = record.receipt
        if receipt is not None and receipt.id in self._counted:  # it came by two ways
            record = dataclasses.replace(record, receipt=None)
        elif receipt is not None:
            self._counted[receipt.id] = receipt
            self._composition.add(receipt)
        if record.budget is not None:
            self.budget = record.budget
        self.records.append(record)
        if record.key is not None:
            self.draws[record.key] = record
        return record

    def receipt(
        self, charge: Charge, what: str, kind: str, key: str, rows: np.ndarray, **flags: Any
    ) -> Receipt:
        """Returns the receipt of a use of these rows; nothing is charged yet."""
        n = self.label_set.size
        if flags.get("unit") != "user":  # there are fewer users than labels
            PrivacyGuarantee(0.0, self.budget.delta, num_units=max(1, n)).warn_of_delta()
        return Receipt(
            self.label_set,
            charge,
            what,
            kind,
            key,
            None if rows.size == n and n else np.sort(rows),
            self.budget.delta,
            actor=self._actor,
            **{"unit": self._unit, **flags},
        )

    def receipts(self) -> Receipts:
        """Returns all receipts of these labels, of other processes too."""
        with self.turn():
            return tuple(self._counted.values())

    def guarantee(self, planned: Sequence[Receipt], delta: float | None) -> PrivacyGuarantee:
        """Returns the statement of all receipts, and of those that are planned."""
        with self.turn():
            composition = self._composition
            if planned:
                composition = composition.with_receipts(planned)
            return composition.guarantee(self.budget.delta if delta is None else delta)

    def weights(self) -> list[tuple[list[bytes], Receipts]]:
        """Returns digests of weights of models, and the receipts that they were made of."""
        return [
            ([bytes.fromhex(digest) for digest in record.weights], record.made_of)
            for record in self.records
            if record.weights
        ]

    def _not_counted(self, receipts: Iterable[Receipt], labels: LabelSet) -> list[Receipt]:
        return [
            receipt
            for receipt in merge_receipts(receipts)
            if receipt.id not in self._counted and may_count(labels, receipt)
        ]

    def raise_budget(self, budget: PrivacyBudget, reason: str) -> None:
        """Raises the budget, and keeps the reason in the ledger."""
        with self.turn():
            old = self.budget
            if not _covers(budget, old) or budget == old:
                raise ValueError(
                    f"the budget can only be raised: it is {old}, got {budget}. To spend less, "
                    "stop earlier; remaining() shows what is left."
                )
            self.keep(budget=budget, reason=reason, time=timestamp(), actor=self._actor)

    def check(
        self,
        rows: np.ndarray,
        planned: Sequence[tuple[str, Charge]],
        made_of: Iterable[Receipt] = (),
    ) -> list[Receipt]:
        """Raises if the budget does not allow these planned uses of these examples.

        Returns the receipts among ``made_of`` that count too: those that may be of these labels,
        and are not counted yet. They may be of any example.
        """
        came_along = self._not_counted(made_of, self.label_set)
        composition = self._composition
        if came_along:
            composition = composition.with_receipts(came_along)
            self._check(composition, None, [], came_along)
        if planned:
            is_part = rows.size != self.label_set.size
            self._check(composition, rows if is_part else None, planned, came_along)
        return came_along

    def _check(
        self,
        composition: Composition,
        rows: np.ndarray | None,
        planned: Sequence[tuple[str, Charge]],
        came_along: Sequence[Receipt],
    ) -> None:
        for history in composition.histories(self.label_set, rows):
            after = self._composed(history, [charge for _, charge in planned])
            if not self.budget.allows(after):
                break
        else:
            return
        several = [f"{receipt.what}, which came along," for receipt in came_along]
        what = " and ".join(dict.fromkeys([*several, *(words for words, _ in planned)]))
        deltas = [charge.delta for _, charge in planned]
        most = max([*deltas, *(receipt.charge.delta for receipt in came_along)], default=0.0)
        budget = self.budget
        if budget.delta == 0.0 and most > 0.0:
            raise BudgetExceededError(
                f"{what} needs a delta above zero (its own is {most:g}), and the vault's budget "
                f"has none. Nothing was drawn. Give PrivacyBudget({budget.epsilon:g}, delta=...) "
                f"at least that, below 1/n = {1 / max(1, self.label_set.size):.2g}; or use Laplace "
                "noise, which needs none."
            )
        before = self._composition.histories(self.label_set, rows)
        spent = max(self._composed(history).epsilon for history in before)
        raise BudgetExceededError(
            f"{what} would be charged to examples that have spent epsilon={spent:g}: together "
            f"epsilon={after.epsilon:g} at delta={after.delta:g}, over the budget {budget}. "
            f"Nothing was drawn. {_advice(planned)}"
        )

    def remaining(self) -> float:
        """Returns the largest epsilon of one more pure use of all labels."""
        with self.turn():
            histories = self._composition.histories(self.label_set)
        budget = self.budget

        def fits(epsilon: float) -> bool:
            use = Charge(epsilon, 0.0, pure_dp_event(epsilon))
            return all(budget.allows(self._composed(history, [use])) for history in histories)

        spent = max((self._composed(history).epsilon for history in histories), default=0.0)
        low = max(0.0, budget.epsilon - spent)  # basic composition
        if budget.delta == 0.0 or not histories:
            return low if low > 1e-9 * budget.epsilon else 0.0
        low = low if low and fits(low) else 0.0
        high = max(2.0 * low, budget.epsilon)
        while high - low > 1e-4 * high and high > 1e-6:
            middle = 0.5 * (low + high)
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def spread(self) -> list[tuple[float, int]]:
        """Returns each epsilon that some examples have spent, rising, and their number."""
        with self.turn():
            spread = list(self._composition.spread(self.label_set))
        found: Counter[float] = Counter()
        for histories, count in spread:
            found[max(self._composed(history).epsilon for history in histories)] += count
        return sorted(found.items())

    def history(self) -> UseHistory:
        """Returns the uses in order; like uses that follow each other are one line."""
        with self.turn():
            records = [record for record in self.records if record.receipt or record.budget]
        uses: list[Use] = []
        so_far = Composition()
        delta = self.budget.delta
        for _, like in itertools.groupby(records, _line_of):
            first, *more = like
            receipts = [record.receipt for record in (first, *more) if record.receipt is not None]
            for receipt in receipts:
                so_far.add(receipt)
            spent = so_far.guarantee(delta).epsilon
            use = first.receipt
            if use is None:
                what = f"budget raised to {first.budget}: {first.reason}"
                uses.append(Use(first.time, what, 0, 0.0, spent, first.actor, ""))
                continue
            alone = Composition(receipts).guarantee(delta).epsilon
            what = use.what + (", which failed" if use.kind == "failed" else "")
            what += f", {len(receipts)} times" if more else ""
            what += ", which came along" if use.labels != self.label_set else ""
            key = "" if more or use.key.startswith(UNNAMED) else use.key
            uses.append(Use(use.time, what, use.num_examples, alone, spent, use.actor, key))
        return UseHistory(uses)

    def _composed(self, history: CountedCharges, more: Sequence[Charge] = ()) -> PrivacyGuarantee:
        counts = Counter(dict(history))
        counts.update(more)
        return compose_counted(tuple(counts.items()), self.budget.delta)


def forget(path: str | os.PathLike[str], *, actor: str | None = None) -> list[str]:
    """Erases all traces of the labels in a store, and keeps the account of its spending.

    The salted digest of the labels, the key of keyed draws and all draws are removed, so that no
    label can be drawn any more; the receipts stay, and in a project they still count. Published
    outputs, backups, and blocks that a disk has not yet overwritten, are beyond a program.

    Args:
        path: of the store.
        actor: named in the header; None for ``LABELDP_ACTOR``, or the name of the login.

    Returns:
        The names of other files in the folder, which are left untouched.

    Raises:
        LabelStoreError: no store, or a damaged one.

    Example:
        >>> import os, tempfile
        >>> from tf_labeldp import PrivateLabels, RandomizedResponse
        >>> path = os.path.join(tempfile.mkdtemp(), "store")
        >>> labels = PrivateLabels([0, 1, 1], 2, budget=PrivacyBudget(1.0), store=path)
        >>> noisy = labels.randomize(RandomizedResponse(1.0, 2))
        >>> forget(path)
        []
        >>> sorted(name for name in os.listdir(path) if name != ".lock")
        ['header.json', 'last-record', 'records']
    """
    Ledger.of_store(path)  # raises for a folder that is no store, or not whole
    store = LabelStore(path)
    with store.locked():
        releases = [record.release for record in Ledger.of_store(path).records if record.release]
        sums = [release["sums"] for release in releases if "sums" in release]
        return store.forget(sums, timestamp(), actor or actor_name())


def _keep_weights(
    vaults: weakref.ref[Ledger],
    label_set: str,
    path: pathlib.Path,
    digests: Sequence[bytes],
    receipts: Receipts,
) -> None:
    """Keeps weights in a store, also when the vault is gone: an export may come later."""
    ledger = vaults() or Ledger.of_store(path, read_only=False)
    if ledger.label_set.name == label_set:
        with ledger.turn():
            ledger.keep(weights=tuple(digest.hex() for digest in digests), made_of=tuple(receipts))


def _first_budget(
    budget: PrivacyBudget | None, store: LabelStore, project: Project | None
) -> PrivacyBudget:
    paths = [] if project is None else project.other_stores()
    budgets = [Ledger.of_store(path, alone=True).budget for path in paths]
    if not budgets:
        if budget is None:
            raise ValueError(
                f"budget is missing, and there is no store in {store.path} that keeps one. Write "
                "budget=PrivacyBudget(epsilon=1.0), or check the path."
            )
        return budget
    kept = max(budgets, key=lambda budget: (budget.epsilon, budget.delta))
    _check_agrees(budget, kept, "the stores of this project share")
    return kept


def _check_agrees(budget: PrivacyBudget | None, kept: PrivacyBudget, owner: str) -> None:
    if budget not in (None, kept):
        raise DrawSettingsError(
            f"{owner} the budget {kept}, and {budget} was given. Leave budget out, and raise it "
            "with labels.raise_budget(budget, reason=...) if need be."
        )


def _covers(budget: PrivacyBudget, other: PrivacyBudget) -> bool:
    return budget.epsilon >= other.epsilon and budget.delta >= other.delta


def _advice(planned: Sequence[tuple[str, Charge]]) -> str:
    if not planned:
        return _CAME_ALONG
    if any(hasattr(charge.event, "count") for _, charge in planned):
        return (
            "Take fewer steps, or more noise (accounting.calibrate_noise_multiplier finds it for a "
            "target epsilon); remaining() shows what is left."
        )
    return (
        "Draw for other examples, use a smaller epsilon, or give draws a key and reuse them; "
        "remaining() shows what is left."
    )


def _line_of(record: Record) -> Any:
    """Returns the common fields of the records in one line of a history: like steps."""
    use = record.receipt
    if use is None or use.kind != "steps":
        return record.number
    return use.what, use.charge, use.labels, use.actor, use.num_examples
