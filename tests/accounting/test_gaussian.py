"""Analytic Gaussian calibration, held from both sides against an independent formula."""

from __future__ import annotations

import fractions
import math

import pytest
from scipy import integrate, special

from tf_labeldp.accounting import Charge
from tf_labeldp.plugins import EventFields, gaussian_delta, gaussian_epsilon, gaussian_sigma

# From oracles.json (agm_*): epsilon, delta, sensitivity, sigma, relative tolerance.
CALIBRATIONS = [
    (0.002, 1e-5, math.sqrt(2), 1377.88232, 1e-5),
    (0.3, 1e-5, math.sqrt(2), 15.8929949, 1e-6),
    (0.4, 1e-5, math.sqrt(2), 12.20406, 1e-6),
    (1.0, 1e-5, math.sqrt(2), 5.27590985, 1e-6),
    (2.0, 1e-5, math.sqrt(2), 2.8196766, 1e-6),
    (6.0, 1e-5, math.sqrt(2), 1.07994323, 1e-6),
    (1.0, 1e-5, 1.0, 3.73063163, 1e-6),
    (0.5, 1e-6, 1.0, 8.05761816, 1e-6),
]
GRID = [(epsilon, delta) for epsilon in (1e-4, 0.5, 8.0, 100.0) for delta in (1e-15, 1e-5, 0.5)]
# Here the Mills ratios of the formula agree in most of their digits.
TINY = [(1e-6, 1e-15), (1e-8, 1e-20), (1e-10, 1e-30), (1e-12, 1e-15), (1e-15, 1e-20)]


def exact_delta(epsilon, u):
    """Delta at S / sigma = u as an integral of a positive function: nothing cancels.

    The derivative of the formula of Balle and Wang in u is phi(epsilon / u - u / 2).
    """
    low = min(u, epsilon) / 60.0  # below, the integrand is under e^-1700
    value, _ = integrate.quad(
        lambda log_s: math.exp(
            -0.5 * (epsilon * math.exp(-log_s) - 0.5 * math.exp(log_s)) ** 2 + log_s
        ),
        math.log(low),
        math.log(u),
        epsabs=0.0,
        epsrel=1e-12,
        limit=500,
        points=[math.log(u * (1 - 2.0**-k)) for k in range(2, 12)],
    )
    return value / math.sqrt(2.0 * math.pi)


def test_sigma_and_epsilon_of_the_oracles():
    for epsilon, delta, sensitivity, sigma, tolerance in CALIBRATIONS:
        assert gaussian_sigma(epsilon, delta, sensitivity) == pytest.approx(sigma, rel=tolerance)
    for sigma, epsilon in ((1.0, 6.57297007), (5.0, 1.06078976)):
        assert gaussian_epsilon(sigma, 1e-5, math.sqrt(2)) == pytest.approx(epsilon, rel=1e-7)


@pytest.mark.parametrize(("epsilon", "delta"), GRID + TINY)
def test_sigma_and_epsilon_are_never_too_small_and_hardly_too_large(epsilon, delta):
    sigma = gaussian_sigma(epsilon, delta, 1.0)
    assert exact_delta(epsilon, 1.0 / sigma) <= delta
    # The root is less than one part in 1e9 below.
    assert exact_delta(epsilon, 1.0 / (sigma * (1.0 - 1e-9))) > delta
    found = gaussian_epsilon(sigma, delta, 1.0)
    assert exact_delta(found, 1.0 / sigma) <= delta
    if epsilon >= 1e-4:
        # Half as much noise on epsilon's side: d log(sigma) / d log(epsilon) lies in (0, 1].
        assert found == pytest.approx(epsilon, rel=1e-5)
        u = 1.0 / sigma
        first = special.log_ndtr(0.5 * u - epsilon / u)
        second = epsilon + special.log_ndtr(-0.5 * u - epsilon / u)
        plain = math.exp(first) * -math.expm1(second - first)
        lost = 1e-14 / -math.expm1(second - first)
        assert gaussian_delta(sigma, epsilon, 1.0) == pytest.approx(plain, rel=1e-10 + lost)


@pytest.mark.parametrize("epsilon", [1e15, 1e60])
@pytest.mark.parametrize("delta", [1e-5, 1.0 - 1e-12])
def test_sigma_is_never_too_small_at_an_absurd_epsilon(epsilon, delta):
    """Delta is at most Phi(-a), and a, a difference of huge numbers, is computed exactly."""
    sigma = fractions.Fraction(gaussian_sigma(epsilon, delta, 1.0))
    a = fractions.Fraction(epsilon) * sigma - 1 / (2 * sigma)
    assert special.ndtr(-float(a)) <= delta
    assert 2.0 * epsilon * float(sigma) ** 2 < 1.0 + 2e-7  # the root is at one except for delta


@pytest.mark.parametrize("u", [0.01, 1.0, 40.0])
@pytest.mark.parametrize("delta", [1e-300])
def test_epsilon_is_right_at_a_delta_that_a_double_hardly_holds(u, delta):
    def log_delta(epsilon):
        first = special.log_ndtr(0.5 * u - epsilon / u)
        second = epsilon + special.log_ndtr(-0.5 * u - epsilon / u)
        return first + math.log(-math.expm1(second - first))

    found = gaussian_epsilon(1.0 / u, delta, 1.0)
    assert log_delta(found) <= math.log(delta) + 1e-6 < log_delta(found * (1.0 - 1e-5))


def test_sigma_is_in_the_unit_of_the_sensitivity():
    assert gaussian_sigma(1.0, 1e-5, 7.0) == pytest.approx(7.0 * gaussian_sigma(1.0, 1e-5, 1.0))
    assert gaussian_delta(7.0, 1.0, 7.0) == gaussian_delta(1.0, 1.0, 1.0)


def test_noise_that_needs_no_epsilon():
    # At (0, delta): delta = 2 Phi(u / 2) - 1.
    u = 2.0 * special.ndtri(0.5 + 0.005)
    assert gaussian_epsilon(1.0 / (0.999 * u), 0.01, 1.0) == 0.0
    assert gaussian_epsilon(1.0 / (1.001 * u), 0.01, 1.0) > 0.0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0.0, 1e-5, 1.0), ValueError, "epsilon must be finite and above zero"),
        ((1.0, 0.0, 1.0), ValueError, "delta must be above zero for Gaussian noise"),
        ((1.0, 1e-5, -1.0), ValueError, "l2_sensitivity must be finite and above zero"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        gaussian_sigma(*arguments)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-5), (4.0, 1e-8)])
def test_the_event_has_the_epsilon_of_its_noise_under_replacement(epsilon, delta):
    ratio = gaussian_sigma(epsilon, delta, 1.0)
    found = Charge.of_event(EventFields.gaussian(ratio).dp_event(), delta).epsilon
    # The accountant rounds up its discretised losses: never below, and close.
    assert epsilon <= found * (1.0 + 1e-9)
    assert found == pytest.approx(epsilon, rel=1e-3)
