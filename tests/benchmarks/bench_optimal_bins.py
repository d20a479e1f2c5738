"""Time and memory of optimal_bins: growth with k, and against Algorithm 2's O(k^3) table.

python tests/benchmarks/bench_optimal_bins.py                 # the tables
python tests/benchmarks/bench_optimal_bins.py --plot optimal_bins.png
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import time

import numpy as np
from _timing import best_seconds, peak_bytes

from tf_labeldp.mechanisms import optimal_bins

EPSILON = 3.0
LOSSES = ("squared_error", "absolute_error", "poisson")
SIZES = (500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
TARGETS = {401: 0.1, 5000: 1.0, 20_000: 10.0, 100_000: 300.0}  # seconds, for squared error
TABLE_SIZES = (100, 200, 400, 800, 1600)
ORACLES = pathlib.Path(__file__).parents[1] / "mechanisms" / "bins_oracles.py"


def instance(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Values 0..k-1 and a falling prior with noise, as of amounts with rare large ones."""
    values = np.arange(float(size))
    weights = np.random.default_rng(size).gamma(0.5, size=size) * np.exp(-4.0 * values / size)
    return values, weights / weights.sum()


def power(y_hat: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A callable loss."""
    return np.abs(y_hat - y) ** 1.5


def growth() -> dict[str, list[float]]:
    """Prints and returns the seconds by loss for each of SIZES."""
    seconds: dict[str, list[float]] = {loss: [] for loss in LOSSES}
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
        if size in SIZES:
            for loss in LOSSES:
                seconds[loss].append(row[loss])
        bins = optimal_bins(values, prior, EPSILON).num_bins
        target = f"{TARGETS[size]:g} s" if size in TARGETS else ""
        cells = " | ".join(f"{row[loss]:.3f} s" for loss in LOSSES)
        print(f"| {size:,} | {cells} | {bins} | {target} |", flush=True)
    return seconds


def against_the_table() -> dict[int, float]:
    """Prints and returns the seconds of the O(k^3) table, with the ratio to ours."""
    spec = importlib.util.spec_from_file_location("bins_oracles", ORACLES)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(ORACLES)
    oracles = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(oracles)
    found = {}
    print("| k | O(k^3) table | ours | ratio | relative difference of the losses |")
    print("|---|---|---|---|---|")
    for size in TABLE_SIZES:
        values, prior = instance(size)
        start = time.perf_counter()
        loss, _, _ = oracles.cubic_table_loss(values, prior, EPSILON, "squared_error")
        found[size] = time.perf_counter() - start
        ours = best_seconds(lambda v=values, p=prior: optimal_bins(v, p, EPSILON), 5)
        difference = optimal_bins(values, prior, EPSILON).expected_loss(prior) / loss - 1.0
        print(
            f"| {size} | {found[size]:.3f} s | {ours:.4f} s | {found[size] / ours:.0f} | "
            f"{difference:.0e} |",
            flush=True,
        )
    return found


def draw(seconds: dict[str, list[float]], table: dict[int, float], path: pathlib.Path) -> None:
    """Writes the growth as a plot."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 5), layout="constrained", dpi=110)
    axes = figure.subplots()
    for loss, marker in zip(LOSSES, "os^", strict=True):
        axes.plot(SIZES, seconds[loss], marker=marker, label=loss)
    axes.plot(
        list(table), list(table.values()), "kx--", label="Algorithm 2's table (squared error)"
    )
    sizes = np.array(SIZES, dtype=float)
    start = seconds["squared_error"][0]
    reference = sizes * np.log2(sizes) ** 2
    axes.plot(sizes, start * reference / reference[0], "gray", ls=":", label="k log² k")
    axes.plot(sizes, start * (sizes / sizes[0]) ** 2, "lightgray", ls="-.", label="k²")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("number of distinct labels k")
    axes.set_ylabel("seconds, all of optimal_bins")
    axes.set_title(f"optimal_bins at epsilon {EPSILON:g}: growth with k")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE")
    args = parser.parse_args()
    seconds = growth()
    values, prior = instance(401)
    callable_seconds = best_seconds(lambda: optimal_bins(values, prior, EPSILON, power), 1)
    print(f"\na callable loss at k = 401: {callable_seconds:.2f} s (target 60 s)")
    for size in (5000, 20_000):
        values, prior = instance(size)
        peak = peak_bytes(lambda v=values, p=prior: optimal_bins(v, p, EPSILON))
        print(f"memory at k = {size:,}: {peak / size:.0f} bytes a value")
    print()
    table = against_the_table()
    if args.plot:
        draw(seconds, table, args.plot)
        print(f"Plot: {args.plot}")


if __name__ == "__main__":
    main()
