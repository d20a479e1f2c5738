"""The command line, ``tf-labeldp VERB``; a verb loads TensorFlow only once its arguments are good.

Each verb is a private module with ``add_parser(verbs)``, which sets ``run``: a function from the
parsed arguments to the exit code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from tf_labeldp._version import __version__
from tf_labeldp.cli import _demo, _errors, _randomize

__all__ = ["main"]

_VERBS = (_demo, _randomize)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb of the command line.

    Args:
        argv: the arguments after the program's name; None takes those of the process.

    Returns:
        The exit code: 0 for success, 2 for bad input (with one line on stderr that says why), 130
        if the user stopped it.

    Example:
        >>> main(["demo", "--epsilons", "0"])
        2
    """
    parser = _Parser(
        prog="tf-labeldp", description="Keras models trained under label differential privacy."
    )
    parser.add_argument("--version", action="version", version=f"tf-labeldp {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in _VERBS:
        verb.add_parser(verbs)
    name = parser.prog
    try:
        args = parser.parse_args(argv)
        name = f"{parser.prog} {args.verb}"
        return int(args.run(args))
    except _errors.CommandError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{name}: stopped", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like those of the verbs."""

    def error(self, message: str) -> NoReturn:
        raise _errors.CommandError(f"{message}. See {self.prog} --help.")
