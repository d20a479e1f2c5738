"""Private histograms of labels, by group or of all."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.mechanisms._base import AggregateMechanism
from tf_labeldp.mechanisms._certified_laplace import certified_laplace
from tf_labeldp.mechanisms._nearest import nearest_index
from tf_labeldp.mechanisms._random import checked_generator

_NOISES = ("discrete_laplace", "laplace")
_SENSITIVITY = 2
"""L1: a replaced label leaves one cell of its group and enters another."""


@dataclasses.dataclass(frozen=True)
class HistogramMechanism(AggregateMechanism):
    """Counts labels in public cells and adds Laplace noise of scale 2/epsilon to each count.

    Privacy: all the noisy counts together, of all groups, are (epsilon, 0)-DP for the replacement
    of one label. A replaced label moves two counts of one group by one each, so the L1 sensitivity
    is 2 however many groups there are. The groups, their sizes and the number of labels are public.
    The noise comes from OpenDP, whose own privacy map certifies ``epsilon`` for L1 sensitivity 2;
    its samplers are exact (``"discrete_laplace"``) or safe in floating point (``"laplace"``).

    Source: M^Lap, Algorithm 4 of ``ghazi2023`` (appendix C.1), before its clipping, which is
    ``estimation.histogram_prior``; by groups, Algorithm 4 of ``ghazi2021``.

    Attributes:
        epsilon: finite and above zero.
        num_classes: K, at least 2, for labels that are classes 0..K-1; None with ``values``.
        values: the cells for labels that are numbers, strictly increasing, fixed without looking at
            labels; a label is counted at its nearest value, of two equally near at the smaller.
        noise: ``"discrete_laplace"`` (whole counts) or ``"laplace"`` (real ones).

    Example:
        >>> import numpy as np
        >>> mechanism = HistogramMechanism(epsilon=1.0, values=(0.0, 10.0, 20.0))
        >>> labels = np.repeat([1.0, 12.0, 400.0], 1000)
        >>> mechanism.release(labels, rng=np.random.default_rng(0)).tolist()
        [1002, 997, 996]
    """

    num_classes: int | None = None
    values: tuple[float, ...] | None = None
    noise: str = "discrete_laplace"

    def __post_init__(self) -> None:
        """Checks the ranges."""
        super().__post_init__()
        if (self.num_classes is None) == (self.values is None):
            raise ValueError(
                "HistogramMechanism needs exactly one of num_classes (labels are classes) and "
                f"values (labels are numbers), got num_classes={self.num_classes} and "
                f"{'no' if self.values is None else 'some'} values."
            )
        if self.values is None:
            classes = _validate.integer_at_least("num_classes", self.num_classes, 2)
            object.__setattr__(self, "num_classes", classes)
        else:
            values = _validate.increasing_numbers("values", self.values)
            object.__setattr__(self, "values", tuple(values.tolist()))
        if self.noise not in _NOISES:
            raise ValueError(f"noise must be one of {', '.join(_NOISES)}, got {self.noise!r}.")

    @property
    def num_cells(self) -> int:
        """The number of cells of each group."""
        return int(self.num_classes or 0) if self.values is None else len(self.values)

    def release(
        self, labels: Any, public_input: Any = None, *, rng: np.random.Generator | None = None
    ) -> np.ndarray:
        """Returns the noisy counts of the labels.

        Args:
            labels: (n,); integers in 0..K-1, or numbers if the mechanism has ``values``.
            public_input: the group of each label, public integers (n,) in 0..G-1; None for one
                histogram of all. G is the largest one plus one.
            rng: a generator for repeatable (not private) runs; None takes OpenDP's sampler, which
                draws from the operating system's random bits and cannot be seeded.

        Returns:
            ``int64`` (``float64`` for ``"laplace"``), (cells,), or (G, cells) with groups; negative
            counts are possible. No charge is made here: ``PrivateLabels.release`` makes it.

        Raises:
            TypeError: labels, groups or ``rng`` of a wrong kind.
            ValueError: labels or groups out of range or of a wrong shape.
        """
        return self.add_noise(self._count(labels, public_input), rng=rng)

    def add_noise(self, counts: Any, *, rng: np.random.Generator | None = None) -> np.ndarray:
        """Returns exact counts with noise: ``release`` for counts that were collected in chunks.

        Args:
            counts: integers of at least zero, (cells,) or (G, cells): the whole histogram, once.
            rng: as in ``release``.

        Returns:
            Noisy counts of the same shape, as in ``release``.

        Raises:
            TypeError: the counts are not integers, or ``rng`` of a wrong kind.
            ValueError: negative counts, or a wrong shape.
        """
        counts = np.asarray(counts)
        if counts.ndim not in (1, 2) or counts.shape[-1] != self.num_cells:
            raise ValueError(
                f"counts must have shape ({self.num_cells},) or (G, {self.num_cells}), got "
                f"{counts.shape}."
            )
        if counts.dtype.kind not in "iu":
            raise TypeError(
                f"counts must be integers, got dtype {counts.dtype}: the sensitivity is that of "
                "counts, not of frequencies."
            )
        if counts.size and counts.min() < 0:
            raise ValueError("counts must not be negative. Noise was added already, or they wrap.")
        kind = np.int64 if self.noise == "discrete_laplace" else np.float64
        exact = counts.astype(kind)
        if rng is not None:
            return exact + _seeded_noise(self.noise, self.epsilon, exact.shape, rng)
        measure, _ = _certified_measurement(self.noise, self.epsilon)
        return np.array(measure(exact.ravel().tolist()), dtype=kind).reshape(exact.shape)

    def _count(self, labels: Any, groups: Any) -> np.ndarray:
        """Returns the exact counts, which are not private."""
        if self.values is None:
            cells = _validate.class_indices("labels", labels, self.num_cells)
        else:
            cells = nearest_index(self.values, _validate.real_vector("labels", labels))
        if groups is None:
            return np.bincount(cells, minlength=self.num_cells)
        groups = _checked_groups(groups, cells.size)
        shape = (int(groups.max(initial=-1)) + 1, self.num_cells)
        flat = groups * self.num_cells + cells
        return np.bincount(flat, minlength=shape[0] * shape[1]).reshape(shape)


def _checked_groups(groups: Any, size: int) -> np.ndarray:
    """Returns public groups as ``int64`` (n,), or raises."""
    array = np.asarray(groups)
    if array.shape != (size,):
        raise ValueError(f"groups must have shape ({size},), one a label, got {array.shape}.")
    if array.dtype.kind not in "iu":
        raise TypeError(f"groups must be integers 0..G-1, got dtype {array.dtype}.")
    if array.size and array.min() < 0:
        raise ValueError(
            f"groups must be in 0..G-1, got {int(array.min())}. Number them from zero."
        )
    return array.astype(np.int64)


def _certified_measurement(noise: str, epsilon: float) -> tuple[Any, float]:
    """Returns OpenDP's Laplace measurement of a vector, and the scale that makes it epsilon-DP."""
    import opendp.prelude as dp

    # OpenDP asks for this before any component whose written proof is not finished.
    dp.enable_features("contrib")
    # The type is said twice and in full: T=int would be 32 bits, at which counts saturate.
    moved: float
    if noise == "discrete_laplace":
        space, moved = (dp.vector_domain(dp.atom_domain(T="i64")), dp.l1_distance(T="i64")), 2
    else:
        atoms = dp.atom_domain(T="f64", nan=False)
        space, moved = (dp.vector_domain(atoms), dp.l1_distance(T="f64")), 2.0
    return certified_laplace(space, _SENSITIVITY / epsilon, moved, epsilon)


def _seeded_noise(
    noise: str, epsilon: float, shape: tuple[int, ...], rng: np.random.Generator
) -> np.ndarray:
    """Returns noise of the same law from a generator: repeatable, and so not private."""
    rng = checked_generator(rng)
    if noise == "laplace":
        return rng.laplace(scale=_SENSITIVITY / epsilon, size=shape)
    # The difference of two geometric variables has P[k] proportional to e^(-|k| epsilon / 2).
    success = -math.expm1(-epsilon / _SENSITIVITY)
    return rng.geometric(success, shape) - rng.geometric(success, shape)
