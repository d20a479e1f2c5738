"""Small problems for the training tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import tf_labeldp as ldp


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Every test draws the same weights, in whatever order they run."""
    keras.utils.set_random_seed(0)


@pytest.fixture(autouse=True)
def no_known_weights(forget: Callable[[], None]) -> None:
    """The library recognises weights by value, and tests of one seed end in the same weights."""
    forget()


@pytest.fixture
def problem() -> tuple[np.ndarray, np.ndarray]:
    """Four well separated clusters: 240 points (n, 2) and their labels."""
    rng = np.random.default_rng(0)
    y = np.arange(240) % Kit.num_classes
    centres = np.array([[2.0, 0.0], [0.0, 2.0], [-2.0, 0.0], [0.0, -2.0]])
    return (centres[y] + 0.3 * rng.normal(size=(240, 2))).astype(np.float32), y


class Kit:
    """Makes models, vaults and stages, and records every new draw."""

    num_classes = 4

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.draws: list[tuple[Any, np.ndarray, Any]] = []  # (mechanism, indices, priors)
        self.noisy: dict[str | None, ldp.NoisyLabels] = {}  # by key, as they were drawn
        self.snapshots: dict[int, np.ndarray] = {}
        original = ldp.PrivateLabels.randomize

        def randomize(vault, mechanism, indices=None, priors=None, *, key=None):
            is_new = not vault.has_draw(key)
            noisy = original(vault, mechanism, indices, priors, key=key)
            if is_new:
                used = None if priors is None else np.asarray(priors)
                self.draws.append((mechanism, noisy.indices, used))
                self.noisy[key] = noisy
            return noisy

        monkeypatch.setattr(ldp.PrivateLabels, "randomize", randomize)

    def model(self, norm: bool = False, optimizer: Any = None) -> keras.Model:
        """A compiled classifier of points (batch, 2), always from the same weights."""
        keras.utils.set_random_seed(3)
        layers = [keras.Input((2,)), keras.layers.Dense(16, activation="relu")]
        if norm:
            layers.append(keras.layers.BatchNormalization())
        model = keras.Sequential([*layers, keras.layers.Dense(self.num_classes)])
        loss = keras.losses.CategoricalCrossentropy(from_logits=True)
        model.compile(optimizer or keras.optimizers.Adam(0.02), loss)
        return model

    def labels(self, y: np.ndarray, **options: Any) -> ldp.PrivateLabels:
        """A vault with a budget of 3 and repeatable draws."""
        options = {"budget": ldp.PrivacyBudget(epsilon=3.0), "insecure_seed": 5, **options}
        return ldp.PrivateLabels(y, self.num_classes, **options)

    def stages(self, x: Any, labels: ldp.PrivateLabels, **options: Any) -> ldp.MultiStageTraining:
        """Two stages of two epochs at epsilon 3, with the settings of the paper."""
        options = {
            "epsilon": 3.0,
            "fractions": (0.5, 0.5),
            "epochs_per_stage": 2,
            "batch_size": 32,
            "temperature": 1.0,
            "filter_labels": True,
            "verbose": 0,
            **options,
        }
        self.x = x
        return ldp.MultiStageTraining(x, labels, **options)

    def fit(
        self,
        stages: ldp.MultiStageTraining,
        model: keras.Model,
        callbacks: tuple[keras.callbacks.Callback, ...] = (),
        **options: Any,
    ) -> keras.callbacks.History:
        """Runs the stages."""
        options = {"epochs": stages.epochs, "verbose": 0, "shuffle": False, **options}
        return model.fit(stages.dataset(), callbacks=[stages, *callbacks], **options)

    @staticmethod
    def values(variables: Any) -> list[np.ndarray]:
        """Copies of the variables' values."""
        return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]

    def stop_after(self, epoch: int) -> keras.callbacks.Callback:
        """Ends training after an epoch (from 0), and keeps the logits of all points by epoch."""
        kit = self

        class StopAfter(keras.callbacks.Callback):
            def on_epoch_end(self, number: int, logs: Any = None) -> None:
                kit.snapshots[number] = self.model.predict(kit.x, verbose=0)
                self.model.stop_training = number >= epoch

        return StopAfter()


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> Kit:
    """A fresh kit."""
    return Kit(monkeypatch)
