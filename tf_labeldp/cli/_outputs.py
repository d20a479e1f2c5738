"""The output of ``tf-labeldp randomize``: tables with their statement, whole or not at all."""

from __future__ import annotations

import abc
import argparse
import contextlib
import dataclasses
import errno
import itertools
import json
import os
import pathlib
import re
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import filelock
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, parquet, types

from tf_labeldp.cli._console import CommandError, drop_rest
from tf_labeldp.cli._tables import STREAM, SUFFIXES, format_of, is_table_name
from tf_labeldp.vault.noisy_labels import IN_FOLDER, STATEMENT_SUFFIX
from tf_labeldp.vault.records import give_name

MADE_BY = "tf-labeldp"
"""The beginning of the entry ``made_by`` of a statement."""


def output_of(
    args: argparse.Namespace, files: Sequence[pathlib.Path], several: bool, schema: Any
) -> Output:
    path: pathlib.Path = args.output
    kind: type[Output] = FolderOutput
    statement, tables = path / IN_FOLDER, [path / file.name for file in files]
    if path == STREAM:
        if args.statement is None:
            raise CommandError(
                "--output - needs --statement FILE, as the statement can't go to stdout too; name "
                "it like the file that the rows will be in, with .privacy.json at its end"
            )
        kind, statement, tables = StreamOutput, args.statement, []
    elif args.statement is not None:
        raise CommandError("--statement is for --output -; other outputs have a place for theirs")
    elif not several or is_table_name(path):
        kind, statement, tables = FileOutput, path.with_name(path.name + STATEMENT_SUFFIX), [path]
    sources = [file for file in files if file != STREAM]
    return kind(path, statement, tables, schema, args.overwrite, sources)


