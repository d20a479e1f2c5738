"""Label-free feature maps under one release: time, accuracy, and how to choose their arguments.

    python benchmarks/bench_feature_maps.py --data fashion_mnist --seeds 5
    python benchmarks/bench_feature_maps.py --data mnist --sensitivity --save mnist.json
    python benchmarks/bench_feature_maps.py --sensitivity --proxy mnist.json
    python benchmarks/bench_feature_maps.py --data adult --sensitivity --head both
    python benchmarks/bench_feature_maps.py --data mnist --spread --head both

``--spread`` compares heads with and without a spread over directions, on pixels and on small maps.
Without ``--sensitivity`` the table has the default map. With it, one argument changes at a time,
and two rules choose among these variants without test labels:

- *by the estimate of a release*: in brackets is the head's estimate of its loss on the training set
  (PrivateRidge: squared error per label less a constant; PrivateLogisticRegression: log-loss), from
  the release and the features. A choice by it needs no test labels, but budget: each variant needs
  its own release. Releasing k variants together for one epsilon takes sqrt(k) times the noise in
  each, about that of epsilon / sqrt(k). The table has the choice at no extra cost, which bounds the
  gain;
- *by another data set* (``--proxy``, the file that ``--save`` wrote for it): the best variant
  there, where labels are public. This reads no private label, so it costs nothing.

Over 29 variants, with PrivateRidge on 20,000 images and the noise of 60,000, the rank correlation
with accuracy at epsilon 0.05 / 0.2 / 1 was, for the estimate of one release, 0.35 / 0.56 / 0.69 on
Fashion-MNIST and 0.37 / 0.45 / 0.75 on MNIST; for the accuracy on the other of the two data sets
0.57 / 0.27 / 0.22. The best variants were 0.3 to 0.9 percent above the default, and halving epsilon
costs more, so spend a budget on one release of the default, or of several scales together, rather
than on a choice.

The labels of these data sets are public, and the accuracies are those on their test sets. Private
labels allow no such choice. Epsilon is for the replacement of one label, delta = 1/n; ± is the
standard deviation over releases.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import pathlib
import time
import warnings

import _results
import numpy as np
from _datasets import FOLDER
from scipy import stats
from sklearn.metrics import roc_auc_score

from tf_labeldp import PrivacyBudget, PrivateLabels
from tf_labeldp.features import NeighbourSmoothing, PatchDictionary, RandomFourierFeatures
from tf_labeldp.heads import PrivateLogisticRegression, PrivateRidge

EPSILONS = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
HEADS = {"ridge": PrivateRidge, "logistic": PrivateLogisticRegression}
IMAGE_VARIANTS = (
    {},
    {"seed": 1},
    {"threshold": 0.0},
    {"threshold": 0.5},
    {"threshold": 1.0},
    {"whitening": 0.01},
    {"whitening": 1.0},
    {"contrast": 0.0005},
    {"contrast": 0.05},
    {"patch_size": 5},
    {"patch_size": 9},
    {"patch_size": (5, 9), "num_atoms": 50},
    {"pooling": 2},
    {"pooling": 4},
    {"num_atoms": 50},
    {"num_atoms": 200},
    {"num_atoms": 50, "pooling": 4},
    {"patch_size": (5, 9), "num_atoms": 50, "pooling": 4},
)
TABLE_VARIANTS = (
    {},
    {"seed": 1},
    {"num_features": 200},
    {"num_features": 2000},
    {"bandwidth": 2.0},
    {"bandwidth": 8.0},
    {"linear_weight": 0.0},
    {"linear_weight": 0.3},
    {"linear_weight": 0.7},
    {"linear_weight": 0.9},
    {"hash_buckets": 8},
)
CATEGORICAL = (1, 3, 5, 6, 7, 8, 9, 13)
NUM_COLUMNS = 14


def read_images(folder: pathlib.Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    images = gzip.decompress((folder / f"{part}-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((folder / f"{part}-labels-idx1-ubyte.gz").read_bytes())
    pixels = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 28, 28)
    return pixels, np.frombuffer(labels, np.uint8, offset=8).astype(np.int64)


def read_adult(folder: pathlib.Path, part: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    text = gzip.decompress((folder / f"adult.{part}.gz").read_bytes()).decode()
    lines = [line for line in text.splitlines() if line.strip() and line[0] != "|"]
    *columns, labels = zip(*csv.reader(lines, skipinitialspace=True), strict=True)
    table = {
        str(place): np.array(cells) if place in CATEGORICAL else np.array(cells, dtype=float)
        for place, cells in enumerate(columns)
    }
    assert len(table) == NUM_COLUMNS
    return table, np.array([label.startswith(">50K") for label in labels]).astype(np.int64)


class Results:
    """Accuracy in percent and estimate by (head, epsilon), as variants by releases."""

    def __init__(self, heads: list[str], epsilons: list[float], seeds: int) -> None:
        self.heads, self.epsilons, self.seeds = heads, epsilons, seeds
        self.names: list[str] = []
        keys = [f"{head} {epsilon:g}" for head in heads for epsilon in epsilons]
        self.accuracies: dict[str, list[list[float]]] = {key: [] for key in keys}
        self.estimates: dict[str, list[list[float]]] = {key: [] for key in keys}
        print("| variant | head | " + " | ".join(f"ε {epsilon:g}" for epsilon in epsilons) + " |")
        print("|---" * (len(epsilons) + 2) + "|")

    def add(self, name, seconds, train, y_train, test, y_test, **settings) -> None:
        self.names.append(name)
        n, num_classes = len(y_train), int(y_train.max()) + 1
        for head in self.heads:
            cells = []
            for epsilon in self.epsilons:
                accuracies, estimates, areas = [], [], []
                for seed in range(self.seeds):
                    # A vault per fit: nobody publishes all fits, so they do not add up.
                    budget = PrivacyBudget(epsilon, 1.0 / n)
                    labels = PrivateLabels(y_train, num_classes, budget=budget, insecure_seed=seed)
                    fitted = HEADS[head](epsilon, 1.0 / n, **settings).fit(train, labels)
                    accuracies.append(100.0 * fitted.score(test, y_test))
                    estimates.append(fitted.risk_ / (n if head == "ridge" else 1))
                    if num_classes == 2:
                        scores = fitted.decision_function(test)
                        areas.append(100.0 * roc_auc_score(y_test, scores))
                self.accuracies[f"{head} {epsilon:g}"].append(accuracies)
                self.estimates[f"{head} {epsilon:g}"].append(estimates)
                cell = f"{np.mean(accuracies):.1f} ± {np.std(accuracies):.1f}"
                cell += f" (AUC {np.mean(areas):.1f})" if areas else ""
                cells.append(f"{cell} [{np.mean(estimates):.4f}]")
            print(f"| {name}, {seconds} | {head} | " + " | ".join(cells) + " |", flush=True)

    def print_choices(self, proxy: dict | None) -> None:
        """Prints the gain of each choice over the default, and its loss against the best."""
        print("\n| head, ε | choice by | rank correlation with accuracy | chosen | gain | loss |")
        print("|---" * 6 + "|")
        for key, table in self.accuracies.items():
            accuracies = np.mean(table, axis=1)
            estimates = np.array(self.estimates[key])
            # One release per variant decides; the accuracy is the mean over all releases.
            correlations = [stats.spearmanr(-column, accuracies)[0] for column in estimates.T]
            self._print_choice(
                key, "estimate", np.mean(correlations), estimates.argmin(axis=0), accuracies
            )
            if proxy is not None:
                if proxy["names"] != self.names or key not in proxy["accuracies"]:
                    raise SystemExit("the file of --proxy has other variants, heads or epsilons")
                there = np.mean(proxy["accuracies"][key], axis=1)
                correlation = stats.spearmanr(there, accuracies)[0]
                self._print_choice(key, "proxy", correlation, [int(there.argmax())], accuracies)

    def _print_choice(self, key, rule, correlation, chosen, accuracies) -> None:
        reached = float(np.mean(accuracies[chosen]))
        names = ", ".join(sorted({self.names[place] for place in chosen}))
        gain, loss = reached - accuracies[0], accuracies.max() - reached
        print(f"| {key} | {rule} | {correlation:.2f} | {names} | {gain:+.2f} | {loss:.2f} |")


def spread_features(x_train, x_test, make):
    """Yields names, training rows and test rows: pixels of images, and maps of a few columns."""
    if make is PatchDictionary:
        yield "pixels", *(x.reshape(len(x), -1) / np.float32(255.0) for x in (x_train, x_test))
    mapping = make(**({"num_atoms": 20} if make is PatchDictionary else {})).fit(x_train)
    train, test = mapping.transform(x_train), mapping.transform(x_test)
    yield "map", train, test
    if make is PatchDictionary:
        smoothing = NeighbourSmoothing()
        yield "smooth map", smoothing.fit_transform(train), smoothing.transform(test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", default="fashion_mnist", choices=["mnist", "fashion_mnist", "adult"]
    )
    parser.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--seeds", type=int, default=1, help="releases for each figure")
    parser.add_argument("--head", default="ridge", choices=["ridge", "logistic", "both"])
    parser.add_argument("--sensitivity", action="store_true", help="change one argument at a time")
    parser.add_argument("--spread", action="store_true", help="compare rules for the spread")
    parser.add_argument("--examples", type=int, help="number of training examples to use")
    parser.add_argument("--save", type=pathlib.Path, help="write the figures to this file")
    parser.add_argument("--proxy", type=pathlib.Path, help="figures of another data set")
    arguments = parser.parse_args()
    # All methods have delta 1/n, to compare them.
    warnings.filterwarnings("ignore", "delta")
    folder = FOLDER / arguments.data
    if not folder.is_dir():
        raise SystemExit(f"no folder {folder}; set LABELDP_DATA_DIR to the folder of the data sets")

    if arguments.data == "adult":
        (x_train, y_train), (x_test, y_test) = (read_adult(folder, p) for p in ("data", "test"))
        variants, make = TABLE_VARIANTS, RandomFourierFeatures
        x_train = {name: values[: arguments.examples] for name, values in x_train.items()}
    else:
        (x_train, y_train), (x_test, y_test) = (read_images(folder, p) for p in ("train", "t10k"))
        variants, make = IMAGE_VARIANTS, PatchDictionary
        x_train = x_train[: arguments.examples]
    y_train = y_train[: arguments.examples]
    heads = list(HEADS) if arguments.head == "both" else [arguments.head]
    if arguments.spread:
        with _results.recorded(__file__, f"{arguments.data}_spread"):
            results = Results(heads, list(arguments.epsilons), arguments.seeds)
            for name, train, test in spread_features(x_train, x_test, make):
                for rule, spread in (("no spread", False), ("spread", True)):
                    results.add(name, rule, train, y_train, test, y_test, spread=spread)
        return
    tables = [arguments.data, f"{arguments.data}_choices"][: 1 + arguments.sensitivity]
    with _results.recorded(__file__, *tables):
        results = Results(heads, list(arguments.epsilons), arguments.seeds)
        for change in variants if arguments.sensitivity else variants[:1]:
            start = time.perf_counter()
            mapping = make(**change).fit(x_train)
            fitted = time.perf_counter()
            train, test = mapping.transform(x_train), mapping.transform(x_test)
            seconds = f"{fitted - start:.0f} + {time.perf_counter() - fitted:.0f} s"
            name = ", ".join(f"{key} {value}" for key, value in change.items()) or "default"
            results.add(name, seconds, train, y_train, test, y_test)
        if arguments.sensitivity:
            proxy = json.loads(arguments.proxy.read_text()) if arguments.proxy else None
            results.print_choices(proxy)
    if arguments.save:
        saved = {"names": results.names, "accuracies": results.accuracies}
        arguments.save.write_text(json.dumps(saved))


if __name__ == "__main__":
    main()
