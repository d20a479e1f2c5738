"""Noisy labels as targets of a learner."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, TypeGuard

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._columns import Column
from tf_labeldp.accounting import PublicInput, public_input
from tf_labeldp.estimation import likelihoods
from tf_labeldp.features import denoise_labels
from tf_labeldp.features.reader import FeatureRows
from tf_labeldp.mechanisms import ALIBI, ClassificationMechanism, Priors
from tf_labeldp.vault import Classes, NoisyLabels
from tf_labeldp.vault.counted_steps import CountedSteps
from tf_labeldp.vault.model_history import TrainedModel

_LEAST_SPREAD = 0.1
"""Where likelihoods are flatter, as of randomized response of ten classes below epsilon 0.75, the
network learns the noisy labels as they are: through the channel it believes its first errors."""


@dataclasses.dataclass(frozen=True)
class Targets:
    """Noisy labels as targets of a learner.

    Attributes:
        rows: labelled examples, ``int64`` (m,).
        targets: class probabilities, or likelihoods that sum to one, ``float32`` (m, K).
        weights: ``float32`` (m,).
        noisy: the ``NoisyLabels``; None for an array.
        public: the noisy labels and all other public inputs, with their receipts.
        is_counted: whether the labels carry receipts.
        likelihoods: of the noisy label of every image, ones without a label, ``float32`` (n, K);
            None for other targets.
    """

    rows: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    noisy: NoisyLabels | None
    public: PublicInput[Any] = PublicInput(None)  # noqa: RUF009
    is_counted: bool = False
    likelihoods: np.ndarray | None = None

    @property
    def classes(self) -> np.ndarray:
        """The most likely class of each target."""
        return self.targets.argmax(axis=1)

    @property
    def class_shares(self) -> np.ndarray:
        """The class shares (K,) that the labels estimate; zero for a class without a target."""
        shares = self.targets.mean(axis=0)
        if _has_channel(self.noisy):
            shares = self.noisy.posterior().mean(axis=0) * (shares > 0)
        return shares / shares.sum()

    def training(self, model: Any) -> Any:
        """Returns a context for training; without receipts of labels its steps stay unknown."""
        if self.is_counted:
            return CountedSteps.throughout(model, self.public.receipts)
        TrainedModel(model).attach(self.public.receipts)
        return contextlib.nullcontext()


def class_shares(priors: Any, num_classes: int) -> list[float] | None:
    """Returns the prior of all examples as a list for configurations; None for None."""
    if priors is None:
        return None
    shares = Priors.of(priors).probabilities
    return _validate.prior_rows("priors", shares, 1, num_classes)[0].tolist()


def read_targets(
    labels: Any, public: PublicInput[Any], num_rows: int, classes: Classes, kind: str
) -> Targets:
    """Returns the labelled examples, their targets and weights.

    ``public`` has the images, the clusters and the sample weights.
    """
    images, clusters, sample_weight = public.value
    label_input = public_input(labels)
    labels, public = label_input.value, public_input(label_input, public)
    noisy = labels if isinstance(labels, NoisyLabels) else None
    rows = np.arange(num_rows) if noisy is None else noisy.indices
    array = np.asarray(labels) if noisy is not None else Column.of(labels).complete("labels")
    spread = 0.0
    if kind == "likelihoods" and clusters is None and _has_channel(noisy):
        array, spread = _likelihoods_of(noisy, array)
    elif noisy is not None and (kind == "posterior" or array.ndim == 2):
        array = noisy.posterior()
    _check_examples(noisy, rows, array, num_rows)
    if noisy is not None:
        FeatureRows(images).check_draw(noisy, rows)
    if clusters is not None:
        if array.ndim != 1 or len(rows) != num_rows:
            raise ValueError(
                f"clusters= needs one noisy class per image, got targets of shape {array.shape}. "
                "Use targets='values' and labels for all images."
            )
        kept = denoise_labels(array, clusters, classes.num_classes).labelled
        rows, array = rows[kept], array[kept]
    weights = Column.weights(sample_weight, num_rows, np.float32)
    weights = (np.ones(num_rows, np.float32) if weights is None else weights)[rows]
    used = (weights > 0) & (array >= 0 if array.ndim == 1 else True)
    rows, weights = rows[used], weights[used]
    targets = _probabilities(array[used], classes)
    _check_classes(targets, clusters)
    of_all = None
    if spread:
        of_all = np.ones((num_rows, classes.num_classes), np.float32)
        of_all[rows] = targets
        # Flat likelihoods have small gradients. This makes them as large as those of true labels.
        weights = weights / np.float32(spread)
    # Receipts of priors alone do not cover a draw.
    is_counted = bool(label_input.receipts if noisy is None else noisy.receipts)
    return Targets(rows, targets, weights, noisy, public, is_counted, of_all)


def _check_examples(
    noisy: NoisyLabels | None, rows: np.ndarray, array: np.ndarray, num_rows: int
) -> None:
    """Raises unless labels (m, ...) are classes or rows of the examples that ``rows`` names."""
    if noisy is not None and noisy.receipts and num_rows == noisy.receipts[-1].labels.size:
        # Refuses all images with the labels of a part, which counts its examples from 0.
        noisy.rows_among({(num_rows,)})
    if array.shape[:1] != rows.shape or rows.max(initial=-1) >= num_rows:
        raise ValueError(
            f"expected one label per image, got {num_rows} images and labels of shape "
            f"{array.shape}. Use -1 for an image without, or the NoisyLabels of these images."
        )
    if noisy is not None and noisy.are_sets and array.ndim == 1:
        raise ValueError(
            f"expected noisy labels that are classes, got those of "
            f"{type(noisy.mechanism).__name__}. Draw RandomizedResponse, or give FixMatch no "
            "clusters and no compiled loss."
        )


def _likelihoods_of(noisy: NoisyLabels, array: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns likelihoods that sum to one, and their spread; classes and zero if they are flat.

    Noisy labels that are no classes keep their likelihoods.
    """
    found = likelihoods(noisy.mechanism, noisy.values, noisy.priors)
    found = found / found.sum(axis=1, keepdims=True)
    spread = _spread(found)
    if spread >= _LEAST_SPREAD or noisy.are_sets:
        return found, spread
    return found.argmax(axis=1) if array.ndim == 2 else array, 0.0


