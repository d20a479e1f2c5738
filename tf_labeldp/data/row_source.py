"""Public features that are read by row number: arrays, nested arrays, and indexed sources."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tf_labeldp.data.examples import stored
from tf_labeldp.features.reader import FeatureRows


class RowSource:
    """Public features of ``num_examples`` examples, read by number into buffers of a fixed size.

    A data set is read into memory, in its order.
    """

    def __init__(self, features: Any, num_examples: int) -> None:
        rows = features if isinstance(features, FeatureRows) else FeatureRows(features)
        if rows.is_dataset:
            rows = FeatureRows(stored(rows, num_examples))
        rows.check_columns()
        parts = FeatureRows(rows.network_inputs()).by_number()
        self._parts = tf.nest.flatten(parts)
        self.num_rows = FeatureRows(parts).num_inputs
        self._template = tf.nest.map_structure(lambda part: part.first, parts)
        self._first = tf.nest.flatten(self._template)

    def check_dtypes(self) -> None:
        """Raises unless all features are numbers or texts."""
        for part in self._parts:
            part.check_dtype()

    def check_not_extended(self, num_labels: int) -> None:
        """Raises if ``labels.extend`` has added labels, which would shift the rows."""
        if num_labels != self.num_rows:
            raise ValueError(
                f"expected {self.num_rows} labels, one per row of the features, got {num_labels} "
                "since labels.extend. Make the batches or stages again, with x[labels.indices]."
            )

    def whole(self) -> Any:
        """Returns all rows in the structure of the features; a source is read into memory."""
        return self.pack([part.whole() for part in self._parts])

    def specs(self, num_rows: int) -> list[tf.TensorSpec]:
        """Returns the specs of what ``read`` returns."""
        return [
            tf.TensorSpec((num_rows, *part.shape[1:]), kept_dtype(part.dtype))
            for part in self._first
        ]

    def in_memory(self) -> Any:
        """Returns all rows in the structure of the features; None if they are read when needed."""
        arrays = [part.array for part in self._parts]
        if any(array is None or isinstance(array, np.memmap) for array in arrays):
            return None
        return self.pack(arrays)

    def pack(self, parts: list[Any]) -> Any:
        """Returns the arrays of ``read`` in the structure of the features."""
        return tf.nest.pack_sequence_as(self._template, parts)

    def read(self, rows: np.ndarray, buffer_rows: int) -> list[np.ndarray]:
        """Returns buffers (buffer_rows, ...) with these rows, then copies of row 0."""
        # Indexed sources are read in increasing order, each row once, which suits files on disk.
        distinct, places = np.unique(rows, return_inverse=True)
        sources: list[tuple[np.ndarray, np.ndarray]] = []
        for part in self._parts if rows.size else ():
            if part.array is not None:
                sources.append((part.array, rows))
            else:
                sources += [(array, places) for array in tf.nest.flatten(part.take(distinct))]
        buffers = []
        for first in self._first:
            buffer = np.empty((buffer_rows, *first.shape[1:]), kept_dtype(first.dtype))
            buffer[rows.size :] = first
            buffers.append(buffer)
        for buffer, (array, taken) in zip(buffers, sources, strict=bool(sources)):
            if array.shape[1:] != buffer.shape[1:]:
                raise ValueError(
                    f"expected rows of shape {buffer.shape[1:]}, as row 0 has, got "
                    f"{array.shape[1:]}. Pad or crop the rows to one shape."
                )
            if array.dtype == buffer.dtype:
                np.take(array, taken, axis=0, out=buffer[: rows.size], mode="clip")
            else:
                buffer[: rows.size] = array[taken]
        return buffers


def kept_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype of a batch: doubles become ``float32``, as in Keras; others stay."""
    return np.dtype(np.float32) if dtype == np.float64 else dtype.newbyteorder("=")
