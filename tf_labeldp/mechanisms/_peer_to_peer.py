"""Peer-to-peer randomized response: noisy labels, passed around within clusters."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import (
    PrivacyGuarantee,
    approximate_dp_event,
    peer_to_peer_assumptions,
    peer_to_peer_guarantee,
)
from tf_labeldp.mechanisms import _random
from tf_labeldp.mechanisms._base import LabelMechanism, check_epsilon, checked_output

if TYPE_CHECKING:
    from tf_labeldp.accounting._events import DpEvent

_UNITS = float(1 << 53)
_LEAST_EPSILON = 1e-12
"""A mechanism has an epsilon above zero; where delta alone covers the reports it has this."""
_ROUNDING = 1e-9
"""An epsilon may be stated with so much less than what was found, relatively: rounding."""


@dataclasses.dataclass(frozen=True)
class PeerToPeerRandomizedResponse(LabelMechanism):
    """Each user flips a 0/1 label at random, and reports such a noisy label of a random peer.

    A user's noisy label is drawn once. Each user picks one user of the same cluster (perhaps
    themselves) uniformly at random and takes over that one's noisy label; with probability theta
    the user reports it. Two users who pick the same peer report the same noisy label. No curator
    and no shuffler is needed: ``randomize`` simulates the protocol with all labels at hand. A vault
    keeps the reports of those who report: ``NoisyLabels.indices`` names them.

    Privacy: all reports together are (epsilon, delta)-DP for the replacement of one label, towards
    a learner who sees the reports alone, if the users follow the protocol and do not collude with
    the learner; ``assumptions`` says all of it, and the vault's statement repeats it. That the
    stated epsilon holds, for clusters of ``cluster_size`` users and all larger ones, is checked at
    construction (``accounting.peer_to_peer_guarantee``, some seconds for 100,000 users; a smaller
    ``cluster_size`` is quicker and covers them too). A peer sees one noisy label of another
    user, which the cluster does not hide: ``per_peer_guarantee``. The flips are rounded up to whole
    multiples of 2^-53, the reporting rate down, both of which can only lower epsilon. Several
    releases add up by basic composition.

    Source: Algorithm 2 of ``esfandiari2022``. Clusters of one user, which it allows, are refused:
    no guarantee beyond that of the flips holds for them.

    Attributes:
        epsilon: finite and above zero; ``for_cluster_size`` finds the least.
        flip_probability: alpha, in (0, 0.5].
        subsampling_rate: theta, with which a user reports, in (0, 1].
        cluster_size: the smallest number of users of a cluster, at least 2.
        delta: in [0, 1); at zero epsilon is that of the flips, ``log((1 - alpha) / alpha)``.
        num_classes: 2.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: an argument out of range, or an epsilon that is too small.

    Example:
        >>> import numpy as np
        >>> mechanism = PeerToPeerRandomizedResponse.for_cluster_size(
        ...     flip_probability=0.2, subsampling_rate=0.5, cluster_size=100, delta=1e-4
        ... )
        >>> round(mechanism.epsilon, 2)
        0.25
        >>> clusters = np.repeat([0, 1], 100)
        >>> reports = mechanism.randomize(clusters, clusters, rng=np.random.default_rng(0))
        >>> reports.shape, np.unique(reports).tolist()
        ((200,), [-1, 0, 1])
    """

    public_input = "clusters"

    epsilon: float
    flip_probability: float
    subsampling_rate: float
    cluster_size: int
    delta: float = 0.0
    num_classes: int = 2

    def __post_init__(self) -> None:
        """Checks the ranges, and that the stated guarantee holds."""
        check_epsilon(self)
        if _validate.integer_at_least("num_classes", self.num_classes, 2) != 2:
            raise ValueError(
                f"num_classes must be 2, got {self.num_classes}: peer-to-peer randomized response "
                "is for labels 0 and 1. Use RandomizedResponse for more classes."
            )
        found = self._found()
        if found.epsilon > self.epsilon * (1.0 + _ROUNDING):
            raise ValueError(
                f"epsilon={self.epsilon:g} does not hold at delta={found.delta:g}: with "
                f"flip_probability={self.flip_probability:g}, subsampling_rate="
                f"{self.subsampling_rate:g} and clusters of {self.cluster_size} or more it is "
                f"{found.epsilon:.9g}. State that, with for_cluster_size, or flip more labels."
            )
        for name in ("flip_probability", "subsampling_rate", "delta"):
            object.__setattr__(self, name, float(getattr(self, name)))
        for name in ("cluster_size", "num_classes"):
            object.__setattr__(self, name, int(getattr(self, name)))

    @classmethod
    def for_cluster_size(
        cls, flip_probability: float, subsampling_rate: float, cluster_size: int, delta: float
    ) -> PeerToPeerRandomizedResponse:
        """Returns the mechanism with the least epsilon that holds.

        Args:
            flip_probability: alpha, in (0, 0.5].
            subsampling_rate: theta, in (0, 1].
            cluster_size: the smallest number of users of a cluster, at least 2; public.
            delta: in [0, 1).

        Raises:
            TypeError: an argument of a wrong type.
            ValueError: an argument out of range.
        """
        found = peer_to_peer_guarantee(flip_probability, subsampling_rate, cluster_size, delta)
        epsilon = max(found.epsilon, _LEAST_EPSILON)
        return cls(epsilon, flip_probability, subsampling_rate, cluster_size, delta)

    def randomize(
        self, labels: Any, clusters: Any = None, *, rng: np.random.Generator | None = None
    ) -> np.ndarray:
        """Returns what each user reports.

        Args:
            labels: integers 0 and 1, (n,).
            clusters: the cluster of each user, public integers of at least zero, (n,); None for
                one cluster of all.
            rng: a generator for repeatable (not private) runs; None takes secure random bits.

        Returns:
            ``int64`` (n,): the reported label, 0 or 1, and -1 for users who report nothing.

        Raises:
            TypeError: labels, clusters or ``rng`` of a wrong kind.
            ValueError: labels or clusters out of range or of a wrong shape, or a cluster with fewer
                than ``cluster_size`` users.
        """
        labels = _validate.class_indices("labels", labels, 2)
        of_user, sizes = self._checked_clusters(clusters, labels.size)
        if rng is not None:
            _random.checked_generator(rng)

        flipped = _random.uniform_integers(labels.size, rng) < _flip_units(self.flip_probability)
        noisy = labels ^ flipped
        # Users in the order of their clusters: a peer is a place between a cluster's ends.
        users = np.argsort(of_user, kind="stable")
        starts = np.cumsum(sizes) - sizes
        peers = users[starts[of_user] + _random.uniform_below(sizes[of_user], rng)]
        reports = _random.uniform_integers(labels.size, rng) < _report_units(self.subsampling_rate)
        return np.where(reports, noisy[peers], -1)

    def check_output(self, noisy: Any, size: int) -> np.ndarray:
        """Returns reports as ``int64`` (size,), or raises."""
        reports = checked_output(self, noisy, (size,), "i").astype(np.int64)
        if size and not -1 <= int(reports.min()) <= int(reports.max()) <= 1:
            raise ValueError("reports must be 0, 1, or -1 for users who report nothing.")
        return reports

    def per_peer_guarantee(self, *, pure: bool = True) -> PrivacyGuarantee:
        """Returns what one peer, who sees one message, learns of another user's label.

        Args:
            pure: whether to state ``log((1 - alpha) / alpha)`` at delta zero; otherwise epsilon
                zero at delta ``(1 - 2 alpha) / cluster_size``: a user is asked by one given peer
                with probability 1 / cluster_size at most. Both hold.
        """
        alpha, size = self.flip_probability, self.cluster_size
        alone = peer_to_peer_guarantee(alpha, self.subsampling_rate, size, delta=0.0)
        return PrivacyGuarantee(
            epsilon=alone.epsilon if pure else 0.0,
            delta=0.0 if pure else (1.0 - 2.0 * alpha) / size * (1.0 + 2.0**-50),
            unit="the label of one training example, towards one other user of its cluster",
            assumptions=(
                "the other user sees only the noisy label asked for, from a user picked uniformly "
                f"at random in a cluster of at least {size} users, and not the reports",
                "users of a cluster do not collude",
            ),
        )

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the guarantee of the reports rests on."""
        return peer_to_peer_assumptions(
            self.flip_probability, self.subsampling_rate, self.cluster_size
        )

    def dp_event(self) -> DpEvent:
        """Returns an event under which uses add up by basic composition."""
        return approximate_dp_event(self.epsilon, self.delta)

    def _found(self) -> PrivacyGuarantee:
        """Returns the guarantee with the least epsilon."""
        _validate.integer_at_least("cluster_size", self.cluster_size, 1)  # one, not several
        return peer_to_peer_guarantee(
            self.flip_probability, self.subsampling_rate, self.cluster_size, self.delta
        )

    def _checked_clusters(self, clusters: Any, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns each user's cluster 0..C-1 (n,) and the clusters' sizes (C,), or raises."""
        array = np.zeros(size, dtype=np.int64) if clusters is None else np.asarray(clusters)
        if array.shape != (size,):
            raise ValueError(
                f"clusters must have shape ({size},), the cluster of each user, got {array.shape}."
            )
        _validate.group_numbers("clusters", array)  # the ids themselves may pass 64 bits
        _, of_user, sizes = np.unique(array, return_inverse=True, return_counts=True)
        small = int(np.count_nonzero(sizes < self.cluster_size))
        if small:
            raise ValueError(
                f"every cluster must have at least cluster_size={self.cluster_size} users, but "
                f"{small} of {sizes.size} have fewer, the smallest {int(sizes.min())}. Merge small "
                "clusters, or make the mechanism for the smallest."
            )
        return of_user.reshape(-1), sizes


def _flip_units(alpha: float) -> np.uint64:
    """Returns the flip probability in multiples of 2^-53, rounded up: more flips, more private."""
    return np.uint64(math.ceil(alpha * _UNITS))


def _report_units(theta: float) -> np.uint64:
    """Returns the reporting rate in multiples of 2^-53, rounded down: fewer reports tell less."""
    return np.uint64(math.floor(theta * _UNITS))
