"""Input tables of labels, in CSV and Parquet files.

Several files are one table, whose rows are in the order of the file names. Errors name columns and
rows and count cells, but quote none. Arrow's messages quote cells, so none of them is passed on.
"""

from __future__ import annotations

import abc
import contextlib
import glob
import itertools
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet, types

from tf_labeldp.cli._console import CommandError


class ColumnKind(NamedTuple):
    words: str
    arrow_type: Any  # of the labels after reading
    remedy: str  # for a column with other cells
    types: tuple[str, ...]  # prefixes of the Parquet types that are accepted


NUMBER = ColumnKind(
    "a number",
    pa.float64(),
    "repair the column, or give the --column that has the labels",
    ("int", "uint", "float", "double", "halffloat", "decimal"),
)
CLASS = ColumnKind(
    "a whole number",
    pa.int64(),
    "classes are numbered 0, 1, ..., without a decimal point; give --classes for names",
    ("int", "uint"),
)
NAME = ColumnKind(
    "a class name",
    pa.string(),
    "give the --column that has the labels",
    ("string", "large_string", "int", "uint", "bool"),
)

FILL = (
    "fill them by a rule that does not look at labels, or choose the rows to send by features "
    "alone: which rows are in the table must not depend on labels"
)
"""The remedy for missing labels."""
SUFFIXES = {".csv": "csv", ".csv.gz": "csv.gz", ".parquet": "parquet"}
STREAM = pathlib.Path("-")
"""Stands for stdin or stdout."""
_MISSING = ["", "NA", "N/A", "NULL", "null", "None"]
"""Missing values in a CSV column of numbers."""
_BLOCK_BYTES = 16 << 20
"""Bytes of a CSV file parsed at a time; Arrow refuses a longer row."""
_FIRST_BYTES = 1 << 20
"""Bytes at the start of a CSV file from which its header line is read."""
_SNIFFED_BYTES = 1 << 16
"""Bytes at the start of a CSV file that show what is between its cells."""
_LATIN_1 = "cp1252"
"""Latin-1 as Windows writes it, with the euro sign."""
_SEPARATOR = re.compile(rb"(?:\xef\xbb\xbf)?sep=([^\r\n])\r?\n", re.IGNORECASE)
"""A first line for Excel, which names what is between the cells."""
_DECIMAL_COMMAS, _DECIMAL_POINTS = (
    re.compile(rb"(?:^|;)[ \"]*[-+]?\d+%b\d+[ \"]*(?=;|$)" % mark) for mark in (rb",", rb"\.")
)
_NO_ROWS = "the input {path} has no rows below its header line; give a table with rows"
# By a pattern of Arrow's message; the first match counts.
_CSV_ERRORS = {
    "Empty CSV file or block": _NO_ROWS,
    "Empty CSV file": "the input {path} is empty; give a CSV file with a header line",
    "straddling object": "the input {path} has a row longer than 16 MB; look for a quote that is "
    "not closed",
    r"Expected (\d+) columns, got (\d+)": "the input {path} has {1} cells{row}, but {0} columns; "
    "repair that row (a cell with a comma or a quote must be quoted)",
    "UTF-16 or gzip": "the input {path} is not UTF-8 text; save UTF-16, as of Excel and "
    "PowerShell, as UTF-8, and name a gzip archive .csv.gz",
    "(?i)utf-?8|codec": "the input {path} is not UTF-8 text{row}; convert it to UTF-8",
    "conversion error": "column {label!r} of {path} has a cell that is not {kind.words}{row}; "
    "{kind.remedy}",
    "": "the input {path} cannot be read as CSV{row}; check that it has a header line and commas "
    "or semicolons between the cells",
}


def format_of(path: pathlib.Path, option: str) -> str:
    """Returns ``"csv"``, ``"csv.gz"`` or ``"parquet"`` by the suffix, or raises."""
    for suffix, name in SUFFIXES.items():
        if path.name.lower().endswith(suffix):
            return name
    raise CommandError(
        f"the format of {option} {path} is not known by its name; name it {', '.join(SUFFIXES)}"
    )


def is_table_name(path: pathlib.Path) -> bool:
    return path.name.lower().endswith(tuple(SUFFIXES))


def find_files(inputs: Sequence[pathlib.Path]) -> tuple[list[pathlib.Path], bool]:
    """Returns the files that the inputs name, contain or match, sorted by name.

    The second value is False for a single file named by itself, and for stdin.
    """
    files: list[pathlib.Path] = []
    for path in inputs:
        if path == STREAM and len(inputs) > 1:
            raise CommandError("the input - is stdin, which can't be one of several files")
        if os.path.isdir(path):
            found = list(filter(is_table_name, path.glob("[!.]*")))
            if not found:
                raise CommandError(
                    f"the folder {path} has no file in it whose name ends in "
                    f"{', '.join(SUFFIXES)}; check the path"
                )
        elif os.path.lexists(path):
            found = [path]
        else:
            found = [pathlib.Path(name) for name in glob.glob(str(path), recursive=True)] or [path]
        files += found
    files.sort(key=lambda file: file.name)
    for file, other in itertools.pairwise(files):
        if file.name == other.name:
            raise CommandError(
                f"the inputs {file} and {other} have the same name, which names a file of the "
                "output; give each file once, under its own name"
            )
    return files, files != list(inputs) or len(files) > 1


def open_table(path: pathlib.Path) -> Table:
    if path == STREAM:
        return StdinTable()
    return ParquetTable(path) if format_of(path, "the input") == "parquet" else CsvTable(path)


def to_arrow(numbers: np.ndarray) -> Any:
    """Returns numbers as an Arrow array without a copy.

    ``pyarrow.array`` would load pandas, which takes longer than all other imports together.
    """
    kind = pa.from_numpy_dtype(numbers.dtype)
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers)])


def to_numpy(numbers: Any) -> np.ndarray:
    """Returns integers or doubles of Arrow without nulls, without a copy if they are one chunk."""
    chunks = numbers.chunks if isinstance(numbers, pa.ChunkedArray) else [numbers]
    dtype = np.dtype(str(numbers.type))  # `to_pandas_dtype` can load pandas.
    parts = [
        np.frombuffer(chunk.buffers()[1], dtype)[chunk.offset :][: len(chunk)]
        for chunk in chunks
        if len(chunk)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate([*parts, np.zeros(0, dtype)])


def no_rows(path: pathlib.Path) -> CommandError:
    return CommandError(_NO_ROWS.format(path=path))


class Table(abc.ABC):
    """A file with named ``columns`` in the file's order; ids have the Arrow ``types``."""

    columns: list[str]
    types: dict[str, Any]
    remarks: tuple[str, ...] = ()  # about a form that was guessed
    use_threads = True  # of Arrow; one core takes less time and memory without them

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        if path.exists() and not path.is_file():
            raise CommandError(
                f"the input {path} is not a regular file, and it is read twice; give the path of a "
                "file, or - for stdin"
            )

    def read(self, label: str, kind: ColumnKind, ids: Sequence[str]) -> tuple[Any, Any]:
        """Returns the labels, a chunked array of the kind's type, and a table of the ids."""
        table = self._read([label, *ids], kind)
        if not table.num_rows:
            raise no_rows(self.path)
        return table.column(0), table.select(list(ids))

    def whole(self, texts: Sequence[str] = ()) -> Any:
        """Returns all columns, each of the type of its cells; ``texts`` of a CSV stay text."""
        table = self._whole(texts)
        if not table.num_rows:
            raise no_rows(self.path)
        return table

    @abc.abstractmethod
    def _whole(self, texts: Sequence[str]) -> Any:
        """Returns all columns, also of a table without rows."""

    @abc.abstractmethod
    def _read(self, columns: list[str], kind: ColumnKind) -> Any:
        """Returns a table of these columns; the first one has the labels."""

    @contextlib.contextmanager
    def _explained(
        self, columns: Sequence[str] = (), kind: ColumnKind | None = None
    ) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            raise CommandError(f"the input {self.path} does not exist; check the path") from None
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise self._arrow_error(str(error), columns, kind) from None
        except OSError as error:
            raise self._unreadable(error.errno) from None

    def _arrow_error(
        self, message: str, columns: Sequence[str], kind: ColumnKind | None
    ) -> CommandError:
        return self._unreadable(None)

    def _unreadable(self, code: int | None) -> CommandError:
        reason = os.strerror(code) if code else "damaged, or not what its name says"
        return CommandError(
            f"the input {self.path} cannot be read ({reason}); copy or make it again"
        )


class ParquetTable(Table):
    def __init__(self, path: pathlib.Path) -> None:
        super().__init__(path)
        with self._explained():
            schema = parquet.read_schema(str(path))
        self.columns = list(schema.names)
        self.types = dict(zip(schema.names, schema.types, strict=True))

    def _whole(self, texts: Sequence[str]) -> Any:
        with self._explained():
            return parquet.read_table(str(self.path))

    def _read(self, columns: list[str], kind: ColumnKind) -> Any:
        label = columns[0]
        found = self.types[label]
        plain = found.value_type if kind is NAME and types.is_dictionary(found) else found
        if not str(plain).startswith(kind.types):
            raise CommandError(
                f"column {label!r} of {self.path} has type {found}, expected {kind.words}; "
                f"{kind.remedy}"
            )
        with self._explained(), parquet.ParquetFile(str(self.path)) as file:
            # The reader takes "a" for "a.b" too.
            table = file.read(columns, use_threads=self.use_threads).select(columns)
            # Unsafe: an unsigned number above 2^63 turns negative, and is then out of range.
            labels = table.column(0).cast(kind.arrow_type, safe=False)
        return table.set_column(0, label, labels)


class CsvTable(Table):
    """Comma-separated values with a header line. Ids are kept as the text they are.

    Semicolons or tabs are found in the header line; with semicolons, numbers may have a decimal
    comma. A file that is not UTF-8 is read as Latin-1.
    """

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__(path)
        self._encoding, self._delimiter, self._decimal_point = "utf8", ",", "."
        self._lines_before = 0  # above the header line
        with self._explained(), self._stream() as stream:
            start = bytes(stream.read(_SNIFFED_BYTES))
            if start[:2] in (b"\xff\xfe", b"\xfe\xff", b"\x1f\x8b") or b"\0" in start:
                raise pa.ArrowInvalid("UTF-16 or gzip")
        self._sniff(start)
        self.columns = []
        with self._explained():
            self.columns = self._decoded(self._header)
        self.types = dict.fromkeys(self.columns, pa.string())

    def _sniff(self, start: bytes) -> None:
        if (separator := _SEPARATOR.match(start)) is not None:
            self._lines_before, start = 1, start[separator.end() :]
        header, *lines = start.lstrip().splitlines() or [b""]
        self._delimiter = max(",;\t", key=lambda mark: header.count(mark.encode()))
        if separator is not None and separator[1].isascii():
            self._delimiter = separator[1].decode()
        if self._delimiter == ",":
            return
        words = {";": "semicolons", "\t": "tabs"}.get(self._delimiter, repr(self._delimiter))
        if self._delimiter == ";":
            commas, points = (
                any(map(pattern.search, lines)) for pattern in (_DECIMAL_COMMAS, _DECIMAL_POINTS)
            )
            if commas and not points:
                self._decimal_point, words = ",", f"{words}, and numbers have a decimal comma"
        self.remarks = (f"{self.path} has its cells between {words}",)

    def _decoded(self, read: Callable[[], Any]) -> Any:
        """Returns what ``read`` does, in Latin-1 if the text is not UTF-8."""
        try:
            return read()
        except (pa.ArrowException, UnicodeDecodeError) as error:
            if self._encoding != "utf8" or not re.search("(?i)utf-?8", str(error)):
                raise
        self._encoding = _LATIN_1
        self.remarks += (
            f"{self.path} is not UTF-8 text, and was read as Latin-1 (Windows-1252): check names "
            "with accents, or convert it to UTF-8",
        )
        return read()

    def _header(self) -> list[str]:
        try:
            return self._names(_FIRST_BYTES)
        except pa.ArrowInvalid:  # A block must have the whole of a row.
            return self._names(_BLOCK_BYTES)

    def _names(self, block_size: int) -> list[str]:
        # Threads would read far ahead.
        read, *others = self._options(use_threads=False)
        read.block_size = block_size
        with csv.open_csv(self._stream(), read, *others) as reader:
            return list(reader.schema.names)

    def _whole(self, texts: Sequence[str]) -> Any:
        def read() -> Any:
            table = csv.read_csv(self._stream(), *self._options(texts=texts))
            # Text that is not UTF-8 is read as bytes.
            if self._encoding == "utf8" and any(map(types.is_binary, table.schema.types)):
                raise pa.ArrowInvalid("invalid UTF-8")
            return table

        with self._explained():
            return self._named(self._decoded(read))

    def _named(self, table: Any) -> Any:
        """Returns the table without columns that have neither a name nor a cell."""
        kept = [
            place
            for place, field in enumerate(table.schema)
            if field.name.strip() or not types.is_null(field.type)
        ]
        if len(kept) < table.num_columns and table.num_rows:
            self.remarks += (
                f"{self.path} has a column without a name and without cells (a separator ends each "
                "line), which is left out",
            )
            return table.select(kept)
        return table

    def _read(self, columns: list[str], kind: ColumnKind) -> Any:
        with self._explained(columns, kind):
            return self._decoded(
                lambda: csv.read_csv(self._stream(), *self._options(columns, kind))
            )

    def _options(
        self,
        columns: Sequence[str] = (),
        kind: ColumnKind | None = None,
        use_threads: bool | None = None,
        texts: Sequence[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        column_types = dict.fromkeys(texts or columns, pa.string())
        if kind is not None:
            column_types[columns[0]] = kind.arrow_type
        # An empty line in a table of one column is a missing label: skipped, it would shift rows.
        ignore_empty_lines = len(self.columns) != 1
        return (
            csv.ReadOptions(
                block_size=_BLOCK_BYTES,
                use_threads=self.use_threads if use_threads is None else use_threads,
                encoding=self._encoding,
                skip_rows=self._lines_before,
            ),
            csv.ParseOptions(
                delimiter=self._delimiter,
                newlines_in_values=True,
                ignore_empty_lines=ignore_empty_lines,
            ),
            csv.ConvertOptions(
                include_columns=list(columns),
                column_types=column_types,
                null_values=_MISSING if texts is None else None,
                decimal_point=self._decimal_point,
            ),
        )

    def _stream(self) -> Any:
        is_gzip = self.path.name.lower().endswith(".gz")
        return pa.input_stream(str(self.path), compression="gzip" if is_gzip else None)

    def _arrow_error(
        self, message: str, columns: Sequence[str], kind: ColumnKind | None
    ) -> CommandError:
        """Returns the meaning of Arrow's message, without the cell that it quotes."""
        matches = ((re.search(pattern, message), text) for pattern, text in _CSV_ERRORS.items())
        match, text = next((match, text) for match, text in matches if match)
        row = self._row_of_error(columns, kind) if "{row}" in text else ""
        facts = {"path": self.path, "row": row, "label": next(iter(columns), ""), "kind": kind}
        return CommandError(text.format(*match.groups(), **facts))

    def _row_of_error(self, columns: Sequence[str], kind: ColumnKind | None) -> str:
        """Returns where reading stops, in words; Arrow counts rows only without threads."""
        try:
            csv.read_csv(self._stream(), *self._options(columns, kind, use_threads=False))
        except Exception as error:
            row = re.search(r"Row #(\d+)", str(error))
            return f" in row {row[1]} (the header is row 1)" if row else ""
        return ""


class StdinTable(CsvTable):
    """CSV text from stdin, kept in memory: true labels are not written to a disk."""

    def __init__(self) -> None:
        self.path = pathlib.Path("stdin")
        if sys.stdin is None:
            raise CommandError("the input - needs stdin, which is closed; give a file")
        with self._explained():
            self._text = sys.stdin.buffer.read()
        super().__init__(self.path)

    def _stream(self) -> Any:
        return pa.input_stream(pa.py_buffer(self._text))
