"""Classification data sets of TensorFlow Datasets, from a local folder; nothing is downloaded."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from tf_labeldp.cli import _datasets, _tabular
from tf_labeldp.cli._errors import DatasetError

_SMALLEST_IMAGE = 10
"""Images with a shorter side are flattened: the demo's CNN needs this many pixels."""


def load(name: str, data_dir: pathlib.Path) -> _datasets.ClassificationData:
    """Returns a TFDS data set with one class label and images or columns as features.

    Without a ``test`` split, a fixed fifth of ``train`` is the test set.
    """
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise DatasetError(
            f"--data {name} is a TFDS data set, which needs tensorflow-datasets: "
            "pip install 'tf-labeldp[examples]'"
        ) from error
    try:
        splits, info = tfds.load(
            name, data_dir=str(data_dir), download=False, batch_size=-1, with_info=True
        )
    except (AssertionError, ValueError, OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
        raise DatasetError(f"TFDS cannot read {name} in {data_dir}: {reason}") from error
    if "train" not in splits:
        raise DatasetError(f"{name} has no split 'train', but {sorted(splits)}")
    label, num_classes = _label_key(name, info, tfds)
    names = tuple(info.features[label].names or (str(i) for i in range(num_classes)))
    examples = {key: tfds.as_numpy(splits[key]) for key in ("train", "test") if key in splits}
    labels = {key: np.asarray(value.pop(label), np.int64) for key, value in examples.items()}
    features = {key: _leaves(value) for key, value in examples.items()}
    if any((codes < 0).any() for codes in labels.values()):
        raise DatasetError(f"{name} has examples without a label (-1), which the demo cannot use")

    if "image" in features["train"]:
        x = {key: _images(value["image"]) for key, value in features.items()}
    elif "test" in features:
        x_train, x_test = _tabular.encode(features["train"], features["test"])
        x = {"train": x_train, "test": x_test}
    else:
        x = {"train": _tabular.encode(features["train"], features["train"])[0]}
    if "test" not in x:
        size = max(1, len(x["train"]) // 5)
        return _datasets.split(name, x["train"], labels["train"], names, size)
    return _datasets.ClassificationData(
        name, x["train"], labels["train"], x["test"], labels["test"], names
    )


def _label_key(name: str, info: Any, tfds: Any) -> tuple[str, int]:
    """Returns the key of the label and its number of classes."""
    keys = info.supervised_keys
    key = keys[1] if keys and isinstance(keys[1], str) else "label"
    feature = info.features[key] if key in info.features else None
    if not isinstance(feature, tfds.features.ClassLabel) or (feature.num_classes or 0) < 2:
        raise DatasetError(
            f"{name} has no class label under {key!r}; the demo is for classification"
        )
    return key, feature.num_classes


def _leaves(value: Any, path: str = "") -> dict[str, np.ndarray]:
    """Returns the arrays of a nested dict by path; text as str."""
    if isinstance(value, dict):
        found: dict[str, np.ndarray] = {}
        for key in sorted(value):
            found |= _leaves(value[key], f"{path}/{key}" if path else key)
        return found
    array = np.asarray(value)
    return {path: array.astype(str) if array.dtype.kind in "OS" else array}


def _images(array: np.ndarray) -> np.ndarray:
    """Returns pixels in [0, 1]; flat where the demo's CNN does not fit."""
    scale = 255.0 if array.dtype == np.uint8 else 1.0
    scaled = array.astype(np.float32) / scale
    fits = array.ndim == 4 and min(array.shape[1:3]) >= _SMALLEST_IMAGE
    return scaled if fits else scaled.reshape(len(scaled), -1)
