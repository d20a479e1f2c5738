"""Tables: the head of one release, boosting on noisy labels, and no privacy, over epsilon.

    python benchmarks/bench_tables.py run adult bank pg15training ... [--seeds 5]
    python benchmarks/bench_tables.py tables     # prints the tables of all runs

Runs are kept in `results/tables.jsonl`, so that a stopped benchmark goes on. Classes: test AUC in
percent of the second class (Adult, bank), or accuracy (more classes). Numbers: explained variance
in percent, `100 (1 - MSE / variance)`. Adult has its own test set; other sets hold out 30 % of the
rows. Labels of these data sets are public, and draws are seeded: they protect nobody.
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import _results
import numpy as np
import pandas as pd
from _datasets import FOLDER
from bench_front_door import columns_of
from sklearn import datasets
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.metrics import roc_auc_score

import tf_labeldp as ldp
from tf_labeldp.features import TableCodes

RUNS = _results.FOLDER / "tables.jsonl"
EPSILONS = (0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
METHODS = ("head", "boosting", "boosting, scikit-learn", "one call")
_LIBRARIES = {"boosting": "lightgbm", "boosting, scikit-learn": "scikit-learn"}
_ADULT = (
    "age workclass weight education years marital occupation relationship race sex gain loss hours "
    "country income"
).split()
_PLAIN = {"cancer": datasets.load_breast_cancer, "wine": datasets.load_wine}
_PLAIN |= {"digits": datasets.load_digits, "diabetes": datasets.load_diabetes}
_RANGES = {"bike": (0.0, 1000.0), "diabetes": (0.0, 400.0)}


def load(name: str, seed: int) -> tuple[Any, np.ndarray, Any, np.ndarray, dict[str, Any]]:
    """Returns training columns and labels, test columns and labels, and the kind of labels."""
    if name == "adult":
        parts = []
        for file, skipped in (("adult.data.gz", 0), ("adult.test.gz", 1)):
            path = FOLDER / "adult" / file
            frame = pd.read_csv(path, names=_ADULT, skiprows=skipped, skipinitialspace=True)
            frame = frame.dropna(subset=["income"])
            parts += [frame.drop(columns="income"), frame.income.str.startswith(">").to_numpy()]
        x, y, x_test, y_test = parts
        return x, y.astype(int), x_test, y_test.astype(int), {"num_classes": 2}
    if name in ("pg15training", "beMTPL97"):
        from _insurance import load as load_insurance
        from _insurance import split

        data = load_insurance(name)
        table = pd.DataFrame(columns_of(data))
        rows, test = split(len(data), seed)
        kind = {"low": float(data.low), "high": float(data.high)}
        return table.iloc[rows], data.labels[rows], table.iloc[test], data.labels[test], kind
    if name in _PLAIN:
        bunch = _PLAIN[name](as_frame=True)
        table, labels = bunch.data, bunch.target.to_numpy()
    else:
        table = pd.read_csv(FOLDER / "tables" / f"{name}.csv.gz")
        labels = table.pop("label").to_numpy()
    kind = {"num_classes": int(labels.max()) + 1}
    if name in _RANGES:
        kind = dict(zip(("low", "high"), _RANGES[name], strict=True))
        labels = labels.astype(np.float64)
    order = np.random.default_rng(seed).permutation(len(labels))
    test, rows = np.split(order, [int(0.3 * len(labels))])
    return table.iloc[rows], labels[rows], table.iloc[test], labels[test], kind


def score(model: Any, x: Any, labels: np.ndarray, kind: dict[str, Any]) -> float:
    """Returns AUC, accuracy or explained variance in percent."""
    if "low" in kind:
        return 100.0 * (1.0 - np.mean((model.predict(x) - labels) ** 2) / labels.var())
    p = model.predict_proba(x)
    if kind["num_classes"] == 2:
        return 100.0 * roc_auc_score(labels, p[:, 1])
    return 100.0 * float(np.mean(p.argmax(axis=1) == labels))


def run(name: str, method: str, epsilon: float, seed: int) -> float:
    """Returns the score of one method; epsilon is zero without privacy."""
    x, y, x_test, y_test, kind = load(name, seed)
    if method == "no privacy":
        coder = TableCodes().fit(x)
        kinds = (HistGradientBoostingRegressor, HistGradientBoostingClassifier)
        model: Any = kinds["num_classes" in kind](
            learning_rate=0.05, categorical_features=coder.categorical_, early_stopping=True
        )
        model.fit(coder.transform(x), y)
        return score(model, coder.transform(x_test), y_test, kind)
    options = {**kind, "insecure_seed": seed}
    if method in _LIBRARIES:
        model = ldp.PrivateBoosting(epsilon, library=_LIBRARIES[method], **options)
    else:
        door = ldp.PrivateRegressor if "low" in kind else ldp.PrivateClassifier
        model = door(epsilon, method="head" if method == "head" else "auto", **options)
    return score(model.fit(x, y), x_test, y_test, kind)


def run_all(names: list[str], seeds: int, methods: list[str], epsilons: list[float]) -> None:
    """Adds the missing runs."""
    jobs = [
        {"data": name, "method": method, "epsilon": epsilon, "seed": seed}
        for name in names
        for seed in range(seeds)
        for method in methods
        for epsilon in (epsilons if method != "no privacy" else [0.0])
    ]
    for job in _results.missing(RUNS, jobs):
        started = time.perf_counter()
        try:
            found = run(job["data"], job["method"], job["epsilon"], job["seed"])
        except ValueError as error:  # too few examples for boosting at this epsilon
            print(job, error)
            found = float("nan")
        seconds = round(time.perf_counter() - started, 1)
        _results.add_run(RUNS, {**job, "score": round(found, 3), "seconds": seconds})
        print(job, f"{found:.2f}", seconds, flush=True)


def tables() -> None:
    """Prints a table of classes and one of numbers: mean and standard error over the seeds."""
    runs = _results.runs(RUNS)
    printed: dict[str, list[list[str]]] = {"classes": [], "numbers": []}
    for name in dict.fromkeys(run["data"] for run in runs):
        kind = "numbers" if name in (*_RANGES, "pg15training", "beMTPL97") else "classes"
        roof = [
            run["score"] for run in runs if (run["data"], run["method"]) == (name, "no privacy")
        ]
        for method in METHODS:
            cells = []
            for epsilon in EPSILONS:
                wanted = {"data": name, "method": method, "epsilon": epsilon}
                found = [run["score"] for run in runs if wanted.items() <= run.items()]
                found = [value for value in found if value == value]
                error = np.std(found, ddof=1) / len(found) ** 0.5 if len(found) > 1 else 0.0
                cells.append(f"{np.mean(found):.1f} ± {error:.1f}" if found else "")
            if any(cells):
                printed[kind].append([name, method, *cells])
        if roof:
            cell = f"{np.mean(roof):.1f} ± 0.0"
            printed[kind].append([name, "no privacy", *[cell] * len(EPSILONS)])
    columns = ["data", "method", *(f"ε {epsilon:g}" for epsilon in EPSILONS)]
    with _results.recorded(__file__, *printed):
        for rows in printed.values():
            print(_results.markdown(columns, rows), "\n")


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=("run", "tables"))
    parser.add_argument("data", nargs="*")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--methods", nargs="+", default=[*METHODS[:2], METHODS[3], "no privacy"])
    parser.add_argument("--epsilons", nargs="+", type=float, default=EPSILONS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.task == "tables":
        tables()
    else:
        run_all(arguments.data, arguments.seeds, arguments.methods, list(arguments.epsilons))


if __name__ == "__main__":
    main()
