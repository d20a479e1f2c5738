"""Tables as numbers and category codes for trees, without labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from scipy import sparse

from tf_labeldp import _validate
from tf_labeldp.accounting import Public, Setting, public_input
from tf_labeldp.features._categories import Categories
from tf_labeldp.features.estimator import FeatureMap, columns_model, note_release
from tf_labeldp.features.reader import (
    FeatureRows,
    categorical_columns,
    hashed_columns,
)
from tf_labeldp.features.tables import as_numbers

_Self = TypeVar("_Self", bound="TableCodes")


@dataclasses.dataclass(eq=False, repr=False)
class TableCodes(FeatureMap):
    """Maps a table to ``float32`` numbers and category codes, as boosted trees take them.

    Numbers stay as they are, rounded to ``float32``; booleans become 0 and 1, dates and times days
    since 1970-01-01 UTC. The categories of a column become codes 0, 1, ... in the order of
    decreasing frequency; columns with more than ``most_categories`` are hashed into that many
    codes. Missing values (None, NaN, NaT, ``pandas.NA``, and the texts "", "nan", "None", "<NA>"
    and "NaT") and categories that are new after ``fit`` become NaN. Ordered categories are texts,
    whose order is not used.

    Guarantee:
        The map reads no label. Fitting and using it costs no budget if the table is public and the
        arguments are chosen without the private labels.

    Args:
        categorical: the categorical columns, by name or by place in a 2-D array; None for all
            columns of texts and categories. A column of objects is numeric if its entries are
            numbers, dates or missing.
        most_categories: the most codes of a column, at least 2. ``HistGradientBoosting`` of
            scikit-learn takes 255 at most.

    Attributes:
        columns_: the encoding of each column.
        categorical_: bool (p,), the columns of codes.
        hashed_: the number of categories of each hashed column, by name.
        n_features_out_: p.

    Raises:
        TypeError: ``fit`` gets no table, or objects that are no numbers, texts or dates.
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

    _takes_tables = True

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
        rows, self.receipts_ = self._rows(public.value), public.receipts
        columns = rows.table()
        self._remember_columns(rows.columns, len(columns))
        chosen = categorical_columns(columns, self.categorical)
        self.columns_ = tuple(
            CategoryColumn.learn(name, values, self.most_categories, by_frequency=True)
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
        self._refuse_unfitted("columns_")
        rows = self._rows(X, is_fitted=True)
        columns = rows.table([column.name for column in self.columns_])
        size = len(columns[self.columns_[0].name])
        codes = np.empty((size, len(self.columns_)), np.float32)
        for place, column in enumerate(self.columns_):
            codes[:, place] = column.codes(columns[column.name])
        return codes

    def to_keras(self) -> Any:
        """Returns a ``keras.Model`` from raw columns to numbers and codes; it saves and loads.

        It takes an array (n, p) of numbers if ``fit`` did, and otherwise a dict of columns (n, 1)
        by name, as ``to_inputs(table, model)`` returns it: float32, int64, or text. A missing
        number is NaN, a missing text is empty, and a missing category of whole numbers is
        ``-2**63``. If Keras does not allow a column's name, or
        a layer has it, the input is renamed (``column_price_unit`` for ``price/unit``), and Keras
        warns; the dict keeps the column names. Import ``tf_labeldp.keras_layers`` before you load
        its file.
        """
        self._refuse_unfitted("columns_")
        from tf_labeldp.keras_layers.tree_ensemble import CategoryCodes

        layer = CategoryCodes(self.categorical_.tolist(), name="category_codes")

        def features(rows: Any) -> Any:
            outputs = layer(rows)
            note_release(layer, self.receipts_)
            return outputs

        return columns_model(self.columns_, self._is_matrix, features, "table_codes")

    def _rows(self, X: Any, is_fitted: bool = False) -> FeatureRows:
        table = self._checked_inputs(X, is_fitted=is_fitted)
        # Numbers of ``float32`` take less memory in a sparse matrix, which is made dense.
        return FeatureRows(table.astype(np.float32) if sparse.issparse(table) else table)


@dataclasses.dataclass(frozen=True)
class NumberColumn:
    """A column of numbers, which stay as they are."""

    name: str | int

    input_dtype = "float32"  # for the Keras input

    @classmethod
    def learn(cls, name: str | int, values: np.ndarray) -> NumberColumn:
        as_numbers(name, values)
        return cls(name)

    def codes(self, values: np.ndarray) -> np.ndarray:
        """Returns ``float32`` numbers (n,)."""
        return as_numbers(self.name, values)

    def layers(self, inputs: Any) -> Any:
        return inputs


class CategoryColumn(Categories):
    """A column of categories, the most frequent first, whose missing ones are unknown."""

    def codes(self, values: np.ndarray) -> np.ndarray:
        """Returns ``float32`` codes (n,), NaN for missing and unknown categories."""
        places = self.places(values)
        return np.where(places > 0, places - 1, np.nan).astype(np.float32)
