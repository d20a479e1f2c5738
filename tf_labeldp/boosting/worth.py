"""The worth of noisy labels in true labels, from public facts."""

from __future__ import annotations

import math


def worth(num_labels: int, epsilon: float, num_classes: int = 2) -> float:
    """Returns the number of true labels that noisy labels of randomized response are worth.

    If classes have equal shares, the share of one, estimated from n noisy labels, has the variance
    of an estimate from ``n c^2`` true labels, with ``c = (e^epsilon - 1) / (e^epsilon + K - 1)``;
    for two classes c is ``tanh(epsilon / 2)``. A rare class is worth less.
    """
    # For a large epsilon the exponential overflows, and c is one.
    surplus = math.expm1(min(epsilon, 500.0))
    return num_labels * (surplus / (surplus + num_classes)) ** 2
