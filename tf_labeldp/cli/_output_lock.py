"""One run at a time on one output."""

from __future__ import annotations

import os
import pathlib
from typing import Any

from tf_labeldp.cli._errors import CommandError

_fcntl: Any
try:
    import fcntl

    _fcntl = fcntl
except ImportError:  # not on Windows
    _fcntl = None


class OutputLock:
    """A lock on a hidden file beside the output, which the system lifts when the process dies.

    Args:
        output: the path that is locked.
    """

    def __init__(self, output: pathlib.Path) -> None:
        self._output = output
        self._path = output.with_name(f".{output.name}.lock")
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Returns whether the lock is held now; False where the system has no such locks.

        Raises:
            CommandError: another run holds it.
            OSError: the folder cannot be written to.
        """
        while _fcntl is not None:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                _fcntl.flock(descriptor, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                raise CommandError(
                    f"another run is writing --output {self._output} at this moment; wait for it, "
                    "or give another --output"
                ) from None
            except OSError:  # a file system without locks
                os.close(descriptor)
                self._path.unlink(missing_ok=True)
                return False
            if self._is_at_its_path(descriptor):
                self._descriptor = descriptor
                return True
            os.close(descriptor)  # of a run that ended in between, and removed it
        return False

    def release(self) -> None:
        """Lifts the lock, if it is held, and removes its file."""
        if self._descriptor is not None:
            # Removed before it is unlocked: nobody else can hold a lock on this file by then.
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None

    def _is_at_its_path(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False
