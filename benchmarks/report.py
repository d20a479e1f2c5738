"""Writes the tables and plots of the benchmark pages from the files in `results/`.

    python benchmarks/report.py

It writes the text between `<!-- table SCRIPT/TABLE -->` and `<!-- end -->` in the pages. After the
name, `rows=A+B,C` chooses the rows whose first three cells contain A and B, or C, and
`columns=A,B` chooses columns; both with `-` in place of spaces and commas. Other scripts draw the
plots that need more than a table: bench_projection.py projection_convergence.png, and
bench_regression.py regression_joint_density.png.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from typing import Any

import _results
import numpy as np

HERE = pathlib.Path(__file__).parent
PAGES = (HERE / "README.md", HERE / "REFERENCE.md")
MEASURED = HERE.parent / "tf_labeldp" / "front_door" / "measured.json"
_TABLE = re.compile(
    r"(?P<head>(?P<indent>[ ]*)<!-- table (?P<name>\S+)(?P<choice>[^>]*) -->\n)"
    r".*?(?P<end>[ ]*<!-- end -->)",
    re.DOTALL,
)
_NUMBER = re.compile(r"[+-]?\d[\d,]*\.?\d*(?:e[+-]?\d+)?")
_X_COLUMN = re.compile(r"(?:eps |ε )?\d[\d,.]*")


@dataclasses.dataclass(frozen=True)
class Panel:
    """One panel of a plot: a curve per row if columns are numbers, else a curve per column.

    Attributes:
        table: the table, `script/table`.
        title: the title of the panel.
        rows: the first cell of the rows to draw, or None for all rows.
        axes: further settings of the axes.
        lines: instead of rows, the curves by their name: each has the numbers of rows, given by
            table and first two cells; of two rows with one epsilon the last counts.
    """

    table: str
    title: str
    rows: str | None = None
    axes: dict[str, Any] = dataclasses.field(default_factory=dict)
    lines: dict[str, list[tuple[str, str, str]]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Bars:
    """One panel of bars, a group per row: those with the most cores, the second cell.

    Attributes:
        table: the table, `script/table`.
        title: the title of the panel.
        columns: the column of each bar of a group, by its name in the legend.
    """

    table: str
    title: str
    columns: dict[str, str]


_ERROR = {"yscale": "log", "ylabel": "mean squared error"}
_CLUSTERS = {"xlabel": "number of clusters"}
PLOTS: dict[str, list[Panel] | list[Bars]] = {
    "decides.png": [
        Panel(
            "",
            "Adult: earns more than 50,000?",
            None,
            {"xlim": (0.09, 4.5), "ylim": (68, 94), "ylabel": "test AUC (%)"},
            {
                "tf-labeldp": [("tables/classes", "adult", "one call")],
                "network on randomized response": [("one_release/accuracy", "adult", "RR, AUC")],
                "network on LP-2ST": [("one_release/accuracy", "adult", "LP-2ST, AUC")],
                "no privacy": [("tables/classes", "adult", "no privacy")],
            },
        ),
        Panel(
            "",
            "Fashion-MNIST: pictures of clothes",
            None,
            {"ylim": (55, 96)},
            {
                "tf-labeldp": [
                    ("one_release/accuracy", "fashion_mnist", "smooth logistic"),
                    ("recipe/accuracy", "fashion_mnist", "network"),
                ],
                "LP-2ST (ghazi2021)": [("recipe/accuracy", "fashion_mnist", "LP-2ST (ghazi2021)")],
                "LabelDP-Pro (ghazi2024, add/remove)": [
                    ("one_release/accuracy", "fashion_mnist", "LabelDP-Pro (ghazi2024, add/remove)")
                ],
                "ALIBI (ghazi2024)": [
                    ("one_release/accuracy", "fashion_mnist", "ALIBI (ghazi2024)")
                ],
                "no privacy": [("recipe/accuracy", "fashion_mnist", "no privacy (ghazi2021)")],
            },
        ),
    ],
    "step_time.png": [
        Bars(
            "nets/ratios",
            "private step / plain step of Keras",
            {
                "tf-labeldp": "ours / Keras",
                "Opacus": "Opacus / Keras",
                "jax_privacy": "jax_privacy / Keras",
            },
        ),
        Bars(
            "nets/ratios",
            "private step / plain step of the same framework",
            {
                "tf-labeldp": "ours / Keras",
                "Opacus": "Opacus / PyTorch",
                "jax_privacy": "jax_privacy / JAX",
            },
        ),
    ],
    "lp_mst.png": [
        Panel("lp_mst/accuracy", "MNIST", "mnist"),
        Panel("lp_mst/accuracy", "Fashion-MNIST", "fashion_mnist"),
    ],
    "one_release.png": [
        Panel("one_release/accuracy", "MNIST", "mnist", {"ylim": (55, 100)}),
        Panel("one_release/accuracy", "Fashion-MNIST", "fashion_mnist", {"ylim": (55, 93)}),
        Panel("one_release/accuracy", "Adult (and AUC)", "adult", {"ylim": (70, 92)}),
    ],
    "learners.png": [
        Panel("learners/accuracy", "MNIST", "mnist"),
        Panel("learners/accuracy", "Fashion-MNIST", "fashion_mnist"),
        Panel("learners/accuracy_H200", "Fashion-MNIST, 5,000 steps", "fashion_mnist"),
        Panel("learners/accuracy_H200", "12,000 colour images, 5,000 steps", "cifar10_subset"),
    ],
    "clusters.png": [
        Panel("clusters/mnist", "MNIST"),
        Panel("clusters/fashion_mnist", "Fashion-MNIST"),
        Panel("clusters/mnist_binary", "MNIST, 5 or not"),
        Panel("clusters/numbers", "epsilon 0.5", None, _CLUSTERS),
    ],
    "regression_beMTPL97.png": [
        Panel("regression/mechanism_error_amounts", "mechanism error, amounts", None, _ERROR),
        Panel("regression/test_error_amounts", "test error, amounts", None, _ERROR),
    ],
    "regression_pg15training.png": [
        Panel("regression/mechanism_error_counts", "mechanism error, counts", None, _ERROR),
        Panel("regression/test_error_counts", "test error, counts", None, _ERROR),
    ],
    "tables.png": [
        Panel("tables/classes", "Adult", "adult", {"ylim": (78, 94), "ylabel": "test AUC (%)"}),
        Panel("tables/classes", "Bank", "bank", {"ylim": (60, 82), "ylabel": "test AUC (%)"}),
        Panel("tables/classes", "Covertype, 7 classes", "covtype"),
        Panel("tables/numbers", "Bike", "bike", {"ylabel": "explained variance (%)"}),
    ],
    "optimal_bins.png": [
        Panel(
            "optimal_bins/times",
            "optimal_bins on one core",
            None,
            {"yscale": "log", "xlabel": "values", "ylabel": "seconds"},
        ),
    ],
    "peer_to_peer.png": [
        Panel(
            "peer_to_peer/epsilon",
            "alpha, theta: clusters of s users or more, and Lemma 9",
            None,
            {"yscale": "log", "xlabel": "users s", "ylabel": "epsilon"},
        ),
    ],
}


_MEASURED: dict[str, list[tuple[str, set[str] | None, set[str] | None]]] = {
    "images": [
        (
            "one_release/accuracy",
            {"mnist", "fashion_mnist"},
            {"smooth logistic", "logistic", "RR", "LP-2ST"},
        ),
        ("recipe/accuracy", None, {"smooth logistic", "network"}),
    ],
    "table": [
        (
            "tables/classes",
            {"adult", "bank", "covtype"},
            {"head", "boosting", "no privacy"},
        )
    ],
    "table of numbers": [
        (
            "tables/numbers",
            {"bike", "diabetes", "pg15training"},
            {"head", "boosting", "no privacy"},
        )
    ],
    "numbers": [("front_door/accuracy", None, None)],
    "many classes": [
        (
            "many_classes/accuracy",
            None,
            {"randomized response", "projective geometry", "head", "no privacy"},
        )
    ],
    "model": [
        (
            "one_release/accuracy",
            {"mnist", "fashion_mnist", "adult"},
            {"teacher", "RR", "LP-2ST"},
        )
    ],
}
"""The figures of `tf_labeldp.recommend`: tables, data sets and methods; None for all. Of two tables
with one cell, the first counts."""
_SCORES = {
    "table": "test AUC in % (accuracy for more than two classes)",
    "table of numbers": "explained variance of the test labels in %",
}
"""What figures are that are no accuracy."""


def measured() -> str:
    """Returns the content of `measured.json` of the front door."""
    content: dict[str, dict[str, Any]] = {}
    for kind, sources in _MEASURED.items():
        found: dict[tuple[str, str], dict[str, str]] = {}
        for name, data, methods in sources:
            table = table_of(name)
            at = [i for i, column in enumerate(table["columns"]) if _X_COLUMN.fullmatch(column)]
            for row in table["rows"]:
                if (data is None or row[0] in data) and (methods is None or row[1] in methods):
                    cells = {table["columns"][i].split()[-1]: row[i] for i in at if row[i]}
                    key = (row[0], row[1])
                    found[key] = cells | found.get(key, {})
        levels = sorted({level for cells in found.values() for level in cells}, key=float)
        rows = [[*key, *(cells.get(x, "") for x in levels)] for key, cells in found.items()]
        content[kind] = {"epsilons": levels, "rows": rows}
        if kind in _SCORES:
            content[kind]["score"] = _SCORES[kind]
    return json.dumps(content, ensure_ascii=False, indent=1) + "\n"


def table_of(name: str) -> dict[str, Any]:
    """Returns the table `script/table` of the results."""
    script, _, table = name.partition("/")
    results = json.loads((_results.FOLDER / f"{script}.json").read_text(encoding="utf-8"))
    return results["tables"][table]


def filled(page: str) -> str:
    """Returns a page with the tables of the present results."""

    def table_text(match: re.Match[str]) -> str:
        table = table_of(match["name"])
        choice = dict(part.split("=", 1) for part in match["choice"].strip().split(" ") if part)
        columns, rows = table["columns"], table["rows"]
        if "rows" in choice:
            wanted = [set(words.split("+")) for words in choice["rows"].split(",")]
            rows = [row for row in rows if any(words <= _words(row) for words in wanted)]
        if "columns" in choice:
            wanted_columns = choice["columns"].split(",")
            kept = [columns.index(name) for name in columns if _word(name) in wanted_columns]
            columns = [columns[place] for place in kept]
            rows = [[row[place] for place in kept] for row in rows]
        text = _results.markdown(columns, rows).replace("\n", "\n" + match["indent"])
        return f"{match['head']}{match['indent']}{text}\n{match['end']}"

    return _TABLE.sub(table_text, page)


def _word(cell: str) -> str:
    """Returns a cell without spaces, as the comments of the pages name it."""
    return re.sub(r"[\s,]+", "-", cell.strip("*"))


def _words(row: list[str]) -> set[str]:
    """Returns the first three cells of a row as words."""
    return {_word(cell) for cell in row[:3]}


def numbers(cell: str) -> tuple[float, float]:
    """Returns the first number of a cell and the number after a plus-minus sign, or NaN."""
    value, _, spread = cell.partition("±")
    found = [_NUMBER.search(part) for part in (value, spread)]
    first, second = (float(f[0].replace(",", "")) if f else np.nan for f in found)
    return first, second


def curves(panel: Panel) -> dict[str, np.ndarray]:
    """Returns each curve of a panel, rows of (x, y, spread), by its name."""
    if panel.lines:
        return {name: curve(rows) for name, rows in panel.lines.items()}
    table = table_of(panel.table)
    columns = table["columns"]
    rows = [row for row in table["rows"] if panel.rows is None or row[0] == panel.rows]
    across = [place for place, name in enumerate(columns) if _X_COLUMN.fullmatch(name)]
    # Without columns that are numbers, x is the first column.
    if not across:
        found = {
            name: [(numbers(row[0])[0], *numbers(row[place])) for row in rows]
            for place, name in enumerate(columns)
            if place and np.isfinite(numbers(rows[0][place])[0])
        }
    else:
        names = [place for place in range(across[0]) if panel.rows is None or place]
        found = {
            ", ".join(row[place].strip("*") for place in names): [
                (numbers(columns[place])[0], *numbers(row[place])) for place in across
            ]
            for row in rows
        }
    arrays = {name: np.array(points) for name, points in found.items()}
    arrays = {name: points[np.isfinite(points[:, 1])] for name, points in arrays.items()}
    return {name: points for name, points in arrays.items() if len(points) > 1}


def curve(wanted: list[tuple[str, str, str]]) -> np.ndarray:
    """Returns the numbers of rows, each given by table and first two cells: (x, y, spread)."""
    points: dict[float, tuple[float, float, float]] = {}
    for name, *cells in wanted:
        table = table_of(name)
        row = next(row for row in table["rows"] if [cell.strip("*") for cell in row[:2]] == cells)
        for column, cell in zip(table["columns"], row, strict=True):
            if _X_COLUMN.fullmatch(column) and cell:
                x = numbers(column)[0]
                points[x] = (x, *numbers(cell))
    return np.array([points[x] for x in sorted(points)])


def draw_bars(panel: Bars, axis: Any) -> None:
    """Draws groups of bars; a cell without a number has none."""
    table = table_of(panel.table)
    cores = table["rows"][-1][1]
    rows = [row for row in table["rows"] if row[1] == cores]
    for number, (name, column) in enumerate(panel.columns.items()):
        cells = [row[table["columns"].index(column)] for row in rows]
        heights = [numbers(cell)[0] if _NUMBER.match(cell) else np.nan for cell in cells]
        places = np.arange(len(rows)) + 0.29 * (number - 1)
        bars = axis.bar(places, heights, 0.27, label=name, color=f"C{number}")
        labels = ["" if np.isnan(height) else f"{height:.3g}" for height in heights]
        axis.bar_label(bars, labels, fontsize=7, rotation=90, padding=2)
    axis.set_xticks(range(len(rows)), [row[0] for row in rows], rotation=25, ha="right", fontsize=8)
    on = "one core" if cores == "1" else f"{cores} cores"
    axis.set(title=f"{panel.title}, {on}", yscale="log", ylabel="times as long")
    # Room for the labels of the bars.
    low, high = axis.get_ylim()
    low = min(low, 0.9)
    axis.set_ylim(low, 2 * high)
    axis.minorticks_off()
    ticks = [tick for tick in (0.5, 1, 2, 5, 10, 20, 50, 100, 200) if low <= tick <= 2 * high]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.axhline(1, color="black", linewidth=0.8)
    axis.grid(alpha=0.3, axis="y")
    axis.legend(fontsize=8, loc="upper left")


def draw(panels: list[Panel] | list[Bars], path: pathlib.Path) -> None:
    """Draws curves with error bars, or bars, a panel per table."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # A page shows 736 pixels, in which the smallest text is to have 7.
    wide = min(len(panels), 2)
    tall = -(-len(panels) // wide)
    size = (5 * wide, 4.6 * tall)
    plt.rc("axes", titlesize=9)
    figure, axes = plt.subplots(tall, wide, figsize=size, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, panel in zip(axes.flat, panels, strict=False):
        if isinstance(panel, Bars):
            draw_bars(panel, axis)
            continue
        drawn = curves(panel)
        for i, (name, points) in enumerate(drawn.items()):
            x, y, spread = points.T
            style, color = ("o-", "s--", "^:")[i // 10 % 3], f"C{i % 10}"
            if name == "no privacy":
                style, color = "--", "black"
            axis.errorbar(
                x, y, np.nan_to_num(spread), fmt=style, color=color, markersize=3,
                linewidth=1.2, label=name,
            )  # fmt: skip
        axis.set(title=panel.title, xscale="log", xlabel="epsilon", ylabel="test accuracy (%)")
        ticks = np.unique(np.concatenate([points[:, 0] for points in drawn.values()]))
        axis.set_xticks(ticks, [f"{tick:,g}" for tick in ticks], fontsize=8)
        axis.set(**panel.axes)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        if drawn:
            below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}
            axis.legend(fontsize=7, ncols=2, **below)
    figure.tight_layout()
    figure.savefig(path, dpi=112)
    plt.close(figure)


def main() -> None:
    """Writes both pages, the figures of the front door, and all plots."""
    MEASURED.write_text(measured(), encoding="utf-8")
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(page.name)
    for name, panels in PLOTS.items():
        draw(panels, HERE / name)
        print(name)


if __name__ == "__main__":
    main()
