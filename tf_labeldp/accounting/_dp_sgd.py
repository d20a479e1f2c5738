"""The guarantee of DP-SGD from its noise, and the noise from a guarantee, for replaced labels.

One step adds the clipped gradients of a Poisson-sampled batch and Gaussian noise. Replacing a label
replaces a gradient ``u`` by ``v``, both of norm at most the clipping norm (here 1), in a batch that
its example enters with the same probability q. What the other examples add is the same on both
sides and is a mixture that the divergence is jointly convex in, so the two outputs to tell apart
are ``P = (1 - q) N(0) + q N(u)`` and ``Q = (1 - q) N(0) + q N(v)`` with noise sigma. The worst pair
is ``v = -u`` of norm 1, at once for the hockey-stick divergence of every order a, so that it
dominates and composes adaptively (Zhu, Dong and Wang 2022, "Optimal accounting of differential
privacy via characteristic function"; that one pair must be the worst for every order is the pitfall
of Lebeda, Regehr, Kamath and Steinke 2024, "Avoiding pitfalls for privacy accounting of subsampled
mechanisms under composition"). The reason:

* For ``a >= 1``, ``max_S P(S) - a Q(S)`` is reached at ``S = {n_u > c n_0 + d n_v}`` with constants
  ``c >= 0`` and ``d > 0`` (densities n). Divided by n_u, that says that a sum of exponentials of
  linear functions is below 1, so S is convex, with an outward normal along ``-g u + h (v - u)``,
  ``g >= 0`` and ``h > 0``.
* The derivative of the maximum, as v moves along w, is a positive multiple of the integral over the
  border of S of ``n_v`` times the normal's part along w (S itself need not move, since it is the
  best set). Turn v away from u (w at right angles to v, ``w.u <= 0``): that part is along
  ``-(g + h) u.w >= 0``. Once v points away from u, lengthen v: every term is above zero again, and
  so it is for lengthening u. So no pair beats the antipodal one.
* For ``a < 1`` swap P and Q: their divergence of order a follows from that of order 1/a.

At ``q = 1`` this is the Gaussian mechanism with twice the clipping norm as its sensitivity.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

from tf_labeldp import _validate
from tf_labeldp.accounting._budget import Charge
from tf_labeldp.accounting._events import composed_epsilon, dp_sgd_event
from tf_labeldp.accounting._gaussian import gaussian_sigma
from tf_labeldp.accounting._guarantee import RELATION_REPLACE, UNIT_LABEL, PrivacyGuarantee

if TYPE_CHECKING:
    from dp_accounting import DpEvent

_UNITS = {"label": UNIT_LABEL, "user": "all labels of one user"}

_WHOSE = {"label": "", "user": ", and so is which user each is of"}

_TOLERANCE = 5e-4
"""By how much a calibrated noise multiplier may be above the least one, relatively."""
_LEAST_NOISE = 1e-2
_MOST_NOISE = 1e7


def dp_sgd_guarantee(
    noise_multiplier: float,
    sampling_probability: float,
    steps: int,
    delta: float,
    relation: str = RELATION_REPLACE,
    *,
    privacy_unit: str = "label",
) -> PrivacyGuarantee:
    """Returns what some steps of DP-SGD on private labels promise.

    Guarantee:
        The noisy sums of all steps together, and whatever is computed from them and from the
        features, are (epsilon, delta)-DP for the replacement of one label; likewise for all labels
        of one user where the sampling, the clipping and the noise are by user. Epsilon is an upper
        bound: losses are rounded up, and rounding errors are taken off delta. Amplification by
        sampling is for Poisson sampling alone, and for what does not show the batch: count
        denoisers that use the batch's features (Self-Span, Self-Conv) with
        ``sampling_probability=1``.

    Source: DP-SGD, Abadi et al. 2016; ``ghazi2024``, Algorithm 1 and section 3.4 (which counts
    under ``add_or_remove``); privacy loss distributions, Doroshenko et al. 2022. Why this pair of
    distributions is the worst is in this module's docstring.

    Args:
        noise_multiplier: standard deviation of the noise on the sum of the clipped gradients,
            divided by ``l2_norm_clip``; above zero.
        sampling_probability: with which each example (or user) enters each batch, in (0, 1]; 1
            claims no amplification.
        steps: number of steps, at least 1.
        delta: in (0, 1); below 1/n for n labels.
        relation: ``"replace_label"``; or ``"add_or_remove"``, which is what published tables
            mostly state, and weaker than label-DP: for comparison only.
        privacy_unit: ``"label"``, or ``"user"`` for batches of users whose gradients are clipped
            as one.

    Returns:
        A ``PrivacyGuarantee`` with its assumptions.

    Raises:
        TypeError: an argument is not a number.
        ValueError: an argument is out of range or unknown; or delta is below what the accounting of
            so many steps can resolve, or the noise too little, for any finite epsilon.

    Example:
        >>> steps = dict(noise_multiplier=10.0, sampling_probability=0.01, steps=300, delta=1e-5)
        >>> round(dp_sgd_guarantee(**steps).epsilon, 4)
        0.1072
        >>> round(dp_sgd_guarantee(**steps, relation="add_or_remove").epsilon, 4)
        0.0507
    """
    _validate.one_of("privacy_unit", privacy_unit, _UNITS)
    epsilon = _epsilon(noise_multiplier, sampling_probability, steps, delta, relation)
    if math.isinf(epsilon):
        raise ValueError(
            f"no finite epsilon holds at delta={delta:g} for {steps} steps with "
            f"noise_multiplier={noise_multiplier:g}. Use more noise; or a larger delta, below "
            f"1/n for n labels, where it is under {_least_delta(steps):.0e}, the least that the "
            "accounting resolves in doubles."
        )
    return PrivacyGuarantee(
        epsilon=epsilon,
        delta=float(delta),
        unit=_UNITS[privacy_unit],
        relation=relation,
        assumptions=(
            "the features are public" + _WHOSE[privacy_unit],
            *dp_sgd_assumptions(sampling_probability, steps, privacy_unit),
        ),
    )


def dp_sgd_assumptions(
    sampling_probability: float, steps: int | None, privacy_unit: str = "label"
) -> tuple[str, ...]:
    """Returns the sentences on noise, sampling and steps that a guarantee of DP-SGD rests on.

    ``steps=None`` leaves their number out.

    Example:
        >>> dp_sgd_assumptions(sampling_probability=1.0, steps=300)[-1]
        'the number of steps was not chosen after seeing what earlier steps gave'
    """
    one = "user" if privacy_unit == "user" else "example"
    notes = [
        "Gaussian noise was added to the sum of the clipped gradients, one clipped gradient per "
        f"{one}, in each " + ("step" if steps is None else f"of {steps} steps"),
    ]
    if sampling_probability < 1.0:
        notes.append(
            f"each step's batch was drawn by Poisson sampling, every {one} with probability "
            f"{sampling_probability:.6g}, and who was in it stays secret"
        )
    notes.append("the number of steps was not chosen after seeing what earlier steps gave")
    return tuple(notes)


def dp_sgd_charge(
    noise_multiplier: float,
    sampling_probability: float,
    steps: int,
    delta: float,
    *,
    privacy_unit: str = "label",
) -> Charge:
    """Returns what some steps of DP-SGD cost, for ``PrivateLabels.charge``.

    Charges of several parts of a training compose to the guarantee of all its steps at once.

    Args:
        noise_multiplier: as for ``dp_sgd_guarantee``, like all arguments.
        sampling_probability: as for ``dp_sgd_guarantee``.
        steps: number of steps, at least 1.
        delta: at which epsilon is stated: that of the vault's budget.
        privacy_unit: ``"label"`` or ``"user"``.

    Raises:
        TypeError: an argument is not a number.
        ValueError: an argument is out of range.

    Example:
        >>> round(dp_sgd_charge(10.0, 0.01, steps=100, delta=1e-5).epsilon, 4)
        0.0586
    """
    _validate.one_of("privacy_unit", privacy_unit, _UNITS)
    _epsilon(noise_multiplier, sampling_probability, steps, delta, RELATION_REPLACE)
    return Charge.of_event(
        dp_sgd_event(noise_multiplier, sampling_probability, steps),
        float(delta),
        dp_sgd_assumptions(sampling_probability, None, privacy_unit),
    )


def calibrate_noise_multiplier(
    epsilon: float,
    delta: float,
    sampling_probability: float,
    steps: int,
    relation: str = RELATION_REPLACE,
) -> float:
    """Returns the least noise multiplier at which DP-SGD has a guarantee.

    Guarantee:
        ``dp_sgd_guarantee`` with the noise multiplier returned has an epsilon of at most
        ``epsilon`` (checked, not extrapolated); with one part in a thousand less it has not.

    Source: that of ``dp_sgd_guarantee``.

    Args:
        epsilon: target, finite and above zero.
        delta: in (0, 1); below 1/n for n labels.
        sampling_probability: as for ``dp_sgd_guarantee``.
        steps: as for ``dp_sgd_guarantee``.
        relation: as for ``dp_sgd_guarantee``.

    Returns:
        The noise multiplier, from 0.01 (returned where less would do) to 1e7.

    Raises:
        TypeError: an argument is not a number.
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
        spent = _epsilon(noise, sampling_probability, steps, delta, relation)
        return math.log(min(max(spent, 1e-300), 1e300)) - math.log(epsilon)

    least, most = math.log(_LEAST_NOISE), math.log(_MOST_NOISE)
    at_most = excess(most)
    if at_most > 0.0:
        reachable = epsilon * math.exp(at_most)
        raise ValueError(
            f"epsilon={epsilon:g} at delta={delta:g} cannot be reached in {steps} steps with "
            f"sampling_probability={sampling_probability:g}: the smallest reachable epsilon is "
            f"{reachable:.3g}, with a noise multiplier of {_MOST_NOISE:g}. Take fewer steps, "
            f"smaller batches, a larger epsilon, or a delta well above {_least_delta(steps):.0e}."
        )
    # The central limit theorem of privacy losses: one step's variance is about
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
    while excess(root) > 0.0:
        root += _TOLERANCE / 2.0
    return math.exp(root)


def _epsilon(
    noise_multiplier: float, sampling_probability: float, steps: int, delta: float, relation: str
) -> float:
    """Returns the epsilon of some steps, or raises what is wrong with the arguments."""
    event = dp_sgd_event(noise_multiplier, sampling_probability, steps)
    delta = _validate.probability_below_one("delta", delta)
    if delta == 0.0:
        raise ValueError(
            "delta must be above zero for DP-SGD, got 0: Gaussian noise has no pure guarantee. "
            "Use a delta below 1/n for n labels."
        )
    return _known_epsilon(event, delta, relation)


@functools.lru_cache(maxsize=256)
def _known_epsilon(event: DpEvent, delta: float, relation: str) -> float:
    """Returns the epsilon of an event, which takes the accountant up to a second to find."""
    return composed_epsilon([event], delta, relation)


def _least_delta(steps: int) -> float:
    """Returns about the least delta that the accountant resolves."""
    return 1e-14 + 2.0**-51 * steps
