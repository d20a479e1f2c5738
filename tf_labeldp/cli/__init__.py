"""The command line, ``tf-labeldp VERB``; a verb loads TensorFlow only once its arguments are good.

Each verb is a private module with ``add_parser(verbs)``, which sets ``run``: a function from the
parsed arguments to the exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from typing import NoReturn

from tf_labeldp._version import __version__
from tf_labeldp.cli import _demo, _errors, _randomize, _say

__all__ = ["main"]

_VERBS = {"demo": _demo, "randomize": _randomize}
_TRACEBACK = "TF_LABELDP_TRACEBACK"
_EPILOG = f"""\
An error is one line, the last one on stderr, and exit code 2; other lines on stderr are progress
and remarks. Of an unexpected error only the kind is shown, since its text may quote a label; with
{_TRACEBACK}=1 in the environment all of it is shown, for the label holder's eyes alone.
"""
_SMALL_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb of the command line.

    With ``TF_LABELDP_TRACEBACK=1`` in the environment an unexpected error is shown in full. It may
    quote a label.

    Args:
        argv: the arguments after the program's name; None takes those of the process.

    Returns:
        The exit code: 0 for success, 2 for bad input or any other error (with one line on stderr
        that says why), 130 if the user stopped it, 143 if the system did.

    Example:
        >>> main(["demo", "--epsilons", "0"])
        2
    """
    parser = _Parser(
        prog="tf-labeldp",
        description="Keras models trained under label differential privacy.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"tf-labeldp {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in _VERBS.values():
        verb.add_parser(verbs)
    words = _joined(sys.argv[1:] if argv is None else argv)
    # The verb is known before the arguments are parsed: all errors begin with the same name.
    name = f"{parser.prog} {words[0]}" if words and words[0] in _VERBS else parser.prog
    try:
        with _ended_by_sigterm():
            args = parser.parse_args(words)
            return int(args.run(args))
    except _errors.UsageError as error:
        reason = f"{error}. See {name} --help."
    except _errors.CommandError as error:
        reason = str(error)
    except _errors.Terminated:
        _say.say(f"\n{name}: ended by SIGTERM", error=True)
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        _say.say(f"\n{name}: stopped", error=True)
        return 130
    except Exception as error:
        reason = (
            f"unexpected {type(error).__name__}; its text is kept back, since it may quote a label "
            f"(with {_TRACEBACK}=1 in the environment it is shown)"
        )
        if os.environ.get(_TRACEBACK) == "1":
            _say.say(traceback.format_exc(), error=True)
    _say.say(f"{name}: error: {_say.one_line(reason)}", error=True)
    return 2


def _joined(words: Sequence[str]) -> list[str]:
    """Returns the command line with ``--low -1e3`` as one word: argparse takes it for an option."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in ("--low", "--high") and _SMALL_NUMBER.fullmatch(word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Turns SIGTERM into an exception, so that hidden files are removed; a caller's handler stays.

    Only the main thread may set handlers.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        yield
        return

    def end(*unused: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one is enough; cleaning up takes no time
        raise _errors.Terminated

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like those of the verbs."""

    def error(self, message: str) -> NoReturn:
        if re.search("required: (?!-)", message):
            # It may have been given: options that take several words take all that follow.
            message += " (before the options, as --classes and the like take all words after them)"
        raise _errors.UsageError(message)
