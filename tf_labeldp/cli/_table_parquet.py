"""Tables in Apache Parquet files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import parquet, types

from tf_labeldp.cli import _table_read
from tf_labeldp.cli._errors import CommandError

_BATCH_ROWS = 1 << 16
"""A file is read in batches of at most this many rows."""


class ParquetTable(_table_read.Table):
    """An Apache Parquet file; ids keep their types."""

    def label_chunks(self, column: str, kind: str) -> Iterator[Any]:
        found = self._types[column]
        if not _suits(found, kind):
            raise CommandError(
                f"column {column!r} of {self.path} has type {found}, expected {kind}; "
                f"{_table_read.REMEDIES[kind]}"
            )
        wanted = _table_read.arrow_type(kind)
        for batch in self._batches([column]):
            with self._explained():
                # Unsafe: an unsigned number above 2^63 turns negative, and is refused as such.
                chunk = batch.column(column).cast(wanted, safe=False)
            yield chunk

    def id_chunks(self, columns: Sequence[str]) -> Iterator[list[Any]]:
        for batch in self._batches(columns):
            yield [batch.column(name) for name in columns]

    def id_types(self, columns: Sequence[str]) -> list[Any]:
        return [self._types[name] for name in columns]

    def _read_columns(self) -> list[str]:
        with self._explained(), self._file() as file:
            schema = file.schema_arrow
            self._types = dict(zip(schema.names, schema.types, strict=True))
            return list(schema.names)

    def _batches(self, columns: Sequence[str]) -> Iterator[Any]:
        """Yields batches with these columns, and perhaps others: "a" may bring "a.b" along."""
        with self._explained(), self._file() as file:
            yield from file.iter_batches(_BATCH_ROWS, columns=list(columns))

    def _file(self) -> Any:
        return parquet.ParquetFile(str(self.path))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, UnicodeDecodeError):
            raise _table_read.unreadable(self.path) from None
        except OSError as error:
            raise _table_read.unreadable(self.path, error) from None


def _suits(found: Any, kind: str) -> bool:
    if kind == _table_read.CLASS:
        return bool(types.is_integer(found))
    if kind == _table_read.NUMBER:
        return bool(types.is_integer(found) or types.is_floating(found) or types.is_decimal(found))
    if types.is_dictionary(found):
        found = found.value_type
    return bool(
        types.is_string(found)
        or types.is_large_string(found)
        or types.is_string_view(found)
        or types.is_integer(found)
        or types.is_boolean(found)
    )
