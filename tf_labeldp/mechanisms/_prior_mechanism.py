"""What RRTop-k and RRWithPrior share: randomized response among a prior's likeliest classes."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.mechanisms import _top_k
from tf_labeldp.mechanisms._base import FrozenClassification


@dataclasses.dataclass(frozen=True)
class PriorMechanism(FrozenClassification):
    """Runs RRTop-k (Algorithm 1 of ``ghazi2021``) with a k that the prior alone decides.

    Privacy: (epsilon, 0)-DP for the replacement of one label (``ghazi2021``, Lemma 1), if the prior
    of a label does not depend on that label.

    Attributes:
        epsilon: finite and above zero.
        num_classes: K, at least 2.

    Example:
        >>> from tf_labeldp.mechanisms import RRTopK
        >>> isinstance(RRTopK(epsilon=1.0, num_classes=3, k=2), PriorMechanism)
        True
    """

    public_input = "priors"

    @abc.abstractmethod
    def set_sizes(self, priors: np.ndarray) -> np.ndarray:
        """Returns k for each checked row of priors (n, K): ``int64`` (n,), in 1..K."""

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
        if priors is None:
            raise ValueError(
                f"{type(self).__name__} needs priors of shape ({self.num_classes},) or "
                f"({labels.size}, {self.num_classes}). Without any, use RandomizedResponse."
            )
        rows = _validate.prior_rows("priors", priors, labels.size, self.num_classes)
        sizes = np.broadcast_to(self.set_sizes(rows), labels.shape)
        return _top_k.randomize_in_top_k(labels, rows, sizes, self.epsilon, rng)

    def transition_matrix(self, prior: Any = None) -> np.ndarray:
        """Returns ``P[output | input]`` under one prior of shape (K,), ``float64`` (K, K)."""
        shape = np.shape(prior)
        if prior is None or shape != (self.num_classes,):
            raise ValueError(
                f"transition_matrix of {type(self).__name__} needs one prior of shape "
                f"({self.num_classes},), got {'None' if prior is None else shape}. "
                "Pass one row at a time."
            )
        rows = _validate.prior_rows("prior", prior, None, self.num_classes)
        k = int(self.set_sizes(rows)[0])
        return _top_k.top_k_transition_matrix(rows[0], k, self.epsilon)
