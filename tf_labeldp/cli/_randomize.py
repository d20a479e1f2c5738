"""``tf-labeldp randomize``: a table of labels in, a table of noisy labels out."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

from tf_labeldp.cli import _options
from tf_labeldp.cli._errors import CommandError

_DESCRIPTION = """\
Draws one noisy label for each label of a CSV or Parquet table, and writes them with the row ids and
without the labels. Whoever gets the output learns little about any one label: it comes with a
privacy statement, OUTPUT.privacy.json, which also has the mechanism and the prior;
tf_labeldp.NoisyLabels.load(OUTPUT) reads both. Both files may be published; the statement says when
and by whom the labels were drawn (LABELDP_ACTOR, or the name of the login). The input, the store
and what this command says when it fails are for the label holder alone.
"""
_EPILOG = """\
The rows keep their order, and the id columns are copied as they are: neither may depend on the
labels. Range, classes and settings must be chosen without looking at the labels. Each run without
--store draws, and spends, again; publishing the outputs of several costs the sum of their epsilons.
What an error looks like: see tf-labeldp --help.
"""

_LOSSES = ("squared_error", "absolute_error", "poisson")
_RR_ON_BINS = "rr_on_bins"
_MECHANISMS = {
    "laplace": "LaplaceMechanism",
    "discrete_laplace": "DiscreteLaplaceMechanism",
    "staircase": "StaircaseMechanism",
    "discrete_staircase": "DiscreteStaircaseMechanism",
    "exponential": "ExponentialMechanism",
}
_GRID_ONLY = ("prior_epsilon", "max_values", "whole_numbers")
_REGRESSION_ONLY = ("low", "high", "clip", "mechanism", "loss", *_GRID_ONLY)
_CLASSIFICATION_ONLY = ("num_classes", "classes")
_MOST_CLASSES = 10**9
_BINS_ONLY = ("loss", *_GRID_ONLY, "prior")


def add_parser(verbs: Any) -> None:
    """Adds the verb to the sub-parsers of the command line."""
    parser = verbs.add_parser(
        "randomize",
        help="draw noisy labels for a CSV or Parquet table",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument(
        "input",
        type=pathlib.Path,
        help="table with the labels: .csv, .csv.gz or .parquet; goes first, since --classes takes "
        "all words after it",
    )
    parser.add_argument("--column", required=True, metavar="NAME", help="column of the labels")
    parser.add_argument("--task", required=True, choices=("regression", "classification"))
    parser.add_argument(
        "--epsilon", required=True, type=_options.epsilon, help="privacy parameter of the output"
    )
    parser.add_argument(
        "--output", required=True, type=pathlib.Path, help="new table: .csv, .csv.gz or .parquet"
    )
    parser.add_argument(
        "--prior",
        type=pathlib.Path,
        metavar="FILE",
        help="public prior, made without these labels: JSON with values (regression) and "
        "probabilities, or CSV with two columns. Regression then spends nothing on a histogram, "
        "classification then uses RRWithPrior",
    )
    parser.add_argument(
        "--id",
        action="append",
        metavar="NAME",
        help="column to copy, may be given several times (default: the column named id, row_id or "
        "row, else row numbers from 0 in a column row). No other column is copied",
    )
    parser.add_argument(
        "--output-column", metavar="NAME", help="name of the noisy labels (default: --column)"
    )
    parser.add_argument(
        "--store",
        type=pathlib.Path,
        metavar="DIR",
        help="folder that keeps the draws: a run that was stopped, started again with it, goes on "
        "with the same draws and spends nothing twice. It stays with the labels, so it must not be "
        "in the folder of the output, nor the other way round",
    )
    parser.add_argument(
        "--insecure-seed",
        type=_options.at_least(0),
        metavar="N",
        help="repeatable draws; the statement then says 'NOT PRIVATE: seeded' (default: the "
        "operating system's secure generator)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    parser.add_argument(
        "--quiet", action="store_true", help="say nothing but errors: no progress, no remarks"
    )
    _add_regression(parser.add_argument_group("regression"))
    _add_classification(parser.add_argument_group("classification"))
    parser.set_defaults(run=run)


def _add_regression(group: Any) -> None:
    group.add_argument("--low", type=_options.number, help="smallest label, public; needed")
    group.add_argument("--high", type=_options.number, help="largest label, public; needed")
    group.add_argument(
        "--clip",
        action="store_true",
        default=None,
        help="set labels outside the range to its nearer end instead of refusing them",
    )
    group.add_argument(
        "--mechanism",
        choices=(_RR_ON_BINS, *_MECHANISMS),
        help=f"default: {_RR_ON_BINS}, randomized response on the bins with the least expected "
        "loss; the others are for comparison",
    )
    group.add_argument(
        "--loss", choices=_LOSSES, help=f"which the bins are best for (default: {_LOSSES[0]})"
    )
    group.add_argument(
        "--prior-epsilon",
        type=_options.epsilon,
        metavar="EPSILON",
        help="part of --epsilon for the private histogram (default: chosen by the number of "
        "labels)",
    )
    group.add_argument(
        "--max-values",
        type=_options.at_least(2),
        metavar="N",
        help="most values that labels are rounded to for the histogram (default: 64)",
    )
    group.add_argument(
        "--whole-numbers",
        action="store_true",
        default=None,
        help="the labels are counts or other whole numbers, so nothing between them needs to be "
        "told apart",
    )


def _add_classification(group: Any) -> None:
    group.add_argument(
        "--num-classes",
        type=_options.at_least(2),
        metavar="K",
        help="labels are whole numbers 0..K-1; this or --classes is needed",
    )
    group.add_argument(
        "--classes", nargs="+", metavar="NAME", help="names of all classes; they are public"
    )


def run(args: argparse.Namespace) -> int:
    """Randomizes the labels of a table; returns the exit code."""
    _check_options(args)
    from tf_labeldp.cli import _randomize_table

    return _randomize_table.run(args, _MECHANISMS.get(args.mechanism))


def _check_options(args: argparse.Namespace) -> None:
    """Raises for options that are missing, or do not go together."""
    if args.task == "regression":
        _refuse(args, _CLASSIFICATION_ONLY, "is for --task classification")
        for name in ("low", "high"):
            if getattr(args, name) is None:
                raise CommandError(
                    f"--task regression needs --{name}, an end of the public range of the labels; "
                    "it is not taken from the labels, since that would show whose is at the end"
                )
        if args.low >= args.high:
            raise CommandError(
                f"--low must be below --high, got --low {args.low:g} --high {args.high:g}; they "
                "are the smallest and the largest label"
            )
        if args.mechanism not in (None, _RR_ON_BINS):
            _refuse(args, _BINS_ONLY, f"is for --mechanism {_RR_ON_BINS}")
        if args.loss == "poisson" and args.low < 0.0:
            raise CommandError(
                f"--loss poisson needs labels of zero or more, got --low {args.low:g}; take "
                "another loss or range"
            )
        if args.prior is not None:
            _refuse(args, _GRID_ONLY, "is for runs without --prior")
        if args.prior_epsilon is not None and args.prior_epsilon >= args.epsilon:
            raise CommandError(
                f"--prior-epsilon must be below --epsilon, of which it is a part, got "
                f"{args.prior_epsilon:g} of {args.epsilon:g}; half of it is a fair start"
            )
        return
    _refuse(args, _REGRESSION_ONLY, "is for --task regression")
    if (args.classes is None) == (args.num_classes is None):
        raise CommandError(
            "--task classification needs either --num-classes K, for labels 0..K-1, or --classes, "
            f"the names of all classes; got {'neither' if args.classes is None else 'both'}"
        )
    if args.num_classes is not None and args.num_classes > _MOST_CLASSES:
        raise CommandError(
            f"--num-classes must be at most {_MOST_CLASSES:,}, got {args.num_classes:,}; are these "
            "labels numbers, for --task regression?"
        )
    names = args.classes or ()
    different = len(set(names))
    if names and (different < 2 or different < len(names)):
        raise CommandError(
            f"--classes must name at least two classes, each once, got {len(names)} names of "
            f"which {different} differ"
        )


def _refuse(args: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    for name in names:
        if getattr(args, name) is not None:
            raise CommandError(f"--{name.replace('_', '-')} {reason}; leave it out")
