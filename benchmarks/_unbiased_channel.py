"""The best private channel whose noisy labels are unbiased.

A plug-in: a table of probabilities, which ``mechanisms.ChannelMechanism`` checks and draws from.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import optimize, sparse

from tf_labeldp.mechanisms import ChannelMechanism

_GRID = 101
_FEW_VALUES = 32
"""Up to here the grid is refined twice, for about a second more (at 64 values fifteen)."""
_SLACK = 1e-6
"""Relative. Outputs extend by this beyond the minimum, so that the program has an interior."""
_EPSILON_SLACKS = (1e-7, 1e-4, 1e-2, 0.1)
"""Relative. The program is solved for a smaller epsilon, so that repairs keep the stated epsilon.

The first nearly always suffices. At epsilon below 0.01, or above 15 with priors at one point, the
solver's tolerances can exceed it, and the next is tried.
"""
_MAX_EPSILON = 20.0
"""Above, the smallest entries of the program vanish in the solver's tolerances."""


def unbiased_channel(values: Any, probabilities: Any, epsilon: float) -> ChannelMechanism:
    """Returns the channel of least squared error with E[output | label = v] = v for every value v.

    It solves the linear program (2) of ``ghazi2023`` (appendix A) with an additional equation per
    value, as section 6 proposes, on a grid of outputs that is refined around the outputs in use: up
    to 32 values within 0.1 % of the loss on a grid of 1,600 outputs (measured with 3 and 5 values,
    epsilon 0.1 to 10), above 32 within about 0.3 %. 32 values take 2 s, 64 take 2 to 15 s. If the
    solver's tolerances rule the optimum out, as may happen below epsilon 0.01, the result is a
    channel near it, at worst the randomized response on two outputs described below. With squared
    error, a model learns the same from unbiased labels as from the true ones, with more variance.

    Outputs must extend beyond the labels. For outputs in [lo, hi], ``output - lo`` is not negative,
    so epsilon-DP gives ``high - lo <= e^epsilon (low - lo)`` for its means at the ends of the
    labels: ``lo <= low - (high - low) / (e^epsilon - 1)``, and likewise for hi. These two are
    enough: randomized response on {lo, hi} with ``P[hi | v] = (v - lo) / (hi - lo)`` is private and
    unbiased. So the width is ``(high - low) / tanh(epsilon / 2)`` at least.

    At that width there is no other channel, with the variance of two outputs even at a large
    epsilon. So outputs extend by ``(high - low) / (e^(epsilon / 2) - 1)`` beyond either end: up to
    eight times more gained under 1 % with uniform and geometric priors, up to 7 % with sparse
    priors at epsilon above 5 (3 to 30 values, epsilon 0.1 to 10). Above epsilon 20 the result is
    the channel for 20, which errs in one draw in 10^7.

    Guarantee:
        The guarantee of ``ChannelMechanism``, which checks the result: the solver is not trusted.

    Args:
        values: the possible labels, strictly increasing, (k,), at least two.
        probabilities: their prior, (k,).
        epsilon: finite and above zero.
    """
    values, prior = np.asarray(values, np.float64), np.asarray(probabilities, np.float64)
    solved_for = min(epsilon, _MAX_EPSILON)
    least, chosen = (_extended(values, part) for part in (solved_for, solved_for / 2.0))
    for slack in _EPSILON_SLACKS:
        try:
            outputs, table = _optimum(values, prior, solved_for * (1.0 - slack), least, chosen)
            return ChannelMechanism(
                epsilon, tuple(values), tuple(outputs), tuple(map(tuple, table))
            )
        # Infeasible, or repaired into a channel that is refused.
        except (_NotSolved, ValueError):
            continue
    # Randomized response on the ends of the smallest range is always private and unbiased.
    up = (values - least[0]) / (least[1] - least[0])
    table = np.stack([1.0 - up, up], axis=1)
    return ChannelMechanism(epsilon, tuple(values), least, tuple(map(tuple, table)))


class _NotSolved(Exception):
    """The solver found no optimum at its tolerances."""


def _extended(values: np.ndarray, epsilon: float) -> tuple[float, float]:
    """Returns the smallest range of outputs of an unbiased channel."""
    low, high = float(values[0]), float(values[-1])
    margin = (high - low) / math.expm1(epsilon) * (1.0 + _SLACK)
    return low - margin, high + margin


