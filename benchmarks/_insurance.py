"""Two public insurance data sets as regression problems, with public features and a private label.

``beMTPL97``: the amount of a motor liability claim; ``pg15training``: the number of material damage
claims of a policy. Both come from the R package CASdatasets.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
from collections.abc import Mapping

import numpy as np
from _datasets import FOLDER

RARE = 5
"""Rows. Categories with fewer share one code (ghazi2023, E.1)."""
PERCENTILE = 95
"""Amounts are clipped at this percentile (ghazi2023, section 4.1)."""


@dataclasses.dataclass(frozen=True)
class InsuranceData:
    """Features and labels of one data set, before a split.

    Attributes:
        name: the name of the file.
        codes: categories as integers below their column's vocabulary size, ``int32`` (n, c).
        vocabulary_sizes: the sizes of the c columns.
        numbers: standardised numeric columns, ``float32`` (n, m).
        labels: true labels, ``float64`` (n,), clipped to the range.
        low: the smallest label, public.
        high: the largest label, public.
        counts: whether labels are integers.
        unit: the unit of a label, in words.
    """

    name: str
    codes: np.ndarray
    vocabulary_sizes: tuple[int, ...]
    numbers: np.ndarray
    labels: np.ndarray
    low: float
    high: float
    counts: bool
    unit: str

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self.labels)


@dataclasses.dataclass(frozen=True)
class _Columns:
    """The columns of a file that are used, by their use."""

    label: str
    categories: tuple[str, ...]
    numbers: tuple[str, ...]
    only_claims: bool
    unit: str


# beMTPL97: `claim`, `nclaims` and `average` (amount / nclaims) come from the same claims as the
# label, so a party without labels does not have them either. pg15training: `Indtppd` is the cost of
# the claims that the label counts, `Numtpbi` and `Indtpbi` are their bodily injuries.
COLUMNS = {
    "beMTPL97": _Columns(
        label="amount",
        categories=("coverage", "sex", "fuel", "use", "fleet", "postcode"),
        numbers=("expo", "ageph", "bm", "power", "agec", "long", "lat"),
        only_claims=True,
        unit="amount of the claims",
    ),
    "pg15training": _Columns(
        label="Numtppd",
        categories=(
            "CalYear", "Gender", "Type", "Category", "Occupation", "Adind", "SubGroup2", "Group2",
        ),
        numbers=("Age", "Group1", "Bonus", "Poldur", "Value", "Density", "Exppdays"),
        only_claims=False,
        unit="number of claims",
    ),
}  # fmt: skip


def load(name: str) -> InsuranceData:
    """Returns one of the data sets."""
    columns = COLUMNS[name]
    rows = _read(name)
    labels = rows[columns.label].astype(np.float64)
    # Like the conversions of the paper, the existence of a claim is public.
    if columns.only_claims:
        rows = {column: values[labels > 0] for column, values in rows.items()}
        labels = labels[labels > 0]
        high = float(np.percentile(labels, PERCENTILE))
    else:
        # The description of the data set has the range 0..7.
        high = float(labels.max())
    codes, sizes = _encode({column: rows[column] for column in columns.categories})
    numbers = np.stack([rows[column].astype(np.float64) for column in columns.numbers], axis=1)
    numbers = (numbers - numbers.mean(axis=0)) / numbers.std(axis=0)
    return InsuranceData(
        name=name,
        codes=codes,
        vocabulary_sizes=sizes,
        numbers=numbers.astype(np.float32),
        labels=np.minimum(labels, high),
        low=0.0,
        high=high,
        counts=not columns.only_claims,
        unit=columns.unit,
    )


def column(name: str, column: str) -> np.ndarray:
    """Returns a column of numbers of all rows of a data set."""
    return _read(name)[column].astype(np.float64)


def split(num_rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the row numbers of 80 % training and 20 % test data."""
    order = np.random.default_rng(seed).permutation(num_rows)
    num_train = int(0.8 * num_rows)
    return order[:num_train], order[num_train:]


def _read(name: str) -> dict[str, np.ndarray]:
    """Returns the columns of a data set's CSV file, as text."""
    path = FOLDER / "insurance" / f"{name}.csv.gz"
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    return {
        column: np.array(cells)
        for column, cells in zip(header, zip(*rows, strict=True), strict=True)
    }


def _encode(columns: Mapping[str, np.ndarray]) -> tuple[np.ndarray, tuple[int, ...]]:
    """Returns codes 0 (rare values), 1, 2, ... of each column, and the vocabulary sizes."""
    codes, sizes = [], []
    for values in columns.values():
        _, inverse, occurrences = np.unique(values, return_inverse=True, return_counts=True)
        frequent = occurrences >= RARE
        codes.append(np.where(frequent, np.cumsum(frequent), 0)[inverse])
        sizes.append(int(frequent.sum()) + 1)
    return np.stack(codes, axis=1).astype(np.int32), tuple(sizes)
