"""Tables of labels in CSV and Parquet files, read in chunks.

Several files are one table, whose rows are in the order of the files' names.

Errors name columns and rows and count cells, but never show one: Arrow's own messages quote the
text that they could not convert, so none of them is passed on.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import glob
import itertools
import os
import pathlib
import re
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import csv, parquet, types

from tf_labeldp.cli._console import CommandError


@dataclasses.dataclass(frozen=True)
class ColumnKind:
    """What a label column may hold."""

    words: str
    arrow_type: Any  # that the labels are read as
    remedy: str  # what to do about a column that holds something else
    suits: tuple[Callable[[Any], bool], ...]  # tests of a Parquet column's type; one must hold


NUMBER = ColumnKind(
    "a number",
    pa.float64(),
    "repair the column, or give the --column that holds the labels",
    (types.is_integer, types.is_floating, types.is_decimal),
)
CLASS = ColumnKind(
    "a whole number",
    pa.int64(),
    "classes are numbered 0, 1, ..., without a decimal point; give --classes for names",
    (types.is_integer,),
)
NAME = ColumnKind(
    "a class name",
    pa.string(),
    "give the --column that holds the labels",
    (
        types.is_string,
        types.is_large_string,
        lambda kind: str(kind) == "string_view",  # before 16, Arrow has no such type
        types.is_integer,
        types.is_boolean,
    ),
)

FILL = (
    "fill them by a rule that does not look at labels, or choose the rows to send by features "
    "alone: which rows are in the table must not depend on labels"
)
"""What to do about labels that are missing."""

_MISSING = ["", "NA", "N/A", "NULL", "null", "None"]
"""Cells of a CSV number column that hold no number on purpose."""

_BLOCK_BYTES = 16 << 20
"""A CSV file is read in blocks of this size; a row must fit into one."""
_HEADER_BYTES = 1 << 16
"""The names of its columns are looked for in so many bytes first."""
_BATCH_ROWS = 1 << 16
"""A Parquet file is read in batches of at most this many rows."""
SUFFIXES = {".csv": "csv", ".csv.gz": "csv.gz", ".parquet": "parquet"}
STREAM = pathlib.Path("-")
"""Stands for stdin or stdout."""


def is_single(inputs: Sequence[pathlib.Path]) -> bool:
    """Returns whether the inputs are one file or stdin, rather than a folder or a pattern."""
    return len(inputs) == 1 and not os.path.isdir(inputs[0]) and not _matches(inputs[0])


def find_files(inputs: Sequence[pathlib.Path]) -> list[pathlib.Path]:
    """Returns the files that are named, lie in a folder or match a pattern, by their names."""
    found: list[pathlib.Path] = []
    for path in inputs:
        if path == STREAM and len(inputs) > 1:
            raise CommandError("the input - is stdin, which can't be one of several files")
        if not os.path.isdir(path):
            found += _matches(path) or [path]
            continue
        try:
            inside = [one for one in path.iterdir() if not one.name.startswith(".")]
        except OSError as error:
            raise _unreadable(path, error) from None
        if not any(map(is_table_name, inside)):
            raise CommandError(
                f"the folder {path} has no file in it whose name ends in {', '.join(SUFFIXES)}; "
                "check the path"
            )
        found += filter(is_table_name, inside)
    found.sort(key=lambda one: one.name)
    for one, other in itertools.pairwise(found):
        if one.name == other.name:
            raise CommandError(
                f"the inputs {one} and {other} have the same name, by which the files of the "
                "output are called; give each once, under a name of its own"
            )
    return found


def open_table(path: pathlib.Path) -> Table:
    """Returns the table in a file; only its columns have been read."""
    if path == STREAM:
        return StdinTable()
    kind = format_of(path, "the input")
    return ParquetTable(path) if kind == "parquet" else CsvTable(path, gzipped=kind == "csv.gz")


def no_rows(path: pathlib.Path) -> CommandError:
    """Returns the error for a table without rows."""
    return CommandError(
        f"the input {path} has no rows below its header line; there is nothing to randomize"
    )


class Table(abc.ABC):
    """A file with named ``columns``, in the order of the file, whose ids have Arrow ``types``."""

    columns: list[str]
    types: dict[str, Any]

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._version = self._stat()

    @abc.abstractmethod
    def chunks(
        self, label: str, kind: ColumnKind, ids: Sequence[str]
    ) -> Iterator[tuple[Any, list[Any]]]:
        """Yields Arrow arrays: the labels, of the kind's type, and each column of ids."""

    def check_unchanged(self) -> None:
        """Raises if the file has been written to since it was opened."""
        if self._stat() != self._version:
            raise CommandError(
                f"the input {self.path} changed while it was read; run again once it is complete"
            )

    def _stat(self) -> tuple[int, int, int]:
        with self._explained():
            found = os.stat(self.path)
        if not stat.S_ISREG(found.st_mode):
            raise CommandError(
                f"the input {self.path} is not a regular file, which it must be to be read twice; "
                "give the path of a file, or - for stdin"
            )
        return found.st_ino, found.st_size, found.st_mtime_ns

    @contextlib.contextmanager
    def _explained(
        self, columns: Sequence[str] = (), kind: ColumnKind | None = None
    ) -> Iterator[None]:
        """Replaces errors while columns are read: ids, or if there is a kind, the labels."""
        try:
            yield
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise self._explanation(str(error), columns, kind) from None
        except OSError as error:
            raise _unreadable(self.path, error) from None

    def _explanation(
        self, message: str, columns: Sequence[str], kind: ColumnKind | None
    ) -> CommandError:
        return _unreadable(self.path)


