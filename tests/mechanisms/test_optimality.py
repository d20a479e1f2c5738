"""RRWithPrior and InformativeRR against the best channels, found by linear programmes."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import optimize, special

from tf_labeldp.mechanisms import InformativeRR, RandomizedResponse, RRWithPrior

EPSILONS = [0.1, 1.0, 4.0]


def largest_objective(prior, epsilon):
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


def objective(mechanism, prior):
    return float(prior @ np.diag(mechanism.transition_matrix(prior)))


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("num_classes", [2, 5])
def test_no_private_channel_keeps_the_label_more_often(num_classes, epsilon):
    rng = np.random.default_rng([num_classes, int(10 * epsilon)])
    for concentration in (0.3, 1.0, 10.0):
        prior = rng.dirichlet(np.full(num_classes, concentration))
        ours = objective(RRWithPrior(epsilon, num_classes), prior)
        assert ours == pytest.approx(largest_objective(prior, epsilon), abs=1e-9)


def information(matrix, prior):
    """The mutual information of a label drawn from the prior and its answer, in nats."""
    return float(special.rel_entr(matrix, prior @ matrix).sum(axis=1) @ prior)


def grouped(groups, epsilon, num_classes):
    """Randomized response over groups of classes, a column for each group."""
    response = RandomizedResponse(epsilon, len(groups)).transition_matrix()
    matrix = np.empty((num_classes, len(groups)))
    for row, group in zip(response, groups, strict=True):
        matrix[group] = row
    return matrix


def drawn_priors(seed, *, largest=None, concentration=0.4, num_classes=6, size=20):
    """Priors that give ``largest`` to the likeliest class; symmetric Dirichlet ones for None."""
    rng = np.random.default_rng(seed)
    if largest is None:
        return rng.dirichlet(np.full(num_classes, concentration), size)
    others = rng.dirichlet(np.full(num_classes - 1, concentration), size)
    rows = np.concatenate([np.full((size, 1), largest), (1 - largest) * others], axis=1)
    return rng.permuted(rows, axis=1)


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 8.0])
def test_informative_rr_chooses_the_best_of_its_family(epsilon):
    for concentration in (0.1, 1.0, 20.0):
        for prior in drawn_priors(3, concentration=concentration, num_classes=5, size=10):
            ranked = np.argsort(-prior).tolist()
            family = [
                information(grouped([[y] for y in ranked[:k]] + [ranked[k:]], epsilon, 5), prior)
                for k in range(1, 5)
            ]
            ours = information(InformativeRR(epsilon, 5).transition_matrix(prior), prior)
            assert ours == pytest.approx(max(family), rel=1e-8, abs=1e-15)
