"""Receipts: what left a set of labels, and what any number of them add up to.

``compose_receipts`` is the one function that turns receipts into a statement, for a vault as for a
model; a use of labels of which nothing is known has a receipt too, with an infinite charge.
"""

from __future__ import annotations

import base64
import copy
import dataclasses
import datetime
import getpass
import hashlib
import itertools
import json
import math
import os
import secrets
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._version import __version__
from tf_labeldp.accounting._annotations import Setting
from tf_labeldp.accounting._budget import Charge, CountedCharges, compose_counted
from tf_labeldp.accounting._events import (
    approximate_dp_event,
    event_from_json,
    event_to_json,
    pure_dp_event,
)
from tf_labeldp.accounting._guarantee import (
    RELATION_REPLACE,
    UNIT_LABEL,
    Assumption,
    PrivacyGuarantee,
)

FORMAT = 2
"""Of receipts in files. A newer one is refused, not guessed; format 1, of 0.2, is read."""

UNITS = {
    "label": UNIT_LABEL,
    "row": "the whole row of labels of one training example",
    "user": "all labels of one user",
}
_FEATURES = {
    False: Assumption(
        "public-features", "holder", "The features are public, and each person has one example."
    ),
    True: Assumption(
        "public-features", "holder", "The features and the user of each example are public."
    ),
}
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
_REPORTED = Assumption(
    "metrics-reported",
    "trainer",
    "Nobody sees the training loss and metrics that were reported: they reveal true labels.",
)
_WEIGHTED = Assumption(
    "public-sample-weights", "holder", "The sample weights were made without labels."
)
_BY_LABEL = Assumption(
    "stated-by-label",
    "holder",
    "The statement is by label and not by user, since some uses are counted by label.",
)
_MOST_PAIRS = 1000
"""Combinations of histories of several label sets that are composed one by one."""


class ReceiptError(ValueError):
    """Receipts were refused: damaged, edited, or written by a newer version."""


@dataclasses.dataclass(frozen=True)
class LabelSet:
    """Which labels a receipt is about; it says nothing of them."""

    name: str  # random, so that no two label sets share it
    size: int  # number of labels n
    people: str | None = None  # the population that they are of; None if it was not declared
    stored: bool = False  # whether the name outlives the process, in a store

    @classmethod
    def new(cls, size: int, people: str | None = None, *, stored: bool = False) -> LabelSet:
        """Returns a label set with a name of its own."""
        return cls(secrets.token_hex(16), int(size), people, stored)

    def may_be(self, other: LabelSet) -> bool:
        """Returns whether both may be the same labels, as far as is known.

        Different names that outlive their processes are different sets, and so are populations that
        were declared to be different.
        """
        if self.name == other.name:
            return True
        if self.people is not None and other.people is not None and self.people != other.people:
            return False
        return not (self.stored and other.stored)


def actor_name() -> str:
    """Returns who runs this, from ``LABELDP_ACTOR`` or the name of the login."""
    try:
        return os.environ.get("LABELDP_ACTOR") or getpass.getuser()
    except (OSError, KeyError, ImportError):  # no entry for this user
        return "unknown"


