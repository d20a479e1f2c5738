"""``FeatureRows``, the one reader of public inputs: it checks them and returns numbers."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.utils import _safe_indexing

from tf_labeldp import _validate
from tf_labeldp._progress import without_retracing_warnings
from tf_labeldp.accounting import Public, PublicInput, Receipt, Setting, public_input
from tf_labeldp.features.estimator import NO_ROWS, RESHAPE, FeatureMap
from tf_labeldp.features.tables import (
    as_matrix,
    as_table,
    column_values,
    columns_of,
    is_frame,
    is_structured,
    names_of,
    text_error,
    to_inputs,
)

_BLOCK_BYTES = 1 << 26
"""Bytes per block in double precision: large enough for fast matrix products."""
_ROWS_TOGETHER = 2048
"""Longer blocks have a multiple of these rows, which heads sum together."""
_ENCODED_ROWS = 4096
"""Rows per call of an encoder."""
_MOST_SPARSE_COLUMNS = 20_000
"""The most columns of a sparse matrix that is read as a table, or whose covariance is computed."""
_FINITE_CELLS = 1 << 24
"""Numbers checked at a time."""
_FLATTEN = (
    "Flatten or pool its outputs, for example with keras.layers.Flatten or GlobalAveragePooling2D."
)
_POOL = {
    3: "Flatten or average its sequence: keras.Sequential([encoder, "
    "keras.layers.GlobalAveragePooling1D()]).",
    4: "Flatten or average its map: keras.Sequential([encoder, "
    "keras.layers.GlobalAveragePooling2D()]).",
}
"""What to do with an encoder whose outputs have more axes, by their number."""
_EACH = "Return one row for each row of the inputs."
SHUFFLED = (
    "expected the same rows in the same order on each reading, got others: the data set must not "
    "be shuffled. Leave out .shuffle(), or pass reshuffle_each_iteration=False with a seed; "
    "augment nothing."
)


class FeatureRows:
    """Public inputs as rows of numbers (n, d), read by number or in order, encoded when read.

    Args:
        inputs: numbers (n, d): an array, a list of rows, a sparse matrix, a table (a data frame of
            pandas or Polars, lazy ones too, a table or record batch of Arrow, a dict of columns, a
            list of records, a structured array), a tuple of arrays, or a ``tf.data.Dataset`` of
            such batches x or (x, y), which gives the same rows on each reading. With an encoder:
            the inputs that it takes.
        encoder: a fitted map with ``transform``, a Keras model, a callable, or an object with
            ``predict``; None if the inputs are features. It gets arrays in blocks, and all other
            inputs whole, except for the maps of this library, which get tables in blocks too. Of a
            ``PublicEncoder`` the kept features are read.
        columns: the required column names, from ``fit``; None for any.
        flatten: whether rows with more dimensions are flattened; otherwise they are refused.
        max_bytes: the most memory for the encoded features that ``blocks`` keeps; features that
            need more are encoded again on each reading.

    Attributes:
        columns: the column names of a table; None for other inputs.
        is_encoded: whether there is an encoder.

    Raises:
        TypeError: inputs of another type or without numbers, or an encoder of another type.
        ValueError: no rows, rows of a wrong shape, other columns than in ``fit``, or a data set
            that is endless or shuffled. Most of these are raised on reading.

    Example:
        >>> rows = FeatureRows({"age": np.array([20, 30]), "height": np.array([1.6, 1.8])})
        >>> rows.columns, rows.array().tolist()
        (('age', 'height'), [[20.0, 1.6], [30.0, 1.8]])
    """

    def __init__(
        self,
        inputs: Public[Any],
        encoder: Public[Any] = None,
        *,
        columns: Setting[Any] = None,
        flatten: bool = False,
        max_bytes: float = 0.0,
    ) -> None:
        self._public = (inputs, encoder)
        self._inputs, self._encoder = (
            as_table(PublicInput.bare(inputs)),
            check_encoder(PublicInput.bare(encoder)),
        )
        self.is_encoded = self._encoder is not None
        self._flatten, self._max_bytes = flatten, max_bytes
        self._digest: str | None = None  # set by the first reading of a data set
        self.columns = column_names(self._inputs)
        # A fitted map checks its own columns, and the columns of a dict are found by name.
        finds = getattr(self._encoder, "finds_columns", hasattr(self._encoder, "transform"))
        by_name = finds or isinstance(self._inputs, Mapping)
        if self._encoder is None or not by_name:
            _check_columns(self.columns, columns)
        if is_dataset(self._inputs):
            refuse_endless(self._inputs)

    @property
    def receipts(self) -> tuple[Receipt, ...]:
        """The receipts of inputs and encoder."""
        return public_input(*self._public).receipts

    @property
    def num_rows(self) -> int | None:
        """n; None for a data set, whose rows are counted on reading."""
        return None if is_dataset(self._inputs) else len(self)

    @functools.cached_property
    def _source(self) -> tuple[Any, Any]:
        """Inputs that are read by row number, and their encoder; None if they are features."""
        inputs = collected(self._inputs) if is_dataset(self._inputs) else self._inputs
        is_map = isinstance(self._encoder, FeatureMap)
        if is_map and (kept := self._encoder._kept_features(inputs)) is not None:
            return kept, None
        is_plain = isinstance(inputs, np.ndarray) and not inputs.dtype.names and inputs.ndim > 0
        if is_plain and self._encoder is not None:
            return inputs, self._encoder
        if is_map and self._encoder._reads_columns and names_of(inputs) is not None:
            return _TableRows(table_columns(inputs)), self._encoder
        return _features_of(inputs, self._encoder, self._flatten), None

    def __len__(self) -> int:
        return int(self._source[0].shape[0])

    def held(self) -> np.ndarray | None:
        """Returns all rows (n, d) if they lie in memory as one array, without a copy."""
        if is_dataset(self._inputs):
            return None
        source, encoder = self._source
        return source if encoder is None and isinstance(source, np.ndarray) else None

    def take(self, rows: Setting[Any]) -> np.ndarray:
        """Returns rows (m, d) by a slice or by their numbers."""
        source, encoder = self._source
        block = take_rows(source, rows)
        return block if encoder is None else _features_of(block, encoder)

    def array(self) -> np.ndarray:
        """Returns all rows (n, d), at least one and all finite."""
        if len(self) == 0:
            raise ValueError(NO_ROWS)
        step = len(self) if self._source[1] is None else _ENCODED_ROWS
        parts = [self.take(slice(at, at + step)) for at in range(0, len(self), step)]
        return checked_finite(parts[0] if len(parts) == 1 else np.concatenate(parts))

    def blocks(
        self, see: Setting[Callable[[Any, Any], None] | None] = None
    ) -> Iterator[np.ndarray]:
        """Yields all rows in blocks (m, d); a data set is streamed, whatever its size.

        Args:
            see: called with the raw inputs and their labels or None: per batch of a data set, and
                once for all other inputs.
        """
        if is_dataset(self._inputs):
            yield from self._joined_batches(see)
            return
        if see is not None:
            see(self._inputs, None)
        step = self._block_length()
        for start in range(0, len(self), step):
            block = self.take(slice(start, start + step))
            yield block if self._source[1] is None else block.astype(np.float32)

    def _block_length(self) -> int:
        """Returns the number of rows per block; encodes all rows now if memory allows."""
        if len(self) == 0:
            raise ValueError(NO_ROWS)
        width = self.take(slice(0, 1)).shape[1]
        step = max(1, _BLOCK_BYTES // (8 * width))
        step -= step % _ROWS_TOGETHER if step > _ROWS_TOGETHER else 0
        if self._source[1] is None:
            return step
        if 4.0 * width * len(self) > self._max_bytes:
            return _ENCODED_ROWS
        kept = np.empty((len(self), width), np.float32)
        for start in range(0, len(self), step):
            kept[start : start + step] = self.take(slice(start, start + step))
        self._source = kept, None
        return step

    def _joined_batches(self, see: Any) -> Iterator[np.ndarray]:
        digest = hashlib.sha256()
        waiting: list[np.ndarray] = []
        is_empty = True
        for element in self._inputs.as_numpy_iterator():
            x, y = _pair(element)
            add_to_digest(digest, x)
            rows = _features_of(x, self._encoder)
            if y is not None:
                _validate.one_label_per_row(rows.shape[0], len(np.atleast_1d(y)))
            if see is not None:
                see(x, y)
            if not rows.shape[0]:
                continue
            is_empty = False
            waiting.append(rows)
            _check_widths(waiting)
            if 8 * sum(map(np.size, waiting)) >= _BLOCK_BYTES:
                yield np.concatenate(waiting) if len(waiting) > 1 else rows
                waiting = []
        if is_empty:
            raise ValueError(NO_ROWS)
        if waiting:
            yield np.concatenate(waiting)
        self._digest = self._digest or digest.hexdigest()
        if digest.hexdigest() != self._digest:
            raise ValueError(SHUFFLED)


class _TableRows:
    """The rows of a table's columns (n,), as dicts of columns."""

    def __init__(self, columns: dict[Any, np.ndarray]) -> None:
        self._columns = columns
        self.shape = next(iter(columns.values())).shape

    def __getitem__(self, rows: Any) -> dict[Any, np.ndarray]:
        return {name: values[rows] for name, values in self._columns.items()}


