"""Translation to ``dp_accounting`` events, compared with exact arithmetic from both sides."""

from __future__ import annotations

import itertools
import math
import time

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld
from scipy import optimize, special, stats

from tf_labeldp.accounting import dp_sgd_charge
from tf_labeldp.accounting._losses import composed_epsilon
from tf_labeldp.mechanisms import RandomizedResponse, RRTopK, RRWithPrior
from tf_labeldp.plugins import EventFields, gaussian_epsilon

Composed = dp_accounting.ComposedDpEvent
Repeated = dp_accounting.SelfComposedDpEvent


EMITTED = {
    "randomized_response": EventFields.randomized_response(0.5, 10).dp_event(),
    "pure": EventFields.randomized_response(0.5).dp_event(),
    "gaussian": EventFields.gaussian(5.0).dp_event(),
    "dp_sgd": EventFields.dp_sgd(8.0, 0.2, 2).dp_event(),
    "dp_sgd, full batches": EventFields.dp_sgd(8.0, 1.0, 2).dp_event(),
    "dp_sgd_charge": dp_sgd_charge(9.0, 0.3, 2, 1e-6).event,
}


def added_delta(delta):
    return EventFields({"class": "AddedDeltaDpEvent", "delta": delta}).dp_event()


def hockey_stick(one, other, epsilon):
    """The smallest delta at epsilon for one pair of output distributions."""
    return float(np.maximum(one - math.exp(epsilon) * other, 0.0).sum())


def exact_binary_delta(epsilon, uses, at):
    """Delta at epsilon ``at`` of ``uses`` binary randomized responses, as a binomial sum."""
    keep = 1.0 / (1.0 + math.exp(-epsilon))
    kept = np.arange(uses + 1)
    ways = np.array([math.comb(uses, int(j)) for j in kept], dtype=float)
    one = ways * keep**kept * (1 - keep) ** (uses - kept)
    return hockey_stick(one, one[::-1], at)


def exact_binary_epsilon(epsilon, uses, delta):
    low, high = 0.0, uses * epsilon
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if exact_binary_delta(epsilon, uses, middle) > delta else (low, middle)
        )
    return high


@pytest.mark.parametrize("epsilon", [1e-3, 1.0, 40.0])
@pytest.mark.parametrize("buckets", [2, 3, 1000])
def test_one_event_has_the_epsilon_of_its_mechanism(epsilon, buckets):
    event = EventFields.randomized_response(epsilon, buckets).dp_event()
    noise = event.noise_parameter
    assert noise == pytest.approx(buckets / (math.exp(epsilon) + buckets - 1), rel=1e-14)
    assert event.num_buckets == buckets
    ours = composed_epsilon([event], 0.0)
    assert epsilon - 1e-9 <= ours <= epsilon + 2e-4  # the accountant rounds up to its grid


def test_the_event_stays_safe_where_e_to_the_minus_epsilon_underflows():
    assert composed_epsilon([EventFields.randomized_response(800.0).dp_event()], 1e-6) >= 800.0
    plain = dp_accounting.RandomizedResponseDpEvent(0.0, 3)  # the label as it is
    assert composed_epsilon([plain], 1e-6) == composed_epsilon([plain], 0.0) == math.inf
    kinds = [EventFields.randomized_response(0.1 + 0.001 * one).dp_event() for one in range(70)]
    assert composed_epsilon([*kinds, plain], 1e-6) == math.inf


def uses_one_by_one(event):
    """The single uses inside an event, told apart by what ``dp_accounting`` documents."""
    if isinstance(event, Repeated):
        return uses_one_by_one(event.event) * event.count
    return [event]


@pytest.mark.parametrize("name", EMITTED)
def test_repeats_equal_one_by_one_composition(name):
    """The accountant, given each use by itself and no count, against our counted uses."""
    event = EMITTED[name]
    uses = uses_one_by_one(event)
    accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_ONE)
    for use in uses * 6:
        accountant.compose(use)
    one_by_one = accountant.get_epsilon(1e-6)
    # Equal up to rounding errors; Gaussians, each rounded up to the grid, from above.
    slack = 1e-3 if isinstance(uses[0], dp_accounting.GaussianDpEvent) else 1e-7
    assert composed_epsilon([event] * 6, 1e-6) == pytest.approx(one_by_one, rel=slack)
    repeated = composed_epsilon([Repeated(event, 6)], 1e-6)
    assert repeated == composed_epsilon([event] * 6, 1e-6)
    nested = Composed([Repeated(Composed([event, Repeated(event, 2)]), 2)])
    assert composed_epsilon([nested], 1e-6) == repeated
    assert repeated > 2 * composed_epsilon([event], 1e-6)


