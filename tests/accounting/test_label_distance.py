"""DP-SGD whose clip bounds a distance: compared with integrals and other pairs."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from _composed_loss import ComposedLoss
from scipy import optimize, stats

from tf_labeldp.accounting import (
    Charge,
    calibrate_noise_multiplier,
    dp_sgd_charge,
    dp_sgd_guarantee,
)
from tf_labeldp.plugins import EventFields

LabelDistanceDpEvent = type(EventFields.dp_sgd(1.0, 0.5, 1, "label_distance").dp_event().event)
BY_DISTANCE = {"clipping": "label_distance"}
# With l2_norm_clip = 1 the distance D is 2, so the worst pair is at 1.5 and -0.5.
WORST = (2.0 * EventFields.LONGEST_CLIP, 2.0 * EventFields.LONGEST_CLIP - 2.0)

# noise multiplier, sampling probability, steps, delta
TRAININGS = [
    (30.0, 1024 / 32561, 300, 1e-5),
    (1.2, 0.05, 60, 1e-6),
    (20.0, 0.5, 100, 1e-7),
]


def claimed(sigma, q, orders):
    """The divergences of all orders that one step is accounted with."""
    event = LabelDistanceDpEvent(q, sigma, EventFields.LONGEST_CLIP)
    above = event.divergence(np.abs(np.log(orders)))
    return np.where(orders >= 1.0, above, 1.0 - orders + orders * above)


def outputs(sigma, q, gradient, grid):
    """Probabilities of the cells of a plane under one step, with this gradient sampled or not."""
    x, y = grid
    at = np.exp(-0.5 * ((x - gradient[0]) ** 2 + (y - gradient[1]) ** 2) / sigma**2)
    zero = np.exp(-0.5 * (x**2 + y**2) / sigma**2)
    cell = (x[0, 1] - x[0, 0]) * (y[1, 0] - y[0, 0])
    return ((1 - q) * zero + q * at) / (2 * math.pi * sigma**2) * cell


def pairs_within_the_clips():
    """Pairs of gradients of a plane, some at every bound, many off the axis."""
    rng = np.random.default_rng(20240717)
    length, far = WORST[0], 2.0
    found = [((length, 0.0), (WORST[1], 0.0)), ((1.0, 0.0), (-1.0, 0.0))]
    # Both as long as can be, and as far apart: zero is far off the line between them.
    angle = 2.0 * math.asin(far / 2.0 / length)
    found.append(((length, 0.0), (length * math.cos(angle), length * math.sin(angle))))
    while len(found) < 16:
        u, v = rng.uniform(-length, length, size=(2, 2))
        scale = max(np.linalg.norm(u) / length, np.linalg.norm(v) / length)
        scale = max(scale, np.linalg.norm(u - v) / far)
        found.append((u / scale, v / scale))
    return found


@pytest.mark.parametrize(("sigma", "q"), [(0.5, 0.1), (3.0, 0.02), (1.5, 0.999)])
def test_no_pair_is_told_apart_better_than_is_claimed(sigma, q):
    """The theorem of docs/theory.md, for every order and off the axis too."""
    axis = np.linspace(-1.5 - 7 * sigma, 1.5 + 7 * sigma, 801)
    grid = np.meshgrid(axis, axis)
    orders = np.exp([-2.0, -0.5, -0.1, 0.0, 0.02, 0.1, 0.5, 2.0])
    found = []
    for u, v in pairs_within_the_clips():
        one, other = outputs(sigma, q, u, grid), outputs(sigma, q, v, grid)
        for first, second in ((one, other), (other, one)):
            found.append([np.maximum(first - e * second, 0.0).sum() for e in orders])
    bound = claimed(sigma, q, orders)
    # The kink of the maximum costs the sum over cells a little, on either side.
    assert np.max(found - bound) < 2e-5 * q
    # No order is bounded by more than is reached: one way round above one, the other below.
    worst = np.where(orders >= 1.0, found[0], found[1])
    assert worst == pytest.approx(bound, abs=1e-4 * q)
    # What is claimed for the antipodal pair of equal norms is too little.
    halves = LabelDistanceDpEvent(q, sigma, 0.5).divergence(np.log(orders[4:]))
    assert q > 0.9 or np.any(worst[4:] > halves + 0.01 * q)


@pytest.mark.parametrize(("sigma", "q"), [(0.3, 1e-4), (3.0, 0.5), (300.0, 0.03), (3.0, 1 - 1e-9)])
def test_the_divergence_is_that_of_the_best_half_line(sigma, q):
    a, b = (place / sigma for place in WORST)
    losses = np.array([0.0, 1e-6, 1e-3, 0.1, 1.0, 4.0])
    found = LabelDistanceDpEvent(q, sigma, EventFields.LONGEST_CLIP).divergence(losses)
    for loss, ours in zip(losses, found, strict=True):
        e = math.exp(loss)

        def less(t, e=e):
            one = (1 - q) * stats.norm.sf(t) + q * stats.norm.sf(t - a)
            return e * ((1 - q) * stats.norm.sf(t) + q * stats.norm.sf(t - b)) - one

        # Any half line gives a lower bound, so the least is the largest divergence.
        grid = np.linspace(-10, 40 + a, 3001)
        near = grid[np.argmin(less(grid))]
        best = optimize.minimize_scalar(less, bounds=(near - 0.1, near + 0.1), method="bounded")
        assert ours == pytest.approx(max(-best.fun, 0.0), rel=1e-6, abs=1e-15)


def worst_pair(sigma, q, back=False):
    """Losses and both densities of the worst pair, or of it the other way round."""
    x = np.linspace(WORST[1] - 12 * sigma, WORST[0] + 12 * sigma, 6001)
    zero = (1 - q) * stats.norm.pdf(x, scale=sigma)
    one, other = (zero + q * stats.norm.pdf(x, loc=m, scale=sigma) for m in WORST)
    dx = x[1] - x[0]
    one, other = (other, one) if back else (one, other)
    return np.log(one) - np.log(other), one * dx, other * dx


@pytest.mark.parametrize(("sigma", "q", "steps", "delta"), TRAININGS)
def test_epsilon_covers_pairs_that_turn_round_from_step_to_step(sigma, q, steps, delta):
    epsilon = dp_sgd_guarantee(sigma, q, steps, delta, **BY_DISTANCE).epsilon
    for turned in (0, steps // 2, steps):
        there, back = worst_pair(sigma, q), worst_pair(sigma, q, back=True)
        exact = ComposedLoss((*there, steps - turned), (*back, turned))
        assert exact.delta(epsilon) <= delta
    # Pairs of one direction are all that is known to be reached; the bound is not far above.
    plain = dp_sgd_guarantee(sigma, q, steps, delta).epsilon
    assert exact.delta(plain) < delta or exact.delta(epsilon * 0.8) > delta


@pytest.mark.parametrize(("sigma", "q", "steps", "delta"), TRAININGS)
def test_epsilon_is_that_of_the_dominating_pair(sigma, q, steps, delta):
    """It has the losses above zero of the worst pair, those below of the pair turned round."""
    border = optimize.brentq(lambda x: np.diff(log_ratio(x, sigma, q))[0], -5.0, 5.0)
    nodes, weights = np.polynomial.legendre.leggauss(400)
    reach = 6 * sigma + 1
    x, dx = border + reach * (nodes + 1), reach * weights
    zero = (1 - q) * stats.norm.pdf(x, scale=sigma)
    one, other = (dx * (zero + q * stats.norm.pdf(x, loc=m, scale=sigma)) for m in WORST)
    loss = np.log(one) - np.log(other)
    rest = 1.0 - one.sum() - other.sum()
    assert rest >= 0.0
    exact = ComposedLoss(
        (
            np.concatenate([loss, -loss, [0.0]]),
            np.concatenate([one, other, [rest]]),
            np.concatenate([other, one, [rest]]),
            steps,
        )
    )
    epsilon = dp_sgd_guarantee(sigma, q, steps, delta, **BY_DISTANCE).epsilon
    assert exact.delta(epsilon) <= delta
    assert exact.delta(epsilon * (1 - 1e-3)) > delta


def log_ratio(x, sigma, q):
    return [q * stats.norm.pdf(x, loc=m, scale=sigma) for m in WORST]


@pytest.mark.parametrize("steps", [1, 300])
def test_full_batches_cost_the_distance_alone(steps):
    plain = dp_sgd_guarantee(20.0, 1.0, steps, 1e-5)
    assert dp_sgd_guarantee(20.0, 1.0, steps, 1e-5, **BY_DISTANCE).epsilon == plain.epsilon


def test_gradients_that_are_not_longer_cost_what_plain_clipping_does():
    event = dp_accounting.SelfComposedDpEvent(LabelDistanceDpEvent(0.02, 5.0, 0.5), 200)
    plain = dp_sgd_guarantee(5.0, 0.02, 200, 1e-5).epsilon
    assert Charge.of_event(event, 1e-5).epsilon == pytest.approx(plain, rel=1e-3)


def test_the_calibrated_noise_is_enough_and_hardly_more():
    noise = calibrate_noise_multiplier(0.5, 1e-5, 0.03, 300, **BY_DISTANCE)
    assert dp_sgd_guarantee(noise, 0.03, 300, 1e-5, **BY_DISTANCE).epsilon <= 0.5
    assert dp_sgd_guarantee(noise * (1 - 1e-3), 0.03, 300, 1e-5, **BY_DISTANCE).epsilon > 0.5
    assert noise > calibrate_noise_multiplier(0.5, 1e-5, 0.03, 300)


def test_the_event_is_written_composed_and_stated():
    event = EventFields.dp_sgd(5.0, 0.02, 100, "label_distance").dp_event()
    assert EventFields(EventFields.of(event)).dp_event() == event
    twice = Charge.of_event(dp_accounting.ComposedDpEvent((event, event)), 1e-5)
    whole = dp_sgd_charge(5.0, 0.02, 200, 1e-5, **BY_DISTANCE)
    assert twice.epsilon == pytest.approx(whole.epsilon)
    charge = dp_sgd_charge(5.0, 0.02, 100, 1e-5, **BY_DISTANCE)
    assert charge.event == event
    assert any("for any two labels are at most twice l2_norm_clip" in t for t in charge.assumptions)
    assert charge.epsilon > dp_sgd_charge(5.0, 0.02, 100, 1e-5).epsilon


def test_it_says_nothing_of_other_relations():
    with pytest.raises(ValueError, match=r"'label_distance' bounds the effect of replacing one"):
        dp_sgd_guarantee(5.0, 0.02, 100, 1e-5, "add_or_remove", **BY_DISTANCE)
    with pytest.raises(ValueError, match="privacy_unit='user'"):
        dp_sgd_charge(5.0, 0.02, 100, 1e-5, privacy_unit="user", **BY_DISTANCE)
    with pytest.raises(ValueError, match="relation='add_or_remove'"):
        calibrate_noise_multiplier(1.0, 1e-5, 0.02, 100, "add_or_remove", **BY_DISTANCE)
    with pytest.raises(ValueError, match="clipping must be one of norm, label_distance"):
        dp_sgd_guarantee(5.0, 0.02, 100, 1e-5, clipping="distance")
