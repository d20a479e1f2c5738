"""The receipt by which a vault charges steps of DP-SGD."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import dp_sgd_assumptions, dp_sgd_event, dp_sgd_guarantee
from tf_labeldp.mechanisms._base import AggregateMechanism

if TYPE_CHECKING:
    from tf_labeldp.accounting import PrivacyGuarantee
    from tf_labeldp.accounting._events import DpEvent

_LEAST_EPSILON = 1e-12
"""A mechanism has an epsilon above zero; so much noise that delta alone covers it has this."""


@dataclasses.dataclass(frozen=True)
class DPSGDSteps(AggregateMechanism):
    """Some steps of DP-SGD, as a vault charges them; ``release`` hands out nothing.

    The noisy gradients are handed out by the training step, which asks the vault to release this
    before it runs them: ``labels.release(DPSGDSteps(...), key="dp-sgd/run/epoch")`` charges the
    steps and stores the charge, or raises if they would pass the budget. A key stands for steps
    that were run once: asking again for a stored key charges nothing, so steps that are run again,
    with fresh noise, need a key of their own.

    Privacy: the noisy sums of clipped gradients of these steps are (epsilon, delta)-DP for the
    replacement of one label, with the epsilon of ``dp_sgd_guarantee`` at ``delta`` and under its
    assumptions, which the vault's statement repeats. Charges
    of several parts of a training compose to the guarantee of all its steps at once, at the delta
    of the vault's budget, which must be above zero.

    Source: ``ghazi2024``, Algorithm 1 and section 3.4; ``accounting.dp_sgd_guarantee``.

    Attributes:
        epsilon: of these steps at ``delta``; follows from the other fields and is not an argument.
        noise_multiplier: standard deviation of the noise on the sum of the clipped gradients,
            divided by ``l2_norm_clip``; above zero.
        sampling_probability: of each example in each batch, in (0, 1]; 1 claims no amplification.
        steps: number of steps, at least 1.
        delta: at which epsilon is stated, in (0, 1).
        num_classes: K, for labels that are classes 0..K-1; None for numbers.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: an argument out of range.

    Example:
        >>> epoch = DPSGDSteps(
        ...     noise_multiplier=10.0, sampling_probability=0.01, steps=100, delta=1e-5,
        ...     num_classes=10,
        ... )
        >>> round(epoch.epsilon, 4)
        0.0586
        >>> epoch.release([3, 1, 4]).shape
        (0,)
    """

    epsilon: float = dataclasses.field(init=False, compare=False)
    noise_multiplier: float
    sampling_probability: float
    steps: int
    delta: float = 0.0  # refused: a default, since a field without one would be the base's property
    num_classes: int | None = None

    def __post_init__(self) -> None:
        """Checks the ranges and finds epsilon."""
        if self.num_classes is not None:
            classes = _validate.integer_at_least("num_classes", self.num_classes, 2)
            object.__setattr__(self, "num_classes", classes)
        guarantee = self.guarantee()
        for name in ("noise_multiplier", "sampling_probability", "delta"):
            object.__setattr__(self, name, float(getattr(self, name)))
        object.__setattr__(self, "steps", int(self.steps))
        object.__setattr__(self, "epsilon", max(guarantee.epsilon, _LEAST_EPSILON))
        super().__post_init__()

    def guarantee(self, privacy_unit: str = "label") -> PrivacyGuarantee:
        """Returns what these steps promise by themselves, with the assumptions that it rests on.

        Args:
            privacy_unit: ``"label"``, or ``"user"`` for batches of users.
        """
        return dp_sgd_guarantee(
            self.noise_multiplier,
            self.sampling_probability,
            self.steps,
            self.delta,
            privacy_unit=privacy_unit,
        )

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What a statement of these steps and others rests on."""
        return dp_sgd_assumptions(self.sampling_probability, None)

    def dp_event(self) -> DpEvent:
        """Returns the event of these steps."""
        return dp_sgd_event(self.noise_multiplier, self.sampling_probability, self.steps)

    def get_config(self) -> dict[str, Any]:
        """Returns every constructor argument; epsilon, which follows from them, is none."""
        config = super().get_config()
        del config["epsilon"]
        return config

    def release(
        self, labels: Any, public_input: Any = None, *, rng: np.random.Generator | None = None
    ) -> np.ndarray:
        """Returns nothing of the labels: an empty ``float64`` array (0,).

        Args:
            labels: (n,); not looked at.
            public_input: not used; None.
            rng: not used.
        """
        return np.empty(0)
