"""The folder in which a vault keeps its draws: written whole or not at all, checked when read.

Layout of a store::

    header.json            format, number of labels, classes or range
    PRIVATE-fingerprint    salted digest of the true labels; for the label holder's eyes only
    draws/000000.npz       one file a draw: noisy labels, which examples, and what was charged
    charges/000000         digest of that draw, written after it and before it is handed out

A draw and its charge are one file, published by one atomic link: whoever kills the process finds
either the whole draw, already charged, or nothing, and then nothing was handed out either. A draw
that was deleted is missed by its file in ``charges``. A whole folder set back to an earlier copy
cannot be told from that copy: back it up, but do not restore it over a newer one.
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
from typing import Any

import numpy as np

FORMAT = 1
_FINGERPRINT = "PRIVATE-fingerprint"
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
"""Names of the files that ``publish`` writes first; a killed process may leave one behind."""


class LabelStoreError(RuntimeError):
    """A label store was refused: of other labels or settings, damaged, or in use."""


class DrawSettingsError(LabelStoreError):
    """A draw of this name has been made, with other settings than are asked for now."""


@dataclasses.dataclass(frozen=True, eq=False)
class Draw:
    """One stored draw: all of it may be seen by whoever sees the noisy labels.

    Attributes:
        number: place in the sequence of draws, from 0.
        key: the name it was asked for by.
        mechanism: serialized mechanism (``mechanisms.serialize``).
        indices: ``int64`` (m,), the examples drawn for, in the order asked for.
        noisy_labels: what came out: (m,) class codes in the smallest unsigned dtype, (m,)
            ``float64`` numbers, or the statistic that was released.
        priors_digest: digest of the priors, or of the public input, used; or None.
        seeded: whether the random bits were repeatable.
    """

    number: int
    key: str
    mechanism: dict[str, Any]
    indices: np.ndarray
    noisy_labels: np.ndarray
    priors_digest: str | None
    seeded: bool


def array_digest(*arrays: np.ndarray) -> str:
    """Returns a digest of the dtypes, shapes and contents of public arrays."""
    digest = hashlib.sha256()
    for array in arrays:
        contiguous = np.ascontiguousarray(array)
        digest.update(f"{contiguous.dtype.str}{contiguous.shape}".encode())
        digest.update(contiguous.tobytes())
    return digest.hexdigest()


class LabelStore:
    """Reads and writes one store folder."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Names the folder; nothing is touched before ``open``."""
        self.path = pathlib.Path(path).expanduser()

    def open(self, labels: np.ndarray, kind: dict[str, Any]) -> list[Draw]:
        """Creates the store, or checks that it belongs to these labels; returns its draws.

        Args:
            labels: the true labels as kept; only a salted digest of them is written.
            kind: what the labels are: number and digest of the classes, or the range.

        Raises:
            LabelStoreError: the store is of other labels, classes or range, or damaged.
        """
        header = {"format": FORMAT, "num_labels": int(labels.size), **kind}
        header_path = self.path / "header.json"
        if not header_path.exists():
            self._create(header, labels)
            return []
        found = self._read_json(header_path)
        if found != header:
            differing = sorted(k for k in {*header, *found} if found.get(k) != header.get(k))
            raise LabelStoreError(
                f"The store {self.path} was made with other settings: {', '.join(differing)} "
                f"differ ({ {k: found.get(k) for k in differing} } there, "
                f"{ {k: header.get(k) for k in differing} } now). Open it with the settings it was "
                "made with, or give a new path."
            )
        self._check_fingerprint(labels)
        draws = [self._read_draw(file) for file in sorted((self.path / "draws").glob("*.npz"))]
        charged = {int(file.name): file for file in (self.path / "charges").glob("[0-9]*")}
        numbers = [draw.number for draw in draws]
        # The last draw may lack its charge file: its process was killed before handing it out.
        in_order = numbers == list(range(len(draws)))
        if not in_order or not set(numbers[:-1]) <= set(charged) <= set(numbers):
            raise self._draw_missing(numbers, sorted(charged))
        for draw in draws:
            if draw.number not in charged:
                self._charge(draw)
            elif charged[draw.number].read_text() != _draw_digest(draw):
                raise self._damaged(charged[draw.number])
        return draws

    def append(self, draw: Draw) -> None:
        """Writes a draw so that it is on disk, whole, before this returns.

        Raises:
            LabelStoreError: another process has written to the store since it was opened.
        """
        meta = {**_meta(draw), "format": FORMAT, "digest": _draw_digest(draw)}
        buffer = io.BytesIO()
        np.savez(
            buffer,
            meta=np.frombuffer(json.dumps(meta).encode(), np.uint8),
            indices=draw.indices,
            noisy_labels=draw.noisy_labels,
        )
        target = self.path / "draws" / f"{draw.number:06d}.npz"
        try:
            publish(target, buffer.getvalue())
        except FileExistsError:
            raise LabelStoreError(
                f"Another process has written draw {draw.number} to the store {self.path} since "
                "this one opened it. Nothing was handed out here. Open the store again, from one "
                "process at a time."
            ) from None
        self._charge(draw)

    def _charge(self, draw: Draw) -> None:
        with contextlib.suppress(FileExistsError):
            publish(self.path / "charges" / f"{draw.number:06d}", _draw_digest(draw).encode())

    def _create(self, header: dict[str, Any], labels: np.ndarray) -> None:
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            # An interrupted creation leaves these and temporary files: the header comes last.
            leftovers = {"draws", "charges", _FINGERPRINT}
            names = {p.name for p in self.path.iterdir()} if self.path.is_dir() else {"a file"}
            names = {name for name in names if not _TEMPORARY.fullmatch(name)}
            draws = list((self.path / "draws").glob("*.npz"))
            if not names <= leftovers or draws:
                raise LabelStoreError(
                    f"{self.path} exists and is not a label store (no header.json). Give the path "
                    "of a new or empty folder."
                )
        made_here = not self.path.exists()
        for folder in ("draws", "charges"):
            (self.path / folder).mkdir(parents=True, exist_ok=True)
        if made_here:  # a folder of the user's keeps the mode that it was given
            with contextlib.suppress(OSError):  # not every file system knows modes
                self.path.chmod(0o700)
        salt = secrets.token_hex(32)
        fingerprint = {"salt": salt, "digest": _fingerprint(labels, salt)}
        path = self.path / _FINGERPRINT
        path.unlink(missing_ok=True)
        try:
            publish(path, json.dumps(fingerprint).encode())
            publish(self.path / "header.json", json.dumps(header, indent=2).encode())
        except FileExistsError:
            raise LabelStoreError(
                f"Another process is making the store {self.path} at this moment. Open it again, "
                "from one process at a time."
            ) from None

    def _check_fingerprint(self, labels: np.ndarray) -> None:
        path = self.path / _FINGERPRINT
        if not path.exists():
            raise LabelStoreError(
                f"{path} is missing, so it cannot be checked that these are the labels of the "
                "store. Restore it from the folder's backup, or start a new store."
            )
        stored = self._read_json(path)
        salt, digest = str(stored.get("salt")), str(stored.get("digest"))
        if not re.fullmatch("[0-9a-f]{64}", salt) or not re.fullmatch("[0-9a-f]{128}", digest):
            raise self._damaged(path)
        if digest != _fingerprint(labels, salt):
            raise LabelStoreError(
                f"The store {self.path} was made for other labels (same number, different values "
                "or order). Its draws would be charged to the wrong examples. Give the labels it "
                "was made for, in the same order, or a new path."
            )

    def _read_json(self, path: pathlib.Path) -> dict[str, Any]:
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise self._damaged(path) from error
        if not isinstance(content, dict):
            raise self._damaged(path)
        return content

    def _read_draw(self, path: pathlib.Path) -> Draw:
        try:
            with np.load(path, allow_pickle=False) as content:
                arrays = {name: content[name] for name in ("indices", "noisy_labels")}
                fields = json.loads(content["meta"].tobytes().decode())
            digest, found_format = fields.pop("digest"), fields.pop("format")
            draw = Draw(**fields, **arrays)
            intact = digest == _draw_digest(draw) and found_format == FORMAT
        except Exception as error:  # zipfile, json and numpy each have their own errors
            raise self._damaged(path) from error
        if not intact or re.fullmatch(rf"{draw.number:06d}\.npz", path.name) is None:
            raise self._damaged(path)
        return draw

    def _draw_missing(self, draws: list[int], charged: list[int]) -> LabelStoreError:
        return LabelStoreError(
            f"The store {self.path} lacks a draw: found draws {draws}, charges {charged}. A "
            "missing draw is a charge forgotten, so it is refused. Restore the folder from a "
            "backup."
        )

    def _damaged(self, path: pathlib.Path) -> LabelStoreError:
        return LabelStoreError(
            f"{path} is damaged. A draw that cannot be read is still a charge, so the store is "
            "refused rather than drawn again. Restore the folder from a backup."
        )


