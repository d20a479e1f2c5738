"""Features smoothed over their nearest-neighbour graph, without labels."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
from importlib.util import find_spec
from typing import Any, TypeVar

import numpy as np
from scipy import sparse

from tf_labeldp import _validate
from tf_labeldp._progress import Progress, num_cores
from tf_labeldp.accounting import Public, Setting, public_input
from tf_labeldp.features.estimator import (
    FeatureMap,
    keras_model,
    note_release,
    with_encoder,
)
from tf_labeldp.features.public_encoder import fitted_encoder
from tf_labeldp.features.reader import FeatureRows, check_columns_of_sparse, checked_finite

_Self = TypeVar("_Self", bound="NeighbourSmoothing")
_BLOCK = 4096
"""Rows mapped at a time."""
_QUERIES = 512
"""Queries compared with all rows at a time, which bounds memory."""
_GROUPS = 32
"""Groups of rows: only the groups with the largest maxima are searched."""
_SAME = 1.0 - 1e-6
"""Cosine above which a row counts as equal to the query."""
_SAMPLE = 20_000
"""Rows from which the principal directions are computed."""
_SEARCH_COMPONENTS = 100
"""The most principal directions that the search for neighbours uses."""
_NEGLIGIBLE = 0.01
"""Remaining weight of the initial features at which smoothing stops."""
_COLUMNS = 64
"""Features smoothed at a time."""
_EXACT_PAIRS = 1e10
"""The most pairs of examples for an exact search: a minute on one core."""
_LISTS, _SEARCHED_LISTS = 4.0, 32
"""Number of lists divided by the square root of the row count; lists searched per query."""
_TRAINING_ROWS, _TRAINING_ROUNDS = 32, 5
"""Rows per list, and rounds, of the k-means that builds the lists."""
_FOUND = 4096
"""The most neighbours per query that the list search returns, equal rows included."""


@dataclasses.dataclass(eq=False, repr=False)
class NeighbourSmoothing(FeatureMap):
    """Pulls the features of each example towards the features of its nearest neighbours.

    Features that vary slowly over the graph of neighbours separate classes in few strong
    directions, and a release of few strong directions loses less to noise. With P the mean over an
    example's nearest neighbours, features X become the fixed point of
    ``F = strength * P F + (1 - strength) * X``. For a new example, P averages over its neighbours
    in the training set.

    X are the principal components of the encoder's outputs. Neighbours are nearest by cosine in
    the first 100 components, each divided by the fourth root of its variance. Equal rows are
    not neighbours.

    Guarantee:
        The map reads no label. Fitting and using it costs no budget if the examples are public.
        The features of an example depend on the other examples, which are public too.

    Source: Zhou et al., "Learning with local and global consistency" (2004), smooth labels over the
    graph to the same fixed point; here features are smoothed, before a private release.

    The gain depends on whether neighbours share labels: large on MNIST and Fashion-MNIST, a small
    loss on the table Adult (``docs/theory.md``).

    Up to 100,000 examples all pairs are compared: 20 seconds on one core for 60,000. For more, with
    ``pip install 'tf-labeldp[neighbours]'`` (faiss-cpu), lists of similar rows are searched: this
    found 99 % of the nearest ten, heads lost 0.1 points of accuracy, and a million examples took
    six minutes on two busy cores instead of an hour or two.

    The map and its Keras model keep two tables of the training set, 120 megabytes for 60,000
    examples. To ship less, distil the head into a small model (``teacher_labels``).

    Args:
        encoder: maps raw inputs to features (n, d): a fitted feature map, or what
            ``PublicEncoder`` takes; None for none.
        num_neighbours: number of nearest neighbours.
        strength: in [0, 1), the weight of the neighbours; 0 turns smoothing off.
        num_components: the most principal components.
        seed: draws the lists of similar rows; the same seed gives the same features.

    Attributes:
        n_features_out_: number of features.
        feature_names_in_: column names in ``fit``, if any; ``transform`` refuses others.

    Raises:
        TypeError: the features are not numbers.
        ValueError: arguments out of range, too few rows, or numbers that are not finite.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> features = rng.normal(size=(500, 8)) + 3 * rng.choice([-1, 1], size=(500, 1))
        >>> smooth = NeighbourSmoothing().fit_transform(features)
        >>> smooth.shape, bool(smooth[:, 1:].std() < 0.5 * features.std())
        ((500, 8), True)
    """

    encoder: Public[Any] = None
    num_neighbours: int = 10
    strength: float = 0.8
    num_components: int = 400
    seed: int = 0

    def fit(self: _Self, X: Public[Any], y: Setting[Any] = None) -> _Self:
        """Finds the principal directions and the neighbours, and smooths the features.

        Args:
            X: public inputs that ``FeatureRows`` reads; more rows than ``num_neighbours``.
            y: ignored; scikit-learn's pipelines pass them to every step.

        Returns:
            The map itself.

        Warns:
            UserWarning: comparing all pairs takes more than minutes, and faiss-cpu is missing.
        """
        del y
        k = _validate.integer_at_least("num_neighbours", self.num_neighbours, 1)
        _validate.integer_at_least("num_components", self.num_components, 1)
        strength = _validate.number_in("strength", self.strength, "[0, 1)")
        public = public_input(X)
        public = public_input(public, fitted_encoder(self.encoder, public))
        X, self.encoder_ = public.value
        X, self.receipts_ = self._checked_inputs(X, encoder=self.encoder_), public.receipts
        rows = FeatureRows(X, self.encoder_)
        if len(rows) <= k:
            raise ValueError(
                f"expected more than num_neighbours={k} rows, got {len(rows)} "
                f"(n_samples={len(rows)}). Give more rows, or a smaller num_neighbours."
            )
        if sparse.issparse(X) and self.encoder is None:
            check_columns_of_sparse(X)
        self._find_directions(rows)
        start = self._components(rows)
        self._keys = self._search_keys(start)
        self._smooth = start
        if strength:
            found = find_neighbours(self._keys, self._keys, k, self.seed)
            _smooth_in_place(start, found, strength)
        self.n_features_out_ = start.shape[1]
        self._remember_columns(rows.columns, rows.width(self._mean.size))
        return self

    def transform(self, X: Public[Any]) -> np.ndarray:
        """Returns the smoothed features of examples, ``float32`` (m, num_features).

        Args:
            X: as in ``fit``, with any number of rows.

        Raises:
            ValueError: not fitted, or other features than in ``fit``.
        """
        self._refuse_unfitted("_smooth")
        encoder = self.encoder_
        X = self._checked_inputs(X, encoder=encoder, is_fitted=True)
        start = self._components(FeatureRows(X, encoder, columns=self._known_columns()))
        if not self.strength:
            return start
        keys = self._search_keys(start)
        found = find_neighbours(keys, self._keys, self.num_neighbours, self.seed)
        strength = np.float32(self.strength)
        step = _averaging(found, len(self._keys))
        return strength * (step @ self._smooth) + (np.float32(1.0) - strength) * start

    def fit_transform(self, X: Public[Any], y: Setting[Any] = None) -> np.ndarray:
        """Fits and returns the smoothed features of the same inputs; ignores labels."""
        del y
        return self.fit(X)._smooth.copy()

    def to_keras(self) -> Any:
        """Returns a ``keras.Model`` from raw inputs to the smoothed features; it saves and loads.

        Import ``tf_labeldp.keras_layers`` before you load its file. Among neighbours at the same
        distance up to rounding, it may choose others than ``transform``.

        Raises:
            TypeError: the encoder is a plain function, which has no Keras model.
            ValueError: not fitted.
        """
        self._refuse_unfitted("_smooth")
        import keras

        from tf_labeldp.keras_layers import NeighbourFeatures

        inputs, features = with_encoder(self.encoder_, self._mean.size)
        width = self._variances.size
        directions = keras.layers.Dense(
            width, trainable=False, dtype="float32", name="principal_components"
        )
        rows = directions(features)
        directions.set_weights([self._vectors, -self._mean @ self._vectors])
        if not self.strength:
            note_release(directions, self.receipts_)
            return keras_model(inputs, rows, "neighbour_smoothing")
        layer = NeighbourFeatures(
            len(self._keys),
            self._keys.shape[1],
            self.num_neighbours,
            float(self.strength),
            name="neighbours",
        )
        outputs = layer(rows)
        scale = self._variances[: self._keys.shape[1]] ** -0.25
        layer.set_weights([scale, self._keys, self._smooth])
        note_release(layer, self.receipts_)
        return keras_model(inputs, outputs, "neighbour_smoothing")

    def _find_directions(self, rows: FeatureRows) -> None:
        from scipy import linalg
        from scipy.linalg import blas

        size = len(rows)
        sample = np.unique(np.linspace(0, size - 1, min(size, _SAMPLE)).astype(np.int64))
        parts = [_block(rows, sample[at : at + _BLOCK]) for at in range(0, len(sample), _BLOCK)]
        total = np.sum([part.sum(axis=0, dtype=np.float64) for part in parts], axis=0)
        self._mean = (total / len(sample)).astype(np.float32)
        width = self._mean.size
        scatter = np.zeros((width, width), order="F")
        for part in parts:  # one half of a symmetric matrix
            scatter += blas.ssyrk(1.0, (part - self._mean).T)
        first = max(0, width - self.num_components)
        values, vectors = linalg.eigh(
            scatter / len(sample),
            lower=False,
            subset_by_index=[first, width - 1],
            overwrite_a=True,
        )
        kept = values > 1e-9 * max(values[-1], 1e-30)
        if not np.any(kept):
            raise ValueError("expected rows that differ, got equal rows. Check how they were read.")
        self._vectors = vectors[:, kept][:, ::-1].astype(np.float32)
        self._variances = values[kept][::-1].astype(np.float32)

    def _components(self, rows: FeatureRows) -> np.ndarray:
        out = np.empty((len(rows), self._variances.size), np.float32)
        for at in range(0, len(rows), _BLOCK):
            part = _block(rows, slice(at, at + _BLOCK))
            self._check_width(part.shape[1], self._mean.size)
            out[at : at + _BLOCK] = (part - self._mean) @ self._vectors
        return out

    def _search_keys(self, components: np.ndarray) -> np.ndarray:
        keys = components[:, :_SEARCH_COMPONENTS] * self._variances[:_SEARCH_COMPONENTS] ** -0.25
        lengths = np.linalg.norm(keys, axis=1, keepdims=True)
        return keys / np.where(lengths > 0.0, lengths, 1.0).astype(np.float32)


def _block(rows: FeatureRows, which: Any) -> np.ndarray:
    return checked_finite(rows.take(which).astype(np.float32))


def _averaging(neighbours: np.ndarray, size: int) -> Any:
    """Returns the sparse matrix (m, size) that averages over neighbours (m, k)."""
    rows, k = neighbours.shape
    share = np.full(neighbours.size, 1.0 / k, np.float32)
    starts = np.arange(0, neighbours.size + 1, k)
    return sparse.csr_array((share, neighbours.ravel(), starts), shape=(rows, size))


def _smooth_in_place(start: np.ndarray, neighbours: np.ndarray, strength: float) -> None:
    """Replaces features F0 (n, d) by the fixed point ``F = strength P F + (1 - strength) F0``."""
    from scipy.sparse import csgraph

    size = len(start)
    # This order puts neighbours close together, so that the cache holds them.
    order = csgraph.reverse_cuthill_mckee(_averaging(neighbours, size))
    places = np.empty(size, np.int32)
    places[order] = np.arange(size, dtype=np.int32)
    step = _averaging(places[neighbours[order]], size)
    rounds = math.ceil(math.log(_NEGLIGIBLE) / math.log(strength))

    def smooth(at: int) -> None:
        part = start[order, at : at + _COLUMNS]
        own = np.float32(1.0 - strength) * part
        for _ in range(rounds):
            part = step @ part
            part *= np.float32(strength)
            part += own
        start[order, at : at + _COLUMNS] = part

    with concurrent.futures.ThreadPoolExecutor(min(4, num_cores())) as pool:
        # Reading the results raises the errors of the threads.
        list(pool.map(smooth, range(0, start.shape[1], _COLUMNS)))


def find_neighbours(queries: np.ndarray, rows: np.ndarray, num: int, seed: int) -> np.ndarray:
    """Returns the nearest rows of each query; the search is approximate for too many pairs."""
    pairs = float(len(queries)) * len(rows)
    if pairs <= _EXACT_PAIRS:
        return nearest_neighbours(queries, rows, num)
    if find_spec("faiss") is not None:
        return listed_neighbours(queries, rows, num, seed)
    _validate.warn(
        f"comparing {len(queries):,} examples with {len(rows):,} takes about "
        f"{pairs / 1e10:,.0f} minutes on one core. pip install 'tf-labeldp[neighbours]' for an "
        "approximate search, which takes minutes for a million."
    )
    return nearest_neighbours(queries, rows, num)


def listed_neighbours(queries: np.ndarray, rows: np.ndarray, num: int, seed: int) -> np.ndarray:
    """Returns ``nearest_neighbours``, but misses rows in lists that are not searched.

    K-means assigns each row to a list; a query searches the lists with the nearest centres. The
    same seed finds the same rows.
    """
    import faiss

    size, width = rows.shape
    lists = max(1, round(_LISTS * math.sqrt(size)))
    index = faiss.IndexIVFFlat(
        faiss.IndexFlatIP(width), width, min(lists, size), faiss.METRIC_INNER_PRODUCT
    )
    index.cp.seed, index.cp.niter, index.cp.spherical = int(seed), _TRAINING_ROUNDS, True
    index.cp.min_points_per_centroid, index.cp.max_points_per_centroid = 1, _TRAINING_ROWS
    index.train(rows)
    index.add(rows)
    index.nprobe = _SEARCHED_LISTS
    # Consecutive queries share their nearest centre, so that the cache holds their lists.
    order = np.argsort(index.quantizer.search(queries, 1)[1][:, 0], kind="stable")
    found = np.full((len(queries), num), -1, np.int32)
    progress = Progress("Neighbours", len(queries))
    for start in range(0, len(queries), _BLOCK):
        places = order[start : start + _BLOCK]
        wanted = num + 1  # one is the query itself
        while places.size and wanted <= min(_FOUND, size):
            cosines, near = index.search(queries[places], wanted)  # the nearest first
            first = (cosines > _SAME).sum(axis=1)
            columns = first[:, np.newaxis] + np.arange(num)
            near = np.take_along_axis(near, np.minimum(columns, wanted - 1), axis=1)
            done = (first + num <= wanted) & (near[:, -1] >= 0)
            found[places[done]] = near[done]
            places = places[~done]
            wanted *= 8
        progress.advance(len(order[start : start + _BLOCK]))
    progress.close()
    missing = np.flatnonzero(found[:, 0] < 0)
    if missing.size:
        found[missing] = nearest_neighbours(queries[missing], rows, num)
    return found


def nearest_neighbours(queries: np.ndarray, rows: np.ndarray, num: int) -> np.ndarray:
    """Returns the nearest rows of each query by cosine, without equal rows, ``int32`` (m, num).

    Queries (m, d) and rows (n, d), with n above ``num``, are ``float32`` of norm one or zero.
    """
    # A row among the nearest lies in one of the ``num`` groups with the largest maxima.
    size, width = rows.shape
    groups = max(1, min(_GROUPS, size // num))
    length = -(-size // groups)
    # Group j has the rows j, j + length, j + 2 length, ..., so that maxima are taken by columns.
    columns = np.zeros((width, groups * length), np.float32)
    columns[:, :size] = rows.T
    found = np.empty((len(queries), num), np.int32)
    progress = Progress("Neighbours", len(queries))
    for start in range(0, len(queries), _QUERIES):
        products = queries[start : start + _QUERIES] @ columns
        products[:, size:] = -np.inf
        products[products > _SAME] = -np.inf
        maxima = products.reshape(-1, groups, length).max(axis=1)
        best = _largest(maxima, num)
        places = best[:, np.newaxis, :] + length * np.arange(groups)[:, np.newaxis]
        places = places.reshape(len(products), -1)
        chosen = _largest(np.take_along_axis(products, places, axis=1), num)
        found[start : start + _QUERIES] = np.take_along_axis(places, chosen, axis=1)
        progress.advance(len(products))
    progress.close()
    return np.minimum(found, size - 1)  # if all rows are equal, any row is right


def _largest(values: np.ndarray, num: int) -> np.ndarray:
    first = values.shape[1] - num
    if first == 0:
        return np.broadcast_to(np.arange(num), values.shape)
    return np.argpartition(values, first, axis=1)[:, first:]
