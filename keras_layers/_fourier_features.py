"""Random Fourier features: cosines and sines of random projections."""

import math
from typing import Any

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="tf_labeldp")
class FourierFeatures(keras.layers.Layer):
    """`[cos(x W), sin(x W)] / sqrt(D / 2)`: rows of unit norm whose products are a kernel.

    With the columns of `W` drawn from a normal law of variance `1 / bandwidth**2`, the product of
    two rows estimates `exp(-|x - y|^2 / (2 bandwidth^2))` without bias.

    The weights are set by `set_weights([frequencies])` and are not trained.

    Args:
        num_features: Int D, even.
        linear_weight: Float in [0, 1). Above zero, the input itself, scaled to unit norm, is
            appended: the kernel is `(1 - linear_weight)` of the above and `linear_weight` of the
            cosine of the angle between the inputs.
        **kwargs: As in `keras.layers.Layer`.

    Call arguments:
        inputs: `(batch, p)`, computed in float32 whatever the dtype policy.

    Returns:
        `float32` `(batch, D)`, or `(batch, D + p)` with a linear part.

    Raises:
        ValueError: If `num_features` is odd or not positive, or `linear_weight` not in [0, 1).

    Example:
        >>> import numpy as np
        >>> layer = FourierFeatures(8)
        >>> rows = np.asarray(layer(np.ones((2, 3), "float32")))
        >>> rows.shape, np.linalg.norm(rows, axis=1).round(5).tolist()
        ((2, 8), [1.0, 1.0])

    Source: Rahimi and Recht, "Random features for large-scale kernel machines" (2007).
    """

    def __init__(self, num_features: int, linear_weight: float = 0.0, **kwargs: Any) -> None:
        """See the class."""
        super().__init__(autocast=False, trainable=False, **kwargs)
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
        # A layer that does not cast its inputs still has its weights cast, unless they say so too.
        self.frequencies = self.add_weight(
            shape=(int(input_shape[-1]), self.num_features // 2),
            initializer=keras.initializers.RandomNormal(1.0),
            name="frequencies",
            dtype="float32",
            autocast=False,
            trainable=False,
        )
        super().build(input_shape)

    def call(self, inputs: Any) -> Any:
        """The features."""
        rows = ops.cast(inputs, "float32")
        phases = ops.matmul(rows, self.frequencies)
        gain = math.sqrt(2.0 * (1.0 - self.linear_weight) / self.num_features)
        parts = [gain * ops.cos(phases), gain * ops.sin(phases)]
        if self.linear_weight:
            norms = ops.sqrt(ops.sum(ops.square(rows), axis=-1, keepdims=True))
            parts.append(math.sqrt(self.linear_weight) * rows / ops.maximum(norms, 1e-12))
        return ops.concatenate(parts, axis=-1)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """The shape of the features."""
        return (input_shape[0], self.num_features + (input_shape[-1] if self.linear_weight else 0))

    def compute_output_spec(self, inputs: Any) -> Any:
        """The shape and the dtype of the features."""
        return keras.KerasTensor(self.compute_output_shape(inputs.shape), dtype="float32")

    def get_config(self) -> dict[str, Any]:
        """Every constructor argument."""
        return {
            **super().get_config(),
            "num_features": self.num_features,
            "linear_weight": self.linear_weight,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "FourierFeatures":
        """The layer of a config."""
        return cls(**{name: value for name, value in config.items() if name != "trainable"})
