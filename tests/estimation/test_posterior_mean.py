"""The posterior mean: against enumeration, its optimality, and how far it shrinks."""

from __future__ import annotations

import numpy as np
import pytest

from tf_labeldp.estimation import posterior
from tf_labeldp.mechanisms import (
    DiscreteLaplaceMechanism,
    LaplaceMechanism,
    Priors,
    RandomizedResponse,
    RROnBins,
    optimal_bins,
)

VALUES = np.array([0.0, 1.0, 2.0, 5.0, 9.0])
PRIOR = np.array([0.3, 0.25, 0.2, 0.15, 0.1])
BINS = RROnBins(1.3, VALUES, outputs=(0.5, 3.0, 8.0), bin_of_input=(0, 0, 1, 1, 2))
NUMBERS = Priors(PRIOR, values=VALUES)
MECHANISMS = {
    "bins": (BINS, BINS.outputs),
    "discrete-laplace": (DiscreteLaplaceMechanism(0.5, 0, 9), range(10)),
    "laplace": (LaplaceMechanism(0.5, 0.0, 9.0, clip=False), (-7.0, 0.0, 0.3, 4.0, 21.5)),
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_equals_bayes_rule_by_enumeration(name):
    mechanism, outputs = MECHANISMS[name]
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


def call(mechanism=BINS, noisy=(0.5, 8.0), values=VALUES, prior=PRIOR):
    return posterior(mechanism, noisy, Priors(prior, values=values))


BAD = {
    "strange": (
        {"noisy": (0.5, 0.75, 0.75)},
        ValueError,
        "2 of 3 noisy labels are impossible for RRO",
    ),
    "nan": ({"noisy": (0.5, np.nan)}, ValueError, "noisy_labels must be numbers, but 1 of 2"),
    "order": ({"values": VALUES[::-1]}, ValueError, "values must be strictly increasing"),
    "outside": ({"values": VALUES + 1.0}, ValueError, r"must lie in \[0, 9\], but 1 of 5"),
    "prior-shape": ({"prior": PRIOR[:4]}, ValueError, r"must have shape \(5,\)"),
    "prior-sum": ({"prior": PRIOR * 2}, ValueError, "must sum to one"),
    "no-values": ({"values": None}, ValueError, "need priors with values, got Priors"),
    "classes": (
        {"mechanism": RandomizedResponse(1.0, 5)},
        TypeError,
        "noisy_labels must be integers 0..4",
    ),
    "nothing": ({"mechanism": None}, TypeError, "must be a tf_labeldp mechanism, got NoneType"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    changed, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call(**changed)


@pytest.mark.parametrize("priors", [None, PRIOR, VALUES.tolist()], ids=["none", "array", "list"])
def test_numbers_need_priors_with_values(priors):
    kind = type(priors).__name__
    with pytest.raises(ValueError, match=rf"need priors with values, got {kind}.*values="):
        posterior(BINS, [0.5], priors)
