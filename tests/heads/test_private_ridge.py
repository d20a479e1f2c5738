"""Ridge: against its closed form, its penalties, labels of every kind, and what heads share."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import tensorflow as tf
from threadpoolctl import threadpool_info, threadpool_limits

from tf_labeldp.accounting import BudgetExceededError, PrivacyBudget
from tf_labeldp.features import RandomFourierFeatures
from tf_labeldp.features.reader import FeatureRows
from tf_labeldp.heads import (
    PrivateLogisticRegression,
    PrivateRidge,
    _ridge_path,
    one_release_head,
    public_rows,
)
from tf_labeldp.vault import LabelStoreError, PrivateLabels

pytestmark = pytest.mark.filterwarnings("ignore:this is fit number")
HEADS = [PrivateRidge, PrivateLogisticRegression]
TINY = PrivacyBudget(1.0, 1e-6)


def head(epsilon=1.0, delta=1e-6, seed=0, kind=PrivateRidge, **arguments):
    return kind(epsilon, delta, insecure_seed=seed, **(arguments or {"num_classes": 3}))


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
    assert all(values.shape == (121,) for values in one.risk_path_)


@pytest.mark.parametrize("spread", [False, True], ids=["plain", "spread"])
def test_at_a_huge_epsilon_it_is_ridge_on_unit_rows(spread, examples):
    x = examples.features
    penalty = 50.0
    one = head(1e5, penalty=penalty, spread=spread, num_classes=3).fit(x, examples.classes)
    rows = x.astype(float) - x.mean(axis=0, dtype=float)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    if spread:
        rows = rows @ one._scaling.spread
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    codes = np.eye(3)[examples.classes] - 1 / 3
    centred, mean = rows - rows.mean(axis=0), codes.mean(axis=0)
    # The head's rows are 1 / sqrt(1 + 0.2^2) long, before the constant column.
    gram = centred.T @ centred + 1.04 * penalty * np.eye(8)
    weights = np.linalg.solve(gram, centred.T @ codes)
    intercept = mean - rows.mean(axis=0) @ weights
    np.testing.assert_allclose(one.intercept_, intercept, atol=1e-3)
    np.testing.assert_allclose(one.decision_function(x), rows @ weights + intercept, atol=2e-3)
    in_features = one._scaling.spread @ weights if spread else weights
    np.testing.assert_allclose(one.coef_, in_features.T, atol=1e-3 * np.abs(in_features).max())


@pytest.mark.parametrize("kind", HEADS)
def test_two_classes_with_names(kind, examples):
    x = examples.features
    names = np.array(["no", "yes"])[(x[:, 0] > 0.2).astype(int)]
    one = head(kind=kind, classes=["no", "yes"]).fit(x, names)
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
    with pytest.raises(TypeError, match="no class probabilities"):
        one.predict_proba(examples.features)


@pytest.mark.parametrize("kind", HEADS)
def test_rows_of_labels(kind, examples):
    x = examples.features
    rows = np.column_stack([x[:, 0] > 0.2, x[:, 1] > 0.2]).astype(int)
    one = head(kind=kind, num_labels=2).fit(x, rows)
    assert one.predict(x).shape == one.predict_proba(x).shape == (3000, 2)
    assert np.mean(one.predict(x) == rows) > 0.9
    np.testing.assert_array_equal(one.predict_proba(x) > 0.5, one.predict(x) == 1)
    assert "whole row of labels" in str(one.guarantee())
    assert (one.guarantee().epsilon, one.guarantee().delta) == (1.0, 1e-6)


@pytest.mark.usefixtures("fits_apart")
def test_labels_of_a_row_that_are_alike_are_as_sure_as_one_label(examples):
    x = examples.features
    y = (x[:, 0] + 0.5 * np.random.default_rng(0).normal(size=3000) > 0.2).astype(int)
    one = head(1e4, penalty=9.0, num_classes=2).fit(x, y)
    rows = head(1e4, penalty=9.0, num_labels=3).fit(x, np.stack([y] * 3, axis=1))
    np.testing.assert_allclose(rows.predict_proba(x)[:, 1], one.predict_proba(x)[:, 1], atol=0.02)


@pytest.mark.parametrize("penalty", ["auto", "risk", "bayes", 30.0])
def test_penalties_report_what_was_chosen(penalty, examples):
    one = head(num_classes=3, penalty=penalty).fit(examples.features, examples.classes)
    bayes = penalty in ("auto", "bayes")
    assert (one.penalty_ is None) == bayes == (one.prior_ is not None)
    assert one.score(examples.features, examples.classes) > 0.6
    assert math.isfinite(one.risk_) and one.risk_ < 0.0
    if penalty == 30.0:
        assert one.penalty_ == 30.0


def test_probabilities_are_calibrated(examples):
    """Mean confidence and accuracy agree within 0.03, of which 0.025 is three standard errors."""
    x, y = examples.features, examples.classes
    one = head(2.0).fit(x, y)
    probabilities = one.predict_proba(x)
    assert probabilities.max(axis=1).mean() == pytest.approx(one.score(x, y), abs=0.03)
    # Twice as sharp or half as sharp would not be.
    for factor in (0.5, 2.0):
        powered = probabilities**factor
        powered /= powered.sum(axis=1, keepdims=True)
        assert abs(powered.max(axis=1).mean() - one.score(x, y)) > 0.05


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


@pytest.mark.usefixtures("fits_apart")
@pytest.mark.parametrize("kind", HEADS)
def test_little_budget_goes_to_few_directions(kind):
    """Ten directions of falling variance: the smaller epsilon, the fewer of them get a share."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(1000, 10)) * np.geomspace(1.0, 1e-3, 10)
    y = (x[:, 0] > 0).astype(int)
    found = []
    for epsilon in (0.1, 2.0, 50.0):
        one = kind(epsilon, 1e-6, num_classes=2, penalty=16.0, insecure_seed=0).fit(x, y)
        found.append(one.num_directions_)
        assert one.coef_.shape == (1, 10)
    assert found[0] < found[1] < found[2] <= 10
    plain = kind(0.1, 1e-6, num_classes=2, penalty=16.0, insecure_seed=0, spread=False)
    assert plain.fit(x, y).num_directions_ == 10


