"""``tf-labeldp randomize``: a table of labels in, a table of noisy labels out.

The input is read twice, so that only its label column is ever in memory: once for the labels, once
for the ids. Nothing that is written or printed depends on a true label but through the draw; only
the errors that stop a run count cells, and they are for the label holder.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tf_labeldp._progress import Progress
from tf_labeldp._version import __version__
from tf_labeldp.cli import _tables, _tasks
from tf_labeldp.cli._console import CommandError, one_line, say
from tf_labeldp.vault._noisy_labels import sealed, table_arrays
from tf_labeldp.vault._store import publish

_ROWS = 1 << 18
"""Rows that are written, or whose ids are counted, at once."""
_ROW_COLUMN = "row"
"""The column of row numbers, where there are no ids."""
_AUTOMATIC = ("id", "row_id", _ROW_COLUMN)
_NAMED = 20
"""At most so many columns are listed by name."""
_DIGEST_FILE = "ids-digest"
_PATIENCE = 2.0
"""Seconds until the first word of progress."""


def run(args: argparse.Namespace) -> int:
    """Randomizes the labels of a table and returns the exit code."""
    table = _tables.open_table(args.input)
    noisy_column = args.column if args.output_column is None else args.output_column
    ids = _id_columns(table, args, noisy_column)
    task = _tasks.task_of(args)
    columns = [(name, table.types[name]) for name in ids] or [(_ROW_COLUMN, pa.int64())]
    columns.append((noisy_column, task.output_type))
    target = _tables.Output(args.output, columns, overwrite=args.overwrite, source=args.input)
    if args.store is not None:
        _check_apart(args.output, args.store)
    pass_over = functools.partial(_Progress, delay=_PATIENCE, quiet=args.quiet)
    with target as output:
        with pass_over("reading labels") as progress:
            vault = task.vault(_read_labels(table, args.column, task, progress))
        with pass_over("drawing noisy labels") as progress:
            draw = task.draw(vault)
            progress.advance(len(draw.noisy_labels))
        del vault  # the labels are not needed any more
        size = len(draw.noisy_labels)
        facts = IdFacts(ids, size, digested=args.store is not None)
        with pass_over("writing", size) as progress:
            for arrays in _output_chunks(table, ids, task, draw.noisy_labels.values):
                output.write(arrays)
                facts.add(arrays[:-1])
                progress.advance(len(arrays[0]))
        table.check_unchanged()
        if args.store is not None:
            with task.explained():
                facts.check_store(args.store.expanduser())
        most_rows = facts.most_rows()
        output.publish(_statement([name for name, _ in columns], draw, most_rows))
    if not args.quiet:
        _report(args, table, ids, output, draw, most_rows)
    return 0


class _Progress(Progress):
    """A pass over rows; that its lines cannot be written is no failure of the command."""

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().display(msg, pos)

    def close(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().close()


def _read_labels(
    table: _tables.Table, column: str, task: _tasks.Task, progress: Progress
) -> np.ndarray:
    """Returns the labels as the vault takes them, after checking them."""
    parts: list[np.ndarray] = []
    rows = missing = 0
    for chunk in table.label_chunks(column, task.kind):
        rows += len(chunk)
        missing += chunk.null_count
        parts.append(task.encoded(chunk.drop_null()))
        progress.advance(len(chunk))
    if not rows:
        raise _tables.no_rows(table.path)
    if missing:
        raise CommandError(
            f"column {column!r} of {table.path} has no label in {missing} of {rows} rows; "
            f"{_tables.FILL}"
        )
    labels = np.concatenate(parts)
    problem = task.check(labels)
    if problem is not None:
        raise CommandError(f"column {column!r} of {table.path}: {problem}")
    return labels


def _output_chunks(
    table: _tables.Table,
    ids: Sequence[str],
    task: _tasks.Task,
    noisy_labels: np.ndarray,
) -> Iterator[list[Any]]:
    """Yields the columns of the output, some rows at a time."""
    size = noisy_labels.size
    start = 0
    for columns in table.id_chunks(ids) if ids else _row_numbers(size):
        end = start + len(columns[0])
        if end > size:
            break
        yield [*columns, task.decoded(noisy_labels[start:end])]
        start = end
    else:
        if start == size:
            return
    table.check_unchanged()
    raise CommandError(
        f"{table.path} has another number of rows at the second reading than at the first, {size}; "
        "run again once it is complete"
    )


def _row_numbers(size: int) -> Iterator[list[Any]]:
    for start in range(0, size, _ROWS):
        yield [pa.array(np.arange(start, min(start + _ROWS, size)))]


def _statement(names: Sequence[str], draw: _tasks.Draw, most_rows: int | None) -> str:
    """Returns the content of the statement's file: public, like the table itself."""
    noisy = draw.noisy_labels
    if most_rows is not None and most_rows > 1:
        notes = (*noisy.assumptions, _repeated(most_rows))
        noisy = dataclasses.replace(noisy, assumptions=notes)
    fields = {
        **noisy.statement(),
        "made_by": f"{_tables.MADE_BY} {__version__} randomize",
        "rows": len(noisy),
        "id_columns": list(names[:-1]),
        "most_rows_of_one_id": most_rows,
        "noisy_label_column": names[-1],
        **draw.facts,
    }
    return sealed(fields, table_arrays(noisy.values, draw.facts["prior"]))


