"""One test for each guarantee that the docstrings of the mechanisms for numbers state."""

from __future__ import annotations

import decimal
from fractions import Fraction

import numpy as np
import pytest
from numeric_cases import ADDITIVE, CONTINUOUS, MECHANISMS, masses

from tf_labeldp.mechanisms import (
    StaircaseMechanism,
    integer_noise,
)
from tf_labeldp.plugins import EventFields

DRAWN_EPSILONS = (1e-6, 0.05, 1 / 3, 1.0, 2.5, 8.0, 50.0, 700.1)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.holds("mechanisms.RegressionMechanism")
def test_no_set_of_outputs_reveals_more_than_epsilon(name, worst_log_ratio):
    """For intervals, half-lines and the ends."""
    edges, labels = np.arange(-3.0, 5.0), np.arange(-3.0, 5.0)
    for epsilon in (0.1, 4.0):
        mechanism = MECHANISMS[name](epsilon, -3, 4)
        assert mechanism.dp_event() == EventFields.randomized_response(epsilon).dp_event()
        cells = masses(mechanism, labels, [-4.0, *edges])[0 if mechanism.whole else 1 :]
        sums = np.vstack([cells, np.cumsum(cells, axis=0), np.cumsum(cells[::-1], axis=0)])
        assert worst_log_ratio(sums.T) <= epsilon * (1 + 1e-10)


def power_of_e(exponent):
    """e^exponent for a Fraction, to 80 digits."""
    context = decimal.Context(prec=90)
    top, bottom = (decimal.Decimal(n) for n in exponent.as_integer_ratio())
    return Fraction(context.exp(context.divide(top, bottom)))


NOTHING = Fraction(1, 10**70)
"""Above the relative error of ``power_of_e`` for the exponents here, far below 2^-53."""


@pytest.mark.parametrize("steps", [1, 3, 10**6 + 3, 2**32])
@pytest.mark.holds("mechanisms.DiscreteLaplaceMechanism", "mechanisms.LaplaceMechanism")
def test_the_drawn_laplace_noise_is_epsilon_dp(steps):
    """Its ratio over a shift by N is exp(N s / t), for the integers s and t that it draws with."""
    for epsilon in DRAWN_EPSILONS:
        decay = integer_noise.decay_per_step(epsilon, steps)
        assert decay * steps <= Fraction(epsilon)
        # From the other side: no privacy is given away either, and the formula stays true.
        assert decay * steps >= Fraction(epsilon) * (1 - Fraction(1, 2**50))
        # 64-bit integers hold u + t v for v up to 1000, and so the noise.
        assert 1 <= decay.numerator <= 2**53 and 1 <= decay.denominator <= 2**53
        assert 1001 * decay.denominator < 2**63 and 1001 / float(decay) + steps < 2**63


def drawn_staircase(noise):
    """c, the lower over the upper weight within a stair, and the decay a stair, as drawn."""
    below = Fraction(noise.lower_threshold(), 1 << 53)
    rest = noise.steps - noise.first
    c = (below / rest) / ((1 - below) / noise.first) if rest else Fraction(1)
    return c, integer_noise.decay_per_step(noise.epsilon, 1)


def weight(noise, c, x):
    """w(u) and v of |x| = u + N v."""
    v, u = divmod(abs(x), noise.steps)
    return (Fraction(1) if u < noise.first else c), v


@pytest.mark.parametrize("epsilon", [1e-6, 1 / 3, 8.0, 700.1])
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.holds("mechanisms.DiscreteStaircaseMechanism", "mechanisms.StaircaseMechanism")
def test_the_drawn_staircase_noise_is_epsilon_dp(epsilon, steps):
    """Every pair of a small noise and its shift by up to N, for every width of the upper part."""
    limit = power_of_e(Fraction(epsilon))
    for first in range(1, steps + 1):
        noise = integer_noise.StaircaseNoise(epsilon, steps, first)
        c, decay = drawn_staircase(noise)
        stair = power_of_e(decay)
        worst = Fraction(0)
        for x in range(-2 * steps, 2 * steps + 1):
            for shift in range(-steps, steps + 1):
                (one, v), (other, v_other) = (weight(noise, c, z) for z in (x, x + shift))
                worst = max(worst, one / other * stair ** (v_other - v))
        assert worst <= limit * (1 + NOTHING)
        assert worst >= limit * (1 - Fraction(1, 10**9)) or epsilon > 20.0


