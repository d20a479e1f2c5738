"""The channels as matrices, against the algorithms as printed, and ties."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tf_labeldp.mechanisms import InformativeRR, RandomizedResponse, RRTopK, RRWithPrior

BOUNDED = settings(max_examples=60, deadline=None, derandomize=True)


def priors(min_classes=2, max_classes=12):
    weights = st.integers(min_classes, max_classes).flatmap(
        lambda k: hnp.arrays(np.float64, k, elements=st.floats(1e-6, 1.0))
    )
    return weights.map(lambda w: w / w.sum())


def test_rr_top_1_is_constant(worst_log_ratio):
    matrix = RRTopK(1.0, 4, 1).transition_matrix([0.1, 0.2, 0.6, 0.1])
    np.testing.assert_array_equal(matrix, np.tile([0.0, 0.0, 1.0, 0.0], (4, 1)))
    assert worst_log_ratio(matrix) == 0.0


def test_rr_top_k_with_all_classes_is_randomized_response():
    matrix = RRTopK(1.3, 6, 6).transition_matrix(np.random.default_rng(2).dirichlet(np.ones(6)))
    np.testing.assert_allclose(
        matrix, RandomizedResponse(1.3, 6).transition_matrix(), rtol=0, atol=1e-16
    )


@BOUNDED
@given(prior=priors(), epsilon=st.floats(1e-3, 50.0))
def test_informative_rr_is_randomized_response_on_groups(prior, epsilon):
    mechanism = InformativeRR(epsilon, prior.size)
    matrix, k = mechanism.transition_matrix(prior), int(mechanism.set_sizes(prior[np.newaxis])[0])
    ranked = sorted(range(prior.size), key=lambda y: (-prior[y], y))
    response = RandomizedResponse(epsilon, k).transition_matrix()
    for place, y in enumerate(ranked):
        np.testing.assert_allclose(matrix[y, ranked[:k]], response[min(place, k - 1)], atol=1e-16)
        assert not matrix[y, ranked[k:]].any()


@BOUNDED
@given(prior=priors(), epsilon=st.floats(1e-3, 50.0), data=st.data())
def test_rr_top_k_follows_algorithm_1(prior, epsilon, data):
    k = data.draw(st.integers(1, prior.size))
    matrix = RRTopK(epsilon, prior.size, k).transition_matrix(prior)
    # Python's stable sort on (-prior, index) is an independent statement of the tie rule.
    members = sorted(range(prior.size), key=lambda y: (-prior[y], y))[:k]
    grown = np.exp(epsilon)
    for y in range(prior.size):
        for out in range(prior.size):
            if out not in members:
                expected = 0.0
            elif y not in members:
                expected = 1.0 / k
            else:
                expected = (grown if out == y else 1.0) / (grown + k - 1)
            assert matrix[y, out] == pytest.approx(expected, rel=1e-13)


@BOUNDED
@given(prior=priors(), epsilon=st.floats(1e-3, 50.0))
def test_optimal_k_follows_algorithm_2(prior, epsilon):
    ranked = np.sort(prior)[::-1]
    grown = np.exp(epsilon)
    objective = [grown / (grown + k - 1) * ranked[:k].sum() for k in range(1, prior.size + 1)]
    chosen = int(RRWithPrior(epsilon, prior.size).optimal_k(prior)[0])
    assert 1 <= chosen <= prior.size
    assert objective[chosen - 1] >= max(objective) * (1 - 1e-14)


def test_ties_between_classes_go_to_the_smaller_index():
    matrix = RRTopK(1.0, 5, 2).transition_matrix([0.1, 0.25, 0.25, 0.25, 0.15])
    assert np.flatnonzero(matrix[0]).tolist() == [1, 2]
    matrix = RRTopK(1.0, 20, 3).transition_matrix(np.full(20, 0.05))
    assert np.flatnonzero(matrix[0]).tolist() == [0, 1, 2]


def test_ties_between_set_sizes_go_to_the_smaller_set():
    # With priors of zero after the second class and no cost left in k, w_2 = w_3 = w_4.
    assert RRWithPrior(800.0, 4).optimal_k([0.5, 0.5, 0.0, 0.0]).tolist() == [2]
    assert RRWithPrior(800.0, 3).optimal_k([1.0, 0.0, 0.0]).tolist() == [1]
    certain = np.array([[0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    for epsilon in (1e-3, 1.0, 800.0):
        assert InformativeRR(epsilon, 4).set_sizes(certain).tolist() == [2, 1]
    # Here k = 3 is better than k = 2 by less than a rounding error.
    almost = np.array([[0.9, 0.1 - 1e-15, 1e-15]])
    assert InformativeRR(30.0, 3).set_sizes(almost).tolist() == [2]


@pytest.mark.holds("mechanisms.RRWithPrior")
def test_corollary_2_the_set_size_depends_on_the_prior_alone():
    """The premise of the corollary: nothing of the label reaches k*."""
    assert list(inspect.signature(RRWithPrior.optimal_k).parameters) == ["self", "priors"]
    prior, mechanism = np.array([0.45, 0.35, 0.15, 0.05]), RRWithPrior(1.0, 4)
    k = int(mechanism.optimal_k(prior)[0])
    assert 1 < k < 4
    for label in range(4):  # every label answers in the same set, its own or not
        noisy = mechanism.randomize(np.full(4000, label), prior, rng=np.random.default_rng(label))
        assert np.unique(noisy).tolist() == list(range(k))


@pytest.mark.holds("mechanisms.LabelMechanism")
def test_one_draw_of_each_label_is_independent_of_the_others(chi_square_rejects):
    """The unit is one label: a label's noise says nothing of its neighbour's."""
    mechanism, n = RandomizedResponse(1.0, 3), 300_000
    noisy = mechanism.randomize(np.zeros(n, int), rng=np.random.default_rng(16))
    pairs = np.bincount(3 * noisy[0::2] + noisy[1::2], minlength=9)
    row = mechanism.transition_matrix()[0]
    assert not chi_square_rejects(pairs, np.outer(row, row).ravel())
    copied = np.bincount(4 * noisy[0::2], minlength=9)  # neighbours that share their noise
    assert chi_square_rejects(copied, np.outer(row, row).ravel())