@pytest.mark.parametrize("steps", [295, 100_000])
def test_many_steps_are_counted_and_not_written_out(steps):
    """One by one, a step costs a convolution: minutes for this many."""
    epochs = [EventFields.dp_sgd(20.0, 0.01, steps // 5).dp_event()] * 5
    began = time.process_time()
    total = composed_epsilon([*epochs, EventFields.randomized_response(0.1).dp_event()], 1e-6)
    assert time.process_time() - began < 10.0  # 0.1 s in fact
    together = composed_epsilon(
        [
            EventFields.dp_sgd(20.0, 0.01, steps).dp_event(),
            EventFields.randomized_response(0.1).dp_event(),
        ],
        1e-6,
    )
    assert total == together


def test_add_or_remove_is_only_for_noise_that_has_it():
    steps = EventFields.dp_sgd(20.0, 0.01, 100).dp_event()
    weaker = composed_epsilon([steps], 1e-6, "add_or_remove")
    assert 0.0 < weaker < composed_epsilon([steps], 1e-6, "replace_label")
    with pytest.raises(Exception, match="REPLACE_ONE"):
        composed_epsilon([EventFields.randomized_response(1.0).dp_event()], 1e-6, "add_or_remove")
    with pytest.raises(dp_accounting.UnsupportedEventError, match="replaced labels only"):
        composed_epsilon(
            [EventFields.dp_sgd(5.0, 0.02, 1, "label_distance").dp_event()], 1e-5, "add_or_remove"
        )
    with pytest.raises(ValueError, match=r"relation must be one of .*got 'remove'"):
        composed_epsilon([steps], 1e-6, "remove")


@pytest.mark.parametrize("uses", [1, 2, 60])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-2), (2.0, 1e-8)])
def test_composition_is_the_exact_one_from_above(uses, epsilon, delta):
    exact = exact_binary_epsilon(epsilon, uses, delta)
    ours = composed_epsilon([EventFields.randomized_response(epsilon).dp_event()] * uses, delta)
    assert exact - 1e-9 <= ours <= exact + 1e-2


def long_binomial_delta(epsilon, uses, at):
    """``exact_binary_delta`` for thousands of uses."""
    kept = np.arange(uses + 1)
    losses = epsilon * (2 * kept - uses)
    masses = stats.binom.pmf(kept, uses, special.expit(epsilon))
    return float(-np.expm1(np.minimum(at - losses, 0.0)) @ masses)


@pytest.mark.parametrize("uses", [63, 64, 65, 4095, 4096, 100_000])
@pytest.mark.parametrize(("epsilon", "delta"), [(1e-3, 1e-9), (1.0, 1e-5)])
def test_ten_thousand_responses_cost_what_an_exact_sum_says(uses, epsilon, delta):
    """Through every level of blocks: never below, and above by one part in a thousand."""
    ours = composed_epsilon(
        [Repeated(EventFields.randomized_response(epsilon).dp_event(), uses)], delta
    )
    assert long_binomial_delta(epsilon, uses, ours) <= delta
    assert long_binomial_delta(epsilon, uses, ours * (1 - 1e-3)) > delta


def exact_epsilon_of_different(epsilons, delta):
    """By enumerating which of a few binary responses are kept."""
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(epsilons))))
    masses = special.expit(signs * np.array(epsilons)).prod(axis=1)
    losses = signs @ np.array(epsilons)
    return optimize.brentq(
        lambda at: -np.expm1(np.minimum(at - losses, 0.0)) @ masses - delta, 0.0, sum(epsilons)
    )


@pytest.mark.parametrize("delta", [1e-6, 0.1])
def test_different_responses_are_composed_on_one_grid(delta):
    epsilons = [0.3, 0.5, 0.7, 0.11, 1.3, 0.013, 0.9, 0.2, 0.41, 0.6, 2.0, 0.05]
    exact = exact_epsilon_of_different(epsilons, delta)
    ours = composed_epsilon(
        [EventFields.randomized_response(one).dp_event() for one in epsilons], delta
    )
    assert exact <= ours <= exact * 1.002
    assert ours == composed_epsilon(
        [EventFields.randomized_response(one).dp_event() for one in reversed(epsilons)], delta
    )


