"""Many classes: shares and accuracy by mechanism, from 10 to 100,000 classes.

    python benchmarks/bench_many_classes.py run [--seeds 1] [--data synthetic mnist] [--classes ...]
    python benchmarks/bench_many_classes.py shares     # shares of 1,000,000 labels
    python benchmarks/bench_many_classes.py tables     # prints the tables

All local mechanisms here answer a set of classes that contains the label more often than another:
randomized response a single class, subset selection and vector approximation (arXiv 2405.15150) a
random set, projective geometry response a hyperplane. So one loss trains on each: the likelihood of
the set under the prediction, or the debiased cross-entropy. The model is linear.
``head`` is one release at delta 1e-6: ``PrivateLogisticRegression`` up to 200 classes, else
``PrivateRidge``. Draws are seeded: they protect nobody.

Data: "synthetic" has Gaussian classes in 64 dimensions, and "mnist" pairs (K = 100) and triples
(K = 1,000) of digits next to each other, each by 40 principal components.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
import warnings
from collections.abc import Iterator
from typing import Any

import _results
import keras
import numpy as np
from _datasets import load
from sklearn.decomposition import PCA

import tf_labeldp as ldp
from tf_labeldp.mechanisms import ProjectiveGeometryResponse, RandomizedResponse
from tf_labeldp.mechanisms._projective_geometry import _Space

RUNS = _results.FOLDER / "many_classes.jsonl"
EPSILONS = (1.0, 4.0)
CLASSES = {"synthetic": (10, 50, 100, 1000), "mnist": (100, 1000)}
METHODS = (
    "randomized response",
    "vector approximation",
    "subset selection",
    "projective geometry",
    "projective geometry for pairs",
    "projective geometry, debiased",
    "head",
    "no privacy",
)
SIZES = {"synthetic": 50_000, "mnist": 60_000}
EPOCHS, BATCH = 10, 500
WITH_SHARES = ("randomized response", "projective geometry")


def data(
    name: str, number: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns features and labels to train and to test, with rows of norm one."""
    rng = np.random.default_rng(seed)
    if name == "synthetic":
        means = rng.normal(size=(number, 64))
        parts = []
        for size in (SIZES[name], 10_000):
            y = rng.integers(0, number, size)
            x = means[y] + 1.5 * rng.normal(size=(size, 64))
            parts += [x / np.linalg.norm(x, axis=1, keepdims=True), y]
    else:
        images, parts = load(name), []
        digits = round(math.log10(number))
        flat = images.x_train.reshape(len(images.x_train), -1)
        pca = PCA(40, random_state=0).fit(flat[:10_000])
        train = pca.transform(flat), images.y_train
        test = pca.transform(images.x_test.reshape(len(images.x_test), -1))
        for x, y in (train, (test, images.y_test)):
            chosen = rng.integers(0, len(y), (digits, len(y)))
            rows = np.concatenate([x[some] for some in chosen], axis=1)
            codes = functools.reduce(lambda code, some: 10 * code + y[some], chosen, 0)
            parts += [rows / np.linalg.norm(rows, axis=1, keepdims=True), codes]
    x, y, x_test, y_test = parts
    return x.astype(np.float32), y, x_test.astype(np.float32), y_test


def subset_size(epsilon: float, number: int) -> int:
    """Returns the size of the sets of subset selection (Ye and Barg 2018)."""
    ideal = number / (math.exp(epsilon) + 1.0)
    sizes = {max(1, math.floor(ideal)), math.ceil(ideal)}
    return min(sizes, key=lambda size: variance(*subset_probabilities(epsilon, number, size)))


def subset_probabilities(epsilon: float, number: int, size: int) -> tuple[float, float]:
    """Returns the probabilities that a set contains the label, and that it contains another."""
    own = size / (size + (number - size) * math.exp(-epsilon))
    return own, (own * (size - 1) + (1.0 - own) * size) / (number - 1)


def variance(own: float, other: float) -> float:
    """Returns the variance of one label's term in the share of a rare class."""
    return other * (1.0 - other) / (own - other) ** 2


