"""The forms of a table's columns of text: decided by all cells, stated in a line, named by --types.

A cell alone does not show what ``1.234`` or ``03/04/2024`` is: dates are decided by all cells of a
column, and the decimal sign by all columns of a file.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import types

from tf_labeldp._validate import counted
from tf_labeldp.cli._cells import COMMA, POINT, SHORT_DATES, SIGNS, Cells, Numbers
from tf_labeldp.cli._console import CommandError

KINDS = ("number", "text", "date", "time", "id")
_SHOWN = 40
"""Characters of a cell in a message."""
_MANY = 1000
"""Categories of a column of text from which a remark counts them."""
_EXACT = 2.0**53
"""Doubles are exact whole numbers below it."""
_FLAGS = ("true", "false")


class Form(NamedTuple):
    """The form of a column's cells, ready for JSON.

    Cells of another form are refused, or count as missing if ``--types`` named the form.
    """

    kind: str
    detail: str = ""  # the decimal sign of numbers, ``"point"`` or ``"comma"``; the form of dates
    unit: str | None = None  # of numbers; None for the unit of most cells
    is_named: bool = False

    def words(self) -> str:
        if self.kind == "number":
            return f"numbers with the unit {self.unit}" if self.unit else "numbers"
        return {
            "date": f"dates of the form {self.detail}, read as days",
            "time": "times of day, read as hours",
            "id": "ids, which are no feature",
        }.get(self.kind, "text")


def named_forms(words: Sequence[str]) -> dict[str, Form]:
    """Returns the forms of ``--types COLUMN=KIND`` or ``COLUMN=KIND:DETAIL``, by column."""
    found = {}
    for word in words:
        name, _, form = word.rpartition("=")
        kind, _, detail = form.partition(":")
        parts = sorted(part[0] for part in re.findall("YYYY|YY|MONTH|MM|DD", detail))
        is_detail = (
            detail in SIGNS
            if kind == "number"
            else kind == "date" and "".join(parts) in ("MY", "DMY")
        )
        if "=" not in word or kind not in KINDS or (detail and not is_detail):
            raise CommandError(
                f"expected --types COLUMN=KIND, got {word!r}. KIND is {', '.join(KINDS)}, "
                "number:comma, number:point, or a form such as date:DD.MM.YYYY"
            )
        found[name] = Form(kind, detail, is_named=True)
    return found


def as_option(name: str, column: str) -> str:
    """Returns an option with the name of a column, to be pasted into a shell."""
    return f"{name}{'=' if column.startswith('-') else ' '}{shlex.quote(column)}"


def as_type(column: str, form: str) -> str:
    """Returns the option that names a column's form, to be pasted into a shell."""
    return as_option("--types", f"{column}={form}")


