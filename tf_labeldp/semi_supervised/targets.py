"""Noisy labels as targets of a learner."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import PublicInput, public_input
from tf_labeldp.features import denoise_labels
from tf_labeldp.mechanisms import Priors
from tf_labeldp.vault import NoisyLabels
from tf_labeldp.vault.model_history import attach, counted_training


@dataclasses.dataclass(frozen=True)
class Targets:
    """Noisy labels as targets of a learner.

    Attributes:
        rows: labelled examples, ``int64`` (m,).
        targets: class probabilities, ``float32`` (m, K).
        weights: ``float32`` (m,).
        noisy: the ``NoisyLabels``; None for an array.
        public: the noisy labels and all other public inputs, with their receipts.
        is_counted: whether the labels carry receipts.
    """

    rows: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    noisy: NoisyLabels | None
    public: PublicInput[Any] = PublicInput(None)  # noqa: RUF009
    is_counted: bool = False

    @property
    def classes(self) -> np.ndarray:
        """The most likely class of each target."""
        return self.targets.argmax(axis=1)

    def training(self, model: Any) -> Any:
        """Returns a context for training; without receipts of labels its steps stay unknown."""
        if self.is_counted:
            return counted_training(model, self.public.receipts)
        attach(model, self.public.receipts)
        return contextlib.nullcontext()


def class_shares(priors: Any, num_classes: int) -> list[float] | None:
    """Returns the prior of all examples as a list for configurations; None for None."""
    if priors is None:
        return None
    shares = Priors.of(priors).probabilities
    return _validate.prior_rows("priors", shares, 1, num_classes)[0].tolist()


def read_targets(
    labels: Any, public: PublicInput[Any], num_rows: int, num_classes: int, kind: str
) -> Targets:
    """Returns the labelled examples, their targets and weights.

    ``public`` has the images, the clusters and the sample weights.
    """
    _validate.one_of("targets", kind, ("values", "posterior"))
    _, clusters, sample_weight = public.value
    label_input = public_input(labels)
    labels, public = label_input.value, public_input(label_input, public)
    noisy = labels if isinstance(labels, NoisyLabels) else None
    rows = np.arange(num_rows) if noisy is None else noisy.indices
    array = np.asarray(labels)
    if noisy is not None and (kind == "posterior" or array.ndim == 2):
        array = noisy.posterior()
    if array.shape[:1] != rows.shape or rows.max(initial=-1) >= num_rows:
        raise ValueError(
            f"expected one label per image, got {num_rows} images and labels of shape "
            f"{array.shape}. Use -1 for an image without, or the NoisyLabels of these images."
        )
    if clusters is not None:
        if array.ndim != 1 or len(rows) != num_rows:
            raise ValueError(
                f"clusters= needs one noisy class per image, got targets of shape {array.shape}. "
                "Use targets='values' and labels for all images."
            )
        kept = denoise_labels(array, clusters, num_classes).labelled
        rows, array = rows[kept], array[kept]
    weights = np.ones(num_rows, np.float32)
    if sample_weight is not None:
        weights = np.asarray(sample_weight, np.float32)
        if weights.shape != (num_rows,) or not np.all(np.isfinite(weights)) or weights.min() < 0:
            raise ValueError(
                f"sample_weight must have shape ({num_rows},) and finite numbers of at least 0, "
                f"got shape {weights.shape}. Give one weight per image."
            )
    weights = weights[rows]
    used = (weights > 0) & (array >= 0 if array.ndim == 1 else True)
    rows, array, weights = rows[used], array[used], weights[used]
    if array.ndim == 1:
        codes = _validate.class_indices("labels", array, num_classes)
        array = np.eye(num_classes, dtype=np.float32)[codes]
    if array.shape[1:] != (num_classes,):
        raise ValueError(
            f"labels must be classes (n,) or probabilities (n, {num_classes}), got shape "
            f"{array.shape}. Flatten a column of classes with labels.ravel()."
        )
    if np.any(array < 0) or np.any(np.abs(array.sum(axis=1) - 1) > 1e-3):
        raise ValueError(
            "rows of targets must be probabilities that sum to one. For signed weights train a "
            "plain model with keras_layers.LabelWeightedLoss."
        )
    missing = np.flatnonzero(array.sum(axis=0) == 0)
    if len(array) < num_classes or missing.size:
        raise ValueError(
            f"expected labelled examples of all {num_classes} classes, got {len(array)} without "
            f"classes {missing.tolist()}. Use a weaker filter, or more labels."
        )
    targets = array.astype(np.float32)
    # Receipts of priors alone do not cover a draw.
    is_counted = bool(label_input.receipts if noisy is None else noisy.receipts)
    return Targets(rows, targets, weights, noisy, public, is_counted)
