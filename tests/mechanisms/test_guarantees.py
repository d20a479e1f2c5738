"""One test for each guarantee that a docstring of the mechanisms states."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from tf_labeldp.mechanisms import RandomizedResponse, RRWithPrior

EPSILONS = (0.05, 1.0, 6.0)


@pytest.fixture(scope="session")
def random_priors():
    rng = np.random.default_rng(14)
    return [rng.dirichlet(np.full(k, c)) for k in (2, 4, 8) for c in (0.2, 1.0, 20.0)]


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


@pytest.mark.holds("mechanisms.RandomizedResponse")
def test_theorem_3_no_epsilon_dp_channel_keeps_the_label_more_often(random_priors):
    """Here against random private channels; the linear program is in test_optimality.py."""
    rng = np.random.default_rng(15)
    for epsilon in EPSILONS:
        for prior in random_priors:
            best = np.diag(RRWithPrior(epsilon, prior.size).transition_matrix(prior)) @ prior
            for _ in range(50):
                # Cells within a factor e^(eps/2) before normalising differ by e^eps after.
                raw = np.exp(rng.uniform(0.0, epsilon / 2, (prior.size, prior.size)))
                raw[np.diag_indices(prior.size)] = np.exp(epsilon / 2)
                channel = raw * rng.dirichlet(np.ones(prior.size))
                channel /= channel.sum(axis=1, keepdims=True)
                assert np.diag(channel) @ prior <= best + 1e-12


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
