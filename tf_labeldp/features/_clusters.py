"""Clusters of public features: found by k-means or given, with their sizes and centres."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.features._encoded_features import encoded_features

_MINI_BATCHES_ABOVE = 100_000
"""Examples beyond which k-means is fitted on mini-batches."""
_ITERATIONS = 100
_MOST_CLUSTERS = 1 << 31
"""Cluster numbers beyond are hashes or ids, not numbers."""
_BLOCK_CELLS = 1 << 23
"""Distances that are held at a time."""
_THREADS = 2
"""The sums of two threads add up to the same in either order, those of more do not: another run,
other clusters, and a stored release for them could not be found again."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Clusters:
    """A cluster for each example, made by ``find_clusters`` or ``Clusters.from_assignments``.

    Privacy: looks at no label, if the encoder has seen none. The assignments, and so the sizes, are
    public like the features.

    Attributes:
        assignments: the cluster of each example, ``int64`` (n,) in 0..C-1.
        num_clusters: C.
        centres: ``float64`` (P, d), of the (encoded) features; P = C, or more after
            ``merge_small``. None where only the assignments are known.
        cluster_of_centre: the cluster of each centre, ``int64`` (P,); None without centres.
        encoder: what made features of the inputs; None for features as they are.

    Example:
        >>> features = np.array([[0.0], [0.2], [5.0], [5.1], [9.0]])
        >>> clusters = find_clusters(features, 3)
        >>> print(clusters.merge_small(2))
        2 clusters of 5 examples: sizes 2 to 3, median 2.5; 0 empty, 2 below 50
        >>> clusters.merge_small(2).assign([[8.0]]) == clusters.merge_small(2).assign([[5.0]])
        array([ True])
    """

    assignments: np.ndarray
    num_clusters: int
    centres: np.ndarray | None = None
    cluster_of_centre: np.ndarray | None = None
    encoder: Any = None

    @classmethod
    def from_assignments(cls, assignments: Any, num_clusters: int | None = None) -> Clusters:
        """Returns clusters that were found elsewhere; they have no centres.

        Args:
            assignments: integers (n,) in 0..C-1, made without looking at labels.
            num_clusters: C; None for the largest assignment plus one.

        Raises:
            TypeError: the assignments are not integers.
            ValueError: a wrong shape, none at all, or assignments outside of 0..C-1.

        Example:
            >>> Clusters.from_assignments([0, 2, 2, 1]).sizes.tolist()
            [1, 1, 2]
        """
        array = np.asarray(assignments)
        if array.ndim != 1 or array.size == 0:
            raise ValueError(
                f"assignments must have shape (n,), the cluster of each example, got {array.shape}."
            )
        numbers = _validate.group_numbers(
            "assignments", array, hint="Examples without a cluster get one of their own."
        )
        most = int(array.max()) + 1
        if most > _MOST_CLUSTERS:
            raise ValueError(
                f"assignments must be numbered 0..C-1, got {most - 1}: a table of so many rows "
                "would not fit. Number them with np.unique(assignments, return_inverse=True)[1]."
            )
        if num_clusters is None:
            num_clusters = most
        elif _validate.integer_at_least("num_clusters", num_clusters, 1) < most:
            raise ValueError(
                f"assignments must be in 0..{num_clusters - 1}, got {most - 1}. Raise num_clusters."
            )
        return cls(_frozen(numbers), int(num_clusters))

    @property
    def sizes(self) -> np.ndarray:
        """The number of examples of each cluster, ``int64`` (C,)."""
        return np.bincount(self.assignments, minlength=self.num_clusters)

    def __len__(self) -> int:
        """Returns the number of examples n."""
        return int(self.assignments.size)

    def assign(self, features: Any) -> np.ndarray:
        """Returns the cluster of the nearest centre, of equally near ones the first.

        Args:
            features: (m, ...), or what the encoder takes, as given to ``find_clusters``.

        Returns:
            ``int64`` (m,). For the features of ``find_clusters``, the assignments again.

        Raises:
            ValueError: these clusters have no centres; or features that are not finite, or of
                another width.
        """
        if self.centres is None or self.cluster_of_centre is None:
            raise ValueError(
                "these clusters were given by their assignments and have no centres, so new "
                "examples can't be assigned. Make them with find_clusters(features, ...), or "
                "assign new examples where the clusters come from."
            )
        rows = encoded_features(features, self.encoder)
        if rows.shape[1] != self.centres.shape[1]:
            raise ValueError(
                f"features have {rows.shape[1]} columns, the centres {self.centres.shape[1]}. Give "
                "the same kind of inputs as to find_clusters."
            )
        return self.cluster_of_centre[_nearest(rows, self.centres)]

    def merge_small(self, minimum_size: int) -> Clusters:
        """Returns clusters of which each has at least ``minimum_size`` examples.

        A smaller one joins, whole, the larger one whose centre is nearest to its own. The others
        keep their order and are numbered anew. In a cluster of m examples the noise of
        a histogram by clusters is about ``3 / (epsilon m)`` on each class's share, so small
        clusters have priors of noise.

        Privacy: looks at sizes and centres, which are public.

        Args:
            minimum_size: at least 1; public.

        Raises:
            ValueError: no cluster is as large, or these have no centres.
        """
        minimum_size = _validate.integer_at_least("minimum_size", minimum_size, 1)
        sizes = self.sizes
        large = sizes >= minimum_size
        if large.all():
            return self
        if not large.any():
            raise ValueError(
                f"no cluster has minimum_size={minimum_size} examples; the largest has "
                f"{int(sizes.max())}. Use a smaller minimum_size, or fewer clusters."
            )
        if self.centres is None or self.cluster_of_centre is None:
            raise ValueError(
                "these clusters have no centres, so it isn't known which are near. Make them with "
                "find_clusters, or merge the assignments where they come from."
            )
        new_number = np.cumsum(large) - 1
        from_large = large[self.cluster_of_centre]
        owners = self.cluster_of_centre[from_large]
        small = np.flatnonzero(~from_large)
        nearest = _nearest(self.centres[small], self.centres[from_large])
        squares = (self.centres[small] - self.centres[from_large][nearest]) ** 2
        # Of the centres of one small cluster, the one with the least distance decides.
        order = np.lexsort((squares.sum(axis=1), self.cluster_of_centre[small]))
        merged, first = np.unique(self.cluster_of_centre[small][order], return_index=True)
        new_number[merged] = new_number[owners[nearest[order][first]]]
        return dataclasses.replace(
            self,
            assignments=_frozen(new_number[self.assignments]),
            num_clusters=int(large.sum()),
            cluster_of_centre=_frozen(new_number[self.cluster_of_centre]),
        )

    def summary(self, below: int = 50) -> str:
        """Returns one line on the sizes, with the number of clusters of fewer than ``below``."""
        sizes = self.sizes
        return (
            f"{self.num_clusters:,} clusters of {len(self):,} examples: sizes {sizes.min():,} to "
            f"{sizes.max():,}, median {np.median(sizes):,g}; {int((sizes == 0).sum()):,} empty, "
            f"{int((sizes < below).sum()):,} below {below:,}"
        )

    def __str__(self) -> str:
        """Returns ``summary()``."""
        return self.summary()

    def __repr__(self) -> str:
        return f"<Clusters: {self.summary()}>"


