"""Noisy labels for classes."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tf_labeldp import mechanisms
from tf_labeldp.cli import _randomize_task, _table_read
from tf_labeldp.mechanisms._classes import top_k_members
from tf_labeldp.vault import NoisyLabels, PrivateLabels


@dataclasses.dataclass(frozen=True, eq=False)
class Classification(_randomize_task.Task):
    """Classes 0..K-1, or named classes.

    Attributes:
        num_classes: K.
        classes: the names in the order of their codes, or None for 0..K-1.
        prior: public probabilities (K,), or None for plain randomized response.
    """

    num_classes: int
    classes: tuple[str, ...] | None = None
    prior: np.ndarray | None = None

    @property
    def kind(self) -> str:
        """Names or whole numbers."""
        return _table_read.CLASS if self.classes is None else _table_read.NAME

    @property
    def output_type(self) -> Any:
        """Names or whole numbers."""
        return pa.int64() if self.classes is None else pa.string()

    @property
    def assumption(self) -> str:
        """What is known of every label."""
        return "every label was known to be one of the classes, as the table itself shows"

    def check(self, labels: np.ndarray) -> str | None:
        """Finds labels that are none of the classes."""
        wrong = int(np.count_nonzero((labels < 0) | (labels >= self.num_classes)))
        if not wrong:
            return None
        if self.classes is None:
            return (
                f"{wrong} of {labels.size} labels are not in 0..{self.num_classes - 1}; raise "
                "--num-classes or renumber the classes"
            )
        return (
            f"{wrong} of {labels.size} labels are none of the {self.num_classes} --classes; add "
            "what is missing or check the spelling"
        )

    def encoded(self, chunk: Any) -> np.ndarray:
        """Returns ``int64`` codes, -1 for an unknown name."""
        if self.classes is not None:
            names = pa.array(self.classes, pa.string())
            chunk = pc.index_in(chunk, value_set=names).fill_null(-1).cast(pa.int64())
        return chunk.to_numpy(zero_copy_only=False)

    def decoded(self, noisy: np.ndarray) -> Any:
        """Returns names or whole numbers."""
        codes = pa.array(noisy)
        return codes if self.classes is None else pa.array(self.classes, pa.string()).take(codes)

    def _vault(self, labels: np.ndarray, **arguments: Any) -> PrivateLabels:
        # Codes, not names: ten million texts would not fit, and the codes are the same labels.
        return PrivateLabels(labels, num_classes=self.num_classes, **arguments)

    def _draw(self, vault: PrivateLabels) -> tuple[NoisyLabels, dict[str, Any]]:
        mechanism: mechanisms.ClassificationMechanism
        outputs: str | list[Any] = "all"  # by name only where some are left out
        prior = None
        if self.prior is None:
            mechanism = mechanisms.RandomizedResponse(self.epsilon, self.num_classes)
        else:
            mechanism = with_prior = mechanisms.RRWithPrior(self.epsilon, self.num_classes)
            size = with_prior.optimal_k(self.prior)
            possible = np.flatnonzero(top_k_members(self.prior[np.newaxis], size)[0])
            if possible.size < self.num_classes:
                names = self.classes
                outputs = possible.tolist() if names is None else [names[i] for i in possible]
            prior = {"source": "public", "probabilities": _randomize_task.as_list(self.prior)}
        noisy = vault.randomize(mechanism, priors=self.prior, key=self._key())
        return noisy, {
            "task": "classification",
            "num_classes": self.num_classes,
            "classes": None if self.classes is None else list(self.classes),
            **self.split(mechanism),
            "outputs": outputs,
            "prior": prior,
        }

    def _key(self) -> str:
        """Names the draw by what the mechanism itself does not say: class names and prior.

        With others the stored draw is not found, and a new one would pass the budget.
        """
        text = repr((self.classes, None if self.prior is None else self.prior.tolist()))
        return f"{_randomize_task.KEY}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
