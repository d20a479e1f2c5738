"""Priors from noisy histograms and from models, and the public values of numbers they are over."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tf_labeldp import _validate


def histogram_prior(histogram: Any) -> np.ndarray:
    """Returns noisy counts (K,) or (G, K) as probabilities: negative ones to zero, normalised.

    A row without any positive count becomes uniform; the papers leave this case open.

    Guarantee:
        Post-processing of noisy counts: no charge.

    Source: the last steps of Algorithm 4 of ``ghazi2023`` (appendix C.1).
    """
    clipped = np.maximum(np.asarray(histogram, dtype=np.float64), 0.0)
    total = clipped.sum(axis=-1, keepdims=True)
    empty = total == 0.0
    return np.where(empty, 1.0 / clipped.shape[-1], clipped / np.where(empty, 1.0, total))


def prior_from_logits(logits: Any, temperature: float = 1.0) -> np.ndarray:
    """Returns ``softmax(logits / temperature)``, the prior of LP-MST (``ghazi2021``, appendix B).

    Args:
        logits: array (K,) or (n, K); finite.
        temperature: above zero; below one sharpens the prior, above one flattens it.

    Returns:
        ``float64`` of the same shape; the last axis sums to one.

    Raises:
        ValueError: the temperature is out of range or a logit is not finite.

    Example:
        >>> prior_from_logits([2.0, 1.0, 0.0]).round(4).tolist()
        [0.6652, 0.2447, 0.09]
    """
    temperature = _validate.positive_finite("temperature", temperature)
    array = np.asarray(logits, dtype=np.float64)
    bad = int(np.count_nonzero(~np.isfinite(array)))
    if bad:
        raise ValueError(
            f"logits must be finite, but {bad} are NaN or infinite. The model has diverged: lower "
            "its learning rate."
        )
    return _softmax(array / temperature)


def sharpen_prior(prior: Any, temperature: float) -> np.ndarray:
    """Returns ``prior^(1 / temperature)``, normalised: the temperature of a prior without logits.

    It equals ``prior_from_logits(log(prior), temperature)``; a probability of zero stays zero.

    Args:
        prior: probabilities (K,) or (n, K); rows sum to one (tolerance 1e-4).
        temperature: above zero; below one sharpens, above one flattens.

    Returns:
        ``float64`` array of the same shape whose last axis sums to one.

    Raises:
        ValueError: not probabilities, or the temperature is out of range.

    Example:
        >>> sharpen_prior([0.5, 0.3, 0.2], temperature=0.5).round(4).tolist()
        [0.6579, 0.2368, 0.1053]
    """
    temperature = _validate.positive_finite("temperature", temperature)
    shape = np.shape(prior)
    if len(shape) not in (1, 2):
        raise ValueError(f"prior must have shape (K,) or (n, K), got {shape}.")
    rows = _validate.prior_rows("prior", prior, None, shape[-1])
    with np.errstate(divide="ignore"):
        return _softmax(np.log(rows) / temperature).reshape(shape)


def _softmax(logits: np.ndarray) -> np.ndarray:
    from scipy import special  # not loaded with the vault, which imports this part

    return special.softmax(logits, axis=-1)


def rounding_grid(
    low: float, high: float, max_values: int, *, whole_numbers: bool = False
) -> np.ndarray:
    """Returns equally spaced values, with both ends, to round labels in [low, high] to.

    There are ``max_values`` of them; or fewer, so that the integers are among them, if both ends
    are whole and no more than ``max_values`` integers lie between them. If the labels are known to
    be ``whole_numbers``, these integers alone are the grid.

    The best mechanism for rounded labels has an expected loss of at most ``L * step`` above that of
    the best epsilon-DP mechanism for the labels themselves, where L is the Lipschitz constant of
    ``loss(y_hat, y)`` in y: lemma 16 of ``ghazi2023`` (appendix A.1). L is 2 (high - low) for the
    squared error, 1 for the absolute one, and log(high / low) for the deviance form of Poisson's.
    """
    low, high = _validate.number_range(low, high)
    number = _validate.integer_at_least("max_values", max_values, 2)
    width = high - low
    if not math.isfinite(width):
        raise ValueError(f"the range from {low:g} to {high:g} is too wide for a double.")
    if low.is_integer() and high.is_integer() and width + 1.0 <= number:
        parts = 1 if whole_numbers else int((number - 1) // width)  # of each unit
        number = int(width) * parts + 1
    values = np.linspace(low, high, number)
    if np.any(np.diff(values) <= 0.0):
        raise ValueError(
            f"there are not {number} different doubles from {low!r} to {high!r}. Lower max_values, "
            "or subtract low from the labels first."
        )
    return values
