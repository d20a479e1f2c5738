"""Regression on labels made noisy by RR-on-Bins and by others (``ghazi2023``, section 4).

Claim amounts (beMTPL97) and claim counts (pg15training) replace the paper's Criteo and census data;
the network, the epsilons and the measures are those of its appendix E.1. Every finished cell is a
line in a JSON file, the source of tables and plots, so a stopped benchmark resumes, and two
processes can share the work.

    python benchmarks/bench_regression.py --part 0/2 &
    python benchmarks/bench_regression.py --part 1/2
    python benchmarks/bench_regression.py --report-only
"""

from __future__ import annotations

import argparse
import os
import pathlib
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import _results
import numpy as np
import tensorflow as tf
from _insurance import COLUMNS, InsuranceData, load, split
from _regression_methods import Drawn, methods
from _regression_network import Trainer
from _regression_report import CONSTANT, NON_PRIVATE, plot_joint_density, report

EPSILONS = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
# (batch size, epochs), chosen with --tune on splits of other seeds, for Laplace noise at epsilon 6,
# as in the paper, and without noise. For pg15training (512, 20) is as good, and slower.
SETTINGS = {"beMTPL97": (256, 5), "pg15training": (256, 10)}
TUNING_SEEDS = (100, 101, 102)
TUNING_EPSILON = 6.0
DENSITY_EPSILON = 3.0
"""That of Figure 2."""


def measure(
    data: InsuranceData, trainer: Trainer, method: str, epsilon: float | None, seed: int
) -> dict[str, Any]:
    """Returns the errors of one cell."""
    start = time.perf_counter()
    rows, test_rows = split(len(data), seed)
    labels, test_labels = data.labels[rows], data.labels[test_rows]
    if method == CONSTANT:
        noisy = Drawn(np.full(len(rows), labels.mean()))
        predicted = noisy.labels[: len(test_rows)]
    else:
        if method == NON_PRIVATE:
            noisy = Drawn(labels)
        else:
            noisy = methods(data.counts)[method].draw(data, rows, epsilon, seed)
        trainer.fit(rows, noisy.labels, seed)
        predicted = trainer.predict(test_rows)
    return {
        "mechanism_error": float(np.mean(np.square(noisy.labels - labels))),
        "test_error": float(np.mean(np.square(predicted - test_labels))),
        "details": noisy.details,
        "seconds": time.perf_counter() - start,
    }


def new_trainer(data: InsuranceData, batch_size: int, epochs: int) -> Trainer:
    """Returns the network of one data set."""
    num_train = len(split(len(data), 0)[0])
    return Trainer(data, num_train, batch_size=batch_size, epochs=epochs)


def tune(data: InsuranceData) -> None:
    """Prints test errors relative to the constant predictor, by batch size and epochs."""
    print(f"{data.name}\n| batch size | epochs | non-private | Laplace, epsilon 6 | seconds |")
    print("|---" * 5 + "|")
    for batch_size in (256, 512, 1024, 2048):
        for epochs in (3, 5, 10, 20, 40):
            trainer = new_trainer(data, batch_size, epochs)
            if not 100 <= trainer.steps * epochs <= 3200:
                continue
            errors: dict[str, list[float]] = {}
            start = time.perf_counter()
            for seed in TUNING_SEEDS:
                for method, epsilon in (
                    (CONSTANT, None),
                    (NON_PRIVATE, None),
                    ("Laplace", TUNING_EPSILON),
                ):
                    result = measure(data, trainer, method, epsilon, seed)
                    errors.setdefault(method, []).append(result["test_error"])
            seconds = (time.perf_counter() - start) / (2 * len(TUNING_SEEDS))
            relative = [np.mean(errors[m]) / np.mean(errors[CONSTANT]) for m in errors]
            print(
                f"| {batch_size} | {epochs} | {relative[1]:.4f} | {relative[2]:.4f} "
                f"| {seconds:.1f} |",
                flush=True,
            )


def run(data: InsuranceData, args: argparse.Namespace) -> None:
    """Runs this process's part of the missing cells."""
    settings = list(SETTINGS[data.name])
    jobs = [
        {
            "data": data.name,
            "method": method,
            "epsilon": epsilon,
            "seed": seed,
            "settings": settings,
        }
        for seed in range(args.seeds)
        for epsilon in (None, *args.epsilons)
        for method in ((CONSTANT, NON_PRIVATE) if epsilon is None else methods(data.counts))
    ]
    part, parts = args.part
    trainer = new_trainer(data, *settings)
    for job in _results.missing(args.output, jobs[part::parts]):
        errors = measure(data, trainer, job["method"], job["epsilon"], job["seed"])
        _results.add_run(args.output, {**job, **errors})


def read(output: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the finished cells of the present settings."""
    return [
        result
        for result in _results.runs(output)
        if tuple(result["settings"]) == SETTINGS[result["data"]]
    ]


def _part(text: str) -> tuple[int, int]:
    part, parts = (int(number) for number in text.split("/"))
    if not 0 <= part < parts:
        raise argparse.ArgumentTypeError(f"{text}: expected i/n with 0 <= i < n, for example 0/2")
    return part, parts


def main() -> None:
    """Runs what is missing, prints and records the tables, and draws the joint density."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = pathlib.Path(__file__).parent
    parser.add_argument("--data", nargs="+", default=list(COLUMNS), choices=list(COLUMNS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=list(EPSILONS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--part", type=_part, default=(0, 1), help="i/n: this process's share")
    parser.add_argument("--threads", type=int, default=1, help="of TensorFlow")
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("bench_regression.jsonl")
    )
    parser.add_argument("--plots", type=pathlib.Path, default=here, help="folder for the plots")
    parser.add_argument("--report-only", action="store_true", help="run nothing, read the file")
    parser.add_argument(
        "--tune", action="store_true", help="compare batch sizes and epochs instead"
    )
    args = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    tf.config.threading.set_inter_op_parallelism_threads(args.threads)

    datasets = {name: load(name) for name in args.data}
    if args.tune:
        for data in datasets.values():
            tune(data)
        return
    if not args.report_only:
        for data in datasets.values():
            run(data, args)

    results = read(args.output)
    args.plots.mkdir(parents=True, exist_ok=True)
    for data in datasets.values():
        kind = "counts" if data.counts else "amounts"
        names = ("mechanism_error", "test_error", "bins", "mechanism_check", "test_check")
        with _results.recorded(__file__, *(f"{name}_{kind}" for name in names)):
            print(f"\n{report(results, data, args.epsilons)}")
    if "beMTPL97" in datasets:
        plot_joint_density(
            datasets["beMTPL97"], DENSITY_EPSILON, 0, args.plots / "regression_joint_density.png"
        )


if __name__ == "__main__":
    main()
