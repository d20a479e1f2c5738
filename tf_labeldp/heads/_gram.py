"""Public features in blocks: scaled rows, their Gram matrix in bounded memory, and a digest.

Nothing in this file looks at a label, except that those of a data set of pairs are collected.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

_BLOCK_BYTES = 1 << 26
_SAMPLE_BYTES = 1 << 27
_SAMPLE_ROWS = 8192
_MATRICES = 4
"""The Gram matrix, its eigenvectors, and the work space of the eigensolver: doubles (d, d)."""


@dataclasses.dataclass(frozen=True)
class Scan:
    """What one pass over the features gives.

    Attributes:
        gram: ``X^T X`` of the scaled rows, ``float64`` (D, D) in Fortran order; the upper triangle.
        num_rows: n.
        max_l1: the largest L1 norm of a scaled row.
        scale: the largest L2 norm of a row, less the mean.
        mean: m (d,), zeros if the rows were not centred.
        sample: some scaled rows, drawn uniformly, ``float64`` (m, D).
        labels: those of a data set of (x, y) batches, else None.
    """

    gram: np.ndarray
    num_rows: int
    max_l1: float
    scale: float
    mean: np.ndarray
    sample: np.ndarray
    labels: np.ndarray | None


class PublicRows:
    """Rows of features, each brought to unit norm by a public rule.

    With the mean m of all rows (zero if they are not centred), a row x becomes ``u = (x - m) /
    ||x - m||``; with an intercept, ``(u, c) / sqrt(1 + c^2)`` for a constant c. The result has L2
    norm one in either case.

    Args:
        source: an array (n, d) of numbers (also memory-mapped), or a ``tf.data.Dataset`` of batches
            x or (x, y) that gives the same rows in the same order whenever it is read.
        center: whether to subtract the mean, which takes one more pass.
        intercept: c, or zero for none.
        max_bytes: the most memory for what grows with the number of features.
    """

    def __init__(self, source: Any, *, center: bool, intercept: float, max_bytes: float) -> None:
        self._is_dataset = hasattr(source, "as_numpy_iterator")
        self._source: Any = source if self._is_dataset else checked_features(source)
        self._center = bool(center)
        self._mean: np.ndarray | None = None
        self._intercept = float(intercept)
        self._max_bytes = float(max_bytes)
        self._known_digest: str | None = None

    def scan(self) -> Scan:
        """Reads all rows once; raises for rows that can't be scaled."""
        gram: np.ndarray | None = None
        labels: list[np.ndarray] = []
        digest = hashlib.sha256()
        self._mean = self._means() if self._center else None
        sample, progress = _Sample(), Progress("Gram matrix", self._num_rows())
        start, max_l1, largest = 0, 0.0, 0.0
        for raw in self._raw(labels, digest):
            if gram is None:
                width = raw.shape[1] + (self._intercept != 0.0)
                check_memory(width, self._max_bytes)
                gram = np.zeros((width, width), order="F")
            rows, norms = self._scaled(raw, start)
            gram = _add_gram(gram, rows)
            max_l1 = max(max_l1, float(np.abs(rows).sum(axis=1).max()))
            largest = max(largest, float(norms.max()))
            sample.add(rows)
            start += rows.shape[0]
            progress.advance(rows.shape[0])
        if gram is None:
            raise ValueError("features hold no rows; give at least one.")
        self._known_digest = self._finish(digest)
        progress.end()
        y = np.concatenate(labels) if labels else None
        mean = np.zeros(raw.shape[1]) if self._mean is None else self._mean
        return Scan(gram, start, max_l1, largest, mean, sample.rows(), y)

    def blocks(self) -> Iterator[np.ndarray]:
        """Yields the scaled rows, ``float64`` (m, D); raises if they are not those of the scan."""
        digest = hashlib.sha256() if self._is_dataset else None
        start = 0
        for raw in self._raw([], digest):
            yield self._scaled(raw, start)[0]
            start += raw.shape[0]
        if digest is not None and self._finish(digest) != self.digest():
            raise ValueError(
                "the data set gave other rows, or the same in another order, when it was read a "
                "second time. It must not be shuffled: leave out .shuffle(), or pass "
                "reshuffle_each_iteration=False with a seed; augment nothing."
            )

    def digest(self) -> str:
        """Returns a digest of the rows as given, and of how they are scaled."""
        if self._known_digest is None:
            digest = hashlib.sha256()
            for _ in self._raw([], digest):
                pass
            self._known_digest = self._finish(digest)
        return self._known_digest

    def _means(self) -> np.ndarray:
        progress = Progress("Means", self._num_rows())
        total, start = np.zeros(1), 0
        for raw in self._raw([], None):
            _checked_norms(raw, start)
            total = total + raw.sum(axis=0, dtype=np.float64)
            start += raw.shape[0]
            progress.advance(raw.shape[0])
        progress.end()
        return total / max(start, 1)

    def _scaled(self, raw: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns rows of unit norm, and the norms before; raises for rows without direction."""
        given = _checked_norms(raw, start)
        _refuse(given == 0.0, start, "all zero", "")
        norms = given
        if self._mean is not None:
            raw = raw - self._mean
            norms = _checked_norms(raw, start)
            hint = ", or fit with center=False"
            _refuse(norms <= 1e-12 * given, start, "equal to the mean of all rows", hint)
        return scale_rows(raw, norms, self._intercept), norms

    def _finish(self, digest: Any) -> str:
        digest.update(f"center {self._center}, intercept {self._intercept!r}".encode())
        return digest.hexdigest()

    def _num_rows(self) -> int | None:
        return None if self._is_dataset else int(self._source.shape[0])

    def _raw(self, labels: list[np.ndarray], digest: Any) -> Iterator[np.ndarray]:
        """Yields rows as given, in blocks of a size that suits the matrix product."""
        batches = self._dataset_batches(labels) if self._is_dataset else self._array_slices()
        waiting: list[np.ndarray] = []
        started = False
        for batch in batches:
            if waiting and batch.shape[1] != waiting[0].shape[1]:
                raise ValueError(
                    f"batches have {waiting[0].shape[1]} and {batch.shape[1]} features; all need "
                    "the same number."
                )
            if digest is not None:
                if not started:
                    digest.update(f"{batch.dtype.str}{batch.shape[1]}".encode())
                    started = True
                digest.update(np.ascontiguousarray(batch).data)
            waiting.append(batch)
            if sum(len(part) for part in waiting) >= _block_rows(batch.shape[1]):
                yield np.concatenate(waiting) if len(waiting) > 1 else batch
                waiting = []
        if waiting:
            yield np.concatenate(waiting)

    def _array_slices(self) -> Iterator[np.ndarray]:
        step = _block_rows(self._source.shape[1])
        for start in range(0, self._source.shape[0], step):
            yield self._source[start : start + step]

    def _dataset_batches(self, labels: list[np.ndarray]) -> Iterator[np.ndarray]:
        for element in self._source.as_numpy_iterator():
            paired = isinstance(element, tuple)
            if paired and len(element) != 2:
                raise ValueError(
                    f"a data set must give batches x or (x, y), got {len(element)} parts."
                )
            x = checked_features(element[0] if paired else element)
            if paired:
                y = np.asarray(element[1])
                if y.shape[:1] != x.shape[:1]:
                    raise ValueError("a batch has another number of labels than of rows.")
                labels.append(y)
            if x.shape[0]:
                yield x


def checked_features(features: Any) -> np.ndarray:
    """Returns numbers (n, d) as an array, without a copy where it is one; or raises."""
    array = np.asarray(features)
    if array.ndim != 2 or array.shape[1] == 0:
        raise ValueError(
            f"features must have shape (n, d), got {array.shape}. Flatten images with "
            ".reshape(len(x), -1), or turn them into features first."
        )
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"features must be numbers, got dtype {array.dtype}. Encode categories first."
        )
    return array


def check_memory(width: int, max_bytes: float) -> None:
    """Raises if the Gram matrix of so many columns and its eigenvectors do not fit."""
    needed = 8.0 * _MATRICES * width**2 + 4 * _BLOCK_BYTES + 2 * _SAMPLE_BYTES
    if needed > max_bytes:
        fit = math.isqrt(max(int(max_bytes - 4 * _BLOCK_BYTES - 2 * _SAMPLE_BYTES), 0) // 32)
        raise ValueError(
            f"{width} columns need {needed / 1e9:.1f} GB; at most {fit} fit in max_bytes="
            f"{max_bytes / 1e9:.1f} GB. Use fewer features (a random projection knows no label), "
            "or raise max_bytes."
        )


def scale_rows(raw: np.ndarray, norms: np.ndarray, intercept: float) -> np.ndarray:
    """Returns ``(x / ||x||, c) / sqrt(1 + c^2)`` for each row x, ``float64``."""
    length = math.sqrt(1.0 + intercept**2)
    width = raw.shape[1]
    rows = np.empty((raw.shape[0], width + (intercept != 0.0)))
    np.divide(raw, (norms * length)[:, np.newaxis], out=rows[:, :width])
    rows[:, width:] = intercept / length
    return rows


def unit_rows(features: Any, mean: np.ndarray) -> np.ndarray:
    """Returns ``(x - m) / ||x - m||`` for an array (m, d); a row of zeros stays zeros."""
    raw = features - mean
    norms = _checked_norms(raw, 0)
    return scale_rows(raw, np.where(norms > 0.0, norms, 1.0), 0.0)


def _checked_norms(raw: np.ndarray, start: int) -> np.ndarray:
    """Returns the L2 norm of every row, or raises for one that is not finite."""
    wide = raw.astype(np.float64, copy=False)
    norms = np.sqrt(np.einsum("ij,ij->i", wide, wide))
    bad = ~np.isfinite(norms)
    if np.any(bad):
        raise ValueError(
            f"features must be finite, but {int(bad.sum())} row(s) hold NaN, infinity or numbers "
            f"whose squares overflow, the first at row {start + int(bad.argmax())}. Fill them in "
            "or leave these examples out, by a rule that does not look at labels."
        )
    return norms


def _refuse(rows: np.ndarray, start: int, what: str, hint: str) -> None:
    if np.any(rows):
        raise ValueError(
            f"{int(rows.sum())} row(s) of features are {what}, the first at row "
            f"{start + int(rows.argmax())}: they have no direction to scale to unit norm. Leave "
            f"these examples out, or add a constant feature{hint}."
        )


def _block_rows(width: int) -> int:
    return max(1, _BLOCK_BYTES // (8 * width))


def _add_gram(gram: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns the upper triangle of ``gram + rows^T rows``, in place: half of the products."""
    from scipy.linalg import blas

    return blas.dsyrk(1.0, rows.T, beta=1.0, c=gram, overwrite_c=1)


class _Sample:
    """Keeps uniformly drawn rows of a stream of unknown length: those with the least random keys.

    Evenly spaced rows would not do: every second image of MNIST is from another group of writers.
    The choice is public, repeatable, and the same however the stream is cut into blocks.
    """

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self._rows: np.ndarray | None = None
        self._keys = np.zeros(0)

    def add(self, rows: np.ndarray) -> None:
        """Takes the rows whose keys are among the least so far."""
        most = max(64, min(_SAMPLE_ROWS, _SAMPLE_BYTES // (8 * rows.shape[1])))
        keys: np.ndarray = self._rng.random((rows.shape[0],))
        limit = self._keys.max() if self._keys.size == most else 1.0
        chosen = keys < limit
        kept = rows[chosen] if self._rows is None else np.concatenate([self._rows, rows[chosen]])
        all_keys: np.ndarray = np.concatenate([self._keys, keys[chosen]])
        if all_keys.size > most:
            least = np.flatnonzero(all_keys < np.partition(all_keys, most)[most])
            kept, all_keys = kept[least], all_keys[least]
        self._rows, self._keys = kept, all_keys

    def rows(self) -> np.ndarray:
        """Returns what was kept, in the order of the stream."""
        return np.zeros((0, 1)) if self._rows is None else self._rows


class Progress:
    """Says on stderr how far a long pass is: nothing in the first seconds, then now and then."""

    def __init__(self, what: str, total: int | None) -> None:
        self._what, self._total, self._rows = what, total, 0
        self._start = time.monotonic()
        self._next = self._start + 5.0
        self._spoke = False

    def advance(self, rows: int) -> None:
        """Counts rows."""
        self._rows += rows
        now = time.monotonic()
        if now >= self._next:
            self._next, self._spoke = now + 10.0, True
            of = f" of {self._total:,}" if self._total else ""
            rate = self._rows / (now - self._start)
            print(
                f"{self._what}: {self._rows:,}{of} rows, {rate:,.0f} a second",
                file=sys.stderr,
                flush=True,
            )

    def end(self) -> None:
        """Says how long it took, if it said anything."""
        if self._spoke:
            taken = time.monotonic() - self._start
            print(f"{self._what}: {self._rows:,} rows in {taken:.0f} s", file=sys.stderr)
