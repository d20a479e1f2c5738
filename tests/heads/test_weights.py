"""Weights of examples scale the sensitivity, and weights of classes the released probabilities."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from fits import release_of
from sklearn.base import clone

import tf_labeldp as ldp
from tf_labeldp.boosting import PrivateBoosting
from tf_labeldp.heads import NoiseCluster, PrivateLogisticRegression, PrivatePoissonRegression

pytestmark = [
    pytest.mark.usefixtures("fits_apart"),
    pytest.mark.filterwarnings("ignore:the release is indistinguishable"),
]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(600, 4)) + 0.3
CLASSES = np.argmax(X[:, :3] + RNG.normal(size=(600, 3)), axis=1)
KINDS = {
    "binary": ({"num_classes": 2}, np.minimum(CLASSES, 1)),
    "classes": ({"num_classes": 3}, CLASSES),
    "numbers": ({"low": 0.0, "high": 8.0}, np.clip(X[:, 0] + RNG.normal(size=600) + 3, 0, 8)),
    "rows": ({"num_labels": 3}, np.eye(3, dtype=int)[CLASSES]),
}
WEIGHTS = RNG.integers(1, 4, 600)
FITS = [
    *((ldp.PrivateRidge, kind) for kind in KINDS),
    *((PrivateLogisticRegression, kind) for kind in ("binary", "classes", "rows")),
    (PrivatePoissonRegression, "numbers"),
]


def outputs(head, x=X):
    return head.predict_proba(x) if hasattr(head, "predict_proba") else head.predict(x)


class Weighted:
    """Fits a head with weights, as ``release_of`` fits one."""

    def __init__(self, head, weights):
        self._head, self._weights = head, weights

    def fit(self, x, labels):
        return self._head.fit(x, labels, sample_weight=self._weights)


@pytest.mark.parametrize(("kind", "labels"), FITS)
def test_a_weight_counts_like_that_many_equal_rows(kind, labels):
    """At a huge epsilon, where the noise of one row or three is nothing."""
    arguments, y = KINDS[labels]
    head = kind(1e4, 1e-4, insecure_seed=0, **arguments)
    weighted = outputs(clone(head).fit(X, y, sample_weight=WEIGHTS))
    repeated = clone(head).fit(np.repeat(X, WEIGHTS, axis=0), np.repeat(y, WEIGHTS, axis=0))
    np.testing.assert_allclose(weighted, outputs(repeated), atol=0.005)
    assert np.abs(outputs(head.fit(X, y)) - weighted).max() > 0.02
    # Only their ratios count.
    again = clone(head).fit(X, y, sample_weight=0.5 * WEIGHTS)
    np.testing.assert_allclose(outputs(again), weighted, atol=1e-6)


@pytest.mark.holds("heads.PrivateRidge")
@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
@pytest.mark.parametrize("labels", KINDS)
def test_the_sensitivity_is_that_of_the_largest_weight_from_both_sides(labels, noise):
    arguments, y = KINDS[labels]
    delta = 1e-5 if noise == "gaussian" else 0.0
    head = ldp.PrivateRidge(1.0, delta, noise=noise, insecure_seed=0, **arguments)
    weights = np.where(np.arange(600) == 7, 5.0, 1.0)
    heaviest = 5.0 / weights.mean()
    mechanism, rows, *_ = release_of(Weighted(clone(head), weights), X, y)
    lengths = np.linalg.norm(rows, axis=1)
    assert lengths.argmax() == 7 and lengths[7] == pytest.approx(heaviest)
    # The bound holds, and 0.1 % less would be refused.
    assert heaviest <= mechanism.max_norm <= heaviest + 2.0**-14
    with pytest.raises(ValueError, match="at most max_norm"):
        dataclasses.replace(mechanism, max_norm=0.999 * heaviest).exact_sums(y, rows, 600)
    # The exact difference between neighbours has the stated length where it is largest.
    ends = {"numbers": (0.0, 8.0), "rows": (np.zeros(3, int), np.ones(3, int))}
    first, last = ends.get(labels, (0, 1))
    grid = mechanism._grid(600, rows.shape[1])
    differences = []
    for place in (7, 8):
        both = [y.copy(), y.copy()]
        both[0][place], both[1][place] = first, last
        one, other = (mechanism.exact_sums(each, rows, 600)[0] for each in both)
        differences.append(grid.unit * np.linalg.norm(one - other))
    # Of the codes of two labels: numbers are in half ranges of 4.
    lengths = {"binary": 1.0, "classes": math.sqrt(2.0), "numbers": 8.0, "rows": math.sqrt(3)}
    assert differences[0] == pytest.approx(lengths[labels] * heaviest, rel=1e-3)
    assert differences[1] == pytest.approx(differences[0] / 5.0, rel=1e-3)
    # The noise grows with the weight, and the price stays.
    plain, *_ = release_of(clone(head), X, y)
    spread = [each.noise_stddev(600, rows.shape[1]) for each in (mechanism, plain)]
    if noise == "gaussian":
        assert spread[0] / spread[1] == pytest.approx(mechanism.max_norm, rel=1e-3)
    else:
        assert mechanism.max_l1 >= np.abs(rows).sum(axis=1).max() > mechanism.max_l1 - 2.0**-13
    assert (mechanism.epsilon, mechanism.delta) == (plain.epsilon, plain.delta) == (1.0, delta)


def test_rows_of_weight_zero_say_nothing():
    arguments, y = KINDS["classes"]
    weights = (np.arange(600) < 300).astype(float)
    other = np.where(np.arange(600) < 300, y, 0)
    head = ldp.PrivateRidge(1.0, 1e-5, insecure_seed=0, **arguments)
    found = [outputs(clone(head).fit(X, each, sample_weight=weights)) for each in (y, other)]
    np.testing.assert_array_equal(*found)
    # The statement names who vouches for the weights.
    assert "features, weights, encoders and networks" in str(head.fit(X, y, weights).guarantee())


@pytest.mark.parametrize("kind", [ldp.PrivateRidge, PrivateLogisticRegression])
@pytest.mark.parametrize("labels", ["binary", "classes"])
def test_class_weights_multiply_the_probabilities(kind, labels):
    arguments, y = KINDS[labels]
    head = kind(5.0, 1e-5, insecure_seed=0, **arguments).fit(X, y)
    weights = np.array([1.0, 4.0, 0.5])[: arguments["num_classes"]]
    named = dict(enumerate(weights.tolist()))
    weighted = clone(head).set_params(class_weight=named).fit(X, y)
    expected = head.predict_proba(X) * weights
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(weighted.predict_proba(X), expected, atol=1e-9)
    np.testing.assert_array_equal(weighted.predict(X), expected.argmax(axis=1))
    assert weighted.guarantee().epsilon == head.guarantee().epsilon
    model = weighted.to_keras()
    np.testing.assert_allclose(model(X.astype(np.float32)), expected, atol=1e-5)


@pytest.mark.parametrize(
    "head",
    [
        ldp.PrivateRidge(5.0, 1e-5),
        PrivateLogisticRegression(5.0, 1e-5),
        NoiseCluster(9, 5.0),
        PrivateBoosting(5.0),
        pytest.param(ldp.PrivateClassifier(5.0, 1e-5), marks=pytest.mark.slow),
    ],
    ids=lambda head: type(head).__name__,
)
def test_balanced_weights_come_from_the_release(head):
    """The rare class is found, and the vault is charged for no second release."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(3000, 3))
    y = (x[:, 0] + 0.5 * rng.normal(size=3000) > 1.9).astype(int)
    assert y.mean() < 0.07
    found = []
    for weights in (None, "balanced"):
        labels = ldp.PrivateLabels(y, 2, budget=ldp.PrivacyBudget(5.0, 1e-5), insecure_seed=3)
        fitted = clone(head).set_params(class_weight=weights).fit(x, labels)
        assert len(labels.receipts) == 1 and fitted.guarantee() == labels.guarantee()
        found.append(fitted.predict(x)[y == 1].mean())
    assert found[1] > 0.75 and found[1] > found[0] + 0.1


