"""Residuals of a released head: what they cost, what the noisy ones say, and whose they are."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

import tf_labeldp as ldp
from tf_labeldp import LabelRandomizer, NoisyLabels, PrivacyBudget, PrivateBoosting, PrivateLabels
from tf_labeldp.accounting import BudgetExceededError, PublicInput, public_input
from tf_labeldp.dossier import verify
from tf_labeldp.features import RandomFourierFeatures
from tf_labeldp.heads import HeadResidualRandomizer, PrivatePoissonRegression, PrivateRidge
from tf_labeldp.plugins import DrawSettingsError
from tf_labeldp.vault import Classes, Numbers, Rows
from tf_labeldp.vault.uses import NamedUse

N, DELTA, LOW, HIGH = 3000, 1e-6, -3.0, 5.0
RNG = np.random.default_rng(3)
X = RNG.uniform(-1.0, 1.0, size=(N, 3)).astype(np.float32)
# A line, and a bend that no line has.
Y = np.clip(2.0 * X[:, 0] + 2.0 * np.abs(X[:, 1]) + 0.2 * RNG.normal(size=N), LOW, HIGH)


def vault(epsilon=4.0, labels=Y, **arguments):
    arguments = {"kind": Numbers(LOW, HIGH), "insecure_seed": 1} | arguments
    return PrivateLabels(labels, budget=PrivacyBudget(epsilon, DELTA), **arguments)


@pytest.fixture(scope="module")
def drawn():
    labels = vault()
    randomizer = HeadResidualRandomizer(4.0, DELTA)
    return labels, *randomizer.draw_with_head(labels, public_input(X))


@pytest.mark.holds("heads.HeadResidualRandomizer")
def test_head_prior_and_draw_cost_epsilon_together(drawn):
    labels, head, noisy = drawn
    assert 3.8 < labels.guarantee().epsilon <= 4.0
    assert noisy.guarantee() == labels.guarantee()
    costs = [receipt.charge.epsilon for receipt in noisy.receipts]
    assert sum(costs) == pytest.approx(4.0) and costs[0] == pytest.approx(0.15 * 4.0)
    assert [receipt.key for receipt in noisy.receipts] == [
        "head-residual/head",
        "head-residual/prior",
        "head-residual",
    ]
    promised = vault().guarantee(after=HeadResidualRandomizer(4.0, DELTA))
    stated = labels.guarantee()
    assert (promised.epsilon, promised.delta) == (stated.epsilon, stated.delta)
    model = PrivateBoosting(start=head, max_trees=5).fit(X, noisy)
    assert model.guarantee().epsilon == stated.epsilon


@pytest.mark.holds("heads.HeadResidualRandomizer")
def test_a_label_moves_its_own_residual_alone_and_at_most_by_epsilon(drawn):
    """Given the predictions: the composition adds the draw of one label to the head's cost."""
    _, head, noisy = drawn
    predictions = head.predict(X)
    outputs = []
    for changed in (LOW, HIGH):
        labels = Y.copy()
        labels[7] = changed
        view = NamedUse(vault(labels=labels)).residuals(predictions, 4.0)
        outputs.append(view.randomize(LabelRandomizer(1.0, prior=(0.5, 0.5), values=(-4.0, 4.0))))
    assert np.flatnonzero(outputs[0].values != outputs[1].values).tolist() in ([], [7])
    mechanism = noisy.mechanism
    residuals = np.clip(np.linspace(LOW, HIGH, 200) - predictions[7], -4.0, 4.0)
    ratio = np.log(mechanism.likelihood(np.asarray(mechanism.outputs), residuals))
    worst = (ratio.max(axis=1) - ratio.min(axis=1)).max()
    assert worst == pytest.approx(mechanism.epsilon, abs=1e-12)


def test_estimates_of_labels_are_closer_than_the_head_and_than_plain_draws(drawn):
    _, head, noisy = drawn
    plain = vault().randomize(LabelRandomizer(4.0))

    def error(numbers):
        return np.mean(np.square(numbers - Y))

    assert error(noisy.posterior()) < 0.8 * min(error(head.predict(X)), error(plain.posterior()))
    assert error(noisy.debiased()) < error(plain.debiased())
    np.testing.assert_array_equal(noisy.priors.shift, head.predict(X))
    spread = np.std(noisy.debiased() - Y) / N**0.5
    assert abs(np.mean(noisy.debiased() - Y)) < 5 * spread
    low, high = noisy.label_range
    assert low == pytest.approx(head.predict(X).min() - 4.0) and high > HIGH
    total = noisy.evaluate(None, "total", model=None)
    assert abs(total.value - Y.sum()) < 5 * total.standard_error


