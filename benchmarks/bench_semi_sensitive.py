"""Adult with three private columns next to the private label: what a plan of the theory would buy.

    python benchmarks/bench_semi_sensitive.py run [--seeds 3]
    python benchmarks/bench_semi_sensitive.py tables

Semi-sensitive features (Chua et al. 2024, arXiv 2401.15246): one person's label and private columns
are replaced together, the other columns are public. docs/theory.md has the plan. All methods except
boosting have the same features, indicators of categories and of ten bins per number, so that each
row has the same length; delta is 1e-5. Rates and penalties were chosen on seed 0, and other seeds
are reported. Runs are kept in `results/semi_sensitive.jsonl`, so that a stopped benchmark goes on.
Draws are seeded: they protect nobody.
"""

from __future__ import annotations

import argparse
import functools
import warnings
from typing import Any

import _results
import numpy as np
import pandas as pd
from bench_tables import load
from scipy.optimize import minimize
from scipy.special import expit, logit
from sklearn.metrics import roc_auc_score

import tf_labeldp as ldp
from tf_labeldp.accounting import calibrate_noise_multiplier
from tf_labeldp.plugins import gaussian_epsilon, gaussian_sigma

RUNS = _results.FOLDER / "semi_sensitive.jsonl"
DELTA = 1e-5
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
PRIVATE = {
    "marital, relationship, gain": ["marital", "relationship", "gain"],
    "race, sex, country": ["race", "sex", "country"],
}
# Bins of numbers that are public by the meaning of the column; other numbers have deciles, which
# are public only for public columns.
BINS = {"gain": [1, 5_000, 10_000], "loss": [1, 1_500, 2_000]}
METHODS = {
    "no privacy": "no privacy, all columns",
    "no privacy, 11": "no privacy, 11 public columns",
    "all public": "label DP, if all columns were public: head",
    "drop": "label DP on 11 public columns: head",
    "drop, boosting": "label DP on 11 public columns: boosting",
    "dp-sgd": "all columns private: DP-SGD",
    "hybrid": "noisy labels on public columns, then DP-SGD (after the paper)",
    "head, dp-sgd": "head on public columns, then DP-SGD",
    "head, moments": "head on public columns, then a release of score and private columns",
    "boosting, moments": "boosting on public columns, then a release of score and private columns",
    "moments": "one release of all products with private columns",
}
WITHOUT_EPSILON = ("no privacy", "no privacy, 11")


@functools.cache
def data(private: str) -> tuple[Any, ...]:
    """Returns public and private indicators and labels of both parts, and the public columns."""
    x, y, x_test, y_test, _ = load("adult", 0)
    parts: dict[bool, list[np.ndarray]] = {False: [], True: []}
    for name in x.columns:
        column, column_test = x[name], x_test[name]
        if name in BINS or pd.api.types.is_numeric_dtype(column):
            edges = BINS.get(name) or np.unique(np.quantile(column, np.arange(1, 10) / 10))
            column, column_test = (
                np.searchsorted(edges, c, "right") for c in (column, column_test)
            )
        codes = pd.Index(np.unique(column))
        both = [codes.get_indexer(values) for values in (column, column_test)]
        shown = [np.eye(codes.size, dtype=np.float32)[place] for place in both]
        parts[name in PRIVATE[private]].append(np.concatenate(shown))
    n = len(x)
    # Rows of length one: each column has one indicator.
    blocks = [np.hstack(parts[kind]) / np.sqrt(len(parts[kind])) for kind in (False, True)]
    (u, u_test), (s, s_test) = ((block[:n], block[n:]) for block in blocks)
    table, table_test = (part.drop(columns=PRIVATE[private]) for part in (x, x_test))
    return u, s, y, u_test, s_test, y_test, table, table_test


def logistic(x: np.ndarray, y: np.ndarray, epsilon: float | None = None) -> np.ndarray:
    """Returns weights that fit labels; with epsilon, labels of randomized response."""
    flip = 0.0 if epsilon is None else float(expit(-epsilon))

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        p = expit(x @ weights)
        q = np.clip(flip + (1.0 - 2.0 * flip) * p, 1e-9, 1.0 - 1e-9)
        value = -np.sum(np.where(y == 1, np.log(q), np.log1p(-q))) + 0.25 * weights @ weights
        slope = (q - y) / (q * (1.0 - q)) * (1.0 - 2.0 * flip) * p * (1.0 - p)
        return float(value), (x.T @ slope).astype(np.float64) + 0.5 * weights

    return minimize(loss, np.zeros(x.shape[1]), jac=True, method="L-BFGS-B").x


