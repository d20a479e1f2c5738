"""DP-SGD's epsilon, compared with integrals, closed forms, and other pairs."""

from __future__ import annotations

import math
from importlib import metadata

import dp_accounting
import numpy as np
import pytest
from _composed_loss import ComposedLoss
from dp_accounting import rdp
from scipy import stats

from tf_labeldp.accounting import (
    Charge,
    calibrate_noise_multiplier,
    dp_sgd_charge,
    dp_sgd_guarantee,
)
from tf_labeldp.plugins import gaussian_epsilon, gaussian_sigma

MNIST = {"noise_multiplier": 10.0, "sampling_probability": 1024 / 60000, "steps": 292}

# noise multiplier, sampling probability, steps, delta
TRAININGS = [
    (10.0, 1024 / 60000, 292, 1 / 60000),
    (1.2, 0.05, 60, 1e-6),
    (20.0, 0.5, 100, 1e-7),
    (40.0, 1e-3, 100_000, 1e-6),
]


def densities(x, sigma, q, relation, norm=1.0):
    """The two sides that one step sets against each other, at the points ``x``."""
    nothing = stats.norm.pdf(x, scale=sigma)
    one = (1 - q) * nothing + q * stats.norm.pdf(x, loc=norm, scale=sigma)
    other = (1 - q) * nothing + q * stats.norm.pdf(x, loc=-norm, scale=sigma)
    return {
        "replace_label": (one, other),
        "replaced back": (other, one),
        "remove": (one, nothing),
        "add": (nothing, one),
    }[relation]


def composed_loss(sigma, q, steps, relation, norm=1.0):
    """The privacy loss of some steps, without an accountant."""
    x = np.linspace(-12 * sigma - norm, 12 * sigma + norm, 4001)
    one, other = densities(x, sigma, q, relation, norm)
    dx = x[1] - x[0]
    return ComposedLoss((np.log(one) - np.log(other), one * dx, other * dx, steps))


@pytest.mark.parametrize(("sigma", "q", "steps", "delta"), TRAININGS)
@pytest.mark.holds("accounting.dp_sgd_guarantee")
def test_epsilon_under_replacement_is_that_of_an_independent_integral(sigma, q, steps, delta):
    """The same check rejects what half the distance would give, and what a third more would."""
    epsilon = dp_sgd_guarantee(sigma, q, steps, delta).epsilon
    for direction in ("replace_label", "replaced back"):
        exact = composed_loss(sigma, q, steps, direction)
        # From above, and by no more than the grid's variance, (1/30)^2 / 6 of the loss's at most.
        assert exact.delta(epsilon) <= delta
        assert exact.delta(epsilon * (1 - 5e-4)) > delta
    halved = composed_loss(sigma, q, steps, "replace_label", norm=0.5)
    assert halved.delta(epsilon * (1 - 5e-4)) < delta
    larger = composed_loss(sigma, q, steps, "replace_label", norm=4 / 3)
    assert larger.delta(epsilon) > delta


@pytest.mark.parametrize(("sigma", "q", "steps", "delta"), TRAININGS)
def test_epsilon_under_add_or_remove_is_that_of_an_independent_integral(sigma, q, steps, delta):
    found = dp_sgd_guarantee(sigma, q, steps, delta, relation="add_or_remove").epsilon
    both = [composed_loss(sigma, q, steps, direction) for direction in ("remove", "add")]
    assert max(exact.delta(found) for exact in both) <= delta
    assert max(exact.delta(found * (1 - 1e-3)) for exact in both) > delta


@pytest.mark.parametrize(
    ("sigma", "steps", "delta"), [(2.0, 1, 1e-10), (50.0, 295, 1e-5), (4000.0, 1000, 1e-3)]
)
def test_full_batches_are_the_analytic_gaussian_mechanism_of_sensitivity_2c(sigma, steps, delta):
    """T steps are one step with noise sigma / sqrt(T); the clipping norm is 1."""
    for relation, sensitivity in (("replace_label", 2.0), ("add_or_remove", 1.0)):
        exact = gaussian_epsilon(sigma, delta, sensitivity * math.sqrt(steps))
        found = dp_sgd_guarantee(sigma, 1.0, steps, delta, relation=relation).epsilon
        assert exact * (1 - 1e-9) <= found <= exact * (1 + 1e-3)
        halved = gaussian_epsilon(sigma, delta, 0.5 * sensitivity * math.sqrt(steps))
        assert found > 1.5 * halved


def test_the_figures_of_the_paper_s_setting():
    """What Google's accountant states by default understates label-DP by a factor of two."""
    delta = 1 / 60000
    compared = dp_sgd_guarantee(**MNIST, delta=delta, relation="add_or_remove")
    assert compared.epsilon == pytest.approx(0.0855, abs=5e-5)
    assert dp_sgd_guarantee(**MNIST, delta=delta).epsilon == pytest.approx(0.1812, abs=5e-5)


