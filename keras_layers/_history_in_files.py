"""What puts the history of a layer into the files of the models that it is in."""

import pathlib
from collections.abc import Callable
from typing import Any

import keras

ASSET = "receipts.bin"
"""The file of a history, in the assets of a ``.keras`` file."""


class HistoryInFiles(keras.layers.Layer):
    """Writes the history of the layer that it is an attribute of into ``.keras`` files.

    Keras saves what it finds in attributes, and loads files without looking for it. It has no
    weights, and is no part of the model.

    Args:
        history: of the layer.
        write: returns the content of the file.
    """

    history: Any
    write: Callable[[], bytes]

    def __init__(self, history: Any, write: Callable[[], bytes]) -> None:
        super().__init__(name="label_dp_history", trainable=False)
        self.__dict__.update(history=history, write=write, built=True)  # past Keras's tracking

    def save_assets(self, dir_path: str) -> None:
        """Writes the name of the layer and its history."""
        (pathlib.Path(dir_path) / ASSET).write_bytes(self.write())

    def load_assets(self, dir_path: str) -> None:
        """Reads nothing: ``tf_labeldp.load_model`` does."""
