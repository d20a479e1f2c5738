"""RRTop-k: randomized response on the k most likely classes (Algorithm 1 of ``ghazi2021``)."""

from __future__ import annotations

import dataclasses

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.mechanisms._prior_mechanism import PriorMechanism


@dataclasses.dataclass(frozen=True)
class RRTopK(PriorMechanism):
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

    def set_sizes(self, priors: np.ndarray) -> np.ndarray:
        """Returns k for each row of priors (n, K): ``int64`` (n,)."""
        return np.full(priors.shape[0], self.k, dtype=np.int64)
