"""Which method at which epsilon, by what was measured; without a label."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import math
from typing import Any

from tf_labeldp import _validate

KINDS = ("images", "table", "numbers")
"""Kinds of features: images (n, h, w) or (n, h, w, c); tables of named columns or with texts; and
rows of numbers of one meaning, such as pixels, embeddings or measurements."""
_LARGEST_MEASURED = {"images": 60_000, "table": 32_561, "numbers": 12_000}
_FEW = 0.1
"""Fewer examples than this part of those measured, times epsilon, are outside of the tables."""
_REASONS = {
    "images": (
        "Images: features of small patches, smoothed over their nearest neighbours, and one noisy "
        "release for a logistic regression.",
        "Up to epsilon 2 no method that trains in minutes was better on the image sets measured; "
        "above, a network on noisy labels (MultiStageTraining) may be.",
    ),
    "table": (
        "A table: random Fourier features of its columns, and one noisy release for a ridge "
        "regression.",
        "It was ahead of networks on noisy labels up to epsilon 1 on Adult, where smoothing over "
        "neighbours loses a point.",
    ),
    "numbers": (
        "Rows of numbers: random Fourier features beside the rows smoothed over their nearest "
        "neighbours, and one noisy release for a linear head.",
        "Smoothing gains where neighbours share labels and loses where they do not, and without a "
        "label nobody knows which: both together were near the better one on the sets measured.",
    ),
    "model": (
        "A model of your own: a head of one noisy release on label-free features teaches it its "
        "probabilities, and from epsilon 2.5 on noisy labels teach it, too.",
        "A network that a head taught was ahead of the same one on noisy labels at every epsilon "
        "measured, and of DP-SGD.",
    ),
}


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was chosen, why, and the measured rows that it rests on; ``str`` has all of it.

    Attributes:
        kind: of the features: ``"images"``, ``"table"`` or ``"numbers"``.
        epsilon: that the rows are for.
        reason: two sentences.
        rows: tuples (data set, method, figure), the best first in each data set: test accuracy in
            percent at the measured epsilon that is nearest.
        measured_at: this epsilon.
        remarks: where the tables do not reach.
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
    """Returns what ``PrivateClassifier`` would choose, and what was measured, before any label.

    Args:
        epsilon: finite and above zero.
        num_examples: n.
        kind: of the features: ``"images"`` (n, h, w) or (n, h, w, c); ``"table"``, named columns or
            columns with texts; or ``"numbers"``, rows of numbers of one meaning, such as pixels,
            embeddings or measurements.

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
    kind = _validate.one_of("kind", kind, KINDS)
    told = "model" if _validate.boolean("own_model", own_model) else kind
    table = _measured()[told]
    levels = [float(level) for level in table["epsilons"]]
    nearest = min(range(len(levels)), key=lambda at: abs(math.log(levels[at] / epsilon)))
    rows = []
    for data, method, *cells in table["rows"]:
        if cells[nearest]:
            rows.append((data, method, cells[nearest]))
    order = list(dict.fromkeys(row[0] for row in rows))
    rows.sort(key=lambda row: (order.index(row[0]), -float(row[2].split()[0])))
    return Choice(
        kind,
        epsilon,
        " ".join(_REASONS[told]),
        tuple(rows),
        levels[nearest],
        _remarks(epsilon, num_examples, kind, levels),
    )


def _remarks(epsilon: float, num_examples: int, kind: str, levels: list[float]) -> tuple[str, ...]:
    found = []
    if not levels[0] / 2.0 <= epsilon <= 2.0 * levels[-1]:
        found.append(
            f"The tables reach from epsilon {levels[0]:g} to {levels[-1]:g}, not to {epsilon:g}."
        )
    # One release's noise is that of n epsilon: half the examples cost what half of epsilon does.
    measured = _LARGEST_MEASURED[kind]
    if num_examples < _FEW * measured:
        alike = epsilon * num_examples / measured
        found.append(
            f"They are of up to {measured:,} examples: with {num_examples:,}, expect about what "
            f"they have at epsilon {alike:.2g}."
        )
    return tuple(found)


@functools.cache
def _measured() -> dict[str, Any]:
    """Returns the measured accuracies, which ``benchmarks/report.py`` writes."""
    path = importlib.resources.files("tf_labeldp.front_door") / "measured.json"
    return json.loads(path.read_text(encoding="utf-8"))
