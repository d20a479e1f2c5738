"""Small data sets in the file formats of the demo's loaders."""

from __future__ import annotations

import gzip

import numpy as np
import pytest


def idx_bytes(array):
    """Returns the idx file of an array of bytes."""
    header = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, dtype=">u4").tobytes()
    return header + array.astype(np.uint8).tobytes()


@pytest.fixture
def idx_folder(tmp_path):
    """Returns a folder with MNIST's four files: 6 and 4 images of 3x2 pixels; two are gzipped."""
    folder = tmp_path / "mnist"
    folder.mkdir()
    for stem, n in (("train", 6), ("t10k", 4)):
        images = np.arange(n * 6).reshape(n, 3, 2)
        (folder / f"{stem}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx_bytes(images)))
        (folder / f"{stem}-labels-idx1-ubyte").write_bytes(idx_bytes(np.arange(n) % 10))
    return tmp_path


ADULT_LINE = (
    "{age}, {work}, {weight}, HS-grad, 9, Divorced, Sales, Wife, White, {sex}, 0, 0, 40, ?, {y}"
)


@pytest.fixture
def adult_folder(tmp_path):
    """Returns a folder with Adult's two files, of 4 and 2 people."""
    people = [
        ("20", "Private", "Male", "<=50K"),
        ("30", "?", "Female", ">50K"),
        ("40", "Private", "Female", "<=50K"),
        ("50", "?", "Male", ">50K"),
    ]
    lines = [
        ADULT_LINE.format(age=age, work=work, weight=7, sex=sex, y=y)
        for age, work, sex, y in people
    ]
    test = [
        "|1x3 Cross validator",
        f"{lines[1]}.",
        lines[0].replace("Private", "Never-worked") + ".",
    ]
    folder = tmp_path / "adult"
    folder.mkdir()
    (folder / "adult.data.gz").write_bytes(gzip.compress(("\n".join(lines) + "\n\n").encode()))
    (folder / "adult.test.gz").write_bytes(gzip.compress(("\n".join(test) + "\n\n").encode()))
    return tmp_path
