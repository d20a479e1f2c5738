"""Progress bars of long passes over rows, their silence, the cores; texts for people.

Passes over true labels show nothing that may depend on a label.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import dataclasses
import functools
import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from tqdm import tqdm

_TERMINAL_SECONDS = 1.0
_FILE_SECONDS = 10.0
"""Seconds between two reports: a terminal overwrites its line, a file grows."""
_IS_SILENT = contextvars.ContextVar("is_silent", default=False)
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Characters that are printable by their category, and that fonts show as nothing."""


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument in a message.

    Python's users read ``name``, ``name=value``, or ``python``; those of a program its option.
    """

    name: str
    value: Any = None
    python: str | None = None

    def in_python(self) -> str:
        if self.python is not None:
            return self.python
        if self.value is None:
            return self.name
        is_float = isinstance(self.value, float)
        return f"{self.name}={self.value:g}" if is_float else f"{self.name}={self.value!r}"

    def as_option(self, options: Mapping[str, str]) -> str:
        """Returns the program's option with the value; Python's text if it has no such option."""
        if self.name not in options:
            return self.in_python()
        if self.value is None:
            return options[self.name]
        shown = f"{self.value:g}" if isinstance(self.value, float) else str(self.value)
        return f"{options[self.name]} {shown}"


class Message(str):
    """A text for Python's users that knows the arguments in it."""

    parts: tuple[str | Argument, ...] = ()

    @classmethod
    def of(cls, *parts: str | Argument) -> Message:
        """Returns the message of these parts."""
        message = cls(
            "".join(part.in_python() if isinstance(part, Argument) else part for part in parts)
        )
        message.parts = parts
        return message

    @staticmethod
    def with_options(text: str, options: Mapping[str, str]) -> str:
        """Returns a text with a program's options in place of the arguments that it knows."""
        if not isinstance(text, Message):
            return text
        return "".join(
            part.as_option(options) if isinstance(part, Argument) else part for part in text.parts
        )


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def for_terminal(*lines: Any) -> str:
    """Returns texts as lines, with all characters escaped that a terminal would obey or hide.

    Line ends within a text are escaped too, so that each text stays one line.
    """
    return "\n".join(
        "".join(
            c if c.isprintable() and not _UNSEEN.match(c) else c.encode("unicode_escape").decode()
            for c in str(line)
        )
        for line in lines
    )


@contextlib.contextmanager
def silent(verbose: Any = 0) -> Iterator[None]:
    """Shows no progress bar in this context if ``verbose`` is 0, the argument of a caller."""
    token = _IS_SILENT.set(_IS_SILENT.get() or (not isinstance(verbose, str) and not verbose))
    try:
        yield
    finally:
        _IS_SILENT.reset(token)


@contextlib.contextmanager
def without_retracing_warnings() -> Iterator[None]:
    """Drops TensorFlow's warnings of functions that are traced often, in this context.

    TensorFlow counts the tracings of all Keras models of a process together, so several small
    models of ours look like one that is traced in each step.
    """

    def is_other(record: logging.LogRecord) -> bool:
        return "triggered tf.function retracing" not in str(record.msg)

    logger = logging.getLogger("tensorflow")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


@contextlib.contextmanager
def without_input_warnings() -> Iterator[None]:
    """Drops Keras's warnings of inputs whose names are not their columns', in this context.

    The name of a column may have characters that an input's name must not have.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "When providing `inputs` as a dict", UserWarning)
        yield


def _entered_once(
    context: Callable[[], AbstractContextManager[None]],
) -> Callable[[], AbstractContextManager[None]]:
    """Returns a context of the process: the first thread enters it, and the last one leaves it.

    Each thread would otherwise restore the filters and streams that another one has replaced.
    """
    lock, inside, opened = threading.Lock(), 0, contextlib.ExitStack()

    @contextlib.contextmanager
    @functools.wraps(context)
    def shared() -> Iterator[None]:
        nonlocal inside
        with lock:
            if not inside:
                opened.enter_context(context())
            inside += 1
        try:
            yield
        finally:
            with lock:
                inside -= 1
                if not inside:
                    opened.close()

    return shared


@_entered_once
@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Drops warnings, and lets no filter turn them into errors, while labels are read.

    A warning, or how many there are, may depend on a label.
    """
    # Recorded warnings are not shown, also where the code itself sets a filter.
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("ignore")
        yield


@_entered_once
@contextlib.contextmanager
def _closed_streams() -> Iterator[None]:
    disabled = logging.root.manager.disable
    with contextlib.ExitStack() as work:
        nowhere = work.enter_context(open(os.devnull, "w", encoding="utf-8"))
        _flush()
        for number in (1, 2):  # Native code and child processes write to these files.
            with contextlib.suppress(OSError):
                kept = os.dup(number)
                work.callback(os.close, kept)
                os.dup2(nowhere.fileno(), number)
                work.callback(os.dup2, kept, number)
        work.callback(_flush)
        work.enter_context(contextlib.redirect_stdout(nowhere))
        work.enter_context(contextlib.redirect_stderr(nowhere))
        logging.disable(sys.maxsize)
        work.callback(logging.disable, disabled)
        yield


@contextlib.contextmanager
def without_output() -> Iterator[None]:
    """Drops everything that this process writes to stdout, stderr and logs, and its warnings.

    For code of others that reads true labels. The output of other threads is lost, too.
    """
    with _closed_streams(), without_warnings():
        yield


def _flush() -> None:
    """Writes what waits in the buffers of Python and of C."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()  # type: ignore[union-attr]
    for name in ("stdout", "__stdoutp"):  # of Linux and of macOS
        with contextlib.suppress(AttributeError, OSError, TypeError, ValueError):
            native = ctypes.CDLL(None)
            native.fflush(ctypes.c_void_p.in_dll(native, name))


class Progress(tqdm):
    """Shows the progress of a long pass over ``total`` rows, after ``delay`` seconds.

    Example:
        >>> with Progress("Reading", total=200) as progress:
        ...     progress.advance(200)
    """

    monitor_interval = 0  # tqdm starts no thread.

    def __init__(
        self, what: str, total: int | None = None, *, delay: float = 5.0, quiet: bool = False
    ) -> None:
        try:
            is_terminal = sys.stderr is not None and sys.stderr.isatty()
            quiet = quiet or sys.stderr is None
        except ValueError:  # It is closed.
            is_terminal, quiet = False, True
        quiet = quiet or _IS_SILENT.get()
        super().__init__(
            desc=what,
            total=total,
            delay=delay,
            file=sys.stderr,
            disable=quiet,
            miniters=1,
            mininterval=_TERMINAL_SECONDS if is_terminal else _FILE_SECONDS,
            smoothing=0.0,
            unit=" rows",
            dynamic_ncols=True,
        )
        if not quiet:
            self.last_print_t -= self.mininterval  # The delay alone decides on the first report.

    def advance(self, rows: int) -> None:
        """Adds rows to the count."""
        self.update(rows)

    def display(self, *arguments: Any, **keywords: Any) -> None:
        """Writes the line, without an error if stderr can't be written to."""
        with contextlib.suppress(OSError, ValueError):
            super().display(*arguments, **keywords)

    def close(self) -> None:
        """Ends the line, without an error if stderr can't be written to."""
        with contextlib.suppress(OSError, ValueError):
            super().close()
