"""Receipts of uses of labels, and the statement that they compose to.

Only ``Composition`` turns receipts into a statement, for a vault and for a model. A use of
unknown cost has a receipt too, with an infinite charge.
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
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._version import __version__
from tf_labeldp.accounting._annotations import Setting
from tf_labeldp.accounting._guarantee import (
    RELATION_REPLACE,
    UNITS,
    Assumption,
    PrivacyGuarantee,
    adaptive_promise,
)
from tf_labeldp.accounting.budget import FIXED, ROUNDING, Charge, CountedCharges
from tf_labeldp.accounting.events import EventFields

FORMAT = 3
"""The format of receipts in files. A newer one is refused; 1 (of 0.2) and 2 (of 0.3) are read.

This and the other formats of files (of a store, of its records, of noisy labels) rise in the first
release that writes what the release before would refuse or misread: a field that is new, is gone or
has another meaning."""
_OMITTED = {"use": "", "plan": "", "plan_uses": 1, "budget_epsilon": None}
"""Fields that JSON omits at these values, so that files of earlier versions keep their digests."""

_FEATURES = Assumption(
    "public-features", "holder", "The features are public, and each person has one example."
)
_FEATURES_OF_USERS = Assumption(
    "public-features", "holder", "The features and the user of each example are public."
)
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
_FLAGS = {
    "sample_weights": Assumption(
        "public-sample-weights",
        "holder",
        "The weights of samples and classes were made without labels, except for the uses counted "
        "here.",
    ),
    "metrics_reported": Assumption(
        "metrics-reported",
        "trainer",
        "Nobody sees the training loss and metrics that were reported: they reveal true labels.",
    ),
    "seeded": None,
}
"""Flags of receipts that a statement names, each with its assumption."""
_BY_LABEL = Assumption(
    "stated-by-label",
    "holder",
    "The statement is by label and not by user, since some uses are counted by label.",
)
_DIGEST_SHOWN = 32
"""Hexadecimal digits of a digest in a statement: 128 bits."""
KINDS = ("draw", "release", "steps", "failed", "unknown", "declared")
"""Kinds of receipts."""
_DECLARED = "Declared by its author, not checked: "
_MOST_LABELS = 10**10
"""Largest size of a label set in a file: the histories of more examples fit no memory."""
_MOST_OF_A_PART = 1 << 27
"""Largest size of a label set of which a receipt in a file is about a part: the histories take a
byte for each example, and a file of a few bytes may be about any number of examples."""
_BLOCK = 1 << 20
"""Examples whose bits are unpacked at a time."""
_LEAST_BYTES, _MOST_RATIO = 1 << 22, 100
"""Receipts may unpack to this size, or to this multiple of the packed one."""
_LONGEST_NAME, _LONGEST_TEXT = 200, 200_000
"""Most characters of an id and of a text in a file, such as a mechanism with all its bins."""
_YEARS = range(1970, 3000)
"""Years of receipts. Reports sort and plot times: a ledger with any other text would have none."""
_MOST_PAIRS = 1000
"""Most combinations of the histories of several label sets that are composed one by one."""


class ReceiptError(ValueError):
    """Receipts were refused: damaged, edited, or written by a newer version.

    Attributes:
        is_newer: whether a newer version wrote them.
    """

    is_newer: bool = False

    @classmethod
    def of_newer(cls, subject: str, unknown: str, version: Setting[Any] = None) -> ReceiptError:
        """Returns the error of a file with something ``unknown``; the subject has its verb."""
        number = "" if version is None else f" ({str(version)[:_LONGEST_NAME]})"
        error = cls(
            f"{subject} written by a newer version of tf-labeldp{number}, with "
            f"{unknown[:_LONGEST_NAME]}, which {__version__} does not know. Update tf-labeldp."
        )
        error.is_newer = True
        return error


@dataclasses.dataclass(frozen=True)
class LabelSet:
    """The labels that a receipt is about; it reveals no label.

    Example:
        >>> first, second = LabelSet.new(100, "north"), LabelSet.new(80, "south")
        >>> first.may_be(second)
        False
    """

    name: str  # random, so that no two label sets share it
    size: int  # number of labels n
    people: str | None = None  # population of the labels; None if it was not declared
    stored: bool = False  # whether a store keeps the name

    @classmethod
    def new(cls, size: int, people: str | None = None, *, stored: bool = False) -> LabelSet:
        """Returns a set with a unique name."""
        return cls(secrets.token_hex(16), int(size), people, stored)

    def may_be(self, other: LabelSet) -> bool:
        """Returns whether both may contain the same labels.

        Sets with different stored names differ, and so do sets of different declared populations.
        """
        declared = None not in (self.people, other.people)
        differ = (declared and self.people != other.people) or (self.stored and other.stored)
        return self.name == other.name or not differ


def _check_time(time: str) -> None:
    try:
        moment = datetime.datetime.fromisoformat(time)
        is_right = moment.tzinfo is not None and moment.isoformat() == time
        is_right = is_right and moment.year in _YEARS
    except (TypeError, ValueError):
        is_right = False
    if not is_right:
        raise ValueError(
            f"expected the time of a receipt like {Receipt.timestamp()!r}, got "
            f"{str(time)[:40]!r}. Leave it out for the present time."
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """The m of n examples that a receipt is about: a bit for each, compressed.

    ``numpy.asarray`` returns their indices, ``int64`` (m,), rising.
    """

    bits: bytes
    total: int  # n

    @classmethod
    def of(cls, rows: Any, total: int) -> Examples | None:
        """Returns these rows out of ``total``; None if they are all."""
        if rows is None or isinstance(rows, cls):
            return rows
        chosen = np.zeros(total, dtype=bool)
        chosen[np.asarray(rows)] = True
        if total and chosen.all():
            return None
        return cls(zlib.compress(np.packbits(chosen).tobytes(), 9), total)

    def check(self) -> None:
        """Raises ``ValueError`` unless these are bits of n examples."""
        size, last = 0, b""
        for packed in self._unpacked():
            size, last = size + len(packed), packed[-1:]
        beyond = last[0] & (0xFF >> (self.total - 1) % 8 + 1) if last else 0
        if size != -(-self.total // 8) or beyond:
            raise ValueError(f"examples that are not among {self.total}")

    @property
    def count(self) -> int:
        """The number of examples m."""
        return sum(map(len, self.parts()))

    def parts(self) -> Iterator[np.ndarray]:
        """Yields the indices of some examples at a time, rising."""
        start = 0
        for packed in self._unpacked():
            bits = np.unpackbits(np.frombuffer(packed, np.uint8))
            yield start + np.flatnonzero(bits)
            start += len(bits)

    def _unpacked(self) -> Iterator[bytes]:
        """Yields the bits in blocks: a few bytes may unpack to gigabytes."""
        stream, rest = zlib.decompressobj(), self.bits
        left = -(-self.total // 8)
        while left >= 0 and (packed := stream.decompress(rest, _BLOCK // 8)):
            yield packed
            left, rest = left - len(packed), stream.unconsumed_tail
        if not stream.eof or stream.unused_data or stream.unconsumed_tail:
            raise ValueError(f"examples that are not among {self.total}")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        packed = np.frombuffer(zlib.decompress(self.bits), np.uint8)
        chosen = np.flatnonzero(np.unpackbits(packed, count=self.total))
        return chosen.astype(np.int64 if dtype is None else dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Receipt:
    """One use of a label set, with its cost.

    Its kind is ``"draw"`` (noisy labels), ``"release"`` (a noisy statistic), ``"steps"`` (noisy
    gradients), ``"failed"`` (a mechanism that read labels and released nothing), ``"unknown"`` (a
    use of unknown cost) or ``"declared"``.

    Example:
        >>> from tf_labeldp import PrivacyBudget, PrivateLabels, RandomizedResponse
        >>> labels = PrivateLabels([0, 1, 1], num_classes=2, budget=PrivacyBudget(2.0))
        >>> [receipt] = labels.randomize(RandomizedResponse(0.5, 2)).receipts
        >>> receipt.kind, receipt.charge.epsilon, receipt.num_examples
        ('draw', 0.5, 3)
    """

    UNNAMED: ClassVar[str] = "unnamed-"
    """The prefix of the keys of draws that were given no name."""

    labels: LabelSet
    charge: Charge
    what: str  # the ``repr`` of the mechanism, or the use in words
    kind: str = "draw"
    key: str = ""  # name of the use in its store
    examples: Setting[Any] = None  # indices or a mask, kept as Examples; None for all
    delta: float = 0.0  # delta of the vault's budget, at which statements are made
    output_digest: str | None = None  # digest of the output; None for steps
    unit: str = "label"  # a key of UNITS
    num_units: int | None = None  # number of units, if not the number of labels
    relation: str = RELATION_REPLACE
    seeded: bool = False  # whether the noise can be repeated
    metrics_reported: bool = False  # whether loss or metrics on true labels were reported
    sample_weights: bool = False  # whether examples were weighted
    answers: tuple[str, ...] = ()  # ids of the "unknown" receipts that a declaration replaces
    use: str = ""  # shared by receipts of one use of several label sets, which counts once
    plan: str = ""  # shared by receipts of uses that were fixed together before the first of them
    plan_uses: int = 1  # number of uses of this charge that the plan allows
    budget_epsilon: float | None = None  # epsilon of the vault's budget; None if it is unknown
    time: str = dataclasses.field(default_factory=lambda: Receipt.timestamp())
    actor: str = dataclasses.field(default_factory=lambda: Receipt.actor_name())
    version: str = __version__
    id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(16))  # counted once

    def __post_init__(self) -> None:
        _check_time(self.time)
        object.__setattr__(self, "examples", Examples.of(self.examples, self.labels.size))

    @staticmethod
    def actor_name() -> str:
        """Returns the name of the user, from ``LABELDP_ACTOR`` or the login."""
        try:
            return os.environ.get("LABELDP_ACTOR") or getpass.getuser()
        except (OSError, KeyError, ImportError):  # The system has no entry for this user.
            return "unknown"

    @staticmethod
    def timestamp() -> str:
        """Returns the time in UTC, to the second."""
        return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")

    @classmethod
    def of_encoder(cls, name: str, of: str, digest: str) -> Receipt:
        """Returns the free receipt that names a public encoder; one id for one encoder.

        ``of`` names what the SHA-256 digest is of.
        """
        text = (
            f'The encoder "{name}" ({of} sha256 {digest[:_DIGEST_SHOWN]}) is public: it was made '
            "without these labels, except for the uses counted here."
        )
        own = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_SHOWN]
        charge = Charge(
            0.0, 0.0, EventFields.NONE, (Assumption("public-encoder", "trainer", text),)
        )
        return cls(LabelSet(own, 0), charge, "a public encoder", "declared", id=own)

    @classmethod
    def of_declaration(
        cls,
        unknown: Iterable[Receipt],
        because: str,
        epsilon: float = 0.0,
        delta: float = 0.0,
    ) -> Receipt:
        """Returns the receipt with which an author declares the cost of unknown uses of labels."""
        event = EventFields.approximate(epsilon, delta) if epsilon else EventFields.NONE
        note = Assumption("declared", "authors", f"{_DECLARED}{because}")
        return cls(
            LabelSet.new(0),
            Charge(float(epsilon), float(delta), event, (note,)),
            what=f"declared: {because}",
            kind="declared",
            delta=delta,
            answers=tuple(receipt.id for receipt in unknown),
        )

    @classmethod
    def of_statement(cls, stated: PrivacyGuarantee) -> Receipt:
        """Returns a receipt of the cost that a statement has; one id for one statement.

        Raises:
            ValueError: a statement for another relation than the replacement of a label.
        """
        if stated.relation != RELATION_REPLACE:
            raise ValueError(
                f"expected a statement for {RELATION_REPLACE}, got one for {stated.relation}. Give "
                "the receipts of what the model was trained on."
            )
        event = EventFields.NONE
        if math.isinf(stated.epsilon) or stated.delta:
            event = EventFields.NOT_PRIVATE
        elif stated.epsilon:
            event = EventFields.approximate(stated.epsilon, 0.0)
        own = hashlib.sha256(stated.to_json().encode()).hexdigest()[:_DIGEST_SHOWN]
        return cls(
            LabelSet(own, 0),
            Charge(stated.epsilon, stated.delta, event, stated.assumptions),
            what="a statement",
            kind="declared",
            delta=stated.delta,
            seeded=stated.seeded,
            id=own,
        )

    @classmethod
    def of_unknown_training(cls, reason: str) -> Receipt:
        """Returns a receipt of unknown cost: nothing is promised, for this reason."""
        charge = Charge.unknown(
            f"Nothing is promised: {reason}. Train with tf_labeldp.fit(model, x, noisy) or with "
            "callbacks=[tf_labeldp.RecordReceipts(noisy)]; or declare the history: "
            "tf_labeldp.declare(model, because=...)."
        )
        return cls(LabelSet.new(0), charge, "training without receipts", "unknown")

    def agreed(self, other: Receipt | None) -> Receipt:
        """Returns one of two receipts with one id, or raises if their contents differ.

        Keyed draws may be published with the number of rows, which the ledger of their key does not
        know: such receipts differ in the size of the label set alone, and the one without a size,
        which is about all examples, counts.
        """
        if other is None or other is self:
            return self
        contents = [other._content(), self._content()]
        if contents[0] == contents[1]:
            return other
        sizes = {other.labels.size, self.labels.size}
        for content in contents:
            content["labels"] = dataclasses.replace(content["labels"], size=0)
        if contents[0] == contents[1] and other.examples is None and 0 in sizes:
            return other if other.labels.size == 0 else self
        raise ReceiptError(
            f"expected one content for the receipt {other.id[:_LONGEST_NAME]}, got two: "
            f"{other.what[:_LONGEST_NAME]!r} and {self.what[:_LONGEST_NAME]!r}. One of them was "
            "edited: use unchanged copies of the files."
        )

    @property
    def name(self) -> str:
        """The name that the use was given; empty for draws without one."""
        return "" if self.key.startswith(self.UNNAMED) else self.key

    def line(self, of: LabelSet, times: int = 1, what: str | None = None) -> str:
        """Returns the line of ``times`` equal uses in the history of a label set.

        ``what`` is the use in the words of a page; None for those of the receipt.
        """
        line = self.what if what is None else what
        line += ", which failed" if self.kind == "failed" else ""
        line += f", {times} times" if times > 1 else ""
        return line + (" (of an input)" if self.labels.name != of.name else "")

    @property
    def num_examples(self) -> int:
        """The number of examples that the receipt is about."""
        return self.labels.size if self.examples is None else self.examples.count

    @property
    def declares(self) -> tuple[str, ...]:
        """Ids of the receipts of unknown cost that it replaces: none unless it is a declaration."""
        return self.answers if self.kind == "declared" else ()

    @property
    def declares_history(self) -> bool:
        """Whether an author declares with it how something was made."""
        return any(note.startswith(_DECLARED) for note in self.charge.assumptions)

    @property
    def flags(self) -> dict[str, bool]:
        """The facts about the use that a statement names, and whether they are so."""
        return {
            "seeded": self.seeded,
            "metrics_reported": self.metrics_reported,
            "sample_weights": self.sample_weights,
        }

    def _content(self) -> dict[str, Any]:
        """Returns everything that a statement depends on: when and where it was made is not."""
        fields = {name: getattr(self, name) for name in _FIELDS - {"time", "actor", "version"}}
        fields["examples"] = None if self.examples is None else self.examples.bits
        return fields

    def to_json(self) -> dict[str, Any]:
        """Returns the receipt as values for JSON, with a digest of its content."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["labels"] = dataclasses.asdict(self.labels)
        epsilon = self.charge.epsilon
        fields["charge"] = {
            "epsilon": "inf" if math.isinf(epsilon) else epsilon,
            "delta": self.charge.delta,
            "event": self.charge.event_fields,
            "assumptions": [note.to_json() for note in self.charge.assumptions],
        }
        if self.examples is not None:
            fields["examples"] = base64.b64encode(self.examples.bits).decode()
        fields["answers"] = list(self.answers)
        for name, value in _OMITTED.items():
            if fields[name] == value:
                del fields[name]
        return {**fields, "digest": _digest(fields)}

    @classmethod
    def from_json(cls, data: Setting[dict[str, Any]], *, num_labels: int = 0) -> Receipt:
        """Returns the receipt that ``to_json`` wrote, with every field checked.

        ``num_labels`` is the number of labels of the store that has the receipt.

        Raises:
            ReceiptError: its content changed, no version writes such a value, or a newer version
                wrote it.
        """
        try:
            fields = dict(data)
            if fields.pop("digest") != _digest(fields):
                raise ValueError("the digest does not match the content")
            if unknown := _unknown_fields(fields):
                raise ReceiptError.of_newer(
                    "a receipt was", f"the field {unknown[0]!r}", fields["version"]
                )
            fields["charge"] = _charge_of_json(fields["charge"])
            fields["labels"] = _label_set_of_json(fields["labels"])
            if fields["examples"] is not None:
                bits = base64.b64decode(fields["examples"], validate=True)
                size = fields["labels"].size
                if size > max(num_labels, _MOST_OF_A_PART):
                    raise ValueError(
                        f"a part of {size:,} examples, where {_MOST_OF_A_PART:,} are possible"
                    )
                fields["examples"] = Examples(bits, size)
            fields["answers"] = tuple(fields["answers"])
            return _checked(cls(**fields))
        except ReceiptError:
            raise
        except (
            AttributeError,
            KeyError,
            OverflowError,
            TypeError,
            ValueError,
            zlib.error,
        ) as error:
            raise ReceiptError(
                f"a receipt is damaged or was edited ({error}), so its cost can't be counted. "
                "Use an unchanged copy of the file."
            ) from error

    def __reduce__(self) -> Any:
        """Pickles through JSON, so that the digest of a pickled receipt is checked too."""
        return Receipt.from_json, (self.to_json(),)


