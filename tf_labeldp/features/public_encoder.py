"""``PublicEncoder``: an encoder that was made elsewhere, with the features that it computed."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import numbers
import os
import pathlib
import pickle
import re
import types
import zipfile
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
from scipy import sparse
from sklearn.exceptions import NotFittedError

from tf_labeldp._progress import Progress, without_retracing_warnings
from tf_labeldp._validate import counted
from tf_labeldp.accounting import Public, PublicInput, Receipt, Receipts, Setting, public_input
from tf_labeldp.accounting.provenance import Weights
from tf_labeldp.features import _pixels
from tf_labeldp.features._containers import Dataset, Frame, KerasModel, Tensor, Typed
from tf_labeldp.features.estimator import NO_ROWS, FeatureMap
from tf_labeldp.features.reader import (
    FeatureRows,
    check_encoder,
    encoded,
    finds_columns,
    function_of,
    in_memory,
    is_indexed_source,
    parts_of,
    refuse_endless,
    stacked,
)
from tf_labeldp.features.tables import (
    as_table,
    is_structured,
    names_of,
    symbolic_inputs,
    to_inputs,
)
from tf_labeldp.vault.files import PlainFile
from tf_labeldp.vault.records import Arrays

_Self = TypeVar("_Self", bound="PublicEncoder")
_BLOCK = 1024
"""Rows per call of an encoder, and per file of a cache: an interrupted run loses these at most."""
_BATCH = 128
"""Rows per step of a Keras model, which bounds its memory."""
_APPLICATIONS = "keras.src.applications"
"""Modules with the functions that build the models of ``keras.applications``."""
_MOST_BYTES = 4e9
"""The most memory for kept features; further rows are encoded on each reading."""


@dataclasses.dataclass(eq=False, repr=False)
class PublicEncoder(FeatureMap):
    """Features of an encoder that was made elsewhere, computed once for each example and kept.

    ``encoder=`` of heads and of the front door makes one of any encoder. Make it yourself to share
    the features between fits, to keep them in a folder, or to set a size or a pixel range.

    Images are resized to the size that a Keras model takes, and grey ones get three channels if it
    takes colours. Their values are compared with the range that the model expects, as far as it is
    known: from a leading ``Rescaling`` or ``Normalization`` layer, or from the preprocessing of
    ``keras.applications``. Without ``pixel_range`` a Keras model gets the values as they are, and
    another range is refused. ``to_keras`` takes the same raw images.

    Guarantee:
        Fitting and using it reads no label. Assumes that the encoder was made without the labels,
        except for uses that its receipts count; statements name it, with a digest of its weights,
        or of its outputs where it is no Keras model.

    Args:
        model: a Keras model with outputs (n, d); a backbone of KerasHub, whose outputs are
            averaged over positions; the name of a model in ``keras.applications``, built without
            its top and with average pooling; a fitted scikit-learn transformer or pipeline; or a
            function from raw inputs to (m, d), which gets rows in the type of the inputs: lists of
            texts, arrays, data frames.
        size: height and width to which images are resized, one number or two. None for the model's
            own size, and for 224 with a name.
        pixel_range: the range (low, high) that the model expects, to which images are rescaled; or
            a name in ``keras.applications``, whose preprocessing is applied. None for a name's own.
        weights: with a name: the weights, as ``keras.applications`` takes them: ``"imagenet"``, a
            path to a file, or None for random ones.
        cache_dir: folder that keeps features, by digests of weights and rows; a run that was
            interrupted continues there. Before features of a function or transformer are read, one
            row is computed and compared. None keeps features in memory alone.

    Attributes:
        digest_: SHA-256 of weights or outputs.
        n_features_out_: number of features.

    Raises:
        OSError: the weights of a name are neither on this machine nor reachable.
        TypeError: a model of another type.
        ValueError: ``fit`` gets inputs that do not fit the model, pixels in another or an unknown
            range, or features that are no vectors, not finite, or equal for all examples; a second
            ``fit`` or ``transform`` gets images of another shape or range than the first ``fit``.

    Example:
        >>> import keras
        >>> images = np.random.default_rng(0).integers(0, 256, (20, 8, 8, 3), dtype=np.uint8)
        >>> model = keras.Sequential(
        ...     [keras.Input((16, 16, 3)), keras.layers.GlobalAveragePooling2D()]
        ... )
        >>> encoder = PublicEncoder(model, size=16, pixel_range=(0, 1)).fit(images)
        >>> encoder.transform(images).shape, encoder.to_keras().input_shape
        ((20, 3), (None, 8, 8, 3))
    """

    model: Public[Any]
    _: dataclasses.KW_ONLY
    size: int | tuple[int, int] | None = None
    pixel_range: tuple[float, float] | str | None = None
    weights: str | os.PathLike[str] | None = "imagenet"
    cache_dir: str | os.PathLike[str] | None = None

    _reads_columns = False
    _keeps_features = True
    _built: tuple[Any, Any] = dataclasses.field(default=(None, None), init=False)
    _fitted_with: tuple[Any, ...] = dataclasses.field(default=(), init=False)

    def fit(self: _Self, X: Public[Any], y: Setting[Any] = None) -> _Self:
        """Computes the features of all rows that are not kept yet, and keeps them.

        Args:
            X: public inputs of the model: an array, a list of texts, a table, a dict of arrays, or
                a ``tf.data.Dataset`` of batches.
            y: ignored; scikit-learn's pipelines pass them to every step.

        Returns:
            The encoder itself.
        """
        del y
        public = public_input(X)
        inputs = public.value
        with self._unchanged_on_failure():
            model = self._keras_model()
            weights = (
                None
                if model is None
                else PublicInput.digest_of(*map(Weights.value_of, model.weights))
            )
            is_new = self._is_new(weights)
            if is_new or self._kept_features(inputs) is None:
                self._prepare(model, weights, inputs, is_new)
                self._encode_all(inputs, weights)
        # Unknown training of the model has a new receipt on each reading, and is found there.
        of_model = [part for part in public_input(self.model).receipts if part.kind != "unknown"]
        self.receipts_ = Receipts.merged(public.receipts, of_model, (self._receipt,))
        return self

    def transform(self, X: Public[Any]) -> Any:
        """Returns the features, ``float32`` ``(m, n_features_out_)``; CSR if they are sparse.

        Args:
            X: as in ``fit``, with any number of rows.
        """
        self._refuse_unfitted("digest_")
        parts = [self._features(block)[1] for block in _blocks(X)]
        return stacked(parts) if parts else np.zeros((0, self.n_features_out_), np.float32)

    def to_keras(self) -> Any:
        """Returns a ``keras.Model`` from raw inputs to the features; it shares the weights.

        Raises:
            TypeError: the model is a function or a transformer, which has no Keras model.
        """
        self._refuse_unfitted("digest_")
        if self._network is None:
            raise TypeError(
                "expected an encoder with a Keras model, got "
                f"{type(PublicInput.bare(self.model)).__name__}. Pass to_keras(encoder=...) a "
                "Keras model that computes the same features."
            )
        return self._network

    def _kept_features(self, X: Any) -> Any:
        """Returns the features of inputs whose rows are all kept, or None."""
        if isinstance(X, Dataset) or is_indexed_source(X) or not self._fitted_with:
            return None
        keys = _row_keys(X)
        return None if keys is None else self._kept.take(keys)

    @property
    def finds_columns(self) -> bool:  # type: ignore[override]
        """Whether the model checks the columns of a table itself, as transformers do."""
        return finds_columns(PublicInput.bare(self.model))

    def __getstate__(self) -> dict[str, Any]:
        # Without the features, which are computed again or read from the folder.
        return {**super().__getstate__(), "_kept": _KeptFeatures([], None)}

    def _keras_model(self) -> Any:
        """Returns the Keras model, built from a name or pooled; None for other encoders."""
        model = PublicInput.bare(self.model)
        settings = (model, self.weights, self.size)
        if isinstance(model, str):
            if self._built[0] != settings:
                self._built = settings, _pixels.application(*settings)
            return self._built[1]
        if isinstance(model, KerasModel):
            return _pooled(model)
        if isinstance(model, types.FunctionType) and model.__module__.startswith(_APPLICATIONS):
            name = _name_of(model)
            raise TypeError(
                f"expected an encoder, got the function {name}, which builds one. Give its name, "
                f"{name!r}."
            )
        check_encoder(model)
        return None

    def _is_new(self, weights: str | None) -> bool:
        """Returns whether kept features are of other weights or other arguments."""
        if not self._fitted_with or self._weights != weights:
            return True
        model, *settings = self._fitted_with
        return model is not PublicInput.bare(self.model) or settings != self._settings()

    def _settings(self) -> list[Any]:
        return [self.size, self.pixel_range, self.weights, self.cache_dir]

    def _prepare(self, model: Any, weights: str | None, inputs: Any, is_new: bool) -> None:
        first = next(_blocks(inputs), None)
        if first is None:
            raise ValueError(NO_ROWS)
        name, own = _name_of(self.model), PublicInput.bare(self.model)
        front = pixels = layers = None
        if model is not None:
            wanted = self.pixel_range or (own if isinstance(own, str) else None)
            front, pixels = _pixels.front_of(model, first, _blocks(inputs), self.size, wanted, name)
            layers = _layers_digest(model)
        identity = (name, weights, front, layers)
        if is_new:
            self._network = model if front is None else front.to_keras(model)
            self._identity, self._weights, self._kept = identity, weights, _KeptFeatures([], None)
            self._fitted_with, self._pixels = (own, *self._settings()), pixels
        elif self._identity != identity:
            # Heads that have this encoder would get other features.
            raise ValueError(
                f"expected inputs as in the first fit of the encoder {name!r}, got images of "
                "another shape or range. Make another PublicEncoder for them."
            )
        self._folder = None
        if self.cache_dir is not None:
            digest = hashlib.sha256(repr(identity).encode()).hexdigest()[:32]
            self._folder = _Folder(pathlib.Path(self.cache_dir) / digest)
            if weights is None:
                self._check_folder(self._folder, first)

    def _check_folder(self, folder: _Folder, first: Any) -> None:
        """Raises if another function or transformer of the same name wrote a folder."""
        keys = _row_keys(first)
        if keys is None or keys[0] not in folder:
            return
        computed = self._computed(FeatureRows(first).raw(np.arange(1)))
        stored = folder.read(keys[:1])
        if stored.shape != computed.shape or not np.allclose(stored, computed, 1e-3, 1e-5):
            raise ValueError(
                f"expected features of the encoder {_name_of(self.model)!r} in {folder.path}, got "
                "those of another one. Give each encoder its own cache_dir."
            )

    def _encode_all(self, inputs: Any, weights: str | None) -> None:
        keys: list[bytes] | None = []
        parts: list[Any] = []
        size = 0
        rows = FeatureRows(inputs)
        with Progress("Encoding", None if rows.is_dataset else rows.num_inputs) as progress:
            for block in _blocks(inputs):
                found_keys, found = self._features(block)
                keys = None if found_keys is None or keys is None else keys + found_keys
                parts.append(found)
                progress.advance(found.shape[0])
                size += (found.data if sparse.issparse(found) else found).nbytes
                if size > _MOST_BYTES:
                    keys = None
                    break
        features, name = stacked(parts), _name_of(self.model)
        if features.shape[0] > 1 and not np.any(_spread(features)):
            raise ValueError(
                f"expected features that differ, got equal rows for all {features.shape[0]} "
                f"examples from the encoder {name!r}. Check its weights and the range of its "
                "inputs."
            )
        self.digest_ = weights or PublicInput.digest_of(*_arrays(features))
        of = "weights" if weights else f"outputs for {counted(features.shape[0], 'row')},"
        self._receipt = Receipt.of_encoder(name, of, self.digest_)
        self.n_features_out_ = int(features.shape[1])
        if keys is not None:
            self._kept = _KeptFeatures(keys, features)

    def _features(self, block: Any) -> tuple[list[bytes] | None, Any]:
        """Returns the digests of a block's rows and its features, computed where they are new."""
        keys = _row_keys(block)
        if keys is None:
            return None, self._computed(block)
        kept = np.array([key in self._kept.places for key in keys], bool)
        stored = np.array([self._folder is not None and key in self._folder for key in keys], bool)
        stored &= ~kept
        new = np.flatnonzero(~kept & ~stored)
        parts: list[Any] = []
        if kept.any():
            parts.append(self._kept.take([keys[place] for place in np.flatnonzero(kept)]))
        if self._folder is not None and stored.any():
            parts.append(self._folder.read([keys[place] for place in np.flatnonzero(stored)]))
        if new.size:
            is_whole = new.size == len(keys)
            computed = self._computed(block if is_whole else FeatureRows(block).raw(new))
            parts.append(computed)
            if self._folder is not None and not sparse.issparse(computed):
                self._folder.write([keys[place] for place in new], computed)
        if len(parts) == 1:
            return keys, parts[0]
        order = np.concatenate([np.flatnonzero(kept), np.flatnonzero(stored), new])
        return keys, stacked(parts)[np.argsort(order)]

    def _computed(self, block: Any) -> Any:
        model: Any = PublicInput.bare(self.model)
        if self._network is not None:
            _pixels.check_rows(self._network, block, self._pixels)
            model = _predictor(self._network)
        try:
            features = encoded(block, function_of(model))
        except NotFittedError:
            raise ValueError(
                f"expected a fitted transformer, got an unfitted {type(model).__name__}. Fit it "
                "first, on public rows and without labels."
            ) from None
        features = features.astype(np.float32)
        rows = features.sum(axis=1) if sparse.issparse(features) else features
        bad = int((~np.isfinite(np.asarray(rows).reshape(features.shape[0], -1)).all(axis=1)).sum())
        if bad:
            raise ValueError(
                f"the encoder's features must be finite, but {bad} of {features.shape[0]} rows "
                "hold NaN or infinity. Check its weights and the range of its inputs."
            )
        return features


