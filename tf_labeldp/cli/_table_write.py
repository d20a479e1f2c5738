"""Writes a table of ids and noisy labels, whole or not at all, and its privacy statement."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import secrets
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import IO, Any

import pyarrow as pa

from tf_labeldp.cli import _table_read, _table_writers
from tf_labeldp.cli._errors import CommandError
from tf_labeldp.cli._output_lock import OutputLock
from tf_labeldp.vault._store import give_name

MADE_BY = "tf-labeldp"
"""How the entry ``made_by`` of a statement begins."""

_LONGEST_PART = "-old-statement"
"""Of the names of hidden files."""


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
        self._format = _table_read.format_of(path, "--output")
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
        self._writer: _table_writers.CsvWriter | _table_writers.ParquetWriter | None = None

    def __enter__(self) -> Output:
        """Creates the hidden file, so that a folder that refuses it is found out at once.

        Raises:
            CommandError: another run is at it, or something is there already.
        """
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
        """Starts the table with the names and Arrow types of its columns.

        Raises:
            CommandError: the format has no place for a column of such a type.
        """
        if self._file is None:
            raise RuntimeError("begin() belongs inside the with block of the output")
        with self._explained():
            if self._format == "parquet":
                self._writer = _table_writers.ParquetWriter(self._file, names, types)
            else:
                self._writer = _table_writers.CsvWriter(
                    self._file, names, types, self._format == "csv.gz"
                )

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


def _is_statement(path: pathlib.Path) -> bool:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return str(content["made_by"]).startswith(MADE_BY)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
