"""The folder of real data sets, and the loaders of `examples/demo_datasets.py`."""

import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER = Path(os.environ.get("LABELDP_DATA_DIR") or REPOSITORY.parent / "shared" / "data")
sys.path.append(str(REPOSITORY / "examples"))

import demo_datasets  # noqa: E402
from demo_datasets import ClassificationData  # noqa: E402


def load(name: str) -> ClassificationData:
    """Returns a data set by its name."""
    return demo_datasets.load(name, FOLDER)
