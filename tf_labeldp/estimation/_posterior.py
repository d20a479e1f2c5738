"""What noisy labels and their priors reveal of the true labels: Bayes' rule by mechanism."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Public
from tf_labeldp.mechanisms import (
    ALIBI,
    ClassificationMechanism,
    PriorMechanism,
    Priors,
    RandomizedResponse,
    RegressionMechanism,
)
from tf_labeldp.mechanisms._base import LabelMechanism, checked_mechanism
from tf_labeldp.mechanisms._classes import rank_classes, row_chunks, top_k_members
from tf_labeldp.mechanisms._clusters import PriorResampling, prior_units
from tf_labeldp.mechanisms._priors import PriorRows


def posterior(
    mechanism: Public[LabelMechanism], noisy_labels: Public[Any], priors: Public[Any] = None
) -> np.ndarray:
    """Returns what each noisy label says of its true label; ``NoisyLabels.posterior`` calls it.

    * Classes: ``P(true class | noisy label, prior)``, the best soft targets that the draw allows if
      the priors are right. Where they are wrong, a model that is trained on them learns part of the
      error; ``debiased`` targets are free of that, and far noisier. A label that no class of
      positive prior can have produced carries no information: there the posterior is the prior.
    * Noisy one-hot rows of ``ALIBI``: ``P(true class | row, prior)``.
    * Numbers: ``E[true label | noisy label]``, the guess of least expected squared error if the
      prior is right. It is the best guess of the *label*, not the best *target*: guesses are shrunk
      towards the mean of the prior, and so are the predictions of a model that is trained on them.
      Where the scale of the predictions matters and there are many examples, use ``debiased``
      labels. The outputs of ``optimal_bins`` for squared error are posterior means already, under
      the prior that it was given.

    Guarantee:
        Post-processing of noisy labels: no charge, if the priors are public or were released.

    Source: Malek et al. 2021, "Antipodes of label differential privacy: PATE and ALIBI"; for
    numbers, denoising after the mechanism, an open direction of section 6 of ``ghazi2023``.

    Args:
        mechanism: the mechanism that drew the labels.
        noisy_labels: its output, (n,) or, of ``ALIBI``, (n, K).
        priors: for classes probabilities (K,) or (n, K), or ``Priors``: those of the draw, or any,
            None for uniform ones, if the mechanism draws without. For numbers ``Priors`` with their
            ``values``.

    Returns:
        ``float64`` (n, K) with rows that sum to one; for numbers (n,), between the smallest and the
        largest of the priors' values.

    Raises:
        TypeError: a mechanism of another kind, or labels of a wrong type.
        ValueError: labels or priors out of range, missing or of a wrong shape; a channel by prior
            that is not known here; numbers that no value of positive probability can have produced.

    Example:
        >>> from tf_labeldp.mechanisms import RandomizedResponse, RROnBins
        >>> mechanism = RandomizedResponse(epsilon=1.0, num_classes=3)
        >>> posterior(mechanism, [2], [0.6, 0.3, 0.1]).round(3).tolist()
        [[0.512, 0.256, 0.232]]
        >>> bins = RROnBins(1.0, inputs=(0.0, 1.0), outputs=(0.0, 1.0), bin_of_input=(0, 1))
        >>> posterior(bins, [0.0, 1.0], Priors([0.5, 0.5], values=[0.0, 1.0])).round(4).tolist()
        [0.2689, 0.7311]
    """
    if isinstance(mechanism, ClassificationMechanism):
        return _of_classes(mechanism, noisy_labels, priors)
    if isinstance(mechanism, RegressionMechanism):
        return _of_numbers(mechanism, noisy_labels, priors)
    if isinstance(mechanism, ALIBI):
        return _of_alibi(mechanism, noisy_labels, priors)
    checked_mechanism(mechanism, LabelMechanism)
    raise TypeError(
        f"the posterior of labels drawn by {type(mechanism).__name__} is not known here. Use the "
        "noisy labels as they are, or their debiased targets."
    )


def _of_classes(mechanism: ClassificationMechanism, noisy_labels: Any, priors: Any) -> np.ndarray:
    num_classes = mechanism.num_classes
    likelihood = _likelihood_of_classes(mechanism)
    noisy = _validate.class_indices("noisy_labels", noisy_labels, num_classes)
    if mechanism.uses_priors:
        priors = priors_of_the_draw(mechanism, priors, noisy.size)
    elif priors is None:
        priors = np.full(num_classes, 1.0 / num_classes)
    rows = PriorRows.of(priors, noisy.size, num_classes)
    found = empty_targets(noisy.size, num_classes)
    for chunk in row_chunks(found.shape):
        prior = rows.of_labels(chunk)
        weights = likelihood(noisy[chunk], prior) * prior
        evidence = weights.sum(axis=1, keepdims=True)
        with np.errstate(invalid="ignore"):
            weights = np.where(evidence > 0.0, weights / evidence, prior)
        found[chunk] = weights / weights.sum(axis=1, keepdims=True)
    return found


def priors_of_the_draw(mechanism: ClassificationMechanism, priors: Any, size: int) -> Any:
    """Returns priors with which labels were drawn, or raises without any."""
    if priors is None:
        raise ValueError(
            f"{type(mechanism).__name__} drew its labels with priors; pass the same ones, of "
            f"shape ({mechanism.num_classes},) or ({size}, {mechanism.num_classes})."
        )
    return priors


def empty_targets(size: int, num_classes: int) -> np.ndarray:
    """Returns an array for a target per label and class, or raises if it would not fit."""
    instead = (
        "Call tf_labeldp.estimation with some of the noisy labels at a time, train on the noisy "
        "labels themselves, or merge rare classes."
    )
    _validate.check_size("targets", (size, num_classes), instead)
    return np.empty((size, num_classes))


def _likelihood_of_classes(
    mechanism: ClassificationMechanism,
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Returns ``P[noisy_i | class]`` (m, K) as a function of noisy (m,) and priors (m or 1, K)."""
    if isinstance(mechanism, PriorMechanism):
        return lambda noisy, prior: _top_k_likelihood(mechanism, noisy, prior)
    if isinstance(mechanism, PriorResampling):
        return lambda noisy, prior: _resampling_likelihood(mechanism, noisy, prior)
    if mechanism.uses_priors:
        raise ValueError(
            f"the channel of {type(mechanism).__name__} by prior is not known here. Use one of "
            "RandomizedResponse, RRTopK, RRWithPrior, InformativeRR and PriorResampling."
        )
    if isinstance(mechanism, RandomizedResponse):
        return lambda noisy, _: _response_likelihood(mechanism, noisy)
    channel = mechanism.transition_matrix()
    return lambda noisy, prior: channel[:, noisy].T


