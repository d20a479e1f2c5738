"""Public features that are read by row number: arrays, structures of them, and lazy sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf


class RowSource:
    """Features of n examples, of which rows are read into buffers of a fixed size.

    Args:
        features: an array (n, ...), a source of rows, or a dict or tuple of these, nested as
            wanted. A source of rows is an object with ``__len__`` and ``__getitem__`` of increasing
            row numbers, ``int64`` (m,), to an array (m, ...) or a dict or tuple of arrays.

    Raises:
        TypeError: features that can't be read by row, or are not numbers.
        ValueError: no examples, or parts of different lengths.
    """

    def __init__(self, features: Any) -> None:
        parts = _mapped(_as_rows, features)
        self._parts = tf.nest.flatten(parts)
        lengths = sorted({len(part) for part in self._parts})
        if not lengths or lengths[0] == 0:
            raise ValueError("features hold no examples; give at least one.")
        if len(lengths) > 1:
            raise ValueError(
                f"all parts of features need the same length, got lengths {lengths}. Give one row "
                "an example in each."
            )
        self.num_rows = lengths[0]
        self._template = _mapped(lambda part: _arrays(part, np.zeros(1, np.int64)), parts)
        self._first = tf.nest.flatten(self._template)
        for one in self._first:
            if one.dtype.kind not in "biuf":
                raise TypeError(
                    f"features must be numbers, got dtype {one.dtype}. Encode texts and "
                    "categories first, for example with keras.layers.StringLookup."
                )

    def specs(self, num_rows: int) -> list[tf.TensorSpec]:
        """Returns what buffers of so many rows are, in the order of ``read``."""
        return [
            tf.TensorSpec((num_rows, *part.shape[1:]), kept_dtype(part.dtype))
            for part in self._first
        ]

    def pack(self, parts: list[Any]) -> Any:
        """Returns parts as ``read`` gives them in the structure of the features."""
        return tf.nest.pack_sequence_as(self._template, parts)

    def read(self, rows: np.ndarray, buffer_rows: int) -> list[np.ndarray]:
        """Returns buffers (buffer_rows, ...) that hold these rows and then copies of row 0.

        Args:
            rows: row numbers ``int64`` (m,), m at most ``buffer_rows``; repeats are fine.
            buffer_rows: rows of each buffer.
        """
        # Lazy sources are read once a row and in order, as files on disk want it.
        ordered = bool(np.all(rows[1:] > rows[:-1]))
        once, repeats = (rows, None) if ordered else np.unique(rows, return_inverse=True)
        found: list[tuple[np.ndarray, np.ndarray]] = []
        for part in self._parts if rows.size else ():
            if isinstance(part, np.ndarray):
                found.append((part, rows))
            else:
                places = np.arange(rows.size) if repeats is None else repeats
                found += [(array, places) for array in tf.nest.flatten(_arrays(part, once))]
        buffers = []
        for first in self._first:
            buffer = np.empty((buffer_rows, *first.shape[1:]), kept_dtype(first.dtype))
            buffer[rows.size :] = first
            buffers.append(buffer)
        for buffer, (array, places) in zip(buffers, found, strict=bool(found)):
            if array.shape[1:] != buffer.shape[1:]:
                raise ValueError(
                    f"features gave rows of shape {array.shape[1:]}, and {buffer.shape[1:]} for "
                    "row 0. All rows need the same shape: pad or crop them."
                )
            if array.dtype == buffer.dtype:
                np.take(array, places, axis=0, out=buffer[: rows.size], mode="clip")
            else:
                buffer[: rows.size] = array[places]
        return buffers


def kept_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype of a batch: doubles become ``float32``, as in Keras; others stay."""
    return np.dtype(np.float32) if dtype == np.float64 else dtype.newbyteorder("=")


def _mapped(function: Callable[[Any], Any], structure: Any) -> Any:
    """Returns the structure of dicts and tuples with the function's values in place of leaves."""
    if isinstance(structure, Mapping):
        return {key: _mapped(function, part) for key, part in structure.items()}
    if isinstance(structure, tuple):
        parts = [_mapped(function, part) for part in structure]
        return type(structure)(*parts) if hasattr(structure, "_fields") else tuple(parts)
    return function(structure)


def _as_rows(part: Any) -> Any:
    """Returns an array, or a source of rows as it is."""
    if hasattr(part, "toarray"):
        raise TypeError(
            f"features must be dense, got a sparse {type(part).__name__}. Pass .toarray() if it "
            "fits, or an object whose __getitem__ makes dense arrays of rows."
        )
    if isinstance(part, list):
        part = np.asarray(part)
    elif hasattr(part, "to_numpy"):  # tables index by column, not by row
        part = part.to_numpy()
    elif hasattr(part, "numpy"):
        part = part.numpy()
    is_source = hasattr(part, "__len__") and hasattr(part, "__getitem__")
    if not is_source or isinstance(part, (str, bytes)):
        raise TypeError(
            "features must be an array, a dict or tuple of arrays, or an object with __len__ and "
            f"__getitem__ of row numbers, got {type(part).__name__}. A tf.data.Dataset can't be "
            "read by row number: give the arrays or the files behind it."
        )
    if isinstance(part, np.ndarray) and part.ndim == 0:
        raise ValueError("features must have shape (n, ...), got one number.")
    return part


def _arrays(part: Any, rows: np.ndarray) -> Any:
    """Returns rows of an array or a source, as an array or a structure of arrays."""

    def checked(found: Any) -> np.ndarray:
        array = np.asarray(found)
        if array.shape[:1] != rows.shape:
            raise ValueError(
                f"features gave an array of shape {array.shape} for {rows.size} row numbers, "
                f"expected ({rows.size}, ...). source[rows] must give one row for each number."
            )
        return array

    return _mapped(checked, part[rows])
