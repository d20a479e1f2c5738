"""The output of a Keras model that has the labels."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np

from tf_labeldp import _checks
from tf_labeldp.estimation import prior_from_logits, sharpen_prior
from tf_labeldp.gradients.keras_loss import KerasLoss
from tf_labeldp.gradients.model_checks import InspectedModel

_SUM_TOLERANCE = 1e-2
"""The sum of a row may miss one by this, as rows of probabilities in half precision do."""


@dataclasses.dataclass(frozen=True, eq=False)
class LabelledOutput:
    """The output of a compiled model that has the labels.

    Attributes:
        model: the model.
        name: the name of the output, for a model with several.
        from_logits: whether it has logits; None takes it from the compiled loss.
    """

    model: keras.Model
    name: str | None
    from_logits: bool | None

    @property
    def logits(self) -> bool:
        return KerasLoss(self.loss).from_logits if self.from_logits is None else self.from_logits

    @property
    def loss(self) -> Any:
        loss = self.model.loss
        if self.name is None:
            return loss
        inspected = InspectedModel(self.model)
        is_known = list(inspected.outputs) != [""] or not isinstance(loss, dict)
        losses = inspected.by_output(loss, "loss") if is_known else dict(loss)
        others = [name for name, part in losses.items() if part is not None]
        if others != [self.name]:
            raise ValueError(
                f"expected a loss for the output {self.name!r} alone, which has the labels, got "
                f"losses for {others}. Compile with loss={{{self.name!r}: ...}}, and None for "
                "the outputs of a list."
            )
        return losses[self.name]

    def of(self, outputs: Any) -> Any:
        """Returns this output among those of the model."""
        if self.name is None:
            return outputs
        is_dict = isinstance(outputs, dict)
        names = list(outputs if is_dict else InspectedModel(self.model).outputs)
        if self.name not in names:
            raise ValueError(
                f"expected output= to be one of the outputs {names}, got {self.name!r}. Name "
                "the output as the model does."
            )
        if is_dict:
            return outputs[self.name]
        return outputs if len(names) == 1 else outputs[names.index(self.name)]

    def check(self, example: Any, k: int) -> None:
        """Raises unless the output of one example, and the loss, are for rows of K classes."""
        outputs = self.of(self.model(example, training=False))
        loss = KerasLoss(self.loss)
        shape = tuple(outputs.shape) if keras.ops.is_tensor(outputs) else ()
        if shape != (1, k):
            raise ValueError(
                f"expected a model that returns one tensor of shape (batch, {k}), got {shape} for "
                f"one example. End it with keras.layers.Dense({k}), for CategoricalCrossentropy, "
                "or name one of several outputs in output=. The same stages use the same draw."
            )
        if loss.takes_codes:
            raise ValueError(
                f"expected a loss of rows, since the dataset has one-hot labels, got "
                f"{loss.name!r}. Use keras.losses.CategoricalCrossentropy."
            )
        loss.check_stages()
        row = np.asarray(keras.ops.convert_to_numpy(outputs), dtype=np.float64)
        if not self.logits and (row.min() < 0 or abs(row.sum() - 1.0) > _SUM_TOLERANCE):
            raise ValueError(
                "expected probabilities from the model, as its loss has no from_logits=True, got "
                "other numbers. Set from_logits=True there or here, or end the model in a softmax."
            )
        symbolic = list(InspectedModel(self.model).outputs.values())
        _checks.run("outputs", symbolic[0] if len(symbolic) == 1 else None, self.logits)

    def priors(self, outputs: Any, temperature: float) -> np.ndarray:
        """Returns probabilities ``float64`` (m, K) at a temperature, of the model's outputs."""
        own = self.of(outputs)
        if self.logits:
            return prior_from_logits(own, temperature)
        # Sums of half-precision rows miss one by more than the check in double precision allows.
        own = np.asarray(own, dtype=np.float64)
        return sharpen_prior(own / own.sum(axis=1, keepdims=True), temperature)
