"""Weights of classes at every door: names and codes mean the same, and other keys are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import tf_labeldp as ldp
from tf_labeldp.data import poisson_batches
from tf_labeldp.heads import NoiseCluster, PrivateLogisticRegression
from tf_labeldp.keras_layers import LabelWeightedLoss
from tf_labeldp.vault import Classes, Numbers, Rows

N = 300
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 4)).astype(np.float32)
CODES = np.argmax(X[:, :3] + RNG.normal(size=(N, 3)), axis=1)
NAMES = ("no", "yes", "maybe")
NUMBERS = (1, 2, 3)
"""Class values that are numbers, and no codes: 1 is the class of code 0."""
SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
SOFT = keras.losses.CategoricalCrossentropy(from_logits=True)


def vault(classes: Any) -> ldp.PrivateLabels:
    budget = ldp.PrivacyBudget(20.0, 1e-3)
    values = np.array(classes)[CODES]
    return ldp.PrivateLabels(values, Classes(classes), budget=budget, insecure_seed=0)


def network(kind: type[keras.Model] = keras.Model) -> keras.Model:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    return kind(inputs, keras.layers.Dense(3)(inputs))


def fitted(model: Any) -> Callable[..., np.ndarray]:
    return lambda labels, weights: (
        model.__class__(**model.get_params() | {"class_weight": weights})
        .fit(X, labels)
        .predict_proba(X)
    )


def boosting_on_noisy(labels: Any, weights: Any) -> np.ndarray:
    noisy = labels.randomize(ldp.RandomizedResponse(5.0, 3), key="a")
    trees = ldp.PrivateBoosting(class_weight=weights, max_trees=5)
    return trees.fit(X, noisy).predict_proba(X)


def steps(labels: Any, weights: Any, *, in_fit: bool) -> np.ndarray:
    model = network(ldp.LabelDPModel)
    optimizer = ldp.LabelDPOptimizer(keras.optimizers.SGD(0.5), 9.0, 3.0, insecure_seed=0)
    model.compile(optimizer, SPARSE)
    in_batches = {} if in_fit else {"class_weight": weights}
    data = poisson_batches(X, labels, sampling_probability=1.0, steps=2, **in_batches)
    model.fit(data, verbose=0, **({"class_weight": weights} if in_fit else {}))
    return model.get_weights()[0]


def made_private(labels: Any, weights: Any) -> np.ndarray:
    model = network()
    model.compile("sgd", SPARSE)
    settings: dict[str, Any] = {"epsilon": 1.0, "epochs": 1, "batch_size": 150}
    settings |= {"insecure_seed": 0, "class_weight": weights}
    private, batches, _ = ldp.make_private(model, x=X, labels=labels, **settings)
    private.fit(batches, verbose=0)
    return private.get_weights()[0]


def stages(labels: Any, weights: Any) -> np.ndarray:
    run = ldp.MultiStageTraining(
        X,
        labels,
        epsilon=5.0,
        fractions=(1.0,),
        epochs_per_stage=2,
        class_weight=weights,
        verbose=0,
    )
    model = network()
    model.compile(keras.optimizers.SGD(0.1), SOFT)
    model.fit(run.dataset(), epochs=2, callbacks=[run], verbose=0)
    return model.get_weights()[0]


def trained(targets: str) -> Callable[..., np.ndarray]:
    def train(labels: Any, weights: Any) -> np.ndarray:
        noisy = labels.randomize(ldp.RandomizedResponse(5.0, 3), key="a")
        model = network()
        loss = {"values": SPARSE, "posterior": SOFT}.get(targets)
        model.compile("sgd", loss or LabelWeightedLoss(from_logits=True))
        ldp.fit(model, X, noisy, targets=targets, class_weight=weights, shuffle=False, verbose=0)
        return model.get_weights()[0]

    return train


DOORS: dict[str, Callable[..., np.ndarray]] = {
    "ridge": fitted(ldp.PrivateRidge(5.0, 1e-3)),
    "logistic": fitted(PrivateLogisticRegression(5.0, 1e-3)),
    "clusters": fitted(NoiseCluster(5, 5.0)),
    "boosting": fitted(ldp.PrivateBoosting(5.0, max_trees=5)),
    "boosting on noisy labels": boosting_on_noisy,
    "front door": fitted(ldp.PrivateClassifier(5.0, 1e-3)),
    "batches": lambda labels, weights: steps(labels, weights, in_fit=False),
    "fit on batches": lambda labels, weights: steps(labels, weights, in_fit=True),
    "make_private": made_private,
    "stages": stages,
    "fit, posterior": trained("posterior"),
    "fit, values": trained("values"),
    "fit, debiased": trained("debiased"),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("door", DOORS)
def test_names_and_codes_mean_the_same_and_other_keys_are_refused(door: str) -> None:
    call = DOORS[door]
    by_name = call(vault(NAMES), {"yes": 4.0, "maybe": 0.5})
    np.testing.assert_array_equal(call(vault(NAMES), {1: 4.0, 2: 0.5}), by_name)
    np.testing.assert_array_equal(call(vault(NUMBERS), {2: 4.0, 3: 0.5}), by_name)
    assert np.abs(call(vault(NAMES), {"no": 4.0}) - by_name).max() > 1e-4
    for classes, weights, words in (
        (NAMES, {"yes": 4.0, "other": 1.0}, r"for the classes \['no', 'yes', 'maybe'\].*other"),
        (NAMES, {3: 4.0}, r"for the classes \['no', 'yes', 'maybe'\], got \[3\]"),
        (NAMES, {"yes": 4.0, 2: 0.5}, "class values or by codes, got both, 'yes' and 2"),
        # A key of 0 is a code alone, and 1 would name another class as a code.
        (NUMBERS, {0: 4.0, 1: 0.5}, r"for the classes \[1, 2, 3\], got \[0\]"),
        (NAMES, {"yes": -4.0}, "class_weight must be in"),
    ):
        labels = vault(classes)
        with pytest.raises(ValueError, match=words):
            call(labels, weights)
        assert {use.key for use in labels.receipts} <= {"a"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("labels", ["numbers", "rows"])
def test_weights_of_classes_are_for_classes(labels: str) -> None:
    budget = ldp.PrivacyBudget(9.0)
    if labels == "numbers":
        numbers = ldp.PrivateLabels(X[:, 0], Numbers(-5.0, 5.0), budget=budget)
        noisy = numbers.randomize(ldp.LabelRandomizer(1.0))
    else:
        rows = ldp.PrivateLabels(X[:, :3] > 0, Rows(3), budget=budget)
        noisy = rows.randomize(ldp.RandomizedResponse(1.0, 2))
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(noisy.values[0].size)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="expected targets of classes for class_weight"):
        ldp.fit(model, X, noisy, class_weight={1: 2.0}, verbose=0)


@pytest.mark.slow
def test_the_expected_loss_of_a_posterior_is_that_of_weighted_true_labels() -> None:
    """A step on posterior targets is the mean step over all true labels, weighted by class."""
    weights = {"no": 1.0, "yes": 9.0, "maybe": 0.0}
    noisy = vault(NAMES).randomize(ldp.RandomizedResponse(1.0, 3), key="a")
    posterior = noisy.posterior()

    def step(train: Callable[[keras.Model], Any], loss: Any) -> np.ndarray:
        model = network()
        model.compile(keras.optimizers.SGD(1.0), loss)
        before = model.get_weights()[0]
        train(model)
        return model.get_weights()[0] - before

    whole: dict[str, Any] = {"batch_size": N, "epochs": 1, "verbose": 0}
    samples = RNG.uniform(0.5, 2.0, N)
    table = np.array(list(weights.values()))
    for loss in (SOFT, keras.losses.MeanSquaredError(), keras.losses.CategoricalCrossentropy(True)):

        def on_posterior(model: keras.Model) -> None:
            ldp.fit(model, X, noisy, class_weight=weights, sample_weight=samples, **whole)

        found = step(on_posterior, loss)
        expected = np.zeros_like(found)
        for code in range(3):
            rows = np.repeat(np.eye(3, dtype=np.float32)[code : code + 1], N, axis=0)
            factors = samples * posterior[:, code] * table[code]
            expected += step(
                lambda m, y=rows, w=factors: m.fit(X, y, sample_weight=w, **whole), loss
            )
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert np.abs(found).max() > 1e-2


@pytest.mark.slow
def test_weights_find_a_rare_class() -> None:
    """At epsilon 1 no posterior of a class of 5 % has it as the likeliest, as Keras would need.

    Posteriors shrink to the class shares, which weights of classes do not undo; debiased do not.
    """
    rng = np.random.default_rng(100)
    x = rng.normal(size=(20_000, 8)).astype(np.float32)
    y = (x[:, 0] + 0.6 * rng.normal(size=20_000) > 1.9).astype(int)
    labels = ldp.PrivateLabels(
        np.array(["no", "yes"])[y],
        Classes(["no", "yes"]),
        budget=ldp.PrivacyBudget(1.0),
        insecure_seed=1,
    )
    noisy = labels.randomize(ldp.RandomizedResponse(1.0, 2))
    assert noisy.posterior()[:, 1].max() < 0.5
    found: dict[str, list[np.ndarray]] = {"posterior": [], "debiased": []}
    for targets, results in found.items():
        for weights in (None, {"yes": 15.0}):
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
            loss = SOFT if targets == "posterior" else LabelWeightedLoss(from_logits=True)
            model.compile(keras.optimizers.Adam(0.02), loss)
            settings: dict[str, Any] = {"epochs": 4, "batch_size": 256, "verbose": 0}
            ldp.fit(model, x, noisy, targets=targets, class_weight=weights, **settings)
            results.append(
                keras.ops.convert_to_numpy(keras.ops.softmax(model.predict(x, verbose=0)))
            )
    plain, weighted = (rows[:, 1] for rows in found["posterior"])
    assert plain.mean() < 0.08 and weighted.mean() > 5 * plain.mean()
    recalls = [rows.argmax(axis=1)[y == 1].mean() for rows in found["debiased"]]
    assert recalls[1] > 0.65 and recalls[1] > recalls[0] + 0.2
