"""Debiased numbers: unbiased for the bins' means, exactly, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest

from tf_labeldp.estimation import debiased
from tf_labeldp.mechanisms import (
    ALIBI,
    DiscreteLaplaceMechanism,
    DiscreteStaircaseMechanism,
    ExponentialMechanism,
    LaplaceMechanism,
    PeerToPeerRandomizedResponse,
    Priors,
    RROnBins,
    StaircaseMechanism,
    optimal_bins,
)

VALUES = np.arange(40.0)


@pytest.mark.parametrize("epsilon", [1e-3, 0.5, 40.0])
@pytest.mark.parametrize("loss", ["squared_error", "absolute_error"])
def test_unbiased_for_the_mean_of_each_bin(epsilon, loss):
    prior = np.random.default_rng(8).dirichlet(np.full(40, 0.5))
    mechanism = optimal_bins(VALUES, prior, epsilon, loss)
    labels = debiased(mechanism, mechanism.outputs, Priors(prior, values=VALUES))
    expected = mechanism.transition_matrix() @ labels
    bins = np.array(mechanism.bin_of_input)
    means = np.array([np.average(VALUES[bins == j], weights=prior[bins == j]) for j in set(bins)])
    np.testing.assert_allclose(expected, means[bins], rtol=1e-9, atol=1e-9)
    if epsilon == 0.5:  # from the other side: the outputs themselves are biased
        pulled = mechanism.transition_matrix() @ np.array(mechanism.outputs)
        assert np.abs(pulled - means[bins]).max() > 1.0


def test_one_bin_and_an_empty_bin():
    one = RROnBins(1.0, (0.0, 4.0), (1.0,), (0, 0))
    found = debiased(one, [1.0, 1.0], Priors([0.25, 0.75], values=[0.0, 4.0]))
    assert found.tolist() == [3.0, 3.0]
    empty = RROnBins(50.0, (0.0, 4.0), (1.0, 3.5), (0, 1))
    found = debiased(empty, [1.0, 3.5], Priors([1.0, 0.0], values=[0.0, 4.0]))
    assert found == pytest.approx([0.0, 3.5])


@pytest.mark.parametrize(
    ("noisy", "values", "prior", "message"),
    [
        ([0.5, 1.5], [0.0, 1.0], [0.5, 0.5], r"2 noisy label\(s\) are not outputs"),
        ([0.25], [0.0, 1.0], [0.5, 0.6], "must sum to one"),
        ([0.25], [0.0, 9.0], [0.5, 0.5], r"must lie in \[0, 1\]"),
        ([0.25], [1.0, 0.0], [0.5, 0.5], "strictly increasing"),
        ([0.25], None, [0.5, 0.5], "need priors with values, got Priors"),
    ],
)
def test_bad_input(noisy, values, prior, message):
    mechanism = RROnBins(1.0, (0.0, 1.0), (0.25, 0.75), (0, 1))
    with pytest.raises(ValueError, match=message):
        debiased(mechanism, noisy, Priors(prior, values=values))


@pytest.mark.parametrize(
    "kind",
    [
        LaplaceMechanism,
        DiscreteLaplaceMechanism,
        StaircaseMechanism,
        DiscreteStaircaseMechanism,
    ],
)
def test_noise_that_is_added_has_no_bias_unless_it_is_clipped(kind):
    """Symmetric about every label, by the law that is drawn."""
    mechanism = kind(0.7, 0, 8, clip=False)
    noisy = mechanism.randomize(np.arange(9.0))
    np.testing.assert_array_equal(debiased(mechanism, noisy), noisy)
    label, distance = 3.0, np.array([0.5, 1.0, 2.0, 5.5, 11.0])
    above = 1.0 - mechanism.cdf(label + distance - 1e-9, [label])
    below = mechanism.cdf(label - distance, [label])
    if not kind.whole:
        np.testing.assert_allclose(above, below, rtol=1e-6)
    else:
        whole = distance == np.rint(distance)
        np.testing.assert_allclose(above[whole], below[whole], rtol=1e-6)
    with pytest.raises(ValueError, match=r"clips its noisy labels.*Draw with clip=False"):
        debiased(kind(0.7, 0, 8, clip=True), [1.0, 2.0])


def test_alibi_rows_are_unbiased_as_they_are():
    mechanism = ALIBI(2.0, 3)
    labels = np.arange(60_000) % 3
    rows = mechanism.randomize(labels, rng=np.random.default_rng(10))
    found = debiased(mechanism, rows)
    assert found.dtype == np.float64 and not np.shares_memory(found, rows)
    np.testing.assert_array_equal(found, rows)
    means = np.array([found[labels == c].mean(axis=0) for c in range(3)])
    error = mechanism.noise_stddev / np.sqrt(20_000)
    assert np.abs(means - np.eye(3)).max() < 6.0 * error < 0.1


@pytest.mark.parametrize("alpha", [0.05, 0.45])
def test_peer_reports_are_unbiased_for_the_label_of_the_peer(alpha):
    mechanism = PeerToPeerRandomizedResponse.for_cluster_size(alpha, 0.5, 3, 0.0)
    weights = debiased(mechanism, [0, 1])
    channel = np.array([[1 - alpha, alpha], [alpha, 1 - alpha]])
    np.testing.assert_allclose(channel @ weights, np.eye(2), atol=1e-12)
    with pytest.raises(ValueError, match=r"must lie in 0\.\.1"):
        debiased(mechanism, [0, -1])  # of who reports nothing there is nothing to debias


def test_other_mechanisms():
    with pytest.raises(TypeError, match=r"bias of labels drawn by ExponentialMechanism is unknown"):
        debiased(ExponentialMechanism(1.0, 0.0, 1.0), [0.5])
    with pytest.raises(TypeError, match="must be a tf_labeldp mechanism, got NoneType"):
        debiased(None, [0.5], Priors([0.5, 0.5], values=[0.0, 1.0]))