def _repeated(most_rows: int) -> str:
    return (
        f"the epsilon is that of one row, and one id has up to {most_rows:,} rows: where an id is "
        "a person, multiply epsilon by the number of the person's rows"
    )


def _report(
    args: argparse.Namespace,
    table: _tables.Table,
    ids: Sequence[str],
    output: _tables.Output,
    draw: _tasks.Draw,
    most_rows: int | None,
) -> None:
    """Prints what was done; both files are complete by now."""
    if draw.stored:
        ignored = "" if args.insecure_seed is None else ", whatever --insecure-seed says"
        say(
            f"the store {one_line(str(args.store))} had draws of these labels: they were used"
            f"{ignored}, and what they cost is counted once",
            error=True,
        )
    say(one_line(_in_words(table, args.column, ids)), error=True)
    if most_rows is not None and most_rows > 1:
        say(f"warning: {_repeated(most_rows)}", error=True)
    say(str(draw.noisy_labels.guarantee()))
    written = f"wrote {args.output} ({len(draw.noisy_labels):,} rows) and {output.statement.name}"
    say(f"\n{one_line(written)}")


def _check_apart(output: pathlib.Path, store: pathlib.Path) -> None:
    """Raises if whoever publishes the folder of the output would publish the store with it."""
    store = store.expanduser()
    folder, kept = (pathlib.Path(os.path.realpath(path)) for path in (output.parent, store))
    if folder == kept or folder in kept.parents or kept in folder.parents:
        where = "lies in" if folder in kept.parents else "has in it"
        raise CommandError(
            f"the store {store} {where if folder != kept else 'is'} the folder of --output "
            f"{output}, which may be published; the store stays with the labels: give folders "
            "apart from each other"
        )


def _id_columns(table: _tables.Table, args: argparse.Namespace, noisy_column: str) -> list[str]:
    """Returns the columns to copy, after checking them and the label column; may be empty."""
    for option, name in [("--column", args.column), *(("--id", name) for name in args.id or ())]:
        if table.columns.count(name) != 1:
            problem = "more than one column" if name in table.columns else "no column"
            raise CommandError(
                f"{table.path} has {problem} {name!r} for {option}; {_what_there_is(table.columns)}"
            )
    if args.id:
        if args.column in args.id:
            raise CommandError(
                f"--id {args.column!r} is the label column; copying it would publish the labels"
            )
        if len(set(args.id)) < len(args.id):
            raise CommandError("--id names a column more than once; name each once")
        ids = list(args.id)
    else:
        ids = [name for name in table.columns if name.lower() in _AUTOMATIC and name != args.column]
        if len(ids) > 1:
            raise CommandError(
                f"{table.path} has several columns that look like row ids, {_listed(ids)}; choose "
                "with --id"
            )
    if noisy_column in (ids or [_ROW_COLUMN]):
        raise CommandError(
            f"the noisy labels would have the name of the id column, {noisy_column!r}; give "
            "another --output-column"
        )
    return ids


def _in_words(table: _tables.Table, label: str, ids: Sequence[str]) -> str:
    """Returns which columns are copied and which are not."""
    kept = f"ids copied from {_listed(ids)}" if ids else f"row numbers in {_ROW_COLUMN!r}"
    rest = [name for name in table.columns if name not in (label, *ids)]
    left = f", left out besides the labels {label!r}: {_listed(rest)}" if rest else ""
    return f"columns: {kept}{left}"


