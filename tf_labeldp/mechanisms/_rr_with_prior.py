"""RRWithPrior: RRTop-k with the best k for each prior (Algorithm 2 of ``ghazi2021``)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from tf_labeldp import _validate
from tf_labeldp.accounting import pure_dp_event
from tf_labeldp.mechanisms import _top_k
from tf_labeldp.mechanisms._base import LabelMechanism
from tf_labeldp.mechanisms._rr_top_k import required_priors, single_prior

if TYPE_CHECKING:
    from tf_labeldp.accounting._events import DpEvent


@dataclasses.dataclass(frozen=True)
class RRWithPrior(LabelMechanism):
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

    uses_priors = True

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
        return _top_k.optimal_set_size(rows, self.epsilon)

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
            ValueError: labels or priors out of range or of a wrong shape, or priors missing.
        """
        labels = _validate.class_indices("labels", labels, self.num_classes)
        rows = required_priors(self, priors, labels.size)
        size = np.broadcast_to(_top_k.optimal_set_size(rows, self.epsilon), labels.shape)
        return _top_k.randomize_in_top_k(labels, rows, size, self.epsilon, rng)

    def transition_matrix(self, prior: Any = None) -> np.ndarray:
        """Returns ``P[output | input]`` under one prior of shape (K,), ``float64`` (K, K)."""
        row = single_prior(self, prior)
        k = int(_top_k.optimal_set_size(row[np.newaxis, :], self.epsilon)[0])
        return _top_k.top_k_transition_matrix(row, k, self.epsilon)

    def dp_event(self) -> DpEvent:
        """Returns the event of binary randomized response, which dominates this mechanism."""
        return pure_dp_event(self.epsilon)
