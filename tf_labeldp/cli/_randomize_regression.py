"""Noisy labels for numbers in a public range."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pyarrow as pa

from tf_labeldp import mechanisms
from tf_labeldp.cli import _randomize_task, _table_read
from tf_labeldp.cli._errors import CommandError
from tf_labeldp.vault import LabelRandomizer, NoisyLabels, PrivateLabels


@dataclasses.dataclass(frozen=True, eq=False)
class Regression(_randomize_task.Task):
    """Numbers in a public range.

    Attributes:
        low: the smallest label.
        high: the largest label.
        clip: whether labels outside are set to the nearer end.
        mechanism: that draws, over this range; None for randomized response on the best bins.
        loss: which the bins are optimal for.
        prior_epsilon: of the private histogram, or None for the default split.
        max_values: most cells of that histogram, or None for the default.
        whole_numbers: whether labels are whole numbers.
        prior: public values and probabilities instead of a histogram, or None.
    """

    low: float
    high: float
    clip: bool = False
    mechanism: mechanisms.RegressionMechanism | None = None
    loss: str = "squared_error"
    prior_epsilon: float | None = None
    max_values: int | None = None
    whole_numbers: bool = False
    prior: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def kind(self) -> str:
        """Numbers."""
        return _table_read.NUMBER

    @property
    def output_type(self) -> Any:
        """Numbers."""
        return pa.float64()

    @property
    def assumption(self) -> str:
        """What is known of every label; the same with and without ``clip``, which may tell."""
        return (
            "every label was known to lie in the label range, or was set to its nearer end "
            "(--clip); without that the table itself shows that all of them lie there"
        )

    def check(self, labels: np.ndarray) -> str | None:
        """Finds infinities, and labels outside the range unless they are to be clipped."""
        bad = int(np.count_nonzero(~np.isfinite(labels)))
        if bad:
            return f"{bad} of {labels.size} labels are NaN or infinite; {_table_read.FILL}"
        outside = int(np.count_nonzero((labels < self.low) | (labels > self.high)))
        if outside and not self.clip:
            return (
                f"{outside} of {labels.size} labels lie outside --low {self.low:g} to --high "
                f"{self.high:g}; widen the range, or give --clip to set them to its nearer end"
            )
        return None

    def encoded(self, chunk: Any) -> np.ndarray:
        """Returns ``float64``."""
        return chunk.to_numpy(zero_copy_only=False)

    def decoded(self, noisy: np.ndarray) -> Any:
        """Returns numbers."""
        return pa.array(noisy)

    def _vault(self, labels: np.ndarray, **arguments: Any) -> PrivateLabels:
        return PrivateLabels(labels, low=self.low, high=self.high, clip=self.clip, **arguments)

    def _draw(self, vault: PrivateLabels) -> tuple[NoisyLabels, dict[str, Any]]:
        # No word of clipping: whether it was needed depends on the labels.
        facts: dict[str, Any] = {
            "task": "regression",
            "label_range": [self.low, self.high],
            "classes": None,
        }
        if self.mechanism is not None:
            noisy = vault.randomize(self.mechanism, key=_randomize_task.KEY)
            return noisy, {**facts, **self.split(self.mechanism), "prior": None}

        randomizer = LabelRandomizer(
            self.epsilon,
            self.loss,
            prior_epsilon=self.prior_epsilon,
            whole_numbers=self.whole_numbers,
        )
        if self.max_values is not None:
            randomizer = dataclasses.replace(randomizer, max_values=self.max_values)
        if self.prior is not None:
            values, prior = (tuple(array.tolist()) for array in self.prior)
            randomizer = dataclasses.replace(randomizer, values=values, prior=prior)
        noisy = vault.randomize(randomizer)
        bins, told = noisy.mechanism, noisy.priors
        if not isinstance(bins, mechanisms.RROnBins) or told is None:
            raise CommandError("the draw of this store was not made on bins; give a new --store")
        return noisy, {
            **facts,
            "loss": self.loss,
            **self.split(bins, self.epsilon - bins.epsilon),
            "outputs": _randomize_task.as_list(bins.outputs),
            "prior": {
                "source": "private histogram" if self.prior is None else "public",
                "values": _randomize_task.as_list(told.values),
                "probabilities": _randomize_task.as_list(told.probabilities),
            },
        }
