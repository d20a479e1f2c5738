"""Checks of arguments, one function a kind of value, shared by every part.

Each check takes ``name=value`` words in its message and says what came, what was expected and what
to do. Checks of labels never show a label: a message may say how many entries are wrong, not which
value they hold.
"""

from __future__ import annotations

import math
import numbers
import os
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np

PRIOR_SUM_TOLERANCE = 1e-4
"""A prior may miss a sum of one by this much (a float32 softmax of many classes does not)."""

_LIBRARY = os.path.dirname(os.path.abspath(__file__)) + os.sep
_BY_A_RULE = "Leave these examples out, or fill them in, by a rule that does not look at labels."


def warn(message: str) -> None:
    """Warns the user of something, at the line of the user's code that led to it."""
    level, frame = 1, sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARY):
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    warnings.warn(message, UserWarning, stacklevel=level)


def real_number(name: str, value: Any, what: str = "a number") -> float:
    """Returns ``value`` as a float, or raises if it is no number."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be {what}, got {type(value).__name__}.")
    return float(value)


def positive_finite(name: str, value: Any) -> float:
    """Returns ``value`` as a float, or raises if it is not a finite number above zero."""
    number = real_number(name, value, "a number above zero")
    if not math.isfinite(number) or number <= 0.0:
        plain = " For training without privacy use plain labels instead of a mechanism."
        hint = plain if name == "epsilon" else ""
        raise ValueError(f"{name} must be finite and above zero, got {number}.{hint}")
    return number


def number_in(name: str, value: Any, interval: str, hint: str = "") -> float:
    """Returns ``value`` as a float, or raises if it is not in an interval such as ``"(0, 1]"``."""
    number = real_number(name, value, f"a number in {interval}")
    low, high = (float(end) for end in interval[1:-1].split(","))
    ends = (interval[0] == "[" and number == low) or (interval[-1] == "]" and number == high)
    if not (low < number < high or ends):
        raise ValueError(f"{name} must be in {interval}, got {number:.6g}{hint}.")
    return number


def integer_at_least(name: str, value: Any, minimum: int) -> int:
    """Returns ``value`` as an int, or raises if it is not an integer of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}.")
    if int(value) < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {int(value)}.")
    return int(value)


