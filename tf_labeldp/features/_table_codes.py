"""Tables as numbers and category codes for trees, without labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import Public, Setting, public_input
from tf_labeldp.features._random_fourier import as_categories, as_numbers
from tf_labeldp.features.estimator import MISSING_INTEGER, FeatureMap, columns_model, note_release
from tf_labeldp.features.reader import (
    categorical_columns,
    columns_of_fit,
    columns_to_fit,
    hashed_columns,
)

_Self = TypeVar("_Self", bound="TableCodes")
_MISSING_WORDS = ("", "None", "nan", "<NA>", "NaT")
"""The empty text, and missing values of Python, NumPy and pandas as text."""


@dataclasses.dataclass(eq=False, repr=False)
class TableCodes(FeatureMap):
    """Maps a table to ``float32`` numbers and category codes, as boosted trees take them.

    Numbers stay as they are, rounded to ``float32``; booleans become 0 and 1. The categories of a
    column become codes 0, 1, ... in the order of decreasing frequency; columns with more than
    ``most_categories`` are hashed into that many codes. Missing numbers, missing categories (None,
    NaN, the empty text) and categories that are new after ``fit`` become NaN.

    Guarantee:
        The map reads no label. Fitting and using it costs no budget if the table is public and the
        arguments are chosen without the private labels.

    Args:
        categorical: the categorical columns, by name or by place in a 2-D array; None for all
            columns that are neither numbers nor booleans. A column of objects is numeric if its
            entries are numbers or missing.
        most_categories: the most codes of a column, at least 2. ``HistGradientBoosting`` of
            scikit-learn takes 255 at most.

    Attributes:
        columns_: the encoding of each column.
        categorical_: bool (p,), the columns of codes.
        hashed_: the number of categories of each hashed column, by name.
        n_features_out_: p.

    Raises:
        TypeError: ``fit`` gets no table, or text in a numeric column.
        ValueError: ``fit`` gets arguments out of range, unknown column names, infinite numbers, or
            fractions in a categorical column.

    Example:
        >>> import numpy as np
        >>> table = {"age": np.array([20.0, np.nan, 60.0]), "job": np.array(["a", "b", "b"])}
        >>> codes = TableCodes().fit(table)
        >>> codes.transform(table).tolist(), codes.categorical_.tolist()
        ([[20.0, 1.0], [nan, 0.0], [60.0, 0.0]], [False, True])
    """

    categorical: Sequence[str | int] | None = None
    most_categories: int = 254

    def fit(self: _Self, X: Public[Any], y: Setting[Any] = None) -> _Self:
        """Learns the categories.

        Args:
            X: public columns (n,) as a dict, structured array or data frame; an array (n, p);
                a sparse matrix (n, p), which is made dense; or an unshuffled ``tf.data.Dataset``
                of such batches.
            y: ignored; scikit-learn's pipelines pass them to every step.

        Returns:
            The map itself.
        """
        del y
        _validate.integer_at_least("most_categories", self.most_categories, 2)
        public = public_input(X)
        columns, self.receipts_ = columns_to_fit(_narrow(public.value)), public.receipts
        chosen = categorical_columns(columns, self.categorical, numeric_kinds="biuf")
        self.columns_ = tuple(
            CategoryColumn.learn(name, values, self.most_categories)
            if name in chosen
            else NumberColumn.learn(name, values)
            for name, values in columns.items()
        )
        self._is_matrix = 0 in columns and all(
            values.dtype.kind in "biuf" for values in columns.values()
        )
        self.categorical_ = np.array([name in chosen for name in columns])
        self.hashed_ = hashed_columns(self.columns_)
        self.n_features_out_ = len(columns)
        return self

    def transform(self, X: Public[Any]) -> np.ndarray:
        """Returns numbers and codes, ``float32`` (m, p), in the order of the columns of ``fit``.

        Args:
            X: as in ``fit``. Columns are found by name in any order, and other columns are
                ignored; an array needs the same columns as in ``fit``.

        Raises:
            TypeError: a column has another type than in ``fit``.
            ValueError: not fitted, missing columns, or infinite numbers.
        """
        self._refuse_unfitted("columns_", "fit(X)")
        columns = columns_of_fit(_narrow(X), [column.name for column in self.columns_])
        size = len(columns[self.columns_[0].name])
        codes = np.empty((size, len(self.columns_)), np.float32)
        for place, column in enumerate(self.columns_):
            codes[:, place] = column.codes(columns[column.name])
        return codes

    def fit_transform(self, X: Public[Any], y: Setting[Any] = None) -> np.ndarray:
        """Fits and returns the codes of the same table; ignores labels."""
        del y
        public = public_input(X)
        return self.fit(public).transform(public.value)

    def to_keras(self) -> Any:
        """Returns a ``keras.Model`` from raw columns to numbers and codes; it saves and loads.

        It takes an array (n, p) of numbers if ``fit`` did, and otherwise a dict of columns (n, 1)
        by name: float32, int64, or text. A missing number is NaN, a missing text is empty, and a
        missing category of whole numbers is ``-2**63``. If Keras does not allow a column's name, or
        a layer has it, the input is renamed (``column_price_unit`` for ``price/unit``), and Keras
        warns; the dict keeps the column names. Import ``tf_labeldp.keras_layers`` before you load
        its file.
        """
        self._refuse_unfitted("columns_", "fit(X)")
        from tf_labeldp.keras_layers.tree_ensemble import CategoryCodes

        layer = CategoryCodes(self.categorical_.tolist(), name="category_codes")

        def features(rows: Any) -> Any:
            outputs = layer(rows)
            note_release(layer, getattr(self, "receipts_", ()))
            return outputs

        return columns_model(self.columns_, self._is_matrix, features, "table_codes")


@dataclasses.dataclass(frozen=True)
class NumberColumn:
    """A column of numbers, which stay as they are."""

    name: str | int

    input_dtype = "float32"  # for the Keras input

    @classmethod
    def learn(cls, name: str | int, values: np.ndarray) -> NumberColumn:
        column = cls(name)
        column.codes(values)
        return column

    def codes(self, values: np.ndarray) -> np.ndarray:
        """Returns ``float32`` numbers (n,)."""
        with np.errstate(over="ignore"):
            numbers = as_numbers(self.name, values).astype(np.float32)
        return as_numbers(self.name, numbers).astype(np.float32)

    def layers(self, inputs: Any) -> Any:
        return inputs


@dataclasses.dataclass(frozen=True)
class CategoryColumn:
    """A column of categories: a vocabulary, or buckets of a hash."""

    name: str | int
    vocabulary: np.ndarray  # int64 or str, most frequent first; empty if hashed
    num_categories: int
    buckets: int | None

    @classmethod
    def learn(cls, name: str | int, values: np.ndarray, most_categories: int) -> CategoryColumn:
        words, is_missing = _words(name, values)
        vocabulary, counts = np.unique(words[~is_missing], return_counts=True)
        size = len(vocabulary)
        if size > most_categories:
            return cls(name, vocabulary[:0], size, most_categories)
        return cls(name, vocabulary[np.argsort(-counts, kind="stable")], size, None)

    @property
    def input_dtype(self) -> str:
        return "int64" if self.vocabulary.dtype.kind == "i" else "string"

    def codes(self, values: np.ndarray) -> np.ndarray:
        """Returns ``float32`` codes (n,), NaN for missing and unknown categories."""
        words, is_missing = _words(self.name, values)
        if words.dtype.kind != self.vocabulary.dtype.kind:
            raise TypeError(
                f"column {self.name!r} needs categories of dtype {self.vocabulary.dtype}, as in "
                f"fit, got {words.dtype}. Read both in the same way."
            )
        distinct, place = np.unique(words, return_inverse=True)
        if self.buckets is None:
            code_of = {word: code for code, word in enumerate(self.vocabulary.tolist())}
            codes = np.array([code_of.get(word, np.nan) for word in distinct.tolist()], np.float32)
        else:
            hashed = distinct if distinct.dtype.kind == "i" else distinct.astype(object)
            codes = np.asarray(self._hashing(self.buckets)(hashed)).ravel().astype(np.float32)
        return np.where(is_missing, np.float32(np.nan), codes[place.ravel()])

    def layers(self, inputs: Any) -> Any:
        """Returns one plus the codes, and zero for missing and unknown categories."""
        from keras import ops

        if self.buckets is not None:
            is_number = self.vocabulary.dtype.kind == "i"
            missing = self._lookup([MISSING_INTEGER] if is_number else _MISSING_WORDS)(inputs)
            hashed = self._hashing(self.buckets)(inputs)
            return ops.where(missing > 0, 0, hashed + 1)
        if not self.num_categories:  # The hash of one bucket is always zero.
            return self._hashing(1)(inputs)
        return self._lookup(self.vocabulary.tolist())(inputs)

    def _lookup(self, words: Sequence[Any]) -> Any:
        import keras

        # Keras's token for unknown values must differ from every word.
        if self.vocabulary.dtype.kind == "i":
            return keras.layers.IntegerLookup(vocabulary=words, oov_token=max(words) + 1)
        unknown = max(words, key=len) + "?"
        return keras.layers.StringLookup(vocabulary=list(words), oov_token=unknown)

    def _hashing(self, buckets: int) -> Any:
        import keras

        return keras.layers.Hashing(buckets)


def _words(name: str | int, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns categories (n,), ``int64`` or text, and which of them are missing."""
    if values.dtype.kind == "f":
        is_missing = np.isnan(values)
        words = as_categories(name, np.where(is_missing, 0.0, values))
        return np.where(is_missing, MISSING_INTEGER, words), is_missing
    words = as_categories(name, values)
    missing = [MISSING_INTEGER] if words.dtype.kind == "i" else _MISSING_WORDS
    return words, np.isin(words, missing)


def _narrow(table: Any) -> Any:
    """Returns a table in which a sparse matrix has ``float32`` numbers, which take less memory."""
    return table.astype(np.float32) if hasattr(table, "tocsr") else table
