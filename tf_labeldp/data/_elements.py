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
"""Elements per batch when labels are read: few calls, little memory."""
_ELEMENTS_COMPARED = 256
"""Elements that two passes are compared on before the charge; later passes are compared on all."""
_BY_ELEMENT = {
    "_MapDataset",
    "_ParallelMapDataset",
    "_PrefetchDataset",
    "CacheDataset",
    "_OptionsDataset",
    "_AssertCardinalityDataset",
    "_ZipDataset",
    "_ShuffleDataset",
}
"""Transformations that return an element for each element."""
_ODD = 0x1E3779B97F4A7C15
"""An odd number without pattern."""
_BLOCK = 64
"""Elements per block, at most."""
_BLOCK_BYTES = 4 << 20
"""Bytes per block, at most."""
_SMALLEST_BLOCK = 4
"""Elements per block, at least: copying larger elements costs more than an element-wise map."""

# Without this setting tf.data runs even a map that only picks components in parallel, at 15 us per
# element. TensorFlow 2.16 does not have it.
_SYNCHRONOUS: dict[str, Any] = (
    {"synchronous": True}
    if "synchronous" in inspect.signature(tf.data.Dataset.map).parameters
    else {}
)

_UNKNOWN_ID = (
    "randomize_labels met an example whose id was not there when the transform was applied: it has "
    "no noisy label, and its true label is withheld. Apply a new transform to the dataset of all "
    "examples, and take subsets after it."
)

_OTHER_ELEMENT = (
    "randomize_labels met another element in this place than when the transform was applied, and "
    "its true label is withheld. Apply the transform before .shuffle() and random augmentation, "
    "set options.deterministic to True, or give id_fn=."
)


