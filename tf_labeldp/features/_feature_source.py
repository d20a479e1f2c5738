"""Public features in blocks, from arrays, data sets and encoders; nothing here looks at a label,
except that those of a data set of pairs are collected.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

_BLOCK_BYTES = 1 << 26


class FeatureSource:
    """Rows of features that can be read again and again, in the same order.

    Args:
        source: an array (n, d) of numbers (also memory-mapped), what the encoder takes, or a
            ``tf.data.Dataset`` of batches x or (x, y) that gives the same whenever it is read.
        encoder: what makes features (m, d) of raw inputs: an object with ``transform``, a Keras
            model, or a callable; None if the source has features already.
        max_bytes: the most memory for features of an encoder that are kept; if they are larger,
            the encoder is asked again on each reading.

    Attributes:
        raw: the array that an encoder is given; None for anything else.
    """

    def __init__(self, source: Any, encoder: Any = None, max_bytes: float = 2e9) -> None:
        self._is_dataset = hasattr(source, "as_numpy_iterator")
        self._encoder = encoder
        self._source = source
        encoded = encoder is not None and isinstance(source, np.ndarray)
        self.raw = source if encoded else None
        self._raw: Any = None
        if not self._is_dataset:
            self._source, to_cut = cuttable(encoder, source)
            if to_cut is not None:
                self._encode_array(source, max_bytes)

    @property
    def num_rows(self) -> int | None:
        """n, or None for a data set, which has to be read for it."""
        return None if self._is_dataset else int(self._source.shape[0])

    def blocks(self, labels: list[np.ndarray] | None, digest: Any = None) -> Iterator[np.ndarray]:
        """Yields rows as given (m, d), in blocks of a size that suits matrix products.

        Args:
            labels: takes the labels of a data set of pairs, if it is a list.
            digest: is updated with all that is read, if there is one.
        """
        if not self._is_dataset:
            yield from self._array_blocks(digest)
            return
        waiting: list[np.ndarray] = []
        for batch in self._batches(labels, digest):
            if waiting and batch.shape[1] != waiting[0].shape[1]:
                raise ValueError(
                    f"batches have {waiting[0].shape[1]} and {batch.shape[1]} features; all need "
                    "the same number."
                )
            waiting.append(batch)
            if sum(len(part) for part in waiting) >= _block_rows(batch.shape[1]):
                yield np.concatenate(waiting) if len(waiting) > 1 else batch
                waiting = []
        if waiting:
            yield np.concatenate(waiting)

    def _encode_array(self, source: np.ndarray, max_bytes: float) -> None:
        """Keeps the features of an array, if there is room for them."""
        if source.shape[:1] in ((), (0,)):
            raise ValueError("features hold no rows; give at least one.")
        first = encode(self._encoder, source[:1])
        if 4.0 * first.shape[1] * source.shape[0] > max_bytes:
            self._raw = source
            return
        rows = _block_rows(first.shape[1])
        kept = np.empty((source.shape[0], first.shape[1]), np.float32)
        for start in range(0, source.shape[0], rows):
            kept[start : start + rows] = encode(self._encoder, source[start : start + rows])
        self._source = kept

    def _array_blocks(self, digest: Any) -> Iterator[np.ndarray]:
        array = self._source
        step = _block_rows(array.shape[1]) if self._raw is None else 4096
        for start in range(0, array.shape[0], step):
            block = array[start : start + step]
            if self._raw is not None:
                block = encode(self._encoder, block).astype(np.float32)
            if digest is not None:  # of features, kept or not: another encoder is other rows
                if start == 0:
                    digest.update(f"{block.dtype.str}{block.shape[1:]}".encode())
                digest.update(np.ascontiguousarray(block).data)
            yield block

    def _batches(self, labels: list[np.ndarray] | None, digest: Any) -> Iterator[np.ndarray]:
        started = False
        for element in self._source.as_numpy_iterator():
            paired = isinstance(element, tuple)
            if paired and len(element) != 2:
                raise ValueError(
                    f"a data set must give batches x or (x, y), got {len(element)} parts."
                )
            x = element[0] if paired else element
            for part in _leaves(x) if digest is not None else ():
                if not started:
                    digest.update(f"{part.dtype.str}{part.shape[1:]}".encode())
                content = part.tolist() if part.dtype.kind == "O" else None
                digest.update(
                    np.ascontiguousarray(part).data if content is None else repr(content).encode()
                )
            started = True
            x = encode(self._encoder, x)
            if paired:
                y = np.asarray(element[1])
                if y.shape[:1] != x.shape[:1]:
                    raise ValueError("a batch has another number of labels than of rows.")
                if labels is not None:
                    labels.append(y)
            if x.shape[0]:
                yield x


def cuttable(encoder: Any, raw: Any) -> tuple[Any, Any]:
    """Returns rows that can be cut, and the encoder that each cut still needs, or None.

    A table of columns can't be cut, and is encoded whole.
    """
    if encoder is None or not isinstance(raw, np.ndarray):
        return encode(encoder, raw), None
    return raw, encoder


def encode(encoder: Any, raw: Any) -> np.ndarray:
    """Returns the features (m, d) of raw inputs, or those given if there is no encoder."""
    if encoder is None:
        return checked_features(raw)
    if isinstance(encoder, type) or not (hasattr(encoder, "transform") or callable(encoder)):
        given = f"the class {encoder.__name__}" if isinstance(encoder, type) else repr(encoder)
        raise TypeError(
            "an encoder must be a fitted feature map, a Keras model or a function from raw inputs "
            f"to (m, d), got {given}."
        )
    if hasattr(encoder, "transform"):
        found = encoder.transform(raw)
    elif hasattr(encoder, "predict_on_batch"):  # a Keras model
        found = encoder.predict(raw, batch_size=256, verbose=0)
    else:
        found = encoder(raw)
    features = np.asarray(found)
    if features.ndim != 2 or features.dtype.kind not in "biuf":
        raise ValueError(
            f"the encoder gave an array of shape {features.shape} and dtype {features.dtype}; "
            "a head needs numbers of shape (m, d). Flatten or pool its outputs."
        )
    return features


def checked_features(features: Any) -> np.ndarray:
    """Returns numbers (n, d) as an array, without a copy where it is one; or raises."""
    if hasattr(features, "toarray"):
        raise TypeError(
            f"features must be an array (n, d), got a sparse {type(features).__name__}. Pass "
            ".toarray() if it fits, or a tf.data.Dataset of dense batches."
        )
    array = np.asarray(features)
    if array.ndim == 0:
        raise TypeError(
            f"features must be an array (n, d), got {type(features).__name__}. A data set is for "
            "fit of a head alone; for the rest, pass its batches one by one."
        )
    if array.ndim != 2 or array.shape[1] == 0:
        hint = (
            "Give one example as x[np.newaxis], one feature as x[:, np.newaxis], and a data set "
            "in batches."
            if array.ndim == 1
            else "Flatten images with .reshape(len(x), -1), or pass an encoder that makes features "
            "of them."
        )
        raise ValueError(f"features must have shape (n, d), got {array.shape}. {hint}")
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"features must be numbers, got dtype {array.dtype}. Encode categories first, for "
            "example with encoder=RandomFourierFeatures().fit(table)."
        )
    return array


def new_digest() -> Any:
    """Returns a hash to be updated."""
    return hashlib.sha256()


def _block_rows(width: int) -> int:
    return max(1, _BLOCK_BYTES // (8 * width))


def _leaves(x: Any) -> list[np.ndarray]:
    return [np.asarray(x[name]) for name in sorted(x)] if isinstance(x, dict) else [np.asarray(x)]
