"""Clusters of public features, and the noisy labels that agree with their clusters."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._columns import Column
from tf_labeldp.accounting import Public, PublicInput, Receipt, public_input
from tf_labeldp.features.public_encoder import fitted_encoder
from tf_labeldp.features.reader import FeatureRows

_MINI_BATCHES_ABOVE = 100_000
"""The most examples for full k-means; beyond it, mini-batches."""
_ITERATIONS = 100
"""The most rounds of k-means."""
_MOST_CLUSTERS = 1 << 31
"""The most clusters: larger numbers are hashes or ids."""
_SMALL = 50
"""Examples below which the prior of a cluster is mostly noise at epsilon 1."""
_BLOCK_CELLS = 1 << 23
"""Distances in memory at a time."""
_THREADS = 2
"""The sum of two threads does not depend on their order, a sum of more does. Another run would then
find other clusters, for which a store has no release."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Clusters:
    """A cluster per example, from ``find_clusters`` or ``Clusters.from_assignments``.

    Guarantee:
        The clusters are public like the features, if the encoder was trained without labels.

    Attributes:
        assignments: the cluster of each example, ``int64`` (n,) in 0..C-1.
        num_clusters: C.
        centres: the centre of each cluster in (encoded) feature space, ``float64`` (C, d); None if
            only the assignments are known.
        encoder: maps inputs to features; None if the inputs are features.
        feature_names: column names in ``find_clusters``, if any; ``assign`` refuses others.
        receipts: the receipts of features and encoder.

    Example:
        >>> features = np.array([[0.0], [0.2], [5.0], [5.1], [9.0]])
        >>> clusters = find_clusters(features, 3)
        >>> print(clusters)
        3 clusters of 5 examples: sizes 1 to 2, median 2; 0 empty, 3 below 50
        >>> clusters.assign([[8.0]]) == clusters.assignments[4]
        array([ True])
    """

    assignments: np.ndarray
    num_clusters: int
    centres: np.ndarray | None = None
    encoder: Any = None
    feature_names: tuple[str, ...] | None = None
    receipts: tuple[Receipt, ...] = ()

    @classmethod
    def of(cls, clusters: Public[Any]) -> Clusters:
        """Returns ``Clusters`` from an array of assignments, or from ``Clusters``."""
        public = public_input(clusters)
        if not isinstance(public.value, cls):
            return cls.from_assignments(public)
        return dataclasses.replace(public.value, receipts=public.receipts)

    @classmethod
    def from_assignments(
        cls, assignments: Public[Any], num_clusters: int | None = None
    ) -> Clusters:
        """Returns clusters without centres, from assignments of your own.

        Args:
            assignments: integers (n,) in 0..C-1, made without labels.
            num_clusters: C; None for the largest assignment plus one.

        Raises:
            TypeError: the assignments are not integers.
            ValueError: a wrong shape, no assignment, or assignments outside 0..C-1.
        """
        public = public_input(assignments)
        array = Column.of(public.value).complete("assignments")
        if array.ndim != 1 or array.size == 0:
            raise ValueError(
                f"assignments must have shape (n,), the cluster of each example, got {array.shape}."
            )
        numbers = _validate.group_numbers(
            "assignments", array, hint="Give examples without a cluster their own."
        )
        most = int(array.max()) + 1
        if most > _MOST_CLUSTERS:
            raise ValueError(
                f"assignments must be numbered 0..C-1, got {most - 1}: too many. Number them with "
                "np.unique(assignments, return_inverse=True)[1]."
            )
        if num_clusters is None:
            num_clusters = most
        elif _validate.integer_at_least("num_clusters", num_clusters, 1) < most:
            raise ValueError(
                f"assignments must be in 0..{num_clusters - 1}, got {most - 1}. Raise num_clusters."
            )
        return cls(_frozen(numbers), int(num_clusters), receipts=public.receipts)

    @property
    def sizes(self) -> np.ndarray:
        """The number of examples of each cluster, ``int64`` (C,)."""
        return np.bincount(self.assignments, minlength=self.num_clusters)

    def __len__(self) -> int:
        return int(self.assignments.size)

    def assign(self, features: Public[Any]) -> np.ndarray:
        """Returns the cluster of the nearest centre, ``int64`` (m,); of equally near, the first.

        Args:
            features: (m, ...) as in ``find_clusters``; its own features get their assignments.

        Raises:
            ValueError: the clusters have no centres, or the features are not finite or have other
                columns.
        """
        if self.centres is None:
            raise ValueError(
                "assigning new examples needs centres, and these clusters have none. Use "
                "find_clusters, or assign the examples where the clusters come from."
            )
        rows = FeatureRows(features, self.encoder, columns=self.feature_names, flatten=True).array()
        if rows.shape[1] != self.centres.shape[1]:
            raise ValueError(
                f"expected {self.centres.shape[1]} features, as in the centres, got "
                f"{rows.shape[1]}. Give the same kind of inputs as to find_clusters."
            )
        return _nearest(rows, self.centres)

    def summary(self) -> str:
        """Returns a line on the sizes of the clusters."""
        sizes = self.sizes
        return (
            f"{self.num_clusters:,} clusters of {len(self):,} examples: sizes {sizes.min():,} to "
            f"{sizes.max():,}, median {np.median(sizes):,g}; {int((sizes == 0).sum()):,} empty, "
            f"{int((sizes < _SMALL).sum()):,} below {_SMALL}"
        )

    __str__ = summary

    def __repr__(self) -> str:
        return f"<Clusters: {self.summary()}>"


