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
import dataclasses
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
from tf_labeldp.accounting import LabelSet, PrivacyBudget
from tf_labeldp.vault._locks import LOCK, Holders, locked_folder
from tf_labeldp.vault._record_files import RecordFiles
from tf_labeldp.vault.files import (
    LabelStoreError,
    PlainFile,
    check_private,
    damaged,
    has_content,
    is_temporary,
    make_private,
    read_json,
    remove_claim,
    tighten,
)
from tf_labeldp.vault.records import (
    FORMAT,
    KEY_FILE,
    Arrival,
    Record,
    SealedFields,
    check_format,
    read_key,
)

SUMS = "private-sums"
"""The folder of exact sums that wait for their noise."""
_FINGERPRINT = "PRIVATE-fingerprint"
_FOLDERS = (RecordFiles.FOLDER, SUMS, "networks", "stages")
_PROJECT = "project.json"
_FEW = 20
"""Fewer labels may well equal those of other examples."""
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
_ERASED = (
    "PRIVATE-*",
    f"{KEY_FILE}*",
    "ids-digest",
    SUMS,
    "networks",
    "stages",
    ".*.tmp",
    f"{Holders.PREFIX}*",
    "draws",
    "charges",
    "weights",
)
"""Files that ``forget`` erases, with the arrays of all records; others are left untouched. The last
three are of 0.2: an upgrade by 0.3 that was killed leaves them."""


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
        self.holders = Holders(self.path)
        self._records = RecordFiles(self.path)
        self._asked_in_project = in_project
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
        stored = self._fingerprints()
        for arrival, digest in zip(arrivals, stored.digests, strict=False):
            own = labels if arrival.rows.size == len(labels) else labels[arrival.rows]
            if digest != stored.of(own):
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
        stored = self._fingerprints()
        digest, earlier = stored.of(labels), stored.digests[: len(arrivals)]
        if digest == earlier[-1] and len(labels) >= _FEW:
            _validate.warn(
                f"these {len(labels)} labels equal those that came last. If they are of the same "
                "examples, do not use them: they would be drawn and charged a second time."
            )
        # A digest beyond the arrivals of the header is of a call that was killed: it is replaced.
        _Fingerprints(stored.salt, (*earlier, digest)).write(self.path / _FINGERPRINT)
        listed = [each.to_json() for each in (*arrivals, arrival)]
        self._replace_header(num_labels=arrival.total, arrivals=listed)

    def check_arrival(self, number: int, arrival: Arrival, labels: np.ndarray) -> None:
        """Raises unless arrival ``number`` of the store has these examples and labels."""
        stored, fingerprints = self.arrivals()[number], self._fingerprints()
        same = stored.has(arrival.total, arrival.rows)
        if not same or fingerprints.digests[number] != fingerprints.of(labels):
            raise LabelStoreError(
                f"The store {self.path} has {stored.rows.size} labels that came after the first "
                f"{number} of its arrivals, and got {arrival.rows.size} others. Give all labels of "
                "the store to PrivateLabels, or to labels.extend in the order in which they came."
            )

    def _fingerprints(self) -> _Fingerprints:
        return _Fingerprints.read(self.path / _FINGERPRINT, len(self.arrivals()))

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
        known = labels if rows.size == len(labels) else labels[rows]
        _Fingerprints.of_labels(known).write(self.path / _FINGERPRINT)
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
        self._records.begin(label_set.name)
        try:
            self._write_header(header)
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
        # The header is written first: from then on nothing can be drawn, also if this call is
        # killed, and a second call erases the rest.
        for pattern in _ERASED:
            for path in self.path.glob(pattern):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        self._records.erase_arrays()
        left = []
        for release, place in elsewhere:
            # Records may come from someone else: no other file is deleted.
            file = pathlib.Path(place)
            if "://" in place or file.name != f"{release}.{SUMS}.npz" or file.is_symlink():
                left.append(place)
            else:
                file.unlink(missing_ok=True)
        kept = ("header.json", RecordFiles.FOLDER, RecordFiles.LAST, LOCK)
        return left + sorted(path.name for path in self.path.iterdir() if path.name not in kept)

    @_validate.clears_frames
    def bind_key(self, secret: bytes) -> None:
        """Binds the store to this key for good; raises if it is bound to another key."""
        # A digest of 256 random bits reveals nothing of them, so the header need not be secret.
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
        # Readers leave no trace, so they take no lock: a record with content is whole.
        if self.read_only:
            yield
            return
        if self._label_set is None:
            self._make_folder()
        self._check_still_there()
        folder = self.path.parent if self.in_project else self.path
        if folder != self.path:
            check_private(folder, follow=True)
        with locked_folder(folder, is_shared=folder != self.path) as is_alone:
            self._is_alone = is_alone
            if self._label_set is None and is_alone:
                for name in ("header.json", _FINGERPRINT, KEY_FILE):
                    remove_claim(self.path / name)
            if self._label_set is None and self.exists():
                if check is not None:
                    check()
                self._finish_interrupted_writes(is_alone)
            self._check_still_there()
            yield

    def _finish_interrupted_writes(self, is_alone: bool) -> None:
        """Completes what a killed process began."""
        if is_alone:  # No live process is writing these files.
            names = ("header.json", _FINGERPRINT, KEY_FILE)
            for name in (*names, RecordFiles.LAST, f"{RecordFiles.FOLDER}/"):
                folder, _, begins = name.rpartition("/")
                for path in (self.path / folder).glob(f".{begins}*.tmp"):
                    with contextlib.suppress(OSError):
                        path.unlink()
            self.holders.remove_ended()
        key = self.path / KEY_FILE
        if key.exists() and "forgotten" not in self.header():
            self.bind_key(read_key(key))

    def new_records(self) -> list[Record]:
        """Returns the records since the last call; called within ``locked``."""
        header = self.header()
        self.num_labels = header["num_labels"]
        self.is_forgotten = "forgotten" in header
        check_place = not (self.read_only or self._may_be_moved)
        is_behind = self._records.read(header, check_place=check_place)
        if is_behind and not self.read_only:
            # On a read-only disk nothing is drawn either.
            with contextlib.suppress(LabelStoreError):
                if header["format"] != FORMAT:
                    self._replace_header(format=FORMAT)
                self._records.write_last()
        return self._records.taken()

    def append(self, record: Record) -> list[Record]:
        """Writes a record to disk after those that were read, and returns it as it is read."""
        return self._records.append(record, is_alone=self._is_alone)

    def confirm_move(self, time: str, actor: str) -> None:
        """Accepts the store where it is; called within ``locked``."""
        self._may_be_moved = True
        self.new_records()
        moves = self.header().get("moved", [])
        self._replace_header(format=FORMAT, moved=[*moves, {"time": time, "actor": actor}])
        self._records.write_last()

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
        leftovers = {RecordFiles.FOLDER, RecordFiles.LAST, _FINGERPRINT, LOCK, "header.json"}
        leftovers |= {"draws", "charges"}
        names = {name for name in names if not is_temporary(name)}
        folders = (RecordFiles.FOLDER, "draws")
        has_records = any(any(self.path.glob(f"{folder}/[0-9]*")) for folder in folders)
        if has_records or not names <= leftovers:
            raise LabelStoreError(
                f"{self.path} exists and is not a label store (no header.json). Give the path of a "
                "new or empty folder."
            )

    def header(self) -> dict[str, Any]:
        """Returns the header, or raises for a store of another format."""
        path = self.path / "header.json"
        header = read_json(path)
        check_format(path, header.get("format"), FORMAT)
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
        self._write_header({**self.header(), **fields}, replace=True)

    def _write_header(self, header: dict[str, Any], *, replace: bool = False) -> None:
        content = SealedFields(header).to_bytes()
        PlainFile(self.path / "header.json").write_in_store(content, replace=replace)


