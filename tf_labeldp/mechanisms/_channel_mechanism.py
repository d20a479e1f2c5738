"""Any finite channel over numbers, given by its table of probabilities."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.mechanisms import _losses, _random
from tf_labeldp.mechanisms._base import FrozenRegression
from tf_labeldp.mechanisms._nearest import nearest_index

_UNITS = 1 << 53
"""The draw compares 53 random bits: a probability is a whole number of this many units."""

_SUM_TOLERANCE = 1e-9
_RATIO_TOLERANCE = 1e-9


@dataclasses.dataclass(frozen=True)
class ChannelMechanism(FrozenRegression):
    """Draws the noisy label from a table: one row of probabilities for each possible label.

    A label is drawn from the row of its nearest input, of two equally near the smaller one.

    Privacy: (epsilon, 0)-DP for the replacement of one label; it is the table's own worst log-ratio
    that is held against epsilon, at construction. What is drawn is the table rounded to multiples
    of 2^-53 (``transition_matrix`` returns just that), and for these the ratio of any two entries
    of a column is at most e^epsilon, checked on whole numbers: where rounding alone, of at most
    1e-9, would break it, single units move within a row.

    Source: the channels of the linear program (2) in appendix A of ``ghazi2023``.

    Attributes:
        epsilon: finite and above zero.
        inputs: the possible labels, strictly increasing, (k,); the range is from first to last.
        outputs: the possible noisy labels, strictly increasing, (m,).
        probabilities: k rows of m probabilities ``P[output | input]``, each of which sums to one
            (tolerance 1e-9).

    Example:
        >>> mechanism = ChannelMechanism(1.0, (0.0, 1.0), (-1.0, 2.0), ((0.6, 0.4), (0.4, 0.6)))
        >>> mechanism.transition_matrix().round(4).tolist()
        [[0.6, 0.4], [0.4, 0.6]]
        >>> mechanism.randomize([0.0, 0.2, 1.0]).shape
        (3,)
    """

    inputs: tuple[float, ...]
    outputs: tuple[float, ...]
    probabilities: tuple[tuple[float, ...], ...] = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        """Checks the table, and turns it into whole numbers of units."""
        super().__post_init__()
        for name in ("inputs", "outputs"):
            numbers = _validate.increasing_numbers(name, getattr(self, name))
            object.__setattr__(self, name, tuple(numbers.tolist()))
        table = np.asarray(self.probabilities, dtype=np.float64)
        _check_table(table, len(self.inputs), len(self.outputs))
        object.__setattr__(self, "probabilities", tuple(map(tuple, table.tolist())))
        _ = self._units  # refuses a table that is not epsilon-DP

    def randomize(
        self, labels: Any, priors: Any = None, *, rng: np.random.Generator | None = None
    ) -> np.ndarray:
        """Returns one noisy label for each label.

        Args:
            labels: numbers of shape (n,) in ``label_range()``.
            priors: must be None; the table is the same for every label.
            rng: a generator for repeatable (not private) runs; None takes secure random bits.

        Returns:
            ``float64`` array of shape (n,) of values of ``outputs``.

        Raises:
            TypeError: the labels are not numbers.
            ValueError: labels out of range, NaN or of a wrong shape, or priors given.
        """
        self._refuse_public(priors)
        low, high = self.label_range()
        labels = _validate.numbers_in_range("labels", labels, low, high)
        rows = nearest_index(self.inputs, labels)
        drawn = _random.uniform_integers(labels.size, rng)
        order = np.argsort(rows, kind="stable")
        ends = np.cumsum(np.bincount(rows, minlength=len(self.inputs)))
        column = np.empty(labels.size, dtype=np.int64)
        thresholds = np.cumsum(self._units, axis=1).astype(np.uint64)
        for row, end in enumerate(ends):
            members = order[ends[row - 1] if row else 0 : end]
            column[members] = np.searchsorted(thresholds[row], drawn[members], side="right")
        return np.array(self.outputs)[column]

    def transition_matrix(self, prior: Any = None) -> np.ndarray:
        """Returns ``P[output | input]`` as it is drawn, ``float64`` (k, m); ``prior`` is None."""
        if prior is not None:
            raise ValueError("ChannelMechanism has one channel for every prior; pass none.")
        return self._units / float(_UNITS)

    def label_range(self) -> tuple[float, float]:
        """Returns the first and the last input."""
        return self.inputs[0], self.inputs[-1]

    def likelihood(self, outputs: Any, labels: Any) -> np.ndarray:
        """Returns the probability of each output (m,) under each label (k,): ``float64`` (m, k).

        It is zero for a number that is not among ``outputs``.
        """
        wanted = _validate.real_vector("outputs", outputs)
        labels = _validate.numbers_in_range("labels", labels, *self.label_range())
        own = np.array(self.outputs)
        column = np.minimum(np.searchsorted(own, wanted), own.size - 1)
        matrix = self.transition_matrix()[nearest_index(self.inputs, labels)]
        return np.where(own[column] == wanted, matrix[:, column], 0.0).T

    def expected_loss(self, probabilities: Any, loss: _losses.Loss = "squared_error") -> float:
        """Returns ``E loss(noisy label, label)`` for labels that are inputs with these chances.

        Args:
            probabilities: of the inputs, (k,); sums to one (tolerance 1e-4).
            loss: ``"squared_error"``, ``"absolute_error"``, ``"poisson"``, or a callable
                ``loss(y_hat, y)``.
        """
        _losses.checked_loss(loss)
        inputs = np.array(self.inputs)
        prior = _validate.prior_rows("probabilities", probabilities, 1, inputs.size)[0]
        return _losses.expected_loss(self.transition_matrix().T, self.outputs, loss, inputs, prior)

    @functools.cached_property
    def _units(self) -> np.ndarray:
        """The probabilities that are drawn, in units, ``int64`` (k, m)."""
        table = np.array(self.probabilities)
        return _whole_units(table / table.sum(axis=1, keepdims=True), self.epsilon)


def _check_table(table: np.ndarray, num_inputs: int, num_outputs: int) -> None:
    """Raises unless these are rows of probabilities."""
    if table.shape != (num_inputs, num_outputs):
        raise ValueError(
            f"probabilities must have shape ({num_inputs}, {num_outputs}), a row for each input "
            f"and a column for each output, got {table.shape}."
        )
    if not np.all(np.isfinite(table)) or table.min() < 0.0:
        raise ValueError("probabilities must be finite and not negative.")
    off = np.abs(table.sum(axis=1) - 1.0)
    if off.max() > _SUM_TOLERANCE:
        raise ValueError(
            f"probabilities must sum to one in every row (tolerance {_SUM_TOLERANCE}), but "
            f"{int(np.count_nonzero(off > _SUM_TOLERANCE))} row(s) miss it by up to "
            f"{off.max():.3g}. Divide each row by its sum."
        )


def _whole_units(table: np.ndarray, epsilon: float) -> np.ndarray:
    """Returns a channel (k, m) in whole units: rows sum to 2^53, ratios are at most e^epsilon.

    Raises:
        ValueError: the ratio of two entries of a column is above e^epsilon by more than rounding.
    """
    with np.errstate(divide="ignore"):
        logs = np.log(table[:, table.max(axis=0) > 0.0])
    worst = float(np.max(logs.max(axis=0) - logs.min(axis=0)))
    refusal = ValueError(
        f"the table is not epsilon-DP: the worst log-ratio of two probabilities of one output is "
        f"{worst:.12g}, but epsilon is {epsilon:.12g}. State the larger epsilon, or mix every row "
        "with one common row."
    )
    if worst > epsilon + _RATIO_TOLERANCE:
        raise refusal
    # Rounded up, and the largest entry of the row pays: a small entry rounded down would cost its
    # column's largest a multiple of what it lost itself, or be zero.
    units = np.ceil(table * float(_UNITS)).astype(np.int64)
    everyone = np.arange(table.shape[0])
    units[everyone, np.argmax(units, axis=1)] += _UNITS - units.sum(axis=1)

    # Rounded down by more than exp and a product can lose, so the whole numbers keep to e^epsilon.
    grown = np.exp(min(epsilon, 40.0)) * (1.0 - 2.0**-50)
    least = units.min(axis=0)
    most = np.maximum(np.minimum(np.floor(least * grown), float(_UNITS)).astype(np.int64), least)
    cut = np.maximum(units - most, 0)
    units -= cut
    # What was cut goes to the row's other entries, as far as each has room. That can raise a least
    # entry, never lower one.
    total = cut.sum(axis=1, keepdims=True)
    room = np.minimum(most - units, total)
    units += np.clip(total - (np.cumsum(room, axis=1) - room), 0, room)
    if np.any(units.sum(axis=1) != _UNITS):
        raise refusal
    return units
