"""The privacy filter against every adaptive controller, enumerated exactly on small channels."""

from __future__ import annotations

import functools
import math
from collections import Counter

import numpy as np
import pytest
from scipy import special, stats

from tf_labeldp.accounting import Charge, PrivacyBudget, calibrate_noise_multiplier, dp_sgd_charge
from tf_labeldp.accounting._moments import log_moments
from tf_labeldp.plugins import EventFields, PrivacyFilter, gaussian_sigma

pytestmark = pytest.mark.filterwarnings("ignore:a budget of")
BINS = 40
"""Outputs of a Gaussian release that the enumeration tells from each other."""


def added_delta(delta):
    return EventFields({"class": "AddedDeltaDpEvent", "delta": delta}).dp_event()


def pure(epsilon):
    return Charge(epsilon, 0.0, EventFields.randomized_response(epsilon))


@functools.cache
def head(epsilon, delta):
    return Charge(epsilon, delta, EventFields.gaussian(gaussian_sigma(epsilon, delta, 1.0)))


def claimed(epsilon, delta):
    return Charge(epsilon, delta, EventFields.NOT_PRIVATE)


@functools.cache
def training(epsilon, delta, q=0.02, steps=200):
    noise = calibrate_noise_multiplier(epsilon, delta, q, steps)
    return dp_sgd_charge(noise, q, steps, delta)


def plan(*charges):
    """A plan of these charges, each once."""
    return tuple((charge, 1) for charge in charges)


def losses_of(charge):
    """Losses and probabilities of a channel with few outputs that costs no more than the charge.

    The privacy loss under the data set that makes it larger; infinite where one data set alone
    gives an output. Noise is binned, which is a function of it.
    """
    event = charge.event_fields
    if event == EventFields.NOT_PRIVATE:
        same = (1.0 - charge.delta) * special.expit(charge.epsilon)
        losses = [math.inf, charge.epsilon, -charge.epsilon]
        return np.array(losses), np.array([charge.delta, same, 1.0 - charge.delta - same])
    if charge.delta == 0.0:
        same = special.expit(charge.epsilon)
        return charge.epsilon * np.array([1.0, -1.0]), np.array([same, 1.0 - same])
    share = 1.0
    if event["class"] == "SelfComposedDpEvent":  # one step on a sampled batch
        share, event = event["event"]["sampling_probability"], event["event"]["event"]
    mu = 1.0 / event["noise_multiplier"]
    edges = np.concatenate([[-np.inf], np.linspace(-2.0, 7.0, BINS - 1), [np.inf]])
    none, up, down = (np.diff(stats.norm.cdf(edges, loc=loc)) for loc in (0.0, mu, -mu))
    # Upper tails in doubles.
    far = edges[:-1] > 0.0
    tails = (-np.diff(stats.norm.sf(edges, loc=loc)) for loc in (0.0, mu, -mu))
    none, up, down = (
        np.where(far, tail, low) for tail, low in zip(tails, (none, up, down), strict=True)
    )
    first, second = (1.0 - share) * none + share * up, (1.0 - share) * none + share * down
    return np.log(first / second), first


@functools.cache
def losses_of_plan(each):
    """The losses of all uses of a plan together, and their probabilities."""
    total, masses = np.zeros(1), np.ones(1)
    for charge, count in each:
        for _ in range(count):
            losses, chances = losses_of(charge)
            total = np.add.outer(total, losses).reshape(-1)
            masses = np.multiply.outer(masses, chances).reshape(-1)
    return total, masses


def worst_delta(menu, allowed, epsilon, start, most):
    """The least delta that is true for all controllers: dynamic programming over all of them.

    ``allowed(state, plan)`` returns the state after a plan, or None if it is refused. A controller
    sees the outputs so far, and takes any plan of the menu that is allowed, or stops.
    """

    def value(state, losses, left):
        best = -np.expm1(np.minimum(epsilon - losses, 0.0))
        for each in menu if left else ():
            if (after := allowed(state, each)) is not None:
                total, masses = losses_of_plan(each)
                together = np.add.outer(losses, total)
                later = value(after, together.reshape(-1), left - 1)
                best = np.maximum(best, later.reshape(together.shape) @ masses)
        return best

    return float(value(start, np.zeros(1), most)[0])


def by_filter(state, each):
    after = state.after(each)
    return after if after.allows else None


