"""Layers whose weights are set once and not trained: feature maps, and a table of clusters."""

import math
from typing import Any

import keras
import numpy as np
from keras import ops

from ._released_dense import CarriesReceipts

_SAME = 1.0 - 1e-6
"""Rows whose product with a key is above this are taken for the key itself."""


class FixedLayer(keras.layers.Layer):
    """A layer that computes in float32 under any dtype policy, from weights that are not trained.

    ``arguments`` names the attributes that are arguments of the constructor.
    """

    arguments: tuple[str, ...] = ()

    def __init__(self, **kwargs: Any) -> None:
        """See the class of the layer."""
        super().__init__(autocast=False, trainable=False, **kwargs)

    def _add_fixed(self, name: str, shape: tuple[int, ...], initializer: Any = "zeros") -> None:
        """Adds a weight as the attribute of its name."""
        # A layer that does not cast its inputs still has its weights cast, unless they say so too.
        weight = self.add_weight(
            shape=shape,
            initializer=initializer,
            name=name,
            dtype="float32",
            autocast=False,
            trainable=False,
        )
        setattr(self, name, weight)

    def compute_output_spec(self, inputs: Any) -> Any:
        """Returns the shape and the dtype of the outputs."""
        return keras.KerasTensor(self.compute_output_shape(inputs.shape), dtype="float32")

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        own = {name: getattr(self, name) for name in self.arguments}
        return {**super().get_config(), **own}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Returns the layer of a config."""
        return cls(**{name: value for name, value in config.items() if name != "trainable"})

    def _check_counts(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1. Received: {name}={value}.")


@keras.saving.register_keras_serializable(package="tf_labeldp")
class PatchFeatures(FixedLayer):
    """Pooled two-sided responses of normalised patches, as ``PatchDictionary`` fits them.

    Each patch ``p`` of ``patch_size`` x ``patch_size`` pixels (all channels together) is centred
    and divided by ``sqrt(var(p) + contrast_floor)``. With filters ``f_k`` and offsets ``b_k`` its
    responses are ``r_k = f_k . p - b_k``; ``max(0, r_k - threshold)`` and
    ``max(0, -r_k - threshold)`` are averaged over each of ``pooling`` x ``pooling`` cells.

    Set the weights with ``set_weights([filters, offsets])``; they are not trained.

    Args:
        num_atoms: number of filters.
        patch_size: side of a patch.
        pooling: cells per side.
        stride: step between patches.
        threshold: number of at least zero.
        contrast_floor: number above zero, in squared units of the images.
        **kwargs: as in ``keras.layers.Layer``.

    Call arguments:
        inputs: images (batch, height, width) or (batch, height, width, channels) of any number
            dtype.

    Returns:
        ``float32`` (batch, 2 * num_atoms * pooling**2): cells in rows of the grid, in each the
        positive sides of all filters and then the negative ones.

    Raises:
        ValueError: an argument is out of range, or the images are too small or of unknown size.

    Example:
        >>> layer = PatchFeatures(4, patch_size=3, pooling=2, threshold=0.5)
        >>> layer(np.zeros((5, 8, 8), "uint8")).shape
        TensorShape([5, 32])

    Source: Coates, Ng and Lee, "An analysis of single-layer networks in unsupervised feature
    learning" (2011).
    """

    arguments = ("num_atoms", "patch_size", "pooling", "stride", "threshold", "contrast_floor")

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
        super().__init__(**kwargs)
        self.num_atoms = num_atoms
        self.patch_size = patch_size
        self.pooling = pooling
        self.stride = stride
        self.threshold = threshold
        self.contrast_floor = contrast_floor
        self._check_counts("num_atoms", "patch_size", "pooling", "stride")
        if not (threshold >= 0.0 and contrast_floor > 0.0):
            raise ValueError(
                "`threshold` must be at least zero and `contrast_floor` above it. Received: "
                f"threshold={threshold}, contrast_floor={contrast_floor}."
            )

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
        self._pool = _pooling_matrix(rows, columns, self.pooling)
        self._add_fixed("filters", (self.patch_size**2 * channels, self.num_atoms), None)
        self._add_fixed("offsets", (self.num_atoms,))
        super().build(input_shape)

    def call(self, inputs: Any) -> Any:
        """Returns the pooled responses."""
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
        sides = [ops.relu(responses - self.threshold), ops.relu(-responses - self.threshold)]
        pool = ops.transpose(ops.convert_to_tensor(self._pool))
        pooled = ops.matmul(pool, ops.concatenate(sides, axis=-1))
        return ops.reshape(pooled, (-1, self._num_outputs))

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the features."""
        return (input_shape[0], self._num_outputs)

    @property
    def _num_outputs(self) -> int:
        return int(2 * self.num_atoms * self.pooling**2)


