"""Peer-to-peer randomized response: delta against enumeration, and every bound from its side."""

from __future__ import annotations

import functools
import itertools
import math
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from tf_labeldp.accounting import peer_to_peer_guarantee
from tf_labeldp.accounting.peer_to_peer import _Cluster
from tf_labeldp.accounting.peer_to_peer import _Core as Core
from tf_labeldp.mechanisms import PeerToPeerRandomizedResponse
from tf_labeldp.plugins import EventFields

RATES = [(0.1, 1.0), (0.25, 1 / 3), (0.01, 0.5)]


def peer_to_peer_delta(epsilon, alpha, theta, size):
    """The bound of delta that epsilon is found by: the inverse of ``peer_to_peer_guarantee``."""
    cluster = _Cluster(alpha, theta, size)
    ends = max(cluster.bound((ones, ones), epsilon) for ones in (0, size - 1))
    return max([ends, *cluster.above(ends, epsilon).values()])


def law_given_share(labels, alpha, theta):
    """The same law with reports drawn independently, given the share of noisy ones."""
    law: dict[tuple[int, ...], Fraction] = {}
    for noisy in itertools.product((0, 1), repeat=len(labels)):
        pairs = zip(noisy, labels, strict=True)
        flips = math.prod((1 - alpha if a == b else alpha) for a, b in pairs)
        share = Fraction(sum(noisy), len(labels))
        of_one = {-1: 1 - theta, 1: theta * share, 0: theta * (1 - share)}
        for out in itertools.product((-1, 0, 1), repeat=len(labels)):
            chance = flips * math.prod(of_one[value] for value in out)
            law[out] = law.get(out, Fraction(0)) + chance
    return law


@functools.lru_cache(maxsize=64)
def pairs_of_laws(size, alpha, theta):
    """Both laws, outcome by outcome, for all labels of the others and in both directions."""
    pairs = []
    for ones in range(size):
        others = (1,) * ones + (0,) * (size - 1 - ones)
        laws = [law_given_share((own, *others), Fraction(alpha), Fraction(theta)) for own in (0, 1)]
        zero, one = ([law[out] for out in laws[0]] for law in laws)
        pairs += [(zero, one), (one, zero)]
    return pairs


def enumerated_delta(epsilon, size, alpha, theta):
    """The worst delta over all labels of the others and both directions, in exact arithmetic."""
    grown, zero = Fraction(math.exp(epsilon)), Fraction(0)
    return float(
        max(
            sum((max(a - grown * b, zero) for a, b in zip(*pair, strict=True)), zero)
            for pair in pairs_of_laws(size, alpha, theta)
        )
    )


def more_reports(size, theta):
    """P[N > j] for j = 0, 1, ... in a cluster of this size."""
    return stats.binom.sf(np.arange(size), size, theta)


def most_reports(size, theta):
    """Hoeffding's bound of P[N > j] for j = 0, 1, ... in clusters of this size and all larger."""
    mean = theta * size
    j = np.arange(math.ceil(mean + 12.0 * math.sqrt(mean) + 40.0))
    bound = np.where(j >= mean, stats.poisson.sf(j, mean), stats.binom.sf(j, size, theta))
    between = np.flatnonzero((j > max(mean - 1.0, 0.0)) & (j < mean))
    bound[between] = bound[between - 1]
    return bound


def summed_deltas(epsilon, size, alpha, theta, tails=most_reports):
    """Delta for each number of ones among the others (size,), summed over all t, k and M."""
    counts = np.arange(size + 1)
    signed = []
    for ones in range(size):
        q = np.convolve(
            stats.binom.pmf(np.arange(ones + 1), ones, 1 - alpha),
            stats.binom.pmf(np.arange(size - ones), size - 1 - ones, alpha),
        )
        less, more = np.append(q, 0.0), np.append(0.0, q)
        grown = math.exp(epsilon)
        signed.append((alpha - grown * (1 - alpha)) * less + (1 - alpha - grown * alpha) * more)
    above = tails(size, theta)
    given_reports = np.zeros((above.size + 1, size))
    for t in range(1, above.size + 1):
        chances = stats.binom.pmf(np.arange(t + 1)[:, np.newaxis], t, counts / size)
        given_reports[t] = np.maximum(chances @ np.array(signed).T, 0.0).sum(axis=0)
    return above @ np.diff(given_reports, axis=0)


