"""Where the labels of clustered examples come from: an array, or a vault that is charged."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.mechanisms._grouped_priors import GroupedPriors
from tf_labeldp.mechanisms._histogram import HistogramMechanism
from tf_labeldp.mechanisms._prior_resampling import PriorResampling
from tf_labeldp.mechanisms._random import checked_generator

_MOST_CELLS = 1 << 31
"""Of the table of counts: 16 GiB; cluster numbers beyond are hashes or ids, not numbers."""


class PlainLabels:
    """Labels of a caller who keeps the account."""

    def __init__(self, labels: Any, num_classes: int, rng: Any) -> None:
        self._rng = None if rng is None else checked_generator(rng)
        self._labels = _validate.class_indices("labels", labels, num_classes)
        self.size, self.num_classes = self._labels.size, num_classes

    def release(
        self, histogram: HistogramMechanism, clusters: np.ndarray, draw: PriorResampling | None
    ) -> np.ndarray:
        """Returns the noisy counts (C, K); ``draw`` is what comes after them."""
        return histogram.release(self._labels, clusters, rng=self._rng)

    def randomize(
        self, draw: PriorResampling, priors: GroupedPriors
    ) -> tuple[PriorResampling, np.ndarray]:
        """Returns the mechanism of the draw, and noisy labels (n,)."""
        return draw, draw.randomize(self._labels, priors, rng=self._rng)

    def sampling_rng(self, distributions: np.ndarray) -> np.random.Generator | None:
        """Returns the generator for draws that use no label."""
        return self._rng


class VaultLabels:
    """Labels in a vault, which is charged for both parts before either is made."""

    def __init__(self, vault: Any, key: Any, rng: Any) -> None:
        if not isinstance(key, str):
            raise TypeError(f"key must be a name for the draws, a str, got {type(key).__name__}.")
        if rng is not None:
            raise ValueError(
                "rng is for plain labels; a vault has its own random bits. Leave rng=None, and "
                "give PrivateLabels a seed for a repeatable run."
            )
        self._vault, self._key = vault, key
        self.size, self.num_classes = len(vault), vault.num_classes

    def release(
        self, histogram: HistogramMechanism, clusters: np.ndarray, draw: PriorResampling | None
    ) -> np.ndarray:
        """Returns the noisy counts (C, K), if the budget has room for ``draw`` after them."""
        key = f"{self._key}/distributions"
        if not self._vault.has_draw(key):
            drawn = draw is None or self._vault.has_draw(self._key)
            self._vault.check_budget([histogram] if drawn else [histogram, draw])
        return self._vault.release(histogram, public_input=clusters, key=key)

    def randomize(
        self, draw: PriorResampling, priors: GroupedPriors
    ) -> tuple[PriorResampling, np.ndarray]:
        """Returns the mechanism of the draw, the stored one if there is one, and labels (n,)."""
        if self._vault.has_draw(self._key):
            # Another machine may round the price of a stored draw another way.
            stored = self._vault.mechanism(self._key)
            if isinstance(stored, PriorResampling):
                same = dataclasses.replace(stored, epsilon=draw.epsilon) == draw
                if same and math.isclose(stored.epsilon, draw.epsilon, rel_tol=1e-9):
                    draw = stored
        return draw, self._vault.randomize(draw, priors=priors, key=self._key)

    def sampling_rng(self, distributions: np.ndarray) -> np.random.Generator:
        """Returns a generator that depends on what was released alone, so that runs repeat."""
        digest = hashlib.sha256(self._key.encode() + distributions.tobytes()).digest()
        return np.random.default_rng(int.from_bytes(digest, "big"))


def checked_clusters(clusters: Any, size: int, num_classes: int) -> np.ndarray:
    """Returns public cluster numbers as ``int64`` (n,), or raises."""
    array = np.asarray(getattr(clusters, "assignments", clusters))
    if size == 0:
        raise ValueError("there are no labels to randomize.")
    if array.shape != (size,):
        raise ValueError(
            f"clusters must have shape ({size},), the cluster of each label, got {array.shape}."
        )
    numbers = _validate.group_numbers("clusters", array)
    if int(array.max()) >= _MOST_CELLS // num_classes:
        raise ValueError(
            f"clusters must be numbered 0..C-1, got {int(array.max())}: a table of so many rows "
            "would not fit. Number them with np.unique(clusters, return_inverse=True)[1]."
        )
    return numbers
