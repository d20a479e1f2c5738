"""One private release of moments of labels and public features, sufficient for a linear fit."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Private, Public, Setting
from tf_labeldp.mechanisms.base import FrozenAggregate
from tf_labeldp.mechanisms.integer_noise import (
    DiscreteGaussian,
    FrozenWithNoise,
    LaplaceNoise,
    gaussian_scale,
)
from tf_labeldp.mechanisms.random_bits import Rng
from tf_labeldp.mechanisms.users import UsersOfRows

_BLOCK_BYTES = 1 << 26
"""Bytes of features that are copied to doubles at a time."""
_CACHED = 1 << 17
"""Numbers rounded and summed at a time: they stay in a core's own cache."""
_MOST_BYTES = 1 << 30
"""Most bytes that the rows of all users may take; of more, norms are added in one reading."""
_TOLERANCE = 1e-9
"""Allowed relative excess of a row over ``max_norm``, which the sensitivity includes."""


@dataclasses.dataclass(frozen=True)
class LabelMomentMechanism(FrozenWithNoise, FrozenAggregate):
    """Releases ``sum_i x_i (code(y_i) - centre)^T`` for public features ``x_i``, with noise.

    The codes, and the L2 distance between two codes:

    * ``num_classes=2``: 0 or 1, centre 1/2, one column; 1.
    * ``num_classes=K > 2``: one-hot, centre 1/K, K columns; sqrt(2).
    * ``low``, ``high``: the label itself, centre ``(low + high) / 2``, one column; ``high - low``.
    * ``num_labels=L``: L zeros and ones (the unit is then the whole row of labels), centre 1/2, L
      columns; sqrt(L).

    The L2 sensitivity under replacement of one label is this distance times ``max_norm``; the L1
    sensitivity is the L1 distance (1, 2, ``high - low``, L) times ``max_l1``.

    Guarantee:
        The whole matrix is (epsilon, delta)-DP for the replacement of one label; delta is zero for
        Laplace noise. The features, their number and the number of labels are public. The sum is
        exact: features (and labels that are numbers) are rounded to a public grid on which the sums
        are integers below 2^53. The sensitivity includes the rounding (at most ``sqrt(d) / 2``
        steps per row), and OpenDP's exact samplers draw the noise on the integers. After
        ``for_users`` it holds for all labels of any one user (docs/theory.md, users).

    Source: analytic calibration, Balle and Wang 2018, Theorem 8; releasing the moments of a
    regression ("sufficient statistics perturbation"): Vu and Slavkovic 2009.

    Attributes:
        epsilon: finite and above zero.
        delta: in (0, 1) for Gaussian noise, 0 for Laplace noise.
        num_classes: K, at least 2, for classes 0..K-1; or
        low, high: smallest and largest label of a regression task, public; or
        num_labels: L, for labels that are rows (n, L) of zeros and ones.
        max_norm: public bound on the L2 norm of each row of features; longer rows raise an error.
        max_l1: public bound on the L1 norm of each row, for Laplace noise alone. None stands for
            ``sqrt(d) * max_norm``.
        noise: ``"gaussian"`` or ``"laplace"``, which adds far more noise with more than a handful
            of features.

    Example:
        >>> import numpy as np
        >>> features = np.repeat([[1.0, 0.0], [0.6, 0.8]], 5000, axis=0)
        >>> labels = np.repeat([0, 1], 5000)
        >>> mechanism = LabelMomentMechanism(epsilon=1.0, delta=1e-6, num_classes=2)
        >>> mechanism.release(labels, features, rng=np.random.default_rng(0)).round().tolist()
        [[-999.0], [1999.0]]
    """

    purpose = "noisy sums of features by label, for a head"

    delta: float = 0.0
    num_classes: int | None = None
    low: float | None = None
    high: float | None = None
    num_labels: int | None = None
    max_norm: float = 1.0
    max_l1: float | None = None
    noise: str = "gaussian"

    _noises: ClassVar[tuple[str, ...]] = ("gaussian", "laplace")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_kind()
        self._set(max_norm=_validate.positive_finite("max_norm", self.max_norm))
        if self.max_l1 is not None:
            self._set(max_l1=_validate.positive_finite("max_l1", self.max_l1))

    def group_size(self, users: Public[Any], public_input: Public[Any] = None) -> float:
        """Returns how much further all labels of a user move the release than the noise is for.

        Labels y_i of a user that become z_i move it by ``sum_i x_i (code(y_i) - code(z_i))^T``, and
        rounding adds as much as for one label each. It is at most 1 after ``for_users``, which
        heads call; so it is 1 without features, before they are known.
        """
        if public_input is None:
            return 1.0
        blocks = _blocks(public_input)
        first = next(blocks)
        counts, width = np.bincount(users), first.shape[1]
        norms = self.user_norms(users, itertools.chain([first], blocks), width)
        grid = self._grid(len(users), width)
        moved = norms * (1.0 + _TOLERANCE) * grid.steps + self._rounding(width) * counts
        return float(moved.max() / self._row_steps(grid, width))

    def user_norms(
        self, users: Public[Any], blocks: Public[Iterable[np.ndarray]], num_features: int
    ) -> np.ndarray:
        """Returns the norms of ``for_users`` from rows of features (m, d), in blocks."""
        order = 1 if self.noise == "laplace" else 2
        if order == 1 or 8 * len(users) * num_features > _MOST_BYTES:
            return UsersOfRows(users).sums_of_norms(blocks, order)
        one_column = self.num_classes is None or self.num_classes == 2
        return UsersOfRows(users).norms(blocks, by_signs=one_column)

    def for_users(
        self, norms: Setting[np.ndarray], counts: Setting[np.ndarray], num_features: int
    ) -> LabelMomentMechanism:
        """Returns the mechanism whose noise is for all labels of any one user.

        Args:
            norms: bounds (U,) on the changes of the moments by each user's labels, divided by the
                distance of two codes, as of ``user_norms``.
            counts: the number of each user's labels, (U,).
            num_features: d.
        """
        steps = self._grid(int(counts.sum()), num_features).steps * (1.0 + _TOLERANCE)
        extra = self._rounding(num_features) * (counts - 1) / steps
        if self.noise == "laplace":
            return dataclasses.replace(self, max_l1=float((norms + extra).max()))
        share = 1.0 - extra / self.max_norm  # of a step's norm that rounding leaves
        return dataclasses.replace(self, max_norm=float((norms / share).max()))

    @property
    def num_columns(self) -> int:
        """The number of columns of the release."""
        return self._coding.columns

    def noise_stddev(self, num_rows: int, num_features: int) -> float:
        """Returns the standard deviation of the noise on each entry, for n labels, d features."""
        grid = self._grid(num_rows, num_features)
        law = self._noise_law(grid, num_features)
        return law.scale * grid.unit * law.spread

    @_validate.clears_frames
    def release(
        self, labels: Private[Any], public_input: Public[Any] = None, *, rng: Rng = None
    ) -> np.ndarray:
        """Returns the noisy moments of the labels with the features, ``float64`` (d, columns).

        Args:
            labels: (n,) integers in 0..K-1, or numbers in [low, high]; (n, L) for ``num_labels``.
            public_input: the features (n, d), finite, with rows of L2 norm at most ``max_norm``; or
                an object whose ``blocks()`` yields them in order as arrays (m, d).
            rng: a generator for repeatable (not private) runs; None uses OpenDP's sampler with the
                operating system's random bits.
        """
        if public_input is None:
            raise ValueError("LabelMomentMechanism needs features: pass public_input=features.")
        moments, totals = self.exact_sums(labels, public_input, len(labels))
        return self.add_noise(moments, totals, len(labels), rng=rng)

    @_validate.clears_frames
    def exact_sums(
        self, labels: Private[Any], features: Public[Any], num_rows: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns exact sums over m of n rows; not private before ``add_noise``.

        The sums are whole numbers: their total does not depend on the parts or their order.

        Args:
            labels: (m,) or (m, L), as for ``release``.
            features: (m, d), as for ``release``.
            num_rows: total number of rows n, which sets the grid.

        Returns:
            Moments (d, columns) and public column sums of the features (d,), both ``int64`` in grid
            steps.
        """
        codes = self._codes(labels)
        moments, totals, start, stop = np.zeros(1), np.zeros(1), 0, 0
        for block in _blocks(features):
            stop = start + len(block)
            if stop > len(codes):
                break
            grid = self._grid(num_rows, block.shape[1])
            self._check_rows(block, start)
            # Every product and sum is an integer below 2^53, which doubles represent exactly.
            few = max(1, _CACHED // max(block.shape[1], self.num_columns))
            for place in range(start, stop, few):
                steps = block[place - start : place - start + few] * grid.steps
                np.rint(steps, out=steps)
                coded = self._code_block(codes[place : min(place + few, stop)], grid)
                moments = moments + steps.T @ coded
                totals = totals + steps.sum(axis=0)
            start = stop
        if not 0 < start == stop == len(codes):
            raise ValueError(
                f"expected one row of features per label, got {stop} rows and {len(codes)} labels."
            )
        return moments.astype(np.int64), totals.astype(np.int64)

    @_validate.clears_frames
    def add_noise(
        self,
        moments: Private[np.ndarray],
        totals: Private[np.ndarray],
        num_rows: int,
        *,
        rng: Rng = None,
    ) -> np.ndarray:
        """Returns exact sums of all n rows with noise: ``release`` for sums collected in chunks.

        ``moments`` and ``totals`` are the sums of ``exact_sums`` over all parts; call it once.
        """
        grid = self._grid(num_rows, moments.shape[0])
        noisy = self._noise_law(grid, moments.shape[0]).add_to(moments, rng)
        centred = self._coding.centre * (totals / grid.steps)
        return noisy * grid.unit - centred[:, np.newaxis]

    @property
    def _coding(self) -> _Coding:
        """The coding of the kind of labels; the sensitivity is set here."""
        if self.num_labels is not None:
            return _Coding(self.num_labels, 0.5, math.sqrt(self.num_labels), self.num_labels)
        if self.num_classes is None:
            return _Coding(1, 0.0, 2.0, 2.0)  # numbers in half ranges around the centre
        if self.num_classes == 2:
            return _Coding(1, 0.5, 1.0, 1.0)
        return _Coding(self.num_classes, 1.0 / self.num_classes, math.sqrt(2.0), 2.0)

    def _grid(self, num_rows: int, num_features: int) -> _Grid:
        """Returns the public grid on which sums over n rows stay below 2^53."""
        num_rows = _validate.integer_at_least("num_rows", num_rows, 1)
        _validate.integer_at_least("num_features", num_features, 1)
        # A row adds at most 2^bits steps to a sum, up to rounding, so all rows add up to less than
        # 2^53. With 40 bits, noise of 2^17 times the sensitivity fits 64-bit integers. With fewer
        # than 20, the rounding of each row would be a visible part of the sensitivity.
        bits = min(52 - num_rows.bit_length(), 40)
        if bits < 20:
            raise ValueError(f"expected fewer than 2^32 rows for exact sums, got {num_rows}.")
        label_bits = bits // 2 if self.low is not None else 0
        feature_steps, label_steps = 2.0 ** (bits - label_bits), 2.0**label_bits
        unit = self.max_norm / feature_steps
        low, high = self.label_range() or (0.0, 2.0)
        unit *= 0.5 * (high - low) / label_steps
        return _Grid(feature_steps / self.max_norm, label_steps, unit)

    def _noise_law(self, grid: _Grid, num_features: int) -> LaplaceNoise | DiscreteGaussian:
        """Returns the noise for the sensitivity: the distance of two codes times a row's norm."""
        coding, norm = self._coding, self._row_steps(grid, num_features)
        if self.noise == "laplace":
            return LaplaceNoise(self.epsilon, math.ceil(coding.l1 * grid.label_steps * norm))
        l2, entries = coding.l2 * grid.label_steps * norm, num_features * coding.columns
        return DiscreteGaussian(gaussian_scale(self.epsilon, self.delta, l2, entries))

    def _row_steps(self, grid: _Grid, num_features: int) -> float:
        """Returns the largest L2 norm of a rounded row in grid steps, for Laplace noise the L1."""
        longest = self.max_norm
        if self.noise == "laplace":
            longest = math.sqrt(num_features) * longest if self.max_l1 is None else self.max_l1
        return longest * (1.0 + _TOLERANCE) * grid.steps + self._rounding(num_features)

    def _rounding(self, num_features: int) -> float:
        """Returns the largest norm, in grid steps, by which rounding moves a row.

        It moves each of d entries by at most half a step.
        """
        return 0.5 * (num_features if self.noise == "laplace" else math.sqrt(num_features))

    def _codes(self, labels: Any) -> np.ndarray:
        """Returns checked labels: classes, numbers in half ranges around the centre, or rows."""
        if self.num_classes is not None:
            return _validate.class_indices("labels", labels, self.num_classes)
        if self.low is not None and self.high is not None:
            numbers = _validate.numbers_in_range("labels", labels, self.low, self.high)
            half = 0.5 * (self.high - self.low)
            return np.clip((numbers - self.low) / half - 1.0, -1.0, 1.0)
        rows = np.asarray(labels)
        if rows.ndim != 2 or rows.shape[1] != self.num_labels:
            raise ValueError(f"labels must have shape (n, {self.num_labels}), got {rows.shape}.")
        wrong = int(np.count_nonzero((rows != 0) & (rows != 1)))
        if wrong:
            raise ValueError(f"labels must be zeros and ones, but {wrong} of {rows.size} are not.")
        return rows.astype(np.float64)

    def _code_block(self, codes: np.ndarray, grid: _Grid) -> np.ndarray:
        """Returns the codes of labels as integers in ``float64`` (m, columns)."""
        if self.num_classes is None:
            return np.rint(codes * grid.label_steps).reshape(codes.shape[0], -1)
        if self.num_classes == 2:
            return codes.astype(np.float64)[:, np.newaxis]
        block = np.zeros((codes.size, self.num_classes))
        block[np.arange(codes.size), codes] = 1.0
        return block

    def _check_rows(self, block: np.ndarray, start: int) -> None:
        norms = np.sqrt(np.einsum("ij,ij->i", block, block))
        over = ~(norms <= self.max_norm * (1.0 + _TOLERANCE))  # also true for NaN
        if self.noise == "laplace" and self.max_l1 is not None:
            over |= ~(np.abs(block).sum(axis=1) <= self.max_l1 * (1.0 + _TOLERANCE))
        if np.any(over):
            raise ValueError(
                f"rows of features must be finite, with norms of at most max_norm="
                f"{self.max_norm:g} and max_l1={self.max_l1}, but {int(over.sum())} are not, the "
                f"first at row {start + int(over.argmax())}. Scale them by a public rule."
            )


class _Coding(NamedTuple):
    """The coding of labels: columns, the public centre, and the distances between two codes."""

    columns: int
    centre: float
    l2: float
    l1: float


class _Grid(NamedTuple):
    """Steps per unit of a feature and per half range of a label, and the value of a sum's step."""

    steps: float
    label_steps: float
    unit: float


def _blocks(features: Any) -> Iterator[np.ndarray]:
    """Yields features as ``float64`` (m, d), in order."""
    if hasattr(features, "blocks"):
        for block in features.blocks():  # Squares of small integer types would overflow.
            yield np.asarray(block, dtype=np.float64)
        return
    array = np.asarray(features)
    if array.ndim != 2 or array.dtype.kind not in "biuf" or array.shape[1] == 0:
        raise ValueError(
            f"features must be numbers of shape (n, d), got dtype {array.dtype} and shape "
            f"{array.shape}."
        )
    rows = max(1, _BLOCK_BYTES // (8 * array.shape[1]))
    for start in range(0, array.shape[0], rows):
        yield array[start : start + rows].astype(np.float64)
