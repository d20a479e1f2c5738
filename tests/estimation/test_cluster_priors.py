"""Priors from clusters: what they are, what they cost, and their way into training."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

import tf_labeldp as ldp
from tf_labeldp.estimation.priors import histogram_prior
from tf_labeldp.features import find_clusters
from tf_labeldp.features.clusters import Clusters
from tf_labeldp.mechanisms import HistogramMechanism, LabelMomentMechanism, Priors, RRWithPrior
from tf_labeldp.vault.noisy_labels import NoisyStatistic

RNG = np.random.default_rng(0)
TRUE = np.arange(600) % 3  # of four classes
FEATURES = (6.0 * np.eye(3)[TRUE] + RNG.normal(size=(600, 3))).astype(np.float32)
LABELS = np.where(RNG.random(600) < 0.8, TRUE, 3)
SURE = 2000.0  # an epsilon at which discrete noise is zero except with probability e^-1000


def vault(epsilon=2.0, **arguments):
    arguments = {"labels": LABELS, "num_classes": 4, **arguments}
    return ldp.PrivateLabels(budget=ldp.PrivacyBudget(epsilon), **arguments)


def counted(labels, clusters, epsilon=0.5, key=None, **settings):
    """The noisy histogram of a vault's labels by clusters."""
    mechanism = HistogramMechanism(epsilon, labels.num_classes, **settings)
    return labels.release(mechanism, public_input=clusters, key=key)


def cluster_priors(labels, num_clusters=3, epsilon=0.5, key=None, **settings):
    """Algorithm 4, from the features to the priors."""
    clusters = find_clusters(FEATURES, num_clusters, **settings)
    return counted(labels, clusters.assignments, epsilon, key).priors()


def test_priors_are_the_shares_of_the_classes_in_each_cluster():
    priors = cluster_priors(vault(SURE), epsilon=SURE)
    rows = np.asarray(priors)
    assert isinstance(priors, Priors) and priors.values is None
    assert rows.shape == (600, 4) and rows.dtype == np.float64
    assert priors.probabilities.shape == (3, 4) and priors.groups.shape == (600,)
    for c in range(3):
        shares = np.bincount(LABELS[TRUE == c], minlength=4) / 200
        np.testing.assert_allclose(rows[TRUE == c], np.tile(shares, (200, 1)), rtol=1e-12)


def test_priors_are_the_noisy_histogram_clipped_and_normalised():
    """Algorithm 4, step by step; a cluster without any count above zero is uniform."""
    clusters = Clusters.from_assignments(np.r_[TRUE[:-1], 7], 9)
    released = counted(vault(insecure_seed=6), clusters.assignments, 0.02)
    counts = released.values
    assert isinstance(released, NoisyStatistic)
    assert counts.shape == (8, 4) and counts.dtype == np.int64 and (counts < 0).any()
    alone = HistogramMechanism(0.02, 4).release(
        LABELS, clusters.assignments, rng=np.random.default_rng([6, 0])
    )
    np.testing.assert_array_equal(counts, alone)
    np.testing.assert_array_equal(np.asarray(released), counts)
    clipped = np.maximum(counts, 0)
    uniform = clipped.sum(axis=1) == 0
    expected = np.where(uniform[:, None], 0.25, clipped / np.maximum(clipped.sum(1), 1)[:, None])
    found = np.asarray(released.priors())
    np.testing.assert_allclose(found, expected[clusters.assignments], rtol=1e-12)
    np.testing.assert_allclose(found.sum(axis=1), 1.0, rtol=1e-12)


@pytest.mark.holds("estimation.histogram_prior")
def test_guarantee_the_prior_of_a_label_and_its_draw_add_up():
    """Exactly: two labels of one cluster, all noisy counts, all outputs; the sum is reached."""
    for_prior, for_draw = 0.7, 1.1
    mechanism = RRWithPrior(for_draw, 2)
    shrink = math.exp(-for_prior / 2)

    def joint(label, counts, output):
        """P of the counts and the output, if the other label is 1, times a constant."""
        exact = np.bincount([label, 1], minlength=2)
        noise = shrink ** int(np.abs(np.array(counts) - exact).sum())
        return noise * mechanism.transition_matrix(histogram_prior(counts))[label, output]

    ratios = [
        math.log(joint(label, counts, output) / joint(1 - label, counts, output))
        for counts in itertools.product(range(-4, 7), repeat=2)
        for label, output in itertools.product((0, 1), repeat=2)
        if joint(label, counts, output) > 0.0
    ]
    assert max(ratios) == pytest.approx(for_prior + for_draw, abs=1e-9)


def test_one_histogram_of_all_makes_one_prior_for_all():
    priors = counted(vault(SURE), None, SURE).priors()
    assert priors.groups is None and priors.probabilities.shape == (4,)
    np.testing.assert_allclose(np.asarray(priors), np.bincount(LABELS, minlength=4) / 600)


def test_other_statistics_make_no_priors():
    mechanism = LabelMomentMechanism(1.0, 0.0, noise="laplace", num_classes=4, max_l1=1.0)
    moments = vault().release(mechanism, public_input=np.eye(600, 2))
    with pytest.raises(TypeError, match="priors need a histogram, got a LabelMomentMechanism"):
        moments.priors()
