"""Small private models, their vaults and batches, which the tests of training share."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_labeldp as ldp
from tf_labeldp.accounting import Charge, dp_sgd_guarantee
from tf_labeldp.data import poisson_batches
from tf_labeldp.training import LabelDPModel, LabelDPOptimizer

N, D, K, DELTA, SIGMA = 100, 3, 4, 1e-3, 3.0
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def features() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(N, D)).astype(np.float32)


def codes(shift: int = 0) -> np.ndarray:
    return (np.arange(N) + shift) % K


def vault(epsilon: float = 3.0, delta: float = DELTA, **settings: Any) -> ldp.PrivateLabels:
    return ldp.PrivateLabels(codes(), K, budget=ldp.PrivacyBudget(epsilon, delta), **settings)


def batches(labels: Any, *, q: float = 0.1, steps: int = 3, **settings: Any) -> Any:
    return poisson_batches(features(), labels, sampling_probability=q, steps=steps, **settings)


def after(epochs: int, q: float = 0.1, steps: int = 3) -> float:
    """The cost of some epochs of ``batches``."""
    return dp_sgd_guarantee(SIGMA, q, steps * epochs, DELTA).epsilon if epochs else 0.0


def composed(*charges: Charge) -> float:
    """The cost of these charges of one vault together."""
    labels = vault(epsilon=100.0)
    for charge in charges:
        labels.charge(charge, what="a use")
    return labels.guarantee().epsilon


def recorded(model: LabelDPModel, sampled: Any) -> list[tuple[Any, ...]]:
    """The batches that a model gets in an epoch of training, as arrays."""
    found, take = [], model.train_step

    def train_step(data: Any) -> Any:
        found.append(tf.nest.map_structure(lambda part: part.numpy(), data))
        return take(data)

    model.train_step, model.run_eagerly = train_step, True
    model.fit(sampled, verbose=0)
    return found


def network(*hidden: Any, units: int = K) -> LabelDPModel:
    """A model that is not compiled; its last layer always has the same weights."""
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((D,))
    for layer in (*hidden, keras.layers.Dense(units, name="last")):
        x = layer(x)
    return LabelDPModel(inputs, x)


def optimizer(
    noise_multiplier: float | None = SIGMA, inner: Any = None, clip: float = 1.0, **settings: Any
) -> LabelDPOptimizer:
    return LabelDPOptimizer(inner or keras.optimizers.SGD(0.5), clip, noise_multiplier, **settings)


def private_model(noise_multiplier: float | None = SIGMA, **settings: Any) -> LabelDPModel:
    model = network()
    model.compile(optimizer(noise_multiplier, **settings), loss=LOSS, metrics=["accuracy"])
    return model


def unchanged(model: keras.Model, before: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))


def watch(**hooks: Any) -> keras.callbacks.Callback:
    """A callback that calls functions of no arguments, by the name of the hook."""
    calls = {name: lambda *_, call=call, **__: call() for name, call in hooks.items()}
    return keras.callbacks.LambdaCallback(**calls)
