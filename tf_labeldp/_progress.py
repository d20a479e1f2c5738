"""Long passes over rows: progress bars on stderr, where they are silent, and the cores."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

_TERMINAL_SECONDS = 1.0
_FILE_SECONDS = 10.0
"""Seconds between two reports: a terminal overwrites its line, a file grows."""
_IS_SILENT = contextvars.ContextVar("is_silent", default=False)


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


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
            is_terminal = sys.stderr.isatty()
        except (AttributeError, ValueError):  # There is no stderr, or it is closed.
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