def boolean(name: str, value: Any) -> bool:
    """Returns ``value`` as a bool, or raises if it is anything else than one."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {type(value).__name__}.")
    return bool(value)


def one_of(name: str, value: Any, known: Iterable[str]) -> str:
    """Returns ``value``, or raises if it is none of the words that are known."""
    words = tuple(known)
    if not isinstance(value, str) or value not in words:
        raise ValueError(f"{name} must be one of {', '.join(words)}, got {value!r}.")
    return value


def number_range(low: Any, high: Any) -> tuple[float, float]:
    """Returns the ends of a range as floats, or raises if they are not finite and in order."""
    ends = real_number("low", low), real_number("high", high)
    for name, number in zip(("low", "high"), ends, strict=True):
        if not math.isfinite(number):
            raise ValueError(f"{name} must be finite, got {number}.")
    if not ends[0] < ends[1]:
        raise ValueError(
            f"low must be below high, got low={ends[0]:g}, high={ends[1]:g}. Both are public "
            "knowledge, not taken from the labels."
        )
    return ends


def real_vector(name: str, values: Any) -> np.ndarray:
    """Returns a copy of numbers as ``float64`` (n,), or raises without showing any of them.

    Raises:
        TypeError: not integers or floats.
        ValueError: not one-dimensional, or with NaN (infinities may be clipped later).
    """
    array = np.asarray(values)
    if array.ndim == 0 and array.dtype == object:
        raise TypeError(f"{name} must be an array or a list, got {type(values).__name__}.")
    if array.ndim != 1:
        raise ValueError(
            f"{name} must have shape (n,), got shape {array.shape}. Turn a column into a vector "
            "with .ravel()."
        )
    missing = sum(value is None for value in array) if array.dtype == object else 0
    if missing:
        raise TypeError(
            f"{name} must be numbers, but {missing} of {array.size} are None. {_BY_A_RULE}"
        )
    if array.dtype.kind not in "iuf":
        raise TypeError(
            f"{name} must be numbers, got dtype {array.dtype}. Cast them with .astype('float64')."
        )
    array = array.astype(np.float64)
    missing = int(np.count_nonzero(np.isnan(array)))
    if missing:
        raise ValueError(
            f"{name} must be numbers, but {missing} of {array.size} are NaN. {_BY_A_RULE}"
        )
    return array


def numbers_in_range(name: str, values: Any, low: float, high: float) -> np.ndarray:
    """Returns a copy of numbers (n,) in [low, high] as ``float64``, or raises and shows none.

    For ``float32`` numbers the ends are rounded as they are: 0.1 is larger there than as a double.
    """
    array = real_vector(name, values)
    if np.asarray(values).dtype == np.float32:
        ends = float(np.float32(low)), float(np.float32(high))
        array = np.where(array == ends[0], low, np.where(array == ends[1], high, array))
    wrong = int(np.count_nonzero((array < low) | (array > high)))
    if wrong:
        raise ValueError(
            f"{name} must lie in [{low:g}, {high:g}], but {wrong} of {array.size} do not. Widen "
            "the range, or clip the labels to it: np.clip, or PrivateLabels(..., clip=True)."
        )
    return array


def increasing_numbers(name: str, values: Any) -> np.ndarray:
    """Returns public numbers as ``float64`` (k,), or raises if not finite and strictly increasing.

    Messages show them: they are public, such as the cells of a histogram.
    """
    array = np.asarray(values)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} must have shape (k,) with k at least 1, got {array.shape}.")
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name} must be numbers, got dtype {array.dtype}.")
    array = array.astype(np.float64)
    bad = int(np.count_nonzero(~np.isfinite(array)))
    if bad:
        raise ValueError(f"{name} must be finite, but {bad} of {array.size} are NaN or infinite.")
    falls = array[1:] <= array[:-1]
    if np.any(falls):
        first = int(np.argmax(falls))
        raise ValueError(
            f"{name} must be strictly increasing, but {array[first]:g} at place {first} is "
            f"followed by {array[first + 1]:g}. Sort them and drop repeats: np.unique(values)."
        )
    return array


def class_indices(name: str, labels: Any, num_classes: int) -> np.ndarray:
    """Returns integer labels as ``int64`` of shape (n,), or raises without showing any of them.

    Raises:
        TypeError: the labels are not integers (floats, strings, booleans, objects).
        ValueError: the labels are not one-dimensional or leave 0..num_classes-1.
    """
    array = np.asarray(labels)
    if array.ndim != 1:
        raise ValueError(
            f"{name} must have shape (n,), got shape {array.shape}. Turn one-hot labels into "
            "indices with np.argmax(labels, axis=1), and columns into vectors with .ravel()."
        )
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(
            f"{name} must be integers 0..{num_classes - 1}, got dtype {array.dtype}. Cast them "
            "with .astype('int64') if they are whole numbers, or give PrivateLabels the list "
            "`classes=` if they are names."
        )
    wrong = int(np.count_nonzero((array < 0) | (array >= num_classes)))
    if wrong:
        raise ValueError(
            f"{name} must lie in 0..{num_classes - 1}, but {wrong} of {array.size} do not. Raise "
            "num_classes, or renumber the classes from zero."
        )
    return array.astype(np.int64)


def keras_on_tensorflow(what: str) -> None:
    """Raises if Keras has been loaded, and runs on another backend than TensorFlow."""
    keras = sys.modules.get("keras")
    backend = "tensorflow" if keras is None else keras.backend.backend()
    if backend != "tensorflow":
        raise RuntimeError(
            f"{what} works on Keras's TensorFlow backend alone, and Keras runs on {backend!r} "
            "here. Set the environment variable KERAS_BACKEND=tensorflow before Keras is imported. "
            "Heads, noisy labels (PrivateLabels.randomize) and MultiStageTraining work on any "
            "backend."
        )


_FROM_ZERO = "Number them from zero."


def group_numbers(
    name: str, values: np.ndarray, letter: str = "C", hint: str = _FROM_ZERO
) -> np.ndarray:
    """Returns public numbers of ``letter`` groups as ``int64``, or raises if not from zero on.

    ``hint`` says what to do about negative ones.
    """
    if values.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers 0..{letter}-1, got dtype {values.dtype}.")
    if values.size and values.min() < 0:
        raise ValueError(f"{name} must be in 0..{letter}-1, got {int(values.min())}. {hint}")
    if values.size and int(values.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{name} must be in 0..{letter}-1, got {values.max()}. {_FROM_ZERO}")
    return values.astype(np.int64)


def group_vector(name: str, values: Any, size: int, letter: str = "C") -> np.ndarray:
    """Returns the public group of each of ``size`` labels as ``int64`` (n,), or raises."""
    array = np.asarray(values)
    if array.shape != (size,):
        raise ValueError(f"{name} must have shape ({size},), one per label, got {array.shape}.")
    return group_numbers(name, array, letter)


_MOST_BYTES = 8 << 30
"""Of one array of targets or of a channel. Training copies targets at least once, as float32."""


def check_size(name: str, shape: tuple[int, int], instead: str) -> None:
    """Raises if an array of doubles would not fit, before its memory is taken."""
    most = _MOST_BYTES
    if hasattr(os, "sysconf"):
        most = min(most, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    needed = 8 * shape[0] * shape[1]
    if needed > most:
        raise ValueError(
            f"expected {name} of at most {most / 1e9:.1f} GB, got {shape[0]:,} x {shape[1]:,} "
            f"numbers, {needed / 1e9:.1f} GB. {instead}"
        )


def prior_rows(name: str, priors: Any, num_rows: int | None, num_classes: int) -> np.ndarray:
    """Returns priors (K,), one for all, or (n, K), one a label, as ``float64`` (1, K) or (n, K).

    With ``num_rows=None`` any number of rows will do.

    Raises:
        ValueError: wrong shape, NaN or infinite, negative, or a row whose sum misses one by more
            than ``PRIOR_SUM_TOLERANCE``.
    """
    array = np.asarray(priors, dtype=np.float64)
    shared = array.ndim == 1
    rows = array[np.newaxis, :] if shared else array
    fits = rows.ndim == 2 and rows.shape[1] == num_classes
    if not fits or not (shared or num_rows is None or rows.shape[0] == num_rows):
        expected = f"({num_classes},) or ({'n' if num_rows is None else num_rows}, {num_classes})"
        raise ValueError(
            f"{name} must have shape {expected}, got {array.shape}: one probability a class, in "
            "one row for all labels or one row for each."
        )
    sums = rows.sum(axis=1)
    # A NaN or an infinity anywhere in a row shows in its sum, so one pass finds both.
    bad = int(np.count_nonzero(~np.isfinite(sums)))
    if bad:
        raise ValueError(
            f"{name} must be finite, but {bad} row(s) hold NaN or infinity. Check the model that "
            "made them for overflow."
        )
    if rows.size and rows.min() < 0.0:
        bad = int(np.count_nonzero(rows.min(axis=1) < 0.0))
        raise ValueError(
            f"{name} must not be negative, but {bad} row(s) are. If these are logits, pass them "
            "through tf_labeldp.estimation.prior_from_logits first."
        )
    off = np.abs(sums - 1.0) > PRIOR_SUM_TOLERANCE
    if np.any(off):
        first = int(np.argmax(off))
        raise ValueError(
            f"{name} must sum to one in every row (tolerance {PRIOR_SUM_TOLERANCE}), but "
            f"{int(np.count_nonzero(off))} row(s) do not: row {first} sums to {sums[first]:.6g}. "
            "Divide each row by its sum; replace a row of zeros by the uniform prior."
        )
    return rows
