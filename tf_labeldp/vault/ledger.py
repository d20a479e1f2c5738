"""The ledger of a vault: its uses, their cost, and the remaining budget."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import (
    LabelSet,
    PrivacyBudget,
    PrivacyGuarantee,
    PublicInput,
    Receipt,
)
from tf_labeldp.accounting.provenance import Weights
from tf_labeldp.mechanisms.users import UsersOfRows
from tf_labeldp.vault.account import Account
from tf_labeldp.vault.label_kinds import LabelKind
from tf_labeldp.vault.records import (
    Arrival,
    BudgetRaise,
    DrawSettingsError,
    LabelStoreError,
    Output,
    Record,
    may_count,
)
from tf_labeldp.vault.reservations import CheckedUse, PlannedUse, Reservation
from tf_labeldp.vault.reserved_uses import ReservedUses
from tf_labeldp.vault.store import LabelStore, Project
from tf_labeldp.vault.use_history import HistoryLine, UseHistory, lines_of


@dataclasses.dataclass
class Release:
    """The records of one release of an engine, which has the key of the store."""

    binding: str | None = None  # digest of mechanism and prior; None before registration
    receipts: tuple[Receipt, ...] = ()  # the receipt of the release comes last
    rows: Output | None = None  # number and fingerprint of its rows
    output: Output | None = None  # the noisy statistic
    place: str | None = None  # file of the statistic, which 0.2 drew; 0.3 noted it
    sums: str | None = None  # file of exact sums that wait for their noise

    @property
    def is_drawn(self) -> bool:
        """Whether the noise of a statistic was drawn, even if its output is lost."""
        return self.output is not None or self.place is not None

    def follow(self, record: Record, fields: dict[str, Any]) -> None:
        """Follows a record of the release; ``fields`` are those of ``Record.release``."""
        if record.receipt is not None:
            self.binding = fields["binding"]
            self.receipts = record.receipts
        self.rows = record.output if "bound" in record.output.names else self.rows
        self.output = record.output if "values" in record.output.names else self.output
        self.place = fields.get("output", self.place)
        self.sums = fields.get("sums", self.sums)


class _Turns:
    """Turns of one thread and one process at a time, in a store or in memory."""

    def __init__(self, store: LabelStore | None) -> None:
        self._store = store
        self._thread: int | None = None  # that has the turn
        # A turn may be inside another one of its thread: a draw checks, reserves and charges.
        self._lock, self._process = threading.RLock(), os.getpid()

    @property
    def is_own(self) -> bool:
        """Whether this thread has the turn."""
        return self._thread == threading.get_ident()

    @contextlib.contextmanager
    def one(self) -> Iterator[bool]:
        """Yields, in a turn, whether it is not inside another turn of this thread."""
        if os.getpid() != self._process:
            if self._store is None:
                raise RuntimeError(
                    "this process was forked, and its parent would not count its draws. Share a "
                    "store: PrivateLabels(..., store=path)."
                )
            # A lock that a thread of the parent process held would never be released here.
            self._lock, self._process, self._thread = threading.RLock(), os.getpid(), None
        with self._lock, self._store.locked() if self._store else contextlib.nullcontext():
            outer, self._thread = self._thread, threading.get_ident()
            try:
                yield outer is None
            finally:
                self._thread = outer


class Ledger:
    """The records of one vault and of its key, in memory or in a store, and its budget.

    Example:
        >>> import os, tempfile
        >>> from tf_labeldp import PrivateLabels, RandomizedResponse
        >>> path = os.path.join(tempfile.mkdtemp(), "store")
        >>> labels = PrivateLabels([0, 1, 1], 2, budget=PrivacyBudget(2.0), store=path)
        >>> noisy = labels.randomize(RandomizedResponse(0.5, 2))
        >>> Ledger.of_store(path).remaining()
        1.5
    """

    _opened: ClassVar[dict[str, Ledger]] = {}
    """The ledgers of the stores of this process's vaults, by the name of the label set."""

    def __init__(
        self,
        account: Account,
        store: LabelStore | None = None,
        project: Project | None = None,
    ) -> None:
        self.account = account
        self.records: list[Record] = []  # in order, with charges of the rest of a project
        self.draws: dict[str, Record] = {}  # draws and releases by name
        self.releases: defaultdict[str, Release] = defaultdict(Release)  # of engines, by name
        self._store, self._project = store, project
        self._ended: list[tuple[Sequence[str], str]] = []  # own plans and locks to leave
        self._turns = _Turns(store)
        self._others: dict[pathlib.Path, Ledger] = {}  # the other stores of a project
        self._taken = 0  # number of records that another ledger of the project has counted

    @classmethod
    def of_labels(
        cls,
        labels: np.ndarray,
        rows: np.ndarray,
        kind: LabelKind,
        people: str | None,
        budget: PrivacyBudget | None,
        store: LabelStore | None,
        actor: str | None,
        users: UsersOfRows | None = None,
    ) -> Ledger:
        """Returns the ledger of a vault; without a budget it takes that of its store or project.

        ``rows`` are the examples with a label.
        """
        if store is None:
            label_set, reserved = LabelSet.new(len(labels), people), ReservedUses(None)
            # Without a store, the budget is not None: the vault checks its arguments.
            return cls(Account(label_set, budget, reserved, kind.unit, actor, users))  # type: ignore[arg-type]
        header = kind.header()
        if users is not None:
            header["users"] = PublicInput.digest_of(users.in_order_of_rows().codes)
        with store.locked(lambda: store.check(labels, rows, header, people)):
            project = Project(store.path) if store.in_project else None
            if not store.exists():
                _check_units(header, people, project)
                settings = header | ({"project": project.name} if project else {})
                shared = _first_budget(budget, store, project)
                store.create_for(labels, rows, people, shared, **settings)
            reserved = ReservedUses(store.holders)
            account = Account(*store.look(), reserved, kind.unit, actor, users)
            ledger = cls(account, store, project)
            if project is not None:
                project.join(ledger.label_set.name)
            ledger._read_new_records()
            _check_agrees(budget, ledger.budget, "the store keeps")
            _warn_if_spent(ledger, store)
            for digests, receipts in ledger.weights():
                Weights.note(digests, receipts)
        cls._opened[ledger.label_set.name] = ledger
        return ledger

    @classmethod
    def of_store(
        cls, path: str | os.PathLike[str], *, alone: bool = False, read_only: bool = True
    ) -> Ledger:
        """Reads the ledger of a store without its labels; ``alone`` leaves its project out."""
        return cls.of_opened(LabelStore(path, read_only=read_only), alone=alone)

    @classmethod
    def of_opened(cls, store: LabelStore, *, alone: bool = False) -> Ledger:
        """Reads the ledger of a store whose labels are not there, such as by the key in it."""
        # A folder without a store, and the ledger of a key, are refused here, before the header.
        label_set, budget = store.look()
        header, reserved = store.header(), ReservedUses(store.holders)
        unit = "user" if "users" in header else LabelKind.of_header(header).unit
        account = Account(label_set, budget, reserved, unit)
        project = Project(store.path) if store.in_project and not alone else None
        ledger = cls(account, store, project)
        with ledger.turn():
            return ledger

    @classmethod
    def all_in(cls, folder: pathlib.Path) -> dict[pathlib.Path, Ledger]:
        """Reads the ledgers of a store, or of the stores in a folder, by their paths."""
        if LabelStore(folder).exists():
            return {folder: cls.of_store(folder)}
        several = sorted(path.parent for path in folder.glob("*/header.json"))
        # The ledger of a key has a header without a budget.
        stores = [path for path in several if "budget" in LabelStore(path).header()]
        if not stores:
            raise LabelStoreError(
                f"expected a label store in {folder}, got no header.json there or one folder "
                "below. Give the folder of PrivateLabels(..., store=) or --store."
            )
        return {path: cls.of_store(path) for path in stores}

    @staticmethod
    def budget_for(
        path: str | os.PathLike[str] | None, budget: PrivacyBudget
    ) -> PrivacyBudget | None:
        """Returns the budget argument for a vault: None where its store or project keeps one."""
        if path is None:
            return budget
        store = LabelStore(path)
        return None if store.exists() or store.in_project else budget

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Lets one thread and one process at a time read the records and add to them."""
        with self._turns.one() as is_outer:
            self._read_new_records()
            self._end_reservations()
            while is_outer and self._ended:
                self.leave(*self._ended.pop())
            yield

    @property
    def header(self) -> dict[str, Any]:
        """The header of the store; {} without one."""
        return {} if self._store is None else self._store.header()

    @property
    def in_project(self) -> bool:
        """Whether the stores in the folder around this one share its budget."""
        return self._project is not None

    def _read_new_records(self) -> None:
        if self._store is not None:
            for record in self._store.new_records():
                self._remember(record)
            self.account.grow(self._store.num_labels)
        for path in () if self._project is None else self._project.other_stores():
            if path not in self._others:
                self._others[path] = Ledger.of_store(path, alone=True)
                self.account.of_project.append(self._others[path].account)
            self._follow(self._others[path])

    def _follow(self, other: Ledger) -> None:
        """Counts the new records of another store of the project."""
        # Without its stored name, this label set may be about the people of any other store.
        own = dataclasses.replace(self.label_set, stored=False)
        with other.turn():
            new = other.records[other._taken :]
        for record in new:
            fields = record.reservation or {}
            ahead = [use for use in record.made_of if fields and may_count(own, use)]
            self.account.filtered.add(ahead)
            self.account.give_back(fields.get("given_back", ()))
            charged = [] if record.receipt is None else [record.receipt]
            for receipt in self.account.not_charged(charged, own):
                self.keep(receipt=receipt)
        if other._store is not None and other._store.is_forgotten:
            self.account.give_back_not_charged(
                use.id for record in other.records for use in record.made_of if use.plan
            )
        raised = [record for record in new if record.raised is not None]
        if raised and other.budget != self.budget and _covers(other.budget, self.budget):
            self.keep(raised=raised[-1].raised)
        other._taken += len(new)

    def arrive(self, arrival: Arrival, labels: np.ndarray, number: int) -> None:
        """Records labels that came later, as arrival ``number`` of the vault, unless it is stored.

        Called within ``turn``.
        """
        if self._store is None:
            self.account.grow(arrival.total)
        elif number < len(self._store.arrivals()):
            self._store.check_arrival(number, arrival, labels)
        elif self._store.has_key():
            raise ValueError(
                f"expected a store without a key, got {self._store.path}, whose keyed draws are "
                "for its first labels. Make another vault for the new ones."
            )
        else:
            self._store.extend(arrival, labels)
            self._read_new_records()

    def keep(self, **content: Any) -> Record:
        """Writes a record (fields of ``Record.of``) and counts its receipt: the use is charged."""
        record = Record.of(number=len(self.records), **content)
        if self._store is None or self._store.read_only:
            return self._remember(record)
        # The disk has the charge before memory has it, and before the caller has the output: if an
        # interrupt comes in between, the next turn reads and counts the record.
        for written in self._store.append(record):
            self._remember(written)
        return record

    @classmethod
    def record_digests(cls, digests: Sequence[bytes], receipts: Iterable[Receipt]) -> None:
        """Records digests of weights or of published files in the stores of charged vaults."""
        receipts = tuple(receipts)
        for name in {receipt.labels.name for receipt in receipts if digests} & set(cls._opened):
            with contextlib.suppress(OSError, LabelStoreError):  # The store is gone, or forgotten.
                cls._opened[name].keep_weights(digests, receipts)

    def keep_weights(self, digests: Sequence[bytes], receipts: tuple[Receipt, ...]) -> None:
        """Records the receipts of model weights, or of published files, with these digests."""
        with self.turn():
            weights, ids = tuple(digest.hex() for digest in digests), {use.id for use in receipts}
            same = (record.made_of for record in self.records if record.weights == weights)
            if not any(ids == {use.id for use in made_of} for made_of in same):
                self.keep(weights=weights, made_of=tuple(receipts))

    def _remember(self, record: Record) -> Record:
        # The charge comes first: a draw that is interrupted here is charged and not returned.
        receipt = record.receipt
        if record.release is not None:
            self.releases[record.release["name"]].follow(record, record.release)
        if receipt is not None and not self.account.charge(receipt):
            record = dataclasses.replace(record, receipt=None)
        if record.raised is not None:
            self.account.budget = record.raised.budget
        if record.reservation is not None:
            self.account.follow(record.reservation, record.made_of)
        self.records.append(record)
        if record.key is not None:
            self.draws[record.key] = record
        return record

    @property
    def label_set(self) -> LabelSet:
        """The labels that the uses are about."""
        return self.account.label_set

    @property
    def budget(self) -> PrivacyBudget:
        """The budget, as it was raised last."""
        return self.account.budget

    def receipts(self) -> tuple[Receipt, ...]:
        """Returns all receipts, with those that other processes wrote."""
        with self.turn():
            return tuple(self.account.charged.values())

    def guarantee(self, planned: Sequence[Receipt], delta: float | None) -> PrivacyGuarantee:
        """Returns the statement of all receipts and of planned ones."""
        with self.turn():
            stated = self.account.guarantee(planned, delta)
        if stated.num_units is None:  # There are no receipts.
            unit, account = self.account.unit, self.account
            number = account.num_users if unit == "user" else self.label_set.size
            unit = PrivacyGuarantee.UNITS[unit]
            stated = dataclasses.replace(stated, unit=unit, num_units=number or None)
        return stated

    def weights(self) -> list[tuple[list[bytes], tuple[Receipt, ...]]]:
        """Returns digests of model weights, with the receipts of each model."""
        return [
            ([bytes.fromhex(digest) for digest in record.weights], record.made_of)
            for record in self.records
            if record.weights
        ]

    def reserve(
        self,
        uses: Sequence[PlannedUse],
        made_of: Iterable[Receipt] = (),
        of_plan: tuple[str, int] = ("", 1),
    ) -> Reservation:
        """Reserves the uses that are not reserved yet, all or none, and joins the plans of others.

        ``made_of`` are receipts of their public inputs, which are counted with the first of them.
        ``of_plan`` is a plan that they are a part of, and its number of uses.
        """
        with self.turn():
            account = self.account
            plan, covering, parts, inherited = account.planned(uses, made_of, of_plan)
            holder = account.reserved.hold(locked=bool(parts))
            try:
                for name, several in sorted(parts.items(), key=lambda item: not item[1]):
                    fields: dict[str, Any] = {"plan": name, "holder": holder}
                    if several and name == plan and covering is not None:
                        fields["given_back"] = [covering.id]
                    self.keep(reservation=fields, made_of=(*inherited, *several))
                    inherited = []
            except BaseException:
                account.reserved.release(holder)
                raise
            return Reservation(self, list(parts), holder)

    def take(self, use: PlannedUse, made_of: tuple[Receipt, ...] = ()) -> CheckedUse:
        """Returns a use to charge within this turn: a reserved one, or a new one if it is allowed.

        ``made_of`` are receipts of its public inputs. Raises what ``check`` raises.
        """
        return CheckedUse(self, *self.account.take(use, made_of))

    def leave(self, plans: Sequence[str], holder: str) -> None:
        """Gives back the uses of plans that were not drawn, unless others work on them, too."""
        reserved = self.account.reserved
        with self.turn() if reserved.of_plans(plans) else contextlib.nullcontext():
            reserved.release(holder)
            for plan in plans:
                self._give_back([] if reserved.may_run(plan) else reserved.of_plans([plan]))

    def leave_later(self, plans: Sequence[str], holder: str) -> None:
        """Leaves plans now, or else in the next turn.

        Garbage may be collected at any line of a turn, which writes its own record.
        """
        self._ended.append((plans, holder))
        if not self._turns.is_own:
            with self.turn():
                pass

    def give_back(self, key: str | None) -> list[Receipt]:
        """Gives back the reserved uses of this name, or all, of processes that have ended."""
        with self.turn():
            reserved = self.account.reserved
            uses = [use for use in reserved.uses.values() if key in (None, use.key)]
            for use in uses:
                if reserved.is_running(use.plan):
                    raise LabelStoreError(
                        f"expected reservations of processes that have ended, got {use.key!r} of a "
                        "running one. Wait for it, or stop it."
                    )
            self._give_back(uses)
        return uses

    def _end_reservations(self) -> None:
        """Gives back the uses without a name of processes that have ended; called in ``turn``."""
        reserved = self.account.reserved
        if self._store is not None and self._store.is_forgotten and reserved.uses:
            self.account.give_back(list(reserved.uses))
            reserved.uses.clear()
        unnamed = [use for use in reserved.uses.values() if not use.key]
        self._give_back([use for use in unnamed if not reserved.may_run(use.plan)])

    def _give_back(self, uses: Sequence[Receipt]) -> None:
        for plan in dict.fromkeys(use.plan for use in uses):
            names = [use.id for use in uses if use.plan == plan]
            self.keep(reservation={"plan": plan, "given_back": names})

    def raise_budget(self, budget: PrivacyBudget, reason: str) -> None:
        """Raises the budget, and keeps the reason in the ledger."""
        with self.turn():
            old = self.budget
            if not _covers(budget, old) or budget == old:
                raise ValueError(
                    f"the budget can only be raised: it is {old}, got {budget}. To spend less, "
                    "stop earlier; remaining() returns the rest."
                )
            time, actor = Receipt.timestamp(), self.account.actor
            self.keep(raised=BudgetRaise(budget, reason, time, actor))

    def remaining(self, rows: np.ndarray | None = None) -> float:
        """Returns the largest epsilon of one more pure-DP use of these examples; None for all."""
        with self.turn():
            return self.account.remaining(rows)

    def spread(self) -> list[tuple[float, int]]:
        """Returns each spent epsilon, rising, with the number of examples that spent it."""
        with self.turn():
            return self.account.spread()

    def history(self) -> UseHistory:
        """Returns the uses in order; equal steps in a row share a line.

        What is reserved comes last. It is in the epsilon of its line, and not in that so far.
        """
        return UseHistory(use for use, _ in self.lines())

    def lines(self) -> list[tuple[HistoryLine, str]]:
        """Returns the lines of the history, each with its use in the words of a page."""
        with self.turn():
            records, reserved = list(self.records), list(self.account.reserved.uses.values())
        return lines_of(records, reserved, self.label_set, self.budget.delta)


@_validate.takes_old_arguments
def forget(path: str | os.PathLike[str], *, actor: str | None = None) -> list[str]:
    """Erases the labels' traces in a store, and keeps its receipts.

    It removes the salted digest of the labels, the key of keyed draws and all draws, so that
    nothing can be drawn any more; the receipts stay, and in a project they still count. It cannot
    erase published outputs, backups, or blocks that the disk has not yet overwritten. The header
    names the author: the environment variable ``LABELDP_ACTOR``, or the login.

    Args:
        path: the folder of the store.

    Returns:
        The names of other files in the folder, which are left untouched.

    Raises:
        LabelStoreError: the folder has no store, or a damaged one.

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
    Ledger.of_store(path)  # This raises for a missing or damaged store, before any change.
    store = LabelStore(path)
    with store.locked():
        releases = [record.release for record in Ledger.of_store(path).records if record.release]
        sums = [(each["name"], each["sums"]) for each in releases if "sums" in each]
        return store.forget(sums, Receipt.timestamp(), actor or Receipt.actor_name())


