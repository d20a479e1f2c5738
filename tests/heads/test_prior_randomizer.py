"""One budget split between a head and a draw: charges, restarts, what comes out, training on it."""

from __future__ import annotations

import contextlib
import math
import os
import signal

import numpy as np
import pytest

from tf_labeldp import PrivateLabels
from tf_labeldp.accounting import BudgetExceededError, PrivacyBudget
from tf_labeldp.estimation import debiased, posterior
from tf_labeldp.heads import HeadPriorRandomizer, PrivateLogisticRegression, PrivateRidge
from tf_labeldp.mechanisms import InformativeRR, Priors, RandomizedResponse, RRTopK, RRWithPrior
from tf_labeldp.plugins import DrawSettingsError
from tf_labeldp.vault import Classes, NoisyLabels, Numbers, Rows

N, D, K = 3000, 6, 3
DELTA = 1e-6
RNG = np.random.default_rng(71)
X = RNG.normal(size=(N, D)).astype(np.float32)
Y = np.argmax(X @ RNG.normal(size=(D, K)) + 0.3 * RNG.normal(size=(N, K)), axis=1)


def vault(epsilon=2.0, delta=DELTA, labels=Y, seed=5, **arguments):
    arguments = arguments or {"num_classes": K}
    return PrivateLabels(
        labels, budget=PrivacyBudget(epsilon, delta), insecure_seed=seed, **arguments
    )


@pytest.fixture(scope="session")
def made():
    labels = vault()
    return labels, labels.randomize(HeadPriorRandomizer(2.0, DELTA), features=X)


def test_guarantee_covers_head_priors_and_noisy_labels(made):
    """One statement for both: within the whole, and no less than the larger of the two parts."""
    labels, noisy = made
    guarantee = labels.guarantee()
    assert 1.7 <= guarantee.epsilon <= 2.0 and guarantee.delta <= DELTA
    assert noisy.guarantee() == guarantee  # which is all that has left the vault
    assert labels.has_draw("head-prior") and labels.has_draw("head-prior/head")
    head, draw = HeadPriorRandomizer(2.0, DELTA).split()
    assert labels.mechanism("head-prior").epsilon == draw
    assert labels.mechanism("head-prior/head").epsilon == head
    assert labels.mechanism("head-prior/head").delta == DELTA
    assert head + draw <= 2.0 and head == pytest.approx(0.9 * 2.0)
    assert [one.charge.epsilon for one in noisy.receipts] == [head, draw]
    assert [one.charge.epsilon for one in noisy.priors.receipts] == [head]
    assert noisy.receipts == labels.receipts


def test_the_charges_are_promised_before_the_draws():
    randomizer, labels = HeadPriorRandomizer(2.0, DELTA), vault()
    promised = labels.guarantee(after=randomizer)
    head, draw = randomizer.parts(labels).values()
    assert (head.epsilon, head.delta) == (randomizer.split()[0], DELTA)
    assert (draw.epsilon, draw.delta) == (randomizer.split()[1], 0.0)
    assert labels.guarantee().epsilon == 0.0
    labels.randomize(randomizer, features=X)
    stated = labels.guarantee()
    assert (stated.epsilon, stated.delta) == (promised.epsilon, promised.delta)


def test_what_comes_out(made):
    labels, noisy = made
    assert isinstance(noisy, NoisyLabels)
    assert noisy.values.dtype == np.int64 and noisy.values.shape == (N,)
    np.testing.assert_array_equal(noisy.indices, np.arange(N))
    priors = noisy.priors.probabilities
    assert priors.dtype == np.float64 and priors.shape == (N, K)
    head = PrivateLogisticRegression(0.9 * 2.0, DELTA, key="head-prior/head").fit(X, labels)
    np.testing.assert_array_equal(priors, head.predict_proba(X))  # of the release that is stored
    assert labels.guarantee() == noisy.guarantee()
    assert isinstance(noisy.mechanism, RRWithPrior)
    expected = posterior(noisy.mechanism, noisy.values, priors)
    np.testing.assert_array_equal(noisy.posterior(), expected)
    expected = debiased(noisy.mechanism, noisy.values, priors)
    np.testing.assert_array_equal(noisy.debiased(), expected)


