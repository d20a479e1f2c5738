"""Public features as rows of unit norm: their scaling, and passes over them in bounded memory.

Unit norm is what the sensitivity of a release rests on; ``Scaling`` makes it. ``docs/heads.md``
derives the spread over directions (``spread_shares``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tf_labeldp._progress import Progress
from tf_labeldp.features._reader import (
    NO_ROWS,
    SHUFFLED,
    FeatureSource,
    add_to_digest,
    new_digest,
)
from tf_labeldp.heads._label_source import raw_digests, row_digests

_SHARE = 4
"""One part in so many of the memory is for each sample of rows."""
_DESIGN_ROWS = 100_000
_MATRICES = 5
"""Doubles (d, d) at a time: a covariance or Gram matrix, its eigenvectors, the work space of the
eigensolver, and the map to the chosen directions."""
_SAME = 1e-12
_SKETCH = 16
_SKETCH_TOLERANCE = 0.02
_LARGEST = 1e38
"""Longer rows leave single precision, in which samples of rows are kept."""
_ENTRIES = 1 << 21
"""Of the scaled rows that are in use at a time: small enough for a processor's cache."""
_SINGLE_WIDTH = 512
"""From so many features on, the Gram matrix of rows mapped in single precision is made in it."""
_SINGLE_ROWS = 2048
"""Rows that are summed in single precision, at most."""
GRAM_ERROR = 1.25e-4
"""Above ``(1 + 2^-24)^2 (1 + b 2^-24 / (1 - b 2^-24)) - 1`` for sums of b = 2049 terms."""
_RANK = 1e-10
"""An eigenvalue below this part of the largest counts as zero: rows are mapped in single precision,
in which such a direction, 1e-5 of a row's length, is known to one part in a hundred."""


@dataclasses.dataclass(frozen=True)
class Scaling:
    """How a row of features becomes one of unit norm, by public numbers alone.

    With the mean m and the map M, a row x becomes ``u = (x - m) / ||x - m||`` and then
    ``u M / ||u M||``; with an intercept c, ``(u M / ||u M||, c) / sqrt(1 + c^2)``. A row of zeros
    stays one.

    Attributes:
        mean: m (d,), zeros for none.
        spread: M (d, m), in whose precision rows are mapped; or None for none.
        intercept: c, zero for none.
        size: a public size of ``x - m``.
    """

    mean: np.ndarray
    spread: np.ndarray | None
    intercept: float
    size: float = 1.0

    def rows(self, raw: np.ndarray) -> np.ndarray:
        """Returns scaled rows, ``float64`` (m, D)."""
        moved = raw - self.mean
        norms = _norms(moved)
        norms[norms <= _SAME * _norms(raw)] = np.inf
        moved /= norms[:, np.newaxis]
        if self.spread is not None:
            moved = (moved.astype(self.spread.dtype) @ self.spread).astype(np.float64)
            norms = _norms(moved)
            norms[norms == 0.0] = np.inf
            moved /= norms[:, np.newaxis]
        if not self.intercept:
            return moved
        length = math.sqrt(1.0 + self.intercept**2)
        constant = np.full((len(moved), 1), self.intercept / length)
        return np.concatenate([moved / length, constant], axis=1)


