"""Checks of arguments, one short function for each kind of value.

Each takes the name of the argument for its message. Messages about labels count the wrong entries,
and never show a label.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import json
import math
import numbers
import os
import sys
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

import numpy as np

from tf_labeldp._columns import Column, type_in_words
from tf_labeldp._progress import Argument, Message, for_terminal

PRIOR_SUM_TOLERANCE = 1e-4
"""Tolerance for the sum of a prior: a float32 softmax of many classes stays within it."""

_MOST_BYTES = 8 << 30
"""Largest array of targets, or channel, in bytes: training copies targets at least once."""

REPLACED = {
    "ClusterRandomizedResponse.for_epsilon": {
        "bias_correction": "ClusterRandomizedResponse(..., draw_epsilon=, bias_correction=beta)",
        "threshold": "ClusterRandomizedResponse(num_classes, threshold, noise, draw_epsilon=)",
    },
    "LabelRandomizer.total": {"seed": "randomizer.total(noisy), whose simulations have one seed"},
    "NoisyLabels.debiased": {
        "bias_correction": "estimation.debiased(mechanism, values, priors, bias_correction=beta)",
    },
    "PrivateLabels": {
        "classes": "PrivateLabels(labels, Classes([...]))",
        "low": "PrivateLabels(labels, Numbers(low, high))",
        "high": "PrivateLabels(labels, Numbers(low, high))",
        "clip": "PrivateLabels(labels, Numbers(low, high, clip=True))",
        "num_labels": "PrivateLabels(labels, Rows(num_labels))",
        "project": "store=Store(path, project=True)",
        "actor": "store=Store(path, actor=name)",
        "ids": "draws=Keyed(ids)",
        "max_examples_per_user": "users=Users(ids, at_most=k)",
    },
    "PrivateLabels.check_budget": {
        "receipts": "accounting.public_input(prior).with_value(mechanism) as the mechanism",
    },
    "confirm_move": {"actor": "the name into the environment variable LABELDP_ACTOR"},
    "forget": {"actor": "the name into the environment variable LABELDP_ACTOR"},
    "strong_views": {"strength": "your own layers for strong=, such as keras.Sequential([...])"},
}
"""The arguments of version 0.3 that go with 0.5, by their owners, and what to write."""


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def clears_frames(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorates a function whose local variables are private labels, or a secret.

    Programs that report errors send the local variables of every frame. An error leaves the
    function with its lines, and without the variables of the function and of all that it called.
    """

    @functools.wraps(function)
    def call(*arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
        handled = sys.exc_info()[1]
        try:
            return function(*arguments, **keywords)
        except BaseException as error:
            del arguments, keywords
            _clear_frames(error, handled)
            raise

    return call


def warn_of_old(owner: str, name: str, *, stacklevel: int) -> None:
    """Warns of an argument of ``REPLACED``; ``stacklevel`` 1 names the line of this call."""
    warnings.warn(
        f"{owner}({name}=) goes with version 0.5. Write {REPLACED[owner][name]}.",
        DeprecationWarning,
        stacklevel=stacklevel + 1,
    )


def takes_old_arguments(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Warns where a call gives an argument of ``REPLACED`` another value than its default."""
    owner = function.__qualname__
    signature = inspect.signature(function)
    defaults = {name: signature.parameters[name].default for name in REPLACED[owner]}

    @functools.wraps(function)
    def call(*arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
        passed = dict(zip(signature.parameters, arguments, strict=False)) | keywords
        for name, default in defaults.items():
            value = passed.get(name, default)
            if isinstance(value, np.ndarray) or value != default:
                warn_of_old(owner, name, stacklevel=2)
        return function(*arguments, **keywords)

    # The site, ``help`` and the tests of public arguments find the arguments that stay.
    kept = [each for name, each in signature.parameters.items() if name not in defaults]
    call.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return call


def _clear_frames(error: BaseException, handled: BaseException | None) -> None:
    """Clears the frames of an error and its causes, except for one that the caller handles."""
    waiting: list[BaseException | None] = [error]
    done = {id(handled)}
    while waiting:
        part = waiting.pop()
        if part is None or id(part) in done:
            continue
        done.add(id(part))
        traceback.clear_frames(part.__traceback__)
        waiting += [part.__cause__, part.__context__]


def json_of(text: str | bytes, **settings: Any) -> Any:
    """Returns the content of JSON in UTF-8; a ``ValueError`` also where it nests too deeply."""
    try:
        return json.loads(text.decode() if isinstance(text, bytes) else text, **settings)
    except RecursionError:
        raise ValueError("lists or objects are nested too deeply") from None


def unpacked(content: bytes, least: int, ratio: int) -> bytes:
    """Returns the content of a zlib stream of at most ``ratio`` times its size, or ``least``."""
    most = max(least, ratio * len(content))
    stream = zlib.decompressobj()
    text = stream.decompress(content, most)
    if stream.unconsumed_tail or not stream.eof:
        raise ValueError(f"expected a whole stream of at most {most:,} bytes, got another")
    return text


def warn(message: str) -> None:
    """Warns, and names the line in the user's code."""
    level, frame = 1, sys._getframe()
    # The constructors of data classes belong to no file.
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("tf_labeldp."):
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    # A message of parts is the library's own text: it has nothing to escape.
    shown = message if isinstance(message, Message) else for_terminal(message)
    warnings.warn(shown, UserWarning, stacklevel=level)


@contextlib.contextmanager
def after_release(fact: str) -> Iterator[None]:
    """Turns an error of a check that comes after a release into a warning.

    The release is paid for, so the check must not end the call. ``fact`` is the one to check; the
    error's text is left out, since it may quote rows.
    """
    try:
        yield
    except Warning:  # The caller makes warnings errors.
        raise
    except Exception as error:
        warn(f"{fact} was not checked: unexpected {type(error).__name__}.")


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun: "1 release", "2,000 releases"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _refusal(kind: type[Exception], name: str, text: str) -> Exception:
    """Returns an error of an argument, with what it must be."""
    return kind(Message.of(Argument(name), f" {text}"))


def real_number(name: str, value: Any, expected: str = "a number") -> float:
    """Returns a number as a float."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise _refusal(TypeError, name, f"must be {expected}, got {type(value).__name__}.")
    return float(value)


def positive_finite(name: str, value: Any) -> float:
    """Returns a finite number above zero as a float."""
    number = real_number(name, value, "a number above zero")
    if not 0.0 < number < math.inf:
        hint = " For training without privacy use plain labels." if name == "epsilon" else ""
        raise _refusal(ValueError, name, f"must be finite and above zero, got {number}.{hint}")
    return number


def number_in(name: str, value: Any, interval: str, hint: str = "") -> float:
    """Returns a number in an interval such as ``"(0, 1]"`` as a float."""
    number = real_number(name, value, f"a number in {interval}")
    low, high = (float(end) for end in interval[1:-1].split(","))
    at_end = (interval[0] == "[" and number == low) or (interval[-1] == "]" and number == high)
    if not (low < number < high or at_end):
        raise _refusal(ValueError, name, f"must be in {interval}, got {number:.6g}{hint}.")
    return number


def integer_at_least(name: str, value: Any, minimum: int) -> int:
    """Returns an integer of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise _refusal(TypeError, name, f"must be an integer, got {type(value).__name__}.")
    if int(value) < minimum:
        raise _refusal(ValueError, name, f"must be at least {minimum}, got {int(value)}.")
    return int(value)


def boolean(name: str, value: Any) -> bool:
    """Returns a bool of Python or NumPy as Python's."""
    if not isinstance(value, (bool, np.bool_)):
        raise _refusal(TypeError, name, f"must be True or False, got {type(value).__name__}.")
    return bool(value)


def one_of(name: str, value: Any, words: Iterable[str]) -> str:
    """Returns a value that is one of the words."""
    if not isinstance(value, str) or value not in words:
        raise _refusal(ValueError, name, f"must be one of {', '.join(words)}, got {value!r}.")
    return value


def text_up_to(name: str, value: Any, longest: int, least: int = 0) -> str:
    """Returns a text of at most ``longest`` characters."""
    if not isinstance(value, str):
        raise _refusal(TypeError, name, f"must be a text, got {type(value).__name__}.")
    if not least <= len(value) <= longest:
        raise _refusal(
            ValueError, name, f"must have {least} to {longest} characters, got {len(value)}."
        )
    return value


def pair(name: str, value: Any) -> tuple[Any, Any]:
    """Returns the two ends of a setting that has a smallest and a largest value."""
    if isinstance(value, (str, bytes)) or np.shape(value) != (2,):
        raise ValueError(f"expected {name} as (smallest, largest), got {value!r}. Give both.")
    low, high = value
    return low, high


def number_range(
    low: Any, high: Any, widths: tuple[float, float] = (0.0, math.inf), user: str = ""
) -> tuple[float, float]:
    """Returns the ends of a range, finite and in order, as floats.

    ``widths`` are the narrowest and the widest range that ``user`` computes with.
    """
    low, high = real_number("low", low), real_number("high", high)
    for name, end in (("low", low), ("high", high)):
        if not math.isfinite(end):
            raise _refusal(ValueError, name, f"must be finite, got {end}.")
    if not low < high:
        raise ValueError(
            Message.of(
                Argument("low"),
                " must be below ",
                Argument("high"),
                ", got ",
                Argument("low", low),
                ", ",
                Argument("high", high),
                ". Both are public, and not inferred from the labels.",
            )
        )
    if not widths[0] <= high - low <= widths[1]:
        raise ValueError(
            f"high - low must be between {widths[0]:g} and {widths[1]:g} for {user}, got "
            f"{high - low:g}. Change the unit of the labels."
        )
    return low, high


def real_vector(name: str, values: Any) -> np.ndarray:
    """Returns a copy of numbers, infinities included, as ``float64`` (n,)."""
    array = Column.of(values).numbers(name)
    if array.ndim != 1:
        raise ValueError(
            f"{name} must have shape (n,), got shape {array.shape}. Flatten a column with .ravel()."
        )
    if array.dtype.kind not in "iuf":
        raise TypeError(
            f"{name} must be numbers, got {type_in_words(array)}. Cast them with "
            ".astype('float64')."
        )
    return array.astype(np.float64)


def numbers_in_range(name: str, values: Any, low: float, high: float) -> np.ndarray:
    """Returns a copy of numbers in [low, high] as ``float64`` (n,).

    ``float32`` numbers may equal the rounded ends: 0.1 is larger as a ``float32``.
    """
    array = real_vector(name, values)
    if getattr(values, "dtype", None) == np.float32:
        for end in (low, high):
            array = np.where(array == float(np.float32(end)), end, array)
    wrong = int(np.count_nonzero((array < low) | (array > high)))
    if wrong:
        raise ValueError(
            f"{name} must lie in [{low:g}, {high:g}], but {wrong} of {array.size} do not. Widen "
            "the range, or clip the labels: np.clip, or Numbers(low, high, clip=True)."
        )
    return array


def increasing_numbers(name: str, values: Any) -> np.ndarray:
    """Returns public numbers, finite and strictly increasing, as ``float64`` (k,)."""
    array = real_vector(name, values)
    if not array.size:
        raise ValueError(f"{name} must have at least one number, got none.")
    bad = int(np.count_nonzero(np.isinf(array)))
    if bad:
        raise ValueError(f"{name} must be finite, but {bad} of {array.size} are infinite.")
    falls = np.flatnonzero(array[1:] <= array[:-1])
    if falls.size:
        first = int(falls[0])
        raise ValueError(
            f"{name} must be strictly increasing, but {array[first]:g} at place {first} is "
            f"followed by {array[first + 1]:g}. Sort them, and drop repeats: np.unique(values)."
        )
    return array


def class_indices(name: str, labels: Any, num_classes: int) -> np.ndarray:
    """Returns integer labels 0..num_classes-1 as ``int64`` (n,)."""
    array = Column.of(labels).complete(name)
    if array.ndim != 1:
        raise ValueError(
            f"{name} must have shape (n,), got shape {array.shape}. Turn one-hot labels into "
            "indices with np.argmax(labels, axis=1), and columns into vectors with .ravel()."
        )
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(
            f"{name} must be integers 0..{num_classes - 1}, got {type_in_words(array)}. Cast whole "
            "numbers with .astype('int64'). For names give PrivateLabels Classes([...]) in place "
            "of num_classes."
        )
    wrong = int(np.count_nonzero((array < 0) | (array >= num_classes)))
    if wrong:
        raise ValueError(
            f"{name} must lie in 0..{num_classes - 1}, but {wrong} of {array.size} do not. Number "
            "the classes from zero, or raise num_classes."
        )
    return array.astype(np.int64)


def keras_on_tensorflow(user: str) -> None:
    """Raises if Keras is loaded with another backend than TensorFlow."""
    keras = sys.modules.get("keras")
    backend = "tensorflow" if keras is None else keras.backend.backend()
    if backend != "tensorflow":
        raise RuntimeError(
            f"{user} needs Keras's TensorFlow backend, got {backend!r}. Set "
            "KERAS_BACKEND=tensorflow before Keras is imported, or use heads, noisy labels "
            "(PrivateLabels.randomize) or MultiStageTraining, which work on any backend."
        )


def callbacks_of(callbacks: Any) -> list[Any]:
    """Returns the callbacks of a ``fit`` as a list; raises if one lacks its package.

    Raises:
        ImportError: TensorBoard without its package: its error would follow the first epoch.
    """
    # A model was made with it.
    keras = sys.modules["keras"]
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    several = [part for part in keras.tree.flatten(callbacks) if part is not None]
    has_board = any(isinstance(part, keras.callbacks.TensorBoard) for part in several)
    if has_board and importlib.util.find_spec("tensorboard") is None:
        raise ImportError(
            "expected the package tensorboard, which keras.callbacks.TensorBoard writes with, got "
            "none: TensorFlow 2.21 does not install it. Install it: pip install tensorboard."
        )
    return several


def group_numbers(
    name: str, values: np.ndarray, letter: str = "C", hint: str = "Number them from zero."
) -> np.ndarray:
    """Returns public numbers 0..C-1 of groups as ``int64``; ``hint`` is for negative ones."""
    if values.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers 0..{letter}-1, got dtype {values.dtype}.")
    outside = values[(values < 0) | (values > np.iinfo(np.int64).max)]
    if outside.size:
        raise ValueError(f"{name} must be in 0..{letter}-1, got {outside[0]}. {hint}")
    return values.astype(np.int64)


def one_label_per_row(num_rows: int, num_labels: int) -> None:
    """Raises unless there are as many labels as rows of features."""
    if num_rows != num_labels:
        raise ValueError(
            f"expected one label per row of features, got {num_rows} rows and {num_labels} labels. "
            "Give both in the same order: x[labels.indices] with a part of a vault."
        )


def group_vector(name: str, values: Any, size: int, letter: str = "C") -> np.ndarray:
    """Returns the public group of each of ``size`` labels as ``int64`` (n,)."""
    array = Column.of(values).complete(name)
    if array.shape != (size,):
        raise ValueError(f"{name} must have shape ({size},), one per label, got {array.shape}.")
    return group_numbers(name, array, letter)


def most_bytes() -> int:
    """Returns the largest size of an array: half of the memory, and at most 8 GiB."""
    if sys.platform == "win32":
        return _MOST_BYTES
    return min(_MOST_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)


def check_size(name: str, shape: tuple[int, int], instead: str) -> None:
    """Raises if an array of doubles is too large, before its memory is allocated."""
    most = most_bytes()
    needed = 8 * shape[0] * shape[1]
    if needed > most:
        raise ValueError(
            f"expected {name} of at most {most / 1e9:.1f} GB, got {shape[0]:,} x {shape[1]:,} "
            f"numbers, {needed / 1e9:.1f} GB. {instead}"
        )


def prior_rows(name: str, priors: Any, num_rows: int | None, num_classes: int) -> np.ndarray:
    """Returns priors (K,), one for all, or (n, K), one per label, as ``float64`` (1, K) or (n, K).

    ``num_rows=None`` allows any number of rows.
    """
    array = np.asarray(priors, dtype=np.float64)
    rows = np.atleast_2d(array)
    fits = array.ndim in (1, 2) and rows.shape[1] == num_classes
    if not fits or not (array.ndim == 1 or num_rows in (None, len(rows))):
        expected = f"({num_classes},) or ({'n' if num_rows is None else num_rows}, {num_classes})"
        raise ValueError(
            f"{name} must have shape {expected}, got {array.shape}. Give one probability per class."
        )
    sums = rows.sum(axis=1)
    # The sum of a row shows a NaN or an infinity in it.
    bad = int(np.count_nonzero(~np.isfinite(sums)))
    if bad:
        raise ValueError(
            f"{name} must be finite, but {bad} row(s) have NaN or infinity. Look for an overflow "
            "in the model."
        )
    if rows.size and rows.min() < 0.0:
        bad = int(np.count_nonzero(rows.min(axis=1) < 0.0))
        raise ValueError(
            f"{name} must not be negative, but {bad} row(s) are. Apply "
            "tf_labeldp.estimation.prior_from_logits to logits first."
        )
    off = np.flatnonzero(np.abs(sums - 1.0) > PRIOR_SUM_TOLERANCE)
    if off.size:
        raise ValueError(
            f"{name} must sum to one in every row (tolerance {PRIOR_SUM_TOLERANCE}), but "
            f"{off.size} row(s) do not: row {off[0]} sums to {sums[off[0]]:.6g}. "
            "Normalise them, and replace rows of zeros with the uniform prior."
        )
    return rows
