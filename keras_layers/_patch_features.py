"""Thresholded responses of an image's patches to a dictionary of filters, pooled over a grid."""

from typing import Any

import keras
import numpy as np
from keras import ops


def pooling_matrix(rows: int, columns: int, cells: int) -> np.ndarray:
    """The matrix that averages a map over a grid of nearly equal cells.

    Args:
        rows: Int, height of the map.
        columns: Int, width of the map.
        cells: Int, cells a side, at most the smaller side of the map.

    Returns:
        `float32` `(rows * columns, cells**2)`; each column sums to one.

    Raises:
        ValueError: If there are more cells than places along a side.

    Example:
        >>> pooling_matrix(1, 4, 1).tolist()
        [[0.25], [0.25], [0.25], [0.25]]
    """
    if cells > min(rows, columns):
        raise ValueError(
            f"A map of {rows} x {columns} patch positions can't be pooled over {cells} x {cells} "
            "cells. Use fewer cells, a smaller patch or stride, or larger images."
        )
    sides = []
    for size in (rows, columns):
        edges = np.arange(cells + 1) * size // cells
        cell_of = np.searchsorted(edges, np.arange(size), side="right") - 1
        one_hot = (cell_of[:, np.newaxis] == np.arange(cells)).astype("float64")
        sides.append(one_hot / one_hot.sum(axis=0))
    grid = np.einsum("ia,jb->ijab", *sides)
    return grid.reshape(rows * columns, cells**2).astype("float32")


@keras.saving.register_keras_serializable(package="tf_labeldp")
class PatchFeatures(keras.layers.Layer):
    """Pooled two-sided responses of normalised patches, as `PatchDictionary` fits them.

    Every patch `p` of `patch_size` x `patch_size` pixels (all channels together) loses its mean and
    is divided by `sqrt(var(p) + contrast_floor)`. With filters `f_k` and offsets `b_k`, its
    responses are `r_k = f_k . p - b_k`, of which `max(0, r_k - threshold)` and
    `max(0, -r_k - threshold)` are averaged over each of `pooling` x `pooling` cells of the image.

    The weights are set by `set_weights([filters, offsets])` and are not trained.

    Args:
        num_atoms: Int, the number of filters.
        patch_size: Int, side of a patch.
        pooling: Int, cells a side.
        stride: Int, step between patches.
        threshold: Float >= 0.
        contrast_floor: Float > 0, in squared units of the images.
        **kwargs: As in `keras.layers.Layer`.

    Call arguments:
        inputs: Images `(batch, height, width)` or `(batch, height, width, channels)`, any number
            dtype; computed in float32 whatever the dtype policy.

    Returns:
        `float32` `(batch, 2 * num_atoms * pooling**2)`: cells in rows of the grid, in each the
        positive sides of all filters and then the negative ones.

    Raises:
        ValueError: If an argument is out of its range, or the layer is built for images that are
            too small, or of unknown size.

    Example:
        >>> import numpy as np
        >>> layer = PatchFeatures(4, patch_size=3, pooling=2, threshold=0.5)
        >>> layer(np.zeros((5, 8, 8), "uint8")).shape
        TensorShape([5, 32])

    Source: Coates, Ng and Lee, "An analysis of single-layer networks in unsupervised feature
    learning" (2011).
    """

    def __init__(
        self,
        num_atoms: int,
        patch_size: int,
        pooling: int = 3,
        stride: int = 1,
        threshold: float = 0.25,
        contrast_floor: float = 1.0,
        **kwargs: Any,
    ) -> None:
        """See the class."""
        super().__init__(autocast=False, trainable=False, **kwargs)
        counts = {
            "num_atoms": num_atoms,
            "patch_size": patch_size,
            "pooling": pooling,
            "stride": stride,
        }
        for argument, value in counts.items():
            if value < 1:
                raise ValueError(f"`{argument}` must be at least 1. Received: {argument}={value}.")
        if not (threshold >= 0.0 and contrast_floor > 0.0):
            raise ValueError(
                "`threshold` must be at least zero and `contrast_floor` above it. Received: "
                f"threshold={threshold}, contrast_floor={contrast_floor}."
            )
        self.num_atoms = num_atoms
        self.patch_size = patch_size
        self.pooling = pooling
        self.stride = stride
        self.threshold = threshold
        self.contrast_floor = contrast_floor

    def build(self, input_shape: Any) -> None:
        """Makes the weights, and the pooling for this size of images."""
        if len(input_shape) not in (3, 4) or None in tuple(input_shape[1:]):
            raise ValueError(
                "PatchFeatures needs images (batch, height, width[, channels]) of known size. "
                f"Received: {tuple(input_shape)}."
            )
        channels = 1 if len(input_shape) == 3 else int(input_shape[3])
        rows, columns = (
            (int(size) - self.patch_size) // self.stride + 1 for size in input_shape[1:3]
        )
        self._pool = pooling_matrix(rows, columns, self.pooling)
        length = self.patch_size**2 * channels
        # A layer that does not cast its inputs still has its weights cast, unless they say so too.
        self.filters = self.add_weight(
            shape=(length, self.num_atoms),
            name="filters",
            dtype="float32",
            autocast=False,
            trainable=False,
        )
        self.offsets = self.add_weight(
            shape=(self.num_atoms,),
            initializer="zeros",
            name="offsets",
            dtype="float32",
            autocast=False,
            trainable=False,
        )
        super().build(input_shape)

    def call(self, inputs: Any) -> Any:
        """The pooled responses."""
        images = ops.cast(inputs, "float32")
        if len(images.shape) == 3:
            images = ops.expand_dims(images, -1)
        # Patches themselves and not a convolution: their variance from E[p^2] - E[p]^2 would
        # lose in float32 what a patch of low contrast has.
        patches = ops.image.extract_patches(
            images,
            self.patch_size,
            strides=self.stride,
            padding="valid",
            data_format="channels_last",
        )
        patches = ops.reshape(patches, (-1, self._pool.shape[0], self.filters.shape[0]))
        patches = patches - ops.mean(patches, axis=-1, keepdims=True)
        variance = ops.mean(ops.square(patches), axis=-1, keepdims=True)
        patches = patches / ops.sqrt(variance + self.contrast_floor)
        responses = ops.matmul(patches, self.filters) - self.offsets
        sides = ops.concatenate(
            [
                ops.relu(responses - self.threshold),
                ops.relu(-responses - self.threshold),
            ],
            axis=-1,
        )
        pooled = ops.matmul(ops.transpose(ops.convert_to_tensor(self._pool)), sides)
        return ops.reshape(pooled, (-1, self._num_outputs))

    def compute_output_shape(self, input_shape: Any) -> Any:
        """The shape of the features."""
        return (input_shape[0], self._num_outputs)

    def compute_output_spec(self, inputs: Any) -> Any:
        """The shape and the dtype of the features."""
        return keras.KerasTensor(self.compute_output_shape(inputs.shape), dtype="float32")

    def get_config(self) -> dict[str, Any]:
        """Every constructor argument."""
        return {
            **super().get_config(),
            "num_atoms": self.num_atoms,
            "patch_size": self.patch_size,
            "pooling": self.pooling,
            "stride": self.stride,
            "threshold": self.threshold,
            "contrast_floor": self.contrast_floor,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "PatchFeatures":
        """The layer of a config."""
        return cls(**{name: value for name, value in config.items() if name != "trainable"})

    @property
    def _num_outputs(self) -> int:
        return int(2 * self.num_atoms * self.pooling**2)
