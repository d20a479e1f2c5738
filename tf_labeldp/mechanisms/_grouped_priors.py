"""Priors that many labels share, and so need not be written out for each."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class GroupedPriors:
    """Priors that many labels share, in the memory of the rows alone: (C, K) instead of (n, K).

    Attributes:
        rows: the different priors, (C, K).
        groups: which row is the prior of each label, integers (n,) in 0..C-1.

    Example:
        >>> from tf_labeldp.mechanisms import PriorResampling
        >>> priors = GroupedPriors(np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([0, 1, 1]))
        >>> PriorResampling(epsilon=1.0, num_classes=2).randomize([0, 1, 1], priors).shape
        (3,)
    """

    rows: np.ndarray
    groups: np.ndarray

    def digest(self) -> str:
        """Returns what a vault knows these priors by."""
        parts = hashlib.sha256(repr((np.shape(self.rows), np.shape(self.groups))).encode())
        parts.update(np.ascontiguousarray(self.rows, dtype="<f8").tobytes())
        parts.update(np.ascontiguousarray(self.groups, dtype="<i8").tobytes())
        return parts.hexdigest()

    def matches(self, digest: str) -> bool:
        """Returns whether these are the priors with that digest."""
        return self.digest() == digest

    def checked_groups(self, size: int) -> np.ndarray:
        """Returns the groups as ``int64`` (n,), or raises."""
        groups, count = np.asarray(self.groups), np.atleast_2d(self.rows).shape[0]
        if groups.shape != (size,) or groups.dtype.kind not in "iu":
            raise ValueError(
                f"the groups of priors must be integers of shape ({size},), one a label, got dtype "
                f"{groups.dtype} and shape {groups.shape}."
            )
        if size and not 0 <= int(groups.min()) <= int(groups.max()) < count:
            raise ValueError(
                f"the groups of priors must lie in 0..{count - 1}, a row of the priors for each, "
                f"got values from {int(groups.min())} to {int(groups.max())}."
            )
        return groups.astype(np.int64)
