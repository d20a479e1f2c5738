"""Emptying batches that overflow keeps the subsampled guarantee; cutting them would not.

Steps are enumerated: n examples with gradients -1 or 1 (their labels), clip 1, noise sigma. A step
is a mixture of normals, one for each batch, and is compared with the pair that is accounted for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations, product

import numpy as np
import pytest
from scipy import stats

from tf_labeldp.plugins import PoissonSampler

N, Q, BUFFER, SIGMA = 4, 0.5, 2, 1.0
EPSILONS = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0)
GRID = np.linspace(-15.0, 15.0, 6001)
STEP = GRID[1] - GRID[0]
# A sum over a grid is exact to float precision for normals, and to STEP^2 where the two cross.
SLACK = STEP**2

Batch = tuple[int, ...]
Overflow = Callable[[Batch], Batch]


def emptied(batch: Batch) -> Batch:
    return batch if len(batch) <= BUFFER else ()


def cut(batch: Batch) -> Batch:
    return batch[:BUFFER]


def batch_probabilities(units: Sequence[int], overflow: Overflow) -> dict[Batch, float]:
    found: Counter[Batch] = Counter()
    for size in range(len(units) + 1):
        for batch in combinations(units, size):
            found[overflow(batch)] += Q**size * (1 - Q) ** (len(units) - size)
    return dict(found)


def density(batches: dict[Batch, float], gradients: Sequence[int]) -> np.ndarray:
    sums: Counter[int] = Counter()
    for batch, probability in batches.items():
        sums[sum(gradients[i] for i in batch)] += probability
    return sum(p * stats.norm.pdf(GRID, mean, SIGMA) for mean, p in sums.items())


def delta(left: np.ndarray, right: np.ndarray, epsilon: float) -> float:
    """The hockey-stick divergence: the least delta for an epsilon."""
    return float(np.maximum(left - math.exp(epsilon) * right, 0.0).sum() * STEP)


def mixture(mean: float) -> np.ndarray:
    base, shifted = stats.norm.pdf(GRID, 0.0, SIGMA), stats.norm.pdf(GRID, mean, SIGMA)
    return (1 - Q) * base + Q * shifted


REPLACED = (mixture(1.0), mixture(-1.0))
ADDED = (mixture(1.0), mixture(0.0))
REMOVED = (mixture(0.0), mixture(1.0))


def worst_excess_under_replacement(overflow: Overflow) -> float:
    """How far a step passes the pair of replacement, over labels, examples and epsilons."""
    batches = batch_probabilities(range(N), overflow)
    densities = {g: density(batches, g) for g in product((-1, 1), repeat=N)}
    excess = []
    for gradients, here in densities.items():
        for i in range(N):
            there = densities[(*gradients[:i], -gradients[i], *gradients[i + 1 :])]
            excess += [delta(here, there, e) - delta(*REPLACED, e) for e in EPSILONS]
    return max(excess)


@pytest.mark.holds("data.poisson_batches")
def test_an_emptied_batch_keeps_the_guarantee_under_replacement() -> None:
    assert worst_excess_under_replacement(emptied) <= SLACK


@pytest.mark.holds("data.poisson_batches")
def test_cutting_the_batch_would_break_it() -> None:
    assert worst_excess_under_replacement(cut) > 10 * SLACK


def test_it_does_not_stand_under_add_or_remove() -> None:
    gradients = (1, 1, 1, -1)
    with_it = density(batch_probabilities(range(N), emptied), gradients)
    without = density(batch_probabilities(range(N - 1), emptied), gradients)
    excess = [delta(with_it, without, e) - delta(*ADDED, e) for e in EPSILONS]
    excess += [delta(without, with_it, e) - delta(*REMOVED, e) for e in EPSILONS]
    assert max(excess) > 10 * SLACK


def test_given_the_others_the_label_counts_with_probability_q_or_never() -> None:
    for i in range(N):
        others = [j for j in range(N) if j != i]
        for size in range(N):
            for rest in combinations(others, size):
                with_it = emptied(tuple(sorted((*rest, i))))
                without = emptied(rest)
                # Either i joins an otherwise unchanged batch (with probability q), or no outcome
                # has i in it.
                joins = set(with_it) == {*without, i} and len(rest) < BUFFER
                assert joins or (i not in with_it and i not in without)


@pytest.mark.parametrize(("overflow", "is_ours"), [(emptied, True), (cut, False)])
def test_the_sampler_empties_batches_that_overflow(overflow: Overflow, is_ours: bool) -> None:
    draws = 10_000
    rng = np.random.default_rng(9)
    sampler = PoissonSampler(N, Q, BUFFER)
    drawn = Counter(tuple(sampler.draw(rng).tolist()) for _ in range(draws))
    wanted = batch_probabilities(range(N), overflow)
    assert set(drawn) == set(wanted)
    expected = [wanted[batch] * draws for batch in wanted]
    p_value = stats.chisquare([drawn[batch] for batch in wanted], expected).pvalue
    assert (p_value > 1e-6) == is_ours