_FIELDS = frozenset(field.name for field in dataclasses.fields(Receipt))
_FIELDS_OF_LABELS = frozenset(field.name for field in dataclasses.fields(LabelSet))
_FIELDS_OF_CHARGE = frozenset({"epsilon", "delta", "event", "assumptions"})
_FIELDS_OF_ASSUMPTION = frozenset({"code", "who", "text"})


def _unknown_fields(fields: dict[str, Any]) -> list[str]:
    """Returns the fields of a receipt, and of the objects in it, that this version does not know.

    The digest of the receipt fits them, so that they were written, not added.
    """
    charge = fields["charge"]
    unknown = [fields.keys() - _FIELDS, fields["labels"].keys() - _FIELDS_OF_LABELS]
    unknown.append(charge.keys() - _FIELDS_OF_CHARGE)
    notes = [note for note in charge["assumptions"] if isinstance(note, dict)]
    unknown += [note.keys() - _FIELDS_OF_ASSUMPTION for note in notes]
    return sorted(frozenset().union(*unknown))


def _charge_of_json(fields: dict[str, Any]) -> Charge:
    for name in ("epsilon", "delta"):
        if fields[name] != "inf":
            _validate.real_number(f"the {name} of a charge", fields[name])
    if not all(isinstance(note, (dict, str)) for note in fields["assumptions"]):
        raise ValueError("an assumption that is no text")
    charge = Charge(**{**fields, "epsilon": float(fields["epsilon"])})
    is_free = charge.epsilon == charge.delta == 0.0
    if charge.event_fields == EventFields.NONE and not is_free:
        raise ValueError(f"epsilon={charge.epsilon:g} at delta={charge.delta:g} of no event")
    for note in charge.assumptions:
        for text in (note.code, note.who, str(note)):
            _validate.text_up_to("an assumption", text, _LONGEST_TEXT)
    return charge


