"""Lower bounds on epsilon from an attacker's counts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tf_labeldp.accounting.gaussian import gaussian_epsilon

_SHARES = (1.0, 0.5, 0.25, 0.1, 0.05, 0.02, 0.01)
"""Shares of canaries to guess, the most decisive first.

The best bound is chosen after the guesses are known, so the confidence is split among them.
"""
_LARGEST = 50.0
"""Largest bound: an epsilon above it protects nothing."""


def clopper_pearson(hits: Any, draws: int, level: float) -> tuple[Any, Any]:
    """Returns lower and upper bounds on a probability; each fails with at most ``level``."""
    from scipy import stats

    hits = np.asarray(hits, np.float64)
    with np.errstate(invalid="ignore"):
        low = stats.beta.ppf(level, hits, draws - hits + 1.0)
        high = stats.beta.ppf(1.0 - level, hits + 1.0, draws - hits)
    return np.where(hits > 0, low, 0.0), np.where(hits < draws, high, 1.0)


def event_bound(hits: Any, others: Any, draws: int, delta: float, level: float) -> Any:
    """Returns epsilon of an event with ``hits`` under one label and ``others`` under another.

    By ``P(S) <= e^epsilon Q(S) + delta``, with a Clopper-Pearson bound on either probability.
    """
    low, _ = clopper_pearson(hits, draws, level / 2.0)
    _, high = clopper_pearson(others, draws, level / 2.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(low > delta, np.maximum(np.log((low - delta) / high), 0.0), 0.0)


def gaussian_bound(hits: int, others: int, draws: int, delta: float, level: float) -> float:
    """Returns epsilon for the largest Gaussian noise that explains the counts of a half line."""
    from scipy import stats

    low, _ = clopper_pearson(hits, draws, level / 2.0)
    _, high = clopper_pearson(others, draws, level / 2.0)
    # Under Gaussian noise the half line has probabilities Phi(a) and Phi(a - 1 / sigma).
    distance = float(stats.norm.ppf(low) - stats.norm.ppf(high))
    return gaussian_epsilon(1.0 / distance, delta, 1.0) if distance > 0.0 else 0.0


def one_run_bound(
    right: np.ndarray, order: np.ndarray, delta: float, level: float
) -> tuple[float, int, int]:
    """Returns epsilon, the number of guesses and the number of right ones in one run.

    Args:
        right: (m,) whether the guess of each canary's label is right.
        order: (m,) canaries, the most decisive guess first.
        delta: in [0, 1).
        level: largest probability of a bound that is too high.
    """
    size = len(right)
    best = (0.0, size, int(right.sum()))
    for share in _SHARES:
        guesses = max(1, int(share * size))
        hits = int(right[order[:guesses]].sum())
        bound = _bound_of_share(size, guesses, hits, delta, level / len(_SHARES))
        best = max(best, (bound, guesses, hits))
    return best


def _bound_of_share(size: int, guesses: int, hits: int, delta: float, level: float) -> float:
    from scipy import optimize

    def beyond(epsilon: float) -> float:
        return _p_value(size, guesses, hits, epsilon, delta) - level

    if beyond(0.0) >= 0.0:
        return 0.0
    if beyond(_LARGEST) <= 0.0:
        return _LARGEST
    return float(optimize.brentq(beyond, 0.0, _LARGEST, xtol=1e-6))


def _p_value(size: int, guesses: int, hits: int, epsilon: float, delta: float) -> float:
    """Bounds the probability of ``hits`` right guesses (Steinke et al. 2023, Theorem 5.2).

    A binomial number with rate ``e^epsilon / (1 + e^epsilon)`` dominates it, except for what delta
    allows: ``2 m delta`` times the largest mean mass just below ``hits``.
    """
    from scipy import stats

    rate = 1.0 / (1.0 + math.exp(-epsilon))
    tail = float(stats.binom.sf(hits - 1, guesses, rate))
    if delta == 0.0:
        return tail
    below = np.cumsum(stats.binom.pmf(np.arange(hits - 1, -1, -1), guesses, rate))
    steepest = float(np.max(below / np.arange(1, hits + 1), initial=0.0))
    return min(1.0, tail + 2.0 * size * delta * steepest)