def _probabilities(array: np.ndarray, classes: Classes) -> np.ndarray:
    """Returns classes (m,) or rows that sum to one as checked rows, ``float32`` (m, K)."""
    num_classes = classes.num_classes
    if array.ndim == 1:
        codes = _validate.class_indices("labels", array, num_classes)
        return np.eye(num_classes, dtype=np.float32)[codes]
    if array.shape[1:] != (num_classes,):
        raise ValueError(
            f"labels must be classes (n,) or probabilities (n, {num_classes}), got shape "
            f"{array.shape}. Flatten a column of classes with labels.ravel(), and give the network "
            "an output per class."
        )
    if np.any(array < 0) or np.any(np.abs(array.sum(axis=1) - 1) > 1e-3):
        raise ValueError(
            "rows of targets must be probabilities that sum to one. For signed weights train a "
            "plain model with keras_layers.LabelWeightedLoss."
        )
    return array.astype(np.float32)


def _check_classes(targets: np.ndarray, clusters: Any) -> None:
    """Raises if a class has no target, or warns if its clusters have another class."""
    num_classes = targets.shape[1]
    missing = np.flatnonzero(targets.sum(axis=0) == 0)
    if not len(targets) or (missing.size and clusters is None):
        raise ValueError(
            f"expected labelled examples of all {num_classes} classes, got {len(targets)} without "
            f"classes {missing.tolist()}. Use more labels."
        )
    if missing.size:
        number = np.unique(getattr(clusters, "assignments", clusters)).size
        _validate.warn(
            f"expected a cluster of every class, got {number} clusters without the classes "
            f"{missing.tolist()}, which the model will hardly predict. Use more clusters than "
            f"classes, for example find_clusters(images, {10 * num_classes})."
        )


def _has_channel(noisy: NoisyLabels | None) -> TypeGuard[NoisyLabels]:
    """Returns whether the likelihoods and the posteriors of the classes are known."""
    return noisy is not None and isinstance(noisy.mechanism, (ALIBI, ClassificationMechanism))


def _spread(likelihoods: np.ndarray) -> float:
    """Returns how far rows that sum to one are from equal ones, in units of one-hot rows.

    For randomized response: the probability of a kept label less that of another class.
    """
    equal = 1.0 / likelihoods.shape[1]
    return float(np.sqrt(np.square(likelihoods - equal).sum(axis=1).mean() / (1.0 - equal)))