def _label_set_of_json(fields: dict[str, Any]) -> LabelSet:
    labels = LabelSet(**fields)
    _validate.text_up_to("the name of a label set", labels.name, _LONGEST_NAME, least=1)
    if labels.people is not None:
        _validate.text_up_to("people", labels.people, _LONGEST_TEXT)
    _validate.integer_at_least("the size of a label set", labels.size, 0)
    if labels.size > _MOST_LABELS:
        raise ValueError(f"the size of a label set must be at most 1e10, got {labels.size:g}")
    _validate.boolean("stored", labels.stored)
    return labels


def _checked(receipt: Receipt) -> Receipt:
    """Returns a receipt from a file, or raises if this library writes no such receipt."""
    _validate.one_of("kind", receipt.kind, KINDS)
    _validate.one_of("unit", receipt.unit, UNITS)
    _validate.one_of("relation", receipt.relation, (RELATION_REPLACE,))
    _validate.text_up_to("id", receipt.id, _LONGEST_NAME, least=1)
    names = {"use": receipt.use, "plan": receipt.plan, "version": receipt.version}
    if receipt.output_digest is not None:
        names["output_digest"] = receipt.output_digest
    for name, text in names.items():
        _validate.text_up_to(name, text, _LONGEST_NAME)
    for name, text in (("what", receipt.what), ("key", receipt.key), ("actor", receipt.actor)):
        _validate.text_up_to(name, text, _LONGEST_TEXT)
    for answered in receipt.answers:
        _validate.text_up_to("answers", answered, _LONGEST_NAME, least=1)
    for name, flag in receipt.flags.items():
        _validate.boolean(name, flag)
    _validate.number_in("delta", receipt.delta, "[0, 1)")
    if receipt.num_units is not None:
        _validate.integer_at_least("num_units", receipt.num_units, 0)
    _validate.integer_at_least("plan_uses", receipt.plan_uses, 1)
    if receipt.budget_epsilon is not None:
        _validate.positive_finite("budget_epsilon", receipt.budget_epsilon)
    if receipt.kind == "unknown" and math.isfinite(receipt.charge.epsilon):
        raise ValueError(f"an unknown cost of {receipt.charge.epsilon:g}")
    if receipt.answers and not (receipt.kind == "declared" and receipt.declares_history):
        raise ValueError("a receipt that replaces others without a declaration")
    if receipt.examples is not None:
        receipt.examples.check()
    return receipt


