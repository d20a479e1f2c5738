"""The work of ``tf-labeldp randomize``: reads labels, draws, writes ids with noisy labels.

The input is read twice, so that only its label column is ever in memory: once for the labels, once
for the ids. Nothing that is written or printed depends on a true label but through the draw; only
the errors that stop a run count cells, and they are for the label holder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tf_labeldp import mechanisms
from tf_labeldp._version import __version__
from tf_labeldp.cli import _prior_file, _table_read
from tf_labeldp.cli._errors import CommandError
from tf_labeldp.cli._randomize_classes import Classification
from tf_labeldp.cli._randomize_regression import Regression
from tf_labeldp.cli._randomize_task import Draw, Task
from tf_labeldp.cli._row_progress import RowProgress
from tf_labeldp.cli._table_write import MADE_BY, Output

_ROWS = 1 << 18
"""Rows written at once where the ids are row numbers."""
_NAMED = 20
"""At most so many columns are listed by name."""
_AUTOMATIC_IDS = ("id", "row_id")
_ROW_COLUMN = "row"


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
        ids = _id_columns(table, args)
        target = Output(args.output, overwrite=args.overwrite, source=args.input)
        task = _task(args, mechanism)
        names = [*(ids or [_ROW_COLUMN]), _output_column(args)]
        types = [*(table.id_types(ids) if ids else [pa.int64()]), task.output_type]
        with target as output:
            output.begin(names, types)
            progress.begin("reading labels")
            vault = task.vault(_read_labels(table, args.column, task, progress))
            progress.begin("drawing noisy labels")
            draw = task.draw(vault)
            del vault  # the labels are not needed any more
            progress.begin("writing", draw.noisy_labels.size)
            for columns in _output_chunks(table, ids, task, draw.noisy_labels):
                output.write(columns)
                progress.advance(len(columns[0]))
            table.check_unchanged()
            output.publish(_statement(names, draw))
        progress.end()
    if not args.quiet:
        if draw.stored:
            print(
                f"the store {args.store} had draws of these labels: they were used, and what they "
                "cost is counted once",
                file=sys.stderr,
            )
        _say_columns(table, args.column, ids)
        print(draw.guarantee)
        rows = draw.noisy_labels.size
        print(f"\nwrote {args.output} ({rows:,} rows) and {output.statement.name}")
    return 0


def _id_columns(table: _table_read.Table, args: argparse.Namespace) -> list[str]:
    """Returns the columns to copy, after checking them and the label column; may be empty."""
    for option, name in [("--column", args.column), *(("--id", name) for name in args.id or ())]:
        if table.columns.count(name) != 1:
            problem = "more than one column" if name in table.columns else "no column"
            raise CommandError(
                f"{table.path} has {problem} {name!r} for {option}; its columns are "
                f"{_listed(table.columns)}"
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
        ids = [n for n in table.columns if n.lower() in _AUTOMATIC_IDS and n != args.column]
        if len(ids) > 1:
            raise CommandError(
                f"{table.path} has several columns that look like row ids, {_listed(ids)}; choose "
                "with --id"
            )
    if _output_column(args) in (ids or [_ROW_COLUMN]):
        raise CommandError(
            f"the noisy labels would have the name of the id column, {_output_column(args)!r}; "
            "give another --output-column"
        )
    return ids


def _output_column(args: argparse.Namespace) -> str:
    return str(args.column if args.output_column is None else args.output_column)


def _task(args: argparse.Namespace, mechanism: str | None) -> Task:
    common = {"epsilon": args.epsilon, "store": args.store, "seed": args.seed}
    if args.task == "regression":
        options = {name: getattr(args, name) for name in ("prior_epsilon", "max_values")}
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
    names = classes or tuple(str(code) for code in range(args.num_classes))
    prior = None if args.prior is None else _prior_file.read_class_prior(args.prior, names)
    return Classification(**common, num_classes=len(names), classes=classes, prior=prior)


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
            f"column {column!r} of {table.path} has no label in {missing} of {rows} rows; leave "
            "these rows out, or fill them in by a rule that does not look at labels"
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


def _statement(names: Sequence[str], draw: Draw) -> str:
    """Returns the content of the statement's file: public, like the table itself."""
    fields = {
        "made_by": f"{MADE_BY} {__version__} randomize",
        "statement": str(draw.guarantee).splitlines(),
        "guarantee": json.loads(draw.guarantee.to_json()),
        "rows": int(draw.noisy_labels.size),
        "id_columns": list(names[:-1]),
        "noisy_label_column": names[-1],
        **draw.facts,
    }
    return json.dumps(fields, indent=2, ensure_ascii=False) + "\n"


def _say_columns(table: _table_read.Table, label: str, ids: Sequence[str]) -> None:
    kept = f"ids copied from {_listed(ids)}" if ids else f"row numbers in {_ROW_COLUMN!r}"
    rest = [name for name in table.columns if name not in (label, *ids)]
    left = f", left out besides the labels {label!r}: {_listed(rest)}" if rest else ""
    print(f"columns: {kept}{left}", file=sys.stderr)


def _listed(names: Sequence[str]) -> str:
    """Returns quoted names, not more than fit a line."""
    shown = ", ".join(repr(name) for name in names[:_NAMED])
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown
