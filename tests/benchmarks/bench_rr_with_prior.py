"""Speed and memory of RRWithPrior, and its ratio to Algorithm 2 as a loop over examples.

    python tests/benchmarks/bench_rr_with_prior.py

Target: one million labels of ten classes, a prior for each, in at most 1.5 s on two cores; memory
linear in n * K. Random bits come from the operating system, as in earnest.
"""

from __future__ import annotations

import math
import os
import secrets

import _results
import numpy as np
from _timing import best_seconds, peak_bytes

from tf_labeldp.mechanisms import RandomizedResponse, RRWithPrior

NUM_CLASSES = 10
EPSILON = 1.0
NUM_LABELS = 1_000_000
NUM_LOOPED = 20_000
TARGET_SECONDS = 1.5


def data(num_labels: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns labels (n,) and a prior for each, (n, K), of very different certainty."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(num_labels, NUM_CLASSES)) * rng.uniform(0, 4, (num_labels, 1))
    priors = np.exp(logits)
    priors /= priors.sum(axis=1, keepdims=True)
    return rng.integers(0, NUM_CLASSES, num_labels), priors


def looped(labels: np.ndarray, priors: np.ndarray) -> list[int]:
    """Algorithm 2 of ``ghazi2021``, one example after another in plain Python."""
    random, grown, noisy = secrets.SystemRandom(), math.exp(EPSILON), []
    for label, prior in zip(labels.tolist(), priors.tolist(), strict=True):
        ranked = sorted(range(len(prior)), key=lambda y, prior=prior: (-prior[y], y))
        best, best_k, mass = -1.0, 0, 0.0
        for k, y in enumerate(ranked, start=1):
            mass += prior[y]
            objective = grown / (grown + k - 1) * mass
            if objective > best:
                best, best_k = objective, k
        members = ranked[:best_k]
        if label not in members:
            noisy.append(random.choice(members))
        elif random.random() < grown / (grown + best_k - 1):
            noisy.append(label)
        else:
            noisy.append(random.choice([y for y in members if y != label]))
    return noisy


def main() -> None:
    """Measures and prints a Markdown table."""
    with_prior = RRWithPrior(EPSILON, NUM_CLASSES)
    response = RandomizedResponse(EPSILON, NUM_CLASSES)
    labels, priors = data(NUM_LABELS)

    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    seconds = best_seconds(lambda: with_prior.randomize(labels, priors))
    shared_seconds = best_seconds(lambda: with_prior.randomize(labels, priors[0]))
    response_seconds = best_seconds(lambda: response.randomize(labels))
    part = labels[:NUM_LOOPED], priors[:NUM_LOOPED]
    loop_seconds = best_seconds(lambda: looped(*part))
    ratio = (loop_seconds / NUM_LOOPED) / (seconds / NUM_LABELS)

    rows = [
        ("RRWithPrior, a prior for each", f"n = {NUM_LABELS:,}", f"{seconds:.2f} s"),
        ("RRWithPrior, one prior for all", f"n = {NUM_LABELS:,}", f"{shared_seconds:.2f} s"),
        ("RandomizedResponse", f"n = {NUM_LABELS:,}", f"{response_seconds:.2f} s"),
        ("Algorithm 2 as a Python loop", f"n = {NUM_LOOPED:,}", f"{loop_seconds:.2f} s"),
        ("loop against RRWithPrior, a label", f"K = {NUM_CLASSES}", f"{ratio:.0f} times slower"),
    ]
    for size in (NUM_LABELS // 4, NUM_LABELS // 2, NUM_LABELS):
        peak = peak_bytes(lambda size=size: with_prior.randomize(labels[:size], priors[:size]))
        figure = f"{peak / 2**20:.0f} MiB, {peak / (size * NUM_CLASSES):.1f} bytes a cell"
        rows.append(("memory beside the input, peak", f"n = {size:,}", figure))
    verdict = "met" if seconds <= TARGET_SECONDS else "MISSED"
    rows.append(("target", f"at most {TARGET_SECONDS} s", f"{verdict}: {seconds:.2f} s"))

    print("\n| What | Size | Best of 3 |\n|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    with _results.recorded(__file__, "times"):
        main()
