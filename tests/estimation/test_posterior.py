"""Posteriors: against enumeration of every channel, and bad input."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from tf_labeldp.accounting import PrivacyBudget
from tf_labeldp.estimation import likelihoods, posterior
from tf_labeldp.mechanisms import (
    ALIBI,
    ClassificationMechanism,
    DiscreteLaplaceMechanism,
    InformativeRR,
    LaplaceMechanism,
    PeerToPeerRandomizedResponse,
    Priors,
    RandomizedResponse,
    RROnBins,
    RRTopK,
    RRWithPrior,
    optimal_bins,
)
from tf_labeldp.plugins import PriorResampling, gaussian_epsilon
from tf_labeldp.vault import PrivateLabels

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
def test_an_uninformative_label_leaves_the_prior(mechanism, noisy, prior):
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


VALUES = np.array([0.0, 1.0, 2.0, 5.0, 9.0])
PRIOR = np.array([0.3, 0.25, 0.2, 0.15, 0.1])
BINS = RROnBins(1.3, VALUES, outputs=(0.5, 3.0, 8.0), bin_of_input=(0, 0, 1, 1, 2))
NUMBERS = Priors(PRIOR, values=VALUES)
FOR_NUMBERS = {
    "bins": (BINS, BINS.outputs),
    "discrete-laplace": (DiscreteLaplaceMechanism(0.5, 0, 9), range(10)),
    "laplace": (LaplaceMechanism(0.5, 0.0, 9.0, clip=False), (-7.0, 0.0, 0.3, 4.0, 21.5)),
}


@pytest.mark.parametrize("name", FOR_NUMBERS)
def test_means_equal_bayes_rule_by_enumeration(name):
    mechanism, outputs = FOR_NUMBERS[name]
    outputs = np.array(outputs, dtype=float)
    likelihood = mechanism.likelihood(outputs, VALUES)
    expected = [
        sum(PRIOR[k] * row[k] * VALUES[k] for k in range(5))
        / sum(PRIOR[k] * row[k] for k in range(5))
        for row in likelihood
    ]
    means = posterior(mechanism, outputs, NUMBERS)
    assert means.dtype == np.float64
    np.testing.assert_allclose(means, expected, rtol=1e-12)
    uniform = posterior(mechanism, outputs, Priors(np.full(5, 0.2), values=VALUES))
    assert np.abs(uniform - means).max() > 0.1  # the prior counts


@pytest.mark.parametrize("epsilon", [0.2, 4.0])
def test_optimal_bins_for_squared_error_are_posterior_means_already(epsilon):
    mechanism = optimal_bins(VALUES, PRIOR, epsilon)
    means = posterior(mechanism, mechanism.outputs, NUMBERS)
    np.testing.assert_allclose(means, mechanism.outputs, rtol=1e-9)
    absolute = optimal_bins(VALUES, PRIOR, epsilon, "absolute_error")
    other = posterior(absolute, absolute.outputs, NUMBERS)
    assert np.abs(other - absolute.outputs).max() > 1e-2


def test_chunks_change_nothing():
    """Of 2^20 likelihoods each: 200,000 outputs of five values are one, and 300,000 are two."""
    mechanism = LaplaceMechanism(1.0, 0.0, 9.0, clip=False)
    noisy = mechanism.randomize(np.repeat(VALUES, 60_000), rng=np.random.default_rng(83))
    whole = posterior(mechanism, noisy, NUMBERS)
    for rows in (slice(None, 100_000), slice(200_000, None)):
        part = posterior(mechanism, noisy[rows], NUMBERS)
        np.testing.assert_allclose(part, whole[rows], rtol=1e-13)


def test_a_value_of_probability_zero_is_no_guess():
    means = posterior(BINS, BINS.outputs, Priors([0.0, 1.0], values=[0.0, 9.0]))
    assert means.tolist() == [9.0] * 3


LAPLACE = ALIBI(epsilon=1.5, num_classes=4)
GAUSSIAN = ALIBI(epsilon=3.0, num_classes=4, delta=1e-5, noise="gaussian")
ALIBI_RNG = np.random.default_rng(41)
BOTH = pytest.mark.parametrize("mechanism", [LAPLACE, GAUSSIAN], ids=["laplace", "gaussian"])
ROWS = np.concatenate([ALIBI_RNG.normal(scale=3.0, size=(30, 4)), [[0.0, 1.0, 0.5, -2.0]]])
ROW_PRIORS = ALIBI_RNG.dirichlet(np.ones(4), size=31)


def brute_force(mechanism, rows, priors):
    """Bayes' rule with the densities of the noise, one factor an entry."""
    law = (stats.laplace if mechanism.noise == "laplace" else stats.norm)(scale=mechanism.scale)
    joint = np.stack(
        [law.pdf(rows - np.eye(rows.shape[1])[i]).prod(axis=1) for i in range(rows.shape[1])],
        axis=1,
    )
    joint = joint * priors
    return joint / joint.sum(axis=1, keepdims=True)


