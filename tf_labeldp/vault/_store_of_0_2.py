"""Stores and key files of version 0.2: opening them brings them to the present format.

A store of format 2 has ``draws/000000.npz`` with a digest in ``charges/000000`` for each record, a
file ``weights``, and a key file that lists the releases of engines. The upgrade writes the records
in the new format, replaces the header, moves the releases from the key, and removes the old files,
in this order: a process that is killed in between leaves a store that the next opening completes.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import PrivacyBudget, Receipt
from tf_labeldp.accounting.receipts import LabelSet
from tf_labeldp.vault.files import LabelStoreError, damaged, publish, read_json
from tf_labeldp.vault.records import (
    FORMAT,
    KEY_FILE,
    Record,
    content_digest,
    json_digest,
    may_count,
    read_key,
    sealed_json,
    write_key,
)

OF_0_2 = ("draws", "charges", "weights", "ledger.json")
"""Files and folders that version 0.2 had in place of records."""
_KEYED = "AES-256 and BLAKE2b, with a secret key of 256 bits, are pseudorandom"
"""The beginning of the assumption that marks keyed draws in receipts of 0.2."""
_ARRAYS = ("values", "priors", "groups")


def upgrade(store: Any) -> None:
    """Brings a ``LabelStore``, and its key, to the present format; called within ``locked``."""
    path, header = store.path, store.header()
    if header["format"] == 2:
        records = _records(path, header)
        shutil.rmtree(path / "records", ignore_errors=True)  # An upgrade may have been killed.
        writer = type(store)(path)
        writer.begin(header["label_set"])
        for record in (*records, *_weights(path, records)):
            writer.append(record)
        publish(path / "header.json", sealed_json({**header, "format": FORMAT}), replace=True)
    import_key(store, path / KEY_FILE)
    # The old files go last: until then the next reader completes an upgrade that was killed.
    for old in (path / name for name in OF_0_2):
        with contextlib.suppress(OSError):
            shutil.rmtree(old) if old.is_dir() else old.unlink()


@_validate.clears_frames
def import_key(store: Any, path: pathlib.Path) -> None:
    """Moves the list of releases from a key file of 0.2 to the records; the secret stays."""
    content = key_of_0_2(path)
    if content is None:
        return
    releases = _releases(path, content, store.header()["label_set"])
    store.bind_key(read_key(path))
    writer = type(store)(store.path)
    known = {
        record.receipt.id for record in writer.new_records() if record.release and record.receipt
    }
    for record in releases:
        if record.release is None or record.receipt is None or record.receipt.id not in known:
            writer.append(record)
    write_key(path, secret=read_key(path), replace=True)


def key_of_0_2(path: pathlib.Path) -> dict[str, Any] | None:
    """Returns the content of a key file of 0.2; None without one, or for the present format."""
    if not path.exists():
        return None
    read_key(path)  # This raises for a damaged file.
    content: dict[str, Any] = json.loads(path.read_bytes())
    return content if content["format"] == 1 else None


def output_of_0_2(release: str, place: str) -> dict[str, np.ndarray]:
    """Returns the arrays of a statistic that version 0.2 wrote next to its key file."""
    try:
        with np.load(place, allow_pickle=False) as kept:
            return dict(kept)
    except FileNotFoundError:
        raise LabelStoreError(
            f"release {release!r} was drawn, and its output, written to {place}, is gone. Noise is "
            "never drawn twice. Restore the file, or name a new release, which is charged too."
        ) from None


def _records(path: pathlib.Path, header: dict[str, Any]) -> list[Record]:
    """Returns the records of ``draws``, or of the ledger of a forgotten store."""
    if "forgotten" in header:
        kept = read_json(path / "ledger.json")
        if not kept.get("digest") == json_digest(kept) == header["forgotten"].get("ledger"):
            raise damaged(path / "ledger.json")
        return [_record(fields, {}) for fields in kept["records"]]
    draws, charges = path / "draws", path / "charges"
    charged = sorted(int(file.name) for file in charges.glob("[0-9]*"))
    numbers = sorted(int(file.stem) for file in draws.glob("[0-9]*.npz"))
    # The last draw lacks its charge if its process was killed before the draw was returned.
    if numbers != list(range(len(numbers))) or charged not in (numbers, numbers[:-1]):
        raise LabelStoreError(
            f"The store {path} lacks a draw, and with it a charge: it has draws {numbers} and "
            f"charges {charged}. Restore the file from a copy."
        )
    records = [_read(draws / f"{number:06d}.npz", charges / f"{number:06d}") for number in numbers]
    receipts = [record.receipt for record in records if record.receipt]
    notes = [note for receipt in receipts for note in receipt.charge.assumptions]
    if any(note.startswith(_KEYED) for note in notes) and not (path / KEY_FILE).exists():
        raise LabelStoreError(
            f"{path / KEY_FILE} is missing, and with it the list of releases, so the spending is "
            "unknown. Restore the file from a backup."
        )
    return records


def _read(path: pathlib.Path, charge: pathlib.Path) -> Record:
    try:
        with np.load(path, allow_pickle=False) as content:
            arrays = {name: content[name] for name in content.files if name != "meta"}
            fields = json.loads(content["meta"].tobytes().decode())
        digest = fields.pop("digest")
        if digest != content_digest(fields, arrays) or path.name != f"{fields['number']:06d}.npz":
            raise damaged(path)
        record = _record(fields, arrays)
    except Exception as error:
        # Damaged files raise errors of zipfile, json and NumPy.
        raise damaged(path) from error
    if charge.exists() and charge.read_bytes() != digest.encode():
        raise damaged(charge)
    return record


def _record(fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> Record:
    receipt, budget = fields["receipt"], fields["budget"]
    names = ("reason", "time", "actor", "mechanism", "public_digest")
    return Record.of(
        {name: arrays.get(name) for name in _ARRAYS},
        arrays.get("indices") if "values" in arrays else None,
        number=fields["number"],
        receipt=None if receipt is None else Receipt.from_json(receipt),
        budget=None if budget is None else PrivacyBudget(*budget),
        made_of=tuple(Receipt.from_json(receipt) for receipt in fields["made_of"]),
        **{name: fields[name] for name in names},
    )


def _weights(path: pathlib.Path, records: list[Record]) -> Iterator[Record]:
    """Yields the lines of the file ``weights``, which name receipts by their ids."""
    if not (path / "weights").exists():
        return
    known = {record.receipt.id: record.receipt for record in records if record.receipt}
    for line in (path / "weights").read_bytes().split(b"\n"):
        try:
            content = json.loads(line)
        except ValueError:  # A killed process may leave a line that is not whole.
            continue
        try:
            receipts = tuple(
                known[name] if isinstance(name, str) else Receipt.from_json(name)
                for name in content["receipts"]
            )
            yield Record(made_of=receipts, weights=tuple(content["weights"]))
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(path / "weights") from error


def _releases(path: pathlib.Path, content: dict[str, Any], label_set: str) -> list[Record]:
    """Returns the releases in a key file, with the paths of the outputs of statistics."""
    labels = LabelSet(**content["labels"])
    if labels.name != label_set:
        raise LabelStoreError(
            f"{path} is the key of other labels than the store's. Restore the original file: "
            "another key would draw every label a second time."
        )
    records: list[Record] = []
    for name, release in content["releases"].items():
        *made_of, own = (Receipt.from_json(receipt) for receipt in release["receipts"])
        records += [Record(receipt=other) for other in made_of if may_count(labels, other)]
        arrays: dict[str, Any] = {}
        fields = {"name": name, "binding": release["binding"]}
        if own.kind == "release":  # Version 0.2 listed a statistic right before its draw.
            fields["output"] = str(path.with_name(f"{path.name}.{name}.npz"))
        elif "rows" in release:
            count, fingerprint = release["rows"]
            arrays = {"bound": np.array([count, int(fingerprint, 16)], np.uint64)}
        records.append(Record.of(arrays, receipt=own, made_of=tuple(made_of), release=fields))
    return records
