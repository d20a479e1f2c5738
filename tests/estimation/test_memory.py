"""A hundred thousand classes: what is computed by group or in blocks, and what is refused first."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from tf_labeldp.estimation import debiased, posterior
from tf_labeldp.mechanisms import (
    ALIBI,
    InformativeRR,
    Priors,
    RandomizedResponse,
    RRTopK,
    RRWithPrior,
)
from tf_labeldp.plugins import PriorResampling

CLASSES, LABELS, GROUPS = 100_000, 50_000, 10

SETTING = f"""
import resource
import numpy as np
from tf_labeldp import estimation
from tf_labeldp.mechanisms import *
from tf_labeldp.plugins import PriorResampling
K, n = {CLASSES}, {LABELS}
rng = np.random.default_rng(3)
labels = rng.integers(K, size=n)
prior = 1.0 / np.arange(1, K + 1)
prior /= prior.sum()
groups = rng.integers({GROUPS}, size=n)
by_group = Priors(np.stack([np.roll(prior, i) for i in range({GROUPS})]), groups=groups)
estimation.posterior(RandomizedResponse(1.0, 3), [1])  # loads what it needs
with open("/proc/self/statm") as file:
    mapped = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + {1_200_000_000}, mapped + {1_200_000_000}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process as Linux does")
def test_priors_of_groups_and_channels_are_not_expanded():
    """(n, K) doubles would be 40 GB and a channel 80 GB, where 1.2 GB are allowed."""
    work = """
RandomizedResponse(8.0, K).randomize(labels)
RRTopK(8.0, K, 50).randomize(labels, prior)
for kind in (RRWithPrior, InformativeRR, PriorResampling):
    kind(8.0, K).randomize(labels, by_group)
RRWithPrior(8.0, K).optimal_k(by_group)
PriorResampling(8.0, K).resampling_probabilities(by_group)
estimation.posterior(RandomizedResponse(8.0, K), labels[:100], prior)
estimation.debiased(RandomizedResponse(8.0, K), labels[:100])
drawn = RRTopK(8.0, K, 50).randomize(labels[:100], prior)
estimation.debiased(RRTopK(8.0, K, 50), drawn, prior)
estimation.posterior(RRTopK(8.0, K, 50), drawn, prior)
"""
    command = [sys.executable, "-c", SETTING + work]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]


@pytest.mark.parametrize("estimate", [posterior, debiased])
@pytest.mark.parametrize("by_group", [False, True])
def test_targets_that_do_not_fit_are_refused_before_their_memory_is_taken(estimate, by_group):
    labels = np.arange(LABELS)
    mechanism, priors = RandomizedResponse(8.0, CLASSES), None
    if by_group:
        mechanism = RRTopK(8.0, CLASSES, CLASSES)
        rows = np.full((2, CLASSES), 1.0 / CLASSES)
        priors = Priors(rows, groups=np.arange(LABELS) % 2)
    with pytest.raises(ValueError, match=r"got 50,000 x 100,000 numbers, 40\.0 GB\. Call .* some"):
        estimate(mechanism, labels, priors)


def test_rows_and_channels_that_do_not_fit_are_refused_before_their_memory_is_taken():
    with pytest.raises(ValueError, match=r"expected noisy rows .* 40\.0 GB\. Use Randomized"):
        ALIBI(8.0, CLASSES).randomize(np.arange(LABELS))
    prior = np.full(CLASSES, 1.0 / CLASSES)
    for mechanism, public in (
        (RandomizedResponse(1.0, CLASSES), None),
        (PriorResampling(1.0, CLASSES), prior),
    ):
        with pytest.raises(ValueError, match=r"expected a channel .* 80\.0 GB"):
            mechanism.transition_matrix(public)


BY_PRIOR = [RRTopK(1.0, 7, 3), RRWithPrior(1.0, 7), InformativeRR(1.0, 7), PriorResampling(1.0, 7)]


@pytest.mark.parametrize("mechanism", BY_PRIOR, ids=lambda one: type(one).__name__)
def test_priors_by_group_give_what_a_row_for_each_label_does(mechanism):
    rng = np.random.default_rng(11)
    rows = rng.dirichlet(np.ones(7), 4) * 0.93 + 0.01
    priors, labels = Priors(rows, groups=rng.integers(4, size=600)), rng.integers(7, size=600)
    expanded = np.asarray(priors)
    noisy = mechanism.randomize(labels, priors, rng=np.random.default_rng(1))
    one_by_one = mechanism.randomize(labels, expanded, rng=np.random.default_rng(1))
    np.testing.assert_array_equal(noisy, one_by_one)
    for estimate in (posterior, debiased):
        found, expected = (estimate(mechanism, noisy, each) for each in (priors, expanded))
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)
    if isinstance(mechanism, RRWithPrior):
        np.testing.assert_array_equal(mechanism.optimal_k(priors), mechanism.optimal_k(expanded))
    for estimate in (posterior, debiased):
        with pytest.raises(ValueError, match=r"groups of priors must have shape \(599,\)"):
            estimate(mechanism, labels[:599], priors)
