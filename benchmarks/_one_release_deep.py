"""Deep models for ``bench_one_release.py``: students of a head, and training on noisy labels."""

from __future__ import annotations

from typing import Any

import _datasets
import _models
import keras
import numpy as np

import tf_labeldp as ldp
from tf_labeldp.heads import HeadPriorRandomizer, PrivateLogisticRegression, teacher_labels

STAGE_EPOCHS, STAGE_RATE, STAGE_BATCH = 5, 3e-3, 256
EPOCHS, RATE, BATCH, SHIFT = 8, 2e-3, 128, 1


def stages_logits(
    data: _datasets.ClassificationData, epsilon: float, seed: int, *, two_stages: bool
) -> np.ndarray:
    """Trains on randomized labels (LP-2ST, or plain randomized response); returns test logits.

    Images have the CNN of ``ghazi2024``, Table 10(a), tables a perceptron of 64 units. The first
    of two stages has 60 % of the labels. Neither mixup nor filter, which did best in
    ``bench_lp_mst.py``.
    """
    keras.utils.set_random_seed(seed)
    model = _models.model_for(data.x_train.shape[1:], data.num_classes)
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(STAGE_RATE), loss=loss)
    stages = ldp.MultiStageTraining(
        data.x_train,
        _vault(data, ldp.PrivacyBudget(epsilon), seed),
        epsilon=epsilon,
        fractions=(0.6, 0.4) if two_stages else (1.0,),
        epochs_per_stage=STAGE_EPOCHS,
        batch_size=STAGE_BATCH,
        temperature=1.0,
        filter_labels=False,
        seed=seed,
        verbose=0,
    )
    model.fit(stages.dataset(), epochs=stages.epochs, callbacks=[stages], verbose=0, shuffle=False)
    return model.predict(data.x_test, batch_size=1000, verbose=0)


def targets(
    data: _datasets.ClassificationData, features: np.ndarray, epsilon: float, seed: int, draw: bool
) -> np.ndarray:
    """Returns soft targets (n, K) for a student.

    They are the probabilities of a head with the whole epsilon; or with ``draw`` the posteriors of
    labels from RRWithPrior with a head's priors, at ``HeadPriorRandomizer``'s split of epsilon.
    """
    delta = 1.0 / len(data.y_train)
    labels = _vault(data, ldp.PrivacyBudget(epsilon, delta), seed)
    if draw:
        noisy = labels.randomize(HeadPriorRandomizer(epsilon, delta), features=features)
        return noisy.posterior()
    return PrivateLogisticRegression(epsilon, delta).fit(features, labels).predict_proba(features)


def student_logits(data: _datasets.ClassificationData, soft: np.ndarray, seed: int) -> np.ndarray:
    """Trains a student on soft targets of all training examples; returns test logits.

    Images have a CNN of two strided convolutions (16 and 32 channels) and 64 units, with shifts of
    up to a pixel and mirrored clothes; tables a perceptron of 64 units. 8 epochs, Adam with a
    cosine schedule.
    """
    keras.utils.set_random_seed(seed)
    images = data.x_train.ndim > 2
    model = (
        _student_cnn(data.num_classes)
        if images
        else _models.model_for(data.x_train.shape[1:], data.num_classes)
    )
    steps = -(-len(soft) // BATCH)
    rate = keras.optimizers.schedules.CosineDecay(
        0.1 * RATE, EPOCHS * steps - steps // 2, warmup_target=RATE, warmup_steps=steps // 2
    )
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss=loss)
    flip = data.name == "fashion_mnist"
    augment = _Augment(np.random.default_rng(seed), flip) if images else None
    batches = teacher_labels(soft).batches(data.x_train, BATCH, augment=augment, seed=seed)
    model.fit(batches, epochs=EPOCHS, verbose=0)
    logits = model.predict(data.x_test, batch_size=1000, verbose=0)
    if images and flip:
        logits = logits + model.predict(data.x_test[:, :, ::-1], batch_size=1000, verbose=0)
    return logits


class _Augment:
    """Shifts images by up to ``SHIFT`` pixels, and mirrors half of them with ``flip``."""

    def __init__(self, rng: np.random.Generator, flip: bool) -> None:
        self._rng, self._flip = rng, flip

    def __call__(self, images: np.ndarray) -> np.ndarray:
        n, height, width, _ = images.shape
        padded = np.pad(images, ((0, 0), (SHIFT, SHIFT), (SHIFT, SHIFT), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(1, 2))
        down, right = self._rng.integers(0, 2 * SHIFT + 1, (2, n))
        moved = windows[np.arange(n), down, right].transpose(0, 2, 3, 1)
        if self._flip:
            mirrored = self._rng.random(n) < 0.5
            moved[mirrored] = moved[mirrored][:, :, ::-1]
        return np.ascontiguousarray(moved)


def _student_cnn(num_classes: int) -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(16, 5, strides=2, padding="same", activation="relu"),
            layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(num_classes),
        ]
    )


def _vault(data: _datasets.ClassificationData, budget: Any, seed: int) -> ldp.PrivateLabels:
    # Seeded, so that the table is reproducible; such draws protect nobody.
    return ldp.PrivateLabels(data.y_train, data.num_classes, budget=budget, insecure_seed=seed)
