"""Tables of labels in CSV and Parquet files: read chunk by chunk, written whole or not at all.

Errors name columns and rows and count cells, but never show one: Arrow's own messages quote the
text that they could not convert, so none of them is passed on.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import gzip
import itertools
import json
import os
import pathlib
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, parquet, types

from tf_labeldp.cli._console import CommandError
from tf_labeldp.vault._store import give_name

_fcntl: Any
try:
    import fcntl

    _fcntl = fcntl
except ImportError:  # not on Windows
    _fcntl = None


@dataclasses.dataclass(frozen=True)
class LabelKind:
    """What a label column may hold."""

    words: str
    arrow_type: Any  # that the labels are read as
    remedy: str  # what to do about a column that holds something else
    suits: tuple[Callable[[Any], bool], ...]  # tests of a Parquet column's type; one must hold


NUMBER = LabelKind(
    "a number",
    pa.float64(),
    "repair the column, or give the --column that holds the labels",
    (types.is_integer, types.is_floating, types.is_decimal),
)
CLASS = LabelKind(
    "a whole number",
    pa.int64(),
    "classes are numbered 0, 1, ..., without a decimal point; give --classes for names",
    (types.is_integer,),
)
NAME = LabelKind(
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

MADE_BY = "tf-labeldp"
"""How the entry ``made_by`` of a statement begins."""

_MISSING = ["", "NA", "N/A", "NULL", "null", "None"]
"""Cells of a CSV number column that hold no number on purpose."""

_BLOCK_BYTES = 16 << 20
"""A CSV file is read in blocks of this size; a row must fit into one."""
_BATCH_ROWS = 1 << 16
"""A Parquet file is read in batches of at most this many rows."""
_ROW_GROUP_ROWS = 1 << 20
"""Rows of a Parquet row group that is written, but for the last one."""

_SUFFIXES = {".csv": "csv", ".csv.gz": "csv.gz", ".parquet": "parquet"}
_LONGEST_PART = "-old-statement"
"""Of the names of hidden files."""


def open_table(path: pathlib.Path) -> Table:
    """Returns the table in a file; only its columns have been read."""
    kind = _format_of(path, "the input")
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
    def label_chunks(self, column: str, kind: LabelKind) -> Iterator[Any]:
        """Yields Arrow arrays of the labels, of the kind's type."""

    @abc.abstractmethod
    def _batches(self, columns: Sequence[str]) -> Iterator[Any]:
        """Yields record batches with these columns, and perhaps others."""

    def id_chunks(self, columns: Sequence[str]) -> Iterator[list[Any]]:
        """Yields lists of Arrow arrays, one per column."""
        for batch in self._batches(columns):
            yield [batch.column(name) for name in columns]

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
                "give the path of a file"
            )
        return found.st_ino, found.st_size, found.st_mtime_ns

    @contextlib.contextmanager
    def _explained(
        self, columns: Sequence[str] = (), kind: LabelKind | None = None
    ) -> Iterator[None]:
        """Replaces errors while columns are read: ids, or if there is a kind, the labels."""
        try:
            yield
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise self._explanation(str(error), columns, kind) from None
        except OSError as error:
            raise _unreadable(self.path, error) from None

    def _explanation(
        self, message: str, columns: Sequence[str], kind: LabelKind | None
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

    def label_chunks(self, column: str, kind: LabelKind) -> Iterator[Any]:
        found = self.types[column]
        plain = found.value_type if kind is NAME and types.is_dictionary(found) else found
        if not any(suits(plain) for suits in kind.suits):
            raise CommandError(
                f"column {column!r} of {self.path} has type {found}, expected {kind.words}; "
                f"{kind.remedy}"
            )
        for batch in self._batches([column]):
            with self._explained():
                # Unsafe: an unsigned number above 2^63 turns negative, and is refused as such.
                chunk = batch.column(column).cast(kind.arrow_type, safe=False)
            yield chunk

    def _batches(self, columns: Sequence[str]) -> Iterator[Any]:
        # "a" may bring "a.b" along.
        with self._explained(), parquet.ParquetFile(str(self.path)) as file:
            yield from file.iter_batches(_BATCH_ROWS, columns=list(columns))


class CsvTable(Table):
    """Comma-separated values with a header line, UTF-8; ids are kept as the text they are."""

    def __init__(self, path: pathlib.Path, *, gzipped: bool) -> None:
        super().__init__(path)
        self._gzipped = gzipped
        self._check_start()
        self._ignore_empty_lines = True
        self._empty_last_line = False
        with self._explained(), self._reader() as reader:
            self.columns = list(reader.schema.names)
        self.types = dict.fromkeys(self.columns, pa.string())
        if len(self.columns) == 1:
            # There an empty line is an empty cell, not the absence of a row; but for the last one.
            self._ignore_empty_lines = False
            self._empty_last_line = re.search(rb"\n\r?\n\Z", self._end()) is not None

    def label_chunks(self, column: str, kind: LabelKind) -> Iterator[Any]:
        for batch in self._batches([column], kind):
            yield batch.column(0)

    def _batches(self, columns: Sequence[str], kind: LabelKind | None = None) -> Iterator[Any]:
        with self._explained(columns, kind), self._reader(columns, kind) as reader:
            for batch, following in itertools.pairwise(itertools.chain(reader, [None])):
                last = following is None and self._empty_last_line
                yield batch.slice(0, max(batch.num_rows - 1, 0)) if last else batch

    def _reader(
        self, columns: Sequence[str] = (), kind: LabelKind | None = None, use_threads: bool = True
    ) -> Any:
        return csv.open_csv(
            self._stream(),
            csv.ReadOptions(block_size=_BLOCK_BYTES, use_threads=use_threads),
            csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=self._ignore_empty_lines),
            csv.ConvertOptions(
                include_columns=list(columns),
                column_types=dict.fromkeys(columns, kind.arrow_type if kind else pa.string()),
                null_values=_MISSING,
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
            remedy = " in another; unpack one" if self._gzipped else "; name it .csv.gz"
            raise CommandError(f"the input {self.path} is a gzip archive{remedy}")

    def _end(self) -> bytes:
        """Returns the last bytes of the text."""
        end = b""
        with self._explained(), self._stream() as stream:
            while block := stream.read(_BLOCK_BYTES):
                end = (end + block)[-3:]
        return end

    def _explanation(
        self, message: str, columns: Sequence[str], kind: LabelKind | None
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

    def _row_of_error(self, columns: Sequence[str], kind: LabelKind | None) -> str:
        """Returns where reading stops, in words; only the serial reader counts rows."""
        try:
            with self._reader(columns, kind, use_threads=False) as reader:
                for _ in reader:
                    pass
        except Exception as error:
            row = re.search(r"Row #(\d+)", str(error))
            return f" in row {row[1]} (the header is row 1)" if row else ""
        return ""


def statement_path(output: pathlib.Path) -> pathlib.Path:
    """Returns where the privacy statement of an output lies."""
    return output.with_name(f"{output.name}.privacy.json")


class Output:
    """A table that gets its name once it is complete; left early, it leaves nothing behind.

    It is written to a hidden file beside ``path``, under a lock that refuses a second run.
    ``publish`` gives the statement its name first, so whoever finds the table finds its statement
    too; a statement alone was left by a run that was killed between the two, and is replaced. An
    old table is moved away before its statement is: a kill leaves no table under the statement of
    another run.

    Args:
        path: of the table; its suffix decides the format.
        columns: the names and Arrow types of its columns.
        overwrite: whether files of these names may be replaced.
        source: the input, which must be another file.

    Raises:
        CommandError: nothing can be written there.
    """

    def __init__(
        self,
        path: pathlib.Path,
        columns: Sequence[tuple[str, Any]],
        *,
        overwrite: bool,
        source: pathlib.Path,
    ) -> None:
        self.path = path
        self.statement = statement_path(path)
        self._columns = columns
        self._format = _format_of(path, "--output")
        self._overwrite = overwrite
        with self._explained():
            if path.exists() and path.samefile(source):
                raise CommandError(f"--output {path} is the input itself; give another path")
            if not path.parent.is_dir():
                raise CommandError(
                    f"the folder of --output {path} does not exist; make {path.parent} first"
                )
        self._temporary = self._hidden("")

    def __enter__(self) -> Output:
        """Starts the hidden file, so that a folder or a column that it cannot hold is found out."""
        with contextlib.ExitStack() as undo, self._explained():
            lock = OutputLock(self.path)
            locked = lock.acquire()
            undo.callback(lock.release)
            for target in (self.path, self.statement):
                if os.path.lexists(target) and not self._may_replace(target):
                    raise CommandError(
                        f"{target} exists; give another --output, or --overwrite to replace it"
                    )
            if locked:  # else they may be those of a run that is at work
                self._remove_leftovers()
            with contextlib.suppress(FileNotFoundError):
                os.lstat(self._hidden(_LONGEST_PART))  # too long a name is found out now
            self._file = open(self._temporary, "xb")
            undo.callback(self._temporary.unlink, missing_ok=True)
            undo.callback(_close, self._file)
            self._writer: CsvWriter | ParquetWriter
            if self._format == "parquet":
                self._writer = ParquetWriter(self._file, self._columns)
            else:
                self._writer = CsvWriter(self._file, self._columns, self._format == "csv.gz")
            undo.callback(_close, self._writer)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        """Removes what has not been published."""
        self._undo.close()

    def write(self, arrays: Sequence[Any]) -> None:
        """Appends rows: one Arrow array a column, all of the same length."""
        with self._explained():
            self._writer.write(arrays)

    def publish(self, statement: str) -> None:
        """Puts the table and its statement on disk, whole, under their names."""
        hidden = self._hidden("-statement")
        with self._explained():
            try:
                self._writer.close()
                _sync(self._file)
                with open(hidden, "xb") as file:
                    file.write(statement.encode())
                    _sync(file)
                self._give_names(hidden)
            finally:
                hidden.unlink(missing_ok=True)

    def _give_names(self, statement: pathlib.Path) -> None:
        """Gives statement and table their names, or leaves all as it was."""
        made = {self.path: os.stat(self._temporary), self.statement: os.stat(statement)}
        old = {self.path: self._hidden("-old"), self.statement: self._hidden(_LONGEST_PART)}
        try:
            for target, aside in old.items():  # the table goes first
                if os.path.lexists(target) and self._may_replace(target):
                    os.replace(target, aside)
            give_name(statement, self.statement)
            give_name(self._temporary, self.path)
        except BaseException:
            for target, mine in made.items():
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.lstat(target), mine):
                        target.unlink()
            for target, aside in reversed(old.items()):  # the table comes last
                with contextlib.suppress(OSError):
                    give_name(aside, target)
            raise
        finally:
            for aside in old.values():
                aside.unlink(missing_ok=True)

    def _may_replace(self, target: pathlib.Path) -> bool:
        """Returns whether this run may put its own file in the place of one that is there."""
        if target.is_dir():
            raise CommandError(f"{target} is a folder; give another --output")
        if self._overwrite:
            return True
        # A statement without its table is that of a killed run.
        alone = target == self.statement and not os.path.lexists(self.path)
        return alone and _is_statement(target)

    def _hidden(self, part: str) -> pathlib.Path:
        return self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}{part}.tmp")

    def _remove_leftovers(self) -> None:
        """Removes the hidden files of earlier runs for this output that were killed."""
        name = re.escape(self.path.name)
        leftover = re.compile(rf"\.{name}\.[0-9a-f]{{16}}(-old)?(-statement)?\.tmp")
        for path in self.path.parent.iterdir():
            if leftover.fullmatch(path.name):
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except FileExistsError as error:
            raise CommandError(
                f"{error.filename} has come into being meanwhile; give another --output"
            ) from None
        except OSError as error:
            reason = f" ({os.strerror(error.errno)})" if error.errno else ""
            raise CommandError(
                f"cannot write --output {self.path}{reason}; make room or give another place"
            ) from None
        except pa.ArrowException:
            raise CommandError(
                f"an id column holds something that a .{self._format} file cannot; name other "
                "columns with --id, or give a .parquet --output"
            ) from None


class OutputLock:
    """A lock on a hidden file beside the output, which the system lifts when the process dies."""

    def __init__(self, output: pathlib.Path) -> None:
        self._output = output
        self._path = output.with_name(f".{output.name}.lock")
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Returns whether the lock is held now; False where the system has no such locks."""
        while _fcntl is not None:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                _fcntl.flock(descriptor, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                raise CommandError(
                    f"another run is writing --output {self._output} at this moment; wait for it, "
                    "or give another --output"
                ) from None
            except OSError:  # a file system without locks
                os.close(descriptor)
                self._path.unlink(missing_ok=True)
                return False
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(self._path)):
                    self._descriptor = descriptor
                    return True
            os.close(descriptor)  # of a run that ended in between, and removed it
        return False

    def release(self) -> None:
        """Lifts the lock, if it is held, and removes its file."""
        if self._descriptor is not None:
            # Removed before it is unlocked: nobody else can hold a lock on this file by then.
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None


class CsvWriter:
    """Comma-separated values in UTF-8; unlike Arrow's, quotes only the cells that need it."""

    def __init__(self, file: IO[bytes], columns: Sequence[tuple[str, Any]], gzipped: bool) -> None:
        for _, kind in columns:
            _check_text(kind)
        # No name and no time in the header of the archive.
        self._gzip = gzip.GzipFile("", "wb", 6, file, 0) if gzipped else None
        self._file: Any = self._gzip or file
        self.write([pa.array([name]) for name, _ in columns])

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
    """A Parquet file without metadata of the input, in large row groups."""

    def __init__(self, file: IO[bytes], columns: Sequence[tuple[str, Any]]) -> None:
        # Names and types alone: metadata of the input's schema may say anything.
        self._schema = pa.schema(list(columns))
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
    binary = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary)
    if str(kind) == "binary_view" or any(one(kind) for one in (*binary, types.is_duration)):
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


def _format_of(path: pathlib.Path, option: str) -> str:
    """Returns ``"csv"``, ``"csv.gz"`` or ``"parquet"``, by the end of the name."""
    for suffix, name in _SUFFIXES.items():
        if path.name.lower().endswith(suffix):
            return name
    raise CommandError(
        f"the format of {option} {path} is not known by its name; name it {', '.join(_SUFFIXES)}"
    )


def _unreadable(path: pathlib.Path, error: OSError | None = None) -> CommandError:
    """Returns the error for a file that is damaged, or that the system refuses to read."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return CommandError(f"the input {path} does not exist; check the path")
    code = error.errno if error else None
    reason = os.strerror(code) if code else "damaged, or not what its name says"
    return CommandError(f"the input {path} cannot be read ({reason}); copy or make it again")


def _is_statement(path: pathlib.Path) -> bool:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return str(content["made_by"]).startswith(MADE_BY)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _close(file: Any) -> None:
    """Closes a file or a writer whose content nobody will see."""
    with contextlib.suppress(Exception):
        file.close()
