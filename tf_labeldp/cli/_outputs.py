"""Where noisy labels go: files, folders and streams, written whole or not at all."""

from __future__ import annotations

import abc
import collections
import contextlib
import gzip
import io
import itertools
import json
import os
import pathlib
import re
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, wait
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, parquet, types

from tf_labeldp.cli._console import CommandError, drop_rest
from tf_labeldp.cli._tables import STREAM, SUFFIXES, format_of
from tf_labeldp.vault._noisy_labels import IN_FOLDER
from tf_labeldp.vault._records import give_name, publish

_fcntl: Any
try:
    import fcntl

    _fcntl = fcntl
except ImportError:  # not on Windows
    _fcntl = None

MADE_BY = "tf-labeldp"
"""How the entry ``made_by`` of a statement begins."""

_AHEAD = 64
"""Chunks of rows that are encoded ahead of what has been written."""
_SAMPLE = 1 << 10
"""Cells by which a column is told to have few different ones."""
_ROW_GROUP_ROWS = 1 << 20
"""Rows of a Parquet row group that is written, but for the last one."""
_LONGEST_PART = "-old-statement"
"""Of the names of hidden files."""


def statement_path(output: pathlib.Path) -> pathlib.Path:
    """Returns where the privacy statement of an output file lies."""
    return output.with_name(f"{output.name}.privacy.json")


Part = tuple[str, Iterable[Sequence[Any]]]
"""The name of a file, and its rows in chunks: one Arrow array a column, all of the same length."""


class Output(abc.ABC):
    """Where the rows go: all of them with their statement, or nothing at all.

    Args:
        path: of the output.
        columns: the names and Arrow types of its columns.
        overwrite: whether an earlier output may be replaced.

    Raises:
        CommandError: nothing can be written there.
    """

    def __init__(
        self, path: pathlib.Path, columns: Sequence[tuple[str, Any]], *, overwrite: bool
    ) -> None:
        self.path = path
        self._columns = columns
        self._overwrite = overwrite
        self._undo = contextlib.ExitStack()

    @property
    @abc.abstractmethod
    def published(self) -> pathlib.Path:
        """The folder that is published as a whole, perhaps."""

    @abc.abstractmethod
    def written(self, rows: int) -> str:
        """Returns what was written, in words that follow "wrote"."""

    @abc.abstractmethod
    def publish(self, statement: str, parts: Sequence[Part], pool: Executor) -> None:
        """Writes the rows of all files, in this order, and their statement."""

    def __enter__(self) -> Output:
        """Finds out whether the output can be written."""
        with contextlib.ExitStack() as undo, self._explained():
            self._begin(undo)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        """Removes what has not been published."""
        self._undo.close()

    @abc.abstractmethod
    def _begin(self, undo: contextlib.ExitStack) -> None: ...

    def _check_parent(self, path: pathlib.Path, option: str = "--output") -> None:
        with self._explained():
            if not path.parent.is_dir():
                raise CommandError(
                    f"the folder of {option} {path} does not exist; make {path.parent} first"
                )

    def _take_lock(self, undo: contextlib.ExitStack, path: pathlib.Path) -> bool:
        lock = OutputLock(path)
        locked = lock.acquire()
        undo.callback(lock.release)
        return locked

    def _hidden(self, part: str) -> pathlib.Path:
        return self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}{part}.tmp")

    def _remove_leftovers(self) -> None:
        """Removes what earlier runs for this output hid here, and were killed."""
        name = re.escape(self.path.name)
        leftover = re.compile(rf"\.{name}\.[0-9a-f]{{16}}(-old)?(-statement)?\.tmp")
        for path in self.path.parent.iterdir():
            if leftover.fullmatch(path.name):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
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
                f"an id column holds something that {self.path} cannot; name other columns with "
                "--id, or give a .parquet --output"
            ) from None


class FileOutput(Output):
    """A table that gets its name once it is complete; left early, it leaves nothing behind.

    It is written to a hidden file beside ``path``, under a lock that refuses a second run.
    ``publish`` gives the statement its name first, so whoever finds the table finds its statement
    too; a statement alone was left by a run that was killed between the two, and is replaced. An
    old table is moved away before its statement is: a kill leaves no table under the statement of
    another run. Its suffix decides the format; the ``sources`` must be other files.
    """

    def __init__(
        self,
        path: pathlib.Path,
        columns: Sequence[tuple[str, Any]],
        *,
        overwrite: bool,
        sources: Sequence[pathlib.Path],
    ) -> None:
        super().__init__(path, columns, overwrite=overwrite)
        self.statement = statement_path(path)
        self._format = format_of(path, "--output")
        with self._explained():
            there = path.exists()
            for source in sources:
                if there and source != STREAM and path.samefile(source):
                    raise CommandError(f"--output {path} is the input itself; give another path")
        self._check_parent(path)
        self._temporary = self._hidden("")

    @property
    def published(self) -> pathlib.Path:
        return self.path.parent

    def written(self, rows: int) -> str:
        return f"{self.path} ({rows:,} rows) and {self.statement.name}"

    def _begin(self, undo: contextlib.ExitStack) -> None:
        """Starts the hidden file, so that a folder or a column that it cannot hold is found out."""
        locked = self._take_lock(undo, self.path)
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
        self._writer = _writer(self._file, self._format, self._columns)
        undo.callback(_close, self._writer)

    def publish(self, statement: str, parts: Sequence[Part], pool: Executor) -> None:
        """Puts the table and its statement on disk, whole, under their names."""
        hidden = self._hidden("-statement")
        with self._explained():
            try:
                _write_rows(self._writer, parts, pool)
                self._writer.close()
                _sync(self._file)
                _write_text(hidden, statement)
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
        return alone and bool(_statement_in(target))


