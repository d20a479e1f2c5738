"""Rows of numbers: what ``PrivateClassifier`` chooses, against each of its parts alone.

    python tests/benchmarks/bench_front_door.py

Test accuracy on a fifth of the rows, mean of two seeds of the noise. "as they are" and "smoothed"
are logistic regressions; "Fourier" is ridge. The rule was made on digits, MNIST and the linear
labels; the others confirm it. Labels of these data sets are public; draws are seeded so that the
table can be made again, and protect nobody. Images and tables have their figures in
``bench_one_release.py``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import _results
import numpy as np
from sklearn import datasets

import tf_labeldp as ldp
from tf_labeldp.cli import _datasets
from tf_labeldp.features import NeighbourSmoothing, RandomFourierFeatures

EPSILONS, SEEDS = (0.1, 0.5, 1.0, 2.0), (0, 1)
ROWS = 10_000
METHODS = ("PrivateClassifier", "as they are", "Fourier", "smoothed")


def data() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Gives name, rows and classes of each data set."""
    rng = np.random.default_rng(0)
    digits = datasets.load_digits()
    yield "digits", digits.data, digits.target
    folder = os.environ.get("LABELDP_DATA_DIR", "../shared/data")
    for name in ("mnist", "fashion_mnist"):
        found = _datasets.load(name, folder)
        chosen = rng.permutation(len(found.y_train))[:ROWS]
        yield f"{name}, pixels", found.x_train[chosen].reshape(ROWS, -1), found.y_train[chosen]
    rows = rng.normal(size=(ROWS, 50))
    yield "linear labels", rows, (rows @ rng.normal(size=50) > 0).astype(int)
    yield (
        "groups",
        *datasets.make_classification(
            ROWS, 20, n_informative=10, n_classes=4, n_clusters_per_class=1, random_state=0
        ),
    )
    cancer = datasets.load_breast_cancer()
    yield "cancer", cancer.data, cancer.target


def model(method: str, rows: np.ndarray, epsilon: float, classes: int, seed: int) -> Any:
    """Returns an estimator that is not fitted."""
    told = {"num_classes": classes, "insecure_seed": seed}
    if method == "PrivateClassifier":
        return ldp.PrivateClassifier(epsilon, 1.0 / len(rows), **told)
    if method == "Fourier":
        encoder = RandomFourierFeatures().fit(rows)
        return ldp.PrivateRidge(epsilon, 1.0 / len(rows), encoder=encoder, **told)
    smooth = NeighbourSmoothing().fit(rows) if method == "smoothed" else None
    return ldp.PrivateLogisticRegression(epsilon, 1.0 / len(rows), encoder=smooth, **told)


def main() -> None:
    """Prints the table."""
    warnings.filterwarnings("ignore")
    rows = []
    for name, x, y in data():
        order = np.random.default_rng(1).permutation(len(x))
        train, test = np.split(order, [int(0.8 * len(x))])
        x = x.astype("float32")
        for method in METHODS:
            cells = []
            for epsilon in EPSILONS:
                scores = [
                    model(method, x[train], epsilon, int(y.max()) + 1, seed)
                    .fit(x[train], y[train])
                    .score(x[test], y[test])
                    for seed in SEEDS
                ]
                cells.append(f"{100.0 * np.mean(scores):.1f}")
            rows.append([name, method, *cells])
            print(rows[-1], flush=True)
    with _results.recorded(__file__, "accuracy"):
        columns = ["data", "method", *(f"ε {one:g}" for one in EPSILONS)]
        print(_results.markdown(columns, rows))


if __name__ == "__main__":
    main()
