"""RRWithPrior with cluster priors, and ALIBI, against RR and LP-2ST: accuracy of a CNN.

``raw`` and ``encoder`` release a noisy histogram by k-means cluster (Algorithm 4 of ``ghazi2021``,
100 clusters of pixels, or of the features of an autoencoder that was trained on the unlabelled
images), and draw labels by RRWithPrior with it; the histogram costs ``min(epsilon / 2, 0.1)`` of
epsilon. ``soft`` trains on the posteriors of the drawn labels instead of the labels. ``alibi``
draws noisy one-hot labels and trains with ``ALIBILoss``. The CNN is that of ``ghazi2024``, Table
10(a); Adam, 5 epochs (per stage). Epsilon is for the replacement of one label (delta = 1/n for
``alibi gaussian``, else 0).

Labels of these data sets are public; draws are seeded, so that the table is reproducible, and
protect nobody. Every run is a line in a JSON file, so a stopped benchmark resumes.

    python benchmarks/bench_cluster_priors.py --data fashion_mnist
    python benchmarks/bench_cluster_priors.py --data mnist --methods RR "alibi laplace"
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import time
import warnings
from typing import Any

import _datasets
import _models
import _results
import keras
import numpy as np
from _one_release_deep import STAGE_BATCH, STAGE_EPOCHS, STAGE_RATE, stages_logits

import tf_labeldp as ldp
from tf_labeldp.features import find_clusters
from tf_labeldp.keras_layers import ALIBILoss
from tf_labeldp.mechanisms import ALIBI, HistogramMechanism, RRWithPrior

EPSILONS = (0.1, 0.5, 1.0, 2.0)
CLUSTERS = 100
METHODS = (
    "RR",
    "LP-2ST",
    "raw",
    "raw soft",
    "encoder",
    "encoder soft",
    "alibi laplace",
    "alibi gaussian",
)


class Problem:
    """A data set with its clusterings, computed on first use."""

    def __init__(self, name: str) -> None:
        self.data = _datasets.load(name)
        self._clusters: dict[str, Any] = {}

    def clusters(self, kind: str) -> Any:
        """Returns clusters of the pixels (``raw``) or of an autoencoder's features."""
        if kind not in self._clusters:
            begun = time.perf_counter()
            images = self.data.x_train
            encoder = None if kind == "raw" else trained_encoder(images)
            found = find_clusters(images, CLUSTERS, encoder=encoder, seed=0)
            counts = np.zeros((CLUSTERS, self.data.num_classes))
            np.add.at(counts, (found.assignments, self.data.y_train), 1.0)
            purity = counts.max(axis=1).sum() / counts.sum()
            took = time.perf_counter() - begun
            print(f"{kind} clusters in {took:.0f} s, purity {purity:.3f}, {found.summary()}")
            self._clusters[kind] = found
        return self._clusters[kind]

    def run(self, method: str, epsilon: float, seed: int) -> float:
        """Returns the test accuracy in percent."""
        if method in ("RR", "LP-2ST"):
            logits = stages_logits(self.data, epsilon, seed, two_stages=method == "LP-2ST")
        else:
            keras.utils.set_random_seed(seed)
            kind, _, rest = method.partition(" ")
            if kind == "alibi":
                logits = self._alibi(epsilon, seed, rest)
            else:
                logits = self._cluster_priors(epsilon, seed, kind, soft=rest == "soft")
        return 100.0 * float(np.mean(logits.argmax(axis=1) == self.data.y_test))

    def _cluster_priors(self, epsilon: float, seed: int, kind: str, *, soft: bool) -> np.ndarray:
        data, clusters = self.data, self.clusters(kind)
        labels = self._vault(ldp.PrivacyBudget(epsilon), seed)
        spent = min(0.5 * epsilon, 0.1)
        histogram = HistogramMechanism(spent, data.num_classes)
        priors = labels.release(histogram, public_input=clusters.assignments).priors()
        mechanism = RRWithPrior(epsilon - spent, data.num_classes)
        noisy = labels.randomize(mechanism, priors=priors)
        targets = noisy.posterior() if soft else np.eye(data.num_classes)[noisy.values]
        return self._fit(targets, keras.losses.CategoricalCrossentropy(from_logits=True))

    def _alibi(self, epsilon: float, seed: int, noise: str) -> np.ndarray:
        delta = 1.0 / len(self.data.y_train) if noise == "gaussian" else 0.0
        labels = self._vault(ldp.PrivacyBudget(epsilon, delta), seed)
        mechanism = ALIBI(epsilon, self.data.num_classes, delta=delta, noise=noise)
        return self._fit(labels.randomize(mechanism).values, ALIBILoss.of(mechanism))

    def _vault(self, budget: ldp.PrivacyBudget, seed: int) -> ldp.PrivateLabels:
        data = self.data
        return ldp.PrivateLabels(data.y_train, data.num_classes, budget=budget, insecure_seed=seed)

    def _fit(self, targets: np.ndarray, loss: keras.losses.Loss) -> np.ndarray:
        data = self.data
        model = _models.small_cnn(data.x_train.shape[1:], data.num_classes)
        model.compile(keras.optimizers.Adam(STAGE_RATE), loss=loss)
        model.fit(
            data.x_train,
            targets.astype(np.float32),
            batch_size=STAGE_BATCH,
            epochs=STAGE_EPOCHS,
            verbose=0,
        )
        return model.predict(data.x_test, batch_size=1000, verbose=0)


