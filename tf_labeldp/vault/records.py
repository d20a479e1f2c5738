"""Records of a ledger, and its files: written whole or not at all, with their digests."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import io
import json
import math
import os
import pathlib
import secrets
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._version import __version__
from tf_labeldp.accounting import (
    Assumption,
    LabelSet,
    PrivacyBudget,
    PublicInput,
    Receipt,
    Receipts,
)
from tf_labeldp.accounting.receipt import Examples
from tf_labeldp.mechanisms import Mechanism, Priors
from tf_labeldp.vault.files import LabelStoreError as LabelStoreError
from tf_labeldp.vault.files import PlainFile

FORMAT = 4
"""The format of a store; CONTRIBUTING.md has the rule by which it rises. 0.3 wrote 3, and
refuses 4: it does not know the place in ``last-record``."""
_OF_0_2, _OLDEST = 2, 3
"""The format of a store of 0.2, and the oldest that is read, of a store as of a record."""
KEY_FILE = "labels.key"
"""The file of the secret key of keyed draws."""
_LEAST_UNPACKED, _MOST_RATIO = 1 << 26, 200
"""The members of a zip file may have this size together, or this multiple of the file's."""
PUBLIC_INPUT = Assumption(
    "public-inputs",
    "holder",
    "The priors, clusters, features, weights, encoders and networks of these uses were made "
    "without these labels, except for the uses counted here: an array does not record how it was "
    "made.",
)


class DrawSettingsError(LabelStoreError):
    """A stored draw of this name has other settings."""


@dataclasses.dataclass(frozen=True, eq=False)
class Arrival:
    """Labels that came to a vault together; which examples have a label is public."""

    total: int  # number of examples since then, with and without a label
    rows: np.ndarray  # examples whose labels came, ``int64``, rising
    records: int = 0  # number of earlier records, whose draws lack these labels

    def to_json(self) -> dict[str, Any]:
        """Returns the arrival as values for JSON."""
        examples = Examples.of(self.rows, self.total)
        bits = None if examples is None else base64.b64encode(examples.bits).decode()
        return {"num_labels": self.total, "examples": bits, "records": self.records}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Arrival:
        """Returns the arrival that ``to_json`` wrote."""
        total, bits = fields["num_labels"], fields["examples"]
        rows = np.arange(total)
        if bits is not None:
            rows = np.asarray(Examples(base64.b64decode(bits), total))
        return cls(total, rows, fields["records"])

    def has(self, total: int, rows: np.ndarray) -> bool:
        """Returns whether these are its examples."""
        return self.total == total and np.array_equal(self.rows, rows)


@dataclasses.dataclass(frozen=True)
class BudgetRaise:
    """A budget that replaces a lower one: who raised it, when, and why."""

    budget: PrivacyBudget
    reason: str
    time: str  # UTC
    actor: str


