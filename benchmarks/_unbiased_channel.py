"""The best private channel whose noisy labels are unbiased.

A plug-in: a table of probabilities, which ``mechanisms.ChannelMechanism`` checks and draws from.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.mechanisms import ChannelMechanism, _losses

_MAX_VALUES = 64
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


def unbiased_channel(
    values: Any,
    probabilities: Any,
    epsilon: float,
    loss: _losses.Loss = "squared_error",
    output_range: tuple[float, float] | None = None,
) -> ChannelMechanism:
    """Returns the channel of least expected loss with E[output | label = v] = v for every value v.

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
    epsilon. The default range extends by ``(high - low) / (e^(epsilon / 2) - 1)`` beyond either
    end: up to eight times more gained under 1 % with uniform and geometric priors, up to 7 % with
    sparse priors at epsilon above 5 (3 to 30 values, epsilon 0.1 to 10). Above epsilon 20 the
    result is the channel for 20, which errs in one draw in 10^7.

    Guarantee:
        The guarantee of ``ChannelMechanism``, which checks the result: the solver is not trusted.

    Args:
        values: the possible labels, finite, strictly increasing, (k,), k at most 64.
        probabilities: their prior, (k,), sums to one (tolerance 1e-4).
        epsilon: finite and above zero.
        loss: ``"squared_error"``, ``"absolute_error"``, ``"poisson"``, or ``loss(y_hat, y)``.
        output_range: the range of the outputs; None for the default.

    Raises:
        ValueError: too many values, a malformed prior, or a range without an unbiased channel; the
            message has the smallest range that works.

    Example:
        >>> channel = unbiased_channel([0.0, 1.0], [0.5, 0.5], 1.0, "squared_error")
        >>> means = channel.transition_matrix() @ channel.outputs
        >>> means.round(6).tolist()
        [0.0, 1.0]
    """
    epsilon = _validate.positive_finite("epsilon", epsilon)
    values = _validate.increasing_numbers("values", values)
    prior = _validate.prior_rows("probabilities", probabilities, 1, values.size)[0]
    _losses.check_domain(_losses.checked_loss(loss), float(values[0]))
    if values.size > _MAX_VALUES:
        raise ValueError(
            f"an unbiased channel takes at most {_MAX_VALUES} values, got {values.size}: the time "
            "grows with their third power. Round the labels first: rounding_grid(low, high, "
            f"max_values={_MAX_VALUES})."
        )
    if values.size == 1:
        return ChannelMechanism(epsilon, tuple(values), tuple(values), ((1.0,),))

    solved_for = min(epsilon, _MAX_EPSILON)
    least, chosen = _ranges(values, solved_for, loss, output_range)
    for slack in _EPSILON_SLACKS:
        try:
            outputs, table = _optimum(
                values, prior, solved_for * (1.0 - slack), loss, least, chosen
            )
            return ChannelMechanism(
                epsilon, tuple(values), tuple(outputs), tuple(map(tuple, table))
            )
        # Infeasible, or repaired into a channel that is refused.
        except (_NotSolved, ValueError):
            continue
    if not np.all(np.isfinite(_losses.loss_values(loss, np.array(least)[:, np.newaxis], values))):
        raise ValueError(
            "the linear program for an unbiased channel was not solved. Widen output_range, and "
            f"check that the loss is finite for outputs in [{chosen[0]:g}, {chosen[1]:g}]."
        )
    # Randomized response on the ends of the smallest range is always private and unbiased.
    up = (values - least[0]) / (least[1] - least[0])
    return ChannelMechanism(
        epsilon, tuple(values), least, tuple(map(tuple, np.stack([1.0 - up, up], axis=1)))
    )


class _NotSolved(Exception):
    """The solver found no optimum at its tolerances."""


def _optimum(
    values: np.ndarray,
    prior: np.ndarray,
    epsilon: float,
    loss: _losses.Loss,
    least: tuple[float, float],
    chosen: tuple[float, float],
) -> tuple[np.ndarray, np.ndarray]:
    """Returns outputs (m,) and the table (k, m) of the optimal channel on a refined grid."""
    step = (chosen[1] - chosen[0]) / (_GRID - 1)
    grid = np.concatenate([np.linspace(*chosen, _GRID), values, least])
    refinements = (step / 3.0, step / 9.0) if values.size <= _FEW_VALUES else (step / 3.0,)
    for spread in (*refinements, None):
        outputs = _distinct(grid, loss, values, prior, chosen)
        table = _solve(values, prior, epsilon, loss, outputs)
        used = table.max(axis=0) > 1e-9
        outputs, table = outputs[used], table[:, used]
        if spread is not None:
            grid = np.concatenate([outputs, outputs - spread, outputs + spread])
    return outputs, _repaired(table, outputs, values)


def _ranges(
    values: np.ndarray, epsilon: float, loss: _losses.Loss, wanted: tuple[float, float] | None
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Returns the smallest range of outputs that works, and the range to use."""
    low, high = float(values[0]), float(values[-1])
    must = (high - low) / math.expm1(epsilon) * (1.0 + _SLACK)
    least = (low - must, high + must)
    if loss == "poisson" and least[0] <= 0.0:
        raise ValueError(
            f"outputs must start at {least[0]:g} or below for an unbiased channel on these values "
            f"at epsilon={epsilon:g}, but the Poisson loss needs outputs above zero. Use "
            "loss='squared_error', or a larger epsilon."
        )
    if wanted is None:
        extra = (high - low) / math.expm1(epsilon / 2.0) * (1.0 + _SLACK)
        start = low - extra
        return least, (max(start, least[0] / 2.0) if loss == "poisson" else start, high + extra)
    first, last = _validate.number_range(*wanted)
    if first > least[0] or last < least[1]:
        raise ValueError(
            f"outputs in [{first!r}, {last!r}] leave no unbiased epsilon-DP channel: at "
            f"epsilon={epsilon:g} labels from {low:g} to {high:g} need output_range="
            f"({least[0]!r}, {least[1]!r}) at least (room for rounding included). A wider one "
            "lowers the loss."
        )
    if loss == "poisson" and first <= 0.0:
        raise ValueError(
            f"the Poisson loss needs outputs above zero, got output_range=({first!r}, {last!r}). "
            f"Start it between 0 and {least[0]!r}."
        )
    return least, (first, last)


