"""The parts of published files: whether each is known, and whether anything lies between them."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import math
import pathlib
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._version import __version__
from tf_labeldp.accounting import Assumption, PrivacyGuarantee, Receipt, Receipts
from tf_labeldp.vault.files import PlainFile
from tf_labeldp.vault.ledger import Ledger
from tf_labeldp.vault.records import Record

_MADE_BY = re.compile(r"tf-labeldp ([0-9a-z.+]{1,24})( randomize)?")
"""The maker of a file: a version of this library or of its command. A longer one may carry data."""
_TOLERANCE = 2e-4
"""Largest relative difference between an epsilon that version 0.2 composed and the same today."""
_LONGEST = 100
"""Characters of a mechanism that a line has room for."""
_LOCAL, _CENTRAL, _END = 30, 46, 22
"""Bytes of the fixed parts of a zip file: of a member's header, of its entry, and of the end."""
_ZIP64 = "<HHQQ"
"""The only extra field of a member's header: its sizes, which ``numpy.savez`` always writes."""


@dataclasses.dataclass
class Findings:
    """The contradictions that a check found, and the parts that nothing was compared with."""

    problems: list[str] = dataclasses.field(default_factory=list)
    not_checked: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Stores:
    """The ledgers of the stores that paid for a file; none if it is compared with itself alone."""

    ledgers: Sequence[Ledger] = ()

    def __bool__(self) -> bool:
        return bool(self.ledgers)

    @functools.cached_property
    def receipts(self) -> dict[str, Receipt]:
        """All charged receipts by id."""
        return {
            receipt.id: receipt
            for receipt in Receipts.merged(*(ledger.receipts() for ledger in self.ledgers))
        }

    @functools.cached_property
    def records(self) -> dict[str, tuple[Record, Ledger]]:
        """The record of each receipt by id, with its ledger."""
        return {
            record.receipt.id: (record, ledger)
            for ledger in self.ledgers
            for record in ledger.records
            if record.receipt is not None and (record.output.mechanism or record.output.names)
        }

    @functools.cached_property
    def digests(self) -> frozenset[bytes]:
        """Digests of weights, and of statements and cards that were written with a store open."""
        found = [digests for ledger in self.ledgers for digests, _ in ledger.weights()]
        return frozenset(digest for digests in found for digest in digests)

    def has_seal(self, seal: str) -> bool:
        """Returns whether a store recorded the digest of a statement or card."""
        return any(digest.hex() == seal for digest in self.digests)

    def check_receipts(self, receipts: tuple[Receipt, ...], found: Findings) -> None:
        """Compares receipts with the ledgers; those without a cost may be unknown there."""
        charged = [receipt for receipt in receipts if receipt.has_cost]
        missing = [receipt for receipt in charged if receipt.id not in self.receipts]
        found.problems += [f"the store has no receipt for {brief(each.what)}" for each in missing]
        for receipt in charged:
            known = self.receipts.get(receipt.id, receipt)
            if known is not receipt and known.to_json() != receipt.to_json():
                text = f"the store has a different receipt for {brief(receipt.what)}"
                found.problems.append(text)
        # The uses of a reservation are not charged yet.
        records = [record for ledger in self.ledgers for record in ledger.records]
        made_of = [record.made_of for record in records if record.reservation is None]
        inputs = {receipt.id: receipt for receipt in Receipts.merged(*made_of)} | self.receipts
        for receipt in receipts:
            if receipt.kind == "unknown" or receipt.has_cost:
                continue
            of_store = inputs.get(receipt.id)
            if of_store is None or of_store.to_json() != receipt.to_json():
                found.not_checked.append(f"the receipt of {brief(receipt.what)}")


def brief(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 4] + " ..."


def listed(names: Iterable[Any]) -> str:
    return ", ".join(brief(str(name)) for name in names)


def digests_of(files: Mapping[str, pathlib.Path]) -> dict[str, str]:
    return {name: PlainFile(path).digest() for name, path in sorted(files.items())}


def files_in(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns all files below a folder, hidden ones too, by their path there."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if not path.is_dir() or path.is_symlink()
    }


def check_names(
    found: Findings, names: Iterable[str], known: Iterable[str], what: str, of: str
) -> None:
    """Adds a problem for names that are not known."""
    if unknown := sorted(set(names) - set(known)):
        found.problems.append(f"{of} has an unknown {what}: {listed(unknown)}")