def find_clusters(
    features: Any, num_clusters: int, *, encoder: Any = None, seed: int = 0
) -> Clusters:
    """Returns clusters of public features by k-means.

    Up to 100,000 examples by scikit-learn's ``KMeans``, beyond by its ``MiniBatchKMeans``. The same
    features and seed give the same clusters on one machine; another machine may round otherwise. To
    be sure, keep the ``assignments``.

    Privacy: looks at no label. Assumes that ``encoder`` has seen none of the labels either, except
    through noisy labels and releases of the vault that the clusters are used with, whose guarantee
    then covers both. It is not checked here; a head such as ``NoiseCluster`` does so.

    Source: steps 2 and 3 of Algorithm 4 of ``ghazi2021``.

    Args:
        features: numbers (n, ...), finite; more than two dimensions are flattened to (n, d). Or
            what the encoder takes.
        num_clusters: C, at least 1, at most n.
        encoder: a Keras model, an object with ``transform``, or a callable, from inputs to (m, d);
            arrays are given to it in blocks.
        seed: of the starts; public.

    Raises:
        TypeError: features that are no numbers, or an encoder that is none.
        ValueError: features that are empty, not finite or of a wrong shape; an encoder whose
            outputs are not (m, d); more clusters than examples.

    Example:
        >>> features = np.repeat([[0.0, 1.0], [4.0, 4.0]], [30, 20], axis=0)
        >>> find_clusters(features, 2).sizes.tolist() in ([30, 20], [20, 30])
        True
    """
    num_clusters = _validate.integer_at_least("num_clusters", num_clusters, 1)
    seed = _validate.integer_at_least("seed", seed, 0)
    rows = encoded_features(features, encoder)
    if num_clusters > rows.shape[0]:
        raise ValueError(
            f"num_clusters must be at most the number of examples, {rows.shape[0]}, got "
            f"{num_clusters}."
        )
    centres = _kmeans_centres(rows, num_clusters, seed)
    return Clusters(
        _frozen(_nearest(rows, centres)),
        num_clusters,
        _frozen(centres),
        _frozen(np.arange(num_clusters)),
        encoder,
    )


