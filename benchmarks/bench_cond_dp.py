"""Cond-DP, ``gauss_newton`` and plain DP-SGD: linear regression, features of a steep spectrum.

Cond-DP (Jiang, Krichene and Mayoraz 2026, arXiv 2606.18773) multiplies the public features by
``C = V S^-1 V^T`` of their singular values ``X = U S V^T``, before DP-SGD; here times sqrt(n),
which rescales the clip. The features are Gaussian, with standard deviation 1 / i in direction i.
The labels are linear in them: all directions have weights of one size ("steep"), or contribute
equally to the labels ("flat"). Each method has the best of the same learning rates, by the error on
held-out labels of another seed. The form of C is that of published summaries of the paper.

    python benchmarks/bench_cond_dp.py
"""

from __future__ import annotations

import statistics
from typing import Any

import _results
import keras
import numpy as np

import tf_labeldp as ldp
from tf_labeldp.data import poisson_batches
from tf_labeldp.training import LabelDPModel, LabelDPOptimizer
from tf_labeldp.vault import Numbers

N, TEST, WIDTH, STEPS, Q = 20_000, 5_000, 50, 100, 0.05
METHODS = ("DP-SGD", "Cond-DP", "gauss_newton")
# Chosen on seed 0.
RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
SEEDS = (11, 12, 13)


def data(seed: int, flat: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns features (N + TEST, WIDTH) and labels of variance 1, of which 0.1 is noise."""
    rng = np.random.default_rng(seed)
    scale = 1.0 / np.arange(1, WIDTH + 1)
    x = rng.normal(size=(N + TEST, WIDTH)) * scale
    truth = rng.normal(size=WIDTH) / (scale if flat else 1.0)
    y = x @ truth
    y = np.sqrt(0.9) * y / y.std() + np.sqrt(0.1) * rng.normal(size=y.size)
    rotation = np.linalg.qr(rng.normal(size=(WIDTH, WIDTH)))[0]
    return (x @ rotation).astype(np.float32), y.astype(np.float32)


def error(method: str, rate: float, seed: int, flat: bool, noise: float) -> float:
    """Returns the mean squared error on the held-out labels."""
    x, y = data(seed, flat)
    if method == "Cond-DP":
        _, values, right = np.linalg.svd(x[:N], full_matrices=False)
        x = (x @ (right.T / values @ right) * np.sqrt(N)).astype(np.float32)
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((WIDTH,))
    model = LabelDPModel(inputs, keras.layers.Dense(1, kernel_initializer="zeros")(inputs))
    settings: dict[str, Any] = {"insecure_seed": seed}
    if method == "gauss_newton":
        settings["preconditioner"] = "gauss_newton"
    inner = keras.optimizers.SGD(rate)
    model.compile(LabelDPOptimizer(inner, 1.0, noise, **settings), loss="mean_squared_error")
    budget = ldp.PrivacyBudget(1000.0, 1e-6)
    labels = ldp.PrivateLabels(np.clip(y[:N], -4.0, 4.0), Numbers(-4.0, 4.0), budget=budget)
    batches = poisson_batches(
        x[:N], labels, sampling_probability=Q, steps=STEPS, insecure_seed=seed
    )
    model.fit(batches, verbose=0)
    return float(np.mean((model.predict(x[N:], verbose=0)[:, 0] - y[N:]) ** 2))


def main() -> None:
    """Measures and prints."""
    rows = []
    for noise in (20.0, 60.0):
        for flat, name in ((False, "steep"), (True, "flat")):
            row = [f"{noise:g}", name]
            for method in METHODS:
                first = {rate: error(method, rate, 0, flat, noise) for rate in RATES}
                best = min(first, key=lambda rate: np.nan_to_num(first[rate], nan=np.inf))
                found = [error(method, best, seed, flat, noise) for seed in SEEDS]
                row.append(f"{statistics.mean(found):.3f} ({best:g})")
            rows.append(row)
    with _results.recorded(__file__, "errors"):
        print(_results.markdown(["noise multiplier", "weights in directions", *METHODS], rows))


if __name__ == "__main__":
    main()
