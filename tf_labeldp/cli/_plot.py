"""The demo's picture: accuracy against epsilon, and what one mechanism does to a label."""

from __future__ import annotations

from typing import Any

import numpy as np

from tf_labeldp.cli._report import PLOT_FILE, Report
from tf_labeldp.cli._result import Job
from tf_labeldp.estimation import prior_from_logits
from tf_labeldp.mechanisms import RRWithPrior

_MOST_NAMED_CLASSES = 12
"""With more classes, neither ticks nor cells are labelled: they would not be readable."""
_MOST_LETTERS_IN_A_ROW = 40


def draw(report: Report) -> list[str]:
    """Writes the picture and returns what to tell the user about it."""
    try:
        from matplotlib.figure import Figure  # draws with Agg, needs no display
    except ImportError:
        return ["No plot: it needs matplotlib, pip install 'tf-labeldp[plots]'."]
    figure = Figure(figsize=(12.5, 5.2), layout="constrained", dpi=120)
    left, right = figure.subplots(1, 2, width_ratios=(1.1, 1.0))
    _draw_accuracy(left, report)
    _draw_channel(figure, right, report)
    path = report.folder / PLOT_FILE
    figure.savefig(path)
    return [f"Plot: {path}"]


def _draw_accuracy(axes: Any, report: Report) -> None:
    epsilons = report.epsilons
    axes.axhline(
        100 * report.non_private, color="black", linestyle="--", label="non-private (NOT PRIVATE)"
    )
    for method, text, marker, color in (
        ("LP-2ST", "LP-2ST: two stages, RRWithPrior", "o", "tab:blue"),
        ("LP-1ST", "LP-1ST: randomized response", "s", "tab:orange"),
    ):
        values = [100 * accuracy for accuracy in report.accuracies(method)]
        axes.plot(epsilons, values, marker=marker, color=color, label=text)
    axes.axhline(
        100 * report.baseline, color="gray", linestyle=":", label="most frequent class (chance)"
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    axes.set_xlabel("epsilon of label-DP (smaller is more private)")
    axes.set_ylabel("test accuracy (%)")
    axes.margins(y=0.1)
    axes.set_title(f"{report.data.name}: what label privacy costs (one run each)")
    axes.grid(alpha=0.3)
    axes.legend(loc="best")


def _draw_channel(figure: Any, axes: Any, report: Report) -> None:
    """Draws the channel of RRWithPrior under the prior that a trained model has for one example."""
    names = report.data.class_names
    epsilon = report.epsilons[(len(report.epsilons) - 1) // 2]
    mechanism = RRWithPrior(epsilon, len(names))
    job = Job("LP-2ST", epsilon)
    logits = next(result.test_logits for result in report.results if result.job == job)
    priors = prior_from_logits(logits[:1000])
    sizes = mechanism.optimal_k(priors)
    # An example on which the model hesitates between a few classes shows the mechanism best.
    example = int(np.argmin(np.abs(sizes - min(3, len(names)))))
    k = int(sizes[example])
    matrix = mechanism.transition_matrix(priors[example])
    image = axes.imshow(matrix, vmin=0.0, vmax=1.0, cmap="Blues")
    figure.colorbar(image, ax=axes, label="probability of the noisy label", shrink=0.85)
    few = len(names) <= _MOST_NAMED_CLASSES
    ticks = range(len(names)) if few else []
    shown = list(names) if few else []
    crowded = len("".join(names)) > _MOST_LETTERS_IN_A_ROW
    axes.set_xticks(ticks, shown, rotation=40 if crowded else 0)
    axes.set_yticks(ticks, shown)
    if few:
        for (row, column), value in np.ndenumerate(matrix):
            if value > 0.0:
                color = "white" if value > 0.5 else "black"
                axes.text(
                    column, row, f"{value:.2f}", ha="center", va="center", color=color, fontsize=8
                )
    axes.set_xlabel("noisy label, which training sees")
    axes.set_ylabel("true label, which stays private")
    classes = "class" if k == 1 else "classes"
    axes.set_title(
        f"RRWithPrior at epsilon {epsilon:g}, under the model's prior\nfor one example: "
        f"it answers among the {k} likeliest {classes}"
    )
