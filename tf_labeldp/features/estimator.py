"""``Estimator``, the base of feature maps and heads: scikit-learn's conventions, Keras export."""

from __future__ import annotations

import contextlib
import itertools
import re
import types
from collections.abc import Iterator, Sequence, Sized
from typing import Any, TypeVar

import numpy as np
from scipy import sparse
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils import check_array
from sklearn.utils.validation import check_is_fitted

from tf_labeldp._columns import Column
from tf_labeldp._progress import without_input_warnings
from tf_labeldp.accounting import Public, PublicInput, Receipt, Receipts, Setting, public_input
from tf_labeldp.accounting.provenance import Weights
from tf_labeldp.features._containers import ArrayConvertible, KerasExport
from tf_labeldp.features.tables import MISSING_INTEGER, as_table, symbolic_inputs
from tf_labeldp.vault.ledger import Ledger
from tf_labeldp.vault.model_history import TrainedModel

_Self = TypeVar("_Self", bound="Estimator")
_Map = TypeVar("_Map", bound="FeatureMap")
_INPUT_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.-]*")
"""Input names with which a Keras model saves, loads and exports for serving."""
RESHAPE = (
    "Reshape your data: x[np.newaxis] is one example, x[:, np.newaxis] one feature of all "
    "examples; batch a data set; give texts an encoder."
)
NO_ROWS = "features hold no rows; give at least one."
_LAYER_NAMES = frozenset(
    """
    above_low clip encoded_columns head label_range neighbour_smoothing neighbours
    principal_components public_center_and_scale random_fourier_features spread start table_codes
    tree_ensemble unit_rows unit_spread_rows
    """.split()
)
"""Layer names that no input may have: Keras needs unique names within a model."""


class _Family:
    """The identity that an estimator shares with its clones; a class, so that pickle keeps it."""


class Estimator(BaseEstimator):
    """A scikit-learn estimator that treats its encoder as a value, not as a nested estimator."""

    feature_names_in_: np.ndarray
    _family: object = None  # set where clones need it
    _fitted_ends: Any = None  # the range of the numbers in fit, of images
    _takes_tables = False  # whether it takes texts and missing values

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Returns the constructor's arguments by name, without the arguments of an encoder."""
        del deep
        return super().get_params(deep=False)

    def set_params(self: _Self, **params: Any) -> _Self:
        """Sets constructor arguments by name; the next ``fit`` uses them."""
        inner = [name for name in params if "__" in name]
        if inner:
            raise ValueError(
                f"Invalid parameter {inner[0]!r}: an encoder stays as it was fitted. Fit another "
                "encoder with these arguments, and set it."
            )
        return super().set_params(**params)

    def __sklearn_clone__(self: _Self) -> _Self:
        # scikit-learn would also clone the encoder, unfitted or without its receipts.
        clone = type(self)(**self.get_params())
        clone._family = self._family_of_clones()
        return clone

    def _family_of_clones(self) -> object:
        if self._family is None:
            self._family = _Family()
        return self._family

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        if self._takes_tables:
            tags.input_tags.allow_nan = tags.input_tags.string = True
            tags.input_tags.categorical = True
        return tags

    @contextlib.contextmanager
    def _unchanged_on_failure(self) -> Iterator[None]:
        """Restores all attributes after an error: a failed fit changes no fitted estimator."""
        attributes: Any = vars(self)
        before = dict(attributes)
        try:
            yield
        except BaseException:
            attributes.clear()
            attributes.update(before)
            raise

    def _refuse_unfitted(self, attribute: str) -> None:
        check_is_fitted(self, attribute, msg="this %(name)s is not fitted. Call fit first.")

    def _checked_inputs(self, X: Any, *, encoder: Any = None, is_fitted: bool = False) -> Any:
        """Returns rows (n, p), an array or a CSR matrix, after scikit-learn's checks.

        Tables, data sets, images and the vectors that an encoder takes return unchanged: the reader
        checks them.
        """
        X = as_table(PublicInput.bare(X))
        is_list = encoder is not None and isinstance(X, (list, tuple))
        if is_list and all(isinstance(row, str) for row in X):
            return list(X)  # texts, which an encoder gets as a list
        if isinstance(X, list):
            X = Column.stacked_rows(X)
        if isinstance(X, ArrayConvertible) and not isinstance(X, Sized):
            X = np.asarray(X)
        is_array = isinstance(X, np.ndarray) and X.dtype.names is None and X.ndim <= 2
        if not (is_array or sparse.issparse(X)) or (encoder is not None and X.ndim != 2):
            return X
        if X.ndim < 2:
            raise ValueError(f"features must have shape (n, d), got {X.shape}. {RESHAPE}")
        X = check_array(
            X,
            accept_sparse="csr",
            dtype=None,
            ensure_all_finite=False,
            ensure_min_samples=0,
            input_name="X",
        )
        if not is_fitted and X.shape[0] == 0:
            raise ValueError(NO_ROWS)
        if is_fitted and self._known_columns() is None:
            self._check_width(X.shape[1], getattr(self, "n_features_in_", X.shape[1]))
        return X

    def _check_width(self, found: int, expected: int) -> None:
        if found != expected:
            raise ValueError(
                f"X has {found} features, but {type(self).__name__} is expecting {expected} "
                "features as input. Give the columns of fit, in their order."
            )

    def _remember_columns(self, columns: tuple[str, ...] | None, width: int) -> None:
        """Sets ``n_features_in_``, and ``feature_names_in_`` or deletes them."""
        if self._known_columns() is not None:
            del self.feature_names_in_
        self.n_features_in_ = width
        if columns is not None:
            self.feature_names_in_ = np.array(columns, dtype=object)
            self.n_features_in_ = len(columns)

    def _set_fitted(self, columns: tuple[str, ...] | None, width: int, **attributes: Any) -> None:
        """Replaces all fitted attributes: none that this fit lacks is left of an earlier one."""
        for name in [name for name in vars(self) if name.endswith("_") and name[0] != "_"]:
            delattr(self, name)
        for name, value in attributes.items():
            setattr(self, name, value)
        self._remember_columns(columns, width)

    def _known_columns(self) -> tuple[str, ...] | None:
        names = getattr(self, "feature_names_in_", None)
        return None if names is None else tuple(names)


