"""Keyed draws: noisy labels as a function of their rows, and the key with its ledger.

An engine that repeats a step must get the same draw, on any machine. So the random bits of a row
are a pseudorandom function of a secret key and of everything that the draw depends on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeGuard

import filelock
import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from tf_labeldp import _validate
from tf_labeldp.accounting import (
    Assumption,
    Charge,
    LabelSet,
    PrivacyGuarantee,
    Public,
    PublicInput,
    Receipt,
    Receipts,
    Setting,
    public_input,
)
from tf_labeldp.mechanisms import (
    LabelMechanism,
    Mechanism,
    Priors,
    random_bits,
)
from tf_labeldp.mechanisms.classes import row_chunks
from tf_labeldp.vault._statements import LedgerOwner
from tf_labeldp.vault.account import Account
from tf_labeldp.vault.files import check_no_link, make_private
from tf_labeldp.vault.ledger import Ledger, Release
from tf_labeldp.vault.records import (
    KEY_FILE,
    PUBLIC_INPUT,
    LabelStoreError,
    Record,
    read_key,
    write_key,
)
from tf_labeldp.vault.reservations import PlannedUse
from tf_labeldp.vault.reserved_uses import ReservedUses
from tf_labeldp.vault.row_ids import RowIds, digests_of_parts
from tf_labeldp.vault.store import SUMS, LabelStore

_DRAW_VERSION = 1
"""Version of the draws: another one draws other labels by the same key and release."""
_LONGEST_NAME = 200
"""Bytes of the name of a release, which is part of the names of files."""
_LEDGER = ".ledger"
"""The suffix of the folder for the ledger of a key without a vault."""
KEYED_ASSUMPTIONS = (
    Assumption(
        "secure-keyed-draws",
        "machines",
        "AES-256 and BLAKE2b, with a secret key of 256 bits, are pseudorandom, and the key stays "
        "secret.",
    ),
    Assumption(
        "unique-ids",
        "holder",
        "Each id names one row, whose label is the same in all runs of a release.",
    ),
)


class ReleaseKey(LedgerOwner):
    """A secret key for draws, with the ledger of its releases and their cost.

    Guarantee:
        All outputs of this key together are ``guarantee()``-label-DP: the costs of its releases add
        up. The key of a vault answers for the vault: its draws, releases and training steps count,
        in its unit of privacy. Each release name is bound to one mechanism and one prior, so that
        no random bits are used with two of them.

    The file has mode 600 and contains nothing but the secret: keep it with the labels, and never
    with published files. With the key the noise can be removed; without it nothing can be drawn
    again. The releases are recorded in the store that contains the file, or in a folder
    ``<file>.ledger`` next to it.

    Args:
        path: a key file; ``ReleaseKey.create`` makes one.

    Example:
        >>> import os, tempfile
        >>> from tf_labeldp import RandomizedResponse
        >>> key = ReleaseKey.create(os.path.join(tempfile.mkdtemp(), "labels.key"))
        >>> key.register("first", RandomizedResponse(epsilon=1.0, num_classes=3))
        >>> key.register("second", RandomizedResponse(epsilon=0.5, num_classes=3))
        >>> key.guarantee().epsilon
        1.5
    """

    path = pathlib.Path()

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path).expanduser().absolute()
        secret = read_key(self.path)
        # Programs that report errors print the attributes of objects.
        self._secret = lambda: secret
        self._store = _store_of(self.path)
        self._ledger: Ledger | None = None

    @property
    def secret(self) -> bytes:
        """The 32 bytes of the key file."""
        return self._secret()

    @property
    def place(self) -> tuple[str, str]:
        """The path and a public digest of the key, by which workers read the same file."""
        return os.fspath(self.path), _subkey(self.secret, b"labeldp-key", b"").hex()

    @classmethod
    def at(cls, path: str, digest: str) -> ReleaseKey:
        """Returns the key at a ``place``, or raises for another key in this file."""
        key = cls(path)
        if key.place[1] != digest:
            raise LabelStoreError(
                f"expected the key of the process that started the pipeline in {path}, got another "
                "key. Mount one key file on all workers: two keys are two draws of each label."
            )
        return key

    def __reduce__(self) -> Any:
        """Pickles the place: workers read the file, which must be the same."""
        return same_key, self.place

    def __repr__(self) -> str:
        return f"ReleaseKey({os.fspath(self.path)!r})"

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], *, people: str | None = None, labels: Setting[Any] = None
    ) -> ReleaseKey:
        """Makes a key from the operating system's random bits, with its file and its ledger.

        Args:
            path: the new file.
            people: the population that the labels come from, as for ``PrivateLabels``.
            labels: the ``label_set`` of a vault, if the key is for its labels.

        Raises:
            FileExistsError: the file or its ledger exists. A new key would draw, and charge, every
                label once more.
        """
        path = pathlib.Path(path).expanduser().absolute()
        store = _store_of(path)
        with store.locked():
            if path.exists() or (store.exists() and store.has_key()):
                raise FileExistsError(
                    f"there is a key {path}, or its ledger in {store.path}. Restore the file if it "
                    "was lost, or give another path."
                )
            if store.path.name == path.name + _LEDGER:
                labels = labels or LabelSet.new(0, people, stored=True)
                (store.path / "header.json").unlink(missing_ok=True)  # A killed call may leave it.
                store.create(labels, stored=labels.stored)
            elif labels is not None and labels.name != store.label_set().name:
                raise LabelStoreError(
                    f"{store.path} is the store of other labels. Leave labels= out."
                )
            store.bind_key(write_key(path))
        return cls(path)

    def check(self, release: str, mechanism: Public[Mechanism], priors: Public[Any] = None) -> None:
        """Raises what ``register`` or ``draw_once`` would raise; records nothing."""
        public = public_input(mechanism, priors)
        with self._turn() as ledger:
            entry = _checked(ledger, release, public)
            if entry.binding is None and not entry.is_drawn:
                self._take(ledger, release, public)

    def register(
        self,
        release: str,
        mechanism: Public[Mechanism],
        priors: Public[Any] = None,
        *,
        num_rows: int = 0,
    ) -> None:
        """Records a release and its charge before the first draw; does nothing the second time.

        Raises a ``BudgetExceededError`` if the vault of the key's store cannot afford the release.
        """
        public = public_input(mechanism, priors)
        with self._turn() as ledger:
            if _checked(ledger, release, public).binding is None:
                self._take(ledger, release, public)(num_rows, {})

    def bind_rows(self, release: str, count: int, fingerprint: int) -> None:
        """Binds a release to the rows of its first run; raises a ``ValueError`` for other rows.

        ``count`` and ``fingerprint`` are sums over all batches (``KeyedRows.fingerprint``).
        """
        rows = np.array([int(count), int(fingerprint) % 2**64], np.uint64)
        with self._turn() as ledger:
            first_run = _registered(ledger, release).rows
            if first_run is None:
                ledger.keep(release={"name": release}, arrays={"bound": rows})
            elif not np.array_equal(first_run.arrays["bound"], rows):
                raise ValueError(
                    f"release {release!r} was drawn for {first_run.arrays['bound'][0]} rows, and "
                    f"now there are {rows[0]}, or some have another label or prior. Give the rows "
                    "of the first run, or name a new release, which is charged too."
                )

    def is_drawn(self, release: str) -> bool:
        """Returns whether the noise of a statistic was drawn, even if its output is lost."""
        with self._turn() as ledger:
            return ledger.releases[release].is_drawn

    def unless_drawn(self, release: str, write: Setting[Callable[[], None]]) -> None:
        """Calls ``write`` for the exact sums of a statistic, unless its noise was drawn."""
        with self._turn() as ledger:
            if not ledger.releases[release].is_drawn:
                write()

    def draw_once(
        self,
        release: str,
        mechanism: Public[Mechanism],
        draw: Setting[Callable[[], tuple[int, dict[str, Any]]]],
    ) -> dict[str, np.ndarray]:
        """Returns the arrays of a statistic; the first call in any process draws and records them.

        ``draw`` returns the number of rows, and the arrays.
        """
        public = public_input(mechanism, None)
        with self._turn() as ledger:
            entry = _checked(ledger, release, public)
            if entry.output is None:
                if entry.place is not None:  # Noise is never drawn twice.
                    raise LabelStoreError(
                        f"release {release!r} was drawn by version 0.2, which wrote it to "
                        f"{entry.place}. Ask for it once with version 0.3, which moves it to the "
                        "ledger, or name a new release, which is charged too."
                    )
                if entry.binding is None:
                    self._take(ledger, release, public)(*draw())
                else:
                    ledger.keep(release={"name": release}, arrays=draw()[1])
            return entry.output.arrays  # type: ignore[union-attr]

    def sums_of(self, release: str, folder: str | None) -> str:
        """Returns the file for the exact sums of a release, and records it for ``forget``."""
        own = self._store.path / SUMS
        with self._turn() as ledger:
            make_private(own)
            if folder is None:
                return os.fspath(own / f"{release}.npz")
            path = f"{folder.rstrip('/')}/{release}.{SUMS}.npz"
            path = path if "://" in path else os.path.abspath(path)
            if ledger.releases[release].sums != path:
                ledger.keep(release={"name": release, "sums": path})
            return path

    def lock_of(self, release: str) -> Any:
        """Returns the lock of the process that runs the pipeline of a release."""
        path = self._store.path / SUMS / f"{release}.lock"
        return filelock.FileLock(path, timeout=0, mode=0o600, thread_local=False)

    def receipts(self, release: str | None = None) -> tuple[Receipt, ...]:
        """Returns the receipts of a release; without a name those of all uses.

        The uses of a vault's key are those of the vault.
        """
        with self._turn() as ledger:
            return ledger.receipts() if release is None else _registered(ledger, release).receipts

    def _all_uses(self) -> tuple[Receipt, ...]:
        return self.receipts()

    def guarantee(self, delta: float | None = None) -> PrivacyGuarantee:
        """Returns the statement of all releases together; of a vault's key, that of the vault."""
        with self._turn() as ledger:
            return ledger.guarantee((), delta)

    def statement(self, release: str, num_rows: int | None = None) -> str:
        """Returns the statement of one release with its receipts, as JSON to publish."""
        receipts = self.receipts(release)
        if num_rows is not None:
            labels = dataclasses.replace(receipts[-1].labels, size=num_rows)
            receipts = (*receipts[:-1], dataclasses.replace(receipts[-1], labels=labels))
        guarantee = Receipts(receipts).guarantee()
        content = {
            "release": release,
            "num_rows": num_rows,
            "statement": str(guarantee).splitlines(),
            "guarantee": json.loads(guarantee.to_json()),
            "receipts": [receipt.to_json() for receipt in receipts],
        }
        return json.dumps(content, indent=1)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[Ledger]:
        """Lets one process at a time read the ledger and add to it."""
        # A call that was refused may have read some records, so the next one reads all again.
        store = self._store if self._ledger is not None else _store_of(self.path)
        if not store.exists():
            raise LabelStoreError(
                f"the ledger {store.path} of the key {self.path} is missing, so its releases are "
                "unknown. Restore the folder from its newest copy."
            )
        if self._ledger is None:
            with store.locked():
                store.bind_key(self.secret)
                has_vault = "budget" in store.header()
                ledger = Ledger.of_opened(store) if has_vault else _LedgerOfKey(store)
                with ledger.turn():
                    self._ledger, self._store = ledger, store
        with self._ledger.turn():
            yield self._ledger

    def _take(
        self, ledger: Ledger, release: str, public: PublicInput[Any]
    ) -> Callable[[int, dict[str, Any]], Record]:
        """Returns a function that charges a release, with its rows and the output of a statistic.

        Raises if a release on all labels would pass the budget of the vault of this store.
        """
        if ledger.account.unit != "label":
            raise ValueError(
                f"expected a store whose unit is one label, got {self._store.path}, whose vault "
                f"has {ledger.account.unit}s. Draw with its PrivateLabels(..., draws='keyed'), or "
                "take a new key."
            )
        mechanism, priors = public.value
        labels, charge = ledger.label_set, Charge.of(mechanism)
        kind = "draw" if isinstance(mechanism, LabelMechanism) else "release"
        name, rows = type(mechanism).__name__, np.arange(labels.size)
        taken = ledger.take(PlannedUse(release, name, kind, charge, rows), public.receipts)

        def write(num_rows: int, arrays: dict[str, Any]) -> Record:
            notes = charge.assumptions + (KEYED_ASSUMPTIONS if kind == "draw" else ())
            notes += mechanism.claims(" Its draws are untested: run mechanisms.check_mechanism.")
            has_receipts = isinstance(priors, Priors) and priors.receipts
            if priors is not None and not has_receipts:
                notes += (PUBLIC_INPUT,)
            receipt = Receipt(
                dataclasses.replace(labels, size=num_rows),
                charge.with_assumptions(notes),
                what=f"{name}, {'keyed draws' if kind == 'draw' else 'a release'}",
                kind=kind,
                key=release,
                delta=mechanism.delta,
                output_digest=PublicInput.digest_of(arrays["values"]) if arrays else None,
            )
            fields = {"name": release, "binding": _binding(mechanism, priors)}
            record: Record = taken.charge(
                receipt, made_of=public.receipts, release=fields, arrays=arrays
            )
            return record

        return write


