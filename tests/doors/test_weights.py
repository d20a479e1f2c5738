"""Weights at the ends of floating numbers: a fit, or a clear error before anything is charged."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest

import tf_labeldp as ldp
from tf_labeldp.boosting import PrivateBoosting

N = 300
RNG = np.random.default_rng(0)
Y = RNG.integers(0, 2, N)
X = (np.eye(4)[Y] + RNG.normal(size=(N, 4))).astype(np.float32)
WEIGHTS = {
    "one": np.where(np.arange(N) == 7, 1.0, 0.0),
    "two": np.where(np.arange(N) < 2, 1.0, 0.0),
    "one of 1e300": np.where(np.arange(N) == 7, 1e300, 1.0),
    "from 1e-300 to 1e300": np.geomspace(1e-300, 1e300, N),
    "all of 1e308": np.full(N, 1e308),
    "all of 1e39": np.full(N, 1e39),
    "all of 1e-300": np.full(N, 1e-300),
    "all of 5e-324": np.full(N, 5e-324),
    "some of 5e-324": np.where(np.arange(N) < 9, 5e-324, 1.0),
}
SCALES = ("all of 1e308", "all of 1e39", "all of 1e-300", "all of 5e-324")


def network():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True))
    return model


def steps(labels, **weights):
    model = ldp.LabelDPModel.from_model(network())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(ldp.LabelDPOptimizer("sgd", 1.0, 4.0), loss)
    batches = ldp.data.poisson_batches(X, labels, sampling_probability=0.2, steps=2, **weights)
    model.fit(batches, epochs=1, verbose=0)
    return model.predict(X, verbose=0)


def on_noisy_labels(labels, **weights):
    model = network()
    ldp.fit(model, X, labels.randomize(ldp.RandomizedResponse(1.0, 2)), verbose=0, **weights)
    return model.predict(X, verbose=0)


def of_a_head(make):
    return lambda labels, **weights: make(1.0, 1e-5).fit(X, labels, **weights).predict_proba(X)


HEADS = {
    "ridge": of_a_head(ldp.PrivateRidge),
    "logistic": of_a_head(ldp.PrivateLogisticRegression),
    "classifier": of_a_head(lambda *budget: ldp.PrivateClassifier(*budget, method="head")),
}
DOORS = HEADS | {
    "boosting": lambda labels, **weights: (
        PrivateBoosting(1.0).fit(X, labels, **weights).predict_proba(X)
    ),
    "poisson_batches": steps,
    "fit": on_noisy_labels,
}
WORDS = "sample_weight|rows of features that differ|noisy labels worth at least 20 true ones"


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("door", DOORS)
def test_weights_fit_or_are_refused_before_the_charge(door, weights):
    labels = ldp.PrivateLabels(Y, 2, budget=ldp.PrivacyBudget(50.0, 1e-3))
    try:
        predicted = DOORS[door](labels, sample_weight=WEIGHTS[weights])
    except ValueError as error:
        assert re.search(WORDS, str(error))
        assert door == "fit" or labels.receipts == ()
        assert door not in HEADS or weights not in SCALES
    else:
        assert np.all(np.isfinite(predicted))


@pytest.mark.parametrize("weights", SCALES)
@pytest.mark.parametrize("door", HEADS)
def test_the_scale_of_weights_is_that_of_no_weights(door, weights):
    """Heads divide by the mean, whatever the sum."""
    fitted = [
        DOORS[door](
            ldp.PrivateLabels(Y, 2, budget=ldp.PrivacyBudget(5.0, 1e-3), insecure_seed=1),
            sample_weight=scaled,
        )
        for scaled in (np.ones(N), WEIGHTS[weights])
    ]
    np.testing.assert_allclose(*fitted, rtol=1e-5)


@pytest.mark.parametrize("weight", [1e39, 1e308, np.inf])
@pytest.mark.parametrize("door", [door for door in DOORS if door != "boosting"])
def test_class_weights_that_overflow_are_refused(door, weight):
    labels = ldp.PrivateLabels(Y, 2, budget=ldp.PrivacyBudget(50.0, 1e-3))
    make = {
        "ridge": ldp.PrivateRidge,
        "logistic": ldp.PrivateLogisticRegression,
        "classifier": ldp.PrivateClassifier,
    }
    with pytest.raises(ValueError, match="class_weight must be in"):
        if door in make:
            make[door](1.0, 1e-5, class_weight={1: weight}).fit(X, labels)
        else:
            DOORS[door](labels, class_weight={1: weight})
    assert door == "fit" or labels.receipts == ()
