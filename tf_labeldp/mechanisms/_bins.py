"""Mechanisms with finitely many noisy numbers: randomized response on bins, and channel tables."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Assumption, Private, Public, Receipt
from tf_labeldp.mechanisms import bin_losses, classes
from tf_labeldp.mechanisms.base import Frozen, RegressionMechanism, WithoutPriors
from tf_labeldp.mechanisms.channels import TOLERANCE, WrittenChannel, checked_table
from tf_labeldp.mechanisms.random_bits import UNITS, Rng

_PUBLIC_BINS = Assumption(
    "public-bins",
    "holder",
    "The bins were chosen without these labels, except for the uses counted here.",
)


def nearest_index(values: Any, labels: Any) -> np.ndarray:
    """Returns the index of the nearest value of each label; ties go to the smaller value."""
    values = np.asarray(values, dtype=np.float64)
    lower, upper = values[:-1], values[1:]
    # Values are halved first, since the sum of two huge values overflows. Where the midpoint of two
    # neighbouring doubles rounds to the upper one, the upper one must still be nearest to itself.
    midpoints = np.minimum(0.5 * lower + 0.5 * upper, np.nextafter(upper, -np.inf))
    return np.searchsorted(midpoints, np.asarray(labels, dtype=np.float64), side="left")


@dataclasses.dataclass(frozen=True)
class FiniteMechanism(WithoutPriors, Frozen, RegressionMechanism):
    """A randomizer of numbers with finitely many inputs and outputs; a label is its nearest input.

    Ratios of an output's probabilities determine epsilon; sensitivity plays no role.
    """

    has_keyed_draws = True

    inputs: Public[tuple[float, ...]]
    outputs: Public[tuple[float, ...]]
    receipts: tuple[Receipt, ...] = dataclasses.field(
        default=(), repr=False, compare=False, kw_only=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._take_public("inputs", "outputs")
        inputs = _validate.increasing_numbers("inputs", self.inputs)
        outputs = _validate.increasing_numbers("outputs", self.outputs)
        self._set(inputs=tuple(inputs.tolist()), outputs=tuple(outputs.tolist()))

    @abc.abstractmethod
    def _probability(self, row: np.ndarray, column: np.ndarray | int) -> np.ndarray:
        """Returns P[output | input] for indices of inputs and outputs, broadcast."""

    @abc.abstractmethod
    def _drawn_outputs(self, rows: np.ndarray, rng: Rng) -> np.ndarray:
        """Returns the index of an output for the index of each input, (n,)."""

    def label_range(self) -> tuple[float, float]:
        """Returns the first and the last input."""
        return self.inputs[0], self.inputs[-1]

    def output_index(self, noisy_labels: Public[Any]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the index of each noisy label's nearest output, and whether it is one, (n,)."""
        noisy = _validate.real_vector("noisy_labels", noisy_labels)
        outputs = np.asarray(self.outputs)
        place = nearest_index(outputs, noisy)
        # A noisy label may have been cast to float32.
        return place, np.abs(outputs[place] - noisy) <= 2.0**-23 * np.max(np.abs(outputs))

    def transition_matrix(self, prior: Public[Any] = None) -> np.ndarray:
        """Returns ``P[output | input]`` of the draws, ``float64`` (k, m); ``prior`` is None."""
        self._refuse_public(prior)
        rows = np.arange(len(self.inputs))
        return self._probability(rows[:, np.newaxis], np.arange(len(self.outputs)))

    def likelihood(self, outputs: Public[Any], labels: Public[Any]) -> np.ndarray:
        """Returns ``P[output | label]``, ``float64`` (m, k); zero for other numbers."""
        place, is_output = self.output_index(outputs)
        answer = self._probability(self._rows(labels), place[:, np.newaxis])
        return np.where(is_output[:, np.newaxis], answer, 0.0)

    def expected_loss(self, probabilities: Public[Any], loss: str = "squared_error") -> float:
        """Returns ``E loss(noisy label, label)`` for labels with these probabilities of inputs."""
        loss, inputs = bin_losses.checked_loss(loss), np.asarray(self.inputs)
        prior = _validate.prior_rows("probabilities", probabilities, 1, inputs.size)[0]
        total = 0.0
        # A loop over outputs keeps the channel of many values out of memory.
        for column, output in enumerate(self.outputs):
            weights = prior * self._probability(np.arange(inputs.size), column)
            used = weights > 0.0  # An impossible pair may have an infinite loss.
            values = bin_losses.loss_values(loss, output, inputs[used])
            total += float(np.dot(weights[used], values))
        return total

    def __repr__(self) -> str:
        low, high = self.label_range()
        shown = ", ".join(f"{output:.6g}" for output in self.outputs[:8])
        more = ", ..." if len(self.outputs) > 8 else ""
        return (
            f"{type(self).__name__}(epsilon={self.epsilon!r}, inputs=<{len(self.inputs)} in "
            f"[{low:g}, {high:g}]>, outputs=<{len(self.outputs)}: {shown}{more}>)"
        )

    def _rows(self, labels: Any) -> np.ndarray:
        labels = _validate.numbers_in_range("labels", labels, *self.label_range())
        return nearest_index(self.inputs, labels)

    def _noisy(self, labels: Any, rng: Rng) -> np.ndarray:
        return np.asarray(self.outputs)[self._drawn_outputs(self._rows(labels), rng)]


