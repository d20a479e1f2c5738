"""Tables of labels in CSV and Parquet files: read chunk by chunk, written whole or not at all.

Errors name columns and rows and count cells, but never show one: Arrow's own messages quote the
text that they could not convert, so none of them is passed on.
"""

from __future__ import annotations

import abc
import contextlib
import gzip
import json
import os
import pathlib
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import IO, Any, NoReturn

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

NUMBER, CLASS, NAME = "a number", "a whole number", "a class name"
"""What a label column may hold."""

_ARROW_TYPES = {NUMBER: pa.float64(), CLASS: pa.int64(), NAME: pa.string()}
_REMEDIES = {
    NUMBER: "repair the column, or give the --column that holds the labels",
    CLASS: "classes are numbered 0, 1, ..., without a decimal point; give --classes for names",
    NAME: "give the --column that holds the labels",
}
"""What to do about a column that holds something else."""

FILL = (
    "fill them by a rule that does not look at labels, or choose the rows to send by features "
    "alone: which rows are in the table must not depend on labels"
)
"""What to do about labels that are missing."""

MADE_BY = "tf-labeldp"
"""How the entry ``made_by`` of a statement begins."""

_MISSING = ["", "NA", "N/A", "NULL", "null", "None"]
"""Cells of a number column of a CSV file that hold no number on purpose."""

_BLOCK_BYTES = 16 << 20
"""A CSV file is read in blocks of this size; a row must fit into one."""
_BATCH_ROWS = 1 << 16
"""A Parquet file is read in batches of at most this many rows."""
_ROW_GROUP_ROWS = 1 << 20
"""Rows a Parquet row group that is written, but for the last one."""

_SUFFIXES = {".csv": "csv", ".csv.gz": "csv.gz", ".parquet": "parquet"}
_LONGEST_PART = "-old-statement"
"""Of the names of hidden files."""


def open_table(path: pathlib.Path) -> Table:
    """Returns the table in a file; only its columns have been read."""
    kind = _format_of(path, "the input")
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise CommandError(f"the input {path} does not exist; check the path") from None
    except OSError as error:
        raise _unreadable(path, error) from None
    if not stat.S_ISREG(found.st_mode):
        raise CommandError(
            f"the input {path} is not a regular file, which it must be to be read twice; give the "
            "path of a file"
        )
    return ParquetTable(path) if kind == "parquet" else CsvTable(path, gzipped=kind == "csv.gz")


def no_rows(path: pathlib.Path) -> CommandError:
    """Returns the error for a table without rows."""
    return CommandError(
        f"the input {path} has no rows below its header line; there is nothing to randomize"
    )


class Table(abc.ABC):
    """A file with named ``columns``, in the order of the file."""

    columns: list[str]

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._version = self._stat()

    @abc.abstractmethod
    def label_chunks(self, column: str, kind: str) -> Iterator[Any]:
        """Yields Arrow arrays of the labels: floats, integers or texts, by the kind."""

    @abc.abstractmethod
    def id_chunks(self, columns: Sequence[str]) -> Iterator[list[Any]]:
        """Yields lists of Arrow arrays, one per column."""

    @abc.abstractmethod
    def id_types(self, columns: Sequence[str]) -> list[Any]:
        """Returns the Arrow types of what ``id_chunks`` yields."""

    def check_unchanged(self) -> None:
        """Raises if the file has been written to since it was opened."""
        if self._stat() != self._version:
            raise CommandError(
                f"the input {self.path} changed while it was read; run again once it is complete"
            )

    def _stat(self) -> tuple[int, int, int]:
        try:
            found = os.stat(self.path)
        except OSError as error:
            raise _unreadable(self.path, error) from None
        return found.st_ino, found.st_size, found.st_mtime_ns


