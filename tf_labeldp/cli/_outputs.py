"""The output of ``tf-labeldp randomize``: tables with their statement, complete or not at all."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import dataclasses
import errno
import glob
import hashlib
import itertools
import json
import os
import pathlib
import re
import secrets
import shutil
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import filelock
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, parquet
from pyarrow import types as arrow_types

from tf_labeldp.cli._cells import COMMA
from tf_labeldp.cli._console import CommandError, drop_rest, explained, say
from tf_labeldp.cli._tables import STREAM, SUFFIXES, Dialect, Table, format_of, is_table_name
from tf_labeldp.vault import LabelStoreError
from tf_labeldp.vault.files import PlainFile
from tf_labeldp.vault.ledger import Ledger
from tf_labeldp.vault.noisy_labels import NoisyFiles

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of file systems without locks."""
_HEX = "[0-9a-f]" * 16
_FORMULA = "^[=+@\\-\\t\\r＝＋－＠]"
"""Beginnings of cells that spreadsheets read as formulas."""
_PLAIN = Dialect(",")
_ROWS = 1 << 18
"""Rows per part of a table that is written in the form of its input."""
Advance = Callable[[int], None]
"""Reports a number of written rows."""
RowsOf = Callable[[Advance], Sequence[Iterable[Any]]]
"""Returns the rows of each input file, in batches."""
StatementOf = Callable[[Sequence[str]], str]
"""Returns the text of the statement on tables with these digests."""


def output_of(
    args: argparse.Namespace, files: Sequence[pathlib.Path], several: bool, schema: Any
) -> Output:
    path: pathlib.Path = args.output
    kind: type[Output] = FolderOutput
    statement = NoisyFiles.statement_at(path, in_folder=True)
    tables = [path / file.name for file in files]
    if path == STREAM:
        if args.statement is None:
            raise CommandError(
                "--output - needs --statement FILE, as the statement can't go to stdout too; name "
                "it like the file that the rows will be in, with .privacy.json at its end"
            )
        if sys.stdout is None or sys.stdout.closed:
            raise CommandError("--output - needs stdout, which is closed; give a file")
        kind, statement, tables = StreamOutput, args.statement, []
    elif args.statement is not None:
        raise CommandError("--statement is for --output -; other outputs have a place for theirs")
    elif not several or is_table_name(path):
        kind, tables = Output, [path]
        statement = NoisyFiles.statement_at(path, in_folder=False)
    sources = [file for file in files if file != STREAM]
    drawn = _receipts_in(args.store)
    return kind(path, statement, tables, schema, args.overwrite, sources, drawn)