def _response_likelihood(mechanism: RandomizedResponse, noisy: np.ndarray) -> np.ndarray:
    """Returns the likelihood of randomized response without its channel (K, K)."""
    shrink = math.exp(-mechanism.epsilon)
    total = 1.0 + (mechanism.num_classes - 1) * shrink
    likelihood = np.full((noisy.size, mechanism.num_classes), shrink / total)
    likelihood[np.arange(noisy.size), noisy] = 1.0 / total
    return likelihood


def _top_k_likelihood(
    mechanism: PriorMechanism, noisy: np.ndarray, prior: np.ndarray
) -> np.ndarray:
    """Returns the likelihood of RRTop-k (Algorithm 1, ``ghazi2021``), or of InformativeRR."""
    k = np.reshape(mechanism.set_sizes(prior), (-1, 1))
    members = top_k_members(prior, k)
    shrink = math.exp(-mechanism.epsilon)
    kept = 1.0 / (1.0 + (k - 1) * shrink)
    outside: np.ndarray = 1.0 / k
    if mechanism.rest_as_one:
        last = np.take_along_axis(rank_classes(prior), k - 1, axis=1)
        outside = np.where(noisy[:, np.newaxis] == last, kept, shrink * kept)
    likelihood = np.where(members, shrink * kept, outside)  # of an output within the set
    likelihood = np.broadcast_to(likelihood, (noisy.size, prior.shape[1])).copy()
    every = np.arange(noisy.size)
    likelihood[every, noisy] = np.broadcast_to(kept[:, 0], noisy.shape)
    within = np.broadcast_to(members, likelihood.shape)[every, noisy]
    return likelihood * within[:, np.newaxis]


def _resampling_likelihood(
    mechanism: PriorResampling, noisy: np.ndarray, prior: np.ndarray
) -> np.ndarray:
    """Returns the likelihood of Algorithm 1 of ``esfandiari2022``."""
    resampled = mechanism.resampling_probabilities(prior)
    every = np.arange(noisy.size)
    drawn = prior_units(prior) / 2.0**53  # the prior as it is drawn from
    rows = np.broadcast_to(drawn, (noisy.size, prior.shape[1]))
    likelihood = np.repeat((resampled * rows[every, noisy])[:, np.newaxis], rows.shape[1], axis=1)
    likelihood[every, noisy] += np.broadcast_to(1.0 - resampled, noisy.shape)
    return likelihood


