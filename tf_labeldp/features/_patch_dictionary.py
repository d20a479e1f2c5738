"""Image features from a dictionary of small patches, learnt without labels.

The layer ``PatchFeatures`` computes the same responses of patches to filters.
"""

from __future__ import annotations

import dataclasses
import math
from concurrent import futures
from typing import Any, TypeVar

import numpy as np

from tf_labeldp import _checks, _validate
from tf_labeldp._progress import num_cores
from tf_labeldp.accounting import Public, PublicInput, Setting, public_input
from tf_labeldp.features.estimator import FeatureMap, note_release
from tf_labeldp.features.reader import FeatureRows

_Self = TypeVar("_Self", bound="PatchDictionary")
_BLOCK_BYTES = 2**21
"""Bytes of a block's responses; they fit into the cache of a core between the steps."""
_SHARE = 512
"""Images per task of a thread."""
_PATCHES = 200_000
"""The most patches that ``fit`` samples."""
_CLUSTER_ROWS = 16_384
"""Patches compared with the atoms at a time."""
_ROUNDS = 15
"""Rounds of k-means. Their number is fixed, so that equal images give equal filters."""


@dataclasses.dataclass(eq=False, repr=False)
class PatchDictionary(FeatureMap):
    """Maps images to features by their patches' responses to a learnt dictionary.

    ``fit`` samples patches, removes mean and contrast, whitens them, and clusters them into
    ``num_atoms`` directions. A feature averages one sign of a direction's responses, less the
    threshold and cut at zero, over one cell of a grid on the image. 70,000 images of 28 x 28 pixels
    take some 15 seconds on two cores.

    The defaults give 1,800 features. ``num_atoms=50, patch_size=(5, 9), pooling=4`` gives 3,200:
    with them a head gained 0.2 to 1 percent of accuracy on MNIST and Fashion-MNIST for epsilon
    0.05 to 1, in about three times the time; for epsilon 0.01 it lost up to 2.

    Guarantee:
        The map reads no label. Fitting and using it costs no budget if the images are public and
        the arguments are chosen without the private labels (not by accuracy on them).

    Source: Coates, Ng and Lee, "An analysis of single-layer networks in unsupervised feature
    learning" (2011); Coates and Ng, "Learning feature representations with k-means" (2012).

    Args:
        num_atoms: number of directions per patch size.
        patch_size: the side of a patch in pixels, or a tuple of sides for several scales.
        pooling: number of grid cells per side.
        threshold: subtracted from the responses, whose standard deviation is about one; at least 0.
        whitening: added to the eigenvalues of the patch covariance (one on average).
        contrast: added to a patch's variance, in units of the mean patch variance; flat patches
            stay flat.
        seed: draws the sample and the initial directions; public.

    Attributes:
        filters_: the learnt filters, an entry per patch size.
        image_shape_: (h, w) or (h, w, c).
        n_features_out_: 2 * num_atoms * pooling^2 per patch size.

    Raises:
        TypeError: ``fit`` gets arguments of a wrong type.
        ValueError: ``fit`` gets arguments out of range, or images that are too small for the patch
            and the grid, without contrast, or not finite.

    Example:
        >>> import numpy as np
        >>> images = np.random.default_rng(0).integers(256, size=(50, 12, 12), dtype="uint8")
        >>> dictionary = PatchDictionary(num_atoms=8, patch_size=5, pooling=2)
        >>> dictionary.fit_transform(images).shape
        (50, 64)
    """

    num_atoms: int = 100
    patch_size: int | tuple[int, ...] = 7
    pooling: int = 3
    threshold: float = 0.25
    whitening: float = 0.1
    contrast: float = 0.005
    seed: int | None = 0

    def fit(self: _Self, X: Public[Any], y: Setting[Any] = None) -> _Self:
        """Learns the dictionary.

        Args:
            X: public numbers (n, h, w) or (n, h, w, c), or an unshuffled ``tf.data.Dataset``
                of such batches. ``transform`` needs images on the same scale (0..255 or 0..1).
            y: ignored; scikit-learn's pipelines pass them to every step.

        Returns:
            The map itself.
        """
        del y
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

        sides = self._checked_sides()
        public = public_input(X)
        array, self.receipts_ = _checked_images(public.value), public.receipts
        _checks.run("pixels", array.shape)
        size = array.shape[1:3]
        self._pools = tuple(_pooling_matrix(size, side, self.pooling) for side in sides)
        self.image_shape_ = tuple(array.shape[1:])
        self._remember_columns(None, math.prod(array.shape[1:]))
        rng = np.random.default_rng(self.seed)
        with threadpool_limits(1, user_api="blas"):  # small products do not pay for more threads
            self.filters_ = tuple(self._learn_filters(array, side, rng) for side in sides)
        self.n_features_out_ = 2 * self.num_atoms * self.pooling**2 * len(sides)
        self._fitted_ends = FeatureRows(array).ends()
        return self

    def transform(self, X: Public[Any]) -> np.ndarray:
        """Returns the features of images, ``float32`` (m, num_features), none below zero.

        Args:
            X: (m, h, w) or (m, h, w, c), with the shape and the scale as in ``fit``.

        Raises:
            ValueError: not fitted, images of another shape, or numbers that are not finite.
        """
        from threadpoolctl import threadpool_limits

        self._refuse_unfitted("filters_")
        array = _checked_images(PublicInput.bare(X))
        if tuple(array.shape[1:]) != self.image_shape_:
            raise ValueError(
                f"images must have shape (m, {', '.join(map(str, self.image_shape_))}) as in fit, "
                f"got {array.shape}. Resize them, or fit again."
            )
        _checks.run("range", self._fitted_ends, FeatureRows(array).ends())
        four = array if array.ndim == 4 else array[..., np.newaxis]
        # The axes are image, patch size, grid cell, sign of the response, filter.
        shape = (len(array), len(self.filters_), self.pooling**2, 2, self.num_atoms)
        features = np.empty(shape, np.float32)

        def fill(start: int) -> None:
            part = slice(start, start + _SHARE)
            for scale, (filters, pool) in enumerate(zip(self.filters_, self._pools, strict=True)):
                out = features[part, scale]
                _fill(four[part], filters, pool, float(self.threshold), out)

        one_each = threadpool_limits(1, user_api="blas")
        with one_each, futures.ThreadPoolExecutor(num_cores()) as threads:
            list(threads.map(fill, range(0, len(array), _SHARE)))  # raises the errors of threads
        return features.reshape(len(array), self.n_features_out_)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.three_d_array = False, True
        tags.input_tags.sparse = False
        return tags

    def to_keras(self) -> Any:
        """Returns a ``keras.Model`` from raw images to the features; it saves and loads.

        Its input has the shape and the scale of the images of ``fit``. Import
        ``tf_labeldp.keras_layers`` before you load its file.
        """
        self._refuse_unfitted("filters_")
        import keras

        from tf_labeldp.keras_layers import PatchFeatures

        images = keras.Input(self.image_shape_, name="images")
        parts = []
        for filters in self.filters_:
            layer = PatchFeatures(
                self.num_atoms,
                filters.patch_size,
                pooling=self.pooling,
                threshold=float(self.threshold),
                contrast_floor=filters.contrast_floor,
                name=f"patches_{filters.patch_size}",
            )
            parts.append(layer(images))
            layer.set_weights([filters.weights, filters.offsets])
            note_release(layer, self.receipts_)
        rows = parts[0] if len(parts) == 1 else keras.layers.Concatenate(dtype="float32")(parts)
        return keras.Model(images, rows, name="patch_dictionary")

    def _learn_filters(self, images: np.ndarray, side: int, rng: np.random.Generator) -> Filters:
        four = images if images.ndim == 4 else images[..., np.newaxis]
        patches = _sample_patches(four, side, rng)
        patches -= patches.mean(axis=1, keepdims=True)
        variance = np.einsum("ij,ij->i", patches, patches) / patches.shape[1]
        mean_variance = float(variance.mean(dtype=np.float64))
        if mean_variance == 0.0:
            raise ValueError(
                f"expected images with contrast, got constant patches of {side} x {side} pixels "
                "only. Check how the images were read."
            )
        contrast_floor = float(self.contrast) * mean_variance
        patches /= np.sqrt(variance + contrast_floor)[:, np.newaxis]
        mean, whiten = zca(patches, float(self.whitening))
        whitened = (patches - mean.astype(np.float32)) @ whiten.astype(np.float32)
        atoms = spherical_kmeans(whitened.astype(np.float32), self.num_atoms, rng)
        weights = whiten @ atoms.T.astype(np.float64)
        # Patches have mean zero: the constant part of a filter would only lose digits.
        return Filters(
            side,
            (weights - weights.mean(axis=0)).astype(np.float32),
            (mean @ weights).astype(np.float32),
            contrast_floor,
        )

    def _checked_sides(self) -> tuple[int, ...]:
        _validate.integer_at_least("num_atoms", self.num_atoms, 1)
        _validate.integer_at_least("pooling", self.pooling, 1)
        _validate.positive_finite("whitening", self.whitening)
        _validate.positive_finite("contrast", self.contrast)
        _validate.number_in("threshold", self.threshold, "[0, inf)")
        size = self.patch_size
        sides = tuple(size) if isinstance(size, (tuple, list)) else (size,)
        return tuple(_validate.integer_at_least("patch_size", side, 2) for side in sides)


