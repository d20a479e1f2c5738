"""The probabilities of the true class given its noisy label."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.mechanisms import (
    ClassificationMechanism,
    PriorMechanism,
    PriorResampling,
    checked_mechanism,
    top_k_members,
)
from tf_labeldp.mechanisms._prior_resampling import prior_units

_CHUNK_CELLS = 1 << 20
"""Likelihoods that are held at a time."""


def posterior_probabilities(
    mechanism: ClassificationMechanism, noisy_labels: Any, priors: Any
) -> np.ndarray:
    """Returns P(true label | noisy label, prior) for each noisy label, by Bayes' rule.

    If the priors are right these are the best soft targets that the draw allows: the noisy label
    and the prior, each with the weight that it deserves. Where the priors are wrong, a model that
    is trained on them learns part of what is wrong; ``debiased_targets`` are free of that, and far
    noisier. The priors need not be those of the draw for randomized response, which uses none.

    A label that no class of positive prior can have produced says nothing: there the posterior is
    the prior.

    Privacy: post-processing of noisy labels; nothing is charged, if the priors are public or were
    released.

    Args:
        mechanism: the mechanism that drew the labels: ``RandomizedResponse``, ``RRTopK``,
            ``RRWithPrior``, ``PriorResampling``, or another for classes whose channel is the same
            for every prior.
        noisy_labels: its output, integers (n,) in 0..K-1.
        priors: probabilities (K,) or (n, K). For mechanisms that use priors the very ones of the
            draw, since they decide the channel.

    Returns:
        ``float64`` (n, K); rows sum to one. The memory needed beside it is bounded.

    Raises:
        TypeError: the mechanism is none for classes, or the labels are not integers.
        ValueError: labels or priors out of range or of a wrong shape, or a mechanism whose channel
            depends on the prior in a way that is not known here.

    Example:
        >>> from tf_labeldp.mechanisms import RandomizedResponse
        >>> mechanism = RandomizedResponse(epsilon=1.0, num_classes=3)
        >>> posterior_probabilities(mechanism, [2], [0.6, 0.3, 0.1]).round(3).tolist()
        [[0.512, 0.256, 0.232]]
    """
    num_classes = checked_mechanism(mechanism, ClassificationMechanism).num_classes
    if mechanism.uses_priors and not isinstance(mechanism, (PriorMechanism, PriorResampling)):
        raise ValueError(
            "posterior_probabilities does not know the channel of "
            f"{type(mechanism).__name__} by prior. Use one of RandomizedResponse, RRTopK, "
            "RRWithPrior and PriorResampling."
        )
    noisy = _validate.class_indices("noisy_labels", noisy_labels, num_classes)
    rows = _validate.prior_rows("priors", priors, noisy.size, num_classes)
    channel = None if mechanism.uses_priors else mechanism.transition_matrix()
    posterior = np.empty((noisy.size, num_classes))
    step = max(1, _CHUNK_CELLS // num_classes)
    for start in range(0, noisy.size, step):
        chunk = slice(start, start + step)
        prior = rows if rows.shape[0] == 1 else rows[chunk]
        if isinstance(mechanism, PriorMechanism):
            weights = _top_k_likelihood(mechanism, noisy[chunk], prior)
        elif isinstance(mechanism, PriorResampling):
            weights = _resampling_likelihood(mechanism, noisy[chunk], prior)
        else:
            weights = channel[:, noisy[chunk]].T  # type: ignore[index]
        weights = weights * prior
        evidence = weights.sum(axis=1, keepdims=True)
        told = evidence > 0.0
        with np.errstate(invalid="ignore"):
            weights = np.where(told, weights / evidence, prior)
        posterior[chunk] = weights / weights.sum(axis=1, keepdims=True)
    return posterior


def _top_k_likelihood(
    mechanism: PriorMechanism, noisy: np.ndarray, prior: np.ndarray
) -> np.ndarray:
    """Returns ``P[noisy_i | class]`` of RRTop-k (Algorithm 1, ``ghazi2021``), (m, K).

    Args:
        mechanism: decides the size of the set for each prior.
        noisy: noisy labels (m,).
        prior: (m, K), or (1, K) for all.
    """
    k = np.reshape(mechanism.set_sizes(prior), (-1, 1))
    members = top_k_members(prior, k)
    shrink = math.exp(-mechanism.epsilon)
    kept = 1.0 / (1.0 + (k - 1) * shrink)
    likelihood = np.where(members, shrink * kept, 1.0 / k)  # of an output within the set
    likelihood = np.broadcast_to(likelihood, (noisy.size, prior.shape[1])).copy()
    every = np.arange(noisy.size)
    likelihood[every, noisy] = np.broadcast_to(kept[:, 0], noisy.shape)
    within = np.broadcast_to(members, likelihood.shape)[every, noisy]
    return likelihood * within[:, np.newaxis]


def _resampling_likelihood(
    mechanism: PriorResampling, noisy: np.ndarray, prior: np.ndarray
) -> np.ndarray:
    """Returns ``P[noisy_i | class]`` of Algorithm 1 of ``esfandiari2022``, (m, K).

    Args:
        mechanism: decides lambda for each prior.
        noisy: noisy labels (m,).
        prior: (m, K), or (1, K) for all.
    """
    resampled = mechanism.resampling_probabilities(prior)
    every = np.arange(noisy.size)
    drawn = prior_units(prior) / 2.0**53  # the prior as it is drawn from
    rows = np.broadcast_to(drawn, (noisy.size, prior.shape[1]))
    likelihood = np.repeat((resampled * rows[every, noisy])[:, np.newaxis], rows.shape[1], axis=1)
    likelihood[every, noisy] += np.broadcast_to(1.0 - resampled, noisy.shape)
    return likelihood