def _optimum(
    values: np.ndarray,
    prior: np.ndarray,
    epsilon: float,
    least: tuple[float, float],
    chosen: tuple[float, float],
) -> tuple[np.ndarray, np.ndarray]:
    """Returns outputs (m,) and the table (k, m) of the optimal channel on a refined grid."""
    low, high = chosen
    step = (high - low) / (_GRID - 1)
    grid = np.concatenate([np.linspace(low, high, _GRID), values, least])
    refinements = (step / 3.0, step / 9.0) if values.size <= _FEW_VALUES else (step / 3.0,)
    for spread in (*refinements, None):
        outputs = np.unique(np.clip(grid, low, high))
        outputs = outputs[np.diff(outputs, prepend=-np.inf) > 1e-9 * (high - low)]
        table = _solve(values, prior, epsilon, outputs)
        used = table.max(axis=0) > 1e-9
        outputs, table = outputs[used], table[:, used]
        if spread is not None:
            grid = np.concatenate([outputs, outputs - spread, outputs + spread])
    return outputs, _repaired(table, outputs, values)


def _solve(
    values: np.ndarray, prior: np.ndarray, epsilon: float, outputs: np.ndarray
) -> np.ndarray:
    """Returns the optimal table (k, m), to the solver's tolerance.

    Entry (y, o) is ``e^-epsilon u[o] + x[y, o]`` with ``0 <= x[y, o] <= (1 - e^-epsilon) u[o]``:
    so a column keeps to a factor of e^epsilon, with k m inequalities instead of k^2 m.
    """
    k, m, shrink = values.size, outputs.size, math.exp(-epsilon)
    cost = prior[:, np.newaxis] * np.square(outputs - values[:, np.newaxis])
    # Rows sum to one, so this shifts the loss of all tables alike.
    cost -= prior[:, np.newaxis] * np.min(cost.sum(axis=0))
    cost /= np.max(np.abs(cost.sum(axis=0))) or 1.0
    place, aim = _scaled(outputs, outputs), _scaled(values, outputs)
    row_of = sparse.kron(sparse.identity(k), np.ones((1, m)))
    mean_of = sparse.kron(sparse.identity(k), place[np.newaxis, :])
    column_of = sparse.kron(np.ones((k, 1)), sparse.identity(m))
    equations = sparse.vstack(
        [
            sparse.hstack([row_of, np.full((k, m), shrink)]),
            sparse.hstack([mean_of, np.tile(shrink * place, (k, 1))]),
        ]
    )
    result = optimize.linprog(
        np.concatenate([cost.ravel(), shrink * cost.sum(axis=0)]),
        A_ub=sparse.hstack([sparse.identity(k * m), -(1.0 - shrink) * column_of]).tocsr(),
        b_ub=np.zeros(k * m),
        A_eq=equations.tocsr(),
        b_eq=np.concatenate([np.ones(k), aim]),
        bounds=(0.0, None),
        method="highs-ds",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    if result.status != 0:
        raise _NotSolved(result.message)
    upper = np.maximum(result.x[k * m :], 0.0)
    more = np.clip(result.x[: k * m].reshape(k, m), 0.0, (1.0 - shrink) * upper)
    return shrink * upper + more


def _repaired(table: np.ndarray, outputs: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Returns the table with exact row sums and means; two outputs take the differences."""
    place, aim = _scaled(outputs, outputs), _scaled(values, outputs)
    weight = table.min(axis=0)
    below = int(np.argmax(np.where(outputs <= values[0], weight, -1.0)))
    above = int(np.argmax(np.where(outputs >= values[-1], weight, -1.0)))
    table = table.copy()
    # The second pass corrects the rounding of the first.
    for _ in range(2):
        mass = 1.0 - table.sum(axis=1)
        moment = aim - table @ place
        up = (moment - mass * place[below]) / (place[above] - place[below])
        table[:, above] += up
        table[:, below] += mass - up
    return table


def _scaled(numbers: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """Returns numbers on a scale where the outputs range from -1 to 1."""
    middle, half = 0.5 * (outputs[0] + outputs[-1]), 0.5 * (outputs[-1] - outputs[0])
    return (numbers - middle) / half