@BOTH
def test_rows_equal_bayes_rule(mechanism):
    for priors in (ROW_PRIORS, ROW_PRIORS[0], None):
        uniform = np.full(4, 0.25)
        expected = brute_force(mechanism, ROWS, uniform if priors is None else priors)
        found = posterior(mechanism, ROWS, priors)
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_laplace_oracle():
    found = posterior(ALIBI(2.0, 3), [[0.9, -0.2, 0.4]])  # b = 1
    np.testing.assert_allclose(found, [[0.652239848, 0.107814522, 0.239945631]], atol=1e-8)


def test_gaussian_oracle_and_not_the_published_code():
    """``exp(x / sigma^2)``; the published ``exp(x / sigma)`` is another one at sigma 2."""
    row, prior = np.array([0.9, -0.2, 0.4]), np.array([0.2, 0.5, 0.3])
    expected = {True: [0.236816673, 0.449698357, 0.31348497],
                False: [0.276964142, 0.399486023, 0.323549836]}  # fmt: skip
    for squared in (True, False):
        weights = prior * np.exp(row / (2.0**2 if squared else 2.0))
        np.testing.assert_allclose(weights / weights.sum(), expected[squared], atol=1e-8)
    mechanism = ALIBI(gaussian_epsilon(2.0, 1e-5, math.sqrt(2)), 3, 1e-5, "gaussian")
    weights = prior * np.exp(row / mechanism.scale**2)
    found = posterior(mechanism, [row], prior)[0]
    np.testing.assert_allclose(found, weights / weights.sum(), rtol=1e-12)
    np.testing.assert_allclose(found, expected[True], atol=1e-7)  # sigma is rounded up a little


@BOTH
@pytest.mark.parametrize("size", [1e6, 1e308])
def test_large_rows_are_safe(mechanism, size):
    rows = size * np.array([[1.0, -1.0, 0.5, 0.0], [-1.0, -1.0, -1.0, -1.0], [1.0, 1.0, 0.0, 0.0]])
    sharper = ALIBI(1e4, 4, mechanism.delta, mechanism.noise)
    for each, priors in itertools.product((mechanism, sharper), (None, [0.0, 0.5, 0.5, 0.0])):
        with np.errstate(all="raise", under="ignore"):
            found = posterior(each, rows, priors)
        np.testing.assert_allclose(found.sum(axis=1), 1.0, rtol=1e-12)
        if priors is None:
            continue
        assert np.all(found[:, [0, 3]] == 0.0)
        if mechanism.noise == "gaussian":  # of the classes that are possible, the larger entry
            np.testing.assert_allclose(found[:, 2], [1.0, 0.5, 0.0], atol=1e-12)


@BOTH
def test_no_laplace_row_outweighs_epsilon(mechanism):
    """Odds move by e^epsilon at most for Laplace noise; Gaussian rows know no such bound."""
    odds = [row[0] / row[1] for row in posterior(mechanism, [[9.0, -9.0, 0, 0]] * 2, None)]
    if mechanism.noise == "laplace":
        assert odds[0] == pytest.approx(math.exp(mechanism.epsilon), rel=1e-12)
    else:
        assert odds[0] > math.exp(mechanism.epsilon)


def test_a_thousand_classes_and_chunks():
    """Of 2^20 numbers each: the first rows are in another one than the last."""
    mechanism, rng = ALIBI(8.0, 1000), np.random.default_rng(44)
    rows = mechanism.randomize(np.arange(60), rng=rng)
    priors = rng.dirichlet(np.full(1000, 0.1), 60)
    for p in (priors, priors[0], None):
        tiled = np.tile(p, (20, 1)) if np.ndim(p) == 2 else p
        whole = posterior(mechanism, np.tile(rows, (20, 1)), tiled)
        np.testing.assert_allclose(whole.sum(axis=1), 1.0, rtol=1e-12)
        np.testing.assert_array_equal(whole, np.tile(posterior(mechanism, rows, p), (20, 1)))