class _AccountOfKey(Account):
    def check(self, planned: Any, made_of: Iterable[Receipt] = (), *others: Any) -> list[Receipt]:
        """Returns the receipts of inputs that may be about the labels of the key."""
        return self.inputs_to_charge(made_of)


class _LedgerOfKey(Ledger):
    """The ledger of a key without a vault: its releases add up, and no budget limits them."""

    def __init__(self, store: LabelStore) -> None:
        no_budget: Any = None  # which the account never reads
        account = _AccountOfKey(store.label_set(), no_budget, ReservedUses(store.holders))
        super().__init__(account, store)

    def receipts(self) -> tuple[Receipt, ...]:
        """Returns the receipts of all releases, with those of their inputs."""
        return Receipts.merged(*(release.receipts for release in self.releases.values()))

    def guarantee(self, planned: Sequence[Receipt], delta: float | None) -> PrivacyGuarantee:
        """Returns the statement of all releases together."""
        return Receipts.merged(self.receipts(), planned).guarantee(delta)


def _checked(ledger: Ledger, release: str, public: PublicInput[Any]) -> Release:
    """Returns the records of a release, or raises if its name or its binding is another."""
    if not isinstance(release, str) or not release or "/" in release:
        raise ValueError(f"release must be a name without '/', got {release!r}.")
    entry = ledger.releases[release]
    if entry.binding is None and not _may_name_files(release):
        raise ValueError(
            f"release must be a name of printable characters, of at most {_LONGEST_NAME} bytes "
            f"and without a backslash, got {release!r}. Name it as you name a file."
        )
    if entry.binding not in (None, _binding(*public.value)):
        raise ValueError(
            f"release {release!r} has another mechanism or prior, or was drawn by another "
            "version of the draws: a second draw would reveal labels. Name a new release, "
            "which is charged too."
        )
    return entry


