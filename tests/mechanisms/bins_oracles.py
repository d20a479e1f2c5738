"""References for the optimal bins: the linear program, and Algorithm 2 of ``ghazi2023`` as printed.

Both are plain and slow on purpose, and share nothing with the package. Squared error is
``(y_hat - y)^2``, without the factor 1/2 of the paper.
"""

from __future__ import annotations

import numpy as np
from scipy import optimize, sparse, special


def loss_table(outputs, values, loss):
    """loss(outputs[o], values[y]) as (outputs, values); infinite where it is undefined."""
    y_hat, y = np.asarray(outputs, float)[:, np.newaxis], np.asarray(values, float)[np.newaxis, :]
    if loss == "squared_error":
        return (y_hat - y) ** 2
    if loss == "absolute_error":
        return np.abs(y_hat - y)
    # xlogy has 0 log 0 = 0, and y log 0 = -inf, which makes the loss infinite as it should.
    return np.where(y_hat < 0, np.inf, y_hat - special.xlogy(y, np.maximum(y_hat, 0.0)))


def best_channel_loss(values, probabilities, epsilon, loss, outputs):
    """The least expected loss of any epsilon-DP channel from ``values`` into ``outputs``.

    The linear program (2) of appendix A, in a smaller form: column o of the channel lies between
    ``e^-eps u[o]`` and ``u[o]``. With ``M[y, o] = e^-eps u[o] + x[y, o]``, the variables are x >= 0
    and u >= 0, and the constraints ``x[y, o] <= (1 - e^-eps) u[o]`` and the row sums of M.
    """
    values, probabilities = np.asarray(values, float), np.asarray(probabilities, float)
    table = loss_table(outputs, values, loss).T  # (values, outputs)
    # An output that is infinitely bad for a possible label can't be used: DP gives it to every one.
    usable = np.all(np.isfinite(table[probabilities > 0]), axis=0)
    table = np.where(probabilities[:, np.newaxis] > 0, table, 0.0)[:, usable]
    k, m = table.shape
    shrink = np.exp(-epsilon)
    offset = table.min()
    scale = float(np.ptp(table)) or 1.0
    cost = probabilities[:, np.newaxis] * (table - offset) / scale

    columns = sparse.kron(np.ones((k, 1)), sparse.identity(m))  # entry (y, o) -> o
    rows = sparse.kron(sparse.identity(k), np.ones((1, m)))  # entry (y, o) -> y
    result = optimize.linprog(
        np.concatenate([cost.ravel(), shrink * cost.sum(axis=0)]),
        A_ub=sparse.hstack([sparse.identity(k * m), -(1.0 - shrink) * columns]).tocsr(),
        b_ub=np.zeros(k * m),
        A_eq=sparse.hstack([rows, shrink * np.ones((k, m))]).tocsr(),
        b_eq=np.ones(k),
        bounds=(0.0, None),
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    if result.status != 0:
        raise RuntimeError(f"the linear program was not solved: {result.message}")
    return float(offset * probabilities.sum() + scale * result.fun)


def best_output(weights, values, loss):
    """argmin over y_hat of sum_y weights[., y] loss(y_hat, y), for rows of weights (n, k)."""
    total = weights.sum(axis=1)
    if loss == "absolute_error":  # the lower weighted median
        half = np.cumsum(weights, axis=1) >= 0.5 * total[:, np.newaxis]
        return values[np.argmax(half, axis=1)]
    return (weights @ values) / total


def cubic_table_loss(values, probabilities, epsilon, loss):
    """Algorithm 2: the least expected loss of RR-on-Bins.

    ``L[r][i] = min_y_hat sum_y p_y e^(eps [y_r <= y <= y_i]) loss(y_hat, y)``,
    ``A[i][j] = min_{r < i} A[r][j-1] + L[r+1][i]``, and the loss is
    ``min_d A[k][d] / (d - 1 + e^eps)``. All tables are divided by e^eps, so they cannot overflow.
    """
    values, probabilities = np.asarray(values, float), np.asarray(probabilities, float)
    k, shrink = values.size, np.exp(-epsilon)
    best = np.full((k + 1, k + 1), np.inf)  # best[r, i]: the bin of values[r:i]
    index = np.arange(k)
    for r in range(k):
        ends = np.arange(r + 1, k + 1)
        inside = (index >= r) & (index < ends[:, np.newaxis])
        weights = probabilities * np.where(inside, 1.0, shrink)
        outputs = best_output(weights, values, loss)
        table = np.where(probabilities > 0, loss_table(outputs, values, loss), 0.0)
        best[r, ends] = np.sum(weights * table, axis=1)

    least = np.full((k + 1, k + 1), np.inf)  # least[j, i]: values[:i] in j bins
    least[0, 0] = 0.0
    for j in range(1, k + 1):
        least[j] = np.min(least[j - 1][:, np.newaxis] + best, axis=0)  # (r, i)
    return float(np.min(least[1:, k] / (1.0 + np.arange(k) * shrink)))
