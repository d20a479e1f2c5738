"""Labels in the elements of a dataset: where they are, how they are read and replaced.

Labels are replaced in blocks of elements, ``batch -> map -> unbatch``, where elements have static
shapes: an element-wise ``map`` costs more than the rest of a small pipeline.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_labeldp._progress import Progress

_READ_AT_A_TIME = 4096
_ELEMENTS_COMPARED = 256
_BLOCK = 64
_BLOCK_BYTES = 4 << 20
_SMALLEST_BLOCK = 4
"""Below this, elements are so large that copying them costs more than the map."""

# Without it tf.data makes even a map that only picks components parallel, at 15 us per element.
_SYNCHRONOUS: dict[str, Any] = (
    {"synchronous": True}
    if "synchronous" in inspect.signature(tf.data.Dataset.map).parameters
    else {}
)

_UNKNOWN_ID = (
    "randomize_labels met an example whose id was not there when the transform was applied: it has "
    "no noisy label, and its true label is not shown. Apply a new transform to the dataset that "
    "holds all examples, and take subsets after it."
)


@dataclasses.dataclass(frozen=True)
class LabelSlot:
    """The label's place in an element: a dict's ``key``, or None for a tuple's second entry."""

    key: str | None

    @classmethod
    def of(cls, element_spec: Any, label_key: str) -> LabelSlot:
        """Returns the slot of pairs, triples and dicts; raises for other elements."""
        if isinstance(element_spec, Mapping):
            if label_key in element_spec:
                return cls(label_key)
            raise ValueError(
                f"the dataset's elements have no key {label_key!r}; their keys are "
                f"{sorted(map(str, element_spec))}. Name the label's key with label_key=."
            )
        if isinstance(element_spec, tuple) and len(element_spec) in (2, 3):
            return cls(None)
        kind = f"a single {type(element_spec).__name__.removesuffix('Spec').lower()}"
        if isinstance(element_spec, tuple):
            kind = f"a tuple of {len(element_spec)}"
        raise ValueError(
            "the dataset is unlabelled: expected elements (x, y), (x, y, sample_weight) or a dict "
            f"with a label, got {kind}. Zip features and labels: tf.data.Dataset.zip((x, y))."
        )

    def label(self, element: Any) -> Any:
        return element[1] if self.key is None else element[self.key]

    def features(self, element: Any) -> Any:
        """Returns the input of ``id_fn``: x of a tuple, or a dict without its label."""
        if self.key is None:
            return element[0]
        return {name: value for name, value in element.items() if name != self.key}

    def replace(self, element: Any, label: Any) -> Any:
        """Returns a copy of an element with another label, of the same structure."""
        if self.key is not None:
            replaced = copy.copy(element)
            replaced[self.key] = label
            return replaced
        make = getattr(type(element), "_make", tuple)  # a named tuple stays one
        return make((element[0], label, *element[2:]))


