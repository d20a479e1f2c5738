"""Logistic regression from one release: against scikit-learn, its choices, its probabilities."""

from __future__ import annotations

import os

import numpy as np
import pytest
from fits import release_of

from tf_labeldp.accounting import PrivacyBudget
from tf_labeldp.heads import PrivateLogisticRegression, PrivateRidge, _logistic
from tf_labeldp.vault import Numbers, PrivateLabels

pytestmark = pytest.mark.usefixtures("fits_apart")


def head(epsilon=1.0, delta=1e-6, seed=0, **arguments):
    return PrivateLogisticRegression(
        epsilon, delta, insecure_seed=seed, **({"num_classes": 3} | arguments)
    )


def scikit_learns(one, examples, labels, penalty):
    """scikit-learn's scores on the same scaled rows, with a free intercept."""
    from sklearn.linear_model import LogisticRegression

    rows = release_of(one, examples.features, labels)[1][:, :-1]
    model = LogisticRegression(C=1.0 / penalty, tol=1e-8, max_iter=2000)
    return model.fit(rows, labels).decision_function(rows)


@pytest.mark.parametrize(
    ("kind", "spread"), [("classes", True), ("binary", False), ("rows", False)]
)
def test_at_a_huge_epsilon_it_is_logistic_regression_on_unit_rows(kind, spread, examples):
    """Scores within 1 % of their size, up to the intercept, which is refitted after sharpening.

    With half or twice the penalty they are further off.

    At a huge budget the penalty of the Bayes filter is ``s^2 / t^2`` in all directions, which
    PrivateRidge reports, times the curvature at zero and the multiple. Rows of labels are as many
    separate fits.
    """
    arguments, labels = examples.kinds[kind]
    settings = {"insecure_seed": 0, "spread": spread, **arguments}
    multiple = 5e4
    one = PrivateLogisticRegression(1e5, 1e-6, penalty=multiple, **settings)
    one.fit(examples.features, labels)
    prior = PrivateRidge(1e5, 1e-6, **settings).fit(examples.features, labels).prior_
    curvature = 1.0 / 3.0 if kind == "classes" else 0.25
    penalty = multiple * curvature
    penalty *= (prior["residual_stddev"] / prior["coefficient_stddev"]) ** 2
    found = one.decision_function(examples.features)
    if kind != "classes":
        found = 2.0 * found  # halves of log-odds

    def distance(penalty):
        if kind == "rows":
            binary = PrivateLogisticRegression(1e5, 1e-6, num_classes=2, spread=spread)
            parts = [scikit_learns(binary, examples, column, penalty) for column in labels.T]
            expected = np.stack(parts, axis=1)
        else:
            expected = scikit_learns(one, examples, labels, penalty)
        difference = found - expected
        return np.abs(difference - difference.mean(axis=0)).max() / np.abs(expected).max()

    assert distance(penalty) < 0.01
    assert min(distance(0.5 * penalty), distance(2.0 * penalty)) > 0.03


@pytest.mark.slow
def test_the_chosen_multiple_is_a_local_minimum_of_what_was_tried(examples):
    for epsilon in (0.3, 3.0):
        one = head(epsilon).fit(examples.features, examples.classes)
        multiples, estimates = one.risk_path_
        place = int(np.flatnonzero(multiples == one.penalty_)[0])
        assert np.all(np.diff(multiples) > 0) and np.all(np.log2(multiples) % 1 == 0)
        assert one.risk_ == estimates[place]
        neighbours = estimates[max(place - 1, 0) : place + 2]
        assert np.all(estimates[place] <= neighbours)
        assert 0 < place < len(multiples) - 1 or multiples[place] in (0.25, 4096.0)