class Receipts(tuple[Receipt, ...]):
    """Receipts in the order of their uses: a tuple that composes to one statement.

    Guarantee:
        ``guarantee()`` covers all outputs of these receipts together, for the replacement of one
        label: a composition of promises made before the draws. Receipts of one label set compose in
        sequence on each shared example, and in parallel on different examples (``ghazi2021``,
        Observation 4). Two label sets may contain labels of the same people, in any order, so the
        worst example of one is added to the worst of the other, unless they were declared to be of
        different populations (``people``). A step on several label sets, whose row i has labels of
        the same example, counts once: its cost is for the replacement of all labels of an example.

    Example:
        >>> from tf_labeldp import PrivacyBudget, PrivateLabels, RandomizedResponse
        >>> labels = PrivateLabels([0, 1, 1], num_classes=2, budget=PrivacyBudget(2.0))
        >>> first = labels.randomize(RandomizedResponse(0.5, 2), key="first")
        >>> second = labels.randomize(RandomizedResponse(0.25, 2), key="second")
        >>> both = Receipts.merged(first.receipts, second.receipts, first.receipts)
        >>> len(both), both.guarantee().epsilon
        (2, 0.75)
    """

    __slots__ = ()

    def __new__(cls, receipts: Iterable[Receipt] = ()) -> Receipts:
        """Returns these receipts."""
        return super().__new__(cls, receipts)

    @classmethod
    def merged(cls, *several: Iterable[Receipt]) -> Receipts:
        """Returns all receipts, each once, in order of first appearance.

        Raises:
            ReceiptError: two receipts with one id have different contents.
        """
        found: dict[str, Receipt] = {}
        for receipt in itertools.chain(*several):
            found[receipt.id] = receipt.agreed(found.get(receipt.id))
        return cls(found.values())

    @classmethod
    def of_weights(cls, sample_weight: Setting[Any], class_weight: Setting[Any]) -> Receipts:
        """Returns the free receipt of weights in training on noisy labels, or none without weights.

        A statement names it. Weights ``"balanced"`` come from the noisy labels, and have none.
        """
        if sample_weight is None and (class_weight is None or isinstance(class_weight, str)):
            return cls()
        free = Charge(0.0, 0.0, EventFields.NONE)
        labels = LabelSet.new(0)
        return cls([Receipt(labels, free, "public weights", "declared", sample_weights=True)])

    def guarantee(self, delta: float | None = None) -> PrivacyGuarantee:
        """Returns the statement of all uses that these receipts record.

        ``delta`` is by default the largest delta of the receipts.
        """
        return Composition(self).guarantee(delta)

    def standing(self) -> Receipts:
        """Returns the receipts without those of unknown cost that a declaration replaces."""
        declared = {name for receipt in self for name in receipt.declares}
        return Receipts(
            receipt
            for receipt in Receipts.merged(self)
            if receipt.kind != "unknown" or receipt.id not in declared
        )

    def to_bytes(self, **more: Setting[Any]) -> bytes:
        """Returns receipts in the format of model files, with ``more`` values for JSON."""
        content = {"format": FORMAT, "version": __version__, **more}
        content["receipts"] = [receipt.to_json() for receipt in self]
        return zlib.compress(json.dumps(content).encode(), 9)

    @classmethod
    def from_bytes(cls, content: bytes) -> tuple[Receipts, dict[str, Any]]:
        """Returns the receipts, and everything that ``to_bytes`` wrote with them."""
        try:
            data = _validate.json_of(_validate.unpacked(content, _LEAST_BYTES, _MOST_RATIO))
            written = _validate.integer_at_least("the format", data["format"], 1)
            if written > FORMAT:
                raise ReceiptError.of_newer(
                    "these receipts were", f"format {written}", data["version"]
                )
            listed = list(data["receipts"])
        except ReceiptError:
            raise
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            raise ReceiptError(
                f"the receipts of this file are damaged ({error}), so the cost of its labels can't "
                "be counted. Use an unchanged copy of the file."
            ) from error
        return cls(map(Receipt.from_json, listed)), data


