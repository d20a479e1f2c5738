"""Prints for people: what cannot be printed must not change how a command ends."""

from __future__ import annotations

import contextlib
import os
import sys


def say(text: str, *, error: bool = False, end: str = "\n") -> None:
    """Prints to stdout, or to stderr, if anybody listens there.

    A reader that went away, a full disk behind ``>`` and a closed stream are no failures of the
    command, whose files are complete. Characters that the stream's encoding lacks come as escapes.

    Args:
        text: one or more lines.
        error: whether it goes to stderr.
        end: what follows the text.
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
