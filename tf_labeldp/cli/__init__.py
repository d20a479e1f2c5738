"""The command line, ``tf-labeldp VERB``: its verbs, their options and exit codes.

A verb's module is loaded once its options are checked, so that ``--help`` loads nothing heavy.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import pathlib
import pkgutil
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from tf_labeldp._version import __version__
from tf_labeldp.cli import _console
from tf_labeldp.cli._console import load_tensorflow

__all__ = ["load_tensorflow", "main"]

_TRACEBACK = "TF_LABELDP_TRACEBACK"
_EPILOG = f"""\
An error is one line, the last one on stderr, and exit code 2; other lines on stderr are progress
and remarks. Of an unexpected error only the kind is shown, since its text may quote a label; with
{_TRACEBACK}=1 in the environment all of it is shown, for the label holder's eyes alone.
"""
_DEMO = "the demo is examples/demo.py of the source now; run make demo in a checkout"
"""The error of a verb of 0.3."""
_LARGEST_EPSILON = 1000.0
"""e to this power overflows a double; such an epsilon protects nothing."""
_MOST_CLASSES = 10**9
"""Draws among more than 2^53 classes would not end."""

_LOSSES = ("squared_error", "absolute_error", "poisson")
_RR_ON_BINS = "rr_on_bins"
BASELINES = {
    "laplace": "LaplaceMechanism",
    "discrete_laplace": "DiscreteLaplaceMechanism",
    "staircase": "StaircaseMechanism",
    "discrete_staircase": "DiscreteStaircaseMechanism",
    "exponential": "ExponentialMechanism",
}
"""The classes of the mechanisms for comparison."""
_HISTOGRAM = ("prior_epsilon", "max_values", "whole_numbers")
# Options, the condition for each group, and the purpose that an error names.
_RULES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (
        ("high", "clip", "mechanism", "loss", *_HISTOGRAM),
        lambda args: args.low is not None,
        "labels that are numbers",
    ),
    (
        ("loss", "prior", *_HISTOGRAM),
        lambda args: args.mechanism in (None, _RR_ON_BINS),
        f"--mechanism {_RR_ON_BINS}",
    ),
    (_HISTOGRAM, lambda args: args.prior is None, "runs without --prior"),
    (("insecure_seed",), lambda args: args.draws == "stored", "--draws stored"),
    (
        ("mechanism",),
        lambda args: args.draws == "stored" or args.mechanism == _RR_ON_BINS,
        "--draws stored",
    ),
)


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
        >>> main(["recommend", "--epsilon", "0"])
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
        _add_randomize,
        _add_recommend,
        _add_train,
        _add_predict,
        _add_audit,
        _add_report,
        _add_verify,
        _add_forget,
        _add_give_back,
        _add_confirm_move,
    ):
        add_verb(verbs)
    words = sys.argv[1:] if argv is None else argv
    # All errors of a verb begin with its name, those of the parser too.
    name = f"{parser.prog} {words[0]}" if words and words[0] in verbs.choices else parser.prog
    if argv is None and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)
    try:
        if list(words[:1]) == ["demo"]:
            raise _console.CommandError(_DEMO)
        args = parser.parse_args(words)
        _console.options = verbs.choices[args.verb].options()
        if args.check:
            args.check(args)
        run = pkgutil.resolve_name(f"tf_labeldp.cli.{args.run}")
        with _console.warnings_in_lines():
            return int(run(args))
    except _console.CommandError as error:
        reason = str(error)
    except _console.Terminated:
        _console.say("", f"{name}: ended by SIGTERM", error=True)
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        _console.say("", f"{name}: stopped", error=True)
        return 130
    except Exception as error:
        reason = (
            f"unexpected {type(error).__name__}; its text is withheld, since it may quote a label "
            f"(set {_TRACEBACK}=1 in the environment to see it)"
        )
        if os.environ.get(_TRACEBACK) == "1":
            _console.say(*traceback.format_exc().splitlines(), error=True)
    _console.say(f"{name}: error: {reason}", error=True)
    return 2


def _terminate(*unused: object) -> NoReturn:
    # A second signal would stop the removal of hidden files.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _console.Terminated


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like those of the verbs."""

    def options(self) -> dict[str, str]:
        """Returns the options by their own names, and by the library's arguments that they set."""
        found: dict[str, str] = {}
        # Groups add their options here too, which an own `add_argument` would miss.
        for action in self._actions:
            for option in action.option_strings:
                own_name = option.lstrip("-").replace("-", "_")
                found |= {own_name: option, action.dest: option}
        return found

    def error(self, message: str) -> NoReturn:
        raise _console.CommandError(f"{message}. See {self.prog} --help.")


