"""Layers whose files hold the receipts of the private labels behind their weights."""

import sys
import weakref
from typing import Any

import keras
import numpy as np

RECEIPTS = "label_dp_receipts"
"""Name of the receipts in files of weights."""


class CarriesReceipts:
    """Keeps the receipts of the private labels that a layer was made of beside its weights.

    They travel in ``.keras`` and ``.weights.h5`` files and in ``tf.train.Checkpoint``, not in the
    config. Here they are plain bytes; ``tf_labeldp.guarantee`` reads them.
    """

    label_dp_receipts: bytes = b""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if keras.backend.backend() == "tensorflow":
            self._receipts_in_checkpoints = _in_checkpoints(self)

    def save_own_variables(self, store: Any) -> None:
        """Writes the receipts beside the weights."""
        super().save_own_variables(store)  # type: ignore[misc]
        content = self.written_receipts()
        if content:
            store[RECEIPTS] = np.frombuffer(content, np.uint8)

    def load_own_variables(self, store: Any) -> None:
        """Reads the weights, and the receipts where there are any."""
        values = {name: store[name] for name in store.keys()}
        content = values.pop(RECEIPTS, None)
        if content is not None:
            self.read_receipts(np.asarray(content, np.uint8).tobytes())
        if values or content is None:  # a model of layers has no weights of its own
            super().load_own_variables(values)  # type: ignore[misc]

    def written_receipts(self) -> bytes:
        """Returns the receipts as they are written into files."""
        return self.label_dp_receipts

    def read_receipts(self, content: bytes, *, of_checkpoint: bool = False) -> None:
        """Takes the receipts of a file."""
        del of_checkpoint  # which restores optimizers too
        self.label_dp_receipts = content


def _in_checkpoints(layer: CarriesReceipts) -> Any:
    """Returns what TensorFlow writes into checkpoints for a layer."""
    owner = weakref.ref(layer)
    tf: Any = sys.modules["tensorflow"]  # the backend has loaded it

    class ReceiptsInCheckpoints(tf.train.experimental.PythonState):  # type: ignore[misc]
        """Writes the receipts into ``tf.train.Checkpoint``, and reads them from there."""

        def serialize(self) -> bytes:
            """Returns the receipts."""
            alive = owner()
            eager = tf.executing_eagerly()  # or a SavedModel is written, which no model is made of
            return alive.written_receipts() if eager and alive is not None else b""

        def deserialize(self, content: bytes) -> None:
            """Takes the receipts."""
            alive = owner()
            if alive is not None and content:
                alive.read_receipts(content, of_checkpoint=True)

    return ReceiptsInCheckpoints()


@keras.saving.register_keras_serializable(package="tf_labeldp")
class ReleasedDense(CarriesReceipts, keras.layers.Dense):
    """A ``keras.layers.Dense`` with the weights of a released head, and receipts in its files.

    A model that is built on it in another program still accounts for what its labels have spent.
    """
