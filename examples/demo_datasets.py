"""Data sets for the demo from local files: MNIST, Fashion-MNIST, Adult, or a TFDS data set.

    python examples/demo.py --data mnist --data-dir FOLDER

reads the four files FOLDER/mnist/*-ubyte.gz (or FOLDER/adult/*.gz, or a prepared TFDS data set). It
downloads nothing.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import os
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np


class DatasetError(ValueError):
    """A data set could not be read; the message is one line with the remedy."""


IDX_SETS = ("mnist", "fashion_mnist")
NAMES = ("digits", "adult", *IDX_SETS)

FASHION_CLASSES = (
    "T-shirt", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip

DIGITS = tuple(str(digit) for digit in range(10))

_DIGITS_TEST_SIZE = 360
# Numeric columns are floats, categorical columns text, with '?' (unknown) as a category.
_ADULT_COLUMNS = {
    "age": float, "workclass": str, "fnlwgt": float, "education": str, "education-num": float,
    "marital-status": str, "occupation": str, "relationship": str, "race": str, "sex": str,
    "capital-gain": float, "capital-loss": float, "hours-per-week": float, "native-country": str,
}  # fmt: skip
_ADULT_CLASSES = ("<=50K", ">50K")
_SMALLEST_IMAGE = 10
"""Pixels. Images with a shorter side are flattened, since the demo's CNN is too deep for them."""


@dataclasses.dataclass(frozen=True, eq=False)
class ClassificationData:
    """Features and labels of a classification task."""

    name: str
    x_train: np.ndarray  # float32 (n, ...)
    y_train: np.ndarray  # int64 (n,), in 0..K-1; sensitive
    x_test: np.ndarray  # float32 (m, ...)
    y_test: np.ndarray  # int64 (m,)
    class_names: tuple[str, ...]  # K names, in the order of the codes

    @property
    def num_classes(self) -> int:
        """Number of classes K."""
        return len(self.class_names)


def load(name: str, data_dir: str | os.PathLike[str] | None = None) -> ClassificationData:
    """Returns a data set by name.

    Args:
        name: ``"digits"`` (comes with scikit-learn), ``"adult"``, ``"mnist"``, ``"fashion_mnist"``,
            or a TFDS name such as ``"cifar10"`` or ``"titanic:4.0.0"``.
        data_dir: the folder of the data set; ``"digits"`` needs none.

    Raises:
        DatasetError: unknown name, missing folder or files, damaged files, or a TFDS data set
            without tensorflow-datasets.
    """
    if name == "digits":
        return load_digits()
    if data_dir is None:
        raise DatasetError(
            f"{name} needs the folder that holds it; only digits comes with scikit-learn"
        )
    folder = pathlib.Path(data_dir)
    if not folder.is_dir():
        raise DatasetError(f"{folder} is not a folder; give the folder that holds {name}")
    if _is_tfds(folder, name):
        return load_tfds(name, folder)
    if name in IDX_SETS:
        return load_idx_images(name, folder)
    if name == "adult":
        return load_adult(folder)
    raise DatasetError(
        f"unknown data set {name!r}: it is none of {', '.join(NAMES)}, and {folder} holds no TFDS "
        "data set of this name"
    )


def load_digits() -> ClassificationData:
    """Returns scikit-learn's 1,797 handwritten digits of 8x8 pixels, scaled to [0, 1], flat.

    The split into 1,437 training and 360 test examples is fixed and independent of the labels.
    """
    from sklearn.datasets import load_digits as from_sklearn

    x, y = from_sklearn(return_X_y=True)
    x = (x / 16.0).astype(np.float32)
    return split("digits", x, y.astype(np.int64), DIGITS, _DIGITS_TEST_SIZE)


def split(
    name: str, x: np.ndarray, y: np.ndarray, class_names: tuple[str, ...], test_size: int
) -> ClassificationData:
    """Returns the data with a fixed test set, chosen independently of the labels."""
    order = np.random.default_rng(0).permutation(len(y))
    test, train = order[:test_size], order[test_size:]
    return ClassificationData(name, x[train], y[train], x[test], y[test], class_names)


def load_idx_images(name: str, data_dir: str | os.PathLike[str]) -> ClassificationData:
    """Returns MNIST or Fashion-MNIST from idx files (gzipped or not) in ``data_dir/name``.

    Pixels are scaled to [0, 1] and get a channel axis: (n, 28, 28, 1).
    """
    folder = pathlib.Path(data_dir) / name
    x, y = {}, {}
    for part, stem in (("train", "train"), ("test", "t10k")):
        images = _read_idx(folder, f"{stem}-images-idx3-ubyte", rank=3)[..., np.newaxis]
        labels = _read_idx(folder, f"{stem}-labels-idx1-ubyte", rank=1).astype(np.int64)
        if len(images) != len(labels):
            raise DatasetError(
                f"{folder} has {len(images)} {part} images but {len(labels)} labels; copy the "
                "files again"
            )
        if labels.size and labels.max() > 9:
            raise DatasetError(f"{folder} has {part} labels above 9; the demo knows ten classes")
        x[part], y[part] = images.astype(np.float32) / 255.0, labels
    names = FASHION_CLASSES if name == "fashion_mnist" else DIGITS
    return ClassificationData(name, x["train"], y["train"], x["test"], y["test"], names)


