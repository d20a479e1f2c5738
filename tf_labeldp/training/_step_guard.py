"""Stops a compiled step on the host: where it was not charged, and where numbers are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf


class StepGuard:
    """What each step has to pass before anything of it is released.

    Privacy: no step goes on that was not charged: each charge admits the steps of one epoch, and
    noise is drawn after a step has been admitted. The other checks look at features, weights and
    noisy gradients alone, so that stopping says nothing of a label.

    Attributes:
        error: why a step was stopped; TensorFlow makes another error of it on the way.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._noise: Any = None
        self._priced: float = 0.0
        self._steps_left: float = 0

    def price(self, noise: Any) -> None:
        """Notes the noise that the steps of a ``fit`` are charged for; none is let through yet."""
        self._noise, self._priced, self._steps_left = noise, noise.noise_multiplier, 0

    def admit(self, steps: int | None) -> None:
        """Lets so many steps through from now on, and no more; None for any number."""
        self._steps_left = math.inf if steps is None else steps

    def take_step(self, noise: Any) -> tf.Tensor:
        """Returns a tensor that this step's noise has to wait for; to run once a step."""
        compiled = noise.noise_multiplier  # which the graph of this step may hold

        def take() -> np.bool_:
            if noise is not self._noise or {compiled, noise.noise_multiplier} != {self._priced}:
                self._stop(
                    RuntimeError(
                        "the noise was changed while training: its steps were charged for "
                        f"noise_multiplier={self._priced:g}. Compile the model anew with another "
                        "optimizer."
                    )
                )
            if self._steps_left < 1:
                self._stop(
                    RuntimeError(
                        "a training step was to be taken that has not been charged. Steps are "
                        "charged epoch by epoch in LabelDPModel.fit, and only it may take them."
                    )
                )
            self._steps_left -= 1
            return np.True_

        return tf.numpy_function(take, [], tf.bool)

    def check_outputs(self, finite: dict[str, tf.Tensor], step: Any) -> tf.Tensor:
        """Returns a tensor to wait for; stops where the output of a layer is not finite."""
        return self._check_all(
            list(finite),
            [finite[name] for name in finite],
            step,
            lambda name: (
                f"the output of layer {name!r} is NaN or infinite; the weights are as before this "
                "step. Check the features for NaN, lower the learning rate, and go on from the "
                "last checkpoint."
            ),
        )

    def check_gradients(self, gradients: Sequence[Any], variables: Any, step: Any) -> tf.Tensor:
        """Returns a tensor to wait for; stops where the noisy gradient is not finite."""
        return self._check_all(
            [getattr(variable, "path", variable.name) for variable in variables],
            [tf.reduce_all(tf.math.is_finite(part)) for part in gradients],
            step,
            lambda name: (
                f"the noisy gradient of {name!r} is NaN or infinite, after the denoiser "
                "and weight regularizers; the weights are as before this step. Lower l2_norm_clip, "
                "try denoiser=None, and go on from the last checkpoint."
            ),
        )

    def _check_all(
        self, names: list[str], flags: list[tf.Tensor], step: Any, say: Callable[[str], str]
    ) -> tf.Tensor:
        def check(good: Any, number: Any) -> Any:
            bad = [name for name, ok in zip(names, good, strict=True) if not ok]
            if bad:
                self._stop(FloatingPointError(f"step {int(number)}: {say(bad[0])}"))
            return np.True_

        return tf.numpy_function(check, [tf.stack(flags), step], tf.bool)

    def _stop(self, error: Exception) -> None:
        self.error = error
        raise error