@pytest.mark.parametrize("epsilon", DRAWN_EPSILONS)
def test_the_drawn_stairs_fall_by_at_most_epsilon(epsilon):
    """e^-epsilon <= c <= 1, which is all that the argument needs of a wide range."""
    for steps, first in ((400, 1), (400, 200), (2**32, 2**32 // 3 + 1), (2**32, 2**32 - 1)):
        c, decay = drawn_staircase(integer_noise.StaircaseNoise(epsilon, steps, first))
        assert power_of_e(-Fraction(epsilon)) * (1 - NOTHING) <= c <= 1
        assert decay <= Fraction(epsilon)
    first = round(StaircaseMechanism(epsilon, 0.0, 1.0).gamma * 2**32)
    c, _ = drawn_staircase(integer_noise.StaircaseNoise(epsilon, 2**32, first))
    assert power_of_e(-Fraction(epsilon)) * (1 - NOTHING) <= c <= 1
    if epsilon < 5.0:  # and not for less than a part in 10^12
        assert c <= power_of_e(-Fraction(epsilon)) * (1 + Fraction(1, 10**12))


def test_the_callers_decimal_precision_changes_nothing():
    noise = integer_noise.StaircaseNoise(0.1, 400, 190)
    right = noise.lower_threshold()
    with decimal.localcontext() as context:
        context.prec, context.rounding = 3, decimal.ROUND_DOWN
        assert noise.lower_threshold() == right


@pytest.mark.parametrize(("epsilon", "steps"), [(0.1, 1), (1.0, 2), (4.0, 40)])
@pytest.mark.holds("mechanisms.ExponentialMechanism")
def test_the_drawn_exponential_mechanism_is_half_epsilon_dp(epsilon, steps):
    """Its law is q^|out - y| over the sum of it, with the q that is drawn; all pairs, exactly.

    The mechanism itself runs on 2^32 steps; nothing in the argument depends on their number.
    """
    decay = integer_noise.decay_per_step(0.5 * epsilon, steps)
    powers = [power_of_e(-decay * n) for n in range(steps + 1)]
    columns = []
    for label in range(steps + 1):
        row = [powers[abs(out - label)] for out in range(steps + 1)]
        columns.append([value / sum(row) for value in row])
    worst = max(max(out) / min(out) for out in zip(*columns, strict=True))
    assert worst <= power_of_e(Fraction(epsilon) / 2) * (1 + NOTHING)
    assert worst >= power_of_e(Fraction(epsilon) / 2) * (1 - Fraction(1, 10**12))


def test_uniform_proposals_keep_within_what_bernoulli_exp_takes():
    for epsilon in (1e-6, 0.1, 1.0, 2.0):
        decay = integer_noise.decay_per_step(0.5 * epsilon, 2**32)
        assert 2**32 * decay.numerator <= decay.denominator <= 2**53


AWKWARD_RANGES = (
    (0.1, 0.3),
    (-1e-290, 1e-290),
    (1e9, 1e9 + 1.0),
    (-1e289, 1e289),
    (1.0, 1.0 + 2**-52),
    (-2.2, 5.82),  # where low + steps * step is below high
    (-5.5, 0.15),  # where it is above
)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_clipped_outputs_are_in_the_range(name, seeded):
    for low, high in AWKWARD_RANGES:
        mechanism = MECHANISMS[name](1.0, low, high)
        noisy = mechanism.randomize(np.repeat([low, high], 2000), rng=seeded())
        assert noisy.min() >= low and noisy.max() <= high
        if name != "ExponentialMechanism":
            assert noisy.min() == low and noisy.max() == high  # exactly, not the nearest grid point
        assert np.all(mechanism.likelihood(noisy[:5], [low, high]) > 0.0)


@pytest.mark.parametrize("name", ADDITIVE)
def test_unclipped_outputs_leave_the_range_and_clipping_is_all_that_differs(name, seeded):
    labels = np.random.default_rng(3).integers(-3, 5, 5000)
    free = MECHANISMS[name](1.0, -3, 4, clip=False).randomize(labels, rng=seeded())
    clipped = MECHANISMS[name](1.0, -3, 4).randomize(labels, rng=seeded())
    assert free.min() < -3 and free.max() > 4
    np.testing.assert_allclose(clipped, np.clip(free, -3, 4), rtol=0, atol=1e-9)
    if MECHANISMS[name].whole:
        np.testing.assert_array_equal(free, np.rint(free))


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_label_reaches_the_noise_only_as_its_grid_point(name, seeded):
    """Labels on one grid point give the same outputs, to the last bit."""
    mechanism = MECHANISMS[name](1.0, 0, 2**10)
    step = mechanism.step
    assert step == (1.0 if mechanism.whole else 2.0**-22)
    near = (
        np.full(2000, 700.0) if mechanism.whole else 700.0 + np.linspace(-0.49, 0.49, 2000) * step
    )
    exact = mechanism.randomize(np.full(2000, 700.0), rng=seeded())
    np.testing.assert_array_equal(mechanism.randomize(near, rng=seeded()), exact)
    if mechanism.whole:
        return
    on_grid = exact / step
    np.testing.assert_array_equal(on_grid, np.rint(on_grid))
