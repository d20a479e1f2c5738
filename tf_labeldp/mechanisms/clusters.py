"""Mechanisms on clusters: label distributions, resampling from a prior, exchange between peers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp._columns import Column
from tf_labeldp.accounting import (
    Assumption,
    PrivacyGuarantee,
    Private,
    Public,
    peer_to_peer_guarantee,
)
from tf_labeldp.mechanisms import random_bits
from tf_labeldp.mechanisms.base import Frozen, FrozenClassification, LabelMechanism
from tf_labeldp.mechanisms.classes import row_chunks
from tf_labeldp.mechanisms.random_bits import UNITS, Rng

_MARGIN = 2.0**-49
"""Relative margin above the rounding errors of a threshold's float operations (6 * 2^-52)."""
_TOLERANCE = 1e-6
"""Relative amount by which rounding may raise a stated resampling probability."""
_SLACK = 1e-12
"""Relative distance to 1/K below which a threshold allows the uniform distribution alone."""
_LEAST_EPSILON = 1e-12
"""Epsilon of reports that delta alone covers, since an epsilon must be above zero."""
_ROUNDING = 1e-9
"""Relative amount by which a stated epsilon may be below the computed one."""


@dataclasses.dataclass(frozen=True)
class PriorResampling(FrozenClassification):
    """Replaces each label, with probability lambda, by a draw from the label's own prior q.

    The channel is ``P[z | y] = (1 - lambda) [z = y] + lambda q_z``. If the prior is right, the
    noisy labels are distributed like the true labels, for any lambda.

    Guarantee:
        (epsilon, 0)-DP for the replacement of one label, if the prior of a label does not depend on
        that label. The worst ratio is ``1 + (1 - lambda) / (lambda min q)``. Without
        ``resampling_probability`` each row uses the smallest lambda for which that is at most
        e^epsilon, ``1 / (1 + (e^epsilon - 1) min q)``, from its prior alone. The draws use
        multiples of 2^-53, which ``transition_matrix`` returns, and lambda is rounded up so that
        they satisfy the bound.

    Source: ``esfandiari2022``, lines 22 to 25 of Algorithm 1; the ratio is the one of mechanism M2
    in the proof of Theorem 1, with the smallest entry of the row in place of tau.

    Attributes:
        epsilon: finite and above zero.
        num_classes: K, at least 2.
        resampling_probability: lambda for every row, in (0, 1]; rows for which it would cost more
            than epsilon raise an error. None uses the smallest lambda of each row.
        threshold: tau, in [0, 1/K]; priors with a smaller entry raise an error.
    """

    public_input = "priors"

    resampling_probability: float | None = None
    threshold: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resampling_probability is not None:
            probability = self.checked_resampling_probability(self.resampling_probability)
            self._set(resampling_probability=probability)
        self._set(threshold=self.checked_threshold(self.threshold, self.num_classes))

    @_validate.clears_frames
    def randomize(
        self, labels: Private[Any], priors: Public[Any] = None, *, rng: Rng = None
    ) -> np.ndarray:
        """Returns noisy labels, ``int64`` (n,); a prior that costs more than epsilon raises.

        ``priors`` are probabilities (K,) or (n, K) whose rows sum to one (tolerance 1e-4), or
        ``Priors``.
        """
        labels = _validate.class_indices("labels", labels, self.num_classes)
        prior = self._checked_priors(priors, labels.size)
        kept, groups = self._kept_units(prior.rows), prior.groups
        noisy = np.empty_like(labels)
        # If each label has its own row, chunks bound the memory for whole units.
        for chunk in row_chunks(prior.rows.shape) if groups is None else [slice(None)]:
            ends = np.cumsum(self.prior_units(prior.rows[chunk]), axis=1)
            row = np.arange(len(ends)) if groups is None else groups
            noisy[chunk] = self.resample(labels[chunk], kept[chunk], ends, row, rng)
        return noisy

    @staticmethod
    def prior_units(rows: Public[np.ndarray]) -> np.ndarray:
        """Returns checked priors (m, K) in units: ``int64`` of at least 1, rows sum to 2^53."""
        # Entries are rounded up at the cost of the row's largest, about one unit per class. So the
        # least entry, which determines epsilon, loses nothing unless all entries are nearly equal.
        scaled = np.ceil(rows * (float(UNITS) / rows.sum(axis=1, keepdims=True)))
        units = np.maximum(scaled, 1.0).astype(np.int64)
        units[np.arange(rows.shape[0]), np.argmax(units, axis=1)] += UNITS - units.sum(axis=1)
        return units

    @staticmethod
    def most_kept_units(epsilon: float, least: Public[np.ndarray]) -> np.ndarray:
        """Returns the most units that may keep a label at this epsilon: ``int64`` (m,), below 2^53.

        If ``keep`` of N = 2^53 units keep the label and the prior's least entry has u units, the
        ratio of two entries in a column is at most ``1 + keep N / ((N - keep) u)``. That is at most
        e^epsilon for ``keep <= N / (1 + r)`` with ``r = N / ((e^epsilon - 1) u)``, rounded down by
        more than the errors of the float arithmetic.
        """
        # e^-epsilon does not overflow as e^epsilon may; odds of 1e250 keep nothing anyway.
        odds = min(math.exp(-epsilon) / -math.expm1(-epsilon), 1e250) * (UNITS / least)
        share = 1.0 / (1.0 + odds)
        # Each part, kept and not kept, is rounded where it is small: both give bounds, so the
        # larger is a bound too. At least one unit resamples, since otherwise the ratio would be
        # infinite.
        kept = np.floor(share * (1.0 - _MARGIN) * UNITS)
        not_kept = np.maximum(np.ceil(odds * share * (1.0 + _MARGIN) * UNITS), 1.0)
        return np.minimum(np.maximum(kept, UNITS - not_kept), UNITS - 1.0).astype(np.int64)

    @staticmethod
    @_validate.clears_frames
    def resample(
        labels: Private[np.ndarray],
        kept: Public[np.ndarray],
        ends: Public[np.ndarray],
        groups: Public[np.ndarray],
        rng: Rng,
    ) -> np.ndarray:
        """Returns each label (n,), or a draw from its prior instead.

        ``kept`` (m,) of 2^53 units keep a label under each prior, ``ends`` (m, K) are running sums
        of each prior's units, and ``groups`` (n,) are the row numbers of the labels' priors.
        """
        # Every label draws both numbers, so that the draws do not depend on the outcome.
        keep = random_bits.uniform_integers(labels.size, rng).astype(np.int64) < kept[groups]
        return np.where(keep, labels, random_bits.draw_columns(ends, groups, rng))

    @staticmethod
    def cluster_distributions(
        counts: np.ndarray, cluster_sizes: np.ndarray, threshold: float
    ) -> np.ndarray:
        """Returns the label distribution of each cluster (C, K) from noisy counts of labels (C, K).

        Frequencies are clipped to [tau, 1], and each row is adjusted to sum to one within that
        range: a larger sum is lowered in proportion to each entry's distance from tau, a smaller
        sum raised in proportion to its distance from 1. A cluster without examples gets the uniform
        distribution.

        Guarantee:
            Post-processing of a released histogram: no charge. The sizes are public.

        Source: ``esfandiari2022``, Algorithm 1, lines 3 to 20; Theorem 6 gives the range.
        """
        num_classes = counts.shape[1]
        uniform = np.full(counts.shape, 1.0 / num_classes)
        room = 1.0 - num_classes * threshold
        if room <= _SLACK:
            return uniform
        empty = (cluster_sizes == 0)[:, np.newaxis]
        clipped = np.clip(counts / np.maximum(cluster_sizes, 1)[:, np.newaxis], threshold, 1.0)
        # These are lines 9 to 19 with the sum over xi expanded. Rounding cannot take them below
        # tau.
        missing = 1.0 - clipped.sum(axis=1, keepdims=True)
        above = clipped - threshold
        excess = above.sum(axis=1, keepdims=True)
        lowered = threshold + above * (room / np.maximum(excess, room))
        lacking = np.maximum(missing, 0.0)
        raised = clipped + (1.0 - clipped) * (lacking / (lacking + num_classes - 1.0))
        return np.where(empty, uniform, np.minimum(np.where(missing < 0.0, lowered, raised), 1.0))

    @staticmethod
    def checked_threshold(value: Any, num_classes: int) -> float:
        """Returns tau in [0, 1/K] as a float, or raises."""
        hint = f": {num_classes} larger probabilities would sum to more than one"
        return _validate.number_in("threshold", value, f"[0, {1.0 / num_classes!r}]", hint)

    @staticmethod
    def checked_resampling_probability(value: Any) -> float:
        """Returns lambda in (0, 1] as a float, or raises."""
        hint = ": with 0 every true label would be released"
        return _validate.number_in("resampling_probability", value, "(0, 1]", hint)

    @staticmethod
    def checked_bias_correction(value: Any) -> float:
        """Returns beta in [0, 1) as a float, or raises."""
        hint = ". At 1 the channel is singular: its outputs reveal nothing about the label"
        return _validate.number_in("bias_correction", value, "[0, 1)", hint)

    def resampling_probabilities(self, priors: Public[Any]) -> np.ndarray:
        """Returns lambda for each prior, as the draws use it."""
        prior = self._checked_priors(priors, None)
        return 1.0 - prior.by_label(self._kept_units(prior.rows)) / float(UNITS)

    def likelihood(
        self, noisy: Public[np.ndarray], priors: Public[np.ndarray | None] = None
    ) -> np.ndarray:
        """Returns ``P[noisy label | class]``, ``float64`` (m, K), as the contract defines it."""
        rows, every = np.asarray(priors), np.arange(noisy.size)
        kept = np.broadcast_to(self._kept_units(rows) / float(UNITS), noisy.shape)
        units = np.broadcast_to(self.prior_units(rows), (noisy.size, self.num_classes))
        by_chance = (1.0 - kept) * (units[every, noisy] / float(UNITS))
        likelihood = np.repeat(by_chance[:, np.newaxis], self.num_classes, axis=1)
        likelihood[every, noisy] += kept
        return likelihood

    def _kept_units(self, rows: np.ndarray) -> np.ndarray:
        """Returns the number of 2^53 units that keep the label, for each row: ``int64`` (m,)."""
        low = int(np.count_nonzero(rows.min(axis=1) < self.threshold))
        if low:
            raise ValueError(
                f"priors must be at least threshold={self.threshold:g}, but {low} row(s) have a "
                "smaller entry. Mix them with the uniform distribution."
            )
        least = np.empty(rows.shape[0], dtype=np.int64)
        for chunk in row_chunks(rows.shape):
            least[chunk] = self.prior_units(rows[chunk]).min(axis=1)
        most = self.most_kept_units(self.epsilon, least)
        if self.resampling_probability is None:
            return most
        wanted = UNITS - math.ceil(self.resampling_probability * UNITS)  # exact in doubles
        over = UNITS - most > (UNITS - wanted) * (1.0 + _TOLERANCE) + 2.0
        if np.any(over):
            raise ValueError(
                f"resampling_probability={self.resampling_probability:g} costs more than "
                f"epsilon={self.epsilon:g} for {int(np.count_nonzero(over))} prior(s): the least "
                f"entry of one is {least[over].min() / UNITS:.6g}. Raise epsilon, lambda or the "
                "least entry, or leave resampling_probability out."
            )
        return np.minimum(most, wanted)