class Histories:
    """The charges of each of n examples of one label set.

    Charges of all examples are counted once; of the others, each distinct history is a row.
    Examples that arrive later have no charge, except those of a set whose size is unknown.
    """

    def __init__(self, size: int) -> None:
        self._of_all: Counter[Charge] = Counter()
        self._of_any: Counter[Charge] = Counter()  # of all examples, also later ones
        self._rows: list[CountedCharges] = [()]
        self._sizes = [size]  # number of examples per row
        self._free: list[int] = []  # rows without examples, for reuse
        self._place: dict[frozenset[tuple[Charge, int]], int] = {frozenset(): 0}
        self._rows_of: np.ndarray | None = None  # of each example; None while all have row 0
        self.size = size  # number of examples n

    @property
    def _row_of(self) -> np.ndarray:
        """The row of each example, in the smallest type."""
        if self._rows_of is None:
            self._rows_of = np.zeros(self.size, np.uint8)
        kind = np.result_type(self._rows_of.dtype, np.min_scalar_type(len(self._rows)))
        self._rows_of = self._rows_of.astype(kind, copy=False)
        return self._rows_of

    def add(self, charge: Charge, examples: Any = None, size: int | None = None) -> None:
        """Charges these examples, by indices or a mask; None for all.

        ``size`` is the number of all examples at the time of the charge, and zero if it is unknown.
        """
        if examples is None and size == 0:
            self._of_any[charge] += 1
            return
        if examples is None and size is not None and size < self.size:
            examples = np.arange(size)
        if examples is None:
            self._of_all[charge] += 1
            return
        is_large = isinstance(examples, Examples) and examples.total > _BLOCK
        once = None if is_large else [np.asarray(examples)]
        moved = np.zeros(len(self._rows), np.int64)
        for where in once or examples.parts():
            moved += np.bincount(self._row_of[where], minlength=len(self._rows))
        new_row = np.zeros(len(self._rows), dtype=np.int32)
        for old in np.flatnonzero(moved):  # loops over a few histories, not over examples
            new_row[old] = self._row(_sum_of(self._rows[old], ((charge, 1),)))
            self._sizes[new_row[old]] += int(moved[old])
        for where in once or examples.parts():
            self._row_of[where] = new_row[self._row_of[where]]
        # This comes last, so that an interrupt may leave a charge too many, never one too few.
        for old in np.flatnonzero(moved):
            self._sizes[old] -= int(moved[old])
            if self._sizes[old] == 0:
                del self._place[frozenset(self._rows[old])]
                self._free.append(int(old))

    def _row(self, history: CountedCharges) -> int:
        name = frozenset(history)
        if name not in self._place:
            if not self._free:
                self._free.append(len(self._rows))
                self._rows.append(())
                self._sizes.append(0)
            place = self._free.pop()
            self._rows[place] = history
            self._place[name] = place
        return self._place[name]

    def spread(self) -> list[tuple[CountedCharges, int]]:
        """Returns each distinct history with the number of its examples."""
        pairs = zip(self._rows, self._sizes, strict=True)
        return [(self._with_all(row), size) for row, size in pairs if size]

    def distinct(self, examples: Any = None) -> list[CountedCharges]:
        """Returns the distinct histories of examples, by indices or a mask; None for all."""
        if examples is None:
            return [history for history, _ in self.spread()]
        if self._rows_of is None:
            mask = np.asarray(examples)
            is_any = mask.any() if mask.dtype == bool else mask.size
            return [self._with_all(self._rows[0])] if is_any else []
        rows = np.flatnonzero(np.bincount(self._row_of[examples]))
        return [self._with_all(self._rows[row]) for row in rows]

    def _with_all(self, row: CountedCharges) -> CountedCharges:
        return _sum_of(tuple(self._of_any.items()), tuple(self._of_all.items()), row)

    def grow(self, size: int) -> None:
        """Adds examples up to this number, which have no charge yet."""
        if (more := size - self.size) > 0:
            is_one_row = self._rows_of is None and not self._of_all
            self._sizes[0] += more if is_one_row else 0
            self.size = size
            if is_one_row:
                return
            row_of = np.zeros(size - more, np.uint8) if self._rows_of is None else self._rows_of
            of_all, self._of_all = tuple(self._of_all.items()), Counter()
            if of_all:
                self._rows = [_sum_of(of_all, row) for row in self._rows]
                pairs = zip(self._rows, self._sizes, strict=True)
                self._place = {frozenset(row): at for at, (row, count) in enumerate(pairs) if count}
            row = self._row(())
            self._sizes[row] += more
            kind = np.result_type(row_of.dtype, np.min_scalar_type(row))
            self._rows_of = np.append(row_of.astype(kind, copy=False), np.full(more, row, kind))

    def copy(self) -> Histories:
        """Returns an independent copy."""
        found = Histories(0)
        found._of_all, found._of_any = self._of_all.copy(), self._of_any.copy()
        found._place = self._place.copy()
        found._rows, found._sizes = self._rows.copy(), self._sizes.copy()
        found._free = self._free.copy()
        found._rows_of = None if self._rows_of is None else self._rows_of.copy()
        found.size = self.size
        return found


