"""For all shapes, a label affects the loss of its own example alone."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np
import pytest
from slow_cases import with_slow

from tf_labeldp.plugins import KerasLoss

B = 5
NAMES = (
    "hinge",
    "categorical_hinge",
    "kl_divergence",
    "mean_squared_error",
    "huber",
    "cosine_similarity",
)
CLASSES = {"huber": "Huber", "kl_divergence": "KLDivergence"}
SHAPES = (((B,), (B, 1)), ((B,), (B, B)), ((B, 1), (B,)), ((B, B), (B, B, 1)), ((B, 3), (B, 3)))


def forms(name: str) -> list[Any]:
    """Returns the loss as a function, a name and an object."""
    title = CLASSES.get(name, "".join(part.title() for part in name.split("_")))
    return [getattr(keras.losses, name), name, getattr(keras.losses, title)()]


@pytest.mark.parametrize("name", with_slow(NAMES, set(NAMES) - {"kl_divergence"}))
def test_a_label_changes_its_own_row_alone(name: str) -> None:
    rng = np.random.default_rng(0)
    accepted = 0
    for loss, (y_shape, p_shape) in itertools.product(forms(name), SHAPES):
        y = rng.uniform(0.2, 0.8, y_shape).astype("f")
        p = rng.uniform(0.2, 0.8, p_shape).astype("f")
        other = y.copy()
        other[0] = 1.0 - other[0]
        function = KerasLoss(loss).of_examples()
        try:
            before, after = function(y, p).numpy(), function(other, p).numpy()
        except (ValueError, TypeError):  # refused: nothing is trained
            continue
        accepted += 1
        assert before.shape == (B,)
        np.testing.assert_array_equal(before[1:], after[1:])
    assert accepted >= 3


class Centred:
    """A custom loss that wraps a Keras loss and mixes the labels of a batch."""

    def __init__(self) -> None:
        self.fn = keras.losses.mean_squared_error

    def __call__(self, y_true: Any, y_pred: Any) -> Any:
        return self.fn(y_true - keras.ops.mean(y_true), y_pred)


def test_a_wrapper_of_a_loss_is_computed_row_by_row() -> None:
    y = np.zeros((B, 1), "f")
    other = y.copy()
    other[0] = 100.0
    loss = KerasLoss(Centred()).of_examples()
    before, after = loss(y, y).numpy(), loss(other, y).numpy()
    np.testing.assert_array_equal(before[1:], after[1:])


def test_a_loss_along_the_batch_is_refused() -> None:
    y = np.random.default_rng(0).uniform(0.2, 0.8, (B, B)).astype("f")
    loss = KerasLoss(keras.losses.CosineSimilarity(axis=0)).of_examples()
    with pytest.raises(ValueError, match="losses must be per example"):
        loss(y, y)
