"""Random Fourier features of tables, without labels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._columns import Column as Entries
from tf_labeldp.accounting import Public, Setting, public_input
from tf_labeldp.features._categories import Categories
from tf_labeldp.features.estimator import FeatureMap, columns_model, note_release
from tf_labeldp.features.reader import (
    FeatureRows,
    categorical_columns,
    hashed_columns,
)
from tf_labeldp.features.tables import as_numbers

_Self = TypeVar("_Self", bound="RandomFourierFeatures")
_PAIRS = 2048
"""Rows sampled for the median distance, whose matrix is 2048 x 2048."""
_BLOCK = 4096
"""Rows mapped at a time."""
_QUANTILES = 65
"""Quantiles of a numeric column between which its ranks are linear."""
_RANK_ROWS = 100_000
"""Rows sampled for the quantiles, whose ranks are then within 0.5 %."""
_MOST_TOGETHER = 3
"""The most columns of a sparse frequency: effects of more columns together are rare in tables."""
_RANK_STDDEV, _CATEGORY_STDDEV = 2.0, 3.0
"""Standard deviations of the entries of sparse frequencies, per unit of a rank of variance one and
per category: 2 was better than 1 on Adult and covertype."""
_MOST_CATEGORIES = 10_000
"""The most categories of a column without hashing; with more it is an identifier or free text."""


@dataclasses.dataclass(eq=False, repr=False)
class RandomFourierFeatures(FeatureMap):
    """Maps a table to random features of a Gaussian kernel and to the encoded columns themselves.

    Numeric columns are standardised, and the mean replaces missing numbers; if a column lacks
    numbers in ``fit``, a second column marks them. Numbers that are far from all others, in a
    column of more than two, count as the nearest that are not (winsorizing). Booleans are the
    numbers 0 and 1, dates and times days since 1970-01-01 UTC; all numbers are rounded to
    ``float32``. Categorical columns are one-hot encoded, with one place for categories that are new
    after ``fit``, or hashed if they have many; entries of several types count by their text, and
    ordered categories lose their order. Missing are None, NaN, NaT, ``pandas.NA``, and the texts
    "", "nan", "None", "<NA>" and "NaT": together they are a category of their own, if ``fit`` had
    one. The features are cosines and sines of random projections of the encoded row, and the
    encoded row itself scaled to unit norm. Every row of features has unit norm.

    Guarantee:
        The map reads no label. Fitting and using it costs no budget if the table is public and the
        arguments are chosen without the private labels.

    Source: Rahimi and Recht, "Random features for large-scale kernel machines" (2007). Without a
    linear part, the product of two rows differs from the kernel by at most t with probability at
    least ``1 - 2 exp(-num_features * t**2 / 4)`` (Hoeffding's inequality over num_features / 2
    frequencies).

    Args:
        num_features: even number of features.
        bandwidth: the bandwidth in the kernel ``exp(-|x - y|^2 / (2 bandwidth^2))`` on encoded
            rows, or ``"median"`` for the median distance between sampled rows.
        categorical: the categorical columns, by name or by place in a 2-D array; None for all
            columns of texts and categories. A column of objects is numeric if its entries are
            numbers, dates or missing.
        hash_buckets: columns with more categories are hashed into this many buckets, and
            categories that share a bucket count as one; None turns hashing off, with at most 10,000
            categories.
        linear_weight: in [0, 1), the share of the encoded row in the squared norm; zero leaves it
            out.
        sparse: whether half of the frequencies read one to three columns each, numbers by their
            rank among public quantiles. It suits tables, whose labels jump at thresholds.
        seed: draws the frequencies and the sample; public.

    Attributes:
        columns_: the encoding of each column.
        hashed_: the number of categories of each column that is hashed, by name.
        outliers_: the number of outliers of ``fit`` in each column that has some, by name.
        bandwidth_: the bandwidth.
        n_features_out_: num_features, plus the encoded columns unless linear_weight is zero.

    Raises:
        TypeError: ``fit`` gets no table, text in a numeric column, or objects that are no numbers,
            texts or dates.
        ValueError: ``fit`` gets arguments out of range, unknown column names, a name twice,
            infinite numbers, or a column of missing entries alone.

    Example:
        >>> import numpy as np
        >>> table = {"age": np.array([20.0, 30.0, 60.0]), "job": np.array(["a", "b", "a"])}
        >>> features = RandomFourierFeatures(num_features=100).fit_transform(table)
        >>> features.shape, np.linalg.norm(features, axis=1).round(4).tolist()
        ((3, 104), [1.0, 1.0, 1.0])
    """

    num_features: int = 1000
    bandwidth: float | str = "median"
    categorical: Sequence[str | int] | None = None
    hash_buckets: int | None = 1024
    linear_weight: float = 0.5
    sparse: bool = False
    seed: int | None = 0

    _takes_tables = True

    def fit(self: _Self, X: Public[Any], y: Setting[Any] = None) -> _Self:
        """Learns the encoding and the bandwidth, and draws the frequencies.

        Args:
            X: public columns (n,) as a dict, structured array or data frame; an array (n, p);
                a sparse matrix (n, p), which is made dense; or an unshuffled ``tf.data.Dataset``
                of such batches.
            y: ignored; scikit-learn's pipelines pass them to every step.

        Returns:
            The map itself.
        """
        del y
        self._check_arguments()
        public = public_input(X)
        rows, self.receipts_ = FeatureRows(self._checked_inputs(public.value)), public.receipts
        columns = rows.table()
        self._remember_columns(rows.columns, len(columns))
        size = len(next(iter(columns.values())))
        self.columns_ = learn_columns(columns, self.categorical, self.hash_buckets)
        self.hashed_ = hashed_columns(self.columns_)
        self.outliers_ = {
            column.name: column.num_outliers
            for column in self.columns_
            if isinstance(column, NumericColumn) and column.num_outliers
        }
        self._is_matrix = 0 in columns and all(
            values.dtype.kind in "biuf" for values in columns.values()
        )
        rng = np.random.default_rng(self.seed)
        sample = rng.choice(size, min(size, _PAIRS), replace=False)
        if self.bandwidth == "median":
            self.bandwidth_ = _median_distance(encode(self.columns_, columns, sample))
        else:
            self.bandwidth_ = float(self.bandwidth)
        width = sum(column.width for column in self.columns_)
        draws = rng.normal(size=(width, self.num_features // 2))
        self._frequencies = (draws / self.bandwidth_).astype(np.float32)
        if self.sparse:
            some = rng.choice(size, min(size, _RANK_ROWS), replace=False)
            numbers = encode(self.columns_, columns, some)[:, self._numeric]
            self._knots, self._heights = _rank_knots(numbers)
            self._frequencies = self._half_sparse(self._frequencies, rng)
        self.n_features_out_ = self.num_features + (width if self.linear_weight else 0)
        return self

    def transform(self, X: Public[Any]) -> np.ndarray:
        """Returns the features of a table, ``float32`` (m, num_features).

        Args:
            X: as in ``fit``. Columns are found by name in any order, and other columns are
                ignored; an array needs the same columns as in ``fit``.

        Raises:
            TypeError: a column has another type than in ``fit``.
            ValueError: not fitted, missing columns, or infinite numbers.
        """
        self._refuse_unfitted("_frequencies")
        table = FeatureRows(self._checked_inputs(X, is_fitted=True))
        columns = table.table([column.name for column in self.columns_])
        size = len(columns[self.columns_[0].name])
        out = np.empty((size, self.n_features_out_), np.float32)
        for start in range(0, size, _BLOCK):
            part = slice(start, start + _BLOCK)
            rows = encode(self.columns_, columns, part)
            if self.sparse:
                rows = np.concatenate([rows, self._ranks(rows[:, self._numeric])], axis=1)
            out[part] = self._features(rows)
        return out

    def to_keras(self) -> Any:
        """Returns a ``keras.Model`` from raw columns to the features; it saves and loads.

        It takes an array (n, p) of numbers if ``fit`` did, and otherwise a dict of columns (n, 1)
        by name, as ``to_inputs(table, model)`` returns it: float32, int64, or text. A missing
        number is NaN, a missing text is empty, and a missing category of whole numbers is
        ``-2**63``. If Keras does not allow a column's name, or a layer has it, the input is renamed
        (``column_price_unit`` for ``price/unit``), and Keras warns; the dict keeps the column
        names. Import ``tf_labeldp.keras_layers`` before you load its file.
        """
        self._refuse_unfitted("_frequencies")
        import keras

        from tf_labeldp.keras_layers import FourierFeatures
        from tf_labeldp.keras_layers._fixed_features import QuantileRanks

        layer = FourierFeatures(self.num_features, self.linear_weight, self._width, name="fourier")

        def features(rows: Any) -> Any:
            if self.sparse and self._numeric.size:
                ranks = QuantileRanks(_QUANTILES, name="ranks")
                numbers = keras.ops.take(rows, self._numeric.tolist(), axis=1)
                rows = keras.ops.concatenate([rows, ranks(numbers)], axis=1)
                ranks.set_weights([self._knots, self._heights])
            outputs = layer(rows)
            layer.set_weights([self._frequencies])
            note_release(layer, self.receipts_)
            return outputs

        return columns_model(self.columns_, self._is_matrix, features, "random_fourier_features")

    def _features(self, rows: np.ndarray) -> np.ndarray:
        """Returns the features of encoded rows; the layer ``FourierFeatures`` computes the same."""
        phases = rows @ self._frequencies
        gain = np.float32(math.sqrt(2.0 * (1.0 - self.linear_weight) / self.num_features))
        parts = [gain * np.cos(phases), gain * np.sin(phases)]
        if self.linear_weight:
            rows = rows[:, : self._width]
            norms = np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
            parts.append(np.float32(math.sqrt(self.linear_weight)) * rows / norms)
        return np.concatenate(parts, axis=1)

    @property
    def _numeric(self) -> np.ndarray:
        """The places of numbers among the encoded columns."""
        widths = [column.width for column in self.columns_]
        starts = np.cumsum([0, *widths[:-1]])
        is_numeric = [isinstance(column, NumericColumn) for column in self.columns_]
        return starts[is_numeric]

    @property
    def _width(self) -> int:
        """The number of encoded columns, which ranks follow."""
        return sum(column.width for column in self.columns_)

    def _half_sparse(self, dense: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Returns frequencies (columns and ranks, F), the first half of them dense."""
        frequencies = np.zeros((self._width + self._numeric.size, dense.shape[1]), np.float32)
        half = dense.shape[1] // 2
        frequencies[: self._width, :half] = dense[:, :half]
        places, start, rank = [], 0, self._width
        for column in self.columns_:
            place = np.arange(start, start + column.width)
            stddev = np.full(column.width, _CATEGORY_STDDEV)
            if isinstance(column, NumericColumn):
                place[0], stddev[0], rank = rank, _RANK_STDDEV, rank + 1
            places.append((place, stddev))
            start += column.width
        for frequency in range(half, dense.shape[1]):
            together = min(int(rng.integers(1, _MOST_TOGETHER + 1)), len(places))
            for column in rng.choice(len(places), together, replace=False):
                place, stddev = places[column]
                frequencies[place, frequency] = stddev * rng.normal(size=place.size)
        return frequencies

    def _ranks(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the ranks of numbers (m, c); the layer ``QuantileRanks`` computes the same."""
        ranks = [
            np.interp(column, knots, heights)
            for column, knots, heights in zip(numbers.T, self._knots, self._heights, strict=True)
        ]
        return np.array(ranks, np.float32).reshape(len(ranks), len(numbers)).T

    def _check_arguments(self) -> None:
        if _validate.integer_at_least("num_features", self.num_features, 2) % 2:
            raise ValueError(
                f"num_features must be even (pairs of cosine and sine), got {self.num_features}."
            )
        if not isinstance(self.bandwidth, str):
            _validate.positive_finite("bandwidth", self.bandwidth)
        elif self.bandwidth != "median":
            raise ValueError(
                f"bandwidth must be 'median' or a number above zero, got {self.bandwidth!r}."
            )
        if isinstance(self.categorical, str):
            raise TypeError("categorical must be a list of names, got one text. Use [name].")
        if self.hash_buckets is not None:
            _validate.integer_at_least("hash_buckets", self.hash_buckets, 2)
        _validate.number_in("linear_weight", self.linear_weight, "[0, 1)")


def _rank_knots(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns distinct quantiles of each column and their ranks, ``float32`` (c, q).

    Ranks have mean 0 and variance 1 if the numbers differ. Fewer than q quantiles are padded.
    """
    levels = np.linspace(0.0, 1.0, _QUANTILES)
    knots = np.zeros((numbers.shape[1], _QUANTILES), np.float32)
    heights = np.zeros_like(knots)
    for place, column in enumerate(numbers.T):
        values, index = np.unique(
            np.quantile(column, levels).astype(np.float32), return_inverse=True
        )
        # Equal quantiles get the mean of their levels.
        ranks = np.bincount(index, levels) / np.bincount(index)
        padding = (0, _QUANTILES - values.size)
        knots[place] = np.pad(values, padding, "edge")
        heights[place] = np.pad(math.sqrt(12.0) * (ranks - 0.5), padding, "edge")
    return knots, heights


def _median_distance(rows: np.ndarray) -> float:
    """Returns the median distance between distinct pairs of rows; one if that is zero."""
    wide = rows.astype(np.float64)
    squares = np.einsum("ij,ij->i", wide, wide)
    distances = squares[:, np.newaxis] + squares - 2.0 * wide @ wide.T
    pairs = distances[np.triu_indices(len(wide), 1)]
    median = float(np.sqrt(max(np.median(pairs), 0.0))) if pairs.size else 0.0
    return median if median > 0.0 else 1.0


@dataclasses.dataclass(frozen=True)
class NumericColumn:
    """A standardised column of numbers, and a second column that marks missing numbers.

    Outliers become the nearer of ``low`` and ``high``, and without the second column missing
    numbers the mean. All steps are in ``float32``, like those of the Keras layers, which they equal
    to the last bit.
    """

    name: str | int
    mean: float
    stddev: float
    has_missing: bool = False
    low: float = -math.inf
    high: float = math.inf
    num_outliers: int = 0  # in ``fit``

    input_dtype = "float32"  # for the Keras input

    @property
    def width(self) -> int:  # places in an encoded row
        return 1 + self.has_missing

    @classmethod
    def learn(cls, name: str | int, values: np.ndarray) -> NumericColumn:
        all_numbers = as_numbers(name, values).astype(np.float64)
        present = all_numbers[~np.isnan(all_numbers)]
        if not present.size:
            raise ValueError(
                f"column {name!r} needs an entry, got missing ones alone. Leave it out."
            )
        low, high = Entries.fences(present)
        num_outliers = int(np.count_nonzero((present < low) | (present > high)))
        present = np.clip(present, low, high)
        stddev = float(present.std())
        # Rounding gives a constant column a tiny deviation, which must not become a divisor.
        constant = stddev <= 1e-12 * float(np.abs(present).max(initial=0.0))
        has_missing = present.size < all_numbers.size
        mean, stddev = float(present.mean()), 1.0 if constant else stddev
        return cls(name, mean, stddev, has_missing, low, high, num_outliers)

    def encode(self, values: np.ndarray, out: np.ndarray) -> None:
        """Fills ``out`` (n, width)."""
        found = as_numbers(self.name, values)
        missing = np.isnan(found)
        centred = np.clip(found, self.low, self.high) - np.float32(self.mean)
        out[:, 0] = np.where(missing, 0.0, centred * np.float32(1.0 / self.stddev))
        if self.has_missing:
            out[:, 1] = missing

    def layers(self, inputs: Any) -> Any:
        import keras

        # Normalization would put a floor under the deviation.
        centre = keras.layers.Rescaling(1.0, offset=-self.mean, dtype="float32")
        numbers = keras.ops.clip(inputs, self.low, self.high) if math.isfinite(self.low) else inputs
        scaled = keras.layers.Rescaling(1.0 / self.stddev, dtype="float32")(centre(numbers))
        missing = keras.ops.isnan(inputs)
        filled = keras.ops.where(missing, keras.ops.zeros_like(scaled), scaled)
        if not self.has_missing:
            return filled
        return keras.ops.concatenate([filled, keras.ops.cast(missing, "float32")], axis=-1)


class CategoricalColumn(Categories):
    """A one-hot column of categories: buckets of a hash, or a vocabulary after the unknown ones."""

    @property
    def width(self) -> int:
        return super().width + self._first

    @property
    def _first(self) -> int:
        """One if the unknown categories have a column."""
        return int(self.buckets is None)

    def encode(self, values: np.ndarray, out: np.ndarray) -> None:
        """Fills ``out`` (n, width)."""
        out[:] = 0.0
        out[np.arange(len(out)), self.places(values) - 1 + self._first] = 1.0

    def layers(self, inputs: Any) -> Any:
        from keras import ops

        places = ops.squeeze(super().layers(inputs), axis=-1)
        return ops.one_hot(places - 1 + self._first, self.width)


Column = NumericColumn | CategoricalColumn


def learn_columns(
    table: Mapping[Any, np.ndarray],
    categorical: Iterable[str | int] | None,
    hash_buckets: int | None,
) -> tuple[Column, ...]:
    chosen = categorical_columns(table, categorical)
    columns: list[Column] = []
    for name, values in table.items():
        if name not in chosen:
            columns.append(NumericColumn.learn(name, values))
            continue
        column = CategoricalColumn.learn(name, values, hash_buckets, with_missing=True)
        if column.buckets is None and column.width > _MOST_CATEGORIES:
            raise ValueError(
                f"expected at most {_MOST_CATEGORIES} categories for a one-hot encoding, got "
                f"{column.num_categories} in column {name!r}. Set hash_buckets, leave the column "
                "out, or give it as numbers."
            )
        columns.append(column)
    return tuple(columns)


def encode(
    columns: tuple[Column, ...], table: Mapping[Any, np.ndarray], rows: Any = slice(None)
) -> np.ndarray:
    """Returns the chosen rows of a table as numbers, ``float32`` (m, sum of widths)."""
    size = len(table[columns[0].name][rows])
    out = np.empty((size, sum(column.width for column in columns)), np.float32)
    start = 0
    for column in columns:
        column.encode(table[column.name][rows], out[:, start : start + column.width])
        start += column.width
    return out
