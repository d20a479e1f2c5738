"""Losses for counts: squared or Poisson, for bins and training (``ghazi2023``, E.3 and G).

    python benchmarks/bench_count_losses.py

The number of claims of a policy (pg15training, 0 to 7), the network and settings of
``bench_regression.py``, trained by the squared error or by the Poisson loss of a log-rate. The
noisy labels come from RR-on-Bins for either loss, plain and debiased, and from RRWithPrior with
counts as classes; all with the same private prior. ``PrivateRegressor`` has no noisy labels, but
one release, at delta 1e-6. Every finished cell is a line in a file, so a stopped benchmark resumes.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import _results
import numpy as np
from _insurance import InsuranceData, load, split
from _regression_network import Trainer

import tf_labeldp as ldp
from tf_labeldp.mechanisms import HistogramMechanism
from tf_labeldp.vault import Numbers

EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
LOSSES = ("squared_error", "poisson")
SETTINGS = {"batch_size": 256, "epochs": 10}
"""Those of bench_regression.py."""
SEEDS, DOOR_SEEDS = 10, 5
"""Numbers of splits and draws."""
LEAST_RATE = 1e-3
"""A network of the squared error may predict zero or less, which has no Poisson loss."""
FILE = _results.FOLDER / "count_losses.jsonl"
WAYS = {
    "RR-on-Bins": ("squared_error", False),
    "RR-on-Bins, debiased": ("squared_error", True),
    "RR-on-Bins for the Poisson loss": ("poisson", False),
    "the same, debiased": ("poisson", True),
}
CLASSES, DOOR = "RRWithPrior", "PrivateRegressor"
TRUE, MEAN = "true labels", "their mean"


def noisy_labels(
    data: InsuranceData, rows: np.ndarray, way: str, epsilon: float, seed: int
) -> np.ndarray:
    """Returns the training targets, seeded, so that they are reproducible."""
    labels, budget = data.labels[rows], ldp.PrivacyBudget(epsilon)
    settings = {"budget": budget, "insecure_seed": seed}
    if way == CLASSES:
        number = int(data.high) + 1
        vault = ldp.PrivateLabels(labels.astype(int), number, **settings)
        randomizer = ldp.LabelRandomizer(epsilon, whole_numbers=True)
        _, for_prior = randomizer.split(len(rows), data.low, data.high)
        priors = vault.release(HistogramMechanism(for_prior, num_classes=number)).priors()
        mechanism = ldp.RRWithPrior(epsilon - for_prior, number)
        return vault.randomize(mechanism, priors=priors).values.astype(float)
    loss, debiased = WAYS[way]
    vault = ldp.PrivateLabels(labels, Numbers(data.low, data.high), **settings)
    noisy = vault.randomize(ldp.LabelRandomizer(epsilon, loss=loss, whole_numbers=True))
    return noisy.debiased() if debiased else noisy.values


def one_release(
    data: InsuranceData, rows: np.ndarray, others: np.ndarray, loss: str, epsilon: float, seed: int
) -> np.ndarray:
    """Returns predictions of the front door from a table of columns."""
    columns = {f"category {i}": codes.astype(str) for i, codes in enumerate(data.codes.T)}
    columns |= {f"number {i}": numbers for i, numbers in enumerate(data.numbers.T)}
    model = ldp.PrivateRegressor(
        epsilon, 1e-6, low=data.low, high=data.high, loss=loss, insecure_seed=seed
    )
    model.fit({name: column[rows] for name, column in columns.items()}, data.labels[rows])
    return model.predict({name: column[others] for name, column in columns.items()})


def measure(trainer: Trainer, way: str, epsilon: float | None, seed: int) -> dict[str, float]:
    """Returns the errors of one cell."""
    data = trainer.data
    rows, test_rows = split(len(data), seed)
    labels, truth = data.labels[rows], data.labels[test_rows]
    targets = labels
    if epsilon is not None and way != DOOR:
        targets = noisy_labels(data, rows, way, epsilon, seed)
    if way == MEAN:
        predicted = np.full(len(test_rows), labels.mean())
    elif way == DOOR:
        loss = "poisson" if trainer.is_poisson else "squared_error"
        predicted = one_release(data, rows, test_rows, loss, epsilon or 0.0, seed)
    else:
        trainer.fit(rows, targets, seed)
        predicted = trainer.predict(test_rows)
    rates = np.maximum(predicted, LEAST_RATE)
    return {
        "mechanism": float(np.mean(np.square(targets - labels))),
        "squared": float(np.mean(np.square(predicted - truth))),
        "poisson": float(np.mean(rates - truth * np.log(rates))),
        "total": float(predicted.sum() / truth.sum() - 1.0),
    }


def report() -> None:
    """Prints the tables: errors of training, and of mechanisms (Table 2 of the paper)."""
    found: dict[tuple[Any, ...], dict[int, dict[str, float]]] = {}
    for run in _results.runs(FILE):
        found.setdefault((run["way"], run["loss"], run["epsilon"]), {})[run["seed"]] = run
    best = found[TRUE, "poisson", None]

    def cell(key: tuple[Any, ...], figure: str) -> str:
        values = np.array([run[figure] for run in found.get(key, {}).values()])
        if not values.size:
            return ""
        # Relative to true labels in the same split.
        if figure == "poisson":
            least = np.array([best[seed]["poisson"] for seed in found[key]])
            values = values / least - 1.0
        if figure in ("poisson", "total"):
            return f"{100 * values.mean():+.1f} ± {100 * values.std(ddof=1):.1f}"
        return f"{values.mean():.4f} ± {values.std(ddof=1):.4f}"

    rows = []
    lines = [(way, epsilon) for epsilon in EPSILONS for way in (*WAYS, CLASSES, DOOR)]
    figures = {"poisson": "Poisson loss, %", "squared": "squared error", "total": "total, %"}
    for way, epsilon in [*lines, (TRUE, None), (MEAN, None)]:
        cells = [cell((way, loss, epsilon), figure) for loss in LOSSES for figure in figures]
        rows.append(["none" if epsilon is None else f"{epsilon:g}", way, *cells])
    columns = [f"{name}, by {loss}" for loss in ("squares", "Poisson") for name in figures.values()]
    print(_results.markdown(["epsilon", "labels", *columns], rows))
    print()
    ways, rows = (CLASSES, "RR-on-Bins"), []
    for epsilon in EPSILONS:
        keys = [(way, LOSSES[0], epsilon) for way in ways]
        cells = [cell(key, figure) for figure in ("mechanism", "squared") for key in keys]
        rows.append([f"{epsilon:g}", *cells])
    columns = [f"{way}, {what}" for what in ("labels", "test") for way in ways]
    print(_results.markdown(["epsilon", *columns], rows))


def main() -> None:
    """Measures what is missing, and prints."""
    data = load("pg15training")
    num_train = len(split(len(data), 0)[0])
    for loss in LOSSES:
        trainer = Trainer(data, num_train, loss=loss, **SETTINGS)
        cells = [(TRUE, None), *((way, e) for e in EPSILONS for way in (*WAYS, CLASSES, DOOR))]
        jobs = [
            {"way": way, "loss": loss, "epsilon": epsilon, "seed": seed}
            for way, epsilon in [*cells, *([(MEAN, None)] if loss == LOSSES[0] else [])]
            for seed in range(DOOR_SEEDS if way == DOOR else SEEDS)
        ]
        for job in _results.missing(FILE, jobs):
            figures = measure(trainer, job["way"], job["epsilon"], job["seed"])
            _results.add_run(FILE, {**job, **figures})
    with _results.recorded(__file__, "training", "classes"):
        report()


if __name__ == "__main__":
    main()
