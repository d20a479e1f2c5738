"""Receipts of private labels in the files of layers and models."""

import pathlib
import sys
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from ._in_files import NamesItsImport

# The name of receipts in files of weights.
_RECEIPTS = "label_dp_receipts"


class CarriesReceipts(NamesItsImport):
    """Carries the receipts of the private labels that a layer's weights depend on.

    The receipts are bytes, saved in ``.keras`` and ``.weights.h5`` files and in
    ``tf.train.Checkpoint``, not in the config. ``tf_labeldp.guarantee`` reads them.
    """

    label_dp_receipts: bytes = b""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if keras.backend.backend() == "tensorflow":
            self._receipts_in_checkpoints = _in_checkpoints(self)

    def save_own_variables(self, store: Any) -> None:
        super().save_own_variables(store)  # type: ignore[misc]
        if content := self.written_receipts():
            store[_RECEIPTS] = np.frombuffer(content, np.uint8)

    def load_own_variables(self, store: Any) -> None:
        values = {name: store[name] for name in store.keys()}
        content = values.pop(_RECEIPTS, None)
        if content is not None:
            self.read_receipts(np.asarray(content, np.uint8).tobytes())
        # A model of layers has no own weights.
        if values or content is None:
            super().load_own_variables(values)  # type: ignore[misc]

    def written_receipts(self) -> bytes:
        return self.label_dp_receipts

    def read_receipts(self, content: bytes, *, of_checkpoint: bool = False) -> None:
        """Sets the receipts from a file; a checkpoint also restores optimizers."""
        del of_checkpoint
        self.label_dp_receipts = content


def _in_checkpoints(layer: CarriesReceipts) -> Any:
    owner = weakref.ref(layer)
    # The TensorFlow backend is loaded.
    tf: Any = sys.modules["tensorflow"]

    class ReceiptsInCheckpoints(tf.train.experimental.PythonState):  # type: ignore[misc]
        """Saves the receipts in ``tf.train.Checkpoint``, and restores them."""

        def serialize(self) -> bytes:
            """Returns the receipts, or nothing for a SavedModel, which is never a Keras model."""
            alive = owner()
            return alive.written_receipts() if tf.executing_eagerly() and alive is not None else b""

        def deserialize(self, content: bytes) -> None:
            alive = owner()
            if alive is not None and content:
                alive.read_receipts(content, of_checkpoint=True)

    return ReceiptsInCheckpoints()


class HistoryInFiles(keras.layers.Layer):
    """Saves the history of its owner, a layer with this layer as an attribute, in ``.keras`` files.

    Keras saves layers that it finds in attributes, and loads files without them. This layer has no
    weights and is not part of the model. ``write`` returns the content of the file ``asset``.
    """

    # The file name of a history in the assets.
    ASSET = "receipts.bin"

    history: Any
    write: Callable[[], bytes]
    asset: str

    def __init__(self, history: Any, write: Callable[[], bytes], asset: str = ASSET) -> None:
        super().__init__(name="label_dp_history", trainable=False)
        # Avoids Keras's tracking of attributes.
        self.__dict__.update(history=history, write=write, asset=asset, built=True)

    def save_assets(self, dir_path: str) -> None:
        (pathlib.Path(dir_path) / self.asset).write_bytes(self.write())

    def load_assets(self, dir_path: str) -> None:
        """Does nothing: ``tf_labeldp.load_model`` reads the file."""


@keras.saving.register_keras_serializable(package="tf_labeldp")
class WideDense(keras.layers.Dense):
    """A ``keras.layers.Dense`` whose sums are in double precision, with single weights and outputs.

    With sums in single precision a model would differ from ``predict_proba`` of its head, which
    computes in double precision, by more than 1e-6. Only TensorFlow has doubles by default.
    """

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        if keras.backend.backend() != "tensorflow" or self.compute_dtype != "float32":
            return super().call(inputs, training=training)
        product = ops.matmul(ops.cast(inputs, "float64"), ops.cast(self.kernel, "float64"))
        if self.use_bias:
            product = product + ops.cast(self.bias, "float64")
        return self.activation(ops.cast(product, "float32"))


@keras.saving.register_keras_serializable(package="tf_labeldp")
class ReleasedDense(CarriesReceipts, WideDense):
    """A ``keras.layers.Dense`` with the weights of a released head, and its receipts.

    A model that another program builds on it still counts the budget of these labels.
    """
