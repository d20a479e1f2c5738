"""Cells of text as people write them: numbers, dates and times, read by column."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

MISSING = (
    *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"),
    *("N/A", "NA", "NULL", "NaN", "n/a", "nan", "null", "None", "<NA>", "NaT"),
)
"""Missing values of columns other than text: those of Arrow, and pandas's own."""
POINT, COMMA = "point", "comma"
SIGNS = {POINT: ".", COMMA: ","}
_BLANKS = " \u00a0\u2007\u202f"
_GAPS = f"'\u2019{_BLANKS}"
"""Marks between thousands in either convention."""
_CURRENCIES = "USD|EUR|CHF|GBP|JPY|CNY|INR|SEK|NOK|DKK|PLN|CZK|AUD|CAD|BRL"
_NUMBER = (
    rf"^(?P<limit>(?:[<>]=?|[≤≥])?)[{_BLANKS}]*(?P<sign>[-+−]?)[{_BLANKS}]*"
    rf"(?P<before>(?:[$€£¥₹]|{_CURRENCIES})?)[{_BLANKS}]*"
    rf"(?P<number>(?:\d[\d.,{_GAPS}]*|[.,]\d+)(?:[eE][-+]?\d+)?|(?i:inf(?:inity)?))[{_BLANKS}]*"
    rf"(?P<plus>\+?)[{_BLANKS}]*"
    r"(?P<after>(?:(?:[%‰°$€£¥₹]|\p{L})[^<>+\s]{0,11}(?: \p{L}[^<>+\s]{0,11})?)?)$"
)
_PLAIN = r"^-?\d+(?:\.\d+)?$"
_STRICT = {
    decimal: rf"^(?:\d+|[1-9]\d{{0,2}}(?:[{group}{_GAPS}]\d{{3}})+)?(?:{re.escape(sign)}\d*)?"
    r"(?:[eE][-+]?\d+)?$|^(?i:inf(?:inity)?)$"
    for decimal, sign, group in ((POINT, ".", ","), (COMMA, ",", "."))
}
"""Numbers of each convention, with or without marks between thousands."""
_LONG = r"^\d{4,}(?:[eE].*)?$"
"""A number without marks that would have one if thousands had."""
_CODE = r"^0\d+$"
_DATES = (
    *("YYYY-MM-DD", "YYYY/MM/DD", "YYYY.MM.DD", "DD.MM.YYYY", "DD/MM/YYYY", "MM/DD/YYYY"),
    *("DD-MM-YYYY", "MM-DD-YYYY", "DD MONTH YYYY", "MONTH DD YYYY", "MONTH YYYY", "YYYY MONTH"),
    *("YYYY-MM", "MM/YYYY"),
)
"""The forms of dates that are recognised; ``--types`` takes others made of the same words."""
SHORT_DATES = ("DD.MM.YY", "DD/MM/YY", "MM/DD/YY", "DD-MM-YY")
"""Forms whose century is not known, which are read if they are named."""
_FIRST_OF_CENTURY = 69
"""Two digits of a year from here on are of the last century, as POSIX has it."""
_WORDS = {
    "YYYY": r"(?P<year>\d{4})",
    "YY": r"(?P<year>\d{2})",
    "MONTH": r"(?P<month>\p{L}+)",
    "MM": r"(?P<month>\d{1,2})",
    "DD": r"(?P<day>\d{1,2})",
}
_CLOCK = (
    r"(?P<hour>\d{1,2}):(?P<minute>\d{2})(?::(?P<second>\d{2}(?:[.,]\d+)?))?"
    r" ?(?P<half>(?:[AaPp]\.?[Mm]\.?)?)"
)
_TIME = rf"^{_CLOCK}$"
_CLOCK_OF_DATE = rf"(?:[T ,]+{_CLOCK}(?P<zone>(?:Z|[-+]\d{{2}}:?\d{{2}})?))?"
_MONTHS = (
    *("jan january januar jänner", "feb february februar", "mar march mär märz mrz"),
    *("apr april", "may mai", "jun june juni", "jul july juli", "aug august"),
    *("sep sept september", "oct october okt oktober", "nov november", "dec december dez dezember"),
)
_YEARS = (1800, 2199)
"""The years of months that are recognised."""
_FEW = 50
"""Distinct cells that rule out most forms at little cost."""


