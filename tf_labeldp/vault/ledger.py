"""The ledger of a vault: its uses, their cost, and the remaining budget."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pathlib
import secrets
import threading
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._progress import for_terminal
from tf_labeldp.accounting import (
    Assumption,
    BudgetExceededError,
    Charge,
    LabelSet,
    PrivacyBudget,
    PrivacyGuarantee,
    PublicInput,
    Receipt,
    Receipts,
)
from tf_labeldp.accounting.events import EventFields
from tf_labeldp.accounting.planned_uses import UseChains, UseInPlan
from tf_labeldp.accounting.privacy_filter import PrivacyFilter
from tf_labeldp.accounting.provenance import Weights
from tf_labeldp.accounting.receipts import Composition
from tf_labeldp.mechanisms import Mechanism
from tf_labeldp.mechanisms.users import UsersOfRows
from tf_labeldp.vault.label_kinds import LabelKind
from tf_labeldp.vault.records import Arrival, DrawSettingsError, LabelStoreError, Record, may_count
from tf_labeldp.vault.reservations import RUNNING, PlannedUse, Reservation, TakenUse
from tf_labeldp.vault.store import LabelStore, Project

_RESERVE = (
    "Reserve uses together before the first of them (labels.reserve): they count as one that was "
    "fixed in advance."
)
_ROUNDING = 1e-9
"""Relative slack for a cost that was computed in two ways."""


class Use(NamedTuple):
    """One line of ``PrivateLabels.history()``: a use, or a change of the budget."""

    time: str  # UTC
    what: str
    examples: int  # number of examples
    epsilon: float  # cost of this use alone
    epsilon_so_far: float  # at the delta of the budget
    actor: str
    key: str


class UseHistory(tuple[Use, ...]):
    """The uses of a vault, in order: prints as a table; ``pandas.DataFrame`` takes it.

    Example:
        >>> print(UseHistory([Use("2026-01-01T00:00:00", "a draw", 10, 0.5, 0.5, "me", "first")]))
        when                 examples   epsilon    so far  who  what
        2026-01-01T00:00:00        10       0.5       0.5  me   a draw (first)
    """

    __slots__ = ()

    def __str__(self) -> str:
        whens, actors = ([for_terminal(use[place]) for use in self] for place in (0, 5))
        when, who = max([4, *map(len, whens)]), max([3, *map(len, actors)])
        columns = f"{'examples':>8}  {'epsilon':>8}  {'so far':>8}"
        lines = [f"{'when':<{when}}  {columns}  {'who':<{who}}  what"]
        lines += [
            f"{time:<{when}}  {use.examples:>8}  {use.epsilon:>8.4g}  "
            f"{use.epsilon_so_far:>8.4g}  {actor:<{who}}  {use.what}"
            + (f" ({use.key})" if use.key else "")
            for use, time, actor in zip(self, whens, actors, strict=True)
        ]
        return for_terminal(*lines)


@dataclasses.dataclass
class Release:
    """The records of one release of an engine, which has the key of the store."""

    binding: str | None = None  # digest of mechanism and prior; None before registration
    receipts: tuple[Receipt, ...] = ()  # the receipt of the release comes last
    rows: Record | None = None  # number and fingerprint of its rows
    output: Record | None = None  # the noisy statistic
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
        self.rows = record if "bound" in record.array_names else self.rows
        self.output = record if "values" in record.array_names else self.output
        self.place = fields.get("output", self.place)
        self.sums = fields.get("sums", self.sums)


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
        label_set: LabelSet,
        budget: PrivacyBudget,
        store: LabelStore | None = None,
        project: Project | None = None,
        unit: str = "label",
        actor: str | None = None,
    ) -> None:
        self.label_set, self.budget = label_set, budget
        self.records: list[Record] = []  # in order, with charges of the rest of a project
        self.draws: dict[str, Record] = {}  # draws and releases by name
        self.releases: defaultdict[str, Release] = defaultdict(Release)  # of engines, by name
        self._store, self._project = store, project
        self._unit, self._actor = unit, actor or Receipt.actor_name()
        self.notes: tuple[Assumption, ...] = ()  # of each new charge
        self.users: UsersOfRows | None = None  # of all labels
        self._composition = Composition(own=label_set.name)
        self._chains = UseChains()  # of the filter that keeps the budget, with what is reserved
        self._planned: dict[str, Receipt] = {}  # their receipts by id and event, in order
        self._given_back: set[str] = set()  # ids
        self._replaced: set[str] = set()  # ids among them, by parts of their own
        self._counted: dict[str, Receipt] = {}  # all receipts by id, in order
        self._reserved: dict[str, Receipt] = {}  # by id, neither charged nor given back
        self._inputs: dict[str, list[Receipt]] = {}  # by plan, of the public inputs of its uses
        self._holders: dict[str, list[str]] = {}  # by plan, names of the locks of its processes
        self._held: dict[str, Any] = {}  # own locks by name
        self._ended: list[tuple[Sequence[str], str]] = []  # own plans and locks to leave
        self._in_turn: int | None = None  # the thread
        self.num_reservations = 0  # records of reservations, which shift no seeded draw
        self._others: dict[pathlib.Path, Ledger] = {}  # the other stores of a project
        self._taken = 0  # number of records that another ledger of the project has counted
        self._lock, self._process = threading.RLock(), os.getpid()

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
            label_set = LabelSet.new(len(labels), people)
            ledger = cls(label_set, budget, unit=kind.unit, actor=actor)  # type: ignore[arg-type]
            ledger.users = users
            return ledger
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
            ledger = cls(*store.look(), store, project, kind.unit, actor)
            ledger.users = users
            if project is not None:
                project.join(ledger.label_set.name)
            ledger._read_new_records()
            _check_agrees(budget, ledger.budget, "the store keeps")
            if ledger.records and not all(each.allows for each in ledger._filters(None)):
                _validate.warn(
                    f"nothing is left of the budget {ledger.budget} of {store.path}: an earlier "
                    "version allowed its uses as if they were fixed in advance, and for uses that "
                    "are chosen after earlier outputs they are above it. Raise the budget to use "
                    "these labels again."
                )
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
        label_set, budget = store.look()
        project = Project(store.path) if store.in_project and not alone else None
        header = store.header()
        unit = "user" if "users" in header else LabelKind.of_header(header).unit
        ledger = cls(label_set, budget, store, project, unit)
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
        if os.getpid() != self._process:
            if self._store is None:
                raise RuntimeError(
                    "this process was forked, and its parent would not count its draws. Share a "
                    "store: PrivateLabels(..., store=path)."
                )
            # A lock that a thread of the parent process held would never be released here.
            self._lock, self._process, self._in_turn = threading.RLock(), os.getpid(), None
        with self._lock, self._store.locked() if self._store else contextlib.nullcontext():
            outer, self._in_turn = self._in_turn, threading.get_ident()
            try:
                self._read_new_records()
                self._end_reservations()
                while outer is None and self._ended:
                    self.leave(*self._ended.pop())
                yield
            finally:
                self._in_turn = outer

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
            self.label_set = dataclasses.replace(self.label_set, size=self._store.num_labels)
        # Without its stored name, this label set may be about the people of any other store.
        own = dataclasses.replace(self.label_set, stored=False)
        for path in () if self._project is None else self._project.other_stores():
            if path not in self._others:
                self._others[path] = Ledger.of_store(path, alone=True)
            other = self._others[path]
            with other.turn():
                new = other.records[other._taken :]
            for record in new:
                fields = record.reservation or {}
                ahead = [use for use in record.made_of if fields and may_count(own, use)]
                self._plan(ahead, fields.get("given_back", ()))
                charged = [] if record.receipt is None else [record.receipt]
                for receipt in self._not_counted(charged, own):
                    self.keep(receipt=receipt)
            if other._store is not None and other._store.is_forgotten:
                reserved = {
                    use.id for record in other.records for use in record.made_of if use.plan
                }
                self._plan((), reserved - self._counted.keys() - self._given_back)
            raised = [record for record in new if record.budget is not None]
            if raised and other.budget != self.budget and _covers(other.budget, self.budget):
                last = raised[-1]
                self.keep(budget=last.budget, reason=last.reason, time=last.time, actor=last.actor)
            other._taken += len(new)

    def arrive(self, arrival: Arrival, labels: np.ndarray, number: int) -> None:
        """Records labels that came later, as arrival ``number`` of the vault, unless it is stored.

        Called within ``turn``.
        """
        if self._store is None:
            self.label_set = dataclasses.replace(self.label_set, size=arrival.total)
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
        if receipt is not None and receipt.id in self._counted:
            receipt.agreed(self._counted[receipt.id])
            record = dataclasses.replace(record, receipt=None)
        elif receipt is not None:
            self._counted[receipt.id] = receipt
            self._reserved.pop(receipt.id, None)
            self._composition.add(receipt)
            self._plan([receipt])
        if record.budget is not None:
            self.budget = record.budget
        if record.reservation is not None:
            self._follow(record.reservation, record.made_of)
        self.records.append(record)
        if record.key is not None:
            self.draws[record.key] = record
        return record

    @property
    def unit(self) -> str:
        """The unit of privacy, ``"label"``, ``"row"`` or ``"user"``."""
        return self._unit if self.users is None else "user"

    @property
    def num_users(self) -> int | None:
        """The number of users of all labels; None without users."""
        return None if self.users is None else self.users.counts.size

    def new_receipt(self, use: PlannedUse, **flags: Any) -> Receipt:
        """Returns the receipt of a use; charges nothing yet.

        With users, it is charged to all labels of the users of its rows: the labels of a user
        share one history, which composes all uses of any of them.
        """
        n = self.label_set.size
        if self.users is not None:
            number = self.num_users or 0
            flags |= {"unit": "user", "num_units": flags.get("num_units") or number}
            PrivacyGuarantee(0.0, self.budget.delta, num_units=max(1, number)).warn_of_delta()
        elif flags.get("unit") != "user":  # The number of labels is not the number of users.
            PrivacyGuarantee(0.0, self.budget.delta, num_units=max(1, n)).warn_of_delta()
        return Receipt(
            self.label_set,
            self._with_notes(use.charge),
            use.what,
            use.kind,
            use.key or "",
            self._examples(use.rows),
            self.budget.delta,
            use=use.use,
            budget_epsilon=self.budget.epsilon,
            actor=self._actor,
            **{"unit": self._unit, **flags},
        )

    def _examples(self, rows: np.ndarray) -> np.ndarray | None:
        """Returns the rows that a use of some rows is charged to; None for all."""
        if self.users is not None:
            rows = self.users.rows_of_same(rows)
        n = self.label_set.size
        return None if rows.size == n and n else np.sort(rows)

    def receipts(self) -> tuple[Receipt, ...]:
        """Returns all receipts, with those that other processes wrote."""
        with self.turn():
            return tuple(self._counted.values())

    def guarantee(self, planned: Sequence[Receipt], delta: float | None) -> PrivacyGuarantee:
        """Returns the statement of all receipts and of planned ones."""
        with self.turn():
            composition = self._composition
            if planned:
                composition = composition.with_receipts(planned)
            filters = self._filters(None, inherited=planned)
            is_kept = all(each.allows for each in filters)
            kept = (self.budget.epsilon, self.budget.delta) if is_kept else ()
            stated = composition.guarantee(self.budget.delta if delta is None else delta, kept)
        if stated.num_units is None:  # There are no receipts.
            number = self.num_users if self.unit == "user" else self.label_set.size
            stated = dataclasses.replace(
                stated, unit=PrivacyGuarantee.UNITS[self.unit], num_units=number or None
            )
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
            covering = self.covering(uses)
            plan = of_plan[0] or secrets.token_hex(16) if covering is None else covering.plan
            taken = set() if covering is None else {covering.id}
            parts = self._parts(uses, plan, of_plan[1], taken, again=True)
            new = [*itertools.chain(*parts.values())]
            try:
                inherited = self.check_plan(new, made_of, covering)
            except BudgetExceededError:
                if self._given_back.isdisjoint(use.id for use in new):
                    raise
                parts = self._parts(uses, plan, of_plan[1], taken)
                inherited = self.check_plan([*itertools.chain(*parts.values())], made_of, covering)
            holder = secrets.token_hex(16)
            if parts:
                self._held[holder] = None if self._store is None else self._store.hold(holder)
            try:
                for name, several in sorted(parts.items(), key=lambda item: not item[1]):
                    fields: dict[str, Any] = {"plan": name, "holder": holder}
                    if several and name == plan and covering is not None:
                        fields["given_back"] = [covering.id]
                    self.keep(reservation=fields, made_of=(*inherited, *several))
                    inherited = []
            except BaseException:
                self._release(holder)
                raise
            return Reservation(self, list(parts), holder)

    def _parts(
        self,
        uses: Sequence[PlannedUse],
        plan: str,
        plan_uses: int,
        taken: Collection[str],
        again: bool = False,
    ) -> dict[str, list[Receipt]]:
        """Returns the plans of uses, each with the receipts to reserve.

        Uses that are not reserved are new in ``plan``, or, with ``again``, parts of earlier plans.
        """
        ids, parts = set(taken), dict[str, list[Receipt]]()
        for use in uses:
            if part := self.reserved_use(use, ids):
                parts.setdefault(part.plan, [])
            elif again and (part := self.planned_before(use, ids)):
                parts.setdefault(part.plan, []).append(part)
            else:
                part = self.new_receipt(use, plan=plan, plan_uses=plan_uses)
                parts.setdefault(plan, []).append(part)
            ids.add(part.id)
        return parts

    def covering(self, uses: Sequence[PlannedUse]) -> Receipt | None:
        """Returns a charge that was reserved for all uses whose names begin with its own."""
        names = [use.key for use in uses if use.key]
        for part in self._reserved.values():
            if part.kind == "steps" and part.key and self._is_own(part.plan):
                if any(name == part.key or name.startswith(f"{part.key}/") for name in names):
                    return part
        return None

    def _is_own(self, plan: str) -> bool:
        """Returns whether a ``with`` block of this thread and this vault runs a plan."""
        # Another vault in this thread has the plan in its ledger, and not in its work.
        return plan in RUNNING.get() and not self._held.keys().isdisjoint(self._holders[plan])

    def reserved_use(self, use: PlannedUse, taken: Collection[str] = ()) -> Receipt | None:
        """Returns the reserved use of this name; without a name, one of a running ``with`` block.

        ``taken`` are ids of reserved uses to leave out. Called within ``turn``.
        """
        if not self._reserved:
            return None
        charge, examples = use.charge, self._examples(use.rows)
        for part in self._reserved.values():
            if use.key is not None and part.key == use.key and part.id not in taken:
                is_other = part.kind != use.kind and "steps" not in (part.kind, use.kind)
                if is_other or not _is_about(part, charge, examples):
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
        running = [
            part
            for part in self._reserved.values()
            if part.id not in taken
            and self._is_own(part.plan)
            and _is_about(part, charge, examples)
        ]
        # A dearer use is only taken where its name is not known before its draw.
        fitting = [part for part in running if part.charge.has_cost_of(charge)]
        return next(iter(fitting or [part for part in running if not part.key]), None)

    def planned_before(self, use: PlannedUse, taken: Collection[str] = ()) -> Receipt | None:
        """Returns an equal use that was given back, and is a part of a plan that still counts.

        It was fixed before the first release of its plan, so that it may still be carried out as a
        part of it, such as by a call that failed between two releases and is repeated.
        """
        charge, examples = use.charge, self._examples(use.rows)
        for part in self._planned.values() if self._given_back else ():
            if part.id not in self._given_back or part.id in taken or part.id in self._replaced:
                continue
            is_own = part.labels.name == self.label_set.name and not part.use
            same = is_own and part.key == (use.key or "") and part.charge.has_cost_of(charge)
            if same and _is_about(part, charge, examples):
                return part
        return None

    def take(self, use: PlannedUse, made_of: tuple[Receipt, ...] = ()) -> TakenUse:
        """Returns a use to charge within this turn: a reserved one, or a new one if it is allowed.

        ``made_of`` are receipts of its public inputs. Raises what ``check`` raises.
        """
        part = self.reserved_use(use)
        before = None if part else self.planned_before(use)
        try:
            inherited = self.check([use], made_of, part or before)
        except BudgetExceededError:
            if before is None:
                raise
            before = None
            inherited = self.check([use], made_of)
        return TakenUse(self, part or before, inherited)

    def leave(self, plans: Sequence[str], holder: str) -> None:
        """Gives back the uses of plans that were not drawn, unless others work on them, too."""
        with self.turn() if self._uses_of(plans) else contextlib.nullcontext():
            self._release(holder)
            for plan in plans:
                self._give_back([] if self._may_run(plan) else self._uses_of([plan]))

    def leave_later(self, plans: Sequence[str], holder: str) -> None:
        """Leaves plans now, or else in the next turn.

        Garbage may be collected at any line of a turn, which writes its own record.
        """
        self._ended.append((plans, holder))
        if self._in_turn != threading.get_ident():
            with self.turn():
                pass

    def give_back(self, key: str | None) -> list[Receipt]:
        """Gives back the reserved uses of this name, or all, of processes that have ended."""
        with self.turn():
            uses = [use for use in self._reserved.values() if key in (None, use.key)]
            for use in uses:
                if any(self._is_held(name) for name in self._holders[use.plan]):
                    raise LabelStoreError(
                        f"expected reservations of processes that have ended, got {use.key!r} of a "
                        "running one. Wait for it, or stop it."
                    )
            self._give_back(uses)
        return uses

    def _follow(self, fields: dict[str, Any], made_of: tuple[Receipt, ...]) -> None:
        """Follows a record of a reservation."""
        self.num_reservations += 1
        plan = fields["plan"]
        if "holder" in fields:
            self._holders.setdefault(plan, []).append(fields["holder"])
        for use in made_of:
            if use.plan == plan:
                self._reserved[use.id] = use
            else:
                self._inputs.setdefault(plan, []).append(use)
        given_back = fields.get("given_back", ())
        if made_of:
            self._replaced.update(given_back)
        self._plan(made_of, given_back)
        for name in given_back:
            self._reserved.pop(name, None)

    def _plan(self, receipts: Iterable[Receipt], given_back: Iterable[str] = ()) -> None:
        """Counts receipts in the filter, and takes back the undrawn uses of a plan.

        A use leaves no trace if nothing was drawn of its plan, and nothing that came later: what a
        later use may cost has followed from it. A use that was given back may be reserved again.
        """
        receipts = list(receipts)
        if again := self._given_back & {receipt.id for receipt in receipts}:
            self._given_back -= again
            self._chains = UseChains().add(self._planned.values(), self._given_back)
        for receipt in receipts:
            name = f"{receipt.id} {receipt.charge.event_text}"
            planned = self._planned.setdefault(name, receipt)
            if planned is receipt:
                self._chains.add([receipt])
            elif planned.examples is None and planned.labels.size < receipt.labels.size:
                # It was drawn for labels that came after it was reserved, too.
                self._planned[name] = receipt
                self._chains = UseChains().add(self._planned.values(), self._given_back)
        if not (names := set(given_back)):
            return
        self._given_back |= names
        places = {receipt.id: place for place, receipt in enumerate(self._planned.values())}
        plans = {receipt.plan for receipt in self._planned.values() if receipt.id in names}
        drawn = [each for each in self._planned.values() if each.id in self._counted]
        for plan in plans:
            uses = [each for each in self._planned.values() if each.plan == plan]
            first = min(places[use.id] for use in uses)
            if not any(each.plan == plan or places[each.id] > first for each in drawn):
                gone = {use.id for use in uses if use.id in self._given_back}
                if len(gone) == len(uses):
                    inputs = self._inputs.get(plan, ())
                    gone |= {use.id for use in inputs if use.id not in self._counted}
                self._planned = {
                    name: each for name, each in self._planned.items() if each.id not in gone
                }
        self._chains = UseChains().add(self._planned.values(), self._given_back)

    def _end_reservations(self) -> None:
        """Gives back the uses without a name of processes that have ended; called in ``turn``."""
        if self._store is not None and self._store.is_forgotten and self._reserved:
            self._plan((), list(self._reserved))
            self._reserved.clear()
        unnamed = [use for use in self._reserved.values() if not use.key]
        self._give_back([use for use in unnamed if not self._may_run(use.plan)])

    def _give_back(self, uses: Sequence[Receipt]) -> None:
        for plan in dict.fromkeys(use.plan for use in uses):
            names = [use.id for use in uses if use.plan == plan]
            self.keep(reservation={"plan": plan, "given_back": names})

    def _uses_of(self, plans: Collection[str]) -> list[Receipt]:
        return [use for use in self._reserved.values() if use.plan in plans]

    def _may_run(self, plan: str) -> bool:
        """Returns whether a running process may work on a plan."""
        return any(self._is_held(holder) is not False for holder in self._holders[plan])

    def _is_held(self, holder: str) -> bool | None:
        if self._store is None or holder in self._held:
            return holder in self._held
        return self._store.is_held(holder)

    def _release(self, holder: str) -> None:
        """Frees an own lock."""
        if holder not in self._held:
            return
        lock = self._held.pop(holder)
        if lock is not None:
            lock.release()
        if self._store is not None:
            self._store.remove_holder(holder)

    def _with_reserved(self, without: Receipt | None = None) -> Composition:
        """Returns the composition of all uses and of all that is reserved, except for one use."""
        open_uses: list[Receipt] = []
        for ledger in (self, *self._others.values()):
            plans = dict.fromkeys(use.plan for use in ledger._reserved.values())
            inputs = [use for plan in plans for use in ledger._inputs.get(plan, ())]
            open_uses += [*inputs, *ledger._reserved.values()]
        own = dataclasses.replace(self.label_set, stored=False)
        new = self._not_counted([use for use in open_uses if use is not without], own)
        return self._composition.with_receipts(new) if new else self._composition

    def unused(self, charge: Charge, rows: np.ndarray) -> dict[tuple[str, int], int]:
        """Returns the unused uses of this charge of each plan, by its name and number of uses."""
        whole = rows.size == self.label_set.size
        charged: Counter[tuple[str, int]] = Counter()
        for receipt in self._counted.values():
            if receipt.plan_uses == 1 or receipt.labels.name != self.label_set.name:
                continue
            if receipt.charge.has_cost_of(charge) and (receipt.examples is None) == whole:
                if whole or np.array_equal(np.asarray(receipt.examples), rows):
                    charged[receipt.plan, receipt.plan_uses] += 1
        return {plan: plan[1] - number for plan, number in charged.items() if plan[1] > number}

    def _with_notes(self, charge: Charge) -> Charge:
        notes = dict.fromkeys((*charge.assumptions, *self.notes))
        return charge.with_assumptions(notes) if self.notes else charge

    def _not_counted(self, receipts: Iterable[Receipt], labels: LabelSet) -> list[Receipt]:
        merged = Receipts.merged(receipts)
        for receipt in merged:
            receipt.agreed(self._counted.get(receipt.id))
        return [
            receipt
            for receipt in merged
            if receipt.id not in self._counted and may_count(labels, receipt)
        ]

    def raise_budget(self, budget: PrivacyBudget, reason: str) -> None:
        """Raises the budget, and keeps the reason in the ledger."""
        with self.turn():
            old = self.budget
            if not _covers(budget, old) or budget == old:
                raise ValueError(
                    f"the budget can only be raised: it is {old}, got {budget}. To spend less, "
                    "stop earlier; remaining() returns the rest."
                )
            self.keep(budget=budget, reason=reason, time=Receipt.timestamp(), actor=self._actor)

    def check(
        self,
        planned: Sequence[PlannedUse],
        made_of: Iterable[Receipt] = (),
        part: Receipt | None = None,
        plan: UseInPlan | None = None,
    ) -> list[Receipt]:
        """Raises if the budget does not allow planned uses; returns receipts to count with them.

        The uses have the same rows. The receipts are those among ``made_of`` that may be about the
        labels, and are not counted yet, with those of the plan of ``part``, the reserved use that
        the planned one is. The filter counts several planned uses as one plan, as ``reserve`` does,
        and one use as ``plan``.
        """
        reserved = () if part is None else self._inputs.get(part.plan, ())
        inherited = self._checked_inputs([*made_of, *reserved])
        composition = self._with_reserved(part)
        if inherited:
            composition = composition.with_receipts(inherited)
            self._check(composition, None, [], inherited)
        if planned:
            rows = planned[0].rows
            some = rows if rows.size != self.label_set.size else None
            together = "together" if len(planned) > 1 else ""
            counted = [UseInPlan(use.charge, together) for use in planned]
            without = None
            same_cost = part is not None and part.charge.has_cost_of(planned[0].charge)
            is_reserved = part is not None and part.id not in self._given_back
            if same_cost and is_reserved and not self._has_grown(part):
                counted = []  # A reserved use is counted already.
            elif part is not None:
                counted = [UseInPlan(use.charge, part.plan) for use in planned]
                without = part
            elif plan is not None:
                counted = [plan]
            self._check(composition, some, planned, inherited, (), counted, without)
        return inherited

    def _has_grown(self, part: Receipt | None) -> bool:
        """Returns whether labels came after a use of all labels was reserved."""
        return part is not None and part.examples is None and part.labels.size < self.label_set.size

    def check_plan(
        self, uses: Sequence[Receipt], made_of: Iterable[Receipt], without: Receipt | None = None
    ) -> list[Receipt]:
        """Raises if the budget does not allow uses together; returns receipts as ``check`` does.

        They take the place of the reserved use ``without``.
        """
        if not uses:
            return []
        inherited = self._checked_inputs(made_of)
        composition = self._with_reserved(without).with_receipts(inherited)
        if inherited:
            self._check(composition, None, [], inherited, without=without)
        composition = composition.with_receipts(uses)
        rows = None
        if all(use.examples is not None for use in uses):
            rows = np.unique(np.concatenate([np.asarray(use.examples) for use in uses]))
        self._check(composition, rows, [], inherited, uses, without=without)
        return inherited

    def _checked_inputs(self, made_of: Iterable[Receipt]) -> list[Receipt]:
        inherited = self._not_counted(made_of, self.label_set)
        priced = [use for use in inherited if use.kind not in ("declared", "unknown")]
        by_label = [use for use in priced if use.unit != "user"]
        if by_label and self.users is not None:
            raise ValueError(
                "expected inputs whose cost is for all labels of one user, got one whose cost is "
                f"by label ({by_label[0].what}). Make its vault with users=, too, or give both "
                "vaults different people=."
            )
        return inherited

    def _check(
        self,
        composition: Composition,
        rows: np.ndarray | None,
        planned: Sequence[PlannedUse],
        inherited: Sequence[Receipt],
        reserved: Sequence[Receipt] = (),
        counted: Sequence[UseInPlan] = (),
        without: Receipt | None = None,
    ) -> None:
        """Raises if the budget does not allow planned uses.

        ``inherited`` and ``reserved`` are in the composition: receipts of inputs, and of the uses
        to reserve. ``counted`` are the planned uses as the filter counts them; it leaves out
        ``without``.
        """
        charges = [use.charge for use in planned]
        after = PrivacyGuarantee(0.0)
        for history in composition.histories(self.label_set, rows):
            after = self._composed(history, charges)
            if not self.budget.allows(after):
                break
        else:
            more = [*inherited, *reserved]
            is_free = not more and all(charge.epsilon == 0.0 for charge in charges)
            filters = () if is_free else self._filters(rows, counted, more, without)
            if all(each.allows for each in filters):
                return
        names = [f"{receipt.what} (of an input)" for receipt in inherited]
        names += [receipt.what for receipt in reserved]
        what = " and ".join(dict.fromkeys([*names, *(use.what for use in planned)]))
        deltas = [use.charge.delta for use in planned]
        deltas += [receipt.charge.delta for receipt in (*inherited, *reserved)]
        largest = max(deltas, default=0.0)
        budget = self.budget
        if budget.delta == 0.0 and largest > 0.0:
            raise BudgetExceededError(
                f"{what} needs a delta above zero, at least {largest:g}, and the budget has none. "
                f"Nothing was drawn. Set PrivacyBudget({budget.epsilon:g}, delta=...) below 1/n = "
                f"{1 / max(1, self.label_set.size):.2g}, or use Laplace noise, which needs none."
            )
        before = self._composition.histories(self.label_set, rows)
        spent = max(self._composed(history).epsilon for history in before)
        held = self._with_reserved().histories(self.label_set, rows)
        held_epsilon = max(self._composed(history).epsilon for history in held)
        advice = (
            "Take fewer steps, a smaller epsilon, more noise or other examples, or give draws a "
            "key and reuse them; remaining() returns the rest."
        )
        if not planned and not reserved:
            advice = (
                "The receipts of an input count, unless both label sets have stores or people= "
                "declares different populations. Raise the budget, or use an input that was made "
                "without these labels."
            )
        has = f"have spent epsilon={spent:g}"
        if held_epsilon > spent:
            has += f", or epsilon={held_epsilon:g} with what is reserved"
            advice = f"{advice} A reservation of an ended process: tf-labeldp give-back."
        together = f"epsilon={after.epsilon:g} at delta={after.delta:g}"
        if budget.allows(after):
            advice = f"{_RESERVE} {advice}"
            together += (
                " if they were fixed in advance, but over what earlier uses leave of the budget "
                f"{budget} for one that is chosen after them, by {self._filter_names(rows)}"
            )
        else:
            together += f", over the budget {budget}"
        raise BudgetExceededError(
            f"{what} would be charged to examples that {has}: together {together}. "
            f"Nothing was drawn. {advice}"
        )

    def _filters(
        self,
        rows: np.ndarray | None,
        planned: Sequence[UseInPlan] = (),
        inherited: Sequence[Receipt] = (),
        without: Receipt | None = None,
    ) -> list[PrivacyFilter]:
        """Returns the rest of the budget after planned uses, for each distinct history."""
        chains = self._chains
        again = self._given_back & {receipt.id for receipt in inherited}
        if again or without is not None:
            planned_uses = self._planned.values()
            others = [each for each in planned_uses if without is None or each.id != without.id]
            chains = UseChains().add(others, self._given_back - again)
        chains = chains.with_receipts(inherited)
        return chains.filters(self.budget, self.label_set, rows, planned)

    def _filter_names(self, rows: np.ndarray | None) -> str:
        names = dict.fromkeys(name for each in self._filters(rows) for name in each.names)
        return ", or by ".join(names) or "any privacy filter: they leave nothing"

    def remaining(self, rows: np.ndarray | None = None) -> float:
        """Returns the largest epsilon of one more pure-DP use of these examples; None for all."""
        with self.turn():
            histories = self._with_reserved().histories(self.label_set, rows)
            filters = set(self._filters(rows))
        budget = self.budget
        low, high = 0.0, min((each.remaining() for each in filters), default=budget.epsilon)
        if high <= 1e-9 * budget.epsilon:
            return 0.0

        def fits(epsilon: float) -> bool:
            use = Charge(epsilon, 0.0, EventFields.randomized_response(epsilon))
            return all(budget.allows(self._composed(history, [use])) for history in histories)

        # The composition of uses that were fixed in advance is larger by rounding at most.
        if fits(high):
            return high
        while high - low > 1e-4 * high and high > 1e-6:
            middle = 0.5 * (low + high)
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def spread(self) -> list[tuple[float, int]]:
        """Returns each spent epsilon, rising, with the number of examples that spent it."""
        with self.turn():
            spread = list(self._composition.spread(self.label_set))
        counts: Counter[float] = Counter()
        for histories, count in spread:
            counts[max(self._composed(history).epsilon for history in histories)] += count
        return sorted(counts.items())

    def history(self) -> UseHistory:
        """Returns the uses in order; equal steps in a row share a line.

        What is reserved comes last. It is in the epsilon of its line, and not in that so far.
        """
        return UseHistory(use for use, _ in self.lines())

    def lines(self) -> list[tuple[Use, str]]:
        """Returns the lines of the history, each with its use in the words of a page."""
        with self.turn():
            records = [record for record in self.records if record.receipt or record.budget]
            reserved = list(self._reserved.values())
        # Receipts of other vaults for the same use would repeat its line.
        receipts = [record.receipt for record in records if record.receipt is not None]
        own = {
            (u.use, u.charge.event_text) for u in receipts if u.labels.name == self.label_set.name
        }
        repeated = {
            use.id
            for use in receipts
            if use.labels.name != self.label_set.name
            and use.use
            and (use.use, use.charge.event_text) in own
        }
        records = [r for r in records if r.receipt is None or r.receipt.id not in repeated]
        lines: list[tuple[Use, str]] = []
        so_far = Composition(own=self.label_set.name)
        delta = self.budget.delta
        for _, equal in itertools.groupby(records, _line_of):
            first, *more = equal
            receipts = [record.receipt for record in (first, *more) if record.receipt is not None]
            for receipt in receipts:
                so_far.add(receipt)
            spent = so_far.guarantee(delta).epsilon
            use = first.receipt
            if use is None:
                what = f"budget raised to {first.budget}: {first.reason}"
                lines.append((Use(first.time, what, 0, 0.0, spent, first.actor, ""), what))
                continue
            alone = Composition(receipts).guarantee(delta).epsilon
            words = Mechanism.in_words(use.what)
            what, on_page = (
                use.line(self.label_set, len(receipts), text) for text in (None, words)
            )
            key, size = "" if more else use.name, use.num_examples
            lines.append((Use(use.time, what, size, alone, spent, use.actor, key), on_page))
        spent = so_far.guarantee(delta).epsilon
        for use in reserved:
            alone = Composition([use]).guarantee(delta).epsilon
            what, size = f"{use.what}, reserved", use.num_examples
            on_page = f"{Mechanism.in_words(use.what)}, reserved"
            lines.append((Use(use.time, what, size, alone, spent, use.actor, use.key), on_page))
        return lines

    def _composed(
        self, history: tuple[tuple[Charge, int], ...], more: Sequence[Charge] = ()
    ) -> PrivacyGuarantee:
        counts = Counter(dict(history))
        counts.update(more)
        return Charge.composed(tuple(counts.items()), self.budget.delta)


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


def _covers(budget: PrivacyBudget, other: PrivacyBudget) -> bool:
    return budget.epsilon >= other.epsilon and budget.delta >= other.delta


def _line_of(record: Record) -> Any:
    # Equal steps in a row share a line of the history.
    use = record.receipt
    if use is None or use.kind != "steps":
        return record.number
    return use.what, use.charge, use.labels.name, use.actor, use.num_examples


def _is_about(use: Receipt, charge: Charge, examples: np.ndarray | None) -> bool:
    """Returns whether a reserved use has these examples or more, and costs as much or more."""
    slack = 1.0 + _ROUNDING
    dearer = charge.epsilon > use.charge.epsilon * slack or charge.delta > use.charge.delta * slack
    if dearer and not charge.has_cost_of(use.charge):
        return False
    if use.examples is None or examples is None:
        return use.examples is None
    return bool(np.isin(examples, np.asarray(use.examples)).all())