def _distinct(
    grid: np.ndarray,
    loss: _losses.Loss,
    values: np.ndarray,
    prior: np.ndarray,
    ends: tuple[float, float],
) -> np.ndarray:
    """Returns the distinct outputs of a grid in the range, of finite loss."""
    outputs = np.unique(np.clip(grid, *ends))
    outputs = outputs[np.diff(outputs, prepend=-np.inf) > 1e-9 * (ends[1] - ends[0])]
    possible = values[prior > 0.0]
    finite = np.isfinite(_losses.loss_values(loss, outputs[:, np.newaxis], possible))
    return outputs[np.all(finite, axis=1)]


def _solve(
    values: np.ndarray,
    prior: np.ndarray,
    epsilon: float,
    loss: _losses.Loss,
    outputs: np.ndarray,
) -> np.ndarray:
    """Returns the optimal table (k, m), to the solver's tolerance.

    Entry (y, o) is ``e^-epsilon u[o] + x[y, o]`` with ``0 <= x[y, o] <= (1 - e^-epsilon) u[o]``:
    so a column keeps to a factor of e^epsilon, with k m inequalities instead of k^2 m.
    """
    from scipy import optimize, sparse

    k, m, shrink = values.size, outputs.size, math.exp(-epsilon)
    possible = prior > 0.0
    cost = np.zeros((k, m))
    cost[possible] = prior[possible, np.newaxis] * _losses.loss_values(
        loss, outputs, values[possible, np.newaxis]
    )
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
