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

MADE_BY = "tf-labeldp"
"""How the entry ``made_by`` of a statement begins."""


def statement_path(output: pathlib.Path) -> pathlib.Path:
    """Returns where the privacy statement of an output lies."""
    return output.with_name(f"{output.name}.privacy.json")


class Output:
    """A table that gets its name once it is complete; left early, it leaves nothing behind.

    It is written to a hidden file beside ``path``. ``publish`` gives the statement its name first,
    so whoever finds the table finds its statement too; a statement alone was left by a run that was
    killed between the two, and is replaced.

    Args:
        path: of the table; its suffix decides the format.
        overwrite: whether files of these names may be replaced.
        source: the input, which must be another file.

    Raises:
        CommandError: nothing can be written there, or something is there already.
    """

    def __init__(self, path: pathlib.Path, *, overwrite: bool, source: pathlib.Path) -> None:
        self.path = path
        self.statement = statement_path(path)
        self._format = _table_read.format_of(path, "--output")
        self._overwrite = overwrite
        if path.exists() and path.samefile(source):
            raise CommandError(f"--output {path} is the input itself; give another path")
        if not path.parent.is_dir():
            raise CommandError(
                f"the folder of --output {path} does not exist; make {path.parent} first"
            )
        for target in (path, self.statement):
            if target.is_dir():
                raise CommandError(f"{target} is a folder; give another --output")
            leftover = target == self.statement and _is_statement(target)
            if os.path.lexists(target) and not overwrite and not leftover:
                raise CommandError(
                    f"{target} exists; give another --output, or --overwrite to replace it"
                )
        self._temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        self._file: IO[bytes] | None = None
        self._writer: _table_writers.CsvWriter | _table_writers.ParquetWriter | None = None

    def __enter__(self) -> Output:
        """Creates the hidden file, so that a folder that refuses it is found out at once."""
        with self._explained():
            self._remove_leftovers()
            self._file = open(self._temporary, "xb")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Removes what has not been published."""
        if self._writer is not None:
            with contextlib.suppress(Exception):
                self._writer.close()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._temporary.unlink(missing_ok=True)

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
        hidden = self._temporary.with_name(f"{self._temporary.name[:-4]}-statement.tmp")
        with self._explained():
            try:
                self._writer.close()
                self._writer = None
                _sync(self._file)
                with open(hidden, "xb") as file:
                    file.write(statement.encode())
                    _sync(file)
                if self._overwrite:  # never an old table beside a new statement
                    self.path.unlink(missing_ok=True)
                replace = self._overwrite or _is_statement(self.statement)
                _give_name(hidden, self.statement, replace)
                try:
                    _give_name(self._temporary, self.path, self._overwrite)
                except OSError:
                    self.statement.unlink(missing_ok=True)
                    raise
            finally:
                hidden.unlink(missing_ok=True)

    def _remove_leftovers(self) -> None:
        """Removes the hidden files of earlier runs for this output that were killed."""
        leftover = re.compile(rf"\.{re.escape(self.path.name)}\.[0-9a-f]{{16}}(-statement)?\.tmp")
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
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _give_name(hidden: pathlib.Path, target: pathlib.Path, overwrite: bool) -> None:
    """Gives a finished file its name; fails where the name is taken, unless told to replace."""
    if overwrite:
        os.replace(hidden, target)
        return
    try:
        os.link(hidden, target)
    except FileExistsError as error:
        raise FileExistsError(error.errno, error.strerror, str(target)) from None
    except OSError:  # a file system without hard links
        if os.path.lexists(target):
            raise FileExistsError(0, "exists", str(target)) from None
        os.replace(hidden, target)
