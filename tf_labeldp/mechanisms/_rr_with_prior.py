"""RRWithPrior: RRTop-k with the best k for each prior (Algorithm 2 of ``ghazi2021``)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.mechanisms import _top_k
from tf_labeldp.mechanisms._prior_mechanism import PriorMechanism


@dataclasses.dataclass(frozen=True)
class RRWithPrior(PriorMechanism):
    """The epsilon-DP channel that keeps a label drawn from the prior most often.

    For each prior it runs RRTop-k with the k* that maximises
    ``w_k = e^eps / (e^eps + k - 1) * (sum of the k largest priors)``; no epsilon-DP channel has a
    larger ``Pr[output = input]`` under the prior (``ghazi2021``, Theorem 3).

    Privacy: (epsilon, 0)-DP for the replacement of one label (``ghazi2021``, Corollary 2), if the
    prior of a label does not depend on that label: k* is computed from the prior alone.

    Source: ``ghazi2021``, Algorithm 2. Ties between classes go to the smaller index, ties between
    set sizes to the smaller set.

    Attributes:
        epsilon: finite and above zero.
        num_classes: K, at least 2.

    Example:
        >>> mechanism = RRWithPrior(epsilon=2.0, num_classes=4)
        >>> mechanism.optimal_k([0.5, 0.3, 0.1, 0.1]).tolist()
        [4]
        >>> mechanism.optimal_k([[0.97, 0.01, 0.01, 0.01], [0.25, 0.25, 0.25, 0.25]]).tolist()
        [1, 4]
    """

    def optimal_k(self, priors: Any) -> np.ndarray:
        """Returns k* for each prior.

        Args:
            priors: probabilities of shape (K,) or (n, K); rows sum to one (tolerance 1e-4).

        Returns:
            ``int64`` array of shape (1,) or (n,), in 1..K.

        Raises:
            ValueError: wrong shape or not probabilities.
        """
        rows = _validate.prior_rows("priors", priors, None, self.num_classes)
        return self.set_sizes(rows)

    def set_sizes(self, priors: np.ndarray) -> np.ndarray:
        """Returns k* for each checked row of priors (n, K): ``int64`` (n,)."""
        return _top_k.optimal_set_size(priors, self.epsilon)
