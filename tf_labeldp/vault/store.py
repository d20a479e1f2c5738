"""The folder of a ledger: records are written whole or not at all, and checked when read.

Layout of a store::

    header.json            format, label set, people, budget, number of labels, classes or range
    PRIVATE-fingerprint    salted digest of the true labels; for the label holder alone
    records/000000         one file per record: its digest, its fields, and its arrays
    last-record            the number of records, the digest of the last, and where the store is
    labels.key             the secret of keyed draws, and nothing else
    private-sums/          exact sums that wait for their noise
    networks/, stages/     files of learners, for a run that resumes
    .reserved-*            locks of running processes that have reserved uses

One atomic link publishes a record before its output is returned: a process that is killed leaves a
whole, charged record, or nothing. Without hard links, exclusive creation claims the name, and the
record replaces the empty file; one killed in between leaves the name to the next one. The digest of
a record covers the digest of the record before it, and ``last-record`` covers the last record, so
that a removed or replaced record is detected. A torn ``last-record`` is written again.
``last-record`` has the inode number and the time of birth of the folder and of itself. A copy and a
restored backup have others, and are refused until ``confirm_move``: two copies would spend one
budget twice. A reboot, another machine with the same disk, or another path change neither. A disk
that was set back as a whole cannot be detected, nor a copy on a file system whose numbers change
with each mount.
Processes that share a store lock it from reading new records to writing their own. A
``ReleaseKey`` without a vault has its own store, without labels, fingerprint and budget.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import pathlib
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._version import __version__
from tf_labeldp.accounting import LabelSet, PrivacyBudget, Receipt, ReceiptError
from tf_labeldp.vault.files import (
    LabelStoreError,
    PlainFile,
    check_private,
    damaged,
    has_content,
    identity_of,
    is_same_file,
    make_private,
    not_written,
    open_plain,
    read_json,
    tighten,
)
from tf_labeldp.vault.records import (
    FORMAT,
    KEY_FILE,
    Arrays,
    Arrival,
    Record,
    SealedFields,
    fingerprint_of,
    read_key,
)

SUMS = "private-sums"
"""The folder of exact sums that wait for their noise."""
_FINGERPRINT = "PRIVATE-fingerprint"
_LOCK = ".lock"
_RECORDS, _LAST = "records", "last-record"
_FOLDERS = (_RECORDS, SUMS, "networks", "stages")
_LINE = re.compile(rb"(\d{10}) ([ 0-9a-f]{64})(?: (-|\d+(?:\.\d+){3}))?\n")
"""The content of ``last-record``: the number of records, the last digest, and the place. 0.3 wrote
no place."""
_PROJECT = "project.json"
_FEW = 20
"""Fewer labels may well equal those of other examples."""
_HOLDER = ".reserved-"
"""The prefix of the lock files of processes with a reservation."""
_OF_0_2, _OLDEST = 2, 3
"""The format of a store of 0.2, and the oldest that is read."""
_RECORD_FORMAT = 4
"""The format of records. 0.3 wrote 3, and refuses 4: it would spend what is reserved, and call
receipts with the fields of a plan damaged."""
_RECORD = {"format", "version", "number", *Record.PLAIN} | {
    *("receipt", "budget", "made_of", "weights", "arrays")
}
"""Fields of a record."""
_NEEDED = {"label_set", "people", "num_labels"}
_KINDS = {"num_classes", "range", "labels_in_row"}
"""Fields of the kinds of labels, of which the header of a vault has one."""
_HEADER: dict[str, Any] = {
    "label_set": str,
    "people": (str, type(None)),
    "num_labels": int,
    "budget": list,
    "arrivals": list,
    "key": (str, type(None)),
    "project": (str, type(None)),
    "forgotten": dict,
    "moved": list,
    "stored": bool,
    "users": str,
}
"""Fields of a header with the types of their values."""
_NAME_OF_HOLDER = re.compile("[0-9a-f]{32}")
_ERASED = (
    "PRIVATE-*",
    f"{KEY_FILE}*",
    "ids-digest",
    SUMS,
    "networks",
    "stages",
    ".*.tmp",
    f"{_HOLDER}*",
    "draws",
    "charges",
    "weights",
)
"""Files that ``forget`` erases, with the arrays of all records; others are left untouched. The last
three are of 0.2: an upgrade by 0.3 that was killed leaves them."""
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
"""Names of the temporary files of ``PlainFile``; a killed process may leave one behind."""
_NO_LOCKS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOLCK, errno.ENOSYS)
"""Errors of a file system without locks, or a read-only one: ``PlainFile`` detects collisions."""


class LabelStore:
    """Reads and writes one store folder; ``in_project`` shares a budget with its neighbours."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        in_project: bool | None = None,
        read_only: bool = False,
    ) -> None:
        self.path = pathlib.Path(path).expanduser().absolute()
        self.read_only = read_only
        self._records = os.fspath(self.path / _RECORDS)
        self._asked_in_project = in_project
        self._digests: list[str] = []  # the name of the label set, then those of the read records
        self._receipts: list[Receipt | None] = []  # of the read records
        self._numbers: dict[str, int] = {}  # record numbers by receipt id
        self._unread: list[Record] = []  # that were read, and not returned
        self._label_set: str | None = None
        self._is_alone = False  # whether this process has the lock, in its turn
        self._may_be_moved = False  # whether the owner has confirmed that no other copy is used
        self._arrivals: list[tuple[dict[str, Any], Arrival]] = []  # as the header had them
        self.num_labels = 0  # as the header had it at the last reading of records
        self.is_forgotten = False  # as the header had it, too

    def exists(self) -> bool:
        """Returns whether the folder has a store."""
        return has_content(self.path / "header.json")

    def check(
        self, labels: np.ndarray, rows: np.ndarray, kind: dict[str, Any], people: str | None
    ) -> None:
        """Raises unless the store has these labels and settings; changes nothing.

        ``rows`` are the examples with a label. Arrivals that came last may be missing.
        """
        header = self.header()
        _check_not_forgotten(self.path, header)
        arrivals = self.arrivals(len(labels), rows)
        wanted = {"num_labels": len(labels), **kind, **({"people": people} if people else {})}
        if arrivals:
            wanted["num_labels"] = header["num_labels"]
        others = {"format", "label_set", "budget", "digest", "key", "project", "people"}
        others |= {"arrivals", "moved"}
        names = sorted({*wanted, *(set(header) - others)})
        differing = [name for name in names if header.get(name) != wanted.get(name)]
        if differing == ["num_labels"]:
            number = header["num_labels"]
            advice = (
                "Open it with its own examples, and add new ones with labels.extend"
                if len(labels) > number
                else "Give all of them; examples without a label yet are named in unlabelled="
            )
            raise LabelStoreError(
                f"expected the {number} examples of the store {self.path}, got {len(labels)}. "
                f"{advice}."
            )
        if differing:
            old, new = ({name: of.get(name) for name in differing} for of in (header, wanted))
            raise LabelStoreError(
                f"The store {self.path} was made with other settings: {', '.join(differing)} "
                f"differ (expected {old}, got {new}). Open it with those settings, or give a new "
                "path: its uses of the same labels are added by hand."
            )
        if not arrivals:
            raise LabelStoreError(
                f"expected labels of the examples that had one when the store {self.path} was "
                f"made, got those of {len(rows)} of {len(labels)}. Name the others in unlabelled=, "
                "and give their labels to labels.extend(..., rows=...)."
            )
        salt, digests = self._fingerprints()
        for arrival, digest in zip(arrivals, digests, strict=False):
            own = labels if arrival.rows.size == len(labels) else labels[arrival.rows]
            if digest != fingerprint_of(own, salt):
                raise LabelStoreError(
                    f"The store {self.path} was made for other labels (or another order). Give the "
                    "labels it was made for, or a new path."
                )

    def arrivals(self, total: int | None = None, rows: np.ndarray | None = None) -> list[Arrival]:
        """Returns the arrivals of labels, or the first ones, whose labels these examples have.

        There are none if no such arrivals have the labels of just these examples.
        """
        header = self.header()
        everything = Arrival(header["num_labels"], np.arange(header["num_labels"]))
        listed = header.get("arrivals", [])
        known = len(self._arrivals)
        if [fields for fields, _ in self._arrivals] != listed[:known]:
            known = 0
        try:
            new = [(fields, Arrival.from_json(fields)) for fields in listed[known:]]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise damaged(self.path / "header.json") from error
        self._arrivals = [*self._arrivals[:known], *new]
        found = [arrival for _, arrival in self._arrivals] or [everything]
        if rows is None:
            return found
        has_label = np.zeros(total or 0, dtype=bool)
        has_label[rows] = True
        for number, arrival in enumerate(found, 1):
            if arrival.total > has_label.size or not has_label[arrival.rows].all():
                break
            has_label[arrival.rows] = False
            if arrival.total == total and not has_label.any():
                return found[:number]
        return []

    def extend(self, arrival: Arrival, labels: np.ndarray) -> None:
        """Adds an arrival of these labels: the header, which is written last, decides."""
        arrivals = self.arrivals()
        salt, digests = self._fingerprints()
        digest = fingerprint_of(labels, salt)
        if digest == digests[len(arrivals) - 1] and len(labels) >= _FEW:
            _validate.warn(
                f"these {len(labels)} labels equal those that came last. If they are of the same "
                "examples, do not use them: they would be drawn and charged a second time."
            )
        digests = [*digests[: len(arrivals)], digest]
        self._write_fingerprints(salt, digests)
        listed = [each.to_json() for each in (*arrivals, arrival)]
        self._replace_header(num_labels=arrival.total, arrivals=listed)

    def check_arrival(self, number: int, arrival: Arrival, labels: np.ndarray) -> None:
        """Raises unless arrival ``number`` of the store has these examples and labels."""
        salt, digests = self._fingerprints()
        stored = self.arrivals()[number]
        same = stored.has(arrival.total, arrival.rows)
        if not same or digests[number] != fingerprint_of(labels, salt):
            raise LabelStoreError(
                f"The store {self.path} has {stored.rows.size} labels that came after the first "
                f"{number} of its arrivals, and got {arrival.rows.size} others. Give all labels of "
                "the store to PrivateLabels, or to labels.extend in the order in which they came."
            )

    def _fingerprints(self) -> tuple[str, list[str]]:
        """Returns the salt, and the digest of the labels of each arrival."""
        path = self.path / _FINGERPRINT
        if not has_content(path):
            raise LabelStoreError(
                f"{path} is missing, so the labels can't be compared with the store's. Restore it "
                "from a backup, or start a new store."
            )
        stored = read_json(path)
        salt = str(stored.get("salt"))
        digests = [str(digest) for digest in (stored.get("digest"), *stored.get("later", []))]
        is_whole = all(re.fullmatch("[0-9a-f]{128}", digest) for digest in digests)
        if not (re.fullmatch("[0-9a-f]{64}", salt) and is_whole):
            raise damaged(path)
        if len(digests) < len(self.arrivals()):
            raise damaged(path)
        return salt, digests

    def _write_fingerprints(self, salt: str, digests: list[str]) -> None:
        content = {"salt": salt, "digest": digests[0]}
        later = {"later": digests[1:]} if digests[1:] else {}
        text = json.dumps({**content, **later}, indent=2)
        self._publish(_FINGERPRINT, text.encode(), replace=True)

    def create_for(
        self,
        labels: np.ndarray,
        rows: np.ndarray,
        people: str | None,
        budget: PrivacyBudget,
        **settings: Any,
    ) -> None:
        """Creates the store of these labels, with a salted fingerprint of them.

        ``rows`` are the examples with a label.
        """
        salt = secrets.token_hex(32)
        known = labels if rows.size == len(labels) else labels[rows]
        self._write_fingerprints(salt, [fingerprint_of(known, salt)])
        label_set = LabelSet.new(len(labels), people, stored=True)
        if rows.size < len(labels):
            settings["arrivals"] = [Arrival(len(labels), rows).to_json()]
        self.create(label_set, budget=[budget.epsilon, budget.delta], **settings)

    def create(self, label_set: LabelSet, **settings: Any) -> None:
        """Makes an empty store of a label set, in an existing folder."""
        header = {
            "format": FORMAT,
            "label_set": label_set.name,
            "people": label_set.people,
            "num_labels": label_set.size,
            **settings,
        }
        make_private(self.path / _RECORDS)
        self._digests = [label_set.name]
        self._write_last()
        try:
            self._publish("header.json", SealedFields(header).to_bytes())
        except FileExistsError:
            raise LabelStoreError(
                f"Another process is making the store {self.path} now. Open it again."
            ) from None

    def check_exists(self) -> None:
        """Raises if the folder has no store."""
        if not self.exists():
            raise LabelStoreError(
                f"There is no label store in {self.path} (no header.json). Give the folder of "
                "PrivateLabels(..., store=) or --store."
            )

    def look(self) -> tuple[LabelSet, PrivacyBudget]:
        """Returns the label set and the budget of a store; raises if there is none."""
        self.check_exists()
        header = self.header()
        if "budget" not in header:
            raise LabelStoreError(
                f"{self.path} is the ledger of a key without a vault, which has no budget. "
                "scale.ReleaseKey(path).guarantee() returns its statement."
            )
        try:
            return self.label_set(), PrivacyBudget(*header["budget"])
        except (TypeError, ValueError) as error:
            raise damaged(self.path / "header.json") from error

    def label_set(self) -> LabelSet:
        """Returns the label set; from now on a store that replaces this one is refused."""
        header = self.header()
        self._label_set = header["label_set"]
        name, size, people = header["label_set"], header["num_labels"], header["people"]
        return LabelSet(name, size, people, stored=header.get("stored", True))

    @property
    def in_project(self) -> bool:
        """Whether the stores in the folder around this one share a budget with it."""
        if not self.exists():
            asked = self._asked_in_project
            return (self.path.parent / _PROJECT).exists() if asked is None else asked
        is_member = self.header().get("project") is not None
        if self._asked_in_project not in (None, is_member):
            raise LabelStoreError(
                f"The store {self.path} was made {'in' if is_member else 'outside'} a project. "
                "Leave project= out, or give a new path."
            )
        return is_member

    def forget(self, elsewhere: Sequence[tuple[str, str]], time: str, actor: str) -> list[str]:
        """Erases everything except receipts; called within ``locked``.

        ``elsewhere`` are releases with the files of their exact sums, which are erased if they have
        the name that ``ReleaseKey`` gives them.

        A process that is killed here leaves the store whole or forgotten, and a second call
        completes the first. Returns the other files, and places that were not erased.
        """
        if "forgotten" not in self.header():
            self._replace_header(forgotten={"time": time, "actor": actor})
        for pattern in _ERASED:
            for path in self.path.glob(pattern):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        for path in (self.path / _RECORDS).iterdir():
            if _TEMPORARY.fullmatch(path.name):
                path.unlink()
                continue
            fields, _, arrays = PlainFile(path).read(None).partition(b"\n")
            if arrays:
                PlainFile(path).write(fields + b"\n", replace=True)
        left = []
        for release, place in elsewhere:
            # Records may come from someone else: no other file is deleted.
            file = pathlib.Path(place)
            if "://" in place or file.name != f"{release}.{SUMS}.npz" or file.is_symlink():
                left.append(place)
            else:
                file.unlink(missing_ok=True)
        kept = ("header.json", _RECORDS, _LAST, _LOCK)
        return left + sorted(path.name for path in self.path.iterdir() if path.name not in kept)

    @_validate.clears_frames
    def bind_key(self, secret: bytes) -> None:
        """Binds the store to this key for good; raises if it is bound to another key."""
        digest = hashlib.sha256(b"labeldp-key" + secret).hexdigest()
        bound = self.header().get("key")
        if bound is None:
            self._replace_header(key=digest)
        elif bound != digest:
            raise LabelStoreError(
                f"the key of {self.path} is new, or the key of other labels. Restore the original "
                "file: another key would draw every label a second time."
            )

    def has_key(self) -> bool:
        """Returns whether draws of the store are keyed."""
        return self.header().get("key") is not None

    @contextlib.contextmanager
    def locked(self, check: Callable[[], None] | None = None) -> Iterator[None]:
        """Locks out other processes; ``check`` may refuse the store before any change in it."""
        if self.read_only:  # Readers leave no trace, so they take no lock.
            yield
            return
        if self._label_set is None:
            self._make_folder()
        self._check_still_there()
        with self._lock() as is_alone:
            self._is_alone = is_alone
            if self._label_set is None and is_alone:
                for name in ("header.json", _FINGERPRINT, KEY_FILE):
                    _remove_claim(self.path / name)
            if self._label_set is None and self.exists():
                if check is not None:
                    check()
                self._finish_interrupted_writes(is_alone)
            self._check_still_there()
            yield

    @contextlib.contextmanager
    def _lock(self) -> Iterator[bool]:
        folder = self.path.parent if self.in_project else self.path
        if folder != self.path:
            check_private(folder, follow=True)
        PlainFile(folder / _LOCK).check_lock()
        lock = _lock_of(folder / _LOCK, os.getpid())
        try:
            lock.acquire()
        except (NotImplementedError, OSError) as error:
            number = error.errno if isinstance(error, OSError) else errno.ENOSYS
            if number not in _NO_LOCKS:
                raise not_written(folder / _LOCK, error) from None  # type: ignore[arg-type]
            if number in (errno.ENOLCK, errno.ENOSYS) and folder != self.path:
                # Two stores write records of two names, so no collision shows.
                raise LabelStoreError(
                    f"expected file locks in {folder}, whose stores share a budget, got a file "
                    "system without them. Move the project to a local disk."
                ) from None
        try:
            yield lock.is_locked
        finally:
            lock.release()

    def hold(self, holder: str) -> Any:
        """Returns a lock of this name, which is free when this process ends; None without locks."""
        lock = self._lock_of(holder)
        try:
            lock.acquire()
        except (NotImplementedError, OSError):
            with self._explained(self._holder_file(holder)):
                PlainFile(self._holder_file(holder)).write(b"")
            return None
        return lock

    def is_held(self, holder: str) -> bool | None:
        """Returns whether a running process holds the lock of this name; None without locks."""
        import filelock

        if not os.path.lexists(self._holder_file(holder)):
            return False
        PlainFile(self._holder_file(holder)).check_lock()
        lock = self._lock_of(holder)
        try:
            lock.acquire()
        except filelock.Timeout:
            return True
        except (NotImplementedError, OSError):
            return None
        lock.release()
        return False

    def remove_holder(self, holder: str) -> None:
        """Removes the file of a lock whose process has ended."""
        with contextlib.suppress(OSError):
            self._holder_file(holder).unlink()

    def _holder_file(self, holder: str) -> pathlib.Path:
        return self.path / f"{_HOLDER}{holder}"

    def _lock_of(self, holder: str) -> Any:
        import filelock

        path = self._holder_file(holder)
        return filelock.FileLock(path, timeout=0, mode=0o600, thread_local=False)

    def _finish_interrupted_writes(self, is_alone: bool) -> None:
        """Completes what a killed process began."""
        if is_alone:  # No live process is writing these files.
            for name in ("header.json", _FINGERPRINT, KEY_FILE, _LAST, f"{_RECORDS}/"):
                folder, _, begins = name.rpartition("/")
                for path in (self.path / folder).glob(f".{begins}*.tmp"):
                    with contextlib.suppress(OSError):
                        path.unlink()
            for path in self.path.glob(f"{_HOLDER}*"):
                holder = path.name.removeprefix(_HOLDER)
                if self.is_held(holder) is False:
                    self.remove_holder(holder)
        key = self.path / KEY_FILE
        if key.exists() and "forgotten" not in self.header():
            self.bind_key(read_key(key))

    def new_records(self) -> list[Record]:
        """Returns the records since the last call; called within ``locked``."""
        header = self.header()
        self.num_labels = header["num_labels"]
        self.is_forgotten = "forgotten" in header
        # This file is read first: records may be ahead of it, after a kill or during a write.
        is_first = not self._digests
        content, place = self._read_last(is_first)
        self._digests = self._digests or [header["label_set"]]
        self._read_on(self.is_forgotten)
        line = _LINE.fullmatch(content)
        number = int(line[1]) if line else len(self._receipts)
        is_torn = self._is_torn(content)
        if number > len(self._receipts) and not is_torn:
            if os.path.lexists(path := f"{self._records}/{len(self._receipts):06d}"):
                raise damaged(path)
            raise LabelStoreError(
                f"The store {self.path} lacks record {len(self._receipts)}, of {number}, and with "
                "it a charge. Restore this file from a copy; an older copy of the whole folder "
                "lacks later charges."
            )
        if not is_torn and (line is None or line[2] != self._line(number)[11:]):
            raise damaged(self.path / _LAST)
        if self.read_only:
            return self._taken()
        written = None if is_torn or line is None else line[3]
        if is_first and written is not None:
            self._check_place(written.decode(), place)
        if number < len(self._receipts) or written is None:
            # On a read-only disk nothing is drawn either.
            with contextlib.suppress(LabelStoreError):
                if header["format"] != FORMAT:
                    self._replace_header(format=FORMAT)
                self._write_last()
        return self._taken()

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

    def _line(self, number: int) -> bytes:
        """Returns the line of ``last-record`` with this number of records, without its place."""
        digest = self._digests[number] if number else "0" * 64
        return f"{number:010d} {digest:>64}".encode()

    def _check_place(self, written: str, place: str) -> None:
        """Raises if the file was written in another folder, or as another file."""
        if self._may_be_moved or not os.access(self.path, os.W_OK):
            return
        old, new = (
            [] if text == "-" else list(map(int, text.split("."))) for text in (written, place)
        )
        pairs = [] if old == new == [] else [(old[:2], new[:2]), (old[2:], new[2:])]
        if len(old) != len(new) or not all(is_same_file(*pair) for pair in pairs):
            raise LabelStoreError(
                f"expected the store {self.path} where it was last used, got a copy, a restored "
                "backup, or a store that was moved to another disk. Two copies would spend its "
                "budget twice, and a backup lacks later charges. If this is the newest copy and no "
                f"other is used, run once: tf-labeldp confirm-move {self.path}"
            )

    def confirm_move(self, time: str, actor: str) -> None:
        """Accepts the store where it is; called within ``locked``."""
        self._may_be_moved = True
        self.new_records()
        moves = self.header().get("moved", [])
        self._replace_header(format=FORMAT, moved=[*moves, {"time": time, "actor": actor}])
        self._write_last()

    def _read_on(self, forgotten: bool) -> None:
        while (record := self._read_record(len(self._receipts), forgotten)) is not None:
            self._receipts.append(record.receipt)
            if record.receipt is not None:
                self._numbers.setdefault(record.receipt.id, record.number)
            self._unread.append(record)

    def _taken(self) -> list[Record]:
        """Returns the records that were read, also before a check that failed, and not returned."""
        records, self._unread = self._unread, []
        return records

    def append(self, record: Record) -> list[Record]:
        """Writes a record to disk after those that were read, and returns it as it is read."""
        number = len(self._receipts)
        arrays = {name: record.arrays[name] for name in record.array_names}
        content = Arrays(arrays).to_bytes(compressed="indices" in arrays) if arrays else b""
        budget = record.budget
        fields = {
            "format": _RECORD_FORMAT,
            "version": __version__,
            "number": number,
            **record.plain_fields(),
            "receipt": None if record.receipt is None else record.receipt.to_json(),
            "budget": None if budget is None else [budget.epsilon, budget.delta],
            "made_of": self._shortened(record.made_of),
            "weights": list(record.weights),
            "arrays": [_digest(content), *arrays] if arrays else [],
        }
        text = json.dumps(
            {name: value for name, value in fields.items() if value not in (None, [])}
        )
        digest = _digest(f"{self._digests[-1]}{text}".encode())
        path = self.path / _RECORDS / f"{number:06d}"
        if self._is_alone:
            _remove_claim(path)
        try:
            self._publish(f"{_RECORDS}/{number:06d}", f"{digest} {text}\n".encode() + content)
        except FileExistsError:
            if not has_content(path):
                raise LabelStoreError(
                    f"Another process is writing record {number} to the store {self.path}, or was "
                    "killed while it did. Nothing was returned here. Try again; if no process uses "
                    f"the store, remove the empty file {path}."
                ) from None
            raise LabelStoreError(
                f"Another process has written record {number} to the store {self.path} since this "
                "process read it. Nothing was returned here. Open the store again."
            ) from None
        self._read_on(False)
        # Without this file the records are whole, so a full disk keeps no draw back.
        with contextlib.suppress(LabelStoreError):
            self._write_last()
        return self._taken()

    def _read_record(self, number: int, forgotten: bool) -> Record | None:
        """Returns a record, whose arrays are read at their first use; None if there is none."""
        # Every turn looks for a next record, and pathlib would take most of its time.
        path = f"{self._records}/{number:06d}"
        try:
            line, content = _read_parts(path)
        except FileNotFoundError:
            return None
        if not line:  # A process has claimed the name, and not written the record yet.
            return None
        digest, _, text = line.rstrip(b"\n").partition(b" ")
        try:
            fields = _validate.json_of(text)
            if fields["format"] > _RECORD_FORMAT:
                raise _unknown_format(path, fields["format"], _RECORD_FORMAT)
            if not line.endswith(b"\n") or fields["number"] != number:
                raise damaged(path)
            if digest.decode() != _digest(self._digests[-1].encode() + text):
                raise damaged(path)
            if unknown := sorted(fields.keys() - _RECORD):
                field = f"the field {unknown[0]!r}"
                raise ReceiptError.of_newer("this record was", field, fields["version"])
            expected, *names = fields.get("arrays") or [""]
            if not (forgotten and not content) and _digest(content) != expected:
                raise damaged(path)
            holder = fields.get("reservation", {}).get("holder", "0" * 32)
            if not _NAME_OF_HOLDER.fullmatch(holder):  # It becomes the name of a file.
                raise damaged(path)
            receipt, budget = fields.get("receipt"), fields.get("budget")
            self._digests.append(digest.decode())
            return Record(
                number,
                receipt=None if receipt is None else self._receipt(receipt),
                budget=None if budget is None else PrivacyBudget(*budget),
                made_of=self._lengthened(fields.get("made_of", [])),
                weights=tuple(fields.get("weights", ())),
                array_names=tuple(names),
                load=functools.partial(_read_arrays, path, expected),
                **{name: fields[name] for name in Record.PLAIN if name in fields},
            )
        except LabelStoreError:
            raise
        except Exception as error:
            if isinstance(error, ReceiptError) and error.is_newer:
                raise LabelStoreError(f"{path}: {error} Nothing was changed.") from error
            # Damaged fields raise errors of many types.
            raise damaged(path) from error

    def _shortened(self, receipts: Sequence[Receipt]) -> list[Any]:
        """Returns receipts for JSON, with ranges of record numbers for receipts of records."""
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
        return Receipt.from_json(fields, num_labels=self.num_labels)

    def _write_last(self) -> None:
        """Writes the number of records: if the write is lost, the records replace it."""
        line = self._line(len(self._receipts))

        def content(descriptor: int) -> bytes:
            return line + b" " + self._place(descriptor).encode() + b"\n"

        self._publish(_LAST, content, replace=True, durable=False)

    def _read_last(self, with_place: bool) -> tuple[bytes, str]:
        """Returns the content of ``last-record``, and the place of the folder and this file."""
        try:
            with os.fdopen(open_plain(self.path / _LAST), "rb") as file:
                return file.read(1024), self._place(file.fileno()) if with_place else ""
        except OSError as error:
            raise damaged(self.path / _LAST) from error

    def _place(self, descriptor: int) -> str:
        """Returns identities of the folder and of an open file in it, which copies do not share."""
        folder, own = identity_of(self.path), identity_of(descriptor)
        return "-" if folder is None or own is None else ".".join(map(str, folder + own))

    def _publish(self, name: str, content: bytes | Callable[[int], bytes], **how: bool) -> None:
        with self._explained(self.path / name):
            PlainFile(self.path / name).write(content, **how)

    @contextlib.contextmanager
    def _explained(self, path: pathlib.Path) -> Iterator[None]:
        try:
            yield
        except FileExistsError:
            raise
        except OSError as error:
            raise not_written(path, error) from None

    def _check_still_there(self) -> None:
        if self._label_set is None:
            return
        header = self.header() if self.exists() else {}
        _check_not_forgotten(self.path, header)
        if header.get("label_set") != self._label_set:
            raise LabelStoreError(
                f"The store {self.path} was moved, removed or replaced since it was opened, and "
                "charges would be lost. Put it back, or make another PrivateLabels."
            )

    def _make_folder(self) -> None:
        """Makes the folder, or raises if others may write into it, or it is another folder."""
        if os.path.isdir(self.path):
            check_private(self.path, follow=True)
            for name in _FOLDERS:
                tighten(self.path / name)
        elif not os.path.lexists(self.path):
            make_private(self.path)
        if self.exists():
            return
        names = {p.name for p in self.path.iterdir()} if self.path.is_dir() else {"a file"}
        # An interrupted creation leaves these and temporary files: the header is written last.
        leftovers = {_RECORDS, _LAST, _FINGERPRINT, _LOCK, "header.json", "draws", "charges"}
        names = {name for name in names if not _TEMPORARY.fullmatch(name)}
        has_records = any(any(self.path.glob(f"{folder}/[0-9]*")) for folder in (_RECORDS, "draws"))
        if has_records or not names <= leftovers:
            raise LabelStoreError(
                f"{self.path} exists and is not a label store (no header.json). Give the path of a "
                "new or empty folder."
            )

    def header(self) -> dict[str, Any]:
        """Returns the header, or raises for a store of another format."""
        path = self.path / "header.json"
        header = read_json(path)
        if header.get("format") not in range(_OLDEST, FORMAT + 1):
            raise _unknown_format(path, header.get("format"), FORMAT)
        SealedFields(header).check(path, "it has the budget and the label set")
        # A seal that fits can be made for any values.
        is_whole = all(
            isinstance(header.get(name), kinds) for name, kinds in _HEADER.items() if name in header
        )
        has_kind = "budget" not in header or not _KINDS.isdisjoint(header)
        has_all = is_whole and has_kind and header.keys() >= _NEEDED
        if not has_all or not 0 <= header["num_labels"] < 1 << 48:
            raise damaged(path)
        return header

    def _replace_header(self, **fields: Any) -> None:
        header = {**self.header(), **fields}
        self._publish("header.json", SealedFields(header).to_bytes(), replace=True)


