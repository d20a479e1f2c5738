"""The posterior of the class given an ALIBI row, and the projection onto the simplex."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from tf_labeldp.accounting import PrivacyBudget
from tf_labeldp.accounting.gaussian import gaussian_epsilon
from tf_labeldp.estimation import posterior
from tf_labeldp.mechanisms import ALIBI, PeerToPeerRandomizedResponse, RandomizedResponse
from tf_labeldp.vault import PrivateLabels

LAPLACE = ALIBI(epsilon=1.5, num_classes=4)
GAUSSIAN = ALIBI(epsilon=3.0, num_classes=4, delta=1e-5, noise="gaussian")
BOTH = pytest.mark.parametrize("mechanism", [LAPLACE, GAUSSIAN], ids=["laplace", "gaussian"])
RNG = np.random.default_rng(41)
ROWS = np.concatenate([RNG.normal(scale=3.0, size=(30, 4)), [[0.0, 1.0, 0.5, -2.0]]])
PRIORS = RNG.dirichlet(np.ones(4), size=31)


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
def test_bayes_rule(mechanism):
    for priors in (PRIORS, PRIORS[0], None):
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
    np.testing.assert_array_equal(noisy.posterior(), posterior(LAPLACE, rows))
    np.testing.assert_array_equal(noisy.posterior(PRIORS[0]), posterior(LAPLACE, rows, PRIORS[0]))
    np.testing.assert_array_equal(posterior(LAPLACE, noisy), noisy.posterior())
    assert labels.guarantee().epsilon == 1.5
    assert rows.dtype == np.float32


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            (RandomizedResponse(1.0, 4), ROWS),
            ValueError,
            r"must have shape \(n,\), got shape \(31, 4",
        ),
        ((None, ROWS), TypeError, "mechanism must be a tf_labeldp mechanism, got NoneType"),
        (
            (PeerToPeerRandomizedResponse.for_cluster_size(0.2, 0.5, 3, 0.0), [0, 1, 1]),
            TypeError,
            "posterior of labels drawn by PeerToPeerRandomizedResponse is unknown",
        ),
        ((LAPLACE, ROWS[:, :3]), ValueError, r"must have shape \(n, 4\), got \(31, 3\)"),
        ((LAPLACE, ROWS * np.nan), ValueError, "must be finite, but 124 of 124 entries"),
        ((LAPLACE, ROWS, PRIORS[:3]), ValueError, r"priors must have shape \(4,\) or \(31, 4\)"),
        ((LAPLACE, ROWS, [0.5, 0.5, 0.5, 0.5]), ValueError, "priors must sum to one"),
    ],
    ids=["mechanism", "nothing", "peers", "classes", "nan", "rows", "sum"],
)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=message):
        posterior(*arguments)
