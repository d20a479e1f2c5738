"""Steps of ``LabelDPModel`` against the definition: a loop over examples, one tape each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.data import poisson_batches
from tf_labeldp.data.batches import open_for_training
from tf_labeldp.mechanisms.step_noise import standard_normal
from tf_labeldp.training import LabelDPModel, LabelDPOptimizer

N, D, K, CLIP, RATE = 22, 3, 4, 0.4, 0.7
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.normal(size=(N, D)).astype(np.float32), rng.integers(0, K, N)


def private_model(
    inner: Any = None, *, regularizer: Any = None, hidden: int = 5, **settings: Any
) -> LabelDPModel:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((D,))
    x = keras.layers.Dense(hidden, activation="tanh", kernel_regularizer=regularizer)(inputs)
    model = LabelDPModel(inputs, keras.layers.Dense(K)(x))
    settings = {"l2_norm_clip": CLIP, "noise_multiplier": 1e-9, **settings}
    model.compile(LabelDPOptimizer(inner or keras.optimizers.SGD(RATE), **settings), loss=LOSS)
    return model


def clipped_sum(
    model: keras.Model, x: np.ndarray, y: np.ndarray, weights: np.ndarray, group: int = 1
) -> list[np.ndarray]:
    """The sum of clipped gradients, group by group, each by a tape of its own."""
    total = [np.zeros(v.shape, np.float64) for v in model.trainable_variables]
    for start in range(0, len(x), group):
        rows = slice(start, start + group)
        used = np.count_nonzero(weights[rows])
        if not used:
            continue
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y[rows], model(x[rows]))
            loss = tf.reduce_sum(losses * weights[rows]) / used
        parts = tape.gradient(loss, [v.value for v in model.trainable_variables])
        parts = [part.numpy().astype(np.float64) for part in parts]
        norm = np.sqrt(sum(np.sum(part**2) for part in parts))
        total = [t + p / max(1.0, norm / CLIP) for t, p in zip(total, parts, strict=True)]
    return total


def by_hand(
    model: keras.Model,
    batches: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
    divisor: float,
    noise: Callable[[int], np.ndarray],
    group: int = 1,
) -> list[np.ndarray]:
    """Weights after SGD of the definition: w - rate (sum of clipped gradients + noise) / b."""
    copy = keras.Model(model.input, model.output)
    for x, y, weights in batches:
        total = clipped_sum(copy, x, y, weights, group)
        flat = np.concatenate([part.ravel() for part in total])
        flat += noise(flat.size)
        ends = np.cumsum([part.size for part in total])[:-1]
        for v, step in zip(copy.trainable_variables, np.split(flat, ends), strict=True):
            v.assign(v - RATE * (step / divisor).reshape(v.shape).astype(np.float32))
    return [np.array(w) for w in copy.get_weights()]


def no_noise(size: int) -> np.ndarray:
    return np.zeros(size)


def batches_of(x: np.ndarray, y: np.ndarray, size: int, weights: Any = None) -> list[Any]:
    weights = np.ones(len(x), np.float32) if weights is None else weights
    return [(x[i : i + size], y[i : i + size], weights[i : i + size]) for i in range(0, N, size)]


def same_weights(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    # Single precision of weights near 1, over a few steps.
    return all(np.allclose(a, b, rtol=0, atol=5e-6) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("method", ["ghost", "vectorized"])
def test_steps_on_arrays_are_the_definition_also_the_last_small_batch(method: str) -> None:
    x, y = data()
    model = private_model(method=method)
    start = model.get_weights()
    expected = by_hand(model, batches_of(x, y, 8), 8.0, no_noise)
    model.set_weights(start)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 3
    assert same_weights(model.get_weights(), expected)
    # The nearby wrong one: the last batch of 6 divided by 6.
    model.set_weights(start)
    wrong = by_hand(model, batches_of(x, y, 8)[-1:], 6.0, no_noise)
    model.set_weights(start)
    right = by_hand(model, batches_of(x, y, 8)[-1:], 8.0, no_noise)
    assert not same_weights(wrong, right)


def test_seeded_noise_is_added_to_the_sum_before_it_is_divided() -> None:
    x, y = data()
    model = private_model(noise_multiplier=2.0, insecure_seed=3)
    start, rng = model.get_weights(), np.random.default_rng(3)

    def noise(size: int) -> np.ndarray:
        return 2.0 * CLIP * standard_normal(size, rng)

    expected = by_hand(model, batches_of(x, y, 11), 11.0, noise)
    model.set_weights(start)
    model.fit(x, y, batch_size=11, shuffle=False, verbose=0)
    # The noisy sum is rounded to 2^-16 of 0.8, and then divided by 11.
    assert same_weights(model.get_weights(), expected)


def test_steps_on_poisson_batches_divide_by_the_expected_size() -> None:
    x, y = data()
    settings = {"sampling_probability": 0.3, "steps": 4, "insecure_seed": 9}
    drawn = open_for_training(poisson_batches(x, y, **settings)).take(4)
    batches = [tuple(part.numpy() for part in batch) for batch in drawn]
    sizes = {int(weights.sum()) for _, _, weights in batches}
    assert len(sizes) > 1  # so that another divisor would show
    model = private_model()
    start = model.get_weights()
    expected = by_hand(model, batches, 0.3 * N, no_noise)
    model.set_weights(start)
    model.fit(poisson_batches(x, y, **settings), verbose=0)
    assert same_weights(model.get_weights(), expected)


def test_sample_weights_scale_gradients_before_they_are_clipped() -> None:
    x, y = data()
    weights = np.linspace(0.0, 4.0, N).astype(np.float32)
    model = private_model()
    start = model.get_weights()
    expected = by_hand(model, batches_of(x, y, 11, weights), 11.0, no_noise)
    model.set_weights(start)
    model.fit(x, y, batch_size=11, shuffle=False, sample_weight=weights, verbose=0)
    assert same_weights(model.get_weights(), expected)


def test_microbatches_clip_means_of_neighbours() -> None:
    x, y = data()
    model = private_model(num_microbatches=4)
    start = model.get_weights()
    expected = by_hand(model, batches_of(x, y, 8), 4.0, no_noise, group=2)
    model.set_weights(start)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert same_weights(model.get_weights(), expected)


def test_regularizers_are_added_and_not_clipped() -> None:
    x, y = data()
    strength = 30.0  # its gradient is far longer than the clip
    with_penalty = private_model(regularizer=keras.regularizers.L2(strength))
    without = private_model()
    start = without.get_weights()
    with_penalty.set_weights(start)
    for model in (with_penalty, without):
        model.fit(x, y, batch_size=N, shuffle=False, verbose=0)
    difference = with_penalty.get_weights()[0] - without.get_weights()[0]
    np.testing.assert_allclose(difference, -RATE * 2.0 * strength * start[0], rtol=1e-4)
    np.testing.assert_array_equal(with_penalty.get_weights()[3], without.get_weights()[3])


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.Adam(0.1),
        lambda: keras.optimizers.AdamW(0.1, weight_decay=0.2),
        lambda: keras.optimizers.SGD(
            keras.optimizers.schedules.PiecewiseConstantDecay([1, 2], [1.0, 0.1, 0.01])
        ),
    ],
    ids=["adam", "weight_decay", "schedule"],
)
def test_inner_optimizers_get_the_private_gradient(make: Callable[[], Any]) -> None:
    x, y = data()
    model = private_model(make())
    reference = keras.models.clone_model(keras.Model(model.input, model.output))
    reference.set_weights(model.get_weights())
    inner = make()
    for rows in batches_of(x, y, 8):
        total = clipped_sum(reference, *rows)
        gradients = [tf.constant(part / 8.0, tf.float32) for part in total]
        inner.apply(gradients, reference.trainable_variables)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    for a, b in zip(model.get_weights(), reference.get_weights(), strict=True):
        # Adaptive ones divide by roots of small numbers, which magnifies rounding.
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-4)


def test_noise_of_a_step_is_rate_sigma_clip_over_the_batch() -> None:
    """From both sides: weights that no gradient reaches move by noise alone."""
    sigma, steps, size = 1.5, 80, 11
    inputs = keras.Input((D,))
    # The loss has no gradient at all, so that all that moves is noise.
    model = LabelDPModel(inputs, keras.layers.Dense(20)(inputs))
    optimizer = LabelDPOptimizer(keras.optimizers.SGD(RATE), CLIP, sigma)
    model.compile(optimizer, loss=lambda y_true, y_pred: 0.0 * tf.reduce_sum(y_pred, axis=1))
    moves, last = [], [model.get_weights()]

    def keep(*_: Any, **__: Any) -> None:
        now = model.get_weights()
        moves.extend((a - b).ravel() for a, b in zip(now, last[0], strict=True))
        last[0] = now

    x, y = data()
    watch = keras.callbacks.LambdaCallback(on_train_batch_end=keep)
    model.fit(x, y, batch_size=size, epochs=steps // 2, verbose=0, callbacks=[watch])
    sample = np.concatenate(moves)
    assert sample.size == steps * (D * 20 + 20)
    ratio = np.sum(sample**2) / (RATE * sigma * CLIP / size) ** 2
    # Chi-square with 6400 degrees of freedom: 1e-6 on each side (Wilson-Hilferty).
    degrees, z = sample.size, 4.753
    low, high = (
        degrees * (1 - 2 / (9 * degrees) + s * np.sqrt(2 / (9 * degrees))) ** 3 for s in (-z, z)
    )
    assert low < ratio < high
    # Both hold for every draw inside the interval: it is narrower than a tenth of sigma.
    assert not low < ratio * (size / N) ** 2 < high  # as if divided by all examples
    assert not low < ratio * (sigma / (sigma + 0.15)) ** 2 < high