class TableForms:
    """Reads the columns of one file.

    Args:
        table: an Arrow table, whose columns of text are read.
        named: forms that are known, by column: those of ``--types``, or of a model.
        delimiter: the mark between the cells of a CSV file; empty for a file with types, where a
            column of text with plain numbers stays text.

    Attributes:
        table: the table as it stands.
        decimal: the decimal sign of the file, ``"point"`` or ``"comma"``; empty if no cell has one.
        named: the forms that are known.
        forms: the forms of the columns that were read.
        is_label_open: whether nothing shows the decimal sign of the labels.
        remarks: a line for each column that is not read as it stands.
    """

    def __init__(
        self, table: Any, named: Mapping[str, Form], delimiter: str, decimal: str = ""
    ) -> None:
        self.table, self.named, self._delimiter = table, dict(named), delimiter
        self._decimal_of_fit, self.decimal, self.is_label_open = decimal, "", False
        self._cells: dict[str, Cells] = {}
        self.forms: dict[str, Form] = {}
        self.remarks: list[str] = []
        for name in named:
            if name not in table.column_names:
                raise CommandError(f"--types {name}: the table has no column of this name")

    @property
    def is_of_text(self) -> bool:
        """Whether all columns of the file are text, as in CSV."""
        return bool(self._delimiter)

    def to_json(self) -> dict[str, Any]:
        """Returns the forms of columns that are not read as they stand, and ids."""
        forms = {**self.named, **self.forms}
        plain = (Form("text"), Form("number", unit=""), Form("number"))
        return {name: list(form) for name, form in forms.items() if form not in plain}

    @staticmethod
    def of_json(forms: Mapping[str, Any]) -> tuple[dict[str, Form], str]:
        """Returns the forms of a model, and its decimal sign, for a file that shows none."""
        found = {name: Form(*parts) for name, parts in forms.items()}
        numbers = [form for form in found.values() if form.kind == "number"]
        decimal = next((form.detail for form in numbers if form.detail and not form.is_named), "")
        for name, form in found.items():
            if form.kind == "number" and not form.is_named:
                found[name] = form._replace(detail="")
        return found, decimal

    def cells(self, name: str) -> Cells:
        if name not in self._cells:
            self._cells[name] = Cells(self.table.column(name))
        return self._cells[name]

    def read(
        self,
        names: Sequence[str],
        label: str | None = None,
        numbers: Sequence[str] = (),
        texts: Sequence[str] = (),
    ) -> Any:
        """Returns the table with these columns read; each must be in it once.

        Args:
            names: the columns to read.
            label: the column of labels, which is read by the other columns' convention.
            numbers: columns that a model takes as numbers.
            texts: columns that a model takes as texts.
        """
        read = [name for name in names if is_text(self.table.column(name).type)]
        for name in names:
            kind = self.table.column(name).type
            if types.is_date(kind) or types.is_timestamp(kind) or types.is_time(kind):
                self.forms[name] = Form("time" if types.is_time(kind) else "date")
        kinds = {name: "text" if name in texts else self._kind_of(name) for name in read}
        kinds |= {name: "number" for name in numbers if kinds.get(name) == "text"}
        self.decimal = self._decimal([name for name in read if kinds[name] == "number"], label)
        ids = [name for name, form in self.named.items() if form.kind == "id"]
        self.remarks += [f"{name}: {self.named[name].words()}" for name in ids]
        dates = self._dates([name for name in read if kinds[name] == "date"])
        table = self.table
        for name in read:
            form = self.named.get(name, Form(kinds[name]))
            if form.kind == "date":
                form = form._replace(detail=dates[name])
            column = self._column(name, form)
            table = table.set_column(table.column_names.index(name), name, column)
        return table

    def number_label(self, name: str) -> tuple[Any, int | None]:
        """Returns a column of labels as doubles, null where missing; call it after ``read``.

        A sign of limit is no number here, since nothing may be said on how many labels have one.

        Returns:
            The column, and the row of the first cell that is no number, or None.
        """
        column = self.table.column(name)
        if not is_text(column.type):
            return column, None
        cells, form = self.cells(name), self.named.get(name, Form("number"))
        numbers = cells.numbers
        decimal = self._decimal_of(name, form, numbers)
        self.is_label_open = numbers.is_open and not (
            form.detail or self.decimal or numbers.evidence
        )
        values, fits = numbers.read(decimal, numbers.unit)
        wrong = ~(fits & ~numbers.has_limit) & ~cells.is_missing
        if numbers.unit:
            self.remarks.append(f"{name}: {Form('number', unit=numbers.unit).words()}")
        rows = pa.array(cells.spread(values, np.nan), mask=cells.missing_rows())
        return pa.chunked_array([rows]), cells.first(wrong) if wrong.any() else None

    def _kind_of(self, name: str) -> str:
        if name in self.named:
            return self.named[name].kind
        cells = self.cells(name)
        if not cells.num_present or types.is_dictionary(self.table.column(name).type):
            return "text"
        if self.is_of_text and cells.are(_FLAGS):
            return "number"
        # A few cells rule out most columns of text, some of which have millions.
        if cells.few().numbers.are_all and (numbers := cells.numbers).are_all:
            if cells.fit(numbers.has_limit):
                return "text"  # Bands, such as <=50K and >50K, which as limits would be equal.
            is_plain = not (numbers.unit or COMMA in numbers.evidence or numbers.has_limit.any())
            return "text" if numbers.are_codes or (is_plain and not self.is_of_text) else "number"
        if cells.date_forms():
            return "date"
        return "time" if cells.fit(cells.hours()[1]) else "text"

    def _decimal(self, names: Sequence[str], label: str | None) -> str:
        """Returns the one decimal sign of the features, or else of the other columns."""
        free = [name for name in names if not self.named.get(name, Form("number")).detail]
        signs = _signs({name: self.cells(name).numbers for name in free})
        open_names = [] if signs else [name for name in free if self.cells(name).numbers.is_open]
        if label is not None and self._has_texts(label):
            signs |= _signs({label: self.cells(label).numbers}, signs)
        if len(signs) == 2:
            raise _two_signs(signs)
        if signs and open_names:
            # The model's file has the forms of features, which must not show how labels look.
            [sign] = signs
            for name in open_names:
                if self._usual(self.cells(name).numbers) != sign:
                    raise CommandError(
                        f"column {name} can be read in two ways, and only the labels show a "
                        "decimal sign, by which no feature is read. Say how it is read: "
                        f"{as_type(name, f'number:{sign}')}"
                    )
            return ""
        if not signs:
            others = [
                name
                for place, name in enumerate(self.table.column_names)
                if name not in (*names, label)
                and self.table.column_names.count(name) == 1
                and is_text(self.table.column(place).type)
            ]
            numbers = {name: self.cells(name).numbers for name in others}
            signs = _signs({name: each for name, each in numbers.items() if each.are_all})
            read = [*names, label] if label is not None and self._has_texts(label) else names
            if len(signs) == 2 and any(self.cells(name).numbers.is_open for name in read):
                raise _two_signs(signs)
        return next(iter(signs)) if len(signs) == 1 else ""

    def _has_texts(self, name: str) -> bool:
        return is_text(self.table.column(name).type)

    def _usual(self, numbers: Numbers) -> str:
        """Returns the decimal sign of numbers where nothing shows it."""
        is_comma = numbers.sign == "," and self._delimiter == ";"
        return COMMA if is_comma else POINT

    def _decimal_of(self, name: str, form: Form, numbers: Numbers) -> str:
        """Returns the decimal sign of a column; a line states what its cells do not show."""
        sign = COMMA if numbers.sign == "," else POINT
        found = form.detail or self.decimal or self._decimal_of_fit
        # Only labels show a sign that is not the file's.
        decimal = found or next(iter(numbers.evidence), self._usual(numbers))
        is_clear = form.detail or numbers.evidence or (self.decimal and decimal == sign)
        if numbers.is_open and not is_clear:
            mark, other = numbers.sign, COMMA if decimal == POINT else POINT
            value = "1.234" if decimal == sign else "1234"
            self.remarks.append(
                f"{name}: numbers in which 1{mark}234 is read as {value}; otherwise "
                f"{as_type(name, f'number:{other}')}"
            )
        return decimal

    def _dates(self, names: Sequence[str]) -> dict[str, str]:
        """Returns the forms of columns of dates; days and months have one order in a file."""
        found: dict[str, list[str]] = {}
        for name in names:
            detail = self.named.get(name, Form("date")).detail
            forms = [detail] if detail else self.cells(name).date_forms()
            if not forms:
                short = self.cells(name).date_forms(SHORT_DATES)
                form = short[0] if short else "DD.MM.YYYY"
                raise CommandError(
                    f"--types {name}=date: the cells have no form of dates that is known. Give it, "
                    f"such as {as_type(name, f'date:{form}')}"
                )
            found[name] = forms
        orders = {forms[0][0] for forms in found.values() if len(forms) == 1} & {"D", "M"}
        for name, forms in found.items():
            fitting = [form for form in forms if len(forms) == 1 or {form[0]} == orders]
            if len(fitting) != 1:
                raise CommandError(
                    f"the dates of column {name} can be {' or '.join(forms)}. Choose one: "
                    f"{as_type(name, f'date:{forms[0]}')}"
                )
            found[name] = fitting
        return {name: form for name, [form] in found.items()}

    def _column(self, name: str, form: Form) -> Any:
        """Returns a column in its form, which is noted with a line."""
        column, cells = self.table.column(name), self.cells(name)
        self.forms[name] = form
        if not cells.num_present:
            kind = pa.float64() if form.kind not in ("text", "id") else pa.string()
            return pa.nulls(len(column), kind if form.is_named else pa.null())
        if form.kind in ("text", "id"):
            self._say_text(name, form, cells)
            return column
        if form.kind == "number" and cells.are(_FLAGS):
            return pa.array(cells.spread(cells.equal("true"), False), mask=cells.missing_rows())
        words: list[str] = []
        if form.kind == "number":
            self.forms[name] = form = self._number_form(name, form, words)
            values, fits = cells.numbers.read(form.detail or POINT, form.unit or "")
        else:
            values, fits = cells.hours() if form.kind == "time" else cells.days(form.detail)
        wrong = ~fits & ~cells.is_missing
        if wrong.any():
            words.append(self._misfits(name, form, cells, wrong))
        if words or form.unit or form.kind != "number" or form.is_named:
            self.remarks.append("; ".join([f"{name}: {form.words()}", *words]))
        return _arrow(cells, values, wrong)

    def _number_form(self, name: str, form: Form, words: list[str]) -> Form:
        """Returns the form of numbers with its decimal sign and unit; ``words`` get a remark."""
        cells = self.cells(name)
        numbers = cells.numbers
        decimal = self._decimal_of(name, form, numbers)
        if limits := int(cells.counts[numbers.has_limit & ~cells.is_missing].sum()):
            words.append(
                f"{limits:,} of {cells.num_present:,} have a sign of limit (<, >, +) and are read "
                "as the limit"
            )
        unit = numbers.unit if form.unit is None else form.unit
        has_sign = numbers.evidence or numbers.is_open
        return form._replace(detail=decimal if has_sign else form.detail, unit=unit)

    def _misfits(self, name: str, form: Form, cells: Cells, wrong: np.ndarray) -> str:
        """Returns words on cells of another form, which count as missing, or raises."""
        row, number = cells.first(wrong), counted(int(cells.counts[wrong].sum()), "cell")
        text = cells.text(row)[:_SHOWN]
        place = f"the first in row {row + 2:,} (the header is row 1): {text!r}"
        if form.is_named:
            return f"cells of another form are missing: {number}, {place}"
        if form.kind == "number" and not form.unit:
            raise CommandError(
                f"the model takes numbers in column {name}, got text in {number}, {place}. Empty "
                f"or correct such cells, or count them as missing: {as_type(name, 'number')}"
            )
        raise CommandError(
            f"the model takes {form.words()} in column {name}, got another form in {number}, "
            f"{place}. Correct such cells, or say how they are read, such as "
            f"{as_type(name, 'date:YYYY-MM-DD' if form.kind == 'date' else form.kind)}"
        )

    def _say_text(self, name: str, form: Form, cells: Cells) -> None:
        if form.is_named:
            return
        number = int(np.count_nonzero(~cells.is_missing))
        if self.is_of_text and cells.numbers.are_codes and cells.numbers.are_all:
            self.remarks.append(
                f"{name}: codes with leading zeros, read as text; for numbers "
                f"{as_type(name, 'number')}"
            )
        elif short := cells.date_forms(SHORT_DATES):
            self.remarks.append(
                f"{name}: dates without a century, read as text; for dates "
                f"{as_type(name, f'date:{short[0]}')}"
            )
        elif _form_of_most(cells.few()) and (most := _form_of_most(cells)) is not None:
            words, kind, others = most
            self.remarks.append(
                f"{name}: text, of which {others:,} of {cells.num_present:,} cells are no {words}; "
                f"to count these as missing {as_type(name, kind)}"
            )
        elif number >= _MANY:
            self.remarks.append(
                f"{name}: text with {number:,} different values, each of which becomes a category; "
                f"if it is no text, see --types, or leave it out: {as_option('--drop', name)}"
            )


