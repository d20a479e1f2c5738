"""``RandomizeLabels``: noisy labels in a pipeline, each a keyed function of its row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.transforms.window import GlobalWindows

from tf_labeldp.accounting import Private, Public, public_input
from tf_labeldp.mechanisms import LabelMechanism
from tf_labeldp.scale.beam._files import write_whole
from tf_labeldp.vault.keyed_draws import KeyedRows, ReleaseKey
from tf_labeldp.vault.row_ids import RowIds

_BATCH_ROWS = 1 << 14
"""The most rows whose labels are drawn at a time, which bounds a worker's memory."""
_SHARDS = 64
"""Shards of the digests of ids; repeats are in the same shard."""
_NOTHING = (0, False, False)
_Facts = tuple[int, int, int, int, bool, bool]
"""Rows, repeated ids, rows too many, fingerprint; whether some ids are text, some numbers."""


class RandomizeLabels(beam.PTransform):
    """Replaces the label of each row by a noisy one, drawn by a secret key.

    The elements are pairs (id, label), dicts, Arrow record batches or tables, or
    ``tf.train.Example``s (messages or bytes); the output has the same elements with noisy labels.
    Arrow batches are the fastest by far. A dict of PCollections, such as splits, is one release,
    and returns a dict.

    Guarantee:
        The noisy labels are (epsilon, delta)-DP for the replacement of one label, by ``mechanism``,
        for any repeated steps, splits and orders of the rows: a draw is a pseudorandom function of
        key, release, mechanism, prior, id and label. It rests on AES-256 and BLAKE2b, on a secret
        key, and on unique ids. Before any row comes out, these are refused: repeated ids, in one
        PCollection or across several, with their number; labels out of range; rows that differ from
        an earlier run of the release.

    Args:
        mechanism: ``RandomizedResponse`` or another mechanism for single labels.
        key: a key whose ledger records the release and its charge. Workers read the file by its
            path, and one worker writes to the ledger.
        release: the name of the release, which is bound to this mechanism and prior.
        id: the field that identifies a row, whole numbers or text, in dicts, Arrow and Examples.
        label: the field with the label.
        priors: public probabilities (K,) for mechanisms that use them.
        statement: path of a JSON file for the privacy statement and its receipts, next to the
            output; written before the first row comes out.

    Example:
        >>> import os, tempfile
        >>> from tf_labeldp.mechanisms import RandomizedResponse
        >>> key = ReleaseKey.create(os.path.join(tempfile.mkdtemp(), "labels.key"))
        >>> mechanism = RandomizedResponse(epsilon=1.0, num_classes=3)
        >>> with beam.Pipeline("FnApiRunner") as pipeline:
        ...     rows = pipeline | beam.Create([("anna", 0), ("bert", 2)])
        ...     noisy = rows | RandomizeLabels(mechanism, key, "first")
    """

    def __init__(
        self,
        mechanism: Public[LabelMechanism],
        key: ReleaseKey,
        release: str,
        *,
        id: str = "id",
        label: str = "label",
        priors: Public[Any] = None,
        statement: str | None = None,
    ) -> None:
        super().__init__()
        public = public_input(mechanism, priors)
        mechanism, priors = public.value
        self._mechanism = LabelMechanism.checked(mechanism)
        self._key, self._release, self._priors = key, release, priors
        self._fields = id, label
        self._statement = statement
        made_by: Any = public.with_value(mechanism)
        key.register(release, made_by, priors)

    def expand(self, rows: Private[Any]) -> Any:
        """Returns the rows with noisy labels, in the form of the input."""
        parts = rows if isinstance(rows, Mapping) else {"rows": rows}
        for name, part in parts.items():
            if not part.windowing.is_default():
                raise ValueError(
                    f"RandomizeLabels takes PCollections without windows, got {part.windowing} in "
                    f"{name!r}. Use a batch pipeline: each id is compared with all others."
                )
        draw = _Draw(self._mechanism, self._key, self._release, self._priors, self._fields)
        drawn = {
            name: part | f"Draw {name}" >> beam.ParDo(draw).with_outputs("ids", main="noisy")
            for name, part in parts.items()
        }
        checked = (
            [outputs.ids for outputs in drawn.values()]
            | "AllIds" >> beam.Flatten()
            | "ByDigest" >> beam.GroupByKey()
            | "CountRepeats" >> beam.MapTuple(_count_repeats)
            | "AddUp" >> beam.CombineGlobally(_added_up)
            | "Check" >> beam.Map(_check, self._key, self._release, self._statement)
        )
        # Beam computes the side input first, so all ids and labels are checked before a row is out.
        published = {
            name: outputs.noisy
            | f"Publish {name}" >> beam.FlatMap(_publish, beam.pvalue.AsSingleton(checked))
            for name, outputs in drawn.items()
        }
        return published if isinstance(rows, Mapping) else published["rows"]


