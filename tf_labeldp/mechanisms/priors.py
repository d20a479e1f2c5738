"""Priors: public probabilities of labels, with the receipts of their sources."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import PrivacyGuarantee, Public, Receipt, Receipts, Setting, public_input

_WARP = math.expm1(4.0)
"""54: the widest step of a grid from zero is 55 times the narrowest."""


@dataclasses.dataclass(frozen=True, eq=False)
class Priors:
    """Probabilities of labels, with the receipts of the releases that they were made of.

    Use them like an array: ``numpy.asarray(priors)`` has a row for each label. Pass them to
    ``PrivateLabels.randomize(..., priors=)``, and the noisy labels carry their receipts. An array
    of probabilities carries none: the statement then names the assumption that it was made without
    the labels.

    Attributes:
        probabilities: (K,) for all labels; (n, K), a row for each; or, with ``groups``, (C, K).
        groups: row of each label, integers (n,) in 0..C-1; None without groups.
        values: for labels that are numbers, the values (K,) of the probabilities; else None.
        shift: public predictions (n,) of numbers that a draw of residuals subtracted: the values of
            label i are ``values + shift[i]``; None without.
        receipts: receipts of the releases; empty for public knowledge.

    Example:
        >>> priors = Priors(np.array([[0.9, 0.1], [0.2, 0.8]]), groups=np.array([0, 1, 1]))
        >>> np.asarray(priors).shape
        (3, 2)
    """

    probabilities: Public[np.ndarray]
    groups: Public[np.ndarray | None] = None
    values: Public[np.ndarray | None] = None
    receipts: tuple[Receipt, ...] = ()
    shift: Public[np.ndarray | None] = None

    def __post_init__(self) -> None:
        """Takes the values of public inputs, and merges their receipts."""
        public = public_input(self.probabilities, self.groups, self.values, self.shift)
        names = ("probabilities", "groups", "values", "shift")
        for name, value in zip(names, public.value, strict=True):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "receipts", Receipts.merged(self.receipts, public.receipts))

    @classmethod
    def of(cls, priors: Public[Any]) -> Priors:
        """Returns ``Priors`` from an array or from ``Priors``, with the receipts of the input."""
        public = public_input(priors)
        if isinstance(public.value, cls):
            if not public.receipts:
                return public.value
            return dataclasses.replace(public.value, receipts=public.receipts)
        return cls(np.asarray(public.value, dtype=np.float64), receipts=public.receipts)

    @staticmethod
    def rounding_grid(
        low: float, high: float, max_values: int, *, whole_numbers: bool = False
    ) -> np.ndarray:
        """Returns rising values, both ends included, to which labels in [low, high] are rounded.

        * Whole ends with at most ``max_values`` integers between them: equally spaced values that
          include these integers, or the integers alone if the labels are ``whole_numbers``.
        * Amounts (``low`` at least zero): ``max_values`` values with equal steps in
          ``log(value + high / 54)``, which resolve small amounts: from zero, the steps grow from
          0.12 to 4 times the step of an equally spaced grid.
        * Other numbers: ``max_values`` equally spaced values.

        The expected loss of the best mechanism for rounded labels exceeds that of the best
        epsilon-DP mechanism for the labels by at most ``L * step``, where ``step`` is the widest
        step and L the Lipschitz constant of ``loss(y_hat, y)`` in y: Lemma 16 of ``ghazi2023``
        (appendix A.1).
        """
        low, high = _validate.number_range(low, high)
        number = _validate.integer_at_least("max_values", max_values, 2)
        width = high - low
        if low.is_integer() and high.is_integer() and width + 1.0 <= number:
            steps_per_unit = 1 if whole_numbers else int((number - 1) // width)
            values = np.linspace(low, high, int(width) * steps_per_unit + 1)
        elif low >= 0.0:
            offset = high / _WARP
            values = np.geomspace(low + offset, high + offset, number) - offset
            values[[0, -1]] = low, high
        else:
            values = np.linspace(low, high, number)
        if not np.all(np.diff(values) > 0.0):
            raise ValueError(
                f"there are no {number} distinct doubles from {low!r} to {high!r}. Lower "
                "max_values."
            )
        return values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        rows = np.asarray(self.probabilities, dtype=np.float64 if dtype is None else dtype)
        if self.groups is not None:
            return rows[self.groups]
        return rows.copy() if copy else rows

    def shifted(self, numbers: Setting[np.ndarray]) -> np.ndarray:
        """Returns estimates (n,) of labels, for those of residuals if there is a shift."""
        return numbers if self.shift is None else numbers + self.shift

    def guarantee(self, delta: float | None = None) -> PrivacyGuarantee:
        """Returns the statement of the releases that these priors were made from."""
        return Receipts(self.receipts).guarantee(delta)

    def digest(self) -> str:
        """Returns the digest of probabilities and groups, by which a vault compares priors."""
        arrays = [self.probabilities] if self.groups is None else [self.probabilities, self.groups]
        found = hashlib.sha256()
        for array, dtype in zip(arrays, ("<f8", "<i8"), strict=False):
            plain = np.ascontiguousarray(array, dtype=dtype)
            found.update(f"{plain.dtype.str}{plain.shape}".encode())
            found.update(plain.tobytes())
        return found.hexdigest()

    def checked_groups(self, size: int) -> np.ndarray | None:
        """Returns the groups as ``int64`` (n,), or None; raises if they don't fit."""
        if self.groups is None:
            return None
        groups = _validate.group_vector("the groups of priors", self.groups, size)
        count = np.atleast_2d(self.probabilities).shape[0]
        if size and groups.max() >= count:
            raise ValueError(
                f"the groups of priors must lie in 0..{count - 1}, the rows of the priors, got "
                f"{groups.max()}."
            )
        return groups


@dataclasses.dataclass(frozen=True)
class PriorRows:
    """Checked priors of labels, never expanded.

    ``rows`` is ``float64`` (m, K); ``groups`` is the row of each label, ``int64`` (n,), or None if
    each label has its own row.
    """

    rows: np.ndarray
    groups: np.ndarray | None

    @classmethod
    def of(cls, priors: Any, size: int | None, mechanism: Any) -> PriorRows:
        """Returns the checked priors of ``size`` labels of a mechanism for classes, or raises.

        ``size=None`` allows any number of labels.
        """
        num_classes = mechanism.num_classes
        if isinstance(priors, Priors) and priors.groups is not None:
            groups = priors.checked_groups(np.size(priors.groups) if size is None else size)
            rows = _validate.prior_rows("priors", priors.probabilities, None, num_classes)
            return cls(rows, groups)
        rows = _validate.prior_rows("priors", priors, size, num_classes)
        shared = size is not None and rows.shape[0] == 1
        return cls(rows, np.broadcast_to(np.int64(0), (size or 0,)) if shared else None)

    def of_labels(self, some: slice) -> np.ndarray:
        """Returns the rows of some labels, or one row (1, K) if all labels share it."""
        if self.groups is None:
            return self.rows[some]
        return self.rows if self.rows.shape[0] == 1 else self.rows[self.groups[some]]

    def by_label(self, of_rows: np.ndarray) -> np.ndarray:
        """Returns the value of each label's row."""
        return of_rows if self.groups is None else of_rows[self.groups]
