"""The columns of a table that a model takes: their choice, their types, and warnings about them."""

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
from tf_labeldp.vault import LabelKind

_FEWEST_ROWS = 20
"""Fewer rows may differ in every column."""
SHOWN = 40
"""Characters of a cell in a message."""
_UNIQUE = 0.95
"""Share of different values from which a column of text or whole numbers looks like an id."""
_BINS, _ROWS_PER_VALUE = 20, 20
"""Bins of a column of numbers, and rows per category, that are enough for means of predictions."""
_SHARE_OF_CERTAINTY = 0.85
"""How far one column goes from the class shares to certainty, from which it may hold the label. Of
two equal classes, a column that is right for 93 % of the labels goes this far."""
_SHARE_OF_VARIANCE = 0.98
"""The same for numbers: twenty bins of a column that equals them explain 99.75 %."""
_CLEAR_SPREAD = 0.2
"""Standard deviation of predictions, in ranges of the labels, that is no mere trend; evenly spread
labels have 0.29."""
_NUMBER = r"^\s*([-+]?(\d+([.,]\d*)?|[.,]\d+)([eE][-+]?\d+)?|[-+]?(inf|nan))\s*$"
"""A cell with a number, with a decimal point or comma; Arrow reads inf and nan as numbers too."""
_SAMPLE = 20_000
"""Rows that are enough for means."""


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


def warnings_of_texts(table: Any, features: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Returns warnings, by column, of texts that are mostly numbers, a public fact."""
    found = {}
    for name in features:
        first = first_text(table.column(name))
        if first is not None and 2 * first[0] > first[1]:
            size, present, row, text = first
            found[name] = (
                f"the column {name} is text: {size:,} of {present:,} cells are numbers, the first "
                f"other one is {text[:SHOWN]!r} in row {row:,} (the header is row 1). Empty or "
                f"correct such cells to use its numbers, or leave it out: --drop {name}"
            )
    return found


def warnings_of_ids(table: Any, features: Mapping[str, np.ndarray]) -> list[str]:
    """Returns warnings of columns that differ in nearly every row, a public fact."""
    found = []
    for name, column in features.items():
        kind = table.column(name).type
        if types.is_floating(kind) or types.is_temporal(kind) or types.is_boolean(kind):
            continue
        present = column[column != ""] if column.dtype.kind in "OU" else column
        distinct = np.unique(present).size
        if present.size >= _FEWEST_ROWS and distinct >= _UNIQUE * present.size:
            found.append(
                f"the column {name} has {distinct:,} different values in {present.size:,} rows, "
                f"like an id, from which nothing can be learnt; leave it out: --drop {name}"
            )
    return found


def warnings_of_leaks(features: dict[str, np.ndarray], model: Any, kind: LabelKind) -> list[str]:
    """Returns warnings of columns that alone predict nearly all labels, by the released model.

    Averages of its predictions over the rows with one value of a column estimate how well the
    column alone would do, noise corrected: probabilities near certainty, or numbers that nothing
    else changes. This reads released values and public features alone.
    """
    size = next(iter(features.values())).shape[0]
    rows = np.random.default_rng(0).choice(size, min(size, _SAMPLE), replace=False)
    sample = {name: column[rows] for name, column in features.items()}
    outputs = kind.outputs_of(model, sample)
    share_of: Any = _share_of_certainty if kind.label_range is None else _share_of_variance
    found = []
    for name, column in sample.items():
        groups = _groups(column)
        if groups.max() * _ROWS_PER_VALUE > rows.size:
            continue
        if share_of(outputs, groups, kind.label_range):
            found.append(
                f"by the released model, the column {name} alone predicts nearly all labels. If it "
                "is made from the label, or known only after it, leave it out (training again is "
                f"another release): --drop {name}"
            )
    return found


def _share_of_certainty(probabilities: np.ndarray, groups: np.ndarray, unused: Any) -> bool:
    share = probabilities.mean(axis=0).max()
    sums = [np.bincount(groups, each) for each in probabilities.T]
    right = float(np.max(sums, axis=0).sum()) / groups.size
    return right - share >= _SHARE_OF_CERTAINTY * (1.0 - share)


def _share_of_variance(numbers: np.ndarray, groups: np.ndarray, ends: tuple[float, float]) -> bool:
    means = np.bincount(groups, numbers) / np.maximum(np.bincount(groups), 1)
    spread = float(numbers.std())
    is_clear = spread >= _CLEAR_SPREAD * (ends[1] - ends[0])
    return is_clear and float(means[groups].var()) >= _SHARE_OF_VARIANCE * spread**2


def _groups(column: np.ndarray) -> np.ndarray:
    """Returns the group (n,) of each row: a category, or a bin of numbers; missing ones are one."""
    if column.dtype.kind in "biuf":
        column = column.astype(np.float64)
        present = column[~np.isnan(column)]
        ends = np.unique(np.quantile(present, np.linspace(0.0, 1.0, _BINS + 1)[1:-1]))
        if np.unique(present).size <= _BINS:
            ends = np.unique(present)
        return np.where(np.isnan(column), ends.size + 1, np.searchsorted(ends, column))
    return np.unique(column.astype(str), return_inverse=True)[1].ravel()