class ParquetTable(Table):
    """An Apache Parquet file; ids keep their types."""

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__(path)
        with self._explained(), parquet.ParquetFile(str(path)) as file:
            schema = file.schema_arrow
        self.columns = list(schema.names)
        self.types = dict(zip(schema.names, schema.types, strict=True))

    def chunks(
        self, label: str, kind: ColumnKind, ids: Sequence[str]
    ) -> Iterator[tuple[Any, list[Any]]]:
        found = self.types[label]
        plain = found.value_type if kind is NAME and types.is_dictionary(found) else found
        if not any(suits(plain) for suits in kind.suits):
            raise CommandError(
                f"column {label!r} of {self.path} has type {found}, expected {kind.words}; "
                f"{kind.remedy}"
            )
        # "a" may bring "a.b" along.
        with self._explained(), parquet.ParquetFile(str(self.path)) as file:
            for batch in file.iter_batches(_BATCH_ROWS, columns=[label, *ids]):
                # Unsafe: an unsigned number above 2^63 turns negative, and is refused as such.
                labels = batch.column(label).cast(kind.arrow_type, safe=False)
                yield labels, [batch.column(name) for name in ids]


class CsvTable(Table):
    """Comma-separated values with a header line, UTF-8; ids are kept as the text they are."""

    def __init__(self, path: pathlib.Path, *, gzipped: bool) -> None:
        super().__init__(path)
        self._gzipped = gzipped
        self._check_start()
        self._ignore_empty_lines = True
        self._empty_last_line = False
        with self._explained():
            self.columns = self._names()
        self.types = dict.fromkeys(self.columns, pa.string())
        if len(self.columns) == 1:
            # There an empty line is an empty cell, not the absence of a row; but for the last one.
            self._ignore_empty_lines = False
            self._empty_last_line = re.search(rb"\n\r?\n\Z", self._end()) is not None

    def chunks(
        self, label: str, kind: ColumnKind, ids: Sequence[str]
    ) -> Iterator[tuple[Any, list[Any]]]:
        columns = [label, *ids]
        with self._explained(columns, kind), self._reader(columns, kind) as reader:
            for batch, following in itertools.pairwise(itertools.chain(reader, [None])):
                if following is None and self._empty_last_line:
                    batch = batch.slice(0, max(batch.num_rows - 1, 0))
                yield batch.column(0), [batch.column(name) for name in ids]

    def _names(self) -> list[str]:
        """Returns the names of the columns, most often from less than a block."""
        if _HEADER_BYTES < _BLOCK_BYTES:
            with contextlib.suppress(pa.ArrowException):
                with self._reader(block_bytes=_HEADER_BYTES, use_threads=False) as reader:
                    return list(reader.schema.names)
        with self._reader() as reader:
            return list(reader.schema.names)

    def _reader(
        self,
        columns: Sequence[str] = (),
        kind: ColumnKind | None = None,
        use_threads: bool = True,
        block_bytes: int | None = None,
    ) -> Any:
        column_types = dict.fromkeys(columns, pa.string())
        if kind is not None:
            column_types[columns[0]] = kind.arrow_type
        return csv.open_csv(
            self._stream(),
            csv.ReadOptions(block_size=block_bytes or _BLOCK_BYTES, use_threads=use_threads),
            csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=self._ignore_empty_lines),
            csv.ConvertOptions(
                include_columns=list(columns), column_types=column_types, null_values=_MISSING
            ),
        )

    def _stream(self) -> Any:
        return pa.input_stream(str(self.path), compression="gzip" if self._gzipped else None)

    def _check_start(self) -> None:
        """Raises for files that begin like something else than UTF-8 text."""
        with self._explained(), self._stream() as stream:
            start = stream.read(4)
        if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise CommandError(
                f"the input {self.path} is UTF-16 text, as Excel and PowerShell write it; save it "
                "as UTF-8"
            )
        if start[:2] == b"\x1f\x8b":
            remedy = (
                " in another; unpack one" if self._gzipped else "; name it .csv.gz, or unpack it"
            )
            raise CommandError(f"the input {self.path} is a gzip archive{remedy}")

    def _end(self) -> bytes:
        """Returns the last bytes of the text."""
        end = b""
        with self._explained(), self._stream() as stream:
            while block := stream.read(_BLOCK_BYTES):
                end = (end + block)[-3:]
        return end

    def _explanation(
        self, message: str, columns: Sequence[str], kind: ColumnKind | None
    ) -> CommandError:
        """Returns what Arrow's message means, without the cell that it quotes."""
        start = f"the input {self.path}"
        if "Empty CSV file or block" in message:
            return no_rows(self.path)
        if "Empty CSV file" in message:
            return CommandError(f"{start} is empty; give a CSV file with a header line")
        if "straddling object" in message:
            return CommandError(
                f"{start} has a row longer than {_BLOCK_BYTES >> 20} MB; look for a quote that is "
                "not closed"
            )
        row = self._row_of_error(columns, kind)
        if ragged := re.search(r"Expected (\d+) columns, got (\d+)", message):
            return CommandError(
                f"{start} has {ragged[2]} cells{row}, but {ragged[1]} columns; repair that row (a "
                "cell with a comma or a quote must be quoted)"
            )
        if "UTF8" in message or "utf-8" in message:
            return CommandError(f"{start} is not UTF-8 text{row}; convert it to UTF-8")
        if "conversion error" in message and kind is not None:
            return CommandError(
                f"column {columns[0]!r} of {self.path} holds something that is not "
                f"{kind.words}{row}; {kind.remedy}"
            )
        return CommandError(
            f"{start} cannot be read as CSV{row}; check that it has a header line and commas "
            "between the cells"
        )

    def _row_of_error(self, columns: Sequence[str], kind: ColumnKind | None) -> str:
        """Returns where reading stops, in words; only the serial reader counts rows."""
        try:
            with self._reader(columns, kind, use_threads=False) as reader:
                for _ in reader:
                    pass
        except Exception as error:
            row = re.search(r"Row #(\d+)", str(error))
            return f" in row {row[1]} (the header is row 1)" if row else ""
        return ""