def _sum_of(*histories: CountedCharges) -> CountedCharges:
    histories = tuple(filter(None, histories))
    if len(histories) == 1:
        return histories[0]
    counts: Counter[Charge] = Counter()
    for history in histories:
        counts.update(dict(history))
    return tuple(counts.items())


class _Fact(NamedTuple):
    """The content of receipts that a statement names; many receipts share few facts."""

    labels: LabelSet
    unit: str | None  # None for a declaration
    delta: float
    num_units: int
    flags: frozenset[str]
    reasons: tuple[Assumption, ...]  # why nothing is promised
    budget_epsilon: float | None  # zero without a cost


class _SharedUse(NamedTuple):
    """One use of several label sets."""

    charge: Charge  # with the assumptions of all its receipts
    people: str | None  # None if the label sets are of different populations, or of unknown ones
    times: int  # how often it counts for every person


def _name_of_use(receipt: Receipt) -> tuple[Any, ...]:
    charge = receipt.charge
    return receipt.use, charge.epsilon, charge.delta, charge.event_text


class Composition:
    """The running composition of receipts, which never reads a receipt twice.

    Each receipt is counted once. One of unknown cost is not counted if a declaration replaces it.
    A use of several label sets has a receipt for each of them, with the same cost. It counts once
    for every person, since the set in which a person has such an example is unknown; in the
    composition of a ledger, whose label set is ``own``, it counts for the examples of its receipt.
    Receipts of one use that differ in cost are receipts of different uses.

    Guarantee:
        As for ``Receipts``, for all receipts that were added.

    Raises:
        ReceiptError: two receipts with one id have different contents.
    """

    def __init__(self, receipts: Iterable[Receipt] = (), own: str = "") -> None:
        self._own_name = own
        self._receipts: dict[str, Receipt] = {}
        self._declared: set[str] = set()  # ids of receipts that declarations replace
        self._shared: dict[tuple[Any, ...], dict[str, int]] = {}  # receipts of a use by label set
        self._clear()
        for receipt in receipts:
            self.add(receipt)

    def _clear(self) -> None:
        self._histories: dict[str, Histories] = {}  # by the name of the label set
        self._is_stale = False  # whether to count all receipts again
        self._uses: dict[tuple[Any, ...], _SharedUse] = {}  # of several label sets
        self._of_everyone: dict[str | None, Counter[Charge]] = {}  # by population
        self._facts: dict[_Fact, None] = {}

    def add(self, receipt: Receipt) -> None:
        """Adds a receipt, unless it was added before."""
        known = self._receipts.get(receipt.id)
        receipt = receipt.agreed(known)
        if receipt is known:
            return
        self._receipts[receipt.id] = receipt
        self._declared.update(receipt.declares)
        if known is not None or any(
            self._is_declared(self._receipts.get(name)) for name in receipt.declares
        ):
            self._is_stale = True
        if receipt.use and known is None:
            sets = self._shared.setdefault(_name_of_use(receipt), {})
            sets[receipt.labels.name] = sets.get(receipt.labels.name, 0) + 1
            if len(sets) == 2 and sets[receipt.labels.name] == 1:
                # Receipts of the first label set were counted for its examples.
                self._is_stale |= next(iter(sets)) != self._own_name
        if not self._is_stale:
            self._count(receipt)

    def _refresh(self) -> None:
        """Counts all receipts again, if one of them made earlier ones count in another way."""
        if self._is_stale:
            self._clear()
            for receipt in self._receipts.values():
                self._count(receipt)

    def _is_declared(self, receipt: Receipt | None) -> bool:
        """Returns whether a declaration replaces a receipt: never one of the own label set."""
        return (
            receipt is not None
            and receipt.kind == "unknown"
            and receipt.id in self._declared
            and receipt.labels.name != self._own_name
        )

    def _count(self, receipt: Receipt) -> None:
        if self._is_declared(receipt):
            return
        labels, charge = receipt.labels, receipt.charge
        # A declaration has no examples: one row stands for all.
        histories = self._histories.setdefault(labels.name, Histories(max(1, labels.size)))
        histories.grow(labels.size)
        is_shared = bool(receipt.use) and len(self._shared[_name_of_use(receipt)]) > 1
        if is_shared:
            self._share(receipt)
        if not is_shared or labels.name == self._own_name:
            histories.add(charge, receipt.examples, labels.size)
        fact = _Fact(
            labels,
            None if receipt.kind == "declared" else receipt.unit,
            receipt.delta,
            receipt.num_units or labels.size,
            frozenset(name for name, flag in receipt.flags.items() if flag),
            charge.assumptions if math.isinf(charge.epsilon) else (),
            receipt.budget_epsilon if charge.epsilon or charge.delta else 0.0,
        )
        self._facts[fact] = None

    def _share(self, receipt: Receipt) -> None:
        """Counts a use of several label sets, once for every person."""
        name, charge, people = _name_of_use(receipt), receipt.charge, receipt.labels.people
        sets = self._shared[name]
        times = max(sets.values()) - sets.get(self._own_name, 0)
        if (old := self._uses.get(name)) is not None:
            notes = dict.fromkeys((*old.charge.assumptions, *charge.assumptions))
            charge = charge.with_assumptions(notes)
            people = people if people == old.people else None
            self._of_everyone[old.people][old.charge] -= old.times
        self._uses[name] = _SharedUse(charge, people, times)
        self._of_everyone.setdefault(people, Counter())[charge] += times

    def with_receipts(self, receipts: Iterable[Receipt]) -> Composition:
        """Returns a new composition with more receipts."""
        self._refresh()
        extended = Composition(own=self._own_name)
        extended._receipts, extended._declared = self._receipts.copy(), self._declared.copy()
        extended._uses, extended._facts = self._uses.copy(), self._facts.copy()
        extended._shared = {name: sets.copy() for name, sets in self._shared.items()}
        extended._histories = {name: history.copy() for name, history in self._histories.items()}
        extended._of_everyone = {of: counts.copy() for of, counts in self._of_everyone.items()}
        for receipt in receipts:
            extended.add(receipt)
        return extended

    def histories(
        self, labels: LabelSet | None = None, examples: Any = None
    ) -> list[CountedCharges]:
        """Returns the possible charges of one person, over all label sets.

        ``labels`` and ``examples`` (indices or a mask) limit them to people with such an example.
        """
        if labels is None:
            return list(self._of_one_person())
        return list(self._of_one_person(labels, self._own(labels).distinct(examples)))

    def spread(self, labels: LabelSet) -> Iterator[tuple[list[CountedCharges], int]]:
        """Yields the possible histories of examples of a label set, and the number of examples."""
        for history, size in self._own(labels).spread():
            yield list(self._of_one_person(labels, [history])), size

    def _own(self, labels: LabelSet) -> Histories:
        self._refresh()
        found = self._histories.get(labels.name, Histories(max(1, labels.size)))
        if found.size < labels.size:
            found = found.copy()
            found.grow(labels.size)
        return found

    def _of_one_person(
        self, labels: LabelSet | None = None, *own: list[CountedCharges]
    ) -> Iterator[CountedCharges]:
        """Yields the possible histories of one person; ``own`` are the histories in ``labels``."""
        self._refresh()
        people: dict[str, str | None] = {}
        for fact in self._facts:
            of = fact.labels.people
            # Receipts that contradict each other leave open which people these are.
            people[fact.labels.name] = of if people.get(fact.labels.name, of) == of else None
        populations = set(people.values()) - {None}
        own_people = None if labels is None else labels.people
        if labels is not None:
            people.pop(labels.name, None)
            if labels.people is not None:
                people = {name: of for name, of in people.items() if of in (None, labels.people)}
        for population in set(people.values()) - {None} or {own_people}:
            # These label sets may be of the same people.
            same = [name for name, of in people.items() if of in (population, None)]
            shared = [
                tuple((+counts).items())
                for of, counts in self._of_everyone.items()
                if of == population or of not in populations
            ]
            histories = [*own, *(self._histories[name].distinct() for name in same)]
            yield from _together([*histories, *([history] for history in shared)])

    def guarantee(
        self, delta: float | None = None, kept: tuple[float, ...] | None = None
    ) -> PrivacyGuarantee:
        """Returns the statement at ``delta``, or else at the largest delta of the receipts.

        ``kept`` is the budget (epsilon, delta) that a filter kept for all receipts, empty if there
        is none; None takes the budgets in the receipts.
        """
        self._refresh()
        if not self._histories:
            return PrivacyGuarantee(epsilon=0.0)
        facts = list(self._facts)
        units = {fact.unit for fact in facts if fact.unit is not None} or {"label"}
        unit = units.pop() if len(units) == 1 else "label"
        flags = frozenset().union(*(fact.flags for fact in facts))
        sums = _sums(self.histories(), max(fact.delta for fact in facts), delta)
        # The statement covers every example, so it rests on the assumptions of every sum.
        notes = dict.fromkeys(note for total in sums for note in total.assumptions)
        endless = {note for fact in facts for note in fact.reasons}
        reasons = [note for note in notes if note in endless or note.code == "not-promised"]
        named = self._named_assumptions(unit, flags, by_user="user" in {unit, *units})
        epsilon = max(total.epsilon for total in sums)
        found = self._adaptive() if kept is None else kept
        adaptive = (found[0], found[1]) if found else None
        # No filter kept a budget that is below the sum.
        if adaptive is not None and not epsilon <= adaptive[0] * (1.0 + ROUNDING):
            adaptive = None
        notes = {_with_figure(note, adaptive): None for note in notes}
        return PrivacyGuarantee(
            epsilon,
            max(total.delta for total in sums),
            UNITS[unit],
            assumptions=tuple(dict.fromkeys([*reasons, *notes, *named])),
            seeded="seeded" in flags,
            num_units=max(fact.num_units if unit == "user" else fact.labels.size for fact in facts)
            or None,
            adaptive=adaptive,
        )

    def _adaptive(self) -> tuple[float, float] | None:
        """Returns the sum of the budgets of the label sets of one person; None if one is unknown.

        Each budget bounds all uses of its label set, in any order with those of other sets.
        """
        budgets: dict[str, tuple[float, float]] = {}
        for fact in self._facts:
            if fact.budget_epsilon is None:
                return None
            if fact.budget_epsilon:
                old = budgets.get(fact.labels.name, (0.0, 0.0))
                new = fact.budget_epsilon, fact.delta
                # A budget may be raised.
                budgets[fact.labels.name] = max(old[0], new[0]), max(old[1], new[1])
        people = {fact.labels.name: fact.labels.people for fact in self._facts}
        figures = []
        for population in set(people.values()) - {None} or {None}:
            own = [budgets[name] for name in budgets if people[name] in (population, None)]
            figures.append(tuple(map(math.fsum, zip(*own, strict=True))) or (0.0, 0.0))
        epsilon, delta = (max(each) for each in zip(*figures, strict=True))
        return (epsilon, delta) if 0.0 < epsilon and delta < 1.0 else None

    def _named_assumptions(
        self, unit: str, flags: frozenset[str], *, by_user: bool
    ) -> Iterator[Assumption]:
        yield _FEATURES_OF_USERS if unit == "user" else _FEATURES
        people = {fact.labels.people for fact in self._facts} - {None}
        sized = {fact.labels.name for fact in self._facts if fact.labels.size}
        if len(people) > 1:
            names = ", ".join(map(repr, sorted(people, key=str)))
            text = f"No person is in more than one of the populations {names}."
            yield Assumption("disjoint-people", "holder", text)
        elif len(sized) > 1:
            one = "is at most one user" if unit == "user" else "has at most one example"
            text = f"Each person {one} in each of {len(sized)} label sets."
            yield Assumption("one-example-per-set", "holder", text)
        if by_user and unit != "user":
            yield _BY_LABEL
        yield _THROUGH_HERE
        yield from (note for flag, note in _FLAGS.items() if note and flag in flags)
        if "seeded" not in flags:
            yield _SECURE_BITS


