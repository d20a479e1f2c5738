"""The quantile of scores: its privacy, its coverage and the need for its correction, exactly."""

from __future__ import annotations

import numpy as np
import pytest

from tf_labeldp import audit
from tf_labeldp.mechanisms import QuantileMechanism

TWO = [0.7, 0.3]


def chances(mechanism, labels, predictions):
    """The thresholds, and P[each is drawn], from the noise's P[X >= x] = e^(-decay x)."""
    thresholds, utilities = mechanism.utilities(labels, predictions)
    decay = 0.5 * mechanism.epsilon
    sums = np.arange(utilities.min(), 60.0 / decay)[:, np.newaxis]
    over = np.maximum(sums - utilities + 1, 0)
    up_to, below = (-np.expm1(-decay * np.maximum(over - less, 0)) for less in (0, 1))
    ones = np.ones_like(sums)  # the last of equal sums wins
    earlier = np.cumprod(np.hstack([ones, up_to[:, :-1]]), axis=1)
    later = np.cumprod(np.hstack([ones, below[:, :0:-1]]), axis=1)[:, ::-1]
    mass = np.where(over > 0, np.exp(-decay * (over - 1.0)), 0.0) * -np.expm1(-decay)
    return thresholds, (mass * earlier * later).sum(axis=0)


@pytest.mark.parametrize("epsilon", [0.5, 2.5])
@pytest.mark.holds("mechanisms.QuantileMechanism")
def test_no_label_makes_a_threshold_more_than_e_to_the_epsilon_likelier_and_one_nearly(epsilon):
    """From both sides, over all labels of 100 examples that have the same two probabilities."""
    mechanism = QuantileMechanism(epsilon, 0.5, num_classes=2)
    rows, laws = np.tile(TWO, (100, 1)), []
    for second in range(101):
        thresholds, law = chances(mechanism, (np.arange(100) < second).astype(int), rows)
        laws.append(law)
    assert thresholds.tolist() == [-0.7, -0.3, 0.0]
    np.testing.assert_allclose(np.sum(laws, axis=1), 1.0, rtol=0, atol=1e-9)
    worst = np.abs(np.diff(np.log(laws), axis=0)).max()
    assert epsilon * (1 - 1e-3) < worst <= epsilon + 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_one_label_moves_the_difference_of_two_utilities_by_at_most_two(seed):
    rng = np.random.default_rng(seed)
    mechanism = QuantileMechanism(4.0, 0.2, num_classes=5)
    rows, labels = rng.dirichlet(np.full(5, 0.4), 60), rng.integers(0, 5, 60)
    before = mechanism.utilities(labels, rows)[1]
    assert before.max() == 0
    moved = []
    for at in range(60):
        other = labels.copy()
        other[at] = (labels[at] + rng.integers(1, 5)) % 5
        moved.append(np.ptp(mechanism.utilities(other, rows)[1] - before))
    assert max(moved) == 2


def worst_miss(mechanism, n):
    """The largest chance of a miss over places of n + 1 scores in three of the thresholds' cells.

    Those up to the r-th are 0, the rest is next to the largest, also in two cells at the rank.
    """
    rank, found = mechanism.rank(n), []
    for low in range(max(0, rank - 40), rank):
        for middle in (0.95, 0.99):
            scores = np.full(n + 1, 0.99)
            scores[low:rank], scores[:low] = middle, 0.0
            miss = 0.0
            for score, at in zip(*np.unique(scores, return_index=True), strict=True):
                thresholds, law = chances(mechanism, np.delete(scores, at), np.zeros(n))
                miss += (scores == score).mean() * law[thresholds < score].sum()
            found.append(miss)
    return max(found)


@pytest.mark.parametrize(("epsilon", "n"), [(1.0, 199), (4.0, 99)])
@pytest.mark.holds("mechanisms.QuantileMechanism")
def test_scores_in_any_cells_are_missed_by_at_most_alpha_and_a_correction_is_needed(epsilon, n):
    """An exact mean over the new example's place among n + 1, and over the noise."""
    mechanism = QuantileMechanism(epsilon, 0.12, low=0.0, high=1.0)
    exact = 1.0 - mechanism.rank(n) / (n + 1)  # what is missed without noise
    worst = worst_miss(mechanism, n)
    assert worst <= 0.12
    assert worst - exact >= 0.4 * (0.12 - exact)


