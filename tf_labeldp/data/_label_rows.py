"""Labels of training batches: of a vault, which stays closed until training, or an array."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tf_labeldp.data._row_source import kept_dtype
from tf_labeldp.vault import PrivateLabels
from tf_labeldp.vault._private_labels import labels_for_training


class LabelRows:
    """The labels of n examples, in the dtype of batches.

    Args:
        labels: a vault, or an array (n, ...) of finite numbers, which is copied.
        num_rows: n.

    Attributes:
        vault: the vault, or None.
        padding: the label of rows without an example: 0, or the low end of a vault's range.
    """

    def __init__(self, labels: Any, num_rows: int) -> None:
        self.vault = labels if isinstance(labels, PrivateLabels) else None
        self.padding: float = 0
        self._array: np.ndarray | None = None
        if self.vault is None:
            self._array = _checked_array(labels)
            self._shape, self._dtype = self._array.shape[1:], self._array.dtype
        elif self.vault.num_labels is not None:
            self._shape, self._dtype = (self.vault.num_labels,), np.dtype(np.float32)
        elif self.vault.label_range is None:
            self._shape, self._dtype = (), np.dtype(np.int64)
        else:
            self._shape, self._dtype = (), np.dtype(np.float32)
            self.padding = self.vault.label_range[0]
        found = len(labels) if self._array is None else len(self._array)
        if found != num_rows:
            raise ValueError(
                f"features have {num_rows} examples, labels {found}. Give one label for each "
                "example, in the same order."
            )

    def spec(self, num_rows: int) -> tf.TensorSpec:
        """Returns what the labels of so many rows are."""
        return tf.TensorSpec((num_rows, *self._shape), self._dtype)

    def open(self) -> np.ndarray:
        """Returns the true labels (n, ...)."""
        if self._array is not None:
            return self._array
        return labels_for_training(self.vault)  # type: ignore[arg-type]


def _checked_array(labels: Any) -> np.ndarray:
    """Returns a copy of labels that no vault holds, or raises without showing any."""
    array = np.array(labels.numpy() if hasattr(labels, "numpy") else labels)
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"labels must be a PrivateLabels vault or an array of numbers, got dtype {array.dtype} "
            f"of {type(labels).__name__}. PrivateLabels(labels, classes=[...]) takes names."
        )
    if array.ndim == 0:
        raise ValueError("labels must have shape (n,) or (n, ...), got one number.")
    with np.errstate(over="ignore"):
        array = array.astype(kept_dtype(array.dtype), copy=False)
    if array.dtype.kind == "f" and not np.all(np.isfinite(array)):
        raise ValueError(
            f"labels must be finite ({array.dtype}), but some are not. Leave these "
            "examples out, or fill them in, by a rule that does not look at labels."
        )
    return array