@dataclasses.dataclass(frozen=True)
class _Fingerprints:
    """Digests of the labels of each arrival, which show whether a store is that of some labels.

    They are not private: who reads the file can try labels until a digest fits. The salt keeps
    labels from being looked up in a table, and two stores from showing that they have equal labels.
    """

    salt: str
    digests: tuple[str, ...]

    @classmethod
    def of_labels(cls, labels: np.ndarray) -> _Fingerprints:
        empty = cls(secrets.token_hex(32), ())
        return dataclasses.replace(empty, digests=(empty.of(labels),))

    @classmethod
    def read(cls, path: pathlib.Path, arrivals: int) -> _Fingerprints:
        """Reads the digests of this number of arrivals, or more after a kill; raises otherwise."""
        if not has_content(path):
            raise LabelStoreError(
                f"{path} is missing, so the labels can't be compared with the store's. Restore it "
                "from a backup, or start a new store."
            )
        stored = read_json(path)
        salt = str(stored.get("salt"))
        digests = tuple(map(str, (stored.get("digest"), *stored.get("later", []))))
        is_whole = all(re.fullmatch("[0-9a-f]{128}", digest) for digest in digests)
        if not (re.fullmatch("[0-9a-f]{64}", salt) and is_whole and len(digests) >= arrivals):
            raise damaged(path)
        return cls(salt, digests)

    def of(self, labels: np.ndarray) -> str:
        """Returns the digest of labels with this salt."""
        data = np.ascontiguousarray(labels)
        return hashlib.blake2b(data.data, key=bytes.fromhex(self.salt)[:64]).hexdigest()

    def write(self, path: pathlib.Path) -> None:
        """Writes the file; a store of one arrival has no field for later ones."""
        first, *later = self.digests
        content = {"salt": self.salt, "digest": first, **({"later": later} if later else {})}
        PlainFile(path).write_in_store(json.dumps(content, indent=2).encode(), replace=True)


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


def _header_in(store: pathlib.Path) -> dict[str, Any]:
    path = store / "header.json"
    return read_json(path) if has_content(path) else {}


def _check_not_forgotten(path: pathlib.Path, header: dict[str, Any]) -> None:
    if (forgotten := header.get("forgotten")) is not None:
        raise LabelStoreError(
            f"The store {path} was forgotten on {forgotten['time']} by {forgotten['actor']}: its "
            "draws and keys are erased, so nothing can be drawn any more. tf-labeldp report shows "
            "the spending."
        )
