"""Noisy labels that agree with their cluster."""

from __future__ import annotations

import math

import numpy as np
import pytest

import tf_labeldp as ldp
from tf_labeldp.features import denoise_labels
from tf_labeldp.mechanisms import RandomizedResponse
from tf_labeldp.plugins import Clusters


def made_of(noisy, clusters, num_classes):
    return denoise_labels(np.array(noisy), np.array(clusters), num_classes)


@pytest.mark.holds("features.denoise_labels")
def test_a_label_is_kept_if_it_is_that_of_its_cluster():
    noisy = [2, 0, 2, 1, 1, 0, 2, 1]
    clusters = [0, 0, 0, 3, 3, 3, 1, 3]
    made = made_of(noisy, clusters, 3)
    assert made.cluster_classes.tolist() == [2, 2, 0, 1]  # of the empty cluster: 0
    assert made_of([3, 1, 3, 1, 2], [0] * 5, 4).cluster_classes.tolist() == [1]  # the lower one
    assert made.labelled.tolist() == [0, 2, 3, 4, 6, 7]
    assert made.labels.tolist() == [2, 2, 1, 1, 2, 1]
    assert made.unlabelled.tolist() == [1, 5]
    assert made.kept_fraction == 0.75
    assert all(a.dtype == np.int64 for a in (made.labelled, made.labels, made.unlabelled))


def test_every_example_is_labelled_or_not():
    rng = np.random.default_rng(0)
    noisy, clusters = rng.integers(0, 5, 1000), rng.integers(0, 12, 1000)
    made = denoise_labels(noisy, Clusters.from_assignments(clusters, 14), 5)
    both = np.concatenate([made.labelled, made.unlabelled])
    assert np.array_equal(np.sort(both), np.arange(1000))
    assert np.array_equal(noisy[made.labelled], made.labels)
    expected = [np.bincount(noisy[clusters == c], minlength=5).argmax() for c in range(14)]
    assert made.cluster_classes.tolist() == expected
    assert np.array_equal(made.labels, made.cluster_classes[clusters[made.labelled]])
    assert not np.any(noisy[made.unlabelled] == made.cluster_classes[clusters[made.unlabelled]])


def test_more_of_the_kept_labels_are_true():
    """By equation 8 of ``tang2022``, with clusters of accuracy 0.6; 5 standard errors."""
    n, k, accuracy = 60_000, 6, 0.6
    rng = np.random.default_rng(1)
    true = np.arange(n) % k
    wrong = (true + rng.integers(1, k, n)) % k
    groups = np.where(rng.random(n) < accuracy, true, wrong)
    labels = ldp.PrivateLabels(true, k, budget=ldp.PrivacyBudget(1.0), insecure_seed=2)
    made = denoise_labels(labels.randomize(RandomizedResponse(1.0, k), key="draw"), groups, k)
    assert labels.guarantee().epsilon == 1.0  # nothing more was charged
    assert made.cluster_classes.tolist() == list(range(k))
    purity = np.mean(made.labels == true[made.labelled])
    expected = math.e / (math.e + (1.0 - accuracy) / accuracy)
    assert abs(purity - expected) < 5 * math.sqrt(expected * (1 - expected) / made.labels.size)


BAD = {
    "lengths": ([0, 1], [0], 3, ValueError, "expected 1 noisy labels, .*got 2"),
    "labels": ([0, 3], [0, 0], 3, ValueError, "noisy_labels must lie in 0..2"),
    "clusters": ([0, 1], [0, -1], 3, ValueError, "assignments must be in 0..C-1"),
}


def test_bad_input():
    for noisy, clusters, num_classes, error, message in BAD.values():
        with pytest.raises(error, match=message):
            denoise_labels(noisy, clusters, num_classes)
