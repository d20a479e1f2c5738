"""Tables, a plot and the line-by-line check of ``bench_regression.py``."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib
import numpy as np
from _insurance import InsuranceData, split
from _regression_methods import Method, methods

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib import colors

OURS = "RR-on-Bins"
NON_PRIVATE, CONSTANT = "non-private", "constant predictor"
MEASURES = {
    "mechanism_error": "mechanism error: MSE between true and noisy training labels",
    "test_error": "test error: MSE on true test labels",
}
Results = Sequence[dict[str, Any]]


def report(results: Results, data: InsuranceData, epsilons: Sequence[float]) -> str:
    """Returns all tables and checks of one data set, as Markdown."""
    found = [result for result in results if result["data"] == data.name]
    kinds = methods(data.counts)
    parts = [f"## {data.name}: {data.unit}, {len(data)} rows, labels in [0, {data.high:.2f}]"]
    for measure, words in MEASURES.items():
        parts.append(
            f"### {words}, {_unit_words(data)}\n\n{_table(found, data, epsilons, measure)}"
        )
    parts.append(f"### bins and budget\n\n{_bins_table(found, epsilons)}")
    for measure in MEASURES:
        parts.append(_check(found, data, epsilons, measure, kinds))
    return "\n\n".join(parts)


def _unit(data: InsuranceData) -> float:
    """Returns the divisor that makes squared errors readable."""
    return 1.0 if data.counts else 1e6


def _unit_words(data: InsuranceData) -> str:
    return "in counts squared" if data.counts else "in 10^6 of the squared currency"


def _values(results: Results, method: str, epsilon: float | None, measure: str) -> dict[int, float]:
    """Returns the measure by seed."""
    return {
        result["seed"]: result[measure]
        for result in results
        if (result["method"], result["epsilon"]) == (method, epsilon)
    }


def _mean_and_error(values: Iterable[float]) -> tuple[float, float]:
    """Returns the mean and its standard error, NaN for a single value."""
    values = np.array(list(values))
    error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
    return float(values.mean()), float(error)


def _cell(values: Iterable[float], unit: float) -> str:
    values = [value / unit for value in values]
    if not values:
        return ""
    mean, error = _mean_and_error(values)
    digits = max(1, 5 - len(str(int(mean))))
    return f"{mean:.{digits}f}" + _plus_minus(error, digits)


def _plus_minus(error: float, digits: int) -> str:
    # A single seed has no error.
    return "" if np.isnan(error) else f" ± {error:.{digits}f}"


def _table(results: Results, data: InsuranceData, epsilons: Sequence[float], measure: str) -> str:
    """Returns mean ± standard error over the seeds: a row per epsilon, a column per method."""
    names = [name for name in methods(data.counts) if any(r["method"] == name for r in results)]
    rows = ["| epsilon | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for epsilon in epsilons:
        cells = [
            _cell(_values(results, name, epsilon, measure).values(), _unit(data)) for name in names
        ]
        rows.append(f"| {epsilon:g} | {' | '.join(cells)} |")
    rows.append("")
    for name in (NON_PRIVATE, CONSTANT):
        values = _values(results, name, None, measure).values()
        # Non-private labels have no mechanism error.
        if any(values):
            rows.append(f"- {name}, from the true training labels: {_cell(values, _unit(data))}")
    return "\n".join(rows)


def _bins_table(results: Results, epsilons: Sequence[float]) -> str:
    """Returns the bins of RR-on-Bins with the first seed, and d with every seed."""
    rows = [
        "| epsilon | of it for the prior | k | d, by seed | bins, first seed |",
        "|---" * 5 + "|",
    ]
    for epsilon in epsilons:
        found = [r for r in results if (r["method"], r["epsilon"]) == (OURS, epsilon)]
        if found:
            found.sort(key=lambda result: result["seed"])
            first = found[0]["details"]
            bins = ", ".join(f"{value:.4g}" for value in first["bins"])
            counts = ", ".join(str(result["details"]["d"]) for result in found)
            rows.append(
                f"| {epsilon:g} | {first['prior_epsilon']:.4f} | {first['k']} | {counts} | {bins} |"
            )
    return "\n".join(rows)


def _check(
    results: Results,
    data: InsuranceData,
    epsilons: Sequence[float],
    measure: str,
    kinds: dict[str, Method],
) -> str:
    """Returns, line by line, whether RR-on-Bins is at least as good as the paper's baselines."""
    head = f"### {measure.replace('_', ' ')}: baseline minus {OURS}, {_unit_words(data)}"
    rows = [
        head,
        "",
        "| epsilon | baseline | difference ± standard error | verdict |",
        "|---" * 4 + "|",
    ]
    short = total = 0
    for epsilon in epsilons:
        ours = _values(results, OURS, epsilon, measure)
        for name in (name for name, kind in kinds.items() if kind.role == "baseline"):
            theirs = _values(results, name, epsilon, measure)
            seeds = sorted(ours.keys() & theirs.keys())
            if not seeds:
                continue
            # The same seed has the same split and first weights, so seeds are paired.
            mean, error = _mean_and_error((theirs[s] - ours[s]) / _unit(data) for s in seeds)
            holds = mean >= 0 or mean >= -3 * error
            verdict = "holds" if holds else "FALLS SHORT"
            if abs(mean) < 3 * error:
                verdict += " (a tie within 3 standard errors)"
            total, short = total + 1, short + (not holds)
            rows.append(
                f"| {epsilon:g} | {name} | {mean:+.4f}{_plus_minus(error, 4)} | {verdict} |"
            )
    rows += ["", f"{total - short} of {total} lines hold (3 standard errors), {short} fall short."]
    return "\n".join(rows)


