"""The data sets of the demo and the benchmarks, read from local files only."""

from __future__ import annotations

import dataclasses
import gzip
import os
import pathlib
import zlib

import numpy as np

from tf_labeldp.cli._errors import DatasetError

IDX_SETS = ("mnist", "fashion_mnist")
NAMES = ("digits", "adult", *IDX_SETS)

FASHION_CLASSES = (
    "T-shirt", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip

_DIGITS_TEST_SIZE = 360


@dataclasses.dataclass(frozen=True, eq=False)
class ClassificationData:
    """Features and labels of a classification task.

    Attributes:
        name: of the data set.
        x_train: ``float32`` (n, ...).
        y_train: ``int64`` (n,), in 0..K-1; sensitive.
        x_test: ``float32`` (m, ...).
        y_test: ``int64`` (m,).
        class_names: K names, in the order of the codes.
    """

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    class_names: tuple[str, ...]

    @property
    def num_classes(self) -> int:
        """Number of classes K."""
        return len(self.class_names)


def load(name: str, data_dir: str | os.PathLike[str] | None = None) -> ClassificationData:
    """Returns a data set by name.

    Args:
        name: ``"digits"`` (comes with scikit-learn), ``"adult"``, ``"mnist"``, ``"fashion_mnist"``,
            or a TFDS name such as ``"cifar10"`` or ``"titanic:4.0.0"``.
        data_dir: folder that holds the data set; not needed for ``"digits"``.

    Raises:
        DatasetError: unknown name, missing folder or files, damaged files, or a TFDS data set
            without tensorflow-datasets.
    """
    if name == "digits":
        return load_digits()
    if data_dir is None:
        raise DatasetError(
            f"--data {name} needs --data-dir DIR, the folder that holds it; only digits comes "
            "with scikit-learn"
        )
    folder = pathlib.Path(data_dir)
    if not folder.is_dir():
        raise DatasetError(
            f"--data-dir {folder} is not a folder; give the folder that holds {name}"
        )
    if _is_tfds(folder, name):
        from tf_labeldp.cli import _tfds

        return _tfds.load(name, folder)
    if name in IDX_SETS:
        return load_idx_images(name, folder)
    if name == "adult":
        from tf_labeldp.cli import _adult

        return _adult.load(folder)
    raise DatasetError(
        f"unknown data set {name!r}: it is none of {', '.join(NAMES)}, and {folder} holds no TFDS "
        "data set of this name"
    )


def load_digits() -> ClassificationData:
    """Returns scikit-learn's 1,797 handwritten digits of 8x8 pixels, scaled to [0, 1], flat.

    The split in 1,437 training and 360 test examples is fixed and does not look at labels.
    """
    from sklearn.datasets import load_digits as from_sklearn

    x, y = from_sklearn(return_X_y=True)
    return split(
        "digits",
        (x / 16.0).astype(np.float32),
        y.astype(np.int64),
        tuple(str(digit) for digit in range(10)),
        _DIGITS_TEST_SIZE,
    )


def split(
    name: str, x: np.ndarray, y: np.ndarray, class_names: tuple[str, ...], test_size: int
) -> ClassificationData:
    """Returns the data with a fixed, label-independent part of it as the test set."""
    order = np.random.default_rng(0).permutation(len(y))
    test, train = order[:test_size], order[test_size:]
    return ClassificationData(name, x[train], y[train], x[test], y[test], class_names)


def load_idx_images(name: str, data_dir: str | os.PathLike[str]) -> ClassificationData:
    """Returns MNIST or Fashion-MNIST from idx files (gzipped or not) in ``data_dir/name``.

    Pixels are scaled to [0, 1] and get a channel axis: (n, 28, 28, 1).
    """
    folder = pathlib.Path(data_dir) / name
    images, labels = {}, {}
    for part, stem in (("train", "train"), ("test", "t10k")):
        images[part] = _read_idx(folder, f"{stem}-images-idx3-ubyte", rank=3)[..., np.newaxis]
        labels[part] = _read_idx(folder, f"{stem}-labels-idx1-ubyte", rank=1).astype(np.int64)
        if len(images[part]) != len(labels[part]):
            raise DatasetError(
                f"{folder} has {len(images[part])} {part} images but {len(labels[part])} labels; "
                "copy the files again"
            )
        if labels[part].size and labels[part].max() > 9:
            raise DatasetError(f"{folder} has {part} labels above 9; the demo knows ten classes")
    names = FASHION_CLASSES if name == "fashion_mnist" else tuple(str(i) for i in range(10))
    scaled = {part: array.astype(np.float32) / 255.0 for part, array in images.items()}
    return ClassificationData(
        name, scaled["train"], labels["train"], scaled["test"], labels["test"], names
    )


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
        f"{folder / name}(.gz) does not exist; --data-dir must be the folder that holds "
        f"{folder.name}/{name}.gz"
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


def _is_tfds(folder: pathlib.Path, name: str) -> bool:
    """Returns whether the folder holds a prepared TFDS data set ``name[/config][:version]``."""
    base = folder / name.split("/")[0].split(":")[0]
    patterns = ("*/dataset_info.json", "*/*/dataset_info.json")
    return base != folder and any(any(base.glob(pattern)) for pattern in patterns)
