"""Layers whose weights are set once and not trained: feature maps, and a table of clusters.

``to_keras()`` of a feature map or a head checks the arguments and makes the layer.
"""

import functools
import inspect
import math
from typing import Annotated, Any

import keras
import numpy as np
from keras import ops

from ._in_files import NamesItsImport
from ._released_dense import CarriesReceipts

# A row whose product with a key exceeds this is the key itself, up to float32 rounding.
_SAME = 1.0 - 1e-6


class FixedLayer(NamesItsImport, keras.layers.Layer):
    """Computes in float32 under any dtype policy; constructor arguments are attributes."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "autocast": False, "trainable": False})

    def _add_fixed(
        self, name: str, shape: tuple[int, ...], initializer: Any = "zeros", dtype: str = "float32"
    ) -> None:
        # Without autocast=False here, half-precision policies would cast the weights.
        weight = self.add_weight(
            shape=shape,
            initializer=initializer,
            name=name,
            dtype=dtype,
            autocast=False,
            trainable=False,
        )
        setattr(self, name, weight)

    def compute_output_spec(self, inputs: Any) -> Any:
        return keras.KerasTensor(self.compute_output_shape(inputs.shape), dtype="float32")

    def get_config(self) -> dict[str, Any]:
        _, *arguments, _ = inspect.signature(type(self).__init__).parameters  # self and kwargs
        return {**super().get_config(), **{name: getattr(self, name) for name in arguments}}


@keras.saving.register_keras_serializable(package="tf_labeldp")
class PatchFeatures(FixedLayer):
    """The features of a ``PatchDictionary``: pooled two-sided responses of normalised patches.

    Each patch ``p`` of ``patch_size`` x ``patch_size`` pixels (all channels together) is centred
    and divided by ``sqrt(var(p) + contrast_floor)``. With filters ``f_k`` and offsets ``b_k`` its
    responses are ``r_k = f_k . p - b_k``; ``max(0, r_k - threshold)`` and
    ``max(0, -r_k - threshold)`` are averaged over each of ``pooling`` x ``pooling`` cells.

    Takes images (batch, height, width[, channels]) of any numeric dtype and of known size; returns
    ``float32`` (batch, 2 * num_atoms * pooling**2), cell by cell: the positive sides of all
    filters, then the negative sides. Set the weights by ``set_weights([filters, offsets])``.

    Example:
        >>> layer = PatchFeatures(num_atoms=3, patch_size=2, pooling=2)
        >>> layer(np.zeros((5, 8, 8))).shape
        TensorShape([5, 24])

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
        **kwargs: Annotated[Any, "setting"],
    ) -> None:
        super().__init__(**kwargs)
        self.num_atoms = num_atoms
        self.patch_size = patch_size
        self.pooling = pooling
        self.stride = stride
        self.threshold = threshold
        self.contrast_floor = contrast_floor

    def build(self, input_shape: Any) -> None:
        channels = 1 if len(input_shape) == 3 else int(input_shape[3])
        rows, columns = (
            _cell_means((int(size) - self.patch_size) // self.stride + 1, self.pooling)
            for size in input_shape[1:3]
        )
        # Shape (positions of the patch, cells).
        self._pool = np.kron(rows, columns).astype("float32")
        self._add_fixed("filters", (self.patch_size**2 * channels, self.num_atoms), None)
        self._add_fixed("offsets", (self.num_atoms,))
        super().build(input_shape)

    def call(self, inputs: Any) -> Any:
        images = ops.cast(inputs, "float32")
        if len(images.shape) == 3:
            images = ops.expand_dims(images, -1)
        # With a convolution the variance would be E[p^2] - E[p]^2, which loses precision in float32
        # for patches of low contrast.
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
        return (input_shape[0], self._num_outputs)

    @property
    def _num_outputs(self) -> int:
        return int(2 * self.num_atoms * self.pooling**2)


@keras.saving.register_keras_serializable(package="tf_labeldp")
class FourierFeatures(FixedLayer):
    """``[cos(x W), sin(x W)] / sqrt(D / 2)``: rows of unit norm whose products estimate a kernel.

    If the columns of ``W`` are drawn from a normal distribution of variance ``1 / bandwidth**2``,
    the product of two rows is an unbiased estimate of ``exp(-|x - y|^2 / (2 bandwidth^2))``. With a
    ``linear_weight`` w in (0, 1) the input, scaled to unit norm, is appended: the kernel becomes w
    times the cosine of the inputs' angle plus ``1 - w`` times the above.

    Takes (batch, p); returns ``float32`` (batch, D) for an even ``num_features`` D, or
    (batch, D + p) with a linear part, of which ``num_linear`` keeps the first columns alone. Set
    the weights by ``set_weights([frequencies])``.

    Example:
        >>> rows = FourierFeatures(num_features=8)(np.zeros((5, 3)))
        >>> rows.shape, float(ops.norm(rows[0]))
        (TensorShape([5, 8]), 1.0)

    Source: Rahimi and Recht, "Random features for large-scale kernel machines" (2007).
    """

    def __init__(
        self,
        num_features: int,
        linear_weight: float = 0.0,
        num_linear: int | None = None,
        **kwargs: Annotated[Any, "setting"],
    ) -> None:
        super().__init__(**kwargs)
        self.num_features = num_features
        self.linear_weight = linear_weight
        self.num_linear = num_linear

    def build(self, input_shape: Any) -> None:
        shape = (int(input_shape[-1]), self.num_features // 2)
        self._add_fixed("frequencies", shape, keras.initializers.RandomNormal(1.0))
        super().build(input_shape)

    def call(self, inputs: Any) -> Any:
        rows = ops.cast(inputs, "float32")
        phases = ops.matmul(rows, self.frequencies)
        gain = math.sqrt(2.0 * (1.0 - self.linear_weight) / self.num_features)
        parts = [gain * ops.cos(phases), gain * ops.sin(phases)]
        if self.linear_weight:
            rows = rows[:, : self.num_linear]
            norms = ops.sqrt(ops.sum(ops.square(rows), axis=-1, keepdims=True))
            parts.append(math.sqrt(self.linear_weight) * rows / ops.maximum(norms, 1e-12))
        return ops.concatenate(parts, axis=-1)

    def compute_output_shape(self, input_shape: Any) -> Any:
        linear = self.num_linear or input_shape[-1]
        return (input_shape[0], self.num_features + (linear if self.linear_weight else 0))


@keras.saving.register_keras_serializable(package="tf_labeldp")
class QuantileRanks(FixedLayer):
    """Ranks of numbers, piecewise linear between the knots of their column, constant beyond them.

    Takes (batch, p); returns ``float32`` (batch, p). Set the weights by ``set_weights([knots,
    heights])``, ascending values and their ranks (p, q); the last may be repeated.
    """

    def __init__(self, num_knots: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_knots = num_knots

    def build(self, input_shape: Any) -> None:
        for name in ("knots", "heights"):
            self._add_fixed(name, (int(input_shape[-1]), self.num_knots))
        super().build(input_shape)

    def call(self, inputs: Any) -> Any:
        numbers = ops.expand_dims(ops.cast(inputs, "float32"), -1)
        lower, upper = self.knots[:, :-1], self.knots[:, 1:]
        passed = ops.clip((numbers - lower) / ops.maximum(upper - lower, 1e-30), 0.0, 1.0)
        rises = self.heights[:, 1:] - self.heights[:, :-1]
        return self.heights[:, 0] + ops.sum(rises * passed, axis=-1)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape


@keras.saving.register_keras_serializable(package="tf_labeldp")
class NeighbourFeatures(CarriesReceipts, FixedLayer):
    """Smooths features over their nearest neighbours, as a fitted ``NeighbourSmoothing`` does.

    For features ``x``, let ``k`` be ``(x * scale)[:num_key_features]`` scaled to unit norm. The
    neighbours are the ``num_neighbours`` rows of the table ``keys`` with the largest products with
    ``k``, except rows equal to ``k``. The result is
    ``strength * mean(smooth[neighbours]) + (1 - strength) * x``.

    Takes and returns (batch, features). Set the weights by ``set_weights([scale, keys, smooth])``.
    They are features of the examples of ``fit`` and part of a saved model, so they must be public.

    Example:
        >>> layer = NeighbourFeatures(num_rows=4, num_key_features=3, num_neighbours=2)
        >>> layer(np.ones((5, 3))).shape
        TensorShape([5, 3])

    Source: the fixed point of Zhou et al., "Learning with local and global consistency" (2004).
    """

    def __init__(
        self,
        num_rows: int,
        num_key_features: int,
        num_neighbours: int = 10,
        strength: float = 0.8,
        **kwargs: Annotated[Any, "setting"],
    ) -> None:
        super().__init__(**kwargs)
        self.num_rows = num_rows
        self.num_key_features = num_key_features
        self.num_neighbours = num_neighbours
        self.strength = strength

    def build(self, input_shape: Any) -> None:
        self._add_fixed("scale", (self.num_key_features,))
        self._add_fixed("keys", (self.num_rows, self.num_key_features))
        self._add_fixed("smooth", (self.num_rows, int(input_shape[-1])))
        super().build(input_shape)

    def call(self, inputs: Any) -> Any:
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
        return tuple(input_shape)


@keras.saving.register_keras_serializable(package="tf_labeldp")
class NearestCentre(CarriesReceipts, FixedLayer):
    """Maps each row to the outputs of its nearest centre, the first one in a tie.

    Takes (batch, d); returns ``float32`` (batch, num_outputs). The ``centres`` (num_centres, d) and
    ``outputs`` (num_centres, num_outputs), such as the class probabilities of clusters, are weights
    and part of the config, so that a copy computes the same. A saved model contains them, so they
    must be public or already private.

    Source: the model of Algorithm 2 of ``tang2022``, with k-means for its clusters.
    """

    def __init__(self, centres: Any, outputs: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._centres = np.asarray(centres, np.float64)
        self._outputs = np.asarray(outputs, np.float64)
        self.input_spec = keras.layers.InputSpec(ndim=2, axes={-1: self._centres.shape[1]})

    def build(self, input_shape: Any) -> None:
        offset = self._centres.mean(axis=0)
        # A score is the product with a centre minus half its square. Both are relative to the mean
        # of the centres, so that a common offset costs no precision.
        moved = (self._centres - offset).astype(np.float32)
        tables = {
            "offset": offset,
            "moved_centres": moved.T,
            "half_squares": 0.5 * np.sum(np.square(moved, dtype=np.float64), axis=1),
            "outputs": self._outputs,
        }
        for name, table in tables.items():
            self._add_fixed(name, table.shape, functools.partial(_constant, table))
        super().build(input_shape)

    def call(self, inputs: Any) -> Any:
        rows = ops.cast(inputs, "float32") - self.offset
        scores = ops.matmul(rows, self.moved_centres) - self.half_squares
        return ops.take(self.outputs, ops.argmax(scores, axis=-1), axis=0)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return (input_shape[0], self._outputs.shape[1])

    def get_config(self) -> dict[str, Any]:
        tables = {"centres": self._centres.tolist(), "outputs": self._outputs.tolist()}
        return {**keras.layers.Layer.get_config(self), **tables}


def _cell_means(size: int, cells: int) -> np.ndarray:
    """Returns ``float64`` (size, cells): means over nearly equal cells of a line."""
    edges = np.arange(cells + 1) * size // cells
    cell_of = np.searchsorted(edges, np.arange(size), side="right") - 1
    one_hot = (cell_of[:, np.newaxis] == np.arange(cells)).astype("float64")
    return one_hot / one_hot.sum(axis=0)


def _constant(table: np.ndarray, shape: Any, dtype: Any = None) -> Any:
    return ops.convert_to_tensor(table, dtype=dtype)
