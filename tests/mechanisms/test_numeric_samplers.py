"""The integer samplers against their exact laws, and the best width of a stair."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import optimize, stats

from tf_labeldp.mechanisms import (
    DiscreteStaircaseMechanism,
    StaircaseMechanism,
    integer_noise,
    numbers,
    random_bits,
)
from tf_labeldp.plugins import geometric

DRAWS = 200_000


class _Needs(Exception):
    """A draw beyond the tape."""


def outcomes(sampler, monkeypatch, max_draws):
    """Exact probabilities of the results of a sampler, over all draws of up to this length.

    What takes more draws is under None.
    """
    found = {}
    queue = [((), Fraction(1))]
    while queue:
        tape, weight = queue.pop()
        left = list(tape)

        def next_draw(bounds, rng, left=left):
            if bounds.size == 0:
                return bounds
            if not left:
                raise _Needs(int(bounds[0]))
            return np.array([left.pop(0)])

        monkeypatch.setattr(random_bits, "uniform_below", next_draw)
        try:
            result = sampler()
        except _Needs as needs:
            if len(tape) == max_draws:
                found[None] = found.get(None, 0) + weight
            else:
                bound = needs.args[0]
                queue += [((*tape, value), weight / bound) for value in range(bound)]
        else:
            found[result] = found.get(result, 0) + weight
    return found


@pytest.mark.parametrize(("n", "d"), [(0, 3), (1, 3), (3, 3), (1, 1), (0, 1), (4, 5)])
def test_bernoulli_exp_is_exact(n, d, monkeypatch):
    """Stopped after some draws, the chance is the Taylor sum of e^(-n/d), term by term."""
    found = outcomes(
        lambda: bool(integer_noise.bernoulli_exp(np.array([n]), d, None)[0]), monkeypatch, 9
    )
    ratio = Fraction(n, d)
    # A round takes two draws, one if k or d is 1, so nine draws are five rounds, or ten.
    rounds = 5 if d > 1 else 10
    taylor = [ratio**k / math.factorial(k) for k in range(rounds + 1)]
    stops = [taylor[k] - taylor[k + 1] for k in range(rounds)]
    assert found.get(True, 0) == sum(stops[::2])
    assert found.get(False, 0) == sum(stops[1::2])
    assert found.get(None, 0) == taylor[rounds]
    # So the chance of the event, for which the undecided are left, is the series of e^(-n/d).
    assert float(sum(stops[::2])) == pytest.approx(math.exp(-n / d), abs=float(taylor[rounds]))


@pytest.mark.parametrize(
    ("s", "t"), [(1, 1), (7, 1), (3, 10), (10, 3), (1, 1000), (2**40 + 1, 2**41)]
)
def test_geometric_draws_follow_their_mass(s, t, seeded, chi_square_rejects):
    decay = s / t
    cells = np.unique(np.floor(np.linspace(0.0, min(6.0 / decay, 1e4), 12)))  # where cells begin
    drawn = geometric(DRAWS, Fraction(s, t), seeded())
    assert drawn.dtype == np.int64 and drawn.min() >= 0
    which = np.searchsorted(cells, drawn, side="right") - 1
    counts = np.bincount(which, minlength=cells.size)

    def probabilities(rate):
        return -np.diff(np.append(np.exp(-rate * cells), 0.0))

    if cells.size > 1:
        assert not chi_square_rejects(counts, probabilities(decay))
        assert chi_square_rejects(counts, probabilities(1.1 * decay))
    else:  # with decay 7 or more hardly any draw is above zero: a binomial tail
        above = int(np.count_nonzero(drawn))
        assert stats.binomtest(above, DRAWS, math.exp(-decay)).pvalue > 1e-6


@pytest.mark.parametrize("epsilon", [0.05, 6.0])
@pytest.mark.parametrize(("width", "first"), [(1, 1), (5, 3), (40, 9)])
def test_the_variance_of_a_staircase_is_its_sum(epsilon, width, first):
    x = np.arange(0.0, 80.0 * width / min(epsilon, 1.0))
    mass = integer_noise.StaircaseNoise(epsilon, width, first).mass(x)
    expected = 2.0 * np.sum(mass * x**2)
    got = float(numbers.staircase_variance(epsilon, width, first))
    assert got == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("epsilon", [0.1, 4.0])
def test_no_gamma_has_a_smaller_variance(epsilon):
    """E[noise^2] of Definition 25 over range^2, summed over the stairs, for every gamma."""
    b, stairs = math.exp(-epsilon), np.arange(0.0, max(30.0, 60.0 / epsilon))

    def variance(gamma):
        a = (1 - b) / (2 * (gamma + b * (1 - gamma)))
        # The integral of x^2 over the upper and the lower part of each stair.
        upper = ((stairs + gamma) ** 3 - stairs**3) / 3
        lower = ((stairs + 1) ** 3 - (stairs + gamma) ** 3) / 3
        return 2 * a * np.sum(b**stairs * (upper + b * lower))

    best = StaircaseMechanism(epsilon, 0.0, 1.0).gamma
    others = np.linspace(0.0, 1.0, 2001)[1:]
    assert variance(best) <= min(variance(gamma) for gamma in others) * (1 + 1e-12)
    found = optimize.minimize_scalar(
        variance, bounds=(0.0, 1.0), method="bounded", options={"xatol": 1e-12}
    )
    assert best == pytest.approx(found.x, abs=1e-6)
    # In closed form (Geng and Viswanath 2014), the smallest variance.
    closed = (2 ** (-2 / 3) * (b * (1 + b)) ** (2 / 3) + b) / (1 - b) ** 2
    assert variance(best) == pytest.approx(closed, rel=1e-9)
    if epsilon >= 1.0:  # the gamma for absolute error is another one, and worse
        assert variance(1 / (1 + math.exp(epsilon / 2))) > variance(best) * (1 + 1e-4)


@pytest.mark.parametrize("width", [1, 3, 401, 50_000])
@pytest.mark.parametrize("epsilon", [0.01, 1.0, 60.0])
def test_no_r_has_a_smaller_variance(epsilon, width):
    best = DiscreteStaircaseMechanism(epsilon, 0, width).r
    assert 1 <= best <= width
    every = numbers.staircase_variance(epsilon, width, np.arange(1, width + 1))
    assert every[best - 1] <= every.min() * (1 + 1e-13)
    # It falls up to r and rises after it, which is why a window of widths is enough.
    rounding = 1e-13 * every.max()
    assert np.all(np.diff(every[:best]) < rounding)
    assert np.all(np.diff(every[best - 1 :]) > -rounding)


def test_a_wide_range_is_no_slower():
    assert DiscreteStaircaseMechanism(1.0, 0, 10**6).r == 416_738
    assert DiscreteStaircaseMechanism(1.0, 0, 2**32).r == pytest.approx(
        0.41673743 * 2**32, rel=1e-6
    )
