"""The ledger of a vault: what has left it, what that cost, and what its budget still allows."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pathlib
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tf_labeldp.accounting import BudgetExceededError, Charge, PrivacyBudget, PrivacyGuarantee
from tf_labeldp.accounting._budget import CountedCharges, compose_counted
from tf_labeldp.accounting._events import pure_dp_event
from tf_labeldp.accounting._public_input import note_digests
from tf_labeldp.accounting._receipts import (
    Composition,
    LabelSet,
    Receipt,
    Receipts,
    actor_name,
    merge_receipts,
    timestamp,
)
from tf_labeldp.vault._label_kinds import LabelKind
from tf_labeldp.vault._model_history import LEDGERS
from tf_labeldp.vault._project import Project
from tf_labeldp.vault._records import DrawSettingsError, Record, may_count
from tf_labeldp.vault._store import LabelStore

UNNAMED = "unnamed-"
"""Begins the names of draws without a key."""
_CAME_ALONG = (
    "A history that comes with a model counts as that of these labels, unless both have stores, or "
    "people= declares that they are of different people. Raise the budget, take a model that has "
    "not seen these labels, or declare the people."
)


class Use(NamedTuple):
    """One line of ``PrivateLabels.history()``.

    Attributes:
        time: when, in UTC; empty for uses of version 0.1.
        what: the use, or the change of the budget, in words.
        examples: number of examples touched.
        epsilon: of this use alone; ``epsilon_so_far`` of all up to it, at the delta of the budget.
        actor: who.
        key: the name of the use.
    """

    time: str
    what: str
    examples: int
    epsilon: float
    epsilon_so_far: float
    actor: str
    key: str


class History(tuple[Use, ...]):
    """The uses of a vault, in order: prints as a table, and is one for ``pandas.DataFrame``.

    Example:
        >>> print(History([Use("2026-01-01T00:00:00", "a draw", 10, 0.5, 0.5, "me", "first")]))
        when                 examples   epsilon    so far  who  what
        2026-01-01T00:00:00        10       0.5       0.5  me   a draw (first)
    """

    __slots__ = ()

    def __str__(self) -> str:
        """Returns the table."""
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
    """The records of one vault, in memory or in a store, and its budget.

    A new store writes a salted digest of the labels; ``budget=None`` takes that of the store, or of
    its project. ``Ledger.of_store`` reads that of a store without its labels.
    """

    budget: PrivacyBudget
    label_set: LabelSet
    _project: Project | None

    def __init__(
        self,
        labels: np.ndarray,
        kind: LabelKind,
        people: str | None,
        budget: PrivacyBudget | None,
        store: LabelStore | None,
        actor: str | None,
    ) -> None:
        self._begin(store, len(labels), kind.unit, actor)
        if store is None and budget is not None:
            self.label_set, self.budget = LabelSet.new(len(labels), people), budget
        elif store is not None:
            with store.locked():
                header = kind.header()
                if store.in_project:
                    self._project = Project(store.path, is_new=not store.exists())
                    header["project"] = self._project.name
                first = budget if store.exists() else self._first_budget(budget)
                self.label_set, self.budget = store.open(labels, header, people, first)
                if self._project is not None:
                    self._project.join(self.label_set.name)
                self._read_new_records()
                self._take_over()
                self._check_kept_budget(budget)
                for digests, receipts in self.weights():
                    note_digests(digests, receipts)
            LEDGERS[self.label_set.name] = _Weights(self, store.path)

    @classmethod
    def of_store(
        cls, path: str | os.PathLike[str], *, alone: bool = False, read_only: bool = True
    ) -> Ledger:
        """Returns the ledger of a store without its labels: to be read, unless it is said.

        It counts the other stores of a project unless ``alone``.

        Raises:
            LabelStoreError: no store, a damaged one, or one that lacks what was spent elsewhere.
        """
        store, ledger = LabelStore(path, read_only=read_only), object.__new__(cls)
        label_set, budget = store.look()
        ledger._begin(store, label_set.size, "label", None)
        ledger.label_set, ledger.budget = label_set, budget
        if store.in_project and not alone:
            ledger._project = Project(store.path, is_new=False)
        with ledger.turn():
            return ledger

    def _begin(self, store: LabelStore | None, size: int, unit: str, actor: str | None) -> None:
        self.records: list[Record] = []
        self.draws: dict[str, Record] = {}
        self._unit, self._store, self._actor = unit, store, actor or actor_name()
        self._composition = Composition()
        self._counted: dict[str, Receipt] = {}  # all receipts by their ids, in order
        self._project = None
        self._beside: dict[pathlib.Path, Ledger] = {}  # of the other stores of a project
        self._taken = 0  # records that the ledger of another store of the project has counted
        self._lock, self._process = threading.RLock(), os.getpid()

    def _first_budget(self, given: PrivacyBudget | None) -> PrivacyBudget:
        """Returns the budget of a new store: that of its project, if this has one."""
        beside = self._ledgers_beside()
        if not beside and given is None:
            raise ValueError(
                f"budget is missing, and there is no store in {self._where()} that keeps one. "
                "Write budget=PrivacyBudget(epsilon=1.0), or check the path."
            )
        if not beside:
            return given  # type: ignore[return-value]
        kept = max((one.budget for one in beside), key=lambda one: (one.epsilon, one.delta))
        if given not in (None, kept):
            raise DrawSettingsError(
                f"the stores of this project share the budget {kept}, and {given} was given. Leave "
                "budget out, and raise it with labels.raise_budget(budget, reason=...) if need be."
            )
        return kept

    def _where(self) -> pathlib.Path | None:
        return None if self._store is None else self._store.path

    def _ledgers_beside(self) -> list[Ledger]:
        """Returns the ledgers of the other stores of the project, as they are now."""
        if self._project is None:
            return []
        for path in self._project.stores():
            if path not in self._beside or self._beside[path]._is_of_0_2():
                self._beside[path] = Ledger.of_store(path, alone=True)
        return list(self._beside.values())

    def _is_of_0_2(self) -> bool:
        """Returns whether this is of a store of version 0.2, of which no new records are read."""
        return self._store is not None and self._store.is_of_0_2

    def _take_over(self) -> None:
        """Counts what the rest of the project has spent since the last turn."""
        own = dataclasses.replace(self.label_set, stored=False)  # may be of the same people
        for beside in self._ledgers_beside():
            with beside.turn():
                new = beside.records[beside._taken :]
            for receipt in self.not_adopted([one.receipt for one in new if one.receipt], own):
                self.keep(receipt=receipt)
            raised = [one for one in new if one.budget is not None]
            if raised and beside.budget != self.budget and _covers(beside.budget, self.budget):
                one = raised[-1]
                self.keep(budget=one.budget, reason=one.reason, time=one.time, actor=one.actor)
            beside._taken += len(new)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Lets one thread and one process at a time look at the records and add to them."""
        if self._store is None:
            if os.getpid() != self._process:
                raise RuntimeError(
                    "this process was forked from the one that made the PrivateLabels, and neither "
                    "would know what the other draws. Give the vault a store, "
                    "PrivateLabels(..., store=path), which they then share."
                )
            with self._lock:
                yield
            return
        if os.getpid() != self._process:  # locks of a parent's threads are none of ours
            self._lock, self._process = threading.RLock(), os.getpid()
        with self._lock, self._store.locked():
            self._read_new_records()
            self._take_over()
            yield

    def keep(self, **content: Any) -> Record:
        """Makes a record (``Record.of``) of this content, writes it to the store and returns it."""
        record = Record.of(len(self.records), **content)
        if self._store is None or self._store.read_only:
            self._remember(record)
        else:  # and is read back: what is interrupted here is read by the next call
            self._store.append(record)
            self._read_new_records()
        return record

    def rows(self, indices: Any, among: np.ndarray | None = None) -> np.ndarray:
        """Returns the examples that indices or a mask name, ``int64`` (m,), or raises.

        ``among`` are the examples that they count from; None for all.
        """
        n = self.label_set.size if among is None else among.size
        if indices is None:
            return np.arange(n) if among is None else among
        rows = self.checked_rows(indices, n)
        return rows if among is None else among[rows]

    @staticmethod
    def checked_rows(indices: Any, n: int) -> np.ndarray:
        """Returns the places in 0..n-1 that indices or a mask name, ``int64`` (m,), or raises."""
        rows = np.asarray(indices)
        if rows.dtype == bool and rows.shape == (n,):
            return np.flatnonzero(rows)
        if rows.ndim != 1 or (rows.size and not np.issubdtype(rows.dtype, np.integer)):
            raise ValueError(
                f"indices must be integers of shape (m,) or a boolean mask of shape ({n},), got "
                f"dtype {rows.dtype} and shape {rows.shape}."
            )
        rows = rows.astype(np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= n):
            raise ValueError(
                f"indices must lie in 0..{n - 1}, got values from {rows.min()} to {rows.max()}."
            )
        if np.unique(rows).size != rows.size:
            raise ValueError(
                "indices name an example more than once. A label is drawn once per draw; call "
                "randomize again for a second draw, which is charged again."
            )
        return rows

    def receipt(
        self, charge: Charge, what: str, kind: str, key: str, rows: np.ndarray, **flags: Any
    ) -> Receipt:
        """Returns a new receipt for a use of these examples."""
        n = self.label_set.size
        if flags.get("unit") != "user":  # who counts users has fewer units than labels
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
        """Returns the receipts of all records."""
        with self.turn():
            return tuple(self._counted.values())

    def guarantee(self, planned: Sequence[Receipt], delta: float | None) -> PrivacyGuarantee:
        """Returns the statement of all receipts, and of those that are planned."""
        with self.turn():
            composition = self._composition
            if planned:
                composition = composition.with_receipts(planned)
            return composition.guarantee(self.budget.delta if delta is None else delta)

    def keep_weights(self, digests: Sequence[bytes], receipts: Receipts) -> None:
        """Writes to the store which weights were made of these receipts."""
        if self._store is not None:
            with self.turn():
                self.keep(weights=tuple(one.hex() for one in digests), made_of=tuple(receipts))

    def weights(self) -> list[tuple[list[bytes], Receipts]]:
        """Returns digests of weights of models, and the receipts that they were made of."""
        return [
            ([bytes.fromhex(digest) for digest in one.weights], one.made_of)
            for one in self.records
            if one.weights
        ]

    def not_adopted(
        self, receipts: Iterable[Receipt], label_set: LabelSet | None = None
    ) -> list[Receipt]:
        """Returns the receipts that may be of these labels, and that are not counted here yet."""
        labels = label_set or self.label_set
        return [
            one
            for one in merge_receipts(receipts)
            if one.id not in self._counted and may_count(labels, one)
        ]

    def raise_budget(self, budget: PrivacyBudget, reason: str) -> None:
        """Records a larger budget."""
        with self.turn():
            old = self.budget
            if not _covers(budget, old) or budget == old:
                raise ValueError(
                    f"the budget can only be raised: it is {old}, got {budget}. To spend less, "
                    "stop earlier; `remaining()` says what is left."
                )
            self.keep(budget=budget, reason=reason, time=timestamp(), actor=self._actor)

    def check(
        self,
        rows: np.ndarray,
        planned: Sequence[tuple[str, Charge]],
        came_along: Sequence[Receipt] = (),
    ) -> None:
        """Raises if the budget does not allow what is planned, and what comes along with it."""
        charges = [charge for _, charge in planned]
        some = None if rows.size == self.label_set.size else rows
        composition = self._composition
        if came_along:
            composition = composition.with_receipts(came_along)
        for history in composition.histories(self.label_set, some):
            after = self._composed(history, charges)
            if not self.budget.allows(after):
                before = self._composition.histories(self.label_set, some)
                spent = max(self._composed(one).epsilon for one in before)
                raise self._exceeded(planned, came_along, spent, after)

    def _exceeded(
        self,
        planned: Sequence[tuple[str, Charge]],
        came_along: Sequence[Receipt],
        spent: float,
        after: PrivacyGuarantee,
    ) -> BudgetExceededError:
        """Returns the error of uses that examples which have ``spent`` this much can't bear."""
        several = [f"{one.what}, which came along," for one in came_along]
        what = " and ".join(dict.fromkeys([*several, *(words for words, _ in planned)]))
        deltas = [one.delta for _, one in planned] + [one.charge.delta for one in came_along]
        budget = self.budget
        if budget.delta == 0.0 and max(deltas, default=0.0) > 0.0:
            return BudgetExceededError(
                f"{what} needs a delta above zero (its own is {max(deltas):g}), and the vault's "
                f"budget has none. Nothing was drawn. Give PrivacyBudget({budget.epsilon:g}, "
                f"delta=...) at least that, below 1/n = {1 / max(1, self.label_set.size):.2g}; or "
                "use Laplace noise, which needs none."
            )
        return BudgetExceededError(
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
            one = Charge(epsilon, 0.0, pure_dp_event(epsilon))
            return all(budget.allows(self._composed(history, [one])) for history in histories)

        spent = max((self._composed(one).epsilon for one in histories), default=0.0)
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
        """Returns what examples have spent, rising, and how many of them each."""
        with self.turn():
            spread = list(self._composition.spread(self.label_set))
        found: Counter[float] = Counter()
        for histories, count in spread:
            found[max(self._composed(one).epsilon for one in histories)] += count
        return sorted(found.items())

    def history(self) -> History:
        """Returns the uses in order; like uses that follow each other are one line."""
        with self.turn():
            records = [one for one in self.records if one.receipt or one.budget]
        uses: list[Use] = []
        so_far = Composition()
        delta = self.budget.delta
        for _, like in itertools.groupby(records, _line_of):
            first, *more = like
            receipts = [one.receipt for one in (first, *more) if one.receipt is not None]
            for receipt in receipts:
                so_far.add(receipt)
            spent = so_far.guarantee(delta).epsilon
            one = first.receipt
            if one is None:
                what = f"budget raised to {first.budget}: {first.reason}"
                uses.append(Use(first.time, what, 0, 0.0, spent, first.actor, ""))
                continue
            alone = Composition(receipts).guarantee(delta).epsilon
            what = one.what + (", which failed" if one.kind == "failed" else "")
            what += f", {len(receipts)} times" if more else ""
            what += ", which came along" if one.labels != self.label_set else ""
            key = "" if more or one.key.startswith(UNNAMED) else one.key
            uses.append(Use(one.time, what, one.num_examples, alone, spent, one.actor, key))
        return History(uses)

    def _remember(self, record: Record) -> None:
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

    def _read_new_records(self) -> None:
        if self._store is not None:
            for record in self._store.new_records():
                self._remember(record)

    def _check_kept_budget(self, given: PrivacyBudget | None) -> None:
        """Raises if the budget that a store keeps is another, or was passed."""
        if given is not None and given != self.budget:
            raise DrawSettingsError(
                f"the store keeps the budget {self.budget}, and {given} was given. Leave budget "
                "out to open it, and raise it with labels.raise_budget(budget, reason=...) if need "
                "be."
            )
        if given is None:  # what engines have released may have passed it, and is in the statement
            return
        for history in self._composition.histories(self.label_set):
            spent = self._composed(history)
            if not self.budget.allows(spent):
                raise BudgetExceededError(
                    f"the store has spent epsilon={spent.epsilon:g} at delta={spent.delta:g} on "
                    f"some labels, over the budget {self.budget} given now. Open it with a larger "
                    "budget."
                )

    def _composed(self, history: CountedCharges, more: Sequence[Charge] = ()) -> PrivacyGuarantee:
        counts = dict(history)
        for charge in more:
            counts[charge] = counts.get(charge, 0) + 1
        return compose_counted(tuple(counts.items()), self.budget.delta)


def forget(path: str | os.PathLike[str], *, actor: str | None = None) -> list[str]:
    """Erases what a store holds of its labels, and keeps the account of what was spent.

    The salted digest of the labels, the key of keyed draws, all draws, and what the store knew of
    weights are removed; the receipts stay, for ``report``, and in a project they go on counting. No
    label can be drawn any more. What was published stays published; backups, and blocks that a disk
    has not yet overwritten, are beyond a program.

    Args:
        path: of the store.
        actor: who asks for it; None for ``LABELDP_ACTOR``, or the name of the login.

    Returns:
        The names of files in the folder that are none of the store's, and are still there.

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
    Ledger.of_store(path)  # raises for what is no store, or not whole
    store = LabelStore(path)
    with store.locked():
        ledger = Ledger.of_store(path)
        releases = [one.release for one in ledger.records if one.release is not None]
        sums = [one["sums"] for one in releases if "sums" in one]
        return store.forget(sums, timestamp(), actor or actor_name())


class _Weights:
    """Keeps weights in the store of a vault, also when the vault is gone: an export comes later."""

    def __init__(self, ledger: Ledger, path: pathlib.Path) -> None:
        self._ledger, self._path, self._name = weakref.ref(ledger), path, ledger.label_set.name

    def keep_weights(self, digests: Sequence[bytes], receipts: Receipts) -> None:
        """Writes to the store which weights were made of these receipts."""
        ledger = self._ledger() or Ledger.of_store(self._path, read_only=False)
        if ledger.label_set.name == self._name:
            ledger.keep_weights(digests, receipts)


def _covers(budget: PrivacyBudget, other: PrivacyBudget) -> bool:
    """Returns whether a budget allows what another one does."""
    return budget.epsilon >= other.epsilon and budget.delta >= other.delta


def _advice(planned: Sequence[tuple[str, Charge]]) -> str:
    """Returns what to do about a budget that does not suffice."""
    if not planned:
        return _CAME_ALONG
    if any(hasattr(charge.event, "count") for _, charge in planned):
        return (
            "Take fewer steps, or more noise (accounting.calibrate_noise_multiplier finds it for a "
            "target epsilon); remaining() says what is left."
        )
    return (
        "Draw for other examples, use a smaller epsilon, or give draws a key and reuse them; "
        "remaining() says what is left."
    )


def _line_of(record: Record) -> Any:
    """Returns what is the same for records that are one line of a history: like steps."""
    one = record.receipt
    if one is None or one.kind != "steps":
        return record.number
    return one.what, one.charge, one.labels, one.actor, one.num_examples