def timestamp() -> str:
    """Returns the time in UTC, as receipts, ledgers and reports write it."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """Which of n examples a receipt is about: a bit for each, compressed.

    ``numpy.asarray`` has their indices, ``int64`` (m,) rising.
    """

    bits: bytes
    total: int  # number of examples n
    size: int  # number of those meant m

    @classmethod
    def of(cls, rows: Any, total: int) -> Examples | None:
        """Returns the examples that indices or a mask name; None if they are all."""
        if rows is None or isinstance(rows, cls):
            return rows
        chosen = np.zeros(total, dtype=bool)
        chosen[np.asarray(rows)] = True
        size = int(np.count_nonzero(chosen))
        if size == total > 0:
            return None
        return cls(zlib.compress(np.packbits(chosen).tobytes(), 9), total, size)

    @classmethod
    def from_text(cls, text: str | None, total: int) -> Examples | None:
        """Returns the examples whose ``text()`` this is."""
        if text is None:
            return None
        found = cls(base64.b64decode(text), total, 0)
        return dataclasses.replace(found, size=int(np.count_nonzero(found.mask())))

    def text(self) -> str:
        """Returns the bits as text."""
        return base64.b64encode(self.bits).decode()

    def mask(self) -> np.ndarray:
        """Returns whether each of all examples is meant, ``bool`` (n,)."""
        packed = np.frombuffer(zlib.decompress(self.bits), np.uint8)
        return np.unpackbits(packed, count=self.total).view(bool)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.flatnonzero(self.mask()).astype(np.int64 if dtype is None else dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Receipt:
    """What one use of a label set was.

    Its kind is ``"draw"`` (noisy labels), ``"release"`` (a noisy statistic), ``"steps"`` (noisy
    gradients), ``"failed"`` (a mechanism that looked and handed nothing out), ``"unknown"`` (labels
    were used, and how is not known) or ``"declared"``.

    Example:
        >>> from tf_labeldp import PrivacyBudget, PrivateLabels, RandomizedResponse
        >>> labels = PrivateLabels([0, 1, 1], num_classes=2, budget=PrivacyBudget(2.0))
        >>> [receipt] = labels.randomize(RandomizedResponse(0.5, 2)).receipts
        >>> receipt.kind, receipt.charge.epsilon, receipt.num_examples
        ('draw', 0.5, 3)
    """

    labels: LabelSet
    charge: Charge
    what: str  # the use in words
    kind: str = "draw"
    key: str = ""  # the name it was asked for by
    examples: Setting[Any] = None  # given as indices or a mask, kept as Examples; None for all
    delta: float = 0.0  # of the vault's budget, at which statements are made
    output_digest: str | None = None  # of what was handed out; None for steps
    unit: str = "label"  # a key of UNITS
    num_units: int | None = None  # where that is not the number of labels
    relation: str = RELATION_REPLACE
    seeded: bool = False  # whether the noise can be repeated
    metrics_reported: bool = False  # whether loss or metrics on true labels were shown
    sample_weights: bool = False  # whether examples were weighted
    answers: tuple[str, ...] = ()  # ids of the "unknown" receipts that a declaration stands for
    time: str = dataclasses.field(default_factory=timestamp)
    actor: str = dataclasses.field(default_factory=actor_name)
    version: str = __version__
    id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(16))  # counts once

    def __post_init__(self) -> None:
        """Compresses the examples."""
        object.__setattr__(self, "examples", Examples.of(self.examples, self.labels.size))

    @property
    def num_examples(self) -> int:
        """The number of examples that it is about."""
        return self.labels.size if self.examples is None else int(self.examples.size)

    def to_json(self) -> dict[str, Any]:
        """Returns the receipt as JSON can hold it, with a digest of all of it."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["labels"] = dataclasses.asdict(self.labels)
        epsilon = self.charge.epsilon
        fields["charge"] = {
            "epsilon": "inf" if math.isinf(epsilon) else epsilon,
            "delta": self.charge.delta,
            "event": event_to_json(self.charge.event),
            "assumptions": [one.to_json() for one in self.charge.assumptions],
        }
        fields["examples"] = None if self.examples is None else self.examples.text()
        fields["answers"] = list(self.answers)
        return {**fields, "digest": _digest(fields)}

    @classmethod
    def from_json(cls, data: Setting[dict[str, Any]]) -> Receipt:
        """Returns the receipt that ``to_json`` wrote; ``ReceiptError`` if it was changed since."""
        try:
            fields = dict(data)
            if fields.pop("digest") != _digest(fields):
                raise ValueError("the digest is of other content")
            charge = dict(fields["charge"])
            charge["epsilon"] = float(charge["epsilon"])
            charge["event"] = event_from_json(charge["event"])
            fields["charge"] = Charge(**charge)
            fields["labels"] = LabelSet(**fields["labels"])
            fields["examples"] = Examples.from_text(fields["examples"], fields["labels"].size)
            fields["answers"] = tuple(fields["answers"])
            return cls(**fields)
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            raise ReceiptError(
                f"a receipt is damaged or was edited ({error}), and what it stands for can't be "
                "counted. Use the file as it was written, or a copy of it."
            ) from error

    def __reduce__(self) -> Any:
        """Pickles through JSON, so that a receipt in a pickle is checked by its digest too."""
        return Receipt.from_json, (self.to_json(),)


Receipts = tuple[Receipt, ...]


def merge_receipts(*several: Iterable[Receipt]) -> Receipts:
    """Returns all receipts, each once, in the order in which they are met."""
    return tuple({one.id: one for one in itertools.chain(*several)}.values())


def declared_receipt(
    unknown: Iterable[Receipt], because: str, epsilon: float = 0.0, delta: float = 0.0
) -> Receipt:
    """Returns the receipt by which an author declares what uses of labels cost."""
    import dp_accounting

    event = approximate_dp_event(epsilon, delta) if epsilon else dp_accounting.NoOpDpEvent()
    return Receipt(
        LabelSet.new(0),
        Charge(
            float(epsilon),
            float(delta),
            event,
            (Assumption("declared", "authors", f"Declared by its author, not checked: {because}"),),
        ),
        what=f"declared: {because}",
        kind="declared",
        delta=delta,
        answers=tuple(one.id for one in unknown),
    )


