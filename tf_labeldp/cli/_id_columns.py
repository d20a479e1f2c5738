"""Which columns of a table are copied, and what is said of the others."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tf_labeldp.cli import _table_read
from tf_labeldp.cli._errors import CommandError

ROW_COLUMN = "row"
"""The column of row numbers, where there are no ids."""

_AUTOMATIC = ("id", "row_id", ROW_COLUMN)
_NAMED = 20
"""At most so many columns are listed by name."""


def id_columns(table: _table_read.Table, args: argparse.Namespace) -> list[str]:
    """Returns the columns to copy, after checking them and the label column; may be empty.

    Raises:
        CommandError: there is no such column, or it is not clear which one is meant.
    """
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
    if output_column(args) in (ids or [ROW_COLUMN]):
        raise CommandError(
            f"the noisy labels would have the name of the id column, {output_column(args)!r}; "
            "give another --output-column"
        )
    return ids


def output_column(args: argparse.Namespace) -> str:
    """Returns the name of the column of noisy labels."""
    return str(args.column if args.output_column is None else args.output_column)


def in_words(table: _table_read.Table, label: str, ids: Sequence[str]) -> str:
    """Returns which columns are copied and which are not."""
    kept = f"ids copied from {_listed(ids)}" if ids else f"row numbers in {ROW_COLUMN!r}"
    rest = [name for name in table.columns if name not in (label, *ids)]
    left = f", left out besides the labels {label!r}: {_listed(rest)}" if rest else ""
    return f"columns: {kept}{left}"


def _what_there_is(names: Sequence[str]) -> str:
    """Returns the names of all columns, unless they may be the cells of the first row."""
    if any(_is_number(name) for name in names):
        return (
            f"its {len(names)} columns are not shown, as some are named by numbers: is there a "
            "header line?"
        )
    return f"its columns are {_listed(names)}"


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


def _listed(names: Sequence[str]) -> str:
    """Returns quoted names, not more than fit a line."""
    shown = ", ".join(repr(name) for name in names[:_NAMED])
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown
