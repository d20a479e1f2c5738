"""Keyed draws: noisy labels as a function of their rows, and the key file that lists what it costs.

An engine that runs a step again must get the same draw, on any machine. So the random bits of a row
are a pseudorandom function of a secret key and of all that the draw depends on.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import secrets
from typing import Any

import filelock
import numpy as np
import pyarrow as pa

from tf_labeldp.accounting import Charge, PrivacyGuarantee
from tf_labeldp.accounting._receipts import (
    LabelSet,
    Receipt,
    Receipts,
    compose_receipts,
    merge_receipts,
)
from tf_labeldp.mechanisms import Priors, RandomizedResponse, RROnBins, RRTopK, RRWithPrior
from tf_labeldp.mechanisms._base import LabelMechanism, Mechanism, serialize
from tf_labeldp.vault._carried import receipts_of
from tf_labeldp.vault._store import PUBLIC_INPUT

_FORMAT = 1
_KEYED = (RandomizedResponse, RRTopK, RRWithPrior, RROnBins)
_WORDS = 8
"""Words of 64 bits in one digest of a row."""
_ASSUMPTIONS = (
    "BLAKE2b with a secret key of 256 bits is a pseudorandom function, and the key stays secret",
    "each id names one row, whose label is the same in all runs of a release",
)


class ReleaseKey:
    """A secret key for draws, in a file that lists its releases and what they cost.

    Guarantee:
        All that left under this key is ``guarantee()``-label-DP together: its releases add up. A
        name is bound to one mechanism and one prior, so that the same bits never meet two of them.
        The file has mode 600 and holds the secret: keep it with the labels, and never beside what
        is published. Who has it can undo the noise; without it nothing is drawn again.

    Args:
        path: of a key file; ``ReleaseKey.create`` makes one.

    Example:
        >>> import os, tempfile
        >>> key = ReleaseKey.create(os.path.join(tempfile.mkdtemp(), "labels.key"))
        >>> key.register("first", RandomizedResponse(epsilon=1.0, num_classes=3))
        >>> key.register("second", RandomizedResponse(epsilon=0.5, num_classes=3))
        >>> key.guarantee().epsilon
        1.5
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path).expanduser().absolute()
        self.secret: bytes = bytes.fromhex(self._read()["secret"])

    def __reduce__(self) -> Any:
        """Pickles the path alone: workers read the file."""
        return ReleaseKey, (os.fspath(self.path),)

    def __repr__(self) -> str:
        return f"ReleaseKey({os.fspath(self.path)!r})"

    @classmethod
    def create(cls, path: str | os.PathLike[str], *, people: str | None = None) -> ReleaseKey:
        """Makes a key from the operating system's random bits, and its file.

        Args:
            path: of the new file; its folder must be there.
            people: the population that the labels are of, as for ``PrivateLabels``.

        Raises:
            FileExistsError: there is a file. A new key would draw, and charge, everything anew.
        """
        path = pathlib.Path(path).expanduser()
        labels = LabelSet.new(0, people, stored=True)
        content = {
            "format": _FORMAT,
            "secret": secrets.token_hex(32),
            "labels": dataclasses.asdict(labels),
            "releases": {},
        }
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(content, file)
        return cls(path)

    def check(self, release: str, mechanism: Mechanism, priors: Any = None) -> None:
        """Raises if the name is taken by another mechanism or prior."""
        if not isinstance(release, str) or not release or "/" in release:
            raise ValueError(f"release must be a name without '/', got {release!r}.")
        known = self._read()["releases"].get(release)
        if known is not None and known["binding"] != _binding(mechanism, priors):
            raise ValueError(
                f"release {release!r} was made with another mechanism or prior than "
                f"{type(mechanism).__name__}; the same bits would reveal labels. Name a new release"
                ", which is charged on top."
            )

    def register(
        self, release: str, mechanism: Mechanism, priors: Any = None, *, num_rows: int = 0
    ) -> None:
        """Lists a release and its charge, before anything of it is drawn; once for each name."""
        with filelock.FileLock(f"{self.path}.lock"):
            self.check(release, mechanism, priors)
            content = self._read()
            if release in content["releases"]:
                return
            charge = Charge.of(mechanism)
            is_draw = isinstance(mechanism, LabelMechanism)
            made_of = receipts_of([priors])
            notes = charge.assumptions + (_ASSUMPTIONS if is_draw else ())
            notes += (PUBLIC_INPUT,) if priors is not None and not made_of else ()
            receipt = Receipt(
                LabelSet(**{**content["labels"], "size": num_rows}),
                dataclasses.replace(charge, assumptions=notes),
                what=f"{type(mechanism).__name__}, {'keyed draws' if is_draw else 'a release'}",
                kind="draw" if is_draw else "release",
                key=release,
                delta=mechanism.delta,
            )
            content["releases"][release] = {
                "binding": _binding(mechanism, priors),
                "receipts": [one.to_json() for one in (*made_of, receipt)],
            }
            hidden = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}.tmp")
            with open(os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump(content, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(hidden, self.path)

    def receipts(self, release: str | None = None) -> Receipts:
        """Returns the receipts of a release, or of all."""
        releases = self._read()["releases"]
        if release is not None and release not in releases:
            raise KeyError(f"there is no release {release!r}; there are {sorted(releases)}.")
        chosen = releases.values() if release is None else [releases[release]]
        return merge_receipts(
            [Receipt.from_json(one) for each in chosen for one in each["receipts"]]
        )

    def guarantee(self, delta: float | None = None) -> PrivacyGuarantee:
        """Returns the statement of all releases together."""
        return compose_receipts(self.receipts(), delta)

    def statement(self, release: str, num_rows: int | None = None) -> str:
        """Returns the statement of one release with its receipts, as JSON; it may be published."""
        receipts = self.receipts(release)
        if num_rows is not None:
            labels = dataclasses.replace(receipts[-1].labels, size=num_rows)
            receipts = (*receipts[:-1], dataclasses.replace(receipts[-1], labels=labels))
        stated = compose_receipts(receipts)
        content = {
            "release": release,
            "num_rows": num_rows,
            "statement": str(stated).splitlines(),
            "guarantee": json.loads(stated.to_json()),
            "receipts": [one.to_json() for one in receipts],
        }
        return json.dumps(content, indent=1)

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self.path.read_text())
            if content["format"] != _FORMAT or len(content["secret"]) != 64:
                raise ValueError("not of this format")
        except FileNotFoundError:
            raise FileNotFoundError(
                f"there is no key file {self.path}. Restore it: a new key, ReleaseKey.create(path),"
                " draws every label anew and is charged again."
            ) from None
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{self.path} is no key file, or it is damaged: {type(error).__name__}. Restore a "
                "copy of it as it was written."
            ) from None
        return dict(content)


