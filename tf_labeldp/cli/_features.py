"""The columns of a table that a model takes: their choice and their types."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pyarrow import types

from tf_labeldp._validate import counted
from tf_labeldp.cli._cells import Cells
from tf_labeldp.cli._console import CommandError, explained
from tf_labeldp.cli._forms import as_option
from tf_labeldp.cli._tables import near_names
from tf_labeldp.features.reader import FeatureRows

_INDEX_NAME = r"\s*|Unnamed: \d+(\.\d+)*|__index_level_\d+__"
"""Names that pandas gives a column without one."""


def column_of(table: Any, name: str, option: str) -> Any:
    """Returns a column as one Arrow array, or raises an error about the option that names it."""
    number = table.column_names.count(name)
    if number != 1:
        # Without a header line the names are cells of the first row, and one of them is a label.
        advice = "check its header" if number else near_names(name, table.column_names)
        # A name of the user's is in no row of cells, except for the second line of a header.
        cells = table.slice(0, 1).to_pydict() if table.num_rows else {}
        if [name] in cells.values():
            advice = (
                "it is in row 2, as of a header of two lines (a MultiIndex of pandas); write the "
                "table with one: frame.columns = frame.columns.map('_'.join)"
            )
        raise CommandError(
            f"{option} {name}: the table has {counted(number, 'column')} of this name; {advice}"
        )
    return table.column(name).combine_chunks()


def index_columns(table: Any) -> list[str]:
    """Returns columns without a name whose whole numbers all differ, as the index of to_csv()."""
    return [
        name
        for name in dict.fromkeys(table.column_names)
        if re.fullmatch(_INDEX_NAME, name) and Cells(column_of(table, name, "the column")).differ()
    ]


def without_index(names: Sequence[str]) -> str:
    """Returns the line on columns without a name that are left out."""
    listed = ", ".join(map(repr, names))
    return (
        f"{listed}: a column without a name that numbers the rows, as the index of to_csv(), is "
        "left out; to use it, give it a name in the header line"
    )


def chosen_columns(table: Any, args: argparse.Namespace, ids: Sequence[str] = ()) -> list[str]:
    """Returns the names of the features: those of --features, or all but --drop and ``ids``."""
    for option, names in (("--features", args.features or ()), ("--drop", args.drop)):
        for name in names:
            column_of(table, name, option)
    if args.label in (args.features or ()):
        raise CommandError(
            f"--features {args.label} is the column of --label; a model that takes it would "
            "publish the labels"
        )
    names = args.features or [
        name for name in table.column_names if name not in (args.label, *args.drop, *ids)
    ]
    if not names:
        raise CommandError("the table has no feature columns; leave out less with --drop")
    for name in names:
        column_of(table, name, "the column")
        if not name.strip():
            raise CommandError(
                "a column has no name, by which a model could find it; name it in the header line, "
                f"or leave it out: {as_option('--drop', name)}"
            )
    return list(dict.fromkeys(names))


def features_of(table: Any, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns columns (n,): numbers, NaN where missing, or texts; dates become days."""
    for name in names:
        if types.is_null(table.column(name).type):
            raise CommandError(
                f"the column {name} has no value at all; leave it out: {as_option('--drop', name)}"
            )
    with explained(TypeError, ValueError):
        return FeatureRows(table.select(names)).table()


def described(table: Any, features: Mapping[str, np.ndarray], label: str) -> str:
    """Returns the columns that a model takes, and those that are left out, in one line."""
    left_out = [name or "''" for name in table.column_names if name not in (*features, label)]
    taken = ", ".join(f"{name} ({_kind(table, name, features[name])})" for name in features)
    line = f"{counted(len(features), 'feature')}: {taken}"
    return line + (f"; left out: {', '.join(left_out)}" if left_out else "")


def _kind(table: Any, name: str, values: np.ndarray) -> str:
    if types.is_time(table.column(name).type):
        return "time, in hours"
    if types.is_temporal(table.column(name).type):
        return "date, in days"
    return "number" if values.dtype.kind in "biuf" else "text"