@pytest.mark.parametrize(("alpha", "theta"), RATES)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.holds("accounting.peer_to_peer_guarantee")
def test_delta_is_never_below_the_enumerated_one(size, alpha, theta):
    for epsilon in (1e-9, 0.2, 0.7):
        exact = enumerated_delta(epsilon, size, alpha, theta)
        summed = summed_deltas(epsilon, size, alpha, theta, more_reports).max()
        assert summed == pytest.approx(exact, rel=1e-9, abs=1e-15)
        assert exact <= peer_to_peer_delta(epsilon, alpha, theta, size)


@pytest.mark.parametrize(
    ("size", "alpha", "theta", "delta"), [(2, 0.1, 0.6, 1e-3), (4, 0.3, 1.0, 1e-4)]
)
@pytest.mark.holds("accounting.peer_to_peer_guarantee")
def test_epsilon_is_the_least_that_holds(size, alpha, theta, delta):
    epsilon = peer_to_peer_guarantee(alpha, theta, size, delta).epsilon
    assert summed_deltas(epsilon, size, alpha, theta).max() <= delta
    assert summed_deltas(epsilon * (1 - 1e-4), size, alpha, theta).max() > delta


CLUSTERS = [
    (0.1, 1.0, 60, 0.8),
    (0.25, 0.3, 80, 0.2),
    (0.02, 0.05, 150, 0.5),
    (0.4, 1.0, 100, 0.1),
    (0.1, 1e-3, 10, 1.0),  # a mean of 0.01 reports: each number counts with its own delta
]


@pytest.mark.parametrize(("alpha", "theta", "size", "epsilon"), CLUSTERS)
def test_delta_of_a_larger_cluster_is_the_summed_one(alpha, theta, size, epsilon):
    exact = summed_deltas(epsilon, size, alpha, theta).max()
    ours = peer_to_peer_delta(epsilon, alpha, theta, size)
    assert exact * (1 - 1e-9) <= ours <= exact * (1 + 1e-3)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    alpha=st.floats(1e-3, 0.499),
    theta=st.floats(1e-2, 1.0),
    size=st.integers(2, 25),
    part=st.floats(1e-3, 0.99),
)
def test_delta_is_never_below_and_hardly_above(alpha, theta, size, part):
    epsilon = part * math.log((1 - alpha) / alpha)
    exact = summed_deltas(epsilon, size, alpha, theta).max()
    ours = peer_to_peer_delta(epsilon, alpha, theta, size)
    assert exact * (1 - 1e-9) - 1e-15 <= ours <= exact * (1 + 1e-3) + 1e-11


@pytest.mark.slow
def test_no_composition_is_left_out():
    """The worst is not always a cluster of one label: here it is in between."""
    deltas = summed_deltas(0.00584, 200, 0.49, 1.0, more_reports)
    assert deltas.argmax() == 187
    assert deltas.max() > 1.003 * max(deltas[0], deltas[-1])
    deltas = summed_deltas(0.00584, 200, 0.49, 1.0)
    cluster = _Cluster(0.49, 1.0, 200)
    ends = max(cluster.bound((ones, ones), 0.00584) for ones in (0, 199))
    ours = max(cluster.above(ends, 0.00584).values())
    assert deltas.max() * (1 - 1e-9) <= ours <= deltas.max() * 1.02
    epsilon = peer_to_peer_guarantee(0.49, 1.0, 200, 1e-6).epsilon
    assert summed_deltas(epsilon, 200, 0.49, 1.0).max() <= 1e-6


