"""Processor time of a use of a vault after many earlier uses.

Times a draw, a release and the charge of an epoch after n receipts, each with the budget check and
the statement of the vault, with and without a store, at delta zero and above; medians of five. Also
times opening the store again.

    python benchmarks/bench_bookkeeping.py
    python benchmarks/bench_bookkeeping.py --receipts 10 100
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable

import _results

N, K = 1000, 3


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--receipts", type=int, nargs="+", default=[10, 1000, 10_000])
    args = parser.parse_args()
    with _results.recorded(__file__, "one more use"):
        heads = ["receipts", "delta", "store", "draw", "release", "epoch", "opening"]
        print(_results.markdown(heads, []))
        for delta, stored in itertools.product((0.0, 1e-5), (False, True)):
            for size in args.receipts:
                with tempfile.TemporaryDirectory() as folder:
                    store = pathlib.Path(folder, "store") if stored else None
                    cells = [f"{size:,}", f"{delta:g}", "yes" if stored else "no"]
                    cells += measured(size, delta, store)
                    print(f"| {' | '.join(cells)} |", flush=True)


def measured(size: int, delta: float, store: pathlib.Path | None) -> list[str]:
    """Returns the times of a draw, a release, an epoch, and opening the store again."""
    import numpy as np

    import tf_labeldp as ldp
    from tf_labeldp.accounting import Charge, dp_sgd_charge
    from tf_labeldp.mechanisms import HistogramMechanism

    y = np.random.default_rng(0).integers(0, K, N)
    small = ldp.RandomizedResponse(1e-3, K)
    steps = dp_sgd_charge(50.0, 0.01, 10, 1e-5) if delta else Charge.of(small)
    labels = ldp.PrivateLabels(y, K, budget=ldp.PrivacyBudget(19.0, delta), store=store)
    for number in range(size):
        labels.charge((Charge.of(small), steps)[number % 2], what="a use")

    def timed(use: Callable[[], object]) -> float:
        begun = time.process_time()
        use()
        labels.guarantee()
        return time.process_time() - begun

    uses: list[Callable[[], object]] = [
        lambda: labels.randomize(small),
        lambda: labels.release(HistogramMechanism(1e-3, K)),
        lambda: labels.charge(steps, what="an epoch"),
    ]
    cells = [f"{1e3 * statistics.median(timed(use) for _ in range(5)):.1f} ms" for use in uses]
    opening = "-"
    if store is not None:
        opening = f"{timed(lambda: ldp.PrivateLabels(y, K, store=store)):.2f} s"
    return [*cells, opening]


if __name__ == "__main__":
    main()
