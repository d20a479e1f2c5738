"""``FeatureRows``, the one reader of public inputs: it checks them and returns numbers."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.utils import _safe_indexing

from tf_labeldp import _checks, _validate
from tf_labeldp._columns import Column
from tf_labeldp._progress import without_retracing_warnings
from tf_labeldp.accounting import Public, PublicInput, Receipt, Setting, public_input
from tf_labeldp.features._containers import (
    ArrayConvertible,
    ArrowTable,
    Dataset,
    Frame,
    Indexed,
    IndexedSource,
    KerasModel,
    Series,
    Shaped,
    Tensor,
)
from tf_labeldp.features._row_digests import row_digests
from tf_labeldp.features.estimator import NO_ROWS, RESHAPE, FeatureMap
from tf_labeldp.features.tables import (
    as_matrix,
    as_table,
    column_values,
    columns_of,
    is_structured,
    names_of,
    symbolic_inputs,
    text_error,
    to_inputs,
    with_text_names,
)

_BLOCK_BYTES = 1 << 26
"""Bytes per block in double precision: large enough for fast matrix products."""
_ROWS_TOGETHER = 2048
"""Longer blocks have a multiple of these rows, which heads sum together."""
_ENCODED_ROWS = 4096
"""Rows per call of an encoder."""
_MOST_SPARSE_COLUMNS = 20_000
"""The most columns of a sparse matrix that is read as a table, or whose covariance is computed."""
_CHECKED_COLUMNS, _CHECKED_CELLS = 256, 1 << 20
"""The most columns, and cells of them together, that checks of columns read."""
_FEWEST_PIXELS = 64
"""The least numbers in a row whose range is compared with that of fit: a small image."""
_CHECKED_ROWS, _PREDICTED_ROWS = 100_000, 4096
"""The most rows that checks of columns read, and whose predictions show what a model reads."""
_COPIES = "whether a column is a copy of the label"
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
"""The advice for an encoder whose outputs have more axes, by their number."""
_EACH = "Return one row for each row of the inputs."


_SHUFFLED = (
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
        weights: weights (n,) of the rows, at least zero; None for equal ones.

    Attributes:
        raw_inputs: the inputs as they were given.
        columns: the column names of a table; None for other inputs.
        is_encoded: whether there is an encoder.
        is_dataset: whether the inputs are a ``tf.data.Dataset``.

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
        weights: Public[Any] = None,
    ) -> None:
        self._public, self.raw_inputs = (inputs, encoder, weights), PublicInput.bare(inputs)
        _checks.run("inputs", self.raw_inputs)
        self._inputs, self._encoder = (
            as_table(self.raw_inputs),
            check_encoder(PublicInput.bare(encoder)),
        )
        if self._encoder is None or FeatureMap.is_own(self._encoder):
            # An encoder of another library gets its own columns.
            self._inputs = with_text_names(self._inputs)
        self.is_encoded = self._encoder is not None
        self.is_dataset = isinstance(self._inputs, Dataset)
        self._flatten, self._max_bytes = flatten, max_bytes
        self._digest: str | None = None  # set by the first reading of a data set
        self.columns = _text_names(self._inputs)
        # A fitted map checks its own columns, and the columns of a dict are found by name.
        by_name = finds_columns(self._encoder) or isinstance(self._inputs, Mapping)
        if self._encoder is None or not by_name:
            _check_columns(self.columns, columns)

    @property
    def receipts(self) -> tuple[Receipt, ...]:
        """The receipts of inputs, encoder and weights."""
        return public_input(*self._public).receipts

    @property
    def num_rows(self) -> int | None:
        """n; None for a data set, whose rows are counted on reading."""
        return None if self.is_dataset else len(self)

    @functools.cached_property
    def weights(self) -> np.ndarray | None:
        """The weights (n,) of the rows, with mean one; None for equal ones."""
        return Column.relative_weights(PublicInput.bare(self._public[2]), self.num_rows)

    @property
    def num_inputs(self) -> int:
        """The number of rows that all arrays of the raw inputs have; encodes nothing."""
        leaves: list[Any] = []
        map_parts(leaves.append, self._inputs)
        return check_lengths(leaves)

    def joined(self) -> Any:
        """Returns the raw inputs; the batches x of a data set are read twice, and joined."""
        if not self.is_dataset:
            return self._inputs
        batches = [x for x, _ in self.elements()]
        for _ in self.elements():  # A second reading finds a shuffle.
            pass
        if not batches:
            raise ValueError(NO_ROWS)

        def joined(*parts: Any) -> np.ndarray:
            arrays = [np.atleast_1d(part) for part in parts]
            _check_widths(arrays)
            return np.concatenate(arrays)

        return map_parts(joined, *batches)

    def width(self, otherwise: Setting[int]) -> int:
        """Returns the numbers in a row of an array (n, ...); another width for other inputs."""
        shape = self._inputs.shape if isinstance(self._inputs, (Shaped, Frame)) else ()
        return math.prod(shape[1:]) if len(shape) > 1 else otherwise

    def arrays(self) -> Any:
        """Returns the raw inputs as arrays, in their dicts and tuples; sparse ones become dense."""

        def whole(part: Any) -> np.ndarray:
            if sparse.issparse(part):
                check_columns_of_sparse(part)
            return dense(part)

        return map_parts(whole, self._inputs)

    def network_arrays(self, model: Setting[Any] = None) -> Any:
        """Returns ``network_inputs`` as arrays, also in a list of several inputs."""
        inputs = self.network_inputs(model)
        if isinstance(inputs, list):
            return [FeatureRows(part).arrays() for part in inputs]
        return FeatureRows(inputs).arrays()

    def raw(self, places: Setting[np.ndarray]) -> Any:
        """Returns rows of the raw inputs in their own type, by their numbers."""
        if isinstance(self._inputs, (dict, tuple)):
            return map_parts(lambda part: np.asarray(part)[places], self._inputs)
        if is_indexed_source(self._inputs):
            return self._inputs[places]
        if isinstance(self._inputs, ArrowTable):
            return self._inputs.take(places)
        return _safe_indexing(self._inputs, places)

    def parts(self, function: Setting[Callable[[Any], Any]]) -> Any:
        """Returns a function's results for arrays, CSR matrices and indexed sources.

        They are in the dicts and tuples of the inputs.
        """
        return map_parts(lambda part: function(indexable(part)), self._inputs)

    def by_number(self) -> Any:
        """Returns the raw inputs as parts that are read by row number, in their dicts and tuples.

        A part has ``len``, ``take(rows)``, ``first``, ``whole()``, ``check_dtype()``, and
        ``array``, which is None unless the part is an array.
        """
        return map_parts(lambda part: _IndexedPart(_indexed(indexable(part))), self._inputs)

    def table(self, names: Setting[Sequence[str | int] | None] = None) -> dict[Any, np.ndarray]:
        """Returns columns (n,) by name; by place for an array (n, p) or a sparse matrix.

        They are numbers, NaN where missing, or texts, empty where missing. ``names`` are those of
        ``fit``, which the table must have.
        """
        columns = _table_columns(self.joined())
        if names is None:
            return columns
        missing = [repr(name) for name in names if name not in columns]
        if missing:
            raise ValueError(f"the table lacks columns of fit: {', '.join(missing)}. Add them.")
        if 0 in columns and len(columns) > len(names):
            raise ValueError(
                f"expected {len(names)} columns, as in fit, got {len(columns)}. Give the same "
                "columns, or name them: then other columns are ignored."
            )
        return columns

    def check_columns(self, are_plain: bool = False) -> None:
        """Warns of columns that are ids, or numbers as texts, and of channels that are first.

        Of columns that are the features, it warns of numbers that are far from all others, too.
        """
        if isinstance(self._inputs, np.ndarray):
            _checks.run("images", self._inputs.shape)
        if (found := self._some_rows(_CHECKED_ROWS)) is not None:
            _, columns = found
            step = -(-self.num_inputs // len(next(iter(columns.values()))))
            _checks.run("columns", columns, step)
            if are_plain:
                _checks.run("plain numbers", columns)

    def ends(self) -> tuple[float, float, bool] | None:
        """Returns the least and the largest number, and whether all are whole.

        It is None for other inputs than arrays of images, or of as many numbers.
        """
        inputs = self._inputs
        is_array = isinstance(inputs, np.ndarray) and inputs.dtype.kind in "iuf"
        width = math.prod(inputs.shape[1:]) if is_array else 0
        if width < _FEWEST_PIXELS or not len(inputs):
            return None
        some = _spaced(inputs, max(1, _CHECKED_CELLS // width))
        is_whole = some.dtype.kind != "f" or bool(np.all(some == np.round(some)))
        return float(some.min()), float(some.max()), is_whole

    def check_model(
        self, outputs_of: Setting[Callable[[Any], Any]], ends: Setting[tuple[float, float] | None]
    ) -> None:
        """Warns of columns from which alone a released model predicts nearly all labels.

        Args:
            outputs_of: from raw rows to the model's probabilities (m, K), or numbers (m,).
            ends: the range of labels that are numbers; None for classes.
        """
        with _validate.after_release(_COPIES):
            if (found := self._some_rows(_PREDICTED_ROWS)) is not None:
                rows, columns = found
                _checks.run("model", columns, np.asarray(outputs_of(rows), np.float64), ends)

    def check_draw(self, noisy: Public[Any], rows: Setting[Any]) -> None:
        """Warns of columns that alone predict nearly all of the ``NoisyLabels`` of some rows."""
        # Residuals and rows of labels are no classes, and priors change the channel by example.
        if noisy.values.ndim != 1 or noisy.channel is None:
            return
        with _validate.after_release(_COPIES):
            if (found := self._some_rows(_CHECKED_ROWS, rows)) is not None:
                values = _spaced(noisy.values, len(next(iter(found[1].values()))))
                _checks.run("draw", found[1], values, noisy.channel)

    def _some_rows(self, most: int, among: Any = slice(None)) -> tuple[Any, Any] | None:
        """Returns evenly spaced raw rows among some, and their columns by name.

        It is None for inputs without columns: images, data sets, sparse rows, and rows of many
        numbers.
        """
        inputs = self._inputs
        if isinstance(inputs, np.ndarray) and not is_structured(inputs):
            names: Any = range(inputs.shape[1]) if inputs.ndim == 2 else ()
        elif isinstance(inputs, Mapping):
            names = inputs if all(np.ndim(part) == 1 for part in inputs.values()) else ()
        else:
            names = names_of(inputs) or ()
        if not 0 < len(names) <= _CHECKED_COLUMNS:
            return None
        rows = np.arange(self.num_inputs)[among]
        rows = self.raw(_spaced(rows, min(most, _CHECKED_CELLS // len(names))))
        return rows, FeatureRows(rows).table()

    def network_inputs(self, model: Setting[Any] = None) -> Any:
        """Returns the inputs as a network takes them: a table as a ``float32`` matrix of columns.

        With an encoder they are its outputs (n, d). For a model with a dict or list of inputs, or
        with an input of texts, a table becomes ``to_inputs(table, model)``. Inputs that are no
        table stay as they are; a dict is one input per entry.
        """
        if self.is_encoded:
            return self.array()
        is_table = isinstance(self._inputs, Frame) or is_structured(self._inputs)
        inputs = symbolic_inputs(model)
        takes_several = isinstance(inputs, (Mapping, list, tuple))
        if isinstance(self._inputs, list) and inputs is not None and not takes_several:
            return Column.stacked_rows(self._inputs)  # rows, not the inputs of a model
        if not is_table and not isinstance(self._inputs, Mapping):
            return self._inputs
        if self._inputs is self.raw_inputs and not is_table:
            return self.raw_inputs
        if inputs is not None and (takes_several or inputs.dtype == "string"):
            return to_inputs(self._inputs, model)
        columns = self.table()
        rows = as_matrix(columns)
        if not np.isfinite(rows).all():
            are_finite = np.isfinite(rows).all(axis=0)
            bad = [name for name, good in zip(columns, are_finite, strict=True) if not good]
            raise ValueError(text_error(bad, "missing or infinite ones"))
        return rows

    def digests(self) -> np.ndarray | None:
        """Returns a keyed digest of each raw row, ``uint64`` (n, 1); None without rows to read."""
        try:
            parts = [in_memory(part) for part in parts_of(self._inputs)]
        except (TypeError, ValueError):
            return None
        return row_digests(parts)

    @functools.cached_property
    def _source(self) -> tuple[Any, Any]:
        """Inputs that are read by row number, and their encoder; None if they are features."""
        inputs = self.joined()
        is_map = isinstance(self._encoder, FeatureMap)
        if is_map and (kept := self._encoder._kept_features(inputs)) is not None:
            return kept, None
        is_plain = isinstance(inputs, np.ndarray) and not inputs.dtype.names and inputs.ndim > 0
        if is_plain and self._encoder is not None:
            return inputs, self._encoder
        if is_map and self._encoder._reads_columns and names_of(inputs) is not None:
            return _Columns(_table_columns(inputs)), self._encoder
        return _features_of(inputs, self._encoder, self._flatten), None

    def __len__(self) -> int:
        return int(self._source[0].shape[0])

    def held(self) -> np.ndarray | None:
        """Returns all rows (n, d) if they lie in memory as one array, without a copy."""
        if self.is_dataset:
            return None
        source, encoder = self._source
        return source if encoder is None and isinstance(source, np.ndarray) else None

    def take(self, rows: Setting[Any]) -> np.ndarray:
        """Returns rows (m, d) by a slice or by their numbers."""
        source, encoder = self._source
        block = source[rows]
        return dense(block) if encoder is None else _features_of(block, encoder)

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
        if self.is_dataset:
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
        waiting: list[np.ndarray] = []
        is_empty = True
        for x, y in self.elements():
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

    def elements(self) -> Iterator[tuple[Any, Any]]:
        """Yields x and y or None of each batch of a data set.

        Raises:
            ValueError: the data set is endless, or an earlier reading gave other rows.
        """
        refuse_endless(self._inputs)
        digest = hashlib.sha256()
        for element in self._inputs.as_numpy_iterator():
            x, y = _pair(element)
            _add_to_digest(digest, x)
            yield x, y
        self._digest = self._digest or digest.hexdigest()
        if digest.hexdigest() != self._digest:
            raise ValueError(_SHUFFLED)


class _Columns:
    """The columns (n,) of a table, of which rows are taken as dicts of columns."""

    def __init__(self, columns: dict[Any, np.ndarray]) -> None:
        self._columns = columns
        self.shape = next(iter(columns.values())).shape

    def __getitem__(self, rows: Any) -> dict[Any, np.ndarray]:
        return {name: values[rows] for name, values in self._columns.items()}


def _spaced(rows: np.ndarray, most: int) -> np.ndarray:
    """Returns at most some rows, evenly spaced."""
    return rows[:: max(1, -(-len(rows) // max(1, most)))]


def _table_columns(table: Any) -> dict[Any, np.ndarray]:
    columns = columns_of(table)
    if columns is None:
        matrix: Any = _side_by_side(parts_of(table)) if _is_several(table) else table
        if sparse.issparse(matrix):
            check_columns_of_sparse(matrix)
        matrix = dense(matrix)
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


def hashed_columns(columns: Iterable[Any]) -> dict[Any, int]:
    """Returns the number of categories of each encoded column that is hashed, by name."""
    return {
        column.name: column.num_categories for column in columns if getattr(column, "buckets", None)
    }


def categorical_columns(
    table: Mapping[Any, np.ndarray], categorical: Iterable[str | int] | None
) -> set[str | int]:
    """Returns the names of categorical columns: those that are named, or all columns of texts."""
    if categorical is None:
        return {name for name, values in table.items() if values.dtype.kind not in "biuf"}
    if isinstance(categorical, str):
        raise TypeError("categorical must be a list of names, got one text. Use [name].")
    chosen = {name if name in table else str(name) for name in categorical}
    unknown = sorted(map(repr, chosen - set(table)))
    if unknown:
        raise ValueError(
            f"categorical names columns that the table lacks: {', '.join(unknown)}. Choose from "
            f"{', '.join(map(repr, table))}."
        )
    return chosen


def _text_names(inputs: Any) -> tuple[str, ...] | None:
    """Returns the column names of a table or a data set of tables; None for other inputs."""
    if isinstance(inputs, Dataset):
        spec = inputs.element_spec
        inputs = spec[0] if isinstance(spec, tuple) and spec else spec
    found = tuple(names_of(inputs) or ())
    return found if found and all(isinstance(name, str) for name in found) else None


def parts_of(inputs: Any) -> list[Any]:
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


def indexable(part: Any) -> Any:
    """Returns an input that is read by row number: an array, a CSR matrix, or an indexed source.

    A source, an object with ``__len__`` and ``__getitem__`` of row numbers, stays as it is.
    """
    if sparse.issparse(part):
        return part.tocsr()
    part = as_table(part)
    if isinstance(part, Frame) or is_structured(part):
        names_of(part)  # refuses equal names
        array = np.asarray(part)
        return array if array.dtype.kind in "biuf" else _side_by_side(_numeric_parts(part))
    if isinstance(part, (list, tuple)):
        part = Column.stacked_rows(part)
    elif isinstance(part, (Series, Tensor)):
        part = np.asarray(part)
    if not isinstance(part, IndexedSource) or isinstance(part, (str, bytes, np.generic)):
        raise TypeError(
            "features must be an array, a list of rows, a table of columns, a sparse matrix, a "
            "dict or tuple of arrays, or an object with __len__ and __getitem__ of row numbers, "
            f"got {type(part).__name__}. A tf.data.Dataset can't be read by row number: give the "
            "arrays behind it."
        )
    if isinstance(part, np.ndarray) and part.ndim == 0:
        raise ValueError("features must have shape (n, ...), got one number.")
    return part


def in_memory(part: Any) -> Any:
    """Returns all rows of an input as an array or a CSR matrix; an indexed source is read."""
    rows = indexable(part)
    if sparse.issparse(rows):
        return rows
    return np.asarray(rows if isinstance(rows, ArrayConvertible) else rows[np.arange(len(rows))])


def dense(rows: Any) -> np.ndarray:
    """Returns rows in memory as an array, also those of a sparse matrix."""
    return rows.toarray() if sparse.issparse(rows) else np.asarray(rows)


class _IndexedPart:
    """An array, a CSR matrix or a row source, whose rows are read by their numbers."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows
        self.array = rows if isinstance(rows, np.ndarray) else None

    def __len__(self) -> int:
        return check_lengths([self._rows])

    @functools.cached_property
    def first(self) -> Any:
        """Row 0, as ``take`` returns it."""
        return self.take(np.zeros(1, np.int64))

    def take(self, rows: np.ndarray) -> Any:
        """Returns rows as an array (m, ...), or as a source's structure of such arrays."""

        def checked(rows_read: Any) -> np.ndarray:
            array = dense(rows_read)
            if array.shape[:1] != rows.shape:
                raise ValueError(
                    f"expected source[rows] to return {rows.size} rows, got shape {array.shape}. "
                    "Return one row for each row number."
                )
            return array

        return map_parts(checked, self._rows[rows])

    def whole(self) -> np.ndarray:
        """Returns all rows as an array; a source is read into memory."""
        return dense(in_memory(self._rows))

    def check_dtype(self) -> None:
        """Raises unless the rows are numbers, or texts, which some models take."""

        def check(array: Any) -> None:
            if not _is_of_texts(array):
                check_numbers(array.dtype)

        map_parts(check, self.first if self.array is None else self.array)


class _OneByOne:
    """Reads several rows of a source that takes one integer, such as those of Grain."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, rows: np.ndarray) -> Any:
        examples = [self._source[int(row)] for row in rows]
        return map_parts(lambda *parts: np.stack(list(map(np.asarray, parts))), *examples)


def _indexed(part: Any) -> Any:
    """Returns an array, a CSR matrix, or a source that takes an array of row numbers."""
    if isinstance(part, np.ndarray) or sparse.issparse(part) or len(part) == 0:
        return part
    one_by_one = _OneByOne(part)
    # Grain would pass an array of numbers on to the functions of one example.
    if any(base.__module__.partition(".")[0] == "grain" for base in type(part).__mro__):
        return one_by_one
    some = np.arange(min(2, len(part)))
    try:
        part[some]
    except Exception:
        try:
            one_by_one[some]
        except Exception:
            # Reading it raises the error for an array of row numbers, the way that is documented.
            return part
        return one_by_one
    return part


def check_lengths(parts: list[Any]) -> int:
    """Returns the number of rows that all parts have."""
    lengths = sorted({np.shape(part)[0] if sparse.issparse(part) else len(part) for part in parts})
    if len(lengths) > 1:
        raise ValueError(
            f"all parts of features need the same length, got lengths {lengths}. Give one row per "
            "example in each part."
        )
    if not lengths or lengths[0] == 0:
        raise ValueError(NO_ROWS)
    return int(lengths[0])


def _is_of_texts(array: Any) -> bool:
    if array.dtype.kind != "O":
        return array.dtype.kind in "US"
    return all(isinstance(entry, (str, bytes)) for entry in array.ravel())


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
        return tuple(parts) if type(first) is tuple else type(first)(*parts)  # a named tuple
    return function(*structures)


def is_indexed_source(inputs: Any) -> bool:
    """Returns whether inputs are an object that gives its rows by their numbers alone."""
    containers = (list, tuple, Mapping, Shaped, Frame)
    return isinstance(inputs, Indexed) and not isinstance(inputs, containers)


def stacked(parts: list[Any]) -> Any:
    """Returns blocks of rows as one array or CSR matrix."""
    if len(parts) == 1:
        return parts[0]
    if not sparse.issparse(parts[0]):
        return np.concatenate(parts)
    return sparse.vstack(parts, format="csr")


def _is_several(inputs: Any) -> bool:  # a tuple of arrays, not of rows
    return isinstance(inputs, tuple) and any(isinstance(part, Shaped) for part in inputs)


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


def finds_columns(encoder: Any) -> bool:
    """Returns whether an encoder checks the columns of a table itself, as transformers do."""
    if isinstance(encoder, FeatureMap):
        return bool(encoder.finds_columns)
    return hasattr(encoder, "transform")  # which a pipeline has by its last step


def function_of(encoder: Any) -> Any:
    """Returns an encoder's function from inputs to outputs; None if it can't encode."""
    if isinstance(encoder, type):
        return None
    if finds_columns(encoder) or isinstance(encoder, FeatureMap):
        return encoder.transform
    if isinstance(encoder, KerasModel):
        return functools.partial(encoder.predict, batch_size=256, verbose=0)
    return encoder if callable(encoder) else getattr(encoder, "predict", None)


def check_encoder(encoder: Any) -> Any:
    """Returns an encoder; raises for an object that can't encode."""
    if encoder is None or function_of(encoder) is not None:
        return encoder
    found = f"the class {encoder.__name__}" if isinstance(encoder, type) else repr(encoder)
    raise TypeError(
        "an encoder must be a fitted feature map, a Keras model or a function from raw inputs to "
        f"(m, d), got {found}."
    )


def encoded(inputs: Any, function: Callable[[Any], Any]) -> Any:
    """Returns an encoder's outputs (m, d), numbers; they may be a CSR matrix."""
    with without_retracing_warnings():
        found = function(inputs)
    features = found.tocsr() if sparse.issparse(found) else np.asarray(found)
    if features.dtype.name == "bfloat16":  # NumPy does not know it as a number.
        features = features.astype(np.float32)
    if features.ndim != 2 or features.shape[1] == 0 or features.dtype.kind not in "biuf":
        raise ValueError(
            "the encoder must return numbers of shape (m, d), got an array of shape "
            f"{features.shape} and dtype {features.dtype}. {_POOL.get(features.ndim, _FLATTEN)}"
        )
    is_frame = isinstance(inputs, Frame)
    has_rows = isinstance(inputs, (np.ndarray, list)) or is_frame
    if has_rows and features.shape[0] != len(inputs):
        hint = f"Give it a column, table[{names_of(inputs)[0]!r}]." if is_frame else _EACH
        raise ValueError(
            f"the encoder must return {len(inputs)} rows (d,), one per example, got "
            f"{features.shape[0]}. {hint}"
        )
    return features


def _features_of(inputs: Any, encoder: Any, flatten: bool = False) -> Any:
    """Returns the encoder's outputs (m, d), or the inputs; these may stay a CSR matrix."""
    if encoder is None:
        return _numeric_rows(inputs, flatten)
    return dense(encoded(inputs, function_of(encoder)))