class PublicRows:
    """Rows of features for one fit, read twice: by the survey, and by the scan or the release.

    The release scans as it reads. Where something of the scan is asked for before the release, as
    for Laplace noise, the rows are read three times.

    Args:
        source: where the features come from.
        max_bytes: the most memory for what grows with the number of features.
        sample_rows: the most scaled rows that are sampled; None for as many as fit.

    Attributes:
        num_rows: n, from the survey on.
        labels: those of a data set of (x, y) batches, else None; from the survey on.
        digests: keyed digests of each row, of its features and of what an encoder made them of,
            ``uint64`` (n, 1 or 2); from the survey on.
        sample: some rows, drawn uniformly, ``float32``: as given (m, d) after the survey, scaled
            (m, D) after the scan.
        scaling: from the design on.
        gram: ``X^T X`` of the scaled rows, ``float64`` (D, D) in Fortran order, the upper triangle;
            from the scan on. ``GramMatrix`` states its error.
        max_l1: the largest L1 norm of a scaled row; from the scan on.
    """

    num_rows: int
    labels: np.ndarray | None
    digests: np.ndarray
    sample: np.ndarray
    scaling: Scaling
    gram: np.ndarray
    max_l1: float

    def __init__(
        self, source: FeatureSource, max_bytes: float, sample_rows: int | None = None
    ) -> None:
        self._source = source
        self._max_bytes = float(max_bytes)
        self._sample_rows = sample_rows
        self._is_scanned = False
        self._sample_bytes = int(self._max_bytes / _SHARE)
        self._order: str | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(n, d) of the features as given, from the survey to the scan."""
        return self.num_rows, self.sample.shape[1]

    def survey(self) -> None:
        """Reads all rows once; raises for rows that can't be scaled."""
        labels: list[np.ndarray] = []
        known: list[np.ndarray] = []
        known_raw: list[np.ndarray | None] = []

        def see(x: Any, y: Any) -> None:
            known_raw.append(raw_digests(x) if self._source.is_encoded else None)
            if y is not None:
                labels.append(np.asarray(y))

        sample: RowSample | None = None
        start = 0
        for rows in self._given("Reading features", see):
            if sample is None:
                check_memory(rows.shape[1], self._max_bytes)
                sample = RowSample(rows.shape[1], self._sample_bytes, _DESIGN_ROWS)
            for part in _in_parts(rows):
                _refuse_zeros(checked_norms(part, start) == 0.0, start)
                known.append(row_digests(part))
                start += len(part)
            sample.add(rows)
        if sample is None:
            raise ValueError(NO_ROWS)
        columns = [np.concatenate(known)]
        raw = [part for part in known_raw if part is not None]
        if len(raw) == len(known_raw) and sum(map(len, raw)) == start:
            columns.append(np.concatenate(raw))
        self.digests = np.stack(columns, axis=1)
        self.num_rows, self.sample = start, sample.rows()
        self.labels = np.concatenate(labels) if labels else None

    def design(self, *, center: bool, intercept: float, noise_to_signal: float | None) -> None:
        """Chooses the scaling, from the sample of the survey."""
        sample = self.sample
        mean = np.zeros(sample.shape[1])
        if center:
            mean = sample.mean(axis=0, dtype=np.float64)
        units = Scaling(mean, None, 0.0)
        size, differ = 0.0, False
        covariance = np.zeros((mean.size, mean.size), order="F")
        for block in _in_parts(sample):
            size = max(size, float(_norms(block - mean).max()))
            rows = units.rows(block)
            differ = differ or bool(np.any(rows))
            if noise_to_signal is not None:
                covariance = add_gram(covariance, rows)
        if not differ:
            raise ValueError(
                "all rows of features are the same, so that nothing can be learnt from them. "
                "Check how they were made."
            )
        spread = None
        if noise_to_signal is not None:
            covariance /= len(sample)
            spread = spread_map(covariance, noise_to_signal)
        self.scaling = Scaling(mean, spread, float(intercept), size or 1.0)

    def scan(self) -> None:
        """Reads all rows again, unless the release has: for Gram matrix, sample and digest."""
        if not self._is_scanned:
            for _ in self._scanning("Gram matrix"):
                pass

    def blocks(self) -> Iterator[np.ndarray]:
        """Yields the scaled rows, ``float64`` (m, D), for the release; raises if they changed."""
        if self._is_scanned:
            return self._scaled("Releasing the moments")
        return self._scanning("Gram matrix and moments")

    def _scanning(self, what: str) -> Iterator[np.ndarray]:
        """Yields the scaled rows; when all are read, sets what is made of them."""
        self.__dict__.pop("sample", None)  # it is large
        gram: GramMatrix | None = None
        max_l1 = 0.0
        for rows in self._scaled(what):
            if gram is None:
                width = rows.shape[1]
                gram = GramMatrix(width, single=self.scaling.spread is not None)
                sample = RowSample(width, self._sample_bytes, self._sample_rows)
                weights = np.random.default_rng(1)
                directions = np.random.default_rng(2).normal(size=(width, _SKETCH))
                sketch = np.zeros(_SKETCH)
            sketch += weights.normal(size=len(rows)) @ (rows @ directions)
            gram.add(rows)
            max_l1 = max(max_l1, float(np.abs(rows).sum(axis=1).max()))
            sample.add(rows)
            yield rows
        if gram is None:
            raise ValueError(NO_ROWS)
        self.gram, self.sample, self.max_l1 = gram.total(), sample.rows(), max_l1
        self._sketch, self._is_scanned = sketch, True

    def digest(self) -> str:
        """Returns a sketch of the scaled rows; see ``matches``."""
        self.scan()
        return " ".join(float(number).hex() for number in self._sketch)

    def matches(self, digest: str) -> bool:
        """Returns whether a digest is of the same rows, but for rounding.

        Another machine may round the same rows otherwise, so random sums of all their entries are
        compared.
        """
        try:
            other = np.array([float.fromhex(part) for part in digest.split()])
        except ValueError:
            return False
        self.scan()
        if other.shape != self._sketch.shape:
            return False
        distance = np.linalg.norm(self._sketch - other)
        return bool(distance <= _SKETCH_TOLERANCE * np.linalg.norm(self._sketch))

    def _scaled(self, what: str) -> Iterator[np.ndarray]:
        for block in self._given(what):
            for part in _in_parts(block):
                yield self.scaling.rows(part)

    def _given(
        self, what: str, see: Callable[[Any, Any], None] | None = None
    ) -> Iterator[np.ndarray]:
        """Yields blocks of rows as given, and raises if a data set changed since the first time."""
        # Arrays stay as they are.
        digest = new_digest() if self._source.num_rows is None else None

        def look(x: Any, y: Any) -> None:
            if digest is not None:
                add_to_digest(digest, x)
            if see is not None:
                see(x, y)

        progress = Progress(what, self._source.num_rows)
        for rows in self._source.blocks(look):
            yield rows
            progress.advance(rows.shape[0])
        progress.end()
        if digest is not None:
            self._order = self._order or digest.hexdigest()
            if digest.hexdigest() != self._order:
                raise ValueError(SHUFFLED)


