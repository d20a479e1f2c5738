"""Private histograms of all labels, or by group."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Private, Public, Receipt
from tf_labeldp.accounting.gaussian import gaussian_sigma
from tf_labeldp.mechanisms import integer_noise
from tf_labeldp.mechanisms._bins import nearest_index
from tf_labeldp.mechanisms.base import AggregateMechanism
from tf_labeldp.mechanisms.integer_noise import DiscreteGaussian, LaplaceNoise
from tf_labeldp.mechanisms.random_bits import Rng

_SENSITIVITY = 2
"""L1 sensitivity: a replaced label leaves one cell of its group and enters another."""
_L2_SENSITIVITY = math.sqrt(2.0)
_FEW_CELLS = 1 << 24
"""Cells that any histogram may have: 128 MiB of exact counts."""
_CELLS_PER_LABEL = 64
"""Most cells per label of a larger histogram, nearly all of which are noise alone."""
_MOST_STEPS = 1 << 61
"""Most grid steps of all labels together, which leaves the noise as much room in 64 bits."""


@dataclasses.dataclass(frozen=True)
class HistogramMechanism(integer_noise.FrozenWithNoise, AggregateMechanism):
    """Counts labels in public cells and adds Laplace or Gaussian noise to each count.

    Laplace noise has the scale 2/epsilon and comes from OpenDP, whose privacy map certifies
    ``epsilon`` for L1 sensitivity 2; its samplers are exact (``"discrete_laplace"``) or safe in
    floating point (``"laplace"``). Gaussian noise has the sigma of the analytic calibration;
    OpenDP's exact sampler draws it on a fine grid. It pays off where many releases compose.

    Guarantee:
        The noisy counts of all groups together are (epsilon, delta)-DP for the replacement of one
        label; delta is zero for Laplace noise. A replaced label moves two counts of one group by
        one each, so the sensitivity is 2 in L1 and sqrt(2) in L2, for any number of groups. The
        groups, their sizes and the number of labels are public.

    Source: M^Lap, Algorithm 4 of ``ghazi2023`` (appendix C.1), before its clipping; by groups,
    Algorithm 4 of ``ghazi2021``. With Gaussian noise, Algorithm 2 and Theorem 1 of ``tang2022``,
    before the largest count is taken.

    Attributes:
        epsilon: finite and above zero.
        num_classes: K, at least 2, for labels that are classes 0..K-1; None with ``values``.
        values: cells for labels that are numbers, strictly increasing, chosen without the labels;
            a label counts at its nearest value, and ties go to the smaller value.
        noise: ``"discrete_laplace"`` (whole counts), ``"laplace"`` or ``"gaussian"`` (real counts).
        delta: in (0, 1), below 1/n for n labels, for Gaussian noise; 0 for Laplace noise.

    Example:
        >>> import numpy as np
        >>> mechanism = HistogramMechanism(epsilon=1.0, values=(0.0, 10.0, 20.0))
        >>> labels = np.repeat([1.0, 12.0, 400.0], 1000)
        >>> mechanism.release(labels, rng=np.random.default_rng(0)).tolist()
        [1002, 997, 996]
    """

    purpose = "noisy counts of labels"

    num_classes: int | None = None
    values: Public[tuple[float, ...] | None] = None
    noise: str = "discrete_laplace"
    delta: float = 0.0
    receipts: tuple[Receipt, ...] = dataclasses.field(
        default=(), repr=False, compare=False, kw_only=True
    )

    _noises: ClassVar[tuple[str, ...]] = ("discrete_laplace", "laplace", "gaussian")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._take_public("values")
        if (self.num_classes is None) == (self.values is None):
            raise ValueError(
                "HistogramMechanism needs exactly one of num_classes (labels are classes) and "
                f"values (labels are numbers), got num_classes={self.num_classes} and "
                f"{'no' if self.values is None else 'some'} values."
            )
        if self.values is None:
            self._set(num_classes=_validate.integer_at_least("num_classes", self.num_classes, 2))
        else:
            values = _validate.increasing_numbers("values", self.values)
            self._set(values=tuple(values.tolist()))
        if self.noise == "gaussian":
            least, largest = _grid_steps(self.epsilon, 1), integer_noise.LARGEST_SCALE
            integer_noise.fitting_scale(least, self.epsilon, largest)
        else:
            _ = self._laplace.scale  # This raises if the noise leaves 64 bits.

    @property
    def noise_stddev(self) -> float:
        """The standard deviation of the noise on each count."""
        if self.noise == "gaussian":
            return gaussian_sigma(self.epsilon, self.delta, _L2_SENSITIVITY)
        law = self._laplace
        if self.noise == "laplace":
            return law.spread * law.scale
        return integer_noise.discrete_laplace_stddev(1.0 / law.scale)

    @property
    def _laplace(self) -> LaplaceNoise:
        return LaplaceNoise(self.epsilon, _SENSITIVITY)

    @property
    def num_cells(self) -> int:
        """The number of cells in each group."""
        return int(self.num_classes or 0) if self.values is None else len(self.values)

    def group_size(self, users: Public[Any], public_input: Public[Any] = None) -> float:
        """Returns the largest norm of a user's counts of labels by group, L2 for Gaussian noise.

        For other noise it is the L1 norm. The release moves furthest if all her labels move from
        one cell to another: by two such counts in each group.
        """
        if self.noise != "gaussian" or public_input is None:
            return super().group_size(users)
        pairs = np.stack([np.asarray(users), np.asarray(public_input)])
        (owners, _), counts = np.unique(pairs, axis=1, return_counts=True)
        return float(np.sqrt(np.bincount(owners, weights=np.square(counts)).max(initial=1.0)))

    @_validate.clears_frames
    def release(
        self, labels: Private[Any], public_input: Public[Any] = None, *, rng: Rng = None
    ) -> np.ndarray:
        """Returns the noisy counts of the labels, (cells,) or (G, cells); they may be negative.

        Args:
            labels: (n,); integers in 0..K-1, or numbers if the mechanism has ``values``.
            public_input: the group of each label, public integers (n,) in 0..G-1, where G is the
                largest group plus one; None for one histogram of all labels.
            rng: a generator for repeatable (not private) runs; None uses OpenDP's sampler with the
                operating system's random bits.

        Returns:
            ``int64`` for ``"discrete_laplace"``, else ``float64``.
        """
        return self.add_noise(self.exact_counts(labels, public_input), rng=rng)

    @_validate.clears_frames
    def exact_counts(self, labels: Private[Any], groups: Public[Any] = None) -> np.ndarray:
        """Returns the exact counts of labels, ``int64``; not private before ``add_noise``."""
        if self.values is None:
            cells = _validate.class_indices("labels", labels, self.num_cells)
        else:
            cells = nearest_index(self.values, _validate.real_vector("labels", labels))
        if groups is None:
            return np.bincount(cells, minlength=self.num_cells)
        groups = _validate.group_vector("groups", groups, cells.size, "G")
        shape = (int(groups.max(initial=-1)) + 1, self.num_cells)
        most = max(_FEW_CELLS, _CELLS_PER_LABEL * cells.size)
        if math.prod(shape) > most:
            raise ValueError(
                f"expected at most {most} counts for {cells.size} labels, got {shape[0]} groups of "
                f"{shape[1]}. Number the groups with labels from zero, or use fewer."
            )
        flat = groups * self.num_cells + cells
        return np.bincount(flat, minlength=shape[0] * shape[1]).reshape(shape)

    @_validate.clears_frames
    def add_noise(self, counts: Private[Any], *, rng: Rng = None) -> np.ndarray:
        """Returns exact counts with noise: ``release`` for counts collected in chunks.

        ``counts`` is the whole histogram: integers >= 0, (cells,) or (G, cells). Call it once. For
        Gaussian noise, more labels than its grid allows raise an error that shows no count.
        """
        counts = np.asarray(counts)
        if counts.ndim not in (1, 2) or counts.shape[-1] != self.num_cells:
            raise ValueError(
                f"counts must have shape ({self.num_cells},) or (G, {self.num_cells}), got "
                f"{counts.shape}."
            )
        if counts.dtype.kind not in "iu":
            raise TypeError(
                f"counts must be integers, got dtype {counts.dtype}. The sensitivity is that of "
                "counts, not of frequencies."
            )
        if counts.size and counts.min() < 0:
            raise ValueError("counts must not be negative. Do they contain noise already?")
        if self.noise == "gaussian":
            return self._with_gaussian_noise(counts, rng)
        exact = counts.astype(np.float64 if self.noise == "laplace" else np.int64)
        return self._laplace.add_to(exact, rng)

    def _with_gaussian_noise(self, counts: np.ndarray, rng: Rng) -> np.ndarray:
        if not counts.size:
            return counts.astype(np.float64)
        bits = _grid_bits(self.epsilon, self.delta, counts.size)
        if counts.sum(dtype=np.float64) > _MOST_STEPS >> bits:  # The number of labels is public.
            raise ValueError(
                f"there are too many labels for exact Gaussian noise on {counts.size} counts at "
                f"epsilon={self.epsilon:g}. Use fewer groups, or noise='discrete_laplace'."
            )
        steps = 1 << bits
        l2 = steps * _L2_SENSITIVITY
        scale = integer_noise.gaussian_scale(self.epsilon, self.delta, l2, counts.size)
        return DiscreteGaussian(scale).add_to(counts.astype(np.int64) * steps, rng) / float(steps)


def _grid_bits(epsilon: float, delta: float, num_counts: int) -> int:
    """Returns k such that grid steps of 2^-k counts are fine enough for ``gaussian_scale``."""
    sigma = gaussian_sigma(epsilon, delta, _L2_SENSITIVITY)
    return max(0, math.ceil(math.log2(_grid_steps(epsilon, num_counts) / sigma)))


def _grid_steps(epsilon: float, num_counts: int) -> float:
    """Returns the least sigma, in steps of the grid, that is fine enough."""
    # This ensures 140 m / sigma^2 < 1e-9 min(epsilon, 1), with a spare factor of two in sigma.
    return 2.0 * math.sqrt(1.4e11 * num_counts / min(epsilon, 1.0))
