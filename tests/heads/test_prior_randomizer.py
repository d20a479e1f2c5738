"""One budget split between a head and a draw: charges, restarts, what comes out, training on it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tf_labeldp import PrivateLabels
from tf_labeldp._label_store import DrawSettingsError
from tf_labeldp.accounting import BudgetExceededError, PrivacyBudget
from tf_labeldp.estimation import debiased_targets, posterior_probabilities
from tf_labeldp.heads import (
    HeadPriorRandomizer,
    PrivateLogisticRegression,
    PrivateRidge,
    _prior_randomizer,
)
from tf_labeldp.mechanisms import RandomizedResponse, RRWithPrior

N, D, K = 3000, 6, 3
DELTA = 1e-6
RNG = np.random.default_rng(71)
X = RNG.normal(size=(N, D)).astype(np.float32)
Y = np.argmax(X @ RNG.normal(size=(D, K)) + 0.3 * RNG.normal(size=(N, K)), axis=1)


def vault(epsilon=2.0, delta=DELTA, labels=Y, seed=5, **arguments):
    arguments = arguments or {"num_classes": K}
    return PrivateLabels(labels, budget=PrivacyBudget(epsilon, delta), seed=seed, **arguments)


@pytest.fixture(scope="module")
def made():
    labels = vault()
    return labels, HeadPriorRandomizer(2.0, DELTA).randomize(X, labels)


def test_guarantee_covers_head_priors_and_noisy_labels(made):
    """One statement for both: within the whole, and no less than the larger of the two parts."""
    labels, _ = made
    guarantee = labels.guarantee()
    assert 1.7 <= guarantee.epsilon <= 2.0 and guarantee.delta <= DELTA
    assert labels.has_draw("head-prior") and labels.has_draw("head-prior/head")
    head, draw = HeadPriorRandomizer(2.0, DELTA).split()
    assert labels.mechanism("head-prior").epsilon == draw
    assert labels.mechanism("head-prior/head").epsilon == head
    assert labels.mechanism("head-prior/head").delta == DELTA
    assert head + draw <= 2.0 and head == pytest.approx(0.9 * 2.0)


def test_what_comes_out(made):
    _, result = made
    assert result.noisy_labels.dtype == np.int64 and result.noisy_labels.shape == (N,)
    assert result.priors.dtype == np.float64 and result.priors.shape == (N, K)
    np.testing.assert_array_equal(result.priors, result.head.predict_proba(X))
    assert isinstance(result.mechanism, RRWithPrior)
    expected = posterior_probabilities(result.mechanism, result.noisy_labels, result.priors)
    np.testing.assert_array_equal(result.posterior_probabilities(), expected)
    expected = debiased_targets(result.mechanism, result.noisy_labels, result.priors)
    np.testing.assert_array_equal(result.debiased_targets(), expected)


def test_labels_are_drawn_by_rr_with_prior_under_these_priors(made):
    """The share that is kept is what the channel says; plain randomized response keeps fewer."""
    _, result = made
    keep = np.empty(N)
    for i in range(N):
        keep[i] = result.mechanism.transition_matrix(result.priors[i])[Y[i], Y[i]]
    deviation = math.sqrt(np.sum(keep * (1 - keep)))
    hits = np.sum(result.noisy_labels == Y)
    assert abs(hits - keep.sum()) < 5 * deviation  # 6e-7
    plain = RandomizedResponse(2.0, K).transition_matrix()[0, 0]
    assert hits - N * plain > 5 * math.sqrt(N * plain * (1 - plain))


def test_ridge_and_options():
    randomizer = HeadPriorRandomizer(
        3.0, DELTA, head_share=0.5, head=PrivateRidge, options={"penalty": 20.0, "spread": False}
    )
    result = randomizer.randomize(X, vault(3.0))
    assert isinstance(result.head, PrivateRidge) and result.head.penalty == 20.0
    assert result.head.epsilon == result.mechanism.epsilon == 1.5


def test_an_encoder_takes_raw_inputs():
    squares = HeadPriorRandomizer(2.0, DELTA).randomize(X**2, vault())
    randomizer = HeadPriorRandomizer(2.0, DELTA, options={"encoder": lambda raw: raw**2})
    result = randomizer.randomize(X, vault())
    np.testing.assert_allclose(result.priors, squares.priors, atol=1e-5)
    randomizer = HeadPriorRandomizer(2.0, DELTA, options={"encoder": lambda raw: raw["x"] ** 2})
    result = randomizer.randomize({"x": X}, vault())
    np.testing.assert_allclose(result.priors, squares.priors, atol=1e-5)


def test_two_classes_by_name_and_pure_epsilon():
    names = np.array(["no", "yes"])[(X[:, 0] > 0).astype(int)]
    labels = vault(4.0, 0.0, names, classes=["no", "yes"])
    result = HeadPriorRandomizer(4.0, options={"noise": "laplace"}).randomize(X, labels)
    guarantee = labels.guarantee()
    assert guarantee.delta == 0.0 and guarantee.epsilon == pytest.approx(4.0, rel=1e-12)
    assert np.mean(labels.decode(result.noisy_labels) == names) > 0.8


@pytest.mark.parametrize(("epsilon", "delta"), [(1.9, DELTA), (0.3, DELTA), (1.7, 0.0), (2.0, 0.0)])
def test_both_are_refused_before_either_is_released(epsilon, delta):
    labels = vault(epsilon, delta)
    with pytest.raises(BudgetExceededError, match="Nothing was drawn"):
        HeadPriorRandomizer(2.0, DELTA).randomize(X, labels)
    assert labels.guarantee().epsilon == 0.0
    assert not labels.has_draw("head-prior/head")


def test_what_was_spent_before_counts():
    labels = vault(2.5)
    labels.randomize(RandomizedResponse(1.0, K), np.arange(3))
    with pytest.raises(BudgetExceededError):
        HeadPriorRandomizer(2.0, DELTA).randomize(X, labels)
    assert labels.guarantee().epsilon == 1.0


class Killed(Exception):
    """Stands for the end of a process."""


@pytest.mark.parametrize("after", ["head", "draw"])
def test_a_killed_run_reads_its_draws_and_goes_on(tmp_path, monkeypatch, after):
    randomizer = HeadPriorRandomizer(2.0, DELTA)
    whole = randomizer.randomize(X, vault(store=tmp_path / "whole", num_classes=K))

    def killed(self, *unused, **also_unused):
        raise Killed

    def opened():
        return vault(store=tmp_path / "killed", num_classes=K)

    with monkeypatch.context() as patch:
        if after == "head":
            patch.setattr(PrivateLogisticRegression, "predict_proba", killed)
        else:
            patch.setattr(_prior_randomizer, "HeadRandomizedLabels", killed)
        with pytest.raises(Killed):
            randomizer.randomize(X, opened())
    labels = opened()
    assert labels.has_draw("head-prior/head") and labels.has_draw("head-prior") == (after == "draw")
    result = randomizer.randomize(X, labels)
    np.testing.assert_array_equal(result.noisy_labels, whole.noisy_labels)
    np.testing.assert_allclose(result.priors, whole.priors, rtol=1e-6)
    spent = labels.guarantee().epsilon
    assert spent <= 2.0
    again = randomizer.randomize(X, opened())
    np.testing.assert_array_equal(again.noisy_labels, result.noisy_labels)
    assert opened().guarantee().epsilon == spent


def test_other_settings_or_features_are_not_taken_for_the_stored_draw(tmp_path):
    def opened(epsilon=9.0):
        return vault(epsilon, store=tmp_path, num_classes=K)

    HeadPriorRandomizer(2.0, DELTA).randomize(X, opened())
    spent = opened().guarantee().epsilon
    for other in (
        HeadPriorRandomizer(2.0, DELTA, head_share=0.6),
        HeadPriorRandomizer(2.5, DELTA),
        HeadPriorRandomizer(2.0, DELTA / 2),
    ):
        with pytest.raises(DrawSettingsError):
            other.randomize(X, opened())
    with pytest.raises(DrawSettingsError, match="public input"):
        HeadPriorRandomizer(2.0, DELTA).randomize(X[::-1].copy(), opened())
    assert opened().guarantee().epsilon == spent
    HeadPriorRandomizer(2.0, DELTA).randomize(X, opened(), key="another")
    assert opened().guarantee().epsilon > spent + 0.5


def test_a_draw_of_this_name_without_a_head_is_refused_before_the_release():
    labels = vault(9.0)
    mechanism = RRWithPrior(HeadPriorRandomizer(2.0, DELTA).split()[1], K)
    labels.randomize(mechanism, priors=np.full(K, 1 / K), key="head-prior")
    with pytest.raises(DrawSettingsError, match="after a head named"):
        HeadPriorRandomizer(2.0, DELTA).randomize(X, labels)
    assert not labels.has_draw("head-prior/head")


def test_priors_serve_the_first_stage_of_multi_stage_training():
    keras = pytest.importorskip("keras")
    from tf_labeldp import MultiStageTraining

    labels = vault(4.0)
    head = PrivateLogisticRegression(1.0, DELTA, key="head").fit(X, labels)
    stages = MultiStageTraining(
        X,
        labels,
        epsilon=3.0,
        fractions=(0.5, 0.5),
        epochs_per_stage=1,
        batch_size=64,
        priors=head.predict_proba(X),
        verbose=0,
    )
    model = keras.Sequential([keras.Input((D,)), keras.layers.Dense(K)])
    model.compile("adam", loss=keras.losses.CategoricalCrossentropy(from_logits=True))
    model.fit(stages.dataset(), epochs=stages.epochs, callbacks=[stages], verbose=0)
    assert stages.reports[0].mean_k < K
    assert labels.guarantee().epsilon <= 4.0
    noisy = stages.noisy_labels()
    assert np.mean(noisy == Y) > 0.8


@pytest.mark.parametrize("targets", ["noisy", "posterior"])
def test_a_model_trains_on_what_comes_out(made, targets):
    keras = pytest.importorskip("keras")
    _, result = made
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((D,)), keras.layers.Dense(K)])
    optimizer = keras.optimizers.Adam(0.05)
    if targets == "noisy":
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss=loss)
        model.fit(X, result.noisy_labels, epochs=3, batch_size=100, verbose=0)
    else:
        loss = keras.losses.CategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss=loss)
        model.fit(X, result.posterior_probabilities(), epochs=3, batch_size=100, verbose=0)
    assert np.mean(model.predict(X, verbose=0).argmax(axis=1) == Y) > 0.85


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"epsilon": 0.0}, ValueError, "epsilon"),
        ({"head_share": 0.0}, ValueError, "head_share"),
        ({"head_share": 1.0}, ValueError, "head_share must be below 1.*fit it alone"),
        ({"delta": 0.0}, ValueError, "gaussian noise needs delta above"),
        ({"delta": 1.0}, ValueError, "delta"),
        ({"options": {"noise": "laplace"}}, ValueError, "laplace noise needs delta equal"),
        ({"options": {"epsilon": 1.0}}, ValueError, r"must not name \['epsilon'\]"),
        ({"options": {"colour": 1}}, ValueError, "not all arguments of PrivateLogisticRegression"),
        ({"head": "ridge"}, TypeError, "head must be a class"),
        ({"head": RRWithPrior}, TypeError, "head must be a class"),
    ],
)
def test_bad_arguments(changed, error, message):
    with pytest.raises(error, match=message):
        HeadPriorRandomizer(**{"epsilon": 1.0, "delta": DELTA, **changed})


def test_bad_labels_and_features():
    randomizer = HeadPriorRandomizer(2.0, DELTA)
    with pytest.raises(TypeError, match="must be a PrivateLabels, got ndarray"):
        randomizer.randomize(X, Y)
    with pytest.raises(ValueError, match="these labels are numbers"):
        randomizer.randomize(X, vault(labels=Y.astype(float), low=0.0, high=2.0))
    broken = X.copy()
    broken[7, 2] = np.nan
    labels = vault()
    with pytest.raises(ValueError):
        randomizer.randomize(broken, labels)
    with pytest.raises(ValueError, match="2999 rows of features and 3000 labels"):
        randomizer.randomize(X[1:], labels)
    batches = pytest.importorskip("tensorflow").data.Dataset.from_tensors(X)
    with pytest.raises(TypeError, match="not a data set"):
        randomizer.randomize(batches, labels)
    assert labels.guarantee().epsilon == 0.0


@pytest.mark.parametrize(("epsilon", "share"), [(0.1, 0.9), (2.4, 0.9), (2.5, 0.15), (6.0, 0.15)])
def test_the_default_split_gives_the_draw_more_where_it_pays(epsilon, share):
    head, draw = HeadPriorRandomizer(epsilon, DELTA).split()
    assert head == pytest.approx(share * epsilon) and head + draw <= epsilon