class _Draw(beam.DoFn):
    """Draws batches of rows; also yields digests of their ids."""

    def __init__(
        self,
        mechanism: LabelMechanism,
        key: ReleaseKey,
        release: str,
        priors: Any,
        fields: tuple[str, str],
    ) -> None:
        self._mechanism, self._key, self._release = mechanism, key, release
        self._priors, self._fields = priors, fields

    def setup(self) -> None:
        self._secret = self._key.secret

    def start_bundle(self) -> None:
        self._waiting: list[Any] = []

    def process(self, element: Any) -> Iterator[Any]:
        if isinstance(element, (pa.RecordBatch, pa.Table)):
            yield from self._drawn(element)
            return
        self._waiting.append(element)
        if len(self._waiting) >= _BATCH_ROWS:
            yield from self._drawn(self._waiting)
            self._waiting = []

    def finish_bundle(self) -> Iterator[Any]:
        if self._waiting:
            for output in self._drawn(self._waiting):
                if isinstance(output, beam.pvalue.TaggedOutput):
                    value = GlobalWindows.windowed_value(output.value)
                    yield beam.pvalue.TaggedOutput(output.tag, value)
                else:
                    yield GlobalWindows.windowed_value(output)

    def _drawn(self, rows: Any) -> Iterator[Any]:
        ids, labels, with_labels = _opened(rows, *self._fields)
        batch = KeyedRows(ids, labels, self._mechanism, self._secret, self._release, self._priors)
        noisy, digests = batch.randomize(), batch.id_digests()
        # One shard of the batch carries the facts, so that they count once.
        facts = (batch.fingerprint(), batch.of_text, not batch.of_text)
        shards = digests[:, 0] % np.uint64(_SHARDS)
        order = np.argsort(shards, kind="stable")
        ends = np.cumsum(np.bincount(shards.astype(np.int64), minlength=_SHARDS))
        for shard, part in enumerate(np.split(digests[order], ends[:-1])):
            if len(part):
                yield beam.pvalue.TaggedOutput("ids", (shard, (part.tobytes(), *facts)))
                facts = _NOTHING
        yield with_labels(noisy)


def _check(facts: _Facts, key: ReleaseKey, release: str, statement: str | None) -> int:
    """Refuses rows that must not be released together, and writes the statement."""
    rows, repeated, too_many, fingerprint, texts, numbers = facts
    RowIds.refuse_repeats(repeated, too_many, rows)
    if texts and numbers:
        raise TypeError(
            "some ids are whole numbers and some are text, so one id may occur in both forms. "
            "Nothing was released. Turn all ids into text."
        )
    key.bind_rows(release, rows, fingerprint)
    if statement is not None:
        write_whole(statement, key.statement(release, rows).encode())
    return rows


def _publish(rows: Any, checked: int) -> Iterable[Any]:
    return rows if isinstance(rows, list) else [rows]


def _count_repeats(shard: int, parts: Iterable[tuple[bytes, int, bool, bool]]) -> _Facts:
    content, fingerprints, texts, numbers = zip(*parts, strict=True)
    digests = np.frombuffer(b"".join(content), "<u8").reshape(-1, 2)
    return len(digests), *RowIds.repeats_of(digests), sum(fingerprints), any(texts), any(numbers)


