"""Soft targets from the noisy one-hot rows of ``mechanisms.ALIBI``: Bayes' rule, or projection."""

from __future__ import annotations

from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.mechanisms import ALIBI

_CHUNK_CELLS = 1 << 20
"""Entries that are worked on at a time."""


def alibi_posterior(mechanism: ALIBI, noisy_labels: Any, priors: Any = None) -> np.ndarray:
    """Returns P(true class | noisy one-hot row, prior) for each row, by Bayes' rule.

    The noise has the density f, so class i has the likelihood ``f(x - e_i)``, which is, up to a
    factor that all classes share,

    * Laplace of scale b: ``exp((|x_i| - |x_i - 1|) / b)``;
    * Gaussian: ``exp(x_i / sigma^2)``. (Published code has ``x_i / sigma``, which is Bayes' rule at
      sigma 1 only.)

    With ``priors=None`` these are the best soft targets if nothing else is known of the classes.
    Training on them is the "MAP" mode of the published code; ``keras_layers.ALIBILoss`` takes the
    prediction of the model in training for the prior, which is ALIBI itself.

    Privacy: post-processing of noisy rows; nothing is charged, if the priors are public or were
    released.

    Source: Malek et al. 2021, "Antipodes of label differential privacy: PATE and ALIBI".

    Args:
        mechanism: the ``ALIBI`` that drew the rows.
        noisy_labels: its output, finite numbers (n, K).
        priors: probabilities (K,) or (n, K); None for uniform ones.

    Returns:
        ``float64`` (n, K); rows sum to one. The memory needed beside it is bounded.

    Raises:
        TypeError: ``mechanism`` is no ``ALIBI``, or the rows are not numbers.
        ValueError: rows or priors out of range or of a wrong shape.

    Example:
        >>> mechanism = ALIBI(epsilon=2.0, num_classes=3)
        >>> alibi_posterior(mechanism, [[0.9, -0.2, 0.4]]).round(4).tolist()
        [[0.6522, 0.1078, 0.2399]]
    """
    if not isinstance(mechanism, ALIBI):
        raise TypeError(
            f"mechanism must be an ALIBI, got {type(mechanism).__name__}. For noisy labels that "
            "are classes use posterior_probabilities."
        )
    num_classes = mechanism.num_classes
    rows = _finite_rows("noisy_labels", noisy_labels)
    if rows.shape[1] != num_classes:
        raise ValueError(
            f"noisy_labels must have shape (n, {num_classes}), got {rows.shape}: the rows that "
            "this mechanism released."
        )
    if priors is None:
        priors = np.full(num_classes, 1.0 / num_classes)
    weights = _validate.prior_rows("priors", priors, rows.shape[0], num_classes)
    posterior = np.empty(rows.shape)
    step = max(1, _CHUNK_CELLS // num_classes)
    for start in range(0, rows.shape[0], step):
        chunk = slice(start, start + step)
        prior = weights if weights.shape[0] == 1 else weights[chunk]
        noisy = rows[chunk].astype(np.float64)
        posterior[chunk] = _softmax(_log_likelihood(mechanism, noisy, prior), prior)
    return posterior


def project_onto_simplex(values: Any) -> np.ndarray:
    """Returns the nearest probabilities to each row, in Euclidean distance.

    Soft targets from ``ALIBI`` that need neither the law of the noise nor a prior: the
    "MinProjection" mode of the published code. ``alibi_posterior`` uses what is known, and is the
    better target as a rule.

    Privacy: post-processing of noisy rows; nothing is charged.

    Source: by sorting, Wang and Carreira-Perpinan 2013, "Projection onto the probability simplex".

    Args:
        values: finite numbers (n, K).

    Returns:
        ``float64`` (n, K); rows sum to one, and no entry is negative.

    Raises:
        TypeError: not integers or floats.
        ValueError: not of shape (n, K), or not finite.

    Example:
        >>> project_onto_simplex([[0.9, -0.2, 0.4], [3.0, 0.0, 0.0]]).round(2).tolist()
        [[0.75, 0.0, 0.25], [1.0, 0.0, 0.0]]
    """
    rows = _finite_rows("values", values)
    nearest = np.empty(rows.shape)
    step = max(1, _CHUNK_CELLS // rows.shape[1])
    counts = np.arange(1, rows.shape[1] + 1)
    for start in range(0, rows.shape[0], step):
        chunk = rows[start : start + step].astype(np.float64)
        # Entries more than one below the largest are zero in the answer, so they may move up to
        # there: sums then run over numbers of the size of the answer.
        with np.errstate(over="ignore"):
            chunk = np.maximum(chunk - chunk.max(axis=1, keepdims=True), -2.0)
        ordered = -np.sort(-chunk, axis=1)
        excess = np.cumsum(ordered, axis=1) - 1.0
        support = np.count_nonzero(ordered * counts > excess, axis=1)[:, np.newaxis]
        threshold = np.take_along_axis(excess, support - 1, axis=1) / support
        nearest[start : start + step] = np.maximum(chunk - threshold, 0.0)
    return nearest


def _finite_rows(name: str, values: Any) -> np.ndarray:
    """Returns numbers as they are (n, K), or raises."""
    rows = np.asarray(values)
    if rows.ndim != 2 or rows.shape[1] == 0:
        raise ValueError(f"{name} must have shape (n, K), one row a label, got {rows.shape}.")
    if rows.dtype.kind not in "iuf":
        raise TypeError(f"{name} must be numbers, got dtype {rows.dtype}.")
    wrong = int(np.count_nonzero(~np.isfinite(rows)))
    if wrong:
        raise ValueError(
            f"{name} must be finite, but {wrong} of {rows.size} entries are NaN or infinite. Pass "
            "what the mechanism released."
        )
    return rows


def _log_likelihood(mechanism: ALIBI, noisy: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """Returns log f(x - e_i), up to a constant in each row, ``float64`` (m, K).

    For Gaussian noise at most 0, the most that a class of positive prior has. Where the prior is
    zero it may be wrong: it is not used there.
    """
    if mechanism.noise == "laplace":
        # |x| - |x - 1|, without the difference of two large numbers.
        return (2.0 * np.clip(noisy, 0.0, 1.0) - 1.0) / mechanism.scale
    largest = np.where(prior > 0.0, noisy, -np.inf).max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):
        return np.minimum(noisy - largest, 0.0) / mechanism.scale**2


def _softmax(scores: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """Returns rows proportional to ``prior * exp(scores)``, (m, K)."""
    with np.errstate(divide="ignore"):
        scores = np.where(prior > 0.0, scores + np.log(prior), -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)