def plot_joint_density(data: InsuranceData, epsilon: float, seed: int, path: pathlib.Path) -> None:
    """Draws Figure 2 of the paper: the joint density of true and noisy training labels."""
    from scipy.ndimage import gaussian_filter

    rows, _ = split(len(data), seed)
    labels = data.labels[rows]
    edges = np.linspace(data.low, data.high, 81)
    centres = (edges[1:] + edges[:-1]) / 2
    levels = np.logspace(-3, 0, 13)
    figure, axes = plt.subplots(1, 2, figsize=(11, 5), sharey=True, layout="constrained")
    for axis, name in zip(axes, (OURS, "Laplace"), strict=True):
        noisy = methods(data.counts)[name].draw(data, rows, epsilon, seed)
        counts, _, _ = np.histogram2d(labels, noisy.labels, bins=(edges, edges))
        density = gaussian_filter(counts, 2, mode="nearest")
        # The plot has no logarithm of 0.
        density = np.maximum(density / density.max(), levels[0])
        drawn = axis.contourf(
            centres, centres, density.T, levels=levels, cmap="viridis",
            norm=colors.LogNorm(levels[0], 1.0),
        )  # fmt: skip
        for value in noisy.details.get("bins", ()):
            axis.axhline(value, color="white", linestyle="--", linewidth=1)
            axis.annotate(f"{value:.0f}", (data.high, value), xytext=(3, 0), va="center",
                          textcoords="offset points", fontsize=8)  # fmt: skip
        axis.plot([data.low, data.high], [data.low, data.high], color="white", linewidth=0.6)
        error = np.mean(np.square(noisy.labels - labels))
        axis.set(title=f"{name}, MSE = {error:,.0f}", xlabel="true label")
        axis.set(xlim=(data.low, data.high), ylim=(data.low, data.high))
    axes[0].set_ylabel("noisy label")
    figure.colorbar(drawn, ax=axes, label="density, relative to the highest", format="%.3g")
    figure.suptitle(f"{data.name}, {data.unit}, epsilon = {epsilon:g}; dashed: the bins")
    figure.savefig(path, dpi=90)
    plt.close(figure)