def table_columns(table: Any) -> dict[Any, np.ndarray]:
    """Returns columns (n,) by name; by place for an array (n, p) or a sparse matrix.

    They are numbers, NaN where missing, or texts, empty where missing.
    """
    table = collected(table) if is_dataset(table) else as_table(table)
    columns = columns_of(table)
    if columns is None:
        matrix: Any = _side_by_side(input_parts(table)) if _is_several(table) else table
        if _is_sparse(matrix):
            check_columns_of_sparse(matrix)
            matrix = matrix.toarray()
        matrix = np.asarray(matrix)
        if matrix.ndim != 2:
            raise TypeError(
                "a table must be a dict of columns, a structured array, a data frame, an array "
                f"(n, p) or a sparse matrix, got {type(table).__name__} of shape {matrix.shape}."
            )
        columns = {place: column_values(place, part) for place, part in enumerate(matrix.T)}
    if not columns:
        raise ValueError("expected at least one column, got an empty table.")
    shapes = {values.shape for values in columns.values()}
    if len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
        raise ValueError(
            f"the columns of a table must all have shape (n,), got shapes {sorted(shapes)}."
        )
    return columns


def check_columns_of_sparse(matrix: Any) -> None:
    """Raises if a sparse matrix has too many columns to make it dense."""
    if matrix.shape[1] > _MOST_SPARSE_COLUMNS:
        raise ValueError(
            f"expected a sparse matrix of at most {_MOST_SPARSE_COLUMNS:,} columns, which is made "
            f"dense, got {matrix.shape[1]:,}. Project it first: "
            "sklearn.random_projection.SparseRandomProjection(1000).fit_transform(X)."
        )