def read_file(folder: pathlib.Path, name: str) -> bytes:
    """Returns the content of ``folder/name.gz``, inflated, or of ``folder/name``."""
    for path, opener in ((folder / f"{name}.gz", gzip.open), (folder / name, open)):
        if path.exists():
            try:
                with opener(path, "rb") as file:
                    return file.read()
            except (OSError, EOFError, zlib.error) as error:
                raise DatasetError(f"{path} cannot be read ({error}); copy it again") from error
    raise DatasetError(
        f"{folder / name}(.gz) does not exist; give the folder that holds {folder.name}/{name}.gz"
    )


def _read_idx(folder: pathlib.Path, stem: str, rank: int) -> np.ndarray:
    """Returns the ``uint8`` array of an idx file."""
    content = read_file(folder, stem)
    start = 4 + 4 * rank
    shape = np.frombuffer(content[4:start].ljust(4 * rank, b"\0"), ">u4").tolist()
    if content[:4] != bytes((0, 0, 8, rank)) or len(content) != start + int(np.prod(shape)):
        raise DatasetError(
            f"{folder / stem} is not an idx file of bytes of rank {rank}, or is cut short; copy it "
            "again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def load_adult(data_dir: pathlib.Path) -> ClassificationData:
    """Returns Adult from ``adult/adult.data(.gz)`` and ``adult/adult.test(.gz)``."""
    folder = data_dir / "adult"
    train, y_train = _read_adult(folder, "adult.data")
    test, y_test = _read_adult(folder, "adult.test")
    x_train, x_test = encode(train, test)
    return ClassificationData("adult", x_train, y_train, x_test, y_test, _ADULT_CLASSES)


def _read_adult(folder: pathlib.Path, name: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns the columns and the ``int64`` labels of one file."""
    text = read_file(folder, name).decode("utf-8", errors="replace")
    # The test file begins with a comment, both end with empty lines.
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("|")]
    rows = list(csv.reader(lines, skipinitialspace=True))
    width = len(_ADULT_COLUMNS) + 1
    if not rows or any(len(row) != width for row in rows):
        raise DatasetError(
            f"{folder / name} must have {width} columns in every line; copy it again"
        )
    *values, labels = zip(*rows, strict=True)
    try:
        columns = {
            column: np.array([kind(value) for value in cells])
            for (column, kind), cells in zip(_ADULT_COLUMNS.items(), values, strict=True)
        }
        codes = [_ADULT_CLASSES.index(label.rstrip(".")) for label in labels]
    except ValueError as error:
        raise DatasetError(
            f"{folder / name} has a malformed number or label; copy it again"
        ) from error
    return columns, np.array(codes, dtype=np.int64)


def encode(
    train: Mapping[str, np.ndarray], test: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns training and test features, with scales and categories taken from training."""
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    parts = []
    for name, column in train.items():
        if column.dtype.kind in "biuf":
            encoder = StandardScaler()
        else:
            encoder = OneHotEncoder(sparse_output=False, handle_unknown="ignore")
        rows, other_rows = (part.reshape(len(part), -1) for part in (column, test[name]))
        parts.append((encoder.fit_transform(rows), encoder.transform(other_rows)))
    x_train, x_test = (np.concatenate(side, axis=1) for side in zip(*parts, strict=True))
    return x_train.astype(np.float32), x_test.astype(np.float32)


def _is_tfds(folder: pathlib.Path, name: str) -> bool:
    """Returns whether the folder has a prepared TFDS data set ``name[/config][:version]``."""
    base = folder / name.split("/")[0].split(":")[0]
    patterns = ("*/dataset_info.json", "*/*/dataset_info.json")
    return base != folder and any(any(base.glob(pattern)) for pattern in patterns)


def load_tfds(name: str, data_dir: pathlib.Path) -> ClassificationData:
    """Returns a TFDS data set with one class label and images or columns as features.

    Without a ``test`` split, a fixed fifth of ``train`` is the test set.
    """
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise DatasetError(
            f"{name} is a TFDS data set, which needs tensorflow-datasets: "
            "pip install 'tf-labeldp[examples]'"
        ) from error
    try:
        splits, info = tfds.load(
            name, data_dir=str(data_dir), download=False, batch_size=-1, with_info=True
        )
    except (AssertionError, ValueError, OSError, RuntimeError) as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0]
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

    train, test = features["train"], features.get("test")
    if "image" in train:
        x = {key: _images(value["image"]) for key, value in features.items()}
    else:
        x = dict(zip(("train", "test"), encode(train, test or train), strict=True))
    if test is None:
        size = max(1, len(x["train"]) // 5)
        return split(name, x["train"], labels["train"], names, size)
    return ClassificationData(name, x["train"], labels["train"], x["test"], labels["test"], names)


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
    """Returns pixels in [0, 1], flattened if they are too few for the demo's CNN."""
    scale = 255.0 if array.dtype == np.uint8 else 1.0
    scaled = array.astype(np.float32) / scale
    fits = array.ndim == 4 and min(array.shape[1:3]) >= _SMALLEST_IMAGE
    return scaled if fits else scaled.reshape(len(scaled), -1)