@pytest.mark.slow
def test_the_front_door_passes_weights_on():
    arguments, y = KINDS["classes"]
    weights = np.where(y == 2, 3.0, 1.0)  # as if the labels were public
    door = ldp.PrivateClassifier(5.0, 1e-5, insecure_seed=0, **arguments)
    shares = [
        clone(door).fit(X, y, sample_weight=each).predict_proba(X).mean(axis=0)[2]
        for each in (None, weights)
    ]
    assert shares[1] > 1.5 * shares[0]
    labels = ldp.PrivateLabels(y, 3, budget=ldp.PrivacyBudget(5.0, 1e-5))
    held_out = ldp.PrivateClassifier(5.0, 1e-5, budget_for_evaluation=1.0)
    assert held_out.fit(X, labels, sample_weight=weights).evaluation_.value > 0.3
    numbers, z = KINDS["numbers"]
    regressor = ldp.PrivateRegressor(5.0, 1e-5, insecure_seed=0, method="head", **numbers)
    regressor.fit(X, z, sample_weight=np.where(z > 4.0, 5.0, 1.0))
    assert regressor.predict(X).mean() > z.mean() + 0.3


BAD = {
    "length": ({}, WEIGHTS[1:], r"expected sample_weight of shape \(600,\).*got \(599,\)"),
    "negative": ({}, -1.0 * WEIGHTS, "at least zero"),
    "infinite": ({}, np.where(WEIGHTS > 2, np.inf, 1.0), "finite"),
    "all zero": ({}, 0.0 * WEIGHTS, "not all zero"),
    "class": ({"class_weight": {7: 2.0}}, None, r"for the classes \[0, 1, 2\], got \[7\]"),
    "zero": ({"class_weight": {1: 0.0}}, None, r"class_weight must be in \(0, 1e38\]"),
    "word": ({"class_weight": "equal"}, None, "must be one of balanced"),
    "intercept": ({"class_weight": {1: 2.0}, "intercept": False}, None, "needs an intercept"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_weights_are_refused_before_anything_is_charged(case):
    arguments, weights, message = BAD[case]
    labels = ldp.PrivateLabels(CLASSES, 3, budget=ldp.PrivacyBudget(1.0, 1e-5))
    with pytest.raises(ValueError, match=message):
        ldp.PrivateRidge(1.0, 1e-5, **arguments).fit(X, labels, sample_weight=weights)
    assert labels.receipts == ()


def test_class_weights_are_for_classes():
    for kind in ("numbers", "rows"):
        arguments, y = KINDS[kind]
        with pytest.raises(ValueError, match="class_weight is for classes"):
            ldp.PrivateRidge(1.0, 1e-5, class_weight={1: 2.0}, **arguments).fit(X, y)
