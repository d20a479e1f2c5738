"""Progress reports of long passes over rows, on stderr."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from tqdm import tqdm

_TERMINAL_SECONDS = 1.0
_FILE_SECONDS = 10.0
"""Seconds between two reports: a terminal rewrites its line, a file gets a new line."""


class Progress(tqdm):
    """Reports the progress of a long pass over ``total`` rows, after ``delay`` seconds.

    Example:
        >>> with Progress("Reading", total=200) as progress:
        ...     progress.advance(200)
    """

    monitor_interval = 0  # tqdm starts no thread.

    def __init__(
        self, what: str, total: int | None = None, *, delay: float = 5.0, quiet: bool = False
    ) -> None:
        try:
            self._is_terminal = bool(sys.stderr.isatty())
        except (AttributeError, ValueError):  # There is no stderr, or it is closed.
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
            self.last_print_t -= self.mininterval  # The delay alone decides on the first report.

    def advance(self, rows: int) -> None:
        """Adds rows to the count."""
        self.update(rows)

    def end(self) -> None:
        """Reports the duration of the pass, if it has reported before."""
        self._has_ended = True
        self.close()

    def __exit__(self, *exception: Any) -> None:
        self.end()

    @property
    def format_dict(self) -> dict[str, Any]:
        """The values in the line, for tqdm."""
        values: dict[str, Any] = super().format_dict
        seconds = max(values["elapsed"], 1e-9)
        rows = f"{self.n:,} rows in {seconds:.0f} s"
        if not self._has_ended:
            total = f" of {self.total:,}" if self.total else ""
            rows = f"{self.n:,}{total} rows, {self.n / seconds:,.0f} a second"
        return {**values, "text": f"{self.desc}: {rows}"}

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Writes the line; a terminal overwrites the last line, and errors are ignored."""
        with contextlib.suppress(OSError, ValueError):
            if self._is_terminal:
                super().display(msg, pos)
                return
            self.fp.write(f"{self}" if self._has_ended else f"{self}\n")
            self.fp.flush()

    def close(self) -> None:
        """Ends the line; errors are ignored."""
        with contextlib.suppress(OSError, ValueError):
            super().close()