@pytest.mark.holds("estimation.posterior")
def test_post_processing_charges_nothing():
    labels = PrivateLabels([0, 1, 2, 3], num_classes=4, budget=PrivacyBudget(epsilon=1.5))
    noisy = labels.randomize(LAPLACE, key="alibi")
    rows = noisy.values
    assert posterior(LAPLACE, rows).shape == (4, 4)
    np.testing.assert_array_equal(noisy.posterior("uniform"), posterior(LAPLACE, rows))
    np.testing.assert_array_equal(
        noisy.posterior(ROW_PRIORS[0]), posterior(LAPLACE, rows, ROW_PRIORS[0])
    )
    np.testing.assert_array_equal(posterior(LAPLACE, noisy), noisy.posterior("uniform"))
    assert noisy.posterior().shape == (4, 4)
    assert labels.guarantee().epsilon == 1.5
    assert rows.dtype == np.float32


@pytest.mark.parametrize("mechanism", [RandomizedResponse(1.0, 4), RRWithPrior(1.0, 4), LAPLACE])
@pytest.mark.holds("estimation.likelihoods")
def test_likelihoods_times_the_prior_are_the_posterior(mechanism):
    labels = PrivateLabels([0, 1, 2, 3], num_classes=4, budget=PrivacyBudget(epsilon=3.0))
    priors = np.random.default_rng(3).dirichlet(np.ones(4), 4)
    drawn = priors if isinstance(mechanism, RRWithPrior) else None
    noisy = labels.randomize(mechanism, priors=drawn)
    spent = labels.guarantee().epsilon
    joint = priors * likelihoods(mechanism, noisy.values, priors)
    expected = posterior(mechanism, noisy.values, priors)
    np.testing.assert_allclose(joint / joint.sum(axis=1, keepdims=True), expected, rtol=1e-12)
    assert labels.guarantee().epsilon == spent
    with pytest.raises(TypeError, match="a mechanism for classes"):
        likelihoods(RROnBins(1.0, (0.0, 1.0), (0.0, 1.0), (0, 1)), [0.0])


PEERS = PeerToPeerRandomizedResponse.for_cluster_size(0.2, 0.5, 3, 0.0)
BY_PRIOR = RRWithPrior(1.0, K)
BAD = {
    "nothing": (("RR", [0], None), TypeError, "must be a tf_labeldp mechanism, got str"),
    "peers": ((PEERS, [0], None), TypeError, "drawn by PeerToPeerRandomizedResponse is unknown"),
    "no-priors": ((BY_PRIOR, [0, 3], None), ValueError, "RRWithPrior draws with priors"),
    "unknown": (
        (UnknownByPrior(1.0, K), [0, 3], PRIORS[:2]),
        ValueError,
        "does not define its channel",
    ),
    "class": ((BY_PRIOR, [0, 4], PRIORS[:2]), ValueError, "noisy_labels must lie in"),
    "number": ((BY_PRIOR, [0.5, 1.0], PRIORS[:2]), TypeError, "noisy_labels must be integers"),
    "rows": ((BY_PRIOR, [0, 3], PRIORS[:3]), ValueError, r"must have shape \(4,\) or \(2, 4\)"),
    "sum": ((BY_PRIOR, [0, 3], PRIORS[:2] * 2), ValueError, "priors must sum to one"),
    "alibi-classes": ((LAPLACE, ROWS[:, :3]), ValueError, r"shape \(n, 4\), got \(31, 3\)"),
    "alibi-nan": ((LAPLACE, ROWS * np.nan), ValueError, "must be finite, but 124 of 124 entries"),
    "strange": ((BINS, (0.5, 0.75, 0.75), NUMBERS), ValueError, "2 of 3 .* are impossible for RRO"),
    "nan": ((BINS, (0.5, np.nan), NUMBERS), ValueError, "1 of 2 noisy_labels are missing"),
    "outside": (
        (BINS, [0.5], Priors(PRIOR, values=VALUES + 1.0)),
        ValueError,
        r"must lie in \[0, 9\], but 1 of 5",
    ),
    "no-values": ((BINS, [0.5], Priors(PRIOR)), ValueError, "need priors with values, got Priors"),
    "array": ((BINS, [0.5], PRIOR), ValueError, "need priors with values, got ndarray.*values="),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    arguments, error, message = BAD[case]
    with pytest.raises(error, match=message):
        posterior(*arguments)