def randomize_batch(
    ids: Any, labels: Any, mechanism: LabelMechanism, key: bytes, release: str, priors: Any = None
) -> np.ndarray:
    """Returns noisy labels of some rows: the same for a row in whatever batch it comes.

    Guarantee:
        As ``mechanism.randomize``, for draws of a pseudorandom function: BLAKE2b, keyed by ``key``,
        of release, mechanism, prior, id and label. Ids must be unique in all batches of a release,
        and a name must stand for one mechanism and prior; ``ReleaseKey`` and the engines see to it.

    Args:
        ids: (n,) whole numbers or texts, an Arrow or NumPy array or a list, none missing.
        labels: (n,) as the mechanism takes them.
        mechanism: ``RandomizedResponse``, ``RRTopK``, ``RRWithPrior`` or ``RROnBins``.
        key: the secret, 32 bytes; of ``ReleaseKey.secret``.
        release: the name of the release.
        priors: public probabilities (K,), for mechanisms that take them.

    Example:
        >>> mechanism = RandomizedResponse(epsilon=1.0, num_classes=3)
        >>> key = bytes(32)  # for this example: a key is secret and random
        >>> randomize_batch([5, 8, 2], [0, 1, 2], mechanism, key, "first").tolist()
        [0, 1, 0]
        >>> randomize_batch([2, 5], [2, 0], mechanism, key, "first").tolist()
        [0, 0]
    """
    if type(mechanism) not in _KEYED:
        raise TypeError(
            f"keyed draws are made by {', '.join(one.__name__ for one in _KEYED)}, got "
            f"{type(mechanism).__name__}. Use PrivateLabels for others, on one machine."
        )
    names = _encoded(ids)
    values = np.asarray(labels)
    if values.shape != (len(names),):
        raise ValueError(f"there are {len(names)} ids and labels of shape {values.shape}.")
    if not names:
        return mechanism.randomize(values.astype(np.int64), priors)[:0]
    given = priors.probabilities if isinstance(priors, Priors) else priors
    context = _context(mechanism, given, release, key)
    if values.dtype.kind not in "iuf":
        raise TypeError(
            f"labels must be numbers, got dtype {values.dtype}. Give classes as 0..K-1."
        )
    codes = _eights(values.astype(np.float64))  # so that 1 and 1.0 are one label
    rows = [code + name for code, name in zip(codes, names, strict=True)]
    try:
        return mechanism.randomize(values, given, rng=_KeyedWords(rows, context))
    except _Uneven:  # some rows need more words than others: each by itself
        one = [
            mechanism.randomize(values[i : i + 1], given, rng=_KeyedWords(rows[i : i + 1], context))
            for i in range(len(rows))
        ]
        return np.concatenate(one)