def dp_sgd(
    x: np.ndarray, y: np.ndarray, offset: Any, budget: tuple[float, float], rate: float, rng: Any
) -> np.ndarray:
    """Returns weights by DP-SGD on rows of length one, whose gradients need no clip.

    A replaced row has another gradient of length one at most, so the statement is that of DP-SGD
    for a replaced label.
    """
    share, steps = 0.1, 200
    noise = calibrate_noise_multiplier(*budget, share, steps)
    weights, mean = np.zeros(x.shape[1]), np.zeros(x.shape[1])
    for step in range(steps):
        rows = np.flatnonzero(rng.random(len(y)) < share)
        slope = expit(offset[rows] + x[rows] @ weights) - y[rows]
        total = x[rows].T @ slope + rng.normal(0.0, noise, weights.size)
        weights = weights - rate * total / (share * len(y))
        mean += weights / (steps // 2) * (step >= steps // 2)
    return mean


def moments(
    u: np.ndarray, s: np.ndarray, y: np.ndarray, sigma: float, penalty: float, rng: Any
) -> np.ndarray:
    """Returns ridge weights of (u, s) from one release of all products with s or the label.

    Rows of u and s have length one at most, s has no negative entry, and labels are -1/2 and 1/2.
    Replacing s by t, with c = s.t in [0, 1], and the label changes the products u (s, 2 y) by
    2 - 2 c + 4, half of s s^T by (1 - c^2) / 2, and s y by (1 + c) / 2, in squares. The sum is
    largest at c = 0: 7. `sigma` is the noise for a sensitivity of one.
    """
    sigma, (width, private) = sigma * np.sqrt(7.0), (u.shape[1], s.shape[1])
    codes = y - 0.5
    cross = u.T @ s + rng.normal(0.0, sigma, (width, private))
    of_labels = u.T @ codes + rng.normal(0.0, sigma / 2.0, width)
    upper = np.triu(rng.normal(0.0, sigma / 0.5, (private, private)) / np.sqrt(2.0), 1)
    diagonal = np.diag(rng.normal(0.0, sigma / 0.5, private))
    inner = s.T @ s + upper + upper.T + diagonal
    labels = np.concatenate([of_labels, s.T @ codes + rng.normal(0.0, sigma, private)])
    gram = np.block([[u.T @ u, cross], [cross.T, inner]])
    values, vectors = np.linalg.eigh(gram)
    # About the largest eigenvalue of the noise.
    floor = penalty * sigma * (np.sqrt(width) + np.sqrt(private))
    return vectors @ ((vectors.T @ labels) / (np.maximum(values, 0.0) + floor))


def score(private: str, method: str, epsilon: float, seed: int, setting: float | None) -> float:
    """Returns the test AUC in percent."""
    u, s, y, u_test, s_test, y_test, table, table_test = data(private)
    rng = np.random.default_rng(seed)
    setting = SETTINGS.get(method) if setting is None else setting
    columns = len(table.columns)
    share = np.sqrt(columns / (columns + 3.0))
    both = np.hstack([u * share, s * np.sqrt(1.0 - share**2)])
    both_test = np.hstack([u_test * share, s_test * np.sqrt(1.0 - share**2)])

    def head(x: np.ndarray, x_test: np.ndarray, budget: float, delta: float) -> list[np.ndarray]:
        model = ldp.PrivateLogisticRegression(
            budget, delta, num_classes=2, spread="half", insecure_seed=seed
        ).fit(x, y)
        return [logit(model.predict_proba(rows)[:, 1].clip(1e-6, 1 - 1e-6)) for rows in (x, x_test)]

    def boosting(budget: float) -> list[np.ndarray]:
        model = ldp.PrivateBoosting(budget, num_classes=2, insecure_seed=seed).fit(table, y)
        tables = (table, table_test)
        return [logit(model.predict_proba(t)[:, 1].clip(1e-6, 1 - 1e-6)) for t in tables]

    if method in WITHOUT_EPSILON:
        x, x_test = (both, both_test) if method == "no privacy" else (u, u_test)
        found = x_test @ logistic(x, y)
    elif method == "all public":
        found = head(both, both_test, epsilon, DELTA)[1]
    elif method == "drop":
        found = head(u, u_test, epsilon, DELTA)[1]
    elif method == "drop, boosting":
        found = boosting(epsilon)[1]
    elif method == "moments":
        weights = moments(u, s, y, gaussian_sigma(epsilon, DELTA, 1.0), setting, rng)
        found = np.hstack([u_test, s_test]) @ weights
    elif method == "dp-sgd":
        found = both_test @ dp_sgd(both, y, np.zeros(len(y)), (epsilon, DELTA), setting, rng)
    elif method in ("hybrid", "head, dp-sgd"):
        # Half of epsilon each.
        if method == "hybrid":
            noisy = np.where(rng.random(len(y)) < expit(-epsilon / 2), 1 - y, y)
            weights = logistic(u, noisy, epsilon / 2)
            offset, offset_test = u @ weights, u_test @ weights
            budget = epsilon / 2, DELTA
        else:
            offset, offset_test = head(u, u_test, epsilon / 2, DELTA / 2)
            budget = epsilon / 2, DELTA / 2
        weights = dp_sgd(both, y, offset, budget, setting, rng)
        found = offset_test + both_test @ weights
    else:
        # Two Gaussian releases share the squared precision equally; with boosting, epsilon.
        sigma = gaussian_sigma(epsilon, DELTA, 1.0) * np.sqrt(2.0)
        if method == "head, moments":
            offsets = head(u, u_test, gaussian_epsilon(sigma, DELTA, 1.0), DELTA)
        else:
            offsets = boosting(epsilon / 2)
            sigma = gaussian_sigma(epsilon / 2, DELTA, 1.0)
        first, first_test = (np.clip(offset / 4.0, -1.0, 1.0)[:, None] for offset in offsets)
        weights = moments(first, s, y, sigma, setting, rng)
        found = np.hstack([first_test, s_test]) @ weights
    return 100.0 * float(roc_auc_score(y_test, found))


# Rates of DP-SGD, and multiples of the penalty: the best of `tune` on the first columns. After
# boosting the release has the penalty of that after the head.
SETTINGS: dict[str, float] = {
    "dp-sgd": 16.0,
    "hybrid": 16.0,
    "head, dp-sgd": 16.0,
    "moments": 1.0,
    "head, moments": 1.0,
    "boosting, moments": 1.0,
}


def tune() -> None:
    """Prints the AUC on seed 0 by setting, at epsilons 1 and 4."""
    private = next(iter(PRIVATE))
    for method in set(SETTINGS) - {"boosting, moments"}:
        is_rate = method in ("dp-sgd", "hybrid", "head, dp-sgd")
        grid = (1.0, 4.0, 16.0, 64.0) if is_rate else (0.1, 0.3, 1.0, 3.0)
        for setting in grid:
            found = [score(private, method, epsilon, 0, setting) for epsilon in (1.0, 4.0)]
            print(method, setting, np.round(found, 2), flush=True)


def run_all(seeds: int) -> None:
    """Adds the missing runs."""
    jobs = [
        {"private": private, "method": method, "epsilon": epsilon, "seed": seed}
        for seed in range(11, 11 + seeds)
        for private in PRIVATE
        for method in METHODS
        for epsilon in (EPSILONS if method not in WITHOUT_EPSILON else [0.0])
    ]
    for job in _results.missing(RUNS, jobs):
        found = score(job["private"], job["method"], job["epsilon"], job["seed"], None)
        _results.add_run(RUNS, {**job, "auc": round(found, 3)})


def tables() -> None:
    """Prints a table for each choice of private columns."""
    runs = _results.runs(RUNS)
    with _results.recorded(__file__, *(name.replace(", ", "_") for name in PRIVATE)):
        for private in PRIVATE:
            rows = []
            for method, title in METHODS.items():
                cells = []
                for epsilon in EPSILONS:
                    wanted = {"private": private, "method": method}
                    wanted |= {} if method in WITHOUT_EPSILON else {"epsilon": epsilon}
                    found = [run["auc"] for run in runs if wanted.items() <= run.items()]
                    cells.append(_results.cell(found))
                rows.append([title, *cells])
            print(_results.markdown(["method", *(f"ε {e:g}" for e in EPSILONS)], rows), "\n")


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=("run", "tune", "tables"))
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.task == "run":
        run_all(arguments.seeds)
    else:
        {"tune": tune, "tables": tables}[arguments.task]()


if __name__ == "__main__":
    main()
