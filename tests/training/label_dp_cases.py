"""A small private model, its vault and its batches, which several tests of training share."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import tf_labeldp as ldp
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


def private_model(noise_multiplier: float | None = SIGMA, **settings: Any) -> LabelDPModel:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((D,))
    model = LabelDPModel(inputs, keras.layers.Dense(K)(inputs))
    inner = keras.optimizers.SGD(0.5)
    optimizer = LabelDPOptimizer(inner, 1.0, noise_multiplier, **settings)
    model.compile(optimizer, loss=LOSS, metrics=["accuracy"])
    return model


def unchanged(model: keras.Model, before: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
