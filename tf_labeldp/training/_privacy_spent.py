"""A callback that says what has been spent, and stops before a target is passed."""

from __future__ import annotations

from typing import Any

import keras

from tf_labeldp import _validate
from tf_labeldp.training._label_dp_model import LabelDPModel


@keras.saving.register_keras_serializable(package="tf_labeldp")
class PrivacySpent(keras.callbacks.Callback):
    """Prints the epsilon spent after each epoch, and stops training before it passes a target.

    The log of each epoch gets ``epsilon``, so that other callbacks and the history have it too.

    Privacy: it looks at the count of steps alone. Training stops after the last epoch that keeps
    ``epsilon <= target_epsilon``; if not even the first would, it raises before the first step.
    What else the vault of the labels has paid for counts.

    Args:
        delta: of the statement, in (0, 1); None as for ``LabelDPModel.guarantee``.
        target_epsilon: the most to spend; None for no limit.
        verbose: 1 prints a line an epoch, 0 nothing.

    Raises:
        ValueError: an argument out of range, or, when training begins, a target that one epoch
            would pass.
        TypeError: when training begins: the model is not a ``LabelDPModel``.

    Example:
        >>> PrivacySpent(delta=1e-5, target_epsilon=1.0).target_epsilon
        1.0
    """

    def __init__(
        self,
        delta: float | None = None,
        target_epsilon: float | None = None,
        verbose: int = 1,
    ) -> None:
        super().__init__()
        self.delta = None if delta is None else _validate.probability_below_one("delta", delta)
        if self.delta == 0.0:
            raise ValueError(
                "delta must be above zero, got 0: Gaussian noise has no pure guarantee. Use a "
                "delta below 1/n for n labels."
            )
        self.target_epsilon = (
            None
            if target_epsilon is None
            else _validate.positive_finite("target_epsilon", target_epsilon)
        )
        self.verbose = verbose

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks that the first epoch may be taken, and that something can be stated of it."""
        if not isinstance(self.model, LabelDPModel):
            raise TypeError(
                f"PrivacySpent needs a LabelDPModel, got {type(self.model).__name__}. Make one "
                "with LabelDPModel.from_model(model)."
            )
        after = self._after_another()
        if self.target_epsilon is not None and after > self.target_epsilon:
            raise ValueError(
                f"target_epsilon={self.target_epsilon:g} would be passed by the first epoch, which "
                f"takes it to {after:.4g}. Raise noise_multiplier "
                "(accounting.calibrate_noise_multiplier), or take fewer steps an epoch."
            )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Says what has been spent; stops if another epoch would be too much."""
        spent = self.model.guarantee(self.delta)
        if logs is not None:
            logs["epsilon"] = spent.epsilon
        if self.verbose:
            print(f"epoch {epoch + 1}: epsilon {spent.epsilon:.4g} at delta {spent.delta:.3g}")
        if self.target_epsilon is not None and self._after_another() > self.target_epsilon:
            self.model.stop_training = True

    def _after_another(self) -> float:
        return self.model.guarantee_after_next_epoch(self.delta).epsilon

    def get_config(self) -> dict[str, Any]:
        """Returns every constructor argument."""
        return {
            "delta": self.delta,
            "target_epsilon": self.target_epsilon,
            "verbose": self.verbose,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PrivacySpent:
        """Returns the callback that ``get_config`` described."""
        return cls(**config)
