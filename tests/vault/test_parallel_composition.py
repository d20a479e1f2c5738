"""Observation 4 of ``ghazi2021``, from the joint distribution of all outputs."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tf_labeldp.accounting import PrivacyBudget
from tf_labeldp.mechanisms import RandomizedResponse, RRWithPrior
from tf_labeldp.vault import PrivateLabels

K = 3
FIRST, SECOND = (0, 1), (2, 3)  # the parts of four examples
DATA_SETS = list(itertools.product(range(K), repeat=4))


def learned_prior(first_outputs):
    """Returns a prior for the second stage from the noisy labels of the first."""
    weights = 1.0 + 4.0 * np.bincount(first_outputs, minlength=K)
    return weights / weights.sum()


def joint_distribution(labels, epsilon, second_part=SECOND):
    """Returns P[all four outputs] as an array (K, K, K, K)."""
    stage_1 = RandomizedResponse(epsilon, K).transition_matrix()
    stage_2 = RRWithPrior(epsilon, K)
    joint = np.empty((K,) * 4)
    for outputs in itertools.product(range(K), repeat=4):
        channel = stage_2.transition_matrix(learned_prior(outputs[:2]))
        joint[outputs] = math.prod(stage_1[labels[i], outputs[i]] for i in FIRST) * math.prod(
            channel[labels[i], outputs[2 + place]] for place, i in enumerate(second_part)
        )
    return joint


def worst_log_ratio(epsilon, second_part=SECOND):
    """Returns the worst log-ratio over all pairs of data sets that differ in one label."""
    joint = {labels: joint_distribution(labels, epsilon, second_part) for labels in DATA_SETS}
    worst = 0.0
    for labels, other in itertools.permutations(DATA_SETS, 2):
        if sum(a != b for a, b in zip(labels, other, strict=True)) == 1:
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.log(joint[labels]) - np.log(joint[other])
            impossible = (joint[labels] == 0) & (joint[other] == 0)
            worst = max(worst, float(np.max(ratio[~impossible])))
    return worst


def test_the_second_stage_is_adaptive():
    sizes = {
        int(RRWithPrior(1.0, K).optimal_k(learned_prior(first))[0])
        for first in itertools.product(range(K), repeat=2)
    }
    assert len(sizes) > 1


@pytest.mark.slow
@pytest.mark.holds("vault.PrivateLabels")
def test_observation_4_stages_on_disjoint_parts_are_epsilon_dp_together():
    epsilon = 1.0
    assert worst_log_ratio(epsilon) == pytest.approx(epsilon, abs=1e-12)


@pytest.mark.slow
@pytest.mark.holds("vault.PrivateLabels")
def test_the_statement_bounds_the_joint_distribution():
    epsilon = 1.0
    for second_part, stated in ((SECOND, epsilon), (FIRST, 2 * epsilon)):
        vault = PrivateLabels([0, 1, 2, 0], K, budget=PrivacyBudget(2.0))
        first = vault.randomize(RandomizedResponse(epsilon, K), FIRST)
        vault.randomize(RRWithPrior(epsilon, K), second_part, learned_prior(first.values))
        assert vault.guarantee().epsilon == stated
        assert worst_log_ratio(epsilon, second_part) <= stated + 1e-12


@pytest.mark.slow
def test_the_vault_draws_the_joint_distribution():
    """Chi-square at 1e-6 over all 81 outputs; the distribution of a neighbour is rejected."""
    from scipy import stats

    epsilon, labels, runs = 1.0, (0, 1, 2, 0), 2000
    seeds = np.random.default_rng(43).integers(1 << 60, size=runs).tolist()
    counts = np.zeros((K,) * 4)
    for seed in seeds:
        vault = PrivateLabels(labels, K, budget=PrivacyBudget(epsilon), insecure_seed=seed)
        first = vault.randomize(RandomizedResponse(epsilon, K), FIRST).values
        prior = learned_prior(first)
        second = vault.randomize(RRWithPrior(epsilon, K), SECOND, prior).values
        counts[(*first, *second)] += 1

    def rejected(true_labels):
        expected = runs * joint_distribution(true_labels, epsilon)
        if np.any(counts[expected == 0]):
            return True
        cells = expected > 0
        # The approximation needs cells with at least ten counts, so small cells are merged.
        small = cells & (expected < 10)
        observed = np.append(counts[cells & ~small], counts[small].sum())
        mean = np.append(expected[cells & ~small], expected[small].sum())
        observed, mean = observed[mean > 0], mean[mean > 0]
        statistic = np.sum((observed - mean) ** 2 / mean)
        return bool(statistic > stats.chi2.isf(1e-6, observed.size - 1))

    assert not rejected(labels)
    assert rejected((0, 1, 2, 1))
    assert rejected((1, 1, 2, 0))
