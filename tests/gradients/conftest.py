"""Small models whose matrix of gradients can be formed, for tests of products with it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.gradients import GradientOperator


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """Losses (n, K) of a model, its variables, and the model's probabilities."""

    losses: Callable[[], tf.Tensor]
    variables: list
    predictions: tf.Tensor

    def operator(self, **kwargs: object) -> GradientOperator:
        return GradientOperator(self.losses, self.variables, **kwargs)

    @functools.cache  # noqa: B019 (cases live as long as the session)
    def matrix(self) -> np.ndarray:
        """Returns G (d, n K), with one backward pass per column."""
        columns = []
        with tf.GradientTape(persistent=True) as tape:
            losses = tf.reshape(self.losses(), [-1])
            parts = tf.unstack(losses)
        for part in parts:
            gradient = tape.gradient(part, self.variables, unconnected_gradients="zero")
            columns.append(np.concatenate([np.ravel(tf.convert_to_tensor(g)) for g in gradient]))
        return np.stack(columns, axis=1)


@functools.cache
def make_case(kind: str, n: int = 5, labels: int = 3, dtype: str = "float64") -> Case:
    """Returns a model of this kind with fixed random weights."""
    keras.utils.set_random_seed(3)
    rng = np.random.default_rng(4)
    layers = keras.layers
    x: object = rng.normal(size=(n, 6))
    with_policy = {"dtype": dtype}
    if kind == "dense":
        model = keras.Sequential(
            [layers.Dense(4, "tanh", **with_policy), layers.Dense(labels, **with_policy)]
        )
    elif kind == "conv":
        x = rng.normal(size=(n, 6, 6, 1))
        model = keras.Sequential(
            [
                layers.Conv2D(3, 3, activation="relu", **with_policy),
                layers.AveragePooling2D(2, **with_policy),
                layers.Flatten(**with_policy),
                layers.Dense(labels, **with_policy),
            ]
        )
    elif kind == "embedding":
        x = rng.integers(0, 7, (n, 4))
        model = keras.Sequential(
            [
                layers.Embedding(7, 3, **with_policy),
                layers.Flatten(**with_policy),
                layers.Dense(labels, **with_policy),
            ]
        )
    elif kind in ("recurrent", "unrolled"):
        x = rng.normal(size=(n, 4, 2))
        layer = layers.LSTM(3, unroll=kind == "unrolled", **with_policy)
        model = keras.Sequential([layer, layers.Dense(labels, **with_policy)])
    elif kind == "two_inputs":
        first, second = keras.Input([6], dtype=dtype), keras.Input([2], dtype=dtype)
        merged = layers.Concatenate(dtype=dtype)(
            [layers.Dense(3, "tanh", **with_policy)(first), second]
        )
        model = keras.Model([first, second], layers.Dense(labels, **with_policy)(merged))
        x = [tf.constant(x, dtype), tf.constant(rng.normal(size=(n, 2)), dtype)]
    else:
        raise ValueError(kind)
    if not isinstance(x, list):
        x = tf.constant(x) if kind == "embedding" else tf.constant(x, dtype)
    logits = model(x)
    return Case(
        losses=lambda: -tf.nn.log_softmax(model(x)),
        variables=model.trainable_variables,
        predictions=tf.nn.softmax(logits),
    )


@pytest.fixture(scope="session")
def case_of() -> Callable[..., Case]:
    """Returns ``make_case``."""
    return make_case


@pytest.fixture(scope="session")
def flat() -> Callable[[list], np.ndarray]:
    """Concatenates a list of tensors to a vector."""
    return lambda parts: np.concatenate([np.ravel(part) for part in parts])


@pytest.fixture(scope="session")
def like_variables() -> Callable[[Case, np.ndarray], list[tf.Tensor]]:
    """Splits a vector (d,) into tensors of the variables' shapes."""

    def cut(case: Case, vector: np.ndarray) -> list[tf.Tensor]:
        parts, start = [], 0
        for variable in case.variables:
            size = int(np.prod(variable.shape))
            part = vector[start : start + size].reshape(variable.shape)
            parts.append(tf.constant(part, variable.dtype))
            start += size
        return parts

    return cut
