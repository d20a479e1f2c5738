"""Rows of several binary labels: each label has its own draw, and the unit is the whole row."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tf_labeldp.accounting import BudgetExceededError, Charge, PrivacyBudget
from tf_labeldp.mechanisms import (
    AggregateMechanism,
    LaplaceMechanism,
    RandomizedResponse,
    RRWithPrior,
)
from tf_labeldp.vault import (
    ClusterRandomizedResponse,
    LabelKind,
    LabelRandomizer,
    LabelStoreError,
    PrivateLabels,
    Rows,
)

L = 3
ROWS = np.random.default_rng(8).integers(0, 2, (100, L))
SECRET = 987654


def make(rows=ROWS, epsilon=3.0, delta=0.0, num_labels=L, **arguments):
    budget = PrivacyBudget(epsilon, delta)
    return PrivateLabels(rows, Rows(num_labels), budget=budget, **arguments)


def response(epsilon=1.0):
    return RandomizedResponse(epsilon, 2)


def test_a_row_is_charged_for_each_of_its_labels():
    vault = make(epsilon=3.0)
    vault.check_budget(response(1.0))
    with pytest.raises(BudgetExceededError, match=r"epsilon=3\.0003.*over the budget epsilon=3"):
        vault.randomize(response(1.0001))
    noisy = vault.randomize(response(1.0))
    for stated in (vault.guarantee(), noisy.guarantee()):
        assert stated.epsilon == 3.0
        assert stated.unit == "the whole row of labels of one training example"
    with pytest.raises(BudgetExceededError):
        vault.randomize(response(1e-6), [7])


def test_the_draws_of_a_row_compose_with_a_delta():
    vault = make(np.zeros((1000, 40), int), 60.0, 1e-4, num_labels=40)
    vault.randomize(response(0.1))
    composed = Charge.composed(Counter([Charge.of(response(0.1))] * 40), 1e-4).epsilon
    assert vault.guarantee().epsilon == pytest.approx(composed, rel=1e-9)
    assert 0.1 < composed < 0.7 * 40 * 0.1


@pytest.mark.parametrize("kind", [list, lambda rows: rows.astype(bool)])
def test_rows_keep_their_order(kind):
    noisy = make(kind(ROWS), epsilon=180.0).randomize(response(60.0), [5, 2, 99])
    assert noisy.values.dtype == np.int64
    np.testing.assert_array_equal(noisy.values, ROWS[[5, 2, 99]])  # There is no noise at 60.
    np.testing.assert_array_equal(noisy.indices, [5, 2, 99])


def test_labels_of_a_row_are_drawn_independently_by_the_channel():
    from scipy import stats

    rows = np.tile([[0, 1, 1]], (20_000, 1))
    noisy = make(rows, insecure_seed=4).randomize(response(1.0)).values
    flipped = noisy != rows
    rate = response(1.0).transition_matrix()[0, 1]
    for column in flipped.T:
        assert stats.binomtest(int(column.sum()), 20_000, rate).pvalue > 1e-6
        assert stats.binomtest(int(column.sum()), 20_000, 1.1 * rate).pvalue < 1e-6
    for first, second in ((0, 1), (0, 2), (1, 2)):
        together = int(np.sum(flipped[:, first] & flipped[:, second]))
        assert stats.binomtest(together, 20_000, rate**2).pvalue > 1e-6
        assert stats.binomtest(together, 20_000, rate).pvalue < 1e-6


def test_each_label_has_its_targets():
    noisy = make().randomize(response(1.0))
    matrix = response(1.0).transition_matrix()
    for prior in ("uniform", 0.2, np.array([0.1, 0.5, 0.9]), np.full(ROWS.shape, 0.3)):
        share = np.broadcast_to(0.5 if isinstance(prior, str) else prior, ROWS.shape)
        ones = matrix[1, noisy.values] * share
        zeros = matrix[0, noisy.values] * (1.0 - share)
        np.testing.assert_allclose(noisy.posterior(prior), ones / (ones + zeros), rtol=1e-12)
    unbiased = (noisy.values - matrix[0, 1]) / (matrix[1, 1] - matrix[0, 1])
    np.testing.assert_allclose(noisy.debiased(), unbiased, rtol=1e-9)
    batches = noisy.to_dataset(ROWS, "posterior").batch(50)
    np.testing.assert_allclose(np.concatenate([y for _, y in batches]), noisy.posterior(), 1e-6)


def test_posteriors_of_rows_have_the_shares_of_their_columns():
    """Each share has a standard error of 0.0060 at epsilon 1 and 20,000 rows."""
    shares = np.array([0.02, 0.5, 0.9])
    rows = (np.random.default_rng(5).random((20_000, L)) < shares).astype(int)
    noisy = make(rows, insecure_seed=6).randomize(response(1.0))
    np.testing.assert_allclose(noisy.posterior().mean(axis=0), rows.mean(axis=0), atol=0.03)
    uniform = noisy.posterior("uniform").mean(axis=0)
    assert uniform[0] > 0.3 and uniform[2] < 0.7


def test_the_store_returns_the_same_rows(tmp_path, no_new_randomness):
    first = make(store=tmp_path / "s").randomize(response(), key="a")
    other = ROWS.copy()
    other[7, 1] ^= 1
    for rows, length, message in (
        (other, L, "made for other labels"),
        (ROWS[:, :2], 2, "other settings: labels_in_row differ"),
    ):
        with pytest.raises(LabelStoreError, match=message):
            PrivateLabels(rows, Rows(length), store=tmp_path / "s")
    again = PrivateLabels(ROWS, Rows(L), store=tmp_path / "s")
    no_new_randomness()
    found = again.randomize(response(), key="a")
    np.testing.assert_array_equal(found.values, first.values)
    assert found.values.dtype == np.int64 and again.guarantee().epsilon == 3.0


@pytest.mark.parametrize(
    "mechanism",
    [
        RandomizedResponse(1.0, 3),
        RRWithPrior(1.0, 2),
        LaplaceMechanism(1.0, 0.0, 1.0),
        ClusterRandomizedResponse.for_epsilon(1.0, 2),
        LabelRandomizer(1.0),
    ],
    ids=lambda mechanism: type(mechanism).__name__,
)
def test_other_mechanisms_are_refused(mechanism):
    vault = make()
    clusters = {"clusters": np.zeros(100, int)} if "Cluster" in type(mechanism).__name__ else {}
    with pytest.raises((TypeError, ValueError)):
        vault.randomize(mechanism, **clusters)
    assert vault.guarantee().epsilon == 0.0 and vault.receipts == ()


def test_properties():
    vault = make()
    assert (vault.num_labels, vault.unit, len(vault), vault.label_range) == (L, "row", 100, None)
    assert "num_labels=3" in repr(vault) and "n=100" in repr(vault)
    for ask in (lambda: vault.num_classes, lambda: vault.classes, lambda: vault.decode([0])):
        with pytest.raises(ValueError, match=r"rows of 3 zeros and ones and have no classes"):
            ask()
    assert PrivateLabels([0, 1], 2, budget=PrivacyBudget(1.0)).num_labels is None


def test_bad_rows_are_refused_and_not_shown():
    for rows, arguments, error, message in [
        ([0, 1, 1], {}, ValueError, r"shape \(n, 3\).*got \(3,\)"),
        (ROWS[:, :2], {}, ValueError, r"got \(100, 2\).*number of columns"),
        ([[0, 1, SECRET]], {}, ValueError, "zeros and ones, but 1 of 3 are not"),
        ([[0, np.nan, 1.0]], {}, ValueError, "1 of 3 labels are missing"),
        ([["0", "1", str(SECRET)]], {}, TypeError, "zeros and ones, got dtype <U"),
        (
            np.ma.array([[0, 1, SECRET]], mask=[[0, 0, 1]]),
            {},
            ValueError,
            "1 of 3 labels are missing",
        ),
        (ROWS, {"num_classes": 2}, ValueError, r"once, got Rows\(num_labels=3\) and num_classes=2"),
    ]:
        with pytest.raises(error, match=message) as caught:
            make(rows, **arguments)
        assert str(SECRET) not in str(caught.value)
    for arguments, message in [
        ({"num_classes": 2}, "classes together with num_labels"),
        ({"low": 0.0, "high": 1.0}, "low and high together with num_labels"),
    ]:
        with pytest.raises(ValueError, match=message):
            LabelKind.of(num_labels=3, **arguments)


class CountedOnes(AggregateMechanism):
    """A statistic of rows that also states the two values of each label."""

    epsilon, num_labels, num_classes = 1.0, 2, 2

    def release(self, labels, public_input=None, *, rng=None):
        return np.sum(labels, axis=0) + np.random.default_rng().laplace(scale=2.0, size=2)


def test_a_statistic_of_rows_may_state_the_values_of_their_labels():
    labels = PrivateLabels([[0, 1], [1, 1]] * 20, Rows(2), budget=PrivacyBudget(1.0))
    assert labels.release(CountedOnes()).values.shape == (2,)