def find_clusters(
    features: Public[Any], num_clusters: int, *, encoder: Public[Any] = None, seed: int = 0
) -> Clusters:
    """Returns clusters of public features by k-means.

    Uses scikit-learn's ``KMeans`` up to 100,000 examples, and ``MiniBatchKMeans`` for more. The
    same features and seed give the same clusters on one machine; another machine may round
    differently, so keep the ``assignments``.

    Guarantee:
        k-means reads no label. Assumes that ``encoder`` was made without the labels, except for
        uses that its receipts count.

    Source: steps 2 and 3 of Algorithm 4 of ``ghazi2021``.

    Args:
        features: finite numbers (n, ...), flattened to (n, d), or inputs of the encoder; any input
            that ``FeatureRows`` reads.
        num_clusters: C, in 1..n.
        encoder: a fitted feature map, or what ``PublicEncoder`` takes.
        seed: draws the initial centres; public.

    Raises:
        TypeError: the features are not numbers, or ``encoder`` is no encoder.
        ValueError: the features are empty, not finite or of a wrong shape, the encoder's outputs
            are not (m, d), or there are more clusters than examples.

    Example:
        >>> features = np.repeat([[0.0, 1.0], [4.0, 4.0]], [30, 20], axis=0)
        >>> find_clusters(features, 2).sizes.tolist() in ([30, 20], [20, 30])
        True
    """
    num_clusters = _validate.integer_at_least("num_clusters", num_clusters, 1)
    features = public_input(features)
    encoder = fitted_encoder(encoder, features)
    read = FeatureRows(features, encoder, flatten=True)
    receipts, rows = read.receipts, read.array()
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
        PublicInput.bare(encoder),
        read.columns,
        receipts,
    )


def _kmeans_centres(rows: np.ndarray, num_clusters: int, seed: int) -> np.ndarray:
    from sklearn import cluster
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    # After centring and scaling, single precision is exact enough, in half the memory and time.
    mean = rows.mean(axis=0, dtype=np.float64)
    ends = np.stack([rows.min(axis=0), rows.max(axis=0)])
    scale = float(np.max(np.abs(ends - mean))) or 1.0
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
    """Returns the index of the nearest centre, ``int64`` (m,); of equally near, the first."""
    # After centring and scaling, squares neither cancel nor overflow.
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


@dataclasses.dataclass(frozen=True, eq=False)
class DenoisedLabels:
    """The examples that keep their noisy label in ``denoise_labels``, and the other examples.

    Attributes:
        labelled: the examples whose noisy label is the class of their cluster, ascending, ``int64``
            (m,).
        labels: their labels, ``int64`` (m,).
        unlabelled: the other examples, ascending, ``int64`` (n - m,).
        cluster_classes: the class of each cluster, ``int64`` (C,); 0 for an empty cluster.
        kept_fraction: m / n.
        receipts: the receipts of noisy labels and clusters.

    Example:
        >>> denoised = denoise_labels([0, 0, 1, 1, 1], [0, 0, 0, 1, 1], num_classes=2)
        >>> denoised.labelled.tolist(), denoised.kept_fraction
        ([0, 1, 3, 4], 0.8)
    """

    labelled: np.ndarray
    labels: np.ndarray
    unlabelled: np.ndarray
    cluster_classes: np.ndarray
    kept_fraction: float
    receipts: tuple[Receipt, ...] = ()


def denoise_labels(
    noisy_labels: Public[Any],
    clusters: Public[Any],
    num_classes: int,
) -> DenoisedLabels:
    """Returns the noisy labels that agree with the majority of their cluster.

    The class of a cluster is its most frequent noisy label (on a tie the lowest; 0 for an empty
    cluster). An example whose noisy label is that class keeps it; the other examples become
    unlabelled examples for semi-supervised learning. A larger share of the kept labels is true.

    Guarantee:
        Post-processing of noisy labels; nothing is charged. Assumes that the clusters were made
        without the labels, except through noisy labels and releases of the same vault.

    Source: the filter of Algorithm 7 of ``tang2022``.

    Args:
        noisy_labels: integers (n,) in 0..K-1, from randomized response or another channel that
            keeps the true class the likeliest.
        clusters: ``Clusters``, or integers (n,): the cluster of each example.
        num_classes: K, at least 2.

    Raises:
        TypeError: labels are no classes, or labels or clusters are not integers.
        ValueError: sizes differ, or arguments are out of range.

    Example:
        >>> denoised = denoise_labels([2, 2, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1], num_classes=3)
        >>> denoised.cluster_classes.tolist(), denoised.unlabelled.tolist()
        ([2, 1], [2])
    """
    num_classes = _validate.integer_at_least("num_classes", num_classes, 2)
    public = public_input(noisy_labels, clusters)
    noisy_labels, clusters = public.value
    if getattr(noisy_labels, "are_sets", False):
        raise TypeError(
            f"expected noisy labels that are classes, got {noisy_labels!r}. Draw "
            "RandomizedResponse."
        )
    noisy = _validate.class_indices("noisy_labels", noisy_labels, num_classes)
    found = Clusters.of(clusters)
    if len(found) != noisy.size:
        raise ValueError(
            f"expected {len(found)} noisy labels, one per example in the clusters, got "
            f"{noisy.size}. Give them in the same order."
        )
    shape = (found.num_clusters, num_classes)
    flat = found.assignments * num_classes + noisy
    classes = np.bincount(flat, minlength=shape[0] * shape[1]).reshape(shape).argmax(axis=1)
    agrees = noisy == classes[found.assignments]
    labelled = np.flatnonzero(agrees)
    return DenoisedLabels(
        labelled,
        noisy[labelled],
        np.flatnonzero(~agrees),
        classes,
        labelled.size / noisy.size,
        public.receipts,
    )