class ParquetTable(Table):
    """An Apache Parquet file; ids keep their types."""

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__(path)
        with self._explained(), parquet.ParquetFile(str(path)) as file:
            schema = file.schema_arrow
        self.columns = list(schema.names)
        self._types = dict(zip(schema.names, schema.types, strict=True))

    def label_chunks(self, column: str, kind: str) -> Iterator[Any]:
        found = self._types[column]
        if not _suits(found, kind):
            raise CommandError(
                f"column {column!r} of {self.path} has type {found}, expected {kind}; "
                f"{_REMEDIES[kind]}"
            )
        for batch in self._batches([column]):
            with self._explained():
                # Unsafe: an unsigned number above 2^63 turns negative, and is refused as such.
                chunk = batch.column(column).cast(_ARROW_TYPES[kind], safe=False)
            yield chunk

    def id_chunks(self, columns: Sequence[str]) -> Iterator[list[Any]]:
        for batch in self._batches(columns):
            yield [batch.column(name) for name in columns]

    def id_types(self, columns: Sequence[str]) -> list[Any]:
        return [self._types[name] for name in columns]

    def _batches(self, columns: Sequence[str]) -> Iterator[Any]:
        """Yields batches with these columns, and perhaps others: "a" may bring "a.b" along."""
        with self._explained(), parquet.ParquetFile(str(self.path)) as file:
            yield from file.iter_batches(_BATCH_ROWS, columns=list(columns))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, UnicodeDecodeError):
            raise _unreadable(self.path) from None
        except OSError as error:
            raise _unreadable(self.path, error) from None


