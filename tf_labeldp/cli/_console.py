"""What every verb says, and how: its errors, its lines for people, and the progress of its rows."""

from __future__ import annotations

import contextlib
import os
import sys
import time

_PATIENCE = 2.0
"""Seconds until the first word of progress; a command that is done by then says nothing."""
_EVERY_TERMINAL = 1.0
_EVERY_FILE = 10.0
"""Seconds between words, where a line can be rewritten and where it cannot."""


class CommandError(ValueError):
    """A command cannot be carried out as asked; the message is one line and says what to do."""


class UsageError(CommandError):
    """The command line is not one that the command takes; its help says what it takes."""


class DatasetError(CommandError):
    """A data set could not be read; the message says what to do."""


class Terminated(KeyboardInterrupt):
    """The process was asked to end (SIGTERM); cleaned up after like a stop by hand."""


def say(text: str, *, error: bool = False, end: str = "\n") -> None:
    """Prints to stdout, or to stderr, if anybody listens there.

    A reader that went away, a full disk behind ``>`` and a closed stream are no failures of the
    command, whose files are complete. Characters that the stream's encoding lacks come as escapes.
    """
    stream = sys.stderr if error else sys.stdout
    if stream is None:  # the process was started with this stream closed
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + end)
        stream.flush()
    except (OSError, ValueError):  # ValueError: closed meanwhile
        # What is left in the stream's buffer would fail once more, at the end of the process.
        with contextlib.suppress(OSError, ValueError):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream.fileno())
            os.close(nothing)


def one_line(text: str) -> str:
    """Returns text with line ends and other unprintable characters, as of a path, as escapes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class RowProgress:
    """Counts the rows of one phase after another, and the seconds that each took.

    Args:
        quiet: says nothing at all.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._terminal = _is_terminal()
        self._start = self._phase_start = time.monotonic()
        self._next = self._start + _PATIENCE
        self._phase = ""
        self._rows = 0
        self._total: int | None = None
        self._unfinished_line = False
        self._seconds: dict[str, float] = {}

    def begin(self, phase: str, total: int | None = None) -> None:
        """Ends the phase before, if any, and starts one: of so many rows, if that is known."""
        self._end_phase()
        self._phase, self._total, self._rows = phase, total, 0
        self._say_if_due()

    def advance(self, rows: int) -> None:
        """Counts rows of the current phase."""
        self._rows += rows
        self._say_if_due()

    def end(self) -> None:
        """Ends the last phase; a command that took long says what took how long."""
        self._end_phase()
        self._phase = ""
        if self._next > self._start + _PATIENCE:  # it has spoken
            parts = ", ".join(f"{name} {taken:.1f} s" for name, taken in self._seconds.items())
            self._say(f"took {sum(self._seconds.values()):.1f} s: {parts}")
        self.close()

    def close(self) -> None:
        """Leaves the terminal at the start of a line."""
        if self._unfinished_line:
            say("", error=True)
            self._unfinished_line = False

    def _end_phase(self) -> None:
        now = time.monotonic()
        if self._phase:
            self._seconds[self._phase] = now - self._phase_start
        self._phase_start = now

    def _say_if_due(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (_EVERY_TERMINAL if self._terminal else _EVERY_FILE)
        text = self._phase
        if self._rows:
            share = f" of {self._total:,}" if self._total else ""
            rate = self._rows / max(now - self._phase_start, 1e-9)
            text += f": {self._rows:,}{share} rows, {rate:,.0f} a second"
        self._say(text)

    def _say(self, text: str) -> None:
        if self._quiet:
            return
        if self._terminal:
            # Over the line before: its rest is erased.
            say(f"\r{text}\033[K", error=True, end="")
            self._unfinished_line = True
        else:
            say(text, error=True)


def _is_terminal() -> bool:
    try:
        return bool(sys.stderr.isatty())
    except (AttributeError, ValueError):  # None, or closed
        return False
