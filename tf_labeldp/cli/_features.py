"""The columns of a table that a model takes: their choice and their types."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc
from pyarrow import types

from tf_labeldp._validate import counted
from tf_labeldp.cli._console import CommandError, explained
from tf_labeldp.features.reader import FeatureRows

SHOWN = 40
"""Characters of a cell in a message."""
_NUMBER = r"^\s*([-+]?(\d+([.,]\d*)?|[.,]\d+)([eE][-+]?\d+)?|[-+]?(inf|nan))\s*$"
"""A cell with a number, with a decimal point or comma; Arrow reads inf and nan as numbers too."""


def column_of(table: Any, name: str, option: str) -> Any:
    """Returns a column as one Arrow array, or raises an error about the option that names it."""
    number = table.column_names.count(name)
    if number != 1:
        # Without a header line the names are cells of the first row, and one of them is a label.
        near = difflib.get_close_matches(name, table.column_names)
        advice = f"do you mean {', '.join(near)}?" if near and not number else "check its header"
        raise CommandError(
            f"{option} {name}: the table has {counted(number, 'column')} of this name; {advice}"
        )
    return table.column(name).combine_chunks()


def chosen_columns(table: Any, args: argparse.Namespace) -> list[str]:
    """Returns the names of the features, by --features or --drop."""
    for option, names in (("--features", args.features or ()), ("--drop", args.drop)):
        for name in names:
            column_of(table, name, option)
    if args.label in (args.features or ()):
        raise CommandError(
            f"--features {args.label} is the column of --label; a model that takes it would "
            "publish the labels"
        )
    names = args.features or [
        name for name in table.column_names if name not in (args.label, *args.drop)
    ]
    if not names:
        raise CommandError("the table has no feature columns; leave out less with --drop")
    for name in names:
        column_of(table, name, "the column")
    return list(dict.fromkeys(names))


def features_of(table: Any, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns columns (n,): numbers, NaN where missing, or texts; dates become days."""
    for name in names:
        if types.is_null(table.column(name).type):
            raise CommandError(
                f"the column {name} has no value at all; leave it out: --drop {name}"
            )
    with explained(TypeError, ValueError):
        return FeatureRows(table.select(names)).table()


def described(table: Any, features: Mapping[str, np.ndarray], label: str) -> str:
    """Returns the columns that a model takes, and those that are left out, in one line."""
    left_out = [name for name in table.column_names if name not in (*features, label)]
    taken = ", ".join(f"{name} ({_kind(table, name, features[name])})" for name in features)
    line = f"{counted(len(features), 'feature')}: {taken}"
    return line + (f"; left out: {', '.join(left_out)}" if left_out else "")


def _kind(table: Any, name: str, values: np.ndarray) -> str:
    if types.is_temporal(table.column(name).type):
        return "date, in days"
    return "number" if values.dtype.kind in "biuf" else "text"


def first_text(column: Any) -> tuple[int, int, int, str] | None:
    """Returns the first cell of a text column that is no number; None if there is none.

    Returns:
        The number of cells that are numbers, the number of cells that are not empty, the row of
        the first cell that is no number (the header is row 1), and this cell.
    """
    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not (types.is_string(column.type) or types.is_large_string(column.type)):
        return None
    present = pc.not_equal(pc.utf8_trim_whitespace(column), "").fill_null(False)
    number = pc.match_substring_regex(column, _NUMBER, ignore_case=True).fill_null(False)
    others = pc.and_(present, pc.invert(number))
    row = pc.index(others, True).as_py()
    if row < 0:
        return None
    return pc.sum(number).as_py(), pc.sum(present).as_py(), row + 2, str(column[row])