def _numeric_rows(inputs: Any, flatten: bool) -> Any:
    """Returns numbers (n, d): an array, copied only if needed, or a CSR matrix."""
    if isinstance(inputs, Mapping) or _is_several(inputs):
        rows = _side_by_side(_numeric_parts(inputs))
    else:
        rows = in_memory(inputs)
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
    """Returns ``parts_of``; raises if a column is of texts."""
    columns = columns_of(inputs) or {}
    if texts := [name for name, values in columns.items() if values.dtype.kind not in "biuf"]:
        raise TypeError(text_error(texts))
    return list(columns.values()) or parts_of(inputs)


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
    arrays = [dense(in_memory(part)) for part in parts]
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


def _add_to_digest(digest: Any, x: Any) -> None:
    """Adds an element of a data set: types, shapes of rows and contents, in any structure."""
    if isinstance(x, (Mapping, tuple)):
        for part in (x[name] for name in sorted(x)) if isinstance(x, Mapping) else x:
            _add_to_digest(digest, part)
        return
    part = np.asarray(x)
    digest.update(f"{part.dtype.str}{part.shape[1:]}".encode())
    content = repr(part.tolist()).encode() if part.dtype.kind == "O" else None
    digest.update(np.ascontiguousarray(part).data if content is None else content)