def columns_to_fit(table: Any) -> dict[Any, np.ndarray]:
    """Returns the columns of a table; raises unless their names differ as text."""
    columns = table_columns(table)
    if len({str(name) for name in columns}) < len(columns):
        raise ValueError(
            "expected column names that differ as text, got two that are equal, such as 0 and "
            "'0'. Rename one column."
        )
    return columns


def hashed_columns(columns: Iterable[Any]) -> dict[Any, int]:
    """Returns the number of categories of each encoded column that is hashed, by name."""
    return {
        column.name: column.num_categories for column in columns if getattr(column, "buckets", None)
    }


def columns_of_fit(table: Any, names: Sequence[str | int]) -> dict[Any, np.ndarray]:
    """Returns the columns of a table; raises unless it has those of ``fit``."""
    columns = table_columns(table)
    missing = [repr(name) for name in names if name not in columns]
    if missing:
        raise ValueError(f"the table lacks columns of fit: {', '.join(missing)}. Add them.")
    if 0 in columns and len(columns) > len(names):
        raise ValueError(
            f"expected {len(names)} columns, as in fit, got {len(columns)}. Give the same columns, "
            "or name them: then other columns are ignored."
        )
    return columns


def categorical_columns(
    table: Mapping[Any, np.ndarray], categorical: Iterable[str | int] | None
) -> set[str | int]:
    """Returns the names of categorical columns: those that are named, or all columns of texts."""
    if categorical is None:
        return {name for name, values in table.items() if values.dtype.kind not in "biuf"}
    if isinstance(categorical, str):
        raise TypeError("categorical must be a list of names, got one text. Use [name].")
    chosen = set(categorical)
    unknown = sorted(map(repr, chosen - set(table)))
    if unknown:
        raise ValueError(
            f"categorical names columns that the table lacks: {', '.join(unknown)}. Choose from "
            f"{', '.join(map(repr, table))}."
        )
    return chosen