def test_labels_are_drawn_by_rr_with_prior_under_these_priors(made):
    """The share that is kept is what the channel says; plain randomized response keeps fewer."""
    _, noisy = made
    keep = np.empty(N)
    for i, prior in enumerate(np.asarray(noisy.priors)):
        keep[i] = noisy.mechanism.transition_matrix(prior)[Y[i], Y[i]]
    deviation = math.sqrt(np.sum(keep * (1 - keep)))
    hits = np.sum(noisy.values == Y)
    assert abs(hits - keep.sum()) < 5 * deviation  # 6e-7
    plain = RandomizedResponse(2.0, K).transition_matrix()[0, 0]
    assert hits - N * plain > 5 * math.sqrt(N * plain * (1 - plain))


@pytest.mark.slow
@pytest.mark.holds("heads.HeadPriorRandomizer")
def test_the_informative_draw_costs_the_same_and_has_better_posteriors(tmp_path):
    drawn = {}
    for draw in (RRWithPrior, InformativeRR):
        labels = vault(3.0, store=tmp_path / draw.__name__, num_classes=K)
        randomizer = HeadPriorRandomizer(3.0, DELTA, draw=draw)
        drawn[draw] = labels.randomize(randomizer, features=X)
        assert (
            drawn[draw].mechanism
            == draw(randomizer.split()[1], K)
            == randomizer.parts(labels)["head-prior"]
        )
        again = vault(3.0, store=tmp_path / draw.__name__, num_classes=K)
        again = again.randomize(randomizer, features=X)
        np.testing.assert_array_equal(again.values, drawn[draw].values)
    kept, told = drawn[RRWithPrior], drawn[InformativeRR]
    np.testing.assert_array_equal(kept.priors, told.priors)
    stated = kept.guarantee()
    assert (told.guarantee().epsilon, told.guarantee().delta) == (stated.epsilon, stated.delta)
    at = np.arange(N), Y
    assert np.log(told.posterior()[at]).mean() > np.log(kept.posterior()[at]).mean() + 0.01
    assert np.mean(told.values == Y) < np.mean(kept.values == Y)


def test_ridge_and_options():
    randomizer = HeadPriorRandomizer(3.0, DELTA, head_share=0.5, head=PrivateRidge, penalty=20.0)
    labels = vault(3.0)
    noisy = labels.randomize(randomizer, features=X)
    assert labels.mechanism("head-prior/head").epsilon == noisy.mechanism.epsilon == 1.5
    same = PrivateRidge(1.5, DELTA, key="head-prior/head", penalty=20.0).fit(X, labels)
    np.testing.assert_array_equal(noisy.priors.probabilities, same.predict_proba(X))
    other = PrivateRidge(1.5, DELTA, key="head-prior/head").fit(X, labels)
    assert np.abs(noisy.priors.probabilities - other.predict_proba(X)).max() > 1e-3
    assert labels.guarantee() == noisy.guarantee()


def test_an_encoder_takes_raw_inputs():
    squares = vault().randomize(HeadPriorRandomizer(2.0, DELTA), features=X**2).priors
    randomizer = HeadPriorRandomizer(2.0, DELTA, encoder=lambda raw: raw["x"] ** 2)
    priors = vault().randomize(randomizer, features={"x": X}).priors
    np.testing.assert_allclose(priors, squares, atol=1e-5)


def test_two_classes_by_name_and_pure_epsilon():
    names = np.array(["no", "yes"])[(X[:, 0] > 0).astype(int)]
    labels = vault(4.0, 0.0, names, kind=Classes(["no", "yes"]))
    noisy = labels.randomize(HeadPriorRandomizer(4.0, noise="laplace"), features=X)
    guarantee = labels.guarantee()
    assert guarantee.delta == 0.0 and guarantee.epsilon == pytest.approx(4.0, rel=1e-12)
    assert np.mean(labels.decode(noisy) == names) > 0.8


