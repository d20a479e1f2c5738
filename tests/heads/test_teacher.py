"""Targets from a head's probabilities: what is kept, batches, views, and that a student learns."""

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
def test_all_are_kept_without_a_threshold():
    made = teacher_labels(P)
    assert made.indices.tolist() == list(range(6)) and made.share == 1.0
    assert made.targets.dtype == np.float32
    np.testing.assert_allclose(made.targets, P, rtol=1e-6)


def test_confidence_keeps_those_that_pass_it():
    made = teacher_labels(P, confidence=0.75, least_share=0.0)
    assert made.indices.tolist() == [0, 3, 4]
    assert made.share == pytest.approx(0.5)
    np.testing.assert_allclose(made.targets, P[[0, 3, 4]], rtol=1e-6)


@pytest.mark.parametrize(
    ("least_share", "kept"),
    [(0.0, []), (0.1, [0, 2, 3]), (0.5, [0, 2, 3, 4])],
)
def test_of_each_predicted_class_the_surest_stay(least_share, kept):
    made = teacher_labels(P, confidence=0.99, least_share=least_share)
    assert made.indices.tolist() == kept
    assert made.targets.shape == (len(kept), 3)
    assert made.share == pytest.approx(len(kept) / 6)


def test_hard_targets_are_one_hot():
    made = teacher_labels(P, hard=True, confidence=0.7)
    assert made.indices.tolist() == [0, 2, 3, 4, 5]
    assert made.targets.tolist() == np.eye(3)[[0, 2, 1, 0, 0]].tolist()


def test_every_epoch_shows_every_kept_example_with_its_target():
    made = teacher_labels(P, confidence=0.65)
    inputs = np.arange(6, dtype=np.float32)[:, np.newaxis] * 10
    batches = made.batches(inputs, batch_size=2, seed=1)
    epochs = []
    for _ in range(2):
        parts = [batches[i] for i in range(len(batches))]
        x, y = (np.concatenate(both) for both in zip(*parts, strict=True))
        np.testing.assert_allclose(y, P[(x[:, 0] / 10).astype(int)], rtol=1e-6)
        epochs.append(x[:, 0].tolist())
        batches.on_epoch_end()
        assert sorted(epochs[-1]) == [0, 20, 30, 40, 50]
    assert len(batches) == 3
    assert epochs[0] != epochs[1]  # of 120 orders


def test_views_of_an_example_differ_and_share_its_target():
    rng = np.random.default_rng(3)
    made = teacher_labels(P)
    inputs = np.arange(6, dtype=np.float32)[:, np.newaxis] * 10
    batches = made.batches(
        inputs, 3, views=4, augment=lambda x: x + rng.uniform(size=x.shape), seed=2
    )
    for x, y in (batches[0], batches[1]):
        assert x.shape == (12, 1) and y.shape == (12, 3)
        np.testing.assert_allclose(y, P[(x[:, 0] / 10).astype(int)], rtol=1e-6)
        assert np.unique(x).size == 12
        assert np.unique(x // 10).size == 3


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
        ({"confidence": 1.0}, ValueError, "confidence"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        teacher_labels(**{"probabilities": P, **arguments})


def test_bad_batches():
    made = teacher_labels(P)
    with pytest.raises(ValueError, match="expected more than 5 inputs, got 5"):
        made.batches(np.zeros((5, 1)), 2)