def test_hundred_thousand_steps_never_come_out_below_the_truth():
    """Rounding errors of the accountant's transform are taken off delta.

    ``dp_accounting`` 0.6.0 alone is below the truth by 1 % here at delta 1e-12, at which ours
    promises nothing, and by two parts in 1e4 at 1e-10.
    """
    steps, probability = 100_000, 1.0 - 2.0**-53  # sampled in name: no closed form is taken
    sigma = gaussian_sigma(10.0, 1e-9, 2.0 * math.sqrt(steps))
    for delta in (1e-10, 1e-8, 1e-5):
        exact = gaussian_epsilon(sigma, delta, 2.0 * math.sqrt(steps))
        found = dp_sgd_guarantee(sigma, probability, steps, delta).epsilon
        slack = gaussian_epsilon(sigma, delta - 2.0**-52 * steps - 1e-13, 2.0 * math.sqrt(steps))
        assert exact <= found <= slack * (1 + 1e-3)
    with pytest.raises(ValueError, match=r"no finite epsilon.*delta=1e-12 for 100000 steps"):
        dp_sgd_guarantee(sigma, probability, steps, 1e-12)


def test_the_statement_names_its_unit_relation_and_assumptions():
    statement = dp_sgd_guarantee(**MNIST, delta=1e-5)
    assert statement.relation == "replace_label" and statement.delta == 1e-5
    assert statement.unit == "the label of one training example"
    first, *notes = dp_sgd_charge(**MNIST, delta=1e-5).assumptions
    noise = first.replace("in every step.", "in every step of 292.")
    assert statement.assumptions == ("The features are public.", noise, *notes)
    text = str(statement)
    assert "Poisson sampling, every example with probability 0.0170667" in text
    assert "in every step of 292." in text and "The features are public." in text
    assert dp_sgd_guarantee(**MNIST, delta=1e-5, relation="add_or_remove").relation == (
        "add_or_remove"
    )


def test_user_level_is_a_sentence_of_its_own():
    by_user = dp_sgd_guarantee(**MNIST, delta=1e-5, privacy_unit="user")
    assert by_user.unit == "all labels of one user"
    assert by_user.epsilon == dp_sgd_guarantee(**MNIST, delta=1e-5).epsilon
    assert "every user with probability" in str(by_user)
    assert "one clipped gradient per user" in str(by_user)
    first, *notes = dp_sgd_charge(**MNIST, delta=1e-5, privacy_unit="user").assumptions
    assert by_user.assumptions == (
        "The features and the user of each example are public.",
        first.replace("in every step.", "in every step of 292."),
        *notes,
    )


# epsilon, delta, sampling probability, steps
TARGETS = [
    (0.1, 1e-5, 1024 / 60000, 295),
    (0.5, 1e-6, 1e-3, 100_000),
    (8.0, 1e-5, 0.01, 100),
    (0.2, 1e-5, 1.0, 1000),
]


@pytest.mark.parametrize(
    ("epsilon", "delta", "q", "steps", "relation"),
    [*((*target, "replace_label") for target in TARGETS), (*TARGETS[0], "add_or_remove")],
)
@pytest.mark.holds("accounting.calibrate_noise_multiplier")
def test_the_calibrated_noise_is_enough_and_hardly_more(epsilon, delta, q, steps, relation):
    noise = calibrate_noise_multiplier(epsilon, delta, q, steps, relation=relation)
    assert dp_sgd_guarantee(noise, q, steps, delta, relation=relation).epsilon <= epsilon
    less = dp_sgd_guarantee(noise * (1 - 1e-3), q, steps, delta, relation=relation)
    assert less.epsilon > epsilon


def test_an_epsilon_out_of_reach_says_what_is_within():
    with pytest.raises(
        ValueError, match=r"epsilon=1e-08 .* the smallest reachable epsilon is [1-9]"
    ):
        calibrate_noise_multiplier(1e-8, 1e-5, 0.5, 100_000)
    with pytest.raises(ValueError, match=r"smallest reachable epsilon is .*delta well above 4e-11"):
        calibrate_noise_multiplier(1.0, 1e-12, 0.5, 100_000)
    assert calibrate_noise_multiplier(1e30, 1e-5, 0.01, 10) == pytest.approx(0.01)  # the least


