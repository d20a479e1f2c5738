"""Statements of 0.2 that missed receipts of public inputs; each test fails on 0.2."""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import keras
import numpy as np
import pytest
from ledger_cases import (
    K,
    N,
    X,
    Y,
    dp_sgd,
    in_the_clear,
    multi_stage,
    plain,
    private,
    stated,
    vault,
)

import tf_labeldp as ldp
from tf_labeldp.heads import BootstrappedHead, PrivateLogisticRegression
from tf_labeldp.mechanisms import HistogramMechanism, RandomizedResponse, optimal_bins
from tf_labeldp.pate import PATE, fix_match_teacher
from tf_labeldp.plugins import Clusters
from tf_labeldp.semi_supervised import DivideMix, FixMatch
from tf_labeldp.vault import Numbers

pytestmark = pytest.mark.filterwarnings("ignore:the release is indistinguishable")
IMAGES = np.random.default_rng(0).random((N, 4, 4, 1), dtype=np.float32)
DENSE = keras.losses.CategoricalCrossentropy(from_logits=True)


def image_network():
    layers = [keras.Input((4, 4, 1)), keras.layers.Flatten(), keras.layers.Dense(K)]
    return keras.Sequential(layers)


def learner(kind, **arguments):
    model = kind(image_network(), **arguments)
    model.compile("sgd", DENSE if kind is FixMatch else None)
    return model


def fit_learner(model, noisy, **arguments):
    model.fit(IMAGES, noisy, batch_size=32, steps_per_epoch=1, verbose=0, **arguments)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FixMatch, DivideMix])
def test_b1_priors_of_a_learner_are_counted_also_in_its_file(kind, tmp_path):
    priors = vault().release(HistogramMechanism(5.0, K)).priors()
    noisy = vault().randomize(RandomizedResponse(1.0, K))
    model = learner(kind, priors=priors)
    assert stated(model) == 5.0
    assert stated(fit_learner(model, noisy)) == 6.0
    model.save(tmp_path / "learner.keras")
    assert stated(ldp.load_model(tmp_path / "learner.keras")) == 6.0


@pytest.mark.slow
def test_b1_clusters_of_a_private_encoder_are_counted():
    encoder, _ = multi_stage(vault(), epsilon=8.0)
    clusters = Clusters(Y, K, encoder=encoder)  # Each class keeps most of its noisy labels.
    noisy = vault().randomize(RandomizedResponse(5.0, K))
    model = fit_learner(learner(FixMatch), noisy, clusters=clusters)
    assert stated(model) == pytest.approx(13.0)


def bootstrapped(network, labels, **arguments):
    head = BootstrappedHead(1.0, 1e-5, network, epochs=1, verbose=0, **arguments)
    return head.fit(X, labels)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["encoder", "network"])
def test_b2_the_inputs_of_a_bootstrapped_head_are_counted(where):
    def fitted(labels):
        trained, _ = multi_stage(vault(), epsilon=8.0)
        if where == "encoder":
            return bootstrapped(plain(), labels, encoder=trained)
        return bootstrapped(trained, labels)

    labels = vault(20.0, 1e-5)
    head = fitted(labels)
    assert head.guarantee(1e-5).epsilon > 8.5 and labels.guarantee().epsilon > 8.5
    assert stated(head.to_keras()) == pytest.approx(head.guarantee().epsilon)
    poor = vault(1.0, 1e-5)
    with pytest.raises(ldp.BudgetExceededError):
        fitted(poor)
    assert poor.guarantee().epsilon == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("way", ["head", "door"])
