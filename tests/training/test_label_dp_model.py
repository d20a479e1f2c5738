"""Steps of ``LabelDPModel`` against the definition: a loop over examples, one tape each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from label_dp_cases import LOSS, network, optimizer, recorded, watch

from tf_labeldp.data import poisson_batches
from tf_labeldp.training import GaussianNoise, LabelDPModel, LabelDPOptimizer, NoiseMechanism

N, D, K, CLIP, RATE = 22, 3, 4, 0.4, 0.7
X = np.random.default_rng(1).normal(size=(N, D)).astype(np.float32)
Y = np.random.default_rng(2).integers(0, K, N)


def private_model(
    inner: Any = None, *, regularizer: Any = None, noise_multiplier: float = 1e-9, **settings: Any
) -> LabelDPModel:
    model = network(keras.layers.Dense(5, activation="tanh", kernel_regularizer=regularizer))
    inner = inner or keras.optimizers.SGD(RATE)
    model.compile(optimizer(noise_multiplier, inner, CLIP, **settings), loss=LOSS)
    return model


def clipped_sum(
    model: keras.Model, x: np.ndarray, y: np.ndarray, weights: np.ndarray
) -> list[np.ndarray]:
    """The sum of clipped gradients, each by its own tape."""
    total = [np.zeros(v.shape, np.float64) for v in model.trainable_variables]
    for i in range(len(x)):
        row = slice(i, i + 1)
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y[row], model(x[row]))
            loss = tf.reduce_sum(losses * weights[row])
        parts = tape.gradient(loss, [v.value for v in model.trainable_variables])
        parts = [part.numpy().astype(np.float64) for part in parts]
        norm = np.sqrt(sum(np.sum(part**2) for part in parts))
        total = [t + p / max(1.0, norm / CLIP) for t, p in zip(total, parts, strict=True)]
    return total


def by_hand(
    model: keras.Model, batches: list[Any], divisor: float, noise: Callable[[int], Any] = np.zeros
) -> list[np.ndarray]:
    """Weights after SGD of the definition: w - rate (sum of clipped gradients + noise) / b."""
    start, copy = model.get_weights(), keras.Model(model.input, model.output)
    for x, y, weights in batches:
        total = clipped_sum(copy, x, y, weights)
        flat = np.concatenate([part.ravel() for part in total])
        flat += noise(flat.size)
        ends = np.cumsum([part.size for part in total])[:-1]
        for v, step in zip(copy.trainable_variables, np.split(flat, ends), strict=True):
            v.assign(v - RATE * (step / divisor).reshape(v.shape).astype(np.float32))
    found = [np.array(w) for w in copy.get_weights()]
    model.set_weights(start)
    return found


def batches_of(size: int, weights: Any = None) -> list[Any]:
    weights = np.ones(N, np.float32) if weights is None else weights
    return [(X[i : i + size], Y[i : i + size], weights[i : i + size]) for i in range(0, N, size)]


def same_weights(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    # Single precision of weights near 1, over a few steps.
    return all(np.allclose(a, b, rtol=0, atol=5e-6) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("method", ["ghost", "vectorized"])
def test_steps_on_arrays_are_the_definition_also_the_last_small_batch(method: str) -> None:
    model = private_model(method=method)
    expected = by_hand(model, batches_of(8), 8.0)
    # The nearby wrong one: the last batch of 6 divided by 6.
    right, wrong = (by_hand(model, batches_of(8)[-1:], divisor) for divisor in (8.0, 6.0))
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 3
    assert same_weights(model.get_weights(), expected)
    assert not same_weights(wrong, right)


def test_seeded_noise_is_added_to_the_sum_before_it_is_divided() -> None:
    model, rng = private_model(noise_multiplier=2.0, insecure_seed=3), np.random.default_rng(3)
    noise = lambda size: 2.0 * CLIP * rng.standard_normal(size)  # noqa: E731
    expected = by_hand(model, batches_of(11), 11.0, noise)
    model.fit(X, Y, batch_size=11, shuffle=False, verbose=0)
    # The noisy sum is rounded to 2^-16 of 0.8, and then divided by 11.
    assert same_weights(model.get_weights(), expected)


@pytest.mark.slow
def test_steps_on_poisson_batches_divide_by_the_expected_size() -> None:
    settings = {"sampling_probability": 0.3, "steps": 4, "insecure_seed": 9}
    batches = recorded(private_model(), poisson_batches(X, Y, **settings))
    sizes = {int(weights.sum()) for _, _, weights in batches}
    assert len(sizes) > 1  # so that another divisor would show
    model = private_model()
    expected = by_hand(model, batches, 0.3 * N)
    model.fit(poisson_batches(X, Y, **settings), verbose=0)
    assert same_weights(model.get_weights(), expected)


def test_sample_weights_scale_gradients_before_they_are_clipped() -> None:
    weights = np.linspace(0.0, 4.0, N).astype(np.float32)
    model = private_model()
    expected = by_hand(model, batches_of(11, weights), 11.0)
    model.fit(X, Y, batch_size=11, shuffle=False, sample_weight=weights, verbose=0)
    assert same_weights(model.get_weights(), expected)


@pytest.mark.slow
def test_regularizers_are_added_and_not_clipped() -> None:
    strength = 30.0  # its gradient is far longer than the clip
    with_penalty = private_model(regularizer=keras.regularizers.L2(strength))
    without = private_model()
    start = without.get_weights()
    with_penalty.set_weights(start)
    for model in (with_penalty, without):
        model.fit(X, Y, batch_size=N, shuffle=False, verbose=0)
    difference = with_penalty.get_weights()[0] - without.get_weights()[0]
    np.testing.assert_allclose(difference, -RATE * 2.0 * strength * start[0], rtol=1e-4)
    # Two graphs add up in another order.
    biases = (model.get_weights()[3] for model in (with_penalty, without))
    np.testing.assert_allclose(*biases, rtol=1e-5, atol=1e-8)


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
    model = private_model(make())
    reference = keras.models.clone_model(keras.Model(model.input, model.output))
    reference.set_weights(model.get_weights())
    inner = make()
    for rows in batches_of(8):
        total = clipped_sum(reference, *rows)
        gradients = [tf.constant(part / 8.0, tf.float32) for part in total]
        inner.apply(gradients, reference.trainable_variables)
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    for a, b in zip(model.get_weights(), reference.get_weights(), strict=True):
        # Adaptive ones divide by roots of small numbers, which magnifies rounding.
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-4)


@pytest.mark.slow
def test_noise_of_a_step_is_rate_sigma_clip_over_the_batch() -> None:
    """From both sides: weights that no gradient reaches move by noise alone."""
    sigma, steps, size = 1.5, 80, 11
    model = network(units=20)
    # The loss has no gradient at all, so that all that moves is noise.
    loss = lambda y_true, y_pred: 0.0 * tf.reduce_sum(y_pred, axis=1)  # noqa: E731
    model.compile(optimizer(sigma, keras.optimizers.SGD(RATE), CLIP), loss=loss)
    moves, last = [], [model.get_weights()]

    def keep() -> None:
        now = model.get_weights()
        moves.extend((a - b).ravel() for a, b in zip(now, last[0], strict=True))
        last[0] = now

    callbacks = [watch(on_train_batch_end=keep)]
    model.fit(X, Y, batch_size=size, epochs=steps // 2, verbose=0, callbacks=callbacks)
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


class CountsTraces(LabelDPModel):
    traces = 0

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        type(self).traces += 1
        return super().train_step(data)


@pytest.mark.slow
def test_later_fits_trace_the_step_only_after_a_change_of_what_it_contains() -> None:
    CountsTraces.traces = 0
    model = CountsTraces.from_model(network(keras.layers.Dense(5, name="hidden")))
    model.compile(optimizer(1e-9, keras.optimizers.SGD(RATE), CLIP), loss=LOSS)

    def traces_of_fit(size: int = 8, **settings: Any) -> int:
        before = CountsTraces.traces
        fresh = network(keras.layers.Dense(5, name="hidden"))
        fresh.get_layer("hidden").trainable = model.get_layer("hidden").trainable
        fresh.compile(optimizer(1e-9, keras.optimizers.SGD(RATE), CLIP), loss=LOSS)
        fresh.set_weights(model.get_weights())
        for each in (fresh, model):
            each.fit(X, Y, batch_size=size, shuffle=False, verbose=0, **settings)
        assert same_weights(model.get_weights(), fresh.get_weights())
        return CountsTraces.traces - before

    def changes(**settings: Any) -> list[int]:
        return [traces_of_fit(**settings), traces_of_fit(**settings)]

    assert changes() == [1, 0]
    assert changes(size=11) == [1, 0]
    assert changes(class_weight={1: 3.0}) == [1, 0]
    model.report_training_metrics = True
    assert changes(class_weight={1: 3.0}) == [1, 0]
    hidden = model.get_layer("hidden")
    hidden.trainable, kernel = False, hidden.kernel.numpy()
    assert changes() == [1, 0]
    np.testing.assert_array_equal(hidden.kernel, kernel)


class Shifts(NoiseMechanism):
    """Adds a number that another object has, in place of noise."""

    noise_multiplier = 1.0

    def __init__(self) -> None:
        self.settings = {"shift": np.zeros(1)}

    def add_noise(self, clipped_sum: Any, l2_norm_clip: float, state: Any) -> Any:
        shift = float(self.settings["shift"][0])
        return [0.0 * part + shift for part in clipped_sum], state

    def get_config(self) -> dict[str, Any]:
        return {}


def set_shift(model: LabelDPModel) -> None:
    model.optimizer.noise.settings["shift"][0] = 5.0


def set_momentum(model: LabelDPModel) -> None:
    model.optimizer.inner_optimizer.momentum = 0.9


def set_schedule(model: LabelDPModel) -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 1, 0.5)
    model.optimizer.learning_rate = schedule


def freeze(model: LabelDPModel) -> None:
    model.get_layer("hidden").trainable = False


def unfreeze(model: LabelDPModel) -> None:
    model.get_layer("hidden").trainable = True


@pytest.mark.slow
@pytest.mark.parametrize("change", [set_shift, set_momentum, set_schedule, unfreeze])
def test_a_later_fit_has_the_step_of_its_settings(change: Callable[[LabelDPModel], None]) -> None:
    # The layer is frozen by a callback in the first fit, which is then traced.
    freezes = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: freeze(model))
    found = []
    for trace in (False, True):
        keras.utils.set_random_seed(1)
        model = network(keras.layers.Dense(5, name="hidden"))
        inner = keras.optimizers.SGD(RATE, momentum=0.1)
        noise = Shifts() if change is set_shift else GaussianNoise(1e-9)
        model.compile(LabelDPOptimizer(inner, CLIP, noise=noise), loss=LOSS)
        callbacks = [freezes] if change is unfreeze else []
        model.fit(X, Y, shuffle=False, verbose=0, callbacks=callbacks)
        change(model)
        if trace:
            model.train_function = None
        model.fit(X, Y, shuffle=False, verbose=0)
        found.append(model.get_weights())
    assert same_weights(*found)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ghost", "vectorized"])
def test_a_later_fit_takes_features_of_another_length_and_labels_of_another_shape(
    method: str,
) -> None:
    inputs = keras.Input((None, D))
    pooled = keras.layers.GlobalAveragePooling1D()(keras.layers.Dense(4)(inputs))
    model = LabelDPModel(inputs, keras.layers.Dense(K)(pooled))
    model.compile(optimizer(1e-9, keras.optimizers.SGD(RATE), CLIP, method=method), loss=LOSS)
    for length, labels in ((4, Y), (6, Y), (6, Y[:, np.newaxis]), (4, Y)):
        x = np.repeat(X[:, np.newaxis], length, axis=1)
        expected = by_hand(model, [(x, Y, np.ones(N))], N)
        model.fit(x, labels, batch_size=N, shuffle=False, verbose=0)
        assert same_weights(model.get_weights(), expected)
