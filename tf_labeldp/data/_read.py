"""The one pass over a source that reads its labels, and the checks that go with it."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_labeldp.data._elements import LabelSlot

_READ_AT_A_TIME = 4096
_SECONDS_BETWEEN_LINES = 5.0
_ELEMENTS_COMPARED = 256


def read_labels(
    source: tf.data.Dataset,
    slot: LabelSlot,
    id_of: Callable[[Any], tf.Tensor] | None,
    verbose: bool,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the labels (n,) and ids (n,) or None, in the order of the source.

    Raises:
        TypeError: an id is not a scalar integer or string.
        ValueError: there are no elements, or an id comes twice.
    """

    def pick(*parts: Any) -> Any:
        element = slot.element(parts)
        if id_of is None:
            return (slot.label(element),)
        return slot.label(element), id_of(slot.features(element))

    picked = source.map(pick)
    labels, ids, count = [], [], 0
    started = last = time.monotonic()
    for block in picked.batch(_READ_AT_A_TIME).as_numpy_iterator():
        labels.append(block[0])
        ids.extend(block[1:])
        count += block[0].size
        if verbose and time.monotonic() - last > _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            total = int(source.cardinality())
            of = f" of {total:,}" if total > 0 else ""
            print(
                f"randomize_labels: {count:,}{of} labels read in {last - started:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    if count == 0:
        raise ValueError(
            "the dataset is empty: it has no labels to randomize. Check the files or the split "
            "it is made from, and filters before this transform."
        )
    if id_of is None:
        return np.concatenate(labels), None
    all_ids = np.concatenate(ids)
    repeated = count - np.unique(all_ids).size
    if repeated:
        raise ValueError(
            f"id_fn gave {repeated} of {count} examples an id that another has too. Each example "
            "needs an id of its own; apply randomize_labels before .repeat()."
        )
    return np.concatenate(labels), all_ids


def checked_id_fn(id_fn: Callable[[Any], Any]) -> Callable[[Any], tf.Tensor]:
    """Returns ``id_fn`` with its result checked and integers as ``int64``."""

    def id_of(features: Any) -> tf.Tensor:
        example_id = tf.convert_to_tensor(id_fn(features))
        fits = example_id.dtype.is_integer or example_id.dtype == tf.string
        if not fits or example_id.shape.rank != 0:
            raise TypeError(
                "id_fn must map the features of one example to a scalar integer or string "
                f"tensor, got dtype {example_id.dtype.name} and shape {example_id.shape}."
            )
        return example_id if example_id.dtype == tf.string else tf.cast(example_id, tf.int64)

    return id_of


def check_no_repeat(source: tf.data.Dataset) -> None:
    """Raises if the source repeats its elements: each copy would get a draw of its own."""
    waiting = [source]
    while waiting:
        dataset = waiting.pop()
        if type(dataset).__name__ == "_RepeatDataset":
            raise ValueError(
                "the dataset repeats its elements, and each copy of a label would be drawn, and "
                "spend epsilon, again. Apply randomize_labels before .repeat()."
            )
        inputs = getattr(dataset, "_inputs", None)  # how tf.data walks a pipeline itself
        waiting.extend(inputs() if callable(inputs) else [])


def check_order(source: tf.data.Dataset, slot: LabelSlot) -> None:
    """Raises if the source does not give the same features in the same order each time.

    The first elements of two passes are compared, features only.
    """
    unordered = source.options().deterministic is False
    if unordered or _digest_of_start(source, slot) != _digest_of_start(source, slot):
        raise ValueError(
            "the dataset gives other features, or in another order, each time it is iterated, so "
            "its examples cannot be told by their place. Apply randomize_labels before .shuffle() "
            "and random augmentation (best on the source itself), or pass id_fn="
            + (", or set options.deterministic to True." if unordered else ".")
        )


def _digest_of_start(source: tf.data.Dataset, slot: LabelSlot) -> bytes:
    digest = hashlib.blake2b()
    for element in source.take(_ELEMENTS_COMPARED):
        for tensor in tf.nest.flatten(slot.without_label(element), expand_composites=True):
            value = np.asarray(tensor.numpy())
            listed = value.dtype.hasobject  # texts: the array itself holds addresses
            content = repr(value.tolist()).encode() if listed else value.tobytes()
            digest.update(f"{value.shape}{len(content)}".encode())
            digest.update(content)
    return digest.digest()