_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of file systems without locks."""


@dataclasses.dataclass
class Output(abc.ABC):
    """Tables of one run: all of them with their statement, or nothing at all.

    Everything is written to a hidden folder next to the output, under a lock that refuses a second
    run, and gets its name once it is complete: the statement before the table, so that a table
    always has its statement. An earlier output is moved away first, the table before the statement:
    a kill leaves no table under the statement of another run.
    """

    path: pathlib.Path  # as the command line names it
    statement: pathlib.Path
    tables: list[pathlib.Path]
    schema: Any  # of the tables
    overwrite: bool  # whether an earlier output may be replaced
    sources: Sequence[pathlib.Path]  # none of which may be the output

    option = "--output"

    @property
    def published(self) -> pathlib.Path:
        """The folder that may be published as a whole."""
        return self.statement.parent

    @abc.abstractmethod
    def written(self, rows: int) -> str:
        """Returns the files in words that follow "wrote"."""

    @property
    def _targets(self) -> list[pathlib.Path]:
        """What gets a name, in this order."""
        return [self.statement, *self.tables]

    @abc.abstractmethod
    def _may_replace(self, target: pathlib.Path) -> bool:
        """Returns whether this run may put its own file in the place of one that is there."""

    def __enter__(self) -> Output:
        """Finds out whether the output can be written."""
        place = self._targets[-1]
        self._hidden = f".{place.name}."
        self._folder = place.with_name(f"{self._hidden}{secrets.token_hex(8)}.tmp")
        formats = {format_of(table, self.option) for table in self.tables} or {"csv"}
        with contextlib.ExitStack() as undo, self._explained():
            try:
                os.stat(place.parent)
            except FileNotFoundError:
                raise CommandError(
                    f"the folder of {self.option} {place} does not exist; make {place.parent} first"
                ) from None
            if any(self.path.exists() and self.path.samefile(file) for file in self.sources):
                raise CommandError(f"--output {self.path} is the input itself; give another path")
            locked = self._take_lock(undo)
            for target in reversed(self._targets):
                if os.path.lexists(target) and not self._may_replace(target):
                    raise CommandError(
                        f"{target} exists; give another {self.option}, or --overwrite to replace it"
                    )
            if locked:  # without a lock they may be those of a run that is at work
                self._remove_leftovers()
            os.mkdir(self._folder)
            undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
            for kind in formats:
                _writer(pa.BufferOutputStream(), kind, self.schema).close()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def publish(self, statement: str, rows: Sequence[Iterable[Any]], jobs: int) -> None:
        """Writes the rows of all files of the input, which come in parts, and their statement."""
        if len(rows) != len(self.tables):
            rows = [itertools.chain.from_iterable(rows)]
        with self._explained():
            staged = self._staged(self.statement)
            staged.parent.mkdir(exist_ok=True)
            with ThreadPoolExecutor(jobs) as pool:
                # One table is written by the main thread, which a signal stops at once.
                run = pool.map if len(self.tables) > 1 else map
                list(run(self._write_table, self.tables, rows))
            staged.write_text(statement, encoding="utf-8")
            _sync(staged)
            self._give_names()

    def _write_table(self, path: pathlib.Path, parts: Iterable[Any]) -> None:
        staged, kind = self._staged(path), format_of(path, self.option)
        with (
            pa.output_stream(str(staged), compression="gzip" if kind == "csv.gz" else None) as file,
            contextlib.closing(_writer(file, kind, self.schema)) as writer,
        ):
            for part in parts:
                writer.write_table(part)
        _sync(staged)

    def _staged(self, path: pathlib.Path) -> pathlib.Path:
        """Returns the place of a file in the hidden folder."""
        return self._folder / path.relative_to(self._folder.parent)

    def _give_names(self) -> None:
        """Gives all their names, or leaves everything as it was."""
        moved: list[tuple[pathlib.Path, pathlib.Path]] = []
        new = {target: os.stat(self._staged(target)) for target in self._targets}
        try:
            for target in reversed(self._targets):
                if os.path.lexists(target) and self._may_replace(target):
                    moved.append((target, self._folder / f"old-{len(moved)}"))
                    os.replace(*moved[-1])
            for target in self._targets:
                give_name(self._staged(target), target)
        except BaseException:
            for target, staged in new.items():
                with contextlib.suppress(OSError):
                    if os.path.samestat(os.lstat(target), staged):
                        target.unlink()
            for target, old in reversed(moved):  # the table comes last
                with contextlib.suppress(OSError):
                    give_name(old, target)
            raise

    def _take_lock(self, undo: contextlib.ExitStack) -> bool:
        """Returns whether the lock is held now; False where the system has no such locks."""
        path = self._folder.with_name(f"{self._hidden}lock")
        lock = filelock.FileLock(path)
        undo.callback(lock.release)
        while not lock.is_locked:
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                raise CommandError(
                    f"another run is writing {self.option} {self.path} at this moment; wait for "
                    f"it, or give another {self.option}"
                ) from None
            except (NotImplementedError, OSError) as error:
                if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
                    raise
                return False
            if not path.exists():  # a run that ended in between removed it
                lock.release()
        # Before it is released: nobody else can have the lock on this file by then.
        undo.callback(path.unlink, missing_ok=True)
        return True

    def _remove_leftovers(self) -> None:
        name = re.compile(re.escape(self._hidden) + r"[0-9a-f]{16}(-old)?(-statement)?\.tmp")
        for path in self._folder.parent.iterdir():
            if name.fullmatch(path.name):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except FileExistsError as error:
            raise CommandError(
                f"{error.filename} has come into being meanwhile; give another {self.option}"
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
    def written(self, rows: int) -> str:
        return f"{self.path} ({rows:,} rows) and {self.statement.name}"

    def _may_replace(self, target: pathlib.Path) -> bool:
        if target.is_dir():
            raise CommandError(f"{target} is a folder; give another --output")
        # A statement without its table is that of a killed run.
        alone = target == self.statement and not os.path.lexists(self.path)
        return self.overwrite or (alone and bool(_statement_in(target)))


class FolderOutput(Output):
    def written(self, rows: int) -> str:
        return f"{self.path} ({rows:,} rows in {len(self.tables):,} files) with {IN_FOLDER}"

    @property
    def _targets(self) -> list[pathlib.Path]:
        return [self.path]

    def _may_replace(self, target: pathlib.Path) -> bool:
        if not target.is_dir():
            raise CommandError(
                f"--output {target} is a file; several inputs need a folder, or one table named "
                f"{', '.join(SUFFIXES)}"
            )
        names = {path.name for path in target.iterdir()}
        if not names <= {IN_FOLDER, *_statement_in(self.statement).get("files", {})}:
            raise CommandError(
                f"--output {target} holds files that are not of an earlier run; give another "
                "--output"
            )
        return self.overwrite or not names


class StreamOutput(Output):
    """CSV on stdout, after its statement is in a file: rows that were read can't be taken back."""

    option = "--statement"

    def written(self, rows: int) -> str:
        return f"{rows:,} rows to stdout and {self.statement}"

    def publish(self, statement: str, rows: Sequence[Iterable[Any]], jobs: int) -> None:
        super().publish(statement, (), jobs)
        with self._explained():
            try:
                writer = CsvWriter(sys.stdout.buffer, self.schema)
                for part in itertools.chain.from_iterable(rows):
                    writer.write_table(part)
                sys.stdout.buffer.flush()
            except OSError:
                drop_rest(sys.stdout)
                raise

    def _may_replace(self, target: pathlib.Path) -> bool:
        return self.overwrite and target.is_file()


