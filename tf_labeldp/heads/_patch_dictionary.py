"""Features of images from a dictionary of small patches, learnt without labels."""

from __future__ import annotations

import numbers
from typing import Any, TypeVar

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.heads._decorrelation import Moments, affine_map
from tf_labeldp.heads._estimator import Estimator
from tf_labeldp.heads._patch_responses import Filters, learn_filters, pooled_responses

_Self = TypeVar("_Self", bound="PatchDictionary")


class PatchDictionary(Estimator):
    """Maps images to features by their patches' responses to a learnt dictionary.

    ``fit`` samples patches, takes out mean and contrast, whitens them, and clusters them into
    ``num_atoms`` directions. A feature is the mean, over one cell of a grid on the image, of the
    part of a direction's responses above a threshold, on one of its two sides. Features are then
    centred and partly decorrelated. Nothing of it needs a label, and none can be given.

    Privacy: no label is seen, so fitting and using it costs no budget, as long as images are public
    and the arguments are chosen without the private labels: by habit, by a public data set of the
    same kind, or by the rule for ``decorrelate`` below, but not by accuracy on the private labels.

    Source: Coates, Ng and Lee, "An analysis of single-layer networks in unsupervised feature
    learning" (2011); Coates and Ng, "Learning feature representations with k-means" (2012).

    Args:
        num_atoms: directions for each patch size.
        patch_size: side of a patch in pixels, or a tuple of sides for several scales at once.
        pooling: cells a side of the grid.
        stride: step between patches.
        threshold: of the responses, at least zero; about their standard deviation is one.
        whitening: what is added to the eigenvalues of the patches' covariance (one on average).
        contrast: what is added to a patch's variance, in units of the mean variance of a patch;
            flat patches stay flat.
        decorrelate: the floor, relative to the largest eigenvalue, of the whitening of the
            features; None only centres them. Large for a small budget:
            ``decorrelation_floor(epsilon, num_labels)`` is a rule.
        max_patches: the most patches that ``fit`` looks at.
        max_images: the most images whose features ``fit`` computes, for mean and covariance.
        seed: of the sample and of the first directions; the same seed gives the same features.
            It concerns no privacy.

    Attributes:
        filters_: what was learnt, one entry a patch size.
        image_shape_: (h, w) or (h, w, c).
        n_features_out_: 2 * num_atoms * pooling^2 for each patch size.

    Raises:
        TypeError: ``fit`` on images that are not numbers, or arguments of a wrong kind.
        ValueError: ``fit`` on arguments out of range, images too small for the patch and the grid,
            of no contrast, or not finite.

    Example:
        >>> import numpy as np
        >>> images = np.random.default_rng(0).integers(256, size=(50, 12, 12), dtype="uint8")
        >>> dictionary = PatchDictionary(num_atoms=8, patch_size=5, pooling=2)
        >>> dictionary.fit_transform(images).shape
        (50, 64)
    """

    def __init__(
        self,
        num_atoms: int = 100,
        patch_size: int | tuple[int, ...] = 7,
        pooling: int = 3,
        stride: int = 1,
        threshold: float = 0.25,
        whitening: float = 0.1,
        contrast: float = 0.005,
        decorrelate: float | None = 0.03,
        max_patches: int = 200_000,
        max_images: int = 20_000,
        seed: int | None = 0,
    ) -> None:
        self.num_atoms = num_atoms
        self.patch_size = patch_size
        self.pooling = pooling
        self.stride = stride
        self.threshold = threshold
        self.whitening = whitening
        self.contrast = contrast
        self.decorrelate = decorrelate
        self.max_patches = max_patches
        self.max_images = max_images
        self.seed = seed

    def fit(self: _Self, images: Any) -> _Self:
        """Learns the dictionary and the features' mean and covariance.

        Args:
            images: public numbers (n, h, w) or (n, h, w, c); all other images must have the same
                scale (0..255 or 0..1).

        Returns:
            The map itself.
        """
        sides = self._checked_sides()
        array = _checked_images(images)
        if len(array) == 0:
            raise ValueError("images hold no image; give at least one.")
        four = _with_channels(array)
        self._pools = self._pooling_matrices(four.shape[1:3], sides)
        self.image_shape_ = tuple(array.shape[1:])
        self._image_dtype = "uint8" if array.dtype == np.uint8 else "float32"
        rng = np.random.default_rng(self.seed)
        self.filters_: tuple[Filters, ...] = tuple(
            learn_filters(
                four,
                side,
                self.num_atoms,
                whitening=float(self.whitening),
                contrast=float(self.contrast),
                max_patches=self.max_patches,
                rng=rng,
            )
            for side in sides
        )
        self.n_features_out_ = 2 * self.num_atoms * self.pooling**2 * len(sides)
        chosen = np.arange(len(four))
        if len(four) > self.max_images:
            chosen = np.sort(rng.choice(len(four), self.max_images, replace=False))
        moments = Moments()
        for start in range(0, len(chosen), 1024):
            moments.add(self._pooled(four[chosen[start : start + 1024]]))
        mean, covariance = moments.mean_and_covariance()
        self._matrix, self._offset = affine_map(mean, covariance, self.decorrelate)
        return self

    def transform(self, images: Any, batch_size: int = 1024) -> np.ndarray:
        """Returns the features of images.

        Args:
            images: (m, h, w) or (m, h, w, c), of the shape and the scale of those of ``fit``.
            batch_size: images at a time; changes memory and speed, not the result beyond rounding.

        Returns:
            ``float32`` (m, n_features_out_).

        Raises:
            ValueError: not fitted, images of another shape, or not finite.
        """
        self._check_fitted()
        step = _validate.integer_at_least("batch_size", batch_size, 1)
        array = _checked_images(images)
        if tuple(array.shape[1:]) != self.image_shape_:
            raise ValueError(
                f"images must have shape (m, {', '.join(map(str, self.image_shape_))}) as in fit, "
                f"got {array.shape}. Resize them, or fit again."
            )
        four = _with_channels(array)
        features = np.empty((len(four), self.n_features_out_), np.float32)
        for start in range(0, len(four), step):
            pooled = self._pooled(four[start : start + step])
            if self._matrix is not None:
                pooled = pooled @ self._matrix
            features[start : start + step] = pooled + self._offset
        if not np.all(np.isfinite(features.sum(axis=1))):
            raise ValueError(
                "images must be finite, but some pixels are NaN, infinite or have squares that "
                "overflow. Fill them in, or leave these images out."
            )
        return features

    def fit_transform(self, images: Any) -> np.ndarray:
        """Fits and returns the features of the same images."""
        return self.fit(images).transform(images)

    def to_keras(self) -> Any:
        """Returns a ``keras.Model`` from raw images to the features; it saves and loads.

        Its input has the shape and the scale of the images of ``fit``. A file of it is loaded after
        ``import tf_labeldp.keras_layers``.
        """
        self._check_fitted()
        import keras

        from tf_labeldp.keras_layers import PatchFeatures

        images = keras.Input(self.image_shape_, dtype=self._image_dtype, name="images")
        parts = []
        for filters in self.filters_:
            layer = PatchFeatures(
                self.num_atoms,
                filters.patch_size,
                pooling=self.pooling,
                stride=self.stride,
                threshold=float(self.threshold),
                contrast_floor=filters.contrast_floor,
                name=f"patches_{filters.patch_size}",
            )
            parts.append(layer(images))
            layer.set_weights([filters.weights, filters.offsets])
        rows = parts[0] if len(parts) == 1 else keras.layers.Concatenate(dtype="float32")(parts)
        if self._matrix is None:
            shift = keras.layers.Normalization(
                mean=-self._offset, variance=np.ones_like(self._offset), dtype="float32"
            )
            return keras.Model(images, shift(rows), name="patch_dictionary")
        dense = keras.layers.Dense(
            self.n_features_out_, trainable=False, dtype="float32", name="decorrelate"
        )
        outputs = dense(rows)
        dense.set_weights([self._matrix, self._offset])
        return keras.Model(images, outputs, name="patch_dictionary")

    def _pooled(self, images: np.ndarray) -> np.ndarray:
        """Returns features before the affine map, ``float32`` (m, d)."""
        parts = [
            pooled_responses(images, filters, pool, self.stride, float(self.threshold))
            for filters, pool in zip(self.filters_, self._pools, strict=True)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def _pooling_matrices(
        self, size: tuple[int, ...], sides: tuple[int, ...]
    ) -> tuple[np.ndarray, ...]:
        pools = []
        for side in sides:
            rows, columns = ((length - side) // self.stride + 1 for length in size)
            if min(rows, columns) < self.pooling:
                raise ValueError(
                    f"images of {size[0]} x {size[1]} pixels have {max(rows, 0)} x "
                    f"{max(columns, 0)} places for a patch of {side} x {side} at stride "
                    f"{self.stride}, fewer than the {self.pooling} x {self.pooling} cells. Use a "
                    "smaller patch_size, stride or pooling."
                )
            pools.append(pooling_matrix(rows, columns, self.pooling))
        return tuple(pools)

    def _checked_sides(self) -> tuple[int, ...]:
        """Checks the arguments; returns the patch sizes."""
        for name in ("num_atoms", "pooling", "stride", "max_patches", "max_images"):
            _validate.integer_at_least(name, getattr(self, name), 1)
        for name in ("whitening", "contrast"):
            _validate.positive_finite(name, getattr(self, name))
        threshold: Any = self.threshold
        if (
            isinstance(threshold, bool)
            or not isinstance(threshold, numbers.Real)
            or not 0.0 <= float(threshold) < float("inf")
        ):
            raise ValueError(f"threshold must be a finite number >= 0, got {threshold!r}.")
        if self.decorrelate is not None:
            _validate.positive_finite("decorrelate", self.decorrelate)
        given = self.patch_size
        sides = tuple(given) if isinstance(given, (tuple, list)) else (given,)
        if not sides:
            raise ValueError("patch_size must be an integer or a tuple of them, got none.")
        for side in sides:
            _validate.integer_at_least("patch_size", side, 2)
        if len(set(sides)) < len(sides):
            raise ValueError(f"patch_size must not repeat a side, got {sides}.")
        return tuple(int(side) for side in sides)

    def _check_fitted(self) -> None:
        if not hasattr(self, "_offset"):
            raise ValueError("this PatchDictionary is not fitted; call fit(images) first.")


def pooling_matrix(rows: int, columns: int, cells: int) -> np.ndarray:
    """Returns ``float32`` (rows * columns, cells^2), whose columns average over grid cells."""
    sides = []
    for size in (rows, columns):
        edges = np.arange(cells + 1) * size // cells
        cell_of = np.searchsorted(edges, np.arange(size), side="right") - 1
        one_hot = (cell_of[:, np.newaxis] == np.arange(cells)).astype(np.float64)
        sides.append(one_hot / one_hot.sum(axis=0))
    return np.einsum("ia,jb->ijab", *sides).reshape(rows * columns, -1).astype(np.float32)


def _checked_images(images: Any) -> np.ndarray:
    array = np.asarray(images)
    if array.ndim not in (3, 4):
        raise ValueError(
            f"images must have shape (n, h, w) or (n, h, w, c), got {array.shape}. Reshape flat "
            "rows to images; for tables use RandomFourierFeatures."
        )
    if array.dtype.kind not in "biuf":
        raise TypeError(f"images must be numbers, got dtype {array.dtype}.")
    return array


def _with_channels(images: np.ndarray) -> np.ndarray:
    return images[..., np.newaxis] if images.ndim == 3 else images
