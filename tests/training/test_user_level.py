"""Privacy of users: their examples are clipped together, sampled together, and stated so."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from label_dp_cases import recorded

import tf_labeldp as ldp
from tf_labeldp.accounting import dp_sgd_guarantee
from tf_labeldp.data import poisson_batches
from tf_labeldp.mechanisms import RandomizedResponse
from tf_labeldp.training import LabelDPModel, LabelDPOptimizer, SelfConv
from tf_labeldp.vault import Users

USERS = np.repeat(np.arange(12), [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6])  # fewer, k and more
N, D, K, LIMIT, CLIP, DELTA, SIGMA, STEPS = USERS.size, 3, 4, 3, 0.5, 1e-3, 3.0, 2
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.normal(size=(N, D)).astype(np.float32), rng.integers(0, K, N)


def batches(labels: Any, q: float = 0.5, **settings: Any) -> Any:
    return poisson_batches(
        data()[0],
        labels,
        sampling_probability=q,
        steps=STEPS,
        users=USERS,
        max_examples_per_user=LIMIT,
        **settings,
    )


def private_model(noise_multiplier: float = SIGMA, **settings: Any) -> LabelDPModel:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((D,))
    model = LabelDPModel(inputs, keras.layers.Dense(K)(inputs))
    inner = keras.optimizers.SGD(1.0)
    model.compile(LabelDPOptimizer(inner, CLIP, noise_multiplier, **settings), loss=LOSS)
    return model


def vault() -> ldp.PrivateLabels:
    return ldp.PrivateLabels(data()[1], K, budget=ldp.PrivacyBudget(50.0, DELTA))


def test_a_user_with_most_rows_needs_a_bound() -> None:
    users = np.r_[np.zeros(1000, int), np.arange(1, 101)]
    x, budget = np.zeros((users.size, D), np.float32), ldp.PrivacyBudget(50.0, DELTA)
    labels = ldp.PrivateLabels(np.zeros(users.size, int), K, budget=budget, users=users)
    with pytest.raises(ValueError, match=r"at most 20 times the mean of 10\.9 rows, got 1,000"):
        poisson_batches(x, labels, sampling_probability=0.1, steps=1)
    bounded = ldp.PrivateLabels(
        np.zeros(users.size, int), K, budget=budget, users=Users(users, at_most=5)
    )
    found = poisson_batches(x[bounded.indices], bounded, sampling_probability=0.1, steps=1)
    assert (found.num_units, found.group_size) == (101, 5)


def user_gradient(model: keras.Model, x: Any, y: Any) -> np.ndarray:
    """The clipped mean gradient of one user's rows."""
    with tf.GradientTape() as tape:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x))
        loss = tf.reduce_mean(losses)
    parts = tape.gradient(loss, [v.value for v in model.trainable_variables])
    flat = np.concatenate([part.numpy().ravel() for part in parts])
    return flat / max(1.0, np.linalg.norm(flat) / CLIP)


def test_a_step_is_the_sum_of_clipped_user_gradients_over_the_expected_users() -> None:
    x, y, weights = recorded(private_model(), batches(data()[1], insecure_seed=8))[0]
    model = private_model(noise_multiplier=1e-9)
    start = np.concatenate([w.ravel() for w in model.get_weights()])
    total = np.zeros_like(start)
    for first in range(0, len(x), LIMIT):
        rows = slice(first, first + LIMIT)
        if weights[rows].any():
            assert weights[rows].all()  # all of a user's rows, or none
            gradient = user_gradient(model, x[rows], y[rows])
            assert np.linalg.norm(gradient) <= CLIP * (1 + 1e-6)
            total += gradient
    model.fit(batches(data()[1], insecure_seed=8), callbacks=[_StopAfterOne()], verbose=0)
    assert int(model.optimizer.iterations) == 1
    found = np.concatenate([w.ravel() for w in model.get_weights()])
    expected_users = 0.5 * 12
    np.testing.assert_allclose(found, start - total / expected_users, atol=1e-5)
    # Divided by examples instead of users, it would be a third of it.
    assert np.max(np.abs(total / expected_users - total / expected_users / LIMIT)) > 1e-3


