"""Writes Arrow columns as CSV or Parquet to an open file."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet, types

_ROW_GROUP_ROWS = 1 << 20
"""Rows a Parquet row group, but for the last one."""


class CsvWriter:
    """Comma-separated values in UTF-8; only cells that need quotes get them."""

    def __init__(
        self, file: IO[bytes], names: Sequence[str], kinds: Sequence[Any], gzipped: bool
    ) -> None:
        for kind in kinds:
            _check_text(kind)
        # No name and no time in the header of the archive.
        self._gzip = gzip.GzipFile("", "wb", 6, file, 0) if gzipped else None
        self._file: Any = file if self._gzip is None else self._gzip
        self.write([pa.array([name]) for name in names])

    def write(self, arrays: Sequence[Any]) -> None:
        lines = pc.binary_join_element_wise(*[_cells(array) for array in arrays], ",")
        lines = pc.binary_join_element_wise(lines, "", "\n")
        if len(lines):
            # An Arrow array of texts holds them one after another: this is the file's content.
            _, offsets, content = lines.buffers()
            ends = np.frombuffer(offsets, np.int32)[lines.offset : lines.offset + len(lines) + 1]
            self._file.write(memoryview(content)[int(ends[0]) : int(ends[-1])])

    def close(self) -> None:
        if self._gzip is not None:
            self._gzip.close()


class ParquetWriter:
    """A Parquet file without metadata of the input."""

    def __init__(self, file: IO[bytes], names: Sequence[str], kinds: Sequence[Any]) -> None:
        # Names and types alone: metadata of the input's schema may say anything.
        self._schema = pa.schema(list(zip(names, kinds, strict=True)))
        self._writer = parquet.ParquetWriter(file, self._schema)
        self._batches: list[Any] = []
        self._rows = 0

    def write(self, arrays: Sequence[Any]) -> None:
        self._batches.append(pa.record_batch(list(arrays), schema=self._schema))
        self._rows += len(arrays[0])
        if self._rows >= _ROW_GROUP_ROWS:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._batches:
            table, self._batches, self._rows = pa.Table.from_batches(self._batches), [], 0
            self._writer.write_table(table, row_group_size=max(table.num_rows, 1))


def _check_text(kind: Any) -> None:
    """Raises an Arrow error for a type without a text of its own, before anything is drawn.

    Bytes may be no text, which would be found out too late; a duration would lose its unit.
    """
    if types.is_dictionary(kind):
        kind = kind.value_type
    binary = (types.is_binary, types.is_large_binary, types.is_binary_view)
    refused = (*binary, types.is_fixed_size_binary, types.is_duration)
    if any(is_kind(kind) for is_kind in refused):
        raise pa.ArrowNotImplementedError(f"{kind} has no text")
    pa.nulls(0, kind).cast(pa.string())  # raises for lists and the like


def _cells(array: Any) -> Any:
    """Returns an Arrow array as CSV cells: quoted where needed; null as nothing, "" as quotes."""
    text = array.cast(pa.string())
    special = pc.match_substring_regex(text, '^$|[",\r\n]')
    if pc.any(special).as_py():
        doubled = pc.replace_substring(text, '"', '""')
        text = pc.if_else(special, pc.binary_join_element_wise('"', doubled, '"', ""), text)
    return text.fill_null("")
