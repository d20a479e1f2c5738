"""The law of each mechanism for numbers: on paper, as closed form, and as drawn."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
from numeric_cases import ADDITIVE, CONTINUOUS, DISCRETE, MECHANISMS, masses
from scipy import stats

from tf_labeldp.mechanisms import (
    DiscreteLaplaceMechanism,
    DiscreteStaircaseMechanism,
    ExponentialMechanism,
    LaplaceMechanism,
    StaircaseMechanism,
)

DRAWS = 200_000


def definition_24(i, epsilon, width, r):
    """Pr[noise = i] of the discrete staircase, by the recursion of the paper."""
    b = math.exp(-epsilon)
    a = (1 - b) / (2 * r + 2 * b * (width - r) - (1 - b))
    i = abs(i)
    if i < r:
        return a
    if i < width:
        return b * a
    k = i // width
    return math.exp(-k * epsilon) * definition_24(i - k * width, epsilon, width, r)


def definition_25(x, epsilon, width, gamma):
    """Density of the continuous staircase, by the recursion of the paper, times the width."""
    a = (1 - math.exp(-epsilon)) / (2 * (gamma + math.exp(-epsilon) * (1 - gamma)))
    x = abs(x) / width
    k = math.floor(x)
    return a * math.exp(-epsilon * (k + (x - k >= gamma))) / width


EPSILONS = (0.1, 4.0)


def test_definition_22_discrete_laplace():
    outputs = np.arange(-30, 31)
    for epsilon in EPSILONS:
        mechanism = DiscreteLaplaceMechanism(epsilon, -2, 5, clip=False)
        weights = np.exp(-np.abs(np.arange(-4000, 4001)) * epsilon / 7)
        expected = np.exp(-np.abs(outputs - 1) * epsilon / 7) / weights.sum()
        np.testing.assert_allclose(mechanism.likelihood(outputs, [1])[:, 0], expected, rtol=1e-12)


def test_definition_23_laplace():
    outputs = np.linspace(-30.0, 30.0, 101)
    for epsilon in EPSILONS:
        mechanism = LaplaceMechanism(epsilon, -3.0, 1.0, clip=False)
        law = stats.laplace(loc=-0.5, scale=4.0 / epsilon)
        found = mechanism.likelihood(outputs, [-0.5])[:, 0]
        np.testing.assert_allclose(found, law.pdf(outputs), rtol=1e-8)


@pytest.mark.parametrize("width", [1, 2, 3, 10])
def test_definition_24_discrete_staircase(width):
    noise = range(-7 * width, 7 * width + 1)
    for epsilon in EPSILONS:
        mechanism = DiscreteStaircaseMechanism(epsilon, 0, width, clip=False)
        expected = [definition_24(i, epsilon, width, mechanism.r) for i in noise]
        got = mechanism.likelihood(np.array(noise) + 1, [1])[:, 0]
        np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_definition_25_staircase():
    outputs = np.linspace(-30.0, 50.0, 1003)  # none within 1e-6 of a jump
    for epsilon in EPSILONS:
        mechanism = StaircaseMechanism(epsilon, 10.0, 14.0, clip=False)
        expected = [definition_25(out - 11.0, epsilon, 4.0, mechanism.gamma) for out in outputs]
        found = mechanism.likelihood(outputs, [11.0])[:, 0]
        np.testing.assert_allclose(found, expected, rtol=1e-8)


@pytest.mark.parametrize("label", [-1.0, -0.3, 3.0])
def test_definition_26_exponential(label):
    outputs = np.linspace(-1.0, 3.0, 101)
    for epsilon in (1e-3, 1.0, 50.0):
        mechanism = ExponentialMechanism(epsilon, -1.0, 3.0)
        law = stats.laplace(loc=label, scale=2.0 * 4.0 / epsilon)
        within = law.cdf(3.0) - law.cdf(-1.0)
        found = mechanism.likelihood(outputs, [label])[:, 0]
        np.testing.assert_allclose(found, law.pdf(outputs) / within, rtol=1e-7)


@pytest.mark.parametrize("name", DISCRETE)
@pytest.mark.parametrize("low_high", [(0, 1), (-3, 4), (10, 110)])
def test_likelihoods_of_whole_numbers_sum_to_one(name, low_high):
    low, high = low_high
    for epsilon in (1e-6, 1.0, 50.0):
        mechanism, values = MECHANISMS[name](epsilon, low, high), np.arange(low, high + 1)
        matrix = mechanism.likelihood(values, values).T
        assert matrix.shape == (values.size, values.size) and matrix.min() >= 0.0
        np.testing.assert_allclose(matrix.sum(axis=1), 1.0, rtol=0, atol=1e-12)
        np.testing.assert_allclose(matrix, matrix[::-1, ::-1], rtol=1e-12)  # no side is favoured


@pytest.mark.parametrize("name", DISCRETE)
def test_discrete_outputs_lie_on_whole_numbers(name):
    mechanism = MECHANISMS[name](1.0, 0, 4)
    likelihood = mechanism.likelihood([-1.0, -0.5, 0.0, 0.5, 4.0, 4.5, 5.0], [0, 3])
    assert np.all(likelihood[[0, 1, 3, 5, 6]] == 0.0)
    assert np.all(likelihood[[2, 4]] > 0.0)


@pytest.mark.parametrize("name", ADDITIVE)
@pytest.mark.parametrize("clip", [True, False])
def test_clipping_moves_the_tails_to_the_ends(name, clip):
    mechanism = MECHANISMS[name](1.0, 2, 9, clip)
    free = MECHANISMS[name](1.0, 2, 9, clip=False)
    labels, inside = np.arange(2, 10), np.arange(3, 9)
    same = mechanism.likelihood(inside, labels)
    np.testing.assert_array_equal(same, free.likelihood(inside, labels))
    ends = mechanism.likelihood([2, 9], labels)
    outside = mechanism.likelihood([1, 10, -1e300, 1e300], labels)
    if clip:
        tails = masses(free, labels, [-500, 2])[0], masses(free, labels, [9 - free.whole, 511])[0]
        np.testing.assert_allclose(ends, tails, rtol=1e-12 if mechanism.whole else 1e-3)
        assert np.all(outside == 0.0)
    else:
        assert np.all(outside[:2] > 0.0) and np.all(outside[2:] == 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTINUOUS)
def test_densities_and_ends_sum_to_one(name):
    labels = [-2.0, 0.7, 3.0]
    for clip in (True, False) if name in ADDITIVE else (True,):
        mechanism = MECHANISMS[name](1.0, -2.0, 3.0, clip)
        edges = np.arange(-3.0, 4.0) if clip else np.arange(-200.0, 201.0)
        np.testing.assert_allclose(masses(mechanism, labels, edges).sum(axis=0), 1.0, rtol=1e-5)


def noisy_counts(mechanism, label, rng, edges, draws=DRAWS):
    """Counts of draws in the cells between the edges, and in those at the two ends."""
    noisy = mechanism.randomize(np.full(draws, label), rng=rng)
    assert noisy.dtype == np.float64 and noisy.shape == (draws,)
    return np.bincount(np.searchsorted(edges, noisy, side="left"), minlength=edges.size + 1)


def cell_probabilities(mechanism, label, edges):
    low, high = mechanism.label_range()
    least, most = (low - 1, high) if mechanism.clip else (-500, 500)
    return masses(mechanism, [label], [least, *edges, most])[:, 0]


def disagree(counts, probabilities, p):
    """Whether counts contradict probabilities at this false alarm rate."""
    expected = counts.sum() * probabilities
    possible = expected > 1e-2  # a single grid point has next to nothing
    assert expected[possible].min() >= 5.0
    statistic = np.sum((counts - expected)[possible] ** 2 / expected[possible])
    return counts[~possible].any() or statistic > stats.chi2.isf(p, possible.sum() - 1)


CELLS = np.linspace(-1.0, 4.0, 11)  # of which -1 and 4 hold what is clipped


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("epsilon", [1.5, pytest.param(4.0, marks=pytest.mark.slow)])
def test_draws_follow_the_law_and_not_one_nearby(name, epsilon, seeded):
    cls = MECHANISMS[name]
    edges = np.arange(-1.0, 4.0) if cls.whole else CELLS[:-1]
    for label in (1, 4):  # the other end is the mirror image
        mechanism = cls(epsilon, -1, 4)
        counts = noisy_counts(mechanism, label, seeded(), edges, draws=5 * DRAWS)
        assert not disagree(counts, cell_probabilities(mechanism, label, edges), 1e-6)
        # Twice or half epsilon, which a missing factor two makes of it, and one tenth more.
        for factor in (1.1, 2.0, 0.5):
            nearby = cell_probabilities(cls(factor * epsilon, -1, 4), label, edges)
            assert disagree(counts, nearby, 1e-6), factor


@pytest.mark.parametrize("name", ADDITIVE)
def test_unclipped_draws_follow_the_law(name, seeded):
    mechanism, edges = MECHANISMS[name](0.5, 0, 4, clip=False), np.arange(-6.0, 9.0)
    counts = noisy_counts(mechanism, 1, seeded(), edges, draws=5 * DRAWS)
    assert not disagree(counts, cell_probabilities(mechanism, 1, edges), 1e-6)
    nearby = MECHANISMS[name](1.1 * 0.5, 0, 4, clip=False)
    assert disagree(counts, cell_probabilities(nearby, 1, edges), 1e-6)


@pytest.mark.parametrize("name", MECHANISMS)
def test_labels_and_noise_keep_their_places(name, seeded):
    """At an epsilon this large a label comes back to within 60 scales of the noise."""
    labels = np.random.default_rng(1).integers(-50, 51, 20_000)
    noisy = MECHANISMS[name](1e6, -50, 50).randomize(labels, rng=seeded())
    assert np.abs(noisy - labels).max() < 60 * 2 * 100 / 1e6
    many = np.tile([-50, 50], 50_000)  # of both proposals of the exponential mechanism, too
    for epsilon in (1.0, 3.0):
        noisy = MECHANISMS[name](epsilon, -50, 50).randomize(many, rng=seeded())
        assert noisy[1::2].mean() - noisy[::2].mean() > 5.0


@pytest.mark.parametrize("name", MECHANISMS)
def test_random_bits_are_the_operating_systems_unless_a_generator_is_given(
    name, monkeypatch, seeded
):
    mechanism, labels, asked = MECHANISMS[name](1.0, 0, 9), np.arange(50) % 10, []

    def counting(size, secure=os.urandom):
        asked.append(size)
        return secure(size)

    monkeypatch.setattr(os, "urandom", counting)
    mechanism.randomize(labels)
    assert sum(asked) >= 2 * 8 * labels.size
    asked.clear()
    first = mechanism.randomize(labels, rng=seeded())
    assert asked == []
    np.testing.assert_array_equal(first, mechanism.randomize(labels, rng=seeded()))


def test_an_end_that_was_cast_to_float32_is_that_end():
    """The casts of 0.1 and 0.7 lie above and below them, by many steps of the grid."""
    for end in (0.1, 0.7):
        mechanism = LaplaceMechanism(1.0, 0.0, end)
        cast = float(np.float32(end))
        assert abs(cast - end) > mechanism.step
        exact, found = mechanism.likelihood([end, cast], [0.0, end])
        np.testing.assert_array_equal(found, exact)
        assert found[1] == pytest.approx(0.5, rel=1e-6)  # the mass that is clipped to the end