def probabilities(method: str, epsilon: float, number: int) -> tuple[float, float]:
    """Returns the probabilities that a set contains the label, and that it contains another."""
    if method == "randomized response":
        return subset_probabilities(epsilon, number, 1)
    if method == "subset selection":
        return subset_probabilities(epsilon, number, subset_size(epsilon, number))
    if method == "vector approximation":
        own = 1.0 / (1.0 + math.exp(-epsilon / 2.0))
        return own, 1.0 - own
    if method == "Hadamard":
        return _Space.of(2, number).inclusion_probabilities(epsilon)
    return geometry(method, epsilon, number).inclusion_probabilities


def geometry(method: str, epsilon: float, number: int) -> ProjectiveGeometryResponse:
    """Returns projective geometry response for shares, or for pairs."""
    best_for = "pairs" if method.endswith("pairs") else "shares"
    return ProjectiveGeometryResponse(epsilon, number, best_for)


def sets(method: str, epsilon: float, number: int, y: np.ndarray, seed: int) -> np.ndarray:
    """Returns the set that answers each label, ``bool`` (n, K)."""
    rng, every = np.random.default_rng([seed, 1]), np.arange(len(y))
    if method.startswith("projective geometry"):
        mechanism = geometry(method, epsilon, number)
        return mechanism.members(mechanism.randomize(y, rng=rng))
    own, other = probabilities(method, epsilon, number)
    found = np.zeros((len(y), number), dtype=bool)
    if method == "randomized response":
        found[every, RandomizedResponse(epsilon, number).randomize(y, rng=rng)] = True
    elif method == "vector approximation":
        for row, label in enumerate(y):
            found[row] = rng.random(number) < other
            found[row, label] = rng.random() < own
    else:
        size = subset_size(epsilon, number)
        inside = rng.random(len(y)) < own
        for row, label in enumerate(y):
            others = rng.choice(number - 1, size - inside[row], replace=False)
            found[row, others + (others >= label)] = True
            found[row, label] = inside[row]
    return found


def trained(x: np.ndarray, y: np.ndarray, number: int, loss: Any, seed: int) -> keras.Model:
    """Returns a linear model; ``y`` are rows (n, K)."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input(x.shape[1:]), keras.layers.Dense(number)])
    steps = EPOCHS * len(x) // BATCH
    rate = keras.optimizers.schedules.CosineDecay(0.05, steps)
    model.compile(keras.optimizers.Adam(rate), loss)
    model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0)
    return model


def run(job: dict[str, Any]) -> float:
    """Returns the test accuracy in percent."""
    method, epsilon, number = job["method"], job["epsilon"], job["classes"]
    x, y, x_test, y_test = data(job["data"], number, job["seed"])
    if method == "head":
        budget = ldp.PrivacyBudget(epsilon, 1e-6)
        labels = ldp.PrivateLabels(y, number, budget=budget, insecure_seed=job["seed"])
        kind = ldp.PrivateRidge if number > 200 else ldp.PrivateLogisticRegression
        predicted = kind(epsilon, 1e-6).fit(x, labels).predict(x_test)
        return 100.0 * float(np.mean(predicted == y_test))
    rows: Any = np.eye(number, dtype=bool)[y]
    loss: Any = keras.losses.CategoricalCrossentropy(from_logits=True)
    if method != "no privacy":
        rows = sets(method, epsilon, number, y, job["seed"])
    if method.endswith("debiased"):
        own, other = probabilities(method, epsilon, number)
        rows = ((rows - other) / (own - other)).astype(np.float32)
        rows += (1.0 - rows.sum(axis=1, keepdims=True)) / number
        loss = ldp.keras_layers.LabelWeightedLoss(from_logits=True)
    elif method != "no privacy":
        own, other = probabilities(method, epsilon, number)
        # How much likelier a set is under a class in it than under another.
        more = math.expm1(epsilon)

        def loss(y_true: Any, y_pred: Any) -> Any:
            inside = keras.ops.sum(keras.ops.softmax(y_pred) * y_true, axis=-1)
            return -keras.ops.log1p(more * inside)

    model = trained(x, rows, number, loss, job["seed"])
    return 100.0 * float(np.mean(model.predict(x_test, verbose=0).argmax(axis=1) == y_test))


def jobs(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the runs of the accuracy table."""
    for seed in range(arguments.seeds):
        for name in arguments.data:
            for number in arguments.classes or CLASSES[name]:
                for method in arguments.methods:
                    for epsilon in EPSILONS if method != "no privacy" else (0.0,):
                        job = {"data": name, "classes": number, "method": method}
                        yield {**job, "epsilon": epsilon, "seed": seed}


