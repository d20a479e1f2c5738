"""Speed of RRWithPrior and InformativeRR, and the information in their draws with a head's priors.

    python benchmarks/bench_rr_with_prior.py
    python benchmarks/bench_rr_with_prior.py --tables growth
    python benchmarks/bench_rr_with_prior.py --tables posteriors

Growth: processor nanoseconds per label for three numbers of labels and of classes, next to numpy's
own sort of each prior (medians of ratios over five rounds).

Times: one million labels of ten classes, each with its prior, in at most 1.5 s on two cores; memory
linear in n * K; Algorithm 2 as a loop over examples for comparison. Random bits come from the
operating system, as in practice.

Posteriors: a head on smoothed features, whose probabilities are the priors, and a draw share one
epsilon. The figures are those of the training labels, means over three draws.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import secrets
import statistics
import time

import _results
import numpy as np
from _timing import best_seconds, peak_bytes
from bench_one_release import Features

from tf_labeldp import PrivacyBudget, PrivateLabels
from tf_labeldp.estimation import posterior
from tf_labeldp.heads import PrivateLogisticRegression
from tf_labeldp.mechanisms import InformativeRR, RandomizedResponse, RRWithPrior

NUM_CLASSES = 10
EPSILON = 1.0
NUM_LABELS = 1_000_000
NUM_LOOPED = 20_000
TARGET_SECONDS = 1.5
DATA, DELTA = ("fashion_mnist", "mnist"), 1e-6
SPLITS = ((1.0, 0.3), (1.0, 0.9), (2.0, 0.3), (2.0, 0.9), (3.0, 0.15), (4.0, 0.15))
"""Epsilons, and the shares of the head; without 0.3, the defaults of ``HeadPriorRandomizer``."""


def data(num_labels: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns labels (n,) and priors (n, K) of very different certainty."""
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


