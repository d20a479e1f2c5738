"""Input tables of labels, in CSV and Parquet files.

Several files are one table, whose rows are in the order of the file names. Errors name columns and
rows and count cells, but quote none. Arrow's messages quote cells, so none of them is passed on.
"""

from __future__ import annotations

import abc
import codecs
import contextlib
import difflib
import glob
import itertools
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, parquet, types

from tf_labeldp._validate import counted
from tf_labeldp.cli._cells import COMMA, POINT, Cells
from tf_labeldp.cli._console import CommandError
from tf_labeldp.cli._forms import Form, TableForms, as_type


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
_COMMENT = re.compile(rb"\s*(?:#|//|%)")
"""The start of a line above the header line that is no part of the table."""
_QUOTED = re.compile(rb'"(?:[^"]|"")*"')
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


def check_one_convention(tables: Sequence[Table], label: str) -> None:
    """Raises if labels that could be read in two ways are next to a file with decimal commas."""
    commas = [table for table in tables if table.decimal == COMMA]
    unclear = [table for table in tables if table.has_open_label]
    if commas and unclear:
        raise CommandError(
            f"column {label!r} has decimal commas in {commas[0].path}, and can be read in two ways "
            f"in {unclear[0].path}; {as_type(label, 'number:comma')} or number:point says how"
        )


def near_names(name: str, names: Sequence[str]) -> str:
    """Returns advice on a name that is not among others."""
    same = [other for other in names if other.strip().casefold() == name.strip().casefold()]
    near = same or difflib.get_close_matches(name, names)
    return f"do you mean {', '.join(near)}?" if near else "check its header line"


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


_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}


class Dialect(NamedTuple):
    """The form of a CSV file, which its predictions get too."""

    delimiter: str = ""  # empty for a file of another kind
    line_end: str = "\n"
    quotes: str = "needed"  # which cells have them: those that need some, "texts", or "all"
    encoding: str = "utf8"
    has_mark: bool = False  # of UTF-8, at the start of the file