class CsvTable(Table):
    """Comma-separated values with a header line, UTF-8; ids are kept as the text they are."""

    def __init__(self, path: pathlib.Path, *, gzipped: bool) -> None:
        super().__init__(path)
        self._gzipped = gzipped
        self._check_start()
        self._ignore_empty_lines = True
        self._empty_last_line = False
        with self._explained(None), self._reader(None) as reader:
            self.columns = list(reader.schema.names)
        if len(self.columns) == 1:
            # There an empty line is an empty cell, not the absence of a row; but for the last one.
            self._ignore_empty_lines = False
            self._empty_last_line = re.search(rb"\n\r?\n\Z", self._end()) is not None

    def label_chunks(self, column: str, kind: str) -> Iterator[Any]:
        for batch in self._batches({column: _ARROW_TYPES[kind]}, kind):
            yield batch.column(0)

    def id_chunks(self, columns: Sequence[str]) -> Iterator[list[Any]]:
        for batch in self._batches(dict.fromkeys(columns, pa.string())):
            yield batch.columns

    def id_types(self, columns: Sequence[str]) -> list[Any]:
        return [pa.string()] * len(columns)

    def _batches(self, columns: dict[str, Any], kind: str = "") -> Iterator[Any]:
        with self._explained(columns, kind), self._reader(columns) as reader:
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

    def _reader(self, columns: dict[str, Any] | None, use_threads: bool = True) -> Any:
        return csv.open_csv(
            self._stream(),
            csv.ReadOptions(block_size=_BLOCK_BYTES, use_threads=use_threads),
            csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=self._ignore_empty_lines),
            csv.ConvertOptions(
                include_columns=None if columns is None else list(columns),
                column_types=columns,
                null_values=_MISSING,
            ),
        )

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

    @contextlib.contextmanager
    def _explained(self, columns: dict[str, Any] | None, kind: str = "") -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, UnicodeDecodeError) as error:
            self._explain(str(error), columns, kind)
        except OSError as error:
            raise _unreadable(self.path, error) from None

    def _explain(self, message: str, columns: dict[str, Any] | None, kind: str) -> NoReturn:
        """Raises what Arrow's message means, without the cell that it quotes."""
        if "Empty CSV file or block" in message:
            raise no_rows(self.path) from None
        if "Empty CSV file" in message:
            problem = "is empty; give a CSV file with a header line"
        elif "straddling object" in message:
            problem = (
                f"has a row longer than {_BLOCK_BYTES >> 20} MB; look for a quote that is not "
                "closed"
            )
        else:
            row = self._row_of_error(columns)
            ragged = re.search(r"Expected (\d+) columns, got (\d+)", message)
            if ragged:
                problem = (
                    f"has {ragged[2]} cells{row}, but {ragged[1]} columns; repair that row (a cell "
                    "with a comma or a quote must be quoted)"
                )
            elif "UTF8" in message or "utf-8" in message:
                problem = f"is not UTF-8 text{row}; convert it to UTF-8"
            elif "conversion error" in message and columns is not None and len(columns) == 1:
                raise CommandError(
                    f"column {next(iter(columns))!r} of {self.path} holds something that is not "
                    f"{kind}{row}; {_REMEDIES[kind]}"
                ) from None
            else:
                problem = (
                    f"cannot be read as CSV{row}; check that it has a header line and commas "
                    "between the cells"
                )
        raise CommandError(f"the input {self.path} {problem}") from None

    def _row_of_error(self, columns: dict[str, Any] | None) -> str:
        """Returns where reading stops, in words; only the serial reader counts rows."""
        try:
            with self._reader(columns, use_threads=False) as reader:
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
        overwrite: whether files of these names may be replaced.
        source: the input, which must be another file.

    Raises:
        CommandError: nothing can be written there.
    """

    def __init__(self, path: pathlib.Path, *, overwrite: bool, source: pathlib.Path) -> None:
        self.path = path
        self.statement = statement_path(path)
        self._format = _format_of(path, "--output")
        self._overwrite = overwrite
        with self._explained():
            if path.exists() and path.samefile(source):
                raise CommandError(f"--output {path} is the input itself; give another path")
            if not path.parent.is_dir():
                raise CommandError(
                    f"the folder of --output {path} does not exist; make {path.parent} first"
                )
        self._lock = OutputLock(path)
        self._temporary = self._hidden("")
        self._file: IO[bytes] | None = None
        self._writer: CsvWriter | ParquetWriter | None = None

    def __enter__(self) -> Output:
        """Creates the hidden file, so that a folder that refuses it is found out at once."""
        try:
            with self._explained():
                locked = self._lock.acquire()
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
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Removes what has not been published."""
        try:
            if self._writer is not None:
                with contextlib.suppress(Exception):
                    self._writer.close()
            if self._file is not None:
                with contextlib.suppress(OSError):
                    self._file.close()
            self._temporary.unlink(missing_ok=True)
        finally:
            self._lock.release()

    def begin(self, names: Sequence[str], types: Sequence[Any]) -> None:
        """Starts the table with the names and Arrow types of its columns."""
        if self._file is None:
            raise RuntimeError("begin() belongs inside the with block of the output")
        with self._explained():
            if self._format == "parquet":
                self._writer = ParquetWriter(self._file, names, types)
            else:
                self._writer = CsvWriter(self._file, names, types, self._format == "csv.gz")

    def write(self, arrays: Sequence[Any]) -> None:
        """Appends rows: one Arrow array a column, all of the same length."""
        if self._writer is None:
            raise RuntimeError("write() comes after begin()")
        with self._explained():
            self._writer.write(arrays)

    def publish(self, statement: str) -> None:
        """Puts the table and its statement on disk, whole, under their names."""
        if self._writer is None or self._file is None:
            raise RuntimeError("publish() comes after write()")
        hidden = self._hidden("-statement")
        with self._explained():
            try:
                self._writer.close()
                self._writer = None
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
    """A lock on a hidden file beside the output, which the system lifts when the process dies.

    Args:
        output: the path that is locked.
    """

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
            if self._is_at_its_path(descriptor):
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

    def _is_at_its_path(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False


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


def _format_of(path: pathlib.Path, option: str) -> str:
    """Returns ``"csv"``, ``"csv.gz"`` or ``"parquet"``, by the end of the name."""
    for suffix, name in _SUFFIXES.items():
        if path.name.lower().endswith(suffix):
            return name
    raise CommandError(
        f"the format of {option} {path} is not known by its name; name it {', '.join(_SUFFIXES)}"
    )


def _unreadable(path: pathlib.Path, error: OSError | None = None) -> CommandError:
    """Returns the error for a file that is damaged or that the system refuses to read."""
    code = error.errno if error else None
    reason = os.strerror(code) if code else "damaged, or not what its name says"
    return CommandError(f"the input {path} cannot be read ({reason}); copy or make it again")


def _suits(found: Any, kind: str) -> bool:
    if kind == CLASS:
        return bool(types.is_integer(found))
    if kind == NUMBER:
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


def _is_statement(path: pathlib.Path) -> bool:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return str(content["made_by"]).startswith(MADE_BY)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