class FolderOutput(Output):
    """A folder with a table for each file of the input, of the same name, and one statement.

    All of it is written to a hidden folder beside ``path``, which gets its name once it is
    complete: whoever finds a table finds all of them, and the statement.
    """

    def __init__(
        self,
        path: pathlib.Path,
        columns: Sequence[tuple[str, Any]],
        *,
        overwrite: bool,
        sources: Sequence[pathlib.Path],
    ) -> None:
        super().__init__(path, columns, overwrite=overwrite)
        self._formats = {source.name: format_of(source, "the input") for source in sources}
        self._check_parent(path)
        self._temporary = self._hidden("")

    @property
    def published(self) -> pathlib.Path:
        return self.path

    def written(self, rows: int) -> str:
        return f"{self.path} ({rows:,} rows in {len(self._formats):,} files) with {IN_FOLDER}"

    def _begin(self, undo: contextlib.ExitStack) -> None:
        locked = self._take_lock(undo, self.path)
        self._check_replaceable()
        if locked:
            self._remove_leftovers()
        with contextlib.suppress(FileNotFoundError):
            os.lstat(self._hidden("-old"))
        for kind in set(self._formats.values()):
            _close(_writer(io.BytesIO(), kind, self._columns))
        self._temporary.mkdir()
        undo.callback(shutil.rmtree, self._temporary, ignore_errors=True)

    def publish(self, statement: str, parts: Sequence[Part], pool: Executor) -> None:
        """Puts the folder on disk, whole, under its name."""
        with self._explained():
            tables = [pool.submit(self._write_table, part) for part in parts]
            try:
                for table in tables:
                    table.result()
            finally:  # what is written must not be removed at the same time
                for table in tables:
                    table.cancel()
                wait(tables)
            _write_text(self._temporary / IN_FOLDER, statement)
            old = self._hidden("-old")
            if self._check_replaceable():
                os.replace(self.path, old)
            try:
                os.rename(self._temporary, self.path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.rename(old, self.path)
                raise
            shutil.rmtree(old, ignore_errors=True)

    def _write_table(self, part: Part) -> None:
        name, chunks = part
        with open(self._temporary / name, "xb") as file:
            writer = _writer(file, self._formats[name], self._columns)
            for arrays in chunks:
                writer.write(writer.encoded(arrays))
            writer.close()
            _sync(file)

    def _check_replaceable(self) -> bool:
        """Returns whether there is something to replace; raises if it must stay."""
        if not os.path.lexists(self.path):
            return False
        if not self.path.is_dir():
            raise CommandError(
                f"--output {self.path} is a file; several inputs need a folder, or one table named "
                f"{', '.join(SUFFIXES)}"
            )
        names = {one.name for one in self.path.iterdir()}
        if not names:
            return True
        told = _statement_in(self.path / IN_FOLDER)
        if not names <= {IN_FOLDER, *told.get("files", {})}:
            raise CommandError(
                f"--output {self.path} holds files that are not of an earlier run; give another "
                "--output"
            )
        if not self._overwrite:
            raise CommandError(
                f"{self.path} exists; give another --output, or --overwrite to replace it"
            )
        return True


class StreamOutput(Output):
    """CSV on stdout, after its statement is in a file: rows that were read can't be taken back."""

    def __init__(
        self, statement: pathlib.Path, columns: Sequence[tuple[str, Any]], *, overwrite: bool
    ) -> None:
        super().__init__(STREAM, columns, overwrite=overwrite)
        self.statement = statement
        self._check_parent(statement, "--statement")

    @property
    def published(self) -> pathlib.Path:
        return self.statement.parent

    def written(self, rows: int) -> str:
        return f"{rows:,} rows to stdout and {self.statement}"

    def _begin(self, undo: contextlib.ExitStack) -> None:
        if sys.stdout is None:
            raise CommandError("--output - is stdout, which is closed; give the path of a file")
        if os.path.lexists(self.statement) and not (self._overwrite and self.statement.is_file()):
            raise CommandError(
                f"--statement {self.statement} exists; give another, or --overwrite to replace it"
            )
        _close(_writer(io.BytesIO(), "csv", self._columns))

    def publish(self, statement: str, parts: Sequence[Part], pool: Executor) -> None:
        with self._explained():
            publish(self.statement, statement.encode(), replace=self._overwrite)
            try:
                _write_rows(_writer(sys.stdout.buffer, "csv", self._columns), parts, pool)
                sys.stdout.buffer.flush()
            except OSError:
                drop_rest(sys.stdout)
                raise


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


def _writer(file: Any, kind: str, columns: Sequence[tuple[str, Any]]) -> CsvWriter | ParquetWriter:
    """Returns what writes a table of this format to an open file."""
    if kind == "parquet":
        return ParquetWriter(file, columns)
    return CsvWriter(file, columns, kind == "csv.gz")


def _write_rows(writer: CsvWriter | ParquetWriter, parts: Sequence[Part], pool: Executor) -> None:
    """Appends the rows of all parts; chunks are encoded side by side and written in order."""
    waiting: collections.deque[Any] = collections.deque()
    for arrays in itertools.chain.from_iterable(chunks for _, chunks in parts):
        waiting.append(pool.submit(writer.encoded, arrays))
        if len(waiting) > _AHEAD:
            writer.write(waiting.popleft().result())
    while waiting:
        writer.write(waiting.popleft().result())


class CsvWriter:
    """Comma-separated values in UTF-8; unlike Arrow's, quotes only the cells that need it."""

    def __init__(self, file: Any, columns: Sequence[tuple[str, Any]], gzipped: bool) -> None:
        for _, kind in columns:
            _check_text(kind)
        # No name and no time in the header of the archive.
        self._gzip = gzip.GzipFile("", "wb", 6, file, 0) if gzipped else None
        self._file: Any = self._gzip or file
        self.write(self.encoded([pa.array([name]) for name, _ in columns]))

    def encoded(self, arrays: Sequence[Any]) -> Any:
        """Returns the lines of some rows, as bytes."""
        cells = [_cells(array) for array in arrays]
        if all(pc.min(pc.binary_length(column)).as_py() for column in cells):
            with contextlib.suppress(pa.ArrowInvalid):  # a cell that needs quotes
                return _plain_lines(cells)
        lines = pc.binary_join_element_wise(*[_quoted(column) for column in cells], ",")
        lines = pc.binary_join_element_wise(lines, "", "\n")
        if not len(lines):
            return b""
        # An Arrow array of texts holds them one after another: this is the file's content.
        _, offsets, content = lines.buffers()
        ends = np.frombuffer(offsets, np.int32)[lines.offset : lines.offset + len(lines) + 1]
        return memoryview(content)[int(ends[0]) : int(ends[-1])]

    def write(self, lines: Any) -> None:
        self._file.write(lines)

    def close(self) -> None:
        if self._gzip is not None:
            self._gzip.close()


class ParquetWriter:
    """A Parquet file without metadata of the input, in large row groups."""

    def __init__(self, file: Any, columns: Sequence[tuple[str, Any]]) -> None:
        # Names and types alone: metadata of the input's schema may say anything.
        self._schema = pa.schema(list(columns))
        self._writer = parquet.ParquetWriter(file, self._schema)
        self._batches: list[Any] = []
        self._rows = 0

    def encoded(self, arrays: Sequence[Any]) -> Any:
        """Returns some rows as a record batch."""
        return pa.record_batch(list(arrays), schema=self._schema)

    def write(self, batch: Any) -> None:
        self._batches.append(batch)
        self._rows += len(batch)
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
    """Returns an Arrow array as texts; of a few different numbers each is converted once."""
    if types.is_floating(array.type) and len(pc.unique(array[:_SAMPLE])) < _SAMPLE // 4:
        few = array.dictionary_encode()
        return few.dictionary.cast(pa.string()).take(few.indices)
    return array.cast(pa.string())


def _plain_lines(cells: Sequence[Any]) -> Any:
    """Returns the lines of cells without quotes; raises an Arrow error if one needs them."""
    lines = pa.BufferOutputStream()
    table = pa.table(list(cells), [str(place) for place in range(len(cells))])
    csv.write_csv(table, lines, csv.WriteOptions(include_header=False, quoting_style="none"))
    return lines.getvalue()


def _quoted(text: Any) -> Any:
    """Returns texts as CSV cells: quoted where needed; null as nothing, "" as quotes."""
    special = pc.match_substring_regex(text, '^$|[",\r\n]')
    if pc.any(special).as_py():
        doubled = pc.replace_substring(text, '"', '""')
        text = pc.if_else(special, pc.binary_join_element_wise('"', doubled, '"', ""), text)
    return text.fill_null("")


def _statement_in(path: pathlib.Path) -> dict[str, Any]:
    """Returns what a statement that the command made says; empty if it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return dict(content) if str(content["made_by"]).startswith(MADE_BY) else {}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}


def _write_text(path: pathlib.Path, text: str) -> None:
    """Writes a new file, so that it is on disk when this returns."""
    with open(path, "xb") as file:
        file.write(text.encode())
        _sync(file)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _close(file: Any) -> None:
    """Closes a file or a writer whose content nobody will see."""
    with contextlib.suppress(Exception):
        file.close()
