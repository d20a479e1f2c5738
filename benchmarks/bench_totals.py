"""The mean of noisy labels against the true mean, and their error: do noisy numbers add up?

    python benchmarks/bench_totals.py
    python benchmarks/bench_totals.py groups    # the mean of a group, by bins and unbiased

"Before" is Algorithm 3 of ``ghazi2023``: equally spaced values, ``sqrt(k / n)`` of epsilon for the
prior, negative counts set to zero. "Now" is ``LabelRandomizer``. The number of values, the
threshold of the prior and its share of epsilon were chosen on the made-up distributions; the
insurance data confirm them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import NamedTuple

import _results
import numpy as np
from _insurance import column

import tf_labeldp as ldp
from tf_labeldp.estimation import debiased
from tf_labeldp.mechanisms import HistogramMechanism, Priors, optimal_unbiased
from tf_labeldp.mechanisms._bins import nearest_index
from tf_labeldp.plugins import histogram_prior
from tf_labeldp.vault import Numbers

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
    kind = Numbers(0.0, labels.high)
    vault = ldp.PrivateLabels(labels.values, kind, budget=budget, insecure_seed=seed)
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


def of_groups(size: int = 200_000) -> Iterator[tuple[Labels, float, np.ndarray]]:
    """Yields labels, their smallest value, and the half of them with other labels (1.5 times)."""
    rng = np.random.default_rng(0)
    group = rng.integers(0, 2, size) == 1
    scale = np.where(group, 1.5, 1.0)
    yield Labels("amounts", rng.gamma(1.0, 80.0 * scale).clip(0.0, 1000.0), 1000.0), 0.0, group
    counts = rng.poisson(0.5 * scale).clip(0, 5).astype(float)
    yield Labels("counts", counts, 5.0, True), 0.0, group
    rare = rng.poisson(0.13 * scale).clip(0, 5).astype(float)
    yield Labels("rare counts", rare, 5.0, True), 0.0, group
    claims = np.where(rng.random(size) < 0.1, rng.lognormal(6.0, 1.2, size) * scale, 0.0)
    yield Labels("zero-inflated", claims.clip(0.0, 5000.0), 5000.0), 0.0, group
    ratings = np.round(rng.normal(2.75 + 0.5 * group, 1.1)).clip(1, 5)
    yield Labels("ratings", ratings, 5.0, True), 1.0, group
    ages = rng.normal(40.0 + 10.0 * group, 15.0).clip(18.0, 90.0)
    yield Labels("ages", ages, 90.0), 18.0, group


def groups() -> None:
    """Prints the errors of the mean of a group, exactly, for labels rounded to 32 values."""
    rows = []
    for labels, low, group in of_groups():
        grid = Priors.rounding_grid(low, labels.high, 32, whole_numbers=labels.whole)
        place = nearest_index(grid, labels.values)
        prior = np.bincount(place, minlength=grid.size) / place.size
        of_group = np.bincount(place[group], minlength=grid.size) / group.sum()
        mean = of_group @ grid
        for epsilon in (1.0, 2.0, 4.0):
            bins = ldp.optimal_bins(grid, prior, epsilon)
            targets = debiased(bins, bins.outputs, Priors(prior, values=grid))
            unbiased = optimal_unbiased(grid, prior, epsilon)
            variances = []
            for channel, numbers in ((unbiased, np.array(unbiased.outputs)), (bins, targets)):
                matrix = channel.transition_matrix()
                means = matrix @ numbers
                variances.append(float(of_group @ (matrix @ numbers**2 - means**2)))
            bias = float(of_group @ (means - grid))
            cells = [labels.name, f"{epsilon:g}", f"{100 * bias / mean:+.1f}"]
            cells += [f"{math.sqrt(variance) / mean:.2f}" for variance in variances[::-1]]
            rows.append([*cells, f"{(variances[0] - variances[1]) / bias**2:,.0f}"])
    columns = [
        "labels",
        "epsilon",
        "bias of bins, %",
        "noise, bins",
        "noise, unbiased",
        "from n on",
    ]
    print(_results.markdown(columns, rows))


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
    if sys.argv[1:] == ["groups"]:
        with _results.recorded(__file__, "groups"):
            groups()
    else:
        with _results.recorded(__file__, "many", "few", "values"):
            main()
