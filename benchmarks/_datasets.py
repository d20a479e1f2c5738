"""The folder of real data sets, and the loaders of `examples/demo_datasets.py`."""

import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER = Path(os.environ.get("LABELDP_DATA_DIR") or REPOSITORY.parent / "shared" / "data")
sys.path.append(str(REPOSITORY / "examples"))

import demo_datasets  # noqa: E402
import numpy as np  # noqa: E402
from demo_datasets import ClassificationData  # noqa: E402


def load(name: str) -> ClassificationData:
    """Returns a data set by its name; ``"cifar10_subset"`` has 12,000 colour images."""
    if name == "cifar10_subset":
        parts = []
        for part in ("train", "test"):
            with np.load(FOLDER / name / f"{part}.npz") as file:
                parts += [file["images"] / np.float32(255), file["labels"].astype(np.int64)]
        return ClassificationData(name, *parts, class_names=tuple(map(str, range(10))))
    return demo_datasets.load(name, FOLDER)
