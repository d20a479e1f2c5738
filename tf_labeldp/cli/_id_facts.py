"""What is found out of the ids while they are copied: how often one comes, and which they are.

Ids are public, so what is said of them may be published.
"""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tf_labeldp.cli._errors import CommandError
from tf_labeldp.vault._store import publish

_DIGEST_FILE = "ids-digest"
_CHUNK_BYTES = 1 << 20
"""Ids are hashed so many bytes of text at a time, which bounds the working memory."""


class IdFacts:
    """Takes ids chunk by chunk, in the order of the rows.

    Args:
        names: of the id columns; none for row numbers.
        size: number of rows.
        digested: whether a digest is wanted too.
    """

    def __init__(self, names: Sequence[str], size: int, *, digested: bool) -> None:
        # Whose rows they are is told by one id; several columns do not say which of them it is.
        self._hashes = np.empty(size if len(names) == 1 else 0, np.uint64)
        self._hashed = 0
        self._hash = _TextHash()
        # Texts and lengths apart, so that the size of the chunks makes no difference.
        self._digests = [(hashlib.sha256(), hashlib.sha256()) for _ in names] if digested else []
        self._names = names

    def add(self, columns: Sequence[Any]) -> None:
        """Takes one Arrow array for each id column."""
        if not self._names or not (self._digests or self._hashes.size):
            return
        for place, column in enumerate(columns):
            content, lengths = _texts(column)
            if self._digests:
                for digest, array in zip(self._digests[place], (content, lengths), strict=True):
                    digest.update(np.ascontiguousarray(array).data)
            if self._hashes.size:
                end = self._hashed + lengths.size
                self._hash.into(self._hashes[self._hashed : end], content, lengths)
                self._hashed = end

    def most_rows(self) -> int | None:
        """Returns the largest number of rows with the same id; None without a single id column.

        By hashes of 64 bits: of ten million ids two share one in one of 100,000 tables.
        """
        if not self._hashes.size:
            return None
        hashes = self._hashes
        hashes.sort()
        low, high = 1, hashes.size  # some id comes `low` times, none more than `high` times
        while low < high:
            middle = (low + high + 1) // 2
            if np.any(hashes[middle - 1 :] == hashes[: hashes.size - middle + 1]):
                low = middle
            else:
                high = middle - 1
        return low

    def check_store(self, store: pathlib.Path) -> None:
        """Raises if the store's noisy labels went to rows of other ids; else remembers these.

        Comes before anything is published, so no table is out that the store knows nothing of.

        Raises:
            CommandError: the ids differ in a name, a value or their order.
            OSError: the store cannot be written to.
        """
        whole = hashlib.sha256(repr(tuple(self._names)).encode())
        for pair in self._digests:
            for digest in pair:
                whole.update(digest.digest())
        path = store / _DIGEST_FILE
        try:
            publish(path, whole.hexdigest().encode())
        except FileExistsError:
            if path.read_bytes() != whole.hexdigest().encode():
                raise CommandError(
                    f"the store {store} holds noisy labels of rows with other ids (another name, "
                    "value or order); give the input and --id of the first run, or a new --store "
                    "(publishing from both costs the sum of their epsilons)"
                ) from None


class _TextHash:
    """Hashes of texts: a sum of random numbers, one for each byte and its place."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng()
        self._of_byte = self._draw(256)
        self._of_place = self._draw(64)
        self._of_null = self._draw(1)[0]

    def into(self, hashes: np.ndarray, content: np.ndarray, lengths: np.ndarray) -> None:
        """Writes the hashes of texts that lie one after another; a length of -1 is a null."""
        ends = np.cumsum(np.maximum(lengths, 0))
        row = start = 0
        while row < lengths.size:
            # At least one row, however long it is.
            stop = max(int(np.searchsorted(ends, start + _CHUNK_BYTES, side="right")), row + 1)
            end = int(ends[stop - 1])
            hashes[row:stop] = self._of(content[start:end], lengths[row:stop])
            row, start = stop, end

    def _of(self, content: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        sizes = np.maximum(lengths, 0)
        ends = np.cumsum(sizes)
        longest = int(sizes.max())
        if longest > self._of_place.size:
            more = self._draw(longest - self._of_place.size)
            self._of_place = np.concatenate([self._of_place, more])
        place = np.arange(content.size) - np.repeat(ends - sizes, sizes)
        sums = np.zeros(content.size + 1, np.uint64)
        np.cumsum(self._of_byte[content] * self._of_place[place], out=sums[1:])  # modulo 2^64
        found = sums[ends] - sums[ends - sizes]
        return np.where(lengths < 0, self._of_null, found)

    def _draw(self, size: int) -> np.ndarray:
        # Odd: a product with an even number would lose bits.
        return self._rng.integers(0, 2**64, size, np.uint64) | np.uint64(1)


def _texts(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes of all texts of an Arrow array, ``uint8``, and ``int64`` lengths."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        texts = column.cast(pa.string()).cast(pa.large_binary())
    except pa.ArrowException:  # bytes that are no text, or a type without one, such as a list
        texts = pa.array([repr(value).encode() for value in column.to_pylist()], pa.large_binary())
    if texts.null_count:
        sizes = pc.if_else(texts.is_valid(), pc.binary_length(texts), -1)
        texts = texts.fill_null(b"")  # what lies under a null may be anything
    else:
        sizes = pc.binary_length(texts)
    lengths = sizes.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    _, offsets, content = texts.buffers()
    if content is None or not len(texts):
        return np.empty(0, np.uint8), lengths
    bounds = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return np.frombuffer(content, np.uint8)[int(bounds[0]) : int(bounds[-1])], lengths