@pytest.mark.slow
def test_changing_all_labels_of_a_user_moves_the_sum_by_two_clips_at_most() -> None:
    y = data()[1]
    moved = []
    for user in (5, 11):  # six examples each
        other = np.where(USERS == user, (y + 1) % K, y)
        found = []
        for labels in (y, other):
            model = private_model(noise_multiplier=1e-9)
            every = batches(labels, q=1.0, insecure_seed=8)
            model.fit(every, verbose=0, callbacks=[_StopAfterOne()])
            found.append(np.concatenate([w.ravel() for w in model.get_weights()]))
        moved.append(12 * np.linalg.norm(found[0] - found[1]))
    assert max(moved) <= 2 * CLIP * (1 + 1e-4)
    assert min(moved) > 0.1 * CLIP


class _StopAfterOne(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = True


@pytest.mark.slow
@pytest.mark.parametrize("with_vault", [True, False])
def test_the_statement_is_for_users(with_vault: bool) -> None:
    model, labels = private_model(), vault()
    model.fit(batches(labels if with_vault else data()[1]), epochs=2, verbose=0)
    expected = dp_sgd_guarantee(SIGMA, 0.5, 2 * STEPS, DELTA, privacy_unit="user")
    found = model.guarantee(DELTA)
    assert (found.epsilon, found.unit) == (expected.epsilon, "all labels of one user")
    if with_vault:  # which counts by label
        assert labels.guarantee().epsilon == found.epsilon


def test_releases_by_label_are_not_stated_by_user() -> None:
    model, labels = private_model(), vault()
    labels.randomize(RandomizedResponse(epsilon=1.0, num_classes=K))
    model.fit(batches(labels), verbose=0)
    # The vault has paid for both; the weights come from the steps alone.
    found, alone = labels.guarantee(), model.guarantee()
    assert (found.num_units, alone.num_units) == (len(labels), 12)
    assert found.unit == "the label of one training example"
    expected = dp_sgd_guarantee(SIGMA, 0.5, STEPS, DELTA, privacy_unit="user")
    assert (alone.epsilon, alone.unit) == (expected.epsilon, "all labels of one user")
    assert alone.epsilon < found.epsilon <= alone.epsilon + 1.0
    assert any("by label and not by user" in text for text in found.assumptions)
    assert not any("by label and not by user" in text for text in alone.assumptions)


def test_steps_by_example_are_not_stated_by_user() -> None:
    model, (x, y) = private_model(), data()
    by_example = poisson_batches(x, y, sampling_probability=0.5, steps=STEPS)
    for sampled in (batches(y), by_example):
        model.fit(sampled, verbose=0)
    found = model.guarantee(DELTA)
    assert found.unit == "the label of one training example"
    assert found.epsilon == dp_sgd_guarantee(SIGMA, 0.5, 2 * STEPS, DELTA).epsilon


@pytest.mark.slow
def test_users_with_a_denoiser_that_reveals_the_batch_are_counted_by_passes() -> None:
    model, labels = private_model(denoiser=SelfConv(max_products=5)), vault()
    model.fit(batches(labels), verbose=0)  # 6 of 12 users a batch: 2 steps are one pass
    expected = dp_sgd_guarantee(SIGMA, 1.0, 1, DELTA, privacy_unit="user")
    assert model.guarantee().epsilon == expected.epsilon
    assert model.guarantee().unit == "all labels of one user"


def test_a_vault_knows_its_users() -> None:
    x, y = data()
    budget = ldp.PrivacyBudget(50.0, DELTA)
    labels = ldp.PrivateLabels(y, K, budget=budget, users=Users(USERS, at_most=LIMIT))
    made = poisson_batches(x[labels.indices], labels, sampling_probability=0.5, steps=STEPS)
    assert (made.privacy_unit, made.num_units, made.group_size) == ("user", 12, LIMIT)
    model = private_model()
    model.fit(made, verbose=0)
    stated = model.guarantee()
    assert stated.unit == labels.guarantee().unit == "all labels of one user"
    assert stated.epsilon == labels.guarantee().epsilon and stated.num_units == 12
    fewer = poisson_batches(
        x[labels.indices], labels, sampling_probability=0.5, steps=1, max_examples_per_user=2
    )
    assert fewer.group_size == 2
    rows, alone = x[labels.indices], np.arange(len(labels))
    other = ldp.PrivateLabels(y[labels.indices], K, budget=budget, users=alone)
    for several, options in (({"a": labels, "b": other}, {}), (labels, {"users": alone})):
        with pytest.raises(ValueError, match="expected the users of the vault, got others"):
            poisson_batches(rows, several, sampling_probability=0.5, steps=1, **options)
