"""Epsilon of peer-to-peer randomized response against cluster size: ours and the paper's bound.

python tests/benchmarks/bench_peer_to_peer.py                 # the tables
python tests/benchmarks/bench_peer_to_peer.py --plot peer_to_peer.png
"""

from __future__ import annotations

import argparse
import math
import pathlib
import time

from tf_labeldp.accounting import peer_to_peer_bound, peer_to_peer_guarantee

SIZES = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
RATES = ((0.05, 1.0), (0.1, 0.1), (0.1, 1.0), (0.3, 0.1), (0.3, 1.0))
"""Flip probability alpha and reporting rate theta; delta is 1 / s^2 for clusters of s users."""


def bound(alpha: float, theta: float, size: int, delta: float) -> float:
    """Returns the epsilon of Lemma 9, NaN where it says nothing."""
    try:
        return peer_to_peer_bound(alpha, theta, size, delta).epsilon
    except ValueError:
        return math.nan


def measure() -> list[tuple[float, ...]]:
    """Prints and returns alpha, theta, size, ours (both), the paper's, the flips', seconds."""
    rows = []
    print("| alpha | theta | users s | epsilon, s or more | exactly s | Lemma 9 | flips | time |")
    print("|---|---|---|---|---|---|---|---|")
    for alpha, theta in RATES:
        for size in SIZES:
            delta = 1.0 / size**2
            start = time.perf_counter()
            ours = peer_to_peer_guarantee(alpha, theta, size, delta).epsilon
            seconds = time.perf_counter() - start
            exactly = peer_to_peer_guarantee(alpha, theta, size, delta, sizes="exactly").epsilon
            theirs = bound(alpha, theta, size, delta)
            flips = math.log((1.0 - alpha) / alpha)
            rows.append((alpha, theta, size, ours, exactly, theirs, flips, seconds))
            said = "-" if math.isnan(theirs) else f"{theirs:.3f}"
            print(
                f"| {alpha:g} | {theta:g} | {size:,} | {ours:.4f} | {exactly:.4f} | {said} | "
                f"{flips:.3f} | {seconds:.2f} s |",
                flush=True,
            )
    return rows


def draw(rows: list[tuple[float, ...]], path: pathlib.Path) -> None:
    """Writes epsilon against cluster size as a plot."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained", dpi=110)
    axes = figure.subplots()
    for i, (alpha, theta) in enumerate(RATES):
        mine = [row for row in rows if row[:2] == (alpha, theta)]
        sizes = [row[2] for row in mine]
        label = f"alpha {alpha:g}, theta {theta:g}"
        axes.plot(sizes, [row[3] for row in mine], color=f"C{i}", marker="o", label=label)
        theirs = [row[5] for row in mine]
        if not all(math.isnan(value) for value in theirs):
            axes.plot(sizes, theirs, color=f"C{i}", marker="x", ls="--", label=f"Lemma 9: {label}")
    for alpha in sorted({alpha for alpha, _ in RATES}):
        flips = math.log((1.0 - alpha) / alpha)
        axes.axhline(flips, color="gray", ls=":", lw=1)
        axes.text(SIZES[-1], flips, f"flips alone, {alpha:g}", ha="right", va="bottom", fontsize=8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("users of the smallest cluster, s")
    axes.set_ylabel("epsilon at delta = 1 / s²")
    axes.set_title("Peer-to-peer randomized response: numeric epsilon and Lemma 9")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    figure.savefig(path)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE")
    args = parser.parse_args()
    rows = measure()
    slowest = max(row[-1] for row in rows if row[2] == 100_000)
    print(f"\nslowest of 100,000 users: {slowest:.1f} s")
    if args.plot:
        draw(rows, args.plot)
        print(f"Plot: {args.plot}")


if __name__ == "__main__":
    main()
