"""Datasets that give each element a stored label in the place of its own.

An element-wise ``map`` costs more than the rest of a small pipeline (a thread hop an element, and
it stands between the user's ``map`` and ``batch``, which tf.data would fuse). So labels are
replaced in blocks of elements, ``batch -> map -> unbatch``, wherever the elements have static
shapes; order and values of the elements stay what they are. Other elements go one by one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_labeldp.data._elements import LabelSlot

_BLOCK = 64
_BLOCK_BYTES = 4 << 20
_SMALLEST_BLOCK = 4

# Without it tf.data makes even a map that only picks components parallel, at 15 us an element.
_SYNCHRONOUS: dict[str, Any] = (
    {"synchronous": True}
    if "synchronous" in inspect.signature(tf.data.Dataset.map).parameters
    else {}
)

_UNKNOWN_ID = (
    "randomize_labels met an example whose id was not there when the transform was applied. It has "
    "no noisy label, and its true label is not given out. Apply a new transform to the dataset "
    "that holds all examples, and take subsets after it."
)


def replace_in_order(
    source: tf.data.Dataset, slot: LabelSlot, labels: np.ndarray
) -> tf.data.Dataset:
    """Returns ``source`` with its i-th label replaced by ``labels[i]``.

    Iterating raises ``FailedPreconditionError`` once the source gives more or fewer elements than
    there are labels.
    """
    block = block_size(source.element_spec)
    if block == 1:
        spare = np.concatenate([labels, labels[:1]])  # lets one element too many be seen, below
        zipped = tf.data.Dataset.zip((source, tf.data.Dataset.from_tensor_slices(spare)))
        replaced = zipped.map(slot.replace, **_SYNCHRONOUS)
    else:
        spare = np.zeros(((len(labels) // block + 2) * block, *labels.shape[1:]), labels.dtype)
        spare[: len(labels)] = labels
        rows = tf.data.Dataset.from_tensor_slices(spare.reshape(-1, block, *labels.shape[1:]))

        def replace(elements: Any, row: tf.Tensor) -> Any:
            return slot.replace(elements, row[: tf.shape(slot.label(elements))[0]])

        zipped = tf.data.Dataset.zip((source.batch(block), rows))
        replaced = zipped.map(replace, **_SYNCHRONOUS).unbatch()
    replaced = replaced.apply(tf.data.experimental.assert_cardinality(len(labels)))
    return _never_sharded_by_file(replaced)


def replace_by_id(
    source: tf.data.Dataset,
    slot: LabelSlot,
    id_of: Callable[[Any], tf.Tensor],
    ids: np.ndarray,
    labels: np.ndarray,
) -> tf.data.Dataset:
    """Returns ``source`` with the label of id ``ids[i]`` replaced by ``labels[i]``.

    Iterating raises ``InvalidArgumentError`` at an id that is not among ``ids``.

    Args:
        source: the dataset.
        slot: where its label is.
        id_of: maps the features of one element to its scalar id.
        ids: distinct ids (n,), ``int64`` or bytes.
        labels: (n,), in the label's dtype; or rows (n, K).
    """
    keys = tf.constant(ids if ids.dtype != object else ids.tolist())
    # The place and not the label: a noisy number may be any, so none could mean "not found".
    places = tf.range(len(labels), dtype=tf.int64)
    entries = tf.lookup.KeyValueTensorInitializer(keys, places)
    noisy = tf.constant(labels)
    table = tf.lookup.StaticHashTable(entries, default_value=-1)

    def look_up(wanted: tf.Tensor) -> tf.Tensor:
        found = table.lookup(wanted)
        known = tf.debugging.Assert(tf.reduce_all(found >= 0), [_UNKNOWN_ID], name="known_ids")
        with tf.control_dependencies([known]):
            return tf.gather(noisy, found)

    def replace(*parts: Any) -> Any:
        element = slot.element(parts)
        return slot.replace(element, look_up(id_of(slot.features(element))))

    def replace_block(*parts: Any) -> Any:
        elements = slot.element(parts)
        wanted = tf.vectorized_map(id_of, slot.features(elements))
        return slot.replace(elements, look_up(wanted))

    block = block_size(source.element_spec)
    if block == 1:
        replaced = source.map(replace, **_SYNCHRONOUS)
    else:
        replaced = source.batch(block).map(replace_block, **_SYNCHRONOUS).unbatch()
    if source.cardinality() == len(labels):  # a size that is known stays known
        replaced = replaced.apply(tf.data.experimental.assert_cardinality(len(labels)))
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
    # Where elements are this large, copying them costs more than the map.
    return block if block >= _SMALLEST_BLOCK else 1


def _never_sharded_by_file(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Several workers must share out elements, not files: labels go by place in the source."""
    policy = tf.data.experimental.AutoShardPolicy
    if dataset.options().experimental_distribute.auto_shard_policy == policy.OFF:
        return dataset
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy.DATA
    return dataset.with_options(options)
