"""Label-free feature maps under one release: time, accuracy, and what each choice changes.

    python tests/benchmarks/bench_feature_maps.py --data fashion_mnist --seeds 5
    python tests/benchmarks/bench_feature_maps.py --data fashion_mnist --sensitivity
    python tests/benchmarks/bench_feature_maps.py --data adult

The labels of these data sets are public, and accuracies here are measured on their test sets. For
labels that are private none of these choices may be made in this way; the risk (an unbiased
estimate from the release, less a constant) is shown beside, but it too is of the released data.
Epsilon is for the replacement of one label, delta = 1/n.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import os
import pathlib
import time

import numpy as np

from tf_labeldp.heads import (
    PatchDictionary,
    PrivateRidge,
    RandomFourierFeatures,
    decorrelation_floor,
)

EPSILONS = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
IMAGE_VARIANTS = (
    {},
    {"seed": 1},
    {"decorrelate": None},
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
)
TABLE_VARIANTS = (
    {},
    {"seed": 1},
    {"num_features": 200},
    {"num_features": 2000},
    {"bandwidth": 2.0},
    {"bandwidth": 8.0},
    {"linear_weight": 0.3},
    {"linear_weight": 0.7},
    {"hash_buckets": 8},
    {"decorrelate": 0.1},
    {"decorrelate": 0.01},
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


def area_under_curve(scores: np.ndarray, labels: np.ndarray) -> float:
    from scipy import stats

    ranks = stats.rankdata(scores)
    positive = labels == 1
    p = int(positive.sum())
    return float((ranks[positive].sum() - p * (p + 1) / 2) / (p * (len(labels) - p)))


def row(name, x_train, y_train, x_test, y_test, epsilons, seeds, penalty):
    """Prints accuracy (mean, standard deviation over seeds), risk, and AUC for two classes."""
    n, cells = len(y_train), []
    for epsilon in epsilons:
        accuracies, risks, areas = [], [], []
        for seed in range(seeds):
            head = PrivateRidge(
                epsilon, 1.0 / n, num_classes=int(y_train.max()) + 1, penalty=penalty, seed=seed
            )
            features = x_train(epsilon) if callable(x_train) else x_train
            tests = x_test(epsilon) if callable(x_test) else x_test
            head.fit(features, y_train)
            accuracies.append(100.0 * head.score(tests, y_test))
            risks.append(head.risk_ / n)
            if y_train.max() == 1:
                areas.append(100.0 * area_under_curve(head.decision_function(tests), y_test))
        cell = f"{np.mean(accuracies):.1f} ± {np.std(accuracies):.1f}"
        cell += f" (AUC {np.mean(areas):.1f})" if areas else ""
        cells.append(f"{cell} [{np.mean(risks):.4f}]")
    print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", default="fashion_mnist", choices=["mnist", "fashion_mnist", "adult"]
    )
    parser.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--seeds", type=int, default=1, help="releases for each figure")
    parser.add_argument("--sensitivity", action="store_true", help="change one argument at a time")
    parser.add_argument("--penalty", default="bayes", choices=["bayes", "risk"])
    arguments = parser.parse_args()
    folder = pathlib.Path(os.environ.get("LABELDP_DATA_DIR", "../shared/data")) / arguments.data
    if not folder.is_dir():
        raise SystemExit(f"no folder {folder}; set LABELDP_DATA_DIR to where the data sets are")

    if arguments.data == "adult":
        (x_train, y_train), (x_test, y_test) = (read_adult(folder, p) for p in ("data", "test"))
        variants, make = TABLE_VARIANTS, RandomFourierFeatures
    else:
        (x_train, y_train), (x_test, y_test) = (read_images(folder, p) for p in ("train", "t10k"))
        variants, make = IMAGE_VARIANTS, PatchDictionary
    print("| variant | " + " | ".join(f"ε {epsilon:g}" for epsilon in arguments.epsilons) + " |")
    print("|---" * (len(arguments.epsilons) + 1) + "|")
    for change in variants if arguments.sensitivity else variants[:1]:
        epsilons = arguments.epsilons
        # With the rule for images, each epsilon has features of its own.
        ruled = make is PatchDictionary and "decorrelate" not in change
        for group in [(epsilon,) for epsilon in epsilons] if ruled else [tuple(epsilons)]:
            extra = {"decorrelate": decorrelation_floor(group[0], len(y_train))} if ruled else {}
            start = time.perf_counter()
            mapping = make(**{**extra, **change}).fit(x_train)
            fitted = time.perf_counter()
            train, test = mapping.transform(x_train), mapping.transform(x_test)
            end = time.perf_counter()
            name = (
                f"{change or 'default'}, fit {fitted - start:.0f} s, transform {end - fitted:.0f} s"
            )
            row(name, train, y_train, test, y_test, group, arguments.seeds, arguments.penalty)


if __name__ == "__main__":
    main()
