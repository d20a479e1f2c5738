"""The choice of the front door, against its parts and against all other methods.

    python benchmarks/bench_front_door.py rows        # rows of numbers, against its parts
    python benchmarks/bench_front_door.py regression  # PrivateRegressor on insurance data
    python benchmarks/bench_front_door.py against     # other methods, from the result files

Rows of numbers: test accuracy on a fifth of the rows, mean of two seeds of the noise. "as they
are" and "smoothed" are logistic regressions; "Fourier" is ridge. The rule was chosen on digits,
MNIST and the linear labels; the others confirm it. Labels of these data sets are public; draws are
seeded, so that the table is reproducible, and protect nobody. For images and tables see
``bench_one_release.py``. Regression: mean squared error on the splits of ``bench_regression.py``.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import _datasets
import _results
import numpy as np
from _insurance import COLUMNS, InsuranceData, load, split
from report import table_of
from sklearn import datasets

import tf_labeldp as ldp
from tf_labeldp.features import NeighbourSmoothing, RandomFourierFeatures

EPSILONS, SEEDS = (0.1, 0.5, 1.0, 2.0), (0, 1)
ROWS = 10_000
METHODS = ("PrivateClassifier", "as they are", "Fourier", "smoothed")


def data() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yields name, rows and classes of each data set."""
    rng = np.random.default_rng(0)
    digits = datasets.load_digits()
    yield "digits", digits.data, digits.target
    for name in ("mnist", "fashion_mnist"):
        found = _datasets.load(name)
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
    """Returns an unfitted estimator."""
    options = {"num_classes": classes, "insecure_seed": seed}
    if method == "PrivateClassifier":
        return ldp.PrivateClassifier(epsilon, 1.0 / len(rows), **options)
    if method == "Fourier":
        encoder = RandomFourierFeatures().fit(rows)
        return ldp.PrivateRidge(epsilon, 1.0 / len(rows), encoder=encoder, **options)
    smooth = NeighbourSmoothing().fit(rows) if method == "smoothed" else None
    return ldp.PrivateLogisticRegression(epsilon, 1.0 / len(rows), encoder=smooth, **options)


def regression() -> None:
    """Prints errors of ``PrivateRegressor``, on the splits of the regression tables and on five."""
    for name in sys.argv[2:] or COLUMNS:
        lines = []
        data = load(name)
        table = columns_of(data)
        unit = 1.0 if data.counts else 1e6
        errors = np.zeros((len(EPSILONS), max(5, _SPLITS[name])))
        for at, epsilon in enumerate(EPSILONS):
            for seed in range(errors.shape[1]):
                rows, test = split(len(data), seed)
                door = ldp.PrivateRegressor(
                    epsilon, 0.1 / len(data), low=data.low, high=data.high, insecure_seed=seed
                )
                door.fit({key: cells[rows] for key, cells in table.items()}, data.labels[rows])
                predicted = door.predict({key: cells[test] for key, cells in table.items()})
                errors[at, seed] = np.mean(np.square(predicted - data.labels[test])) / unit
            print(name, epsilon, errors[at], flush=True)
        for splits in (_SPLITS[name], 5):
            found = errors[:, :splits]
            cells = [f"{row.mean():.4f} ± {row.std(ddof=1):.4f}" for row in found]
            lines.append([name, f"{splits}", *cells])
        with _results.recorded(__file__, f"regression_{name}"):
            columns = ["data", "splits", *(f"ε {epsilon:g}" for epsilon in EPSILONS)]
            print(_results.markdown(columns, lines))


def columns_of(data: InsuranceData) -> dict[str, np.ndarray]:
    """Returns features as a table: categories as texts."""
    texts = {f"category {i}": data.codes[:, i].astype(str) for i in range(data.codes.shape[1])}
    return texts | {f"number {i}": data.numbers[:, i] for i in range(data.numbers.shape[1])}


_CHOSEN = {"mnist": "smooth logistic", "fashion_mnist": "smooth logistic"}
_KIND = {"beMTPL97": "amounts", "pg15training": "counts"}
_SPLITS = {"beMTPL97": 10, "pg15training": 3}
"""Numbers of splits in the regression tables."""


def against() -> None:
    """Prints the front door's choice next to the best other method of the result files."""
    lines = []
    for name, chosen in _CHOSEN.items():
        found = _cells("one_release/accuracy", lambda row, name=name: row[0] == name, 1)
        found |= _cells(f"label_dp_pro/{name}_true_epsilon", lambda row: True, 0)
        found |= _bootstrapped(name)
        for epsilon in EPSILONS:
            values = {m: v for (m, at), v in found.items() if at == epsilon}
            own = values.pop(chosen)
            best = max(values, key=values.__getitem__)
            lines.append([name, f"{epsilon:g}", f"{own:.1f}", f"{best}: {values[best]:.1f}"])
            lines[-1].append(f"{own - values[best]:+.1f}")
    for name, kind in _KIND.items():
        ours = _cells(
            f"front_door/regression_{name}", lambda row, n=name: row[1] == f"{_SPLITS[n]}", 0
        )
        table = table_of(f"regression/test_error_{kind}")
        for epsilon in EPSILONS:
            own = ours[name, epsilon]
            row = next(row for row in table["rows"] if float(row[0]) == epsilon)
            values = {
                method: float(cell.split()[0])
                for method, cell in zip(table["columns"][1:], row[1:], strict=True)
                # Methods with a star know the distribution of the labels.
                if "*" not in method
            }
            best = min(values, key=values.__getitem__)
            lines.append([name, f"{epsilon:g}", f"{own:.4f}", f"{best}: {values[best]:.4f}"])
            lines[-1].append(f"{100.0 * (own / values[best] - 1.0):+.1f} %")
    with _results.recorded(__file__, "against"):
        columns = ["data", "epsilon", "front door", "best other", "difference"]
        print(_results.markdown(columns, lines))


def _cells(name: str, wanted: Any, at: int) -> dict[tuple[str, float], float]:
    """Returns the figures of a table by method and epsilon, without those of papers."""
    table = table_of(name)
    found = {}
    for row in filter(wanted, table["rows"]):
        for column, cell in zip(table["columns"], row, strict=True):
            level = column.split()[-1]
            if cell and level.replace(".", "").isdigit() and "*" not in row[at] + cell:
                if not row[at].endswith("AUC"):
                    found[row[at], float(level)] = float(cell.split()[0])
    return found


def _bootstrapped(name: str) -> dict[tuple[str, float], float]:
    """Returns the accuracies of the small network that heads teach, which trains in 10 minutes."""
    runs = [
        run
        for run in _results.runs(_results.FOLDER / "learners.jsonl")
        if (run["data"], run["method"], run["passes"]) == (name, "bootstrapped head", 6)
    ]
    levels = {run["epsilon"] for run in runs}
    return {
        ("bootstrapped head", level): float(
            np.mean([run["accuracy"] for run in runs if run["epsilon"] == level])
        )
        for level in levels
    }


def rows_of_numbers() -> None:
    """Prints the choice for rows of numbers, and its parts."""
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
        columns = ["data", "method", *(f"ε {epsilon:g}" for epsilon in EPSILONS)]
        print(_results.markdown(columns, rows))


def main() -> None:
    """Prints one table."""
    warnings.filterwarnings("ignore")
    tables = {"rows": rows_of_numbers, "regression": regression, "against": against}
    tables[sys.argv[1] if sys.argv[1:] else "rows"]()


if __name__ == "__main__":
    main()