def read_json(text: str) -> Any:
    """Returns the content of JSON; a ``ValueError`` if an object has a name twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            raise ValueError("a name is there twice")
        return fields

    return _validate.json_of(text, object_pairs_hook=unique)


def check_json(found: Findings, name: str, text: str, *layouts: Any) -> Any:
    """Returns the content of JSON, or None if it has a name twice.

    ``layouts`` are arguments of ``json.dumps``: text in none of them may carry more than its
    content.
    """
    try:
        content = read_json(text)
    except ValueError as error:
        found.problems.append(f"{name} can't be read ({error})")
        return None
    written = (
        json.dumps(content, **layout).encode(errors="backslashreplace") for layout in layouts
    )
    if text.strip("\n").encode() not in written:
        found.not_checked.append(f"the layout of {name}, which another program wrote")
    return content


def check_zip(found: Findings, path: pathlib.Path) -> None:
    """Adds problems for content of a zip file that is in none of its members."""
    with zipfile.ZipFile(path) as content, path.open("rb") as file:
        members = sorted(content.infolist(), key=lambda member: member.header_offset)
        names = [member.filename for member in members]
        position, central = 0, 0
        is_tight = not content.comment
        for member in members:
            is_tight &= member.header_offset == position and not member.comment
            file.seek(member.header_offset)
            header = file.read(_LOCAL)
            name_size, extra_size = struct.unpack("<HH", header[26:30])
            extra = file.read(name_size + extra_size)[name_size:]
            sizes = member.file_size, member.compress_size
            is_tight &= extra in (b"", struct.pack(_ZIP64, 1, 16, *sizes)) and not member.extra
            packed = file.read(member.compress_size)
            is_tight &= _has_no_rest(member, packed)
            position += _LOCAL + name_size + extra_size + member.compress_size
            central += _CENTRAL + len(member.filename.encode())
        is_tight &= position == content.start_dir
        is_tight &= path.stat().st_size == position + central + _END
    if len(set(names)) < len(names):
        found.problems.append(f"{path.name} has two members of one name")
    if not is_tight:
        found.problems.append(f"{path.name} has content outside its members")


def _has_no_rest(member: zipfile.ZipInfo, packed: bytes) -> bool:
    if member.compress_type == zipfile.ZIP_STORED:
        return member.file_size == member.compress_size
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    return len(stream.decompress(packed)) == member.file_size and not stream.unused_data


def check_arrays(found: Findings, path: pathlib.Path, known: Iterable[str]) -> None:
    """Adds problems for the content of an ``.npz`` file that is in none of the known arrays."""
    check_zip(found, path)
    with zipfile.ZipFile(path) as content:
        names = content.namelist()
        check_names(found, names, [f"{name}.npy" for name in known], "array", path.name)
        for name in names:
            raw = content.read(name)
            try:
                array = np.lib.format.read_array(io.BytesIO(raw), allow_pickle=False)
            except ValueError:
                found.problems.append(f"{path.name} has a member {name} that is no array")
                continue
            written = io.BytesIO()
            np.lib.format.write_array(written, array, allow_pickle=False)
            if written.getvalue() != raw:
                found.problems.append(f"{name} in {path.name} has content outside its array")


def version_of(made_by: Any) -> str | None:
    """Returns the version of this library that made a file; None for another program."""
    maker = _MADE_BY.fullmatch(str(made_by))
    return None if maker is None else maker[1]


def check_statement(
    found: Findings, stated: PrivacyGuarantee, written: Any, lines: Any = None, made_by: Any = ""
) -> None:
    """Compares a statement as data, and its lines, with the statement of the receipts."""
    own = json.loads(stated.to_json())
    try:
        stored = PrivacyGuarantee.from_json(json.dumps(written))
        assumptions = written["assumptions"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        found.problems.append(f"its statement can't be read ({type(error).__name__}: {error})")
        return
    is_of_0_2 = all(isinstance(note, str) for note in assumptions)
    if contradiction := _contradiction(stored, stated, is_of_0_2=is_of_0_2):
        found.problems.append(contradiction)
        return
    if is_of_0_2:
        found.not_checked.append("the sentences of its statement, which version 0.2 wrote")
        return
    texts = [sorted(map(json.dumps, each["assumptions"])) for each in (written, own)]
    without = json.dumps(Assumption.INITIAL_WEIGHTS.to_json())
    if [note for note in texts[0] if note != without] != [n for n in texts[1] if n != without]:
        found.problems.append("its statement and its receipts differ in codes of assumptions")
    others = [name for name in written if name in own and name not in ("epsilon", "assumptions")]
    if differing := [name for name in others if written[name] != own[name]]:
        found.problems.append(f"its statement differs from its receipts in {listed(differing)}")
    is_ours = version_of(made_by) == __version__ and set(own) <= set(written)
    if lines is not None and lines != str(stated).splitlines():
        if is_ours or not isinstance(lines, list) or lines[:1] != [stated.headline]:
            found.problems.append("the lines of its statement differ from its figures")
        else:
            found.not_checked.append("the lines of its statement, which another version wrote")


def _contradiction(stored: PrivacyGuarantee, stated: PrivacyGuarantee, *, is_of_0_2: bool) -> str:
    """Returns how a stored statement promises something else than the receipts; empty if not."""
    # A head has no initial weights to vouch for; the file of its model does.
    notes, own = ({*each.assumptions} - {Assumption.INITIAL_WEIGHTS} for each in (stored, stated))
    # Version 0.2 wrote other sentences, without codes, and composed losses on another grid.
    tolerance = _TOLERANCE if is_of_0_2 else 0.0
    is_epsilon = math.isclose(stored.epsilon, stated.epsilon, rel_tol=tolerance)
    if not is_epsilon or (stored.delta, stored.seeded) != (stated.delta, stated.seeded):
        return f"its statement is {stored.headline}, but its receipts compose to {stated.headline}"
    agree = len(notes) >= len(own) if is_of_0_2 else notes == own
    return "" if agree else "its statement and its receipts differ in their assumptions"