class Project:
    """The stores in one folder that share one budget, since a person may be in several of them.

    ``project.json`` lists the stores, so that a missing store is detected; the header of each store
    has the random name of the project, so that a moved store is refused. All share one lock.
    """

    def __init__(self, store: pathlib.Path) -> None:
        self._store, self._path = store, store.parent / _PROJECT
        header = _header_in(store)
        if not header and not self._path.exists():
            others = map(_header_in, store.parent.glob("*"))
            if not any(header.get("project") for header in others):
                self._write({"name": secrets.token_hex(16), "stores": {}})
        if not self._path.exists():
            raise LabelStoreError(
                f"The store {store} belongs to a project, and {self._path} is missing, so the "
                "spending of other stores is unknown. Put the store back into the folder of its "
                "project, or restore the file from a backup."
            )
        self.name: str = self._read()["name"]
        if header.get("project", self.name) != self.name:
            raise LabelStoreError(
                f"The store {store} belongs to another project than {self._path}. Put it back into "
                "the folder of its project."
            )

    def other_stores(self) -> list[pathlib.Path]:
        """Returns the folders of the other stores, or raises if one is missing."""
        paths = []
        for folder, label_set in self._read()["stores"].items():
            path = self._store.parent / folder
            if _header_in(path).get("label_set") != label_set:
                raise LabelStoreError(
                    f"The project {self._path.parent} lacks its store {folder!r}, and with it "
                    "charges. Restore the folder from its newest copy. (tf-labeldp forget erases "
                    "labels and keeps charges.)"
                )
            if path != self._store:
                paths.append(path)
        return paths

    def join(self, label_set: str) -> None:
        """Adds the store to the list of the project."""
        content = self._read()
        if content["stores"].get(self._store.name) != label_set:
            content["stores"][self._store.name] = label_set
            self._write(content)

    def _read(self) -> dict[str, Any]:
        content = read_json(self._path)
        SealedFields(content).check(self._path, "it lists the stores whose spending adds up")
        return content

    def _write(self, content: dict[str, Any]) -> None:
        PlainFile(self._path).write(SealedFields(content).to_bytes(), replace=True)


