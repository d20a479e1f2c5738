"""Which examples of a vault: the whole vault, a part of it, or labels that came later."""

from __future__ import annotations

from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._columns import Column
from tf_labeldp.accounting import PublicInput
from tf_labeldp.vault._draws import Sealed
from tf_labeldp.vault.label_kinds import LabelKind
from tf_labeldp.vault.records import Arrival


class Examples:
    """Some examples of a vault, numbered from 0: their labels, and their rows in the whole vault.

    Attributes:
        kind: the kind of the labels.
        sealed: the true labels of the whole vault.
        chosen_by: the receipts of the choice of these examples, without a value.
    """

    __slots__ = ("_among", "chosen_by", "kind", "sealed")

    def __init__(
        self,
        kind: LabelKind,
        sealed: Sealed,
        chosen_by: PublicInput[Any],
        among: np.ndarray | None = None,
    ) -> None:
        self.kind, self.sealed, self.chosen_by = kind, sealed, chosen_by
        self._among = among  # int64 (n,), rising; None for all with a label

    @property
    def is_part(self) -> bool:
        return self._among is not None

    @property
    def chosen(self) -> np.ndarray | None:
        """The rows of these examples in the whole vault, ``int64`` (n,); None for all."""
        return self.sealed.rows if self._among is None else self._among

    def __len__(self) -> int:
        return len(self.sealed) if self.chosen is None else self.chosen.size

    def rows(self, indices: Any = None) -> np.ndarray:
        """Returns the rows of some of these examples in the whole vault; None stands for all."""
        rows = np.arange(len(self)) if indices is None else _checked_rows(indices, len(self))
        return rows if self.chosen is None else self.chosen[rows]

    def part(self, indices: np.ndarray, chosen_by: PublicInput[Any]) -> Examples:
        return Examples(self.kind, self.sealed, chosen_by, self.rows(indices))

    def held_out(self, held_out: Any, users: np.ndarray | None, seed: int) -> np.ndarray:
        """Returns which examples are in the second part of a split, ``bool`` (n,)."""
        n = len(self)
        if np.ndim(held_out) == 0:
            share = _validate.number_in("held_out", held_out, "(0, 1)")
            order = np.random.default_rng(_validate.integer_at_least("seed", seed, 0))
            owners = np.arange(n) if users is None else users
            number = int(owners.max(initial=-1)) + 1
            held_out = np.isin(owners, order.permutation(number)[: round(share * number)])
        second = np.zeros(n, dtype=bool)
        second[_checked_rows(held_out, n)] = True
        if not 0 < second.sum() < n:
            raise ValueError(
                f"expected examples in both parts, got {second.sum()} held out of {n}. Change "
                "held_out."
            )
        return second

    def arrival(
        self, array: np.ndarray, labelled: np.ndarray, rows: Any, unlabelled: Any, records: int
    ) -> tuple[np.ndarray, Arrival]:
        """Returns encoded labels in the order of their rows, and their arrival.

        Args:
            array: encoded labels of new examples, or of ``rows``.
            labelled: the new examples that have one.
            rows: the examples whose labels these are; None for new examples at the end.
            unlabelled: the new examples without a label.
            records: the number of earlier records.
        """
        size = len(self.sealed)
        if not len(array):
            raise ValueError("expected at least one more example, got none.")
        if rows is None:
            return array[labelled], Arrival(size + len(array), size + labelled, records)
        came = _checked_rows(rows, size)
        if unlabelled is not None or came.size != len(array):
            raise ValueError(
                f"expected a label for each of rows, and no unlabelled=, got {len(array)} "
                f"labels and {came.size} rows. Leave out rows without a label."
            )
        if known := int(np.count_nonzero(self.sealed.arrived[came] >= 0)):
            raise ValueError(
                f"expected rows without a label, but {known} of {came.size} have one. A "
                "label is given once."
            )
        return array[np.argsort(came)], Arrival(size, np.sort(came), records)


def encoded(kind: LabelKind, labels: Any, unlabelled: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns encoded labels, and the examples that have one; the others have any label."""
    if unlabelled is None:
        array = kind.encode(labels)
        return array, np.arange(len(array))
    known = Column.of(labels)
    size = len(known)
    rows = np.setdiff1d(np.arange(size), _checked_rows(unlabelled, size))
    array = kind.any_labels(size)
    if rows.size:
        array[rows] = kind.encode(known.take(rows))
    return array, rows


def _checked_rows(indices: Any, n: int) -> np.ndarray:
    """Returns indices or a boolean mask as distinct rows in 0..n-1, ``int64`` (m,), or raises."""
    rows = np.asarray(indices)
    if rows.dtype == bool and rows.shape == (n,):
        return np.flatnonzero(rows)
    if rows.ndim != 1 or (rows.size and not np.issubdtype(rows.dtype, np.integer)):
        raise ValueError(
            f"indices must be integers of shape (m,) or a boolean mask of shape ({n},), got "
            f"dtype {rows.dtype} and shape {rows.shape}."
        )
    rows = rows.astype(np.int64)
    if rows.size and (rows.min() < 0 or rows.max() >= n):
        raise ValueError(
            f"indices must lie in 0..{n - 1}, got values from {rows.min()} to {rows.max()}."
        )
    if np.unique(rows).size != rows.size:
        raise ValueError(
            "indices name an example more than once. Name each example once; a second call of "
            "randomize draws, and charges, again."
        )
    return rows
