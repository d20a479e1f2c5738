"""Receipts: what left a set of labels, and what any number of them add up to.

``compose_receipts`` is the one function that turns receipts into a statement, for a vault as for a
model; a use of labels of which nothing is known has a receipt too, with an infinite charge.
"""

from __future__ import annotations

import base64
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
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._version import __version__
from tf_labeldp.accounting._budget import Charge, CountedCharges, compose_counted
from tf_labeldp.accounting._events import (
    approximate_dp_event,
    event_from_json,
    event_to_json,
    pure_dp_event,
)
from tf_labeldp.accounting._guarantee import RELATION_REPLACE, UNIT_LABEL, PrivacyGuarantee

FORMAT = 1
"""Of receipts in files. A newer one is refused, not guessed."""

UNITS = {
    "label": UNIT_LABEL,
    "row": "the whole row of labels of one training example",
    "user": "all labels of one user",
}
_FEATURES = {
    False: "the features are public, and each person has one example",
    True: "the features are public, and so is which user each example is of",
}
_THROUGH_HERE = "the true labels reach training and tuning through the uses counted here alone"
_SECURE_BITS = "the operating system's random generator is secure, and OpenSSL's that it seeds"
_REPORTED = (
    "nobody sees the training loss and metrics that were reported: they are made of true labels"
)
_WEIGHTED = "the sample weights were made without labels"
_BY_LABEL = "stated by label and not by user, since some uses are counted by label"
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
class Receipt:
    """What one use of a label set was.

    Its kind is ``"draw"`` (noisy labels), ``"release"`` (a noisy statistic), ``"steps"`` (noisy
    gradients), ``"failed"`` (a mechanism that looked and handed nothing out), ``"unknown"`` (labels
    were used, and how is not known) or ``"declared"``.
    """

    labels: LabelSet
    charge: Charge
    what: str  # the use in words
    kind: str = "draw"
    key: str = ""  # the name it was asked for by
    examples: np.ndarray | None = None  # which examples, int64 (m,) rising; None for all
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
            "assumptions": list(self.charge.assumptions),
        }
        fields["examples"] = _packed(self.examples, self.labels.size)
        fields["answers"] = list(self.answers)
        return {**fields, "digest": _digest(fields)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Receipt:
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
            fields["examples"] = _unpacked(fields["examples"], fields["labels"].size)
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
        Charge(float(epsilon), float(delta), event, (f"declared, not checked here: {because}",)),
        what=f"declared: {because}",
        kind="declared",
        delta=delta,
        answers=tuple(one.id for one in unknown),
    )


def receipts_to_bytes(receipts: Iterable[Receipt], layers: Sequence[int] | None = None) -> bytes:
    """Returns receipts as they are kept in files of models."""
    content = {
        "format": FORMAT,
        "version": __version__,
        "layers": layers,
        "receipts": [one.to_json() for one in receipts],
    }
    return zlib.compress(json.dumps(content).encode(), 9)


def receipts_from_bytes(content: bytes) -> tuple[Receipts, list[int] | None]:
    """Returns the receipts and the layers that ``receipts_to_bytes`` wrote."""
    try:
        data = json.loads(zlib.decompress(content))
        found, version, listed = data["format"], data["version"], list(data["receipts"])
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise ReceiptError(
            f"the receipts of this file are damaged ({error}), and what its labels have spent "
            "can't be counted. Use a copy of the file as it was written."
        ) from error
    if found != FORMAT:
        raise ReceiptError(
            f"the receipts of this file have format {found}, written by tf-labeldp {version}; "
            f"tf-labeldp {__version__} reads format {FORMAT}. Install the newer version to read it."
        )
    return tuple(Receipt.from_json(one) for one in listed), data.get("layers")