def id_digests(ids: Any, key: bytes) -> np.ndarray:
    """Returns a keyed digest of each id, ``uint64`` (n, 2), to find those that are there twice."""
    made = functools.partial(hashlib.blake2b, key=key, digest_size=16, person=b"labeldp-id")
    digests = b"".join([made(name).digest() for name in _encoded(ids)])
    return np.frombuffer(digests, dtype="<u8").reshape(-1, 2)


class _Uneven(Exception):
    """A mechanism asked for the words of some rows of several."""


class _KeyedWords(np.random.Generator):
    """Gives mechanisms the words of their rows in place of random ones; does nothing else."""

    def __init__(self, rows: list[bytes], context: Any) -> None:
        super().__init__(np.random.PCG64(0))  # never drawn from
        self._rows, self._context, self._used = rows, context, 0

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name != "integers":
            raise TypeError(f"keyed draws have words, no {name}; this mechanism can't be keyed.")
        return super().__getattribute__(name)

    def integers(  # type: ignore[override]
        self, low: Any, high: Any = None, size: Any = None, **kind: Any
    ) -> Any:
        """Returns the next word of each row, uniform below a power of two."""
        bits = int(high).bit_length() - 1
        if low != 0 or high != 1 << bits or size not in (0, len(self._rows)):
            raise _Uneven
        if size == 0:
            return np.zeros(0, np.uint64)
        block, place = divmod(self._used, _WORDS)
        if place == 0:
            self._block = self._digests(block)
        self._used += 1
        return self._block[:, place] >> np.uint64(64 - bits)

    def _digests(self, block: int) -> np.ndarray:
        start = self._context.copy()
        start.update(block.to_bytes(8, "little"))
        found = []
        for row in self._rows:
            made = start.copy()
            made.update(row)
            found.append(made.digest())
        return np.frombuffer(b"".join(found), dtype="<u8").reshape(-1, _WORDS)


def _context(mechanism: Mechanism, priors: Any, release: str, key: bytes) -> Any:
    """Returns the hash that all rows of a release start from."""
    if not isinstance(key, bytes) or len(key) != 32:
        raise TypeError("key must be 32 secret bytes. Use ReleaseKey(path).secret.")
    bound = hashlib.sha256(json.dumps([release, _binding(mechanism, priors)]).encode()).digest()
    return hashlib.blake2b(bound, key=key, digest_size=64, person=b"labeldp-draw")


def _binding(mechanism: Mechanism, priors: Any) -> str:
    """Returns a digest of a mechanism and its public input."""
    given = priors.probabilities if isinstance(priors, Priors) else priors
    if isinstance(priors, Priors) and priors.groups is not None:
        raise TypeError("keyed draws take one prior (K,) for all rows, got priors by group.")
    if given is not None:
        given = np.asarray(given, dtype=np.float64)
        if given.ndim != 1:
            raise ValueError(f"priors must have shape (K,), one for all rows, got {given.shape}.")
        given = given.tolist()
    content = json.dumps([serialize(mechanism), given], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _encoded(ids: Any) -> list[bytes]:
    """Returns ids as bytes, those of a number and of its digits apart; raises for others."""
    try:
        array = ids if isinstance(ids, (pa.Array, pa.ChunkedArray)) else pa.array(ids)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        raise TypeError(
            "ids must be all whole numbers or all text, got a mix. Turn them all into text."
        ) from None
    if array.null_count:
        raise ValueError(f"{array.null_count} of {len(array)} ids are missing. Give each row one.")
    if pa.types.is_integer(array.type):
        return [b"i" + code for code in _eights(array.to_numpy(zero_copy_only=False))]
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        return [b"s" + text.encode() for text in array.to_pylist()]
    if len(array) == 0:
        return []
    raise TypeError(f"ids must be whole numbers or text, got {array.type}. Turn them into text.")


def _eights(numbers: np.ndarray) -> list[bytes]:
    """Returns numbers as eight bytes each; whole ones of any width alike."""
    kind = "<f8" if numbers.dtype.kind == "f" else "<u8" if numbers.dtype == np.uint64 else "<i8"
    return np.ascontiguousarray(numbers, dtype=kind).view("V8").tolist()
