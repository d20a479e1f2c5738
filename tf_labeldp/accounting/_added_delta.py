"""What noise costs that is close to the noise of its event, but not the same."""

from __future__ import annotations

import dataclasses

import dp_accounting


@dataclasses.dataclass(frozen=True)
class AddedDeltaDpEvent(dp_accounting.DpEvent):
    """A loss without bound with probability ``delta``, and none otherwise.

    Composed with events, it adds at most ``delta`` to theirs, at every epsilon.
    ``composed_epsilon`` takes it off the delta that it is asked for.

    Attributes:
        delta: in [0, 1].
    """

    delta: float
