"""Columns of a table as the numbers and codes that trees split."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import sparse

from tf_labeldp.accounting import PublicInput
from tf_labeldp.boosting._mean_columns import with_means
from tf_labeldp.boosting._targets import TableLabels
from tf_labeldp.features import TableCodes
from tf_labeldp.vault import LabelKind


@dataclasses.dataclass(frozen=True, eq=False)
class CodedTable:
    """The rows of a table with their coder; sparse rows have none."""

    rows: Any  # float32 (n, p), or a CSR matrix
    coder: TableCodes | None

    @classmethod
    def read(cls, public: PublicInput[Any], categorical: Sequence[str | int] | None) -> CodedTable:
        features = public.value
        if sparse.issparse(features):
            coder, rows = None, sparse.csr_matrix(features, dtype=np.float32)
            if np.isinf(rows.data).any():
                raise ValueError(
                    "expected finite features, got infinite ones in a sparse matrix. Make them "
                    "numbers, or NaN where they are missing. Nothing was drawn."
                )
        else:
            coder = TableCodes(categorical).fit(public)
            rows = coder.transform(features)
        found = cls(rows, coder)
        found._check_varies()
        return found

    def _check_varies(self) -> None:
        # Each fold must have examples on both sides of a split.
        least, size = 2 * self.min_rows, self.rows.shape[0]
        columns = self.rows if self.coder is not None else self.rows.tocsc()
        if not any(_least_common(columns, place) >= least for place in range(columns.shape[1])):
            raise ValueError(
                f"expected a column in which at least {least} examples differ from the others, got "
                f"constant columns alone, or nearly constant ones (n_samples={size}). Check how "
                "they were computed. Nothing was drawn."
            )

    @property
    def is_code(self) -> np.ndarray:
        """Which columns are codes of categories, bool (p,)."""
        if self.coder is None:
            return np.zeros(self.rows.shape[1], bool)
        return self.coder.categorical_

    @property
    def min_rows(self) -> int:
        """The fewest examples per leaf."""
        return int(np.clip(self.rows.shape[0] // 50, 5, 100))

    def take(self, places: Any) -> CodedTable:
        return CodedTable(self.rows[places], self.coder)

    def with_means(self, features: Any, labels: TableLabels, seed: int) -> CodedTable:
        """Returns the rows of the labels with means in place of hashed categories.

        Args:
            features: the table of ``fit``.
            labels: numbers or two classes, by row of this table.
            seed: public seed of the parts.
        """
        if self.coder is None or not self.coder.hashed_:
            return self
        coder, means = with_means(self.coder, features, labels, seed)
        rows = self.rows.copy() if means else self.rows
        for place, column in means.items():
            rows[:, place] = column
        return CodedTable(rows, coder)

    def monotonic(
        self, constraints: Mapping[str | int, int] | None, kind: LabelKind
    ) -> list[int] | None:
        """Returns -1, 0 or 1 for each column; None without constraints."""
        if constraints is None:
            return None
        if (kind.num_classes or 2) > 2:
            raise ValueError(
                f"expected two classes or numbers with monotonic_cst, got {kind.describe()}, whose "
                "probabilities sum to one. Leave it out."
            )
        is_code, coder = self.is_code, self.coder
        names = range(is_code.size) if coder is None else [column.name for column in coder.columns_]
        places = {name: place for place, name in enumerate(names)}
        found = [0] * is_code.size
        for name, sign in constraints.items():
            if name not in places or is_code[places[name]] or sign not in (-1, 0, 1):
                raise ValueError(
                    "expected monotonic_cst as a dict of -1, 0 or 1 by columns of numbers, got "
                    f"{name!r}: {sign!r}. Choose from "
                    f"{', '.join(repr(n) for n, place in places.items() if not is_code[place])}."
                )
            found[places[name]] = sign
        return found


def _least_common(columns: Any, place: int) -> int:
    """Returns the number of examples that differ from the median of a column."""
    column = columns[:, [place]]
    column = (column.toarray() if sparse.issparse(column) else column).ravel()
    missing = np.isnan(column)
    if missing.all():
        return 0
    return int(np.count_nonzero(missing | (column != np.median(column[~missing]))))
