"""One small problem that the tests of heads share."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from fits import fits_apart as fits_apart


@dataclasses.dataclass(frozen=True)
class Examples:
    """Features (n, d) with a mean, and labels of each kind that they tell in part."""

    features: np.ndarray
    classes: np.ndarray
    numbers: np.ndarray

    @property
    def kinds(self):
        """By kind: a head's arguments, and labels (n,) or (n, L)."""
        return {
            "classes": ({"num_classes": 3}, self.classes),
            "binary": ({"num_classes": 2}, (self.classes > 0).astype(int)),
            "numbers": ({"low": 10.0, "high": 30.0}, np.clip(self.numbers, 10.0, 30.0)),
            "rows": ({"num_labels": 3}, np.eye(3, dtype=int)[self.classes]),
        }


@pytest.fixture(scope="session")
def examples():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(3000, 8)).astype(np.float32) + np.float32(0.2)
    scores = features @ rng.normal(size=(8, 3)) + rng.normal(size=(3000, 3))
    numbers = np.clip(20 + 8 * features[:, 0] + rng.normal(size=3000), 0, 50)
    return Examples(features, np.argmax(scores, axis=1), numbers)
