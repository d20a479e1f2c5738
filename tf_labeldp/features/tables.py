"""Tables of any library as columns of NumPy: numbers, and texts, with one missing value of each."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import numbers
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

import numpy as np
from scipy import sparse

from tf_labeldp._columns import Column
from tf_labeldp.accounting import Public, PublicInput
from tf_labeldp.features._containers import ArrowTable, Frame, Tensor, Typed

MISSING_INTEGER = -(2**63)
"""The smallest ``int64`` stands for a missing category of whole numbers."""
_TEXTS_AND_MISSING = frozenset([str, type(None), float])
"""Types in a column of texts, whose missing entries may be NaN."""
_MISSING_TYPES = frozenset(["NoneType", "NAType", "NaTType"])
"""Names of the types of missing entries; pandas has the last two."""


def as_table(inputs: Any) -> Any:
    """Returns a table that is read by column: records become columns, a lazy frame is collected.

    Masked entries of NumPy's arrays become missing ones, and rows in lists an array.
    """
    inputs = Column.as_rows(Column.unmasked(inputs))
    if type(inputs).__name__ == "RecordBatch":
        import pyarrow  # type: ignore[import-untyped]

        return pyarrow.Table.from_batches([inputs])
    if type(inputs).__name__ == "SparseTensor":
        entries = np.asarray(inputs.values), np.asarray(inputs.indices).T
        return sparse.coo_matrix(entries, np.asarray(inputs.dense_shape))
    if isinstance(inputs, Tensor):
        array = Column.array_of(inputs)
        return inputs if array.dtype.kind == "O" else array  # Keras takes texts as tensors alone.
    if isinstance(inputs, list) and inputs and isinstance(inputs[0], Mapping):
        others = [row for row in inputs if not isinstance(row, Mapping)]
        if others:
            raise TypeError(
                "expected records, a list of dicts, got one with a row of type "
                f"{type(others[0]).__name__}. Give one dict per example."
            )
        names = dict.fromkeys(name for row in inputs for name in row)
        return {name: Column.objects([row.get(name) for row in inputs]) for name in names}
    return inputs


def with_text_names(table: Any) -> Any:
    """Returns a result of ``as_table`` with texts as names, such as "('a', 'x')" for a tuple.

    Numbers 0, 1, ... are places: pandas numbers the columns of an array so.
    """
    names = list(names_of(table) or ())
    if names == list(range(len(names))) or all(isinstance(name, str) for name in names):
        return table
    texts = [str(name) for name in names]
    if len(set(texts)) < len(texts):
        raise ValueError(
            "expected column names that differ as text, got two that are equal, such as 0 and "
            "'0'. Rename one column."
        )
    return {text: table[name] for text, name in zip(texts, names, strict=True)}


def is_structured(inputs: Any) -> bool:
    """Returns whether inputs are an array of records, with a name per field."""
    is_numpy = isinstance(inputs, Typed) and isinstance(inputs.dtype, np.dtype)
    return is_numpy and bool(inputs.dtype.names)


def names_of(table: Any) -> Any:
    """Returns the column names of a result of ``as_table``, which must differ; None without any."""
    if isinstance(table, Mapping):
        return table
    if isinstance(table, Frame):
        names = list(table.column_names if isinstance(table, ArrowTable) else table.columns)
        if len(set(names)) < len(names):
            twice = sorted({repr(name) for name in names if names.count(name) > 1})
            raise ValueError(
                f"expected columns with different names, got {', '.join(twice)} more than once. "
                "Rename or drop columns."
            )
        return names
    return table.dtype.names if is_structured(table) else None


def columns_of(table: Any) -> dict[Any, np.ndarray] | None:
    """Returns the columns of a result of ``as_table``; None if it has no names."""
    names = names_of(table)
    return None if names is None else {name: column_values(name, table[name]) for name in names}


def column_values(name: Any, column: Any) -> np.ndarray:
    """Returns a column (n,) as numbers, NaN where missing, or as texts, empty where missing.

    Missing are None, NaN, NaT, pandas's NA and the ``Column.MISSING_WORDS``. Dates, times and
    durations become days, since 1970-01-01 UTC; times of day become hours; decimals become doubles.
    A column of a category type is of texts, also if its categories are numbers, and so is a column
    of numbers and texts.
    """
    dtype = str(column.dtype) if isinstance(column, Typed) else ""
    of_pandas = dtype.startswith(("category", "dictionary"))
    is_category = of_pandas or Column.is_dictionary(column)
    array = _as_array(column.astype(object) if of_pandas else column)
    if array.dtype.kind == "S" and array.ndim == 1:
        array = np.char.decode(array)
    kind = array.dtype.kind
    if array.ndim != 1 or kind in "biuf":
        return array
    if kind in "Mm":
        return _days(array)
    if kind == "U" and not np.isin(array, Column.MISSING_WORDS).any():
        return array
    if kind not in "OU":
        raise TypeError(
            f"column {name!r} must be numbers or text, got dtype {array.dtype}. Convert it."
        )
    if (texts := _texts(array)) is not None:
        return texts
    return _Entries.of(array).column(name, is_category)


def _as_array(column: Any) -> np.ndarray:
    if not isinstance(column, (list, tuple)):
        return Column.array_of(column)
    # NumPy would turn numbers next to texts into texts.
    has_texts = any(isinstance(entry, str) for entry in column)
    return Column.objects(list(column)) if has_texts else np.asarray(column)


def to_inputs(table: Public[Any], model: Public[Any] = None) -> np.ndarray | dict[str, np.ndarray]:
    """Returns a table as the inputs that a Keras model takes, missing values included.

    A missing number is NaN, a missing text is empty, and a missing category of whole numbers is
    ``-2**63``: in an exported model (``to_keras``) they count as in ``fit`` and ``predict``.

    Args:
        table: columns (n,): a data frame of pandas or Polars, a table of Arrow, a dict of columns,
            or a list of records.
        model: the model, whose inputs decide which columns are taken, and as what type. None takes
            all columns, numbers as ``float32``: then the table must have the columns of the model
            alone, and none of these may be a category of whole numbers.

    Returns:
        A dict of arrays (n, 1) by column name, or of tensors if one of them is of texts; for a
        model with one input of rows an array ``float32`` (n, p) of the columns side by side, and
        for one with a single input of texts the tensor (n, 1) of a table's only column.

    Raises:
        TypeError: a text where the model takes a number, or the other way round.
        ValueError: the table lacks a column, or has more or fewer than the model takes.

    Example:
        >>> table = {"age": [20, None], "job": ["cook", None]}
        >>> inputs = to_inputs(table)
        >>> [part.numpy().tolist() for part in inputs.values()]
        [[[20.0], [nan]], [[b'cook'], [b'']]]
    """
    columns = columns_of(as_table(PublicInput.bare(table)))
    if columns is None:
        raise TypeError(
            "expected a table with column names, got "
            f"{type(PublicInput.bare(table)).__name__}. Give an array of numbers to the model as "
            "it is."
        )
    model = PublicInput.bare(model)
    if model is None:
        return _as_inputs(
            {
                str(name): (values, "float32" if _is_number(values) else "string")
                for name, values in columns.items()
            }
        )
    expected = symbolic_inputs(model)
    if expected is None:
        raise TypeError(
            f"expected a model with known inputs, got {type(model).__name__}. Build it on "
            "keras.Input."
        )
    if not isinstance(expected, Mapping):
        inputs = list(model.inputs)
        if len(inputs) == 1 and inputs[0].dtype != "string":
            rows, width = as_matrix(columns), inputs[0].shape[-1]
            if len(columns) != width:
                raise ValueError(
                    f"the model takes {width} columns, got {len(columns)}: {list(columns)}. Select "
                    "its columns, in its order."
                )
            return rows
        if len(inputs) == len(columns) == 1:
            # Keras names inputs that have no name.
            [(name, values)] = columns.items()
            [found] = _as_inputs({str(name): (values, inputs[0].dtype)}).values()
            return found
        expected = {tensor.name: tensor for tensor in inputs}
    by_text = {str(name): values for name, values in columns.items()}
    missing = [repr(name) for name in expected if name not in by_text]
    if missing:
        raise ValueError(
            f"the table lacks inputs of the model: {', '.join(missing)}. Add these columns."
        )
    return _as_inputs({name: (by_text[name], part.dtype) for name, part in expected.items()})


def symbolic_inputs(model: Any) -> Any:
    """Returns the symbolic inputs of a Keras model, in their structure; None for one without."""
    inputs = getattr(model, "inputs", None)
    if not inputs:
        return None
    import keras

    # A Sequential model has ``inputs``, but ``input`` only after another model called it.
    return inputs[0] if isinstance(model, keras.Sequential) else model.input


def as_numbers(name: Any, values: np.ndarray) -> np.ndarray:
    """Returns a column as finite ``float32`` numbers (n,), NaN where missing."""
    if not _is_number(values):
        raise TypeError(
            f"column {name!r} must be numbers, got text. List it in categorical=, or convert it."
        )
    with np.errstate(over="ignore"):
        found = values.astype(np.float32)
    bad = int(np.count_nonzero(np.isinf(found)))
    if large := bad - int(np.count_nonzero(np.isinf(values))):
        raise ValueError(
            f"column {name!r} must be within float32, up to 3.4e38, but {large} of {found.size} "
            "entries are larger. Divide the column, or make them NaN where they are missing."
        )
    if bad:
        raise ValueError(
            f"column {name!r} must be finite, but {bad} of {found.size} entries are infinite. "
            "Make them numbers, or NaN where they are missing."
        )
    return found


def as_categories(name: Any, values: np.ndarray) -> np.ndarray:
    """Returns a column as categories (n,): ``int64`` whole numbers, or texts."""
    if values.dtype.kind != "f":
        return values.astype(np.int64) if _is_number(values) else values
    filled = np.where(np.isnan(values), float(MISSING_INTEGER), values)
    whole = np.where(np.isinf(filled), 0.0, filled).astype(np.int64)
    if not np.array_equal(whole, filled):
        raise ValueError(
            f"categorical column {name!r} must be integers or text, got fractions. Leave it "
            "numeric, or convert its categories."
        )
    return whole


def as_matrix(columns: dict[Any, np.ndarray]) -> np.ndarray:
    """Returns columns of numbers side by side, ``float32`` (n, p)."""
    if texts := [name for name, values in columns.items() if not _is_number(values)]:
        raise TypeError(text_error(texts))
    return np.column_stack(list(columns.values())).astype(np.float32)


def _as_inputs(columns: dict[str, tuple[np.ndarray, str]]) -> dict[str, Any]:
    """Returns Keras inputs (n, 1) of columns (n,) and their types."""
    inputs = {name: _as_type(name, *column)[:, np.newaxis] for name, column in columns.items()}
    if all(map(_is_number, inputs.values())):
        return inputs
    import keras

    # Keras takes texts as tensors alone, and no tensors together with arrays.
    return {name: keras.ops.convert_to_tensor(values) for name, values in inputs.items()}


def _as_type(name: Any, values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype != "string":
        if not _is_number(values):
            raise TypeError(f"the model takes numbers in column {name!r}, got text. Convert it.")
        if dtype.startswith("int"):
            values = as_categories(name, values)
            if dtype != "int64" and (values == MISSING_INTEGER).any():
                raise ValueError(
                    f"column {name!r} lacks numbers, for which a model's input of {dtype} has no "
                    "value. Fill them in."
                )
        return values.astype(dtype)
    if not _is_number(values):
        return values.astype(str)
    if not np.isnan(values).all():
        raise TypeError(
            f"the model takes text in column {name!r}, got numbers. Convert it with .astype(str)."
        )
    return np.full(values.shape, "")


def text_error(names: list[Any], found: str = "text") -> str:
    """Returns the words of an error on columns where finite numbers are needed."""
    return (
        f"expected numbers, got {found} in column {', '.join(map(repr, names))}. Encode the table: "
        "encoder=tf_labeldp.features.RandomFourierFeatures().fit(table), or give its transform; or "
        "for a model that takes texts, tf_labeldp.features.to_inputs(table, model)."
    )


def _is_number(values: np.ndarray) -> bool:
    return values.dtype.kind in "biuf"


def _texts(array: np.ndarray) -> np.ndarray | None:
    """Returns texts (n,), empty where missing; None for other entries, or if all are missing.

    A column of millions of entries is compared as a whole: one by one they took minutes.
    """
    if not set(map(type, array.tolist())) <= _TEXTS_AND_MISSING:
        return None
    texts = array.astype(object)
    texts[(texts != texts) | np.equal(texts, np.array(None, object))] = ""
    words = set(texts.tolist())
    if set(map(type, words)) != {str} or words.issubset(Column.MISSING_WORDS):
        return None
    for word in words.intersection(Column.MISSING_WORDS[1:]):
        texts[texts == word] = ""
    return array if array.dtype.kind == "U" and "" not in words else texts


def _is_missing(entry: Any) -> bool:
    if isinstance(entry, str):
        return entry in Column.MISSING_WORDS
    if type(entry).__name__ in _MISSING_TYPES:
        return True
    return isinstance(entry, (float, np.floating, Decimal)) and entry != entry


@dataclasses.dataclass(frozen=True, eq=False)
class _Entries:
    """The entries of a column of objects.

    Attributes:
        present: those that are not missing, in their order.
        is_missing: ``bool`` (n,).
    """

    present: list[Any]
    is_missing: np.ndarray

    @classmethod
    def of(cls, array: np.ndarray) -> _Entries:
        entries = [
            entry.decode() if isinstance(entry, bytes) else entry for entry in array.tolist()
        ]
        is_missing = np.fromiter(map(_is_missing, entries), bool, len(entries))
        present = [entry for entry, missing in zip(entries, is_missing, strict=True) if not missing]
        return cls(present, is_missing)

    def are(self, kinds: Any) -> bool:
        return all(issubclass(each, kinds) for each in self._types)

    @functools.cached_property
    def _types(self) -> set[type]:
        return set(map(type, self.present))

    def column(self, name: Any, is_category: bool) -> np.ndarray:
        """Returns the column (n,); numbers of a category type are read as texts."""
        for kinds, read in _READERS:
            if self.are(kinds) and not (is_category and kinds is _NUMBERS):
                return read(self)
        other = next(type(entry) for entry in self.present if not isinstance(entry, _WORDS))
        raise TypeError(
            f"column {name!r} must be numbers, text or dates, got {other.__module__}."
            f"{other.__name__}. Convert it, or leave it out."
        )

    def numeric(self) -> np.ndarray:
        if self.are((numbers.Integral, np.bool_)) and not self.is_missing.any():
            return np.array(self.present, np.int64)
        return self._filled(np.nan, np.array(self.present, np.float64))

    def dates(self) -> np.ndarray:
        days = [_without_zone(entry) for entry in self.present]
        return _days(self._filled("NaT", np.array(days, "datetime64[us]")))

    def durations(self) -> np.ndarray:
        return _days(self._filled("NaT", np.array(self.present, "timedelta64[us]")))

    def times_of_day(self) -> np.ndarray:
        day = datetime.date(1970, 1, 1)
        times = [
            datetime.datetime.combine(day, entry.replace(tzinfo=None)) for entry in self.present
        ]
        return 24.0 * _days(self._filled("NaT", np.array(times, "datetime64[us]")))

    def texts(self) -> np.ndarray:
        return self._filled("", Column.objects(list(map(str, self.present))))

    def _filled(self, missing: Any, present: np.ndarray) -> np.ndarray:
        found = np.full(self.is_missing.shape, missing, present.dtype)
        found[~self.is_missing] = present
        return found


_NUMBERS = (numbers.Real, Decimal, np.bool_)
_WORDS = (str, *_NUMBERS)
_READERS: tuple[tuple[Any, Callable[[_Entries], np.ndarray]], ...] = (
    (_NUMBERS, _Entries.numeric),
    (datetime.date, _Entries.dates),
    (datetime.timedelta, _Entries.durations),
    (datetime.time, _Entries.times_of_day),
    (_WORDS, _Entries.texts),
)
"""How a column of objects is read, by the types of its present entries: the first that fits all."""


def _without_zone(day: Any) -> Any:
    """Returns a date, or a time in UTC without its zone, as NumPy takes it."""
    if not isinstance(day, datetime.datetime) or day.tzinfo is None:
        return day
    return day.astimezone(datetime.timezone.utc).replace(tzinfo=None)


def _days(array: np.ndarray) -> np.ndarray:
    """Returns days since 1970-01-01, or days of durations, ``float64``; NaN where missing."""
    if array.dtype.kind == "M":
        array = array - np.datetime64(0, "D")
    return array / np.timedelta64(1, "D")
