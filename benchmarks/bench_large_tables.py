"""Boosting on large tables: time and peak memory of a fit, in a process of its own.

    python benchmarks/bench_large_tables.py call        # the one call, 1M rows x 40 columns
    python benchmarks/bench_large_tables.py mixed 100000 300000 1000000     # growth
    python benchmarks/bench_large_tables.py randomized      # 20M labels by tf-labeldp randomize

`call` is the one call at epsilon 0.2, and its statement. `mixed` is the one call at epsilon 1 on
data frames of 100 columns, a third of them texts of 3 to 300 categories, some entries missing; the
peak is that of all sizes so far. `randomized` writes a table of 20 million
labels, draws noisy labels with the command line at epsilon 1, loads them, and fits
`PrivateBoosting(max_trees=100)` on 8 columns. AUC is that of 100,000 fresh rows; "best" is the AUC
of the true probabilities. The tables are synthetic.
"""

from __future__ import annotations

import pathlib
import resource
import sys
import tempfile
import time

import _results
import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import parquet
from sklearn.metrics import roc_auc_score

import tf_labeldp as ldp
from tf_labeldp.cli import main as command

COLUMNS = ["task", "rows", "columns", "epsilon", "step", "minutes", "peak GB", "AUC, best"]


def table(rows: int, columns: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns features, labels and the true probabilities of the second class."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, columns)).astype(np.float32)
    scores = x[:, 0] + x[:, 1] * x[:, 2] - np.abs(x[:, 3]) + 0.5 * (x[:, 4] > 0.5) * x[:, 5]
    p = 1.0 / (1.0 + np.exp(-scores))
    return x, (rng.random(rows) < p).astype(np.int64), p


def peak() -> float:
    """Returns the largest memory of this process so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def aucs(model: ldp.PrivateBoosting, columns: int, names: list[str] | None = None) -> str:
    """Returns the AUC on fresh rows, and that of the true probabilities."""
    x, y, p = table(100_000, columns, 1)
    inputs = x if names is None else dict(zip(names, x.T, strict=True))
    found = model.predict_proba(inputs)[:, 1]
    return f"{100 * roc_auc_score(y, found):.2f}, {100 * roc_auc_score(y, p):.2f}"


def call(rows: int = 1_000_000, columns: int = 40) -> list[list[str]]:
    """Returns the row of the one call."""
    x, y, _ = table(rows, columns, 0)
    names = [f"column {place}" for place in range(columns)]
    started = time.perf_counter()
    model = ldp.PrivateClassifier(0.2, num_classes=2).fit(dict(zip(names, x.T, strict=True)), y)
    stated = model.guarantee().epsilon
    minutes = (time.perf_counter() - started) / 60.0
    step = f"fit ({model.choice_.method}) and statement ({stated:g})"
    cells = [f"{rows:,}", f"{columns}", "0.2", step, f"{minutes:.1f}", f"{peak():.1f}"]
    return [["one call", *cells, aucs(model, columns, names)]]


def mixed_table(rows: int, columns: int = 100) -> tuple[pd.DataFrame, np.ndarray]:
    """Returns a table of numbers and texts, some of them missing, and labels."""
    rng = np.random.default_rng(0)
    scores, found = np.zeros(rows), {}
    for place in range(columns):
        values: np.ndarray = rng.normal(size=rows).astype(np.float32)
        signal = 0.3 * values
        if place % 3 == 2:
            number = (3, 10, 50, 300)[place // 3 % 4]
            codes = rng.integers(0, number, rows)
            signal = 0.5 * np.sin(codes)
            codes[rng.random(rows) < 0.05] = number
            values = np.array([f"word {code}" for code in range(number)] + [None], object)[codes]
        elif place % 5 == 0:
            values[rng.random(rows) < 0.1] = np.nan
        scores += signal if place < 12 else 0.0
        found[f"column {place}"] = values
    return pd.DataFrame(found), (rng.random(rows) < 1.0 / (1.0 + np.exp(-scores))).astype(int)


def mixed(*sizes: str) -> list[list[str]]:
    """Returns a row per number of rows, for the one call on numbers and texts."""
    lines = []
    for size in map(int, sizes):
        x, y = mixed_table(size)
        started, processor = time.perf_counter(), time.process_time()
        model = ldp.PrivateClassifier(1.0, num_classes=2).fit(x, y)
        minutes = (time.perf_counter() - started) / 60.0
        processor = time.process_time() - processor
        step = f"fit ({model.choice_.method}), {processor:.0f} processor s"
        cells = [f"{size:,}", "100", "1", step, f"{minutes:.1f}", f"{peak():.1f}", ""]
        lines.append(["mixed columns", *cells])
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def randomized(rows: int = 20_000_000, columns: int = 8) -> list[list[str]]:
    """Returns the rows of the draw by the command line and of the fit."""
    x, y, _ = table(rows, columns, 0)
    shape = [f"{rows:,}", f"{columns}", "1"]
    with tempfile.TemporaryDirectory() as folder:
        path, noisy = pathlib.Path(folder) / "labels.parquet", pathlib.Path(folder) / "n.parquet"
        parquet.write_table(pa.table({"id": np.arange(rows), "y": y}), path)
        del y
        words = ["randomize", path, "--column", "y", "--task", "classification", "--id", "id"]
        words += ["--num-classes", "2", "--epsilon", "1", "--output", noisy]
        started = time.perf_counter()
        if command([str(word) for word in words]):
            raise SystemExit("the draw failed")
        drawn = time.perf_counter()
        lines = [[*shape, "draw", f"{(drawn - started) / 60.0:.1f}", f"{peak():.1f}", ""]]
        model = ldp.PrivateBoosting(max_trees=100).fit(x, ldp.NoisyLabels.load(noisy))
        minutes = (time.perf_counter() - drawn) / 60.0
        lines.append([*shape, "load and fit", f"{minutes:.1f}", f"{peak():.1f}"])
        lines[1].append(aucs(model, columns))
    return [["randomized", *line] for line in lines]


if __name__ == "__main__":
    TASK = sys.argv[1]
    TASKS = {"call": call, "mixed": mixed, "randomized": randomized}
    with _results.recorded(__file__, TASK):
        print(_results.markdown(COLUMNS, TASKS[TASK](*sys.argv[2:])))
