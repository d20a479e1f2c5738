"""Features of images from a dictionary of small patches, learnt without labels."""

from __future__ import annotations

import numbers
from typing import Any, TypeVar

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.features._estimator import Estimator
from tf_labeldp.features._patch_responses import (
    Filters,
    count_too_large,
    learn_filters,
    one_blas_thread,
    pooled_responses,
    pooling_matrix,
)

_Self = TypeVar("_Self", bound="PatchDictionary")


class PatchDictionary(Estimator):
    """Maps images to features by their patches' responses to a learnt dictionary.

    ``fit`` samples patches, takes out mean and contrast, whitens them, and clusters them into
    ``num_atoms`` directions. A feature is the mean, over one cell of a grid on the image, of the
    part of a direction's responses above a threshold, on one of its two sides. Nothing of it needs
    a label, and none is looked at. 70,000 images of 28 x 28 pixels take some 15 seconds on two
    cores; patches exist for a few images at a time.

    The defaults give 1,800 features. Of ``num_atoms=50, patch_size=(5, 9), pooling=4``, which gives
    3,200, a head gained 0.2 to 1 percent of accuracy on MNIST and Fashion-MNIST for epsilon 0.05 to
    1 in benchmarks, at some three times the head's time; for epsilon 0.01 it lost up to 2.

    Privacy: no label is seen, so fitting and using it costs no budget, as long as images are public
    and the arguments are chosen without the private labels: by habit or by a public data set of the
    same kind, but not by accuracy on the private labels.

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
        max_patches: the most patches that ``fit`` looks at.
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
        max_patches: int = 200_000,
        seed: int | None = 0,
    ) -> None:
        self.num_atoms = num_atoms
        self.patch_size = patch_size
        self.pooling = pooling
        self.stride = stride
        self.threshold = threshold
        self.whitening = whitening
        self.contrast = contrast
        self.max_patches = max_patches
        self.seed = seed

    def fit(self: _Self, images: Any, labels: Any = None) -> _Self:
        """Learns the dictionary.

        Args:
            images: public numbers (n, h, w) or (n, h, w, c); all other images must have the same
                scale (0..255 or 0..1).
            labels: not looked at; scikit-learn's pipelines pass them to every step.

        Returns:
            The map itself.
        """
        del labels
        sides = self._checked_sides()
        array = _checked_images(images)
        if len(array) == 0:
            raise ValueError("images hold no image; give at least one.")
        four = _with_channels(array)
        self._pools = self._pooling_matrices(four.shape[1:3], sides)
        self.image_shape_ = tuple(array.shape[1:])
        rng = np.random.default_rng(self.seed)
        with one_blas_thread():
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
        return self

    def transform(self, images: Any) -> np.ndarray:
        """Returns the features of images.

        Args:
            images: (m, h, w) or (m, h, w, c), of the shape and the scale of those of ``fit``.

        Returns:
            ``float32`` (m, n_features_out_), none below zero.

        Raises:
            TypeError: images that are not numbers.
            ValueError: not fitted, images of another shape, or not finite.
        """
        self._check_fitted()
        array = _checked_images(images)
        if tuple(array.shape[1:]) != self.image_shape_:
            raise ValueError(
                f"images must have shape (m, {', '.join(map(str, self.image_shape_))}) as in fit, "
                f"got {array.shape}. Resize them, or fit again."
            )
        four = _with_channels(array)
        features = np.empty((len(four), self.n_features_out_), np.float32)
        width = self.n_features_out_ // len(self.filters_)
        for scale, (filters, pool) in enumerate(zip(self.filters_, self._pools, strict=True)):
            out = features[:, scale * width : (scale + 1) * width]
            pooled_responses(four, filters, pool, self.stride, float(self.threshold), out)
        return features

    def fit_transform(self, images: Any, labels: Any = None) -> np.ndarray:
        """Fits and returns the features of the same images; labels are not looked at."""
        del labels
        return self.fit(images).transform(images)

    def to_keras(self) -> Any:
        """Returns a ``keras.Model`` from raw images to the features; it saves and loads.

        Its input has the shape and the scale of the images of ``fit``. A file of it is loaded after
        ``import tf_labeldp.keras_layers``.
        """
        self._check_fitted()
        import keras

        from tf_labeldp.keras_layers import PatchFeatures

        images = keras.Input(self.image_shape_, name="images")
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
        return keras.Model(images, rows, name="patch_dictionary")

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
        for name in ("num_atoms", "pooling", "stride", "max_patches"):
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
        self._refuse_unfitted("filters_", "fit(images)")


def _checked_images(images: Any) -> np.ndarray:
    array = np.asarray(images)
    if array.ndim not in (3, 4):
        raise ValueError(
            f"images must have shape (n, h, w) or (n, h, w, c), got {array.shape}. Reshape flat "
            "rows to images; for tables use RandomFourierFeatures."
        )
    if array.dtype.kind not in "biuf":
        raise TypeError(f"images must be numbers, got dtype {array.dtype}.")
    bad = 0 if array.dtype.itemsize == 1 else count_too_large(array)
    if bad:
        raise ValueError(
            f"images must be finite, but {bad} of {len(array)} have pixels that are NaN, infinite "
            "or so large that their squares overflow float32. Fill them in, or leave these images "
            "out."
        )
    return array


def _with_channels(images: np.ndarray) -> np.ndarray:
    return images[..., np.newaxis] if images.ndim == 3 else images
