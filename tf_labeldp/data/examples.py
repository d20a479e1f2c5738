"""Data sets of the public features of all examples, read into memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_labeldp import _validate
from tf_labeldp.features.reader import FeatureRows

_NO_TUPLES = (
    "expected a data set of features alone, got tuples, such as (x, y). Give "
    "dataset.map(lambda x, y: x), and several inputs as a dict."
)


def stored(rows: FeatureRows, num_examples: int) -> Any:
    """Returns the features of a data set, batched or not, in its order."""
    spec = rows.raw_inputs.element_spec
    specs = tf.nest.flatten(spec)
    if isinstance(spec, tuple):
        raise ValueError(_NO_TUPLES)
    if not all(isinstance(spec, tf.TensorSpec) for spec in specs):
        raise TypeError(
            "expected a data set of dense tensors, got others, such as ragged ones. Pad them to "
            "one shape: dataset.map(lambda x: x.to_tensor(shape=...))."
        )
    elements: list[list[np.ndarray]] = []
    most, size = _validate.most_bytes(), 0
    for element, _ in rows.elements():
        parts = [np.asarray(part) for part in tf.nest.flatten(element)]
        elements.append(parts)
        size += sum(part.nbytes for part in parts)
        if size > most:
            raise ValueError(
                f"expected a data set of features of at most {most / 1e9:.1f} GB, which are read "
                "into memory, got more. Give an object with __len__ and __getitem__ of row "
                "numbers, such as an np.memmap."
            )
        if len(elements) > num_examples:
            raise ValueError(
                f"expected {num_examples} examples, one per label, got a data set of more. Leave "
                "out .repeat(), and give the examples of the labels alone."
            )
    if not elements:
        raise ValueError(f"expected a data set of {num_examples} examples, got an empty one.")
    for _ in rows.elements():  # A second reading finds a shuffle.
        pass
    columns = list(zip(*elements, strict=True))
    is_batched = _is_batched(columns, specs, num_examples)
    joined = [_joined(parts, is_batched) for parts in columns]
    return tf.nest.pack_sequence_as(spec, joined)


def _is_batched(columns: Any, specs: Any, num_examples: int) -> bool:
    """Returns whether the elements of a data set are batches; raises for another number of rows."""
    num_elements = len(columns[0])
    has_rows = all(spec.shape.rank != 0 for spec in specs)
    rows = {sum(map(len, parts)) for parts in columns} if has_rows else set()
    # Elements of one row are examples with one number, unless their first size is open.
    is_open = any(spec.shape.rank is None or spec.shape[:1] == [None] for spec in specs)
    if rows == {num_examples} and (is_open or num_elements != num_examples):
        return True
    if num_elements == num_examples:
        return False
    found = f"{num_elements} examples"
    if has_rows:
        counts = " or ".join(map(str, sorted(rows)))
        found = f"{counts} in {num_elements} batches"
        found += "" if is_open else f", or {num_elements} if it is not batched"
    raise ValueError(
        f"expected {num_examples} examples, one per label, got a data set of {found}. Give the "
        "examples of the labels, in their order."
    )


def _joined(parts: Sequence[np.ndarray], is_batched: bool) -> np.ndarray:
    """Returns the rows (n, ...) of all elements, which are batches or single examples."""
    shapes = sorted({part.shape[1:] if is_batched else part.shape for part in parts})
    if len(shapes) > 1:
        raise ValueError(
            f"expected examples of one shape, got {shapes[0]} and {shapes[-1]}. Pad or crop them "
            "to one shape."
        )
    return np.concatenate(parts) if is_batched else np.stack(parts)