def test_b2_an_encoder_trained_in_the_clear_promises_nothing(way):
    """The whole model shows its steps; a model of its layers is a named assumption."""
    whole = in_the_clear()
    part = keras.Model(whole.inputs, whole.layers[0].output)
    for encoder, is_whole in ((whole, True), (part, False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if way == "head":
                estimator = bootstrapped(plain(), vault(2.0, 1e-5), encoder=encoder)
            else:
                door = ldp.PrivateClassifier(
                    1.0, 1e-5, num_classes=K, model=plain(), epochs=1, encoder=encoder
                )
                estimator = door.fit(X, Y)
        messages = [str(warning.message) for warning in caught]
        assert any("Nothing is promised" in message for message in messages) == is_whole
        statement = estimator.guarantee()
        assert math.isinf(statement.epsilon) == is_whole
        assert is_whole or "public-inputs" in {note.code for note in statement.assumptions}


@pytest.mark.slow
def test_b3_a_teacher_with_a_private_network_is_counted():
    network = image_network()
    noisy = vault().randomize(RandomizedResponse(3.0, K))
    network.compile("sgd", DENSE)
    ldp.fit(network, IMAGES, noisy, verbose=0)
    teacher = fix_match_teacher(network, steps_per_epoch=1, batch_size=8)
    pate = PATE(1.0, 1e-5, num_teachers=4, num_queries=5, teacher=teacher)
    labels = vault(20.0, 1e-5)
    answers = pate.answer(IMAGES, labels)
    assert answers.guarantee(1e-5).epsilon == labels.guarantee().epsilon > 3.5


def constant(features, labels, queries):
    return np.zeros(len(queries), int)


def other(features, labels, queries):
    return np.ones(len(queries), int)


def test_b3_a_stored_answer_needs_its_teacher(tmp_path):
    def answered(teacher):
        labels = vault(5.0, 1e-5, store=tmp_path / "store")
        pate = PATE(1.0, 1e-5, num_teachers=4, num_queries=5, teacher=teacher, key="pate")
        return pate.answer(X, labels)

    first = answered(constant)
    np.testing.assert_array_equal(answered(constant).values, first.values)
    with pytest.raises(ldp.LabelStoreError, match="public input"):
        answered(other)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["evaluation", "model"])
def test_b4_fits_on_arrays_add_up(option):
    def fitted():
        arguments: dict[str, Any] = {"budget_for_evaluation": 0.5}
        if option == "model":
            arguments = {"model": plain(), "epochs": 1}
        door = ldp.PrivateClassifier(1.0, 1e-5, num_classes=K, **arguments)
        return door.fit(X, Y).guarantee(1e-5).epsilon

    first = fitted()
    with pytest.warns(UserWarning, match="this is fit number"):
        several = [fitted() for _ in range(3)]
    assert first == pytest.approx(1.0, rel=1e-3)
    assert all(b > a * 1.1 for a, b in zip([first, *several], several, strict=False))


@pytest.mark.slow
def test_b4_a_grid_search_over_the_front_door_states_the_sum():
    from sklearn.model_selection import GridSearchCV

    door = ldp.PrivateRegressor(0.5, 1e-5, low=0, high=K, budget_for_evaluation=0.1)
    once = ldp.PrivateRidge(0.5, 1e-5, low=0, high=K).fit(X[1:] + 9.0, Y[1:].astype(float))
    search = GridSearchCV(door, {"loss": ["squared_error", "poisson"]}, cv=3)
    with pytest.warns(UserWarning, match="this is fit number"):
        search.fit(X, Y.astype(float))
    assert search.best_estimator_.guarantee(1e-5).epsilon > 2.0 * once.guarantee(1e-5).epsilon


def bins(epsilon=1.0, spent=5.0):
    grid = tuple(np.linspace(0.0, 10.0, 11).tolist())
    labels = ldp.PrivateLabels(
        np.linspace(0.0, 10.0, N), Numbers(0, 10), budget=ldp.PrivacyBudget(9.0)
    )
    return optimal_bins(grid, labels.release(HistogramMechanism(spent, values=grid)).priors(), 1.0)


def test_b5_keyed_draws_count_the_bins(tmp_path):
    mechanism = bins()
    key = ldp.scale.ReleaseKey.create(tmp_path / "labels.key")
    key.register("first", mechanism, num_rows=N)
    assert key.guarantee().epsilon == 6.0
    numbers = np.linspace(0.0, 10.0, N)
    options = {"budget": ldp.PrivacyBudget(9.0), "store": tmp_path / "store"}
    keyed = ldp.PrivateLabels(numbers, Numbers(0, 10), draws="keyed", **options)
    assert keyed.randomize(mechanism).guarantee().epsilon == 6.0


def test_b5_a_mechanism_in_json_keeps_the_receipts_of_its_bins():
    """TFX passes mechanisms to its workers as JSON."""
    from tf_labeldp.mechanisms import Mechanism

    mechanism = bins()
    read = Mechanism.from_json(json.loads(json.dumps(mechanism.to_json())))
    assert read == mechanism and read.receipts
    assert ldp.accounting.public_input(read).receipts[0].id == mechanism.receipts[0].id


def test_features_with_receipts_are_counted():
    model = dp_sgd(private(), vault())
    features = ldp.accounting.PublicInput(
        model.predict(X, verbose=0), ldp.accounting.public_input(model).receipts
    )
    head = PrivateLogisticRegression(1.0, 1e-4).fit(features, vault())
    assert len(head.receipts_) == 2


def test_receipts_in_a_list_are_counted():
    noisy = vault(2.0).randomize(RandomizedResponse(1.0, K))
    prior = ldp.accounting.PublicInput(np.full(K, 1.0 / K), list(noisy.receipts))
    labels = vault(2.0)
    drawn = labels.randomize(ldp.RRWithPrior(1.0, K), priors=prior)
    assert drawn.guarantee().epsilon == labels.guarantee().epsilon == 2.0