def fitted_encoder(encoder: Any, inputs: Any) -> Any:
    """Returns an encoder that keeps its features of these inputs.

    Maps of this library are returned as they are, and so is None. A ``PublicInput`` around an
    encoder keeps its receipts.
    """
    inner = PublicInput.bare(encoder)
    if isinstance(inner, PublicEncoder):
        inner.fit(inputs)
        return encoder
    if inner is None or FeatureMap.is_own(inner):
        return encoder
    return PublicEncoder(encoder).fit(inputs)


class _KeptFeatures:
    """Features by the digests of their rows; slots hide them from the search for receipts."""

    __slots__ = ("features", "places")

    def __init__(self, keys: list[bytes], features: Any) -> None:
        self.places = {key: place for place, key in enumerate(keys)}
        self.features = features

    def take(self, keys: list[bytes]) -> Any:
        """Returns the features of rows (m, d), without a copy of all; None if one is missing."""
        if not all(key in self.places for key in keys):
            return None
        rows = np.fromiter(map(self.places.__getitem__, keys), np.int64, len(keys))
        is_whole = self.features.shape[0] == len(rows) and bool((np.diff(rows) == 1).all())
        return self.features if is_whole else self.features[rows]


# Pickles of version 0.3 have this name of the class.
_Rows = _KeptFeatures


