"""Priors from clusters: what they are, what they cost, and their way into training."""

from __future__ import annotations

import itertools
import math

import keras
import numpy as np
import pytest

import tf_labeldp as ldp
from tf_labeldp.estimation import (
    Clusters,
    cluster_priors,
    find_clusters,
    histogram_prior,
    private_histogram,
)
from tf_labeldp.mechanisms import RRWithPrior

RNG = np.random.default_rng(0)
TRUE = np.arange(600) % 3  # of four classes
FEATURES = (6.0 * np.eye(3)[TRUE] + RNG.normal(size=(600, 3))).astype(np.float32)
LABELS = np.where(RNG.random(600) < 0.8, TRUE, 3)
SURE = 2000.0  # an epsilon at which discrete noise is zero but for a chance of e^-1000


def vault(epsilon=2.0, **arguments):
    return ldp.PrivateLabels(LABELS, num_classes=4, budget=ldp.PrivacyBudget(epsilon), **arguments)


def test_priors_are_the_shares_of_the_classes_in_each_cluster():
    priors = cluster_priors(FEATURES, LABELS, 3, SURE, num_classes=4)
    assert priors.shape == (600, 4) and priors.dtype == np.float64
    for c in range(3):
        shares = np.bincount(LABELS[TRUE == c], minlength=4) / 200
        np.testing.assert_allclose(priors[TRUE == c], np.tile(shares, (200, 1)), rtol=1e-12)


def test_priors_are_the_noisy_histogram_clipped_and_normalised():
    """Algorithm 4, step by step; a cluster without any count above zero is uniform."""
    clusters = Clusters.from_assignments(np.r_[TRUE[:-1], 7], 9)
    found = cluster_priors(
        None, LABELS, None, 0.02, clusters=clusters, num_classes=4, rng=np.random.default_rng(6)
    )
    rng = np.random.default_rng(6)
    counts = private_histogram(LABELS, 4, 0.02, clusters.assignments, rng=rng)
    assert counts.shape == (8, 4) and (counts < 0).any()
    clipped = np.maximum(counts, 0)
    uniform = clipped.sum(axis=1) == 0
    expected = np.where(uniform[:, None], 0.25, clipped / np.maximum(clipped.sum(1), 1)[:, None])
    np.testing.assert_allclose(found, expected[clusters.assignments], rtol=1e-12)
    np.testing.assert_allclose(found.sum(axis=1), 1.0, rtol=1e-12)


def test_a_cluster_of_noise_alone_is_uniform():
    """At this seed each count of the last cluster is at or below zero."""
    groups = np.r_[np.zeros(599, int), 1]
    for seed in range(200):
        rng = np.random.default_rng(seed)
        if (private_histogram(LABELS, 4, 0.02, groups, rng=rng)[1] <= 0).all():
            break
    rng = np.random.default_rng(seed)
    arguments = {"clusters": groups, "num_classes": 4, "rng": rng}
    found = cluster_priors(None, LABELS, None, 0.02, **arguments)
    assert found[-1].tolist() == [0.25] * 4 and found[0].tolist() != [0.25] * 4


@pytest.mark.parametrize("num_clusters", [1, 3, 50])
def test_guarantee_epsilon_of_all_clusters_together(num_clusters):
    """The budget is spent to the end, whatever the number of clusters; no more is left."""
    labels = vault(0.5)
    cluster_priors(FEATURES, labels, num_clusters, 0.5, key="priors")
    assert labels.guarantee().epsilon == 0.5 and labels.guarantee().delta == 0.0
    with pytest.raises(ldp.BudgetExceededError):
        cluster_priors(FEATURES, labels, num_clusters, 1e-6, key="more")


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


