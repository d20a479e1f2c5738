"""Grids to round labels to, and the bound on what rounding costs (lemma 16 of ghazi2023)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import special

from tf_labeldp.estimation.priors import rounding_grid
from tf_labeldp.mechanisms import optimal_bins

LOSSES = ("squared_error", "absolute_error", "poisson")


def deviance(loss, y_hat, y):
    """The losses, the Poisson one as a deviance, of which Lipschitz constants are about."""
    if loss == "squared_error":
        return (y_hat - y) ** 2
    if loss == "absolute_error":
        return np.abs(y_hat - y)
    return y_hat - special.xlogy(y, y_hat) + special.xlogy(y, y) - y


def mean_loss(mechanism, labels, prior, loss, judged_by):
    """E loss(M(label), judged_by), for labels (k,) of these probabilities."""
    outputs = np.array(mechanism.outputs)
    chances = mechanism.likelihood(outputs, labels)
    return float(np.sum(chances * prior * deviance(loss, outputs[:, np.newaxis], judged_by)))


LIPSCHITZ = {
    "squared_error": lambda low, high: 2.0 * (high - low),
    "absolute_error": lambda low, high: 1.0,
    "poisson": lambda low, high: math.log(high / low),
}


def step(values):
    """The widest one."""
    return np.diff(values).max()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("epsilon", "number"), [(0.5, 13), (6.0, 3)])
def test_lemma_16_both_inequalities_and_their_sum(loss, epsilon, number):
    low, high = 1.0, 8.5
    values = rounding_grid(low, high, number)
    bound = LIPSCHITZ[loss](low, high) * step(values)
    fine = np.linspace(low, high, 181)
    rounded = np.argmin(np.abs(values[:, np.newaxis] - fine), axis=0)
    rng = np.random.default_rng([91, number, int(10 * epsilon)])
    for concentration in (0.02, 0.3, 5.0):
        prior = rng.dirichlet(np.full(fine.size, concentration))
        coarse = np.bincount(rounded, prior, minlength=number)
        mine = optimal_bins(values, coarse, epsilon, loss)
        best = optimal_bins(fine, prior, epsilon, loss)
        on_true = mean_loss(mine, fine, prior, loss, fine)
        on_rounded = mean_loss(mine, fine, prior, loss, values[rounded])
        optimum = mean_loss(best, fine, prior, loss, fine)
        assert on_true <= on_rounded + bound / 2  # (12)
        assert on_rounded <= optimum + bound / 2  # (13)
        assert optimum - 1e-9 <= on_true <= optimum + bound


def test_whole_numbers_where_they_fit():
    values = rounding_grid(-3, 400, 404, whole_numbers=True)
    assert values.tolist() == [float(value) for value in range(-3, 401)]
    one_less = rounding_grid(-3, 400, 403, whole_numbers=True)
    assert len(one_less) == 403 and step(one_less) == pytest.approx(403 / 402)
    assert one_less[0] == -3.0 and one_less[-1] == 400.0
    assert rounding_grid(0, 1, 64, whole_numbers=True).tolist() == [0.0, 1.0]


def test_real_labels_between_whole_ends_are_told_apart():
    assert len(rounding_grid(0.0, 1.0, 64)) == 64
    values = rounding_grid(0, 7, 64)
    assert len(values) == 64 and set(range(8)) <= set(values.tolist())
    values = rounding_grid(0, 30, 64)  # two parts of each unit fit, three do not
    assert step(values) == 0.5 and set(range(31)) <= set(values.tolist())
    assert rounding_grid(0, 52, 64).tolist() == list(range(53))


@pytest.mark.parametrize(("low", "high"), [(0.0, 5000.0), (18.0, 90.0), (0.5, 1e6)])
def test_amounts_are_told_apart_where_they_are_small(low, high):
    values = rounding_grid(low, high, 64)
    steps = np.diff(values)
    assert len(values) == 64 and np.all(np.diff(steps) > 0.0)
    logs = np.diff(np.log(values + high / math.expm1(4.0)))
    np.testing.assert_allclose(logs, logs[0], rtol=1e-6)
    assert steps[-1] < 0.07 * (high - low)
    # The same labels in another currency.
    np.testing.assert_allclose(rounding_grid(3 * low, 3 * high, 64), 3 * values, rtol=1e-12)
    below_zero = rounding_grid(-high, high, 64)
    np.testing.assert_allclose(np.diff(below_zero), 2 * high / 63, rtol=1e-9)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3.0, 3.0, 10), ValueError, "low must be below high"),
        ((0.0, math.inf, 10), ValueError, "high must be finite"),
        ((0.0, 1.0, 1), ValueError, "max_values must be at least 2, got 1"),
        ((1e15, 1e15 + 0.5, 100), ValueError, "there are no 100 distinct doubles"),
    ],
)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=message):
        rounding_grid(*arguments)
