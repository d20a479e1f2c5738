"""Which examples of a vault: the whole vault, a part of it, or labels that came later."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tf_labeldp._columns import Column
from tf_labeldp.accounting import PublicInput, public_input
from tf_labeldp.mechanisms import LabelMechanism, PeerToPeerRandomizedResponse
from tf_labeldp.vault._draws import Sealed
from tf_labeldp.vault.label_kinds import LabelKind
from tf_labeldp.vault.noisy_labels import NoisyLabels
from tf_labeldp.vault.records import Arrival, Record


@dataclasses.dataclass(frozen=True, eq=False)
class VaultPart:
    """The whole vault or some of its examples, numbered from 0: their labels, and their rows.

    Attributes:
        kind: the kind of the labels.
        sealed: the true labels of the whole vault.
        chosen_by: the receipts of the choice of these examples, without a value.
        part: the rows, ``int64`` (n,), of a part of the vault; None for all with a label.
    """

    kind: LabelKind
    sealed: Sealed
    chosen_by: PublicInput[Any]
    part: np.ndarray | None = None

    @property
    def chosen(self) -> np.ndarray | None:
        """The rows of these examples in the whole vault, ``int64`` (n,); None for all."""
        return self.sealed.rows if self.part is None else self.part

    @property
    def rows(self) -> np.ndarray:
        """The rows of these examples in the whole vault, ``int64`` (n,)."""
        return np.arange(len(self.sealed)) if self.chosen is None else self.chosen

    def __len__(self) -> int:
        return len(self.sealed) if self.chosen is None else self.chosen.size

    def some(self, indices: Any = None) -> VaultPart:
        """Returns the examples that public indices or a mask name, in their order; None for all."""
        rows, public = PublicInput.bare(indices), public_input(indices, self.chosen_by)
        part = self.part if rows is None else self.rows[_checked_rows(rows, len(self))]
        return dataclasses.replace(self, chosen_by=public.with_value(None), part=part)

    def numbers(self, rows: np.ndarray) -> np.ndarray:
        """Returns the numbers of rows of the whole vault among these examples, which rise."""
        return rows if self.chosen is None else np.searchsorted(self.chosen, rows)

    def noisy_labels(self, record: Record, mechanism: LabelMechanism) -> NoisyLabels:
        """Returns the noisy labels of a record of a draw for some of these examples."""
        values, indices = np.asarray(record.values), self.numbers(record.indices)
        is_part = self.chosen is not None and bool(np.any(self.chosen != np.arange(len(self))))
        if isinstance(mechanism, PeerToPeerRandomizedResponse):
            # A negative value stands for a peer that does not report.
            values, indices = values[values >= 0], indices[values >= 0]
        priors, names = record.priors, self.kind.names
        return NoisyLabels(
            values, indices, mechanism, priors, record.receipts, classes=names, of_part=is_part
        )

    def split(self, second: VaultPart) -> tuple[VaultPart, VaultPart]:
        """Returns the other examples, and the second ones, both in the order of the vault."""
        is_second = np.isin(self.rows, second.rows)
        if not 0 < len(second) < len(self):
            raise ValueError(
                f"expected examples in both parts, got {len(second)} held out of {len(self)}. "
                "Change held_out."
            )
        first = dataclasses.replace(second, part=self.rows[~is_second])
        return first, dataclasses.replace(second, part=self.rows[is_second])

    def arrival(
        self, array: np.ndarray, new: Arrival, rows: Any, records: int
    ) -> tuple[np.ndarray, Arrival]:
        """Returns encoded labels in the order of their rows, and their arrival.

        Args:
            array: encoded labels of new examples, or of ``rows``.
            new: the arrival of new examples in an empty vault.
            rows: the examples whose labels these are; None for new examples at the end.
            records: the number of earlier records.
        """
        size = len(self.sealed)
        if not len(array):
            raise ValueError("expected at least one more example, got none.")
        if rows is None:
            return array[new.rows], Arrival(size + new.total, size + new.rows, records)
        came = _checked_rows(rows, size)
        if came.size != len(array):
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


def encoded(kind: LabelKind, labels: Any, unlabelled: Any) -> tuple[np.ndarray, Arrival]:
    """Returns encoded labels, any label for the unlabelled examples, and the arrival of others."""
    if unlabelled is None:
        array = kind.encode(labels)
        return array, Arrival(len(array), np.arange(len(array)))
    known = Column.of(labels)
    size = len(known)
    rows = np.setdiff1d(np.arange(size), _checked_rows(unlabelled, size))
    array = kind.any_labels(size)
    if rows.size:
        array[rows] = kind.encode(known.take(rows))
    return array, Arrival(size, rows)


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