def _kmeans_centres(rows: np.ndarray, num_clusters: int, seed: int) -> np.ndarray:
    """Returns the centres of k-means, ``float64`` (C, d)."""
    from sklearn import cluster
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    # Moved and scaled, single precision holds any numbers: it is half the memory and time.
    mean = rows.mean(axis=0, dtype=np.float64)
    ends = np.stack([rows.min(axis=0), rows.max(axis=0)])
    scale = float(np.max(np.abs(ends - mean))) or 1.0
    if not np.isfinite(scale):
        raise ValueError("features are too large for sums in double precision. Scale them down.")
    small = np.empty(rows.shape, np.float32)
    for block in _blocks(rows.shape[0], rows.shape[1]):
        small[block] = (rows[block] - mean) / scale
    if rows.shape[0] > _MINI_BATCHES_ABOVE:
        batch = max(4096, 4 * num_clusters)
        model = cluster.MiniBatchKMeans(
            num_clusters, batch_size=batch, max_iter=_ITERATIONS, n_init=3, random_state=seed
        )
    else:
        model = cluster.KMeans(
            num_clusters, max_iter=_ITERATIONS, n_init=1, copy_x=False, random_state=seed
        )
    with threadpool_limits(limits=_THREADS, user_api="openmp"):
        model.fit(small)
    return model.cluster_centers_.astype(np.float64) * scale + mean


def _nearest(rows: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Returns the index of the nearest centre, the first of equally near ones, ``int64`` (m,)."""
    # Moved and scaled, squares neither cancel nor overflow.
    mean = centres.mean(axis=0)
    scale = float(np.max(np.abs(centres - mean))) or 1.0
    moved = (centres - mean) / scale
    half_squares = 0.5 * np.einsum("ij,ij->i", moved, moved)
    found = np.empty(rows.shape[0], np.int64)
    for block in _blocks(rows.shape[0], max(centres.shape)):
        found[block] = np.argmax((rows[block] - mean) / scale @ moved.T - half_squares, axis=1)
    return found


def _blocks(num_rows: int, width: int) -> list[slice]:
    step = max(1, _BLOCK_CELLS // width)
    return [slice(start, start + step) for start in range(0, num_rows, step)]


def _frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


def checked_clusters(clusters: Any) -> Clusters:
    """Returns ``Clusters``, also of an array of assignments."""
    return clusters if isinstance(clusters, Clusters) else Clusters.from_assignments(clusters)