def _checked_images(images: Any) -> np.ndarray:
    array = np.asarray(FeatureRows(images).joined())
    if array.ndim not in (3, 4):
        raise ValueError(
            f"images must have shape (n, h, w) or (n, h, w, c), got {array.shape}. Reshape flat "
            "rows to images; for tables use RandomFourierFeatures."
        )
    bad = 0
    for start in range(0, 0 if array.dtype.itemsize == 1 else len(array), 1024):
        with np.errstate(over="ignore"):
            part = array[start : start + 1024].astype(np.float32).reshape(-1, array[0].size)
            bad += int(np.count_nonzero(~np.isfinite(np.einsum("ij,ij->i", part, part))))
    if bad:
        raise ValueError(
            f"images must be finite, but {bad} of {len(array)} have pixels that are NaN, infinite "
            "or so large that their squares overflow float32. Fill them in, or leave them out."
        )
    return array


@dataclasses.dataclass(frozen=True)
class Filters:
    """Learnt filters of one patch size, with the arrays of the layer ``PatchFeatures``."""

    patch_size: int
    weights: np.ndarray  # float32 (patch_size^2 * channels, num_atoms), each column of sum zero
    offsets: np.ndarray  # float32 (num_atoms,)
    contrast_floor: float


def _pooling_matrix(size: tuple[int, ...], side: int, cells: int) -> np.ndarray:
    """Returns ``float32`` (patch positions, cells^2), whose columns average over grid cells."""
    rows, columns = (length - side + 1 for length in size)
    if min(rows, columns) < cells:
        raise ValueError(
            f"expected at least {cells} x {cells} patches of {side} x {side} pixels, got "
            f"{max(rows, 0)} x {max(columns, 0)} from images of {size[0]} x {size[1]}. Use a "
            "smaller patch_size or pooling."
        )
    averages = []
    for places in (rows, columns):
        edges = np.arange(cells + 1) * places // cells
        cell_of = np.searchsorted(edges, np.arange(places), side="right") - 1
        one_hot = (cell_of[:, np.newaxis] == np.arange(cells)).astype(np.float64)
        averages.append(one_hot / one_hot.sum(axis=0))
    return np.einsum("ia,jb->ijab", *averages).reshape(rows * columns, -1).astype(np.float32)