class Cells:
    """The distinct cells of a column of text, without the blanks around them."""

    def __init__(self, column: Any, missing: Sequence[str] = MISSING) -> None:
        # A chunk of plain texts has at most 2 GB.
        texts = column.cast(pa.large_string())
        texts = texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts
        encoded = texts.dictionary_encode()
        self.codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        self.raw = encoded.dictionary.cast(pa.string())
        self.texts = pc.utf8_trim_whitespace(self.raw)
        self.is_missing = _flags(pc.is_in(self.texts, pa.array(missing, pa.string())))
        self.counts = np.bincount(self.codes[self.codes >= 0], minlength=len(self.texts))

    @property
    def num_present(self) -> int:
        return int(self.counts[~self.is_missing].sum())

    def rows_of(self, flags: np.ndarray) -> np.ndarray:
        """Returns flags of distinct cells for all rows; null is True."""
        return np.append(flags, True)[self.codes]

    def missing_rows(self) -> np.ndarray:
        return self.rows_of(self.is_missing)

    def equal(self, word: str) -> np.ndarray:
        """Returns which distinct cells are a word, in any case."""
        return _flags(pc.equal(pc.utf8_lower(self.texts), word))

    def are(self, words: Sequence[str]) -> bool:
        """Returns whether all cells are among some words, in any case."""
        return self.fit(np.any([self.equal(word) for word in words], axis=0))

    def has_signs(self) -> bool:
        """Returns whether a cell has a decimal sign, an exponent or a word for infinity."""
        return bool((_matches(self.texts, r"[.,]|\d[eE]|(?i:inf)") & ~self.is_missing).any())

    def differ(self) -> bool:
        """Returns whether the cells are different whole numbers, none of them missing."""
        is_whole = _matches(self.texts, r"^\d+$")
        return bool(len(self.texts) == len(self.codes) and is_whole.all())

    def share_outside(self, words: set[str]) -> tuple[float, bool]:
        """Returns the share of cells, as they stand, outside known words, and if some are near."""
        vocabulary = pa.array(sorted(words), pa.string())
        is_out = ~_flags(pc.is_in(self.raw, vocabulary)) & ~self.is_missing
        near = pc.utf8_lower(pc.utf8_trim_whitespace(vocabulary))
        is_near = is_out & _flags(pc.is_in(pc.utf8_lower(self.texts), near))
        return float(self.counts[is_out].sum() / self.codes.size), bool(is_near.any())

    def text(self, row: int) -> str:
        return str(self.texts[int(self.codes[row])])

    def fit(self, fits: np.ndarray) -> bool:
        """Returns whether all cells fit, of which some are present."""
        present = ~self.is_missing
        return bool(present.any() and fits[present].all())

    def spread(self, values: np.ndarray, missing: Any) -> np.ndarray:
        """Returns the values of distinct cells for all rows."""
        return np.append(np.where(self.is_missing, missing, values), missing)[self.codes]

    def first(self, wrong: np.ndarray) -> int:
        """Returns the number of the first row with one of these distinct cells."""
        return int(np.flatnonzero(np.append(wrong, False)[self.codes])[0])

    @functools.cached_property
    def numbers(self) -> Numbers:
        return Numbers(self)

    def few(self) -> Cells:
        """Returns the first distinct cells alone."""
        return Cells(self.texts.filter(pa.array(~self.is_missing)).slice(0, _FEW))

    def days(self, form: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns times ``M8[us]`` of distinct cells as dates of a form, and which are some."""
        parts = _Parts(self.texts, _pattern_of(form))
        months = parts.months() if "MONTH" in form else parts.integers("month")
        days = parts.integers("day") if "DD" in form else np.ones(len(months), int)
        years = parts.integers("year")
        if "YYYY" not in form:
            years += np.where(years < _FIRST_OF_CENTURY, 2000, 1900)
        clock, is_time = parts.seconds()
        first = ((years - 1970) * 12 + np.clip(months, 1, 12) - 1).astype("M8[M]")
        dates = first.astype("M8[D]") + (days - 1)
        fits = parts.found & (months >= 1) & (months <= 12) & (days >= 1)
        fits &= (dates.astype("M8[M]") == first) & (years > 0) & is_time
        return dates.astype("M8[us]") + (clock * 1e6).astype("m8[us]"), fits

    def hours(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns hours of distinct cells as times of day, and which are some."""
        parts = _Parts(self.texts, _TIME)
        seconds, is_time = parts.seconds()
        return seconds / 3600.0, parts.found & is_time

    def date_forms(self, forms: Sequence[str] = _DATES, most: bool = False) -> list[str]:
        """Returns the forms that all cells have, or most of the first cells."""
        few = self.few()
        found = [few.days(form)[1] for form in forms]
        if most:
            return [
                form for form, fits in zip(forms, found, strict=True) if 2 * fits.sum() > fits.size
            ]
        likely = [form for form, fits in zip(forms, found, strict=True) if few.fit(fits)]
        return [form for form in likely if self._has_dates(form)]

    def _has_dates(self, form: str) -> bool:
        dates, fits = self.days(form)
        if "DD" not in form:  # Numbers of parts look the same, and school years, such as 2004-05.
            months = dates.astype("M8[M]").astype(int)
            years = 1970 + months // 12
            fits &= (years >= _YEARS[0]) & (years <= _YEARS[1])
            fits &= bool((months % 12 + 1 != (years + 1) % 100)[fits].any())
        return self.fit(fits)


class Numbers:
    """The distinct cells of a column as numbers of either convention.

    Attributes:
        units: the unit of each cell, empty without one.
        has_limit: whether a cell has a sign of limit.
        evidence: the decimal signs that cells show: those that can be read in one way alone.
        is_open: whether a cell could be read in two ways, with a decimal sign or with thousands.
    """

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        texts, present = cells.texts, ~cells.is_missing
        self.has_limit = np.zeros(len(texts), bool)
        self.units = np.full(len(texts), "", object)
        self._found = _matches(texts, _PLAIN)
        if self._found[present].all():  # Most columns, of which some have millions of numbers.
            self._is_negative = _flags(pc.starts_with(texts, "-"))
            self._numbers = pc.utf8_ltrim(texts, "-")
        else:
            self._split(_Parts(texts, _NUMBER))
        self._fits = {
            decimal: self._found & _matches(self._numbers, pattern)
            for decimal, pattern in _STRICT.items()
        }
        point, comma = self._fits[POINT] & present, self._fits[COMMA] & present
        has_sign = _matches(self._numbers, r"\d[.,]\d|^[.,]|[.,]$") & present
        is_open = point & comma & has_sign
        self.is_open, self.evidence = bool(is_open.any()), set()
        if (point & ~comma).any():
            self.evidence.add(POINT)
        if (comma & ~point).any():
            self.evidence.add(COMMA)
        if self.is_open and not self.evidence and (_matches(self._numbers, _LONG) & present).any():
            # Thousands would have been marked in all cells.
            has_comma = _matches(self._numbers, ",")[is_open]
            self.evidence = {COMMA if each else POINT for each in np.unique(has_comma)}

    def _split(self, parts: _Parts) -> None:
        """Takes signs, units and limits from the cells."""
        self._found = parts.found
        self._is_negative = _flags(pc.is_in(parts["sign"], pa.array(["-", "−"])))
        self._numbers = pc.utf8_trim_whitespace(parts["number"])
        units = pc.binary_join_element_wise(parts["before"], parts["after"], "")
        self.units = np.array(units.to_pylist(), object)
        limits = pc.binary_join_element_wise(parts["limit"], parts["plus"], "")
        self.has_limit = _flags(pc.not_equal(limits, ""))

    @property
    def unit(self) -> str:
        """The most frequent unit of the cells."""
        if not self.units.any():
            return ""
        present = self._found & ~self._cells.is_missing
        names, places = np.unique(self.units[present].astype(str), return_inverse=True)
        weights = np.bincount(places, self._cells.counts[present], minlength=len(names))
        return str(names[weights.argmax()]) if len(names) else ""

    @property
    def are_all(self) -> bool:
        """Whether all cells are numbers of one unit, in one convention or another."""
        fits = self._fits[POINT] | self._fits[COMMA]
        return self._cells.fit(fits & (self.units == self.unit))

    @property
    def are_codes(self) -> bool:
        """Whether a cell has zeros before its digits."""
        return bool((_matches(self._cells.texts, _CODE) & ~self._cells.is_missing).any())

    @property
    def sign(self) -> str:
        """The mark in the cells that could be read in two ways."""
        return "," if _matches(self._numbers, ",").any() else "."

    def read(self, decimal: str, unit: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns numbers of distinct cells, and which cells are some."""
        fits = self._fits[decimal] & (self.units == unit)
        group = SIGNS[COMMA if decimal == POINT else POINT]
        texts = pc.replace_substring_regex(self._numbers, rf"[{group}{_GAPS}]", "")
        texts = pc.replace_substring(texts, SIGNS[decimal], ".")
        texts = pc.if_else(pa.array(fits), texts, "nan")
        numbers = texts.cast(pa.float64()).to_numpy(zero_copy_only=False)
        return np.where(self._is_negative, -numbers, numbers), fits


class _Parts:
    """The groups of a pattern in distinct cells; empty where a cell does not match."""

    def __init__(self, texts: Any, pattern: str) -> None:
        parts = pc.extract_regex(texts, pattern)
        self.found = _flags(parts.is_valid())
        self._parts = parts

    def __getitem__(self, name: str) -> Any:
        return pc.if_else(pa.array(self.found), pc.struct_field(self._parts, name), "").fill_null(
            ""
        )

    def has(self, name: str) -> bool:
        return self._parts.type.get_field_index(name) >= 0

    @staticmethod
    def _filled(texts: Any) -> Any:
        return pc.if_else(pc.equal(texts, ""), "0", texts)

    def integers(self, name: str) -> np.ndarray:
        return self._filled(self[name]).cast(pa.int64()).to_numpy(zero_copy_only=False).copy()

    def months(self) -> np.ndarray:
        """Returns the numbers of months by their names, zero for other words."""
        names = [(word, number) for number, each in enumerate(_MONTHS, 1) for word in each.split()]
        words, numbers = zip(*names, strict=True)
        places = pc.index_in(pc.utf8_lower(self["month"]), pa.array(words)).fill_null(-1)
        return np.array([*numbers, 0])[places.to_numpy(zero_copy_only=False)]

    def seconds(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns seconds since midnight, UTC where a zone is named, and which are times."""
        hours, minutes = self.integers("hour"), self.integers("minute")
        texts = pc.replace_substring(self["second"], ",", ".")
        seconds = self._filled(texts).cast(pa.float64()).to_numpy(zero_copy_only=False)
        half = pc.utf8_lower(pc.replace_substring(self["half"], ".", ""))
        is_half = _flags(pc.not_equal(half, ""))
        fits = (hours <= 23) & (minutes <= 59) & (seconds < 61) & ~(is_half & (hours > 12))
        fits &= ~(is_half & (hours == 0))
        hours = np.where(is_half, hours % 12, hours) + 12 * _flags(pc.equal(half, "pm"))
        found = 3600.0 * hours + 60.0 * minutes + seconds
        if self.has("zone"):
            zones = pc.replace_substring_regex(self["zone"], "[:+Z]", "").to_pylist()
            numbers = np.array([int(zone or 0) for zone in zones], int)
            ahead = np.abs(numbers) // 100 * 3600 + np.abs(numbers) % 100 * 60
            found = found - np.sign(numbers) * ahead
        return found, fits


def _pattern_of(form: str) -> str:
    """Returns the pattern of a form of dates, with a time of day or without."""
    words = re.split("(YYYY|YY|MONTH|MM|DD)", form)
    between = r"(?:st|nd|rd|th)?[-., ]+" if "MONTH" in form else ""
    pattern = "".join(
        _WORDS.get(word) or (between if word and between else re.escape(word)) for word in words
    )
    if "".join(filter(_WORDS.get, words)) == form:  # Without marks each part has all its digits.
        pattern = pattern.replace("{1,2}", "{2}")
    return f"^{pattern}{_CLOCK_OF_DATE}$"


def _matches(texts: Any, pattern: str) -> np.ndarray:
    return _flags(pc.match_substring_regex(texts, pattern))


def _flags(flags: Any) -> np.ndarray:
    found: np.ndarray = flags.to_numpy(zero_copy_only=False).astype(bool)
    return found