def by_branch(budget):
    """The rule without a filter: each branch is composed as if it had been fixed in advance."""

    def allowed(state, each):
        charges = tuple((Counter(dict(state)) + Counter(dict(each))).items())
        return charges if budget.allows(Charge.composed(charges, budget.delta)) else None

    return allowed


def largest(fits):
    """The largest number of [0, 9] that fits."""
    low, high = 0.0, 9.0
    for _ in range(40):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def pilot(epsilon, delta, first, allowed, start):
    """A small Gaussian release, and after it the largest release and the largest draw."""
    state = allowed(start, plan(first))
    rest = largest(lambda e: allowed(state, plan(head(max(e, 1e-3), delta))) is not None)
    draw = largest(lambda e: allowed(state, plan(pure(max(e, 1e-3)))) is not None)
    return [plan(first), plan(head(rest, delta)), plan(pure(draw))]


DELTA = 0.05
STEP = dp_sgd_charge(1.0, 0.3, 1, DELTA)
MENUS = {
    "pure": (1.0, 0.0, [plan(pure(0.25)), plan(pure(0.5)), plan(pure(0.2), pure(0.3))], 5),
    "pure and Gaussian": (1.0, DELTA, [plan(pure(0.3)), plan(head(0.5, DELTA))], 4),
    "after a Gaussian": (2.0, DELTA, [plan(head(1.0, DELTA)), plan(pure(0.7)), plan(pure(0.2))], 4),
    "Gaussians": (1.0, DELTA, [plan(head(0.3, DELTA)), plan(head(0.6, DELTA))], 4),
    "claims": (1.0, DELTA, [plan(claimed(0.4, 0.02)), plan(pure(0.3)), plan(head(0.4, 0.02))], 4),
    "steps": (2.0, DELTA, [plan(STEP), plan(pure(0.2)), ((STEP, 2),)], 3),
    "steps and heads": (2.0, DELTA, [plan(STEP), plan(head(0.4, DELTA)), plan(pure(0.3))], 3),
    "plans": (
        1.5,
        DELTA,
        [plan(head(0.4, DELTA), pure(0.4)), plan(*[head(0.3, DELTA)] * 2), plan(pure(0.5))],
        2,
    ),
    "many small": (0.5, DELTA, [((pure(0.05), 4),), plan(pure(0.05)), plan(head(0.2, DELTA))], 4),
}


@pytest.mark.holds("accounting.PrivacyFilter.after_all")
@pytest.mark.parametrize("name", MENUS)
def test_no_adaptive_controller_exceeds_the_budget(name):
    epsilon, delta, menu, most = MENUS[name]
    start = PrivacyFilter.of(PrivacyBudget(epsilon, delta))
    found = worst_delta(menu, by_filter, epsilon, start, most)
    assert found <= delta * (1.0 + 1e-9) + 1e-12


def test_gaussian_releases_use_the_share_of_the_filter_and_no_less():
    """From the other side: controllers reach what the filter of Gaussian releases allows."""
    epsilon, delta, menu, most = MENUS["Gaussians"]
    start = PrivacyFilter.of(PrivacyBudget(epsilon, delta))
    assert worst_delta(menu, by_filter, epsilon, start, most) > 0.9 * delta


@pytest.mark.holds("accounting.PrivacyFilter.after_all")
@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 1e-5), (2.0, 1e-5), (8.0, 1e-5)])
def test_branches_composed_as_if_fixed_exceed_the_budget_and_the_filter_does_not(epsilon, delta):
    budget = PrivacyBudget(epsilon, delta)
    first = head(0.1 * epsilon, delta)
    for allowed, start in ((by_branch(budget), ()), (by_filter, PrivacyFilter.of(budget))):
        menu = pilot(epsilon, delta, first, allowed, start)
        found = worst_delta(menu, allowed, epsilon, start, 2)
        # Each branch alone, as if it had been fixed, is within the budget.
        for each in menu[1:]:
            assert worst_delta([menu[0], each], allowed, epsilon, start, 2) <= 1.0001 * delta
        if start == ():
            assert found > 1.5 * delta
        else:
            assert found <= delta