def _fill(
    images: np.ndarray, filters: Filters, pool: np.ndarray, threshold: float, out: np.ndarray
) -> None:
    """Fills ``out`` (n, cells, 2, num_atoms), some images at a time."""
    positions, cells = pool.shape
    num_atoms = len(filters.offsets)
    block = max(1, _BLOCK_BYTES // (4 * positions * max(num_atoms, len(filters.weights))))
    block = min(block, len(images))
    # All blocks reuse these: new memory costs more here than the arithmetic.
    buffers = [
        np.empty(len(filters.weights) * block * positions, np.float32),
        *(np.empty(num_atoms * block * positions, np.float32) for _ in range(2)),
    ]
    transposed = np.ascontiguousarray(filters.weights.T)
    high = (filters.offsets + np.float32(threshold))[:, np.newaxis]
    low = (filters.offsets - np.float32(threshold))[:, np.newaxis]
    for start in range(0, len(images), block):
        part = images[start : start + block]
        used = len(part) * positions
        patches = buffers[0][: len(transposed[0]) * used].reshape(-1, used)
        responses, above = (
            buffer[: num_atoms * used].reshape(num_atoms, used) for buffer in buffers[1:]
        )
        _normalised_patches(part, filters, patches)
        np.matmul(transposed, patches, out=responses)
        np.maximum(responses, high, out=above)
        below = np.minimum(responses, low, out=responses)
        # The pool's columns sum to one, so that the bound is subtracted after pooling.
        for side, (values, bound) in enumerate(((above, high), (below, low))):
            pooled = (values.reshape(-1, positions) @ pool).reshape(num_atoms, len(part), cells)
            pooled = np.abs(pooled - bound[:, :, np.newaxis])
            out[start : start + len(part), :, side] = pooled.transpose(1, 2, 0)


def _normalised_patches(images: np.ndarray, filters: Filters, out: np.ndarray) -> None:
    """Fills ``out`` (patch pixels, images * positions) with patches divided by their contrast."""
    side = filters.patch_size
    n, height, width, channels = images.shape
    rows, columns = height - side + 1, width - side + 1
    x = images.astype(np.float32)
    x -= x.mean(axis=(1, 2, 3), keepdims=True)  # large numbers would lose digits below
    patches = out.reshape(side, side, channels, n, rows, columns)
    for i in range(side):
        for j in range(side):
            patches[i, j] = x[:, i : i + rows, j : j + columns].transpose(3, 0, 1, 2)
    out -= out.mean(axis=0)
    # E[p^2] - E[p]^2, in one pass, would lose a patch of low contrast to rounding.
    variance = np.einsum("ij,ij->j", out, out) / np.float32(len(out))
    out /= np.sqrt(variance + np.float32(filters.contrast_floor))


def _sample_patches(images: np.ndarray, side: int, rng: np.random.Generator) -> np.ndarray:
    """Returns random patches, ``float32`` (m, side^2 * channels), at most all."""
    n, height, width, channels = images.shape
    rows, columns = height - side + 1, width - side + 1
    size = min(_PATCHES, n * rows * columns)
    length = side * side * channels
    image = rng.integers(n, size=size)
    top, left = rng.integers(rows, size=size), rng.integers(columns, size=size)
    windows = np.lib.stride_tricks.sliding_window_view(images, (side, side), axis=(1, 2))
    patches = np.empty((size, length), np.float32)
    for start in range(0, size, 8192):
        part = slice(start, start + 8192)
        chosen = windows[image[part], top[part], left[part]]  # (m, c, side, side)
        patches[part] = chosen.transpose(0, 2, 3, 1).reshape(-1, length)
    return patches


def zca(rows: np.ndarray, floor: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean (p,) and the symmetric whitening matrix (p, p) of rows, ``float64``."""
    wide = rows.astype(np.float64, copy=False)
    mean = wide.mean(axis=0)
    covariance = wide.T @ wide / len(wide) - np.outer(mean, mean)
    variances, axes = np.linalg.eigh(covariance)
    return mean, (axes / np.sqrt(np.maximum(variances, 0.0) + floor)) @ axes.T


def spherical_kmeans(rows: np.ndarray, num_atoms: int, rng: np.random.Generator) -> np.ndarray:
    """Returns directions of unit norm of ``float32`` rows (n, p), (num_atoms, p), up to sign.

    Source: Coates and Ng, "Learning feature representations with k-means" (2012), section 3.
    """
    from scipy import sparse

    atoms = _unit(rng.normal(size=(num_atoms, rows.shape[1]))).astype(np.float32)
    for _ in range(_ROUNDS):
        moved = atoms.astype(np.float64)  # an atom without rows stays in place
        for start in range(0, len(rows), _CLUSTER_ROWS):
            block = rows[start : start + _CLUSTER_ROWS]
            products = block @ atoms.T
            chosen = np.abs(products).argmax(axis=1)
            weights = products[np.arange(len(block)), chosen]
            code = sparse.csr_array(
                (weights, chosen, np.arange(len(block) + 1)), shape=products.shape
            )
            moved += code.T @ block
        atoms = _unit(moved).astype(np.float32)
    return atoms


def _unit(rows: np.ndarray) -> np.ndarray:
    """Returns rows scaled to unit norm; a row of zeros becomes the first axis."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.where(norms > 0.0, rows / np.where(norms > 0.0, norms, 1.0), np.eye(1, rows.shape[1]))
