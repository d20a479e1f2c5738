"""The mechanisms for numbers in a range, by name, and the probabilities of their outputs."""

from __future__ import annotations

import itertools

import numpy as np

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
POINTS = 1 << 16


def masses(mechanism, labels, edges):
    """P[edge < output <= next edge | label], (cells, labels): sums of the likelihood."""
    low, high = mechanism.label_range()
    found = []
    for start, end in itertools.pairwise(edges):
        if mechanism.whole:
            whole = np.arange(np.floor(start) + 1.0, np.floor(end) + 1.0)
            found.append(mechanism.likelihood(whole, labels).sum(axis=0))
            continue
        mass = np.zeros(len(labels))
        if mechanism.clip and mechanism.__class__.__name__ in ADDITIVE:
            for atom in (low, high):
                mass += mechanism.likelihood([atom], labels)[0] * (start < atom <= end)
        if mechanism.clip:
            start, end = max(start, low), min(end, high)
        if start < end:
            middles = start + (end - start) * (np.arange(POINTS) + 0.5) / POINTS
            mass += mechanism.likelihood(middles, labels).mean(axis=0) * (end - start)
        found.append(mass)
    return np.array(found)