@pytest.mark.slow
def test_trees_start_from_the_head_and_a_network_learns_the_draw(drawn, tmp_path):
    _, head, noisy = drawn
    model = PrivateBoosting(start=head).fit(X, noisy)
    assert model.score(X, Y) > 0.94 > 0.9 > head.score(X, Y)
    assert model.gain_ > 5 * model.gain_stddev_
    model.to_keras().save(tmp_path / "model.keras")
    loaded = ldp.load_model(tmp_path / "model.keras")
    assert loaded.predict(X, verbose=0)[:, 0] == pytest.approx(model.predict(X), abs=1e-4)
    assert ldp.guarantee(loaded).epsilon == noisy.guarantee().epsilon
    network = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)]
    )
    network.compile(keras.optimizers.Adam(0.01), "mse")
    ldp.fit(network, X, noisy, epochs=15, targets="debiased", verbose=0)
    found = network.predict(X, verbose=0)[:, 0]
    assert 1.0 - np.mean((found - Y) ** 2) / Y.var() > 0.9


@pytest.mark.slow
def test_counts_start_from_a_poisson_head(tmp_path):
    counts = RNG.poisson(np.exp(X[:, 0] + 2.0 * (X[:, 1] > 0.0) - 1.0)).clip(0, 12).astype(float)
    labels = vault(kind=Numbers(0.0, 12.0), labels=counts)
    start = HeadResidualRandomizer(9.0, DELTA, head=PrivatePoissonRegression)
    model = PrivateBoosting(4.0, loss="poisson", start=start).fit(X, labels)
    assert isinstance(model.start_, PrivatePoissonRegression)
    assert labels.guarantee().epsilon <= 4.0  # the model's epsilon, not that of ``start``
    assert model.score(X, counts) > model.start_.score(X, counts)
    assert abs(model.predict(X).mean() - counts.mean()) < 0.2
    found = model.to_keras().predict(X, verbose=0)[:, 0]
    assert found == pytest.approx(model.predict(X), rel=1e-4, abs=1e-4)


def test_both_are_refused_before_either_is_released():
    for labels in (vault(3.9), vault(0.5)):
        with pytest.raises(BudgetExceededError, match="Nothing was drawn"):
            labels.randomize(HeadResidualRandomizer(4.0, DELTA), features=X)
        assert labels.receipts == () and labels.guarantee().epsilon == 0.0


def test_a_store_returns_the_draw_for_the_same_predictions_alone(tmp_path):
    def opened():
        return vault(9.0, store=tmp_path / "store")

    first = opened().randomize(HeadResidualRandomizer(4.0, DELTA), features=X)
    spent = opened().guarantee().epsilon
    again = opened().randomize(HeadResidualRandomizer(4.0, DELTA), features=X)
    np.testing.assert_array_equal(first.values, again.values)
    np.testing.assert_array_equal(first.debiased(), again.debiased())
    for randomizer, features in (
        (HeadResidualRandomizer(4.0, DELTA, head_share=0.5), X),
        (HeadResidualRandomizer(4.0, DELTA, residual_range=0.3), X),
        (HeadResidualRandomizer(4.0, DELTA), X[::-1].copy()),
        # The same release, with other predictions: the residuals would be of others.
        (HeadResidualRandomizer(4.0, DELTA, penalty=300.0), X),
    ):
        with pytest.raises(DrawSettingsError):
            opened().randomize(randomizer, features=features)
    assert opened().guarantee().epsilon == spent


