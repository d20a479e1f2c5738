"""The cost of ClusterRandomizedResponse, by enumeration of all its outputs.

One cluster of a few labels. What is released are noisy counts with a known density and noisy labels
with a known channel, so the privacy loss of the whole is a formula; its worst value is compared
with the promise from both sides, and the drawn law with the formula.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from tf_labeldp.accounting import PrivacyBudget
from tf_labeldp.plugins import PriorResampling
from tf_labeldp.vault import ClusterRandomizedResponse, PrivateLabels

SIGMA = 1.5
LAMBDA = 0.6


def fixed(tau, num_classes=2):
    return ClusterRandomizedResponse(num_classes, tau, SIGMA, resampling_probability=LAMBDA)


def drawn(mechanism, labels, clusters, seed):
    """Noisy labels of a seeded vault."""
    budget = PrivacyBudget(mechanism.epsilon)
    vault = PrivateLabels(labels, mechanism.num_classes, budget=budget, insecure_seed=seed)
    return vault.randomize(mechanism, clusters=clusters)


def draw_price(tau):
    return math.log1p((1.0 - LAMBDA) / (LAMBDA * tau))


def neighbours(size, num_classes):
    """All counts of label vectors that differ in one label, with that label before and after."""
    found = set()
    for rest in itertools.product(range(num_classes), repeat=size - 1):
        for label, other in itertools.permutations(range(num_classes), 2):
            counts = [np.bincount([*rest, y], minlength=num_classes) for y in (label, other)]
            found.add((tuple(counts[0]), tuple(counts[1]), label, other))
    return sorted(found)


def worst_loss(mechanism, size, grid):
    """Max over neighbours, noisy counts on the grid and noisy labels of log p(out|D) / p(out|D').

    The joint density of counts and noisy labels is a product, and the noisy labels of all but the
    changed label have the same law, so the loss is that of the counts plus that of one draw.
    """
    classes = mechanism.num_classes
    counts = np.array(list(itertools.product(grid, repeat=classes)))
    q = PriorResampling.cluster_distributions(
        counts, np.full(len(counts), size), mechanism.threshold
    )
    if mechanism.resampling_probability is None:
        resampled = mechanism.draw.resampling_probabilities(q)[:, np.newaxis]
    else:
        resampled = np.array([[mechanism.resampling_probability]])
    channel = (1.0 - resampled)[:, :, np.newaxis] * np.eye(classes)
    channel = channel + (resampled * q)[:, np.newaxis, :]  # (counts, label, noisy label)
    worst = -np.inf
    for *means, label, other in neighbours(size, classes):
        density = [stats.laplace.logpdf(counts, mean, SIGMA).sum(axis=1) for mean in means]
        of_draw = np.log(channel[:, label]) - np.log(channel[:, other])
        loss = (density[0] - density[1])[:, np.newaxis] + of_draw
        worst = max(worst, float(loss.max()))
    return worst


@pytest.mark.parametrize(
    ("num_classes", "size", "tau"),
    [(2, 2, 0.5), (2, 3, 0.01), (3, 3, 1 / 3), (3, 2, 0.2)],
)
def test_no_output_loses_more_than_the_promise(num_classes, size, tau):
    grid = np.concatenate([np.arange(-1.0, size + 1.01, 0.25), [-50.0, -7.0, 9.0, 50.0]])
    mechanism = fixed(tau, num_classes)
    assert mechanism.epsilon == pytest.approx(2.0 / SIGMA + draw_price(tau), rel=1e-12)
    assert worst_loss(mechanism, size, grid) <= mechanism.epsilon + 1e-9


@pytest.mark.parametrize(("num_classes", "size", "tau"), [(2, 3, 0.4), (3, 4, 0.3)])
def test_the_promise_is_reached_so_one_over_sigma_would_be_too_little(num_classes, size, tau):
    """Where tau is at least (n_0 + 1) / n, a class that was left by a label can be at tau.

    Label 0 of (0, 1, 1) becomes 1. Noisy counts from 1 to 3 tau of class 0, and below 2 of class 1,
    lose 1 / sigma each, on an open set; q_0 is tau there, so the noisy label 0 loses the most too.
    """
    mechanism = fixed(tau, num_classes)
    step = 0.25 if num_classes == 2 else 0.5
    grid = np.concatenate([np.arange(-1.0, size + 1.01, step), [-7.0, 9.0]])
    worst = worst_loss(mechanism, size, grid)
    assert worst == pytest.approx(mechanism.epsilon, abs=1e-9)
    assert worst > 1.0 / SIGMA + draw_price(tau) + 0.5  # Theorem 1 as it is printed


def test_with_a_draw_epsilon_the_promise_is_reached_and_not_passed():
    mechanism = ClusterRandomizedResponse(2, 0.4, SIGMA, draw_epsilon=0.8)
    grid = np.concatenate([np.arange(-1.0, 4.01, 0.25), [-7.0, 9.0]])
    worst = worst_loss(mechanism, 3, grid)
    assert worst == pytest.approx(2.0 / SIGMA + 0.8, abs=1e-9)


def test_the_drawn_law_is_the_one_that_was_enumerated():
    """Many clusters of three labels at once: an event of large loss, counted.

    The event is that q_0 is 1 - tau and the first noisy label 0. Its frequency is compared with its
    exact probability at 6.5 standard deviations (below 1e-9 in all), and the loss that the
    frequencies show is above all that Theorem 1 as it is printed allows the mechanism.
    """
    clusters, tau = 200_000, 0.4
    mechanism = fixed(tau)
    frequencies, exact = [], []
    for seed, labels in ((1, [0, 1, 1]), (2, [1, 1, 1])):
        ids = np.repeat(np.arange(clusters), 3)
        made = drawn(mechanism, np.tile(labels, clusters), ids, seed)
        at_end = np.abs(made.priors.probabilities[:, 0] - (1.0 - tau)) < 1e-12
        frequencies.append(np.mean(at_end & (made.values[::3] == 0)))
        zeros = labels.count(0)
        # Class 1 is clipped to tau, and class 0 has at least the rest.
        mass = stats.laplace.sf(3 * (1 - tau), zeros, SIGMA)
        mass *= stats.laplace.cdf(3 * tau, 3 - zeros, SIGMA)
        kept = (1.0 - LAMBDA) * (labels[0] == 0) + LAMBDA * (1.0 - tau)
        exact.append(mass * kept)
    deviations = np.sqrt(np.array(exact) / clusters)
    assert np.all(np.abs(np.array(frequencies) - exact) < 6.5 * deviations)
    shown = math.log(frequencies[0] - 6.5 * deviations[0])
    shown -= math.log(frequencies[1] + 6.5 * deviations[1])
    assert 1.0 / SIGMA + draw_price(tau) < shown < mechanism.epsilon
