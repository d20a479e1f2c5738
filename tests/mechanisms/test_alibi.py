"""ALIBI: the law of the noise, its privacy, the vault, published numbers, bad input."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from tf_labeldp.accounting import Charge
from tf_labeldp.mechanisms import (
    ALIBI,
    integer_noise,
    random_bits,
)
from tf_labeldp.plugins import discrete_gaussian, gaussian_epsilon, geometric

LAPLACE = ALIBI(epsilon=1.0, num_classes=5)
GAUSSIAN = ALIBI(epsilon=1.0, num_classes=5, delta=1e-5, noise="gaussian")
BOTH = pytest.mark.parametrize("mechanism", [LAPLACE, GAUSSIAN], ids=["laplace", "gaussian"])
LABELS = np.random.default_rng(7).integers(0, 5, 20_000)


def noise_of(mechanism, rng=None, labels=LABELS):
    """The noise on every entry, of labels that the test knows."""
    return mechanism.randomize(labels, rng=rng) - np.eye(mechanism.num_classes)[labels]


@pytest.mark.parametrize("secure", [True, False])
@pytest.mark.parametrize(
    ("mechanism", "law"),
    [(LAPLACE, stats.laplace), (GAUSSIAN, stats.norm)],
    ids=["laplace", "gaussian"],
)
def test_every_entry_has_the_noise_that_is_stated(mechanism, law, secure):
    """One false alarm in 10^6, at a distance of 0.0085 for 100,000 draws.

    A scale that is 10 % off moves a distribution function by 0.018 or more, a centre that is 5 %
    of the noise off by 0.020 or more: twice that.
    """
    rng = None if secure else np.random.default_rng(11)
    noise = noise_of(mechanism, rng).ravel()
    assert stats.kstest(noise, law(scale=mechanism.scale).cdf).pvalue > 1e-6
    assert stats.kstest(noise, law(scale=1.1 * mechanism.scale).cdf).pvalue < 1e-6
    assert stats.kstest(noise, law(scale=0.9 * mechanism.scale).cdf).pvalue < 1e-6
    off = 0.05 * mechanism.noise_stddev
    assert stats.kstest(noise, law(loc=off, scale=mechanism.scale).cdf).pvalue < 1e-6


@BOTH
def test_the_noise_of_all_entries_is_independent(mechanism):
    """Correlations of n pairs have a standard deviation of 1 / sqrt(n)."""
    noise = noise_of(mechanism, np.random.default_rng(12))
    limit = 6.0 / math.sqrt(LABELS.size)
    between = np.corrcoef(noise, rowvar=False)[np.triu_indices(5, 1)]
    assert np.max(np.abs(between)) < limit
    assert abs(np.corrcoef(noise[1:, 0], noise[:-1, 0])[0, 1]) < limit


@pytest.mark.parametrize("sigma", [1, 7, 1 << 26])
def test_discrete_gaussian_draws_follow_their_law(sigma, chi_square_rejects):
    drawn = discrete_gaussian(200_000, sigma, np.random.default_rng(14))
    assert drawn.dtype == np.int64
    if sigma < 100:  # every number is a cell, the tails are one each
        support = np.arange(-12 * sigma, 12 * sigma + 1)

        def cells(scale):
            weights = np.exp(-(support**2) / (2.0 * scale**2))
            weights /= weights.sum()
            middle = np.abs(support) <= 2 * sigma
            low, high = weights[support < -2 * sigma].sum(), weights[support > 2 * sigma].sum()
            return np.concatenate([[low], weights[middle], [high]])

        clipped = np.clip(drawn, -2 * sigma - 1, 2 * sigma + 1) + 2 * sigma + 1
        counts = np.bincount(clipped, minlength=4 * sigma + 3)
        assert not chi_square_rejects(counts, cells(sigma))
        assert chi_square_rejects(counts, cells(1.03 * sigma))
        # A second way to draw 0 (as -0) would show.
        wrong = cells(sigma)
        wrong[2 * sigma + 1] *= 2.0
        assert chi_square_rejects(counts, wrong / wrong.sum())
    else:
        assert stats.kstest(drawn / sigma, stats.norm.cdf).pvalue > 1e-6
        assert stats.kstest(drawn / (1.1 * sigma), stats.norm.cdf).pvalue < 1e-6


def test_discrete_gaussian_accepts_with_the_exact_chance(monkeypatch):
    """Algorithm 3: the proposal's weight times the chance to keep it is e^(-y^2 / 2s^2 - 1/2)."""
    rests, wholes = [], []

    class Count:
        def __ge__(self, whole):
            wholes.extend(whole.tolist())
            return np.ones(whole.size, dtype=bool)

    def record(numerators, denominator, rng):
        rests.extend(Fraction(int(n), denominator) for n in numerators)
        return np.ones(numerators.size, dtype=bool)

    draws = {Fraction(1, 3): np.arange(12), Fraction(1): Count()}
    monkeypatch.setattr(integer_noise, "geometric", lambda size, decay, rng: draws[decay])
    monkeypatch.setattr(
        random_bits, "uniform_below", lambda bounds, rng: np.zeros(bounds.size, int)
    )
    monkeypatch.setattr(integer_noise, "bernoulli_exp", record)
    discrete_gaussian(12, 3, None)
    for y, (rest, whole) in enumerate(zip(rests, wholes, strict=True)):
        assert 0 <= rest < 1
        assert Fraction(y, 3) + rest + whole == Fraction(y * y, 18) + Fraction(1, 2)