@pytest.mark.parametrize(("epsilon", "delta"), [(1.9, DELTA), (0.3, DELTA), (2.0, 0.0)])
def test_both_are_refused_before_either_is_released(epsilon, delta):
    labels = vault(epsilon, delta)
    with pytest.raises(BudgetExceededError, match="Nothing was drawn"):
        labels.randomize(HeadPriorRandomizer(2.0, DELTA), features=X)
    assert labels.guarantee().epsilon == 0.0 and labels.receipts == ()
    assert not labels.has_draw("head-prior/head")
    spent = vault(2.5)
    spent.randomize(RandomizedResponse(1.0, K), np.arange(3))
    with pytest.raises(BudgetExceededError):
        spent.randomize(HeadPriorRandomizer(2.0, DELTA), features=X)
    assert spent.guarantee().epsilon == 1.0


@pytest.mark.parametrize("after", [pytest.param("head", marks=pytest.mark.slow), "draw"])
def test_a_killed_run_reads_its_draws_and_goes_on(tmp_path, monkeypatch, after):
    randomizer = HeadPriorRandomizer(2.0, DELTA)
    whole = vault(store=tmp_path / "whole", num_classes=K).randomize(randomizer, features=X)

    def killed(*unused, **also_unused):
        os.kill(os.getpid(), signal.SIGKILL)

    def opened():
        return vault(store=tmp_path / "killed", num_classes=K)

    if (process := os.fork()) == 0:
        if after == "head":
            monkeypatch.setattr(PrivateLogisticRegression, "predict_proba", killed)
        else:
            monkeypatch.setattr(NoisyLabels, "__post_init__", killed)
        with contextlib.suppress(BaseException):
            opened().randomize(randomizer, features=X)
        os.abort()
    assert os.waitpid(process, 0)[1] == signal.SIGKILL
    labels = opened()
    assert labels.has_draw("head-prior/head") and labels.has_draw("head-prior") == (after == "draw")
    noisy = labels.randomize(randomizer, features=X)
    np.testing.assert_array_equal(noisy.values, whole.values)
    np.testing.assert_allclose(noisy.priors, whole.priors, rtol=1e-6)
    spent = labels.guarantee().epsilon
    assert spent <= 2.0
    again = opened().randomize(randomizer, features=X)
    np.testing.assert_array_equal(again.values, noisy.values)
    assert again.guarantee() == noisy.guarantee() == labels.guarantee()
    assert opened().guarantee().epsilon == spent


def test_other_settings_or_features_are_not_taken_for_the_stored_draw(tmp_path):
    def opened(epsilon=9.0):
        return vault(epsilon, store=tmp_path, num_classes=K)

    opened().randomize(HeadPriorRandomizer(2.0, DELTA), features=X)
    spent = opened().guarantee().epsilon
    for other in (
        HeadPriorRandomizer(2.0, DELTA, head_share=0.6),
        HeadPriorRandomizer(2.5, DELTA),
        HeadPriorRandomizer(2.0, DELTA / 2),
    ):
        with pytest.raises(DrawSettingsError):
            opened().randomize(other, features=X)
    with pytest.raises(DrawSettingsError, match="public input"):
        opened().randomize(HeadPriorRandomizer(2.0, DELTA), features=X[::-1].copy())
    assert opened().guarantee().epsilon == spent
    opened().randomize(HeadPriorRandomizer(2.0, DELTA), features=X, key="another")
    assert opened().guarantee().epsilon > spent + 0.5


def test_a_draw_of_this_name_without_a_head_is_refused_before_the_release():
    labels = vault(9.0)
    mechanism = RRWithPrior(HeadPriorRandomizer(2.0, DELTA).split()[1], K)
    labels.randomize(mechanism, priors=np.full(K, 1 / K), key="head-prior")
    with pytest.raises(DrawSettingsError, match="after a head named"):
        labels.randomize(HeadPriorRandomizer(2.0, DELTA), features=X)
    assert not labels.has_draw("head-prior/head")


