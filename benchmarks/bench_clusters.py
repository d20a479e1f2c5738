"""ClusterRR, uniform RR and DP-SGD with logistic regression (``esfandiari2022``, Figures 1 and 2).

Multinomial logistic regression on raw pixels and k-means clusters of the unlabelled training set.
Epsilon is the true charge: for the replacement of one label, with 2/sigma for the noisy cluster
distributions; DP-SGD under replacement too (delta = 1/n). ``cluster`` is the paper's ClusterRR
(labels are resampled, beta = 0), ``cluster soft`` trains on the posterior of the true label given
the noisy label and the released distribution, ``LP-2ST`` is that of ``ghazi2021`` with the same
logistic regression. On ``mnist-binary`` the labels mark the digit 5.

Labels of these data sets are public; draws are seeded, so that the table is reproducible, and
protect nobody. Every fit is a line in a JSON file, so a stopped benchmark resumes.

    python benchmarks/bench_clusters.py
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import time
import warnings
from collections.abc import Iterator
from typing import Any

import _datasets
import _results
import numpy as np
from _cluster_logistic import fit_scores

import tf_labeldp as ldp
from tf_labeldp.estimation import prior_from_logits
from tf_labeldp.features import find_clusters
from tf_labeldp.mechanisms import RandomizedResponse, RRWithPrior
from tf_labeldp.vault import ClusterRandomizedResponse

EPSILONS = (0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
CLUSTERS = 100
CLUSTER_NUMBERS = (10, 30, 100, 300, 1000)
CLUSTERS_AT = 0.5
PRIVATE = ("uniform", "cluster", "cluster soft", "dp-sgd")
BINARY = ("uniform", "cluster", "cluster soft", "LP-2ST")
BINARY_DIGIT = 5
BATCH, PASSES, RATE = 1024, 5, 4.0


class Problem:
    """A data set with its clusterings, computed on first use."""

    def __init__(self, name: str) -> None:
        self.name = name
        data = _datasets.load("mnist" if name == "mnist-binary" else name)
        self.x = data.x_train.reshape(len(data.x_train), -1).astype(np.float32)
        self.x_test = data.x_test.reshape(len(data.x_test), -1).astype(np.float32)
        self.y, self.y_test = data.y_train, data.y_test
        self.num_classes = data.num_classes
        if name == "mnist-binary":
            self.y, self.y_test = ((y == BINARY_DIGIT).astype(int) for y in (self.y, self.y_test))
            self.num_classes = 2
        self._clusters: dict[int, np.ndarray] = {}

    def clusters(self, number: int) -> np.ndarray:
        """Returns the cluster of each training example."""
        if number not in self._clusters:
            begun = time.perf_counter()
            found = find_clusters(self.x, number, seed=0)
            self._clusters[number] = found.assignments
            purity = np.zeros((number, self.num_classes))
            np.add.at(purity, (found.assignments, self.y), 1.0)
            print(
                f"{self.name}: {number} clusters in {time.perf_counter() - begun:.0f} s, purity "
                f"{purity.max(axis=1).sum() / len(self.y):.3f}, {found.summary()}",
                flush=True,
            )
        return self._clusters[number]

    def vault(self, epsilon: float, seed: int) -> ldp.PrivateLabels:
        """Returns the labels in a vault of their own for a run."""
        budget = ldp.PrivacyBudget(epsilon)
        return ldp.PrivateLabels(self.y, self.num_classes, budget=budget, insecure_seed=seed)

    def accuracy(self, targets: np.ndarray) -> float:
        """Returns the test accuracy in percent after training on targets (n, K)."""
        return self._percent(fit_scores(self.x, targets, self.x_test))

    def _percent(self, scores: np.ndarray) -> float:
        return 100.0 * float(np.mean(scores.argmax(axis=1) == self.y_test))

    def dp_sgd(self, epsilon: float, seed: int) -> float:
        """Returns the test accuracy in percent of DP-SGD, calibrated under replacement."""
        import keras

        from tf_labeldp.accounting import calibrate_noise_multiplier

        keras.utils.set_random_seed(seed)
        q = BATCH / len(self.y)
        steps = round(PASSES / q)
        noise = calibrate_noise_multiplier(epsilon, 1.0 / len(self.y), q, steps)
        inputs = keras.Input((self.x.shape[1],))
        zeros = keras.initializers.Zeros()
        dense = keras.layers.Dense(self.num_classes, kernel_initializer=zeros)
        model = ldp.LabelDPModel(inputs, dense(inputs))
        rate = keras.optimizers.schedules.PolynomialDecay(RATE, steps, 0.0)
        inner = keras.optimizers.SGD(rate)
        optimizer = ldp.LabelDPOptimizer(inner, 1.0, noise, insecure_seed=seed)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        batches = ldp.data.poisson_batches(
            self.x, self.y, sampling_probability=q, steps=steps, insecure_seed=seed
        )
        model.fit(batches, epochs=1, verbose=0)
        return self._percent(model.predict(self.x_test, batch_size=1000, verbose=0))

    def uniform(self, epsilon: float, seed: int) -> float:
        """Returns the test accuracy in percent of UniformRR (Corollary 1, beta = lambda)."""
        mechanism = ClusterRandomizedResponse.uniform(epsilon, self.num_classes)
        one = np.zeros(len(self.y), int)
        return self.accuracy(
            self.vault(epsilon, seed).randomize(mechanism, clusters=one).debiased()
        )

    def cluster(self, epsilon: float, number: int, seed: int, *, soft: bool) -> float:
        """Returns the test accuracy in percent of ClusterRR."""
        mechanism = ClusterRandomizedResponse.for_epsilon(epsilon, self.num_classes)
        noisy = self.vault(epsilon, seed).randomize(mechanism, clusters=self.clusters(number))
        return self.accuracy(noisy.posterior() if soft else np.eye(self.num_classes)[noisy.values])

    def two_stages(self, epsilon: float, seed: int) -> float:
        """Returns the test accuracy in percent of LP-2ST, 60 % of the labels in stage 1."""
        labels = self.vault(epsilon, seed)
        order = np.random.default_rng(seed).permutation(len(self.y))
        first, second = np.split(order, [round(0.6 * len(order))])
        eye = np.eye(self.num_classes)
        targets = np.zeros((len(order), self.num_classes))
        drawn = labels.randomize(RandomizedResponse(epsilon, self.num_classes), first)
        targets[first] = eye[drawn.values]
        scores = fit_scores(self.x[first], targets[first], self.x[second])
        priors = prior_from_logits(scores)
        drawn = labels.randomize(RRWithPrior(epsilon, self.num_classes), second, priors)
        targets[second] = eye[drawn.values]
        return self.accuracy(targets)

    def run(self, method: str, epsilon: float | None, number: int, seed: int) -> float:
        """Returns the test accuracy in percent of a method."""
        if epsilon is None:
            return self.accuracy(np.eye(self.num_classes)[self.y])
        if method == "uniform":
            return self.uniform(epsilon, seed)
        if method == "dp-sgd":
            return self.dp_sgd(epsilon, seed)
        if method == "LP-2ST":
            return self.two_stages(epsilon, seed)
        return self.cluster(epsilon, number, seed, soft=method == "cluster soft")


def jobs(name: str, methods: list[str], seeds: int, numbers: list[int]) -> Iterator[dict[str, Any]]:
    """Yields the runs on a data set."""

    def job(method: str, epsilon: float | None, number: int, seed: int) -> dict[str, Any]:
        values = (name, method, epsilon, number, seed)
        return dict(zip(("data", "method", "epsilon", "clusters", "seed"), values, strict=True))

    yield job("non-private", None, 0, 0)
    known = BINARY if name == "mnist-binary" else PRIVATE
    for seed in range(seeds):
        for epsilon in EPSILONS:
            for method in known:
                if method in methods:
                    clusters = CLUSTERS if method.startswith("cluster") else 0
                    yield job(method, epsilon, clusters, seed)
        for number in numbers:
            if name != "mnist-binary" and number != CLUSTERS:
                for method in ("cluster", "cluster soft"):
                    if method in methods:
                        yield job(method, CLUSTERS_AT, number, seed)


def cells(results: list[dict[str, Any]]) -> dict[tuple[Any, ...], list[float]]:
    """Returns the accuracies of each (data, method, epsilon, clusters)."""
    found = collections.defaultdict(list)
    for line in results:
        key = tuple(line[name] for name in ("data", "method", "epsilon", "clusters"))
        found[key].append(line["accuracy"])
    return found


def print_tables(results: list[dict[str, Any]]) -> None:
    """Prints accuracy against epsilon and against the number of clusters, as Markdown."""
    found = cells(results)

    def cell(*key: Any) -> str:
        values = found.get(key, [])
        if not values:
            return "-"
        return f"{np.mean(values):.1f} ± {np.std(values):.1f} ({len(values)})"

    for name in dict.fromkeys(key[0] for key in found):
        best = cell(name, "non-private", None, 0)
        print(f"\n| {name} (non-private {best}) | " + " | ".join(f"{e:g}" for e in EPSILONS) + " |")
        print("|---" * (1 + len(EPSILONS)) + "|")
        for method in dict.fromkeys((*PRIVATE, *BINARY)):
            clusters = CLUSTERS if method.startswith("cluster") else 0
            row = [cell(name, method, epsilon, clusters) for epsilon in EPSILONS]
            if any(text != "-" for text in row):
                print(f"| {method} | " + " | ".join(row) + " |")
    numbers = " | ".join(map(str, CLUSTER_NUMBERS))
    print(f"\n| clusters, epsilon {CLUSTERS_AT:g} | {numbers} |")
    print("|---" * (1 + len(CLUSTER_NUMBERS)) + "|")
    for name in dict.fromkeys(key[0] for key in found):
        for method in ("cluster", "cluster soft"):
            row = [cell(name, method, CLUSTERS_AT, number) for number in CLUSTER_NUMBERS]
            if name != "mnist-binary" and any(text != "-" for text in row):
                print(f"| {name}, {method} | " + " | ".join(row) + " |")


def main() -> None:
    """Runs what is missing, prints and records the tables."""
    every = list(dict.fromkeys((*PRIVATE, *BINARY)))
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", nargs="*", default=["mnist", "fashion_mnist", "mnist-binary"])
    parser.add_argument("--methods", nargs="+", default=every, choices=every)
    parser.add_argument("--seeds", type=int, default=3)
    numbers = list(CLUSTER_NUMBERS)
    parser.add_argument("--numbers", nargs="*", type=int, default=numbers, help="of clusters")
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("clusters.jsonl"))
    options = parser.parse_args()
    # Delta is 1/n, as in the paper.
    warnings.filterwarnings("ignore", "delta")

    path = options.results
    for name in options.data:
        problem: Problem | None = None
        every_job = jobs(name, options.methods, options.seeds, options.numbers)
        for job in _results.missing(path, every_job):
            problem = problem or Problem(name)
            accuracy = problem.run(job["method"], job["epsilon"], job["clusters"], job["seed"])
            _results.add_run(path, {**job, "accuracy": accuracy})
    results = _results.runs(path)
    names = dict.fromkeys(line["data"].replace("-", "_") for line in results)
    with _results.recorded(__file__, *names, "numbers"):
        print_tables(results)


if __name__ == "__main__":
    main()
