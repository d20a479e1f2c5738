"""What a table of labels is, whatever its format: columns that are read chunk by chunk.

Errors name columns and rows and count cells, but never show one: Arrow's own messages quote the
text that they could not convert, so none of them is passed on.
"""

from __future__ import annotations

import abc
import os
import pathlib
import stat
from collections.abc import Iterator, Sequence
from typing import Any

from tf_labeldp.cli._errors import CommandError

NUMBER, CLASS, NAME = "a number", "a whole number", "a class name"
"""What a label column may hold."""

_SUFFIXES = {".csv": "csv", ".csv.gz": "csv.gz", ".parquet": "parquet"}


def format_of(path: pathlib.Path, option: str) -> str:
    """Returns ``"csv"``, ``"csv.gz"`` or ``"parquet"``, by the end of the name."""
    for suffix, name in _SUFFIXES.items():
        if path.name.lower().endswith(suffix):
            return name
    raise CommandError(
        f"the format of {option} {path} is not known by its name; name it {', '.join(_SUFFIXES)}"
    )


def open_table(path: pathlib.Path) -> Table:
    """Returns the table in a file; only its columns have been read.

    Raises:
        CommandError: no such file, unknown suffix, or not readable as what its suffix says.
    """
    kind = format_of(path, "the input")
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise CommandError(f"the input {path} does not exist; check the path") from None
    except OSError as error:
        raise unreadable(path, error) from None
    if not stat.S_ISREG(found.st_mode):
        raise CommandError(
            f"the input {path} is not a regular file, which it must be to be read twice; give the "
            "path of a file"
        )
    if kind == "parquet":
        from tf_labeldp.cli._table_parquet import ParquetTable

        return ParquetTable(path)
    from tf_labeldp.cli._table_csv import CsvTable

    return CsvTable(path, gzipped=kind == "csv.gz")


class Table(abc.ABC):
    """A file with named columns.

    Attributes:
        path: of the file.
        columns: names, in the order of the file.
    """

    columns: list[str]

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._version = self._stat()
        self.columns = self._read_columns()

    @abc.abstractmethod
    def label_chunks(self, column: str, kind: str) -> Iterator[Any]:
        """Yields Arrow arrays of ``arrow_type(kind)``."""

    @abc.abstractmethod
    def id_chunks(self, columns: Sequence[str]) -> Iterator[list[Any]]:
        """Yields lists of Arrow arrays, one a column."""

    @abc.abstractmethod
    def id_types(self, columns: Sequence[str]) -> list[Any]:
        """Returns the Arrow types of what ``id_chunks`` yields."""

    @abc.abstractmethod
    def _read_columns(self) -> list[str]:
        """Returns the names of the columns."""

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
            raise unreadable(self.path, error) from None
        return found.st_ino, found.st_size, found.st_mtime_ns


REMEDIES = {
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


def arrow_type(kind: str) -> Any:
    """Returns the Arrow type in which labels of a kind are read."""
    import pyarrow as pa

    return {NUMBER: pa.float64(), CLASS: pa.int64(), NAME: pa.string()}[kind]


def no_rows(path: pathlib.Path) -> CommandError:
    """Returns the error for a table without rows."""
    return CommandError(
        f"the input {path} has no rows below its header line; there is nothing to randomize"
    )


def unreadable(path: pathlib.Path, error: OSError | None = None) -> CommandError:
    """Returns the error for a file that is damaged or that the system refuses to read."""
    code = error.errno if error else None
    reason = os.strerror(code) if code else "damaged, or not what its name says"
    return CommandError(f"the input {path} cannot be read ({reason}); copy or make it again")
