"""The sampler draws Poisson samples: each unit with probability q, independently of the others."""

from __future__ import annotations

import os
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from tf_labeldp.plugins import PoissonSampler

REJECT = 1e-6
DRAWS = 20_000
N, Q = 10, 0.3


def members(draw: Callable[[], np.ndarray], num_units: int, draws: int = DRAWS) -> np.ndarray:
    """Returns which units were drawn, one row a draw."""
    inside = np.zeros((draws, num_units), bool)
    for row in inside:
        row[draw()] = True
    return inside


@pytest.fixture(scope="session")
def poisson() -> np.ndarray:
    rng = np.random.default_rng(1)
    sampler = PoissonSampler(N, Q)
    return members(lambda: sampler.draw(rng), N)


@pytest.fixture(scope="session")
def fixed_size() -> np.ndarray:
    rng = np.random.default_rng(1)
    return members(lambda: PoissonSampler.uniform_subset(round(N * Q), N, rng), N)


def smallest_p_value(counts: np.ndarray, probability: float) -> float:
    """Two-sided binomial tests of many counts, corrected for how many they are."""
    found = [stats.binomtest(int(c), DRAWS, probability).pvalue for c in counts.ravel()]
    return min(found) * len(found)


def size_p_value(inside: np.ndarray, probability: float) -> float:
    sizes = np.bincount(inside.sum(axis=1), minlength=N + 1)
    expected = stats.binom.pmf(np.arange(N + 1), N, probability) * DRAWS
    kept = expected > 5
    observed = np.append(sizes[kept], sizes[~kept].sum())
    wanted = np.append(expected[kept], expected[~kept].sum())
    return stats.chisquare(observed, wanted).pvalue


@pytest.mark.slow
def test_each_unit_is_in_with_probability_q(poisson: np.ndarray) -> None:
    assert smallest_p_value(poisson.sum(axis=0), Q) > REJECT
    assert smallest_p_value(poisson.sum(axis=0), 1.1 * Q) < REJECT


@pytest.mark.slow
def test_units_are_independent(poisson: np.ndarray, fixed_size: np.ndarray) -> None:
    pairs = list(combinations(range(N), 2))

    def joint(inside: np.ndarray) -> np.ndarray:
        return np.array([np.count_nonzero(inside[:, i] & inside[:, j]) for i, j in pairs])

    assert smallest_p_value(joint(poisson), Q**2) > REJECT
    assert smallest_p_value(fixed_size.sum(axis=0), Q) > REJECT  # alone, each is as it should be
    assert smallest_p_value(joint(fixed_size), Q**2) < REJECT


def test_sizes_are_binomial(poisson: np.ndarray, fixed_size: np.ndarray) -> None:
    assert size_p_value(poisson, Q) > REJECT
    assert size_p_value(poisson, 1.05 * Q) < REJECT
    assert size_p_value(fixed_size, Q) < REJECT


@pytest.mark.slow
def test_the_draw_without_a_seed_is_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "urandom", np.random.default_rng(3).bytes)
    sampler = PoissonSampler(N, Q)
    inside = members(lambda: sampler.draw(None), N)
    assert smallest_p_value(inside.sum(axis=0), Q) > REJECT
    assert size_p_value(inside, Q) > REJECT


@pytest.mark.parametrize("size", [0, 3, 5])
def test_every_subset_of_a_size_is_as_likely(size: int) -> None:
    rng = np.random.default_rng(5)
    inside = members(lambda: PoissonSampler.uniform_subset(size, 7, rng), 7, 5000)
    seen = dict.fromkeys(combinations(range(7), size), 0)
    for row in inside:
        seen[tuple(np.flatnonzero(row))] += 1
    assert len(seen) == 1 or stats.chisquare(list(seen.values())).pvalue > REJECT


@pytest.mark.parametrize("size", [0, 51])
def test_subsets_are_increasing_rows_in_range(size: int) -> None:
    rows = PoissonSampler.uniform_subset(size, 100, np.random.default_rng(0))
    assert rows.shape == (size,) and rows.dtype == np.int64
    assert np.all(np.diff(rows) > 0) and np.all((rows >= 0) & (rows < 100))


@pytest.mark.parametrize(
    ("n", "q"), [(2, 0.5), (5, 0.3), (300, 0.3), (300, 1e-3), (5, 1.0 - 2.0**-53), (300, 5e-324)]
)
@pytest.mark.holds("data.PoissonSampler")
def test_inclusion_given_the_others_is_at_most_q(n: int, q: float) -> None:
    sampler = PoissonSampler(n, q)
    first, weights = sampler.first, sampler.weights
    table = dict(enumerate(weights, start=first))
    exact = Fraction(q)
    for others in range(n):
        without, with_one = table.get(others, 0), table.get(others + 1, 0)
        # Weights are of counts; a set of k units has its share w[k] / comb(n, k).
        odds = Fraction(with_one * (others + 1), without * (n - others)) if without else 0
        assert without or not with_one
        assert odds <= exact / (1 - exact)
        # Below: where counts are not rarer than 2^-64, nothing to speak of is lost.
        if min(without, with_one) > max(weights) >> 64:
            assert odds >= exact / (1 - exact) * (1 - Fraction(1, 2**120))


@pytest.mark.holds("data.PoissonSampler")
def test_rounding_to_nearest_would_pass_q() -> None:
    """The bound above is not slack: with ordinary rounding it fails."""
    exact = Fraction(0.3)
    ideal = [
        Fraction(1 << 20) * stats.binom.pmf(k, 50, 0.3) / stats.binom.pmf(15, 50, 0.3)
        for k in range(51)
    ]
    table = [round(w) for w in ideal]
    odds = [
        Fraction(table[k + 1] * (k + 1), table[k] * (50 - k)) for k in range(50) if table[k] > 0
    ]
    assert max(odds) > exact / (1 - exact)


@pytest.mark.parametrize(("n", "q"), [(60_000, 1024 / 60_000), (40, 0.9), (7, 1.0)])
def test_the_default_buffer_is_just_large_enough(n: int, q: float) -> None:
    sampler = PoissonSampler(n, q)
    assert sampler.buffer_size % 8 == 0
    assert stats.binom.sf(sampler.buffer_size, n, q) <= 1e-3
    assert sampler.buffer_size == 8 or stats.binom.sf(sampler.buffer_size - 8, n, q) > 1e-3


@pytest.mark.parametrize("buffer_size", [25, 30])
def test_overflow_is_counted(buffer_size: int) -> None:
    sampler = PoissonSampler(100, 0.25, buffer_size)
    wanted = stats.binom.sf(buffer_size, 100, 0.25)
    assert sampler.overflow_probability == pytest.approx(wanted, rel=1e-9)
    rng = np.random.default_rng(2)
    sizes = np.array([sampler.draw(rng).size for _ in range(2000)])
    assert sizes.max() <= buffer_size
    emptied = int(np.count_nonzero(sizes == 0))  # no sample is empty by itself: 0.75^100
    assert stats.binomtest(emptied, 2000, min(wanted, 1.0)).pvalue > REJECT


def test_probability_one_takes_all() -> None:
    for buffer_size, expected in ((None, np.arange(12)), (12, np.arange(12)), (11, [])):
        drawn = PoissonSampler(12, 1.0, buffer_size).draw(None)
        np.testing.assert_array_equal(drawn, expected)
