"""The choice of a method by public facts, with the benchmark rows behind it."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from tf_labeldp import _validate
from tf_labeldp._progress import Argument, Message, for_terminal
from tf_labeldp.accounting import Setting
from tf_labeldp.boosting import PrivateBoosting

_LARGEST_MEASURED = {"images": 60_000, "table": 32_561, "numbers": 12_000}
"""Examples in the largest training set measured, by kind of features."""


class _Reference(NamedTuple):
    """The data set behind curves."""

    data: str
    examples: int  # in its training set
    num_classes: int | None
    words: str  # its name and the score


_REFERENCES = {
    "two classes": _Reference("adult", 32_561, 2, "test AUC in % on Adult, two classes"),
    "classes": _Reference("covtype", 4_200, 7, "test accuracy in % on Covertype, seven classes"),
    "numbers": _Reference(
        "pg15training", 80_017, None, "explained variance in % on French motor claims"
    ),
}
_BOOSTING_FROM = 3_000.0
"""Boosting on classes is chosen from noisy labels of this worth in true ones on: between epsilon
0.5 and 1 on Adult."""
_MOST_COUNTED = 8
"""Classes that raise the worth: with seven, trees were ahead at 3,300 (Covertype, epsilon 2), and
with 26 a head was at 7,100 without this bound."""
_RESIDUALS_FROM = 2_000.0
"""The same for numbers, whose trees start from a head."""
_MANY_CLASSES = 50
"""Above, a head is chosen and its own table is shown: boosting grows a tree per class and round,
and noisy labels were worth less at epsilon 1, and no more at 4."""
_NETWORK_FROM, _NETWORK_RATE = 2.0, 800.0
"""Epsilon from which a network is mentioned, and examples per minute of its training by default:
50 passes at 330 images per second of a core."""
_FEW = 0.1
"""With a smaller share of those examples, a remark names the epsilon to look up."""
_REASONS = {
    "images": (
        "Images: features of small patches, smoothed over their nearest neighbours, and one noisy "
        "release for a logistic regression.",
        "Up to epsilon 1 no method that trains in minutes was better on the image sets measured.",
    ),
    "table": (
        "A table: random Fourier features of its columns, and one noisy release for a linear head.",
        "On the tables measured it is ahead of boosting on noisy labels where these are worth few "
        "true ones.",
    ),
    "boosting": (
        "A table: gradient boosting on noisy labels of one draw, with the known channel in the "
        "loss.",
        "On the tables measured it is ahead of a head of one release where the noisy labels are "
        "worth many true ones.",
    ),
    "residuals": (
        "A table of numbers: a head of one noisy release, and gradient boosting on noisy labels of "
        "what it leaves.",
        "On the tables measured both together were ahead of the head and of trees alone where the "
        "noisy labels are worth some thousand true ones.",
    ),
    "numbers": (
        "Rows of numbers: random Fourier features, the rows smoothed over their nearest "
        "neighbours, and one noisy release for a linear head on both.",
        "Smoothing gains where neighbours share labels and loses elsewhere, which can't be checked "
        "without labels: both together came close to the better one on the sets measured.",
    ),
    "many": (
        "More than 50 classes: one noisy release for a linear head, whose noise does not grow with "
        "the number of classes.",
        "It was ahead of noisy labels at epsilon 1, and at 4 with 1,000 classes; draw noisy labels "
        "by ProjectiveGeometryResponse.",
    ),
    "model": (
        "Your own model: it learns the probabilities of a head of one noisy release on label-free "
        "features, and from epsilon 2 it also learns from noisy labels.",
        "A network trained on a head's probabilities beat the same network on noisy labels and "
        "DP-SGD at every epsilon measured.",
    ),
}


@dataclasses.dataclass(frozen=True)
class Choice:
    """A method, its reasons, and the benchmark rows behind it; print it.

    Attributes:
        kind: kind of the features: ``"images"``, ``"table"`` or ``"numbers"``.
        epsilon: epsilon that was asked for.
        method: ``"head"``, ``"boosting"``, or ``"model"`` for a model of your own.
        reason: two sentences.
        rows: tuples (data set, method, score in percent) at ``measured_at``, the best first in
            each data set.
        measured_at: measured epsilon nearest to ``epsilon``.
        score: what the figures are, such as ``"test accuracy in %"``.
        curves: for tables, pairs (epsilon, score) by method, as expected for this number of
            examples if the labels are as hard as those of one public data set: of Adult for two
            classes, of Covertype for more, or for numbers of French motor claims.
        curves_of: score and data set of the curves; empty without them.
        remarks: sentences on where the tables do not reach.
    """

    kind: str
    epsilon: float
    method: str
    reason: str
    rows: tuple[tuple[str, str, str], ...]
    measured_at: float
    score: str = "test accuracy in %"
    curves: dict[str, tuple[tuple[float, float], ...]] = dataclasses.field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    curves_of: str = ""

    def epsilon_for(self, score: float) -> float:
        """Returns the smallest epsilon at which a method is expected to reach a score.

        It interpolates ``curves`` over the logarithm of epsilon, and returns infinity if no method
        reaches the score within them.

        Example:
            >>> recommend(1.0, 1_000_000, "table").epsilon_for(91.0) < 0.5
            True
        """
        found = [math.inf]
        for curve in self.curves.values():
            epsilons, scores = zip(*curve, strict=True)
            above = [place for place, value in enumerate(scores) if value >= score]
            if not above:
                continue
            place, share = above[0], 0.0
            if place:
                share = (scores[place] - score) / (scores[place] - scores[place - 1])
            step = math.log(epsilons[place] / epsilons[max(place - 1, 0)])
            found.append(epsilons[place] * math.exp(-share * step))
        return min(found)

    def __str__(self) -> str:
        return self.text()

    def text(self, shown: Setting[Callable[[str], str]] = str) -> str:
        """Returns what ``print`` shows; ``shown`` writes the arguments in it for a program."""
        lines = [shown(self.reason), f"Measured at epsilon {self.measured_at:g}, {self.score}:"]
        lines += _columns(self.rows)
        if self.curves:
            lines.append(
                "Expected if the labels are as hard as there, as epsilon: score "
                f"({self.curves_of}):"
            )
            lines += _columns(
                [name, *(f"{epsilon:.2g}: {score:.1f}" for epsilon, score in curve)]
                for name, curve in self.curves.items()
            )
        return for_terminal(*lines, *map(shown, self.remarks))


def _columns(rows: Iterable[Sequence[str]]) -> list[str]:
    rows = list(rows)
    wide = [max(map(len, column)) for column in itertools.zip_longest(*rows, fillvalue="")]
    return ["  " + "  ".join(map(str.ljust, row, wide)).rstrip() for row in rows]


def recommend(
    epsilon: float,
    num_examples: int,
    kind: str,
    *,
    num_classes: int | None = 2,
    own_model: bool = False,
) -> Choice:
    """Returns the choice that ``PrivateClassifier`` would make; it needs no labels.

    Args:
        epsilon: finite and above zero; for users with k labels each, epsilon / k.
        num_examples: n.
        kind: kind of the features: ``"images"`` (n, h, w) or (n, h, w, c); ``"table"``, with named
            columns or columns of texts; or ``"numbers"``, rows of numbers with one meaning, such as
            pixels, embeddings or measurements.
        num_classes: K; None for labels that are numbers (``PrivateRegressor``). Above 50 the choice
            is a head.
        own_model: whether to train a model of your own, as ``PrivateClassifier(model=)`` does.

    Returns:
        The choice; print it. ``epsilon_for`` answers which epsilon a score needs.

    Raises:
        ValueError: arguments out of range.

    Example:
        >>> recommend(0.2, 30_000, "table").method, recommend(2.0, 30_000, "table").method
        ('head', 'boosting')
    """
    epsilon = _validate.positive_finite("epsilon", epsilon)
    num_examples = _validate.integer_at_least("num_examples", num_examples, 1)
    kind = _validate.one_of("kind", kind, tuple(_LARGEST_MEASURED))
    if num_classes is not None:
        num_classes = _validate.integer_at_least("num_classes", num_classes, 2)
    if own_model:
        name, method, reason = "model", "model", "model"
    else:
        name, method, reason = _head_or_trees(epsilon, num_examples, kind, num_classes)
    table = _measured()[name]
    levels = [float(level) for level in table["epsilons"]]
    nearest = min(range(len(levels)), key=lambda level: abs(math.log(levels[level] / epsilon)))
    rows = [(data, row, cells[nearest]) for data, row, *cells in table["rows"] if cells[nearest]]
    order = list(dict.fromkeys(row[0] for row in rows))
    rows.sort(key=lambda row: (order.index(row[0]), -float(row[2].split()[0])))
    reference = None
    if name == "table of numbers":
        reference = _REFERENCES["numbers"]
    elif name == "table":
        reference = _REFERENCES["two classes" if num_classes == 2 else "classes"]
    return Choice(
        kind,
        epsilon,
        method,
        " ".join(_REASONS[reason]),
        tuple(rows),
        levels[nearest],
        table.get("score", Choice.score),
        {} if reference is None else _curves(table, reference, num_examples),
        tuple(_remarks(name, kind, epsilon, num_examples, num_classes)),
        "" if reference is None else reference.words,
    )


def _head_or_trees(
    epsilon: float, num_examples: int, kind: str, num_classes: int | None
) -> tuple[str, str, str]:
    """Returns the table with the measurements, the method, and the name of its reasons."""
    if num_classes is not None and num_classes > _MANY_CLASSES:
        return "many classes", "head", "many"
    if kind != "table":
        return kind, "head", kind
    if num_classes is None:
        pays = PrivateBoosting.worth(num_examples, epsilon) >= _RESIDUALS_FROM
        return "table of numbers", *(("boosting", "residuals") if pays else ("head", "table"))
    # Each class has a column of noise in a head's release, and a share of the labels; but trees
    # share the labels among many classes, too.
    worth = PrivateBoosting.worth(num_examples, epsilon, num_classes)
    pays = 0.5 * min(num_classes, _MOST_COUNTED) * worth >= _BOOSTING_FROM
    return "table", *(("boosting", "boosting") if pays else ("head", "table"))


def _remarks(
    name: str, kind: str, epsilon: float, num_examples: int, num_classes: int | None
) -> list[str]:
    """Returns sentences on where the table of this name does not reach."""
    levels = [float(level) for level in _measured()[name]["epsilons"]]
    remarks: list[str] = []
    if not levels[0] / 2.0 <= epsilon <= 2.0 * levels[-1]:
        remarks.append(
            f"The tables reach from epsilon {levels[0]:g} to {levels[-1]:g}, not to {epsilon:g}."
        )
    if name == "images" and num_classes is not None and epsilon >= _NETWORK_FROM:
        remarks.append(
            Message.of(
                Argument("method", "network"),
                " trains a residual network from scratch, which may be better: about "
                f"{num_examples / _NETWORK_RATE:,.0f} minutes on two cores for images of 28 x 28 "
                "pixels.",
            )
        )
    if num_classes is None and kind != "table":
        remarks.append(
            "The tables show classes: for numbers, tables of columns alone were measured."
        )
    measured = _LARGEST_MEASURED[kind]
    if num_examples < _FEW * measured:
        # Half the examples cost as much accuracy as half the epsilon: noise scales with 1/(n eps).
        equivalent = epsilon * num_examples / measured
        remarks.append(
            f"The tables are for up to {measured:,} examples. With {num_examples:,}, expect the "
            f"scores shown at epsilon {equivalent:.2g}."
        )
    return remarks


def _curves(
    table: dict[str, Any], reference: _Reference, num_examples: int
) -> dict[str, tuple[tuple[float, float], ...]]:
    """Returns the curves of the reference data, moved to epsilons of equal noise at n examples."""
    ratio, classes = reference.examples / num_examples, reference.num_classes or 2
    curves = {}
    for method in ("head", "boosting"):
        cells = next(row[2:] for row in table["rows"] if row[:2] == [reference.data, method])
        points = []
        for level, cell in zip(map(float, table["epsilons"]), cells, strict=True):
            equal: float | None = level * ratio
            if method == "boosting":  # The worth of the noisy labels is equal.
                share = math.sqrt(ratio * PrivateBoosting.worth(1, level, classes))
                equal = math.log1p(classes * share / (1.0 - share)) if share < 1.0 else None
            if cell and equal is not None:
                points.append((equal, float(cell.split()[0])))
        curves[method] = tuple(points)
    return {method: points for method, points in curves.items() if points}


@functools.cache
def _measured() -> dict[str, Any]:
    """Returns the accuracies that ``benchmarks/report.py`` writes."""
    path = importlib.resources.files("tf_labeldp.front_door") / "measured.json"
    return json.loads(path.read_text(encoding="utf-8"))
