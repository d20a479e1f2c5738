"""Debiased numbers: unbiased for the bins' means, exactly, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest

from tf_labeldp.estimation import debiased_labels
from tf_labeldp.mechanisms import LaplaceMechanism, RROnBins, optimal_bins

VALUES = np.arange(40.0)


@pytest.mark.parametrize("epsilon", [1e-3, 0.5, 2.0, 5.0, 40.0])
@pytest.mark.parametrize("loss", ["squared_error", "absolute_error"])
def test_unbiased_for_the_mean_of_each_bin(epsilon, loss):
    prior = np.random.default_rng(8).dirichlet(np.full(40, 0.5))
    mechanism = optimal_bins(VALUES, prior, epsilon, loss)
    labels = debiased_labels(mechanism, mechanism.outputs, VALUES, prior)
    expected = mechanism.transition_matrix() @ labels
    bins = np.array(mechanism.bin_of_input)
    means = np.array([np.average(VALUES[bins == j], weights=prior[bins == j]) for j in set(bins)])
    np.testing.assert_allclose(expected, means[bins], rtol=1e-9, atol=1e-9)
    if epsilon == 0.5:  # from the other side: the outputs themselves are biased
        pulled = mechanism.transition_matrix() @ np.array(mechanism.outputs)
        assert np.abs(pulled - means[bins]).max() > 1.0


def test_the_overall_mean_is_right():
    prior = np.random.default_rng(9).dirichlet(np.full(40, 0.5))
    mechanism = optimal_bins(VALUES, prior, 1.0)
    labels = debiased_labels(mechanism, mechanism.outputs, VALUES, prior)
    mean = prior @ mechanism.transition_matrix() @ labels
    assert mean == pytest.approx(prior @ VALUES, rel=1e-12)


def test_one_bin_and_an_empty_bin():
    one = RROnBins(1.0, (0.0, 4.0), (1.0,), (0, 0))
    assert debiased_labels(one, [1.0, 1.0], [0.0, 4.0], [0.25, 0.75]).tolist() == [3.0, 3.0]
    empty = RROnBins(50.0, (0.0, 4.0), (1.0, 3.5), (0, 1))
    assert debiased_labels(empty, [1.0, 3.5], [0.0, 4.0], [1.0, 0.0]) == pytest.approx([0.0, 3.5])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.5, 1.5], [0.0, 1.0], [0.5, 0.5]), r"2 noisy label\(s\) are no outputs"),
        (([0.25], [0.0, 1.0], [0.5, 0.6]), "must sum to one"),
        (([0.25], [0.0, 9.0], [0.5, 0.5]), r"must lie in \[0, 1\]"),
        (([0.25], [1.0, 0.0], [0.5, 0.5]), "strictly increasing"),
    ],
)
def test_bad_input(arguments, message):
    mechanism = RROnBins(1.0, (0.0, 1.0), (0.25, 0.75), (0, 1))
    with pytest.raises(ValueError, match=message):
        debiased_labels(mechanism, *arguments)


def test_other_mechanisms():
    with pytest.raises(TypeError, match="must be a RROnBins, got LaplaceMechanism"):
        debiased_labels(LaplaceMechanism(1.0, 0.0, 1.0), [0.5], [0.0, 1.0], [0.5, 0.5])
