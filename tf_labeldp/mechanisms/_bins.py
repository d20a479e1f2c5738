"""Randomized response on bins of numbers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Assumption, Private, Public
from tf_labeldp.accounting.receipts import Receipts
from tf_labeldp.mechanisms import bin_losses, classes
from tf_labeldp.mechanisms.base import Frozen, RegressionMechanism, WithoutPriors
from tf_labeldp.mechanisms.random_bits import Rng

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


@dataclasses.dataclass(frozen=True, repr=False)
class RROnBins(WithoutPriors, Frozen, RegressionMechanism):
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

    inputs: Public[tuple[float, ...]]
    outputs: Public[tuple[float, ...]]
    bin_of_input: Public[tuple[int, ...]]
    receipts: Receipts = dataclasses.field(default=(), repr=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._take_public("inputs", "outputs", "bin_of_input")
        for name in ("inputs", "outputs"):
            numbers = _validate.increasing_numbers(name, getattr(self, name))
            self._set(**{name: tuple(numbers.tolist())})
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

    def label_range(self) -> tuple[float, float]:
        """Returns the first and the last input."""
        return self.inputs[0], self.inputs[-1]

    def bin_of(self, labels: Private[Any]) -> np.ndarray:
        """Returns the bin index of each label (n,) in the range, ``int64``: not private."""
        labels = _validate.numbers_in_range("labels", labels, *self.label_range())
        return np.asarray(self.bin_of_input)[nearest_index(self.inputs, labels)]

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
        return self._probability(
            np.array(self.bin_of_input)[:, np.newaxis], np.arange(self.num_bins)
        )

    def likelihood(self, outputs: Public[Any], labels: Public[Any]) -> np.ndarray:
        """Returns ``P[output | label]``, ``float64`` (m, k); zero for other numbers."""
        place, is_output = self.output_index(outputs)
        answer = self._probability(self.bin_of(labels), place[:, np.newaxis])
        return np.where(is_output[:, np.newaxis], answer, 0.0)

    def expected_loss(self, probabilities: Public[Any], loss: str = "squared_error") -> float:
        """Returns ``E loss(noisy label, label)`` for labels with these probabilities of inputs."""
        loss, inputs = bin_losses.checked_loss(loss), np.asarray(self.inputs)
        prior = _validate.prior_rows("probabilities", probabilities, 1, inputs.size)[0]
        bins, total = np.asarray(self.bin_of_input), 0.0
        # A loop over outputs keeps the channel of many values out of memory.
        for column, output in enumerate(self.outputs):
            weights = prior * self._probability(bins, column)
            used = weights > 0.0  # An impossible pair may have an infinite loss.
            values = bin_losses.loss_values(loss, output, inputs[used])
            total += float(np.dot(weights[used], values))
        return total

    def _probability(self, bins: np.ndarray, column: np.ndarray | int) -> np.ndarray:
        shrink = math.exp(-self.epsilon)
        total = 1.0 + (self.num_bins - 1) * shrink
        return np.where(bins == column, 1.0 / total, shrink / total)

    def _noisy(self, labels: Any, rng: Rng) -> np.ndarray:
        bins = self.bin_of(labels)
        drawn = classes.draw_ranks(bins, np.full(bins.shape, self.num_bins), self.epsilon, rng)
        return np.asarray(self.outputs)[drawn]

    def __repr__(self) -> str:
        low, high = self.label_range()
        shown = ", ".join(f"{output:.6g}" for output in self.outputs[:8])
        more = ", ..." if self.num_bins > 8 else ""
        return (
            f"RROnBins(epsilon={self.epsilon!r}, inputs=<{len(self.inputs)} in [{low:g}, {high:g}]>"
            f", outputs=<{self.num_bins}: {shown}{more}>)"
        )
