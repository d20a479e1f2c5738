"""Noisy labels that agree with their cluster: the filter, and equation 8."""

from __future__ import annotations

import math

import numpy as np
import pytest

import tf_labeldp as ldp
from tf_labeldp.features import denoise_labels
from tf_labeldp.features.clusters import Clusters
from tf_labeldp.mechanisms import RandomizedResponse, RRTopK

# (epsilon, accuracy of the clusters): purity and kept fraction for 10 classes, by another program.
ORACLES = {
    (1.0, 0.883): (0.953520575, 0.214813306),
    (0.5, 0.883): (0.925611364, 0.147700446),
    (1.0, 0.1): (0.231969317, 0.1),
}


def made_of(noisy, clusters, num_classes, **arguments):
    return denoise_labels(np.array(noisy), np.array(clusters), num_classes, **arguments)


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


def any_labels(epsilon, num_classes=10, **arguments):
    mechanism = RandomizedResponse(epsilon, num_classes)
    return made_of([0, 1], [0, 0], num_classes, mechanism=mechanism, **arguments)


@pytest.mark.parametrize(("epsilon", "accuracy"), ORACLES)
def test_expected_purity_and_kept_fraction(epsilon, accuracy):
    purity, kept = ORACLES[epsilon, accuracy]
    made = any_labels(epsilon)
    assert made.expected_purity(accuracy) == pytest.approx(purity, abs=1e-6)
    assert made.expected_kept_fraction(accuracy) == pytest.approx(kept, abs=1e-6)
    given = any_labels(epsilon, cluster_accuracy=accuracy)
    assert given.expected_purity() == made.expected_purity(accuracy)
    assert given.expected_kept_fraction() == made.expected_kept_fraction(accuracy)


@pytest.mark.parametrize(("num_classes", "accuracy"), [(2, 0.3), (3, 1.0), (10, 0.883), (10, 0.0)])
def test_equation_8_is_bayes_rule_over_the_exact_channel(num_classes, accuracy):
    """Sums over all true classes, cluster classes and noisy labels, with uniform errors."""
    channel = RandomizedResponse(0.8, num_classes).transition_matrix()
    errors = np.full((num_classes, num_classes), (1.0 - accuracy) / (num_classes - 1))
    np.fill_diagonal(errors, accuracy)
    kept = (errors * channel).sum() / num_classes  # noisy label and cluster class agree
    right = np.sum(np.diag(errors) * np.diag(channel)) / num_classes
    made = any_labels(0.8, num_classes)
    assert made.expected_kept_fraction(accuracy) == pytest.approx(kept, abs=1e-12)
    assert made.expected_purity(accuracy) == pytest.approx(right / kept, abs=1e-12)


def test_simulation():
    """Clusters of accuracy 0.6 with uniform errors, noise of a vault; within 5 standard errors."""
    n, k, accuracy = 60_000, 6, 0.6
    rng = np.random.default_rng(1)
    true = np.arange(n) % k
    wrong = (true + rng.integers(1, k, n)) % k
    groups = np.where(rng.random(n) < accuracy, true, wrong)
    mechanism = RandomizedResponse(1.0, k)
    labels = ldp.PrivateLabels(true, k, budget=ldp.PrivacyBudget(1.0), insecure_seed=2)
    noisy = labels.randomize(mechanism, key="draw")
    made = denoise_labels(noisy, groups, k, mechanism)
    assert labels.guarantee().epsilon == 1.0  # nothing more was charged
    assert made.cluster_classes.tolist() == list(range(k))
    purity = np.mean(made.labels == true[made.labelled])
    expected = made.expected_purity(accuracy)
    error = math.sqrt(expected * (1 - expected) / made.labels.size)
    assert abs(purity - expected) < 5 * error
    assert abs(purity - mechanism.transition_matrix()[0, 0]) > 20 * error  # without a filter
    kept = made.expected_kept_fraction(accuracy)
    assert abs(made.kept_fraction - kept) < 5 * math.sqrt(kept * (1 - kept) / n)
    # The estimate, by the slope of the kept fraction in the accuracy.
    slope = made.expected_kept_fraction(1.0) - made.expected_kept_fraction(0.0)
    standard_error = math.sqrt(kept * (1 - kept) / n) / slope
    assert abs(made.estimated_cluster_accuracy() - accuracy) < 5 * standard_error < 0.05
    assert made.expected_purity() == made.expected_purity(made.estimated_cluster_accuracy())


@pytest.mark.holds("features.DenoisedLabels.estimated_cluster_accuracy")
def test_the_estimate_is_a_share():
    """Singletons agree with themselves: more than any accuracy can explain."""
    mechanism = RandomizedResponse(1.0, 3)
    alone = made_of([0, 1, 2], [0, 1, 2], 3, mechanism=mechanism)
    assert alone.kept_fraction == 1.0 and alone.estimated_cluster_accuracy() == 1.0
    for epsilon in (1e-300, 1e-9, 2000.0):
        assert 0.0 <= any_labels(epsilon).estimated_cluster_accuracy() <= 1.0
        assert 0.0 <= any_labels(epsilon).expected_purity() <= 1.0
        assert any_labels(epsilon).expected_purity(0.0) == 0.0
    spread = made_of([0, 1, 2] * 2, [0] * 6, 3, mechanism=RandomizedResponse(5.0, 3))
    assert 0.0 <= spread.estimated_cluster_accuracy() < 0.5


RR = RandomizedResponse(1.0, 3)
BAD = {
    "lengths": ([0, 1], [0], 3, {}, ValueError, "expected 1 noisy labels, .*got 2"),
    "labels": ([0, 3], [0, 0], 3, {}, ValueError, "noisy_labels must lie in 0..2"),
    "clusters": ([0, 1], [0, -1], 3, {}, ValueError, "assignments must be in 0..C-1"),
    "other-classes": ([0, 1], [0, 0], 4, {"mechanism": RR}, ValueError, "expected num_classes=3"),
    "mechanism": ([0, 1], [0, 0], 3, {"mechanism": RRTopK(1.0, 3, 2)}, TypeError, "got RRTopK"),
    "accuracy": ([0, 1], [0, 0], 3, {"cluster_accuracy": 1.2}, ValueError, "cluster_accuracy"),
}


def test_bad_input():
    for noisy, clusters, num_classes, settings, error, message in BAD.values():
        with pytest.raises(error, match=message):
            denoise_labels(noisy, clusters, num_classes, **settings)


def test_expectations_need_the_mechanism():
    made = made_of([0, 1], [0, 0], 3, cluster_accuracy=0.5)
    for question in (made.expected_purity, made.expected_kept_fraction):
        with pytest.raises(ValueError, match=r"Give denoise_labels the RandomizedResponse"):
            question()
    with pytest.raises(ValueError, match="cluster_accuracy must be in"):
        any_labels(1.0).expected_purity(-0.1)
