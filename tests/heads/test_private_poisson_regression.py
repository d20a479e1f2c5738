"""Poisson regression from one release: against scikit-learn, its risk, what it refuses."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from sklearn.linear_model import PoissonRegressor

from tf_labeldp.accounting import PrivacyBudget
from tf_labeldp.heads import PrivatePoissonRegression, PrivateRidge
from tf_labeldp.vault import Numbers, PrivateLabels

pytestmark = pytest.mark.usefixtures("fits_apart")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20_000, 4))
UNIT = (X - X.mean(axis=0)) / np.linalg.norm(X - X.mean(axis=0), axis=1, keepdims=True)
RATES = np.exp(1.5 * UNIT[:, 0] - 0.8 * UNIT[:, 1] - 0.5)
Y = np.minimum(RNG.poisson(RATES), 10)


def head(epsilon=1.0, delta=1e-6, seed=0, **arguments):
    return PrivatePoissonRegression(
        epsilon, delta, insecure_seed=seed, **({"low": 0, "high": 10} | arguments)
    )


def loss(predicted, truth=Y):
    return float(np.mean(predicted - truth * np.log(predicted)))


def test_at_a_huge_epsilon_it_is_poisson_regression_on_unit_rows():
    one = head(1e5, penalty=0.25, spread=False).fit(X, Y)
    model = PoissonRegressor(alpha=0.0, tol=1e-8, max_iter=1000).fit(UNIT, Y)
    np.testing.assert_allclose(one.coef_[0], model.coef_, atol=0.01)
    np.testing.assert_allclose(one.intercept_[0], model.intercept_, atol=0.01)
    np.testing.assert_allclose(one.predict(X), model.predict(UNIT).clip(0, 10), rtol=0.01)
    # Far from a linear fit.
    assert (
        loss(one.predict(X))
        < loss(
            PrivateRidge(1e5, 1e-6, low=0, high=10, insecure_seed=0).fit(X, Y).predict(X).clip(1e-3)
        )
        - 0.02
    )


@pytest.mark.slow
def test_risk_is_the_loss_on_true_labels_within_its_spread():
    """And noise costs it less than it costs least squares."""
    excess, gains = [], []
    for seed in range(8):
        one = head(0.5, seed=seed).fit(X, Y)
        own = one.predict(X)
        excess.append(one.risk_ - loss(own))
        ridge = PrivateRidge(0.5, 1e-6, low=0, high=10, insecure_seed=seed).fit(X, Y).predict(X)
        gains.append(np.mean((ridge - RATES) ** 2) - np.mean((own - RATES) ** 2))
        assert abs(own.sum() / Y.sum() - 1.0) < 0.05
    error = np.std(excess, ddof=1) / np.sqrt(len(excess))
    assert abs(np.mean(excess)) < 4.5 * error < 0.1
    assert np.mean(gains) > 4.5 * np.std(gains, ddof=1) / np.sqrt(len(gains))


@pytest.mark.parametrize("low", [0, 1])
def test_the_model_says_what_the_head_says(low, tmp_path):
    one = head(2.0, low=low, high=6).fit(X, np.clip(Y, low, 6))
    expected = one.predict(X[:500])
    assert expected.min() >= low and expected.max() <= 6
    model = one.to_keras()
    model.save(tmp_path / "head.keras")
    for made in (model, keras.models.load_model(tmp_path / "head.keras")):
        np.testing.assert_allclose(made(X[:500])[:, 0], expected, rtol=1e-5, atol=1e-5)


def test_few_labels_and_labels_that_are_all_zero_have_a_model():
    with pytest.warns(UserWarning, match="indistinguishable from noise"):
        found = head(0.1, delta=1e-3).fit(X[:200], Y[:200]).predict(X)
    assert np.isfinite(found).all() and 0.0 < found.min() and found.max() <= 10.0
    with pytest.warns(UserWarning, match="indistinguishable from noise"):
        none = head(1.0).fit(X[:5000], np.zeros(5000)).predict(X[:5000])
    assert 0.0 < none.mean() < 0.1


def test_other_labels_and_no_intercept_are_refused_before_the_release():
    with pytest.raises(ValueError, match=r"numbers of zero or more, got numbers in \[-1, "):
        head(low=-1).fit(X, Y)
    budget = PrivacyBudget(1.0, 1e-6)
    for vault, arguments, match in (
        (PrivateLabels(Y % 2, 2, budget=budget), {}, "got 2 classes"),
        (PrivateLabels(Y, Numbers(0, 10), budget=budget), {"intercept": False}, "an intercept"),
        (PrivateLabels(Y, Numbers(0, 10), budget=budget), {"penalty": "bayes"}, "must be 'auto'"),
    ):
        with pytest.raises(ValueError, match=match):
            PrivatePoissonRegression(1.0, 1e-6, **arguments).fit(X, vault)
        assert not vault.history()
