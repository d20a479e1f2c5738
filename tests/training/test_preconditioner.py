"""Clipping and noise in coordinates of the curvature: the same guarantee, without labels."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.data import poisson_batches
from tf_labeldp.plugins import Batch, Clip, OutputLosses, PerExampleClipping
from tf_labeldp.training import (
    AltConv,
    GaussNewton,
    LabelDPModel,
    LabelDPOptimizer,
    VertexLosses,
)

N, D, K = 40, 3, 4
# The largest momentum: averages stay as they are, to single precision.
STILL = 1.0 - 2.0**-53
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(N, D)).astype("f"), rng.integers(0, K, N)


@dataclasses.dataclass
class Held:
    """A weight, as a Keras variable holds one."""

    value: tf.Variable


def linear_vertices(x: np.ndarray, weights: tf.Variable) -> VertexLosses:
    def logits() -> tf.Tensor:
        return tf.constant(x) @ weights

    return VertexLosses(
        lambda: -tf.nn.log_softmax(logits()), lambda: tf.nn.softmax(logits()), [Held(weights)]
    )


def matrix(side: Any, size: int) -> np.ndarray:
    """A factor of coordinates, written out."""
    if side is None:
        return np.eye(size)
    array = np.asarray(side, np.float64)
    return np.diag(array) if array.ndim == 1 else array


@pytest.mark.slow
def test_factors_are_those_of_the_gauss_newton_matrix() -> None:
    x, _ = data()
    weights = tf.Variable(np.random.default_rng(1).normal(size=(D, K)).astype("f"))
    vertices, chooser = linear_vertices(x, weights), GaussNewton(N, momentum=0.0)
    tf.random.set_seed(3)
    zeros = chooser.initial_state([(D, K)])
    draw = tf.function(lambda: chooser.coordinates(vertices, zeros)[1][0])
    found = zip(*([side.numpy() for side in draw()] for _ in range(2000)), strict=True)
    logits = x @ weights.numpy()
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    of_output = np.stack([np.diag(one) - np.outer(one, one) for one in p])
    exact = (
        np.einsum("ni,nj,nkk->ij", x, x, of_output),
        np.einsum("ni,ni,nkl->kl", x, x, of_output),
    )
    for draws, expected in zip(map(np.stack, found), exact, strict=True):
        error = draws.std(axis=0) / np.sqrt(len(draws))
        # 25 entries: 5 standard errors are passed with a probability below 2e-5.
        assert np.all(np.abs(draws.mean(axis=0) - expected) < 5 * error)
        assert np.any(np.abs(draws.mean(axis=0) - 1.2 * expected) > 5 * error)


@pytest.mark.holds("training.GaussNewton")
def test_noise_is_the_inverse_of_the_damped_curvature_and_as_large_as_without() -> None:
    rng = np.random.default_rng(0)
    gradients = {shape: rng.normal(size=(9, *shape)) for shape in ((D, K), (2, 2, K), (K,))}
    shapes, sizes = list(gradients), [math.prod(shape) for shape in gradients]
    averages, curvature = [], []
    for number, (shape, draws) in enumerate(gradients.items()):
        m = draws.reshape(9, -1, shape[-1]) * (1.0 + number)
        left, right = np.einsum("nij,nkj->ik", m, m), np.einsum("nji,njk->ik", m, m)
        curvature.append((left, right))
        sides = [np.diag(right)] if len(shape) == 1 else [left, right]
        averages.append([tf.constant(side, tf.float32) for side in sides])
    mean = sum(np.trace(right) for _, right in curvature) / sum(sizes)
    wanted = []
    for shape, size, (left, right) in zip(shapes, sizes, curvature, strict=True):
        relative = np.trace(right) / size / mean
        if len(shape) == 1:
            wanted.append(np.diag(1 / (relative * np.diag(right) / np.diag(right).mean() + 0.2)))
            continue
        damped = [
            np.sqrt(relative) * side / np.diag(side).mean() + np.sqrt(0.2) * np.eye(len(side))
            for side in (left, right)
        ]
        wanted.append(np.kron(*(np.linalg.inv(side) for side in damped)))
    scale = sum(sizes) / sum(np.trace(one) for one in wanted)
    weights = [tf.Variable(tf.zeros(shape)) for shape in shapes]

    def losses() -> tf.Tensor:
        return tf.reshape(tf.add_n([tf.reduce_sum(part) for part in weights]), (1, 1))

    vertices = VertexLosses(losses, lambda: tf.ones((1, 1)), [Held(part) for part in weights])
    given, _ = GaussNewton(damping=0.2, momentum=STILL).coordinates(vertices, averages)
    for shape, size, one, expected in zip(shapes, sizes, given, wanted, strict=True):
        back = np.stack([one.back(tf.reshape(row, shape)) for row in tf.eye(size)])
        covariance = back.reshape(size, size).T @ back.reshape(size, size)
        np.testing.assert_allclose(covariance, scale * expected, rtol=1e-3, atol=1e-5)
        a = matrix(one.left, size // shape[-1])
        there = one.forward(tf.reshape(tf.eye(size), (size, *shape)))
        dense = np.kron(a, matrix(one.right, shape[-1]).T)
        np.testing.assert_allclose(np.reshape(there, (size, size)).T, dense, atol=1e-5)


@pytest.mark.parametrize("loss", [0.0, np.inf])
def test_without_curvature_nothing_changes(loss: float) -> None:
    """Nor where a gradient is not finite, as float16 may have it."""
    x, _ = data()
    weights = tf.Variable(np.zeros((D, K), "f"))
    vertices = linear_vertices(x, weights)
    vertices = dataclasses.replace(
        vertices, losses=lambda: loss * tf.square(tf.constant(x) @ weights + 1.0)
    )
    chooser = GaussNewton(N)
    [one], [state] = chooser.coordinates(vertices, chooser.initial_state([(D, K)]))
    assert all(np.all(side.numpy() == 0.0) for side in state)
    move = tf.random.normal((D, K), seed=1)
    np.testing.assert_allclose(one.back(one.forward(move[tf.newaxis])[0]), move, rtol=1e-4)
    np.testing.assert_allclose(one.left[0, 0] * one.right[0, 0], 1.0, rtol=1e-4)


def private_model(**settings: Any) -> LabelDPModel:
    keras.utils.set_random_seed(4)
    inputs = keras.Input((D,))
    model = LabelDPModel(inputs, keras.layers.Dense(K)(inputs))
    arguments = {
        "noise_multiplier": 2.0,
        "preconditioner": GaussNewton(num_examples=16),
        "insecure_seed": 5,
        **settings,
    }
    model.compile(LabelDPOptimizer(keras.optimizers.SGD(0.5), 1.0, **arguments), loss=LOSS)
    return model


def curvature_of(model: LabelDPModel) -> list[np.ndarray]:
    """The averages that the optimizer carries from step to step."""
    variables = model.optimizer.variables
    return [part.numpy() for part in variables if part.name.startswith("curvature")]


def coordinates_of(model: LabelDPModel) -> Any:
    """The coordinates of the last step."""
    chooser = dataclasses.replace(model.optimizer.preconditioner, momentum=STILL)
    shapes = [tuple(variable.shape) for variable in model.trainable_variables]
    averages = tf.nest.pack_sequence_as(
        chooser.initial_state(shapes), [tf.constant(part) for part in curvature_of(model)]
    )
    vertices = VertexLosses.of_model(
        PerExampleClipping(model).training_pass(),
        OutputLosses(model, LOSS),
        tf.constant(data()[0]),
        tf.TensorSpec((N,), tf.int64),
    )
    return chooser.coordinates(vertices, averages)[0]


def test_training_takes_the_step_back_from_the_coordinates() -> None:
    x, y = data()
    model = private_model(noise_multiplier=1e-9)
    before = model.get_weights()
    batches = poisson_batches(x, y, sampling_probability=1.0, steps=1, insecure_seed=1)
    model.fit(batches, verbose=0)
    moved = [old - new for old, new in zip(before, model.get_weights(), strict=True)]
    model.set_weights(before)
    given = coordinates_of(model)
    bound, loss = Clip(1.0, coordinates=given), OutputLosses(model, LOSS)
    result = PerExampleClipping(model).clipped_sum(Batch(x, y, np.ones(N), loss), bound)
    for move, one, g in zip(moved, given, result.gradients, strict=True):
        np.testing.assert_allclose(move, 0.5 * one.back(g) / N, rtol=1e-3, atol=1e-5)


def test_privacy_the_part_of_an_example_is_at_most_the_clip() -> None:
    x, y = data()
    model = private_model()
    batches = poisson_batches(x, y, sampling_probability=1.0, steps=1, insecure_seed=1)
    model.fit(batches, verbose=0)
    bound, norms = Clip(1.0, coordinates=coordinates_of(model)), []
    clipping, loss = PerExampleClipping(model), OutputLosses(model, LOSS)
    for row in range(10):
        rows = slice(row, row + 1)
        batch = Batch(10.0 * x[rows], y[rows], np.ones(1), loss)
        norms.append(float(tf.linalg.global_norm(clipping.clipped_sum(batch, bound).gradients)))
    assert max(norms) <= 1.0 + 1e-5 and sorted(norms)[5] > 1.0 - 1e-5


@pytest.mark.slow
def test_it_trains_in_half_precision() -> None:
    policy, (x, y) = "mixed_float16", data()
    keras.utils.set_random_seed(4)
    inputs = keras.Input((D,))
    hidden = keras.layers.Dense(8, "relu", dtype=policy)(inputs)
    model = LabelDPModel(inputs, keras.layers.Dense(K, dtype=policy)(hidden))
    settings = {"preconditioner": GaussNewton(16), "insecure_seed": 5}
    model.compile(LabelDPOptimizer("sgd", 1.0, 1.0, **settings), loss=LOSS)
    batches = poisson_batches(x, y, sampling_probability=0.5, steps=2, insecure_seed=1)
    model.fit(batches, verbose=0)
    sides = curvature_of(model)
    assert sides and all(np.all(np.isfinite(side)) and np.any(side != 0.0) for side in sides)


@pytest.mark.slow
def test_coordinates_do_not_depend_on_labels() -> None:
    x, y = data()
    found = []
    for labels in (y, (y + 1) % K):
        model = private_model()
        batches = poisson_batches(x, labels, sampling_probability=0.5, steps=1, insecure_seed=1)
        model.fit(batches, verbose=0)
        found.append(curvature_of(model))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.holds("training.GaussNewton")
def test_guarantee_is_that_of_plain_dp_sgd() -> None:
    x, y = data()
    stated = []
    for preconditioner in (None, "gauss_newton"):
        model = private_model(preconditioner=preconditioner and GaussNewton(num_examples=16))
        batches = poisson_batches(x, y, sampling_probability=0.5, steps=2, insecure_seed=1)
        model.fit(batches, verbose=0)
        stated.append(model.guarantee(1e-3).epsilon)
    assert stated[0] == stated[1] > 0


def test_bad_input() -> None:
    for settings in ({"num_examples": 1}, {"damping": 0.0}, {"damping": np.inf}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            GaussNewton(**settings)
    with pytest.raises(TypeError, match="unexpected keyword argument 'power'"):
        GaussNewton(power=0.5)
    with pytest.raises(ValueError, match="momentum"):
        GaussNewton(momentum=1.0)
    with pytest.raises(ValueError, match="both a preconditioner and AltConv"):
        LabelDPOptimizer("sgd", 1.0, 1.0, AltConv(8), preconditioner="gauss_newton")
    with pytest.raises(TypeError, match="preconditioner must be"):
        LabelDPOptimizer("sgd", 1.0, 1.0, preconditioner="newton")


def test_config_round_trip() -> None:
    made = LabelDPOptimizer("sgd", 1.0, 1.0, preconditioner=GaussNewton(8, 0.2, 0.9))
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(made))
    assert again.get_config() == made.get_config()
    assert again.preconditioner.get_config() == made.preconditioner.get_config()
    assert isinstance(
        LabelDPOptimizer("sgd", 1.0, 1.0, preconditioner="gauss_newton").preconditioner,
        GaussNewton,
    )