def _meta(draw: Draw) -> dict[str, Any]:
    """Returns the fields of a draw that are no arrays."""
    arrays = ("indices", "noisy_labels")
    names = [field.name for field in dataclasses.fields(draw) if field.name not in arrays]
    return {name: getattr(draw, name) for name in names}


def _draw_digest(draw: Draw) -> str:
    """Returns a digest of all of a draw, what it charged included."""
    text = json.dumps(_meta(draw), sort_keys=True)
    return array_digest(draw.indices, draw.noisy_labels, np.frombuffer(text.encode(), np.uint8))


def publish(target: pathlib.Path, content: bytes) -> None:
    """Writes a new file atomically and durably; never replaces one.

    Raises:
        FileExistsError: ``target`` exists.
    """
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        give_name(temporary, target)
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

    Raises:
        FileExistsError: ``target`` exists; it is the error's ``filename``.
    """
    try:
        os.link(temporary, target)
    except FileExistsError as error:
        raise FileExistsError(error.errno, error.strerror, str(target)) from None
    except OSError:  # a file system without hard links; two writers at once are not seen there
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        os.replace(temporary, target)


def _fingerprint(labels: np.ndarray, salt: str) -> str:
    """Returns a keyed digest of the true labels; see the module's note on who may hold it."""
    data = np.ascontiguousarray(labels)  # int64 codes, or float64 numbers
    return hashlib.blake2b(data.data, key=bytes.fromhex(salt)[:64]).hexdigest()
