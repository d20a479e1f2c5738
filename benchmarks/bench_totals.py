"""The mean of noisy labels against the true mean, and their error: do noisy numbers add up?

    python benchmarks/bench_totals.py

"Before" is Algorithm 3 of ``ghazi2023``: equally spaced values, ``sqrt(k / n)`` of epsilon for the
prior, negative counts set to zero. "Now" is ``LabelRandomizer``. The number of values, the
threshold of the prior and its share of epsilon were chosen on the made-up distributions; the
insurance data confirm them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import _results
import numpy as np
from _insurance import column

import tf_labeldp as ldp
from tf_labeldp.estimation import debiased
from tf_labeldp.estimation.priors import histogram_prior
from tf_labeldp.mechanisms import HistogramMechanism, Priors

EPSILONS = (0.5, 1.0, 2.0, 4.0)
SIZES = (100_000, 10_000)
MOST = (16, 32, 64, 128, 256)
SEEDS = 20
REAL = (("pg15training", "Indtppd", 5000.0), ("beMTPL97", "amount", 20_000.0))


class Labels(NamedTuple):
    """Labels from zero to a public maximum."""

    name: str
    values: np.ndarray
    high: float
    whole: bool = False


def made_up(size: int) -> Iterator[Labels]:
    """Yields labels of six distributions."""
    rng = np.random.default_rng(0)
    yield Labels("amounts", rng.gamma(1.0, 80.0, size).clip(0.0, 2000.0), 2000.0)
    yield Labels("counts", rng.poisson(0.15, size).clip(0, 20).astype(float), 20.0, True)
    claims = np.where(rng.random(size) < 0.1, rng.lognormal(6.0, 1.2, size), 0.0)
    yield Labels("zero-inflated", claims.clip(0.0, 5000.0), 5000.0)
    yield Labels("heavy tail", (20.0 * rng.pareto(1.5, size)).clip(0.0, 10_000.0), 10_000.0)
    yield Labels("uniform", rng.uniform(0.0, 100.0, size), 100.0)
    peaks = np.where(rng.random(size) < 0.3, rng.normal(80, 4, size), rng.normal(20, 5, size))
    yield Labels("two peaks", peaks.clip(0.0, 100.0), 100.0)


def real() -> Iterator[Labels]:
    """Yields amounts of claims: for all policies, mostly zero, and for claims alone."""
    for file, name, high in REAL:
        values = column(file, name)
        yield Labels(f"{file}, {name}", values.clip(0.0, high), high)
        if name == "amount":
            claims = values[values > 0.0].clip(0.0, 4158.3)
            yield Labels(f"{file}, claims alone", claims, 4158.3)


def before(labels: Labels, epsilon: float, seed: int) -> list[np.ndarray]:
    """Returns noisy and debiased labels by Algorithm 3."""
    rng = np.random.default_rng([1, seed])
    size = len(labels.values)
    most = min(64, max(16, int(size * epsilon**2 / 4.0)))
    number = int(labels.high) + 1 if labels.whole else most
    values = np.linspace(0.0, labels.high, number)
    for_prior = min(math.sqrt(number / size), epsilon / 2.0)
    histogram = HistogramMechanism(for_prior, values=tuple(values.tolist()))
    prior = histogram_prior(histogram.release(labels.values, rng=rng))
    bins = ldp.optimal_bins(values, prior, epsilon - for_prior)
    noisy = bins.randomize(labels.values, rng=rng)
    return [noisy, debiased(bins, noisy, Priors(prior, values=values))]


def now(labels: Labels, epsilon: float, seed: int, most: int = 64) -> list[np.ndarray]:
    """Returns noisy and debiased labels."""
    budget = ldp.PrivacyBudget(epsilon)
    vault = ldp.PrivateLabels(
        labels.values, low=0.0, high=labels.high, budget=budget, insecure_seed=seed
    )
    noisy = vault.randomize(
        ldp.LabelRandomizer(epsilon, max_values=most, whole_numbers=labels.whole)
    )
    return [noisy.values, noisy.debiased()]


def figures(labels: Labels, draws: list[list[np.ndarray]]) -> list[str]:
    """Returns bias of the mean in percent, noisy and debiased, and MSE over the variance."""
    truth = labels.values
    means = np.array([[part.mean() for part in draw] for draw in draws]) / truth.mean() - 1.0
    errors = 100.0 * means.std(axis=0, ddof=1) / math.sqrt(len(draws))
    cells = [
        f"{mean:+.1f} ± {error:.1f}"
        for mean, error in zip(100.0 * means.mean(axis=0), errors, strict=True)
    ]
    loss = np.mean([np.mean(np.square(noisy - truth)) for noisy, _ in draws]) / truth.var()
    return [*cells, f"{loss:.3f}"]


def main() -> None:
    """Prints the tables."""
    kinds = [f"{what}, {when}" for when in ("before", "now") for what in ("noisy", "debiased")]
    columns = ["labels", "epsilon", *kinds[:2], "error, before", *kinds[2:], "error, now"]
    for size in SIZES:
        rows = []
        for labels in [*made_up(size), *(real() if size == max(SIZES) else ())]:
            for epsilon in EPSILONS:
                cells = [labels.name, f"{epsilon:g}"]
                for way in (before, now):
                    cells += figures(labels, [way(labels, epsilon, seed) for seed in range(SEEDS)])
                rows.append(cells)
        print(_results.markdown(columns, rows), flush=True)
        print()
    rows = []
    for labels in [*made_up(max(SIZES)), *real()]:
        cells = [labels.name]
        for most in MOST:
            draws = [now(labels, 1.0, seed, most) for seed in range(SEEDS)]
            noisy, _, loss = figures(labels, draws)
            cells.append(f"{noisy} / {loss}")
        if not labels.whole:
            rows.append(cells)
    print(_results.markdown(["labels", *map(str, MOST)], rows))


if __name__ == "__main__":
    with _results.recorded(__file__, "many", "few", "values"):
        main()
