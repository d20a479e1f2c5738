"""A table that is looked up by the nearest centre: clusters as a layer."""

from typing import Any

import keras
import numpy as np
from keras import ops

from ._released_dense import CarriesReceipts


@keras.saving.register_keras_serializable(package="tf_labeldp")
class NearestCentre(CarriesReceipts, keras.layers.Layer):
    """Gives each row the outputs of the centre that is nearest to it.

    Of equally near centres the first counts. Distances are computed in float32 whatever the dtype
    policy, from the mean of the centres, so that an offset of all features does not blur them.

    The centres and the outputs are weights that are not trained. They are also in the config, so
    that a copy of the layer computes the same; a saved model holds them, so they must be public or
    private already.

    Args:
        centres: Numbers `(num_centres, d)`, finite.
        outputs: Numbers `(num_centres, num_outputs)`, finite: what a row near that centre gets, for
            example the class probabilities of a cluster.
        **kwargs: As in `keras.layers.Layer`.

    Call arguments:
        inputs: `(batch, d)`.

    Returns:
        `float32` `(batch, num_outputs)`.

    Raises:
        ValueError: If the centres or the outputs are not finite or of a wrong shape, or the layer
            is built for rows of another width.

    Example:
        >>> layer = NearestCentre([[0.0, 0.0], [4.0, 4.0]], outputs=[[1.0, 0.0], [0.0, 1.0]])
        >>> ops.convert_to_numpy(layer(np.array([[3.0, 5.0], [1.0, 0.0]]))).tolist()
        [[0.0, 1.0], [1.0, 0.0]]

    Source: the model of Algorithm 2 of `tang2022`, with k-means for its clusters.
    """

    def __init__(self, centres: Any, outputs: Any, **kwargs: Any) -> None:
        """See the class."""
        super().__init__(autocast=False, trainable=False, **kwargs)
        self._centres = _table("centres", centres)
        self._outputs = _table("outputs", outputs)
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
        half_squares = 0.5 * np.sum(np.square(moved, dtype=np.float64), axis=1)
        tables = {
            "offset": offset,
            "moved_centres": moved.T,
            "half_squares": half_squares,
            "outputs": self._outputs,
        }
        for name, table in tables.items():
            weight = self.add_weight(
                shape=table.shape,
                initializer=_constant(table),
                name=name,
                dtype="float32",
                autocast=False,
                trainable=False,
            )
            setattr(self, name, weight)
        super().build(input_shape)

    def call(self, inputs: Any) -> Any:
        """The outputs of the nearest centres."""
        rows = ops.cast(inputs, "float32") - self.offset
        scores = ops.matmul(rows, self.moved_centres) - self.half_squares
        return ops.take(self.outputs, ops.argmax(scores, axis=-1), axis=0)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """The shape of the outputs."""
        return (input_shape[0], self._outputs.shape[1])

    def compute_output_spec(self, inputs: Any) -> Any:
        """The shape and the dtype of the outputs."""
        return keras.KerasTensor(self.compute_output_shape(inputs.shape), dtype="float32")

    def get_config(self) -> dict[str, Any]:
        """Every constructor argument."""
        return {
            **super().get_config(),
            "centres": self._centres.tolist(),
            "outputs": self._outputs.tolist(),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "NearestCentre":
        """The layer of a config."""
        return cls(**{name: value for name, value in config.items() if name != "trainable"})


def _table(name: str, values: Any) -> np.ndarray:
    """Numbers `(rows, columns)` as `float64`."""
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
    """An initializer that gives a table."""

    def initialize(shape: Any, dtype: Any = None) -> Any:
        return ops.convert_to_tensor(table, dtype=dtype)

    return initialize
