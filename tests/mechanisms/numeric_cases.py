"""The mechanisms that add noise to numbers in a range, by name, for parametrized tests."""

from __future__ import annotations

from tf_labeldp.mechanisms import (
    DiscreteLaplaceMechanism,
    DiscreteStaircaseMechanism,
    ExponentialMechanism,
    LaplaceMechanism,
    StaircaseMechanism,
)

MECHANISMS = {
    cls.__name__: cls
    for cls in (
        LaplaceMechanism,
        DiscreteLaplaceMechanism,
        StaircaseMechanism,
        DiscreteStaircaseMechanism,
        ExponentialMechanism,
    )
}
CONTINUOUS = [name for name in MECHANISMS if not MECHANISMS[name].whole]
DISCRETE = [name for name in MECHANISMS if MECHANISMS[name].whole]
ADDITIVE = [name for name in MECHANISMS if name != "ExponentialMechanism"]