def shares(number: int, method: str, epsilon: float, seed: int) -> dict[str, float]:
    """Returns the error of the shares of a million labels with a Zipf law, and the seconds."""
    rng, size = np.random.default_rng([seed, number]), 1_000_000
    law = 1.0 / np.arange(1, number + 1)
    y = rng.permutation(number)[rng.choice(number, size, p=law / law.sum())]
    mechanism: Any = RandomizedResponse(epsilon, number)
    if method != "randomized response":
        mechanism = geometry(method, epsilon, number)
    labels = ldp.PrivateLabels(y, number, budget=ldp.PrivacyBudget(epsilon), insecure_seed=seed)
    started = time.perf_counter()
    noisy = labels.randomize(mechanism)
    drawn = time.perf_counter()
    found = noisy.class_shares()
    done = time.perf_counter()
    error = np.abs(found - np.bincount(y, minlength=number) / size).sum() / 2.0
    seconds = {"draw": round(drawn - started, 2), "estimate": round(done - drawn, 2)}
    return {"total variation": round(float(error), 4), **seconds}


def tables() -> None:
    """Prints the tables of all runs."""
    runs = _results.runs(RUNS)
    columns = ["mechanism"]
    columns += [f"ε {e:g}, K {k:,}" for e in EPSILONS for k in (50, 100, 1000, 10**4, 10**5)]
    kinds = ("randomized response", "Hadamard", "vector approximation", *METHODS[3:5])
    rows = []
    for method in kinds:
        cells = [method]
        for epsilon in EPSILONS:
            for number in (50, 100, 1000, 10**4, 10**5):
                best = variance(*probabilities("subset selection", epsilon, number))
                own = variance(*probabilities(method, epsilon, number))
                cells.append(f"{own / best:,.3g}" if own / best < 100 else f"{own / best:,.0f}")
        rows.append(cells)
    with _results.recorded(__file__, "variance", "accuracy", "shares"):
        print(_results.markdown(columns, rows), "\n")
        rows = []
        for name, number in ((name, k) for name, counts in CLASSES.items() for k in counts):
            for method in METHODS:
                at = EPSILONS if method != "no privacy" else (0.0, 0.0)
                cells = [_cell(runs, name, number, method, epsilon) for epsilon in at]
                if any(cells):
                    rows.append([f"{name}, K = {number:,}", method, *cells])
        heads = [f"ε {epsilon:g}" for epsilon in EPSILONS]
        print(_results.markdown(["data", "method", *heads], rows), "\n")
        rows = []
        for found in (one for one in runs if "total variation" in one):
            cells = [f"{found['classes']:,}", found["method"], f"{found['epsilon']:g}"]
            cells += [f"{found['total variation']:.3f}", f"{found['draw']:.1f}"]
            rows.append([*cells, f"{found['estimate']:.1f}"])
        names = ["K", "mechanism", "epsilon", "total variation", "s to draw", "s to estimate"]
        print(_results.markdown(names, rows))


def _cell(runs: list[dict[str, Any]], name: str, number: int, method: str, epsilon: float) -> str:
    wanted = {"data": name, "classes": number, "method": method, "epsilon": epsilon}
    found = [one["accuracy"] for one in runs if wanted.items() <= one.items() and "accuracy" in one]
    return _results.cell(found)


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=("run", "shares", "tables"))
    parser.add_argument("--data", nargs="+", default=list(CLASSES))
    parser.add_argument("--classes", nargs="+", type=int)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.task == "tables":
        tables()
    elif arguments.task == "run":
        for job in _results.missing(RUNS, jobs(arguments)):
            started = time.perf_counter()
            accuracy = round(run(job), 2)
            seconds = round(time.perf_counter() - started, 1)
            _results.add_run(RUNS, {**job, "accuracy": accuracy, "seconds": seconds})
    else:
        wanted = [
            {"task": "shares", "classes": number, "method": method, "epsilon": epsilon, "seed": 0}
            for number in (1000, 10_000, 100_000)
            for epsilon in EPSILONS
            for method in WITH_SHARES
        ]
        for job in _results.missing(RUNS, wanted):
            found = shares(job["classes"], job["method"], job["epsilon"], job["seed"])
            _results.add_run(RUNS, {**job, **found})


if __name__ == "__main__":
    main()
