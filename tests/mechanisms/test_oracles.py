"""Reference values: closed forms of the papers, and cases on which published code is wrong."""

from __future__ import annotations

import numpy as np
import pytest

from tf_labeldp.mechanisms import RandomizedResponse, RRTopK, RRWithPrior

TOLERANCE = 1e-6

# (K, epsilon): Pr[keep], Pr[each other]
RANDOMIZED_RESPONSE = {
    (2, 1.0): (0.731058579, 0.268941421),
    (10, 1.0): (0.231969317, 0.0853367426),
    (10, 4.0): (0.85848645, 0.0157237278),
    (100, 2.0): (0.0694531597, 0.00939946303),
    (100, 6.0): (0.802957153, 0.00199033179),
}

FOUR = (0.5, 0.3, 0.1, 0.1)
FIVE = (0.6, 0.2, 0.1, 0.05, 0.05)
FLAT_FIVE = (0.4, 0.35, 0.15, 0.05, 0.05)
THREE = (0.7, 0.2, 0.1)
UNIFORM_3 = (1 / 3,) * 3
UNIFORM_10 = (0.1,) * 10

# prior, epsilon, k*, Pr[correct], the k of the published code, Pr[correct] at that k.
# That code divides by 1 + (k - 2) e^-eps where Algorithm 2 has 1 + (k - 1) e^-eps.
WITH_PRIOR = [
    (FOUR, 1.0, 2, 0.584846863, 2, 0.584846863),
    (FOUR, 2.0, 4, 0.711234595, 2, 0.704637662),
    (FIVE, 1.0, 1, 0.6, 1, 0.6),
    (FIVE, 2.0, 3, 0.708287438, 2, 0.704637662),
    (FLAT_FIVE, 1.0, 2, 0.548293934, 2, 0.548293934),
    (THREE, 0.1, 1, 0.7, 1, 0.7),
    (THREE, 1.0, 1, 0.7, 1, 0.7),
    (UNIFORM_10, 1.0, 10, 0.231969317, 10, 0.231969317),
    (UNIFORM_10, 0.5, 10, 0.154828099, 1, 0.1),
    (UNIFORM_3, 0.5, 3, 0.451862762, 1, 0.333333333),
]

# prior, epsilon: w_1..w_K, the probabilities of a correct output of RRTop-k
OBJECTIVES = {
    (FOUR, 1.0): (0.5, 0.584846863, 0.518505196, 0.475366886),
    (FIVE, 1.0): (0.6, 0.584846863, 0.518505196, 0.451598542, 0.404609675),
    (FIVE, 2.0): (0.6, 0.704637662, 0.708287438, 0.675672865, 0.648785644),
    (FLAT_FIVE, 1.0): (0.4, 0.548293934, 0.518505196, 0.451598542, 0.404609675),
    (THREE, 0.1): (0.7, 0.472481269, 0.355913071),
    (THREE, 1.0): (0.7, 0.657952721, 0.576116885),
    (UNIFORM_3, 0.5): (0.333333333, 0.414972887, 0.451862762),
}


def correct(mechanism, prior):
    """Pr[output = input] for an input drawn from the prior."""
    return float(np.dot(prior, np.diag(mechanism.transition_matrix(prior))))


@pytest.mark.parametrize(("num_classes", "epsilon"), RANDOMIZED_RESPONSE)
def test_randomized_response(num_classes, epsilon):
    keep, other = RANDOMIZED_RESPONSE[num_classes, epsilon]
    expected = np.full((num_classes, num_classes), other)
    np.fill_diagonal(expected, keep)
    matrix = RandomizedResponse(epsilon, num_classes).transition_matrix()
    np.testing.assert_allclose(matrix, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("prior", "epsilon", "k", "probability", "repo_k", "repo"), WITH_PRIOR)
def test_rr_with_prior(prior, epsilon, k, probability, repo_k, repo):
    mechanism = RRWithPrior(epsilon, len(prior))
    assert mechanism.optimal_k(prior).tolist() == [k]
    assert correct(mechanism, prior) == pytest.approx(probability, abs=TOLERANCE)
    published = RRTopK(epsilon, len(prior), repo_k)
    assert correct(published, prior) == pytest.approx(repo, abs=TOLERANCE)
    if repo_k != k:
        assert correct(mechanism, prior) > repo + 1e-3


def test_the_cases_on_which_published_code_is_wrong_are_held():
    assert sum(k != repo_k for _, _, k, _, repo_k, _ in WITH_PRIOR) == 4


def test_objective_of_every_set_size():
    for (prior, epsilon), expected in OBJECTIVES.items():
        found = [correct(RRTopK(epsilon, len(prior), k + 1), prior) for k in range(len(prior))]
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
