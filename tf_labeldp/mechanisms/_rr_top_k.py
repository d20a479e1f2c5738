"""RRTop-k: randomized response on the k most likely classes (Algorithm 1 of ``ghazi2021``)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import pure_dp_event
from tf_labeldp.mechanisms import _top_k
from tf_labeldp.mechanisms._base import LabelMechanism

if TYPE_CHECKING:
    from tf_labeldp.accounting._events import DpEvent


@dataclasses.dataclass(frozen=True)
class RRTopK(LabelMechanism):
    """Randomized response on the k classes of largest prior; other labels answer uniformly in it.

    Privacy: (epsilon, 0)-DP for the replacement of one label (``ghazi2021``, Lemma 1), if the prior
    of a label does not depend on that label. For 2 <= k the worst log-ratio equals epsilon; for
    k = 1 the output is constant.

    Source: ``ghazi2021``, Algorithm 1. Of classes with equal prior those with the smaller index
    enter the set first.

    Attributes:
        epsilon: finite and above zero.
        num_classes: K, at least 2.
        k: size of the set, in 1..K.

    Example:
        >>> mechanism = RRTopK(epsilon=1.0, num_classes=5, k=2)
        >>> mechanism.transition_matrix([0.4, 0.35, 0.15, 0.05, 0.05])[1].round(6).tolist()
        [0.268941, 0.731059, 0.0, 0.0, 0.0]
    """

    k: int

    uses_priors = True

    def __post_init__(self) -> None:
        """Checks the ranges."""
        super().__post_init__()
        k = _validate.integer_at_least("k", self.k, 1)
        if k > self.num_classes:
            raise ValueError(
                f"k must be at most num_classes={self.num_classes}, got {k}. Use "
                "RandomizedResponse to answer among all classes."
            )
        object.__setattr__(self, "k", k)

    def randomize(
        self, labels: Any, priors: Any = None, *, rng: np.random.Generator | None = None
    ) -> np.ndarray:
        """Returns one noisy label for each label, inside the label's top-k set.

        Args:
            labels: integers of shape (n,) in 0..K-1.
            priors: probabilities of shape (K,) or (n, K); rows sum to one (tolerance 1e-4).
            rng: a generator for repeatable (not private) runs; None takes secure random bits.

        Returns:
            ``int64`` array of shape (n,) in 0..K-1.

        Raises:
            TypeError: the labels are not integers.
            ValueError: labels or priors out of range or of a wrong shape, or priors missing.
        """
        labels = _validate.class_indices("labels", labels, self.num_classes)
        rows = required_priors(self, priors, labels.size)
        size = np.full(labels.shape, self.k, dtype=np.int64)
        return _top_k.randomize_in_top_k(labels, rows, size, self.epsilon, rng)

    def transition_matrix(self, prior: Any = None) -> np.ndarray:
        """Returns ``P[output | input]`` under one prior of shape (K,), ``float64`` (K, K)."""
        row = single_prior(self, prior)
        return _top_k.top_k_transition_matrix(row, self.k, self.epsilon)

    def dp_event(self) -> DpEvent:
        """Returns the event of binary randomized response, which dominates this mechanism."""
        return pure_dp_event(self.epsilon)


def required_priors(mechanism: LabelMechanism, priors: Any, num_rows: int) -> np.ndarray:
    """Returns checked prior rows, (1, K) or (n, K), or raises where they are missing."""
    if priors is None:
        raise ValueError(
            f"{type(mechanism).__name__} needs priors of shape ({mechanism.num_classes},) or "
            f"({num_rows}, {mechanism.num_classes}). Without any, use RandomizedResponse."
        )
    return _validate.prior_rows("priors", priors, num_rows, mechanism.num_classes)


def single_prior(mechanism: LabelMechanism, prior: Any) -> np.ndarray:
    """Returns one checked prior of shape (K,), or raises."""
    shape = np.shape(prior)
    if prior is None or shape != (mechanism.num_classes,):
        raise ValueError(
            f"transition_matrix of {type(mechanism).__name__} needs one prior of shape "
            f"({mechanism.num_classes},), got {'None' if prior is None else shape}. "
            "Pass one row at a time."
        )
    return _validate.prior_rows("prior", prior, None, mechanism.num_classes)[0]
