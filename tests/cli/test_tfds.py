"""Data sets of TensorFlow Datasets: with a stand-in for the library, and with the library."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tf_labeldp.cli import _datasets
from tf_labeldp.cli._console import DatasetError


class ClassLabel:
    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.num_classes = len(names)


Splits = dict[str, dict[str, Any]]


def library(splits: Splits, features: dict[str, Any], keys: Any = None) -> SimpleNamespace:
    """Gives a stand-in for tensorflow_datasets that holds one data set."""
    info = SimpleNamespace(features=features, supervised_keys=keys)

    def load(name: str, *, data_dir: str, download: bool, **options: Any) -> Any:
        assert not download
        assert options == {"batch_size": -1, "with_info": True}
        return {key: dict(value) for key, value in splits.items()}, info

    return SimpleNamespace(
        load=load, as_numpy=lambda value: value, features=SimpleNamespace(ClassLabel=ClassLabel)
    )


def load_toy(
    monkeypatch: pytest.MonkeyPatch, folder: Path, stand_in: SimpleNamespace
) -> _datasets.ClassificationData:
    (folder / "toy" / "1.0.0").mkdir(parents=True)
    (folder / "toy" / "1.0.0" / "dataset_info.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", stand_in)
    return _datasets.load("toy", folder)


LABEL = ClassLabel(["no", "yes"])


@pytest.mark.parametrize(("side", "shape"), [(10, (10, 10, 1)), (9, (81,))])
def test_images(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, side: int, shape: tuple[int, ...]
) -> None:
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


def test_nested_columns_without_a_test_split(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    n = 10
    columns = {"age": np.arange(n), "job": np.array([b"a", b"b"] * 5), "pair": np.ones((n, 2))}
    splits: Splits = {"train": {"features": columns, "label": np.arange(n) % 2}}
    data = load_toy(monkeypatch, tmp_path, library(splits, {"label": LABEL}))
    assert data.x_train.shape == (8, 1 + 2 + 2) and data.x_test.shape == (2, 5)
    # Each row keeps its label: job b is odd.
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
def test_unfit_data_sets_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, split: str, features: dict, reason: str
) -> None:
    splits: Splits = {split: {"x": np.ones(3), "label": np.array([0, -1, 1])}}
    with pytest.raises(DatasetError, match=reason):
        load_toy(monkeypatch, tmp_path, library(splits, features))


def test_an_error_of_the_library_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def load(*arguments: Any, **options: Any) -> None:
        raise AssertionError("Dataset toy: could not find data.\nPlease download it.")

    with pytest.raises(DatasetError, match=r"TFDS cannot read toy in .*: Dataset toy: could not"):
        load_toy(monkeypatch, tmp_path, SimpleNamespace(load=load))


def test_the_library_itself(tmp_path: Path) -> None:
    tfds = pytest.importorskip("tensorflow_datasets")

    class Toy(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> Any:
            columns = {
                "age": np.float32,
                "job": tfds.features.Text(),
                "label": tfds.features.ClassLabel(names=["no", "yes"]),
            }
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(columns))

        def _split_generators(self, download_manager: Any) -> Any:
            return {"train": self._generate_examples(), "test": self._generate_examples()}

        def _generate_examples(self) -> Any:
            for i in range(20):
                yield i, {"age": i, "job": "ab"[i % 2], "label": i % 2}

    Toy(data_dir=str(tmp_path)).download_and_prepare()
    data = _datasets.load("toy", tmp_path)
    assert data.x_train.shape == (20, 3) and data.x_test.shape == (20, 3)
    np.testing.assert_array_equal(data.x_train[:, 2], data.y_train)
    with pytest.raises(DatasetError, match="TFDS cannot read"):
        _datasets.load("toy:2.0.0", tmp_path)