def test_a_given_multiple_is_kept(examples):
    one = head(penalty=16.0).fit(examples.features, examples.classes)
    assert one.penalty_ == 16.0
    assert one.risk_path_[0].tolist() == [16.0] and one.risk_path_[1].tolist() == [one.risk_]
    # The larger multiple shrinks more; the release is the same one.
    strong = head(penalty=256.0).fit(examples.features, examples.classes)
    assert np.linalg.norm(strong.coef_) < np.linalg.norm(one.coef_)


@pytest.mark.parametrize("kind", ["classes", "rows"])
def test_probabilities_are_calibrated(kind, examples):
    """Mean confidence and the share of right predictions agree within 0.03; twice as sharp not."""
    arguments, labels = examples.kinds[kind]
    one = PrivateLogisticRegression(2.0, 1e-6, insecure_seed=0, **arguments)
    one.fit(examples.features, labels)
    right = np.mean(one.predict(examples.features) == labels)
    probabilities = one.predict_proba(examples.features)
    if kind == "rows":
        probabilities = np.stack([1.0 - probabilities, probabilities], axis=-1)
    assert probabilities.max(axis=-1).mean() == pytest.approx(right, abs=0.03)
    for factor in (0.5, 2.0):
        powered = probabilities**factor
        powered /= powered.sum(axis=-1, keepdims=True)
        assert abs(powered.max(axis=-1).mean() - right) > 0.03


def test_the_estimated_log_loss_is_that_of_the_training_set(examples):
    """The noise of the estimate is sigma / n times the length of the sharpened coefficients."""
    x, y = examples.features, examples.classes
    for epsilon in (1.0, 100.0):
        one = head(epsilon, spread=False).fit(x, y)
        true = -np.log(one.predict_proba(x)[np.arange(len(y)), y]).mean()
        sigma = one.noise_stddev_ * np.linalg.norm(one.coef_) * one.sharpness_ / len(y)
        assert one.risk_ == pytest.approx(true, abs=max(5.2 * sigma, 1e-3))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classes", "binary"])
def test_the_standard_errors_are_those_of_many_fits(kind, examples):
    """In total within 30 %, to first order; for single coefficients within a factor of five.

    Of 30 fits, the root of a mean square of 8 or 24 is known to 6 % or better.
    """
    arguments, labels = examples.kinds[kind]
    few = slice(0, 600)
    fits = [
        PrivateLogisticRegression(3.0, 1e-5, penalty=4.0, insecure_seed=seed, **arguments).fit(
            examples.features[few], labels[few]
        )
        for seed in range(30)
    ]
    found = np.var([one.coef_ for one in fits], axis=0)
    stated = np.mean(np.square([one.coef_stddev_ for one in fits]), axis=0)
    assert found.mean() / stated.mean() == pytest.approx(1.0, rel=0.6)  # of squares
    ratios = np.sqrt(found / stated)
    assert np.all((ratios > 0.2) & (ratios < 5.0))


def test_labels_that_are_numbers_are_refused_before_anything_is_charged(examples):
    vault = PrivateLabels(examples.numbers, Numbers(0.0, 50.0), budget=PrivacyBudget(1.0, 1e-6))
    with pytest.raises(ValueError, match="PrivateLogisticRegression expected"):
        PrivateLogisticRegression(1.0, 1e-6).fit(np.full((3000, 2), np.nan), vault)
    assert vault.guarantee().epsilon == 0.0


@pytest.mark.parametrize("penalty", ["bayes", 0.0])
def test_bad_penalties(penalty, examples):
    with pytest.raises(ValueError, match="penalty must be"):
        head(penalty=penalty).fit(examples.features, examples.classes)


def test_a_sample_of_the_rows_gives_nearly_the_same_fit(examples):
    """A quarter of 1e5 bytes holds 694 of the 3,000 rows of nine columns."""
    x, y = examples.features, examples.classes
    whole = head(20.0, penalty=8.0, spread=False, center=False).fit(x, y)
    part = head(20.0, penalty=8.0, spread=False, center=False, max_bytes=1e5).fit(x, y)
    scores = whole.decision_function(x).ravel(), part.decision_function(x).ravel()
    assert 0.98 < np.corrcoef(*scores)[0, 1] < 1.0 - 1e-9


