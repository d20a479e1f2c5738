"""Targets from a head's probabilities, and their batches."""

from __future__ import annotations

import numpy as np
import pytest

from tf_labeldp.heads import teacher_labels

P = np.array(
    [
        [0.9, 0.1, 0.0],
        [0.5, 0.3, 0.2],
        [0.2, 0.2, 0.6],
        [0.1, 0.75, 0.15],
        [0.8, 0.1, 0.1],
        [0.7, 0.2, 0.1],
    ]
)


@pytest.mark.holds("heads.teacher_labels")
def test_every_epoch_shows_every_example_with_its_target():
    made = teacher_labels(P)
    assert made.targets.dtype == np.float32
    inputs = np.arange(6, dtype=np.float32)[:, np.newaxis] * 10
    batches = made.batches(inputs, batch_size=4, seed=1)
    epochs = []
    for _ in range(2):
        parts = [batches[i] for i in range(len(batches))]
        x, y = (np.concatenate(both) for both in zip(*parts, strict=True))
        np.testing.assert_allclose(y, P[(x[:, 0] / 10).astype(int)], rtol=1e-6)
        epochs.append(x[:, 0].tolist())
        batches.on_epoch_end()
        assert sorted(epochs[-1]) == [0, 10, 20, 30, 40, 50]
    assert len(batches) == 2
    assert epochs[0] != epochs[1]  # of 720 orders


def test_keras_layers_augment_in_training_mode():
    keras = pytest.importorskip("keras")
    keras.utils.set_random_seed(4)
    made = teacher_labels(np.tile([[0.5, 0.5]], (64, 1)))
    inputs = np.broadcast_to(np.arange(4, dtype="f4")[:, None, None], (64, 4, 4, 1))
    augment = keras.Sequential([keras.layers.RandomFlip("vertical")])
    x, _ = made.batches(inputs, 64, augment=augment)[0]
    flipped = np.sum(x[:, 0, 0, 0] == 3.0)
    assert 10 <= flipped <= 54  # binomial(64, 1/2): outside with probability 1e-8
    assert np.sum(x[:, 0, 0, 0] == 0.0) == 64 - flipped


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"probabilities": P[0]}, ValueError, r"shape \(n, K\), got \(3,\)"),
        ({"probabilities": P * 2}, ValueError, "probabilities must sum to one"),
        ({"probabilities": P * np.nan}, ValueError, "probabilities must be finite"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        teacher_labels(**{"probabilities": P, **arguments})


def test_bad_batches():
    made = teacher_labels(P)
    with pytest.raises(ValueError, match="expected 6 inputs, one per row of probabilities, got 5"):
        made.batches(np.zeros((5, 1)), 2)
