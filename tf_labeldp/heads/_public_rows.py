"""Public features as rows of unit norm: their scaling, and passes over them in bounded memory.

Unit norm is what the sensitivity of a release rests on; ``Scaling`` makes it.

*Where to spend a release.* A release of ``X^T Y`` has the same noise in all directions, and its
size is fixed by the length of the longest row. So a linear map of the features, before they are
scaled to unit length, decides how much of the signal each direction gets. It is made of public
features alone, and so costs no privacy.

Let the centred features have the covariance eigenvalues ``l_j``, let direction j get the share
``p_j`` of the squared length of an average row (``sum_j p_j = 1``), and let ``c_j^2`` be the part
of the labels' energy that direction j explains. Its moment has the size ``n sqrt(p_j) c_j`` and
noise of standard deviation sigma in each of k columns, so that the best linear estimate leaves of
``c_j^2`` the error ``c_j^2 v_j / (c_j^2 + v_j)`` with ``v_j = k sigma^2 / (n^2 p_j)``. The sum of
these errors is least for

``p_j = max(0, tau - k sigma^2 / (n^2 c_j^2))``,

with the level tau that makes the shares sum to one: water-filling, as for parallel Gaussian
channels (Cover and Thomas, "Elements of Information Theory", section 9.4). The ``c_j^2`` are not
known. Under the normal prior of ridge regression, coefficients of equal variance in the features as
they are, they are proportional to ``l_j`` in expectation; their sum is taken to be the variance of
the codes of labels, as if the features explained the labels in full. Strong directions so get equal
shares (whitening), weak ones less, and those that the noise would drown anyway get nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from tf_labeldp._progress import Progress
from tf_labeldp.features._reader import FeatureSource, new_digest
from tf_labeldp.heads._label_source import array_digests, row_digests

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


@dataclasses.dataclass(frozen=True)
class Survey:
    """What the first pass over the features gives.

    Attributes:
        num_rows: n.
        sample: some rows as given, drawn uniformly, ``float32`` (m, d).
        labels: those of a data set of (x, y) batches, else None.
    """

    num_rows: int
    sample: np.ndarray
    labels: np.ndarray | None

    @property
    def num_features(self) -> int:
        """The number of features d."""
        return int(self.sample.shape[1])


@dataclasses.dataclass(frozen=True)
class Scan:
    """What the second pass gives, of scaled rows (n, D).

    Attributes:
        gram: ``X^T X``, ``float64`` (D, D) in Fortran order; the upper triangle.
        num_rows: n.
        max_l1: the largest L1 norm of a row.
        sample: some rows, drawn uniformly, ``float32`` (m, D).
    """

    gram: np.ndarray
    num_rows: int
    max_l1: float
    sample: np.ndarray


class PublicRows:
    """Rows of features for one fit, read three times: survey, scan, release.

    Args:
        source: where the features come from.
        max_bytes: the most memory for what grows with the number of features.
    """

    def __init__(self, source: FeatureSource, max_bytes: float) -> None:
        self._source = source
        self._max_bytes = float(max_bytes)
        self._sample_bytes = int(self._max_bytes / _SHARE)
        self._scaling: Scaling | None = None
        self._known_digest: str | None = None
        self._sketch: np.ndarray | None = None
        self._row_digests = np.zeros(0, np.uint64)

    def digests(self) -> np.ndarray:
        """Returns a keyed digest of each row, ``uint64`` (n,), of an array before its encoder."""
        return self._row_digests

    def survey(self) -> Survey:
        """Reads all rows once; raises for rows that can't be scaled."""
        labels: list[np.ndarray] = []
        digest = self._new_digest()
        before_encoder = array_digests(self._source.raw)
        found: list[np.ndarray] = []
        sample: RowSample | None = None
        start = 0
        for raw in self._counted("Reading features", self._source.blocks(labels, digest)):
            if sample is None:
                check_memory(raw.shape[1], self._max_bytes)
                sample = RowSample(raw.shape[1], self._sample_bytes, _DESIGN_ROWS)
            given = checked_norms(raw, start)
            _refuse_zeros(given == 0.0, start)
            sample.add(raw)
            if before_encoder is None:
                found.append(row_digests(raw))
            start += raw.shape[0]
        if sample is None:
            raise ValueError("features hold no rows; give at least one.")
        self._row_digests = np.concatenate(found) if before_encoder is None else before_encoder
        self._known_digest = None if digest is None else digest.hexdigest()
        return Survey(start, sample.rows(), np.concatenate(labels) if labels else None)

    def design(
        self, survey: Survey, *, center: bool, intercept: float, noise_to_signal: float | None
    ) -> Scaling:
        """Chooses the scaling, from the sample of the survey."""
        sample = survey.sample
        mean = np.zeros(sample.shape[1])
        if center:
            mean = sample.mean(axis=0, dtype=np.float64)
        units = Scaling(mean, None, 0.0)
        blocks = [sample[start : start + 8192] for start in range(0, len(sample), 8192)]
        size = max(float(_norms(block - mean).max()) for block in blocks) or 1.0
        if not any(np.any(units.rows(block)) for block in blocks):
            raise ValueError(
                "all rows of features are the same, so that nothing can be learnt from them. "
                "Check how they were made."
            )
        spread = None
        if noise_to_signal is not None:
            covariance = np.zeros((mean.size, mean.size), order="F")
            for block in blocks:
                covariance = add_gram(covariance, units.rows(block))
            covariance /= len(sample)
            spread = spread_map(covariance, noise_to_signal)
        self._scaling = Scaling(mean, spread, float(intercept), size)
        return self._scaling

    def scan(self, sample_rows: int | None = None) -> Scan:
        """Reads all rows again."""
        gram: np.ndarray | None = None
        start, max_l1 = 0, 0.0
        for rows in self._counted("Gram matrix", self._scaled()):
            if gram is None:
                width = rows.shape[1]
                gram = np.zeros((width, width), order="F")
                sample = RowSample(width, self._sample_bytes, sample_rows)
                weights = np.random.default_rng(1)
                directions = np.random.default_rng(2).normal(size=(width, _SKETCH))
                sketch = np.zeros(_SKETCH)
            sketch += weights.normal(size=len(rows)) @ (rows @ directions)
            gram = add_gram(gram, rows)
            max_l1 = max(max_l1, float(np.abs(rows).sum(axis=1).max()))
            sample.add(rows)
            start += rows.shape[0]
        if gram is None:
            raise ValueError("features hold no rows; give at least one.")
        self._sketch = sketch
        return Scan(gram, start, max_l1, sample.rows())

    def blocks(self) -> Iterator[np.ndarray]:
        """Yields the scaled rows, ``float64`` (m, D), for the release; raises if they changed."""
        return self._counted("Releasing the moments", self._scaled())

    def digest(self) -> str:
        """Returns a sketch of the scaled rows, see ``matches``."""
        return " ".join(float(number).hex() for number in self._known_sketch())

    def matches(self, digest: str) -> bool:
        """Returns whether a digest is of the same rows, but for rounding.

        Moments that were released are of no use with other rows. Another machine may round the same
        rows otherwise, so a sketch of them is compared: random sums of all their entries.
        """
        mine = self._known_sketch()
        try:
            other = np.array([float.fromhex(part) for part in digest.split()])
        except ValueError:
            return False
        if other.shape != mine.shape:
            return False
        return bool(np.linalg.norm(mine - other) <= _SKETCH_TOLERANCE * np.linalg.norm(mine))

    def _known_sketch(self) -> np.ndarray:
        if self._sketch is None:
            raise RuntimeError("scan() comes before asking for a digest.")
        return self._sketch

    def _scaled(self) -> Iterator[np.ndarray]:
        if self._scaling is None:
            raise RuntimeError("design() comes before reading scaled rows.")
        scaling = self._scaling
        digest = self._new_digest()
        for raw in self._source.blocks(None, digest):
            yield scaling.rows(raw)
        if digest is not None and digest.hexdigest() != self._known_digest:
            raise ValueError(
                "the data set gave other rows, or the same in another order, when it was read "
                "again. It must not be shuffled: leave out .shuffle(), or pass "
                "reshuffle_each_iteration=False with a seed; augment nothing."
            )

    def _new_digest(self) -> Any:
        """Returns a hash for what is read, or None for arrays, which stay as they are."""
        return new_digest() if self._source.num_rows is None else None

    def _counted(self, what: str, blocks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Yields blocks of rows, and reports the progress."""
        progress = Progress(what, self._source.num_rows)
        for rows in blocks:
            yield rows
            progress.advance(rows.shape[0])
        progress.end()


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
        if self._full is None:
            if not self._parts or sum(map(len, self._parts)) < self._most:
                return np.concatenate(self._parts) if self._parts else np.zeros((0, 1), np.float32)
            self._full = np.concatenate(self._parts)
            self._parts = []
        return self._full


def check_memory(width: int, max_bytes: float) -> None:
    """Raises if the matrices of so many features do not fit beside the samples of rows."""
    room = max_bytes * (1.0 - 2.0 / _SHARE)
    needed = 8.0 * _MATRICES * width**2
    if needed > room:
        fit = math.isqrt(max(int(room), 0) // (8 * _MATRICES))
        raise ValueError(
            f"{width} features need {needed / 1e9:.1f} GB for their matrices; at most {fit} fit in "
            f"max_bytes={max_bytes / 1e9:.1f} GB, of which half is for samples of rows. Use fewer "
            "features (a random projection knows no label), or raise max_bytes."
        )


def add_gram(gram: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns the upper triangle of ``gram + rows^T rows``, in place: half of the products."""
    from scipy.linalg import blas

    return blas.dsyrk(1.0, rows.T, beta=1.0, c=gram, overwrite_c=1)


def checked_norms(raw: np.ndarray, start: int) -> np.ndarray:
    """Returns the L2 norm of every row, or raises for one that is not finite."""
    norms = _norms(raw)
    bad = ~(norms < _LARGEST)  # true for NaN too
    if np.any(bad):
        raise ValueError(
            f"features must be finite, but {int(bad.sum())} row(s) hold NaN, infinity or numbers "
            f"beyond {_LARGEST:g}, the first at row {start + int(bad.argmax())}. Fill them in "
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