def _writer(file: Any, kind: str, schema: Any) -> Any:
    return parquet.ParquetWriter(file, schema) if kind == "parquet" else CsvWriter(file, schema)


class CsvWriter:
    """Comma-separated values in UTF-8; unlike Arrow's, quotes only the cells that need it."""

    def __init__(self, file: Any, schema: Any) -> None:
        for kind in schema.types:
            _check_text(kind)
        self._file = file
        self._file.write(_lines([pa.array([name]) for name in schema.names]))

    def write_table(self, table: Any) -> None:
        self._file.write(_lines([column.cast(pa.string()) for column in table.columns]))

    def close(self) -> None:
        """Leaves the file to its opener."""


def _check_text(kind: Any) -> None:
    """Raises an Arrow error for a type without a text of its own, before anything is drawn.

    Bytes may be no text, which would be found out too late; a duration would lose its unit.
    """
    if types.is_dictionary(kind):
        kind = kind.value_type
    if "binary" in str(kind) or types.is_duration(kind):
        raise pa.ArrowNotImplementedError(f"{kind} has no text")
    pa.nulls(0, kind).cast(pa.string())  # raises for lists and the like


def _lines(cells: Sequence[Any]) -> Any:
    if all(pc.min(pc.binary_length(column)).as_py() for column in cells):
        with contextlib.suppress(pa.ArrowInvalid):  # a cell needs quotes
            plain = pa.BufferOutputStream()
            options = csv.WriteOptions(include_header=False, quoting_style="none")
            table = pa.table(list(cells), [str(place) for place in range(len(cells))])
            csv.write_csv(table, plain, options)
            return plain.getvalue()
    lines = pc.binary_join_element_wise(*map(_quoted, cells), ",")
    return "".join(f"{line}\n" for line in lines.to_pylist()).encode()


def _quoted(text: Any) -> Any:
    """Returns texts as CSV cells: quoted where needed; null as nothing, "" as quotes."""
    special = pc.match_substring_regex(text, '^$|[",\r\n]')
    doubled = pc.binary_join_element_wise('"', pc.replace_substring(text, '"', '""'), '"', "")
    return pc.if_else(special, doubled, text).fill_null("")


def _statement_in(path: pathlib.Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return dict(content) if str(content["made_by"]).startswith(MADE_BY) else {}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}


def _sync(path: pathlib.Path) -> None:
    """Returns once the file is on disk."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