def _registered(ledger: Ledger, release: str) -> Release:
    entry = ledger.releases[release]
    if entry.binding is None:
        names = sorted(name for name, other in ledger.releases.items() if other.binding)
        raise KeyError(f"there is no release {release!r}; there are {names}.")
    return entry


def _store_of(path: pathlib.Path) -> LabelStore:
    if (path.parent / "header.json").exists():
        return LabelStore(path.parent)
    ledger = path.with_name(path.name + _LEDGER)
    check_no_link(ledger)
    return LabelStore(ledger)


class KeyedRows:
    """Rows of a release: their draws, digests for engines, and whether ids are texts (of_text)."""

    def __init__(
        self,
        ids: Any,
        labels: Any,
        mechanism: LabelMechanism,
        key: bytes,
        release: str,
        priors: Any = None,
    ) -> None:
        check_keyed(mechanism)
        if not isinstance(key, bytes) or len(key) != 32:
            raise TypeError("key must be 32 secret bytes. Use ReleaseKey(path).secret.")
        ids = RowIds.of(ids)
        self.of_text = ids.are_texts
        values = np.asarray(labels)
        if values.shape != (len(ids),):
            raise ValueError(f"there are {len(ids)} ids and labels of shape {values.shape}.")
        if len(values) and values.dtype.kind not in "iuf":
            raise TypeError(
                f"labels must be numbers, got dtype {values.dtype}. Give classes as 0..K-1."
            )
        self._names = ids.blocks(key)
        self._id_key = _subkey(key, b"labeldp-id", b"text" * self.of_text)
        self._labels = values if len(values) else values.astype(np.int64)
        self._mechanism = mechanism
        self._priors = None if priors is None else Priors.of(priors)
        bound = json.dumps([release, _binding(mechanism, priors), self.of_text]).encode()
        self._key = _subkey(key, b"labeldp-draw", hashlib.sha256(bound).digest())
        # The label enters, too: a label that was corrected between two runs would otherwise have
        # the random bits of the old one, and both outputs together reveal more than two draws do.
        # The chain of blocks is a CBC-MAC, which is secure for inputs of one length. Inputs with a
        # prior are a block longer, and have another key, since ``_binding`` names their prior.
        # As doubles, 1 and 1.0 are the same label; adding zero makes 0.0 of -0.0.
        codes = np.zeros((len(values), 2), "<u8")
        codes[:, 0] = (self._labels.astype("<f8") + 0.0).view("<u8")
        state = _encrypted(self._key, _encrypted(self._key, self._names) ^ codes)
        if _is_by_row(self._priors):
            state = _encrypted(self._key, state ^ _prior_blocks(self._priors, len(values)))
        self._state = state

    def randomize(self) -> np.ndarray:
        """Returns the noisy labels (n,)."""
        size = len(self._labels)
        chunks = [slice(0, size)]
        if self._priors is not None and size:
            # A mechanism with priors draws the words of one chunk after those of another.
            chunks = list(row_chunks((size, np.shape(self._priors.probabilities)[-1])))
        return np.concatenate([part for rows in chunks for part in self._drawn(rows)])

    def id_digests(self) -> np.ndarray:
        """Returns keyed digests of the ids, ``uint64`` (n, 2), for ``RowIds.repeats_of``."""
        return _encrypted(self._id_key, self._names)

    def fingerprint(self) -> int:
        """Returns a number of 64 bits whose sum over batches identifies the rows."""
        # It reveals nothing without the key. No word is drawn at this position.
        last = self._state ^ np.array([1 << 63, 1 << 63], "<u8")
        return int(_encrypted(self._key, last)[:, 0].sum(dtype=np.uint64))

    def _drawn(self, part: slice) -> Iterator[np.ndarray]:
        words = _KeyedWords(self._state[part], self._key)
        priors = _of_rows(self._priors, part)
        try:
            yield self._mechanism.randomize(self._labels[part], priors, rng=words)
        except _Uneven:
            # A row has the same words among any others, so halves are drawn in place of the whole.
            if part.stop - part.start < 2:
                raise
            middle = (part.start + part.stop) // 2
            yield from self._drawn(slice(part.start, middle))
            yield from self._drawn(slice(middle, part.stop))


