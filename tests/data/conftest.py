"""A source, a mechanism and a reader for the tests of tf.data transforms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tf_labeldp.mechanisms import RandomizedResponse

N, K = 300, 5


@pytest.fixture(scope="session")
def labels() -> np.ndarray:
    return np.random.default_rng(7).integers(0, K, N)


@pytest.fixture(scope="session")
def source(labels: np.ndarray) -> tf.data.Dataset:
    """Elements (id, label): the id identifies an example after any transform."""
    return tf.data.Dataset.from_tensor_slices((np.arange(N), labels))


@pytest.fixture(scope="session")
def mechanism() -> RandomizedResponse:
    return RandomizedResponse(epsilon=1.0, num_classes=K)


def examples(dataset: tf.data.Dataset) -> Iterator[tuple[Any, int]]:
    if dataset.element_spec[0].shape.rank == 0:  # quicker than one by one
        dataset = dataset.batch(50)
    for example_id, label, *_ in dataset.as_numpy_iterator():
        yield from zip(np.ravel(example_id).tolist(), np.ravel(label).tolist(), strict=True)


@pytest.fixture(scope="session")
def read() -> Callable[[tf.data.Dataset], dict[Any, int]]:
    """Returns {id: label} of a dataset, batched or not, in which an id always has one label."""

    def read_labels(dataset: tf.data.Dataset) -> dict[Any, int]:
        labels: dict[Any, int] = {}
        for example_id, label in examples(dataset):
            assert labels.setdefault(example_id, label) == label
        return labels

    return read_labels