@functools.cache
def _lock_of(path: pathlib.Path, process: int) -> Any:
    # The stores of a project share a lock, which a turn may enter again; a fork has its own lock.
    import filelock

    return filelock.FileLock(path, mode=0o600)


def _remove_claim(path: pathlib.Path) -> None:
    """Removes the empty file of a process that was killed within ``PlainFile.take``."""
    if os.path.lexists(path) and not has_content(path):
        with contextlib.suppress(OSError):  # The claim stays, and its name is refused.
            path.unlink()


def _header_in(store: pathlib.Path) -> dict[str, Any]:
    path = store / "header.json"
    return read_json(path) if has_content(path) else {}


def _read_parts(path: str) -> tuple[bytes, bytes]:
    with os.fdopen(open_plain(path), "rb") as file:
        return file.readline(), file.read()


def _read_arrays(path: str, expected: str) -> dict[str, np.ndarray]:
    """Returns the arrays of a record; a forgotten store has none."""
    try:
        content = _read_parts(path)[1]
    except OSError as error:
        raise damaged(path) from error
    if content and _digest(content) != expected:
        raise damaged(path)
    return Arrays.from_bytes(content) if content else {}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if content else ""


def _check_not_forgotten(path: pathlib.Path, header: dict[str, Any]) -> None:
    if (forgotten := header.get("forgotten")) is not None:
        raise LabelStoreError(
            f"The store {path} was forgotten on {forgotten['time']} by {forgotten['actor']}: its "
            "draws and keys are erased, so nothing can be drawn any more. tf-labeldp report shows "
            "the spending."
        )


def _unknown_format(path: str | os.PathLike[str], version: Any, newest: int) -> LabelStoreError:
    advice = "Use the version of tf-labeldp that wrote it (0.1 wrote format 1)."
    if isinstance(version, int) and version > newest:
        advice = "A newer version of tf-labeldp wrote it: update tf-labeldp."
    elif version == _OF_0_2:
        advice = "0.2 wrote it: open it with 0.3 once, which brings it to format 3."
    return LabelStoreError(
        f"{path} has format {version}, and tf-labeldp {__version__} reads formats {_OLDEST} to "
        f"{newest}. Nothing was changed. {advice}"
    )