class KeyedDraws:
    """The keyed draws of one vault: the ids of its rows, and its key."""

    def __init__(self, ids: Any, size: int) -> None:
        self._ids = RowIds(np.arange(size) if ids is None else ids)
        if len(self._ids) != size:
            raise ValueError(f"there are {len(self._ids)} ids and {size} labels. Give each an id.")
        if ids is not None:
            self._ids.check_distinct()

    @_validate.clears_frames
    def open(self, ledger: Any, store: LabelStore | None) -> None:
        """Reads or makes the key of a store; raises without a store."""
        if store is None:
            raise ValueError(
                "expected a store with keyed draws, got none: the key would be lost with this "
                "process, and nothing could repeat a draw. Give store=path, or leave draws out. "
                "Nothing was drawn."
            )
        path = store.path / KEY_FILE
        with ledger.turn():
            # A new key in place of a lost one would draw every label a second time.
            has_key = path.exists() or store.has_key()
            secret = read_key(path) if has_key else write_key(path)
            store.bind_key(secret)
        self._secret = lambda: secret

    def randomize(
        self, mechanism: Any, labels: np.ndarray, rows: np.ndarray, priors: Any, name: str
    ) -> np.ndarray:
        """Returns the noisy labels of some rows for a named draw."""
        # Names of engines' releases have no "/", so no random bits are shared with them.
        release, of_all = f"vault/{name}", None if priors is None else Priors.of(priors)
        if _is_by_row(of_all):
            _checked_groups(of_all, len(rows))

        def draw(start: int, stop: int) -> np.ndarray:
            part = slice(start, stop)
            ids, of_rows = self._ids.take(rows[part]), _of_rows(of_all, part)
            keyed = KeyedRows(ids, labels[part], mechanism, self._secret(), release, of_rows)
            return keyed.randomize()

        return random_bits.in_blocks(draw, len(rows), None)


