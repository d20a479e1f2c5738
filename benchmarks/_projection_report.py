"""Tables and plot of ``bench_projection.py``."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

from _projection_solvers import NOISE_SHARE

MAX_PRODUCTS = 30
"""The default; ``StopAtNoise`` uses one of them to measure the noise."""
PROBES = {"clipped": 4, "plain": 0}
DEFAULT = {"solver": "conjugate", "hull": "per_example", "start": "predictions"}
COLOURS = {
    "conjugate": "tab:red",
    "accelerated": "tab:blue",
    "frank_wolfe": "tab:green",
    "pgd": "tab:gray",
}


def select(results: list[dict], **wanted: object) -> list[dict]:
    """Returns the results with these values."""
    return [result for result in results if wanted.items() <= result.items()]


def stopped(result: dict, *, at_noise: bool = False) -> dict:
    """Returns the point at which the default or ``StopAtNoise`` stops."""
    curve = [point for point in result["curve"] if point["products"] <= MAX_PRODUCTS - at_noise]
    enough = NOISE_SHARE * result["noise_gap"] if at_noise else 0.0
    for point in curve:
        if point["gap"] <= enough or point["relative_gap"] <= 1e-2:
            return point
    return curve[-1]


def first_as_good(result: dict, error: float) -> int | None:
    """Returns the fewest products with at most this direction error, if any reach it."""
    for point in result["curve"]:
        if point["direction_error"] <= error:
            return point["products"] + PROBES[result["columns"]]
    return None


def print_tables(results: list[dict]) -> None:
    """Prints the comparison with the paper's solver, and where each solver ends."""
    print("Products of the default until its direction error is that of 200 steps of pgd")
    print("(402 products; the paper's set and start; its best step size, and a stable one):\n")
    head = (
        "| state | n2 | columns | noise | noisy | pgd, paper's | default | pgd, stable | default |"
    )
    print(head + " default stops at | with `StopAtNoise` |")
    print("|" + "---|" * 11)
    for default in select(results, **DEFAULT):
        same = {
            name: default[name] for name in ("state", "num_examples", "noise_multiplier", "columns")
        }
        rivals = select(results, solver="pgd", hull="joint", **same) or select(
            results, solver="pgd", **same
        )
        cells = []
        for stable in (False, True):
            errors = [
                r["curve"][-1]["direction_error"] for r in rivals if r["largest_step"] == stable
            ]
            cells += (
                [f"{min(errors):.2f}", f"{first_as_good(default, min(errors))}"]
                if errors
                else ["", ""]
            )
        for at_noise in (False, True):
            end = stopped(default, at_noise=at_noise)
            products = end["products"] + PROBES[default["columns"]] + at_noise
            cells.append(f"{products}: {end['direction_error']:.2f}")
        print(
            f"| {same['state']} | {same['num_examples']} | {same['columns']} | "
            f"{same['noise_multiplier']:g} | {default['noisy_direction_error']:.2f} | "
            + " | ".join(cells)
            + " |"
        )
    print("\nDirection error / relative error after 10, 20 and 40 products, and at the stop:\n")
    print("| state | n2 | columns | noise | hull | start | solver | 10 | 20 | 40 | stop |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for result in results:
        if result["solver"] == "pgd":
            continue
        at = [_at(result, products) for products in (10, 20, 40)]
        end = stopped(result)
        cells = [f"{p['direction_error']:.2f} / {p['relative_error']:.2f}" for p in (*at, end)]
        print(
            f"| {result['state']} | {result['num_examples']} | {result['columns']} | "
            f"{result['noise_multiplier']:g} | {result['hull']} | {result['start']} | "
            f"{result['solver']} | {' | '.join(cells)} ({end['products']}) |"
        )


def _at(result: dict, products: int) -> dict:
    return [p for p in result["curve"] if p["products"] <= products][-1]


def plot(results: list[dict], path: pathlib.Path) -> None:
    """Draws direction error and gap against products, a column per state, 256 examples."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    states = list(dict.fromkeys(result["state"] for result in results))
    rows: list[tuple[str, str, float, Callable[[dict], float | None]]] = []
    for columns in dict.fromkeys(result["columns"] for result in results):
        rows += [
            ("direction error", columns, 2.0, lambda p: p["direction_error"]),
            ("direction error", columns, 10.0, lambda p: p["direction_error"]),
            ("relative gap", columns, 10.0, lambda p: p["relative_gap"]),
        ]
    figure, axes = plt.subplots(
        len(rows), len(states), figsize=(4.2 * len(states), 3.1 * len(rows)), squeeze=False
    )
    for row, (what, columns, multiplier, value) in zip(axes, rows, strict=True):
        for axis, state in zip(row, states, strict=True):
            same = {"state": state, "columns": columns, "noise_multiplier": multiplier}
            for result in select(results, num_examples=256, **same):
                if result["solver"] == "pgd" and (
                    not result["largest_step"] or what == "relative gap"
                ):
                    continue
                line = [(p["products"], value(p)) for p in result["curve"]]
                line = [(x, y) for x, y in line if y is not None and y > 0]
                axis.plot(
                    *zip(*line, strict=True),
                    color=COLOURS[result["solver"]],
                    linestyle="-" if result["hull"] == "per_example" else ":",
                    alpha=1.0 if result["start"] == "predictions" else 0.35,
                    marker="." if result["solver"] == "pgd" else None,
                )
            for result in select(results, num_examples=256, **same, **DEFAULT):
                end = stopped(result)
                axis.plot([end["products"]], [value(end)], "k*", markersize=10)
            axis.set(xscale="log", yscale="log", xlim=(1.5, 500), xlabel="products", ylabel=what)
            # The gap is huge at the first points, which are near zero.
            if what == "relative gap":
                axis.set_ylim(top=1e4)
            axis.set_title(f"{state}, noise {multiplier:g}, {columns} columns", fontsize=9)
    handles = [plt.Line2D([], [], color=c, label=s) for s, c in COLOURS.items()]
    handles += [
        plt.Line2D([], [], color="k", label="per-example hulls"),
        plt.Line2D([], [], color="k", linestyle=":", label="joint hull"),
        plt.Line2D([], [], color="k", alpha=0.35, label="pale: from uniform"),
        plt.Line2D([], [], color="k", marker="*", linestyle="", label="default stops"),
    ]
    figure.legend(handles=handles, loc="lower center", ncol=len(handles), fontsize=8)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=110)