@dataclasses.dataclass(frozen=True, repr=False)
class RROnBins(FiniteMechanism):
    """Maps a label to its bin and runs randomized response over the bins' outputs.

    ``optimal_bins`` finds the bins with the least expected loss; no epsilon-DP mechanism on these
    inputs has a smaller one (``ghazi2023``, Theorem 5).

    Guarantee:
        (epsilon, 0)-DP for the replacement of one label by any other in the range, if the bins were
        made without the labels, or charged (``LabelRandomizer``). With two or more outputs in use
        the worst log-ratio equals epsilon.

    Source: ``ghazi2023``, Algorithm 1. A label between two inputs counts as the nearest input
    (appendix A.1, proof of Lemma 16); ties go to the smaller input.

    Attributes:
        epsilon: finite and above zero.
        inputs: distinct label values, strictly increasing, finite.
        outputs: possible noisy labels, strictly increasing, within the range of the inputs.
        bin_of_input: index of each input's output, not decreasing.

    Example:
        >>> mechanism = RROnBins(1.0, [0, 1, 2, 3], outputs=[0.5, 2.5], bin_of_input=[0, 0, 1, 1])
        >>> mechanism.transition_matrix().round(4).tolist()[1]
        [0.7311, 0.2689]
        >>> round(mechanism.expected_loss([0.25, 0.25, 0.25, 0.25]), 4)
        1.3258
    """

    bin_of_input: Public[tuple[int, ...]]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._take_public("bin_of_input")
        bins, (low, high) = np.asarray(self.bin_of_input), self.label_range()
        if bins.shape != (len(self.inputs),) or bins.dtype.kind not in "iu":
            raise ValueError(
                f"bin_of_input must have one integer for each of the {len(self.inputs)} inputs, "
                f"got dtype {bins.dtype} and shape {bins.shape}."
            )
        if bins.min() < 0 or bins.max() >= self.num_bins or np.any(np.diff(bins) < 0):
            raise ValueError(
                f"bin_of_input must not decrease and lie in 0..{self.num_bins - 1}, the outputs."
            )
        if self.outputs[0] < low or self.outputs[-1] > high:
            raise ValueError(
                f"outputs must lie in the range of the inputs, [{low:g}, {high:g}], got "
                f"{self.outputs[0]:g} to {self.outputs[-1]:g}."
            )
        self._set(bin_of_input=tuple(bins.tolist()))

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """The assumptions of a draw's guarantee."""
        return (_PUBLIC_BINS,)

    @property
    def num_bins(self) -> int:
        """The number of outputs, d."""
        return len(self.outputs)

    @_validate.clears_frames
    def bin_of(self, labels: Private[Any]) -> np.ndarray:
        """Returns the bin index of each label (n,) in the range, ``int64``: not private."""
        return np.asarray(self.bin_of_input)[self._rows(labels)]

    def _probability(self, row: np.ndarray, column: np.ndarray | int) -> np.ndarray:
        shrink = math.exp(-self.epsilon)
        total = 1.0 + (self.num_bins - 1) * shrink
        own = np.asarray(self.bin_of_input)[row] == column
        return np.where(own, 1.0 / total, shrink / total)

    def _drawn_outputs(self, rows: np.ndarray, rng: Rng) -> np.ndarray:
        true_bin = np.asarray(self.bin_of_input)[rows]
        return classes.draw_ranks(true_bin, np.full(rows.shape, self.num_bins), self.epsilon, rng)


@dataclasses.dataclass(frozen=True, repr=False)
class ChannelMechanism(WrittenChannel, FiniteMechanism):
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

    Example:
        >>> mechanism = ChannelMechanism(1.0, (0.0, 1.0), (-1.0, 2.0), ((0.6, 0.4), (0.4, 0.6)))
        >>> mechanism.transition_matrix().round(4).tolist()
        [[0.6, 0.4], [0.4, 0.6]]
        >>> mechanism.randomize([0.0, 0.2, 1.0]).shape
        (3,)
    """

    probabilities: Public[tuple[tuple[float, ...], ...]] = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._take_public("probabilities")
        shape = (len(self.inputs), len(self.outputs))
        table = checked_table("probabilities", self.probabilities, shape)
        self._set(probabilities=tuple(map(tuple, table.tolist())))
        _ = self._units  # This raises if the table is not epsilon-DP.

    def _table(self) -> np.ndarray:
        return np.array(self.probabilities)

    @functools.cached_property
    def _units(self) -> np.ndarray:  # type: ignore[override]
        return super()._units

    def _probability(self, row: np.ndarray, column: np.ndarray | int) -> np.ndarray:
        return self._units[row, column] / float(UNITS)

    def check_unbiased(self) -> None:
        """Raises unless the table ``is_unbiased``."""
        if not self.is_unbiased:
            super().check_unbiased()

    @functools.cached_property
    def is_unbiased(self) -> bool:
        """Whether the mean of the noisy labels of each input is that input, up to rounding."""
        # Differences from the first input lose no digits to a large offset.
        first = self.inputs[0]
        outputs, inputs = np.asarray(self.outputs) - first, np.asarray(self.inputs) - first
        off = np.abs(self._units / float(UNITS) @ outputs - inputs)
        return bool(off.max() <= TOLERANCE * (outputs[-1] - outputs[0]))