class Table(abc.ABC):
    """A file with named ``columns`` in the file's order; ids have the Arrow ``types``."""

    columns: list[str]
    types: dict[str, Any]
    dialect = Dialect()  # of a CSV file
    decimal = ""  # the decimal sign, POINT or COMMA, once the cells are read
    has_open_label = False  # whether no cell shows the decimal sign of the labels
    named: Mapping[str, Form] = {}  # the forms of --types
    _remarks: tuple[str, ...] = ()
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

    def whole(self) -> Any:
        """Returns all columns; those of a CSV file are text."""
        table = self._whole()
        if not table.num_rows:
            raise no_rows(self.path)
        return table

    @property
    def remarks(self) -> tuple[str, ...]:
        """Lines on what was found in the file; after reading also on its decimal sign."""
        if self.decimal != COMMA:
            return self._remarks
        first, *others = self._remarks or ("",)
        if "cells between" in first:
            return (f"{first}, and numbers have a decimal comma", *others)
        return (*self._remarks, f"numbers of {self.path} have a decimal comma")

    @abc.abstractmethod
    def _whole(self) -> Any:
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

    def _whole(self) -> Any:
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
        self._encoding = "utf8"
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
        has_mark = start.startswith(codecs.BOM_UTF8)
        lines = start.removeprefix(codecs.BOM_UTF8).splitlines(keepends=True)
        separator = _SEPARATOR.fullmatch(lines[0]) if lines else None
        comments = 0 if separator else _num_comments(lines)
        self._lines_before = 1 if separator else comments
        header, *others = [*filter(bytes.strip, lines[self._lines_before :]), b""]
        delimiter = _delimiter_of(header, others[0] if others else b"")
        if separator is not None and separator[1].isascii():
            delimiter = separator[1].decode()
        self.dialect = Dialect(
            delimiter,
            "\r\n" if header.endswith(b"\r\n") else "\n",
            _quotes_of(header, others[0] if others else b"", delimiter.encode()),
            has_mark=has_mark,
        )
        if delimiter != ",":
            words = _DELIMITERS.get(delimiter, repr(delimiter))
            self._remarks = (f"{self.path} has its cells between {words}",)
        if comments:
            number = counted(comments, "line")
            self._remarks += (f"{self.path} has {number} of comments above its header line",)

    def _decoded(self, read: Callable[[], Any]) -> Any:
        """Returns what ``read`` does, in Latin-1 if the text is not UTF-8."""
        try:
            return read()
        except (pa.ArrowException, UnicodeDecodeError) as error:
            if self._encoding != "utf8" or not re.search("(?i)utf-?8", str(error)):
                raise
        self._encoding = _LATIN_1
        self.dialect = self.dialect._replace(encoding=_LATIN_1)
        self._remarks += (
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

    def _whole(self) -> Any:
        with self._explained():
            return self._named(
                self._decoded(lambda: csv.read_csv(self._stream(), *self._options(self.columns)))
            )

    def _named(self, table: Any) -> Any:
        """Returns the table without columns that have neither a name nor a cell."""
        kept = [
            place
            for place, name in enumerate(table.column_names)
            if name.strip() or pc.any(pc.not_equal(table.column(place), "")).as_py()
        ]
        if len(kept) < table.num_columns and table.num_rows:
            self._remarks += (
                f"{self.path} has a column without a name and without cells (a separator ends each "
                "line), which is left out",
            )
            return table.select(kept)
        return table

    def _read(self, columns: list[str], kind: ColumnKind) -> Any:
        def read() -> Any:
            return csv.read_csv(self._stream(), *self._options(columns, kind))

        with self._explained(columns, kind):
            if kind is not NUMBER:
                return self._decoded(read)
            try:
                table = self._decoded(read)
                if columns[0] not in self.named and self._has_points(table.column(0), columns[0]):
                    return table
            except pa.ArrowInvalid as error:
                if "conversion error" not in str(error):
                    raise
        return self._read_texts(columns)

    def _has_points(self, numbers: Any, label: str) -> bool:
        """Returns whether numbers that were read with decimal points can't be otherwise."""
        values = to_numpy(numbers.fill_null(0.0))
        if (np.floor(values) == values)[np.isfinite(values)].all():
            return True
        try:
            read, *others = self._options([label], NAME, use_threads=False)
            read.block_size = _SNIFFED_BYTES
            with csv.open_csv(self._stream(), read, *others) as reader:
                first = reader.read_next_batch().column(0)
        except pa.ArrowException:  # a row longer than a block
            return False
        return Cells(first).numbers.evidence == {POINT}

    def _read_texts(self, columns: list[str]) -> Any:
        """Returns labels of numbers in the convention that all columns of the file show."""
        label, *ids = columns
        table = self._whole()
        named = {name: form for name, form in self.named.items() if name in table.column_names}
        forms = TableForms(table, named, self.dialect.delimiter)
        forms.read([], label)
        numbers, row = forms.number_label(label)
        if row is not None:
            place = f" in row {row + 2:,} (the header is row 1)"
            text = _CSV_ERRORS["conversion error"]
            raise CommandError(text.format(path=self.path, row=place, label=label, kind=NUMBER))
        self.decimal, self.has_open_label = forms.decimal, forms.is_label_open
        self._remarks += tuple(forms.remarks)
        return pa.table([numbers, *map(table.column, ids)], names=columns)

    def _options(
        self,
        columns: Sequence[str] = (),
        kind: ColumnKind | None = None,
        use_threads: bool | None = None,
    ) -> tuple[Any, Any, Any]:
        """Returns Arrow's options; labels of a kind are the first column, all else is text."""
        column_types = dict.fromkeys(columns, pa.string())
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
                delimiter=self.dialect.delimiter,
                newlines_in_values=True,
                ignore_empty_lines=ignore_empty_lines,
            ),
            csv.ConvertOptions(
                include_columns=list(columns) if kind is not None else [],
                column_types=column_types,
                null_values=_MISSING,
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


def _num_comments(lines: Sequence[bytes]) -> int:
    """Returns the number of lines above the header line, up to the last comment.

    A first name may begin with such a mark: then its line has as many cells as the next one.
    """
    comments = 0
    for place, (line, following) in enumerate(itertools.pairwise(lines), 1):
        if line.strip() and not _COMMENT.match(line):
            break
        if _COMMENT.match(line):
            mark = _delimiter_of(following, b"").encode()
            if not _COMMENT.match(following) and _marks(line, mark) == _marks(following, mark):
                break
            comments = place
    return comments


def _delimiter_of(header: bytes, following: bytes) -> str:
    """Returns the mark between cells that a header line shows best, by the line below it too."""

    def score(delimiter: str) -> tuple[bool, int]:
        mark = delimiter.encode()
        number = _marks(header, mark)
        return number > 0 and number == _marks(following, mark), number

    return max(_DELIMITERS, key=score)


def _quotes_of(header: bytes, following: bytes, mark: bytes) -> str:
    quoted = [
        line.startswith(b'"') and not _QUOTED.sub(b"", line).strip().strip(mark)
        for line in (header, following)
    ]
    return "needed" if not quoted[0] else "all" if quoted[1] else "texts"


def _marks(line: bytes, mark: bytes) -> int:
    return _QUOTED.sub(b"", line).count(mark)
