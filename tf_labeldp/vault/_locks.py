"""Locks of a store: one for each turn, and one for each process that has reserved uses."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from tf_labeldp.vault.files import LabelStoreError, PlainFile, not_written

_NO_LOCKS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOLCK, errno.ENOSYS)
"""Errors of a file system without locks, or a read-only one: ``PlainFile`` detects collisions."""
LOCK = ".lock"


@contextlib.contextmanager
def locked_folder(folder: pathlib.Path, *, is_shared: bool) -> Iterator[bool]:
    """Locks out other processes; yields whether it does, since not all file systems have locks.

    ``is_shared`` states that several stores lock this folder: those of a project.
    """
    path = folder / LOCK
    PlainFile(path).check_lock()
    lock = _lock_of(path, os.getpid())
    try:
        lock.acquire()
    except (NotImplementedError, OSError) as error:
        number = error.errno if isinstance(error, OSError) else errno.ENOSYS
        if number not in _NO_LOCKS:
            raise not_written(path, error) from None  # type: ignore[arg-type]
        if number in (errno.ENOLCK, errno.ENOSYS) and is_shared:
            # Two stores write records of two names, so no collision shows.
            raise LabelStoreError(
                f"expected file locks in {folder}, whose stores share a budget, got a file "
                "system without them. Move the project to a local disk."
            ) from None
    try:
        yield lock.is_locked
    finally:
        lock.release()


@functools.cache
def _lock_of(path: pathlib.Path, process: int) -> Any:
    # The stores of a project share a lock, which a turn may enter again; a fork has its own lock.
    import filelock

    return filelock.FileLock(path, mode=0o600)


class Holders:
    """The processes that have reserved uses in a store: each holds the lock of a random name.

    The operating system frees the lock of a process that ends in any way, a kill included, so that
    another process can tell whether the work on a reservation may go on. Process ids cannot: they
    are used again, and they name nothing on another machine.
    """

    PREFIX = ".reserved-"

    def __init__(self, store: pathlib.Path) -> None:
        self._store = store

    def hold(self, holder: str) -> Any:
        """Returns a lock of this name, which is free when this process ends; None without locks."""
        lock = self._lock_of(holder)
        try:
            lock.acquire()
        except (NotImplementedError, OSError):
            PlainFile(self._file(holder)).write_in_store(b"")
            return None
        return lock

    def is_held(self, holder: str) -> bool | None:
        """Returns whether a running process holds the lock of this name; None without locks."""
        import filelock

        if not os.path.lexists(self._file(holder)):
            return False
        PlainFile(self._file(holder)).check_lock()
        lock = self._lock_of(holder)
        try:
            lock.acquire()
        except filelock.Timeout:
            return True
        except (NotImplementedError, OSError):
            return None
        lock.release()
        return False

    def remove(self, holder: str) -> None:
        """Removes the file of a lock whose process has ended.

        A random name is held once. The file of a lock that others wait for, such as ``.lock``, must
        stay: two processes could lock the removed and the new one.
        """
        with contextlib.suppress(OSError):
            self._file(holder).unlink()

    def remove_ended(self) -> None:
        """Removes the files of all locks whose processes have ended."""
        for path in self._store.glob(f"{self.PREFIX}*"):
            holder = path.name.removeprefix(self.PREFIX)
            if self.is_held(holder) is False:
                self.remove(holder)

    def _file(self, holder: str) -> pathlib.Path:
        return self._store / f"{self.PREFIX}{holder}"

    def _lock_of(self, holder: str) -> Any:
        import filelock

        # A thread may free the lock that another took, as a finalizer does.
        return filelock.FileLock(self._file(holder), timeout=0, mode=0o600, thread_local=False)