def _of_numbers(mechanism: RegressionMechanism, noisy_labels: Any, priors: Any) -> np.ndarray:
    values, probabilities = number_priors(priors)
    noisy = _validate.real_vector("noisy_labels", noisy_labels)
    _check_finite(noisy)
    outputs, place = np.unique(noisy, return_inverse=True)
    means = np.empty(outputs.size)
    impossible = np.zeros(outputs.size, dtype=bool)
    for chunk in row_chunks((outputs.size, values.size)):
        weights = mechanism.likelihood(outputs[chunk], values) * probabilities
        total = weights.sum(axis=1)
        impossible[chunk] = ~(total > 0.0)
        with np.errstate(invalid="ignore"):
            means[chunk] = (weights @ values) / total
    if np.any(impossible):
        raise ValueError(
            f"{int(np.count_nonzero(impossible[place]))} of {noisy.size} noisy labels can't come "
            f"from {type(mechanism).__name__} and these values. Pass the very mechanism that drew "
            "them, and values that cover its label_range()."
        )
    # Rounding may carry a mean of nearly equal values beyond them.
    return np.clip(means, values[0], values[-1])[place]


def number_priors(priors: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the values (k,) and probabilities (k,) of a prior of numbers, or raises."""
    if not isinstance(priors, Priors) or priors.values is None:
        raise ValueError(
            "labels that are numbers need priors with their values, got "
            f"{'none' if priors is None else type(priors).__name__}. Give "
            "mechanisms.Priors(probabilities, values=values)."
        )
    values = _validate.increasing_numbers("values", priors.values)
    if np.ndim(priors.probabilities) != 1:
        raise ValueError(
            f"probabilities must have shape ({values.size},), one prior for all labels, got "
            f"{np.shape(priors.probabilities)}. Labels with priors of their own: one call for each."
        )
    return values, _validate.prior_rows("probabilities", priors, None, values.size)[0]


def _of_alibi(mechanism: ALIBI, noisy_labels: Any, priors: Any) -> np.ndarray:
    num_classes = mechanism.num_classes
    rows = np.asarray(noisy_labels)
    if rows.ndim != 2 or rows.shape[1] != num_classes:
        raise ValueError(
            f"noisy_labels must have shape (n, {num_classes}), got {rows.shape}: the rows that "
            "this mechanism released."
        )
    if rows.dtype.kind not in "iuf":
        raise TypeError(f"noisy_labels must be numbers, got dtype {rows.dtype}.")
    _check_finite(rows)
    if priors is None:
        priors = np.full(num_classes, 1.0 / num_classes)
    found = empty_targets(*rows.shape)
    checked = PriorRows.of(priors, rows.shape[0], num_classes)
    for chunk in row_chunks(rows.shape):
        noisy, prior = rows[chunk].astype(np.float64), checked.of_labels(chunk)
        found[chunk] = _softmax(_log_likelihood(mechanism, noisy, prior), prior)
    return found


def _log_likelihood(mechanism: ALIBI, noisy: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """Returns log f(x - e_i) for the noise's density f, up to a constant in each row: (m, K).

    It may be wrong, and is not used, where the prior is zero.
    """
    if mechanism.noise == "laplace":
        # |x| - |x - 1|, without the difference of two large numbers.
        return (2.0 * np.clip(noisy, 0.0, 1.0) - 1.0) / mechanism.scale
    # exp(x_i / sigma^2); published code divides by sigma, which is Bayes' rule at sigma 1 only.
    largest = np.where(prior > 0.0, noisy, -np.inf).max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):
        return np.minimum(noisy - largest, 0.0) / mechanism.scale**2


def _softmax(scores: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """Returns rows proportional to ``prior * exp(scores)``, (m, K)."""
    with np.errstate(divide="ignore"):
        scores = np.where(prior > 0.0, scores + np.log(prior), -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def _check_finite(noisy: np.ndarray) -> None:
    wrong = int(np.count_nonzero(~np.isfinite(noisy)))
    if wrong:
        raise ValueError(
            f"noisy_labels must be finite, but {wrong} of {noisy.size} entries are NaN or infinite."
        )
