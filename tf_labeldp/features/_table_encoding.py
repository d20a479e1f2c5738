"""Tables as rows of numbers: standardised numeric columns, one-hot or hashed categories."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

_MOST_CATEGORIES = 10_000
"""Such a column is an identifier or free text rather than a choice."""


def read_table(table: Any) -> dict[str | int, np.ndarray]:
    """Returns a table's columns, each of shape (n,), by name, or by place for a 2-D array.

    Args:
        table: a dict of columns, a structured array, a data frame (anything with ``columns`` and
            items by column name), or an array (n, p).

    Raises:
        TypeError: none of these.
        ValueError: no column, or columns of different lengths.
    """
    if isinstance(table, dict):
        columns = {name: np.asarray(values) for name, values in table.items()}
    elif hasattr(table, "columns") and hasattr(table, "__getitem__"):
        columns = {name: np.asarray(table[name]) for name in table.columns}
    else:
        array = np.asarray(table)
        if array.dtype.names:
            columns = {name: array[name] for name in array.dtype.names}
        elif array.ndim == 2:
            columns = {place: array[:, place] for place in range(array.shape[1])}
        else:
            raise TypeError(
                "a table must be a dict of columns, a structured array, a data frame or an array "
                f"(n, p), got {type(table).__name__} of shape {array.shape}."
            )
    shapes = {values.shape for values in columns.values()}
    if not columns:
        raise ValueError("the table has no columns; give at least one.")
    if len(shapes) > 1 or len(next(iter(shapes))) != 1:
        raise ValueError(
            f"the columns of a table must all have shape (n,), got shapes {sorted(shapes)}."
        )
    return columns


@dataclasses.dataclass(frozen=True)
class NumericColumn:
    """A column of numbers, standardised."""

    name: str | int
    mean: float
    stddev: float
    width = 1

    @classmethod
    def learn(cls, name: str | int, values: np.ndarray) -> NumericColumn:
        """Returns the column with the mean and the standard deviation of public values."""
        numbers = _numbers(name, values)
        stddev = float(numbers.std())
        # Of a constant column, rounding leaves a deviation that must not be divided by.
        constant = stddev <= 1e-12 * float(np.abs(numbers).max(initial=0.0))
        return cls(name, float(numbers.mean()), 1.0 if constant else stddev)

    def encode(self, values: np.ndarray, out: np.ndarray) -> None:
        """Fills ``out`` (n, 1)."""
        out[:, 0] = (_numbers(self.name, values) - self.mean) / self.stddev

    def layers(self, inputs: Any) -> Any:
        """Returns the same of a Keras tensor (n, 1)."""
        import keras

        # The deviation itself and not Normalization, which puts a floor under it.
        gain = 1.0 / self.stddev
        centre = keras.layers.Rescaling(1.0, offset=-self.mean, dtype="float32")
        return keras.layers.Rescaling(gain, dtype="float32")(centre(inputs))

    @property
    def input_dtype(self) -> str:
        """The dtype of a Keras input."""
        return "float32"


@dataclasses.dataclass(frozen=True)
class CategoricalColumn:
    """A column of categories: one-hot, with one more place for unknown ones; or hashed."""

    name: str | int
    vocabulary: np.ndarray  # sorted; int64 or str
    buckets: int | None

    @classmethod
    def learn(cls, name: str | int, values: np.ndarray, buckets: int | None) -> CategoricalColumn:
        """Returns the column with the categories of public values; many ones are hashed."""
        vocabulary = np.unique(_categories(name, values))
        hashed = buckets is not None and len(vocabulary) > buckets
        if not hashed and len(vocabulary) > _MOST_CATEGORIES:
            raise ValueError(
                f"column {name!r} has {len(vocabulary)} categories, more than the "
                f"{_MOST_CATEGORIES} that can be one-hot. Set hash_buckets, leave the column out, "
                "or give it as numbers."
            )
        return cls(name, vocabulary, buckets if hashed else None)

    @property
    def width(self) -> int:
        """The number of places."""
        return self.buckets or len(self.vocabulary) + 1

    @property
    def input_dtype(self) -> str:
        """The dtype of a Keras input."""
        return "int64" if self.vocabulary.dtype.kind == "i" else "string"

    def encode(self, values: np.ndarray, out: np.ndarray) -> None:
        """Fills ``out`` (n, width)."""
        values = _categories(self.name, values)
        if values.dtype.kind != self.vocabulary.dtype.kind:
            raise TypeError(
                f"column {self.name!r} has categories of dtype {values.dtype}, in fit they were "
                f"{self.vocabulary.dtype}. Read both in the same way."
            )
        if self.buckets is not None:
            distinct, place = np.unique(values, return_inverse=True)
            codes = np.asarray(self._hashing("int")(_as_tensor(distinct))).ravel()[place.ravel()]
        else:
            codes = np.searchsorted(self.vocabulary, values)
            known = codes < len(self.vocabulary)
            known[known] = self.vocabulary[codes[known]] == values[known]
            codes = np.where(known, codes + 1, 0)  # Keras's lookups put unknown ones first
        out[:] = 0.0
        out[np.arange(len(out)), codes] = 1.0

    def layers(self, inputs: Any) -> Any:
        """Returns the same of a Keras tensor (n, 1)."""
        import keras

        if self.buckets is not None:
            return self._hashing("one_hot")(inputs)
        words = self.vocabulary.tolist()
        if self.vocabulary.dtype.kind == "i":
            lookup = keras.layers.IntegerLookup(
                vocabulary=words, output_mode="one_hot", oov_token=min(words) - 1
            )
        else:
            # No category may be the name of the unknown ones.
            unknown = max(words, key=len) + "?"
            lookup = keras.layers.StringLookup(
                vocabulary=words, output_mode="one_hot", oov_token=unknown
            )
        return lookup(inputs)

    def _hashing(self, output_mode: str) -> Any:
        import keras

        return keras.layers.Hashing(self.buckets, output_mode=output_mode)


Column = NumericColumn | CategoricalColumn


def learn_columns(
    table: dict[str | int, np.ndarray],
    categorical: Iterable[str | int] | None,
    hash_buckets: int | None,
) -> tuple[Column, ...]:
    """Returns the encoding of every column.

    Args:
        table: from ``read_table``.
        categorical: names or places; None takes the columns that are not numbers.
        hash_buckets: columns of more categories than this are hashed into so many buckets.
    """
    if categorical is None:
        chosen = {name for name, values in table.items() if values.dtype.kind not in "iuf"}
    else:
        chosen = set(categorical)
        unknown = sorted(map(repr, chosen - set(table)))
        if unknown:
            raise ValueError(
                f"categorical names columns that the table lacks: {', '.join(unknown)}. It has "
                f"{', '.join(map(repr, table))}."
            )
    return tuple(
        CategoricalColumn.learn(name, values, hash_buckets)
        if name in chosen
        else NumericColumn.learn(name, values)
        for name, values in table.items()
    )


def encode(columns: tuple[Column, ...], table: dict[str | int, np.ndarray]) -> np.ndarray:
    """Returns rows of numbers, ``float32`` (n, sum of widths)."""
    size = len(next(iter(table.values())))
    out = np.empty((size, sum(column.width for column in columns)), np.float32)
    start = 0
    for column in columns:
        column.encode(table[column.name], out[:, start : start + column.width])
        start += column.width
    return out


def _numbers(name: str | int, values: np.ndarray) -> np.ndarray:
    if values.dtype.kind not in "biuf":
        try:
            values = values.astype(np.float64)
        except (TypeError, ValueError):
            raise TypeError(
                f"column {name!r} must be numbers, got dtype {values.dtype}. List it in "
                "categorical=, or convert it."
            ) from None
    numbers = values.astype(np.float64)
    bad = int(np.count_nonzero(~np.isfinite(numbers)))
    if bad:
        raise ValueError(
            f"column {name!r} must be finite, but {bad} of {numbers.size} entries are NaN or "
            "infinite. Fill them in, and add a column that says where."
        )
    return numbers


def _categories(name: str | int, values: np.ndarray) -> np.ndarray:
    """Returns categories as ``int64`` or text."""
    if values.dtype.kind in "biu":
        return values.astype(np.int64)
    if values.dtype.kind == "f":
        whole = values.astype(np.int64, copy=True) if np.all(np.isfinite(values)) else None
        if whole is None or not np.array_equal(whole, values):
            raise ValueError(
                f"column {name!r} is listed as categorical, but its numbers are not whole. Leave "
                "it numeric, or give its categories as integers or text."
            )
        return whole
    if values.dtype.kind not in "OUS":
        raise TypeError(
            f"column {name!r} must be numbers or text, got dtype {values.dtype}. Convert it, for "
            "example dates to days since one of them."
        )
    return values.astype(str)


def _as_tensor(values: np.ndarray) -> Any:
    return values if values.dtype.kind == "i" else values.astype(object)
