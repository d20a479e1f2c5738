"""Receipts of private labels in the files of layers and models."""

import pathlib
import sys
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

ASSET = "receipts.bin"
"""The file of a history, in the assets of a ``.keras`` file."""
_RECEIPTS = "label_dp_receipts"
"""The name of receipts in files of weights."""


class CarriesReceipts:
    """Keeps the receipts of the private labels behind the weights of a layer.

    They travel in ``.keras`` and ``.weights.h5`` files and in ``tf.train.Checkpoint``, not in the
    config. Here they are plain bytes; ``tf_labeldp.guarantee`` reads them.
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
        if values or content is None:  # a model of layers has no weights of its own
            super().load_own_variables(values)  # type: ignore[misc]

    def written_receipts(self) -> bytes:
        return self.label_dp_receipts

    def read_receipts(self, content: bytes, *, of_checkpoint: bool = False) -> None:
        """Takes the receipts of a file; a checkpoint restores optimizers too."""
        del of_checkpoint
        self.label_dp_receipts = content


def _in_checkpoints(layer: CarriesReceipts) -> Any:
    owner = weakref.ref(layer)
    tf: Any = sys.modules["tensorflow"]  # the backend has loaded it

    class ReceiptsInCheckpoints(tf.train.experimental.PythonState):  # type: ignore[misc]
        """Writes the receipts into ``tf.train.Checkpoint``, and reads them from there."""

        def serialize(self) -> bytes:
            """Returns the receipts; nothing for a SavedModel, which becomes no Keras model."""
            alive = owner()
            return alive.written_receipts() if tf.executing_eagerly() and alive is not None else b""

        def deserialize(self, content: bytes) -> None:
            alive = owner()
            if alive is not None and content:
                alive.read_receipts(content, of_checkpoint=True)

    return ReceiptsInCheckpoints()


class HistoryInFiles(keras.layers.Layer):
    """Writes the history of the layer that it is an attribute of into ``.keras`` files.

    Keras saves layers that it finds in attributes, and loads files without looking for them. This
    one has no weights, and is no part of the model. ``write`` returns the content of the file.
    """

    history: Any
    write: Callable[[], bytes]

    def __init__(self, history: Any, write: Callable[[], bytes]) -> None:
        super().__init__(name="label_dp_history", trainable=False)
        self.__dict__.update(history=history, write=write, built=True)  # past Keras's tracking

    def save_assets(self, dir_path: str) -> None:
        (pathlib.Path(dir_path) / ASSET).write_bytes(self.write())

    def load_assets(self, dir_path: str) -> None:
        """Reads nothing: ``tf_labeldp.load_model`` does."""


@keras.saving.register_keras_serializable(package="tf_labeldp")
class ReleasedDense(CarriesReceipts, keras.layers.Dense):
    """A ``keras.layers.Dense`` with the weights of a released head, and receipts in its files.

    A model that is built on it in another program still counts the budget of its labels.
    """