class StdinTable(CsvTable):
    """The CSV text of stdin, kept in memory: it never lies on a disk."""

    def __init__(self) -> None:
        if sys.stdin is None:
            raise CommandError("the input - is stdin, which is closed; give the path of a file")
        with self._explained():
            self._text = sys.stdin.buffer.read()
        super().__init__(pathlib.Path("stdin"), gzipped=False)

    def _stat(self) -> tuple[int, int, int]:
        return 0, 0, 0

    def _stream(self) -> Any:
        return pa.input_stream(pa.py_buffer(self._text))


def is_table_name(path: pathlib.Path) -> bool:
    """Returns whether a path has the name of a table, rather than that of a folder."""
    return _suffix_of(path) is not None


def _matches(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files that a pattern matches; none for the path of a file."""
    if os.path.lexists(path) or not glob.has_magic(os.fspath(path)):
        return []
    return [pathlib.Path(name) for name in glob.glob(os.fspath(path), recursive=True)]


def _suffix_of(path: pathlib.Path) -> str | None:
    """Returns ``"csv"``, ``"csv.gz"`` or ``"parquet"``, by the end of the name; None for others."""
    for suffix, name in SUFFIXES.items():
        if path.name.lower().endswith(suffix):
            return name
    return None


def format_of(path: pathlib.Path, option: str) -> str:
    """Returns the format of a file, or raises."""
    found = _suffix_of(path)
    if found is None:
        raise CommandError(
            f"the format of {option} {path} is not known by its name; name it {', '.join(SUFFIXES)}"
        )
    return found


def _unreadable(path: pathlib.Path, error: OSError | None = None) -> CommandError:
    """Returns the error for a file that is damaged, or that the system refuses to read."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return CommandError(f"the input {path} does not exist; check the path")
    code = error.errno if error else None
    reason = os.strerror(code) if code else "damaged, or not what its name says"
    return CommandError(f"the input {path} cannot be read ({reason}); copy or make it again")
