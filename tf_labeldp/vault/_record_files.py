"""The files of a store's records: a chain of digests, whose end ``last-record`` has."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._version import __version__
from tf_labeldp.accounting import PrivacyBudget, Receipt, ReceiptError
from tf_labeldp.vault.files import (
    LabelStoreError,
    PlainFile,
    damaged,
    has_content,
    identity_of,
    is_same_file,
    is_temporary,
    make_private,
    open_plain,
    remove_claim,
)
from tf_labeldp.vault.records import Arrays, BudgetRaise, Output, Record, check_format

_FORMAT = 4
"""The format of records. 0.3 wrote 3, and refuses 4: it would spend what is reserved, and call
receipts with the fields of a plan damaged."""
_LINE = re.compile(rb"(\d{10}) ([ 0-9a-f]{64})(?: (-|\d+(?:\.\d+){3}))?\n")
"""The content of ``last-record``: the number of records, the last digest, and the place. 0.3 wrote
no place."""
_FIELDS = {
    *("format", "version", "number", "reason", "time", "actor", "mechanism", "public_digest"),
    *("release", "reservation", "receipt", "budget", "made_of", "weights", "arrays"),
}
"""All fields of the line of a record."""
_NAME_OF_HOLDER = re.compile("[0-9a-f]{32}")


class RecordFiles:
    """The records of one store, in order: those on disk that this process has read, and new ones.

    A record is one file, whose first line is the digest and the fields, and whose rest is the
    arrays. The digest covers the fields and the digest of the record before, so that one that is
    replaced or removed breaks the chain; ``last-record`` shows that its end is missing.
    """

    FOLDER, LAST = "records", "last-record"

    def __init__(self, store: pathlib.Path) -> None:
        self._store = store
        self._folder = os.fspath(store / self.FOLDER)
        self._digests: list[str] = []  # the name of the label set, then those of the read records
        self._receipts: list[Receipt | None] = []  # of the read records
        self._numbers: dict[str, int] = {}  # record numbers by receipt id
        self._unread: list[Record] = []  # that were read, and not returned
        self._num_labels = 0  # as the header had it at the last reading

    def begin(self, label_set: str) -> None:
        """Makes the folder, and the end of a chain without records."""
        make_private(self._store / self.FOLDER)
        self._digests = [label_set]
        self.write_last()

    def read(self, header: dict[str, Any], *, check_place: bool) -> bool:
        """Reads the records that came since the last call.

        Returns whether ``last-record`` is to be written again, since it is torn, of 0.3, or behind.
        """
        self._num_labels = header["num_labels"]
        # This file is read first: records may be ahead of it, after a kill or during a write.
        is_first = not self._digests
        content, place = self._read_last(is_first)
        self._digests = self._digests or [header["label_set"]]
        self._read_on("forgotten" in header)
        line = _LINE.fullmatch(content)
        number = int(line[1]) if line else len(self._receipts)
        is_torn = self._is_torn(content)
        if number > len(self._receipts) and not is_torn:
            if os.path.lexists(path := f"{self._folder}/{len(self._receipts):06d}"):
                raise damaged(path)
            raise LabelStoreError(
                f"The store {self._store} lacks record {len(self._receipts)}, of {number}, and "
                "with it a charge. Restore this file from a copy; an older copy of the whole "
                "folder lacks later charges."
            )
        if not is_torn and (line is None or line[2] != self._line(number)[11:]):
            raise damaged(self._store / self.LAST)
        written = None if is_torn or line is None else line[3]
        if is_first and written is not None and check_place:
            self._check_place(written.decode(), place)
        return number < len(self._receipts) or written is None

    def taken(self) -> list[Record]:
        """Returns the records that were read, also before a check that failed, and not returned."""
        records, self._unread = self._unread, []
        return records

    def append(self, record: Record, *, is_alone: bool) -> list[Record]:
        """Writes a record to disk after those that were read, and returns it as it is read.

        ``is_alone`` states that no other process writes records now.
        """
        number, output = len(self._receipts), record.output
        content = b""
        if output.names:
            arrays = Arrays({name: output.arrays[name] for name in output.names})
            content = arrays.to_bytes(compressed="indices" in arrays)
        text = json.dumps(self._fields(number, record, _digest(content)))
        digest = _digest(f"{self._digests[-1]}{text}".encode())
        path = self._store / self.FOLDER / f"{number:06d}"
        if is_alone:
            remove_claim(path)
        try:
            PlainFile(path).write_in_store(f"{digest} {text}\n".encode() + content)
        except FileExistsError:
            if not has_content(path):
                raise LabelStoreError(
                    f"Another process is writing record {number} to the store {self._store}, or "
                    "was killed while it did. Nothing was returned here. Try again; if no process "
                    f"uses the store, remove the empty file {path}."
                ) from None
            raise LabelStoreError(
                f"Another process has written record {number} to the store {self._store} since "
                "this process read it. Nothing was returned here. Open the store again."
            ) from None
        self._read_on(False)
        # Without this file the records are whole, so a full disk keeps no draw back.
        with contextlib.suppress(LabelStoreError):
            self.write_last()
        return self.taken()

    def write_last(self) -> None:
        """Writes the number of records: if the write is lost, the records replace it."""
        line = self._line(len(self._receipts))

        def content(descriptor: int) -> bytes:
            return line + b" " + self._place(descriptor).encode() + b"\n"

        PlainFile(self._store / self.LAST).write_in_store(content, replace=True, durable=False)

    def erase_arrays(self) -> None:
        """Removes the arrays of all records; the digest of a record covers its fields alone."""
        for path in (self._store / self.FOLDER).iterdir():
            if is_temporary(path.name):
                path.unlink()
                continue
            fields, _, arrays = PlainFile(path).read(None).partition(b"\n")
            if arrays:
                PlainFile(path).write(fields + b"\n", replace=True)

    def _read_on(self, forgotten: bool) -> None:
        while (record := self._read_record(len(self._receipts), forgotten)) is not None:
            self._receipts.append(record.receipt)
            if record.receipt is not None:
                self._numbers.setdefault(record.receipt.id, record.number)
            self._unread.append(record)

    def _read_record(self, number: int, forgotten: bool) -> Record | None:
        """Returns a record, whose arrays are read at their first use; None if there is none."""
        # Every turn looks for a next record, and pathlib would take most of its time.
        path = f"{self._folder}/{number:06d}"
        try:
            line, content = _parts_of(path)
        except FileNotFoundError:
            return None
        if not line:  # A process has claimed the name, and not written the record yet.
            return None
        digest, _, text = line.rstrip(b"\n").partition(b" ")
        try:
            fields = _validate.json_of(text)
            if fields["format"] > _FORMAT:
                check_format(path, fields["format"], _FORMAT)
            is_whole = line.endswith(b"\n") and fields["number"] == number
            if not is_whole or digest.decode() != _digest(self._digests[-1].encode() + text):
                raise damaged(path)
            if unknown := sorted(fields.keys() - _FIELDS):
                field = f"the field {unknown[0]!r}"
                raise ReceiptError.of_newer("this record was", field, fields["version"])
            expected, *names = fields.get("arrays") or [""]
            if not (forgotten and not content) and _digest(content) != expected:
                raise damaged(path)
            load = functools.partial(_read_arrays, path, expected)
            record = self._record(fields, tuple(names), load)
        except LabelStoreError:
            raise
        except Exception as error:
            if isinstance(error, ReceiptError) and error.is_newer:
                raise LabelStoreError(f"{path}: {error} Nothing was changed.") from error
            # Damaged fields raise errors of many types.
            raise damaged(path) from error
        self._digests.append(digest.decode())
        return record

    def _fields(self, number: int, record: Record, digest: str) -> dict[str, Any]:
        """Returns the fields of a record for JSON, without those that are empty."""
        raised, output = record.raised, record.output
        of_raise: dict[str, Any] = {}
        if raised is not None:
            of_raise = {"reason": raised.reason, "time": raised.time, "actor": raised.actor}
        fields = {
            "format": _FORMAT,
            "version": __version__,
            "number": number,
            **of_raise,
            "mechanism": output.mechanism,
            "public_digest": output.public_digest,
            "release": record.release,
            "reservation": record.reservation,
            "receipt": None if record.receipt is None else record.receipt.to_json(),
            "budget": None if raised is None else [raised.budget.epsilon, raised.budget.delta],
            "made_of": self._shortened(record.made_of),
            "weights": list(record.weights),
            "arrays": [digest, *output.names] if output.names else [],
        }
        return {name: value for name, value in fields.items() if value not in (None, "", [])}

    def _record(self, fields: dict[str, Any], names: tuple[str, ...], load: Any) -> Record:
        """Returns the record with these fields, or raises an error of any type."""
        holder = fields.get("reservation", {}).get("holder", "0" * 32)
        if not _NAME_OF_HOLDER.fullmatch(holder):  # It becomes the name of a file.
            raise ValueError("the name of a lock is wrong")
        receipt, budget, raised = fields.get("receipt"), fields.get("budget"), None
        if budget is not None:
            who = (fields.get(name, "") for name in ("reason", "time", "actor"))
            raised = BudgetRaise(PrivacyBudget(*budget), *who)
        return Record(
            fields["number"],
            receipt=None if receipt is None else self._receipt(receipt),
            made_of=self._lengthened(fields.get("made_of", [])),
            output=Output(fields.get("mechanism"), fields.get("public_digest"), names, load),
            raised=raised,
            weights=tuple(fields.get("weights", ())),
            release=fields.get("release"),
            reservation=fields.get("reservation"),
        )

    def _shortened(self, receipts: Sequence[Receipt]) -> list[Any]:
        """Returns receipts for JSON, with ranges of record numbers for receipts of records.

        A thousand draws from one prior would otherwise repeat its receipts a thousand times.
        """
        parts: list[Any] = []
        for receipt in receipts:
            number = self._numbers.get(receipt.id)
            if number is None:
                parts.append(receipt.to_json())
            elif parts and isinstance(parts[-1], list) and parts[-1][1] == number:
                parts[-1][1] += 1
            else:
                parts.append([number, number + 1])
        return parts

    def _lengthened(self, shortened: list[Any]) -> tuple[Receipt, ...]:
        receipts: list[Receipt | None] = []
        for part in shortened:
            is_range = isinstance(part, list)
            receipts += self._receipts[slice(*part)] if is_range else [self._receipt(part)]
        if None in receipts:
            raise ValueError("a range includes a record without a receipt")
        return tuple(receipts)  # type: ignore[arg-type]

    def _receipt(self, fields: dict[str, Any]) -> Receipt:
        return Receipt.from_json(fields, num_labels=self._num_labels)

    def _read_last(self, with_place: bool) -> tuple[bytes, str]:
        """Returns the content of ``last-record``, and the place of the folder and this file."""
        path = self._store / self.LAST
        try:
            with os.fdopen(open_plain(path), "rb") as file:
                return file.read(1024), self._place(file.fileno()) if with_place else ""
        except OSError as error:
            raise damaged(path) from error

    def _line(self, number: int) -> bytes:
        """Returns the line of ``last-record`` with this number of records, without its place."""
        digest = self._digests[number] if number else "0" * 64
        return f"{number:010d} {digest:>64}".encode()

    def _is_torn(self, content: bytes) -> bool:
        """Returns whether the last write of ``last-record`` was cut.

        Such a file begins as the line of the present records, and goes on with nothing, or as an
        earlier line that the write was to replace.
        """
        line = self._line(len(self._receipts))
        if _LINE.fullmatch(content) and content.startswith(line):
            return False
        pairs = enumerate(zip(line, content, strict=False))
        same = next((at for at, (a, b) in pairs if a != b), min(len(line), len(content)))
        rest = content[same:]
        if same == len(line):
            return re.fullmatch(rb"[-\d. ]*\0*", rest) is not None
        earlier = (self._line(number) + b"\n" for number in range(len(self._receipts)))
        return not rest.strip(b"\0") or any(rest == old[same:] for old in earlier)

    def _place(self, descriptor: int) -> str:
        """Returns identities of the folder and of an open file in it, which copies do not share."""
        folder, own = identity_of(self._store), identity_of(descriptor)
        return "-" if folder is None or own is None else ".".join(map(str, folder + own))

    def _check_place(self, written: str, place: str) -> None:
        """Raises if ``last-record`` was written in another folder, or as another file."""
        # A store on a read-only disk can spend nothing, wherever it is.
        if not os.access(self._store, os.W_OK):
            return
        old, new = (
            [] if text == "-" else list(map(int, text.split("."))) for text in (written, place)
        )
        pairs = [] if old == new == [] else [(old[:2], new[:2]), (old[2:], new[2:])]
        if len(old) != len(new) or not all(is_same_file(*pair) for pair in pairs):
            raise LabelStoreError(
                f"expected the store {self._store} where it was last used, got a copy, a restored "
                "backup, or a store that was moved to another disk. Two copies would spend its "
                "budget twice, and a backup lacks later charges. If this is the newest copy and no "
                f"other is used, run once: tf-labeldp confirm-move {self._store}"
            )


def _parts_of(path: str) -> tuple[bytes, bytes]:
    with os.fdopen(open_plain(path), "rb") as file:
        return file.readline(), file.read()


def _read_arrays(path: str, expected: str) -> dict[str, np.ndarray]:
    """Returns the arrays of a record; a forgotten store has none."""
    try:
        content = _parts_of(path)[1]
    except OSError as error:
        raise damaged(path) from error
    if content and _digest(content) != expected:
        raise damaged(path)
    return Arrays.from_bytes(content) if content else {}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if content else ""
