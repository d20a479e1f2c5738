"""The command line, ``tf-labeldp VERB``: its verbs, their options, and how a command ends.

Nothing heavy is loaded here: the module of a verb is loaded once the options are known to be good.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import math
import os
import pathlib
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from tf_labeldp._version import __version__
from tf_labeldp.cli import _console

__all__ = ["main"]

_TRACEBACK = "TF_LABELDP_TRACEBACK"
_EPILOG = f"""\
An error is one line, the last one on stderr, and exit code 2; other lines on stderr are progress
and remarks. Of an unexpected error only the kind is shown, since its text may quote a label; with
{_TRACEBACK}=1 in the environment all of it is shown, for the label holder's eyes alone.
"""
_SMALL_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_LARGEST_EPSILON = 1000.0
"""e to this power is more than a double holds, and a label is as good as published."""
_MOST_CLASSES = 10**9

_LOSSES = ("squared_error", "absolute_error", "poisson")
_RR_ON_BINS = "rr_on_bins"
_BASELINES = ("laplace", "discrete_laplace", "staircase", "discrete_staircase", "exponential")
_GRID_ONLY = ("prior_epsilon", "max_values", "whole_numbers")
_REGRESSION_ONLY = ("low", "high", "clip", "mechanism", "loss", *_GRID_ONLY)
_CLASSIFICATION_ONLY = ("num_classes", "classes")
_BINS_ONLY = ("loss", *_GRID_ONLY, "prior")


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
    _add_demo(verbs)
    _add_randomize(verbs)
    _add_recommend(verbs)
    _add_train(verbs)
    _add_audit(verbs)
    _add_report(verbs)
    _add_verify(verbs)
    _add_forget(verbs)
    words = _joined(sys.argv[1:] if argv is None else argv)
    # The verb is known before the arguments are parsed: all errors begin with the same name.
    name = f"{parser.prog} {words[0]}" if words and words[0] in verbs.choices else parser.prog
    try:
        with _ended_by_sigterm():
            args = parser.parse_args(words)
            args.check(args)
            return int(importlib.import_module(f"tf_labeldp.cli._{args.verb}").run(args))
    except _console.UsageError as error:
        reason = f"{error}. See {name} --help."
    except _console.CommandError as error:
        reason = str(error)
    except _console.Terminated:
        _console.say(f"\n{name}: ended by SIGTERM", error=True)
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        _console.say(f"\n{name}: stopped", error=True)
        return 130
    except Exception as error:
        reason = (
            f"unexpected {type(error).__name__}; its text is kept back, since it may quote a label "
            f"(with {_TRACEBACK}=1 in the environment it is shown)"
        )
        if os.environ.get(_TRACEBACK) == "1":
            _console.say(traceback.format_exc(), error=True)
    _console.say(f"{name}: error: {_console.one_line(reason)}", error=True)
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
        raise _console.Terminated

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like those of the verbs, and that checks nothing more."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.set_defaults(check=lambda args: None)

    def error(self, message: str) -> NoReturn:
        if re.search("required: (?!-)", message):
            # It may have been given: options that take several words take all that follow.
            message += " (before the options, as --classes and the like take all words after them)"
        if given := re.search("invalid choice: '([^']*)' \\(choose from (.*)\\)", message):
            message += _meant(given[1], re.findall(r"[\w-]+", given[2]))
        elif given := re.search(r"unrecognized arguments: (--[\w-]+)", message):
            verbs: Any = self._subparsers._group_actions[0].choices if self._subparsers else {}
            known = [word for parser in verbs.values() for word in parser._option_string_actions]
            message += _meant(given[1], known)
        raise _console.UsageError(message)


def _meant(word: str, known: Iterable[str]) -> str:
    """Returns a question after a word that is nearly one that is known."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def _epsilon(text: str) -> float:
    """Returns a privacy parameter: above zero, and not absurdly large."""
    value = _float(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(
            f"epsilon must be a finite number above zero, got {text!r}"
            + (", several go with spaces between them" if "," in text else "")
        )
    if value > _LARGEST_EPSILON:
        raise argparse.ArgumentTypeError(
            f"epsilon must be at most {_LARGEST_EPSILON:g}, got {text!r}, which protects nothing; "
            "little is protected above about 10"
        )
    return value


def _number(text: str) -> float:
    """Returns a finite number."""
    value = _float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a finite number, got {text!r}")
    return value


def _float(text: str) -> float:
    """Returns a number, or NaN for what is none."""
    with contextlib.suppress(ValueError):
        return float(text)
    return math.nan


def _at_least(minimum: int) -> Callable[[str], int]:
    """Returns the type of whole numbers from ``minimum`` on."""

    def whole(text: str) -> int:
        with contextlib.suppress(ValueError):
            if int(text) >= minimum:
                return int(text)
        raise argparse.ArgumentTypeError(
            f"must be a whole number of at least {minimum}, got {text!r}"
        )

    return whole


# fmt: off
def _add_recommend(verbs: Any) -> None:
    parser = verbs.add_parser(
        "recommend",
        help="say which method was best at this epsilon",
        description="Prints what PrivateClassifier would choose for data of this kind, why, and "
        "what was measured, before any label is read.",
    )
    add = parser.add_argument
    add("--epsilon", required=True, type=_epsilon, help="privacy parameter")
    add("--examples", required=True, type=_at_least(1), metavar="N", help="number of labels")
    add("--kind", required=True, choices=("images", "table", "numbers"),
        help="of the features: images, a table of columns, or rows of numbers of one meaning, such "
        "as embeddings")


def _add_audit(verbs: Any) -> None:
    parser = verbs.add_parser(
        "audit",
        help="hold the mechanism of noisy labels against its epsilon",
        description="Draws from the mechanism that an output of tf-labeldp randomize names, on "
        "made-up labels, and prints an epsilon that it has at least. The exit code is 1 if that is "
        "above its claim.",
    )
    add = parser.add_argument
    add("output", type=pathlib.Path, help="output of tf-labeldp randomize, with its statement")
    add("--draws", type=_at_least(1000), default=400_000, metavar="N", help="default: 400000")
    add("--seed", type=_at_least(0), metavar="N", help="repeatable draws")
    add("--plot", type=pathlib.Path, metavar="FILE", help="picture of the bound beside the claim")


def _add_report(verbs: Any) -> None:
    parser = verbs.add_parser(
        "report",
        help="report what has left a label set, at what epsilon",
        description="Reads a label store, without its labels, and writes report.html and "
        "report.json: releases, spending over time, what is left, assumptions by who must vouch "
        "for them, published files with their digests, audits and versions. The exit code is 1 if "
        "a file or an audit contradicts its claim.",
    )
    add = parser.add_argument
    add("store", type=pathlib.Path, metavar="FOLDER",
        help="folder of a store, or of several, which are then reported together")
    add("--published", type=pathlib.Path, nargs="+", default=(), metavar="FILE",
        help="noisy labels or models to list, each held against its statement and the store")
    add("--audit", action="store_true", help="audit each mechanism that drew noisy labels")
    add("--output", type=pathlib.Path, default=pathlib.Path("report"), metavar="DIR",
        help="folder for the two files (default: report)")


def _add_verify(verbs: Any) -> None:
    parser = verbs.add_parser(
        "verify",
        help="hold a published file against its statement",
        description="Checks that noisy labels or a model are as they were written, and that their "
        "receipts add up to their statement. The exit code is 1 if something is wrong.",
    )
    add = parser.add_argument
    add("file", type=pathlib.Path, metavar="FILE",
        help="output of tf-labeldp randomize or train, folder of noisy labels, or .keras file")
    add("--store", type=pathlib.Path, metavar="DIR",
        help="store of the labels, which must have its receipts")
    add("--report", type=pathlib.Path, metavar="FILE",
        help="report.json, which must list its digest")


def _add_forget(verbs: Any) -> None:
    parser = verbs.add_parser(
        "forget",
        help="erase what a store holds of its labels, and keep its account",
        description="Erases the draws, the key and the salted digest of the labels in a store. "
        "What was spent stays, for tf-labeldp report and for the other stores of a project. "
        "Nothing can be drawn of these labels any more.",
    )
    add = parser.add_argument
    add("store", type=pathlib.Path, metavar="FOLDER", help="folder of the store")
    add("--yes", action="store_true", help="needed: it can't be undone")


def _add_train(verbs: Any) -> None:
    parser = verbs.add_parser(
        "train",
        help="train a model on private labels, chosen for the data",
        description="Trains what PrivateClassifier or PrivateRegressor chooses for a table, or for "
        "images and a table of their labels, and writes a folder: model.keras, its statement "
        "privacy.json, and report.txt. All three may be published.",
        epilog="Every column but --label and --drop is a public feature. Classes and range must be "
        "chosen without looking at the labels. Each run without --store spends again.",
    )
    parser.set_defaults(check=_check_train)
    add = parser.add_argument
    add("input", type=pathlib.Path, help="table: .csv, .csv.gz or .parquet")
    add("--label", required=True, metavar="NAME", help="column of the labels")
    add("--epsilon", required=True, type=_epsilon, help="privacy parameter of the model")
    add("--delta", type=_number, help="privacy parameter (default: 1e-5, or 0.1 over the number of "
        "rows if that is less)")
    add("--num-classes", type=_at_least(2), metavar="K", help="labels are whole numbers 0..K-1")
    add("--classes", nargs="+", metavar="NAME", help="labels are names of these classes")
    add("--low", type=_number, help="labels are numbers from here on; public")
    add("--high", type=_number, help="the largest label; public")
    add("--clip", action="store_true", help="set numbers outside the range to its nearer end")
    add("--loss", choices=("squared_error", "poisson"),
        help="of numbers: poisson is for counts (default: squared_error)")
    add("--drop", action="append", metavar="NAME",
        help="column to leave out, such as ids; may be given several times")
    add("--images", type=pathlib.Path, metavar="DIR",
        help="folder of images, which are then the features")
    add("--file", metavar="NAME", help="column of the table with the names of the images")
    add("--evaluate", type=_epsilon, metavar="EPSILON",
        help="hold a tenth of the rows out, and release how good the model is on them, at this "
        "epsilon; their labels train nothing, so that the larger epsilon is that of the whole")
    add("--store", type=pathlib.Path, metavar="DIR",
        help="folder that keeps the release: a run that was stopped, started again with it, spends "
        "nothing twice. It stays with the labels")
    add("--insecure-seed", type=_at_least(0), metavar="N",
        help="repeatable noise; the statement then says 'NOT PRIVATE: seeded'")
    add("--output", type=pathlib.Path, default=pathlib.Path("trained"), metavar="DIR",
        help="new folder for the results (default: trained)")


def _add_demo(verbs: Any) -> None:
    parser = verbs.add_parser(
        "demo",
        help="train with and without label privacy and compare",
        description="Trains a small Keras model without privacy (NOT PRIVATE, for comparison), "
        "with LP-1ST (randomized response), LP-2ST (two stages, RRWithPrior), DP-SGD and what "
        "PrivateClassifier chooses at several epsilon, prints a table, and writes a plot, privacy "
        "statements, noisy labels and models to a folder. Files of an earlier demo in that folder "
        "are replaced, others are left alone.",
    )
    add = parser.add_argument
    add("--data", default="digits", metavar="NAME",
        help="digits (comes with scikit-learn; default), adult, mnist, fashion_mnist, or the name "
        "of a TFDS data set in --data-dir")
    add("--data-dir", type=pathlib.Path, default=os.environ.get("LABELDP_DATA_DIR") or None,
        metavar="DIR",
        help="folder of the data sets, such as DIR/mnist/train-images-idx3-ubyte.gz or "
        "DIR/adult/adult.data.gz (default: the environment variable LABELDP_DATA_DIR); nothing is "
        "downloaded")
    add("--epsilons", type=_epsilon, nargs="+", default=[1.0, 2.0, 4.0], metavar="EPSILON",
        help="privacy parameters (default: 1 2 4)")
    add("--epochs", type=_at_least(1), metavar="N",
        help="epochs a stage; LP-2ST has two stages (default: 15 for digits, 3 for others)")
    add("--insecure-seed", type=_at_least(0), metavar="N",
        help="repeatable random numbers; the statements then say 'NOT PRIVATE: seeded' (default: "
        "the operating system's secure generator)")
    add("--output", type=pathlib.Path, default=pathlib.Path("demo-output"), metavar="DIR",
        help="folder for the results (default: demo-output)")


def _add_randomize(verbs: Any) -> None:
    parser = verbs.add_parser(
        "randomize",
        help="draw noisy labels for CSV or Parquet tables",
        description="Draws one noisy label for each label of a CSV or Parquet table, and writes "
        "them with the row ids and without the labels. Whoever gets the output learns little "
        "about any one label: it comes with a privacy statement, OUTPUT.privacy.json, which also "
        "has the mechanism and the prior; tf_labeldp.NoisyLabels.load(OUTPUT) reads both. Both "
        "files may be published; the statement says when and by whom the labels were drawn "
        "(LABELDP_ACTOR, or the name of the login). The input, the store and what this command "
        "says when it fails are for the label holder alone. Several files are one table, with one "
        "prior and one statement: all of them are read and checked before anything is drawn, and "
        "the folder of the output, with a file for each and privacy.json, appears as a whole.",
        epilog="The rows keep their order, and the id columns are copied as they are: neither may "
        "depend on the labels. Range, classes and settings must be chosen without looking at the "
        "labels. Each run without --store draws, and spends, again; publishing the outputs of "
        "several costs the sum of their epsilons. What an error looks like: see tf-labeldp --help.",
    )
    parser.set_defaults(check=_check_randomize)
    add = parser.add_argument
    add("input", type=pathlib.Path, nargs="+",
        help="table with the labels: .csv, .csv.gz or .parquet; several files, a folder of them or "
        "a pattern such as 'labels/*.csv', whose rows are in the order of the files' names; or - "
        "for CSV from stdin. Goes first, since --classes takes all words after it")
    add("--column", required=True, metavar="NAME", help="column of the labels")
    add("--task", required=True, choices=("regression", "classification"))
    add("--epsilon", required=True, type=_epsilon, help="privacy parameter of the output")
    add("--output", required=True, type=pathlib.Path,
        help="new table: .csv, .csv.gz or .parquet; for several inputs also a new folder, with a "
        "table for each file; or - for CSV to stdout")
    add("--statement", type=pathlib.Path, metavar="FILE",
        help="where the statement goes with --output -; rows.csv.privacy.json if the rows will be "
        "in rows.csv")
    add("--jobs", type=_at_least(1), metavar="N",
        help="threads that read and write (default: one for each processor)")
    add("--prior", type=pathlib.Path, metavar="FILE",
        help="public prior, made without these labels: JSON with values (regression) and "
        "probabilities, or CSV with two columns. Regression then spends nothing on a histogram, "
        "classification then uses RRWithPrior")
    add("--id", action="append", metavar="NAME",
        help="column to copy, may be given several times (default: the column named id, row_id or "
        "row, else row numbers from 0 in a column row). No other column is copied")
    add("--output-column", metavar="NAME", help="name of the noisy labels (default: --column)")
    add("--store", type=pathlib.Path, metavar="DIR",
        help="folder that keeps the draws: a run that was stopped, started again with it, goes on "
        "with the same draws and spends nothing twice. It stays with the labels, so it must not be "
        "in the folder of the output, nor the other way round")
    add("--draws", choices=("stored", "keyed"), default="stored",
        help="keyed: by a secret key, labels.key in the --store, and the id of the row, so that "
        "Beam or Spark can make the same draws; stored: by the operating system's generator "
        "(default)")
    add("--insecure-seed", type=_at_least(0), metavar="N",
        help="repeatable draws; the statement then says 'NOT PRIVATE: seeded' (default: the "
        "operating system's secure generator)")
    add("--overwrite", action="store_true", help="replace an existing output")
    add("--quiet", action="store_true", help="say nothing but errors: no progress, no remarks")

    add = parser.add_argument_group("regression").add_argument
    add("--low", type=_number, help="smallest label, public; needed")
    add("--high", type=_number, help="largest label, public; needed")
    add("--clip", action="store_true", default=None,
        help="set labels outside the range to its nearer end instead of refusing them")
    add("--mechanism", choices=(_RR_ON_BINS, *_BASELINES),
        help=f"default: {_RR_ON_BINS}, randomized response on the bins with the least expected "
        "loss; the others are for comparison")
    add("--loss", choices=_LOSSES, help=f"which the bins are best for (default: {_LOSSES[0]})")
    add("--prior-epsilon", type=_epsilon, metavar="EPSILON",
        help="part of --epsilon for the private histogram (default: chosen by the number of "
        "labels)")
    add("--max-values", type=_at_least(2), metavar="N",
        help="most values that labels are rounded to for the histogram (default: 64)")
    add("--whole-numbers", action="store_true", default=None,
        help="the labels are counts or other whole numbers, so nothing between them needs to be "
        "told apart")

    add = parser.add_argument_group("classification").add_argument
    add("--num-classes", type=_at_least(2), metavar="K",
        help="labels are whole numbers 0..K-1; this or --classes is needed")
    add("--classes", nargs="+", metavar="NAME",
        help="names of all classes; they are public")
# fmt: on


def _check_train(args: argparse.Namespace) -> None:
    """Raises for options that are missing, or do not go together."""
    numbers = args.low is not None or args.high is not None
    if (args.num_classes is not None) + (args.classes is not None) + numbers != 1:
        raise _console.CommandError(
            "say what the labels are, by one of --num-classes K, --classes NAME ..., and --low "
            "with --high; it is public, and not taken from the labels"
        )
    if numbers and (args.low is None or args.high is None or args.low >= args.high):
        raise _console.CommandError("numbers need both --low and --high, the first below the other")
    if args.clip and not numbers:
        raise _console.CommandError("--clip is for labels that are numbers; leave it out")
    if args.loss is not None and not numbers:
        raise _console.CommandError("--loss is for labels that are numbers; leave it out")
    if args.loss == "poisson" and args.low < 0.0:
        raise _console.CommandError(
            f"--loss poisson needs labels of zero or more, got --low {args.low:g}"
        )
    if (args.images is None) != (args.file is None):
        raise _console.CommandError("--images DIR and --file NAME go together: give both or none")
    if args.delta is not None and not 0.0 < args.delta < 1.0:
        raise _console.CommandError(f"--delta must lie between 0 and 1, got {args.delta:g}")


def _check_randomize(args: argparse.Namespace) -> None:
    """Raises for options that are missing, or do not go together."""
    if args.draws == "keyed":
        _refuse(args, ("insecure_seed",), "is for --draws stored")
        if args.store is None:
            raise _console.CommandError("--draws keyed needs --store DIR, where its key is kept")
        if args.mechanism not in (None, _RR_ON_BINS):
            raise _console.CommandError(
                f"--draws keyed takes --mechanism {_RR_ON_BINS}, got {args.mechanism}"
            )
        if len(args.id or ()) > 1:
            raise _console.CommandError(
                f"--draws keyed takes one --id, got {len(args.id)}; name the column that tells "
                "the rows apart"
            )
    (_check_regression if args.task == "regression" else _check_classification)(args)


def _check_regression(args: argparse.Namespace) -> None:
    _refuse(args, _CLASSIFICATION_ONLY, "is for --task classification")
    for name in ("low", "high"):
        if getattr(args, name) is None:
            raise _console.CommandError(
                f"--task regression needs --{name}, an end of the public range of the labels; it "
                "is not taken from the labels, since that would show whose is at the end"
            )
    if args.low >= args.high:
        raise _console.CommandError(
            f"--low must be below --high, got --low {args.low:g} --high {args.high:g}; they are "
            "the smallest and the largest label"
        )
    if args.mechanism not in (None, _RR_ON_BINS):
        _refuse(args, _BINS_ONLY, f"is for --mechanism {_RR_ON_BINS}")
    if args.loss == "poisson" and args.low < 0.0:
        raise _console.CommandError(
            f"--loss poisson needs labels of zero or more, got --low {args.low:g}; take another "
            "loss or range"
        )
    if args.prior is not None:
        _refuse(args, _GRID_ONLY, "is for runs without --prior")
    if args.prior_epsilon is not None and args.prior_epsilon >= args.epsilon:
        raise _console.CommandError(
            f"--prior-epsilon must be below --epsilon, of which it is a part, got "
            f"{args.prior_epsilon:g} of {args.epsilon:g}; half of it is a fair start"
        )


def _check_classification(args: argparse.Namespace) -> None:
    _refuse(args, _REGRESSION_ONLY, "is for --task regression")
    if (args.classes is None) == (args.num_classes is None):
        raise _console.CommandError(
            "--task classification needs either --num-classes K, for labels 0..K-1, or --classes, "
            f"the names of all classes; got {'neither' if args.classes is None else 'both'}"
        )
    if args.num_classes is not None and args.num_classes > _MOST_CLASSES:
        raise _console.CommandError(
            f"--num-classes must be at most {_MOST_CLASSES:,}, got {args.num_classes:,}; are these "
            "labels numbers, for --task regression?"
        )
    names = args.classes or ()
    different = len(set(names))
    if names and (different < 2 or different < len(names)):
        raise _console.CommandError(
            f"--classes must name at least two classes, each once, got {len(names)} names of "
            f"which {different} differ"
        )


def _refuse(args: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    for name in names:
        if getattr(args, name) is not None:
            raise _console.CommandError(f"--{name.replace('_', '-')} {reason}; leave it out")
