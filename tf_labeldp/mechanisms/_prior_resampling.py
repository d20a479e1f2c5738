"""Resampling from a prior: a label is kept, or replaced by a draw from its prior."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.mechanisms import _random
from tf_labeldp.mechanisms._base import FrozenClassification
from tf_labeldp.mechanisms._cluster_distributions import checked_threshold
from tf_labeldp.mechanisms._priors import Priors
from tf_labeldp.mechanisms._top_k import row_chunks

_UNITS = 1 << 53
"""The draws compare 53 random bits: a probability is a whole number of this many units."""

_MARGIN = 2.0**-49
"""Above the rounding errors of the float operations before a threshold (6 * 2^-52)."""

_TOLERANCE = 1e-6
"""A given resampling probability may be raised by this part of it, to make up for rounding."""


@dataclasses.dataclass(frozen=True)
class PriorResampling(FrozenClassification):
    """Replaces each label, with probability lambda, by a draw from the label's own prior q.

    The channel is ``P[z | y] = (1 - lambda) [z = y] + lambda q_z``. Where the prior is right the
    noisy labels are distributed like the true ones, for any lambda.

    Privacy: (epsilon, 0)-DP for the replacement of one label, if the prior of a label does not
    depend on that label. The worst ratio is ``1 + (1 - lambda) / (lambda min q)``. Without
    ``resampling_probability`` each row takes the smallest lambda for which that is at most
    e^epsilon: ``1 / (1 + (e^epsilon - 1) min q)``, by its prior alone. What is drawn are whole
    numbers of 2^-53 (``transition_matrix`` returns just these): entries of a prior below 2^-53
    count as 2^-53, and lambda is rounded up so that the bound holds for the whole numbers.

    Source: ``esfandiari2022``, lines 22 to 25 of Algorithm 1; the ratio is that of mechanism M2 in
    the proof of Theorem 1, with the smallest entry of the row itself in place of tau.

    Attributes:
        epsilon: finite and above zero.
        num_classes: K, at least 2.
        resampling_probability: lambda for every row, in (0, 1]; rows for which it would cost more
            than epsilon are refused. None for the smallest of each row.
        threshold: tau, in [0, 1/K]; priors with a smaller entry are refused.

    Example:
        >>> mechanism = PriorResampling(epsilon=1.0, num_classes=3)
        >>> mechanism.resampling_probabilities([0.6, 0.3, 0.1]).round(4).tolist()
        [0.8534]
        >>> mechanism.transition_matrix([0.6, 0.3, 0.1])[2].round(4).tolist()
        [0.512, 0.256, 0.232]
    """

    public_input = "priors"

    resampling_probability: float | None = None
    threshold: float = 0.0

    def __post_init__(self) -> None:
        """Checks the ranges."""
        super().__post_init__()
        if self.resampling_probability is not None:
            probability = checked_resampling_probability(self.resampling_probability)
            object.__setattr__(self, "resampling_probability", probability)
        tau = checked_threshold(self.threshold, self.num_classes)
        object.__setattr__(self, "threshold", tau)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PriorResampling:
        """Returns the mechanism that ``get_config`` described.

        Version 0.1 priced a fixed lambda by the priors that had come out (``adaptive_epsilon``);
        here it has the price that was promised before them.
        """
        config = dict(config)
        if config.pop("adaptive_epsilon", False):
            kept = config["resampling_probability"]
            config["epsilon"] = math.log1p((1.0 - kept) / (kept * config["threshold"]))
        return cls(**config)

    def randomize(
        self, labels: Any, priors: Any = None, *, rng: np.random.Generator | None = None
    ) -> np.ndarray:
        """Returns one noisy label for each label.

        Args:
            labels: integers of shape (n,) in 0..K-1.
            priors: probabilities of shape (K,) or (n, K); rows sum to one (tolerance 1e-4).
            rng: a generator for repeatable (not private) runs; None takes secure random bits.

        Returns:
            ``int64`` array of shape (n,) in 0..K-1.

        Raises:
            TypeError: the labels are not integers.
            ValueError: labels or priors out of range or of a wrong shape, priors missing, or a
                prior for which ``resampling_probability`` costs more than epsilon. The last is
                found out before anything is drawn, and depends on the priors alone.
        """
        labels = _validate.class_indices("labels", labels, self.num_classes)
        groups = priors.checked_groups(labels.size) if isinstance(priors, Priors) else None
        if groups is not None:
            rows = self._checked_rows(priors.probabilities, None)
        else:
            rows = self._checked_rows(priors, labels.size)
            if rows.shape[0] == 1:
                groups = np.zeros(labels.size, dtype=np.int64)
        kept = self._kept_units(rows)
        if groups is not None:
            ends = np.cumsum(prior_units(rows), axis=1)
            return resample(labels, kept, ends, groups, rng)
        noisy = np.empty_like(labels)
        for chunk in row_chunks(rows.shape):  # which bounds the memory for whole units
            ends = np.cumsum(prior_units(rows[chunk]), axis=1)
            every = np.arange(ends.shape[0])
            noisy[chunk] = resample(labels[chunk], kept[chunk], ends, every, rng)
        return noisy

    def resampling_probabilities(self, priors: Any) -> np.ndarray:
        """Returns lambda for each prior, as it is drawn.

        Args:
            priors: probabilities of shape (K,) or (m, K); rows sum to one (tolerance 1e-4).

        Returns:
            ``float64`` (1,) or (m,), in (0, 1].

        Raises:
            ValueError: as ``randomize`` for the same priors.
        """
        return 1.0 - self._kept_units(self._checked_rows(priors, None)) / float(_UNITS)

    def transition_matrix(self, prior: Any = None) -> np.ndarray:
        """Returns ``P[output | input]`` under one prior of shape (K,), ``float64`` (K, K).

        The entries are the probabilities as they are drawn.

        Raises:
            ValueError: not one prior of that shape, or one that ``randomize`` refuses.
        """
        shape = np.shape(prior)
        if prior is None or shape != (self.num_classes,):
            raise ValueError(
                f"transition_matrix of {type(self).__name__} needs one prior of shape "
                f"({self.num_classes},), got {'None' if prior is None else shape}. "
                "Pass one row at a time."
            )
        rows = self._checked_rows(prior, None)
        kept = self._kept_units(rows)[0] / float(_UNITS)
        drawn = np.tile(prior_units(rows) / float(_UNITS), (self.num_classes, 1))
        return kept * np.eye(self.num_classes) + (1.0 - kept) * drawn

    def _checked_rows(self, priors: Any, num_rows: int | None) -> np.ndarray:
        """Returns priors (1 or n, K) of which no entry is below the threshold, or raises."""
        if priors is None:
            raise ValueError(
                f"{type(self).__name__} needs priors of shape ({self.num_classes},) or "
                f"({'n' if num_rows is None else num_rows}, {self.num_classes}). Without any, use "
                "RandomizedResponse."
            )
        rows = _validate.prior_rows("priors", priors, num_rows, self.num_classes)
        low = int(np.count_nonzero(rows.min(axis=1) < self.threshold))
        if low:
            raise ValueError(
                f"priors must be at least threshold={self.threshold:g}, but {low} row(s) have a "
                "smaller entry. Mix them with the uniform distribution, or lower the threshold."
            )
        return rows

    def _kept_units(self, rows: np.ndarray) -> np.ndarray:
        """Returns how many of 2^53 units keep the label, for each row: ``int64`` (m,).

        Raises:
            ValueError: a row for which the given lambda would cost more than epsilon.
        """
        least = np.empty(rows.shape[0], dtype=np.int64)
        for chunk in row_chunks(rows.shape):
            least[chunk] = prior_units(rows[chunk]).min(axis=1)
        most = most_kept_units(self.epsilon, least)
        if self.resampling_probability is None:
            return most
        given = _UNITS - math.ceil(self.resampling_probability * _UNITS)  # both are exact
        allowed = (_UNITS - given) * (1.0 + _TOLERANCE) + 2.0
        over = _UNITS - most > allowed
        if np.any(over):
            smallest = int(least[over].min()) / float(_UNITS)
            raise ValueError(
                f"resampling_probability={self.resampling_probability:g} costs more than "
                f"epsilon={self.epsilon:g} for {int(np.count_nonzero(over))} prior(s): the least "
                f"entry of one is {smallest:.6g}, which needs "
                f"{(_UNITS - int(most[over].min())) / float(_UNITS):.6g}. Raise epsilon, lambda or "
                "the least entry, or leave resampling_probability out."
            )
        return np.minimum(most, given)


def prior_units(rows: np.ndarray) -> np.ndarray:
    """Returns checked priors (m, K) in whole units: ``int64`` of at least 1, rows sum to 2^53."""
    # Rounded up, and the largest entry of the row pays, about one unit a class: so the least entry,
    # which decides what a draw costs, loses nothing unless all are nearly equal.
    scaled = np.ceil(rows * (float(_UNITS) / rows.sum(axis=1, keepdims=True)))
    units = np.maximum(scaled, 1.0).astype(np.int64)
    units[np.arange(rows.shape[0]), np.argmax(units, axis=1)] += _UNITS - units.sum(axis=1)
    return units


def most_kept_units(epsilon: float, least: np.ndarray) -> np.ndarray:
    """Returns the most units that may keep a label at this epsilon: ``int64`` (m,), below 2^53.

    With ``keep`` units of N = 2^53 that keep the label, and u of N that the prior has on an output,
    the ratio of two entries of a column is at most ``1 + keep N / ((N - keep) u)``. That is at most
    e^epsilon for ``keep <= N / (1 + r)`` with ``r = N / ((e^epsilon - 1) u)``, where u is the least
    entry. The bound is rounded down, by more than the float arithmetic can have lost.

    Args:
        epsilon: finite and above zero.
        least: the least entry of each prior in units, ``int64`` (m,), at least 1.
    """
    # e^-epsilon instead of e^epsilon, which may overflow; odds of 1e250 keep nothing anyway.
    odds = min(math.exp(-epsilon) / -math.expm1(-epsilon), 1e250) * (_UNITS / least)
    share = 1.0 / (1.0 + odds)
    # The part that is kept and the part that is not, each rounded where it is small: both are
    # bounds, so the larger one is too. At least one unit resamples, or the ratio were infinite.
    kept = np.floor(share * (1.0 - _MARGIN) * _UNITS)
    not_kept = np.maximum(np.ceil(odds * share * (1.0 + _MARGIN) * _UNITS), 1.0)
    return np.minimum(np.maximum(kept, _UNITS - not_kept), _UNITS - 1.0).astype(np.int64)


def resample(
    labels: np.ndarray,
    kept: np.ndarray,
    ends: np.ndarray,
    groups: np.ndarray,
    rng: np.random.Generator | None,
) -> np.ndarray:
    """Returns each label, or instead of it a draw from its prior.

    Args:
        labels: ``int64`` (n,).
        kept: of 2^53 units, those that keep a label, for each prior, ``int64`` (m,).
        ends: the running sums of the units of each prior, ``int64`` (m, K).
        groups: which prior is that of each label, ``int64`` (n,), in 0..m-1.
        rng: source of random bits; None takes the operating system's.
    """
    # Both numbers are drawn for every label, whether it is kept or not.
    keep = _random.uniform_integers(labels.size, rng).astype(np.int64) < kept[groups]
    drawn = _random.uniform_integers(labels.size, rng).astype(np.int64)
    # The class in whose units the number lies, by bisection of all rows at once.
    low = np.zeros_like(labels)
    high = np.full_like(labels, ends.shape[1] - 1)
    for _ in range((ends.shape[1] - 1).bit_length()):
        middle = (low + high) // 2
        beyond = ends[groups, middle] <= drawn
        low = np.where(beyond, middle + 1, low)
        high = np.where(beyond, high, middle)
    return np.where(keep, labels, low)


def checked_resampling_probability(value: Any) -> float:
    """Returns lambda as a float, or raises if it is not in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"resampling_probability must be a number in (0, 1], got {type(value).__name__}."
        )
    probability = float(value)
    if not 0.0 < probability <= 1.0:
        raise ValueError(
            f"resampling_probability must be in (0, 1], got {probability:g}: with 0 every label "
            "would be given out as it is."
        )
    return probability


def checked_bias_correction(value: Any) -> float:
    """Returns beta as a float, or raises if it is not in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"bias_correction must be a number in [0, 1), got {type(value).__name__}.")
    beta = float(value)
    if not 0.0 <= beta < 1.0:
        raise ValueError(
            f"bias_correction must be in [0, 1), got {beta:g}. At 1 the channel is singular: its "
            "outputs say nothing of the label, and no loss undoes that."
        )
    return beta