GOOD = {"noise_multiplier": 1.0, "sampling_probability": 0.1, "steps": 10, "delta": 1e-5}
BAD_STEPS = [
    ({"sampling_probability": 0.0}, ValueError, r"sampling_probability must be in \(0, 1\], got 0"),
    ({"sampling_probability": 1.5}, ValueError, r"must be in \(0, 1\], got 1.5.*expected batch"),
    ({"steps": 0}, ValueError, "steps must be at least 1, got 0"),
    ({"steps": 10.0}, TypeError, "steps must be an integer, got float"),
    ({"delta": 0.0}, ValueError, "delta must be above zero for DP-SGD, got 0.*below 1/n"),
    ({"relation": "substitute"}, ValueError, "relation must be one of .*got 'substitute'"),
]
BAD_NOISE = [
    ({"noise_multiplier": 0.0}, ValueError, "noise_multiplier must be finite and above zero"),
    ({"noise_multiplier": 1e-4}, ValueError, "no finite epsilon at .* Use more noise"),
    ({"delta": 1e-15}, ValueError, "no finite epsilon at .* a larger delta below 1/n"),
    ({"privacy_unit": "group"}, ValueError, r"privacy_unit must be one of label, user, got"),
]
BAD_TARGETS = [
    ({"epsilon": 0.0}, ValueError, "epsilon must be finite and above zero"),
    ({"epsilon": math.inf}, ValueError, "epsilon must be finite and above zero"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_STEPS + BAD_NOISE)
def test_bad_arguments(change, error, message):
    dp_sgd_guarantee(**GOOD)  # a known result does not spare the checks
    with pytest.raises(error, match=message):
        dp_sgd_guarantee(**{**GOOD, **change})


@pytest.mark.parametrize(("change", "error", "message"), BAD_STEPS + BAD_TARGETS)
def test_bad_targets(change, error, message):
    target = {"epsilon": 1.0, "delta": 1e-5, "sampling_probability": 0.1, "steps": 10}
    with pytest.raises(error, match=message):
        calibrate_noise_multiplier(**{**target, **change})


def test_noise_at_a_billion_steps_is_that_of_the_central_limit():
    noise = calibrate_noise_multiplier(1.0, 1e-5, 0.01, 10**9)
    limit = gaussian_sigma(1.0, 1e-5, 2.0 * 0.01 * math.sqrt(1e9))
    assert limit <= noise <= 1.005 * limit


@pytest.mark.parametrize("relation", ["replace_label", "add_or_remove"])
def test_full_batches_cost_what_the_gaussian_costs_also_at_ten_thousand(relation):
    distance = {"replace_label": 2.0, "add_or_remove": 1.0}[relation]
    noise = calibrate_noise_multiplier(10_000.0, 1e-5, 1.0, 4, relation)
    exact = gaussian_epsilon(noise, 1e-5, 2.0 * distance)
    found = dp_sgd_guarantee(noise, 1.0, 4, 1e-5, relation).epsilon
    assert exact <= found <= min(10_000.0, exact * (1.0 + 1e-8))


@pytest.mark.parametrize("noise", [0.01, 0.03])
def test_little_noise_costs_more_when_clipped_by_label_distance(noise):
    # Orders above e^709 once overflowed, and an epsilon of zero was stated.
    norm = dp_sgd_guarantee(noise, 0.5, 1, 1e-5).epsilon
    distance = dp_sgd_guarantee(noise, 0.5, 1, 1e-5, clipping="label_distance").epsilon
    assert distance > norm > 0.5 / noise**2


@pytest.mark.skipif(metadata.version("dp-accounting") != "0.6.0", reason="of version 0.6.0")
def test_the_rdp_accountant_of_dp_accounting_understates_replacement():
    """google/differential-privacy #378, as docs/comparison.md says."""
    noise, delta, relation = 5.0, 1e-5, dp_accounting.NeighboringRelation.REPLACE_ONE
    by_rdp = rdp.RdpAccountant(neighboring_relation=relation)
    found = by_rdp.compose(dp_accounting.GaussianDpEvent(noise)).get_epsilon(delta)
    # A changed label moves the sum by 2: the closed form of the Gaussian.
    exact = gaussian_epsilon(noise, delta, 2.0)
    assert found == pytest.approx(0.7945, abs=1e-3) and exact == pytest.approx(1.5550, abs=1e-3)
    ours = dp_sgd_guarantee(noise, 1.0, 1, delta).epsilon
    assert exact <= ours < exact * (1.0 + 1e-4)


@pytest.mark.skipif(metadata.version("dp-accounting") != "0.6.0", reason="of version 0.6.0")
def test_the_pld_accountant_of_dp_accounting_counts_repeated_randomized_response_once():
    """As docs/comparison.md says."""
    # Ten classes and epsilon 1: the true one has e times the probability of another.
    once = dp_accounting.RandomizedResponseDpEvent(10.0 / (9.0 + math.e), 10)
    relation, repeated = dp_accounting.NeighboringRelation.REPLACE_ONE, (once,) * 10
    events = dp_accounting.SelfComposedDpEvent(once, 10), dp_accounting.ComposedDpEvent(repeated)
    found, exact = (
        dp_accounting.pld.PLDAccountant(relation).compose(event).get_epsilon(1e-5)
        for event in events
    )
    assert found == pytest.approx(1.0, abs=1e-3) and exact == pytest.approx(7.9933, abs=1e-3)
    for event in events:
        assert Charge.of_event(event, 1e-5).epsilon == pytest.approx(exact, rel=1e-5)
