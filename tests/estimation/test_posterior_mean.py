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
    classes,
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


def test_bins_by_hand():
    """e^eps for the labels of the bin, 1 for all others."""
    weights = PRIOR * np.where(np.arange(5) < 2, np.exp(1.3), 1.0)
    expected = weights @ VALUES / weights.sum()
    assert posterior(BINS, [0.5], NUMBERS)[0] == pytest.approx(expected, rel=1e-13)


def test_no_function_of_the_noisy_label_has_a_smaller_squared_error():
    matrix = BINS.transition_matrix()
    means = posterior(BINS, BINS.outputs, NUMBERS)

    def error(guesses):
        return float(np.sum(PRIOR[:, np.newaxis] * matrix * (guesses - VALUES[:, np.newaxis]) ** 2))

    rng = np.random.default_rng(81)
    for size in (1e-3, 0.1, 3.0):
        for _ in range(50):
            other = means + size * rng.normal(size=3)
            assert error(other) > error(means)
    assert error(means) < error(np.array(BINS.outputs))


def test_guesses_are_shrunk_towards_the_mean_of_the_prior():
    """A model trained on them learns E[guess | label], which spans less than the labels do."""
    center = PRIOR @ VALUES
    spans = []
    for epsilon in (0.3, 1.0, 3.0, 8.0):
        mechanism = optimal_bins(VALUES, PRIOR, epsilon)
        guesses = posterior(mechanism, mechanism.outputs, NUMBERS)
        learnt = mechanism.transition_matrix() @ guesses
        assert PRIOR @ learnt == pytest.approx(center, rel=1e-12)  # right on average, over all
        assert learnt[0] > VALUES[0] and learnt[-1] < VALUES[-1]
        spans.append(learnt[-1] - learnt[0])
    assert spans == sorted(spans)
    assert spans[0] < 0.1 * 9.0 and spans[-1] > 0.95 * 9.0


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 4.0])
def test_optimal_bins_for_squared_error_are_posterior_means_already(epsilon):
    mechanism = optimal_bins(VALUES, PRIOR, epsilon)
    means = posterior(mechanism, mechanism.outputs, NUMBERS)
    np.testing.assert_allclose(means, mechanism.outputs, rtol=1e-9)
    absolute = optimal_bins(VALUES, PRIOR, epsilon, "absolute_error")
    other = posterior(absolute, absolute.outputs, NUMBERS)
    assert np.abs(other - absolute.outputs).max() > 1e-2


def test_no_more_distinct_results_than_outputs():
    noisy = BINS.randomize(np.repeat(VALUES, 200), rng=np.random.default_rng(82))
    means = posterior(BINS, noisy, NUMBERS)
    assert means.shape == noisy.shape
    assert np.unique(means).size == 3
    by_output = dict(zip(BINS.outputs, posterior(BINS, BINS.outputs, NUMBERS), strict=True))
    assert means.tolist() == [by_output[label] for label in noisy.tolist()]


@pytest.mark.parametrize("cells", [1, 7, 1000])
def test_chunks_change_nothing(monkeypatch, cells):
    mechanism = LaplaceMechanism(1.0, 0.0, 9.0, clip=False)
    noisy = mechanism.randomize(np.repeat(VALUES, 60), rng=np.random.default_rng(83))
    whole = posterior(mechanism, noisy, NUMBERS)
    sizes = []
    likelihood = LaplaceMechanism.likelihood

    def counted(self, outputs, labels):
        sizes.append(np.size(outputs) * np.size(labels))
        return likelihood(self, outputs, labels)

    monkeypatch.setattr(LaplaceMechanism, "likelihood", counted)
    monkeypatch.setattr(classes, "_CHUNK_CELLS", cells)
    np.testing.assert_allclose(posterior(mechanism, noisy, NUMBERS), whole, rtol=1e-13)
    assert max(sizes) <= max(cells, 5)


def test_a_value_of_probability_zero_is_no_guess():
    means = posterior(BINS, BINS.outputs, Priors([0.0, 1.0], values=[0.0, 9.0]))
    assert means.tolist() == [9.0] * 3


def test_no_labels():
    assert posterior(BINS, np.zeros(0), NUMBERS).shape == (0,)


def call(mechanism=BINS, noisy=(0.5, 8.0), values=VALUES, prior=PRIOR):
    return posterior(mechanism, noisy, Priors(prior, values=values))


BAD = {
    "strange": (
        {"noisy": (0.5, 0.75, 0.75)},
        ValueError,
        "2 of 3 noisy labels can't come from RRO",
    ),
    "nan": ({"noisy": (0.5, np.nan)}, ValueError, "noisy_labels must be numbers, but 1 of 2"),
    "infinite": ({"noisy": (0.5, np.inf)}, ValueError, "1 of 2 noisy labels can't come from"),
    "text": ({"noisy": ("a",)}, TypeError, "noisy_labels must be numbers"),
    "order": ({"values": VALUES[::-1]}, ValueError, "values must be strictly increasing"),
    "outside": ({"values": VALUES + 1.0}, ValueError, r"must lie in \[0, 9\], but 1 of 5"),
    "prior-shape": ({"prior": PRIOR[:4]}, ValueError, r"must have shape \(5,\)"),
    "prior-rows": ({"prior": [PRIOR, PRIOR]}, ValueError, r"must have shape \(5,\)"),
    "prior-sum": ({"prior": PRIOR * 2}, ValueError, "must sum to one"),
    "prior-sign": ({"prior": PRIOR - [0.4, 0, 0, 0, -0.4]}, ValueError, "must not be negative"),
    "no-values": ({"values": None}, ValueError, "need priors with their values, got Priors"),
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
    with pytest.raises(ValueError, match=rf"need priors with their values, got {kind}.*values="):
        posterior(BINS, [0.5], priors)
