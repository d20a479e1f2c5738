"""Public features as rows of unit norm: their scaling, and passes over them in bounded memory.

The sensitivity of a release rests on the unit norm, which ``Scaling.rows`` sets. ``docs/theory.md``
derives the spread over directions (``spread_shares``).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from tf_labeldp._progress import Progress
from tf_labeldp.features.reader import FeatureRows

_SHARE = 4
"""Each sample of rows, and the scaled rows, may use the memory divided by this."""
_DESIGN_ROWS = 100_000
"""The most rows in the survey's sample: enough for a mean and a covariance."""
_MATRICES = 5
"""Matrices (d, d) of doubles at a time: a covariance or Gram matrix, its eigenvectors, the
eigensolver's work space, and the map to the chosen directions. A fit keeps one more, its design's,
in the memory of the rows that were kept for the release."""
_SAME = 1e-12
"""A row nearer to the mean than this fraction of its length equals the mean up to rounding."""
_SKETCH = 16
"""Random sums in a digest of rows."""
_SKETCH_TOLERANCE = 0.02
"""Relative distance between digests of equal rows, as two machines may round them."""
_LARGEST = 1e38
"""Longer rows overflow single precision, which samples of rows use."""
_ENTRIES = 1 << 21
"""Numbers per block of scaled rows: enough for fast matrix products."""
_CACHED = 1 << 17
"""Numbers that one step after the other changes: they stay in a core's own cache."""
_SINGLE_WIDTH = 512
"""From this many features on, rows mapped in single precision get a Gram matrix in it too."""
_SINGLE_ROWS = 2048
"""The most rows summed in single precision, which bounds the error of ``add_gram``."""
_MOST_GAIN = 4.0
"""The most that half a spread multiplies a direction's share by, before shares are divided by their
sum. With a large budget, more would let rare categories fill the length of their rows."""
_RANK = 1e-10
"""An eigenvalue below this fraction of the largest counts as zero: such a direction, 1e-5 of a
row's length, has a relative error of one percent in single precision."""
_SINGLE_RANK = 1e-5
"""The least such fraction of a direction with a share, for a covariance in single precision."""


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The scaling of a row of features to unit norm, by public numbers alone.

    With the mean m and the map M, a row x becomes ``u = (x - m) / ||x - m||`` and then
    ``u M / ||u M||``; with an intercept c, ``(u M / ||u M||, c) / sqrt(1 + c^2)``. A row of zeros
    stays zero.
    """

    mean: np.ndarray  # m (d,), zeros for none
    spread: np.ndarray | None  # M (d, m), in whose precision rows are mapped
    intercept: float  # c, zero for none
    size: float = 1.0  # a public size of x - m

    @property
    def width(self) -> int:
        """D, the length of a scaled row."""
        directions = self.mean if self.spread is None else self.spread[0]
        return directions.size + bool(self.intercept)

    def rows(self, raw: np.ndarray) -> np.ndarray:
        """Returns scaled rows, ``float64`` (m, D)."""
        return self.with_unit_norm(self.mapped(raw))

    def mapped(self, raw: np.ndarray) -> np.ndarray:
        """Returns ``u M``, or u without a map, in the precision of the map."""
        unit = np.empty(raw.shape, np.float64 if self.spread is None else self.spread.dtype)
        self.centred(raw, unit)
        return unit if self.spread is None else unit @ self.spread

    def centred(self, raw: np.ndarray, out: np.ndarray) -> float:
        """Fills ``out`` (m, d) with u; returns the largest norm of x - m that is not rounding."""
        least, largest = _SAME * float(np.linalg.norm(self.mean)), 0.0
        for part, rows in _in_parts(_CACHED, raw, out):
            moved = part.astype(np.float64)
            moved -= self.mean
            norms = _norms(moved)
            largest = max(largest, float(norms.max()))
            norms[norms <= least] = np.inf
            moved /= norms[:, np.newaxis]
            rows[:] = moved
        return largest if largest > least else 0.0

    def with_unit_norm(self, mapped: np.ndarray) -> np.ndarray:
        """Returns the scaled rows of a result of ``mapped``."""
        # In double precision also after a map in single precision: the mechanism refuses a row that
        # is longer than its bound by more than 1e-9.
        out = np.empty((len(mapped), self.width))
        length = math.sqrt(1.0 + self.intercept**2)
        out[:, self.width - bool(self.intercept) :] = self.intercept / length
        for part, rows in _in_parts(_CACHED, mapped, out[:, : mapped.shape[1]]):
            rows[:] = part
            norms = _norms(rows)
            norms[norms == 0.0] = np.inf
            rows /= length * norms[:, np.newaxis]
        return out


@dataclasses.dataclass(frozen=True, eq=False)
class RowSample:
    """A uniform sample of public rows."""

    rows: np.ndarray  # (m, d), ``float32`` where it is a copy
    weights: np.ndarray | None = None  # (m,) with mean one


@dataclasses.dataclass(frozen=True, eq=False)
class PublicRows:
    """Rows of features for a fit, as one reading found them."""

    source: FeatureRows
    max_bytes: float
    num_rows: int
    digests: np.ndarray  # a row's features, and its encoder inputs if any; uint64 (n, 1 or 2)
    labels: np.ndarray | None  # from a data set of (x, y) batches
    weights: np.ndarray | None  # (n,) with mean one, W

    @classmethod
    def survey(cls, source: FeatureRows, max_bytes: float) -> tuple[PublicRows, RowSample]:
        """Reads all rows, and returns what was found with a sample of the raw rows (m, d).

        Raises if a row is not finite. The sample serves ``scaling`` alone, and may be large.
        """
        labels: list[np.ndarray] = []
        digests: list[Any] = []
        raw_parts: list[np.ndarray | None] = []

        def see(x: Any, y: Any) -> None:
            if source.is_encoded:
                raw_parts.append(FeatureRows(x).digests())
            if y is not None:
                labels.append(np.asarray(y))

        blocks, start = _blocks(source, "Reading features", see), 0
        first = next(blocks)
        width = first.shape[1]
        cls.check_memory(width, max_bytes)
        size = _sample_size(source, _DESIGN_ROWS, width, max_bytes)
        reservoir = Reservoir(width, size, source.held())
        for rows in itertools.chain([first], blocks):
            reservoir.add(rows)
            for (part,) in _in_parts(_CACHED, rows):
                cls.check_norms(part, start)
                digests.append(FeatureRows(part).digests())
                start += len(part)
        weights = source.weights
        if weights is not None and len(weights) != start:
            raise ValueError(
                f"sample_weight must have {start} weights, one per row, got {len(weights)}."
            )
        columns = [np.concatenate(digests)]  # (n, 1) each
        raw = [part for part in raw_parts if part is not None]
        if raw and len(raw) == len(raw_parts) and sum(map(len, raw)) == start:
            columns.append(np.concatenate(raw))
        found = cls(
            source,
            float(max_bytes),
            start,
            np.concatenate(columns, axis=1),
            np.concatenate(labels) if labels else None,
            weights,
        )
        return found, reservoir.sample(weights)

    @staticmethod
    def check_norms(raw: np.ndarray, start: int) -> None:
        """Raises for rows that are not finite; ``start`` is the number of the first row."""
        norms = _norms(raw)
        bad = ~(norms < _LARGEST)  # true for NaN too
        if np.any(bad):
            first = int(bad.argmax())
            columns = np.flatnonzero(~(np.abs(raw[first]) < _LARGEST))[:3].tolist()
            where = f", column(s) {', '.join(map(str, columns))}" if columns else ""
            raise ValueError(
                f"features must be finite, but {int(bad.sum())} row(s) have NaN, infinity or "
                f"numbers beyond {_LARGEST:g}, the first at row {start + first}{where}. Fill them "
                "in or leave these examples out, by a rule that reads no label."
            )

    def scaling(
        self,
        sample: RowSample,
        *,
        center: bool,
        intercept: float,
        noise_to_signal: float | None,
        half: bool = False,
    ) -> Scaling:
        """Chooses the scaling from the sample of the survey."""
        mean = np.zeros(sample.rows.shape[1])
        if center:
            weights = np.ones(len(sample.rows)) if sample.weights is None else sample.weights
            parts = _in_parts(_CACHED, sample.rows, weights[:, np.newaxis])
            mean = np.sum([own[:, 0] @ part.astype(np.float64) for part, own in parts], axis=0)
            mean /= len(sample.rows)
        units = Scaling(mean, None, 0.0)
        single = mean.size >= _SINGLE_WIDTH
        covariance, size = _covariance(sample, units, single, noise_to_signal is not None)
        # One row may have all the weight, up to rounding.
        if not size or (noise_to_signal is not None and not np.trace(covariance) > 0.0):
            weighted = "" if self.weights is None else " of those with a weight"
            raise ValueError(
                f"expected rows of features that differ, got equal rows{weighted} "
                f"(n_samples={self.num_rows}). Check how they were computed."
            )
        spread = None
        if noise_to_signal is not None:
            divided = self.half_spread_shares if half else self.spread_shares
            shares = functools.partial(divided, noise_to_signal=noise_to_signal)
            spread, least = self.spread_map(covariance, shares)
            if single and least < _SINGLE_RANK:
                covariance, _ = _covariance(sample, units, False, True)
                spread, _ = self.spread_map(covariance, shares)
        return Scaling(mean, spread, float(intercept), size)

    def scaled(self, scaling: Scaling) -> ScaledRows:
        """Returns the rows with a scaling."""
        return ScaledRows(self, scaling)

    @property
    def max_weight(self) -> float:
        """The largest weight: no row for the release is longer."""
        return 1.0 if self.weights is None else float(self.weights.max())

    def weighted(self, rows: np.ndarray, start: int, power: float = 1.0) -> np.ndarray:
        """Returns rows (m, D) from row ``start`` on, times a power of their weights."""
        if self.weights is None:
            return rows
        return rows * self.weights[start : start + len(rows), np.newaxis] ** power

    @staticmethod
    def check_memory(width: int, max_bytes: float) -> None:
        """Raises unless the matrices of a fit of this width fit into memory."""
        room = max_bytes * (1.0 - 2.0 / _SHARE)
        needed = 8.0 * _MATRICES * width**2
        if needed > room:
            fit = math.isqrt(max(int(room), 0) // (8 * _MATRICES))
            raise ValueError(
                f"expected at most {fit} features for max_bytes={max_bytes / 1e9:.1f} GB (half is "
                f"for samples), got {width}, which need {needed / 1e9:.1f} GB. Use fewer features "
                "(for example a random projection), or raise max_bytes."
            )

    @staticmethod
    def add_gram(gram: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Returns the upper triangle of ``gram + rows^T rows``, in place: half of the products.

        Rows in single precision are summed in it, at most 2,048 of them before their sum is added
        in double precision. Entry (i, j) of A is then off by at most ``1.25e-4 sqrt(A_ii A_jj)``
        for any rows, by about 1e-7 of that root for rows that differ, and by 2e-6 for equal rows.
        In double precision it is off by at most ``1.2e-16 n sqrt(A_ii A_jj)`` for n rows. The
        matrix is computed without labels, so its error does not change the sensitivity.
        """
        from scipy.linalg import blas

        if rows.dtype != np.float32:
            return blas.dsyrk(1.0, rows.T, beta=1.0, c=gram, overwrite_c=1)
        total = np.zeros(gram.shape, np.float32, order="F")
        for start in range(0, len(rows), _SINGLE_ROWS):
            part = rows[start : start + _SINGLE_ROWS]
            gram += blas.ssyrk(1.0, part.T, beta=0.0, c=total, overwrite_c=1)
        return gram

    @staticmethod
    def spread_shares(eigenvalues: np.ndarray, noise_to_signal: float) -> np.ndarray:
        """Returns each direction's share (d,) of the squared length, by water-filling."""
        strength = eigenvalues / eigenvalues.sum()
        with np.errstate(divide="ignore", over="ignore"):
            depth = noise_to_signal / strength
        # Only differences of depths matter; a huge depth would absorb the unit of water.
        depth -= depth.min()
        ordered = np.sort(depth)
        # With the m shallowest directions under water, the level is (1 + sum of their depths) / m.
        with np.errstate(over="ignore"):
            levels = (1.0 + np.cumsum(ordered)) / np.arange(1, depth.size + 1)
        level = levels[np.flatnonzero(levels > ordered)[-1]]
        shares = np.maximum(level - depth, 0.0)
        return shares / shares.sum()

    @staticmethod
    def half_spread_shares(eigenvalues: np.ndarray, noise_to_signal: float) -> np.ndarray:
        """Returns shares (d,) between those of ``spread_shares`` and those of the features."""
        own = eigenvalues / eigenvalues.sum()
        shares = PublicRows.spread_shares(eigenvalues, noise_to_signal)
        halves = np.where(shares > 0.0, np.minimum(0.5 * (own + shares), _MOST_GAIN * own), 0.0)
        return halves / halves.sum()

    @staticmethod
    def spread_map(
        covariance: np.ndarray, shares_of: Callable[[np.ndarray], np.ndarray]
    ) -> tuple[np.ndarray, float]:
        """Returns the map (d, m), ``float32``, from centred rows to the directions with a share.

        And the least of their eigenvalues, as a fraction of the largest. ``shares_of`` divides the
        squared length between the eigenvalues (d,).
        """
        from scipy import linalg

        driver = "evd" if len(covariance) > 1 else "ev"  # some versions of SciPy fail at 1 x 1
        values, vectors = linalg.eigh(covariance, lower=False, driver=driver, overwrite_a=True)
        # With a large budget, directions of rounding error would get a full share.
        values = np.where(values > _RANK * values[-1], values, 0.0)
        shares = shares_of(values)
        kept = shares > 0.0
        gains = np.sqrt(shares[kept] / values[kept])
        vectors = vectors[:, kept]
        # An eigenvector's sign is arbitrary, and a stored release needs the same signs.
        largest = np.abs(vectors).argmax(axis=0)
        gains *= np.sign(vectors[largest, np.arange(largest.size)])
        return (vectors * gains).astype(np.float32), float(values[kept].min() / values[-1])


