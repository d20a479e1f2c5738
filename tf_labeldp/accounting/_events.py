"""Every translation from a mechanism to ``dp_accounting`` events, and their composition.

This is the only file that builds or composes events, because three facts about
``dp_accounting`` 0.6.0 are easy to get wrong elsewhere:

* its PLD accountant ignores the count of a repeated ``RandomizedResponseDpEvent``
  (``compose(event, count)`` and ``SelfComposedDpEvent`` charge a single use), so repeats are
  expanded here before the accountant sees them;
* its PLD accountant refuses Laplace events under ``REPLACE_ONE``, so a pure epsilon-DP mechanism
  is carried by binary randomized response with the same epsilon, which dominates it
  (Kairouz, Oh and Viswanath 2015, "The composition theorem for differential privacy", Theorem 3.1
  and its proof);
* its PLD accountant takes the noise multiplier of a ``GaussianDpEvent`` to be relative to the
  sensitivity of adding or removing, and doubles that sensitivity under ``REPLACE_ONE``; a noise
  multiplier that is relative to the sensitivity under replacement is therefore doubled here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tf_labeldp import _validate

if TYPE_CHECKING:
    from dp_accounting import DpEvent


def randomized_response_event(epsilon: float, num_buckets: int = 2) -> DpEvent:
    """Returns the event of one randomized response over ``num_buckets`` values.

    Args:
        epsilon: privacy parameter, finite and above zero.
        num_buckets: number of values K, at least 2.

    Returns:
        ``dp_accounting.RandomizedResponseDpEvent`` whose worst log-ratio is ``epsilon``. Its
        ``noise_parameter`` is the probability ``K / (e^epsilon + K - 1)`` of answering with a
        uniform value (``ghazi2024``, appendix D.1).

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> randomized_response_event(1.0, 10).num_buckets
        10
    """
    import dp_accounting

    epsilon = _validate.positive_finite("epsilon", epsilon)
    num_buckets = _validate.integer_at_least("num_buckets", num_buckets, 2)
    shrink = math.exp(-epsilon)
    noise = num_buckets * shrink / (1.0 + (num_buckets - 1) * shrink)
    return dp_accounting.RandomizedResponseDpEvent(noise, num_buckets)


def pure_dp_event(epsilon: float) -> DpEvent:
    """Returns an event that dominates every ``epsilon``-DP mechanism.

    Args:
        epsilon: privacy parameter, finite and above zero.

    Returns:
        The event of binary randomized response with the same epsilon (Kairouz et al. 2015).

    Example:
        >>> pure_dp_event(0.5).num_buckets
        2
    """
    return randomized_response_event(epsilon, 2)


def gaussian_event(noise_ratio: float) -> DpEvent:
    """Returns the event of one release with Gaussian noise.

    Args:
        noise_ratio: standard deviation of the noise, divided by the L2 sensitivity *under
            replacement of one label*; above zero.

    Returns:
        ``dp_accounting.GaussianDpEvent`` with twice this noise multiplier, which an accountant
        under ``REPLACE_ONE`` reads as ``noise_ratio`` for the distance of two neighbours.

    Example:
        >>> gaussian_event(3.0).noise_multiplier
        6.0
    """
    import dp_accounting

    return dp_accounting.GaussianDpEvent(
        2.0 * _validate.positive_finite("noise_ratio", noise_ratio)
    )


def compose_events(events: Iterable[DpEvent]) -> DpEvent:
    """Returns the sequential composition of ``events``, one by one.

    Repeats (``SelfComposedDpEvent``) and nested compositions are written out, so that an accountant
    that mishandles a count never sees one.

    Args:
        events: ``dp_accounting`` events; may be empty.

    Returns:
        A flat ``ComposedDpEvent``, or ``NoOpDpEvent`` for no events.

    Example:
        >>> twice = compose_events([pure_dp_event(1.0)] * 2)
        >>> len(compose_events([pure_dp_event(0.5), twice]).events)
        3
    """
    import dp_accounting

    flat = [leaf for event in events for leaf in _leaves(event)]
    return dp_accounting.ComposedDpEvent(flat) if flat else dp_accounting.NoOpDpEvent()


def composed_epsilon(events: Iterable[DpEvent], delta: float) -> float:
    """Returns the epsilon of the events used one after another, by privacy loss distributions.

    Args:
        events: ``dp_accounting`` events, in any order.
        delta: target delta, in [0, 1).

    Returns:
        An upper bound on epsilon at ``delta`` under replacement of one label (the bound of the PLD
        accountant's pessimistic discretisation; Doroshenko et al. 2022).

    Example:
        >>> round(composed_epsilon([pure_dp_event(0.5)] * 50, delta=1e-5), 1)
        18.9
    """
    import dp_accounting
    from dp_accounting import pld

    accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_ONE)
    for leaf in _leaves(compose_events(events)):
        accountant.compose(leaf)
    return float(accountant.get_epsilon(_validate.probability_below_one("delta", delta)))


def _leaves(event: DpEvent) -> Iterator[DpEvent]:
    """Yields the events inside compositions and repeats, each as often as it is used."""
    import dp_accounting

    if isinstance(event, dp_accounting.NoOpDpEvent):
        return
    if isinstance(event, dp_accounting.ComposedDpEvent):
        for part in event.events:
            yield from _leaves(part)
    elif isinstance(event, dp_accounting.SelfComposedDpEvent):
        for _ in range(event.count):
            yield from _leaves(event.event)
    else:
        yield event
