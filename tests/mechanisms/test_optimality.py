"""RRWithPrior against LP1 of the paper (``ghazi2021``, section 3.2), solved by scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import optimize

from tf_labeldp.mechanisms import RRTopK, RRWithPrior

EPSILONS = [0.1, 0.5, 1.0, 2.0, 4.0]


def largest_objective(prior: np.ndarray, epsilon: float) -> float:
    """The optimum of LP1: max sum_y p_y q[y, y] over all epsilon-DP channels q[y, out]."""
    size = prior.size
    cell = np.arange(size * size).reshape(size, size)
    pairs = [(y, z, out) for out in range(size) for y in range(size) for z in range(size) if y != z]
    private = np.zeros((len(pairs), size * size))
    for row, (y, z, out) in enumerate(pairs):  # e^-eps q[y, out] - q[z, out] <= 0
        private[row, cell[y, out]] = np.exp(-epsilon)
        private[row, cell[z, out]] = -1.0
    sums = np.kron(np.eye(size), np.ones(size))
    result = optimize.linprog(
        -np.diag(prior).ravel(),
        A_ub=private,
        b_ub=np.zeros(len(pairs)),
        A_eq=sums,
        b_eq=np.ones(size),
        bounds=(0, None),
        method="highs-ds",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    if not result.success:
        raise RuntimeError(result.message)
    return -result.fun


def objective(mechanism, prior: np.ndarray) -> float:
    return float(prior @ np.diag(mechanism.transition_matrix(prior)))


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("num_classes", [2, 3, 4, 5, 6])
def test_no_private_channel_keeps_the_label_more_often(num_classes, epsilon):
    rng = np.random.default_rng([num_classes, int(10 * epsilon)])
    for concentration in (0.3, 1.0, 10.0):
        prior = rng.dirichlet(np.full(num_classes, concentration))
        ours = objective(RRWithPrior(epsilon, num_classes), prior)
        assert ours == pytest.approx(largest_objective(prior, epsilon), abs=1e-9)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_another_set_size_is_worse_or_equal(epsilon):
    rng = np.random.default_rng(7)
    some_worse = False
    for num_classes in (2, 4, 9):
        prior = rng.dirichlet(np.ones(num_classes))
        best = RRWithPrior(epsilon, num_classes)
        chosen = int(best.optimal_k(prior)[0])
        for k in range(1, num_classes + 1):
            gap = objective(best, prior) - objective(RRTopK(epsilon, num_classes, k), prior)
            assert gap >= -1e-15
            assert k != chosen or gap == 0.0
            some_worse = some_worse or gap > 1e-3
    assert some_worse


def test_the_program_sees_a_channel_that_is_not_optimal():
    prior, epsilon = np.array([0.5, 0.3, 0.1, 0.1]), 2.0
    published_choice = objective(RRTopK(epsilon, 4, 2), prior)
    assert published_choice < largest_objective(prior, epsilon) - 6e-3