@pytest.mark.usefixtures("fits_apart")
@pytest.mark.parametrize("kind", HEADS)
def test_a_head_can_be_repeated_with_a_seed_alone(kind, examples):
    x, y = examples.features[:500], examples.classes[:500]
    one, again, other = (head(20.0, seed=s, kind=kind).fit(x, y) for s in (4, 4, 5))
    np.testing.assert_array_equal(one.coef_, again.coef_)
    assert np.any(one.coef_ != other.coef_)
    private = [head(20.0, seed=None, kind=kind).fit(x, y) for _ in range(2)]
    assert np.any(private[0].coef_ != private[1].coef_)
    np.testing.assert_array_equal(one.predict_proba(x), again.predict_proba(x))


@pytest.mark.parametrize("kind", HEADS)
def test_a_vault_is_charged_once_and_goes_on_after_a_restart(kind, examples, tmp_path):
    x, y = examples.features[:1500], examples.classes[:1500]

    def vault():
        return PrivateLabels(y, num_classes=3, budget=TINY, store=tmp_path / "store")

    labels = vault()
    one = kind(1.0, 1e-6, key="head").fit(x, labels)
    assert one.guarantee() == labels.guarantee()
    assert (labels.guarantee().epsilon, labels.guarantee().delta) == (1.0, 1e-6)
    restarted = vault()
    again = kind(1.0, 1e-6, key="head").fit(x, restarted)  # from the store, at no cost
    np.testing.assert_array_equal(again.coef_, one.coef_)
    # Another penalty, and the other head, are post-processing of the same release.
    other = kind(1.0, 1e-6, key="head", penalty=64.0).fit(x, restarted)
    assert np.any(other.coef_ != one.coef_)
    for another in HEADS:
        another(1.0, 1e-6, key="head").fit(x, restarted)
    assert restarted.guarantee() == labels.guarantee()
    with pytest.raises(BudgetExceededError):
        kind(1.0, 1e-6).fit(x, labels)


@pytest.mark.parametrize("kind", HEADS)
def test_a_stored_release_is_not_taken_for_that_of_other_rows(kind, examples, tmp_path):
    """Moments of other rows, or of the same ones scaled otherwise, would fit nothing."""
    x, y = examples.features[:500], examples.classes[:500]
    vault = PrivateLabels(y, num_classes=3, budget=PrivacyBudget(20.0, 1e-4), store=tmp_path / "s")
    arguments = {"key": "head", "penalty": 8.0}
    kind(20.0, 1e-4, **arguments).fit(x, vault)
    for features, other in ((x[::-1], {}), (x, {"spread": False}), (x, {"intercept": False})):
        with pytest.raises(LabelStoreError, match="made with other priors or public input"):
            kind(20.0, 1e-4, **arguments, **other).fit(features, vault)
    one = kind(20.0, 1e-4, **arguments).fit(x.astype(np.float64), vault)
    assert one.guarantee().epsilon == vault.guarantee().epsilon == 20.0