def _may_name_files(release: str) -> bool:
    is_plain = release.isprintable() and "\\" not in release and release not in (".", "..")
    return is_plain and len(release.encode()) <= _LONGEST_NAME


class _Uneven(Exception):
    """A mechanism drew words for a part of the rows, such as those that it redraws."""


def check_keyed(mechanism: Mechanism) -> None:
    """Raises if a mechanism has no keyed draws."""
    kinds = LabelMechanism.with_keyed_draws()
    if type(mechanism) not in kinds:
        raise TypeError(
            f"keyed draws need {', '.join(kind.__name__ for kind in kinds)}, got "
            f"{type(mechanism).__name__}. For others use PrivateLabels with stored draws."
        )


class _KeyedWords(np.random.Generator):
    """Gives mechanisms the pseudorandom words of their rows, and no other random numbers."""

    def __init__(self, state: np.ndarray, key: bytes) -> None:
        super().__init__(np.random.PCG64(0))  # This generator is never used.
        self._state, self._key, self._used = state, key, 0

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name != "integers":
            raise TypeError(f"keyed draws have integers, and no {name}. Use stored draws.")
        return super().__getattribute__(name)

    def integers(  # type: ignore[override]
        self, low: Any, high: Any = None, size: Any = None, **kind: Any
    ) -> Any:
        """Returns the next word of each row, pseudorandom below a power of two."""
        bits = int(high).bit_length() - 1
        if low != 0 or high != 1 << bits or size not in (0, len(self._state)):
            raise _Uneven
        if size == 0:
            return np.zeros(0, np.uint64)
        block, place = divmod(self._used, 2)
        if place == 0:
            self._block = _encrypted(self._key, self._state ^ np.array([block, 1], "<u8"))
        self._used += 1
        return self._block[:, place] >> np.uint64(64 - bits)