@dataclasses.dataclass(frozen=True, eq=False)
class ScaledRows:
    """Public rows with their scaling."""

    rows: PublicRows
    scaling: Scaling

    def blocks(self) -> Iterator[np.ndarray]:
        """Yields the scaled rows times their weights, ``float64`` (m, D), for the release."""
        return self._released(self._mapped("Releasing the moments"))

    def scan(self, sample_rows: int | None = None) -> ScannedRows:
        """Reads the scaled rows once more, for all that is public about their release.

        ``sample_rows`` limits the sample; None takes all rows for which there is memory.
        """
        rows, scaling = self.rows, self.scaling
        width, most = scaling.width, rows.max_bytes / _SHARE
        gram = np.zeros((width, width), order="F")
        size = _sample_size(rows.source, sample_rows or rows.num_rows, width, rows.max_bytes)
        reservoir = Reservoir(width, size)
        signs, start = np.random.default_rng(1), 0
        directions = np.random.default_rng(2).normal(size=(width, _SKETCH))
        sketch, max_l1, kept = np.zeros(_SKETCH), 0.0, []
        single = scaling.spread is not None and width >= _SINGLE_WIDTH
        for mapped in self._mapped("Gram matrix"):
            unit = scaling.with_unit_norm(mapped)
            root, released = rows.weighted(unit, start, 0.5), rows.weighted(unit, start)
            start += len(unit)
            gram = rows.add_gram(gram, root.astype(np.float32) if single else root)
            reservoir.add(unit)
            sketch += (signs.normal(size=len(unit)) @ released) @ directions
            for (part,) in _in_parts(_CACHED, released):
                max_l1 = max(max_l1, float(np.abs(part).sum(axis=1).max()))
            if float(mapped.itemsize) * width * rows.num_rows <= most:
                kept.append(mapped)
        sample = reservoir.sample(rows.weights)
        return ScannedRows(rows, scaling, gram, sample, max_l1, sketch, tuple(kept))

    def _mapped(self, task: str) -> Iterator[np.ndarray]:
        for block in _blocks(self.rows.source, task):
            for (part,) in _in_parts(_ENTRIES, block):
                yield self.scaling.mapped(part)

    def _released(self, mapped: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        start = 0
        for block in mapped:
            unit = self.scaling.with_unit_norm(block)
            yield self.rows.weighted(unit, start)
            start += len(unit)


@dataclasses.dataclass(frozen=True, eq=False)
class ScannedRows(ScaledRows):
    """Scaled rows after a scan: the public input of a release."""

    gram: np.ndarray  # X^T W X of the scaled rows, float64 (D, D), upper triangle, Fortran order
    sample: RowSample  # of the scaled rows (m, D), float32
    max_l1: float  # the largest L1 norm of a scaled row times its weight
    sketch: np.ndarray  # random sums (_SKETCH,) of the rows of the release
    kept: tuple[np.ndarray, ...]  # the mapped rows, where memory allows; else none

    def blocks(self) -> Iterator[np.ndarray]:
        """Yields the rows of the release; reads them again only if they were not kept."""
        return self._released(self.kept) if self.kept else super().blocks()

    def digest(self) -> str:
        """Returns a sketch of the rows; see ``matches``."""
        return " ".join(float(number).hex() for number in self.sketch)

    def matches(self, digest: str) -> bool:
        """Returns whether a digest matches these rows, up to rounding on another machine."""
        try:
            other = np.array([float.fromhex(part) for part in digest.split()])
        except ValueError:
            return False
        if other.shape != self.sketch.shape:
            return False
        distance = np.linalg.norm(self.sketch - other)
        return bool(distance <= _SKETCH_TOLERANCE * np.linalg.norm(self.sketch))


class Reservoir:
    """A uniform sample from a stream of rows of unknown length, ``float32`` where it is a copy.

    Evenly spaced rows would be biased: the writers of MNIST alternate between two groups. The
    choice is public and repeatable, and does not depend on the blocks of the stream.

    Source: Vitter 1985, "Random sampling with a reservoir", algorithm R.
    """

    def __init__(self, width: int, size: int, whole: np.ndarray | None = None) -> None:
        # All rows of an array that lies in memory are a sample without a copy.
        self._is_whole = whole is not None and len(whole) <= size
        if whole is not None and self._is_whole:
            self._kept: np.ndarray = whole
        else:  # pages without a row take no memory
            self._kept = np.empty((size, width), np.float32)
        self._places = np.empty(size, np.int64)
        self._rng, self._num_rows = np.random.default_rng(0), 0

    def add(self, rows: np.ndarray) -> None:
        """Adds rows to the stream; only their order decides on the sample."""
        start, self._num_rows = self._num_rows, self._num_rows + len(rows)
        places = np.arange(start, self._num_rows)
        # The first rows draw too, so that the result does not depend on the blocks.
        slots = (self._rng.random(len(rows)) * (places + 1)).astype(np.int64)
        slots = np.where(places < len(self._kept), places, slots)
        hit = slots < len(self._kept)
        if self._num_rows <= len(self._kept):
            if not self._is_whole:
                self._kept[start : self._num_rows] = rows
        else:
            self._kept[slots[hit]] = rows[hit]
        self._places[slots[hit]] = places[hit]

    def sample(self, weights: np.ndarray | None = None) -> RowSample:
        """Returns the kept rows, which later rows overwrite; with their share of weights (n,)."""
        rows = self._kept[: self._num_rows]
        if weights is None:
            return RowSample(rows)
        own = weights[self._places[: self._num_rows]]
        return RowSample(rows, own / (own.mean() or 1.0))


def _sample_size(source: FeatureRows, max_rows: int, width: int, max_bytes: float) -> int:
    if source.num_rows is not None:
        max_rows = min(max_rows, source.num_rows)
    return max(64, min(int(max_bytes / _SHARE) // (4 * width), max_rows))


def _covariance(
    sample: RowSample, units: Scaling, single: bool, wanted: bool
) -> tuple[np.ndarray, float]:
    """Returns the covariance of the sample's rows of unit norm, and their largest norm before.

    The matrix is the upper triangle, zero unless it is wanted; the norm is zero if all rows are
    equal.
    """
    covariance, size = np.zeros((units.mean.size,) * 2, order="F"), 0.0
    start, dtype = 0, np.float32 if single else np.float64
    for (block,) in _in_parts(_ENTRIES, sample.rows):
        rows = np.empty(block.shape, dtype)
        size = max(size, units.centred(block, rows))
        if sample.weights is not None:
            weights = sample.weights[start : start + len(rows), np.newaxis]
            rows = (rows * weights**0.5).astype(dtype, copy=False)
        if wanted:
            covariance = PublicRows.add_gram(covariance, rows)
        start += len(rows)
    return covariance / len(sample.rows), size


def _blocks(source: FeatureRows, task: str, see: Any = None) -> Iterator[np.ndarray]:
    progress = Progress(task, source.num_rows)
    for rows in source.blocks(see):
        yield rows
        progress.advance(rows.shape[0])
    progress.close()


def _in_parts(entries: int, *arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Yields the same rows of each array, about ``entries`` numbers of the first."""
    step = max(1, entries // arrays[0].shape[1])
    # Sums in single precision then have no short remainder.
    step -= step % _SINGLE_ROWS if step > _SINGLE_ROWS else 0
    for start in range(0, len(arrays[0]), step):
        yield tuple(array[start : start + step] for array in arrays)


def _norms(rows: np.ndarray) -> np.ndarray:
    wide = rows.astype(np.float64, copy=False)
    return np.sqrt(np.einsum("ij,ij->i", wide, wide))