@dataclasses.dataclass(frozen=True, eq=False)
class Output:
    """The arrays that a use returned, and what they were made from.

    Attributes:
        mechanism: the mechanism of a draw or a release, from ``Mechanism.to_json``.
        public_digest: the digest of its public input.
        names: names of the arrays, which are known before they are read.
        load: reads the arrays; there are none once a store is forgotten.
    """

    mechanism: dict[str, Any] | None = None
    public_digest: str | None = None
    names: tuple[str, ...] = ()
    load: Callable[[], dict[str, np.ndarray]] = dict

    @functools.cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays, read at their first use."""
        return self.load()


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
    """One entry of a ledger: a charge with its output, a fact about a release, or a budget.

    Attributes:
        number: its place in the ledger.
        receipt: the charge.
        made_of: receipts of the public input, or of the weights.
        output: what the use returned.
        raised: a new budget.
        weights: digests of a model's weights.
        release: of an engine: ``name``, and ``binding`` at registration.
        reservation: ``plan``, and ``holder``, the name of a process's lock, with the receipts of
            the uses in ``made_of``; or ``plan`` and ``given_back``, ids of receipts.
    """

    number: int = 0
    receipt: Receipt | None = None
    made_of: tuple[Receipt, ...] = ()
    output: Output = Output()
    raised: BudgetRaise | None = None
    weights: tuple[str, ...] = ()
    release: dict[str, Any] | None = None
    reservation: dict[str, Any] | None = None

    @classmethod
    def of(
        cls,
        arrays: Mapping[str, Any] | None = None,
        mechanism: dict[str, Any] | None = None,
        public_digest: str | None = None,
        **fields: Any,
    ) -> Record:
        """Returns a record without arrays that are None; rising indices are in its receipt."""
        kept = {name: array for name, array in (arrays or {}).items() if array is not None}
        indices = kept.pop("indices", None)
        if indices is not None and not np.array_equal(_rows_of(fields.get("receipt")), indices):
            kept["indices"] = indices.astype(np.min_scalar_type(indices.max(initial=0)))
        output = Output(mechanism, public_digest, tuple(kept), lambda: kept)
        return cls(output=output, **fields)

    @property
    def receipts(self) -> tuple[Receipt, ...]:
        """The receipts of the output: those of its public input, and its charge."""
        return Receipts.merged(self.made_of, () if self.receipt is None else (self.receipt,))

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism of a draw or a release; a record of anything else raises an error."""
        return Mechanism.from_json(self.output.mechanism or {})

    @property
    def key(self) -> str | None:
        """The name of a draw that the vault returns again, or None."""
        is_draw = self.release is None and "values" in self.output.names
        return self.receipt.key if is_draw and self.receipt is not None else None

    @property
    def indices(self) -> np.ndarray:
        """The examples of the receipt, ``int64`` (m,), in the order of the draw."""
        if "indices" in self.output.names:
            return self.output.arrays["indices"].astype(np.int64)
        return _rows_of(self.receipt)

    @property
    def values(self) -> np.ndarray | None:
        """The output; None for steps and for a failed draw."""
        return self.output.arrays.get("values")

    @property
    def priors(self) -> Priors | None:
        """The priors of the draw, with the receipts of the public input; None without priors."""
        arrays = self.output.arrays
        if "priors" not in arrays:
            return None
        return Priors(arrays["priors"], arrays.get("groups"), receipts=self.made_of)


def _rows_of(receipt: Receipt | None) -> np.ndarray:
    if receipt is None or receipt.examples is None:
        return np.arange(0 if receipt is None else receipt.labels.size)
    return np.asarray(receipt.examples)


def may_count(labels: LabelSet, receipt: Receipt) -> bool:
    """Returns whether a receipt has a cost that these labels may have to bear."""
    return receipt.has_cost and labels.may_be(receipt.labels)


def content_digest(fields: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    """Returns a digest of JSON fields and named arrays."""
    names = sorted(arrays)
    text = json.dumps([fields, names], sort_keys=True).encode()
    return PublicInput.digest_of(*(arrays[name] for name in names), np.frombuffer(text, np.uint8))


def compact(noisy: np.ndarray) -> np.ndarray:
    """Returns noisy labels in the dtype of stores: integers in the smallest one."""
    if noisy.dtype.kind not in "iu" or not noisy.size:
        return noisy
    return noisy.astype(np.result_type(*map(np.min_scalar_type, (noisy.min(), noisy.max()))))


class Arrays(dict[str, np.ndarray]):
    """Arrays by name, and the bytes of an ``.npz`` file with them.

    Example:
        >>> Arrays.from_bytes(Arrays(counts=np.array([7, 5])).to_bytes())
        {'counts': array([7, 5])}
    """

    def to_bytes(self, *, compressed: bool = False) -> bytes:
        """Returns the bytes of an ``.npz`` file."""
        buffer = io.BytesIO()
        save = np.savez_compressed if compressed else np.savez
        save(buffer, **self)  # type: ignore[arg-type]
        content = buffer.getvalue()
        size = sum(np.asarray(array).nbytes for array in self.values())
        # Zeros have a ratio of a thousand, which `from_bytes` would refuse.
        is_too_dense = compressed and size > len(content) * _MOST_RATIO // 2
        return self.to_bytes() if is_too_dense else content

    @classmethod
    def from_bytes(cls, content: bytes) -> Arrays:
        """Returns the arrays of an ``.npz`` file; objects and too large sizes are refused."""
        # The reader of zip files ignores bytes before the first member.
        if not content.startswith(b"PK"):
            raise ValueError("expected a file of arrays, got other bytes at its start")
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            check_unpacked_size(archive, len(content))
            names = archive.namelist()
            return cls({name.removesuffix(".npy"): _array(archive.read(name)) for name in names})


def _array(content: bytes) -> np.ndarray:
    """Returns the array of an ``.npy`` file, whose header may claim any shape."""
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0
    read = read if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    if math.prod(shape) * dtype.itemsize != len(content) - file.tell():
        raise ValueError("the size of an array differs from its header")
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=False)