class FeatureMap(TransformerMixin, Estimator):
    """A map of public inputs to features ``float32`` (n, ``n_features_out_``), by ``transform``."""

    encoder: Any = None  # the encoder whose features the map takes
    maps: tuple[Any, ...] = ()  # the maps whose features it has side by side
    finds_columns = True  # whether it checks the columns of a table itself
    _reads_columns = True  # whether it takes any table as a dict of columns
    _keeps_features = False  # whether it is a ``PublicEncoder``, whose encoder may be of others
    receipts_: tuple[Receipt, ...] = ()

    @staticmethod
    def is_own(encoder: Setting[Any]) -> bool:
        """Returns whether an encoder is a map of this library, or a method of one."""
        inner = PublicInput.bare(encoder)
        owner = inner.__self__ if isinstance(inner, types.MethodType) else inner
        return isinstance(owner, FeatureMap) and not owner._keeps_features

    def fit_transform(self: _Map, X: Public[Any], y: Setting[Any] = None) -> Any:
        """Fits, and returns the features of the same inputs: a lazy frame is collected once."""
        public = public_input(X)
        return self.fit(public, y).transform(public.value)

    def _kept_features(self, X: Any) -> Any:
        """Returns the features of inputs whose rows are all kept, or None."""
        del X

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float32"]
        return tags


def note_release(layer: Any, receipts: tuple[Receipt, ...], weights: Any = None) -> None:
    """Attaches receipts to a layer, or to some of its weights; the layer's files keep them."""
    layer.label_dp_receipts = Receipts(receipts).to_bytes() if receipts else b""
    if receipts:
        own = layer.weights if weights is None else weights
        TrainedModel(layer).note_counted(receipts, own)
        # The others are public: a store recognizes them by their digests alone.
        Ledger.record_digests(
            Weights.digests(layer.weights if weights is not None else ()), receipts
        )