@pytest.mark.parametrize("is_edited", [False, True])
def test_files_keep_the_predictions_and_verify_compares_them(tmp_path, is_edited):
    labels = vault(store=tmp_path / "store")
    noisy = labels.randomize(HeadResidualRandomizer(4.0, DELTA), features=X)
    if is_edited:
        other = np.asarray(noisy.priors.shift) + 0.5
        priors = dataclasses.replace(noisy.priors, shift=other)
        noisy = dataclasses.replace(noisy, priors=priors)
    noisy.save(tmp_path / "noisy")
    loaded = NoisyLabels.load(tmp_path / "noisy")
    np.testing.assert_array_equal(loaded.debiased(), noisy.debiased())
    found = verify(tmp_path / "noisy", store=tmp_path / "store")
    assert bool(found.problems) == is_edited
    assert "the predictions that its draw subtracted" in verify(tmp_path / "noisy").not_checked
    dataclasses.replace(noisy, priors=None).save(tmp_path / "without")
    assert verify(tmp_path / "without", store=tmp_path / "store").problems


def test_the_head_counts_once_for_a_user_and_each_of_her_labels():
    users = np.concatenate([np.repeat(np.arange(20), 50), np.arange(20, 2020)])
    labels = vault(6.0, users=users)
    noisy = labels.randomize(HeadResidualRandomizer(6.0, DELTA), features=X)
    # Fifty draws compose to less than their sum, at the same delta.
    assert 3.0 < labels.guarantee().epsilon <= 6.0
    head, prior, draw = (receipt.charge.epsilon for receipt in noisy.receipts)
    assert head == pytest.approx(0.3 * 6.0) and head + prior + draw == pytest.approx(6.0)
    assert noisy.mechanism.epsilon == pytest.approx(draw / 50)


