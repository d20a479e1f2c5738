"""Losses between noisy and true labels, and the cost of a bin of labels under each loss."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import Any

import numpy as np

Loss = str | Callable[[Any, Any], Any]
"""``"squared_error"``, ``"absolute_error"``, ``"poisson"``, or ``loss(y_hat, y)`` on arrays."""

NAMED_LOSSES = ("squared_error", "absolute_error", "poisson")


def checked_loss(loss: Any) -> Loss:
    if callable(loss) or loss in NAMED_LOSSES:
        return loss
    names = ", ".join(map(repr, NAMED_LOSSES))
    raise ValueError(f"loss must be one of {names} or a callable loss(y_hat, y), got {loss!r}.")


def loss_values(loss: Loss, y_hat: Any, y: Any) -> np.ndarray:
    """Returns the loss of outputs ``y_hat`` for labels ``y`` (``ghazi2023``, section 2).

    The squared error has no factor 1/2.
    """
    y_hat, y = np.asarray(y_hat, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if loss == "squared_error":
        return np.square(y_hat - y)
    if loss == "absolute_error":
        return np.abs(y_hat - y)
    if loss == "poisson":
        return y_hat - xlogy(y, y_hat)
    shape = np.broadcast_shapes(y_hat.shape, y.shape)
    values = np.asarray(loss(y_hat, y), dtype=np.float64)  # type: ignore[operator]
    if values.shape != shape:
        raise ValueError(
            f"loss(y_hat, y) must broadcast: for shapes {y_hat.shape} and {y.shape} it returned "
            f"{values.shape}. Write it with NumPy functions."
        )
    return values


def xlogy(x: Any, y: Any) -> np.ndarray:
    """Returns ``x log(y)``, or zero where x is zero."""
    from scipy import special  # slower to import than all mechanisms together

    return special.xlogy(x, y)


def check_domain(loss: Loss, low: float) -> None:
    if loss == "poisson" and low < 0.0:
        raise ValueError(
            f"the Poisson loss needs labels of at least zero, got values from {low:g} on. Use "
            "loss='squared_error', or shift the labels."
        )


class SegmentCosts(abc.ABC):
    """Costs of bins of sorted distinct values (k,) with probabilities above zero.

    With ``s = e^-epsilon``, an output ``v`` of the bin [a, b) contributes ``s f(v) + (1 - s) W(v)``
    to the expected loss of RR-on-Bins times ``1 + (d - 1) s``. ``f(v) = sum_y p_y loss(v, y)`` runs
    over all labels, since ``v`` may answer each of them, and ``W(v)`` is the same sum over the
    bin's labels. The search for ``v`` is limited to the last value before the bin up to the first
    value after it: this loses nothing and makes the costs Monge, see ``optimal_bins``.
    """

    def __init__(self, loss: Loss, values: np.ndarray, prior: np.ndarray, epsilon: float) -> None:
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


def segment_costs(
    loss: Loss, values: np.ndarray, prior: np.ndarray, epsilon: float
) -> SegmentCosts:
    if callable(loss):
        return CallableCosts(loss, values, prior, epsilon)
    kind = AbsoluteErrorCosts if loss == "absolute_error" else MeanCosts
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


class MeanCosts(SegmentCosts):
    """Squared error and Poisson log loss, whose best output is a weighted mean.

    Both are Bregman divergences up to a term of the label, which no mechanism changes and which
    Monge costs need: ``(v - y)^2``, and ``v - y log(v) + y log(y) - y``. Labels are in half ranges
    around their mean, where less cancels; for Poisson in units of the largest label.
    """

    def __init__(self, loss: Loss, values: np.ndarray, prior: np.ndarray, epsilon: float) -> None:
        super().__init__(loss, values, prior, epsilon)
        self._poisson = loss == "poisson"
        # The Poisson loss ends at zero, so zero is the origin, and outputs next to it are exact.
        self._origin, self._scale = (0.0, values[-1] or 1.0) if self._poisson else centre(values)
        self._x = (values - self._origin) / self._scale
        if self._poisson:
            own = xlogy(self._x, self._x) - self._x
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
            return np.maximum(v * mass - xlogy(first, v) + own, 0.0)
        return np.maximum(v * (v * mass - 2.0 * first) + own, 0.0)

    def outputs(self, cuts: np.ndarray) -> np.ndarray:
        bins = np.repeat(np.arange(cuts.size - 1), np.diff(cuts))
        mass = np.bincount(bins, self.prior)
        first = np.bincount(bins, self.prior * ((self.values - self._origin) / self._scale))
        mean = (self.shrink * first.sum() + self.gain * first) / (
            self.shrink * mass.sum() + self.gain * mass
        )
        return np.clip(self._origin + self._scale * mean, self.values[0], self.values[-1])


class AbsoluteErrorCosts(SegmentCosts):
    """Absolute error in units of the half range, whose best output is a weighted median.

    Of several medians it is the smallest, which is one of the values.
    """

    def __init__(self, loss: Loss, values: np.ndarray, prior: np.ndarray, epsilon: float) -> None:
        super().__init__(loss, values, prior, epsilon)
        middle, half = centre(values)
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


class CallableCosts(SegmentCosts):
    """Any loss that meets Assumption 4: the best output on a grid, then refined.

    Costs omit a term that no choice of bins changes.
    """

    _GRID = 2000
    _CELLS = 1 << 21
    _MOST_CELLS = 40_000_000

    def __init__(self, loss: Loss, values: np.ndarray, prior: np.ndarray, epsilon: float) -> None:
        super().__init__(loss, values, prior, epsilon)
        self.grid = _grid_between(values, self._GRID)
        if self.grid.size * values.size > self._MOST_CELLS:
            raise ValueError(
                f"expected at most 3,500 values for a callable loss, got {values.size:,}. Round "
                "the labels, or use a named loss."
            )
        self._place = np.searchsorted(self.grid, values)
        table = _meeting_assumption_4(loss, self.grid, values, self._place)
        table[np.isinf(table)] = 1e6 * np.max(np.abs(table[np.isfinite(table)]), initial=1.0)
        sums = np.cumsum(table * prior, axis=1)
        self._sums = np.concatenate((np.zeros((self.grid.size, 1)), sums), axis=1)

    def cost(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        result = np.empty(start.size)
        step = max(1, self._CELLS // self.grid.size)
        for i in range(0, start.size, step):
            rows = slice(i, i + step)
            result[rows] = np.min(self._on_grid(start[rows], end[rows]), axis=1)
        return result

    def _on_grid(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Returns the cost of each bin for each grid output, infinite for outputs not allowed."""
        low, high = self.neighbours(start, end)
        inside = (self._sums[:, end] - self._sums[:, start]).T
        costs = self.shrink * self._sums[:, -1] + self.gain * inside
        g = np.arange(self.grid.size)
        allowed = (g >= self._place[low][:, np.newaxis]) & (g <= self._place[high][:, np.newaxis])
        return np.where(allowed, costs, np.inf)

    def outputs(self, cuts: np.ndarray) -> np.ndarray:
        from scipy import optimize

        places = np.argmin(self._on_grid(cuts[:-1], cuts[1:]), axis=1)
        found = self.grid[places]
        for i, g in enumerate(places):
            weights = self.shrink * self.prior
            weights[cuts[i] : cuts[i + 1]] = self.prior[cuts[i] : cuts[i + 1]]

            def total(v: float, weights: np.ndarray = weights) -> float:
                return float(np.dot(weights, loss_values(self.loss, v, self.values)))

            low, high = self.grid[max(g - 1, 0)], self.grid[min(g + 1, self.grid.size - 1)]
            if high > low:
                width = {"xatol": 1e-12 * max(abs(low), abs(high))}
                search = optimize.minimize_scalar(
                    total, bounds=(low, high), method="bounded", options=width
                )
                if search.fun < total(found[i]):
                    found[i] = search.x
        return found