@keras.saving.register_keras_serializable(package="tf_labeldp")
class FourierFeatures(FixedLayer):
    """``[cos(x W), sin(x W)] / sqrt(D / 2)``: rows of unit norm whose products are a kernel.

    If the columns of ``W`` are drawn from a normal distribution of variance ``1 / bandwidth**2``,
    the product of two rows is an unbiased estimate of ``exp(-|x - y|^2 / (2 bandwidth^2))``.

    Set the weights with ``set_weights([frequencies])``; they are not trained.

    Args:
        num_features: D, even.
        linear_weight: number in [0, 1). Above zero, the input itself, scaled to unit norm, is
            appended: the kernel is ``(1 - linear_weight)`` of the above and ``linear_weight`` of
            the cosine of the angle between the inputs.
        **kwargs: as in ``keras.layers.Layer``.

    Call arguments:
        inputs: (batch, p).

    Returns:
        ``float32`` (batch, D), or (batch, D + p) with a linear part.

    Raises:
        ValueError: ``num_features`` is odd or not positive, or ``linear_weight`` not in [0, 1).

    Example:
        >>> layer = FourierFeatures(8)
        >>> rows = np.asarray(layer(np.ones((2, 3), "float32")))
        >>> rows.shape, np.linalg.norm(rows, axis=1).round(5).tolist()
        ((2, 8), [1.0, 1.0])

    Source: Rahimi and Recht, "Random features for large-scale kernel machines" (2007).
    """

    arguments = ("num_features", "linear_weight")

    def __init__(self, num_features: int, linear_weight: float = 0.0, **kwargs: Any) -> None:
        """See the class."""
        super().__init__(**kwargs)
        if num_features < 2 or num_features % 2:
            raise ValueError(
                "`num_features` must be even and positive: cosines and sines come in pairs. "
                f"Received: num_features={num_features}."
            )
        if not 0.0 <= linear_weight < 1.0:
            raise ValueError(
                f"`linear_weight` must be in [0, 1). Received: linear_weight={linear_weight}."
            )
        self.num_features = num_features
        self.linear_weight = linear_weight

    def build(self, input_shape: Any) -> None:
        """Makes the weights."""
        shape = (int(input_shape[-1]), self.num_features // 2)
        self._add_fixed("frequencies", shape, keras.initializers.RandomNormal(1.0))
        super().build(input_shape)

    def call(self, inputs: Any) -> Any:
        """Returns the features."""
        rows = ops.cast(inputs, "float32")
        phases = ops.matmul(rows, self.frequencies)
        gain = math.sqrt(2.0 * (1.0 - self.linear_weight) / self.num_features)
        parts = [gain * ops.cos(phases), gain * ops.sin(phases)]
        if self.linear_weight:
            norms = ops.sqrt(ops.sum(ops.square(rows), axis=-1, keepdims=True))
            parts.append(math.sqrt(self.linear_weight) * rows / ops.maximum(norms, 1e-12))
        return ops.concatenate(parts, axis=-1)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the features."""
        return (input_shape[0], self.num_features + (input_shape[-1] if self.linear_weight else 0))


@keras.saving.register_keras_serializable(package="tf_labeldp")
class NeighbourFeatures(CarriesReceipts, FixedLayer):
    """Smooths features over their nearest neighbours, as ``NeighbourSmoothing`` fits them.

    For features ``x``, let ``k`` be ``(x * scale)[:num_key_features]`` scaled to unit norm. The
    neighbours are the ``num_neighbours`` rows of the table ``keys`` with the largest products with
    ``k``, except rows equal to it. The result is
    ``strength * mean(smooth[neighbours]) + (1 - strength) * x``.

    Set the weights with ``set_weights([scale, keys, smooth])``; they are not trained. They are
    features of the examples of ``fit`` and part of a saved model, so they must be public.

    Args:
        num_rows: rows of the tables.
        num_key_features: length of a key; at most the number of features.
        num_neighbours: at most ``num_rows``.
        strength: number in [0, 1).
        **kwargs: as in ``keras.layers.Layer``.

    Call arguments:
        inputs: (batch, features).

    Returns:
        ``float32`` (batch, features).

    Raises:
        ValueError: an argument is out of range, or there are fewer features than in a key.

    Example:
        >>> layer = NeighbourFeatures(3, num_key_features=2, num_neighbours=1, strength=0.5)
        >>> _ = layer.build((None, 2))
        >>> keys = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
        >>> layer.set_weights([np.ones(2), keys, 10 * keys])
        >>> ops.convert_to_numpy(layer(np.array([[2.0, 1.0]]))).tolist()
        [[6.0, 0.5]]

    Source: the fixed point of Zhou et al., "Learning with local and global consistency" (2004).
    """

    arguments = ("num_rows", "num_key_features", "num_neighbours", "strength")

    def __init__(
        self,
        num_rows: int,
        num_key_features: int,
        num_neighbours: int = 10,
        strength: float = 0.8,
        **kwargs: Any,
    ) -> None:
        """See the class."""
        super().__init__(**kwargs)
        self.num_rows = num_rows
        self.num_key_features = num_key_features
        self.num_neighbours = num_neighbours
        self.strength = strength
        self._check_counts("num_rows", "num_key_features")
        if not 1 <= num_neighbours <= num_rows:
            raise ValueError(
                "`num_neighbours` must be in 1..num_rows. Received: "
                f"num_neighbours={num_neighbours}, num_rows={num_rows}."
            )
        if not 0.0 <= strength < 1.0:
            raise ValueError(f"`strength` must be in [0, 1). Received: strength={strength}.")

    def build(self, input_shape: Any) -> None:
        """Makes the tables."""
        width = int(input_shape[-1])
        if width < self.num_key_features:
            raise ValueError(
                f"NeighbourFeatures needs at least num_key_features={self.num_key_features} "
                f"features. Received inputs of shape {tuple(input_shape)}."
            )
        self._add_fixed("scale", (self.num_key_features,))
        self._add_fixed("keys", (self.num_rows, self.num_key_features))
        self._add_fixed("smooth", (self.num_rows, width))
        super().build(input_shape)

    def call(self, inputs: Any) -> Any:
        """Returns the smoothed features."""
        features = ops.cast(inputs, "float32")
        keys = features[:, : self.num_key_features] * self.scale
        lengths = ops.sqrt(ops.sum(ops.square(keys), axis=-1, keepdims=True))
        keys = keys / ops.where(lengths > 0.0, lengths, ops.ones_like(lengths))
        products = ops.matmul(keys, ops.transpose(self.keys))
        products = ops.where(products > _SAME, -2.0 * ops.ones_like(products), products)
        _, nearest = ops.top_k(products, self.num_neighbours, sorted=False)
        mean = ops.mean(ops.take(self.smooth, nearest, axis=0), axis=1)
        return self.strength * mean + (1.0 - self.strength) * features

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the inputs."""
        return tuple(input_shape)


@keras.saving.register_keras_serializable(package="tf_labeldp")
class NearestCentre(CarriesReceipts, FixedLayer):
    """Gives each row the outputs of its nearest centre; of equally near centres, the first.

    Distances are computed from the mean of the centres, so that a common offset of the features
    costs no precision.

    The centres and the outputs are weights that are not trained, and part of the config, so that a
    copy of the layer computes the same. A saved model holds them: they must be public or private
    already.

    Args:
        centres: finite numbers (num_centres, d).
        outputs: finite numbers (num_centres, num_outputs), what a row near that centre gets, such
            as the class probabilities of a cluster.
        **kwargs: as in ``keras.layers.Layer``.

    Call arguments:
        inputs: (batch, d).

    Returns:
        ``float32`` (batch, num_outputs).

    Raises:
        ValueError: the centres or the outputs are not finite or of a wrong shape, or the rows have
            another width than the centres.

    Example:
        >>> layer = NearestCentre([[0.0, 0.0], [4.0, 4.0]], outputs=[[1.0, 0.0], [0.0, 1.0]])
        >>> ops.convert_to_numpy(layer(np.array([[3.0, 5.0], [1.0, 0.0]]))).tolist()
        [[0.0, 1.0], [1.0, 0.0]]

    Source: the model of Algorithm 2 of ``tang2022``, with k-means for its clusters.
    """

    def __init__(self, centres: Any, outputs: Any, **kwargs: Any) -> None:
        """See the class."""
        super().__init__(**kwargs)
        self._centres = _checked_table("centres", centres)
        self._outputs = _checked_table("outputs", outputs)
        if self._centres.shape[0] != self._outputs.shape[0]:
            raise ValueError(
                "`outputs` must have one row for each centre. Received: centres of shape "
                f"{self._centres.shape}, outputs of shape {self._outputs.shape}."
            )

    def build(self, input_shape: Any) -> None:
        """Makes the tables."""
        width = self._centres.shape[1]
        if len(input_shape) != 2 or input_shape[-1] != width:
            raise ValueError(
                f"NearestCentre needs rows of {width} features, as its centres have. Received "
                f"inputs of shape {tuple(input_shape)}."
            )
        offset = self._centres.mean(axis=0)
        # Rows are compared by their products with the moved centres, less half of the squares.
        moved = (self._centres - offset).astype(np.float32)
        tables = {
            "offset": offset,
            "moved_centres": moved.T,
            "half_squares": 0.5 * np.sum(np.square(moved, dtype=np.float64), axis=1),
            "outputs": self._outputs,
        }
        for name, table in tables.items():
            self._add_fixed(name, table.shape, _constant(table))
        super().build(input_shape)

    def call(self, inputs: Any) -> Any:
        """Returns the outputs of the nearest centres."""
        rows = ops.cast(inputs, "float32") - self.offset
        scores = ops.matmul(rows, self.moved_centres) - self.half_squares
        return ops.take(self.outputs, ops.argmax(scores, axis=-1), axis=0)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the outputs."""
        return (input_shape[0], self._outputs.shape[1])

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor, as nested lists."""
        tables = {"centres": self._centres.tolist(), "outputs": self._outputs.tolist()}
        return {**super().get_config(), **tables}


def _pooling_matrix(rows: int, columns: int, cells: int) -> np.ndarray:
    """Returns ``float32`` (rows * columns, cells**2): means over a grid of nearly equal cells."""
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


def _checked_table(name: str, values: Any) -> np.ndarray:
    """Returns finite numbers (rows, columns) as ``float64``."""
    table = np.asarray(values)
    if table.ndim != 2 or table.size == 0 or table.dtype.kind not in "biuf":
        raise ValueError(
            f"`{name}` must be numbers of two dimensions. Received: dtype {table.dtype}, shape "
            f"{table.shape}."
        )
    table = table.astype(np.float64)
    if not np.all(np.isfinite(table)):
        raise ValueError(f"`{name}` must be finite. Received NaN or infinity.")
    return table


def _constant(table: np.ndarray) -> Any:
    """Returns an initializer that gives a table."""
    return lambda shape, dtype=None: ops.convert_to_tensor(table, dtype=dtype)