def test_a_vault_adds_the_priors_and_the_draw():
    labels = vault(1.5)
    priors = cluster_priors(FEATURES, labels, 3, 0.5, key="priors")
    noisy = labels.randomize(RRWithPrior(1.0, 4), priors=priors, key="draw")
    assert noisy.shape == (600,)
    assert labels.guarantee().epsilon == pytest.approx(1.5, rel=1e-6)
    # A class that its cluster all but rules out is not drawn.
    assert np.mean(noisy == TRUE) > 0.6
    with pytest.raises(ldp.BudgetExceededError):
        labels.randomize(RRWithPrior(1.0, 4), priors=priors, key="another")


def test_a_restart_gives_the_same_priors_and_charges_nothing(tmp_path):
    """Secure random bits: only the store can make the second run see the first one's counts."""
    found = []
    for _ in range(2):
        labels = vault(1.5, store=tmp_path / "store")
        priors = cluster_priors(FEATURES, labels, 3, 0.5, key="priors")
        noisy = labels.randomize(RRWithPrior(1.0, 4), priors=priors, key="draw")
        found.append((priors, noisy, labels.guarantee()))
    assert np.array_equal(found[0][0], found[1][0])
    assert np.array_equal(found[0][1], found[1][1])
    assert found[0][2] == found[1][2]
    other = cluster_priors(FEATURES, vault(1.5), 3, 0.5)
    assert not np.array_equal(found[0][0], other)


def test_a_stored_release_of_other_clusters_is_refused():
    labels = vault(1.0)
    cluster_priors(FEATURES, labels, 3, 0.5, key="priors")
    with pytest.raises(ldp.private_labels.LabelStoreError, match="other priors or public input"):
        cluster_priors(FEATURES, labels, 5, 0.5, key="priors")
    with pytest.raises(ldp.private_labels.LabelStoreError, match="other mechanism"):
        cluster_priors(FEATURES, labels, 3, 0.4, key="priors")
    assert labels.guarantee().epsilon == 0.5


def train(labels, priors, seed):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    model.compile("adam", keras.losses.CategoricalCrossentropy(from_logits=True))
    stages = ldp.MultiStageTraining(
        FEATURES, labels, epsilon=1.0, fractions=(0.5, 0.5), epochs_per_stage=1, batch_size=60,
        priors=priors, verbose=0,
    )  # fmt: skip
    model.fit(stages.dataset(), epochs=stages.epochs, callbacks=[stages], verbose=0)
    return stages


def test_multi_stage_training_starts_from_them(tmp_path):
    drawn, spent = [], []
    for _ in range(2):
        labels = vault(1.5, store=tmp_path / "store")
        priors = cluster_priors(FEATURES, labels, 3, 0.5, key="priors")
        stages = train(labels, priors, seed=1)
        drawn.append([stages._stored(stage) for stage in (0, 1)])
        spent.append(labels.guarantee())
    for one, again in zip(*drawn, strict=True):
        assert np.array_equal(one, again)
    assert spent[0] == spent[1]
    assert spent[0].epsilon == pytest.approx(1.5, rel=1e-6)
    assert stages.reports[0].mean_k < 4.0  # with uniform priors it would be K


def test_given_clusters_are_those_that_are_found():
    clusters = find_clusters(FEATURES, 3, seed=5)

    def priors(features, num_clusters, **arguments):
        rng = np.random.default_rng(1)
        return cluster_priors(
            features, LABELS, num_clusters, 0.5, num_classes=4, rng=rng, **arguments
        )

    found = [priors(FEATURES, 3, seed=5)]
    for given in (clusters, clusters.assignments.tolist()):
        found.append(priors(None, None, clusters=given))
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


def test_an_encoder_makes_the_features():
    priors = cluster_priors(FEATURES, LABELS, 2, SURE, lambda x: x[:, :1], num_classes=4)
    shares = np.bincount(LABELS[TRUE != 0], minlength=4) / 400
    alike = np.abs(priors - shares).max(axis=1) < 0.05
    assert np.mean(alike == (TRUE != 0)) > 0.95