D = 1e-5
SECOND = {  # a budget, plans within it, and the least that is left for one more pure use
    "a draw and a head": (2.0, [plan(pure(1.0)), plan(head(1.0, D))], 0.0),
    "a draw, a head and another draw": (3.0, [plan(pure(1.0)), plan(head(1.0, D))], 0.7),
    "a head": (2.0, [plan(head(2.0, D))], 0.0),
    "a head and a draw": (2.0, [plan(head(1.0, D)), plan(pure(0.7))], 0.0),
    "a training": (2.0, [plan(training(2.0, D))], 0.0),
    "two trainings": (3.0, [plan(training(1.8, D))] * 2, 0.0),
    "ten trainings": (3.0, [plan(training(0.7, D))] * 10, 0.0),
    "a head and a training": (3.0, [plan(head(1.0, D)), plan(training(1.0, D))], 0.8),
    "a training and a draw": (3.0, [plan(training(1.0, D)), plan(pure(1.8))], 0.0),
    "a claim and a draw": (2.0, [plan(claimed(1.0, D)), plan(pure(1.0))], 0.0),
    "many small draws": (2.0, [plan(pure(0.02))] * 250, 0.0),
}


@pytest.mark.parametrize("name", SECOND)
def test_histories_that_fit(name):
    epsilon, plans, left = SECOND[name]
    budget = PrivacyBudget(epsilon, D)
    found = PrivacyFilter.after_all(plans, budget)
    assert found.allows and found.remaining() >= left
    # The statement of the same uses, fixed in advance, is within the budget too.
    charges = Counter(charge for each in plans for charge, _ in each)
    assert budget.allows(Charge.composed(tuple(charges.items()), D))
    # What is left is what one more pure use may cost, from both sides.
    if (most := found.remaining()) > 1e-6:
        assert found.after(plan(pure(most))).allows
    assert not found.after(plan(pure(most * 1.001 + 1e-6))).allows
    assert not PrivacyFilter.after_all([*plans, plan(pure(epsilon))], budget).allows


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0, 4.0, 8.0])
@pytest.mark.parametrize("number", [1, 2, 10, 100])
def test_gaussian_releases_cost_no_more_than_before(epsilon, number):
    """Up to the share of delta for other uses: 0.15 % of epsilon; alone, not even that."""
    exact = gaussian_sigma(epsilon, D, 1.0) * math.sqrt(number)
    factor = 1.0 if number == 1 else 1.0015
    release = Charge(epsilon, D, EventFields.gaussian(factor * exact))
    found = PrivacyFilter.after_all([plan(release)] * number, PrivacyBudget(epsilon, D))
    assert found.allows
    assert not found.after(
        plan(Charge(epsilon, D, EventFields.gaussian(10.0 * exact / math.sqrt(number))))
    ).allows


@pytest.mark.parametrize("epsilon", [1.0, 150.0, 1000.0])
def test_what_is_left_after_a_gaussian_release_of_a_large_budget_is_a_number(epsilon):
    left = PrivacyFilter.after_all([plan(head(0.5 * epsilon, D))], PrivacyBudget(epsilon, D))
    assert left.allows and left.after(plan(pure(left.remaining() * (1.0 - 1e-9)))).allows


def test_what_precisions_leave_is_known_where_no_other_sum_fits():
    left = PrivacyFilter.after_all([plan(head(0.6, 0.1 * D))] * 2, PrivacyBudget(1.0, D))
    assert left.names == ("the sum of squared precisions of Gaussian noise",)
    assert left.after(plan(pure(left.remaining() * (1.0 - 1e-9)))).allows
    assert not left.after(plan(pure(left.remaining() * 1.001))).allows
    assert left.remaining() > 0.1


def test_a_plan_is_composed_exactly_and_its_uses_one_by_one_are_not():
    budget = PrivacyBudget(1.0, D)
    draws = ((pure(0.05), 60),)
    assert Charge.composed(draws, D).epsilon < 1.7
    assert PrivacyFilter.after_all([draws], PrivacyBudget(1.7, D)).allows
    assert not PrivacyFilter.after_all([plan(pure(0.05))] * 60, PrivacyBudget(1.7, D)).allows
    assert not PrivacyFilter.after_all([draws], budget).allows


