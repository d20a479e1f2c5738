"""One reader for columns of labels, users, ids and weights, in the containers of any library.

Equal values give equal arrays, whatever contains them, and a missing entry is never read as a
value: neither below a mask of NumPy, nor as the first category of an Arrow dictionary.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import math
import numbers
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

_FENCE = 10.0
"""Distances from the 10 % to the 90 % quantile beyond which a number is an outlier: 0.01 % of a
lognormal column are."""
_RARE = 0.01
"""The share of the rows below which numbers beyond the fences of the rows are outliers."""
_QUANTILE_ROWS = 100_000
"""Rows sampled for the quantiles of a column, whose ranks are then within 0.5 %."""
_HINTS = {
    "labels": "Leave them out by a rule that does not use labels, or name them: "
    "PrivateLabels(unlabelled=).",
    "users": "Give each of these rows a new user, or leave them out, without looking at labels.",
    "ids": "Give each an id.",
}
"""Advice on missing entries, by the role of the column."""
_FILL = "Fill them in, or leave these examples out, by a rule that does not use labels."
_NEVER_MISSING = frozenset([str, bytes, int, bool])
"""Types whose values are all present."""
_RAGGED = (
    "expected rows of one length, got {}. Pad or cut them, for example with "
    "keras.utils.pad_sequences."
)
_NUMBERS = (numbers.Real, np.bool_)
_LEAST_WEIGHT = 1e-30
"""Smaller weights, as a fraction of the largest, count as zero."""
_KINDS: tuple[tuple[Any, str], ...] = (
    (str, "texts"),
    (bytes, "bytes"),
    ((bool, np.bool_), "booleans"),
    (numbers.Integral, "whole numbers"),
    (numbers.Real, "numbers with fractions"),
    ((datetime.datetime, np.datetime64), "times"),
)
"""Kinds of values, which differ as users and ids: 1 and "1" are two."""


@runtime_checkable
class _Pandas(Protocol):
    def isna(self) -> Any: ...

    def astype(self, dtype: Any) -> Any: ...


@runtime_checkable
class _Arrow(Protocol):
    null_count: int
    type: Any

    def cast(self, target: Any) -> Any: ...

    def to_pylist(self) -> list[Any]: ...


@runtime_checkable
class _ArrowDictionary(Protocol):
    index_type: Any
    value_type: Any


@runtime_checkable
class _Polars(Protocol):
    def null_count(self) -> int: ...

    def to_list(self) -> list[Any]: ...


@runtime_checkable
class _LazyFrame(Protocol):
    """A lazy frame of Polars."""

    def collect(self) -> Any: ...

    def collect_schema(self) -> Any: ...


@runtime_checkable
class _Tensor(Protocol):
    def numpy(self) -> np.ndarray: ...


@runtime_checkable
class _TorchTensor(Protocol):
    def detach(self) -> Any: ...


@runtime_checkable
class _HasArray(Protocol):
    def __array__(self) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Column:
    """The entries of a column, and which of them are missing.

    Attributes:
        values: the entries, in NumPy's type of them, or as objects; any value where missing.
        missing: ``bool``, in the shape of ``values``.
        MISSING_WORDS: texts that count as missing: the empty text, and missing values that were
            turned into text.
    """

    values: np.ndarray
    missing: np.ndarray
    MISSING_WORDS: ClassVar[tuple[str, ...]] = ("", "nan", "None", "<NA>", "NaT")

    @classmethod
    def of(cls, values: Any) -> Column:
        """Reads a container; a ``Column`` stays as it is."""
        if isinstance(values, Column):
            return values
        if isinstance(values, Iterator):
            raise TypeError(
                f"expected an array or a list, got a {type(values).__name__}, which can be read "
                "once. Give list(...) of it."
            )
        if isinstance(values, np.ma.MaskedArray):
            mask: Any = np.ma.getmaskarray(values)
            names = mask.dtype.names
            mask = np.any([mask[name] for name in names], axis=0) if names else mask
            array = cls.array_of(values.data)
            if mask.any():  # What lies below a mask is never read.
                array = array.astype("M8[us]") if array.dtype.kind == "M" else array
                array = array.astype(object)
                array[mask] = None
            return cls(array, _missing_in(array))
        # As objects, since large integers next to missing ones would become doubles.
        if isinstance(values, _Pandas):
            values = values.astype(object) if np.any(values.isna()) else values
        elif isinstance(values, _Arrow):
            values = values.cast(values.type.value_type) if cls.is_dictionary(values) else values
            values = values.to_pylist() if values.null_count else values
        elif isinstance(values, _Polars) and values.null_count():
            values = values.to_list()
        array = cls.array_of(values)
        return cls(array, _missing_in(array))

    def __len__(self) -> int:
        return len(self.values)

    def take(self, rows: np.ndarray) -> Column:
        """Returns some entries, by their numbers."""
        return Column(self.values[rows], self.missing[rows])

    def complete(self, role: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """Returns the entries; raises if some are missing, or for another shape.

        Args:
            role: the name of the argument; ``"labels"``, ``"users"`` and ``"ids"`` have their own
                advice.
            shape: the expected shape; None for any.
        """
        if shape is not None and self.values.shape != shape:
            raise ValueError(
                f"expected {role} of shape {shape}, one per example, got {self.values.shape}. Give "
                "one entry for each row, in their order."
            )
        if missing := int(np.count_nonzero(self.missing)):
            raise ValueError(
                f"{missing} of {self.missing.size} {role} are missing. {_HINTS.get(role, _FILL)}"
            )
        return self.values

    def names(self, role: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """Returns complete entries of one type, of which 1 and "1", or 1 and True, would be one."""
        values = self.complete(role, shape)
        types = set(map(type, values.tolist())) if values.dtype.kind == "O" else set()
        kinds = set(map(_kind, types))
        if len(kinds) > 1:
            found = " and ".join(sorted(kinds))
            raise TypeError(
                f"expected {role} of one type, got a mix of {found}. Turn them all into texts."
            )
        return values

    def numbers(self, role: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """Returns complete entries; objects that are all numbers as ``float64``."""
        array = self.complete(role, shape)
        if array.dtype.kind == "O" and array.size:
            kinds = set(map(type, array.ravel().tolist()))
            if all(issubclass(kind, (*_NUMBERS, decimal.Decimal)) for kind in kinds):
                return array.astype(np.float64)
        return array

    @classmethod
    def weights(
        cls, values: Any, num_rows: int | None, dtype: Any = np.float64
    ) -> np.ndarray | None:
        """Returns public weights (n,), finite and at least zero, in a type of floating numbers.

        None stays None; ``num_rows`` is None if it is not known yet.
        """
        if values is None:
            return None
        if isinstance(values, dict) or (isinstance(values, tuple) and any(map(np.ndim, values))):
            raise ValueError(
                "expected one sample_weight per example, got weights by output. Weigh outputs by "
                "loss_weights, and classes by class_weight."
            )
        shape = None if num_rows is None else (num_rows,)
        array = cls.of(values).numbers("sample_weight", shape)
        if array.ndim != 1:
            raise ValueError(f"expected sample_weight of shape (n,), got {array.shape}.")
        if array.dtype.kind not in "biuf" or not np.all(np.isfinite(array) & (array >= 0.0)):
            raise ValueError(
                "expected sample_weight of finite numbers, at least zero, got others. Mend them, "
                "without looking at labels."
            )
        largest, limits = float(array.max(initial=0)), np.finfo(dtype)
        if largest and dtype != np.float64 and not limits.tiny <= largest <= limits.max:
            raise ValueError(
                f"expected sample_weight whose largest is a normal {np.dtype(dtype).name}, got "
                f"{largest:g}. Divide the weights by their mean."
            )
        return array.astype(dtype)

    @classmethod
    def relative_weights(cls, values: Any, num_rows: int | None) -> np.ndarray | None:
        """Returns public weights (n,) with mean one, some of them above zero; None for None."""
        weights = cls.weights(values, num_rows)
        if weights is None:
            return None
        if not weights.any():
            raise ValueError(
                "expected sample_weight that is not all zero, got zeros. Leave it out."
            )
        # Sums of the largest doubles overflow, and squares of the smallest ones underflow.
        weights = weights / weights.max()
        weights[weights < _LEAST_WEIGHT] = 0.0
        return weights / weights.mean()

    @staticmethod
    def is_dictionary(values: Any) -> bool:
        """Returns whether a container is a column of Arrow whose entries are codes of values."""
        return isinstance(values, _Arrow) and isinstance(values.type, _ArrowDictionary)

    @staticmethod
    def array_of(values: Any) -> np.ndarray:
        """Returns the entries of a container as an array; missing ones are NaN, NaT, None or NA."""
        values = Column.unmasked(values)
        if isinstance(values, (list, tuple)):
            return _array_of(values)
        if Column.is_dictionary(values):
            # For a missing entry of an Arrow dictionary, NumPy would read its first value.
            return Column.objects(values.to_pylist())
        if type(values).__module__.startswith("scipy.sparse"):
            values = values.toarray()
        if isinstance(values, _Tensor):
            on_cpu = values.detach().cpu() if isinstance(values, _TorchTensor) else values
            values = on_cpu.numpy()
        array = np.asarray(values)
        if array.dtype.name == "bfloat16":  # NumPy does not know it as a number.
            array = array.astype(np.float32)
        if array.dtype.kind == "T":  # NumPy's texts of any length have no order of bytes.
            return array.astype(object)
        return array.astype(array.dtype.newbyteorder("="), copy=False)

    @staticmethod
    def fences(numbers: np.ndarray) -> tuple[float, float]:
        """Returns the float32 ends beyond which numbers (n,) of a column are outliers.

        Quantiles of the rows find them where few rows have outliers, quantiles of the distinct
        numbers where one number, such as 99999999, stands for an unknown one in many rows. The
        narrower fences count. Columns of two values have none, so that a rare indicator keeps its
        ones.
        """
        if numbers.size > _QUANTILE_ROWS:
            numbers = np.random.default_rng(0).choice(numbers, _QUANTILE_ROWS, replace=False)
        distinct = np.unique(numbers)
        low, high = -math.inf, math.inf
        for entries in (numbers, distinct) if distinct.size > 2 else ():
            first, last = np.quantile(entries, [0.1, 0.9], method="nearest")
            ends = first - _FENCE * (last - first), last + _FENCE * (last - first)
            beyond = np.mean((numbers < ends[0]) | (numbers > ends[1]))
            # Amounts of which a tenth are above zero are no outliers of the zeros.
            if last > first and (entries is distinct or beyond < _RARE):
                low, high = max(low, ends[0]), min(high, ends[1])
        return float(np.float32(low)), float(np.float32(high))

    @staticmethod
    def objects(entries: Any) -> np.ndarray:
        """Returns an array of objects (n,), one per entry: lists and tuples are not expanded."""
        return np.fromiter(entries, dtype=object, count=len(entries))

    @staticmethod
    def unmasked(value: Any) -> Any:
        """Returns a value with NaN, NaT or None in place of the masked entries of NumPy's arrays.

        A lazy frame is collected. Containers are searched, and stay the same objects if they
        contain neither.
        """
        if value is np.ma.masked:
            return np.nan
        if isinstance(value, np.ma.MaskedArray):
            return _filled(value)
        if isinstance(value, _LazyFrame):
            return value.collect()
        if type(value) is dict:
            parts = {name: Column.unmasked(part) for name, part in value.items()}
            return parts if any(parts[name] is not value[name] for name in value) else value
        if type(value) in (list, tuple):
            containers = (np.ma.MaskedArray, _LazyFrame, dict, list, tuple)
            if any(issubclass(kind, containers) for kind in set(map(type, value))):
                items = [Column.unmasked(part) for part in value]
                if any(new is not old for new, old in zip(items, value, strict=True)):
                    return type(value)(items)
        return value

    @staticmethod
    def as_rows(inputs: Any) -> Any:
        """Returns rows in a list or in the entries of a column as an array; others unchanged.

        A list or tuple of arrays stays: they may be rows, or the inputs of a model.
        """
        kind = type(inputs).__name__
        if kind == "RaggedTensor":
            padded = inputs.to_tensor()
            if np.size(padded) != np.size(inputs.flat_values):
                raise ValueError(_RAGGED.format("a RaggedTensor"))
            return padded
        if type(inputs) in (list, tuple) and len(inputs):
            first = inputs[0]
            while isinstance(first, (list, tuple)) and first:
                first = first[0]
            has_rows = first is not inputs[0] and not isinstance(first, dict)
            return Column.stacked_rows(inputs) if has_rows and np.ndim(first) == 0 else inputs
        if isinstance(inputs, np.ndarray) or kind == "Series":
            array = np.asarray(inputs)
            is_column = array.ndim == 1 and array.dtype.kind == "O" and array.size
            if is_column and isinstance(array[0], (list, np.ndarray)):
                return Column.stacked_rows(array.tolist())
        return inputs

    @staticmethod
    def stacked_rows(rows: Any) -> np.ndarray:
        """Returns a list of rows as an array; rows of several lengths raise a ``ValueError``.

        Numbers next to texts stay numbers, as objects.
        """
        try:
            array = np.asarray(rows)
        except ValueError:  # NumPy's error for rows of several lengths
            lengths = sorted({np.size(row) if np.ndim(row) < 1 else len(row) for row in rows})
            found = f"rows of {lengths[0]} to {lengths[-1]} entries"
            raise ValueError(_RAGGED.format(found)) from None
        is_text = array.dtype.kind in "US" and array.ndim == 2
        if is_text and not all(isinstance(entry, (str, bytes)) for row in rows for entry in row):
            return np.array(rows, dtype=object)
        return array


def type_in_words(array: np.ndarray) -> str:
    """Returns ``"texts"``, or ``"dtype float64"`` of an array that contains other entries."""
    kinds = set(map(type, array.ravel().tolist())) if array.dtype.kind == "O" else set()
    is_text = array.dtype.kind == "U" or (kinds and all(issubclass(each, str) for each in kinds))
    return "texts" if is_text else f"dtype {array.dtype}"


def _filled(masked: np.ma.MaskedArray) -> np.ndarray:
    """Returns an array with NaN, NaT or None for masked entries; records stay as they are."""
    if masked.dtype.names:  # Its columns are masked arrays, which are read one by one.
        return masked
    mask = np.ma.getmaskarray(masked)
    if not mask.any():
        return np.asarray(masked.data)
    kind = masked.dtype.kind
    dtype: Any = np.float64 if kind in "biu" else masked.dtype if kind in "fcMm" else object
    filled = np.array(masked.data, dtype=dtype)
    filled[mask] = "NaT" if kind in "Mm" else None if dtype is object else np.nan
    return filled


def _kind(kind: type) -> str:
    return next((name for types, name in _KINDS if issubclass(kind, types)), kind.__name__)


def _array_of(values: Any) -> np.ndarray:
    """Returns a list as an array in which no value takes the type of another.

    NumPy would make texts of numbers next to texts, floats of large integers next to negative ones,
    and would drop the zeros at the end of a text.
    """
    kinds = set(map(type, values))
    if all(map(_has_rows, kinds)):
        return np.asarray(Column.unmasked(values))
    names = {_kind(each) for each in kinds}
    if len(names) == 1 and all(issubclass(each, (*_NUMBERS, np.datetime64)) for each in kinds):
        array = np.asarray(values)
        if names != {"whole numbers"} or array.dtype.kind in "iu":
            return array
    return Column.objects(values)


def _has_rows(kind: type) -> bool:
    is_scalar = issubclass(kind, np.generic)
    return issubclass(kind, list) or (issubclass(kind, _HasArray) and not is_scalar)


def _missing_in(array: np.ndarray) -> np.ndarray:
    kind = array.dtype.kind
    if kind in "fc":
        return np.isnan(array)
    if kind in "mM":
        return np.isnat(array)
    if array.dtype.names:
        return np.any([_missing_in(array[name]) for name in array.dtype.names], axis=0)
    if kind != "O":
        return np.zeros(array.shape, bool)
    entries = array.ravel().tolist()
    if set(map(type, entries)) <= _NEVER_MISSING:
        return np.zeros(array.shape, bool)
    return np.fromiter(map(_is_missing, entries), bool, len(entries)).reshape(array.shape)


def _is_missing(entry: Any) -> bool:
    if isinstance(entry, (list, np.ndarray)):
        return False
    # NaN and NaT do not equal themselves, and a comparison with NA is no truth value.
    equals_itself = entry == entry
    return entry is None or not (isinstance(equals_itself, (bool, np.bool_)) and equals_itself)
