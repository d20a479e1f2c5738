"""Reads a public prior from a small JSON or CSV file; it is no secret, so errors may show it."""

from __future__ import annotations

import csv
import json
import pathlib
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from tf_labeldp._validate import PRIOR_SUM_TOLERANCE
from tf_labeldp.cli._errors import CommandError

_NUMBERS = 'JSON {"values": [...], "probabilities": [...]}, or CSV with these two columns'
_CLASSES = 'JSON {"probabilities": [...]}, or CSV with the columns class and probability'


def read_number_prior(path: pathlib.Path, low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the values, rising, and the probabilities of a prior over numbers in a range.

    Raises:
        CommandError: not readable, not of this form, or values outside the range.
    """
    found = _read(path, _NUMBERS)
    if isinstance(found, dict):
        columns = [found.get("values"), found.get("probabilities")]
    else:
        columns = [[row[0] for row in found], [row[1] for row in found]]
    values, probabilities = (_numbers(path, column, _NUMBERS) for column in columns)
    if values.size != probabilities.size:
        raise CommandError(
            f"--prior {path} has {values.size} values but {probabilities.size} probabilities; give "
            "one probability a value"
        )
    order = np.argsort(values, kind="stable")
    values, probabilities = values[order], _checked(path, probabilities)[order]
    if np.any(np.diff(values) == 0):
        raise CommandError(f"--prior {path} names a value more than once; name each once")
    outside = int(np.count_nonzero((values < low) | (values > high)))
    if outside:
        raise CommandError(
            f"--prior {path} has {outside} values outside --low {low:g} to --high {high:g}; "
            "leave them out or widen the range"
        )
    # The mechanism must know the whole range; an end that the prior lacks has no weight in it.
    ends = [end for end in (low, high) if end not in values]
    places = np.searchsorted(values, ends)
    return np.insert(values, places, ends), np.insert(probabilities, places, 0.0)


def read_class_prior(path: pathlib.Path, classes: Sequence[str]) -> np.ndarray:
    """Returns the probabilities of a prior over classes, in their order.

    Raises:
        CommandError: not readable, not of this form, or of other classes.
    """
    found = _read(path, _CLASSES)
    if isinstance(found, dict):
        column: Any = found.get("probabilities")
    else:
        by_name = {row[0].strip(): row[1] for row in found}
        if len(by_name) != len(found) or set(by_name) != set(classes):
            raise CommandError(
                f"--prior {path} has {len(found)} rows for {len(set(by_name) & set(classes))} of "
                f"the {len(classes)} classes; give each class one row"
            )
        column = [by_name[name] for name in classes]
    probabilities = _numbers(path, column, _CLASSES)
    if probabilities.size != len(classes):
        raise CommandError(
            f"--prior {path} has {probabilities.size} probabilities for {len(classes)} classes; "
            "give one a class, in their order"
        )
    return _checked(path, probabilities)


def _read(path: pathlib.Path, expected: str) -> Any:
    """Returns the object of a JSON file, or the rows of a CSV file without its header."""
    suffix = path.suffix.lower()
    if suffix not in (".json", ".csv"):
        raise CommandError(f"--prior {path} is neither .json nor .csv; give {expected}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise CommandError(
            f"--prior {path} cannot be read ({error.strerror}); check the path"
        ) from error
    except UnicodeDecodeError as error:
        raise CommandError(f"--prior {path} is not UTF-8 text; give {expected}") from error
    if suffix == ".json":
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            _malformed(path, "is not JSON", expected)
        if isinstance(content, list):
            content = {"probabilities": content}
        if not isinstance(content, dict) or "probabilities" not in content:
            _malformed(path, 'has no "probabilities"', expected)
        return content
    try:
        rows = [row for row in csv.reader(text.splitlines()) if row]
    except csv.Error:
        _malformed(path, "is not CSV", expected)
    if len(rows) < 2 or any(len(row) != 2 for row in rows):
        _malformed(path, "does not have a header and rows of two cells", expected)
    return rows[1:]


def _numbers(path: pathlib.Path, column: Any, expected: str) -> np.ndarray:
    if not isinstance(column, list) or not column:
        _malformed(path, "lacks a list of numbers", expected)
    if any(isinstance(cell, bool) for cell in column):
        _malformed(path, "holds something that is not a number", expected)
    try:
        array = np.array([float(cell) for cell in column])
    except (TypeError, ValueError, OverflowError):
        _malformed(path, "holds something that is not a number", expected)
    if not np.all(np.isfinite(array)):
        _malformed(path, "holds NaN or infinity", expected)
    return array


def _checked(path: pathlib.Path, probabilities: np.ndarray) -> np.ndarray:
    """Returns probabilities whose sum is one to rounding."""
    total = float(probabilities.sum())
    if np.any(probabilities < 0.0) or abs(total - 1.0) > PRIOR_SUM_TOLERANCE:
        raise CommandError(
            f"the probabilities of --prior {path} must be zero or more and sum to one, got "
            f"a smallest of {probabilities.min():g} and a sum of {total:g}; divide each by the sum"
        )
    return probabilities / total


def _malformed(path: pathlib.Path, problem: str, expected: str) -> NoReturn:
    raise CommandError(f"--prior {path} {problem}; give {expected}") from None
