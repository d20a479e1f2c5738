"""Coverage and size of conformal sets, from private held-out labels and from noisy ones.

    python benchmarks/bench_conformal.py

A linear model of each data set is fitted without privacy on 10,000 examples. From 10,000 others,
held-out examples are drawn 200 times, and the rest measures the sets: the share of labels in them,
and the mean number of classes, or the mean width in percent of the labels' range. "Exact" is
split-conformal prediction on true labels; "search" takes ten noisy counts of epsilon / 10 in a
binary search for the same rank, without a correction. Labels of these data sets are public; draws
are seeded.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import _results
import numpy as np
from bench_evaluation import HALF, data
from sklearn.linear_model import LogisticRegression, Ridge

import tf_labeldp as ldp
from tf_labeldp.mechanisms import QuantileMechanism
from tf_labeldp.vault import Classes

REPEATS, ALPHAS = 200, (0.1, 0.05)
SIZES = (500, 2000)
METHODS: tuple[tuple[str, float | None], ...] = (
    ("exact", None),
    ("search", 1.0),
    ("vault", 0.1),
    ("vault", 0.5),
    ("vault", 1.0),
    ("vault", 4.0),
    ("noisy labels", 2.0),
    ("noisy labels", 4.0),
)


def scores_of(predictions: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns the scores of labels (n,)."""
    if predictions.ndim == 1:
        return np.abs(labels - predictions)
    scores = -Classes(predictions.shape[1]).checked_predictions("sets", predictions)
    return scores[np.arange(len(labels)), labels]


def rank_of(alpha: float, size: int) -> int:
    """Returns the rank of the exact quantile."""
    return min(math.ceil((1 - alpha) * (size + 1)), size)


def searched(
    scores: np.ndarray, thresholds: np.ndarray, alpha: float, epsilon: float, seed: int
) -> float:
    """Returns a threshold by a binary search with noisy counts."""
    rng, rank = np.random.default_rng(seed), rank_of(alpha, len(scores))
    low, high = 0, len(thresholds) - 1
    steps = math.ceil(math.log2(len(thresholds)))
    while low < high:
        middle = (low + high) // 2
        noisy = np.count_nonzero(scores <= thresholds[middle]) + rng.laplace(scale=steps / epsilon)
        low, high = (low, middle) if noisy >= rank else (middle + 1, high)
    return float(thresholds[low])


def predictor(
    method: str,
    epsilon: float | None,
    alpha: float,
    model: Callable[[np.ndarray], np.ndarray],
    rows: np.ndarray,
    labels: np.ndarray,
    kind: dict[str, float],
    seed: int,
) -> ldp.vault.ConformalPredictor:
    """Returns sets or intervals by a method, from the labels of some rows."""
    if method in ("vault", "noisy labels"):
        budget = ldp.PrivacyBudget(epsilon)
        of_kind = ldp.vault.LabelKind.of(**kind)
        private = ldp.PrivateLabels(labels[rows], of_kind, budget=budget, insecure_seed=seed)
        if method == "vault":
            return ldp.conformal(model, (rows, private), alpha, epsilon)
        noisy = private.randomize(ldp.RandomizedResponse(epsilon, int(kind["num_classes"])))
        return ldp.conformal(model, (rows, noisy), alpha)
    scores = scores_of(model(rows), labels[rows])
    found = np.sort(scores)[rank_of(alpha, len(scores)) - 1]
    if method == "search":
        thresholds = QuantileMechanism(1.0, alpha, **kind).thresholds(model(rows))
        found = searched(scores, thresholds, alpha, epsilon or 0.0, seed)
    limits = None if "num_classes" in kind else (kind["low"], kind["high"])
    threshold = -found if limits is None else found
    return ldp.vault.ConformalPredictor(model, threshold, alpha, (), limits)


def measured(
    method: str,
    epsilon: float | None,
    size: int,
    alpha: float,
    predictions: np.ndarray,
    labels: np.ndarray,
    kind: dict[str, float],
) -> list[str]:
    """Returns the coverage in percent, and the size of the sets, as cells of a table."""
    covered, sizes = [], []
    model = predictions.__getitem__
    for seed in range(REPEATS):
        order = np.random.default_rng(seed).permutation(len(labels))
        held_out, rest = order[:size], order[size:]
        try:
            sets = predictor(method, epsilon, alpha, model, held_out, labels, kind, seed)
        except ValueError:
            return ["refused", ""]
        # Coverage is that of the threshold: the most likely class may add to it.
        limit = -sets.threshold if predictions.ndim == 2 else sets.threshold
        covered.append(100.0 * (scores_of(predictions[rest], labels[rest]) <= limit).mean())
        found = sets.predict(rest)
        width = 100.0 / (kind["high"] - kind["low"]) if "low" in kind else 1.0
        sizes.append((np.ptp(found, axis=1) if found.dtype != bool else found.sum(axis=1)).mean())
        sizes[-1] *= width
    error = np.std(covered) / math.sqrt(REPEATS)
    return [f"{np.mean(covered):.2f} ± {error:.2f}", f"{np.mean(sizes):.2f}"]


def main() -> None:
    """Prints the table."""
    warnings.filterwarnings("ignore")
    lines = []
    for name, rows, labels, kind in data():
        if name == "beMTPL97":  # most of its counts are zero
            continue
        deviation = np.maximum(rows.std(axis=0), 1e-3)
        rows = (rows - rows.mean(axis=0)) / deviation
        is_classes = "num_classes" in kind
        fit = LogisticRegression(C=0.01, max_iter=200) if is_classes else Ridge(1000.0)
        fit.fit(rows[:HALF], labels[:HALF])
        found = (fit.predict_proba if is_classes else fit.predict)(rows[HALF:])
        if not is_classes:
            found = np.clip(found, kind["low"], kind["high"])
        for size in SIZES:
            for method, epsilon in METHODS:
                if method == "noisy labels" and not is_classes:
                    continue
                cells = [
                    measured(method, epsilon, size, alpha, found, labels[HALF:], kind)
                    for alpha in ALPHAS
                ]
                price = "" if epsilon is None else f"{epsilon:g}"
                lines.append([name, str(size), method, price, *cells[0], *cells[1]])
                print(lines[-1], flush=True)
    columns = ["data", "held out", "labels", "epsilon", "at 90 %", "size", "at 95 %", "size"]
    with _results.recorded(__file__, "conformal"):
        print(_results.markdown(columns, lines))


if __name__ == "__main__":
    main()