@dataclasses.dataclass(frozen=True)
class PeerToPeerRandomizedResponse(Frozen, LabelMechanism):
    """Each user flips a 0/1 label at random and reports the noisy label of a random peer.

    A user's noisy label is drawn once. Each user picks one user of the same cluster (perhaps
    themselves) uniformly at random, and reports that user's noisy label with probability theta. The
    protocol needs no curator and no shuffler; ``randomize`` simulates it on all labels. A vault
    keeps only actual reports: ``NoisyLabels.indices`` lists their users.

    Guarantee:
        All reports together are (epsilon, delta)-DP for the replacement of one label, towards a
        learner who sees the reports alone, if the users follow the protocol and do not collude with
        the learner (``assumptions`` lists every assumption). The constructor checks that the stated
        epsilon holds for clusters of ``cluster_size`` users and all larger ones
        (``accounting.peer_to_peer_guarantee``: some seconds for 100,000 users). A peer sees one
        noisy label of another user, which the cluster does not hide: ``per_peer_guarantee``. The
        flip probability is rounded up to a multiple of 2^-53, the reporting rate down; both can
        only lower epsilon. Several releases compose by basic composition.

    Source: Algorithm 2 of ``esfandiari2022``, without clusters of one user, for which the flips
    alone give a guarantee.

    Attributes:
        epsilon: finite and above zero; ``for_cluster_size`` finds the least.
        flip_probability: alpha, in (0, 0.5].
        subsampling_rate: theta, the probability that a user reports, in (0, 1].
        cluster_size: smallest number of users in a cluster, at least 2.
        delta: in [0, 1); at zero, epsilon is ``log((1 - alpha) / alpha)``, from the flips alone.
        num_classes: 2.

    Example:
        >>> mechanism = PeerToPeerRandomizedResponse.for_cluster_size(
        ...     flip_probability=0.2, subsampling_rate=0.5, cluster_size=100, delta=1e-4
        ... )
        >>> round(mechanism.epsilon, 2), mechanism.randomize([0, 1] * 100).shape
        (0.25, (200,))
    """

    public_input = "clusters"
    draws_are_independent = False

    flip_probability: float
    subsampling_rate: float
    cluster_size: int
    delta: float = 0.0
    num_classes: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if _validate.integer_at_least("num_classes", self.num_classes, 2) != 2:
            raise ValueError(
                f"num_classes must be 2, got {self.num_classes}. Use RandomizedResponse for more."
            )
        _validate.integer_at_least("cluster_size", self.cluster_size, 1)  # refuses an array
        found = peer_to_peer_guarantee(
            self.flip_probability, self.subsampling_rate, self.cluster_size, self.delta
        )
        if found.epsilon > self.epsilon * (1.0 + _ROUNDING):
            raise ValueError(
                f"epsilon must be at least {found.epsilon:.9g} at delta={found.delta:g} in "
                f"clusters of {self.cluster_size} or more, got {self.epsilon:.9g}. Use "
                "for_cluster_size."
            )
        self._set(
            flip_probability=float(self.flip_probability),
            subsampling_rate=float(self.subsampling_rate),
            delta=float(self.delta),
            cluster_size=int(self.cluster_size),
            num_classes=2,
        )

    @classmethod
    def for_cluster_size(
        cls, flip_probability: float, subsampling_rate: float, cluster_size: int, delta: float
    ) -> PeerToPeerRandomizedResponse:
        """Returns the mechanism with the least epsilon that holds; arguments as for the class."""
        found = peer_to_peer_guarantee(flip_probability, subsampling_rate, cluster_size, delta)
        epsilon = max(found.epsilon, _LEAST_EPSILON)
        return cls(epsilon, flip_probability, subsampling_rate, cluster_size, delta)

    @_validate.clears_frames
    def randomize(
        self, labels: Private[Any], clusters: Public[Any] = None, *, rng: Rng = None
    ) -> np.ndarray:
        """Returns the report of each user, ``int64`` (n,): 0 or 1, or -1 for no report.

        ``clusters`` is the cluster of each user, public integers >= 0, (n,); None puts all users in
        one. A cluster with fewer than ``cluster_size`` users raises an error.
        """
        labels = _validate.class_indices("labels", labels, 2)
        of_user, sizes = self._checked_clusters(clusters, labels.size)
        # Whole units of flips are rounded up and of reports down, both towards more privacy.
        flips = np.uint64(math.ceil(self.flip_probability * float(UNITS)))
        noisy = labels ^ (random_bits.uniform_integers(labels.size, rng) < flips)
        # Users are sorted by cluster, so a peer is a position between a cluster's ends.
        users = np.argsort(of_user, kind="stable")
        starts = np.cumsum(sizes) - sizes
        peers = users[starts[of_user] + random_bits.uniform_below(sizes[of_user], rng)]
        reports = np.uint64(math.floor(self.subsampling_rate * float(UNITS)))
        reported = random_bits.uniform_integers(labels.size, rng) < reports
        return np.where(reported, noisy[peers], -1)

    def check_output(self, noisy: Public[Any], size: int) -> np.ndarray:
        """Returns reports as ``int64`` (size,), or raises."""
        reports = self.checked_output(noisy, (size,), "i").astype(np.int64)
        if size and not -1 <= int(reports.min()) <= int(reports.max()) <= 1:
            raise ValueError("reports must be 0, 1, or -1 for users who report nothing.")
        return reports

    def per_peer_guarantee(self, *, pure: bool = True) -> PrivacyGuarantee:
        """Returns the guarantee of a label towards one peer, who sees one message.

        If ``pure``, epsilon is ``log((1 - alpha) / alpha)`` at delta zero; else epsilon is zero at
        delta ``(1 - 2 alpha) / cluster_size``, since a peer asks a given user with probability at
        most 1 / cluster_size. Both hold.
        """
        alpha, size = self.flip_probability, self.cluster_size
        alone = peer_to_peer_guarantee(alpha, self.subsampling_rate, size, delta=0.0)
        return PrivacyGuarantee(
            epsilon=alone.epsilon if pure else 0.0,
            delta=0.0 if pure else (1.0 - 2.0 * alpha) / size * (1.0 + 2.0**-50),
            unit="the label of one training example, towards one other user of its cluster",
            assumptions=(
                Assumption(
                    "one-message-seen",
                    "users",
                    "The other user sees only the noisy label asked for, from a user picked "
                    f"uniformly at random in a cluster of at least {size} users, and not the "
                    "reports.",
                ),
                Assumption("no-collusion", "users", "Users of a cluster do not collude."),
            ),
        )

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """The assumptions of the guarantee of the reports."""
        # They do not depend on delta, and at delta zero no epsilon is searched for.
        return peer_to_peer_guarantee(
            self.flip_probability, self.subsampling_rate, self.cluster_size, delta=0.0
        ).assumptions

    def _checked_clusters(self, clusters: Any, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns each user's cluster 0..C-1 (n,) and the clusters' sizes (C,), or raises."""
        array = (
            np.zeros(size, dtype=np.int64)
            if clusters is None
            else Column.of(clusters).complete("clusters")
        )
        _validate.group_vector("clusters", array, size)  # only checks: ids may be uint64
        _, of_user, sizes = np.unique(array, return_inverse=True, return_counts=True)
        small = int(np.count_nonzero(sizes < self.cluster_size))
        if small:
            raise ValueError(
                f"every cluster must have at least cluster_size={self.cluster_size} users, but "
                f"{small} of {sizes.size} have fewer, the smallest {int(sizes.min())}. Merge them."
            )
        return of_user.reshape(-1), sizes
