"""Columns of numbers and of text as one array of floats; the columns are features, never labels."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def encode(
    train: Mapping[str, np.ndarray], test: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns training and test features, with scales and categories taken from training.

    Args:
        train: columns by name: numbers (n, ...) are flattened and standardised, text (n,) becomes
            one column a category.
        test: the same columns. A category that training lacks is all zeros.

    Returns:
        ``float32`` arrays of shapes (n, d) and (m, d).
    """
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    parts_train, parts_test = [], []
    for name, column in train.items():
        other = test[name]
        if column.dtype.kind in "biuf":
            encoder = StandardScaler()
            rows, other_rows = column.reshape(len(column), -1), other.reshape(len(other), -1)
        else:
            encoder = OneHotEncoder(sparse_output=False, handle_unknown="ignore")
            rows, other_rows = column[:, np.newaxis], other[:, np.newaxis]
        parts_train.append(encoder.fit_transform(rows))
        parts_test.append(encoder.transform(other_rows))
    return (
        np.concatenate(parts_train, axis=1).astype(np.float32),
        np.concatenate(parts_test, axis=1).astype(np.float32),
    )
