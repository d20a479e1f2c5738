"""The data sets of the demo, from small files and a stand-in for TFDS."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import demo
import demo_datasets
import numpy as np
import pytest
from demo_datasets import DatasetError


def test_digits():
    data = demo_datasets.load("digits")
    assert data.x_train.shape == (1437, 64) and data.x_test.shape == (360, 64)
    assert data.x_train.dtype == np.float32 and data.y_train.dtype == np.int64
    assert data.x_train.min() == 0.0 and data.x_train.max() == 1.0
    assert sorted(set(data.y_train.tolist())) == list(range(data.num_classes))


def test_a_split_is_fixed_keeps_pairs_and_loses_nothing():
    x, y = np.arange(20.0)[:, np.newaxis], np.arange(20)
    data = demo_datasets.split("toy", x, y, ("a",), test_size=5)
    again = demo_datasets.split("toy", x, y[::-1], ("a",), test_size=5)
    assert (len(data.y_train), len(data.y_test)) == (15, 5)
    assert sorted([*data.y_train, *data.y_test]) == list(range(20))
    np.testing.assert_array_equal(data.x_train[:, 0], data.y_train)
    # The split does not depend on the labels.
    np.testing.assert_array_equal(again.x_train, data.x_train)


def test_idx_files_gzipped_or_not(idx_folder):
    data = demo_datasets.load("mnist", idx_folder)
    assert data.x_train.shape == (6, 3, 2, 1) and data.x_test.shape == (4, 3, 2, 1)
    np.testing.assert_allclose(data.x_train.ravel(), np.arange(36) / 255.0, rtol=1e-6)
    assert data.y_train.tolist() == [0, 1, 2, 3, 4, 5]
    assert data.num_classes == 10


def test_damaged_idx_files_are_refused(idx_folder):
    folder = idx_folder / "mnist"
    labels, images = folder / "train-labels-idx1-ubyte", folder / "train-images-idx3-ubyte.gz"
    test, content = folder / "t10k-labels-idx1-ubyte", labels.read_bytes()
    broken = r"train-(images|labels).*copy it again"
    for path, damaged, reason in (
        (labels, content[:-1], broken),
        (labels, content + b"\0", broken),
        (labels, content[:3] + b"\3" + content[4:], broken),
        (labels, b"", broken),
        (images, images.read_bytes()[:-9], broken),
        (labels, test.read_bytes(), "6 train images but 4 labels"),
        (test, test.read_bytes()[:-1] + b"\x0a", "test labels above 9"),
    ):
        whole = path.read_bytes()
        path.write_bytes(damaged)
        with pytest.raises(DatasetError, match=reason):
            demo_datasets.load("mnist", idx_folder)
        path.write_bytes(whole)


def test_adult(adult_folder):
    data = demo_datasets.load("adult", adult_folder)
    assert data.class_names == ("<=50K", ">50K")
    assert data.y_train.tolist() == [0, 1, 0, 1]
    assert data.y_test.tolist() == [1, 0]
    # 6 numbers; workclass (Private, ?) and sex have 2 categories, the 6 others 1.
    assert data.x_train.shape == (4, 6 + 4 + 6) and data.x_train.dtype == np.float32
    age = np.array([20, 30, 40, 50])
    np.testing.assert_allclose(data.x_train[:, 0], (age - 35) / age.std(), rtol=1e-6)
    # '?' is a category; a category that training lacks is all zeros.
    np.testing.assert_array_equal(data.x_train[:, 1:3], [[0, 1], [1, 0], [0, 1], [1, 0]])
    np.testing.assert_array_equal(data.x_test[:, 1:3], [[1, 0], [0, 0]])


def test_damaged_adult_files_are_refused(adult_folder):
    packed = adult_folder / "adult" / "adult.data.gz"
    text = demo_datasets.read_file(adult_folder / "adult", "adult.data").decode()
    packed.unlink()
    for old, new, reason in (
        (">50K", "rich", "malformed number or label"),
        ("20,", "old,", "malformed number or label"),
        (", Divorced", "", "15 columns"),
    ):
        packed.with_suffix("").write_text(text.replace(old, new, 1))
        with pytest.raises(DatasetError, match=reason):
            demo_datasets.load_adult(adult_folder)


def test_scales_and_categories_come_from_training_alone():
    train = {"size": np.array([1.0, 3.0]), "kind": np.array(["a", "b"])}
    test = {"size": np.array([100.0]), "kind": np.array(["c"])}
    x_train, x_test = demo_datasets.encode(train, test)
    np.testing.assert_allclose(x_train, [[-1, 1, 0], [1, 0, 1]])
    np.testing.assert_allclose(x_test, [[98, 0, 0]])


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "train", "test", "classes", "positive"),
    [
        ("mnist", (60000, 28, 28, 1), (10000, 28, 28, 1), 10, None),
        ("fashion_mnist", (60000, 28, 28, 1), (10000, 28, 28, 1), 10, None),
        ("adult", (32561, 108), (16281, 108), 2, 7841),
    ],
)
def test_the_real_files(data_dir, name, train, test, classes, positive):
    data = demo_datasets.load(name, data_dir)
    assert data.x_train.shape == train and data.x_test.shape == test
    assert data.num_classes == classes
    assert np.bincount(data.y_train, minlength=classes).min() > 0
    if positive is None:
        assert data.x_train.min() == 0.0 and data.x_train.max() == 1.0
    else:
        assert data.y_train.sum() == positive
        assert abs(data.x_train[:, 0].mean()) < 1e-4  # age, standardised


class ClassLabel:
    def __init__(self, names):
        self.names = names
        self.num_classes = len(names)


Splits = dict[str, dict[str, Any]]


def library(splits, features, keys=None):
    """Returns a stand-in for tensorflow_datasets with one data set."""
    info = SimpleNamespace(features=features, supervised_keys=keys)

    def load(name, *, data_dir, download, **options):
        assert not download
        assert options == {"batch_size": -1, "with_info": True}
        return {key: dict(value) for key, value in splits.items()}, info

    return SimpleNamespace(
        load=load, as_numpy=lambda value: value, features=SimpleNamespace(ClassLabel=ClassLabel)
    )


def load_toy(monkeypatch, folder, stand_in):
    (folder / "toy" / "1.0.0").mkdir(parents=True)
    (folder / "toy" / "1.0.0" / "dataset_info.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", stand_in)
    return demo_datasets.load("toy", folder)


LABEL = ClassLabel(["no", "yes"])


@pytest.mark.parametrize(("side", "shape"), [(10, (10, 10, 1)), (9, (81,))])
def test_images(monkeypatch, tmp_path, side, shape):
    images = np.full((4, side, side, 1), 51, np.uint8)
    splits: Splits = {
        "train": {"image": images, "id": np.arange(4), "target": np.array([0, 1, 1, 0])},
        "test": {"image": images[:2], "id": np.arange(2), "target": np.array([1, 0])},
    }
    stand_in = library(splits, {"target": LABEL}, ("image", "target"))
    data = load_toy(monkeypatch, tmp_path, stand_in)
    assert data.x_train.shape == (4, *shape) and data.x_test.shape == (2, *shape)
    np.testing.assert_allclose(data.x_train, 0.2)
    assert data.y_train.tolist() == [0, 1, 1, 0] and data.y_test.tolist() == [1, 0]
    assert data.class_names == ("no", "yes")


def test_nested_columns_without_a_test_split(monkeypatch, tmp_path):
    n = 10
    columns = {"age": np.arange(n), "job": np.array([b"a", b"b"] * 5), "pair": np.ones((n, 2))}
    splits: Splits = {"train": {"features": columns, "label": np.arange(n) % 2}}
    data = load_toy(monkeypatch, tmp_path, library(splits, {"label": LABEL}))
    assert data.x_train.shape == (8, 1 + 2 + 2) and data.x_test.shape == (2, 5)
    # Each row keeps its label: job b has the odd labels.
    np.testing.assert_array_equal(data.x_train[:, 2], data.y_train)


@pytest.mark.parametrize(
    ("split", "features", "reason"),
    [
        ("test", {"label": LABEL}, "no split 'train'"),
        ("train", {"label": "a number"}, "no class label under 'label'"),
        ("train", {}, "no class label under 'label'"),
        ("train", {"label": LABEL}, "examples without a label"),
    ],
)
def test_unfit_data_sets_are_refused(monkeypatch, tmp_path, split, features, reason):
    splits: Splits = {split: {"x": np.ones(3), "label": np.array([0, -1, 1])}}
    with pytest.raises(DatasetError, match=reason):
        load_toy(monkeypatch, tmp_path, library(splits, features))


def test_an_error_of_tfds_becomes_one_line(monkeypatch, tmp_path):
    def load(*arguments, **options):
        raise AssertionError("Dataset toy: could not find data.\nPlease download it.")

    with pytest.raises(DatasetError, match=r"TFDS cannot read toy in .*: Dataset toy: could not"):
        load_toy(monkeypatch, tmp_path, SimpleNamespace(load=load))


def test_errors_name_missing_files_and_packages(tmp_path, monkeypatch):
    for name, file in (
        ("mnist", "train-images-idx3-ubyte"),
        ("fashion_mnist", "train-images"),
        ("adult", "adult.data"),
    ):
        with pytest.raises(DatasetError, match=rf"{tmp_path / name / file}.* does not exist"):
            demo_datasets.load(name, tmp_path)
        with pytest.raises(DatasetError, match="needs the folder that holds it"):
            demo_datasets.load(name)
        with pytest.raises(DatasetError, match="missing is not a folder"):
            demo_datasets.load(name, tmp_path / "missing")
    with pytest.raises(DatasetError, match=r"unknown data set 'cats'.* digits, adult, mnist"):
        demo_datasets.load("cats", tmp_path)
    with pytest.raises(DatasetError, match=r"pip install 'tf-labeldp\[examples\]'"):
        load_toy(monkeypatch, tmp_path, None)


def test_the_demo_reads_them(adult_folder):
    with pytest.raises(SystemExit, match="adult has too few examples"):
        demo.main(["--data", "adult", "--data-dir", str(adult_folder)])