def _encrypted(key: bytes, blocks: np.ndarray) -> np.ndarray:
    """Returns AES-256 of each block of 16 bytes, ``uint64`` (n, 2)."""
    cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    content: Any = np.ascontiguousarray(blocks, "<u8").reshape(-1).view(np.uint8)
    return np.frombuffer(cipher.update(content), "<u8").reshape(-1, 2)


def _subkey(key: bytes, purpose: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(content, key=key, digest_size=32, person=purpose).digest()


def _is_by_row(priors: Priors | None) -> TypeGuard[Priors]:
    return priors is not None and np.ndim(priors.probabilities) > 1


def _of_rows(priors: Priors | None, part: slice) -> Priors | None:
    if not _is_by_row(priors):
        return priors
    if priors.groups is None:
        return Priors(np.asarray(priors.probabilities)[part])
    return Priors(priors.probabilities, np.asarray(priors.groups)[part])


def _prior_blocks(priors: Priors, size: int) -> np.ndarray:
    table = np.ascontiguousarray(priors.probabilities, "<f8") + 0.0
    ends = 8 * table.shape[1] * np.arange(len(table) + 1)
    state = hashlib.blake2b(digest_size=16)
    digests = b"".join(digests_of_parts(state, table.tobytes(), ends[:-1], ends[1:]))
    blocks = np.frombuffer(digests, "<u8").reshape(-1, 2)
    groups = _checked_groups(priors, size)
    return blocks if groups is None else blocks[groups]


def _checked_groups(priors: Priors, size: int) -> np.ndarray | None:
    rows = len(priors.probabilities)
    if priors.groups is None and rows != size:
        raise ValueError(f"priors have {rows} rows, and there are {size} labels.")
    return priors.checked_groups(size)


def _binding(mechanism: Mechanism, priors: Any) -> str:
    """Returns a digest of a mechanism, of the common prior and of the version of the draws."""
    prior: Any = None if priors is None else Priors.of(priors)
    if prior is not None:  # The prior of a row enters with its label.
        prior = "by row" if _is_by_row(prior) else prior.probabilities.tolist()
    # The first version had no number.
    version = [_DRAW_VERSION] if _DRAW_VERSION > 1 else []
    content = json.dumps([mechanism.to_json(with_receipts=False), prior, *version], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def same_key(path: str, digest: str) -> ReleaseKey:
    """Returns the key at a ``place``: the name in pickled keys, also those of other versions."""
    return ReleaseKey.at(path, digest)