def test_a_vault_of_numbers_and_of_names(examples):
    numbers = PrivateLabels(examples.numbers, low=0.0, high=50.0, budget=TINY, insecure_seed=1)
    assert (
        PrivateRidge(1.0, 1e-6).fit(examples.features, numbers).predict(examples.features).max()
        <= 50.0
    )
    for kind in HEADS:
        names = PrivateLabels(
            np.array(list("abc"))[examples.classes],
            classes=list("abc"),
            budget=TINY,
            insecure_seed=1,
        )
        one = kind(1.0, 1e-6).fit(examples.features, names)
        assert set(one.predict(examples.features)) == set("abc")


@pytest.mark.parametrize("kind", HEADS)
def test_a_vault_of_rows_of_labels(kind, examples):
    """The same fit as on the rows themselves, charged to the vault by the row."""
    arguments, rows = examples.kinds["rows"]
    vault = PrivateLabels(rows, num_labels=3, budget=TINY, insecure_seed=0)
    one = kind(1.0, 1e-6).fit(examples.features, vault)
    same = head(kind=kind, **arguments).fit(examples.features, rows)
    np.testing.assert_array_equal(one.coef_, same.coef_)
    np.testing.assert_array_equal(one.predict(examples.features), same.predict(examples.features))
    assert one.guarantee() == vault.guarantee()
    assert "whole row of labels" in str(one.guarantee())
    assert (vault.guarantee().epsilon, vault.guarantee().delta) == (1.0, 1e-6)
    with pytest.raises(BudgetExceededError):
        kind(1.0, 1e-6).fit(examples.features, vault)
    other = PrivateLabels(rows, num_labels=3, budget=TINY)
    for told in ({"num_labels": 2}, {"num_classes": 3}):
        with pytest.raises(ValueError, match="is not that of the PrivateLabels"):
            kind(1.0, 1e-6, **told).fit(examples.features, other)
    assert other.guarantee().epsilon == 0.0


@pytest.mark.parametrize("kind", HEADS)
def test_scikit_learns_conventions(kind, examples):
    from sklearn.base import clone, is_classifier, is_regressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x, y = examples.features, examples.classes
    one = head(kind=kind)
    assert clone(one).get_params() == one.get_params()
    assert not hasattr(clone(one.fit(x, y)), "coef_")
    assert one.set_params(epsilon=2.0) is one and one.epsilon == 2.0
    with pytest.raises(ValueError, match="Invalid parameter 'alpha'"):
        one.set_params(alpha=1)
    assert is_classifier(one) and is_regressor(PrivateRidge(1.0, 1e-6, low=0.0, high=1.0))
    shown = "".join(repr(head(kind=kind)).split())
    assert shown == f"{kind.__name__}(delta=1e-06,epsilon=1.0,insecure_seed=0,num_classes=3)"
    pipeline = make_pipeline(StandardScaler(), head(5.0, kind=kind)).fit(x, y)
    assert pipeline.score(x, y) > 0.6
    assert pipeline.predict_proba(x).shape == (3000, 3)
    assert clone(pipeline).set_params(**{f"{kind.__name__.lower()}__epsilon": 3.0})


@pytest.mark.parametrize("kind", HEADS)
def test_a_clone_keeps_the_encoder_as_it_is(kind, examples):
    """scikit-learn would clone the feature map as well, and so unfit it."""
    from sklearn.base import clone

    encoder = RandomFourierFeatures(num_features=10).fit(examples.features)
    one = clone(head(20.0, kind=kind, num_classes=3, encoder=encoder))
    assert one.encoder is encoder
    one.fit(examples.features, examples.classes)
    assert clone(one).fit(examples.features, examples.classes).coef_.shape == one.coef_.shape


