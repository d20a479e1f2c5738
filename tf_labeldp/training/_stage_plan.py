"""What a multi-stage run is made of, fixed before any label is touched."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_labeldp import _validate

_FRACTION_TOLERANCE = 1e-6


@dataclasses.dataclass(frozen=True, eq=False)
class StagePlan:
    """The label-independent schedule of LP-MST (``ghazi2021``, Algorithm 3, line 1).

    Attributes:
        parts: one ``int64`` index array a stage; disjoint, together all examples.
        epochs: epochs of each stage.
        steps_per_epoch: batches an epoch, the same in every stage, so that one learning-rate
            schedule fits them all.
        temperatures: prior temperature of each stage (the first stage has no model's prior).
        mixup_alphas: parameter of the Beta distribution of each stage; zero for none.
    """

    parts: tuple[np.ndarray, ...]
    epochs: tuple[int, ...]
    steps_per_epoch: int
    temperatures: tuple[float, ...]
    mixup_alphas: tuple[float, ...]

    @classmethod
    def make(
        cls,
        num_examples: int,
        *,
        fractions: Sequence[float],
        epochs_per_stage: int | Sequence[int],
        batch_size: int,
        temperature: float | Sequence[float],
        mixup_alpha: float | Sequence[float],
        seed: int,
    ) -> StagePlan:
        """Returns the plan, or raises a ``ValueError`` that names the argument at fault.

        The parts come from one permutation by ``seed`` (public; it protects nothing). Part t ends
        at ``floor(n * (f_1 + ... + f_t))``, the last takes the rest.
        """
        batch_size = _validate.integer_at_least("batch_size", batch_size, 1)
        if np.ndim(fractions) != 1:
            raise ValueError(
                f"fractions must be a sequence with one number a stage, got {fractions!r}. Use "
                "(1.0,) for one stage."
            )
        shares = [_validate.positive_finite(f"fractions[{i}]", f) for i, f in enumerate(fractions)]
        if not shares or abs(math.fsum(shares) - 1.0) > _FRACTION_TOLERANCE:
            raise ValueError(
                f"fractions must sum to one (tolerance {_FRACTION_TOLERANCE}), got "
                f"{list(fractions)} with sum {math.fsum(shares):.6g}. Use (1.0,) for one stage."
            )
        steps = math.ceil(num_examples / batch_size)
        ends = np.floor(np.cumsum(shares) * num_examples + 1e-9).astype(np.int64)[:-1]
        order = np.random.default_rng(seed).permutation(num_examples)
        parts = tuple(np.sort(part) for part in np.split(order, ends))
        for stage, part in enumerate(parts, start=1):
            if part.size < steps:
                raise ValueError(
                    f"stage {stage} would have {part.size} of {num_examples} examples, fewer than "
                    f"the {steps} batches of an epoch, so that some batches would be empty. Raise "
                    "its fraction or the batch_size."
                )
        num_stages = len(parts)
        epochs = tuple(
            _validate.integer_at_least("epochs_per_stage", value, 1)
            for value in _per_stage("epochs_per_stage", epochs_per_stage, num_stages)
        )
        temperatures = tuple(
            _validate.positive_finite("temperature", value)
            for value in _per_stage("temperature", temperature, num_stages)
        )
        alphas = tuple(
            0.0 if value == 0 else _validate.positive_finite("mixup_alpha", value)
            for value in _per_stage("mixup_alpha", mixup_alpha, num_stages)
        )
        return cls(parts, epochs, steps, temperatures, alphas)

    @property
    def starts(self) -> tuple[int, ...]:
        """First epoch of each stage."""
        return (0, *(int(end) for end in np.cumsum(self.epochs)[:-1]))

    def stage_of(self, epoch: int) -> int:
        """Returns the stage (from 0) that an epoch (from 0) belongs to."""
        return int(np.searchsorted(np.cumsum(self.epochs), epoch, side="right"))


def _per_stage(name: str, value: Any, num_stages: int) -> tuple[Any, ...]:
    if np.ndim(value) == 0:
        return (value,) * num_stages
    if len(value) != num_stages:
        raise ValueError(
            f"{name} must be one value or one a stage: got {len(value)} values for {num_stages} "
            "stages."
        )
    return tuple(value)
