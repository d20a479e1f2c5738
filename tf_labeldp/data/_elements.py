"""Where the label sits in an element of a dataset, and what else is in there."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class LabelSlot:
    """The place of the label in elements ``(x, y)``, ``(x, y, sample_weight)`` or a dict.

    Attributes:
        key: the label's key in a dict, or None for tuples, where it is the second entry.
    """

    key: str | None

    @staticmethod
    def element(parts: tuple[Any, ...]) -> Any:
        """Returns the element of which tf.data made a function's arguments.

        It spreads plain tuples, and hands on dicts and named tuples as they are.
        """
        return parts[0] if len(parts) == 1 else parts

    def label(self, element: Any) -> Any:
        """Returns the label of an element (or its spec, of an element's spec)."""
        return element[1] if self.key is None else element[self.key]

    def features(self, element: Any) -> Any:
        """Returns what ``id_fn`` is given: x of a tuple, or a dict without its label."""
        if self.key is None:
            return element[0]
        return {name: value for name, value in element.items() if name != self.key}

    def without_label(self, element: Any) -> Any:
        """Returns everything in an element but its label."""
        if self.key is None:
            return (element[0], *element[2:])
        return self.features(element)

    def replace(self, element: Any, label: Any) -> Any:
        """Returns a copy of an element with another label, of the same structure."""
        if self.key is not None:
            replaced = copy.copy(element)
            replaced[self.key] = label
            return replaced
        parts = (element[0], label, *element[2:])
        make = getattr(type(element), "_make", tuple)  # a named tuple stays one
        return make(parts)


def find_label(element_spec: Any, label_key: str) -> LabelSlot:
    """Returns where the label is.

    Raises:
        ValueError: elements are neither ``(x, y)``, ``(x, y, sample_weight)`` nor a dict with the
            key.
    """
    if isinstance(element_spec, Mapping):
        if label_key in element_spec:
            return LabelSlot(label_key)
        raise ValueError(
            f"the dataset's elements have no key {label_key!r}; their keys are "
            f"{sorted(map(str, element_spec))}. Name the label's key with label_key=."
        )
    if isinstance(element_spec, tuple) and len(element_spec) in (2, 3):
        return LabelSlot(None)
    kind = (
        f"a tuple of {len(element_spec)}"
        if isinstance(element_spec, tuple)
        else f"a single {type(element_spec).__name__.removesuffix('Spec').lower()}"
    )
    raise ValueError(
        f"the dataset is unlabelled: each element is {kind}, expected (x, y), "
        "(x, y, sample_weight) or a dict with a label. Zip features and labels with "
        "tf.data.Dataset.zip((x, y)), or load with as_supervised=True."
    )


def check_label_spec(spec: Any, num_classes: int | None) -> tf.DType:
    """Returns the dtype of a label that is one scalar an element: an integer, or a float.

    Args:
        spec: of the label.
        num_classes: K; None for regression, where the label must be a float.

    Raises:
        TypeError: the label is of a wrong type.
        ValueError: the label is not a scalar, or its dtype cannot hold every class.
    """
    if not isinstance(spec, tf.TensorSpec):
        raise TypeError(
            f"the label must be a dense tensor, got {type(spec).__name__}. Make it a scalar "
            "with .map before randomize_labels."
        )
    if spec.shape.rank is None:
        raise ValueError(
            "the label's rank is unknown, a scalar is expected. Set its shape in the function "
            "that makes it: label.set_shape(()), or output_signature in from_generator."
        )
    if spec.shape == (1,):
        raise ValueError(
            "the label has shape (1,), a scalar is expected. Squeeze it first: "
            ".map(lambda x, y: (x, y[0])); if these are batches of one, call .unbatch()."
        )
    if spec.shape.rank > 0:
        raise ValueError(
            f"the label has shape {spec.shape}, a scalar is expected: the dataset looks already "
            "batched. Apply randomize_labels before .batch(), or call .unbatch() first. Turn "
            "one-hot labels into indices with tf.argmax."
        )
    if num_classes is None:
        if spec.dtype not in (tf.float32, tf.float64):
            raise TypeError(
                f"the label has dtype {spec.dtype.name}, but noisy numbers are float32 or float64. "
                "Cast it with tf.cast(label, tf.float32) before randomize_labels."
            )
        return spec.dtype
    if not spec.dtype.is_integer:
        raise TypeError(
            f"the label has dtype {spec.dtype.name}, an integer 0..{num_classes - 1} is expected. "
            "Cast whole numbers with tf.cast(label, tf.int64); number names from zero."
        )
    if num_classes - 1 > spec.dtype.max:
        raise ValueError(
            f"the label's dtype {spec.dtype.name} holds at most {spec.dtype.max}, but a noisy "
            f"label may be {num_classes - 1}. Cast the labels to tf.int64 first."
        )
    return spec.dtype
