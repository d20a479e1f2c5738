"""Probabilities of a network by its targets: posteriors, debiased labels, or a corrected loss.

    python benchmarks/bench_targets.py

The labels are made up: ten normal features, a logit with a quadratic and a product term, and an
intercept for the share of positives. A network of 32 units is trained on 30,000 noisy labels by
randomized response, and tested on 100,000 true labels. ``uniform`` are posteriors with a uniform
prior, ``estimated`` those with the prior that ``NoisyLabels.posterior`` estimates. Draws are
seeded.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import _results
import keras
import numpy as np
from sklearn.metrics import log_loss, roc_auc_score

import tf_labeldp as ldp

SETTINGS = ((0.034, 2.0), (0.034, 4.0), (0.2, 1.0))
"""Shares of positives, and epsilons."""
SIZE, TESTED, SEEDS, EPOCHS = 30_000, 100_000, 5, 15
TARGETS = ("true labels", "uniform", "estimated", "debiased", "ForwardCorrectedLoss")


def examples(size: int, share: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns features (n, 10), and labels with about this share of ones."""
    x = rng.normal(size=(size, 10)).astype(np.float32)
    scores = x[:, 0] + 0.7 * x[:, 1] + 0.6 * x[:, 2] * x[:, 3] + 0.4 * (x[:, 4] ** 2 - 1.0)
    low, high = -12.0, 12.0
    for _ in range(40):
        middle = 0.5 * (low + high)
        too_many = (1.0 / (1.0 + np.exp(-scores - middle))).mean() > share
        low, high = (low, middle) if too_many else (middle, high)
    labels = rng.random(size) < 1.0 / (1.0 + np.exp(-scores - low))
    return x, labels.astype(np.int64)


def trained(targets: str, x: np.ndarray, y: np.ndarray, epsilon: float, seed: int) -> keras.Model:
    """Returns a network, trained on noisy labels by one kind of targets."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.layers.Dense(32, "relu"), keras.layers.Dense(2)])
    mechanism = ldp.RandomizedResponse(epsilon, num_classes=2)
    budget = ldp.PrivacyBudget(epsilon)
    labels = ldp.PrivateLabels(y, num_classes=2, budget=budget, insecure_seed=seed)
    noisy = labels.randomize(mechanism)
    kinds: dict[str, tuple[Any, Any]] = {
        "true labels": (np.eye(2)[y], keras.losses.CategoricalCrossentropy(from_logits=True)),
        "uniform": (
            noisy.posterior("uniform"),
            keras.losses.CategoricalCrossentropy(from_logits=True),
        ),
        "estimated": (noisy.posterior(), keras.losses.CategoricalCrossentropy(from_logits=True)),
        "debiased": (noisy.debiased(), ldp.keras_layers.LabelWeightedLoss(from_logits=True)),
        "ForwardCorrectedLoss": (
            noisy.values,
            ldp.keras_layers.ForwardCorrectedLoss(mechanism.transition_matrix(), from_logits=True),
        ),
    }
    array, loss = kinds[targets]
    model.compile(keras.optimizers.Adam(1e-3), loss)
    model.fit(x, array, batch_size=256, epochs=EPOCHS, verbose=0)
    return model


def main() -> None:
    """Prints the table."""
    lines = []
    for share, epsilon in SETTINGS:
        for targets in TARGETS:
            found = []
            for seed in range(SEEDS):
                rng = np.random.default_rng(seed)
                x, y = examples(SIZE + TESTED, share, rng)
                model = trained(targets, x[:SIZE], y[:SIZE], epsilon, seed)
                logits = model.predict(x[SIZE:], batch_size=8192, verbose=0).astype(np.float64)
                predicted = 1.0 / (1.0 + np.exp(logits[:, 0] - logits[:, 1]))
                true = y[SIZE:]
                found.append(
                    [
                        100.0 * predicted.mean(),
                        log_loss(true, np.clip(predicted, 1e-7, 1.0 - 1e-7)),
                        100.0 * roc_auc_score(true, predicted),
                    ]
                )
            mean, spread = np.mean(found, axis=0), np.std(found, axis=0, ddof=1)
            lines.append(
                [
                    f"{100 * share:g} %",
                    f"{epsilon:g}",
                    targets,
                    f"{mean[0]:.1f} ± {spread[0]:.1f}",
                    f"{mean[1]:.3f} ± {spread[1]:.3f}",
                    f"{mean[2]:.1f} ± {spread[2]:.1f}",
                ]
            )
    columns = ["positives", "epsilon", "targets", "mean prediction, %", "log-loss", "AUC, %"]
    with _results.recorded(__file__, "probabilities"):
        print(_results.markdown(columns, lines))


if __name__ == "__main__":
    main()