def is_dataset(inputs: Any) -> bool:
    """Returns whether inputs are a ``tf.data.Dataset``."""
    return hasattr(inputs, "as_numpy_iterator")


def column_names(inputs: Any) -> tuple[str, ...] | None:
    """Returns the column names of a table or a data set of tables; None for other inputs."""
    if is_dataset(inputs):
        spec = inputs.element_spec
        inputs = spec[0] if isinstance(spec, tuple) and spec else spec
    found = tuple(names_of(as_table(inputs)) or ())
    return found if found and all(isinstance(name, str) for name in found) else None


def input_parts(inputs: Any) -> list[Any]:
    """Returns the columns of a table, the parts of a tuple of arrays, or the inputs alone."""
    inputs = as_table(inputs)
    columns = columns_of(inputs)
    if columns is not None:
        return list(columns.values())
    if not _is_several(inputs):
        return [inputs]
    if all(np.ndim(part) == 1 for part in inputs):
        raise ValueError(
            f"expected an array, got a tuple of {len(inputs)} vectors, which may be rows or "
            "columns. Give np.stack(features) for rows, np.column_stack(features) for columns."
        )
    return list(inputs)


def as_rows(part: Any) -> Any:
    """Returns an input with indexable rows: an array, a CSR matrix, or a lazy source.

    A lazy source, an object with ``__len__`` and ``__getitem__`` of row numbers, stays as it is.
    """
    if _is_sparse(part):
        return part.tocsr()
    part = as_table(part)
    if is_frame(part) or is_structured(part):
        names_of(part)  # refuses equal names
        array = np.asarray(part)
        return array if array.dtype.kind in "biuf" else _side_by_side(_numeric_parts(part))
    if isinstance(part, (list, tuple)):
        part = np.asarray(part)
    elif hasattr(part, "to_numpy"):
        part = part.to_numpy()
    elif hasattr(part, "numpy"):  # a tensor
        part = part.numpy()
    is_source = hasattr(part, "__len__") and hasattr(part, "__getitem__")
    if not is_source or isinstance(part, (str, bytes, np.generic)):
        raise TypeError(
            "features must be an array, a list of rows, a table of columns, a sparse matrix, a "
            "dict or tuple of arrays, or an object with __len__ and __getitem__ of row numbers, "
            f"got {type(part).__name__}. A tf.data.Dataset can't be read by row number: give the "
            "arrays behind it."
        )
    if isinstance(part, np.ndarray) and part.ndim == 0:
        raise ValueError("features must have shape (n, ...), got one number.")
    return part


