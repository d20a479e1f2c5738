"""The command line, ``tf-labeldp VERB``: its verbs, their options, and how a command ends.

Nothing heavy is loaded here: the module of a verb is loaded once its options are checked.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import os
import pathlib
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
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
"""Draws of more than 2^53 classes would not end."""

_LOSSES = ("squared_error", "absolute_error", "poisson")
_RR_ON_BINS = "rr_on_bins"
_BASELINES = ("laplace", "discrete_laplace", "staircase", "discrete_staircase", "exponential")
_GRID_ONLY = ("prior_epsilon", "max_values", "whole_numbers")
_REGRESSION_ONLY = ("low", "high", "clip", "mechanism", "loss", *_GRID_ONLY)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb of the command line.

    With ``TF_LABELDP_TRACEBACK=1`` in the environment an unexpected error is shown in full. It may
    quote a label.

    Args:
        argv: the arguments after the program's name; None takes those of the process.

    Returns:
        The exit code: 0 for success, 1 where an audit or a check found a problem, 2 for bad input
        or any other error (with its reason in one line on stderr), 130 if the user stopped it, 143
        if the system did.

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
    with contextlib.suppress(ImportError):  # the extra `completion`
        import shtab

        shtab.add_argument_to(parser, help="print the completion of a shell")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for add_verb in (
        _add_demo,
        _add_randomize,
        _add_recommend,
        _add_train,
        _add_audit,
        _add_report,
        _add_verify,
        _add_forget,
    ):
        add_verb(verbs)
    words = _joined(sys.argv[1:] if argv is None else argv)
    # The verb is known before the arguments are parsed: all errors begin with the same name.
    name = f"{parser.prog} {words[0]}" if words and words[0] in verbs.choices else parser.prog
    try:
        with _ended_by_sigterm():
            args = parser.parse_args(words)
            if args.check:
                args.check(args)
            module, _, function = args.run.partition(".")
            module = importlib.import_module(f"tf_labeldp.cli.{module}")
            return int(getattr(module, function)(args))
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
    """A parser whose errors are one line, like those of the verbs."""

    def __init__(self, **settings: Any) -> None:
        if sys.version_info >= (3, 14):
            settings["suggest_on_error"] = True
        super().__init__(**settings)

    def error(self, message: str) -> NoReturn:
        if re.search("required: (?!-)", message):
            # An option that takes several words may have taken it.
            message += " (before the options, as --classes and the like take all words after them)"
        raise _console.UsageError(message)


def _epsilon(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.0 < float(text) <= _LARGEST_EPSILON:
            return float(text)
        if _LARGEST_EPSILON < float(text) < math.inf:
            raise argparse.ArgumentTypeError(
                f"epsilon must be at most {_LARGEST_EPSILON:g}, got {text!r}, which protects "
                "nothing; little is protected above about 10"
            )
    several = ", several go with spaces between them" if "," in text else ""
    raise argparse.ArgumentTypeError(
        f"epsilon must be a finite number above zero, got {text!r}{several}"
    )


def _number(text: str) -> float:
    with contextlib.suppress(ValueError):
        if math.isfinite(float(text)):
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a finite number, got {text!r}")


def _at_least(minimum: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        with contextlib.suppress(ValueError):
            if int(text) >= minimum:
                return int(text)
        raise argparse.ArgumentTypeError(
            f"must be a whole number of at least {minimum}, got {text!r}"
        )

    return whole


def _path(text: str) -> pathlib.Path:
    return pathlib.Path(text).expanduser()


# fmt: off
def _verb(verbs: Any, name: str, run: str, check: Any = None, **texts: str) -> Any:
    """Adds a verb, whose function ``run`` has a module of its own; returns what adds options."""
    parser = verbs.add_parser(name, **texts)
    parser.set_defaults(run=run, check=check)
    return parser.add_argument


def _add_recommend(verbs: Any) -> None:
    add = _verb(
        verbs, "recommend", "_verbs.run_recommend",
        help="print the method that was best at this epsilon",
        description="Prints the choice of PrivateClassifier for data of this kind, its reason and "
        "the measurements behind it, before any label is read.",
    )
    add("--epsilon", required=True, type=_epsilon, help="privacy parameter")
    add("--examples", required=True, type=_at_least(1), metavar="N", help="number of labels")
    add("--kind", required=True, choices=("images", "table", "numbers"),
        help="of the features: images, a table of columns, or rows of numbers of one meaning, such "
        "as embeddings")


def _add_audit(verbs: Any) -> None:
    add = _verb(
        verbs, "audit", "_verbs.audit",
        help="bound the epsilon of the mechanism of noisy labels from below",
        description="Draws from the mechanism that an output of tf-labeldp randomize names, on "
        "made-up labels, and prints a lower bound on its epsilon. The exit code is 1 if that is "
        "above its claim.",
    )
    add("output", type=_path, help="output of tf-labeldp randomize, with its statement")
    add("--draws", type=_at_least(1000), default=400_000, metavar="N", help="default: 400000")
    add("--seed", type=_at_least(0), metavar="N", help="repeatable draws")
    add("--plot", type=_path, metavar="FILE", help="picture of the bound and the claim")


def _add_report(verbs: Any) -> None:
    add = _verb(
        verbs, "report", "_verbs.run_report",
        help="report all releases of a label set and their epsilon",
        description="Reads a label store, without its labels, and writes report.html and "
        "report.json: releases, spending over time, the rest of the budget, assumptions by who "
        "must vouch for them, published files with their digests, audits and versions. The exit "
        "code is 1 if a file or an audit contradicts its claim.",
    )
    add("store", type=_path, metavar="FOLDER",
        help="folder of a store, or of several, which are then reported together")
    add("--published", type=_path, nargs="+", default=(), metavar="FILE",
        help="noisy labels or models to list, each compared with its statement and the store")
    add("--audit", action="store_true", help="audit each mechanism that drew noisy labels")
    add("--output", type=_path, default=pathlib.Path("report"), metavar="DIR",
        help="folder for the two files (default: report)")


def _add_verify(verbs: Any) -> None:
    add = _verb(
        verbs, "verify", "_verbs.run_verify",
        help="compare a published file with its statement",
        description="Checks that noisy labels or a model are as they were written, and that their "
        "receipts add up to their statement. The exit code is 1 if something is wrong.",
    )
    add("file", type=_path, metavar="FILE",
        help="output of tf-labeldp randomize or train, folder of noisy labels, or .keras file")
    add("--store", type=_path, metavar="DIR",
        help="store of the labels, which must have its receipts")
    add("--report", type=_path, metavar="FILE",
        help="report.json, which must list its digest")


def _add_forget(verbs: Any) -> None:
    add = _verb(
        verbs, "forget", "_verbs.run_forget",
        help="erase the labels' traces in a store, and keep its account",
        description="Erases the draws, the key and the salted digest of the labels in a store. "
        "The account stays, for tf-labeldp report and for the other stores of a project. "
        "Nothing can be drawn of these labels any more.",
    )
    add("store", type=_path, metavar="FOLDER", help="folder of the store")
    add("--yes", action="store_true", help="needed: it can't be undone")


def _add_train(verbs: Any) -> None:
    add = _verb(
        verbs, "train", "_train.run_train", check=_check_train,
        help="train a model on private labels, chosen for the data",
        description="Trains the choice of PrivateClassifier or PrivateRegressor for a table, or "
        "for images and a table of their labels, and writes a folder: model.keras, its statement "
        "privacy.json, and report.txt. All three may be published.",
        epilog="Every column but --label and --drop is a public feature. Classes and range must be "
        "chosen without looking at the labels. Each run without --store spends again.",
    )
    add("input", type=_path, help="table: .csv, .csv.gz or .parquet")
    add("--label", required=True, metavar="NAME", help="column of the labels")
    add("--delta", type=_number, help="privacy parameter (default: 1e-5, or 0.1 over the number of "
        "rows if that is less)")
    _add_labels(add)
    add("--loss", choices=("squared_error", "poisson"),
        help="of numbers: poisson is for counts (default: squared_error)")
    add("--drop", action="append", default=[], metavar="NAME",
        help="column to leave out, such as ids; may be given several times")
    add("--images", type=_path, metavar="DIR",
        help="folder of images, which are then the features")
    add("--file", metavar="NAME", help="column of the table with the names of the images")
    add("--evaluate", type=_epsilon, metavar="EPSILON",
        help="hold a tenth of the rows out, and release how good the model is on them, at this "
        "epsilon; their labels train nothing, so that the larger epsilon is that of the whole")
    add("--output", type=_path, default=pathlib.Path("trained"), metavar="DIR",
        help="new folder for the results (default: trained)")


def _add_demo(verbs: Any) -> None:
    add = _verb(
        verbs, "demo", "_demo.run_demo",
        help="train with and without label privacy and compare",
        description="Trains a small Keras model without privacy (NOT PRIVATE, for comparison), "
        "with LP-1ST (randomized response), LP-2ST (two stages, RRWithPrior), DP-SGD and the "
        "choice of PrivateClassifier at several epsilon, prints a table, and writes a plot, "
        "privacy statements, noisy labels and models to a folder. Files of an earlier demo in that "
        "folder are replaced; other files are left untouched.",
    )
    add("--data", default="digits", metavar="NAME",
        help="digits (comes with scikit-learn; default), or the name of a file DIR/NAME.npz, which "
        "examples/demo_datasets.py writes for adult, mnist, fashion_mnist and TFDS")
    add("--data-dir", type=_path, default=os.environ.get("LABELDP_DATA_DIR") or None,
        metavar="DIR",
        help="folder of the file (default: the environment variable LABELDP_DATA_DIR)")
    add("--epsilons", type=_epsilon, nargs="+", default=[1.0, 2.0, 4.0], metavar="EPSILON",
        help="privacy parameters (default: 1 2 4)")
    add("--epochs", type=_at_least(1), metavar="N",
        help="epochs per stage; LP-2ST has two stages (default: 15 for digits, 3 for others)")
    add("--insecure-seed", type=_at_least(0), metavar="N",
        help="repeatable random numbers; the statements are then 'NOT PRIVATE: seeded' (default: "
        "the operating system's secure generator)")
    add("--output", type=_path, default=pathlib.Path("demo-output"), metavar="DIR",
        help="folder for the results (default: demo-output)")


def _add_randomize(verbs: Any) -> None:
    add = _verb(
        verbs, "randomize", "_randomize.run_randomize", check=_check_randomize,
        help="draw noisy labels for CSV or Parquet tables",
        description="Draws one noisy label for each label of CSV or Parquet tables, and writes "
        "them with the row ids, without the labels, next to a privacy statement, "
        "OUTPUT.privacy.json; tf_labeldp.NoisyLabels.load(OUTPUT) reads both. Both files may be "
        "published; the statement names the time of the draw and its actor (LABELDP_ACTOR, or the "
        "name of the login). The input, the store and the errors of this command are for the label "
        "holder alone. Several files are one table, with one prior and one statement: all are "
        "checked before anything is drawn, and the folder of the output appears as a whole.",
        epilog="The rows keep their order, and the id columns are copied: neither may depend on "
        "the labels. Range, classes and settings must be chosen without looking at the labels. "
        "Each run without --store draws, and spends, again; publishing the outputs of several "
        "costs the sum of their epsilons. The form of errors: see tf-labeldp --help.",
    )
    add("input", type=_path, nargs="+",
        help="table with the labels: .csv, .csv.gz or .parquet; several files, a folder of them or "
        "a pattern such as 'labels/*.csv', whose rows are in the order of the files' names; or - "
        "for CSV from stdin. Goes first, since --classes takes all words after it")
    add("--column", required=True, metavar="NAME", help="column of the labels")
    add("--task", required=True, choices=("regression", "classification"))
    add("--output", required=True, type=_path,
        help="new table: .csv, .csv.gz or .parquet; for several inputs also a new folder, with a "
        "table for each file; or - for CSV to stdout")
    add("--statement", type=_path, metavar="FILE",
        help="where the statement goes with --output -; rows.csv.privacy.json if the rows will be "
        "in rows.csv")
    add("--jobs", type=_at_least(1), metavar="N",
        help="threads that read and write (default: one for each processor)")
    add("--prior", type=_path, metavar="FILE",
        help="public prior, made without these labels: JSON with values (regression) and "
        "probabilities, or CSV with two columns. Regression then spends nothing on a histogram, "
        "classification then uses RRWithPrior")
    add("--id", action="append", metavar="NAME",
        help="column to copy, may be given several times (default: the column named id, row_id or "
        "row, else row numbers from 0 in a column row). No other column is copied")
    add("--output-column", metavar="NAME", help="name of the noisy labels (default: --column)")
    add("--draws", choices=("stored", "keyed"), default="stored",
        help="keyed: by a secret key, labels.key in the --store, and the id of the row, so that "
        "Beam or Spark can make the same draws; stored: by the operating system's generator "
        "(default)")
    add("--overwrite", action="store_true", help="replace an existing output")
    add("--quiet", action="store_true", help="print errors alone: no progress, no remarks")
    _add_labels(add)
    add("--mechanism", choices=(_RR_ON_BINS, *_BASELINES),
        help=f"of numbers; default: {_RR_ON_BINS}, randomized response on the bins with the least "
        "expected loss; the others are for comparison")
    add("--loss", choices=_LOSSES,
        help=f"of numbers, for which the bins are best (default: {_LOSSES[0]})")
    add("--prior-epsilon", type=_epsilon, metavar="EPSILON",
        help="part of --epsilon for the private histogram of numbers (default: chosen by the "
        "number of labels)")
    add("--max-values", type=_at_least(2), metavar="N",
        help="most values that numbers are rounded to for the histogram (default: 64)")
    add("--whole-numbers", action="store_true", default=None,
        help="the numbers are counts or other whole numbers, so no bin ends between them")


def _add_labels(add: Any) -> None:
    add("--num-classes", type=_at_least(2), metavar="K", help="labels are whole numbers 0..K-1")
    add("--classes", nargs="+", metavar="NAME",
        help="labels are names: those of all classes, which are public")
    add("--low", type=_number, help="labels are numbers: the smallest one, which is public")
    add("--high", type=_number, help="the largest number, which is public")
    add("--clip", action="store_true", default=None,
        help="set numbers outside the range to its nearer end instead of refusing them")
    add("--epsilon", required=True, type=_epsilon, help="privacy parameter of the output")
    add("--store", type=_path, metavar="DIR",
        help="folder that keeps the draws: a run that was stopped, started again with it, goes on "
        "with the same draws and spends nothing twice. It stays with the labels, so it must not be "
        "in the folder of the output, nor the other way round")
    add("--insecure-seed", type=_at_least(0), metavar="N",
        help="repeatable draws; the statement is then 'NOT PRIVATE: seeded' (default: the "
        "operating system's secure generator)")
# fmt: on


def _check_train(args: argparse.Namespace) -> None:
    numbers = args.low is not None or args.high is not None
    if (args.num_classes is not None) + (args.classes is not None) + numbers != 1:
        raise _console.CommandError(
            "say what the labels are, by one of --num-classes K, --classes NAME ..., and --low "
            "with --high; it is public, and not taken from the labels"
        )
    if numbers and (args.low is None or args.high is None or args.low >= args.high):
        raise _console.CommandError("numbers need both --low and --high, the first below the other")
    for name in ("clip", "loss"):
        if getattr(args, name) and not numbers:
            raise _console.CommandError(f"--{name} is for labels that are numbers; leave it out")
    _check_poisson(args)
    if (args.images is None) != (args.file is None):
        raise _console.CommandError("--images DIR and --file NAME go together: give both or none")
    if args.delta is not None and not 0.0 < args.delta < 1.0:
        raise _console.CommandError(f"--delta must lie between 0 and 1, got {args.delta:g}")


def _check_randomize(args: argparse.Namespace) -> None:
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
                f"--draws keyed takes one --id, got {len(args.id)}; name the column that "
                "identifies the rows"
            )
    (_check_regression if args.task == "regression" else _check_classification)(args)


def _check_regression(args: argparse.Namespace) -> None:
    _refuse(args, ("num_classes", "classes"), "is for --task classification")
    for name in ("low", "high"):
        if getattr(args, name) is None:
            raise _console.CommandError(
                f"--task regression needs --{name}, an end of the public range of the labels; it "
                "is not taken from the labels, since that would reveal the one at the end"
            )
    if args.low >= args.high:
        raise _console.CommandError(
            f"--low must be below --high, got --low {args.low:g} --high {args.high:g}; they are "
            "the smallest and the largest label"
        )
    if args.mechanism not in (None, _RR_ON_BINS):
        _refuse(args, ("loss", *_GRID_ONLY, "prior"), f"is for --mechanism {_RR_ON_BINS}")
    _check_poisson(args)
    if args.prior is not None:
        _refuse(args, _GRID_ONLY, "is for runs without --prior")


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
    if args.classes and (len(set(args.classes)) < max(2, len(args.classes))):
        raise _console.CommandError(
            "--classes must name at least two classes, each once, got "
            f"{len(args.classes)} names of which {len(set(args.classes))} differ"
        )


def _check_poisson(args: argparse.Namespace) -> None:
    if args.loss == "poisson" and args.low < 0.0:
        raise _console.CommandError(
            f"--loss poisson needs labels of zero or more, got --low {args.low:g}; take another "
            "loss or range"
        )


def _refuse(args: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    for name in names:
        if getattr(args, name) is not None:
            raise _console.CommandError(f"--{name.replace('_', '-')} {reason}; leave it out")