def input_names(columns: list[str]) -> dict[str, str]:
    """Returns a Keras input name per column: the column's name if Keras allows it.

    Serving keeps only letters, digits and underscores, so names also differ in these alone.
    """
    names: dict[str, str] = {}
    taken = set(_LAYER_NAMES)
    for column in columns:
        served = re.sub(r"\W", "_", column).lower()
        if _INPUT_NAME.fullmatch(column) and served not in taken:
            names[column] = column
            taken.add(served)
    for column in columns:
        if column not in names:
            name = stem = "column_" + re.sub(r"\W", "_", column, flags=re.ASCII)
            for number in itertools.count(2):
                if name.lower() not in taken:
                    break
                name = f"{stem}_{number}"
            names[column] = name
            taken.add(name.lower())
    return names


def keras_model(inputs: Any, outputs: Any, name: str) -> Any:
    """Returns a Keras model; its inputs may be named differently from their columns."""
    import keras

    with without_input_warnings():
        return keras.Model(inputs, outputs, name=name)


def columns_model(columns: Sequence[Any], is_matrix: bool, features: Any, name: str) -> Any:
    """Returns a Keras model from raw columns, (n, 1) each by name or a matrix (n, p), to features.

    A column has ``name`` and ``input_dtype``, and its ``layers`` encode it; ``features`` maps the
    encoded columns side by side to the outputs.
    """
    import keras

    encoded: Any
    if is_matrix:
        encoded = keras.Input((len(columns),), name="table")
        raw = [encoded[:, place : place + 1] for place in range(len(columns))]
        raw = [
            _as_dtype(part, column.input_dtype) for part, column in zip(raw, columns, strict=True)
        ]
    else:
        encoded = raw = [keras.Input((1,), dtype=column.input_dtype) for column in columns]
    parts = [
        keras.ops.cast(column.layers(part), "float32")
        for column, part in zip(columns, raw, strict=True)
    ]
    rows = parts[0] if len(parts) == 1 else keras.layers.Concatenate(dtype="float32")(parts)
    outputs = features(rows)
    if is_matrix:
        return keras.Model(encoded, outputs, name=name)
    # The inputs have the names of the columns, and no other layer may share these.
    model = keras.Model(encoded, outputs, name="encoded_columns")
    names = input_names([str(column.name) for column in columns])
    inputs = {
        str(column.name): keras.Input((1,), dtype=column.input_dtype, name=names[str(column.name)])
        for column in columns
    }
    return keras_model(inputs, model([*inputs.values()]), name)


def _as_dtype(numbers: Any, dtype: str) -> Any:
    """Returns ``float32`` numbers as a Keras tensor of a dtype; NaN is the smallest ``int64``."""
    from keras import ops

    if dtype != "float32":
        numbers = ops.where(ops.isnan(numbers), float(MISSING_INTEGER), numbers)
    return ops.cast(numbers, dtype)


def with_encoder(encoder: Any, width: int) -> tuple[Any, Any]:
    """Returns new Keras inputs, and an encoder's outputs for them (m, width)."""
    import keras

    encoder = PublicInput.bare(encoder)
    if encoder is None:
        features = keras.Input((width,), name="features")
        return features, features
    model = encoder.to_keras() if isinstance(encoder, KerasExport) else encoder
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"expected an encoder with a Keras model, got {type(encoder).__name__}. Pass "
            "to_keras(encoder=...) a Keras model that computes the same features."
        )
    old_inputs = symbolic_inputs(model)
    if old_inputs is None:
        raise TypeError(
            f"expected an encoder with Keras inputs, got a {type(model).__name__}. Wrap it: "
            "keras.Model(inputs, encoder(inputs)) with inputs = keras.Input(...)."
        )
    shape = tuple(model.output_shape)
    if len(shape) != 2 or shape[1] != width:
        raise ValueError(
            f"expected an encoder with {width} outputs, as the head was fitted on, got shape "
            f"{shape}. Pass the encoder that made the features, flattened."
        )
    inputs = keras.tree.map_structure(
        lambda old: keras.Input(tuple(old.shape[1:]), dtype=old.dtype, name=old.name), old_inputs
    )
    return inputs, model(inputs)
