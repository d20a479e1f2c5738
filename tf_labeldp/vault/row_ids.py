"""Ids of rows: whole numbers or texts, as blocks of a cipher and as public hashes."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tf_labeldp._columns import Column
from tf_labeldp.mechanisms import random_bits

_HASHED_BYTES = 64
"""Bytes of an id that its public hash depends on."""
_ODD = 0x9E3779B97F4A7C15
"""An odd number without pattern: 2^64 divided by the golden ratio."""


class RowIds:
    """The ids of rows, none missing: whole numbers or texts, as an Arrow array (n,).

    Example:
        >>> ids = RowIds(["anna", "bert"])
        >>> len(ids), ids.are_texts, ids.blocks(bytes(32)).shape
        (2, True, (2, 2))
    """

    def __init__(self, ids: Any) -> None:
        if isinstance(ids, (pa.Array, pa.ChunkedArray)):
            array = ids.cast(ids.type.value_type) if pa.types.is_dictionary(ids.type) else ids
            if array.null_count:
                Column.of(array).complete("ids")
        else:
            values = Column.of(ids).names("ids")
            if values.ndim != 1:
                raise ValueError(f"expected ids of shape (n,), one per row, got {values.shape}.")
            array = _arrow_of(values.tolist() if values.dtype.kind in "OSb" else values)
        if pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type):
            # Tensors of strings contain bytes.
            array = _arrow_of(array, pa.large_string())
        self.array = array
        if not (self.are_texts or pa.types.is_integer(array.type) or not len(array)):
            raise TypeError(
                f"ids must be whole numbers or text, got {array.type}. Turn them into text."
            )

    @classmethod
    def of(cls, ids: Any) -> RowIds:
        """Returns ids that are checked; those of this class are."""
        return ids if isinstance(ids, cls) else cls(ids)

    def __len__(self) -> int:
        return len(self.array)

    @functools.cached_property
    def are_texts(self) -> bool:
        """Whether the ids are texts."""
        kind = self.array.type
        return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))

    def take(self, rows: np.ndarray) -> RowIds:
        """Returns the ids of some rows, without a copy if these follow one another."""
        if len(rows) and np.array_equal(rows, rows[0] + np.arange(len(rows))):
            return self._part(self.array.slice(int(rows[0]), len(rows)))
        return self._part(self.array.take(pa.array(rows)))

    def _part(self, array: Any) -> RowIds:
        found = object.__new__(RowIds)
        found.array = array
        return found

    def blocks(self, key: bytes) -> np.ndarray:
        """Returns a block of 16 bytes for each id, ``uint64`` (n, 2); no two ids share one."""
        if self.are_texts:
            return self._text_blocks(key)
        blocks = np.zeros((len(self), 2), "<u8")
        if len(self):
            numbers = self.array.to_numpy(zero_copy_only=False)
            blocks[:, 0] = numbers.astype("<u8" if numbers.dtype.kind == "u" else "<i8").view("<u8")
            blocks[:, 1] = numbers < 0  # A number has the same block in any width.
        return blocks

    def _text_blocks(self, key: bytes) -> np.ndarray:
        """Returns blocks of texts, with a digest in place of texts above 15 bytes.

        The last byte is the length, or 16 for a digest, so that no two texts share a block.
        """
        content, starts, lengths = self.text_parts()
        blocks = np.stack([_words_of(content, starts, lengths, at) for at in (0, 8)], 1)
        blocks[:, 1] &= (1 << 56) - 1
        blocks[:, 1] |= np.minimum(lengths, 16).astype("<u8") << np.uint64(56)
        if (rows := np.flatnonzero(lengths > 15)).size:
            state = hashlib.blake2b(key=key, digest_size=15, person=b"labeldp-text")
            digests = digests_of_parts(state, content, starts[rows], (starts + lengths)[rows])
            joined = b"\x10".join([*digests, b""])
            blocks[rows] = np.frombuffer(joined, "<u8").reshape(-1, 2)
        return blocks

    def text_parts(self) -> tuple[bytes, np.ndarray, np.ndarray]:
        """Returns the bytes of all texts, and the start and length of each."""
        texts = self.array.cast(pa.large_binary())
        texts = texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts
        if not len(texts):
            return b"", np.zeros(0, np.int64), np.zeros(0, np.int64)
        _, offsets, content = texts.buffers()
        bounds = np.frombuffer(offsets, np.int64)[texts.offset :][: len(texts) + 1]
        first, last = bounds[[0, -1]].tolist()
        used = b"" if content is None else content.slice(first, last - first).to_pybytes()
        return used, bounds[:-1] - first, np.diff(bounds)

    def hashes(self) -> np.ndarray:
        """Returns a public hash of each id, of the first bytes of a text, ``uint64`` (n,)."""
        if not self.are_texts:
            return self.blocks(b"")[:, 0].copy()
        content, starts, lengths = self.text_parts()
        hashes = lengths.astype(np.uint64)
        for at in range(0, min(_HASHED_BYTES, int(lengths.max(initial=0))), 8):
            hashes = (hashes ^ _words_of(content, starts, lengths, at)) * np.uint64(_ODD)
            hashes ^= hashes >> np.uint64(32)
        return hashes

    def check_distinct(self) -> None:
        """Raises if an id names more than one row."""

        def hashes_of(start: int, stop: int) -> np.ndarray:
            return self._part(self.array.slice(start, stop - start)).hashes()

        ordered = np.sort(random_bits.in_blocks(hashes_of, len(self), None))
        if np.any(ordered[1:] == ordered[:-1]):
            counts = pc.value_counts(self.array).field("counts").to_numpy()
            size = len(self)
            self.refuse_repeats(int(np.sum(counts > 1)), size - counts.size, size)

    @staticmethod
    def repeats_of(digests: np.ndarray) -> tuple[int, int]:
        """Returns the number of repeated digests (n, 2), and the number of surplus rows."""
        ordered = digests[np.lexsort((digests[:, 1], digests[:, 0]))]
        is_copy = (ordered[1:] == ordered[:-1]).all(axis=1)
        is_first = is_copy & ~np.concatenate([[False], is_copy])[:-1]
        return int(is_first.sum()), int(is_copy.sum())

    @staticmethod
    def refuse_repeats(repeated: int, too_many: int, rows: int) -> None:
        """Raises if ids are repeated among the rows of a release or a vault."""
        if repeated:
            raise ValueError(
                f"{repeated} ids name more than one row ({too_many} rows too many of {rows}), so "
                "rows would share their noise. Nothing was returned; give each row its own id."
            )


def _arrow_of(ids: Any, kind: Any = None) -> Any:
    """Returns ids as an Arrow array; Python's whole numbers from 2^63 on need their own type."""
    try:
        if kind is not None:
            return ids.cast(kind)
        try:
            return pa.array(ids)
        except (OverflowError, pa.ArrowInvalid):
            return pa.array(ids, pa.uint64())
    except (OverflowError, UnicodeError, pa.ArrowInvalid, pa.ArrowTypeError):
        raise ValueError(
            "expected ids that are whole numbers of one type, below 2^64, or texts of valid "
            "Unicode, got others. Turn numbers into texts, and mend texts in UTF-8."
        ) from None


def _words_of(content: bytes, starts: np.ndarray, lengths: np.ndarray, at: int) -> np.ndarray:
    """Returns the bytes ``at`` to ``at + 7`` of each text, zero beyond its end: ``uint64`` (n,)."""
    padded = content + bytes(16)
    words = np.ndarray(len(padded) - 7, "<u8", padded, strides=(1,))  # one from each byte on
    masks = np.array([(1 << 8 * size) - 1 for size in range(9)], "<u8")  # of the first bytes
    inside = np.clip(lengths - at, 0, 8)
    return words[np.minimum(starts + at, len(content))] & masks[inside]


def digests_of_parts(
    state: Any, content: bytes, starts: np.ndarray, stops: np.ndarray
) -> list[bytes]:
    """Returns the digest of each part of a content, from a copy of the state for each.

    A copy takes less time than a new state.
    """
    copy, found = state.copy, []
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        own = copy()
        own.update(content[start:stop])
        found.append(own.digest())
    return found
