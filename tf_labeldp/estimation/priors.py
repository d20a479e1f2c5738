"""Priors from noisy histograms and from models, and the public values of priors of numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Public

_SPLIT_AT = 1.5
"""Standard deviations of noise above which both parts of a split get a share."""
_WARP = math.expm1(4.0)
"""Of a grid from zero: the widest step is this plus one, 55, times the narrowest."""


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


def ordered_prior(histogram: Any, totals: Any, noise_stddev: float) -> np.ndarray:
    """Returns noisy counts over values in their order, (k,) or (G, k), as probabilities.

    Setting negative counts to zero would add mass wherever the histogram is empty, and most values
    of amounts are: their mean comes out too high. Here the public ``totals``, (G,) or a number, are
    split between the lower and the upper half of the values by their noisy sums, then each part
    again, down to single values. A split whose smaller part is below 1.5 standard deviations of its
    noise gives that part nothing, so that empty stretches stay empty. Rows of total zero become
    uniform.

    Guarantee:
        Post-processing of noisy counts: no charge.

    Source: not in the papers, which set negative counts to zero (Algorithm 4 of ``ghazi2023``). The
    splits are those of Hay et al. 2010, "Boosting the accuracy of differentially private histograms
    through consistency", with a known total; the threshold is ours (``benchmarks``).
    """
    counts = np.asarray(histogram, dtype=np.float64)
    rows = np.atleast_2d(counts)
    totals = np.broadcast_to(np.asarray(totals, dtype=np.float64), rows.shape[:1])
    sums = np.concatenate([np.zeros((len(rows), 1)), np.cumsum(rows, axis=1)], axis=1)
    edges = np.array([0, rows.shape[1]])
    split = np.where(totals > 0.0, totals, 1.0)[:, np.newaxis]  # (G, parts), level by level
    while len(edges) <= rows.shape[1]:
        start, stop = edges[:-1], edges[1:]
        middle = (start + stop + 1) // 2  # of a single value its end: the upper part is empty
        below, above = middle - start, stop - middle
        lower, upper = sums[:, middle] - sums[:, start], sums[:, stop] - sums[:, middle]
        # The difference of the two sums from the total is noise, of which counts have equal shares.
        lower += (split - lower - upper) * below / (below + above)
        least = _SPLIT_AT * noise_stddev * np.sqrt(below * above / (below + above))
        lower = np.where(lower < least, 0.0, np.where(split - lower < least, split, lower))
        lower = np.where(above > 0, np.clip(lower, 0.0, split), split)
        halves = np.stack([lower, split - lower], axis=2).reshape(len(rows), -1)
        kept = np.stack([below, above], axis=1).ravel() > 0
        split = halves[:, kept]
        edges = np.unique(np.concatenate([edges, middle]))
    split /= split.sum(axis=1, keepdims=True)
    split[totals <= 0.0] = 1.0 / rows.shape[1]
    return split.reshape(counts.shape)


def prior_from_logits(logits: Public[Any], temperature: float = 1.0) -> np.ndarray:
    """Returns ``softmax(logits / temperature)``, the prior of LP-MST (``ghazi2021``, appendix B).

    Args:
        logits: array (K,) or (n, K); finite.
        temperature: above zero; below one sharpens the prior, above one flattens it.

    Returns:
        ``float64`` of the same shape; the last axis sums to one.

    Example:
        >>> prior_from_logits([2.0, 1.0, 0.0]).round(4).tolist()
        [0.6652, 0.2447, 0.09]
    """
    temperature = _validate.positive_finite("temperature", temperature)
    array = np.asarray(logits, dtype=np.float64)
    bad = int(np.count_nonzero(~np.isfinite(array)))
    if bad:
        raise ValueError(
            f"logits must be finite, but {bad} are NaN or infinite. Lower the learning rate."
        )
    return _softmax(array / temperature)


def sharpen_prior(prior: Public[Any], temperature: float) -> np.ndarray:
    """Returns ``prior^(1 / temperature)``, normalised: the temperature of a prior without logits.

    It equals ``prior_from_logits(log(prior), temperature)``; a probability of zero stays zero.

    Args:
        prior: probabilities (K,) or (n, K); rows sum to one (tolerance 1e-4).
        temperature: as for ``prior_from_logits``, with the same result and errors.

    Example:
        >>> sharpen_prior([0.5, 0.3, 0.2], temperature=0.5).round(4).tolist()
        [0.6579, 0.2368, 0.1053]
    """
    temperature = _validate.positive_finite("temperature", temperature)
    shape = np.shape(prior)
    rows = _validate.prior_rows("prior", prior, None, shape[-1])
    with np.errstate(divide="ignore"):
        return _softmax(np.log(rows) / temperature).reshape(shape)


def _softmax(logits: np.ndarray) -> np.ndarray:
    from scipy import special  # not loaded with the vault, which imports this part

    return special.softmax(logits, axis=-1)


def rounding_grid(
    low: float, high: float, max_values: int, *, whole_numbers: bool = False
) -> np.ndarray:
    """Returns increasing values, with both ends, to round labels in [low, high] to.

    * Between whole ends with at most ``max_values`` integers: equally spaced values with these
      among them, the integers alone if the labels are ``whole_numbers``.
    * Amounts, of a range that begins at zero or above: ``max_values`` values with equal steps in
      ``log(value + high / 54)``, which resolve small amounts: from zero, the steps grow from 0.12
      of that of an equally spaced grid to 4 times as much.
    * Other numbers: ``max_values`` equally spaced values.

    The best mechanism for rounded labels has an expected loss of at most ``L * step`` above that of
    the best epsilon-DP mechanism for the labels themselves, where ``step`` is the widest and L the
    Lipschitz constant of ``loss(y_hat, y)`` in y: lemma 16 of ``ghazi2023`` (appendix A.1).
    """
    low, high = _validate.number_range(low, high)
    number = _validate.integer_at_least("max_values", max_values, 2)
    width = high - low
    if not math.isfinite(width):
        raise ValueError(f"the range from {low:g} to {high:g} is too wide for a double.")
    if low.is_integer() and high.is_integer() and width + 1.0 <= number:
        parts = 1 if whole_numbers else int((number - 1) // width)  # of each unit
        values = np.linspace(low, high, int(width) * parts + 1)
    elif low >= 0.0:
        offset = high / _WARP
        values = np.geomspace(low + offset, high + offset, number) - offset
        values[[0, -1]] = low, high
    else:
        values = np.linspace(low, high, number)
    if np.any(np.diff(values) <= 0.0):
        raise ValueError(
            f"there are not {number} different doubles from {low!r} to {high!r}. Lower max_values."
        )
    return values