class GramMatrix:
    """``X^T X`` of rows (m, D) that come in blocks.

    In single precision, from 512 columns on, at most 2,048 rows are summed before their sum is
    added in double precision. Entry (i, j) of A is then off by at most ``1.25e-4 sqrt(A_ii A_jj)``,
    whatever the rows: by about 1e-7 of that root for rows that differ, 2e-6 for rows that are all
    the same. In double precision it is off by ``1.2e-16 n sqrt(A_ii A_jj)`` at most, for n rows.
    The matrix is made without labels: its error is no part of the sensitivity.

    Args:
        width: D.
        single: whether single precision will do.
    """

    def __init__(self, width: int, single: bool) -> None:
        self._total = np.zeros((width, width), order="F")
        self._part: np.ndarray | None = None
        self._rows = 0
        if single and width >= _SINGLE_WIDTH:
            self._part = np.zeros((width, width), np.float32, order="F")

    def add(self, rows: np.ndarray) -> None:
        """Takes the next rows."""
        if self._part is None:
            self._total = add_gram(self._total, rows)
            return
        for start in range(0, len(rows), _SINGLE_ROWS):
            part = rows[start : start + _SINGLE_ROWS].astype(np.float32)
            if self._rows + len(part) > _SINGLE_ROWS:
                self._flush(self._part)
            self._part = add_gram(self._part, part)
            self._rows += len(part)

    def total(self) -> np.ndarray:
        """Returns the upper triangle, ``float64`` (D, D) in Fortran order."""
        if self._part is not None:
            self._flush(self._part)
        return self._total

    def _flush(self, part: np.ndarray) -> None:
        self._total += part
        part[:] = 0.0
        self._rows = 0