@dataclasses.dataclass(frozen=True)
class LabelSlot:
    """The label's place in an element: a dict's ``key``, or None for a tuple's second entry."""

    key: str | None

    @classmethod
    def of(cls, element_spec: Any, label_key: str) -> LabelSlot:
        if isinstance(element_spec, Mapping):
            if label_key in element_spec:
                return cls(label_key)
            raise ValueError(
                f"expected elements with the key {label_key!r}, got the keys "
                f"{sorted(map(str, element_spec))}. Name the label's key with label_key=."
            )
        if isinstance(element_spec, tuple) and len(element_spec) in (2, 3):
            return cls(None)
        raise ValueError(
            "expected elements (x, y), (x, y, sample_weight) or a dict with a label, got "
            f"{element_spec}. Zip features and labels: tf.data.Dataset.zip((x, y))."
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
        make = getattr(type(element), "_make", tuple)  # keeps a named tuple
        return make((element[0], label, *element[2:]))


def check_label_spec(spec: Any, mechanism: Any) -> tf.DType:
    """Returns the dtype of a scalar label: an integer class, or a float if there are no classes."""
    num_classes = getattr(mechanism, "num_classes", None)
    if not isinstance(spec, tf.TensorSpec) or spec.shape.rank != 0:
        raise ValueError(
            f"expected a scalar label, got {spec}. Call .unbatch() if the dataset is batched, and "
            "turn one-hot labels into indices with tf.argmax."
        )
    if num_classes is None:
        if spec.dtype not in (tf.float32, tf.float64):
            raise TypeError(
                f"expected labels of dtype float32 or float64, got {spec.dtype.name}. Cast them "
                "first: tf.cast(label, tf.float32)."
            )
    elif not spec.dtype.is_integer:
        raise TypeError(
            f"expected integer labels 0..{num_classes - 1}, got dtype {spec.dtype.name}. Cast "
            "whole numbers with tf.cast(label, tf.int64); number names from zero."
        )
    elif (most := max(num_classes, getattr(mechanism, "num_outputs", 0)) - 1) > spec.dtype.max:
        raise ValueError(
            f"expected a dtype that holds the noisy label {most}, got "
            f"{spec.dtype.name}. Cast the labels to tf.int64 first."
        )
    return spec.dtype


def read_labels(
    source: tf.data.Dataset,
    slot: LabelSlot,
    id_of: Callable[[Any], tf.Tensor] | None,
    verbose: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the labels (n,), and ids (n,) or else fingerprints of the elements ``int64`` (n,).

    They are in the order of the source.
    """

    def label_and_id(*parts: Any) -> Any:
        element = parts[0] if len(parts) == 1 else parts  # tf.data spreads plain tuples alone
        if id_of is None:
            return slot.label(element), fingerprints(slot, element)
        return slot.label(element), id_of(slot.features(element))

    blocks = []
    total = int(source.cardinality())
    progress = Progress("randomize_labels, reading labels", total if total > 0 else None)
    for block in source.map(label_and_id).batch(_READ_AT_A_TIME).as_numpy_iterator():
        blocks.append(block)
        if verbose:
            progress.advance(block[0].size)
    progress.close()
    if not blocks:
        raise ValueError("expected a dataset with labels, got an empty one. Check its filters.")
    labels, ids = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    if id_of is None:
        return labels, ids
    repeated = labels.size - np.unique(ids).size
    if repeated:
        raise ValueError(
            f"expected another id for each example, got {repeated} of {labels.size} that repeat. "
            "Mend id_fn, and apply randomize_labels before .repeat()."
        )
    return labels, ids


def fingerprints(slot: LabelSlot, elements: Any, *, in_blocks: bool = False) -> tf.Tensor:
    """Returns ``int64`` fingerprints of elements without their labels, () or (m,) of a block."""
    total = tf.zeros((), tf.int64)
    parts = tf.nest.flatten(slot.replace(elements, ()), expand_composites=True)
    for number, part in enumerate(parts):
        part = tf.convert_to_tensor(part)
        if part.dtype == tf.string:
            words = tf.strings.to_hash_bucket_fast(part, 2**63 - 1)
        elif part.dtype.is_complex:
            parts += [tf.math.real(part), tf.math.imag(part)]
            continue
        elif part.dtype.is_floating:
            words = tf.bitcast(part, {2: tf.int16, 4: tf.int32, 8: tf.int64}[part.dtype.size])
        else:
            words = part
        width = words.shape[1:].num_elements() if in_blocks else words.shape.num_elements()
        if width and words.dtype.size < 8 and width * words.dtype.size % 8 == 0:
            # Eight bytes at a time.
            packed = 8 // words.dtype.size
            words = tf.cast(words, tf.uint8) if words.dtype == tf.bool else words
            words = tf.bitcast(tf.reshape(words, [-1, width // packed, packed]), tf.int64)
            words = words if in_blocks else words[0]
        rows = tf.shape(words)[:1] if in_blocks else tf.ones(1, tf.int32)
        table = tf.reshape(tf.cast(words, tf.int64), tf.concat([rows, [-1]], 0))
        width = table.shape[1] or tf.shape(table)[1]
        # A sum of words by fixed random factors wraps around, and is fast for images.
        factors = tf.random.stateless_uniform([width], [number, 7], None, None, tf.int64)
        total = total * _ODD + tf.reduce_sum(table * factors, axis=1) + tf.cast(width, tf.int64)
    total += tf.zeros(1, tf.int64)
    return total if in_blocks else total[0]


def checked_id_fn(id_fn: Callable[[Any], Any]) -> Callable[[Any], tf.Tensor]:
    def id_of(features: Any) -> tf.Tensor:
        example_id = tf.convert_to_tensor(id_fn(features))
        is_text = example_id.dtype == tf.string
        if not (is_text or example_id.dtype.is_integer) or example_id.shape.rank != 0:
            raise TypeError(
                "expected a scalar integer or string from id_fn, got dtype "
                f"{example_id.dtype.name} and shape {example_id.shape}."
            )
        return example_id if is_text else tf.cast(example_id, tf.int64)

    return id_of


def check_no_repeat(source: tf.data.Dataset) -> None:
    """Raises if the source repeats its elements: a label would be drawn once per copy.

    Functions of ``flat_map`` and ``from_generator`` have no graph here: their repeats are not seen.
    """
    for dataset in _inputs_of(source, deeply=True):
        parts = _inputs_of(dataset) if type(dataset).__name__ == "_ConcatenateDataset" else []
        ranges = [_ranges_inside(part) for part in parts]
        is_copied = any(
            max(ranges[0][place][0], other[0]) < min(ranges[0][place][1], other[1])
            for place, other in (ranges[1].items() if ranges else ())
            if place in ranges[0]
        )
        if is_copied or type(dataset).__name__ == "_RepeatDataset":
            raise ValueError(
                "expected each label once, got a dataset that repeats them: each copy would be "
                "drawn, and spend epsilon, again. Apply randomize_labels before .repeat() and "
                ".concatenate()."
            )


def _inputs_of(dataset: tf.data.Dataset, *, deeply: bool = False) -> list[Any]:
    """Returns the datasets that a dataset reads; deeply, it and all that these read."""
    inputs = getattr(dataset, "_inputs", None)  # tf.data walks a pipeline by it
    direct = list(inputs()) if callable(inputs) else []
    if not deeply:
        return direct
    return [dataset, *(each for part in direct for each in _inputs_of(part, deeply=True))]


def _ranges_inside(dataset: tf.data.Dataset) -> dict[int, tuple[float, float]]:
    """Returns the range of elements that a dataset reads of those inside it, by identity.

    What is inside other transformations, such as filters, is left out.
    """
    name, found = type(dataset).__name__, {id(dataset): (0.0, np.inf)}
    count = int(dataset._count) if name in ("_TakeDataset", "_SkipDataset") else 0
    if name not in _BY_ELEMENT | {"_TakeDataset", "_SkipDataset"}:
        return found
    for part in _inputs_of(dataset):
        for place, (start, stop) in _ranges_inside(part).items():
            if name == "_TakeDataset" and count >= 0:
                stop = min(stop, start + count)
            if name == "_SkipDataset":
                start = start + count if count >= 0 else stop
            found[place] = (start, stop)
    return found


def check_order(source: tf.data.Dataset, slot: LabelSlot) -> None:
    """Raises for a source that is shuffled in each pass, or whose first elements differ in two.

    Differences are in anything but the labels. The elements of later passes are compared one by
    one, by their fingerprints.
    """
    is_shuffled = any(
        type(dataset).__name__ == "_ShuffleDataset" and dataset._reshuffle_each_iteration
        for dataset in _inputs_of(source, deeply=True)
    )

    def digest_of_start() -> bytes:
        digest = hashlib.blake2b()
        for element in source.take(_ELEMENTS_COMPARED):
            unlabelled = slot.replace(element, 0)
            for tensor in tf.nest.flatten(unlabelled, expand_composites=True):
                digest.update(tf.io.serialize_tensor(tensor).numpy())
        return digest.digest()

    changes = source.options().deterministic is False or is_shuffled
    if changes or digest_of_start() != digest_of_start():
        raise ValueError(
            "expected the same elements in the same order in each pass, got others. Apply "
            "randomize_labels before .shuffle() and random augmentation, set options.deterministic "
            "to True, or give id_fn=."
        )


def replace_labels(
    source: tf.data.Dataset,
    slot: LabelSlot,
    labels: np.ndarray,
    id_of: Callable[[Any], tf.Tensor] | None,
    ids: np.ndarray,
) -> tf.data.Dataset:
    """Returns ``source`` with ``labels[i]`` for its i-th element, or for the element ``ids[i]``.

    Without ``id_of``, ``ids`` are the fingerprints of the elements. Iterating then raises
    ``FailedPreconditionError`` at more or fewer elements than labels, and ``InvalidArgumentError``
    at another element; with ``id_of``, at an id that is not among the distinct ``ids``.
    """
    size = _block_size(source.element_spec)
    noisy, last = tf.constant(labels), len(labels) - 1
    if id_of is None:
        prints = tf.constant(ids)
    else:
        # The table has places, not labels: a label may be any number, so none is free for "none".
        keys = tf.constant(ids if ids.dtype != object else ids.tolist())
        places = tf.lookup.KeyValueTensorInitializer(keys, tf.range(last + 1, dtype=tf.int64))
        table = tf.lookup.StaticHashTable(places, default_value=-1)

    def replace(elements: Any, start: tf.Tensor) -> Any:
        if id_of is not None:
            features = slot.features(elements)
            block_ids = id_of(features) if size == 1 else tf.vectorized_map(id_of, features)
            place = table.lookup(block_ids)
        else:
            place = start
            if size > 1:
                place += tf.range(tf.shape(slot.label(elements), tf.int64)[0])
            place = tf.minimum(place, last)  # the cardinality below refuses a surplus element
        if id_of is not None:
            is_known = tf.debugging.Assert(tf.reduce_all(place >= 0), [_UNKNOWN_ID])
        else:
            same = fingerprints(slot, elements, in_blocks=size > 1) == tf.gather(prints, place)
            is_surplus = start + tf.size(place, tf.int64) > last + 1
            is_known = tf.debugging.Assert(tf.reduce_all(same) | is_surplus, [_OTHER_ELEMENT])
        with tf.control_dependencies([is_known]):
            return slot.replace(elements, tf.gather(noisy, place))

    blocks = source if size == 1 else source.batch(size)
    starts = tf.data.Dataset.counter(step=size)
    replaced = tf.data.Dataset.zip((blocks, starts)).map(replace, **_SYNCHRONOUS)
    elements = _without_states(replaced if size == 1 else replaced.unbatch())
    if id_of is None or source.cardinality() == len(labels):
        elements = elements.apply(tf.data.experimental.assert_cardinality(len(labels)))
    elements = elements.with_options(source.options())
    policy = tf.data.experimental.AutoShardPolicy
    if source.options().experimental_distribute.auto_shard_policy != policy.OFF:
        # Several workers must share elements: they cannot see the files of the source.
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = policy.DATA
        elements = elements.with_options(options)
    return elements


def _without_states(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset of the same elements, whose iterators and graph cannot be saved.

    Buffers of the source (cache, shuffle, prefetch, parallel maps) keep true labels, and so do its
    constants. A Python function opens the dataset in each pass, so that a graph in a file has a
    number in its place. TensorFlow refuses to save iterators that read such functions. No element
    passes through Python.
    """
    spec = dataset.element_spec
    opened = tf.data.Dataset.from_generator(
        lambda: [dataset], output_signature=tf.data.DatasetSpec(spec)
    )
    # Symbolic checkpoints look at `opened` after its last element, and at `empty` before the first.
    empty = tf.data.Dataset.from_generator(lambda: [], output_signature=spec)
    return empty.concatenate(opened.flat_map(lambda elements: elements))


def _block_size(element_spec: Any) -> int:
    """Returns the number of elements per block: 1 for those that cannot be batched."""
    size = 1
    for spec in tf.nest.flatten(element_spec):
        if not isinstance(spec, tf.TensorSpec) or not spec.shape.is_fully_defined():
            return 1
        size += spec.shape.num_elements() * spec.dtype.size
    block = min(_BLOCK, _BLOCK_BYTES // size)
    return block if block >= _SMALLEST_BLOCK else 1