@pytest.mark.parametrize("kind", HEADS)
def test_a_signal_that_is_gone_is_told(kind, examples):
    x, y = examples.features, examples.classes
    message = r"indistinguishable from noise at epsilon=0\.0001: its signal-to-"
    with pytest.warns(UserWarning, match=message) as caught:
        one = head(1e-4, kind=kind).fit(x, y)
    assert caught[0].filename == __file__
    assert np.all(np.isfinite(one.predict_proba(x)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head(1.0, kind=kind).fit(2.0 * x, y)  # other rows: a second fit on the same ones is told


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(
    ("arguments", "label_kind", "message"),
    [
        ({"delta": 0.0}, "classes", "gaussian noise needs delta above zero"),
        ({"noise": "laplace"}, "classes", "laplace noise needs delta equal to zero"),
        ({"epsilon": 0.0}, "classes", "epsilon must be finite and above zero"),
        ({"num_classes": 2}, "classes", r"labels must lie in 0\.\.1, but \d+ of 3000 do not"),
        ({"num_classes": None}, "classes", "exactly one of num_classes"),
        ({"low": 0.0, "high": 2.0}, "classes", "together with low and|for class"),
        ({"num_labels": 3}, "rows", "num_classes or classes together with num_labels"),
        ({"penalty": "cv"}, "classes", "penalty must be 'auto'"),
        ({"penalty": -1.0}, "classes", "penalty must be finite and above"),
        ({"max_bytes": 0.0}, "classes", "max_bytes must be finite and above"),
        ({"max_bytes": 4e3}, "classes", r"8 features need .* at most 7 fit in max_bytes"),
        ({"num_classes": None, "num_labels": 3}, "classes", r"must have shape \(n, 3\)"),
        ({"num_classes": None, "num_labels": 2}, "rows", r"must have shape \(n, 2\)"),
    ],
)
def test_bad_input(arguments, label_kind, message, kind, examples):
    settings = {"epsilon": 1.0, "delta": 1e-6, "num_classes": 3, **arguments}
    with pytest.raises(ValueError, match=message):
        kind(**settings).fit(examples.features, examples.kinds[label_kind][1])


def test_labels_outside_of_their_range_are_refused_and_not_shown(examples):
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 1\], but \d+") as caught:
        head(low=0.0, high=1.0).fit(examples.features, np.full(3000, 123.456))
    assert "123" not in str(caught.value)


@pytest.mark.parametrize("kind", HEADS)
def test_the_number_of_labels_is_that_of_rows(kind, examples):
    with pytest.raises(ValueError, match="3000 rows of features and 2999 labels"):
        head(kind=kind).fit(examples.features, examples.classes[:-1])


@pytest.mark.parametrize("kind", HEADS)
def test_bad_input_with_a_vault_costs_nothing(kind, examples):
    x = examples.features
    vault = PrivateLabels(examples.classes, num_classes=3, budget=TINY)
    with pytest.raises(ValueError, match="num_classes is not that of the PrivateLabels"):
        kind(1.0, 1e-6, num_classes=4).fit(x, vault)
    with pytest.raises(ValueError, match="insecure_seed must be None with a PrivateLabels"):
        kind(1.0, 1e-6, insecure_seed=1).fit(x, vault)
    with pytest.raises(ValueError, match="num_labels is not that of the PrivateLabels"):
        kind(1.0, 1e-6, num_labels=3).fit(x, vault)
    for bad in (np.where(np.arange(3000)[:, None] == 7, np.nan, x), np.ones((3000, 2)), 0 * x):
        with pytest.raises(ValueError, match="features"):
            kind(1.0, 1e-6).fit(bad, vault)
    with pytest.raises(BudgetExceededError):  # before the features are read
        kind(1.1, 1e-6).fit(np.full((3000, 2), np.nan), vault)
    assert vault.guarantee().epsilon == 0.0


def test_the_features_are_read_as_often_as_needed(examples, tmp_path, monkeypatch):
    """For the survey and the scan; for the release, where the scaled rows were not kept."""
    readings = []
    blocks = FeatureRows.blocks
    monkeypatch.setattr(
        FeatureRows, "blocks", lambda self, see=None: readings.append(1) or blocks(self, see)
    )
    x, y = examples.features, examples.classes
    budget = PrivacyBudget(9.0, 1e-6)
    vault = PrivateLabels(y, num_classes=3, budget=budget, store=tmp_path / "store")
    for arguments, times in (
        ({"delta": 1e-6, "key": "gaussian"}, 2),
        ({"delta": 1e-6, "key": "gaussian"}, 2),  # from the store
        ({"key": "laplace", "noise": "laplace"}, 2),
        ({"delta": 1e-6, "key": "little memory", "max_bytes": 2e5}, 3),
    ):
        PrivateRidge(1.0, **arguments).fit(x, vault)
        assert len(readings) == times
        readings.clear()


@pytest.mark.parametrize("kind", HEADS)
def test_a_data_set_that_changes_while_it_is_released_costs_nothing(kind, examples):
    vault = PrivateLabels(examples.classes, num_classes=3, budget=TINY)
    rows = tf.data.Dataset.from_tensor_slices(examples.features)
    with pytest.raises(ValueError, match="must not be shuffled"):
        kind(1.0, 1e-6).fit(rows.shuffle(3000).batch(500), vault)
    assert vault.guarantee().epsilon == 0.0
    assert kind(1.0, 1e-6).fit(rows.batch(500), vault).guarantee().epsilon == 1.0


@pytest.mark.usefixtures("fits_apart")
@pytest.mark.filterwarnings("ignore:delta")
def test_single_precision_hardly_moves_a_wide_fit(monkeypatch):
    rng = np.random.default_rng(6)
    x = rng.normal(size=(4000, 520)).astype(np.float32) * np.geomspace(1.0, 0.1, 520)
    y = (x[:, :3] + 0.1 * rng.normal(size=(4000, 3))).argmax(axis=1)
    single = head(20.0).fit(x, y)
    monkeypatch.setattr(public_rows, "_SINGLE_WIDTH", 10**9)
    double = head(20.0).fit(x, y)
    moved = np.abs(single.coef_ - double.coef_) / double.coef_stddev_
    assert 0.0 < moved.max() < 1e-3


@pytest.mark.usefixtures("fits_apart")
def test_small_fits_keep_to_one_thread(monkeypatch, examples):
    found = []

    def threads(*arguments):
        blas = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
        found.append(max(pool["num_threads"] for pool in blas))
        return signal_test(*arguments)

    signal_test = _ridge_path.signal_test
    monkeypatch.setattr(_ridge_path, "signal_test", threads)
    with threadpool_limits(2, user_api="blas"):
        head().fit(examples.features, examples.classes)
        monkeypatch.setattr(one_release_head, "_SMALL_ENTRIES", 3000 * 8 - 1)
        head().fit(examples.features, examples.classes)
    assert found == [1, 2]


@pytest.mark.parametrize("kind", HEADS)
def test_prediction_needs_a_fit_and_the_same_features(kind, examples):
    x = examples.features
    with pytest.raises(ValueError, match="not fitted"):
        head(kind=kind).predict(x)
    with pytest.raises(ValueError, match="not fitted"):
        head(kind=kind).guarantee()
    one = head(kind=kind).fit(x, examples.classes)
    with pytest.raises(ValueError, match="7 columns, the head was fitted on 8"):
        one.predict(x[:, :7])
    with pytest.raises(ValueError, match=r"1 row\(s\) hold NaN"):
        one.predict(np.where(np.arange(3000)[:, None] == 7, np.nan, x))
    assert np.all(np.isfinite(one.decision_function(np.zeros((2, 8)))))
    assert one.predict(x[:0]).shape == (0,) and one.predict_proba(x[:0]).shape == (0, 3)
    for labels in (examples.classes[:, None], examples.classes[:-1], 1):
        with pytest.raises(ValueError, match=r"labels must have shape \(3000,\)"):
            one.score(x, labels)


def test_repr_shows_what_differs_from_the_default():
    one = PrivateRidge(1.0, classes=np.array(["no", "yes"]), center=True, insecure_seed=3)
    classes = "array(['no', 'yes'], dtype='<U3')"
    shown = " ".join(repr(one).split())
    assert shown == f"PrivateRidge(classes={classes}, epsilon=1.0, insecure_seed=3)"


def test_a_delta_above_one_over_n_is_told(examples):
    with pytest.warns(UserWarning, match=r"delta=0\.001 is not below 1/n = 0\.00033"):
        PrivateRidge(5.0, 1e-3, num_classes=3, insecure_seed=0).fit(
            examples.features, examples.classes
        )


def test_a_vault_of_numbers_makes_a_regressor(examples):
    from sklearn.base import is_classifier, is_regressor

    vault = PrivateLabels(examples.numbers, low=0.0, high=50.0, budget=PrivacyBudget(5.0, 1e-6))
    head = PrivateRidge(5.0, 1e-6).fit(examples.features, vault)
    assert is_regressor(head) and not is_classifier(head)
