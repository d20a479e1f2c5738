"""From noisy counts to the label distributions of clusters (Algorithm 1 of ``esfandiari2022``)."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

_SLACK = 1e-12
"""A threshold this close to 1/K, relatively, leaves no room beside the uniform distribution."""


def cluster_distributions(histogram: Any, cluster_sizes: Any, threshold: float) -> np.ndarray:
    """Returns the label distribution of each cluster, made of noisy counts of labels.

    Counts become frequencies, these are clipped to [tau, 1], and each row is brought to a sum of
    one without leaving that range: if it is too large, every entry gives in proportion to what it
    has above tau; if too small, every entry gets in proportion to what it lacks of 1. A cluster
    without examples gets the uniform distribution.

    Privacy: post-processing of a released histogram; nothing is charged. The sizes are public.

    Source: ``esfandiari2022``, Algorithm 1, lines 3 to 20; Theorem 6 shows the range.

    Args:
        histogram: noisy counts (C, K), finite; negative ones are possible.
        cluster_sizes: the number of examples in each cluster, integers (C,) of at least zero.
        threshold: tau, in [0, 1/K].

    Returns:
        ``float64`` (C, K), entries in [tau, 1], rows that sum to one.

    Raises:
        TypeError: sizes that are not integers, or a threshold that is no number.
        ValueError: a wrong shape, counts that are not finite, negative sizes, or a threshold out of
            its range.

    Example:
        >>> cluster_distributions([[8.5, -0.5], [1.5, 1.5]], [8, 4], threshold=0.1).tolist()
        [[0.9, 0.1], [0.5, 0.5]]
    """
    counts = np.asarray(histogram, dtype=np.float64)
    if counts.ndim != 2 or counts.shape[1] < 2:
        raise ValueError(
            "histogram must have shape (C, K), a row for each cluster and at least 2 classes, got "
            f"{counts.shape}."
        )
    if not np.all(np.isfinite(counts)):
        raise ValueError("histogram must be finite, but it holds NaN or infinity.")
    num_clusters, num_classes = counts.shape
    sizes = np.asarray(cluster_sizes)
    if sizes.shape != (num_clusters,):
        raise ValueError(
            f"cluster_sizes must have shape ({num_clusters},), one a row of the histogram, got "
            f"{sizes.shape}."
        )
    if sizes.dtype.kind not in "iu":
        raise TypeError(f"cluster_sizes must be integers, got dtype {sizes.dtype}.")
    if sizes.size and sizes.min() < 0:
        raise ValueError(f"cluster_sizes must be at least zero, got {int(sizes.min())}.")
    tau = checked_threshold(threshold, num_classes)

    uniform = np.full(counts.shape, 1.0 / num_classes)
    room = 1.0 - num_classes * tau
    if room <= _SLACK:
        return uniform
    empty = (sizes == 0)[:, np.newaxis]
    clipped = np.clip(counts / np.maximum(sizes, 1)[:, np.newaxis], tau, 1.0)
    # Lines 9 to 19 with the sum over xi written out, in forms that rounding cannot take below tau.
    missing = 1.0 - clipped.sum(axis=1, keepdims=True)
    above = clipped - tau
    excess = above.sum(axis=1, keepdims=True)
    lowered = tau + above * (room / np.maximum(excess, room))
    lacking = np.maximum(missing, 0.0)
    raised = clipped + (1.0 - clipped) * (lacking / (lacking + num_classes - 1.0))
    made = np.minimum(np.where(missing < 0.0, lowered, raised), 1.0)
    return np.where(empty, uniform, made)


def checked_threshold(value: Any, num_classes: int) -> float:
    """Returns tau as a float, or raises if it is not in [0, 1/K]."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"threshold must be a number in [0, 1/K], got {type(value).__name__}.")
    tau = float(value)
    if math.isnan(tau) or not 0.0 <= tau <= 1.0 / num_classes:
        raise ValueError(
            f"threshold must be in [0, 1/K] = [0, {1.0 / num_classes:.6g}], got {tau:.6g}: "
            f"{num_classes} probabilities above 1/{num_classes} would sum to more than one."
        )
    return tau
