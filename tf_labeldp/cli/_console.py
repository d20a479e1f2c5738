"""The errors of all verbs, and their lines for people."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import IO


class CommandError(ValueError):
    """A command cannot be carried out as asked; the message is one line and gives the remedy."""


class UsageError(CommandError):
    """A command line that the command does not take; its help lists those that it takes."""


class Terminated(KeyboardInterrupt):
    """The process was asked to end (SIGTERM); cleaned up after like a stop by hand."""


@contextlib.contextmanager
def explained(*kinds: type[Exception]) -> Iterator[None]:
    """Turns errors of the library that show no label into errors of the command, of one line."""
    try:
        yield
    except kinds as error:
        raise CommandError(" ".join(str(error).split())) from None


def say(text: str, *, error: bool = False) -> None:
    """Prints to stdout, or to stderr, if anybody listens there.

    A reader that went away, a full disk behind ``>`` and a closed stream are no failures of the
    command, whose files are complete. Characters that the stream's encoding lacks come as escapes.
    """
    stream = sys.stderr if error else sys.stdout
    if stream is None:  # the process was started with this stream closed
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        stream.flush()
    except (OSError, ValueError):  # ValueError: closed meanwhile
        drop_rest(stream)


def drop_rest(stream: IO[str]) -> None:
    """Drops the rest of a stream's buffer: it would fail once more, at the process's end."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)


def one_line(text: str) -> str:
    """Returns text with line ends and other unprintable characters, as of a path, as escapes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def load_tensorflow() -> None:
    """Loads TensorFlow without its first lines, unless ``TF_CPP_MIN_LOG_LEVEL`` is set.

    They are written by other libraries, to the file descriptor.
    """
    if "TF_CPP_MIN_LOG_LEVEL" in os.environ:
        return
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nothing:
        kept = os.dup(2)
        try:
            os.dup2(nothing.fileno(), 2)
            import tensorflow as tf

            tf.constant(0)  # looks for devices
            tf.get_logger().setLevel("ERROR")
        finally:
            os.dup2(kept, 2)
            os.close(kept)