def network_inputs(inputs: Any, encoder: Any = None, model: Any = None) -> Any:
    """Returns features as a network takes them: a table as a ``float32`` matrix of its columns.

    With an encoder they are its outputs (n, d). For a model with a dict or list of inputs, a table
    becomes ``to_inputs(table, model)``. Features that are no table stay as they are; a dict is one
    input per entry.
    """
    table = as_table(inputs)
    if encoder is not None:
        return FeatureRows(table, encoder).array()
    if table is inputs and not is_frame(table) and not is_structured(table):
        return inputs
    if isinstance(getattr(model, "input", None), (Mapping, list, tuple)):
        return to_inputs(table, model)
    columns = table_columns(table)
    rows = as_matrix(columns)
    if not np.isfinite(rows).all():
        bad = [
            name
            for name, good in zip(columns, np.isfinite(rows).all(axis=0), strict=True)
            if not good
        ]
        raise ValueError(text_error(bad, "missing or infinite ones"))
    return rows


def take_rows(part: Any, rows: Any) -> Any:
    """Returns rows from a result of ``as_rows``; sparse rows become a dense array."""
    found = part[rows]
    return found.toarray() if _is_sparse(found) else found


def all_rows(part: Any) -> np.ndarray:
    """Returns all rows from a result of ``as_rows`` as a dense array."""
    if _is_sparse(part):
        return part.toarray()
    return np.asarray(part if hasattr(part, "__array__") else part[np.arange(len(part))])


def check_lengths(parts: list[Any]) -> int:
    """Returns the number of rows that all parts have."""
    lengths = sorted({np.shape(part)[0] if _is_sparse(part) else len(part) for part in parts})
    if len(lengths) > 1:
        raise ValueError(
            f"all parts of features need the same length, got lengths {lengths}. Give one row per "
            "example in each part."
        )
    if not lengths or lengths[0] == 0:
        raise ValueError(NO_ROWS)
    return int(lengths[0])


def check_numbers(dtype: Any) -> None:
    """Raises unless a dtype is numeric or boolean."""
    if np.dtype(dtype).kind not in "biuf":
        raise TypeError(
            f"features must be numbers, got dtype {dtype}. Encode text and categories first, for "
            "example with RandomFourierFeatures (encoder=) or keras.layers.StringLookup; "
            "PrivateClassifier encodes them itself."
        )