def test_a_use_without_a_known_cost_leaves_nothing():
    found = PrivacyFilter.after_all([plan(Charge.unknown("no cost"))], PrivacyBudget(9.0, D))
    assert not found.allows and found.remaining() == 0.0
    # Free uses cost nothing, before and after.
    free = plan(Charge(0.0, 0.0, {"class": "NoOpDpEvent"}))
    assert PrivacyFilter.after_all([free], PrivacyBudget(1.0)).remaining() == 1.0
    whole = PrivacyFilter.after_all([plan(head(2.0, D))], PrivacyBudget(2.0, D))
    assert whole.after(free).allows and not whole.after(plan(pure(1e-6))).allows


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 1.0, 5.0, 30.0])
def test_pure_uses_are_functions_of_a_gaussian_release(epsilon):
    """Randomized response thresholds it: both sides of zero have its probabilities."""
    mu = PrivacyFilter.pure_mu(epsilon)
    odds = stats.norm.sf(0.0, loc=0.5 * mu) / stats.norm.sf(0.0, loc=-0.5 * mu)
    assert math.log(odds) == pytest.approx(epsilon, rel=1e-9)


ORDERS = np.array([0.5, 1.0, 2.0, 5.0, 12.0])


def test_moments_of_gaussian_noise_and_of_randomized_response():
    noise = log_moments([EventFields.gaussian(2.0).dp_event()], ORDERS)  # mu = 1/2
    assert noise == pytest.approx(ORDERS * (ORDERS + 1.0) / 8.0)
    for event, epsilon, masses in (
        (
            EventFields.randomized_response(1.0).dp_event(),
            1.0,
            (special.expit(1.0), special.expit(-1.0), 0.0),
        ),
        (
            EventFields.randomized_response(2.0, 4).dp_event(),
            2.0,
            np.array([math.exp(2.0), 1.0, 2.0]),
        ),
    ):
        chances = np.array(masses) / np.sum(masses)
        losses = np.array([epsilon, -epsilon, 0.0])
        expected = np.log(np.exp(np.outer(ORDERS, losses)) @ chances)
        assert log_moments([event], ORDERS) == pytest.approx(expected, rel=1e-9)
    both = log_moments(
        [
            EventFields.gaussian(2.0).dp_event(),
            EventFields.randomized_response(1.0).dp_event(),
            EventFields.gaussian(2.0).dp_event(),
        ],
        ORDERS,
    )
    assert both == pytest.approx(
        2 * noise + log_moments([EventFields.randomized_response(1.0).dp_event()], ORDERS)
    )


@pytest.mark.parametrize("small", [0.005, 0.02, 0.1])
def test_a_small_release_leaves_the_whole_of_delta(small):
    """A class prior and a head of the rest of the budget."""
    delta = 1e-4
    budget = PrivacyBudget(2.0, delta)
    assert PrivacyFilter.after_all(
        [plan(pure(small)), plan(head(2.0 - small, delta))], budget
    ).allows


@pytest.mark.parametrize("q", [1e-3, 0.02, 0.3])
@pytest.mark.parametrize("noise", [0.7, 2.0, 20.0])
def test_moments_of_sampled_noise_are_bounds_and_close(q, noise):
    """Against the integral over the noise of one step on secret batches, with its worst pair."""
    mu = 1.0 / noise
    x = np.linspace(-40.0, 40.0 + 30.0 * mu, 400_001)
    first, second = (
        np.logaddexp(math.log1p(-q) - x**2 / 2, math.log(q) - (x - loc) ** 2 / 2)
        for loc in (mu, -mu)
    )
    found = log_moments([EventFields.dp_sgd(noise, q, 3).dp_event()], ORDERS)
    step = math.log((x[1] - x[0]) / math.sqrt(2.0 * math.pi))
    for order, bound in zip(ORDERS, found, strict=True):
        exact = 3.0 * float(special.logsumexp(first + order * (first - second) + step))
        assert exact * (1.0 - 1e-6) - 1e-12 <= bound <= exact * 1.01


def test_moments_of_clipped_distances_are_above_those_of_norms():
    norms, distances = (
        log_moments([EventFields.dp_sgd(1.0, 0.1, 1, clipping).dp_event()], ORDERS)
        for clipping in ("norm", "label_distance")
    )
    assert np.all(norms < distances) and np.all(np.isfinite(distances))


def test_moments_that_are_not_known_are_infinite():
    unknown = [
        EventFields.approximate(1.0, 0.01).dp_event(),
        EventFields.dp_sgd(1e-3, 0.1, 1).dp_event(),
        added_delta(1e-9),
        EventFields.randomized_response(1e9).dp_event(),
    ]
    for event in unknown:
        assert np.all(np.isinf(log_moments([event], ORDERS))), event