def receipts_to_bytes(receipts: Iterable[Receipt], **more: Any) -> bytes:
    """Returns receipts as they are kept in files of models, with more that JSON can hold."""
    content = {
        "format": FORMAT,
        "version": __version__,
        **more,
        "receipts": [one.to_json() for one in receipts],
    }
    return zlib.compress(json.dumps(content).encode(), 9)


def receipts_from_bytes(content: bytes) -> tuple[Receipts, dict[str, Any]]:
    """Returns the receipts, and all that ``receipts_to_bytes`` wrote with them."""
    try:
        data = json.loads(zlib.decompress(content))
        found, version, listed = data["format"], data["version"], list(data["receipts"])
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise ReceiptError(
            f"the receipts of this file are damaged ({error}), and what its labels have spent "
            "can't be counted. Use a copy of the file as it was written."
        ) from error
    if found not in (1, FORMAT):
        raise ReceiptError(
            f"the receipts of this file have format {found}, written by tf-labeldp {version}; "
            f"tf-labeldp {__version__} reads format {FORMAT}. Install the newer version to read it."
        )
    return tuple(Receipt.from_json(one) for one in listed), data


class Histories:
    """What each of n examples of one label set has been charged.

    A charge of all examples is counted once. Of the others each different history is a row.
    """

    def __init__(self, size: int) -> None:
        self._of_all: dict[Charge, int] = {}
        self._rows: list[dict[Charge, int]] = [{}]
        self._sizes = [size]  # number of examples of each row; rows of none are free
        self._place: dict[frozenset[tuple[Charge, int]], int] = {frozenset(): 0}
        self._row_of = np.zeros(size, dtype=np.int32)

    def add(self, charge: Charge, examples: Any = None) -> None:
        """Charges these examples, by indices or a mask; None for all."""
        if examples is None:
            self._of_all[charge] = self._of_all.get(charge, 0) + 1
            return
        is_mask = isinstance(examples, Examples) and examples.total == self._row_of.size
        where = examples.mask() if is_mask else np.asarray(examples)
        old_rows = self._row_of[where]
        moved = np.bincount(old_rows, minlength=len(self._rows))
        new_row = np.zeros(len(self._rows), dtype=np.int32)
        for old in np.flatnonzero(moved):  # a handful of different histories, not examples
            counts = self._rows[old] | {charge: self._rows[old].get(charge, 0) + 1}
            new_row[old] = self._row(counts)
            self._sizes[new_row[old]] += int(moved[old])
        self._row_of[where] = new_row[old_rows]
        # Last, so that an interrupt may leave a charge too many and never one too few.
        for old in np.flatnonzero(moved):
            self._sizes[old] -= int(moved[old])
            if self._sizes[old] == 0:
                del self._place[frozenset(self._rows[old].items())]

    def _row(self, counts: dict[Charge, int]) -> int:
        """Returns the row of a history, which may be a new one."""
        history = frozenset(counts.items())
        if history not in self._place:
            if 0 not in self._sizes:
                self._rows.append({})
                self._sizes.append(0)
            self._place[history] = self._sizes.index(0)
            self._rows[self._place[history]] = counts
        return self._place[history]

    def distinct(self, examples: Any = None) -> list[CountedCharges]:
        """Returns the different histories of these examples; None for all."""
        if examples is None:
            return [history for history, _ in self.spread()]
        rows = np.flatnonzero(np.bincount(self._row_of[examples]))
        return [self._history(int(row)) for row in rows]

    def spread(self) -> list[tuple[CountedCharges, int]]:
        """Returns each history that some examples have, and how many have it."""
        return [(self._history(row), size) for row, size in enumerate(self._sizes) if size]

    def _history(self, row: int) -> CountedCharges:
        counts = Counter(self._of_all)
        counts.update(self._rows[row])
        return tuple(counts.items())

    def grow(self, size: int) -> None:
        """Adds examples up to this number, which were charged what all were."""
        if (more := size - self._row_of.size) > 0:
            row = self._row({})
            self._sizes[row] += more
            self._row_of = np.append(self._row_of, np.full(more, row, np.int32))

    def copy(self) -> Histories:
        """Returns histories that can be charged by themselves."""
        found = Histories(0)
        found._of_all, found._place = dict(self._of_all), dict(self._place)
        found._rows, found._sizes = list(self._rows), list(self._sizes)
        found._row_of = self._row_of.copy()
        return found