def test_the_largest_squares_fit_64_bits():
    far = np.array([integer_noise._FARTHEST])
    assert far[0] ** 2 == int(far[0]) ** 2 > 0
    assert far[0] / integer_noise.MAX_SIGMA > 45.0
    assert 2 * integer_noise.MAX_SIGMA**2 <= 1 << 53


@pytest.mark.parametrize("epsilon", [1e-6, math.pi, 1e6])
@pytest.mark.holds("mechanisms.ALIBI")
def test_laplace_rows_are_private_by_the_law_that_is_drawn(epsilon, monkeypatch):
    """The worst log-ratio of two neighbours is 2 m times the decay that the sampler is given.

    m = 2^31 steps of the grid are a unit: every entry is a whole number of them.
    """
    given = []
    original = geometric

    def record(size, decay, rng):
        given.append(decay)
        return original(size, decay, rng)

    monkeypatch.setattr(integer_noise, "geometric", record)
    noisy = ALIBI(epsilon, 3).randomize(np.array([0, 1]))
    unit = 1 << 31
    steps = noisy * np.float64(unit)
    np.testing.assert_array_equal(steps, np.rint(steps))
    worst = 2 * unit * given[0]  # two entries move by m steps each, towards and away from the draw
    assert worst <= Fraction(epsilon)
    assert float(worst) == pytest.approx(epsilon, rel=1e-9)


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 4.0, 1e6])
@pytest.mark.parametrize("delta", [1e-300, 1e-5, 1.0 - 1e-16])
@pytest.mark.holds("mechanisms.ALIBI")
def test_gaussian_noise_is_calibrated_for_what_is_drawn(epsilon, delta, monkeypatch):
    """The margin for discrete noise is kept, sigma is whole, and hardly more than necessary."""
    sigmas = []

    def record(size, sigma, rng):
        sigmas.append(sigma)
        return np.zeros(size, np.int64)

    monkeypatch.setattr(integer_noise, "discrete_gaussian", record)
    mechanism = ALIBI(epsilon, 3, delta, "gaussian")
    assert mechanism.randomize([2]).tolist() == [[0.0, 0.0, 1.0]]  # exactly one unit is added
    (sigma,) = sigmas
    assert isinstance(sigma, int) and 1 << 24 < sigma <= 1 << 26
    assert 2.0 * 70.0 * 2 / sigma**2 <= 1e-9 * min(epsilon, 1.0)
    assert (sigma / mechanism.scale).is_integer()
    found = gaussian_epsilon(mechanism.scale, delta, math.sqrt(2.0))
    assert found < epsilon
    if 1e-3 < epsilon < 1e3 and delta < 0.4:
        assert found == pytest.approx(epsilon, rel=1e-6)
        assert gaussian_epsilon(0.999 * mechanism.scale, delta, math.sqrt(2.0)) > epsilon


@pytest.mark.parametrize(("sigma", "epsilon"), [(1.0, 6.57297007), (5.0, 1.06078976)])
def test_gaussian_sigma_of_the_oracles(sigma, epsilon):
    mechanism = ALIBI(epsilon, 10, 1e-5, "gaussian")
    assert mechanism.scale == mechanism.noise_stddev == pytest.approx(sigma, rel=1e-6)


