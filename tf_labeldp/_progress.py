"""Progress of long passes over the features, on stderr."""

from __future__ import annotations

import sys
import time


class Progress:
    """Says how far a long pass is: nothing in the first seconds, then now and then."""

    def __init__(self, what: str, total: int | None) -> None:
        self._what, self._total, self._rows = what, total, 0
        self._start = time.monotonic()
        self._next = self._start + 5.0
        self._spoke = False

    def advance(self, rows: int) -> None:
        """Counts rows."""
        self._rows += rows
        now = time.monotonic()
        if now >= self._next:
            self._next, self._spoke = now + 10.0, True
            of = f" of {self._total:,}" if self._total else ""
            rate = self._rows / (now - self._start)
            print(
                f"{self._what}: {self._rows:,}{of} rows, {rate:,.0f} a second",
                file=sys.stderr,
                flush=True,
            )

    def end(self) -> None:
        """Says how long it took, if it said anything."""
        if self._spoke:
            taken = time.monotonic() - self._start
            print(f"{self._what}: {self._rows:,} rows in {taken:.0f} s", file=sys.stderr)