def _epsilon(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.0 < float(text) <= _LARGEST_EPSILON:
            return float(text)
    raise argparse.ArgumentTypeError(
        f"epsilon must be above zero and at most {_LARGEST_EPSILON:g}, got {text!r}"
    )


def _number(text: str) -> float:
    with contextlib.suppress(ValueError):
        if math.isfinite(float(text)):
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a finite number, got {text!r}")


def _whole(minimum: int, maximum: float = math.inf) -> Callable[[str], int]:
    words = f"at least {minimum}" + (f" and at most {maximum:,}" if maximum < math.inf else "")

    def whole(text: str) -> int:
        with contextlib.suppress(ValueError):
            if minimum <= int(text) <= maximum:
                return int(text)
        raise argparse.ArgumentTypeError(f"must be a whole number, {words}, got {text!r}")

    return whole


def _path(text: str) -> pathlib.Path:
    return pathlib.Path(text).expanduser()


def _check_labels(args: argparse.Namespace) -> None:
    """Checks the options of the labels, before any file is read."""
    values = vars(args)
    for names, allowed, purpose in _RULES:
        for name in names:
            if values[name] is not None and not allowed(args):
                option = name.replace("_", "-")
                raise _console.CommandError(f"--{option} is for {purpose}; leave it out")
    if args.classes and len(set(args.classes)) < max(2, len(args.classes)):
        raise _console.CommandError(
            "--classes must name at least two classes, each once, got "
            f"{len(set(args.classes))} distinct of {len(args.classes)}"
        )
    if args.low is None:
        return
    if args.high is None or args.low >= args.high:
        raise _console.CommandError(
            "expected --low LOW and --high HIGH, with LOW below HIGH; give the smallest and the "
            "largest possible label, not those of the table, which would reveal labels"
        )
    if args.loss == "poisson" and args.low < 0.0:
        raise _console.CommandError(
            f"--loss poisson needs labels of zero or more, got --low {args.low:g}; use another "
            "loss or range"
        )


def _check_train(args: argparse.Namespace) -> None:
    _check_labels(args)
    _check_images(args)
    if args.evaluation_metric is not None and args.budget_for_evaluation is None:
        metric = args.evaluation_metric
        raise _console.CommandError(
            f"--metric {metric} needs --evaluate EPSILON, which pays for it; give both"
        )
    # Before there is a store, whose budget would have this delta.
    if args.delta is not None:
        from tf_labeldp import _validate

        with _console.explained(ValueError):
            _validate.number_in("delta", args.delta, "(0, 1)")


def _check_recommend(args: argparse.Namespace) -> None:
    if args.score is not None and args.kind != "table":
        raise _console.CommandError(
            f"--score is for --kind table, whose curves it reads, got --kind {args.kind}; leave it "
            "out"
        )


def _check_images(args: argparse.Namespace) -> None:
    if (args.images is None) != (args.file is None):
        raise _console.CommandError("--images DIR and --file NAME go together: give both or none")


def _check_randomize(args: argparse.Namespace) -> None:
    if (args.task == "regression") != (args.low is not None):
        raise _console.CommandError(
            "--task regression goes with --low and --high, --task classification with "
            "--num-classes or --classes"
        )
    _check_labels(args)
    if args.draws == "keyed":
        if args.store is None:
            raise _console.CommandError("--draws keyed needs --store DIR, where its key is kept")
        if len(args.id or ()) > 1:
            raise _console.CommandError(
                f"--draws keyed takes one --id, got {len(args.id)}; name the column that "
                "identifies the rows"
            )


# fmt: off
def _verb(verbs: Any, name: str, run: str, check: Any = None, **texts: str) -> Any:
    """Adds a verb with its function ``run``, ``MODULE.NAME``, and returns its parser."""
    parser = verbs.add_parser(name, **texts)
    of_labels = itertools.chain.from_iterable(names for names, _, _ in _RULES)
    parser.set_defaults(run=run, check=check, **dict.fromkeys(of_labels))
    return parser


def _add_recommend(verbs: Any) -> None:
    add = _verb(
        verbs, "recommend", "_verbs.run_recommend", check=_check_recommend,
        help="print the method that was best at this epsilon",
        description="Prints the choice of PrivateClassifier for data of this kind, its reason and "
        "the measurements behind it, before any label is read.",
    ).add_argument
    add("--epsilon", required=True, type=_epsilon, help="privacy parameter")
    add("--examples", required=True, type=_whole(1), metavar="N", help="number of labels")
    add("--kind", required=True, choices=("images", "table", "numbers"),
        help="kind of features: images, a table of columns, or rows of numbers with one meaning, "
        "such as embeddings")
    add("--num-classes", type=_whole(2), default=2, metavar="K",
        help="number of classes (default: 2)")
    add("--numbers", action="store_true", help="labels are numbers, not classes")
    add("--score", type=_number, metavar="PERCENT",
        help="for tables: also print the epsilon that this score needs, by the printed curves")


def _add_audit(verbs: Any) -> None:
    add = _verb(
        verbs, "audit", "_verbs.audit",
        help="bound the epsilon of the mechanism of noisy labels from below",
        description="Draws from the mechanism in the statement of a randomized table, on synthetic "
        "labels, and prints a lower bound on its epsilon. The exit code is 1 if the bound is above "
        "the claim.",
    ).add_argument
    add("output", type=_path, help="output of tf-labeldp randomize, with its statement")
    add("--draws", type=_whole(1000), default=400_000, metavar="N",
        help="number of draws (default: 400000)")
    add("--seed", type=_whole(0), metavar="N", help="repeatable draws")


def _add_report(verbs: Any) -> None:
    add = _verb(
        verbs, "report", "_verbs.run_report",
        help="report all releases of a label set and their epsilon",
        description="Reads a label store, without its labels, and writes report.html and "
        "report.json: releases, spending over time, the rest of the budget, assumptions by who "
        "must vouch for them, published files with their digests, audits and versions. The exit "
        "code is 1 if a file or an audit contradicts its claim, and 3 if a part of a file could "
        "not be checked.",
    ).add_argument
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
        description="Checks that noisy labels or a model are unchanged, and that their receipts "
        "add up to their statement. The exit code is 1 if a check fails, and 3 if a part of the "
        "file, which is named, could not be checked.",
    ).add_argument
    add("file", type=_path, metavar="FILE",
        help="output of tf-labeldp randomize or train, folder of noisy labels, or .keras file")
    add("--store", type=_path, metavar="DIR",
        help="store of the labels, which must have its receipts")
    add("--report", type=_path, metavar="FILE",
        help="report.json, which must list its digest")


