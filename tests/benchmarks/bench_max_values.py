"""How many values RR-on-Bins should tell apart: rounding against the price of the private prior.

    python tests/benchmarks/bench_max_values.py

Mechanism error of ``LabelRandomizer`` on the claim amounts of beMTPL97, by ``max_values``; the last
column knows the distribution of the labels (NOT PRIVATE), which is a bound.
"""

from __future__ import annotations

import os

import _results
import numpy as np
from _insurance import load

import tf_labeldp as ldp

EPSILONS = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
MOST = (16, 32, 64, 128, 256, 512, 1024)
SEEDS = 10
FINE = 4001


def error(labels: np.ndarray, high: float, epsilon: float, most: int, seed: int) -> float:
    """Returns the MSE between true and noisy labels of one draw."""
    budget = ldp.PrivacyBudget(epsilon)
    vault = ldp.PrivateLabels(labels, low=0.0, high=high, budget=budget, insecure_seed=seed)
    noisy = vault.randomize(ldp.LabelRandomizer(epsilon, max_values=most))
    return float(np.mean(np.square(noisy.values - labels)))


def main() -> None:
    """Prints the table."""
    data = load("beMTPL97", os.environ.get("LABELDP_DATA_DIR", "../shared/data"))
    grid = np.linspace(0.0, data.high, FINE)
    cells = np.rint(data.labels / data.high * (FINE - 1)).astype(int)
    known = np.bincount(cells, minlength=FINE) / len(data)
    print("| epsilon | " + " | ".join(map(str, MOST)) + " | prior known |")
    print("|---" * (len(MOST) + 2) + "|")
    for epsilon in EPSILONS:
        row = []
        for most in MOST:
            errors = [error(data.labels, data.high, epsilon, most, seed) for seed in range(SEEDS)]
            spread = np.std(errors, ddof=1) / np.sqrt(SEEDS)
            row.append(f"{np.mean(errors) / 1e6:.4f} ± {spread / 1e6:.4f}")
        bound = ldp.optimal_bins(grid, known, epsilon).expected_loss(known)
        print(f"| {epsilon:g} | " + " | ".join(row) + f" | {bound / 1e6:.4f} |", flush=True)


if __name__ == "__main__":
    with _results.recorded(__file__, "mechanism_error"):
        main()
