"""The loaders of `examples/demo_datasets.py`, for the benchmarks."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from demo_datasets import (  # noqa: F401
    FASHION_CLASSES,
    ClassificationData,
    DatasetError,
    encode,
    load,
    load_idx_images,
    read_file,
    split,
)
