"""The channel of numbers with the least squared error whose noisy labels are unbiased."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Public, public_input
from tf_labeldp.mechanisms._bins import ChannelMechanism
from tf_labeldp.mechanisms._optimal_bins import checked_prior
from tf_labeldp.mechanisms.bin_losses import MOST_UNBIASED_EPSILON, unbiased_range

_GRID = 101
"""Outputs of the first program, which later ones refine around those in use."""
_FEW_VALUES = 32
"""Up to here the grid is refined twice, for about a second more (at 64 values fifteen)."""
_EPSILON_SLACKS = (1e-7, 1e-4, 1e-2, 0.1)
"""Relative. The program is solved for a smaller epsilon, so that repairs keep the stated epsilon.

The first nearly always suffices. At epsilon below 0.01, or above 15 with priors at one point, the
solver's tolerances can exceed it, and the next is tried.
"""


def optimal_unbiased(
    values: Public[Any], probabilities: Public[Any], epsilon: float
) -> ChannelMechanism:
    """Returns the channel of least squared error with ``E[output | label] = label`` for each value.

    Unlike the bins of ``optimal_bins``, also after ``debiased()``, it is unbiased whatever the law
    of the labels, so totals of groups add up; ``debiased()`` returns its noisy labels as they are.
    Its labels are noisier, the more so the longer the tail of the labels: outputs extend beyond the
    labels by ``(high - low) / (e^epsilon - 1)`` at least.

    Guarantee:
        The mechanism is epsilon-DP for every prior; a wrong prior costs accuracy only, and no bias.
        ``ChannelMechanism`` checks the solver's result. The prior must be public, or released
        privately and charged (the mechanism keeps the receipts of ``Priors``).

    Source: Badanidiyuru et al. 2023, "Optimal unbiased randomizers for regression with label
    differential privacy", on a grid of outputs that is refined around those in use: within 1 % of
    the loss on 1,600 outputs for up to 32 values, up to 5 % above it at epsilon 8 under sparse
    priors. The least range of outputs is ours (docs/theory.md, unbiased numbers). Where the solver
    fails, as may happen below epsilon 0.01, the result is near the optimum, or randomized response
    on that range. Above epsilon 20 it is the channel for 20, which errs in one draw in 10^7. 32
    values take 2 s, 64 take 2 to 15 s, 128 up to a minute.

    Args:
        values: possible labels, (k,), finite, in any order; equal values are merged; 2 to 128.
        probabilities: their probabilities, (k,), with sum one (tolerance 1e-4); zeros are allowed.
        epsilon: finite and above zero.

    Raises:
        ValueError: values or probabilities are out of range, or values are too many, too close
            together for doubles, or a single one.

    Example:
        >>> mechanism = optimal_unbiased([0, 1, 2], [0.5, 0.3, 0.2], epsilon=2.0)
        >>> means = mechanism.transition_matrix() @ np.array(mechanism.outputs)
        >>> bool(np.allclose(means, [0, 1, 2])), len(mechanism.outputs) <= 6
        (True, True)
    """
    epsilon = _validate.positive_finite("epsilon", epsilon)
    public = public_input(values, probabilities)
    values, prior = checked_prior(*public.value)
    if values.size < 2:
        raise ValueError(
            "expected at least two different values, got one. Publish such labels: they are known."
        )
    solved_for = min(epsilon, MOST_UNBIASED_EPSILON)
    least, chosen = (unbiased_range(values, part) for part in (solved_for, solved_for / 2.0))
    for slack in _EPSILON_SLACKS:
        try:
            found: Any = _optimum(values, prior, solved_for * (1.0 - slack), least, chosen)
            return ChannelMechanism(epsilon, values, *found, receipts=public.receipts)
        except ValueError:  # not solved, or repaired into a channel that is refused
            continue
    # Randomized response on the ends of the smallest range is always private and unbiased.
    up = (values - least[0]) / (least[1] - least[0])
    table: Any = np.stack([1.0 - up, up], axis=1)
    return ChannelMechanism(epsilon, values, least, table, receipts=public.receipts)


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
        # The solver's tolerances are 1e-10: a smaller entry is zero.
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
    from scipy import optimize, sparse  # slower to import than all mechanisms together

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
        raise ValueError(result.message)
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