def check_label_spec(spec: Any, num_classes: int | None) -> tf.DType:
    """Returns the dtype of a scalar label: an integer class, or a float if there are no classes."""
    if not isinstance(spec, tf.TensorSpec):
        raise TypeError(
            f"the label must be a dense tensor, got {type(spec).__name__}. Make it a scalar first."
        )
    if spec.shape.rank != 0:
        hint = (
            "The dataset looks already batched: call .unbatch() first; turn one-hot labels into "
            "indices with tf.argmax."
        )
        if spec.shape.rank is None:
            hint = "Set it with label.set_shape(()), or output_signature in from_generator."
        elif spec.shape == (1,):
            hint = "Squeeze it with .map(lambda x, y: (x, y[0])), or .unbatch() batches of one."
        raise ValueError(f"the label must be a scalar, got shape {spec.shape}. {hint}")
    if num_classes is None:
        if spec.dtype not in (tf.float32, tf.float64):
            raise TypeError(
                f"the label has dtype {spec.dtype.name}, but noisy numbers are float32 or float64. "
                "Cast it first: tf.cast(label, tf.float32)."
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


def read_labels(
    source: tf.data.Dataset,
    slot: LabelSlot,
    id_of: Callable[[Any], tf.Tensor] | None,
    verbose: bool,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the labels (n,) and ids (n,) or None, in the order of the source."""

    def pick(*parts: Any) -> Any:
        element = parts[0] if len(parts) == 1 else parts  # tf.data spreads plain tuples alone
        ids = () if id_of is None else (id_of(slot.features(element)),)
        return (slot.label(element), *ids)

    blocks = []
    total = int(source.cardinality())
    progress = Progress("randomize_labels, reading labels", total if total > 0 else None)
    for block in source.map(pick).batch(_READ_AT_A_TIME).as_numpy_iterator():
        blocks.append(block)
        if verbose:
            progress.advance(block[0].size)
    progress.close()
    if not blocks:
        raise ValueError(
            "the dataset is empty: it has no labels to randomize. Check its files and filters."
        )
    labels, *ids = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    if not ids:
        return labels, None
    repeated = labels.size - np.unique(ids[0]).size
    if repeated:
        raise ValueError(
            f"id_fn gave {repeated} of {labels.size} examples an id that another has too. Each "
            "example needs an id of its own; apply randomize_labels before .repeat()."
        )
    return labels, ids[0]


def checked_id_fn(id_fn: Callable[[Any], Any]) -> Callable[[Any], tf.Tensor]:
    def id_of(features: Any) -> tf.Tensor:
        example_id = tf.convert_to_tensor(id_fn(features))
        is_text = example_id.dtype == tf.string
        if not (is_text or example_id.dtype.is_integer) or example_id.shape.rank != 0:
            raise TypeError(
                "id_fn must map the features of one example to a scalar integer or string "
                f"tensor, got dtype {example_id.dtype.name} and shape {example_id.shape}."
            )
        return example_id if is_text else tf.cast(example_id, tf.int64)

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
    """Raises if the first elements of two passes differ in anything but their labels."""

    def digest_of_start() -> bytes:
        digest = hashlib.blake2b()
        for element in source.take(_ELEMENTS_COMPARED):
            unlabelled = slot.replace(element, 0)
            for tensor in tf.nest.flatten(unlabelled, expand_composites=True):
                digest.update(tf.io.serialize_tensor(tensor).numpy())
        return digest.digest()

    unordered = source.options().deterministic is False
    if unordered or digest_of_start() != digest_of_start():
        raise ValueError(
            "the dataset gives other features, or in another order, each time it is iterated. "
            "Apply randomize_labels before .shuffle() and random augmentation, or pass id_fn="
            + (", or set options.deterministic to True." if unordered else ".")
        )


def replace_labels(
    source: tf.data.Dataset,
    slot: LabelSlot,
    labels: np.ndarray,
    id_of: Callable[[Any], tf.Tensor] | None,
    ids: np.ndarray | None,
) -> tf.data.Dataset:
    """Returns ``source`` with the label of its i-th element, or of ``ids[i]``, as ``labels[i]``.

    Iterating raises ``FailedPreconditionError`` without ids at more or fewer elements than labels,
    and ``InvalidArgumentError`` at an id that is not among the distinct ``ids``.
    """
    size = block_size(source.element_spec)
    noisy, last = tf.constant(labels), len(labels) - 1
    if ids is not None:
        # The table has places and not labels: any number may be a noisy label, so none is free.
        keys = tf.constant(ids if ids.dtype != object else ids.tolist())
        places = tf.lookup.KeyValueTensorInitializer(keys, tf.range(last + 1, dtype=tf.int64))
        table = tf.lookup.StaticHashTable(places, default_value=-1)

    def replace(elements: Any, start: tf.Tensor) -> Any:
        if id_of is not None:
            features = slot.features(elements)
            ids_of_block = id_of(features) if size == 1 else tf.vectorized_map(id_of, features)
            place = table.lookup(ids_of_block)
        else:
            place = start
            if size > 1:
                place += tf.range(tf.shape(slot.label(elements), tf.int64)[0])
            place = tf.minimum(place, last)  # the cardinality below refuses a surplus element
        is_known = tf.debugging.Assert(tf.reduce_all(place >= 0), [_UNKNOWN_ID], name="known_ids")
        with tf.control_dependencies([is_known]):
            return slot.replace(elements, tf.gather(noisy, place))

    blocks = source if size == 1 else source.batch(size)
    starts = tf.data.Dataset.counter(step=size)
    replaced = tf.data.Dataset.zip((blocks, starts)).map(replace, **_SYNCHRONOUS)
    replaced = replaced if size == 1 else replaced.unbatch()
    if ids is None or source.cardinality() == len(labels):
        replaced = replaced.apply(tf.data.experimental.assert_cardinality(len(labels)))
    policy = tf.data.experimental.AutoShardPolicy
    if ids is None and source.options().experimental_distribute.auto_shard_policy != policy.OFF:
        # Several workers must share elements, not files: labels go by place in the source.
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = policy.DATA
        replaced = replaced.with_options(options)
    return replaced


def block_size(element_spec: Any) -> int:
    """Returns how many elements are handled at a time: 1 for those that cannot be batched."""
    size = 0
    for spec in tf.nest.flatten(element_spec):
        if not isinstance(spec, tf.TensorSpec) or not spec.shape.is_fully_defined():
            return 1
        if spec.dtype in (tf.variant, tf.resource):
            return 1
        size += spec.shape.num_elements() * max(spec.dtype.size, 1)
    block = min(_BLOCK, _BLOCK_BYTES // max(size, 1))
    return block if block >= _SMALLEST_BLOCK else 1
