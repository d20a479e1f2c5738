"""Ridge: against its closed form, its penalties, labels of every kind, and what heads share."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from fits import release_of
from sklearn.metrics import accuracy_score, r2_score

from tf_labeldp.accounting import PrivacyBudget
from tf_labeldp.features import RandomFourierFeatures
from tf_labeldp.heads import PrivateLogisticRegression, PrivateRidge
from tf_labeldp.vault import LabelStoreError, PrivateLabels

pytestmark = pytest.mark.filterwarnings("ignore:this is fit number")
TINY = PrivacyBudget(1.0, 1e-6)


def head(epsilon=1.0, delta=1e-6, seed=0, **arguments):
    return PrivateRidge(epsilon, delta, insecure_seed=seed, **(arguments or {"num_classes": 3}))


@pytest.mark.usefixtures("fits_apart")
def test_three_classes(examples):
    x, y = examples.features, examples.classes
    one = head().fit(x, y)
    best = head(1e4, penalty=1e-3, num_classes=3).fit(x, y)
    assert one.score(x, y) > best.score(x, y) - 0.05
    assert best.score(x, y) > 0.65
    assert one.coef_.shape == (3, 8) and one.intercept_.shape == (3,)
    assert one.n_features_in_ == 8 and one.classes_.tolist() == [0, 1, 2]
    assert one.decision_function(x).shape == one.predict_proba(x).shape == (3000, 3)
    np.testing.assert_allclose(one.predict_proba(x).sum(axis=1), 1.0)
    np.testing.assert_array_equal(one.predict_proba(x).argmax(axis=1), one.predict(x))
    assert one.coef_stddev_.shape == (8,) and np.all(one.coef_stddev_ > 0)


@pytest.mark.parametrize("spread", [False, True], ids=["plain", "spread"])
def test_at_a_huge_epsilon_it_is_ridge_on_unit_rows(spread, examples):
    x = examples.features
    penalty = 50.0
    one = head(1e5, penalty=penalty, spread=spread, num_classes=3)
    released = release_of(one, x, examples.classes)[1]
    one.fit(x, examples.classes)
    features = x.astype(float) - x.mean(axis=0, dtype=float)
    rows = released[:, :-1] * math.hypot(1.0, 0.2)
    if not spread:
        np.testing.assert_allclose(
            rows, features / np.linalg.norm(features, axis=1, keepdims=True), atol=1e-6
        )
    codes = np.eye(3)[examples.classes] - 1 / 3
    centred, mean = rows - rows.mean(axis=0), codes.mean(axis=0)
    # The head's rows are 1 / sqrt(1 + 0.2^2) long, before the constant column.
    gram = centred.T @ centred + 1.04 * penalty * np.eye(8)
    weights = np.linalg.solve(gram, centred.T @ codes)
    intercept = mean - rows.mean(axis=0) @ weights
    # Numbers keep the intercept of least squares; for classes it matches the mean probabilities.
    shift = one.intercept_ - intercept
    scores = rows @ weights + intercept + shift
    np.testing.assert_allclose(one.decision_function(x), scores, atol=2e-3)
    frequencies = np.bincount(examples.classes) / len(x)
    np.testing.assert_allclose(one.predict_proba(x).mean(axis=0), frequencies, atol=1e-4)
    # The coefficients are those of the features, up to the length of the scaled row.
    expected, found = rows @ weights, features @ one.coef_.T
    expected, found = (
        scores / np.linalg.norm(scores, axis=1, keepdims=True) for scores in (expected, found)
    )
    np.testing.assert_allclose(found, expected, atol=0.05)


def test_two_classes_with_names(examples):
    x = examples.features
    names = np.array(["no", "yes"])[(x[:, 0] > 0.2).astype(int)]
    one = head(classes=["no", "yes"]).fit(x, names)
    assert one.score(x, names) > 0.9
    assert one.coef_.shape == (1, 8) and one.decision_function(x).shape == (3000,)
    assert set(one.predict(x)) == {"no", "yes"}
    assert one.predict_proba(x).shape == (3000, 2)
    assert np.all((one.predict_proba(x)[:, 1] > 0.5) == (one.predict(x) == "yes"))


def test_numbers_in_their_range(examples):
    one = head(low=0.0, high=50.0).fit(examples.features, examples.numbers)
    assert one.score(examples.features, examples.numbers) > 0.5  # lengths of rows are lost
    predicted = one.predict(examples.features)
    assert predicted.shape == (3000,) and predicted.min() >= 0.0 and predicted.max() <= 50.0
    assert predicted.mean() == pytest.approx(examples.numbers.mean(), abs=1.5)
    assert not hasattr(one, "predict_proba") and not hasattr(one, "decision_function")


def test_a_fit_to_numbers_leaves_nothing_of_a_fit_to_classes(examples):
    one = head().fit(examples.features, examples.classes)
    assert one.sharpness_ > 0.0
    one.set_params(num_classes=None, low=0.0, high=50.0).fit(examples.features, examples.numbers)
    assert not hasattr(one, "sharpness_") and one.classes_ is None


def test_rows_of_labels(examples):
    x = examples.features
    rows = np.column_stack([x[:, 0] > 0.2, x[:, 1] > 0.2]).astype(int)
    one = head(num_labels=2).fit(x, rows)
    assert one.predict(x).shape == one.predict_proba(x).shape == (3000, 2)
    assert np.mean(one.predict(x) == rows) > 0.9
    np.testing.assert_array_equal(one.predict_proba(x) > 0.5, one.predict(x) == 1)
    assert "whole row of labels" in str(one.guarantee())
    assert (one.guarantee().epsilon, one.guarantee().delta) == (1.0, 1e-6)


@pytest.mark.parametrize("kind", ["classes", "binary", "rows"])
@pytest.mark.parametrize("head_class", [PrivateRidge, PrivateLogisticRegression])
def test_mean_probabilities_equal_the_released_class_means(head_class, kind, examples):
    """At epsilon 50 the noise of a class mean is 1e-3; rare classes need their intercept."""
    arguments, labels = examples.kinds[kind]
    rare = examples.features[:, 0] > 1.2
    labels = np.where(rare if labels.ndim == 1 else rare[:, np.newaxis], labels, 0)
    one = head_class(50.0, 1e-6, insecure_seed=0, **arguments).fit(examples.features, labels)
    frequencies = labels.mean(axis=0)
    if labels.ndim == 1:
        frequencies = np.bincount(labels) / len(labels)
    means = one.predict_proba(examples.features).mean(axis=0)
    np.testing.assert_allclose(means, frequencies, atol=5e-3)


def test_labels_that_features_do_not_explain_get_their_frequency(examples):
    """Without a sign of the labels in the features, probabilities were 1/2."""
    labels = (np.random.default_rng(0).random(3000) < 0.05).astype(int)
    one = head(1.0, num_classes=2).fit(examples.features, labels)
    assert one.predict_proba(examples.features)[:, 1].mean() == pytest.approx(0.05, abs=0.03)


@pytest.mark.parametrize("penalty", ["auto", 30.0])
def test_penalties_report_what_was_chosen(penalty, examples):
    one = head(num_classes=3, penalty=penalty).fit(examples.features, examples.classes)
    assert (one.penalty_ is None) == (penalty == "auto") == (one.prior_ is not None)
    assert one.score(examples.features, examples.classes) > 0.6
    assert math.isfinite(one.risk_) and one.risk_ < 0.0
    if penalty == 30.0:
        assert one.penalty_ == 30.0


@pytest.mark.slow
@pytest.mark.usefixtures("fits_apart")
def test_the_standard_errors_are_those_of_many_fits(examples):
    few = slice(0, 600)
    fits = [
        head(num_classes=3, penalty=9.0, seed=s).fit(examples.features[few], examples.classes[few])
        for s in range(120)
    ]
    spread = np.std([one.coef_ for one in fits], axis=0)
    stated = np.broadcast_to(fits[0].coef_stddev_, spread.shape)
    # Each ratio has a relative standard error of 1 / sqrt(240); 24 of them within 5.2 of these.
    np.testing.assert_allclose(spread, stated, rtol=5.2 / math.sqrt(240))


def test_other_penalties_and_heads_are_post_processing_of_one_release(examples):
    x, labels = examples.features, PrivateLabels(examples.classes, num_classes=3, budget=TINY)
    one = PrivateRidge(1.0, 1e-6, key="head").fit(x, labels)
    other = PrivateLogisticRegression(1.0, 1e-6, key="head", penalty=64.0).fit(x, labels)
    assert np.any(other.coef_ != one.coef_) and len(labels.receipts) == 1


def test_a_stored_release_is_not_taken_for_that_of_other_rows(examples, tmp_path):
    """Moments of other rows, or of the same ones scaled otherwise, would fit nothing."""
    x, y = examples.features[:500], examples.classes[:500]
    vault = PrivateLabels(y, num_classes=3, budget=PrivacyBudget(20.0, 1e-4), store=tmp_path / "s")
    arguments = {"key": "head", "penalty": 8.0}
    PrivateRidge(20.0, 1e-4, **arguments).fit(x, vault)
    for features, other in ((x[::-1], {}), (x, {"spread": False}), (x, {"intercept": False})):
        with pytest.raises(LabelStoreError, match="made with other priors or public input"):
            PrivateRidge(20.0, 1e-4, **arguments, **other).fit(features, vault)
    one = PrivateRidge(20.0, 1e-4, **arguments).fit(x.astype(np.float64), vault)
    assert one.guarantee().epsilon == vault.guarantee().epsilon == 20.0


def test_pipelines_and_what_they_print(examples):
    from sklearn.base import clone
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x, y = examples.features, examples.classes
    shown = "".join(repr(head()).split())
    assert shown == "PrivateRidge(delta=1e-06,epsilon=1.0,insecure_seed=0,num_classes=3)"
    pipeline = make_pipeline(StandardScaler(), head(5.0)).fit(x, y)
    assert pipeline.score(x, y) > 0.6
    assert pipeline.predict_proba(x).shape == (3000, 3)
    assert clone(pipeline).set_params(privateridge__epsilon=3.0)


def test_a_clone_keeps_the_encoder_as_it_is(examples):
    """scikit-learn would clone the feature map as well, and so unfit it."""
    from sklearn.base import clone

    encoder = RandomFourierFeatures(num_features=10).fit(examples.features)
    one = clone(head(20.0, num_classes=3, encoder=encoder))
    assert one.encoder is encoder
    one.fit(examples.features, examples.classes)
    assert clone(one).fit(examples.features, examples.classes).coef_.shape == one.coef_.shape


def test_a_signal_that_is_gone_is_told(examples):
    x, y = examples.features, examples.classes
    message = r"indistinguishable from noise at epsilon=0\.0001: its signal-to-"
    with pytest.warns(UserWarning, match=message) as caught:
        one = head(1e-4).fit(x, y)
    assert caught[0].filename == __file__
    assert np.all(np.isfinite(one.predict_proba(x)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Other rows of another array: a second fit on as many labels would warn.
        head(1.0).fit(2.0 * x[1:], y[1:].copy())
    with pytest.warns(UserWarning, match=r"delta=0\.001 is not below 1/n = 0\.00033"):
        head(5.0, 1e-3).fit(3.0 * x, y)


def test_bad_input(examples):
    for arguments, label_kind, message in [
        ({"delta": 0.0}, "classes", "gaussian noise needs delta above zero"),
        ({"noise": "laplace"}, "classes", "laplace noise needs delta equal to zero"),
        ({"num_classes": 2}, "classes", r"labels must lie in 0\.\.1, but \d+ of 3000 do not"),
        ({"num_classes": None}, "classes", "exactly one of num_classes"),
        ({"low": 0.0, "high": 2.0}, "classes", "together with low and|for class"),
        ({"num_labels": 3}, "rows", "num_classes or classes together with num_labels"),
        ({"penalty": "cv"}, "classes", "penalty must be 'auto'"),
        ({"penalty": -1.0}, "classes", "penalty must be finite and above"),
        ({"max_bytes": 4e3}, "classes", r"at most 7 features for max_bytes.*got 8"),
        ({"num_classes": None, "num_labels": 3}, "classes", r"must have shape \(n, 3\)"),
    ]:
        settings = {"epsilon": 1.0, "delta": 1e-6, "num_classes": 3, **arguments}
        with pytest.raises(ValueError, match=message):
            PrivateRidge(**settings).fit(examples.features, examples.kinds[label_kind][1])


def test_predictions_for_few_rows_and_a_score_for_labels_of_another_shape(examples):
    x = examples.features
    one = head().fit(x, examples.classes)
    with pytest.raises(ValueError, match=r"1 row\(s\) have NaN"):
        one.predict(np.where(np.arange(3000)[:, None] == 7, np.nan, x))
    assert np.all(np.isfinite(one.decision_function(np.zeros((2, 8)))))
    assert one.predict(x[:0]).shape == (0,) and one.predict_proba(x[:0]).shape == (0, 3)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        one.score(x, examples.classes[1:])
    labels = PrivateLabels(examples.classes, 3, budget=PrivacyBudget(1.0))
    with pytest.raises(TypeError, match="a score would reveal its labels"):
        one.score(x, labels)


def test_the_score_is_that_of_scikit_learn(examples):
    """Rows of labels count if all of their labels are right; weights are those of examples."""
    x, weights = examples.features, np.arange(3000.0)
    for kind, metric in (
        ("classes", accuracy_score),
        ("numbers", r2_score),
        ("rows", accuracy_score),
    ):
        arguments, labels = examples.kinds[kind]
        one = head(**arguments).fit(x, labels)
        expected = metric(labels, one.predict(x), sample_weight=weights)
        assert one.score(x, labels, sample_weight=weights) == pytest.approx(expected)


def test_rows_of_zeros_get_the_intercept_alone(examples):
    """Sparse texts may be empty."""
    x = examples.features.copy()
    x[:100] = 0.0
    one = PrivateRidge(1.0, 1e-6, num_classes=3, insecure_seed=0, center=False)
    scores = one.fit(x, examples.classes).decision_function(x[:100])
    np.testing.assert_allclose(scores, np.broadcast_to(one.intercept_, (100, 3)))


@pytest.mark.usefixtures("fits_apart")
def test_little_budget_goes_to_few_directions():
    """Ten directions of falling variance: the smaller epsilon, the fewer of them get a share."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(1000, 10)) * np.geomspace(1.0, 1e-3, 10)
    y = (x[:, 0] > 0).astype(int)
    found = []
    for epsilon in (0.1, 2.0, 50.0):
        one = PrivateRidge(epsilon, 1e-6, num_classes=2, penalty=16.0, insecure_seed=0).fit(x, y)
        found.append(one.num_directions_)
        assert one.coef_.shape == (1, 10)
    assert found[0] < found[1] < found[2] <= 10
    plain = PrivateRidge(0.1, 1e-6, num_classes=2, penalty=16.0, insecure_seed=0, spread=False)
    assert plain.fit(x, y).num_directions_ == 10


@pytest.mark.parametrize("seed", [0, 2])
def test_a_prior_before_the_spread_has_the_scale_of_the_columns(seed):
    """At little budget the weights go to the one column that matters."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, 4000)
    x = rng.normal(size=(4000, 40)) * np.geomspace(10.0, 0.05, 40)
    x[:, 0] += 10.0 * (2 * y - 1)
    one = PrivateRidge(0.3, 1e-6, num_classes=2, insecure_seed=seed, spread=True).fit(x, y)
    assert np.corrcoef(one.decision_function(x).ravel(), x[:, 0])[0, 1] > 0.96
