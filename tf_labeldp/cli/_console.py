"""What every verb says, and how: its errors and its lines for people."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import IO


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
        drop_rest(stream)


def drop_rest(stream: IO[str]) -> None:
    """Forgets what is left in a stream's buffer: it would fail once more, at the process's end."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)


def one_line(text: str) -> str:
    """Returns text with line ends and other unprintable characters, as of a path, as escapes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def load_tensorflow() -> None:
    """Loads TensorFlow without what it says at its start, unless ``TF_CPP_MIN_LOG_LEVEL`` is set.

    These lines are none of the command's; they are written by libraries, to the file descriptor.
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