def test_the_laplace_noise_of_real_counts():
    arguments = {"num_classes": 4, "noise": "laplace"}
    priors = cluster_priors(FEATURES, LABELS, 3, SURE, **arguments)
    expected = cluster_priors(FEATURES, LABELS, 3, SURE, num_classes=4)
    assert 0.0 < np.abs(priors - expected).max() < 1e-3


GROUPS = {"clusters": TRUE}
IN_ARRAY = {"num_classes": 4}
BAD = {
    "no-classes": (FEATURES, LABELS, 3, {}, ValueError, "num_classes is missing"),
    "classes-of-vault": (FEATURES, None, 3, {"num_classes": 5}, ValueError, "not that of .* 4"),
    "gaussian": (FEATURES, None, 3, {"noise": "gaussian"}, ValueError, "Laplace noise is smaller"),
    "noise": (FEATURES, None, 3, {"noise": "none"}, ValueError, "noise must be one of"),
    "epsilon": (FEATURES, None, 3, {"epsilon": 0.0}, ValueError, "epsilon must be finite"),
    "budget": (FEATURES, None, 3, {"epsilon": 3.0}, ldp.BudgetExceededError, "epsilon=3"),
    "rng": (
        FEATURES,
        None,
        3,
        {"rng": np.random.default_rng(0)},
        ValueError,
        "rng must be None with a PrivateLabels",
    ),
    "key": (FEATURES, LABELS, 3, {**IN_ARRAY, "key": "a"}, ValueError, "labels is an array"),
    "lengths": (FEATURES[:-1], None, 3, {}, ValueError, "599 examples in the clusters and 600"),
    "nan": (FEATURES * np.nan, None, 3, {}, ValueError, "features must be finite"),
    "no-features": (None, None, 3, {}, ValueError, "features and num_clusters are needed"),
    "no-number": (FEATURES, None, None, {}, ValueError, "features and num_clusters are needed"),
    "both": (FEATURES, None, None, GROUPS, ValueError, "clusters were given, and features"),
    "both-numbers": (None, None, 3, GROUPS, ValueError, "clusters were given, and features"),
    "clusters": (None, None, None, {"clusters": [0.5] * 600}, TypeError, "must be integers"),
    "labels": (FEATURES, LABELS * 987, 3, IN_ARRAY, ValueError, "labels must lie in 0..3"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_anything_is_charged(case):
    features, labels, num_clusters, settings, error, message = BAD[case]
    held = vault()
    labels = held if labels is None else labels
    with pytest.raises(error, match=message) as caught:
        cluster_priors(features, labels, num_clusters, **{"epsilon": 0.5, **settings})
    assert held.guarantee().epsilon == 0.0
    assert "2961" not in str(caught.value)  # 3 * 987, a label


def test_labels_that_are_numbers_are_refused():
    labels = ldp.PrivateLabels([1.0, 2.0], low=0, high=3, budget=ldp.PrivacyBudget(1.0))
    with pytest.raises(ValueError, match="class"):
        cluster_priors(FEATURES[:2], labels, 1, 0.5)
    assert labels.guarantee().epsilon == 0.0


def test_the_budget_is_asked_before_the_features_are_encoded():
    def encoder(x):
        raise AssertionError("the encoder was called")

    with pytest.raises(ldp.BudgetExceededError):
        cluster_priors(FEATURES, vault(0.1), 3, 0.5, encoder)


@pytest.mark.parametrize("key", [None, "priors"])
def test_a_second_run_finds_its_release_in_the_store(key, tmp_path):
    """Also where it has no name, and the budget has no room for another."""
    first = cluster_priors(FEATURES, vault(0.5, store=tmp_path / "store"), 3, 0.5, key=key)
    again = vault(0.5, store=tmp_path / "store")
    np.testing.assert_array_equal(cluster_priors(FEATURES, again, 3, 0.5, key=key), first)
    assert again.guarantee().epsilon == 0.5
    with pytest.raises(ldp.BudgetExceededError):
        cluster_priors(FEATURES, again, 3, 0.5, key=key and "another")
