"""Files of stores and outputs: written whole, never through a link, and read within a size.

Other users may plant links in a folder that they can write to, and files that were copied from
elsewhere may contain them. So no name is opened for writing: a new file with a random name gets its
content and then the name, which replaces a link instead of following it. Files are read only if
they are regular ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import os
import pathlib
import re
import secrets
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from tf_labeldp import _validate

_MOST_BYTES_OF_TEXT = 1 << 28
"""Largest JSON file, in bytes: its content takes up to twenty times its size in memory."""
if sys.platform == "win32":
    _BINARY, _NO_FOLLOW, _NO_WAIT = os.O_BINARY, 0, 0
else:
    # A pipe in place of a file would block.
    _BINARY, _NO_FOLLOW, _NO_WAIT = 0, os.O_NOFOLLOW, os.O_NONBLOCK
_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_AT_CWD, _AT_EMPTY_PATH, _STATX_BTIME = -100, 0x1000, 0x800
_SECONDS, _NANOSECONDS = 10, 11
"""Places of the time of birth in ``struct statx``, in words of 64 bits."""
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
"""Names of the temporary files of ``PlainFile``."""
_NUMBERED_PER_MOUNT = ("fuse", "vfat", "msdos", "exfat")
"""Beginnings of the types of file systems whose inode numbers may change with each mount."""


class LabelStoreError(RuntimeError):
    """A label store was refused: it has other labels or settings, or is damaged."""


def damaged(path: str | os.PathLike[str]) -> LabelStoreError:
    """Returns the error for a damaged file of a store."""
    return LabelStoreError(
        f"{path} is damaged. A draw that cannot be read is still a charge, so nothing is drawn "
        "again. Restore this file alone from a copy: an older copy of the whole folder lacks later "
        "charges."
    )


class PlainFile:
    """A regular file, which is written whole or not at all, and read within a size.

    Example:
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> file = PlainFile(folder / "counts")
        >>> file.write(b"7 5")
        >>> file.read(), file.digest()[:8]
        (b'7 5', 'd441522c')
    """

    UNFINISHED: ClassVar[str] = ".unfinished"
    """The name of the mark in a folder whose outputs are not complete; its writer has checked that
    the folder may get them."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)

    def write(
        self,
        content: bytes | Callable[[int], bytes],
        *,
        replace: bool = False,
        mode: int = 0o600,
        durable: bool = True,
    ) -> None:
        """Writes the file; replaces an existing file, or a link, only with ``replace``.

        ``content`` may be a function of the descriptor. Without ``durable``, a power failure may
        leave an empty file.
        """
        target = self.path
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY
        descriptor = os.open(temporary, flags, mode)
        try:
            try:
                whole = content if isinstance(content, bytes) else content(descriptor)
                _write_all(descriptor, whole)
                # The content is on disk before it has its name, and the name before this returns:
                # after a power failure the file is whole or missing, and an output that was
                # returned has its record.
                if durable:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if replace:
                os.replace(temporary, target)
            else:
                self.take(temporary)
        finally:
            # A file that is left is removed later, and the new one may have its name already.
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        if durable:
            sync_folder(target.parent)

    def write_text(self, text: str) -> None:
        """Writes a text that may be published, or replaces it."""
        self.write(text.encode(), replace=True, mode=0o666)

    def write_in_private(self, content: bytes, *, replace: bool = False) -> None:
        """Writes the file in a folder that no other user may read, which is made if needed.

        Raises:
            LabelStoreError: the folder is a link, or other users may write into it.
        """
        make_private(self.path.parent)
        self.write(content, replace=replace)

    @contextlib.contextmanager
    def replaced(self) -> Iterator[pathlib.Path]:
        """Yields a path for a file that replaces this one, or a link, once it is complete."""
        target = self.path
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
            path = pathlib.Path(folder) / target.name
            yield path
            os.replace(path, target)

    def write_in_store(
        self,
        content: bytes | Callable[[int], bytes],
        *,
        replace: bool = False,
        durable: bool = True,
    ) -> None:
        """Writes a file of a store, as ``write``; a full disk raises a ``LabelStoreError``."""
        try:
            self.write(content, replace=replace, durable=durable)
        except FileExistsError:
            raise
        except OSError as error:
            raise not_written(self.path, error) from None

    def take(self, temporary: pathlib.Path) -> None:
        """Gives this name to a file or folder, if it is free; the temporary name may remain."""
        target = self.path
        # A link fails if the name exists. A rename would replace the record of another process, and
        # with it a charge.
        try:
            os.link(temporary, target)
        except FileExistsError as error:
            raise FileExistsError(error.errno, error.strerror, str(target)) from None
        except OSError:
            # Without hard links, exclusive creation claims the name. A process that is killed here
            # leaves an empty file or folder.
            is_folder = os.path.isdir(temporary)
            if is_folder:
                os.mkdir(target)
            else:
                os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            try:
                os.replace(temporary, target)
            except BaseException:
                with contextlib.suppress(OSError):
                    (os.rmdir if is_folder else os.unlink)(target)
                raise

    def read(self, most: int | None = _MOST_BYTES_OF_TEXT) -> bytes:
        """Returns the content; raises if it has more than ``most`` bytes.

        None is for files of arrays, which take their own size alone.
        """
        with os.fdopen(open_plain(self.path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if most is not None and size > most:
                raise LabelStoreError(
                    f"expected at most {most:,} bytes in {self.path}, got {size:,}. Restore the "
                    "file as it was written."
                )
            return file.read()

    def digest(self) -> str:
        """Returns the SHA-256 of the content."""
        digest = hashlib.sha256()
        with self.path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        return digest.hexdigest()

    def check_lock(self) -> None:
        """Raises if a lock would open another file: a link, or a second name of a file.

        The file of a lock is empty, so that a backup by hard links may have its second name.
        """
        with contextlib.suppress(OSError):
            status = os.lstat(self.path)
            is_second_name = status.st_nlink > 1 and status.st_size > 0
            if not stat.S_ISREG(status.st_mode) or is_second_name:
                raise LabelStoreError(
                    f"expected a lock file {self.path}, got a link to another file. Remove it, and "
                    "find out who made it."
                )


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        written = os.write(descriptor, rest)
        if not written:
            raise OSError(errno.EIO, "nothing was written")
        rest = rest[written:]


def sync_folder(path: pathlib.Path) -> None:
    """Returns once the names in a folder are on disk; some platforms can't sync folders."""
    with contextlib.suppress(OSError):
        directory = os.open(path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def open_plain(path: str | os.PathLike[str]) -> int:
    """Opens a regular file for reading; a link, a folder, a pipe or a device is refused."""
    if not _NO_FOLLOW and os.path.islink(path):
        raise _no_plain_file(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | _BINARY | _NO_FOLLOW | _NO_WAIT)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO):
            raise _no_plain_file(path) from None
        raise not_read(path, error) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _no_plain_file(path)
    return descriptor


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the content of a JSON file of a store, or raises if it is damaged."""
    try:
        content = _validate.json_of(PlainFile(path).read())
    except (OSError, ValueError) as error:
        raise damaged(path) from error
    if not isinstance(content, dict):
        raise damaged(path)
    return content


def has_content(path: pathlib.Path) -> bool:
    """Returns whether a file exists and is not empty, as claims of ``take`` are."""
    try:
        return os.lstat(path).st_size > 0
    except (FileNotFoundError, NotADirectoryError):
        return False
    except PermissionError as error:
        raise not_read(path, error) from None


def remove_claim(path: pathlib.Path) -> None:
    """Removes the empty file of a process that was killed within ``PlainFile.take``."""
    if os.path.lexists(path) and not has_content(path):
        with contextlib.suppress(OSError):  # The claim stays, and its name is refused.
            path.unlink()


def is_temporary(name: str) -> bool:
    """Returns whether ``PlainFile`` gave a file this name, which a killed process leaves behind."""
    return _TEMPORARY.fullmatch(name) is not None


def make_private(folder: pathlib.Path) -> None:
    """Makes a folder that no other user may read, or checks one that exists.

    Raises:
        LabelStoreError: it is a link, or other users may write into it.
    """
    try:
        os.makedirs(folder.parent, exist_ok=True)
        os.mkdir(folder, 0o700)
        return
    except FileExistsError:
        check_private(folder)
    except OSError as error:
        raise not_written(folder, error) from None


def check_private(folder: pathlib.Path, *, follow: bool = False) -> None:
    """Raises if a folder is a link, unless ``follow``, or if other users may write into it.

    They could plant links and files there. A file system without modes shows all bits for each
    file: there everybody who reaches it is trusted.
    """
    status = os.stat(folder) if follow else os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise _no_folder(folder)
    if not _may_others_write(status) or not _has_modes(folder):
        return
    raise LabelStoreError(
        f"expected a folder that no other user may write into, got {folder} with mode "
        f"{stat.S_IMODE(status.st_mode):o}. Run chmod go-w on it if no file in it is of other "
        "users, or give a new folder."
    )


def check_no_link(folder: pathlib.Path) -> None:
    """Raises if a name that this library gives to a folder is a link."""
    if os.path.islink(folder):
        raise _no_folder(folder)


def tighten(folder: pathlib.Path) -> None:
    """Raises if a folder within a store is a link, and keeps others from writing into it."""
    try:
        status = os.lstat(folder)
    except FileNotFoundError:
        return
    except PermissionError as error:
        raise not_read(folder, error) from None
    if not stat.S_ISDIR(status.st_mode):
        raise _no_folder(folder)
    if status.st_mode & _BY_OTHERS:
        with contextlib.suppress(OSError):  # Some file systems have no modes.
            os.chmod(folder, 0o700)


def _may_others_write(status: os.stat_result) -> bool:
    if not status.st_mode & _BY_OTHERS:
        return False
    return bool(status.st_mode & stat.S_IWOTH) or not _is_own_group(status)


def _is_own_group(status: os.stat_result) -> bool:
    """Returns whether the group of a file is its user's own, as many systems make one."""
    try:
        import grp
        import pwd

        group, user = grp.getgrgid(status.st_gid), pwd.getpwuid(status.st_uid)
    except (ImportError, KeyError):
        return False
    own = status.st_uid == os.geteuid() and group.gr_name == user.pw_name
    return own and set(group.gr_mem) <= {user.pw_name}


def _has_modes(folder: pathlib.Path) -> bool:
    """Returns whether a new file keeps its mode."""
    probe = folder / f".mode.{secrets.token_hex(8)}.tmp"
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:  # Nothing can be written, and nothing will be.
        return False
    try:
        return not os.fstat(descriptor).st_mode & _BY_OTHERS
    finally:
        os.close(descriptor)
        os.unlink(probe)


def identity_of(file: int | str | os.PathLike[str]) -> tuple[int, int] | None:
    """Returns the inode number and the time of birth of a file or folder, in nanoseconds.

    A copy has others; a file that is moved within its file system, or seen from another machine,
    has the same. The time is zero where it is unknown. None if the numbers do not last.
    """
    status = os.stat(file)
    if not status.st_ino or not _keeps_numbers(status.st_dev):
        return None
    return status.st_ino, _birth(file, status)


def is_same_file(one: Sequence[int], other: Sequence[int]) -> bool:
    """Returns whether two identities may be of one file."""
    return one[0] == other[0] and (one[1] == other[1] or 0 in (one[1], other[1]))


@functools.cache
def _keeps_numbers(device: int) -> bool:
    try:
        mounts = pathlib.Path("/proc/self/mountinfo").read_text(errors="replace")
    except OSError:
        return True
    wanted = f"{os.major(device)}:{os.minor(device)}"
    kinds = [
        line.partition(" - ")[2] for line in mounts.splitlines() if line.split()[2:3] == [wanted]
    ]
    return not any(kind.startswith(_NUMBERED_PER_MOUNT) for kind in kinds)


def _birth(file: int | str | os.PathLike[str], status: os.stat_result) -> int:
    if sys.platform == "win32":
        return status.st_ctime_ns
    if sys.platform == "darwin":
        return int(status.st_birthtime * 1e9)
    if (statx := _statx()) is None:
        return 0
    content = (ctypes.c_uint64 * 32)()
    place = (
        (file, b"", _AT_EMPTY_PATH) if isinstance(file, int) else (_AT_CWD, os.fsencode(file), 0)
    )
    if statx(*place, _STATX_BTIME, content):
        return 0
    # The nanoseconds are the lower half of their word.
    return int(content[_SECONDS]) * 10**9 + (int(content[_NANOSECONDS]) & 0xFFFFFFFF)


@functools.cache
def _statx() -> Any:
    """Returns the C function, since Python has none; None where the platform lacks it."""
    try:
        return ctypes.CDLL(None).statx
    except (AttributeError, OSError, TypeError):
        return None


def _no_folder(path: str | os.PathLike[str]) -> LabelStoreError:
    return LabelStoreError(
        f"expected a folder {path}, got a link or a file. Give a new or empty folder."
    )


def _no_plain_file(path: str | os.PathLike[str]) -> LabelStoreError:
    return LabelStoreError(
        f"expected a regular file {path}, got a link, a folder or a device. Remove it, or restore "
        "the file."
    )


def not_read(path: str | os.PathLike[str], error: OSError) -> LabelStoreError:
    """Returns the error for a file that can't be read: of another user, or on a broken disk."""
    advice = "Check the disk, and try again."
    if isinstance(error, PermissionError):
        advice = "Run as the owner of the store."
        with contextlib.suppress(OSError):
            advice = f"It belongs to user {os.lstat(path).st_uid}. {advice}"
    return LabelStoreError(f"expected access to {path}, got {error.strerror}. {advice}")


def not_written(path: str | os.PathLike[str], error: OSError) -> LabelStoreError:
    """Returns the error for a file that can't be written: a full or read-only disk, a mode."""
    return LabelStoreError(
        f"expected to write {path}, got {error.strerror or error}. Nothing was returned or "
        "charged. Make room, or give a folder that can be written."
    )
