"""The choice of a method by public facts, with the benchmark rows behind it."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import math
from typing import Any

from tf_labeldp import _validate

_LARGEST_MEASURED = {"images": 60_000, "table": 32_561, "numbers": 12_000}
"""Examples in the largest training set measured, by kind of features."""
_FEW = 0.1
"""With a smaller share of those examples, a remark names the epsilon to look up."""
_REASONS = {
    "images": (
        "Images: features of small patches, smoothed over their nearest neighbours, and one noisy "
        "release for a logistic regression.",
        "Up to epsilon 2 no method that trains in minutes was better on the image sets measured; "
        "above 2, a network on noisy labels (MultiStageTraining) may be better.",
    ),
    "table": (
        "A table: random Fourier features of its columns, and one noisy release for a linear head.",
        "On Adult it beat networks on noisy labels up to epsilon 1, and smoothing over neighbours "
        "loses a point there.",
    ),
    "numbers": (
        "Rows of numbers: random Fourier features, the rows smoothed over their nearest "
        "neighbours, and one noisy release for a linear head on both.",
        "Smoothing gains where neighbours share labels and loses elsewhere, which can't be checked "
        "without labels: both together came close to the better one on the sets measured.",
    ),
    "model": (
        "Your own model: it learns the probabilities of a head of one noisy release on label-free "
        "features, and from epsilon 2.5 it also learns from noisy labels.",
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
        reason: two sentences.
        rows: tuples (data set, method, test accuracy in percent) at ``measured_at``, the best
            first in each data set.
        measured_at: measured epsilon nearest to ``epsilon``.
        remarks: sentences on where the tables do not reach.
    """

    kind: str
    epsilon: float
    reason: str
    rows: tuple[tuple[str, str, str], ...]
    measured_at: float
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [self.reason, f"Measured at epsilon {self.measured_at:g}, test accuracy in %:"]
        wide = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        for row in self.rows:
            lines.append("  " + "  ".join(cell.ljust(w) for cell, w in zip(row, wide, strict=True)))
        return "\n".join([*(line.rstrip() for line in lines), *self.remarks])


def recommend(epsilon: float, num_examples: int, kind: str, *, own_model: bool = False) -> Choice:
    """Returns the choice that ``PrivateClassifier`` would make; it needs no labels.

    Args:
        epsilon: finite and above zero.
        num_examples: n.
        kind: kind of the features: ``"images"`` (n, h, w) or (n, h, w, c); ``"table"``, with named
            columns or columns of texts; or ``"numbers"``, rows of numbers with one meaning, such as
            pixels, embeddings or measurements.
        own_model: whether to train a model of your own, as ``PrivateClassifier(model=)`` does.

    Returns:
        The choice; print it.

    Raises:
        ValueError: arguments out of range.

    Example:
        >>> print(recommend(1.0, 30_000, "table").rows[0])
        ('adult', 'ridge', '85.2 ± 0.0')
    """
    epsilon = _validate.positive_finite("epsilon", epsilon)
    num_examples = _validate.integer_at_least("num_examples", num_examples, 1)
    kind = _validate.one_of("kind", kind, tuple(_LARGEST_MEASURED))
    method = "model" if own_model else kind
    table = _measured()[method]
    levels = [float(level) for level in table["epsilons"]]
    nearest = min(range(len(levels)), key=lambda level: abs(math.log(levels[level] / epsilon)))
    rows = []
    for data, name, *cells in table["rows"]:
        if cells[nearest]:
            rows.append((data, name, cells[nearest]))
    order = list(dict.fromkeys(row[0] for row in rows))
    rows.sort(key=lambda row: (order.index(row[0]), -float(row[2].split()[0])))
    remarks = []
    if not levels[0] / 2.0 <= epsilon <= 2.0 * levels[-1]:
        remarks.append(
            f"The tables reach from epsilon {levels[0]:g} to {levels[-1]:g}, not to {epsilon:g}."
        )
    measured = _LARGEST_MEASURED[kind]
    if num_examples < _FEW * measured:
        # Half the examples cost as much accuracy as half the epsilon: noise scales with 1/(n eps).
        equivalent = epsilon * num_examples / measured
        remarks.append(
            f"The tables are for up to {measured:,} examples. With {num_examples:,}, expect the "
            f"accuracy shown at epsilon {equivalent:.2g}."
        )
    reason = " ".join(_REASONS[method])
    return Choice(kind, epsilon, reason, tuple(rows), levels[nearest], tuple(remarks))


@functools.cache
def _measured() -> dict[str, Any]:
    """Returns the accuracies that ``benchmarks/report.py`` writes."""
    path = importlib.resources.files("tf_labeldp.front_door") / "measured.json"
    return json.loads(path.read_text(encoding="utf-8"))
