"""Random Fourier features of tables, without labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.features._estimator import Estimator
from tf_labeldp.features._table_encoding import encode, learn_columns, read_table

_Self = TypeVar("_Self", bound="RandomFourierFeatures")
_PAIRS = 2048
"""Rows in the sample for the median distance; their distances are a 2048 x 2048 matrix."""
_BLOCK = 4096
"""Rows whose features are computed at a time."""


class RandomFourierFeatures(Estimator):
    """Maps a table to random features of a Gaussian kernel, beside the columns themselves.

    Numeric columns are standardised, categorical ones become one-hot (with one more place for
    categories that ``fit`` did not see) or are hashed. A missing text is a category of its own
    (``None`` is ``"None"``, NaN is ``"nan"``); a missing number is refused. Features are cosines
    and sines of random projections of that, for what is not linear, and the encoded row scaled to
    unit norm, for what is. Every row has unit norm. Nothing of it needs a label, and none is
    looked at.

    Privacy: no label is seen, so fitting and using it costs no budget, as long as the table is
    public and the arguments are chosen without the private labels.

    Source: Rahimi and Recht, "Random features for large-scale kernel machines" (2007). Without a
    linear part, the product of two rows is off the kernel by at most t with probability at least
    ``1 - 2 exp(-num_features * t**2 / 4)`` (Hoeffding's inequality over num_features / 2
    frequencies).

    Args:
        num_features: even number of features.
        bandwidth: of the kernel ``exp(-|x - y|^2 / (2 bandwidth^2))`` on encoded rows, or
            ``"median"`` for the median distance between rows of a sample.
        categorical: names, or places in a 2-D array, of categorical columns; None takes all that
            are not numbers, so all of an array of objects.
        hash_buckets: columns of more categories than this are hashed into so many buckets; None
            for none.
        linear_weight: in [0, 1), the share of the encoded row in the squared norm; zero leaves it
            out.
        seed: of the frequencies and of the sample. It concerns no privacy.

    Attributes:
        columns_: how each column is encoded.
        bandwidth_: the bandwidth.
        n_features_out_: num_features, and unless linear_weight is zero the encoded columns.

    Raises:
        TypeError: ``fit`` on something that is no table, or text in a numeric column.
        ValueError: ``fit`` on arguments out of range, unknown column names, numbers not finite.

    Example:
        >>> import numpy as np
        >>> table = {"age": np.array([20.0, 30.0, 60.0]), "job": np.array(["a", "b", "a"])}
        >>> features = RandomFourierFeatures(num_features=100).fit_transform(table)
        >>> features.shape, np.linalg.norm(features, axis=1).round(4).tolist()
        ((3, 104), [1.0, 1.0, 1.0])
    """

    def __init__(
        self,
        num_features: int = 1000,
        bandwidth: float | str = "median",
        categorical: Sequence[str | int] | None = None,
        hash_buckets: int | None = None,
        linear_weight: float = 0.5,
        seed: int | None = 0,
    ) -> None:
        self.num_features = num_features
        self.bandwidth = bandwidth
        self.categorical = categorical
        self.hash_buckets = hash_buckets
        self.linear_weight = linear_weight
        self.seed = seed

    def fit(self: _Self, table: Any, labels: Any = None) -> _Self:
        """Learns the encoding and the bandwidth, and draws the frequencies.

        Args:
            table: public columns (n,) as a dict, structured array or data frame, or an array
                (n, p).
            labels: not looked at; scikit-learn's pipelines pass them to every step.

        Returns:
            The map itself.
        """
        del labels
        self._check_arguments()
        columns = read_table(table)
        size = len(next(iter(columns.values())))
        if size == 0:
            raise ValueError("the table has no rows; give at least one.")
        self.columns_ = learn_columns(columns, self.categorical, self.hash_buckets)
        self._is_matrix = 0 in columns and all(
            values.dtype.kind in "biuf" for values in columns.values()
        )
        rng = np.random.default_rng(self.seed)
        sample = _rows(columns, rng.choice(size, min(size, _PAIRS), replace=False))
        if self.bandwidth == "median":
            self.bandwidth_ = _median_distance(encode(self.columns_, sample))
        else:
            self.bandwidth_ = float(self.bandwidth)
        width = sum(column.width for column in self.columns_)
        draws = rng.normal(size=(width, self.num_features // 2))
        self._frequencies = (draws / self.bandwidth_).astype(np.float32)
        self.n_features_out_ = self.num_features + (width if self.linear_weight else 0)
        return self

    def transform(self, table: Any) -> np.ndarray:
        """Returns the features of a table with the columns of ``fit``.

        Args:
            table: as in ``fit``; named columns that ``fit`` did not see are ignored.

        Returns:
            ``float32`` (m, n_features_out_).

        Raises:
            TypeError: a column of another kind than in ``fit``.
            ValueError: not fitted, columns missing, numbers not finite.
        """
        self._check_fitted()
        columns = read_table(table)
        missing = [repr(column.name) for column in self.columns_ if column.name not in columns]
        if missing:
            raise ValueError(f"the table lacks columns that fit saw: {', '.join(missing)}.")
        if 0 in columns and len(columns) > len(self.columns_):
            raise ValueError(
                f"the table has {len(columns)} columns, in fit it had {len(self.columns_)}. Give "
                "the same ones, or use names: then others are ignored."
            )
        size = len(next(iter(columns.values())))
        out = np.empty((size, self.n_features_out_), np.float32)
        for start in range(0, size, _BLOCK):
            part = slice(start, start + _BLOCK)
            out[part] = self._features(_rows(columns, part))
        return out

    def fit_transform(self, table: Any, labels: Any = None) -> np.ndarray:
        """Fits and returns the features of the same table; labels are not looked at."""
        del labels
        return self.fit(table).transform(table)

    def to_keras(self) -> Any:
        """Returns a ``keras.Model`` from raw columns to the features; it saves and loads.

        It takes an array (n, p) of numbers if ``fit`` did, and otherwise a dict of columns (n, 1)
        by name: float32, int64, or text. A file of it is loaded after
        ``import tf_labeldp.keras_layers``.
        """
        self._check_fitted()
        import keras

        from tf_labeldp.keras_layers import FourierFeatures

        inputs: Any
        if self._is_matrix:
            inputs = keras.Input((len(self.columns_),), name="table")
            raw = [
                keras.ops.cast(inputs[:, place : place + 1], column.input_dtype)
                for place, column in enumerate(self.columns_)
            ]
        else:
            inputs = {
                str(column.name): keras.Input((1,), dtype=column.input_dtype, name=str(column.name))
                for column in self.columns_
            }
            raw = list(inputs.values())
        parts = [
            keras.ops.cast(column.layers(part), "float32")
            for column, part in zip(self.columns_, raw, strict=True)
        ]
        rows = parts[0] if len(parts) == 1 else keras.layers.Concatenate(dtype="float32")(parts)
        layer = FourierFeatures(self.num_features, self.linear_weight, name="fourier")
        outputs = layer(rows)
        layer.set_weights([self._frequencies])
        return keras.Model(inputs, outputs, name="random_fourier_features")

    def _features(self, table: dict[str | int, np.ndarray]) -> np.ndarray:
        """Returns the features, as the layer ``FourierFeatures`` does."""
        rows = encode(self.columns_, table)
        phases = rows @ self._frequencies
        gain = np.float32(math.sqrt(2.0 * (1.0 - self.linear_weight) / self.num_features))
        parts = [gain * np.cos(phases), gain * np.sin(phases)]
        if self.linear_weight:
            norms = np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
            parts.append(np.float32(math.sqrt(self.linear_weight)) * rows / norms)
        return np.concatenate(parts, axis=1)

    def _check_arguments(self) -> None:
        if _validate.integer_at_least("num_features", self.num_features, 2) % 2:
            raise ValueError(
                "num_features must be even, as cosines and sines come in pairs, got "
                f"{self.num_features}."
            )
        if isinstance(self.bandwidth, str):
            if self.bandwidth != "median":
                raise ValueError(
                    f"bandwidth must be 'median' or a number above zero, got {self.bandwidth!r}."
                )
        else:
            _validate.positive_finite("bandwidth", self.bandwidth)
        if isinstance(self.categorical, str):
            raise TypeError("categorical must be a list of names, got a single text.")
        if self.hash_buckets is not None:
            _validate.integer_at_least("hash_buckets", self.hash_buckets, 2)
        _validate.probability_below_one("linear_weight", self.linear_weight)

    def _check_fitted(self) -> None:
        self._refuse_unfitted("_frequencies", "fit(table)")


def _rows(columns: dict[str | int, np.ndarray], chosen: Any) -> dict[str | int, np.ndarray]:
    return {name: values[chosen] for name, values in columns.items()}


def _median_distance(rows: np.ndarray) -> float:
    """Returns the median distance of distinct pairs of rows; one if that is zero."""
    wide = rows.astype(np.float64)
    squares = np.einsum("ij,ij->i", wide, wide)
    distances = squares[:, np.newaxis] + squares - 2.0 * wide @ wide.T
    pairs = distances[np.triu_indices(len(wide), 1)]
    median = float(np.sqrt(max(np.median(pairs), 0.0))) if pairs.size else 0.0
    return median if median > 0.0 else 1.0