@dataclasses.dataclass
class Output:
    """Tables of one run: all of them with their statement, or nothing at all.

    Files are written to a hidden folder next to the output, under a lock that refuses a second run,
    and renamed once complete. The statement comes before the table, and an earlier table leaves
    before its statement: after a kill, no table is under the statement of another run.
    """

    path: pathlib.Path  # as the command line names it
    statement: pathlib.Path
    tables: list[pathlib.Path]
    schema: Any  # of the tables
    overwrite: bool  # whether an earlier output may be replaced
    sources: Sequence[pathlib.Path]  # which the output must not replace
    drawn: Set[str] = frozenset()  # receipts in the store, whose outputs may be written again

    option = "--output"

    @property
    def published(self) -> pathlib.Path:
        """The folder that may be published as a whole."""
        return self.statement.parent

    @property
    def _targets(self) -> list[pathlib.Path]:
        """What is renamed, in this order."""
        return [self.statement, *self.tables]

    def _may_replace(self, target: pathlib.Path) -> bool:
        if target.is_dir():
            raise CommandError(f"{target} is a folder; give another {self.option}")
        if target.exists() and not target.is_file():
            raise CommandError(f"{target} is no regular file; give another {self.option}")
        # A killed run leaves a statement without its table.
        alone = bool(self.tables) and not any(map(os.path.lexists, self.tables))
        return self.overwrite or (alone and bool(_statement_in(target))) or self._is_same_draw()

    def _is_same_draw(self) -> bool:
        """Returns whether the earlier output is one of this store, as a killed run leaves it."""
        receipts = _statement_in(self.statement).get("receipts", ())
        return bool(receipts) and {receipt["id"] for receipt in receipts} <= self.drawn

    def __enter__(self) -> Output:
        """Checks that the output can be written, before anything is drawn."""
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
            locked = self._lock(undo)
            for target in reversed(self._targets):
                if os.path.lexists(target) and not self._may_replace(target):
                    raise CommandError(
                        f"{target} exists; give another {self.option}, or --overwrite to replace it"
                    )
            if locked:  # Without a lock another run may be writing these folders.
                for folder in place.parent.glob(f"{glob.escape(self._hidden)}{_HEX}.tmp"):
                    shutil.rmtree(folder, ignore_errors=True)
            os.mkdir(self._folder, 0o700)
            undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
            for kind in formats:
                table_writer(pa.BufferOutputStream(), kind, self.schema).close()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def publish(self, statement: StatementOf, rows: RowsOf, advance: Advance, jobs: int) -> None:
        """Writes the tables, and the statement with the SHA-256 of each."""
        parts = rows(advance)
        if len(parts) != len(self.tables):
            parts = [itertools.chain.from_iterable(parts)]
        with self._explained():
            self._staged(self.statement).parent.mkdir(exist_ok=True)
            with ThreadPoolExecutor(jobs) as pool:
                # The main thread, which a signal stops at once, writes a single table.
                run = pool.map if len(self.tables) > 1 else map
                digests = list(run(self._write_table, self.tables, parts))
            self._finish(statement(digests))

    def _finish(self, statement: str) -> None:
        staged = self._staged(self.statement)
        staged.write_text(statement, encoding="utf-8")
        _sync(staged)
        self._rename()

    def _write_table(self, path: pathlib.Path, batches: Iterable[Any]) -> str:
        """Writes a table and returns its SHA-256."""
        staged, kind = self._staged(path), format_of(path, self.option)
        with (
            pa.output_stream(str(staged), compression="gzip" if kind == "csv.gz" else None) as file,
            contextlib.closing(table_writer(file, kind, self.schema)) as writer,
        ):
            for batch in batches:
                writer.write_table(batch)
        _sync(staged)
        return PlainFile(staged).digest()

    def _staged(self, path: pathlib.Path) -> pathlib.Path:
        return self._folder / path.relative_to(self._folder.parent)

    def _rename(self) -> None:
        """Gives all files their names, or leaves everything as it was."""
        old: list[tuple[pathlib.Path, pathlib.Path]] = []
        new = {target: os.stat(self._staged(target)) for target in self._targets}
        try:
            for target in reversed(self._targets):
                if os.path.lexists(target) and self._may_replace(target):
                    old.append((target, self._folder / f"old-{len(old)}"))
                    os.replace(*old[-1])
            for target in self._targets:
                PlainFile(target).take(self._staged(target))
        except BaseException:
            # A signal may come when a file has its name, so the files themselves show what is new.
            for target, staged in new.items():
                with contextlib.suppress(OSError):
                    if os.path.samestat(os.lstat(target), staged):
                        target.unlink()
            for target, moved in reversed(old):
                with contextlib.suppress(OSError):
                    PlainFile(target).take(moved)
            raise

    def _lock(self, undo: contextlib.ExitStack) -> bool:
        """Returns whether the output is locked; some file systems have no locks."""
        path = self._folder.with_name(f"{self._hidden}lock")
        with explained(LabelStoreError):
            PlainFile(path).check_lock()
        lock = filelock.FileLock(path)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            raise CommandError(
                f"another run is writing {self.option} {self.path} at this moment; wait for it, or "
                f"give another {self.option}"
            ) from None
        except (NotImplementedError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
                raise
            return False
        undo.callback(lock.release)
        # The file goes before the lock: then no other run has locked it.
        undo.callback(path.unlink, missing_ok=True)
        return True

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except FileExistsError as error:
            raise CommandError(
                f"{error.filename} was created by another program in the meantime; give another "
                f"{self.option}"
            ) from None
        except OSError as error:
            reason = f" ({os.strerror(error.errno)})" if error.errno else ""
            raise CommandError(
                f"cannot write --output {self.path}{reason}; make room or give another place"
            ) from None
        except pa.ArrowException:
            raise CommandError(
                f"an id column has a type or value that {self.path} cannot store; name other "
                "columns with --id, or give a .parquet --output"
            ) from None


class FolderOutput(Output):
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
        if not names <= {self.statement.name, *_statement_in(self.statement).get("files", {})}:
            raise CommandError(
                f"--output {target} has files that no earlier run wrote; give another --output"
            )
        return self.overwrite or not names or self._is_same_draw()


class StreamOutput(Output):
    """CSV on stdout, after its statement is in a file: a reader can't give rows back."""

    option = "--statement"

    def publish(self, statement: StatementOf, rows: RowsOf, advance: Advance, jobs: int) -> None:
        del jobs
        # The rows are written twice, since their digest is in the statement, which comes first.
        digest = hashlib.sha256()
        self._write_rows(types.SimpleNamespace(write=digest.update), rows(lambda number: None))
        with self._explained():
            self._staged(self.statement).parent.mkdir(exist_ok=True)
            self._finish(statement([digest.hexdigest()]))
            try:
                self._write_rows(sys.stdout.buffer, rows(advance))
                sys.stdout.buffer.flush()
            except OSError:
                drop_rest(sys.stdout)
                raise

    def _write_rows(self, file: Any, parts: Iterable[Iterable[Any]]) -> None:
        writer = CsvWriter(file, self.schema)
        for batch in itertools.chain.from_iterable(parts):
            writer.write_table(batch)


def table_writer(file: Any, kind: str, schema: Any, source: Table | None = None) -> Any:
    """Returns a writer; CSV is in the form of a source in CSV."""
    if kind == "parquet":
        return parquet.ParquetWriter(file, schema)
    if source is None or not source.dialect.delimiter:
        return CsvWriter(file, schema)
    return CsvWriter(file, schema, source.dialect, source.decimal)


class CsvWriter:
    """CSV, in Arrow's own form without quotes in batches whose cells need none.

    Cells are written byte for byte, and one warning names those that spreadsheets would run.
    """

    def __init__(
        self, file: Any, schema: Any, dialect: Dialect = _PLAIN, decimal: str = ""
    ) -> None:
        self._dialect, self._decimal = dialect, decimal
        self._is_plain = (dialect, decimal) == (_PLAIN, "")
        for kind in schema.types:
            # Refused before the draw: bytes may be no text, and a duration would lose its unit.
            if re.search("binary|duration", str(kind)):
                raise pa.ArrowNotImplementedError(f"{kind} has no text")
            pa.nulls(0, kind).cast(pa.string())
        self._file = file
        self._has_formula = False
        names = schema.names
        self._warn_if(any(re.match(_FORMULA, name) for name in names))
        if not self._is_plain:
            mark = codecs.BOM_UTF8 if dialect.has_mark else b""
            file.write(mark + self._lines([pa.array([name]) for name in names]))
            return
        if any(not name or set(name) & set(',"\r\n') for name in names):
            names = ['"' + name.replace('"', '""') + '"' for name in names]
        file.write((",".join(names) + "\n").encode())

    def write_table(self, table: Any) -> None:
        cells = [
            column if arrow_types.is_primitive(column.type) else column.cast(pa.string())
            for column in table.columns
        ]
        texts = [column for column in cells if arrow_types.is_string(column.type)]
        formulas = (pc.any(pc.match_substring_regex(text, _FORMULA)).as_py() for text in texts)
        self._warn_if(not self._has_formula and any(formulas))
        if not self._is_plain:
            for start in range(0, table.num_rows, _ROWS):
                part = [cell.slice(start, _ROWS) for cell in table.columns]
                self._file.write(self._lines(part))
            return
        # Without quotes an empty text would look like a missing cell.
        plain = all(pc.min(pc.binary_length(column)).as_py() != 0 for column in texts)
        try:
            lines = _csv_lines(cells, "none" if plain else "needed")
        except pa.ArrowInvalid:  # a cell with a comma, a quote or a line end
            lines = _csv_lines(cells, "needed")
        self._file.write(lines)

    def _lines(self, columns: Sequence[Any]) -> bytes:
        """Returns rows in the form of the input."""
        delimiter, line_end, quotes, encoding, _ = self._dialect
        texts = []
        for column in columns:
            text = column.cast(pa.string())
            if self._decimal == COMMA and arrow_types.is_floating(column.type):
                text = pc.replace_substring(text, ".", ",")
            quoted = pc.binary_join_element_wise(
                '"', pc.replace_substring(text, '"', '""'), '"', ""
            )
            is_text = arrow_types.is_string(column.type)
            needs = pc.match_substring_regex(text, f'[{re.escape(delimiter)}"\r\n]')
            if is_text:  # Without quotes an empty text would look like a missing cell.
                needs = pc.or_(needs, pc.equal(text, ""))
            is_quoted = quotes == "all" or (quotes == "texts" and is_text)
            texts.append(pc.if_else(True if is_quoted else needs, quoted, text).fill_null(""))
        lines = pc.binary_join_element_wise(*texts, delimiter)
        content = line_end.join([*lines.to_pylist(), ""])
        try:
            return content.encode(encoding)
        except UnicodeEncodeError:
            raise CommandError(
                "the output has characters that the input's Latin-1 lacks; convert the input to "
                "UTF-8, or give a .parquet --output"
            ) from None

    def close(self) -> None:
        """Leaves the file open for the caller."""

    def _warn_if(self, has_formula: bool) -> None:
        if has_formula:
            self._has_formula = True
            warnings.warn(
                "some cells begin with =, +, - or @: a spreadsheet would run them as formulas. "
                "Import such columns as text",
                stacklevel=1,
            )


def _csv_lines(cells: Sequence[Any], quoting_style: str) -> Any:
    lines = pa.BufferOutputStream()
    table = pa.table(list(cells), [str(column) for column in range(len(cells))])
    try:
        options = csv.WriteOptions(include_header=False, quoting_style=quoting_style)
    except TypeError:  # pyarrow 10, which TFX pins, puts quotes around every text.
        options = csv.WriteOptions(include_header=False)
    csv.write_csv(table, lines, options)
    return lines.getvalue()


def _statement_in(path: pathlib.Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return dict(content) if str(content["made_by"]).startswith("tf-labeldp") else {}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}


def _receipts_in(store: pathlib.Path | None) -> set[str]:
    if store is None:
        return set()
    with contextlib.suppress(LabelStoreError, OSError):  # The vault reports what is wrong.
        return {receipt.id for receipt in Ledger.of_store(store).receipts()}
    return set()


def check_separate(
    output: pathlib.Path, published: pathlib.Path, store: pathlib.Path, below: str
) -> None:
    """Raises if the store is the folder of the output, or contains it.

    A store below the folder is an ``"error"`` if the folder is published as a whole, a
    ``"warning"`` if it may be, and ``"fine"`` if single files are published.
    """
    folder, kept = (pathlib.Path(os.path.realpath(path)) for path in (published, store))
    if folder in kept.parents and below == "fine":
        return
    if folder in kept.parents and below == "warning":
        say(
            f"warning: the store {store} is below the folder of --output "
            f"{output}: publish the files that are written, not the folder",
            error=True,
        )
    elif folder == kept or folder in kept.parents or kept in folder.parents:
        where = "is" if folder == kept else "is in" if folder in kept.parents else "contains"
        raise CommandError(
            f"the store {store} {where} the folder of --output {output}, which may be published; "
            "the store stays with the labels: give separate folders"
        )


def _sync(path: pathlib.Path) -> None:
    """Returns once the file is on disk."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
