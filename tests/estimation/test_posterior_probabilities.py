"""Posterior probabilities: against enumeration of every channel, calibration, bad input."""

from __future__ import annotations

import numpy as np
import pytest

from tf_labeldp.estimation import posterior
from tf_labeldp.mechanisms import (
    ClassificationMechanism,
    InformativeRR,
    LaplaceMechanism,
    Priors,
    RandomizedResponse,
    RRTopK,
    RRWithPrior,
)
from tf_labeldp.mechanisms.clusters import PriorResampling

K = 4
RNG = np.random.default_rng(61)
PRIORS = np.concatenate(
    [
        RNG.dirichlet(np.full(K, 0.4), size=60),
        [[0.25] * 4, [1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.4, 0.2, 0.2, 0.2]],
    ]
)
MECHANISMS = {
    "rr": RandomizedResponse(0.8, K),
    "top-1": RRTopK(0.8, K, 1),
    "top-2": RRTopK(0.8, K, 2),
    "prior-small": RRWithPrior(0.05, K),
    "prior": RRWithPrior(1.5, K),
    "prior-huge": RRWithPrior(900.0, K),
    "informative-small": InformativeRR(0.05, K),
    "informative": InformativeRR(1.5, K),
    "informative-huge": InformativeRR(900.0, K),
    "resampling-small": PriorResampling(0.05, K),
    "resampling": PriorResampling(1.5, K),
}


def by_hand(mechanism, noisy, prior):
    """Bayes' rule in plain Python, from the channel of this prior."""
    matrix = mechanism.transition_matrix(prior if mechanism.uses_priors else None)
    joint = [prior[label] * matrix[label, noisy] for label in range(K)]
    return [one / sum(joint) for one in joint] if sum(joint) > 0 else list(prior)


@pytest.mark.parametrize("name", MECHANISMS)
def test_equals_bayes_rule_by_enumeration(name):
    mechanism = MECHANISMS[name]
    rows = np.repeat(PRIORS, K, axis=0)
    noisy = np.tile(np.arange(K), len(PRIORS))
    found = posterior(mechanism, noisy, rows)
    expected = [by_hand(mechanism, z, row) for z, row in zip(noisy, rows, strict=True)]
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-300)
    np.testing.assert_allclose(found.sum(axis=1), 1.0, rtol=1e-14)
    other = RandomizedResponse(2.9, K)
    assert np.abs(posterior(other, noisy, rows) - found).max() > 0.1


@pytest.mark.parametrize(
    ("mechanism", "noisy", "prior"),
    [
        (RRTopK(1.0, K, 2), 3, [0.4, 0.3, 0.2, 0.1]),  # outside of the set
        (RRTopK(1.0, K, 1), 0, [0.4, 0.3, 0.2, 0.1]),  # always the same
        (RRWithPrior(1e-3, K), 0, [0.7, 0.1, 0.1, 0.1]),  # likewise, k* = 1
        (RandomizedResponse(800.0, K), 0, [0.0, 0.5, 0.3, 0.2]),  # a class of no probability
    ],
)
def test_where_the_label_says_nothing_the_prior_stays(mechanism, noisy, prior):
    np.testing.assert_allclose(posterior(mechanism, [noisy], prior)[0], prior, rtol=1e-14)


class UnknownByPrior(ClassificationMechanism):
    """A channel that depends on the prior in a way of its own."""

    public_input = "priors"

    def __init__(self, epsilon, num_classes):
        self.epsilon, self.num_classes = epsilon, num_classes

    def randomize(self, labels, priors=None, *, rng=None):
        raise NotImplementedError

    def transition_matrix(self, prior=None):
        raise NotImplementedError


BAD = {
    "number-mechanism": (
        {"mechanism": LaplaceMechanism(1.0, 0, 1)},
        ValueError,
        "need priors with values, got ndarray",
    ),
    "nothing": ({"mechanism": "RR"}, TypeError, "must be a tf_labeldp mechanism, got str"),
    "no-priors": ({"priors": None}, ValueError, "RRWithPrior draws with priors"),
    "unknown": (
        {"mechanism": UnknownByPrior(1.0, K)},
        ValueError,
        "does not define its channel",
    ),
    "class": ({"noisy": [0, 4]}, ValueError, "noisy_labels must lie in"),
    "number": ({"noisy": [0.5, 1.0]}, TypeError, "noisy_labels must be integers"),
    "rows": ({"priors": PRIORS[:3]}, ValueError, r"priors must have shape \(4,\) or \(2, 4\)"),
    "classes": ({"priors": [0.5, 0.5]}, ValueError, r"priors must have shape \(4,\)"),
    "sum": ({"priors": PRIORS[:2] * 2}, ValueError, "priors must sum to one"),
    "nan": ({"priors": [np.nan] * 4}, ValueError, "priors must be finite"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    changed, error, message = BAD[case]
    arguments = {"mechanism": RRWithPrior(1.0, K), "noisy": [0, 3], "priors": PRIORS[:2], **changed}
    with pytest.raises(error, match=message):
        posterior(arguments["mechanism"], arguments["noisy"], arguments["priors"])


@pytest.mark.parametrize("name", MECHANISMS)
def test_priors_of_all_and_of_groups_are_those_of_the_labels(name):
    """Also in several chunks of 2^20 numbers."""
    size = 300_000 if name in ("rr", "prior") else 200
    groups = np.random.default_rng(63).integers(0, len(PRIORS), size)
    noisy = np.arange(size) % K
    found = posterior(MECHANISMS[name], noisy, Priors(PRIORS, groups))
    np.testing.assert_array_equal(found, posterior(MECHANISMS[name], noisy, PRIORS[groups]))
    for prior in PRIORS[::9]:
        shared = posterior(MECHANISMS[name], np.arange(K), prior)
        rows = posterior(MECHANISMS[name], np.arange(K), np.tile(prior, (K, 1)))
        np.testing.assert_array_equal(shared, rows)
