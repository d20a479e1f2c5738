"""``tf-labeldp demo``: what label privacy costs in accuracy, on a data set of one's choice."""

from __future__ import annotations

import argparse
import os
import pathlib
from typing import Any

from tf_labeldp.cli import _options
from tf_labeldp.cli._errors import DatasetError

_DESCRIPTION = """\
Trains a small Keras model without privacy (NOT PRIVATE, for comparison), with LP-1ST (randomized
response) and with LP-2ST (two stages, RRWithPrior) at several epsilon, prints a table, and writes a
plot, privacy statements, noisy labels and models to a folder. Files of an earlier demo in that
folder are replaced, others are left alone.
"""


def add_parser(verbs: Any) -> None:
    """Adds the verb to the sub-parsers of the command line."""
    parser = verbs.add_parser(
        "demo", help="train with and without label privacy and compare", description=_DESCRIPTION
    )
    parser.add_argument(
        "--data",
        default="digits",
        metavar="NAME",
        help="digits (comes with scikit-learn; default), adult, mnist, fashion_mnist, or the name "
        "of a TFDS data set in --data-dir",
    )
    parser.add_argument(
        "--data-dir",
        type=pathlib.Path,
        default=os.environ.get("LABELDP_DATA_DIR") or None,
        metavar="DIR",
        help="folder of the data sets, such as DIR/mnist/train-images-idx3-ubyte.gz or "
        "DIR/adult/adult.data.gz (default: the environment variable LABELDP_DATA_DIR); nothing is "
        "downloaded",
    )
    parser.add_argument(
        "--epsilons",
        type=_options.epsilon,
        nargs="+",
        default=[1.0, 2.0, 4.0, 8.0],
        metavar="EPSILON",
        help="privacy parameters (default: 1 2 4 8)",
    )
    parser.add_argument(
        "--epochs",
        type=_options.at_least(1),
        metavar="N",
        help="epochs a stage; LP-2ST has two stages (default: 15 for digits, 3 for others)",
    )
    parser.add_argument(
        "--insecure-seed",
        type=_options.at_least(0),
        metavar="N",
        help="repeatable random numbers; the statements then say 'NOT PRIVATE: seeded' (default: "
        "the operating system's secure generator)",
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=pathlib.Path("demo-output"),
        metavar="DIR",
        help="folder for the results (default: demo-output)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the demo; returns the exit code."""
    from tf_labeldp.cli import _datasets, _report

    data = _datasets.load(args.data, args.data_dir)
    if len(data.y_train) < 10 or not len(data.y_test):
        raise DatasetError(f"{data.name} has too few examples for the demo")
    report = _report.Report(args.output, data, seeded=args.insecure_seed is not None)
    print(
        f"{data.name}: {len(data.y_train):,} training examples with private labels, "
        f"{len(data.y_test):,} test examples with public labels, {data.num_classes} classes",
        flush=True,
    )

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is loaded
    from tf_labeldp.cli import _experiment, _plot

    settings = _experiment.settings_for(data.name, args.epochs)
    jobs = _experiment.jobs(sorted(set(args.epsilons)))
    progress = _experiment.Progress([job.num_stages * settings.epochs for job in jobs])
    for job in jobs:
        report.add(_experiment.train(job, data, settings, args.insecure_seed, progress))
    plot = _plot.draw(report)
    print(f"\n{report.table()}\n\n{report.summary()}")
    for line in plot:
        print(line)
    return 0
