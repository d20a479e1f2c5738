"""Receipts: one use of a label set with its cost, as a value and in files."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import getpass
import hashlib
import json
import math
import os
import secrets
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._version import __version__
from tf_labeldp.accounting._annotations import Setting
from tf_labeldp.accounting._guarantee import (
    RELATION_REPLACE,
    UNITS,
    Assumption,
    PrivacyGuarantee,
)
from tf_labeldp.accounting.budget import Charge
from tf_labeldp.accounting.events import EventFields

_OMITTED = {"use": "", "plan": "", "plan_uses": 1, "budget_epsilon": None}
"""Fields that JSON omits at these values, so that files of earlier versions keep their digests."""
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
_LONGEST_NAME, _LONGEST_TEXT = 200, 200_000
"""Most characters of an id and of a text in a file, such as a mechanism with all its bins."""
_YEARS = range(1970, 3000)
"""Years of receipts. Reports sort and plot times: a ledger with any other text would have none."""


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
        # A digest would cover other bits after the last example, and a file could carry data there.
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
        event = EventFields.approximate(epsilon, delta)
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
        event = EventFields.NOT_PRIVATE
        if math.isfinite(stated.epsilon):
            event = EventFields.approximate(stated.epsilon, stated.delta)
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
    def is_of_mechanism(self) -> bool:
        """Whether a mechanism read the labels, so that ``what`` is in no author's words."""
        return self.kind in ("draw", "release", "failed")

    @property
    def num_examples(self) -> int:
        """The number of examples that the receipt is about."""
        return self.labels.size if self.examples is None else self.examples.count

    @property
    def has_cost(self) -> bool:
        """Whether the cost of the use is known and above zero."""
        return self.kind != "unknown" and self.charge.event_fields != EventFields.NONE

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


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
