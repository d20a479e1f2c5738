"""Time and memory of optimal_bins: growth with k, and against Algorithm 2's O(k^3) table.

python benchmarks/bench_optimal_bins.py
"""

from __future__ import annotations

import importlib.util
import pathlib
import time

import _results
import numpy as np
from _timing import best_seconds, peak_bytes

from tf_labeldp.mechanisms import optimal_bins

EPSILON = 3.0
LOSSES = ("squared_error", "absolute_error", "poisson")
SIZES = (500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
TARGETS = {401: 0.1, 5000: 1.0, 20_000: 10.0, 100_000: 300.0}
"""Seconds for the squared error, by the number of values."""
TABLE_SIZES = (100, 200, 400, 800, 1600)
ORACLES = pathlib.Path(__file__).parents[1] / "tests" / "mechanisms" / "bins_oracles.py"


def instance(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns values 0..k-1 and a falling prior with noise, as for amounts."""
    values = np.arange(float(size))
    weights = np.random.default_rng(size).gamma(0.5, size=size) * np.exp(-4.0 * values / size)
    return values, weights / weights.sum()


def growth() -> None:
    """Prints the seconds by loss and size."""
    print("| k | " + " | ".join(LOSSES) + " | bins | target (squared error) |")
    print("|---" * (len(LOSSES) + 3) + "|")
    for size in (401, *SIZES):
        values, prior = instance(size)
        row = {
            loss: best_seconds(
                lambda v=values, p=prior, name=loss: optimal_bins(v, p, EPSILON, name),
                3 if size <= 20_000 else 1,
            )
            for loss in LOSSES
        }
        bins = optimal_bins(values, prior, EPSILON).num_bins
        target = f"{TARGETS[size]:g} s" if size in TARGETS else ""
        cells = " | ".join(f"{row[loss]:.3f} s" for loss in LOSSES)
        print(f"| {size:,} | {cells} | {bins} | {target} |", flush=True)


def against_the_table() -> None:
    """Prints the seconds of the O(k^3) table, with the ratio to ours."""
    spec = importlib.util.spec_from_file_location("bins_oracles", ORACLES)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(ORACLES)
    oracles = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(oracles)
    print("| k | O(k^3) table | ours | ratio | relative difference of the losses |")
    print("|---|---|---|---|---|")
    for size in TABLE_SIZES:
        values, prior = instance(size)
        start = time.perf_counter()
        loss = oracles.cubic_table_loss(values, prior, EPSILON, "squared_error")
        theirs = time.perf_counter() - start
        ours = best_seconds(lambda v=values, p=prior: optimal_bins(v, p, EPSILON), 5)
        difference = optimal_bins(values, prior, EPSILON).expected_loss(prior) / loss - 1.0
        print(
            f"| {size} | {theirs:.3f} s | {ours:.4f} s | {theirs / ours:.0f} | {difference:.0e} |",
            flush=True,
        )


def main() -> None:
    """Prints and records the tables."""
    with _results.recorded(__file__, "times"):
        growth()
    print()
    for size in (5000, 20_000):
        values, prior = instance(size)
        peak = peak_bytes(lambda v=values, p=prior: optimal_bins(v, p, EPSILON))
        print(f"memory at k = {size:,}: {peak / size:.0f} bytes per value")
    print()
    with _results.recorded(__file__, "against_cubic"):
        against_the_table()


if __name__ == "__main__":
    main()
