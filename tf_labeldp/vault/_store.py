"""The folder in which a vault keeps its records: written whole or not at all, checked when read.

Layout of a store::

    header.json            format, label set, people, budget, number of labels, classes or range
    PRIVATE-fingerprint    salted digest of the true labels; for the label holder's eyes only
    draws/000000.npz       one file a record: its receipt, what was handed out, which examples
    charges/000000         digest of that record, written after it and before it is handed out
    weights                digests of weights of models, and the receipts that they were made of
    ledger.json            of a store that was forgotten: its receipts, and nothing else is left

A record, published by one atomic link, holds its receipt and what was handed out: whoever kills the
process finds all of it, charged, or nothing. A record that was deleted is missed by its file in
``charges``. Processes that share a store hold a lock from reading what is new to writing their own
record. A whole folder set back to an earlier copy cannot be told from that copy: do not restore a
backup over a newer one. Stores of version 0.1 are read, and get a new header.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import io
import json
import os
import pathlib
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tf_labeldp._version import __version__
from tf_labeldp.accounting import Charge, PrivacyBudget, dp_sgd_charge
from tf_labeldp.accounting._receipts import LabelSet, Receipt, Receipts
from tf_labeldp.mechanisms import AggregateMechanism
from tf_labeldp.mechanisms._base import deserialize

FORMAT = 2
_FINGERPRINT = "PRIVATE-fingerprint"
_LOCK = ".lock"
_LEDGER = "ledger.json"
PROJECT_FILE = "project.json"
"""In the folder of a project; ``_project.py`` reads it."""
KEY_FILE = "labels.key"
"""Of keyed draws."""
_ERASED = ("PRIVATE-*", f"{KEY_FILE}*", "ids-digest", "draws", "charges", "weights", ".*.tmp")
"""What a forgotten store has no more; other files in the folder are none of ours."""
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
"""Names of the files that ``publish`` writes first; a killed process may leave one behind."""
_NO_LOCKS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOLCK, errno.ENOSYS)
_PLAIN = ("number", "reason", "time", "actor", "mechanism", "public_digest")
_ARRAYS = ("indices", "values", "priors", "groups")
_NOT_RECORDED = (
    "in training with version 0.1, which did not record it, neither noise nor batches were seeded, "
    "no training metrics were shown and no examples weighted"
)
PUBLIC_INPUT = (
    "priors, clusters and features that were given for a use were made without these labels, but "
    "for the uses counted here: an array does not say how it was made"
)


class LabelStoreError(RuntimeError):
    """A label store was refused: of other labels or settings, damaged, or of a newer version."""


class DrawSettingsError(LabelStoreError):
    """A draw of this name has been made, with other settings than are asked for now."""


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
    """One entry of a store: a receipt with what was handed out, or a change of the budget.

    Attributes:
        number: place in the sequence of records, from 0.
        receipt: what was charged; None for a change of the budget.
        budget: the budget from here on, for a change of it.
        reason: why it was changed; then ``time`` and ``actor`` say when, and who did it.
        mechanism: as ``mechanisms.serialize`` describes it, or None.
        public_digest: digest of the priors, or of the public input, used; or None.
        made_of: the receipts that came with the priors.
        indices: ``int64`` (m,), the examples, in the order asked for.
        values: what came out; None for steps and for what failed.
        priors: the priors of the draw, (K,), (m, K) or (C, K); or None.
        groups: which row of the priors is that of each label, (m,); or None.
    """

    number: int
    receipt: Receipt | None = None
    budget: PrivacyBudget | None = None
    reason: str = ""
    time: str = ""
    actor: str = ""
    mechanism: dict[str, Any] | None = None
    public_digest: str | None = None
    made_of: tuple[Receipt, ...] = ()
    indices: np.ndarray | None = None
    values: np.ndarray | None = None
    priors: np.ndarray | None = None
    groups: np.ndarray | None = None

    @property
    def key(self) -> str | None:
        """The name that it was asked for by; None if it can't be asked for again."""
        return None if self.receipt is None or self.values is None else self.receipt.key

    def meta(self) -> dict[str, Any]:
        """Returns all but the arrays, as JSON can hold it."""
        budget = self.budget
        return {
            "format": FORMAT,
            "version": __version__,
            **{name: getattr(self, name) for name in _PLAIN},
            "receipt": None if self.receipt is None else self.receipt.to_json(),
            "budget": None if budget is None else [budget.epsilon, budget.delta],
            "made_of": [one.to_json() for one in self.made_of],
        }

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays that there are."""
        return {name: getattr(self, name) for name in _ARRAYS if getattr(self, name) is not None}

    @classmethod
    def of(cls, meta: dict[str, Any], arrays: dict[str, Any]) -> Record:
        """Returns the record that ``meta`` and ``arrays`` described."""
        receipt, budget = meta["receipt"], meta["budget"]
        return cls(
            receipt=None if receipt is None else Receipt.from_json(receipt),
            budget=None if budget is None else PrivacyBudget(*budget),
            made_of=tuple(Receipt.from_json(one) for one in meta["made_of"]),
            **{name: meta[name] for name in _PLAIN},
            **arrays,
        )


def array_digest(*arrays: np.ndarray) -> str:
    """Returns a digest of the dtypes, shapes and contents of public arrays."""
    digest = hashlib.sha256()
    for array in arrays:
        contiguous = np.ascontiguousarray(array)
        digest.update(f"{contiguous.dtype.str}{contiguous.shape}".encode())
        digest.update(contiguous.tobytes())
    return digest.hexdigest()


def content_digest(fields: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    """Returns a digest of fields that JSON can hold and of named arrays."""
    names = sorted(arrays)
    return _digest([fields, names], [arrays[name] for name in names])


def _digest(content: Any, arrays: Sequence[np.ndarray]) -> str:
    text = json.dumps(content, sort_keys=True).encode()
    return array_digest(*arrays, np.frombuffer(text, np.uint8))


def npz(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Returns arrays as the content of an ``.npz`` file."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def budget_for_store(
    path: str | os.PathLike[str] | None, budget: PrivacyBudget
) -> PrivacyBudget | None:
    """Returns the budget to open a store with: None where it, or its project, keeps one already."""
    if path is None:
        return budget
    store = LabelStore(path)
    kept = store.header()["format"] != 1 if store.exists() else store.in_project
    return None if kept else budget


class LabelStore:
    """Reads and writes one store folder; ``in_project`` names the stores beside it as its like."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        in_project: bool | None = None,
        read_only: bool = False,
    ) -> None:
        """Names the folder; nothing is touched before ``open``."""
        self.path = pathlib.Path(path).expanduser().absolute()
        self.read_only = read_only
        self._asked_in_project = in_project
        self._read = 0
        self._new_header: dict[str, Any] | None = None
        self._lock: Any = None
        self._lock_of = -1
        self._label_set: str | None = None

    def exists(self) -> bool:
        """Returns whether there is a store."""
        return (self.path / "header.json").exists()

    def open(
        self, labels: np.ndarray, kind: dict[str, Any], people: str | None, budget: Any
    ) -> tuple[LabelSet, PrivacyBudget]:
        """Creates the store, or checks that it belongs to these labels; call within ``locked``.

        Returns:
            The label set, and the budget that the store began with.
        """
        kind = {"num_labels": len(labels), **kind}
        if not self.exists():
            self._create(labels, kind, people, budget)
        header = self.header()
        self._check_not_forgotten(header)
        self._check_header(header, kind, people)
        self._check_fingerprint(labels)
        if self._lock.is_locked:  # nobody is writing these now: what is there was left by a kill
            for pattern in (".header.json.*", f".{_FINGERPRINT}.*", "draws/.*", "charges/.*"):
                for path in self.path.glob(f"{pattern}.tmp"):
                    with contextlib.suppress(OSError):
                        path.unlink()
        if header["format"] == 1:
            if budget is None:
                raise ValueError(
                    f"{self.path} is a store of version 0.1, which kept no budget. Give it once: "
                    "budget=PrivacyBudget(epsilon=..., delta=...)."
                )
            kept = {name: value for name, value in header.items() if name != "format"}
            header = self._new_header = _new_header(kept, people, budget)
        self._label_set = header["label_set"] if self._new_header is None else None
        return _label_set_and_budget(header)

    def look(self) -> tuple[LabelSet, PrivacyBudget]:
        """Returns what ``open`` does, for those who have no labels."""
        if not self.exists():
            raise LabelStoreError(
                f"There is no label store in {self.path} (no header.json). Give the folder that "
                "PrivateLabels(..., store=) or --store named."
            )
        header = self.header()
        if header["format"] == 1:
            raise LabelStoreError(
                f"{self.path} is a store of version 0.1, which kept no budget. Open it once with "
                "its labels: PrivateLabels(labels, budget=..., store=...)."
            )
        self._label_set = header["label_set"]
        return _label_set_and_budget(header)

    @property
    def in_project(self) -> bool:
        """Whether the stores in the folder around this one share a budget with it."""
        if not self.exists():
            asked = self._asked_in_project
            return (self.path.parent / PROJECT_FILE).exists() if asked is None else asked
        found = self.header().get("project") is not None
        if self._asked_in_project not in (None, found):
            raise LabelStoreError(
                f"The store {self.path} was made {'in' if found else 'outside'} a project. Leave "
                "project= out to open it, or give a new path."
            )
        return found

    def forgotten(self) -> dict[str, Any] | None:
        """Returns when a store was forgotten, and by whom; None if it was not."""
        return self.header().get("forgotten")

    def forget(self, records: Sequence[Record], time: str, actor: str) -> list[str]:
        """Keeps the receipts and erases all else of a store; to be called within ``locked``.

        Returns the names of what else is in the folder.

        Whoever kills the process in between finds the store whole, or forgotten: a second call ends
        what the first one began.
        """
        if self.forgotten() is None:
            ledger: dict[str, Any] = {"records": [one.meta() for one in records]}
            ledger["digest"] = _json_digest(ledger)
            publish(self.path / _LEDGER, _as_json(ledger), replace=True)
            header = {**self.header(), "forgotten": {"time": time, "actor": actor}}
            header["forgotten"]["ledger"] = ledger["digest"]
            header["digest"] = _json_digest(header)
            publish(self.path / "header.json", _as_json(header), replace=True)
        for path in (path for pattern in _ERASED for path in self.path.glob(pattern)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        kept = ("header.json", _LEDGER, _LOCK)
        return sorted(path.name for path in self.path.iterdir() if path.name not in kept)

    def _kept_records(self) -> list[Record]:
        """Returns the records of a store that was forgotten."""
        path = self.path / _LEDGER
        ledger, expected = _read_json(path), (self.forgotten() or {}).get("ledger")
        if not ledger.get("digest") == _json_digest(ledger) == expected:
            raise _damaged(path)
        return [Record.of(meta, {}) for meta in ledger["records"]]

    def _check_not_forgotten(self, header: dict[str, Any]) -> None:
        if (gone := header.get("forgotten")) is not None:
            raise LabelStoreError(
                f"The store {self.path} was forgotten on {gone['time']} by {gone['actor']}: its "
                "draws and keys are erased, so nothing can be drawn of these labels any more. "
                "tf-labeldp report says what was spent."
            )

    def keep(self) -> None:
        """Gives a store of version 0.1 its new header; to be called once its draws were read."""
        if self._new_header is not None:
            publish(self.path / "header.json", _as_json(self._new_header), replace=True)
            self._label_set = self._new_header["label_set"]
            self._new_header = None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes out; reading, checking and writing together are one turn."""
        import filelock

        if self.read_only:  # the last record may lack its charge; no other trace of a turn is seen
            yield
            return
        if self._label_set is None:
            self._make_folder()
        self._check_still_there()
        if self._lock_of != os.getpid():  # a lock that came through a fork is its parent's
            folder = self.path.parent if self.in_project else self.path
            self._lock = filelock.FileLock(folder / _LOCK, mode=0o600)
            self._lock_of = os.getpid()
        try:
            self._lock.acquire()
        except (NotImplementedError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
                raise
            # A file system without locks, or that can't be written to: `publish` still collides.
            yield
            return
        try:
            self._check_still_there()
            yield
        finally:
            self._lock.release()

    def new_records(self, labels: LabelSet, budget: PrivacyBudget) -> list[Record]:
        """Returns the records since the last call; to be called within ``locked``."""
        if self.read_only and self.forgotten() is not None:
            kept = self._kept_records()[self._read :] if self._read >= 0 else []
            self._read = -1
            return kept
        draws, charges = self.path / "draws", self.path / "charges"
        if not self._read:
            charged = {int(file.name) for file in charges.glob("[0-9]*")}
            numbers = sorted(int(file.stem) for file in draws.glob("[0-9]*.npz"))
            # The last may lack its charge file: its process was killed before handing it out. More
            # may, for who reads beside a writer.
            in_order = numbers == list(range(len(numbers)))
            paid = set() if self.read_only else set(numbers[:-1])
            if not in_order or not paid <= charged <= set(numbers):
                found_now = f"a draw: found draws {numbers}, charges {sorted(charged)}"
                raise self._draw_missing(found_now)
        found: list[Record] = []
        while (path := draws / f"{self._read:06d}.npz").exists():
            record, digest = self._read_record(path, labels, budget)
            target = charges / f"{self._read:06d}"
            if not target.exists():
                if not self.read_only:
                    self._publish_charge(self._read, digest)
            elif target.read_text() != digest:
                raise _damaged(target)
            found.append(record)
            self._read += 1
        if (charges / f"{self._read:06d}").exists():
            raise self._draw_missing(f"draw {self._read}")
        return found

    def _draw_missing(self, missing: str) -> LabelStoreError:
        return LabelStoreError(
            f"The store {self.path} lacks {missing}. A missing draw is a charge "
            "forgotten, so it is refused. Restore the folder from a backup."
        )

    def append(self, record: Record) -> None:
        """Writes a record so that it is on disk, whole, before this returns."""
        meta, arrays = record.meta(), record.arrays()
        digest = content_digest(meta, arrays)
        text = json.dumps({**meta, "digest": digest}).encode()
        content = npz({**arrays, "meta": np.frombuffer(text, np.uint8)})
        try:
            publish(self.path / "draws" / f"{record.number:06d}.npz", content)
        except FileExistsError:
            raise LabelStoreError(
                f"Another process has written draw {record.number} to the store {self.path} since "
                "this one read it. Nothing was handed out here. Open the store again, from one "
                "process at a time."
            ) from None
        self._publish_charge(record.number, digest)

    def keep_weights(
        self, digests: Sequence[bytes], receipts: Sequence[Receipt], known: set[str]
    ) -> None:
        """Adds a line about weights that were made of receipts, of which the store knows some."""
        line = {
            "weights": [one.hex() for one in digests],
            "receipts": [one.id if one.id in known else one.to_json() for one in receipts],
        }
        with open(self.path / "weights", "a+b") as file:
            file.seek(max(0, file.tell() - 1))
            torn = file.read(1) not in (b"", b"\n")  # by a process that was killed
            file.write(b"\n" * torn + json.dumps(line).encode() + b"\n")

    def weights(self, known: dict[str, Receipt]) -> Iterator[tuple[list[bytes], Receipts]]:
        """Yields digests of weights, and what they were made of."""
        path = self.path / "weights"
        lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
        for line in lines:
            try:
                content = json.loads(line)
            except ValueError:  # not written whole, by a process that was killed
                continue
            try:
                receipts = tuple(
                    known[one] if isinstance(one, str) else Receipt.from_json(one)
                    for one in content["receipts"]
                )
                yield [bytes.fromhex(one) for one in content["weights"]], receipts
            except (KeyError, TypeError, ValueError) as error:
                raise _damaged(path) from error

    def _publish_charge(self, number: int, digest: str) -> None:
        with contextlib.suppress(FileExistsError):
            publish(self.path / "charges" / f"{number:06d}", digest.encode())

    def _check_still_there(self) -> None:
        """Raises if the store that was opened is gone, or another one is in its place."""
        if self._label_set is None:
            return
        if self.exists():
            self._check_not_forgotten(self.header())
        if not self.exists() or self.header().get("label_set") != self._label_set:
            raise LabelStoreError(
                f"The store {self.path} was moved, removed or made anew since it was opened. Its "
                "charges would be lost. Put it back, or make another PrivateLabels."
            )

    def _make_folder(self) -> None:
        """Makes the folder; refuses one with files that are not a store's."""
        if self.exists():
            return
        if not self.path.exists():
            with contextlib.suppress(FileExistsError):  # another process was faster
                self.path.mkdir(parents=True)
                with contextlib.suppress(OSError):  # not every file system knows modes
                    self.path.chmod(0o700)
        names = {p.name for p in self.path.iterdir()} if self.path.is_dir() else {"a file"}
        # An interrupted creation leaves these and temporary files: the header comes last.
        leftovers = {"draws", "charges", _FINGERPRINT, _LOCK, KEY_FILE, f"{KEY_FILE}.lock"}
        names = {name for name in names if not _TEMPORARY.fullmatch(name)}
        if not names <= leftovers or any((self.path / "draws").glob("*.npz")):
            raise LabelStoreError(
                f"{self.path} exists and is not a label store (no header.json). Give the path of a "
                "new or empty folder."
            )

    def _create(self, labels: np.ndarray, kind: dict[str, Any], people: Any, budget: Any) -> None:
        for folder in ("draws", "charges"):
            (self.path / folder).mkdir(exist_ok=True)
        salt = secrets.token_hex(32)
        fingerprint = {"salt": salt, "digest": fingerprint_of(labels, salt)}
        header = _new_header(kind, people, budget)
        try:
            publish(self.path / _FINGERPRINT, _as_json(fingerprint), replace=True)
            publish(self.path / "header.json", _as_json(header))
        except FileExistsError:
            raise LabelStoreError(
                f"Another process is making the store {self.path} at this moment. Open it again, "
                "from one process at a time."
            ) from None

    def header(self) -> dict[str, Any]:
        """Returns the header, checked."""
        header = _read_json(self.path / "header.json")
        if header.get("format") not in (1, FORMAT):
            raise _unknown_format(f"The store {self.path}", header.get("format"), "and ")
        if header["format"] != 1 and header.get("digest") != _json_digest(header):
            raise LabelStoreError(
                f"{self.path / 'header.json'} was edited or is damaged: it has the budget, and "
                "whose labels these are. Restore the file from a backup, and raise a budget with "
                "labels.raise_budget(budget, reason=...)."
            )
        return header

    def _check_header(self, found: dict[str, Any], kind: dict[str, Any], people: Any) -> None:
        wanted = kind if people is None or found["format"] == 1 else {**kind, "people": people}
        others = {"format", "label_set", "budget", "digest"} | ({"people"} - set(wanted))
        names = sorted({*wanted, *found} - others)
        differing = [name for name in names if found.get(name) != wanted.get(name)]
        if differing:
            raise LabelStoreError(
                f"The store {self.path} was made with other settings: {', '.join(differing)} "
                f"differ ({ {k: found.get(k) for k in differing} } there, "
                f"{ {k: wanted.get(k) for k in differing} } now). Open it with the settings it was "
                "made with, or give a new path."
            )

    def _check_fingerprint(self, labels: np.ndarray) -> None:
        path = self.path / _FINGERPRINT
        if not path.exists():
            raise LabelStoreError(
                f"{path} is missing, so it cannot be checked that these are the labels of the "
                "store. Restore it from the folder's backup, or start a new store."
            )
        stored = _read_json(path)
        salt, digest = str(stored.get("salt")), str(stored.get("digest"))
        if not re.fullmatch("[0-9a-f]{64}", salt) or not re.fullmatch("[0-9a-f]{128}", digest):
            raise _damaged(path)
        if digest != fingerprint_of(labels, salt):
            raise LabelStoreError(
                f"The store {self.path} was made for other labels (same number, different values "
                "or order). Its draws would be charged to the wrong examples. Give the labels it "
                "was made for, in the same order, or a new path."
            )

    def _read_record(
        self, path: pathlib.Path, labels: LabelSet, budget: PrivacyBudget
    ) -> tuple[Record, str]:
        try:
            with np.load(path, allow_pickle=False) as content:
                arrays = {name: content[name] for name in content.files if name != "meta"}
                meta = json.loads(content["meta"].tobytes().decode())
            digest = meta.pop("digest")
            if meta["format"] == FORMAT:
                record = Record.of(meta, arrays)
                intact = digest == content_digest(meta, arrays)
            elif meta["format"] == 1:
                del meta["format"]
                record = _record_of_0_1(meta, arrays, digest, labels, budget)
                intact = digest == _digest(meta, (arrays["indices"], arrays["noisy_labels"]))
            else:
                by = f"written by tf-labeldp {meta.get('version')}; "
                raise _unknown_format(str(path), meta["format"], by)
        except LabelStoreError:
            raise
        except Exception as error:  # zipfile, json and numpy each have their own errors
            raise _damaged(path) from error
        if not intact or path.name != f"{record.number:06d}.npz":
            raise _damaged(path)
        return record, digest


def _damaged(path: pathlib.Path) -> LabelStoreError:
    return LabelStoreError(
        f"{path} is damaged. A draw that cannot be read is still a charge, so the store is refused "
        "rather than drawn again. Restore the folder from a backup."
    )


def _unknown_format(what: str, found: Any, by: str) -> LabelStoreError:
    return LabelStoreError(
        f"{what} has format {found}, {by}tf-labeldp {__version__} reads formats 1 and {FORMAT}. "
        "Nothing was changed. Install the newer version."
    )


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _damaged(path) from error
    if not isinstance(content, dict):
        raise _damaged(path)
    return content


def _as_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=2).encode()


