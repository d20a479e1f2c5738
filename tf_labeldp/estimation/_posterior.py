"""Bayes' rule for each mechanism: posteriors of true labels from noisy labels and priors."""

from __future__ import annotations

from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Public
from tf_labeldp.mechanisms import (
    ALIBI,
    ClassificationMechanism,
    LabelMechanism,
    Priors,
    RegressionMechanism,
)
from tf_labeldp.mechanisms.classes import row_chunks
from tf_labeldp.mechanisms.priors import PriorRows


def posterior(
    mechanism: Public[LabelMechanism], noisy_labels: Public[Any], priors: Public[Any] = None
) -> np.ndarray:
    """Returns the posterior of each true label; ``NoisyLabels.posterior`` calls it.

    * Classes: ``P(true class | noisy label, prior)``, the best soft targets if the priors are
      right. If they are wrong, a model trained on these targets learns part of the error;
      ``debiased`` targets avoid this and are much noisier. If no class with a positive prior can
      have produced a label, its posterior is the prior.
    * Noisy one-hot rows from ``ALIBI``: ``P(true class | row, prior)``.
    * Numbers: ``E[true label | noisy label]``, which minimises the expected squared error if the
      prior is right. These means, and the predictions of a model trained on them, shrink to the
      mean of the prior; use ``debiased`` labels where the scale matters. The outputs of
      ``optimal_bins`` for squared error are already posterior means.

    Guarantee:
        Post-processing of noisy labels and of public or released priors: no charge.

    Source: Malek et al. 2021, "Antipodes of label differential privacy: PATE and ALIBI"; for
    numbers, denoising after the mechanism, an open direction of section 6 of ``ghazi2023``.

    Args:
        mechanism: the mechanism that drew the labels.
        noisy_labels: its output, (n,), or (n, K) from ``ALIBI``.
        priors: for classes probabilities (K,) or (n, K), or ``Priors``; the priors of the draw if
            the mechanism uses priors, else any, and None for uniform ones. For numbers ``Priors``
            with their ``values``.

    Returns:
        ``float64`` (n, K) with rows that sum to one; for numbers (n,), between the smallest and the
        largest of the priors' values.

    Raises:
        TypeError: a mechanism with unknown posterior, or labels of a wrong type.
        ValueError: labels or priors out of range, missing, of a wrong shape or impossible; a
            mechanism whose channel by prior is unknown.

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
    LabelMechanism.checked(mechanism)
    name = type(mechanism).__name__
    raise TypeError(f"the posterior of labels drawn by {name} is unknown. Use debiased labels.")


def likelihoods(
    mechanism: Public[LabelMechanism], noisy_labels: Public[Any], priors: Public[Any] = None
) -> np.ndarray:
    """Returns ``P[noisy label | class]`` up to a factor per label, for losses through the channel.

    Guarantee:
        Post-processing of noisy labels and of public or released priors: no charge.

    Args:
        mechanism: a mechanism for classes, or ``ALIBI``, that drew the labels.
        noisy_labels: its output, (n,), or (n, K) from ``ALIBI``.
        priors: the priors of the draw, if the mechanism uses priors; see ``posterior``.

    Returns:
        ``float64`` (n, K), at least zero.

    Raises:
        TypeError: a mechanism of another kind.
        ValueError: labels or priors out of range or of a wrong shape.

    Example:
        >>> from tf_labeldp.mechanisms import RandomizedResponse
        >>> likelihoods(RandomizedResponse(epsilon=1.0, num_classes=2), [1]).round(3).tolist()
        [[0.269, 0.731]]
    """
    if isinstance(mechanism, ALIBI):
        return _of_alibi(mechanism, noisy_labels, None)
    if not isinstance(mechanism, ClassificationMechanism):
        LabelMechanism.checked(mechanism)
        raise TypeError(
            f"expected labels drawn by a mechanism for classes, got {type(mechanism).__name__}. "
            "Use debiased labels."
        )
    noisy = _validate.class_indices("noisy_labels", noisy_labels, mechanism.num_outputs)
    rows = priors_of_draw(mechanism, priors, noisy.size)
    found = empty_targets(mechanism, noisy.size)
    for chunk in row_chunks(found.shape):
        prior = rows.of_labels(chunk) if mechanism.uses_priors else None
        found[chunk] = mechanism.likelihood(noisy[chunk], prior)
    return found


def priors_of_draw(mechanism: ClassificationMechanism | ALIBI, priors: Any, size: int) -> PriorRows:
    """Returns the priors of n labels; None means uniform, unless the mechanism uses priors."""
    if priors is None and mechanism.public_input == "priors":
        raise ValueError(
            f"{type(mechanism).__name__} draws with priors. Pass the priors of the draw, of shape "
            f"({mechanism.num_classes},) or ({size}, {mechanism.num_classes})."
        )
    if priors is None:
        priors = np.full(mechanism.num_classes, 1.0 / mechanism.num_classes)
    return PriorRows.of(priors, size, mechanism)


def empty_targets(mechanism: ClassificationMechanism | ALIBI, size: int) -> np.ndarray:
    instead = "Call tf_labeldp.estimation with some noisy labels at a time, or merge rare classes."
    _validate.check_size("targets", (size, mechanism.num_classes), instead)
    return np.empty((size, mechanism.num_classes))


def _of_classes(mechanism: ClassificationMechanism, noisy_labels: Any, priors: Any) -> np.ndarray:
    noisy = _validate.class_indices("noisy_labels", noisy_labels, mechanism.num_outputs)
    rows = priors_of_draw(mechanism, priors, noisy.size)
    found = empty_targets(mechanism, noisy.size)
    for chunk in row_chunks(found.shape):
        prior = rows.of_labels(chunk)
        weights = prior * mechanism.likelihood(
            noisy[chunk], prior if mechanism.uses_priors else None
        )
        evidence = weights.sum(axis=1, keepdims=True)
        with np.errstate(invalid="ignore"):
            weights = np.where(evidence > 0.0, weights / evidence, prior)
        found[chunk] = weights / weights.sum(axis=1, keepdims=True)
    return found


def _of_numbers(mechanism: RegressionMechanism, noisy_labels: Any, priors: Any) -> np.ndarray:
    values, probabilities = number_priors(priors)
    noisy = _validate.real_vector("noisy_labels", noisy_labels)
    outputs, place = np.unique(noisy, return_inverse=True)
    means, total = np.empty(outputs.size), np.empty(outputs.size)
    for chunk in row_chunks((outputs.size, values.size)):
        weights = mechanism.likelihood(outputs[chunk], values) * probabilities
        total[chunk] = weights.sum(axis=1)
        with np.errstate(invalid="ignore"):
            means[chunk] = (weights @ values) / total[chunk]
    impossible = int(np.count_nonzero(~(total > 0.0)[place]))
    if impossible:
        raise ValueError(
            f"{impossible} of {noisy.size} noisy labels are impossible for "
            f"{type(mechanism).__name__} and these values. Pass the mechanism of the draw, and "
            "values over its label_range()."
        )
    # Rounding may move a mean of nearly equal values beyond them.
    return priors.shifted(np.clip(means, values[0], values[-1])[place])


def number_priors(priors: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the values (k,) and probabilities (k,) of a prior of numbers, or raises."""
    if not isinstance(priors, Priors) or priors.values is None:
        raise ValueError(
            f"labels that are numbers need priors with values, got {type(priors).__name__}. Pass "
            "mechanisms.Priors(probabilities, values=values)."
        )
    values = _validate.increasing_numbers("values", priors.values)
    return values, _validate.prior_rows("probabilities", priors, 1, values.size)[0]