def _add_forget(verbs: Any) -> None:
    add = _verb(
        verbs, "forget", "_verbs.run_forget",
        help="erase all traces of the labels in a store, except for its ledger",
        description="Erases the draws, the key and the salted digest of the labels in a store. "
        "The record of charges stays, for tf-labeldp report and for other stores of the project. "
        "No further draw of these labels is possible.",
    ).add_argument
    add("store", type=_path, metavar="FOLDER", help="folder of the store")
    add("--yes", action="store_true", help="required: this can't be undone")


def _add_give_back(verbs: Any) -> None:
    add = _verb(
        verbs, "give-back", "_verbs.run_give_back",
        help="give back what a killed run had reserved in a store",
        description="A run that is killed between two releases leaves the cost of those to come "
        "reserved for its next run. Gives it back, so that other uses can spend it. What was drawn "
        "stays charged.",
    ).add_argument
    add("store", type=_path, metavar="FOLDER", help="folder of the store")
    add("--key", help="the name of one use; all without it")


def _add_confirm_move(verbs: Any) -> None:
    add = _verb(
        verbs, "confirm-move", "_verbs.run_confirm_move",
        help="accept a store that was copied, restored or moved to another disk",
        description="A store that is a copy of the folder in which it was last used is refused: "
        "two copies would spend one budget twice, and a backup lacks later charges. Accepts it. "
        "Use it only for the newest copy, and if no other copy is used.",
    ).add_argument
    add("store", type=_path, metavar="FOLDER", help="folder of the store")


