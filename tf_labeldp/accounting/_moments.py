"""Moments of privacy losses of events, for the filter of moments."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import dp_accounting
import numpy as np
from dp_accounting import DpEvent
from scipy import special

from tf_labeldp.accounting._added_events import LabelDistanceDpEvent
from tf_labeldp.accounting._losses import LEAST_NOISE, counted_events, gaussian_noise

_POINTS = 1 << 14
"""Losses at which the divergence of a sampled Gaussian is computed."""
_FARTHEST = 38.0
"""Standard deviations of the noise beyond which no probability is a double."""

_NEGLIGIBLE = 30.0
"""Logarithm of the ratio of a sum to its last part, beyond which the parts fall faster still."""


def log_moments(events: Iterable[DpEvent], orders: np.ndarray) -> np.ndarray:
    """Returns upper bounds (k,) of ``log E e^(order L)`` for orders (k,) above zero.

    L is the privacy loss of the events together, for replaced labels, under the data set that makes
    it larger. It is infinite for events without a known moment.
    """
    found = np.zeros(orders.shape)
    for event, count in counted_events(events, "replace_label").items():
        found = found + count * _of_one(event, tuple(orders))
    return found


@functools.lru_cache(maxsize=1024)
def _of_one(event: DpEvent, listed: tuple[float, ...]) -> np.ndarray:
    orders = np.array(listed)
    nothing = np.full(orders.shape, np.inf)
    if isinstance(event, dp_accounting.RandomizedResponseDpEvent):
        other = event.noise_parameter / event.num_buckets
        same = 1.0 - event.noise_parameter + other
        if other == 0.0:
            return nothing
        loss = np.log(same / other)
        masses = np.log([[same], [other]])
        losses = np.stack([orders * loss, -orders * loss])
        rest = (event.num_buckets - 2) * other
        found: np.ndarray = special.logsumexp(masses + losses, axis=0)
        return np.logaddexp(found, np.log(rest)) if rest else found
    gaussian = gaussian_noise(event)
    if gaussian is None or gaussian[1] < LEAST_NOISE:
        return nothing
    if gaussian[0] == 1.0:
        return 0.5 * orders * (orders + 1.0) * (2.0 / gaussian[1]) ** 2
    is_distance = isinstance(event, LabelDistanceDpEvent)
    step = event if is_distance else LabelDistanceDpEvent(*gaussian, longest=0.5)
    return _of_step(step, orders)


def _of_step(step: LabelDistanceDpEvent, orders: np.ndarray) -> np.ndarray:
    """Returns the logarithms of moments from the divergences H of one step.

    ``E e^(order L) = 1 + order (order + 1) * integral of H(l) (e^(order l) + e^(-(order + 1) l))``
    over l > 0. H falls, so its value at the lower end of each interval bounds the integral. A
    moment is infinite here if losses of probabilities below doubles may add to it.
    """
    q, (a, b) = step.sampling_probability, step.worst_pair
    x = _FARTHEST + a
    most, least = (np.logaddexp(np.log1p(-q), np.log(q) + m * x - 0.5 * m * m) for m in (a, b))
    losses = (most - least) * np.linspace(0.0, 1.0, _POINTS) ** 2
    with np.errstate(divide="ignore"):
        heights = np.log(step.divergence(losses[:-1]))
    low, high, widths = losses[:-1], losses[1:], np.diff(losses)
    found = []
    for order in orders:
        rising = order * high + np.log(-np.expm1(-order * widths) / order)
        falling = -(order + 1.0) * low + np.log(-np.expm1(-(order + 1.0) * widths) / (order + 1.0))
        parts = heights + np.logaddexp(rising, falling)
        total = special.logsumexp(parts)
        is_whole = parts[np.flatnonzero(np.isfinite(heights))[-1]] < total - _NEGLIGIBLE
        whole = np.logaddexp(0.0, np.log(order * (order + 1.0)) + total)
        found.append(whole if is_whole else np.inf)
    return np.array(found)