class Composition:
    """What any number of receipts add up to, at any time, without going through them again.

    Each receipt is counted once, and none in place of which another one stands.

    Guarantee:
        That of ``compose_receipts`` for all receipts that were added.
    """

    def __init__(self, receipts: Iterable[Receipt] = ()) -> None:
        self._receipts: dict[str, Receipt] = {}
        self._answered: set[str] = set()
        self._begin()
        for one in receipts:
            self.add(one)

    def _begin(self) -> None:
        self._histories: dict[str, Histories] = {}  # by the name of the label set
        self._people: dict[str, str | None] = {}
        self._sized: set[str] = set()
        self._units: set[str] = set()
        self._flags: set[str] = set()
        self._endless: set[str] = set()
        self._delta, self._most_labels, self._most_users = 0.0, 0, 0

    def add(self, receipt: Receipt) -> None:
        """Adds a receipt, if it is not there yet."""
        if receipt.id in self._receipts:
            return
        self._receipts[receipt.id] = receipt
        answered = set(receipt.answers) - self._answered
        self._answered |= answered
        if answered & self._receipts.keys():
            self._begin()
            for one in self._receipts.values():
                self._count(one)
        else:
            self._count(receipt)

    def _count(self, receipt: Receipt) -> None:
        if receipt.id in self._answered:
            return
        labels, charge = receipt.labels, receipt.charge
        if labels.name not in self._histories:
            # Without an account of single examples, as of a declaration, all are alike.
            self._histories[labels.name] = Histories(max(1, labels.size))
            self._people[labels.name] = labels.people
        self._histories[labels.name].grow(labels.size)
        self._histories[labels.name].add(charge, receipt.examples)
        if labels.size:
            self._sized.add(labels.name)
        if receipt.kind != "declared":
            self._units.add(receipt.unit)
        for flag in ("sample_weights", "metrics_reported", "seeded"):
            if getattr(receipt, flag):
                self._flags.add(flag)
        if math.isinf(charge.epsilon):
            self._endless.update(charge.assumptions)
        self._delta = max(self._delta, receipt.delta)
        self._most_labels = max(self._most_labels, labels.size)
        self._most_users = max(self._most_users, receipt.num_units or labels.size)

    def with_receipts(self, receipts: Iterable[Receipt]) -> Composition:
        """Returns the composition with more receipts; this one stays as it is."""
        more = tuple(receipts)
        found = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, (dict, set)):
                setattr(found, name, value.copy())
        for name in {one.labels.name for one in more} & found._histories.keys():
            found._histories[name] = found._histories[name].copy()
        for one in more:
            found.add(one)
        return found

    def histories(
        self, labels: LabelSet | None = None, examples: Any = None
    ) -> list[CountedCharges]:
        """Returns what one person may have been charged, in all label sets together.

        ``labels`` and ``examples`` leave those with an example among these, by indices or a mask.
        """
        if labels is None:
            return list(self._combined(self._histories))
        own, others = self._around(labels)
        return list(self._combined(others, own.distinct(examples)))

    def spread(self, labels: LabelSet) -> Iterator[tuple[list[CountedCharges], int]]:
        """Yields the histories that some examples of a label set may have, and their number."""
        own, others = self._around(labels)
        for history, count in own.spread():
            yield list(self._combined(others, [history])), count

    def _around(self, labels: LabelSet) -> tuple[Histories, set[str]]:
        """Returns the histories of a label set, and the others that may be of the same people."""
        others = {
            name
            for name, people in self._people.items()
            if name != labels.name and (None in (people, labels.people) or people == labels.people)
        }
        return self._histories.get(labels.name, Histories(max(1, labels.size))), others

    def _combined(
        self, names: Iterable[str], *own: list[CountedCharges]
    ) -> Iterator[CountedCharges]:
        """Yields what one person may have been charged, in these label sets and with one of own."""
        named = [name for name in self._histories if name in names]
        people = {self._people[name] for name in named}
        for population in people - {None} or {None}:
            # Label sets that may be of the same people.
            same = [name for name in named if self._people[name] in (population, None)]
            yield from _together([*own, *(self._histories[name].distinct() for name in same)])

    def guarantee(self, delta: float | None = None) -> PrivacyGuarantee:
        """Returns the statement; at the delta of the receipts, unless another is given."""
        if not self._histories:
            return PrivacyGuarantee(epsilon=0.0)
        sums = _sums(self.histories(), self._delta, delta)
        worst = max(sums, key=lambda one: (one.epsilon, one.delta))
        units = self._units or {"label"}
        unit = next(iter(units)) if len(units) == 1 else "label"
        # The statement covers every example, so it rests on what any of their sums rests on.
        notes = dict.fromkeys(text for one in sums for text in one.assumptions)
        notes |= dict.fromkeys(self._named_assumptions(unit, by_user="user" in units))
        reasons = [
            text
            for text in notes
            if text in self._endless or text.code == "not-promised"
        ]
        return PrivacyGuarantee(
            worst.epsilon,
            max(one.delta for one in sums),
            unit=UNITS[unit],
            assumptions=tuple(dict.fromkeys([*reasons, *notes])),
            seeded="seeded" in self._flags,
            num_units=(self._most_users if unit == "user" else self._most_labels) or None,
        )

    def _named_assumptions(self, unit: str, *, by_user: bool) -> Iterator[Assumption]:
        """Yields what a statement of any receipts rests on."""
        yield _FEATURES[unit == "user"]
        people = set(self._people.values()) - {None}
        if len(people) > 1:
            names = ", ".join(repr(name) for name in sorted(people, key=str))
            text = f"No person is in more than one of the populations {names}."
            yield Assumption("disjoint-people", "holder", text)
        elif len(self._sized) > 1:
            text = f"Each person has at most one example in each of {len(self._sized)} label sets."
            yield Assumption("one-example-per-set", "holder", text)
        if by_user and unit != "user":
            yield _BY_LABEL
        yield _THROUGH_HERE
        if "sample_weights" in self._flags:
            yield _WEIGHTED
        if "metrics_reported" in self._flags:
            yield _REPORTED
        if "seeded" not in self._flags:
            yield _SECURE_BITS