@pytest.mark.parametrize(
    ("epsilon", "sigma", "scale"),
    [
        (0.5, 5.65685425, 4.0),
        (8.0, 0.353553391, 0.25),
    ],
)
def test_laplace_scale_of_the_oracles(epsilon, sigma, scale):
    """The published program takes the standard deviation, ``--sigma``."""
    mechanism = ALIBI(epsilon, 10)
    assert mechanism.scale == scale
    assert mechanism.noise_stddev == pytest.approx(sigma, rel=1e-6)


def test_the_events_say_what_the_mechanism_says():
    laplace, gaussian = (
        Charge.of_event(mechanism.dp_event(), mechanism.delta) for mechanism in (LAPLACE, GAUSSIAN)
    )
    assert laplace.epsilon == pytest.approx(1.0, abs=1e-9)
    assert gaussian.epsilon == pytest.approx(1.0, rel=1e-3)


def test_no_row_depends_on_another_label():
    other = LABELS.copy()
    other[0] = (other[0] + 1) % 5
    one, two = (LAPLACE.randomize(y, rng=np.random.default_rng(1)) for y in (LABELS, other))
    np.testing.assert_array_equal(one[1:], two[1:])
    differing = np.flatnonzero(one[0] != two[0])
    assert sorted(differing.tolist()) == sorted([int(LABELS[0]), int(other[0])])
    np.testing.assert_allclose(np.abs(one[0] - two[0])[differing], 1.0, atol=1e-5)


@BOTH
def test_shape_dtype_and_repeatability(mechanism):
    first, second, other = (
        mechanism.randomize(LABELS[:50], rng=np.random.default_rng(seed)) for seed in (1, 1, 2)
    )
    assert first.shape == (50, 5) and first.dtype == np.float32
    np.testing.assert_array_equal(first, second)
    assert np.all(first != other)
    assert np.all(mechanism.randomize(LABELS[:50]) != mechanism.randomize(LABELS[:50]))
    assert mechanism.randomize(LABELS[:0]).shape == (0, 5)
    assert mechanism.randomize(LABELS[:1].astype(np.uint8)).shape == (1, 5)
    with pytest.raises(TypeError, match=r"rng must be a numpy\.random\.Generator or None"):
        mechanism.randomize(LABELS[:0], rng=np.random.RandomState(0))


def test_chunks_give_every_row_its_own_label():
    """Of 2^20 entries each, so that the last rows are in another one than the first."""
    labels = np.arange(1100) % 1000
    noisy = ALIBI(1e6, 1000).randomize(labels)
    np.testing.assert_array_equal(noisy.argmax(axis=1), labels)
    np.testing.assert_allclose(noisy[[0, 1099], labels[[0, 1099]]], 1.0, atol=0.05)
    assert np.mean(noisy[:50] == noisy[1050:]) < 0.01


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"delta": 1e-5}, ValueError, "laplace noise needs delta equal to zero"),
        ({"noise": "gaussian"}, ValueError, "gaussian noise needs delta above zero"),
        ({"noise": "normal"}, ValueError, "noise must be one of laplace, gaussian, got 'normal'"),
        ({"delta": 1.0, "noise": "gaussian"}, ValueError, r"delta must be in \[0, 1\)"),
        ({"num_classes": 1}, ValueError, "num_classes must be at least 2"),
        ({"epsilon": 9e-7}, ValueError, r"epsilon must be in \[1e-06, 1e\+06\] for laplace"),
        ({"epsilon": 1.1e6}, ValueError, r"epsilon must be in \[1e-06, 1e\+06\] for laplace"),
        (
            {"epsilon": 9e-4, "delta": 1e-5, "noise": "gaussian"},
            ValueError,
            r"epsilon must be in \[0\.001, 1e\+06\] for gaussian",
        ),
    ],
)
def test_bad_settings(settings, error, message):
    with pytest.raises(error, match=message):
        ALIBI(**{"epsilon": 1.0, "num_classes": 3, **settings})


@pytest.mark.parametrize(
    ("noisy", "message"),
    [
        (np.zeros((2, 5), np.float32), r"shape \(2, 5\), expected \(3, 5\)"),
        (np.zeros((3, 5), np.int64), "dtype int64, expected numbers"),
        (np.full((3, 5), 1e3 * np.nan), "NaN or infinity, expected finite numbers"),
    ],
)
def test_outputs_that_are_no_noisy_rows_are_refused_and_not_shown(noisy, message):
    with pytest.raises(ValueError, match=f"ALIBI returned noisy labels with {message}"):
        LAPLACE.check_output(noisy, 3)
    assert LAPLACE.check_output(np.zeros((3, 5)), 3).dtype == np.float32
