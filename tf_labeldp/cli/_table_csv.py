"""Tables of comma-separated values."""

from __future__ import annotations

import contextlib
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import pyarrow as pa
from pyarrow import csv

from tf_labeldp.cli import _table_read
from tf_labeldp.cli._errors import CommandError

_BLOCK_BYTES = 16 << 20
"""A file is read in blocks of this size; a row must fit into one."""

_MISSING = ["", "NA", "N/A", "NULL", "null", "None"]
"""Cells of a number column that hold no number on purpose."""


class CsvTable(_table_read.Table):
    """Comma-separated values with a header line, UTF-8; ids are kept as the text they are."""

    def __init__(self, path: pathlib.Path, *, gzipped: bool) -> None:
        self._gzipped = gzipped
        self._ignore_empty_lines = True
        self._empty_last_line = False
        super().__init__(path)
        if len(self.columns) == 1:
            # There an empty line is an empty cell, not the absence of a row; but for the last one.
            self._ignore_empty_lines = False
            self._empty_last_line = re.search(rb"\n\r?\n\Z", self._end()) is not None

    def label_chunks(self, column: str, kind: str) -> Iterator[Any]:
        for batch in self._batches({column: _table_read.arrow_type(kind)}, kind):
            yield batch.column(0)

    def id_chunks(self, columns: Sequence[str]) -> Iterator[list[Any]]:
        for batch in self._batches(dict(zip(columns, self.id_types(columns), strict=True))):
            yield batch.columns

    def id_types(self, columns: Sequence[str]) -> list[Any]:
        return [pa.string()] * len(columns)

    def _read_columns(self) -> list[str]:
        self._check_start()
        with self._explained(None), self._reader(None) as reader:
            return list(reader.schema.names)

    def _batches(self, types: dict[str, Any], kind: str = "") -> Iterator[Any]:
        with self._explained(types, kind), self._reader(types) as reader:
            if not self._empty_last_line:
                yield from reader
                return
            held = None
            for batch in reader:
                if held is not None:
                    yield held
                held = batch
            if held is not None:
                yield held.slice(0, max(held.num_rows - 1, 0))

    def _stream(self) -> Any:
        return pa.input_stream(str(self.path), compression="gzip" if self._gzipped else None)

    def _check_start(self) -> None:
        """Raises for files that begin like something else than UTF-8 text."""
        with self._explained(None), self._stream() as stream:
            start = stream.read(4)
        if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise CommandError(
                f"the input {self.path} is UTF-16 text, as Excel and PowerShell write it; save it "
                "as UTF-8"
            )
        if start[:2] == b"\x1f\x8b":
            raise CommandError(
                f"the input {self.path} is a gzip archive"
                + (" in another; unpack one" if self._gzipped else "; name it .csv.gz")
            )

    def _end(self) -> bytes:
        """Returns the last bytes of the text."""
        end = b""
        with self._explained(None), self._stream() as stream:
            while block := stream.read(_BLOCK_BYTES):
                end = (end + block)[-3:]
        return end

    def _reader(self, types: dict[str, Any] | None, use_threads: bool = True) -> Any:
        return csv.open_csv(
            self._stream(),
            csv.ReadOptions(block_size=_BLOCK_BYTES, use_threads=use_threads),
            csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=self._ignore_empty_lines),
            csv.ConvertOptions(
                include_columns=None if types is None else list(types),
                column_types=types,
                null_values=_MISSING,
            ),
        )

    @contextlib.contextmanager
    def _explained(self, types: dict[str, Any] | None, kind: str = "") -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, UnicodeDecodeError) as error:
            self._explain(str(error), types, kind)
        except OSError as error:
            raise _table_read.unreadable(self.path, error) from None

    def _explain(self, message: str, types: dict[str, Any] | None, kind: str) -> NoReturn:
        """Raises what Arrow's message means, without the cell that it quotes."""
        if "Empty CSV file or block" in message:
            raise _table_read.no_rows(self.path) from None
        if "Empty CSV file" in message:
            raise CommandError(
                f"the input {self.path} is empty; give a CSV file with a header line"
            ) from None
        if "straddling object" in message:
            raise CommandError(
                f"the input {self.path} has a row longer than {_BLOCK_BYTES >> 20} MB; look for a "
                "quote that is not closed"
            ) from None
        row = self._row_of_error(types)
        ragged = re.search(r"Expected (\d+) columns, got (\d+)", message)
        if ragged:
            raise CommandError(
                f"the input {self.path} has {ragged[2]} cells{row}, but {ragged[1]} columns; "
                "repair that row (a cell with a comma or a quote must be quoted)"
            ) from None
        if "UTF8" in message or "utf-8" in message:
            raise CommandError(
                f"the input {self.path} is not UTF-8 text{row}; convert it to UTF-8"
            ) from None
        if "conversion error" in message and types is not None and len(types) == 1:
            raise CommandError(
                f"column {next(iter(types))!r} of {self.path} holds something that is not {kind}"
                f"{row}; {_table_read.REMEDIES[kind]}"
            ) from None
        raise CommandError(
            f"the input {self.path} cannot be read as CSV{row}; check that it has a header line "
            "and commas between the cells"
        ) from None

    def _row_of_error(self, types: dict[str, Any] | None) -> str:
        """Returns where reading stops, in words; only the serial reader counts rows."""
        try:
            with self._reader(types, use_threads=False) as reader:
                for _ in reader:
                    pass
        except Exception as error:
            row = re.search(r"Row #(\d+)", str(error))
            return f" in row {row[1]} (the header is row 1)" if row else ""
        return ""