def test_a_range_of_compositions_is_bounded_by_its_core():
    size, alpha, epsilon = 60, 0.2, 0.3
    deltas = summed_deltas(epsilon, size, alpha, 0.5)
    for low, high in [(0, 5), (3, 3), (10, 30), (0, 59), (50, 59)]:
        bound = _Cluster(alpha, 0.5, size, 1e-20).bound((low, high), epsilon)
        assert bound >= deltas[low : high + 1].max() * (1 - 1e-9)


@pytest.mark.slow
def test_what_could_not_be_split_counts_with_its_bound(monkeypatch):
    exact = peer_to_peer_delta(0.03, 0.45, 1.0, 201)
    monkeypatch.setattr(_Cluster, "small", 0)
    monkeypatch.setattr(_Cluster, "most_splits", 8)
    cluster = _Cluster(0.45, 1.0, 201, 1e-20)
    found = cluster.above(exact, 0.03)
    assert found and max(found.values()) > exact
    assert list(found.values()) == sorted(found.values(), reverse=True)


@pytest.mark.parametrize(("alpha", "theta"), [*RATES, (0.1, 0.05)])
def test_at_least_holds_for_all_larger_clusters(alpha, theta):
    for epsilon in (0.05, 0.3, 1.0):
        stated = peer_to_peer_delta(epsilon, alpha, theta, 12)
        for size in (12, 13, 14, 17, 24, 40):
            exact = summed_deltas(epsilon, size, alpha, theta, more_reports).max()
            assert exact <= stated * (1 + 1e-9) + 1e-20


def test_hoeffding_bounds_of_the_number_of_reports():
    """P[N > j] of every larger cluster is below the one used, at every edge."""
    for theta, size in ((1.0, 10), (0.3, 40), (0.05, 7)):
        core = Core(0.2, theta, size, 1e-9, 0, size - 1)
        edges, above, beyond = core.reports
        for larger in (size, size + 1, size + 5, 10 * size, 10_000):
            exact = stats.binom.sf(edges, larger, theta * size / larger)
            assert np.all(exact[:-1] <= above[1:] + 1e-13)
            assert exact[-1] <= beyond + 1e-13


@pytest.mark.parametrize("theta", [0.5, 1.0])
def test_errors_of_incomplete_beta_functions_are_covered(monkeypatch, theta):
    """SciPy 1.11 is off by 2e-15 a user; here it always comes out below."""
    module, epsilon = "tf_labeldp.accounting.peer_to_peer.", 0.7

    def bound():
        return Core(1e-3, theta, 20_000, 1e-12, 0, 19_999).delta(epsilon)

    with monkeypatch.context() as exact:
        exact.setattr(module + "_ROUNDING", 0.0)
        exact.setattr(module + "_TAIL_ERROR", 0.0, raising=False)
        honest = bound()
    for name in ("betainc", "pdtrc"):
        function = getattr(special, name)
        low = functools.partial(lambda f, *args: f(*args) * (1.0 - 5e-15 * 20_000), function)
        monkeypatch.setattr(special, name, low)
    assert honest > 1e-20
    assert bound() >= honest


def test_statements_at_the_ends():
    alone = math.log(9.0)
    assert peer_to_peer_guarantee(0.5, 1.0, 10, 1e-6).epsilon == 0.0
    almost = peer_to_peer_guarantee(0.5 - 2.0**-54, 1.0, 10, 0.0).epsilon
    assert almost == pytest.approx(2.0**-52, rel=1e-12)
    assert peer_to_peer_guarantee(0.1, 1.0, 10, 0.0).epsilon == pytest.approx(alone, rel=1e-14)
    assert peer_to_peer_guarantee(0.1, 1.0, 10, 1e-30).epsilon == pytest.approx(alone, rel=1e-14)
    assert peer_to_peer_guarantee(0.1, 1.0, 2, 1e-24).epsilon == pytest.approx(alone, rel=1e-14)
    assert peer_to_peer_guarantee(0.1, 1.0, 2, 1e-20).epsilon < alone * (1 - 1e-10)
    # So few reports that they reveal nothing, except with probability delta.
    assert peer_to_peer_guarantee(0.1, 1e-6, 10, 0.1).epsilon == 0.0
    assert 0.0 < peer_to_peer_delta(0.9 * alone, 0.1, 1.0, 10) < 1e-3
    assert peer_to_peer_guarantee(1e-12, 1.0, 2, 1e-3).epsilon <= math.log(1e12)
    least = peer_to_peer_guarantee(1e-310, 1.0, 2, 0.0).epsilon
    assert least == pytest.approx(310 * math.log(10.0), rel=1e-12)