def trained_encoder(images: np.ndarray, size: int = 32) -> keras.Model:
    """Returns the encoder (n, 28, 28, 1) -> (n, size) of an autoencoder, without labels."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    inputs = keras.Input(images.shape[1:])
    flat = layers.Flatten()(inputs)
    hidden = layers.Dense(256, activation="relu")(flat)
    code = layers.Dense(size)(hidden)
    decoded = layers.Dense(256, activation="relu")(code)
    decoded = layers.Dense(flat.shape[1])(decoded)
    model = keras.Model(inputs, decoded)
    model.compile(keras.optimizers.Adam(1e-3), "mse")
    targets = images.reshape(len(images), -1)
    model.fit(images, targets, batch_size=256, epochs=8, verbose=0)
    return keras.Model(inputs, code)


def print_table(results: list[dict[str, Any]]) -> None:
    """Prints mean and standard deviation over seeds as a Markdown table."""
    found = collections.defaultdict(list)
    for line in results:
        found[line["data"], line["method"], line["epsilon"]].append(line["accuracy"])
    print("| data | method | " + " | ".join(f"{e:g}" for e in EPSILONS) + " |")
    print("|---" * (2 + len(EPSILONS)) + "|")
    for name in dict.fromkeys(key[0] for key in found):
        for method in METHODS:
            row = [found.get((name, method, epsilon), []) for epsilon in EPSILONS]
            if any(row):
                texts = [
                    f"{np.mean(a):.1f} ± {np.std(a):.1f} ({len(a)})" if a else "-" for a in row
                ]
                print(f"| {name} | {method} | " + " | ".join(texts) + " |")


def main() -> None:
    """Runs what is missing and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", nargs="*", default=["fashion_mnist", "mnist"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--epsilons", nargs="+", type=float, default=list(EPSILONS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--results", type=pathlib.Path, default="cluster_priors.jsonl")
    options = parser.parse_args()
    # All methods have delta 1/n, to compare them.
    warnings.filterwarnings("ignore", "delta")
    path = options.results
    for name in options.data:
        jobs = [
            {"data": name, "method": method, "epsilon": epsilon, "seed": seed}
            for seed in options.seeds
            for epsilon in options.epsilons
            for method in options.methods
        ]
        problem: Problem | None = None
        for job in _results.missing(path, jobs):
            problem = problem or Problem(name)
            accuracy = problem.run(job["method"], job["epsilon"], job["seed"])
            _results.add_run(path, {**job, "accuracy": accuracy})
            keras.backend.clear_session()
    with _results.recorded(__file__, "accuracy"):
        print_table(_results.runs(path))


if __name__ == "__main__":
    main()
