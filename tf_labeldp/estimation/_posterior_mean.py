"""The mean of the true label given its noisy one."""

from __future__ import annotations

from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.mechanisms import RegressionMechanism, checked_mechanism

_CHUNK_CELLS = 1 << 20
"""Likelihoods that are held at a time."""


def posterior_mean(
    mechanism: RegressionMechanism, noisy_labels: Any, values: Any, probabilities: Any
) -> np.ndarray:
    """Returns E[true label | noisy label] under a prior, for each noisy label.

    Of all functions of the noisy label it has the least expected squared error to the true label,
    if the prior is right. This makes it the best guess of the *label*, not the best *target*: the
    guesses are shrunk towards the mean of the prior. A model that is trained on them with squared
    error learns ``E[guess | features]``, and so predictions that are shrunk likewise; the more so,
    the smaller epsilon. Where the scale of the predictions matters and examples abound, use labels
    that are right on average: ``optimal_bins(..., unbiased=True)``, ``debiased_labels``, or Laplace
    noise without clipping.

    The outputs of ``optimal_bins`` for squared error are posterior means already, under the prior
    that it was given: there this function changes nothing unless the prior is another. After
    ``RROnBins`` with d outputs there are at most d distinct results.

    Privacy: post-processing of noisy labels; nothing is charged, if the prior is public or was
    released.

    Source: denoising after the mechanism, an open direction of section 6 of ``ghazi2023``.

    Args:
        mechanism: the mechanism that drew the labels.
        noisy_labels: its outputs, finite numbers (n,).
        values: the possible true labels, strictly increasing, (k,), in ``label_range()``.
        probabilities: their prior, (k,); sums to one (tolerance 1e-4).

    Returns:
        ``float64`` (n,), between the smallest and the largest of ``values``. The memory needed
        beside it is bounded, whatever n and k.

    Raises:
        TypeError: the mechanism is none for numbers, or an array does not hold numbers.
        ValueError: a wrong shape, values that are not increasing or out of range, a prior that is
            none, or noisy labels that no value of positive probability can have produced.

    Example:
        >>> from tf_labeldp.mechanisms import RROnBins
        >>> mechanism = RROnBins(1.0, inputs=(0.0, 1.0), outputs=(0.0, 1.0), bin_of_input=(0, 1))
        >>> posterior_mean(mechanism, [0.0, 1.0], [0.0, 1.0], [0.5, 0.5]).round(4).tolist()
        [0.2689, 0.7311]
    """
    checked_mechanism(mechanism, RegressionMechanism)
    noisy = _validate.real_vector("noisy_labels", noisy_labels)
    if not np.all(np.isfinite(noisy)):
        bad = int(np.count_nonzero(~np.isfinite(noisy)))
        raise ValueError(f"noisy_labels must be finite, but {bad} of {noisy.size} are infinite.")
    values = _validate.increasing_numbers("values", values)
    if np.ndim(probabilities) != 1:
        raise ValueError(
            f"probabilities must have shape ({values.size},), one prior for all labels, got "
            f"{np.shape(probabilities)}. Labels with priors of their own: one call for each prior."
        )
    prior = _validate.prior_rows("probabilities", probabilities, None, values.size)[0]

    outputs, place = np.unique(noisy, return_inverse=True)
    means = np.empty(outputs.size)
    step = max(1, _CHUNK_CELLS // values.size)
    impossible = np.zeros(outputs.size, dtype=bool)
    for start in range(0, outputs.size, step):
        chunk = slice(start, start + step)
        weights = mechanism.likelihood(outputs[chunk], values) * prior
        total = weights.sum(axis=1)
        impossible[chunk] = ~(total > 0.0)
        with np.errstate(invalid="ignore"):
            means[chunk] = (weights @ values) / total
    if np.any(impossible):
        count = int(np.count_nonzero(impossible[place]))
        raise ValueError(
            f"{count} of {noisy.size} noisy labels can't come from {type(mechanism).__name__} and "
            "these values. Pass the very mechanism that drew them, and values that cover its "
            "label_range()."
        )
    # Rounding may carry a mean of nearly equal values beyond them.
    return np.clip(means, values[0], values[-1])[place]
