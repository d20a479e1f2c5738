"""Epsilon of peer-to-peer randomized response against cluster size: ours and the paper's bound.

python benchmarks/bench_peer_to_peer.py
"""

from __future__ import annotations

import math
import time

import _results

from tf_labeldp.accounting import peer_to_peer_guarantee

SIZES = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
RATES = ((0.05, 1.0), (0.1, 0.1), (0.1, 1.0), (0.3, 0.1), (0.3, 1.0))
"""Flip probability alpha and reporting rate theta; delta is 1 / s^2 for clusters of s users."""


def bound(alpha: float, theta: float, size: int, delta: float) -> float:
    """Returns the epsilon of Lemma 9 of ``esfandiari2022``, NaN where it does not apply.

    The proof assumes that theta n users report, and that between alpha n and (1 - alpha) n of the
    noisy labels are ones. The lemma's xi is chosen for this delta.
    """
    most = 3.0 * alpha * math.sqrt(theta * size * (1.0 - alpha))
    least_log = -alpha * most**2 / (4.0 * (alpha + 1.0 / size) * (1.0 - alpha))
    if size < 2.0 / alpha or math.log(delta) < least_log:
        return math.nan
    xi = most * math.sqrt(math.log(delta) / least_log)
    expected = 3.0 / (size * alpha)
    spread = math.sqrt(theta) * xi * math.log1p(math.sqrt(3.0 * expected))
    return theta * math.log(math.e + expected) + spread


def main() -> None:
    """Prints and records epsilon by rates (rows) and cluster size (columns)."""
    slowest = 0.0
    with _results.recorded(__file__, "epsilon"):
        print(f"| alpha, theta | clusters of | {' | '.join(f'{size:,}' for size in SIZES)} |")
        print("|---" * (len(SIZES) + 2) + "|")
        for alpha, theta in RATES:
            names = ("s users or more", "Lemma 9")
            cells: dict[str, list[str]] = {name: [] for name in names}
            for size in SIZES:
                delta = 1.0 / size**2
                start = time.perf_counter()
                ours = peer_to_peer_guarantee(alpha, theta, size, delta).epsilon
                slowest = max(slowest, time.perf_counter() - start)
                theirs = bound(alpha, theta, size, delta)
                cells["s users or more"].append(f"{ours:.4f}")
                cells["Lemma 9"].append("-" if math.isnan(theirs) else f"{theirs:.3f}")
            for name, row in cells.items():
                print(f"| {alpha:g}, {theta:g} | {name} | {' | '.join(row)} |", flush=True)
    print(f"\nslowest of our guarantees: {slowest:.1f} s")


if __name__ == "__main__":
    main()