def _form_of_most(cells: Cells) -> tuple[str, str, int] | None:
    """Returns what most cells of a column of text are, its form, and how many are something else.

    None if no form fits most cells, or one fits all: codes, which are text.
    """
    numbers, present = cells.numbers, ~cells.is_missing
    found = [("numbers", "number", numbers.read(sign, numbers.unit)[1]) for sign in SIGNS]
    found.append(("times of day", "time", cells.hours()[1]))
    for form in cells.date_forms(most=True):
        found.append((f"dates of the form {form}", f"date:{form}", cells.days(form)[1]))
    words, kind, fits = max(found, key=lambda each: int(cells.counts[each[2] & present].sum()))
    others = int(cells.counts[present & ~fits].sum())
    return (words, kind, others) if 0 < 2 * others < cells.num_present else None


def is_text(kind: Any) -> bool:
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _signs(
    numbers: Mapping[str, Numbers], other: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Returns the decimal signs that columns show, each with the first such column."""
    found = dict(other or {})
    for name, column in numbers.items():
        for sign in sorted(column.evidence):
            found.setdefault(sign, name)
    return found


def _two_signs(signs: Mapping[str, str]) -> CommandError:
    point, comma = signs[POINT], signs[COMMA]
    if point == comma:
        found = f"column {point} has cells with decimal points and others with decimal commas"
    else:
        found = f"column {point} has decimal points and column {comma} decimal commas"
    return CommandError(
        f"{found}, but a file has one convention. Correct one of them, or say how a column is read:"
        f" {as_type(point, 'number:point')}, or {as_type(point, 'text')}"
    )


def _arrow(cells: Cells, values: np.ndarray, wrong: np.ndarray) -> Any:
    """Returns values of distinct cells as an Arrow column: whole numbers, doubles, dates, times."""
    is_null = cells.rows_of(cells.is_missing | wrong)
    if values.dtype.kind == "M":
        rows = cells.spread(values, np.datetime64("NaT"))
        days = rows.astype("M8[D]")
        is_date = (days == rows) | is_null
        return pa.array(days if is_date.all() else rows, mask=is_null)
    present = values[~cells.is_missing & ~wrong]
    rows = cells.spread(values, np.nan)
    is_whole = not cells.has_signs() and (np.abs(present) < _EXACT).all()
    is_whole &= bool((np.floor(present) == present).all())
    if is_whole:
        return pa.array(np.where(is_null, 0, rows).astype(np.int64), mask=is_null)
    return pa.array(np.where(is_null, np.nan, rows), mask=is_null)