def _with_figure(note: Assumption, adaptive: tuple[float, float] | None) -> Assumption:
    """Returns the assumption that uses were fixed in advance, with what holds otherwise."""
    if note != FIXED or adaptive is None:
        return note
    text = (
        "The mechanisms and the number of their uses were fixed in advance. If some were chosen "
        f"after seeing earlier outputs, the statement is {adaptive_promise(adaptive)}."
    )
    return Assumption("fixed-in-advance", "trainer", text)


def _sums(
    histories: list[CountedCharges], stated: float, delta: float | None
) -> list[PrivacyGuarantee]:
    """Returns the sum of each history at ``delta``, or else at the least possible delta."""
    if delta is not None:
        stated = _validate.number_in("delta", delta, "[0, 1)")
    sums = [Charge.composed(history, stated) for history in histories]
    if delta is None and any(math.isinf(total.epsilon) for total in sums):
        # Deltas of uses without an event add up and may exceed the delta of the budgets.
        opaque = max(
            math.fsum(
                charge.delta * count
                for charge, count in history
                if charge.event_fields == EventFields.NOT_PRIVATE
            )
            for history in histories
        )
        if 0.0 < opaque < 1.0 - stated:
            return [Charge.composed(history, stated + opaque) for history in histories]
    return sums


def _together(several: list[list[CountedCharges]]) -> Iterator[CountedCharges]:
    """Yields the possible histories of a person with an example in each label set."""
    if math.prod(len(histories) for histories in several) > _MOST_PAIRS:
        # Each charge is counted at its largest count of any example: no combination has more.
        several = [[_largest(histories)] for histories in several]
    for combination in itertools.product(*several):
        yield _sum_of(*combination)


def _largest(histories: list[CountedCharges]) -> CountedCharges:
    """Returns a history that costs at least as much as each of these in any composition."""
    charges = [charge for history in histories for charge, _ in history]
    if charges and all(charge.delta == 0.0 and math.isfinite(charge.epsilon) for charge in charges):
        total = max(
            math.fsum(charge.epsilon * count for charge, count in history) for history in histories
        )
        notes = dict.fromkeys(note for charge in charges for note in charge.assumptions)
        pure = Charge(total, 0.0, EventFields.randomized_response(total), tuple(notes))
        return ((pure, 1),)
    most: Counter[Charge] = Counter()
    for history in histories:
        most |= Counter(dict(history))
    return tuple(most.items())


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
