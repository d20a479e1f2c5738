"""The estimator: fit from every source, predictions, calibration, guarantee, bad input."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

from tf_labeldp.accounting import BudgetExceededError, PrivacyBudget
from tf_labeldp.heads import PrivateRidge
from tf_labeldp.private_labels import PrivateLabels

N, D = 6000, 8
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, D)).astype(np.float32) + 0.2
DIRECTIONS = RNG.normal(size=(D, 3))
Y = np.argmax(X @ DIRECTIONS + RNG.normal(size=(N, 3)), axis=1)
NUMBERS = np.clip(20 + 8 * X[:, 0] + RNG.normal(size=N), 0, 50)


def head(epsilon=1.0, delta=1e-6, seed=0, **arguments):
    arguments = arguments or {"num_classes": 3}
    return PrivateRidge(epsilon, delta, seed=seed, **arguments)


def test_three_classes():
    one = head().fit(X, Y)
    best = head(1e4, penalty=1e-3, num_classes=3).fit(X, Y)
    assert one.score(X, Y) > best.score(X, Y) - 0.03 > 0.6
    assert one.coef_.shape == (3, D) and one.intercept_.shape == (3,)
    assert one.n_features_in_ == D and one.classes_.tolist() == [0, 1, 2]
    assert one.decision_function(X).shape == one.predict_proba(X).shape == (N, 3)
    np.testing.assert_allclose(one.predict_proba(X).sum(axis=1), 1.0)
    np.testing.assert_array_equal(one.predict_proba(X).argmax(axis=1), one.predict(X))
    assert one.coef_stddev_.shape == (D,) and np.all(one.coef_stddev_ > 0)
    assert all(values.shape == (121,) for values in one.risk_path_)


def test_at_a_huge_epsilon_it_is_ridge_on_unit_rows():
    rows = X.astype(float) - X.mean(axis=0, dtype=float)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    codes = np.eye(3)[Y] - 1 / 3
    centred, mean = rows - rows.mean(axis=0), codes.mean(axis=0)
    # The head's rows are 1 / sqrt(1 + 0.2^2) long, before the constant column.
    penalty = 50.0
    gram = centred.T @ centred + 1.04 * penalty * np.eye(D)
    weights = np.linalg.solve(gram, centred.T @ codes)
    one = head(1e5, penalty=penalty, num_classes=3).fit(X, Y)
    np.testing.assert_allclose(one.coef_, weights.T, atol=1e-3)
    np.testing.assert_allclose(one.intercept_, mean - rows.mean(axis=0) @ weights, atol=1e-3)


def test_two_classes_with_names():
    names = np.array(["no", "yes"])[(X[:, 0] > 0.2).astype(int)]
    one = head(classes=["no", "yes"]).fit(X, names)
    assert one.score(X, names) > 0.9
    assert one.coef_.shape == (1, D) and one.decision_function(X).shape == (N,)
    assert set(one.predict(X)) == {"no", "yes"}
    assert one.predict_proba(X).shape == (N, 2)
    assert np.all((one.predict_proba(X)[:, 1] > 0.5) == (one.predict(X) == "yes"))


def test_numbers_in_their_range():
    one = head(low=0.0, high=50.0).fit(X, NUMBERS)
    assert one.score(X, NUMBERS) > 0.5  # rows of unit norm have lost their lengths
    predicted = one.predict(X)
    assert predicted.shape == (N,) and predicted.min() >= 0.0 and predicted.max() <= 50.0
    assert predicted.mean() == pytest.approx(NUMBERS.mean(), abs=1.0)
    with pytest.raises(TypeError, match="no class probabilities"):
        one.predict_proba(X)


def test_rows_of_labels():
    rows = np.column_stack([X[:, 0] > 0.2, X[:, 1] > 0.2]).astype(int)
    one = head(num_labels=2).fit(X, rows)
    assert one.predict(X).shape == one.predict_proba(X).shape == (N, 2)
    assert np.mean(one.predict(X) == rows) > 0.9
    assert "whole row of labels" in str(one.guarantee())
    assert (one.guarantee().epsilon, one.guarantee().delta) == (1.0, 1e-6)


@pytest.mark.parametrize("penalty", ["risk", "bayes", 30.0])
def test_penalties_report_what_was_chosen(penalty):
    one = head(num_classes=3, penalty=penalty).fit(X, Y)
    assert (one.penalty_ is None) == (penalty == "bayes") == (one.prior_ is not None)
    assert one.score(X, Y) > 0.6
    assert math.isfinite(one.risk_) and one.risk_ < 0.0
    if penalty == 30.0:
        assert one.penalty_ == 30.0


def test_probabilities_are_calibrated():
    """Mean confidence and accuracy agree: within 0.03, of which 0.018 is three standard errors."""
    one = head().fit(X, Y)
    probabilities = one.predict_proba(X)
    assert probabilities.max(axis=1).mean() == pytest.approx(one.score(X, Y), abs=0.03)
    # Twice as sharp or half as sharp would not be.
    for factor in (0.5, 2.0):
        powered = probabilities**factor
        powered /= powered.sum(axis=1, keepdims=True)
        assert abs(powered.max(axis=1).mean() - one.score(X, Y)) > 0.05


def test_the_standard_errors_are_those_of_many_fits():
    few = slice(0, 600)
    fits = [head(num_classes=3, penalty=9.0, seed=s).fit(X[few], Y[few]) for s in range(120)]
    spread = np.std([one.coef_ for one in fits], axis=0)
    stated = np.broadcast_to(fits[0].coef_stddev_, spread.shape)
    # Each ratio has a relative standard error of 1 / sqrt(240); 24 of them within 5.2 of these.
    np.testing.assert_allclose(spread, stated, rtol=5.2 / math.sqrt(240))


def test_pure_noise():
    one = head(20.0, 0.0, num_classes=3, noise="laplace").fit(X, Y)
    assert one.guarantee().delta == 0.0 and one.score(X, Y) > 0.6


def test_guarantee_of_an_own_vault():
    statement = PrivateRidge(0.5, 1e-6, num_classes=3).fit(X, Y).guarantee()
    assert (statement.epsilon, statement.delta, statement.is_private) == (0.5, 1e-6, True)
    assert not head().fit(X, Y).guarantee().is_private


def test_a_vault_is_charged_once(tmp_path):
    def vault():
        budget = PrivacyBudget(1.0, 1e-6)
        return PrivateLabels(Y, num_classes=3, budget=budget, store=tmp_path / "store")

    labels = vault()
    one = PrivateRidge(1.0, 1e-6, key="head").fit(X, labels)
    assert one.guarantee() == labels.guarantee()
    assert labels.guarantee().epsilon == 1.0
    again = PrivateRidge(1.0, 1e-6, key="head").fit(X, vault())  # from the store, at no cost
    np.testing.assert_array_equal(again.coef_, one.coef_)
    PrivateRidge(1.0, 1e-6, key="head", penalty="risk").fit(X, labels)  # post-processing
    with pytest.raises(BudgetExceededError):
        PrivateRidge(1.0, 1e-6).fit(X, labels)


def test_a_vault_of_numbers_and_of_names():
    numbers = PrivateLabels(NUMBERS, low=0.0, high=50.0, budget=PrivacyBudget(1.0, 1e-6), seed=1)
    assert PrivateRidge(1.0, 1e-6).fit(X, numbers).predict(X).max() <= 50.0
    names = PrivateLabels(
        np.array(list("abc"))[Y], classes=list("abc"), budget=PrivacyBudget(1.0, 1e-6), seed=1
    )
    assert set(PrivateRidge(1.0, 1e-6).fit(X, names).predict(X)) == set("abc")


def test_fit_from_a_data_set_gives_the_same_head():
    import tensorflow as tf

    pairs = tf.data.Dataset.from_tensor_slices((X, Y)).batch(64)
    alone = tf.data.Dataset.from_tensor_slices(X).batch(100)
    expected = head().fit(X, Y)
    for one in (head().fit(pairs), head().fit(alone, Y)):
        np.testing.assert_allclose(one.coef_, expected.coef_, atol=1e-10)
    with pytest.raises(ValueError, match="labels were given too"):
        head().fit(pairs, Y)
    with pytest.raises(ValueError, match="labels are missing"):
        head().fit(alone)


def test_a_shuffled_data_set_is_refused_and_nothing_is_charged():
    import tensorflow as tf

    shuffled = tf.data.Dataset.from_tensor_slices(X).shuffle(N).batch(500)
    labels = PrivateLabels(Y, num_classes=3, budget=PrivacyBudget(1.0, 1e-6))
    with pytest.raises(ValueError, match="must not be shuffled"):
        PrivateRidge(1.0, 1e-6).fit(shuffled, labels)
    assert labels.guarantee().epsilon == 0.0


def test_scikit_learns_conventions():
    from sklearn.base import clone, is_classifier, is_regressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    one = head()
    assert clone(one).get_params() == one.get_params()
    assert not hasattr(clone(one.fit(X, Y)), "coef_")
    assert one.set_params(epsilon=2.0) is one and one.epsilon == 2.0
    with pytest.raises(ValueError, match="no parameter 'alpha'"):
        one.set_params(alpha=1)
    assert is_classifier(one) and is_regressor(head(low=0.0, high=1.0))
    assert repr(head()) == "PrivateRidge(epsilon=1.0, delta=1e-06, num_classes=3, seed=0)"
    pipeline = make_pipeline(StandardScaler(), head()).fit(X, Y)
    assert pipeline.score(X, Y) > 0.6
    assert pipeline.predict_proba(X).shape == (N, 3)


KINDS = {
    "classes": ({"num_classes": 3}, Y),
    "binary": ({"num_classes": 2}, (Y > 0).astype(int)),
    "numbers": ({"low": 10.0, "high": 30.0}, np.clip(NUMBERS, 10, 30)),
    "rows": ({"num_labels": 3}, np.eye(3)[Y]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("center", [False, True])
def test_the_keras_model_says_the_same_and_saves(kind, center, tmp_path):
    import keras

    arguments, labels = KINDS[kind]
    one = head(**arguments, center=center).fit(X, labels)
    model = one.to_keras()
    model.save(tmp_path / "head.keras")
    loaded = keras.models.load_model(tmp_path / "head.keras")
    expected = one.predict(X)[:, None] if kind == "numbers" else one.predict_proba(X)
    for found in (model, loaded):
        np.testing.assert_allclose(found.predict(X, verbose=0), expected, atol=2e-5, rtol=1e-5)
    assert model.trainable_weights == []


def test_an_encoder_is_put_in_front(tmp_path):
    import keras

    images = RNG.random((600, 4, 4)).astype(np.float32)
    encoder = keras.Sequential([keras.Input((4, 4)), keras.layers.Flatten()])
    one = head(50.0, 1e-3, num_classes=3).fit(encoder.predict(images, verbose=0), Y[:600])
    model = one.to_keras(encoder)
    model.save(tmp_path / "model.keras")
    found = keras.models.load_model(tmp_path / "model.keras").predict(images, verbose=0)
    np.testing.assert_allclose(found, one.predict_proba(images.reshape(600, -1)), atol=1e-5)
    with pytest.raises(ValueError, match="fitted on 16 features"):
        one.to_keras(keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]))


def test_a_signal_that_is_gone_is_told():
    with pytest.warns(UserWarning, match=r"nothing but noise .* epsilon=0\.0001: its signal-to-"):
        head(1e-4, num_classes=3).fit(X, Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head(1.0, num_classes=3).fit(X, Y)


@pytest.mark.parametrize(
    ("arguments", "labels", "error", "message"),
    [
        ({"num_classes": 3, "delta": 0.0}, Y, ValueError, "gaussian noise needs delta above zero"),
        ({"num_classes": 2}, Y, ValueError, r"labels must lie in 0\.\.1, but \d+ of 6000 do not"),
        ({"low": 0.0, "high": 1.0}, NUMBERS, ValueError, r"labels must lie in \[0, 1\], but \d+"),
        ({"num_classes": 3}, Y[:-1], ValueError, "6000 rows of features and 5999 labels"),
        ({"seed": 0}, Y, ValueError, "exactly one of num_classes"),
        ({"num_classes": 3, "penalty": "cv"}, Y, ValueError, "penalty must be 'bayes', 'risk'"),
        ({"num_classes": 3, "penalty": -1.0}, Y, ValueError, "penalty must be finite and above"),
        ({"num_classes": 3, "max_bytes": 1e6}, Y, ValueError, "at most 0 fit in max_bytes"),
    ],
)
def test_bad_input(arguments, labels, error, message):
    with pytest.raises(error, match=message):
        PrivateRidge(**{"epsilon": 1.0, "delta": 1e-6, **arguments}).fit(X, labels)


def test_bad_input_with_a_vault():
    vault = PrivateLabels(Y, num_classes=3, budget=PrivacyBudget(1.0, 1e-6))
    with pytest.raises(ValueError, match="num_classes is not that of the PrivateLabels"):
        PrivateRidge(1.0, 1e-6, num_classes=4).fit(X, vault)
    with pytest.raises(ValueError, match="seed must be None with a PrivateLabels"):
        PrivateRidge(1.0, 1e-6, seed=1).fit(X, vault)
    with pytest.raises(TypeError, match="one label an example, not rows"):
        PrivateRidge(1.0, 1e-6, num_labels=3).fit(X, vault)
    assert vault.guarantee().epsilon == 0.0


def test_prediction_needs_a_fit_and_the_same_features():
    with pytest.raises(ValueError, match="not fitted"):
        head().predict(X)
    with pytest.raises(ValueError, match="7 columns, the head was fitted on 8"):
        head().fit(X, Y).predict(X[:, :7])
    assert np.all(np.isfinite(head().fit(X, Y).decision_function(np.zeros((2, D)))))
