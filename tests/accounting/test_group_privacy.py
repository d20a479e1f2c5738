"""Group privacy and its inverse, against exact enumeration and the sum that they close."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tf_labeldp.accounting import (
    PrivacyBudget,
    PrivacyGuarantee,
    group_privacy,
    item_budget_for_group,
)
from tf_labeldp.mechanisms import RandomizedResponse
from tf_labeldp.plugins import gaussian_delta
from tf_labeldp.vault import PrivateLabels


@pytest.mark.parametrize(("k", "epsilon"), [(2, 1.5), (3, 0.2)])
@pytest.mark.holds("accounting.group_privacy")
def test_randomized_response_on_k_labels_has_exactly_k_epsilon(epsilon, k):
    """All inputs and outputs of a user with k labels of two classes, written out."""
    matrix = RandomizedResponse(epsilon, 2).transition_matrix()
    words = list(itertools.product(range(2), repeat=k))
    joint = np.array(
        [[math.prod(matrix[i, o] for i, o in zip(a, b, strict=True)) for b in words] for a in words]
    )
    worst = np.max(np.log(joint[:, None] / joint[None, :]))
    stated = group_privacy(PrivacyGuarantee(epsilon), k)
    assert worst == pytest.approx(stated.epsilon, abs=1e-12)
    assert stated.delta == 0.0
    assert worst > stated.epsilon * (1 - 1e-9)  # nothing smaller would hold


@pytest.mark.parametrize("epsilon", [1e-9, 1.0, 20.0])
@pytest.mark.holds("accounting.item_budget_for_group")
def test_delta_is_the_geometric_sum_and_the_item_budget_its_exact_inverse(epsilon):
    cases = itertools.product((0.0, 1e-300, 1e-12), (1, 2, 5))
    for delta, k in ((d, k) for d, k in cases if d * math.exp((k - 1) * epsilon) < 1e-3):
        stated = group_privacy(PrivacyGuarantee(epsilon, delta), k)
        assert stated.epsilon == k * epsilon
        exact = math.fsum(delta * math.exp(j * epsilon) for j in range(k))
        assert stated.delta == pytest.approx(exact, rel=1e-12)
        assert stated.delta <= k * math.exp(k * epsilon) * delta  # the lemma's rounded form
        budget = PrivacyBudget(epsilon, delta)
        item = item_budget_for_group(budget, k)
        back = group_privacy(PrivacyGuarantee(item.epsilon, item.delta), k)
        assert budget.allows(back)
        assert back.epsilon == pytest.approx(epsilon, rel=1e-12)
        assert back.delta == pytest.approx(delta, rel=1e-12)
        larger = PrivacyGuarantee(item.epsilon * (1 + 1e-6), item.delta)
        assert not budget.allows(group_privacy(larger, k))
        if delta:
            larger = PrivacyGuarantee(item.epsilon, item.delta * (1 + 1e-6))
            assert not budget.allows(group_privacy(larger, k))


@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.holds("accounting.group_privacy")
def test_gaussian_noise_on_k_labels_stays_within_the_statement(k):
    """k labels move a sum k times as far, and delta must cover that at k epsilon."""
    delta = gaussian_delta(4.0, 0.8, 1.0)
    stated = group_privacy(PrivacyGuarantee(0.8, delta), k)
    needed = gaussian_delta(4.0, stated.epsilon, float(k))
    assert needed <= stated.delta
    assert needed > delta  # delta of one label would not do


def test_the_item_budget_of_a_huge_epsilon_does_not_overflow():
    item = item_budget_for_group(PrivacyBudget(2000.0, 1e-5), 2)
    assert item.epsilon == 1000.0
    assert item.delta == 0.0  # 1e-5 e^-1000 is below every double


def test_the_statement_is_of_a_user_and_keeps_what_it_rests_on():
    one = PrivacyGuarantee(0.5, 1e-6, assumptions=("the first",), seeded=True)
    many = group_privacy(one, 3)
    assert many.unit == "all labels of one user (at most 3 examples)"
    assert many.assumptions == ("the first", "No user has more than 3 examples.")
    assert many.seeded and many.relation == one.relation
    assert "all labels of one user" in str(many)
    assert group_privacy(one, 1) is one
    # It would contradict itself with the assumption that each person has one example.
    labels = PrivateLabels([0, 1] * 9, 2, budget=PrivacyBudget(1.0))
    of_labels = labels.randomize(RandomizedResponse(0.5, 2)).guarantee()
    assert "each person has one example" in str(of_labels)
    of_users = group_privacy(of_labels, 2)
    assert "one example" not in str(of_users)
    assert "The features and the user of each example are public." in of_users.assumptions


def test_nothing_spent_is_nothing_spent():
    assert group_privacy(PrivacyGuarantee(0.0), 7).epsilon == 0.0
    assert group_privacy(PrivacyGuarantee(0.0, 1e-6), 7).delta == pytest.approx(7e-6)
    assert group_privacy(PrivacyGuarantee(math.inf), 2).epsilon == math.inf


@pytest.mark.parametrize(
    ("guarantee", "k"),
    [
        (PrivacyGuarantee(1.0, 0.5), 2),
        (PrivacyGuarantee(400.0, 1e-5), 3),
        (PrivacyGuarantee(0.0, 0.5), 2),
    ],
)
def test_a_delta_of_one_is_refused(guarantee, k):
    with pytest.raises(ValueError, match=r"a delta below 1 for.*item_budget_for_group"):
        group_privacy(guarantee, k)


def test_bad_arguments():
    for k, error in ((0, ValueError), (2.0, TypeError)):
        with pytest.raises(error, match="group_size must be"):
            group_privacy(PrivacyGuarantee(1.0), k)
        with pytest.raises(error, match="group_size must be"):
            item_budget_for_group(PrivacyBudget(1.0), k)
    with pytest.raises(TypeError, match="budget must be a PrivacyBudget, got float"):
        item_budget_for_group(1.0, 2)
