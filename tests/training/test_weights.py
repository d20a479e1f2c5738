"""Weights of samples and classes: public factors of the losses, before clipping."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from label_dp_cases import (
    DELTA,
    LOSS,
    SIGMA,
    D,
    K,
    N,
    after,
    batches,
    codes,
    features,
    network,
    optimizer,
    private_model,
    vault,
)

import tf_labeldp as ldp
from tf_labeldp.accounting import public_input
from tf_labeldp.plugins import (
    Batch,
    Clip,
    LabelDistanceClip,
    OutputLosses,
    PerExampleClipping,
    Speed,
)
from tf_labeldp.training import AltConv, LabelDPModel, SelfConv
from tf_labeldp.vault import Classes, Numbers

TABLE = [0.2, 1.0, 4.0, 2.0]
CLASSES = dict(enumerate(TABLE))
SAMPLES = np.random.default_rng(3).uniform(0.0, 3.0, N).astype(np.float32)
BINARY = keras.losses.BinaryCrossentropy(from_logits=True)


def reference(model: Any, y: np.ndarray, weights: np.ndarray, clip: float) -> list[np.ndarray]:
    """The sum of clipped gradients of weighted losses, one example after the other."""
    total = [np.zeros(variable.shape) for variable in model.trainable_variables]
    for row, x in enumerate(features()):
        with tf.GradientTape() as tape:
            loss = float(weights[row]) * LOSS(y[row : row + 1], model(x[None], training=True))
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        factor = min(1.0, clip / max(float(tf.linalg.global_norm(gradients)), 1e-12))
        total = [t + factor * g.numpy() for t, g in zip(total, gradients, strict=True)]
    return total


def weights_of(y: np.ndarray) -> np.ndarray:
    return SAMPLES * np.array(TABLE, np.float32)[y]


def distance(first: Any, second: Any) -> float:
    return float(np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(first, second, strict=True))))


@pytest.mark.slow
@pytest.mark.holds("training.LabelDPModel")
@pytest.mark.parametrize("method", ["ghost", "vectorized"])
def test_weights_come_before_the_clip_and_keep_the_sensitivity(method: str) -> None:
    model, y, clip = network(keras.layers.Dense(4, "tanh")), codes(), 0.8
    weighted = OutputLosses(model, LOSS).with_class_weights({"last": TABLE})
    clipping = PerExampleClipping(model, Speed(method))

    def sums(labels: Any, losses: Any = weighted) -> list[np.ndarray]:
        batch = Batch(features(), labels, SAMPLES, losses)
        return [np.asarray(part) for part in clipping.clipped_sum(batch, Clip(clip)).gradients]

    found = sums(y)
    for a, b in zip(reference(model, y, weights_of(y), clip), found, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    np.testing.assert_allclose(sums(np.eye(K)[y], rows_loss(model))[0], found[0], atol=2e-5)
    heaviest = int(SAMPLES.argmax())
    moved = []
    for label in range(K):
        other = y.copy()
        other[heaviest] = label
        moved.append(distance(sums(other), found))
    assert clip < max(moved) <= 2.0 * clip * (1 + 1e-4)


def rows_loss(model: Any) -> OutputLosses:
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    return OutputLosses(model, loss).with_class_weights({"last": TABLE})


@pytest.mark.slow
@pytest.mark.holds("training.LabelDPModel")
def test_weights_with_clipping_by_label_distance() -> None:
    model, y = network(units=1), (codes() % 2).astype(np.float32)[:, None]
    factors = (0.5, 3.0)
    weighted = OutputLosses(model, BINARY).with_class_weights({"last": factors})

    def sums(labels: Any, clip: float) -> list[np.ndarray]:
        bound = LabelDistanceClip(clip, class_weights=factors)
        batch = Batch(features(), labels, SAMPLES, weighted)
        found = PerExampleClipping(model).clipped_sum(batch, bound).gradients
        return [np.asarray(part) for part in found]

    plain = PerExampleClipping(model).clipped_sum(
        Batch(features(), y, SAMPLES, weighted), Clip(1e6)
    )
    for a, b in zip(sums(y, 1e6), plain.gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    moved = []
    for row in range(N):
        other = y.copy()
        other[row] = 1.0 - other[row]
        moved.append(distance(sums(other, 0.3), sums(y, 0.3)))
    assert 0.3 < max(moved) <= 0.6 * (1 + 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("data", ["arrays", "batches", "fit"])
def test_a_step_of_fit_is_that_of_the_reference(data: str) -> None:
    model, y = network(), codes()
    model.compile(optimizer(1e-9), loss=LOSS)
    before, expected = model.get_weights(), reference(model, y, weights_of(y), 1.0)
    if data == "arrays":
        model.fit(
            features(), y, batch_size=N, sample_weight=SAMPLES, class_weight=CLASSES, verbose=0
        )
    else:
        in_batches = {"class_weight": CLASSES} if data == "batches" else {}
        in_fit = {} if data == "batches" else {"class_weight": CLASSES}
        sampled = batches(y, q=1.0, steps=1, sample_weight=SAMPLES, **in_batches)
        model.fit(sampled, verbose=0, **in_fit)
    for old, new, part in zip(before, model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(new - old, -0.5 * part / N, atol=1e-6)


@pytest.mark.slow
def test_weights_by_output() -> None:
    inputs = keras.Input((D,))
    heads = {name: keras.layers.Dense(K, name=name)(inputs) for name in ("a", "b")}
    y = {"a": codes(), "b": codes(1)}
    found = []
    for weights in ({"a": CLASSES}, {"a": CLASSES, "b": {}}, None):
        model = LabelDPModel(inputs, heads)
        model.set_weights([np.zeros(part.shape) for part in model.get_weights()])
        model.compile(optimizer(1e-9, clip=1e2), loss=LOSS)
        model.fit(features(), y, class_weight=weights, batch_size=N, verbose=0)
        found.append({layer.name: layer.get_weights()[0] for layer in model.layers[1:]})
    np.testing.assert_allclose(found[0]["b"], found[2]["b"], atol=1e-6)
    np.testing.assert_allclose(found[0]["a"], found[1]["a"], atol=1e-6)
    assert np.abs(found[0]["a"] - found[2]["a"]).max() > 1e-3


@pytest.mark.slow
def test_a_denoiser_projects_onto_weighted_gradients() -> None:
    """Without noise, the weighted gradient is its own projection."""
    found = []
    for denoiser in (None, SelfConv(relative_gap=1e-4, max_products=400)):
        model = network()
        model.compile(optimizer(1e-9, clip=1e6, denoiser=denoiser), loss=LOSS)
        model.fit(
            features(),
            codes(),
            sample_weight=SAMPLES,
            class_weight=CLASSES,
            batch_size=N,
            verbose=0,
        )
        found.append(model.get_weights()[0])
    np.testing.assert_allclose(found[0], found[1], atol=5e-3)


@pytest.mark.holds("training.LabelDPModel")
def test_weights_cost_nothing_and_are_named_in_the_statement() -> None:
    model = private_model()
    model.fit(batches(named_vault(), class_weight={"no": 3.0}), epochs=2, verbose=0)
    assert model.guarantee().epsilon == pytest.approx(after(2))
    assert "public-sample-weights" in {note.code for note in model.guarantee().assumptions}
    # Weights that were made of noisy labels have their receipts.
    other = vault(people="others")
    noisy = other.randomize(ldp.RandomizedResponse(1.0, K))
    released = public_input(noisy).with_value({0: 2.0})
    model, labels = private_model(), vault()
    model.fit(batches(labels), class_weight=released, verbose=0)
    assert {receipt.id for receipt in noisy.receipts} <= {
        receipt.id for receipt in public_input(model).receipts
    }


def named_vault() -> ldp.PrivateLabels:
    names = ["no", "yes", "maybe", "never"]
    budget = ldp.PrivacyBudget(3.0, DELTA)
    return ldp.PrivateLabels(np.array(names)[codes()], Classes(names), budget=budget)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"class_weight": "balanced"}, r"public numbers, got 'balanced'.*are a release"),
        ({"class_weight": {K: 2.0}}, r"class_weight for the classes \[0, 1, 2, 3\], got \[4\]"),
        ({"class_weight": {0: -1.0}}, "class_weight must be in"),
        ({"class_weight": {"other": {0: 1.0}}}, r"class_weight by output, for \['last'\]"),
        ({"sample_weight": -SAMPLES}, "finite numbers, at least zero"),
        ({"sample_weight": SAMPLES[1:]}, r"sample_weight of shape \(100,\)"),
        ({"sample_weight": {"last": SAMPLES}}, "one sample_weight per example, got weights by"),
    ],
    ids=range(7),
)
def test_weights_that_are_refused_before_a_charge(settings: Any, expected: str) -> None:
    labels, model = vault(), private_model()
    with pytest.raises(ValueError, match=expected):
        model.fit(batches(labels, **settings), verbose=0)
    with pytest.raises(ValueError, match=expected):
        model.fit(features(), codes(), verbose=0, **settings)
    assert not labels.receipts and model.guarantee().headline == "no record of any label"


def test_weights_of_other_labels_and_in_two_places() -> None:
    numbers = ldp.PrivateLabels(SAMPLES, Numbers(0.0, 3.0), budget=ldp.PrivacyBudget(3.0, DELTA))
    model = network(units=1)
    model.compile(optimizer(SIGMA), loss="mse")
    with pytest.raises(ValueError, match=r"expected classes for class_weight, got numbers in"):
        model.fit(batches(numbers, class_weight={0: 1.0}), verbose=0)
    with pytest.raises(ValueError, match=r"in poisson_batches or in fit, got both"):
        private_model().fit(batches(vault(), class_weight={0: 1.0}), class_weight={0: 1.0})
    with pytest.raises(ValueError, match=r"no sample_weight with AltConv"):
        private_model(denoiser=AltConv(4)).fit(batches(vault(), sample_weight=SAMPLES))
