"""The charges of each example of a label set."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from tf_labeldp.accounting.budget import Charge, CountedCharges
from tf_labeldp.accounting.receipt import Examples


class ChargesByExample:
    """The charges of each of n examples of one label set.

    Examples that arrive later have no charge, except those of a set whose size is unknown.
    """

    # Labels are many and different charges few, so examples with equal charges share a row.
    # Between calls:
    # - The charges of an example are those in `_of_any` and `_of_all` and those of its row.
    # - `_sizes[row]` examples have this row, and the sizes sum to `size`.
    # - `_place` finds each row with examples by its charges, so that no two such rows are equal.
    # - A row without examples is in `_free`, and is the next to be filled.
    def __init__(self, size: int) -> None:
        self._of_all: Counter[Charge] = Counter()
        self._of_any: Counter[Charge] = Counter()  # of all examples, also later ones
        self._rows: list[CountedCharges] = [()]
        self._sizes = [size]
        self._free: list[int] = []
        self._place: dict[frozenset[tuple[Charge, int]], int] = {frozenset(): 0}
        self._rows_of: np.ndarray | None = None  # of each example; None while all have row 0
        self.size = size

    @property
    def _row_of(self) -> np.ndarray:
        """The row of each example, in the smallest type."""
        if self._rows_of is None:
            self._rows_of = np.zeros(self.size, np.uint8)
        kind = np.result_type(self._rows_of.dtype, np.min_scalar_type(len(self._rows)))
        self._rows_of = self._rows_of.astype(kind, copy=False)
        return self._rows_of

    def add(self, charge: Charge, examples: Any = None, size: int | None = None) -> None:
        """Charges these examples, by indices or a mask; None for all.

        ``size`` is the number of all examples at the time of the charge, and zero if it is unknown.
        """
        if examples is None and size == 0:
            self._of_any[charge] += 1
            return
        if examples is None and size is not None and size < self.size:
            examples = np.arange(size)
        if examples is None:
            self._of_all[charge] += 1
            return
        # The bits of a large set are unpacked in blocks: its indices take 8 bytes per example.
        whole = None if isinstance(examples, Examples) else [np.asarray(examples)]
        moved = np.zeros(len(self._rows), np.int64)
        for where in whole or examples.parts():
            moved += np.bincount(self._row_of[where], minlength=len(self._rows))
        new_row = np.zeros(len(self._rows), dtype=np.int32)
        for old in np.flatnonzero(moved):  # loops over a few rows, not over examples
            new_row[old] = self._row(sum_of(self._rows[old], ((charge, 1),)))
            self._sizes[new_row[old]] += int(moved[old])
        for where in whole or examples.parts():
            self._row_of[where] = new_row[self._row_of[where]]
        # This comes last, so that an interrupt may leave a charge too many, never one too few.
        for old in np.flatnonzero(moved):
            self._sizes[old] -= int(moved[old])
            if self._sizes[old] == 0:
                del self._place[frozenset(self._rows[old])]
                self._free.append(int(old))

    def _row(self, charges: CountedCharges) -> int:
        name = frozenset(charges)
        if name not in self._place:
            if not self._free:
                self._free.append(len(self._rows))
                self._rows.append(())
                self._sizes.append(0)
            place = self._free.pop()
            self._rows[place] = charges
            self._place[name] = place
        return self._place[name]

    def spread(self) -> list[tuple[CountedCharges, int]]:
        """Returns the charges of each row with the number of its examples."""
        pairs = zip(self._rows, self._sizes, strict=True)
        return [(self._with_all(row), size) for row, size in pairs if size]

    def distinct(self, examples: Any = None) -> list[CountedCharges]:
        """Returns the different charges of examples, by indices or a mask; None for all."""
        if examples is None:
            return [charges for charges, _ in self.spread()]
        if self._rows_of is None:
            mask = np.asarray(examples)
            is_any = mask.any() if mask.dtype == bool else mask.size
            return [self._with_all(self._rows[0])] if is_any else []
        rows = np.flatnonzero(np.bincount(self._row_of[examples]))
        return [self._with_all(self._rows[row]) for row in rows]

    def _with_all(self, row: CountedCharges) -> CountedCharges:
        return sum_of(tuple(self._of_any.items()), tuple(self._of_all.items()), row)

    def grow(self, size: int) -> None:
        """Adds examples up to this number, which have no charge yet."""
        if (more := size - self.size) > 0:
            is_one_row = self._rows_of is None and not self._of_all
            self._sizes[0] += more if is_one_row else 0
            self.size = size
            if is_one_row:
                return
            row_of = np.zeros(size - more, np.uint8) if self._rows_of is None else self._rows_of
            # What was charged to all examples so far moves to their rows: new examples lack it.
            of_all, self._of_all = tuple(self._of_all.items()), Counter()
            if of_all:
                self._rows = [sum_of(of_all, row) for row in self._rows]
                pairs = zip(self._rows, self._sizes, strict=True)
                self._place = {frozenset(row): at for at, (row, count) in enumerate(pairs) if count}
            row = self._row(())
            self._sizes[row] += more
            kind = np.result_type(row_of.dtype, np.min_scalar_type(row))
            self._rows_of = np.append(row_of.astype(kind, copy=False), np.full(more, row, kind))

    def copy(self) -> ChargesByExample:
        """Returns an independent copy."""
        found = ChargesByExample(0)
        found._of_all, found._of_any = self._of_all.copy(), self._of_any.copy()
        found._place = self._place.copy()
        found._rows, found._sizes = self._rows.copy(), self._sizes.copy()
        found._free = self._free.copy()
        found._rows_of = None if self._rows_of is None else self._rows_of.copy()
        found.size = self.size
        return found


def sum_of(*several: CountedCharges) -> CountedCharges:
    """Returns charges together, each with the sum of its counts."""
    several = tuple(filter(None, several))
    if len(several) == 1:
        return several[0]
    counts: Counter[Charge] = Counter()
    for charges in several:
        counts.update(dict(charges))
    return tuple(counts.items())
