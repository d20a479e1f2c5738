"""The loaders, on small files made here and on the real ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tf_labeldp.cli import _datasets
from tf_labeldp.cli._console import DatasetError


def test_digits() -> None:
    data = _datasets.load("digits")
    assert data.x_train.shape == (1437, 64) and data.x_test.shape == (360, 64)
    assert data.x_train.dtype == np.float32 and data.y_train.dtype == np.int64
    assert data.x_train.min() == 0.0 and data.x_train.max() == 1.0
    assert sorted(set(data.y_train.tolist())) == list(range(data.num_classes))


def test_a_split_is_fixed_keeps_pairs_and_loses_nothing() -> None:
    x, y = np.arange(20.0)[:, np.newaxis], np.arange(20)
    data = _datasets.split("toy", x, y, ("a",), test_size=5)
    again = _datasets.split("toy", x, y[::-1], ("a",), test_size=5)
    assert (len(data.y_train), len(data.y_test)) == (15, 5)
    assert sorted([*data.y_train, *data.y_test]) == list(range(20))
    np.testing.assert_array_equal(data.x_train[:, 0], data.y_train)
    np.testing.assert_array_equal(again.x_train, data.x_train)  # other labels, same split


def test_idx_files_gzipped_or_not(idx_folder: Path) -> None:
    data = _datasets.load("mnist", idx_folder)
    assert data.x_train.shape == (6, 3, 2, 1) and data.x_test.shape == (4, 3, 2, 1)
    np.testing.assert_allclose(data.x_train.ravel(), np.arange(36) / 255.0, rtol=1e-6)
    assert data.y_train.tolist() == [0, 1, 2, 3, 4, 5]
    assert data.num_classes == 10


@pytest.mark.parametrize("damage", ["cut", "longer", "rank", "empty", "gzip"])
def test_damaged_idx_files_are_refused(idx_folder: Path, damage: str) -> None:
    labels = idx_folder / "mnist" / "train-labels-idx1-ubyte"
    content = labels.read_bytes()
    damaged = {
        "cut": content[:-1],
        "longer": content + b"\0",
        "rank": content[:3] + b"\3" + content[4:],
        "empty": b"",
        "gzip": b"",
    }[damage]
    if damage == "gzip":
        labels = labels.with_name("train-images-idx3-ubyte.gz")
        damaged = labels.read_bytes()[:-9]
    labels.write_bytes(damaged)
    with pytest.raises(DatasetError, match=r"train-(images|labels).*copy it again"):
        _datasets.load("mnist", idx_folder)


def test_images_without_labels_are_refused(idx_folder: Path) -> None:
    train = idx_folder / "mnist" / "train-labels-idx1-ubyte"
    train.write_bytes(train.with_name("t10k-labels-idx1-ubyte").read_bytes())
    with pytest.raises(DatasetError, match="6 train images but 4 labels"):
        _datasets.load("mnist", idx_folder)


def test_labels_of_other_classes_are_refused(idx_folder: Path) -> None:
    labels = idx_folder / "mnist" / "t10k-labels-idx1-ubyte"
    labels.write_bytes(labels.read_bytes()[:-1] + b"\x0a")
    with pytest.raises(DatasetError, match="test labels above 9"):
        _datasets.load("mnist", idx_folder)


def test_adult(adult_folder: Path) -> None:
    data = _datasets.load("adult", adult_folder)
    assert data.class_names == ("<=50K", ">50K")
    assert data.y_train.tolist() == [0, 1, 0, 1]
    assert data.y_test.tolist() == [1, 0]
    # 6 numbers; workclass (Private, ?) and sex have 2 categories, the 6 others 1.
    assert data.x_train.shape == (4, 6 + 4 + 6) and data.x_train.dtype == np.float32
    age = np.array([20, 30, 40, 50])
    np.testing.assert_allclose(data.x_train[:, 0], (age - 35) / age.std(), rtol=1e-6)
    # '?' is a category of its own; one that training lacks is all zeros.
    np.testing.assert_array_equal(data.x_train[:, 1:3], [[0, 1], [1, 0], [0, 1], [1, 0]])
    np.testing.assert_array_equal(data.x_test[:, 1:3], [[1, 0], [0, 0]])


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (">50K", "rich", "a number or a label"),
        ("20,", "old,", "a number or a label"),
        (", Divorced", "", "15 columns"),
    ],
)
def test_damaged_adult_files_are_refused(
    adult_folder: Path, old: str, new: str, reason: str
) -> None:
    packed = adult_folder / "adult" / "adult.data.gz"
    text = _datasets.read_file(adult_folder / "adult", "adult.data").decode()
    packed.unlink()
    packed.with_suffix("").write_text(text.replace(old, new, 1))
    with pytest.raises(DatasetError, match=reason):
        _datasets.load_adult(adult_folder)


def test_scales_and_categories_come_from_training_alone() -> None:
    train = {"size": np.array([1.0, 3.0]), "kind": np.array(["a", "b"])}
    test = {"size": np.array([100.0]), "kind": np.array(["c"])}
    x_train, x_test = _datasets.encode(train, test)
    np.testing.assert_allclose(x_train, [[-1, 1, 0], [1, 0, 1]])
    np.testing.assert_allclose(x_test, [[98, 0, 0]])


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "train", "test", "classes", "positive"),
    [
        ("mnist", (60000, 28, 28, 1), (10000, 28, 28, 1), 10, None),
        ("fashion_mnist", (60000, 28, 28, 1), (10000, 28, 28, 1), 10, None),
        ("adult", (32561, 108), (16281, 108), 2, 7841),
    ],
)
def test_the_real_files(
    data_dir: Path,
    name: str,
    train: tuple[int, ...],
    test: tuple[int, ...],
    classes: int,
    positive: int | None,
) -> None:
    data = _datasets.load(name, data_dir)
    assert data.x_train.shape == train and data.x_test.shape == test
    assert data.num_classes == classes
    assert np.bincount(data.y_train, minlength=classes).min() > 0
    if positive is None:
        assert data.x_train.min() == 0.0 and data.x_train.max() == 1.0
    else:
        assert data.y_train.sum() == positive
        assert abs(data.x_train[:, 0].mean()) < 1e-4  # age, standardised
