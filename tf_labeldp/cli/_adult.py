"""UCI Adult, the census data set: is a person's yearly income above 50,000 dollars?"""

from __future__ import annotations

import csv
import pathlib

import numpy as np

from tf_labeldp.cli import _datasets, _tabular
from tf_labeldp.cli._errors import DatasetError

# Numeric columns as float, categorical ones as text; '?' (unknown) is a category of its own.
COLUMNS = {
    "age": float, "workclass": str, "fnlwgt": float, "education": str, "education-num": float,
    "marital-status": str, "occupation": str, "relationship": str, "race": str, "sex": str,
    "capital-gain": float, "capital-loss": float, "hours-per-week": float, "native-country": str,
}  # fmt: skip
CLASSES = ("<=50K", ">50K")


def load(data_dir: pathlib.Path) -> _datasets.ClassificationData:
    """Returns Adult from ``adult/adult.data(.gz)`` and ``adult/adult.test(.gz)``."""
    folder = data_dir / "adult"
    train, y_train = _read(folder, "adult.data")
    test, y_test = _read(folder, "adult.test")
    x_train, x_test = _tabular.encode(train, test)
    return _datasets.ClassificationData("adult", x_train, y_train, x_test, y_test, CLASSES)


def _read(folder: pathlib.Path, name: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns the columns and the ``int64`` labels of one file."""
    text = _datasets.read_file(folder, name).decode("utf-8", errors="replace")
    # The test file begins with a comment, both end with empty lines.
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("|")]
    rows = list(csv.reader(lines, skipinitialspace=True))
    if not rows or any(len(row) != len(COLUMNS) + 1 for row in rows):
        raise DatasetError(
            f"{folder / name} must have {len(COLUMNS) + 1} columns in every line; copy it again"
        )
    *values, labels = zip(*rows, strict=True)
    try:
        columns = {
            column: np.array([kind(value) for value in cells])
            for (column, kind), cells in zip(COLUMNS.items(), values, strict=True)
        }
        codes = [CLASSES.index(label.rstrip(".")) for label in labels]
    except ValueError as error:
        raise DatasetError(
            f"{folder / name} has a number or a label that is none; copy it again"
        ) from error
    return columns, np.array(codes, dtype=np.int64)
