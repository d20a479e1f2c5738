"""Figures and table of ``bench_one_release.py``, next to the papers' figures."""

from __future__ import annotations

import numpy as np

EPSILONS = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
# ghazi2024, Tables 5(a) and 14: DP-SGD and LabelDP-Pro are accounted for adding or removing an
# example, about half the epsilon of replacing a label. ghazi2021, Table 4, is accounted for
# replacement, with a larger network.
PAPERS = {
    "mnist": {
        "DP-SGD (ghazi2024, add/remove)": {
            0.01: 65.3, 0.1: 85.6, 0.2: 87.9, 0.5: 90.9, 1.0: 92.8, 2.0: 93.8
        },
        "LabelDP-Pro (ghazi2024, add/remove)": {
            0.01: 68.2, 0.1: 91.1, 0.2: 92.9, 0.5: 94.1, 1.0: 94.3, 2.0: 95.4
        },
        "ALIBI (ghazi2024)": {0.01: 10.3, 0.1: 9.7, 0.2: 9.7, 0.5: 82.5, 1.0: 94.1, 2.0: 96.6},
        "LP-2ST (ghazi2021)": {1.0: 95.82, 2.0: 98.78},
    },
    "fashion_mnist": {
        "DP-SGD (ghazi2024, add/remove)": {
            0.01: 59.1, 0.1: 73.4, 0.2: 75.6, 0.5: 79.7, 1.0: 81.5, 2.0: 82.3
        },
        "LabelDP-Pro (ghazi2024, add/remove)": {
            0.01: 63.0, 0.1: 75.7, 0.2: 77.9, 0.5: 79.8, 1.0: 81.7, 2.0: 82.4
        },
        "ALIBI (ghazi2024)": {0.01: 9.9, 0.1: 10.7, 0.2: 10.7, 0.5: 69.2, 1.0: 76.5, 2.0: 82.3},
        "LP-2ST (ghazi2021)": {1.0: 83.26, 2.0: 91.24},
    },
}  # fmt: skip
# The numpy prototype of ridge on patch features, 5 seeds.
PROTOTYPE = {
    "mnist": (83.3, 93.0, 94.4, 95.3, 96.2, 96.8, 97.3),
    "fashion_mnist": (67.0, 77.3, 80.3, 82.5, 85.0, 86.4, 87.4),
}
METHODS = (
    "smooth logistic",
    "smooth ridge",
    "logistic",
    "ridge",
    "teacher",
    "head + draw",
    "RR",
    "LP-2ST",
)


def scores(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Returns accuracy and mean confidence in percent, log-loss, and the AUC of two classes."""
    from scipy import special

    logs = special.log_softmax(np.asarray(logits, np.float64), axis=1)
    found = {
        "accuracy": 100.0 * float(np.mean(logs.argmax(axis=1) == labels)),
        "confidence": 100.0 * float(np.exp(logs.max(axis=1)).mean()),
        "log_loss": -float(logs[np.arange(len(labels)), labels].mean()),
    }
    if logs.shape[1] == 2:
        from sklearn.metrics import roc_auc_score

        found["auc"] = 100.0 * float(roc_auc_score(labels, logs[:, 1] - logs[:, 0]))
    return found


def table(results: list[dict], names: list[str]) -> str:
    """Returns Markdown: mean, standard deviation over seeds, and their number unless it is 5."""
    head = " | ".join(f"ε {epsilon:g}" for epsilon in EPSILONS)
    rows = [f"| data | method | {head} |", "|---" * (2 + len(EPSILONS)) + "|"]
    for name in names:
        for measure in ("accuracy", "auc"):
            for method in METHODS:
                cells = [_cell(results, name, method, epsilon, measure) for epsilon in EPSILONS]
                if any(cells):
                    label = method if measure == "accuracy" else f"{method}, AUC"
                    rows.append(f"| {name} | {label} | {' | '.join(cells)} |")
        for method, figures in {
            "prototype": dict(zip(EPSILONS, PROTOTYPE.get(name, ()), strict=False)),
            **PAPERS.get(name, {}),
        }.items():
            cells = [f"{figures[e]:g}" if e in figures else "" for e in EPSILONS]
            if any(cells):
                rows.append(f"| {name} | *{method}* | {' | '.join(cells)} |")
    return "\n".join(rows)


def _values(results: list[dict], *wanted: object) -> list[float]:
    name, method, epsilon, measure = wanted
    return [
        result[str(measure)]
        for result in results
        if (result["data"], result["method"], result["epsilon"]) == (name, method, epsilon)
        and measure in result
    ]


def _cell(results: list[dict], *wanted: object) -> str:
    found = _values(results, *wanted)
    if not found:
        return ""
    if len(found) == 1:
        return f"{found[0]:.1f} (1)"
    count = "" if len(found) == 5 else f" ({len(found)})"
    return f"{np.mean(found):.1f} ± {np.std(found):.1f}{count}"