def checked_finite(rows: np.ndarray) -> np.ndarray:
    """Returns rows (n, d) unchanged; raises if a number is not finite."""
    step = max(1, _FINITE_CELLS // max(1, rows.shape[1]))
    # Sums of finite numbers may overflow, so each number is checked.
    bad = sum(
        int(np.count_nonzero(~np.isfinite(rows[start : start + step]).all(axis=1)))
        for start in range(0, rows.shape[0], step)
    )
    if bad:
        raise ValueError(
            f"features must be finite, but {bad} of {rows.shape[0]} rows hold NaN or infinity. "
            "Leave these examples out, or fill them in."
        )
    return rows


def map_parts(function: Callable[..., Any], *structures: Any) -> Any:
    """Returns a structure of dicts and tuples with the function applied to its leaves."""
    first = structures[0]
    if isinstance(first, Mapping):
        return {key: map_parts(function, *(part[key] for part in structures)) for key in first}
    if isinstance(first, tuple):
        parts = [map_parts(function, *part) for part in zip(*structures, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    return function(*structures)


def num_rows(structure: Any) -> int:
    """Returns the number of rows that all arrays in dicts and tuples have."""
    leaves: list[Any] = []
    map_parts(leaves.append, structure)
    return check_lengths(leaves)


def is_lazy(inputs: Any) -> bool:
    """Returns whether inputs are an object that gives its rows by their numbers alone."""
    if isinstance(inputs, (list, tuple, Mapping)) or not hasattr(inputs, "__getitem__"):
        return False
    return not hasattr(inputs, "shape") and not is_frame(inputs)


def rows_of(inputs: Any, places: np.ndarray) -> Any:
    """Returns rows of inputs in their own type, by their numbers."""
    if isinstance(inputs, (dict, tuple)):
        return map_parts(lambda part: np.asarray(part)[places], inputs)
    if is_lazy(inputs):
        return inputs[places]
    if hasattr(inputs, "column_names") and hasattr(inputs, "take"):  # a table of Arrow
        return inputs.take(places)
    return _safe_indexing(inputs, places)


def stacked(parts: list[Any]) -> Any:
    """Returns blocks of rows as one array or CSR matrix."""
    if len(parts) == 1:
        return parts[0]
    if not _is_sparse(parts[0]):
        return np.concatenate(parts)
    return sparse.vstack(parts, format="csr")


def collected(dataset: Any) -> Any:
    """Returns all inputs in a data set of batches x or (x, y), joined; labels are dropped."""
    refuse_endless(dataset)
    batches, digests = [], []
    for reading in range(2):
        digest = hashlib.sha256()
        for element in dataset.as_numpy_iterator():
            x, _ = _pair(element)
            add_to_digest(digest, x)
            if reading == 0:
                batches.append(x)
        digests.append(digest.digest())
    if not batches:
        raise ValueError(NO_ROWS)
    if digests[0] != digests[1]:
        raise ValueError(SHUFFLED)

    def joined(*parts: Any) -> np.ndarray:
        arrays = [np.atleast_1d(part) for part in parts]
        _check_widths(arrays)
        return np.concatenate(arrays)

    return map_parts(joined, *batches)


def _is_sparse(inputs: Any) -> bool:
    return sparse.issparse(inputs)


def _is_several(inputs: Any) -> bool:  # a tuple of arrays, not of rows
    return isinstance(inputs, tuple) and any(hasattr(part, "shape") for part in inputs)


def _check_columns(found: tuple[str, ...] | None, expected: Any) -> None:
    if found is None or expected is None or found == tuple(expected):
        return
    missing = [repr(name) for name in expected if name not in found]
    extra = [repr(name) for name in found if name not in expected]
    problems = [f"lack {', '.join(missing)}"] if missing else []
    problems += [f"have {', '.join(extra)}, which fit did not have"] if extra else []
    problem = " and ".join(problems) or "are in another order than in fit"
    raise ValueError(
        f"the columns of the features {problem}: expected {list(expected)}, got {list(found)}. "
        "Select the expected columns, in this order."
    )


def _check_widths(blocks: list[np.ndarray]) -> None:
    widths = [block.shape[1:] for block in blocks]
    if widths[0] != widths[-1]:
        first, last = (", ".join(map(str, shape)) for shape in (widths[0], widths[-1]))
        raise ValueError(f"all batches need the same number of features, got {first} and {last}.")


def check_encoder(encoder: Any) -> Any:
    """Returns an encoder; raises for an object that can't encode."""
    usable = callable(encoder) or hasattr(encoder, "transform") or hasattr(encoder, "predict")
    if encoder is None or (usable and not isinstance(encoder, type)):
        return encoder
    found = f"the class {encoder.__name__}" if isinstance(encoder, type) else repr(encoder)
    raise TypeError(
        "an encoder must be a fitted feature map, a Keras model or a function from raw inputs to "
        f"(m, d), got {found}."
    )


def encoded(inputs: Any, encoder: Any) -> Any:
    """Returns the encoder's outputs (m, d), numbers; they may be a CSR matrix."""
    if hasattr(encoder, "transform"):
        found = encoder.transform(inputs)
    elif hasattr(encoder, "predict_on_batch"):  # a Keras model
        with without_retracing_warnings():
            found = encoder.predict(inputs, batch_size=256, verbose=0)
    else:
        found = encoder(inputs) if callable(encoder) else encoder.predict(inputs)
    features = found.tocsr() if _is_sparse(found) else np.asarray(found)
    if features.dtype.name == "bfloat16":  # NumPy does not know it as a number.
        features = features.astype(np.float32)
    if features.ndim != 2 or features.shape[1] == 0 or features.dtype.kind not in "biuf":
        raise ValueError(
            "the encoder must return numbers of shape (m, d), got an array of shape "
            f"{features.shape} and dtype {features.dtype}. {_POOL.get(features.ndim, _FLATTEN)}"
        )
    has_rows = isinstance(inputs, (np.ndarray, list)) or is_frame(inputs)
    if has_rows and features.shape[0] != len(inputs):
        hint = f"Give it a column, table[{names_of(inputs)[0]!r}]." if is_frame(inputs) else _EACH
        raise ValueError(
            f"the encoder must return {len(inputs)} rows (d,), one per example, got "
            f"{features.shape[0]}. {hint}"
        )
    return features


def _features_of(inputs: Any, encoder: Any, flatten: bool = False) -> Any:
    """Returns the encoder's outputs (m, d), or the inputs; these may stay a CSR matrix."""
    if encoder is None:
        return _as_matrix(inputs, flatten)
    features = encoded(inputs, encoder)
    return features.toarray() if _is_sparse(features) else features


def _as_matrix(inputs: Any, flatten: bool) -> Any:
    """Returns numbers (n, d): an array, copied only if needed, or a CSR matrix."""
    if isinstance(inputs, Mapping) or _is_several(inputs):
        rows = _side_by_side(_numeric_parts(inputs))
    else:
        rows = as_rows(inputs)
        rows = rows if _is_sparse(rows) else all_rows(rows)
        if flatten and rows.ndim > 2:
            rows = rows.reshape(rows.shape[0], -1)
    if rows.ndim != 2 or rows.shape[1] == 0:
        hint = (
            "Flatten images with .reshape(len(x), -1), or pass an encoder that maps them to "
            "features."
            if rows.ndim > 2
            else RESHAPE
        )
        raise ValueError(f"features must have shape (n, d), got {rows.shape}. {hint}")
    if rows.dtype.kind == "O":
        rows = _objects_as_numbers(rows)
    check_numbers(rows.dtype)
    return rows


def _numeric_parts(inputs: Any) -> list[Any]:
    """Returns ``input_parts``; raises if a column is of texts."""
    columns = columns_of(inputs) or {}
    if texts := [name for name, values in columns.items() if values.dtype.kind not in "biuf"]:
        raise TypeError(text_error(texts))
    return list(columns.values()) or input_parts(inputs)


def _objects_as_numbers(rows: np.ndarray) -> np.ndarray:
    """Returns numbers, if there are no texts among the objects."""
    if any(isinstance(entry, (str, bytes)) for entry in rows.flat):
        return rows
    try:
        return rows.astype(np.float64)
    except TypeError as error:
        raise TypeError(f"features must be numbers: {error}. Convert them.") from None


def _side_by_side(parts: list[Any]) -> np.ndarray:
    """Returns an array of the parts side by side; a vector becomes a column."""
    arrays = [all_rows(as_rows(part)) for part in parts]
    size = check_lengths(arrays)
    return np.concatenate([np.reshape(array, (size, -1)) for array in arrays], axis=1)


def _pair(element: Any) -> tuple[Any, Any]:
    if not isinstance(element, tuple):
        return element, None
    if len(element) > 2:
        raise ValueError(f"a data set must give batches x or (x, y), got {len(element)} parts.")
    return element if len(element) == 2 else (element[0], None)


def refuse_endless(dataset: Any) -> None:
    """Raises if a data set never ends."""
    if int(dataset.cardinality()) == -1:
        raise ValueError("the data set is endless. Leave out .repeat(), or add .take(steps).")


def add_to_digest(digest: Any, x: Any) -> None:
    """Adds an element of a data set: types, shapes of rows and contents, in any structure."""
    if isinstance(x, (Mapping, tuple)):
        for part in (x[name] for name in sorted(x)) if isinstance(x, Mapping) else x:
            add_to_digest(digest, part)
        return
    part = np.asarray(x)
    digest.update(f"{part.dtype.str}{part.shape[1:]}".encode())
    content = repr(part.tolist()).encode() if part.dtype.kind == "O" else None
    digest.update(np.ascontiguousarray(part).data if content is None else content)
