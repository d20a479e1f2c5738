"""Noisy labels that agree with their cluster, for semi-supervised learning on the others."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.features._clusters import checked_clusters
from tf_labeldp.mechanisms import RandomizedResponse
from tf_labeldp.mechanisms._base import checked_mechanism


@dataclasses.dataclass(frozen=True, eq=False)
class DenoisedLabels:
    """What ``denoise_labels`` makes: the examples that keep their noisy label, and the others.

    Attributes:
        labelled: the examples whose noisy label is the class of their cluster, ascending, ``int64``
            (m,).
        labels: their labels, ``int64`` (m,).
        unlabelled: the other examples, ascending, ``int64`` (n - m,).
        cluster_classes: the class of each cluster, ``int64`` (C,); 0 for an empty one.
        kept_fraction: m / n.
        mechanism: the randomized response that drew the labels, or None.
        cluster_accuracy: as given to ``denoise_labels``, or None.

    Example:
        >>> mechanism = RandomizedResponse(epsilon=1.0, num_classes=2)
        >>> made = denoise_labels([0, 0, 1, 1, 1], [0, 0, 0, 1, 1], 2, mechanism)
        >>> made.labelled.tolist(), made.unlabelled.tolist(), made.kept_fraction
        ([0, 1, 3, 4], [2], 0.8)
        >>> round(made.expected_purity(0.9), 4)
        0.9607
    """

    labelled: np.ndarray
    labels: np.ndarray
    unlabelled: np.ndarray
    cluster_classes: np.ndarray
    kept_fraction: float
    mechanism: RandomizedResponse | None = None
    cluster_accuracy: float | None = None

    def expected_purity(self, cluster_accuracy: float | None = None) -> float:
        """Returns the share of kept labels that are true, as equation 8 of ``tang2022`` has it.

        ``e^eps / (e^eps + (1 - a) / a)`` for randomized response and clusters whose class is the
        true one for a share ``a`` of the examples, with errors that are the same for all classes
        and do not depend on the noise.

        Args:
            cluster_accuracy: a in [0, 1]; None for that given to ``denoise_labels``, or else for
                ``estimated_cluster_accuracy()``.
        """
        a = self._accuracy(cluster_accuracy)
        if a == 0.0:
            return 0.0
        return a / (a + (1.0 - a) * math.exp(-self._known_mechanism().epsilon))

    def expected_kept_fraction(self, cluster_accuracy: float | None = None) -> float:
        """Returns the share of examples whose labels are expected to be kept.

        ``a p + (1 - a) (1 - p) / (K - 1)`` under the assumptions of ``expected_purity``, where p is
        the probability that randomized response keeps a label.

        Args:
            cluster_accuracy: as for ``expected_purity``.
        """
        kept, other = self._channel()
        a = self._accuracy(cluster_accuracy)
        return a * kept + (1.0 - a) * other

    def estimated_cluster_accuracy(self) -> float:
        """Returns the share a of true cluster classes at which the kept fraction is the expected.

        Unbiased where each cluster has one class that the noise can't outvote; clusters of few
        examples agree with their own noise, and the estimate is too high. Clipped to [0, 1].

        Privacy: computed from noisy labels; nothing is charged.
        """
        kept, other = self._channel()
        gap = -kept * math.expm1(-self._known_mechanism().epsilon)  # kept - other, to all digits
        return min(max((self.kept_fraction - other) / gap, 0.0), 1.0)

    def _accuracy(self, given: float | None) -> float:
        if given is not None:
            return _checked_accuracy(given)
        if self.cluster_accuracy is not None:
            return self.cluster_accuracy
        return self.estimated_cluster_accuracy()

    def _channel(self) -> tuple[float, float]:
        """Returns P[y | y] and P[z | y] for another class z."""
        mechanism = self._known_mechanism()
        shrink = math.exp(-mechanism.epsilon)
        kept = 1.0 / (1.0 + (mechanism.num_classes - 1) * shrink)
        return kept, kept * shrink

    def _known_mechanism(self) -> RandomizedResponse:
        if self.mechanism is None:
            raise ValueError(
                "the mechanism of the noisy labels is not known; give denoise_labels the "
                "RandomizedResponse that drew them, mechanism=."
            )
        return self.mechanism


def denoise_labels(
    noisy_labels: Any,
    clusters: Any,
    num_classes: int,
    mechanism: RandomizedResponse | None = None,
    cluster_accuracy: float | None = None,
) -> DenoisedLabels:
    """Returns which noisy labels agree with the majority of their cluster, and are worth keeping.

    The class of a cluster is the most frequent of its noisy labels, of equally frequent ones the
    lowest; 0 for an empty cluster. An example whose noisy label is that class keeps it, all others
    become unlabelled examples for semi-supervised learning. Fewer labels are left, and more of them
    are true: see ``DenoisedLabels.expected_purity``.

    Privacy: post-processing of noisy labels; nothing is charged. Assumes that the clusters were
    made without the labels, except through noisy labels and releases of the same vault.

    Source: the filter of Algorithm 7 of ``tang2022``.

    Args:
        noisy_labels: integers (n,) in 0..K-1, from randomized response or another channel that
            keeps the true class the likeliest.
        clusters: ``Clusters``, or integers (n,): the cluster of each example.
        num_classes: K, at least 2.
        mechanism: the ``RandomizedResponse`` that drew the labels, for the expected numbers; None
            if they are not needed.
        cluster_accuracy: in [0, 1], the share of examples whose cluster has their true class, if it
            is known from elsewhere.

    Raises:
        TypeError: labels or clusters that are not integers, or another mechanism.
        ValueError: sizes that differ, or arguments out of range.

    Example:
        >>> made = denoise_labels([2, 2, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1], num_classes=3)
        >>> made.cluster_classes.tolist(), made.labels.tolist(), made.unlabelled.tolist()
        ([2, 1], [2, 2, 1, 1, 1], [2])
    """
    num_classes = _validate.integer_at_least("num_classes", num_classes, 2)
    noisy = _validate.class_indices("noisy_labels", noisy_labels, num_classes)
    if mechanism is not None:
        known = checked_mechanism(mechanism, RandomizedResponse).num_classes
        if known != num_classes:
            raise ValueError(
                f"num_classes={num_classes} is not that of the mechanism, {known}. Give the "
                "mechanism that drew the labels."
            )
    accuracy = None if cluster_accuracy is None else _checked_accuracy(cluster_accuracy)
    found = checked_clusters(clusters)
    if len(found) != noisy.size:
        raise ValueError(
            f"there are {noisy.size} noisy labels and {len(found)} examples in the clusters; give "
            "one label an example, in the same order."
        )
    shape = (found.num_clusters, num_classes)
    flat = found.assignments * num_classes + noisy
    classes = np.bincount(flat, minlength=shape[0] * shape[1]).reshape(shape).argmax(axis=1)
    agrees = noisy == classes[found.assignments]
    labelled = np.flatnonzero(agrees)
    return DenoisedLabels(
        labelled=labelled,
        labels=noisy[labelled],
        unlabelled=np.flatnonzero(~agrees),
        cluster_classes=classes,
        kept_fraction=labelled.size / noisy.size,
        mechanism=mechanism,
        cluster_accuracy=accuracy,
    )


def _checked_accuracy(value: Any) -> float:
    """Returns a share in [0, 1], or raises."""
    return 1.0 if value == 1 else _validate.probability_below_one("cluster_accuracy", value)