def check_unpacked_size(archive: zipfile.ZipFile, size: int) -> None:
    """Raises if the members of a zip file of this size unpack to far more than it has."""
    most = max(_LEAST_UNPACKED, _MOST_RATIO * size)
    if (found := sum(member.file_size for member in archive.infolist())) > most:
        raise ValueError(f"expected members of at most {most:,} bytes, got {found:,}")


@_validate.clears_frames
def write_key(path: pathlib.Path) -> bytes:
    """Draws a secret of 256 random bits, writes its file, and returns it."""
    secret = secrets.token_bytes(32)
    PlainFile(path).write(_key_content(secret))
    return secret


@_validate.clears_frames
def read_key(path: pathlib.Path) -> bytes:
    """Returns the secret of a key file, or raises if it is damaged."""
    try:
        content = PlainFile(path).read()
        fields = _validate.json_of(content)
        secret = bytes.fromhex(fields["secret"])
        is_of_0_2 = fields["format"] == 1 and "releases" in fields
        if not is_of_0_2 and (len(secret) != 32 or content != _key_content(secret)):
            raise ValueError("another secret has this checksum")
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no key file {os.fspath(path)!r}. Restore it: a new key, "
            "ReleaseKey.create(path), draws, and charges, every label once more."
        ) from None
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{os.fspath(path)!r} is no key file, or it is damaged ({type(error).__name__}). "
            "Restore it from a backup."
        ) from None
    if is_of_0_2:
        raise LabelStoreError(
            f"{os.fspath(path)!r} is a key file of 0.2, which has its releases inside. Open it "
            "with tf-labeldp 0.3 once, which moves them to a ledger. Nothing was changed."
        )
    return secret


def _key_content(secret: bytes) -> bytes:
    checksum = hashlib.sha256(b"labeldp-checksum" + secret).hexdigest()
    return json.dumps({"format": 2, "secret": secret.hex(), "checksum": checksum}).encode()


class SealedFields(dict[str, Any]):
    """Fields of a JSON file, one of which, ``digest``, is a digest of the others.

    Example:
        >>> fields = SealedFields(size=3)
        >>> SealedFields(fields.sealed()).is_whole
        True
        >>> SealedFields(size=4, digest=fields.seal).is_whole
        False
    """

    @property
    def seal(self) -> str:
        """The digest of all fields except ``digest``."""
        rest = {name: value for name, value in self.items() if name != "digest"}
        return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()

    @property
    def is_whole(self) -> bool:
        """Whether there is a digest, and it fits the other fields."""
        return self.get("digest") == self.seal

    def sealed(self) -> dict[str, Any]:
        """Returns the fields with their digest."""
        return {**self, "digest": self.seal}

    def to_bytes(self) -> bytes:
        """Returns the bytes of the JSON file of a store."""
        return json.dumps(self.sealed(), indent=2).encode()

    def check(self, path: pathlib.Path, role: str) -> None:
        """Raises unless the digest fits the other fields, which were read from this file."""
        if not self.is_whole:
            raise LabelStoreError(
                f"{path} was edited or is damaged: {role}. Restore the file from a backup."
            )


def check_format(path: str | os.PathLike[str], version: Any, newest: int) -> None:
    """Raises unless this version reads a store or a record of this format."""
    if version in range(_OLDEST, newest + 1):
        return
    advice = "Use the version of tf-labeldp that wrote it (0.1 wrote format 1)."
    if isinstance(version, int) and version > newest:
        advice = "A newer version of tf-labeldp wrote it: update tf-labeldp."
    elif version == _OF_0_2:
        advice = "0.2 wrote it: open it with 0.3 once, which brings it to format 3."
    raise LabelStoreError(
        f"{path} has format {version}, and tf-labeldp {__version__} reads formats {_OLDEST} to "
        f"{newest}. Nothing was changed. {advice}"
    )
