"""The losses that RR-on-Bins can minimise, and the cost of a bin of labels under each."""

from __future__ import annotations

import abc
import math
from typing import Any

import numpy as np

from tf_labeldp import _validate

_MOST_UNBIASED = 128
"""The most values of an unbiased channel: a linear program of half a minute; of minutes at 150."""
MOST_UNBIASED_EPSILON = 20.0
"""Above, the smallest entries of the program vanish in the solver's tolerances."""
_SLACK = 1e-6
"""Relative. Outputs extend by this beyond the minimum, so that the program has an interior."""
LOSSES = ("squared_error", "absolute_error", "poisson")


def checked_loss(loss: str, values: np.ndarray | None = None) -> str:
    """Returns the name of a loss that is defined for labels of these rising values."""
    _validate.one_of("loss", loss, LOSSES)
    if loss == "poisson" and values is not None and values[0] < 0.0:
        raise ValueError(
            _validate.Message.of(
                "the Poisson loss needs labels of at least zero, got values from "
                f"{values[0]:g} on. Use ",
                _validate.Argument("loss", "squared_error"),
                ", or shift the labels.",
            )
        )
    return loss


def loss_values(loss: str, y_hat: Any, y: Any) -> np.ndarray:
    """Returns the loss of outputs ``y_hat`` for labels ``y`` (``ghazi2023``, section 2).

    The squared error has no factor 1/2.
    """
    y_hat, y = np.asarray(y_hat, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if loss == "squared_error":
        return np.square(y_hat - y)
    if loss == "absolute_error":
        return np.abs(y_hat - y)
    return y_hat - _xlogy(y, y_hat)


def unbiased_range(values: np.ndarray, epsilon: float) -> tuple[float, float]:
    """Returns the smallest range of outputs of an unbiased channel of increasing values.

    It raises a ``ValueError`` if there is no channel: values are too many, or too close together.
    """
    if values.size > _MOST_UNBIASED:
        raise ValueError(
            f"expected at most {_MOST_UNBIASED} values of an unbiased channel, got {values.size:,}."
            " Round the labels to fewer."
        )
    low, high = float(values[0]), float(values[-1])
    margin = (high - low) / math.expm1(min(epsilon, MOST_UNBIASED_EPSILON)) * (1.0 + _SLACK)
    least = low - margin, high + margin
    if not -math.inf < least[0] < low < high < least[1] < math.inf:
        raise ValueError(
            f"expected values at distances that doubles resolve at epsilon={epsilon:g}, got "
            f"{low!r} to {high!r}. Subtract an offset, or change the unit."
        )
    return least


def _xlogy(x: Any, y: Any) -> np.ndarray:
    from scipy import special  # slower to import than all mechanisms together

    return special.xlogy(x, y)


class SegmentCosts(abc.ABC):
    """Costs of bins of sorted distinct values (k,) with probabilities above zero.

    With ``s = e^-epsilon``, an output ``v`` of the bin [a, b) contributes ``s f(v) + (1 - s) W(v)``
    to the expected loss of RR-on-Bins times ``1 + (d - 1) s``. ``f(v) = sum_y p_y loss(v, y)`` runs
    over all labels, since ``v`` may answer each of them, and ``W(v)`` is the same sum over the
    bin's labels. The search for ``v`` is limited to the last value before the bin up to the first
    value after it: this loses nothing and makes the costs Monge, see ``optimal_bins``.
    """

    def __init__(self, loss: str, values: np.ndarray, prior: np.ndarray, epsilon: float) -> None:
        self.loss, self.values, self.prior = loss, values, prior
        self.shrink, self.gain = math.exp(-epsilon), -math.expm1(-epsilon)

    @abc.abstractmethod
    def cost(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Returns the cost of each bin [start, end), in the unit of the class."""

    @abc.abstractmethod
    def outputs(self, cuts: np.ndarray) -> np.ndarray:
        """Returns the best output (d,) of each bin between cuts (d + 1,)."""

    def neighbours(self, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the indices of the least and largest value allowed as each bin's output."""
        return np.maximum(start - 1, 0), np.minimum(end, self.values.size - 1)


def segment_costs(loss: str, values: np.ndarray, prior: np.ndarray, epsilon: float) -> SegmentCosts:
    """Returns the costs of bins under a loss."""
    kind = _AbsoluteErrorCosts if loss == "absolute_error" else _MeanCosts
    return kind(loss, values, prior, epsilon)


class _Sums:
    """Sums over consecutive elements, from prefix sums in long doubles, stored as two doubles."""

    def __init__(self, terms: np.ndarray) -> None:
        total = np.concatenate(([0.0], np.cumsum(terms, dtype=np.longdouble)))
        self._high = total.astype(np.float64)
        self._low = (total - self._high).astype(np.float64)
        self.all = float(self._high[-1])

    def __call__(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        return (self._high[end] - self._high[start]) + (self._low[end] - self._low[start])


class _MeanCosts(SegmentCosts):
    """Squared error and Poisson log loss, whose best output is a weighted mean.

    Both are Bregman divergences up to a term of the label, which no mechanism changes and which
    Monge costs need: ``(v - y)^2``, and ``v - y log(v) + y log(y) - y``. Labels are in half ranges
    around their mean, where less cancels; for Poisson in units of the largest label.
    """

    def __init__(self, loss: str, values: np.ndarray, prior: np.ndarray, epsilon: float) -> None:
        super().__init__(loss, values, prior, epsilon)
        self._poisson = loss == "poisson"
        # The Poisson loss ends at zero, so zero is the origin, and outputs next to it are exact.
        self._origin, self._scale = (0.0, values[-1] or 1.0) if self._poisson else _centre(values)
        self._x = (values - self._origin) / self._scale
        if self._poisson:
            own = _xlogy(self._x, self._x) - self._x
        else:
            self._x = self._x - float(np.dot(prior, self._x))
            own = self._x * self._x
        self._sums = [_Sums(prior), _Sums(prior * self._x), _Sums(prior * own)]

    def cost(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        mass, first, own = (
            self.shrink * sums.all + self.gain * sums(start, end) for sums in self._sums
        )
        low, high = self.neighbours(start, end)
        v = np.minimum(np.maximum(first / mass, self._x[low]), self._x[high])
        if self._poisson:
            return np.maximum(v * mass - _xlogy(first, v) + own, 0.0)
        return np.maximum(v * (v * mass - 2.0 * first) + own, 0.0)

    def outputs(self, cuts: np.ndarray) -> np.ndarray:
        bins = np.repeat(np.arange(cuts.size - 1), np.diff(cuts))
        mass = np.bincount(bins, self.prior)
        first = np.bincount(bins, self.prior * ((self.values - self._origin) / self._scale))
        mean = (self.shrink * first.sum() + self.gain * first) / (
            self.shrink * mass.sum() + self.gain * mass
        )
        return np.clip(self._origin + self._scale * mean, self.values[0], self.values[-1])


class _AbsoluteErrorCosts(SegmentCosts):
    """Absolute error in units of the half range, whose best output is a weighted median.

    Of several medians it is the smallest, which is one of the values.
    """

    def __init__(self, loss: str, values: np.ndarray, prior: np.ndarray, epsilon: float) -> None:
        super().__init__(loss, values, prior, epsilon)
        middle, half = _centre(values)
        self._x = (values - middle) / half
        self._mass, self._first = _Sums(prior), _Sums(prior * self._x)
        self._cumulative = np.cumsum(prior)
        everything = np.zeros(values.size, dtype=np.int64), np.full(values.size, values.size)
        self._overall = self._deviation(np.arange(values.size), *everything)

    def cost(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        low, high = self.neighbours(start, end)
        j = np.minimum(np.maximum(self._median(start, end), low), high)
        return self.shrink * self._overall[j] + self.gain * self._deviation(j, start, end)

    def outputs(self, cuts: np.ndarray) -> np.ndarray:
        return self.values[self._median(cuts[:-1], cuts[1:])]

    def _median(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Returns the index at which each bin's cumulative weight passes one half.

        The weight is ``s p_y`` outside the bin and ``p_y`` inside, so it is a function of the
        cumulative weight of ``p`` with two kinks.
        """
        before = self._mass(np.zeros_like(start), start)
        inside = self._mass(start, end)
        half = 0.5 * (self.shrink + self.gain * inside)
        with np.errstate(over="ignore", divide="ignore"):
            within = half + self.gain * before
            after = (half - self.gain * inside) / self.shrink
            target = np.where(within <= before + inside, within, after)
            target = np.where(self.shrink * before >= half, half / self.shrink, target)
        index = np.searchsorted(self._cumulative, target, side="left")
        return np.minimum(index, self.values.size - 1)

    def _deviation(self, j: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Returns ``sum_y p_y |x_j - x_y|`` over the labels in each bin."""
        split = np.minimum(np.maximum(j + 1, start), end)
        below = self._x[j] * self._mass(start, split) - self._first(start, split)
        above = self._first(split, end) - self._x[j] * self._mass(split, end)
        return np.maximum(below, 0.0) + np.maximum(above, 0.0)


def _centre(values: np.ndarray) -> tuple[float, float]:
    """Returns the middle and half width of sorted values, without overflow of their sum."""
    low, high = 0.5 * float(values[0]), 0.5 * float(values[-1])
    return low + high, (high - low) or 1.0