def _what_there_is(names: Sequence[str]) -> str:
    """Returns the names of all columns, unless they may be the cells of the first row."""
    for name in names:
        with contextlib.suppress(ValueError):
            float(name)
            return (
                f"its {len(names)} columns are not shown, as some are named by numbers: is there a "
                "header line?"
            )
    return f"its columns are {_listed(names)}"


def _listed(names: Sequence[str]) -> str:
    """Returns quoted names, not more than fit a line."""
    shown = ", ".join(repr(name) for name in names[:_NAMED])
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown


class IdFacts:
    """Takes ids chunk by chunk, in the order of the rows.

    Args:
        names: of the id columns; none for row numbers.
        size: number of rows.
        digested: whether a digest is wanted too.
    """

    def __init__(self, names: Sequence[str], size: int, *, digested: bool) -> None:
        # Whose rows they are is told by one id; several columns do not say which of them it is.
        self._hashes = np.empty(size if len(names) == 1 else 0, np.int64)
        self._hashed = 0
        # Texts and lengths apart, so that the size of the chunks makes no difference.
        self._digests = [(hashlib.sha256(), hashlib.sha256()) for _ in names] if digested else []
        self._names = names

    def add(self, columns: Sequence[Any]) -> None:
        """Takes one Arrow array for each id column."""
        if not self._digests and not self._hashes.size:
            return
        texts = [_texts(column) for column in columns]
        for column, (of_content, of_lengths) in zip(texts, self._digests, strict=False):
            content, lengths = _bytes_of(column)
            of_content.update(np.ascontiguousarray(content).data)
            of_lengths.update(np.ascontiguousarray(lengths).data)
        for start in range(0, len(texts[0]) if self._hashes.size else 0, _ROWS):
            part = texts[0].slice(start, _ROWS)
            hashes = map(hash, part.to_numpy(zero_copy_only=False))
            end = self._hashed + len(part)
            self._hashes[self._hashed : end] = np.fromiter(hashes, np.int64, len(part))
            self._hashed = end

    def most_rows(self) -> int | None:
        """Returns the largest number of rows with the same id; None without a single id column.

        By hashes of 64 bits: of ten million ids two share one in one of 100,000 tables.
        """
        if not self._hashes.size:
            return None
        self._hashes.sort()
        last = np.flatnonzero(self._hashes[1:] != self._hashes[:-1])  # of each id but the largest
        return int(np.diff(last, prepend=-1, append=self._hashes.size - 1).max())

    def check_store(self, store: pathlib.Path) -> None:
        """Raises if the store's noisy labels went to rows of other ids; else remembers these.

        Comes before anything is published, so no table is out that the store knows nothing of.
        """
        whole = hashlib.sha256(repr(tuple(self._names)).encode())
        for pair in self._digests:
            for digest in pair:
                whole.update(digest.digest())
        path = store / _DIGEST_FILE
        try:
            publish(path, whole.hexdigest().encode())
        except FileExistsError:
            if path.read_bytes() != whole.hexdigest().encode():
                raise CommandError(
                    f"the store {store} holds noisy labels of rows with other ids (another name, "
                    "value or order); give the input and --id of the first run, or a new --store "
                    "(publishing from both costs the sum of their epsilons)"
                ) from None


def _texts(column: Any) -> Any:
    """Returns an Arrow array as the bytes of its texts."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        return column.cast(pa.string()).cast(pa.large_binary())
    except pa.ArrowException:  # bytes that are no text, or a type without one, such as a list
        return pa.array([repr(value).encode() for value in column.to_pylist()], pa.large_binary())


def _bytes_of(texts: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes of all texts, ``uint8``, and ``int64`` lengths, -1 for a null."""
    lengths = pc.binary_length(texts).fill_null(-1).to_numpy(zero_copy_only=False)
    texts = texts.fill_null(b"")  # what lies under a null may be anything
    _, offsets, content = texts.buffers()
    if content is None or not len(texts):
        return np.empty(0, np.uint8), lengths
    bounds = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return np.frombuffer(content, np.uint8)[int(bounds[0]) : int(bounds[-1])], lengths
