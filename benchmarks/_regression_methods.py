"""The mechanisms that ``bench_regression.py`` compares, all epsilon-DP."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from _insurance import InsuranceData

import tf_labeldp as ldp
from tf_labeldp import mechanisms
from tf_labeldp.mechanisms import Priors
from tf_labeldp.mechanisms._bins import nearest_index
from tf_labeldp.vault import Numbers

MAX_VALUES = 64
"""Values of amounts: steps of 1.6 % of the range, and a cheap prior."""
UNBIASED_VALUES = 32
"""Fewer, since the time of the linear program grows with their third power."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Noisy training labels of one method.

    Attributes:
        labels: ``float64`` (n,), the targets of the network.
        details: settings of the mechanism, for JSON.
    """

    labels: np.ndarray
    details: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
        draw: returns noisy labels for (data, training rows, epsilon, seed).
        role: "ours"; "baseline", one of the paper's; "extra", beyond the paper.
    """

    draw: Callable[[InsuranceData, np.ndarray, float, int], Drawn]
    role: str


def methods(counts: bool) -> dict[str, Method]:
    """Returns the methods by name, for integer or for real labels."""
    if counts:
        laplace, staircase = (
            mechanisms.DiscreteLaplaceMechanism,
            mechanisms.DiscreteStaircaseMechanism,
        )
    else:
        laplace, staircase = mechanisms.LaplaceMechanism, mechanisms.StaircaseMechanism
    return {
        "RR-on-Bins": Method(_rr_on_bins, "ours"),
        "Laplace": Method(functools.partial(_additive, laplace), "baseline"),
        "staircase": Method(functools.partial(_additive, staircase), "baseline"),
        "exponential": Method(
            functools.partial(_additive, mechanisms.ExponentialMechanism), "baseline"
        ),
        "Laplace, not clipped": Method(functools.partial(_additive, laplace, clip=False), "extra"),
        "Laplace + posterior mean": Method(functools.partial(_laplace_posterior, laplace), "extra"),
        "RR-on-Bins, debiased": Method(functools.partial(_rr_on_bins, debiased=True), "extra"),
        "unbiased channel": Method(_unbiased, "extra"),
        "RR-on-Bins, prior known (NOT PRIVATE)": Method(_rr_on_bins_known_prior, "extra"),
    }


def vault(data: InsuranceData, rows: np.ndarray, epsilon: float, seed: int) -> ldp.PrivateLabels:
    """Returns the training labels in a vault.

    Seeded, so that the table is reproducible; such draws protect nobody.
    """
    budget = ldp.PrivacyBudget(epsilon)
    kind = Numbers(data.low, data.high)
    return ldp.PrivateLabels(data.labels[rows], kind, budget=budget, insecure_seed=seed)


def _additive(
    kind: Callable[..., mechanisms.RegressionMechanism],
    data: InsuranceData,
    rows: np.ndarray,
    epsilon: float,
    seed: int,
    clip: bool = True,
) -> Drawn:
    mechanism = kind(epsilon, low=data.low, high=data.high, clip=clip)
    return Drawn(vault(data, rows, epsilon, seed).randomize(mechanism).values)


def _rr_on_bins(
    data: InsuranceData, rows: np.ndarray, epsilon: float, seed: int, *, debiased: bool = False
) -> Drawn:
    randomizer = ldp.LabelRandomizer(epsilon, max_values=MAX_VALUES, whole_numbers=data.counts)
    noisy = vault(data, rows, epsilon, seed).randomize(randomizer)
    prior_epsilon = noisy.receipts[0].charge.epsilon
    details = {"prior_epsilon": prior_epsilon, "k": len(noisy.priors.values)}
    labels = noisy.debiased() if debiased else noisy.values
    return Drawn(labels, {**details, **_bins(noisy.mechanism)})


def _rr_on_bins_known_prior(
    data: InsuranceData, rows: np.ndarray, epsilon: float, seed: int
) -> Drawn:
    """Treats the distribution of the training labels as public: a bound, not a method."""
    values = Priors.rounding_grid(data.low, data.high, MAX_VALUES, whole_numbers=data.counts)
    counts = np.bincount(nearest_index(values, data.labels[rows]), minlength=len(values))
    prior = tuple((counts / len(rows)).tolist())
    randomizer = ldp.LabelRandomizer(epsilon, values=tuple(values.tolist()), prior=prior)
    noisy = vault(data, rows, epsilon, seed).randomize(randomizer)
    return Drawn(noisy.values, {"k": len(values), **_bins(noisy.mechanism)})


def _laplace_posterior(
    kind: Callable[..., mechanisms.RegressionMechanism],
    data: InsuranceData,
    rows: np.ndarray,
    epsilon: float,
    seed: int,
) -> Drawn:
    """A fair baseline, which like RR-on-Bins pays for a private prior."""
    labels = vault(data, rows, epsilon, seed)
    priors, prior_epsilon = _private_prior(data, labels, epsilon, MAX_VALUES)
    mechanism = kind(epsilon - prior_epsilon, low=data.low, high=data.high)
    means = labels.randomize(mechanism).posterior(priors)
    return Drawn(means, {"prior_epsilon": prior_epsilon, "k": len(priors.values)})


def _unbiased(data: InsuranceData, rows: np.ndarray, epsilon: float, seed: int) -> Drawn:
    """Noisy labels whose mean is the true label, if that is on the grid."""
    labels = vault(data, rows, epsilon, seed)
    priors, prior_epsilon = _private_prior(data, labels, epsilon, UNBIASED_VALUES)
    mechanism = mechanisms.optimal_unbiased(
        priors.values, priors.probabilities, epsilon - prior_epsilon
    )
    details = {"prior_epsilon": prior_epsilon, "k": len(priors.values), **_bins(mechanism)}
    return Drawn(labels.randomize(mechanism).values, details)


def _private_prior(
    data: InsuranceData, labels: ldp.PrivateLabels, epsilon: float, max_values: int
) -> tuple[mechanisms.Priors, float]:
    """Returns the prior of RR-on-Bins over values, and its epsilon."""
    randomizer = ldp.LabelRandomizer(epsilon, max_values=max_values, whole_numbers=data.counts)
    values, prior_epsilon = randomizer.split(len(labels), *labels.label_range)
    histogram = mechanisms.HistogramMechanism(prior_epsilon, values=tuple(values.tolist()))
    return labels.release(histogram).priors(), prior_epsilon


def _bins(mechanism: mechanisms.RROnBins | mechanisms.ChannelMechanism) -> dict[str, Any]:
    return {"d": len(mechanism.outputs), "bins": [float(value) for value in mechanism.outputs]}
