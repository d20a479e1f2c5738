"""Keeps TensorFlow's own log away from the terminal while labels are in its graphs."""

from __future__ import annotations

import contextlib
import io
import os
import re
import secrets
import sys
import threading
from collections.abc import Iterator
from typing import Any

# "W0000 00:00:1795365476.152832 ... " of absl, or "2026-01-01 00:00:00.000000: W tensorflow/... ".
_LOG_LINE = r"(?:{level}\d{{4}} \d\d:\d\d:|\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: {level} )"
_WITHHELD = re.compile(_LOG_LINE.format(level="[WEF]").encode())
_INFORMATION = re.compile(_LOG_LINE.format(level="I").encode())
_LINES = re.compile(rb"[^\r\n]*[\r\n]")


@contextlib.contextmanager
def withheld_log() -> Iterator[None]:
    """Withholds warnings and errors that TensorFlow's kernels write to the standard error stream.

    Privacy: the text of such an entry may quote values of tensors, and so labels: an index that is
    out of range in a custom loss, say. It has any number of lines, and so ends with the next line
    of information. What Python writes goes through; how many lines were withheld is said at the
    end. Trainings in several threads share one diversion.
    """
    _DIVERSION.enter()
    try:
        yield
    finally:
        _DIVERSION.leave()


class _Diversion:
    """Sends the file of standard errors (number 2) through a thread that reads along."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._pump: _Pump | None = None

    def enter(self) -> None:
        """Begins, unless another thread has."""
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            with contextlib.suppress(OSError, ValueError, AttributeError):  # None, or closed
                sys.stderr.flush()
            try:
                original = os.dup(2)
            except OSError:  # there is no such file
                return
            read_end, self._write_end = os.pipe()
            os.dup2(self._write_end, 2)
            self._original = os.dup(original)
            self._pump = _Pump(read_end, original)
            self._pump.start()
            self._python, self._own = sys.stderr, None
            with contextlib.suppress(OSError, ValueError, AttributeError):
                if self._python.fileno() == 2:  # and no notebook's
                    sys.stderr = self._own = _text(os.dup(original), self._python)

    def leave(self) -> None:
        """Ends, after the last of the threads."""
        with self._lock:
            self._users -= 1
            if self._users or self._pump is None:
                return
            pump, self._pump = self._pump, None
            if self._own is not None and sys.stderr is self._own:
                sys.stderr = self._python
            with contextlib.suppress(OSError, ValueError, AttributeError):
                self._python.flush()
            os.dup2(self._original, 2)
            os.close(self._original)
            os.write(self._write_end, pump.mark)
            os.close(self._write_end)
            pump.has_seen_mark.wait(timeout=5.0)
            if pump.withheld:
                said = (
                    f"tf_labeldp: {pump.withheld} line(s) of TensorFlow's log were withheld while "
                    "training privately, since they may quote labels."
                )
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    print(said, file=sys.stderr)


_DIVERSION = _Diversion()


class _Pump(threading.Thread):
    """Copies lines, but for those of TensorFlow's warnings and errors, until the source ends.

    A process that a callback started may keep the source open: the thread then goes on.
    """

    def __init__(self, source: int, target: int) -> None:
        super().__init__(daemon=True)
        self.mark = secrets.token_bytes(16).hex().encode() + b"\n"
        self.has_seen_mark = threading.Event()
        self.withheld = 0
        self._source, self._target = source, target
        self._hiding = False

    def run(self) -> None:
        """Copies."""
        rest = b""
        with (
            open(self._source, "rb", buffering=0) as stream,
            open(self._target, "wb", buffering=0) as target,
        ):
            while chunk := stream.read(1 << 16):
                rest += chunk
                before, mark, after = rest.partition(self.mark)
                if mark:
                    self._copy(_lines(before), target)
                    self.has_seen_mark.set()
                    self._hiding, rest = False, after
                *lines, rest = _lines(rest)
                self._copy(lines, target)
            self._copy([rest], target)
        self.has_seen_mark.set()

    def _copy(self, lines: list[bytes], target: Any) -> None:
        for line in filter(None, lines):
            entry = _WITHHELD.search(line)
            shown = line
            if entry is not None:  # also behind a progress bar, which leaves its line open
                shown = b"" if self._hiding else line[: entry.start()]
                self._hiding = True
            elif _INFORMATION.match(line):
                self._hiding = False
            elif self._hiding:
                shown = b""
            self.withheld += self._hiding
            if shown:
                target.write(shown)


def _lines(text: bytes) -> list[bytes]:
    """Returns the lines with their ends, and last what has no end as yet."""
    lines = _LINES.findall(text)
    return [*lines, text[sum(map(len, lines)) :]]


def _text(number: int, like: Any) -> io.TextIOWrapper:
    """Returns a stream of text into a file, as another one is."""
    return io.TextIOWrapper(
        open(number, "wb", buffering=0),
        encoding=like.encoding,
        errors=like.errors,
        write_through=True,
    )