def _grid_between(values: np.ndarray, number: int) -> np.ndarray:
    """Returns the values and about ``number`` points in the gaps between them, increasing.

    Half of the points are evenly spaced, and half approach the lower end of the gap.
    """
    each = max(1, number // (2 * max(values.size - 1, 1)))
    even = np.arange(1, each + 1) / (each + 1)
    places = np.concatenate((even, 0.5 ** np.arange(1, each + 1)[: min(each, 40)]))
    lower, upper = values[:-1, np.newaxis], values[1:, np.newaxis]
    points = np.clip(lower * (1.0 - places) + upper * places, lower, upper)  # against rounding
    return np.unique(np.concatenate((values, points.ravel())))


def centre(values: np.ndarray) -> tuple[float, float]:
    """Returns the middle and half width of sorted values, without overflow of their sum."""
    low, high = 0.5 * float(values[0]), 0.5 * float(values[-1])
    return low + high, (high - low) or 1.0


def _meeting_assumption_4(
    loss: Loss, grid: np.ndarray, values: np.ndarray, place: np.ndarray
) -> np.ndarray:
    """Returns the losses (grid, values), less those at each value's own place if that helps."""
    table = loss_values(loss, grid[:, np.newaxis], values)
    if np.any(np.isnan(table)):
        raise ValueError(
            "the loss is NaN in the range of the values. Use scipy.special.xlogy for 0 * log(0)."
        )
    own = table[place, np.arange(values.size)]  # A term of the label changes no choice of bins.
    with np.errstate(invalid="ignore"):
        relative = table - own
    rounding = 1e-13 * (np.abs(table) + np.abs(own))
    # A loss may be infinite only at the ends of the range, as the Poisson loss is at zero.
    if np.all(np.isfinite(table[1:-1])):
        for form in (relative, table):
            slack = rounding + 1e-9 * np.abs(form)
            if not np.any(np.isnan(form)) and _falls_towards_the_label(form, slack, grid, values):
                return form
    raise ValueError(
        "the loss does not meet Assumption 4 of Ghazi et al. 2023: it must be finite and decrease "
        "as y_hat and y approach each other. Check the order of the arguments, loss(y_hat, y)."
    )


def _falls_towards_the_label(
    table: np.ndarray, slack: np.ndarray, grid: np.ndarray, values: np.ndarray
) -> bool:
    """Returns whether a loss (grid, values) meets Assumption 4, up to the slack at each point."""
    output = grid[:, np.newaxis]
    # The sign is 1 where a step leads towards the label (or the output), -1 where it leads away.
    output_nears = 1.0 * (output[1:] <= values) - (output[:-1] >= values)
    label_nears = 1.0 * (values[1:] <= output) - (values[:-1] >= output)
    with np.errstate(invalid="ignore"):  # The difference inf - inf is no step.
        by_output = output_nears * np.diff(table, axis=0)
        by_label = label_nears * np.diff(table, axis=1)
    rises = np.any(by_output > np.maximum(slack[1:], slack[:-1]))
    return not (rises or np.any(by_label > np.maximum(slack[:, 1:], slack[:, :-1])))