@pytest.mark.slow
def test_fifty_thousand_users_take_seconds():
    began = time.process_time()
    guarantee = peer_to_peer_guarantee(0.1, 1.0, 50_000, 1e-10)
    assert time.process_time() - began < 30.0
    # The normal approximation of shift over noise, with delta's quantile.
    variance = 50_000 * (0.09 + 0.09)
    shift = 0.8 / math.sqrt(variance)
    normal = next(
        e
        for e in np.linspace(0.0, 1.0, 100_001)[1:]
        if special.ndtr(shift / 2 - e / shift) - math.exp(e) * special.ndtr(-shift / 2 - e / shift)
        <= 1e-10
    )
    assert guarantee.epsilon == pytest.approx(normal, rel=0.05)


def test_the_statement_names_what_it_rests_on():
    guarantee = peer_to_peer_guarantee(0.1, 0.25, 100, 1e-5)
    text = " ".join(guarantee.assumptions)
    for words in (
        "clusters were made from them without labels",
        "at least 100 users",
        "The learner sees the reports alone",
        "follows the protocol (flips once, with probability 0.1;",
        "reports with probability 0.25) and sends the learner nothing else",
        "(2.19722, 0)-label-DP towards that user; this statement does not cover it",
    ):
        assert words in text
    assert guarantee.relation == "replace_label"
    mechanism = PeerToPeerRandomizedResponse.for_cluster_size(0.1, 0.25, 100, guarantee.delta)
    assert guarantee.assumptions == mechanism.assumptions


BAD = {
    "flip-zero": (dict(flip_probability=0.0), ValueError, "flip_probability must be finite and ab"),
    "flip-large": (dict(flip_probability=0.6), ValueError, r"must be in \(0, 0.5\], got 0.6"),
    "rate-zero": (dict(subsampling_rate=0.0), ValueError, r"subsampling_rate must be in \(0, 1"),
    "size-one": (dict(cluster_size=1), ValueError, "must be at least 2, got 1: a user alone"),
    "size-several": (dict(cluster_size=[5, 6]), TypeError, "cluster_size must be an integer"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    changed, error, message = BAD[case]
    values = dict(flip_probability=0.1, subsampling_rate=0.5, cluster_size=100) | changed
    with pytest.raises(error, match=message):
        peer_to_peer_guarantee(**values, delta=1e-5)


def test_other_bad_arguments():
    with pytest.raises(ValueError, match=r"delta must be in \[0, 1\), got 1\."):
        peer_to_peer_guarantee(0.1, 0.5, 100, 1.0)


def test_approximate_event_without_delta_is_the_pure_one():
    assert (
        EventFields.approximate(0.5, 0.0).dp_event()
        == EventFields.randomized_response(0.5).dp_event()
    )
    with pytest.raises(ValueError, match=r"delta must be in \[0, 1\), got 1\."):
        EventFields.approximate(0.5, 1.0).dp_event()
    with pytest.raises(ValueError, match="epsilon must be finite and above zero"):
        EventFields.approximate(-1.0, 1e-6).dp_event()


@pytest.mark.parametrize("least_delta", [1e-2, 1e-12])
def test_what_is_left_out_of_the_flips_is_what_the_bound_of_delta_adds(least_delta):
    core = Core(0.3, 0.5, 4001, least_delta, ones=2000, zeros=2000)
    fewest, kept = core.binomial(core.ones, 0.3, core.log_tail)
    law = stats.binom(core.ones, 0.3)
    outside = law.cdf(fewest - 1) + law.sf(fewest + kept.size - 1)
    assert outside <= 2.5 * 1e-12 * least_delta
