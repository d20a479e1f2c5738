"""The errors of all verbs, and lines for people."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from typing import IO, Any

from tf_labeldp._progress import Message, for_terminal, without_input_warnings


class CommandError(ValueError):
    """A command cannot be carried out; the message is one line and says what to do."""


class Terminated(KeyboardInterrupt):
    """SIGTERM ended the process; cleaned up after like a stop by hand."""


options: dict[str, str] = {}
"""The options of the verb that runs, by the arguments of the library that they set."""


def in_options(text: str) -> str:
    """Returns a text of the library with options, ``--method head`` for ``method='head'``."""
    return Message.with_options(text, options)


def text_of(error: BaseException | Warning | str) -> str:
    """Returns the text of an error or a warning of the library, with options and in one line."""
    if isinstance(error, BaseException):
        error = error.args[0] if error.args and isinstance(error.args[0], Message) else str(error)
    return " ".join(in_options(error).split())


@contextlib.contextmanager
def explained(*kinds: type[Exception]) -> Iterator[None]:
    """Turns errors of the library that quote no label into errors of the command, in one line."""
    try:
        yield
    except kinds as error:
        raise CommandError(text_of(error)) from None


def say(*lines: Any, error: bool = False) -> None:
    """Prints lines to stdout or stderr.

    Characters that a terminal would obey, such as line ends within a line, and those that the
    encoding lacks are escaped.

    A reader that went away, a full disk behind ``>`` and a closed stream are no failures of the
    command: its files are complete.
    """
    stream = sys.stderr if error else sys.stdout
    if stream is None:  # The process was started with this stream closed.
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text = for_terminal(*lines).encode(encoding, "backslashreplace").decode(encoding)
        stream.write(f"{text}\n")
        stream.flush()
    except (OSError, ValueError):  # ValueError is that of a closed stream.
        drop_rest(stream)


warned: list[str] = []
"""The warnings of the command that runs, each once."""


@contextlib.contextmanager
def warnings_in_lines() -> Iterator[None]:
    """Shows Python's warnings on stderr, each once, as lines without a place in the code.

    Those of deprecations, which its user cannot change, are dropped.
    """

    warned.clear()

    def show(message: Warning | str, category: type[Warning], *unused: Any, **named: Any) -> None:
        if issubclass(category, (DeprecationWarning, FutureWarning)):
            return
        text = text_of(message)
        if text not in warned:
            warned.append(text)
            say(f"warning: {text}", error=True)

    with without_input_warnings():  # It restores showwarning too.
        warnings.showwarning = show
        yield


def drop_rest(stream: IO[str]) -> None:
    """Drops the rest of a stream's buffer, which would fail once more when the process ends."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)


def load_tensorflow() -> None:
    """Loads TensorFlow without the lines of its log, unless ``TF_CPP_MIN_LOG_LEVEL`` is 0.

    Call it before the first import of Keras. It is for programs: it sets this variable, if it is
    not set, and the level of TensorFlow's Python log.

    Example:
        >>> import tf_labeldp.cli
        >>> tf_labeldp.cli.load_tensorflow()
    """
    if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2") == "0":
        return
    # C++ libraries write to the file descriptor, and some of their lines have no level.
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nothing:
        stderr = os.dup(2)
        try:
            os.dup2(nothing.fileno(), 2)
            import tensorflow as tf

            tf.constant(0)  # The first tensor makes TensorFlow look for devices.
            tf.get_logger().setLevel("ERROR")
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