@pytest.mark.filterwarnings("ignore:the release is indistinguishable")
def test_pure_noise_is_not_sharpened_into_certainties(examples):
    x, y = examples.features[:300], examples.classes[:300]
    fits = [head(1e-3, 1e-5, seed=seed, penalty=4.0).fit(x, y) for seed in range(10)]
    sure = [one.predict_proba(x).max(axis=1).mean() for one in fits]
    # Were a Stein estimate taken as it is, half of them would be near one.
    assert np.count_nonzero(np.array(sure) > 0.9) <= 3


def test_the_penalty_is_chosen_on_few_rows_and_the_fit_is_to_all(examples, monkeypatch):
    """A multiple of nearly the least risk, and for one multiple nearly the same fit."""
    fits = []

    def counted(problem, *arguments):
        fits.append(len(problem.likelihood.rows))
        return fit(problem, *arguments)

    fit = _logistic.LikelihoodProblem.fit
    monkeypatch.setattr(_logistic.LikelihoodProblem, "fit", counted)
    x, y = examples.features, examples.classes
    fixed = head(3.0, penalty=8.0).fit(x, y)
    of_one_multiple = len(fits)
    whole = head(3.0).fit(x, y)
    assert set(fits) == {3000} and len(fits) > 2 * of_one_multiple
    fits.clear()
    monkeypatch.setattr(_logistic, "_CHOICE_ROWS", 900)
    part, again = head(3.0).fit(x, y), head(3.0, penalty=8.0).fit(x, y)
    assert set(fits) == {900, 3000} and fits.count(3000) == 2 * of_one_multiple
    assert part.risk_ == pytest.approx(whole.risk_, rel=0.02)
    np.testing.assert_allclose(again.coef_, fixed.coef_, atol=0.02 * np.abs(fixed.coef_).max())


def test_losses_of_many_scores_are_estimated_from_rows_that_the_fits_do_not_know(
    examples, monkeypatch
):
    fitted, judged = [], []

    def noted(name, rows):
        method = getattr(_logistic.Likelihood, name)

        def call(likelihood, *args):
            rows.append(likelihood.rows)
            return method(likelihood, *args)

        monkeypatch.setattr(_logistic.Likelihood, name, call)

    noted("value_and_gradient", fitted)
    noted("worth", judged)
    x, y = examples.features, examples.classes
    monkeypatch.setattr(_logistic, "_CHOICE_ROWS", 900)
    every = head(3.0).fit(x, y)
    assert {len(rows) for rows in judged} == {3000}
    judged.clear()
    monkeypatch.setattr(_logistic, "_LOSS_SCORES", 3000)
    part = head(3.0).fit(x, y)
    assert [len(rows) for rows in judged] == [1000] * (len(judged) - 1) + [3000]
    known = {row.tobytes() for rows in fitted if len(rows) == 900 for row in rows}
    assert not known & {row.tobytes() for row in judged[0]}
    assert part.risk_ == pytest.approx(every.risk_, rel=0.02)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen here")
def test_all_cores_give_the_numbers_of_one(monkeypatch):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 20)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    monkeypatch.setattr(_logistic, "_ENTRIES", 400)  # several blocks for each of several threads
    cores = os.sched_getaffinity(0)
    head = PrivateLogisticRegression(1.0, 1e-4, num_classes=2, insecure_seed=0)
    fits = []
    for allowed in ({min(cores)}, cores):
        os.sched_setaffinity(0, allowed)
        try:
            fits.append(head.fit(x, y).coef_.copy())
        finally:
            os.sched_setaffinity(0, cores)
    np.testing.assert_array_equal(*fits)
    monkeypatch.setattr(_logistic, "_BLOCKS", 10**6)
    np.testing.assert_allclose(head.fit(x, y).coef_, fits[0], rtol=1e-4)