def give_back(path: str | os.PathLike[str], *, key: str | None = None) -> list[str]:
    """Gives back what ended processes reserved in a store and did not draw.

    A process that was killed between two releases leaves what it had reserved to the next call with
    the same names. Give it back if there will be no such call. A charge is never given back.

    Args:
        path: the folder of the store.
        key: the name of the use; None gives back all.

    Returns:
        The uses that were given back, by name, or by their mechanisms.

    Raises:
        LabelStoreError: the folder has no store, or the process of a reservation is running.

    Example:
        >>> import os, tempfile
        >>> from tf_labeldp import PrivateLabels
        >>> path = os.path.join(tempfile.mkdtemp(), "store")
        >>> labels = PrivateLabels([0, 1, 1], 2, budget=PrivacyBudget(1.0), store=path)
        >>> give_back(path)
        []
    """
    uses = Ledger.of_store(path, read_only=False).give_back(key)
    return [use.key or use.what for use in uses]


@_validate.takes_old_arguments
def confirm_move(path: str | os.PathLike[str], *, actor: str | None = None) -> None:
    """Accepts a store in a folder that is a copy of the one in which it was last used.

    A store that was copied, restored from a backup or moved to another disk is refused once: two
    copies would spend one budget twice, and a backup lacks later charges. Call this if the copy is
    the newest one, and no other is used. The header of the store lists the calls with their
    authors, from the environment variable ``LABELDP_ACTOR``, or the login.

    Args:
        path: the folder of the store.

    Raises:
        LabelStoreError: the folder has no store, or a damaged one.

    Example:
        >>> import os, shutil, tempfile
        >>> from tf_labeldp import PrivateLabels
        >>> old, new = (os.path.join(tempfile.mkdtemp(), "store") for _ in range(2))
        >>> labels = PrivateLabels([0, 1, 1], 2, budget=PrivacyBudget(1.0), store=old)
        >>> _ = shutil.copytree(old, new)
        >>> shutil.rmtree(old)
        >>> confirm_move(new)
        >>> PrivateLabels([0, 1, 1], 2, store=new).remaining()
        1.0
    """
    store = LabelStore(path)
    store.check_exists()
    with store.locked():
        store.confirm_move(Receipt.timestamp(), actor or Receipt.actor_name())


