"""Peer-to-peer randomized response: its law against enumeration, its checks, its charges."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from tf_labeldp import PrivateLabels
from tf_labeldp.accounting import BudgetExceededError, PrivacyBudget, peer_to_peer_guarantee
from tf_labeldp.mechanisms import (
    HistogramMechanism,
    PeerToPeerRandomizedResponse,
    RandomizedResponse,
    random_bits,
)

REJECT = 1e-4
"""A right law is rejected with this probability, had the seed not been fixed."""


def mechanism_of(alpha=0.2, theta=0.5, size=3, delta=1e-3):
    return PeerToPeerRandomizedResponse.for_cluster_size(alpha, theta, size, delta)


def law_of_reports(labels, alpha, theta, oneself=True):
    """The law of all reports of one cluster: every flip, peer and subsample enumerated."""
    n = len(labels)
    law = dict.fromkeys(itertools.product((-1, 0, 1), repeat=n), 0.0)
    for noisy in itertools.product((0, 1), repeat=n):
        flips = math.prod(
            1 - alpha if a == b else alpha for a, b in zip(noisy, labels, strict=True)
        )
        choices = [[j for j in range(n) if oneself or j != i] for i in range(n)]
        for peers in itertools.product(*choices):
            for inside in itertools.product((False, True), repeat=n):
                chance = math.prod(theta if i else 1 - theta for i in inside)
                chance /= math.prod(len(some) for some in choices)
                out = tuple(noisy[j] if i else -1 for i, j in zip(inside, peers, strict=True))
                law[out] += flips * chance
    return law


def p_value(drawn, law):
    """Chi-square of joint outcomes (draws, n) against a law."""
    code = (drawn + 1) @ (3 ** np.arange(drawn.shape[1])[::-1])
    counts = np.bincount(code, minlength=3 ** drawn.shape[1])
    expected = np.array([law[out] for out in itertools.product((-1, 0, 1), repeat=drawn.shape[1])])
    assert np.all(counts[expected == 0.0] == 0)
    kept = expected > 0.0
    return float(stats.chisquare(counts[kept], drawn.shape[0] * expected[kept]).pvalue)


@pytest.mark.parametrize("labels", [(0, 1), (1, 0, 0)])
def test_the_joint_law_of_the_reports(labels):
    """Many clusters in one release, each a draw of its own; users of clusters interleaved."""
    draws, n = 60_000, len(labels)
    mechanism = mechanism_of(size=n)
    shuffled = np.random.default_rng(3).permutation(draws * n)
    clusters = np.repeat(np.arange(draws), n)[shuffled]
    reports = np.empty(draws * n, dtype=np.int64)
    reports[shuffled] = mechanism.randomize(
        np.tile(labels, draws)[shuffled], clusters, rng=np.random.default_rng(4)
    )
    drawn = reports.reshape(draws, n)
    assert p_value(drawn, law_of_reports(labels, 0.2, 0.5)) > REJECT
    assert p_value(drawn, law_of_reports(labels, 0.25, 0.5)) < REJECT
    assert p_value(drawn, law_of_reports(labels, 0.2, 0.52)) < REJECT
    assert p_value(drawn, law_of_reports(labels, 0.2, 0.5, oneself=False)) < REJECT


def test_peers_are_of_the_same_cluster():
    """Cluster 7 has ones alone, cluster 2 zeros alone: hardly flipped, labels stay inside."""
    mechanism = mechanism_of(alpha=1e-9, theta=1.0, size=50)
    clusters = np.random.default_rng(6).permutation(np.repeat([7, 2], 50))
    labels = (clusters == 7).astype(np.int64)
    reports = mechanism.randomize(labels, clusters, rng=np.random.default_rng(7))
    assert reports.tolist() == labels.tolist()
    mixed = mechanism.randomize(labels, None, rng=np.random.default_rng(7))
    assert mixed.tolist() != labels.tolist()


def test_a_seed_repeats_and_secure_bits_do_not():
    mechanism, labels = mechanism_of(), np.tile([0, 1], 100)
    first, second = (mechanism.randomize(labels, rng=np.random.default_rng(9)) for _ in range(2))
    assert first.tolist() == second.tolist()
    assert mechanism.randomize(labels).tolist() != mechanism.randomize(labels).tolist()
    assert first.dtype == np.int64 and set(first.tolist()) == {-1, 0, 1}


@pytest.mark.parametrize("value", [0.1, 1e-20, 0.5, 2.0**-53, 1 / 3])
def test_what_is_drawn_is_on_the_safe_side(value, monkeypatch):
    """Flips are rounded up and reports down, in units of 2^-53: the integers next to each limit."""
    exact = value * 2.0**53
    flips, reports = math.ceil(exact), math.floor(exact)
    drawn = [[max(flips - 1, 0), flips, flips], [0, 0, 0]]  # the first user flips
    monkeypatch.setattr(
        random_bits, "uniform_integers", lambda n, rng: np.array(drawn.pop(0), np.uint64)
    )
    monkeypatch.setattr(random_bits, "uniform_below", lambda bounds, rng: np.arange(bounds.size))
    labels = np.zeros(3, int)
    assert mechanism_of(alpha=value, theta=1.0).randomize(labels).tolist() == [1, 0, 0]
    drawn = [[2**53 - 1] * 3, [max(reports - 1, 0), reports, 2**53 - 1]]
    shown = mechanism_of(theta=value).randomize(labels).tolist()
    assert shown == [0 if reports else -1, -1, -1]


def test_reports_of_another_are_looked_at():
    mechanism = mechanism_of(size=2)
    assert mechanism.check_output(np.zeros(0, int), 0).shape == (0,)
    assert mechanism.check_output(np.array([0, 1, -1], np.int8), 3).tolist() == [0, 1, -1]
    with pytest.raises(ValueError, match=r"shape \(2,\), expected \(3,\)"):
        mechanism.check_output(np.array([0, 1]), 3)
    with pytest.raises(ValueError, match="dtype float64"):
        mechanism.check_output(np.array([0.0, 1.0, -1.0]), 3)
    for value in (-2, 2):
        with pytest.raises(ValueError, match="reports must be 0, 1, or -1"):
            mechanism.check_output(np.array([0, value]), 2)


@pytest.mark.holds("mechanisms.PeerToPeerRandomizedResponse")
def test_the_stated_guarantee_is_checked():
    found = peer_to_peer_guarantee(0.2, 0.5, 100, 1e-4)
    mechanism = PeerToPeerRandomizedResponse(found.epsilon, 0.2, 0.5, 100, 1e-4)
    assert mechanism == mechanism_of(size=100, delta=1e-4)
    assert PeerToPeerRandomizedResponse(2.0, 0.2, 0.5, 100, 1e-4).epsilon == 2.0
    with pytest.raises(ValueError, match=r"epsilon must be at least 0\.24.* at delta=0\.0001"):
        PeerToPeerRandomizedResponse(found.epsilon * (1 - 1e-6), 0.2, 0.5, 100, 1e-4)
    with pytest.raises(ValueError, match=r"at delta=0 in clusters .*for_cluster_size"):
        PeerToPeerRandomizedResponse(found.epsilon, 0.2, 0.5, 100)


def test_without_delta_it_is_randomized_response():
    mechanism = mechanism_of(alpha=0.2, delta=0.0)
    assert mechanism.epsilon == pytest.approx(math.log(4.0), rel=1e-14)
    assert mechanism.dp_event() == RandomizedResponse(mechanism.epsilon, 2).dp_event()


def test_pure_noise_has_an_epsilon_above_zero():
    assert 0.0 < mechanism_of(alpha=0.5).epsilon <= 1e-12


def test_what_a_peer_learns():
    mechanism = mechanism_of(alpha=0.2, theta=0.1, size=100)
    pure = mechanism.per_peer_guarantee()
    assert pure.epsilon == pytest.approx(math.log(4.0), rel=1e-14) and pure.delta == 0.0
    assert pure.epsilon >= math.log(4.0)
    other = mechanism.per_peer_guarantee(pure=False)
    assert other.epsilon == 0.0
    assert other.delta == pytest.approx(0.006, rel=1e-14)  # the paper rounds up to 1 / s
    assert "towards one other user of its cluster" in pure.unit
    assert any("do not collude" in text for text in pure.assumptions)
    # The view of a peer, enumerated: whom it asked, and the answer.
    views = [
        {
            (j, y): (0.2 if y != (own if j == 0 else 0) else 0.8) / 100
            for j in range(100)
            for y in (0, 1)
        }
        for own in (0, 1)
    ]
    assert sum(max(views[0][v] - views[1][v], 0.0) for v in views[0]) == pytest.approx(0.006)


BAD = {
    "flip": (dict(flip_probability=0.7), ValueError, r"flip_probability must be in \(0, 0.5\]"),
    "rate": (dict(subsampling_rate=1.5), ValueError, r"subsampling_rate must be in \(0, 1\]"),
    "size": (dict(cluster_size=1), ValueError, "cluster_size must be at least 2, got 1"),
    "sizes": (dict(cluster_size=[10, 20]), TypeError, "cluster_size must be an integer, got list"),
    "delta": (dict(delta=1.0), ValueError, r"delta must be in \[0, 1\)"),
    "classes": (dict(num_classes=10), ValueError, "num_classes must be 2, got 10.*RandomizedResp"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    changed, error, message = BAD[case]
    given = dict(
        epsilon=9.0, flip_probability=0.1, subsampling_rate=0.5, cluster_size=10, delta=1e-3
    )
    with pytest.raises(error, match=message):
        PeerToPeerRandomizedResponse(**(given | changed))


BAD_INPUT = {
    "labels": ([0, 1, 987654], [0, 0, 0], ValueError, r"must lie in 0..1, but 1 of 3 do not"),
    "shape": ([0, 1, 1], [0, 0], ValueError, r"shape \(3,\), one per label, got \(2,\)"),
    "negative": ([0, 1, 1], [-1, -1, -1], ValueError, "must be in 0..C-1, got -1"),
    "small": ([0] * 5, [0, 0, 0, 4, 4], ValueError, "but 1 of 2 have fewer, the smallest 2"),
    "alone": ([0, 1], None, ValueError, "at least cluster_size=3 users, but 1 of 1 have fewer"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(case):
    labels, clusters, error, message = BAD_INPUT[case]
    with pytest.raises(error, match=message) as caught:
        mechanism_of().randomize(np.array(labels), clusters)
    assert "987654" not in str(caught.value)


def vault(size=300, store=None, epsilon=4.0, delta=2e-3, num_classes=2):
    labels = np.random.default_rng(0).integers(0, 2, size)
    budget = PrivacyBudget(epsilon, delta)
    return PrivateLabels(labels, num_classes=num_classes, budget=budget, store=store)


def test_a_vault_charges_and_states_it():
    mechanism, clusters = mechanism_of(), np.repeat(np.arange(100), 3)
    labels = vault()
    reports = labels.randomize(mechanism, clusters=clusters)
    guarantee = labels.guarantee()
    assert (guarantee.epsilon, guarantee.delta) == (mechanism.epsilon, 1e-3)
    for text in mechanism.assumptions:
        assert text in guarantee.assumptions
    assert any("clusters" in text and "without these labels" in text
               for text in guarantee.assumptions)  # fmt: skip
    assert reports.guarantee() == guarantee
    labels.randomize(mechanism, clusters=clusters)
    both = labels.guarantee()
    assert both.epsilon == pytest.approx(2 * mechanism.epsilon) and both.delta == 2e-3
    with pytest.raises(BudgetExceededError):  # a third delta
        labels.randomize(mechanism, clusters=clusters)
    pure = HistogramMechanism(0.1, num_classes=2)
    assert labels.guarantee(after=pure).epsilon == pytest.approx(both.epsilon + 0.1)


def test_a_vault_releases_reports_alone():
    """Who reports nothing is not in it, and no -1 stands for it; everybody is charged."""
    mechanism, clusters = mechanism_of(), np.repeat(np.arange(100), 3)
    labels = vault()
    noisy = labels.randomize(mechanism, clusters=clusters)
    assert noisy.mechanism == mechanism and noisy.priors is None
    assert noisy.values.dtype == np.int64 and set(noisy.values.tolist()) == {0, 1}
    assert noisy.values.shape == noisy.indices.shape == (len(noisy),)
    assert len(set(noisy.indices.tolist())) == len(noisy)
    assert stats.binomtest(len(noisy), 300, mechanism.subsampling_rate).pvalue > 1e-9
    assert labels.receipts[0].num_examples == 300
    assert labels.receipts[0].kind == "draw"


def test_reports_belong_to_their_users():
    """Hardly flipped, in clusters of ones alone and of zeros alone, in any order of asking."""
    size = 600
    clusters = np.random.default_rng(1).permutation(np.repeat([0, 1], size // 2))
    labels = PrivateLabels(clusters, num_classes=2, budget=PrivacyBudget(60.0))
    mechanism = mechanism_of(alpha=1e-9, theta=0.5, size=50, delta=0.0)
    rows = np.random.default_rng(2).permutation(size)[:400]
    noisy = labels.randomize(mechanism, rows, clusters=clusters[rows])
    assert 100 < len(noisy) < 300 and set(noisy.indices.tolist()) <= set(rows.tolist())
    np.testing.assert_array_equal(noisy.values, clusters[noisy.indices])
    assert noisy.indices.tolist() == [row for row in rows if row in set(noisy.indices.tolist())]


def test_a_vault_refuses_what_does_not_fit_before_it_charges():
    with pytest.raises(BudgetExceededError, match="needs a delta above zero"):
        vault(delta=0.0).randomize(mechanism_of(), clusters=np.repeat(np.arange(100), 3))
    with pytest.raises(ValueError, match="num_classes=2, the labels have 10"):
        vault(num_classes=10).randomize(mechanism_of())
    labels = vault()
    with pytest.raises(ValueError, match="at least cluster_size=3 users"):
        labels.randomize(mechanism_of(), clusters=np.repeat(np.arange(150), 2))
    with pytest.raises(ValueError, match="takes no priors"):
        labels.randomize(
            mechanism_of(), priors=np.full(2, 0.5), clusters=np.repeat(np.arange(100), 3)
        )
    with pytest.raises(TypeError, match="mechanism of many labels"):
        labels.release(mechanism_of(), public_input=np.repeat(np.arange(100), 3))
    assert labels.guarantee().epsilon == 0.0 and labels.receipts == ()