class RowSample:
    """Keeps uniformly drawn rows of a stream of unknown length, ``float32``.

    Evenly spaced rows would not do: every second image of MNIST is from another group of writers.
    The choice is public, repeatable, and the same however the stream is cut into blocks.

    Source: Vitter 1985, "Random sampling with a reservoir", algorithm R.
    """

    def __init__(self, width: int, max_bytes: int, max_rows: int | None) -> None:
        self._most = max(64, min(max_bytes // (4 * width), max_rows or max_bytes))
        self._rng = np.random.default_rng(0)
        self._parts: list[np.ndarray] = []
        self._full: np.ndarray | None = None
        self._seen = 0

    def add(self, rows: np.ndarray) -> None:
        """Takes the next rows of the stream."""
        left = max(self._most - self._seen, 0)
        places = np.arange(self._seen, self._seen + len(rows))
        self._seen += len(rows)
        draws = self._rng.random(len(rows))  # also for the first ones: cuts must not matter
        if left:
            self._parts.append(rows[:left].astype(np.float32))
        if len(rows) > left:
            kept = self.rows()
            slots = (draws[left:] * (places[left:] + 1)).astype(np.int64)
            hit = slots < self._most
            kept[slots[hit]] = rows[left:][hit]

    def rows(self) -> np.ndarray:
        """Returns what was kept; the array itself."""
        if self._full is not None:
            return self._full
        if not self._parts:
            return np.zeros((0, 1), np.float32)
        kept = np.empty((sum(map(len, self._parts)), self._parts[0].shape[1]), np.float32)
        start = 0
        while self._parts:  # one by one: never all of them twice
            part = self._parts.pop(0)
            kept[start : start + len(part)] = part
            start += len(part)
        if len(kept) < self._most:
            self._parts = [kept]
        else:
            self._full = kept
        return kept


def check_memory(width: int, max_bytes: float) -> None:
    """Raises if the matrices of so many features do not fit beside the samples of rows."""
    room = max_bytes * (1.0 - 2.0 / _SHARE)
    needed = 8.0 * _MATRICES * width**2
    if needed > room:
        fit = math.isqrt(max(int(room), 0) // (8 * _MATRICES))
        raise ValueError(
            f"{width} features need {needed / 1e9:.1f} GB for their matrices; at most {fit} fit in "
            f"max_bytes={max_bytes / 1e9:.1f} GB, half of which is for samples. Use fewer features "
            "(a random projection knows no label), or raise max_bytes."
        )


def add_gram(gram: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns the upper triangle of ``gram + rows^T rows``, in place: half of the products."""
    from scipy.linalg import blas

    product = blas.ssyrk if gram.dtype == np.float32 else blas.dsyrk
    return product(1.0, rows.T, beta=1.0, c=gram, overwrite_c=1)


def _in_parts(rows: np.ndarray) -> Iterator[np.ndarray]:
    step = max(1, _ENTRIES // rows.shape[1])
    return (rows[start : start + step] for start in range(0, len(rows), step))


def checked_norms(raw: np.ndarray, start: int) -> np.ndarray:
    """Returns the L2 norm of every row, or raises for one that is not finite."""
    norms = _norms(raw)
    bad = ~(norms < _LARGEST)  # true for NaN too
    if np.any(bad):
        first = int(bad.argmax())
        columns = np.flatnonzero(~(np.abs(raw[first]) < _LARGEST))[:3].tolist()
        where = f", column(s) {', '.join(map(str, columns))}" if columns else ""
        raise ValueError(
            f"features must be finite, but {int(bad.sum())} row(s) hold NaN, infinity or numbers "
            f"beyond {_LARGEST:g}, the first at row {start + first}{where}. Fill them in "
            "or leave these examples out, by a rule that does not look at labels."
        )
    return norms


def _norms(rows: np.ndarray) -> np.ndarray:
    wide = rows.astype(np.float64, copy=False)
    return np.sqrt(np.einsum("ij,ij->i", wide, wide))


def _refuse_zeros(rows: np.ndarray, start: int) -> None:
    if np.any(rows):
        raise ValueError(
            f"{int(rows.sum())} row(s) of features are all zero, the first at row "
            f"{start + int(rows.argmax())}: they have no direction to scale to unit norm. Leave "
            "these examples out, or add a constant feature."
        )


def spread_shares(eigenvalues: np.ndarray, noise_to_signal: float) -> np.ndarray:
    """Returns the share (d,) of the squared length that each direction gets; their sum is one."""
    strength = eigenvalues / eigenvalues.sum()
    with np.errstate(divide="ignore", over="ignore"):
        depth = noise_to_signal / strength
    # Only differences of depths matter; as they are, a huge one would swallow the unit of water.
    depth -= depth.min()
    ordered = np.sort(depth)
    # With the m shallowest directions under water, the level is (1 + sum of their depths) / m.
    with np.errstate(over="ignore"):
        levels = (1.0 + np.cumsum(ordered)) / np.arange(1, depth.size + 1)
    level = levels[np.flatnonzero(levels > ordered)[-1]]
    shares = np.maximum(level - depth, 0.0)
    return shares / shares.sum()


def spread_map(covariance: np.ndarray, noise_to_signal: float | None) -> np.ndarray | None:
    """Returns the map (d, m), ``float32``, from centred rows to the directions that get a share."""
    if noise_to_signal is None:
        return None
    from scipy import linalg

    driver = "evd" if len(covariance) > 1 else "ev"  # some versions of SciPy fail at 1 x 1
    values, vectors = linalg.eigh(covariance, lower=False, driver=driver, overwrite_a=True)
    if values[-1] <= 0.0:  # rows that do not differ: nothing to choose from
        return None
    # A large budget would spend a full share on rounding.
    values = np.where(values > _RANK * values[-1], values, 0.0)
    shares = spread_shares(values, noise_to_signal)
    kept = shares > 0.0
    gains = np.sqrt(shares[kept] / values[kept])
    vectors = vectors[:, kept]
    # An eigenvector's sign is arbitrary; a stored release is of use with the same signs alone.
    largest = np.abs(vectors).argmax(axis=0)
    gains *= np.sign(vectors[largest, np.arange(largest.size)])
    return (vectors * gains).astype(np.float32)