def _first_budget(
    budget: PrivacyBudget | None, store: LabelStore, project: Project | None
) -> PrivacyBudget:
    paths = [] if project is None else project.other_stores()
    budgets = [Ledger.of_store(path, alone=True).budget for path in paths]
    if budgets:
        shared = max(budgets, key=lambda budget: (budget.epsilon, budget.delta))
        _check_agrees(budget, shared, "the stores of this project share")
        return shared
    if budget is None:
        raise ValueError(
            f"budget is missing, and there is no store in {store.path} that keeps one. Write "
            "budget=PrivacyBudget(epsilon=1.0), or check the path."
        )
    return budget


def _check_units(header: dict[str, Any], people: str | None, project: Project | None) -> None:
    """Raises if costs by label and by user would add up in a project."""
    own, has_users = LabelSet.new(0, people), "users" in header
    for path in () if project is None else project.other_stores():
        store = LabelStore(path, read_only=True)
        if own.may_be(store.label_set()) and ("users" in store.header()) != has_users:
            raise ValueError(
                f"expected users= in all vaults of a project or in none, got {path} "
                f"{'without' if has_users else 'with'} users. Make both with users=, or give both "
                "vaults different people=."
            )


def _check_agrees(budget: PrivacyBudget | None, kept: PrivacyBudget, owner: str) -> None:
    if budget not in (None, kept):
        raise DrawSettingsError(
            f"{owner} the budget {kept}, got {budget}. Leave budget out; "
            "labels.raise_budget(budget, reason=...) raises it."
        )


def _warn_if_spent(ledger: Ledger, store: LabelStore) -> None:
    if ledger.records and not all(each.allows for each in ledger.account.filters(None)):
        _validate.warn(
            f"nothing is left of the budget {ledger.budget} of {store.path}: an earlier "
            "version allowed its uses as if they were fixed in advance, and for uses that "
            "are chosen after earlier outputs they are above it. Raise the budget to use "
            "these labels again."
        )


def _covers(budget: PrivacyBudget, other: PrivacyBudget) -> bool:
    return budget.epsilon >= other.epsilon and budget.delta >= other.delta
