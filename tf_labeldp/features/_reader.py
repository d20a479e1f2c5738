"""The one reader of public inputs: which kinds there are, how they become rows, what is refused.

Inputs are arrays, lists of rows, sparse matrices, tables (dicts of columns, structured arrays, data
frames), tuples of arrays, and ``tf.data`` data sets of batches of these; with an encoder in front
where there is one. Labels of a data set of pairs are handed on to who asks for them, or dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tf_labeldp.accounting._public_input import bare

_BLOCK_BYTES = 1 << 26
_ENCODED_ROWS = 4096
"""Rows that an encoder is given at a time."""
_FINITE_CELLS = 1 << 24
NO_ROWS = "features hold no rows; give at least one."
SHUFFLED = (
    "the data set gave other rows, or the same in another order, when it was read again. It must "
    "not be shuffled: leave out .shuffle(), or pass reshuffle_each_iteration=False with a seed; "
    "augment nothing."
)


class Rows:
    """Public inputs as rows of numbers (n, d), which are encoded when they are read.

    Args:
        inputs: of any kind that this module names; or whatever the encoder takes.
        encoder: a fitted map with ``transform``, a Keras model, a callable, or an object with
            ``predict``; None if the inputs are features. It gets arrays in blocks, and anything
            else whole.
        columns: the names of the columns that ``fit`` saw, if there were any.
        flatten: whether rows of more dimensions are flattened, and not refused.

    Attributes:
        columns: names of the columns of a table, else None.
        encoder: what encodes rows when they are read; None where they are encoded already.
    """

    def __init__(
        self, inputs: Any, encoder: Any = None, *, columns: Any = None, flatten: bool = False
    ) -> None:
        inputs, encoder = bare(inputs), _checked_encoder(encoder)
        self.columns = column_names(inputs)
        # A fitted map knows its columns, and a dict's are asked for by name.
        if encoder is None or not (hasattr(encoder, "transform") or isinstance(inputs, Mapping)):
            _check_columns(self.columns, columns)
        if is_dataset(inputs):
            inputs = collected(inputs)
        is_plain = isinstance(inputs, np.ndarray) and not inputs.dtype.names and inputs.ndim > 0
        self.encoder = encoder if is_plain else None
        self._rows = inputs if self.encoder is not None else _features_of(inputs, encoder, flatten)

    def __len__(self) -> int:
        return int(self._rows.shape[0])

    def take(self, rows: Any) -> np.ndarray:
        """Returns some rows (m, d), by a slice or their numbers."""
        block = take_rows(self._rows, rows)
        return block if self.encoder is None else _features_of(block, self.encoder)

    def array(self) -> np.ndarray:
        """Returns all rows (n, d), finite ones; raises if there are none."""
        if len(self) == 0:
            raise ValueError(NO_ROWS)
        step = len(self) if self.encoder is None else _ENCODED_ROWS
        parts = [self.take(slice(at, at + step)) for at in range(0, len(self), step)]
        return checked_finite(parts[0] if len(parts) == 1 else np.concatenate(parts))


class FeatureSource:
    """Rows of features that can be read again and again in the same order, also of a data set.

    Args:
        source: as for ``Rows``; a data set has batches x or (x, y), the same whenever it is read.
        encoder: as for ``Rows``.
        max_bytes: the most memory for features of an encoder that are kept; if they are larger,
            the encoder is asked again on each reading.

    Attributes:
        num_rows: n, or None for a data set, which has to be read for it.
        columns: names of the columns of a table, else None.
        is_encoded: whether an encoder makes the features.
    """

    def __init__(self, source: Any, encoder: Any = None, max_bytes: float = 2e9) -> None:
        source, encoder = bare(source), _checked_encoder(encoder)
        self._source, self._encoder = source, encoder
        self.is_encoded = encoder is not None
        self.num_rows: int | None = None
        if is_dataset(source):
            _refuse_endless(source)
            self.columns = column_names(source)
            return
        self._rows = Rows(source, encoder)
        self.columns = self._rows.columns
        self.num_rows = len(self._rows)
        if self.num_rows == 0:
            raise ValueError(NO_ROWS)
        width = self._rows.take(slice(0, 1)).shape[1]
        self._step = _block_rows(width)
        if self._rows.encoder is None:
            return
        if 4.0 * width * self.num_rows > max_bytes:
            self._step = _ENCODED_ROWS
            return
        kept = np.empty((self.num_rows, width), np.float32)
        for start in range(0, self.num_rows, self._step):
            kept[start : start + self._step] = self._rows.take(slice(start, start + self._step))
        self._rows = Rows(kept)

    def blocks(self, see: Callable[[Any, Any], None] | None = None) -> Iterator[np.ndarray]:
        """Yields rows of features (m, d), in blocks of a size that suits matrix products.

        Args:
            see: called with what was given, before any encoder, and its labels or None: a data set
                batch after batch, anything else as a whole.
        """
        if self.num_rows is None:
            yield from self._joined_batches(see)
            return
        if see is not None:
            see(self._source, None)
        for start in range(0, self.num_rows, self._step):
            block = self._rows.take(slice(start, start + self._step))
            yield block if self._rows.encoder is None else block.astype(np.float32)

    def _joined_batches(self, see: Callable[[Any, Any], None] | None) -> Iterator[np.ndarray]:
        waiting: list[np.ndarray] = []
        for element in self._source.as_numpy_iterator():
            x, y = _pair(element)
            rows = _features_of(x, self._encoder)
            if y is not None and np.shape(y)[:1] != rows.shape[:1]:
                raise ValueError("a batch has another number of labels than of rows.")
            if see is not None:
                see(x, y)
            if not rows.shape[0]:
                continue
            waiting.append(rows)
            _check_widths(waiting)
            if sum(map(len, waiting)) >= _block_rows(rows.shape[1]):
                yield np.concatenate(waiting) if len(waiting) > 1 else rows
                waiting = []
        if waiting:
            yield np.concatenate(waiting)


class Table(Mapping[Any, np.ndarray]):
    """The columns (n,) of a table by name, or by place for an array (n, p) or a sparse matrix.

    Args:
        table: a table, an array or a sparse matrix, or a data set of batches of one.

    Raises:
        TypeError: none of these.
        ValueError: no column, or columns of different lengths.
    """

    def __init__(self, table: Any) -> None:
        if is_dataset(table):
            table = collected(table)
        self._columns = _columns_of(table)
        self._matrix: Any = None
        if self._columns is None:
            if _is_several(table):
                table = _side_by_side(parts_of(table))
            self._matrix = table.tocsc() if _is_sparse(table) else np.asarray(table)
            if self._matrix.ndim != 2:
                raise TypeError(
                    "a table must be a dict of columns, a structured array, a data frame, an array "
                    f"(n, p) or a sparse matrix, got {type(table).__name__} of shape "
                    f"{self._matrix.shape}."
                )
        if len(self) == 0:
            raise ValueError("the table has no columns; give at least one.")
        shapes = {values.shape for values in (self._columns or {}).values()}
        if len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
            raise ValueError(
                f"the columns of a table must all have shape (n,), got shapes {sorted(shapes)}."
            )

    @property
    def num_rows(self) -> int:
        """n."""
        if self._columns is None:
            return int(self._matrix.shape[0])
        return int(next(iter(self._columns.values())).size)

    def __len__(self) -> int:
        return self._matrix.shape[1] if self._columns is None else len(self._columns)

    def __iter__(self) -> Iterator[Any]:
        return iter(range(len(self)) if self._columns is None else self._columns)

    def __getitem__(self, name: Any) -> np.ndarray:
        if self._columns is not None:
            return self._columns[name]
        if name not in range(len(self)):
            raise KeyError(name)
        if _is_sparse(self._matrix):
            return self._matrix[:, [name]].toarray()[:, 0]
        return self._matrix[:, name]

    def take(self, rows: Any) -> Table:
        """Returns a table of some rows; a dense one."""
        if self._columns is not None:
            return Table({name: values[rows] for name, values in self._columns.items()})
        found = self._matrix[rows]
        return Table(found.toarray() if _is_sparse(found) else found)


def is_dataset(inputs: Any) -> bool:
    """Returns whether inputs are a ``tf.data.Dataset``."""
    return hasattr(inputs, "as_numpy_iterator")


def column_names(inputs: Any) -> tuple[str, ...] | None:
    """Returns the names of the columns of a table or a data set of tables; None of others."""
    if is_dataset(inputs):
        spec = inputs.element_spec
        inputs = spec[0] if isinstance(spec, tuple) and spec else spec
    found = tuple(_names_of(inputs) or ())
    return found if found and all(isinstance(name, str) for name in found) else None


def parts_of(inputs: Any) -> list[Any]:
    """Returns the columns of a table, the parts of a tuple of arrays, or the inputs alone."""
    columns = _columns_of(inputs)
    if columns is not None:
        return list(columns.values())
    if not _is_several(inputs):
        return [inputs]
    if all(np.ndim(part) == 1 for part in inputs):
        raise ValueError(
            f"features are a tuple of {len(inputs)} vectors, which may be rows or columns. Give "
            "np.stack(features) if they are rows, np.column_stack(features) if columns."
        )
    return list(inputs)


def as_rows(part: Any) -> Any:
    """Returns one input whose rows are read by number: an array, a CSR matrix, or a lazy source.

    A lazy source, an object with ``__len__`` and ``__getitem__`` of row numbers, stays as it is.
    """
    if _is_sparse(part):
        return part.tocsr()
    if _is_frame(part) or _is_structured(part):
        array = np.asarray(part)
        if array.dtype.kind in "OV":  # kinds of numbers that differ: column by column
            array = _side_by_side(parts_of(part))
        return array
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


def take_rows(part: Any, rows: Any) -> Any:
    """Returns rows of what ``as_rows`` gives, sparse ones as a dense array."""
    found = part[rows]
    return found.toarray() if _is_sparse(found) else found


def all_rows(part: Any) -> np.ndarray:
    """Returns what ``as_rows`` gives as one dense array."""
    if _is_sparse(part):
        return part.toarray()
    return np.asarray(part if hasattr(part, "__array__") else part[np.arange(len(part))])


def check_lengths(parts: list[Any]) -> int:
    """Returns the number of rows that all parts have; raises if they differ."""
    lengths = sorted({np.shape(part)[0] if _is_sparse(part) else len(part) for part in parts})
    if len(lengths) > 1:
        raise ValueError(
            f"all parts of features need the same length, got lengths {lengths}. Give one row an "
            "example in each."
        )
    if not lengths or lengths[0] == 0:
        raise ValueError(NO_ROWS)
    return int(lengths[0])


def check_numbers(dtype: Any) -> None:
    """Raises if features of this dtype are no numbers."""
    if np.dtype(dtype).kind not in "biuf":
        raise TypeError(
            f"features must be numbers, got dtype {dtype}. Encode texts and categories first, for "
            "example with RandomFourierFeatures or keras.layers.StringLookup; PrivateClassifier "
            "does so itself."
        )


def checked_finite(rows: np.ndarray) -> np.ndarray:
    """Returns rows (n, d) as they are, or raises if some are not finite."""
    step = max(1, _FINITE_CELLS // max(1, rows.shape[1]))
    # Sums would overflow where numbers do not, so each is looked at.
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
    """Returns the structure of dicts and tuples with the function's values in place of leaves."""
    first = structures[0]
    if isinstance(first, Mapping):
        return {key: map_parts(function, *(one[key] for one in structures)) for key in first}
    if isinstance(first, tuple):
        parts = [map_parts(function, *part) for part in zip(*structures, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    return function(*structures)


def collected(dataset: Any) -> Any:
    """Returns all inputs of a data set of batches x or (x, y) in one; labels are dropped."""
    _refuse_endless(dataset)
    batches = [_pair(element)[0] for element in dataset.as_numpy_iterator()]
    if not batches:
        raise ValueError(NO_ROWS)
    first, again = new_digest(), new_digest()
    for x in batches:
        add_to_digest(first, x)
    for element in dataset.as_numpy_iterator():
        add_to_digest(again, _pair(element)[0])
    if first.digest() != again.digest():
        raise ValueError(SHUFFLED)

    def joined(*parts: Any) -> np.ndarray:
        arrays = [np.atleast_1d(part) for part in parts]
        _check_widths(arrays)
        return np.concatenate(arrays)

    return map_parts(joined, *batches)


def new_digest() -> Any:
    """Returns a hash to be updated."""
    return hashlib.sha256()


def _is_frame(inputs: Any) -> bool:
    is_indexed = hasattr(inputs, "columns") and hasattr(inputs, "__getitem__")
    return is_indexed and not isinstance(inputs, Mapping)


def _is_structured(inputs: Any) -> bool:
    return bool(getattr(getattr(inputs, "dtype", None), "names", None))


def _is_sparse(inputs: Any) -> bool:
    return hasattr(inputs, "tocsr")


def _is_several(inputs: Any) -> bool:
    """Returns whether inputs are a tuple of arrays, and not of rows."""
    return isinstance(inputs, tuple) and any(hasattr(part, "shape") for part in inputs)


def _names_of(table: Any) -> Any:
    """Returns the names of the columns of a table; None of other inputs."""
    if isinstance(table, Mapping):
        return table
    if _is_frame(table):
        return list(table.columns)
    return table.dtype.names if _is_structured(table) else None


def _columns_of(table: Any) -> dict[Any, np.ndarray] | None:
    """Returns the columns of a table by name; None of other inputs."""
    names = _names_of(table)
    return None if names is None else {name: np.asarray(table[name]) for name in names}


def _check_columns(found: tuple[str, ...] | None, expected: Any) -> None:
    """Raises if columns have other names or another order than in ``fit``.

    Inputs without names are taken as they come.
    """
    if found is None or expected is None or found == tuple(expected):
        return
    missing = [repr(name) for name in expected if name not in found]
    unseen = [repr(name) for name in found if name not in expected]
    what = [f"lack {', '.join(missing)}"] if missing else []
    what += [f"have {', '.join(unseen)}, which fit did not see"] if unseen else []
    raise ValueError(
        f"the columns of the features {' and '.join(what) or 'are in another order than in fit'}: "
        f"got {list(found)}, in fit they were {list(expected)}. Select these, in this order."
    )


def _check_widths(blocks: list[np.ndarray]) -> None:
    widths = [block.shape[1:] for block in blocks]
    if widths[0] != widths[-1]:
        first, last = (", ".join(map(str, shape)) for shape in (widths[0], widths[-1]))
        raise ValueError(f"batches have {first} and {last} features; all need the same number.")


def _checked_encoder(encoder: Any) -> Any:
    """Returns an encoder that came as a public input or by itself, or raises."""
    encoder = bare(encoder)
    usable = callable(encoder) or hasattr(encoder, "transform") or hasattr(encoder, "predict")
    if encoder is None or (usable and not isinstance(encoder, type)):
        return encoder
    given = f"the class {encoder.__name__}" if isinstance(encoder, type) else repr(encoder)
    raise TypeError(
        "an encoder must be a fitted feature map, a Keras model or a function from raw inputs to "
        f"(m, d), got {given}."
    )


def _features_of(inputs: Any, encoder: Any, flatten: bool = False) -> Any:
    """Returns the features (m, d) of inputs: what their encoder gives, or the inputs themselves.

    Without an encoder they may be a CSR matrix, or a part of an array.
    """
    if encoder is None:
        return _as_matrix(inputs, flatten)
    if hasattr(encoder, "transform"):
        found = encoder.transform(inputs)
    elif hasattr(encoder, "predict_on_batch"):  # a Keras model
        found = encoder.predict(inputs, batch_size=256, verbose=0)
    else:
        found = encoder(inputs) if callable(encoder) else encoder.predict(inputs)
    features = found.toarray() if _is_sparse(found) else np.asarray(found)
    if features.ndim != 2 or features.shape[1] == 0 or features.dtype.kind not in "biuf":
        raise ValueError(
            "the encoder must give numbers of shape (m, d), got an array of shape "
            f"{features.shape} and dtype {features.dtype}. Flatten or pool its outputs, for "
            "example with keras.layers.Flatten or GlobalAveragePooling2D."
        )
    if isinstance(inputs, np.ndarray) and len(features) != len(inputs):
        raise ValueError(
            f"the encoder gave {len(features)} rows for {len(inputs)} examples; it must give one "
            "row (d,) for each."
        )
    return features


def _as_matrix(inputs: Any, flatten: bool) -> Any:
    """Returns numbers (n, d): an array, without a copy where it is one, or a CSR matrix."""
    if isinstance(inputs, Mapping) or _is_several(inputs):
        rows = _side_by_side(parts_of(inputs))
    else:
        rows = as_rows(inputs)
        rows = rows if _is_sparse(rows) else all_rows(rows)
        if flatten and rows.ndim > 2:
            rows = rows.reshape(rows.shape[0], -1)
    if rows.ndim != 2 or rows.shape[1] == 0:
        hint = (
            "Give one example as x[np.newaxis], one feature as x[:, np.newaxis], and a data set in "
            "batches."
        )
        if rows.ndim > 2:
            hint = (
                "Flatten images with .reshape(len(x), -1), or pass an encoder that makes features "
                "of them."
            )
        raise ValueError(f"features must have shape (n, d), got {rows.shape}. {hint}")
    check_numbers(rows.dtype)
    return rows


def _side_by_side(parts: list[Any]) -> np.ndarray:
    """Returns parts of equal length as the columns of one array; a vector is one column."""
    arrays = [all_rows(as_rows(part)) for part in parts]
    size = check_lengths(arrays)
    return np.concatenate([np.reshape(array, (size, -1)) for array in arrays], axis=1)


def _pair(element: Any) -> tuple[Any, Any]:
    """Returns the inputs of an element of a data set, and its labels or None."""
    if not isinstance(element, tuple):
        return element, None
    if len(element) > 2:
        raise ValueError(f"a data set must give batches x or (x, y), got {len(element)} parts.")
    return element if len(element) == 2 else (element[0], None)


def _refuse_endless(dataset: Any) -> None:
    if int(dataset.cardinality()) == -1:
        raise ValueError("the data set has no end. Leave out .repeat(), or add .take(steps).")


def add_to_digest(digest: Any, x: Any) -> None:
    """Adds one batch of inputs to a hash."""
    if isinstance(x, (Mapping, tuple)):
        for part in (x[name] for name in sorted(x)) if isinstance(x, Mapping) else x:
            add_to_digest(digest, part)
        return
    part = np.asarray(x)
    digest.update(f"{part.dtype.str}{part.shape[1:]}".encode())
    content = repr(part.tolist()).encode() if part.dtype.kind == "O" else None
    digest.update(np.ascontiguousarray(part).data if content is None else content)


def _block_rows(width: int) -> int:
    return max(1, _BLOCK_BYTES // (8 * width))
