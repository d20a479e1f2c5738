"""The guarantee of DP-SGD for replaced labels, and the noise that a guarantee needs."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from tf_labeldp import _validate
from tf_labeldp.accounting._guarantee import (
    RELATION_REPLACE,
    UNITS,
    Assumption,
    PrivacyGuarantee,
)
from tf_labeldp.accounting.budget import Charge
from tf_labeldp.accounting.events import EventFields
from tf_labeldp.accounting.gaussian import gaussian_sigma, positive_delta

if TYPE_CHECKING:
    from dp_accounting import DpEvent

_FEATURES = {
    "label": "The features are public.",
    "user": "The features and the user of each example are public.",
}
_TOLERANCE = 5e-4
"""Relative excess of a calibrated noise multiplier over the least one, at most."""
_LEAST_NOISE, _MOST_NOISE = 1e-2, 1e7
"""Range of the search. Less noise promises nothing (``LEAST_NOISE`` of ``_losses``)."""


@dataclasses.dataclass(frozen=True)
class NoisySteps:
    """Steps of DP-SGD with Gaussian noise; the attributes are arguments of ``dp_sgd_guarantee``."""

    noise_multiplier: float
    sampling_probability: float
    steps: int
    privacy_unit: str = "label"
    clipping: str = "norm"

    def event(self) -> DpEvent:
        """Returns the event of all steps together."""
        return EventFields.dp_sgd(
            self.noise_multiplier, self.sampling_probability, self.steps, self.clipping
        ).dp_event()

    def epsilon(self, delta: float, relation: str = RELATION_REPLACE) -> float:
        """Returns the epsilon at ``delta``; raises for arguments that do not fit together."""
        from tf_labeldp.accounting._losses import epsilon_of

        _validate.one_of("privacy_unit", self.privacy_unit, _FEATURES)
        if self.clipping != "norm" and (relation, self.privacy_unit) != (RELATION_REPLACE, "label"):
            raise ValueError(
                f"clipping={self.clipping!r} bounds the effect of replacing one label, got "
                f"relation={relation!r} and privacy_unit={self.privacy_unit!r}. Use "
                "clipping='norm' for these."
            )
        return epsilon_of(self.event(), positive_delta(delta, "DP-SGD"), relation)

    def assumptions(self, *, counted: bool = False) -> tuple[Assumption, ...]:
        """Returns the assumptions on noise, sampling and steps, ``counted`` with their number."""
        unit = "user" if self.privacy_unit == "user" else "example"
        text = (
            "Gaussian noise was added to the sum of the clipped gradients, one clipped gradient "
            f"per {unit}, in every step" + (f" of {self.steps}." if counted else ".")
        )
        notes = [Assumption("gaussian-noise-every-step", "library", text)]
        if self.clipping == "label_distance":
            text = (
                "Clipped gradients of an example for any two labels are at most twice l2_norm_clip "
                f"apart, and each has a norm of at most {2.0 * EventFields.LONGEST_CLIP:g} times "
                "l2_norm_clip."
            )
            notes.append(Assumption("label-distance-clipping", "library", text))
        if self.sampling_probability < 1.0:
            text = (
                f"Each step's batch was drawn by Poisson sampling, every {unit} with probability "
                f"{self.sampling_probability:.6g}, and the members of each batch stay secret."
            )
            notes.append(Assumption("poisson-sampling", "library", text))
        text = "The number of steps was not chosen after seeing the results of earlier steps."
        return (*notes, Assumption("steps-fixed", "trainer", text))


def dp_sgd_guarantee(
    noise_multiplier: float,
    sampling_probability: float,
    steps: int,
    delta: float,
    relation: str = RELATION_REPLACE,
    *,
    privacy_unit: str = "label",
    clipping: str = "norm",
) -> PrivacyGuarantee:
    """Returns the guarantee of several DP-SGD steps on private labels.

    Guarantee:
        The noisy sums of all steps together, and everything computed from them and from the
        features, are (epsilon, delta)-DP for the replacement of one label; likewise for all labels
        of one user if sampling, clipping and noise are by user. Epsilon is an upper bound: losses
        are rounded up, and rounding errors are taken off delta. Only Poisson sampling amplifies,
        and only if nothing reveals the batch: use ``sampling_probability=1`` for denoisers that
        use the batch's features (Self-Span, Self-Conv).

    Source: DP-SGD, Abadi et al. 2016; ``ghazi2024``, Algorithm 1 and section 3.4 (under
    ``add_or_remove``); privacy loss distributions, Doroshenko et al. 2022; docs/theory.md
    proves the worst pair of gradients for either ``clipping``.

    Args:
        noise_multiplier: standard deviation of the noise on the sum of the clipped gradients,
            divided by ``l2_norm_clip``; above zero.
        sampling_probability: probability with which each example (or user) enters each batch, in
            (0, 1]; 1 claims no amplification.
        steps: number of steps, at least 1.
        delta: in (0, 1); below 1/n for n labels.
        relation: ``"replace_label"``; or ``"add_or_remove"``, which most published tables state
            and which is weaker than label-DP: for comparison only.
        privacy_unit: ``"label"``, or ``"user"`` for batches of users, each with one clipped
            gradient.
        clipping: ``"norm"``, or ``"label_distance"`` as in ``LabelDPOptimizer``: for labels and
            ``"replace_label"`` only. Without sampling both cost the same; with it the latter costs
            more, since gradients may be farther from zero.

    Raises:
        ValueError: an argument is out of range or unknown; or there is no finite epsilon, with too
            little noise or a delta below the resolution of the accounting.

    Example:
        >>> steps = dict(noise_multiplier=10.0, sampling_probability=0.01, steps=300, delta=1e-5)
        >>> round(dp_sgd_guarantee(**steps).epsilon, 4)
        0.1072
        >>> round(dp_sgd_guarantee(**steps, relation="add_or_remove").epsilon, 4)
        0.0507
    """
    training = NoisySteps(noise_multiplier, sampling_probability, steps, privacy_unit, clipping)
    epsilon = training.epsilon(delta, relation)
    if math.isinf(epsilon):
        raise ValueError(
            f"there is no finite epsilon at delta={delta:g} for {steps} steps with "
            f"noise_multiplier={noise_multiplier:g}. Use more noise, or a larger delta below "
            f"1/n for n labels; doubles resolve deltas from {_least_delta(steps):.0e} on."
        )
    features = Assumption("public-features", "holder", _FEATURES[privacy_unit])
    notes = (features, *training.assumptions(counted=True))
    return PrivacyGuarantee(epsilon, float(delta), UNITS[privacy_unit], relation, notes)


def dp_sgd_charge(
    noise_multiplier: float,
    sampling_probability: float,
    steps: int,
    delta: float,
    *,
    privacy_unit: str = "label",
    clipping: str = "norm",
) -> Charge:
    """Returns the cost of several DP-SGD steps, for ``PrivateLabels.charge``.

    The charges of a training's parts compose to the guarantee of all its steps together.

    Args:
        noise_multiplier, sampling_probability, steps: as for ``dp_sgd_guarantee``.
        delta: delta at which epsilon is stated: the delta of the vault's budget.
        privacy_unit, clipping: as for ``dp_sgd_guarantee``, with the same errors.

    Example:
        >>> round(dp_sgd_charge(10.0, 0.01, steps=100, delta=1e-5).epsilon, 4)
        0.0586
    """
    training = NoisySteps(noise_multiplier, sampling_probability, steps, privacy_unit, clipping)
    training.epsilon(delta)  # the checks
    return Charge.of_event(training.event(), float(delta), training.assumptions())


def calibrate_noise_multiplier(
    epsilon: float,
    delta: float,
    sampling_probability: float,
    steps: int,
    relation: str = RELATION_REPLACE,
    *,
    clipping: str = "norm",
) -> float:
    """Returns the least noise multiplier with which DP-SGD reaches a guarantee.

    Guarantee:
        ``dp_sgd_guarantee`` with the returned noise multiplier has an epsilon of at most
        ``epsilon`` (checked, not extrapolated); with one part in a thousand less it does not.

    Source: as for ``dp_sgd_guarantee``.

    Args:
        epsilon: target epsilon, finite and above zero.
        delta, sampling_probability, steps, relation, clipping: as for ``dp_sgd_guarantee``.

    Returns:
        The noise multiplier, from 0.01 (returned where less would suffice) to 1e7.

    Raises:
        ValueError: an argument is out of range or unknown, or no noise multiplier reaches epsilon.

    Example:
        >>> noise = calibrate_noise_multiplier(
        ...     epsilon=1.0, delta=1e-5, sampling_probability=0.01, steps=300
        ... )
        >>> round(noise, 2)
        1.33
    """
    from scipy import optimize

    epsilon = _validate.positive_finite("epsilon", epsilon)

    def excess(log_noise: float) -> float:
        noise = math.exp(log_noise)
        training = NoisySteps(noise, sampling_probability, steps, clipping=clipping)
        spent = training.epsilon(delta, relation)
        return math.log(min(max(spent, 1e-300), 1e300)) - math.log(epsilon)

    least, most = math.log(_LEAST_NOISE), math.log(_MOST_NOISE)
    at_most = excess(most)
    if at_most > 0.0:
        raise ValueError(
            f"epsilon={epsilon:g} at delta={delta:g} cannot be reached in {steps} steps with "
            f"sampling_probability={sampling_probability:g}: the smallest reachable epsilon is "
            f"{epsilon * math.exp(at_most):.3g}, with a noise multiplier of {_MOST_NOISE:g}. Use "
            "fewer steps, smaller batches, a larger epsilon, or a delta well above "
            f"{_least_delta(steps):.0e}."
        )
    # The first guess is the central limit of privacy losses: one step's variance is about
    # (d q)^2 sinh(1 / sigma^2), d the distance of the neighbours; without sampling (d / sigma)^2.
    distance = 2.0 if relation == RELATION_REPLACE else 1.0
    spread = distance * sampling_probability * math.sqrt(steps)
    variance = max(gaussian_sigma(epsilon, delta, spread), 1e-9) ** -2.0
    guess = (variance if sampling_probability == 1.0 else math.asinh(variance)) ** -0.5
    low = high = min(max(math.log(guess), least), most)
    reach = 0.05
    while excess(high) > 0.0:
        low, high, reach = high, min(high + reach, most), 2.0 * reach
    while excess(low) <= 0.0:
        if low <= least:
            return math.exp(low)
        low, high, reach = max(low - reach, least), low, 2.0 * reach
    root = float(optimize.brentq(excess, low, high, xtol=_TOLERANCE / 2.0))
    # The root may lie on the wrong side by its tolerance: what is returned was checked.
    while excess(root) > 0.0:
        root += _TOLERANCE / 2.0
    return math.exp(root)


def _least_delta(steps: int) -> float:
    """Returns a delta that the sums of ``_losses`` resolve, whose roundings are taken off delta."""
    return 1e-14 + 2.0**-51 * steps