def _new_header(kind: dict[str, Any], people: str | None, budget: PrivacyBudget) -> dict[str, Any]:
    header = {
        "format": FORMAT,
        "label_set": secrets.token_hex(16),
        "people": people,
        "budget": [budget.epsilon, budget.delta],
        **kind,
    }
    return {**header, "digest": _json_digest(header)}


def _label_set_and_budget(header: dict[str, Any]) -> tuple[LabelSet, PrivacyBudget]:
    size, people = header["num_labels"], header["people"]
    return LabelSet(header["label_set"], size, people, stored=True), PrivacyBudget(
        *header["budget"]
    )


def _json_digest(content: dict[str, Any]) -> str:
    rest = {name: value for name, value in content.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _record_of_0_1(
    meta: dict[str, Any],
    arrays: dict[str, np.ndarray],
    digest: str,
    labels: LabelSet,
    budget: PrivacyBudget,
) -> Record:
    """Returns a draw of version 0.1 as a record; its receipt has the same id at each reading."""
    stored = meta["mechanism"]
    if stored["class_name"] == "DPSGDSteps":
        config = {name: v for name, v in stored["config"].items() if name != "num_classes"}
        charge = dp_sgd_charge(**config)
        mechanism, what, kind = None, f"{config['steps']} steps of DP-SGD", "steps"
        charge = dataclasses.replace(charge, assumptions=(*charge.assumptions, _NOT_RECORDED))
    else:
        made = deserialize(stored)
        charge, mechanism, what = Charge.of(made), stored, repr(made)
        if meta["priors_digest"] is not None:
            notes = (*charge.assumptions, PUBLIC_INPUT)
            charge = dataclasses.replace(charge, assumptions=notes)
        kind = "release" if isinstance(made, AggregateMechanism) else "draw"
    indices = arrays["indices"]
    rows = np.sort(indices)
    values = None if mechanism is None else arrays["noisy_labels"]
    receipt = Receipt(
        labels,
        charge,
        what,
        kind,
        meta["key"],
        None if rows.size == labels.size else rows,
        budget.delta,
        None if values is None else array_digest(values),
        seeded=meta["seeded"],
        time="",
        actor="unknown",
        version="0.1",
        id=digest[:32],
    )
    return Record(
        meta["number"],
        receipt,
        mechanism=mechanism,
        public_digest=meta["priors_digest"],
        indices=indices,
        values=values,
    )


def publish(
    target: pathlib.Path, content: bytes, *, replace: bool = False, mode: int = 0o600
) -> None:
    """Writes a file atomically and durably; replaces one only if it is asked to."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        (os.replace if replace else give_name)(temporary, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    with contextlib.suppress(OSError):  # directories cannot be synced on every platform
        directory = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def give_name(temporary: pathlib.Path, target: pathlib.Path) -> None:
    """Gives a finished file its name; fails where the name is taken, unlike ``os.replace``.

    The temporary name may still be there afterwards.
    """
    try:
        os.link(temporary, target)
    except FileExistsError as error:
        raise FileExistsError(error.errno, error.strerror, str(target)) from None
    except OSError:  # a file system without hard links; two writers at once are not seen there
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        os.replace(temporary, target)


def fingerprint_of(labels: np.ndarray, salt: str) -> str:
    """Returns a keyed digest of the true labels; see ``PrivateLabels`` on who may hold it."""
    data = np.ascontiguousarray(labels)  # int64 codes or rows, or float64 numbers
    return hashlib.blake2b(data.data, key=bytes.fromhex(salt)[:64]).hexdigest()