def test_many_kinds_of_responses_are_rounded_up():
    """A thousand epsilons: no less than of the least of them, nor more than of the largest."""
    epsilons = np.linspace(0.010, 0.0105, 1000)
    ours = composed_epsilon(
        [EventFields.randomized_response(one).dp_event() for one in epsilons], 1e-6
    )
    least, most = (
        composed_epsilon([Repeated(EventFields.randomized_response(one).dp_event(), 1000)], 1e-6)
        for one in (math.sqrt(np.mean(epsilons**2)), 0.0105 * (1 + 1 / 32))
    )
    assert least <= ours <= most * 1.001


@pytest.mark.parametrize("clipping", ["norm", "label_distance"])
def test_many_kinds_of_sampled_steps_are_rounded_up(clipping):
    noises = np.linspace(20.0, 20.5, 200)
    ours = composed_epsilon(
        [EventFields.dp_sgd(noise, 0.05, 1, clipping).dp_event() for noise in noises], 1e-6
    )
    mean = np.mean(noises**-2.0) ** -0.5
    least, most = (
        composed_epsilon([EventFields.dp_sgd(noise, 0.05, 200, clipping).dp_event()], 1e-6)
        for noise in (mean, mean / (1 + 1 / 128) ** 2)
    )
    assert least <= ours <= most * 1.001


def test_gaussians_are_one_of_their_precisions():
    ratios = [3.0, 7.0, 11.0]
    together = sum(one**-2 for one in ratios) ** -0.5
    found = composed_epsilon([EventFields.gaussian(one).dp_event() for one in ratios * 50], 1e-6)
    exact = gaussian_epsilon(together, 1e-6, math.sqrt(50))
    assert exact <= found <= exact * 1.001


def test_kinds_of_noise_together_are_never_below_their_gaussian():
    """Gaussian steps, sampled with probability next to one and not, are one Gaussian."""
    sampled = EventFields.dp_sgd(40.0, 1.0 - 2.0**-53, 500).dp_event()
    events = [
        sampled,
        EventFields.gaussian(5.0).dp_event(),
        Repeated(EventFields.gaussian(9.0).dp_event(), 7),
    ]
    precision = 500 / 20.0**2 + 1 / 5.0**2 + 7 / 9.0**2
    exact = gaussian_epsilon(1.0, 1e-6, math.sqrt(precision))
    assert exact <= composed_epsilon(events, 1e-6) <= exact * 1.001


def test_a_pure_event_dominates_the_channel_of_every_mechanism():
    """Exactly: no pair of labels is told apart better, at any epsilon."""
    rng = np.random.default_rng(17)
    binary = RandomizedResponse(1.0, 2).transition_matrix()
    for prior in rng.dirichlet(np.ones(5), 10):
        channels = [RRTopK(1.0, 5, k).transition_matrix(prior) for k in range(1, 6)]
        channels.append(RRWithPrior(1.0, 5).transition_matrix(prior))
        for at in (0.0, 0.3, 0.6, 0.9, 1.0):
            bound = hockey_stick(*binary, at)
            worst = max(hockey_stick(p, q, at) for c in channels for p in c for q in c)
            assert worst <= bound + 1e-15
    assert hockey_stick(*binary, 0.9) > hockey_stick(
        *RandomizedResponse(0.8, 2).transition_matrix(), 0.9
    )


def test_events_refuse_bad_arguments():
    for epsilon in (0.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="epsilon must be finite and above zero"):
            EventFields.randomized_response(epsilon).dp_event()
    with pytest.raises(ValueError, match="num_buckets must be at least 2, got 1"):
        EventFields.randomized_response(1.0, 1).dp_event()
    with pytest.raises(ValueError, match=r"delta must be in \[0, 1\), got 1\."):
        composed_epsilon([EventFields.randomized_response(1.0).dp_event()], 1.0)


@pytest.mark.parametrize("relation", ["replace_label", "add_or_remove"])
def test_an_added_delta_of_each_step_is_taken_off(relation):
    """As in the receipts of 0.2, where the noise of a step was a known delta from a Gaussian."""
    added, plain = 9e-13, EventFields.dp_sgd(0.35, 0.01, 1000).dp_event()
    event = Repeated(Composed((plain.event, added_delta(added))), 1000)
    assert EventFields(EventFields.of(event)).dp_event() == event
    found = composed_epsilon([event], 2000 * added, relation)
    assert found == composed_epsilon([plain], 1000 * added, relation)
    assert found > composed_epsilon([plain], 2000 * added, relation)
    assert composed_epsilon([event], 1000 * added, relation) == math.inf
    assert composed_epsilon([Repeated(added_delta(1.0), 1)], 0.9, relation) == math.inf