@pytest.mark.slow
def test_priors_serve_the_first_stage_of_multi_stage_training():
    keras = pytest.importorskip("keras")
    from tf_labeldp import MultiStageTraining

    # A draw that is chosen after a head costs more of a budget than both together.
    labels = vault(5.0)
    head = PrivateLogisticRegression(1.0, DELTA, key="head").fit(X, labels)
    priors = head.predict_proba(X)
    stages = MultiStageTraining(
        X,
        labels,
        epsilon=3.0,
        fractions=(0.5, 0.5),
        epochs_per_stage=1,
        batch_size=64,
        temperature=1.0,  # the second stage's model is not trained for long
        priors=Priors(priors, receipts=head.receipts_),
        verbose=0,
    )
    model = keras.Sequential([keras.Input((D,)), keras.layers.Dense(K)])
    model.compile("adam", loss=keras.losses.CategoricalCrossentropy(from_logits=True))
    model.fit(stages.dataset(), epochs=stages.epochs, callbacks=[stages], verbose=0)
    assert stages.reports[0].mean_k < K
    assert labels.guarantee().epsilon <= 4.0
    noisy = stages.noisy_labels()
    assert sorted(noisy.indices) == list(range(N))
    assert np.mean(noisy.values == Y[noisy.indices]) > 0.8
    assert head.receipts_[0].id in {one.id for one in noisy.receipts}
    assert noisy.guarantee() == labels.guarantee() and noisy.guarantee().epsilon > 3.0


def test_bad_arguments():
    for changed, error, message in [
        ({"epsilon": 0.0}, ValueError, "epsilon"),
        ({"head_share": 0.0}, ValueError, "head_share"),
        ({"head_share": 1.0}, ValueError, "head_share must be below 1.*fit it alone"),
        ({"delta": 0.0}, ValueError, "gaussian noise needs delta above"),
        ({"noise": "laplace"}, ValueError, "laplace noise needs delta equal"),
        ({"colour": 1}, TypeError, "colour"),
        ({"head": RRWithPrior}, TypeError, "head must be a class"),
        ({"draw": RRTopK}, TypeError, "draw must be the class RRWithPrior or InformativeRR, got"),
    ]:
        with pytest.raises(error, match=message):
            HeadPriorRandomizer(**{"epsilon": 1.0, "delta": DELTA, **changed})


def test_bad_labels_and_features():
    randomizer = HeadPriorRandomizer(2.0, DELTA)
    assert not hasattr(randomizer, "randomize")  # there is no draw but that of a vault
    numbers = vault(kind=Numbers(0.0, 2.0), labels=Y.astype(float))
    with pytest.raises(ValueError, match="expected classes, got numbers"):
        numbers.randomize(randomizer, features=X)
    rows = vault(kind=Rows(K), labels=np.eye(K, dtype=int)[Y])
    with pytest.raises(ValueError, match=r"rows of 3 zeros and ones .* no classes"):
        rows.randomize(randomizer, features=X)
    broken = X.copy()
    broken[7, 2] = np.nan
    labels = vault()
    with pytest.raises(ValueError):
        labels.randomize(randomizer, features=broken)
    with pytest.raises(ValueError, match="got 2999 rows and 3000 labels"):
        labels.randomize(randomizer, features=X[1:])
    batches = pytest.importorskip("tensorflow").data.Dataset.from_tensors(X)
    with pytest.raises(TypeError, match="got a data set"):
        labels.randomize(randomizer, features=batches)
    for public in ({}, {"priors": np.full(K, 1 / K)}, {"features": X, "clusters": Y}):
        with pytest.raises(ValueError, match=r"needs features=|takes no"):
            labels.randomize(randomizer, **public)
    with pytest.raises(ValueError, match="draws for all examples"):
        labels.randomize(randomizer, np.arange(5), features=X[:5])
    for one in (numbers, rows, labels):
        assert one.guarantee().epsilon == 0.0 and one.receipts == ()


@pytest.mark.parametrize(("epsilon", "share"), [(2.4, 0.9), (2.5, 0.15)])
def test_the_default_split_gives_the_draw_more_where_it_pays(epsilon, share):
    head, draw = HeadPriorRandomizer(epsilon, DELTA).split()
    assert head == pytest.approx(share * epsilon) and head + draw <= epsilon
