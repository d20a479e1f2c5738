"""Channels that are written down as a table of probabilities, and drawn exactly from it."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Public
from tf_labeldp.mechanisms import random_bits
from tf_labeldp.mechanisms.base import ClassificationMechanism, WithoutPriors
from tf_labeldp.mechanisms.random_bits import UNITS, Rng

TOLERANCE = 1e-9
"""Tolerance of the row sums of a table, and of its worst log-ratio above epsilon: more than doubles
lose by rounding, and less than a statement shows."""


class WrittenChannel(WithoutPriors):
    """A mechanism that is written as its channel, for classes or numbers.

    A table of doubles sums to one, and keeps to its ratios, up to rounding alone. So it is rounded
    once, to whole units of 2^-53 whose ratios are within epsilon exactly; the draws compare 53
    random bits with sums of units.
    """

    has_keyed_draws: ClassVar[bool] = True

    @abc.abstractmethod
    def _table(self) -> np.ndarray:
        """Returns the checked table ``P[output | input]``, ``float64`` (inputs, outputs)."""

    @property
    def _units(self) -> np.ndarray:
        """The probabilities of the draws, in units, ``int64`` (inputs, outputs)."""
        # Nothing is kept here: an author's class may change its epsilon after a draw, and units of
        # the larger epsilon would then cost more than the next use is charged.
        table = self._table()
        return whole_units(table / table.sum(axis=1, keepdims=True), self.epsilon)

    def transition_matrix(self, prior: Public[Any] = None) -> np.ndarray:
        """Returns ``P[output | input]`` of the draws, ``float64``; ``prior`` is None."""
        self._refuse_public(prior)
        return self._units / float(UNITS)

    def _drawn_outputs(self, rows: np.ndarray, rng: Rng) -> np.ndarray:
        """Returns an output for the row of each label, ``int64`` (n,)."""
        return random_bits.draw_columns(np.cumsum(self._units, axis=1), rows, rng)


class ClassChannel(WrittenChannel, ClassificationMechanism):
    """A mechanism of classes whose author writes the channel, ``table``, and nothing else.

    Draws, likelihoods, posteriors and debiased targets follow from the table, and so do the keyed
    draws of a vault. Set ``outputs_are_classes = False`` if noisy labels are no classes; the table
    may then have any number of columns.

    Guarantee:
        (epsilon, 0)-DP for the replacement of one label; a table whose worst log-ratio exceeds
        epsilon is refused. The draws follow the table rounded to multiples of 2^-53, which
        ``transition_matrix`` returns, such that the ratio of any two entries in a column is at most
        e^epsilon.

    Example:
        >>> class Circle(ClassChannel):
        ...     def __init__(self, epsilon, num_classes):
        ...         self.epsilon, self.num_classes = epsilon, num_classes
        ...
        ...     def table(self):
        ...         angles = 2 * np.pi * np.arange(self.num_classes) / self.num_classes
        ...         closeness = np.cos(np.subtract.outer(angles, angles))
        ...         weights = np.exp(self.epsilon / 2 * closeness)
        ...         return weights / weights.sum(axis=1, keepdims=True)
        >>> Circle(1.0, 4).transition_matrix()[0].round(3).tolist()
        [0.387, 0.235, 0.143, 0.235]
        >>> Circle(1.0, 4).randomize([0, 3]).shape
        (2,)
    """

    @abc.abstractmethod
    def table(self) -> np.ndarray:
        """Returns ``P[output | input]``, (K, M), from the arguments of the constructor alone.

        Rows sum to one (tolerance 1e-9).
        """

    @property
    def num_outputs(self) -> int:
        """The number of possible noisy labels, M: the columns of the table."""
        return self.num_classes if self.outputs_are_classes else np.shape(self.table())[1]

    def _table(self) -> np.ndarray:
        name, shape = f"{type(self).__name__}.table()", (self.num_classes, self.num_outputs)
        return checked_table(name, self.table(), shape)

    def _noisy(self, labels: Any, rng: Rng) -> np.ndarray:
        return self._drawn_outputs(_validate.class_indices("labels", labels, self.num_classes), rng)


def checked_table(name: str, table: Any, shape: tuple[int, int]) -> np.ndarray:
    """Returns rows of probabilities as ``float64`` of a shape, or raises."""
    table = np.asarray(table, dtype=np.float64)
    if table.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {table.shape}.")
    if not np.all(np.isfinite(table)) or table.min() < 0.0:
        raise ValueError(f"{name} must be finite and not negative.")
    off = np.abs(table.sum(axis=1) - 1.0).max()
    if off > TOLERANCE:
        raise ValueError(f"{name} must sum to one in every row, but a sum is off by {off:.3g}.")
    return table


def whole_units(table: np.ndarray, epsilon: float) -> np.ndarray:
    """Returns a channel (k, m) in whole units: rows sum to 2^53, ratios are at most e^epsilon."""
    with np.errstate(divide="ignore"):
        logs = np.log(table[:, table.max(axis=0) > 0.0])
    worst = float(np.max(logs.max(axis=0) - logs.min(axis=0)))
    refusal = ValueError(
        f"the table is not epsilon-DP: the worst log-ratio of an output's probabilities is "
        f"{worst:.12g}, but epsilon is {epsilon:.12g}. State the larger epsilon."
    )
    if worst > epsilon + TOLERANCE:
        raise refusal
    # Entries are rounded up at the cost of the row's largest: a small entry rounded down would
    # lower its column's largest entry by a multiple of its own loss, or be zero.
    units = np.ceil(table * float(UNITS)).astype(np.int64)
    every = np.arange(table.shape[0])
    units[every, np.argmax(units, axis=1)] += UNITS - units.sum(axis=1)

    # Rounding down by more than the errors of exp and a product keeps ratios within e^epsilon. From
    # epsilon 37 on, one unit may stand next to all 2^53, and a much larger one overflows exp.
    grown = np.exp(min(epsilon, 40.0)) * (1.0 - 2.0**-50)
    least = units.min(axis=0)
    most = np.maximum(np.minimum(np.floor(least * grown), float(UNITS)).astype(np.int64), least)
    cut = np.maximum(units - most, 0)
    units -= cut
    # The cut part goes to the row's other entries, up to the room of each. That can raise a least
    # entry, but never lower it.
    total = cut.sum(axis=1, keepdims=True)
    room = np.minimum(most - units, total)
    units += np.clip(total - (np.cumsum(room, axis=1) - room), 0, room)
    if np.any(units.sum(axis=1) != UNITS):
        raise refusal
    return units