def times() -> None:
    """Measures and prints a Markdown table."""
    with_prior = RRWithPrior(EPSILON, NUM_CLASSES)
    response = RandomizedResponse(EPSILON, NUM_CLASSES)
    labels, priors = data(NUM_LABELS)

    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    seconds = best_seconds(lambda: with_prior.randomize(labels, priors))
    informative = InformativeRR(EPSILON, NUM_CLASSES)
    informative_seconds = best_seconds(lambda: informative.randomize(labels, priors))
    shared_seconds = best_seconds(lambda: with_prior.randomize(labels, priors[0]))
    response_seconds = best_seconds(lambda: response.randomize(labels))
    part = labels[:NUM_LOOPED], priors[:NUM_LOOPED]
    loop_seconds = best_seconds(lambda: looped(*part))
    ratio = (loop_seconds / NUM_LOOPED) / (seconds / NUM_LABELS)

    rows = [
        ("RRWithPrior, a prior for each", f"n = {NUM_LABELS:,}", f"{seconds:.2f} s"),
        ("RRWithPrior, one prior for all", f"n = {NUM_LABELS:,}", f"{shared_seconds:.2f} s"),
        ("InformativeRR, a prior for each", f"n = {NUM_LABELS:,}", f"{informative_seconds:.2f} s"),
        ("RandomizedResponse", f"n = {NUM_LABELS:,}", f"{response_seconds:.2f} s"),
        ("Algorithm 2 as a Python loop", f"n = {NUM_LOOPED:,}", f"{loop_seconds:.2f} s"),
        ("loop against RRWithPrior, per label", f"K = {NUM_CLASSES}", f"{ratio:.0f} times slower"),
    ]
    for size in (NUM_LABELS // 4, NUM_LABELS // 2, NUM_LABELS):
        peak = peak_bytes(lambda size=size: with_prior.randomize(labels[:size], priors[:size]))
        figure = f"{peak / 2**20:.0f} MiB, {peak / (size * NUM_CLASSES):.1f} bytes per cell"
        rows.append(("memory in addition to the input, peak", f"n = {size:,}", figure))
    verdict = "met" if seconds <= TARGET_SECONDS else "MISSED"
    rows.append(("target", f"at most {TARGET_SECONDS} s", f"{verdict}: {seconds:.2f} s"))

    print("\n| What | Size | Best of 3 |\n|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


def growth(rounds: int = 5) -> None:
    """Measures and prints a Markdown table."""
    columns = ("labels", "classes", "RRWithPrior, ns a label", "numpy.sort, ns", "ratio")
    print(_results.markdown(columns, ()), flush=True)
    for num_labels, num_classes in ((200_000, 10), (400_000, 10), (10**6, 10), (10**6, 2)):
        rng = np.random.default_rng(0)
        priors = rng.dirichlet(np.ones(num_classes), num_labels)
        labels = rng.integers(0, num_classes, num_labels)
        mechanism = RRWithPrior(EPSILON, num_classes)
        pairs = []
        for _ in range(rounds):
            start = time.process_time()
            mechanism.randomize(labels, priors)
            middle = time.process_time()
            np.sort(priors, axis=1)
            pairs.append((middle - start, time.process_time() - middle))
        ours, theirs = (
            1e9 * statistics.median(each) / num_labels for each in zip(*pairs, strict=True)
        )
        ratio = statistics.median(own / sort for own, sort in pairs)
        cells = (
            f"{num_labels:,}",
            str(num_classes),
            f"{ours:.0f}",
            f"{theirs:.0f}",
            f"{ratio:.2f}",
        )
        print(f"| {' | '.join(cells)} |", flush=True)


def posteriors() -> None:
    """Measures and prints a Markdown table."""
    columns = ("data", "epsilon", "head", "whole on the head", "head's part", "RR")
    columns += ("RRWithPrior", "InformativeRR")
    print(_results.markdown(columns, ()), flush=True)
    for name in DATA:
        features = Features(name)
        labels, rows = features.data.y_train, features.get(smooth=True)[0]
        for epsilon, share in SPLITS:
            whole, priors = (head(rows, labels, part) for part in (epsilon, share * epsilon))
            cells = [name, f"{epsilon:g}", f"{share:.0%}", quality(labels, whole)]
            cells.append(quality(labels, priors))
            for kind in (RandomizedResponse, RRWithPrior, InformativeRR):
                mechanism = kind((1.0 - share) * epsilon, NUM_CLASSES)
                draw = functools.partial(
                    mechanism.randomize, labels, priors if mechanism.uses_priors else None
                )
                noisy = np.concatenate([draw(rng=np.random.default_rng(seed)) for seed in range(3)])
                soft = posterior(mechanism, noisy, np.tile(priors, (3, 1)))
                kept = np.mean(noisy == np.tile(labels, 3))
                cells.append(f"{quality(np.tile(labels, 3), soft)}, {100 * kept:.1f}")
            print(f"| {' | '.join(cells)} |", flush=True)


def head(rows: np.ndarray, labels: np.ndarray, epsilon: float) -> np.ndarray:
    """Returns the probabilities of a head on its training rows."""
    budget = PrivacyBudget(epsilon, DELTA)
    vault = PrivateLabels(labels, NUM_CLASSES, budget=budget, insecure_seed=1)
    return PrivateLogisticRegression(epsilon, DELTA).fit(rows, vault).predict_proba(rows)


def quality(labels: np.ndarray, probabilities: np.ndarray) -> str:
    """Returns the log-loss of probabilities, and the accuracy of their likeliest class."""
    at_label = probabilities[np.arange(labels.size), labels]
    right = np.mean(probabilities.argmax(axis=1) == labels)
    return f"{-np.mean(np.log(at_label)):.3f}, {100 * right:.1f}"


if __name__ == "__main__":
    tables = {"times": times, "growth": growth, "posteriors": posteriors}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", nargs="+", choices=list(tables), default=list(tables))
    for table in parser.parse_args().tables:
        with _results.recorded(__file__, table):
            tables[table]()