RANGES = {
    "too wide": (Y, -3000.0, 5000.0),
    "constant": (np.full(N, 2.0), LOW, HIGH),
    "whole numbers": (np.rint(Y), LOW, HIGH),
    "at the ends": (np.where(X[:, 0] > 0.0, HIGH, LOW), LOW, HIGH),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", RANGES)
def test_any_labels_of_a_range_give_finite_predictions_within_it(case):
    labels, low, high = RANGES[case]
    private = vault(kind=Numbers(low, high), labels=labels)
    model = PrivateBoosting(4.0, start=HeadResidualRandomizer(1.0, DELTA), max_trees=20)
    found = model.fit(X, private).predict(X)
    assert np.all((found >= low) & (found <= high))
    assert np.mean(np.abs(found - labels)) < 0.1 * (high - low)


@pytest.mark.slow
def test_an_unseen_category_and_a_category_per_row_are_predicted():
    table = {"a": X[:, 0], "town": RNG.choice(["u", "v"], N), "id": np.arange(N).astype(str)}
    encoder = RandomFourierFeatures(sparse=True).fit(table)
    start = HeadResidualRandomizer(4.0, DELTA, encoder=encoder, spread="half")
    model = PrivateBoosting(4.0, start=start, max_trees=20).fit(table, vault())
    new = {"a": X[:2, 0], "town": np.array(["w", ""]), "id": np.array(["n", "m"])}
    assert np.all(np.isfinite(model.predict(new)))


def test_bad_arguments():
    for changed, error, message in [
        ({"epsilon": 0.0}, ValueError, "epsilon"),
        ({"head_share": 1.0}, ValueError, "head_share must be below 1"),
        ({"residual_range": 0.0}, ValueError, r"residual_range must be in \(0, 1\]"),
        ({"residual_range": 1.5}, ValueError, r"residual_range must be in \(0, 1\]"),
        ({"head": LabelRandomizer}, TypeError, "head must be a class"),
    ]:
        with pytest.raises(error, match=message):
            HeadResidualRandomizer(**{"epsilon": 1.0, "delta": DELTA, **changed})
    labels, randomizer = vault(), HeadResidualRandomizer(2.0, DELTA)
    classes = PrivateLabels(np.arange(N) % 2, 2, budget=PrivacyBudget(4.0, DELTA))
    with pytest.raises(ValueError, match=r"expected numbers, got 2 classes. Use HeadPrior"):
        classes.randomize(randomizer, features=X)
    with pytest.raises(TypeError, match="got a data set"):
        labels.randomize(randomizer, features=tf.data.Dataset.from_tensors(X))
    with pytest.raises(ValueError, match="got 2999 rows and 3000 labels"):
        labels.randomize(randomizer, features=X[1:])
    with pytest.raises(ValueError, match="needs features="):
        labels.randomize(randomizer)
    assert labels.receipts == classes.receipts == ()


def test_another_start_than_the_head_of_the_draw_is_refused(drawn):
    _, head, noisy = drawn
    other = PrivateRidge(1.0, DELTA, low=LOW, high=HIGH).fit(X[:, :2], Y)
    classes = ldp.PrivateLogisticRegression(1.0, DELTA, num_classes=2).fit(X, X[:, 0] > 0)
    for start, error, message in [
        (None, ValueError, "expected start=head with noisy residuals"),
        (classes, ValueError, r"expected a start for numbers, got one for the classes \[0, 1\]"),
        (PrivateRidge(1.0, DELTA), Exception, "is not fitted"),
        (np.zeros(N), TypeError, "fitted estimator of this library, got ndarray"),
        (
            PrivateRidge(1.0, DELTA, low=LOW, high=HIGH).fit(X + 0.1, Y),
            ValueError,
            "the head whose numbers the draw subtracted",
        ),
    ]:
        with pytest.raises(error, match=message):
            PrivateBoosting(start=start).fit(X, noisy)
    del other
    assert PrivateBoosting(start=head, max_trees=2).fit(X, noisy).num_trees_ > 0


@pytest.mark.slow
def test_classes_start_from_the_log_odds_of_a_head(tmp_path):
    ill = (X[:, 0] + 1.5 * np.abs(X[:, 1]) > 0.75).astype(int)
    labels = PrivateLabels(
        np.where(ill, "yes", "no"), Classes(["no", "yes"]), budget=PrivacyBudget(5.0, DELTA)
    )
    head = ldp.PrivateLogisticRegression(1.0, DELTA, key="head").fit(X, labels)
    noisy = labels.randomize(ldp.RandomizedResponse(3.0, 2))
    model = PrivateBoosting(start=head, max_trees=100).fit(X, noisy)
    expected = np.where(ill, "yes", "no")
    assert model.score(X, expected) > head.score(X, expected) + 0.03
    # The head's cost counts, too.
    assert model.guarantee().epsilon > 3.5
    found = model.to_keras().predict(X, verbose=0)
    assert found == pytest.approx(model.predict_proba(X), abs=1e-5)
    turned = PrivateLabels(expected, Classes(["yes", "no"]), budget=PrivacyBudget(5.0, DELTA))
    with pytest.raises(ValueError, match=r"a start for the classes \['yes', 'no'\]"):
        PrivateBoosting(1.0, start=head).fit(X, turned)
    assert turned.receipts == ()


TABLE = pd.DataFrame(X, columns=["a", "start", "c"])


def test_what_fails_fails_before_the_release(tmp_path):
    """A start that can't read the features, another draw's name, labels for residuals."""
    head = PrivateRidge(1.0, DELTA, low=LOW, high=HIGH).fit(X[:, :2], Y)
    missing = X.copy()
    missing[3, 1] = np.nan
    whole = PrivateRidge(1.0, DELTA, low=LOW, high=HIGH).fit(X, Y)
    labels = vault(9.0)
    for start, features in ((head, X), (whole, missing)):
        with pytest.raises(ValueError):
            PrivateBoosting(2.0, start=start).fit(features, labels)
    assert labels.receipts == ()
    labels.randomize(LabelRandomizer(2.0), key="taken")
    spent = labels.guarantee().epsilon
    with pytest.raises(DrawSettingsError, match="expected residuals of a head 'taken/head'"):
        labels.randomize(HeadResidualRandomizer(2.0, DELTA), features=X, key="taken")
    assert labels.guarantee().epsilon == spent
    noisy = labels.randomize(HeadResidualRandomizer(2.0, DELTA, residual_range=1.0), features=X)
    with pytest.raises(DrawSettingsError):
        labels.randomize(noisy.mechanism, key="head-residual")
    # Names that are no texts, as elsewhere.
    noisy = labels.randomize(HeadResidualRandomizer(2.0, DELTA), features=X, key=5)
    assert labels.has_draw(5) and labels.has_draw("5/head")
    again = labels.randomize(HeadResidualRandomizer(2.0, DELTA), features=X, key="5")
    np.testing.assert_array_equal(again.values, noisy.values)


@pytest.mark.slow
def test_features_and_encoders_with_receipts_on_an_array_of_labels(fits_of_this_test_alone):
    others = PrivateLabels(Y > 1.0, 2, budget=PrivacyBudget(1.0))
    drawn = public_input(others.randomize(ldp.RandomizedResponse(1.0, 2)))
    encoder = keras.Sequential([keras.Input((3,)), keras.layers.Dense(8)])
    encoder.compile("sgd", "mse")
    ldp.declare(encoder, because="made without labels")
    fits = []
    for features, start in (
        (drawn.with_value(X), HeadResidualRandomizer(2.0, DELTA)),
        (X, HeadResidualRandomizer(2.0, DELTA, encoder=encoder)),
        (X, HeadResidualRandomizer(2.0, DELTA, encoder=encoder)),
        (X[: N // 2], HeadResidualRandomizer(2.0, DELTA, encoder=encoder)),
    ):
        model = PrivateBoosting(2.0, low=LOW, high=HIGH, start=start, max_trees=2)
        fits.append(model.fit(features, Y[: len(PublicInput.bare(features))]).guarantee().epsilon)
    assert 2.9 < fits[0] <= 3.0 + 1e-9
    # Fits of this process on the same rows are counted, for these labels.
    assert fits[1] < fits[2] < fits[3] and fits[2] > 3.5


@pytest.mark.slow
@pytest.mark.parametrize("columns", [["start"], ["c", "start"], ["a", "start", "c"]])
@pytest.mark.parametrize("has_encoder", [True, False])
def test_an_exported_start_reads_its_own_columns(columns, has_encoder):
    encoder = RandomFourierFeatures(20).fit(TABLE[columns]) if has_encoder else None
    if not has_encoder and len(columns) < 3:
        return
    start = HeadResidualRandomizer(4.0, DELTA, encoder=encoder)
    model = PrivateBoosting(4.0, start=start, max_trees=5).fit(TABLE, vault())
    exported = model.to_keras()
    found = exported.predict(ldp.features.to_inputs(TABLE, exported), verbose=0)[:, 0]
    assert found == pytest.approx(model.predict(TABLE), abs=1e-4)


@pytest.mark.slow
def test_predictions_have_the_range_of_the_labels():
    narrow = PrivateRidge(1.0, DELTA, low=-1.0, high=1.0).fit(X, np.clip(Y, -1.0, 1.0))
    model = PrivateBoosting(8.0, start=narrow).fit(X, vault(20.0))
    assert model.predict(X).max() > 2.0 and model.score(X, Y) > 0.9
    assert model.predict(X[:0]).shape == (0,)


def test_residuals_are_no_labels(drawn):
    _, _, noisy = drawn
    network = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    network.compile("sgd", "mse")
    for use in (
        lambda: noisy.to_dataset(X),
        lambda: ldp.fit(network, X, noisy, targets="values"),
        noisy.decode,
    ):
        with pytest.raises(TypeError, match="noisy residuals, from which a head's numbers were"):
            use()
    given = ldp.mechanisms.Priors(noisy.priors.probabilities, values=noisy.priors.values)
    np.testing.assert_array_equal(noisy.posterior(given), noisy.posterior())


def test_what_a_start_can_be():
    released = HeadResidualRandomizer(2.0, DELTA)
    classes = PrivateLabels(np.arange(N) % 2, 2, budget=PrivacyBudget(4.0, DELTA))
    with pytest.raises(ValueError, match=r"expected numbers with start=HeadResidual.*2 classes"):
        PrivateBoosting(2.0, start=released).fit(X, classes)
    with pytest.raises(ValueError, match="expected numbers, got 2 classes"):
        classes.check_budget(released)
    rows = PrivateLabels(
        np.eye(3, dtype=int)[np.arange(N) % 3], Rows(3), budget=PrivacyBudget(4.0, DELTA)
    )
    of_rows = PrivateRidge(1.0, DELTA).fit(X, rows)
    labels = vault()
    with pytest.raises(ValueError, match="got one for rows of labels"):
        PrivateBoosting(2.0, start=of_rows).fit(X, labels)
    with pytest.raises(ValueError, match="monotonic_cst without start"):
        PrivateBoosting(2.0, start=released, monotonic_cst={0: 1}).fit(X, labels)
    assert labels.receipts == classes.receipts == ()
