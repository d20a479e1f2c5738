"""Features smoothed over their nearest neighbours in a table of public examples."""

from typing import Any

import keras
from keras import ops

from ._released_dense import CarriesReceipts

_SAME = 1.0 - 1e-6


@keras.saving.register_keras_serializable(package="tf_labeldp")
class NeighbourFeatures(CarriesReceipts, keras.layers.Layer):
    """Moves features towards the mean of their nearest neighbours', as `NeighbourSmoothing` fits.

    For features `x`, let `k = (x * scale)[:num_key_features]` over its length. The neighbours are
    the `num_neighbours` rows of the table `keys` with the largest products with `k`, without those
    equal to it, and the result is `strength * mean(smooth[neighbours]) + (1 - strength) * x`.

    The weights are set by `set_weights([scale, keys, smooth])` and are not trained. They are
    features of the examples of `fit`: a saved model holds them, so they must be public.

    Args:
        num_rows: Int, rows of the tables.
        num_key_features: Int, length of a key; at most the number of features.
        num_neighbours: Int, at most `num_rows`.
        strength: Float in [0, 1).
        **kwargs: As in `keras.layers.Layer`.

    Call arguments:
        inputs: `(batch, features)`; computed in float32 whatever the dtype policy.

    Returns:
        `float32` `(batch, features)`.

    Raises:
        ValueError: If an argument is out of its range, or the layer is built for fewer features
            than a key has.

    Example:
        >>> import numpy as np
        >>> layer = NeighbourFeatures(3, num_key_features=2, num_neighbours=1, strength=0.5)
        >>> _ = layer.build((None, 2))
        >>> keys = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
        >>> layer.set_weights([np.ones(2), keys, 10 * keys])
        >>> ops.convert_to_numpy(layer(np.array([[2.0, 1.0]]))).tolist()
        [[6.0, 0.5]]

    Source: the fixed point of Zhou et al., "Learning with local and global consistency" (2004).
    """

    def __init__(
        self,
        num_rows: int,
        num_key_features: int,
        num_neighbours: int = 10,
        strength: float = 0.8,
        **kwargs: Any,
    ) -> None:
        """See the class."""
        super().__init__(autocast=False, trainable=False, **kwargs)
        for argument, value in {"num_rows": num_rows, "num_key_features": num_key_features}.items():
            if value < 1:
                raise ValueError(f"`{argument}` must be at least 1. Received: {argument}={value}.")
        if not 1 <= num_neighbours <= num_rows:
            raise ValueError(
                "`num_neighbours` must be in 1..num_rows. Received: "
                f"num_neighbours={num_neighbours}, num_rows={num_rows}."
            )
        if not 0.0 <= strength < 1.0:
            raise ValueError(f"`strength` must be in [0, 1). Received: strength={strength}.")
        self.num_rows = num_rows
        self.num_key_features = num_key_features
        self.num_neighbours = num_neighbours
        self.strength = strength

    def build(self, input_shape: Any) -> None:
        """Makes the tables."""
        width = int(input_shape[-1])
        if width < self.num_key_features:
            raise ValueError(
                f"NeighbourFeatures needs at least num_key_features={self.num_key_features} "
                f"features. Received inputs of shape {tuple(input_shape)}."
            )
        shapes = {
            "scale": (self.num_key_features,),
            "keys": (self.num_rows, self.num_key_features),
            "smooth": (self.num_rows, width),
        }
        for name, shape in shapes.items():
            weight = self.add_weight(
                shape=shape,
                initializer="zeros",
                name=name,
                dtype="float32",
                autocast=False,
                trainable=False,
            )
            setattr(self, name, weight)
        super().build(input_shape)

    def call(self, inputs: Any) -> Any:
        """The smoothed features."""
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
        """The shape of the inputs."""
        return tuple(input_shape)

    def compute_output_spec(self, inputs: Any) -> Any:
        """The shape and the dtype of the features."""
        return keras.KerasTensor(self.compute_output_shape(inputs.shape), dtype="float32")

    def get_config(self) -> dict[str, Any]:
        """Every constructor argument."""
        return {
            **super().get_config(),
            "num_rows": self.num_rows,
            "num_key_features": self.num_key_features,
            "num_neighbours": self.num_neighbours,
            "strength": self.strength,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "NeighbourFeatures":
        """The layer of a config."""
        return cls(**{name: value for name, value in config.items() if name != "trainable"})