def _added_up(several: Iterable[_Facts]) -> _Facts:
    total = (0, 0, 0, 0, False, False)
    for facts in several:
        total = tuple(a + b for a, b in zip(total, facts, strict=True))  # type: ignore[assignment]
    return total


def _opened(rows: Any, id: str, label: str) -> tuple[Any, Any, Callable[[np.ndarray], Any]]:
    """Returns ids, labels, and a function from noisy labels to the batch with them."""
    if isinstance(rows, (pa.RecordBatch, pa.Table)):
        _check_fields((id, label), rows.schema.names)
        column: Any = rows.column(id)
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()

        def as_arrow(noisy: np.ndarray) -> Any:
            columns = list(rows.columns)
            columns[rows.schema.get_field_index(label)] = pa.array(noisy)
            return type(rows).from_arrays(columns, names=rows.schema.names)

        return column, rows.column(label).to_numpy(zero_copy_only=False), as_arrow
    first = rows[0]
    replace: Callable[[Any, Any], Any]
    if isinstance(first, tuple) and len(first) == 2:
        pairs, replace = rows, lambda row, value: (row[0], value)
    elif isinstance(first, Mapping):
        for row in rows:
            _check_fields((id, label), row)
        pairs = [(row[id], row[label]) for row in rows]
        replace = lambda row, value: {**row, label: value}  # noqa: E731
    elif isinstance(first, bytes) or type(first).__name__ == "Example":
        parsed = [_parsed(row) for row in rows]
        pairs = [(_value(example, id), _value(example, label)) for example in parsed]
        replace = functools.partial(_relabelled, label)
    else:
        raise TypeError(
            "elements must be pairs (id, label), dicts, Arrow batches or tf.train.Examples, got "
            f"{type(first).__name__}. Convert them with beam.Map."
        )
    ids, labels = zip(*pairs, strict=True)
    try:
        column = RowIds(list(ids))
    except TypeError:
        raise TypeError(
            "expected ids that are all whole numbers or all text, got others in a batch of "
            f"{len(ids)} rows. Turn the ids into text with beam.Map."
        ) from None
    try:
        codes = np.asarray(labels)
    except ValueError:
        raise TypeError(
            f"expected labels of one type, got several in a batch of {len(ids)} rows. Turn them "
            "into numbers with beam.Map."
        ) from None
    return column, codes, lambda noisy: list(map(replace, rows, noisy.tolist()))


def _check_fields(names: Iterable[str], present: Iterable[str]) -> None:
    if missing := [name for name in names if name not in present]:
        raise ValueError(
            f"rows have no field {' and no '.join(map(repr, missing))}; they have "
            f"{', '.join(map(repr, present))}. Name the fields with id= and label=."
        )


def _parsed(row: Any) -> Any:
    import tensorflow as tf

    return tf.train.Example.FromString(row) if isinstance(row, bytes) else row


def _value(example: Any, name: str) -> Any:
    features = example.features.feature
    _check_fields([name], sorted(features))
    feature = features[name]
    # A feature has one of these lists, or none, and the others are empty.
    values: Any = (*feature.bytes_list.value, *feature.float_list.value, *feature.int64_list.value)
    if len(values) != 1:
        raise ValueError(
            f"feature {name!r} must have one value in each Example, got {len(values)}. Fill it, or "
            "leave rows out, by a rule that does not look at labels."
        )
    return values[0].decode() if isinstance(values[0], bytes) else values[0]


def _relabelled(label: str, row: Any, value: float) -> Any:
    example = type(_parsed(row))()
    example.CopyFrom(_parsed(row))
    feature = example.features.feature[label]
    feature.Clear()
    values = feature.int64_list if isinstance(value, int) else feature.float_list
    values.value.append(value)
    return example.SerializeToString() if isinstance(row, bytes) else example
