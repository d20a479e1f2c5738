"""A plug-in that draws noisy numbers from a table of probabilities, in integer arithmetic."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.mechanisms import RegressionMechanism, bin_losses, random_bits
from tf_labeldp.mechanisms._bins import nearest_index

_UNITS = 1 << 53
"""Units of probability 2^-53: draws compare 53 random bits with whole numbers of units."""
_TOLERANCE = 1e-9
"""Tolerance of the row sums of a table, and of its worst log-ratio above epsilon."""


@dataclasses.dataclass(frozen=True)
class ChannelMechanism(RegressionMechanism):
    """Draws the noisy label from a table: one row of probabilities for each possible label.

    A label uses the row of its nearest input; ties go to the smaller input.

    Guarantee:
        (epsilon, 0)-DP for the replacement of one label; the constructor checks the table's worst
        log-ratio against epsilon. The draws follow the table rounded to multiples of 2^-53, which
        ``transition_matrix`` returns, such that the ratio of any two entries in a column is at most
        e^epsilon.

    Source: the channels of the linear program (2) in appendix A of ``ghazi2023``.

    Attributes:
        epsilon: finite and above zero.
        inputs: possible labels, strictly increasing, (k,); the range is from first to last.
        outputs: possible noisy labels, strictly increasing, (m,).
        probabilities: k rows of m probabilities ``P[output | input]``; each row sums to one
            (tolerance 1e-9).
    """

    epsilon: float
    inputs: tuple[float, ...]
    outputs: tuple[float, ...]
    probabilities: tuple[tuple[float, ...], ...] = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        _validate.positive_finite("epsilon", self.epsilon)
        for name in ("inputs", "outputs"):
            numbers = _validate.increasing_numbers(name, getattr(self, name))
            object.__setattr__(self, name, tuple(numbers.tolist()))
        table = np.asarray(self.probabilities, dtype=np.float64)
        if table.shape != (len(self.inputs), len(self.outputs)):
            shape = (len(self.inputs), len(self.outputs))
            raise ValueError(f"probabilities must have shape {shape}, got {table.shape}.")
        if not np.all(np.isfinite(table)) or table.min() < 0.0:
            raise ValueError("probabilities must be finite and not negative.")
        off = np.abs(table.sum(axis=1) - 1.0).max()
        if off > _TOLERANCE:
            raise ValueError(
                f"probabilities must sum to one in every row, but a sum is off by {off:.3g}."
            )
        object.__setattr__(self, "probabilities", tuple(map(tuple, table.tolist())))
        _ = self._units  # This raises if the table is not epsilon-DP.

    def label_range(self) -> tuple[float, float]:
        return self.inputs[0], self.inputs[-1]

    def randomize(
        self, labels: Any, public: Any = None, *, rng: np.random.Generator | None = None
    ) -> np.ndarray:
        ends = np.cumsum(self._units, axis=1)
        return np.asarray(self.outputs)[random_bits.draw_columns(ends, self._rows(labels), rng)]

    def transition_matrix(self) -> np.ndarray:
        """Returns ``P[output | input]`` of the draws, (k, m)."""
        return self._units / float(_UNITS)

    def likelihood(self, outputs: Any, labels: Any) -> np.ndarray:
        noisy, possible = np.asarray(outputs, dtype=np.float64), np.asarray(self.outputs)
        place = nearest_index(possible, noisy)
        is_output = np.abs(possible[place] - noisy) <= 2.0**-23 * np.max(np.abs(possible))
        answer = self.transition_matrix()[self._rows(labels)][:, place].T
        return np.where(is_output[:, np.newaxis], answer, 0.0)

    def expected_loss(self, probabilities: Any, loss: str = "squared_error") -> float:
        """Returns ``E loss(noisy label, label)`` for labels with these probabilities of inputs."""
        prior = _validate.prior_rows("probabilities", probabilities, 1, len(self.inputs))[0]
        weights = prior[:, np.newaxis] * self.transition_matrix()
        row, column = np.nonzero(weights)
        values = bin_losses.loss_values(
            loss, np.asarray(self.outputs)[column], np.asarray(self.inputs)[row]
        )
        return float(np.dot(weights[row, column], values))

    def _rows(self, labels: Any) -> np.ndarray:
        labels = _validate.numbers_in_range("labels", labels, *self.label_range())
        return nearest_index(self.inputs, labels)

    @functools.cached_property
    def _units(self) -> np.ndarray:
        """The probabilities of the draws, in units, ``int64`` (k, m)."""
        table = np.array(self.probabilities)
        return _whole_units(table / table.sum(axis=1, keepdims=True), self.epsilon)


def _whole_units(table: np.ndarray, epsilon: float) -> np.ndarray:
    """Returns a channel (k, m) in whole units: rows sum to 2^53, ratios are at most e^epsilon."""
    with np.errstate(divide="ignore"):
        logs = np.log(table[:, table.max(axis=0) > 0.0])
    worst = float(np.max(logs.max(axis=0) - logs.min(axis=0)))
    refusal = ValueError(
        f"the table is not epsilon-DP: the worst log-ratio of an output's probabilities is "
        f"{worst:.12g}, but epsilon is {epsilon:.12g}. State the larger epsilon."
    )
    if worst > epsilon + _TOLERANCE:
        raise refusal
    # Entries are rounded up at the cost of the row's largest: a small entry rounded down would
    # lower its column's largest entry by a multiple of its own loss, or be zero.
    units = np.ceil(table * float(_UNITS)).astype(np.int64)
    every = np.arange(table.shape[0])
    units[every, np.argmax(units, axis=1)] += _UNITS - units.sum(axis=1)

    # Rounding down by more than the errors of exp and a product keeps ratios within e^epsilon.
    grown = np.exp(min(epsilon, 40.0)) * (1.0 - 2.0**-50)
    least = units.min(axis=0)
    most = np.maximum(np.minimum(np.floor(least * grown), float(_UNITS)).astype(np.int64), least)
    cut = np.maximum(units - most, 0)
    units -= cut
    # The cut part goes to the row's other entries, up to the room of each. That can raise a least
    # entry, but never lower it.
    total = cut.sum(axis=1, keepdims=True)
    room = np.minimum(most - units, total)
    units += np.clip(total - (np.cumsum(room, axis=1) - room), 0, room)
    if np.any(units.sum(axis=1) != _UNITS):
        raise refusal
    return units