class _Folder:
    """Features in files, each with the digests of its rows; a file is complete or absent."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._places: dict[bytes, tuple[pathlib.Path, int]] = {}
        path.mkdir(parents=True, exist_ok=True)
        for file in sorted(path.glob("*.npz")):
            # A damaged file counts as absent.
            with contextlib.suppress(OSError, ValueError, KeyError, zipfile.BadZipFile):
                with np.load(file, allow_pickle=False) as arrays:
                    self._add(file, arrays["keys"])

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def read(self, keys: list[bytes]) -> np.ndarray:
        """Returns the features of rows (m, d) that are all here."""
        places = [self._places[key] for key in keys]
        tables = {}
        for file in {file for file, _ in places}:
            with np.load(file, allow_pickle=False) as arrays:
                tables[file] = arrays["features"]
        return np.stack([tables[file][row] for file, row in places])

    def write(self, keys: list[bytes], features: np.ndarray) -> None:
        table = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1)
        file = self.path / f"{hashlib.sha256(table.tobytes()).hexdigest()[:16]}.npz"
        arrays = Arrays(keys=table, features=features)
        PlainFile(file).write(arrays.to_bytes(), replace=True)
        self._add(file, table)

    def _add(self, file: pathlib.Path, keys: np.ndarray) -> None:
        for row, key in enumerate(keys):
            self._places[key.tobytes()] = (file, row)


def _blocks(inputs: Any) -> Iterator[Any]:
    """Yields inputs in blocks of rows, in their own type."""
    if isinstance(inputs, Dataset):
        refuse_endless(inputs)
        for element in inputs.as_numpy_iterator():
            yield element[0] if isinstance(element, tuple) else element
        return
    inputs = _in_rows(inputs)
    rows = FeatureRows(inputs)
    size = rows.num_inputs
    for start in range(0, size, _BLOCK):
        yield inputs if size <= _BLOCK else rows.raw(np.arange(start, min(start + _BLOCK, size)))


def _in_rows(inputs: Any) -> Any:
    """Returns inputs whose rows can be taken; a list of texts stays a list."""
    inputs = as_table(inputs)
    if isinstance(inputs, list) and not all(isinstance(row, str) for row in inputs):
        return np.asarray(inputs)
    if isinstance(inputs, Tensor):
        return inputs.numpy()
    return inputs.tocsr() if sparse.issparse(inputs) else inputs


def _row_keys(inputs: Any) -> list[bytes] | None:
    """Returns a digest of each row; None for inputs whose rows have no content to digest."""
    try:
        parts = [_row_contents(part) for part in parts_of(inputs)]
        names = repr(list(names_of(as_table(inputs)) or ())).encode()
    except (AttributeError, TypeError, ValueError, pickle.PicklingError):
        return None
    rows = parts[0] if len(parts) == 1 else zip(*parts, strict=True)
    contents = (row if isinstance(row, bytes) else repr(row).encode() for row in rows)
    return [hashlib.blake2b(names + content, digest_size=16).digest() for content in contents]


def _row_contents(part: Any) -> list[Any]:
    """Returns the content of each row, as bytes or as a value with an exact ``repr``."""
    rows = in_memory(part)
    if sparse.issparse(rows):
        starts = rows.indptr
        return [
            rows.indices[a:b].tobytes() + b"/" + rows.data[a:b].tobytes()
            for a, b in itertools.pairwise(starts)
        ]
    if rows.dtype.kind not in "biuf" or rows.ndim == 1:
        return [_exact(value) for value in rows.tolist()]
    flat = np.ascontiguousarray(rows).reshape(len(rows), -1)
    kind = f"{rows.dtype.str}{rows.shape[1:]}".encode()
    return [kind + row.tobytes() for row in flat]


def _exact(value: Any) -> Any:
    """Returns a value, or its content in bytes where its ``repr`` would leave some out."""
    if isinstance(value, (list, tuple)):
        return [_exact(entry) for entry in value]
    is_exact = value is None or isinstance(value, (str, bytes, numbers.Number))
    return value if is_exact else pickle.dumps(value)


def _layers_digest(model: Any) -> str:
    """Returns a digest of a model's layers: equal weights may be used in another way.

    It is without the numbers that Keras appends to names, which differ between runs.
    """
    try:
        config = repr(model.get_config())
    except NotImplementedError:  # a subclass of keras.Model
        config = type(model).__qualname__
    return hashlib.sha256(re.sub(r"_\d+\b", "", config).encode()).hexdigest()


def _pooled(model: Any) -> Any:
    """Returns a backbone of KerasHub with its outputs averaged over positions.

    Any other model is returned as it is.
    """
    if not any(kind.__name__ == "Backbone" for kind in type(model).__mro__):
        return model
    import keras

    inputs, outputs = symbolic_inputs(model), model.output
    if isinstance(outputs, dict):  # of text: the sequence; of images: the coarsest level
        outputs = outputs.get("sequence_output", list(outputs.values())[-1])
    if len(outputs.shape) == 4:
        outputs = keras.layers.GlobalAveragePooling2D(name="average")(outputs)
    elif len(outputs.shape) == 3:
        mask = inputs.get("padding_mask") if isinstance(inputs, dict) else None
        outputs = keras.layers.GlobalAveragePooling1D(name="average")(outputs, mask=mask)
    return keras.Model(inputs, outputs, name=model.name)


def _predictor(network: Any) -> Any:
    """Returns the function from rows in any type to a Keras model's outputs."""

    def predict(block: Any) -> Any:
        if isinstance(block, Frame) or is_structured(block):
            block = to_inputs(block, network)
        elif isinstance(block, list) or (isinstance(block, Typed) and block.dtype.kind == "O"):
            import keras

            inputs = symbolic_inputs(network)
            if isinstance(inputs, Typed) and inputs.dtype == "string":
                rows = np.asarray(block, str).reshape(-1, *network.input_shape[1:])
                block = keras.ops.convert_to_tensor(rows)
        with without_retracing_warnings():
            return network.predict(block, batch_size=_BATCH, verbose=0)

    return predict


def _name_of(model: Any) -> str:
    model = PublicInput.bare(model)
    if isinstance(model, str):
        return model
    if isinstance(model, KerasModel):
        return str(model.name)
    return str(getattr(model, "__qualname__", type(model).__name__))


def _arrays(features: Any) -> tuple[np.ndarray, ...]:
    is_sparse = sparse.issparse(features)
    return (features.indptr, features.indices, features.data) if is_sparse else (features,)


def _spread(features: Any) -> np.ndarray:
    """Returns the range of each column (d,)."""
    most, least = features.max(axis=0), features.min(axis=0)
    return (most - least).toarray() if sparse.issparse(features) else most - least