@pytest.mark.slow
def test_the_drawn_threshold_has_this_law():
    mechanism = QuantileMechanism(0.9, 0.5, num_classes=2)
    labels, rows, rng, n = np.arange(60) % 2, np.tile(TWO, (60, 1)), np.random.default_rng(0), 1500
    thresholds, law = chances(mechanism, labels, rows)
    drawn = [float(mechanism.release(labels, rows, rng=rng)) for _ in range(n)]
    shares = (np.array(drawn)[:, np.newaxis] == thresholds).mean(axis=0)
    assert np.all(np.abs(shares - law) <= 4 * np.sqrt(law * (1 - law) / n))
    assert float(mechanism.release(labels, rows)) in thresholds  # by secure bits


@pytest.mark.slow
def test_an_audit_from_below_finds_most_of_epsilon():
    mechanism, rows = QuantileMechanism(2.0, 0.3, num_classes=2), np.tile(TWO, (30, 1))
    rank = mechanism.rank(30)
    others = (np.arange(29) >= rank - 1).astype(int)  # the last label decides on the quantile

    def draw(labels, rng):
        data = [np.append(others, label) for label in labels]
        return np.array([float(mechanism.release(each, rows, rng=rng)) for each in data])

    found = audit.audit_mechanism(draw, [0, 1], claimed=2.0, draws=2000, seed=3)
    assert 1.0 < found.lower_bound <= 2.0


def test_thresholds_of_numbers_grow_by_4_percent_and_the_last_covers_the_range():
    found = QuantileMechanism(1.0, 0.1, low=-3.0, high=5.0).thresholds(np.zeros(9))
    assert found.size == 512 and np.all(np.diff(found) > 0.0) and 8.0 <= found[-1] < 8.0 + 1e-14
    np.testing.assert_allclose(found[1:] / found[:-1], 2.0 ** (1 / 16))


def test_thresholds_of_classes_follow_the_expected_misses_also_of_a_certain_model():
    rng = np.random.default_rng(0)
    for sharpness in (1.0, 30.0):
        logits = sharpness * rng.normal(size=(500, 6))
        rows = np.exp(logits - logits.max(axis=1, keepdims=True))
        rows /= rows.sum(axis=1, keepdims=True)
        found = QuantileMechanism(1.0, 0.1, num_classes=6).thresholds(rows)
        assert 100 < found.size <= 513 and found[-1] == 0.0 and np.all(np.diff(found) > 0.0)
        missed = np.array([(rows * (-rows > at)).sum() for at in found]) / 500
        assert missed[0] > 0.5 and np.diff(missed).min() > -0.05


def test_alpha_below_what_n_allows_is_refused_with_the_labels_that_it_needs():
    mechanism = QuantileMechanism(1.0, 0.1, num_classes=2)
    assert mechanism.rank(1000) == 912  # 901 without noise
    assert mechanism.rank(115) == 115
    with pytest.raises(ValueError, match=r"at least 115 held-out labels for alpha=0\.1 .* got 114"):
        mechanism.rank(114)
    with pytest.raises(ValueError, match="alpha must be in"):
        QuantileMechanism(1.0, 0.0, num_classes=2)
    needed = [QuantileMechanism(e, 0.5, num_classes=2).rank(10**9) for e in (2.1e-4, 1.9e-4, 1e-6)]
    above = np.array(needed) - 500_000_001  # inversely proportional to epsilon, also if tiny
    np.testing.assert_allclose(above * [2.1e-4, 1.9e-4, 1e-6], 11.62, rtol=0.01)


def test_of_equal_sums_the_larger_threshold_wins(monkeypatch):
    """The proof of coverage needs it: a smaller one must exceed the noise, not reach it."""
    mechanism = QuantileMechanism(1.0, 0.2, num_classes=2)
    labels, rows = np.arange(200) % 2, np.random.default_rng(0).dirichlet([1, 1], 200)
    thresholds, utilities = mechanism.utilities(labels, rows)
    monkeypatch.setattr(
        "tf_labeldp.mechanisms.quantile.geometric", lambda *_: utilities.max() - utilities
    )
    assert mechanism.release(labels, rows) == thresholds[-1] > thresholds[0]
