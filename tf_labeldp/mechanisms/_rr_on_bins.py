"""RR-on-Bins: randomized response on the bins of a numeric label."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.mechanisms import _losses, _top_k
from tf_labeldp.mechanisms._base import FrozenRegression
from tf_labeldp.mechanisms._nearest import nearest_index


@dataclasses.dataclass(frozen=True, repr=False)
class RROnBins(FrozenRegression):
    """Maps a label to its bin and runs randomized response over the bins' outputs.

    ``optimal_bins`` finds the bins with the least expected loss; no epsilon-DP mechanism on these
    inputs has less (``ghazi2023``, Theorem 5).

    Privacy: (epsilon, 0)-DP for the replacement of one label by any other in the range, if the bins
    were made without the labels, or paid for (``LabelRandomizer``). With two or more outputs in use
    the worst log-ratio equals epsilon; with one, nothing is said about the label.

    Source: ``ghazi2023``, Algorithm 1. A label between two inputs counts as the nearest input
    (appendix A.1, proof of Lemma 16), the smaller of two equally near.

    Attributes:
        epsilon: finite and above zero.
        inputs: the labels that are told apart, strictly increasing, finite.
        outputs: the noisy labels, strictly increasing, within the range of the inputs.
        bin_of_input: for each input the index of its output, not decreasing.

    Raises:
        ValueError: sizes or order are wrong.

    Example:
        >>> mechanism = RROnBins(1.0, [0, 1, 2, 3], outputs=[0.5, 2.5], bin_of_input=[0, 0, 1, 1])
        >>> mechanism.transition_matrix().round(4).tolist()[1]
        [0.7311, 0.2689]
        >>> round(mechanism.expected_loss([0.25, 0.25, 0.25, 0.25]), 4)
        1.3258
    """

    inputs: tuple[float, ...]
    outputs: tuple[float, ...]
    bin_of_input: tuple[int, ...]

    def __post_init__(self) -> None:
        """Checks sizes and order."""
        super().__post_init__()
        inputs = _validate.increasing_numbers("inputs", self.inputs)
        outputs = _validate.increasing_numbers("outputs", self.outputs)
        bins = np.asarray(self.bin_of_input)
        if bins.shape != inputs.shape or bins.dtype.kind not in "iu":
            raise ValueError(
                f"bin_of_input must hold one integer for each of the {inputs.size} inputs, got "
                f"dtype {bins.dtype} and shape {bins.shape}."
            )
        if bins.min() < 0 or bins.max() >= outputs.size or np.any(np.diff(bins) < 0):
            raise ValueError(
                f"bin_of_input must not decrease and lie in 0..{outputs.size - 1}, the indices of "
                "the outputs."
            )
        if outputs[0] < inputs[0] or outputs[-1] > inputs[-1]:
            raise ValueError(
                f"outputs must lie in the range of the inputs, [{inputs[0]:g}, {inputs[-1]:g}], "
                f"got outputs from {outputs[0]:g} to {outputs[-1]:g}."
            )
        object.__setattr__(self, "inputs", tuple(inputs.tolist()))
        object.__setattr__(self, "outputs", tuple(outputs.tolist()))
        object.__setattr__(self, "bin_of_input", tuple(bins.tolist()))

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What a statement of a draw rests on."""
        return ("the bins were chosen without these labels, but for the uses counted here",)

    @property
    def num_bins(self) -> int:
        """Number of outputs d."""
        return len(self.outputs)

    def label_range(self) -> tuple[float, float]:
        """Returns the first and the last input."""
        return self.inputs[0], self.inputs[-1]

    def bin_of(self, labels: Any) -> np.ndarray:
        """Returns the index of the bin of each label (n,) in the range, ``int64``: not private."""
        labels = _validate.numbers_in_range("labels", labels, *self.label_range())
        return np.asarray(self.bin_of_input)[nearest_index(self.inputs, labels)]

    def output_index(self, noisy_labels: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns which output each noisy label (n,) is, and whether it is one, ``bool`` (n,).

        Noisy labels may have been cast to ``float32`` on their way.
        """
        noisy = _validate.real_vector("noisy_labels", noisy_labels)
        outputs = np.asarray(self.outputs)
        place = nearest_index(outputs, noisy)
        return place, np.abs(outputs[place] - noisy) <= 2.0**-23 * np.max(np.abs(outputs))

    def randomize(
        self, labels: Any, priors: Any = None, *, rng: np.random.Generator | None = None
    ) -> np.ndarray:
        """Returns one noisy label for each label.

        Args:
            labels: numbers of shape (n,) in the range of the inputs.
            priors: must be None; the prior is in the bins.
            rng: a generator for repeatable (not private) runs; None takes secure random bits.

        Returns:
            ``float64`` array of shape (n,), each one of the outputs.

        Raises:
            TypeError: the labels are no numbers.
            ValueError: labels out of range or of a wrong shape, or priors given.
        """
        self._refuse_public(priors)
        true_bin = self.bin_of(labels)
        size = np.full(true_bin.shape, self.num_bins, dtype=np.int64)
        return np.asarray(self.outputs)[_top_k.draw_ranks(true_bin, size, self.epsilon, rng)]

    def transition_matrix(self, prior: Any = None) -> np.ndarray:
        """Returns ``P[output | input]``, ``float64`` (inputs, outputs); ``prior`` must be None."""
        if prior is not None:
            raise ValueError("RROnBins has one channel; pass no prior.")
        shrink = math.exp(-self.epsilon)
        total = 1.0 + (self.num_bins - 1) * shrink
        matrix = np.full((len(self.inputs), self.num_bins), shrink / total)
        matrix[np.arange(len(self.inputs)), self.bin_of_input] = 1.0 / total
        return matrix

    def likelihood(self, outputs: Any, labels: Any) -> np.ndarray:
        """Returns ``P[output | label]``, ``float64`` (m, k); zero for what is no output."""
        place, known = self.output_index(outputs)
        shrink = math.exp(-self.epsilon)
        answer = np.where(place[:, np.newaxis] == self.bin_of(labels), 1.0, shrink)
        return np.where(known[:, np.newaxis], answer / (1.0 + (self.num_bins - 1) * shrink), 0.0)

    def expected_loss(self, probabilities: Any, loss: _losses.Loss = "squared_error") -> float:
        """Returns ``E loss(noisy, true)`` for labels that follow a prior over the inputs.

        Args:
            probabilities: of the inputs, (k,), with sum one.
            loss: as for ``optimal_bins``.

        Returns:
            The mean of ``(y_hat - y)^2``, ``|y_hat - y|``, ``y_hat - y log(y_hat)``, or the
            callable, over prior and mechanism.
        """
        prior = _validate.prior_rows("probabilities", probabilities, None, len(self.inputs))[0]
        loss = _losses.checked_loss(loss)
        # Bin by bin: the (inputs, outputs) channel of many values need not be in memory.
        inputs, bins = np.asarray(self.inputs), np.asarray(self.bin_of_input)
        shrink = math.exp(-self.epsilon)
        answers = (np.where(bins == j, 1.0, shrink) for j in range(self.num_bins))
        total = _losses.expected_loss(answers, self.outputs, loss, inputs, prior)
        return total / (1.0 + (self.num_bins - 1) * shrink)

    def __repr__(self) -> str:
        """Returns sizes and range, and the outputs where they are few."""
        low, high = self.label_range()
        shown = ", ".join(f"{output:.6g}" for output in self.outputs[:8])
        more = ", ..." if self.num_bins > 8 else ""
        return (
            f"RROnBins(epsilon={self.epsilon!r}, inputs=<{len(self.inputs)} in [{low:g}, {high:g}]>"
            f", outputs=<{self.num_bins}: {shown}{more}>)"
        )