def compose_receipts(receipts: Iterable[Receipt], delta: float | None = None) -> PrivacyGuarantee:
    """Returns the statement of everything that these receipts are of.

    Guarantee:
        The statement covers all that was handed out under these receipts together, for the
        replacement of one label: a sum of promises made before the draws. Receipts of one label set
        compose in sequence on each example that both touch, and in parallel on different examples
        (``ghazi2021``, Observation 4). Two label sets may hold labels of the same people, in any
        order, so the worst example of one is added to the worst of the other, unless they are
        declared to be of different populations (``people``).
    """
    return Composition(receipts).guarantee(delta)


def histories_with(own: list[CountedCharges], others: Iterable[Receipt]) -> list[CountedCharges]:
    """Returns what one person may have been charged: with one of these, and in other label sets."""
    found = Composition(others)
    return list(found._combined(found._histories, own))


def _sums(
    histories: list[CountedCharges], stated: float, delta: float | None
) -> list[PrivacyGuarantee]:
    """Returns what each history adds up to, at a delta, or at the least one that can be stated."""
    import dp_accounting

    if delta is not None:
        delta = _validate.number_in("delta", delta, "[0, 1)")
        return [compose_counted(history, delta) for history in histories]
    sums = [compose_counted(history, stated) for history in histories]
    if any(math.isinf(one.epsilon) for one in sums):
        # Deltas of which no more is known add up, and may pass that of the budgets.
        opaque = max(
            math.fsum(
                charge.delta * count
                for charge, count in history
                if isinstance(charge.event, dp_accounting.NonPrivateDpEvent)
            )
            for history in histories
        )
        if 0.0 < opaque < 1.0 - stated:
            sums = [compose_counted(history, stated + opaque) for history in histories]
    return sums


def standing(receipts: Receipts) -> Receipts:
    """Returns the receipts without those in place of which another one stands."""
    answered = {name for one in receipts for name in one.answers}
    return tuple(one for one in receipts if one.id not in answered)


def _together(several: list[list[CountedCharges]]) -> Iterator[CountedCharges]:
    """Yields what one person may have been charged who has an example in each label set."""
    if math.prod(len(histories) for histories in several) > _MOST_PAIRS:
        # Each charge as often as anybody was charged with it: more than any combination has.
        several = [[_largest(histories)] for histories in several]
    for combination in itertools.product(*several):
        counts: Counter[Charge] = Counter()
        for history in combination:
            counts.update(dict(history))
        yield tuple(counts.items())


def _largest(histories: list[CountedCharges]) -> CountedCharges:
    """Returns a history that costs no less than any of these, whatever it is composed with."""
    charges = [charge for history in histories for charge, _ in history]
    if charges and all(one.delta == 0.0 and math.isfinite(one.epsilon) for one in charges):
        total = max(math.fsum(one.epsilon * n for one, n in history) for history in histories)
        notes = dict.fromkeys(text for one in charges for text in one.assumptions)
        return ((Charge(total, 0.0, pure_dp_event(total), tuple(notes)), 1),)
    most: Counter[Charge] = Counter()
    for history in histories:
        most |= Counter(dict(history))
    return tuple(most.items())


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
