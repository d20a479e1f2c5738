"""The work of ``tf-labeldp randomize``: reads labels, draws, writes ids with noisy labels.

The input is read twice, so that only its label column is ever in memory: once for the labels, once
for the ids. Nothing that is written or printed depends on a true label but through the draw; only
the errors that stop a run count cells, and they are for the label holder.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tf_labeldp import mechanisms
from tf_labeldp._version import __version__
from tf_labeldp.cli import _id_columns, _prior_file, _table_read
from tf_labeldp.cli._errors import CommandError
from tf_labeldp.cli._id_facts import IdFacts
from tf_labeldp.cli._randomize_classes import Classification
from tf_labeldp.cli._randomize_regression import Regression
from tf_labeldp.cli._randomize_task import Draw, Task, check_apart
from tf_labeldp.cli._row_progress import RowProgress
from tf_labeldp.cli._say import one_line, say
from tf_labeldp.cli._table_write import MADE_BY, Output
from tf_labeldp.vault._noisy_labels import sealed, table_arrays

_ROWS = 1 << 18
"""Rows written at once where the ids are row numbers."""


def run(args: argparse.Namespace, mechanism: str | None) -> int:
    """Randomizes a table.

    Args:
        args: checked arguments of the command.
        mechanism: class name of the baseline asked for, or None.

    Returns:
        The exit code.

    Raises:
        CommandError: anything is wrong with the input, the output, the prior or the store.
    """
    with contextlib.closing(RowProgress(quiet=args.quiet)) as progress:
        table = _table_read.open_table(args.input)
        ids = _id_columns.id_columns(table, args)
        target = Output(args.output, overwrite=args.overwrite, source=args.input)
        if args.store is not None:
            check_apart(args.output, args.store)
        task = _task(args, mechanism)
        names = [*(ids or [_id_columns.ROW_COLUMN]), _id_columns.output_column(args)]
        types = [*(table.id_types(ids) if ids else [pa.int64()]), task.output_type]
        with target as output:
            output.begin(names, types)
            progress.begin("reading labels")
            vault = task.vault(_read_labels(table, args.column, task, progress))
            progress.begin("drawing noisy labels")
            draw = task.draw(vault)
            del vault  # the labels are not needed any more
            size = len(draw.noisy_labels)
            facts = IdFacts(ids, size, digested=args.store is not None)
            progress.begin("writing", size)
            for columns in _output_chunks(table, ids, task, draw.noisy_labels.values):
                output.write(columns)
                facts.add(columns[:-1])
                progress.advance(len(columns[0]))
            table.check_unchanged()
            task.check_ids(facts)
            most_rows = facts.most_rows()
            output.publish(_statement(names, draw, most_rows))
        progress.end()
    if not args.quiet:
        _report(args, table, ids, output, draw, most_rows)
    return 0


def _task(args: argparse.Namespace, mechanism: str | None) -> Task:
    common = {"epsilon": args.epsilon, "store": args.store, "insecure_seed": args.insecure_seed}
    if args.task == "regression":
        names = ("prior_epsilon", "max_values")
        options = {name: getattr(args, name) for name in names}
        options["whole_numbers"] = bool(args.whole_numbers)
        if mechanism is not None:
            try:
                options["mechanism"] = getattr(mechanisms, mechanism)(
                    args.epsilon, args.low, args.high
                )
            except ValueError as error:
                raise CommandError(f"--mechanism {args.mechanism}: {error}") from None
        if args.prior is not None:
            options["prior"] = _prior_file.read_number_prior(args.prior, args.low, args.high)
        return Regression(
            **common,
            low=args.low,
            high=args.high,
            clip=bool(args.clip),
            loss=args.loss or "squared_error",
            **options,
        )
    classes = None if args.classes is None else tuple(args.classes)
    number = len(classes) if classes else args.num_classes
    prior = None
    if args.prior is not None:
        prior_classes = classes or tuple(str(code) for code in range(number))
        prior = _prior_file.read_class_prior(args.prior, prior_classes)
    return Classification(**common, num_classes=number, classes=classes, prior=prior)


def _read_labels(
    table: _table_read.Table, column: str, task: Task, progress: RowProgress
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
        raise _table_read.no_rows(table.path)
    if missing:
        raise CommandError(
            f"column {column!r} of {table.path} has no label in {missing} of {rows} rows; "
            f"{_table_read.FILL}"
        )
    labels = np.concatenate(parts)
    problem = task.check(labels)
    if problem is not None:
        raise CommandError(f"column {column!r} of {table.path}: {problem}")
    return labels


def _output_chunks(
    table: _table_read.Table,
    ids: Sequence[str],
    task: Task,
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


def _statement(names: Sequence[str], draw: Draw, most_rows: int | None) -> str:
    """Returns the content of the statement's file: public, like the table itself."""
    noisy = draw.noisy_labels
    if most_rows is not None and most_rows > 1:
        notes = (*noisy.assumptions, _repeated(most_rows))
        noisy = dataclasses.replace(noisy, assumptions=notes)
    fields = {
        **noisy.statement(),
        "made_by": f"{MADE_BY} {__version__} randomize",
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
    table: _table_read.Table,
    ids: Sequence[str],
    output: Output,
    draw: Draw,
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
    say(one_line(_id_columns.in_words(table, args.column, ids)), error=True)
    if most_rows is not None and most_rows > 1:
        say(f"warning: {_repeated(most_rows)}", error=True)
    say(str(draw.noisy_labels.guarantee()))
    written = f"wrote {args.output} ({len(draw.noisy_labels):,} rows) and {output.statement.name}"
    say(f"\n{one_line(written)}")
