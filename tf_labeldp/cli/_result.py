"""What the demo trains and what comes of it; nothing here holds a true training label."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tf_labeldp.accounting import PrivacyGuarantee
from tf_labeldp.vault import NoisyLabels

ALONE = "of what was made from the same labels, only this model and its noisy labels are published"
"""An assumption of each model's statement: the demo makes several from the same labels."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One model to train.

    Attributes:
        method: ``"non-private"``, ``"LP-1ST"`` or ``"LP-2ST"``.
        epsilon: None without privacy.
    """

    method: str
    epsilon: float | None

    @property
    def num_stages(self) -> int:
        """Number of training stages."""
        return 2 if self.method == "LP-2ST" else 1

    @property
    def title(self) -> str:
        """The job in words."""
        if self.epsilon is None:
            return f"{self.method} (NOT PRIVATE)"
        return f"{self.method}, epsilon {self.epsilon:g}"

    @property
    def name(self) -> str:
        """The job in file names."""
        if self.epsilon is None:
            return "NOT-PRIVATE"
        return f"{self.method.lower()}_epsilon-{self.epsilon!r}".removesuffix(".0")


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """A trained model.

    Attributes:
        job: what was asked.
        model: the Keras model, which returns logits.
        guarantee: infinite epsilon for the non-private model.
        noisy_labels: all that training saw of the labels; None without privacy.
        accuracy: on the test set, in [0, 1].
        test_logits: ``float32`` (m, K).
        seconds: of training and testing.
    """

    job: Job
    model: Any
    guarantee: PrivacyGuarantee
    noisy_labels: NoisyLabels | None
    accuracy: float
    test_logits: np.ndarray
    seconds: float

    @property
    def model_file(self) -> str:
        """Name of the model's file."""
        return f"model_{self.job.name}.keras"

    @property
    def noisy_labels_folder(self) -> str | None:
        """Name of the folder of noisy labels, if there are any."""
        return None if self.noisy_labels is None else f"noisy_labels_{self.job.name}"
