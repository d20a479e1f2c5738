"""Priors from noisy histograms."""

from __future__ import annotations

from typing import Any

import numpy as np


def histogram_prior(histogram: Any) -> np.ndarray:
    """Returns a noisy histogram as probabilities: negative counts to zero, rows normalised.

    A row without any positive count becomes uniform; the papers leave this case open.

    Privacy: post-processing of noisy counts; nothing is charged.

    Source: the last steps of Algorithm 4 of ``ghazi2023`` (appendix C.1).

    Args:
        histogram: counts (K,) or (G, K), finite.

    Returns:
        ``float64`` of the same shape; the last axis sums to one.

    Raises:
        ValueError: a wrong shape, NaN or infinite counts.

    Example:
        >>> histogram_prior([[6, -1, 2], [-3, 0, -1]]).round(4).tolist()
        [[0.75, 0.0, 0.25], [0.3333, 0.3333, 0.3333]]
    """
    counts = np.asarray(histogram, dtype=np.float64)
    if counts.ndim not in (1, 2) or counts.shape[-1] == 0:
        raise ValueError(
            f"histogram must have shape (K,) or (G, K), got {counts.shape}: counts, not labels."
        )
    if not np.all(np.isfinite(counts)):
        bad = int(np.count_nonzero(~np.isfinite(counts)))
        raise ValueError(f"histogram must be finite, but {bad} count(s) are NaN or infinite.")
    clipped = np.maximum(counts, 0.0)
    total = clipped.sum(axis=-1, keepdims=True)
    empty = total == 0.0
    return np.where(empty, 1.0 / counts.shape[-1], clipped / np.where(empty, 1.0, total))
