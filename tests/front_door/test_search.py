"""The search over arguments: what it charges, what it chooses, and what it refuses."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone

import tf_labeldp as ldp
from tf_labeldp.accounting import BudgetExceededError
from tf_labeldp.features import RandomFourierFeatures
from tf_labeldp.vault import Numbers

N = 4000
RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(N, 5))
CIRCLE = (np.linalg.norm(ROWS[:, :2], axis=1) > 1.2).astype(int)  # no line divides it
NUMBERS = np.clip(ROWS[:, 0], -2.0, 2.0)


def vault(labels=CIRCLE, epsilon=1.0, delta=1e-5, **arguments):
    kind = {} if "kind" in arguments else {"num_classes": 2}
    return ldp.PrivateLabels(
        labels,
        budget=ldp.PrivacyBudget(epsilon, delta),
        **{**kind, "insecure_seed": 1, **arguments},
    )


def maps():
    """Two feature maps: a head can separate the circle with the second alone."""
    return [None, RandomFourierFeatures().fit(ROWS)]


def search(grid, epsilon=1.0, **arguments):
    return ldp.PrivateSearchCV(ldp.PrivateRidge(1.0, 1e-5), grid, epsilon, **arguments)


@pytest.mark.holds("front_door.PrivateSearchCV")
def test_the_better_map_is_chosen_and_the_whole_costs_epsilon():
    labels = vault(insecure_seed=None)
    encoders = maps()
    found = search({"encoder": encoders}).fit(ROWS, labels)
    assert found.best_params_["encoder"] is encoders[1] and found.best_index_ == 1
    assert found.best_estimator_.encoder is encoders[1]
    spent = labels.guarantee().epsilon
    assert 0.999 < spent <= 1.0 and found.guarantee().epsilon == pytest.approx(spent)
    # Each of two Gaussian releases has half the precision: more than epsilon / 2.
    assert 0.6 < found.epsilon_of_fit_ < 1.0
    assert [use.examples for use in labels.history()] == [3200, 3200, 800]
    assert np.mean(found.predict(ROWS) == CIRCLE) > 0.7
    assert found.predict_proba(ROWS).shape == (N, 2)
    assert found.score(ROWS, CIRCLE) == np.mean(found.predict(ROWS) == CIRCLE)


@pytest.mark.holds("front_door.PrivateSearchCV")
def test_the_best_estimator_states_the_choice_and_all_fits(tmp_path):
    """One held-out label changes the chance of a choice by up to e^epsilon."""
    labels = vault(insecure_seed=None)
    found = search({"spread": [True, False], "penalty": [1.0, 9.0]}).fit(ROWS, labels)
    whole = labels.guarantee().epsilon
    best = found.best_estimator_
    assert found.epsilon_of_fit_ < 0.7 < 0.999 < whole
    folders = tmp_path / "best", tmp_path / "search"
    stated = [
        found.guarantee(),
        best.guarantee(),
        ldp.guarantee(best.to_keras()),
        ldp.guarantee(found.to_keras()),
        ldp.save(best, folders[0]),
        ldp.save(found, folders[1]),
        *(ldp.guarantee(folder / "model.keras") for folder in folders),
    ]
    assert [each.epsilon for each in stated] == pytest.approx([whole] * len(stated))
    np.testing.assert_allclose(
        ldp.load_model(folders[1] / "model.keras").predict(ROWS, verbose=0),
        found.predict_proba(ROWS),
        atol=1e-5,
    )


def test_noisy_labels_of_the_best_estimator_state_the_choice():
    labels = vault(insecure_seed=None, epsilon=2.0)
    boosting = ldp.PrivateBoosting()
    found = ldp.PrivateSearchCV(boosting, {"max_trees": [5, 10]}, 2.0).fit(ROWS, labels)
    noisy = found.best_estimator_.noisy_labels_
    assert noisy.guarantee().epsilon == pytest.approx(2.0) and found.epsilon_of_fit_ == 1.0
    kinds = [receipt.kind for receipt in noisy.receipts]
    assert sorted(kinds) == ["draw", "draw", "release"]


def test_an_estimator_without_a_keras_model_gives_the_search_none():
    class Own(ldp.PrivateRidge):
        to_keras = property()

    assert hasattr(search({"penalty": [1.0]}), "to_keras")
    assert not hasattr(ldp.PrivateSearchCV(Own(1.0, 1e-5), {"penalty": [1.0]}, 1.0), "to_keras")


def test_penalties_share_one_release():
    labels = vault()
    found = search({"penalty": [0.1, 10.0, "auto"]}).fit(ROWS, labels)
    assert len(found.candidates_) == 3 and found.epsilon_of_fit_ > 0.999
    assert [use.examples for use in labels.history()] == [3200, 800]


def test_numbers_and_pure_budgets():
    labels = vault(NUMBERS, kind=Numbers(-2.0, 2.0), delta=0.0)
    head = ldp.PrivateRidge(1.0, noise="laplace")
    found = ldp.PrivateSearchCV(head, {"center": [True, False]}, 1.0, metric="mae").fit(
        ROWS, labels
    )
    assert found.epsilon_of_fit_ == 0.5
    assert labels.guarantee() == found.guarantee() and labels.guarantee().delta == 0.0
    assert labels.guarantee().epsilon == pytest.approx(1.0)
    assert found.score(ROWS, NUMBERS) > 0.5


@pytest.mark.slow
def test_front_doors_and_tables_can_be_searched():
    table = pd.DataFrame(ROWS).add_prefix("c")
    grid = {"encoder": [RandomFourierFeatures().fit(table)]}
    found = ldp.PrivateSearchCV(ldp.PrivateClassifier(1.0), grid, 1.0).fit(table, vault())
    assert found.predict(table).shape == (N,)
    columns = {name: table[name].to_numpy() for name in table}
    as_dict = ldp.PrivateSearchCV(ldp.PrivateClassifier(1.0), grid, 1.0).fit(columns, vault())
    np.testing.assert_array_equal(as_dict.predict(columns), found.predict(table))
    assert clone(found).get_params()["epsilon"] == 1.0 and not hasattr(clone(found), "receipts_")


@pytest.mark.slow
def test_an_interrupted_search_goes_on_with_its_stored_fits(tmp_path, monkeypatch):
    grid = {"encoder": maps()}

    def labels():
        return vault(insecure_seed=None, store=tmp_path / "private")

    predict, killed = ldp.PrivateRidge.predict_proba, labels()

    def stop(self, rows):
        return 1 / 0 if killed.has_draw("search/1") else predict(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(ldp.PrivateRidge, "predict_proba", stop)
        with pytest.raises(ZeroDivisionError):  # after both fits, before the choice
            search(grid).fit(ROWS, killed)
    again = labels()
    assert len(again.history()) == 2
    search(grid).fit(ROWS, again)
    assert len(again.history()) == 3 and again.guarantee().epsilon <= 1.0
    first = search(grid).fit(ROWS, labels())
    assert len(labels().history()) == 3 and first.best_index_ == 1


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"grid": {"epsilon": [1.0, 2.0]}}, ValueError, "param_grid has epsilon"),
        ({"grid": {"nothing": [1]}}, ValueError, "nothing"),
        ({"labels": CIRCLE}, TypeError, "must be a PrivateLabels, got ndarray"),
        ({"epsilon": 2.0}, BudgetExceededError, "over the budget"),
        ({"metric": "mse"}, ValueError, "metric must be"),
        ({"held_out": 1.5}, ValueError, "held_out"),
    ],
)
def test_bad_input_charges_nothing(change, error, message):
    labels = change.pop("labels", None)
    private = vault() if labels is None else labels
    grid = change.pop("grid", {"penalty": [1.0]})
    with pytest.raises(error, match=message):
        search(grid, **change).fit(ROWS, private)
    if labels is None:
        assert not private.history()


def test_boosting_shares_epsilon_between_fits_and_never_costs_more():
    labels = vault(insecure_seed=None, epsilon=2.0)
    grid = {"max_trees": [5, 20]}
    found = ldp.PrivateSearchCV(ldp.PrivateBoosting(), grid, 2.0)
    found.fit(ROWS, labels)
    assert found.epsilon_of_fit_ == 1.0
    assert found.guarantee().epsilon == pytest.approx(2.0) == labels.guarantee().epsilon


def test_a_front_door_that_may_boost_is_refused_before_a_release():
    """Draws of randomized response cost more together than the Gaussian releases of heads."""
    numbers = vault(NUMBERS + 2.0, 9.0, kind=Numbers(0.0, 4.0))
    losses = {"loss": ["squared_error", "poisson"]}
    for estimator, labels, grid in (
        (ldp.PrivateClassifier(1.0, method="boosting"), vault(epsilon=9.0), {"epochs": [5, 10]}),
        (ldp.PrivateRegressor(1.0, method="boosting"), numbers, losses),
    ):
        with pytest.raises(ValueError, match="method='boosting', which may draw noisy labels"):
            ldp.PrivateSearchCV(estimator, grid, 2.0).fit(ROWS, labels)
        assert not labels.history()


def test_a_search_in_a_part_of_a_vault_reads_the_rows_of_that_part():
    labels = vault(insecure_seed=None, epsilon=4.0)
    part, _ = labels.split(np.arange(N // 2))
    found = search({"encoder": maps()}, 4.0).fit(ROWS[part.indices], part)
    assert found.best_index_ == 1 and found.score(ROWS, CIRCLE) > 0.7


def test_weights_reach_the_fits_alone():
    """Weights of zero leave out a third class of the fits, and no example of the choice."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(900, 3))
    y = np.argmax(x, axis=1)
    labels = ldp.PrivateLabels(y, 3, budget=ldp.PrivacyBudget(5.0, 1e-5), insecure_seed=0)
    search = ldp.PrivateSearchCV(ldp.PrivateRidge(1.0, 1e-5), {"penalty": [1.0, 9.0]}, 5.0, 1e-5)
    search.fit(x, labels, sample_weight=(y < 2).astype(float))  # as if the labels were public
    assert (search.predict(x) == 2).mean() < 0.02
    assert search.guarantee().epsilon == pytest.approx(5.0, rel=1e-3)
