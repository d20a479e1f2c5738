"""Without noise, our clipped gradient is that of TF Privacy on the same weights and batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.plugins import Batch, Clip, PerExampleClipping, Speed

pytestmark = pytest.mark.tf_privacy

SCRIPT = Path(__file__).with_name("keras2_clipped_gradient.py")
BATCH = 32
TOLERANCE = 1e-5


def small_model() -> keras.Model:
    """The model of the script, in Keras 3."""
    keras.utils.set_random_seed(4)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((14, 14, 2)),
            layers.Conv2D(4, 3, strides=2, activation="relu"),
            layers.AveragePooling2D(2),
            layers.Conv2D(3, 2, padding="same", activation="tanh"),
            layers.Flatten(),
            layers.Dense(8, activation="relu"),
            layers.Dense(5),
        ]
    )


def per_example(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(y_true, tf.int64), y_pred)


def clipped_mean(
    model: keras.Model, x: np.ndarray, y: np.ndarray, clip: float, method: str = "auto"
) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns our mean of clipped gradients, and the norms before clipping."""
    batch = Batch(tf.constant(x), tf.constant(y), tf.ones([BATCH]), per_example)
    result = PerExampleClipping(model, Speed(method)).clipped_sum(batch, Clip(clip))
    return [part.numpy() / BATCH for part in result.gradients], result.norms.numpy()


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """One batch, a clip that half of its gradients exceed, and TF Privacy's clipped mean."""
    folder = tmp_path_factory.mktemp("keras2")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH, 14, 14, 2)).astype(np.float32)
    y = rng.integers(5, size=BATCH)
    model = small_model()
    _, norms = clipped_mean(model, x, y, 1.0)
    clip = float(np.median(norms))
    weights = {f"w{i}": value for i, value in enumerate(model.get_weights())}
    np.savez(folder / "in.npz", x=x, y=y, l2_norm_clip=clip, **weights)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder / "in.npz"), str(folder / "out.npz")],
        env={**os.environ, "TF_USE_LEGACY_KERAS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    saved = np.load(folder / "out.npz")
    assert str(saved["keras"]).startswith("tf_keras")
    theirs = [saved[f"g{i}"] for i in range(len(weights))]
    return {"model": model, "x": x, "y": y, "clip": clip, "norms": norms, "theirs": theirs}


def largest_difference(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("method", ["ghost", "vectorized"])
def test_our_clipped_gradient_is_that_of_dp_sequential(case: dict, method: str) -> None:
    ours, _ = clipped_mean(case["model"], case["x"], case["y"], case["clip"], method)
    assert largest_difference(ours, case["theirs"]) <= TOLERANCE


@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_another_clip_gives_another_gradient(case: dict, factor: float) -> None:
    ours, _ = clipped_mean(case["model"], case["x"], case["y"], factor * case["clip"])
    assert largest_difference(ours, case["theirs"]) > 10 * TOLERANCE
