"""The width of private evaluations, and how often the best of ten models is chosen.

    python benchmarks/bench_evaluation.py

Ten models of each data set are fitted without privacy on 300 to 10,000 examples; 10,000 others are
held out. For the accuracy (numbers: the mean squared error, as a part of the variance) the table
has the half width of a 95 % interval, and the share of 1,000 intervals that contain the truth; then
how often ``select`` chooses the best model, and how much its choice is worse on average. Labels of
these data sets are public; draws are seeded.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import _datasets
import _results
import numpy as np
from _insurance import load
from sklearn.linear_model import LogisticRegression, Ridge

from tf_labeldp.mechanisms import MetricMechanism, SelectionMechanism

EPSILONS, DRAWS = (0.05, 0.1, 0.5), 1000
SIZES = np.geomspace(300, 10_000, 10).astype(int)
HALF = 10_000


def data() -> Iterator[tuple[str, np.ndarray, np.ndarray, dict[str, float]]]:
    """Yields name, rows, labels and their kind, as arguments of a mechanism."""
    order = np.random.default_rng(0)
    for name in ("mnist", "adult"):
        found = _datasets.load(name)
        chosen = order.permutation(len(found.x_train))[: 2 * HALF]
        rows = found.x_train[chosen].reshape(2 * HALF, -1)
        yield name, rows, found.y_train[chosen], {"num_classes": found.num_classes}
    for name in ("pg15training", "beMTPL97"):
        claims = load(name)
        chosen = order.permutation(len(claims))[: 2 * HALF]
        codes, sizes = claims.codes[chosen].T, claims.vocabulary_sizes
        wide = [np.eye(size)[column] for column, size in zip(codes, sizes, strict=True)]
        small = [part for part in wide if part.shape[1] < 50]
        rows = np.concatenate([claims.numbers[chosen], *small], axis=1)
        yield name, rows, claims.labels[chosen], {"low": claims.low, "high": claims.high}


def main() -> None:
    """Prints the table."""
    warnings.filterwarnings("ignore")
    lines = []
    for name, rows, labels, kind in data():
        half = len(rows) // 2
        deviation = np.maximum(rows.std(axis=0), 1e-3)
        rows = (rows - rows.mean(axis=0)) / deviation
        fit = LogisticRegression(C=0.01, max_iter=200) if "num_classes" in kind else Ridge(1000.0)
        metric = "accuracy" if "num_classes" in kind else "mse"
        candidates = [
            fit.fit(rows[:size], labels[:size]).predict(rows[half:])
            for size in np.minimum(SIZES, half)
        ]
        held_out = labels[half:]
        for epsilon in EPSILONS:
            mechanism = MetricMechanism(epsilon, metric, **kind)  # type: ignore[arg-type]
            unit = mechanism.sensitivity / mechanism.steps / len(held_out)
            exact = np.array([mechanism.exact_steps(held_out, each) for each in candidates]) * unit
            scale = 1.0 if metric == "accuracy" else float(np.var(held_out))
            error = mechanism.noise_stddev(len(held_out))
            half_width = np.log(20.0) / np.sqrt(2.0) * error
            rng = np.random.default_rng(1)
            drawn = np.array(
                [mechanism.release(held_out, candidates[-1], rng=rng) for _ in range(DRAWS)]
            )
            covered = np.mean(np.abs(drawn - exact[-1]) <= half_width)
            choice = SelectionMechanism(epsilon, metric, **kind)  # type: ignore[arg-type]
            chosen = np.array([choice.release(held_out, candidates, rng=rng) for _ in range(DRAWS)])
            best = exact.max() if metric == "accuracy" else exact.min()
            lost = np.abs(exact[chosen] - best) / scale
            lines.append(
                [
                    name,
                    metric,
                    f"{epsilon:g}",
                    f"{100 * exact[-1] / scale:.1f} ± {100 * half_width / scale:.2g}",
                    f"{100 * covered:.1f}",
                    f"{100 * np.ptp(exact) / scale:.1f}",
                    f"{100 * np.mean(lost == 0.0):.0f}",
                    f"{100 * lost.mean():.2g}",
                ]
            )
    columns = ["data", "metric", "epsilon", "best of ten", "covered", "worst - best", "best chosen"]
    with _results.recorded(__file__, "evaluation"):
        print(_results.markdown([*columns, "lost"], lines))


if __name__ == "__main__":
    main()