def _add_train(verbs: Any) -> None:
    parser = _verb(
        verbs, "train", "_train.run_train", check=_check_train,
        help="train a model on private labels",
        description="Trains PrivateClassifier or PrivateRegressor on a table, or on images and a "
        "table of their labels, and writes a folder: model.keras, and its card, privacy.json and "
        "README.md. All three may be published.",
        epilog="Every column but --label is a public feature unless --features or --drop leaves it "
        "out: the command prints the columns that it takes, warns of ids before it spends, and of "
        "columns from which the released model predicts nearly all labels. Classes and range must "
        "be chosen without looking at the labels. Each run without --store spends again.",
    )
    parser.set_defaults(draws="stored", prior=None)
    add = parser.add_argument
    add("input", type=_path, help="table: .csv, .csv.gz or .parquet. Goes first")
    add("--label", required=True, metavar="NAME", help="column of the labels")
    add("--delta", type=_number, help="privacy parameter (default: 1e-5, or 0.1 over the number of "
        "rows if that is less)")
    _add_labels(parser)
    add("--loss", choices=("squared_error", "poisson"),
        help="loss for numbers; poisson is for counts (default: squared_error)")
    add("--method", choices=("auto", "head", "boosting"), default="auto",
        help="a head of one release, boosted trees on noisy labels, or the choice by epsilon and "
        "the table (default: auto)")
    columns = parser.add_mutually_exclusive_group()
    columns.add_argument("--features", nargs="+", metavar="NAME",
        help="columns to learn from; no other is used")
    columns.add_argument("--drop", action="extend", nargs="+", default=[], metavar="NAME",
        help="columns to leave out, such as ids; all others are used")
    _add_types(add)
    add("--images", type=_path, metavar="DIR",
        help="folder of images; the images are then the features")
    add("--file", metavar="NAME", help="column of the table with the names of the images")
    add("--evaluate", dest="budget_for_evaluation", type=_epsilon, metavar="EPSILON",
        help="hold out a tenth of the rows, and release the model's quality on them at this "
        "epsilon; training does not use their labels, so the larger epsilon covers both")
    add("--metric", dest="evaluation_metric", metavar="NAME",
        help="the quality that --evaluate releases: a metric of PrivateLabels.evaluate. For a rare "
        "class take average_precision (of two classes), auc or f1 (default: accuracy; for numbers "
        "mse)")
    add("--output", type=_path, default=pathlib.Path("trained"), metavar="DIR",
        help="new folder for the results (default: trained)")


def _add_predict(verbs: Any) -> None:
    add = _verb(
        verbs, "predict", "_predict.run_predict", check=_check_images,
        help="predict with a trained model",
        description="Reads a model and a table with its columns, and writes a table: for classes "
        "the likeliest one and the probability of each by its name, for numbers the prediction. "
        "Other columns of the table are ignored. Predictions may be published like the model: they "
        "spend nothing.",
    ).add_argument
    add("model", type=_path, metavar="MODEL",
        help="output of tf-labeldp train, or a .keras file such as that of to_keras().save")
    add("input", type=_path, metavar="TABLE", help="table: .csv, .csv.gz or .parquet")
    _add_types(add)
    add("--id", action="extend", nargs="+", metavar="NAME",
        help="columns to copy (default: the column named id, row_id or row, else a column row with "
        "row numbers from 0)")
    add("--images", type=_path, metavar="DIR", help="folder of images, for a model of images")
    add("--file", metavar="NAME", help="column of the table with the names of the images")
    add("--output", type=_path, default=pathlib.Path("predictions.csv"), metavar="FILE",
        help="new table: .csv, .csv.gz or .parquet (default: predictions.csv)")
    add("--overwrite", action="store_true", help="replace an existing output")


