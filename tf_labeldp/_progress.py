"""Progress of long passes over rows, on stderr."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from tqdm import tqdm

_TERMINAL_SECONDS = 1.0
_FILE_SECONDS = 10.0
"""Seconds between two lines: a terminal's line is rewritten, a file's is not."""


class Progress(tqdm):
    """Reports how far a long pass over ``total`` rows is, after ``delay`` seconds of silence.

    A terminal gets one line that changes, a file a new line each time.

    Example:
        >>> with Progress("Reading", total=200) as progress:
        ...     progress.advance(200)
    """

    monitor_interval = 0  # no thread of its own

    def __init__(
        self, what: str, total: int | None = None, *, delay: float = 5.0, quiet: bool = False
    ) -> None:
        try:
            self._is_terminal = bool(sys.stderr.isatty())
        except (AttributeError, ValueError):  # None, or closed
            self._is_terminal, quiet = False, True
        self._has_ended = False
        super().__init__(
            desc=what,
            total=total,
            delay=delay,
            file=sys.stderr,
            disable=quiet,
            miniters=1,
            mininterval=_TERMINAL_SECONDS if self._is_terminal else _FILE_SECONDS,
            bar_format="{text}",
            dynamic_ncols=True,
        )
        if not quiet:
            self.last_print_t -= self.mininterval  # the delay alone decides on the first line

    def advance(self, rows: int) -> None:
        """Counts rows."""
        self.update(rows)

    def end(self) -> None:
        """Reports how long the pass took, if it reported anything before."""
        self._has_ended = True
        self.close()

    def __exit__(self, *exception: Any) -> None:
        self.end()

    @property
    def format_dict(self) -> dict[str, Any]:
        """The values that the line is made of."""
        values: dict[str, Any] = super().format_dict
        seconds = max(values["elapsed"], 1e-9)
        rows = f"{self.n:,} rows in {seconds:.0f} s"
        if not self._has_ended:
            total = f" of {self.total:,}" if self.total else ""
            rows = f"{self.n:,}{total} rows, {self.n / seconds:,.0f} a second"
        return {**values, "text": f"{self.desc}: {rows}"}

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Writes the line, over the one before where that is possible; failure is no error."""
        with contextlib.suppress(OSError, ValueError):
            if self._is_terminal:
                super().display(msg, pos)
                return
            self.fp.write(f"{self}" if self._has_ended else f"{self}\n")
            self.fp.flush()

    def close(self) -> None:
        """Ends the line."""
        with contextlib.suppress(OSError, ValueError):
            super().close()
