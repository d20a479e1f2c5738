"""Which of some public values a label is nearest to: one rule for bins, channels and histograms."""

from __future__ import annotations

from typing import Any

import numpy as np


def nearest_index(values: Any, labels: Any) -> np.ndarray:
    """Returns the index of the value nearest to each label; of two equally near, the smaller.

    A label beyond the ends goes to the end. Midpoints are rounded to doubles, so the rule is exact
    for labels and values of which twice the midpoint is a double, and a label that equals a value
    always goes to that value.

    Args:
        values: finite, strictly increasing, (k,), k at least 1.
        labels: finite, any shape.

    Returns:
        ``int64`` array of the shape of ``labels``, in 0..k-1.

    Example:
        >>> nearest_index([0.0, 10.0, 20.0], [-3.0, 5.0, 5.1, 20.0]).tolist()
        [0, 0, 1, 2]
    """
    values = np.asarray(values, dtype=np.float64)
    lower, upper = values[:-1], values[1:]
    # Halved first: the sum of two huge values overflows. Where rounding carries the midpoint of two
    # neighbouring doubles to the upper one, that one must still be nearest to itself.
    midpoints = np.minimum(0.5 * lower + 0.5 * upper, np.nextafter(upper, -np.inf))
    return np.searchsorted(midpoints, np.asarray(labels, dtype=np.float64), side="left")