def _add_randomize(verbs: Any) -> None:
    parser = _verb(
        verbs, "randomize", "_randomize.run_randomize", check=_check_randomize,
        help="draw noisy labels for CSV or Parquet tables",
        description="Draws one noisy label for each label of CSV or Parquet tables, and writes "
        "them with the row ids, without the labels, next to a privacy statement, "
        "OUTPUT.privacy.json; tf_labeldp.NoisyLabels.load(OUTPUT) reads both. Both files may be "
        "published; the statement names the time of the draw and its actor (LABELDP_ACTOR, or the "
        "login name). The input, the store and the errors of this command are for the label holder "
        "alone. Several files are one table, with one prior and one statement: all are checked "
        "before anything is drawn, and the output folder appears complete.",
        epilog="The rows keep their order, and the id columns are copied: neither may depend on "
        "the labels. Range, classes and settings must be chosen without looking at the labels. "
        "Each run without --store draws, and spends, again; publishing the outputs of several runs "
        "costs the sum of their epsilons. tf-labeldp --help explains errors.",
    )
    add = parser.add_argument
    add("input", type=_path, nargs="+",
        help="table with the labels: .csv, .csv.gz or .parquet; several files, a folder or a "
        "pattern such as 'labels/*.csv', with rows in the order of the file names; or - for CSV "
        "from stdin. Goes first, since --classes takes all words after it")
    add("--column", required=True, metavar="NAME", help="column of the labels")
    add("--task", required=True, choices=("regression", "classification"))
    add("--output", required=True, type=_path,
        help="new table: .csv, .csv.gz or .parquet; for several inputs also a new folder, with one "
        "table per file; or - for CSV to stdout")
    add("--statement", type=_path, metavar="FILE",
        help="file for the statement with --output -; rows.csv.privacy.json if the rows will be in "
        "rows.csv")
    add("--jobs", type=_whole(1), metavar="N",
        help="threads that read and write (default: one per processor)")
    add("--prior", type=_path, metavar="FILE",
        help="public prior, made without these labels: JSON with probabilities, in the order of "
        "the classes, or with values and probabilities of numbers. Regression then spends nothing "
        "on a histogram, classification then uses RRWithPrior")
    add("--id", action="append", metavar="NAME",
        help="column to copy, may be given several times (default: the column named id, row_id or "
        "row, else a column row with row numbers from 0). No other column is copied")
    _add_types(add)
    add("--output-column", metavar="NAME", help="name of the noisy labels (default: --column)")
    add("--draws", choices=("stored", "keyed"), default="stored",
        help="keyed: by a secret key, labels.key in --store, and the row id, so that a run "
        "elsewhere can repeat the draws; stored: by the operating system's generator (default)")
    add("--overwrite", action="store_true", help="replace an existing output")
    add("--quiet", action="store_true", help="print errors alone: no progress, no remarks")
    _add_labels(parser)
    add("--mechanism", choices=(_RR_ON_BINS, *BASELINES),
        help=f"mechanism for numbers (default: {_RR_ON_BINS}, randomized response on the bins with "
        "the least expected loss; the others are for comparison)")
    add("--loss", choices=_LOSSES,
        help=f"loss for numbers that the bins minimize (default: {_LOSSES[0]})")
    add("--prior-epsilon", type=_epsilon, metavar="EPSILON",
        help="part of --epsilon for the private histogram of numbers (default: chosen by the "
        "number of labels)")
    add("--max-values", type=_whole(2), metavar="N",
        help="largest number of values in the histogram (default: 64)")
    add("--whole-numbers", action="store_true", default=None,
        help="the numbers are counts or other whole numbers, so no bin ends between them")


def _add_types(add: Any) -> None:
    add("--types", action="extend", nargs="+", default=[], metavar="COLUMN=KIND",
        help="how the cells of a column are read: number, text, date, time or id; more exactly "
        "number:comma, number:point, date:DD.MM.YYYY; cells of another form count as missing "
        "(default: by all cells of the column, as the command prints)")


def _add_labels(parser: Any) -> None:
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--num-classes", type=_whole(2, _MOST_CLASSES), metavar="K",
        help="labels are whole numbers 0..K-1")
    kind.add_argument("--classes", nargs="+", metavar="NAME",
        help="labels are names; give those of all classes, which are public")
    kind.add_argument("--low", type=_number,
        help="labels are numbers; give the smallest possible one, which is public (--low=-1e3 for "
        "a negative number with an exponent)")
    add = parser.add_argument
    add("--high", type=_number, help="the largest possible number, which is public")
    add("--clip", action="store_true", default=None,
        help="set numbers outside the range to its nearer end instead of refusing them")
    add("--epsilon", required=True, type=_epsilon, help="privacy parameter of the output")
    add("--store", type=_path, metavar="DIR",
        help="folder that stores the draws: a run that was killed, started again with the same "
        "store, resumes with its draws and spends nothing twice. The store stays with the labels, "
        "so it must not be in the folder of the output, nor contain it")
    add("--insecure-seed", type=_whole(0), metavar="N",
        help="repeatable draws; the statement is then 'NOT PRIVATE: seeded' (default: the "
        "operating system's secure generator)")
# fmt: on