class Histories:
    """What each of n examples of one label set has been charged; a row for each history."""

    def __init__(self, size: int) -> None:
        self._of_example = np.zeros(size, dtype=np.int32)
        self._table: list[CountedCharges] = [()]
        self._place: dict[CountedCharges, int] = {(): 0}

    def add(self, charge: Charge, rows: np.ndarray | None = None) -> None:
        """Charges these examples; None for all."""
        where = slice(None) if rows is None else rows
        new_place = np.arange(len(self._table), dtype=np.int32)
        for old in self._present(where):  # a handful of different histories, not examples
            counts = Counter(dict(self._table[old]))
            counts[charge] += 1
            history = tuple(counts.items())
            if history not in self._place:
                self._place[history] = len(self._table)
                self._table.append(history)
            new_place[old] = self._place[history]
        self._of_example[where] = new_place[self._of_example[where]]

    def distinct(self, rows: np.ndarray | None = None) -> list[CountedCharges]:
        """Returns the different histories of these examples; None for all."""
        return [self._table[i] for i in self._present(slice(None) if rows is None else rows)]

    def spread(self) -> list[tuple[CountedCharges, int]]:
        """Returns each history that some examples have, and how many have it."""
        counts = np.bincount(self._of_example, minlength=len(self._table))
        return [(self._table[i], int(counts[i])) for i in np.flatnonzero(counts)]

    def _present(self, where: Any) -> np.ndarray:
        places = self._of_example[where]
        if places.size and np.all(places == places[0]):  # as a rule, and faster to see
            return places[:1]
        return np.flatnonzero(np.bincount(places, minlength=1))


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
    known = standing(merge_receipts(receipts))
    if not known:
        return PrivacyGuarantee(epsilon=0.0)
    histories = list(_combined(known))
    sums = _sums(known, histories, delta)
    worst = max(sums, key=lambda one: (one.epsilon, one.delta))
    units = {one.unit for one in known if one.kind != "declared"} or {"label"}
    unit = units.pop() if len(units) == 1 else "label"
    # The statement covers every example, so it rests on what any of their sums rests on.
    notes = dict.fromkeys(text for one in sums for text in one.assumptions)
    notes |= dict.fromkeys(_named_assumptions(known, unit, by_user="user" in units))
    endless = [one.charge for one in known if math.isinf(one.charge.epsilon)]
    because = {text for charge in endless for text in charge.assumptions}
    reasons = [text for text in notes if text in because or text.startswith("nothing is promised")]
    return PrivacyGuarantee(
        worst.epsilon,
        max(one.delta for one in sums),
        unit=UNITS[unit],
        assumptions=tuple(dict.fromkeys([*reasons, *notes])),
        seeded=any(one.seeded for one in known),
        num_units=max(_num_units(one, unit) for one in known) or None,
    )


def _sums(
    receipts: Receipts, histories: list[CountedCharges], delta: float | None
) -> list[PrivacyGuarantee]:
    """Returns what each history adds up to, at a delta, or at the least one that can be stated."""
    import dp_accounting

    if delta is not None:
        delta = _validate.number_in("delta", delta, "[0, 1)")
        return [compose_counted(history, delta) for history in histories]
    stated = max(one.delta for one in receipts)
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


def _num_units(receipt: Receipt, unit: str) -> int:
    """Returns how many units of a statement a receipt is about."""
    return receipt.num_units if unit == "user" and receipt.num_units else receipt.labels.size


def standing(receipts: Receipts) -> Receipts:
    """Returns the receipts without those in place of which another one stands."""
    answered = {name for one in receipts for name in one.answers}
    return tuple(one for one in receipts if one.id not in answered)


def _populations(receipts: Receipts) -> Iterator[list[list[Receipt]]]:
    """Yields label sets that may be of the same people, each as the list of its receipts."""
    groups: dict[str, list[Receipt]] = {}
    for one in receipts:
        groups.setdefault(one.labels.name, []).append(one)
    people = {group[0].labels.people for group in groups.values()}
    for name in people - {None} or {None}:
        yield [group for group in groups.values() if group[0].labels.people in (name, None)]


def _combined(receipts: Receipts, *own: list[CountedCharges]) -> Iterator[CountedCharges]:
    """Yields what one person may have been charged, in these label sets and with one of ``own``."""
    for population in _populations(receipts):
        yield from _together([*own, *(_histories(group) for group in population)])


def _histories(receipts: Sequence[Receipt]) -> list[CountedCharges]:
    """Returns the different histories of the examples of one label set."""
    # Without an account of single examples, as of a declaration, all are alike.
    found = Histories(max(1, *(one.labels.size for one in receipts)))
    for one in receipts:
        found.add(one.charge, one.examples)
    return found.distinct()


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


def histories_with(own: list[CountedCharges], others: Iterable[Receipt]) -> list[CountedCharges]:
    """Returns what one person may have been charged: with one of these, and in other label sets."""
    known = standing(tuple(others))
    return list(_combined(known, own)) if known else own


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


def _named_assumptions(receipts: Receipts, unit: str, *, by_user: bool) -> Iterator[str]:
    """Yields what a statement of any receipts rests on."""
    yield _FEATURES[unit == "user"]
    sets = {one.labels.name for one in receipts if one.labels.size}
    people = {one.labels.people for one in receipts} - {None}
    if len(people) > 1:
        names = ", ".join(repr(name) for name in sorted(people, key=str))
        yield f"no person is in more than one of the populations {names}"
    elif len(sets) > 1:
        yield f"each person has one example in each of {len(sets)} label sets at most"
    if by_user and unit != "user":
        yield _BY_LABEL
    yield _THROUGH_HERE
    if any(one.sample_weights for one in receipts):
        yield _WEIGHTED
    if any(one.metrics_reported for one in receipts):
        yield _REPORTED
    if not any(one.seeded for one in receipts):
        yield _SECURE_BITS


def _packed(examples: np.ndarray | None, size: int) -> str | None:
    """Returns which of n examples are meant, a bit for each, as text."""
    if examples is None:
        return None
    chosen = np.zeros(size, dtype=bool)
    chosen[examples] = True
    return base64.b64encode(zlib.compress(np.packbits(chosen).tobytes(), 9)).decode()


def _unpacked(text: str | None, size: int) -> np.ndarray | None:
    if text is None:
        return None
    bits = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)
    return np.flatnonzero(np.unpackbits(bits, count=size))


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