def _of_alibi(mechanism: ALIBI, noisy_labels: Any, priors: Any) -> np.ndarray:
    num_classes = mechanism.num_classes
    rows = np.asarray(noisy_labels)
    if rows.ndim != 2 or rows.shape[1] != num_classes:
        raise ValueError(
            f"noisy_labels must have shape (n, {num_classes}), got {rows.shape}. Pass the rows "
            "that this mechanism released."
        )
    wrong = int(np.count_nonzero(~np.isfinite(rows)))
    if wrong:
        raise ValueError(
            f"noisy_labels must be finite, but {wrong} of {rows.size} entries are not."
        )
    checked = priors_of_draw(mechanism, priors, len(rows))
    found = empty_targets(mechanism, len(rows))
    for chunk in row_chunks(rows.shape):
        noisy, prior = rows[chunk].astype(np.float64), checked.of_labels(chunk)
        found[chunk] = _softmax(_log_likelihood(mechanism, noisy, prior), prior)
    return found


def _log_likelihood(mechanism: ALIBI, noisy: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """Returns log f(x - e_i) for the density f of the noise, up to a constant per row: (m, K)."""
    if mechanism.noise == "laplace":
        # |x| - |x - 1|, without the difference of two large numbers.
        return (2.0 * np.clip(noisy, 0.0, 1.0) - 1.0) / mechanism.scale
    # The weights are exp(x_i / sigma^2). Published code divides by sigma, right only at sigma 1.
    largest = np.where(prior > 0.0, noisy, -np.inf).max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):
        return np.minimum(noisy - largest, 0.0) / mechanism.scale**2


def _softmax(scores: np.ndarray, prior: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        scores = np.where(prior > 0.0, scores + np.log(prior), -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)
